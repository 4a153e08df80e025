"""Maps of all kinds, built by hand-written kernels and by torch's operators."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from insum_nn.compiler.kernels import written
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import Geometry, KernelMap, build_kernel_map
from tests.ops.conv_oracle import geometry, random_sites

__all__ = ["BAD_ROWS", "MOVES", "SHAPES", "bad_sites", "both", "by_outputs", "by_torch", "made_by_kernels", "sites_of"]

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
# A row beside three that are good, and what its refusal says.
BAD_ROWS = {
    (0, 6, 0): "coordinate 0",
    (0, 0, -1): "coordinate 1",
    (0, 2**31 - 1, 0): "coordinate 0",
    (1, 0, -(2**31)): "coordinate 1",
    (2**31 - 1, 0, 0): "batch entry",
    (-1, 0, 0): "batch entry",
    (0, 2, 3): "row 3 repeats row 1",
}


def bad_sites(row: tuple[int, ...], device: torch.device | str = "cpu") -> Coordinates:
    """Four voxels, of which the last is one of `BAD_ROWS`."""
    rows = torch.tensor([[0, 0, 0], [0, 2, 3], [1, 5, 6], row], dtype=torch.int32).to(device)
    return Coordinates(rows, (6, 7), 2)


def sites_of(how: Geometry, device: torch.device | str = "cpu") -> tuple[Coordinates, bool]:
    """Voxels of three clouds, of which one is empty, for one of `MOVES`, and whether they count as proven."""
    shape, proven = SHAPES[len(how.kernel_size)], MOVES.index(how) % 2 == 0
    drawn = random_sites(shape, 3, 15).indices
    drawn = drawn[drawn[:, 0] != 1].to(torch.int32 if proven else torch.int64)
    return Coordinates(drawn.to(device), shape, 3), proven


@contextlib.contextmanager
def by_torch() -> Generator[None]:
    """Within this, torch's operators build maps."""
    launchers = written.WrittenKernels.launchers
    written.WrittenKernels.launchers = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        written.WrittenKernels.launchers = launchers  # type: ignore[method-assign]


def by_outputs(near: KernelMap) -> dict[str, Tensor]:
    """The list of pairs by offset, then by output; on a GPU an offset's are in the order of the table's columns."""
    pairs = near.pair_list
    order = (pairs["Off"].long() * near.num_outputs + pairs["OutIdx"]).argsort()
    return {name: part[order] for name, part in pairs.items()}


def made_by_kernels(near: KernelMap) -> bool:
    """Whether its table was sorted by hand-written kernels."""
    return near.table.memory is not None


def _parts(near: KernelMap) -> dict[str, Tensor | None]:
    """All that a map holds, or gives."""
    found: dict[str, Tensor | None] = {"outputs": near.out_indices, "filled": near.filled, "rows": near.neighbours}
    for name, table in (("", near.table), ("inverse ", near.inverse.table)):
        found[f"{name}order"], found[f"{name}near"] = table.order, table.sorted_neighbours
        found[f"{name}words"] = table.words
    return found | dict(near.pair_list)


def both(sites: Coordinates, how: Geometry, *, proven: bool) -> KernelMap:
    """The map as it is built now, which is that of torch's operators, bit for bit."""

    def fresh() -> Coordinates:
        return Coordinates(sites.indices.clone(), sites.spatial_shape, sites.batch_size)

    got = build_kernel_map(fresh(), how, proven=proven)
    mine = _parts(got)
    with by_torch():
        other = build_kernel_map(fresh(), how, proven=proven)
        theirs = _parts(other)
    assert got.counts == other.counts == tuple(got.filled.tolist())
    for name, part in theirs.items():
        own = mine[name]
        assert (part is None) == (own is None), name
        assert part is None or own is None or (torch.equal(part, own) and part.dtype == own.dtype), name
    for name in ("order", "near", "InIdx"):
        held = mine[name]
        assert held is None or held.data_ptr() % 16 == 0
    assert got.lengths.data_ptr() % 16 == 0
    return got
