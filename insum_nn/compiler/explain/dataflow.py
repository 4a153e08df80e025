"""Plan -> the boxes and edges of its data flow; without a plan, what the statement's text alone shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from insum_nn.compiler.explain.svg import Box, Edge, Kind
from insum_nn.compiler.lang.bind import layout_of
from insum_nn.compiler.lang.syntax import Access, Number, Statement
from insum_nn.compiler.plans.plan import Dot, Load, Multiply, Plan, SampledProduct, Scale, SparseProduct, Sum

__all__ = ["Flow", "data_flow"]


@dataclass(slots=True)
class Flow:
    """Boxes, sources before targets, and the edges between their keys."""

    boxes: list[Box] = field(default_factory=list[Box])
    edges: list[Edge] = field(default_factory=list[Edge])


def data_flow(
    statement: Statement, plan: Plan | None, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> Flow:
    """Tensors -> reads -> products -> combination -> output.

    Args:
        statement: the statement.
        plan: its plan, if there is one; else all factors meet in one product.
        shapes: known shapes of tensors, the output included.
        sizes: known extents of indices.
    """
    builder = _Builder(statement, shapes, sizes)
    value = builder.steps(plan) if plan is not None else builder.text_product()
    builder.combine(value, plan)
    return builder.flow


class _Builder:
    def __init__(self, statement: Statement, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> None:
        self.statement = statement
        self.shapes = shapes
        self.sizes = sizes
        self.flow = Flow()
        self.keys: set[str] = set()
        self.values: dict[str, str] = {}  # plan value -> box
        self.index_tensors = layout_of(statement).index_tensors
        # How often a tensor is read differently; one that is read in one way shows its subscripts itself.
        self.ways: dict[str, set[str]] = {}
        for access in statement.accesses():
            if access is not statement.output:
                self.ways.setdefault(access.name, set()).add(str(access))

    def box(self, key: str, kind: Kind, *lines: str, hover: str = "") -> str:
        if key not in self.keys:
            self.keys.add(key)
            self.flow.boxes.append(Box(key, kind, tuple(line for line in lines if line), hover))
        return key

    def edge(self, source: str, target: str, *, index: bool = False) -> None:
        self.flow.edges.append(Edge(source, target, index))

    def shaped(self, labels: Sequence[str]) -> str:
        """`[g,n]  3×5`, the sizes where they are known."""
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
        """The box that holds `access` for every combination of its indices."""
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
        note = "no part outside" if outside else ""
        self.box(key, "gather", what, str(access), f"→ {self.shaped(labels)}", note, hover=f"{what} {access}")
        self.edge(source, key, index=pointing)
        self.point(pointers, key)
        return key

    def point(self, pointers: Sequence[str], key: str) -> None:
        for pointer in dict.fromkeys(pointers):
            self.edge(pointer, key, index=True)

    # Products.

    def steps(self, plan: Plan) -> str | None:
        for step in plan.steps:
            if isinstance(step, Load):
                self.values[step.result] = self.read(step.access)
            elif isinstance(step, SparseProduct):
                self.values[step.result] = self.sparse_product(step)
            elif isinstance(step, SampledProduct):
                self.values[step.result] = self.sampled_product(step)
            else:
                self.values[step.result] = self.arithmetic(step)
        name = plan.combine.value
        return None if name is None else self.values[name]

    def arithmetic(self, step: Sum | Scale | Multiply | Dot) -> str:
        key = f"step {step.result}"
        result = f"→ {self.shaped(step.labels)}"
        if isinstance(step, Sum):
            self.box(key, "product", "sum", result, hover=str(step))
        elif isinstance(step, Scale):
            self.box(key, "product", f"× {step.number!r}", result, hover=str(step))
        elif isinstance(step, Multiply):
            over = f"sum over {','.join(step.over)}" if step.over else ""
            unrolled = ", ".join(f"{label} unrolled" for label, _ in step.unrolled)
            title = "multiply and sum" if over else "multiply"
            self.box(key, "product", title, over, unrolled, result, hover=str(step))
        else:
            self.box(key, "product", "matrix product", *_matrix_lines(step), result, hover=str(step))
        sources = (step.source,) if isinstance(step, Sum | Scale) else (step.left, step.right)
        for source in sources:
            self.edge(self.values[source], key)
        return key

    def sparse_product(self, step: SparseProduct) -> str:
        dense = self.tensor(step.dense)
        pointers = [self.read(inner) for s in (step.row, step.col) for inner in s.index_accesses()]
        key = f"step {step.result}"
        labels = ",".join((str(step.row), *step.labels))
        place, over = f"entries at ({step.row}, {step.col})", f"sum over {','.join(step.entries)}"
        self.box(key, "product", "sparse × dense", place, over, f"→ [{labels}]", hover=str(step))
        if step.value is not None:
            self.edge(self.values[step.value], key)
        self.edge(dense, key)
        self.point(pointers, key)
        return key

    def sampled_product(self, step: SampledProduct) -> str:
        pointers = [self.read(inner) for s in (step.row, step.col) for inner in s.index_accesses()]
        key = f"step {step.result}"
        place, over = f"at entries ({step.row}, {step.col})", f"sum over {','.join(step.inner)}"
        self.box(key, "product", "sampled dense × dense", place, over, f"→ {self.shaped(step.labels)}", hover=str(step))
        for access in (step.near, step.far):
            self.edge(self.tensor(access), key)
        self.point(pointers, key)
        return key

    def text_product(self) -> str | None:
        """All factors at once, as the statement's meaning has it."""
        statement = self.statement
        numbers = [repr(f.value) for f in statement.factors if isinstance(f, Number)]
        reads = [self.read(access) for access in statement.reads]
        written = {index.name for index in statement.output.indices()}
        summed = [name for name in statement.indices() if name not in written]
        if not reads or (len(reads) == 1 and not numbers and not summed):
            return reads[0] if reads else None
        folding = {"max=": "maximum", "min=": "minimum"}.get(statement.operator, "sum")
        times = f"× {' × '.join(numbers)}" if numbers else ""
        over = f"{folding} over {','.join(summed)}" if summed else ""
        title = "multiply" if len(reads) + len(numbers) > 1 else folding
        kept = tuple(name for name in statement.indices() if name in written)
        self.box("product", "product", title, times, over, f"→ {self.shaped(kept)}")
        for read in reads:
            self.edge(read, "product")
        return "product"

    # The output.

    def combine(self, value: str | None, plan: Plan | None) -> None:
        output, operator = self.statement.output, self.statement.operator
        rows = plan is not None and plan.combine.mode == "rows"
        pointers = [] if rows else [self.read(inner) for s in output.subscripts for inner in s.index_accesses()]
        if value is None:
            numbers = [repr(f.value) for f in self.statement.factors if isinstance(f, Number)]
            value = self.box("numbers", "tensor", " × ".join(numbers), "number")
        start = ""
        if plan is not None and plan.bound.has_start:
            start = self.box("start", "tensor", output.name, "starting value")
        key = "combine"
        title = self.combination(rows=rows, has_start=bool(start))
        self.box(key, "combine", title, f"{output} {operator}", hover=f"{title}: {output} {operator}")
        self.edge(value, key)
        if start:
            self.edge(start, key)
        self.point([*pointers, *self.guards(plan)], key)
        shape = self.shapes.get(output.name)
        size = "" if shape is None else _times(shape) if shape else "scalar"
        self.box("output", "output", output.name, size, hover=f"output {output.name} {size}".strip())
        self.edge(key, "output")

    def combination(self, *, rows: bool, has_start: bool) -> str:
        extremum = {"max=": "keep the largest", "min=": "keep the smallest"}.get(self.statement.operator)
        if extremum is not None:
            return extremum if _is_view(self.statement.output) else f"scatter, {extremum}"
        if not rows and not _is_view(self.statement.output):
            return "scatter, add"
        return "add to the start" if has_start else "write all rows" if rows else "write"

    def guards(self, plan: Plan | None) -> list[str]:
        """Index tensors that decide where cells or terms are left out as they are combined."""
        if plan is None:
            return []
        inner = [miss.access for miss in plan.combine.guards if miss.axis is None]
        inner += [
            access
            for miss in plan.combine.guards
            if miss.axis is not None
            for access in miss.access.subscripts[miss.axis].index_accesses()
        ]
        return [self.read(access) for access in dict.fromkeys(inner)]


def _is_view(access: Access) -> bool:
    plain = [subscript.plain for subscript in access.subscripts]
    return None not in plain and len(set(plain)) == len(plain)


def _matrix_lines(step: Dot) -> list[str]:
    lines = [f"sum over {','.join(step.k)}"]
    outer = " · ".join(f"{role} = {','.join(labels) or '1'}" for role, labels in (("m", step.m), ("n", step.n)))
    lines.append(outer)
    if step.batch:
        lines.append(f"for each {','.join(step.batch)}")
    return lines


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
