"""Layers that multiply by matrices of types, or by networks: of messages, and of rows in `HeteroLinear`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn

from insum_nn.compiler.api import run_statements
from insum_nn.facts import NamedFacts
from insum_nn.layers.graph.messages import FACTS, Convolution, Ends, Message, PeerLayer, has_hooks, pyg
from insum_nn.ops.statements import promoted, run

__all__ = ["EdgeConv", "FastRGCNConv", "HeteroLinear", "PNAConv", "RGCNConv"]

# By how many edges of its relation a node's edge is divided, of weights that are 1.
_SHARES = "N[I[e],R[e]] += W[e]\nV[e] = 1 / N[I[e],R[e]]"
_RELATIONS = NamedFacts({**FACTS, "R": FACTS["I"]})
# Its `forward` passes all relations to `propagate` at once.
_PEER = pyg.conv.FastRGCNConv
_TYPES = NamedFacts(T=FACTS["I"])
_BASES = "W[r,c,f] += C[r,b] * V[b,c,f]"


class _Relational(Convolution):
    """A relational convolution, with its weights as a stack of matrices."""

    _aggregations = (pyg.aggr.SumAggregation, pyg.aggr.MeanAggregation)
    _edge_facts = _RELATIONS

    @property
    def _columns(self) -> str:  # type: ignore[override]
        return "f" if getattr(self, "num_blocks", None) is None else "b,f"

    @property
    def _message(self) -> str:  # type: ignore[override]
        share = "V[e] * " if type(self.aggr_module) is pyg.aggr.MeanAggregation else ""
        return share + ("X[J[e],c] * W[R[e],c,f]" if self._columns == "f" else "X[J[e],b,c] * W[R[e],b,c,f]")

    def _statements(self) -> tuple[str, ...]:
        shares = _SHARES.splitlines() if self._message.startswith("V") else ()
        return *shares, *([_BASES] if getattr(self, "num_bases", None) is not None else ()), *super()._statements()

    def _aggregates(self, outer: Any) -> list[str]:
        return ["Sum" if type(outer) in self._aggregations else ""]

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        """Convolve; see the peer's `forward`."""
        if self._asks(edge_index):
            return self._peer.forward(self, x, edge_index, edge_type)  # type: ignore[attr-defined, no-any-return]
        # It sets an attribute.
        return _PEER.forward(self._but(), x, edge_index, edge_type)  # type: ignore[no-any-return]

    def _sum(self, edge_index: Tensor, size: Any, x: Any, initial: Tensor | None = None, **edges: Any) -> Tensor:
        blocks = cast(Any, self).num_blocks
        if blocks is not None and not x.is_floating_point():
            raise ValueError("Block-diagonal decomposition not supported for non-continuous input features.")
        x = x.unsqueeze(1) if x.dim() == 1 else x if blocks is None else x.unflatten(1, (blocks, -1))
        return super()._sum(edge_index, size, x, initial, **edges).flatten(1)

    def _of_edges(self, ends: Ends, edge_type: Tensor) -> Message:  # type: ignore[override]
        layer: Any = self
        ends.entries["R"], x, weight, message = edge_type, ends.sent, layer.weight, self._message
        if layer.num_bases is not None:
            weight = run(_BASES, {}, promoted({"C": layer.comp, "V": weight}), self.options, None)
        values = {"W": weight}

        def shares() -> Tensor:
            named = {"W": torch.ones_like(edge_type, dtype=weight.dtype), "I": ends.entries["I"], "R": edge_type}
            shapes = {"N": (ends.nodes, layer.num_relations)}
            return run_statements(_SHARES, named, options=self.options, out_shape=shapes, facts=_RELATIONS)  # type: ignore[no-any-return]

        if message.startswith("V"):
            key = "shares", self.flow, ends.nodes, layer.num_relations, weight.dtype
            values["V"] = self._kept([ends.edge_index, edge_type], key, shares)
        if x.is_floating_point():
            return message, {**values, "X": x}
        ends.entries["X"] = x.squeeze(1)
        return message.replace("X[J[e],c] * W[R[e],c,f]", "W[R[e],X[J[e]],f]"), values


