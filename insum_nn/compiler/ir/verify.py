"""Check that a kernel or a graph is well formed: each kernel before it is printed, and library graphs under test."""

from __future__ import annotations

from insum_nn.compiler.ir.access import scattered_axes
from insum_nn.compiler.ir.graph import Graph, Library, Step, factors_of, loops_of, sparse_parts, store_of
from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Alloc,
    Buffer,
    Const,
    Expr,
    If,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Stmt,
    Store,
    walk,
)
from insum_nn.compiler.lang.combining import COMBINING

__all__ = ["verify_graph", "verify_kernel"]

_PLACED = ("grid", "tile", "serial")


def verify_kernel(kernel: Kernel, *, placed: bool) -> None:
    """Check one kernel.

    Args:
        kernel: the kernel.
        placed: every loop has been given a place; otherwise none has.

    Raises:
        AssertionError: a loop of the wrong kind or a second loop of one index, an index outside of its loop, a buffer
            that is no parameter and not allocated, a subscript too many or too few, an operation of another arity.
    """
    defined = {*kernel.inputs, *(result.buffer for result in kernel.results)}
    names = [buffer.name for buffer in defined]
    assert len(names) == len(set(names)), f"two buffers of one name: {sorted(names)}"
    _check_block(kernel.body, frozenset(), defined, placed, inside_tile=False)


def verify_graph(graph: Graph) -> None:
    """Check a graph and its algorithms: each buffer is made before it is read, and made once."""
    made = set(graph.inputs)
    for node in graph.nodes:
        assert isinstance(node, Step | Library)
        _check_step(node)
        used, result = set(node.kernel.inputs), node.kernel.results[0].buffer
        assert used <= made, f"not made yet: {sorted(b.name for b in used - made)}"
        assert result not in made, f"{result.name} is made twice"
        made.add(result)
    assert set(graph.outputs) <= made


def _check_step(node: Step | Library) -> None:
    """Check that a small algorithm stores once, and that a library's has the form of its product."""
    verify_kernel(node.kernel, placed=False)
    assert len(node.kernel.results) == 1, "a step of several results"
    store, loops = store_of(node.kernel), {loop.index: loop for loop in loops_of(node.kernel)}
    if isinstance(node, Step):
        assert all(isinstance(loops[index].end, Const) for index in node.unrolled), "unrolled without a known extent"
        return
    reads, number = factors_of(store.value)
    assert store.combine == "add", f"{node.function} that does not add"
    assert number == 1, f"{node.function} of a number"
    assert len(reads) in ((1, 2) if node.function == "bag_product" else (2,)), f"{node.function} of {len(reads)} reads"
    sums = {index for index, loop in loops.items() if loop.role == "sum"}
    if node.function == "matmul":
        for subscripts in (store.subscripts, *(read.subscripts for read in reads)):
            assert not scattered_axes(subscripts), "matmul of values that are gathered"
        assert all(sums <= set(read.subscripts) for read in reads), "matmul that sums an index of one factor alone"
    else:
        rows, columns, over, shared = sparse_parts(store)
        assert rows, "bag_product without rows"
        assert columns, "bag_product without columns"
        assert set(rows) == set(range(len(rows))), "bag_product whose rows are not its first axes"
        assert {*over, *shared} == {index.name for index in loops}, "bag_product with a loop that no access has"


_MODES = {"set", *(mode.name for mode in COMBINING.values())}


def _check_block(
    statements: tuple[Stmt, ...], loops: frozenset[Index], defined: set[Buffer], placed: bool, *, inside_tile: bool
) -> None:
    defined = set(defined)
    # Terms of one kernel have much in common; buffers become more within a block, so what was right stays so.
    checked: set[Node] = set()
    for statement in statements:
        if isinstance(statement, Loop):
            assert (statement.role in _PLACED) == placed, f"a loop of role {statement.role}"
            assert statement.index not in loops, f"two loops of {statement.index.name}"
            assert not (statement.role == "grid" and inside_tile), "a grid loop inside of a program"
            for bound in (statement.begin, statement.end, statement.limit, statement.word):
                if bound is not None:
                    _check_expr(bound, loops, defined, checked)
            inside = inside_tile or statement.role != "grid"
            _check_block(statement.body, loops | {statement.index}, defined, placed, inside_tile=inside)
        elif isinstance(statement, Alloc):
            assert statement.buffer.local, f"{statement.buffer.name} is allocated and not local"
            defined.add(statement.buffer)
        elif isinstance(statement, If):
            _check_expr(statement.condition, loops, defined, checked)
            for block in (statement.then, statement.otherwise):
                _check_block(block, loops, defined, placed, inside_tile=inside_tile)
        else:
            assert isinstance(statement, Store)
            _check_access(statement.buffer, statement.subscripts, defined)
            assert statement.combine in _MODES, f"no store combines by {statement.combine}"
            for expr in (*statement.subscripts, statement.value, statement.where):
                if expr is not None:
                    _check_expr(expr, loops, defined, checked)


def _check_expr(expr: Expr, loops: frozenset[Index], defined: set[Buffer], checked: set[Node]) -> None:
    for node in walk(expr, seen=checked):
        if isinstance(node, Index):
            assert node in loops, f"{node.name} outside of its loop"
        elif isinstance(node, Load):
            _check_access(node.buffer, node.subscripts, defined)
        elif isinstance(node, Op):
            assert len(node.args) == OPERATIONS[node.name].arity, f"{node.name} of {len(node.args)} operands"


def _check_access(buffer: Buffer, subscripts: tuple[Expr, ...], defined: set[Buffer]) -> None:
    assert buffer in defined, f"{buffer.name} is not known here"
    assert len(subscripts) == len(buffer.shape), f"{buffer.name} has {len(buffer.shape)} axes"
