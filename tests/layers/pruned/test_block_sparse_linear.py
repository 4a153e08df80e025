"""`BlockSparseLinear` beside `nn.Linear`: numbers, state, optimizers, masks that change, and the modes of a module."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumNameError, InsumShapeError
from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear
from insum_nn.structure.pruning import carry_optimizer_state, group_norms
from insum_nn.testing.tolerances import assert_matches
from tests.ranks import run_ranks

SIZES = [(96, 64, (32, 32)), (70, 45, (32, 16)), (33, 130, (8, 128)), (5, 3, (8, 8)), (64, 64, (64, 8))]
each_size = pytest.mark.parametrize(("k", "m", "block"), SIZES)
each_group = pytest.mark.parametrize("group", ["auto", 1, 2, 3])


def make(
    k: int = 70, m: int = 45, block=(32, 16), *, density: float = 0.5, dtype=torch.float64, **more
) -> BlockSparseLinear:
    return BlockSparseLinear(k, m, block_shape=block, density=density, dtype=dtype, **more)


def assert_as_dense(layer: BlockSparseLinear, x: Tensor) -> None:
    """Output and gradients equal those of the dense layer, on stored blocks."""
    dense = layer.to_linear().double()
    own = x.detach().requires_grad_()
    theirs = x.detach().double().requires_grad_()
    y, z = layer(own), dense(theirs)
    dtype = layer.weight.dtype
    assert_matches(y, z, dtype=dtype, kind="sum")
    back = torch.randn(z.shape, dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(y, [own, layer.weight, *([] if layer.bias is None else [layer.bias])], back)
    wanted = torch.autograd.grad(z, [theirs, *dense.parameters()], back.double())
    assert_matches(found[0], wanted[0], dtype=dtype, kind="gradient")
    on_dense = layer.matrix.with_values(found[1]).to_dense()
    stored = layer.matrix.with_values(torch.ones_like(layer.weight)).to_dense() != 0
    assert_matches(on_dense, wanted[1] * stored, dtype=dtype, kind="gradient")
    if layer.bias is not None:
        assert_matches(found[2], wanted[2], dtype=dtype, kind="gradient")


# Numbers.


@each_size
@each_group
@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 5), (0,)], ids=str)
def test_equals_dense(k, m, block, group, lead):
    layer = make(k, m, block, group_size=group)
    assert_as_dense(layer, torch.randn(*lead, k, dtype=torch.float64))


def test_without_bias_and_without_blocks():
    layer = make(bias=False, density=0.2)
    assert layer.bias is None
    assert_as_dense(layer, torch.randn(3, 70, dtype=torch.float64))
    layer = BlockSparseLinear(7, 5, block_shape=2, mask=torch.zeros(3, 4, dtype=torch.bool), dtype=torch.float64)
    assert layer.weight.shape == (0, 2, 2)
    assert_as_dense(layer, torch.randn(3, 7, dtype=torch.float64))
    assert torch.equal(layer(torch.randn(2, 7, dtype=torch.float64)), layer.bias.expand(2, 5))


@pytest.mark.parametrize(("k", "m"), [(0, 4), (4, 0), (0, 0)])
def test_no_features(k, m):
    layer = BlockSparseLinear(k, m, block_shape=2)
    y = layer(torch.randn(3, k))
    assert y.shape == (3, m)
    y.sum().backward()


def test_fresh_outputs_spread_as_a_dense_layer_s():
    dense = nn.Linear(512, 512)
    layer = BlockSparseLinear(512, 512, density=0.25)
    x = torch.randn(256, 512)
    assert 0.85 < (layer(x).std() / dense(x).std()).item() < 1.15
    ragged = make(70, 45, (32, 16), density=1.0)
    whole = ragged.weight.detach().double()
    # Nothing beyond the edge.
    assert whole.square().sum().sqrt().item() == pytest.approx(ragged.to_dense().norm().item()), (
        "nothing beyond the edge"
    )


# From and to dense layers.


def test_blocks_at_the_edges_hold_zeros_beyond_the_shape():
    layer = BlockSparseLinear(13, 7, block_shape=(2, 4), density=0.7)
    rows, columns = torch.arange(2)[:, None], torch.arange(4)
    for position, block in zip(layer.position.tolist(), layer.weight, strict=True):
        row, column = divmod(position, 4)
        inside = (2 * row + rows < 7) & (4 * column + columns < 13)
        assert torch.equal(block != 0, inside)


def test_from_linear_keeps_the_heaviest_blocks():
    dense = nn.Linear(70, 45, dtype=torch.float64)
    layer = BlockSparseLinear.from_linear(dense, density=0.4, block_shape=(16, 32))
    norms = group_norms(dense.weight, (16, 32))
    assert layer.mask.sum() == round(0.4 * norms.numel()) == layer.num_stored
    assert norms[layer.mask].min() > norms[~layer.mask].max()
    kept = layer.mask.repeat_interleave(16, 0)[:45].repeat_interleave(32, 1)[:, :70]
    assert torch.equal(layer.to_dense(), dense.weight * kept)
    assert torch.equal(layer.bias, dense.bias)
    assert layer.bias is not dense.bias


def test_from_linear_by_mask():
    dense = nn.Linear(6, 4)
    blocks = torch.tensor([[True, False, True], [False, False, True]])
    layer = BlockSparseLinear.from_linear(dense, mask=blocks, block_shape=2)
    assert torch.equal(layer.mask, blocks)
    touched = torch.zeros(4, 6, dtype=torch.bool)
    touched[0, 1] = touched[1, 4] = touched[3, 5] = True
    with pytest.warns(UserWarning, match=r"3 of 24 weights are kept.* whole: 3 of 6 blocks\. SparseLinear"):
        again = BlockSparseLinear.from_linear(dense, mask=touched, block_shape=2)
    assert torch.equal(again.to_dense(), layer.to_dense())


def test_from_linear_names_the_class_for_convolutions():
    with pytest.raises(InsumShapeError, match=r"got Conv2d\n.*\n.*PrunedConv2d\.from_conv2d"):
        BlockSparseLinear.from_linear(torch.nn.Conv2d(4, 4, 3))  # type: ignore[arg-type]


def test_from_linear_without_a_choice_loses_nothing():
    dense = nn.Linear(12, 8, dtype=torch.float64).eval().requires_grad_(False)
    dense.weight[:4, 3:9] = 0
    layer = BlockSparseLinear.from_linear(dense, block_shape=(4, 3))
    assert layer.num_stored == 6
    assert not layer.training
    assert not layer.weight.requires_grad
    x = torch.randn(5, 12, dtype=torch.float64)
    assert_matches(layer(x), dense(x), dtype=torch.float64, kind="sum")
    back = layer.to_linear()
    assert torch.equal(back.weight, dense.weight)
    assert torch.equal(back.bias, dense.bias)


def test_the_dense_weight_is_differentiable():
    layer = make()
    (found,) = torch.autograd.grad(layer.to_dense().square().sum(), layer.weight)
    assert_matches(found, 2 * layer.weight.detach(), dtype=torch.float64, kind="product")


# Training.


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_training_follows_a_masked_dense_layer(kind):
    layer = make(dtype=torch.float64)
    dense = layer.to_linear()
    mask = layer.matrix.with_values(torch.ones_like(layer.weight)).to_dense()
    builders = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    }
    ours, theirs = builders[kind](layer.parameters()), builders[kind](dense.parameters())
    x, target = torch.randn(8, 70, dtype=torch.float64), torch.randn(8, 45, dtype=torch.float64)
    losses: list[float] = []
    for _ in range(5):
        for model, optimizer in ((layer, ours), (dense, theirs)):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), target)
            loss.backward()
            if model is dense:
                dense.weight.grad.mul_(mask)
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_matches(layer.to_dense(), dense.weight, dtype=torch.float64, kind="second")
    assert_matches(layer.bias, dense.bias, dtype=torch.float64, kind="second")


# Masks that change.


def stepped(kind: str = "adam", **more) -> tuple[BlockSparseLinear, torch.optim.Optimizer]:
    layer = make(12, 8, (2, 3), density=0.5, **more)
    builders = {"adam": torch.optim.Adam, "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
    optimizer = builders[kind](layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, 12, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


@each_group
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_survivors_keep_values_and_optimizer_state(kind, group):
    layer, optimizer = stepped(kind, group_size=group)
    before = layer.to_dense().detach()
    own = layer.mask
    keys = ["exp_avg", "exp_avg_sq"] if kind == "adam" else ["momentum_buffer"]
    state = {key: layer.matrix.with_values(optimizer.state[layer.weight][key].clone()).to_dense() for key in keys}
    gradient = layer.matrix.with_values(layer.weight.grad.clone()).to_dense()
    steps = optimizer.state[layer.weight].get("step")
    parameter = layer.weight
    mask = own.clone()
    mask[own.nonzero()[::2].unbind(1)] = False
    mask[(~own).nonzero()[:5].unbind(1)] = True
    layer.update_mask(mask, optimizer)
    assert layer.weight is parameter
    assert torch.equal(layer.mask, mask)
    kept = (own & mask).repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert kept.any()
    assert torch.equal(layer.to_dense(), before * kept)
    for key, old in state.items():
        now = layer.matrix.with_values(optimizer.state[layer.weight][key]).to_dense()
        assert torch.equal(now, old * kept), key
        assert (old * kept).any(), key
    assert torch.equal(layer.matrix.with_values(layer.weight.grad).to_dense(), gradient * kept)
    if kind == "adam":
        assert optimizer.state[layer.weight]["step"] is steps
    x = torch.randn(4, 12, dtype=torch.float64)
    assert_as_dense(layer, x)
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    optimizer.step()
    assert (layer.to_dense() != 0)[(mask & ~own).repeat_interleave(2, 0).repeat_interleave(3, 1)].all(), (
        "new blocks learn"
    )


def test_a_mask_over_single_elements_updates_too():
    layer, optimizer = stepped()
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[3, 4] = mask[7, 0] = True
    layer.update_mask(mask, optimizer)
    assert layer.mask.nonzero().tolist() == [[1, 1], [3, 0]]


def test_to_nothing_and_back():
    layer, optimizer = stepped()
    layer.update_mask(torch.zeros_like(layer.mask), optimizer)
    assert layer.num_stored == 0
    layer.update_mask(torch.ones_like(layer.mask), optimizer)
    assert layer.density == 1
    assert not layer.to_dense().any()
    assert_as_dense(layer, torch.randn(4, 12, dtype=torch.float64))


def test_prune_keeps_the_largest():
    layer, optimizer = stepped()
    norms = group_norms(layer.to_dense(), (2, 3))
    layer.prune(0.25, optimizer)
    assert layer.num_stored == 4
    assert norms[layer.mask].min() > norms[~layer.mask].max()
    with pytest.raises(InsumFormatError) as caught:
        layer.prune(0.5)
    assert str(caught.value) == (
        "BlockSparseLinear stores 0.25 of its places, and cannot be pruned to 0.5\n"
        "  fix: pass a lower density, or call regrow."
    )


def test_regrow_by_scores_and_at_random():
    layer, optimizer = stepped()
    own = layer.mask
    scores = torch.zeros(4, 4)
    first = tuple((~own).nonzero()[-1].tolist())
    scores[first] = 1.0
    layer.regrow((layer.num_stored + 1) / 16, optimizer, scores=scores)
    assert (layer.mask & ~own).nonzero().tolist() == [list(first)]
    layer.regrow(0.9, optimizer)
    assert layer.num_stored == 14
    assert layer.mask[own].all()
    with pytest.raises(InsumFormatError, match="cannot be regrown to 0.1"):
        layer.regrow(0.1)
    with pytest.raises(InsumShapeError, match=r"'scores' has shape \(3, 4\)"):
        layer.regrow(1.0, scores=torch.zeros(3, 4))


def test_rewire_moves_as_many_as_it_drops():
    layer, optimizer = stepped()
    own, norms = layer.mask, group_norms(layer.to_dense(), (2, 3))
    # What is dropped may win its place back; here it does not.
    scores = torch.where(own, -1.0, torch.rand(4, 4))
    layer.rewire(0.25, optimizer, scores=scores)
    assert layer.num_stored == 8
    grown, dropped = layer.mask & ~own, own & ~layer.mask
    assert grown.sum() == dropped.sum() == 2
    assert norms[own & layer.mask].min() > norms[dropped].max()
    assert scores[grown].min() > scores[~layer.mask & ~own].max()


def test_recorded_gradients_are_the_dense_layer_s():
    layer = make(12, 8, (2, 3), density=0.5)
    dense = layer.to_linear()
    inputs = [torch.randn(2, 5, 12, dtype=torch.float64) for _ in range(2)]
    with layer.record_gradients() as record:
        for x in inputs:
            layer(x).pow(3).sum().backward()
    for x in inputs:
        dense(x).pow(3).sum().backward()
    assert torch.allclose(record.scores(), group_norms(dense.weight.grad, (2, 3)), rtol=1e-4)
    layer(inputs[0]).sum().backward()
    assert torch.allclose(record.scores(), group_norms(dense.weight.grad, (2, 3)), rtol=1e-4), "closed"
    with layer.record_gradients() as record, pytest.raises(InsumFormatError, match="no backward pass"):
        record.scores()


def test_an_optimizer_of_other_parameters():
    layer, _ = stepped()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    before = layer.mask
    with pytest.raises(InsumNameError, match="this SGD does not train the layer's weight"):
        layer.update_mask(~before, other)
    assert torch.equal(layer.mask, before)


def test_state_that_does_not_follow_the_rows_is_refused():
    layer, optimizer = stepped()
    optimizer.state[layer.weight]["odd"] = torch.zeros(3)
    before = optimizer.state[layer.weight]["exp_avg"]
    with pytest.raises(InsumFormatError, match=r"odd: shape \(3,\), weight \(8, 2, 3\)"):
        carry_optimizer_state(optimizer, layer.weight, torch.tensor([0]))
    assert optimizer.state[layer.weight]["exp_avg"] is before


# State.


@each_group
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_of_another_density_is_adopted(group, assign):
    layer, other = make(density=0.8), make(density=0.2, group_size=group)
    parameter = other.weight
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert assign or other.weight is parameter
    assert_as_dense(other, torch.randn(3, 70, dtype=torch.float64))
    assert torch.equal(other.to_dense(), layer.to_dense())


def test_into_the_meta_device():
    layer = make()
    empty = make(density=0.3, device="meta")
    assert empty.weight.is_meta
    empty.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(3, 70, dtype=torch.float64)
    assert torch.equal(empty(x), layer(x))


def refused(layer: nn.Module, state: dict[str, Tensor]) -> str:
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(state)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} changed by a refused state"
    return str(caught.value)


def test_states_of_other_layers_are_refused():
    layer = make(64, 128, 32)
    turned = make(128, 64, 32)
    text = refused(layer, turned.state_dict())
    assert "the state is of a dense weight (64, 128), the layer's is (128, 64)" in text
    text = refused(layer, make(64, 128, 16).state_dict())
    assert "stored cells are (16, 16), the layer's are (32, 32)" in text
    text = refused(layer, nn.Linear(64, 128, dtype=torch.float64).state_dict())
    assert "'weight' is dense, (128, 64); BlockSparseLinear stores chosen places only" in text
    for bad in (torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 8]), torch.tensor([-1, 1, 2, 3])):
        state = {**layer.state_dict(), "position": bad}
        assert "positions must ascend and lie in [0, 8)" in refused(layer, state)
    text = refused(layer, {**layer.state_dict(), "position": torch.tensor([0, 1])})
    assert "weight (4, 32, 32) and position (2,) do not belong together" in text


# Modes.


def test_dynamo_traces_it_while_a_thread_imports():
    """Copies that Dynamo makes of `sys.modules` fail where it changes."""
    layer, x, ended = make(density=0.5), torch.randn(7, 70, dtype=torch.float64), threading.Event()

    def imports() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            sys.modules[f"a_module_of_this_test_{number}"] = types.ModuleType("a_module_of_this_test")
            time.sleep(1e-5)

    thread = threading.Thread(target=imports)
    before = {*sys.modules}
    thread.start()
    try:
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))
    finally:
        ended.set()
        thread.join()
        for name in {*sys.modules} - before:
            if name.startswith("a_module_of_this_test"):
                del sys.modules[name]


@each_group
def test_compiled_code_sees_a_new_mask(group):
    layer, x = make(dtype=torch.float32, group_size=group), torch.randn(4, 70)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.prune(0.2)
    torch.testing.assert_close(compiled(x), layer(x))


# What it shows.


@pytest.mark.library_calls
def test_repr_and_explain():
    layer = BlockSparseLinear(96, 64, density=0.5)
    assert repr(layer) == (
        "BlockSparseLinear(in_features=96, out_features=64, bias=True, block_shape=(32, 32), blocks=3 of 6)\n"
        "  Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]\n"
        "  from 717 samples on, by the dense weight:\n"
        "    H[Row[p],a,Col[p],b] += W[p,a,b]"
    )
    assert layer.expression == "Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]\nH[Row[p],a,Col[p],b] += W[p,a,b]"
    assert layer._statements()[0] in str(layer.explain())
    assert "missing entry" not in str(layer.explain())
    assert "index_select" in str(layer.explain(torch.randn(4, 96)))
    grouped = BlockSparseLinear(96, 64, density=0.5, group_size=2)
    assert grouped._statements() == ("Y[n,Row[g],a] += W[Slot[g,q],a,b] * X[n,Col[g,q],b]",)
    assert "group_size=2" in repr(grouped)
    assert "index_select" in str(grouped.explain(torch.randn(4, 96)))


# Bad arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"density": 0.0}, InsumFormatError, "density must lie in (0, 1], got 0.0"),
        ({"density": 1.5}, InsumFormatError, "density must lie in (0, 1], got 1.5"),
        ({"block_shape": (0, 8)}, InsumShapeError, "'block_shape' is (0, 8)"),
        ({"block_shape": (8, 8, 8)}, InsumShapeError, "'block_shape' is (8, 8, 8)"),
        ({"mask": torch.ones(3, 3, dtype=torch.bool)}, InsumShapeError, "expected (2, 3) or (64, 96)"),
        ({"mask": torch.ones(2, 3)}, InsumDtypeError, "'mask' must be bool, got torch.float32"),
        ({"mask": torch.ones(2, 3) > 0, "density": 0.5}, InsumFormatError, "got both mask= and density="),
        ({"group_size": 0}, InsumFormatError, "group_size must be an integer of at least 1 or 'auto', got 0"),
        ({"group_size": "many"}, InsumFormatError, "got 'many'"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error) as caught:
        BlockSparseLinear(96, 64, **arguments)
    assert text in str(caught.value)
    assert "fix: " in str(caught.value)


def test_bad_block_shape_of_a_converted_layer():
    for density in (None, 0.5):
        with pytest.raises(InsumShapeError, match=r"'block_shape' is \(8,\)"):
            BlockSparseLinear.from_linear(torch.nn.Linear(96, 64), density=density, block_shape=(8,))


def test_bad_features():
    with pytest.raises(InsumShapeError) as caught:
        BlockSparseLinear(-1, 64)
    assert str(caught.value) == (
        "BlockSparseLinear: 'in_features' is -1\n  expected an integer of at least 0\n  fix: pass one integer."
    )
    with pytest.raises(InsumShapeError, match="'input' has 95 features, the weight reads 96"):
        BlockSparseLinear(96, 64)(torch.randn(2, 95))


# Several processes.


def _replica(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(
            BlockSparseLinear(12, 8, block_shape=(2, 3), density=0.5), nn.ReLU(), nn.Linear(8, 2)
        ).double()
        replica = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.randn(4, 12, dtype=torch.float64)
        for step in range(4):
            optimizer.zero_grad()
            replica(data[2 * rank : 2 * rank + 2]).square().mean().backward()
            optimizer.step()
            if step == 1:
                # As many places as before, the same on every rank: the replica needs no new wrapping.
                model[0].rewire(0.5, optimizer, scores=torch.arange(16.0).reshape(4, 4))
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
        # The wrapper goes before the group: what waits for the group's threads must not hold the interpreter's lock.
        del replica
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_data_parallel(tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(_replica, port, str(tmp_path))
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(
        BlockSparseLinear(12, 8, block_shape=(2, 3), density=0.5), nn.ReLU(), nn.Linear(8, 2)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(4, 12, dtype=torch.float64)
    for step in range(4):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if step == 1:
            model[0].rewire(0.5, optimizer, scores=torch.arange(16.0).reshape(4, 4))
    for key, value in model.state_dict().items():
        assert torch.equal(states[0][key], states[1][key]), key
        assert torch.allclose(states[0][key].double(), value.double(), rtol=1e-10), key


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda weights: torch.optim.Adam(weights),
    "Adam, one by one": lambda weights: torch.optim.Adam(weights, foreach=False),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("how", ["load_state_dict", "update_mask"])
def test_an_optimizer_that_remembers_other_places(build: Any, how: str):
    """It says so; a new one trains the weight, and one whose state is loaded too goes on."""
    layer, more = make(density=0.3), make(density=0.8)
    optimizer = build(layer.parameters())
    before, rows = copy.deepcopy(layer.state_dict()), layer.num_stored
    x = torch.randn(3, 70, dtype=torch.float64)

    def step(optimizer: torch.optim.Optimizer) -> None:
        layer(x).square().sum().backward()
        optimizer.step()

    step(optimizer)
    memory = copy.deepcopy(optimizer.state_dict())
    if how == "load_state_dict":
        layer.load_state_dict(more.state_dict())
    else:
        layer.update_mask(more.mask)
    weight = layer.weight.detach().clone()
    with pytest.raises(InsumFormatError) as caught:
        step(optimizer)
    name = type(optimizer).__name__
    assert str(caught.value).startswith(f"{name} remembers a pruned weight that has another number of places by now\n")
    assert f": shape ({rows}, 32, 16), weight ({more.num_stored}, 32, 16)\n" in str(caught.value)
    assert "fix: build a new optimizer, load its state of the same checkpoint" in str(caught.value)
    assert torch.equal(layer.weight, weight), "nothing is trained in part"
    step(build(layer.parameters()))
    assert not torch.equal(layer.weight, weight)
    layer.load_state_dict(before)
    optimizer.load_state_dict(memory)
    step(optimizer)


@pytest.mark.parametrize("number", [np.int64, np.array])
def test_sizes_of_numpy(number):
    sizes = {"block_shape": number(16), "group_size": number(2)}
    layer = BlockSparseLinear(number(70), number(33), **sizes)
    plain = BlockSparseLinear(70, 33, block_shape=16, group_size=2)
    layer.load_state_dict(plain.state_dict())
    assert (type(layer.in_features), type(layer.out_features)) == (int, int)
    x = torch.randn(3, 70)
    assert torch.equal(layer(x), plain(x))
