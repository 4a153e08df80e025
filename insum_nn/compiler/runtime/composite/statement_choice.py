"""Which of several statements that compute the same product is the fastest: rules by device, dtype and sizes.

An operator writes the statements; these rules choose among them. They are measurements of two machines, an H200 and two
cores of a CPU, and hold for what runs a statement there, so they stand with the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from insum_nn.compiler.kernels.launch import available as generates_kernels
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.modes import is_plain_eager

__all__ = [
    "adds_atomically",
    "by_table",
    "dense_is_faster",
    "dense_reason",
    "gathers_blocks",
    "pairs_are_faster",
    "paths_are_products",
    "takes_columns",
    "takes_table",
]

# Products of a matrix of blocks by the dense matrix.

# Share of stored blocks from which a dense product is the faster one, by what the shorter side of a block is at least.
# Half types on an H200, 4096 x 4096 x 4096: blocks of 32 take as long as the dense product at 0.33, and forming the
# dense matrix comes on top; larger blocks are read fewer times. On two cores of a CPU, 1024 x 1024 times 256 columns:
# blocks of 16 and 32 take as long at 0.2 and 0.4, and larger ones are as fast as the dense product at any share.
_SHARES = {"cuda": ((64, 0.6), (0, 0.37)), "cpu": ((64, math.inf), (32, 0.4), (0, 0.22))}
_DTYPES = {"cuda": (torch.float16, torch.bfloat16), "cpu": (torch.float32, torch.float64)}
# Fewest columns of the dense operand; with fewer, reading the matrix decides, and a sparse one is shorter.
_COLUMNS = 256


def dense_is_faster(values: Tensor, grid: Sequence[int], columns: int, options: Options) -> bool:
    """Whether to multiply by the dense matrix instead of its blocks.

    On a GPU the library multiplies float32 exactly unless it is told otherwise, and is slower than the blocks at any
    share; on a CPU it has no fast product of half types.

    Args:
        values: (p, a, b) stored blocks.
        grid: block rows and columns of the matrix.
        columns: columns of the dense operand.
        options: compile options; only `backend="auto"` has a choice.
    """
    device = values.device.type
    if options.backend != "auto" or values.dtype not in _DTYPES.get(device, ()) or not _at_least(columns, _COLUMNS):
        return False
    return _at_least(values.shape[:-2].numel(), _share(values) * grid[0] * grid[1])


def _share(values: Tensor) -> float:
    side = min(values.shape[-2:])
    for least, share in _SHARES[values.device.type]:
        if side >= least:
            return share
    return math.inf


def _at_least(size: int | torch.SymInt | Tensor, threshold: float) -> bool:
    """Whether a size reaches a threshold of speed, which must not limit the sizes that an exported graph takes.

    Dynamo may compare a symbolic size: it compiles again on the other side. An exported graph is for all sizes, and so
    is one of `make_fx`, so there a threshold counts only for sizes that are known.
    """
    if isinstance(size, Tensor):
        # Of torch.jit.trace.
        return False
    if torch.compiler.is_exporting() or (isinstance(size, torch.SymInt) and not torch.compiler.is_dynamo_compiling()):
        # It brings sympy with it.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(size >= threshold)
    return bool(size >= threshold)


def dense_reason(values: Tensor, grid: Sequence[int]) -> str:
    """Why `dense_is_faster` said so, in words."""
    stored = values.shape[:-2].numel() / max(1, grid[0] * grid[1])
    a, b = values.shape[-2:]
    return f"{stored:.2f} of the {a} x {b} blocks are stored; from {_share(values):.2f} on the dense product is faster"


def gathers_blocks(values: Tensor, options: Options) -> bool:
    """Whether a dense matrix is gathered from blocks that stand once each: one pass, without zeros first."""
    return values.is_cuda and options.backend == "auto" and values.numel() > 0 and is_plain_eager(values)


# Products of samples with blocks.

# Fewest samples for which transposing pays, and bytes of a piece from which nothing is gained. Measured on an H200:
# 4096 x 4096 weights, a tenth of the blocks stored, 4096 samples.
_SAMPLES = 256
_PIECE = 256


def takes_columns(x: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether a product of (n, k) samples with (p, a, b) blocks is better formed from transposed samples."""
    # A tracer's sizes may be symbols, which a comparison would limit.
    if x.device.type != "cuda" or options.backend != "auto" or not is_plain_eager(x, weight) or not generates_kernels():
        return False
    if (
        x.shape[0] < _SAMPLES
        or weight.shape[0] == 0
        or min(weight.shape[1:]) < 16
        or weight.shape[2] * weight.element_size() > _PIECE
    ):
        return False
    return weight.dtype != torch.float64 and x.dtype == weight.dtype


# Sums over pairs by a table of neighbours.

# Entries of the largest table: past it (1 GiB of int32, in either direction) the pairs take far less memory.
_MOST_ENTRIES = 1 << 28
# Of the widest elements that the matrix unit multiplies: of these the weight's gradient goes by the list of pairs.
_LIST_BYTES = 4
# Tests let every device and backend go through the table.
_everywhere = False


def by_table(device: torch.device, options: Options) -> bool:
    """Whether sums over neighbours go through a table on a device: where a generated kernel runs them.

    Other backends would form what is gathered for all offsets of all outputs, of which the pairs are a small part.
    """
    if _everywhere or options.backend == "triton":
        return True
    return device.type == "cuda" and options.backend == "auto" and generates_kernels()


def takes_table(entries: int, features: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether a table of so many entries can be taken for these tensors, and is the better way."""
    return by_table(features.device, options) and is_plain_eager(features, weight) and entries <= _MOST_ENTRIES


def pairs_are_faster(dtype: torch.dtype) -> bool:
    """Whether a sum that leaves a weight goes by the list of pairs, as the summed axis of a matrix product."""
    return dtype.itemsize <= _LIST_BYTES


# Sums over static tables.


def paths_are_products(device: torch.device) -> bool:
    """Whether statements over static tables are computed together as a library's products, rather than as one kernel.

    A generated kernel writes out a table's entries as terms; a CPU's library multiplies the small matrices they make.
    """
    return device.type == "cpu"


# Sums over the edges of a node.


def adds_atomically(device: torch.device) -> bool:
    """Whether `index_add` adds cell by cell in no fixed order on a device, which a product with a matrix does not."""
    return device.type != "cpu"
