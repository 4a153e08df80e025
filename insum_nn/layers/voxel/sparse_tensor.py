"""`SparseConvTensor`: features at the active voxels of a batch of grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from insum_nn.errors import InsumBackendError, InsumFormatError, InsumShapeError
from insum_nn.ops.sparse_pool import sparse_sum, sparse_to_dense
from insum_nn.structure.coordinates import Coordinates, check_indices
from insum_nn.structure.kernel_map import Geometry, KernelMap, build_kernel_map

__all__ = ["CUDAKernelTimer", "SparseConvTensor", "check_same_voxels", "check_untraced", "sparse_add"]


# What tensors keep of those that they are made from, besides their own members.
_ANNOTATIONS = "grid voxel_num benchmark benchmark_record force_algo thrust_allocator int8_scale _timer".split()


class CUDAKernelTimer:
    """spconv's timer of kernels, which times nothing here: `torch.profiler` does."""

    def __init__(self, enable: bool = True) -> None:
        """Do nothing."""

    def record(self, name: str, stream: int = 0) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    namespace = record

    def get_all_pair_time(self) -> dict[str, float]:
        """Return no times."""
        return {}


class SparseConvTensor:
    """Features at the active voxels of a batch of grids; `spconv.pytorch.SparseConvTensor`'s interface.

    Coordinates are checked once, where they are first used: as many as features, in range, none negative, none twice.
    Tensors made from one another by `replace_feature` share the checked coordinates and their sorted keys. Features of
    another number of voxels are given in two steps, `x = x.replace_feature(features)` and `x.indices = indices`.

    Attributes:
        features: (n, C) floating. Read only, see `replace_feature`.
        indices: (n, 1 + d) int32 or int64: batch entry, then coordinates in the order of `spatial_shape`.
        spatial_shape: d extents.
        batch_size: clouds in the batch.
        indice_dict: kernel maps by `indice_key`.
        thrust_allocator: kept, and not used; so are `int8_scale` and `_timer`.

    >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 0], [0, 2]], dtype=torch.int32), [3], 1)
    >>> x.dense().tolist(), x.sparity
    ([[[1.0, 0.0, 2.0]]], 0.6666666666666666)
    """

    thrust_allocator: Any = None
    int8_scale: Any = None
    _timer: Any = CUDAKernelTimer()

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[str, KernelMap] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: object = None,
        *,
        _rows: bool = True,
    ) -> None:
        """Check ranks, dtypes and devices; no value is read.

        Args:
            features: (n, C).
            indices: (n, 1 + d).
            spatial_shape: d extents.
            batch_size: clouds in the batch.
            grid: kept, and not used: maps need no buffer of the grid's size.
            voxel_num: kept, and not used.
            indice_dict: kernel maps to share.
            benchmark: kept, and not used; so are the arguments after it, which callers of spconv may pass.
            permanent_thrust_allocator: see `benchmark`.
            enable_timer: see `benchmark`.
            force_algo: see `benchmark`.
        """
        _check_features(features)
        if _rows:
            check_indices(indices, spatial_shape, features.shape[0])
        self._features = features
        self.indices = indices
        self.spatial_shape: list[int] = [int(extent) for extent in spatial_shape]
        self.batch_size = int(batch_size)
        self.indice_dict: dict[str, KernelMap] = {} if indice_dict is None else indice_dict
        self.grid = grid
        self.voxel_num = voxel_num
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.force_algo = force_algo
        # Shared by all tensors that `replace_feature` makes of this one; filled at first use.
        self._proven: dict[str, Coordinates] = {}

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"

    @property
    def features(self) -> Tensor:
        """(n, C)."""
        return self._features

    @features.setter
    def features(self, value: Tensor) -> None:
        raise InsumFormatError(
            "the features of a SparseConvTensor cannot be set",
            fix="write x = x.replace_feature(features), which makes a new tensor.",
        )

    @property
    def is_quantized(self) -> bool:
        """Whether the features are int8 numbers with a scale."""
        return self._features.is_quantized

    def q_scale(self) -> float:
        """Return the scale of quantized features."""
        if not self.is_quantized:
            raise InsumFormatError(
                f"q_scale: the features are {self._features.dtype}, not quantized", fix="leave it out."
            )
        return self._features.q_scale()

    def dequantize(self) -> SparseConvTensor:
        """Return the tensor with floating features."""
        return self.replace_feature(self._features.dequantize())

    @property
    def spatial_size(self) -> int:
        """Cells of one grid."""
        return math.prod(self.spatial_shape)

    @property
    def sparity(self) -> float:
        """The share of cells that are active; spconv's spelling."""
        return self.indices.shape[0] / self.spatial_size / self.batch_size

    @property
    def device(self) -> torch.device:
        """Where the features are."""
        return self._features.device

    def coordinates(self, *, again: bool = False) -> Coordinates:
        """Return the voxels, proven to be in range and distinct; reads the device once for all tensors that share them.

        Args:
            again: read them even if they were checked before.

        Raises:
            InsumShapeError: there are not as many voxels as features.
            InsumRangeError: a voxel lies outside the grid.
            InsumFormatError: a voxel occurs twice.
        """
        known = self._known_sites(again)
        return self._keep_sites(self._sites().prove()) if known is None else known

    def build_map(self, geometry: Geometry, *, again: bool = False) -> KernelMap:
        """Return a kernel map over the voxels, which are proven at the same time where they are not yet.

        Args:
            geometry: the kernel and how it moves.
            again: read the voxels even if they were checked before.

        Raises:
            InsumRangeError: a voxel lies outside the grid.
            InsumFormatError: a voxel occurs twice.
            InsumShapeError: the output's grid would be empty, or there are not as many voxels as features.
        """
        known = self._known_sites(again)
        if known is None and torch.compiler.is_compiling():
            known = self.coordinates()
        if known is not None:
            return build_kernel_map(known, geometry, proven=True)
        sites = self._sites()
        found = build_kernel_map(sites, geometry)
        self._keep_sites(sites)
        return found

    @property
    def has_all_rows(self) -> bool:
        """Whether there are as many voxels as features; `replace_feature` leaves that open."""
        return self._features.shape[0] == self.indices.shape[0]

    def check_rows(self) -> None:
        """Raise `InsumShapeError` unless `has_all_rows`."""
        check_indices(self.indices, self.spatial_shape, self._features.shape[0])

    def _sites(self) -> Coordinates:
        return Coordinates(self.indices, tuple(self.spatial_shape), self.batch_size)

    def _known_sites(self, again: bool) -> Coordinates | None:
        """Return the voxels where they were checked before, and are not to be read `again`."""
        self.check_rows()
        check_untraced()
        known = None if again else self._proven.get("sites")
        if known is None or not known.describes(self.indices, self.spatial_shape, self.batch_size):
            return None
        return known

    def _keep_sites(self, sites: Coordinates) -> Coordinates:
        if "sites" in self._proven:
            # Other tensors keep the voxels that this one no longer has.
            self._proven = {}
        self._proven["sites"] = sites
        return sites

    def with_sites(self, features: Tensor, sites: Coordinates, indice_dict: dict[str, KernelMap]) -> SparseConvTensor:
        """Return a tensor over other voxels, known to be in range and distinct, that keeps this one's annotations."""
        result = self._derive(features, sites.indices, list(sites.spatial_shape), indice_dict)
        result._proven = {"sites": sites}
        return result

    def _derive(
        self, features: Tensor, indices: Tensor, spatial_shape: list[int], indice_dict: dict[str, KernelMap]
    ) -> SparseConvTensor:
        result = SparseConvTensor(
            features, indices, spatial_shape, self.batch_size, indice_dict=indice_dict, _rows=False
        )
        for name in _ANNOTATIONS:
            setattr(result, name, getattr(self, name))
        return result

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """Return the same voxels with other features (n, C').

        Features of other voxels may be given too, if `indices` are set before the result is used.
        """
        if not torch.compiler.is_compiling() and type(self) is SparseConvTensor:
            _check_features(feature)
            # All members at once; mutable ones are copied.
            result = object.__new__(SparseConvTensor)
            result.__dict__.update(self.__dict__, _features=feature, spatial_shape=[*self.spatial_shape])
            return result
        result = self._derive(feature, self.indices, self.spatial_shape, self.indice_dict)
        result._proven = self._proven
        return result

    def with_spatial_shape(self, spatial_shape: Sequence[int]) -> SparseConvTensor:
        """Return the same voxels in a grid of another shape, with the same kernel maps.

        Raises:
            InsumRangeError: a voxel lies outside the grid.
        """
        if list(spatial_shape) == self.spatial_shape:
            return self
        shape = tuple(int(extent) for extent in spatial_shape)
        result = self._derive(self._features, self.indices, list(shape), self.indice_dict)
        known = self.coordinates()
        if all(new >= old for new, old in zip(shape, known.spatial_shape, strict=True)):
            # What lies inside a grid lies inside a larger one.
            result._proven = {"sites": Coordinates(self.indices, shape, self.batch_size)}
        else:
            result.coordinates()
        return result

    def shadow_copy(self) -> SparseConvTensor:
        """Return a new tensor with the same members."""
        return self.replace_feature(self._features)

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """Return the rows that an index or a bool mask selects, without kernel maps, which are of other voxels."""
        return self._derive(self._features[valid_indices], self.indices[valid_indices], self.spatial_shape, {})

    def minus(self) -> SparseConvTensor:
        """Return the features with the other sign."""
        return self.replace_feature(-self._features)

    def find_indice_pair(self, key: str | None) -> KernelMap | None:
        """Return the kernel map stored under an `indice_key`, or `None`."""
        return None if key is None else self.indice_dict.get(key)

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """Return the sites of a channels-last grid (batch, x_1, .., x_d, C) with a nonzero feature; differentiable.

        >>> SparseConvTensor.from_dense(torch.tensor([[[0.0, 0.0], [0.0, 3.0]]])).indices.tolist()
        [[0, 1]]
        """
        if x.ndim < 3:
            raise InsumShapeError(
                f"from_dense needs a grid (batch, x_1, .., x_d, channels), got shape {tuple(x.shape)}",
                fix="add the missing axes.",
                got=tuple(x.shape),
            )
        active = (x != 0).any(-1).nonzero()
        return cls(x[active.unbind(1)], active.int(), list(x.shape[1:-1]), max(1, x.shape[0]))

    def dense(self, channels_first: bool = True) -> Tensor:
        """Return a dense grid with zeros elsewhere; differentiable.

        Returns:
            (batch, C, x_1, .., x_d), or (batch, x_1, .., x_d, C).

        Raises:
            InsumRangeError: a voxel lies outside the grid.
            InsumFormatError: a voxel occurs twice.
        """
        grid = sparse_to_dense(self._features, self.coordinates())
        return grid.movedim(-1, 1).contiguous() if channels_first else grid

    def to(self, *args: Any, **kwargs: Any) -> SparseConvTensor:
        """Move to a device, or convert the features, as `Tensor.to`; a move drops the kernel maps."""
        features = self._features.to(*args, **kwargs)
        if features.device == self._features.device:
            return self.replace_feature(features)
        return self._derive(features, self.indices.to(features.device), self.spatial_shape, {})

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        if not isinstance(other, Tensor):
            check_same_voxels("'+'", [self, other])
            other = other.features
        return self.replace_feature(self._features + other)

    __radd__ = __add__
    __iadd__ = __add__


