"""A graph's adjacency matrix, with all that products with it and their gradients read, made and kept by the caller."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from insum_nn.sorted_rows import compressed_rows, sort_pairs
from insum_nn.structure.gcn_norm import gcn_norm
from insum_nn.structure.graph_entries import Flow, check_edge_index, check_edge_weight, ends_of

__all__ = ["Adjacency"]


class Adjacency(NamedTuple):
    """A weighted adjacency matrix, normalised for a graph convolution, sorted by receivers and by senders.

        Out[row[p],n] += value[p] * X[col[p],n]

    `GCNConv` takes it in place of `edge_index`. A graph that `torch.compile` or `torch.export` records then takes these
    tensors as its inputs: it sorts and normalises nothing. It is a named tuple of tensors, so that
    `torch_geometric.data.Data` moves it to a device with all its other attributes. `from_edges` makes it; the tensors
    are not checked again, and must not be written to.

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), section 2.

    Attributes:
        row: (p,) int32 or int64, ascending: receivers.
        col: (p,): senders.
        value: (p,) the weights; differentiable.
        begin: (n + 1,) where the entries of each receiver begin, and the number of entries.
        order: (p,) the entries in the order of their senders.
        t_row: (p,) ascending: the same matrix transposed, its receivers are the senders.
        t_col: (p,).
        t_value: (p,).
        t_begin: (n + 1,).
    """

    row: Tensor
    col: Tensor
    value: Tensor
    begin: Tensor
    order: Tensor
    t_row: Tensor
    t_col: Tensor
    t_value: Tensor
    t_begin: Tensor

    @classmethod
    def from_edges(
        cls,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: Flow = "source_to_target",
        dtype: torch.dtype | None = None,
        *,
        normalize: bool = True,
    ) -> Self:
        """Normalise and sort the edges of a graph.

        Args:
            edge_index: (2, e) integers.
            edge_weight: (e,) or (e, 1); differentiable. Default: 1 for each edge.
            num_nodes: nodes; default one more than the largest.
            improved: self-loops that are added weigh 2 rather than 1, where edges have weights.
            add_self_loops: give every node exactly one self-loop.
            flow: which end of an edge receives.
            dtype: of the weights, without `edge_weight`; default torch's.
            normalize: as `gcn_norm` does; else edges and weights are taken as they are, and no self-loops are added.

        Raises:
            InsumShapeError: not two rows, or not one weight per edge.
            InsumDtypeError: nodes are no integers, or weights to be normalised no floating-point numbers.
            InsumRangeError: a node lies outside.
            InsumNameError: an unknown `flow`.

        >>> graph = Adjacency.from_edges(torch.tensor([[0, 1], [1, 0]]), num_nodes=3)
        >>> graph.row.tolist(), graph.col.tolist(), [round(v, 6) for v in graph.value.tolist()]
        ([0, 0, 1, 1, 2], [0, 1, 0, 1, 2], [0.5, 0.5, 0.5, 0.5, 1.0])
        >>> graph.num_nodes, graph.begin.tolist()
        (3, [0, 2, 4, 5])
        """
        if num_nodes is None:
            num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
        traced = torch.compiler.is_compiling()
        if normalize:
            edge_index, edge_weight = gcn_norm(
                edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype, fixed_size=traced
            )
        else:
            check_edge_index(edge_index, num_nodes, values=not traced)
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
        edge_weight = check_edge_weight(edge_weight, edge_index)
        row, col, first = sort_pairs(*ends_of(edge_index, flow), num_nodes)
        t_row, t_col, order = sort_pairs(col, row, num_nodes)
        value = edge_weight.index_select(0, first)
        begin, t_begin = compressed_rows(row, num_nodes), compressed_rows(t_row, num_nodes)
        return cls(row, col, value, begin, order, t_row, t_col, value.index_select(0, order), t_begin)

    @property
    def num_nodes(self) -> int:
        """Rows, and columns."""
        return self.begin.shape[0] - 1
