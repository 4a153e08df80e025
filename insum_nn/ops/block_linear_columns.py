"""The linear map of blocks on transposed samples, which a GPU reads faster.

    Y[n,Row[p],a] += W[p,a,b] * X[Col[p],b,n]
    dX[n,Col[p],b] += W[p,a,b] * dY[Row[p],a,n]
    dW[p,a,b] += dY[Row[p],a,n] * X[Col[p],b,n]

A block reads b features of every sample: pieces of b numbers, one sample apart. Such pieces use little of the memory's
bandwidth, so the input is transposed first. That costs two passes over it, and the blocks read rows without gaps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from insum_nn.compiler.api import BoundProgram, BoundSums, built_program, multilinear
from insum_nn.compiler.options import Options
from insum_nn.facts import IndexFacts, NamedFacts

__all__ = ["COLUMNS", "COLUMNS_FACTS", "TRANSPOSED", "BlockColumns"]

Role = Literal["Y", "X", "W"]

COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "Y": "Y[n,Row[p],a] += W[p,a,b] * X[Col[p],b,n]",
        "X": "dX[n,Col[p],b] += W[p,a,b] * dY[Row[p],a,n]",
        "W": "dW[p,a,b] += dY[Row[p],a,n] * X[Col[p],b,n]",
    }
)
"""The statement of each of the three tensors."""

_OPERANDS = MappingProxyType({"Y": ("W", "X"), "X": ("W", "Y"), "W": ("Y", "X")})
# The same by their names in the statements.
_READ = {"Y": ("W", "X"), "X": ("W", "dY"), "W": ("dY", "X")}
TRANSPOSED = "T[c,n] += X[n,c]"
"""Makes the operands of the others."""

COLUMNS_FACTS = NamedFacts(
    Row=IndexFacts(sorted=True, masked=False, proven=True), Col=IndexFacts(masked=False, proven=True)
)
_NO_FACTS = NamedFacts()


@dataclass(frozen=True, slots=True)
class BlockColumns(BoundSums):
    """The three sums of a linear map of blocks, each other's gradients.

    All three tensors are as a layer has them: `X` (n, cols * b), `Y` (n, rows * a), `W` (p, a, b).

    Attributes:
        row: (p,) ascending.
        col: (p,).
        grid: block rows and columns.
        options: compile options.
    """

    row: Tensor
    col: Tensor
    grid: tuple[int, int]
    options: Options

    operands = _OPERANDS

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return (n, rows * a), each row of which starts from the bias (rows * a,); differentiable to any order."""
        return multilinear(self, "Y", weight, x, initial=bias)

    def call(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor] | None
    ) -> tuple[BoundProgram, Sequence[Tensor], tuple[int, ...], Hashable]:
        """Return the statement of the tensor of that name, and what it reads."""
        a, b = operands
        named, shape = self._arranged(requested, a, b, made)
        key = (shape, self.row.shape, self.row.dtype, a.shape, b.shape, a.dtype, a.device)
        product = built_program(COLUMNS[requested], COLUMNS_FACTS, self.options).unbound
        return product, [named[name] for name in product.names], shape, key

    def result(self, requested: str, written: Tensor) -> Tensor:
        """Return it as a layer has it."""
        return written if requested == "W" else written.flatten(1)

    def _arranged(
        self, requested: str, a: Tensor, b: Tensor, made: dict[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """Return the tensors that a statement reads, by name, and the shape of its output."""
        (rows, cols), (first, second) = self.grid, _READ[requested]
        named = {"Row": self.row, "Col": self.col}
        if requested == "W":
            y, x = self._columns("Y", a, made), self._columns("X", b, made)
            return {**named, first: y, second: x}, (self.row.shape[0], y.shape[1], x.shape[1])
        read, blocks, size = ("X", rows, a.shape[1]) if requested == "Y" else ("Y", cols, a.shape[2])
        return {**named, first: a.contiguous(), second: self._columns(read, b, made)}, (b.shape[0], blocks, size)

    def _columns(self, name: str, samples: Tensor, made: dict[str, Tensor] | None) -> Tensor:
        """Return the operand of that name by columns; `made` holds those that exist, `None` where a mode is active."""
        blocks = self.grid[name == "X"]
        if made is None:
            return _columns(samples, blocks, self.options)
        if name not in made:
            made[name] = _columns(samples, blocks, self.options, alone=True)
        return made[name]


def _columns(samples: Tensor, blocks: int, options: Options, alone: bool = False) -> Tensor:
    """Return (n, blocks * b) samples as (blocks, b, n); `alone` where nothing is recorded and no mode is active."""
    # torch's own transposing copy reaches a fifth of the memory's bandwidth.
    count, columns = samples.shape
    transposed = built_program(TRANSPOSED, _NO_FACTS, options)
    if alone:
        key = (samples.shape, samples.dtype, samples.device)
        turned = transposed.unbound(samples, out_shape=(columns, count), key=key)
    else:
        turned = transposed(X=samples)
    return turned.view(blocks, columns // blocks, count)
