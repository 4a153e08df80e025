"""The parameters of a kernel: what each stands for, its number in a call, and what of the memory layout matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from torch import Tensor

from insum_nn.compiler.ir.nodes import OPERATIONS, Const, Expr, Op, Size
from insum_nn.compiler.lang.bind import Bound, Extents

__all__ = ["Argument", "Launcher", "Numbers", "Strides", "initial_steps"]


@dataclass(frozen=True, slots=True)
class Argument:
    """A kernel's parameter: `kind` and what it belongs to (`tensor` pointer, `stride`, `dim`, `extent`, ...)."""

    kind: str
    name: str = ""
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Strides:
    """How tensors lie in memory, as far as a kernel's text depends on it.

    Attributes:
        contiguous: for each tensor of the layout.
        wide: some offset needs 64 bits.
        split: rows are divided among programs.
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
    """How the integer parameters of a kernel, and the number of its programs, follow from the sizes of a call.

    Sizes may be symbolic, and then what is made of them stays so.

    Args:
        bound: the statement.
        arguments: the kernel's parameters.
        grid: the number of its programs, of sizes.
        sizes: what these stand for.

    Attributes:
        inputs: the tensors among the parameters: their places, and their positions among the statement's.
        others: the other pointers: place, kind, and the position of a tensor or of a further output.
    """

    def __init__(self, bound: Bound, arguments: Sequence[Argument], grid: Expr, sizes: Mapping[str, Argument]) -> None:
        layout = bound.layout
        names, indices = layout.tensors, layout.indices
        inputs: list[tuple[int, int]] = []
        others: list[tuple[int, str, int]] = []
        # Places of numbers by where they are from; sizes of the grid stand behind the parameters.
        self._extents: list[tuple[int, int]] = []
        self._output: list[tuple[int, int]] = []
        self._shapes: list[tuple[int, int, int]] = []
        self._steps: list[tuple[int, int, int]] = []
        self._initial: list[tuple[int, int]] = []
        self._rows: list[int] = []
        # Steps along an axis, or lengths of rows: where they are whole vectors, rows are read as vectors.
        columns = {*layout.output_plain[-1:], *dict(bound.static)}
        vectors: list[int] = []
        for place, argument in enumerate((*arguments, *sizes.values())):
            kind, name, axis = argument.kind, argument.name, argument.axis
            along = False
            if kind == "tensor":
                inputs.append((place, names.index(name)))
            elif kind == "extent":
                self._extents.append((place, indices.index(name)))
                along = name in columns
            elif kind == "stride":
                self._steps.append((place, names.index(name), axis))
                along = True
            elif kind == "start_stride":
                self._initial.append((place, axis))
                along = True
            elif kind == "dim" and name == "@out":
                self._output.append((place, axis))
                along = True
            elif kind == "dim":
                self._shapes.append((place, names.index(name), axis))
                along = axis > 0
            elif kind == "rows":
                self._rows.append(place)
            else:
                position = int(name) if kind == "additional" else -1
                others.append((place, kind, names.index(name) if name in names else position))
            if along and place < len(arguments):
                vectors.append(place)
        self.inputs, self.others = tuple(inputs), tuple(others)
        self._vectors = tuple(vectors)
        self._count = len(arguments)
        self._all = self._count + len(sizes)
        self._grid = _computed(grid, {name: place for place, name in enumerate(sizes, self._count)})

    def of(
        self, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents, rows: int | None
    ) -> tuple[list[Any], int]:
        """Return the parameters of a call with its numbers filled in, and the number of programs.

        Args:
            tensors: in the layout's order.
            initial: the initial value.
            extents: the sizes of the call.
            rows: programs' ranges of rows, where a kernel has them.
        """
        found: list[Any] = [None] * self._all
        for place, position in self._extents:
            found[place] = extents.indices[position]
        for place, axis in self._output:
            found[place] = extents.output[axis]
        for place, position, axis in self._shapes:
            found[place] = tensors[position].shape[axis]
        for place, position, axis in self._steps:
            found[place] = tensors[position].stride(axis)
        for place in self._rows:
            found[place] = rows
        if self._initial:
            assert initial is not None
            for place, axis in self._initial:
                found[place] = initial.stride(axis)
        programs = self._grid(found)
        del found[self._count :]
        return found, programs

    def even(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the places of steps along an axis, and of lengths of rows, that are multiples of 16."""
        return tuple([place for place in self._vectors if not values[place] % 16])


def _computed(expr: Expr, places: Mapping[str, int]) -> Callable[[Sequence[Any]], Any]:
    """What computes an expression of sizes from the places that hold them."""
    if isinstance(expr, Const):
        value = int(expr.value)
        return lambda _: value
    if isinstance(expr, Size):
        return itemgetter(places[expr.name])
    assert isinstance(expr, Op)
    evaluate, args = OPERATIONS[expr.name].evaluate, [_computed(arg, places) for arg in expr.args]
    if len(args) == 2:
        left, right = args
        return lambda found: evaluate(left(found), right(found))
    return lambda found: evaluate(*[arg(found) for arg in args])


class Launcher(Protocol):
    """What launches so many programs of a kernel on a list of arguments."""

    def __call__(self, arguments: list[Any], grid: int) -> None: ...

    def compile_ahead(self) -> None: ...
