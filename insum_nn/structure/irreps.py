"""Paths of a tensor product: what an instruction means, what it weighs, and where its numbers lie.

A representation is a tuple of `Entry`: `mul` copies of the irrep of degree `l` and parity `p`, stored one after the
other, component fastest. A `Path` connects one entry of each input with one of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from insum_nn.errors import InsumError, InsumShapeError, raise_collected

__all__ = [
    "MODES",
    "Entry",
    "InstructionError",
    "Mode",
    "Path",
    "copies_outermost",
    "dimension",
    "entries_of",
    "make_paths",
    "offsets",
    "weight_offsets",
]


class InstructionError(InsumShapeError, AssertionError):
    """An instruction connects what cannot be connected; also an `AssertionError`, which e3nn raises here."""


class Entry(NamedTuple):
    """`mul` copies of the irrep of degree `l` and parity `p` (1 even, -1 odd)."""

    mul: int
    l: int
    p: int

    @property
    def size(self) -> int:
        """Components of one copy."""
        return 2 * self.l + 1

    @property
    def dim(self) -> int:
        """Components of all copies."""
        return self.mul * self.size

    def __str__(self) -> str:
        return f"{self.mul}x{self.l}{'e' if self.p == 1 else 'o'}"


@dataclass(frozen=True, slots=True)
class Mode:
    """Which multiplicity indices each operand of a connection mode carries; `n` counts pairs u < v.

    Attributes:
        in1: letters of the first input.
        in2: letters of the second input.
        out: letters of the output.
        weight: letters of the weight.
        pairs: `u` and `v` are read through tables of the pairs `n`.
    """

    in1: str
    in2: str
    out: str
    weight: str
    pairs: bool = False

    @property
    def mixes(self) -> bool:
        """The output has an index of its own, so a path is a matrix product with its weight."""
        return "w" in self.weight

    @staticmethod
    def extents(u: int, v: int, w: int) -> dict[str, int]:
        """Return the extent of each index, from the multiplicities of the inputs and the output."""
        return {"u": u, "v": v, "w": w, "n": u * (v - 1) // 2}


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "uvw": Mode("u", "v", "w", "uvw"),
        "uvu": Mode("u", "v", "u", "uv"),
        "uvv": Mode("u", "v", "v", "uv"),
        "uuw": Mode("u", "u", "w", "uw"),
        "uuu": Mode("u", "u", "u", "u"),
        "uvuv": Mode("u", "v", "uv", "uv"),
        "uvu<v": Mode("n", "n", "n", "n", pairs=True),
        "u<vw": Mode("n", "n", "w", "nw", pairs=True),
    }
)
"""The connection modes, by the names that e3nn gives them."""


# What a message calls the extent of each index.
_EXTENTS = {"u": "mul_in1", "v": "mul_in2", "w": "mul_out", "n": "mul_in1 * (mul_in1 - 1) / 2"}


class Path(NamedTuple):
    """One instruction: `coefficient * (in1[i_in1] x in2[i_in2])` is added to `out[i_out]`.

    Attributes:
        i_in1: entry of the first input.
        i_in2: entry of the second input.
        i_out: entry of the output.
        mode: connection mode, a key of `MODES`.
        weighted: the path has weights.
        coefficient: normalised factor.
        shape: shape of its weights, whether it has any or not.
    """

    i_in1: int
    i_in2: int
    i_out: int
    mode: str
    weighted: bool
    coefficient: float
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int, int]:
        """The entries that it connects."""
        return self.i_in1, self.i_in2, self.i_out

    @property
    def numel(self) -> int:
        """Number of its weights, whether it has any or not."""
        return math.prod(self.shape)


def entries_of(irreps: Iterable[Any]) -> tuple[Entry, ...]:
    """Return entries of e3nn's `Irreps`, or of an iterable of `(mul, (l, p))` or of `(mul, l, p)`.

    >>> entries_of([(2, (1, -1)), (3, 0, 1)])
    (Entry(mul=2, l=1, p=-1), Entry(mul=3, l=0, p=1))
    """
    found: list[Entry] = []
    for item in irreps:
        values = tuple(item)
        if len(values) == 2:
            # e3nn's irreps iterate but have no length.
            irrep = values[1]
            values = (values[0], *((irrep.l, irrep.p) if hasattr(irrep, "l") else irrep))
        mul, l, p = values
        found.append(Entry(int(mul), int(l), int(p)))
    return tuple(found)


def copies_outermost(entries: Iterable[Entry]) -> list[int]:
    """For each column in the order (copies, components), the column that it is in the order (components, copies).

    >>> copies_outermost([Entry(2, 1, -1)])
    [0, 2, 4, 1, 3, 5]
    """
    found: list[int] = []
    for entry in entries:
        start = len(found)
        found += [start + part * entry.mul + copy for copy in range(entry.mul) for part in range(entry.size)]
    return found


def dimension(entries: Sequence[Entry]) -> int:
    """Return components of the whole representation."""
    return sum(entry.dim for entry in entries)


def offsets(entries: Sequence[Entry]) -> tuple[int, ...]:
    """Return where each entry starts.

    >>> offsets((Entry(2, 1, -1), Entry(3, 0, 1)))
    (0, 6)
    """
    return (0, *accumulate(entry.dim for entry in entries))[: len(entries)]


def weight_offsets(paths: Sequence[Path]) -> tuple[int, ...]:
    """Return where each path's weights start in the flat weight; paths without weights take no room."""
    return (0, *accumulate(path.numel * path.weighted for path in paths))[: len(paths)]


