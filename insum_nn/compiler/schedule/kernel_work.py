"""What a kernel does under a schedule: programs, steps, bytes, instructions, registers. `cost_model` makes times of it.

Counts are estimates, made of a form, its sizes and a schedule alone; they know no device and no text of a kernel. The
lengths of rows follow a power law between their mean and the longest: a tile of m rows waits for the longest
of m, and rows of more than `chunk` terms are several programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from insum_nn.compiler.forms.form import ENTRY, LONGEST, ROW_LOOP, Form, atoms, reads_of, runs_along
from insum_nn.compiler.forms.placement import place_indices
from insum_nn.compiler.ir.access import indices_of
from insum_nn.compiler.ir.nodes import Load, Store
from insum_nn.compiler.passes.tile import Lanes
from insum_nn.compiler.schedule.space import Precision, Schedule

__all__ = ["Traffic", "Work", "count"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Reads of a tensor: the bytes that all programs ask for, those side by side, and those of the tensor."""

    requested: float
    row: float
    table: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does under a schedule.

    Attributes:
        programs: how many there are.
        warps: of a program.
        steps: of the mean program.
        longest: of the longest program.
        chain: loads of a step each of which waits for the one before.
        ahead: steps whose loads are on their way at once.
        loads: of each tensor.
        written: bytes.
        instructions: of a program's warps in one step.
        once: instructions of a program's warps outside of its steps.
        products: of the matrix unit in one step of a program, all lanes of its tile counted.
        unit: the rate of these products.
        values: registers of a thread for the values that it holds.
        shared: bytes of shared memory of a program.
        collected: another kernel adds up the parts of divided rows.
    """

    programs: float
    warps: int
    steps: float
    longest: float
    chain: int
    ahead: float
    loads: tuple[Traffic, ...]
    written: float
    instructions: float
    once: float
    products: float
    unit: str
    values: float
    shared: float
    collected: bool


def count(form: Form, schedule: Schedule, precision: Precision) -> Work:
    """Return what the kernel of a form does under a schedule."""
    return _Counting(form, schedule, precision).work()


class _Counting:
    """The counts of one form under one schedule."""

    def __init__(self, form: Form, schedule: Schedule, precision: Precision) -> None:
        self.form, self.schedule, self.precision = form, schedule, precision
        self.layout = place_indices(form, schedule)
        self.dot = schedule.dot and form.product is not None
        self.size = form.bound.dtype.itemsize
        # Registers of a number.
        self.width = 2 if self.size == 8 else 1
        self.threads = 32 * schedule.warps
        self.rows = _Rows(form, schedule.chunk)
        axes = (self.layout.m, self.layout.k, self.layout.n)
        self.m, self.k, self.n = (1 if axis is None else axis.lanes for axis in axes)
        self.lanes = {i: axis for axis in axes if axis is not None for i in axis.indices}
        stores = [store for output in form.stores for store in output]
        self.reads = dict.fromkeys(read for store in stores for read in reads_of(store))
        self.targets = {(store.buffer, store.subscripts): store for store in stores}
        self.groups = min(schedule.groups, max(1, form.accumulators))
        self.unrolled = max(1.0, len(stores) / self.groups)
        # The part of unrolled reads and cells that one program has.
        self.part = 1.0 / self.groups

    def work(self) -> Work:
        form, schedule = self.form, self.schedule
        programs, steps, longest = self._programs()
        loads: list[Traffic] = []
        instructions, once, held = 0.0, 0.0, 0.0
        for read in self.reads:
            taken, lanes = self._instructions(read)
            if self._in_loop(read):
                instructions += taken
                held += lanes * self.part * self.size / 4.0
            else:
                once += taken
            loads += self._loads(read, programs, steps)
        m, n, k = self.m, self.n, self.k
        cells = max(1.0, len(self.targets) * self.part)
        sums = cells * max(1.0, m * n / self.threads) * self.width
        products = shared = 0.0
        depth = max((_depth(read) for read in self.reads), default=0)
        chain, ahead = 1 + depth + form.permuted, 1.0
        if self.dot:
            products = self.unrolled * m * n * k
            # Operands are in shared memory; each load of a chain takes a stage of the software pipeline.
            shared = float((m + n) * k * self.size * schedule.stages)
            held *= 1.0 if self.precision == "tf32x3" else 0.5
            ahead += (schedule.stages - 1) / chain
        else:
            each = max(1.0, self.unrolled * m * n * k / self.threads)
            instructions += schedule.warps * (2.0 * each + self._shuffles()) * self.width**2
            held += each * self.width
        factor = 4.0 if form.combine == "atomic" else 1.0
        outputs = self.part * sum(self._cells(target) for target in self.targets.values())
        stores = programs * outputs
        written = stores * self.size * factor * (2.0 if schedule.splits > 1 else 1.0)
        once += schedule.warps * sums * factor
        collected = form.row_index is not None and self.rows.divided
        unit = "half" if self.size == 2 else "single" if self.precision == "tf32" else "thrice"
        return Work(
            programs=programs,
            warps=schedule.warps,
            steps=steps,
            longest=max(longest, steps),
            chain=chain,
            ahead=ahead,
            loads=tuple(loads),
            written=written,
            instructions=instructions,
            once=once,
            products=products,
            unit=unit,
            values=sums + held,
            shared=shared,
            collected=collected,
        )

    def _programs(self) -> tuple[float, float, float]:
        """Return how many programs there are, and the steps of the mean and of the longest one."""
        form, schedule, layout = self.form, self.schedule, self.layout
        programs = float(self.groups * schedule.splits)
        tile = 1
        for axis in (layout.m, layout.n):
            if axis is None:
                continue
            tile = axis.block if axis.first == ROW_LOOP else tile
            programs *= math.ceil((self.rows.ranges if axis.first == ROW_LOOP else form.size(axis.first)) / axis.block)
        for index in layout.grid:
            programs *= self.rows.ranges if index == ROW_LOOP else form.size(index)
        lengths = self.rows.lengths(tile)
        steps, longest = self._steps(lengths[0]), math.ceil(self._steps(lengths[1]))
        return programs, max(1.0, steps / schedule.splits), max(1.0, longest / schedule.splits)

    def _steps(self, entries: float) -> float:
        """Return the steps of a program whose row has so many entries."""
        steps, k = 1.0, self.layout.k
        for index in self.layout.loops:
            steps *= entries if index == ENTRY else self.form.size(index)
        if k is None:
            return steps
        extent = entries if k.first == ENTRY else float(self.form.size(k.first))
        # Rows of any length: the last step of each is half full.
        return steps * (1.0 if extent <= k.block else extent / k.block + (0.5 if k.first == ENTRY else 0.0))

    def _shuffles(self) -> float:
        """Return the instructions that add up lanes of a sum which lie in several threads of a warp."""
        together = max(1.0, self.n / max(1, 16 // self.size))
        across = min(float(self.k), max(1.0, 32.0 / together))
        return 2.0 * math.log2(across) * max(1.0, self.m * self.n / self.threads) if across > 1.0 else 0.0

    def _axes(self, read: Load | Store) -> set[Lanes]:
        return {self.lanes[i] for i in self._indices(read) if i in self.lanes}

    def _indices(self, read: Load | Store) -> set[str]:
        """Return the indices that a read varies with, those of a row's entries as one."""
        form = self.form
        names = indices_of(*read.subscripts)
        return {ENTRY if form.row_index is not None and name in form.entries else name for name in names}

    def _in_loop(self, read: Load) -> bool:
        k = self.layout.k
        return bool(self._indices(read) & {*self.layout.loops, *(() if k is None else k.indices)})

    def _instructions(self, read: Load) -> tuple[float, float]:
        """Return the load instructions of a program's warps, and the numbers that a thread gets by them."""
        lanes = max(1.0, math.prod(axis.lanes for axis in self._axes(read)) / self.threads)
        last = runs_along(read)
        vector = max(1, 16 // self.size) if last in self.lanes and last in self.form.static else 1
        addresses = 3.0 if _depth(read) else 1.0
        return self.schedule.warps * max(1.0, lanes / vector) * addresses * self.part, lanes

    def _loads(self, read: Load, programs: float, steps: float) -> list[Traffic]:
        """Return the bytes that a read and the index tensors on its path take."""
        found: list[Traffic] = []
        for each, size in ((read, self.size), *((index, 8) for index in _nested(read))):
            times = programs * (steps if self._in_loop(each) else 1.0) * self.part
            found.append(Traffic(times * self._cells(each) * size, self._row(each, size), self._table(each) * size))
        return found

    def _block(self, axis: Lanes) -> int:
        """Return the lanes of an axis that have something to do."""
        whole = axis.first in (ENTRY, ROW_LOOP)
        return math.prod(axis.inner) * (axis.block if whole else min(axis.block, self.form.size(axis.first)))

    def _cells(self, read: Load | Store) -> float:
        """Return the cells of a tensor that a program reads or writes in one step."""
        return float(math.prod(self._block(axis) for axis in self._axes(read)))

    def _row(self, read: Load, size: int) -> float:
        """Return the bytes of a read that lie side by side."""
        last = runs_along(read)
        return max(4.0, float(size * (self._block(self.lanes[last]) if last in self.lanes else 1)))

    def _table(self, read: Load) -> float:
        """Return the cells of a tensor, as far as the indices of a statement tell."""
        cells, form = 1.0, self.form
        for subscript in read.subscripts:
            for atom, _ in atoms(subscript):
                if not isinstance(atom, Load):
                    cells *= form.size(atom.name)
                elif form.row_index is not None:
                    # What entries address has about as many cells as they are added to.
                    cells *= max(1, form.rows)
                else:
                    cells *= math.prod(form.size(name) for name in indices_of(atom))
        return cells


def _nested(read: Load) -> Sequence[Load]:
    return [atom for subscript in read.subscripts for atom, _ in atoms(subscript) if isinstance(atom, Load)]


def _depth(read: Load) -> int:
    """Return how many index tensors are read, one after the other, to address a tensor."""
    return max((1 + _depth(atom) for atom in _nested(read)), default=0)


class _Rows:
    """The lengths of rows: a power law between the mean and the longest; even where that is unknown."""

    def __init__(self, form: Form, chunk: int) -> None:
        self.count = float(max(1, form.rows))
        self.mean = max(0.1, form.terms_of_all / self.count) if form.row_index is not None else 1.0
        self.longest = float(max(form.sizes.get(LONGEST, 0), 1, self.mean))
        self.chunk = float(chunk)
        self.divided = self.longest > chunk
        self.slope = math.log(self.longest / max(1.0, self.mean)) / max(1.0, math.log(self.count))
        self.slope = max(0.0, self.slope)

    @property
    def ranges(self) -> float:
        """The rows, of which long ones are divided."""
        if not self.divided:
            return self.count
        long = 1.0 if self.chunk <= self.mean or self.slope >= 1.0 else (self.mean / self.chunk) ** (1 / self.slope - 1)
        return self.count + long * self.count * self.mean / self.chunk

    def lengths(self, tile: int) -> tuple[float, float]:
        """Return the entries for which a tile of rows waits, and those of the longest row."""
        most = min(self.longest, self.chunk)
        found = self.mean * tile**self.slope
        # Rows of one mean length differ by its root.
        found += min(1.0, math.log2(tile) / 4.0) * math.sqrt(self.mean) if tile > 1 and self.slope else 0.0
        return max(1.0, min(found, most)), max(1.0, most)
