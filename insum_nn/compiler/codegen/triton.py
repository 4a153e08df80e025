"""Print a placed kernel as a Triton function.

A tile loop becomes an axis of every value that depends on its index. An accumulator has the axes of what is added to
it, of the tile loops around it; what is added in further tile loops is summed over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from insum_nn.compiler.codegen.triton_values import Axes, Scope, Value, Values, lanes_of
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
    Op,
    Stmt,
    Store,
    conjuncts,
    walk,
)

__all__ = ["TritonKernel", "print_kernel"]


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
    """The kernel as a Triton function; `wide`: some offset needs 64 bits."""
    return _Printer(kernel, wide).print()


class _Printer(Values):
    def __init__(self, kernel: Kernel, wide: bool) -> None:
        super().__init__(wide)
        self.kernel = kernel
        for loop in _nested(kernel.body):
            if loop.role == "tile":
                self.tiles[loop.index.name] = loop
        # Tile loops around the statements at hand, and around each accumulator.
        self.around: list[str] = []
        self.outside: dict[Buffer, tuple[str, ...]] = {}
        self.helpers: dict[str, None] = {}

    def print(self) -> TritonKernel:
        self.line("program = tl.program_id(0)")
        grids = [loop for loop in _nested(self.kernel.body) if loop.role == "grid"]
        body = grids[-1].body if grids else self.kernel.body
        for number, loop in reversed([*enumerate(grids)]):
            name = loop.index.name
            if number:
                count = self.scalar(loop.end)
                self.line(f"{name} = {self.address_type(f'program % {count}')}")
                self.line(f"program = program // {count}")
            else:
                self.line(f"{name} = {self.address_type('program')}")
            self.indices[name] = Value(name)
        self.block(body)
        buffers = tuple(b for b in (*self.kernel.inputs, *(r.buffer for r in self.kernel.results)) if self.used(b))
        names = ", ".join([*(buffer.name for buffer in buffers), *map(str.upper, self.sizes)])
        head = ["import triton", "import triton.language as tl", "", "", *self.helpers]
        head += ["@triton.jit", f"def kernel({names}):"]
        text = "\n".join([*head, *(f"    {line}" for line in self.scopes[0].lines)])
        grid: Expr = Const(1)
        for loop in grids:
            grid = loop.end if grid is Const(1) else Op("mul", (grid, loop.end))
        return TritonKernel(text + "\n", buffers, tuple(self.sizes), grid)

    def used(self, buffer: Buffer) -> bool:
        return any(isinstance(node, Load | Store) and node.buffer is buffer for node in walk(self.kernel))

    def address_type(self, text: str) -> str:
        return text if self.integer == "int32" else f"({text}).to(tl.int64)"

    # Statements.

    def block(self, statements: Sequence[Stmt]) -> None:
        for statement in statements:
            if isinstance(statement, Loop):
                self.loop(statement)
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

    def loop(self, loop: Loop) -> None:
        if loop.role == "tile":
            self.tile(loop)
        else:
            assert loop.role == "serial"
            self.serial(loop)

    def tile(self, loop: Loop) -> None:
        name = loop.index.name
        begin = self.value(loop.begin)
        lanes = self.named(f"tl.arange(0, {lanes_of(loop)})", "lanes", (name,), 0)
        axes = self.joined(begin, lanes)
        text = lanes.text if begin.text == "0" else f"{self.spread(begin, axes)} + {self.spread(lanes, axes)}"
        if self.integer == "int64":
            text = f"({text}).to(tl.int64)"
        self.indices[name] = self.named(text, name, axes, begin.depth)
        if loop.limit is not None:
            self.inside[loop.index] = Op("less", (loop.index, loop.limit))
        self.around.append(name)
        self.block(loop.body)
        self.around.pop()

    def serial(self, loop: Loop) -> None:
        """A loop; where its bounds differ from lane to lane, as many steps as the longest range takes."""
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
        inner = self.scopes.pop()
        if loop.pipeline:
            head = f"for {name} in tl.range({low}, {high}, {loop.step}, num_stages={loop.pipeline}):"
        else:
            head = f"for {name} in range({low}, {high}{step}):"
        self.line(head)
        self.scopes[-1].lines += [f"    {line}" for line in inner.lines]

    def bits(self, loop: Loop, word: Expr) -> None:
        """A loop over the bits that any lane's word has: each step takes the lowest one that is left.

        A loop of known length inside of it is made one with it, which leaves the software pipeline more steps.
        """
        self.helpers[_BITS] = None
        lanes, name = self.value(word), loop.index.name
        left = self.named(f"tl.reduce({lanes.text}, 0, either)", "left", (), lanes.depth).text
        inner = loop.body[0] if len(loop.body) == 1 else None
        pieces = _length(inner)
        step, count = f"{name}_step", f"bits_of({left})"
        self.scopes.append(Scope())
        depth = len(self.scopes) - 1
        low = self.named(f"{left} & -{left}", "low", (), depth).text
        # A power of two is, as a number of 32 bits, its exponent and zeros.
        bit = f"({low}.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127"
        begin = self.value(loop.begin)
        text = bit if begin.text == "0" else f"{begin.text} + {bit}"
        self.indices[name] = self.named(f"({text}).to(tl.{self.integer})", name, (), depth)
        rest = f"{left} - {low}"
        if pieces > 1:
            assert isinstance(inner, Loop)
            at = f"{step} % {pieces}"
            self.indices[inner.index.name] = self.named(f"{at} * {inner.step}", inner.index.name, (), depth)
            rest, count = f"tl.where({at} == {pieces - 1}, {rest}, {left})", f"{count} * {pieces}"
            self.block(inner.body)
        else:
            self.block(loop.body)
        self.line(f"{left} = {rest}")
        lines = self.scopes.pop().lines
        self.line(f"for {step} in range({count}):")
        self.scopes[-1].lines += [f"    {line}" for line in lines]

    def branch(self, statement: If) -> None:
        """One of two blocks; where lanes differ, both, each for its lanes."""
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
                inner = self.scopes.pop()
                self.line(head)
                self.scopes[-1].lines += [f"    {line}" for line in inner.lines]

    def allocate(self, alloc: Alloc) -> None:
        """An accumulator has the axes of what is added to it, of the tile loops around it."""
        stores = [s for s in walk(self.kernel) if isinstance(s, Store) and s.buffer is alloc.buffer]
        names = {axis for store in stores for axis in self.axes_of([store.value, *conjuncts(store.where)])}
        if any(isinstance(store.value, Dot) for store in stores):
            self.dots.add(alloc.buffer)
        axes = tuple(sorted(names & set(self.around), key=self.order))
        self.totals[alloc.buffer], self.outside[alloc.buffer] = axes, tuple(self.around)
        initial = repr(float(alloc.initial)) if alloc.buffer.dtype.startswith("float") else repr(alloc.initial)
        shape = self.shape(axes) if axes else "()"
        self.line(f"{alloc.buffer.name} = tl.full({shape}, {initial}, tl.{alloc.buffer.dtype})")

    def axes_of(self, exprs: Iterable[Expr]) -> set[str]:
        """The tile loops that expressions vary with, those of their indices' own bounds among them."""
        found: set[str] = set()
        loops = {loop.index: loop for loop in _nested(self.kernel.body)}
        waiting = [node for expr in exprs for node in walk(expr) if isinstance(node, Index)]
        seen: set[Index] = set()
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            loop = loops[index]
            if loop.role == "tile":
                found.add(index.name)
            if loop.role != "grid":
                waiting += [node for node in walk(loop.begin) if isinstance(node, Index)]
        return found

    def accumulate(self, store: Store) -> None:
        axes, name = self.totals[store.buffer], store.buffer.name
        if isinstance(store.value, Dot):
            self.line(f"{name} = {self.dot(store.value, name)}")
            return
        inner = [axis for axis in self.around if axis not in self.outside[store.buffer]]
        mask = self.mask(conjuncts(store.where))
        if store.combine == "max":
            assert mask is not None
            flags = self.reduced(Value(f"{self.bracketed(mask.text)}.to(tl.int32)", mask.axes), inner, "max")
            self.line(f"{name} = tl.maximum({name}, {self.spread(flags, axes)})")
            return
        value = self.value(store.value)
        whole = tuple(sorted({*value.axes, *inner, *(mask.axes if mask else ())}, key=self.order))
        text = self.whole(value, whole) if set(inner) - set(value.axes) else self.spread(value, whole)
        if mask is not None:
            text = f"tl.where({self.spread(mask, whole)}, {text}, 0.0)"
        total = self.reduced(Value(text, whole), inner, "sum")
        self.line(f"{name} += {self.spread(total, axes)}")

    def reduced(self, value: Value, inner: Sequence[str], how: str) -> Value:
        for axis in [axis for axis in value.axes if axis in inner]:
            place = value.axes.index(axis)
            value = Value(f"tl.{how}({value.text}, {place})", tuple(a for a in value.axes if a != axis), value.depth)
        return value

    def dot(self, dot: Dot, total: str) -> str:
        left, right = self.value(dot.left), self.value(dot.right)
        (along,) = set(self.around) - set(self.totals_axes(total))
        m, n = self.totals_axes(total)
        if n in left.axes or m in right.axes:
            left, right = right, left
        first, second = self.whole(left, (m, along)), self.whole(right, (along, n))
        how = f", input_precision='{dot.precision}'" if self.single(dot) else ""
        return f"tl.dot({first}, {second}, {total}{how})"

    def totals_axes(self, name: str) -> Axes:
        return next(axes for buffer, axes in self.totals.items() if buffer.name == name)

    @staticmethod
    def single(dot: Dot) -> bool:
        return any(isinstance(node, Load) and node.buffer.dtype == "float32" for node in walk(dot))

    def store(self, store: Store, mask: Value | None = None) -> None:
        value = self.value(store.value)
        where, offset, literal = self.address(store.buffer, store.subscripts)
        masks = [
            each for each in (self.mask([*conjuncts(store.where), *self.past_ends(store.subscripts)]), mask) if each
        ]
        axes = self.joined(offset, value, *masks)
        guard = ""
        if len(masks) == 2:
            texts = " & ".join(self.spread(self.wrapped(each), axes) for each in masks)
            guard = f", mask={texts}"
        elif masks:
            guard = f", mask={self.full(masks[0], axes)}"
        pointer = self.pointer(where, offset, literal, axes)
        text = self.spread(value, axes)
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


def _nested(statements: Sequence[Stmt]) -> Iterator[Loop]:
    for statement in statements:
        if isinstance(statement, Loop):
            yield statement
            yield from _nested(statement.body)


def _length(statement: Stmt | None) -> int:
    """The steps of a serial loop of known length; 1 for anything else."""
    if not isinstance(statement, Loop) or statement.role != "serial" or statement.word is not None:
        return 1
    begin, end = statement.begin, statement.end
    known = begin is Const(0) and isinstance(end, Const) and end.value % statement.step == 0
    return int(end.value) // statement.step if known and isinstance(end, Const) else 1
