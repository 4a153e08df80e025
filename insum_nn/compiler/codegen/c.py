"""Print an algorithm as a C function for a CPU.

The loops stand in the order that `passes/cpu/place_lanes.py` chose. What is read, asked and added to addresses stands
in the outermost loop in which it is known; accumulators are names of their own, one for each row of the register block
and each vector, so that no compiler has to find or may reorder a sum. Addresses are 64 bits wide.

A term that misses is not computed: its condition skips the rest of a loop, one row of a block, or some lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce

from insum_nn.compiler.codegen.c_prelude import PIECES, NotInC, literal, number_of
from insum_nn.compiler.codegen.c_values import Pieces, Range, Slot, Values
from insum_nn.compiler.ir.access import apart, steps_of
from insum_nn.compiler.ir.build import INITIAL
from insum_nn.compiler.ir.graph import ENTRY, ROW, extent_of, factors_of
from insum_nn.compiler.ir.lowered import ROOM, Copied, Lowered, Wide, highest
from insum_nn.compiler.ir.nodes import Buffer, Expr, Load, Loop, Op, Size, Store, conjuncts, walk
from insum_nn.dtypes import dtype_of

__all__ = ["CKernel", "NotInC", "c_kernel"]

# Terms whose operands stay in the nearest cache: of rows of 64 numbers the gradient of weights took 0.5 of the time.
_NEAR = 64


@dataclass(frozen=True, slots=True)
class CKernel:
    """A C function as text.

    Attributes:
        text: one static function, which returns 0, or 1 if it got no memory.
        prelude: what has to stand before it, in pieces that may each stand once in a translation unit.
        name: of the function.
        pointers: canonical names of the buffers that it takes, the output last.
        numbers: names of the sizes that it takes after these, as `long`; the last argument is the number of threads.
        structure: the index tensor whose entries are walked by their values, and the number of values: `begin` and
            `order`, int32, come from a stable counting sort that leaves out entries of -1.
        filled: the output must hold 0; otherwise every cell is written.
        copies: transposed copies of operands that it takes.
    """

    text: str
    prelude: str
    name: str
    pointers: tuple[str, ...]
    numbers: tuple[str, ...]
    structure: tuple[str, Expr] | None
    filled: bool
    copies: tuple[Copied, ...] = ()


def c_kernel(lowered: Lowered, name: str = "kernel") -> CKernel:
    """Print what `passes/pipeline.py: lower` made of an algorithm as one C function.

    All buffers are contiguous; an initial value may be the memory of the output.

    Raises:
        NotInC: the kernel has something that C functions do not.
    """
    wide = lowered.wide
    printer = _Printer(lowered, f"{name}_careful" if wide else name)
    found = printer.print()
    if wide is not None:
        inner = _Printer(replace(lowered, kernel=wide.kernel, place=wide.place), f"{name}_wide").print()
        found = printer.padding(name, found, inner, wide)
    return replace(found, copies=tuple([each for each in lowered.copies if each.row is None]))


class _Printer(Values):
    # Loops.

    def print(self) -> CKernel:
        # Left where nothing is written.
        with self.block("do {"):
            self.declare(-1)
            self.cells_loop(0, outermost=True)
        self.lines[-1] = "  } while (0);"
        body, self.lines = self.lines, []
        everything = self.cells.all and not self.skips and not self.scattered
        self.begin(everything)
        self.lines += body
        self.end()
        used = {node.buffer for node in walk(self.kernel) if isinstance(node, Load)}
        inputs = [b for b in self.kernel.inputs if b in used or (b.name == INITIAL and self.has_initial)]
        sources = {each.copy: each.source for each in self.copied}
        self.inputs = [sources.get(buffer, buffer) for buffer in inputs]
        names = {n.name for b in (*self.inputs, self.out) for e in b.shape for n in walk(e) if isinstance(n, Size)}
        numbers = sorted(names | {n.name for n in walk(self.kernel) if isinstance(n, Size)})
        text = self.function(numbers)
        pointers = (*(b.name for b in self.inputs), "out")
        filled = not (everything or self.has_initial or self.apart_sums)
        return CKernel(text, self.helpers.prelude, self.name, pointers, tuple(numbers), self.structure, filled)

    def function(self, numbers: Sequence[str]) -> str:
        """The text of a function of the kernel's tensors, around what was printed."""
        # The initial value may be the output's own memory.
        parts = [
            f"const {number_of(b.dtype).stored} *{'' if b.name == INITIAL else 'restrict '}{b.name}"
            for b in self.inputs
        ]
        parts += [
            f"{number_of(self.out.dtype).stored} *{'' if self.has_initial else 'restrict '}out",
            *(f"long n_{n}" for n in numbers),
            "long threads",
        ]
        return f"static int {self.name}({', '.join(parts)}) {{\n" + "\n".join([*self.lines, "  return 0;", "}"])

    def padding(self, name: str, careful: CKernel, inner: CKernel, wide: Wide) -> CKernel:
        """The function that makes padded copies and calls the kernel that reads them, or the one with conditions."""
        self.name, self.lines = name, []
        padded, finite, loops = wide.padded, wide.finite, wide.loops
        exprs = [e for p in padded for each in p.reached.values() for reach in each for e in reach]
        tables = {b: highest(b) for b in self.inputs if {highest(b)} & {*walk(*exprs)}}
        for buffer, size in tables.items():
            high = self.helpers.highest(buffer.dtype)
            self.line(f"const long n_{size.name} = {high}({buffer.name}, {self.cell_count(buffer)});")
        asked = list[str]()
        work, most = " * ".join(["1.0", *(self.text(loop.end) for loop in loops)]), self.helpers.range("most")
        made = list[tuple[Copied, str, str, str]]()
        for each in padded:
            source, copy = each.source, each.copy
            for axis, reached in each.reached.items():
                extent, reach = self.text(source.shape[axis]), self.text(copy.shape[axis])
                before, after, low = "0L", extent, f"low_{source.name}_{axis}"
                for first, last in reached:
                    before = f"{most}({before}, -({self.text(first)}))"
                    after = f"{most}({after}, {self.text(last)} + 1)"
                self.line(f"const long {low} = {before}, {reach} = {low} + {after};")
                asked.append(f"{reach} <= 2 * {extent} + {ROOM}")
            start = " + ".join(f"low_{source.name}_{axis} * {self.stride(copy, axis)}" for axis in each.reached) or "0"
            made.append((each, number_of(source.dtype).stored, self.cell_count(copy), start))
        for each, _, cells, _ in made:
            asked += [f"{work} > 4.0 * {cells}", f"{cells} <= 4 * {self.cell_count(each.source)} + {ROOM**2}"]
        asked += [f"{self.helpers.finite()}({b.name}, {self.cell_count(b)}, threads)" for b in finite if self.floating]
        with self.block(f"if ({' && '.join(asked)}) {{"):
            self.line("int failed = -1;")
            for each, stored, cells, _ in made:
                self.line(f"{stored} *all_{each.copy.name} = __builtin_calloc({cells} + 1, sizeof({stored}));")
            with self.block(f"if ({' && '.join(f'all_{each.copy.name}' for each in padded)}) {{"):
                for each, stored, _, start in made:
                    self.line(f"{stored} *{each.copy.name} = all_{each.copy.name} + {start};")
                    self.fill_copy(each)
                self.line(f"failed = {_call(inner)};")
            for each in padded:
                self.line(f"__builtin_free(all_{each.copy.name});")
            self.line("if (failed >= 0) return failed;")
        self.line(f"return {_call(careful)};")
        given = {n.name for n in walk(*(loop.end for loop in loops), *exprs) if isinstance(n, Size)}
        numbers = sorted({*careful.numbers} | given - {size.name for size in tables.values()})
        text = "\n\n".join([careful.text, inner.text, self.function(numbers)])
        prelude = PIECES.join(dict.fromkeys([*self.helpers.prelude.split(PIECES), *inner.prelude.split(PIECES)]))
        filled = careful.filled or inner.filled
        return replace(careful, text=text, prelude=prelude, name=name, numbers=tuple(numbers), filled=filled)

    def cell_count(self, buffer: Buffer) -> str:
        return " * ".join([self.text(e) for e in buffer.shape] or ["1L"])

    def fill_copy(self, made: Copied) -> None:
        """Copy the rows of an operand among zeros, or transpose them."""
        source, copy, last = made.source, made.copy, len(made.source.shape) - 1
        axes, extents = [a for a in range(last + 1) if a != made.row], [self.text(extent) for extent in source.shape]
        places, at = [*range(last + 1)], [f"c{axis}" for axis in range(last + 1)]
        if made.swapped is not None:
            places[made.swapped], places[-1] = last, made.swapped
        heads = [f"for (long c{axis} = 0; c{axis} < {extents[axis]}; c{axis}++)" for axis in axes]
        if made.swapped is None:
            del heads[-1], axes[-1]
            at[-1] = "0"
        else:
            # As many numbers of a row as a line of the cache holds.
            heads.insert(0, f"for (long b = 0; b < {extents[-1]}; b += 16)")
            heads[-1] = f"for (long c{last} = b; c{last} < {extents[-1]} && c{last} < b + 16; c{last}++)"
        if made.row is not None:
            at[made.row] = f"i_{ROW.name}"
        elif heads:
            self.line("#pragma omp parallel for num_threads(threads) if(threads > 1)")
        to = " + ".join([copy.name, *(f"c{a} * {self.stride(copy, places[a])}" for a in axes)])
        place = " + ".join([source.name, *(f"{each} * {self.stride(source, a)}" for a, each in enumerate(at))])
        for depth, head in enumerate(heads):
            self.line("  " * depth + head)
        copied = f"*({to}) = *({place});"
        if made.swapped is None:
            copied = f"__builtin_memcpy({to}, {place}, {extents[-1]} * sizeof({number_of(source.dtype).stored}));"
        self.line("  " * len(heads) + copied)

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
            value = f"{self.helpers.of_numbers(self.result.activation, 1)}({value})"
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
            chunk = f"schedule(dynamic, 1 + ({count}) / 256)"
            self.line(f"#pragma omp parallel for num_threads(threads) if(threads > 1) {chunk}")

    def cells_loop(self, number: int, *, outermost: bool) -> None:
        """The loops over cells, from one of them on; threads may divide the outermost one."""
        if number == len(self.around):
            self.columns(outermost=outermost)
            return
        loop = self.around[number]
        if loop is self.place.rows:
            self.row_block(loop, number, outermost=outermost)
            return
        i, begin, end = f"i_{loop.index.name}", self.text(loop.begin), self.text(loop.end)
        if outermost:
            self.parallel(loop, f"{end} - {begin}")
        with self.block(f"for (long {i} = {begin}; {i} < {end}; {i}++) {{"):
            self.declare(number)
            self.prefetch(loop, number)
            for each in self.copied if loop.index is ROW else ():
                # What all entries of a row read, if it has any.
                (entries,) = [inner for inner in self.around if inner.index is ENTRY]
                self.line(f"{number_of(each.copy.dtype).stored} {each.copy.name}[{self.cell_count(each.copy)}];")
                with self.block(f"if ({self.text(entries.begin)} < {self.text(entries.end)}) {{"):
                    self.fill_copy(each)
            if loop.index is ROW and self.in_parts:
                self.parts(number)
            else:
                self.cells_loop(number + 1, outermost=False)

    def parts(self, number: int) -> None:
        """The loops over the cells of a row, once for some of its entries after the others."""
        entries, *inner = self.place.sums
        least, most = self.helpers.range("least"), self.helpers.range("most")
        begin, end = self.some = self.fresh("part"), self.fresh("part")
        terms = " * ".join([self.text(loop.end) for loop in inner]) or "1L"
        self.line(f"long {begin} = {self.text(entries.begin)}, {end};")
        with self.block("do {"):
            self.line(f"{end} = {least}({begin} + {most}(1, {_NEAR} / {most}(1, {terms})), {self.text(entries.end)});")
            self.cells_loop(number + 1, outermost=False)
            self.line(f"{begin} = {end};")
        self.lines[-1] = "  " * self.indent + f"}} while ({begin} < {self.text(entries.end)});"

    def row_block(self, loop: Loop, number: int, *, outermost: bool) -> None:
        """The loop over rows, several at a time, and one by one what is left."""
        i, begin, end, rows = f"i_{loop.index.name}", self.text(loop.begin), self.text(loop.end), self.place.schedule.m
        extent = extent_of(loop)
        whole = self.fresh("whole")
        self.line(f"const long {whole} = {begin} + ({end} - {begin}) / {rows} * {rows};")
        for step, low, high in ((rows, begin, whole), (1, whole, end)):
            if (step == 1 and extent is not None and extent % rows == 0) or (extent is not None and extent < step):
                continue
            if outermost:
                self.parallel(loop, f"({high} - {low}) / {step}")
            self.rows = step
            with self.block(f"for (long {i} = {low}; {i} < {high}; {i} += {step}) {{"):
                self.declare(number)
                self.cells_loop(number + 1, outermost=False)
        self.rows = 1

    def pieces(self) -> Pieces:
        """The loop along the lanes as vectors in straight-line code, and how they are repeated."""
        lanes = self.place.lanes
        if lanes is None:
            return [(0, 0, [Slot(1, 0)])]
        extent, width, each = extent_of(lanes), self.place.width, max(self.place.schedule.n, self.place.schedule.k)
        full = [Slot(width, at) for at in range(0, each, width)]
        if extent is None:
            rest = [slot._replace(passes=True) for slot in full]
            return [(each, each, full), *([(width + 1, each, rest)] if each > width else []), (1, width, rest[:1])]
        found = list[tuple[int, int, Sequence[Slot]]]()
        rest = extent
        if extent > each:
            found, rest = [(each, each, full)], extent % each
        slots, at = list[Slot](), 0
        while rest:
            while width > rest:
                width //= 2
            slots.append(Slot(width, at))
            at, rest = at + width, rest - width
        return found + ([(0, 0, slots)] if slots else [])

    def along_lanes(self, pieces: Pieces, start: str, body: Callable[[Sequence[Slot]], None]) -> None:
        """The loops over vectors, each from where the one before it ended."""
        assert self.v is not None
        assert self.place.lanes is not None
        v, end = f"i_{self.v.name}", self.text(self.place.lanes.end)
        with self.block():
            self.line(f"long {v} = {start};")
            for left, step, slots in pieces:
                with self.block(f"for (; {v} + {left} <= {end}; {v} += {step}) {{" if step else "{"):
                    body(slots)

    def columns(self, *, outermost: bool) -> None:
        """The loop along lanes that are cells, and what is inside of it."""
        pieces, lanes = self.pieces(), self.place.lanes
        if lanes is None or self.reduces:
            self.sums(pieces)
            return
        start = "0"
        if outermost and pieces[0][1]:
            # Loops that threads divide have a form of their own.
            (_, step, slots), *pieces = pieces
            v, end = f"i_{lanes.index.name}", self.text(lanes.end)
            start = f"{end} / {step} * {step}"
            self.parallel(lanes, f"{end} / {step}")
            with self.block(f"for (long {v} = 0; {v} < {start}; {v} += {step}) {{"):
                self.sums([(0, 0, slots)])
        self.along_lanes(pieces, start, lambda slots: self.sums([(0, 0, slots)]))

    # Sums.

    def sums(self, pieces: Pieces) -> None:
        """Accumulators, the loops over terms, the cells that are written, for one batch of stores after the other."""
        for stores in self.place.batches:
            self.stores = [*stores]
            self.batch(pieces)

    def batch(self, pieces: Pieces) -> None:
        """The same for one batch."""
        # What passes the end is added to the same sums, or is alone.
        every = [slot for *_, each in pieces for slot in each]
        slots = [*{slot[:2]: slot for slot in every}.values()]
        cells = dict.fromkeys(store.subscripts for store in self.stores)
        targets = [(target, row) for target in cells for row in range(self.rows)]
        begin = "" if self.mode == "add" else f"{self.helpers.identity(self.mode)} + "
        with self.block():
            for target in targets:
                for slot in slots:
                    name = self.accumulators[target, slot[:2]] = self.fresh("a")
                    self.line(f"{self.helpers.vector(slot.width)} {name} = {begin}{self.helpers.zero(slot.width)};")
                if self.mode != "add":
                    name = self.seen[target] = self.fresh("seen")
                    self.line(f"int {name} = 0;")
            flags = dict(self.flags)
            self.terms_loop(0, pieces)
            self.flags = flags
            own = [{slot: self.accumulators[target, slot[:2]] for slot in slots} for target in targets]
            totals = self.totals(own) if self.v is None or self.reduces else [None] * len(own)
            for number, (target, row) in enumerate(targets):
                store = next(each for each in self.stores if each.subscripts is target)
                self.write(store, row, own[number], totals[number])

    def totals(self, own: Sequence[Mapping[Slot, str]]) -> list[str]:
        """The sums of all lanes, or their extrema, of several cells at a time."""
        found, mode = [list[str]() for _ in own], self.mode
        for width in dict.fromkeys(slot.width for slot in own[0]):
            both = partial(self.helpers.both, mode, width)
            parts = [reduce(both, (name for slot, name in each.items() if slot.width == width)) for each in own]
            at = 0
            while at < len(parts):
                count = 1 << min(len(parts) - at, width).bit_length() - 1
                name = self.fresh("t")
                if count == 1:
                    total = self.helpers.total(width, mode)
                    self.line(f"const {self.number.number} {name} = {total}({parts[at]});")
                else:
                    self.line(f"{self.number.number} {name}[{count}];")
                    totals = self.helpers.totals(count, width, mode)
                    self.line(f"{totals}({name}, {', '.join(parts[at : at + count])});")
                for place in range(count):
                    found[at + place].append(name if count == 1 else f"{name}[{place}]")
                at += count
        return [reduce(partial(self.helpers.both, mode, 1), each) for each in found]

    def terms_loop(self, number: int, pieces: Pieces) -> None:
        """The loops over terms, from one of them on."""
        if number < len(self.place.sums):
            loop = self.place.sums[number]
            i = f"i_{loop.index.name}"
            begin, end = self.some if self.some and number == 0 else (self.text(loop.begin), self.text(loop.end))
            with self.block(f"for (long {i} = {begin}; {i} < {end}; {i}++) {{"):
                self.declare(self.first_sum + number)
                self.prefetch(loop, self.first_sum + number)
                self.terms_loop(number + 1, pieces)
        elif self.reduces:
            self.along_lanes(pieces, "0", self.terms)
        else:
            self.terms(pieces[0][2])

    def terms(self, slots: Sequence[Slot]) -> None:
        """Add the terms of all stores at one point; those with the same lanes and conditions are one product."""
        for slot in slots:
            self.memo = {}
            for (conditions, row), stores in self.by_condition().items():
                with self.block(f"if ({' && '.join(conditions)}) {{") if conditions else nullcontext():
                    self.products(slot, row, stores)

    def products(self, slot: Slot, row: int, stores: Sequence[Store]) -> None:
        groups: dict[tuple[tuple[Expr, ...], Range, tuple[Expr, ...]], list[str]] = {}
        for store in stores:
            factors = factors_of(store.value)
            lanes = tuple(f for f in factors if self.varies(f))
            # Numbers that are known outside are multiplied first.
            rest = sorted([f for f in factors if f not in lanes], key=self.depth)
            scalar = " * ".join(self.number_text(f, row) for f in rest) or literal(1, self.dtype)
            groups.setdefault((store.subscripts, self.range_of(store), lanes), []).append(scalar)
        one = literal(1, self.dtype)
        for (target, range_, lanes), scalars in groups.items():
            key = target, row
            name = self.accumulators[key, slot[:2]]
            for each in [scalars] if self.mode == "add" else [[scalar] for scalar in scalars]:
                scalar = " + ".join(each)
                vectors = [self.vector(each, range_, row, slot) for each in lanes]
                parts = [*([f"({scalar})"] if not vectors or scalar != one else []), *vectors]
                # A function of what is read as 0 need not be 0.
                zeroed = self.mode == "add" and bool(vectors) and all(isinstance(each, Load) for each in lanes)
                # Past the end only sums along the lanes count, which no number multiplies there.
                zeroed = zeroed and not self.kernel.exact if range_ else zeroed and len(parts) == len(vectors)
                term = self.limited(" * ".join(parts), bool(vectors), zeroed, range_, row, slot)
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
        every = factors_of(store.value)
        if any(isinstance(f, Op) for f in every):
            return False
        factors = [f for f in every if isinstance(f, Load) and self.blocked(f)]
        flagged = self.flags[row][1]
        return any(not self.varies(f) and self.depth(f) >= flagged for f in factors) and not any(
            self.varies(f) for f in factors
        )

    def limited(self, term: str, vector: bool, zeroed: bool, range_: Range, row: int, slot: Slot) -> str:
        """A term as a vector whose lanes outside of a range are 0."""
        if self.mode != "add" and not dtype_of(self.dtype).is_floating:
            term = f"({self.number.number})({self.number.stored})({term})"
        if not vector and slot.width > 1:
            term = f"{term} + {self.helpers.zero(slot.width)}"
        # Lanes that were read as 0 are multiplied by what may be infinite.
        if not zeroed and (range_ or (slot.passes and self.reduces)):
            term = f"{self.helpers.only(slot.width, self.mode)}({term}{self.limits(range_, row, slot)})"
        return term

    def vector(self, value: Expr, range_: Range, row: int, slot: Slot) -> str:
        """The lanes of a read, or of a function; a number where they are all the same."""
        if not self.varies(value):
            return self.number_text(value, row)
        key = value, self.row_of(row, value, *range_), range_
        if key not in self.memo:
            if isinstance(value, Load):
                text = self.read(value, range_, row, slot, along=True)
            else:
                assert isinstance(value, Op)
                text = self.applied(value, [self.vector(arg, range_, row, slot) for arg in value.args], slot.width)
            made = self.memo[key] = self.fresh("l")
            self.line(f"const {self.helpers.vector(slot.width)} {made} = {text};")
        return self.memo[key]

    def read(self, load: Load, range_: Range, row: int, slot: Slot, *, along: bool) -> str:
        """Read neighbours along the lanes, or one cell."""
        near, place = self.address(load, row, slot, along=along)
        limits = self.limits(range_, row, slot)
        return f"{self.helpers.load(slot.width, some=bool(limits), near=near)}({place}{limits})"

    def address(self, access: Load | Store, row: int, slot: Slot, *, along: bool) -> tuple[bool, str]:
        """Whether lanes are neighbours, and where they are: the first one's address, and, if not, their distance."""
        named = self.names.get((access, self.row_of(row, access))) if isinstance(access, Load) else None
        place = f"{access.buffer.name} + {named or self.offset(access.buffer, access.subscripts, row)}"
        if not along:
            return True, place
        assert self.v is not None
        base = f"i_{self.v.name} + {slot.at}"
        if apart(access, self.v) == 1:
            return True, f"{place} + {base}"
        steps = enumerate(steps_of(access, self.v))
        step = " + ".join(f"{step}L * {self.stride(access.buffer, axis)}" for axis, step in steps if step) or "0L"
        return False, f"{place} + ({base}) * ({step})" + (f", {step}" if slot.width > 1 else "")

    # Cells.

    def write(self, store: Store, row: int, own: Mapping[Slot, str], total: str | None) -> None:
        """Write a cell for each lane, or one for all."""
        # A row that takes no part has no address.
        with self.block(f"if ({self.flags[row][0]}) {{") if row in self.flags else nullcontext():
            if total is not None:
                self.cell(store, row, Slot(1, 0), total, (), along=False)
                return
            range_ = self.range_of(store, self.first_sum)
            if range_:
                self.skips = True
                if (range_, self.row_of(row, *range_)) not in self.names:
                    self.declare_range(range_)
            for slot, value in own.items():
                self.cell(store, row, slot, value, range_, along=True)

    def cell(self, store: Store, row: int, slot: Slot, value: str, range_: Range, *, along: bool) -> None:
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
            if self.has_initial or self.some:
                before, read = self.fresh("l"), self.helpers.zero(slot.width)
                if self.has_initial:
                    read = self.read(Load(self.initial(), store.subscripts), range_, row, slot, along=along)
                if self.some:
                    written = self.read(Load(self.out, store.subscripts), range_, row, slot, along=along)
                    read = f"{self.some[0]} > {self.text(self.place.sums[0].begin)} ? {written} : {read}"
                self.line(f"const {self.helpers.vector(slot.width)} {before} = {read};")
                value = f"{before} + {value}" if seen is None else f"{seen} ? {select}({before}, {value}) : {before}"
            elif seen is not None:
                value = f"{seen} ? {value} : {self.helpers.zero(slot.width)}"
            if self.result.activation is not None:
                value = f"{self.helpers.of_numbers(self.result.activation, slot.width)}({value})"
        limits = self.limits(range_, row, slot)
        function = self.helpers.store(slot.width, dtype, adds=self.scattered, some=bool(limits), near=near)
        self.line(f"{function}({place}, {value}{limits});")


def _call(kernel: CKernel) -> str:
    """A call of a function where all of its arguments have their names."""
    return f"{kernel.name}({', '.join([*kernel.pointers, *(f'n_{n}' for n in kernel.numbers), 'threads'])})"
