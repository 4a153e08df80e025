"""Generated kernels made callable: compiled by Triton, their arguments filled in, launched.

A kernel's text is fixed by the statement, the extents compiled in, the memory layout and the schedule. What is left to
decide for one set of shapes (numbers passed, the grid) is decided once, so that a call only passes pointers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.forms import background
from insum_nn.compiler.forms.additional import Memory, memory_of
from insum_nn.compiler.forms.ahead import Collection, collecting, target_of
from insum_nn.compiler.forms.collection import write_collection
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.machine_code import KernelCode, Target, compile_code, drop_module, make_module
from insum_nn.compiler.forms.nest import Source, write_kernel
from insum_nn.compiler.forms.parameters import Launcher, Numbers, Strides, initial_steps, place_arguments, vector_steps
from insum_nn.compiler.ir.nodes import Const
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.runtime.row_partition import RowPartition, words_of
from insum_nn.compiler.schedule.build_once import BuildOnce
from insum_nn.compiler.schedule.space import Precision, Schedule
from insum_nn.dtypes import dtype_of
from insum_nn.errors import InsumDeviceError

__all__ = [
    "Kernel",
    "available",
    "function_of",
    "interpreted",
    "prepare_kernel",
    "strides_of",
    "version",
]

_WIDE = 2**31 - 2**16


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def version() -> str:
    """Triton's version; empty where it is not installed."""
    if not available():
        return ""
    import triton

    return str(triton.__version__)


def strides_of(form: Form, tensors: Sequence[Tensor], extents: Extents, split: bool, start: Tensor | None) -> Strides:
    """What of the memory layout a kernel's text depends on."""
    output = math.prod(extents.output)
    entries = form.terms_of_all
    names = form.bound.layout.tensors
    further = [each.steps[0] * tensors[names.index(each.like[0])].shape[each.like[1]] for each in form.additional]
    reach = max([output, entries, *further, *(_reach(t) for t in (*tensors, start) if t is not None)])
    return Strides(tuple(t.is_contiguous() for t in tensors), reach >= _WIDE, split, initial_steps(start))


def _reach(tensor: Tensor) -> int:
    return 1 + sum((extent - 1) * abs(step) for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


# Text to callable.

# Functions live as long as the kernels made of them: tuning makes dozens of which one is kept.
_functions: MutableMapping[str, Any] = weakref.WeakValueDictionary()
_lock = threading.RLock()
_MODULE = "insum_nn_kernel_"
# Triton compiles for seconds: who needs another kernel does not wait.
_loading: BuildOnce[Callable[..., None]] = BuildOnce()


def _jit(source: Source) -> Any:
    """The kernel's function, from its text; the text can be shown in tracebacks."""
    # Triton makes another kind of function for its interpreter.
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:16] + ("_interpreted" if interpreted() else "")
    with _lock:
        function = _functions.get(digest)
        if function is None:
            name = f"{_MODULE}{digest}"
            module = make_module(name, source.text)
            # The module is found by its name, and must not hold what decides how long it stays.
            function = _functions[digest] = module.__dict__.pop("kernel")
            weakref.finalize(function, _forget, module).atexit = False
            # Triton keeps all functions, by name, for a way of loading kernels that is not used here.
            known = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
            for each in ("kernel", *module.__dict__):
                known.pop(f"{name}:{each}", None)
        return function


def function_of(source: Source) -> Any:
    """Triton's function of a kernel's text."""
    return _jit(source)


