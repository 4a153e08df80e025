"""Random valid statements with their tensors: the raw material of property tests.

    for seed in range(1000):
        program = random_program(seed)
        result = insum_nn.insum(program.expression, **program.arguments())

A program is drawn as text and tensors only; nothing here imports the compiler, so a
fault there cannot hide in the programs that look for it. One seed gives one program,
on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from insum_nn.compiler.lang.combining import OPERATORS
from insum_nn.testing.confusable_names import confusable, renamed

__all__ = ["Profile", "RandomProgram", "random_program"]

Profile = Literal["full", "smooth"]
Role = Literal["value", "index"]

_INDEX_NAMES = ("i", "j", "k", "m", "n", "p", "q", "r", "batch_index", "neighbour_of_row", "é", "ξ", "строка", "列")
_VALUE_NAMES = ("A", "B", "C", "D", "Val", "Bias2", "_hidden_state", "EdgeAttributesOfTheGraph", "Größe", "Ω", "特徴量")
_TABLE_NAMES = ("Row", "Col", "E", "F", "Off", "Src", "Dst", "PermutationOfTheRows", "Índice", "Π", "索引")
_SCALAR_NAMES = ("alpha", "beta", "scale_factor", "λ", "温度")
_OUTPUT_NAMES = ("Out", "Y", "Z", "s", "accumulated_result", "Σ", "出力")
_LITERALS = ("2", "3", "0.5", "1.25", "1e-1", "-1", "-.75", "0")

_POINTS = {"full": 2000, "smooth": 300}
_ELEMENTS = {"full": 4000, "smooth": 60}
_MOST_DIMS = 6
_MOST_NESTING = 3
_MOST_LOOKUPS = 6


@dataclass(frozen=True)
class RandomProgram:
    """A valid statement and everything that is needed to run it.

    Attributes:
        expression: the statement's text.
        tensors: the tensors it reads, by name; values are float64, index tensors int32 or int64.
        sizes: extents of indices that no tensor gives (and now and then of one that does).
        out_shape: the output's shape, `None` where an extent follows from an index; `None` if all do.
        initial: the output's initial value, or `None`.
        output: the output's name.
    """

    expression: str
    tensors: dict[str, Tensor]
    sizes: dict[str, int]
    out_shape: tuple[int | None, ...] | None
    initial: Tensor | None
    output: str

    def arguments(self) -> dict[str, object]:
        """The keyword arguments of `insum_nn.insum` in addition to the expression."""
        tensors = dict(self.tensors)
        if self.initial is not None:
            tensors[self.output] = self.initial
        return {"tensors": tensors, "sizes": dict(self.sizes), "out_shape": self.out_shape}


def random_program(seed: int, *, max_size: int = 5, profile: Profile = "full") -> RandomProgram:
    """Draw the valid program of a seed.

    Args:
        seed: any integer; the same seed gives the same program.
        max_size: the largest extent of an index; extents of tensor axes may be a little larger.
        profile: "full" draws from the whole language. "smooth" is for `gradcheck`: only `+=` and `=`,
            small tensors, and no value tensor that overlaps itself in memory.

    Returns:
        The program. Its loop nest has at most 2000 iterations (300 if smooth).

    Raises:
        ValueError: `profile` is unknown or `max_size` is less than 1.

    >>> program = random_program(6)
    >>> random_program(6).expression == program.expression
    True
    >>> sorted(program.arguments())
    ['out_shape', 'sizes', 'tensors']
    """
    if profile not in _POINTS:
        raise ValueError(f"profile must be 'full' or 'smooth', got {profile!r}")
    if max_size < 1:
        raise ValueError(f"max_size must be at least 1, got {max_size}")
    attempt = 0
    while True:
        # A draft that came out too large is redrawn: cutting it down would bias the drawing of the rest.
        rng = random.Random(f"insum_nn:{profile}:{max_size}:{seed}:{attempt}")
        draft = _Draft(rng, max_size, profile)
        draft.draw()
        if draft.fits():
            program = _materialise(draft, seed)
            if rng.random() < 0.2:
                program = _negated(program)
            return _confused(program, draft.extents, rng) if rng.random() < 0.6 else program
        attempt += 1


@dataclass
class _Tensor:
    """A tensor before it has values: `bound` limits the entries of an index tensor, -1 <= entry < bound."""

    name: str
    role: Role
    shape: list[int]
    bound: int = 0


@dataclass
class _Term:
    """A part of a subscript with the values it can take (an empty range counts as one value, to be safe)."""

    text: str
    low: int
    high: int


_Scaled = tuple[int, _Term]


class _Draft:
    """The text of one statement and the shapes of its tensors."""

    def __init__(self, rng: random.Random, max_size: int, profile: Profile) -> None:
        self.rng = rng
        self.max_size = max_size
        self.profile: Profile = profile
        self.large = False
        self.taken: set[str] = set()
        self.extents: dict[str, int] = {}
        self.tensors: dict[str, _Tensor] = {}
        self.scalars: list[str] = []
        self.lookups = 0
        self.used: set[str] = set()
        self.read: set[str] = set()
        self.plain_read: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.out_extents: list[int] = []
        self.out_shape: tuple[int | None, ...] | None = None
        self.has_initial = False
        self.output = ""
        self.expression = ""

    # ---- the statement -------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the whole statement."""
        rng = self.rng
        self.large = rng.random() < 0.15
        for _ in range(rng.choice((4, 4, 5) if self.large else (0, 1, 2, 2, 3, 3, 3, 4, 4, 5))):
            self.extents[self._name(_INDEX_NAMES)] = self._extent()
        self.output = self._name(_OUTPUT_NAMES)
        factors = [self._factor() for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4)))]
        operator = rng.choice(("+=", "=") if self.profile == "smooth" else ("+=", *OPERATORS))
        self.has_initial = operator != "=" and rng.random() < 0.3
        self.read = set(self.used)
        subscripts, plain = self._output_subscripts()
        left = self.output if not subscripts else self._access_text(self.output, subscripts)
        space = rng.choice(("", " "))
        self.expression = f"{left} {operator} " + f"{space}*{space}".join(factors)
        self._supply_extents(plain)

    def fits(self) -> bool:
        """Whether the loop nest and every tensor are small enough."""
        elements = [math.prod(tensor.shape) for tensor in self.tensors.values()] + [math.prod(self.out_extents)]
        points = math.prod([self.extents[name] for name in self.used])
        return points <= _POINTS[self.profile] and max(elements) <= _ELEMENTS[self.profile]

    def _name(self, pool: Sequence[str]) -> str:
        """A name of a pool that is not taken, numbered once the pool is exhausted."""
        # The short names at the head of each pool are the common ones.
        free = [name for name in pool if name not in self.taken] or [f"{pool[0]}_{len(self.taken)}"]
        name = free[0] if self.rng.random() < 0.4 else self.rng.choice(free)
        self.taken.add(name)
        return name

    def _extent(self) -> int:
        draw = self.rng.random()
        if draw < 0.02:
            return 0
        if self.large:
            return self.rng.randint(max(1, self.max_size - 1), self.max_size)
        return 1 if draw < 0.12 else self.rng.randint(min(2, self.max_size), self.max_size)

    def _factor(self) -> str:
        draw = self.rng.random()
        if draw < 0.08:
            return self.rng.choice(_LITERALS)
        if draw < 0.18:
            if self.scalars and self.rng.random() < 0.3:
                return self.rng.choice(self.scalars)
            self.scalars.append(self._name(_SCALAR_NAMES))
            return self.scalars[-1]
        old = [tensor for tensor in self.tensors.values() if tensor.role == "value"]
        if old and self.rng.random() < 0.2:
            tensor = self.rng.choice(old)
            subscripts = [self._subscript(extent, "value", 0)[0] for extent in tensor.shape]
            return self._access_text(tensor.name, subscripts)
        return self._new_access("value", 0).text

    def _output_subscripts(self) -> tuple[list[str], dict[int, str]]:
        """The output's subscripts, and the index of each axis that is a plain one."""
        count = self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5, _MOST_DIMS))
        if not self.extents:
            count = min(count, 2)
        subscripts: list[str] = []
        plain: dict[int, str] = {}
        for axis in range(count):
            if self.extents and self.rng.random() < 0.6:
                name = self.rng.choice(list(self.extents))
                self.used.add(name)
                plain[axis] = name
                subscripts.append(name)
                self.out_extents.append(self.extents[name])
            else:
                term = self._safe_term()
                if term.text in self.extents:
                    plain[axis] = term.text
                    self.out_extents.append(self.extents[term.text])
                else:
                    self.out_extents.append(term.high + 1 + self.rng.choice((0, 0, 1, 2)))
                subscripts.append(term.text)
        return subscripts, plain

    def _supply_extents(self, plain: dict[int, str]) -> None:
        """Choose `sizes` and `out_shape` such that every extent is known, and some are known twice."""
        rng = self.rng
        by_output = set(plain.values()) & self.read if rng.random() < 0.5 else set[str]()
        for name in sorted(self.used):
            # An index of the output's own subscripts alone is a broadcast, which has to be asked for by its size.
            known = name in self.plain_read or name in by_output
            if not known or rng.random() < 0.08:
                self.sizes[name] = self.extents[name]
        shape: list[int | None] = []
        for axis, extent in enumerate(self.out_extents):
            name = plain.get(axis)
            needed = name is None or (name not in self.plain_read and name not in self.sizes)
            shape.append(extent if needed or rng.random() < 0.3 else None)
        if self.has_initial:
            # The initial value's shape says it all; an agreeing out_shape may stand beside it.
            self.out_shape = tuple(shape) if rng.random() < 0.3 else None
        else:
            self.out_shape = None if all(extent is None for extent in shape) else tuple(shape)

    # ---- accesses and subscripts ---------------------------------------------------------------

    def _new_access(self, role: Role, depth: int, bound: int = 0) -> _Term:
        """Read a new tensor through new subscripts."""
        count = self.rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, _MOST_DIMS) if role == "value" else (1, 1, 1, 2, 2, 3))
        pairs = [self._subscript(None, role, depth) for _ in range(count)]
        name = self._name(_VALUE_NAMES if role == "value" else _TABLE_NAMES)
        self.tensors[name] = _Tensor(name, role, [extent for _, extent in pairs], bound)
        text = self._access_text(name, [text for text, _ in pairs])
        return _Term(text, 0, max(bound - 1, 0))

    def _table_access(self, bound: int, depth: int, *, most: int | None = None) -> _Term:
        """Read an index tensor: an old one whose entries stay below `most`, or a new one with entries below `bound`."""
        self.lookups += 1
        old = [t for t in self.tensors.values() if t.role == "index" and (most is None or t.bound <= most)]
        if old and self.rng.random() < 0.3:
            table = self.rng.choice(old)
            subscripts = [self._subscript(extent, "index", depth + 1)[0] for extent in table.shape]
            return _Term(self._access_text(table.name, subscripts), 0, max(table.bound - 1, 0))
        return self._new_access("index", depth + 1, bound)

    def _subscript(self, extent: int | None, role: Role, depth: int) -> tuple[str, int]:
        """A subscript to read with, and the extent of the axis: the one given, or one that suits it."""
        rng = self.rng
        candidates = [name for name, size in self.extents.items() if extent is None or size == extent]
        deeper = depth < _MOST_NESTING and self.lookups < _MOST_LOOKUPS
        weights = {
            "plain": 55 if candidates else 0,
            "indirect": 25 if deeper else 0,
            "affine": 12 if self.extents else 0,
            "mixed": 8 if deeper else 0,
            # A constant outside is an error, not a miss.
            "constant": 0 if extent == 0 else 5,
        }
        # Nothing but an index tensor without entries points into an axis without cells.
        kind = rng.choices(list(weights), list(weights.values()))[0] if any(weights.values()) else "indirect"
        if kind == "indirect":
            return self._indirect_subscript(extent, depth)
        if kind == "affine":
            term = self._shifted(self._affine_terms())
        elif kind == "mixed":
            term = self._shifted(self._mixed_terms(depth))
        elif kind == "constant":
            constant = rng.choice((0, 0, 1, rng.randint(0, self.max_size)))
            constant = constant if extent is None else min(constant, extent - 1)
            return str(constant), constant + 1 + rng.choice((0, 0, 1)) if extent is None else extent
        else:
            name = rng.choice(candidates)
            self.used.add(name)
            self.plain_read.add(name)
            return name, self.extents[name]
        return term.text, self._roomy(term) if extent is None else extent

    def _shifted(self, terms: Sequence[_Scaled]) -> _Term:
        """An affine sum with an offset that leaves some of its values, or none, outside a tensor."""
        low = _affine(terms, 0).low
        offset = self.rng.choice((-low, -low, -low - 1, self.rng.randint(-3, 3)))
        # A lone index without an offset would be plain and fix an extent; a lone index tensor would be bare,
        # and its entries need not fit the axis.
        if len(terms) == 1 and terms[0][0] == 1 and offset == 0:
            offset = self.rng.choice((-1, 1))
        return _affine(terms, offset)

    def _roomy(self, term: _Term) -> int:
        """An extent that holds most values of a read, all of them, or few."""
        wide = max(term.high + 1, 0)
        few = self.rng.choice((max(wide - 1, 1), self.rng.randint(0, self.max_size)))
        return min(self.rng.choice((wide, wide, wide + 1, few)), 12)

    def _indirect_subscript(self, extent: int | None, depth: int) -> tuple[str, int]:
        """A bare index tensor as a subscript: its entries lie inside the axis, or are -1."""
        bound = self._extent() if extent is None else extent
        term = self._table_access(bound, depth, most=extent)
        return term.text, term.high + 1 + self.rng.choice((0, 0, 1)) if extent is None else extent

    def _affine_terms(self, most: int = 2) -> list[_Scaled]:
        """One or two indices with coefficients."""
        names = list(self.extents)
        terms: list[_Scaled] = []
        for name in self.rng.sample(names, min(len(names), self.rng.choice((1, most)))):
            self.used.add(name)
            high = max(self.extents[name] - 1, 0)
            terms.append((self.rng.choice((1, 1, 1, 2, 2, 3, -1, -2)), _Term(name, 0, high)))
        return terms

    def _mixed_terms(self, depth: int) -> list[_Scaled]:
        """One or two index tensors with coefficients where variables may stand, and sometimes an index."""
        terms: dict[str, _Scaled] = {}
        for _ in range(self.rng.choice((1, 1, 2))):
            table = self._table_access(self.rng.randint(1, self.max_size), depth)
            # The same access twice could cancel itself, and a coefficient of 0 is an error.
            terms.setdefault(table.text.replace(" ", ""), (self.rng.choice((1, 1, 2, -1)), table))
        found = list(terms.values())
        if self.extents and self.rng.random() < 0.6:
            found += self._affine_terms(1)
        return found

    def _safe_term(self) -> _Term:
        """A subscript to write with that is never negative: whatever it can reach, the output will have."""
        draw = self.rng.random()
        if draw < 0.45:
            return self._table_access(self._extent(), 0)
        if draw < 0.6 or not self.extents:
            constant = self.rng.randint(0, 2)
            return _Term(str(constant), constant, constant)
        terms = self._affine_terms() if draw < 0.85 else self._mixed_terms(0)
        return _affine(terms, self.rng.choice((0, 0, 1)) - _affine(terms, 0).low)

    def _access_text(self, name: str, subscripts: Sequence[str]) -> str:
        comma = self.rng.choice((",", ", "))
        return f"{name}[{comma.join(subscripts)}]"


