"""Graph attention: takes the place of `torch_geometric.nn.GATConv`, `GATv2Conv` and `TransformerConv`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from insum_nn.layers.graph.messages import FACTS, MessageLayer, kept_edges, pyg, utils
from insum_nn.ops.attention import ATTEND, SOFTMAX, attention, run_promoted
from insum_nn.ops.statements import in_a_graph
from insum_nn.structure.graph_entries import with_self_loops

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]


class _Attention(MessageLayer):
    """What the layers share: weights of edges, and sums by these."""

    _scores: ClassVar[str]

    def _statements(self) -> tuple[str, ...]:
        return (*f"{self._scores}\n{SOFTMAX}".splitlines(), ATTEND)

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Attend; see the peer's `forward`."""
        layer: Any = self
        loops = getattr(self, "add_self_loops", False) and not self._asks(edge_index)
        if loops and not in_a_graph(edge_index) and not edge_index.is_meta:
            nodes = [n.size(0) for n in (x if isinstance(x, tuple | list) else (x,)) if n is not None]
            # The only argument that is a pair.
            count = min(next((a for a in (*args, *kwargs.values()) if isinstance(a, tuple | list)), nodes))
            if edge_attr is not None:
                without, edge_attr = utils.remove_self_loops(edge_index, edge_attr)
                edge_attr = utils.add_self_loops(without, edge_attr, self.fill_value, count)[1]  # type: ignore[attr-defined]

            def build(edges: Tensor = edge_index) -> Tensor:
                return with_self_loops(edges, count, kept=False)[0].to(edges.dtype)

            edge_index = kept_edges([edge_index], ("loops", count), build)
            layer = self._but(add_self_loops=False)
        return self._peer.forward(layer, x, edge_index, edge_attr, *args, **kwargs)  # type: ignore[attr-defined]

    def _edge_features(self, edge_attr: Tensor) -> Tensor:
        """Return (e, heads, channels)."""
        rows = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        return self.lin_edge(rows).view(-1, self.heads, self.out_channels)  # type: ignore[attr-defined, no-any-return]

    def _scored(self, *args: Any, **kwargs: Any) -> tuple[str, dict[str, Tensor], Tensor]:
        """Return the scores of edges as a statement, what it reads, and a tensor with a row for each receiver."""
        raise NotImplementedError

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Return (e, heads) the weights of edges, after dropout."""
        if self._asks(edge_index):
            return pyg.MessagePassing.edge_updater(self, edge_index, size=size, **kwargs)
        scores, values, own = self._scored(**kwargs)
        self._check_input(edge_index, None)
        shapes = {name: (own.size(0) if size is None else size[1], None) for name in "MZ"}
        weights = run_promoted(f"{scores}\n{SOFTMAX}", values, self._ends(edge_index), self.options, shapes, FACTS)
        return functional.dropout(weights, self.dropout, self.training)  # type: ignore[attr-defined]

    def _sum(self, edge_index: Tensor, size: Any, x: Any, alpha: Tensor) -> Tensor:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        nodes = size[1] if size is not None else (x[0] if x[1] is None else x[1]).size(0)
        shape = {"Y": (nodes, None, None)}
        return run_promoted(ATTEND, {"W": alpha, "V": x[0]}, self._ends(edge_index), self.options, shape, FACTS)


class GATConv(_Attention, pyg.conv.GATConv):
    """The graph attention of Velickovic et al.: `torch_geometric.nn.GATConv`, without a tensor of edges and features.

        S[e,h] = leaky_relu(A[J[e],h] + B[I[e],h], negative_slope)      and, with features of edges, + F[e,h] inside
        W = softmax of S over the edges of each node I[e]
        Y[I[e],h,c] += W[e,h] * V[J[e],h,c]

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's, whose own code runs where messages are
    needed (explainers, hooks, `EdgeIndex`, sparse adjacencies, another `aggr`); gradients of any order. An edge list is
    sorted once, and kept until torch counts a write to it.

    Source: Velickovic et al., Graph Attention Networks (ICLR 2018), eq. (3) and (4).

    Args:
        *args: those of `torch_geometric.nn.GATConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.GATConv`.

    >>> import torch
    >>> from insum_nn.layers.graph.attention import GATConv
    >>> layer = GATConv(16, 8, heads=2)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 16])
    """

    _scores = "S[e,h] = leaky_relu(A[J[e],h] + B[I[e],h], slope)"

    def _scored(self, alpha: Any, edge_attr: Tensor | None, **_: Any) -> tuple[str, dict[str, Tensor], Tensor]:
        parts, values = ["A[J[e],h]"], {"A": alpha[0]}
        if alpha[1] is not None:
            parts, values = [*parts, "B[I[e],h]"], {**values, "B": alpha[1]}
        if edge_attr is not None and self.lin_edge is not None:
            edges = (self._edge_features(edge_attr) * self.att_edge).sum(-1)
            parts, values = [*parts, "F[e,h]"], {**values, "F": edges}
        scores = f"S[e,h] = leaky_relu({' + '.join(parts)}, {float(self.negative_slope)!r})"
        return scores, values, alpha[0] if alpha[1] is None else alpha[1]


class GATv2Conv(_Attention, pyg.conv.GATv2Conv):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The graph attention of Brody et al.: `torch_geometric.nn.GATv2Conv`, without a tensor of edges and features.

        S[e,h] = leaky_relu(V[J[e],h,c] + R[I[e],h,c], negative_slope) * A[h,c]     with features of edges + F[e,h,c]
        W = softmax of S over the edges of each node I[e]
        Y[I[e],h,c] += W[e,h] * V[J[e],h,c]

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `GATConv`.

    Source: Brody, Alon, Yahav, How Attentive are Graph Attention Networks? (ICLR 2022), eq. (7).

    Args:
        *args: those of `torch_geometric.nn.GATv2Conv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.GATv2Conv`.

    >>> import torch
    >>> from insum_nn.layers.graph.attention import GATv2Conv
    >>> layer = GATv2Conv(16, 8, heads=2, concat=False)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 8])
    """

    _scores = "S[e,h] = leaky_relu(V[J[e],h,c] + R[I[e],h,c], slope) * A[h,c]"

    def _scored(self, x: Any, edge_attr: Tensor | None, **_: Any) -> tuple[str, dict[str, Tensor], Tensor]:
        left, right = x
        inner, values = "V[J[e],h,c] + R[I[e],h,c]", {"V": left, "R": right, "A": self.att[0]}
        if edge_attr is not None:
            inner, values = f"{inner} + F[e,h,c]", {**values, "F": self._edge_features(edge_attr)}
        return f"S[e,h] = leaky_relu({inner}, {float(self.negative_slope)!r}) * A[h,c]", values, right


