"""What every layer promises, as tests that a subclass inherits: it says how to make the layer, and what is its oracle.

    class TestSparseLinear(LayerCase):
        make = staticmethod(lambda options: layers.SparseLinear(5, 4, density=0.5, options=options))
        inputs, sizes = batch(5)

        def oracle(self, layer, x):
            weight = layer.weight.new_zeros(4, 5).masked_scatter(layer.mask, layer.weight)
            return functional.linear(x, weight, layer.bias)

`tests/layers/every_layer.py` gathers all cases for tests that are about something else.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim
from torch.func import functional_call
from torch.fx import GraphModule
from torch.nn.utils import parametrize

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumError
from insum_nn.layers.swap import swap
from insum_nn.testing.tolerances import assert_matches

__all__ = [
    "RECIPES",
    "Called",
    "Inputs",
    "LayerCase",
    "batch",
    "emptied",
    "foreign",
    "on_meta",
    "real",
    "reset",
    "whole",
]
__all__ += ["with_parameters"]

Inputs = tuple[Tensor, ...]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What reads a value on the host, or makes as many entries as values say: CUDA graphs have none of it.
READ_ON_THE_HOST = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select")


def real(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, below: int, *shape: int) -> Tensor:
    return torch.randint(0, max(1, below), shape, generator=torch.Generator().manual_seed(seed))


def batch(*widths: int | tuple[int, ...]) -> tuple[Any, tuple[Mapping[int, str], ...]]:
    """Inputs (n, ..) that share their first dimension, and the names of their free sizes."""
    shapes = [width if isinstance(width, tuple) else (width,) for width in widths]

    def inputs(n: int) -> Inputs:
        return tuple(real(at, n, *shape) for at, shape in enumerate(shapes))

    return staticmethod(inputs), ({0: "batch"},) * len(widths)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, with a gap after each, and the first two axes swapped in memory."""
    wide = torch.stack([tensor, tensor], -1)
    return (wide if tensor.ndim < 2 else wide.transpose(0, 1).contiguous().transpose(0, 1))[..., 0]


class Called(nn.Module):
    """A layer, and how it is called with tensors."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.layer, *inputs)


def _plain(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return layer(*inputs)  # type: ignore[no-any-return]


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def with_parameters(module: nn.Module, inputs: Inputs) -> tuple[Callable[..., Tensor], Inputs]:
    """The module as a function of its floating-point inputs and of its parameters, and these."""
    named = dict(module.named_parameters())
    floating = [at for at, tensor in enumerate(inputs) if tensor.is_floating_point()]

    def run(*values: Tensor) -> Tensor:
        given = list(inputs)
        for at, value in zip(floating, values, strict=False):
            given[at] = value
        return functional_call(module, dict(zip(named, values[len(floating) :], strict=True)), tuple(given))

    values = [*(inputs[at] for at in floating), *named.values()]
    return run, tuple(value.detach().clone().requires_grad_() for value in values)


def results(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of all floating-point inputs and parameters, of a sum that weighs all elements."""
    given = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    output = module(*given)
    named = {f"input {at}": t for at, t in enumerate(given) if t.requires_grad}
    named |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    upstream = torch.linspace(-1, 2, max(1, output.numel()), dtype=torch.float64)[: output.numel()]
    upstream = upstream.reshape(output.shape).to(output)
    grads = torch.autograd.grad(output, [*named.values()], upstream, allow_unused=True, materialize_grads=True)
    return {"output": output.detach(), **dict(zip(named, grads, strict=True))}


def assert_equal(module: nn.Module, expected: nn.Module, inputs: Sequence[Tensor]) -> None:
    """The same numbers, forward and backward; the last bits of a BLAS library may depend on addresses."""
    torch.testing.assert_close(results(module, inputs), results(expected, inputs), rtol=1e-13, atol=1e-13)


# Ways to the values of a state, for modules on the meta device.


