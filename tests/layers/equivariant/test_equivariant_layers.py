"""The case of every layer of irreps, against e3nn's layer of the same arguments, or mace's sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn")

import e3nn.nn
from e3nn import o3

from insum_nn import layers
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.models.nequip import plain_e3nn
from tests.layers.equivariant.test_symmetric_contraction import Peer
from tests.layers.layer_case import RECIPES, Called, Inputs, LayerCase, batch, real, whole

_IN, _OTHER, _OUT = "2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o"
_PATHS = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
_CONV = ("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o", _PATHS)


class IrrepsCase(LayerCase):
    """A subclass says how to build the layer from a package that has it."""

    SWAPPED = True
    # e3nn's products under autocast refuse their own coefficients.
    AUTOCAST = torch.bfloat16
    HOME: ClassVar[Any] = o3
    ERRORS: ClassVar[Mapping[str, Any]] = {
        "another width": (
            lambda x, *rest: (x[:, :-1], *rest),
            r"'[xy]' does not hold the representation|'X' has shape|do not fit|invalid input shape|is invalid for",
        ),
        "another dtype": (
            lambda x, *rest: (x.float(), *rest),
            "'([Yy]|weight)' is torch.float64, '[Xx]' is torch.float32|different dtypes: float32, float64",
        ),
    }

    # Errors of a layer of one operand, which other dtypes promote, and which is e3nn's own code where it is checked.
    OF_ONE: ClassVar[Mapping[str, Any]] = {"another width": ERRORS["another width"]}

    build: ClassVar[Callable[..., Any]]

    def make(self, options: Options) -> nn.Module:
        return self.build(layers, options=options)

    def peer(self) -> nn.Module:
        return self.build(self.HOME)

    @pytest.fixture(autouse=True)
    def _plain(self) -> Any:
        with plain_e3nn():
            yield

    def module(self, options: Options = DEFAULT) -> Called:
        with self.exact():
            return super().module(options)

    def reference(self, module: nn.Module) -> Called:
        with self.exact():
            return super().reference(module)

    @staticmethod
    def exact() -> Any:
        """e3nn rounds its coefficients to the default dtype."""
        return _Default(torch.float64)


class _Default:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


class TestFullyConnectedTensorProduct(IrrepsCase):
    inputs, sizes = batch(5, 4)

    build = staticmethod(lambda home, **how: home.FullyConnectedTensorProduct(_IN, _OTHER, _OUT, **how))


class TestFullyConnectedTensorProduct_outside(IrrepsCase):
    VARIANT, ELSEWHERE = "weights of a call", False
    inputs, sizes = batch(5, 4)

    build = staticmethod(
        lambda home, **how: home.FullyConnectedTensorProduct(_IN, _OTHER, _OUT, internal_weights=False, **how)
    )

    @staticmethod
    def call(layer: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return layer(x, y, x.new_ones(layer.weight_numel))


class TestTensorProduct(IrrepsCase):
    VARIANT = "weights of samples"
    inputs, sizes = batch(5, 4, 2)

    build = staticmethod(
        lambda home, **how: home.TensorProduct(_IN, _OTHER, _OUT, _PATHS[:1], shared_weights=False, **how)
    )


class TestTensorProduct_right(IrrepsCase):
    VARIANT = "right"
    inputs, sizes = batch(4)

    @classmethod
    def title(cls) -> str:
        return "TensorProduct.right"

    def build(self, home: Any, **options: Any) -> nn.Module:
        compiled = {"compile_right": True} if home is o3 else {}
        return home.FullyConnectedTensorProduct(_IN, _OTHER, _OUT, **compiled, **options)

    @staticmethod
    def call(layer: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        return layer.right(y)


class TestFullTensorProduct(IrrepsCase):
    inputs, sizes = batch(5, 4)

    build = staticmethod(lambda home, **how: home.FullTensorProduct(_IN, _OTHER, **how))


class TestElementwiseTensorProduct(IrrepsCase):
    inputs, sizes = batch(5, 9)

    build = staticmethod(lambda home, **how: home.ElementwiseTensorProduct(_IN, "3x1o", **how))


class TestTensorSquare(IrrepsCase):
    ERRORS = IrrepsCase.OF_ONE
    inputs, sizes = batch(5)

    build = staticmethod(lambda home, **how: home.TensorSquare(_IN, **how))


class TestLinear(IrrepsCase):
    AUTOCAST = None
    ERRORS = IrrepsCase.OF_ONE
    inputs, sizes = batch(5)

    build = staticmethod(lambda home, **how: home.Linear(_IN, "3x0e+2x1o", biases=True, **how))


class TestGate(IrrepsCase):
    AUTOCAST = None
    ERRORS = IrrepsCase.OF_ONE
    HOME = e3nn.nn
    inputs, sizes = batch(6)
    if e3nn.__version__.startswith("0.4."):
        NOT_PROMISED: ClassVar[Mapping[str, str]] = dict.fromkeys(
            ("test_compiled", "test_exported_graphs_take_any_size"), "Dynamo asks e3nn 0.4 how long an irrep is"
        )

    build = staticmethod(lambda home, **how: home.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o", **how))


class TestSphericalHarmonics(IrrepsCase):
    AUTOCAST = None
    ERRORS: ClassVar[Mapping[str, Any]] = {}
    inputs, sizes = batch(3)

    build = staticmethod(lambda home, **how: home.SphericalHarmonics("0e+1o+2e", True, **how))


class TestFullyConnectedNet(IrrepsCase):
    AUTOCAST = None
    HOME = e3nn.nn
    ERRORS: ClassVar[Mapping[str, Any]] = {}
    NOT_PROMISED: ClassVar[Mapping[str, str]] = {"test_reset_parameters": "layers of e3nn hold the weights"}
    inputs, sizes = batch(5)

    @pytest.mark.parametrize("fill", [fill for name, fill in RECIPES.items() if "reset" not in name])
    def test_a_state_fills_what_was_made_on_the_meta_device(self, fill: Callable[..., object]):
        super().test_a_state_fills_what_was_made_on_the_meta_device(fill)

    build = staticmethod(lambda home, **how: home.FullyConnectedNet([5, 7, 6, 4], nn.functional.silu, 2.0, 3.0, **how))


class TestFullyConnectedNet_activated(TestFullyConnectedNet):
    VARIANT = "an activation at the end"
    ELSEWHERE = False

    build = staticmethod(lambda home, **how: home.FullyConnectedNet([5, 6], torch.tanh, out_act=True, **how))


class TestRadialBasis(LayerCase):
    sizes = ({0: "edges"},)
    ROUNDINGS = 4  # sums of functions that cancel towards the cutoff

    def make(self, options: Options) -> nn.Module:
        return layers.RadialBasis(2.5, 3, 5, options=options)

    def inputs(self, n: int) -> Inputs:
        return (real(0, n).abs() + 0.3,)

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        (r,) = inputs
        x = r / 2.5
        envelope = (1 - 21 * x**5 + 35 * x**6 - 15 * x**7) * (x < 1)
        return math.sqrt(2 / 2.5) * torch.sin(layer.frequencies * r[:, None]) * (envelope / r)[:, None]


class TestTensorProductConv(IrrepsCase):
    SWAPPED = False
    sizes = ({0: "nodes"}, *({0: "edges"},) * 4)

    build = staticmethod(lambda home, **how: home.TensorProductConv(*_CONV, **how))

    def peer(self) -> None:  # type: ignore[override]
        return None

    def inputs(self, n: int) -> Inputs:
        count = n + n // 2
        ends = whole(3, n, count), whole(4, n, count)
        return real(0, n, 8), real(1, count, 4), real(2, count, 6), *ends

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        """Messages by e3nn's product, gathered and added up by torch."""
        x, y, weight, rows, cols = inputs
        product = o3.TensorProduct(*_CONV, shared_weights=False, internal_weights=False).to(x)
        messages = product(x[cols], y, weight)
        return messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, rows, messages)


class TestTensorProductScatter(TestTensorProductConv):
    build = staticmethod(lambda home, **how: home.TensorProductScatter(*_CONV, **how))


class TestSymmetricContraction(IrrepsCase):
    ELSEWHERE = False
    SWAPPED = False
    sizes = ({0: "nodes"}, {0: "nodes"})
    NOT_PROMISED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "test_a_state_fills_what_was_made_on_the_meta_device",
            "test_reset_parameters",
            "test_there_and_back",
            "test_results_on_the_meta_device",
        ),
        "it is made of the matrices of a module of mace",
    ) | {"test_same_bits_each_time": "the last bits of torch's matrix products depend on addresses"}

    def build(self, home: Any, **options: Any) -> nn.Module:
        peer = Peer((1, 3), 4, 2, 3, paths=(1, 3))
        return peer if home is o3 else home.SymmetricContraction.from_mace(peer, **options)

    @staticmethod
    def call(layer: Any, x: Tensor, elements: Tensor) -> Tensor:  # type: ignore[override]
        return layer(x, nn.functional.one_hot(elements.long(), 3).to(x.dtype))

    def inputs(self, n: int) -> Inputs:
        return real(0, n, 2, 4), whole(1, 3, n)
