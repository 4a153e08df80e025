"""A graph convolution's product A X W on blocks of rows, as in GraphCUDA, against torch's CSR.

GraphCUDA (part 1) cuts the rows of A into blocks and stores, for each column with an entry in a block, that column of
the block: a `BlockGroupCOO` of blocks of `rows` x 1. Formats are built before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.registry import Floor, Problem, Setting, Unavailable, Work, case
from insum_nn.formats import COO, BlockGroupCOO
from insum_nn.ops import contract, spmm

__all__ = ["AXW", "row_block"]

AXW = "Y[Row[g],a,h] += Val[g,q,a,b] * X[Col[g,q],b,f] * W[f,h]"
"""The product as one statement."""

# name -> nodes, edges, features, hidden, entries of the first block of 16 rows; then the same for tests.
GRAPHS = {
    "cora": ((2_708, 10_556, 1_433, 16, 0), (60, 200, 40, 16, 0)),
    "citeseer": ((3_327, 9_104, 3_703, 16, 0), (60, 200, 40, 16, 0)),
    "random20k": ((20_000, 200_000, 64, 64, 0), (80, 500, 16, 16, 0)),
    # The post's edge case: one block with half of the entries.
    "uneven": ((2_708, 10_556, 1_433, 16, 5_278), (60, 200, 40, 16, 100)),
}
# Of the largest element: two sums in float32; of halves the rounding of what is between the two products, and of the
# result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


def matrix_of(setting: Setting, nodes: int, edges: int, first: int) -> COO:
    """Random entries at distinct places and the diagonal, as of a normalised graph; `first` of them in 16 rows."""
    generator = setting.generator()
    row, col = torch.randint(nodes, (2, edges), generator=generator, device=setting.device)
    row[:first] %= 16
    diagonal = torch.arange(nodes, device=setting.device)
    key = torch.cat([row * nodes + col, diagonal * (nodes + 1)]).unique()
    values = torch.rand(key.numel(), generator=generator, device=setting.device)
    return COO.from_coo((key // nodes, key % nodes), values, (nodes, nodes))


@case(
    "row_block",
    tests=("tests/ops/test_spmm.py", "tests/formats/test_every_format.py"),
    graph=tuple(GRAPHS),
    rows=(4, 16),
    dtype=("float16", "float32"),
    quick={"rows": (16,)},
)
def row_block(setting: Setting, *, graph: str, rows: int, dtype: str) -> Problem:
    """A X W with the sizes of Cora, CiteSeer and a larger graph, and with half of the entries in one block."""
    kind = getattr(torch, dtype)
    nodes, edges, features, hidden, first = GRAPHS[graph][setting.tiny]
    coo = matrix_of(setting, nodes, edges, first).to(kind)
    blocks = BlockGroupCOO.from_coo(coo, block_shape=(rows, 1))
    generator = setting.generator()
    x = torch.rand(nodes, features, generator=generator, device=setting.device).to(kind)
    weight = torch.randn(features, hidden, generator=generator, device=setting.device).to(kind) / features**0.5

    def work(product: Callable[[Tensor], Tensor], wanted: torch.dtype = kind) -> Work:
        leaf = weight.to(wanted, copy=True).requires_grad_()
        return Work(lambda: product(leaf), (leaf,))

    def one_statement(leaf: Tensor) -> Tensor:
        shape = (blocks.grid_shape[0], rows, hidden)
        return contract(AXW, blocks, X=x[:, None], W=leaf, out_shape=shape).flatten(0, 1)[:nodes]

    def csr() -> Work:
        if setting.device.type == "cpu" and kind == torch.float16:
            raise Unavailable("torch multiplies sparse halves on a GPU only")
        matrix = coo.to_torch(torch.sparse_csr)
        return work(lambda leaf: torch.sparse.mm(matrix, x @ leaf))

    exact = coo.to(torch.float64).to_dense()
    cell, entries = x.element_size(), coo.nnz
    moved = cell * (nodes * (features + hidden) + features * hidden + entries) + 4 * (entries + nodes)
    flops = 2 * nodes * features * hidden + 2 * entries * hidden
    return Problem(
        providers={
            "insum_nn": lambda: work(one_statement),
            "insum_nn/spmm": lambda: work(lambda leaf: spmm(blocks, x @ leaf)),
            "insum_nn/coo": lambda: work(lambda leaf: spmm(coo, x @ leaf)),
            "torch_csr": csr,
        },
        oracle=lambda: work(lambda leaf: exact @ (x.double() @ leaf), torch.float64),
        tolerance=TOLERANCE[kind],
        floors={"fwd": Floor(bytes=moved, flops=flops)},
        modes=("fwd", "fwdbwd"),
    )