def _forget(module: ModuleType) -> None:
    """Drop the module of a function that is gone."""
    with _lock:
        drop_module(module)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with everything that shapes decide: call it with the tensors.

    Attributes:
        form: what it computes.
        source: its text.
        extents: the sizes it was prepared for.
        inputs: the tensors among its arguments: their places, and their positions among the statement's.
        others: its other pointers: place, kind, and the position of a tensor or of a further output.
        arguments: its arguments, with numbers filled in and tensors missing.
        launch: runs it on a list of arguments; `None`: there is nothing to run.
        empty: it writes every cell of the output.
        simple: the output is what the kernel writes, without anything before or after it.
        dtype: of the output.
        collector: adds up divided rows, where some are.
        further: the memory of further outputs.
    """

    form: Form
    source: Source
    extents: Extents
    inputs: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, str, int], ...]
    arguments: tuple[Any, ...]
    launch: Launcher | None
    empty: bool
    simple: bool
    dtype: torch.dtype
    collector: _Collector | None
    further: tuple[Memory, ...]

    def __call__(
        self,
        tensors: Sequence[Tensor],
        start: Tensor | None,
        partition: RowPartition | None,
        additional: Sequence[Tensor] = (),
    ) -> Tensor:
        """The statement's output; further ones are written to `additional`."""
        form = self.form
        device = tensors[0].device
        empty_rows = partition is not None and partition.empty_rows
        if self.simple and not empty_rows:
            output = torch.empty(self.extents.output, dtype=self.dtype, device=device)
        else:
            output = self._output(start, device, empty_rows)
        scratch = None
        if partition is not None and partition.split:
            shape, axis = self.extents.output, form.owner_axis
            lengths = (partition.slots, *shape[:axis], *shape[axis + 1 :])
            make = torch.empty if self.empty else torch.zeros
            scratch = make(lengths, dtype=self.source.accumulator, device=output.device)
        arguments = list(self.arguments)
        for place, position in self.inputs:
            arguments[place] = tensors[position]
        for place, kind, position in self.others:
            if kind == "out":
                arguments[place] = output
            elif kind == "start":
                arguments[place] = start
            elif kind == "scratch":
                arguments[place] = scratch
            elif kind == "additional":
                arguments[place] = additional[position]
            elif kind == "words":
                arguments[place] = words_of(tensors[position])
            else:
                arguments[place] = getattr(partition, kind)
        if self.launch is not None:
            self.launch(arguments)
        if scratch is not None and partition is not None and partition.slots:
            self._add_divided(output, scratch, start, partition)
        if self.simple:
            return output
        if self.source.schedule.splits > 1:
            output = output.sum(0) if start is None else output.sum(0).add_(start)
        if not self.source.finished:
            output = form.bound.epilogue.activated(output)
        return output if output.dtype == self.dtype else output.to(self.dtype)

    def further_launches(self, partition: RowPartition | None) -> int:
        """What a call launches in addition: sums of divided rows and of the parts of one sum, and their dtype."""
        divided = partition is not None and partition.slots > 0
        split = self.source.schedule.splits > 1
        return divided + split + (split and self.source.accumulator != self.dtype)

    def additional(self, tensors: Sequence[Tensor], partition: RowPartition | None) -> list[Tensor]:
        """Memory for further outputs: empty where every cell is written, once."""
        whole = partition is not None and partition.whole
        made: list[Tensor] = []
        for each in self.further:
            make = torch.zeros if each.zero or not whole else torch.empty
            made.append(
                make((tensors[each.place].shape[each.axis], *each.shape), dtype=self.dtype, device=tensors[0].device)
            )
        return made

    def _add_divided(self, output: Tensor, scratch: Tensor, start: Tensor | None, partition: RowPartition) -> None:
        rows, collector = partition.divided, self.collector
        assert rows is not None
        assert collector is not None
        if start is None and self.form.bound.epilogue.activation is None:
            collector(scratch, output, rows, partition)
            return
        axis = self.form.owner_axis
        sums = torch.empty((rows.shape[0], *scratch.shape[1:]), dtype=scratch.dtype, device=scratch.device)
        collector(scratch, sums, None, partition)
        if start is not None:
            sums = sums + start.movedim(axis, 0).index_select(0, rows)
        sums = self.form.bound.epilogue.activated(sums)
        output.movedim(axis, 0).index_copy_(0, rows, sums.to(output.dtype))

    def _output(self, start: Tensor | None, device: torch.device, empty_rows: bool) -> Tensor:
        """What the kernel writes to; sums that several programs add up in memory are of the wide dtype."""
        form, shape = self.form, self.extents.output
        if self.source.schedule.splits > 1:
            shape = (self.source.schedule.splits, *shape)
            return (torch.empty if self.empty else torch.zeros)(shape, dtype=self.source.accumulator, device=device)
        if self.empty and not empty_rows:
            return torch.empty(shape, dtype=self.dtype, device=device)
        dtype = self.dtype if self.source.finished else self.source.accumulator
        if start is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        if self.source.finished:
            # Cells that the kernel does not write.
            start = form.bound.epilogue.activated(start)
        return start.to(dtype, copy=True, memory_format=torch.contiguous_format)


