"""What is kept of tensors, how it is forgotten, and until when it holds.

Orders, offsets and readings of an index tensor are kept for as long as it lives and its version stays. A write that
torch does not count leaves the version as it is; a request to read everything again first forgets what is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["forget", "forgets", "same_view", "unwritten"]

Forget = Callable[[Tensor], None]
_forgetters: list[Forget] = []
# Versions at which the tensors of builders were first met.
_met: dict[int, tuple[weakref.ref[Tensor], int]] = {}
# For each tensor of which views were met: an alias of each view, by what the view shows. `_VIEWS_LIMIT` of each tensor.
_views: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_VIEWS_LIMIT = 8


def forgets(forgetter: Forget) -> Forget:
    """Register what drops everything that is kept of one tensor."""
    _forgetters.append(forgetter)
    return forgetter


def forget(tensors: Iterable[Tensor]) -> None:
    """Drop everything that is kept of these tensors, and of all views of what they are views of."""
    for tensor in tensors:
        base = tensor if tensor._base is None else tensor._base
        aliases: dict[Hashable, Tensor] = _views.get(base) or {}
        for each in dict.fromkeys((tensor, *aliases.values())):
            for forgetter in _forgetters:
                forgetter(each)


def same_view(tensor: Tensor) -> Tensor:
    """The same tensor object for every view of the same elements; a tensor that is no view is returned as it is.

    `row, col = edge_index` makes two new objects at each call of a layer. What is kept of a tensor is kept by the
    object, so each statement that reads views takes these instead. They share the count of writes with what is viewed,
    and live as long as that does.

    >>> edges = torch.tensor([[0, 1], [1, 2]])
    >>> same_view(edges[0]) is same_view(edges[0]), same_view(edges[0]) is same_view(edges[1])
    (True, False)
    """
    base = tensor._base
    if base is None or type(tensor) is not Tensor or torch._C._len_torch_dispatch_stack() > 0:
        return tensor
    if is_functorch_wrapped_tensor(base):
        return tensor
    known: dict[Hashable, Tensor] | None = _views.get(base)
    if known is None:
        known = _views[base] = {}
    # The storage counts too: `base.set_()` gives it another one, and earlier views keep theirs.
    storage = tensor.untyped_storage()._cdata
    key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    alias = known.get(key)
    if alias is None:
        while len(known) >= _VIEWS_LIMIT:
            del known[next(iter(known))]
        # A view would keep what it is a view of.
        alias = known[key] = tensor.detach()
    return alias


def unwritten(tensor: Tensor) -> bool:
    """Whether a builder's tensor is as it was when this was first asked; of inference tensors nothing is known.

    A builder calls this before it returns its tensors, so that every later write counts.
    """
    if tensor.is_inference():
        return True
    key = id(tensor)
    found = _met.get(key)
    if found is not None and found[0]() is tensor:
        return found[1] == tensor._version

    def gone(ref: weakref.ref[Tensor]) -> None:
        if (kept := _met.get(key)) is not None and kept[0] is ref:
            del _met[key]

    _met[key] = weakref.ref(tensor, gone), tensor._version
    return True
