"""MACE's symmetric contraction, against dense sums in float64 and, where it is installed, against MACE's own."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn")

from insum_nn import swap
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumError, MissingExtraError
from insum_nn.layers import SymmetricContraction
from insum_nn.layers.equivariant.adoption import o3


class Contraction(nn.Module):
    """One output of `SymmetricContraction` below, with the names that MACE gives to what it holds."""

    def __init__(self, dim: int, components: int, channels: int, elements: int, paths: Sequence[int]) -> None:
        super().__init__()
        self.correlation = len(paths)
        weights = []
        for order in range(1, self.correlation + 1):
            shape = (*([dim] if dim > 1 else []), *[components] * order, paths[order - 1])
            matrix = torch.randn(shape, dtype=torch.float64) * (torch.rand(shape) < 0.3)
            if paths[order - 1] > 2:
                # Paths that depend on others, once factors are exchanged.
                matrix[..., 2] = matrix[..., 0].transpose(-1, -2) - 2 * matrix[..., 1] if order > 1 else matrix[..., 0]
            self.register_buffer(f"U_matrix_{order}", matrix)
            weights.append(nn.Parameter(torch.randn(elements, paths[order - 1], channels, dtype=torch.float64)))
        self.weights_max = weights[-1]
        self.weights = nn.ParameterList(weights[-2::-1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = 0
        for order in range(1, self.correlation + 1):
            matrix = self.get_buffer(f"U_matrix_{order}")
            matrix = matrix.reshape(-1, *[x.shape[2]] * order, matrix.shape[-1])
            weight = self.weights_max if order == self.correlation else self.weights[self.correlation - 1 - order]
            names = "ijkl"[:order]
            features = ",".join(f"nc{name}" for name in names)
            total = total + torch.einsum(f"m{names}q,{features},zqc,nz->ncm", matrix, *[x] * order, weight, y)
        return total.flatten(1)


class Peer(nn.Module):
    """The sums of MACE's paper, dense."""

    def __init__(self, dims: Sequence[int], *shape: int, paths: Sequence[int] | Sequence[Sequence[int]]) -> None:
        super().__init__()
        components, channels, elements = shape
        self.irreps_in, self.irreps_out = f"{channels} x {components}", f"{channels} x {[*dims]}"
        each = [paths] * len(dims) if isinstance(paths[0], int) else paths
        parts = [Contraction(d, components, channels, elements, p) for d, p in zip(dims, each, strict=True)]
        self.contractions = nn.ModuleList(parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([contraction(x, y) for contraction in self.contractions], dim=-1)


Peer.__module__, Peer.__qualname__ = "mace.modules.symmetric_contraction", "SymmetricContraction"


def peer(dims: Sequence[int] = (1, 3), *shape: int, paths: Any = (1, 3, 4)) -> Peer:
    torch.manual_seed(0)
    return Peer(dims, *(shape or (4, 5, 3)), paths=paths)


def inputs(module: Any, nodes: int) -> tuple[Tensor, Tensor]:
    weight, matrix = module.contractions[0].weights_max, module.contractions[0].U_matrix_1
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(nodes, weight.shape[2], matrix.shape[-2], generator=generator, dtype=torch.float64)
    elements = torch.randint(weight.shape[0], (nodes,), generator=generator)
    return x.to(weight.dtype), nn.functional.one_hot(elements, weight.shape[0]).to(weight.dtype)


def outcome(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """The output, forces, and what training by both takes: also with respect to forces."""
    leaf = x.clone().requires_grad_()
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    out = module(leaf, y)
    (force,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    # The second mixes the output and its gradient.
    second = torch.autograd.grad((force * force).sum() + (out * force.sum()).sum(), [leaf, *weights])
    return [out, force, *second]


def assert_equal(ours: nn.Module, theirs: nn.Module, nodes: int = 7, tolerance: float = 1e-10) -> None:
    found, wanted = (outcome(module, *inputs(theirs, nodes)) for module in (ours, theirs))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max() + 1))


CASES: dict[str, Any] = {
    "two outputs": {},
    "of one order": {"paths": (3,)},
    "of two": {"paths": (2, 3)},
    "of four": {"paths": (1, 1, 3, 2)},
    "of unequal orders": {"paths": ((1, 2, 3), (2, 2))},
    "one output": {"dims": (5,)},
}


@pytest.mark.parametrize("nodes", [0, 1, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_derivatives(case: Any, nodes: int):
    theirs = peer(**case)
    if nodes == 0:
        x, y = inputs(theirs, 0)
        assert SymmetricContraction.from_mace(theirs)(x, y).shape == theirs(x, y).shape
    else:
        assert_equal(SymmetricContraction.from_mace(theirs), theirs, nodes)


def test_dependent_paths_have_no_terms():
    theirs = peer((1,), 5, 2, 2, paths=(1, 3, 3))
    ours = SymmetricContraction.from_mace(theirs)
    assert ours._R.shape == (5, 7)
    # Products of features in another order are one term.
    symmetric = {tuple(sorted(i)) for i in theirs.contractions[0].U_matrix_3[..., 0].nonzero().tolist()}
    assert len(symmetric) < int((theirs.contractions[0].U_matrix_3[..., 0] != 0).sum())
    assert f"{len(ours._V)} terms" in repr(ours)


def test_it_is_swapped_and_keeps_its_state():
    theirs = peer()
    model = nn.ModuleDict({"product": copy.deepcopy(theirs)})
    parameters = [*model.parameters()]
    assert [row.detail for row in swap(model).swapped] == ["SymmetricContraction"]
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == [f"product.{key}" for key in theirs.state_dict()]
    assert_equal(model["product"], theirs)


def test_a_swap_is_undone():
    product = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "3x0e", "2x0e + 1x1o")
    model = nn.ModuleDict({"contraction": peer().float(), "product": product, "dense": nn.Linear(4, 4)})
    kinds, x, y = [type(layer) for layer in model.children()], torch.randn(4, 5), torch.eye(3)[[0, 2, 1, 1]]
    report = swap(model, block_sparse={"dense": {"density": 0.5, "block_shape": 2}})
    model.double().eval()
    with torch.no_grad():
        model["product"].weight += 1
    # What is assigned is not what the layers before share.
    model["product"].load_state_dict({k: v.clone() for k, v in model["product"].state_dict().items()}, assign=True)
    features, elements = torch.randn(4, 5, 4).double(), y.double()
    wanted = model["contraction"](features, elements), model["product"](x.double(), y.double())
    state = model.state_dict()
    assert report.undo() is model
    assert [type(layer) for layer in model.children()][:2] == kinds[:2]
    assert type(model["dense"]).__name__ == "BlockSparseLinear"
    assert list(model.state_dict()) == list(state)
    assert not model["product"].training
    torch.testing.assert_close(model["contraction"](features, elements), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model["product"](x.double(), y.double()), wanted[1])
    alone = swap(product)
    assert alone.model is not product
    assert alone.undo() is product


def test_mace_does_not_lose_a_swap():
    """Its `extract_model` reads the correlation so."""
    model = nn.ModuleDict({"product": peer()})
    report = swap(model)
    with pytest.raises(InsumError, match="the swap would be lost"):
        len(model["product"].contractions[0].weights)
    assert len(report.undo()["product"].contractions[0].weights) == 2


def test_a_state_of_other_matrices():
    torch.manual_seed(3)
    other = Peer((1, 3), 4, 5, 3, paths=(1, 3, 4))
    ours = SymmetricContraction.from_mace(peer())
    ours.load_state_dict(other.state_dict())
    assert_equal(ours, other)


def test_copies():
    theirs = peer()
    ours = SymmetricContraction.from_mace(copy.deepcopy(theirs))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for copied in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert_equal(copied, theirs)
        # Its tables follow its own state.
        copied.load_state_dict(Peer((1, 3), 4, 5, 3, paths=(1, 3, 4)).state_dict())
    assert_equal(ours, theirs)


def test_options():
    theirs = peer()
    ours = SymmetricContraction.from_mace(theirs, options=Options(deterministic=True))
    assert_equal(ours, theirs)
    ours.options = Options(accumulate="storage")
    assert ours.options == Options(accumulate="storage")
    assert_equal(ours, theirs)
    assert "486" not in str(ours.explain(*inputs(theirs, 3)))
    assert ours.expression.splitlines()[1] in str(ours.explain(*inputs(theirs, 3)))


def test_what_does_not_fit():
    theirs = peer()
    x, y = inputs(theirs, 5)
    ours = SymmetricContraction.from_mace(theirs)
    for a, b in ((x[:, :4], y), (x[..., :3], y), (x, y[:4]), (x, y[:, :2]), (x, y.clone().requires_grad_()), (x[0], y)):
        with pytest.raises(InsumError, match="features or elements do not fit"):
            ours(a, b)


def test_without_mace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "mace", None)
    with pytest.raises(MissingExtraError, match="pip install mace-torch"):
        SymmetricContraction("2x0e", "2x0e", 3, num_elements=2)


# MACE's own class.


@pytest.fixture
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("correlation", [1, 2, 3])
@pytest.mark.parametrize("out", ["4x0e", "4x0e + 4x1o", "4x1o + 4x2e"])
def test_against_mace(out: str, correlation: int, float64: None):
    mace = pytest.importorskip("mace.modules.symmetric_contraction")
    torch.manual_seed(0)
    arguments = o3.Irreps("4x0e + 4x1o + 4x2e"), o3.Irreps(out), correlation
    theirs = mace.SymmetricContraction(*arguments, num_elements=3)
    ours = SymmetricContraction(*arguments, num_elements=3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_equal(ours, theirs)
    # TorchScript takes MACE's own code.
    x, y = inputs(theirs, 3)
    torch.testing.assert_close(torch.jit.script(ours)(x, y), theirs(x, y))


def test_against_mace_in_float32():
    mace = pytest.importorskip("mace.modules.symmetric_contraction")
    torch.manual_seed(0)
    irreps = "+".join(f"8x{degree}{'eo'[degree % 2]}" for degree in range(4))
    theirs = mace.SymmetricContraction(o3.Irreps(irreps), o3.Irreps("8x0e + 8x1o"), 3, num_elements=2)
    ours = SymmetricContraction.from_mace(theirs)
    assert "486 terms" in repr(ours)
    assert_equal(ours, theirs, tolerance=1e-5)
