"""Split a statement over static tables into dense matrix products, path by path.

    Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]

has a term for each nonzero coefficient. Terms with the same weights form a path; the cells that its terms read of `X`
and write of `Z` are the columns and rows of a small matrix of each sample, and what is left are dense products:

    M[z,k,i] += C[j,k,i] * Y[z,j]          T[z,k,u] += M[z,k,i] * X[z,i,u]          Z[z,k,w] += T[z,k,u] * W[u,w]

The same products, in another order, compute the statements of the other three tensors from `Z`'s gradient. Where the
copies `u` are not mixed, `w` is `u`, and the weights multiply cell by cell; there may be no weights at all.

The pass works on the syntax tree and on tables, and knows no names: which factor is which follows from the indices that
each of them has.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from insum_nn.compiler.lang.syntax import Access, Index, Number, Statement, Subscript
from insum_nn.facts import StaticTable

__all__ = [
    "SIDES",
    "Cells",
    "NoPathsError",
    "Operand",
    "Path",
    "PathSplit",
    "Terms",
    "products_of",
    "row_of",
    "samples_of",
    "split_into_paths",
]

# The factors: two with copies, between which the matrix stands; what makes the matrix; the weights.
SIDES = ("left", "right", "scale", "weight")
# Cells of all matrices for each term at most: with more, most of what is multiplied is zeros.
_MOST_ZEROS = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a statement, read or written.

    Attributes:
        name: its name.
        rows: the index tensor that selects its row for each sample; "" where each sample has its own, `None` where all
            samples share the tensor.
    """

    name: str
    rows: str | None


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a path in a row of a tensor: the first one of each component, and the step to the next copy."""

    first: tuple[int, ...]
    step: int
    copies: int


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One dense product.

    Attributes:
        left: the cells of one factor.
        right: the cells of the other.
        scale: the cells of what makes the matrix.
        block: coefficients, (scale, right, left); of shape (1, 1, 1) where the matrix is a number times the identity.
        weight: the first cell of the weights; -1 without weights.
        transposed: weights are (right, left) copies, rather than (left, right).
    """

    left: Cells
    right: Cells
    scale: tuple[int, ...]
    block: NDArray[np.float64]
    weight: int
    transposed: bool

    @property
    def signature(self) -> tuple[object, ...]:
        """What two statements have in common that share this path's products."""
        return self.block.shape, self.block.tobytes(), self.left.copies, self.right.copies, self.weight >= 0


@dataclass(frozen=True, slots=True, eq=False)
class PathSplit:
    """A statement as dense products.

    Attributes:
        operands: the tensor on each side; no weight where there is none.
        written: the side of the output.
        mixes: weights are matrices between copies; otherwise they multiply cell by cell.
        paths: the products, in the order of their cells.
    """

    operands: Mapping[str, Operand]
    written: str
    mixes: bool
    paths: tuple[Path, ...]

    def turned(self) -> PathSplit:
        """Left and right exchanged."""
        other = {"left": "right", "right": "left"}
        paths = (
            replace(
                path,
                left=path.right,
                right=path.left,
                block=np.ascontiguousarray(path.block.swapaxes(1, 2)),
                transposed=not path.transposed,
            )
            for path in self.paths
        )
        operands = {other.get(side, side): operand for side, operand in self.operands.items()}
        return PathSplit(operands, other.get(self.written, self.written), self.mixes, _ordered(paths))

    def multiplications(self) -> int:
        """Of a sample: the matrices by the left side, then by the weights."""
        total = 0
        for path in self.paths:
            rows, copies = len(path.right.first), path.left.copies
            total += rows * copies * path.block.shape[2] + (rows * copies * path.right.copies if self.mixes else 0)
        return total

    def columns(self) -> int:
        """Cells of all matrices of a sample."""
        return sum(path.block[0].size for path in self.paths)


