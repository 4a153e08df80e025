"""When a layer multiplies by its stored weights faster as a dense tensor: counts, weighed by what was measured."""

from __future__ import annotations

import torch
from torch import Tensor

from insum_nn.compiler.options import Options

__all__ = ["dense_pays"]

# In multiplications of a library's dense product on a CPU: one of a stored weight alone, or in a large block, with the
# side of a block that takes twice as long; how many more start a row of lanes; moving a number between its layout and
# that of lanes; forming a weight of the dense tensor, and reading its gradient; and the calls. Of 16 bits, for which
# libraries use other instructions: so many times more, and forming a weight. One thread; 1024 x 1024 and 2048 x 2048
# with 1 to 1024 samples, blocks of 4 to 64, and convolutions of 64 to 256 channels on rows of 14 to 56.
_ALONE, _BLOCK, _SIDE, _ROW, _MOVED, _FORMED, _CALLS = 3.0, 1.4, 10.0, 40.0, 65.0, 70.0, 2.0**20
_HALF = 8.0, 300.0


def dense_pays(weight: Tensor, cells: int, uses: int, row: int, moved: int, options: Options) -> bool:
    """Whether a layer multiplies by its stored weights faster as the dense tensor, which is formed for each call.

    Args:
        weight: stored numbers, (p,), or blocks, (p, a, b).
        cells: numbers of the dense tensor.
        uses: how often each weight is multiplied.
        row: of these, how many lie in a row, along which lanes run.
        moved: numbers that a kernel over stored weights moves between layouts for each use.
        options: compile options.
    """
    exact = options.deterministic or torch.are_deterministic_algorithms_enabled()
    if weight.device.type != "cpu" or options.backend != "auto" or exact:
        return False
    rate = (_ALONE if weight.ndim == 1 else _BLOCK * (1 + _SIDE / min(weight.shape[1:]))) * (1 + _ROW / max(row, 1))
    slower, forming = (1.0, _FORMED) if weight.itemsize > 2 else _HALF
    return uses * (weight.numel() * rate * slower + _MOVED * moved) > cells * (uses + forming) + _CALLS
