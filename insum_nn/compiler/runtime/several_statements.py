"""Run programs of several statements as one call, or one by one, each of which torch records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.explain.report import Explanation
from insum_nn.compiler.lang.check import check_names
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.printed import Sizes
from insum_nn.compiler.lang.programs import is_program, parse_program
from insum_nn.compiler.lang.syntax import Apply, Number, Subscript
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.compiler.runtime.arguments import check_kinds
from insum_nn.compiler.runtime.artifact import Step
from insum_nn.compiler.runtime.autograd import Call
from insum_nn.compiler.runtime.backward import gradients_of
from insum_nn.compiler.runtime.dispatch import Spec, StatementGraph
from insum_nn.compiler.runtime.modes import followed_by, is_plain, under_autocast
from insum_nn.compiler.runtime.program import Program
from insum_nn.compiler.runtime.recorded import record
from insum_nn.compiler.runtime.traced import call_operator, constant, option_values, options_of
from insum_nn.compiler.runtime.watch import statement_calls, watched
from insum_nn.dtypes import is_widened
from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumShapeError, plural
from insum_nn.facts import NO_FACTS, IndexFacts, NamedFacts, StaticTable
from insum_nn.tensor_cache import insert, same_views

__all__ = ["StatementsProgram", "run_statements"]

Shapes = Mapping[str, Sequence[int | None]]
# An access: a name, and for each axis the index or the entry that has its extent.
Axes = tuple[str, tuple[str | None, ...]]
# Shapes and extents, as far as all that is passed shows them; and the sizes of a call of all statements together.
Known = tuple[dict[str, tuple[int, ...]], dict[str, int], Any]
NO_SHAPES: Shapes = {}
# Calls of different sizes of which a program remembers these.
_LIMIT = 64


class StatementsProgram:
    """A program of several statements, ready to be called with tensors of any size.

    Attributes:
        expression: its statements.
        programs: what runs, in order.
        options: compile options.

    >>> program = StatementsProgram("S[i] = exp(x[i]); Z += S[i]; Y[i] = S[i] / Z")
    >>> program(x=torch.zeros(4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        expression: str,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shapes | None = None,
        facts: Mapping[str, IndexFacts] | None = None,
        static: Mapping[str, Tensor | StaticTable] | None = None,
        options: Options = DEFAULT,
    ) -> None:
        check_kinds(sizes=sizes, shapes=out_shape, facts=facts, static=static, options=options)
        text = parse_program(expression)
        self.options = options
        self._sizes, self._out_shape = dict(sizes or {}), dict(out_shape or {})
        self.programs: tuple[Program, ...] = tuple(
            Program(
                str(step),
                sizes={name: size for name, size in (sizes or {}).items() if name in step.indices()},
                facts={name: each for name, each in (facts or {}).items() if name in step.index_tensors()},
                static={name: each for name, each in (static or {}).items() if name in step.tensors()},
                options=options,
            )
            for step in text.steps
        )
        self.expression = str(text)
        statements = [*text.statements, *(program.statement for program in self.programs)]
        accesses = [access for s in statements for outer in (s.output, *s.reads) for access in (outer, *outer.nested())]
        self._known: dict[object, Known] = {}
        specs = [program.spec for program in self.programs]
        tables = {name: table for spec in specs for name, table in spec.static}
        known = tuple(sorted((facts or {}).items())), options, False, tuple(tables.items())
        # All but sizes and shapes, which tracers pass to the operator.
        self._text = Spec(f"{self.expression};", *known, origin="caller").to_json()
        self._written = tuple(dict.fromkeys(spec.statement.output.name for spec in specs))
        self._indexed = tuple(dict.fromkeys(name for spec in specs for name in spec.statement.index_tensors()))
        place = {name: n for n, name in enumerate(text.inputs)} | {n: -1 - at for at, n in enumerate(self._written)}
        steps = [
            Step.of(spec, [place[name] for name in spec.layout.tensors], -1 - place[spec.statement.output.name], number)
            for number, spec in enumerate(specs)
        ]
        self._graph = StatementGraph(steps, tuple(map(self._written.index, text.results)))
        # Statements that read no values, but count, have torch's default dtype.
        self._counts = any(not spec.layout.value_tensors for spec in specs)
        self._inputs = text.inputs
        # Tensors that may start with a value that is passed.
        self._starts = tuple(s.output.name for s in text.statements if s.operator != "=")
        # Whether all are products, whose values autocast casts.
        self._casts = all(statement.is_product for statement in text.statements)
        self._reads = tuple(map(_step, self.programs))
        # Each access, and by axis the index or the entry that has its extent.
        self._axes: Sequence[Axes] = tuple(
            dict.fromkeys((access.name, tuple(map(_extent_of, access.subscripts))) for access in accesses)
        )
        self._returned = text.results

    def __repr__(self) -> str:
        return f"StatementsProgram({self.expression!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_of_text, (self._text, self._sizes, self._out_shape))

    def __deepcopy__(self, memo: dict[int, object]) -> StatementsProgram:
        return self

    def __call__(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shapes | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Any:
        """Run the statements.

        Args:
            sizes: extents of indices that no tensor shows.
            out_shape: shapes of tensors that statements write, by name; `None` entries are inferred.
            tensors: tensors by name, for names that are no Python keywords arguments.
            **named: tensors by name. One under a name that a statement writes by `+=`, `max=` or `min=` starts it.

        Returns:
            The tensor of the last statement, or the tuple of those that `return` names. In float16 and bfloat16
            programs everything is computed in float32, and what is returned is rounded.
        """
        if sizes is not None or out_shape is not None or tensors is not None:
            check_kinds(sizes=sizes, shapes=out_shape, tensors=tensors)
        shapes = {**self._out_shape, **(out_shape or NO_SHAPES)}
        extents, named = {**self._sizes, **(sizes or {})}, {**(tensors or {}), **named}
        if torch.compiler.is_dynamo_compiling() or torch._C._is_tracing():
            made = call_operator(self._text, named, extents, shapes)
        else:
            made = self._run(named, extents, shapes)
        return tuple(made) if len(made) > 1 else made[0]

    def _call_at(self, shapes: Mapping[str, Sizes], extents: Mapping[str, int]) -> Call | None:
        """Return the sizes of a call; `None`: those that are given do not agree, or do not show some extent."""
        if self._graph.alone is not None:
            return None
        for name, own in self._axes:
            for index, extent in zip(own, shapes[name], strict=True):
                if index is not None and "[" not in index and extents.get(index) != extent:
                    return None
        sizes = [tuple(map(extents.get, step.spec.layout.indices)) for step in self._graph.steps]
        if any(None in each for each in sizes):
            return None
        return Call(self._graph, sizes, [shapes[name] for name in self._written], True)  # type: ignore[arg-type]

    def _run_together(self, call: Call, named: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
        """Return the results; `None`: something else than autograd follows, or a value is passed that starts a sum."""
        if len(named) != len(self._inputs) or watched.get() is not None or torch._C._is_any_autocast_enabled():
            return None
        # Statements refuse several.
        dtypes = {tensor.dtype for tensor in named.values() if tensor.is_floating_point()}
        if len(dtypes) > 1 or (self._counts and dtypes != {torch.get_default_dtype()}):
            return None
        tensors = [*map(same_views(named, self._indexed).__getitem__, self._inputs)]
        if not all(map(is_plain, tensors)):
            return None
        followed = followed_by(tensors, None)
        if followed is None:
            found = self._graph.run(tensors, call.sizes, call.shapes)
            return tuple(map(found.__getitem__, self._graph.results))
        if followed == "mode" or gradients_of(self._graph, tuple([t.requires_grad for t in tensors])) is None:
            return None
        return record(call, None, *tensors)  # type: ignore[no-any-return]

    def _run(self, found: dict[str, Tensor], sizes: Mapping[str, int], declared: Shapes) -> list[Tensor]:
        """Run all together, or one by one."""
        expression = self.expression.replace("\n", "; ")
        found = {name: tensor for name, tensor in found.items() if tensor is not None}  # pyright: ignore[reportUnnecessaryComparison]
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InsumDtypeError(
                    f"'{name}' must be a torch.Tensor, got {type(tensor).__name__}",
                    expression=expression,
                    fix="pass numbers as 0-d tensors.",
                    tensor=name,
                )
        autocast = not self._casts and torch._C._is_any_autocast_enabled()
        device = next((tensor.device for tensor in found.values()), None) if autocast else None
        if device is not None and under_autocast(device):
            with torch.autocast(device.type, enabled=False):
                return self._run(found, sizes, declared)
        floats = dict.fromkeys([t.dtype for t in found.values() if t.is_floating_point()])
        # Statements refuse factors of several dtypes.
        widened = [dtype for dtype in floats if is_widened(dtype)] if len(floats) == 1 else []
        if widened:
            found = {name: t.to(torch.float32) if is_widened(t.dtype) else t for name, t in found.items()}
        shapes: dict[str, Sequence[int | None]] = {**declared, **{name: tensor.shape for name, tensor in found.items()}}
        key, symbolic = (*shapes.items(), *sizes.items()), False
        try:
            inferred = self._known.get(key)
        except TypeError:
            # Symbolic sizes have no hash.
            inferred, symbolic = None, True
        if inferred is None:
            # Other calls have the names of one that was checked.
            check_names(expression, self._inputs, self._starts, found)
            known, extents = _inferred(expression, self._axes, self._written, shapes, sizes)
            inferred = known, extents, None if symbolic else self._call_at(known, extents)
            if not symbolic:
                insert(self._known, key, inferred, _LIMIT)
        known, extents, together = inferred
        made = None if together is None else self._run_together(together, found)
        steps = zip(self.programs, self._reads, strict=True) if made is None else ()
        found.update(zip(self._returned, made or (), strict=False))
        for program, (name, read, indices, hidden, counts) in steps:
            given = {each: found[each].detach() if inert else found[each] for each, inert in read}
            if name in found:
                given[name] = found[name]
            own = {index: extents[index] for index in (*sizes, *hidden) if index in indices and index in extents}
            found[name] = program(sizes=own or None, out_shape=known[name], tensors=given)
            if counts and floats:
                found[name] = found[name].to(torch.float32 if widened else next(iter(floats)))
        return [found[name].to(widened[0]) if widened else found[name] for name in self._returned]

    def explain(self, *, measure: bool = False, **call: Any) -> tuple[Explanation, ...]:
        """Explain each statement that runs, in order; see `Program.explain`.

        Args:
            measure: also time them.
            **call: the arguments of a call, which runs and is explained; without any only what the texts say is shown.
        """
        if not call:
            return tuple(program.explain() for program in self.programs)
        return tuple(each.explain(measure=measure) for each in statement_calls(lambda: self(**call)))


def run_statements(
    expression: str,
    named: Mapping[str, Tensor],
    *,
    options: Options = DEFAULT,
    sizes: Mapping[str, int] | None = None,
    out_shape: Shapes = NO_SHAPES,
    facts: NamedFacts = NO_FACTS,
) -> Any:
    """Run several statements by a program that is remembered, also while Dynamo traces; see `StatementsProgram`.

    Facts are about index tensors, which no graph reads.
    """
    if torch.compiler.is_dynamo_compiling():
        text = _traced_text(expression, option_values(options))
        made = call_operator(text, named, sizes or {}, out_shape)
        return tuple(made) if len(made) > 1 else made[0]
    return _remembered(expression, options, facts)(tensors=named, sizes=sizes, out_shape=out_shape)


@lru_cache(maxsize=256)
def _remembered(expression: str, options: Options, facts: NamedFacts = NO_FACTS) -> StatementsProgram:
    return StatementsProgram(expression, facts=facts, options=options)


@constant
def _traced_text(expression: str, options: Sequence[Any]) -> str:
    return _remembered(expression, options_of(options))._text


def _of_text(text: str, sizes: Mapping[str, int], out_shape: Shapes) -> StatementsProgram:
    spec = Spec.from_json(text)
    known: dict[str, Any] = {"facts": dict(spec.facts), "static": dict(spec.static), "options": spec.options}
    return StatementsProgram(spec.expression, sizes=sizes, out_shape=out_shape, **known)


def _inferred(
    expression: str,
    accesses: Sequence[Axes],
    written: Sequence[str],
    given: Mapping[str, Sequence[int | None]],
    sizes: Mapping[str, int],
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Find shapes and extents, by indices and by entries that address axes of several tensors."""
    for name in given:
        if name not in written and all(name != each for each, _ in accesses):
            raise InsumFormatError(
                f"out_shape= names '{name}', which no statement writes",
                expression=expression,
                fix=f"name one of {', '.join(written)}.",
            )
    shapes = {name: [*shape] for name, shape in given.items()}
    extents: dict[str, int] = {**sizes}
    for name, axes in accesses:
        shape = shapes.setdefault(name, [None] * len(axes))
        if len(shape) != len(axes):
            raise InsumShapeError(
                f"'{name}' has {plural(len(shape), 'dimension')}, and {plural(len(axes), 'subscript')}",
                expression=expression,
                fix="give it one subscript for each dimension.",
                tensor=name,
            )
    # What one pass finds, the next one uses: each finds an extent, or is the last.
    changed = True
    while changed:
        changed = False
        for name, axes in accesses:
            for axis, index in enumerate(axes):
                extent = shapes[name][axis]
                if index is None or (extent is None) == (index not in extents):
                    continue
                changed = True
                if extent is None:
                    shapes[name][axis] = extents[index]
                else:
                    extents[index] = extent
    for name in written:
        if None in shapes[name]:
            axis = shapes[name].index(None)
            wanted = ", ".join(["None"] * axis + ["extent"] + ["None"] * (len(shapes[name]) - axis - 1))
            raise InsumShapeError(
                f"the extent of '{name}' along axis {axis} is not known",
                expression=expression,
                fix=f"pass out_shape={{'{name}': ({wanted},)}}.",
                tensor=name,
            )
    return {name: tuple(shape) for name, shape in shapes.items()}, extents  # type: ignore[misc]


def _step(program: Program) -> tuple[Any, ...]:
    """Return of a step of a plan what a call asks.

    That is what it writes; what it reads, and whether without a gradient; its indices; those whose extent no axis of
    what it reads or writes shows; whether it reads values only to count them.
    """
    statement = program.statement
    names = dict.fromkeys(access.name for access in statement.reads)
    # Nothing is recorded of a tensor of which no derivative is left.
    inert = [name for name in names if not derivatives(statement, name).statements]
    read = tuple((name, name in inert) for name in statement.tensors())
    indices = statement.indices()
    shown = {subscript.plain for access in statement.accesses() for subscript in access.subscripts}
    hidden = tuple(index for index in indices if index not in shown)
    counts = all(isinstance(f, Number) or (isinstance(f, Apply) and f.function == "one") for f in statement.factors)
    return statement.output.name, read, indices, hidden, counts


def _extent_of(subscript: Subscript) -> str | None:
    """Return what has the extent of an axis: the index or the entry that addresses it, if it is one alone."""
    entry = subscript.indirect
    return subscript.plain if entry is None else str(entry)


# How the operator of `traced` runs a call.


def _call(text: str, call: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """A call whose arguments are resolved here, by whoever runs or traces the operator."""
    names, sized, shaped = json.loads(call)
    program, named, rest = _program_of(text, frozenset(sized)), dict(zip(names, tensors, strict=True)), iter(sizes)
    own = {name: next(rest) for name in sized}
    shapes = {name: tuple([next(rest) if given else None for given in known]) for name, known in shaped}
    if isinstance(program, Program):
        return [program(sizes=own, out_shape=shapes.get(""), tensors=named)]
    return program._run(named, own, shapes)


def _call_traced(text: str, call: str, tensors: list[Tensor], sizes: list[Tensor]) -> list[Tensor]:
    return _call(text, call, tensors, list(map(int, sizes)))


torch.library.impl("insum_nn::call", ("CompositeImplicitAutograd", "FuncTorchBatched"), _call)
torch.library.impl("insum_nn::call_traced", "CompositeImplicitAutograd", _call_traced)


@lru_cache(maxsize=1024)
def _program_of(text: str, sized: frozenset[str]) -> Program | StatementsProgram:
    spec = Spec.from_json(text)
    if is_program(spec.expression):
        # Their extents come with each call.
        return _of_text(text, dict.fromkeys(sized, 0), NO_SHAPES)
    return Program._of(spec, {}, spec.statement.indices() if spec.drop_outside else sized)
