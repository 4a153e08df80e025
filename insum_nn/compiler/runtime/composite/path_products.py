"""Run statements that are split into paths: dense products of a library, a range of samples at a time.

For each path, from the matrix `M` that coefficients and the scale make of each sample,

    T[z,k,u] += M[z,k,i] * left[z,i,u]              right[z,k,w] += T[z,k,u] * weight[u,w]
    G[z,k,u] += right[z,k,w] * weight[u,w]          left[z,i,u]  += M[z,k,i] * G[z,k,u]
    dM[z,k,i] += G[z,k,u] * left[z,i,u]             weight[u,w]  += T[z,k,u] * right[z,k,w]

so that statements which write different sides of the same paths share `M`, `T` and `G`. Zeros of a matrix are
multiplied too: a NaN reaches all components that its path ends in, of its sample and copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from insum_nn.compiler.passes.path_products import SIDES, Cells, Path, PathSplit
from insum_nn.compiler.runtime.composite.path_families import Family, Number, Output
from insum_nn.dtypes import wide_dtype

__all__ = ["PathProducts"]

# Bytes of intermediate results. The allocator returns blocks of more than 32 MiB to the system at once, and each new
# one costs page faults.
AT_ONCE = 1 << 24
# Samples at a time at least, and of all samples, where rows are gathered: never as much as all of them gathered.
_LEAST, _LEAST_GATHERED, _SHARE = 64, 256, 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """The cells of a path in a tensor.

    Attributes:
        number: of the tensor.
        shape: (components, copies).
        steps: from one component to the next, and from copy to copy.
        start: the first cell.
        columns: all cells, where components are not evenly spaced.
    """

    number: Number
    shape: tuple[int, int]
    steps: tuple[int, int]
    start: int
    columns: Tensor | None

    @staticmethod
    def of(number: Number, cells: Cells) -> _Entry:
        first = cells.first
        steps = {b - a for a, b in itertools.pairwise(first)} or {1}
        spacing = min(steps)
        columns = None
        if len(steps) > 1:
            copies = torch.arange(cells.copies, device="cpu")
            columns = (torch.tensor(first, device="cpu")[:, None] + cells.step * copies).reshape(-1)
        return _Entry(number, (len(first), cells.copies), (spacing, cells.step), first[0], columns)

    def view(self, flat: Tensor) -> Tensor:
        """The cells of rows: (rows, components, copies); evenly spaced."""
        row, cell = flat.stride()
        count, copies = self.shape
        spacing, step = self.steps
        strides = (row, spacing * cell, step * cell)
        return flat.as_strided((flat.shape[0], count, copies), strides, flat.storage_offset() + self.start * cell)

    def read(self, flat: Tensor) -> Tensor:
        """The cells of rows, copies fastest."""
        if self.columns is None:
            return self.view(flat).contiguous()
        return flat.index_select(1, self.columns).view(flat.shape[0], *self.shape)

    def write(self, flat: Tensor, total: Tensor, *, add: bool) -> None:
        """Put numbers into the cells of rows, or add them."""
        if self.columns is not None:
            total = total.flatten(1)
            flat.index_add_(1, self.columns, total) if add else flat.index_copy_(1, self.columns, total)
        elif add:
            self.view(flat).add_(total)
        else:
            self.view(flat).copy_(total)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a path in a tensor: where they begin, and how they lie."""

    number: Number
    first: int
    left: int
    right: int
    mixes: bool
    transposed: bool
    shared: bool

    @staticmethod
    def of(number: Number, split: PathSplit, path: Path) -> _Weights:
        shared = split.operands["weight"].rows is None
        left, right = path.left.copies, path.right.copies
        return _Weights(number, path.weight, left, right, split.mixes, path.transposed, shared)

    def view(self, tensor: Tensor) -> Tensor:
        """(left copies, right copies), or (copies,); after the rows where each sample has its own."""
        # One call in place of a narrow and a reshape: these are many, and small.
        *row, cell = tensor.stride()
        shape: tuple[int, ...] = (self.left,)
        steps: tuple[int, ...] = (cell,)
        if self.mixes:
            shape = self.left, self.right
            steps = (cell, self.left * cell) if self.transposed else (self.right * cell, cell)
        start = tensor.storage_offset() + self.first * cell
        return tensor.as_strided((*tensor.shape[:-1], *shape), (*row, *steps), start)