def _affine(terms: Sequence[_Scaled], offset: int) -> _Term:
    """Print an affine sum with the values it can take."""
    low = offset + sum(min(scale * term.low, scale * term.high) for scale, term in terms)
    high = offset + sum(max(scale * term.low, scale * term.high) for scale, term in terms)
    parts = [(scale < 0, term.text if abs(scale) == 1 else f"{abs(scale)}*{term.text}") for scale, term in terms]
    if offset:
        # The offset goes first where the sum would begin with a minus, now and then leaving one there.
        parts.insert(0 if parts[0][0] and offset % 2 else len(parts), (offset < 0, str(abs(offset))))
    text = "-" + parts[0][1] if parts[0][0] else parts[0][1]
    return _Term(text + "".join(f" {'-' if minus else '+'} {part}" for minus, part in parts[1:]), low, high)


def _materialise(draft: _Draft, seed: int) -> RandomProgram:
    """Give values, dtypes and memory layouts to the tensors of a draft."""
    rng = draft.rng
    generator = torch.Generator().manual_seed(seed)
    smooth = draft.profile == "smooth"
    tensors: dict[str, Tensor] = {}
    for tensor in draft.tensors.values():
        if tensor.role == "index":
            filled = _entries(tensor.shape, tensor.bound, rng, generator)
            tensors[tensor.name] = _laid_out(filled, rng, overlap=True)
        else:
            # Coarse values make ties, which max= and min= must handle.
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            values = values if smooth or rng.random() < 0.7 else (2 * values).round() / 2
            tensors[tensor.name] = _laid_out(values, rng, overlap=not smooth)
    for name in draft.scalars:
        tensors[name] = torch.randn((), generator=generator, dtype=torch.float64)
    initial = None
    if draft.has_initial:
        values = torch.randn(draft.out_extents, generator=generator, dtype=torch.float64)
        initial = _laid_out(values, rng, overlap=not smooth)
    return RandomProgram(draft.expression, tensors, draft.sizes, draft.out_shape, initial, draft.output)


