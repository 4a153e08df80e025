"""`explain()`: what becomes of a statement, as text, as one HTML page, and as a picture of the data flow.

An `Explanation` holds text, sizes and the plan, but no tensors: it may be kept, compared and pickled.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, fx

from insum_nn.compiler.codegen import inductor
from insum_nn.compiler.explain.dataflow import data_flow
from insum_nn.compiler.explain.html import Section, Table, page, panel
from insum_nn.compiler.explain.loop_nest import (
    ExtentSource,
    clip,
    epilogue_line,
    extent_sources,
    initial_line,
    loop_lines,
    loop_notes,
    text_roles,
)
from insum_nn.compiler.explain.svg import draw
from insum_nn.compiler.forms.generated import Generated
from insum_nn.compiler.forms.keyed import Keyed
from insum_nn.compiler.lang.bind import Bound, Extents, layout_of
from insum_nn.compiler.lang.epilogue import PLAIN, Epilogue
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.chained import Chained
from insum_nn.compiler.plans.fx_lowering import extent_arguments, lower
from insum_nn.compiler.plans.plan import Decision, Plan, Role, SparseProduct
from insum_nn.compiler.runtime.execution import Executable, split_arguments
from insum_nn.errors import InsumBackendError
from insum_nn.facts import IndexFacts

__all__ = ["Explanation", "ExtentSource", "TensorRow", "explain_program"]

# Lines and columns of `short()`.
_SHORT_LOOPS = 6
_SHORT_DECISIONS = 5
_SHORT_WIDTH = 110


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
    """What becomes of a statement: `str()` for all of it, `short()` for a glance, `html()` and `svg()` for pictures.

    Attributes:
        statement: the statement.
        options: the options it was compiled with.
        loop_nest: its meaning as pseudo-code.
        extents: the extent of each index and of each output axis that no index names, with its source.
        output_shape: shape of the result; `None` when only the text is explained.
        tensors: the tensors read, and the starting value where there is one.
        plan: the plan; `None` without tensors, and for a call without a single term.
        backend: `"eager"`, `"inductor"` or `"triton"`; `None` like the plan.
        reason: why this back end, or why there is no program.
        fx_code: the plan as torch calls.
        schedule: how a call is carried out.
        compile_seconds: time spent on planning, lowering and compiling this program.
        compiled: nothing is left to compile at the first call.
        call_seconds: median time of a call, where it was measured.
        roles: what each index does, outermost first.

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
    plan: Plan | None
    backend: str | None
    reason: str
    fx_code: str | None
    schedule: str | None = None
    compile_seconds: float | None = None
    compiled: bool = True
    call_seconds: float | None = None
    roles: tuple[Role, ...] = ()
    _sizes: Extents | None = field(default=None, repr=False)
    _sources: list[str] = field(default_factory=list[str], compare=False, repr=False)
    _choices: tuple[Decision, ...] = ()
    _around: tuple[Decision, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every choice with its reason, the back end first."""
        if self.plan is None or self.backend is None:
            return ()
        chosen = Decision("backend", self.backend, self.reason)
        # A generated kernel does not follow the plan's steps; its own choices take their place.
        return (chosen, *self._around, *(self._choices if self.backend == "triton" else self.plan.decisions))

    def with_choice(self, topic: str, choice: str, reason: str) -> Explanation:
        """The same with a choice that was made around the statement, before its own candidates."""
        return replace(self, _around=(Decision(topic, choice, reason), *self._around))

    @property
    def facts(self) -> dict[str, IndexFacts]:
        """What the program was told about its index tensors."""
        return {row.name: row.facts for row in self.tensors if row.facts is not None}

    def kernel_source(self) -> str | None:
        """The code that runs: a generated kernel, Inductor's kernels, or the torch calls of the eager path.

        `None` without a program.

        Inductor compiles the graph once more, for the shapes of the call, the first time this is asked.

        Raises:
            InsumBackendError: Inductor, or the device that the explanation was made on, is not available here.
        """
        if self.backend == "triton":
            return self._sources[0]
        if self.plan is None or self.backend != "inductor":
            return self.fx_code
        if not self._sources:
            bound = self.plan.bound
            graph = lower(self.plan, self.options, compiled=True)
            try:
                tensors, integers, start = split_arguments(bound, _stand_ins(bound, self.tensors, self._sizes))
                found = inductor.kernel_sources(graph, bound, self.options, integers, tensors, start)
            except Exception as error:
                raise InsumBackendError(
                    f"no kernel source for '{self.statement}': {type(error).__name__}: {error}",
                    fix="ask on a machine with the call's device and a working compiler.",
                ) from error
            self._sources.extend(found)
        return "\n\n".join(self._sources)

    def __str__(self) -> str:
        return "\n\n".join(section.text() for section in self.sections())

    def _repr_html_(self) -> str:
        return panel(str(self.statement), self.svg(), self.sections()[1:])

    def short(self) -> str:
        """About 15 lines: statement, loop nest, back end and why, decisions."""
        loops = loop_lines(
            self.statement,
            self.extents,
            self.roles,
            merge=len(self.roles) > _SHORT_LOOPS,
            width=_SHORT_WIDTH - 30,
        )
        start = self.loop_nest.split("\n", 1)[0]
        lines = [str(self.statement), *(f"  {line}" for line in (start, *loops))]
        lines.append(f"{self.backend or 'no program'}: {self.reason}")
        decisions = self.decisions[1:]
        shown = decisions if len(decisions) <= _SHORT_DECISIONS else decisions[: _SHORT_DECISIONS - 1]
        lines += [f"- {decision}" for decision in shown]
        if len(decisions) > len(shown):
            lines.append(f"- and {len(decisions) - len(shown)} more")
        if self.call_seconds is not None:
            lines.append(f"one call takes {_seconds(self.call_seconds)}")
        return "\n".join(clip(line, _SHORT_WIDTH) for line in lines)

    def __repr__(self) -> str:
        return self.short()

    def svg(self) -> str:
        """The data flow as an SVG picture: tensors, gathers, contractions, combination, output."""
        flow = data_flow(self.statement, self.plan, self._shapes(), self._index_sizes())
        return draw(flow.boxes, flow.edges, title=f"data flow of {self.statement}")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {row.name: row.shape for row in self.tensors if row.shape is not None}
        if self.output_shape is not None:
            shapes[self.statement.output.name] = self.output_shape
        return shapes

    def _index_sizes(self) -> dict[str, int]:
        return {row.name: row.extent for row in self.extents if row.extent is not None}

    def html(self) -> str:
        """One self-contained page: the picture, then every section; nothing is loaded, nothing is executed."""
        return page(str(self.statement), self.svg(), self.sections()[1:])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page (`.html`), the picture (`.svg`) or the text (`.txt`); returns the path.

        Raises:
            ValueError: the name ends otherwise.
        """
        target = Path(path)
        makers = {".html": self.html, ".svg": self.svg, ".txt": lambda: str(self) + "\n"}
        maker = makers.get(target.suffix.lower())
        if maker is None:
            raise ValueError(f"cannot save an explanation as {target.name!r}; end its name in {', '.join(makers)}")
        target.write_text(maker(), encoding="utf-8")
        return target

    def sections(self) -> list[Section]:
        """The content in order, for the text and for the page."""
        sections = [
            Section("statement", code=str(self.statement)),
            Section("loop nest", code=self.loop_nest),
            Section("extents", table=self._extent_table()),
            Section("tensors", table=self._tensor_table()),
        ]
        if self.plan is None:
            return [*sections, Section("program", note=f"none: {self.reason}")]
        sections.append(Section("plan", code=_plan_text(self.plan, self._index_sizes())))
        rows = [(d.topic, d.choice, d.reason) for d in self.decisions]
        table = Table(("about", "choice", "because"), rows)
        sections.append(Section("decisions", table=table, plain="\n".join(map(_paragraph, self.decisions))))
        sections.append(Section("torch code", code=self.fx_code or "", folded=True))
        sections.append(self._kernel_section())
        sections.append(Section("schedule and time", table=Table((), self._timing())))
        return sections

    def _kernel_section(self) -> Section:
        if self.backend in ("inductor", "triton") and self._sources:
            return Section("kernel source", code="\n\n".join(self._sources), folded=True)
        if self.backend == "inductor":
            return Section("kernel source", note="written by Inductor; kernel_source() compiles once more and shows it")
        return Section("kernel source", note="the torch code above: each line is a library call")

    def _extent_table(self) -> Table:
        rows = [(row.name, _known(row.extent), row.source) for row in self.extents]
        if self.output_shape is not None:
            rows.append((self.statement.output.name, _shape(self.output_shape), "the result"))
        return Table(("name", "extent", "from"), rows)

    def _tensor_table(self) -> Table:
        rows: list[tuple[str, ...]] = []
        for row in self.tensors:
            known = () if row.shape is None else (_shape(row.shape), _dtype(row.dtype), row.device or "")
            facts = (_facts(row.facts) if row.facts is not None else "",) if known else ()
            rows.append((row.name, row.kind, ", ".join(row.accesses), *known, *facts))
        detailed = any(row.shape is not None for row in self.tensors)
        head = ("tensor", "kind", "read as", "shape", "dtype", "device", "facts")
        return Table(head if detailed else head[:3], rows)

    def _timing(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("schedule", self.schedule or "")]
        if self.compile_seconds is not None:
            rest = "" if self.compiled else "; Inductor compiles at the first call"
            rows.append(("compiled in" if self.compiled else "planned in", f"{_seconds(self.compile_seconds)}{rest}"))
        if self.plan is not None and self.plan.bound.static:
            fixed = ", ".join(f"{name} = {extent}" for name, extent in self.plan.bound.static)
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
) -> Explanation:
    """Collect what there is to say.

    Args:
        statement: a checked statement.
        options: compile options.
        extents: extents of the call; `None` explains the text alone.
        program: what runs; `None` for the text alone, and when the call has no term.
        inputs: the tensors in the layout's order and the starting value; they are described, not kept.
        seconds: measured time of a call.
        sizes: the call's `sizes=`, to say where an extent came from.
        out_shape: the call's `out_shape=`, likewise.
        epilogue: what follows the sum.
    """
    plan = program.plan if program is not None else None
    has_start = inputs is not None and inputs[1] is not None
    rows = extent_sources(statement, extents, has_start, sizes, out_shape)
    roles = plan.roles if plan is not None else text_roles(statement)
    tensors = _tensor_rows(statement, plan, inputs)
    shape = extents.output if extents is not None else None
    known = {row.name: row.extent for row in rows if row.extent is not None}
    notes = loop_notes(statement, plan, known, {row.name: row.shape for row in tensors if row.shape is not None})
    *loops, body = loop_lines(statement, rows, roles)
    inside = body[: len(body) - len(body.lstrip())]
    nest = [initial_line(statement, shape, rows, has_start), *loops, *(f"{inside}# {note}" for note in notes), body]
    if epilogue:
        nest.append(epilogue_line(statement, epilogue))
    if program is not None:
        reason = program.reason
    else:
        empty = "the index space is empty, so no term is computed"
        reason = "pass tensors to see it" if extents is None else empty
    generated = program.run if program is not None and isinstance(program.run, Generated | Keyed | Chained) else None
    sources: list[str] = []
    choices: tuple[Decision, ...] = ()
    schedule = _schedule(program) if program is not None else None
    if generated is not None and inputs is not None and extents is not None:
        source, described = generated.described(inputs[0], extents, inputs[1])
        sources, schedule = [source.text], str(source.schedule)
        choices = tuple(Decision(*each) for each in described)
    return Explanation(
        statement=statement,
        options=options,
        loop_nest="\n".join(nest),
        extents=tuple(rows),
        output_shape=shape,
        tensors=tensors,
        plan=plan,
        backend=program.backend if program is not None else None,
        reason=reason,
        fx_code=_readable(program.graph) if program is not None else None,
        schedule=schedule,
        compile_seconds=program.compile_seconds if program is not None else None,
        compiled=program is None or program.warm or program.backend != "inductor",
        call_seconds=seconds,
        roles=roles,
        _sizes=extents,
        _sources=sources,
        _choices=choices,
    )


