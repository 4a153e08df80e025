"""Our operators on a CPU against the torch calls that one would write by hand.

Structures are built before the clock starts, ours and theirs; values change at every step of a training loop, so what
is made from values (torch's CSR tensor) is inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.registry import Floor, Problem, Setting, Work, case
from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops import sddmm, spmm

__all__ = ["cpu_block_spmm", "cpu_sddmm", "cpu_spmm"]


def random_matrix(setting: Setting, rows: int, cols: int, nnz: int) -> COO:
    """About `nnz` entries at uniform places."""
    generator = setting.generator()
    places = torch.randint(rows * cols, (nnz,), generator=generator, device=setting.device).unique()
    values = torch.randn(places.numel(), generator=generator, device=setting.device)
    return COO.from_coo((places // cols, places % cols), values, (rows, cols))


def _leaves(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(t.detach().to(dtype, copy=True).requires_grad_() for t in tensors)


def _in_order(matrix: SparseFormat) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """The gradient of stored values, as one per entry in lexicographic order; others as they are."""

    def gradients(found: Sequence[Tensor]) -> Sequence[Tensor]:
        return [matrix.with_values(found[0]).to_coo().values, *found[1:]]

    return gradients


@case("cpu_spmm", tests=("tests/ops/test_spmm.py",), devices=("cpu",), n=(1, 16, 128))
def cpu_spmm(setting: Setting, *, n: int) -> Problem:
    """A sparse matrix of 20,000 rows and 200,000 entries times a dense one."""
    size, nnz = (50, 300) if setting.tiny else (20_000, 200_000)
    coo = random_matrix(setting, size, size, nnz)
    dense = torch.randn(size, n, generator=setting.generator())
    row, col = coo.row.long(), coo.col.long()
    crow = torch.searchsorted(row, torch.arange(size + 1))

    def ours(matrix: SparseFormat) -> Work:
        values, operand = _leaves(matrix.values, dense)
        return Work(lambda: spmm(matrix.with_values(values), operand), (values, operand), _in_order(matrix))

    def csr() -> Work:
        values, operand = _leaves(coo.values, dense)

        def product() -> Tensor:
            return torch.sparse_csr_tensor(crow, col, values, (size, size), check_invariants=False) @ operand

        return Work(product, (values, operand))

    def index_add(dtype: torch.dtype = torch.float32) -> Work:
        values, operand = _leaves(coo.values, dense, dtype=dtype)

        def product() -> Tensor:
            return operand.new_zeros(size, n).index_add(0, row, values[:, None] * operand.index_select(0, col))

        return Work(product, (values, operand))

    return Problem(
        providers={
            "insum_nn/coo": lambda: ours(coo),
            "insum_nn/group": lambda: ours(GroupCOO.from_coo(coo)),
            "insum_nn/ell": lambda: ours(ELL.from_coo(coo)),
            "torch_csr": csr,
            "torch_index_add": index_add,
        },
        oracle=lambda: index_add(torch.float64),
        # Sums of ten terms or so, and gradients of n terms, in float32.
        tolerance=1e-5,
        floors={"fwd": Floor(bytes=coo.nbytes + 8 * size * n, flops=2 * coo.nnz * n)},
        modes=("fwd", "fwdbwd"),
    )


@case("cpu_sddmm", tests=("tests/ops/test_sddmm.py",), devices=("cpu",), k=(16, 128))
def cpu_sddmm(setting: Setting, *, k: int) -> Problem:
    """A dense product of inner extent k, at 200,000 entries of a 20,000 x 20,000 matrix."""
    size, nnz = (50, 300) if setting.tiny else (20_000, 200_000)
    coo = random_matrix(setting, size, size, nnz)
    generator = setting.generator()
    a, key = torch.randn(size, k, generator=generator), torch.randn(size, k, generator=generator)
    row, col = coo.row.long(), coo.col.long()
    crow = torch.searchsorted(row, torch.arange(size + 1))

    def ours(pattern: SparseFormat) -> Work:
        values, left, right = _leaves(pattern.values, a, key)
        used = torch.ones_like(pattern.values, dtype=torch.bool)
        for part in pattern.index_parts:
            if part.padded:
                used &= part.tensor >= 0
        slots = used.reshape(-1).nonzero().squeeze(1)

        def product() -> Tensor:
            # The gate compares entries; picking them costs the padded formats a copy that their users do not need.
            found = sddmm(pattern.with_values(values), left, right.T).values
            return found if slots.numel() == found.numel() else found.reshape(-1).index_select(0, slots)

        return Work(product, (values, left, right), _in_order(pattern))

    def by_hand(dtype: torch.dtype = torch.float32) -> Work:
        values, left, right = _leaves(coo.values, a, key, dtype=dtype)

        def product() -> Tensor:
            return values * (left.index_select(0, row) * right.index_select(0, col)).sum(1)

        return Work(product, (values, left, right))

    def sampled() -> Work:
        pattern = torch.sparse_csr_tensor(crow, col, coo.values, (size, size), check_invariants=False)
        left, right = a.clone(), key.clone()

        def product() -> Tensor:
            return coo.values * torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()

        return Work(product)

    return Problem(
        providers={
            "insum_nn/coo": lambda: ours(coo),
            "insum_nn/group": lambda: ours(GroupCOO.from_coo(coo)),
            "insum_nn/ell": lambda: ours(ELL.from_coo(coo)),
            "torch_gather": by_hand,
            "torch_sampled_addmm": sampled,
        },
        oracle=lambda: by_hand(torch.float64),
        # Sums of k terms in float32.
        tolerance=1e-5,
        floors={"fwd": Floor(bytes=coo.nbytes + 8 * size * k, flops=2 * coo.nnz * k)},
        modes=("fwd", "fwdbwd"),
    )


@case("cpu_block_spmm", tests=("tests/ops/test_spmm.py",), devices=("cpu",), block=(8, 32))
def cpu_block_spmm(setting: Setting, *, block: int) -> Problem:
    """A 1024 x 1024 matrix of square blocks, 90 % of them zero, times 256 columns."""
    grid, n = (4, 24) if setting.tiny else (1024 // block, 256)
    size = grid * block
    generator = setting.generator()
    mask = torch.rand(grid, grid, generator=generator) < 0.1
    mask[0, 0] = True
    matrix = torch.randn(size, size, generator=generator)
    matrix = matrix * mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    dense = torch.randn(size, n, generator=generator)
    blocks = BlockCOO.from_dense(matrix, block_shape=(block, block), mask=mask)
    row, col = blocks.row.long(), blocks.col.long()
    crow = torch.searchsorted(row, torch.arange(grid + 1))

    def ours(own: BlockCOO | BlockGroupCOO) -> Work:
        values, operand = _leaves(own.values, dense)

        def gradients(found: Sequence[Tensor]) -> Sequence[Tensor]:
            return [own.with_values(found[0]).blocks().values, *found[1:]]

        return Work(lambda: spmm(own.with_values(values), operand), (values, operand), gradients)

    def by_hand(dtype: torch.dtype = torch.float32) -> Work:
        values, operand = _leaves(blocks.values, dense, dtype=dtype)

        def product() -> Tensor:
            gathered = operand.reshape(grid, block, n).index_select(0, col)
            return operand.new_zeros(grid, block, n).index_add(0, row, torch.bmm(values, gathered)).reshape(size, n)

        return Work(product, (values, operand))

    def bsr() -> Work:
        values, operand = blocks.values.clone(), dense.clone()
        return Work(lambda: torch.sparse_bsr_tensor(crow, col, values, (size, size), check_invariants=False) @ operand)

    return Problem(
        providers={
            "insum_nn/block": lambda: ours(blocks),
            "insum_nn/block_group": lambda: ours(BlockGroupCOO.from_coo(blocks)),
            "torch_bmm": by_hand,
            "torch_bsr": bsr,
        },
        oracle=lambda: by_hand(torch.float64),
        # Sums of about 100 terms in float32.
        tolerance=1e-5,
        floors={"fwd": Floor(bytes=blocks.nbytes + 8 * size * n, flops=2 * blocks.values.numel() * n)},
        modes=("fwd", "fwdbwd"),
    )
