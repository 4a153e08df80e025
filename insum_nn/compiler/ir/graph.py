"""Graphs of the loop-nest IR: library calls and small algorithms in order."""

from __future__ import annotations

from typing import Literal

from insum_nn.compiler.ir.access import Labels, indices_of, plain_labels
from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, Index, Kernel, Load, Loop, Node, Op, Size, Store

__all__ = [
    "Extent",
    "Graph",
    "GraphNode",
    "Library",
    "Step",
    "factors_of",
    "loops_of",
    "sparse_parts",
    "store_of",
    "stores_of",
]

Function = Literal["matmul", "bag_product"]


class GraphNode(Node):
    """A step of a graph."""


class Step(GraphNode):
    """Compute what a small algorithm says: a kernel of one store whose loops are not placed.

    `unrolled`: sums of a known number of terms that become straight-line code.
    """

    kernel: Kernel
    unrolled: tuple[Index, ...] = ()


class Library(GraphNode):
    """Compute what a small algorithm says by one call of a library.

    `matmul`: a batched product of two matrices, each of their axes an index. `bag_product`: rows of a dense matrix,
    times a value for each entry, added up by row of a sparse one; the dense factor is last (see `sparse_parts`).
    """

    function: Function
    kernel: Kernel


class Extent(Node):
    """Where a size is read: along an axis of an input; without one it is passed as an integer."""

    size: Size
    buffer: Buffer | None = None
    axis: int = 0


class Graph(Node):
    """Steps in order, from inputs to outputs; `extents`: where the sizes of library calls are read."""

    inputs: tuple[Buffer, ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[Buffer, ...]
    extents: tuple[Extent, ...] = ()


def loops_of(kernel: Kernel) -> list[Loop]:
    """Return the loops around the stores of an algorithm, outer first."""
    loops: list[Loop] = []
    body = kernel.body
    while len(body) == 1 and isinstance(body[0], Loop):
        loops.append(body[0])
        body = body[0].body
    return loops


def store_of(kernel: Kernel) -> Store:
    """Return the one store of an algorithm."""
    (store,) = stores_of(kernel)
    return store


def stores_of(kernel: Kernel) -> tuple[Store, ...]:
    """Return the stores of an algorithm, inside of all of its loops."""
    loops = loops_of(kernel)
    body = loops[-1].body if loops else kernel.body
    stores = tuple(each for each in body if isinstance(each, Store))
    assert len(stores) == len(body)
    return stores


def factors_of(value: Expr) -> tuple[list[Load], int | float]:
    """Split a product into the reads that it multiplies and the product of its numbers."""
    reads: list[Load] = []
    number: int | float = 1

    def visit(expr: Expr) -> None:
        nonlocal number
        if isinstance(expr, Op) and expr.name == "mul":
            for arg in expr.args:
                visit(arg)
        elif isinstance(expr, Const):
            number = number * expr.value
        else:
            assert isinstance(expr, Load)
            reads.append(expr)

    visit(value)
    return reads, number


def sparse_parts(store: Store) -> tuple[tuple[int, ...], tuple[int, ...], Labels, Labels]:
    """Return the parts of a `bag_product`, `out[Row[e], n] += Val[e] * dense[Col[e], n]`.

    Returns:
        The axes of the result that an entry selects along, those of the dense factor, the indices of the entries, and
        those that the result and the dense factor share.
    """
    *values, dense = factors_of(store.value)[0]
    pointers = [s for s in (*store.subscripts, *dense.subscripts) if not isinstance(s, Index)]
    entries = set(indices_of(*pointers, *values))
    rows, columns = (
        tuple(axis for axis, s in enumerate(subscripts) if set(indices_of(s)) <= entries)
        for subscripts in (store.subscripts, dense.subscripts)
    )
    over = indices_of(*(store.subscripts[axis] for axis in rows), *(dense.subscripts[axis] for axis in columns))
    return rows, columns, over, plain_labels([s for axis, s in enumerate(store.subscripts) if axis not in rows])
