"""Graph convolution: takes the place of `torch_geometric.nn.GCNConv`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from insum_nn.errors import InsumShapeError
from insum_nn.layers.graph.messages import EdgeIndex, MessageLayer, OptTensor, SparseTensor, asks_for_messages, pyg  # pyright: ignore
from insum_nn.ops.graph_conv import GRAPH_ENTRIES, adjacency_product, graph_conv
from insum_nn.ops.graph_matrix import CARRY, Recipe, edges_of_adjacency, edges_of_sparse_tensor
from insum_nn.ops.statements import static_shape, untraced
from insum_nn.structure.adjacency import Adjacency
from insum_nn.structure.gcn_norm import gcn_norm
from insum_nn.structure.graph_entries import Flow, Loops, check_square
from insum_nn.structure.plain_tensors import is_batched, plain_tensors
from insum_nn.tensor_cache import forget

__all__ = ["GCNConv"]

peer = pyg.conv.gcn_conv

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class _Edges(NamedTuple):
    """A graph in any form as an edge list, and how it becomes a matrix."""

    edge_index: Tensor
    edge_weight: Tensor | None
    recipe: Recipe


class GCNConv(MessageLayer, peer.GCNConv):
    """The graph convolution of Kipf and Welling: `torch_geometric.nn.GCNConv`.

        Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]      of x W^T, or of x where that is narrower: (A x) W^T = A (x W^T)
        Out[Row[p],n] += Val[p] * X[Col[p],n]          the same of an edge list in graphs that torch records

    `Val` holds, for each edge, its weight divided by the square roots of the degrees of its two nodes. The matrix and
    its transpose are sorted and grouped once for each edge list (by the tensor's identity and version) and shared by
    all layers, forwards and backwards; no tensor has both an axis of edges and one of features. Constructor,
    `state_dict` and results are PyTorch Geometric's. In addition there are gradients of any order in features, weights
    and `edge_weight`; sums in a fixed order with `options=Options(deterministic=True)` or torch's own switch; and CSC
    adjacencies that are normalised. `torch.compile` finds no graph break, and degrees of fp16 and bf16 are summed in
    float32. Of duplicate self-loops the last one counts, and only it gets a gradient.

    PyTorch Geometric's own code, which forms one message per edge, runs where messages are needed: for explainers,
    hooks of `propagate`, `message`, `aggregate` or the module `aggr_module`, `decomposed_layers` above 1, an `aggr`
    other than a sum, subclasses that define any of those methods, TorchScript, and rectangular sparse adjacencies.

    `explain_statement(x, edge_index)` shows how a call runs, as `explain` does in the other layers: PyTorch Geometric's
    `explain` is no method, but the property with which its explainers switch themselves on.

    Under `torch.compile`, which remembers no tensor from call to call, an edge list is normalised and sorted in every
    call. With `cached=True`, or an `Adjacency` in place of the edge list, compiled and exported graphs take the sorted
    matrix as their input. Under `torch.vmap` each call also normalises the edge lists of a batch of graphs, which have
    equally many edges.

    An edge list is read and sorted once, and the result is kept until torch counts a write to the tensor. Writes
    through `.data`, a NumPy array or DLPack are not counted: the layer then continues with the old graph. Pass a new
    tensor, or `options=Options(validate=True)`, which reads the edges and weights at every call. Under `cached=True`
    the first graph stays in any case.

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), eq. (2).

    Args:
        in_channels: features of a node; -1: those of the first input.
        out_channels: features of a node of the result.
        improved: added self-loops have weight 2 instead of 1, where edges have weights.
        cached: keep the first normalised graph, and use it in all later calls.
        add_self_loops: give every node a self-loop; default `normalize`.
        normalize: divide edge weights by the square roots of the degrees.
        bias: learn an additive bias.
        options: compile options, the deterministic switch among them.
        **kwargs: `aggr`, `flow`, `node_dim` and the other arguments of `MessagePassing`.

    Raises:
        ValueError: `add_self_loops` without `normalize`, or an unknown `flow`.

    >>> from insum_nn.layers.graph.gcn_conv import GCNConv
    >>> layer = GCNConv(16, 32)
    >>> layer
    GCNConv(16, 32)
      Out[Row[g],n] += Val[g,q] * X[Col[g,q],n]
      for edge lists in graphs that torch records:
        Out[Row[p],n] += Val[p] * X[Col[p],n]
    >>> layer(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 32])
    """

    __call__: Callable[..., Tensor]
    # The graph from which the matrix was made that calls with `cached` read, and that matrix.
    _cached_adjacency = None
    _makes_messages: ClassVar[bool] = False
    # PyG otherwise reads these types from a class's source, which it looks up by class name. This class has the name of
    # the peer's, so they are declared here.
    propagate_type: ClassVar[dict[str, Any]] = {"x": Tensor, "edge_weight": OptTensor}
    # For calls that ask for messages.
    propagate = pyg.MessagePassing.propagate

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls._makes_messages |= "propagate" in cls.__dict__
        super().__init_subclass__(**kwargs)

    def _statements(self) -> tuple[str, ...]:
        return (CARRY,)

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        if self.options.validate or self.options.deterministic:
            return {}
        return {"for edge lists in graphs that torch records": (GRAPH_ENTRIES,)}

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolve.

        Args:
            x: (n, F), (b, n, F) over one shared graph, or a sparse matrix (n, F); differentiable.
            edge_index: (2, e) integers, an `EdgeIndex`, or the transposed adjacency (n, n) as torch's sparse COO, CSR
                or CSC, or as a `torch_sparse.SparseTensor`; or an `Adjacency`, which is used as it is, whatever the
                layer's `normalize`, `add_self_loops` and `flow`.
            edge_weight: (e,) or (e, 1); differentiable. With an adjacency its values are the weights, and this is not
                read.

        Returns:
            (n, O) or (b, n, O).

        Raises:
            ValueError: `x` is a tuple, `edge_index` is no graph, a weight is missing, or the direction does not fit.
            IndexError: a node lies outside.
        """
        if self._asks_for_messages(x, edge_index):
            return self._peer.forward(self, x, edge_index, edge_weight)  # type: ignore[attr-defined, no-any-return]
        return self._fused(x, edge_index, edge_weight)

    # Which path.

    def _asks_for_messages(self, x: Any, edge_index: Any) -> bool:
        """Return whether messages are asked for, or the input is of a kind whose checks are the peer's."""
        if self._makes_messages or asks_for_messages(self, self._peer):
            return True
        if not isinstance(x, Tensor) or not isinstance(edge_index, (Tensor, SparseTensor, Adjacency)):
            return True
        if isinstance(edge_index, Adjacency) or self.normalize:
            return False
        is_matrix = isinstance(edge_index, SparseTensor) or edge_index.layout in _SPARSE
        return is_matrix and edge_index.size(0) != edge_index.size(1)

    # The fused path.

    def _fused(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        if self.options.validate and not torch.compiler.is_compiling():
            stored = (edge_index,)
            if isinstance(edge_index, (SparseTensor, Adjacency)):
                stored = edge_index[:2] if isinstance(edge_index, Adjacency) else edge_index.coo()[:2]
            forget(part for part in stored if part is not None)
        graph = self._graph(x, edge_index, edge_weight)
        first = self._aggregates_first(x, graph.value if isinstance(graph, Adjacency) else graph.edge_weight)
        # What the edges carry, what its sum starts from, and the way back to the shape of `x`.
        rows, back = _node_rows(x if first else self.lin(x), self.node_dim)
        initial = cast("Tensor | None", self.bias) if not first and back is None else None
        if isinstance(graph, Adjacency):
            out = adjacency_product(rows, graph, initial, options=self.options)
        else:
            out = graph_conv(rows, *graph[:2], initial, recipe=graph.recipe, options=self.options)
        if back is not None:
            out = back(out)
        if first:
            out = self.lin(out)
        bias = cast("Tensor | None", self.bias)
        return out if bias is None or initial is not None else out + bias

    def _aggregates_first(self, x: Tensor, edge_weight: Tensor | None) -> bool:
        """Return whether (A X) W costs less than A (X W), counting the products of forward and backward."""
        weight = self.lin.weight
        if x.layout != torch.strided or isinstance(weight, torch.nn.parameter.UninitializedParameter):
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

    # Graphs.

    def _graph(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> _Edges | Adjacency:
        """Return the graph as an edge list; or, with `cached`, as the matrix that was made of the first one."""
        if x.dim() < 2 or not -x.dim() <= self.node_dim < x.dim() or self.node_dim in (-1, x.dim() - 1):
            raise InsumShapeError(
                f"'{type(self).__name__}' takes features of at least two dimensions, the last one that of features",
                details=[f"expected (.., n, {self.in_channels}) with n along {self.node_dim}; got {tuple(x.shape)}"],
                fix="pass x of shape (n, in_channels).",
                got=tuple(x.shape),
            )
        if isinstance(edge_index, Adjacency):
            return edge_index
        num_nodes = static_shape(x)[self.node_dim]
        self._check_input(edge_index, None)
        if self.normalize and (self.cached or self._cached_edge_index is not None or self._cached_adj_t is not None):
            # A traced graph has it as a constant.
            with untraced() if torch.jit.is_tracing() else nullcontext():
                known = self._cached_graph(edge_index, edge_weight, num_nodes, x.dtype)
                if known is not None:
                    return self._cached_matrix(*known, num_nodes, x.dtype)
        edges, edge_weight, loops = self._edges(edge_index, edge_weight, num_nodes, x.dtype, self.normalize)
        loops = loops if self.normalize and self.add_self_loops else "none"
        recipe = Recipe(self.normalize, loops, 2.0 if self.improved else 1.0, cast("Flow", self.flow))
        return _Edges(edges, edge_weight, recipe)

    def _edges(
        self, edge_index: Any, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype, normalize: bool
    ) -> tuple[Tensor, Tensor | None, Loops]:
        """Return a graph in any form as an edge list, its weights, and how it is given self-loops."""
        if isinstance(edge_index, SparseTensor):
            check_square(edge_index.size(0), edge_index.size(1), num_nodes)
            return *edges_of_sparse_tensor(edge_index, dtype, normalize), "replaced"
        if edge_index.layout in _SPARSE:
            check_square(edge_index.size(0), edge_index.size(1), num_nodes)
            return *edges_of_adjacency(edge_index), "more"
        if isinstance(edge_index, EdgeIndex):
            if not normalize:
                check_square(edge_index.num_rows, edge_index.num_cols, num_nodes)
            edge_index = edge_index.as_tensor()
        return edge_index, edge_weight, "remaining"

    def _cached_graph(
        self, edge_index: Any, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype
    ) -> tuple[Any, Tensor | None] | None:
        """Return the normalised graph of the first call, kept as the peer keeps it."""
        by_peer = sparse = isinstance(edge_index, SparseTensor)
        name = "_cached_adj_t" if sparse else "_cached_edge_index"
        known = getattr(self, name)
        if known is None and self.cached:
            if not sparse and is_batched(edge_index):
                raise InsumShapeError(
                    "'cached=True' keeps one graph, and 'edge_index' is a batch of graphs under torch.vmap",
                    fix="make the layer without cached, or call it once with the graph that all calls share.",
                )
            how = num_nodes, self.improved, self.add_self_loops, cast("Flow", self.flow), dtype
            if not sparse and edge_index.layout in _SPARSE:
                by_peer = True
                if edge_index.layout == torch.sparse_csc:
                    edge_index = edge_index.to_sparse_csr()
            if by_peer:
                known = peer.gcn_norm(edge_index, edge_weight, *how)
            else:
                edges = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
                known = gcn_norm(edges, edge_weight, *how, fixed_size=torch.compiler.is_compiling())
            setattr(self, name, known)
        return (known, None) if sparse and known is not None else known

    def _cached_matrix(
        self, edge_index: Any, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype
    ) -> Adjacency:
        """Return the matrix of the normalised graph that is kept."""
        kept = self._cached_adjacency
        if kept is not None and kept[0] is edge_index:
            return kept[1]
        edges, weight, _ = self._edges(edge_index, edge_weight, num_nodes, dtype, False)
        learned = weight is not None and weight.requires_grad and torch.is_grad_enabled()
        with nullcontext() if learned else plain_tensors(edges):
            matrix = Adjacency.from_edges(edges, weight, num_nodes, flow=cast("Flow", self.flow), normalize=False)
        self._cached_adjacency = edge_index, matrix
        return matrix


def _node_rows(dense: Tensor, node_dim: int) -> tuple[Tensor, Any]:
    """Return features with one row per node, and the way back; `None` where they are so already."""
    if dense.dim() == 2:
        return dense, None
    moved = dense.movedim(node_dim, 0)
    shape = moved.shape

    def back(rows: Tensor) -> Tensor:
        return rows.reshape(shape).movedim(0, node_dim)

    return moved.reshape(shape[0], -1), back
