"""The schedules of a kernel: one frozen value, what its fields mean, and which values a stored one may have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from insum_nn.compiler.ir.nodes import Precision

__all__ = ["UNDIVIDED", "Precision", "Schedule", "power", "precision_of"]

UNDIVIDED = 1 << 62
"""A `chunk` that no row reaches."""


def precision_of(dtype: torch.dtype, requested: str) -> Precision:
    """How the matrix unit multiplies float32, as torch's float32 matmul precision says by default."""
    if requested != "auto":
        return requested  # type: ignore[return-value]
    if dtype != torch.float32:
        return "ieee"
    # Three products of 10-bit parts keep what float32 can hold of a product.
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The choices that change a kernel's speed and nothing else.

    Sgap (Zhang et al.) writes the space of a sparse sum with dense columns as {<x nnz or x row, y col>, r}: what a
    thread takes, and how many threads add up to one value. All of it can be said here, of any statement whose terms
    are summed by rows; t stands for the elements of a tile that a thread holds, m * n * k / (32 * warps).

        {<x row, y col>, 1}     m rows, k = 1: no lanes along a row; t = x * y
        {<1/r row, y col>, r}   k = r lanes along a row, t = y
        {<1/g row, y col>, r}   the same, and `chunk` = g terms at most of a row to a program

    Attributes:
        m: lanes along the rows of a tile; 1: none.
        n: lanes along its columns.
        k: lanes along what is summed.
        dot: sum by the matrix unit.
        swap: hand the matrix unit the transposed product, so that the tile's columns are its long side.
        groups: programs among which the accumulators of unrolled terms are divided.
        splits: programs among which one long sum is divided (split-K); their results are added in order.
        chunk: most terms of an owned row that one program walks; longer rows are divided.
        warps: warps a program.
        stages: depth of the software pipeline, of loops around the matrix unit.
    """

    m: int = 1
    n: int = 1
    k: int = 1
    dot: bool = False
    swap: bool = False
    groups: int = 1
    splits: int = 1
    chunk: int = 512
    warps: int = 4
    stages: int = 2

    def __str__(self) -> str:
        tile = f"tile {self.m} x {self.n}, {self.k} at a time"
        how = "by dot" + (", transposed" if self.swap else "") if self.dot else "by products and sums"
        rest = f"{self.warps} warps, {self.stages} stages"
        if self.groups > 1:
            rest += f", accumulators over {self.groups} programs"
        if self.splits > 1:
            rest += f", sum over {self.splits} programs"
        return f"{tile} {how}; {rest}"

    @property
    def launch_options(self) -> tuple[tuple[str, int], ...]:
        """What a launch passes to Triton in addition to the arguments, by Triton's names."""
        return ("num_warps", self.warps), ("num_stages", self.stages)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """Read a schedule that can be used.

        Raises:
            ValueError: it is none.
        """
        defaults = cls().to_json()
        if not isinstance(value, dict) or not value.keys() <= defaults.keys():
            raise ValueError(f"{value!r} is no schedule")
        for name, number in value.items():
            least, most = min(1, defaults[name]), _LARGEST.get(name, _MANY)
            valid = type(number) is type(defaults[name]) and least <= number <= most
            if not valid or (name in _POWERS and number & (number - 1)):
                raise ValueError(f"{name} of a schedule is {number!r}")
        schedule = cls(**value)
        if schedule.m * schedule.n * schedule.k > _LANES:
            raise ValueError(f"a schedule of {schedule} holds more than {_LANES} numbers")
        return schedule


_POWERS = ("m", "n", "k", "warps")
# No schedule that was measured comes near to these; Triton's tensors hold as many numbers as `_LANES` at most.
_LARGEST = {"warps": 32, "stages": 16, "chunk": UNDIVIDED}
_MANY, _LANES = 2**31 - 1, 1 << 20
