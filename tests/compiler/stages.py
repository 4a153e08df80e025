"""One statement at every stage of the compiler, as CONTRIBUTING.md shows it.

python -m tests.compiler.stages             print the stages
python -m tests.compiler.stages --write     write them to CONTRIBUTING.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from insum_nn.compiler.ir.build import build
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.kernels.source import Strides, nest_of, write_kernel
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.check import check_statement
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.passes.pipeline import lower
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.form import make_form
from insum_nn.facts import IndexFacts
from tests.source_tree import ROOT

__all__ = ["COMMAND", "document", "stages", "with_stages"]

COMMAND = "python -m tests.compiler.stages --write"
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- stages: begin -->", "<!-- stages: end -->"
EXPRESSION = "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]"
# Rows of the output, which no tensor shows.
ROWS = 1024


def stages() -> Iterator[tuple[str, str]]:
    """Yield each stage: what was done, and the text."""
    statement = parse(EXPRESSION)
    check_statement(statement)
    yield "The text", EXPRESSION
    tensors = {
        "Row": torch.zeros(4096, dtype=torch.int64),
        "Val": torch.ones(4096, 16),
        "Col": torch.zeros(4096, 16, dtype=torch.int64),
        "B": torch.ones(2048, 128),
    }
    facts = {"Row": IndexFacts(sorted=True, masked=False), "Col": IndexFacts(masked=True)}
    bound = bind(statement, tensors, None, facts=facts)
    algorithm = build(bound)
    about = "`ir/build.py`: the algorithm, under canonical names; `free` indices are written, the others summed"
    yield about, show(algorithm)
    about = "`passes/pipeline.py: lower`, for C: a call sorts the entries of `x0`, so that rows are summed alone"
    yield about, show(lower(algorithm).kernel)
    extents = resolve_extents(statement, [tensors[name] for name in bound.layout.tensors], None, {}, (ROWS, None))
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    form = make_form(bound, sizes, extents.output, {}, deterministic=False)
    schedule, strides = default_schedule(form), Strides((True,) * len(tensors))
    yield (
        f"`passes/pipeline.py: place`, for Triton, under `{schedule}`",
        show(nest_of(form, schedule, strides, "ieee")),
    )
    yield "`codegen/triton.py`: the text of that kernel", write_kernel(form, schedule, strides, "ieee").text.strip()


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
