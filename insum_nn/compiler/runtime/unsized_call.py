"""Calls of generated kernels at any sizes, known or new, as one printed function of Python for each statement.

Everything but sizes is decided when a statement is first called. What is left of a call: that the tensors are of the
kinds that it was decided for, contiguous and unwritten, and the kernel for sizes of this magnitude.

    def run(tensors, initial, indices, output):
        t0, t1, t2, t3 = tensors
        x0, x1, x2, x3 = indices
        o0, o1 = output
        if t0.dtype is not d0 or not 0 < t0.numel() < wide or not t0.is_contiguous() or ...:
            return None
        ...
        found = kernels.get(((x0 - 1).bit_length(), x1, ...))
        return found(tensors, initial, indices, output)

Where anything is otherwise it returns `None`, and `dispatch` finds the program, or the words for what is wrong.
`call` is the same for a caller who has not found the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.kernels.sized import WIDE
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.limits import limits_of
from insum_nn.compiler.lang.printed import function_of_lines
from insum_nn.compiler.lang.shapes import agreement_lines
from insum_nn.compiler.runtime.execution import Executable, forgets_programs, generation
from insum_nn.compiler.runtime.library.fixed_extents import FixedExtents
from insum_nn.compiler.schedule.canonical import messages_name
from insum_nn.tensor_cache import builder_versions, unwritten

__all__ = ["Call", "Run", "UnsizedCall", "nothing_printed"]

Sizes = tuple[int, ...]
Run = Callable[[Sequence[Tensor], Tensor | None, Sizes, Sizes], Tensor | None]
Call = Callable[[Sequence[Tensor], Tensor | None, Mapping[str, int], Sequence[int | None] | None], Tensor | None]
# Kinds of sizes that are kept.
_LIMIT = 64


class UnsizedCall:
    """What runs a statement on tensors of one kind, at any sizes.

    Args:
        bound: the statement; a builder vouches for its index tensors.
        tensors: of a first call.
        fixed: which extents are compiled in.
        find: the program for a call.
        drop_outside: writes out of bounds are dropped.
        cuttable: whether it runs as several statements depends on the sizes of all axes.

    Attributes:
        run: runs it on tensors in the layout's order, with an initial value that may be of the last axes alone, on
            sizes that agree with them; it records no gradients, and returns `None` where it is not for these.
        call: the same without known sizes: it finds them as `lang.shapes.agreement_of` does.
    """

    def __init__(
        self,
        bound: Bound,
        tensors: Sequence[Tensor],
        fixed: FixedExtents,
        find: Callable[[Sequence[Tensor], Tensor | None, Extents], object],
        *,
        drop_outside: bool,
        cuttable: bool,
    ) -> None:
        self.statement, self._find = bound.statement, find
        self.kernels: dict[object, Run] = {}
        self.run: Run = nothing_printed
        self.call: Call = nothing_printed
        limits = limits_of(bound.statement)
        # What is left of all limits is kept by any tensors with cells that 32 bits address.
        checked = limits.steep or (limits.writes and not drop_outside) or any(least > 1 for _, _, least in limits.axes)
        if checked or not tensors:
            return
        names = {
            **{f"d{n}": tensor.dtype for n, tensor in enumerate(tensors)},
            "dtype": bound.dtype,
            "wide": WIDE,
            "met": builder_versions,
            "own_axes": _own_axes,
            "unwritten": unwritten,
            "precision": torch._C._get_float32_matmul_precision,
            "kernels": self.kernels,
            "meet": self._meet,
        }
        what, layout = f"call of {bound.statement.text}", bound.layout
        given = ["def run(tensors, initial, indices, output):", f"({_names('t', layout.tensors)}) = tensors"]
        given += [f"({_names('x', layout.indices)}) = indices"] if layout.indices else []
        given += [f"({_names('o', layout.output_places)}) = output"] if layout.output_places else []
        rest = _lines(bound, fixed, cuttable=cuttable)
        self.run = function_of_lines([*given, *rest], names, what)
        found, read = agreement_lines(bound.statement)
        head = ["def call(tensors, initial, sizes, shape):", f"({_names('t', layout.tensors)}) = tensors"]
        # A program may be bound to no tensor, and called on another device.
        head += ["if t0.is_cuda is not gpu:", "    return None"]
        own = [*head, *found, *given[2:], *rest]
        self.call = function_of_lines(own, {**names, **read, "gpu": tensors[0].is_cuda}, what)
        forgets_programs(self)

    @property
    def printed(self) -> bool:
        """Whether `run` is for any call."""
        return self.run is not nothing_printed

    def clear(self) -> None:
        """Forget every kernel."""
        self.kernels.clear()

    def _meet(
        self, key: object, tensors: Sequence[Tensor], initial: Tensor | None, indices: Sizes, output: Sizes
    ) -> Tensor | None:
        """Run it at a kind of sizes that was not met before."""
        begun, extents = generation(), Extents(indices, output)
        initial = initial if initial is None else initial.expand(output)
        program = self._find(tensors, initial, extents)
        settled, found = True, nothing_printed
        if isinstance(program, Executable) and isinstance(program.run, Generated):
            settled = not program.run.undecided(tensors)
            with messages_name(self.statement):
                found = program.run.at(tensors, extents, initial)
        # What was cleared in the meantime stays so.
        if settled and begun == generation():
            if len(self.kernels) >= _LIMIT:
                self.kernels.clear()
            self.kernels[key] = found
        return found(tensors, initial, indices, output)


def _own_axes(initial: Tensor) -> int | None:
    """Return how many of the last axes a contiguous tensor had that `expand` repeated along others; `None`: it had not.

    What an initial value was before is its gradient's shape, so one that autograd follows arrives as an expanded one.
    """
    step, own = 1, 0
    for extent, by in zip(reversed(initial.shape), reversed(initial.stride()), strict=True):
        if extent != 1 and by != step:
            break
        step, own = step * extent, own + 1
    return own if not any(initial.stride()[: initial.ndim - own]) else None


def nothing_printed(*_: object) -> None:
    """Something else runs these calls."""


def _names(letter: str, all_of: Sequence[object]) -> str:
    """Return numbered names, each with a comma behind it."""
    return "".join(f"{letter}{n}, " for n in range(len(all_of)))


def _lines(bound: Bound, fixed: FixedExtents, *, cuttable: bool) -> list[str]:
    """Return the lines of `UnsizedCall.run` behind those that name tensors t0, .., extents x0, .. and sizes o0, .."""
    layout = bound.layout
    tensors = range(len(layout.tensors))
    indices = [f"x{place}" for place in range(len(layout.indices))]
    output = [f"o{axis}" for axis in range(len(layout.output_places))]
    # Of most tensors all axes are an index each.
    shown = {axis: extent for extent, axes in zip(indices, layout.plain, strict=True) for axis in axes}
    axes = [[shown.get((n, axis), "") for axis in range(layout.ranks[n])] for n in tensors]
    cells = [" * ".join(each) if all(each) else f"t{n}.numel()" for n, each in enumerate(axes)]
    wrong = [f"t{n}.dtype is not d{n}" for n in tensors]
    wrong += [f"not 0 < {size} < wide" for size in dict.fromkeys([*cells, " * ".join(output)]) if size]
    wrong += [f"not t{n}.is_contiguous()" for n in tensors]
    lines = [f"if {' or '.join(wrong)}:", "    return None"]
    for n in tensors:
        if layout.tensors[n] in layout.index_tensors:
            # The tensors of builders, as they were when they were made.
            lines += [f"cached = met.get(id(t{n}))"]
            lines += [f"if cached is None or cached[0]() is not t{n} or cached[1] != t{n}._version:"]
            lines += [f"    if not unwritten(t{n}):", "        return None"]
    lines += [
        "how = None",
        "if initial is not None:",
        "    how = initial.ndim",
        "    if initial.dtype is not dtype or initial.shape != output[-how:]:",
        "        return None",
        "    if not initial.is_contiguous():",
        "        how = own_axes(initial)",
        "        if how is None:",
        "            return None",
    ]
    key = [_magnitude(extent, most) for extent, most in zip(indices, fixed.most, strict=True)]
    key += [_magnitude(o, -1) for o, place in zip(output, layout.output_places, strict=True) if place is None]
    if cuttable:
        hidden = [(n, axis) for n, each in enumerate(axes) for axis, extent in enumerate(each) if not extent]
        key += [_magnitude(f"t{n}.shape[{axis}]", -1) for n, axis in hidden]
    key += ["precision()"] if bound.dtype == torch.float32 else []
    return [
        *lines,
        f"key = ({', '.join(['how', *key])},)",
        "found = kernels.get(key)",
        "if found is None:",
        "    return meet(key, tensors, initial, indices, output)",
        "return found(tensors, initial, indices, output)",
    ]


def _magnitude(extent: str, most: float) -> str:
    """A size as far as kernels differ in it: itself up to a limit, else its magnitude."""
    if most == math.inf:
        return extent
    bits = f"({extent} - 1).bit_length()"
    return bits if most <= 1 else f"({extent} if {extent} <= {most} else -{bits})"