class TransformerConv(_Attention, pyg.conv.TransformerConv):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The graph transformer of Shi et al.: `torch_geometric.nn.TransformerConv`.

        S[e,h] = Q[I[e],h,c] * (K[J[e],h,c] + F[e,h,c]) * scale
        W = softmax of S over the edges of each node I[e]
        Y[I[e],h,c] += W[e,h] * (V[J[e],h,c] + F[e,h,c])

    with scale = 1 / sqrt(channels). Features of edges `F` alone have an axis of edges and one of features. Constructor,
    `forward`, `state_dict` and results are PyTorch Geometric's; see `GATConv`.

    Source: Shi et al., Masked Label Prediction (IJCAI 2021), eq. (3) and (4).

    Args:
        *args: those of `torch_geometric.nn.TransformerConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.TransformerConv`.

    >>> import torch
    >>> from insum_nn.layers.graph.attention import TransformerConv
    >>> layer = TransformerConv(16, 8, heads=2, edge_dim=3)
    >>> edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    >>> layer(torch.randn(4, 16), edges, torch.randn(3, 3)).shape
    torch.Size([4, 16])
    """

    _scores = "S[e,h] = Q[I[e],h,c] * K[J[e],h,c] * scale"

    def _sum(self, edge_index: Tensor, size: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        self._check_input(edge_index, size)
        edge_attr, ends = kwargs["edge_attr"], self._ends(edge_index)
        edge = None if self.lin_edge is None else self._edge_features(edge_attr)
        out, self._alpha = attention(
            kwargs["query"],
            kwargs["key"],
            kwargs["value"],
            ends["J"],
            ends["I"],
            edge=edge,
            dropout=self.dropout if self.training else 0.0,
            facts=FACTS,
            options=self.options,
        )
        return out
