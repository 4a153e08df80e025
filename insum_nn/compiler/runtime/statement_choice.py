"""Which of several statements that compute the same product is the fastest: rules by device, dtype and sizes.

An operator writes the statements; these rules choose among them. They are measurements of two machines, an H200 and two
cores of a CPU, and hold for what runs a statement there, so they stand with the compiler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from insum_nn.compiler.kernels.launch import available as generates_kernels
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.product_cost import dense_from
from insum_nn.dtypes import is_widened

__all__ = [
    "LONG_SUM",
    "MOST_CELLS",
    "MOST_TERMS",
    "by_table",
    "dense_uses",
    "fits_between",
    "fits_both_ends",
    "pairs_are_faster",
    "paths_are_products",
    "pays_between",
]

# Products with stored weights.


def dense_uses(weight: Tensor, width: int, cells: int, moved: int, row: int | None, options: Options) -> float:
    """How often each weight that a layer stores is multiplied where the dense product is faster; see `dense_from`."""
    # A library promises no order of its sums.
    if options.backend != "auto" or options.deterministic:
        return math.inf
    return dense_from(weight.device.type, width, weight.shape, cells, moved, row)


# Sums over pairs by a table of neighbours.

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


def pairs_are_faster(dtype: torch.dtype) -> bool:
    """Whether a sum that leaves a weight goes by the list of pairs, as the summed axis of a matrix product."""
    return dtype.itemsize <= _LIST_BYTES


# Sums over static tables.


def paths_are_products(device: torch.device) -> bool:
    """Whether statements over static tables run one after the other in one function, rather than fused in one kernel.

    The C function of a CPU cuts each in two where that multiplies less, and shares what several make first.
    """
    return device.type == "cpu"


# Terms of a static table in one statement at most, since a generated kernel unrolls them; and entries of such a table.
MOST_TERMS = 5000
MOST_CELLS = 1 << 17
# From so many terms on, a sum is worth a matrix product of its own, whose result a second statement reads.
LONG_SUM = 16
# Numbers of that result at most: what they cost in memory.
_MOST_BETWEEN = 1 << 28
# Products that a GPU makes in the time of a number of that result, which is written and read.
_PER_NUMBER = 30


def fits_between(numbers: int) -> bool:
    """Whether a result of so many numbers may stand between two statements that could be one."""
    return numbers <= _MOST_BETWEEN


# Registers of a thread, half of all, that the sums of a row may take in one kernel for both ends of an edge. For the
# double backward of MACE's product in float64, which takes 142, an H200 took 52.1 ms by one kernel, and 10.6 by one for
# each end. For NequIP's, which takes 70, one was faster than three.
_MOST_REGISTERS = 128


def fits_both_ends(cells: int, dtype: torch.dtype) -> bool:
    """Whether one kernel may make sums of so many cells of a row at both ends of an edge: memory adds some of them."""
    return not is_widened(dtype) and cells * dtype.itemsize // 4 <= _MOST_REGISTERS


def pays_between(length: int, terms: int, sums: int) -> bool:
    """Whether sums of a length, each made once for the terms that need it, save more than their results cost."""
    return length * (terms - sums) > _PER_NUMBER * sums
