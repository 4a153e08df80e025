"""The parameters of a kernel: what each stands for, its number in a call, and what of the memory layout matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from insum_nn.compiler.ir.nodes import OPERATIONS, Const, Expr, Op, Size
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.printed import function_of_lines
from insum_nn.locks import cached_property

__all__ = ["Argument", "Launcher", "Numbers", "OnDevice", "Strides", "initial_steps"]


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
        initial: how the initial value is addressed; see `initial_steps`.
    """

    contiguous: tuple[bool, ...]
    wide: bool = False
    split: bool = False
    initial: tuple[str, ...] | None = None


def initial_steps(initial: Tensor | None) -> tuple[str, ...] | None:
    """How an initial value is addressed: `None` as the output, else per axis a known step, or "" for an argument."""
    if initial is None:
        return None
    # An expanded axis says so itself; whether all is contiguous, extents without a value do not tell.
    for step in initial.stride():
        if type(step) is int and step == 0:
            break
    else:
        if initial.is_contiguous():
            return None
    return tuple(_step(extent, step) for extent, step in zip(initial.shape, initial.stride(), strict=True))


def _step(extent: int, step: int) -> str:
    return "0" if step == 0 else "1" if step == 1 else "0" if extent == 1 else ""


class Numbers:
    """How the integer parameters of a kernel, and the number of its programs, follow from the sizes of a call.

    Printed as lines of Python, which read `initial` and `rows`, the initial value and programs' ranges of rows, and
    what `given` names: the tensors in the layout's order, and the sizes of the call. Sizes may be symbolic, and then
    what is made of them stays so.

    Args:
        bound: the statement.
        arguments: the kernel's parameters.
        grid: the number of its programs, of sizes.
        sizes: what these stand for.

    Attributes:
        inputs: the tensors among the parameters: their places, and their positions among the statement's.
        others: the other pointers: place, kind, and the position of a tensor or of a further output.
        given: lines that name what a call is given: tensors v0, .., sizes x0, .. and o0, ..
        lines: one for each integer parameter, and each size of the grid, that has no such name: `n` and its place.
        grid: the number of programs, an expression of these names.
        vectors: the places of steps along an axis, and of lengths of rows: multiples of 16 are read as vectors.
        names: of all parameters in order, `p` and the place for pointers.
    """

    def __init__(self, bound: Bound, arguments: Sequence[Argument], grid: Expr, sizes: Mapping[str, Argument]) -> None:
        layout = bound.layout
        names, indices = layout.tensors, layout.indices
        inputs: list[tuple[int, int]] = []
        others: list[tuple[int, str, int]] = []
        lines: list[str] = []
        # Steps along an axis, or lengths of rows: where they are whole vectors, rows are read as vectors.
        columns = {*layout.output_plain[-1:], *dict(bound.static)}
        vectors: list[int] = []
        named: dict[int, str] = {}
        # Sizes of the grid stand behind the parameters.
        for place, argument in enumerate((*arguments, *sizes.values())):
            kind, name, axis = argument.kind, argument.name, argument.axis
            along = kind in ("stride", "initial_stride")
            if kind == "tensor":
                inputs.append((place, names.index(name)))
                continue
            if kind == "extent":
                value = f"x{indices.index(name)}"
                along = name in columns
            elif kind == "stride":
                value = f"v{names.index(name)}.stride({axis})"
            elif kind == "initial_stride":
                # It may be of the last axes alone.
                value = f"initial.stride({axis - len(layout.output_places)})"
            elif kind == "dim" and name == "@out":
                value = f"o{axis}"
                along = True
            elif kind == "dim":
                value = f"v{names.index(name)}.shape[{axis}]"
                along = axis > 0
            elif kind == "rows":
                value = "rows"
            else:
                position = int(name) if kind == "additional" else -1
                others.append((place, kind, names.index(name) if name in names else position))
                continue
            named[place] = value
            if not value.isalnum():
                named[place] = f"n{place}"
                lines.append(f"n{place} = {value}")
            if along and place < len(arguments):
                vectors.append(place)
        self.inputs, self.others, self.vectors = tuple(inputs), tuple(others), tuple(vectors)
        self.names = tuple(named.get(place, f"p{place}") for place in range(len(arguments)))
        self.lines = tuple(lines)
        self.grid = _printed(grid, {name: named[place] for place, name in enumerate(sizes, len(arguments))})
        counts = {
            "v": ("tensors", len(names)),
            "x": ("indices", len(indices)),
            "o": ("output", len(layout.output_places)),
        }
        self.given = tuple(
            f"({''.join(f'{letter}{n}, ' for n in range(count))}) = {given}"
            for letter, (given, count) in counts.items()
            if count
        )

    @cached_property
    def of(self) -> Callable[..., tuple[list[Any], Any]]:
        """What returns the parameters of a call, with `None` for pointers, and the number of programs."""
        found = ", ".join("None" if name.startswith("p") else name for name in self.names)
        text = [
            "def of(tensors, initial, indices, output, rows):",
            *self.given,
            *self.lines,
            f"return [{found}], {self.grid}",
        ]
        return function_of_lines(text, {}, "sizes of a kernel")


# Where Python says it otherwise than kernels.
_PYTHON = {"cdiv": "(-(-{} // {}))", "and": "({} and {})"}


def _printed(expr: Expr, names: Mapping[str, str]) -> str:
    """An expression of sizes in Python."""
    if isinstance(expr, Const):
        return str(int(expr.value))
    if isinstance(expr, Size):
        return names[expr.name]
    assert isinstance(expr, Op)
    return _PYTHON.get(expr.name, OPERATIONS[expr.name].text).format(*[_printed(arg, names) for arg in expr.args])


class OnDevice(NamedTuple):
    """Machine code on a device.

    Attributes:
        begin: Triton's launcher.
        handle: the function on the device.
        metadata: what else its launcher takes.
        rest: arguments that its launcher takes behind those of the kernel.
        kernel: whose handle this is, which has to live as long.
    """

    begin: Callable[..., None]
    handle: int
    metadata: Any
    rest: tuple[int, ...]
    kernel: object


class Launcher(Protocol):
    """What launches so many programs of a kernel on a list of arguments."""

    def __call__(self, arguments: list[Any], grid: int) -> None: ...

    def compile_ahead(self) -> None: ...

    def on_device(self) -> OnDevice | None:
        """Return the machine code for pointers that are multiples of 16 bytes, where it is on the device."""
        ...