def split_into_paths(
    statement: Statement,
    tables: Mapping[str, StaticTable],
    sizes: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> PathSplit | None:
    """Return a statement as dense products; `None`: it is none of this kind.

    Args:
        statement: the statement.
        tables: values of its static tensors.
        sizes: extents of its indices; that of the samples is not read.
        shapes: of its tensors, the output among them.
    """
    reads = [read for read in statement.reads if read.name not in tables]
    if statement.operator not in ("+=", "=") or len(reads) not in (2, 3):
        return None
    if len({read.name for read in reads}) < len(reads):
        return None
    try:
        terms = Terms(statement, tables, sizes, shapes)
        found = [split for split in _assignments(terms, [*reads, statement.output]) if split is not None]
    except NoPathsError:
        return None
    # Where factors have no copies these do not tell their sides: the fewest cells, then the fewest products are right.
    best = min(found, key=lambda split: (split.columns(), len(split.paths)), default=None)
    if best is None or best.columns() > _MOST_ZEROS * terms.value.size:
        return None
    return best


def samples_of(statement: Statement, tables: Container[str]) -> str | None:
    """The index of the samples, which selects rows; `None`: there is none."""
    points = _points(statement, tables)
    accesses = [statement.output, *(read for read in statement.reads if read.name not in tables)]
    rows = [row[0] for row in (_row(access, points, tables) for access in accesses) if row is not None]
    return Counter(rows).most_common(1)[0][0] if rows else None


def row_of(access: Access, samples: str, statement: Statement, tables: Container[str]) -> str | None:
    """The index tensor that selects an access' row for each sample; "": its own; `None`: it has no rows of samples."""
    row = _row(access, _points(statement, tables), tables)
    return row[1] if row is not None and row[0] == samples else None


def _points(statement: Statement, tables: Container[str]) -> list[str]:
    """The indices of the coefficients, whose combinations are the terms; none where they have other subscripts."""
    names = [s.plain for read in statement.reads if read.name in tables for s in read.subscripts]
    return [] if None in names else list(dict.fromkeys(name for name in names if name is not None))


def _row(access: Access, points: Container[str], tables: Container[str]) -> tuple[str, str] | None:
    """The index that the first subscript selects a row by, and the index tensor that it does so through."""
    if not access.subscripts:
        return None
    subscript = access.subscripts[0]
    if subscript.plain is not None:
        return None if subscript.plain in points else (subscript.plain, "")
    inner = subscript.indirect
    if inner is None or inner.name in tables or len(inner.subscripts) != 1:
        return None
    plain = inner.subscripts[0].plain
    return None if plain is None or plain in points else (plain, inner.name)


class NoPathsError(Exception):
    """The statement is not of the kind that the pass splits."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What is known of an access: its operand, the cell of each term, and the step of each copy index."""

    operand: Operand
    cell: Integers
    steps: Mapping[str, Integers]


class Terms:
    """The terms of a statement: a coefficient for each, and the cells of every access."""

    def __init__(
        self,
        statement: Statement,
        tables: Mapping[str, StaticTable],
        sizes: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        self.statement, self.tables, self.sizes, self.shapes = statement, tables, sizes, shapes
        coefficients = [read for read in statement.reads if read.name in tables]
        points = _points(statement, tables)
        if not points:
            raise NoPathsError
        grid = np.indices([sizes[name] for name in points]).reshape(len(points), -1)
        self.at: dict[str, Integers] = dict(zip(points, grid, strict=True))
        value = np.ones(grid.shape[1])
        for factor in statement.factors:
            if isinstance(factor, Number):
                value = value * factor.value
        for read in coefficients:
            value = value * self.values(read.name)[tuple(self.at[s.plain] for s in read.subscripts if s.plain)]
        nonzero = value != 0
        self.value: NDArray[np.float64] = value[nonzero]
        self.at = {name: own[nonzero] for name, own in self.at.items()}
        samples = samples_of(statement, tables)
        if not self.value.size or samples is None:
            raise NoPathsError
        self.samples: str = samples

    def values(self, name: str) -> NDArray[np.float64]:
        table = self.tables[name]
        return np.asarray(table.values).reshape(table.shape)

    def read(self, access: Access) -> _Read:
        """The cells of an access, counted along a row."""
        row = _row(access, self.at, self.tables)
        has_rows = row is not None and row[0] == self.samples
        cell = np.zeros(self.value.size, np.int64)
        steps: dict[str, Integers] = {}
        shape = self.shapes[access.name]
        for axis in range(1 if has_rows else 0, len(shape)):
            stride = math.prod(shape[axis + 1 :])
            place, own = self._position(access.subscripts[axis])
            self._check_inside(place, own, shape[axis])
            cell = cell + stride * place
            for name, step in own.items():
                steps[name] = steps.get(name, np.zeros_like(cell)) + stride * step
        operand = Operand(access.name, row[1] if has_rows and row is not None else None)
        return _Read(operand, cell, {name: step for name, step in steps.items() if self.sizes[name] > 1})

    def _position(self, subscript: Subscript) -> tuple[Integers, dict[str, Integers]]:
        place = np.full(self.value.size, subscript.offset, np.int64)
        steps: dict[str, Integers] = {}
        for term in subscript.terms:
            start, own = self._atom(term.atom)
            place = place + term.coefficient * start
            for name, step in own.items():
                steps[name] = steps.get(name, np.zeros_like(place)) + term.coefficient * step
        return place, steps

    def _atom(self, atom: Index | Access) -> tuple[Integers, dict[str, Integers]]:
        zeros = np.zeros(self.value.size, np.int64)
        if isinstance(atom, Index):
            if atom.name in self.at:
                return self.at[atom.name], {}
            if atom.name == self.samples:
                raise NoPathsError
            return zeros, {atom.name: zeros + 1}
        names = [subscript.plain for subscript in atom.subscripts]
        copies = [name for name in names if name is not None and name not in self.at]
        if atom.name not in self.tables or None in names or len(copies) > 1 or self.samples in copies:
            raise NoPathsError
        every = np.arange(self.sizes[copies[0]]) if copies else np.zeros(1, np.int64)
        places = tuple(self.at[x][:, None] if x in self.at else every[None] for x in names if x is not None)
        found = np.broadcast_to(self.values(atom.name)[places], (zeros.size, every.size)).astype(np.int64)
        if not copies:
            return found[:, 0], {}
        step = found[:, 1] - found[:, 0] if every.size > 1 else zeros
        if (found != found[:, :1] + step[:, None] * every).any():
            raise NoPathsError
        return found[:, 0], {copies[0]: step}

    def _check_inside(self, place: Integers, steps: Mapping[str, Integers], extent: int) -> None:
        ends = [step * (self.sizes[name] - 1) for name, step in steps.items()]
        low = place + sum(np.minimum(end, 0) for end in ends)
        high = place + sum(np.maximum(end, 0) for end in ends)
        if (low < 0).any() or (high >= extent).any():
            raise NoPathsError


def _assignments(terms: Terms, accesses: Sequence[Access]) -> Iterator[PathSplit | None]:
    """Every way in which the accesses, the output last, can be the sides of dense products."""
    reads = [terms.read(access) for access in accesses]
    last = len(reads) - 1
    for scale in range(len(reads)):
        if reads[scale].steps or reads[scale].operand.rows is None:
            continue
        for weight in range(len(reads)) if len(reads) == 4 else [-1]:
            if weight == scale:
                continue
            left, right = (at for at in range(len(reads)) if at not in (scale, weight))
            sides = {"left": reads[left], "right": reads[right], "scale": reads[scale]}
            if weight >= 0:
                sides["weight"] = reads[weight]
            written = next(side for side, at in zip(SIDES, (left, right, scale, weight), strict=True) if at == last)
            yield _split(terms, sides, written)


def _split(terms: Terms, sides: Mapping[str, _Read], written: str) -> PathSplit | None:
    left, right, scale, weight = (sides.get(side) for side in SIDES)
    assert left is not None
    assert right is not None
    assert scale is not None
    own, other = set(left.steps), set(right.steps)
    if len(own) > 1 or len(other) > 1 or left.operand.rows is None or right.operand.rows is None:
        return None
    mixes = own != other
    if mixes and (own & other or weight is None or set(weight.steps) != own | other):
        return None
    if not mixes and weight is not None and set(weight.steps) != own:
        return None
    if weight is not None and weight.operand.rows not in (None, ""):
        return None
    zeros = np.zeros(terms.value.size, np.int64)
    label_a, label_b = next(iter(own), ""), next(iter(other), "")
    step_a, step_b = left.steps.get(label_a, zeros), right.steps.get(label_b, zeros)
    keys = [step_a, step_b]
    if weight is None:
        keys.append(_connected(left.cell, right.cell))
    else:
        keys += [weight.cell, weight.steps.get(label_a, zeros), weight.steps.get(label_b, zeros)]
    unique, number = np.unique(np.stack(keys), axis=1, return_inverse=True)
    copies = terms.sizes[label_a] if label_a else 1, terms.sizes[label_b] if label_b else 1
    paths: list[Path] = []
    for at, key in enumerate(unique.T.tolist()):
        some = np.flatnonzero(number.reshape(-1) == at)
        first = -1 if weight is None else key[2]
        transposed = False
        if weight is not None:
            step = key[3], key[4]
            straight = (copies[1] if mixes else 1, 1)
            if not _lies(step, straight, copies):
                if not mixes or not _lies(step, (1, copies[0]), copies):
                    return None
                transposed = True
        path = _path(terms.value[some], left.cell[some], right.cell[some], scale.cell[some])
        a, b = (Cells(tuple(cells.tolist()), key[n], copies[n]) for n, cells in enumerate(path[:2]))
        paths.append(Path(a, b, tuple(path[2].tolist()), path[3], first, transposed))
    if weight is not None:
        # Each cell belongs to one path alone.
        starts = sorted(path.weight for path in paths)
        size = math.prod(copies) if mixes else copies[0]
        if any(b - a < size for a, b in itertools.pairwise(starts)):
            return None
    return PathSplit({x: r.operand for x, r in sides.items()}, written, mixes, _ordered(_joined(paths, mixes)))


def _joined(paths: Sequence[Path], mixes: bool) -> Iterator[Path]:
    """The paths, those whose matrices of weights lie one above the other as one product that sums more copies."""
    last: Path | None = None
    for path in sorted(paths, key=lambda path: path.weight):
        if last is not None and mixes and _continues(last, path):
            side = "right" if last.transposed else "left"
            own: Cells = getattr(last, side)
            last = replace(last, **{side: replace(own, copies=own.copies + getattr(path, side).copies)})
            continue
        if last is not None:
            yield last
        last = path
    if last is not None:
        yield last


def _continues(path: Path, other: Path) -> bool:
    """Whether the rows of a path's weights, and the cells that belong to them, go on in another path."""
    rows, columns = (path.right, path.left) if path.transposed else (path.left, path.right)
    next_rows, next_columns = (other.right, other.left) if path.transposed else (other.left, other.right)
    return (
        other.weight == path.weight + rows.copies * columns.copies
        and (other.transposed, next_columns, other.scale) == (path.transposed, columns, path.scale)
        and next_rows.step == rows.step
        and next_rows.first == tuple(first + rows.step * rows.copies for first in rows.first)
        and np.array_equal(path.block, other.block)
    )


def _lies(steps: tuple[int, int], expected: tuple[int, int], copies: tuple[int, int]) -> bool:
    """Whether weights have these steps, where there is a step at all."""
    return all(step == other for step, other, count in zip(steps, expected, copies, strict=True) if count > 1)


def _ordered(paths: Iterator[Path] | Sequence[Path]) -> tuple[Path, ...]:
    return tuple(sorted(paths, key=lambda path: (path.left.first[0], path.right.first[0], path.weight)))


def _path(
    value: NDArray[np.float64], left: Integers, right: Integers, scale: Integers
) -> tuple[Integers, Integers, Integers, NDArray[np.float64]]:
    """The cells of a path on each side, and its coefficients."""
    (i, at_i), (k, at_k), (j, at_j) = (np.unique(cell, return_inverse=True) for cell in (left, right, scale))
    block = np.zeros((j.size, k.size, i.size))
    np.add.at(block, (at_j.reshape(-1), at_k.reshape(-1), at_i.reshape(-1)), value)
    if j.size == 1 and k.size == i.size and np.allclose(block[0], block[0, 0, 0] * np.eye(k.size), rtol=1e-12, atol=0):
        block = block[:, :1, :1]
    return i, k, j, block


def _connected(left: Integers, right: Integers) -> Integers:
    """A number for each term, the same for those whose cells are connected."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def root(node: tuple[str, int]) -> tuple[str, int]:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for a, b in zip(left.tolist(), right.tolist(), strict=True):
        parent[root(("left", a))] = root(("right", b))
    numbers: dict[tuple[str, int], int] = {}
    return np.array([numbers.setdefault(root(("left", a)), len(numbers)) for a in left.tolist()], np.int64)


def products_of(split: PathSplit) -> Iterator[str]:
    """The dense products of a split, one statement a line, then the columns of each path."""
    name = {side: operand.name for side, operand in split.operands.items()}
    rows = {side: "z" if not own.rows else f"{own.rows}[z]" for side, own in split.operands.items()}
    right = "w" if split.mixes else "u"
    shared = "weight" in split.operands and split.operands["weight"].rows is None
    weight = "".join(["[", "" if shared else "z,", "u,w]" if split.mixes else "u]"])
    read_left, read_right = f"{name['left']}[{rows['left']},i,u]", f"{name['right']}[{rows['right']},k,{right}]"
    scale, weights = f"{name['scale']}[{rows['scale']},j]", f"{name.get('weight', '')}{weight}"
    if split.written != "scale":
        yield f"M[z,k,i] += C[j,k,i] * {scale}"
    if split.written in ("left", "scale"):
        back = "G[z,k,u]"
        if "weight" in name:
            yield f"{back} += {read_right} * {weights}"
        else:
            back = read_right
        if split.written == "left":
            yield f"{read_left} += M[z,k,i] * {back}"
        else:
            yield f"M[z,k,i] += {back} * {read_left}"
            yield f"{scale} += C[j,k,i] * M[z,k,i]"
    elif "weight" not in name:
        yield f"{read_right} += M[z,k,i] * {read_left}"
    else:
        yield f"T[z,k,u] += M[z,k,i] * {read_left}"
        into, factor = (weights, read_right) if split.written == "weight" else (read_right, weights)
        yield f"{into} += T[z,k,u] * {factor}"
    for path in split.paths:
        cells = [f"{name['left']} {_shown(path.left)}", f"{name['right']} {_shown(path.right)}"]
        cells.append(f"{name['scale']} at {', '.join(map(str, path.scale))}")
        if "weight" in name:
            cells.append(f"{name['weight']} from {path.weight} on")
        if len(path.left.first) * len(path.right.first) > path.block[0].size:
            cells.append("M is a multiple of the identity")
        yield f"# {'; '.join(cells)}"


def _shown(cells: Cells) -> str:
    repeated = f", {cells.copies} times in steps of {cells.step}" if cells.copies > 1 else ""
    return f"at {', '.join(map(str, cells.first))}{repeated}"
