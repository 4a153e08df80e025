"""Sums of columns against float64, and their derivatives."""

from __future__ import annotations

import pytest
import torch

from insum_nn.compiler.runtime.library.column_sums import column_sums


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (0, 4), (7, 0)], ids=str)
def test_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(column_sums(matrix), matrix.sum(0))


def test_derivatives():
    matrix = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda m: column_sums(m * m), matrix)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_long_matrices_on_a_gpu(dtype):
    close = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for shape in ((300_001, 33), (300_001, 15), (600_007, 33)):
        matrix = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        wanted = matrix.double().sum(0)
        for found in (column_sums(matrix), column_sums(matrix.detach())):
            assert found.dtype == dtype
            assert (found.double() - wanted).abs().max() <= close * matrix.double().abs().sum(0).max() ** 0.5 * 30
        found = column_sums(matrix)
        sent = torch.randn_like(found)
        (back,) = torch.autograd.grad(found, matrix, sent)
        assert torch.equal(back, sent.expand_as(matrix))
