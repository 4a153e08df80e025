from __future__ import annotations

import io
import itertools
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

e3nn = pytest.importorskip("e3nn")

from e3nn import o3  # noqa: E402
from e3nn.util.test import assert_equivariant  # noqa: E402

from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumShapeError  # noqa: E402
from insum_nn.layers.equivariant.checks import InputError  # noqa: E402
from insum_nn.layers.equivariant.tensor_product import (  # noqa: E402
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorProduct,
    TensorSquare,
)
from insum_nn.structure.irreps import MODES, InstructionError  # noqa: E402
from insum_nn.testing.tolerances import assert_matches  # noqa: E402
from tests.double import double  # noqa: E402
from tests.layers.equivariant.tensor_product_cases import (  # noqa: E402
    MODE_NAMES,
    assert_same_derivatives,
    one_mode,
    random_case,
)

__all__ = ["double"]

IRREP = ("component", "norm", "none")
PATH = ("element", "path", "none")
# Each with each; with weights of samples, whose normalisation is the same, each once.
NORMALISATIONS = {True: [*itertools.product(IRREP, PATH)], False: [*zip(IRREP, PATH, strict=True)]}
WEIGHTED = [
    (mode, weighted) for mode in MODE_NAMES for weighted in (True, False) if weighted or mode not in ("uvw", "u<vw")
]


def weights_of(module: o3.TensorProduct, z: int) -> Tensor:
    return torch.randn(*(() if module.shared_weights else (z,)), module.weight_numel)


def inputs_of(module: o3.TensorProduct, z: int) -> list[Tensor]:
    return [torch.randn(z, module.irreps_in1.dim), torch.randn(z, module.irreps_in2.dim), weights_of(module, z)]


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("mode", "weighted"), WEIGHTED)
def test_every_mode_and_normalisation_is_e3nns(mode: str, weighted: bool, shared: bool):
    case = one_mode(mode, weighted, lmax=1)
    for irrep, path in NORMALISATIONS[shared]:
        options = {
            "irrep_normalization": irrep,
            "path_normalization": path,
            "shared_weights": shared,
            "internal_weights": False,
        }
        ours, peer = TensorProduct(*case.args, **options), o3.TensorProduct(*case.args, **options)
        inputs = inputs_of(peer, 3)
        assert_same_derivatives(ours, peer, inputs, second=(irrep, path) == ("component", "element"))


def peer_computes(case) -> bool:
    """e3nn loses the weights of a path whose output has no copies; such cases have their own test."""
    out = o3.Irreps(case.irreps_out)
    return all(out[row[2]].mul > 0 for row in case.instructions)


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(30))
def test_random_instructions_are_e3nns(seed: int):
    case = random_case(seed)
    assert peer_computes(case)
    draw = random.Random(seed)
    options = {
        "irrep_normalization": draw.choice(IRREP),
        "path_normalization": draw.choice(PATH),
        "shared_weights": draw.random() < 0.5,
        "internal_weights": False,
        "in1_var": [draw.uniform(0.5, 2) for _ in o3.Irreps(case.irreps_in1)],
        "out_var": torch.rand(len(o3.Irreps(case.irreps_out))),
    }
    ours, peer = TensorProduct(*case.args, **options), o3.TensorProduct(*case.args, **options)
    assert_same_derivatives(ours, peer, inputs_of(peer, 4))
    assert torch.equal(ours.output_mask, peer.output_mask)
    assert repr(ours).splitlines()[0] == repr(peer)


