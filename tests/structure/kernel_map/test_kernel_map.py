"""Kernel maps against a search by loops, their laws, and what is refused before a map is built."""

from __future__ import annotations

import itertools

import pytest
import torch

from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumRangeError, InsumShapeError
from insum_nn.structure import cell_numbers, coordinates
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap, build, search
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.kernel_map.tables import groups_in_graph
from tests.ops.conv_oracle import geometry, random_sites, reached
from tests.structure.kernel_map.map_cases import by_outputs

GEOMETRIES = [
    geometry("subm", (3, 3)),
    geometry("subm", (2, 5), dilation=(1, 2)),
    geometry("conv", (3, 3), 2, 1),
    geometry("conv", (2, 3), (2, 1), 0, (1, 2)),
    geometry("conv", (1, 1), 3),
    geometry("conv", (2, 2), 2),
    geometry("conv", (3, 5), (3, 5)),
    geometry("conv", (2, 1), (2, 1), (1, 0)),
    geometry("subm", (3, 1), dilation=(2, 1)),
    geometry("subm", (5, 3), dilation=(3, 1)),
    geometry("subm", (3, 3), padding=(2, 0)),
    geometry("subm", (1, 1)),
    geometry("conv", (1, 1), 1),
    geometry("transpose", (2, 2), 2),
    geometry("transpose", (3, 2), (2, 3), 1, (2, 1), (1, 0)),
]


def triples(sites: Coordinates, how: Geometry) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Output voxels and (offset, output, input), by loops over voxels and kernel cells."""
    rows = [tuple(row) for row in sites.indices.tolist()]
    cells = list(itertools.product(*map(range, how.kernel_size)))
    if how.kind == "subm":
        outputs = rows
    else:
        outputs = [tuple(row) for row in reached(sites, how).tolist()]
    found = []
    for (offset, cell), (target, output), (source, entry) in itertools.product(
        enumerate(cells), enumerate(outputs), enumerate(rows)
    ):
        if output[0] != entry[0]:
            continue
        fine, coarse = (output, entry) if how.kind == "transpose" else (entry, output)
        parts = zip(fine[1:], coarse[1:], how.stride, how.padding, how.dilation, cell, strict=True)
        if all(x == y * s - p + o * d for x, y, s, p, d, o in parts):
            found.append((offset, target, source))
    return [list(row) for row in outputs], found


@pytest.mark.parametrize("how", GEOMETRIES, ids=lambda g: f"{g.kind}-{g.kernel_size}-{g.stride}".replace(" ", ""))
@pytest.mark.parametrize("way", ["table", "pairs", "pairs without a table"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_holds_every_pair_and_no_other(how, index_dtype, way, device):
    sites = random_sites((6, 5), 3, 9)
    sites = Coordinates(sites.indices.to(device, index_dtype), sites.spatial_shape, 3)
    near = without_tables(sites, how) if "without" in way else build_kernel_map(sites, how, by_table=way == "table")
    assert (("table", False) in near._cache) == (way == "table")
    assert near.num_pairs == near.filled.sum() == near.output_counts(torch.float32).sum()
    near.validate()
    outputs, want = triples(sites, how)
    if how.is_pointwise and how.kind == "conv":
        outputs, want = sites.indices.tolist(), [(0, row, row) for row in range(sites.num_sites)]
    assert near.out_indices.tolist() == outputs
    assert near.out_indices.dtype == index_dtype
    assert near.in_index.device.type == device.type
    pairs = near.pairs
    got = list(zip(pairs.offset.tolist(), pairs.output.tolist(), pairs.input.tolist(), strict=True))
    assert got == sorted(want)
    assert near.counts == tuple(torch.bincount(pairs.offset, minlength=how.volume).tolist())
    for each, rows, extent in (
        (near, [row for _, row, _ in want], near.num_outputs),
        (near.inverse, [row for _, _, row in want], near.num_inputs),
    ):
        assert each.output_counts(torch.int64).tolist() == [rows.count(row) for row in range(extent)]


def test_output_rows_do_not_depend_on_the_order_of_inputs():
    sites = random_sites((7, 8, 6), 2, 60)
    shuffled = Coordinates(sites.indices[torch.randperm(sites.num_sites)], sites.spatial_shape, 2)
    how = geometry("conv", (3, 3, 3), 2, 1)
    first, second = build_kernel_map(sites, how), build_kernel_map(shuffled, how)
    assert torch.equal(first.out_indices, second.out_indices)
    rows = first.out_indices.tolist()
    assert rows == sorted(rows)


def without_tables(sites: Coordinates, how: Geometry) -> KernelMap:
    """The map as of too many voxels and offsets for a table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "MOST_ENTRIES", -1)
        return build_kernel_map(sites, how, by_table=True)