def prepare_kernel(
    form: Form,
    schedule: Schedule,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    extents: Extents,
    precision: Precision,
    partition: RowPartition | None,
    like: Kernel | None = None,
    strides: Strides | None = None,
) -> Kernel:
    """The kernel of a form for tensors of these shapes, compiled.

    Args:
        form: what to compute.
        schedule: how.
        tensors: in the layout's order.
        start: the starting value.
        extents: the call's sizes.
        precision: of float32 products in the matrix unit.
        partition: the row partition of the terms, where the form has an owner.
        like: the kernel of the form under this schedule, for other sizes and these strides, where there is one.
        strides: `strides_of` these tensors, where the caller has them.
    """
    strides = strides or strides_of(form, tensors, extents, partition is not None and partition.split, start)
    source = like.source if like is not None else write_kernel(form, schedule, strides, precision)
    numbers = Numbers(form.bound, tensors, start, extents, None if partition is None else partition.rows)
    values, inputs, others = place_arguments(source.arguments, numbers, form.bound.layout.tensors)
    grid = numbers.evaluate(source.grid, source.sizes)
    launch = None
    if grid:
        types = _types(form, source, tensors, partition)
        device = tensors[0].device
        columns = {*form.bound.layout.output_plain[-1:], *dict(form.bound.static)}
        even = vector_steps(source.arguments, values, columns)
        launch = _Interpret(source, grid) if interpreted() else _Launch(source, types, even, grid, device, strides.wide)
    empty = form.combine != "atomic" and form.covers(extents.output)
    return Kernel(
        form,
        source,
        extents,
        inputs,
        others,
        values,
        launch,
        empty,
        empty and source.schedule.splits == 1,
        form.bound.out_dtype,
        _Collector(form, source, extents, tensors[0].device, strides.wide) if strides.split else None,
        memory_of(form, source.schedule) if like is None else like.further,
    )


def _types(form: Form, source: Source, tensors: Sequence[Tensor], partition: RowPartition | None) -> list[str | None]:
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
        elif argument.kind in ("begin", "end", "target", "owner", "order"):
            dtype = getattr(partition, argument.kind).dtype
        else:
            found.append(None)
            continue
        found.append(dtype_of(dtype).pointer)
    return found


class _Launch:
    """Launches a kernel on a list of arguments; its machine code depends on which pointers are aligned."""

    def __init__(
        self,
        source: Source,
        types: Sequence[str | None],
        even: Sequence[int],
        grid: int,
        device: torch.device,
        wide: bool,
    ) -> None:
        self.function = _jit(source)
        self.source = source
        self.grid = grid
        # A device without a number is the current one.
        self.number = torch.cuda.current_device() if str(device) == "cuda" else device.index
        self.pointers = [place for place, kind in enumerate(types) if kind is not None]
        self.aligned = (True,) * len(self.pointers)
        # Steps along an axis belong to a model, and where rows begin at whole vectors, they are read as vectors.
        self.even = tuple(even)
        integer = "i64" if wide else "i32"
        self.signature = {n: kind or integer for n, kind in zip(self.function.arg_names, types, strict=True)}
        self.known: dict[tuple[bool, ...], Callable[..., None]] = {}

    def __call__(self, arguments: list[Any], grid: int | None = None) -> None:
        if grid is None:
            grid = self.grid
        # Triton asks the driver about each pointer that comes as a tensor, which takes far longer than this; of a
        # number it takes the caller's word.
        numbers, number = list(arguments), self.number
        bits = 0
        for place in self.pointers:
            tensor = arguments[place]
            if tensor.get_device() != number:
                raise self._elsewhere(tensor)
            pointer = numbers[place] = tensor.data_ptr()
            bits |= pointer
        aligned = tuple([not numbers[place] & 15 for place in self.pointers]) if bits & 15 else self.aligned
        run = self.known.get(aligned)
        if run is None:
            if (collection := collecting()) is not None:
                self.collect(collection, aligned, arguments)
                return
            with torch.cuda.device(number):
                run = self.known[aligned] = self.load(aligned)
        # `torch.cuda.current_device` would first ask whether CUDA is initialised.
        if torch._C._cuda_getDevice() == number:
            run(grid, torch._C._cuda_getCurrentRawStream(number), numbers)
        else:
            with torch.cuda.device(number):
                run(grid, torch._C._cuda_getCurrentRawStream(number), numbers)

    def _elsewhere(self, tensor: Tensor) -> InsumDeviceError:
        # Statements share a kernel whatever they call their tensors.
        here = f"cuda:{self.number}"
        return InsumDeviceError(
            f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}, its kernel on {here}",
            fix=f"pass it on {here}.",
            expected=torch.device(here),
            got=tensor.device,
        )

    def code(self, aligned: Sequence[bool], target: Target) -> KernelCode:
        """What the machine code for pointers aligned so depends on."""
        even = (*self.even, *(place for place, fits in zip(self.pointers, aligned, strict=True) if fits))
        name, types, schedule = self.function.__module__, tuple(self.signature.values()), self.source.schedule
        narrow = 0 < self.source.lanes <= schedule.warps * target[2]
        return KernelCode(name, self.source.text, types, even, schedule.warps, schedule.stages, target, narrow)

    def collect(self, collection: Collection, aligned: Sequence[bool], arguments: Sequence[Any]) -> None:
        """Note a launch; what it would have written is zero."""
        collection.add(self.code(aligned, collection.target or target_of(self.number)))
        # The collection of divided rows has no list of arguments, and writes its second.
        kinds = [each.kind for each in self.source.arguments] or ["", "out"]
        for argument, kind in zip(arguments, kinds, strict=False):
            if kind in ("out", "scratch", "additional"):
                argument.zero_()

    def compile(self, aligned: Sequence[bool]) -> Any:
        """The machine code for the launch's device; Triton keeps it on disk."""
        code = self.code(aligned, target_of(self.number))
        background.take(code)
        return compile_code(self.function, code, background.missed)

    def compile_ahead(self) -> None:
        """Compile for aligned pointers on behalf of a later launch, perhaps in another thread."""
        with torch.cuda.device(self.number):
            self.compile(self.aligned)

    def load(self, aligned: Sequence[bool]) -> Callable[..., None]:
        """The machine code on the device, behind as little of Triton's launcher as there is.

        It is loaded once for all sizes, and kept with the function: a device takes no code back.
        """
        schedule = self.source.schedule
        key = (tuple(self.signature.items()), self.even, tuple(aligned), schedule.warps, schedule.stages, self.number)
        loaded = self.function.__dict__.setdefault("loaded_by_insum_nn", {})
        return _loading.get(
            (id(self.function), key), lambda: loaded.get(key), lambda: loaded.setdefault(key, self._load(aligned))
        )

    def _load(self, aligned: Sequence[bool]) -> Callable[..., None]:
        kernel = self.compile(aligned)
        start, handle, metadata = kernel.run, kernel.function, kernel.packed_metadata

        def run(grid: int, stream: int, arguments: Sequence[Any]) -> None:
            start(grid, 1, 1, stream, handle, metadata, None, None, None, *arguments)

        # The handle belongs to the kernel, which has to live as long.
        run.kernel = kernel  # type: ignore[attr-defined]
        return run