def test_weights_of_paths_without_outputs_keep_their_room():
    """The flat weight is the concatenation of all paths' weights, used or not."""
    rows = [(0, 0, 0, "uvu", True), (0, 0, 1, "uvu", True)]
    module = TensorProduct("2x0e", "1x0e", "0x0e+2x0e", rows, path_normalization="none")
    assert module.weight_numel == 4
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    w = torch.tensor([7.0, 7.0, 1.0, 2.0])
    assert_matches(module(x, y, w), x * y * torch.tensor([1.0, 2.0]), dtype=torch.float64, kind="sum")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (FullyConnectedTensorProduct, ("4x0e+2x1o+1x2e", "3x0e+1o", "2x0e+5x1o+1e")),
        (ElementwiseTensorProduct, ("5x1o + 5x1e", "10x1e", ["0e", "0o", "1o"])),
        (ElementwiseTensorProduct, ("3x0e+2x1o", "5x0e")),
        (FullTensorProduct, ("1e + 2e + 3x3o", "1e + 2x2e + 2x3o")),
        (FullTensorProduct, ("2x1o+0e", "1o+0e", [o3.Irrep("0e"), "1o"])),
        (TensorSquare, ("0e + 3x1e + 2e",)),
        (TensorSquare, ("2x0e + 2x1o", "3x0e + 1o + 2x2e")),
    ],
    ids=lambda v: getattr(v, "__name__", str(v))[:40],
)
@pytest.mark.peer
def test_subclasses_are_e3nns(kind: type[TensorProduct], arguments: tuple):
    ours = kind(*arguments)
    peer = getattr(o3, kind.__name__)(*arguments)
    assert isinstance(ours, type(peer))
    assert isinstance(ours, TensorProduct)
    peer.load_state_dict(ours.state_dict())
    inputs = inputs_of(peer, 3)
    if kind is TensorSquare:
        inputs = [inputs[0], inputs[2]]
    if peer.weight_numel == 0:
        inputs = inputs[:-1]
    assert_same_derivatives(ours, peer, inputs)
    assert repr(ours).splitlines()[0] == repr(peer)
    assert ours.expression.splitlines() == [line.strip() for line in repr(ours).splitlines() if " += " in line]


@pytest.mark.parametrize("seed", range(12))
def test_equivariance(seed: int):
    module = TensorProduct(*random_case(seed).args, internal_weights=True, shared_weights=True)
    assert_equivariant(
        module, irreps_in=[module.irreps_in1, module.irreps_in2], irreps_out=[module.irreps_out], tolerance=1e-9
    )


def test_equivariance_check_sees_a_wrong_product():
    module = TensorProduct("1o", "1o", "1e", [(0, 0, 0, "uuu", False)])
    with pytest.raises(AssertionError):
        assert_equivariant(
            lambda x, y: module(x, y) + x,
            irreps_in=[module.irreps_in1, module.irreps_in2],
            irreps_out=[module.irreps_out],
            tolerance=1e-9,
        )


@pytest.mark.parametrize("shared", [True, False])
def test_batch_dimensions_broadcast(shared: bool):
    module = FullyConnectedTensorProduct("2x0e+1o", "1o+0e", "0e+1o", shared_weights=shared, internal_weights=False)
    x, y = module.irreps_in1.randn(2, 1, 4, -1), module.irreps_in2.randn(3, 1, -1)
    w = torch.randn(module.weight_numel) if shared else torch.randn(2, 1, 1, module.weight_numel)
    z = module(x, y, w)
    assert z.shape == (2, 3, 4, module.irreps_out.dim)
    flat = [t.expand(2, 3, 4, -1).reshape(24, -1) for t in (x, y)]
    spread = w if shared else w.expand(2, 3, 4, -1).reshape(24, -1)
    assert_matches(z.reshape(24, -1), module(*flat, spread), dtype=torch.float64, kind="sum")
    single = module(x[0, 0, 0], y[0, 0], w if shared else w[:, 0, 0][:1])
    assert_matches(single.reshape(-1), z[0, 0, 0], dtype=torch.float64, kind="sum")


def test_one_weight_for_the_batch():
    module = FullyConnectedTensorProduct("2x0e+1o", "1o+0e", "0e+1o", shared_weights=False)
    x, y, w = module.irreps_in1.randn(5, -1), module.irreps_in2.randn(5, -1), torch.randn(1, module.weight_numel)
    w.requires_grad_()
    one, many = module(x, y, w), module(x, y, w.expand(5, -1).contiguous())
    assert_matches(one, many, dtype=torch.float64, kind="sum")
    grads = [torch.autograd.grad(z.square().sum(), w)[0] for z in (one, many)]
    assert grads[0].shape == (1, module.weight_numel)
    assert_matches(*grads, dtype=torch.float64, kind="gradient")