def test_memory_is_bounded_by_runs_of_offsets(monkeypatch):
    sites = random_sites((6, 5, 4), 2, 30)
    for how in (geometry("subm", (3, 3, 3)), geometry("conv", (3, 2, 2), 2), geometry("transpose", (2, 3, 2), 2)):
        want = build_kernel_map(sites, how)
        monkeypatch.setattr(build, "_CANDIDATES", 100)
        monkeypatch.setattr(search, "_CANDIDATES", 250)
        found = [build_kernel_map(sites, how), without_tables(sites, how)]
        monkeypatch.undo()
        for got in found:
            for name, tensor in want.tensors.items():
                assert torch.equal(got.tensors[name], tensor), name


def test_large_tables_are_left_to_the_pairs(monkeypatch):
    monkeypatch.setattr(build, "MOST_ENTRIES", 9 * 30 - 1)
    sites = random_sites((6, 5), 2, 15)
    assert ("groups", False) in build_kernel_map(sites, geometry("subm", (3, 3)), by_table=True)._cache
    assert ("table", False) in build_kernel_map(sites, geometry("subm", (1, 3)), by_table=True)._cache


@pytest.mark.parametrize("extent", [9, 1 << 11, 1 << 20])
@pytest.mark.parametrize(
    "how",
    [
        geometry("subm", (3, 3, 3)),
        geometry("subm", (3, 2, 3), dilation=(1, 3, 5)),
        geometry("subm", (3, 3, 3), dilation=(1 << 11, 1, 1 << 12)),
        geometry("conv", (2, 2, 2), 2),
        geometry("conv", (3, 3, 2), 2, 1),
        geometry("transpose", (3, 2, 2), 2, 1),
    ],
    ids=lambda g: f"{g.kind}-{g.kernel_size}".replace(" ", ""),
)
def test_both_ways_at_the_edges_of_a_grid(how, extent, device):
    """Keys of 32 and of 64 bits, and voxels at both ends of each axis, whose neighbours are not to wrap."""
    ends = [0, 1, extent - 2, extent - 1]
    every = torch.tensor(list(itertools.product([0, 2], ends, ends, ends)), dtype=torch.int32)
    storage = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))].T.contiguous().to(device)
    sites = Coordinates(storage.T, (extent,) * 3, 3)
    assert not sites.indices.is_contiguous()
    assert sites._keys.keys.dtype == (torch.int64 if extent > 1000 else torch.int32)
    got, want = build_kernel_map(sites, how, by_table=True), without_tables(sites, how)
    assert torch.equal(got.out_indices, want.out_indices)
    assert torch.equal(got.neighbours, want.neighbours)
    for name, tensor in want.tensors.items():
        assert torch.equal(got.tensors[name], tensor), name
    # The next level starts from the keys that came with the outputs.
    deeper, again = (
        build_kernel_map(
            Coordinates(near.out_indices.clone(), near.outputs.spatial_shape, 3) if fresh else near.outputs,
            geometry("subm", (3, 3, 3)),
        )
        for near, fresh in ((got, False), (want, True))
    )
    assert torch.equal(deeper.neighbours, again.neighbours)


