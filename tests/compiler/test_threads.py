"""What `Options(deterministic=True)` promises of numbers of threads on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options

FIXED = Options(deterministic=True)
ENTRIES, ROWS = 20000, 300


def results(text: str, tensors: dict[str, Tensor], shape: tuple[int | None, ...] | None, count: int) -> list[Tensor]:
    """The output and all gradients, from a fresh start with so many threads."""
    torch.set_num_threads(count)
    insum_nn.clear_cache()
    leaves = {n: t.detach().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    out = insum_nn.compile(text, options=FIXED)(tensors=leaves, out_shape=shape)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [t for t in leaves.values() if t.requires_grad])]


def entries(*names: str) -> dict[str, Tensor]:
    return {name: torch.randint(0, ROWS, (ENTRIES,)) for name in names}


@pytest.mark.parametrize(
    ("text", "shape", "values"),
    [
        ("C[Row[p],n] += Val[p] * B[Col[p],n]", (ROWS, None), {"Val": (ENTRIES,), "B": (ROWS, 40)}),
        ("C[Row[p],n] += X[p,n]", (ROWS, None), {"X": (ENTRIES, 40)}),
        ("C[Row[p],Col[p]] += Val[p]", (ROWS, ROWS), {"Val": (ENTRIES,)}),
        ("V[p] += A[Row[p],k] * B[Col[p],k]", None, {"A": (ROWS, 40), "B": (ROWS, 40)}),
    ],
)
def test_sums_over_entries_are_the_same_bits(text: str, shape: tuple[int | None, ...] | None, values: dict):
    names = {name for name in ("Row", "Col") if name in text}
    tensors = {**entries(*sorted(names)), **{name: torch.randn(extents) for name, extents in values.items()}}
    first = results(text, tensors, shape, 1)
    for count in (2, 3, 8):
        for got, want in zip(results(text, tensors, shape, count), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("C[m,n] += A[m,k] * B[k,n]", {"A": (150, 3000), "B": (3000, 150)}),
        ("C[n] += A[m,n] * B[m]", {"A": (30000, 7), "B": (30000,)}),
        ("C[j] += A[m] * B[m] * D[j]", {"A": (100000,), "B": (100000,), "D": (2,)}),
    ],
)
def test_dense_sums_stay_within_their_rounding(text: str, values: dict):
    tensors = {name: torch.randn(extents) for name, extents in values.items()}
    most = next(extents for name, extents in values.items() if name == "B")[0]
    (first, *_), absolute = results(text, tensors, None, 1), {name: t.double().abs() for name, t in tensors.items()}
    bound = 2 * most * torch.finfo(torch.float32).eps * results(text, absolute, None, 1)[0]
    for count in (2, 3, 8):
        assert ((results(text, tensors, None, count)[0] - first).abs() <= bound).all()
