"""Print an algorithm as a C function for a CPU.

The loops stand in the order that `passes.place_lanes` chose. What is read, asked and added to addresses stands in the
outermost loop in which it is known; accumulators are names of their own, one for each row of the register block and
each vector, so that no compiler has to find or may reorder a sum. Addresses are 64 bits wide.

A term that misses is not computed: its condition skips the rest of a loop, one row of a block, or some lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from insum_nn.compiler.codegen.c_values import PIECES, Helpers, literal, number_of
from insum_nn.compiler.ir.build import INITIAL
from insum_nn.compiler.ir.graph import loops_of, stores_of
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Size,
    Store,
    conjuncts,
    walk,
)
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.passes.gather_writes import coefficient, gather_writes, indices_in
from insum_nn.compiler.passes.group_entries import factors_of_value, group_entries, plain_entry
from insum_nn.compiler.passes.own_rows import own_rows
from insum_nn.compiler.passes.place_lanes import extent_of, place_lanes, steps_of
from insum_nn.compiler.passes.written_cells import WrittenCells, written_cells
from insum_nn.dtypes import dtype_of

__all__ = ["CKernel", "NotInC", "c_kernel", "translation_unit"]

# Bytes of a vector: one register of most processors; a result is the same on all of them.
_VECTOR = 32


class NotInC(Exception):
    """A kernel that this printer does not print; the message says why."""


@dataclass(frozen=True, slots=True)
class CKernel:
    """A C function as text.

    Attributes:
        text: one static function, which returns 0, or 1 if it got no memory.
        prelude: what has to stand before it, in pieces that may each stand once in a translation unit.
        name: of the function.
        pointers: canonical names of the buffers that it takes, the output last.
        numbers: names of the sizes and strides that it takes after these, as `long`.
        structure: the index tensor whose entries are walked by their values, and the number of values: `begin` and
            `order`, int32, come from a stable counting sort that leaves out entries of -1.
        filled: the output must hold 0; otherwise every cell is written.
    """

    text: str
    prelude: str
    name: str
    pointers: tuple[str, ...]
    numbers: tuple[str, ...]
    structure: tuple[str, Expr] | None
    filled: bool


class _Prepared(NamedTuple):
    kernel: Kernel
    cells: WrittenCells
    structure: tuple[str, Expr] | None


def c_kernel(
    kernel: Kernel,
    *,
    contiguous: Mapping[str, bool],
    threads: bool,
    output_extents: Sequence[int | None] | None = None,
    name: str = "kernel",
    vector_bytes: int = _VECTOR,
) -> CKernel:
    """Print an algorithm of `ir.build` whose static tables are folded, as one C function.

    Args:
        kernel: the algorithm; extents that are compiled in are numbers.
        contiguous: by canonical names, which inputs are contiguous (missing: they are); the others are read by strides.
            The output is contiguous. An initial value may be the memory of the output.
        threads: divide loops among threads where no two of them write one cell; the numbers stay the same.
        output_extents: extents of the output that are compiled in.
        name: of the function.
        vector_bytes: bytes of a vector.

    Raises:
        NotInC: the kernel has something that C functions do not.
    """
    buffer = kernel.results[0].buffer
    extents = {e: Const(n) for e, n in zip(buffer.shape, output_extents or (), strict=False) if n is not None}
    replaced = kernel.replace({e: n for e, n in extents.items() if isinstance(e, Size)})
    assert isinstance(replaced, Kernel)
    prepared = _prepared(replaced)
    verify_kernel(prepared.kernel, placed=False)
    return _Printer(prepared, contiguous, threads, name, vector_bytes).print()


def translation_unit(kernels: Sequence[CKernel], entry: str) -> str:
    """Return the text of kernels and of one function that calls them in order.

    `entry` takes the pointers of all kernels, each once, in the order in which they are met, then their numbers,
    likewise, as `long`. It returns 0, or 1 if a kernel got no memory.
    """
    pieces = dict.fromkeys(piece for kernel in kernels for piece in kernel.prelude.split(PIECES))
    pointers = dict.fromkeys(pointer for kernel in kernels for pointer in kernel.pointers)
    numbers = dict.fromkeys(number for kernel in kernels for number in kernel.numbers)
    arguments = ", ".join([*(f"void *{p}" for p in pointers), *(f"long {n}" for n in numbers)]) or "void"
    calls = [f"{k.name}({', '.join((*k.pointers, *k.numbers))})" for k in kernels]
    body = f"int {entry}({arguments}) {{\n  return {' || '.join(calls) or '0'};\n}}\n"
    return PIECES.join([*pieces, *(kernel.text for kernel in kernels), body])


def _prepared(kernel: Kernel) -> _Prepared:
    """Choose how the output is written: by entries of one matrix, by rows that are owned, or as the statement says."""
    stores = stores_of(kernel)
    cells, structure, entries = written_cells(kernel), None, ()
    if grouped := group_entries(kernel):
        walk_, read, count = grouped
        kernel, structure, entries = walk_.kernel, (read.buffer.name, count), walk_.entries
    elif not cells.once and (found := _owned_rows(stores)) is not None:
        axis, read = found
        structure = read.buffer.name, stores[0].buffer.shape[axis]
        kernel = own_rows(kernel, read, axis, permuted=True).kernel
    if structure is not None:
        # The caller sorts into int32.
        narrow = {b: Buffer(b.name, "int32", b.shape, b.facts) for b in kernel.inputs if b.name in ("begin", "order")}
        replaced = kernel.replace({**narrow})
        entries = tuple(e for e in (entry.replace({**narrow}) for entry in entries) if isinstance(e, Expr))
        assert isinstance(replaced, Kernel)
        kernel = replaced
    kernel = gather_writes(kernel)
    return _Prepared(kernel, written_cells(kernel, entries), structure)


def _owned_rows(stores: Sequence[Store]) -> tuple[int, Load] | None:
    """An axis of the output that an entry addresses whose own indices address nothing else of it."""
    first = stores[0]
    for axis, subscript in enumerate(first.subscripts):
        if isinstance(subscript, Load) and plain_entry(subscript):
            rest = indices_in(*(s for store in stores for at, s in enumerate(store.subscripts) if at != axis))
            alike = all(store.subscripts[axis] is subscript for store in stores)
            if alike and not rest & indices_in(subscript):
                return axis, subscript
    return None


class _Range(NamedTuple):
    """The conditions that say where along the lanes a term takes part."""

    conditions: tuple[Expr, ...]


class _Slot(NamedTuple):
    """One vector of several in straight-line code: its lanes, and where it begins."""

    width: int
    at: int


# Steps of a loop over vectors and the vectors of one step; a step of 0 runs once.
_Pieces = list[tuple[int, list[_Slot]]]
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "/", "mod": "%",
    "at_least": ">=", "less": "<", "equal": "==", "and": "&&",
}  # fmt: skip


class _Printer:
    def __init__(
        self, prepared: _Prepared, contiguous: Mapping[str, bool], threads: bool, name: str, vector_bytes: int
    ) -> None:
        self.kernel, self.cells, self.structure = prepared
        self.contiguous, self.threads, self.name = contiguous, threads, name
        self.result = self.kernel.results[0]
        self.out, self.stores = self.result.buffer, stores_of(self.kernel)
        self.mode = self.stores[0].combine
        self.dtype = self.factor_dtype()
        self.helpers = Helpers(dtype_of(self.dtype))
        self.number = self.helpers.number
        floating = dtype_of(self.dtype).is_floating
        if not floating and self.result.activation not in (None, "relu"):
            raise NotInC(f"{self.result.activation} of {self.dtype}")
        self.width = vector_bytes // self.number.bytes
        self.place = place_lanes(
            self.kernel,
            self.cells,
            self.width,
            self.apart,
            vectors=self.mode == "add" or (floating and self.cells.once),
        )
        lanes = self.place.lanes
        self.v = lanes.index if lanes else None
        self.reduces = lanes is not None and lanes.role == "sum"
        rows = self.place.rows
        self.around = [*self.place.outer, *([rows] if rows else []), *self.place.inner]
        self.order = [loop.index for loop in (*self.around, *self.place.sums)]
        self.first_sum = len(self.around)
        self.has_initial = self.result.initial == "tensor"
        # Sums of several points meet in memory; of numbers that are rounded or changed there, in memory of their own.
        self.scattered = not self.cells.once or self.place.streams
        plain = self.mode == "add" and self.result.activation is None and self.out.dtype == self.dtype
        self.apart_sums = self.scattered and not (plain and not dtype_of(self.dtype).is_widened)
        self.common = [c for c in conjuncts(self.stores[0].where)]
        self.common = [c for c in self.common if all(c in conjuncts(s.where) for s in self.stores)]
        # What changes from scope to scope: names of values, conditions that hold, flags of rows.
        self.names: dict[tuple[Node | _Range, int], str] = {}
        self.known: set[Node] = set()
        self.flags: dict[int, tuple[str, int]] = {}
        self.memo: dict[tuple[object, ...], str] = {}
        self.rows, self.skips, self.count, self.indent = 1, False, 0, 1
        self.lines: list[str] = []
        self.items = self.placed()

    def factor_dtype(self) -> str:
        buffers = [f.buffer for s in self.stores for f in factors_of_value(s.value) if isinstance(f, Load)]
        buffers += [b for b in self.kernel.inputs if b.name == INITIAL]
        return buffers[0].dtype if buffers else self.out.dtype

    # Text.

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def fresh(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    @contextmanager
    def block(self, head: str = "{") -> Generator[None]:
        """A block of C, after which names that were defined in it are forgotten."""
        before = dict(self.names), set(self.known), dict(self.flags), dict(self.memo)
        self.line(head)
        self.indent += 1
        yield
        self.indent -= 1
        self.line("}")
        self.names, self.known, self.flags, self.memo = before

    def blocked(self, *nodes: Node) -> bool:
        rows = self.place.rows
        return rows is not None and rows.index in indices_in(*nodes)

    def row_of(self, node: Node, row: int) -> int:
        return row if self.blocked(node) else 0

    def varies(self, node: Node) -> bool:
        return self.v is not None and self.v in indices_in(node)

    def depth(self, *nodes: Node) -> int:
        return max((self.order.index(i) for i in indices_in(*nodes) if i is not self.v), default=-1)

    def text(self, expr: Expr, row: int = 0) -> str:
        """An integer or a condition, of values that are named already."""
        if isinstance(expr, Const):
            return f"{int(expr.value)}L"
        if isinstance(expr, Size):
            return f"n_{expr.name}"
        if isinstance(expr, Index):
            return f"(i_{expr.name} + {row})" if row and self.blocked(expr) else f"i_{expr.name}"
        if isinstance(expr, Cast):
            return self.text(expr.value, row)
        if isinstance(expr, Load):
            return self.names[expr, self.row_of(expr, row)]
        assert isinstance(expr, Op)
        args = [self.text(arg, row) for arg in expr.args]
        if expr.name == "minimum":
            return f"{self.helpers.range('least')}({', '.join(args)})"
        return f"({args[0]} {_SIGNS[expr.name]} {args[1]})"

    # Addresses.

    def stride(self, buffer: Buffer, axis: int) -> str:
        if not self.contiguous.get(buffer.name, True):
            return f"{buffer.name}_stride_{axis}"
        later = buffer.shape[axis + 1 :]
        number = 1
        for extent in later:
            number *= int(extent.value) if isinstance(extent, Const) else 1
        sizes = [self.text(extent) for extent in later if not isinstance(extent, Const)]
        return " * ".join([*sizes, *([f"{number}L"] if number != 1 or not sizes else [])])

    def offset(self, buffer: Buffer, subscripts: Sequence[Expr], row: int) -> str:
        """The address of a cell, with the lanes at 0."""
        zero: dict[Node, Node] = {} if self.v is None else {self.v: Const(0)}
        parts: list[str] = []
        for axis, subscript in enumerate(subscripts):
            found = subscript.replace(zero)
            assert isinstance(found, Expr)
            if found is not Const(0):
                parts.append(f"{self.text(found, row)} * {self.stride(buffer, axis)}")
        return " + ".join(parts) or "0"

    def apart(self, access: Load | Store, index: Index) -> int:
        """How far apart neighbours along an index are: 0, 1, or 2 for anything else."""
        steps = steps_of(access, index)
        if not any(steps):
            return 0
        near = steps[-1] == 1 and not any(steps[:-1]) and self.contiguous.get(access.buffer.name, True)
        return 1 if near else 2

    def lane_step(self, access: Load | Store) -> str:
        """The distance of lanes that are not neighbours."""
        assert self.v is not None
        steps = enumerate(steps_of(access, self.v))
        return " + ".join(f"{step}L * {self.stride(access.buffer, axis)}" for axis, step in steps if step) or "0L"

    # What is known in which loop.

    def placed(self) -> dict[int, list[Node | _Range]]:
        """Reads and conditions by the loop in which they are known, each after what it needs.

        Conditions come first, as a statement orders them: those before say that those after may read.
        """
        found: dict[Node | _Range, int] = {}

        def visit(node: Node) -> None:
            if node in found or isinstance(node, Buffer):
                return
            inner = (*conjuncts(node.where), *node.subscripts) if isinstance(node, Load) else node.children()
            for child in inner:
                visit(child)
            if isinstance(node, Load) or node in self.common:
                found[node] = self.depth(node)

        for loop in loops_of(self.kernel):
            visit(loop.begin)
            visit(loop.end)
        for condition in self.common:
            visit(condition)
        for store in self.stores:
            for condition in conjuncts(store.where):
                visit(condition)
        for store in self.stores:
            if range_ := self.range_of(store):
                found[range_] = self.depth(*range_.conditions)
            for expr in (*store.subscripts, store.value):
                visit(expr)
        items: dict[int, list[Node | _Range]] = {}
        for node, depth in found.items():
            items.setdefault(depth, []).append(node)
        return items

    def range_of(self, store: Store, below: int | None = None) -> _Range | None:
        """The conditions on the lanes of a term; `below`: of those known outside of a loop."""
        conditions = [c for c in conjuncts(store.where) if self.varies(c)]
        conditions = [c for c in conditions if below is None or self.depth(c) < below]
        return _Range(tuple(conditions)) if conditions else None

    def declare(self, depth: int) -> None:
        """Print what is known from here on."""
        flagged = False
        for node in self.items.get(depth, ()):
            if isinstance(node, _Range):
                self.declare_range(node)
            elif isinstance(node, Load):
                self.declare_load(node)
            elif not self.varies(node):
                flagged |= self.condition(node, depth)
        if flagged and (depth >= self.first_sum or self.place.streams):
            self.line(f"if (!({' | '.join(self.flags[r][0] for r in range(self.rows))})) continue;")

    def declare_load(self, load: Load) -> None:
        index = _is_index(load)
        for row in range(self.rows if self.blocked(load) else 1):
            offset = self.offset(load.buffer, load.subscripts, row)
            if self.varies(load):
                name = self.names[load, row] = self.fresh("p")
                self.line(f"const long {name} = {offset};")
                continue
            name = self.names[load, row] = self.fresh("e" if index else "f")
            # A row of the block that takes no part reads nothing.
            asked = [self.flags[row][0]] if self.blocked(load) and row in self.flags else []
            asked += [self.text(c, row) for c in conjuncts(load.where) if c not in self.known]
            read, kind = f"{load.buffer.name}[{offset}]", "long" if index else self.number.number
            if not index:
                read = f"{self.helpers.get(load.buffer.dtype)}({read})"
            if asked:
                read = f"{' && '.join(asked)} ? {read} : {load.fill}"
            self.line(f"const {kind} {name} = {read};")

    def condition(self, condition: Node, depth: int) -> bool:
        """Skip what does not hold, or note it of each row; return whether rows differ."""
        assert isinstance(condition, Expr)
        if not (self.blocked(condition) and self.rows > 1):
            self.line(f"if (!{self.text(condition)}) {'continue' if depth >= 0 else 'break'};")
            self.skips |= depth < self.first_sum
            self.known.add(condition)
            return False
        for row in range(self.rows):
            before = f"{self.flags[row][0]} && " if row in self.flags else ""
            name = self.fresh("ok")
            self.line(f"const int {name} = {before}{self.text(condition, row)};")
            self.flags[row] = name, depth
        self.skips |= depth < self.first_sum
        return True

    def declare_range(self, range_: _Range) -> None:
        """From which lane to which a term takes part."""
        assert self.v is not None
        assert self.place.lanes is not None
        least, most, down = (self.helpers.range(name) for name in ("least", "most", "down"))
        for row in range(self.rows if self.blocked(*range_.conditions) else 1):
            low, high = "0L", self.text(self.place.lanes.end)
            for condition in range_.conditions:
                assert isinstance(condition, Op)
                step, rest = coefficient(condition.args[0], self.v), condition.args[0].replace({self.v: Const(0)})
                assert step
                assert isinstance(rest, Expr)
                gap = f"{self.text(condition.args[1], row)} - {self.text(rest, row)}"
                # The least index from which step * index + rest >= bound holds, or ceases to hold where it falls.
                if step > 0:
                    first = gap if step == 1 else f"-{down}(-({gap}), {step}L)"
                else:
                    first = f"{down}(-({gap}), {-step}L) + 1"
                if (condition.name == "at_least") == (step > 0):
                    low = f"{most}({low}, {first})"
                else:
                    high = f"{least}({high}, {first})"
            names = self.fresh("lo"), self.fresh("hi")
            self.line(f"const long {names[0]} = {low}, {names[1]} = {high};")
            self.names[range_, row] = " ".join(names)

    def limits(self, range_: _Range, row: int, base: str) -> str:
        """Arguments that say which lanes of a vector at `base` take part."""
        row = row if self.blocked(*range_.conditions) else 0
        return ", ".join(f"{name} - ({base})" for name in self.names[range_, row].split())

    # Loops.

    def print(self) -> CKernel:
        # Left where nothing is written.
        with self.block("do {"):
            self.declare(-1)
            self.cells_loop(0, self.threads)
        self.lines[-1] = "  } while (0);"
        body, self.lines = self.lines, []
        everything = self.cells.all and not self.skips and not self.scattered
        self.begin(everything)
        self.lines += body
        self.end()
        used = {node.buffer for node in walk(self.kernel) if isinstance(node, Load)}
        inputs = [b for b in self.kernel.inputs if b in used or (b.name == INITIAL and self.has_initial)]
        names = {n.name for b in (*inputs, self.out) for e in b.shape for n in walk(e) if isinstance(n, Size)}
        numbers = sorted(names | {n.name for n in walk(self.kernel) if isinstance(n, Size)})
        strides = [
            f"{b.name}_stride_{a}" for b in inputs if not self.contiguous.get(b.name, True) for a in range(len(b.shape))
        ]
        # The initial value may be the output's own memory.
        parts = [f"const {self.stored(b)} *{'' if b.name == INITIAL else 'restrict '}{b.name}" for b in inputs]
        parts += [
            f"{self.stored(self.out)} *{'' if self.has_initial else 'restrict '}out",
            *(f"long n_{n}" for n in numbers),
            *(f"long {s}" for s in strides),
        ]
        text = f"static int {self.name}({', '.join(parts)}) {{\n" + "\n".join([*self.lines, "  return 0;", "}"])
        pointers = (*(b.name for b in inputs), "out")
        filled = not (everything or self.has_initial or self.apart_sums)
        return CKernel(text, self.helpers.prelude, self.name, pointers, (*numbers, *strides), self.structure, filled)

    def stored(self, buffer: Buffer) -> str:
        return number_of(buffer.dtype).stored

    def begin(self, everything: bool) -> None:
        """What cells hold before the first term, where not each is written by one sum."""
        if self.apart_sums:
            number, size = self.number.number, " * ".join([self.text(e) for e in self.out.shape] or ["1L"])
            self.line(f"const long cells = {size};")
            self.line(f"{number} *sums = __builtin_calloc(cells + 1, sizeof({number}));")
            if self.mode == "add":
                self.line("if (!sums) return 1;")
            else:
                self.line("char *seen = __builtin_calloc(cells + 1, 1);")
                self.line("if (!sums || !seen) { __builtin_free(sums); __builtin_free(seen); return 1; }")
            if self.has_initial:
                seen = "" if self.mode == "add" else " seen[{}] = 1;"
                self.each_cell(lambda cell, value: f"sums[{cell}] = {value};{seen.format(cell)}")
        elif self.has_initial and not everything:
            self.each_cell(lambda cell, value: f"out[{cell}] = {self.finished(value)};")

    def end(self) -> None:
        if self.apart_sums:
            self.line(f"for (long i = 0; i < cells; i++) out[i] = {self.finished('sums[i]')};")
            self.line("__builtin_free(sums);")
            if self.mode != "add":
                self.line("__builtin_free(seen);")

    def finished(self, value: str) -> str:
        """What a cell holds of its sum."""
        if self.result.activation is not None:
            value = f"{self.helpers.activation(self.result.activation, 1)}({value})"
        return f"{self.helpers.put(self.out.dtype)}({value})"

    def each_cell(self, statement: Callable[[str, str], str]) -> None:
        """Do something with each cell of the output and its initial value."""
        rank = range(len(self.out.shape))
        cell = "0"
        for axis in rank:
            extent = self.text(self.out.shape[axis])
            self.line("  " * axis + f"for (long c{axis} = 0; c{axis} < {extent}; c{axis}++)")
            cell = f"c{axis}" if axis == 0 else f"({cell}) * {extent} + c{axis}"
        initial = self.initial()
        offset = " + ".join(f"c{axis} * {self.stride(initial, axis)}" for axis in rank) or "0"
        value = f"{self.helpers.get(initial.dtype)}({INITIAL}[{offset}])"
        self.line("  " * len(rank) + f"{{ {statement(cell, value)} }}")

    def initial(self) -> Buffer:
        return next(b for b in self.kernel.inputs if b.name == INITIAL)

    def parallel(self, loop: Loop, count: str) -> None:
        if loop.role == "free" and (loop.index in self.cells.apart or self.cells.once):
            self.line(f"#pragma omp parallel for schedule(dynamic, 1 + ({count}) / 256)")

    def cells_loop(self, number: int, threads: bool) -> None:
        """The loops over cells, from one of them on; `threads`: it is the outermost."""
        if number == len(self.around):
            self.columns(threads)
            return
        loop = self.around[number]
        if loop is self.place.rows:
            self.row_block(loop, number, threads)
            return
        i, begin, end = f"i_{loop.index.name}", self.text(loop.begin), self.text(loop.end)
        if threads:
            self.parallel(loop, f"{end} - {begin}")
        with self.block(f"for (long {i} = {begin}; {i} < {end}; {i}++) {{"):
            self.declare(number)
            self.cells_loop(number + 1, False)

    def row_block(self, loop: Loop, number: int, threads: bool) -> None:
        """The loop over rows, several at a time, and one by one what is left."""
        i, begin, end, rows = f"i_{loop.index.name}", self.text(loop.begin), self.text(loop.end), self.place.schedule.m
        extent = extent_of(loop)
        whole = self.fresh("whole")
        self.line(f"const long {whole} = {begin} + ({end} - {begin}) / {rows} * {rows};")
        for step, low, high in ((rows, begin, whole), (1, whole, end)):
            if (step == 1 and extent is not None and extent % rows == 0) or (extent is not None and extent < step):
                continue
            if threads:
                self.parallel(loop, f"({high} - {low}) / {step}")
            self.rows = step
            with self.block(f"for (long {i} = {low}; {i} < {high}; {i} += {step}) {{"):
                self.declare(number)
                self.cells_loop(number + 1, False)
        self.rows = 1

    def pieces(self) -> _Pieces:
        """The loop along the lanes as vectors in straight-line code, and how they are repeated."""
        lanes = self.place.lanes
        if lanes is None:
            return [(0, [_Slot(1, 0)])]
        extent, width, each = extent_of(lanes), self.width, max(self.place.schedule.n, self.place.schedule.k)
        full = [_Slot(width, at) for at in range(0, each, width)]
        if extent is None:
            return [(each, full), *([(width, [_Slot(width, 0)])] if each > width else []), (1, [_Slot(1, 0)])]
        found: _Pieces = []
        rest = extent
        if extent > each:
            found, rest = [(each, full)], extent % each
        slots, at = list[_Slot](), 0
        while rest:
            while width > rest:
                width //= 2
            slots.append(_Slot(width, at))
            at, rest = at + width, rest - width
        return found + ([(0, slots)] if slots else [])

    @contextmanager
    def repeated(self, step: int) -> Generator[None]:
        """A loop over vectors, from where the one before it ended."""
        assert self.v is not None
        assert self.place.lanes is not None
        v, end = f"i_{self.v.name}", self.text(self.place.lanes.end)
        with self.block(f"for (; {v} + {step} <= {end}; {v} += {step}) {{" if step else "{"):
            yield

    def columns(self, threads: bool) -> None:
        """The loop along lanes that are cells, and what is inside of it."""
        pieces = self.pieces()
        if self.v is None or self.reduces:
            self.sums(pieces)
            return
        assert self.place.lanes is not None
        v = f"i_{self.v.name}"
        if threads and pieces[0][0]:
            # Loops that threads divide have a form of their own.
            step, slots = pieces.pop(0)
            end = self.text(self.place.lanes.end)
            self.parallel(self.place.lanes, f"{end} / {step}")
            with self.block(f"for (long {v} = 0; {v} < {end} / {step} * {step}; {v} += {step}) {{"):
                self.sums([(0, slots)])
            start = f"{end} / {step} * {step}"
        else:
            start = "0"
        with self.block():
            self.line(f"long {v} = {start};")
            for step, slots in pieces:
                with self.repeated(step):
                    self.sums([(0, slots)])

    # Sums.

    def sums(self, pieces: _Pieces) -> None:
        """Accumulators, the loops over terms, the cells that are written."""
        targets = [*dict.fromkeys(store.subscripts for store in self.stores)]
        slots = [*dict.fromkeys(slot for _, each in pieces for slot in each)]
        accumulators: dict[tuple[tuple[Expr, ...], int, _Slot], str] = {}
        seen: dict[tuple[tuple[Expr, ...], int], str] = {}
        with self.block():
            begin = "0" if self.mode == "add" else self.helpers.identity(self.mode)
            # Rows that are terms add to the same cells.
            rows = range(1 if self.place.streams else self.rows)
            for target in targets:
                for row in rows:
                    for slot in slots:
                        name = accumulators[target, row, slot] = self.fresh("a")
                        vector = self.helpers.vector(slot.width)
                        zero = f"({vector}){{0}}" if slot.width > 1 else "0"
                        start = zero if begin == "0" else f"{begin} + {zero}"
                        self.line(f"{vector} {name} = {start};")
                    if self.mode != "add":
                        name = seen[target, row] = self.fresh("seen")
                        self.line(f"int {name} = 0;")
            flags = dict(self.flags)
            self.terms_loop(0, pieces, accumulators, seen)
            self.flags = flags
            for target in targets:
                for row in rows:
                    own = {slot: accumulators[target, row, slot] for slot in slots}
                    self.written(target, row, own, seen.get((target, row)))

    def terms_loop(
        self,
        number: int,
        pieces: _Pieces,
        accumulators: Mapping[tuple[tuple[Expr, ...], int, _Slot], str],
        seen: Mapping[tuple[tuple[Expr, ...], int], str],
    ) -> None:
        if number < len(self.place.sums):
            loop = self.place.sums[number]
            i = f"i_{loop.index.name}"
            with self.block(f"for (long {i} = {self.text(loop.begin)}; {i} < {self.text(loop.end)}; {i}++) {{"):
                self.declare(self.first_sum + number)
                self.terms_loop(number + 1, pieces, accumulators, seen)
        elif self.reduces:
            assert self.v is not None
            with self.block():
                self.line(f"long i_{self.v.name} = 0;")
                for step, slots in pieces:
                    with self.repeated(step):
                        self.terms(slots, accumulators, seen)
        else:
            self.terms(pieces[0][1], accumulators, seen)

    def terms(
        self,
        slots: Sequence[_Slot],
        accumulators: Mapping[tuple[tuple[Expr, ...], int, _Slot], str],
        seen: Mapping[tuple[tuple[Expr, ...], int], str],
    ) -> None:
        """Add the terms of all stores at one point; those with the same lanes and conditions are one product."""
        for slot in slots:
            self.memo = {}
            for (conditions, row), stores in self.by_condition().items():
                asked = " && ".join(conditions)
                with self.block(f"if ({asked}) {{") if asked else _nothing():
                    groups: dict[tuple[tuple[Expr, ...], _Range | None, tuple[Load, ...]], list[str]] = {}
                    for store in stores:
                        factors = factors_of_value(store.value)
                        lanes = tuple(f for f in factors if isinstance(f, Load) and self.varies(f))
                        rest = [f for f in factors if f not in lanes]
                        # Numbers that are known outside are multiplied first.
                        rest.sort(key=lambda f: self.depth(f) if isinstance(f, Load) else -1)
                        scalar = " * ".join(self.scalar(f, row) for f in rest)
                        groups.setdefault((store.subscripts, self.range_of(store), lanes), []).append(scalar)
                    for (target, range_, lanes), scalars in groups.items():
                        if self.mode == "add":
                            sums = [scalars]
                        else:
                            sums = [[scalar] for scalar in scalars]
                        for each in sums:
                            term = self.product(each, lanes, range_, row, slot)
                            name = accumulators[target, 0 if self.place.streams else row, slot]
                            if self.mode == "add":
                                self.line(f"{name} += {term};")
                            else:
                                select = self.helpers.select(self.mode, slot.width)
                                self.line(f"{name} = {select}({name}, {term}); {seen[target, row]} = 1;")

    def by_condition(self) -> dict[tuple[tuple[str, ...], int], list[Store]]:
        """The stores and rows by the conditions under which they take part alone."""
        found: dict[tuple[tuple[str, ...], int], list[Store]] = {}
        for store in self.stores:
            own = [c for c in conjuncts(store.where) if c not in self.common and not self.varies(c)]
            for row in range(self.rows):
                conditions = [self.text(c, row) for c in own]
                if row in self.flags and not self.guarded(store, row):
                    conditions.insert(0, self.flags[row][0])
                found.setdefault((tuple(conditions), row), []).append(store)
        return found

    def guarded(self, store: Store, row: int) -> bool:
        """Whether a row that takes no part adds 0: where no one may see what it is multiplied by."""
        if self.kernel.exact or self.mode != "add":
            return False
        factors = [f for f in factors_of_value(store.value) if isinstance(f, Load) and self.blocked(f)]
        flagged = self.flags[row][1]
        return any(not self.varies(f) and self.depth(f) >= flagged for f in factors) and not any(
            self.varies(f) for f in factors
        )

    def scalar(self, factor: Expr, row: int) -> str:
        if isinstance(factor, Const):
            if not dtype_of(self.dtype).is_floating and factor.value != int(factor.value):
                raise NotInC(f"{factor.value} times {self.dtype}")
            return literal(factor.value, self.dtype)
        if isinstance(factor, Load) and not _is_index(factor):
            return self.names[factor, self.row_of(factor, row)]
        return f"({self.number.number}){self.text(factor, row)}"

    def product(
        self, scalars: Sequence[str], lanes: Sequence[Load], range_: _Range | None, row: int, slot: _Slot
    ) -> str:
        """A product of sums of numbers and of vectors, whose lanes outside of a range are 0."""
        scalar = " + ".join(filter(None, scalars))
        if not scalar and len(scalars) > 1:
            scalar = literal(len(scalars), self.dtype)
        elif scalar and "" in scalars:
            scalar += f" + {literal(scalars.count(''), self.dtype)}"
        if " + " in scalar:
            scalar = f"({scalar})"
        vectors = [self.vector(load, range_, row, slot) for load in lanes]
        term = " * ".join(filter(None, (scalar, *vectors)))
        if self.mode != "add" and not dtype_of(self.dtype).is_floating:
            term = f"({self.number.number})({self.number.stored})({term})"
        if not vectors and slot.width > 1:
            term = f"({term}) - ({self.helpers.vector(slot.width)}){{0}}"
        if range_ is not None and (self.kernel.exact or not vectors):
            assert self.v is not None
            limits = self.limits(range_, row, self.base(slot))
            term = f"{self.helpers.only(slot.width)}({term}, {limits})"
        return term

    def base(self, slot: _Slot) -> str:
        assert self.v is not None
        return f"i_{self.v.name} + {slot.at}" if slot.at else f"i_{self.v.name}"

    def vector(self, load: Load, range_: _Range | None, row: int, slot: _Slot) -> str:
        """The lanes of a read."""
        row_of = row if self.blocked(load, *(range_.conditions if range_ else ())) else 0
        key = load, row_of, range_
        if key not in self.memo:
            base, near = self.base(slot), self.apart(load, self.v) == 1 if self.v else False
            name = self.names[load, self.row_of(load, row)]
            step = "" if near else f", {self.lane_step(load)}"
            place = f"{load.buffer.name} + {name} + {base if near else f'({base}) * ({self.lane_step(load)})'}"
            if range_ is not None:
                function = self.helpers.load_some(slot.width, apart=not near and slot.width > 1)
                step = step if slot.width > 1 else ""
                read = f"{function}({place}{step}, {self.limits(range_, row, base)})"
            elif near or slot.width == 1:
                read = f"{self.helpers.load(slot.width)}({place})"
            else:
                read = f"{self.helpers.load_apart(slot.width)}({place}{step})"
            made = self.memo[key] = self.fresh("l")
            self.line(f"const {self.helpers.vector(slot.width)} {made} = {read};")
        return self.memo[key]

    # Cells.

    def written(self, target: tuple[Expr, ...], row: int, own: Mapping[_Slot, str], seen: str | None) -> None:
        """Write a cell for each lane, or one for all."""
        store = next(each for each in self.stores if each.subscripts is target)
        # A row that takes no part has no address.
        asked = row in self.flags and not self.place.streams
        with self.block(f"if ({self.flags[row][0]}) {{") if asked else _nothing():
            if self.v is None or self.reduces:
                self.cell(store, row, self.lanes_total(own), seen)
                return
            range_ = self.range_of(store, self.first_sum)
            if range_ is not None and (range_, row if self.blocked(*range_.conditions) else 0) not in self.names:
                self.declare_range(range_)
            self.skips |= range_ is not None
            for slot, value in own.items():
                self.lanes_cell(store, row, slot, value, seen, range_)

    def lanes_total(self, own: Mapping[_Slot, str]) -> str:
        by_width: dict[int, list[str]] = {}
        for slot, name in own.items():
            by_width.setdefault(slot.width, []).append(name)
        return " + ".join(f"{self.helpers.total(w)}({' + '.join(names)})" for w, names in by_width.items())

    def cell(self, store: Store, row: int, value: str, seen: str | None) -> None:
        """Write one cell, or add to it."""
        place = self.offset(self.out, store.subscripts, row)
        if self.apart_sums:
            if seen is None:
                self.line(f"sums[{place}] += {value};")
            else:
                select = self.helpers.select(self.mode, 1)
                chosen = f"seen[{place}] ? {select}(sums[{place}], {value}) : {value}"
                self.line(f"if ({seen}) {{ sums[{place}] = {chosen}; seen[{place}] = 1; }}")
        elif self.scattered:
            get, put = self.helpers.get(self.dtype), self.helpers.put(self.out.dtype)
            self.line(f"out[{place}] = {put}({get}(out[{place}]) + {value});")
        else:
            if self.has_initial:
                initial = self.initial()
                before = f"{INITIAL}[{self.offset(initial, store.subscripts, row)}]"
                before = f"{self.helpers.get(initial.dtype)}({before})"
                if seen is None:
                    value = f"{before} + {value}"
                else:
                    value = f"{seen} ? {self.helpers.select(self.mode, 1)}({before}, {value}) : {before}"
            elif seen is not None:
                value = f"{seen} ? {value} : 0"
            self.line(f"out[{place}] = {self.finished(value)};")

    def lanes_cell(
        self, store: Store, row: int, slot: _Slot, value: str, seen: str | None, range_: _Range | None
    ) -> None:
        """Write the cells of a vector, or add to them."""
        vector, base = self.helpers.vector(slot.width), self.base(slot)
        limits = "" if range_ is None else f", {self.limits(range_, row, base)}"
        if not self.scattered:
            zero = f"({vector}){{0}}"
            if self.has_initial:
                load = Load(self.initial(), store.subscripts)
                near, place = self.lane_address(load, row, slot)
                # Lanes that are not written may have no initial value either.
                if range_ is not None:
                    function = self.helpers.load_some(slot.width, apart=not near and slot.width > 1)
                elif near or slot.width == 1:
                    function = self.helpers.load(slot.width)
                else:
                    function = self.helpers.load_apart(slot.width)
                before = self.fresh("l")
                self.line(f"const {vector} {before} = {function}({place}{limits});")
                if seen is None:
                    value = f"{before} + {value}"
                else:
                    value = f"{seen} ? {self.helpers.select(self.mode, slot.width)}({before}, {value}) : {before}"
            elif seen is not None:
                value = f"{seen} ? {value} : {zero}"
            if self.result.activation is not None:
                value = f"{self.helpers.activation(self.result.activation, slot.width)}({value})"
        near, place = self.lane_address(store, row, slot)
        dtype = self.out.dtype
        if self.apart_sums:
            dtype = self.sums_dtype()
            place = place.replace("out +", f"({number_of(dtype).stored} *)sums +", 1)
        function = self.helpers.store(slot.width, dtype, adds=self.scattered, some=range_ is not None, near=near)
        # The arguments of a call: place, step, value, limits.
        self.line(f"{function}({place}, {value}{limits});")

    def sums_dtype(self) -> str:
        """The dtype of sums in memory of their own."""
        return {"float": "float32", "double": "float64", "unsigned": "int32"}.get(self.number.number, "int64")

    def lane_address(self, access: Load | Store, row: int, slot: _Slot) -> tuple[bool, str]:
        """Whether lanes are neighbours, and where they are: the first one's address, and, if not, their distance."""
        assert self.v is not None
        base, place = self.base(slot), self.offset(access.buffer, access.subscripts, row)
        if self.apart(access, self.v) == 1:
            return True, f"{access.buffer.name} + {place} + {base}"
        step = self.lane_step(access)
        where = f"{access.buffer.name} + {place} + ({base}) * ({step})"
        return False, where if slot.width == 1 else f"{where}, {step}"


def _is_index(load: Load) -> bool:
    """Whether a read is an integer that addresses something."""
    return load.buffer.name.startswith("x") or load.buffer.name in ("begin", "order")


@contextmanager
def _nothing() -> Generator[None]:
    yield
