"""Write the kernel of a form under a schedule, and say what it is called with: parameters, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.codegen.triton import print_kernel
from insum_nn.compiler.codegen.triton_values import lanes_of
from insum_nn.compiler.ir.build import INITIAL, OUTPUT, build
from insum_nn.compiler.ir.canonical import names_of
from insum_nn.compiler.ir.nodes import OPERATIONS, Buffer, Const, Expr, Kernel, Load, Loop, Node, Op, Size, walk
from insum_nn.compiler.ir.schedule import Precision, Schedule
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.passes import pipeline
from insum_nn.compiler.passes.own_rows import own_rows
from insum_nn.compiler.passes.tile import parts_of
from insum_nn.compiler.schedule.form import Form, input_of
from insum_nn.compiler.schedule.placement import extent_arguments, place_indices
from insum_nn.dtypes import wide_dtype

__all__ = ["Argument", "Numbers", "Source", "Strides", "arguments_of", "initial_steps", "nest_of", "write_kernel"]


class Argument(NamedTuple):
    """A kernel's parameter: `kind` (`stride`, `extent`, ..), and the place of the tensor or index that it is of."""

    kind: str
    place: int = -1
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Strides:
    """How tensors lie in memory, as far as a kernel's text depends on it.

    Attributes:
        contiguous: for each tensor of the layout.
        wide: some offset needs 64 bits.
        split: rows are divided among programs.
        initial: how the initial value is addressed; see `initial_steps`.
    """

    contiguous: tuple[bool, ...]
    wide: bool = False
    split: bool = False
    initial: tuple[str, ...] | None = None


def initial_steps(initial: Tensor | None) -> tuple[str, ...] | None:
    """How an initial value is addressed: `None` as the output, else per axis a known step, or "" for an argument."""
    if initial is None:
        return None
    # An expanded axis says so itself; whether all is contiguous, extents without a value do not tell.
    expanded = any(type(step) is int and step == 0 for step in initial.stride())
    if not expanded and initial.is_contiguous():
        return None
    return tuple(_step(extent, step) for extent, step in zip(initial.shape, initial.stride(), strict=True))


def _step(extent: int, step: int) -> str:
    return "0" if step == 0 else "1" if step == 1 else "0" if extent == 1 else ""


class Numbers:
    """How the integer parameters of a kernel, and the number of its programs, follow from the sizes of a call.

    Printed as lines of Python, which read `initial` and `rows`, the initial value and programs' ranges of rows, and
    what `given` names: the tensors in the layout's order, and the sizes of the call. Sizes may be symbolic, and then
    what is made of them stays so.

    Args:
        bound: the statement.
        arguments: the kernel's parameters.
        grid: the number of its programs, of sizes in braces.
        sizes: what these stand for.

    Attributes:
        inputs: the tensors among the parameters: their places, and their positions among the statement's.
        others: the other pointers: place, kind, and the position of a tensor or of a further output.
        given: lines that name what a call is given: tensors v0, .., sizes x0, .. and o0, ..
        lines: one for each integer parameter, and each size of the grid, that has no such name: `n` and its place.
        grid: the number of programs, an expression of these names.
        vectors: the places of steps along an axis, and of lengths of rows: multiples of 16 are read as vectors.
        names: of all parameters in order, `p` and the place for pointers.
    """

    def __init__(self, bound: Bound, arguments: Sequence[Argument], grid: str, sizes: Mapping[str, Argument]) -> None:
        layout = bound.layout
        inputs: list[tuple[int, int]] = []
        others: list[tuple[int, str, int]] = []
        lines: list[str] = []
        # Steps along an axis, or lengths of rows: where they are whole vectors, rows are read as vectors.
        columns = {*layout.output_plain[-1:], *dict(bound.static)}
        vectors: list[int] = []
        named: dict[int, str] = {}
        # Sizes of the grid stand behind the parameters.
        for place, (kind, of, axis) in enumerate((*arguments, *sizes.values())):
            if kind == "tensor":
                inputs.append((place, of))
                continue
            value = {
                "extent": f"x{of}",
                "stride": f"v{of}.stride({axis})",
                # It may be of the last axes alone.
                "initial_stride": f"initial.stride({axis - len(layout.output_places)})",
                "out_dim": f"o{axis}",
                "dim": f"v{of}.shape[{axis}]",
                "rows": "rows",
            }.get(kind)
            if value is None:
                others.append((place, kind, of))
                continue
            along = kind in ("stride", "initial_stride", "out_dim") or (kind == "dim" and axis > 0)
            along = along or (kind == "extent" and layout.indices[of] in columns)
            named[place] = value
            if not value.isalnum():
                named[place] = f"n{place}"
                lines.append(f"n{place} = {value}")
            if along and place < len(arguments):
                vectors.append(place)
        self.inputs, self.others, self.vectors = tuple(inputs), tuple(others), tuple(vectors)
        self.names = tuple(named.get(place, f"p{place}") for place in range(len(arguments)))
        self.lines = tuple(lines)
        self.grid = grid.format(**{name: named[place] for place, name in enumerate(sizes, len(arguments))})
        given = {"tensors": layout.tensors, "indices": layout.indices, "output": layout.output_places}
        letters = {"tensors": "v", "indices": "x", "output": "o"}
        texts = {name: "".join(f"{letters[name]}{n}, " for n in range(len(each))) for name, each in given.items()}
        self.given = tuple(f"({text}) = {name}" for name, text in texts.items() if text)


