"""A CPU that says it is a GPU: what a step on a GPU would launch is found, and compiled, without one.

Tensors live in the CPU's memory and say that they are on `cuda:0`, to the package and to nothing below it: torch's own
calls run on the CPU. Kernels can be collected (`insum_nn.compiler.kernels.ahead`), not launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from insum_nn.compiler.kernels import written
from insum_nn.compiler.kernels.ahead import collecting
from insum_nn.compiler.kernels.launch import interpreted
from tests.compiler.corpus.statements import DEVICE_TYPE

__all__ = ["H200", "Pretence", "pretended_gpu"]

# The back end's name is also torch's name of the device.
H200 = (DEVICE_TYPE, 90, 32)
DEVICE = torch.device(DEVICE_TYPE, 0)
_DEVICE_OF: Any = Tensor.device.__get__
_IS_CUDA: Any = Tensor.is_cuda.__get__
_IS_CPU: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def _here(value: Any) -> Any:
    """An argument with the CPU in the place of the pretended device."""
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith(DEVICE_TYPE) else value


class Pretence(TorchFunctionMode):
    """Has tensors say that they are on a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _DEVICE_OF:
            return DEVICE
        if func in (_IS_CUDA, _IS_CPU):
            return func == _IS_CUDA
        if func is Tensor.get_device:
            return 0
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_here, args), **kwargs)


@contextlib.contextmanager
def pretended_gpu() -> Generator[None]:
    """Within this, every tensor says that it is on an H200."""
    said: dict[str, Any] = {
        "current_device": lambda: 0,
        "device": lambda _: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H200",
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=140 << 30,
            multi_processor_count=132,
            L2_cache_size=50 << 20,
            shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            major=9,
            minor=0,
            name="NVIDIA H200",
        ),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda *_: SimpleNamespace(
            synchronize=lambda: None, wait_event=lambda _: None, cuda_stream=0
        ),
        "synchronize": lambda *_: None,
        "Event": lambda *_: SimpleNamespace(record=lambda *_: None, synchronize=lambda: None, query=lambda: True),
    }
    kept = {name: getattr(torch.cuda, name) for name in said}
    load_ahead = written.load_ahead
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        # torch calls it without the mode, as `torch.autograd.grad` is a function that a mode may replace.
        with Pretence():
            return engine(*args, **kwargs)

    try:
        for name, value in said.items():
            setattr(torch.cuda, name, value)
        autograd._engine_run_backward = backward
        # No machine code can be loaded: what has another way takes that.
        written.load_ahead = lambda each: load_ahead(each) if collecting() is not None or interpreted() else False
        with Pretence():
            yield
    finally:
        written.load_ahead = load_ahead
        autograd._engine_run_backward = engine
        for name, value in kept.items():
            setattr(torch.cuda, name, value)
