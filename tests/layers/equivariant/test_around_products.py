"""What stands around tensor products, against e3nn's modules: values, gradients of two orders, state, scripts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn")

import e3nn.util.jit
from e3nn import nn as e3nn_nn
from e3nn import o3

from insum_nn.layers.equivariant.checks import InputError
from insum_nn.layers.equivariant.gate import Gate
from insum_nn.layers.equivariant.linear import Linear
from insum_nn.layers.equivariant.spherical_harmonics import SphericalHarmonics
from insum_nn.models.nequip import plain_e3nn
from tests.device_calls import device_calls
from tests.double import double

__all__ = ["double"]

silu = nn.functional.silu


@pytest.fixture(autouse=True)
def _plain(double: None):
    torch.manual_seed(0)
    with plain_e3nn():
        yield


LINEAR: dict[str, tuple[str, str, dict[str, Any]]] = {
    "two degrees": ("8x0e + 4x1o", "2x0e + 8x1o", {}),
    "equal multiplicities": ("4x0e + 4x1o + 4x2e", "4x2e + 4x0e + 4x1o", {}),
    "parts of entries": ("32x0e + 64x0e + 64x1o + 32x1o", "16x0e + 5x0e + 64x1o", {"biases": True}),
    "biases of some": ("32x0e + 16x0e + 5x1o", "16x0e + 5x0e + 64x1o", {"biases": [False, True, False]}),
    "chosen paths": ("4x0e + 4x0e", "4x0e + 4x0e", {"instructions": [(0, 0), (1, 1)]}),
    "no path": ("4x0e", "4x1o", {}),
    "one product of scalars": ("4x0e", "3x0e", {}),
    "columns without a path": ("4x1o + 2x0e", "4x1o + 3x1e + 0x2e + 2x0e", {}),
    "weights of samples": ("16x0e + 16x2e", "16x2e + 0x1o + 3x0e", {"shared_weights": False}),
    "weights from outside": ("3x0e + 2x1o", "2x1o + 2x0e", {"internal_weights": False}),
    "channels": ("4x0e", "4x0e", {"f_in": 2, "f_out": 3}),
    "by paths": ("3x0e + 4x0e + 4x1o", "4x1o + 3x0e", {"path_normalization": "path"}),
}


def derivatives(module: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The value, first derivatives, and derivatives of a sum of them; 0 where there is none."""
    leaves = [*inputs, *(module.parameters() if isinstance(module, nn.Module) else ())]
    value = module(*inputs)
    if not value.requires_grad:
        return [value]
    first = torch.autograd.grad(value.sin().sum(), leaves, create_graph=True, allow_unused=True)
    first = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, first, strict=True)]
    total = sum(((g + 0.3).square().sum() for g in first), value.sum())
    second = torch.autograd.grad(total, leaves, allow_unused=True)
    return [value, *first, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, second, strict=True))]