def emptied(module: nn.Module, recurse: bool = True) -> nn.Module:
    """`to_empty`, with values that no layer survives using for what its memory would hold."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 1 << 30, device="cpu")

    return module._apply(empty, recurse)


def reset(module: nn.Module) -> nn.Module:
    """What FSDP does with modules that it finds on the meta device."""
    for part in module.modules():
        if [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            emptied(part, recurse=False)
            part.reset_parameters()  # type: ignore[operator]
    return module


def loaded_one_by_one(module: nn.Module, state: dict[str, Tensor]) -> None:
    for key, value in state.items():
        module.load_state_dict({key: value}, strict=False, assign=True)


RECIPES: dict[str, Callable[[nn.Module, dict[str, Tensor]], object]] = {
    "emptied, loaded": lambda module, state: emptied(module).load_state_dict(state),
    "emptied, assigned": lambda module, state: emptied(module).load_state_dict(state, assign=True),
    "assigned": lambda module, state: module.load_state_dict(state, assign=True),
    "assigned, tensor by tensor": loaded_one_by_one,
    "reset, loaded": lambda module, state: reset(module).load_state_dict(state),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    with torch.device("meta"):
        module = make()
    # e3nn makes empty buffers elsewhere.
    assert all(t.is_meta or not t.numel() for t in [*module.parameters(), *module.buffers()])
    return module


def foreign(graph: GraphModule) -> set[str]:
    """The operators of a graph that are not torch's own."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return {str(t) for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace == "insum_nn"}


