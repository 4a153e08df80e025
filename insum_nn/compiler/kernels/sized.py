"""Kernels for the sizes of a call: a text for all sizes of a bucket, and what follows from those of one call.

A kernel's text is fixed by the statement, the extents compiled in, the memory layout and the schedule. So is how its
numbers and its grid follow from sizes, and what a call does on the host besides: one printed function of Python
(`UnsizedKernel.call`) allocates, computes the numbers, and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.ir.schedule import Precision, Schedule
from insum_nn.compiler.kernels.collection import block_of, collection_of
from insum_nn.compiler.kernels.launch import Launcher, OnDevice, launcher
from insum_nn.compiler.kernels.row_partition import RowPartition, bitmasks_of
from insum_nn.compiler.kernels.source import Numbers, Strides, initial_steps, write_kernel
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.printed import function_of_lines
from insum_nn.compiler.schedule.additional import memory_of
from insum_nn.compiler.schedule.coverage import coverage_of
from insum_nn.compiler.schedule.form import Form
from insum_nn.dtypes import dtype_of
from insum_nn.locks import cached_property

__all__ = ["WIDE", "UnsizedKernel", "reach_of", "reaches", "strides_of"]

# Elements from which some offset may need 64 bits.
WIDE = 2**31 - 2**16
# The tensors of a row partition that kernels read.
_RANGES = ("begin", "end", "target", "row_of", "order")


def strides_of(form: Form, tensors: Sequence[Tensor], extents: Extents, split: bool, initial: Tensor | None) -> Strides:
    """What of the memory layout a kernel's text depends on."""
    contiguous = tuple([tensor.is_contiguous() for tensor in tensors])
    wide = max(reaches(form, tensors, initial, extents)) >= WIDE
    return Strides(contiguous, wide, split, initial_steps(initial))


