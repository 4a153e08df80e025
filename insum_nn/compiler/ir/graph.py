"""Graphs of the loop-nest IR: kernels, structures and memory in order."""

from __future__ import annotations

from typing import Literal

from insum_nn.compiler.ir.nodes import Buffer, Expr, Kernel, Node

__all__ = ["Fill", "Graph", "GraphNode", "Launch", "Structure"]

StructureKind = Literal["rows", "order", "take"]


class GraphNode(Node):
    """A step of a graph."""


class Structure(GraphNode):
    """Integers derived from index tensors alone.

    `order` sorts the entries of a tensor (stable); `take` reads one tensor at the entries of another; `rows` gives for
    each value v of a sorted tensor the first entry that is at least v, and one past the last.
    """

    kind: StructureKind
    result: Buffer
    inputs: tuple[Buffer, ...]
    extent: Expr | None = None


class Fill(GraphNode):
    """Allocate a buffer, with a value in each cell or with none."""

    buffer: Buffer
    value: int | float | None


class Launch(GraphNode):
    """Run a kernel; its buffers are the graph's of the same name."""

    kernel: Kernel
    warps: int = 4
    stages: int = 2


class Graph(Node):
    """Steps in order, from inputs to outputs."""

    inputs: tuple[Buffer, ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[Buffer, ...]
