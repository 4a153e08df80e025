"""Triton's interpreter as a test bench: generated kernels run on CPU tensors, and every address they use is checked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.language.standard as standard
from torch import Tensor
from triton.runtime import interpreter as interpreter_module
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder
from triton.runtime.jit import JITFunction

import insum_nn
from insum_nn.compiler.kernels import launch as launch_module

__all__ = ["Ranges", "interpreter"]

_PATCHED: tuple[Any, ...] = (tl, tl.core, tl.math, standard, tl.core.tensor, tl.core.tensor_descriptor_base)


class Ranges:
    """The bytes that the tensors of a running kernel occupy."""

    def __init__(self) -> None:
        self.enter(())

    def enter(self, arguments: tuple[Any, ...]) -> None:
        known: list[tuple[int, int]] = []
        for tensor in arguments:
            if isinstance(tensor, Tensor) and tensor.numel():
                reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                known.append((tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()))
        # In order, and those that meet as one: an address is looked for in one range alone. Nothing is below the first.
        merged = [(0, 0)]
        for low, high in sorted(known):
            if low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.lows, self.highs = np.array(merged, dtype=np.uint64).T.copy()

    def check(self, pointers: Any, mask: Any, what: str) -> None:
        addresses = np.asarray(pointers, dtype=np.uint64)
        active = addresses[np.broadcast_to(np.asarray(mask, dtype=bool), addresses.shape)]
        inside = active < self.highs[np.searchsorted(self.lows, active, side="right") - 1]
        # The interpreter goes on with addresses as they are, and would end the process.
        if not inside.all():
            raise AssertionError(f"a kernel {what} {int((~inside).sum())} cells outside of every tensor")


class _Watched:
    """A kernel's function that says which tensors it was given."""

    def __init__(self, function: Any, ranges: Ranges) -> None:
        self.function = function
        self.ranges = ranges

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any) -> None:
            self.ranges.enter(arguments)
            # Lanes past a loop's end compute what is thrown away.
            with np.errstate(all="ignore"):
                self.function[grid](*arguments)

        return call


def _poisoned(real: Any) -> Any:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = real(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    return empty


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranges]:
    """Generated kernels are interpreted; fresh memory holds NaN; an address outside of all tensors is an error."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    before = {owner: dict(vars(owner)) for owner in _PATCHED}
    # Triton decides when it is imported whether its own library is interpreted; torch imports it early.
    for module in (tl, standard, tl.math, tl.core):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(value.fn))  # type: ignore[no-untyped-call]
    ranges = Ranges()
    # Functions made for the interpreter must not meet a compiler, nor the other way round.
    monkeypatch.setattr(launch_module, "_functions", {})
    jit: Any = launch_module.function_of
    monkeypatch.setattr(launch_module, "function_of", lambda source: _Watched(jit(source), ranges))
    load: Any = InterpreterBuilder.create_masked_load
    store: Any = InterpreterBuilder.create_masked_store
    add: Any = InterpreterBuilder.create_atomic_rmw

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        ranges.check(ptrs.data, mask.data, "reads")
        return load(self, ptrs, mask, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        ranges.check(ptrs.data, mask.data, "writes")
        return store(self, ptrs, value, mask, *rest)

    def checked_add(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        ranges.check(ptr.data, mask.data, "adds to")
        return add(self, op, ptr, val, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", checked_add)
    dot: Any = InterpreterBuilder.create_dot

    def wide_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        # NumPy has no bfloat16: the interpreter would multiply the numbers' bits.
        if left.dtype.scalar == tl.bfloat16:
            left, right = self.cast_impl(left, tl.float32), self.cast_impl(right, tl.float32)
        return dot(self, left, right, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide_dot)
    patch_tensor: Any = interpreter_module._patch_lang_tensor

    def patch_with_index(tensor: Any, *rest: Any) -> None:
        patch_tensor(tensor, *rest)
        # Triton 3.6 calls `int` of an array with an axis, which NumPy refuses from 2.4 on.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    monkeypatch.setattr(interpreter_module, "_patch_lang_tensor", patch_with_index)
    patch_lang: Any = interpreter_module._patch_lang
    patched: dict[tuple[int, ...], Any] = {}

    def patch_once(function: Any) -> Any:
        # For every launch, and every call of a function in it, Triton would look through its whole library again.
        modules = tuple(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if modules not in patched:
            patched[modules] = patch_lang(function)
        return SimpleNamespace(restore=lambda: None)

    monkeypatch.setattr(interpreter_module, "_patch_lang", patch_once)
    numpy_type: Any = interpreter_module._get_np_dtype
    types: dict[str, Any] = {}

    def remembered_type(dtype: Any) -> Any:
        # Triton's own makes a table of all of its types at every call.
        name = dtype.scalar.name
        if name not in types:
            types[name] = numpy_type(dtype.scalar)
        return types[name]

    monkeypatch.setattr(interpreter_module, "_get_np_dtype", remembered_type)
    # Eight operations for each sum and product of integers, of which nothing is made where no one debugs.
    monkeypatch.setattr(interpreter_module.interpreter_semantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    insum_nn.clear_cache()
    yield ranges
    insum_nn.clear_cache()
    for scope in reversed(patched.values()):
        # Triton 3.5 has none.
        if scope is not None:
            scope.restore()
    # What Triton patches for functions that a kernel calls it leaves so; a compiler cannot use it.
    for owner, own in before.items():
        for name, value in own.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
