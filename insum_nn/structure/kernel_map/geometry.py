"""How a kernel moves over a grid, and the grid that it leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Literal

from insum_nn.errors import InsumShapeError
from insum_nn.structure.coordinates import MAX_EXTENT

__all__ = ["ConvAlgo", "Geometry", "MapKind", "output_shape"]

MapKind = Literal["subm", "conv", "transpose"]


class ConvAlgo(Enum):
    """Names of spconv's ways to convolve, which callers may pass; none is read, for the compiler chooses."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel moves over a grid.

    Attributes:
        kind: `"subm"`: outputs are the inputs' voxels; `"conv"`: every voxel that the kernel reaches; `"transpose"`:
            the same for the transposed convolution.
        kernel_size: d extents.
        stride: d steps; ones for `"subm"`.
        padding: d; for `"subm"` the kernel cell that lies on the voxel itself, times the dilation.
        dilation: d steps between kernel cells.
        output_padding: d; added to the shape of a transposed convolution's output.
        volume: kernel offsets, `o`.
        reach: of `"subm"`: the widest step along an axis from a voxel to another that it meets.
        is_pointwise: every output voxel is the input voxel of the same row.
        is_mirrored: the kernel is a submanifold one whose middle cell lies on the voxel: its own mirror.
    """

    kind: MapKind
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    volume: int = field(init=False, repr=False, compare=False)
    reach: int = field(init=False, repr=False, compare=False)
    is_pointwise: bool = field(init=False, repr=False, compare=False)
    is_mirrored: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        volume = math.prod(self.kernel_size)
        axes = [*zip(self.kernel_size, self.padding, self.dilation, strict=True)]
        moved = any(self.padding) or any(self.output_padding) or any(step != 1 for step in self.stride)
        mirrored = self.kind == "subm" and all(size % 2 and pad == size // 2 * step for size, pad, step in axes)
        object.__setattr__(self, "volume", volume)
        object.__setattr__(self, "reach", max(max(abs(pad), abs((size - 1) * step - pad)) for size, pad, step in axes))
        object.__setattr__(self, "is_pointwise", volume == 1 and not moved)
        object.__setattr__(self, "is_mirrored", mirrored)

    @classmethod
    def of(
        cls,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        output_padding: Sequence[int] | None = None,
        *,
        subm: bool = False,
        transposed: bool = False,
        anchor: Sequence[int] | None = None,
    ) -> Geometry:
        """Return the movement of a layer's kernel.

        Args:
            kernel_size: d extents.
            stride: d steps; not read if `subm`.
            padding: d; not read if `subm`.
            dilation: d steps between kernel cells.
            output_padding: d; read if `transposed`.
            subm: outputs are the inputs' voxels.
            transposed: the transposed convolution.
            anchor: the kernel cell that lies on the voxel if `subm`; default: the middle.

        >>> Geometry.of((3,), (2,), (0,), (1,), subm=True).padding
        (1,)
        """
        kernel, steps, zeros = tuple(kernel_size), tuple(dilation), (0,) * len(kernel_size)
        if subm:
            cells = [extent // 2 for extent in kernel] if anchor is None else anchor
            own = tuple(cell * step for cell, step in zip(cells, steps, strict=True))
            return _same(cls("subm", kernel, (1,) * len(kernel), own, steps, zeros))
        moves = (kernel, tuple(stride), tuple(padding), steps)
        if transposed:
            return _same(cls("transpose", *moves, zeros if output_padding is None else tuple(output_padding)))
        return _same(cls("conv", *moves, zeros))


@lru_cache(maxsize=256)
def _same(geometry: Geometry) -> Geometry:
    """One object for equal movements: layers that share a map compare them at every call."""
    return geometry


def output_shape(spatial_shape: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """Return the spatial shape of the output, as of torch's dense convolutions.

    Raises:
        InsumShapeError: the kernel is larger than the padded input, or the output is too large to index.

    >>> rest = dict(kernel_size=(3,), stride=(2,), padding=(0,), dilation=(1,), output_padding=(0,))
    >>> output_shape((5,), Geometry("conv", **rest)), output_shape((2,), Geometry("transpose", **rest))
    ((2,), (5,))
    """
    if geometry.kind == "subm":
        return tuple(spatial_shape)
    parts = zip(
        spatial_shape,
        geometry.kernel_size,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.output_padding,
        strict=True,
    )
    if geometry.kind == "transpose":
        shape = tuple([(x - 1) * s - 2 * p + d * (k - 1) + e + 1 for x, k, s, p, d, e in parts])
    else:
        shape = tuple([(x + 2 * p - d * (k - 1) - 1) // s + 1 for x, k, s, p, d, _ in parts])
    if min(shape) < 1 or max(shape) > MAX_EXTENT:
        raise InsumShapeError(
            f"the output's spatial shape would be {shape}",
            details=[
                f"spatial_shape {tuple(spatial_shape)}, kernel_size {geometry.kernel_size}, stride {geometry.stride}, "
                f"padding {geometry.padding}, dilation {geometry.dilation}",
                f"expected extents from 1 to {MAX_EXTENT}",
            ],
            fix="enlarge spatial_shape or padding, or use a smaller kernel.",
            expected=MAX_EXTENT,
            got=shape,
        )
    return shape
