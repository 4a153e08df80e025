"""Read from library calls what `explain()` shows: code, choices, and the products of the picture."""

from __future__ import annotations

import re
from collections.abc import Iterable

from insum_nn.compiler.explain.dataflow import Product, Steps
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.misses import Miss
from insum_nn.compiler.lang.syntax import Access, Subscript
from insum_nn.compiler.plans.plan import Dot, Load, Multiply, Plan, SampledProduct, Scale, SparseProduct, Sum
from insum_nn.compiler.runtime.execution import Library, piece_length

__all__ = ["choices_of", "steps_of", "torch_code"]


def torch_code(library: Library, extents: Extents) -> tuple[str, str]:
    """Return the torch calls of a call with these extents as Python, and how often they run.

    A comment says what each numbered argument stands for. `;  x = None` after last uses, which frees memory, is left
    out.
    """
    graph, schedule = library.graph, "library calls over the whole index space"
    length, cut = piece_length(library, extents), library.plan.chunk
    if length is not None and cut is not None:
        assert library.pieces is not None
        total = extents.indices[library.plan.bound.layout.indices.index(cut)]
        graph, schedule = library.pieces, f"library calls for {-(-total // length)} pieces of {length} values of {cut}"
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = [f"# {node.name}: {node.meta['stands_for']}" for node in arguments]
    code = re.sub(r";  (?:\w+ = )+None(?=\n|$)", "", str(graph.code)).strip()
    return "\n".join([*names, code]), schedule


def choices_of(library: Library, extents: Extents) -> tuple[tuple[str, str, str], ...]:
    """Return topic, choice and reason of every choice behind the calls."""
    rows = [(each.topic, each.choice, each.reason) for each in library.plan.decisions]
    whole = piece_length(library, extents) is None
    return tuple(row for row in rows if not (whole and row[0] == "pieces"))


def steps_of(library: Library) -> Steps:
    """Return the products in order, for the picture of the data flow."""
    return _Picture().steps(library.plan)


class _Picture:
    def __init__(self) -> None:
        self.values: dict[str, str | Access] = {}  # value of the plan -> product or read
        self.products: list[Product] = []

    def steps(self, plan: Plan) -> Steps:
        for step in plan.steps:
            if isinstance(step, Load):
                self.values[step.result] = step.access
            else:
                self.values[step.result] = step.result
                self.products.append(self.product(step))
        combine = plan.combine
        value = None if combine.value is None else self.values[combine.value]
        return Steps(tuple(self.products), value, combine.mode == "rows", tuple(_guards(combine.guards)))

    def product(self, step: Sum | Scale | Multiply | Dot | SparseProduct | SampledProduct) -> Product:
        if isinstance(step, SparseProduct):
            lines = ("sparse × dense", f"entries at ({step.row}, {step.col})", f"sum over {','.join(step.entries)}")
            operands = () if step.value is None else (self.values[step.value],)
            labels = (str(step.row), *step.labels)
            return Product(
                step.result, lines, labels, operands, (step.dense,), _pointers(step.row, step.col), str(step)
            )
        if isinstance(step, SampledProduct):
            places = f"at entries ({step.row}, {step.col})"
            lines = ("sampled dense × dense", places, f"sum over {','.join(step.inner)}")
            pointers = _pointers(step.row, step.col)
            return Product(step.result, lines, step.labels, (), (step.near, step.far), pointers, str(step))
        sources = (step.source,) if isinstance(step, Sum | Scale) else (step.left, step.right)
        operands = tuple(self.values[source] for source in sources)
        return Product(step.result, _lines(step), step.labels, operands, hover=str(step))


def _lines(step: Sum | Scale | Multiply | Dot) -> tuple[str, ...]:
    if isinstance(step, Sum):
        return ("sum",)
    if isinstance(step, Scale):
        return (f"× {step.number!r}",)
    if isinstance(step, Multiply):
        over = f"sum over {','.join(step.over)}" if step.over else ""
        unrolled = ", ".join(f"{label} unrolled" for label, _ in step.unrolled)
        return ("multiply and sum" if over else "multiply", over, unrolled)
    outer = " · ".join(f"{role} = {','.join(labels) or '1'}" for role, labels in (("m", step.m), ("n", step.n)))
    batch = f"for each {','.join(step.batch)}" if step.batch else ""
    return ("matrix product", f"sum over {','.join(step.k)}", outer, batch)


def _pointers(*subscripts: Subscript) -> tuple[Access, ...]:
    return tuple(inner for subscript in subscripts for inner in subscript.index_accesses())


def _guards(guards: Iterable[Miss]) -> Iterable[Access]:
    """Return the index tensors whose missing entries mask cells or terms as they are combined."""
    guards = tuple(guards)
    inner = [miss.access for miss in guards if miss.axis is None]
    inner += [
        access
        for miss in guards
        if miss.axis is not None
        for access in miss.access.subscripts[miss.axis].index_accesses()
    ]
    return dict.fromkeys(inner)
