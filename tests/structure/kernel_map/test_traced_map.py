"""Maps made of torch's operations alone, against those that are built with a look at the voxels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from insum_nn.structure.cell_numbers import assert_distinct
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, build_kernel_map, output_shape
from insum_nn.structure.kernel_map.tables import GROUP_SIZE, groups_in_graph, neighbour_rows
from insum_nn.structure.kernel_map.traced import map_in_graph

GEOMETRIES = {
    "submanifold": Geometry("subm", (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0)),
    "even, dilated": Geometry("subm", (2, 3, 1), (1, 1, 1), (2, 1, 0), (2, 1, 3), (0, 0, 0)),
    "strided": Geometry("conv", (3, 2, 3), (2, 1, 3), (1, 0, 2), (1, 2, 1), (0, 0, 0)),
    "tiled": Geometry("conv", (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), (0, 0, 0)),
    "transposed": Geometry("transpose", (3, 2, 1), (2, 1, 2), (1, 0, 0), (1, 2, 1), (1, 0, 0)),
    "pointwise": Geometry("conv", (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0)),
}
SHAPE = (7, 6, 9)


def draw(shape: tuple[int, ...], batch: int, count: int, seed: int = 0) -> Tensor:
    """Distinct voxels in no order."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(extent, (4 * count + 4,), generator=generator) for extent in (batch, *shape)]
    sites = torch.stack(columns, 1).unique(dim=0)
    return sites[torch.randperm(sites.shape[0], generator=generator)[:count]].int()


def check(indices: Tensor, shape: tuple[int, ...], batch: int, geometry: Geometry) -> None:
    want = build_kernel_map(Coordinates(indices, shape, batch), geometry)
    outputs, near = map_in_graph(indices, (batch, *shape), geometry, output_shape(shape, geometry))
    assert torch.equal(outputs, want.outputs.indices)
    assert torch.equal(near, want.neighbours.long())
    groups = groups_in_graph(near)
    assert torch.equal(groups.filled, want.filled)
    pairs = groups.slots.shape[0]
    assert groups.offset.shape[0] == min(pairs, pairs // GROUP_SIZE + geometry.volume)
    assert bool((groups.offset.diff() >= 0).all())
    back = neighbour_rows(groups.offset, groups.in_index, groups.out_index, geometry.volume, outputs.shape[0])
    assert torch.equal(back, want.neighbours)


@pytest.mark.parametrize("count", [0, 1, 5, 117])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_maps_are_those_that_are_built(name: str, count: int):
    check(draw(SHAPE, 3, count), SHAPE, 3, GEOMETRIES[name])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_grids_of_more_cells_than_can_be_numbered(name: str):
    shape = (1 << 30, 1 << 29, 1 << 30)
    near = draw(SHAPE, 2, 90, seed=1)
    far = near + torch.tensor([0, 1 << 29, 1 << 28, 1 << 29], dtype=torch.int32)
    check(torch.cat([near[:60], far[20:]]), shape, 2, GEOMETRIES[name])


def test_many_pairs_fill_several_groups():
    grid = torch.cartesian_prod(torch.arange(1), *(torch.arange(8) for _ in range(3))).int()
    check(grid, (8, 8, 8), 1, GEOMETRIES["submanifold"])
    check(grid, (8, 8, 8), 1, GEOMETRIES["tiled"])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_one_graph_serves_all_clouds(name: str):
    geometry, shape = GEOMETRIES[name], output_shape(SHAPE, GEOMETRIES[name])

    def build(indices: Tensor) -> tuple[Tensor, ...]:
        outputs, near = map_in_graph(indices, (2, *SHAPE), geometry, shape)
        return outputs, *groups_in_graph(near)[:5]

    graph = make_fx(build, tracing_mode="symbolic")(draw(SHAPE, 2, 40))
    for count in (40, 2, 97):
        indices = draw(SHAPE, 2, count, seed=count)
        for got, want in zip(graph(indices), build(indices), strict=True):
            assert torch.equal(got, want)


def test_voxels_are_proven_in_the_graph():
    indices = draw(SHAPE, 2, 20)
    assert_distinct(indices, (2, *SHAPE))
    assert_distinct(indices[:0], (2, *SHAPE))
    for row, column, value in ((3, 2, 6), (0, 0, 2), (7, 3, -1)):
        outside = indices.clone()
        outside[row, column] = value
        with pytest.raises(RuntimeError, match="'indices' holds voxels outside the grid"):
            assert_distinct(outside, (2, *SHAPE))
    twice = indices.clone()
    twice[11] = twice[2]
    with pytest.raises(RuntimeError, match="'indices' holds the same voxel more than once"):
        assert_distinct(twice, (2, *SHAPE))
