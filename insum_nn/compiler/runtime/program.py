"""`Program`: a checked statement that is called with tensors, differentiated and explained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial

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
from insum_nn.compiler.lang.shapes import check_extents, resolve_extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.compiler.runtime.arguments import check_kinds, static_tables
from insum_nn.compiler.runtime.autograd import apply, apply_recorded
from insum_nn.compiler.runtime.dispatch import (
    Spec,
    broadcast,
    dtype_of,
    parse_cached,
    prepare,
    run_spec,
)
from insum_nn.compiler.runtime.execution import in_names_of
from insum_nn.compiler.runtime.modes import PLAIN_TYPES, followed_by, to_autocast
from insum_nn.compiler.runtime.out_argument import check_out, check_unrecorded, shape_for, write_out
from insum_nn.compiler.runtime.traced import call_operator
from insum_nn.compiler.runtime.watch import StatementCall, watched
from insum_nn.dtypes import not_dense
from insum_nn.errors import InsumFormatError
from insum_nn.facts import IndexFacts, StaticTable
from insum_nn.tensor_cache import same_views

__all__ = ["Program", "ProgramSum", "Shape"]

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
        self._spec = spec
        self.statement: Statement = parse_cached(spec.expression)
        self.expression: str = str(self.statement)
        self.options = spec.options
        self._sizes: dict[str, int] = dict(sizes)
        self._out_shape = None if out_shape is None else tuple(out_shape)
        self.names: tuple[str, ...] = layout_of(self.statement).tensors
        self._index_names: tuple[str, ...] = self.statement.index_tensors()
        self._text: str = spec.to_json()

    def __repr__(self) -> str:
        return f"Program({self.expression!r}{', drop_outside=True' if self._spec.drop_outside else ''})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash((self._spec, self._out_shape, tuple(sorted(self._sizes.items()))))

    def _state(self) -> tuple[object, ...]:
        return (self._spec, self._sizes, self._out_shape)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, self._state())

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
            merged = {**self._sizes, **(sizes or {})}
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
        spec = self._spec
        if spec.origin != "builder":
            # Facts of a builder hold of its own tensors, so they are passed as they are.
            named = same_views(named, self._index_names)
        plain = self._plain(named)
        if plain is not None:
            ordered, initial = plain
            merged = {**self._sizes, **sizes} if sizes else self._sizes
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
        ordered, initial = self._arrange(named)
        extents = self._extents(ordered, initial, sizes, out_shape)
        return apply(spec, ordered, broadcast(initial, extents), extents)

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
            shape = shape_for(self.statement, out, {**self._sizes, **(sizes or {})}, shape)
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
        calls = self._spec.calls
        printed = calls.get((ordered[0].is_cuda, *map(dtype_of, ordered))) if calls and watched.get() is None else None
        result = None if printed is None else printed.call(ordered, initial, self._sizes, out_shape)
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
        return _rebuild(self._spec.writing(dtype), self._sizes, self._out_shape)

    def _plain(self, named: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor | None] | None:
        """The tensors in the layout's order, and the initial value; `None` where one is out of the ordinary."""
        if torch._C._is_any_autocast_enabled():
            return None
        names, initial = self.names, None
        if len(named) != len(names):
            initial = named.get(self.statement.output.name)
            if initial is None or len(named) != len(names) + 1:
                return None
            if type(initial) not in PLAIN_TYPES or not_dense(initial) or initial.is_neg():
                return None
        ordered: list[Tensor] = []
        for name in names:
            tensor = named.get(name)
            if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_nested:  # type: ignore[union-attr]
                return None
            if tensor.is_meta or tensor.is_neg():  # type: ignore[union-attr]
                return None
            ordered.append(tensor)  # type: ignore[arg-type]
        return ordered, initial

    def _arrange(self, named: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor | None]:
        statement = self.statement
        named = {n: t for n, t in named.items() if t is not None}  # pyright: ignore[reportUnnecessaryComparison]
        initial = named.get(statement.output.name)
        if len(named) != len(self.names) + (initial is not None) or not named.keys() >= set(self.names):
            check_names(statement.text, statement.tensors(), (statement.output.name,), named, statement)
        named = {name: self._cast(value) for name, value in named.items()}
        initial = named.get(statement.output.name)
        ordered = [named[name] for name in self.names]
        self._spec.check_kinds(ordered, initial)
        return ordered, initial

    def _cast(self, tensor: Tensor) -> Tensor:
        return to_autocast(tensor) if torch._C._is_any_autocast_enabled() and self.statement.is_product else tensor

    def _extents(
        self,
        ordered: Sequence[Tensor],
        initial: Tensor | None,
        sizes: Mapping[str, int] | None,
        out_shape: Shape | None,
    ) -> Extents:
        merged = {**self._sizes, **sizes} if sizes else self._sizes
        shape = out_shape if out_shape is not None else self._out_shape
        return resolve_extents(self.statement, ordered, initial, merged, shape)

    @property
    def spec(self) -> Spec:
        """Everything but tensors and sizes."""
        return self._spec

    @property
    def sizes(self) -> Mapping[str, int]:
        """Extents given at compile time."""
        return self._sizes

    def grad(self, name: str) -> Program | ProgramSum:
        """The derivative with respect to one factor, as a program of its own.

        It reads the operands, and the gradient of the output under the name `d` + output; its output is
        `d` + `name`. That of an extremum also reads the extremum, under its name, and the gradient divided by how many
        terms attain it. Extents are taken from the operands; give `out_shape=` (the operand's shape) and `sizes=`
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
        if self._spec.epilogue.activation is not None:
            raise InsumFormatError(
                f"the derivative of a sum after {self._spec.epilogue.activation} is not one statement",
                expression=self.expression,
                fix="compile the statement without activation=, and pass it the gradient before the activation.",
            )
        statements = derivatives(self.statement, name).statements
        programs = [self._derived(str(s)) for s in statements]
        return programs[0] if len(programs) == 1 else ProgramSum(tuple(programs))

    def _derived(self, expression: str) -> Program:
        spec = Spec(expression, self._spec.facts, self.options, True, self._spec.static, origin=self._spec.origin)
        indices = spec.statement.indices()
        # Extents that only the operand shows arrive with the call, so the written-never-read rule is lifted.
        return Program._of(spec, {k: v for k, v in self._sizes.items() if k in indices}, self.statement.indices())

    @staticmethod
    def _of(spec: Spec, sizes: Mapping[str, int], sized: Collection[str], out_shape: Shape | None = None) -> Program:
        """A program from its parts; indices in `sized` get their extent from the call."""
        program = Program.__new__(Program)
        check_statement(parse_cached(spec.expression), sized)
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
        named = {**(tensors or {}), **named}
        ordered, initial = self._arrange(named)
        extents = self._extents(ordered, initial, sizes, out_shape)
        check_extents(self.statement, ordered, extents, drop_outside=self._spec.drop_outside)
        inputs = dict(zip(self.names, ordered, strict=True))
        initial = broadcast(initial, extents)
        total = interpret(self.statement, inputs, extents, initial, drop_outside=self._spec.drop_outside)
        return self._spec.epilogue.activated(total)

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
        merged = {**self._sizes, **(sizes or {})}
        shape = out_shape if out_shape is not None else self._out_shape
        about = partial(
            explain_call,
            self.statement,
            self.options,
            sizes=merged,
            out_shape=shape,
            epilogue=self._spec.epilogue,
        )
        if not named:
            return about(None, None, None, facts=dict(self._spec.facts))
        ordered, initial = self._arrange(named)
        extents = self._extents(ordered, initial, sizes, out_shape)
        initial = broadcast(initial, extents)
        if 0 in extents.indices:
            return about(extents, None, (ordered, initial), facts=dict(self._spec.facts))
        bound, program = prepare(self._spec, ordered, initial, extents)
        program = program if program.parts else in_names_of(program, bound)
        seconds = median_seconds(partial(run_spec, self._spec, ordered, initial, extents)) if measure else None
        return about(extents, program, (ordered, initial), seconds, facts=bound.named_facts)


def _rebuild(spec: Spec, sizes: Mapping[str, int], out_shape: Shape | None) -> Program:
    return Program._of(spec, sizes, spec.statement.indices() if spec.drop_outside else sizes, out_shape)


class ProgramSum:
    """Several programs whose results add up: the derivative of a tensor that stands in several factors."""

    def __init__(self, programs: tuple[Program, ...]) -> None:
        self.programs = programs

    @property
    def expression(self) -> str:
        return "\n".join(program.expression for program in self.programs)

    def __repr__(self) -> str:
        return f"ProgramSum({self.expression!r})"

    def __call__(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shape | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run all of them on the same tensors; each continues from the one before."""
        named = {**(tensors or {}), **named}
        output = self.programs[0].statement.output.name
        for program in self.programs:
            used = {name: named[name] for name in (*program.names, output) if name in named}
            named[output] = program(sizes=sizes, out_shape=out_shape, tensors=used)
        return named[output]
