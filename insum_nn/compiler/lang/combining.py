"""List the combining modes: how the terms of one cell of the output become one number.

A mode either adds its terms, so that products may be reordered and every term counts in the gradient, or selects one of
them, to which the gradient goes: in equal parts where several terms are equal to the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["COMBINING", "COMPARISONS", "OPERATORS", "Combining", "selecting"]


@dataclass(frozen=True, slots=True)
class Combining:
    """One mode.

    Attributes:
        operator: as statements write it.
        name: of the mode of stores in the loop-nest IR.
        fold: of a term, which stays if it is NaN, and an earlier number that is none.
        identity: the number that changes no other one.
        reduce: torch's reduction along axes.
        pair: torch's function of two tensors.
        scatter: the mode of `torch.scatter_reduce`.
        takes_initial: an initial value may be passed.
    """

    operator: str
    name: str
    fold: Callable[[float, float], float]
    identity: float
    reduce: Callable[..., Tensor]
    pair: Callable[..., Tensor]
    scatter: str
    takes_initial: bool = True

    @property
    def adds(self) -> bool:
        """Return whether the result is the sum of the terms."""
        return self.name == "add"

    def identity_of(self, dtype: torch.dtype) -> float | int:
        """Return the number of a dtype that changes no other one.

        >>> COMBINING["max="].identity_of(torch.int8), COMBINING["max="].identity_of(torch.float32)
        (-128, -inf)
        """
        if dtype.is_floating_point or math.isfinite(self.identity):
            return self.identity
        info = torch.iinfo(dtype)
        return info.min if self.identity < 0 else info.max


_SUM = Combining("+=", "add", operator.add, 0, torch.sum, torch.add, "sum")
COMBINING = {
    mode.operator: mode
    for mode in (
        _SUM,
        replace(_SUM, operator="=", takes_initial=False),
        Combining("max=", "max", max, -math.inf, torch.amax, torch.maximum, "amax"),
        Combining("min=", "min", min, math.inf, torch.amin, torch.minimum, "amin"),
    )
}
"""By operator."""

COMPARISONS = {"max": ">", "min": "<"}
"""By name of the modes that select: how a term compares with an earlier number that it replaces, for printers."""

OPERATORS = tuple(COMBINING)
_SELECTING = {mode.name: mode for mode in COMBINING.values() if not mode.adds}


def selecting(name: str) -> Combining | None:
    """Return the mode of a store if it selects one of its terms; `None`: it adds them, or overwrites the cell.

    >>> selecting("max").operator, selecting("add"), selecting("set")
    ('max=', None, None)
    """
    return _SELECTING.get(name)
