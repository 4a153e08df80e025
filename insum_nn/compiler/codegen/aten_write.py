"""Write the output by torch calls: directly, or scattered along the axes that values address."""

from __future__ import annotations

import operator

import torch

from insum_nn.compiler.codegen.aten_read import GraphWriter, Masks, Node, Value, united
from insum_nn.compiler.ir.access import plain_labels, scattered_axes
from insum_nn.compiler.ir.nodes import Index
from insum_nn.compiler.lang.combining import Combining

__all__ = ["OutputWriter"]


class OutputWriter(GraphWriter):
    """Writes what a statement forms."""

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
        node = self.align(node, value.labels, arranged)
        if valid is not None:
            node = self.call(torch.where, valid, node, 0)
        if places:
            if initial is None:
                initial = self.call(torch.zeros, self.output_shape(), dtype=dtype, device=self.device)
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