def reaches(form: Form, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> list[int]:
    """How far apart what a kernel addresses by one pointer may lie, for each of them; sizes may be symbolic."""
    places, names, indices = form.places, form.bound.layout.tensors, extents.indices
    further = [(each.steps[0], tensors[names.index(each.like[0])].shape[each.like[1]]) for each in form.additional]
    found = [math.prod(extents.output), math.prod([indices[places[x]] for x in form.entries])]
    return [*found, *map(reach_of, (*tensors, *([] if initial is None else [initial]))), *map(math.prod, further)]


def reach_of(tensor: Tensor) -> int:
    """Elements from the first to the last one of a tensor as it lies in memory."""
    return 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


class UnsizedKernel:
    """A kernel for all sizes of a bucket: its text, and how what it is called with follows from the sizes of a call.

    What a call does on the host is decided with the kernel, and printed as one Python function: `call`.

    Args:
        form: what it computes, with sizes by which choices are made.
        schedule: how.
        strides: how tensors lie in memory.
        precision: of float32 products in the matrix unit.

    Attributes:
        source: its text.
        numbers: its arguments.
        dtype: of the output.
        mode: how it combines the terms of a cell.
        fills: whether it writes every cell of the output.
        further: the memory of further outputs.
    """

    def __init__(self, form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> None:
        self.form, self.strides = form, strides
        self.source = source = form.plan.get(
            ("kernel", schedule, strides, precision), lambda: write_kernel(form, schedule, strides, precision)
        )
        self.numbers = Numbers(form.bound, source.arguments, source.grid, source.sizes)
        self.dtype, self.mode = form.bound.out_dtype, form.bound.statement.combining
        # Of an extremum, a part is a pair: that of its terms, and a flag.
        self._pair = () if self.mode.adds else (2,)
        self.further = memory_of(form, source.schedule)
        self.fills = coverage_of(form)
        self._ranges = [argument.kind for argument in source.arguments if argument.kind in _RANGES]
        # By what tells machine code apart: numbers of programs do not. Also those that add up divided rows.
        self._launches: dict[object, Launcher] = {}
        # Machine code for aligned pointers, by the same; `call` takes it from here.
        self._loaded: dict[object, OnDevice] = {}

    @cached_property
    def call(self) -> Callable[..., Tensor]:
        """What makes the output, `call(tensors, initial, indices, output, partition, additional, bitmasks, launch)`.

        Args of what it returns:
            tensors: in the layout's order, as they were when the kernel was made but for their sizes.
            initial: the initial value, which may be of the last axes alone.
            indices: the sizes of the call.
            output: the output's shape.
            partition: the row partition of the terms, where the form has one.
            additional: memory for further outputs.
            bitmasks: makes those of an index tensor.
            launch: launches the kernel on a list of arguments in the place of the one that is compiled here.
        """
        names = {
            "torch": torch,
            "bitmasks_of": bitmasks_of,
            # `torch.cuda.current_device` would first ask whether CUDA is initialised.
            "current": getattr(torch._C, "_cuda_getDevice", None),
            "stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "kernel": self,
            "loaded": self._loaded,
            "dtype": self.dtype,
        }
        return function_of_lines(self.host_code(), names, "call of a kernel")

    def host_code(self) -> list[str]:
        """The lines of `call`."""
        numbers, source, splits = self.numbers, self.source, self.source.schedule.splits > 1
        lines = [
            "def call(tensors, initial, indices, output, partition=None, additional=(), bitmasks=bitmasks_of, "
            "launch=None):",
            *numbers.given,
            "device = v0.device",
        ]
        tensors = {place: f"v{position}" for place, position in numbers.inputs}
        for place, kind, position in numbers.others:
            tensors[place] = {
                "out": "made",
                "initial": "initial",
                "workspace": "workspace",
                "bitmasks": f"bitmasks(v{position})",
                "additional": f"additional[{position}]",
            }.get(kind, f"partition.{kind}")
        # The output is what the kernel writes, without anything before or after it.
        covered = self.fills.text
        # torch takes less time for strides than for its defaults.
        steps = [f"o{axis}" for axis in range(1, len(self.form.bound.layout.output_places))]
        steps = [" * ".join(steps[axis:]) for axis in range(len(steps))]
        steps += ["1"] * bool(self.form.bound.layout.output_places)
        empty = f"torch.empty_strided(output, ({''.join(f'{step}, ' for step in steps)}), dtype=dtype, device=device)"
        # AOTAutograd shares strided memory among all launches of a graph, which are then preceded by copies of it.
        empty = f"{empty} if launch is None else torch.empty(output, dtype=dtype, device=device)"
        if splits or self.fills.never:
            lines += [f"whole, made = False, kernel.memory(initial, output, device, {covered})"]
        elif covered == "True":
            lines += [f"made = {empty}"]
        else:
            lines += [
                f"whole = {covered}",
                f"made = ({empty}) if whole else kernel.memory(initial, output, device, False)",
            ]
        workspace, adding = self._dividing(covered)
        lines += workspace
        if any(argument.kind == "rows" for argument in (*source.arguments, *source.sizes.values())):
            lines += ["rows = partition.rows"]
        lines += [*numbers.lines, f"grid = {numbers.grid}"]
        own = {place: text if text.isalnum() else f"t{place}" for place, text in tensors.items()}
        lines += [f"{own[place]} = {text}" for place, text in tensors.items() if own[place] != text]
        lines += self._launching(own)
        lines += adding
        if covered == "True" and not splits:
            return [*lines, "return made"]
        return [*lines, "return made if whole else kernel.finished(made, initial)"]

    def _dividing(self, covered: str) -> tuple[list[str], list[str]]:
        """Return the lines that make memory for the parts of divided rows, and those that combine these."""
        if not self.strides.split:
            return [], []
        axis, rank = self.form.row_axis, len(self.form.bound.layout.output_places)
        behind = [f"o{at}" for at in range(axis + 1, rank)]
        others = [f"o{at}" for at in range(axis)] + behind
        shape = "".join(f"{each}, " for each in (*self._pair, *others))
        made = f"{shape}), dtype={self.source.accumulator}, device=device)"
        cells, inner = " * ".join(others) or "1", " * ".join(behind) or "1"
        # The initial value is a term of each part of an extremum.
        alone = "initial is None" if self.mode.adds else "True"
        alone = alone if self.form.bound.epilogue.activation is None else "False"
        rows = f"partition.divided, partition.first, {cells}, {inner}, o{axis} * {inner}"
        return [f"workspace = (torch.empty if {covered} else torch.zeros)((partition.slots, {made}"], [
            f"if partition.slots and {alone}:",
            f"    kernel.collect(workspace, made, {rows})",
            "elif partition.slots:",
            "    kernel.add_divided(made, workspace, initial, partition, output)",
        ]

    def _launching(self, tensors: Mapping[int, str]) -> list[str]:
        """The lines that launch: on machine code for aligned pointers on the current device, where it is loaded."""
        numbers = self.numbers
        given = ", ".join(tensors.get(n, name) for n, name in enumerate(numbers.names))
        pointers = [f"p{n}" for n in tensors]
        tells = [f"not {numbers.names[place]} % 16" for place in numbers.vectors]
        tells += [f"partition.{kind}.dtype" for kind in self._ranges]
        # What is made here is where the statement's tensors are.
        first, *others = [text for text in tensors.values() if text == "initial" or text.startswith("v")]
        slow = ["code is None", f"({' | '.join(pointers)}) & 15", "current() != number"]
        slow += [f"{text}.get_device() != number" for text in others]
        return [
            "if launch is not None:",
            f"    launch([{given}], grid)",
            "elif grid:",
            f"    number = {first}.get_device()",
            *[f"    p{n} = {text}.data_ptr()" for n, text in tensors.items()],
            f"    key = ({', '.join(['number', *tells])},)",
            "    code = loaded.get(key)",
            f"    if {' or '.join(slow)}:",
            f"        kernel.launch([{given}], grid, device, key)",
            "    else:",
            "        begin, handle, metadata, rest, _ = code",
            "        begin(grid, 1, 1, stream(number), handle, metadata, None, None, None, "
            f"{', '.join(numbers.names)}, *rest)",
        ]

    def launch(self, arguments: list[Any], grid: int, device: torch.device, key: object) -> None:
        """Launch on arguments of which nothing is known; `key` is under what `call` looks for the machine code."""
        launch = self._launches.get(key)
        if launch is None:
            even = tuple([place for place in self.numbers.vectors if not arguments[place] % 16])
            launch = launcher(self.source, _types(arguments), even, device, self.strides.wide)
            self._launches[key] = launch
        launch(arguments, grid)
        loaded = launch.on_device()
        if loaded is not None:
            self._loaded[key] = loaded

    def further_launches(self, partition: RowPartition | None) -> int:
        """What a call launches in addition: for divided rows, the parts of one sum or extremum, and their dtype."""
        divided = partition is not None and partition.slots > 0
        split = self.source.schedule.splits > 1
        return divided + split * (1 if self.mode.adds else 3) + (split and self.source.accumulator != self.dtype)

    def additional(self, tensors: Sequence[Tensor], partition: RowPartition | None) -> list[Tensor]:
        """Memory for further outputs: empty where every cell is written, once."""
        whole = partition is not None and partition.whole
        made: list[Tensor] = []
        for each in self.further:
            make = torch.zeros if each.zero or not whole else torch.empty
            shape = (tensors[each.place].shape[each.axis], *each.shape)
            made.append(make(shape, dtype=self.dtype, device=tensors[0].device))
        return made

    def collect(
        self, workspace: Tensor, output: Tensor, rows: Tensor, first: Tensor, cells: int, inner: int, step: int
    ) -> None:
        """Combine the parts of divided rows, and write the sums or extrema to their rows.

        Args:
            workspace: the parts.
            output: what is written.
            rows: the rows.
            first: the slot of the first part of each, and the number of slots.
            cells: of a row.
            inner: cells of the output's axes behind its rows.
            step: cells of the output from one index of the axes before its rows to the next.
        """
        count, block = rows.shape[0], block_of(cells)
        if count and cells:
            arguments = [workspace, output, rows, first, cells, inner, step]
            key = (block, output.dtype, output.device)
            launch = self._launches.get(key)
            if launch is None:
                source = collection_of(cells, workspace.dtype, self.mode)
                launch = launcher(source, _types(arguments), (), output.device, self.strides.wide)
                self._launches[key] = launch
            launch(arguments, count * -(-cells // block))

    def add_divided(
        self, made: Tensor, workspace: Tensor, initial: Tensor | None, partition: RowPartition, output: tuple[int, ...]
    ) -> None:
        """Combine the parts of divided rows, and write what they make to the rows, with what is done to it then."""
        rows, first, form = partition.divided, partition.first, self.form
        assert rows is not None
        assert first is not None
        axis, device = form.row_axis, workspace.device
        shape = workspace.shape[1 + len(self._pair) :]
        sums = torch.empty((rows.shape[0], *shape), dtype=workspace.dtype, device=device)
        cells = math.prod(shape)
        self.collect(workspace, sums, torch.arange(rows.shape[0], device=device), first, cells, cells, 0)
        if initial is not None and self.mode.adds:
            sums = sums + initial.expand(output).movedim(axis, 0).index_select(0, rows)
        sums = form.bound.epilogue.activated(sums)
        made.movedim(axis, 0).index_copy_(0, rows, sums.to(made.dtype))

    def memory(self, initial: Tensor | None, output: tuple[int, ...], device: torch.device, covered: bool) -> Tensor:
        """What the kernel writes to, where that is not the output alone.

        Sums that several programs add up in memory are of the wide dtype.
        """
        source, dtype = self.source, self.dtype
        if source.schedule.splits > 1:
            shape = (source.schedule.splits, *self._pair, *output)
            return (torch.empty if covered else torch.zeros)(shape, dtype=source.accumulator, device=device)
        dtype = dtype if source.finished else source.accumulator
        if initial is None:
            return torch.zeros(output, dtype=dtype, device=device)
        if source.finished:
            # Cells that the kernel does not write.
            initial = self.form.bound.epilogue.activated(initial)
        return initial.expand(output).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def finished(self, made: Tensor, initial: Tensor | None) -> Tensor:
        """The output, from what the kernel wrote to `memory`."""
        if self.source.schedule.splits > 1 and self.mode.adds:
            made = made.sum(0) if initial is None else made.sum(0).add_(initial)
        elif self.source.schedule.splits > 1:
            made, flag = self.mode.reduce(made, 0)
            made = made.where(flag != 0, 0.0)
        if not self.source.finished:
            made = self.form.bound.epilogue.activated(made)
        return made if made.dtype == self.dtype else made.to(self.dtype)


def _types(arguments: Sequence[Any]) -> list[str | None]:
    """Triton's types of the pointers; `None` for numbers."""
    return [dtype_of(each.dtype).pointer if isinstance(each, Tensor) else None for each in arguments]
