"""Write the kernel of a form under a schedule: algorithm, rows, tiles, text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from insum_nn.compiler.codegen.triton import print_kernel
from insum_nn.compiler.codegen.triton_values import lanes_of
from insum_nn.compiler.forms.form import Form, input_of
from insum_nn.compiler.forms.parameters import Argument, Strides
from insum_nn.compiler.forms.placement import extent_arguments, place_indices
from insum_nn.compiler.ir.build import INITIAL, OUTPUT, build
from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, Kernel, Load, Loop, Node, Op, Size, walk
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.passes.fuse_outputs import clusters
from insum_nn.compiler.passes.own_rows import RowWalk, own_rows
from insum_nn.compiler.passes.tile import Tiling, parts_of, tile
from insum_nn.compiler.passes.tile_outputs import tile_outputs
from insum_nn.compiler.schedule.canonical import names_of
from insum_nn.compiler.schedule.space import Precision, Schedule
from insum_nn.dtypes import wide_dtype

__all__ = ["SOURCE_SHAPE", "Source", "arguments_of", "nest_of", "row_walk_of", "write_kernel"]


def nest_of(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Kernel:
    """The placed kernel of a form under a schedule."""
    rows, tiling = row_walk_of(form, schedule, strides, precision)
    if not form.additional:
        return tile(rows, schedule, tiling)
    return tile_outputs(rows, schedule, tiling, clusters(rows.kernel))


def row_walk_of(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> tuple[RowWalk, Tiling]:
    """The algorithm of a form as its programs walk it, and where the schedule puts its loops."""
    tiling = replace(place_indices(form, schedule), precision=precision)
    kernel = _laid_out(_with_arguments(form, extent_arguments(form, tiling)), form, strides)
    rows = RowWalk(kernel, 0)
    if form.row_index is not None:
        rows = own_rows(
            kernel,
            Load(input_of(kernel, form.row_index.buffer.name), form.row_index.subscripts),
            form.row_axis if form.unrolled else -1,
            permuted=form.permuted,
            divided=strides.split,
            tiled=form.stack is not None,
            rows=None if form.unrolled else build(form.bound).results[0].buffer.shape[form.row_axis],
        )
    return rows, tiling


def _with_arguments(form: Form, indices: frozenset[str]) -> Kernel:
    """The algorithm of a form with some of its known extents as arguments."""
    if not indices:
        return form.algorithm
    letters = names_of(form.bound.statement).indices
    static = tuple((name, extent) for name, extent in form.bound.static if letters[name] not in indices)
    return build(replace(form.bound, static=static))


# Arguments that belong to a tensor or an index of the statement.
_NAMED = ("tensor", "bitmasks", "dim", "stride", "extent")


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text and what it is called with.

    Attributes:
        text: the module's text; the function's name is `kernel`.
        arguments: its parameters, in order.
        grid: the number of programs.
        sizes: what the sizes in `grid` stand for.
        schedule: as it applies to this kernel.
        accumulator: dtype of its sums.
        finished: it stores the output itself; else sums, to which the initial value and the epilogue are yet to come.
        lanes: values of its largest tensor, where all tensors lie along one axis; 0: they do not.
    """

    text: str
    arguments: tuple[Argument, ...]
    grid: Expr
    sizes: Mapping[str, Argument]
    schedule: Schedule
    accumulator: torch.dtype
    finished: bool
    lanes: int = 0

    def to_json(self, bound: Bound) -> dict[str, Any]:
        """As JSON, in which tensors and indices go by their places among those of the statement."""
        layout = bound.layout

        def shown(argument: Argument) -> list[Any]:
            names = layout.indices if argument.kind == "extent" else layout.tensors
            has_place = argument.kind in _NAMED and argument.name in names
            return [argument.kind, names.index(argument.name) if has_place else argument.name, argument.axis]

        return {
            "text": self.text,
            "arguments": [*map(shown, self.arguments)],
            "grid": _shown(self.grid),
            "sizes": {name: shown(argument) for name, argument in self.sizes.items()},
            "schedule": self.schedule.to_json(),
            "finished": self.finished,
            "lanes": self.lanes,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any], bound: Bound) -> Source:
        """From what `to_json` made of it."""
        layout = bound.layout

        def argument(kind: str, name: int | str, axis: int) -> Argument:
            names = layout.indices if kind == "extent" else layout.tensors
            return Argument(kind, names[name] if isinstance(name, int) else name, axis)

        return Source(
            value["text"],
            tuple(argument(*each) for each in value["arguments"]),
            _expr(value["grid"]),
            {name: argument(*each) for name, each in value["sizes"].items()},
            Schedule.from_json(value["schedule"]),
            wide_dtype(bound.dtype),
            value["finished"],
            value["lanes"],
        )


