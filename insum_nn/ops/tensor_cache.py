"""What is built from tensors, kept for as long as they live and are not written to."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

from torch import Tensor

from insum_nn.kept import forgets

__all__ = ["TensorCache"]

Built = TypeVar("Built")


_caches: weakref.WeakSet[TensorCache] = weakref.WeakSet()


@forgets
def _forget(tensor: Tensor) -> None:
    for cache in tuple(_caches):
        cache.forget(tensor)


class TensorCache:
    """A bounded cache whose keys are tensors, by identity and version, held weakly.

    What was built leaves when one of its tensors dies or is written to, or when it was not used for longest. Writes
    that torch does not count (through NumPy, or `.data`) are not seen here either; `insum_nn.kept.forget` is for them.

    >>> import torch
    >>> cache, edges = TensorCache(limit=2), torch.tensor([[0], [1]])
    >>> first = cache.get([edges], "key", lambda: object())
    >>> first is cache.get([edges], "key", lambda: object())
    True
    >>> _ = edges.add_(1)
    >>> first is cache.get([edges], "key", lambda: object())
    False
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: OrderedDict[Hashable, tuple[tuple[weakref.ref[Tensor], ...], object]] = OrderedDict()
        self._lock = threading.RLock()
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
            for key in [key for key, (refs, _) in self._known.items() if any(ref() is tensor for ref in refs)]:
                del self._known[key]

    def get(self, tensors: Sequence[Tensor], key: Hashable, build: Callable[[], Built]) -> Built:
        """What `build` made of these tensors: now, or when they were last seen."""
        # Loops rather than generators: layers ask at every call.
        parts: list[Hashable] = [key]
        for tensor in tensors:
            if tensor.is_inference():
                # Inference tensors have no version, so it is unknown whether they were written to.
                return build()
            parts += (id(tensor), tensor._version)
        whole = tuple(parts)
        with self._lock:
            found = self._known.get(whole)
            if found is not None and all(ref() is tensor for ref, tensor in zip(found[0], tensors, strict=True)):
                self._known.move_to_end(whole)
                return cast("Built", found[1])
        built = build()
        known = weakref.ref(self)

        def forget(_: object) -> None:
            cache = known()
            if cache is not None:
                cache._known.pop(whole, None)

        with self._lock:
            self._known[whole] = (tuple(weakref.ref(tensor, forget) for tensor in tensors), built)
            self._known.move_to_end(whole)
            while len(self._known) > self.limit:
                self._known.popitem(last=False)
        return built
