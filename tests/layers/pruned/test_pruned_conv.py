"""`PrunedConv1d`, `2d` and `3d` beside torch's: numbers, patterns of pruning, state, masks that change, modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.layers.pruned.pruned_conv import PrunedConv, PrunedConv1d, PrunedConv2d, PrunedConv3d
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
    ((9,), {"kernel_size": 3}),
    ((10,), {"kernel_size": 4, "stride": 3, "padding": 2, "dilation": 2}),
    ((8,), {"kernel_size": 3, "groups": 3, "padding": 1, "bias": False}),
    ((8,), {"kernel_size": 4, "padding": "same", "dilation": 2}),
    ((7,), {"kernel_size": (3,), "padding": (2,), "padding_mode": "reflect"}),
    ((7,), {"kernel_size": 2, "padding": 3, "padding_mode": "circular", "stride": 2}),
    ((4, 6, 5), {"kernel_size": 3}),
    ((5, 7, 6), {"kernel_size": (3, 1, 2), "stride": (1, 3, 2), "padding": (2, 0, 1), "dilation": (2, 1, 3)}),
    ((4, 3, 5), {"kernel_size": 2, "groups": 2, "padding": 1, "bias": False}),
    ((4, 3, 5), {"kernel_size": (2, 3, 4), "padding": "same"}),
    ((4, 3, 5), {"kernel_size": 3, "padding": (1, 2, 1), "padding_mode": "reflect", "stride": 2}),
    ((4, 3, 5), {"kernel_size": 2, "padding": (2, 1, 3), "padding_mode": "circular"}),
    ((4, 3, 5), {"kernel_size": 3, "padding": (2, 1, 3), "padding_mode": "replicate"}),
]
KINDS: dict[int, type[PrunedConv]] = {1: PrunedConv1d, 2: PrunedConv2d, 3: PrunedConv3d}
SIZES = {1: (7,), 2: (5, 4), 3: (3, 4, 5)}
each_kind = pytest.mark.parametrize("ndim", KINDS, ids=lambda ndim: f"{ndim}d")


def label(case: object) -> str:
    text = case if isinstance(case, str) else repr(case)
    return "".join(c for c in text if c.isalnum() or c in "-_")


each_case = pytest.mark.parametrize(("image", "arguments"), CASES, ids=label)


def make(density: float = 0.4, dtype=torch.float64, ndim: int = 2, **arguments) -> PrunedConv:
    return KINDS[ndim](6, 12, **{"kernel_size": 3, **arguments}, density=density, dtype=dtype)


def assert_as_dense(layer: PrunedConv, x: Tensor) -> None:
    """Output and gradients equal those of the dense layer, on stored weights."""
    dense = layer.to_conv().double()
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
    layer = make(**arguments, ndim=len(image), group_size=group)
    assert_as_dense(layer, torch.randn(3, 6, *image, dtype=torch.float64))


@each_case
def test_all_weights(image, arguments):
    assert_as_dense(make(1.0, ndim=len(image), **arguments), torch.randn(2, 6, *image, dtype=torch.float64))


@each_kind
@pytest.mark.parametrize(
    "arguments", [{"padding": 1}, {"stride": 2, "dilation": 2, "padding": 1, "groups": 2}], ids=label
)
def test_finite_differences(ndim, arguments):
    layer = KINDS[ndim](2, 4, 2, **arguments, density=0.5, dtype=torch.float64)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert_gradients(run, [torch.randn(2, 2, *(4, 3, 2)[:ndim]), layer.weight, layer.bias])


@each_kind
def test_inputs_of_other_kinds(ndim):
    layer, size = make(ndim=ndim, padding=1), SIZES[ndim]
    x = torch.randn(2, 6, *size, dtype=torch.float64)
    assert layer(x[0]).shape == layer.to_conv()(x[0]).shape
    assert_as_dense(layer, x[0])
    assert_as_dense(layer, x[:0])
    assert_as_dense(layer, strided(x))
    assert_as_dense(layer, x.transpose(1, -1).contiguous().transpose(1, -1))
    assert_as_dense(layer, torch.randn(2, 6, *(1,) * ndim, dtype=torch.float64))


@each_kind
def test_nothing_stored(ndim):
    layer = KINDS[ndim](2, 3, 3, mask=torch.zeros(3, 2, *(3,) * ndim, dtype=torch.bool), dtype=torch.float64)
    assert layer.weight.shape == (0,)
    assert_as_dense(layer, torch.randn(2, 2, *(5, 4, 3)[:ndim], dtype=torch.float64))


@each_kind
def test_a_filter_without_weights(ndim):
    mask = torch.ones(4, 2, *(3,) * ndim, dtype=torch.bool)
    mask[1:3] = False
    layer = KINDS[ndim](2, 4, 3, mask=mask, dtype=torch.float64)
    assert_as_dense(layer, torch.randn(2, 2, *(5, 4, 3)[:ndim], dtype=torch.float64))


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


@pytest.mark.parametrize(("ndim", "pattern"), [(1, "MC"), (1, "R"), (3, "C"), (3, "RST"), (3, "MT"), (3, "TSRMC")])
def test_patterns_of_other_dimensions(ndim: int, pattern: str):
    conv = getattr(nn, f"Conv{ndim}d")(6, 12, (3, 2, 4)[:ndim], dtype=torch.float64)
    layer = getattr(KINDS[ndim], f"from_conv{ndim}d")(conv, density=0.4, pattern=pattern)
    fixed = [axis for axis, letter in enumerate("MCRST"[: 2 + ndim]) if letter not in pattern]
    parts = layer.mask.all(fixed) if fixed else layer.mask
    assert torch.equal(parts, layer.mask.any(fixed) if fixed else layer.mask)
    assert int(parts.sum()) == round(0.4 * parts.numel())
    assert torch.equal(layer.to_dense(), conv.weight * layer.mask)
    assert_as_dense(layer, torch.randn(2, 6, *(5, 4, 6)[:ndim], dtype=torch.float64))


def test_bad_patterns():
    with pytest.raises(InsumFormatError) as caught:
        filter_mask(torch.ones(2, 2, 3, 3), 0.5, "MK")
    assert str(caught.value) == (
        "filter_mask got the pattern 'MK'\n"
        "  expected some of the letters M, C, R and S, each once\n"
        "  fix: name the axes along which the mask varies, such as 'MC' for whole kernels."
    )
    with pytest.raises(InsumFormatError, match="expected some of the letters M, C and R, each once"):
        filter_mask(torch.ones(2, 2, 3), 0.5, "RS")
    with pytest.raises(InsumShapeError, match="three to five dimensions, got 6"):
        filter_mask(torch.ones(2, 3, 1, 1, 1, 1), 0.5)
    with pytest.raises(InsumShapeError, match="three to five dimensions, got 2"):
        filter_mask(torch.ones(2, 3), 0.5)


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
    back = layer.to_conv()
    assert torch.equal(back.weight, conv.weight)
    assert repr(back) == repr(conv)
    mask = torch.rand(conv.weight.shape) < 0.3
    assert torch.equal(PrunedConv2d.from_conv2d(conv, mask=mask).to_dense(), conv.weight * mask)


@pytest.mark.parametrize("ndim", [1, 3])
def test_from_and_to_other_dimensions(ndim: int):
    conv = getattr(nn, f"Conv{ndim}d")(6, 12, 3, 2, 1, 1, 2, True, "replicate", dtype=torch.float64)
    with torch.no_grad():
        conv.weight[::2] = 0
    layer = getattr(KINDS[ndim], f"from_conv{ndim}d")(conv)
    assert layer.num_stored == int((conv.weight != 0).sum())
    x = torch.randn(2, 6, *(7, 8, 5)[:ndim], dtype=torch.float64)
    assert_matches(layer(x), conv(x), dtype=torch.float64, kind="sum")
    back = getattr(layer, f"to_conv{ndim}d")()
    assert torch.equal(back.weight, conv.weight)
    assert repr(back) == repr(conv)
    with pytest.raises(InsumShapeError, match="'kernel_size' is"):
        PrunedConv2d.from_conv2d(conv)


@each_kind
@pytest.mark.parametrize("stale", [False, True])
def test_masks_of_torch_s_pruning(ndim: int, stale: bool):
    conv = getattr(nn, f"Conv{ndim}d")(6, 12, 3, dtype=torch.float64)
    prune.l1_unstructured(conv, "weight", 0.6)
    prune.random_unstructured(conv, "bias", 0.5)
    with torch.no_grad():
        # A weight that is kept and zero is kept: training moves it.
        conv.weight_orig.view(-1)[conv.weight_mask.view(-1).nonzero()[0]] = 0
        if stale:
            # As an optimizer's step does: `conv.weight` follows at the next call.
            conv.weight_orig.mul_(3)
        else:
            # What a call leaves without gradients says nothing of the parameter's own.
            conv(torch.randn(1, 6, *(4,) * ndim, dtype=torch.float64))
    layer = getattr(KINDS[ndim], f"from_conv{ndim}d")(conv)
    assert torch.equal(layer.mask, conv.weight_mask.bool())
    assert layer.weight.requires_grad
    assert torch.equal(layer.to_dense(), conv.weight_orig * conv.weight_mask)
    assert torch.equal(layer.bias, conv.bias_orig * conv.bias_mask)
    x = torch.randn(2, 6, *SIZES[ndim], dtype=torch.float64)
    assert_matches(layer(x), conv(x), dtype=torch.float64, kind="sum")
    fewer = getattr(KINDS[ndim], f"from_conv{ndim}d")(conv, density=0.2)
    assert not (fewer.mask & ~layer.mask).any()


# Training and masks.


def test_training_follows_a_masked_dense_layer():
    layer = make(padding=1)
    dense = layer.to_conv()
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
    layer = make(**arguments, ndim=len(image))
    dense = layer.to_conv()
    x = torch.randn(2, 6, *image, dtype=torch.float64)
    with layer.record_gradients() as record:
        layer(x).pow(3).sum().backward()
    dense(x).pow(3).sum().backward()
    assert torch.allclose(record.scores(), dense.weight.grad.abs(), rtol=1e-8)
    with layer.record_gradients() as record:
        layer(x[1]).pow(3).sum().backward()
    dense.weight.grad = None
    dense(x[1]).pow(3).sum().backward()
    assert torch.allclose(record.scores(), dense.weight.grad.abs(), rtol=1e-8)


# State and modes.


def test_states_of_other_layers_are_refused():
    layer = make(0.5)
    with pytest.raises(
        RuntimeError, match=r"the state is of a dense weight \(12, 6, 3, 3\), the layer's is \(12, 6, 1, 3\)"
    ):
        make(kernel_size=(1, 3)).load_state_dict(layer.state_dict())
    with pytest.raises(
        RuntimeError, match=r"the state is of a dense weight \(12, 6, 3, 3\), the layer's is \(12, 6, 3\)"
    ):
        make(ndim=1).load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match=r"'weight' is dense, \(12, 6, 3, 3\)"):
        layer.load_state_dict(nn.Conv2d(6, 12, 3).state_dict())


@pytest.mark.library_calls
def test_repr_and_explain():
    layer = PrunedConv2d(4, 8, 3, stride=2, padding=1, density=0.25)
    assert repr(layer) == (
        "PrunedConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), weights=72 of 288)\n"
        "  O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],2*p+R[g,k]-1,2*q+S[g,k]-1]\n"
        "  from 551 cells of an output channel on, by the dense weight:\n"
        "    H[P[p]] += F[p]"
    )
    assert layer._statements()[0] in str(layer.explain())
    assert "index_select" in str(layer.explain(torch.randn(2, 4, 6, 6)))
    assert repr(PrunedConv1d(4, 8, 3, padding=1, density=0.25)) == (
        "PrunedConv1d(4, 8, kernel_size=(3,), stride=(1,), padding=(1,), weights=24 of 96)\n"
        "  O[n,M[g],p] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k]-1]\n"
        "  from 904 cells of an output channel on, by the dense weight:\n"
        "    H[P[p]] += F[p]"
    )
    layer = PrunedConv3d(4, 8, 3, (1, 2, 3), (0, 1, 2), 2, 2, False, density=0.25)
    assert repr(layer) == (
        "PrunedConv3d(4, 8, kernel_size=(3, 3, 3), stride=(1, 2, 3), padding=(0, 1, 2), dilation=(2, 2, 2), groups=2, "
        "bias=False, weights=108 of 432)\n"
        "  O[n,M[g],p,q,r] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],2*q+S[g,k]-1,3*r+T[g,k]-2]\n"
        "  from 428 cells of an output channel on, by the dense weight:\n"
        "    H[P[p]] += F[p]"
    )
    assert layer._statements()[0] in str(layer.explain())


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
@each_kind
def test_bad_arguments(ndim, arguments, error, text):
    if ndim != 2:
        arguments = {**arguments, **({"stride": (1, 2)} if isinstance(arguments.get("stride"), tuple) else {})}
        text = text.replace("(1, 2, 3)", "(1, 2)").replace("(2, 2)", repr((2,) * ndim))
    with pytest.raises(error) as caught:
        make(ndim=ndim, **arguments)
    assert type(make(ndim=ndim)).__name__ in str(caught.value)
    assert text in str(caught.value)
    assert "fix: " in str(caught.value)


def test_bad_inputs():
    layer = make()
    with pytest.raises(InsumShapeError) as caught:
        layer(torch.randn(2, 5, 7, 7, dtype=torch.float64))
    assert str(caught.value) == (
        "pruned_conv2d: 'input' must be a batch with 6 channels\n"
        "  O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k]]\n"
        "                                  ^\n"
        "  expected shape (n, 6, rows, columns); got (2, 5, 7, 7)\n"
        "  fix: pass an input with 6 channels."
    )
    with pytest.raises(InsumShapeError):
        layer(torch.randn(7, 7, dtype=torch.float64))
    with pytest.raises(InsumShapeError, match=r"pruned_conv1d.*\n.*\n.*\n.*expected shape \(n, 6, columns\)"):
        make(ndim=1)(torch.randn(2, 5, 7, dtype=torch.float64))
    with pytest.raises(
        InsumShapeError, match=r"pruned_conv3d(.|\n)*\(n, 6, depth, rows, columns\); got \(1, 1, 6, 7, 7\)"
    ):
        make(ndim=3)(torch.randn(6, 7, 7, dtype=torch.float64)[None])
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
@each_kind
def test_no_channels(ndim, channels):
    layer = KINDS[ndim](*channels, 3)
    y = layer(torch.randn(2, channels[0], *(5,) * ndim))
    assert torch.equal(y, layer.bias.view(-1, *(1,) * ndim).expand(2, -1, *(3,) * ndim))
