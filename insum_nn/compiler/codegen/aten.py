"""Print a graph of library calls as torch calls: a `CallGraph`.

It takes the tensors of the graph in order, then the sizes that no tensor shows, then the initial value. Sizes that a
tensor shows are read from its shape, so one graph serves all sizes.
"""

from __future__ import annotations

import operator

import torch

from insum_nn.compiler.codegen.aten_extremum import ExtremumWriter
from insum_nn.compiler.codegen.aten_read import Node, Value
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.access import Labels, affine_terms, indices_of, plain_labels, scattered_axes
from insum_nn.compiler.ir.graph import Graph, Library, Step, factors_of, loops_of, sparse_parts, store_of
from insum_nn.compiler.ir.nodes import Const, Expr, Index, Kernel, Load, Op, Store
from insum_nn.compiler.lang.combining import selecting
from insum_nn.compiler.lang.functions import FUNCTIONS
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.library import library_calls

__all__ = ["print_aten"]


def print_aten(graph: Graph, device: str, options: Options, *, compiled: bool, empty: bool = False) -> CallGraph:
    """Print the graph as torch calls.

    Args:
        graph: steps that `library_graph` made.
        device: type of the device that the tensors are on.
        options: compile options.
        compiled: for a compiler that fuses, rather than for torch's library calls.
        empty: some index may have no values.
    """
    return _StepWriter(graph, device, options, compiled=compiled, empty=empty).finished()


_SIGNS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv}


