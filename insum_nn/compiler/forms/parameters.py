"""The parameters of a kernel: what each stands for, its number in a call, and what of the memory layout matters."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from insum_nn.compiler.ir.nodes import OPERATIONS, Const, Expr, Op, Size
from insum_nn.compiler.lang.bind import Bound, Extents

__all__ = ["Argument", "Launcher", "Numbers", "Strides", "initial_steps", "place_arguments", "vector_steps"]


@dataclass(frozen=True, slots=True)
class Argument:
    """A kernel's parameter: `kind` and what it belongs to (`tensor` pointer, `stride`, `dim`, `extent`, ...)."""

    kind: str
    name: str = ""
    axis: int = -1


def vector_steps(
    arguments: Sequence[Argument], values: Sequence[int | None], columns: Container[str | None]
) -> tuple[int, ...]:
    """The places of arguments that are steps along an axis, or a length of rows, and multiples of 16.

    Args:
        arguments: the parameters.
        values: their numbers.
        columns: indices whose extents are lengths of rows.
    """
    return tuple(
        place
        for place, (argument, value) in enumerate(zip(arguments, values, strict=True))
        if value is not None
        and value % 16 == 0
        and (
            argument.kind.endswith("stride")
            or (argument.kind == "dim" and (argument.name == "@out" or argument.axis > 0))
            or (argument.kind == "extent" and argument.name in columns)
        )
    )


@dataclass(frozen=True, slots=True)
class Strides:
    """How tensors lie in memory, as far as a kernel's text depends on it.

    Attributes:
        contiguous: for each tensor of the layout.
        wide: some offset needs 64 bits.
        split: the owner's rows are divided among programs.
        start: how the initial value is addressed; see `initial_steps`.
    """

    contiguous: tuple[bool, ...]
    wide: bool = False
    split: bool = False
    start: tuple[str, ...] | None = None


def initial_steps(initial: Tensor | None) -> tuple[str, ...] | None:
    """How an initial value is addressed: `None` as the output, else per axis a known step, or "" for an argument."""
    if initial is None or initial.is_contiguous():
        return None
    return tuple(_step(extent, step) for extent, step in zip(initial.shape, initial.stride(), strict=True))


def _step(extent: int, step: int) -> str:
    return "0" if extent == 1 or step == 0 else "1" if step == 1 else ""


class Numbers:
    """The integer parameters of a kernel for one set of shapes.

    Args:
        bound: the statement.
        tensors: in the layout's order.
        initial: the initial value.
        extents: the sizes of the call.
        rows: programs' ranges of rows, where a kernel has them.
    """

    def __init__(
        self, bound: Bound, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents, rows: int | None
    ) -> None:
        self.tensors = dict(zip(bound.layout.tensors, tensors, strict=True))
        self.sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
        self.initial = initial
        self.output = extents.output
        self.rows = rows

    def value(self, argument: Argument) -> int | None:
        """A parameter's number; `None`: it is none."""
        kind, name, axis = argument.kind, argument.name, argument.axis
        if kind == "extent":
            return self.sizes[name]
        if kind == "stride":
            return self.tensors[name].stride(axis)
        if kind == "start_stride":
            assert self.initial is not None
            return self.initial.stride(axis)
        if kind == "dim":
            return self.output[axis] if name == "@out" else self.tensors[name].shape[axis]
        return self.rows if kind == "rows" else None

    def evaluate(self, expr: Expr, sizes: Mapping[str, Argument]) -> int:
        """The number of an expression of sizes, such as the number of programs."""
        if isinstance(expr, Const):
            return int(expr.value)
        if isinstance(expr, Size):
            found = self.value(sizes[expr.name])
            assert found is not None
            return found
        assert isinstance(expr, Op)
        # It may be symbolic, and then must stay so.
        found = OPERATIONS[expr.name].evaluate(*(self.evaluate(arg, sizes) for arg in expr.args))
        return found  # type: ignore[no-any-return]


class Launcher(Protocol):
    """What launches a kernel on a list of arguments."""

    @property
    def grid(self) -> int: ...

    def __call__(self, arguments: list[Any]) -> None: ...

    def compile_ahead(self) -> None: ...


def place_arguments(
    arguments: Sequence[Argument], numbers: Numbers, names: Sequence[str]
) -> tuple[tuple[Any, ...], tuple[tuple[int, int], ...], tuple[tuple[int, str, int], ...]]:
    """Return a kernel's arguments with its numbers, and where its tensors and its other pointers go; see `Kernel`."""
    values = tuple(numbers.value(argument) for argument in arguments)
    inputs: list[tuple[int, int]] = []
    others: list[tuple[int, str, int]] = []
    for place, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        if argument.kind == "tensor":
            inputs.append((place, names.index(argument.name)))
        elif value is None:
            position = int(argument.name) if argument.kind == "additional" else -1
            others.append((place, argument.kind, names.index(argument.name) if argument.name in names else position))
    return values, tuple(inputs), tuple(others)