def check_same_voxels(owner: str, tensors: Sequence[SparseConvTensor]) -> None:
    """Raise unless all tensors are over the same voxels, in one order.

    Raises:
        InsumFormatError: they are not.
    """
    first = tensors[0]
    for other in tensors[1:]:
        same = other.spatial_shape == first.spatial_shape and other.batch_size == first.batch_size
        if not same or not (other.indices is first.indices or torch.equal(other.indices, first.indices)):
            raise InsumFormatError(
                f"{owner} needs tensors over the same voxels",
                details=[f"{first.indices.shape[0]} and {other.indices.shape[0]} voxels"],
                fix="use sparse_add(a, b) or AddTableMisaligned, which merge voxels.",
            )


def sparse_add(*tensors: SparseConvTensor) -> SparseConvTensor:
    """Add sparse tensors whose voxels may differ.

        Out[Row[p],c] += In[p,c]

    Args:
        *tensors: one spatial shape, batch size and number of channels.

    Returns:
        A tensor over every voxel of any of them, in lexicographic order. Kernel maps are kept only where one operand
        has all these voxels in this order.

    >>> a = SparseConvTensor(torch.ones(1, 1), torch.tensor([[0, 2]], dtype=torch.int32), [3], 1)
    >>> b = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 0], [0, 2]], dtype=torch.int32), [3], 1)
    >>> sparse_add(a, b).features.tolist()
    [[1.0], [2.0]]
    """
    features, indices = sparse_sum([t.features for t in tensors], [t.coordinates() for t in tensors])
    for tensor in tensors:
        if tensor.indices.shape == indices.shape and torch.equal(tensor.indices, indices):
            return tensor.replace_feature(features)
    return tensors[0]._derive(features, indices, tensors[0].spatial_shape, {})


def check_untraced() -> None:
    """Raise under `torch.jit.trace`, which would keep the voxels of its example for every call.

    Raises:
        InsumBackendError: a trace is being recorded.
    """
    if torch.jit.is_tracing():
        raise InsumBackendError(
            "torch.jit.trace cannot record what depends on a sparse tensor's voxels",
            details=["it would keep the kernel maps of the example for every other cloud"],
            fix="use torch.compile or torch.export, which follow the voxels; or trace the dense part alone.",
        )


def _check_features(features: object) -> None:
    if not isinstance(features, Tensor) or features.ndim != 2:
        got: object = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InsumShapeError(
            f"'features' must be a tensor (voxels, channels), got {got}",
            fix="pass one row of features per voxel.",
            field="features",
            got=got,
        )
