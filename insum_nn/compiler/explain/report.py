"""Explain how a statement is computed: as text, and as an HTML page.

An `Explanation` holds text and sizes, but no tensors: it may be kept, compared and pickled.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.explain.loop_nest import ExtentSource, extent_sources, loop_notes, nest_lines
from insum_nn.compiler.explain.sections import section, table
from insum_nn.compiler.ir.build import OUTPUT, Names
from insum_nn.compiler.ir.nodes import Buffer, Size
from insum_nn.compiler.kernels.c_program import CProgram
from insum_nn.compiler.kernels.description import Description
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.lang.bind import Bound, Extents, layout_of, show_dtype, show_shape
from insum_nn.compiler.lang.epilogue import PLAIN, Epilogue
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.execution import Executable
from insum_nn.facts import IndexFacts

__all__ = ["Decision", "Explanation", "ExtentSource", "TensorRow", "explain_program"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice and its reason."""

    topic: str
    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.choice}; {self.reason}"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a call. Shape, dtype and device are `None` when only the text is explained."""

    name: str
    kind: str
    accesses: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: str | None = None
    facts: IndexFacts | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a statement is computed: `str()` is the text.

    Attributes:
        statement: the statement.
        options: the options it was compiled with.
        loop_nest: its meaning as a loop nest in Python.
        extents: the extent of each index and of each output axis that no index names, with its source.
        output_shape: shape of the result; `None` when only the text is explained.
        tensors: the tensors read, and the initial value where there is one.
        backend: `"c"`, `"eager"` or `"triton"`; `None` without tensors, and for a call without a term.
        reason: why this backend, or why there is no program.
        torch_code: the library calls that run. For a C function it shows what a call does around it, by names of the
            package, and does not run by itself. `None` for Triton's kernels.
        parts: of a statement that runs as several, what becomes of each.
        schedule: how a call is carried out.
        compile_seconds: time spent on planning, lowering and compiling this program.
        call_seconds: median time of a call, where it was measured.

    >>> from insum_nn.compiler.api import compile
    >>> print(compile("y[i] += A[i,j] * x[j]").explain().loop_nest)
    y = zeros((A.shape[0],))
    for i in range(A.shape[0]):      # parallel: written
        for j in range(A.shape[1]):  # sequential: summed
            y[i] += A[i,j] * x[j]
    """

    statement: Statement
    options: Options
    loop_nest: str
    extents: tuple[ExtentSource, ...]
    output_shape: tuple[int, ...] | None
    tensors: tuple[TensorRow, ...]
    backend: str | None
    reason: str
    torch_code: str | None
    parts: tuple[Explanation, ...] = ()
    schedule: str | None = None
    compile_seconds: float | None = None
    call_seconds: float | None = None
    _bound: Bound | None = field(default=None, repr=False)
    _sources: list[str] = field(default_factory=list[str], compare=False, repr=False)
    _choices: tuple[Decision, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Return every choice with its reason, the backend first."""
        if self.backend is None:
            return ()
        return (Decision("backend", self.backend, self.reason), *self._choices)

    def with_choice(self, topic: str, choice: str, reason: str) -> Explanation:
        """Return the same with a choice that was made around the statement, before its own."""
        return replace(self, _choices=(Decision(topic, choice, reason), *self._choices))

    def kernel_source(self) -> str | None:
        """Return the code that runs: C functions, generated kernels, or torch calls; `None` without a program."""
        if self.parts:
            return "\n\n".join(f"# {part.statement}\n{part.kernel_source()}" for part in self.parts)
        return "\n\n".join(self._sources) if self.backend in ("c", "triton") else self.torch_code

    def __str__(self) -> str:
        return "\n\n".join(section(title, body) for title, body in self.sections())

    __repr__ = __str__

    def sections(self) -> list[tuple[str, str]]:
        """Return titles and texts, in order."""
        found = [
            ("statement", str(self.statement)),
            ("loop nest", self.loop_nest),
            ("extents", self._extents()),
            ("tensors", self._tensors()),
        ]
        if self.backend is None:
            return [*found, ("program", f"none: {self.reason}")]
        found.append(("decisions", "\n".join(map(_paragraph, self.decisions))))
        return [*found, *self._code_sections(), ("schedule and time", table((), self._timing()))]

    def _code_sections(self) -> Iterator[tuple[str, str]]:
        """Yield the code that runs."""
        for number, part in enumerate(self.parts, start=1):
            yield f"statement {number} of {len(self.parts)}", str(part.statement)
            yield from part._code_sections()
        if self.parts:
            return
        if self.torch_code is not None:
            title = {"c": "around the C function", "triton": "around the kernels"}.get(str(self.backend), "torch code")
            yield title, self.torch_code
        if self._sources:
            yield "kernel source", "\n\n".join(self._sources)

    def _extents(self) -> str:
        rows = [(row.name, "?" if row.extent is None else str(row.extent), row.source) for row in self.extents]
        if self.output_shape is not None:
            rows.append((self.statement.output.name, show_shape(self.output_shape), "the result"))
        return table(("name", "extent", "from"), rows)

    def _tensors(self) -> str:
        rows: list[tuple[str, ...]] = []
        for row in self.tensors:
            details: tuple[str, ...] = ()
            if row.shape is not None and row.dtype is not None:
                facts = "" if row.facts is None else _facts(row.facts)
                details = (show_shape(row.shape), show_dtype(row.dtype), row.device or "", facts)
            rows.append((row.name, row.kind, ", ".join(row.accesses), *details))
        detailed = any(row.shape is not None for row in self.tensors)
        head = ("tensor", "kind", "read as", "shape", "dtype", "device", "facts")
        return table(head if detailed else head[:3], rows)

    def _timing(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("schedule", self.schedule or "")]
        if self.compile_seconds is not None:
            rows.append(("compiled in", _seconds(self.compile_seconds)))
        if self._bound is not None and self._bound.static:
            fixed = ", ".join(f"{name} = {extent}" for name, extent in self._bound.static)
            rows.append(("compiled for", f"{fixed}; every other extent may change"))
        if self.call_seconds is None:
            rows.append(("one call", "not measured; explain(measure=True) does"))
        else:
            rows.append(("one call", _seconds(self.call_seconds)))
        return rows


