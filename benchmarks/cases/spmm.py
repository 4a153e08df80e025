"""Graphs times dense features, and block-sparse matrices times dense ones, against cuSPARSE, BSR and dense products.

Formats are built before the clock starts. Of a graph's product also the gradient of the features is timed (`fwdbwd`),
as a graph network needs it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.graphs import GRAPHS, pattern
from benchmarks.registry import Floor, Problem, Setting, Unavailable, Work, case
from insum_nn.formats import COO, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops import spmm

__all__ = ["block_spmm", "graph_spmm"]

TESTS = ("tests/ops/test_spmm.py",)

# Relative to the largest element: sums in float32; of halves one rounding of the result (4.9e-4) and, where a block
# product leaves the kernel that sums it, one of each partial sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
# Baselines that sum in the dtype of the operands. Their records state their errors.
LOOSE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.6e-1}


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True).requires_grad_()


@case(
    "spmm",
    tests=TESTS,
    graph=GRAPHS,
    n=(4, 16, 32, 64, 128, 256),
    dtype=("float32", "float16", "bfloat16"),
    quick={"graph": ("ppi", "artist", "dd"), "n": (32, 128), "dtype": ("float32", "float16")},
)
def graph_spmm(setting: Setting, *, graph: str, n: int, dtype: str) -> Problem:
    """A graph's matrix with random values times n dense columns: synthetic degrees, a hub, and graphs from files."""
    kind = getattr(torch, dtype)
    nodes, row, col = pattern(setting, graph)
    generator = setting.generator()
    values = torch.randn(row.numel(), generator=generator, device=setting.device).to(kind)
    dense = torch.randn(nodes, n, generator=generator, device=setting.device).to(kind)
    coo = COO.from_coo((row, col), values, (nodes, nodes))

    def ours(build: Callable[[], SparseFormat]) -> Work:
        matrix, operand = build(), _leaf(dense, kind)
        return Work(lambda: spmm(matrix, operand), (operand,))

    def csr() -> Work:
        if setting.device.type == "cpu" and kind != torch.float32:
            raise Unavailable("torch multiplies sparse halves on a GPU only")
        crow = torch.searchsorted(row, torch.arange(nodes + 1, device=row.device)).int()
        matrix = torch.sparse_csr_tensor(crow, col.int(), values, (nodes, nodes), check_invariants=False)
        operand = _leaf(dense, kind)
        return Work(lambda: torch.sparse.mm(matrix, operand), (operand,))

    def index_add(wanted: torch.dtype) -> Work:
        operand, scale = _leaf(dense, wanted), values.to(wanted)[:, None]

        def product() -> Tensor:
            return operand.new_zeros(nodes, n).index_add(0, row, scale * operand.index_select(0, col))

        return Work(product, (operand,))

    width = n * dense.element_size()
    moved = coo.nnz * (values.element_size() + 4) + 4 * nodes + 2 * nodes * width
    floor = Floor(bytes=moved, flops=2 * coo.nnz * n, gathered=coo.nnz * width, row=width, table=nodes * width)
    return Problem(
        providers={
            "insum_nn": lambda: ours(lambda: GroupCOO.from_coo(coo)),
            "insum_nn/coo": lambda: ours(lambda: coo),
            "torch_csr": csr,
            "torch_index_add": lambda: index_add(kind),
        },
        oracle=lambda: index_add(torch.float64),
        tolerance=TOLERANCE[kind],
        tolerances={"torch_csr": LOOSE[kind], "torch_index_add": LOOSE[kind]},
        floors={"fwd": floor},
        modes=("fwd", "fwdbwd"),
    )


@case(
    "block_spmm",
    tests=TESTS,
    block=(32, 64, 128),
    sparsity=(0.5, 0.8, 0.9, 0.95, 0.99),
    dtype=("float16", "float32"),
    quick={"dtype": ("float16",)},
)
def block_spmm(setting: Setting, *, block: int, sparsity: float, dtype: str) -> Problem:
    """A 4096 x 4096 matrix of square blocks at random places times 4096 columns."""
    kind = getattr(torch, dtype)
    grid, columns = (5, 48) if setting.tiny else (4096 // block, 4096)
    size = grid * block
    generator = setting.generator()
    stored = max(1, round((1 - sparsity) * grid * grid))
    mask = torch.zeros(grid * grid, dtype=torch.bool, device=setting.device)
    mask[torch.randperm(grid * grid, generator=generator, device=setting.device)[:stored]] = True
    mask = mask.reshape(grid, grid)
    matrix = torch.randn(size, size, generator=generator, device=setting.device).to(kind)
    matrix = matrix * mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    dense = torch.randn(size, columns, generator=generator, device=setting.device).to(kind)
    blocks = BlockCOO.from_dense(matrix, block_shape=(block, block), mask=mask)

    def ours(build: Callable[[], SparseFormat]) -> Work:
        sparse = build()
        return Work(lambda: spmm(sparse, dense))

    def bsr() -> Work:
        if setting.device.type == "cpu" and kind == torch.float16:
            raise Unavailable("torch multiplies sparse halves on a GPU only")
        sparse = blocks.to_torch(torch.sparse_bsr)
        return Work(lambda: sparse @ dense)

    def exact() -> Work:
        left, right = matrix.double(), dense.double()
        return Work(lambda: left @ right)

    cell, count = matrix.element_size(), stored * block * block
    floor = Floor(
        bytes=cell * (count + 2 * size * columns),
        flops=2 * count * columns,
        gathered=cell * stored * block * columns,
        row=cell * columns,
        table=cell * size * columns,
    )
    return Problem(
        providers={
            "insum_nn": lambda: ours(lambda: BlockGroupCOO.from_coo(blocks)),
            "insum_nn/block": lambda: ours(lambda: blocks),
            "torch_dense": lambda: Work(lambda: matrix @ dense),
            "torch_bsr": bsr,
        },
        oracle=exact,
        tolerance=TOLERANCE[kind],
        tolerances={"torch_bsr": LOOSE[kind]},
        floors={"fwd": floor},
    )
