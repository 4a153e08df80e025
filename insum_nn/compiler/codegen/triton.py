"""Print a placed kernel as a Triton function.

A tile loop becomes an axis of every value that depends on its index. An accumulator has the axes of what is added to
it, of the tile loops around it; what is added in further tile loops is summed over these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from insum_nn.compiler.codegen.triton_values import Scope, Value, Values, lanes_of
from insum_nn.compiler.ir.graph import statements_in
from insum_nn.compiler.ir.nodes import (
    Alloc,
    Buffer,
    Const,
    Dot,
    Expr,
    If,
    Index,
    Kernel,
    Load,
    Loop,
    Node,
    Op,
    Size,
    Stmt,
    Store,
    conjuncts,
    walk,
)
from insum_nn.compiler.lang.combining import COMPARISONS, Combining, selecting
from insum_nn.dtypes import dtype_of

__all__ = ["TritonKernel", "chooser", "print_kernel"]


# Lines of all parts of a kernel from which they are functions of their own.
_LONG = 300
# The bits that are in one of two words, and how many there are.
_BITS = """@triton.jit
def either(one, other):
    return one | other


@triton.jit
def bits_of(word):
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24

"""


_CHOSEN = """@triton.jit
def {name}(one, other):
    return tl.where((one {sign} other) | (one != one), one, other)

"""


def chooser(mode: Combining) -> str:
    """The function, `max_of` or `min_of`, that selects one of two numbers, one that is NaN first."""
    return _CHOSEN.format(name=f"{mode.name}_of", sign=COMPARISONS[mode.name])


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A Triton function as text.

    Attributes:
        text: the module's text; the function's name is `kernel`.
        buffers: its pointers, in order.
        sizes: the names of the sizes that follow them.
        grid: programs, as an expression of sizes.
    """

    text: str
    buffers: tuple[Buffer, ...]
    sizes: tuple[str, ...]
    grid: Expr


def print_kernel(kernel: Kernel, *, wide: bool = False) -> TritonKernel:
    """Print the kernel as a Triton function; `wide`: some offset needs 64 bits."""
    return _Printer(kernel, wide).print()


