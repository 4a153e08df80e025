"""Autocast: a statement counts as a matrix product, whose operands take autocast's dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, overload

import torch
from torch import Tensor

from insum_nn.dtypes import wide_dtype

__all__ = ["to_autocast", "under_autocast", "without_autocast"]

T = TypeVar("T")
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def under_autocast(device: torch.device) -> bool:
    """Return whether operands on this device take autocast's dtype; never on devices without one, such as meta.

    >>> under_autocast(torch.device("meta"))
    False
    """
    # `torch.amp.is_autocast_available` is unknown to Dynamo before torch 2.13.
    return device.type in _DEVICES and torch.is_autocast_enabled(device.type)


def _is_cast(dtype: torch.dtype) -> bool:
    """Return whether autocast casts a dtype: a float that sums in float32."""
    return dtype.is_floating_point and wide_dtype(dtype) == torch.float32


@overload
def to_autocast(value: Tensor) -> Tensor: ...
@overload
def to_autocast(value: T) -> T: ...
def to_autocast(value: object) -> object:
    """Cast a floating-point operand, but of float64, to autocast's dtype where autocast is active.

    >>> to_autocast(torch.ones(1)).dtype
    torch.float32
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     to_autocast(torch.ones(1)).dtype
    torch.bfloat16
    """
    # What is no tensor is for the checks to judge.
    if not isinstance(value, Tensor) or not under_autocast(value.device) or not _is_cast(value.dtype):
        return value
    return value.to(torch.get_autocast_dtype(value.device.type))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Suspend autocast where operands have their dtypes already: it would make equal dtypes differ."""
    return torch.autocast(device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()
