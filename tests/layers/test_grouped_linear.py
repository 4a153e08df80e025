"""`GroupedLinear` against dense sums in float64: values, gradients of every tensor, missing groups, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_nn.errors import InsumDtypeError, InsumError, InsumRangeError, InsumShapeError
from insum_nn.layers import GroupedLinear
from insum_nn.testing.tolerances import assert_matches

ROWS, SEVERAL = 7, 3
# Shapes of the groups, whether results are added up with weights, whether each group has an input of its own.
FORMS = [
    pytest.param((ROWS,), False, False, id="one"),
    pytest.param((ROWS, SEVERAL), False, False, id="several"),
    pytest.param((ROWS, SEVERAL), False, True, id="several, own inputs"),
    pytest.param((ROWS, SEVERAL), True, False, id="weighted"),
    pytest.param((ROWS, SEVERAL), True, True, id="weighted, own inputs"),
    pytest.param((0, SEVERAL), True, False, id="no rows"),
]


def expected(x: Tensor, group: Tensor, weight: Tensor | None, matrices: Tensor, bias: Tensor | None) -> Tensor:
    """The same by one product for each row and group; a group of -1 adds nothing."""
    wide = group if group.ndim > 1 else group[:, None]
    there = (wide >= 0).to(x.dtype)[..., None]
    rows = x if x.ndim > 2 else x[:, None].expand(*wide.shape, -1)
    found = (rows[:, :, None] @ matrices[wide.clamp(min=0)]).squeeze(2)
    found = (found if bias is None else found + bias[wide.clamp(min=0)]) * there
    return found.mul(weight[..., None]).sum(1) if weight is not None else found if group.ndim > 1 else found[:, 0]


@pytest.mark.parametrize(("shape", "weighted", "own"), FORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_dense(
    shape: tuple[int, ...], weighted: bool, own: bool, bias: bool, dtype: torch.dtype, device: torch.device
):
    layer = GroupedLinear(5, 6, 4, bias, device=device, dtype=dtype)
    group = torch.randint(-1, 5, shape, device=device)
    x = torch.randn(*(shape if own else shape[:1]), 12, device=device, dtype=dtype)[..., ::2].requires_grad_()
    gates = torch.rand(shape, device=device, dtype=dtype).requires_grad_() if weighted else None
    leaves = [x, *layer.parameters(), *([] if gates is None else [gates])]
    result = layer(x, group, gates)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = expected(wide[0], group, wide[-1] if weighted else None, wide[1], wide[2] if bias else None)
    assert_matches(result, reference, dtype=dtype, kind="sum")
    back = torch.randn_like(reference).to(dtype)
    found = torch.autograd.grad(result, leaves, back)
    for got, wanted in zip(found, torch.autograd.grad(reference, wide, back.double()), strict=True):
        assert_matches(got, wanted, dtype=dtype, kind="gradient")


def test_takes_over_dense_layers():
    linears = [nn.Linear(3, 2) for _ in range(4)]
    layer, x = GroupedLinear.from_linears(linears), torch.randn(4, 3)
    for row, result in enumerate(layer(x, torch.tensor([2, 0, 3, 3]))):
        torch.testing.assert_close(result, linears[[2, 0, 3, 3][row]](x[row]))
    assert GroupedLinear.from_linears([nn.Linear(3, 2, bias=False)]).bias is None
    with pytest.raises(InsumShapeError, match="alike"):
        GroupedLinear.from_linears([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)])
    with pytest.raises(InsumShapeError, match="alike"):
        GroupedLinear.from_linears([])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)), InsumShapeError),
        ((torch.randn(5, 3), torch.zeros(4, dtype=torch.int64)), InsumShapeError),
        ((torch.randn(5, 3), torch.full((5,), 2)), InsumRangeError),
        ((torch.randn(5, 3), torch.zeros(5)), InsumDtypeError),
        ((torch.randn(5, 3), torch.zeros(5, 2, dtype=torch.int64), torch.randn(5, 3)), InsumShapeError),
    ],
)
def test_bad_input(given: tuple[Any, ...], error: type[InsumError]):
    with pytest.raises(error):
        GroupedLinear(2, 3, 2)(*given)


def test_bad_sizes_and_repr():
    with pytest.raises(InsumShapeError, match="num_groups"):
        GroupedLinear(-1, 3, 2)
    assert repr(GroupedLinear(2, 3, 4, bias=False)).splitlines() == [
        "GroupedLinear(num_groups=2, in_features=3, out_features=4, bias=False)",
        "  Y[t,o] += X[t,c] * W[E[t],c,o]",
        "  of several groups:",
        "    Y[t,k,o] += X[t,c] * W[E[t,k],c,o]",
        "  weighted:",
        "    Y[t,o] += G[t,k] * X[t,c] * W[E[t,k],c,o]",
    ]
