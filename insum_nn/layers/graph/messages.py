"""What layers of PyTorch Geometric share: the peer's own `forward`, with a statement in place of its messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from insum_nn.compiler.api import statement_calls
from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.errors import MissingExtraError
from insum_nn.layers.statement_layer import StatementLayer
from insum_nn.structure.plain_tensors import plain_tensors
from insum_nn.tensor_cache import TensorCache, same_view

try:
    from torch_geometric import EdgeIndex, utils
    from torch_geometric import nn as pyg
    from torch_geometric.typing import OptTensor, SparseTensor  # pyright: ignore
except ImportError as error:
    raise MissingExtraError(
        "layers of graphs take the place of torch_geometric's, which is not installed",
        fix="run: pip install torch_geometric",
    ) from error

__all__ = ["COMBINES", "MessageLayer", "asks_for_messages", "kept_edges"]
__all__ += ["EdgeIndex", "OptTensor", "SparseTensor", "pyg", "utils"]

Built = TypeVar("Built")
# What is made of an edge list is kept for as long as it lives and its version stays.
_edge_lists: TensorCache[Any] = TensorCache(limit=32)

_COMBINED = {"+=": ("SumAggregation", "MeanAggregation"), "max=": ("MaxAggregation",), "min=": ("MinAggregation",)}
COMBINES: dict[type, str] = {getattr(pyg.aggr, name): by for by, names in _COMBINED.items() for name in names}
"""How a statement says what an aggregation does; a mean is a sum that is divided."""

# What a subclass or an instance may define to change how messages are made, combined or read.
_METHODS = ("message", "aggregate", "message_and_aggregate", "update", "edge_update")
_HOOKS = tuple(
    f"_{name}_forward_{when}hooks"
    for name in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
)


def kept_edges(read: Sequence[Tensor], key: Hashable, build: Callable[[], Built]) -> Built:
    """Return what is made of an edge list and its weights; made once for each version of these tensors."""

    def made() -> Built:
        with plain_tensors(*read):
            return build()

    return _edge_lists.get(read, key, made)  # type: ignore[no-any-return]


def asks_for_messages(layer: Any, peer: type, aggregations: tuple[type, ...] = (pyg.aggr.SumAggregation,)) -> bool:
    """Return whether messages are asked for, by an explainer, a hook, a subclass or an aggregation."""
    if layer.explain or layer._edge_mask is not None or layer.decomposed_layers != 1:
        return True
    sums = layer.aggr_module
    if type(sums) not in aggregations:
        return True
    if sums._forward_hooks or sums._forward_pre_hooks or sums._backward_hooks or sums._backward_pre_hooks:
        return True
    if any([getattr(layer, name) for name in _HOOKS]):
        return True
    kind = type(layer)
    return any([name in layer.__dict__ or getattr(kind, name) is not getattr(peer, name) for name in _METHODS])


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


class MessageLayer(StatementLayer, pyg.MessagePassing):
    """A layer of PyTorch Geometric whose messages are summed by a statement, which forms none of them.

    The peer's own code, which forms one message for each edge, runs where messages are needed: for explainers, hooks,
    subclasses that define `message`, `edge_update` and their like, other aggregations, features that are no matrix,
    `EdgeIndex` and sparse adjacencies. An edge list is sorted once, and kept until torch counts a write to it.

    Attributes:
        options: compile options.
    """

    _peer: ClassVar[type]
    _aggregations: ClassVar[tuple[type, ...]] = (pyg.aggr.SumAggregation,)
    options: Options = DEFAULT

    def __init__(self, *args: Any, options: Options = DEFAULT, **kwargs: Any) -> None:
        # What is no `int`, as NumPy's integers are none, torch_geometric takes for a pair of widths.
        named: dict[str, Any] = {name: _plain(value) for name, value in kwargs.items()}
        super().__init__(*map(_plain, args), **named)
        self.options = require_options(options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        layers = [base for base in cls.__bases__ if issubclass(base, pyg.MessagePassing)]
        for peer in layers if not hasattr(cls, "_peer") else ():
            if not issubclass(peer, MessageLayer):
                cls._peer = peer
        # PyTorch Geometric writes generated code over these, unless a class itself has them.
        for name in ("propagate", "edge_updater"):
            setattr(cls, name, getattr(cls, name))

    def __prepare_scriptable__(self) -> Any:
        """Return what TorchScript compiles in place of the layer: the peer's, with the same parameters."""
        plain: Any = object.__new__(self._peer)
        # What PyTorch Geometric finds in the source of a class is that of the peer's.
        pyg.MessagePassing.__init__(plain)
        found = {name: plain.__dict__[name] for name in ("inspector", "_user_args", "_fused_user_args")}
        plain.__dict__.update(self.__dict__, **found)
        return plain

    def _but(self, **changed: Any) -> Any:
        """Return the same layer but for some attributes."""
        layer = object.__new__(type(self))
        layer.__dict__.update(self.__dict__, **changed)
        return layer

    def __repr__(self) -> str:
        return self._shown(self._peer.__repr__(self))  # type: ignore[arg-type]

    def explain_statement(self, *args: Any, measure: bool = False, **kwargs: Any) -> Any:
        """Explain how the last statement of a call runs: PyTorch Geometric's explainers have the name `explain`.

        Args:
            *args: those of a call.
            measure: also time the statement.
            **kwargs: those of a call.

        Returns:
            The compiler's `Explanation`.
        """
        with torch.no_grad():
            return statement_calls(lambda: self(*args, **kwargs))[-1].explain(measure=measure)

    def _asks(self, edge_index: Any) -> bool:
        """Return whether messages are asked for, or the edges are no list of them."""
        # What tracers pass for a tensor is of classes of their own.
        plain = isinstance(edge_index, Tensor) and not isinstance(edge_index, EdgeIndex)
        return (
            not plain or edge_index.layout != torch.strided or asks_for_messages(self, self._peer, self._aggregations)
        )

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Sum what nodes send."""
        if self._asks(edge_index):
            return pyg.MessagePassing.propagate(self, edge_index, size=size, **kwargs)
        return self._sum(edge_index, size, **kwargs)

    def _sum(self, edge_index: Tensor, size: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def _ends(self, edge_index: Tensor) -> dict[str, Tensor]:
        ends = "JI" if self.flow == "source_to_target" else "IJ"
        return {end: same_view(nodes) for end, nodes in zip(ends, edge_index.unbind(0), strict=True)}