# Where Python says it otherwise than kernels.
_PYTHON = {"cdiv": "(-(-{} // {}))", "and": "({} and {})"}


def _printed(expr: Expr) -> str:
    """An expression of sizes in Python, with their names in braces."""
    if isinstance(expr, Const):
        return str(int(expr.value))
    if isinstance(expr, Size):
        return f"{{{expr.name}}}"
    assert isinstance(expr, Op)
    return _PYTHON.get(expr.name, OPERATIONS[expr.name].text).format(*map(_printed, expr.args))


def nest_of(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Kernel:
    """The placed kernel of a form under a schedule."""
    tiling = replace(place_indices(form, schedule), precision=precision)
    kernel = _laid_out(_with_arguments(form, extent_arguments(form, tiling)), form, strides)
    own = None
    if form.row_index is not None:
        read = Load(input_of(kernel, form.row_index.buffer.name), form.row_index.subscripts)
        count = None if form.unrolled else build(form.bound).results[0].buffer.shape[form.row_axis]
        own = partial(
            own_rows,
            row_index=read,
            axis=form.row_axis if form.unrolled else -1,
            permuted=form.permuted,
            divided=strides.split,
            tiled=form.stack is not None,
            rows=count,
        )
    return pipeline.place(kernel, own, schedule, tiling, several=bool(form.additional))


def _with_arguments(form: Form, indices: frozenset[str]) -> Kernel:
    """The algorithm of a form with some of its known extents as arguments."""
    if not indices:
        return form.algorithm
    letters = names_of(form.bound.statement).indices
    static = tuple((name, extent) for name, extent in form.bound.static if letters[name] not in indices)
    return build(replace(form.bound, static=static))


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text and what it is called with.

    Attributes:
        text: the module's text; the function's name is `kernel`.
        arguments: its parameters, in order.
        grid: the number of programs, as Python, with sizes in braces.
        sizes: what these stand for.
        schedule: as it applies to this kernel.
        accumulator: dtype of its sums.
        finished: it stores the output itself; else sums, to which the initial value and the epilogue are yet to come.
        lanes: values of its largest tensor, where all tensors lie along one axis; 0: they do not.
    """

    text: str
    arguments: tuple[Argument, ...]
    grid: str
    sizes: Mapping[str, Argument]
    schedule: Schedule
    accumulator: torch.dtype
    finished: bool
    lanes: int = 0


def write_kernel(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Source:
    """The kernel of a form under a schedule."""
    if form.row_index is not None or form.strategy == "atomic" or not form.reduce:
        # Rows are divided by their partition; terms that meet in memory are not added up in parts.
        schedule = replace(schedule, splits=1)
    if form.additional:
        schedule = replace(schedule, groups=1)
    kernel = nest_of(form, schedule, strides, precision)
    printed = print_kernel(kernel, wide=strides.wide)
    parameters = arguments_of(form)
    arguments = tuple(parameters[name] for name in (*(b.name for b in printed.buffers), *printed.sizes))
    sizes = {node.name: parameters[node.name] for node in walk(printed.grid) if isinstance(node, Size)}
    # One program has all terms of what it stores.
    finished = form.strategy != "atomic" and schedule.splits == 1
    schedule = replace(schedule, groups=parts_of(kernel))
    accumulator = wide_dtype(form.bound.dtype)
    grid, lanes = _printed(printed.grid), _lanes(kernel)
    return Source(printed.text, arguments, grid, sizes, schedule, accumulator, finished, lanes)


def _lanes(kernel: Kernel) -> int:
    """The values of the largest tensor of a placed kernel; 0 where its tensors have several axes."""
    tiles = [loop for loop in walk(kernel) if isinstance(loop, Loop) and loop.role == "tile"]
    return max(map(lanes_of, tiles), default=1) if len({loop.axis for loop in tiles}) <= 1 else 0


def arguments_of(form: Form) -> Mapping[str, Argument]:
    """What each name of a kernel's parameters stands for."""
    names, layout = names_of(form.bound.statement), form.bound.layout
    found = {names.indices[index]: Argument("extent", place) for place, index in enumerate(layout.indices)}
    for place, (name, rank) in enumerate(zip(layout.tensors, layout.ranks, strict=True)):
        own = names.tensors[name]
        found |= {own: Argument("tensor", place), f"{own}_bitmasks": Argument("bitmasks", place)}
        found |= {f"{own}_{axis}": Argument("dim", place, axis) for axis in range(rank)}
        found |= {f"{own}_step_{axis}": Argument("stride", place, axis) for axis in range(rank)}
    rank = len(layout.output_plain)
    found |= {f"{OUTPUT}_{axis}": Argument("out_dim", axis=axis) for axis in range(rank)}
    found |= {f"{INITIAL}_step_{axis}": Argument("initial_stride", axis=axis) for axis in range(rank)}
    found |= {f"{OUTPUT}{n + 1}": Argument("additional", n) for n in range(len(form.additional))}
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
    return kernel.replace(changed) if changed else kernel
