"""Kernels that build maps, interpreted, against torch's operators; every address that they use is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime.errors import InterpreterError

from insum_nn.errors import InsumFormatError, InsumRangeError
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap, build_kernel_map, device_kernels
from insum_nn.structure.kernel_map.device_kernels import TableMemory
from insum_nn.structure.kernel_map.tables import order_by_mask
from tests.compiler.interpreted import interpreter
from tests.device_calls import DeviceCalls, device_calls
from tests.ops.conv_oracle import geometry, random_sites
from tests.pretended_gpu import pretended_gpu
from tests.structure.kernel_map.map_cases import BAD_ROWS, MOVES, bad_sites, both, by_torch, made_by_kernels, sites_of

__all__ = ["interpreter"]

pytestmark = pytest.mark.usefixtures("interpreter")


def pretended(sites: Coordinates, how: Geometry, *, proven: bool) -> KernelMap:
    """`both` on the pretended GPU."""
    with pretended_gpu():
        return both(sites, how, proven=proven)


@pytest.mark.parametrize(
    "how", MOVES, ids=lambda g: f"{g.kind}-{g.kernel_size}-{g.stride}-{g.dilation}".replace(" ", "")
)
def test_maps_are_those_of_torchs_operators(how: Geometry):
    sites, proven = sites_of(how)
    assert made_by_kernels(pretended(sites, how, proven=proven))


@pytest.mark.parametrize(
    "how",
    [geometry("subm", (3, 3, 3)), geometry("conv", (3, 3, 3), 2, 1), geometry("transpose", (3, 3, 3), 2, 1)],
    ids=lambda g: g.kind,
)
@pytest.mark.parametrize("case", ["none", "one", "corners", "all", "rows of a view"])
def test_few_and_many_voxels(how: Geometry, case: str):
    shape = (5, 4, 9)
    every = torch.cartesian_prod(torch.arange(2), *map(torch.arange, shape)).int()
    ends = ((every[:, 1:] == 0) | (every[:, 1:] == torch.tensor(shape) - 1)).all(1)
    wide = torch.cat([every, every], 1)[::3, : every.shape[1]]
    chosen = {"none": every[:0], "one": every[7:8], "corners": every[ends], "all": every, "rows of a view": wide}
    near = pretended(Coordinates(chosen[case], shape, 2), how, proven=False)
    assert made_by_kernels(near) == (case != "none")


def test_blocks_of_columns_are_joined():
    """More outputs than a program takes, so that pairs stand behind those of earlier blocks."""
    count = 2 * device_kernels.COLUMNS + 60
    sites = random_sites((40, 40), 1, count)
    near = pretended(sites, geometry("subm", (3, 3)), proven=True)
    assert near.table.memory is not None
    assert TableMemory.of(*near.table.sorted_neighbours.shape).blocks == 3


def test_offsets_are_compared_in_part():
    """More offsets than a mask has bits."""
    near = pretended(random_sites((9, 9, 9), 1, 60), geometry("subm", (5, 5, 3)), proven=True)
    assert near.table.words is None


@pytest.mark.parametrize("extent", [1 << 10, 1 << 20, (1 << 29) + 1])
def test_grids_of_any_size(extent: int):
    """A dense grid would not fit into memory; in the largest, a key cannot number the cells."""
    rows = torch.tensor([[5, 5, 5], [5, 5, 6], [extent - 1, 3, 0], [extent - 1, 4, 0], [4, 4, 6], [0, 0, 0]])
    rows = torch.cat([torch.zeros(6, 1, dtype=torch.int64), rows], 1).int()
    for how in (geometry("subm", (3, 3, 3)), geometry("conv", (2, 2, 2), 2)):
        for proven in (True, False):
            assert made_by_kernels(pretended(Coordinates(rows, (extent,) * 3, 1), how, proven=proven))


def test_full_slots_are_passed():
    """All cells of a line hash to a few runs of slots, and some to the last."""
    line = torch.stack([torch.zeros(200), torch.arange(200) * 3 % 200]).T.int()
    near = pretended(Coordinates(line, (1 << 20,), 1), geometry("subm", (5,)), proven=False)
    assert made_by_kernels(near)
    assert near.num_pairs == 5 * 200 - 6


@pytest.mark.parametrize(("row", "text"), BAD_ROWS.items(), ids=str)
def test_bad_voxels_lead_to_no_address_outside(row: tuple[int, ...], text: str):
    kind = InsumFormatError if "repeats" in text else InsumRangeError
    for how in (geometry("subm", (3, 3)), geometry("conv", (3, 3), 2, 1), geometry("transpose", (2, 2), 2)):
        with pretended_gpu(), pytest.raises(kind, match=text):
            build_kernel_map(bad_sites(row), how)


def test_wide_bad_voxels_lead_to_no_address_outside():
    wide = torch.tensor([[0, 0, 0], [0, 2, 3], [1, 5, 6], [0, 1 << 40, 0]])
    with pretended_gpu(), pytest.raises(InsumRangeError, match="coordinate 0"):
        build_kernel_map(Coordinates(wide, (6, 7), 2), geometry("subm", (3, 3)))


# Torch's operators and kernels: of a map of proven voxels, of others, of the inverse's table, of the list of pairs.
LAUNCHES = {
    "subm": (geometry("subm", (3, 3, 3)), (2, 3), (2, 3), (1, 0), (0, 1)),
    "subm, even": (geometry("subm", (2, 2, 2)), (2, 3), (2, 3), (2, 3), (0, 1)),
    "tiled": (geometry("conv", (2, 2, 2), 2), (4, 4), (6, 6), (2, 3), (0, 1)),
    "overlapping": (geometry("conv", (3, 3, 3), 2, 1), (4, 4), (6, 6), (2, 3), (0, 1)),
    "transposed": (geometry("transpose", (2, 2, 2), 2), (4, 4), (6, 6), (2, 3), (0, 1)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_map_takes_a_handful_of_launches(name: str):
    how, *most = LAUNCHES[name]
    sites = random_sites((6, 5, 7), 2, 10).indices
    built: list[KernelMap] = []

    def build(*, proven: bool) -> None:
        built[:] = [build_kernel_map(Coordinates(sites, (6, 5, 7), 2), how, proven=proven)]

    def counted(run: Callable[[], object]) -> DeviceCalls:
        with device_calls() as calls:
            run()
        return calls

    # What is kept for all maps.
    counted(lambda: build(proven=True))
    runs = [
        lambda: build(proven=True),
        lambda: build(proven=False),
        lambda: built[0].inverse.table,
        lambda: built[0].pair_list,
    ]
    strided = how.kind != "subm"
    for place, (run, (operators, kernels)) in enumerate(zip(runs, most, strict=True)):
        calls = counted(run)
        assert calls.reads == ["tolist"] * (strided and place < 2)
        assert calls.total <= operators
        assert calls.kernels == kernels


def test_a_table_is_sorted_and_exchanged():
    generator = torch.Generator().manual_seed(0)
    near = torch.randint(-2, 9, (4, 9), generator=generator, dtype=torch.int32).clamp_(min=-1)
    names = torch.randperm(9, generator=generator).int()
    for rows in (None, names):
        with pretended_gpu():
            got = order_by_mask(near, rows)
            with by_torch():
                want = order_by_mask(near, rows)
        assert got.memory is not None
        assert want.memory is None
        for name in ("order", "sorted_neighbours", "words", "neighbours"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_kernels_go_on_with_what_torchs_operators_began():
    """Their machine code may be there between two of their calls."""
    sites = random_sites((6, 7), 1, 20)
    with pretended_gpu():
        with by_torch():
            want = build_kernel_map(sites, geometry("conv", (2, 2), 2), proven=True)
            near = want.table.exchanged(20)
            inverse = want.inverse.table
        assert not near.is_contiguous()
        got = order_by_mask(near)
    assert got.memory is not None
    assert torch.equal(got.sorted_neighbours, inverse.sorted_neighbours)
    assert torch.equal(got.order, inverse.order)


def test_traced_tensors_are_left_to_torchs_operators():
    """They have no memory; and kernels would have no place in the graph."""
    near = torch.zeros(4, 9, dtype=torch.int32)
    with pretended_gpu():
        assert order_by_mask(near).memory is not None
        seen: list[bool] = []

        def traced(near: torch.Tensor) -> torch.Tensor:
            table = order_by_mask(near)
            seen.append(table.memory is None)
            return table.exchanged(12)

        graph = make_fx(traced)(near)
        assert torch.equal(graph(near), traced(near))
    assert seen == [True, False]


def test_the_check_of_addresses_sees_one_outside():
    near, order = torch.zeros(2, 600, dtype=torch.int32), torch.zeros(600, dtype=torch.int32)
    with pretended_gpu(), pytest.raises(InterpreterError, match="outside of every tensor"):
        device_kernels.exchanged_table(near + 1000, order, 5)
