"""Machine code of generated kernels, compiled in this process or in others.

Run as a script this file is such another process: it compiles what it reads, a kernel a line. As such it imports
Triton and nothing else, so that it starts in a third of a second, and makes no context on a device.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import sys
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

__all__ = [
    "KernelCode",
    "Target",
    "active_target",
    "compile_code",
    "drop_module",
    "make_module",
    "serve",
    "to_line",
    "triton_version",
]

# Triton's back end, the architecture, threads of a warp.
Target = tuple[str, int, int]
# Matrix products of a text from which on LLVM's passes take a quarter to a half of compiling it.
_MANY_DOTS = 24


@dataclass(frozen=True, slots=True)
class KernelCode:
    """Everything that the machine code of a kernel depends on.

    Attributes:
        module: the name of the module that the text becomes, and of its function.
        text: the text; its function is `kernel`.
        signature: Triton's types of its parameters, in order.
        aligned: the places of the parameters that are multiples of 16.
        options: Triton's, by name.
        target: what it is compiled for.
        narrow: all tensors lie along one axis, with no more values than a program has threads. It decides how long
            compiling takes, and nothing of the machine code.
    """

    module: str
    text: str
    signature: tuple[str, ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]
    target: Target
    narrow: bool = False

    @property
    def effort(self) -> int:
        """What orders kernels by how long compiling takes: the text's length, which counts more where it is not narrow.

        Texts with products of the matrix unit took 7 ms for each line, others up to 3, and narrow ones 0.7.
        """
        return len(self.text) * (1 if self.narrow else 4)


@functools.cache
def triton_version() -> str:
    """Triton's version; empty where it is not installed."""
    try:
        import triton
    except ModuleNotFoundError:
        return ""
    return str(triton.__version__)


def make_module(name: str, text: str) -> ModuleType:
    """The module of a kernel's text; its lines are found by tracebacks and by Triton.

    Its function `kernel` has the module's name there, which profilers show.
    Triton keeps machine code under a digest of the text and of its place in its file, so that every process that
    makes the same module finds what another one compiled.
    """
    path, text = f"<{name}>", text.replace("def kernel(", f"def {name}(")
    module = ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    sys.modules[name] = module
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def drop_module(module: ModuleType) -> None:
    """Forget a module and its lines, unless the same text was made into another one since."""
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]
        linecache.cache.pop(str(module.__file__), None)


def compile_code(function: Any, code: KernelCode) -> Any:
    """Triton's compiled kernel, from Triton's function of the text; it is kept on disk, and looked for there first."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compiler

    compile_source: Any = compiler.compile
    if code.narrow or (code.target[0] == "cuda" and code.text.count("tl.dot(") >= _MANY_DOTS):
        # `compile` and a stage that it calls are copied with other globals, so nothing changes for other kernels.
        change = _without_coalescing if code.narrow else _without_optimizing
        compile_source = _with_globals(
            compile_source, make_backend=lambda target: change(compiler.make_backend(target))
        )
    signature = dict(zip(function.arg_names, code.signature, strict=True))
    attributes = {(place,): [["tt.divisibility", 16]] for place in code.aligned}
    source, target = ASTSource(function, signature, {}, attributes), GPUTarget(*code.target)
    return compile_source(source, target=target, options=dict(code.options))


def _without_coalescing(backend: Any) -> Any:
    """Have a back end compile kernels in which each thread holds one value of a tensor: without the pass `coalesce`.

    The pass chooses how many neighbouring values a thread loads at once, which is one there. For each load and store it
    walks all that it is connected with: of the 12 s that an unrolled tensor product of 2400 lines took, it took 10.
    """

    def change(passes: Any) -> Any:
        return _Overridden(passes, ttgpuir=_Overridden(passes.ttgpuir, add_coalesce=lambda _: None))

    return _changed(backend, "make_ttgir", "passes", change)


def _without_optimizing(backend: Any) -> Any:
    """Have a back end compile unrolled matrix products: without LLVM's passes over its own representation.

    Most of their time they look for pairs of values in what Triton has made of the products, where there are none that
    matter: ptxas makes as much of the code as it is. A fully connected product of degree 2 with 64 channels took 5 s
    for its first step instead of 7 to 10, and an H200 661 us for all its kernels instead of 671.
    """

    def change(llvm: Any) -> Any:
        level = llvm.OPTIMIZE_O0
        return _Overridden(llvm, optimize_module=lambda module, _, *rest: llvm.optimize_module(module, level, *rest))

    return _changed(backend, "make_llir", "llvm", change)


def _changed(backend: Any, stage: str, name: str, change: Callable[[Any], Any]) -> Any:
    """A back end that finds something else under a global name of a stage; as it is where Triton is built otherwise."""
    with suppress(AttributeError, KeyError):
        made = getattr(backend, stage)
        plain = getattr(made, "__func__", made)
        copy = _with_globals(plain, **{name: change(plain.__globals__[name])})
        setattr(backend, stage, copy if plain is made else MethodType(copy, backend))
    return backend


class _Overridden:
    """An object with some of its attributes replaced."""

    def __init__(self, whole: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _with_globals(function: Any, **names: Any) -> Any:
    """A copy of a function in which some global names mean something else; without them, the function itself."""
    if not all(name in function.__code__.co_names for name in names):
        return function
    own = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def active_target() -> Target:
    """What kernels for the current device are compiled for."""
    from triton.runtime import driver

    found: Any = driver.active.get_current_target()
    return found.backend, found.arch, found.warp_size


def serve() -> None:
    """Compile the kernels that come in on standard input, and answer each with a line on standard output.

    The first line is the path of modules, and is answered when compilers are imported. Other answers tell Triton's
    digest of the code and whether it was on disk, or why there is none.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    # What compilers print is not an answer.
    os.dup2(2, 1)
    sys.path[:] = json.loads(sys.stdin.readline())
    found: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    from triton import knobs

    knobs.compilation.listener = listen  # type: ignore[assignment]
    answers.write("{}\n")
    for line in sys.stdin:
        code = KernelCode(*literal_eval(line))
        found.clear()
        try:
            module = make_module(code.module, code.text)
            try:
                kernel = compile_code(module.__dict__[code.module], code)
            finally:
                drop_module(module)
            answer: dict[str, Any] = {"found": found[-1:] == [True], "hash": kernel.hash}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def to_line(code: KernelCode) -> str:
    """As a line of text."""
    return repr(astuple(code))


if __name__ == "__main__":
    serve()
