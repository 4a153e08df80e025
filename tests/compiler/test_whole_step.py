"""A step that is rehearsed to its end when its first kernel is missing: nothing is found late, nothing in vain."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import insum_nn
from insum_nn.compiler.kernels import ahead
from insum_nn.compiler.kernels.ahead import UndecidedError
from insum_nn.compiler.kernels.written import WrittenKernels
from insum_nn.compiler.runtime import whole_step
from insum_nn.compiler.runtime.whole_step import call_step
from insum_nn.layers import GCNConv, spconv
from tests.compiler.corpus.statements import DEVICE_TYPE
from tests.compiler.test_background import Launched, launched
from tests.compiler.test_prepare import Sums, operands

__all__ = ["launched"]


Case = tuple[Any, tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def maps_by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of maps are compiled for later maps: no launch of the step waits for them."""
    monkeypatch.setattr(WrittenKernels, "launchers", lambda *_: None)


# It comes before `launched` among the arguments of a test: e3nn asks a device for random numbers.
@pytest.fixture
def potential() -> Case:
    pytest.importorskip("e3nn")
    from insum_nn.models import NequIP

    torch.manual_seed(0)
    model = NequIP([1, 8], cutoff=2.0, num_layers=3, num_features=4, lmax=1, radial_hidden=(8,))
    edges = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    return model, (positions, torch.tensor([8, 1, 1]), *edges)


def train(model: Any, given: tuple[Tensor, ...]) -> None:
    energy, forces = model.energy_and_forces(*given)
    (energy.sum() + forces.square().sum()).backward()


def test_all_kernels_of_a_step_are_found_before_the_first_is_waited_for(potential: Case, launched: Launched):
    model, given = potential
    versions = [each._version for each in (*model.parameters(), *model.buffers(), *given)]
    random = torch.get_rng_state()
    energy, forces = model.energy_and_forces(*given)
    assert len(launched.compiled) > 5
    assert versions == [each._version for each in (*model.parameters(), *model.buffers(), *given)]
    assert torch.equal(random, torch.get_rng_state())
    assert all(each.grad is None for each in model.parameters())
    (energy.sum() + forces.square().sum()).backward()
    assert all(each.grad is not None for each in model.layers.parameters())
    assert launched.compiled.keys() == launched.submitted.keys()
    assert set(launched.submitted.values()) == {0}


def test_without_gradients_of_parameters(potential: Case, launched: Launched):
    model, given = potential
    model.eval()
    _, forces = model.energy_and_forces(*given)
    assert not forces.requires_grad
    assert set(launched.submitted.values()) == {0}
    assert launched.compiled.keys() <= launched.submitted.keys()


def test_a_step_that_somebody_watches_runs_once(potential: Case, launched: Launched):
    model, given = potential
    calls: list[Any] = []
    model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    train(model, given)
    assert len(calls) == 1
    # Calls are rehearsed one by one.
    assert {*launched.submitted.values()} > {0}


class _Plain(nn.Module):
    """Sums over edges, random numbers of three kinds, and state of two."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(32)
        self.seen: list[float] = []

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        self.seen.append(random.random() + float(numpy.random.rand()))
        return nn.functional.dropout(self.norm(self.sums(x * self.scale, *rest)), 0.5) + torch.rand(())


class _UntilItIsGood(nn.Module):
    """Applies its sums until a result is good enough, which one of zeros never is."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self.steps = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _UntilItIsGood:
        found = type(self)()
        found.steps = 1 << 30
        return found

    def forward(self, *given: Tensor) -> Tensor:
        total = self.sums(*given)
        for _ in range(self.steps):
            total = total + self.sums(*given)
        return total


def test_a_loop_that_waits_for_results_ends(launched: Launched, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "_LONGEST_REPETITION", 50)
    model = _UntilItIsGood()
    model(*operands()).sum().backward()
    assert launched.compiled


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def test_state_and_random_numbers_are_those_of_one_call(launched: Launched):
    model, given = _Plain(), operands()
    other = copy.deepcopy(model)
    found: list[Tensor] = []
    for each in (model, other):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        found.append(each(*given))
        found[-1].sum().backward()
    # The second call finds all kernels there, and rehearses nothing. Those of gradients of gradients, which add to what
    # others have written, are found as well.
    assert launched.compiled.keys() <= launched.submitted.keys()
    assert all("out_initial" in code.text for code in launched.submitted.keys() - launched.compiled.keys())
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(state_of(model), state_of(other), rtol=0, atol=0)
    assert model.seen == other.seen
    assert len(model.seen) == 1
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=0)


