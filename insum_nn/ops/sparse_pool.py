"""Pooling, densifying and adding over the voxels of sparse tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.ops.sparse_conv import ROW_FACTS, check_features
from insum_nn.ops.statements import run
from insum_nn.structure.coordinates import Coordinates, unique_sites
from insum_nn.structure.kernel_map import FACTS, KernelMap

__all__ = [
    "SPARSE_AVG_POOL",
    "SPARSE_GLOBAL_AVG_POOL",
    "SPARSE_GLOBAL_MAX_POOL",
    "SPARSE_MAX_POOL",
    "SPARSE_SUM",
    "SPARSE_TO_DENSE",
    "sparse_avg_pool",
    "sparse_global_avg_pool",
    "sparse_global_max_pool",
    "sparse_max_pool",
    "sparse_sum",
    "sparse_to_dense",
]

SPARSE_MAX_POOL = "Out[OutIdx[g,q],c] max= In[InIdx[g,q],c]"
SPARSE_AVG_POOL = "Out[OutIdx[g,q],c] += Inv[OutIdx[g,q]] * In[InIdx[g,q],c]"
SPARSE_GLOBAL_MAX_POOL = "Out[Batch[p],c] max= In[p,c]"
SPARSE_GLOBAL_AVG_POOL = "Out[Batch[p],c] += Inv[Batch[p]] * In[p,c]"
SPARSE_TO_DENSE = "Out[Cell[p],c] += In[p,c]"
SPARSE_SUM = "Out[Row[p],c] += In[p,c]"


def _pairs(owner: str, features: Tensor, kernel_map: KernelMap, options: Options) -> dict[str, Tensor]:
    """Return the tensors of a statement over pairs by name, after checks; with `validate`, the map is proven again."""
    check_features(owner, features, kernel_map.num_inputs, kernel_map.device)
    if options.validate:
        kernel_map.validate()
    return {"In": features, "InIdx": kernel_map.in_index, "OutIdx": kernel_map.out_index}


def _voxels(owner: str, features: Tensor, sites: Coordinates, options: Options) -> Coordinates:
    """Return the voxels after checks; with `validate`, read and proven again."""
    check_features(owner, features, sites.num_sites, sites.device)
    return Coordinates(sites.indices, sites.spatial_shape, sites.batch_size).prove() if options.validate else sites


def sparse_max_pool(features: Tensor, kernel_map: KernelMap, *, options: Options = DEFAULT) -> Tensor:
    """Return the largest feature among the active voxels under the kernel.

        Out[OutIdx[g,q],c] max= In[InIdx[g,q],c]

    Args:
        features: `In`, (n, C); differentiable. Entries that tie share the gradient.
        kernel_map: the map of n input voxels to m output voxels.
        options: compile options.

    Returns:
        `Out`, (m, C).
    """
    named = _pairs("sparse_max_pool", features, kernel_map, options)
    return run(SPARSE_MAX_POOL, FACTS, named, options, (kernel_map.num_outputs, None))


def sparse_avg_pool(features: Tensor, kernel_map: KernelMap, *, options: Options = DEFAULT) -> Tensor:
    """Return the mean feature of the active voxels under the kernel; inactive voxels do not count.

        Out[OutIdx[g,q],c] += Inv[OutIdx[g,q]] * In[InIdx[g,q],c]

    Args:
        features: `In`, (n, C); differentiable.
        kernel_map: the map of n input voxels to m output voxels. `Inv` (m,) is one over an output's pairs.
        options: compile options.

    Returns:
        `Out`, (m, C).
    """
    named = _pairs("sparse_avg_pool", features, kernel_map, options)
    # Counted exactly, and inverted in float32 at least: a count above 2048 is no half number.
    wide = torch.promote_types(features.dtype, torch.float32)
    inverse = (1 / kernel_map.output_counts(wide).clamp(min=1)).to(features.dtype)
    return run(SPARSE_AVG_POOL, FACTS, {**named, "Inv": inverse}, options, (kernel_map.num_outputs, None))


def sparse_global_max_pool(features: Tensor, sites: Coordinates, *, options: Options = DEFAULT) -> Tensor:
    """Return the largest feature of each cloud of a batch; 0 for a cloud without voxels.

        Out[Batch[p],c] max= In[p,c]

    Args:
        features: `In`, (n, C); differentiable.
        sites: the voxels, proven.
        options: compile options.

    Returns:
        `Out`, (batch_size, C).
    """
    sites = _voxels("sparse_global_max_pool", features, sites, options)
    named = {"In": features, "Batch": sites.columns[0]}
    return run(SPARSE_GLOBAL_MAX_POOL, ROW_FACTS, named, options, (sites.batch_size, None))


def sparse_global_avg_pool(features: Tensor, sites: Coordinates, *, options: Options = DEFAULT) -> Tensor:
    """Return the mean feature of each cloud of a batch; 0 for a cloud without voxels.

        Out[Batch[p],c] += Inv[Batch[p]] * In[p,c]

    Args:
        features: `In`, (n, C); differentiable.
        sites: the voxels, proven. `Inv` (batch_size,) is one over a cloud's voxels.
        options: compile options.

    Returns:
        `Out`, (batch_size, C).
    """
    sites = _voxels("sparse_global_avg_pool", features, sites, options)
    batch = sites.columns[0]
    counts = torch.bincount(batch, minlength=sites.batch_size)
    wide = torch.promote_types(features.dtype, torch.float32)
    # One over a cloud's voxels may be subnormal in float16, with few bits left, so the products are taken in float32.
    named = {"In": features.to(wide), "Inv": 1 / counts.to(wide).clamp(min=1), "Batch": batch}
    return run(SPARSE_GLOBAL_AVG_POOL, ROW_FACTS, named, options, (sites.batch_size, None)).to(features.dtype)


def sparse_to_dense(features: Tensor, sites: Coordinates, *, options: Options = DEFAULT) -> Tensor:
    """Write features into a dense grid of zeros.

        Out[Cell[p],c] += In[p,c]

    Args:
        features: `In`, (n, C); differentiable.
        sites: the voxels, proven. `Cell` numbers the grid's cells.
        options: compile options.

    Returns:
        (batch_size, x_1, .., x_d, C).

    Raises:
        InsumShapeError: the grid has more cells than can be numbered.
    """
    sites = _voxels("sparse_to_dense", features, sites, options)
    cells, total = sites.cells, math.prod(sites.extents)
    grid = run(SPARSE_TO_DENSE, ROW_FACTS, {"In": features, "Cell": cells}, options, (total, None))
    return grid.reshape(*sites.extents, features.shape[1])


def sparse_sum(
    features: Sequence[Tensor], sites: Sequence[Coordinates], *, options: Options = DEFAULT
) -> tuple[Tensor, Tensor]:
    """Add sparse tensors whose voxels differ.

        Out[Row[p],c] += In[p,c]        for the voxels p of all tensors

    Args:
        features: (n_i, C) each, of one dtype; differentiable.
        sites: the voxels of each, proven; one grid for all.
        options: compile options.

    Returns:
        (m, C), and the voxels (m, 1 + d) of which any tensor has one, in lexicographic order.

    Raises:
        InsumShapeError: grids or channels differ.
    """
    extents = {s.extents for s in sites}
    channels = {tuple(f.shape[1:]) for f in features}
    if len(extents) != 1 or len(channels) != 1:
        raise InsumShapeError(
            "sparse_sum: the tensors differ in grid or channels",
            details=[f"(batch, spatial_shape) {sorted(extents)}; channels {sorted(channels)}"],
            fix="add tensors of one spatial_shape, batch_size and number of channels.",
        )
    sites = [_voxels("sparse_sum", rows, own, options) for rows, own in zip(features, sites, strict=True)]
    columns = [torch.cat(parts) for parts in zip(*(s.columns for s in sites), strict=True)]
    merged, place = unique_sites(columns, sites[0].extents)
    indices = torch.stack(merged, dim=1).to(sites[0].indices.dtype)
    stacked = torch.cat(tuple(features))
    total = run(SPARSE_SUM, ROW_FACTS, {"In": stacked, "Row": place}, options, (indices.shape[0], None))
    return total, indices
