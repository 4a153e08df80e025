"""Gradients that a backward pass was not asked for are not computed, though their tensors could have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.compiler.runtime import autograd, backward, needed_gradients
from insum_nn.ops.sparse_conv import sparse_conv
from insum_nn.structure.kernel_map import build_kernel_map
from tests.ops.conv_oracle import geometry, random_sites
from tests.ops.test_sparse_conv_table import EAGER, operands, ran

__all__ = ["ran"]

SPMM = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]")


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_of_a_statement(initial: bool, recorded: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needed_gradients, "_by_name", {})
    found: list[int] = []

    def gradients(*given: Any) -> tuple[list[Tensor | None], Tensor]:
        made, of_initial = backward.gradients(*given)
        found.extend(place for place, each in enumerate(made) if each is not None)
        return made, of_initial

    monkeypatch.setattr(autograd, "gradients", gradients)
    row, col = torch.tensor([0, 0, 1]), torch.tensor([1, 0, 2])
    values, place = torch.randn(3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)

    def sum_of(dense: Tensor) -> Tensor:
        given = {"Row": row, "Col": col, "Val": values, "B": dense} | ({"C": bias} if initial else {})
        return SPMM(tensors=given, out_shape=(2, 4)).square().sum()

    names = SPMM.spec.layout.tensors
    for requested, leaf in (("B", place), ("Val", values)):
        whole = torch.autograd.grad(sum_of(place * 2), [values, place, bias] if initial else [values, place])
        found.clear()
        needed_gradients._by_name.clear()
        (alone,) = torch.autograd.grad(sum_of(place * 2), leaf, create_graph=recorded)
        assert {names[position] for position in found} == {requested}
        torch.testing.assert_close(alone, whole[0 if requested == "Val" else 1])


def test_of_a_convolution(ran: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needed_gradients, "_by_name", {})
    near = build_kernel_map(random_sites((5, 6), 1, 12), geometry("subm", (3, 3)))
    features, weight, bias = (each.requires_grad_() for each in operands(near.inputs, near.geometry, 1))
    total = sparse_conv(features * 1, weight, near, bias, options=EAGER).square().sum()
    ran.clear()
    torch.autograd.grad(total, features)
    assert [statement.split("[")[0] for statement in ran] == ["dIn"]