def check_same(ours: nn.Module, peer: nn.Module, inputs: Sequence[Tensor]) -> None:
    for own, other in zip(derivatives(ours, inputs), derivatives(peer, inputs), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


def check_state(ours: nn.Module, peer: nn.Module) -> None:
    state = peer.state_dict()
    assert list(ours.state_dict()) == list(state)
    ours.load_state_dict(state)
    peer.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("batch", [(), (7,), (2, 3)])
def test_linear(name: str, batch: tuple[int, ...]):
    irreps_in, irreps_out, options = LINEAR[name]
    if name == "weights of samples" and not batch:
        batch = (1,)
    peer = o3.Linear(irreps_in, irreps_out, **options)
    if isinstance(peer.bias, nn.Parameter):
        nn.init.normal_(peer.bias)
    own = Linear(irreps_in, irreps_out, **options)
    check_state(own, peer)
    channels = (2,) if name == "channels" else ()
    inputs = [torch.randn(*batch, *channels, peer.irreps_in.dim, requires_grad=True)]
    if not peer.internal_weights:
        shape = (peer.weight_numel,) if peer.shared_weights else (*batch, peer.weight_numel)
        inputs.append(torch.randn(shape, requires_grad=True))
    taken = Linear.from_e3nn(peer)
    assert taken.weight is peer.weight
    for ours in (own, taken):
        assert isinstance(ours, o3.Linear)
        check_same(ours, peer, inputs)


def other_order(x: Tensor, irreps: o3.Irreps) -> Tensor:
    """From (copies, components) to (components, copies)."""
    parts = [x[..., own].unflatten(-1, (mul, ir.dim)) for own, (mul, ir) in zip(irreps.slices(), irreps, strict=True)]
    return torch.cat([part.mT.flatten(-2) for part in parts], -1)


@pytest.mark.parametrize("name", ["two degrees", "parts of entries", "columns without a path", "by paths"])
def test_linear_in_the_other_order(name: str):
    irreps_in, irreps_out, options = LINEAR[name]
    peer = o3.Linear(irreps_in, irreps_out, **options)
    x = torch.randn(7, peer.irreps_in.dim, requires_grad=True)
    given, wanted = other_order(x, peer.irreps_in).detach().requires_grad_(), peer(x)
    for layouts in (("ir_mul", "mul_ir"), ("mul_ir", "ir_mul"), ("ir_mul", "ir_mul")):
        ours = Linear(irreps_in, irreps_out, layout_in=layouts[0], layout_out=layouts[1], **options)
        ours.load_state_dict(peer.state_dict())
        read = given if layouts[0] == "ir_mul" else x
        result = wanted if layouts[1] == "mul_ir" else other_order(wanted, peer.irreps_out)
        torch.testing.assert_close(ours(read), result)
        # e3nn's code, which graphs hold.
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(read), result)
        if layouts[0] == "ir_mul":
            (own,) = torch.autograd.grad(ours(read).sin().sum(), read)
            (other,) = torch.autograd.grad(wanted.sin().sum(), x, retain_graph=True)
            torch.testing.assert_close(own, other_order(other, peer.irreps_in))
    with pytest.raises(InputError, match="layout_in is 'mul'"):
        Linear(irreps_in, irreps_out, layout_in="mul")


def test_linear_says_what_runs():
    assert (
        Linear("4x0e + 4x1o", "4x0e + 4x1o").expression
        == "Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]"
    )
    assert Linear("4x0e", "3x0e").expression == ""
    # Multiplicities of the input that have a divisor in common are parts of equal size.
    assert len(Linear("64x0e + 32x1o", "8x0e + 8x1o").expression.splitlines()) == 1
    assert len(Linear("6x0e + 4x1o", "8x0e + 8x1o").expression.splitlines()) == 2


GATES: dict[str, tuple[Any, ...]] = {
    "even and odd": ("4x0e + 3x0o", [silu, torch.tanh], "6x0e", [silu], "2x1o + 4x2e"),
    "one activation": ("16x0o", [torch.tanh], "32x0o", [torch.tanh], "16x1e + 16x1o"),
    "no gates": ("4x0e", [silu], "", [], ""),
    "no scalars": ("", [], "2x0e", [None], "2x1o"),
    "not in order": (
        "4x0e + 2x0o",
        [None, torch.abs],
        "3x0e + 4x0o",
        [torch.sigmoid, torch.tanh],
        "2x1o + 1x0e + 4x2e",
    ),
    "two activations of one irrep": ("4x0e + 2x0e", [silu, torch.sigmoid], "2x0e", [silu], "2x1o"),
}


