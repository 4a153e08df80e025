"""Representations whose entries have their components before their copies (`layout="ir_mul"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

from insum_nn.ops.tensor_product import TensorProductSpec, tensor_product, tensor_product_right
from insum_nn.structure.irreps import Entry, dimension
from tests.layers.equivariant.tensor_product_cases import assert_same_derivatives, one_mode, random_case
from tests.ops.test_tensor_product import conv_oracle_of, edges_of, inputs_of, oracle_of, spec_of
from tests.ops.test_tensor_product_roles import gpu_statements

__all__ = ["gpu_statements"]

CASES = [
    one_mode("uvu", True),
    one_mode("uvw", True, 4, 1, 16),
    one_mode("u<vw", True, lmax=1),
    *map(random_case, (1, 4)),
]


def columns(entries: Sequence[Entry]) -> Tensor:
    """Where the numbers of a representation with copies first are in one with components first."""
    found: list[Tensor] = []
    start = 0
    for mul, l, _ in entries:
        size = mul * (2 * l + 1)
        found.append(start + torch.arange(size).reshape(2 * l + 1, mul).T.reshape(-1))
        start += size
    return torch.cat(found)


def assert_alike(spec: TensorProductSpec, *, convolution: bool) -> None:
    other = replace(spec, layout="ir_mul", convolution=convolution)
    assert TensorProductSpec.from_json(other.to_json()) == other
    edges = edges_of(6, 9, sort=False) if convolution else ()
    oracle = conv_oracle_of(spec, *edges) if convolution else oracle_of(spec)
    x_at, y_at, z_at = columns(spec.in1), columns(spec.in2), columns(spec.out).argsort()
    assert_same_derivatives(
        lambda x, y, w: tensor_product(other, x, y, w, *edges),
        lambda x, y, w: oracle(x[:, x_at], y[:, y_at], w)[:, z_at],
        inputs_of(spec, 9, 6 if convolution else None),
    )


@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_components_first(case, convolution: bool):
    assert_alike(spec_of(case, shared=False), convolution=convolution)


@pytest.mark.usefixtures("gpu_statements")
@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_components_first_by_the_statements_of_a_gpu(case, convolution: bool):
    assert_alike(spec_of(case, shared=True), convolution=convolution)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_components_first_of_what_waits_for_the_first_input(case):
    spec = replace(spec_of(case, shared=False), layout="ir_mul")
    x, y, w = inputs_of(spec, 4)
    whole = tensor_product_right(spec, y, w)
    assert whole.shape == (4, dimension(spec.in1), dimension(spec.out))
    torch.testing.assert_close(torch.einsum("zi,zik->zk", x, whole), tensor_product(spec, x, y, w))
