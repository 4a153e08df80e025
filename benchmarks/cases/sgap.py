"""How wide a sparse sum is reduced: every reduction width r, by rows.

Source: Zhang et al., Sgap: Towards Efficient Sparse Tensor Algebra Compilation for GPU, section 7, tables 1 to 5, which
compare reduction widths with that of a whole warp, for 4, 16, 64 and 128 columns. Records of 2026-11-22 and before also
have its sums by entry (`insum_nn/segment-r8`), equal shares of the entries whose rows a scan sums: no kernel does that
any more, as rows that are divided are as fast.

    insum_nn/row-r8       {<1/8 row, y col>, 8}: 8 lanes along a row

Each is one fixed schedule, in which nothing but r changes; `insum_nn` is what a user gets. `benchmarks.report` adds a
table of the best width against r = 32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.graphs import GRAPHS, pattern
from benchmarks.registry import Builder, Floor, Problem, Setting, Unavailable, Work, case
from benchmarks.schedules import run_scheduled
from insum_nn import Options
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.formats import COO
from insum_nn.ops import spmm
from insum_nn.ops.spmm import spmm_program

__all__ = ["WIDTHS", "schedule_of", "sgap"]

WIDTHS = (1, 2, 4, 8, 16, 32)
# Elements of a program.
_TILE = 1024


def schedule_of(width: int, columns: int) -> Schedule:
    """The schedule of a reduction width: rows fill up the program's tile."""
    n = min(128, columns)
    m = max(1, _TILE // (n * width))
    # A wide reduction of many columns is more than a warp holds.
    warps = 1 if m * n * width <= 2048 else 4
    return Schedule(m=m, n=n, k=width, warps=warps)


@case(
    "sgap",
    tests=("tests/ops/test_spmm.py",),
    graph=GRAPHS,
    n=(4, 16, 64, 128),
    quick={"graph": ("ppi", "artist", "hub", "dd")},
)
def sgap(setting: Setting, *, graph: str, n: int) -> Problem:
    """A graph's matrix times n columns in float32: reduction widths 1 to 32; cuSPARSE."""
    nodes, row, col = pattern(setting, graph)
    generator = setting.generator()
    values = torch.randn(row.numel(), generator=generator, device=setting.device)
    dense = torch.randn(nodes, n, generator=generator, device=setting.device)
    coo = COO.from_coo((row, col), values, (nodes, nodes))

    def fixed(width: int) -> Work:
        if setting.device.type == "cpu":
            raise Unavailable("a schedule is of a generated kernel, which needs a GPU")
        program = spmm_program(coo, options=Options(backend="triton", tune=False))
        tensors = {**coo.tensors, "B": dense}
        return Work(run_scheduled(program, tensors, schedule_of(width, n), (nodes, None)))

    def csr() -> Work:
        crow = torch.searchsorted(row, torch.arange(nodes + 1, device=row.device)).int()
        matrix = torch.sparse_csr_tensor(crow, col.int(), values, (nodes, nodes), check_invariants=False)
        return Work(lambda: torch.sparse.mm(matrix, dense))

    def exact() -> Work:
        def product() -> Tensor:
            terms = values.double()[:, None] * dense.double().index_select(0, col)
            return torch.zeros(nodes, n, dtype=torch.float64, device=row.device).index_add_(0, row, terms)

        return Work(product)

    providers: dict[str, Builder] = {"insum_nn": lambda: Work(lambda: spmm(coo, dense))}
    for width in WIDTHS:
        providers[f"insum_nn/row-r{width}"] = partial(fixed, width)
    moved = coo.nnz * 8 + 4 * nodes + 8 * nodes * n
    floor = Floor(bytes=moved, flops=2 * coo.nnz * n, gathered=4 * coo.nnz * n, row=4 * n, table=4 * nodes * n)
    return Problem(
        providers={**providers, "torch_csr": csr},
        oracle=exact,
        tolerance=1e-5,
        # cuSPARSE adds up long rows by atomics.
        tolerances={"torch_csr": 1e-4},
        floors={"fwd": floor},
    )
