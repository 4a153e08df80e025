"""What layers of PyTorch Geometric share: the peer's own `forward`, with a statement in place of its messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from insum_nn.compiler.api import is_plain_eager
from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.dtypes import wide_dtype
from insum_nn.errors import MissingExtraError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.layers.statement_layer import StatementLayer
from insum_nn.ops.statements import promoted, run, under_autocast
from insum_nn.structure.plain_tensors import plain_tensors
from insum_nn.tensor_cache import TensorCache, same_rows

try:
    from torch_geometric import EdgeIndex, utils
    from torch_geometric import nn as pyg
    from torch_geometric.typing import OptTensor
except ImportError as error:
    raise MissingExtraError(
        "layers of graphs take the place of torch_geometric's, which is not installed",
        fix="run: pip install torch_geometric",
    ) from error

__all__ = ["FACTS", "Convolution", "Ends", "Message", "MessageLayer", "PeerLayer", "has_hooks", "kept_edges"]
__all__ += ["EdgeIndex", "OptTensor", "pyg", "utils"]

Built = TypeVar("Built")
# What is made of an edge list is kept for as long as it lives and its version stays.
_edge_lists: TensorCache[Any] = TensorCache(limit=32)

# How many edges a node has, of weights that are 1.
_COUNT = "N[I[e]] += W[e]"

FACTS = NamedFacts((name, IndexFacts(masked=False)) for name in "IJ")
"""No end of an edge is missing."""

# What a subclass or an instance may define to change how messages are made, combined or read.
_METHODS = ("message", "aggregate", "message_and_aggregate", "update", "edge_update")
_HOOKED = ("propagate", *(name for name in _METHODS if name != "update"))
_HOOKS = tuple(f"_{name}_forward_{when}hooks" for name in _HOOKED for when in ("pre_", ""))

# How statements combine messages. Sums of `_DIVIDED` are then divided by the number of edges.
_COMBINES = {"Sum": "+=", "Mean": "+=", "Max": "max=", "Min": "min=", "Var": "+="}
_DIVIDED = ("Mean", "Var")
_NAMES = {getattr(pyg.aggr, f"{name}Aggregation"): name for name in (*_COMBINES, "Std")}
_SCALERS: tuple[str, ...] = ("identity", "amplification", "attenuation", "linear", "inverse_linear")

Message = tuple[str, dict[str, Tensor]]
"""The text of a message, and the values that it reads."""


def kept_edges(read: Sequence[Tensor], key: Hashable, build: Callable[[], Built]) -> Built:
    """Return what is made of an edge list and its weights; made once for each version of these tensors."""

    def made() -> Built:
        with plain_tensors(*read):
            return build()

    return _edge_lists.get(read, key, made)  # type: ignore[no-any-return]


def has_hooks(layer: torch.nn.Module) -> bool:
    """Return whether something else is done at calls of a module."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


