"""Interpret a statement as a loop nest over its syntax tree, in float64: the definition of the language.

It shares no code with the compiler, and is slow: every compiled program is compared with it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.functions import OPERATIONS
from insum_nn.compiler.lang.syntax import Access, Apply, Factor, Index, Number, Statement, Subscript
from insum_nn.errors import InsumRangeError

__all__ = ["interpret"]

_Nested = list["_Nested"] | int | float


def interpret(
    statement: Statement,
    tensors: Mapping[str, Tensor],
    extents: Extents,
    initial: Tensor | None = None,
    *,
    drop_outside: bool = False,
) -> Tensor:
    """Run a statement as nested loops.

    For every combination of the index variables: evaluate the right-hand side, combine it into the output. A term in
    which a read or the path of the write misses does not contribute.

    Returns:
        The output, float64 (int64 for integer factors), on the CPU.

    Raises:
        InsumRangeError: an index entry or an affine write is out of bounds.
    """
    return _Interpreter(statement, tensors, extents, initial, drop_outside).run()


class _Interpreter:
    def __init__(
        self,
        statement: Statement,
        tensors: Mapping[str, Tensor],
        extents: Extents,
        initial: Tensor | None,
        drop_outside: bool,
    ) -> None:
        self.statement = statement
        self.values: dict[str, _Nested] = {name: t.detach().cpu().tolist() for name, t in tensors.items()}
        self.shapes: dict[str, Sequence[int]] = {name: tuple(t.shape) for name, t in tensors.items()}
        self.extents = extents
        self.initial = initial
        self.drop_outside = drop_outside
        factors = [tensors[access.name] for access in statement.reads] or ([initial] if initial is not None else [])
        self.integral = bool(factors) and not factors[0].is_floating_point()

    def run(self) -> Tensor:
        shape, output = self.extents.output, self.statement.output
        dtype = torch.int64 if self.integral else torch.float64
        cells: dict[tuple[int, ...], int | float] = {}
        if self.initial is not None:
            for place in itertools.product(*map(range, shape)):
                cells[place] = self.initial[place].item()
        placed = self.once(output, lambda point: self.place(output, point, shape, write=True))
        reads = [self.factor(factor) for factor in self.statement.factors]
        combining = self.statement.combining
        for point in itertools.product(*map(range, self.extents.indices)):
            # All are looked at, of a missed term too: their entries must be valid.
            place, values = placed(point), [read(point) for read in reads]
            if place is None or None in values:
                continue
            term, earlier = math.prod(values), cells.get(place)
            if earlier is None:
                cells[place] = combining.identity + term if combining.adds else term
            elif earlier == earlier:
                # NaN stays.
                cells[place] = combining.fold(term, earlier)
        out = torch.zeros(shape, dtype=dtype)
        for place, value in cells.items():
            out[place] = value
        return out

    def factor(self, factor: Factor) -> Callable[[tuple[int, ...]], Any]:
        """Return a factor's value as a function of all indices; `None` for a miss."""
        if isinstance(factor, Number):
            return lambda _: factor.value
        if isinstance(factor, Apply):
            args = [self.factor(arg) for arg in factor.args]

            def applied(point: tuple[int, ...]) -> int | float | None:
                values = [arg(point) for arg in args]
                return None if None in values else self.applied(factor.function, *values)

            return applied
        shape = self.shapes[factor.name]

        def read(point: Mapping[str, int]) -> int | float | None:
            where = self.place(factor, point, shape, write=False)
            return None if where is None else self.cell(factor.name, where)

        return self.once(factor, read)

    def once(self, access: Access, look: Callable[[Mapping[str, int]], Any]) -> Callable[[tuple[int, ...]], Any]:
        """Return `look` as a function of all indices, cached by the values of those in `access`."""
        names = self.statement.indices()
        own = [names.index(name) for name in dict.fromkeys(index.name for index in access.indices())]
        found: dict[Any, Any] = {}
        # Of one index the value alone.
        key: Callable[[tuple[int, ...]], Any] = operator.itemgetter(*own) if own else lambda _: None

        def looked(point: tuple[int, ...]) -> Any:
            known = key(point)
            if known not in found:
                found[known] = look(dict(zip(names, point, strict=True)))
            return found[known]

        return looked

    def applied(self, function: str, first: int | float, *rest: int | float) -> int | float:
        if function == "add":
            return sum(rest, first)
        if function == "mul":
            return math.prod([first, *rest])
        value = OPERATIONS[function].of(first, *rest)
        return int(value) if self.integral else value

    def place(
        self, access: Access, point: Mapping[str, int], shape: Sequence[int], *, write: bool
    ) -> tuple[int, ...] | None:
        """Return the coordinates that an access points to; `None` for a miss."""
        coordinates: list[int] = []
        missing = False
        for subscript, extent in zip(access.subscripts, shape, strict=True):
            at = self.evaluate(subscript, point)
            if at is None:
                missing = True
                continue
            if not 0 <= at < extent:
                if subscript.indirect is not None or (write and not self.drop_outside):
                    raise InsumRangeError(
                        f"'{subscript}' points outside '{access.name}': {at} of {extent}",
                        expression=self.statement.text,
                        spans=[subscript.span],
                    )
                missing = True
            coordinates.append(at)
        return None if missing else tuple(coordinates)

    def evaluate(self, subscript: Subscript, point: Mapping[str, int]) -> int | None:
        total = subscript.offset
        for term in subscript.terms:
            if isinstance(term.atom, Index):
                total += term.coefficient * point[term.atom.name]
                continue
            entry = self.entry(term.atom, point)
            if entry is None:
                return None
            total += term.coefficient * entry
        return total

    def entry(self, access: Access, point: Mapping[str, int]) -> int | None:
        """Return one entry of an index tensor; `None` for a miss."""
        where = self.place(access, point, self.shapes[access.name], write=False)
        if where is None:
            return None
        value = int(self.cell(access.name, tuple(where)))
        if value < -1:
            raise InsumRangeError(
                f"index tensor '{access.name}' holds {value}", expression=self.statement.text, spans=[access.span]
            )
        return None if value == -1 else value

    def cell(self, name: str, where: tuple[int, ...]) -> int | float:
        value = self.values[name]
        for at in where:
            assert isinstance(value, list)
            value = value[at]
        assert not isinstance(value, list)
        return value
