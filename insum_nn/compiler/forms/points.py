"""What a form is made of: reads of tensors at subscripts in which nothing is left to write out, points, and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.schedule.canonical import names_of

__all__ = ["ENTRY", "LONGEST", "OWNER", "Beside", "Point", "Product", "Read", "Sub", "canonical_points"]

# Index names no statement can have: the output row that a program owns, the number of an entry of that row, and, among
# sizes alone, the most entries that a row has.
OWNER, ENTRY, LONGEST = "@owner", "@entry", "@longest"


@dataclass(frozen=True, slots=True)
class Sub:
    """An affine sum of indices and reads.

    `safe`: it cannot leave the axis, but through a missing entry; `part`: its indices need not run over the whole axis.
    """

    terms: tuple[tuple[int, str | Read], ...]
    offset: int
    safe: bool
    part: bool = False

    def __str__(self) -> str:
        parts = [f"{c}*{a}" for c, a in self.terms]
        return "+".join([*parts, str(self.offset)])

    @property
    def plain(self) -> str | None:
        if self.offset == 0 and not self.part and len(self.terms) == 1 and self.terms[0][0] == 1:
            return self.runs_along
        return None

    @property
    def runs_along(self) -> str | None:
        """The only index of the sum, if there is but one and nothing is read."""
        if len(self.terms) == 1 and isinstance(self.terms[0][1], str):
            return self.terms[0][1]
        return None


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor at subscripts in which nothing is left to write out."""

    name: str
    subs: tuple[Sub, ...]

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.subs))}]"

    def indices(self) -> Iterator[str]:
        for sub in self.subs:
            for _, atom in sub.terms:
                if isinstance(atom, str):
                    yield atom
                else:
                    yield from atom.indices()


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of the indices that are written out: the output cell it adds to, its factor, its reads."""

    target: Read
    number: float
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """The matrix product inside a statement: which factors make either side, and the indices of its three axes."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    m: tuple[str, ...]
    k: tuple[str, ...]
    n: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """Another output that a kernel which walks terms row by row writes as it passes them.

    Attributes:
        points: what it sums.
        shape: of a row; there is one for each term, or what terms add to is scattered.
        reduce: summed indices that are left: columns of the tile.
        like: a tensor and an axis of it, which has as many entries as this output has rows.
        scattered: terms meet in memory.
    """

    points: tuple[Point, ...]
    shape: tuple[int, ...]
    reduce: tuple[str, ...]
    like: tuple[str, int]
    scattered: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps along its axes, the first of which counts rows."""
        return tuple(math.prod(self.shape[axis:]) for axis in range(len(self.shape) + 1))


def canonical_points(statement: Statement, points: Iterable[Point]) -> list[Any]:
    """Return points in the canonical names of the statement that they belong to, as JSON.

    What the statement does not name, such as further outputs, is numbered in the order in which it appears.
    """
    names = names_of(statement)
    tensors, indices = dict(names.tensors), dict(names.indices)

    def read(each: Read) -> list[Any]:
        return [tensors.setdefault(each.name, f"y{len(tensors)}"), [sub(s) for s in each.subs]]

    def sub(each: Sub) -> list[Any]:
        return [[[step, atom(of)] for step, of in each.terms], each.offset, each.safe, each.part]

    def atom(of: str | Read) -> object:
        if isinstance(of, Read):
            return read(of)
        return of if of in (OWNER, ENTRY) else indices.setdefault(of, f"i{len(indices)}")

    return [[read(point.target), point.number, [read(r) for r in point.reads]] for point in points]