def test_grids_too_large_for_one_key(device):
    huge = (1 << 31, 1 << 31, 1 << 31)
    corner = (1 << 31) - 2
    rows = [[0, 0, 0, 0], [0, corner, corner, corner], [0, corner, corner, corner + 1], [1, corner, corner, corner]]
    rows += [[1, corner + 1, corner, corner], [0, 0, 0, corner]]
    sites = Coordinates(torch.tensor(rows, dtype=torch.int32, device=device), huge, 2)
    near = build_kernel_map(sites, geometry("subm", (3, 3, 3)), by_table=True)
    assert ("table", False) in near._cache
    near.validate()
    pairs = near.pairs
    side = {(o, p) for o, p in zip(pairs.output.tolist(), pairs.input.tolist(), strict=True) if o != p}
    assert side == {(1, 2), (2, 1), (3, 4), (4, 3)}
    strided = build_kernel_map(sites, geometry("conv", (2, 2, 2), 2))
    strided.validate()
    half = corner // 2
    assert strided.out_indices.tolist() == [[0, 0, 0, 0], [0, 0, 0, half], [0, half, half, half], [1, half, half, half]]
    with pytest.raises(InsumFormatError, match="row 6 repeats row 1"):
        Coordinates(torch.tensor([*rows, rows[1]], device=device), huge, 2).prove()


def test_ranks_give_the_same_map_as_keys(monkeypatch):
    sites = random_sites((6, 5, 4), 3, 25)
    for how in (geometry("subm", (3, 3, 3)), geometry("conv", (3, 3, 3), 2, 1), geometry("transpose", (2, 2, 2), 2)):
        want = build_kernel_map(sites, how)
        monkeypatch.setattr(coordinates, "KEY_LIMIT", 100)
        monkeypatch.setattr(cell_numbers, "KEY_LIMIT", 100)
        got = build_kernel_map(Coordinates(sites.indices, sites.spatial_shape, 3), how)
        monkeypatch.undo()
        assert torch.equal(got.out_indices, want.out_indices)
        for name, tensor in want.tensors.items():
            assert torch.equal(got.tensors[name], tensor), name


def test_empty():
    sites = Coordinates(torch.zeros(0, 4, dtype=torch.int32), (4, 4, 4), 2)
    for how in (geometry("subm", (3, 3, 3)), geometry("conv", (3, 3, 3), 2, 1), geometry("transpose", (2, 2, 2), 2)):
        for near in (
            build_kernel_map(sites, how, by_table=True),
            build_kernel_map(sites, how),
            without_tables(sites, how),
        ):
            near.validate()
            assert near.num_pairs == near.num_outputs == 0
            assert near.counts == (0,) * how.volume
            assert near.out_indices.shape == (0, 4)
            assert near.neighbours.shape == (how.volume, 0)