class RGCNConv(_Relational, pyg.conv.RGCNConv):  # type: ignore[misc]
    """The relational graph convolution of Schlichtkrull et al.: `torch_geometric.nn.RGCNConv`.

        Y[I[e],f] += V[e] * X[J[e],c] * W[R[e],c,f]             V: 1 / edges of relation R[e] to node I[e]
        Y[I[e],b,f] += V[e] * X[J[e],b,c] * W[R[e],b,c,f]       with num_blocks
        Y[I[e],f] += V[e] * W[R[e],X[J[e]],f]                   of node numbers in place of features

    without V where `aggr="sum"`. Constructor, `forward`, `state_dict` and results are PyTorch Geometric's, with no loop
    over relations; half types stay what they are. PyTorch Geometric's own code runs where messages are needed, for
    maxima and for sparse adjacencies; see `SAGEConv`.

    Source: Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks (ESWC 2018), (2) to (4).

    Args:
        *args: those of `torch_geometric.nn.RGCNConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.RGCNConv`.

    Raises:
        InsumRangeError: a node or a relation lies outside.

    >>> from insum_nn.layers.graph.weighted import RGCNConv
    >>> layer = RGCNConv(16, 32, num_relations=2, num_bases=2)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 1, 1])).shape
    torch.Size([4, 32])
    """


class FastRGCNConv(_Relational, pyg.conv.FastRGCNConv):  # type: ignore[misc]
    """The same as `RGCNConv` under the name of `torch_geometric.nn.FastRGCNConv`; it needs no more memory.

        Y[I[e],f] += V[e] * X[J[e],c] * W[R[e],c,f]

    Source: that of `RGCNConv`.

    Args:
        *args: those of `torch_geometric.nn.FastRGCNConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.FastRGCNConv`.

    >>> from insum_nn.layers.graph.weighted import FastRGCNConv
    >>> layer = FastRGCNConv(16, 32, num_relations=2, aggr="sum")
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 1, 1])).shape
    torch.Size([4, 32])
    """


def _layers(network: Any) -> list[Any]:
    """Return what a network calls, one after the other."""
    if type(network) is not nn.Sequential or has_hooks(network):
        return [network]
    return [layer for each in network for layer in _layers(each)]


class _OfBothEnds(Convolution):
    """One whose messages are networks of both ends, the first layers of which are linear: they multiply nodes."""

    @property
    def _sums(self) -> str:
        ends = f"A[I[e],{self._columns}] + B[J[e],{self._columns}]"
        return ends if getattr(self, "edge_dim", None) is None else f"{ends} + F[e,{self._columns}]"

    @property
    def _message(self) -> str:  # type: ignore[override]
        deep = any([len(_layers(network)) > 1 for network in self._networks()])
        return f"H[e,{self._columns}]" if deep else self._sums

    def _statements(self) -> tuple[str, ...]:
        made = [f"{self._message} = {self._sums}"] if self._message != self._sums else []
        return *made, *super()._statements()

    def _networks(self) -> Iterable[nn.Module]:
        return [self.nn]  # type: ignore[list-item]

    def _asks(self, edge_index: Any, x: Any = None) -> bool:
        firsts: list[Any] = [[*_layers(network), None][0] for network in self._networks()]
        linear = all([type(each) in (nn.Linear, pyg.Linear) and not has_hooks(each) for each in firsts])
        return not linear or super()._asks(edge_index, x)

    def _made(self, ends: Ends, features: dict[str, tuple[Any, Sequence[Tensor]]]) -> Message:
        """Return the message of networks whose first layers multiply features of both ends, and those of edges."""
        networks, message, sums = [_layers(network) for network in self._networks()], self._message, self._sums
        towers = self._columns != "f"
        values: dict[str, Tensor] = {}
        for name, (x, weights) in features.items():
            biases = [first.bias if name == "A" else None for first, *_ in networks]
            parts = zip(x.unbind(1) if towers else [x], weights, biases, strict=True)
            each = [nn.functional.linear(*part) for part in parts]
            values[name] = torch.stack(each, 1) if towers else each[0]
        if message == sums:
            return message, values
        made = run(f"{message} = {sums}", FACTS, {**promoted(values), **ends.entries}, self.options, None)
        parts = zip(made.unbind(1) if towers else [made], networks, strict=True)
        each = [reduce(lambda h, layer: layer(h), rest, part) for part, (_, *rest) in parts]
        return message, {"H": torch.stack(each, 1) if towers else each[0]}


