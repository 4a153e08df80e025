"""Print an algorithm as torch calls: a `CallGraph`.

    out[x0[a], b] += t0[a, c] * (t1[x1[a, c], b] ...)    ->    v0 = t1[x1]                 v0[a, c, b]
                                                               v1 = matmul(t0, v0)         v1[a, b]
                                                               index_add(zeros, 0, x0, v1)

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

from insum_nn.compiler.codegen.aten_read import GraphWriter, Masks, Node, Value, united
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.codegen.contraction_order import contraction_order, order_text
from insum_nn.compiler.ir.access import Labels, labels_of, plain_labels, scattered_axes
from insum_nn.compiler.ir.graph import factors_of
from insum_nn.compiler.ir.nodes import Const, Expr, Index, Kernel, Load, Op, operands
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.lang.combining import Combining, selecting
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


class _Writer(GraphWriter):
    """Forms what is written, and writes it: directly, or scattered along the axes that values address."""

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

    # The output.

    def addresses(self) -> dict[int, Value]:
        """Where terms go along the axes that values address."""
        subscripts, shape = self.target.subscripts, self.output.shape
        axes = scattered_axes(subscripts)
        return {n: self.place(subscripts[n], self.size(shape[n]), checked=self.kernel.exact) for n in axes}

    def write_sum(self, value: Value, misses: Masks) -> Node:
        """Add a value to the output.

        Args:
            value: what is added, over indices of the output.
            misses: masks of terms that take no part.
        """
        places = self.addresses()
        listed, labels, at = self.indexing(places) if places else ([], (), 0)
        rest = plain_labels([s for axis, s in enumerate(self.target.subscripts) if axis not in places])
        arranged = (*rest[:at], *labels, *rest[at:])
        valid = self.all_of({**misses, **united([*places.values()])}, arranged)
        dtype = self.sum_dtype if places else self.wide_dtype
        node, initial = value.node, self.initial
        if dtype != self.dtype:
            node = self.method("to", node, dtype)
            initial = None if initial is None else self.method("to", initial, dtype)
        # Along one axis, without sorting the entries: where there are few, that takes most of the time on a GPU.
        alone = len(places) == 1 and bool(labels) and not (self.compiled or self.options.deterministic)
        node = (self.expanded if alone else self.align)(node, value.labels, arranged)
        if valid is not None:
            node = self.call(torch.where, valid, node, 0)
        if places:
            if initial is None:
                initial = self.call(torch.zeros, self.output_shape(), dtype=dtype, device=self.device)
            if alone:
                index = listed[at]
                if len(labels) > 1:
                    index = self.method("reshape", index, -1)
                    node = self.method("flatten", node, at, at + len(labels) - 1)
                return self.finish(self.call(torch.index_add, initial, at, index, node))
            return self.finish(self.call(torch.ops.aten.index_put.default, initial, listed, node, True))
        if initial is not None:
            return self.finish(self.call(operator.add, initial, node))
        missing = set(arranged) - set(value.labels)
        if missing:
            node = self.method("expand", node, self.shape(arranged))
        return self.finish(node, owned=not missing and (value.owned or valid is not None))

    def output_shape(self) -> tuple[Node | int, ...]:
        return tuple(map(self.size, self.output.shape))

    def finish(self, node: Node, *, owned: bool = True) -> Node:
        """Return a contiguous tensor of the factors' dtype that is no view of another."""
        if self.widens or self.sum_dtype != self.dtype:
            node = self.method("to", node, self.dtype)
        if owned:
            return self.method("contiguous", node)
        return self.method("clone", node, memory_format=torch.contiguous_format)

    def write_extremum(self, value: Value, mode: Combining) -> Node:
        """Write an extremum of terms: cells without a term stay at 0, or at their initial value.

        Args:
            value: the terms.
            mode: which extremum.
        """
        identity, places, written = mode.identity_of(self.dtype), self.addresses(), self.written
        labels = (*written, *(label for label in self.ends if label not in written))
        node = self.method("to", value.node, self.dtype) if self.widens else value.node
        node = self.expanded(node, value.labels, labels)
        valid = self.all_of({**value.misses, **united([*places.values()])}, labels)
        if valid is not None:
            valid = self.method("expand", valid, self.shape(labels))
            node = self.call(torch.where, valid, node, identity)
        over = list(range(len(written), len(labels)))
        if valid is None and (places or (over and self.may_be_empty)):
            valid = self.call(torch.ones, self.shape(labels), dtype=torch.bool, device=self.device)
        if over:
            if self.may_be_empty:
                # Where there is no number torch has no extremum.
                node = self.call(torch.constant_pad_nd, node, [0, 1] * len(over), identity)
            node = self.call(mode.reduce, node, over)
            valid = None if valid is None else self.call(torch.any, valid, tuple(over))
        if places:
            assert valid is not None
            at = self.method("reshape", self.cells(places), -1)
            node = self.meet(at, node, self.dtype, identity, mode.scatter)
            valid = self.meet(at, self.method("to", valid, torch.int32), torch.int32, 0, "amax")
            valid = self.call(operator.gt, valid, 0)
        else:
            order = plain_labels(self.target.subscripts)
            node = self.align(node, written, order)
            valid = None if valid is None else self.align(valid, written, order)
        if self.initial is not None:
            best = self.call(mode.pair, self.initial, node)
            node = best if valid is None else self.call(torch.where, valid, best, self.initial)
        elif valid is not None:
            node = self.call(torch.where, valid, node, 0)
        return self.finish(node, owned=self.initial is not None or valid is not None or bool(over) or value.owned)

    def cells(self, places: dict[int, Value]) -> Node:
        """The cell of the output, counted through all of it, for all combinations of the written indices."""
        total: Node | None = None
        for axis, (subscript, extent) in enumerate(zip(self.target.subscripts, self.output.shape, strict=True)):
            if axis in places:
                part, own = self.method("to", places[axis].node, torch.int64), places[axis].labels
            else:
                assert isinstance(subscript, Index)
                part, own = self.arange(subscript), (subscript.name,)
            part = self.align(part, own, self.written)
            scaled = None if total is None else self.call(operator.mul, total, self.size(extent))
            total = part if scaled is None else self.call(operator.add, scaled, part)
        assert total is not None
        return self.method("expand", total, self.shape(self.written))

    def meet(self, at: Node, node: Node, dtype: torch.dtype, start: float, how: str) -> Node:
        """The extremum of what meets in each cell of the output."""
        cells = self.product_of(self.output_shape())
        base = self.call(torch.full, (cells,), start, dtype=dtype, device=self.device)
        node = self.method("reshape", node, -1)
        node = self.call(torch.scatter_reduce, base, 0, at, node, how, include_self=True)
        return self.method("reshape", node, self.output_shape())
