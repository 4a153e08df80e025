"""`PrunedConv2d` beside `nn.Conv2d`: numbers, patterns of pruning, state, masks that change, modes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.layers.pruned.pruned_conv2d import PrunedConv2d
from insum_nn.structure.pruning import filter_mask
from insum_nn.testing.tolerances import assert_matches
from tests.ops.oracle import assert_gradients, strided

# torch says once a process that its own way to pad even kernels may copy.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=:UserWarning")

# image, arguments of the layer
CASES = [
    ((7, 9), {"kernel_size": 3}),
    ((7, 9), {"kernel_size": 3, "padding": 1}),
    ((7, 9), {"kernel_size": 1}),
    ((8, 8), {"kernel_size": 2, "stride": 2}),
    ((9, 7), {"kernel_size": (3, 2), "stride": (2, 3), "padding": (0, 2), "dilation": (1, 2)}),
    ((9, 11), {"kernel_size": (5, 4), "stride": 3, "padding": (4, 3), "dilation": 2}),
    ((6, 5), {"kernel_size": 3, "groups": 2, "padding": 1}),
    ((6, 5), {"kernel_size": (1, 3), "groups": 6, "stride": (1, 2)}),
    ((7, 6), {"kernel_size": (4, 3), "padding": "same", "dilation": (1, 2)}),
    ((7, 6), {"kernel_size": 3, "padding": "valid", "bias": False}),
    ((7, 6), {"kernel_size": 3, "padding": (1, 2), "padding_mode": "reflect"}),
    ((7, 6), {"kernel_size": 3, "padding": 2, "padding_mode": "circular", "stride": 2}),
    ((7, 6), {"kernel_size": (2, 4), "padding": "same", "padding_mode": "replicate"}),
    ((12, 12), {"kernel_size": 11, "stride": 11, "padding": 10}),
]


def label(case: object) -> str:
    text = case if isinstance(case, str) else repr(case)
    return "".join(c for c in text if c.isalnum() or c in "-_")


each_case = pytest.mark.parametrize(("image", "arguments"), CASES, ids=label)


def make(density: float = 0.4, dtype=torch.float64, **arguments) -> PrunedConv2d:
    return PrunedConv2d(6, 12, **{"kernel_size": 3, **arguments}, density=density, dtype=dtype)


def assert_as_dense(layer: PrunedConv2d, x: Tensor) -> None:
    """Output and gradients equal those of the dense layer, on stored weights."""
    dense = layer.to_conv2d().double()
    own, theirs = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    dtype = layer.weight.dtype
    y, z = layer(own), dense(theirs)
    assert_matches(y, z, dtype=dtype, kind="sum")
    back = torch.randn(z.shape, dtype=torch.float64).to(dtype)
    bias = [] if layer.bias is None else [layer.bias]
    found = torch.autograd.grad(y, [own, layer.weight, *bias], back)
    wanted = torch.autograd.grad(z, [theirs, dense.weight, *([dense.bias] if bias else [])], back.double())
    assert_matches(found[0], wanted[0], dtype=dtype, kind="gradient")
    # Of all weights' gradients: those that are not stored may be the larger.
    scale = float(wanted[1].abs().max()) if wanted[1].numel() else None
    assert_matches(found[1], wanted[1].reshape(-1)[layer.position], dtype=dtype, kind="gradient", scale=scale)
    if bias:
        assert_matches(found[2], wanted[2], dtype=dtype, kind="gradient")


@each_case
@pytest.mark.parametrize("group", ["auto", 1, 3])
def test_equals_dense(image, arguments, group):
    layer = make(**arguments, group_size=group)
    assert_as_dense(layer, torch.randn(3, 6, *image, dtype=torch.float64))


@each_case
def test_all_weights(image, arguments):
    assert_as_dense(make(1.0, **arguments), torch.randn(2, 6, *image, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    assert_as_dense(make(dtype=dtype, padding=1, stride=2), torch.randn(3, 6, 9, 7).to(dtype))


@pytest.mark.parametrize(
    "arguments", [{"padding": 1}, {"stride": 2, "dilation": 2, "padding": 1, "groups": 2}], ids=label
)
def test_finite_differences(arguments):
    layer = PrunedConv2d(2, 4, 2, **arguments, density=0.5, dtype=torch.float64)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert_gradients(run, [torch.randn(2, 2, 4, 3), layer.weight, layer.bias])


def test_second_derivatives_equal_the_dense_ones():
    layer = make(padding=1)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    results: list[list[Tensor]] = []
    for run in (lambda x, w: layer(x), lambda x, w: functional.conv2d(x, layer.to_dense(), layer.bias, padding=1)):
        own = x.clone().requires_grad_()
        leaves = [own, layer.weight]
        first = torch.autograd.grad(run(*leaves).pow(3).sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_matches(ours, theirs, dtype=torch.float64, kind="second")


def test_inputs_of_other_kinds():
    layer = make(padding=1)
    assert_as_dense(layer, torch.randn(6, 7, 5, dtype=torch.float64))
    assert_as_dense(layer, torch.randn(0, 6, 7, 5, dtype=torch.float64))
    assert_as_dense(layer, strided(torch.randn(2, 6, 7, 5, dtype=torch.float64)))
    assert_as_dense(layer, torch.randn(2, 6, 7, 5, dtype=torch.float64).to(memory_format=torch.channels_last))
    assert_as_dense(layer, torch.randn(2, 6, 1, 1, dtype=torch.float64))


def test_nothing_stored():
    layer = PrunedConv2d(2, 3, 3, mask=torch.zeros(3, 2, 3, 3, dtype=torch.bool), dtype=torch.float64)
    assert layer.weight.shape == (0,)
    assert_as_dense(layer, torch.randn(2, 2, 5, 4, dtype=torch.float64))


def test_a_filter_without_weights():
    mask = torch.ones(4, 2, 3, 3, dtype=torch.bool)
    mask[1:3] = False
    layer = PrunedConv2d(2, 4, 3, mask=mask, dtype=torch.float64)
    assert_as_dense(layer, torch.randn(2, 2, 5, 4, dtype=torch.float64))


# Patterns.


@pytest.mark.parametrize("pattern", ["M", "C", "MC", "RS", "MRS", "CRS", "MCRS", "RSMC", "R"])
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_patterns(pattern, density):
    conv = nn.Conv2d(6, 12, (3, 5), dtype=torch.float64)
    layer = PrunedConv2d.from_conv2d(conv, density=density, pattern=pattern)
    mask = layer.mask
    fixed = [axis for axis, letter in enumerate("MCRS") if letter not in pattern]
    parts = mask
    for axis in fixed:
        assert torch.equal(parts.narrow(axis, 0, 1).expand(parts.shape), parts), "constant along the other axes"
    for axis in fixed:
        parts = parts.narrow(axis, 0, 1)
    assert int(parts.sum()) == max(1, round(density * parts.numel()))
    energy = conv.weight.square()
    if fixed:
        energy = energy.sum(fixed, keepdim=True)
    if density < 1:
        assert energy[parts].min() > energy[~parts].max(), "the heaviest parts stay"
    assert torch.equal(layer.to_dense(), conv.weight * mask)
    assert_as_dense(layer, torch.randn(2, 6, 5, 7, dtype=torch.float64))


def test_bad_patterns():
    with pytest.raises(InsumFormatError) as caught:
        filter_mask(torch.ones(2, 2, 3, 3), 0.5, "MK")
    assert str(caught.value) == (
        "filter_mask got the pattern 'MK'\n"
        "  expected some of the letters M, C, R and S, each once\n"
        "  fix: name the axes along which the mask varies, such as 'MC' for whole kernels."
    )
    with pytest.raises(InsumShapeError, match="four dimensions, got 3"):
        filter_mask(torch.ones(2, 3, 3), 0.5)


@pytest.mark.parametrize("density", [None, 0.5])
def test_a_pattern_needs_a_density_and_no_mask(density: float | None):
    mask = None if density is None else torch.ones(8, 4, 3, 3, dtype=torch.bool)
    with pytest.raises(InsumFormatError, match=r"pattern='M' is for a density without a mask"):
        PrunedConv2d.from_conv2d(nn.Conv2d(4, 8, 3), mask=mask, density=density, pattern="M")


def test_from_conv2d():
    conv = nn.Conv2d(6, 12, 3, 2, 1, 1, 2, False, "circular", dtype=torch.float64).eval().requires_grad_(False)
    conv.weight[::2] = 0
    layer = PrunedConv2d.from_conv2d(conv)
    assert layer.num_stored == int((conv.weight != 0).sum())
    assert not layer.training
    assert not layer.weight.requires_grad
    x = torch.randn(2, 6, 7, 8, dtype=torch.float64)
    assert_matches(layer(x), conv(x), dtype=torch.float64, kind="sum")
    back = layer.to_conv2d()
    assert torch.equal(back.weight, conv.weight)
    assert repr(back) == repr(conv)
    mask = torch.rand(conv.weight.shape) < 0.3
    assert torch.equal(PrunedConv2d.from_conv2d(conv, mask=mask).to_dense(), conv.weight * mask)


# Training and masks.


def test_training_follows_a_masked_dense_layer():
    layer = make(padding=1)
    dense = layer.to_conv2d()
    mask = layer.mask
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (layer, dense)]
    x, target = torch.randn(4, 6, 5, 6, dtype=torch.float64), torch.randn(4, 12, 5, 6, dtype=torch.float64)
    for _ in range(4):
        for model, optimizer in zip((layer, dense), optimizers, strict=True):
            optimizer.zero_grad()
            functional.mse_loss(model(x), target).backward()
            if model is dense:
                dense.weight.grad.mul_(mask)
            optimizer.step()
    assert_matches(layer.to_dense(), dense.weight, dtype=torch.float64, kind="second")


def test_masks_change_and_survivors_stay():
    layer = make(padding=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 6, 5, 6, dtype=torch.float64)
    layer(x).square().sum().backward()
    optimizer.step()
    before, own = layer.to_dense().detach(), layer.mask
    momentum = torch.zeros(own.shape, dtype=torch.float64)
    momentum[own] = optimizer.state[layer.weight]["momentum_buffer"]
    layer.prune(0.2, optimizer)
    layer.regrow(0.3, optimizer)
    layer.rewire(0.1, optimizer, scores=torch.rand(layer.grid_shape))
    kept = own & layer.mask & (layer.to_dense() != 0)
    assert kept.sum() > 50
    assert torch.equal(layer.to_dense()[kept], before[kept])
    now = torch.zeros(own.shape, dtype=torch.float64)
    now[layer.mask] = optimizer.state[layer.weight]["momentum_buffer"]
    assert torch.equal(now[kept], momentum[kept])
    assert layer.density == pytest.approx(0.3, abs=1e-3)
    assert_as_dense(layer, x)


@each_case
def test_recorded_gradients_are_the_dense_layer_s(image, arguments):
    layer = make(**arguments)
    dense = layer.to_conv2d()
    x = torch.randn(2, 6, *image, dtype=torch.float64)
    with layer.record_gradients() as record:
        layer(x).pow(3).sum().backward()
    dense(x).pow(3).sum().backward()
    assert torch.allclose(record.scores(), dense.weight.grad.abs(), rtol=1e-8)


# State and modes.


def test_state_and_copies():
    layer, other = make(0.5), make(0.1)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
    with pytest.raises(
        RuntimeError, match=r"the state is of a dense weight \(12, 6, 3, 3\), the layer's is \(12, 6, 1, 3\)"
    ):
        make(kernel_size=(1, 3)).load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match=r"'weight' is dense, \(12, 6, 3, 3\)"):
        layer.load_state_dict(nn.Conv2d(6, 12, 3).state_dict())


def test_autocast():
    layer = make(dtype=torch.float32, padding=1)
    x = torch.randn(2, 6, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_matches(y, layer.to_conv2d().double()(x.double()), dtype=torch.bfloat16, kind="gradient")


def test_exports():
    layer = make(dtype=torch.float32, padding=1)
    program = torch.export.export(layer, (torch.randn(3, 6, 5, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    x = torch.randn(5, 6, 5, 4)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_on_each_device(device):
    layer = make(dtype=torch.float32, padding=1).to(device)
    x = torch.randn(2, 6, 5, 4, device=device)
    assert_matches(layer(x), layer.to_conv2d().double()(x.double()), dtype=torch.float32, kind="sum")


@pytest.mark.library_calls
def test_repr_and_explain():
    layer = PrunedConv2d(4, 8, 3, stride=2, padding=1, density=0.25)
    assert repr(layer) == (
        "PrunedConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), weights=72 of 288)\n"
        "  O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],2*p+R[g,k]-1,2*q+S[g,k]-1]"
    )
    assert layer.expression in str(layer.explain())
    assert "index_select" in str(layer.explain(torch.randn(2, 4, 6, 6)))


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"groups": 5}, InsumShapeError, "'groups' is 5, with 6 channels in and 12 out"),
        ({"kernel_size": 0}, InsumShapeError, "'kernel_size' is 0"),
        ({"stride": (1, 2, 3)}, InsumShapeError, "'stride' is (1, 2, 3)"),
        ({"padding": -1}, InsumShapeError, "'padding' is -1"),
        ({"padding": "full"}, InsumFormatError, "'padding' is 'full'"),
        ({"padding": "same", "stride": 2}, InsumFormatError, "padding='same' with stride (2, 2) has no meaning"),
        ({"padding_mode": "mirror"}, InsumFormatError, "'padding_mode' is 'mirror'"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error) as caught:
        make(**arguments)
    assert text in str(caught.value)
    assert "fix: " in str(caught.value)


def test_bad_inputs():
    layer = make()
    with pytest.raises(InsumShapeError) as caught:
        layer(torch.randn(2, 5, 7, 7, dtype=torch.float64))
    assert str(caught.value) == (
        "pruned_conv2d: 'input' must be a batch of images of 6 channels\n"
        "  O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k]]\n"
        "                                  ^\n"
        "  expected shape (n, 6, rows, columns); got (2, 5, 7, 7)\n"
        "  fix: pass images with 6 channels."
    )
    with pytest.raises(InsumShapeError):
        layer(torch.randn(7, 7, dtype=torch.float64))
    with pytest.raises(InsumShapeError, match=r"a kernel that spans \(3, 3\) does not fit an input of \(2, 7\)"):
        layer(torch.randn(1, 6, 2, 7, dtype=torch.float64))
    with pytest.raises(InsumDtypeError, match=r"'input' is torch.float32, the weight is torch.float64"):
        layer(torch.randn(1, 6, 7, 7))
    with pytest.raises(InsumDeviceError, match="'weight' is on cpu, 'input' on meta"):
        layer(torch.randn(1, 6, 7, 7, dtype=torch.float64, device="meta"))


@pytest.mark.parametrize("number", [np.int64, np.array])
def test_sizes_of_numpy(number):
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "group_size")
    values = dict(zip(names, (6, 12, 3, 2, 1, 2, 2, 4), strict=True))
    layer = PrunedConv2d(**{name: number(value) for name, value in values.items()})
    plain = PrunedConv2d(**values)
    layer.load_state_dict(plain.state_dict())
    assert type(layer.groups) is int
    x = torch.randn(2, 6, 7, 8)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("channels", [(0, 6), (4, 0)], ids=str)
def test_no_channels(channels):
    layer = PrunedConv2d(*channels, 3)
    y = layer(torch.randn(2, channels[0], 5, 5))
    assert torch.equal(y, layer.bias[:, None, None].expand(2, -1, 3, 3))
