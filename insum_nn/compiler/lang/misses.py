"""Find the reads that may miss, whose terms do not contribute.

A read misses where an index entry on its path is missing (-1), or where an affine subscript is out of bounds. A term
with a miss does not contribute, whatever its other factors are. A factor that varies with every index of a miss is
masked as it is loaded; a sum whose cells vary with all of them is masked as it is stored. Other factors, such as the
weight of a convolution, are multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.syntax import Access, Subscript

__all__ = ["Miss", "labels_of", "misses_of"]

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """A condition under which a read misses.

    Attributes:
        access: an index tensor whose entry is missing, or a tensor that is read out of bounds.
        axis: the axis whose subscript is out of bounds; `None` for a missing entry.
        labels: the indices that it depends on.
    """

    access: Access
    axis: int | None
    labels: Labels


def labels_of(access: Access | Subscript) -> Labels:
    """Return the indices that an access or a subscript varies with, those of its index tensors included."""
    return tuple(dict.fromkeys(index.name for index in access.indices()))


@lru_cache(maxsize=1024)
def misses_of(access: Access, bound: Bound) -> tuple[Miss, ...]:
    """Return the ways in which a read may miss, those of its index tensors first."""
    return tuple(dict.fromkeys(_misses(access, bound)))


def _misses(access: Access, bound: Bound) -> Iterator[Miss]:
    for axis, subscript in enumerate(access.subscripts):
        for inner in subscript.index_accesses():
            yield from _misses(inner, bound)
            if bound.facts_of(inner.name).masked is not False:
                yield Miss(inner, None, labels_of(inner))
        # Constants and the entries of a bare index tensor are checked to be in bounds.
        if subscript.plain is None and subscript.indirect is None and subscript.terms:
            yield Miss(access, axis, labels_of(subscript))
