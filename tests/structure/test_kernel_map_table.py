"""Tables of neighbours: against the pairs, their order against sorting in Python, both directions, large kernels."""

from __future__ import annotations

import pytest
import torch

from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import KernelMap
from insum_nn.structure.kernel_map_build import build_kernel_map
from insum_nn.structure.kernel_map_table import MASK_BITS, order_by_mask
from tests.ops.conv_oracle import geometry, random_sites

GEOMETRIES = [
    geometry("subm", (3, 3, 3)),
    geometry("subm", (2, 1, 3), dilation=(1, 1, 2)),
    geometry("subm", (1, 1, 1)),
    geometry("conv", (3, 3, 3), 2, 1),
    geometry("conv", (2, 2, 2), 2),
    geometry("transpose", (3, 2, 3), (2, 3, 1), 1, (1, 1, 2), (1, 0, 0)),
    # 343 offsets: seven words of a mask.
    geometry("subm", (7, 7, 7)),
    geometry("conv", (5, 4, 3), 2, 2),
]


def check(near: KernelMap) -> None:
    table = near.table
    volume, outputs = near.geometry.volume, near.num_outputs
    pairs = near.pairs
    want = torch.full((volume, outputs), -1, dtype=torch.int32, device=pairs.offset.device)
    want[pairs.offset, pairs.output] = pairs.input.int()
    assert table.neighbours.dtype == table.order.dtype == torch.int32
    assert torch.equal(table.neighbours, want)
    assert (table.num_offsets, table.num_outputs) == (volume, outputs)
    present = [[bool(v >= 0) for v in column] for column in want.T.tolist()]
    masks = [sum(1 << bit for bit, there in enumerate(column) if there) for column in present]
    words = [sum(int(word) << (MASK_BITS * v) for v, word in enumerate(column)) for column in table.masks.T.tolist()]
    assert words == masks
    assert table.order.tolist() == sorted(range(outputs), key=lambda row: (masks[row], row))
    assert torch.equal(table.sorted_neighbours, want[:, table.order.long()])
    for tile in (1, 7, 16, outputs + 1):
        tiles = table.tile_offsets(tile)
        assert tiles.shape == (-(-outputs // tile), volume)
        rows = table.order.tolist()
        for place, got in enumerate(tiles.tolist()):
            members = rows[place * tile : (place + 1) * tile]
            assert got == [any(present[row][offset] for row in members) for offset in range(volume)]


@pytest.mark.parametrize("how", GEOMETRIES, ids=lambda g: f"{g.kind}-{g.kernel_size}".replace(" ", ""))
def test_both_directions_hold_the_pairs(how, device):
    near = build_kernel_map(random_sites((6, 5, 7), 2, 25, device=device), how)
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
    assert near.table.neighbours is near.neighbours
    assert near.inverse.counts == near.counts


def test_like_outputs_stand_together():
    """Sorting leaves fewer offsets to run over than the order of rows does."""
    near = build_kernel_map(random_sites((24, 24, 24), 1, 1500), geometry("subm", (3, 3, 3)))
    rows = torch.arange(near.num_outputs, dtype=torch.int32)
    unsorted = type(near.table)(near.neighbours, near.table.masks, rows)
    assert near.table.tile_offsets(32).sum() < 0.8 * unsorted.tile_offsets(32).sum()


def test_empty():
    sites = Coordinates(torch.zeros(0, 3, dtype=torch.int32), (4, 4), 1)
    for how in (geometry("subm", (3, 3)), geometry("conv", (2, 2), 2)):
        table = build_kernel_map(sites, how).table
        assert table.neighbours.shape == (how.volume, 0)
        assert table.order.shape == (0,)
        assert table.tile_offsets(16).shape == (0, how.volume)


def test_the_device_is_not_read(monkeypatch):
    near = build_kernel_map(random_sites((6, 5, 7), 2, 25), geometry("subm", (3, 3, 3)))

    def refuse(*_: object) -> None:
        raise AssertionError("read")

    for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    table = order_by_mask(near.neighbours)
    table.tile_offsets(16)
    assert near.inverse.table is not table