def explain_program(
    statement: Statement,
    options: Options,
    extents: Extents | None,
    program: Executable | None,
    inputs: tuple[Sequence[Tensor], Tensor | None] | None,
    seconds: float | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    out_shape: Sequence[int | None] | None = None,
    epilogue: Epilogue = PLAIN,
    facts: Mapping[str, IndexFacts] | None = None,
) -> Explanation:
    """Explain a statement, or a call of it.

    Args:
        statement: a checked statement.
        options: compile options.
        extents: extents of the call; `None` explains the text alone.
        program: what runs; `None` for the text alone, and when the call has no term.
        inputs: the tensors in the layout's order and the initial value; they are described, not kept.
        seconds: measured time of a call.
        sizes: the call's `sizes=`, to say where an extent came from.
        out_shape: the call's `out_shape=`, likewise.
        epilogue: the activation and the cast after the sum.
        facts: of the statement's index tensors; default those of the program.
    """
    has_initial = inputs is not None and inputs[1] is not None
    bound = program.bound if program is not None else None
    rows = tuple(extent_sources(statement, extents, has_initial, sizes, out_shape))
    tensors = tuple(_tensor_rows(statement, bound, inputs))
    output = extents.output if extents is not None else None
    index_extents = {row.name: row.extent for row in rows if row.extent is not None}
    shapes = {row.name: row.shape for row in tensors if row.shape is not None}
    if facts is None:
        facts = {} if bound is None else bound.named_facts
    drop_outside = bound is not None and bound.drop_outside
    notes = loop_notes(statement, facts, index_extents, shapes, drop_outside=drop_outside)
    if program is None:
        empty = "the index space is empty, so no term is computed"
        runs, reason = Description(), "pass tensors to see it" if extents is None else empty
    else:
        assert inputs is not None
        assert extents is not None
        runs, reason = _what_runs(program, extents, *inputs), program.reason
    return Explanation(
        statement=statement,
        options=options,
        loop_nest="\n".join(nest_lines(statement, rows, output, notes, epilogue, has_initial=has_initial)),
        extents=rows,
        output_shape=output,
        tensors=tensors,
        backend=program.backend if program is not None else None,
        reason=reason,
        torch_code=runs.torch_code,
        schedule=runs.schedule,
        compile_seconds=program.compile_seconds if program is not None else None,
        call_seconds=seconds,
        _bound=bound,
        _sources=[source.text.strip() for source in runs.sources],
        _choices=tuple(Decision(*row) for row in runs.choices),
    )


