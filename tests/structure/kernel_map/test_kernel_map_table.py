"""Tables of neighbours: against the pairs, their order against sorting in Python, both directions, large kernels."""

from __future__ import annotations

import pytest
import torch

from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import KernelMap
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.kernel_map.tables import NeighbourTable, order_by_mask
from tests.ops.conv_oracle import geometry, random_sites

GEOMETRIES = [
    geometry("subm", (3, 3, 3)),
    geometry("subm", (2, 1, 3), dilation=(1, 1, 2)),
    geometry("subm", (1, 1, 1)),
    geometry("conv", (3, 3, 3), 2, 1),
    geometry("conv", (2, 2, 2), 2),
    geometry("transpose", (3, 2, 3), (2, 3, 1), 1, (1, 1, 2), (1, 0, 0)),
    # 343 offsets, of which a mask has 31.
    geometry("subm", (7, 7, 7)),
    geometry("conv", (5, 4, 3), 2, 2),
]


def tile_offsets(table: NeighbourTable, tile: int) -> torch.Tensor:
    """Which offsets each tile of consecutive outputs has to run over, (tiles, offsets)."""
    present = table.sorted_neighbours >= 0
    return torch.cat([present.new_empty(0, len(present)), *(part.any(1)[None] for part in present.split(tile, 1))])[
        : -(-present.shape[1] // tile)
    ]


def check(near: KernelMap) -> None:
    table = near.table
    volume, outputs = near.geometry.volume, near.num_outputs
    pairs = near.pairs
    want = torch.full((volume, outputs), -1, dtype=torch.int32, device=pairs.offset.device)
    want[pairs.offset, pairs.output] = pairs.input.int()
    assert table.neighbours.dtype == table.order.dtype == torch.int32
    assert torch.equal(table.neighbours, want)
    assert table.sorted_neighbours.shape == (volume, outputs)
    present = [[bool(v >= 0) for v in column] for column in want.T.tolist()]
    if table.words is not None:
        masks = [sum(1 << bit for bit, there in enumerate(column) if there) for column in present]
        assert table.words.tolist() == [masks[row] for row in table.order.tolist()]
    # Masks, of 31 offsets at most, ascend, or those of the mirror do; equal ones by row, or by place in the grid.
    ascends = [bits[::-1] for bits in present] if near.inverted and near.geometry.is_mirrored else present
    if volume > 31:
        ascends = [[bits[round(at * (volume - 1) / 30)] for at in range(31)] for bits in ascends]
    ties = (list(range(outputs)), near.outputs.indices.tolist())
    orders = [sorted(range(outputs), key=lambda row: (ascends[row][::-1], at[row])) for at in ties]
    assert table.order.tolist() in orders
    assert torch.equal(table.sorted_neighbours, want[:, table.order.long()])
    for tile in (1, 7, 16, outputs + 1):
        tiles = tile_offsets(table, tile)
        assert tiles.shape == (-(-outputs // tile), volume)
        rows = table.order.tolist()
        for place, got in enumerate(tiles.tolist()):
            members = rows[place * tile : (place + 1) * tile]
            assert got == [any(present[row][offset] for row in members) for offset in range(volume)]


@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize("how", GEOMETRIES, ids=lambda g: f"{g.kind}-{g.kernel_size}".replace(" ", ""))
def test_both_directions_hold_the_pairs(how, by_table, device):
    near = build_kernel_map(random_sites((6, 5, 7), 2, 25, device=device), how, by_table=by_table)
    check(near)
    check(near.inverse)
    # The transposed direction: the output that each input meets.
    pairs, owners = near.pairs, near.inverse.neighbours
    assert owners.shape == (how.volume, near.num_inputs)
    assert torch.equal(owners[pairs.offset, pairs.input], pairs.output.int())


def test_tables_are_kept_for_a_map_and_its_inverse():
    near = build_kernel_map(random_sites((6, 6), 1, 20), geometry("conv", (3, 3), 2, 1))
    assert near.table is near.table
    assert near.inverse.table is near.inverse.table
    assert near.inverse.inverse.table is near.table
    assert near.inverse.table is not near.table
    assert near.neighbours is near.neighbours
    assert torch.equal(near.table.neighbours, near.neighbours)
    assert near.inverse.counts == near.counts


def test_like_outputs_stand_together():
    """Sorting leaves fewer offsets to run over than the order of rows does."""
    near = build_kernel_map(random_sites((24, 24, 24), 1, 1500), geometry("subm", (3, 3, 3)))
    rows = torch.arange(near.num_outputs, dtype=torch.int32)
    unsorted = type(near.table)(rows, near.neighbours)
    assert tile_offsets(near.table, 32).sum() < 0.8 * tile_offsets(unsorted, 32).sum()


def test_empty():
    sites = Coordinates(torch.zeros(0, 3, dtype=torch.int32), (4, 4), 1)
    for how in (geometry("subm", (3, 3)), geometry("conv", (2, 2), 2)):
        for near in (build_kernel_map(sites, how, by_table=by_table) for by_table in (True, False)):
            for table in (near.table, near.inverse.table):
                assert table.neighbours.shape == table.sorted_neighbours.shape == (how.volume, 0)
                assert table.order.shape == (0,)
                assert tile_offsets(table, 16).shape == (0, how.volume)
    # Voxels that no place of the kernel meets.
    lonely = Coordinates(torch.tensor([[0, 1, 1], [0, 3, 0]], dtype=torch.int32), (4, 4), 1)
    vanished = build_kernel_map(lonely, geometry("conv", (1, 1), 2), by_table=True)
    assert vanished.table.sorted_neighbours.shape == (1, 0)
    assert vanished.inverse.table.sorted_neighbours.tolist() == [[-1, -1]]
    assert vanished.in_index.shape[0] == 0


def test_the_device_is_not_read(monkeypatch):
    sites = random_sites((6, 5, 7), 2, 25).prove()
    kinds = [geometry("subm", (3, 3, 3)), geometry("subm", (2, 3, 3)), geometry("subm", (1, 1, 1))]
    for how in kinds:
        assert build_kernel_map(sites, how, proven=True, by_table=True).inverse.table.order.shape == (50,)

    def refuse(*_: object) -> None:
        raise AssertionError("read")

    for name in ("item", "tolist", "__bool__", "__int__", "nonzero", "cpu", "unique", "bincount"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for how in kinds:
        near = build_kernel_map(sites, how, proven=True, by_table=True)
        tile_offsets(near.table, 16)
        assert near.inverse.table is not order_by_mask(near.neighbours)


def test_mirrored_tables_share_their_order():
    sites, how = random_sites((6, 5, 7), 2, 25), geometry("subm", (3, 1, 5), dilation=(1, 1, 2))
    for by_table in (True, False):
        near = build_kernel_map(sites, how, by_table=by_table)
        assert near.inverse.table.order is near.table.order
        assert torch.equal(near.inverse.neighbours, near.neighbours.flip(0))
    moved = build_kernel_map(near.inputs, geometry("subm", (3, 3, 3), padding=(1, 1, 2)))
    assert not moved.geometry.is_mirrored
    assert not torch.equal(moved.inverse.neighbours, moved.neighbours.flip(0))
