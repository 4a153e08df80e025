"""Read from library calls what `explain()` shows: code, choices, and the products of the picture."""

from __future__ import annotations

from insum_nn.compiler.explain.dataflow import Product, Steps
from insum_nn.compiler.ir import graph as ir
from insum_nn.compiler.ir.access import affine_terms, indices_of, plain_labels
from insum_nn.compiler.ir.build import OUTPUT
from insum_nn.compiler.ir.nodes import Buffer, Const, Expr, Index, Load, Op, Size, Store, conjuncts
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.syntax import Access
from insum_nn.compiler.runtime.library.programs import Library, piece_length

__all__ = ["choices_of", "steps_of", "torch_code"]


def torch_code(library: Library, extents: Extents) -> tuple[str, str]:
    """Return the torch calls of a call with these extents as Python, and how often they run.

    A comment says what each numbered argument stands for. Statements that free memory are left out.
    """
    graph, schedule = library.graph, "library calls over the whole index space"
    length, cut = piece_length(library, extents), library.cut
    if length is not None and cut is not None:
        assert library.pieces is not None
        total = extents.indices[library.bound.layout.indices.index(cut)]
        graph, schedule = library.pieces, f"library calls for {-(-total // length)} pieces of {length} values of {cut}"
    names = _Names(library)
    called = [f"# {call}: {names.argument(stands_for)}" for call, stands_for in graph.arguments]
    return "\n".join([*called, graph.code.strip()]), schedule


def choices_of(library: Library, extents: Extents) -> tuple[tuple[str, str, str], ...]:
    """Return topic, choice and reason of every choice behind the calls."""
    names = _Names(library)
    rows = [each.text(names.text) for each in library.made.decisions]
    whole = piece_length(library, extents) is None
    return tuple(row for row in rows if not (whole and row[0] == "pieces"))


def steps_of(library: Library) -> Steps:
    """Return the products in order, for the picture of the data flow."""
    return _Picture(library).steps()


class _Names:
    """Expressions of the IR in the names of the statement."""

    def __init__(self, library: Library) -> None:
        self.output = library.bound.statement.output
        self.tensors = {canonical: name for name, canonical in library.names.tensors.items()}
        self.indices = {letter: name for name, letter in library.names.indices.items()}

    def text(self, expr: Expr) -> str:
        """An index, a read or a subscript, as the statement writes it."""
        if isinstance(expr, Load):
            name = self.tensors.get(expr.buffer.name, expr.buffer.name)
            return f"{name}[{','.join(map(self.text, expr.subscripts))}]" if expr.subscripts else name
        terms, offset = affine_terms(expr)
        parts = ""
        for coefficient, atom in terms:
            sign = "-" if coefficient < 0 else "+" if parts else ""
            factor = f"{abs(coefficient)}*" if abs(coefficient) != 1 else ""
            parts += f"{sign}{factor}{self.index(atom.name) if isinstance(atom, Index) else self.text(atom)}"
        return parts + (f"{offset:+d}" if parts and offset else "" if parts else str(offset))

    def index(self, letter: str) -> str:
        return self.indices.get(letter, letter)

    def argument(self, node: Buffer | Size) -> str:
        """What an argument of the printed graph is."""
        if isinstance(node, Buffer) and node.name == OUTPUT:
            return f"{self.output.name}, added to in place"
        if isinstance(node, Buffer):
            return self.tensors.get(node.name, f"{self.output.name}, the initial value")
        if node.name in self.indices:
            return f"the extent of {self.indices[node.name]}"
        return f"the extent of axis {node.name.removeprefix(f'{OUTPUT}_')} of {self.output.name}"


