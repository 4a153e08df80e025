"""The statements of a tensor product: their text, and the static tables that they read.

    Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v,w]
    Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p],v] * W[e,L[p],u,v]

`p` counts coefficients. The first line reads and writes representations in place: the cells of one component are a
start and a step, so a table that lists them is affine in the copy. Along edges, the second line, rows are read many
times, so what is read is packed: the entries of one multiplicity next to each other, copies innermost.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.api import LONG_SUM, MOST_CELLS, MOST_TERMS, Program, compile_built, pays_between
from insum_nn.facts import IndexFacts
from insum_nn.ops.tensor_product_spec import NUMBER, Group, ProductLayout, others
from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.constants import plain_tensors

__all__ = ["LONG_SUM", "FirstStep", "Statement", "Terms", "WeightAccess", "in_steps", "statements_of"]

# The table of an operand's cells or components.
_TABLE = {"x": "I", "y": "J", "z": "K"}
# Whose product with the weights is the first of two steps to a role.
_OF_FIRST = {"x": "y", "y": "z", "z": "y"}
_STATIC = IndexFacts(masked=False, proven=True)
# The ends of edges, where an entry of -1 is a mistake.
_ENDS = {"Dst": IndexFacts(masked=False), "Src": IndexFacts(masked=False)}

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Terms:
    """The coefficients of a group, those that add to one cell of a role together.

    Attributes:
        value: (p,) coefficients, with their paths' normalisation.
        path: (p,) numbers of their paths in the group.
        component: (3, p) components of x, y and z, counted through all entries of one multiplicity.
        cell: (3, p) cells of their first copies in x, y and z.
        step: (3, p) from one copy to the next.
    """

    value: NDArray[np.float64]
    path: Integers
    component: Integers
    cell: Integers
    step: Integers

    @staticmethod
    def of(layout: ProductLayout, group: Group, role: str) -> Terms:
        """Return the coefficients of a group."""
        parts: list[Terms] = []
        for number, path in enumerate(layout.spec.paths[n] for n in group.paths):
            index, value = nonzeros(*(layout.entry(operand, path).l for operand in "xyz"))
            ends = [(operand, path.ends[NUMBER[operand]]) for operand in "xyz"]
            first = np.array([layout.components[operand][end] for operand, end in ends])
            cell = [layout.columns(*end)[own, 0] for end, own in zip(ends, index, strict=True)]
            step = np.array([layout.steps(*end)[1] for end in ends])
            parts.append(
                Terms(
                    value * path.coefficient,
                    np.full(value.size, number, np.int64),
                    index + first[:, None],
                    np.stack(cell),
                    np.repeat(step[:, None], value.size, 1),
                )
            )
        whole = Terms(*(np.concatenate([getattr(t, name) for t in parts], -1) for name in Terms.__slots__))
        return whole.select(np.lexsort((whole.path, whole.path if role == "w" else whole.cell[NUMBER[role]])))

    def select(self, which: Integers | slice) -> Terms:
        """Return a part of them."""
        return Terms(*(getattr(self, name)[..., which] for name in Terms.__slots__))

    def parts(self, most: int) -> Iterator[Terms]:
        """Yield all of them in parts of at most `most`."""
        for start in range(0, self.value.size, most):
            yield self.select(slice(start, start + most))


class WeightAccess:
    """How a statement addresses the weights of its paths.

    `stack`: a view of the paths' weights, which lie one after the other. `blocks`: a view of the weights, cut into
    blocks of one path's size. `flat`: the weights unchanged, in which each path has an offset.
    """

    def __init__(self, layout: ProductLayout, group: Group) -> None:
        self.shape = group.shape("w")
        self.letters = group.letters("w")
        self.starts = [layout.weight_starts[n] for n in group.paths]
        self.size = math.prod(self.shape)
        self.low = min(self.starts)
        self.count = (max(self.starts) + self.size - self.low) // self.size
        in_order = [self.low + n * self.size for n in range(len(self.starts))] == self.starts
        aligned = all((start - self.low) % self.size == 0 for start in self.starts)
        self.kind = "stack" if in_order else "blocks" if aligned else "flat"
        self.single = len(self.starts) == 1
        self.view = self.shape if self.single else (self.count, *self.shape)

    @property
    def places(self) -> Tensor:
        """What the statement's `L` holds for each path: its place in the stack, its block, or its offset."""
        starts = torch.tensor(self.starts, device="cpu")
        return starts if self.kind == "flat" else (starts - self.low) // self.size

    def operand(self, weight: Tensor) -> Tensor:
        """Return the tensor `W` that the statement reads; `weight` is (numel,) or (z, numel)."""
        if self.kind == "flat":
            return weight
        length = self.count * self.size
        view = weight if length == weight.shape[-1] else weight.narrow(-1, self.low, length)
        return view.reshape((*weight.shape[:-1], *self.view))

    def subscripts(self) -> list[str]:
        """Return the subscripts of `W`, whose path's place is `L[p]`."""
        if self.kind != "flat":
            return [*([] if self.single else ["L[p]"]), *self.letters]
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        terms = ["L[p]", *(f"{s}*{x}" if s != 1 else x for s, x in zip(strides, self.letters, strict=True))]
        return [" + ".join(terms)]