class PeerLayer(StatementLayer):
    """A layer that is a subclass of PyTorch Geometric's, its last base.

    Attributes:
        options: compile options.
    """

    _peer: ClassVar[type]
    options: Options = DEFAULT

    def __init__(self, *args: Any, options: Options = DEFAULT, **kwargs: Any) -> None:
        # What is no `int`, as NumPy's integers are none, torch_geometric takes for a pair of widths.
        named: dict[str, Any] = {name: _plain(value) for name, value in kwargs.items()}
        super().__init__(*map(_plain, args), **named)
        self.options = require_options(options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__bases__[-1].__module__.startswith("torch_geometric."):
            cls._peer = cls.__bases__[-1]
        # PyTorch Geometric writes generated code over these, unless a class itself has them.
        for name in {"propagate", "edge_updater"} & {*dir(cls)}:
            setattr(cls, name, getattr(cls, name))

    def __prepare_scriptable__(self) -> Any:
        """Return what TorchScript compiles in place of the layer: the peer's, with the same parameters."""
        plain: Any = object.__new__(self._peer)
        if isinstance(plain, pyg.MessagePassing):
            # What PyTorch Geometric finds in the source of a class is that of the peer's.
            pyg.MessagePassing.__init__(plain)
        found = {*plain.__dict__} & {"inspector", "_user_args", "_fused_user_args"}
        plain.__dict__.update(self.__dict__, **{name: plain.__dict__[name] for name in found})
        return plain


class MessageLayer(PeerLayer, pyg.MessagePassing):
    """A layer of PyTorch Geometric whose messages are summed by a statement, which forms none of them.

    The peer's own code, which forms one message for each edge, runs where messages are needed: for explainers, hooks,
    subclasses that define `message`, `edge_update` and their like, other aggregations, features that are no matrix,
    `EdgeIndex` and sparse adjacencies. An edge list is sorted once, and kept until torch counts a write to it.
    """

    _aggregations: ClassVar[tuple[type, ...]] = (pyg.aggr.SumAggregation,)
    _sum: Callable[..., Tensor]

    def _but(self, **changed: Any) -> Any:
        """Return the same layer but for some attributes."""
        layer = object.__new__(type(self))
        layer.__dict__.update(self.__dict__, **changed)
        return layer

    def _asks(self, edge_index: Any, x: Any = None) -> bool:
        """Return whether messages are asked for, or the edges are no list of them, nor to be listed for features x."""
        # What tracers pass for a tensor is of classes of their own.
        plain = isinstance(edge_index, Tensor) and not isinstance(edge_index, EdgeIndex)
        if not plain or edge_index.layout != torch.strided:
            plain = x is not None and is_plain_eager(x) and utils.is_sparse(edge_index)
        kind, peer, own, combine = type(self), self._peer, self.__dict__, self.aggr_module
        if not plain or self.explain or self._edge_mask is not None:
            return True
        if self.decomposed_layers != 1 or "" in self._aggregates(combine) or has_hooks(combine):
            return True
        # Loops instead of `any`: every call comes here.
        for name in _METHODS:
            if name in own or getattr(kind, name) is not getattr(peer, name):
                return True
        for name in _HOOKS:
            if own[name]:
                return True
        return False

    def _aggregates(self, outer: Any) -> list[str]:
        """Return the aggregations whose results are put side by side; an empty name is one of another kind."""
        if type(outer) not in self._aggregations:
            return [""]
        if (name := _NAMES.get(type(outer), "Var")) not in ("Var", "Std"):
            return [name]
        inner = outer.aggr if type(outer) is pyg.aggr.DegreeScalerAggregation else outer
        several = inner.aggrs if type(inner) is pyg.aggr.MultiAggregation and inner.mode == "cat" else [inner]
        partial = any([getattr(getattr(each, "var_aggr", each), "semi_grad", False) for each in several])
        known = not partial and {*_SCALERS} >= {*getattr(outer, "scaler", ())}
        return [_NAMES.get(type(each), "") for each in several] if known else [""]

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Sum what nodes send."""
        if self._asks(edge_index):
            return pyg.MessagePassing.propagate(self, edge_index, size=size, **kwargs)
        return self._sum(edge_index, size, **kwargs)

    def _kept(self, read: Sequence[Tensor], key: Hashable, build: Callable[[], Built]) -> Built:
        """Return what is made of edges; made once for each version of them, where they are not to be read each time."""
        return build() if self.options.validate or not is_plain_eager(*read) else kept_edges(read, key, build)

    def _ends(self, edge_index: Tensor) -> dict[str, Tensor]:
        return dict(zip("JI" if self.flow == "source_to_target" else "IJ", same_rows(edge_index), strict=True))


class Ends(NamedTuple):
    """What a convolution reads of the nodes of edges.

    Attributes:
        own: features of those that receive, if they have any.
        sent: features of those that send.
        entries: index tensors by name: `I`, the nodes that receive, `J`, and what a message adds.
        nodes: how many nodes receive.
        edge_index: the edges.
    """

    own: Tensor | None
    sent: Tensor
    entries: dict[str, Tensor]
    nodes: int
    edge_index: Tensor


class Convolution(MessageLayer):
    """One whose messages are an expression, combined by PyTorch Geometric's aggregations."""

    __call__: Callable[..., Tensor]
    _message: ClassVar[str] = "X[J[e],f]"
    _columns: ClassVar[str] = "f"
    _edge_facts: ClassVar[NamedFacts] = FACTS
    _aggregations = (*_NAMES, pyg.aggr.MultiAggregation, pyg.aggr.DegreeScalerAggregation)

    def _statements(self) -> tuple[str, ...]:
        texts = _texts(self._aggregates(self.aggr_module), self._message, self._columns)
        return tuple(dict.fromkeys([*([_COUNT] if "Mean" in texts else []), *texts.values()]))

    def _of_edges(self, ends: Ends, *edges: Any) -> Message:
        """Return the message, of what is read of nodes and what the peer passes for its messages."""
        return Convolution._message, {"X": ends.sent}

    def _sum(self, edge_index: Tensor, size: Any, x: Any, initial: Tensor | None = None, **edges: Any) -> Tensor:
        into, columns, scaling = int(self.flow == "source_to_target"), self._columns, cast("Any", self.aggr_module)
        rank = 2 if columns == "f" else 3
        pair = x if isinstance(x, tuple | list) else (None, x) if into == 0 else (x, None)
        own, sent, names = pair[into], pair[1 - into], self._aggregates(scaling)
        plain = sent is not None and sent.dim() == rank and self.node_dim in (0, -rank)
        # Of a message that reads no other features, further axes of nodes are more columns.
        alike = plain or (self._message.endswith("X[J[e],f]") and type(scaling) in _NAMES)
        if sent is None or not alike or sent.dim() < rank:
            return pyg.MessagePassing.propagate(self, edge_index, size=size, x=x, **edges)
        sizes: Any = self._check_input(edge_index, size)
        for end, features in enumerate(pair):
            # A traced size is a tensor, which is not to be compared.
            if features is not None and (sizes[end] is None or not torch.jit.is_tracing()):
                self._set_size(sizes, end, features)
        nodes = sizes[1 - into] if sizes[into] is None else sizes[into]
        # What nodes send, a row for each.
        moved = sent if plain else sent.movedim(self.node_dim, 0)
        ends = Ends(own, sent if plain else moved.flatten(1), self._ends(edge_index), nodes, edge_index)
        message, values = self._of_edges(ends, *edges.values())
        named, entries = promoted(values), ends.entries
        starts = initial is not None and plain and names == ["Sum"]
        if starts := starts and initial.dtype == named["X"].dtype and not under_autocast(sent.device):  # type: ignore[union-attr]
            named["Y"] = cast("Tensor", initial)
        named |= entries if "J[" in message else {"I": entries["I"]}
        found: dict[str, Tensor] = {}
        shape = (nodes, None) if rank == 2 else (nodes, None, None)
        for step, text in _texts(names, message, columns).items():
            read = {**named, "M": found["Mean"]} if step == "Var" else named
            out = run(text, self._edge_facts, read, self.options, shape)
            found[step] = out / self._counts(ends, out) if step in _DIVIDED else out
        if "Std" in names:
            found["Std"] = found["Var"].clamp(min=1e-5).sqrt().masked_fill(found["Var"] <= 1e-5, 0.0)
        out = torch.cat([found[name] for name in names], -1) if len(names) > 1 else found[names[0]]
        out = out if plain else out.unflatten(1, moved.shape[1:]).movedim(0, self.node_dim)
        out = out if initial is None or starts else out + initial
        if type(scaling) is not pyg.aggr.DegreeScalerAggregation:
            return out
        # Of a node without edges all is 0.
        degree = self._counts(ends, out)
        ratio, logs = degree / scaling.avg_deg_lin, (degree + 1).log() / scaling.avg_deg_log
        scales = dict(zip(_SCALERS, (1.0, logs, 1 / logs, ratio, 1 / ratio), strict=True))
        return torch.cat([out * scales[name] for name in cast("list[str]", scaling.scaler)], -1)

    def _counts(self, ends: Ends, out: Tensor) -> Tensor:
        """Return how many edges a node has, or 1, to be broadcast to a result."""

        def count() -> Tensor:
            ones = torch.ones_like(ends.entries["I"], dtype=wide_dtype(out.dtype))
            counts = self._added(ends.entries["I"], ones, ends.nodes).clamp(min=1).to(out.dtype)
            return counts.view(-1, *[1] * (out.dim() - 1))

        return self._kept([ends.edge_index], ("counts", self.flow, ends.nodes, out.dtype, out.dim()), count)

    def _added(self, ends: Tensor, weights: Tensor, nodes: int) -> Tensor:
        """Return (nodes,) the weights of the edges of each node, added."""
        return run(_COUNT, FACTS, {"W": weights, "I": ends}, self.options, (nodes,))


def _texts(names: Sequence[str], message: str, columns: str) -> dict[str, str]:
    """Return the statements that aggregations run, by names."""
    steps = [step for name in names for step in (_DIVIDED if name in ("Var", "Std") else (name,))]
    terms = {"Var": f"({message} - M[I[e],{columns}])**2"}
    return {step: f"Y[I[e],{columns}] {_COMBINES[step]} {terms.get(step, message)}" for step in steps}
