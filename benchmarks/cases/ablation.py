"""Insum's ablation: the effect of each step from COO to a fused kernel, block-sparse and unstructured.

Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 6.6 and figure 13: a 4096 x 4096 matrix, 90 % of
its 32 x 32 blocks zero, times a 4096 x 4096 dense matrix. The steps, each on top of the one before:

    insum_nn/coo            C[Row[p],n] += Val[p] * B[Col[p],n]
    insum_nn/group          C[Row[g],n] += Val[g,q] * B[Col[g,q],n]                groups of 16
    insum_nn/block_group    C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]        blocks of 32 x 32, groups of 4

`insum_nn` alone is what a user gets: the group size by the rule. Each statement is one generated kernel, so that the
figure's last steps, which fuse what Inductor made of the statement, have no bar of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.registry import Floor, Problem, Setting, Unavailable, Work, case
from insum_nn.formats import COO, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat
from insum_nn.ops import spmm

__all__ = ["ablation_block_spmm", "ablation_spmm"]

TESTS = ("tests/ops/test_spmm.py",)

# Relative to the largest element. Halves: one rounding of the result (4.9e-4) and, where a block product leaves the
# kernel that sums it, one of each partial sum. float32: sums of a few hundred terms.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.float32: 1e-5}


def _problem(
    setting: Setting,
    matrix: torch.Tensor,
    columns: int,
    stored: int,
    formats: dict[str, Callable[[], SparseFormat]],
    baseline: tuple[str, Callable[[], torch.Tensor]],
) -> Problem:
    """One matrix in several formats against a dense product and one of torch's sparse layouts."""
    rows, cols = matrix.shape
    dense = torch.randn(cols, columns, generator=setting.generator(), device=setting.device).to(matrix.dtype)

    def ours(build: Callable[[], SparseFormat]) -> Work:
        sparse = build()
        return Work(lambda: spmm(sparse, dense))

    def theirs() -> Work:
        if setting.device.type == "cpu" and matrix.dtype == torch.float16:
            raise Unavailable("torch multiplies sparse halves on a GPU only")
        sparse = baseline[1]()
        return Work(lambda: sparse @ dense)

    def exact() -> Work:
        left, right = matrix.double(), dense.double()
        return Work(lambda: left @ right)

    size = matrix.element_size()
    providers = {name: (lambda b=build: ours(b)) for name, build in formats.items()}
    return Problem(
        providers={**providers, "torch_dense": lambda: Work(lambda: matrix @ dense), baseline[0]: theirs},
        oracle=exact,
        tolerance=TOLERANCE[matrix.dtype],
        floors={"fwd": Floor(bytes=size * (stored + (rows + cols) * columns), flops=2 * stored * columns)},
    )


@case("ablation_block_spmm", tests=TESTS, sparsity=(0.5, 0.8, 0.9, 0.95, 0.99), dtype=("float16", "float32"))
def ablation_block_spmm(setting: Setting, *, sparsity: float, dtype: str) -> Problem:
    """4096 x 4096 of 32 x 32 blocks, times 4096 columns: COO, + group, + block; dense and BSR."""
    grid, block, columns = (5, 32, 48) if setting.tiny else (128, 32, 4096)
    kind = getattr(torch, dtype)
    generator = setting.generator()
    stored = max(1, round((1 - sparsity) * grid * grid))
    mask = torch.zeros(grid * grid, dtype=torch.bool, device=setting.device)
    mask[torch.randperm(grid * grid, generator=generator, device=setting.device)[:stored]] = True
    mask = mask.reshape(grid, grid)
    size = grid * block
    matrix = torch.randn(size, size, generator=generator, device=setting.device).to(kind)
    matrix = matrix * mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    shape = (block, block)

    def blocks(group_size: int) -> SparseFormat:
        return BlockGroupCOO.from_dense(matrix, block_shape=shape, group_size=group_size, mask=mask)

    formats: dict[str, Callable[[], SparseFormat]] = {
        "insum_nn/block_group": lambda: blocks(4),
        "insum_nn": lambda: BlockGroupCOO.from_dense(matrix, block_shape=shape, mask=mask),
    }
    # A multiply and an atomic addition per scalar entry and column: minutes rather than milliseconds below 90 %.
    if sparsity >= 0.9 or setting.tiny:
        scalar: dict[str, Callable[[], SparseFormat]] = {
            "insum_nn/coo": lambda: COO.from_dense(matrix),
            "insum_nn/group": lambda: GroupCOO.from_dense(matrix, group_size=16),
        }
        formats = {**scalar, **formats}
    baseline = (
        "torch_bsr",
        lambda: BlockCOO.from_dense(matrix, block_shape=shape, mask=mask).to_torch(torch.sparse_bsr),
    )
    return _problem(setting, matrix, columns, stored * block * block, formats, baseline)


@case("ablation_spmm", tests=TESTS, sparsity=(0.9, 0.99, 0.999), columns=(128,), dtype=("float16", "float32"))
def ablation_spmm(setting: Setting, *, sparsity: float, columns: int, dtype: str) -> Problem:
    """4096 x 4096 with entries at random places, times a dense matrix: COO, + group, by rule; dense and CSR."""
    size = 70 if setting.tiny else 4096
    kind = getattr(torch, dtype)
    generator = setting.generator()
    mask = torch.rand(size, size, generator=generator, device=setting.device) >= sparsity
    mask[0, 0] = True
    matrix = torch.randn(size, size, generator=generator, device=setting.device).to(kind) * mask
    formats: dict[str, Callable[[], SparseFormat]] = {
        "insum_nn/coo": lambda: COO.from_dense(matrix, mask=mask),
        "insum_nn/group": lambda: GroupCOO.from_dense(matrix, group_size=16, mask=mask),
        "insum_nn": lambda: GroupCOO.from_dense(matrix, mask=mask),
    }
    baseline = ("torch_csr", lambda: COO.from_dense(matrix, mask=mask).to_torch(torch.sparse_csr))
    return _problem(setting, matrix, columns, int(mask.sum()), formats, baseline)