def test_empty_batches():
    module = FullyConnectedTensorProduct("0e + 1e", "0e + 1e", "0e + 1e")
    assert module(torch.randn(2, 1, 0, 1, 4), torch.randn(1, 2, 0, 3, 4)).shape == (2, 2, 0, 3, 4)
    assert module.right(torch.randn(1, 2, 0, 3, 4)).shape == (1, 2, 0, 3, 4, 4)
    none = FullyConnectedTensorProduct("0e + 1e", o3.Irreps([]), "0e + 1e")
    assert none(torch.randn(1, 2, 4), torch.randn(2, 1, 0)).shape == (2, 2, 4)


def test_lists_of_weights():
    for shared in (True, False):
        module = FullyConnectedTensorProduct(
            "1e + 3x3o", "1e+2e", "1e+3x3o", shared_weights=shared, internal_weights=False
        )
        x, y, w = inputs_of(module, 3)
        views = [v.clone() for v in module.weight_views(w)]
        assert torch.equal(module(x, y, views), module(x, y, w))
        with pytest.raises(InputError, match="the weight has a wrong shape"):
            module(x, y, views[:-1])


def test_views_are_views():
    case = one_mode("uvu", True)
    rows = [(*row[:4], number % 3 != 1) for number, row in enumerate(case.instructions)]
    module = TensorProduct(*case.args[:3], rows)
    with torch.no_grad():
        for number, instruction, view in module.weight_views(yield_instruction=True):
            assert view.shape == instruction.path_shape
            view.fill_(number)
            assert torch.equal(view, module.weight_view_for_instruction(number))
    expected = [torch.full(i.path_shape, float(n)) for n, i in enumerate(module.instructions) if i.has_weight]
    assert torch.equal(module.weight, torch.cat([t.flatten() for t in expected]))
    with pytest.raises(ValueError, match="Instruction 1 has no weights"):
        module.weight_view_for_instruction(1)


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("specialized", [True, False])
def test_state_dicts_go_both_ways(seed: int, specialized: bool):
    modes = [m for m in MODE_NAMES if not MODES[m].pairs] if seed % 2 else MODE_NAMES
    case = random_case(seed, modes)
    options = {"compile_right": bool(seed % 2), "_specialized_code": specialized}
    ours, peer = TensorProduct(*case.args, **options), o3.TensorProduct(*case.args, **options)
    a, b = ours.state_dict(), peer.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in a.items()} == {k: (v.shape, v.dtype) for k, v in b.items()}
    assert all(torch.allclose(a[k], b[k]) for k in a if k != "weight")
    ours.load_state_dict(b)
    assert torch.equal(ours.weight, peer.weight)
    peer.load_state_dict(a)
    nested, other = torch.nn.ModuleDict({"a": ours}), torch.nn.ModuleDict({"a": peer})
    other.load_state_dict(nested.state_dict())
    nested.load_state_dict(other.state_dict())


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(8))
def test_from_e3nn(seed: int):
    peer = o3.TensorProduct(*random_case(seed).args, path_normalization=PATH[seed % 3])
    ours = TensorProduct.from_e3nn(peer.eval())
    assert type(ours) is TensorProduct
    assert not ours.training
    assert ours.weight is peer.weight
    x, y, _ = inputs_of(peer, 3)
    assert_matches(ours(x, y), peer(x, y), dtype=torch.float64, kind="sum")
    assert set(ours.state_dict()) == set(peer.state_dict())


def test_from_e3nn_keeps_the_kind():
    for name in ("FullyConnectedTensorProduct", "FullTensorProduct", "TensorSquare", "ElementwiseTensorProduct"):
        arguments = {"FullyConnectedTensorProduct": ("1o", "1o", "0e"), "TensorSquare": ("2x1o",)}.get(
            name, ("1o", "1o")
        )
        peer = getattr(o3, name)(*arguments)
        ours = TensorProduct.from_e3nn(peer)
        assert type(ours).__name__ == name
        assert repr(ours).splitlines()[0] == repr(peer)


# Modes ----------------------------------------------------------------------------------------------------------------


def test_torchscript():
    module = FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1o", "2x0e+5x1o", shared_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module)
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        loaded = torch.jit.load(io.BytesIO(file.getvalue()))
    for script in (scripted, loaded):
        assert_same_derivatives(script, module, inputs_of(module, 4))
        x, y, w = inputs_of(module, 4)
        torch.testing.assert_close(script.right(y, w), module.right(y, w))
        with pytest.raises(torch.jit.Error, match="Incorrect last dimension for x"):
            script(x[:, 1:], y, w)


