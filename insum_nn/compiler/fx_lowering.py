"""Plan -> `fx.GraphModule` made of torch calls. The only file that builds FX.

The graph takes the tensors in the layout's order, then the extents that no tensor shows, then the starting value.
Extents that a tensor shows are read from its shape, so one graph serves all sizes.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from insum_nn.compiler import runtime
from insum_nn.compiler.ast import Access, Index, Number, Subscript
from insum_nn.compiler.bind import Bound
from insum_nn.compiler.options import Options
from insum_nn.compiler.plan import Dot, Labels, Load, Multiply, Plan, Scale, SparseProduct, Sum
from insum_nn.compiler.planner import scattered_axes
from insum_nn.errors import Span

__all__ = ["ACCUMULATOR", "extent_arguments", "lower"]

ACCUMULATOR = "accumulator"
Node = fx.Node
_HALVES = (torch.float16, torch.bfloat16)


def extent_arguments(bound: Bound) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The extents a graph takes as integers: indices that index no axis directly, and output axes not written by one."""
    layout = bound.layout
    static = {name for name, _ in bound.static}
    indices = tuple(
        name for name, plain in zip(layout.indices, layout.plain, strict=True) if not plain and name not in static
    )
    axes = tuple(axis for axis, name in enumerate(layout.output_plain) if name is None)
    return indices, axes


def lower(plan: Plan, options: Options, *, accumulate: bool = False, compiled: bool = False) -> fx.GraphModule:
    """Write a plan as torch calls.

    Args:
        plan: a verified plan.
        options: compile options.
        accumulate: add into an `accumulator` passed last, in place, instead of returning a new tensor.
        compiled: for a compiler that fuses, rather than for torch's library calls.

    Returns:
        A linted module; each node's `meta["span"]` is the token of the statement it comes from.
    """
    return _Lowering(plan, options, accumulate, compiled).build()


@dataclass(slots=True)
class _Value:
    """A node whose axes are labelled. `wide`: float32 in place of a half type. `owned`: no view of an input."""

    node: Node
    labels: Labels
    wide: bool = False
    owned: bool = True


@dataclass(slots=True)
class _Position:
    """Where a subscript points: `present` is false where an entry is missing, `inside` where it leaves the axis."""

    node: Node
    labels: Labels
    present: Node | None
    inside: Node | None


