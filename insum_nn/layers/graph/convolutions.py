"""Convolutions of graphs that are one statement: they take the place of `torch_geometric.nn`'s of the same names."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from insum_nn.compiler.api import is_plain_eager, is_transformed, stable_order
from insum_nn.errors import InsumShapeError
from insum_nn.layers.graph.messages import Convolution, Ends, Message, kept_edges, pyg, utils
from insum_nn.ops.statements import in_a_graph
from insum_nn.structure.gcn_norm import gcn_norm
from insum_nn.structure.graph_entries import Flow, check_edge_index
from insum_nn.structure.plain_tensors import is_batched

__all__ = ["ChebConv", "GraphConv", "LGConv", "Normalised", "SGConv", "TAGConv"]
__all__ += ["APPNP", "GINConv", "GINEConv", "GatedGraphConv", "NNConv", "SAGEConv"]


class _Weighted(Convolution):
    """One whose edges may have weights."""

    _message = "W[e] * X[J[e],f]"

    def _of_edges(self, ends: Ends, edge_weight: Tensor | None = None) -> Message:  # type: ignore[override]
        message, values = super()._of_edges(ends)
        return (message, values) if edge_weight is None else (self._message, {**values, "W": edge_weight.view(-1)})


class Normalised(_Weighted):
    """One whose weights are divided by the roots of degrees, once for each edge list and its weights."""

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolve; see the peer's `forward`."""
        layer: Any = self
        own = not getattr(self, "cached", False) and not torch.jit.is_tracing()
        if own and self.normalize and not self._asks(edge_index, x):
            self._check_input(edge_index, None)
            edge_index, edge_weight = self._weighted(x, edge_index, edge_weight)
            layer = self._but(normalize=False)
        return self._peer.forward(layer, x, edge_index, edge_weight)  # type: ignore[attr-defined, no-any-return]

    def _weighted(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the edges with self-loops and their weights, sorted by receivers where they are kept."""
        cached, nodes, flow = getattr(self, "cached", False), x.size(self.node_dim), cast("Flow", self.flow)
        sparse = utils.is_sparse(edge_index)
        if self.normalize and getattr(self, "_cached_edge_index", None) is not None:
            return self._cached_edge_index
        if not (self.normalize or sparse):
            return edge_index, edge_weight
        # Most calls are plain, and ask none of what modes need.
        plain = not sparse and is_plain_eager(x, edge_index, edge_weight)
        if many := not (plain or sparse) and is_batched(edge_index):
            if cached:
                raise InsumShapeError(
                    "'cached=True' keeps one graph, and 'edge_index' is a batch of graphs under torch.vmap",
                    fix="make the layer without cached, or call it once with the graph that all calls share.",
                )
            check_edge_index(edge_index, nodes)
        unread = many or (not (plain or sparse) and (in_a_graph(x, edge_index) or edge_index.is_meta))
        how = nodes, getattr(self, "improved", False), getattr(self, "add_self_loops", False), flow, x.dtype
        added = self._added if self.options.deterministic else None

        def normalise() -> tuple[Tensor, Tensor]:
            if not sparse:
                return gcn_norm(edge_index, edge_weight, *how, fixed_size=unread, added=added)
            # The peer adds self-loops to those that are there.
            matrix = edge_index.coalesce() if isinstance(edge_index, Tensor) and edge_index.is_sparse else edge_index
            matrix = pyg.conv.gcn_conv.gcn_norm(matrix, None, *how) if self.normalize else matrix
            edges, weights = utils.to_edge_index(matrix[0] if isinstance(matrix, tuple) else matrix)
            return edges.flip(0), weights.to(x.dtype)

        def in_order() -> tuple[Tensor, Tensor]:
            edges, weights = normalise()
            rows = edge_index.size(0) if sparse else nodes
            order = stable_order(edges[1 if flow == "source_to_target" else 0], rows)
            return edges.index_select(1, order), weights.index_select(0, order)

        if cached and self.normalize:
            self._cached_edge_index = normalise()
            return self._cached_edge_index
        of = [edge_index, edge_weight]
        if sparse:
            of = [edge_index] if isinstance(edge_index, Tensor) else edge_index.coo()
        read = [tensor for tensor in of if tensor is not None]
        learned = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in read])
        if unread or learned or self.options.validate or (not plain and is_transformed()):
            return normalise()
        return kept_edges(read, (self.normalize, *how), in_order)


class SAGEConv(Convolution, pyg.conv.SAGEConv):  # type: ignore[misc]
    """The convolution of GraphSAGE: `torch_geometric.nn.SAGEConv`, without a tensor of edges and features.

        Y[I[e],f] += X[J[e],f]          aggr="sum"; divided by the number of edges of each node with aggr="mean"
        Y[I[e],f] max= X[J[e],f]        aggr="max", and min= likewise; nodes without an edge have 0
        Out = Y A + X B

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's, whose own code runs where messages are
    needed (explainers, hooks, `EdgeIndex`, sparse adjacencies, other aggregations, features that are no matrix);
    gradients of any order. That of an extremum is shared in equal parts on a tie. An edge list is sorted once, and kept
    until torch counts a write to it.

    Source: Hamilton et al., Inductive Representation Learning on Large Graphs (NeurIPS 2017), algorithm 1.

    Args:
        *args: those of `torch_geometric.nn.SAGEConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.SAGEConv`.

    Raises:
        InsumRangeError: a node lies outside.

    >>> from insum_nn.layers.graph.convolutions import SAGEConv
    >>> layer = SAGEConv(16, 32, aggr="max")
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class GINConv(Convolution, pyg.conv.GINConv):  # type: ignore[misc]
    """The graph isomorphism layer of Xu et al.: `torch_geometric.nn.GINConv`.

        Y[I[e],f] += X[J[e],f]
        Out[n] = MLP((1 + eps) * X[n] + Y[n])

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Xu et al., How Powerful are Graph Neural Networks? (ICLR 2019), eq. (4.1).

    Args:
        *args: those of `torch_geometric.nn.GINConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.GINConv`.

    >>> from insum_nn.layers.graph.convolutions import GINConv
    >>> layer = GINConv(torch.nn.Linear(16, 32))
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class GINEConv(Convolution, pyg.conv.GINEConv):  # type: ignore[misc]
    """The graph isomorphism layer with features of edges: `torch_geometric.nn.GINEConv`.

        Y[I[e],f] += relu(X[J[e],f] + F[e,f])
        Out[n] = MLP((1 + eps) * X[n] + Y[n])

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Hu et al., Strategies for Pre-training Graph Neural Networks (ICLR 2020).

    Args:
        *args: those of `torch_geometric.nn.GINEConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.GINEConv`.

    >>> from insum_nn.layers.graph.convolutions import GINEConv
    >>> layer = GINEConv(torch.nn.Linear(16, 32), edge_dim=5)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.randn(3, 5)).shape
    torch.Size([4, 32])
    """

    _message = "relu(X[J[e],f] + F[e,f])"

    def _of_edges(self, ends: Ends, edge_attr: Tensor) -> Message:  # type: ignore[override]
        return self._message, {"X": ends.sent, "F": edge_attr if self.lin is None else self.lin(edge_attr)}


class GraphConv(_Weighted, pyg.conv.GraphConv):  # type: ignore[misc]
    """The graph convolution of Morris et al.: `torch_geometric.nn.GraphConv`.

        Y[I[e],f] += W[e] * X[J[e],f]
        Out = Y A + X B

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Morris et al., Weisfeiler and Leman Go Neural (AAAI 2019), eq. (5).

    Args:
        *args: those of `torch_geometric.nn.GraphConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.GraphConv`.

    >>> from insum_nn.layers.graph.convolutions import GraphConv
    >>> layer = GraphConv(16, 32)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class ChebConv(_Weighted, pyg.conv.ChebConv):  # type: ignore[misc]
    """The spectral convolution of Defferrard et al.: `torch_geometric.nn.ChebConv`.

        Y[I[e],f] += W[e] * X[J[e],f]          once for each order of the Chebyshev polynomial

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Defferrard et al., Convolutional Neural Networks on Graphs (NeurIPS 2016), section 2.1.

    Args:
        *args: those of `torch_geometric.nn.ChebConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.ChebConv`.

    >>> from insum_nn.layers.graph.convolutions import ChebConv
    >>> layer = ChebConv(16, 32, K=3)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class SGConv(_Weighted, pyg.conv.SGConv):  # type: ignore[misc]
    """The simplified convolution of Wu et al.: `torch_geometric.nn.SGConv`.

        Y[I[e],f] += W[e] * X[J[e],f]          K times, with weights normalised by degrees

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Wu et al., Simplifying Graph Convolutional Networks (ICML 2019), eq. (8).

    Args:
        *args: those of `torch_geometric.nn.SGConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.SGConv`.

    >>> from insum_nn.layers.graph.convolutions import SGConv
    >>> layer = SGConv(16, 32, K=2)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class TAGConv(Normalised, pyg.conv.TAGConv):  # type: ignore[misc]
    """The topology adaptive convolution of Du et al.: `torch_geometric.nn.TAGConv`.

        Y[I[e],f] += W[e] * X[J[e],f]          K times, with weights normalised by degrees

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Du et al., Topology Adaptive Graph Convolutional Networks (2017), eq. (2).

    Args:
        *args: those of `torch_geometric.nn.TAGConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.TAGConv`.

    >>> from insum_nn.layers.graph.convolutions import TAGConv
    >>> layer = TAGConv(16, 32)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class APPNP(Normalised, pyg.conv.APPNP):  # type: ignore[misc]
    """The propagation of personalised PageRank: `torch_geometric.nn.APPNP`.

        Y[I[e],f] += W[e] * Z[J[e],f],    Z = (1 - alpha) * Y + alpha * X          K times

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Gasteiger et al., Predict then Propagate (ICLR 2019), eq. (4).

    Args:
        *args: those of `torch_geometric.nn.APPNP`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.APPNP`.

    >>> from insum_nn.layers.graph.convolutions import APPNP
    >>> layer = APPNP(K=10, alpha=0.1)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 16])
    """


class LGConv(Normalised, pyg.conv.LGConv):  # type: ignore[misc]
    """The convolution of LightGCN: `torch_geometric.nn.LGConv`.

        Y[I[e],f] += W[e] * X[J[e],f]          with weights normalised by degrees

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: He et al., LightGCN (SIGIR 2020), eq. (3).

    Args:
        *args: those of `torch_geometric.nn.LGConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.LGConv`.

    >>> from insum_nn.layers.graph.convolutions import LGConv
    >>> layer = LGConv()
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 16])
    """


class GatedGraphConv(_Weighted, pyg.conv.GatedGraphConv):  # type: ignore[misc]
    """The gated graph network of Li et al.: `torch_geometric.nn.GatedGraphConv`.

        Y[I[e],f] += W[e] * X[J[e],f]          before each step of the GRU

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Li et al., Gated Graph Sequence Neural Networks (ICLR 2016), eq. (2) to (6).

    Args:
        *args: those of `torch_geometric.nn.GatedGraphConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.GatedGraphConv`.

    >>> from insum_nn.layers.graph.convolutions import GatedGraphConv
    >>> layer = GatedGraphConv(32, num_layers=2)
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """


class NNConv(Convolution, pyg.conv.NNConv):  # type: ignore[misc]
    """The edge-conditioned convolution of Gilmer et al.: `torch_geometric.nn.NNConv`.

        Y[I[e],f] += X[J[e],c] * W[e,c,f]          W: what the network makes of the edge's features

    Constructor, `forward`, `state_dict` and results are PyTorch Geometric's; see `SAGEConv`.

    Source: Gilmer et al., Neural Message Passing for Quantum Chemistry (ICML 2017), section 5.1.

    Args:
        *args: those of `torch_geometric.nn.NNConv`.
        options: compile options.
        **kwargs: those of `torch_geometric.nn.NNConv`.

    >>> from insum_nn.layers.graph.convolutions import NNConv
    >>> layer = NNConv(16, 32, torch.nn.Linear(5, 16 * 32))
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.randn(3, 5)).shape
    torch.Size([4, 32])
    """

    _message = "X[J[e],c] * W[e,c,f]"
    # The channels that are summed would be compared with the edges.
    _aggregations = (pyg.aggr.SumAggregation, pyg.aggr.MeanAggregation)

    def _of_edges(self, ends: Ends, edge_attr: Tensor) -> Message:  # type: ignore[override]
        return self._message, {"X": ends.sent, "W": self.nn(edge_attr).view(-1, self.in_channels_l, self.out_channels)}
