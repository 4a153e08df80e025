"""A program some of whose tensors stay: what is left of a call when a layer or a structure makes it again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from insum_nn.compiler.autograd import recorded
from insum_nn.compiler.call import Key, Seen, call_key, keep

__all__ = ["Given"]

Shape = Sequence[int | None]
# Shapes of the other tensors whose calls are remembered.
_LIMIT = 64
_PLAIN = (Tensor, torch.nn.Parameter)


class _Program(Protocol):
    def __call__(self, *, tensors: Mapping[str, Tensor], out_shape: Shape) -> Tensor: ...

    def seen(self, ordered: Sequence[Tensor], out_shape: Shape | None) -> Seen | None: ...


class Given:
    """A program with some of its tensors given: a call takes the others by position, and records no gradients.

    What is checked of a call depends on the shapes, dtypes and devices of the others, and is remembered by them; so a
    call that was made before costs the host little more than the launch of its kernel. That nobody writes to the given
    tensors is the caller's promise.

    Args:
        program: the statement's program.
        order: names of its tensors, in its order.
        tensors: those given, by name.

    Attributes:
        names: the tensors that a call takes, in this order.
    """

    def __init__(self, program: _Program, order: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self.program = program
        self.tensors = dict(tensors)
        self.names = tuple(name for name in order if name not in tensors)
        self._order = tuple(order)
        self._template: list[Any] = [tensors.get(name) for name in order]
        self._places = tuple(order.index(name) for name in self.names)
        self._seen: dict[Key, Seen] = {}

    def __call__(self, *others: Tensor, out_shape: Shape) -> Tensor:
        """Run the statement.

        Args:
            *others: in the order of `names`.
            out_shape: the output's shape, a tuple; `None` entries are inferred.
        """
        key = (call_key(others, None), out_shape)
        ordered = list(self._template)
        for place, tensor in zip(self._places, others, strict=True):
            ordered[place] = tensor
        plain = all([type(tensor) in _PLAIN for tensor in others])
        seen = self._seen.get(key) if plain else None
        with torch.no_grad():
            if seen is not None and not recorded(ordered, None) and not torch._C._is_any_autocast_enabled():
                if seen.ready is not None and seen.holds(ordered):
                    return seen.ready.run(ordered, None)
            result = self.program(tensors=dict(zip(self._order, ordered, strict=True)), out_shape=out_shape)
        seen = self.program.seen(ordered, out_shape)
        if plain and seen is not None and seen.ready is not None:
            keep(self._seen, key, seen, _LIMIT)
        return result
