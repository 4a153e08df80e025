"""Draw the data flow of a call as boxes and edges: tensors, reads, products, combination, output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.explain.svg import Box, Edge, Kind
from insum_nn.compiler.lang.bind import layout_of
from insum_nn.compiler.lang.syntax import Access, Number, Statement

__all__ = ["Flow", "Product", "Steps", "data_flow"]


@dataclass(frozen=True, slots=True)
class Flow:
    """Boxes, sources before targets, and the edges between their keys."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """One product or sum of a call.

    Attributes:
        name: its name among the products.
        lines: what it does; empty ones are left out.
        labels: the axes of its result.
        operands: earlier products by name, and reads.
        tables: tensors that it reads itself, by the positions of `pointers`.
        pointers: index tensors that it reads.
        hover: what is shown in full.
    """

    name: str
    lines: tuple[str, ...]
    labels: tuple[str, ...]
    operands: tuple[str | Access, ...]
    tables: tuple[Access, ...] = ()
    pointers: tuple[Access, ...] = ()
    hover: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """The products of a call in order, and how the last of them reaches the output.

    Attributes:
        products: the products, operands before their use.
        value: the product or read that is combined into the output; `None`: numbers alone.
        complete: the value is the whole output already.
        guards: index tensors that decide where terms are left out.
    """

    products: tuple[Product, ...]
    value: str | Access | None
    complete: bool = False
    guards: tuple[Access, ...] = ()


def data_flow(
    statement: Statement,
    steps: Steps | None,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    has_initial: bool,
) -> Flow:
    """Draw tensors -> reads -> products -> combination -> output.

    Args:
        statement: the statement.
        steps: the products of a call, if its steps are known; else all factors meet in one product.
        shapes: known shapes of tensors, the output included.
        sizes: known extents of indices.
        has_initial: the call has an initial value.
    """
    builder = _Builder(statement, shapes, sizes)
    value = builder.text_product() if steps is None else builder.products(steps)
    builder.combine(value, steps or Steps((), None), has_initial)
    return Flow(tuple(builder.boxes), tuple(builder.edges))


class _Builder:
    def __init__(self, statement: Statement, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> None:
        self.statement = statement
        self.shapes = shapes
        self.sizes = sizes
        self.boxes: list[Box] = []
        self.edges: list[Edge] = []
        self.keys: set[str] = set()
        self.index_tensors = layout_of(statement).index_tensors
        # The different reads of each tensor; a tensor with a single one shows its subscripts in its own box.
        self.ways: dict[str, set[str]] = {}
        for access in statement.accesses():
            if access is not statement.output:
                self.ways.setdefault(access.name, set()).add(str(access))

    def box(self, key: str, kind: Kind, *lines: str, hover: str = "") -> str:
        if key not in self.keys:
            self.keys.add(key)
            self.boxes.append(Box(key, kind, tuple(line for line in lines if line), hover))
        return key

    def edge(self, source: str, target: str, *, index: bool = False) -> None:
        self.edges.append(Edge(source, target, index))

    def shaped(self, labels: Sequence[str]) -> str:
        """Return labels as `[g,n]  3×5`, with sizes where they are known."""
        if not labels:
            return "scalar"
        text = f"[{','.join(labels)}]"
        if all(label in self.sizes for label in labels):
            text += f"  {_times([self.sizes[label] for label in labels])}"
        return text

    # Reads.

    def tensor(self, access: Access) -> str:
        name = access.name
        own = len(self.ways[name]) == 1 and _is_view(access)
        kind: Kind = "index" if name in self.index_tensors else "tensor"
        shape = self.shapes.get(name)
        size = "" if shape is None else _times(shape) if shape else "scalar"
        hover = f"{kind} {name} {size}".strip()
        return self.box(f"tensor {name}", kind, str(access) if own else name, size, hover=hover)

    def read(self, access: Access) -> str:
        """Add the box of the values of `access` for every combination of its indices, and return its key."""
        name = access.name
        source = self.tensor(access)
        if len(self.ways[name]) == 1 and _is_view(access):
            return source
        key = f"read {access}"
        if key in self.keys:
            return key
        pointing = name in self.index_tensors
        pointers = [self.read(inner) for s in access.subscripts for inner in s.index_accesses()]
        labels = tuple(dict.fromkeys(index.name for index in access.indices()))
        what = "view" if _is_view(access) else "gather"
        outside = any(s.plain is None and s.indirect is None for s in access.subscripts)
        note = "skipped out of bounds" if outside else ""
        self.box(key, "gather", what, str(access), f"→ {self.shaped(labels)}", note, hover=f"{what} {access}")
        self.edge(source, key, index=pointing)
        self.point(pointers, key)
        return key

    def point(self, pointers: Sequence[str], key: str) -> None:
        for pointer in dict.fromkeys(pointers):
            self.edge(pointer, key, index=True)

    # Products.

    def products(self, steps: Steps) -> str | None:
        for product in steps.products:
            key = f"step {product.name}"
            sources = [*map(self.value, product.operands), *map(self.tensor, product.tables)]
            pointers = [self.read(access) for access in product.pointers]
            result = f"→ {self.shaped(product.labels)}"
            self.box(key, "product", *product.lines, result, hover=product.hover)
            for source in sources:
                self.edge(source, key)
            self.point(pointers, key)
        return None if steps.value is None else self.value(steps.value)

    def value(self, value: str | Access) -> str:
        return f"step {value}" if isinstance(value, str) else self.read(value)

    def text_product(self) -> str | None:
        """Add one product of all factors, which is the meaning of the statement, and return its key."""
        statement = self.statement
        numbers = [repr(f.value) for f in statement.factors if isinstance(f, Number)]
        reads = [self.read(access) for access in statement.reads]
        written = {index.name for index in statement.output.indices()}
        summed = [name for name in statement.indices() if name not in written]
        if not reads or (len(reads) == 1 and not numbers and not summed):
            return reads[0] if reads else None
        folding = statement.combining.title
        times = f"× {' × '.join(numbers)}" if numbers else ""
        over = f"{folding} over {','.join(summed)}" if summed else ""
        title = "multiply" if len(reads) + len(numbers) > 1 else folding
        kept = tuple(name for name in statement.indices() if name in written)
        self.box("product", "product", title, times, over, f"→ {self.shaped(kept)}")
        for read in reads:
            self.edge(read, "product")
        return "product"

    # The output.

    def combine(self, value: str | None, steps: Steps, has_initial: bool) -> None:
        output, operator = self.statement.output, self.statement.operator
        pointers = (
            [] if steps.complete else [self.read(inner) for s in output.subscripts for inner in s.index_accesses()]
        )
        if value is None:
            numbers = [repr(f.value) for f in self.statement.factors if isinstance(f, Number)]
            value = self.box("numbers", "tensor", " × ".join(numbers), "number")
        key = "combine"
        title = self.combination(complete=steps.complete, has_initial=has_initial)
        if has_initial:
            self.box("initial", "tensor", output.name, "initial value")
        self.box(key, "combine", title, f"{output} {operator}", hover=f"{title}: {output} {operator}")
        self.edge(value, key)
        if has_initial:
            self.edge("initial", key)
        self.point([*pointers, *map(self.read, steps.guards)], key)
        shape = self.shapes.get(output.name)
        size = "" if shape is None else _times(shape) if shape else "scalar"
        self.box("output", "output", output.name, size, hover=f"output {output.name} {size}".strip())
        self.edge(key, "output")

    def combination(self, *, complete: bool, has_initial: bool) -> str:
        combining = self.statement.combining
        if not combining.adds:
            return combining.action if _is_view(self.statement.output) else f"scatter, {combining.action}"
        if not complete and not _is_view(self.statement.output):
            return "scatter, add"
        return "add to the initial value" if has_initial else "write all rows" if complete else "write"


def _is_view(access: Access) -> bool:
    plain = [subscript.plain for subscript in access.subscripts]
    return None not in plain and len(set(plain)) == len(plain)


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
