"""Layers with pruned weights, compared with dense ones and with torch's block-sparse products.

On the CPU 1024 x 1024 weights and 256 rows; on a GPU 4096 x 4096 and 4096 rows. Structures are built before the clock
starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.registry import Floor, Problem, Setting, Unavailable, Work, case
from insum_nn.formats import GroupSize
from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear
from insum_nn.layers.pruned.pruned_conv import PrunedConv2d
from insum_nn.structure.pruning import filter_mask

__all__ = ["block_linear", "cpu_block_linear", "pruned_conv2d"]

# Relative to the largest element, of sums of at most 4096 terms in float32. fp16 and bf16: one rounding of the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def _leaves(*tensors: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(t.detach().to(dtype, copy=True).requires_grad_() for t in tensors)


@case(
    "block_linear",
    tests=("tests/ops/test_block_linear.py",),
    block=(16, 32, 64, 128),
    density=(0.05, 0.1, 0.25, 0.5),
    dtype=("float16", "bfloat16", "float32"),
    quick={"block": (32, 64), "density": (0.1, 0.5), "dtype": ("float16",)},
)
def block_linear(setting: Setting, *, block: int, density: float, dtype: str) -> Problem:
    """A linear layer whose weight keeps a share of its square blocks, at random places."""
    return _block_linear(setting, block, density, getattr(torch, dtype))


@case(
    "cpu_block_linear",
    tests=("tests/ops/test_block_linear.py",),
    devices=("cpu",),
    block=(16, 32, 64, 128),
    density=(0.05, 0.1, 0.25, 0.5),
)
def cpu_block_linear(setting: Setting, *, block: int, density: float) -> Problem:
    """The same on a CPU, in float32."""
    return _block_linear(setting, block, density, torch.float32)


def _block_linear(setting: Setting, block: int, density: float, dtype: torch.dtype) -> Problem:
    gpu = setting.device.type == "cuda"
    size, n = (4 * block, 12) if setting.tiny else (4096, 4096) if gpu else (1024, 256)
    generator = setting.generator()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        layer = BlockSparseLinear(
            size, size, False, block_shape=block, density=density, device=setting.device, dtype=dtype
        )
    x = torch.randn(n, size, generator=generator, device=setting.device).to(dtype)
    weight = torch.randn(layer.weight.shape, generator=generator, device=setting.device).to(dtype)
    matrix = layer.matrix
    row, col = matrix.row.long(), matrix.col.long()
    grid = size // block

    def blocks_of(dense: Tensor) -> Tensor:
        return dense.reshape(grid, block, grid, block).transpose(1, 2)[row, col]

    def ours(group_size: GroupSize) -> Work:
        own = BlockSparseLinear(
            *(size, size, False),
            block_shape=block,
            mask=layer.mask,
            group_size=group_size,
            device=setting.device,
            dtype=dtype,
        )
        with torch.no_grad():
            own.weight.copy_(weight)
        (inputs,) = _leaves(x, dtype=dtype)
        return Work(lambda: own(inputs), (own.weight, inputs))

    def dense() -> Work:
        whole, inputs = _leaves(matrix.with_values(weight).to_dense(), x, dtype=dtype)
        return Work(lambda: functional.linear(inputs, whole), (whole, inputs), lambda g: (blocks_of(g[0]), g[1]))

    def oracle() -> Work:
        values, inputs = _leaves(weight, x, dtype=torch.float64)
        return Work(lambda: functional.linear(inputs, matrix.with_values(values).to_dense()), (values, inputs))

    def by_hand() -> Work:
        values, inputs = _leaves(weight, x, dtype=dtype)

        def product() -> Tensor:
            gathered = inputs.reshape(n, grid, block).index_select(1, col).transpose(0, 1)
            found = torch.bmm(gathered, values.transpose(1, 2))
            total = inputs.new_zeros(grid, n, block, dtype=torch.float32).index_add(0, row, found.float())
            return total.to(dtype).transpose(0, 1).reshape(n, size)

        return Work(product, (values, inputs))

    def bsr(transposed: bool) -> Work:
        if not gpu and dtype != torch.float32:
            raise Unavailable("torch multiplies sparse halves on a GPU only")
        if not transposed and gpu:
            raise Unavailable("torch.nn.functional.linear with a BSR weight is timed on the CPU")
        own = matrix.with_values(weight).to_torch(torch.sparse_bsr)
        inputs = x.clone()
        # torch's BSR product takes the dense operand on the right; `linear` transposes it, and is slower.
        if transposed:
            return Work(lambda: (own @ inputs.T).T)
        return Work(lambda: functional.linear(inputs, own))

    return Problem(
        providers={
            "insum_nn": lambda: ours("auto"),
            "insum_nn/group4": lambda: ours(4),
            "torch_dense": dense,
            "torch_bmm": by_hand,
            "torch_bsr": lambda: bsr(True),
            "torch_bsr_linear": lambda: bsr(False),
        },
        oracle=oracle,
        tolerance=TOLERANCE[dtype],
        floors={
            "fwd": Floor(
                bytes=weight.numel() * weight.element_size() + 2 * x.numel() * x.element_size(),
                flops=2 * weight.numel() * n,
            )
        },
        modes=("fwd", "fwdbwd"),
    )


@case(
    "pruned_conv2d",
    tests=("tests/layers/pruned/test_pruned_conv.py",),
    channels=(64, 256),
    pattern=("MCRS", "MC"),
    density=(0.01, 0.05, 0.2),
)
def pruned_conv2d(
    setting: Setting, *, channels: int, pattern: str, density: float, side: int = 0, images: int = 2
) -> Problem:
    """A 3 x 3 convolution whose filters are pruned, by default on two images of 28 x 28 or 14 x 14."""
    side = 6 if setting.tiny else side or (28 if channels <= 64 else 14)
    channels = 8 if setting.tiny else channels
    generator = setting.generator()
    weight = torch.randn(channels, channels, 3, 3, generator=generator, device=setting.device)
    mask = filter_mask(weight, density, pattern)
    x = torch.randn(images, channels, side, side, generator=generator, device=setting.device)

    def ours() -> Work:
        layer = PrunedConv2d(channels, channels, 3, padding=1, bias=False, mask=mask, device=setting.device)
        with torch.no_grad():
            layer.weight.copy_(weight[mask])
        (inputs,) = _leaves(x, dtype=torch.float32)
        return Work(lambda: layer(inputs), (layer.weight, inputs))

    def dense() -> Work:
        own, inputs = _leaves(weight * mask, x, dtype=torch.float32)

        def gradients(found: Sequence[Tensor]) -> Sequence[Tensor]:
            return [found[0][mask], found[1]]

        return Work(lambda: functional.conv2d(inputs, own, padding=1), (own, inputs), gradients)

    def oracle() -> Work:
        values, inputs = _leaves(weight[mask], x, dtype=torch.float64)

        def product() -> Tensor:
            own = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_scatter(mask, values)
            return functional.conv2d(inputs, own, padding=1)

        return Work(product, (values, inputs))

    return Problem(
        providers={"insum_nn": ours, "torch_dense": dense},
        oracle=oracle,
        # Sums of at most 2304 terms; on a GPU the dense convolution may round its factors to tf32.
        tolerance=1e-5,
        tolerances={"torch_dense": 2e-3} if setting.device.type == "cuda" else {},
        floors={"fwd": Floor(flops=2 * int(mask.sum()) * images * side * side)},
        modes=("fwd", "fwdbwd"),
    )