@pytest.mark.parametrize("name", GATES)
def test_gate(name: str):
    peer = e3nn_nn.Gate(*GATES[name])
    own = Gate(*GATES[name])
    check_state(own, peer)
    x = torch.randn(2, 5, peer.irreps_in.dim, requires_grad=True)
    for ours in (own, Gate.from_e3nn(peer)):
        assert isinstance(ours, e3nn_nn.Gate)
        assert (ours.irreps_in, ours.irreps_out) == (peer.irreps_in, peer.irreps_out)
        check_same(ours, peer, [x])
    # The module that it was made of is as it was.
    assert type(peer.mul) is o3.ElementwiseTensorProduct


HARMONICS: dict[str, tuple[Any, ...]] = {
    "one degree": (4, True),
    "range": ([0, 1, 2, 3, 4, 5], True, "norm"),
    "component": ("0e + 1o + 2e", True, "component"),
    "pseudovector": ("1e + 2e", False, "component"),
    "repeated": ([2, 0, 2], False),
    "constant": (0, True),
    "vector": ([1], True, "norm"),
    "high": ([0, 9], True),
}


@pytest.mark.parametrize("name", HARMONICS)
def test_spherical_harmonics(name: str):
    peer = o3.SphericalHarmonics(*HARMONICS[name])
    x = torch.randn(2, 5, 3, requires_grad=True)
    for ours in (SphericalHarmonics(*HARMONICS[name]), SphericalHarmonics.from_e3nn(peer)):
        assert ours.irreps_out == peer.irreps_out
        check_same(ours, peer, [x])
    check_state(ours, peer)


def some() -> list[tuple[nn.Module, nn.Module]]:
    linear, gate = LINEAR["parts of entries"], GATES["even and odd"]
    pairs = [
        (Linear(linear[0], linear[1], **linear[2]), o3.Linear(linear[0], linear[1], **linear[2])),
        (Gate(*gate), e3nn_nn.Gate(*gate)),
        (SphericalHarmonics(2, True), o3.SphericalHarmonics(2, True)),
    ]
    for ours, peer in pairs:
        peer.load_state_dict(ours.state_dict())
    return pairs


def columns(module: Any) -> int:
    return module.irreps_in.dim  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", range(3))
def test_scripted(at: int):
    ours, peer = some()[at]
    x = torch.randn(5, columns(peer))
    scripted = e3nn.util.jit.script(copy.deepcopy(ours))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    for other in (scripted, torch.jit.load(file)):
        torch.testing.assert_close(other(x), peer(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [Linear, Gate, SphericalHarmonics])
def test_refuses_other_modules(kind: Any):
    with pytest.raises(InputError, match=r"from_e3nn takes .*e3nn\.(o3|nn)\.\w+, got torch"):
        kind.from_e3nn(nn.Linear(2, 2))


def launches(module: nn.Module, x: Tensor) -> int:
    """Of a step as with forces: the value, a gradient by the input, and the gradient of both by everything."""

    def step() -> None:
        value = module(x)
        (force,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        torch.autograd.grad(value.square().sum() + force.square().sum(), [x, *module.parameters()])

    with device_calls():
        step()
    with device_calls() as calls:
        step()
    # What a kernel that is not run would have written is filled with zeros.
    return calls.total - calls.launches["zero_"] + calls.kernels


def test_few_launches_on_a_gpu():
    irreps = "16x0e + 16x0o + 16x1e + 16x1o + 16x2e"
    for ours, peer, most in [
        (Linear(irreps, irreps), o3.Linear(irreps, irreps), 0.2),
        (Gate("16x0e", [silu], "32x0e", [silu], "16x1e + 16x1o"), None, 0.6),
        (SphericalHarmonics("0e + 1o + 2e", False), o3.SphericalHarmonics("0e + 1o + 2e", False), 0.3),
    ]:
        peer = e3nn_nn.Gate("16x0e", [silu], "32x0e", [silu], "16x1e + 16x1o") if peer is None else peer
        x = torch.randn(7, columns(peer), dtype=torch.float32, requires_grad=True)
        own, other = launches(ours.float(), x), launches(peer.float(), x)
        assert own <= most * other, (type(ours).__name__, own, other)
