"""Print an algorithm as a C function for a CPU.

The loops stand in the order that `passes.place_lanes` chose. What is read, asked and added to addresses stands in the
outermost loop in which it is known; accumulators are names of their own, one for each row of the register block and
each vector, so that no compiler has to find or may reorder a sum. Addresses are 64 bits wide.

A term that misses is not computed: its condition skips the rest of a loop, one row of a block, or some lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from insum_nn.compiler.passes.own_rows import ENTRY, ROW, own_rows
from insum_nn.compiler.passes.place_lanes import extent_of, place_lanes, steps_of
from insum_nn.compiler.passes.written_cells import WrittenCells, written_cells
from insum_nn.dtypes import dtype_of

__all__ = ["CKernel", "NotInC", "c_kernel", "translation_unit"]

# Bytes of a vector: one register of most processors; a result is the same on all of them.
_VECTOR = 32


# Steps of a loop over entries that a row is asked for ahead of its use.
_AHEAD = 8


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
    kernel = gather_writes(kernel)
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
_Pieces = Sequence[tuple[int, Sequence[_Slot]]]
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
        # Names of the sum of a cell and of whether it has a term, by subscripts and row.
        self.accumulators: dict[tuple[tuple[tuple[Expr, ...], int], _Slot], str] = {}
        self.seen: dict[tuple[tuple[Expr, ...], int], str] = {}
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

    def row_of(self, row: int, *nodes: Node) -> int:
        return row if self.blocked(*nodes) else 0

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
            return self.names[expr, self.row_of(row, expr)]
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

    def limits(self, range_: _Range, row: int, slot: _Slot) -> str:
        """Arguments that say which lanes of a vector take part."""
        assert self.v is not None
        names = self.names[range_, self.row_of(row, *range_.conditions)].split()
        return "".join(f", {name} - (i_{self.v.name} + {slot.at})" for name in names)

    def prefetch(self, loop: Loop, depth: int) -> None:
        """Ask for the rows that entries some steps ahead address, which no processor can foresee.

        The gradient of a product of 20,000 rows with 400,000 entries took 0.3 of the time.
        """
        loads = [n for n in self.items.get(depth, ()) if isinstance(n, Load) and loop.index in indices_in(n)]
        rows = [n for n in loads if self.v and self.apart(n, self.v) == 1 and _plain_lookups(n)]
        if extent_of(loop) is not None or not rows or self.v is None:
            return
        end, far = self.text(loop.end), {}
        if loop.index is ENTRY:
            end = next(f"begin[{self.text(each.end)}]" for each in self.place.outer if each.index is ROW)
            far = self.ahead(loop.index, 2 * _AHEAD, end)
        # Entries in another order are asked for themselves before they are needed to ask for rows.
        for load in loads if far else ():
            if not self.varies(load) and load.buffer.name != "order" and not _looked_up(load) and load.where is None:
                self.line(f"__builtin_prefetch({load.buffer.name} + {self.offset_ahead(load, far)});")
        near = self.ahead(loop.index, _AHEAD, end)
        each = max(self.place.schedule.n, self.place.schedule.k) if self.place.lanes else 1
        for load in rows:
            place = f"{load.buffer.name} + {self.offset_ahead(load, near)}"
            if depth >= self.first_sum and not self.reduces:
                place += f" + i_{self.v.name}"
            for at in range(0, each, 64 // dtype_of(load.buffer.dtype).torch.itemsize):
                self.line(f"__builtin_prefetch({place} + {at});")

    def ahead(self, index: Index, steps: int, end: str) -> dict[Node, Node]:
        """What an index is some steps later, or last."""
        later = Index(f"{index.name}_{steps}")
        least = self.helpers.range("least")
        self.line(f"const long i_{later.name} = {least}(i_{index.name} + {steps}, {end} - 1);")
        return {index: later}

    def offset_ahead(self, load: Load, ahead: Mapping[Node, Node]) -> str:
        """The address of a read some steps later."""
        moved = load.replace(ahead)
        assert isinstance(moved, Load)

        def read(node: Node) -> None:
            for child in node.subscripts if isinstance(node, Load) else node.children():
                read(child)
            if isinstance(node, Load) and (node, 0) not in self.names:
                name = self.fresh("e")
                self.line(f"const long {name} = {node.buffer.name}[{self.offset(node.buffer, node.subscripts, 0)}];")
                self.names[node, 0] = name

        for subscript in moved.subscripts:
            read(subscript)
        return self.offset(moved.buffer, moved.subscripts, 0)

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
        parts = [
            f"const {number_of(b.dtype).stored} *{'' if b.name == INITIAL else 'restrict '}{b.name}" for b in inputs
        ]
        parts += [
            f"{number_of(self.out.dtype).stored} *{'' if self.has_initial else 'restrict '}out",
            *(f"long n_{n}" for n in numbers),
            *(f"long {s}" for s in strides),
        ]
        text = f"static int {self.name}({', '.join(parts)}) {{\n" + "\n".join([*self.lines, "  return 0;", "}"])
        pointers = (*(b.name for b in inputs), "out")
        filled = not (everything or self.has_initial or self.apart_sums)
        return CKernel(text, self.helpers.prelude, self.name, pointers, (*numbers, *strides), self.structure, filled)

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
            self.prefetch(loop, number)
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
        found = list[tuple[int, Sequence[_Slot]]]()
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

    def along_lanes(self, pieces: _Pieces, start: str, body: Callable[[Sequence[_Slot]], None]) -> None:
        """The loops over vectors, each from where the one before it ended."""
        assert self.v is not None
        assert self.place.lanes is not None
        v, end = f"i_{self.v.name}", self.text(self.place.lanes.end)
        with self.block():
            self.line(f"long {v} = {start};")
            for step, slots in pieces:
                with self.block(f"for (; {v} + {step} <= {end}; {v} += {step}) {{" if step else "{"):
                    body(slots)

    def columns(self, threads: bool) -> None:
        """The loop along lanes that are cells, and what is inside of it."""
        pieces, lanes = self.pieces(), self.place.lanes
        if lanes is None or self.reduces:
            self.sums(pieces)
            return
        start = "0"
        if threads and pieces[0][0]:
            # Loops that threads divide have a form of their own.
            (step, slots), *pieces = pieces
            v, end = f"i_{lanes.index.name}", self.text(lanes.end)
            start = f"{end} / {step} * {step}"
            self.parallel(lanes, f"{end} / {step}")
            with self.block(f"for (long {v} = 0; {v} < {start}; {v} += {step}) {{"):
                self.sums([(0, slots)])
        self.along_lanes(pieces, start, lambda slots: self.sums([(0, slots)]))

    # Sums.

    def sums(self, pieces: _Pieces) -> None:
        """Accumulators, the loops over terms, the cells that are written."""
        slots = [*dict.fromkeys(slot for _, each in pieces for slot in each)]
        # Rows that are terms add to the same cells.
        rows = range(1 if self.place.streams else self.rows)
        targets = [(target, row) for target in dict.fromkeys(store.subscripts for store in self.stores) for row in rows]
        begin = "" if self.mode == "add" else f"{self.helpers.identity(self.mode)} + "
        with self.block():
            for target in targets:
                for slot in slots:
                    name = self.accumulators[target, slot] = self.fresh("a")
                    self.line(f"{self.helpers.vector(slot.width)} {name} = {begin}{self.helpers.zero(slot.width)};")
                if self.mode != "add":
                    name = self.seen[target] = self.fresh("seen")
                    self.line(f"int {name} = 0;")
            flags = dict(self.flags)
            self.terms_loop(0, pieces)
            self.flags = flags
            for target, row in targets:
                store = next(each for each in self.stores if each.subscripts is target)
                self.write(store, row, {slot: self.accumulators[(target, row), slot] for slot in slots})

    def terms_loop(self, number: int, pieces: _Pieces) -> None:
        """The loops over terms, from one of them on."""
        if number < len(self.place.sums):
            loop = self.place.sums[number]
            i = f"i_{loop.index.name}"
            with self.block(f"for (long {i} = {self.text(loop.begin)}; {i} < {self.text(loop.end)}; {i}++) {{"):
                self.declare(self.first_sum + number)
                self.prefetch(loop, self.first_sum + number)
                self.terms_loop(number + 1, pieces)
        elif self.reduces:
            self.along_lanes(pieces, "0", self.terms)
        else:
            self.terms(pieces[0][1])

    def terms(self, slots: Sequence[_Slot]) -> None:
        """Add the terms of all stores at one point; those with the same lanes and conditions are one product."""
        for slot in slots:
            self.memo = {}
            for (conditions, row), stores in self.by_condition().items():
                with self.block(f"if ({' && '.join(conditions)}) {{") if conditions else nullcontext():
                    self.products(slot, row, stores)

    def products(self, slot: _Slot, row: int, stores: Sequence[Store]) -> None:
        groups: dict[tuple[tuple[Expr, ...], _Range | None, tuple[Load, ...]], list[str]] = {}
        for store in stores:
            factors = factors_of_value(store.value)
            lanes = tuple(f for f in factors if isinstance(f, Load) and self.varies(f))
            # Numbers that are known outside are multiplied first.
            rest = sorted([f for f in factors if f not in lanes], key=self.depth)
            scalar = " * ".join(self.scalar(f, row) for f in rest) or literal(1, self.dtype)
            groups.setdefault((store.subscripts, self.range_of(store), lanes), []).append(scalar)
        one = literal(1, self.dtype)
        for (target, range_, lanes), scalars in groups.items():
            key = target, 0 if self.place.streams else row
            name = self.accumulators[key, slot]
            for each in [scalars] if self.mode == "add" else [[scalar] for scalar in scalars]:
                scalar = " + ".join(each)
                vectors = [self.vector(load, range_, row, slot) for load in lanes]
                parts = [*([f"({scalar})"] if not vectors or scalar != one else []), *vectors]
                term = self.limited(" * ".join(parts), bool(vectors), range_, row, slot)
                if self.mode == "add":
                    self.line(f"{name} += {term};")
                else:
                    select = self.helpers.select(self.mode, slot.width)
                    self.line(f"{name} = {select}({name}, {term}); {self.seen[key]} = 1;")

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
            return self.names[factor, self.row_of(row, factor)]
        return f"({self.number.number}){self.text(factor, row)}"

    def limited(self, term: str, vector: bool, range_: _Range | None, row: int, slot: _Slot) -> str:
        """A term as a vector whose lanes outside of a range are 0."""
        if self.mode != "add" and not dtype_of(self.dtype).is_floating:
            term = f"({self.number.number})({self.number.stored})({term})"
        if not vector and slot.width > 1:
            term = f"{term} + {self.helpers.zero(slot.width)}"
        # Lanes that were read as 0 are multiplied by what may be infinite.
        if range_ is not None and (self.kernel.exact or not vector):
            term = f"{self.helpers.only(slot.width)}({term}{self.limits(range_, row, slot)})"
        return term

    def vector(self, load: Load, range_: _Range | None, row: int, slot: _Slot) -> str:
        """The lanes of a read."""
        key = load, self.row_of(row, load, *(range_.conditions if range_ else ())), range_
        if key not in self.memo:
            made = self.memo[key] = self.fresh("l")
            read = self.read(load, range_, row, slot, along=True)
            self.line(f"const {self.helpers.vector(slot.width)} {made} = {read};")
        return self.memo[key]

    def read(self, load: Load, range_: _Range | None, row: int, slot: _Slot, *, along: bool) -> str:
        """Read neighbours along the lanes, or one cell."""
        near, place = self.address(load, row, slot, along=along)
        limits = "" if range_ is None else self.limits(range_, row, slot)
        return f"{self.helpers.load(slot.width, some=range_ is not None, near=near)}({place}{limits})"

    def address(self, access: Load | Store, row: int, slot: _Slot, *, along: bool) -> tuple[bool, str]:
        """Whether lanes are neighbours, and where they are: the first one's address, and, if not, their distance."""
        named = self.names.get((access, self.row_of(row, access))) if isinstance(access, Load) else None
        place = f"{access.buffer.name} + {named or self.offset(access.buffer, access.subscripts, row)}"
        if not along:
            return True, place
        assert self.v is not None
        base = f"i_{self.v.name} + {slot.at}"
        if self.apart(access, self.v) == 1:
            return True, f"{place} + {base}"
        steps = enumerate(steps_of(access, self.v))
        step = " + ".join(f"{step}L * {self.stride(access.buffer, axis)}" for axis, step in steps if step) or "0L"
        return False, f"{place} + ({base}) * ({step})" + (f", {step}" if slot.width > 1 else "")

    # Cells.

    def write(self, store: Store, row: int, own: Mapping[_Slot, str]) -> None:
        """Write a cell for each lane, or one for all."""
        # A row that takes no part has no address.
        asked = row in self.flags and not self.place.streams
        with self.block(f"if ({self.flags[row][0]}) {{") if asked else nullcontext():
            if self.v is None or self.reduces:
                by_width: dict[int, list[str]] = {}
                for slot, name in own.items():
                    by_width.setdefault(slot.width, []).append(name)
                totals = [f"{self.helpers.total(w)}({' + '.join(names)})" for w, names in by_width.items()]
                self.cell(store, row, _Slot(1, 0), " + ".join(totals), None, along=False)
                return
            range_ = self.range_of(store, self.first_sum)
            if range_ is not None:
                self.skips = True
                if (range_, self.row_of(row, *range_.conditions)) not in self.names:
                    self.declare_range(range_)
            for slot, value in own.items():
                self.cell(store, row, slot, value, range_, along=True)

    def cell(self, store: Store, row: int, slot: _Slot, value: str, range_: _Range | None, *, along: bool) -> None:
        """Write the cells of a vector, or add to them."""
        seen = self.seen.get((store.subscripts, row))
        select = self.helpers.select(self.mode, slot.width) if seen is not None else ""
        near, place = self.address(store, row, slot, along=along)
        dtype = self.out.dtype
        if self.apart_sums and seen is not None:
            at = self.offset(self.out, store.subscripts, row)
            chosen = f"seen[{at}] ? {select}(sums[{at}], {value}) : {value}"
            self.line(f"if ({seen}) {{ sums[{at}] = {chosen}; seen[{at}] = 1; }}")
            return
        if self.apart_sums:
            dtype = self.helpers.sums_dtype
            place = place.replace("out +", f"({number_of(dtype).stored} *)sums +", 1)
        elif not self.scattered:
            if self.has_initial:
                before = self.fresh("l")
                read = self.read(Load(self.initial(), store.subscripts), range_, row, slot, along=along)
                self.line(f"const {self.helpers.vector(slot.width)} {before} = {read};")
                value = f"{before} + {value}" if seen is None else f"{seen} ? {select}({before}, {value}) : {before}"
            elif seen is not None:
                value = f"{seen} ? {value} : {self.helpers.zero(slot.width)}"
            if self.result.activation is not None:
                value = f"{self.helpers.activation(self.result.activation, slot.width)}({value})"
        function = self.helpers.store(slot.width, dtype, adds=self.scattered, some=range_ is not None, near=near)
        limits = "" if range_ is None else self.limits(range_, row, slot)
        self.line(f"{function}({place}, {value}{limits});")


def _looked_up(load: Load) -> list[Load]:
    """The index tensors that say where a value or an entry is read."""
    inner = [node for node in walk(*load.subscripts) if isinstance(node, Load)]
    return [node for node in inner if node.buffer.name != "order"]


def _plain_lookups(load: Load) -> bool:
    """Whether the entries that address a value can be read ahead: no other entry has to be present for that."""
    found = _looked_up(load)
    ordered = any(isinstance(node, Load) for node in walk(*load.subscripts))
    return ordered and all(entry.where is None and not _looked_up(entry) for entry in found)


def _is_index(load: Load) -> bool:
    """Whether a read is an integer that addresses something."""
    return load.buffer.name.startswith("x") or load.buffer.name in ("begin", "order")
