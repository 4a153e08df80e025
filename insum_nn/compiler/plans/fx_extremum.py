"""`max=` and `min=` in FX: reduce what takes part, and leave untouched cells at 0 or at their start."""

from __future__ import annotations

import operator

import torch

from insum_nn.compiler.plans.fx_access import GraphWriter, Node, Value
from insum_nn.compiler.plans.plan import Labels

__all__ = ["Extremum"]


class Extremum:
    """`max=` and `min=`: reduce what takes part, and leave untouched cells at 0 or at their start."""

    def __init__(self, lowering: GraphWriter, value: Value) -> None:
        self.low = lowering
        self.value = value
        dtype = lowering.bound.dtype
        self.largest = lowering.statement.operator == "max="
        if dtype.is_floating_point:
            self.neutral: float | int = float("-inf") if self.largest else float("inf")
        else:
            info = torch.iinfo(dtype)
            self.neutral = info.min if self.largest else info.max

    def combine(self) -> Node:
        low = self.low
        output = low.statement.output
        written = tuple(dict.fromkeys(index.name for index in output.indices()))
        labels = (*written, *(x for x in low.bound.layout.indices if x not in written))
        node = self.value.node
        if low.half:
            node = low.method("to", node, low.bound.dtype)
        node = low.expanded(Value(node, self.value.labels), labels)
        live = low.some(low.plan.combine.guards, labels)
        valid = None if live is None else low.align(*live, labels)
        shape = tuple(low.sizes[label] for label in labels)
        if valid is not None:
            valid = low.method("expand", valid, shape)
            node = low.call(torch.where, valid, node, self.neutral)
        over = list(range(len(written), len(labels)))
        touched = valid
        if over:
            node = low.call(torch.amax if self.largest else torch.amin, node, over)
            touched = None if valid is None else low.call(torch.any, valid, tuple(over))
        if low.plan.combine.mode == "direct":
            order = tuple(s.plain for s in output.subscripts if s.plain is not None)
            node = low.align(node, written, order)
            touched = None if touched is None else low.align(touched, written, order)
            return self.settle(node, touched)
        return self.scatter(node, touched, written)

    def settle(self, node: Node, touched: Node | None) -> Node:
        low = self.low
        start = low.start
        if start is not None:
            best = low.call(torch.maximum if self.largest else torch.minimum, start, node)
            node = best if touched is None else low.call(torch.where, touched, best, start)
        elif touched is not None:
            node = low.call(torch.where, touched, node, 0)
        return low.finish(node, owned=start is not None or touched is not None or self.value.owned)

    def scatter(self, node: Node, touched: Node | None, written: Labels) -> Node:
        low = self.low
        flat, labels, valid, sizes = low.addresses()
        scattered = low.plan.combine.scattered
        rest = tuple(
            s.plain for i, s in enumerate(low.statement.output.subscripts) if i not in scattered and s.plain is not None
        )
        arranged = labels + rest
        shape = tuple(low.sizes[label] for label in arranged)
        node = low.method("expand", low.align(node, written, arranged), shape)
        if touched is None:
            live = low.call(torch.ones, shape, dtype=torch.bool, device=low.device)
        else:
            live = low.method("expand", low.align(touched, written, arranged), shape)
        if valid is not None:
            live = low.call(torch.logical_and, live, low.align(valid, labels, arranged))
            node = low.call(torch.where, live, node, self.neutral)
            flat = low.call(torch.where, valid, flat, 0)
        rows, total = low.extent(labels), low.product(sizes)
        tail = tuple(low.sizes[x] for x in rest)
        flat = low.method("reshape", flat, (-1, *(1 for _ in rest)))
        at = low.method("expand", low.method("to", flat, torch.int64), (rows, *tail))
        node = low.method("reshape", node, (rows, *tail))
        live = low.method("to", low.method("reshape", live, (rows, *tail)), torch.int32)
        base = low.call(torch.full, (total, *tail), self.neutral, dtype=low.bound.dtype, device=low.device)
        mode = "amax" if self.largest else "amin"
        reduced = low.call(torch.scatter_reduce, base, 0, at, node, mode, include_self=True)
        zeros = low.call(torch.zeros, (total, *tail), dtype=torch.int32, device=low.device)
        hit = low.call(operator.gt, low.call(torch.scatter_reduce, zeros, 0, at, live, "amax", include_self=True), 0)
        return self.settle(low.restore(reduced, rest, sizes, False), low.restore(hit, rest, sizes, False))
