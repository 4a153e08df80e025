"""The kernels of a whole step, found when its first is missing.

A step that waits for each kernel before it knows the next one leaves the processes that compile idle. A module that
knows what a step of it is says so, and the first missing kernel has the step rehearsed to its end: launches are
collected and not made, and each kernel is submitted as it is found.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from insum_nn.compiler.kernels import background
from insum_nn.compiler.kernels.ahead import UndecidedError, collecting, rehearse
from insum_nn.compiler.kernels.background import cold
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.runtime.modes import is_plain_eager
from insum_nn.compiler.runtime.steps.gradients_ahead import saving_apart

__all__ = ["call_step"]

T = TypeVar("T")
_log = logging.getLogger("insum_nn.prepare")


class _Call(nn.Module):
    """A method as the forward of a module, whose parameters can be replaced."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *given: Any) -> Any:
        return self.method(self.module, *given)


def call_step(method: Callable[..., T], module: nn.Module, *given: Any) -> T:
    """Call a method of a module; the first kernel that is missing has those of the call and of its gradients found.

    Args:
        method: of the module's class, without effects other than its results.
        module: whose parameters get no gradients from finding kernels.
        *given: its arguments, of which the first is a tensor.
    """
    if torch.compiler.is_compiling() or not given[0].is_cuda or cold.step is not None or collecting() is not None:
        return method(module, *given)
    if not is_plain_eager(*[each for each in given if isinstance(each, Tensor)]):
        return method(module, *given)
    kind = given[0].device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cold.step = (lambda: _rehearse_step(method, module, given, autocast)), threading.get_ident()
    try:
        return method(module, *given)
    finally:
        cold.step = None


def _rehearse_step(
    method: Callable[..., Any], module: nn.Module, given: Any, autocast: tuple[bool, torch.dtype]
) -> tuple[Iterable[KernelCode], bool]:
    """The kernels of a step, and whether these are all: none of its choices was left to the step itself."""
    if torch.cuda.is_current_stream_capturing() or not _is_plain(module):
        return (), True
    decided = True
    device = given[0].device
    # Gradients of the module's own parameters, and what hangs on them, are the step's.
    state = {f"module.{name}": p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    number = [device.index or 0] if torch.cuda.is_initialized() else []
    with (
        rehearse(lambda code: background.submit([code])) as collection,
        saving_apart(),
        torch.enable_grad(),
        torch.autocast(device.type, autocast[1], autocast[0]),
        torch.autograd.set_multithreading_enabled(False),
        torch.random.fork_rng(number),
        _without_collections(),
    ):
        try:
            made = torch.func.functional_call(_Call(module, method), state, given)
            outputs = [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor) and each.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        except UndecidedError:
            decided = False
        except Exception as error:
            _log.debug("the kernels of a step of %s were not all found ahead: %s", type(module).__name__, error)
    cold.due = False
    return collection.codes, decided


@contextmanager
def _without_collections() -> Generator[None]:
    """Let garbage lie: planning makes many objects and few cycles, and was interrupted for a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_plain(module: nn.Module) -> bool:
    """Whether a module may run twice: it has no hooks, is not compiled, and its parameters are plain tensors."""
    watched = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
    if any(getattr(each, name, None) for each in module.modules() for name in (*watched, "_orig_mod")):
        return False
    # Other ranks may find their kernels on disk, and would wait for what a rehearsal sends.
    if any(type(each).__module__.startswith(("torch.distributed", "torch.nn.parallel")) for each in module.modules()):
        return False
    return all(type(each.detach()) is Tensor for each in module.parameters())
