"""The kernels of a whole step, found when its first is missing.

A step that waits for each kernel before it knows the next one leaves the processes that compile idle. When a kernel is
missing, the module that runs is found on the stack: the outermost one that may run twice. A copy of it is rehearsed to
the end of its backward pass: launches are collected and not made, and each kernel is submitted as it is found. No
module is changed for that, and none has to be told.
"""

from __future__ import annotations

import copy
import gc
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from insum_nn.compiler.kernels.ahead import UndecidedError
from insum_nn.compiler.kernels.background import cold, rehearsals
from insum_nn.compiler.kernels.machine_code import KernelCode
from insum_nn.compiler.runtime.gradients_ahead import rehearsal
from insum_nn.compiler.runtime.modes import is_plain_eager, outer_autocast
from insum_nn.compiler.runtime.step import run_step

__all__ = ["call_step"]

T = TypeVar("T")
_log = logging.getLogger("insum_nn.prepare")


def call_step(method: Callable[..., T], module: nn.Module, *given: Any) -> T:
    """Call a method of a module, which is rehearsed as a call of the module is."""
    return method(module, *given)


# Torch's own function through which every module is called; without it nothing is found.
_CALL: Any = getattr(getattr(nn.Module, "_wrapped_call_impl", None), "__code__", None)
_STEP = call_step.__code__
_HOOKS_OF_ALL = [getattr(nn.modules.module, f"_global_forward_{name}hooks", ()) for name in ("", "pre_")]


_Call = tuple[nn.Module, Callable[..., Any] | None, Sequence[Any], dict[str, Any]]

# Modules whose rehearsal did not come to a kernel that the step needed, without and with a backward pass.
_given_up: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()


def _rehearse_step(code: KernelCode, recorded: bool) -> tuple[Iterable[KernelCode], bool]:
    """Find the kernels of the step that runs now, and submit them; none, where there is no module that may run twice.

    Args:
        code: the kernel that is missing.
        recorded: a call that records gradients needs it.

    Returns:
        The kernels, and whether those of the backward pass are among them.
    """
    if not is_plain_eager() or torch.cuda.is_current_stream_capturing() or any(map(len, _HOOKS_OF_ALL)):
        return (), False
    called = _outermost_call()
    # The only call of a single layer is rehearsed by itself.
    if called is None or type(called[0]).__module__.startswith(_LAYERS):
        return (), False
    module = called[0]
    # What a layer prepares for its sums records nothing, in a step that does.
    trained = module.training and any(each.requires_grad for each in module.parameters())
    recorded = recorded or torch.is_grad_enabled() or trained
    if recorded in _given_up.get(module, ()):
        return (), False
    found, ended = _rehearsed(called, recorded)
    if not ended or code not in found:
        # The next kernel that is missing would not be met either.
        _given_up.setdefault(module, set()).add(recorded)
    return found, ended and recorded


rehearsals.step = _rehearse_step


def _outermost_call() -> _Call | None:
    """The outermost call of a module that runs now and may run twice."""
    found: list[_Call] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            values = frame.f_locals
            found.append((values["self"], None, values["args"], values["kwargs"]))
        elif frame.f_code is _STEP:
            values = frame.f_locals
            found.append((values["module"], values["method"], values["given"], {}))
        frame = frame.f_back
    for each in reversed(found):
        if _is_plain(each[0]) and is_plain_eager(*_tensors(each[2:])):
            return each
    return None


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _rehearsed(called: _Call, recorded: bool) -> tuple[dict[KernelCode, None], bool]:
    """Find the kernels of a call and, where it is recorded, of its gradients; and whether that came to its end."""
    module, method, given, named = called
    ended = False
    with (
        rehearsal() as collection,
        torch.set_grad_enabled(recorded),
        outer_autocast("cuda"),
        _nothing_compiled(),
        _without_collections(),
    ):
        try:
            # Parameters that are made in inference mode have no versions, by which layers know them again.
            with _Copies(), torch.inference_mode(False):
                own, args, kwargs = copy.deepcopy((module, tuple(given), dict(named)))
            step = own if method is None else partial(method, own)
            # Inputs of a network that require gradients are positions, whose gradients are forces: training
            # differentiates these by the weights, and what is not trained wants no other gradients.
            forces = recorded and any(_is_leaf(each) for each in _tensors((args, kwargs)))
            if forces and not module.training:
                own.requires_grad_(False)
            run_step(step, args, kwargs, recorded, forces and module.training)
            ended = True
        except UndecidedError:
            pass
        except Exception as error:
            _log.debug("the kernels of a step of %s were not all found ahead: %s", type(module).__name__, error)
    cold.due = False
    return collection.codes, ended


class _Copies(TorchFunctionMode):
    """Within this, `copy.deepcopy` shares the memory of parameters, and takes tensors with a history without it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        value, memo = args
        if id(value) not in memo:
            detached = value.detach()
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(detached, value.requires_grad)
            else:
                # The whole storage, since kernels depend on strides and on where a tensor begins.
                made = func(detached, memo).requires_grad_(value.requires_grad)
                # Another tensor may get its identifier.
                memo.pop(id(detached), None)
            # What was said of it, such as which passes want its gradient.
            vars(made).update(vars(value))
            memo[id(value)] = made
        return memo[id(value)]


def _nothing_compiled() -> AbstractContextManager[object]:
    """Run compiled functions as they are written: a copy of the network would have them compiled once more."""
    # Nothing is compiled yet where nothing has imported Dynamo, which takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


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


# Where our layers are, but for containers of them.
_LAYERS = tuple(f"insum_nn.layers.{name}" for name in ("equivariant", "graph", "pruned", "voxel.conv", "voxel.pool"))
# Whose modules send nothing to other ranks in a forward pass.
_SILENT = ("torch.nn.modules.", "insum_nn.", "e3nn.", "torch_geometric.nn.")
# Whose functions send nothing; e3nn's layers hold graphs of them.
_COMPUTES = ("torch", "torch.functional", "torch.nn.functional", "_operator", "builtins", "math")


def _is_silent(module: nn.Module) -> bool:
    if isinstance(module, torch.fx.GraphModule):
        calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
        return all(getattr(target, "__module__", None) in _COMPUTES for target in calls)
    return f"{type(module).__module__}.".startswith(_SILENT)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module may run twice: it has no hooks, is not compiled, and its parameters are plain tensors."""
    watched = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
    if any(getattr(each, name, None) for each in module.modules() for name in (*watched, "_orig_mod")):
        return False
    # Other ranks may find their kernels on disk, and would wait for what a rehearsal sends.
    homes = [f"{type(each).__module__}." for each in module.modules()]
    if any(home.startswith(("torch.distributed.", "torch.nn.parallel.")) for home in homes):
        return False
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        if not all(map(_is_silent, module.modules())):
            return False
        if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
            return False
    return all(type(each.detach()) is Tensor for each in module.parameters())
