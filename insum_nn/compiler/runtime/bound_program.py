"""A program with some of its tensors bound: what is left of a call that a layer or a structure makes repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from insum_nn.compiler.runtime.dispatch import Spec, dtype_of
from insum_nn.compiler.runtime.modes import is_plain, is_plain_eager
from insum_nn.compiler.runtime.steps.watch import watch

__all__ = ["BoundProgram", "Shape"]

Shape = Sequence[int | None]


class _Program(Protocol):
    def __call__(self, *, tensors: Mapping[str, Tensor], out_shape: Shape) -> Tensor: ...

    @property
    def spec(self) -> Spec: ...

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def writing(self, dtype: torch.dtype) -> _Program: ...


class BoundProgram:
    """A program with some of its tensors bound: a call takes the others by position, and records no gradients.

    That nothing writes to the bound tensors is the caller's promise.

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
        self._written: dict[torch.dtype, BoundProgram] = {}

    def __call__(self, *others: Tensor, out_shape: Shape, initial: Tensor | None = None) -> Tensor:
        """Run the statement.

        Args:
            *others: in the order of `names`.
            out_shape: the output's shape, a tuple; `None` entries are inferred.
            initial: the initial value; it may broadcast to the output.
        """
        with torch.no_grad():
            if self._plain and is_plain_eager(*others, initial) and not torch._C._is_any_autocast_enabled():
                return self.run_plain(others, out_shape, initial)
            return self.program(tensors=self.named(others, initial), out_shape=out_shape)

    def run_plain(self, others: Sequence[Tensor], out_shape: Shape, initial: Tensor | None = None) -> Tensor:
        """Run the statement on plain tensors in eager mode without autocast."""
        ordered = list(self._template)
        for place, tensor in zip(self._places, others, strict=True):
            ordered[place] = tensor
        calls = self._spec.calls
        # `call_kind`, written out: a layer calls several of these.
        kind = (ordered[0].is_cuda, *map(dtype_of, ordered))
        printed = calls.get(kind) if calls and watch.calls is None else None
        result = None if printed is None else printed.call(ordered, initial, self._sizes, out_shape)
        if result is not None:
            return result
        with torch.no_grad():
            return self.program(tensors=self.named(others, initial), out_shape=out_shape)

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
