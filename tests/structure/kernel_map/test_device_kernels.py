"""Kernels that build maps, interpreted, against torch's operators; every address that they use is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from insum_nn.compiler.kernels import written
from insum_nn.errors import InsumFormatError, InsumRangeError
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap, build_kernel_map, device_kernels
from insum_nn.structure.kernel_map.tables import order_by_mask
from tests.compiler.interpreted import interpreter
from tests.device_calls import DeviceCalls, device_calls
from tests.ops.conv_oracle import geometry, random_sites
from tests.pretended_gpu import pretended_gpu

__all__ = ["interpreter"]

pytestmark = pytest.mark.usefixtures("interpreter")

MOVES = [
    geometry("subm", (3,)),
    geometry("subm", (3, 3)),
    geometry("subm", (2, 2, 2)),
    geometry("subm", (3, 3, 3)),
    geometry("subm", (3, 1, 5), 1, None, (1, 2, 3)),
    geometry("subm", (4, 3, 3)),
    geometry("subm", (3, 1, 2, 2)),
    geometry("conv", (3,), 2, 1),
    geometry("conv", (2, 2), 3),
    geometry("conv", (1, 1, 1), 3),
    geometry("conv", (2, 2, 2), 2),
    geometry("conv", (3, 3, 3), 2, 1),
    geometry("conv", (3, 2, 2), (2, 3, 1), (0, 1, 2), (1, 1, 3)),
    geometry("conv", (2, 2, 3), 2, 1, 2),
    geometry("conv", (4, 3, 3), 2, 1),
    geometry("conv", (2, 2, 2, 1), 2),
    geometry("transpose", (2,), 2),
    geometry("transpose", (2, 3, 2), 2),
    geometry("transpose", (3, 2, 3), (2, 3, 1), 1, (1, 1, 2), (1, 0, 0)),
    geometry("transpose", (2, 1, 2, 2), (2, 1, 2, 1)),
]
SHAPES = {1: (37,), 2: (7, 9), 3: (6, 5, 7), 4: (4, 3, 5, 4)}


@contextlib.contextmanager
def by_torch() -> Generator[None]:
    """Within this, torch's operators build maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written.WrittenKernels, "launchers", lambda *_: None)
        yield


def parts(near: KernelMap) -> dict[str, Tensor | None]:
    """All that a map holds, or gives."""
    found: dict[str, Tensor | None] = {"outputs": near.out_indices, "filled": near.filled, "rows": near.neighbours}
    for name, table in (("", near.table), ("inverse ", near.inverse.table)):
        found[f"{name}order"], found[f"{name}near"] = table.order, table.sorted_neighbours
        found[f"{name}words"] = table.words
    return found | dict(near.pair_list)


def both(sites: Coordinates, how: Geometry, *, proven: bool) -> KernelMap:
    """The map by kernels, which is that of torch's operators."""

    def fresh() -> Coordinates:
        return Coordinates(sites.indices.clone(), sites.spatial_shape, sites.batch_size)

    with pretended_gpu():
        got = build_kernel_map(fresh(), how, proven=proven)
        mine = parts(got)
        with by_torch():
            want = build_kernel_map(fresh(), how, proven=proven)
            theirs = parts(want)
    for name, part in theirs.items():
        other = mine[name]
        assert (part is None) == (other is None), name
        assert part is None or (torch.equal(part, other) and part.dtype == other.dtype), name
    for name in ("order", "near", "InIdx"):
        held = mine[name]
        assert held is None or held.data_ptr() % 16 == 0
    return got


def made_by_kernels(near: KernelMap) -> bool:
    return near.table.parts is not None


@pytest.mark.parametrize(
    "how", MOVES, ids=lambda g: f"{g.kind}-{g.kernel_size}-{g.stride}-{g.dilation}".replace(" ", "")
)
def test_maps_are_those_of_torchs_operators(how: Geometry):
    shape = SHAPES[len(how.kernel_size)]
    drawn = random_sites(shape, 3, 15).indices
    proven = MOVES.index(how) % 2 == 0
    # A cloud without a voxel.
    sites = Coordinates(drawn[drawn[:, 0] != 1].to(torch.int32 if proven else torch.int64), shape, 3)
    assert made_by_kernels(both(sites, how, proven=proven))


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
    near = both(Coordinates(chosen[case], shape, 2), how, proven=False)
    assert made_by_kernels(near) == (case != "none")


