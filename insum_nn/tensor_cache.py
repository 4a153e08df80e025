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
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack

from insum_nn.locks import new_lock

__all__ = ["Kept", "TensorCache", "forget", "insert", "kept", "kept_of", "same_rows", "same_view", "same_views"]
__all__ += ["unwritten"]

Built = TypeVar("Built")
K = TypeVar("K")
V = TypeVar("V")
# Views that are kept of each tensor.
_VIEWS_LIMIT = 8
_caches: weakref.WeakSet[TensorCache[Any]] = weakref.WeakSet()
_lock = new_lock()


class Kept(weakref.ref[Tensor]):
    """What is kept of one tensor, to which it is a weak reference.

    Attributes:
        key: the tensor's identity.
        first: the version at which it was met; see `unwritten`. `None`: it has none.
        version: the version at which its entries were read; -1: they were not.
        low, high: smallest and largest entry; 0 and -1 without entries.
        ascending: none is missing, and none is smaller than the one before it.
        orders: its entries in the order of their values, by number of rows.
        verified: facts of it that were verified, and of what.
        views: an alias of each view of it, by what the view shows.
    """

    __slots__ = ("ascending", "first", "high", "key", "low", "orders", "verified", "version", "views")
    key: int
    first: int | None
    version: int
    low: int
    high: int
    ascending: bool
    orders: dict[int, tuple[int, int, Tensor]]
    verified: tuple[object, list[weakref.ref[Tensor]], Any] | None
    views: dict[Hashable, Tensor]

    def read(self, version: int, low: int, high: int, ascending: bool) -> Kept:
        """Note what was read of the entries at a version."""
        self.low, self.high, self.ascending = low, high, ascending and low >= 0
        self.orders, self.version = {}, version
        return self


kept: dict[int, Kept] = {}
"""By the identity of a tensor; printed calls look here, and compare tensor and version."""


def kept_of(tensor: Tensor) -> Kept:
    """Return what is kept of a tensor; of inference tensors, which have no version, nothing is from call to call."""
    key = id(tensor)
    found = kept.get(key)
    if found is not None and found() is tensor:
        return found
    made = Kept(tensor, _gone)
    made.key, made.first, made.version, made.orders, made.verified, made.views = key, None, -1, {}, None, {}
    if not tensor.is_inference():
        made.first = tensor._version
        kept[key] = made
    return made


def _gone(ref: Any) -> None:
    if kept.get(ref.key) is ref:
        del kept[ref.key]


def forget(tensors: Iterable[Tensor]) -> None:
    """Drop everything that is kept of these tensors, and of all views of what they are views of."""
    for tensor in tensors:
        known = kept.get(id(tensor if tensor._base is None else tensor._base))
        for each in dict.fromkeys((tensor, *(known.views.values() if known else ()))):
            if (own := kept.get(id(each))) is not None:
                own.version, own.verified = -1, None
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
        _caches.add(self)

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def forget(self, tensor: Tensor) -> None:
        """Forget what was built from a tensor."""
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
        # `insert`, written out.
        with _lock:
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
    known = kept_of(base).views
    # The storage counts too: `base.set_()` gives it another one, and earlier views keep theirs.
    storage = tensor.untyped_storage()._cdata
    key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    alias = known.get(key)
    if alias is None:
        # A view would keep what it is a view of.
        alias = tensor.detach()
        insert(known, key, alias, _VIEWS_LIMIT)
    return alias


def same_rows(tensor: Tensor) -> list[Tensor]:
    """The rows of a tensor, the same objects at every call; see `same_view`.

    >>> edges = torch.tensor([[0, 1], [1, 2]])
    >>> same_rows(edges)[0] is same_view(edges[0])
    True
    """
    plain = type(tensor) is Tensor and not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0)
    if not plain or peek_interpreter_stack():
        # A row that is made under a transform of torch.func belongs to it.
        return [same_view(row) for row in tensor.unbind(0)]
    known = kept_of(tensor if tensor._base is None else tensor._base).views
    storage, offset, (step, *strides) = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
    rest = tensor.shape[1:], tuple(strides), tensor.dtype
    rows: list[Tensor] = []
    for number in range(tensor.shape[0]):
        # The key of `same_view`, without the view.
        key = storage, offset + number * step, *rest
        row = known.get(key)
        if row is None:
            row = tensor.select(0, number).detach()
            insert(known, key, row, _VIEWS_LIMIT)
        rows.append(row)
    return rows


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
    first = kept_of(tensor).first
    return first is None or first == tensor._version
