"""Detect active tracers, function transforms, dispatch modes and autocast."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from insum_nn.dtypes import FLOATS, wide_dtype

__all__ = [
    "PLAIN_TYPES",
    "exceeds",
    "followed_by",
    "graph_constant",
    "is_functional",
    "is_known",
    "is_plain",
    "is_plain_eager",
    "is_traced",
    "is_transformed",
    "may_be_empty",
    "product_dtype",
    "records_graph",
    "size_hint",
    "to_autocast",
    "under_autocast",
    "without_autocast",
]

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""The classes whose memory is what they say: subclasses may trace, replace or wrap."""
_Keys: Any = torch._C.DispatchKey
# Included while some tracer sees calls before autograd does, which is no mode of the stack.
_BEFORE_DISPATCH = _Keys.PreDispatch


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation is active."""
    return bool(peek_interpreter_stack()) or torch.autograd.forward_ad._current_level >= 0


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory is what it says, wherever a call on it is seen."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not (tensor.is_meta or tensor.is_neg())


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a compiler, a dispatch mode or a subclass of tensors has to see one registered operator for a call."""
    # A loop instead of `any`: no generator in every call.
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_meta):
            return True
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def followed_by(tensors: Sequence[Tensor], initial: Tensor | None) -> Literal["mode", "autograd"] | None:
    """What follows a call on plain tensors; autograd alone where it records a gradient of some tensor."""
    # `is_transformed`, written out: every call comes here.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or peek_interpreter_stack():
        return "mode"
    if torch.autograd.forward_ad._current_level >= 0:
        return "mode"
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return "autograd"
        if initial is not None and initial.requires_grad:
            return "autograd"
    return None


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Return whether torch runs calls on these tensors directly: no mode, no subclass, no meta tensor; `None` passes.

    Nor is a tensor lazily negated: what a kernel finds in its memory is not its value. Autograd may record.
    """
    # `is_transformed`, written out, and a loop instead of `all`: every call comes here several times.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or peek_interpreter_stack():
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._is_tracing():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_meta or tensor.is_neg()):
            return False
    return True


def records_graph(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch records a graph of what is done with tensors on a CPU or a GPU."""
    recorded = False
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._dispatch_tls_is_dispatch_key_included(_BEFORE_DISPATCH):
        # Loaded whenever torch traces; to import them here takes longer than to import torch.
        proxies: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
        recorded = proxies is not None and proxies.get_proxy_mode() is not None
    # Loops rather than lists: this is evaluated in every call.
    for first in tensors:
        if first is not None:
            if first.device.type not in ("cpu", "cuda"):
                return False
            break
    else:
        return False
    return recorded or is_functional(tensors)


def is_functional(tensors: Sequence[Tensor | None]) -> bool:
    """Whether AOTAutograd or `torch.export` records what is done with tensors."""
    functional: Any = sys.modules.get("torch._subclasses.functional_tensor")
    if functional is None:
        return False
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES and isinstance(tensor, functional.FunctionalTensor):
            return True
    return False


def graph_constant(tensor: Tensor) -> Tensor:
    """Put a tensor that is kept outside of graphs into the one that torch records, as a constant of it."""
    return torch.ops.aten.lift_fresh_copy(tensor)  # type: ignore[no-any-return]


# In place of a size that nothing is known of.
_NOMINAL = 4096


def size_hint(extent: int) -> int:
    """A size by which to choose: of a symbolic one, what it is in the traced call; nothing comes to depend on it."""
    if type(extent) is int:
        return extent
    node: Any = extent.node  # type: ignore[attr-defined]
    hint = getattr(node, "hint", None)
    return int(hint) if hint is not None else _NOMINAL


def exceeds(extents: Sequence[int], limit: int) -> bool:
    """Whether some extent may pass a limit in a call of the traced graph.

    Dynamo guards what it finds out of symbolic sizes, and compiles again where it no longer holds. Other graphs are for
    all sizes, of which only their bounds are known.
    """
    found = [extent for extent in extents if (extent >= limit if type(extent) is int else not is_known(extent < limit))]
    if not _is_guarded() or any(type(extent) is not int and extent.node.hint is None for extent in found):  # type: ignore[attr-defined]
        return bool(found)
    return any(extent >= limit for extent in found)


def may_be_empty(extents: Sequence[int]) -> bool:
    """Whether some extent may be 0 in a call of the traced graph."""
    # While torch traces it takes any size for 2 or more, also in graphs that nothing guards, which are called with 0.
    least = 1 if _is_guarded() else 3
    return any(extent == 0 if type(extent) is int else not is_known(extent >= least) for extent in extents)


def is_known(condition: object) -> bool:
    """Whether a comparison of sizes holds in all calls of a graph that torch traces."""
    # Dynamo, which traces this, copies `sys.modules` when that is read, and fails where a thread imports meanwhile.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)  # type: ignore[arg-type]


def _is_guarded() -> bool:
    """Whether a graph is traced by Dynamo, which compiles again where what it found out of sizes no longer holds."""
    guards: Any = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None and not torch.compiler.is_exporting()


# Autocast: a statement counts as a matrix product, whose operands take autocast's dtype.

T = TypeVar("T")
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def under_autocast(device: torch.device) -> bool:
    """Return whether operands on this device take autocast's dtype; never on devices without one, such as meta.

    >>> under_autocast(torch.device("meta"))
    False
    """
    # `torch.amp.is_autocast_available` is unknown to Dynamo before torch 2.13.
    return device.type in _DEVICES and torch.is_autocast_enabled(device.type)


# What autocast casts: floats that are summed in float32.
_CAST = tuple(dtype for dtype in FLOATS if wide_dtype(dtype) == torch.float32)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that an operand has in a product: its own, or autocast's where it is active.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     product_dtype(torch.ones(1)), product_dtype(torch.ones(1).double())
    (torch.bfloat16, torch.float64)
    """
    cast = tensor.dtype in _CAST and under_autocast(tensor.device)
    return torch.get_autocast_dtype(tensor.device.type) if cast else tensor.dtype


def to_autocast(value: T) -> T:
    """Cast a floating-point operand, but of float64, to autocast's dtype where autocast is active.

    >>> to_autocast(torch.ones(1)).dtype
    torch.float32
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     to_autocast(torch.ones(1)).dtype
    torch.bfloat16
    """
    # What is no tensor is for the checks to judge.
    if not isinstance(value, Tensor):
        return value
    dtype = product_dtype(value)
    return value if value.dtype is dtype else value.to(dtype)  # type: ignore[return-value]


@contextmanager
def _suspended(device: str) -> Generator[None]:
    """Autocast off for one kind of device: `torch.autocast(device, enabled=False)` in a part of its time."""
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)


_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Suspend autocast where operands have their dtypes already: it would make equal dtypes differ."""
    if not torch._C._is_any_autocast_enabled() or not under_autocast(device):
        return _NOTHING
    # Compilers know the long way.
    return torch.autocast(device.type, enabled=False) if torch.compiler.is_compiling() else _suspended(device.type)
