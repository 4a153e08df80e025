"""Read tensors by torch calls: sizes, subscripts, index tensors, gathers, and the masks that go with them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from insum_nn.compiler.codegen.calls import Call, CallGraph
from insum_nn.compiler.ir.access import Labels, affine_terms, labels_of, plain_labels, scattered_axes
from insum_nn.compiler.ir.build import INITIAL
from insum_nn.compiler.ir.graph import loops_of, stores_of
from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, Index, Kernel, Load, Size, walk
from insum_nn.compiler.options import Options
from insum_nn.dtypes import is_widened, wide_dtype

__all__ = ["GraphWriter", "Masks", "Node", "Value", "united"]

Node = Call
# Masks, and the indices that each varies with.
Masks = dict[Node, Labels]


@dataclass(frozen=True, slots=True)
class Value:
    """A node whose axes are indices: a factor, a product, or where a subscript points.

    Attributes:
        node: the node.
        labels: its axes.
        misses: masks that are false where it means nothing.
        wide: of the dtype in which sums are formed.
        owned: no view of an input.
    """

    node: Node
    labels: Labels
    misses: Masks = field(default_factory=Masks)
    wide: bool = False
    owned: bool = True


class GraphWriter:
    """A graph of torch calls under construction.

    Args:
        kernel: the algorithm to print.
        options: compile options.
        compiled: a compiler fuses the calls; otherwise each runs as it is.
        empty: some index may have no values.
    """

    def __init__(self, kernel: Kernel, options: Options, *, compiled: bool, empty: bool) -> None:
        self.kernel = kernel
        self.options = options
        self.compiled = compiled
        self.may_be_empty = empty
        (self.target,) = stores_of(kernel)
        self.output = self.target.buffer
        self.dtype: torch.dtype = getattr(torch, self.output.dtype)
        self.widens = is_widened(self.dtype)
        # The dtype of products and sums, and the one in which terms of different programs meet.
        self.wide_dtype = wide_dtype(self.dtype)
        self.sum_dtype = self.wide_dtype if options.accumulate == "float32" else self.dtype
        if options.deterministic and self.sum_dtype == torch.float32:
            # The threads of a CPU add up numbers of float32 in no fixed order.
            self.sum_dtype = torch.float64
        self.ends = {loop.index.name: loop.end for loop in loops_of(kernel)}
        self.written = labels_of(*self.target.subscripts)
        self.graph = CallGraph()
        self.tensors: dict[Buffer, Node] = {}
        self.sizes: dict[str, Node] = {}
        self.axis_sizes: dict[tuple[Buffer, int], Node] = {}
        self.aranges: dict[Expr, Node] = {}
        self.entries: dict[Load, Value] = {}
        self.bounded: dict[tuple[Expr, Node | int, bool], Value] = {}
        self.initial: Node | None = None
        self.device: Node | None = None

    # Building blocks.

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.graph.function(function, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self.graph.method(name, args, kwargs)

    def inputs(self) -> None:
        """Take tensors in order, sizes that none of them shows, the initial value."""
        target, kernel = self.target, self.kernel
        for buffer in kernel.inputs:
            if buffer.name != INITIAL:
                self.tensors[buffer] = self.graph.argument(buffer)
        shown: dict[Expr, tuple[Buffer, int]] = {}
        reads = [node for node in walk(*target.subscripts, target.value) if isinstance(node, Load)]
        for read in reads:
            for axis, subscript in enumerate(read.subscripts):
                shown.setdefault(subscript, (read.buffer, axis))
        hidden = [e for s, e in zip(target.subscripts, self.output.shape, strict=True) if not isinstance(s, Index)]
        ends = [(loop.end, shown.get(loop.index)) for loop in loops_of(kernel)]
        for extent, where in [*ends, *((extent, None) for extent in hidden)]:
            if isinstance(extent, Size):
                self.sizes[extent.name] = self.axis_size(*where) if where else self.graph.argument(extent)
        if len(self.tensors) < len(kernel.inputs):
            self.initial = self.graph.argument(kernel.inputs[-1])
        anchor = next(iter(self.tensors.values()), self.initial)
        if anchor is not None:
            self.device = self.call(getattr, anchor, "device")

    def axis_size(self, buffer: Buffer, axis: int) -> Node:
        key = (buffer, axis)
        if key not in self.axis_sizes:
            self.axis_sizes[key] = self.method("size", self.tensors[buffer], axis)
        return self.axis_sizes[key]

    def size(self, extent: Expr) -> Node | int:
        """Return an extent: a number, one of the graph's, or the size of an axis."""
        if isinstance(extent, Const):
            return int(extent.value)
        assert isinstance(extent, Size)
        return self.sizes[extent.name]

    def shape(self, labels: Labels) -> tuple[Node | int, ...]:
        return tuple(self.size(self.ends[label]) for label in labels)

    def product_of(self, sizes: Iterable[Node | int]) -> Node | int:
        total: Node | int = 1
        for size in sizes:
            total = size if isinstance(total, int) and total == 1 else self.call(operator.mul, total, size)
        return total

    def arange(self, index: Index) -> Node:
        if index not in self.aranges:
            self.aranges[index] = self.call(torch.arange, *self.shape((index.name,)), device=self.device)
        return self.aranges[index]

    def align(self, node: Node, labels: Labels, target: Labels) -> Node:
        """Permute to the order of `target`; labels that are missing become axes of length 1."""
        order = [labels.index(label) for label in target if label in labels]
        if order != list(range(len(labels))):
            node = self.method("permute", node, order)
        for axis, label in enumerate(target):
            if label not in labels:
                node = self.method("unsqueeze", node, axis)
        return node

    def expanded(self, node: Node, labels: Labels, target: Labels) -> Node:
        """Expand a node to exactly these indices."""
        node = self.align(node, labels, target)
        return self.method("expand", node, self.shape(target)) if set(target) - set(labels) else node

    def widen(self, value: Value) -> Node:
        if self.widens and not value.wide:
            return self.method("to", value.node, self.wide_dtype)
        return value.node

    # Masks.

    def all_of(self, masks: Masks, labels: Labels) -> Node | None:
        """Where all masks hold, over some indices; `None`: there is none."""
        total: Node | None = None
        for mask, own in masks.items():
            node = self.align(mask, own, labels)
            total = node if total is None else self.call(torch.logical_and, total, node)
        return total

    def some(self, masks: Masks, free: Labels) -> Masks:
        """Where, over some indices, all masks hold for any value of the others."""
        groups: list[Masks] = []
        for mask, labels in masks.items():
            # Those that share an index that is not kept meet before it goes.
            over = set(labels) - set(free)
            near = [group for group in groups if any(over & set(own) for own in group.values())]
            groups = [group for group in groups if group not in near]
            groups.append({m: x for group in (*near, {mask: labels}) for m, x in group.items()})
        found = Masks()
        for group in groups:
            labels = tuple(dict.fromkeys(label for own in group.values() for label in own))
            node, axes = self.all_of(group, labels), [at for at, label in enumerate(labels) if label not in free]
            assert node is not None
            node = self.call(torch.any, node, tuple(axes)) if axes else node
            found[node] = tuple(label for label in labels if label in free)
        return found

    # Reads.

    def position(self, subscript: Expr) -> Value:
        """Evaluate a subscript for all combinations of its indices."""
        if isinstance(subscript, Load):
            return self.entry(subscript)
        labels, misses = labels_of(subscript), Masks()
        terms, offset = affine_terms(subscript)
        total: Node | None = None
        for coefficient, atom in terms:
            if isinstance(atom, Index):
                part, own = self.arange(atom), (atom.name,)
            else:
                assert isinstance(atom, Load)
                entry = self.entry(atom)
                misses |= entry.misses
                part, own = self.method("to", entry.node, torch.int64), entry.labels
            part = self.align(part, own, labels)
            if coefficient != 1:
                part = self.call(operator.mul, part, coefficient)
            total = part if total is None else self.call(operator.add, total, part)
        if total is None:
            total = self.call(torch.full, (), offset, dtype=torch.int64, device=self.device)
        elif offset:
            total = self.call(operator.add, total, offset)
        return Value(total, labels, misses)

    def entry(self, read: Load) -> Value:
        """Entries of an index tensor; -1 and reads outside its bounds miss."""
        if read not in self.entries:
            value = self.read(read)
            misses = dict(value.misses)
            if read.buffer.facts.masked is not False:
                misses[self.call(operator.ge, value.node, 0)] = value.labels
            self.entries[read] = Value(value.node, value.labels, misses)
        return self.entries[read]

    def place(self, subscript: Expr, size: Node | int, *, checked: bool) -> Value:
        """Where a subscript points along an axis, clamped where it misses so that it is safe to use.

        Args:
            subscript: the subscript.
            size: of the axis.
            checked: whether an affine subscript may leave the axis.
        """
        key = subscript, size, checked
        if key not in self.bounded:
            at = self.position(subscript)
            node, misses = at.node, dict(at.misses)
            affine = not isinstance(subscript, Index | Load)
            inner = subscript.subscripts if isinstance(subscript, Load) else ()
            if affine and checked:
                low, high = self.call(operator.ge, node, 0), self.call(operator.lt, node, size)
                misses[self.call(torch.logical_and, low, high)] = at.labels
            # An entry that is read where something else misses may be one of no term, which points anywhere.
            if misses and (affine or scattered_axes(inner)):
                node = self.call(torch.clamp, node, 0, self.call(operator.sub, size, 1))
            elif misses:
                node = self.call(torch.clamp, node, min=0)
            self.bounded[key] = Value(node, at.labels, misses)
        return self.bounded[key]

    def indexing(self, places: Mapping[int, Value]) -> tuple[list[Node | None], Labels, int]:
        """What torch indexes with, for places by axis: a list, the indices of its tensors, and where they go."""
        labels = tuple(dict.fromkeys(label for at in places.values() for label in at.labels))
        first, last = min(places), max(places)
        listed = [
            self.align(places[n].node, places[n].labels, labels) if n in places else None for n in range(last + 1)
        ]
        return listed, labels, first if last - first < len(places) else 0

    def read(self, read: Load) -> Value:
        """Read a tensor for all combinations of its indices."""
        source, addressed = self.tensors[read.buffer], scattered_axes(read.subscripts)
        plain = plain_labels([s for axis, s in enumerate(read.subscripts) if axis not in addressed])
        if not addressed:
            return Value(source, plain, owned=False)
        places = {n: self.place(read.subscripts[n], self.axis_size(read.buffer, n), checked=True) for n in addressed}
        listed, labels, at = self.indexing(places)
        if len(places) == 1 and labels and not self.compiled:
            # The fastest gather there is. The method, as other packages replace torch's function by their own.
            flat = listed[at] if len(labels) == 1 else self.method("reshape", listed[at], -1)
            node = self.method("index_select", source, at, flat)
            node = node if len(labels) == 1 else self.method("unflatten", node, at, self.shape(labels))
        else:
            node = self.call(torch.ops.aten.index.Tensor, source, listed)
        return Value(node, (*plain[:at], *labels, *plain[at:]), united([*places.values()]))

    def keep_out(self, value: Value, misses: Masks) -> Value:
        """Zero a value where a mask is false; the masks vary with indices of its own."""
        mask = self.all_of(misses, value.labels)
        if mask is None:
            return value
        return Value(self.call(torch.where, mask, value.node, 0), value.labels, wide=value.wide)

    def number(self, number: float) -> Value:
        return Value(self.call(torch.full, (), number, dtype=self.dtype, device=self.device), ())

    def times(self, value: Value, number: float) -> Value:
        if number == 1:
            return value
        return Value(self.call(operator.mul, self.widen(value), number), value.labels, wide=self.widens)


def united(values: Sequence[Value]) -> Masks:
    """The masks of several values."""
    return {mask: labels for value in values for mask, labels in value.misses.items()}
