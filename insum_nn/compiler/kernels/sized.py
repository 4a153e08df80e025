"""Kernels for the sizes of a call: a text for all sizes of a bucket, and what follows from those of one call.

A kernel's text is fixed by the statement, the extents compiled in, the memory layout and the schedule. So is how its
numbers and its grid follow from sizes (`UnsizedKernel`). At new sizes they are only computed, and kept (`Kernel`), so
that a further call of these sizes only passes pointers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.forms.additional import memory_of
from insum_nn.compiler.forms.coverage import Coverage
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.nest import Source, write_kernel
from insum_nn.compiler.forms.parameters import Launcher, Numbers, Strides, initial_steps
from insum_nn.compiler.ir.nodes import Const
from insum_nn.compiler.kernels.collection import block_of, write_collection
from insum_nn.compiler.kernels.launch import launcher
from insum_nn.compiler.kernels.row_partition import RowPartition, words_of
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.schedule.space import Precision, Schedule
from insum_nn.dtypes import dtype_of

__all__ = ["WIDE", "Kernel", "UnsizedKernel", "prepare_kernel", "strides_of", "types_of"]

# Elements from which some offset may need 64 bits.
WIDE = 2**31 - 2**16
# The tensors of a row partition that kernels read.
_RANGES = ("begin", "end", "target", "owner", "order")


def strides_of(form: Form, tensors: Sequence[Tensor], extents: Extents, split: bool, start: Tensor | None) -> Strides:
    """What of the memory layout a kernel's text depends on."""
    contiguous = tuple([tensor.is_contiguous() for tensor in tensors])
    places, indices = form.places, extents.indices
    reach = max(math.prod(extents.output), math.prod([indices[places[x]] for x in form.entries]))
    for tensor, dense in zip(tensors, contiguous, strict=True):
        reach = max(reach, tensor.numel() if dense else _reach(tensor))
    if start is not None:
        reach = max(reach, _reach(start))
    if form.additional:
        names = form.bound.layout.tensors
        for each in form.additional:
            reach = max(reach, each.steps[0] * tensors[names.index(each.like[0])].shape[each.like[1]])
    return Strides(contiguous, reach >= WIDE, split, initial_steps(start))


