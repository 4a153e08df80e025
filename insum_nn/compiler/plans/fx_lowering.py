"""Plan -> `fx.GraphModule` made of torch calls. The only file, with `fx_access`, that builds FX.

The graph takes the tensors in the layout's order, then the extents that no tensor shows, then the starting value.
Extents that a tensor shows are read from its shape, so one graph serves all sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from insum_nn.compiler.lang.syntax import Access, Number, Subscript
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.fx_access import GraphWriter, Node, Value, extent_arguments
from insum_nn.compiler.plans.fx_extremum import Extremum
from insum_nn.compiler.plans.plan import Dot, Labels, Load, Multiply, Plan, SampledProduct, Scale, SparseProduct, Sum
from insum_nn.compiler.runtime import library_calls

__all__ = ["extent_arguments", "lower"]


def lower(plan: Plan, options: Options, *, accumulate: bool = False, compiled: bool = False) -> fx.GraphModule:
    """Write a plan as torch calls.

    Args:
        plan: a verified plan.
        options: compile options.
        accumulate: add into a tensor passed last, in place, instead of returning a new tensor.
        compiled: for a compiler that fuses, rather than for torch's library calls.

    Returns:
        A linted module; each node's `meta["span"]` is the token of the statement it comes from.
    """
    return _Lowering(plan, options, accumulate, compiled).build()


class _Lowering(GraphWriter):
    """Writes the steps, then the combination."""

    def build(self) -> fx.GraphModule:
        self.inputs()
        for step in self.plan.steps:
            self.values[step.result] = getattr(self, f"lower_{type(step).__name__.lower()}")(step)
        self.span = self.statement.output.span
        self.graph.output(self.combine())
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    # Steps.

    def lower_load(self, step: Load) -> Value:
        node, labels, present, inside = self.read(step.access)
        own = self.both(present, inside)
        others = [(mask, at) for mask, at in map(self.present, step.guards)]
        mask = self.aligned_and([(own, labels), *others], labels)
        owned = step.gather
        if mask is not None:
            node = self.keep_where(mask, node, owned=owned)
        if labels != step.labels:
            node = self.align(node, labels, step.labels)
        return Value(node, step.labels, wide=False, owned=owned)

    def keep_where(self, mask: Node, node: Node, *, owned: bool) -> Node:
        """Zero where a read misses; on a CPU in place, if nothing else refers to the tensor."""
        if self.compiled or self.bound.device_type != "cpu":
            return self.call(torch.where, mask, node, 0)
        return self.call(library_calls.keep_where if owned else library_calls.zero_where_missing, mask, node)

    def widen(self, value: Value) -> Node:
        if self.half and not value.wide:
            return self.method("to", value.node, torch.float32)
        return value.node

    def lower_sum(self, step: Sum) -> Value:
        value = self.values[step.source]
        axes = [i for i, label in enumerate(value.labels) if label not in step.labels]
        kept = tuple(label for label in value.labels if label in step.labels)
        dtype = torch.float32 if self.half else self.bound.dtype
        node = self.call(torch.sum, value.node, axes, dtype=dtype)
        return Value(self.align(node, kept, step.labels), step.labels, wide=self.half)

    def lower_scale(self, step: Scale) -> Value:
        value = self.values[step.source]
        return Value(self.call(operator.mul, self.widen(value), step.number), value.labels, wide=self.half)

    def lower_multiply(self, step: Multiply) -> Value:
        left, right = self.values[step.left], self.values[step.right]
        labels = step.labels + step.over
        a, b = (self.align(self.widen(v), v.labels, labels) for v in (left, right))
        if not step.over:
            return Value(self.call(operator.mul, a, b), labels, wide=self.half)
        unrolled = dict(step.unrolled)
        rest = tuple(label for label in step.over if label not in unrolled)
        terms = [(a, b)]
        for label in reversed(step.over):
            if label in unrolled:
                axis = labels.index(label)
                terms = [
                    (self.pick(x, left, label, axis, slot), self.pick(y, right, label, axis, slot))
                    for x, y in terms
                    for slot in range(unrolled[label])
                ]
                labels = labels[:axis] + labels[axis + 1 :]
        total: Node | None = None
        for x, y in terms:
            product = self.call(operator.mul, x, y)
            total = product if total is None else self.call(operator.add, total, product)
        assert total is not None
        if rest:
            dtype = torch.float32 if self.half else self.bound.dtype
            axes = [labels.index(label) for label in rest]
            total = self.call(torch.sum, total, axes, dtype=dtype)
        return Value(total, step.labels, wide=self.half)

    def pick(self, node: Node, value: Value, label: str, axis: int, slot: int) -> Node:
        return self.method("select", node, axis, slot if label in value.labels else 0)

    def lower_dot(self, step: Dot) -> Value:
        left, right = self.values[step.left], self.values[step.right]
        batch, m, k, n = step.batch, step.m, step.k, step.n
        a = self.matrix(left, batch, m, k)
        b = self.matrix(right, batch, k, n)
        node = self.call(torch.matmul, a, b)
        if (len(batch) != 1 and batch) or len(m) != 1 or len(n) != 1:
            node = self.method("reshape", node, tuple(self.sizes[label] for label in step.labels))
        return Value(node, step.labels)

    def matrix(self, value: Value, batch: Labels, rows: Labels, cols: Labels) -> Node:
        """Fold labels into `[batch, rows, cols]`, without a batch axis when there is no batch."""
        node = value.node
        if value.wide:
            node = self.method("to", node, self.bound.dtype)
        node = self.align(node, value.labels, batch + rows + cols)
        groups = [group for group in (batch, rows, cols) if group or group is not batch]
        if all(len(group) == 1 for group in groups):
            return node
        return self.method("reshape", node, tuple(self.extent(group) for group in groups))

    def lower_sparseproduct(self, step: SparseProduct) -> Value:
        self.span = step.dense.span
        value = None
        if step.value is not None:
            held = self.values[step.value]
            shape = tuple(self.sizes[label] for label in step.entries)
            value = self.method("expand", self.align(held.node, held.labels, step.entries), shape)
        plain = [s.plain for s in step.dense.subscripts]
        plain[step.dense_axis] = None
        order = [step.dense_axis, *(plain.index(label) for label in step.labels)]
        dense = self.tensors[step.dense.name]
        if order != sorted(order):
            dense = self.method("permute", dense, order)
        if len(step.labels) != 1:
            dense = self.method("flatten", dense, 1)
        row, row_axes, row_masked = self.entry_index(step.row, step.entries)
        col, col_axes, col_masked = self.entry_index(step.col, step.entries)
        shape = tuple(self.sizes[label] for label in step.entries)
        axis = self.plan.combine.scattered[0]
        node = self.call(
            library_calls.csr_product,
            value,
            row,
            row_axes,
            col,
            col_axes,
            shape,
            dense,
            self.output_size(axis),
            row_masked or col_masked,
        )
        if len(step.labels) != 1:
            node = self.method("unflatten", node, 1, tuple(self.sizes[label] for label in step.labels))
        return Value(node, step.labels)

    def lower_sampledproduct(self, step: SampledProduct) -> Value:
        self.span = step.near.span
        near = self.rows_of(step.near, step.near_axis, step.inner)
        far = self.rows_of(step.far, step.far_axis, step.inner)
        row, row_axes, row_masked = self.entry_index(step.row, step.labels)
        col, col_axes, col_masked = self.entry_index(step.col, step.labels)
        shape = tuple(self.sizes[label] for label in step.labels)
        masked = row_masked or col_masked
        node = self.call(library_calls.sampled_product, near, far, row, row_axes, col, col_axes, shape, masked)
        return Value(node, step.labels)

    def rows_of(self, access: Access, axis: int, labels: Labels) -> Node:
        """A factor as a matrix: one axis, then all others in the order of `labels`."""
        plain = [s.plain for s in access.subscripts]
        plain[axis] = None
        order = [axis, *(plain.index(label) for label in labels)]
        node = self.tensors[access.name]
        if order != sorted(order):
            node = self.method("permute", node, order)
        return node if len(labels) == 1 else self.method("flatten", node, 1)

    def entry_index(self, subscript: Subscript, entries: Labels) -> tuple[Node | None, tuple[int, ...], bool]:
        if subscript.plain is not None:
            return None, (entries.index(subscript.plain),), False
        access = subscript.indirect
        assert access is not None
        axes = tuple(entries.index(s.plain) for s in access.subscripts if s.plain is not None)
        return self.tensors[access.name], axes, self.bound.facts_of(access.name).masked is not False

    # Combination.

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which terms of different programs meet."""
        if self.half and self.options.accumulate == "float32":
            return torch.float32
        return self.bound.dtype

    def final_value(self) -> Value:
        name = self.plan.combine.value
        if name is not None:
            return self.values[name]
        number = math.prod(factor.value for factor in self.statement.factors if isinstance(factor, Number))
        return Value(self.call(torch.full, (), number, dtype=self.bound.dtype, device=self.device), ())

    def combine(self) -> Node:
        value = self.final_value()
        if self.statement.operator in ("max=", "min="):
            return Extremum(self, value).combine()
        mode = self.plan.combine.mode
        if mode == "rows":
            return self.combine_rows(value)
        live = self.some(self.plan.combine.guards, value.labels)
        if mode == "direct":
            return self.combine_direct(self.without_terms(value, live))
        return self.combine_scatter(value, live)

    def without_terms(self, value: Value, live: tuple[Node, Labels] | None) -> Value:
        """Zero where every term misses."""
        if live is None:
            return value
        node = self.keep_where(self.align(*live, value.labels), value.node, owned=value.owned)
        return Value(node, value.labels, wide=value.wide)

    def combine_rows(self, value: Value) -> Node:
        (axis,) = self.plan.combine.scattered
        rank = len(self.statement.output.subscripts)
        node = value.node
        if axis != 0:
            node = self.method("permute", node, [i + 1 if i < axis else 0 if i == axis else i for i in range(rank)])
        if self.start is not None:
            node = self.call(operator.add, node, self.start)
        return self.finish(node, owned=True)

    def combine_direct(self, value: Value) -> Node:
        labels = tuple(s.plain for s in self.statement.output.subscripts if s.plain is not None)
        if self.accumulate:
            return self.method("add_", self.start, self.align(value.node, value.labels, labels))
        if self.start is not None:
            node = self.align(self.widen(value), value.labels, labels)
            start = self.method("to", self.start, torch.float32) if self.half else self.start
            return self.finish(self.call(operator.add, start, node), owned=True)
        missing = set(labels) - set(value.labels)
        return self.finish(self.expanded(value, labels), owned=value.owned and not missing)

    def combine_scatter(self, value: Value, live: tuple[Node, Labels] | None) -> Node:
        flat, labels, valid, sizes = self.addresses()
        if live is not None and valid is not None and set(live[1]) <= set(labels):
            valid = self.aligned_and([(valid, labels), live], labels)
        else:
            value = self.without_terms(value, live)
        output = self.statement.output
        scattered = self.plan.combine.scattered
        rest = tuple(s.plain for i, s in enumerate(output.subscripts) if i not in scattered and s.plain is not None)
        in_place = len(scattered) == 1
        axis = scattered[0] if in_place else 0
        arranged = (*rest[:axis], *labels, *rest[axis:])
        node = self.method("to", value.node, self.sum_dtype) if self.half else value.node
        node = self.expanded(Value(node, value.labels), arranged)
        if valid is not None:
            node = self.call(torch.where, self.align(valid, labels, arranged), node, 0)
            flat = self.call(torch.where, valid, flat, 0)
        if self.compiled and len(labels) > 1:
            # Kept as it is, the address needs no divisions in the generated kernel.
            base = self.base(axis, rest, sizes, in_place)
            node = self.call(torch.ops.aten.index_put.default, base, (*[None] * axis, flat), node, True)
            return self.finish(self.restore(node, rest, sizes, in_place), owned=True)
        if len(labels) != 1:
            flat = self.method("reshape", flat, -1)
            shape = (*(self.sizes[x] for x in rest[:axis]), self.extent(labels), *(self.sizes[x] for x in rest[axis:]))
            node = self.method("reshape", node, shape)
        base = self.base(axis, rest, sizes, in_place)
        if self.accumulate:
            return self.method("index_add_", base, axis, flat, node)
        node = self.add(base, axis, flat, node)
        return self.finish(self.restore(node, rest, sizes, in_place), owned=True)

    def add(self, base: Node, axis: int, flat: Node, node: Node) -> Node:
        if self.options.deterministic and self.bound.device_type == "cuda":
            # CUDA's accumulating index_put sorts the addresses first, so its order of summation is fixed.
            places = (None,) * axis + (flat,)
            return self.call(torch.ops.aten.index_put.default, base, places, node, True)
        if self.start is None and not self.compiled:
            # Nobody else has the zeros.
            return self.method("index_add_", base, axis, flat, node)
        return self.call(torch.index_add, base, axis, flat, node)

    def base(self, axis: int, rest: Labels, sizes: Sequence[Node | int], in_place: bool) -> Node:
        if self.accumulate:
            assert self.start is not None
            return self.start
        if self.start is None:
            total = self.product(sizes)
            before, after = [self.sizes[x] for x in rest[:axis]], [self.sizes[x] for x in rest[axis:]]
            if not axis or self.compiled:
                return self.call(torch.zeros, (*before, total, *after), dtype=self.sum_dtype, device=self.device)
            # A library call adds a row at a time, fastest where rows are what lies outermost.
            base = self.call(torch.zeros, (total, *before, *after), dtype=self.sum_dtype, device=self.device)
            return self.method("movedim", base, 0, axis)
        start = self.method("to", self.start, self.sum_dtype) if self.half else self.start
        if in_place:
            return start
        scattered = self.plan.combine.scattered
        order = [*scattered, *(i for i in range(len(self.statement.output.subscripts)) if i not in scattered)]
        moved = self.method("permute", start, order)
        return self.method("reshape", moved, (self.product(sizes), *(self.sizes[x] for x in rest)))
