"""Interpret a statement as a loop nest over its syntax tree, in float64: the definition of the language.

It shares no code with the compiler, and is slow: every compiled program is compared with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.functions import FUNCTIONS, SIGNS
from insum_nn.compiler.lang.syntax import Access, Factor, Index, Number, Statement, Subscript
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
        shape = self.extents.output
        dtype = torch.int64 if self.integral else torch.float64
        cells: dict[tuple[int, ...], int | float] = {}
        if self.initial is not None:
            for place in itertools.product(*map(range, shape)):
                cells[place] = self.initial[place].item()
        names = self.statement.indices()
        for point in itertools.product(*map(range, self.extents.indices)):
            self.visit(dict(zip(names, point, strict=True)), cells)
        output = torch.zeros(shape, dtype=dtype)
        for place, value in cells.items():
            output[place] = value
        return output

    def visit(self, point: Mapping[str, int], cells: dict[tuple[int, ...], int | float]) -> None:
        place = self.place(self.statement.output, point, self.extents.output, write=True)
        found: dict[Access, int | float] = {}
        missed = place is None
        for access in self.statement.reads:
            where = self.place(access, point, self.shapes[access.name], write=False)
            if where is None:
                # The others are still visited: their entries must be valid.
                missed = True
            elif not missed:
                found[access] = self.cell(access.name, where)
        if place is None or missed:
            return
        term: int | float = 1
        for factor in self.statement.factors:
            term = term * self.value(factor, found)
        combining, earlier = self.statement.combining, cells.get(place)
        if earlier is None:
            cells[place] = combining.identity + term if combining.adds else term
        elif earlier == earlier:
            # NaN stays.
            cells[place] = combining.fold(term, earlier)

    def value(self, factor: Factor, found: Mapping[Access, int | float]) -> int | float:
        if isinstance(factor, Number):
            return factor.value
        if isinstance(factor, Access):
            return found[factor]
        first, *rest = (self.value(arg, found) for arg in factor.args)
        if factor.function == "add":
            return sum(rest, first)
        if factor.function == "mul":
            return math.prod([first, *rest])
        value = {**SIGNS, **FUNCTIONS}[factor.function].of(first, *rest)
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
                    raise self.outside(subscript, access.name, at, extent)
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

    def outside(self, subscript: Subscript, name: str, at: int, extent: int) -> InsumRangeError:
        return InsumRangeError(
            f"'{subscript}' points outside '{name}': {at} of {extent}",
            expression=self.statement.text,
            spans=[subscript.span],
        )

    def cell(self, name: str, where: tuple[int, ...]) -> int | float:
        value = self.values[name]
        for at in where:
            assert isinstance(value, list)
            value = value[at]
        assert not isinstance(value, list)
        return value