def _reach(tensor: Tensor) -> int:
    return 1 + sum((extent - 1) * abs(step) for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(slots=True)
class Kernel:
    """A kernel with everything that shapes decide: call it with the tensors.

    Attributes:
        of: the kernel for all sizes.
        extents: the sizes it was prepared for.
        arguments: its arguments, with numbers filled in and tensors missing.
        grid: how many programs it has.
        launch: runs them on a list of arguments; `None`: there is nothing to run.
        empty: it writes every cell of the output.
    """

    of: UnsizedKernel
    extents: Extents
    arguments: list[Any]
    grid: int
    launch: Launcher | None
    empty: bool

    @property
    def source(self) -> Source:
        """Its text."""
        return self.of.source

    def __call__(
        self,
        tensors: Sequence[Tensor],
        start: Tensor | None,
        partition: RowPartition | None,
        additional: Sequence[Tensor] = (),
        words: Callable[[Tensor], Tensor] = words_of,
    ) -> Tensor:
        """The statement's output; further ones are written to `additional`, and `words` makes those of an index."""
        of = self.of
        device = tensors[0].device
        empty_rows = partition is not None and partition.empty_rows
        # The output is what the kernel writes, without anything before or after it.
        simple = self.empty and of.whole
        if simple and not empty_rows:
            output = torch.empty(self.extents.output, dtype=of.dtype, device=device)
        else:
            output = self._output(start, device, empty_rows)
        scratch = None if partition is None or partition.target is None else self._scratch(partition, device)
        arguments = self.arguments.copy()
        for place, position in of.numbers.inputs:
            arguments[place] = tensors[position]
        for place, kind, position in of.numbers.others:
            if kind == "out":
                arguments[place] = output
            elif kind == "words":
                arguments[place] = words(tensors[position])
            elif kind == "start":
                arguments[place] = start
            elif kind == "scratch":
                arguments[place] = scratch
            elif kind == "additional":
                arguments[place] = additional[position]
            else:
                arguments[place] = getattr(partition, kind)
        if self.launch is not None:
            self.launch(arguments, self.grid)
        if scratch is not None and partition is not None and partition.slots:
            self._add_divided(output, scratch, start, partition)
        if simple:
            return output
        if of.source.schedule.splits > 1:
            output = output.sum(0) if start is None else output.sum(0).add_(start)
        if not of.source.finished:
            output = of.form.bound.epilogue.activated(output)
        return output if output.dtype == of.dtype else output.to(of.dtype)

    def _scratch(self, partition: RowPartition, device: torch.device) -> Tensor:
        """Memory for the parts of divided rows."""
        shape, axis = self.extents.output, self.of.form.owner_axis
        lengths = (partition.slots, *shape[:axis], *shape[axis + 1 :])
        return (torch.empty if self.empty else torch.zeros)(lengths, dtype=self.of.source.accumulator, device=device)

    def further_launches(self, partition: RowPartition | None) -> int:
        """What a call launches in addition: sums of divided rows and of the parts of one sum, and their dtype."""
        divided = partition is not None and partition.slots > 0
        split = self.source.schedule.splits > 1
        return divided + split + (split and self.source.accumulator != self.of.dtype)

    def additional(self, tensors: Sequence[Tensor], partition: RowPartition | None) -> list[Tensor]:
        """Memory for further outputs: empty where every cell is written, once."""
        whole = partition is not None and partition.whole
        made: list[Tensor] = []
        for each in self.of.further:
            make = torch.zeros if each.zero or not whole else torch.empty
            shape = (tensors[each.place].shape[each.axis], *each.shape)
            made.append(make(shape, dtype=self.of.dtype, device=tensors[0].device))
        return made

    def _add_divided(self, output: Tensor, scratch: Tensor, start: Tensor | None, partition: RowPartition) -> None:
        rows, form, collector = partition.divided, self.of.form, self.of.collector
        assert rows is not None
        assert collector is not None
        shape, axis = self.extents.output, form.owner_axis
        if start is None and form.bound.epilogue.activation is None:
            collector(scratch, output, rows, partition, math.prod(shape[axis + 1 :]))
            return
        sums = torch.empty((rows.shape[0], *scratch.shape[1:]), dtype=scratch.dtype, device=scratch.device)
        collector(scratch, sums, None, partition, 0)
        if start is not None:
            sums = sums + start.movedim(axis, 0).index_select(0, rows)
        sums = form.bound.epilogue.activated(sums)
        output.movedim(axis, 0).index_copy_(0, rows, sums.to(output.dtype))

    def _output(self, start: Tensor | None, device: torch.device, empty_rows: bool) -> Tensor:
        """What the kernel writes to; sums that several programs add up in memory are of the wide dtype."""
        source, dtype, shape = self.of.source, self.of.dtype, self.extents.output
        if source.schedule.splits > 1:
            shape = (source.schedule.splits, *shape)
            return (torch.empty if self.empty else torch.zeros)(shape, dtype=source.accumulator, device=device)
        if self.empty and not empty_rows:
            return torch.empty(shape, dtype=dtype, device=device)
        dtype = dtype if source.finished else source.accumulator
        if start is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        if source.finished:
            # Cells that the kernel does not write.
            start = self.of.form.bound.epilogue.activated(start)
        return start.to(dtype, copy=True, memory_format=torch.contiguous_format)


class UnsizedKernel:
    """A kernel for all sizes of a bucket: its text, and how what it is called with follows from the sizes of a call.

    Args:
        form: what it computes, with sizes by which choices are made.
        schedule: how.
        strides: how tensors lie in memory.
        precision: of float32 products in the matrix unit.

    Attributes:
        source: its text.
        numbers: its arguments.
        dtype: of the output.
        fills: whether it writes every cell of the output.
        whole: the output is what the kernel writes, where it writes every cell.
        collector: adds up divided rows, where some are.
        further: the memory of further outputs.
    """

    def __init__(self, form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> None:
        self.form, self.wide = form, strides.wide
        self.source = source = write_kernel(form, schedule, strides, precision)
        self.numbers = Numbers(form.bound, source.arguments, source.grid, source.sizes)
        self.dtype = form.bound.out_dtype
        self.whole = source.schedule.splits == 1
        self.further = memory_of(form, source.schedule)
        self.fills = Coverage(form)
        self.collector = _Collector(source.accumulator, strides.wide) if strides.split else None
        self._ranges = [argument.kind for argument in source.arguments if argument.kind in _RANGES]
        # By what tells machine code apart: numbers of programs do not.
        self._launches: dict[object, Launcher] = {}

    def sized(
        self, tensors: Sequence[Tensor], start: Tensor | None, extents: Extents, partition: RowPartition | None
    ) -> Kernel:
        """The kernel for tensors of these shapes."""
        rows = None if partition is None else partition.rows
        arguments, grid = self.numbers.of(tensors, start, extents, rows)
        launch = self._launch(tensors, partition, arguments) if grid else None
        return Kernel(self, extents, arguments, grid, launch, self.fills(extents))

    def _launch(self, tensors: Sequence[Tensor], partition: RowPartition | None, arguments: Sequence[Any]) -> Launcher:
        even, device = self.numbers.even(arguments), tensors[0].device
        key = (even, device, *[getattr(partition, kind).dtype for kind in self._ranges])
        launch = self._launches.get(key)
        if launch is None:
            types = types_of(self.form, self.source, tensors, partition)
            launch = self._launches[key] = launcher(self.source, types, even, device, self.wide)
        return launch


def prepare_kernel(
    form: Form,
    schedule: Schedule,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    extents: Extents,
    precision: Precision,
    partition: RowPartition | None,
) -> Kernel:
    """The kernel of a form for tensors of these shapes.

    Args:
        form: what to compute.
        schedule: how.
        tensors: in the layout's order.
        start: the starting value.
        extents: the call's sizes.
        precision: of float32 products in the matrix unit.
        partition: the row partition of the terms, where the form has an owner.
    """
    strides = strides_of(form, tensors, extents, partition is not None and partition.split, start)
    return UnsizedKernel(form, schedule, strides, precision).sized(tensors, start, extents, partition)


def types_of(form: Form, source: Source, tensors: Sequence[Tensor], partition: RowPartition | None) -> list[str | None]:
    """Triton's types of the pointers; `None` for numbers."""
    names = form.bound.layout.tensors
    found: list[str | None] = []
    for argument in source.arguments:
        if argument.kind == "tensor":
            dtype = tensors[names.index(argument.name)].dtype
        elif argument.kind in ("out", "start", "scratch", "additional"):
            wide = argument.kind == "scratch" or (argument.kind == "out" and not source.finished)
            own = form.bound.dtype if argument.kind == "start" else form.bound.out_dtype
            dtype = source.accumulator if wide else own
        elif argument.kind == "words":
            dtype = torch.int32
        elif argument.kind in _RANGES:
            dtype = getattr(partition, argument.kind).dtype
        else:
            found.append(None)
            continue
        found.append(dtype_of(dtype).pointer)
    return found


class _Collector:
    """Adds up the parts of divided rows, left in scratch memory, and writes the sums to their rows.

    Args:
        accumulator: dtype of the parts.
        wide: some offset needs 64 bits.
    """

    def __init__(self, accumulator: torch.dtype, wide: bool) -> None:
        self.accumulator, self.wide = accumulator, wide
        self.known: dict[object, Launcher] = {}

    def __call__(
        self, scratch: Tensor, output: Tensor, rows: Tensor | None, partition: RowPartition, inner: int
    ) -> None:
        """Write the sums to their rows of the output.

        Args:
            scratch: the parts.
            output: what is written.
            rows: the rows; `None`: as many as there are, side by side.
            partition: the division of rows.
            inner: cells of the output's axes behind its rows.
        """
        first = partition.first
        assert first is not None
        count = first.shape[0] - 1
        cells = math.prod(scratch.shape[1:])
        step = output.numel() // max(1, cells) * inner
        if rows is None:
            rows, inner, step = torch.arange(count, device=scratch.device), cells, 0
        if count and cells:
            block = block_of(cells)
            launch = self._launch(cells, block, output)
            launch([scratch, output, rows, first, cells, inner, step], count * -(-cells // block))

    def source(self, cells: int) -> Source:
        """The kernel for rows of so many cells."""
        text = write_collection(cells, self.accumulator)
        return Source(text, (), Const(0), {}, Schedule(warps=2), self.accumulator, True)

    def _launch(self, cells: int, block: int, output: Tensor) -> Launcher:
        key = (block, output.dtype, output.device)
        launch = self.known.get(key)
        if launch is None:
            pointers = (dtype_of(self.accumulator).pointer, dtype_of(output.dtype).pointer, "*i64", "*i64")
            types = (*pointers, None, None, None)
            launch = self.known[key] = launcher(self.source(cells), types, (), output.device, self.wide)
        return launch