# Tensors.


def _tensor_rows(
    statement: Statement, plan: Plan | None, inputs: tuple[Sequence[Tensor], Tensor | None] | None
) -> tuple[TensorRow, ...]:
    layout = layout_of(statement)
    rows: list[TensorRow] = []
    for position, name in enumerate(layout.tensors):
        read = [a for a in statement.accesses() if a.name == name and a is not statement.output]
        kinds = ("index" if name in layout.index_tensors else "", "factor" if name in layout.value_tensors else "")
        row = TensorRow(name, " and ".join(filter(None, kinds)), tuple(dict.fromkeys(map(str, read))))
        if inputs is not None:
            facts = plan.bound.facts[position] if plan is not None and name in layout.index_tensors else None
            row = _described(row, inputs[0][position], facts)
        rows.append(row)
    if inputs is not None and inputs[1] is not None:
        row = TensorRow(statement.output.name, "starting value", (str(statement.output),))
        rows.append(_described(row, inputs[1], None))
    return tuple(rows)


def _described(row: TensorRow, tensor: Tensor, facts: IndexFacts | None) -> TensorRow:
    return TensorRow(row.name, row.kind, row.accesses, tuple(tensor.shape), tensor.dtype, str(tensor.device), facts)


def _stand_ins(bound: Bound, rows: Sequence[TensorRow], extents: Extents | None) -> list[object]:
    """Arguments with the shapes of the call's, in the graph's order, that take no memory."""
    assert extents is not None

    def stand_in(row: TensorRow) -> Tensor:
        assert row.shape is not None
        return torch.zeros((), dtype=row.dtype, device=row.device).expand(row.shape)

    count = len(bound.layout.tensors)
    indices, axes = extent_arguments(bound)
    integers = [extents.indices[bound.layout.indices.index(name)] for name in indices]
    integers += [extents.output[axis] for axis in axes]
    return [*map(stand_in, rows[:count]), *integers, *map(stand_in, rows[count:])]


