"""List the dtypes of factors, outputs and index tensors: one row says all that the package asks of a dtype.

What is no dense tensor has none: it is refused, by one rule for all arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

__all__ = [
    "DTYPES",
    "FLOATS",
    "INDEX_DTYPES",
    "VALUE_DTYPES",
    "Dtype",
    "dtype_of",
    "is_widened",
    "not_dense",
    "wide_dtype",
]


@dataclass(frozen=True, slots=True)
class Dtype:
    """What is known of a dtype.

    Attributes:
        torch: torch's dtype.
        signature: Triton's name of it in signatures of kernels, `fp32`.
        accumulator: the dtype in which sums of it are formed.
        is_value: factors and outputs may have it.
        is_index: index tensors may have it.
        literal: Triton's name of it in expressions, `tl.float32`; torch's name where it is not given.
    """

    torch: torch.dtype
    signature: str
    accumulator: torch.dtype
    is_value: bool = True
    is_index: bool = False
    literal: str = ""

    @property
    def name(self) -> str:
        """Torch's name, by which the IR knows it too."""
        return str(self.torch).removeprefix("torch.")

    @property
    def tl(self) -> str:
        """Its text in a Triton kernel."""
        return f"tl.{self.literal or self.name}"

    @property
    def pointer(self) -> str:
        """The type of a pointer to it in the signature of a Triton kernel."""
        return f"*{self.signature}"

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.torch.is_floating_point

    @property
    def is_widened(self) -> bool:
        """Whether its sums are formed in a wider dtype, as those of fp16 and bf16 are in float32."""
        return self.accumulator != self.torch

    @property
    def wide(self) -> Dtype:
        """The row of its accumulator."""
        return dtype_of(self.accumulator)

    def rounded(self, value: float) -> float:
        """Return the number that a tensor of it holds of another one."""
        return torch.tensor(value, dtype=self.torch).item()

    @property
    def has_dot(self) -> bool:
        """Whether `tl.dot` multiplies matrices of it: of floats that accumulate in float32."""
        return self.accumulator == torch.float32


DTYPES = (
    Dtype(torch.float16, "fp16", torch.float32),
    Dtype(torch.bfloat16, "bf16", torch.float32),
    Dtype(torch.float32, "fp32", torch.float32),
    Dtype(torch.float64, "fp64", torch.float64),
    Dtype(torch.int8, "i8", torch.int8),
    Dtype(torch.uint8, "u8", torch.uint8),
    Dtype(torch.int16, "i16", torch.int16),
    Dtype(torch.int32, "i32", torch.int32, is_index=True),
    Dtype(torch.int64, "i64", torch.int64, is_index=True),
    Dtype(torch.bool, "i1", torch.bool, is_value=False, literal="int1"),
)
"""Every dtype that a statement or a kernel may hold; masks of kernels are bool."""

_ROWS: dict[torch.dtype | str, Dtype] = {key: row for row in DTYPES for key in (row.torch, row.name)}


def _listed(chosen: Callable[[Dtype], bool]) -> tuple[torch.dtype, ...]:
    return tuple(row.torch for row in DTYPES if chosen(row))


VALUE_DTYPES = _listed(lambda row: row.is_value)
FLOATS = _listed(lambda row: row.is_value and row.is_floating)
INDEX_DTYPES = _listed(lambda row: row.is_index)


def dtype_of(dtype: torch.dtype | str) -> Dtype:
    """Return the row of a dtype, by torch's dtype or its name.

    >>> dtype_of("bfloat16").accumulator
    torch.float32
    """
    return _ROWS[dtype]


def not_dense(value: object) -> str | None:
    """Return what a message calls a value that is no dense tensor; `None` for one that is.

    >>> not_dense(torch.ones(2)), not_dense([1.0]), not_dense(torch.eye(2).to_sparse())
    (None, 'list', 'a tensor of layout torch.sparse_coo')
    """
    # By identity first: `isinstance` takes longer, and every call comes here.
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        if isinstance(value, UninitializedBuffer | UninitializedParameter):
            return "an uninitialized parameter or buffer"
    if value.is_nested:
        return "a nested tensor"
    return None if value.layout is torch.strided else f"a tensor of layout {value.layout}"


def is_widened(dtype: torch.dtype | str) -> bool:
    """Whether sums of a dtype are formed in a wider one; false of a dtype that no statement has.

    >>> is_widened(torch.float16), is_widened("float32"), is_widened(torch.complex64)
    (True, False, False)
    """
    row = _ROWS.get(dtype)
    return row is not None and row.is_widened


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of a dtype are formed.

    >>> wide_dtype(torch.float16), wide_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    row = _ROWS.get(dtype)
    return dtype if row is None else row.accumulator