def _confused(program: RandomProgram, indices: Iterable[str], rng: random.Random) -> RandomProgram:
    """The same program in names that are easily taken for one another; an index may have the name of a tensor."""
    tensors = dict(zip((program.output, *program.tensors), confusable(rng), strict=False))
    sizes = dict(zip(indices, confusable(rng), strict=False))
    return RandomProgram(
        renamed(program.expression, {**tensors, **sizes}),
        {tensors[name]: tensor for name, tensor in program.tensors.items()},
        {sizes[name]: extent for name, extent in program.sizes.items()},
        program.out_shape,
        program.initial,
        tensors[program.output],
    )


def _negated(program: RandomProgram) -> RandomProgram:
    """The program with the values negated, lazily: torch negates what it reads, as with `z.conj().imag`."""
    tensors = {n: torch._neg_view(t) if t.is_floating_point() else t for n, t in program.tensors.items()}
    initial = None if program.initial is None else torch._neg_view(program.initial)
    return replace(program, tensors=tensors, initial=initial)


def _entries(shape: Sequence[int], bound: int, rng: random.Random, generator: torch.Generator) -> Tensor:
    """Entries of an index tensor: drawn freely, ascending or without repetition; some hold -1."""
    dtype = rng.choice((torch.int32, torch.int64))
    count = math.prod(shape)
    style = rng.choice(("free", "free", "sorted", "unique"))
    if bound == 0:
        flat = torch.full((count,), -1)
    elif style == "unique" and count <= bound:
        flat = torch.randperm(bound, generator=generator)[:count]
    else:
        flat = torch.randint(0, bound, (count,), generator=generator)
    if style == "sorted":
        flat = flat.sort().values
    if rng.random() < 0.35:
        flat = torch.where(torch.rand(count, generator=generator) < 0.25, -1, flat)
    return flat.reshape(tuple(shape)).to(dtype)


def _laid_out(values: Tensor, rng: random.Random, *, overlap: bool) -> Tensor:
    """Values in another memory layout; where `overlap` is allowed, an expanded axis repeats its first slice."""
    style = rng.choice(("contiguous", "contiguous", "transposed", "strided", "offset", "expanded"))
    dims = values.dim()
    if dims == 0 or style == "contiguous":
        return values
    if style == "transposed":
        order = rng.sample(range(dims), dims)
        inverse = sorted(range(dims), key=order.__getitem__)
        return values.permute(order).contiguous().permute(inverse)
    axis = rng.randrange(dims)
    extent = values.shape[axis]
    if style == "expanded" and overlap and extent > 1:
        return values.narrow(axis, 0, 1).expand(values.shape)
    step, first = (2, 0) if style == "strided" else (1, 1)
    shape = list(values.shape)
    shape[axis] = step * extent + first
    # The gaps hold values that no read may see.
    storage = torch.full(shape, -(2**30) if not values.is_floating_point() else float("nan"), dtype=values.dtype)
    view = storage.narrow(axis, first, step * extent)
    view = view[tuple(slice(None, None, step) if dim == axis else slice(None) for dim in range(dims))]
    return view.copy_(values)