def make_paths(
    in1: Sequence[Entry], in2: Sequence[Entry], out: Sequence[Entry], instructions: Iterable[Sequence[Any]]
) -> tuple[tuple[Path, ...], tuple[float, ...]]:
    """Check instructions `(i_in1, i_in2, i_out, mode, has_weight[, path_weight])` and give each its weights' shape.

    Returns:
        The paths, with a coefficient of 1, and the instructions' path weights.

    Raises:
        InstructionError: some instruction cannot be; its text lists every such one.

    >>> paths, _ = make_paths([Entry(4, 1, -1)], [Entry(1, 1, -1)], [Entry(4, 0, 1)], [(0, 0, 0, "uvu", True)])
    >>> paths[0].shape
    (4, 1)
    """
    faults: list[InsumError] = []
    paths: list[Path] = []
    weights: list[float] = []
    for number, instruction in enumerate(instructions):
        values = tuple(instruction)
        found = [
            InstructionError(f"instruction {number}, {values}, {text}", fix=fix, instruction=number)
            for text, fix in _faults_of(values, in1, in2, out)
        ]
        faults += found
        if not found:
            i_in1, i_in2, i_out, mode, weighted, *weight = values
            extents = Mode.extents(in1[i_in1].mul, in2[i_in2].mul, out[i_out].mul)
            shape = tuple(extents[x] for x in MODES[mode].weight)
            paths.append(Path(int(i_in1), int(i_in2), int(i_out), mode, bool(weighted), 1.0, shape))
            weights.append(float(weight[0]) if weight else 1.0)
    raise_collected(faults)
    return tuple(paths), tuple(weights)


def _faults_of(
    values: tuple[Any, ...], in1: Sequence[Entry], in2: Sequence[Entry], out: Sequence[Entry]
) -> Iterator[tuple[str, str]]:
    """Return what is wrong with an instruction, and how it is mended."""
    if len(values) not in (5, 6):
        yield f"has {len(values)} items", "write (i_in1, i_in2, i_out, mode, has_weight[, path_weight])."
        return
    ends, mode, weighted, whole = values[:3], values[3], bool(values[4]), (in1, in2, out)
    names = ("irreps_in1", "irreps_in2", "irreps_out")
    outside = {name: len(e) for name, at, e in zip(names, ends, whole, strict=True) if not 0 <= at < len(e)}
    for name, count in outside.items():
        yield f"points outside {name}", f"point to one of its {count} entries, from 0 on."
    if mode not in MODES:
        yield f"has the unknown mode {mode!r}", f"choose one of {', '.join(MODES)}."
    if len(values) == 6 and float(values[5]) < 0:
        yield "has a negative path weight", "put the sign into the weights."
    if outside or mode not in MODES:
        return
    a, b, c = (entries[at] for entries, at in zip(whole, ends, strict=True))
    if a.p * b.p != c.p:
        yield f"breaks parity: {a} times {b} has not that of {c}", "connect it to an output of the other parity."
    low, high = abs(a.l - b.l), a.l + b.l
    if not low <= c.l <= high:
        text = f"connects degrees that do not couple: {a} times {b} holds no {c}"
        yield text, f"connect it to an output of a degree from {low} to {high}."
    own, extents = MODES[mode], Mode.extents(a.mul, b.mul, c.mul)
    if 0 in (a.mul, b.mul, c.mul) or 0 in map(extents.__getitem__, own.weight):
        return
    want, how = math.prod(extents[x] for x in own.out), " * ".join(_EXTENTS[x] for x in own.out)
    if own.mixes and not weighted and mode != "uuw":
        yield f"has no weight, by which mode {mode!r} mixes multiplicities", "set has_weight to True."
    elif own.mixes and not weighted:
        want, how = 1, "1, since without weights u is summed"
    if own.in1 == own.in2 and a.mul != b.mul:
        yield f"needs equal multiplicities of its inputs, got {a} and {b}", "choose entries of one multiplicity."
    elif c.mul != want:
        text = f"needs another multiplicity of its output {c}: expected {want} ({how}); got {c.mul}"
        yield text, "change irreps_out or the mode."