# Words.


def _plan_text(plan: Plan, sizes: Mapping[str, int]) -> str:
    """The plan's steps, each with the shape of its result."""
    width = min(88, max((len(str(step)) for step in plan.steps), default=0))
    lines: list[str] = []
    for step in plan.steps:
        # The rows of a sparse product are the output's, whose shape the extents give.
        shape = "" if isinstance(step, SparseProduct) else f"  # {_shape([sizes[label] for label in step.labels])}"
        lines.append(f"{step!s:<{width}}{shape}".rstrip())
    return "\n".join([*lines, str(plan.combine)])


def _schedule(program: Executable) -> str:
    if program.backend != "eager":
        return "kernels over the whole index space"
    if program.pieces is None:
        return "library calls over the whole index space"
    return f"library calls; in pieces along {program.plan.chunk} where the gathered tensors exceed a core's cache"


def _paragraph(decision: Decision) -> str:
    words = f"{decision.topic}: {decision.choice}; {decision.reason}"
    return textwrap.fill(words, 110, initial_indent="- ", subsequent_indent="  ", break_long_words=False)


def _readable(graph: fx.GraphModule) -> str:
    """What the numbered arguments stand for, and the code without `;  x = None` after last uses, which frees memory."""
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = [f"# {node.name}: {node.meta['stands_for']}" for node in arguments]
    code = re.sub(r";  (?:\w+ = )+None(?=\n|$)", "", str(graph.code)).strip()
    return "\n".join([*names, code])


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _known(extent: int | None) -> str:
    return "?" if extent is None else str(extent)


def _facts(facts: IndexFacts) -> str:
    masked = {True: "may hold -1", False: "holds no -1", None: "not known to hold no -1"}[facts.masked]
    others = [name for name in ("sorted", "unique", "proven") if getattr(facts, name)]
    together = [f"unique with {' and '.join(facts.unique_with)}"] if facts.unique_with else []
    return ", ".join([masked, *others, *together])


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
