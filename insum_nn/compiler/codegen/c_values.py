"""What generated C reads, asks and addresses: each value has a name in the outermost loop in which it is known."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from insum_nn.compiler.codegen.c_prelude import Helpers, NotInC, literal
from insum_nn.compiler.ir.access import apart, coefficient, indices_in, is_index
from insum_nn.compiler.ir.graph import ENTRY, ROW, extent_of, factor_dtype, factors_of, loops_of, stores_of
from insum_nn.compiler.ir.lowered import Lowered
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Loop,
    Node,
    Op,
    Size,
    Store,
    conjuncts,
    walk,
)
from insum_nn.dtypes import dtype_of

__all__ = ["Pieces", "Range", "Slot", "Values"]

# Steps of a loop over entries that a row is asked for ahead of its use.
_AHEAD = 8


# The conditions that say where along the lanes a term takes part.
Range = tuple[Expr, ...]


class Slot(NamedTuple):
    """One vector of several in straight-line code: its lanes, where it begins, and whether lanes may pass the end."""

    width: int
    at: int
    passes: bool = False


# Numbers that have to be left of a loop over vectors, its step, the vectors of one step; a step of 0 runs once.
Pieces = Sequence[tuple[int, int, Sequence[Slot]]]


_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "/", "mod": "%",
    "at_least": ">=", "less": "<", "equal": "==", "and": "&&",
}  # fmt: skip


class Values:
    """The names of values, by the loops around the place that is printed."""

    def __init__(self, lowered: Lowered, name: str) -> None:
        self.kernel, self.cells, self.structure = lowered.kernel, lowered.cells, lowered.structure
        self.place = lowered.place
        self.name = name
        self.result = self.kernel.results[0]
        self.out, self.stores = self.result.buffer, stores_of(self.kernel)
        self.mode = self.stores[0].combine
        self.dtype = factor_dtype(self.kernel)
        self.helpers = Helpers(dtype_of(self.dtype))
        self.number = self.helpers.number
        self.floating = dtype_of(self.dtype).is_floating
        functions = [self.result.activation, *(each.name for s in self.stores for each in _applied(s.value))]
        # Sums of integers are unsigned, of which no function knows the sign.
        if not self.floating and (unknown := [name for name in functions if name not in (None, *_SIGNS)]):
            raise NotInC(f"{unknown[0]} of {self.dtype}")
        lanes = self.place.lanes
        self.v = lanes.index if lanes else None
        self.reduces = lanes is not None and lanes.role == "sum"
        rows = self.place.rows
        self.around = [*self.place.outer, *([rows] if rows else [])]
        self.order = [loop.index for loop in (*self.around, *self.place.sums)]
        self.first_sum = len(self.around)
        self.has_initial = self.result.initial == "tensor"
        # Sums of several points meet in memory; of numbers that are rounded or changed there, in memory of their own.
        self.scattered = not self.cells.once
        plain = self.mode == "add" and self.result.activation is None and self.out.dtype == self.dtype
        plain = plain and not dtype_of(self.dtype).is_widened
        self.apart_sums = self.scattered and not plain
        # Blocks of cells that walk the same entries take some of these at a time, of which what they read is then near.
        sums, blocks = self.place.sums, rows is not None and extent_of(rows) != self.place.schedule.m
        walks = bool(sums) and sums[0].index is ENTRY and lanes is not None and not self.reduces
        self.copied = [each for each in lowered.copies if each.row is not None]
        self.some: tuple[str, str] | None = None
        self.in_parts = blocks and walks and plain and not self.scattered
        self.common = [c for c in conjuncts(self.stores[0].where)]
        self.common = [c for c in self.common if all(c in conjuncts(s.where) for s in self.stores)]
        # What changes from scope to scope: names of values, conditions that hold, flags of rows.
        self.names: dict[tuple[Node | Range, int], str] = {}
        self.known: set[Node] = set()
        self.flags: dict[int, tuple[str, int]] = {}
        self.memo: dict[tuple[object, ...], str] = {}
        # Names of the sum of a cell and of whether it has a term, by subscripts and row.
        self.accumulators: dict[tuple[tuple[tuple[Expr, ...], int], tuple[int, int]], str] = {}
        self.seen: dict[tuple[tuple[Expr, ...], int], str] = {}
        self.rows, self.skips, self.count, self.indent = 1, False, 0, 1
        self.lines: list[str] = []
        self.items = self.placed()

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

    def number_text(self, value: Expr, row: int) -> str:
        """A number that is the same for all lanes, of values that are named already."""
        named = self.names.get((value, self.row_of(row, value)))
        if named is not None and not (isinstance(value, Load) and _is_index(value)):
            return named
        if isinstance(value, Const):
            if not dtype_of(self.dtype).is_floating and value.value != int(value.value):
                raise NotInC(f"{value.value} times {self.dtype}")
            return literal(value.value, self.dtype)
        if not isinstance(value, Op) or _is_integer(value):
            return f"({self.number.number}){self.text(value, row)}"
        return self.applied(value, [self.number_text(arg, row) for arg in value.args], 1)

    def applied(self, value: Op, args: Sequence[str], width: int) -> str:
        """An operation on numbers, or on vectors and numbers."""
        if value.name in _SIGNS or value.name == "div":
            return f"({args[0]} {_SIGNS.get(value.name, '/')} {args[1]})"
        if width > 1:
            zero = self.helpers.zero(width)
            pairs = zip(args, value.args, strict=True)
            args = [text if self.varies(arg) else f"({text} + {zero})" for text, arg in pairs]
        return f"{self.helpers.of_numbers(value.name, width)}({', '.join(args)})"

    # Addresses.

    def stride(self, buffer: Buffer, axis: int) -> str:
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
            if found is not Const(0):
                parts.append(f"{self.text(found, row)} * {self.stride(buffer, axis)}")
        return " + ".join(parts) or "0"

    # What is known in which loop.

    def placed(self) -> dict[int, list[Node | Range]]:
        """Reads and conditions by the loop in which they are known, each after what it needs.

        Conditions come first, as a statement orders them: those before say that those after may read.
        """
        found: dict[Node | Range, int] = {}
        applied = {node for store in self.stores for node in _applied(store.value)}

        def visit(node: Node) -> None:
            if node in found or isinstance(node, Buffer):
                return
            inner = (*conjuncts(node.where), *node.subscripts) if isinstance(node, Load) else node.children()
            for child in inner:
                visit(child)
            if isinstance(node, Load) or node in self.common or (node in applied and not self.varies(node)):
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
                found[range_] = self.depth(*range_)
            for expr in (*store.subscripts, store.value):
                visit(expr)
        items: dict[int, list[Node | Range]] = {}
        for node, depth in found.items():
            items.setdefault(depth, []).append(node)
        return items

    def range_of(self, store: Store, below: int | None = None) -> Range:
        """The conditions on the lanes of a term; `below`: of those known outside of a loop."""
        conditions = [c for c in conjuncts(store.where) if self.varies(c)]
        return tuple([c for c in conditions if below is None or self.depth(c) < below])

    def declare(self, depth: int) -> None:
        """Print what is known from here on."""
        flagged = False
        # Inside a loop over terms, only what the current batch of stores reads.
        needed = {*walk(*self.stores)} if depth >= self.first_sum and len(self.place.batches) > 1 else None
        for node in self.items.get(depth, ()):
            if needed is not None and isinstance(node, Expr) and node not in needed and node not in self.common:
                continue
            if isinstance(node, Op) and node not in self.common:
                for row in range(self.rows if self.blocked(node) else 1):
                    text, name = self.number_text(node, row), self.fresh("f")
                    self.line(f"const {self.number.number} {name} = {text};")
                    self.names[node, row] = name
            elif isinstance(node, tuple):
                self.declare_range(node)
            elif isinstance(node, Load):
                self.declare_load(node)
            elif not self.varies(node):
                flagged |= self.condition(node, depth)
        if flagged and depth >= self.first_sum:
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

    def declare_range(self, range_: Range) -> None:
        """From which lane to which a term takes part."""
        assert self.v is not None
        assert self.place.lanes is not None
        least, most, down = (self.helpers.range(name) for name in ("least", "most", "down"))
        for row in range(self.rows if self.blocked(*range_) else 1):
            low, high = "0L", self.text(self.place.lanes.end)
            for condition in range_:
                assert isinstance(condition, Op)
                step, rest = coefficient(condition.args[0], self.v), condition.args[0].replace({self.v: Const(0)})
                assert step
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

    def limits(self, range_: Range, row: int, slot: Slot) -> str:
        """Arguments that say which lanes of a vector take part; none if all do."""
        if not range_ and not slot.passes:
            return ""
        assert self.v is not None
        assert self.place.lanes is not None
        names = ["0L", self.text(self.place.lanes.end)]
        if range_:
            names = self.names[range_, self.row_of(row, *range_)].split()
        return "".join(f", {name} - (i_{self.v.name} + {slot.at})" for name in names)

    def prefetch(self, loop: Loop, depth: int) -> None:
        """Ask for the rows that entries some steps ahead address, which no processor can foresee.

        The gradient of a product of 20,000 rows with 400,000 entries took 0.3 of the time. Sums of rows of one line of
        the cache take 1.4 times as long so, unless they are many more than the cache holds (0.8).
        """
        loads = [n for n in self.items.get(depth, ()) if isinstance(n, Load) and loop.index in indices_in(n)]
        rows = [n for n in loads if self.v and apart(n, self.v) == 1 and _plain_lookups(n)]
        if extent_of(loop) is not None or not rows or self.v is None:
            return
        width = extent_of(self.place.lanes) if self.place.lanes is not None else None
        if depth >= self.first_sum and width is not None and width * self.number.bytes <= 64:
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


def _looked_up(load: Load) -> list[Load]:
    """The index tensors that say where a value or an entry is read."""
    inner = [node for node in walk(*load.subscripts) if isinstance(node, Load)]
    return [node for node in inner if node.buffer.name != "order"]


def _plain_lookups(load: Load) -> bool:
    """Whether the entries that address a value can be read ahead: no other entry has to be present for that."""
    found = _looked_up(load)
    ordered = any(isinstance(node, Load) for node in walk(*load.subscripts))
    return ordered and all(entry.where is None and not _looked_up(entry) for entry in found)


def _applied(value: Expr) -> list[Op]:
    """The factors of a product that are functions of numbers."""
    return [factor for factor in factors_of(value) if isinstance(factor, Op) and not _is_integer(factor)]


def _is_integer(value: Expr) -> bool:
    """Whether a factor is an index, or what a static table's entries and steps add up to."""
    if isinstance(value, Op):
        return value.name in ("add", "sub", "mul") and all(map(_is_integer, value.args))
    return isinstance(value, Index) or (isinstance(value, Const) and value.dtype == "int64")


def _is_index(load: Load) -> bool:
    """Whether a read is an integer that addresses something."""
    return is_index(load.buffer) or load.buffer.name in ("begin", "order")