class _Interpret:
    """Runs a kernel in Triton's interpreter."""

    def __init__(self, source: Source, grid: int) -> None:
        self.function = _jit(source)
        self.grid = grid

    def __call__(self, arguments: list[Any], grid: int | None = None) -> None:
        self.function[(self.grid if grid is None else grid,)](*arguments)

    def compile_ahead(self) -> None:
        """Nothing is compiled."""


class _Collector:
    """Adds up the parts of divided rows, left in scratch memory, and writes the sums to their rows."""

    def __init__(self, form: Form, source: Source, extents: Extents, device: torch.device, wide: bool) -> None:
        axis, shape = form.owner_axis, extents.output
        self.inner = math.prod(shape[axis + 1 :])
        self.step = shape[axis] * self.inner
        self.cells = math.prod(shape[:axis]) * self.inner
        text, block = write_collection(self.cells, source.accumulator)
        self.tiles = -(-self.cells // block)
        self.source = Source(text, (), Const(0), {}, Schedule(warps=2), source.accumulator, True)
        self.device, self.wide = device, wide
        self.known: dict[torch.dtype, _Launch | _Interpret] = {}

    def __call__(self, scratch: Tensor, output: Tensor, rows: Tensor | None, partition: RowPartition) -> None:
        """Write the sums to these rows of the output; without rows, to as many as there are, side by side."""
        first = partition.first
        assert first is not None
        count = first.shape[0] - 1
        inner, step = self.inner, self.step
        if rows is None:
            rows, inner, step = torch.arange(count, device=scratch.device), self.cells, 0
        programs = count * self.tiles
        if not programs:
            return
        launch = self.known.get(output.dtype)
        if launch is None:
            launch = self.known[output.dtype] = self.prepare(output.dtype)
        launch([scratch, output, rows, first, self.cells, inner, step], programs)

    def prepare(self, dtype: torch.dtype) -> _Launch | _Interpret:
        if interpreted():
            return _Interpret(self.source, 0)
        pointers = (dtype_of(self.source.accumulator).pointer, dtype_of(dtype).pointer, "*i64", "*i64")
        return _Launch(self.source, (*pointers, None, None, None), (), 0, self.device, self.wide)