class _StepWriter(ExtremumWriter):
    """Writes step by step."""

    def finished(self) -> CallGraph:
        self.inputs()
        for step in self.steps:
            store = store_of(step.kernel)
            if store.buffer is self.output:
                write = self.write_sum if selecting(store.combine) is None else self.write_extremum
                self.graph.finish(write(step.kernel, store))
            else:
                self.values[store.buffer] = self.step(step, store)
        return self.graph

    def step(self, step: Step | Library, store: Store) -> Value:
        if isinstance(step, Library):
            return self.matmul(step.kernel, store) if step.function == "matmul" else self.bag_product(store)
        if isinstance(store.value, Const):
            found = self.some(self.added_conditions(store), plain_labels(store.subscripts))
            assert found is not None
            return Value(*found)
        if isinstance(store.value, Op) and store.value.name != "mul":
            labels = plain_labels(store.subscripts)
            node = self.applied(store.value, labels)
            assert isinstance(node, Node)
            return Value(node, labels, wide=self.widens)
        if isinstance(store.value, Load):
            return self.total(store, store.value) if store.combine == "add" else self.gather(store, store.value)
        assert isinstance(store.value, Op)
        return self.multiply(step, store, *store.value.args)

    # Steps.

    def gather(self, store: Store, read: Load) -> Value:
        """Gather a read, or zero it under a condition."""
        if (made := self.values.get(read.buffer)) is not None:
            node, labels, own, wide = made.node, plain_labels(read.subscripts), None, made.wide
        else:
            node, labels, present, inside = self.read(read)
            own, wide = self.both(present, inside), False
        mask = self.aligned_and([(own, labels), *map(self.holds, self.added_conditions(read))], labels)
        target = plain_labels(store.subscripts)
        if mask is not None:
            node = self.call(torch.where, mask, node, 0)
        if labels != target:
            node = self.align(node, labels, target)
        return Value(node, target, wide=wide, owned=mask is not None or bool(scattered_axes(read.subscripts)))

    def applied(self, value: Expr, labels: Labels) -> Node | float:
        """Compute a function of what is read, over some indices; where a read misses, the result means nothing."""
        if isinstance(value, Const):
            return value.value
        if isinstance(value, Load):
            node, own, _, _ = self.read(value)
            return self.align(self.widen(Value(node, own)), own, labels)
        assert isinstance(value, Op)
        if value.name == "one":
            own = indices_of(value)
            ones = self.call(torch.ones, self.shape(own), dtype=self.wide_dtype, device=self.device)
            return self.align(ones, own, labels)
        args = [self.applied(arg, labels) for arg in value.args]
        if value.name in _SIGNS:
            return self.call(_SIGNS[value.name], *args)
        function = FUNCTIONS[value.name]
        last = len(args) - function.number
        tensors = [self.number(arg) if isinstance(arg, int | float) else arg for arg in args[:last]]
        return self.call(function.forward, *tensors, *args[last:])

    def number(self, value: float) -> Node:
        return self.call(torch.full, (), value, dtype=self.wide_dtype, device=self.device)

    def total(self, store: Store, read: Load) -> Value:
        """Sum one factor."""
        value, labels = self.operand(read), plain_labels(store.subscripts)
        axes = [axis for axis, label in enumerate(value.labels) if label not in labels]
        remaining = tuple(label for label in value.labels if label in labels)
        node = self.call(torch.sum, value.node, axes, dtype=self.wide_dtype)
        return Value(self.align(node, remaining, labels), labels, wide=self.widens)

    def multiply(self, step: Step, store: Store, left: Expr, right: Expr) -> Value:
        """Multiply two factors, or one and a number, and sum."""
        a, labels = self.operand(left), plain_labels(store.subscripts)
        if isinstance(right, Const):
            return Value(self.call(operator.mul, self.widen(a), right.value), labels, wide=self.widens)
        b = self.operand(right)
        sums = [loop for loop in loops_of(step.kernel) if loop.index.name not in labels]
        all_labels = (*labels, *(loop.index.name for loop in sums))
        x, y = (self.align(self.widen(value), value.labels, all_labels) for value in (a, b))
        terms, left_labels = [(x, y)], all_labels
        for loop in reversed(sums):
            if loop.index in step.unrolled:
                assert isinstance(loop.end, Const)
                axis, name, count = left_labels.index(loop.index.name), loop.index.name, int(loop.end.value)
                terms = [
                    (self.pick(x, a, name, axis, slot), self.pick(y, b, name, axis, slot))
                    for x, y in terms
                    for slot in range(count)
                ]
                left_labels = left_labels[:axis] + left_labels[axis + 1 :]
        total: Node | None = None
        for x, y in terms:
            term = self.call(operator.mul, x, y)
            total = term if total is None else self.call(operator.add, total, term)
        assert total is not None
        if left_labels != labels:
            axes = [axis for axis, label in enumerate(left_labels) if label not in labels]
            total = self.call(torch.sum, total, axes, dtype=self.wide_dtype)
        return Value(total, labels, wide=self.widens)

    def pick(self, node: Node, value: Value, label: str, axis: int, slot: int) -> Node:
        return self.method("select", node, axis, slot if label in value.labels else 0)

    # Library calls.

    def matmul(self, kernel: Kernel, store: Store) -> Value:
        (first, second), _ = factors_of(store.value)
        left, right, labels = self.operand(first), self.operand(second), plain_labels(store.subscripts)
        batch = tuple(label for label in labels if label in left.labels and label in right.labels)
        k = tuple(loop.index.name for loop in loops_of(kernel) if loop.index.name not in labels)
        m = tuple(label for label in labels if label not in right.labels)
        n = tuple(label for label in labels if label not in left.labels)
        node = self.call(torch.matmul, self.matrix(left, batch, m, k), self.matrix(right, batch, k, n))
        if (len(batch) != 1 and batch) or len(m) != 1 or len(n) != 1:
            node = self.method("reshape", node, self.shape(labels))
        return Value(node, labels)

    def matrix(self, value: Value, batch: Labels, rows: Labels, columns: Labels) -> Node:
        """Fold indices into `[batch, rows, columns]`; without a batch, axes of no index are left out."""
        node = value.node
        if value.wide:
            node = self.method("to", node, self.dtype)
        node = self.align(node, value.labels, batch + rows + columns)
        groups = [group for group in (batch, rows, columns) if group or batch]
        if all(len(group) == 1 for group in groups):
            return node
        return self.method("reshape", node, tuple(self.extent(group) for group in groups))

    def bag_product(self, store: Store) -> Value:
        *values, dense = factors_of(store.value)[0]
        rows, columns, over, labels = sparse_parts(store)
        value = None
        if values:
            held = self.operand(values[0])
            value = self.method("expand", self.align(held.node, held.labels, over), self.shape(over))
        node = self.call(
            library_calls.bag_product,
            value,
            [self.entry_index(store.subscripts[axis], self.size(store.buffer.shape[axis]), over) for axis in rows],
            [self.entry_index(dense.subscripts[axis], self.axis_size(dense.buffer, axis), over) for axis in columns],
            self.shape(over),
            self.rows_of(dense, columns, labels),
            _ascends(store.subscripts[rows[0]], over),
        )
        if len(labels) != 1:
            node = self.method("unflatten", node, 1, self.shape(labels))
        if len(rows) != 1:
            node = self.method("unflatten", node, 0, tuple(self.size(store.buffer.shape[axis]) for axis in rows))
        return Value(node, ())

    def rows_of(self, read: Load, axes: tuple[int, ...], labels: Labels) -> Node:
        """Return a factor as a matrix: some axes, then all others in the order of `labels`."""
        order = [*axes, *(read.subscripts.index(Index(label)) for label in labels)]
        node = self.tensors[read.buffer]
        if order != sorted(order):
            node = self.method("permute", node, order)
        node = node if len(labels) == 1 else self.method("flatten", node, len(axes))
        return node if len(axes) == 1 else self.method("flatten", node, 0, len(axes) - 1)

    def entry_index(self, subscript: Expr, size: Node | int, over: Labels) -> tuple[object, ...]:
        """Return an `EntryIndex`, whose axes are positions among some indices."""
        if isinstance(subscript, Index):
            return None, (over.index(subscript.name),), size, False
        if isinstance(subscript, Load):
            return (*self.entry_term(subscript, over), size, subscript.buffer.facts.masked is not False)
        terms, offset = affine_terms(subscript)
        return tuple((factor, *self.entry_term(atom, over)) for factor, atom in terms), offset, size, True

    def entry_term(self, atom: Expr, over: Labels) -> tuple[object, ...]:
        """Return an index tensor, or `None` for an index, and the positions of its indices among some."""
        if isinstance(atom, Index):
            return None, (over.index(atom.name),)
        assert isinstance(atom, Load)
        return self.tensors[atom.buffer], tuple(over.index(label) for label in plain_labels(atom.subscripts))


def _ascends(row: Expr, over: Labels) -> bool:
    """Whether an entry's row ascends over the grid of entries."""
    return isinstance(row, Load) and row.buffer.facts.sorted and plain_labels(row.subscripts) == over[:1]