def test_neighbours_and_spconv_tables():
    sites = random_sites((6, 6), 2, 15)
    near = build_kernel_map(sites, geometry("subm", (3, 3)))
    table = near.neighbours
    assert (table >= 0).sum() == near.num_pairs
    assert table[4].tolist() == list(range(30))
    pairs = near.indice_pairs
    assert pairs.shape == (2, 9, 30)
    for offset, count in enumerate(near.indice_pair_num.tolist()):
        assert (pairs[:, offset, count:] == -1).all()
        assert (table[offset, pairs[1, offset, :count].long()] == pairs[0, offset, :count]).all()
    inverse = near.inverse.inverse
    assert torch.equal(inverse.in_index, near.in_index)
    assert inverse.inputs is near.inputs


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_groups_hold_one_offset(size):
    offset = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3])
    rows, counts = torch.arange(8), (3, 0, 1, 4, 0)
    near = torch.full((5, 8), -1).index_put((offset, rows), rows + 8)
    plan = size, sum(-(-count // size) for count in counts)
    off, in_index, out_index, filled, slots, _ = groups_in_graph(near, plan=lambda _: plan)
    assert tuple(filled.tolist()) == counts
    assert in_index.shape == out_index.shape == (len(off), size)
    assert off.tolist() == [o for o, n in enumerate(counts) for _ in range(-(-n // size))]
    used = in_index >= 0
    assert used.sum() == 8
    assert torch.equal(used.reshape(-1).nonzero().squeeze(1), slots)
    assert (in_index[used] == out_index[used] + 8).all()
    assert torch.equal(off[:, None].expand(-1, size)[used].long(), offset)


def test_validate_finds_planted_faults():
    sites = random_sites((6, 6), 1, 20)
    how = geometry("subm", (3, 3))
    faults = [
        ("in_index", lambda near: near.in_index.fill_(20), InsumRangeError),
        ("out_index", lambda near: near.out_index[0].fill_(-2), InsumRangeError),
        ("offset", lambda near: near.offset.fill_(9), InsumRangeError),
        ("offsets ascend", lambda near: near.offset.copy_(near.offset.flip(0).clone()), InsumFormatError),
        ("in both index tensors", lambda near: near.in_index[0, 0].fill_(-1), InsumFormatError),
        ("stands once", lambda near: near.in_index[0, :2].fill_(3), InsumFormatError),
    ]
    for text, plant, error in faults:
        near = build_kernel_map(sites, how)
        plant(near)
        with pytest.raises(error, match=text):
            near.validate()


class TestBadInput:
    good = torch.tensor([[0, 0, 0], [0, 3, 4], [1, 2, 2]], dtype=torch.int32)

    @pytest.mark.parametrize(
        ("row", "text"),
        [
            ([0, 4, 0], r"indices\[:,1\] \(coordinate 0\): expected 0 <= value < 4; got minimum 0, maximum 4 \(1 of 4"),
            ([0, 0, 5], r"indices\[:,2\] \(coordinate 1\).*first at row 3: \[0, 0, 5\]"),
            ([0, -1, 0], r"indices\[:,1\].*minimum -1"),
            ([2, 0, 0], r"indices\[:,0\] \(batch entry\): expected 0 <= value < 2"),
            ([-1, 0, 0], r"indices\[:,0\].*minimum -1"),
            ([0, 2147483647, -2147483648], r"indices\[:,2\]"),
        ],
    )
    def test_outside(self, row, text, device):
        indices = torch.cat([self.good, torch.tensor([row], dtype=torch.int32)]).to(device)
        with pytest.raises(InsumRangeError, match=text) as caught:
            build_kernel_map(Coordinates(indices, (4, 5), 2), geometry("subm", (3, 3)))
        assert caught.value.fields["field"] == "indices"
        assert caught.value.fields["row"] == 3

    def test_duplicates(self, device):
        indices = torch.cat([self.good, self.good[1:], self.good[1:2]]).to(device)
        with pytest.raises(InsumFormatError, match=r"row 3 repeats row 1: \[0, 3, 4\] \(3 of 6 rows"):
            build_kernel_map(Coordinates(indices, (4, 5), 2), geometry("conv", (2, 2), 2))

    @pytest.mark.parametrize(
        ("indices", "shape", "batch", "error", "text"),
        [
            (good.float(), (4, 5), 2, InsumDtypeError, "must be int32 or int64, got torch.float32"),
            (good, (4, 5, 6), 2, InsumShapeError, r"expected shape \(n, 4\).*got \(3, 3\)"),
            (good[0], (4, 5), 2, InsumShapeError, "'indices' must have one row"),
            (good, (4, 0), 2, InsumShapeError, r"'spatial_shape' is \(4, 0\)"),
            (good, (4, (1 << 31) + 1), 2, InsumShapeError, "'spatial_shape' is"),
            (good, (4, 5), 0, InsumShapeError, "'batch_size' is 0"),
        ],
    )
    def test_wrong_kind(self, indices, shape, batch, error, text):
        with pytest.raises(error, match=text):
            Coordinates(indices, shape, batch)

    def test_output_without_extent(self):
        sites = Coordinates(self.good, (4, 5), 2)
        with pytest.raises(InsumShapeError, match=r"would be \(-1, 0\)"):
            build_kernel_map(sites, geometry("conv", (6, 6)))


@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize(
    "how", [geometry("subm", (3, 3)), geometry("conv", (3, 2), 2, 1), geometry("transpose", (2, 2), 2)]
)
def test_the_list_holds_every_pair_once(how, by_table, device):
    near = build_kernel_map(random_sites((6, 5), 2, 11, device=device), how, by_table=by_table)
    listed, ordered, pairs = near.pair_list, by_outputs(near), near.pairs
    for name, want in (("Off", pairs.offset), ("OutIdx", pairs.output), ("InIdx", pairs.input)):
        assert listed[name].dtype == torch.int32
        assert torch.equal(ordered[name].long(), want)
    assert near.pair_list is listed
    assert near.inverse.pair_list["InIdx"] is listed["OutIdx"]
    assert near.inverse.pair_list["Off"] is listed["Off"]
    empty = Coordinates(torch.zeros(0, 3, dtype=torch.int32, device=device), (6, 5), 1)
    assert all(part.shape == (0,) for part in build_kernel_map(empty, how, by_table=by_table).pair_list.values())