def test_blocks_of_columns_are_joined():
    """More outputs than a program takes, so that pairs stand behind those of earlier blocks."""
    count = 2 * device_kernels.COLUMNS + 60
    sites = random_sites((40, 40), 1, count)
    near = both(sites, geometry("subm", (3, 3)), proven=True)
    assert near.table.parts is not None
    assert near.table.parts.shape[1] == 3


def test_offsets_are_compared_in_part():
    """More offsets than a mask has bits."""
    near = both(random_sites((9, 9, 9), 1, 60), geometry("subm", (5, 5, 3)), proven=True)
    assert near.table.words is None


def test_a_grid_with_too_many_cells_is_sorted_instead():
    shape = (1 << 20, 1 << 20)
    rows = torch.tensor([[0, 5, 5], [0, 5, 6], [0, 900_000, 3], [0, 4, 4]], dtype=torch.int32)
    for how in (geometry("subm", (3, 3)), geometry("conv", (2, 2), 2)):
        near = both(Coordinates(rows, shape, 1), how, proven=True)
        # Its columns are sorted by kernels all the same.
        assert made_by_kernels(near) == (how.kind == "conv")


@pytest.mark.parametrize(
    ("row", "kind", "text"),
    [
        ([0, 6, 0], InsumRangeError, "coordinate 0"),
        ([0, 0, -1], InsumRangeError, "coordinate 1"),
        ([0, 2**31 - 1, 0], InsumRangeError, "coordinate 0"),
        ([1, 0, -(2**31)], InsumRangeError, "coordinate 1"),
        ([2**31 - 1, 0, 0], InsumRangeError, "batch entry"),
        ([-1, 0, 0], InsumRangeError, "batch entry"),
        ([0, 2, 3], InsumFormatError, "row 3 repeats row 1"),
    ],
    ids=str,
)
def test_bad_voxels_lead_to_no_address_outside(row: list[int], kind: type[Exception], text: str):
    rows = torch.tensor([[0, 0, 0], [0, 2, 3], [1, 5, 6], row], dtype=torch.int32)
    for how in (geometry("subm", (3, 3)), geometry("conv", (3, 3), 2, 1), geometry("transpose", (2, 2), 2)):
        with pretended_gpu(), pytest.raises(kind, match=text):
            build_kernel_map(Coordinates(rows.clone(), (6, 7), 2), how)
    wide = torch.tensor([[0, 0, 0], [0, 2, 3], [1, 5, 6], [0, 1 << 40, 0]])
    with pretended_gpu(), pytest.raises(InsumRangeError, match="coordinate 0"):
        build_kernel_map(Coordinates(wide, (6, 7), 2), geometry("subm", (3, 3)))


# Torch's operators and kernels: of a map of proven voxels, of others, of the inverse's table, of the list of pairs.
LAUNCHES = {
    "subm": (geometry("subm", (3, 3, 3)), (2, 3), (2, 3), (1, 0), (1, 1)),
    "subm, even": (geometry("subm", (2, 2, 2)), (2, 3), (2, 3), (2, 3), (1, 1)),
    "tiled": (geometry("conv", (2, 2, 2), 2), (4, 4), (6, 6), (2, 3), (1, 1)),
    "overlapping": (geometry("conv", (3, 3, 3), 2, 1), (4, 4), (6, 6), (2, 3), (1, 1)),
    "transposed": (geometry("transpose", (2, 2, 2), 2), (4, 4), (6, 6), (2, 3), (1, 1)),
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
        assert (got.parts is None) == (rows is not None)
        assert want.parts is None
        for name in ("order", "sorted_neighbours", "words", "neighbours"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_the_check_of_addresses_sees_one_outside():
    near, order = torch.zeros(2, 600, dtype=torch.int32), torch.zeros(600, dtype=torch.int32)
    with pretended_gpu(), pytest.raises(InterpreterError, match="outside of every tensor"):
        device_kernels.exchanged_table(near + 1000, order, 5)
