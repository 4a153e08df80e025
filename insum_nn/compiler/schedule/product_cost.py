"""Count what a statement costs: bytes moved and multiplications, weighed in bytes.

Library calls multiply two factors at a time and hold what they gather; a generated kernel forms every
product of the index space and holds nothing. The counts need the sizes of a call and nothing else, and compare ways to
compute the same output; they are not times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from insum_nn.compiler.ir.pairwise import cheapest_order
from insum_nn.compiler.lang.misses import labels_of
from insum_nn.compiler.lang.syntax import Access, Statement

__all__ = [
    "Cost",
    "Machine",
    "Sizes",
    "cost_of",
    "dense_from",
    "machine_of",
    "multiplies_blocks",
    "of_block",
    "worth_grouping",
]

Labels = frozenset[str]


@dataclass(frozen=True, slots=True)
class Machine:
    """What operations cost on a machine.

    Attributes:
        per_byte: multiplications that take as long as moving a byte, in a product of matrices.
        single: the same, one by one.
        call: bytes that could be moved while a statement is launched.
        pairwise: factors are multiplied two at a time, and what is gathered is held in memory.
        grouped: entries find the matrix that they select of a stack in a cache; see `passes.cpu.group_entries`.
        tiled: entries are taken in tiles of one matrix; see `group_by_key.py`.
        adds: several programs may add to one cell.
        library: dense products are a library's, which is faster than a kernel over the blocks of a matrix.
    """

    per_byte: float
    single: float
    call: float
    pairwise: bool
    library: bool = False
    grouped: bool = False
    tiled: bool = False
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a statement.

    Attributes:
        indices: extents of its indices.
        shapes: of the tensors that it reads.
        output: the output's shape.
        width: bytes of a number.
        present: of index tensors with missing entries: the indices that they are read at, and the share of entries that
            are there. A generated kernel may skip the others.
    """

    indices: Mapping[str, int]
    shapes: Mapping[str, Sequence[int]]
    output: Sequence[int]
    width: int
    present: tuple[tuple[Labels, float], ...] = ()

    def cells(self, labels: Labels) -> float:
        return float(math.prod(self.indices[label] for label in labels))

    def terms(self, labels: Labels) -> float:
        """Cells at which nothing is missing."""
        return self.cells(labels) * min((share for own, share in self.present if own <= labels), default=1.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved and multiplications; `total` weighs them, in bytes."""

    moved: float
    multiplications: float
    total: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.moved + other.moved, self.multiplications + other.multiplications, self.total + other.total)

    def __str__(self) -> str:
        return f"{self.multiplications:.3g} multiplications and {self.moved / 1e6:.3g} MB"


# Of two cores: 12 GB/s through memory, 50 to 90 GFLOP/s in products of matrices (float64: half), and 20 us a statement.
# torch has no fast products of fp16 and bf16 there.
_CPU_PER_BYTE = {1: 1.0, 2: 1.0, 4: 3.0, 8: 1.5}
_CPU_SINGLE, _CPU_CALL = 0.5, 2.5e5
# A C function multiplies vectors, and keeps what it read for several rows.
_C_SINGLE, _C_CALL = 1.5, 5e4
# Its products of blocks, of fewer than 32 rows or columns and of more, and their rate where vectors run along what is
# summed; bytes that take as long as a number of a copy in another order. 1024 x 1024, 256 samples, float32, one thread.
_C_BLOCKS, _ACROSS, _C_COPY = (1.8, 2.3), 0.4, 22.0
# Of a GPU with matrix units, through caches: see the measured orders of A X W in docs/performance.md.
_GPU_PER_BYTE = {1: 100.0, 2: 100.0, 4: 12.0, 8: 6.0}
_GPU_SINGLE, _GPU_CALL = 4.0, 6e6


class _Rates(NamedTuple):
    """What a product by stored weights takes, in multiplications of a library's product by the dense matrix.

    Attributes:
        alone: a multiplication by a single weight.
        block: one by a weight of a large block.
        side: of a block by whose weights one takes twice as long.
        row: multiplications that take as long as starting a row of lanes.
        moved: a number that is read or written out of order.
        formed: a weight of the dense matrix, which is written for a call, and whose gradient is read.
        calls: the library's call and the one that forms the matrix.
    """

    alone: float
    block: float
    side: float
    row: float
    moved: float
    formed: float
    calls: float


# By device, and whether a number has 16 bits. One thread of a CPU, whose libraries use other instructions for 16 bits:
# 1024 x 1024 and 2048 x 2048 with 1 to 1024 samples, blocks of 4 to 64, and convolutions of 64 to 256 channels on rows
# of 14 to 56. An H200, whose libraries multiply by matrix units, but linear layers of float32 only if told: 1024 x 1024
# and 4096 x 4096 with 64 to 4096 samples, 1 to 20 % of the weights or 10 to 50 % of blocks of 16 to 64, and
# convolutions of 64 to 512 channels on 4 and 32 images of 7 to 56 rows, 2 to 20 % of the weights.
_RATES = {
    ("cpu", False): _Rates(3.0, 1.4, 10.0, 40.0, 65.0, 70.0, 2.0**20),
    ("cpu", True): _Rates(24.0, 11.2, 10.0, 40.0, 65.0, 300.0, 2.0**20),
    ("cuda", False): _Rates(50.0, 0.9, 16.0, 0.0, 400.0, 100.0, 2.0**32),
    ("cuda", True): _Rates(300.0, 0.8, 100.0, 0.0, 2500.0, 400.0, 3 * 2.0**33),
}


# The side of a block from which it is large.
_LARGE = 64


def of_block(device_type: str, width: int, side: int) -> float:
    """Multiplications of a dense product that take as long as one by a weight of a block, of so many bytes."""
    rates = _RATES[device_type, width <= 2]
    return rates.block * (1 + rates.side / min(side, _LARGE))


def dense_from(
    device_type: str, width: int, stored: Sequence[int], cells: int, moved: int, row: int | None = None
) -> float:
    """How often each stored weight is multiplied where a product by the dense matrix, formed for a call, is as fast.

    Args:
        device_type: what runs it.
        width: bytes of a number.
        stored: the shape of the stored weights: (p,), or blocks, (p, a, b).
        cells: numbers of the dense matrix.
        moved: numbers that a kernel over stored weights reads or writes out of order for each multiplication.
        row: along which lanes run: so many multiplications; `None`: all.
    """
    rates = _RATES.get((device_type, width <= 2))
    if rates is None or (device_type == "cuda" and width > 4):
        # Few matrix units multiply float64.
        return math.inf
    rate = of_block(device_type, width, min(stored[1:])) if stored[1:] else rates.alone
    work = math.prod(stored) * rate
    each, once = work + rates.moved * moved - cells, cells * rates.formed + rates.calls
    if row is None:
        once -= work * rates.row
    else:
        each += work * rates.row / max(row, 1)
    return once / each if each > 0 else math.inf


def machine_of(device_type: str, width: int, *, pairwise: bool, library: bool = False, adds: bool = False) -> Machine:
    """The machine that runs numbers of so many bytes; see `Machine`."""
    if device_type == "cpu":
        if pairwise:
            return Machine(_CPU_PER_BYTE[width], _CPU_SINGLE, _CPU_CALL, pairwise)
        return Machine(_C_SINGLE, _C_SINGLE, _C_CALL, pairwise, grouped=True)
    return Machine(_GPU_PER_BYTE[width], _GPU_SINGLE, _GPU_CALL, pairwise, library, tiled=not pairwise, adds=adds)


@dataclass(frozen=True, slots=True)
class _Profile:
    """What a statement says about its own cost.

    Attributes:
        names: of the factors.
        labels: the indices that each factor varies with.
        gathered: whether each is read through index tensors.
        stacked: of a stack of matrices, of which an entry selects one to sum over, the axis that it addresses; else -1.
        matrix: the indices that are subscripts of each.
        written: the indices that the output varies with.
        scattered: the output is addressed by more than indices of its own.
        index_tensors: their names.
        blocks: of a product of blocks, the indices that do not say which block it is.
        across: a factor has the last index of the output in front of another one.
    """

    names: tuple[str, ...]
    labels: tuple[Labels, ...]
    gathered: tuple[bool, ...]
    stacked: tuple[int, ...]
    matrix: tuple[Labels, ...]
    written: Labels
    scattered: bool
    index_tensors: tuple[str, ...]
    blocks: Labels
    across: bool

    def read(self, sizes: Sizes, gathered: Callable[[Labels], float], *, grouped: bool = False) -> float:
        """Cells that the factors are read as; of a stack its own, where entries are grouped."""
        total = 0.0
        for name, own, indirect, stack in zip(self.names, self.labels, self.gathered, self.stacked, strict=True):
            cells = float(math.prod(sizes.shapes[name]))
            total += min(cells, gathered(own)) if stack >= 0 and grouped else gathered(own) if indirect else cells
        return total


@lru_cache(maxsize=4096)
def _profile(statement: Statement) -> _Profile:
    reads, output = statement.reads, statement.output
    plain, written = [subscript.plain for subscript in output.subscripts], frozenset(labels_of(output))
    return _Profile(
        tuple(access.name for access in reads),
        tuple(frozenset(labels_of(access)) for access in reads),
        tuple(bool([*access.nested()]) for access in reads),
        tuple(_stacked(access, written) for access in reads),
        tuple(frozenset(filter(None, (s.plain for s in access.subscripts))) for access in reads),
        written,
        None in plain or len(set(plain)) < len(plain),
        statement.index_tensors(),
        _block_indices(statement),
        any(s.plain in {*plain[-1:]} - {None} for access in reads for s in access.subscripts[:-1]),
    )


def _stacked(access: Access, written: Labels) -> int:
    """The axis by which an entry selects a matrix of a factor, whose rows or columns are summed over; else -1."""
    plain = [subscript.plain for subscript in access.subscripts]
    summed = any(index is not None and index not in written for index in plain)
    return plain.index(None) if len(plain) > 2 and plain.count(None) == 1 and summed else -1


def _block_indices(statement: Statement) -> Labels:
    """The indices of a product of matrices for each entry, such as `Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]`."""
    accesses = (statement.output, *statement.reads)
    entries = frozenset(label for access in accesses for nested in access.nested() for label in labels_of(nested))
    labels = [frozenset(labels_of(access)) for access in statement.reads]
    written = frozenset(labels_of(statement.output))
    if not all(own & entries for own in labels) or not _is_matrix_product([own - entries for own in labels], written):
        return frozenset()
    return written.union(*labels) - entries


def multiplies_blocks(statement: Statement) -> bool:
    """Whether a statement multiplies by the blocks of a matrix; what that takes was measured in each way."""
    return bool(_profile(statement).blocks)


# Entries of a matrix at least, in the mean, and rows and columns of it; and multiplications from which taking entries
# by their matrix pays: they are sorted, and narrow tiles multiply what is not there.
_OF_A_KEY, _GROUPED_FROM = 8, 2**25


def worth_grouping(entries: float, keys: int, products: float) -> bool:
    """Whether a GPU takes entries by the matrix that they select of so many."""
    return entries >= _OF_A_KEY * keys and products >= _GROUPED_FROM


def cost_of(statement: Statement, sizes: Sizes, machine: Machine, ordered: frozenset[str] = frozenset()) -> Cost:
    """Count what a statement moves and multiplies at some sizes.

    Args:
        statement: the statement.
        sizes: its sizes.
        machine: what runs it.
        ordered: index tensors that are sorted: terms that one of them sends to the same cells stand together.
    """
    profile = _profile(statement)
    width = sizes.width
    indexed = sum(8.0 * math.prod(sizes.shapes[name]) for name in profile.index_tensors)
    output = math.prod(sizes.output)
    if machine.pairwise:
        cells, products, weighed = _pairwise(profile, sizes, machine)
    else:
        cells, products, weighed = _at_once(profile, sizes, machine, statement.output, ordered)
    moved = indexed + width * (cells + output)
    return Cost(moved, products, machine.call + moved + weighed)


def _in_runs(output: Access, ordered: frozenset[str]) -> Labels:
    """Return the indices that address the output through some index tensors alone.

    A kernel walks the terms of a row as it walks a summed index: `dW[Off[p],d,c]` is a product of matrices for each
    row.
    """
    nested = [access for access in output.nested() if access.name in ordered]
    return frozenset(label for access in nested for label in labels_of(access)) - {s.plain for s in output.subscripts}


def _at_once(
    profile: _Profile, sizes: Sizes, machine: Machine, output: Access, ordered: frozenset[str]
) -> tuple[float, float, float]:
    """Cells, multiplications and their weight in one kernel over the whole index space."""
    products = sizes.terms(profile.written.union(*profile.labels))
    if profile.blocks:
        # The programs of a row of blocks find what they share in caches.
        side = min(sizes.indices[label] for label in profile.blocks)
        cells = sum(float(math.prod(sizes.shapes[name])) for name in profile.names)
        if machine.grouped:
            rate = _C_BLOCKS[side >= 32] * min(1.0, 4 / sizes.width) * (_ACROSS if profile.across else 1.0)
        else:
            rate = machine.per_byte / (of_block("cuda", sizes.width, side) if machine.library else 1.0)
        return cells, products, products / rate
    if machine.grouped and profile.across and profile.labels == (profile.written,):
        return products, products, products * _C_COPY
    tiled = machine.tiled and _is_tiled(profile, sizes, products, machine)
    # Rows of one index tensor are walked in its order, which is found where it is not sorted.
    rows = frozenset(access.name for access in output.nested())
    runs = [_in_runs(output, names) for names in ([ordered, rows] if len(rows) == 1 else [ordered])]
    matrices = tiled or any(_is_matrix_product(profile.labels, profile.written - each) for each in runs)
    rate = machine.per_byte if matrices else machine.single
    return profile.read(sizes, sizes.terms, grouped=tiled or machine.grouped), products, products / rate


def _is_tiled(profile: _Profile, sizes: Sizes, products: float, machine: Machine) -> bool:
    """Whether a kernel takes entries in tiles of one matrix of a stack, each of which is a product of matrices."""
    for place, axis in enumerate(profile.stacked if sizes.width < 8 else ()):
        name, labels = profile.names[place], [*profile.labels]
        if axis >= 0 and profile.gathered[place]:
            entries = profile.labels[place] - profile.matrix[place]
            labels[place] = profile.matrix[place]
            alone = entries <= profile.written and not profile.scattered
            worth = worth_grouping(sizes.cells(entries), sizes.shapes[name][axis], products)
            wide = min(sizes.indices[index] for index in profile.matrix[place]) >= _OF_A_KEY
            if worth and wide and (alone or machine.adds) and _is_matrix_product(labels, profile.written):
                return True
    return False


def _is_matrix_product(labels: Sequence[Labels], written: Labels) -> bool:
    """Whether two factors share a summed index, and each has a written one that the other lacks."""
    if len(labels) != 2:
        return False
    one, other = labels
    return bool((one & other) - written and (one & written) - other and (other & written) - one)


def _pairwise(profile: _Profile, sizes: Sizes, machine: Machine) -> tuple[float, float, float]:
    """Cells, multiplications and their weight by library calls, two factors at a time."""
    # What is gathered is read, written, and read again; what is scattered is written, and read and written again.
    cells = profile.read(sizes, lambda labels: 3.0 * sizes.cells(labels))
    scattered = 3.0 * sizes.cells(profile.written) if profile.scattered else 0.0
    between, products, weighed = _contracted(profile.labels, profile.written, sizes, machine)
    return cells + scattered + between, products, weighed


def _contracted(
    factors: Sequence[Labels], written: Labels, sizes: Sizes, machine: Machine
) -> tuple[float, float, float]:
    """Cells between, multiplications and their weight in the cheapest order of pairs."""

    def price(labels: Labels, result: Labels, last: bool) -> float:
        return sizes.width * between(result, last) + weigh(labels, result)

    def between(result: Labels, last: bool) -> float:
        # Between two pairs a result is written and read; the last one is the output.
        return 0.0 if last else 2.0 * sizes.cells(result)

    def weigh(labels: Labels, result: Labels) -> float:
        return sizes.cells(labels) / (machine.per_byte if labels != result else machine.single)

    # An index that no other factor and not the output has is summed before.
    shared = Counter(label for own in factors for label in own)
    factors = [frozenset(label for label in own if label in written or shared[label] > 1) for own in factors]
    pairs = cheapest_order(factors, written, price)
    cells = sum(between(pair.result, pair is pairs[-1]) for pair in pairs)
    return cells, sum(sizes.cells(pair.indices) for pair in pairs), sum(weigh(p.indices, p.result) for p in pairs)
