"""Generated kernels made callable: compiled by Triton, loaded, launched.

A launch depends on the kernel's text and on what tells machine code apart; sizes are among its arguments.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.ahead import Collection, collecting, target_of
from insum_nn.compiler.kernels.c_launcher import build_ahead, prepare_launcher
from insum_nn.compiler.kernels.machine_code import KernelCode, Target, compile_code, drop_module, make_module
from insum_nn.compiler.kernels.source import Source
from insum_nn.compiler.kernels.stored_code import find_code, is_storable, is_stored, remember_code
from insum_nn.compiler.tuning.build_once import BuildOnce
from insum_nn.errors import InsumDeviceError
from insum_nn.locks import new_lock

__all__ = ["Launcher", "OnDevice", "available", "function_of", "interpreted", "launcher", "load_ahead"]


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


# Text to callable.

# Both live as long as the kernels made of them: tuning makes dozens of which one is kept.
_functions: MutableMapping[str, Any] = weakref.WeakValueDictionary()
_launchers: MutableMapping[object, _Launch] = weakref.WeakValueDictionary()
_lock = new_lock()
_MODULE = "insum_nn_kernel_"
# Triton compiles for seconds: who needs another kernel does not wait.
_loading: BuildOnce[OnDevice] = BuildOnce()


def _module_name(source: Source) -> str:
    # Triton makes another kind of function for its interpreter.
    kind = "_interpreted" if interpreted() else ""
    return f"{_MODULE}{hashlib.sha256(source.text.encode()).hexdigest()[:16]}{kind}"


def function_of(source: Source) -> Any:
    """Triton's function of a kernel's text, which can be shown in tracebacks."""
    name = _module_name(source)
    with _lock:
        function = _functions.get(name)
        if function is None:
            module = make_module(name, source.text)
            # The module is found by its name, and must not hold what decides how long it stays.
            function = _functions[name] = module.__dict__.pop(name)
            weakref.finalize(function, _forget, module).atexit = False
            # Triton keeps all functions, by name, for a way of loading kernels that is not used here.
            registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
            for each in (name, *module.__dict__):
                registry.pop(f"{name}:{each}", None)
        return function


def _forget(module: ModuleType) -> None:
    """Drop the module of a function that is gone."""
    with _lock:
        drop_module(module)


class OnDevice(NamedTuple):
    """Machine code on a device.

    Attributes:
        begin: Triton's launcher.
        handle: the function on the device.
        metadata: what else its launcher takes.
        rest: arguments that its launcher takes behind those of the kernel.
        kernel: whose handle this is, which has to live as long.
    """

    begin: Callable[..., None]
    handle: int
    metadata: Any
    rest: tuple[int, ...]
    kernel: object


class _Launch:
    """Launches a kernel on a list of arguments; its machine code depends on which pointers are aligned.

    One serves for all sizes, and keeps what it loaded: a device takes no code back.
    """

    def __init__(
        self,
        source: Source,
        types: Sequence[str | None],
        even: Sequence[int],
        device: torch.device,
        wide: bool,
    ) -> None:
        self.source = source
        self.name = _module_name(source)
        # A device without a number is the current one.
        self.number = torch.cuda.current_device() if str(device) == "cuda" else device.index
        self.pointers = [place for place, kind in enumerate(types) if kind is not None]
        self.aligned = (True,) * len(self.pointers)
        # Steps along an axis belong to a model, and where rows begin at whole vectors, they are read as vectors.
        self.even = tuple(even)
        integer = "i64" if wide else "i32"
        self.signature = tuple([kind or integer for kind in types])
        self.codes: dict[tuple[bool, ...], OnDevice] = {}
        self.key = (self.name, self.signature, self.even, source.schedule.launch_options, self.number)

    def __call__(self, arguments: list[Any], grid: int) -> None:
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
        code = self.codes.get(aligned)
        if code is None:
            if (collection := collecting()) is not None:
                self.collect(collection, aligned, arguments)
                return
            with torch.cuda.device(number):
                code = self.load(aligned)
        # `torch.cuda.current_device` would first ask whether CUDA is initialised.
        if torch._C._cuda_getDevice() != number:
            with torch.cuda.device(number):
                return self(arguments, grid)
        begin, handle, metadata, rest, _ = code
        stream = torch._C._cuda_getCurrentRawStream(number)
        begin(grid, 1, 1, stream, handle, metadata, None, None, None, *numbers, *rest)

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
        text, schedule = self.source.text, self.source.schedule
        narrow = 0 < self.source.lanes <= schedule.warps * target[2]
        return KernelCode(self.name, text, self.signature, even, schedule.launch_options, target, narrow)

    def collect(self, collection: Collection, aligned: Sequence[bool], arguments: Sequence[Any]) -> None:
        """Note a launch; what it would have written is zero."""
        collection.add(self.code(aligned, collection.target or target_of(self.number)))
        # The collection of divided rows has no list of arguments, and writes its second.
        kinds = [each.kind for each in self.source.arguments] or ["", "out"]
        for argument, kind in zip(arguments, kinds, strict=False):
            if kind in ("out", "workspace", "additional"):
                argument.zero_()

    def compile(self, aligned: Sequence[bool]) -> Any:
        """The machine code for the launch's device and pointers that are aligned so; Triton keeps it on disk."""
        code = self.code(aligned, target_of(self.number))
        kernel = find_code(code)
        if kernel is None:
            build_ahead()
            background.take(code)
            kernel = find_code(code)
        if kernel is None:
            kernel = compile_code(function_of(self.source), code)
            remember_code(code, kernel.hash)
        return kernel

    def on_device(self) -> OnDevice | None:
        """The machine code for aligned pointers, where it is on the device."""
        return self.codes.get(self.aligned)

    def load(self, aligned: tuple[bool, ...]) -> OnDevice:
        """The machine code on the device, behind as little of Triton's launcher as there is."""
        codes = self.codes
        return _loading.get(
            (self.key, aligned),
            lambda: codes.get(aligned),
            lambda: codes.setdefault(aligned, self._load(aligned)),
        )

    def _load(self, aligned: tuple[bool, ...]) -> OnDevice:
        kernel = self.compile(aligned)
        rest = (0,) * prepare_launcher(kernel, self.signature)
        return OnDevice(kernel.run, kernel.function, kernel.packed_metadata, rest, kernel)


