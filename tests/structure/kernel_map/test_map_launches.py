"""What a GPU is asked for while maps are built, without one: operators, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.clouds import room
from benchmarks.unet import UNet
from insum_nn.compiler.kernels.row_partition import clear_partitions
from insum_nn.errors import InsumFormatError, InsumRangeError
from insum_nn.layers import spconv
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.models.minkunet import MinkUNet14
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, build, build_kernel_map
from tests.device_calls import DeviceCalls, device_calls
from tests.ops.conv_oracle import geometry, random_sites
from tests.pretended_gpu import pretended_gpu
from tests.structure.kernel_map.map_cases import by_outputs

# Launches: of the map of proven voxels, and of others in a grid that the kernel does not fill; of the inverse's table.
KINDS = {
    "subm": (geometry("subm", (3, 3, 3)), 13, 18, 1),
    "subm, even": (geometry("subm", (2, 2, 2)), 13, 18, 12),
    "subm, large": (geometry("subm", (5, 5, 5)), 14, 19, 1),
    "tiled": (geometry("conv", (2, 2, 2), 2), 29, 46, 12),
    "tiled, not to the end": (geometry("conv", (3, 3, 3), 3), 35, 46, 12),
    "overlapping": (geometry("conv", (3, 3, 3), 2, 1), 43, 55, 12),
    "transposed": (geometry("transpose", (2, 2, 2), 2), 29, 42, 13),
}


def counted(run: Callable[[], object]) -> DeviceCalls:
    with device_calls() as calls:
        run()
    return calls


def fresh(shape: tuple[int, ...] = (16, 16, 16)) -> Coordinates:
    return Coordinates(random_sites(shape, 2, 300).indices.clone(), shape, 2)


@pytest.mark.parametrize("name", KINDS)
def test_a_map_reads_the_number_of_its_outputs_alone(name: str):
    how, proven, unproven, inverse = KINDS[name]
    strided = how.kind != "subm"
    # What is kept for all maps.
    counted(lambda: build_kernel_map(fresh(), how).pair_list)
    for shape, most, known in (((16, 16, 16), proven, True), ((17, 16, 18), unproven, False)):
        sites = fresh(shape)
        with device_calls() as calls:
            near = build_kernel_map(sites, how, proven=known)
        assert calls.reads == ["tolist"] * strided
        # The check of a submanifold map's voxels is waited for when all has been launched.
        assert len(calls.answers) == (not known and not strided)
        assert calls.total <= most
        for run, limit in (
            (near.send_counts, 2),
            (lambda near=near: near.pair_list, 6),
            (lambda near=near: near.inverse.table, inverse),
            (lambda near=near: near.in_index, 26),
        ):
            calls = counted(run)
            assert not calls.reads
            assert calls.total <= limit


def test_maps_over_the_same_sites_number_them_once():
    def launches(sites: Coordinates) -> tuple[int, list[list[int]]]:
        with device_calls() as calls:
            near = build_kernel_map(sites, geometry("subm", (3, 3, 3)), proven=True)
        return calls.total, near.neighbours.tolist()

    first = fresh()
    with pretended_gpu():
        reached = build_kernel_map(first, geometry("conv", (2, 2, 2), 2), proven=True).outputs
    once, want = launches(Coordinates(reached.indices.clone(), reached.spatial_shape, 2))
    # Sites made from keys have them from the beginning; others, from their first map.
    assert launches(reached) == (once - 2, want)
    assert launches(first)[0] == launches(first)[0] + 3


@pytest.mark.parametrize("model", ["spconv", "MinkUNet"])
def test_a_step_on_a_new_cloud_reads_once_a_level(model: str):
    net = UNet(spconv, 4, 5) if model == "spconv" else MinkUNet14(4, 5)

    def step(*, last: bool) -> DeviceCalls:
        points = room(44, 25 if last else 24, 6)
        shape = [-(-(int(extent) + 1) // 16) * 16 for extent in points.amax(0)]
        indices, x = torch.cat([torch.zeros(len(points), 1), points], 1).int(), torch.randn(len(points), 4)
        with device_calls() as calls:
            if model == "spconv":
                out = net(x, indices, shape, 1)
            else:
                out = net(SparseConvTensor(x, indices, shape, 1)).features
            forward = list(calls.reads)
            out.backward(torch.ones_like(out))
        # Four levels are strided; the weights' gradients and their partitions know all sizes.
        assert forward == calls.reads == ["tolist"] * 4
        # The voxels' check, and the pairs of ten maps.
        assert len(calls.answers) <= 11
        assert calls.kernels > 90
        return calls

    step(last=False)
    clear_partitions()
    # No kernel that is written by hand has machine code here, so torch's operators divide rows.
    assert step(last=True).total < 1450


@pytest.mark.parametrize(
    "how",
    [
        geometry("conv", (3, 3, 3), 2, 1),
        geometry("conv", (2, 2, 2), 2),
        geometry("conv", (3, 2, 4), (2, 3, 1), (0, 1, 2), (1, 1, 3)),
        geometry("conv", (3, 3, 2), 2, 1, 2),
        geometry("conv", (1, 1, 1), 3),
        geometry("conv", (2, 2, 2), (2, 3, 4)),
        geometry("transpose", (2, 3, 2), 2),
        geometry("transpose", (3, 2, 3), (2, 3, 1), 1, (1, 1, 2), (1, 0, 0)),
    ],
    ids=lambda g: f"{g.kind}-{g.kernel_size}-{g.stride}-{g.padding}".replace(" ", ""),
)
@pytest.mark.parametrize("count", [40, 1])
def test_maps_with_bounded_sizes_are_those_of_a_cpu(how: Geometry, count: int, monkeypatch: pytest.MonkeyPatch):
    for index_dtype, batch in ((torch.int32, 3), (torch.int64, 1)):
        drawn = random_sites((6, 5, 7), batch, count).indices.to(index_dtype)
        # A cloud without a voxel.
        drawn = drawn[drawn[:, 0] != 1]
        for proven in (True, False):
            with pretended_gpu():
                got = build_kernel_map(Coordinates(drawn.clone(), (6, 5, 7), batch), how, proven=proven)
                table, pairs = got.neighbours, by_outputs(got)
            with monkeypatch.context() as patch:
                patch.setattr(build, "reached_neighbours", lambda *_: None)
                want = build_kernel_map(Coordinates(drawn, (6, 5, 7), batch), how, by_table=False)
            assert torch.equal(got.out_indices, want.out_indices)
            assert got.out_indices.dtype == index_dtype
            assert torch.equal(table, want.neighbours)
            assert table.data_ptr() % 16 == 0
            for name, part in want.pair_list.items():
                assert torch.equal(pairs[name], part), name


@pytest.mark.parametrize(
    ("row", "kind", "text"),
    [
        ([0, 6, 0], InsumRangeError, "coordinate 0"),
        ([0, 0, -1], InsumRangeError, "coordinate 1"),
        ([0, 2**31 - 1, 0], InsumRangeError, "coordinate 0"),
        ([1, 0, -(2**31)], InsumRangeError, "coordinate 1"),
        ([2**31 - 1, 0, 0], InsumRangeError, "batch entry"),
        ([-(2**31), 0, 0], InsumRangeError, "batch entry"),
        ([0, 2, 3], InsumFormatError, "row 3 repeats row 1"),
    ],
    ids=str,
)
def test_bad_voxels_lead_nowhere_before_they_are_refused(row: list[int], kind: type[Exception], text: str):
    rows = torch.tensor([[0, 0, 0], [0, 2, 3], [1, 5, 6], row], dtype=torch.int32)
    kinds = [geometry("conv", (2, 2), 2), geometry("conv", (3, 3), 2, 1), geometry("transpose", (2, 2), 2)]
    for how in [*kinds, geometry("subm", (3, 3)), geometry("subm", (2, 2))]:
        for device in (pretended_gpu, torch.no_grad):
            with device(), pytest.raises(kind, match=text):
                build_kernel_map(Coordinates(rows.clone(), (6, 7), 2), how)
