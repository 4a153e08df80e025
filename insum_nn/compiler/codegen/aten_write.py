"""Write the output by torch calls: directly, or scattered along the axes that values address."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from insum_nn.compiler.codegen.aten_read import GraphWriter, Node, Position, Value
from insum_nn.compiler.ir.access import Labels, plain_labels, scattered_axes
from insum_nn.compiler.ir.nodes import Index, Kernel, Load, Store

__all__ = ["Addresses", "OutputWriter"]


@dataclass(slots=True)
class Addresses:
    """Where a store's terms go.

    Attributes:
        axes: the axes of the output that values address.
        sizes: their extents.
        flat: one position for each term over those axes.
        labels: the indices that positions vary with.
        valid: where a position is one.
        rest: the indices of the other axes.
    """

    axes: tuple[int, ...]
    sizes: tuple[Node | int, ...]
    flat: Node
    labels: Labels
    valid: Node | None
    rest: Labels


class OutputWriter(GraphWriter):
    """Writes the last step of a sum."""

    def write_sum(self, kernel: Kernel, store: Store) -> Node:
        value = self.operand(store.value)
        live = self.some(self.added_conditions(store), value.labels)
        if scattered_axes(store.subscripts):
            return self.scatter(kernel, store, value, live)
        return self.write(store, self.without_terms(value, live))

    def without_terms(self, value: Value, live: tuple[Node, Labels] | None) -> Value:
        """Zero a value where every term misses."""
        if live is None:
            return value
        node = self.call(torch.where, self.align(*live, value.labels), value.node, 0)
        return Value(node, value.labels, wide=value.wide)

    def write(self, store: Store, value: Value) -> Node:
        labels = plain_labels(store.subscripts)
        if self.initial is not None:
            node = self.align(self.widen(value), value.labels, labels)
            initial = self.method("to", self.initial, self.wide_dtype) if self.widens else self.initial
            return self.finish(self.call(operator.add, initial, node), owned=True)
        missing = set(labels) - set(value.labels)
        return self.finish(self.expanded(value, labels), owned=value.owned and not missing)

    def scatter(self, kernel: Kernel, store: Store, value: Value, live: tuple[Node, Labels] | None) -> Node:
        to = self.addresses(kernel, store)
        valid, flat = to.valid, to.flat
        if live is not None and valid is not None and set(live[1]) <= set(to.labels):
            valid = self.aligned_and([(valid, to.labels), live], to.labels)
        else:
            value = self.without_terms(value, live)
        axis = to.axes[0] if len(to.axes) == 1 else 0
        before, after = to.rest[:axis], to.rest[axis:]
        arranged = (*before, *to.labels, *after)
        node = self.method("to", value.node, self.sum_dtype) if self.widens else value.node
        node = self.expanded(Value(node, value.labels), arranged)
        if valid is not None:
            node = self.call(torch.where, self.align(valid, to.labels, arranged), node, 0)
            flat = self.call(torch.where, valid, flat, 0)
        if self.compiled and len(to.labels) > 1:
            # Kept as it is, the address needs no divisions in the generated kernel.
            node = self.call(torch.ops.aten.index_put.default, self.base(to), (*[None] * axis, flat), node, True)
            return self.finish(self.restore(node, to), owned=True)
        if len(to.labels) != 1:
            flat = self.method("reshape", flat, -1)
            node = self.method("reshape", node, (*self.shape(before), self.extent(to.labels), *self.shape(after)))
        base = self.base(to)
        return self.finish(self.restore(self.add(base, axis, flat, node), to), owned=True)

    def add(self, base: Node, axis: int, flat: Node, node: Node) -> Node:
        if self.deterministic and self.device_type == "cuda":
            # On a GPU the accumulating index_put sorts the addresses first, so its order of summation is fixed.
            places = (None,) * axis + (flat,)
            return self.call(torch.ops.aten.index_put.default, base, places, node, True)
        if self.initial is None and not self.compiled:
            # Nothing else refers to the zeros.
            return self.method("index_add_", base, axis, flat, node)
        return self.call(torch.index_add, base, axis, flat, node)

    def base(self, to: Addresses) -> Node:
        """Return what is added to: the output; several scattered axes are one, the first."""
        in_place = len(to.axes) == 1
        axis = to.axes[0] if in_place else 0
        if self.initial is None:
            total = self.product(to.sizes)
            before, after = self.shape(to.rest[:axis]), self.shape(to.rest[axis:])
            return self.call(torch.zeros, (*before, total, *after), dtype=self.sum_dtype, device=self.device)
        initial = self.method("to", self.initial, self.sum_dtype) if self.widens else self.initial
        if in_place:
            return initial
        order = [*to.axes, *(i for i in range(len(self.output.shape)) if i not in to.axes)]
        moved = self.method("permute", initial, order)
        return self.method("reshape", moved, (self.product(to.sizes), *self.shape(to.rest)))

    def restore(self, node: Node, to: Addresses, *, in_front: bool = False) -> Node:
        """Undo the gathering of scattered axes at the front."""
        if len(to.axes) == 1 and not in_front:
            return node
        node = self.method("reshape", node, (*to.sizes, *self.shape(to.rest)))
        order = [*to.axes, *(i for i in range(len(self.output.shape)) if i not in to.axes)]
        inverse = [order.index(axis) for axis in range(len(order))]
        return node if inverse == sorted(inverse) else self.method("permute", node, inverse)

    def addresses(self, kernel: Kernel, store: Store) -> Addresses:
        """Compute one flat position for each term over the scattered axes."""
        axes = scattered_axes(store.subscripts)
        positions: list[Position] = []
        sizes: list[Node | int] = []
        for axis in axes:
            subscript = store.subscripts[axis]
            at = self.position(subscript)
            size = self.size(store.buffer.shape[axis])
            if not isinstance(subscript, Index | Load) and kernel.exact:
                at = self.bounds(subscript, at, size, nested=False)
            elif at.present is not None:
                at = Position(self.call(torch.clamp, at.node, min=0), at.labels, at.present, None)
            if len(axes) > 1 and isinstance(subscript, Load) and subscript.buffer.dtype == "int32":
                # A position over several axes may exceed an int32.
                at = Position(self.method("to", at.node, torch.int64), at.labels, at.present, at.inside)
            positions.append(at)
            sizes.append(size)
        labels = tuple(dict.fromkeys(label for at in positions for label in at.labels))
        masks = [(mask, at.labels) for at in positions for mask in (at.present, at.inside)]
        valid = self.aligned_and(masks, labels)
        flat: Node | None = None
        for at, size in zip(positions, sizes, strict=True):
            part = self.align(at.node, at.labels, labels)
            flat = part if flat is None else self.call(operator.add, self.call(operator.mul, flat, size), part)
        assert flat is not None
        rest = plain_labels([s for axis, s in enumerate(store.subscripts) if axis not in axes])
        return Addresses(axes, tuple(sizes), flat, labels, valid, rest)

    def finish(self, node: Node, *, owned: bool) -> Node:
        """Return a contiguous tensor of the factors' dtype that is no view of another."""
        if self.widens:
            node = self.method("to", node, self.dtype)
        if owned:
            return self.method("contiguous", node)
        return self.method("clone", node, memory_format=torch.contiguous_format)