class _Printer(Values):
    def __init__(self, kernel: Kernel, wide: bool) -> None:
        super().__init__(wide, any(buffer.dtype == "float64" for buffer in kernel.inputs))
        self.kernel = kernel
        self.loops = {each.index: each for each in statements_in(kernel.body) if isinstance(each, Loop)}
        self.tiles = {loop.index.name: loop for loop in self.loops.values() if loop.role == "tile"}
        # Tile loops around the statement being printed, and around each accumulator.
        self.around: list[str] = []
        self.outside: dict[Buffer, tuple[str, ...]] = {}
        self.helpers: dict[str, None] = {}
        self.added: dict[Buffer, list[Store]] = {}
        for each in statements_in(kernel.body):
            if isinstance(each, Store) and each.buffer.local:
                self.added.setdefault(each.buffer, []).append(each)
        # The tile loops that a node varies with.
        self.varies: dict[Node, frozenset[str]] = {}

    def print(self) -> TritonKernel:
        self.line("program = tl.program_id(0)")
        grids = [loop for loop in self.loops.values() if loop.role == "grid"]
        body = grids[-1].body if grids else self.kernel.body
        for number, loop in reversed([*enumerate(grids)]):
            name = loop.index.name
            count = self.scalar(loop.end) if number else ""
            text = f"program % {count}" if number else "program"
            self.line(f"{name} = {text if self.integer == 'int32' else f'({text}).to(tl.int64)'}")
            if number:
                self.line(f"program = program // {count}")
            self.indices[name] = Value(name)
        self.block(body)
        every = (*self.kernel.inputs, *(result.buffer for result in self.kernel.results))
        buffers = tuple(buffer for buffer in every if buffer in self.accessed)
        names = ", ".join([*(buffer.name for buffer in buffers), *map(str.upper, self.sizes)])
        head = ["import triton", "import triton.language as tl", "", "", *self.helpers]
        head += ["@triton.jit", f"def kernel({names}):"]
        text = "\n".join([*head, *(f"    {line}" for line in self.scopes[0].lines)])
        grid: Expr = Const(1)
        for loop in grids:
            grid = loop.end if grid is Const(1) else Op("mul", (grid, loop.end))
        return TritonKernel(text + "\n", buffers, tuple(self.sizes), grid)

    # Statements.

    def block(self, statements: Sequence[Stmt]) -> None:
        for statement in statements:
            if isinstance(statement, Loop):
                (self.tile if statement.role == "tile" else self.serial)(statement)
            elif isinstance(statement, Alloc):
                self.allocate(statement)
            elif isinstance(statement, If):
                self.branch(statement)
            else:
                assert isinstance(statement, Store)
                if statement.buffer.local:
                    self.accumulate(statement)
                else:
                    self.store(statement)

    def tile(self, loop: Loop) -> None:
        name = loop.index.name
        begin = self.value(loop.begin)
        # Several loops over the same lanes have one index.
        key = f"{name} of {lanes_of(loop)} from {begin.text}"
        printed = next((scope.texts[key] for scope in self.scopes if key in scope.texts), None)
        if printed is None:
            lanes = self.named(f"tl.arange(0, {lanes_of(loop)})", "lanes", (name,), 0)
            axes = self.joined(begin, lanes)
            text = lanes.text if begin.text == "0" else f"{self.spread(begin, axes)} + {self.spread(lanes, axes)}"
            if self.integer == "int64":
                text = f"({text}).to(tl.int64)"
            printed = self.named(text, name, axes, begin.depth)
            self.scopes[self.place(printed.depth)].texts[key] = printed
        self.indices[name] = printed
        if loop.limit is not None:
            self.inside[loop.index] = Op("less", (loop.index, loop.limit))
        self.around.append(name)
        self.block(loop.body)
        self.around.pop()

    def serial(self, loop: Loop) -> None:
        """Print a loop; where its bounds differ between lanes, with as many steps as the longest range takes."""
        if loop.word is not None:
            self.bits(loop, loop.word)
            return
        begin, end = self.value(loop.begin), self.value(loop.end)
        name = loop.index.name
        low, high = begin.text, end.text
        ragged = bool(begin.axes or end.axes)
        if ragged:
            axes = self.joined(begin, end)
            length = self.named(
                f"tl.max({self.spread(end, axes)} - {self.spread(begin, axes)}, 0)", "most", (), end.depth
            )
            low, high, name = "0", length.text, f"{name}_at"
        step = "" if loop.step == 1 else f", {loop.step}"
        self.scopes.append(Scope())
        depth = len(self.scopes) - 1
        if ragged:
            self.indices[loop.index.name] = self.named(f"{begin.text} + {name}", loop.index.name, begin.axes, depth)
            self.inside[loop.index] = Op("less", (loop.index, loop.end))
        elif self.integer == "int64":
            self.indices[name] = self.named(f"{name} + tl.zeros((), tl.int64)", name, (), depth)
        else:
            self.indices[name] = Value(name, (), depth)
        self.block(loop.body)
        self.nested(f"for {name} in range({low}, {high}{step}):", self.scopes.pop().lines)

    def bits(self, loop: Loop, word: Expr) -> None:
        """Print a loop over the bits that are set in any lane's word, from the lowest one on.

        A loop inside of it that every step takes whole is made one with it, which leaves the software pipeline more
        steps.
        """
        self.helpers[_BITS] = None
        lanes, name = self.value(word), loop.index.name
        left = self.named(f"tl.reduce({lanes.text}, 0, either)", "left", (), lanes.depth).text
        inner = _steps_within(loop)
        step, count, at = f"{name}_step", f"bits_of({left})", ""
        if inner is not None:
            at, end = f"{inner.index.name}_at", self.scalar(inner.end)
            # Counted along: a remainder would be taken at each step.
            self.line(f"{at} = {'0' if self.integer == 'int32' else 'tl.zeros((), tl.int64)'}")
            count = f"{count} * tl.cdiv({end}, {inner.step})"
        self.scopes.append(Scope())
        depth = len(self.scopes) - 1
        low = self.named(f"{left} & -{left}", "low", (), depth).text
        # A power of two is, as a number of 32 bits, its exponent and zeros.
        bit = f"({low}.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127"
        begin = self.value(loop.begin)
        text = bit if begin.text == "0" else f"{begin.text} + {bit}"
        self.indices[name] = self.named(f"({text}).to(tl.{self.integer})", name, (), depth)
        rest = f"{left} - {low}"
        if inner is not None:
            self.indices[inner.index.name] = Value(at, (), depth)
            self.block(inner.body)
            following = self.named(f"{at} + {inner.step}", "next", (), depth).text
            last = self.named(f"{following} >= {self.scalar(inner.end)}", "last", (), depth).text
            self.line(f"{at} = tl.where({last}, 0, {following})")
            rest = f"tl.where({last}, {rest}, {left})"
        else:
            self.block(loop.body)
        self.line(f"{left} = {rest}")
        self.nested(f"for {step} in range({count}):", self.scopes.pop().lines)

    def branch(self, statement: If) -> None:
        """Print a branch; where the condition differs between lanes, both blocks, each with a mask."""
        if any(isinstance(each, Loop | Alloc) for each in statement.then):
            self.parts(statement)
            return
        condition = self.value(statement.condition)
        if condition.axes:
            for block, text in ((statement.then, condition.text), (statement.otherwise, f"({condition.text} == 0)")):
                for store in block:
                    assert isinstance(store, Store)
                    self.store(store, Value(text, condition.axes, condition.depth))
            return
        for block, head in ((statement.then, f"if {condition.text}:"), (statement.otherwise, "else:")):
            if block:
                self.scopes.append(Scope(branch=True))
                self.block(block)
                self.nested(head, self.scopes.pop().lines)

    def parts(self, statement: If) -> None:
        """Print blocks that share nothing, each for some programs; long ones as functions.

        To find the layout of a load, Triton goes through all that is connected with it once for each thing connected,
        and constants connect everything within a function.
        """
        blocks: list[tuple[str, tuple[Stmt, ...]]] = []
        rest: tuple[Stmt, ...] = (statement,)
        while len(rest) == 1 and isinstance(rest[0], If):
            blocks.append((f"{'elif' if blocks else 'if'} {self.value(rest[0].condition).text}:", rest[0].then))
            rest = rest[0].otherwise
        blocks.append(("else:", rest))
        printed = [self.isolated(number, block) for number, (_, block) in enumerate(blocks)]
        long = any(isinstance(node, Dot) for node in walk(statement)) and sum(map(len, printed)) > _LONG
        for number, ((head, block), lines) in enumerate(zip(blocks, printed, strict=True)):
            body = lines
            if long:
                call = f"part_{number}({', '.join(self.named_in(block))})"
                function = ["@triton.jit(noinline=True)", f"def {call}:", *(f"    {line}" for line in lines), "", ""]
                self.helpers["\n".join(function)], body = None, [call]
            self.nested(head, body)

    def isolated(self, number: int, block: tuple[Stmt, ...]) -> list[str]:
        """Print a block that uses nothing but parameters and the numbers of the program."""
        scopes, indices, tag = self.scopes, dict(self.indices), self.tag
        self.scopes, self.inside, self.tag = [Scope()], {}, f"_{number}" if number else tag
        self.block(block)
        lines = self.scopes[0].lines
        self.scopes, self.indices, self.tag, self.inside = scopes, indices, tag, {}
        return lines

    def named_in(self, block: tuple[Stmt, ...]) -> list[str]:
        """Return the kernel's parameters and the program's numbers that a block uses."""
        nodes = [node for each in block for node in walk(each)]
        buffers = {node.buffer.name for node in nodes if isinstance(node, Load | Store) and not node.buffer.local}
        numbers = {node.name for node in nodes if isinstance(node, Index) and node.name in self.indices}
        sizes = {node.name for node in nodes if isinstance(node, Size)} & {*self.sizes}
        return [*sorted(buffers | numbers), *sorted(map(str.upper, sizes))]

    def allocate(self, alloc: Alloc) -> None:
        """Print an accumulator, with the axes of its cells, and of what is added to it, of the tile loops around it."""
        stores = self.added.get(alloc.buffer, [])
        if any(isinstance(store.value, Dot) for store in stores):
            self.dots.add(alloc.buffer)
        cells = self.axes_of(subscript for store in stores for subscript in store.subscripts)
        names = self.axes_of([Load(alloc.buffer, ())]) & set(self.around)
        axes = tuple(sorted(names | cells, key=self.order))
        self.totals[alloc.buffer], self.outside[alloc.buffer] = axes, (*self.around, *cells)
        if alloc.initial is None:
            return
        initial = repr(float(alloc.initial)) if dtype_of(alloc.buffer.dtype).is_floating else repr(alloc.initial)
        initial = initial if math.isfinite(alloc.initial) else f"float('{initial}')"
        shape = self.shape(axes) if axes else "()"
        self.line(f"{self.name_of(alloc.buffer)} = tl.full({shape}, {initial}, {dtype_of(alloc.buffer.dtype).tl})")

    def axes_of(self, nodes: Iterable[Node]) -> frozenset[str]:
        """Return the tile loops that nodes vary with, including those of their indices' own bounds."""
        found = frozenset[str]()
        for node in nodes:
            axes = self.varies.get(node)
            if axes is None:
                parts: Sequence[Node] = node.children()
                axes = frozenset[str]()
                if isinstance(node, Index):
                    loop = self.loops[node]
                    axes = frozenset({node.name} if loop.role == "tile" else ())
                    parts = () if loop.role == "grid" else (loop.begin,)
                elif isinstance(node, Load) and node.buffer.local:
                    added = self.added.get(node.buffer, [])
                    parts = [part for store in added for part in (store.value, *conjuncts(store.where))]
                elif isinstance(node, Buffer):
                    parts = ()
                axes = self.varies[node] = axes | self.axes_of(parts)
            found |= axes
        return found

    def accumulate(self, store: Store) -> None:
        axes, name = self.totals[store.buffer], self.name_of(store.buffer)
        if isinstance(store.value, Dot):
            self.line(f"{name} = {self.dot(store.value, store.buffer)}")
            return
        inner = [axis for axis in self.around if axis not in self.outside[store.buffer]]
        mask = self.mask(conjuncts(store.where))
        if store.combine == "max" and store.value is Const(1):
            # Of flags: whether the condition holds at any lane.
            if mask is None:
                self.line(f"{name} = tl.maximum({name}, 1)")
                return
            flags = self.reduced(Value(f"{self.bracketed(mask.text)}.to(tl.int32)", mask.axes), inner, "max")
            self.line(f"{name} = tl.maximum({name}, {self.spread(flags, axes)})")
            return
        value = self.value(store.value)
        if store.combine == "set":
            assert mask is None
            self.line(f"{name} = {self.whole(value, axes)}")
            return
        whole = tuple(sorted({*value.axes, *inner, *(mask.axes if mask else ())}, key=self.order))
        mode = selecting(store.combine)
        # Every lane has a term of its own, or one that lanes share.
        text = self.whole(value, whole) if mode or set(inner) - set(value.axes) else self.spread(value, whole)
        if mask is not None:
            nothing = f"float('{mode.identity}')" if mode else "0.0"
            text = f"tl.where({self.spread(mask, whole)}, {text}, {nothing})"
        if mode is None:
            total = self.reduced(Value(text, whole), inner, "sum")
            self.line(f"{name} += {self.spread(total, axes)}")
            return
        # What is no number stays, as in torch's own, and lanes of no term change nothing.
        self.helpers[chooser(mode)], chosen = None, f"{mode.name}_of"
        total = self.reduced(Value(text, whole), inner, f"reduce:{chosen}")
        self.line(f"{name} = {chosen}({name}, {self.spread(total, axes)})")

    def reduced(self, value: Value, inner: Sequence[str], how: str) -> Value:
        for axis in [axis for axis in value.axes if axis in inner]:
            place = value.axes.index(axis)
            function, _, helper = how.partition(":")
            text = f"tl.{function}({', '.join(filter(None, (value.text, str(place), helper)))})"
            value = Value(text, tuple(a for a in value.axes if a != axis), value.depth)
        return value

    def dot(self, dot: Dot, buffer: Buffer) -> str:
        # The pipeline waits for a chain of loads in its order: what needs no index first, or all wait for the index.
        for side in sorted((dot.right, dot.left), key=_chain):
            self.value(side)
        left, right = self.value(dot.left), self.value(dot.right)
        m, n = self.totals[buffer]
        (along,) = set(self.around) - {m, n}
        if n in left.axes or m in right.axes:
            left, right = right, left
        first, second = self.whole(left, (m, along)), self.whole(right, (along, n))
        single = any(isinstance(node, Load) and node.buffer.dtype == "float32" for node in walk(dot))
        how = f", input_precision='{dot.precision}'" if single else ""
        return f"tl.dot({first}, {second}, {self.name_of(buffer)}{how})"

    def store(self, store: Store, mask: Value | None = None) -> None:
        value = self.value(store.value)
        offset, literal = self.address(store.buffer, store.subscripts)
        own = self.mask([*conjuncts(store.where), *self.past_ends(store.subscripts)])
        masks = [each for each in (own, mask) if each]
        axes = self.joined(offset, value, *masks)
        guard = f", mask={self.full(masks[0], axes)}" if masks else ""
        if len(masks) == 2:
            guard = f", mask={' & '.join(self.spread(self.wrapped(each), axes) for each in masks)}"
        pointer = self.pointer(store.buffer, offset, literal, axes)
        text = self.spread(value, axes)
        assert store.combine in ("set", "add"), f"no store combines by {store.combine}"
        if store.combine == "add":
            self.line(f"tl.atomic_add({pointer}, {text}{guard}, sem='relaxed')")
        else:
            self.line(f"tl.store({pointer}, {text}{guard})")

    def scalar(self, expr: Expr) -> str:
        value = self.value(expr)
        assert not value.axes, "the bounds of a loop are the same for all lanes"
        return value.text

    def line(self, text: str) -> None:
        self.scopes[-1].lines.append(text)

    def nested(self, head: str, body: Sequence[str]) -> None:
        """Print a line that opens a block, and the block."""
        self.scopes[-1].lines += [head, *(f"    {line}" for line in body)]


def _steps_within(loop: Loop) -> Loop | None:
    """Return the serial loop from 0 to a size that is the whole body of another loop."""
    inner = loop.body[0] if len(loop.body) == 1 else None
    if not isinstance(inner, Loop) or inner.role != "serial" or inner.word is not None:
        return None
    return inner if inner.begin is Const(0) and isinstance(inner.end, Const | Size) else None


def _chain(expr: Expr) -> int:
    """Return the length of the longest chain of loads, each at an address that the previous one gives."""
    if isinstance(expr, Load):
        return 1 + max(map(_chain, (*expr.subscripts, *conjuncts(expr.where))), default=0)
    return max((_chain(child) for child in expr.children() if isinstance(child, Expr)), default=0)
