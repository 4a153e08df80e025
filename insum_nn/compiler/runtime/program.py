"""`Program` and `StatementsProgram`: checked statements that are called with tensors, differentiated and explained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from insum_nn.compiler.explain.report import Explanation
from insum_nn.compiler.explain.sequence import explain_call, median_seconds
from insum_nn.compiler.lang.bind import Extents, layout_of
from insum_nn.compiler.lang.check import check_names, check_statement
from insum_nn.compiler.lang.declared_facts import Origin
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.epilogue import check_epilogue
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.printed import Sizes
from insum_nn.compiler.lang.programs import is_program, parse_program
from insum_nn.compiler.lang.shapes import check_extents, resolve_extents
from insum_nn.compiler.lang.syntax import Apply, Number, Statement
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.compiler.runtime.arguments import check_kinds, static_tables
from insum_nn.compiler.runtime.artifact import Step
from insum_nn.compiler.runtime.autograd import Call, apply, apply_recorded
from insum_nn.compiler.runtime.backward import gradients_of
from insum_nn.compiler.runtime.dispatch import (
    Spec,
    StatementGraph,
    broadcast,
    dtype_of,
    parse_cached,
    prepare,
    run_spec,
)
from insum_nn.compiler.runtime.execution import in_names_of
from insum_nn.compiler.runtime.modes import PLAIN_TYPES, followed_by, is_plain, to_autocast, under_autocast
from insum_nn.compiler.runtime.out_argument import check_out, check_unrecorded, shape_for, write_out
from insum_nn.compiler.runtime.recorded import record
from insum_nn.compiler.runtime.traced import call_operator, option_values, spec_text
from insum_nn.compiler.runtime.watch import StatementCall, statement_calls, watched
from insum_nn.dtypes import is_widened
from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumShapeError, plural
from insum_nn.facts import NO_FACTS, IndexFacts, NamedFacts, StaticTable
from insum_nn.tensor_cache import insert, same_views

__all__ = ["Program", "Shape", "StatementsProgram", "run_statements"]

Shape = Sequence[int | None]

# Kinds of arguments that need no look at them.
_SHAPES = (type(None), tuple, torch.Size)
_NAMED = (type(None), dict)


class Program:
    """A checked statement, ready to be called with tensors of any size.

    Programs are immutable, hashable by content, and pickle as their text; compiled code is shared between equal ones.

    Attributes:
        expression: the statement as text.
        options: compile options.
        names: the tensors of a call, in the order of `run_plain`.
        spec: everything but tensors and sizes.
        sizes: extents given at compile time.
    """

    def __init__(
        self,
        expression: str,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shape | None = None,
        facts: Mapping[str, IndexFacts] | None = None,
        static: Mapping[str, Tensor | StaticTable] | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        options: Options = DEFAULT,
        drop_outside: bool = False,
        origin: Origin = "caller",
    ) -> None:
        check_kinds(sizes=sizes, out_shape=out_shape, facts=facts, static=static, options=options)
        check_kinds(activation=activation, out_dtype=out_dtype)
        # The same object as the spec's: it is the key of many a look-up.
        statement = parse_cached(expression)
        # What only the operand of a derivative shows arrives with the call.
        check_statement(statement, statement.indices() if drop_outside else sizes or ())
        spec = Spec(
            expression,
            tuple(sorted((facts or {}).items())),
            options,
            drop_outside,
            static_tables(statement, static or {}),
            check_epilogue(expression, activation, out_dtype),
            origin,
        )
        self._set(spec, sizes or {}, out_shape)

    def _set(self, spec: Spec, sizes: Mapping[str, int], out_shape: Shape | None) -> None:
        self.spec = spec
        self.statement: Statement = parse_cached(spec.expression)
        self.expression: str = str(self.statement)
        self.options = spec.options
        self.sizes: Mapping[str, int] = dict(sizes)
        self._out_shape = None if out_shape is None else tuple(out_shape)
        self.names: tuple[str, ...] = layout_of(self.statement).tensors
        self._index_names: tuple[str, ...] = self.statement.index_tensors()
        self._text: str = spec.to_json()

    def __repr__(self) -> str:
        return f"Program({self.expression!r}{', drop_outside=True' if self.spec.drop_outside else ''})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash((self.spec, self._out_shape, tuple(sorted(self.sizes.items()))))

    def _state(self) -> tuple[object, ...]:
        return (self.spec, self.sizes, self._out_shape)

    def __reduce__(self) -> tuple[object, ...]:
        return (Program._of, self._state())

    def __deepcopy__(self, memo: dict[int, object]) -> Program:
        return self

    def __call__(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shape | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        out: Tensor | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run the statement.

        Args:
            sizes: extents of indices that no tensor shows; added to those given at compile time.
            out_shape: shape of the output; `None` entries are inferred.
            tensors: tensors by name, for names that are no Python keywords arguments.
            out: a tensor to write the result to; see `insum`.
            **named: tensors by name. One under the output's name is the initial value: a residual, or broadcast to
                the output as a bias is, a (n,) or (1, n) for an output (m, n).

        Returns:
            The output: contiguous, of the factors' dtype (or `out_dtype`) and device; or `out`.
        """
        if out is not None:
            return self._into(out, sizes, out_shape, {**(tensors or {}), **named})
        if torch.compiler.is_dynamo_compiling() or torch._C._is_tracing():
            merged = {**self.sizes, **(sizes or {})}
            named = {**(tensors or {}), **named}
            shape = out_shape if out_shape is not None else self._out_shape
            return call_operator(self._text, named, merged, {} if shape is None else {"": shape})[0]
        if sizes is not None or type(out_shape) not in _SHAPES or type(tensors) not in _NAMED:
            check_kinds(sizes=sizes, out_shape=out_shape, tensors=tensors)
        if tensors:
            named = {**tensors, **named} if named else tensors  # type: ignore[assignment]
        calls = watched.get()
        if calls is not None:
            calls.append(StatementCall(self, named, sizes, out_shape))
        spec = self.spec
        if spec.origin != "builder":
            # Facts of a builder hold of its own tensors, so they are passed as they are.
            named = same_views(named, self._index_names)
        plain = self._plain(named)
        if plain is not None:
            ordered, initial = plain
            merged = {**self.sizes, **sizes} if sizes else self.sizes
            shape = self._out_shape if out_shape is None else out_shape
            followed = followed_by(ordered, initial)
            if followed is None:
                kind = (ordered[0].is_cuda, *map(dtype_of, ordered)) if spec.calls else ()
                printed = spec.calls.get(kind)
                result = printed.call(ordered, initial, merged, shape) if printed else None
                if result is not None:
                    return result
            extents = spec.agree(ordered, merged, shape)
            if extents is not None and (initial is None or initial.shape == extents.output[-initial.ndim :]):
                initial = initial if initial is None else broadcast(initial, extents)
                if followed is None:
                    return run_spec(spec, ordered, initial, extents)
                if followed == "autograd":
                    return apply_recorded(spec, ordered, initial, extents)
                return apply(spec, ordered, initial, extents, plain=True)
        ordered, initial, extents = self._checked(named, sizes, out_shape)
        return apply(spec, ordered, initial, extents)

    def _into(
        self, out: Tensor, sizes: Mapping[str, int] | None, out_shape: Shape | None, named: Mapping[str, Tensor]
    ) -> Tensor:
        """Run the statement, and write the result to a tensor of the caller's."""
        check_kinds(sizes=sizes, out_shape=out_shape, out=out)
        if torch.compiler.is_dynamo_compiling():
            # What is compiled copies what it made, wherever tensors lie.
            check_unrecorded(self.expression, out, named)
            shape = out_shape if out_shape is not None else out.shape
        else:
            check_out(self.statement, out, named)
            shape = out_shape if out_shape is not None else self._out_shape
            shape = shape_for(self.statement, out, {**self.sizes, **(sizes or {})}, shape)
        return write_out(self.expression, out, self(sizes=sizes, out_shape=shape, tensors=named))

    def run_plain(self, ordered: Sequence[Tensor], out_shape: Shape, initial: Tensor | None = None) -> Tensor:
        """Run the statement on plain tensors in eager mode without autocast, and record nothing.

        Args:
            ordered: the tensors, in the order of `names`.
            out_shape: the output's shape, a tuple; `None` entries are inferred.
            initial: the initial value; it may broadcast to the output.

        >>> product = Program("y[Row[p]] += Val[p] * x[Col[p]]")
        >>> product.names
        ('Row', 'Val', 'x', 'Col')
        >>> row, col = torch.tensor([0, 1]), torch.tensor([1, 1])
        >>> product.run_plain((row, torch.tensor([2.0, 3.0]), torch.tensor([1.0, 10.0]), col), (2,))
        tensor([20., 30.])
        """
        calls = self.spec.calls
        printed = calls.get((ordered[0].is_cuda, *map(dtype_of, ordered))) if calls and watched.get() is None else None
        result = None if printed is None else printed.call(ordered, initial, self.sizes, out_shape)
        if result is not None:
            return result
        with torch.no_grad():
            return self(tensors=self.named(ordered, initial), out_shape=out_shape)

    def named(self, ordered: Sequence[Tensor], initial: Tensor | None) -> dict[str, Tensor]:
        """Return the tensors of `run_plain` by name: of a call, which follows every mode."""
        named = dict(zip(self.names, ordered, strict=True))
        if initial is not None:
            named[self.statement.output.name] = initial
        return named

    @lru_cache(maxsize=1024)  # noqa: B019
    def writing(self, dtype: torch.dtype) -> Program:
        """Return the program with an output of another floating-point dtype than its factors'."""
        return Program._of(self.spec.writing(dtype), self.sizes, self._out_shape)

    def _plain(self, named: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor | None] | None:
        """The tensors in the layout's order, and the initial value; `None` where one is out of the ordinary."""
        if torch._C._is_any_autocast_enabled():
            return None
        starts = len(named) > len(self.names)
        names = (*self.names, self.statement.output.name) if starts else self.names
        if len(named) != len(names):
            return None
        ordered: list[Tensor] = []
        for name in names:
            tensor = named.get(name)
            if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_nested:  # type: ignore[union-attr]
                return None
            if tensor.is_meta or tensor.is_neg():  # type: ignore[union-attr]
                return None
            ordered.append(tensor)  # type: ignore[arg-type]
        return ordered, ordered.pop() if starts else None

    def _checked(
        self, named: Mapping[str, Tensor], sizes: Mapping[str, int] | None, out_shape: Shape | None
    ) -> tuple[list[Tensor], Tensor | None, Extents]:
        """The tensors of any call, an initial value in the output's shape, and the sizes."""
        statement = self.statement
        named = {n: t for n, t in named.items() if t is not None}  # pyright: ignore[reportUnnecessaryComparison]
        initial = named.get(statement.output.name)
        if len(named) != len(self.names) + (initial is not None) or not named.keys() >= set(self.names):
            check_names(statement.text, statement.tensors(), (statement.output.name,), named, statement)
        if torch._C._is_any_autocast_enabled() and statement.is_product:
            named = {name: to_autocast(value) for name, value in named.items()}
            initial = named.get(statement.output.name)
        ordered = [named[name] for name in self.names]
        self.spec.check_kinds(ordered, initial)
        merged = {**self.sizes, **sizes} if sizes else self.sizes
        shape = out_shape if out_shape is not None else self._out_shape
        extents = resolve_extents(self.statement, ordered, initial, merged, shape)
        return ordered, broadcast(initial, extents), extents

    def grad(self, name: str) -> Program:
        """The derivative with respect to one factor, as a program of its own.

        It reads the operands, and the gradient of the output under the name `d` + output; its output is
        `d` + `name`. That of an extremum also reads the extremum, under its name, and the gradient divided by how many
        terms attain it. Where the factor stands several times, it is a `StatementsProgram` that adds up as many
        statements. Extents are taken from the operands; give `out_shape=` (the operand's shape) and `sizes=`
        where the derivative statement alone does not show them. Its text runs through `insum` and `compile` too, with
        `drop_outside=True` where the statement reads outside of the operand.

        Raises:
            InsumNameError: `name` is not a factor.
            InsumFormatError: the program activates its sum.

        >>> Program("C[Row[p],n] += Val[p] * B[Col[p],n]").grad("Val").expression
        'dVal[p] += dC[Row[p],n] * B[Col[p],n]'
        >>> Program("y[p] += x[2*p+r-1] * w[r]").grad("x")
        Program('dx[2*p+r-1] += dy[p] * w[r]', drop_outside=True)
        """
        if self.spec.epilogue.activation is not None:
            raise InsumFormatError(
                f"the derivative of a sum after {self.spec.epilogue.activation} is not one statement",
                expression=self.expression,
                fix="compile the statement without activation=, and pass it the gradient before the activation.",
            )
        statements = derivatives(self.statement, name).statements
        if len(statements) == 1:
            spec = self.spec.with_statement(statements[0], drop_outside=True)
            indices = spec.statement.indices()
            return Program._of(spec, {name: size for name, size in self.sizes.items() if name in indices})
        facts, static = dict(self.spec.facts), dict(self.spec.static)
        text = "\n".join(map(str, statements))
        several = StatementsProgram(
            text, sizes=self.sizes, facts=facts, static=static, options=self.options, drop_outside=True
        )
        return cast(Program, several)

    @staticmethod
    def _of(spec: Spec, sizes: Mapping[str, int], out_shape: Shape | None = None) -> Program:
        """A program from its parts; all indices of a derivative may get their extent from the call."""
        program = Program.__new__(Program)
        statement = parse_cached(spec.expression)
        check_statement(statement, statement.indices() if spec.drop_outside else sizes)
        program._set(spec, sizes, out_shape)
        return program

    def reference(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shape | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run the statement by its definition: nested loops in float64 on the CPU. Slow; the oracle of every test."""
        ordered, initial, extents = self._checked({**(tensors or {}), **named}, sizes, out_shape)
        check_extents(self.statement, ordered, extents, drop_outside=self.spec.drop_outside)
        inputs = dict(zip(self.names, ordered, strict=True))
        total = interpret(self.statement, inputs, extents, initial, drop_outside=self.spec.drop_outside)
        return self.spec.epilogue.activated(total)

    def explain(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shape | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        measure: bool = False,
        **named: Tensor,
    ) -> Explanation:
        """Explain how the statement is computed: loop nest, extents, decisions with reasons, the code that runs.

        Args:
            sizes: as in a call.
            out_shape: as in a call.
            tensors: as in a call.
            measure: also time the program on these tensors.
            **named: tensors to explain the call with; without any, only what the text alone says is shown.

        Returns:
            An `Explanation`, whose `str()` is the text.
        """
        named = {**(tensors or {}), **named}
        merged = {**self.sizes, **(sizes or {})}
        shape = out_shape if out_shape is not None else self._out_shape
        about = partial(
            explain_call,
            self.statement,
            self.options,
            sizes=merged,
            out_shape=shape,
            epilogue=self.spec.epilogue,
        )
        if not named:
            return about(None, None, None, facts=dict(self.spec.facts))
        ordered, initial, extents = self._checked(named, sizes, out_shape)
        if 0 in extents.indices:
            return about(extents, None, (ordered, initial), facts=dict(self.spec.facts))
        bound, program = prepare(self.spec, ordered, initial, extents)
        program = program if program.parts else in_names_of(program, bound)
        seconds = median_seconds(partial(run_spec, self.spec, ordered, initial, extents)) if measure else None
        return about(extents, program, (ordered, initial), seconds, facts=bound.named_facts)


# Several statements.

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
        drop_outside: bool = False,
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
                drop_outside=drop_outside,
            )
            for step in text.steps
        )
        self.expression = str(text)
        # As errors show it, in one line.
        self._line = self.expression.replace("\n", "; ")
        statements = [*text.statements, *(program.statement for program in self.programs)]
        accesses = [access for s in statements for outer in (s.output, *s.reads) for access in (outer, *outer.nested())]
        self._known: dict[object, Known] = {}
        specs = [program.spec for program in self.programs]
        tables = {name: table for spec in specs for name, table in spec.static}
        known = tuple(sorted((facts or {}).items())), options, drop_outside, tuple(tables.items())
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
        # Each access, and by axis the index or the entry that has its extent, if it is one alone.
        known_by = [[s.plain if s.indirect is None else str(s.indirect) for s in a.subscripts] for a in accesses]
        names = [access.name for access in accesses]
        self._axes: Sequence[Axes] = tuple(dict.fromkeys(zip(names, map(tuple, known_by), strict=True)))
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
        out_shape: Shapes | Shape | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Any:
        """Run the statements.

        Args:
            sizes: extents of indices that no tensor shows.
            out_shape: shapes of tensors that statements write, by name, or that of the only result; `None` entries are
                inferred.
            tensors: tensors by name, for names that are no Python keywords arguments.
            **named: tensors by name. One under a name that a statement writes by `+=`, `max=` or `min=` starts it.

        Returns:
            The tensor of the last statement, or the tuple of those that `return` names. In float16 and bfloat16
            programs everything is computed in float32, and what is returned is rounded.
        """
        given = cast(Any, out_shape)
        if type(given) in (tuple, list, torch.Size) and len(self._returned) == 1:
            given = {self._returned[0]: given}
        if sizes is not None or given is not None or tensors is not None:
            check_kinds(sizes=sizes, shapes=given, tensors=tensors)
        shapes = {**self._out_shape, **(given or NO_SHAPES)}
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
        found = {name: tensor for name, tensor in found.items() if tensor is not None}  # pyright: ignore[reportUnnecessaryComparison]
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InsumDtypeError(
                    f"'{name}' must be a torch.Tensor, got {type(tensor).__name__}",
                    expression=self._line,
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
            check_names(self._line, self._inputs, self._starts, found)
            known, extents = _inferred(self._line, self._axes, self._written, shapes, sizes)
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
        text = spec_text(f"{expression};", option_values(options))
        made = call_operator(text, named, sizes or {}, out_shape)
        return tuple(made) if len(made) > 1 else made[0]
    return _remembered(expression, options, facts)(tensors=named, sizes=sizes, out_shape=out_shape)


@lru_cache(maxsize=256)
def _remembered(expression: str, options: Options, facts: NamedFacts = NO_FACTS) -> StatementsProgram:
    return StatementsProgram(expression, facts=facts, options=options)


def _of_text(text: str, sizes: Mapping[str, int], out_shape: Shapes) -> StatementsProgram:
    spec = Spec.from_json(text)
    known: dict[str, Any] = {"facts": dict(spec.facts), "static": dict(spec.static), "options": spec.options}
    known |= {"out_shape": out_shape, "drop_outside": spec.drop_outside}
    return StatementsProgram(spec.expression, sizes=sizes, **known)


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


# How the operator of `traced` runs a call.


def _call(text: str, call: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Run a program with the flat arguments of the operator, when it runs or is traced."""
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
    # Their extents come with each call.
    spec, sizes = Spec.from_json(text), dict.fromkeys(sized, 0)
    return _of_text(text, sizes, NO_SHAPES) if is_program(spec.expression) else Program._of(spec, sizes)
