"""Reading tensors in FX: sizes, subscripts, index tensors, gathers, and the masks that go with them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.misses import Miss
from insum_nn.compiler.lang.syntax import Access, Index, Subscript
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.plan import Labels, Plan
from insum_nn.compiler.plans.planner import scattered_axes
from insum_nn.errors import Span

__all__ = ["HALVES", "GraphWriter", "Position", "Value", "extent_arguments"]

Node = fx.Node
HALVES = (torch.float16, torch.bfloat16)


def extent_arguments(bound: Bound) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The extents a graph takes as integers: of indices that no axis shows, and of output axes that no index shows."""
    layout = bound.layout
    static = {name for name, _ in bound.static}
    indices = tuple(
        name for name, plain in zip(layout.indices, layout.plain, strict=True) if not plain and name not in static
    )
    axes = tuple(axis for axis, name in enumerate(layout.output_plain) if name is None)
    return indices, axes


@dataclass(slots=True)
class Value:
    """A node whose axes are labelled. `wide`: float32 in place of a half type. `owned`: no view of an input."""

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
    """A graph under construction for one plan."""

    def __init__(self, plan: Plan, options: Options, accumulate: bool, compiled: bool) -> None:
        self.plan = plan
        self.bound = plan.bound
        self.statement = plan.bound.statement
        self.options = options
        self.accumulate = accumulate
        self.compiled = compiled
        self.half = self.bound.dtype in HALVES
        self.graph = fx.Graph()
        self.span: Span | None = None
        self.parameters = 0
        self.tensors: dict[str, Node] = {}
        self.sizes: dict[str, Node | int] = dict(self.bound.static)
        self.output_sizes: dict[int, Node] = {}
        self.values: dict[str, Value] = {}
        self.aranges: dict[str, Node] = {}
        self.axis_sizes: dict[tuple[str, int], Node] = {}
        self.entries: dict[Access, Position] = {}
        self.misses: dict[Miss, tuple[Node, Labels]] = {}
        self.start: Node | None = None
        self.device: Node | None = None

    # Building blocks.

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta["span"] = self.span
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_method(name, args, kwargs)
        node.meta["span"] = self.span
        return node

    def parameter(self, stands_for: str) -> Node:
        """An argument of the graph, numbered: FX rewrites names, and would make one of `W` and `w`."""
        node = self.graph.placeholder(f"arg{self.parameters}")
        node.meta["stands_for"] = stands_for
        self.parameters += 1
        return node

    def inputs(self) -> None:
        layout = self.bound.layout
        for name in layout.tensors:
            self.tensors[name] = self.parameter(name)
        indices, axes = extent_arguments(self.bound)
        for name in indices:
            self.sizes[name] = self.parameter(f"the extent of {name}")
        for axis in axes:
            self.output_sizes[axis] = self.parameter(f"the extent of axis {axis} of {self.statement.output.name}")
        if self.accumulate:
            self.start = self.parameter(f"{self.statement.output.name}, added to in place")
        elif self.bound.has_start:
            self.start = self.parameter(f"{self.statement.output.name}, the initial value")
        anchor = next(iter(self.tensors.values()), self.start)
        if anchor is not None:
            self.device = self.call(getattr, anchor, "device")
        for name, plain in zip(layout.indices, layout.plain, strict=True):
            if plain and name not in self.sizes:
                where, axis = plain[0]
                self.sizes[name] = self.axis_size(layout.tensors[where], axis)

    def axis_size(self, tensor: str, axis: int) -> Node:
        key = (tensor, axis)
        if key not in self.axis_sizes:
            self.axis_sizes[key] = self.method("size", self.tensors[tensor], axis)
        return self.axis_sizes[key]

    def arange(self, label: str) -> Node:
        if label not in self.aranges:
            self.aranges[label] = self.call(torch.arange, self.sizes[label], device=self.device)
        return self.aranges[label]

    def align(self, node: Node, labels: Labels, wanted: Labels) -> Node:
        """Permute to the order of `wanted`; labels that are missing become axes of length 1."""
        order = [labels.index(label) for label in wanted if label in labels]
        if order != list(range(len(labels))):
            node = self.method("permute", node, order)
        for axis, label in enumerate(wanted):
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

    def position(self, subscript: Subscript) -> Position:
        """Evaluate a subscript for all combinations of its indices."""
        indirect = subscript.indirect
        if indirect is not None:
            return self.entry(indirect)
        labels = tuple(dict.fromkeys(index.name for index in subscript.indices()))
        total: Node | None = None
        present: list[tuple[Node | None, Labels]] = []
        for term in subscript.terms:
            if isinstance(term.atom, Index):
                part, own = self.arange(term.atom.name), (term.atom.name,)
            else:
                entry = self.entry(term.atom)
                present.append((entry.present, entry.labels))
                part, own = self.method("to", entry.node, torch.int64), entry.labels
            part = self.align(part, own, labels)
            if term.coefficient != 1:
                part = self.call(operator.mul, part, term.coefficient)
            total = part if total is None else self.call(operator.add, total, part)
        if total is None:
            total = self.call(torch.full, (), subscript.offset, dtype=torch.int64, device=self.device)
        elif subscript.offset:
            total = self.call(operator.add, total, subscript.offset)
        return Position(total, labels, self.aligned_and(present, labels), None)

    def entry(self, access: Access) -> Position:
        """Entries of an index tensor; -1 and reads outside its bounds are not present."""
        if access in self.entries:
            return self.entries[access]
        node, labels, present, inside = self.read(access)
        present = self.both(present, inside)
        if self.bound.facts_of(access.name).masked is not False or present is not None:
            present = self.both(present, self.call(operator.ge, node, 0))
            self.entries[access] = Position(node, labels, present, None)
        return Position(node, labels, present, None)

    def bounds(self, subscript: Subscript, at: Position, size: Node | int, *, nested: bool) -> Position:
        """Add `inside` where a position may leave its axis, and clamp it so that it is safe to read at."""
        checked = nested or subscript.indirect is None
        inside = None
        if checked:
            inside = self.call(
                torch.logical_and, self.call(operator.ge, at.node, 0), self.call(operator.lt, at.node, size)
            )
            top = self.call(operator.sub, size, 1)
            return Position(self.call(torch.clamp, at.node, 0, top), at.labels, at.present, inside)
        if at.present is not None:
            return Position(self.call(torch.clamp, at.node, min=0), at.labels, at.present, None)
        return at

    def read(self, access: Access) -> tuple[Node, Labels, Node | None, Node | None]:
        """Read a tensor for all combinations of its indices; the masks say where the value means nothing."""
        self.span = access.span
        source = self.tensors[access.name]
        addressed = scattered_axes(access)
        plain = tuple(s.plain for i, s in enumerate(access.subscripts) if i not in addressed and s.plain is not None)
        if not addressed:
            return source, plain, None, None
        nested = access.name in self.bound.layout.index_tensors
        positions: list[Position] = []
        for axis in addressed:
            subscript = access.subscripts[axis]
            at = self.position(subscript)
            if subscript.plain is None:
                at = self.bounds(subscript, at, self.axis_size(access.name, axis), nested=nested)
            positions.append(at)
        union = tuple(dict.fromkeys(label for at in positions for label in at.labels))
        present = self.aligned_and([(at.present, at.labels) for at in positions], union)
        inside = self.aligned_and([(at.inside, at.labels) for at in positions], union)
        self.span = access.span
        if len(addressed) == 1:
            node, labels = self.select(source, addressed[0], positions[0], plain)
        else:
            order = [*addressed, *(i for i in range(len(access.subscripts)) if i not in addressed)]
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
        # The method, because other packages are known to put a function of their own in place of torch's.
        node = self.method("index_select", source, axis, flat)
        if len(at.labels) > 1:
            node = self.method("unflatten", node, axis, tuple(self.sizes[label] for label in at.labels))
        elif not at.labels:
            node = self.method("squeeze", node, axis)
        return node, labels

    # Misses.

    def present(self, miss: Miss) -> tuple[Node, Labels]:
        """Where, over the indices that it depends on, a read does not miss."""
        if miss not in self.misses:
            access, span = miss.access, self.span
            if miss.axis is None:
                at = self.entry(access)
                found = at.present
            else:
                at = self.position(access.subscripts[miss.axis])
                at = self.bounds(access.subscripts[miss.axis], at, self.axis_size(access.name, miss.axis), nested=True)
                found = self.both(at.present, at.inside)
            assert found is not None
            self.misses[miss] = found, at.labels
            self.span = span
        return self.misses[miss]

    def some(self, misses: Sequence[Miss], kept: Labels) -> tuple[Node, Labels] | None:
        """Where, over some indices, any term misses in none of these ways."""
        groups: list[list[tuple[Node, Labels]]] = []
        for part in map(self.present, misses):
            # Parts that share an index that is not kept meet before it goes.
            over = set(part[1]) - set(kept)
            near = [group for group in groups if any(over & set(labels) for _, labels in group)]
            groups = [group for group in groups if group not in near] + [[*(p for g in near for p in g), part]]
        parts: list[tuple[Node | None, Labels]] = []
        for group in groups:
            labels = tuple(dict.fromkeys(label for _, own in group for label in own))
            node = self.aligned_and(group, labels)
            axes = tuple(axis for axis, label in enumerate(labels) if label not in kept)
            if axes:
                node = self.call(torch.any, node, axes)
            parts.append((node, tuple(label for label in labels if label in kept)))
        labels = tuple(dict.fromkeys(label for _, own in parts for label in own))
        found = self.aligned_and(parts, labels)
        return None if found is None else (found, labels)

    # Writing.

    def extent(self, labels: Labels) -> Node | int:
        total: Node | int = 1
        for label in labels:
            size = self.sizes[label]
            total = size if isinstance(total, int) and total == 1 else self.call(operator.mul, total, size)
        return total

    def output_size(self, axis: int) -> Node | int:
        plain = self.bound.layout.output_plain[axis]
        return self.output_sizes[axis] if plain is None else self.sizes[plain]

    def expanded(self, value: Value, labels: Labels) -> Node:
        """The value with exactly these labels; missing ones repeat it."""
        node = self.align(value.node, value.labels, labels)
        if set(labels) - set(value.labels):
            node = self.method("expand", node, tuple(self.sizes[label] for label in labels))
        return node

    def finish(self, node: Node, *, owned: bool) -> Node:
        """A contiguous tensor of the operands' dtype that is nobody's view."""
        if self.half:
            node = self.method("to", node, self.bound.dtype)
        if owned:
            return self.method("contiguous", node)
        return self.method("clone", node, memory_format=torch.contiguous_format)

    def addresses(self) -> tuple[Node, Labels, Node | None, tuple[Node | int, ...]]:
        """One flat address per term over the scattered axes, where it is valid, and those axes' sizes."""
        output = self.statement.output
        positions: list[Position] = []
        sizes: list[Node | int] = []
        for axis in self.plan.combine.scattered:
            subscript = output.subscripts[axis]
            at = self.position(subscript)
            size = self.output_size(axis)
            if subscript.indirect is None and self.bound.drop_outside and subscript.plain is None:
                at = self.bounds(subscript, at, size, nested=False)
            elif at.present is not None:
                at = Position(self.call(torch.clamp, at.node, min=0), at.labels, at.present, None)
            if len(self.plan.combine.scattered) > 1:
                # An address over several axes may exceed what an int32 index tensor holds.
                at = Position(self.method("to", at.node, torch.int64), at.labels, at.present, at.inside)
            positions.append(at)
            sizes.append(size)
        labels = tuple(dict.fromkeys(label for at in positions for label in at.labels))
        masks = [(mask, at.labels) for at in positions for mask in (at.present, at.inside)]
        valid = self.aligned_and(masks, labels)
        flat: Node | None = None
        for at, size in zip(positions, sizes, strict=True):
            part = self.align(at.node, at.labels, labels)
            if flat is None:
                flat = part
            else:
                flat = self.call(operator.add, self.call(operator.mul, flat, size), part)
        assert flat is not None
        return flat, labels, valid, tuple(sizes)

    def product(self, sizes: Sequence[Node | int]) -> Node | int:
        total: Node | int = sizes[0]
        for size in sizes[1:]:
            total = self.call(operator.mul, total, size)
        return total

    def restore(self, node: Node, rest: Labels, sizes: Sequence[Node | int], in_place: bool) -> Node:
        """Undo the gathering of scattered axes at the front."""
        if in_place:
            return node
        scattered = self.plan.combine.scattered
        node = self.method("reshape", node, (*sizes, *(self.sizes[x] for x in rest)))
        order = [*scattered, *(i for i in range(len(self.statement.output.subscripts)) if i not in scattered)]
        inverse = [order.index(axis) for axis in range(len(order))]
        return node if inverse == sorted(inverse) else self.method("permute", node, inverse)