def fail(*_: Any) -> Any:
    raise ValueError("only in the rehearsal")


def test_an_error_of_the_rehearsal_is_none_of_the_step(
    potential: Case, launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(whole_step, "run_step", fail)
    train(*potential)
    assert launched.compiled


def test_what_is_not_rehearsed_to_the_missing_kernel_is_not_rehearsed_again(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []
    monkeypatch.setattr(whole_step, "run_step", lambda *given: asked.append(given))
    model = nn.Sequential(nn.Linear(16, 16), GCNConv(16, 32), GCNConv(32, 100), GCNConv(100, 16))
    x, edges = torch.randn(30, 16), torch.randint(30, (2, 90))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self) -> Tensor:
            found = self.layers[0](x)
            for layer in list(self.layers)[1:]:
                found = layer(found, edges)
            return found

    Network()().sum().backward()
    assert len(launched.compiled) > 1
    assert len(asked) == 1


def test_a_choice_that_only_the_step_can_make(potential: Case, launched: Launched, monkeypatch: pytest.MonkeyPatch):
    asked = [0]

    def undecided(*given: Any) -> Any:
        asked[0] += 1
        plain(*given)
        if asked[0] < 3:
            raise UndecidedError("it is tried when it runs")

    plain = whole_step.run_step
    monkeypatch.setattr(whole_step, "run_step", undecided)
    train(*potential)
    assert launched.compiled.keys() <= launched.submitted.keys()


class _Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("in the step")


def test_an_error_of_the_step_is_raised(launched: Launched):
    with pytest.raises(ValueError, match="in the step"):
        call_step(_Refusing.forward, _Refusing(), torch.ones(3))
    assert not launched.compiled


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("wrap", [nn.Module.compile, torch.compile])
def test_what_is_compiled_is_not_rehearsed(wrap: Callable[[nn.Module], Any]):
    model = nn.Sequential(nn.Linear(2, 2))
    assert whole_step._is_plain(model)
    compiled = wrap(model[0])
    if compiled is not None:
        model[0] = compiled
    assert not whole_step._is_plain(model)


class _CompilesItself(nn.Module):
    """Compiles its sums when it is called first, after a call without: as functions, or as a graph of operations."""

    def __init__(self, trace: bool) -> None:
        super().__init__()
        self.sums = Sums()
        self.scale = nn.Parameter(torch.ones(()))
        self.trace = trace
        self.compiled: list[Any] = []

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        def scaled(x: Tensor, *rest: Any) -> Tensor:
            return cast(Tensor, self.sums(x * 2, *rest))

        found = self.sums(x * self.scale, *rest)
        function = make_fx(scaled)(x, *rest) if self.trace else scaled
        self.compiled.append(torch.compile(function, backend=self.backend))
        return cast(Tensor, found + self.compiled[-1](x, *rest))

    in_rehearsals: ClassVar[list[bool]] = []

    @classmethod
    def backend(cls, graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        cls.in_rehearsals.append(ahead.rehearsing())
        return graph.forward


@pytest.mark.parametrize("trace", [False, True], ids=["function", "graph"])
def test_what_the_step_compiles_is_compiled_once(trace: bool, launched: Launched, monkeypatch: pytest.MonkeyPatch):
    torch.compiler.reset()
    monkeypatch.setattr(_CompilesItself, "in_rehearsals", [])
    model = _CompilesItself(trace)
    model(*operands()).square().sum().backward()
    assert _CompilesItself.in_rehearsals == [False]
    assert launched.compiled.keys() <= launched.submitted.keys()
    # Later steps compile what is new to them.
    torch.compiler.reset()
    _CompilesItself(trace)(*operands())
    assert _CompilesItself.in_rehearsals == [False, False]


def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def graph_of(function: Callable[..., Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return torch.fx.GraphModule({}, graph)


def test_what_talks_to_other_ranks_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch):
    class Sharded(nn.Linear):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    assert not whole_step._is_plain(nn.Sequential(Sharded(2, 2)))
    unknown, statistics = nn.Sequential(_Plain()), nn.Sequential(nn.SyncBatchNorm(2))
    known = nn.Sequential(GCNConv(2, 2), spconv.SubMConv3d(2, 2, 3), graph_of(torch.relu))
    sending = [graph_of(send) for send in (torch.distributed.all_reduce, torch.ops._c10d_functional.all_reduce.default)]
    assert all(map(whole_step._is_plain, (unknown, statistics, known, *sending)))
    # In a job of several ranks, only of known modules it is known that they send nothing.
    two_ranks(monkeypatch)
    assert [*map(whole_step._is_plain, (unknown, statistics, known, *sending))] == [False, False, True, False, False]


def test_a_potential_of_one_of_several_ranks_is_rehearsed(
    potential: Case, launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    two_ranks(monkeypatch)
    train(*potential)
    assert len(launched.compiled) > 5
    assert launched.compiled.keys() <= launched.submitted.keys()
    assert set(launched.submitted.values()) == {0}


@pytest.mark.usefixtures("launched")
def test_nothing_holds_what_a_call_was_given():
    given = operands()
    alive = weakref.ref(given[2])
    model = _Plain()
    gc.disable()
    try:
        for _ in range(2):
            model(*given).sum()
        del given
        assert alive() is None
    finally:
        gc.enable()


# Networks of others.


class Peers(nn.Module):
    """A network of torch_geometric's layers."""

    def __init__(self) -> None:
        super().__init__()
        library = pytest.importorskip("torch_geometric.nn")
        self.convs = nn.ModuleList(library.GCNConv(a, b) for a, b in ((16, 32), (32, 100), (100, 7)))

    def forward(self, data: Any) -> dict[str, Any]:
        x = data.x
        for conv in self.convs:
            x = nn.functional.dropout(conv(x, data.edge_index).relu(), 0.5, self.training)
        return {"scores": SimpleNamespace(logits=x)}


def of_graphs() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    data = SimpleNamespace(x=torch.randn(30, 16), edge_index=torch.randint(30, (2, 90)))
    return Peers(), lambda model: model(data)["scores"].logits.square().sum()


class UNet(nn.Module):
    """Sparse convolutions down and up, in `spconv.pytorch`'s names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = spconv.SparseSequential(spconv.SubMConv3d(6, 32, 5, indice_key="0"), nn.BatchNorm1d(32))
        self.down = spconv.SparseConv3d(32, 64, 2, 2, indice_key="down")
        self.inner = spconv.SparseSequential(spconv.SubMConv3d(64, 64, 3, indice_key="1"), nn.ReLU())
        self.up = spconv.SparseInverseConv3d(64, 32, 2, indice_key="down")
        self.head = nn.Linear(64, 5)

    def forward(self, x: spconv.SparseConvTensor) -> Tensor:
        kept = self.stem(x)
        found = self.up(self.inner(self.down(kept)))
        return self.head(torch.cat([kept.features, found.features], 1))


def of_voxels() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    sites = torch.unique(torch.randint(0, 16, (300, 3)), dim=0)
    indices = torch.cat([torch.zeros(len(sites), 1), sites], 1).int()

    def loss(model: nn.Module) -> Tensor:
        # What is computed before a network is not its.
        features = torch.randn(len(sites), 6, requires_grad=True).tanh()
        torch.set_autocast_enabled(DEVICE_TYPE, True)
        torch.set_autocast_dtype(DEVICE_TYPE, torch.bfloat16)
        try:
            # The CPU in its place.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(spconv.SparseConvTensor(features, indices, [16, 16, 16], 1)).float().square().sum()
        finally:
            torch.set_autocast_enabled(DEVICE_TYPE, False)

    return UNet(), loss


class Equivariant(nn.Module):
    """Two convolutions over edges as with e3nn, whose energy is differentiated outside."""

    def __init__(self) -> None:
        super().__init__()
        o3 = pytest.importorskip("e3nn.o3")
        self.products, self.linears, self.radial = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for read in ("8x0e", "8x0e+8x1o"):
            outputs = o3.Irreps("8x0e+8x1o" if read == "8x0e" else "8x0e+8x1o+8x0e")
            paths = [(0, 0, 0), (0, 1, 1), (1, 1, 2)][: len(outputs)]
            product = o3.TensorProduct(
                read, "0e+1o", outputs, [(*path, "uvu", True) for path in paths], shared_weights=False
            )
            self.products.append(product)
            self.radial.append(nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, product.weight_numel)))
            self.linears.append(o3.Linear(product.irreps_out, "8x0e+8x1o"))
        self.harmonics = o3.SphericalHarmonics("0e+1o", True)
        self.head = o3.Linear("8x0e+8x1o", "0e")

    def forward(self, positions: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        vectors = positions[edges[1]] - positions[edges[0]]
        lengths = vectors.square().sum(1, keepdim=True)
        harmonics = self.harmonics(vectors)
        for product, radial, linear in zip(self.products, self.radial, self.linears, strict=True):
            found = product(x[edges[1]], harmonics, radial(lengths))
            x = linear(torch.zeros(len(x), found.shape[1]).index_add(0, edges[0], found))
        return self.head(x)


def of_atoms() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    # Rows of a view that are not contiguous, as those of a list of pairs.
    edges, x, positions = torch.randint(9, (41, 2)).T[:, 1:], torch.randn(9, 8), torch.randn(9, 3)

    def loss(model: nn.Module) -> Tensor:
        leaf = positions.clone().requires_grad_()
        energy = model(leaf, x, edges)
        (forces,) = torch.autograd.grad(energy.sum(), leaf, create_graph=True)
        return energy.sum() + forces.square().sum()

    return Equivariant(), loss


Network = Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]


# The networks come before `launched`: e3nn asks a device for random numbers.
@pytest.fixture(params=[of_graphs, of_voxels, of_atoms])
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    model, loss = request.param()
    insum_nn.swap(model)
    return model, loss


def test_a_network_of_others_is_rehearsed(network: Any, launched: Launched):
    model, loss = network
    before = state_of(model)
    hooks = {name: dict(vars(model)[name]) for name in vars(model) if name.endswith("hooks")}
    found = loss(model)
    assert all(each.grad is None for each in model.parameters())
    found.backward()
    assert {name: dict(vars(model)[name]) for name in hooks} == hooks
    assert len(launched.compiled) > 3
    assert launched.compiled.keys() <= launched.submitted.keys()
    assert {launched.submitted[each] for each in launched.compiled} == {0}, "found before the first is waited for"
    vain = launched.submitted.keys() - launched.compiled.keys()
    assert len(vain) <= len(launched.compiled) // 10
    # A call counts its batches once.
    counts = {name: each for name, each in model.state_dict().items() if name.endswith("num_batches_tracked")}
    assert all(each == before[name] + 1 for name, each in counts.items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_rehearsed_without_gradients(launched: Launched, mode: Callable[[], Any]):
    model, loss = of_voxels()
    with mode():
        loss(model.eval())
    assert len(launched.compiled) > 3
    assert launched.compiled.keys() == launched.submitted.keys()
    assert set(launched.submitted.values()) == {0}


def test_a_network_in_parts_that_are_recomputed(launched: Launched):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(GCNConv(a, b) for a, b in ((16, 32), (32, 100), (100, 7)))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for part in self.parts:
                x = torch.utils.checkpoint.checkpoint(part, x, edges, use_reentrant=False, determinism_check="none")
            return x

    Network()(torch.randn(30, 16), torch.randint(30, (2, 90))).square().sum().backward()
    assert launched.compiled.keys() == launched.submitted.keys()
    assert set(launched.submitted.values()) == {0}


def test_under_a_wrapper_the_network_is_found(launched: Launched):
    class Parallel(nn.Module):
        """In place of one that averages gradients over ranks."""

        __module__ = "torch.nn.parallel.distributed"

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *given: Any) -> Any:
            return self.module(*given)

    model, loss = of_voxels()
    loss(Parallel(model)).backward()
    assert set(launched.submitted.values()) == {0}