class _Tables:
    """A compiled statement and its static tables.

    Attributes:
        layout: where the spec's numbers lie.
        group: the paths that it computes.
        tables: its static tables, by name.
        weight: how it reads the weights; `None`: it does not.
        weight_name: their name.
        reads: the operand that each of its tensors is made of, by the tensor's name; without the weights.
        expression: the statement.
        program: compiled.
    """

    expression: str
    program: Program

    def __init__(self, layout: ProductLayout, group: Group, *, packed: bool) -> None:
        self.layout = layout
        self.group = group
        self.packed = packed
        self.tables: dict[str, Tensor] = {}
        self.weight: WeightAccess | None = None
        self.weight_name = "W"
        self.reads: dict[str, str] = {}
        self._on: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}

    def _access(self, name: str, operand: str, terms: Terms, *, packed: bool) -> str:
        """Return the access to an operand's cells, whose table it makes."""
        letters, at, table = self.group.letters(operand), NUMBER[operand], _TABLE[operand]
        if packed:
            self.tables[table] = torch.from_numpy(terms.component[at].copy())
            if self.group.mode.pairs and operand in "xy":
                letters = ["U[n]" if operand == "x" else "V[n]"]
            return _join(name, [*self._rows(operand), f"{table}[p]", *letters])
        extents = [self.group.extents[x] for x in letters]
        cells = terms.cell[at][:, None] + terms.step[at][:, None] * np.arange(math.prod(extents))
        self.tables[table] = torch.from_numpy(cells.reshape((-1, *extents)))
        return _join(name, [*self._rows(operand), f"{table}[{','.join(['p', *letters])}]"])

    def _read(self, operand: str, terms: Terms) -> str:
        name = f"{'d' if operand == 'z' else ''}{operand.upper()}"
        self.reads[name] = operand
        return self._access(name, operand, terms, packed=self.packed)

    def _weights(self, path: Integers) -> str:
        """Return the access to the weights of the path of each term."""
        self.weight = weight = WeightAccess(self.layout, self.group)
        if not weight.single:
            self.tables["L"] = weight.places[torch.from_numpy(path)].contiguous()
        return _join("W", [*self._rows("w"), *weight.subscripts()])

    def _rows(self, operand: str) -> list[str]:
        """Return the subscript of an operand's rows, where it has some."""
        if operand == "w" and self.layout.spec.shared:
            return []
        if not self.layout.spec.convolution:
            return ["z"]
        return [{"x": "Src[e]", "z": "Dst[e]"}.get(operand, "e")]

    def _compile(self, expression: str, sizes: dict[str, int]) -> None:
        self.expression, self._sizes = expression, sizes
        if "[n]" in expression:
            mul = self.group.muls[0]
            self.tables["U"], self.tables["V"] = torch.triu_indices(mul, mul, 1, device="cpu").unbind()
        facts = {name: _STATIC for name, table in self.tables.items() if not table.is_floating_point()}
        if not self.layout.spec.masked:
            facts |= {name: known for name, known in _ENDS.items() if f"{name}[e]" in expression}
        self.program = compile_built(
            expression,
            sizes=sizes,
            facts=facts,
            # Kernels unroll the static tables; pairs of copies (U, V) are too many for that.
            static={name: table for name, table in self.tables.items() if name not in ("U", "V")},
            options=self.layout.spec.options,
        )

    def tables_on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the static tables on a device; kept."""
        key = (device, dtype)
        if key not in self._on:
            with plain_tensors():
                self._on[key] = {
                    name: table.to(device, dtype) if table.is_floating_point() else table.to(device)
                    for name, table in self.tables.items()
                }
        return self._on[key]


class FirstStep(_Tables):
    """The product of one operand and the weights, the first of two steps to another operand's role.

        G[z,p,u,v] += dZ[z,K[p,w]] * W[L[p],u,v,w]     to the gradient of `y`
        G[z,p,u,w] += Y[z,J[p,v]] * W[L[p],u,v,w]      to the output and the gradient of `x`

    `p` counts pairs of a path and a component of the operand. It sums over the operand's copies by a matrix product;
    the second step sums over the coefficients and the other copies, which are few. One statement multiplies by all for
    each coefficient. On an H200, us, one step : two: to the gradient of `y` of 10,000 samples 58 : 42 (lmax 1, 32
    copies), 414 : 43 (lmax 1, 64), 1115 : 232 (lmax 2, 64); to the output of 1,000 samples 221 : 199 (lmax 2, 32) and
    1447 : 1158 (lmax 2, 64), with 32 scalars in `y` 140 : 70.

    Attributes:
        operand: whose product it is; a letter of `ROLES`.
        terms: the coefficients of the second step.
        place: their pairs.
    """

    written: Hashable = "G"

    def __init__(self, layout: ProductLayout, role: str, group: Group, *, packed: bool) -> None:
        super().__init__(layout, group, packed=packed)
        self.operand = _OF_FIRST[role]
        self.terms = terms = Terms.of(layout, group, role if role != "y" else "z")
        pairs = np.stack([terms.path, terms.cell[NUMBER[self.operand]]])
        _, first, self.place = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        pair = terms.select(first)
        read = [self._read(self.operand, pair), self._weights(pair.path)]
        summed = group.letters(self.operand)
        self.letters = [x for x in group.letters("w") if x not in summed]
        self._row = (first.size, *(group.extents[x] for x in self.letters))
        self._compile(f"{_join('G', [*self._rows('y'), 'p', *self.letters])} += {' * '.join(read)}", {})

    @property
    def width(self) -> int:
        """Numbers per row of the result."""
        return math.prod(self._row)

    def out_shape(self, size: int) -> tuple[int, ...]:
        """Return (rows, pairs, copies...)."""
        return (size, *self._row)


class Statement(_Tables):
    """A role's statement.

    Attributes:
        role: what it computes.
        packed: it reads packed operands.
        written: which tensor it adds to: one for all that write the representation itself, for packed results one for
            each multiplicity, for weights one for each group.
        first: the statement of `G`, which it reads in place of the weights and the operand that that one reads.
    """

    def __init__(
        self,
        layout: ProductLayout,
        role: str,
        group: Group,
        terms: Terms,
        *,
        packed: bool,
        lies: bool,
        first: FirstStep | None = None,
    ) -> None:
        super().__init__(layout, group, packed=packed)
        self.role = role
        self.lies = lies
        self.first = first
        self.tables["CG"] = torch.from_numpy(terms.value)
        factors = ["CG[p]"]
        for operand in others(role):
            if operand != "w" and (first is None or operand != first.operand):
                factors.append(self._read(operand, terms))
            elif operand == "w" and group.weighted and first is None:
                factors.append(self._weights(terms.path))
        if first is not None:
            self.tables["P"] = torch.from_numpy(first.place.reshape(-1))
            factors.append(_join("G", [*self._rows("y"), "P[p]", *first.letters]))
        name = f"{'' if role == 'z' else 'd'}{role.upper()}"
        if role == "w":
            several = len(group.paths) > 1
            if several:
                self.tables["R"] = torch.from_numpy(terms.path)
            result = _join(name, [*self._rows("w"), *(["R[p]"] if several else []), *group.letters("w")])
            self._row = (*((len(group.paths),) if several else ()), *group.shape("w"))
            self.written: Hashable = group.paths
        else:
            result = self._access(name, role, terms, packed=not lies)
            mul = group.muls[NUMBER[role]]
            self._row = (layout.dims[role],) if lies else (layout.packed_size(role, mul), *group.shape(role))
            self.written = None if lies else mul
        self._batched = role != "w" or not layout.spec.shared
        # A packed result repeats along multiplicities that no factor has.
        read = set("".join(group.letters(x) for x in others(role) if x != "w" or group.weighted))
        repeated = [] if lies else [x for x in group.letters(role) if x not in read]
        self._compile(f"{result} += {' * '.join(factors)}", {x: group.extents[x] for x in repeated})

    def of_gradient(self, operand: str) -> Statement:
        """Return the same with the gradient of an operand in its place, under a name of its own."""
        other = copy(self)
        name = "W" if operand == "w" else next(name for name, read in self.reads.items() if read == operand)
        other.reads = {f"g{n}" if n == name else n: read for n, read in self.reads.items()}
        other.weight_name = "gW" if operand == "w" else "W"
        other._compile(self.expression.replace(f" * {name}[", f" * g{name}["), self._sizes)
        return other

    @property
    def in_order(self) -> tuple[FirstStep | Statement, ...]:
        """The first step, where there is one, and this statement."""
        return (self,) if self.first is None else (self.first, self)

    @property
    def width(self) -> int:
        """Columns of the result; for the weights, of one sample."""
        return math.prod(self._row)

    def out_shape(self, size: int) -> tuple[int, ...]:
        """Return (rows, dimension), packed (rows, components, copies...), or of weights (rows, paths, copies...)."""
        return (size, *self._row) if self._batched else self._row


def statements_of(layout: ProductLayout, role: str, *, staged: bool = False) -> list[Statement]:
    """Return what computes a role; each statement adds to what those before it made of the same tensor.

    Args:
        layout: of the tensor product.
        role: a letter of `ROLES`.
        staged: make the role in two steps where its first is a long matrix product.
    """
    groups = [group for group in layout.groups if role != "w" or group.weighted]
    found: list[Statement] = []
    for group in groups:
        terms = Terms.of(layout, group, role)
        packed = _is_packed(layout, group, terms)
        # Packing rows that are written once does not pay; with modes that mix multiplicities it does.
        once = role == "z" and len(groups) == 1 and terms.value.size <= MOST_TERMS and layout.spec.convolution
        lies = not packed or (once and not group.mode.mixes and len(group.letters("z")) == 1)
        if staged and in_steps(layout, role, group) and terms.value.size <= MOST_TERMS:
            first = FirstStep(layout, role, group, packed=packed)
            found.append(Statement(layout, role, group, first.terms, packed=packed, lies=lies, first=first))
        else:
            parts = terms.parts(MOST_TERMS)
            found += [Statement(layout, role, group, part, packed=packed, lies=lies) for part in parts]
    return found


def in_steps(layout: ProductLayout, role: str, group: Group) -> bool:
    """Return whether a role is made in two steps where that can be: its first is a long matrix product."""
    mode = group.mode
    # Each sample's own weights are read once, so there is no matrix product.
    if not (group.weighted and mode.mixes and not mode.pairs and layout.spec.shared) or role == "w":
        return False
    if role == "y":
        return group.extents["w"] >= LONG_SUM
    return not layout.spec.convolution and _saves(layout, role, group)


def _saves(layout: ProductLayout, role: str, group: Group) -> bool:
    """Return whether a first step on `y` pays: one step multiplies its copies by the weights for each coefficient."""
    copies = group.letters("y")
    own = [x for x in copies if x not in group.letters("x") and x not in group.letters("z")]
    if len(own) != len(copies) or not own:
        return False
    terms = Terms.of(layout, group, role)
    pairs = len({*zip(terms.path.tolist(), terms.cell[1].tolist(), strict=True)})
    return pays_between(math.prod(group.extents[x] for x in own), terms.value.size, pairs)


def _is_packed(layout: ProductLayout, group: Group, terms: Terms) -> bool:
    """Return whether a group's operands are packed: along edges, for pairs of copies, and for large tables."""
    copies = max(math.prod(group.extents[x] for x in group.letters(operand)) for operand in "xyz")
    return layout.spec.convolution or group.mode.pairs or min(terms.value.size, MOST_TERMS) * copies > MOST_CELLS


def _join(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name
