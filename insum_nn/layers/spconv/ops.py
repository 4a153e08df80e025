"""`spconv.pytorch.ops`: kernel maps as tables of pairs, the shapes of outputs, and what is computed over tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_nn.errors import InsumShapeError
from insum_nn.layers.spconv import table_ops
from insum_nn.layers.spconv.core import AlgoHint, ConvAlgo
from insum_nn.layers.spconv.cppcore import get_current_stream
from insum_nn.layers.spconv.table_ops import *
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap, build_kernel_map, output_shape

__all__ = [
    "AlgoHint",
    "ConvAlgo",
    "get_conv_output_size",
    "get_current_stream",
    "get_deconv_output_size",
    "get_indice_pairs",
    "get_indice_pairs_implicit_gemm",
    "global_pool_rearrange",
    "maximum_value_int_",
]
__all__ += table_ops.__all__

_MASK_BITS = 32


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the spatial shape of a convolution's output; 1 along an axis where `kernel_size` is -1, the whole axis.

    Raises:
        InsumShapeError: the kernel is larger than the padded input.

    >>> get_conv_output_size([19, 18], [3, 2], [2, 1], [1, 0], [1, 1])
    [10, 17]
    """
    kernel = [1 if k == -1 else k for k in kernel_size]
    found = output_shape(input_size, Geometry.of(kernel, stride, padding, dilation))
    return [1 if k == -1 else extent for k, extent in zip(kernel_size, found, strict=True)]


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """Return the spatial shape of a transposed convolution's output, as torch's, which the dilation enlarges.

    Raises:
        InsumShapeError: it would be empty.

    >>> get_deconv_output_size([10], [3], [2], [1], [1], [1])
    [20]
    """
    if any(k < 1 for k in kernel_size):
        raise InsumShapeError(
            f"get_deconv_output_size: 'kernel_size' is {list(kernel_size)}",
            details=["expected at least 1 along each axis"],
            fix="pass the kernel's cells along each axis.",
            argument="kernel_size",
            got=kernel_size,
        )
    moves = (kernel_size, stride, padding, dilation, output_padding)
    return list(output_shape(input_size, Geometry.of(*moves, transposed=True)))


