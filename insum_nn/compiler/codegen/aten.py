"""Print an algorithm as torch calls: a `CallGraph`.

    out[x0[a], b] += t0[a, c] * (t1[x1[a, c], b] ...)    ->    v0 = t1[x1]                 v0[a, c, b]
                                                               v1 = matmul(t0, v0)         v1[a, b]
                                                               index_put(zeros, x0, v1)

Factors are gathered, multiplied two at a time, and what remains is written. The graph takes the tensors in order, then
the sizes that no tensor shows, then the initial value. Sizes that a tensor shows are read from its shape, so one graph
serves all sizes.

A factor that varies with every index of a miss is read as 0 where it misses. Where each cell of the sum varies with
them, the sum is set to 0 as it is written. What does neither (a convolution's weight) is multiplied by a zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import torch

from insum_nn.compiler.codegen.aten_read import Masks, Node, Value, united
from insum_nn.compiler.codegen.aten_write import OutputWriter
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.codegen.contraction_order import contraction_order, order_text
from insum_nn.compiler.ir.access import Labels, labels_of
from insum_nn.compiler.ir.graph import factors_of
from insum_nn.compiler.ir.nodes import Const, Expr, Kernel, Load, Op, operands
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.lang.combining import selecting
from insum_nn.compiler.lang.functions import FUNCTIONS
from insum_nn.compiler.options import Options

__all__ = ["print_aten"]


def print_aten(
    kernel: Kernel,
    sizes: Mapping[str, int],
    options: Options,
    *,
    compiled: bool,
    empty: bool,
    factors: Sequence[str],
) -> CallGraph:
    """Print an algorithm as torch calls.

    Args:
        kernel: an algorithm of one store, without an activation.
        sizes: extents of its loops in the first call; they steer the order of products, never the result.
        options: compile options.
        compiled: for a compiler that fuses, rather than for torch's library calls.
        empty: some index may have no values.
        factors: the texts of what is multiplied, for decisions.
    """
    return _Writer(kernel, options, compiled=compiled, empty=empty).finished(sizes, factors)


_SIGNS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv}


class _Writer(OutputWriter):
    """Forms what is written."""

    def finished(self, sizes: Mapping[str, int], texts: Sequence[str]) -> CallGraph:
        self.inputs()
        every = factors_of(self.target.value)
        number = math.prod([factor.value for factor in every if isinstance(factor, Const)])
        values = [factor for factor in every if not isinstance(factor, Const)]
        factors = [self.factor(value) for value in values]
        if len(texts) < len(factors):
            # Of a power, which is several factors.
            texts = [*map(show, values)]
        mode = selecting(self.target.combine)
        if mode is None:
            self.graph.finish(self.sum(factors, number, sizes, texts))
        else:
            self.graph.finish(self.write_extremum(self.terms(factors, number), mode))
        if self.addresses():
            reason = "several terms may meet in one cell"
            if self.options.deterministic:
                reason += "; in a fixed order, so that every run gives the same bits"
            self.graph.decisions.append(("combine", "scatter", reason))
        return self.graph

    def factor(self, factor: Expr) -> Value:
        """Read a factor, or compute a function of what is read."""
        if isinstance(factor, Load):
            return self.read(factor)
        reads = {read: self.read(read) for read in operands(factor)}
        labels = labels_of(factor)
        node = self.applied(factor, reads, labels)
        assert isinstance(node, Node)
        return Value(node, labels, united([*reads.values()]), wide=self.widens)

    def applied(self, value: Expr, reads: Mapping[Load, Value], labels: Labels) -> Node | float:
        """Compute a function over some indices; where a read misses, it means nothing."""
        if isinstance(value, Const):
            return value.value
        if isinstance(value, Load):
            return self.align(self.widen(reads[value]), reads[value].labels, labels)
        assert isinstance(value, Op)
        if value.name == "one":
            own = labels_of(value)
            ones = self.call(torch.ones, self.shape(own), dtype=self.wide_dtype, device=self.device)
            return self.align(ones, own, labels)
        args = [self.applied(arg, reads, labels) for arg in value.args]
        if value.name in _SIGNS:
            return self.call(_SIGNS[value.name], *args)
        if value.name not in FUNCTIONS:
            return self.stored(args[0])
        if value.name == "eq" and self.widens and self.compiled:
            args = [arg if isinstance(arg, int | float) else self.stored(arg) for arg in args]
        function = FUNCTIONS[value.name]
        last = len(args) - function.number
        tensors = [self.widen(self.number(arg)) if isinstance(arg, int | float) else arg for arg in args[:last]]
        return self.call(function.forward, *tensors, *args[last:])

    def stored(self, node: Node | float) -> Node:
        """What memory of the factors' dtype would hold of a wide value."""
        node = self.method("to", node, self.dtype)
        if self.compiled:
            # A compiler that fuses leaves out roundings between calls, but not of what is changed bit by bit.
            bits = self.call(torch.bitwise_or, self.method("view", node, torch.int16), 0)
            node = self.method("view", bits, self.dtype)
        return self.method("to", node, self.wide_dtype)

    def terms(self, factors: Sequence[Value], number: float) -> Value:
        """Form every term."""
        total = factors[0] if factors else self.number(number)
        for factor in factors[1:]:
            total = self.multiply(total, factor, tuple(self.ends))
        total = self.times(total, number if factors else 1)
        return Value(total.node, total.labels, united(factors), total.wide, total.owned)

    def sum(self, factors: Sequence[Value], number: float, sizes: Mapping[str, int], texts: Sequence[str]) -> Node:
        """Form a sum and write it."""
        misses = united(factors)
        outer: Masks = {mask: labels for mask, labels in misses.items() if {*labels} <= {*self.written}}
        inner: Masks = {mask: labels for mask, labels in misses.items() if mask not in outer}
        guards = [{mask: x for mask, x in inner.items() if {*x} <= {*factor.labels}} for factor in factors]
        if self.kernel.exact and any(len(own) < len(inner) for own in guards):
            # A gradient is exactly 0 where all terms miss, whatever the factors are.
            outer |= self.some(inner, self.written)
        if not factors:
            return self.write_sum(self.number(number), outer)
        guarded = [self.keep_out(factor, own) for factor, own in zip(factors, guards, strict=True)]
        return self.write_sum(self.times(self.product(guarded, sizes, texts), number), outer)

    def product(self, factors: Sequence[Value], sizes: Mapping[str, int], texts: Sequence[str]) -> Value:
        """Multiply factors two at a time, and sum the indices that the output does not have."""
        alive = dict(enumerate(factors))
        for at, factor in enumerate(factors):
            alive[at] = self.total(factor, self.needed([other for n, other in alive.items() if n != at]))
        order = [(0, 1)] if len(factors) == 2 else []
        if len(factors) > 2:
            labels, search = [factor.labels for factor in alive.values()], self.options.order == "cost"
            order, cost, left_cost = contraction_order(labels, self.written, sizes, search=search)
            reason = f"{cost:.3g} products and intermediate cells instead of {left_cost:.3g} from left to right"
            self.graph.decisions.append(("order", order_text(order, texts), reason))
        for made, (left, right) in enumerate(order, start=len(factors)):
            pair = alive.pop(left), alive.pop(right)
            alive[made] = self.multiply(*pair, self.needed([*alive.values()]))
        (value,) = alive.values()
        return value

    def needed(self, others: Sequence[Value]) -> Labels:
        """The indices that the output or some other factors have."""
        return (*self.written, *(label for other in others for label in other.labels))

    def total(self, value: Value, needed: Labels) -> Value:
        """Sum what nothing else needs."""
        axes = [axis for axis, label in enumerate(value.labels) if label not in needed]
        if not axes:
            return value
        labels = tuple(label for label in value.labels if label in needed)
        return Value(self.call(torch.sum, value.node, axes, dtype=self.wide_dtype), labels, wide=self.widens)

    def multiply(self, a: Value, b: Value, needed: Labels) -> Value:
        """Multiply two factors, and sum what is not needed: by a matrix product where it is one."""
        both = tuple(label for label in a.labels if label in b.labels)
        batch, k = (tuple(x for x in both if (x in needed) == kept) for kept in (True, False))
        m, n = (tuple(x for x in own.labels if x not in both) for own in (a, b))
        # Without m and n a batched product would call the library once per scalar; a compiler fuses one of a vector.
        if k and self.dtype.is_floating_point and (m and n if self.compiled else m or n):
            if self.written and self.written[-1] in m:
                # As the output lies, or adding it up goes cell by cell.
                a, b, m, n = b, a, n, m
            return self.matmul(a, b, (batch, m, k, n))
        labels = batch + m + n
        x, y = (self.align(self.widen(value), value.labels, labels + k) for value in (a, b))
        product = Value(self.call(operator.mul, x, y), labels + k, wide=self.widens)
        return self.total(product, labels)

    def matmul(self, a: Value, b: Value, groups: tuple[Labels, Labels, Labels, Labels]) -> Value:
        batch, m, k, n = groups
        node = self.call(torch.matmul, self.matrix(a, batch, m, k), self.matrix(b, batch, k, n))
        labels = batch + m + n
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
        return self.method("reshape", node, tuple(self.product_of(self.shape(group)) for group in groups))
