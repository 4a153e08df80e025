"""`spconv.core` and `spconv.pytorch.core`: the tensor, what is kept under its keys, and names of algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from insum_nn.errors import InsumRangeError
from insum_nn.faults import Faults
from insum_nn.layers.extents import expand_nd as _expand
from insum_nn.layers.voxel.conv_base import Activation
from insum_nn.layers.voxel.sparse_tensor import CUDAKernelTimer, SparseConvTensor
from insum_nn.locks import cached_property
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import ConvAlgo, Geometry, KernelMap
from insum_nn.structure.kernel_map.tables import order_by_mask

__all__ = [
    "Activation",
    "AlgoHint",
    "CUDAKernelTimer",
    "ConvAlgo",
    "ImplicitGemmIndiceData",
    "IndiceData",
    "KernelMap",
    "SparseConvTensor",
    "expand_nd",
    "scatter_nd",
]


class AlgoHint(Enum):
    """What a product is for, in spconv's terms; its spelling."""

    NoHint = 0
    Fowrard = 1
    BackwardInput = 2
    BackwardWeight = 4


class _LikeIndiceData(type):
    """Kernel maps have the attributes of `IndiceData`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, KernelMap)


class _Stored:
    """Pairs that a caller stores under an `indice_key`."""

    @cached_property
    def kernel_map(self) -> KernelMap:
        """The same pairs as a map of ours, proven once.

        Raises:
            InsumRangeError: a pair or a voxel points outside.
            InsumFormatError: a voxel occurs twice, or a pair breaks a map's laws.
        """
        stored: Any = self
        how = Geometry.of(stored.ksize, stored.stride, stored.padding, stored.dilation, subm=stored.is_subm)
        voxels = (stored.indices, stored.out_indices)
        batch = max((int(rows[:, 0].max()) + 1 for rows in voxels if len(rows)), default=1)
        inputs = Coordinates(stored.indices, tuple(stored.spatial_shape), batch).prove()
        outputs = Coordinates(stored.out_indices, tuple(stored.out_spatial_shape), batch).prove()
        rows = stored.neighbours()
        expected = (how.volume, outputs.num_sites)
        faults = Faults(type(stored).__name__)
        fix = "store the pairs that were made for this kernel and these voxels."
        faults.shape("pairs", rows, expected, details=["expected (offsets, output voxels)"], fix=fix)
        faults.raise_all()
        _check_rows("pairs of input voxels", rows, inputs.num_sites)
        found = KernelMap.of_table(inputs, outputs, how, order_by_mask(rows.int().contiguous()))
        found.validate()
        return found


@dataclass(eq=False, repr=False)
class IndiceData(_Stored, metaclass=_LikeIndiceData):
    """Pairs of a convolution as lists by offset; `spconv.pytorch.core.IndiceData`.

    Layers store a `KernelMap` under their `indice_key`, which has these attributes and is an instance of this class for
    `isinstance`. One that a caller stores there is taken by inverse and submanifold layers.

    Attributes:
        out_indices: output voxels, (m, 1 + d).
        indices: input voxels, (n, 1 + d).
        indice_pairs: (2, o, q): rows of inputs and of outputs, from the left, then -1.
        indice_pair_num: (o,); not read.
    """

    out_indices: Tensor
    indices: Tensor
    indice_pairs: Tensor
    indice_pair_num: Tensor
    spatial_shape: Sequence[int]
    out_spatial_shape: Sequence[int]
    is_subm: bool
    algo: object
    ksize: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    padding: Sequence[int]
    voxel_num: Any = None

    def neighbours(self) -> Tensor:
        """Return (o, m) int32: the input row that each output row meets at each offset, or -1."""
        source, target = self.indice_pairs.unbind(0)
        outputs = self.out_indices.shape[0]
        _check_rows("pairs of output voxels", target, outputs)
        # What no pair fills goes to a column of its own, after the last.
        place = torch.where((source >= 0) & (target >= 0), target, outputs).long()
        rows = torch.full((source.shape[0], outputs + 1), -1, dtype=torch.int32, device=source.device)
        return rows.scatter_(1, place, source.int())[:, :outputs]


@dataclass(eq=False, repr=False)
class ImplicitGemmIndiceData(_Stored):
    """Pairs of a convolution as tables of neighbours; `spconv.pytorch.core.ImplicitGemmIndiceData`.

    Attributes:
        out_indices: output voxels, (m, 1 + d).
        indices: input voxels, (n, 1 + d).
        pair_fwd: (o, m): the input row that each output row meets at each offset, or -1.
        pair_bwd: (o, n): the output row that each input row meets, or -1; not read.
    """

    out_indices: Tensor
    indices: Tensor
    pair_fwd: Tensor
    pair_bwd: Tensor
    pair_mask_fwd_splits: list[Tensor]
    pair_mask_bwd_splits: list[Tensor]
    mask_argsort_fwd_splits: list[Tensor]
    mask_argsort_bwd_splits: list[Tensor]
    masks: list[Any]
    spatial_shape: Sequence[int]
    out_spatial_shape: Sequence[int]
    is_subm: bool
    algo: object
    ksize: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    padding: Sequence[int]
    in_voxel_num: Any = None
    out_voxel_num: Any = None

    def neighbours(self) -> Tensor:
        """Return (o, m) int32: the input row that each output row meets at each offset, or -1."""
        return self.pair_fwd


def expand_nd(ndim: int, val: Any) -> list[int]:
    """Return a number repeated, or `ndim` numbers as a list.

    Raises:
        InsumShapeError: there are not `ndim` numbers.

    >>> expand_nd(3, 2), expand_nd(2, (1, 5))
    ([2, 2, 2], [1, 5])
    """
    # spconv takes any numbers here, -1 for a kernel over a whole axis among them.
    return _expand("expand_nd", "val", ndim, val, -(1 << 31))


def scatter_nd(indices: Tensor, updates: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of `shape` with `updates` at `indices`; where an index occurs twice, one of its updates.

    Args:
        indices: (.., k) int64.
        updates: (.., *shape[k:]); differentiable.
        shape: the result's.

    >>> scatter_nd(torch.tensor([[0, 1], [1, 0]]), torch.tensor([3.0, 4.0]), [2, 2]).tolist()
    [[0.0, 3.0], [4.0, 0.0]]
    """
    axes = indices.shape[-1]
    places = indices.reshape(-1, axes).long().unbind(1)
    zeros = torch.zeros(*shape, dtype=updates.dtype, device=updates.device)
    return zeros.index_put(places, updates.reshape(-1, *shape[axes:]))


def _check_rows(what: str, rows: Tensor, extent: int) -> None:
    if rows.numel() and (int(rows.min()) < -1 or int(rows.max()) >= extent):
        raise InsumRangeError(
            f"{what} point outside",
            details=[f"expected -1 <= row < {extent}; got {int(rows.min())} to {int(rows.max())}"],
            fix="store the pairs that were made for these voxels.",
            expected=extent,
        )