def get_indice_pairs(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: object,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    num_out_act_bound: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find every pair of input and output voxels that a kernel joins.

    Args:
        indices: (n, 1 + d) int32 or int64.
        batch_size: clouds in the batch.
        spatial_shape: d extents.
        algo: not read.
        ksize: kernel cells along each axis.
        stride: steps; not read if `subm`.
        padding: cells added; not read if `subm`, whose kernel is centred.
        dilation: steps between kernel cells.
        out_padding: added to a transposed convolution's output shape.
        subm: outputs are the inputs.
        transpose: the transposed convolution.
        num_out_act_bound: not read: the number of outputs has no bound.

    Returns:
        The output voxels (m, 1 + d); rows (2, o, n) int32 of inputs and outputs by offset, from the left, then -1; and
        the pairs of each offset, (o,) int32. Of a submanifold kernel of odd extents these are counted, as in spconv,
        for the first half of the offsets: the other half mirrors them, and the middle pairs each voxel with itself.

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel occurs twice.
    """
    geometry = Geometry.of(ksize, stride, padding, dilation, out_padding, subm=subm, transposed=transpose)
    found = build_kernel_map(Coordinates(indices, tuple(spatial_shape), batch_size), geometry)
    return found.out_indices, found.indice_pairs, _pair_num(found)


def get_indice_pairs_implicit_gemm(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: object,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    is_train: bool = True,
    alloc: object = None,
    timer: object = None,
    num_out_act_bound: int = -1,
    direct_table: bool = True,
    do_sort: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Any]]:
    """Find the neighbours of each voxel under a kernel, as tables.

    Args:
        indices: (n, 1 + d) int32 or int64.
        batch_size: clouds in the batch.
        spatial_shape: d extents.
        algo: `ConvAlgo.MaskSplitImplicitGemm` gives masks in two halves of the offsets; else not read.
        ksize: kernel cells along each axis.
        stride: steps; not read if `subm`.
        padding: cells added; not read if `subm`, whose kernel is centred.
        dilation: steps between kernel cells.
        out_padding: added to a transposed convolution's output shape.
        subm: outputs are the inputs.
        transpose: the transposed convolution.
        is_train: also make the tables of inputs.
        alloc: not read; nor are `timer`, `num_out_act_bound` and `direct_table`.
        timer: not read.
        num_out_act_bound: not read: the number of outputs has no bound.
        direct_table: not read.
        do_sort: sort the masks; else they stay in the order of the voxels.

    Returns:
        The output voxels (m, 1 + d); the pairs of each offset, as `get_indice_pairs` counts them; `pair_fwd` (o, m)
        int32, the input of each output, or -1; `pair_bwd` (o, n) int32, the output of each input, empty without
        `is_train`; then lists of one or two tensors: of the sorted masks of outputs (m, words) int32, whose bit b of
        word w says that offset 32 w + b has a neighbour; of the same of inputs (none if `subm`, or without
        `is_train`); of the row of each mask of outputs, (m,) int32, and of inputs; and the offsets of each split as a
        number, in a uint32 array.

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel occurs twice.
    """
    geometry = Geometry.of(ksize, stride, padding, dilation, out_padding, subm=subm, transposed=transpose)
    found = build_kernel_map(Coordinates(indices, tuple(spatial_shape), batch_size), geometry)
    volume = found.geometry.volume
    if algo is ConvAlgo.MaskSplitImplicitGemm and volume <= _MASK_BITS:
        first = volume - volume // 2
        filters = [(1 << first) - 1, ((1 << (volume - first)) - 1) << first]
    else:
        filters = [(1 << _MASK_BITS) - 1]
    forward = found.neighbours
    backward = found.inverse.neighbours if is_train else forward.new_empty(0)
    forward_masks = [_sorted_masks(forward, keep, do_sort) for keep in filters]
    backward_masks = [_sorted_masks(backward, keep, do_sort) for keep in filters] if is_train and not subm else []
    return (
        found.out_indices,
        _pair_num(found),
        forward,
        backward,
        [mask for mask, _ in forward_masks],
        [mask for mask, _ in backward_masks],
        [order for _, order in forward_masks],
        [order for _, order in backward_masks],
        [np.array([keep], dtype=np.uint32) for keep in filters],
    )


def global_pool_rearrange(coords: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the rows of each cloud of a batch.

    Args:
        coords: (n, 1 + d): the batch entry first; rows where it is negative belong to none.
        batch_size: b.

    Returns:
        (b, n) int32: the rows of each cloud from the left, then -1; and (b,) int32, how many they are.

    >>> rows, counts = global_pool_rearrange(torch.tensor([[1, 5], [0, 2], [1, 3]]), 2)
    >>> rows.tolist(), counts.tolist()
    ([[1, -1, -1], [0, 2, -1]], [1, 2])
    """
    entry, order = coords[:, 0].long().sort(stable=True)
    order, entry = order[entry >= 0], entry[entry >= 0]
    counts = torch.bincount(entry, minlength=batch_size)
    place = torch.arange(entry.shape[0], device=coords.device) - (counts.cumsum(0) - counts)[entry]
    rows = torch.full((batch_size, coords.shape[0]), -1, dtype=torch.int32, device=coords.device)
    rows[entry, place] = order.int()
    return rows, counts.int()


def maximum_value_int_(ten: Tensor, value: int) -> None:
    """Raise the numbers of `ten` that are less to `value`, in place."""
    ten.clamp_(min=value)


def _pair_num(found: KernelMap) -> Tensor:
    """Return (o,) int32: the pairs of each offset; of a mirrored kernel 0 from the middle on."""
    counts = found.indice_pair_num
    if found.geometry.is_mirrored:
        counts[found.geometry.volume // 2 :] = 0
    return counts


def _sorted_masks(neighbours: Tensor, keep: int, do_sort: bool) -> tuple[Tensor, Tensor]:
    """Masks (m, words) of the offsets that each column has, ascending by those of `keep`, and the column of each."""
    columns = neighbours.shape[1]
    words = list((neighbours >= 0).long().split(_MASK_BITS))
    numbers = [(word << torch.arange(len(word), device=word.device)[:, None]).sum(0) for word in words]
    order = torch.arange(columns, device=neighbours.device)
    for number in numbers if do_sort else []:
        # From the least word to the greatest, each keeping the order of those before it.
        order = order[(number & keep)[order].sort(stable=True).indices]
    mask = torch.stack(numbers, dim=1)[order]
    # As unsigned words of 32 bits, which torch keeps as signed ones.
    return torch.where(mask >= 1 << 31, mask - (1 << 32), mask).int(), order.int()
