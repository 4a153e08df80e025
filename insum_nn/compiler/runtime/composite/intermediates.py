"""Intermediate tensors that statements of one recorded call have in common.

    Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]

and its gradient of `X` both begin with `T[Row[p],a,Col[p],b] += W[p,a,b]` where each runs as two statements. The tensor
is made once: what the forward pass makes and a gradient reads is saved with the call, and what several gradients read
is kept until all are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Common", "intermediates", "intermediates_apart"]


class _Intermediates(threading.local):
    """What the statements that this thread runs make, and may read.

    Attributes:
        collected: filled with every intermediate tensor, by what it is; `None`: none is.
        shared: read in place of what is made; entries of `None` are filled.
    """

    collected: dict[Hashable, Tensor] | None = None
    shared: dict[Hashable, Tensor | None] | None = None


intermediates = _Intermediates()


@contextmanager
def intermediates_apart() -> Generator[None]:
    """Neither collect nor share with the call that runs now: what a rehearsal makes is zero."""
    outer = intermediates.collected, intermediates.shared
    intermediates.collected = intermediates.shared = None
    try:
        yield
    finally:
        intermediates.collected, intermediates.shared = outer


@dataclass(frozen=True, slots=True)
class Common:
    """The intermediate tensors of a kind of call that more than one of its statements begins with.

    Attributes:
        saved: those that the forward pass makes and a gradient reads.
        repeated: others that several gradients read.
    """

    saved: tuple[Hashable, ...] = ()
    repeated: tuple[Hashable, ...] = ()

    @staticmethod
    def of(forward: Iterable[Hashable], gradients: Iterable[Iterable[Hashable]]) -> Common:
        """Find them from what the forward pass makes, and from what each derivative statement makes."""
        made, read = set(forward), [key for each in gradients for key in dict.fromkeys(each)]
        saved = tuple(dict.fromkeys(key for key in read if key in made))
        return Common(saved, tuple(key for key in dict.fromkeys(read) if read.count(key) > 1 and key not in made))
