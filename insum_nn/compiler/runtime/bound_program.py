"""A program with some of its tensors bound: what is left of a call that a layer or a structure makes repeatedly."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from insum_nn.compiler.runtime.arguments import call_key
from insum_nn.compiler.runtime.dispatch import CheckedCall, Ready, Spec, broadcast, call_kind
from insum_nn.compiler.runtime.modes import is_plain_eager
from insum_nn.compiler.runtime.steps.watch import watch
from insum_nn.compiler.runtime.unsized_call import Call
from insum_nn.tensor_cache import insert

__all__ = ["BoundProgram", "Shape"]

Shape = Sequence[int | None]
# Shapes of the other tensors whose calls are remembered.
_LIMIT = 64


class _Program(Protocol):
    def __call__(self, *, tensors: Mapping[str, Tensor], out_shape: Shape) -> Tensor: ...

    @property
    def spec(self) -> Spec: ...

    def writing(self, dtype: torch.dtype) -> _Program: ...

    def checked_call(self, named: Mapping[str, Tensor], out_shape: Shape | None) -> CheckedCall | None: ...


class BoundProgram:
    """A program with some of its tensors bound: a call takes the others by position, and records no gradients.

    What is checked of a call depends on the shapes, dtypes and devices of the others, and is remembered by them; so a
    call that was made before takes the CPU little more than the launch of its kernel. That nothing writes to the bound
    tensors is the caller's promise.

    Args:
        program: the statement's program.
        tensors: those that are bound, by name.

    Attributes:
        names: the tensors that a call takes, in this order.
    """

    def __init__(self, program: _Program, tensors: Mapping[str, Tensor]) -> None:
        self.program, self._spec = program, program.spec
        self.tensors = dict(tensors)
        # One is made for each new structure: a loop, and not a comprehension for each list.
        names: list[str] = []
        self._template: list[Any] = []
        self._places: list[int] = []
        for place, name in enumerate(self._spec.layout.tensors):
            if name not in tensors:
                names.append(name)
                self._places.append(place)
            self._template.append(tensors.get(name))
        self.names = tuple(names)
        self._checked: dict[Hashable, CheckedCall] = {}
        self._ready: dict[Hashable, Ready] = {}
        self._call: Call | None = None
        self._written: dict[torch.dtype, BoundProgram] = {}

    def __call__(
        self,
        *others: Tensor,
        out_shape: Shape,
        initial: Tensor | None = None,
        key: Hashable | None = None,
        plain: bool = False,
    ) -> Tensor:
        """Run the statement.

        Args:
            *others: in the order of `names`.
            out_shape: the output's shape, a tuple; `None` entries are inferred.
            initial: the initial value; it may broadcast to the output.
            key: what the caller has that decides shapes, dtypes and devices of all these, as `call_key` does: a
                promise too that they are plain tensors in eager mode. It spares the checks of each.
            plain: the same promise without a key.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(*others, out_shape=out_shape, initial=initial, key=key, plain=plain)
        if watch.calls is not None:
            return self.program(tensors=self.named(others, initial), out_shape=out_shape)
        ordered = list(self._template)
        for place, tensor in zip(self._places, others, strict=True):
            ordered[place] = tensor
        if key is not None:
            ready, plain = self._ready.get(key), True
            if ready is not None and ready.holds(ordered):
                return ready.run(ordered, initial)
        elif not plain:
            plain = is_plain_eager(*others, initial) and not torch._C._is_any_autocast_enabled()
        spec = self._spec
        if plain:
            call = self._call
            if call is not None and (result := call(ordered, initial, out_shape)) is not None:
                return result
            found = spec.calls.get(call_kind(spec, ordered)) if spec.calls else None
            if found is not None and found.call is not None and found.call is not call:
                self._call = found.call
                result = found.call(ordered, initial, out_shape)
                if result is not None:
                    return result
        if key is None and plain:
            key = (call_key(others, initial), out_shape)
        checked = self._checked.get(key)
        if checked is None:
            return self._first(ordered, out_shape, initial, key)
        result = checked.run(spec, ordered, initial if initial is None else broadcast(initial, checked.extents))
        if checked.ready is not None and (initial is None or initial.shape == checked.extents.output):
            insert(self._ready, key, self._own(checked.ready), _LIMIT)
        return result

    def run_plain(self, others: Sequence[Tensor], out_shape: Shape, initial: Tensor | None = None) -> Tensor:
        """Run the statement on plain tensors in eager mode without autocast, where no gradients are recorded."""
        ordered = list(self._template)
        for place, tensor in zip(self._places, others, strict=True):
            ordered[place] = tensor
        call = self._call
        if call is None and (calls := self._spec.calls):
            # Another structure's, which checks all that may differ.
            found = calls.get(call_kind(self._spec, ordered))
            call = self._call = None if found is None else found.call
        if call is not None and watch.calls is None:
            result = call(ordered, initial, out_shape)
            if result is not None:
                return result
        return self(*others, out_shape=out_shape, initial=initial, plain=True)

    def writing(self, dtype: torch.dtype) -> BoundProgram:
        """Return the same with an output of another dtype, in which a sum in float32 is written as it is."""
        found = self._written.get(dtype)
        if found is None:
            found = self._written[dtype] = BoundProgram(self.program.writing(dtype), self.tensors)
        return found

    def named(self, others: Sequence[Tensor], initial: Tensor | None) -> dict[str, Tensor]:
        """Return the tensors of a call by name: of the program's own call, which follows every mode."""
        return self._with_initial({**self.tensors, **dict(zip(self.names, others, strict=True))}, initial)

    def _with_initial(self, named: dict[str, Tensor], initial: Tensor | None) -> dict[str, Tensor]:
        if initial is not None:
            named[self._spec.statement.output.name] = initial
        return named

    def _own(self, ready: Ready) -> Ready:
        """The same, with no look at the tensors that are bound here."""
        return replace(ready, read=tuple([each for each in ready.read if each[0] in self._places]))

    def _first(
        self, ordered: Sequence[Tensor], out_shape: Shape, initial: Tensor | None, key: Hashable | None
    ) -> Tensor:
        """A call that is not remembered here."""
        named = self._with_initial(dict(zip(self._spec.layout.tensors, ordered, strict=True)), initial)
        # The program may know the call from tensors of others: each structure has a `BoundProgram` of its own.
        checked = None if key is None else self.program.checked_call(named, out_shape)
        if key is None or checked is None:
            return self.program(tensors=named, out_shape=out_shape)
        insert(self._checked, key, checked, _LIMIT)
        return checked.run(self._spec, ordered, broadcast(initial, checked.extents))
