"""The kinds of sparse convolution, in 1 to 4 dimensions; each only names its arguments to `SparseConvolution`."""

from __future__ import annotations

from typing import Any, ClassVar

from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.maps import IntOrInts

__all__ = [
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]


class _Sized(SparseConvolution):
    """The constructor of `SparseConv` and `SparseConvTranspose`."""

    NDIM: ClassVar[int]
    TRANSPOSED: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(
            self.NDIM,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            transposed=self.TRANSPOSED,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            record_voxel_count=record_voxel_count,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
            **rest,
        )


class _SubM(SparseConvolution):
    """The constructor of `SubMConv`."""

    NDIM: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(
            self.NDIM,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
            **rest,
        )


class _Inverse(SparseConvolution):
    """The constructor of `SparseInverseConv`."""

    NDIM: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        indice_key: str,
        bias: bool = True,
        algo: object = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(
            self.NDIM,
            in_channels,
            out_channels,
            kernel_size,
            bias=bias,
            inverse=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
            **rest,
        )


class SparseConv1d(_Sized):
    """Sparse convolution in 1 dimension; writes every voxel that the kernel reaches. See `SparseConvolution`."""

    NDIM = 1


class SparseConv2d(_Sized):
    """Sparse convolution in 2 dimensions; writes every voxel that the kernel reaches. See `SparseConvolution`."""

    NDIM = 2


class SparseConv3d(_Sized):
    """Sparse convolution in 3 dimensions; writes every voxel that the kernel reaches. See `SparseConvolution`."""

    NDIM = 3


class SparseConv4d(_Sized):
    """Sparse convolution in 4 dimensions; writes every voxel that the kernel reaches. See `SparseConvolution`."""

    NDIM = 4


class SparseConvTranspose1d(_Sized):
    """Transposed sparse convolution in 1 dimension, as `nn.ConvTranspose`. See `SparseConvolution`."""

    NDIM = 1
    TRANSPOSED = True


class SparseConvTranspose2d(_Sized):
    """Transposed sparse convolution in 2 dimensions, as `nn.ConvTranspose`. See `SparseConvolution`."""

    NDIM = 2
    TRANSPOSED = True


class SparseConvTranspose3d(_Sized):
    """Transposed sparse convolution in 3 dimensions, as `nn.ConvTranspose`. See `SparseConvolution`."""

    NDIM = 3
    TRANSPOSED = True


class SparseConvTranspose4d(_Sized):
    """Transposed sparse convolution in 4 dimensions, as `nn.ConvTranspose`. See `SparseConvolution`."""

    NDIM = 4
    TRANSPOSED = True


class SparseInverseConv1d(_Inverse):
    """Convolution in 1 dimension back to the voxels before the layer of the same `indice_key`."""

    NDIM = 1


class SparseInverseConv2d(_Inverse):
    """Convolution in 2 dimensions back to the voxels before the layer of the same `indice_key`."""

    NDIM = 2


class SparseInverseConv3d(_Inverse):
    """Convolution in 3 dimensions back to the voxels before the layer of the same `indice_key`."""

    NDIM = 3


class SparseInverseConv4d(_Inverse):
    """Convolution in 4 dimensions back to the voxels before the layer of the same `indice_key`."""

    NDIM = 4


class SubMConv1d(_SubM):
    """Submanifold convolution in 1 dimension: writes the voxels that it reads. See `SparseConvolution`."""

    NDIM = 1


class SubMConv2d(_SubM):
    """Submanifold convolution in 2 dimensions: writes the voxels that it reads. See `SparseConvolution`."""

    NDIM = 2


class SubMConv3d(_SubM):
    """Submanifold convolution in 3 dimensions: writes the voxels that it reads. See `SparseConvolution`."""

    NDIM = 3


class SubMConv4d(_SubM):
    """Submanifold convolution in 4 dimensions: writes the voxels that it reads. See `SparseConvolution`."""

    NDIM = 4
