"""Write modes that select a term by torch calls: cells without a term stay at 0, or at their initial value."""

from __future__ import annotations

import operator

import torch

from insum_nn.compiler.codegen.aten_read import Node, Value
from insum_nn.compiler.codegen.aten_write import OutputWriter
from insum_nn.compiler.ir.access import Labels, indices_of, plain_labels, scattered_axes
from insum_nn.compiler.ir.graph import loops_of
from insum_nn.compiler.ir.nodes import Kernel, Store
from insum_nn.compiler.lang.combining import Combining, selecting

__all__ = ["ExtremumWriter"]


class ExtremumWriter(OutputWriter):
    """Writes the last step of an extremum."""

    def write_extremum(self, kernel: Kernel, store: Store) -> Node:
        mode = selecting(store.combine)
        assert mode is not None
        value = self.operand(store.value)
        written = indices_of(*store.subscripts)
        labels = tuple(loop.index.name for loop in loops_of(kernel))
        node = self.method("to", value.node, self.dtype) if self.widens else value.node
        node = self.expanded(Value(node, value.labels), labels)
        live = self.some(self.added_conditions(store), labels)
        valid = None if live is None else self.align(*live, labels)
        if valid is not None:
            valid = self.method("expand", valid, self.shape(labels))
            node = self.call(torch.where, valid, node, mode.identity_of(self.dtype))
        over = list(range(len(written), len(labels)))
        if over and self.may_be_empty:
            # Where there is no number torch has no extremum.
            node = self.call(torch.constant_pad_nd, node, [0, 1] * len(over), mode.identity_of(self.dtype))
            valid = valid or self.call(torch.ones, self.shape(labels), dtype=torch.bool, device=self.device)
        touched = valid
        if over:
            node = self.call(mode.reduce, node, over)
            touched = None if valid is None else self.call(torch.any, valid, tuple(over))
        if scattered_axes(store.subscripts):
            return self.scatter_extremum(kernel, store, mode, node, touched, written, value.owned)
        order = plain_labels(store.subscripts)
        node = self.align(node, written, order)
        touched = None if touched is None else self.align(touched, written, order)
        return self.settle(node, touched, mode, owned=value.owned)

    def settle(self, node: Node, touched: Node | None, mode: Combining, *, owned: bool) -> Node:
        initial = self.initial
        if initial is not None:
            best = self.call(mode.pair, initial, node)
            node = best if touched is None else self.call(torch.where, touched, best, initial)
        elif touched is not None:
            node = self.call(torch.where, touched, node, 0)
        return self.finish(node, owned=initial is not None or touched is not None or owned)

    def scatter_extremum(
        self,
        kernel: Kernel,
        store: Store,
        mode: Combining,
        node: Node,
        touched: Node | None,
        written: Labels,
        owned: bool,
    ) -> Node:
        identity = mode.identity_of(self.dtype)
        to = self.addresses(kernel, store)
        flat = to.flat
        arranged = to.labels + to.rest
        shape = self.shape(arranged)
        node = self.method("expand", self.align(node, written, arranged), shape)
        if touched is None:
            live = self.call(torch.ones, shape, dtype=torch.bool, device=self.device)
        else:
            live = self.method("expand", self.align(touched, written, arranged), shape)
        if to.valid is not None:
            live = self.call(torch.logical_and, live, self.align(to.valid, to.labels, arranged))
            node = self.call(torch.where, live, node, identity)
            flat = self.call(torch.where, to.valid, flat, 0)
        rows, total = self.extent(to.labels), self.product(to.sizes)
        trailing = self.shape(to.rest)
        flat = self.method("reshape", flat, (-1, *(1 for _ in to.rest)))
        at = self.method("expand", self.method("to", flat, torch.int64), (rows, *trailing))
        node = self.method("reshape", node, (rows, *trailing))
        live = self.method("to", self.method("reshape", live, (rows, *trailing)), torch.int32)
        base = self.call(torch.full, (total, *trailing), identity, dtype=self.dtype, device=self.device)
        reduced = self.call(torch.scatter_reduce, base, 0, at, node, mode.scatter, include_self=True)
        zeros = self.call(torch.zeros, (total, *trailing), dtype=torch.int32, device=self.device)
        hits = self.call(torch.scatter_reduce, zeros, 0, at, live, "amax", include_self=True)
        hit = self.call(operator.gt, hits, 0)
        node = self.restore(reduced, to, in_front=True)
        return self.settle(node, self.restore(hit, to, in_front=True), mode, owned=owned)
