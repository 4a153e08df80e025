"""`SparseLinear` beside `nn.Linear`: numbers, masks of other packages, training, state, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from insum_nn.errors import InsumFormatError, InsumShapeError
from insum_nn.formats import COO
from insum_nn.layers import BlockSparseLinear, SparseLinear
from insum_nn.testing.tolerances import assert_matches
from tests.ops.oracle import strided


def make(k: int = 13, m: int = 7, *, density: float = 0.3, dtype=torch.float64, **more: Any) -> SparseLinear:
    return SparseLinear(k, m, density=density, dtype=dtype, **more)


def assert_as_dense(layer: SparseLinear, x: Tensor) -> None:
    """Output and gradients equal those of a dense product in float64, on the stored weights."""
    dtype, bias = layer.weight.dtype, [] if layer.bias is None else [layer.bias]
    own, theirs = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    weight = layer.to_dense().detach().double().requires_grad_()
    constant = [b.detach().double().requires_grad_() for b in bias]
    y, z = layer(own), functional.linear(theirs, weight, *constant)
    assert_matches(y, z, dtype=dtype, kind="sum")
    back = torch.randn(z.shape, dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(y, [own, layer.weight, *bias], back)
    wanted = torch.autograd.grad(z, [theirs, weight, *constant], back.double())
    assert found[1].shape == (layer.num_stored,)
    wanted = (wanted[0], wanted[1].reshape(-1)[layer.position], *wanted[2:])
    for got, expected in zip(found, wanted, strict=True):
        assert_matches(got, expected, dtype=dtype, kind="gradient")


@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 5), (0,)], ids=str)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_dense(lead: tuple[int, ...], density: float, bias: bool):
    assert_as_dense(make(density=density, bias=bias), torch.randn(*lead, 13, dtype=torch.float64))


def test_inputs_of_other_kinds():
    assert_as_dense(make(), strided(torch.randn(4, 13, dtype=torch.float64)))
    for shape in ((0, 5), (5, 0)):
        layer = SparseLinear(*shape)
        assert layer.weight.shape == (0,)
        assert layer(torch.randn(3, shape[0])).shape == (3, shape[1])
    nothing = SparseLinear(5, 3, mask=torch.zeros(3, 5, dtype=torch.bool), dtype=torch.float64)
    assert_as_dense(nothing, torch.randn(4, 5, dtype=torch.float64))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 2] = True
    assert_as_dense(SparseLinear(5, 3, mask=mask, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64))


# Conversion.


def test_from_linear():
    linear = nn.Linear(13, 7, dtype=torch.float64).eval().requires_grad_(False)
    x = torch.randn(4, 13, dtype=torch.float64)
    whole = SparseLinear.from_linear(linear)
    assert whole.num_stored == 91
    assert not whole.training
    assert not whole.weight.requires_grad
    assert_matches(whole(x), linear(x), dtype=torch.float64, kind="sum")
    half = SparseLinear.from_linear(linear, density=0.5)
    assert half.num_stored == 46
    assert linear.weight.abs()[half.mask].min() > linear.weight.abs()[~half.mask].max()
    assert torch.equal(half.to_dense(), linear.weight * half.mask)
    assert torch.equal(half.to_linear().weight, half.to_dense())
    mask = torch.rand(7, 13) < 0.3
    assert torch.equal(SparseLinear.from_linear(linear, mask=mask).to_dense(), linear.weight * mask)
    assert half.matrix.values.data_ptr() == half.weight.data_ptr()


def two_of_four(weight: Tensor) -> Tensor:
    """The two largest of each four in a row."""
    fours = weight.abs().view(-1, 4)
    return torch.zeros_like(fours, dtype=torch.bool).scatter(1, fours.topk(2).indices, True).view_as(weight)


def test_masks_of_two_of_four():
    linear = nn.Linear(16, 6, dtype=torch.float64)
    mask = two_of_four(linear.weight.detach())
    layer = SparseLinear.from_linear(linear, mask=mask)
    assert layer.num_stored == 48
    assert_as_dense(layer, torch.randn(3, 16, dtype=torch.float64))
    prune.custom_from_mask(linear, "weight", mask)
    x = torch.randn(3, 16, dtype=torch.float64)
    assert_matches(SparseLinear.from_linear(linear)(x), linear(x), dtype=torch.float64, kind="sum")


@pytest.mark.parametrize("kind", [SparseLinear, BlockSparseLinear])
@pytest.mark.parametrize("stale", [False, True])
def test_masks_of_torch_s_pruning(kind: Any, stale: bool):
    linear = nn.Linear(12, 8, dtype=torch.float64)
    blocks = {} if kind is SparseLinear else {"block_shape": (1, 2)}
    prune.l1_unstructured(linear, "weight", 0.5)
    prune.random_unstructured(linear, "bias", 0.5)
    with torch.no_grad():
        linear.weight_orig.view(-1)[linear.weight_mask.view(-1).nonzero()[0]] = 0
        if stale:
            linear.weight_orig.mul_(3)
        else:
            linear(torch.randn(1, 12, dtype=torch.float64))
    layer = kind.from_linear(linear, **blocks)
    if kind is SparseLinear:
        assert torch.equal(layer.mask, linear.weight_mask.bool())
    assert layer.weight.requires_grad
    assert torch.equal(layer.to_dense(), linear.weight_orig * linear.weight_mask)
    x = torch.randn(3, 12, dtype=torch.float64)
    assert_matches(layer(x), linear(x), dtype=torch.float64, kind="sum")


def test_unstructured_masks_of_blocks_warn():
    linear = nn.Linear(64, 64)
    prune.random_unstructured(linear, "weight", 0.9)
    with pytest.warns(UserWarning, match="stored whole") as caught:
        layer = BlockSparseLinear.from_linear(linear, block_shape=16)
    assert layer.num_stored == 16
    assert str(caught[0].message) == (
        "BlockSparseLinear.from_linear: 410 of 4096 weights are kept, and the blocks of (16, 16) that they touch are "
        "stored whole: 16 of 16 blocks. SparseLinear.from_linear stores the weights alone"
    )
    assert caught[0].filename == __file__
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:16] = mask[:, 48:] = True
    assert BlockSparseLinear.from_linear(linear, mask=mask, block_shape=16).num_stored == 7


def test_a_pattern_of_a_file(tmp_path: Any):
    (tmp_path / "m.smtx").write_text("3, 4, 3\n0 2 2 3\n0 3 1")
    mask = COO.from_smtx(tmp_path / "m.smtx").to_dense() != 0
    layer = SparseLinear.from_linear(nn.Linear(4, 3), mask=mask)
    assert layer.mask.nonzero().tolist() == [[0, 0], [0, 3], [2, 1]]


# Training.


@pytest.mark.parametrize("build", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam])
def test_survivors_keep_values_and_optimizer_state(build: Callable[..., torch.optim.Optimizer]):
    layer = make()
    optimizer, x = build(layer.parameters()), torch.randn(5, 13, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    before, mask = layer.to_dense().detach(), layer.mask
    state = {key: t.clone() for key, t in optimizer.state[layer.weight].items() if t.ndim}
    layer.prune(0.2, optimizer)
    layer.regrow(0.4, optimizer)
    assert layer.num_stored == round(0.4 * 91)
    kept = mask & layer.mask & (layer.to_dense() != 0)
    assert int(kept.sum()) == round(0.2 * 91)
    assert torch.equal(layer.to_dense()[kept], before[kept])
    for key, old in state.items():
        ours, theirs = (torch.zeros(7, 13, dtype=torch.float64) for _ in range(2))
        ours[layer.mask], theirs[mask] = optimizer.state[layer.weight][key], old
        assert torch.equal(ours[kept], theirs[kept]), key
        assert not ours[layer.mask & ~kept].any(), key
    assert_as_dense(layer, x)
    layer(x).sum().backward()
    optimizer.step()


def test_recorded_gradients_are_the_dense_layer_s():
    layer, x = make(), torch.randn(5, 13, dtype=torch.float64)
    dense = layer.to_linear()
    with layer.record_gradients() as record:
        layer(x).pow(3).sum().backward()
    dense(x).pow(3).sum().backward()
    assert torch.allclose(record.scores(), dense.weight.grad.abs())
    layer.rewire(0.5, scores=record.scores())
    assert layer.num_stored == 27


def test_fresh_outputs_spread_as_a_dense_layer_s():
    x = torch.randn(512, 400)
    for density in (0.05, 1.0):
        assert SparseLinear(400, 300, False, density=density)(x).std().item() == pytest.approx(3**-0.5, rel=0.1)


# State and modes.


def test_states_of_other_layers_are_refused():
    layer = make()
    with pytest.raises(RuntimeError, match=r"stored cells are \(1, 1\), the layer's are \(\)"):
        layer.load_state_dict(BlockSparseLinear(13, 7, block_shape=1).state_dict())
    with pytest.raises(RuntimeError, match=r"'weight' is dense, \(7, 13\); SparseLinear stores chosen places only"):
        layer.load_state_dict(nn.Linear(13, 7).state_dict())


def test_repr_and_explain():
    layer = make()
    assert repr(layer) == (
        "SparseLinear(in_features=13, out_features=7, bias=True, weights=27 of 91)\n"
        "  Y[n,Row[p]] += W[p] * X[n,Col[p]]\n"
        "  from 202 samples on, by the dense weight:\n"
        "    H[Row[p],Col[p]] += W[p]"
    )
    assert layer._statements()[0] in str(layer.explain(torch.randn(2, 13, dtype=torch.float64)))


def test_bad_arguments():
    with pytest.raises(InsumShapeError, match="SparseLinear: 'in_features' is -1"):
        SparseLinear(-1, 3)
    with pytest.raises(InsumShapeError, match=r"SparseLinear: 'mask' has shape \(3, 5\)\n  expected \(3, 4\)\n"):
        SparseLinear(4, 3, mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(InsumFormatError, match="SparseLinear got both mask= and density="):
        SparseLinear(4, 3, mask=torch.ones(3, 4, dtype=torch.bool), density=0.5)
    with pytest.raises(InsumShapeError, match="has 5 features, the weight reads 4"):
        SparseLinear(4, 3)(torch.randn(2, 5))
    with pytest.raises(InsumShapeError, match=r"got Conv2d\n"):
        SparseLinear.from_linear(nn.Conv2d(4, 4, 3))  # type: ignore[arg-type]
