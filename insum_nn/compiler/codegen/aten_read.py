"""Read tensors by torch calls: sizes, subscripts, index tensors, gathers, and the masks that go with them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from insum_nn.compiler.codegen.calls import Call, CallGraph
from insum_nn.compiler.ir.access import (
    Labels,
    affine_terms,
    entries,
    indices_of,
    loads_in_order,
    plain_labels,
    scattered_axes,
)
from insum_nn.compiler.ir.graph import Graph, Library, Step, loops_of, store_of
from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, Index, Load, Op, Size, Store, conjuncts
from insum_nn.compiler.options import Options
from insum_nn.dtypes import is_widened, wide_dtype

__all__ = ["GraphWriter", "Position", "Value"]

Node = Call
_ZERO = Const(0)


@dataclass(slots=True)
class Value:
    """A node whose axes are indices. `wide`: of the dtype in which sums are formed. `owned`: no view of an input."""

    node: Node
    labels: Labels
    wide: bool = False
    owned: bool = True


@dataclass(slots=True)
class Position:
    """Where a subscript points: `present` is false where an entry is missing, `inside` where it leaves the axis."""

    node: Node
    labels: Labels
    present: Node | None
    inside: Node | None


class GraphWriter:
    """A graph of torch calls under construction.

    Args:
        source: the steps to print.
        device: type of the device that the tensors are on.
        options: compile options.
        compiled: a compiler fuses the calls; otherwise each runs as it is.
        empty: some index may have no values.
    """

    def __init__(self, source: Graph, device: str, options: Options, *, compiled: bool, empty: bool) -> None:
        self.source = source
        self.device_type = device
        self.compiled = compiled
        self.deterministic = options.deterministic
        self.may_be_empty = empty
        (self.output,) = source.outputs
        self.dtype: torch.dtype = getattr(torch, self.output.dtype)
        self.widens = is_widened(self.dtype)
        # The dtype of products and sums, and the one in which terms of different programs meet.
        self.wide_dtype = wide_dtype(self.dtype)
        self.sum_dtype = self.wide_dtype if options.accumulate == "float32" else self.dtype
        self.steps = [node for node in source.nodes if isinstance(node, Step | Library)]
        stores = [store_of(step.kernel) for step in self.steps]
        self.ends = {loop.index.name: loop.end for step in self.steps for loop in loops_of(step.kernel)}
        reads = [read for store in stores for read in loads_in_order(*store.subscripts, store.value)]
        # The axis that a position is inside of.
        self.axes: dict[tuple[Expr, Expr], tuple[Buffer, int]] = {}
        for read in reads:
            for axis, (subscript, extent) in enumerate(zip(read.subscripts, read.buffer.shape, strict=True)):
                self.axes.setdefault((subscript, extent), (read.buffer, axis))
        subscripts = [s for access in (*stores, *reads) for s in access.subscripts]
        self.index_tensors = {read.buffer for read in loads_in_order(*subscripts)}
        self.graph = CallGraph()
        self.tensors: dict[Buffer, Node] = {}
        self.sizes: dict[str, Node] = {}
        self.values: dict[Buffer, Value] = {}
        self.axis_sizes: dict[tuple[Buffer, int], Node] = {}
        self.aranges: dict[Expr, Node] = {}
        self.entries: dict[Load, Position] = {}
        self.conditions: dict[Expr, tuple[Node, Labels]] = {}
        self.initial: Node | None = None
        self.device: Node | None = None

    # Building blocks.

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.graph.function(function, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self.graph.method(name, args, kwargs)

    def parameter(self, stands_for: Buffer | Size) -> Node:
        return self.graph.argument(stands_for)

    def inputs(self) -> None:
        """Tensors in order, sizes that none of them shows, the initial value."""
        initial = f"{self.output.name}_initial"
        tensors = [buffer for buffer in self.source.inputs if buffer.name != initial]
        for buffer in tensors:
            self.tensors[buffer] = self.parameter(buffer)
        for extent in self.source.extents:
            if extent.buffer is None:
                self.sizes[extent.size.name] = self.parameter(extent.size)
        if len(tensors) < len(self.source.inputs):
            self.initial = self.parameter(self.source.inputs[-1])
        anchor = next(iter(self.tensors.values()), self.initial)
        if anchor is not None:
            self.device = self.call(getattr, anchor, "device")
        for extent in self.source.extents:
            if extent.buffer is not None:
                self.sizes[extent.size.name] = self.axis_size(extent.buffer, extent.axis)

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

    def end(self, label: str) -> Node | int:
        """Return the extent of an index."""
        return self.size(self.ends[label])

    def shape(self, labels: Labels) -> tuple[Node | int, ...]:
        return tuple(self.end(label) for label in labels)

    def arange(self, index: Index) -> Node:
        if index not in self.aranges:
            self.aranges[index] = self.call(torch.arange, self.end(index.name), device=self.device)
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

    def both(self, a: Node | None, b: Node | None) -> Node | None:
        if a is None or b is None:
            return a if b is None else b
        return self.call(torch.logical_and, a, b)

    def aligned_and(self, parts: Sequence[tuple[Node | None, Labels]], labels: Labels) -> Node | None:
        result: Node | None = None
        for node, own in parts:
            if node is not None:
                result = self.both(result, self.align(node, own, labels))
        return result

    # Subscripts.

    def position(self, subscript: Expr) -> Position:
        """Evaluate a subscript for all combinations of its indices."""
        if isinstance(subscript, Load):
            return self.entry(subscript)
        labels = indices_of(subscript)
        terms, offset = affine_terms(subscript)
        total: Node | None = None
        present: list[tuple[Node | None, Labels]] = []
        for coefficient, atom in terms:
            if isinstance(atom, Index):
                part, own = self.arange(atom), (atom.name,)
            else:
                assert isinstance(atom, Load)
                entry = self.entry(atom)
                present.append((entry.present, entry.labels))
                part, own = self.method("to", entry.node, torch.int64), entry.labels
            part = self.align(part, own, labels)
            if coefficient != 1:
                part = self.call(operator.mul, part, coefficient)
            total = part if total is None else self.call(operator.add, total, part)
        if total is None:
            total = self.call(torch.full, (), offset, dtype=torch.int64, device=self.device)
        elif offset:
            total = self.call(operator.add, total, offset)
        return Position(total, labels, self.aligned_and(present, labels), None)

    def entry(self, read: Load) -> Position:
        """Entries of an index tensor; -1 and reads outside its bounds are not present."""
        if read in self.entries:
            return self.entries[read]
        node, labels, present, inside = self.read(read)
        present = self.both(present, inside)
        if read.buffer.facts.masked is not False or present is not None:
            present = self.both(present, self.call(operator.ge, node, 0))
            self.entries[read] = Position(node, labels, present, None)
        return Position(node, labels, present, None)

    def bounds(self, subscript: Expr, at: Position, size: Node | int, *, nested: bool) -> Position:
        """Add `inside` where a position may leave its axis, and clamp it so that it is safe to read at."""
        if nested or not isinstance(subscript, Load):
            inside = self.call(
                torch.logical_and, self.call(operator.ge, at.node, 0), self.call(operator.lt, at.node, size)
            )
            top = self.call(operator.sub, size, 1)
            return Position(self.call(torch.clamp, at.node, 0, top), at.labels, at.present, inside)
        if at.present is not None:
            return Position(self.call(torch.clamp, at.node, min=0), at.labels, at.present, None)
        return at

    def read(self, read: Load) -> tuple[Node, Labels, Node | None, Node | None]:
        """Read a tensor for all combinations of its indices; the masks say where the value means nothing."""
        source, buffer = self.tensors[read.buffer], read.buffer
        addressed = scattered_axes(read.subscripts)
        plain = plain_labels([s for axis, s in enumerate(read.subscripts) if axis not in addressed])
        if not addressed:
            return source, plain, None, None
        positions: list[Position] = []
        for axis in addressed:
            subscript = read.subscripts[axis]
            at = self.position(subscript)
            if not isinstance(subscript, Index):
                at = self.bounds(subscript, at, self.axis_size(buffer, axis), nested=buffer in self.index_tensors)
            positions.append(at)
        union = tuple(dict.fromkeys(label for at in positions for label in at.labels))
        present = self.aligned_and([(at.present, at.labels) for at in positions], union)
        inside = self.aligned_and([(at.inside, at.labels) for at in positions], union)
        if len(addressed) == 1:
            node, labels = self.select(source, addressed[0], positions[0], plain)
        else:
            order = [*addressed, *(i for i in range(len(read.subscripts)) if i not in addressed)]
            if order != sorted(order):
                source = self.method("permute", source, order)
            at = tuple(self.align(p.node, p.labels, union) for p in positions)
            node, labels = self.call(torch.ops.aten.index.Tensor, source, list(at)), union + plain
        present = None if present is None else self.align(present, union, labels)
        inside = None if inside is None else self.align(inside, union, labels)
        return node, labels, present, inside

    def select(self, source: Node, axis: int, at: Position, plain: Labels) -> tuple[Node, Labels]:
        """Read along one axis; the library's `index_select` is the fastest gather there is."""
        labels = (*plain[:axis], *at.labels, *plain[axis:])
        if self.compiled and at.labels:
            # Flattened, the index would be taken apart again by divisions in the generated kernel.
            return self.call(torch.ops.aten.index.Tensor, source, [*[None] * axis, at.node]), labels
        flat = at.node if len(at.labels) == 1 else self.method("reshape", at.node, -1)
        # The method, because other packages put a function of their own in place of torch's.
        node = self.method("index_select", source, axis, flat)
        if len(at.labels) > 1:
            node = self.method("unflatten", node, axis, self.shape(at.labels))
        elif not at.labels:
            node = self.method("squeeze", node, axis)
        return node, labels

    # Conditions.

    def added_conditions(self, access: Load | Store) -> list[Expr]:
        """Return the conditions of a read or a write, without those of its own address."""
        every = conjuncts(access.where)
        own: set[Expr] = set()
        bounded: set[Expr] = set()
        for subscript, extent in zip(access.subscripts, access.buffer.shape, strict=True):
            own |= {Op("at_least", (entry, _ZERO)) for entry in entries(subscript)}
            if not isinstance(subscript, Index | Load):
                own |= {Op("at_least", (subscript, _ZERO)), Op("less", (subscript, extent))}
        for condition in every:
            if isinstance(condition, Op) and condition.name == "less":
                bounded.add(condition.args[0])
        lower = {Op("at_least", (position, _ZERO)) for position in bounded}
        return [condition for condition in every if condition not in own and condition not in lower]

    def holds(self, condition: Expr) -> tuple[Node, Labels]:
        """Where, over the indices that it depends on, a condition holds."""
        if condition not in self.conditions:
            self.conditions[condition] = self._holds(condition)
        return self.conditions[condition]

    def _holds(self, condition: Expr) -> tuple[Node, Labels]:
        if isinstance(condition, Load):
            return self.values[condition.buffer].node, plain_labels(condition.subscripts)
        assert isinstance(condition, Op)
        subject = condition.args[0]
        if condition.name == "less":
            at = self.position(subject)
            at = self.bounds(subject, at, self.axis_size(*self.axes[subject, condition.args[1]]), nested=True)
            found = self.both(at.present, at.inside)
        else:
            assert condition.name == "at_least"
            assert isinstance(subject, Load)
            at = self.entry(subject)
            found = at.present
        assert found is not None
        return found, at.labels

    def some(self, conditions: Sequence[Expr], free: Labels) -> tuple[Node, Labels] | None:
        """Where, over some indices, all conditions hold for any value of the others."""
        groups: list[list[tuple[Node, Labels]]] = []
        for part in map(self.holds, conditions):
            # Parts that share an index that is not kept meet before it goes.
            over = set(part[1]) - set(free)
            near = [group for group in groups if any(over & set(labels) for _, labels in group)]
            groups = [group for group in groups if group not in near] + [[*(p for g in near for p in g), part]]
        parts: list[tuple[Node | None, Labels]] = []
        for group in groups:
            labels = tuple(dict.fromkeys(label for _, own in group for label in own))
            node = self.aligned_and(group, labels)
            axes = tuple(axis for axis, label in enumerate(labels) if label not in free)
            if axes:
                node = self.call(torch.any, node, axes)
            parts.append((node, tuple(label for label in labels if label in free)))
        labels = tuple(dict.fromkeys(label for _, own in parts for label in own))
        found = self.aligned_and(parts, labels)
        return None if found is None else (found, labels)

    # Values.

    def operand(self, value: Expr) -> Value:
        """Return a factor: an input that is read as it is, an intermediate result, or a number."""
        if isinstance(value, Const):
            return Value(self.call(torch.full, (), value.value, dtype=self.dtype, device=self.device), ())
        assert isinstance(value, Load)
        labels = plain_labels(value.subscripts)
        if value.buffer in self.values:
            stored = self.values[value.buffer]
            return Value(stored.node, labels, stored.wide, stored.owned)
        return Value(self.tensors[value.buffer], labels, owned=False)

    def widen(self, value: Value) -> Node:
        if self.widens and not value.wide:
            return self.method("to", value.node, self.wide_dtype)
        return value.node

    def extent(self, labels: Labels) -> Node | int:
        """Count the values of several indices together."""
        total: Node | int = 1
        for label in labels:
            size = self.end(label)
            total = size if isinstance(total, int) and total == 1 else self.call(operator.mul, total, size)
        return total

    def product(self, sizes: Sequence[Node | int]) -> Node | int:
        total: Node | int = sizes[0]
        for size in sizes[1:]:
            total = self.call(operator.mul, total, size)
        return total

    def expanded(self, value: Value, labels: Labels) -> Node:
        """Expand a value to exactly these indices."""
        node = self.align(value.node, value.labels, labels)
        if set(labels) - set(value.labels):
            node = self.method("expand", node, self.shape(labels))
        return node