@dataclass(frozen=True, slots=True)
class _Step:
    """The products of one path.

    Attributes:
        first: the first column of its matrices, among those of the scale that is read.
        slope_first: the same among those of the scale that is written.
        shape: of a matrix, (right, left) components; (1, 1) for a multiple of the identity.
        mixes: weights are matrices between copies.
        scale: the tensor that matrices are made of; `None`: nothing needs them.
        slope: the output that is the scale's.
        left: the number of the left side's entry among those that are read; -1: it is not read.
        right: likewise.
        left_sum: the number of the left side's entry among those that are written; -1: it is not written.
        right_sum: likewise.
        weight: the weights that are read.
        weight_sum: the weights that are written.
    """

    first: int
    slope_first: int
    shape: tuple[int, int]
    mixes: bool
    scale: Number | None
    slope: Number | None
    left: int
    right: int
    left_sum: int
    right_sum: int
    weight: _Weights | None
    weight_sum: _Weights | None


class _Tables:
    """The coefficients of all matrices that are made of a tensor, (its width, their cells)."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self._parts: list[tuple[int, Path]] = []
        self._made: dict[torch.dtype, Tensor] = {}

    def add(self, path: Path) -> int:
        """Add a path; returns the first of its columns."""
        self._parts.append((self.count, path))
        first = self.count
        self.count += path.block[0].size
        return first

    def of(self, dtype: torch.dtype) -> Tensor:
        """As a matrix."""
        if dtype not in self._made:
            table = np.zeros((self.width, self.count))
            for first, path in self._parts:
                size = path.block[0].size
                block = path.block.reshape(len(path.scale), size)
                table[np.array(path.scale), first : first + size] += block
            self._made[dtype] = torch.from_numpy(table).to(dtype)
        return self._made[dtype]


class PathProducts:
    """Families of splits, computed together.

    Args:
        families: what is computed.
        rows: the rows of each output, `None` where all samples share it; and the numbers in a row.
        widths: the numbers in a row of each tensor that is read.
    """

    def __init__(
        self, families: Sequence[Family], rows: Sequence[tuple[int | None, int]], widths: Sequence[int]
    ) -> None:
        self.rows = tuple(rows)
        outputs = [output for family in families for output in family.outputs]
        self.selects: dict[Number, str | None] = {o.number: o.split.operands[o.side].rows for o in outputs}
        self.gathered = {number: own for family in families for number, own in family.reads.values()}
        # Outputs whose cells are written more than once for a sample, or added to.
        self.added = {o.number for o in outputs if o.side in ("scale", "weight") or _overlap(outputs, o.number)}
        self.read: dict[tuple[Number, Cells], _Entry] = {}
        self.written: dict[tuple[Number, Cells], _Entry] = {}
        self.tables: dict[Number, _Tables] = {}
        self.slopes: dict[Number, _Tables] = {}
        self.steps = [step for family in families for step in self._steps(family, widths)]
        self.entries, self.sums = list(self.read.values()), list(self.written.values())
        # Numbers of a sample besides its operands: matrices and their gradients; of a path `T`, `G` and a result; what
        # is gathered.
        moved = sum(widths[number] for number, own in self.gathered.items() if own)
        moved += sum(self.rows[number][1] for number, own in self.selects.items() if own)
        columns = sum(family.some.columns() for family in families)
        largest = max(
            len(path.right.first) * max(path.left.copies, path.right.copies)
            for family in families
            for path in family.some.paths
        )
        self.between = moved + 2 * columns + 3 * largest
        self.at_nodes = bool(moved)

    def _steps(self, family: Family, widths: Sequence[int]) -> Iterator[_Step]:
        _, right, scale, weight = (family.written(side) for side in SIDES)
        source = family.reads["scale"][0] if "scale" in family.reads else None
        if source is not None:
            self.tables.setdefault(source, _Tables(widths[source]))
        if scale is not None:
            self.slopes.setdefault(scale.number, _Tables(self.rows[scale.number][1]))
        for at, path in enumerate(family.some.paths):
            _, k, i = path.block.shape
            read, written = self._read(family, at), self._written(family, at)
            own = family.cells.get("weight")
            yield _Step(
                self.tables[source].add(family.cells["scale"].paths[at]) if source is not None else 0,
                self.slopes[scale.number].add(scale.split.paths[at]) if scale is not None else 0,
                (k, i),
                family.some.mixes,
                source,
                None if scale is None else scale.number,
                read["left"] if right is not None or weight is not None or scale is not None else -1,
                read["right"],
                written["left"],
                written["right"],
                None if own is None else _Weights.of(family.reads["weight"][0], own, own.paths[at]),
                None if weight is None else _Weights.of(weight.number, weight.split, weight.split.paths[at]),
            )

    def _read(self, family: Family, at: int) -> dict[str, int]:
        found = {"left": -1, "right": -1}
        for side in found:
            if side in family.reads:
                key = family.reads[side][0], getattr(family.cells[side].paths[at], side)
                self.read.setdefault(key, _Entry.of(*key))
                found[side] = list(self.read).index(key)
        return found

    def _written(self, family: Family, at: int) -> dict[str, int]:
        found = {"left": -1, "right": -1}
        for side in found:
            output = family.written(side)
            if output is not None:
                key = output.number, getattr(output.split.paths[at], side)
                self.written.setdefault(key, _Entry.of(*key))
                found[side] = list(self.written).index(key)
        return found

    def __call__(
        self, tensors: Sequence[Tensor], indices: Mapping[str, Tensor], samples: int, kept: Tensor | None
    ) -> list[Tensor]:
        """Every output, (rows, numbers of a row); of fp16 and bf16 in float32, in which they are multiplied.

        Args:
            tensors: what is read, by number.
            indices: index tensors that select rows, by name; none of their entries of `kept` samples is missing.
            samples: how many there are.
            kept: those that take part; `None`: all.
        """
        some, wide = tensors[0], wide_dtype(tensors[0].dtype)
        # What is read by rows is widened a range at a time.
        flat = [
            (t if t.ndim == 1 else t.reshape(-1)).to(wide) if self.gathered[n] is None else _flat(t)
            for n, t in enumerate(tensors)
        ]
        found = [some.new_zeros(*(() if rows is None else (rows,)), width, dtype=wide) for rows, width in self.rows]
        count = samples if kept is None else kept.numel()
        most = max(_LEAST, AT_ONCE // (wide.itemsize * self.between))
        if self.at_nodes:
            most = min(most, max(_LEAST_GATHERED, count // _SHARE))
        size = -(-count // max(1, -(-count // most)))
        if kept is None and not self.at_nodes and size >= count:
            _Range(self, count, [tensor.to(wide) for tensor in flat], found).run()
            return found

        def places(rows: str, start: int, own: int) -> Tensor:
            """The rows of a range of samples."""
            if kept is None:
                return indices[rows].narrow(0, start, own)
            chosen = kept.narrow(0, start, own)
            return indices[rows].index_select(0, chosen) if rows else chosen

        # Results of a range of samples that are then added to selected rows.
        sums = {
            number: some.new_zeros(size, self.rows[number][1], dtype=wide)
            for number, rows in self.selects.items()
            if rows or (rows is not None and kept is not None)
        }
        for start in range(0, count, max(1, size)):
            own = min(size, count - start)
            operands: list[Tensor] = []
            for number, tensor in enumerate(flat):
                rows = self.gathered[number]
                if rows is None:
                    operands.append(tensor)
                elif rows or kept is not None:
                    operands.append(tensor.index_select(0, places(rows, start, own)))
                else:
                    operands.append(tensor.narrow(0, start, own))
            made = [
                sums[n].narrow(0, 0, own) if n in sums else t if self.selects[n] is None else t.narrow(0, start, own)
                for n, t in enumerate(found)
            ]
            for number in sums.keys() & self.added:
                sums[number].zero_()
            _Range(self, own, [tensor.to(wide) for tensor in operands], made).run()
            for number, part in sums.items():
                rows = self.selects[number] or ""
                found[number].index_add_(0, places(rows, start, own), part.narrow(0, 0, own))
        return found


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)


def _overlap(outputs: Sequence[Output], number: Number) -> bool:
    """Whether different entries of an output have a cell in common."""
    seen: set[int] = set()
    entries = {
        cells
        for output in outputs
        if output.number == number and output.side in ("left", "right")
        for cells in (getattr(path, output.side) for path in output.split.paths)
    }
    for cells in entries:
        own = {first + cells.step * copy for first in cells.first for copy in range(cells.copies)}
        if own & seen:
            return True
        seen |= own
    return False


class _Range:
    """The products of some samples."""

    def __init__(self, whole: PathProducts, rows: int, operands: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        self.whole, self.rows, self.operands, self.found = whole, rows, operands, found
        # Entries of operands and of outputs, copies fastest; made when they are first read, or added to.
        self.entries: list[Tensor | None] = [None] * len(whole.entries)
        self.sums: list[Tensor | None] = [None] * len(whole.sums)

    def run(self) -> None:
        """Add what the samples make to the outputs."""
        whole, found = self.whole, self.found
        matrices = {n: self.operands[n] @ table.of(self.operands[n].dtype) for n, table in whole.tables.items()}
        slopes = {n: found[n].new_empty(self.rows, table.count) for n, table in whole.slopes.items()}
        for step in whole.steps:
            size = step.shape[0] * step.shape[1]
            matrix = None
            if step.scale is not None:
                matrix = _matrix(matrices[step.scale], step.first, step.shape)
                if step.right_sum >= 0 or step.weight_sum is not None:
                    turned = _product(matrix, self.entry(step.left))
                    if step.right_sum >= 0:
                        self.add_weighted(step, turned)
                    if step.weight_sum is not None:
                        self.add_weights(step, step.weight_sum, turned)
            if step.left_sum >= 0 or step.slope is not None:
                back = self.back(step)
                if step.left_sum >= 0 and matrix is not None:
                    self.add(step.left_sum, matrix.mT, back)
                if step.slope is not None:
                    into = _matrix(slopes[step.slope], step.slope_first, step.shape)
                    into.copy_(self.slope(step, size, back))
        for number, table in whole.slopes.items():
            found[number].addmm_(slopes[number], table.of(found[number].dtype).mT)
        for entry, total in zip(whole.sums, self.sums, strict=True):
            if total is not None:
                entry.write(found[entry.number], total, add=entry.number in whole.added)

    def entry(self, number: int) -> Tensor:
        """An entry of an operand, copies fastest: (rows, components, copies)."""
        found = self.entries[number]
        if found is None:
            own = self.whole.entries[number]
            found = self.entries[number] = own.read(self.operands[own.number])
        return found

    def add_weighted(self, step: _Step, turned: Tensor) -> None:
        """Add `T` times the weights to an entry of the right side."""
        into = self.sums[step.right_sum]
        if step.weight is None:
            self.sums[step.right_sum] = turned if into is None else into.add_(turned)
            return
        weights = step.weight.view(self.operands[step.weight.number])
        if not step.mixes:
            weights = weights.unsqueeze(-2)
            self.sums[step.right_sum] = turned * weights if into is None else into.addcmul_(turned, weights)
        elif into is None:
            self.sums[step.right_sum] = turned @ weights
        elif step.weight.shared:
            into.flatten(0, 1).addmm_(turned.flatten(0, 1), weights)
        else:
            into.baddbmm_(turned, weights)

    def back(self, step: _Step) -> Tensor:
        """`G`: what the weights make of the right side."""
        slope = self.entry(step.right)
        if step.weight is None:
            return slope
        weights = step.weight.view(self.operands[step.weight.number])
        return slope @ weights.mT if step.mixes else slope * weights.unsqueeze(-2)

    def slope(self, step: _Step, size: int, back: Tensor) -> Tensor:
        """`dM`."""
        entry = self.entry(step.left)
        if size == 1:
            return (back * entry).sum((1, 2), keepdim=True)
        return _product(back, entry.mT)

    def add(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product to an entry of the left side."""
        into = self.sums[number]
        if into is None:
            self.sums[number] = _product(left, right)
        elif left.shape[2] == 1:
            into.addcmul_(left, right)
        else:
            into.baddbmm_(left, right)

    def add_weights(self, step: _Step, weights: _Weights, turned: Tensor) -> None:
        """Add a path's part of the weights."""
        into, slope = weights.view(self.found[weights.number]), self.entry(step.right)
        if not step.mixes:
            into.add_((turned * slope).sum((0, 1) if weights.shared else 1))
        elif weights.shared:
            into.addmm_(turned.flatten(0, 1).mT, slope.flatten(0, 1))
        else:
            torch.bmm(turned.mT, slope, out=into)


def _matrix(matrices: Tensor, first: int, shape: tuple[int, int]) -> Tensor:
    """One of the matrices of each sample, which lie side by side."""
    rows, count = matrices.shape
    return matrices.as_strided((rows, *shape), (count, shape[1], 1), first)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """(rows, a, b) times (rows, b, c); of one term without a library's call for each row."""
    return left * right if left.shape[2] == 1 else torch.bmm(left, right)
