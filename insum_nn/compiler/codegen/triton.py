"""Print a placed kernel as a Triton function.

A tile loop becomes an axis of every value that depends on its index. An accumulator that is added to inside of a
further tile loop has an axis for it, and is summed over that axis where it is read outside of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from insum_nn.compiler.ir.nodes import (
    OPERATIONS,
    Alloc,
    Buffer,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
    Op,
    Size,
    Stmt,
    Store,
    walk,
)

__all__ = ["TritonKernel", "print_kernel"]

Axes = tuple[str, ...]
# How operations are written where it is not as the IR prints them.
_TEXT = {"cdiv": "tl.cdiv({}, {})"}
_WIDENED = {"float16": "tl.float32", "bfloat16": "tl.float32"}


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


@dataclass(frozen=True, slots=True)
class _Value:
    """A name or a short expression: the tile axes that it has, and the depth of the loop from which on it is known."""

    text: str
    axes: Axes
    depth: int = 0


@dataclass(slots=True)
class _Scope:
    """The lines of a block, and the values that they name."""

    lines: list[str] = field(default_factory=list[str])
    known: dict[Expr, _Value] = field(default_factory=dict["Expr", _Value])


def print_kernel(kernel: Kernel) -> TritonKernel:
    """The kernel as a Triton function."""
    return _Printer(kernel).print()


class _Printer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.scopes = [_Scope()]
        self.indices: dict[str, _Value] = {}
        self.tiles: dict[str, Loop] = {}
        self.sums: dict[Buffer, Axes] = {}
        self.sizes: dict[str, None] = {}
        self.count = 0
        self.order = _axis_order(kernel)

    def print(self) -> TritonKernel:
        self.line("program = tl.program_id(0)")
        grids = list(_nested(self.kernel.body, "grid"))
        body = grids[-1].body if grids else self.kernel.body
        for number, loop in reversed([*enumerate(grids)]):
            name = loop.index.name
            if number == 0:
                self.line(f"{name} = program")
            else:
                count = self.scalar(loop.end)
                self.line(f"{name} = program % {count}")
                self.line(f"program = program // {count}")
            self.indices[name] = _Value(name, ())
        self.block(body)
        buffers = tuple(b for b in (*self.kernel.inputs, *(r.buffer for r in self.kernel.results)) if self.reads(b))
        names = ", ".join([*(buffer.name for buffer in buffers), *self.sizes])
        text = "\n".join(
            [
                "import triton",
                "import triton.language as tl",
                "",
                "",
                "@triton.jit",
                f"def kernel({names}):",
                *(f"    {line}" for line in self.scopes[0].lines),
            ]
        )
        grid: Expr = Const(1)
        for loop in grids:
            grid = loop.end if grid is Const(1) else Op("mul", (grid, loop.end))
        return TritonKernel(text + "\n", buffers, tuple(self.sizes), grid)

    def reads(self, buffer: Buffer) -> bool:
        return any(isinstance(node, Load | Store) and node.buffer is buffer for node in walk(self.kernel))

    # Statements.

    def block(self, statements: Sequence[Stmt]) -> None:
        for statement in statements:
            if isinstance(statement, Loop):
                self.loop(statement)
            elif isinstance(statement, Alloc):
                self.allocate(statement)
            else:
                assert isinstance(statement, Store)
                self.store(statement)

    def loop(self, loop: Loop) -> None:
        name = loop.index.name
        if loop.role == "tile":
            begin, lanes = self.scalar(loop.begin), _lanes(loop)
            self.tiles[name] = loop
            depth = self.value(loop.begin).depth
            self.indices[name] = self.fresh(f"{begin} + tl.arange(0, {lanes})", name, (name,), depth)
            self.block(loop.body)
            return
        assert loop.role == "serial"
        begin, end = self.scalar(loop.begin), self.scalar(loop.end)
        step = "" if loop.step == 1 else f", {loop.step}"
        self.scopes.append(_Scope())
        self.indices[name] = _Value(name, (), len(self.scopes) - 1)
        self.block(loop.body)
        inner = self.scopes.pop()
        self.line(f"for {name} in range({begin}, {end}{step}):")
        self.scopes[-1].lines += [f"    {line}" for line in inner.lines]

    def allocate(self, alloc: Alloc) -> None:
        """An accumulator has an axis for each tile loop around its sums."""
        axes = self.sorted({*self.tiles, *(loop.index.name for loop in _tiles_inside(self.kernel, alloc))})
        self.sums[alloc.buffer] = axes
        lanes = ", ".join(str(_lanes(self.tile(axis))) for axis in axes)
        kind = f"tl.{alloc.buffer.dtype}"
        self.line(f"{alloc.buffer.name} = tl.full(({lanes},), {alloc.initial}, {kind})" if axes else
                  f"{alloc.buffer.name} = tl.full((), {alloc.initial}, {kind})")  # fmt: skip

    def store(self, store: Store) -> None:
        if store.buffer.local:
            axes = self.sums[store.buffer]
            value = self.value(store.value)
            mask = self.mask(store.where, [axis for axis in axes if axis in self.inner()])
            text = self.spread(value, axes)
            if mask is not None:
                text = f"tl.where({self.spread(mask, axes)}, {text}, 0)"
            self.line(f"{store.buffer.name} += {text}")
            return
        axes = self.sorted(
            {a for s in store.subscripts for a in self.value(s).axes} | set(self.value(store.value).axes)
        )
        mask = self.mask(store.where, axes)
        address = self.address(store.buffer, store.subscripts, axes)
        guard = "" if mask is None else f", mask={self.spread(mask, axes)}"
        self.line(f"tl.store({address}, {self.spread(self.value(store.value), axes)}{guard})")

    def inner(self) -> set[str]:
        """Tile loops inside of a serial loop: their lanes past the end must not reach a sum."""
        return {name for name, loop in self.tiles.items() if not isinstance(loop.begin, Op)}

    # Expressions.

    def value(self, expr: Expr) -> _Value:
        for scope in self.scopes:
            if expr in scope.known:
                return scope.known[expr]
        made = self.compute(expr)
        # A value is written where its last part becomes known: outside of every loop that does not change it.
        self.scopes[made.depth].known[expr] = made
        return made

    def compute(self, expr: Expr) -> _Value:
        if isinstance(expr, Const):
            return _Value(repr(expr.value), ())
        if isinstance(expr, Size):
            self.sizes[expr.name] = None
            return _Value(expr.name, ())
        if isinstance(expr, Index):
            return self.indices[expr.name]
        if isinstance(expr, Op):
            args = [self.value(arg) for arg in expr.args]
            axes = self.sorted({axis for arg in args for axis in arg.axes})
            depth = max(arg.depth for arg in args)
            text = _text_of(expr).format(*(self.spread(arg, axes) for arg in args))
            return self.fresh(text, "v", axes, depth) if axes else _Value(text, (), depth)
        assert isinstance(expr, Load)
        if expr.buffer.local:
            return self.total(expr.buffer)
        parts = [self.value(subscript) for subscript in expr.subscripts]
        if expr.where is not None:
            parts.append(self.value(expr.where))
        axes = self.sorted({axis for part in parts for axis in part.axes})
        mask = self.mask(expr.where, axes)
        depth = max((part.depth for part in [*parts, *([mask] if mask else [])]), default=0)
        guard = "" if mask is None else f", mask={self.spread(mask, axes)}, other={expr.fill}"
        text = f"tl.load({self.address(expr.buffer, expr.subscripts, axes)}{guard})"
        if expr.buffer.dtype in _WIDENED:
            text += f".to({_WIDENED[expr.buffer.dtype]})"
        return self.fresh(text, expr.buffer.name, axes, depth)

    def total(self, buffer: Buffer) -> _Value:
        """An accumulator outside of the loops that add to it."""
        axes = self.sums[buffer]
        text = buffer.name
        for axis in reversed([axis for axis in axes if axis in self.inner()]):
            text = f"tl.sum({text}, {axes.index(axis)})"
            axes = tuple(a for a in axes if a != axis)
        return _Value(text, axes, len(self.scopes) - 1)

    def scalar(self, expr: Expr) -> str:
        value = self.value(expr)
        assert not value.axes, "the bounds of a loop are the same for all lanes"
        return value.text

    def address(self, buffer: Buffer, subscripts: Sequence[Expr], axes: Axes) -> str:
        offset: Expr = Const(0)
        for subscript, extent in zip(subscripts, buffer.shape, strict=True):
            offset = subscript if offset is Const(0) else Op("add", (Op("mul", (offset, extent)), subscript))
        return f"{buffer.name} + {self.spread(self.value(offset), axes)}"

    def mask(self, where: Expr | None, axes: Sequence[str]) -> _Value | None:
        """Where lanes are inside of their loops, and the condition holds."""
        parts = [] if where is None else [self.value(where)]
        for axis in axes:
            loop = self.tile(axis)
            if loop.limit is not None:
                parts.append(self.value(Op("less", (loop.index, loop.limit))))
        if not parts:
            return None
        together = self.sorted({axis for part in parts for axis in part.axes})
        text, depth = " & ".join(self.spread(part, together) for part in parts), max(part.depth for part in parts)
        return _Value(text, together, depth) if len(parts) > 1 else parts[0]

    def spread(self, value: _Value, axes: Axes) -> str:
        """The value's text with an axis of length 1 for each that it lacks."""
        if not value.axes or value.axes == axes:
            return value.text
        text = value.text if value.text.isidentifier() else f"({value.text})"
        return f"{text}[{', '.join(':' if axis in value.axes else 'None' for axis in axes)}]"

    # Text.

    def tile(self, axis: str) -> Loop:
        return next(loop for loop in _nested(self.kernel.body, "tile") if loop.index.name == axis)

    def sorted(self, axes: set[str]) -> Axes:
        return tuple(sorted(axes, key=self.order.index))

    def line(self, text: str) -> None:
        self.scopes[-1].lines.append(text)

    def fresh(self, text: str, hint: str, axes: Axes, depth: int) -> _Value:
        """Name a value, at the depth from which on its parts are known."""
        self.count += 1
        name = f"{hint}_{self.count}"
        self.scopes[depth].lines.append(f"{name} = {text}")
        return _Value(name, axes, depth)


