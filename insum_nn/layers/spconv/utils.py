"""`spconv.pytorch.utils` and `spconv.utils`: point clouds to voxels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from insum_nn.errors import InsumDeviceError, InsumShapeError
from insum_nn.faults import Faults
from insum_nn.layers.extents import OfDimension
from insum_nn.structure.coordinates import unique_sites
from insum_nn.structure.site_grid import steps_of

__all__ = [
    "Point2VoxelCPU1d",
    "Point2VoxelCPU2d",
    "Point2VoxelCPU3d",
    "Point2VoxelCPU4d",
    "Point2VoxelGPU1d",
    "Point2VoxelGPU2d",
    "Point2VoxelGPU3d",
    "Point2VoxelGPU4d",
    "PointToVoxel",
    "gather_features_by_pc_voxel_id",
]


class PointToVoxel(OfDimension):
    """Sorts the points of a cloud into voxels; `spconv.pytorch.utils.PointToVoxel`'s interface.

    Voxels stand in the order in which the cloud first enters them, and their points in the cloud's order, on every
    device; a grid needs no memory of its size.

    Attributes:
        NDIM: the dimension that a subclass has; 0: any.
        ndim: d, the coordinates that a point begins with.
        vsize: the edges of a voxel, in the order of a voxel's coordinates: last axis of the points first.
        grid_size: voxels along each axis, in that order.
        grid_stride: steps between them in a dense grid.
        coors_range: d least coordinates, then d greatest, in that order.

    >>> grid = PointToVoxel([1.0, 1.0], [0.0, 0.0, 4.0, 2.0], num_point_features=3, max_num_voxels=8,
    ...                     max_num_points_per_voxel=2)
    >>> points = torch.tensor([[3.5, 0.5, 7.0], [0.5, 1.5, 8.0], [3.1, 0.1, 9.0], [9.0, 0.0, 1.0]])
    >>> voxels, indices, counts, ids = grid.generate_voxel_with_id(points)
    >>> indices.tolist(), counts.tolist(), ids.tolist(), voxels[0, :, 2].tolist()
    ([[0, 3], [1, 0]], [2, 1], [0, 1, 0, -1], [7.0, 9.0])
    """

    NDIM: ClassVar[int] = 0

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Lay the grid.

        Args:
            vsize_xyz: d edges of a voxel.
            coors_range_xyz: d least coordinates, then d greatest.
            num_point_features: numbers of a point, its coordinates first.
            max_num_voxels: voxels that are kept, the first that the cloud enters.
            max_num_points_per_voxel: points that a voxel keeps, its first.
            device: where the points will be.

        Raises:
            InsumShapeError: the ranges are not twice as many as the edges, an extent is empty, or a limit is negative;
                or the class has another dimension.
        """
        self.ndim = len(vsize_xyz)
        self.device = torch.device(device)
        self.num_point_features = num_point_features
        self.max_num_voxels = max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel
        edges = torch.tensor(list(vsize_xyz), dtype=torch.float32)
        ranges = torch.tensor(list(coors_range_xyz), dtype=torch.float32)
        owner, expected, features = type(self).__name__, self.NDIM or max(self.ndim, 1), num_point_features
        if self.ndim != expected or ranges.shape[0] != 2 * self.ndim or features < self.ndim:
            got = f"{self.ndim} voxel edges, {ranges.shape[0]} range limits, {features} features"
            details = [f"expected {self.NDIM or 'd'} edges, twice as many limits, and at least as many features"]
            fix = "give coors_range_xyz as [x_min, y_min, z_min, x_max, y_max, z_max]."
            raise InsumShapeError(f"{owner}: {got}", details=details, fix=fix)
        least, greatest = ranges[: self.ndim], ranges[self.ndim :]
        cells = ((greatest - least) / edges).round()
        limits = (max_num_voxels, max_num_points_per_voxel)
        if not ((edges > 0) & (cells >= 1)).all() or min(limits) < 0:
            details = [f"vsize_xyz {[*vsize_xyz]}, coors_range_xyz {[*coors_range_xyz]}, limits {limits}"]
            fix = "pass positive edges, ranges that hold a voxel at least, and limits of 0 or more."
            what = f"{owner}: the grid has no voxel along some axis, or a limit is negative"
            raise InsumShapeError(what, details=details, fix=fix)
        self._edges, self._least, self._cells = edges, least, cells
        self.vsize: list[float] = edges.flip(0).tolist()
        self.grid_size: list[int] = [int(cell) for cell in cells.flip(0).tolist()]
        self.coors_range: list[float] = [*least.flip(0).tolist(), *greatest.flip(0).tolist()]
        self.grid_stride = list(steps_of(tuple(self.grid_size)))

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Voxels, their coordinates and their numbers of points; see `generate_voxel_with_id`."""
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    @torch.no_grad()
    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sort points into voxels.

        Args:
            pc: (n, num_point_features), floating. Points outside the range, or that are not numbers, belong nowhere.
            clear_voxels: not read: results are new tensors, and places without a point are zero.
            empty_mean: places without a point hold the mean of the voxel's kept points.

        Returns:
            Points by voxel (v, max_num_points_per_voxel, num_point_features), of the dtype of `pc`; voxel coordinates
            (v, d) int32, last axis of the points first; kept points of each voxel (v,) int32; and the voxel of each
            point (n,) int64, also of points that their voxel does not keep, -1 where there is none.

        Raises:
            InsumShapeError: a point has not `num_point_features` numbers.
            InsumDtypeError: `pc` is not floating.
            InsumDeviceError: `pc` is on another kind of device than was said.
        """
        self._check(pc)
        points, columns = self._inside(pc)
        sites, place = unique_sites(columns, self.grid_size)
        # Voxels are numbered by the first of their points.
        first = torch.full_like(sites[0], pc.shape[0]).scatter_reduce_(0, place, points, "amin")
        order = first.argsort()
        number = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=pc.device))[place]
        kept = order[: self.max_num_voxels]
        owner = torch.full((pc.shape[0],), -1, dtype=torch.int64, device=pc.device)
        owner[points] = torch.where(number < kept.shape[0], number, -1)
        indices = torch.stack(sites, dim=1)[kept].int()
        voxels, counts = self._fill(pc, points, number, kept.shape[0])
        if empty_mean:
            mean = voxels.sum(1) / counts.clamp(min=1).to(pc.dtype)[:, None]
            slots = torch.arange(self.max_num_points_per_voxel, device=pc.device)
            voxels = torch.where((slots < counts[:, None])[:, :, None], voxels, mean[:, None])
        return voxels, indices, counts.int(), owner

    def _inside(self, pc: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the points inside the grid, and the coordinates of their voxels, with the points' last axis first."""
        wide = torch.promote_types(pc.dtype, torch.float32)
        least, edges, cells = (t.to(pc.device, wide) for t in (self._least, self._edges, self._cells))
        place = ((pc[:, : self.ndim].to(wide) - least) / edges).floor()
        # A coordinate that is no number is in no range.
        points = ((place >= 0) & (place < cells)).all(1).nonzero().squeeze(1)
        return points, place[points].long().flip(1).T.contiguous().unbind(0)

    def _fill(self, pc: Tensor, points: Tensor, number: Tensor, voxels: int) -> tuple[Tensor, Tensor]:
        """Return the kept points of each voxel, and how many they are, from the voxel's number of each point."""
        most = self.max_num_points_per_voxel
        number, order = number.sort(stable=True)
        # Numbers ascend, so a point's place in its voxel is its distance from the first of that number.
        slot = torch.arange(number.shape[0], device=pc.device) - torch.searchsorted(number, number)
        kept = ((number < voxels) & (slot < most)).nonzero().squeeze(1)
        filled = pc.new_zeros(voxels * most, self.num_point_features)
        filled[number[kept] * most + slot[kept]] = pc[points[order[kept]]]
        members = torch.bincount(number, minlength=voxels)[:voxels]
        return filled.view(voxels, most, self.num_point_features), members.clamp(max=most)

    def _check(self, pc: Tensor) -> None:
        faults = Faults("PointToVoxel")
        fix = "pass one row per point, of num_point_features numbers."
        faults.shape("pc", pc, ("points", self.num_point_features), fix=fix)
        faults.floating("pc", pc)
        if pc.device.type != self.device.type:
            message = f"is on {pc.device}, the grid was made for {self.device}"
            fix = f"pass pc.to('{self.device}'), or make the grid with device='{pc.device}'."
            faults.add(InsumDeviceError, "pc", message, fix=fix, expected_got=(self.device, pc.device))
        faults.raise_all()


class _Shared(Tensor):
    """A tensor that a caller of cumm's tensors can read as well; what is computed from it is a plain tensor."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def numpy_view(self) -> np.ndarray[Any, Any]:
        """Return the numbers as an array over the same memory."""
        return self.as_subclass(Tensor).numpy()


class _Point2Voxel(PointToVoxel):
    """The classes of fixed dimensions: points on any device, or NumPy's or cumm's, to voxels; see `PointToVoxel`.

    `spconv.utils` has two kinds, of which each has some of the methods: `Point2VoxelCPU` and `Point2VoxelGPU`.
    """

    def point_to_voxel_hash(
        self, points: object, clear_voxels: bool = True, empty_mean: bool = False, stream_int: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return points by voxel, voxel coordinates and numbers of points.

        Args:
            points: (n, num_point_features) float32: a tensor, a NumPy array, or what has `cpu().numpy()`.
            clear_voxels: not read: results are new tensors.
            empty_mean: places without a point hold the mean of the voxel's points, in place of zeros.
            stream_int: not read.

        Returns:
            Tensors that also answer to `numpy_view()`.
        """
        if not isinstance(points, Tensor):
            array: Any = points if isinstance(points, np.ndarray) else cast(Any, points).cpu().numpy()
            points = torch.from_numpy(array)
        # Points may be on any device.
        self.device = points.device
        voxels, indices, counts = (part.as_subclass(_Shared) for part in self(points, True, empty_mean))
        return voxels, indices, counts

    def point_to_voxel(self, points: object, clear_voxels: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same; places without a point are zero."""
        return self.point_to_voxel_hash(points)

    def point_to_voxel_empty_mean(self, points: object, clear_voxels: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same, with the mean of the voxel's points in places without one."""
        return self.point_to_voxel_hash(points, empty_mean=True)


class Point2VoxelCPU1d(_Point2Voxel, ndim=1):
    """Points in 1 dimension to voxels."""


class Point2VoxelCPU2d(_Point2Voxel, ndim=2):
    """Points in 2 dimensions to voxels."""


class Point2VoxelCPU3d(_Point2Voxel, ndim=3):
    """Points in 3 dimensions to voxels.

    >>> grid = Point2VoxelCPU3d([1.0] * 3, [0.0] * 3 + [4.0] * 3, 3, max_num_voxels=8, max_num_points_per_voxel=2)
    >>> voxels, indices, counts = grid.point_to_voxel(np.array([[3.5, 0.5, 1.0]], dtype=np.float32))
    >>> indices.numpy().tolist(), counts.numpy_view().tolist()
    ([[1, 0, 3]], [1])
    """


class Point2VoxelCPU4d(_Point2Voxel, ndim=4):
    """Points in 4 dimensions to voxels."""


class Point2VoxelGPU1d(_Point2Voxel, ndim=1):
    """Points in 1 dimension to voxels, on their device."""


class Point2VoxelGPU2d(_Point2Voxel, ndim=2):
    """Points in 2 dimensions to voxels, on their device."""


class Point2VoxelGPU3d(_Point2Voxel, ndim=3):
    """Points in 3 dimensions to voxels, on their device."""


class Point2VoxelGPU4d(_Point2Voxel, ndim=4):
    """Points in 4 dimensions to voxels, on their device."""


def gather_features_by_pc_voxel_id(seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: float = 0) -> Tensor:
    """Return what was found for voxels, given to their points.

    Args:
        seg_res_features: (v, ..); differentiable.
        pc_voxel_id: (n,) of `generate_voxel_with_id`, on any device.
        invalid_value: what a point without a voxel gets.

    Returns:
        (n, ..), on the device of the features.

    >>> gather_features_by_pc_voxel_id(torch.tensor([5.0, 6.0]), torch.tensor([1, -1, 0, 1]), -1).tolist()
    [6.0, -1.0, 5.0, 6.0]
    """
    # The last row is that of no voxel, -1.
    last = seg_res_features.new_full((1, *seg_res_features.shape[1:]), invalid_value)
    return torch.cat([seg_res_features, last])[pc_voxel_id.to(last.device).long()]
