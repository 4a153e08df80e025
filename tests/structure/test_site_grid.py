"""Look-ups by cells of a dense grid against the search in sorted keys, and voxels that are not as they should be."""

from __future__ import annotations

import itertools

import pytest
import torch

from insum_nn.errors import InsumFormatError, InsumRangeError
from insum_nn.structure import coordinates
from insum_nn.structure.coordinates import Coordinates, spans_of
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.site_grid import SiteGrid, fits
from tests.ops.conv_oracle import geometry, random_sites
from tests.structure.kernel_map.map_cases import by_outputs

KERNELS = [
    geometry("subm", (3, 3, 3)),
    geometry("subm", (2, 3, 4), dilation=(1, 2, 3)),
    geometry("subm", (5, 1, 3), dilation=(4, 1, 1)),
    geometry("subm", (3, 3, 3), padding=(2, 0, 1)),
]


@pytest.fixture
def searched(monkeypatch):
    """Runs a function with maps built by search."""

    def run(make):
        with monkeypatch.context() as patch:
            patch.setattr(coordinates, "fits", lambda *_: False)
            return make()

    return run


@pytest.mark.parametrize("how", KERNELS, ids=lambda g: f"{g.kernel_size}-{g.dilation}-{g.padding}".replace(" ", ""))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_the_search(how, dtype, batch, searched, device):
    sites = random_sites((6, 5, 7), batch, 40)
    storage = sites.indices.to(device, dtype).T.contiguous()

    def make():
        return build_kernel_map(Coordinates(storage.T, (6, 5, 7), batch), how, by_table=True)

    before = storage.clone()
    got, want = make(), searched(make)
    assert torch.equal(storage, before)
    assert torch.equal(got.neighbours, want.neighbours)
    pairs, others = (by_outputs(near) for near in (got, want))
    for name, tensor in others.items():
        assert torch.equal(pairs[name], tensor)


def test_both_ends_of_every_axis(searched, device):
    """A step over an end of the grid meets no voxel of the next row, plane or batch entry."""
    ends = [0, 1, 7, 8]
    rows = torch.tensor(list(itertools.product([0, 1], ends, ends, ends)), dtype=torch.int32, device=device)
    for how in KERNELS:
        make = lambda how=how: build_kernel_map(Coordinates(rows.clone(), (9, 9, 9), 2), how, by_table=True)  # noqa: E731
        assert torch.equal(make().neighbours, searched(make).neighbours)
    one = torch.tensor([[0, 3]], dtype=torch.int64, device=device)
    assert build_kernel_map(Coordinates(one, (4,), 1), geometry("subm", (3,)), by_table=True).neighbours.tolist() == [
        [-1],
        [0],
        [-1],
    ]
    assert one.tolist() == [[0, 3]]


def test_the_grid_is_given_back():
    sites = random_sites((6, 5, 7), 2, 30)
    fresh = Coordinates(sites.indices, sites.spatial_shape, 2)
    for use in (
        lambda: build_kernel_map(fresh, KERNELS[0]),
        lambda: build_kernel_map(fresh, geometry("conv", (3, 3, 3), 2)),
        fresh.prove,
        lambda: build_kernel_map(fresh, KERNELS[0], proven=True),
    ):
        use()
        assert "grid" not in fresh._cache
    assert fresh.grid() is fresh.grid()
    assert "grid" in fresh._cache


BAD = [
    ([0, 6, 0], InsumRangeError, "coordinate 0"),
    ([0, 0, -1], InsumRangeError, "coordinate 1"),
    ([0, 0, 2**31 - 1], InsumRangeError, "coordinate 1"),
    ([0, -(2**31), 0], InsumRangeError, "coordinate 0"),
    ([2, 0, 0], InsumRangeError, "batch entry"),
    ([-1, 0, 0], InsumRangeError, "batch entry"),
    ([0, 2, 3], InsumFormatError, "row 3 repeats row 1"),
]


@pytest.mark.parametrize(("row", "kind", "text"), BAD, ids=lambda x: str(x) if isinstance(x, list) else "")
@pytest.mark.parametrize("batch", [1, 2])
def test_bad_voxels_are_refused_after_the_look_up(row, kind, text, batch, device):
    """They are checked when the map is made already, which they must not lead out of memory."""
    if batch == 1 and row[0] == 2:
        row = [1, *row[1:]]
    rows = torch.tensor([[0, 0, 0], [0, 2, 3], [0, 5, 6], row], dtype=torch.int32, device=device)
    for how in (geometry("subm", (3, 3)), geometry("subm", (5, 5), dilation=(1, 2)), geometry("conv", (2, 2), 2)):
        sites = Coordinates(rows, (6, 7), batch)
        with pytest.raises(kind, match=text):
            build_kernel_map(sites, how, by_table=True)
        assert "grid" not in sites._cache
        with pytest.raises(kind, match=text):
            sites.prove()


def test_repeats_are_seen_wherever_they_stand():
    rows = torch.tensor([[0, 1], [0, 2], [0, 0]], dtype=torch.int32)
    assert not SiteGrid.build(rows, spans_of((1, 3)), 4).repeats()
    for again in range(3):
        both = torch.cat([rows, rows[again : again + 1]])
        assert SiteGrid.build(both, spans_of((1, 3)), 4).repeats()
        assert SiteGrid.build(both.flip(0), spans_of((1, 3)), 4).repeats()


def test_large_grids_are_searched():
    assert fits(spans_of((1, 100, 100, 100)), 4, 100_000, torch.device("cpu"))
    assert not fits(spans_of((1, 100, 100, 100)), 4, 1_000, torch.device("cpu"))
    assert not fits(spans_of((1, 1 << 20, 1 << 20)), 4, 1 << 30, torch.device("cpu"))
    assert not fits(spans_of((1, 9)), 4, 0, torch.device("cpu"))
    assert not fits(spans_of((1, 9)), 4, 9, torch.device("meta"))


def test_maps_made_in_inference_mode_hold_ordinary_tensors(device):
    """What a compiler builds of them is kept by their versions."""
    with torch.inference_mode():
        sites = random_sites((6, 5, 7), 2, 30, device=device)
        found = [build_kernel_map(sites, how, by_table=True) for how in (KERNELS[0], geometry("conv", (2, 2, 2), 2))]
        for near in found:
            tensors = [*near.table.tensors.values(), *near.inverse.table.tensors.values(), *near.pair_list.values()]
            assert not any(tensor.is_inference() for tensor in tensors)


def test_grids_share_no_memory(device):
    """A stream would read what another has yet to write; only constants are kept, and waited for."""
    sites = random_sites((40, 40, 40), 1, 5000, device=device).indices
    spans, want = (1, 44, 44, 44), torch.arange(5000, dtype=torch.int32, device=device)
    SiteGrid.build(sites[:3], spans, 4)
    if device.type == "cpu":
        first, second = (SiteGrid.build(sites, spans, 4) for _ in range(2))
        assert first.rows.data_ptr() != second.rows.data_ptr()
        return
    torch.cuda.synchronize()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)
        SiteGrid.build(sites, spans, 4)
    with torch.cuda.stream(free):
        found = SiteGrid.build(sites, spans, 4)
        assert not busy.query()
        assert torch.equal(found.rows, want)
        assert not bool(found.repeats())
