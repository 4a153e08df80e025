"""A program with some of its tensors bound: what is left of a call that a layer or a structure makes repeatedly."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from insum_nn.compiler.runtime.dispatch import Ready, Spec, broadcast, call_kind, run_ready
from insum_nn.compiler.runtime.modes import is_plain, is_plain_eager
from insum_nn.compiler.runtime.steps.watch import watch
from insum_nn.compiler.runtime.unsized_call import Call, nothing_printed
from insum_nn.tensor_cache import insert

__all__ = ["BoundProgram", "Shape"]

Shape = Sequence[int | None]
# Shapes of the other tensors whose calls are remembered.
_LIMIT = 64


class _Program(Protocol):
    def __call__(self, *, tensors: Mapping[str, Tensor], out_shape: Shape) -> Tensor: ...

    @property
    def spec(self) -> Spec: ...

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def writing(self, dtype: torch.dtype) -> _Program: ...


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
        self.program, self._spec, self._sizes = program, program.spec, program.sizes
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
        self._plain = all(map(is_plain, self.tensors.values()))
        self._ready: dict[Hashable, Ready] = {}
        self._call: Call = nothing_printed
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
            ready, plain = self._ready.get(key), self._plain
            if ready is not None and ready.holds(ordered):
                return ready.run(ordered, initial)
        elif not plain:
            plain = self._plain and is_plain_eager(*others, initial) and not torch._C._is_any_autocast_enabled()
        spec = self._spec
        if plain:
            result = self._call(ordered, initial, self._sizes, out_shape)
            printed = bool(spec.calls)
            if result is None and printed:
                result = self._printed(ordered, initial, out_shape)
            if result is not None:
                return result
            extents = spec.agree(ordered, self._sizes, out_shape)
            if extents is not None and (initial is None or initial.shape == extents.output[-initial.ndim :]):
                result, ready = run_ready(spec, ordered, broadcast(initial, extents), extents)
                # What was printed at this first call runs the others.
                kept = (printed or not spec.calls) and (initial is None or initial.shape == extents.output)
                if kept and key is not None and ready is not None:
                    insert(self._ready, key, self._own(ready), _LIMIT)
                return result
        return self.program(tensors=self.named(others, initial), out_shape=out_shape)

    def _printed(self, ordered: Sequence[Tensor], initial: Tensor | None, out_shape: Shape) -> Tensor | None:
        """Run by what was printed for tensors of these kinds, where that is not what ran last."""
        found = self._spec.calls.get(call_kind(self._spec, ordered))
        if found is None or found.call is self._call:
            return None
        # It looks at all that may differ in later calls.
        self._call = found.call
        return found.call(ordered, initial, self._sizes, out_shape)

    def run_plain(self, others: Sequence[Tensor], out_shape: Shape, initial: Tensor | None = None) -> Tensor:
        """Run the statement on plain tensors in eager mode without autocast, where no gradients are recorded."""
        ordered = list(self._template)
        for place, tensor in zip(self._places, others, strict=True):
            ordered[place] = tensor
        result = None if watch.calls is not None else self._call(ordered, initial, self._sizes, out_shape)
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
        named = {**self.tensors, **dict(zip(self.names, others, strict=True))}
        if initial is not None:
            named[self._spec.statement.output.name] = initial
        return named

    def _own(self, ready: Ready) -> Ready:
        """The same, with no look at the tensors that are bound here."""
        return replace(ready, read=tuple([each for each in ready.read if each[0] in self._places]))