def test_inference_first_and_training_later():
    module = FullyConnectedTensorProduct("3x0e+2x1o", "1x0e+1o", "5x1o+7x0e")
    x, y, _ = inputs_of(module, 3)
    with torch.inference_mode():
        expected = module(x, y)
        module.right(y)
    x.requires_grad_()
    z = module(x, y)
    assert torch.equal(z, expected)
    (grad,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None


def test_another_default_device():
    """Static tables are made on the CPU whatever torch's default device is."""
    with torch.device("meta"):
        module = TensorProduct(*one_mode("u<vw", True, lmax=1).args, shared_weights=False)
        assert module.output_mask.is_meta
    inputs = inputs_of(module, 3)
    with torch.device("meta"):
        z = module(*inputs)
    assert torch.equal(z, module(*inputs))


def test_constants_of_an_old_e3nn_are_loaded(tmp_path: Path):
    """e3nn 0.4 loads a file with slices, which torch takes only where it is told so."""
    package = tmp_path / "e3nn"
    package.mkdir()
    torch.save((torch.ones(2), slice(0, 3)), package / "constants.pt")
    for name, text in {
        "__init__": "",
        "nn": "",
        "o3": f"import torch\ntorch.load({str(package / 'constants.pt')!r})",
    }.items():
        (package / f"{name}.py").write_text(text)
    code = "import torch; from insum_nn.layers.equivariant.adoption import o3\n"
    code += "print(o3.__file__, slice in torch.serialization.get_safe_globals())"
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    told = {"PYTHONPATH": paths, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | told, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(package / "o3.py"), "False"], (
        "slices are taken while e3nn is imported, and no longer"
    )


def test_without_e3nn_the_error_names_the_extra():
    code = "import sys\nsys.modules['e3nn'] = None\nimport insum_nn.layers.equivariant.tensor_product"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in done.stderr
    assert "pip install e3nn" in done.stderr


def test_optimizers_train_it():
    module = FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1o", "3x0e+2x1o")
    target = FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1o", "3x0e+2x1o").requires_grad_(False)
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    losses = []
    for _ in range(80):
        x, y, _ = inputs_of(module, 32)
        loss = (module(x, y) - target(x, y)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# Bad input ------------------------------------------------------------------------------------------------------------


def module_and_inputs() -> tuple[TensorProduct, list[Tensor]]:
    module = FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1o", "3x0e", shared_weights=False)
    return module, inputs_of(module, 5)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda t: [t[0][:, 1:], *t[1:]], InputError, r"'x' does not hold the representation 4x0e\+2x1o"),
        (lambda t: [t[0], t[1][:, :-1], t[2]], InputError, "'y' does not hold the representation"),
        (lambda t: [t[0][0, 0], *t[1:]], InputError, "'x' does not hold the representation"),
        (lambda t: [t[0], t[1], t[2][:, 1:]], InputError, "the weight has a wrong shape"),
        (lambda t: [t[0], t[1], t[2][0]], InputError, "the weight has a wrong shape"),
        (lambda t: [t[0], t[1], None], InputError, "the weights are missing"),
        (lambda t: [t[0][:3], *t[1:]], InputError, "batch dimensions of x, y and weight do not broadcast"),
        (lambda t: [t[0], t[1], t[2][:2]], InputError, "do not broadcast"),
        (lambda t: [t[0].float(), *t[1:]], InsumDtypeError, "'y' is torch.float64, 'x' is torch.float32"),
        (lambda t: [t[0].long(), t[1].long(), t[2].long()], InsumDtypeError, "'x' must be floating-point"),
        (lambda t: [t[0], t[1].to("meta"), t[2]], InsumDeviceError, "'y' is on meta, 'x' on cpu"),
    ],
)
def test_bad_inputs(change, kind: type[Exception], message: str):
    module, inputs = module_and_inputs()
    with pytest.raises(kind, match=message) as info:
        module(*change(inputs))
    assert "fix: " in str(info.value)