def _text_of(operation: Op) -> str:
    return _TEXT.get(operation.name) or OPERATIONS[operation.name].text


def _lanes(loop: Loop) -> int:
    """The lanes of a tile loop: its end is its beginning and a number."""
    end = loop.end
    assert isinstance(end, Op)
    lanes = end.args[1]
    assert isinstance(lanes, Const)
    return int(lanes.value)


def _nested(statements: Sequence[Stmt], role: str) -> Iterator[Loop]:
    for statement in statements:
        if isinstance(statement, Loop):
            if statement.role == role:
                yield statement
            yield from _nested(statement.body, role)


def _tiles_inside(kernel: Kernel, alloc: Alloc) -> Iterator[Loop]:
    """The tile loops around the sums of an accumulator."""
    for loop in _nested(kernel.body, "tile"):
        if any(isinstance(s, Store) and s.buffer is alloc.buffer for s in walk(loop)):
            yield loop


def _axis_order(kernel: Kernel) -> list[str]:
    """Names of the tile loops, the one along which memory is contiguous last."""
    names = [loop.index.name for loop in _nested(kernel.body, "tile")]
    reads = [node for node in walk(kernel) if isinstance(node, Load | Store) and node.subscripts]
    last = [node.subscripts[-1].name for node in reads if isinstance(node.subscripts[-1], Index)]
    wide = {n.name for node in reads if len(node.subscripts) > 1 for n in [node.subscripts[-1]] if isinstance(n, Index)}
    return sorted(names, key=lambda name: (name in wide, last.count(name)))
