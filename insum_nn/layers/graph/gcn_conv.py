"""Graph convolution: takes the place of `torch_geometric.nn.GCNConv`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from insum_nn.errors import InsumShapeError
from insum_nn.layers.graph.convolutions import Normalised
from insum_nn.layers.graph.messages import OptTensor, pyg
from insum_nn.ops.adjacency_product import ADJACENCY_PRODUCT, adjacency_product
from insum_nn.structure.adjacency import Adjacency
from insum_nn.structure.graph_entries import Flow
from insum_nn.structure.plain_tensors import plain_tensors

__all__ = ["GCNConv"]


class GCNConv(Normalised, pyg.conv.GCNConv):  # type: ignore[misc]
    """The graph convolution of Kipf and Welling: `torch_geometric.nn.GCNConv`.

        Y[I[e],f] += W[e] * X[J[e],f]                of x A, or of x where that is narrower: (A x) W^T = A (x W^T)
        Out[Row[p],n] += Val[p] * X[Col[p],n]        the same of an `Adjacency`

    `W` holds, for each edge, its weight divided by the square roots of the degrees of its two nodes. An edge list and
    its weights are read, normalised and sorted once (by the tensors' identity and version) for all layers, forwards
    and backwards; no tensor has both an axis of edges and one of features. Constructor, `forward`, `state_dict` and
    results are PyTorch Geometric's; in addition gradients are of any order, in `edge_weight` too, degrees of fp16 and
    bf16 are summed in float32, and sums have a fixed order with `options=Options(deterministic=True)` or torch's own
    switch. Of duplicate self-loops the last one counts.

    PyTorch Geometric's own code, which forms one message per edge, runs where messages are needed: for explainers,
    hooks of `propagate`, `message`, `aggregate` or the module `aggr_module`, `decomposed_layers` above 1, an `aggr`
    that is no sum, mean, maximum or minimum, subclasses that define any of those methods, TorchScript, `EdgeIndex`, and
    under torch.compile for sparse adjacencies, which are otherwise read, normalised and sorted once as edge lists are.

    Under `torch.compile`, which remembers no tensor from call to call, an edge list is normalised and sorted in every
    call. With `cached=True`, or an `Adjacency` in place of the edge list, compiled and exported graphs take the sorted
    matrix as their input. Under `torch.vmap` each call also normalises the edge lists of a batch of graphs, which have
    equally many edges.

    Writes to an edge list through `.data`, a NumPy array or DLPack are not counted: the layer then continues with the
    old graph. Pass a new tensor, or `options=Options(validate=True)`, which reads the edges at every call.

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), eq. (2).

    Args:
        *args: those of `torch_geometric.nn.GCNConv`.
        options: compile options, the deterministic switch among them.
        **kwargs: those of `torch_geometric.nn.GCNConv`.

    Raises:
        ValueError: `add_self_loops` without `normalize`, or an unknown `flow`.

    >>> from insum_nn.layers.graph.gcn_conv import GCNConv
    >>> layer = GCNConv(16, 32)
    >>> layer
    GCNConv(16, 32)
      Y[I[e],f] += W[e] * X[J[e],f]
      of an Adjacency:
        Out[Row[p],n] += Val[p] * X[Col[p],n]
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """

    __call__: Callable[..., Tensor]
    # The edges that `cached` keeps, and their matrix.
    _cached_adjacency: tuple[Tensor, Adjacency] | None = None
    # PyG otherwise reads these types from a class's source, which it looks up by class name. This class has the name of
    # the peer's, so they are declared here.
    propagate_type: ClassVar[dict[str, Any]] = {"x": Tensor, "edge_weight": OptTensor}

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        return {"of an Adjacency": (ADJACENCY_PRODUCT,)}

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolve.

        Args:
            x: (n, F), or (b, n, F) over one shared graph; differentiable.
            edge_index: (2, e) integers, or what else PyTorch Geometric takes; or an `Adjacency`, which is used as it
                is, whatever the layer's `normalize`, `add_self_loops` and `flow`.
            edge_weight: (e,) or (e, 1); differentiable.

        Returns:
            (n, O) or (b, n, O).

        Raises:
            ValueError: `x` is a tuple, `edge_index` is no graph, a weight is missing, or the direction does not fit.
            IndexError: a node lies outside.
        """
        if isinstance(edge_index, Adjacency):
            return self._of_matrix(x, edge_index)
        if self._asks(edge_index, x) or not isinstance(x, Tensor):
            return self._peer.forward(self, x, edge_index, edge_weight)  # type: ignore[attr-defined, no-any-return]
        if x.dim() < 2 or not -x.dim() <= self.node_dim < x.dim() or self.node_dim in (-1, x.dim() - 1):
            raise InsumShapeError(
                f"'{type(self).__name__}' takes features of at least two dimensions, the last one that of features",
                details=[f"expected (.., n, {self.in_channels}) with n along {self.node_dim}; got {tuple(x.shape)}"],
                fix="pass x of shape (n, in_channels).",
                got=tuple(x.shape),
            )
        size = self._check_input(edge_index, None)
        edges, weight = self._weighted(x, edge_index, edge_weight)
        if edges is (self._cached_edge_index or (None,))[0] and x.dim() == 2 and weight is not None:
            return self._of_matrix(x, self._matrix(edges, weight, x.size(0)))
        return self._in_order(x, weight, lambda rows, bias: self._sum(edges, size, rows, bias, edge_weight=weight))

    def _of_matrix(self, x: Tensor, adjacency: Adjacency) -> Tensor:
        options, value = self.options, adjacency.value
        return self._in_order(x, value, lambda *rows: adjacency_product(rows[0], adjacency, rows[1], options=options))

    def _matrix(self, edges: Tensor, weight: Tensor, num_nodes: int) -> Adjacency:
        """Return the matrix of the edges that `cached` keeps, sorted once; a compiled graph takes it as its input."""
        kept = self._cached_adjacency
        if kept is None or kept[0] is not edges:
            learned = weight.requires_grad and torch.is_grad_enabled()
            with nullcontext() if learned else plain_tensors(edges):
                flow = cast("Flow", self.flow)
                matrix = Adjacency.from_edges(edges, weight, num_nodes, flow=flow, normalize=False)
            kept = self._cached_adjacency = edges, matrix
        return kept[1]

    def _in_order(self, x: Tensor, weight: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
        """Multiply by the layer's matrix, before or after the graph's."""
        bias = cast("Tensor | None", self.bias)
        if not self._aggregates_first(x, weight):
            # As the sum's initial value the bias spares a pass over the output.
            return product(self.lin(x), bias)
        out = self.lin(product(x, None))
        return out if bias is None else out + bias

    def _aggregates_first(self, x: Tensor, edge_weight: Tensor | None) -> bool:
        """Return whether (A X) W costs less than A (X W), counting the products of forward and backward."""
        weight = self.lin.weight
        if x.layout != torch.strided or isinstance(weight, torch.nn.parameter.UninitializedParameter):
            return False
        if self._aggregates(self.aggr_module) not in (["Sum"], ["Mean"]):
            return False
        if edge_weight is not None and torch.promote_types(x.dtype, edge_weight.dtype) != x.dtype:
            # The peer's features are widened by the edges' weights after the dense product.
            return False
        if torch.jit.is_tracing():
            # One graph, for training too.
            return self.in_channels < self.out_channels
        learns = torch.is_grad_enabled()
        learns_edges = learns and edge_weight is not None and edge_weight.requires_grad
        narrow = 1 + (learns and x.requires_grad) + learns_edges
        wide = 1 + (learns and (x.requires_grad or weight.requires_grad)) + learns_edges
        return self.in_channels * narrow < self.out_channels * wide
