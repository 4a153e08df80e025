"""What is kept of tensors, how it is forgotten, and until when it holds.

Orders, offsets and readings of an index tensor are kept for as long as it lives and its version stays. A write that
torch does not count leaves the version as it is; a request to read everything again first forgets what is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from insum_nn.locks import new_lock

__all__ = ["TensorCache", "builder_versions", "forget", "forgets", "insert", "same_view", "same_views", "unwritten"]

Built = TypeVar("Built")
K = TypeVar("K")
V = TypeVar("V")
Forget = Callable[[Tensor], None]
_forgetters: list[Forget] = []
builder_versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}
"""Versions at which the tensors of builders were first met, by their identity; see `unwritten`."""
# For each tensor of which views were met: an alias of each view, by what the view shows. `_VIEWS_LIMIT` of each tensor.
_views: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_VIEWS_LIMIT = 8
_caches: weakref.WeakSet[TensorCache[Any]] = weakref.WeakSet()
_lock = new_lock()


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
            for cache in tuple(_caches):
                cache.forget(each)


def insert(cache: dict[K, V], key: K, value: V, limit: int) -> None:
    """Put a value into a bounded dictionary, whose oldest entry leaves first; several threads may do so at once."""
    with _lock:
        while len(cache) >= limit:
            del cache[next(iter(cache))]
        cache[key] = value


class TensorCache(Generic[Built]):
    """A bounded cache whose keys are tensors, by identity and version, held weakly.

    What was built leaves when one of its tensors dies or is written to, or as the oldest one. Writes that torch does
    not count (through NumPy, or `.data`) are not seen here either; `forget` is for them. Of inference tensors, which
    have no version, nothing is kept.

    >>> cache, edges = TensorCache[object](limit=2), torch.tensor([[0], [1]])
    >>> first = cache.get([edges], "key", object)
    >>> first is cache.get([edges], "key", object)
    True
    >>> _ = edges.add_(1)
    >>> first is cache.get([edges], "key", object)
    False
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[Hashable, tuple[tuple[weakref.ref[Tensor], ...], Built]] = {}
        self._lock = new_lock()
        _caches.add(self)

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._known.clear()

    def forget(self, tensor: Tensor) -> None:
        """Forget what was built from a tensor."""
        with self._lock:
            for key, (refs, _) in tuple(self._known.items()):
                if any(ref() is tensor for ref in refs):
                    self._known.pop(key, None)

    def of(self, tensor: Tensor, key: Hashable = None) -> Built | None:
        """What was built of one tensor, if it is kept; `find` in the time of a call that does nothing else."""
        try:
            found = self._known.get((key, id(tensor), tensor._version))
        except RuntimeError:
            # An inference tensor has no version.
            return None
        return found[1] if found is not None and found[0][0]() is tensor else None

    def find(self, tensors: Sequence[Tensor], key: Hashable = None) -> Built | None:
        """What was built of these tensors, if it is kept."""
        # `_identity`, written out: operators come here at every call.
        whole: tuple[Hashable, ...] = (key,)
        for tensor in tensors:
            if tensor.is_inference():
                return None
            whole = (*whole, id(tensor), tensor._version)
        found = self._known.get(whole)
        if found is None:
            return None
        refs, built = found
        for ref, tensor in zip(refs, tensors, strict=True):
            # The identifier of a tensor that was freed may have been reused.
            if ref() is not tensor:
                return None
        return built

    def keep(self, tensors: Sequence[Tensor], key: Hashable, built: Built) -> Built:
        """Keep what was built of these tensors."""
        # `_identity`, written out: new structures come here several times each.
        whole: tuple[Hashable, ...] = (key,)
        for tensor in tensors:
            if tensor.is_inference():
                return built
            whole = (*whole, id(tensor), tensor._version)
        # What a tensor's death calls must not keep the cache.
        owner = weakref.ref(self)

        def gone(_: object) -> None:
            cache = owner()
            if cache is not None:
                cache._known.pop(whole, None)

        refs: list[weakref.ref[Tensor]] = []
        for tensor in tensors:
            refs.append(weakref.ref(tensor, gone))
        with self._lock:
            while len(self._known) >= self.limit:
                del self._known[next(iter(self._known))]
            self._known[whole] = tuple(refs), built
        return built

    def get(self, tensors: Sequence[Tensor], key: Hashable, build: Callable[[], Built]) -> Built:
        """What `build` made of these tensors: now, or when they were last seen."""
        found = self.find(tensors, key)
        return self.keep(tensors, key, build()) if found is None else found


def same_view(tensor: Tensor) -> Tensor:
    """The same tensor object for every view of the same elements; a tensor that is no view is returned as it is.

    `row, col = edge_index` makes two new objects at each call of a layer. What is kept of a tensor is kept by the
    object, so each statement that reads views takes these instead. They share the count of writes with what is viewed,
    and live as long as that does.

    >>> edges = torch.tensor([[0, 1], [1, 2]])
    >>> same_view(edges[0]) is same_view(edges[0]), same_view(edges[0]) is same_view(edges[1])
    (True, False)
    """
    # Dynamo keeps no tensors.
    base = None if torch.compiler.is_compiling() else tensor._base
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
        # A view would keep what it is a view of.
        alias = tensor.detach()
        insert(known, key, alias, _VIEWS_LIMIT)
    return alias


def same_views(named: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a call, with those of some names as `same_view` has them: what is kept of tensors is found."""
    found: dict[str, Tensor] | None = None
    for name in names:
        tensor = named.get(name)
        if type(tensor) is Tensor and tensor._base is not None:
            found = dict(named) if found is None else found
            found[name] = same_view(tensor)
    return named if found is None else found


def unwritten(tensor: Tensor) -> bool:
    """Whether a builder's tensor is as it was when this was first asked; of inference tensors nothing is known.

    A builder calls this before it returns its tensors, so that every later write counts.
    """
    if tensor.is_inference():
        return True
    key = id(tensor)
    found = builder_versions.get(key)
    if found is not None and found[0]() is tensor:
        return found[1] == tensor._version

    def gone(ref: weakref.ref[Tensor]) -> None:
        if (kept := builder_versions.get(key)) is not None and kept[0] is ref:
            del builder_versions[key]

    builder_versions[key] = weakref.ref(tensor, gone), tensor._version
    return True