SOURCE_SHAPE = {"text": str, "arguments": [(str, object, int)], "sizes": dict, "finished": bool, "lanes": int}


def _shown(expr: Expr) -> Any:
    """An expression of sizes as JSON."""
    if isinstance(expr, Const):
        return int(expr.value)
    if isinstance(expr, Size):
        return expr.name
    assert isinstance(expr, Op)
    return [expr.name, *map(_shown, expr.args)]


def _expr(value: Any) -> Expr:
    if isinstance(value, list):
        name, *args = value
        return Op(name, tuple(map(_expr, args)))
    return Size(value) if isinstance(value, str) else Const(value)


def write_kernel(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Source:
    """The kernel of a form under a schedule."""
    if form.row_index is not None or form.combine == "atomic" or not form.reduce:
        # Rows are divided by their partition; terms that meet in memory are not added up in parts.
        schedule = replace(schedule, splits=1)
    if form.additional:
        schedule = replace(schedule, groups=1)
    kernel = nest_of(form, schedule, strides, precision)
    verify_kernel(kernel, placed=True)
    printed = print_kernel(kernel, wide=strides.wide)
    parameters = arguments_of(form)
    arguments = tuple(parameters[name] for name in (*(b.name for b in printed.buffers), *printed.sizes))
    sizes = {node.name: parameters[node.name] for node in walk(printed.grid) if isinstance(node, Size)}
    # One program has all terms of what it stores.
    finished = form.combine != "atomic" and schedule.splits == 1
    schedule = replace(schedule, groups=parts_of(kernel))
    accumulator = wide_dtype(form.bound.dtype)
    return Source(printed.text, arguments, printed.grid, sizes, schedule, accumulator, finished, _lanes(kernel))


def _lanes(kernel: Kernel) -> int:
    """The values of the largest tensor of a placed kernel; 0 where its tensors have several axes."""
    tiles = [loop for loop in walk(kernel) if isinstance(loop, Loop) and loop.role == "tile"]
    return max(map(lanes_of, tiles), default=1) if len({loop.axis for loop in tiles}) <= 1 else 0


def arguments_of(form: Form) -> Mapping[str, Argument]:
    """What each name of a kernel's parameters stands for."""
    names = names_of(form.bound.statement)
    layout = form.bound.layout
    found = {names.indices[index]: Argument("extent", index) for index in layout.indices}
    for name, rank in zip(layout.tensors, layout.ranks, strict=True):
        canonical = names.tensors[name]
        found |= {canonical: Argument("tensor", name), f"{canonical}_bitmasks": Argument("bitmasks", name)}
        found |= {f"{canonical}_{axis}": Argument("dim", name, axis) for axis in range(rank)}
        found |= {f"{canonical}_step_{axis}": Argument("stride", name, axis) for axis in range(rank)}
    rank = len(layout.output_plain)
    found |= {f"{OUTPUT}_{axis}": Argument("dim", "@out", axis) for axis in range(rank)}
    found |= {f"{INITIAL}_step_{axis}": Argument("initial_stride", "", axis) for axis in range(rank)}
    found |= {f"{OUTPUT}{n}": Argument("additional", str(n - 1)) for n in range(1, len(form.additional) + 1)}
    found |= {OUTPUT: Argument("out"), INITIAL: Argument("initial")}
    kinds = ("rows", "begin", "end", "target", "row_of", "order", "workspace")
    return found | {kind: Argument(kind) for kind in kinds}


def _laid_out(kernel: Kernel, form: Form, strides: Strides) -> Kernel:
    """The kernel with the strides of tensors that are not contiguous."""
    names, layout = names_of(form.bound.statement), form.bound.layout
    plain = {names.tensors[name]: c for name, c in zip(layout.tensors, strides.contiguous, strict=True)}
    changed: dict[Node, Node] = {}
    for buffer in kernel.inputs:
        steps = None
        if buffer.name == INITIAL and strides.initial is not None:
            each = enumerate(strides.initial)
            steps = tuple(Const(int(step)) if step else Size(f"{INITIAL}_step_{axis}") for axis, step in each)
        elif not plain.get(buffer.name, True):
            steps = tuple(Size(f"{buffer.name}_step_{axis}") for axis in range(len(buffer.shape)))
        if steps is not None:
            changed[buffer] = Buffer(buffer.name, buffer.dtype, buffer.shape, buffer.facts, strides=steps)
    found = kernel.replace(changed) if changed else kernel
    assert isinstance(found, Kernel)
    return found