class LayerCase:
    """The promises of one layer; subclasses whose names begin with `Test` are run.

    Attributes:
        VARIANT: what distinguishes this case from others of its layer.
        sizes: the name of the free extent of each dimension of each input.
        NOT_PROMISED: tests of what the layer does not promise, with reasons; inherited ones are added.
        FAULTS: tests that fail, with reasons: what is to be mended.
        ERRORS: what to change in the inputs -> what the message says.
        AUTOCAST: the dtype of the result under autocast to bfloat16, where it is not that of the oracle.
        ROUNDINGS: how many times the bound of one sum errors may be, where values are rounded between several.
        SWAPPED: whether `swap` puts the layer in the place of its peer.
        ELSEWHERE: whether `tests/layers/every_layer.py` lists the case for tests about something else.
        ONLY: the tests that are run, where others repeat those of another case.
    """

    VARIANT: ClassVar[str] = ""
    sizes: ClassVar[tuple[Mapping[int, str], ...]]
    NOT_PROMISED: ClassVar[Mapping[str, str]] = {}
    FAULTS: ClassVar[Mapping[str, str]] = {}
    ERRORS: ClassVar[Mapping[str, tuple[Callable[..., Sequence[Tensor]], str]]] = {}
    AUTOCAST: ClassVar[torch.dtype | None] = None
    ROUNDINGS: ClassVar[float] = 1
    SWAPPED: ClassVar[bool] = False
    ELSEWHERE: ClassVar[bool] = True
    ONLY: ClassVar[Sequence[str]] = ()
    call: ClassVar[Callable[..., Tensor]] = staticmethod(_plain)

    def __init_subclass__(cls) -> None:
        for name in dir(cls) if cls.ONLY else ():
            if name.startswith("test_") and name not in cls.ONLY:
                # Which pytest does not collect.
                setattr(cls, name, None)

    def make(self, options: Options) -> nn.Module:
        """The layer."""
        raise NotImplementedError

    def inputs(self, n: int) -> Inputs:
        """The tensors of a call for a batch of this size; the same ones for the same size."""
        raise NotImplementedError

    def peer(self) -> nn.Module | None:
        """A module of another package that computes the same from the same state, if `oracle` does not."""
        return None

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        """The result by dense operators of torch, from the parameters and settings of the layer."""
        raise NotImplementedError

    @classmethod
    def title(cls) -> str:
        return ", ".join(filter(None, (cls.__name__.removeprefix("Test").partition("_")[0], cls.VARIANT)))

    def module(self, options: Options = DEFAULT) -> Called:
        """The layer with its call in float64, with the same weights whatever the options."""
        torch.manual_seed(0)
        return Called(self.make(options), self.call).double()

    def reference(self, module: nn.Module) -> Called:
        """What computes the same by other means in float64, from the numbers of a module."""
        with torch.random.fork_rng(devices=[]):
            peer = self.peer()
        if peer is None:
            return Called(copy.deepcopy(module.get_submodule("layer")).cpu().double(), self.oracle)
        reference = Called(peer, self.call).double()
        reference.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})
        return reference.train(module.training)

    @pytest.fixture(autouse=True)
    def _promises(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        for kind in type(self).__mro__:
            if name in vars(kind).get("NOT_PROMISED", {}):
                pytest.skip(f"not promised: {vars(kind)['NOT_PROMISED'][name]}")
        if name in self.FAULTS:
            request.applymarker(pytest.mark.xfail(strict=True, reason=self.FAULTS[name]))

    def compare(self, found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
        assert found.keys() == wanted.keys()
        # Gradients are sums of like terms, which may cancel in all of one tensor: the shift of a softmax has none.
        largest = max((float(g.abs().max()) for g in [*wanted.values()][1:] if g.numel()), default=1.0)
        for name, want in wanted.items():
            size = float(want.abs().max()) if name == "output" and want.numel() else largest
            kind = "sum" if name == "output" else "gradient"
            try:
                assert_matches(found[name].cpu(), want, dtype=dtype, kind=kind, scale=self.ROUNDINGS * size)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None

    # Numbers.

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_values_and_gradients(self, dtype: torch.dtype, device: torch.device):
        module = self.module().to(device, dtype)
        index = {name: b.dtype for name, b in self.module().named_buffers() if not b.is_floating_point()}
        assert {name: b.dtype for name, b in module.named_buffers() if name in index} == index
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in self.inputs(6)]
        wanted = results(self.reference(module), [t.double() if t.is_floating_point() else t for t in inputs])
        self.compare(results(module, [t.to(device) for t in inputs]), wanted, dtype)

    def test_other_sizes_and_strides(self):
        module = self.module()
        reference = self.reference(module)
        for size in (0, 1, 40):
            inputs = self.inputs(size)
            self.compare(results(module, inputs), results(reference, inputs), torch.float64)
        torch.testing.assert_close(module(*map(strided, inputs)), module(*inputs))
        short = [t if t.is_floating_point() else t.int() for t in inputs]
        torch.testing.assert_close(module(*short), module(*inputs))

    def test_derivatives(self, device: torch.device):
        run, values = with_parameters(self.module().to(device), tuple(t.to(device) for t in self.inputs(4)))
        modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
        # Programs of a GPU that meet in memory add up in any order.
        order = 1e-12 if device.type == "cuda" else 0.0
        assert gradcheck(run, values, fast_mode=True, nondet_tol=order, **modes)
        modes = {"check_batched_grad": True, "check_fwd_over_rev": True}
        assert gradgradcheck(run, values, fast_mode=True, nondet_tol=order, **modes)

    def test_functions_of_torch(self):
        """`vmap` and `grad` of `torch.func`."""
        run, values = with_parameters(self.module(), self.inputs(4))
        values = tuple(value.detach() for value in values)
        twice = tuple(torch.stack([v, 2 * v]) for v in values)
        one_by_one = torch.stack([run(*values), run(*(2 * v for v in values))])
        torch.testing.assert_close(torch.func.vmap(run)(*twice), one_by_one)
        every = tuple(range(len(values)))
        found = torch.func.grad(lambda *v: run(*v).square().sum(), argnums=every)(*values)
        leaves = [value.clone().requires_grad_() for value in values]
        total = run(*leaves).square().sum()
        wanted = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(found, wanted)

    def test_same_bits_each_time(self):
        """In training and evaluation, without gradients, and for each number of threads."""
        module, inputs = self.module(), self.inputs(60)
        threads, once = torch.get_num_threads(), results(module, inputs)
        try:
            for number in (1, 1, 3):
                torch.set_num_threads(number)
                for name, again in results(module, inputs).items():
                    assert torch.equal(again, once[name]), name
        finally:
            torch.set_num_threads(threads)
        for way in (torch.no_grad(), torch.inference_mode()):
            with way:
                assert torch.equal(module.eval()(*inputs), once["output"])
                assert torch.equal(module.train()(*inputs), once["output"])

    def test_autocast(self):
        module = self.module().float()
        inputs = [t.float() if t.is_floating_point() else t for t in self.inputs(6)]
        wanted = results(self.reference(module), [t.double() if t.is_floating_point() else t for t in inputs])
        given = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            output = module(*given)
            assert output.dtype == (self.AUTOCAST or self.reference(module).float()(*inputs).dtype)
        # Products are rounded to bfloat16, whatever the sums are.
        scale = 2 * self.ROUNDINGS * float(wanted["output"].abs().max())
        assert_matches(output.bfloat16(), wanted["output"], dtype=torch.bfloat16, kind="gradient", scale=scale)
        output.float().square().sum().backward()
        assert all(t.grad is None or t.grad.dtype == torch.float32 for t in (*given, *module.parameters()))

    # What is refused.

    def test_errors(self):
        module, inputs = self.module(), self.inputs(6)
        for name, (change, says) in self.ERRORS.items():
            with pytest.raises((InsumError, IndexError, ValueError, RuntimeError, AssertionError), match=says):
                pytest.fail(f"{name} is taken: {module(*change(*inputs)).shape}")

    # State.

    def test_state_and_copies(self):
        module, inputs = self.module(), self.inputs(6)
        state = module.state_dict()
        peer = self.peer()
        assert peer is None or [*Called(peer, self.call).state_dict()] == [*state]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        # `dict` leaves the metadata out.
        for given in (state, dict(state), torch.load(file, weights_only=True)):
            fresh = Called(self.make(DEFAULT), self.call).double()
            assert fresh.load_state_dict(given).missing_keys == []
            assert_equal(fresh, module, inputs)
        layer = module.layer
        whole = io.BytesIO()
        torch.save(layer, whole)
        whole.seek(0)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(whole, weights_only=False)]
        for same in copies:
            assert type(same) is type(layer)
            assert getattr(same, "options", None) == getattr(layer, "options", None)
            assert repr(same) == repr(layer)
            assert_equal(Called(same, self.call), module, inputs)
            tensors = zip(same.state_dict().values(), layer.state_dict().values(), strict=True)
            assert not any(a.data_ptr() == b.data_ptr() for a, b in tensors if a.numel())

    def test_parametrizations(self):
        """A parameter that is computed counts as one that is stored."""
        module, inputs = self.module(), self.inputs(6)
        doubled = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in doubled.parameters():
                parameter *= 2
        for name, _ in [*module.named_parameters()]:
            owner, _, attribute = name.rpartition(".")
            parametrize.register_parametrization(module.get_submodule(owner), attribute, _Doubled())
        torch.testing.assert_close(module(*inputs), doubled(*inputs))

    @pytest.mark.parametrize("fill", RECIPES.values(), ids=RECIPES)
    def test_a_state_fills_what_was_made_on_the_meta_device(self, fill: Callable[..., object]):
        trained = self.module()
        module = on_meta(self.module)
        fill(module, copy.deepcopy(trained.state_dict()))
        assert_equal(module, trained, self.inputs(6))

    def test_reset_parameters(self):
        """As one that was built where it is: equal buffers, and with its parameters equal results."""
        module = reset(on_meta(self.module))
        torch.manual_seed(1)
        built = self.module()
        kept = dict(built.named_buffers())
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, kept[name]), name
        for name, parameter in module.named_parameters():
            assert parameter.isfinite().all(), name
        built.load_state_dict(module.state_dict())
        assert_equal(module, built, self.inputs(6))

    def test_there_and_back(self):
        """Values are lost on the meta device, as everywhere; what is no value of the state is not."""
        module, inputs = self.module(), self.inputs(6)
        trained = copy.deepcopy(module)
        emptied(module.to("meta"))
        module.load_state_dict(trained.state_dict())
        assert_equal(module, trained, inputs)

    def test_results_on_the_meta_device(self):
        inputs = self.inputs(6)
        out = on_meta(self.module)(*(t.to("meta") for t in inputs))
        assert out.is_meta
        assert out.shape == self.module()(*inputs).shape

    def test_swap(self):
        if not self.SWAPPED:
            pytest.skip("nothing that `swap` finds")
        module, inputs = self.module(), self.inputs(6)
        model: Any = self.reference(module).eval()
        parameters = [*model.parameters()]
        assert len(swap(model).swapped) == 1
        assert type(model.layer) is type(module.layer)
        assert not model.layer.training
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        self.compare({"output": model(*inputs).detach()}, {"output": module(*inputs).detach()}, torch.float64)

    # Text.

    def test_the_statement_is_printed_once(self):
        whole: Any = self.module().layer
        if self.SWAPPED:
            assert repr(whole).startswith(repr(self.peer()).removesuffix(")"))
        for layer in [whole] if hasattr(whole, "expression") else whole:
            text = repr(layer)
            lines = [line.strip() for line in text.splitlines()]
            assert lines[0].startswith(type(layer).__name__)
            assert layer.extra_repr() in text
            for statement in layer.expression.splitlines():
                assert lines.count(statement) == 1, text
                assert statement not in layer.extra_repr()

    # Graphs.

    def test_compiled(self):
        """Without a break, one graph of torch's operations for all sizes, values and gradients of eager calls."""
        # All cases share one class, whose forward is compiled for a few modules only.
        torch._dynamo.reset()
        module, graphs = self.module(), list[GraphModule]()

        def keep(graph: GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        compiled: Any = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            # No width of a layer is one of these: of two sizes that are equal, a trace makes one.
            for size in (10, 7, 13):
                inputs = [x.requires_grad_() if x.is_floating_point() else x for x in self.inputs(size)]
                leaves = [*module.parameters(), *(x for x in inputs if x.requires_grad)]
                want, got = module(*inputs), compiled(*inputs)
                torch.testing.assert_close(got, want)
                seed = torch.randn_like(want)
                torch.testing.assert_close(
                    torch.autograd.grad(got, leaves, seed, allow_unused=True, materialize_grads=True),
                    torch.autograd.grad(want, leaves, seed, allow_unused=True, materialize_grads=True),
                )
        assert len(graphs) == 2
        assert not set.union(*map(foreign, graphs))
        if {0: "voxels"} not in self.sizes:
            targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
            assert not {target.split(".")[1] for target in targets if "." in target}.intersection(READ_ON_THE_HOST)

    def test_exported_graphs_take_any_size(self):
        """Below and above every threshold that chooses between ways of computing."""
        module = self.module()
        # In one of two ways by turns: a strict export traces as `torch.compile` does.
        strict = len(self.title()) % 2 == 0
        free = {size: Dim(size) for sizes in self.sizes for size in sizes.values()}
        named = tuple({axis: free[size] for axis, size in sizes.items()} for sizes in self.sizes)
        inferred = tuple(dict.fromkeys(sizes, Dim.AUTO) for sizes in self.sizes)
        shapes = (named if strict else inferred,)
        program = torch.export.export(module, self.inputs(6), dynamic_shapes=shapes, strict=strict)
        bounds = [b for symbol, b in program.range_constraints.items() if str(symbol).startswith("s")]
        assert len(bounds) == len(free), "a size was fixed"
        assert all(bound.upper > 2**31 for bound in bounds), "a size was limited"
        for size in (1, 3, 300):
            inputs = self.inputs(size)
            torch.testing.assert_close(program.module()(*inputs), module(*inputs))

    def test_traced_graphs_take_any_size(self):
        """`torch.jit.trace`, as the peers' layers take it: saved and loaded, trained."""
        # Said of e3nn's own checks of shapes too.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        module, buffer = self.module(), io.BytesIO()
        with torch.no_grad():
            assert torch.jit.trace(module, self.inputs(6)).graph is not None
        traced = torch.jit.trace(module, self.inputs(6))
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        for run in (traced, torch.jit.load(buffer)):
            for size in (1, 3, 300):
                inputs = self.inputs(size)
                torch.testing.assert_close(run(*inputs), module(*inputs))
        torch.testing.assert_close(results(traced, self.inputs(9)), results(module, self.inputs(9)))
