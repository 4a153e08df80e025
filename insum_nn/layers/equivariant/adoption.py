"""Shared by the layers that subclass e3nn's and by the models that are built of them.

The imports of e3nn, conversion from its modules and calls of its code, and the compiler's functions for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from insum_nn.compiler.api import keep_inner
from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.dtypes import FLOATS
from insum_nn.errors import import_extra
from insum_nn.layers.equivariant.checks import InputError
from insum_nn.layers.statement_layer import StatementLayer, with_attributes
from insum_nn.ops.statements import in_a_graph
from insum_nn.ops.tensor_product import TensorProductSpec, expressions

# e3nn 0.4 loads its constants, slices among them, by `torch.load`, which takes no slices unless it is told so.
with torch.serialization.safe_globals([slice]):
    # e3nn has no types, so what comes from it is `Any`.
    e3nn, o3, e3nn_nn = (import_extra(name, "equivariant layers") for name in ("e3nn", "e3nn.o3", "e3nn.nn"))

__all__ = [
    "E3NN_IN_GRAPHS",
    "E3nnLayer",
    "ProductLayer",
    "WeightedLayer",
    "adopt",
    "construct",
    "e3nn",
    "e3nn_nn",
    "keep_inner",
    "o3",
    "runs_directly",
]

# Calls of a layer that has statements for `runs_directly` alone.
E3NN_IN_GRAPHS = "e3nn's own code in graphs that torch records, and under autocast"


class E3nnLayer(StatementLayer):
    """A layer that subclasses one of e3nn, which is what TorchScript compiles: there is no Python where scripts run."""

    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    @classmethod
    def from_e3nn(cls, module: Any, *, options: Options = DEFAULT) -> Self:
        """Return the same layer as a module of e3nn, sharing its parameters.

        Raises:
            InputError: the module is not of the class that this one replaces.
        """
        new: Any = cls.__new__(cls)
        adopt(new, module, new._peer())
        new._prepare(options)
        return new  # type: ignore[no-any-return]

    def _prepare(self, options: Options) -> None:
        """Make what a layer has besides the attributes of e3nn's."""
        cast(Any, self).options = options

    def _peer(self) -> Any:
        return next(kind for kind in type(self).__mro__ if kind.__module__.startswith("e3nn."))

    def __prepare_scriptable__(self) -> Any:
        """Return e3nn's own layer, of the same parameters."""
        return with_attributes(object.__new__(self._peer()), self)


class ProductLayer(StatementLayer):
    """A layer whose statements are those of tensor products, and follow its compile options.

    `_write_statements` runs whenever these are set.
    """

    if TYPE_CHECKING:
        # TorchScript reads the annotations of a convolution.
        _options: Options
        __call__: Callable[..., Tensor]

    explain, _EXPLAINED = StatementLayer.explain_statement, 0

    def _specs(self) -> Sequence[TensorProductSpec]:
        """Return the tensor products that a call runs."""
        raise NotImplementedError

    def _statements(self) -> tuple[str, ...]:
        return self._texts_of(self._specs())

    def _texts_of(self, specs: Sequence[TensorProductSpec]) -> tuple[str, ...]:
        device = next((buffer.device for buffer in cast(torch.nn.Module, self).buffers()), None)
        return tuple(text for spec in specs for text in expressions(spec, device=device))

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        in_one_step = tuple(text for spec in self._specs() for text in expressions(spec, staged=False))
        return {} if in_one_step == self._statements() else {"for very many samples": in_one_step}

    @property
    def options(self) -> Options:
        """Compile options; the statements follow them."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._options = require_options(options)
        self._write_statements()

    def _write_statements(self) -> None:
        raise NotImplementedError


class WeightedLayer(ProductLayer, E3nnLayer):
    """One with weights of its own, under e3nn's names."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights again, and write the constants; e3nn does so in the constructor."""
        module = cast(Any, self)
        module.weight.normal_()
        if hasattr(module, "bias"):
            module.bias.zero_()
        module.output_mask.zero_()
        columns = module.irreps_out.slices()
        for path in module.instructions:
            if path.path_weight != 0 and 0 not in path.path_shape:
                module.output_mask[columns[path.i_out]] = 1


def adopt(new: Any, module: Any, peer: Any) -> None:
    """Give a module of ours the parameters, buffers, children and attributes of one of e3nn's, for a constructor.

    Raises:
        InputError: the module is not of the peer's class.
    """
    if not isinstance(module, peer):
        wanted = f"{peer.__module__.partition('._')[0]}.{peer.__name__}"
        raise InputError(
            f"from_e3nn takes an {wanted}, got {type(module).__module__}.{type(module).__qualname__}",
            fix="leave other modules as they are.",
            expected=wanted,
            got=type(module),
        )
    torch.nn.Module.__init__(new)
    with_attributes(new, module)


def construct(module: Any, peer: Any, *args: Any, **kwargs: Any) -> None:
    """Construct what a module inherits of a peer's class that normalises activations by numbers which it draws.

    The meta device has none, so this happens on another.
    """
    device = torch.get_default_device()
    with torch.device("cpu" if torch.empty(0).is_meta else device):
        peer.__init__(module, *args, **kwargs)
    module.to(device)


def runs_directly(features: Tensor, columns: int, *others: Tensor) -> bool:
    """Return whether a layer runs its own statements on some features: floats, no autocast, no graph being recorded.

    A graph that torch records and compiles holds e3nn's matrix products and elementwise operators, which it can fuse
    with what is around them, and which need nothing of this package where the graph is deployed.

    Args:
        features: wanted (..., columns).
        columns: of the representation.
        *others: further tensors of the call.
    """
    return (
        not in_a_graph(features, *others)
        and not torch._C._is_any_autocast_enabled()
        and features.dim() > 0
        and features.shape[-1] == columns
        and features.numel() > 0
        and features.dtype in FLOATS
    )