class _Picture:
    def __init__(self, library: Library) -> None:
        self.library = library
        self.names = _Names(library)
        self.accesses = {str(access): access for access in library.bound.statement.accesses()}
        self.values: dict[Buffer, str | Access] = {}  # intermediate result -> product or read
        self.products: list[Product] = []

    def access(self, read: Load) -> Access:
        return self.accesses[self.names.text(read)]

    def value(self, read: Expr) -> str | Access:
        assert isinstance(read, Load)
        return self.values[read.buffer] if read.buffer in self.values else self.access(read)

    def labels(self, *exprs: Expr) -> tuple[str, ...]:
        return tuple(map(self.names.index, indices_of(*exprs)))

    def steps(self) -> Steps:
        complete, conditions = False, list[Expr]()
        for buffer, node in ir.made_by(self.library.made.graph):
            store = ir.store_of(node.kernel)
            if buffer.name == OUTPUT:
                last = None if isinstance(store.value, Const) else self.value(store.value)
                guards = [*conditions, *self.added(store)]
                return Steps(tuple(self.products), last, complete, tuple(self.pointers(*guards)))
            if isinstance(store.value, Load) and store.combine == "set":
                self.values[buffer] = self.access(store.value)
            elif isinstance(store.value, Const):
                conditions += conjuncts(store.where)
            else:
                complete = isinstance(node, ir.Library) and node.function == "csr_product"
                self.values[buffer] = buffer.name
                self.products.append(self.product(buffer.name, node, store))
        raise AssertionError("a graph without an output")

    def added(self, store: Store) -> list[Expr]:
        """The conditions of the last step that are about reads, not about the address that it writes to."""
        misses = {part for step in self.library.made.graph.nodes for part in self.conditions_of(step)}
        return [condition for condition in conjuncts(store.where) if condition in misses]

    def conditions_of(self, node: ir.GraphNode) -> tuple[Expr, ...]:
        if not isinstance(node, ir.Step):
            return ()
        value = ir.store_of(node.kernel).value
        return conjuncts(value.where) if isinstance(value, Load) else ()

    def pointers(self, *exprs: Expr) -> dict[Access, None]:
        """The index tensors that are read by conditions, or by subscripts."""
        reads = [read for expr in exprs for read in self.entries(expr)]
        return dict.fromkeys(map(self.access, reads))

    def entries(self, expr: Expr) -> list[Load]:
        """The outermost reads of index tensors."""
        if isinstance(expr, Op) and expr.name in ("at_least", "less"):
            expr = expr.args[0]
        return [atom for _, atom in affine_terms(expr)[0] if isinstance(atom, Load)]

    def product(self, name: str, node: ir.Step | ir.Library, store: Store) -> Product:
        reads, number = ir.factors_of(store.value)
        labels = self.labels(*store.subscripts)
        sums = [self.names.index(loop.index.name) for loop in ir.loops_of(node.kernel) if loop.role == "sum"]
        over = f"sum over {','.join(sums)}" if sums else ""
        value = " * ".join([*(self.names.text(read) for read in reads), *([repr(number)] if number != 1 else [])])
        target = f"{name}[{','.join(map(self.names.text, store.subscripts))}]"
        hover = f"{target} {'+=' if sums else '='} {value}"
        if isinstance(node, ir.Library) and node.function != "matmul":
            return self.selected(name, node, store, over, hover)
        operands = tuple(self.value(read) for read in reads)
        if isinstance(node, ir.Library):
            lines = ("matrix product", over, *self.matrix_lines(store, reads))
        elif len(reads) == 2:
            unrolled = ", ".join(f"{self.names.index(index.name)} unrolled" for index in node.unrolled)
            lines = ("multiply and sum" if sums else "multiply", over, unrolled)
        else:
            lines = ("sum",) if sums else (f"× {number!r}",)
        return Product(name, lines, labels, operands, hover=hover)

    def selected(self, name: str, node: ir.Library, store: Store, over: str, hover: str) -> Product:
        """A product whose factors' rows an index tensor selects."""
        reads = ir.factors_of(store.value)[0]
        if node.function == "sampled_product":
            sides = [[s for s in read.subscripts if self.selects(s, store)] for read in reads]
            places = f"at entries ({', '.join(' '.join(map(self.names.text, side)) for side in sides)})"
            lines = ("sampled dense × dense", places, over)
            tables = tuple(map(self.access, reads))
            pointers = tuple(self.pointers(*sides[0], *sides[1]))
            return Product(name, lines, self.labels(*store.subscripts), (), tables, pointers, hover)
        *values, dense = reads
        row_axes, axes, entries, shared = ir.sparse_parts(store)
        rows, columns = [store.subscripts[axis] for axis in row_axes], [dense.subscripts[axis] for axis in axes]
        row, column = (" ".join(map(self.names.text, side)) for side in (rows, columns))
        lines = (
            "sparse × dense",
            f"entries at ({row}, {column})",
            f"sum over {','.join(map(self.names.index, entries))}",
        )
        labels = (*map(self.names.text, rows), *map(self.names.index, shared))
        operands = tuple(self.value(read) for read in values)
        pointers = tuple(self.pointers(*rows, *columns))
        return Product(name, lines, labels, operands, (self.access(dense),), pointers, hover)

    def selects(self, subscript: Expr, store: Store) -> bool:
        """Whether a subscript varies with the entries rather than with what is summed."""
        return set(indices_of(subscript)) <= set(plain_labels(store.subscripts))

    def matrix_lines(self, store: Store, reads: list[Load]) -> tuple[str, str]:
        left, right = (plain_labels(read.subscripts) for read in reads)
        labels = plain_labels(store.subscripts)
        m, n = ([x for x in labels if x not in other] for other in (right, left))
        batch = [self.names.index(label) for label in labels if label in left and label in right]
        outer = " · ".join(
            f"{role} = {','.join(map(self.names.index, own)) or '1'}" for role, own in (("m", m), ("n", n))
        )
        return outer, f"for each {','.join(batch)}" if batch else ""
