"""The statements of a tensor product: their text, and the static tables that they read.

    Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v,w]
    Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p],v] * W[e,L[p],u,v]
    B[z,I[p,u],K[p,w]] += CG[p] * Y[z,J[p,v]] * W[L[p],u,v,w]

`p` counts coefficients. The first line reads and writes representations in place: the cells of one component are a
start and a step, so a table that lists them is affine in the copy. Along edges, the second line, rows are read many
times, so what is read is packed: the entries of one multiplicity next to each other, copies innermost. The third line
is the matrix that maps `X` to `Z`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.api import (
    LONG_SUM,
    MOST_CELLS,
    MOST_TERMS,
    Program,
    compile_built,
    graph_constant,
    is_traced,
    pays_between,
)
from insum_nn.errors import InsumError
from insum_nn.facts import IndexFacts
from insum_nn.ops.tensor_product_spec import NUMBER, Group, ProductLayout, others
from insum_nn.structure.clebsch_gordan import nonzeros

__all__ = [
    "Operands",
    "Reader",
    "Statement",
    "Terms",
    "UnsupportedModeError",
    "statements_of",
    "terms_of",
]

# The table of an operand's cells or components.
_TABLE = {"x": "I", "y": "J", "z": "K"}
# Whose product with the weights is the first of two steps to a role.
_OF_FIRST = {"x": "y", "y": "z", "z": "y"}
_STATIC = IndexFacts(masked=False, proven=True)
# The ends of edges, where an entry of -1 is a mistake.
_ENDS = {"Dst": IndexFacts(masked=False), "Src": IndexFacts(masked=False)}

Integers = NDArray[np.int64]
# What a call reads: operands by role ("gx" is a gradient of `x`, in its place), the edges' ends "Dst" and "Src", and
# what has been packed, by operand and multiplicity.
Operands = dict[Hashable, Tensor]
# Makes a tensor of a statement of what a call reads.
Reader = Callable[[Operands], Tensor]


class UnsupportedModeError(InsumError, NotImplementedError):
    """A connection mode has no `right`; also a `NotImplementedError`, which e3nn raises here."""


# Coefficients: their value with their path's normalisation, the number of that path in its group, and the components of
# x, y and z, counted through all entries of one multiplicity.
Terms = NDArray[Any]
_TERM = np.dtype([("value", np.float64), ("path", np.int64), ("component", np.int64, 3)])


def terms_of(layout: ProductLayout, group: Group, role: str) -> Terms:
    """Return the coefficients of a group, those that add to one cell of a role together."""
    parts: list[Terms] = []
    for number, path in enumerate(layout.spec.paths[n] for n in group.paths):
        index, value = nonzeros(*(layout.entry(operand, path).l for operand in "xyz"))
        first = [layout.components[operand][path.ends[NUMBER[operand]]] for operand in "xyz"]
        parts.append(part := np.empty(value.size, _TERM))
        part["value"], part["path"], part["component"] = value * path.coefficient, number, index.T + first
    whole = np.concatenate(parts)
    order = whole["path"] if role == "w" else whole["component"][:, NUMBER.get(role, 2)]
    return whole[np.lexsort((whole["path"], order))]


class Statement:
    """A compiled statement of a role and its static tables.

    Attributes:
        layout: where the spec's numbers lie.
        role: a letter of `ROLES`, "b", or "g": the first step to a role; see `_first_step`.
        group: the paths that it computes.
        packed: it reads packed operands.
        first: the statement of `G`, which it reads in place of the weights and the operand that that one reads.
        operand: of a first step, the one that it reads.
        tables: its static tables, by name.
        placed: these on the device of a call, in its dtype.
        inputs: in the order of the program's tensors a name, what stands for such a tensor in all statements, and what
            makes it of a call's operands; `None` for tables, and for what a first step made, for which that stands.
        read_weight: what it reads of the weights, (numel,) or (z, numel).
        reads: what each of its tensors is made of: an operand, or an end of the edges.
        written: which tensor it adds to: one for all that write the representation itself, for packed results one for
            each multiplicity, for weights one for each group.
        columns: where that tensor's numbers of a row stand in the role's; `None`: it is the role's.
        cells: of a row that nodes name, those of one copy that it adds to.
        expression: the statement.
        program: compiled.
    """

    expression: str
    program: Program
    placed: Mapping[str, Tensor]
    inputs: list[tuple[str, Hashable, Reader | None]]
    read_weight: Callable[[Tensor], Tensor]
    columns: Integers | None = None
    cells = 0

    def __init__(
        self,
        layout: ProductLayout,
        role: str,
        group: Group,
        terms: Terms,
        *,
        packed: bool,
        in_place: bool = False,
        operand: str = "",
        first: tuple[Statement, Integers] | None = None,
    ) -> None:
        self.layout, self.role, self.group, self.packed, self.operand = layout, role, group, packed, operand
        self.first, place = first or (None, terms["path"])
        self.tables: dict[str, Tensor] = {}
        self.reads = {name: name for name in ("Dst", "Src")}
        self.written: Hashable = None
        factors: list[str] = []
        if role != "g":
            self.tables["CG"] = torch.from_numpy(terms["value"].copy())
            factors.append("CG[p]")
        for each in f"{operand}w" if role == "g" else others(role):
            if self.first is not None and each in f"{self.first.operand}w":
                continue
            if each != "w":
                factors.append(self._read(each, terms))
            elif group.weighted:
                factors.append(self._weights(terms["path"]))
        if self.first is not None:
            self.tables["P"] = torch.from_numpy(place)
            factors.append(_join("G", [*self._rows("y"), "P[p]", *self.first.letters]))
        name, several = f"{'' if role == 'z' else 'd'}{role.upper()}", len(group.paths) > 1
        repeated: list[str] = []
        # A row of the result, and whether it has a row for each sample, edge or node.
        self._row: tuple[int, ...] = layout.shape("" if role == "g" else role)
        self._batched = role != "w" or not layout.spec.shared
        if role == "g":
            result = _join("G", [*self._rows("y"), "p", *self.letters])
            self._row, self.written = (terms.size, *(group.extents[x] for x in self.letters)), self
        elif role == "w":
            if several:
                self.tables["R"] = torch.from_numpy(terms["path"].copy())
            result = _join(name, [*self._rows("w"), *(["R[p]"] if several else []), *group.letters("w")])
            self._row, self.written = (*((len(group.paths),) if several else ()), *group.shape("w")), group.paths
            starts = [(layout.weight_starts[path], layout.spec.paths[path].numel) for path in group.paths]
            self.columns = np.concatenate([np.arange(start, start + size) for start, size in starts])
        elif role == "b":
            result = _join("B", [*self._rows("y"), *(self._cells(each, terms) for each in "xz")])
        else:
            result = self._access(name, role, terms, packed=not in_place)
            if role != "y":
                self.cells = np.unique(terms["component"][:, NUMBER[role]]).size
            if not in_place:
                mul = group.muls[NUMBER[role]]
                self.columns, self.written = layout.packed_columns(role, mul), mul
                self._row = (self.columns.size // mul, *group.shape(role))
                # A packed result repeats along multiplicities that no factor has.
                read = set("".join(group.letters(x) for x in others(role) if x != "w" or group.weighted))
                repeated = [x for x in group.letters(role) if x not in read]
        self._compile(f"{result} += {' * '.join(factors)}", {x: group.extents[x] for x in repeated})

    @property
    def letters(self) -> str:
        """The multiplicity indices of what a first step makes."""
        return "".join(x for x in self.group.letters("w") if x not in self.group.letters(self.operand))

    def of_gradient(self, operand: str) -> Statement:
        """Return the same with the gradient of an operand in its place, under a name of its own."""
        other = copy(self)
        name = next(name for name, read in self.reads.items() if read == operand)
        other.reads = {**self.reads, f"g{name}": f"g{operand}"}
        other._compile(self.expression.replace(f" * {name}[", f" * g{name}["), self._sizes)
        return other

    def _access(self, name: str, operand: str, terms: Terms, *, packed: bool) -> str:
        """Return the access to an operand's cells, whose table it makes."""
        if not packed:
            return _join(name, [*self._rows(operand), self._cells(operand, terms)])
        letters, table = self.group.letters(operand), _TABLE[operand]
        self.tables[table] = torch.from_numpy(terms["component"][:, NUMBER[operand]].copy())
        if self.group.mode.pairs and operand in "xy":
            letters = ["U[n]" if operand == "x" else "V[n]"]
        return _join(name, [*self._rows(operand), f"{table}[p]", *letters])

    def _cells(self, operand: str, terms: Terms) -> str:
        """Return the subscript of a representation's cells, whose table it makes."""
        letters, at, table = self.group.letters(operand), NUMBER[operand], _TABLE[operand]
        mul = self.group.muls[at]
        cells = self.layout.packed_columns(operand, mul).reshape(-1, mul)[terms["component"][:, at]]
        self.tables[table] = torch.from_numpy(cells.reshape(-1, *[self.group.extents[x] for x in letters]))
        return _join(table, ["p", *letters])

    def _read(self, operand: str, terms: Terms) -> str:
        name = f"{'d' if operand == 'z' else ''}{operand.upper()}"
        self.reads[name] = operand
        return self._access(name, operand, terms, packed=self.packed)

    def _weights(self, path: Integers) -> str:
        """Return the access to the weights of the path of each term, where the statement reads them from now on.

        They are cut into blocks of one path's size, which `L[p]` counts from the first path's on; where a path's
        weights do not begin with a block, `L[p]` is their offset in the unchanged weights.
        """
        layout, group = self.layout, self.group
        shape, letters, single = group.shape("w"), group.letters("w"), len(group.paths) == 1
        starts = np.array([layout.weight_starts[n] for n in group.paths])
        low, size = int(starts.min()), math.prod(shape)
        blocks = (starts - low) // size
        count, in_blocks = int(blocks.max()) + 1, np.array_equal(low + blocks * size, starts)
        if not single:
            self.tables["L"] = torch.from_numpy((blocks if in_blocks else starts)[path])
        subscripts = [*([] if single else ["L[p]"]), *letters]
        if not in_blocks:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            terms = (x if s == 1 else f"{s}*{x}" for s, x in zip(strides, letters, strict=True))
            subscripts = [" + ".join(["L[p]", *terms])]

        def read(weight: Tensor) -> Tensor:
            if not in_blocks:
                return weight
            view = weight if count * size == weight.shape[-1] else weight.narrow(-1, low, count * size)
            return view.reshape((*weight.shape[:-1], *(() if single else (count,)), *shape))

        self.reads["W"], self.read_weight = "w", read
        return _join("W", [*self._rows("w"), *subscripts])

    def _rows(self, operand: str) -> list[str]:
        """Return the subscript of an operand's rows, where it has some."""
        if operand == "w" and self.layout.spec.shared:
            return []
        if not self.layout.spec.convolution:
            return ["z"]
        return [{"x": "Src[e]", "z": "Dst[e]"}.get(operand, "e")]

    def put_on(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Put the tables on a device, and say what its tensors are made of there; return the statement."""
        self.placed = {
            name: table.to(device, dtype if table.is_floating_point() else None) for name, table in self.tables.items()
        }
        self.inputs = [(name, *self._reading(name, device)) for name in self.program.names]
        return self

    def _reading(self, name: str, device: torch.device) -> tuple[Hashable, Reader | None]:
        """Return what tells one of its tensors from others, and what makes it of a call's operands."""
        if name in self.tables:
            return (self, name), None
        if name == "G":
            return self.first, None
        operand = self.reads[name]
        role = operand[-1]
        if role == "w":
            return (operand, self.group), lambda operands: self.read_weight(operands[operand])
        if role not in NUMBER or not self.packed:
            return operand, itemgetter(operand)
        mul = self.group.muls[NUMBER[role]]
        start, order = self.layout.packing(role, mul, device)
        count = order.numel()
        shape = (count // mul, *self.group.shape(role))

        def read(operands: Operands) -> Tensor:
            tensor = operands[operand]
            if start is not None:
                # Single copies are packed already.
                flat = tensor if count == tensor.shape[1] else tensor.narrow(1, start, count)
            else:
                flat = operands.get((operand, mul))
                if flat is None:
                    flat = tensor.index_select(1, graph_constant(order) if is_traced(tensor) else order)
                    operands[operand, mul] = flat
            return flat.reshape(tensor.shape[0], *shape)

        return (operand, mul, shape), read

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

    @property
    def width(self) -> int:
        """Numbers of a row of the result."""
        return math.prod(self._row)

    def out_shape(self, size: int) -> tuple[int, ...]:
        """Return the result's shape for a number of rows.

        It is (rows, dimension), packed (rows, components, copies...), of weights (rows, paths, copies...), and of a
        first step (rows, pairs, copies...). Shared weights have no rows.
        """
        return (size, *self._row) if self._batched else self._row


def _first_step(layout: ProductLayout, role: str, group: Group, terms: Terms, *, packed: bool) -> tuple[Statement, Any]:
    """Return the product of one operand and the weights, the first of two steps to another operand's role.

        G[z,p,u,v] += dZ[z,K[p,w]] * W[L[p],u,v,w]     to the gradient of `y`
        G[z,p,u,w] += Y[z,J[p,v]] * W[L[p],u,v,w]      to the output and the gradient of `x`

    `p` counts pairs of a path and a component of the operand. It sums over the operand's copies by a matrix product;
    the second step sums over the coefficients and the other copies, which are few. One statement multiplies by all for
    each coefficient. On an H200, us, one step : two: to the gradient of `y` of 10,000 samples 58 : 42 (lmax 1, 32
    copies), 414 : 43 (lmax 1, 64), 1115 : 232 (lmax 2, 64); to the output of 1,000 samples 221 : 199 (lmax 2, 32) and
    1447 : 1158 (lmax 2, 64), with 32 scalars in `y` 140 : 70.

    Returns:
        It, and for each of the second step's terms the pair.
    """
    operand = _OF_FIRST[role]
    pairs = np.stack([terms["path"], terms["component"][:, NUMBER[operand]]])
    _, first, place = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    return Statement(layout, "g", group, terms[first], packed=packed, operand=operand), place.reshape(-1)


def statements_of(layout: ProductLayout, role: str, *, staged: bool = False) -> list[Statement]:
    """Return what computes a role; each statement adds to what those before it made of the same tensor.

    Args:
        layout: of the tensor product.
        role: a letter of `ROLES`, or "b": the matrix that maps the first input to the output.
        staged: make the role in two steps where its first is a long matrix product.

    Raises:
        UnsupportedModeError: the matrix is requested, and a path is of a mode with pairs.
    """
    groups = [group for group in layout.groups if role != "w" or group.weighted]
    found: list[Statement] = []
    for group in groups:
        terms = terms_of(layout, group, role)
        # Along edges, for pairs of copies, and for large tables.
        large = min(terms.size, MOST_TERMS) * _most_copies(group) > MOST_CELLS
        most, packed = MOST_TERMS, role != "b" and (layout.spec.convolution or group.mode.pairs or large)
        # Packing rows that are written once does not pay; with modes that mix multiplicities it does.
        once = role == "z" and len(groups) == 1 and terms.size <= MOST_TERMS and layout.spec.convolution
        in_place = not packed or (once and not group.mode.mixes and len(group.letters("z")) == 1)
        if staged and _in_steps(layout, role, group, terms):
            terms = terms_of(layout, group, "z" if role == "y" else role)
            first = _first_step(layout, role, group, terms, packed=packed)
            found.append(Statement(layout, role, group, terms, packed=packed, in_place=in_place, first=first))
        else:
            if role == "b":
                if group.mode.pairs:
                    mode = layout.spec.paths[group.paths[0]].mode
                    details, message = ["its pairs couple the copies of both inputs"], "right() is not defined for mode"
                    raise UnsupportedModeError(f"{message} {mode!r}", details=details, fix="call forward.", mode=mode)
                most = max(1, min(most, MOST_CELLS // _most_copies(group)))
            parts = [terms[start : start + most] for start in range(0, terms.size, most)]
            found += [Statement(layout, role, group, part, packed=packed, in_place=in_place) for part in parts]
    return found


def _in_steps(layout: ProductLayout, role: str, group: Group, terms: Terms) -> bool:
    """Return whether a role is made in two steps where that can be: its first is a long matrix product."""
    mode = group.mode
    # Each sample's own weights are read once, so there is no matrix product.
    if not (group.weighted and mode.mixes and not mode.pairs and layout.spec.shared) or role in "wb":
        return False
    if terms.size > MOST_TERMS:
        return False
    if role == "y":
        return group.extents["w"] >= LONG_SUM
    # One step multiplies the copies of `y` by the weights for each coefficient.
    copies = group.letters("y")
    if layout.spec.convolution or not copies or {*copies} & {*group.letters("x"), *group.letters("z")}:
        return False
    pairs = len({*zip(terms["path"].tolist(), terms["component"][:, 1].tolist(), strict=True)})
    return pays_between(math.prod(group.shape("y")), terms.size, pairs)


def _most_copies(group: Group) -> int:
    return max(math.prod(group.extents[x] for x in group.letters(operand)) for operand in "xyz")


def _join(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name