def test_errors_are_also_the_peers():
    module, inputs = module_and_inputs()
    for error in (AssertionError, RuntimeError, InsumShapeError):
        with pytest.raises(error):
            module(inputs[0][:, 1:], *inputs[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"irrep_normalization": "foo"}, "irrep_normalization is 'foo'"),
        ({"path_normalization": "foo"}, "path_normalization is 'foo'"),
        ({"internal_weights": True, "shared_weights": False}, "internal_weights=True needs shared_weights=True"),
    ],
)
def test_bad_arguments(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        TensorProduct("1o", "1o", "0e", [(0, 0, 0, "uvw", True)], **arguments)


def test_bad_variances_and_irreps_and_instructions():
    with pytest.raises(AssertionError, match="ir1_var must be equal to len"):
        TensorProduct("1o", "1o", "0e", [(0, 0, 0, "uvw", True)], in1_var=[1.0, 2.0])
    with pytest.raises(ValueError, match="Unable to convert"):
        TensorProduct("1x", "1o", "0e", [])
    with pytest.raises(InstructionError, match="do not couple"):
        TensorProduct("1o", "1o", "3e", [(0, 0, 0, "uvw", True)])


def test_old_name_of_the_normalisation():
    with pytest.warns(DeprecationWarning, match="irrep_normalization"):
        module = TensorProduct("1o", "1o", "0e", [(0, 0, 0, "uvw", True)], normalization="norm")
    assert module.instructions[0].path_weight == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("internal", "shared", "expected"),
    [
        (None, None, (True, True)),
        (None, False, (False, False)),
        (None, True, (True, True)),
        (False, None, (False, True)),
        (True, None, (True, True)),
    ],
)
@pytest.mark.peer
def test_who_holds_the_weights(internal: bool | None, shared: bool | None, expected: tuple[bool, bool]):
    rows = [(0, 0, 0, "uvw", True)]
    for kind in (TensorProduct, o3.TensorProduct):
        module = kind("1o", "1o", "0e", rows, internal_weights=internal, shared_weights=shared)
        assert (module.internal_weights, module.shared_weights) == expected
        assert isinstance(module.weight, torch.nn.Parameter) == expected[0]
    unweighted = TensorProduct("1o", "1o", "0e", [(0, 0, 0, "uuu", False)])
    assert not unweighted.internal_weights
    assert unweighted.weight.numel() == 0


def test_visualize():
    matplotlib = pytest.importorskip("matplotlib")
    if e3nn.__version__.startswith("0.4."):
        pytest.skip("e3nn 0.4 draws with a function that matplotlib no longer has")
    matplotlib.use("agg")
    module = FullyConnectedTensorProduct("2x0e+1o", "1o", "0e+1o")
    figure, _ = module.visualize()
    assert figure is not None
    matplotlib.pyplot.close(figure)


def test_explain():
    module, inputs = module_and_inputs()
    statements = module._statements()
    for number, statement in enumerate(statements):
        explained = str(module.explain(*inputs, statement=number))
        assert statement in explained
        assert f"statement: {number + 1} of {len(statements)}" in explained
    assert "not measured" not in str(module.explain(*inputs, measure=True))


@pytest.mark.parametrize("shared", [True, False])
def test_plain_matrices_take_a_short_way(shared: bool, monkeypatch: pytest.MonkeyPatch):
    """What fits at a glance is not checked, broadcast and reshaped; the numbers are those of the long way."""
    module = FullyConnectedTensorProduct("3x0e+2x1o", "1o", "2x0e+4x1o", shared_weights=shared)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(*(() if shared else (5,)), module.weight_numel, generator=generator)
    x, y = torch.randn(5, 9, generator=generator), torch.randn(5, 3, generator=generator)
    expected = module(x[None], y[None], weight if shared else weight[None])[0]
    monkeypatch.setattr(
        sys.modules["insum_nn.layers.equivariant.tensor_product"], "check_inputs", lambda *_: pytest.fail("long")
    )
    assert torch.equal(module(x, y, weight), expected)
    monkeypatch.undo()
    for wrong in ((x.half(), y), (x[:, 1:], y), (x[:3], y), (x.int(), y.int())):
        with pytest.raises((InsumShapeError, InsumDtypeError)):
            module(*wrong, weight)
    with pytest.raises(InputError):
        module(x, y, torch.zeros(()))
