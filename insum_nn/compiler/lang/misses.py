"""Reads that miss: where a statement's terms may take no part.

A read misses where an entry on its path is -1, or where an affine subscript leaves its tensor. A term with a miss takes
no part, so none of its factors may matter. A factor that varies with every index of a miss is set to 0 there as it is
loaded; a sum whose cells vary with all of them is set to 0 as it is written. What does neither (a convolution's weight)
is multiplied by a zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.syntax import Access

__all__ = ["Miss", "labels_of", "misses_of"]

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """One way to miss.

    Attributes:
        access: an index tensor whose entry is -1, or any tensor that a subscript leaves.
        axis: of that subscript; `None`: the entry is -1.
        labels: the indices that it depends on.
    """

    access: Access
    axis: int | None
    labels: Labels

    def __str__(self) -> str:
        if self.axis is None:
            return f"{self.access} = -1"
        return f"{self.access.subscripts[self.axis]} is outside {self.access.name}"


def labels_of(access: Access) -> Labels:
    """The indices that an access varies with, those of its index tensors too."""
    return tuple(dict.fromkeys(index.name for index in access.indices()))


@lru_cache(maxsize=1024)
def misses_of(access: Access, bound: Bound) -> tuple[Miss, ...]:
    """The ways in which a read may miss, those of its index tensors first."""
    return tuple(dict.fromkeys(_misses(access, bound)))


def _misses(access: Access, bound: Bound) -> Iterator[Miss]:
    for axis, subscript in enumerate(access.subscripts):
        for inner in subscript.index_accesses():
            yield from _misses(inner, bound)
            if bound.facts_of(inner.name).masked is not False:
                yield Miss(inner, None, labels_of(inner))
        # A constant lies inside, and so does what a bare index tensor says.
        if subscript.plain is None and subscript.indirect is None and subscript.terms:
            yield Miss(access, axis, tuple(dict.fromkeys(index.name for index in subscript.indices())))