def _what_runs(program: Executable, extents: Extents, tensors: Sequence[Tensor], initial: Tensor | None) -> Description:
    """Ask the program what it runs for a call."""
    library = program.run
    if isinstance(library, CProgram):
        return library.described()
    if isinstance(library, Generated):
        return library.described(tensors, extents, initial)
    assert library is not None
    schedule = "library calls over the whole index space"
    return Description(schedule, choices=tuple(library.decisions), torch_code=_torch_code(program.bound, library))


def _torch_code(bound: Bound, graph: CallGraph) -> str:
    """Return the torch calls of a statement as Python.

    A comment says what each numbered argument stands for. Statements that free memory are left out.
    """
    names, output = Names(bound.statement), bound.statement.output.name
    tensors = {canonical: name for name, canonical in names.tensors.items()}
    indices = {letter: name for name, letter in names.indices.items()}

    def argument(node: Buffer | Size) -> str:
        if isinstance(node, Buffer):
            return tensors.get(node.name, f"{output}, the initial value")
        if node.name in indices:
            return f"the extent of {indices[node.name]}"
        return f"the extent of axis {node.name.removeprefix(f'{OUTPUT}_')} of {output}"

    called = [f"# {call}: {argument(stands_for)}" for call, stands_for in graph.arguments]
    return "\n".join([*called, graph.code.strip()])


# Tensors.


def _tensor_rows(
    statement: Statement, bound: Bound | None, inputs: tuple[Sequence[Tensor], Tensor | None] | None
) -> Iterator[TensorRow]:
    layout = layout_of(statement)
    for position, name in enumerate(layout.tensors):
        read = dict.fromkeys(str(a) for a in statement.accesses() if a.name == name and a is not statement.output)
        kinds = ("index" if name in layout.index_tensors else "", "factor" if name in layout.value_tensors else "")
        facts = bound.facts[position] if bound is not None and name in layout.index_tensors else None
        row = TensorRow(name, " and ".join(filter(None, kinds)), tuple(read))
        yield row if inputs is None else _described(row, inputs[0][position], facts)
    if inputs is not None and inputs[1] is not None:
        row = TensorRow(statement.output.name, "initial value", (str(statement.output),))
        yield _described(row, inputs[1], None)


def _described(row: TensorRow, tensor: Tensor, facts: IndexFacts | None) -> TensorRow:
    return TensorRow(row.name, row.kind, row.accesses, tuple(tensor.shape), tensor.dtype, str(tensor.device), facts)


# Text.


def _paragraph(decision: Decision) -> str:
    return textwrap.fill(str(decision), 110, initial_indent="- ", subsequent_indent="  ", break_long_words=False)


def _facts(facts: IndexFacts) -> str:
    masked = {True: "may have missing entries", False: "no missing entries", None: "missing entries unknown"}[
        facts.masked
    ]
    shown = {"sorted": facts.sorted, "unique": facts.unique, "validated": facts.proven}
    others = [name for name, holds in shown.items() if holds]
    together = [f"unique with {' and '.join(facts.unique_with)}"] if facts.unique_with else []
    return ", ".join([masked, *others, *together])


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
