"""`spconv.pytorch.ops`: kernel maps as tables of pairs, and the shapes of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry
from insum_nn.structure.kernel_map_build import build_kernel_map, output_shape

__all__ = ["ConvAlgo", "get_conv_output_size", "get_deconv_output_size", "get_indice_pairs"]


class ConvAlgo(Enum):
    """Names that callers may pass as `algo`; none is read, for the compiler chooses."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The spatial shape of a convolution's output.

    Raises:
        InsumShapeError: the kernel is larger than the padded input.

    >>> get_conv_output_size([19, 18], [3, 2], [2, 1], [1, 0], [1, 1])
    [10, 17]
    """
    zeros = (0,) * len(input_size)
    moves = (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), zeros)
    return list(output_shape(input_size, Geometry("conv", *moves)))


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """The spatial shape of a transposed convolution's output, as torch's, which the dilation enlarges.

    Raises:
        InsumShapeError: it would be empty.

    >>> get_deconv_output_size([10], [3], [2], [1], [1], [1])
    [20]
    """
    moves = (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), tuple(output_padding))
    return list(output_shape(input_size, Geometry("transpose", *moves)))


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
        the pairs of each offset, (o,) int32.

    Raises:
        InsumRangeError: a voxel lies outside the grid.
        InsumFormatError: a voxel stands twice.
    """
    kernel, dilated = tuple(ksize), tuple(dilation)
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    if subm:
        centre = tuple(k // 2 * d for k, d in zip(kernel, dilated, strict=True))
        geometry = Geometry("subm", kernel, ones, centre, dilated, zeros)
    elif transpose:
        geometry = Geometry("transpose", kernel, tuple(stride), tuple(padding), dilated, tuple(out_padding))
    else:
        geometry = Geometry("conv", kernel, tuple(stride), tuple(padding), dilated, zeros)
    found = build_kernel_map(Coordinates(indices, tuple(spatial_shape), batch_size), geometry)
    return found.out_indices, found.indice_pairs, found.indice_pair_num
