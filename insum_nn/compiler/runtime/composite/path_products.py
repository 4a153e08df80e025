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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_nn.compiler.lang.printed import function_of_lines
from insum_nn.compiler.passes.path_products import SIDES, Cells, Path, PathSplit
from insum_nn.compiler.runtime.composite.path_families import Family, Number, Output

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

    def add(self, path: Path) -> int:
        """Add a path; returns the first of its columns."""
        self._parts.append((self.count, path))
        first = self.count
        self.count += path.block[0].size
        return first

    def of(self, dtype: torch.dtype) -> Tensor:
        """As a matrix."""
        table = np.zeros((self.width, self.count))
        for first, path in self._parts:
            size = path.block[0].size
            block = path.block.reshape(len(path.scale), size)
            table[np.array(path.scale), first : first + size] += block
        return torch.from_numpy(table).to(dtype)


class PathProducts:
    """Families of splits, computed together.

    Args:
        families: what is computed.
        written: the numbers in a row of each output.
        widths: the numbers in a row of each tensor that is read.
        dtype: in which they are multiplied; what is read may be of fp16 or bf16.
    """

    def __init__(
        self,
        families: Sequence[Family],
        written: Sequence[int],
        widths: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.row_sizes, self.dtype = tuple(written), dtype
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
        moved += sum(self.row_sizes[number] for number, own in self.selects.items() if own)
        columns = sum(family.some.columns() for family in families)
        largest = max(
            len(path.right.first) * max(path.left.copies, path.right.copies)
            for family in families
            for path in family.some.paths
        )
        self.between = moved + 2 * columns + 3 * largest
        self.at_nodes = bool(moved)
        self._run = _printed(self)

    def _steps(self, family: Family, widths: Sequence[int]) -> Iterator[_Step]:
        _, right, scale, weight = (family.written(side) for side in SIDES)
        source = family.reads["scale"][0] if "scale" in family.reads else None
        if source is not None:
            self.tables.setdefault(source, _Tables(widths[source]))
        if scale is not None:
            self.slopes.setdefault(scale.number, _Tables(self.row_sizes[scale.number]))
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
        self,
        tensors: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        indices: Mapping[str, Tensor],
        samples: int,
        kept: Tensor | None,
    ) -> list[Tensor]:
        """Every output, of the dtype in which they are multiplied.

        Args:
            tensors: what is read, by number.
            shapes: of the outputs, (rows, numbers of a row), or (numbers of a row,) where all samples share it.
            indices: index tensors that select rows, by name; none of their entries of `kept` samples is missing.
            samples: how many there are.
            kept: those that take part; `None`: all.
        """
        some, wide = tensors[0], self.dtype
        found = [some.new_zeros(shape, dtype=wide) for shape in shapes]
        count = samples if kept is None else kept.numel()
        most = max(_LEAST, AT_ONCE // (wide.itemsize * self.between))
        if self.at_nodes:
            most = min(most, max(_LEAST_GATHERED, count // _SHARE))
        size = -(-count // max(1, -(-count // most)))
        if kept is None and not self.at_nodes and size >= count:
            self._run(count, tensors, found)
            return found
        # What is read by rows is widened a range at a time.
        flat = list(tensors)
        for n, tensor in enumerate(tensors):
            if self.gathered[n] is None:
                flat[n] = tensor.reshape(-1).to(wide)
            elif tensor.ndim != 2:
                flat[n] = _flat(tensor)

        def places(rows: str, start: int, own: int) -> Tensor:
            """The rows of a range of samples."""
            if kept is None:
                return indices[rows].narrow(0, start, own)
            chosen = kept.narrow(0, start, own)
            return indices[rows].index_select(0, chosen) if rows else chosen

        # Results of a range of samples that are then added to selected rows.
        sums = {
            number: some.new_zeros(size, self.row_sizes[number], dtype=wide)
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
            self._run(own, operands, made)
            for number, part in sums.items():
                rows = self.selects[number] or ""
                found[number].index_add_(0, places(rows, start, own).long(), part.narrow(0, 0, own))
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


# Adds the products of some samples to outputs: of how many samples, the operands by number, the outputs by number.
Run = Callable[[int, Sequence[Tensor], Sequence[Tensor]], None]


def _printed(whole: PathProducts) -> Run:
    """Print the products of some samples, path by path: which views they are of is the same in every call."""
    text = _Text(whole)
    text.print()
    return function_of_lines(text.lines, text.names, "products of paths")


class _Text:
    """The text of `Run`: operands r0, r1, .. and outputs f0, f1, ..; of a path the matrix M, and T and G.

    Entries of operands (e0, ..) and what is added to entries of outputs (s0, ..), copies fastest, are made when they
    are first read, or added to.
    """

    def __init__(self, whole: PathProducts) -> None:
        self.whole = whole
        self.lines = ["def run(rows, operands, found):"]
        self.names: dict[str, Any] = {"torch": torch, "flat": _flat, "wide": whole.dtype}
        self._known: set[str] = set()

    def print(self) -> None:
        """Fill `lines`."""
        whole, lines = self.whole, self.lines
        lines.append(f"({''.join(f'r{n}, ' for n in range(len(whole.gathered)))}) = operands")
        lines.append(f"({''.join(f'f{n}, ' for n in range(len(whole.row_sizes)))}) = found")
        for n, own in sorted(whole.gathered.items()):
            lines += [f"if r{n}.ndim != {1 if own is None else 2}:"]
            lines += [f"    r{n} = {f'r{n}.reshape(-1)' if own is None else f'flat(r{n})'}"]
            lines += [f"if r{n}.dtype is not wide:", f"    r{n} = r{n}.to(wide)"]
            lines += [f"{'' if own is None else f'ra{n}, '}rb{n}, = r{n}.stride()", f"rc{n} = r{n}.storage_offset()"]
        for n, own in sorted(whole.selects.items()):
            lines += [f"{'' if own is None else f'fa{n}, '}fb{n}, = f{n}.stride()", f"fc{n} = f{n}.storage_offset()"]
        for n, table in whole.tables.items():
            self.names[f"table{n}"] = table.of(whole.dtype)
            lines.append(f"m{n} = r{n} @ table{n}")
        for n, table in whole.slopes.items():
            self.names[f"slopes{n}"] = table.of(whole.dtype).mT
            lines.append(f"d{n} = f{n}.new_empty(rows, {table.count})")
        for step in whole.steps:
            self._step(step)
        lines += [f"f{n}.addmm_(d{n}, slopes{n})" for n in whole.slopes]
        for n, entry in enumerate(whole.sums):
            if f"s{n}" in self._known:
                self._write(n, entry, add=entry.number in whole.added)

    def _step(self, step: _Step) -> None:
        k, i = step.shape
        if step.scale is not None:
            count = self.whole.tables[step.scale].count
            self.lines.append(f"M = m{step.scale}.as_strided((rows, {k}, {i}), ({count}, {i}, 1), {step.first})")
            if step.right_sum >= 0 or step.weight_sum is not None:
                self.lines.append(f"T = {_product('M', self._entry(step.left), i)}")
            if step.right_sum >= 0:
                self._add_weighted(step)
            if step.weight_sum is not None:
                self._add_weights(step, step.weight_sum)
        if step.left_sum >= 0 or step.slope is not None:
            back = self._back(step)
            if step.left_sum >= 0 and step.scale is not None:
                add = "addcmul_" if k == 1 else "baddbmm_"
                self._sum(step.left_sum, _product("M.mT", back, k), add, f"M.mT, {back}")
            if step.slope is not None:
                count, entry = self.whole.slopes[step.slope].count, self._entry(step.left)
                into = f"d{step.slope}.as_strided((rows, {k}, {i}), ({count}, {i}, 1), {step.slope_first})"
                copies = self.whole.entries[step.left].shape[1]
                slope = _product(back, f"{entry}.mT", copies)
                slope = f"({back} * {entry}).sum((1, 2), keepdim=True)" if k * i == 1 else slope
                self.lines.append(f"{into}.copy_({slope})")

    def _entry(self, n: int) -> str:
        """An entry of an operand: (rows, components, copies)."""
        if f"e{n}" not in self._known:
            self._known.add(f"e{n}")
            entry = self.whole.entries[n]
            read = f"{_cells('r', entry)}.contiguous()"
            if entry.columns is not None:
                self.names[f"columns{n}"] = entry.columns
                read = f"r{entry.number}.index_select(1, columns{n}).view(rows, {entry.shape[0]}, {entry.shape[1]})"
            self.lines.append(f"e{n} = {read}")
        return f"e{n}"

    def _write(self, n: int, entry: _Entry, *, add: bool) -> None:
        """Put numbers into the cells of rows, or add them."""
        if entry.columns is None:
            self.lines.append(f"{_cells('f', entry)}.{'add_' if add else 'copy_'}(s{n})")
            return
        self.names[f"cells{n}"] = entry.columns
        call = "index_add_" if add else "index_copy_"
        self.lines.append(f"f{entry.number}.{call}(1, cells{n}, s{n}.flatten(1))")

    def _sum(self, n: int, first: str, add: str, more: str) -> None:
        """Begin what is added to an entry of an output, or add to it."""
        known = f"s{n}" in self._known
        self._known.add(f"s{n}")
        self.lines.append(f"s{n}.{add}({more})" if known else f"s{n} = {first}")

    def _add_weighted(self, step: _Step) -> None:
        """Add `T` times the weights to an entry of the right side."""
        if step.weight is None:
            self._sum(step.right_sum, "T", "add_", "T")
            return
        self.lines.append(f"W = {_weights('r', step.weight)}")
        if not step.mixes:
            self._sum(step.right_sum, "T * W.unsqueeze(-2)", "addcmul_", "T, W.unsqueeze(-2)")
        elif step.weight.shared:
            self._sum(step.right_sum, "T @ W", "flatten(0, 1).addmm_", "T.flatten(0, 1), W")
        else:
            self._sum(step.right_sum, "T @ W", "baddbmm_", "T, W")

    def _back(self, step: _Step) -> str:
        """`G`: what the weights make of the right side."""
        right = self._entry(step.right)
        if step.weight is None:
            return right
        weights = _weights("r", step.weight)
        self.lines.append(f"G = {right} @ {weights}.mT" if step.mixes else f"G = {right} * {weights}.unsqueeze(-2)")
        return "G"

    def _add_weights(self, step: _Step, weights: _Weights) -> None:
        """Add a path's part of the weights."""
        into, right = _weights("f", weights), self._entry(step.right)
        if not step.mixes:
            self.lines.append(f"{into}.add_((T * {right}).sum({(0, 1) if weights.shared else 1}))")
        elif weights.shared:
            self.lines.append(f"{into}.addmm_(T.flatten(0, 1).mT, {right}.flatten(0, 1))")
        else:
            self.lines.append(f"torch.bmm(T.mT, {right}, out={into})")


def _cells(kind: str, entry: _Entry) -> str:
    """The cells of rows, evenly spaced: (rows, components, copies)."""
    (count, copies), (spacing, step), n = entry.shape, entry.steps, entry.number
    a, b, c = (f"{kind}{letter}{n}" for letter in "abc")
    steps = f"{a}, {spacing} * {b}, {step} * {b}"
    return f"{kind}{n}.as_strided((rows, {count}, {copies}), ({steps}), {c} + {entry.start} * {b})"


def _weights(kind: str, weights: _Weights) -> str:
    """(left copies, right copies), or (copies,); after the rows where each sample has its own."""
    # One call in place of a narrow and a reshape: these are many, and small.
    a, b, c = (f"{kind}{letter}{weights.number}" for letter in "abc")
    shape, steps = f"{weights.left}, ", f"{b}, "
    if weights.mixes:
        shape = f"{weights.left}, {weights.right}, "
        steps = f"{b}, {weights.left} * {b}, " if weights.transposed else f"{weights.right} * {b}, {b}, "
    rows, step = ("", "") if weights.shared else ("rows, ", f"{a}, ")
    return f"{kind}{weights.number}.as_strided(({rows}{shape}), ({step}{steps}), {c} + {weights.first} * {b})"


def _product(left: str, right: str, length: int) -> str:
    """(rows, a, b) times (rows, b, c); of one term without a library's call for each row."""
    return f"{left} * {right}" if length == 1 else f"torch.bmm({left}, {right})"