class _Lowering:
    def __init__(self, plan: Plan, options: Options, accumulate: bool, compiled: bool) -> None:
        self.plan = plan
        self.bound = plan.bound
        self.statement = plan.bound.statement
        self.options = options
        self.accumulate = accumulate
        self.compiled = compiled
        self.half = self.bound.dtype in _HALVES
        self.graph = fx.Graph()
        self.span: Span | None = None
        # What the code of the graph's `forward` names by itself.
        self.parameters = {"self", "torch", "inf", "nan", "device", "insum_nn_compiler_runtime_csr_product"}
        self.tensors: dict[str, Node] = {}
        self.sizes: dict[str, Node | int] = dict(self.bound.static)
        self.output_sizes: dict[int, Node] = {}
        self.values: dict[str, _Value] = {}
        self.aranges: dict[str, Node] = {}
        self.axis_sizes: dict[tuple[str, int], Node] = {}
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

    def build(self) -> fx.GraphModule:
        self.inputs()
        for step in self.plan.steps:
            self.values[step.result] = getattr(self, f"lower_{type(step).__name__.lower()}")(step)
        self.span = self.statement.output.span
        self.graph.output(self.combine())
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def parameter(self, name: str) -> Node:
        """An argument of the graph; underscores are appended to names that its Python code cannot use."""
        while name in self.parameters or keyword.iskeyword(name) or hasattr(builtins, name):
            name += "_"
        self.parameters.add(name)
        return self.graph.placeholder(name)

    def inputs(self) -> None:
        layout = self.bound.layout
        for name in layout.tensors:
            self.tensors[name] = self.parameter(name)
        indices, axes = extent_arguments(self.bound)
        for name in indices:
            self.sizes[name] = self.parameter(f"extent_{name}")
        for axis in axes:
            self.output_sizes[axis] = self.parameter(f"output_extent_{axis}")
        if self.accumulate:
            self.start = self.parameter(ACCUMULATOR)
        elif self.bound.has_start:
            self.start = self.parameter(self.statement.output.name)
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

    def position(self, subscript: Subscript) -> _Position:
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
        return _Position(total, labels, self.aligned_and(present, labels), None)

    def entry(self, access: Access) -> _Position:
        """Entries of an index tensor; -1 and reads outside its bounds are not present."""
        node, labels, present, inside = self.read(access)
        present = self.both(present, inside)
        if self.bound.facts_of(access.name).masked is not False or present is not None:
            present = self.both(present, self.call(operator.ge, node, 0))
        return _Position(node, labels, present, None)

    def bounds(self, subscript: Subscript, at: _Position, size: Node | int, *, nested: bool) -> _Position:
        """Add `inside` where a position may leave its axis, and clamp it so that it is safe to read at."""
        checked = nested or subscript.indirect is None
        inside = None
        if checked:
            inside = self.call(torch.logical_and, self.call(operator.ge, at.node, 0), self.call(operator.lt, at.node, size))
            top = self.call(operator.sub, size, 1)
            return _Position(self.call(torch.clamp, at.node, 0, top), at.labels, at.present, inside)
        if at.present is not None:
            return _Position(self.call(torch.clamp, at.node, min=0), at.labels, at.present, None)
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
        positions: list[_Position] = []
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
            node, labels = self.call(operator.getitem, source, at), union + plain
        present = None if present is None else self.align(present, union, labels)
        inside = None if inside is None else self.align(inside, union, labels)
        return node, labels, present, inside

    def select(self, source: Node, axis: int, at: _Position, plain: Labels) -> tuple[Node, Labels]:
        """Read along one axis; the library's `index_select` is the fastest gather there is."""
        labels = (*plain[:axis], *at.labels, *plain[axis:])
        if self.compiled and at.labels:
            # Flattened, the index would be taken apart again by divisions in the generated kernel.
            return self.call(operator.getitem, source, (*[slice(None)] * axis, at.node)), labels
        flat = at.node if len(at.labels) == 1 else self.method("reshape", at.node, -1)
        node = self.call(torch.index_select, source, axis, flat)
        if len(at.labels) > 1:
            node = self.method("unflatten", node, axis, tuple(self.sizes[label] for label in at.labels))
        elif not at.labels:
            node = self.method("squeeze", node, axis)
        return node, labels

    # Steps.

    def lower_load(self, step: Load) -> _Value:
        node, labels, present, inside = self.read(step.access)
        mask = self.both(present, inside)
        owned = step.gather
        if mask is not None:
            node = self.call(torch.where, mask, node, 0)
        if labels != step.labels:
            node = self.align(node, labels, step.labels)
        return _Value(node, step.labels, wide=False, owned=owned)

    def widen(self, value: _Value) -> Node:
        if self.half and not value.wide:
            return self.method("to", value.node, torch.float32)
        return value.node

    def lower_sum(self, step: Sum) -> _Value:
        value = self.values[step.source]
        axes = [i for i, label in enumerate(value.labels) if label not in step.labels]
        kept = tuple(label for label in value.labels if label in step.labels)
        dtype = torch.float32 if self.half else self.bound.dtype
        node = self.call(torch.sum, value.node, axes, dtype=dtype)
        return _Value(self.align(node, kept, step.labels), step.labels, wide=self.half)

    def lower_scale(self, step: Scale) -> _Value:
        value = self.values[step.source]
        return _Value(self.call(operator.mul, self.widen(value), step.number), value.labels, wide=self.half)

    def lower_multiply(self, step: Multiply) -> _Value:
        left, right = self.values[step.left], self.values[step.right]
        labels = step.labels + step.over
        a, b = (self.align(self.widen(v), v.labels, labels) for v in (left, right))
        if not step.over:
            return _Value(self.call(operator.mul, a, b), labels, wide=self.half)
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
        return _Value(total, step.labels, wide=self.half)

    def pick(self, node: Node, value: _Value, label: str, axis: int, slot: int) -> Node:
        return self.method("select", node, axis, slot if label in value.labels else 0)

    def lower_dot(self, step: Dot) -> _Value:
        left, right = self.values[step.left], self.values[step.right]
        batch, m, k, n = step.batch, step.m, step.k, step.n
        a = self.matrix(left, batch, m, k)
        b = self.matrix(right, batch, k, n)
        node = self.call(torch.matmul, a, b)
        if len(batch) != 1 and batch or len(m) != 1 or len(n) != 1:
            node = self.method("reshape", node, tuple(self.sizes[label] for label in step.labels))
        return _Value(node, step.labels)

    def matrix(self, value: _Value, batch: Labels, rows: Labels, cols: Labels) -> Node:
        """Fold labels into `[batch, rows, cols]`, without a batch axis when there is no batch."""
        node = value.node
        if value.wide:
            node = self.method("to", node, self.bound.dtype)
        node = self.align(node, value.labels, batch + rows + cols)
        groups = [group for group in (batch, rows, cols) if group or group is not batch]
        if all(len(group) == 1 for group in groups):
            return node
        return self.method("reshape", node, tuple(self.extent(group) for group in groups))

    def extent(self, labels: Labels) -> Node | int:
        total: Node | int = 1
        for label in labels:
            size = self.sizes[label]
            total = size if isinstance(total, int) and total == 1 else self.call(operator.mul, total, size)
        return total

    def lower_sparseproduct(self, step: SparseProduct) -> _Value:
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
            runtime.csr_product,
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
        return _Value(node, step.labels)

    def entry_index(self, subscript: Subscript, entries: Labels) -> tuple[Node | None, tuple[int, ...], bool]:
        if subscript.plain is not None:
            return None, (entries.index(subscript.plain),), False
        access = subscript.indirect
        assert access is not None
        axes = tuple(entries.index(s.plain) for s in access.subscripts if s.plain is not None)
        return self.tensors[access.name], axes, self.bound.facts_of(access.name).masked is not False

    # Combination.

    def output_size(self, axis: int) -> Node | int:
        plain = self.bound.layout.output_plain[axis]
        return self.output_sizes[axis] if plain is None else self.sizes[plain]

    def output_shape(self) -> tuple[Node | int, ...]:
        return tuple(self.output_size(axis) for axis in range(len(self.statement.output.subscripts)))

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which terms of different programs meet."""
        if self.half and self.options.accumulate == "float32":
            return torch.float32
        return self.bound.dtype

    def final_value(self) -> _Value:
        name = self.plan.combine.value
        if name is not None:
            return self.values[name]
        number = math.prod(factor.value for factor in self.statement.factors if isinstance(factor, Number))
        return _Value(self.call(torch.full, (), number, dtype=self.bound.dtype, device=self.device), ())

    def combine(self) -> Node:
        value = self.final_value()
        if self.statement.operator in ("max=", "min="):
            return _Extremum(self, value).combine()
        mode = self.plan.combine.mode
        if mode == "rows":
            return self.combine_rows(value)
        if mode == "direct":
            return self.combine_direct(value)
        return self.combine_scatter(value)

    def finish(self, node: Node, *, owned: bool) -> Node:
        """A contiguous tensor of the operands' dtype that is nobody's view."""
        if self.half:
            node = self.method("to", node, self.bound.dtype)
        if owned:
            return self.method("contiguous", node)
        return self.method("clone", node, memory_format=torch.contiguous_format)

    def combine_rows(self, value: _Value) -> Node:
        (axis,) = self.plan.combine.scattered
        rank = len(self.statement.output.subscripts)
        node = value.node
        if axis != 0:
            node = self.method("permute", node, [i + 1 if i < axis else 0 if i == axis else i for i in range(rank)])
        if self.start is not None:
            node = self.call(operator.add, node, self.start)
        return self.finish(node, owned=True)

    def expanded(self, value: _Value, labels: Labels) -> Node:
        """The value with exactly these labels; missing ones repeat it."""
        node = self.align(value.node, value.labels, labels)
        if set(labels) - set(value.labels):
            node = self.method("expand", node, tuple(self.sizes[label] for label in labels))
        return node

    def combine_direct(self, value: _Value) -> Node:
        labels = tuple(s.plain for s in self.statement.output.subscripts if s.plain is not None)
        if self.accumulate:
            return self.method("add_", self.start, self.align(value.node, value.labels, labels))
        if self.start is not None:
            node = self.align(self.widen(value), value.labels, labels)
            start = self.method("to", self.start, torch.float32) if self.half else self.start
            return self.finish(self.call(operator.add, start, node), owned=True)
        missing = set(labels) - set(value.labels)
        return self.finish(self.expanded(value, labels), owned=value.owned and not missing)

    def addresses(self) -> tuple[Node, Labels, Node | None, tuple[Node | int, ...]]:
        """One flat address per term over the scattered axes, where it is valid, and those axes' sizes."""
        output = self.statement.output
        positions: list[_Position] = []
        sizes: list[Node | int] = []
        for axis in self.plan.combine.scattered:
            subscript = output.subscripts[axis]
            at = self.position(subscript)
            size = self.output_size(axis)
            if subscript.indirect is None and self.bound.drop_outside and subscript.plain is None:
                at = self.bounds(subscript, at, size, nested=False)
            elif at.present is not None:
                at = _Position(self.call(torch.clamp, at.node, min=0), at.labels, at.present, None)
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

    def combine_scatter(self, value: _Value) -> Node:
        flat, labels, valid, sizes = self.addresses()
        output = self.statement.output
        scattered = self.plan.combine.scattered
        rest = tuple(s.plain for i, s in enumerate(output.subscripts) if i not in scattered and s.plain is not None)
        in_place = len(scattered) == 1
        axis = scattered[0] if in_place else 0
        arranged = (*rest[:axis], *labels, *rest[axis:])
        node = self.method("to", value.node, self.sum_dtype) if self.half else value.node
        node = self.expanded(_Value(node, value.labels), arranged)
        if valid is not None:
            node = self.call(torch.where, self.align(valid, labels, arranged), node, 0)
            flat = self.call(torch.where, valid, flat, 0)
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
        return self.call(torch.index_add, base, axis, flat, node)

    def base(self, axis: int, rest: Labels, sizes: Sequence[Node | int], in_place: bool) -> Node:
        if self.accumulate:
            assert self.start is not None
            return self.start
        if self.start is None:
            total = self.product(sizes)
            shape = (*(self.sizes[x] for x in rest[:axis]), total, *(self.sizes[x] for x in rest[axis:]))
            return self.call(torch.zeros, shape, dtype=self.sum_dtype, device=self.device)
        start = self.method("to", self.start, self.sum_dtype) if self.half else self.start
        if in_place:
            return start
        scattered = self.plan.combine.scattered
        order = [*scattered, *(i for i in range(len(self.statement.output.subscripts)) if i not in scattered)]
        moved = self.method("permute", start, order)
        return self.method("reshape", moved, (self.product(sizes), *(self.sizes[x] for x in rest)))

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


class _Extremum:
    """`max=` and `min=`: reduce what takes part, and leave untouched cells at 0 or at their start."""

    def __init__(self, lowering: _Lowering, value: _Value) -> None:
        self.low = lowering
        self.value = value
        dtype = lowering.bound.dtype
        self.largest = lowering.statement.operator == "max="
        if dtype.is_floating_point:
            self.neutral: float | int = float("-inf") if self.largest else float("inf")
        else:
            info = torch.iinfo(dtype)
            self.neutral = info.min if self.largest else info.max

    def guards(self, labels: Labels) -> Node | None:
        """True where every factor has an entry."""
        parts: list[tuple[Node | None, Labels]] = []
        for access in self.low.plan.combine.guards:
            _, own, present, _ = self.low.read(access)
            parts.append((present, own))
        return self.low.aligned_and(parts, labels)

    def combine(self) -> Node:
        low = self.low
        output = low.statement.output
        written = tuple(dict.fromkeys(index.name for index in output.indices()))
        labels = (*written, *(x for x in low.bound.layout.indices if x not in written))
        node = self.value.node
        if low.half:
            node = low.method("to", node, low.bound.dtype)
        node = low.expanded(_Value(node, self.value.labels), labels)
        valid = self.guards(labels)
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
