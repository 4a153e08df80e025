"""One statement at every stage of the compiler, as CONTRIBUTING.md shows it.

python -m tests.compiler.stages             print the stages
python -m tests.compiler.stages --write     write them to CONTRIBUTING.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from insum_nn.compiler.forms.defaults import default_schedule
from insum_nn.compiler.forms.form import make_form
from insum_nn.compiler.forms.nest import nest_of, row_walk_of, write_kernel
from insum_nn.compiler.forms.parameters import Strides
from insum_nn.compiler.ir.build import build
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.lang import syntax
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.check import check_statement
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.facts import IndexFacts
from tests.source_tree import ROOT

__all__ = ["COMMAND", "document", "stages", "with_stages"]

COMMAND = "python -m tests.compiler.stages --write"
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- stages: begin -->", "<!-- stages: end -->"
EXPRESSION = "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]"
# Rows of the output, which no tensor shows.
ROWS = 1024
# The width that a node may take on one line.
WIDTH = 118


def stages() -> Iterator[tuple[str, str]]:
    """Yield each stage: what was done, and the text."""
    statement = parse(EXPRESSION)
    check_statement(statement)
    yield "The text", EXPRESSION
    yield "`lang.parser.parse`: a `Statement`, whose nodes know their places in the text", pretty(statement)

    tensors = {
        "Row": torch.zeros(4096, dtype=torch.int64),
        "Val": torch.ones(4096, 16),
        "Col": torch.zeros(4096, 16, dtype=torch.int64),
        "B": torch.ones(2048, 128),
    }
    facts = {"Row": IndexFacts(sorted=True, masked=False), "Col": IndexFacts(masked=True)}
    bound = bind(statement, tensors, None, facts=facts)
    about = "`lang.bind.bind`: a `Bound`, which is all that a compiled program depends on, without sizes"
    yield about, pretty(replace(bound, statement=...)).replace("Ellipsis", "...")

    about = "`ir.build.build`: the algorithm, under canonical names; `free` indices are written, the others summed"
    yield about, show(build(bound))
    extents = resolve_extents(statement, [tensors[name] for name in bound.layout.tensors], None, {}, (ROWS, None))
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    form = make_form(bound, sizes, extents.output, {}, deterministic=False)
    schedule, strides = default_schedule(form), Strides((True,) * len(tensors))
    about = "`passes.own_rows`: a program walks the terms of a row, so no two programs write to one cell"
    yield about, show(row_walk_of(form, schedule, strides, "ieee")[0].kernel)
    yield (
        f"`passes.tile`, under the schedule `{schedule}`: programs, lanes and serial loops",
        show(nest_of(form, schedule, strides, "ieee")),
    )
    source = write_kernel(form, schedule, strides, "ieee")
    yield "`codegen.triton`: the text of the kernel", source.text.strip()
    arguments = ", ".join(
        f"{a.kind} {a.name}{'' if a.axis < 0 else f' of axis {a.axis}'}".strip() for a in source.arguments
    )
    about = (
        "`kernels.launch`: what it is called with (`begin` is made by `kernels.row_partition`, `@out` is the output)"
    )
    yield about, f"arguments: {arguments}\nprograms:  {show(source.grid)}"


def pretty(node: Any, indent: int = 0) -> str:
    """Return the constructor of a node, on one line where that is short.

    Nodes of the syntax tree take their fields by position, others by name; what `repr` hides, and what has its default
    value, is left out.
    """
    if isinstance(node, tuple) and any(is_dataclass(part) for part in node):
        begin, end = "(", ")"
        parts = [pretty(part, indent + 4) for part in node]
        short = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    elif is_dataclass(node) and not isinstance(node, type):
        begin, end = f"{type(node).__name__}(", ")"
        shown = [field for field in fields(node) if field.repr and getattr(node, field.name) != field.default]
        names = ["" if type(node).__module__ == syntax.__name__ else f"{field.name}=" for field in shown]
        values = [pretty(getattr(node, field.name), indent + 4) for field in shown]
        parts = [name + value for name, value in zip(names, values, strict=True)]
        short = f"{begin}{', '.join(parts)}{end}"
    else:
        return repr(node)
    if indent + len(short) <= WIDTH and "\n" not in short:
        return short
    inner = " " * (indent + 4)
    return "\n".join([begin, *(f"{inner}{part}," for part in parts), " " * indent + end])


def document() -> str:
    """Return all stages as Markdown."""
    return "\n".join(f"{title}:\n\n```text\n{text}\n```\n" for title, text in stages())


def with_stages(text: str) -> str:
    """Return the text of a document with what stands between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"{DOCUMENT.name} has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{document()}\n{END}{after}"


def main() -> None:
    """Print the stages, or write them."""
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(with_stages(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(document())


if __name__ == "__main__":
    main()