class EdgeConv(_OfBothEnds, pyg.conv.EdgeConv):  # type: ignore[misc]
    """The edge convolution of Wang et al.: `torch_geometric.nn.EdgeConv`.

        Y[I[e],f] max= A[I[e],f] + B[J[e],f]        A = X (U - V) + b, B = X V for a layer (U V), b of (x_i, x_j - x_i)

    A network of several layers, which begins with a linear one, has the rest applied to each edge. Constructor,
    `forward`, `state_dict` and results are PyTorch Geometric's, whose own code runs where messages are needed and where
    the network is no `Linear` and no `Sequential` that begins with one; see `SAGEConv`.

    Source: Wang et al., Dynamic Graph CNN for Learning on Point Clouds (ACM TOG 2019), eq. (8).

    Args:
        *args: those of `torch_geometric.nn.EdgeConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.EdgeConv`.

    >>> from insum_nn.layers.graph.weighted import EdgeConv
    >>> layer = EdgeConv(torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)))
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 8])
    """

    def _of_edges(self, ends: Ends) -> Message:  # type: ignore[override]
        centre, other = _layers(self.nn)[0].weight.chunk(2, 1)
        return self._made(ends, {"A": (ends.own, [centre - other]), "B": (ends.sent, [other])})


class PNAConv(_OfBothEnds, pyg.conv.PNAConv):  # type: ignore[misc]
    """The principal neighbourhood aggregation of Corso et al.: `torch_geometric.nn.PNAConv`.

        Y[I[e],f] max= A[I[e],f] + B[J[e],f] + F[e,f]             "max"; min= and += likewise
        Y[I[e],f] += (A[I[e],f] + B[J[e],f] + F[e,f] - M[I[e],f])**2      "var", "std", with the mean M

    A, B and F are what the first layers make of both ends and of the features of edges, for all towers. Constructor,
    `forward`, `state_dict` and results are PyTorch Geometric's; see `EdgeConv`.

    Source: Corso et al., Principal Neighbourhood Aggregation for Graph Nets (NeurIPS 2020), eq. (7) and (8).

    Args:
        *args: those of `torch_geometric.nn.PNAConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.PNAConv`.

    >>> from insum_nn.layers.graph.weighted import PNAConv
    >>> layer = PNAConv(16, 32, ["mean", "std", "max"], ["identity", "attenuation"], deg=torch.tensor([1, 3]))
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """

    _columns = "t,f"

    def _networks(self) -> Iterable[nn.Module]:
        return self.pre_nns

    def _of_edges(self, ends: Ends, edge_attr: Tensor | None = None) -> Message:  # type: ignore[override]
        weights = [_layers(network)[0].weight.split(self.F_in, 1) for network in self.pre_nns]
        edges = () if edge_attr is None else (self.edge_encoder(edge_attr).unsqueeze(1).expand(-1, self.towers, -1),)
        features = zip((ends.sent, ends.sent, *edges), zip(*weights, strict=True), strict=True)
        return self._made(ends, dict(zip("ABF", features, strict=False)))


class HeteroLinear(PeerLayer, pyg.HeteroLinear):
    """A linear layer with weights for each type of row: `torch_geometric.nn.HeteroLinear`.

        Y[n,o] += X[n,c] * W[T[n],c,o]
        Y[n,o] += B[T[n],o]                     with a bias

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; rows of types in any order are not moved.

    Args:
        *args: those of `torch_geometric.nn.HeteroLinear`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.HeteroLinear`.

    Raises:
        InsumRangeError: a type lies outside.

    >>> from insum_nn.layers.graph.weighted import HeteroLinear
    >>> layer = HeteroLinear(16, 32, num_types=3)
    >>> layer(torch.randn(4, 16), torch.tensor([2, 0, 1, 2])).shape
    torch.Size([4, 32])
    """

    __call__: Callable[..., Tensor]

    def _statements(self) -> tuple[str, ...]:
        return ("Y[n,o] += X[n,c] * W[T[n],c,o]", "Y[n,o] += B[T[n],o]")[: 1 + (cast(Any, self).bias is not None)]

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """Multiply each row by the matrix of its type; see the peer's `forward`."""
        values = promoted({"X": x, "W": self.weight, **({} if cast(Any, self).bias is None else {"B": self.bias})})
        text = "\n".join(self._statements())
        return run_statements(text, {**values, "T": type_vec}, options=self.options, facts=_TYPES)  # type: ignore[no-any-return]
