"""Entries of a sparse matrix sorted by rows, and where each row begins."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

__all__ = ["compressed_rows", "entry_dtype", "sort_pairs"]


def sort_pairs(first: Tensor, second: Tensor, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs of numbers below `extent`, and return both in order, and the stable permutation that sorts them.

    >>> first, second, order = sort_pairs(torch.tensor([1, 0, 1]), torch.tensor([0, 2, 0]), 3)
    >>> first.tolist(), second.tolist(), order.tolist()
    ([0, 1, 1], [2, 0, 0], [1, 0, 2])
    """
    dtype = entry_dtype(first.device, max(extent, first.shape[0]))
    if torch.compiler.is_compiling():
        # Sizes may be symbolic. Both keys are one number.
        packed, order = (first.long() * extent + second).sort(stable=True)
        return (packed // extent).to(dtype), (packed % extent).to(dtype), order.to(dtype)
    bits, places = max(extent - 1, 1).bit_length(), max(first.shape[0] - 1, 1).bit_length()
    if 2 * bits + places <= 63:
        # Both keys and the place in one integer: plain numbers are sorted, which is much faster than an argsort.
        place = torch.arange(first.shape[0], device=first.device)
        packed = (first.long() << (bits + places)) | (second.long() << places) | place
        if packed.device.type == "cpu" and not is_functorch_wrapped_tensor(packed):
            packed.numpy().sort()
        else:
            packed = packed.sort().values
        ordered = packed >> (bits + places), (packed >> places) & ((1 << bits) - 1), packed & ((1 << places) - 1)
        return ordered[0].to(dtype), ordered[1].to(dtype), ordered[2].to(dtype)
    order = second.argsort(stable=True)
    order = order[first[order].argsort(stable=True)]
    return first[order].to(dtype), second[order].to(dtype), order.to(dtype)


def entry_dtype(device: torch.device, most: int) -> torch.dtype:
    """Return the dtype in which entries of numbers up to `most` are kept."""
    # Half the memory, and half of what a kernel reads of them; torch's products on a CPU take int64 alone.
    return torch.int64 if device.type == "cpu" or most >= 2**31 else torch.int32


def compressed_rows(row: Tensor, num_rows: int) -> Tensor:
    """Return (num_rows + 1,) the first entry of each row, and the number of entries, for ascending `row` (p,).

    >>> compressed_rows(torch.tensor([0, 0, 2]), 3).tolist()
    [0, 2, 2, 3]
    """
    bounds = torch.arange(num_rows + 1, dtype=row.dtype, device=row.device)
    return torch.searchsorted(row.contiguous(), bounds, out_int32=row.dtype == torch.int32)