class _Interpret:
    """Runs a kernel in Triton's interpreter."""

    def __init__(self, source: Source) -> None:
        self.function = function_of(source)

    def __call__(self, arguments: list[Any], grid: int) -> None:
        self.function[(grid,)](*arguments)

    def on_device(self) -> OnDevice | None:
        """Nothing is loaded."""
        return None


Launcher = _Launch | _Interpret
"""What launches so many programs of a kernel on a list of arguments."""


def launcher(
    source: Source, types: Sequence[str | None], even: Sequence[int], device: torch.device, wide: bool
) -> Launcher:
    """What launches a kernel.

    Args:
        source: its text.
        types: Triton's types of its pointers; `None` for numbers.
        even: places of numbers that are multiples of 16.
        device: where it runs.
        wide: numbers have 64 bits.
    """
    if interpreted():
        return _Interpret(source)
    made = _Launch(source, types, even, device, wide)
    with _lock:
        return _launchers.setdefault(made.key, made)


def load_ahead(launchers: Sequence[Launcher]) -> bool:
    """Have the machine code for aligned pointers on the device where that takes little time; return whether it is.

    Else it is collected, or other processes compile it; without these it is compiled here.
    """
    launches = [each for each in launchers if isinstance(each, _Launch)]
    if (collection := collecting()) is not None:
        for each in launches:
            collection.add(each.code(each.aligned, collection.target or target_of(each.number)))
        return not launches
    # What loading asks of the driver has no place in a graph that is captured.
    if not launches or torch.cuda.is_current_stream_capturing():
        return not launches
    codes = [each.code(each.aligned, target_of(each.number)) for each in launches]
    if not all(map(is_stored, codes)) and background.shared().most and is_storable(codes[0]):
        background.shared().submit(codes)
        return False
    for each in launches:
        with torch.cuda.device(each.number):
            each.load(each.aligned)
    return True
