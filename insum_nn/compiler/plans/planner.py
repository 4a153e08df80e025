"""Bound -> Plan: pure decisions, each recorded with its reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from insum_nn.compiler.lang.bind import Bound, Layout
from insum_nn.compiler.lang.misses import Miss, labels_of, misses_of
from insum_nn.compiler.lang.syntax import Access, Index, Number, Subscript
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.contraction import contraction_order
from insum_nn.compiler.plans.plan import (
    Combine,
    Decision,
    Dot,
    Labels,
    Load,
    Multiply,
    Plan,
    Role,
    SampledProduct,
    Scale,
    SparseProduct,
    Step,
    Sum,
)

__all__ = ["UNROLL_LIMIT", "find_sparse_product", "is_feature", "make_plan", "scattered_axes", "slot_indices"]

# Longest in-group sum that is written out term by term; longer ones keep a reduction loop.
UNROLL_LIMIT = 32


def slot_indices(bound: Bound) -> tuple[str, ...]:
    """Indices that count the slots of a group: summed, and an axis of an index tensor of two or more axes.

    Their extent is a property of the format rather than of the data, so a compiled program may fix it.
    """
    statement = bound.statement
    written = {index.name for index in statement.output.indices()}
    slots: dict[str, None] = {}
    for read in statement.reads:
        for access in read.nested():
            if len(access.subscripts) < 2:
                continue
            slots.update((s.plain, None) for s in access.subscripts if s.plain is not None and s.plain not in written)
    return tuple(slots)


def is_feature(layout: Layout, index: str) -> bool:
    """Whether no index tensor has the index, and some tensor carries it behind its first axis: a dense feature axis."""
    places = layout.plain[layout.indices.index(index)]
    indexed = any(layout.tensors[where] in layout.index_tensors for where, _ in places)
    return not indexed and any(axis > 0 for _, axis in places)


def _is_view(access: Access) -> bool:
    return not scattered_axes(access)


@dataclass
class _Value:
    name: str
    labels: Labels


class _Planner:
    def __init__(self, bound: Bound, sizes: Mapping[str, int], options: Options, compiled: bool) -> None:
        self.bound = bound
        self.statement = bound.statement
        self.sizes = sizes
        self.options = options
        self.compiled = compiled
        self.steps: list[Step] = []
        self.decisions: list[Decision] = []
        self.unrolled: dict[str, int] = {}
        self.dotted: set[str] = set()
        self.chunk: str | None = None
        # The misses of other factors by which each load is guarded, and those by which the sum is.
        self.guards: dict[Access, dict[Miss, None]] = {}
        self.left_out: dict[Miss, None] = {}
        # What lies side by side in the output.
        self.last = frozenset(labels_of(self.statement.output)[-1:])

    def decide(self, topic: str, choice: str, reason: str) -> None:
        self.decisions.append(Decision(topic, choice, reason))

    def fresh(self) -> str:
        return f"t{len(self.steps)}"

    def emit(self, step: Step) -> _Value:
        self.steps.append(step)
        return _Value(step.result, step.labels)

    def plan(self) -> Plan:
        if self.statement.operator in ("max=", "min="):
            combine = self.extremum()
        else:
            combine = self.sparse_product() or self.general()
        plan = Plan(self.bound, tuple(self.steps), combine, self.roles(combine), tuple(self.decisions), self.chunk)
        return plan.verify()

    def number(self) -> int | float:
        return math.prod(factor.value for factor in self.statement.factors if isinstance(factor, Number))

    def load(self, access: Access) -> _Value:
        guards = tuple(self.guards.get(access, ()))
        return self.emit(Load(self.fresh(), access, labels_of(access), not _is_view(access), guards))

    # Misses.

    def guard(self, reads: Sequence[Access]) -> None:
        """Decide where the factors of terms that miss are kept out: as they are loaded, or as the sum is written."""
        output = labels_of(self.statement.output)
        paths = {access: misses_of(access, self.bound) for access in reads}
        every = dict.fromkeys(miss for path in paths.values() for miss in path)
        unguarded = False
        for miss in every:
            others = [access for access in reads if miss not in paths[access]]
            varying = [access for access in others if set(miss.labels) <= set(labels_of(access))]
            # In a gradient every factor counts; else one that does not vary with the miss may be multiplied by zero.
            needed = others if self.bound.drop_outside else varying
            if needed and set(miss.labels) <= set(output):
                each = sum(self.cells(labels_of(access)) for access in varying)
                if len(varying) < len(needed) or self.cells(output) <= each:
                    self.left_out[miss] = None
                    continue
            for access in varying:
                self.guards.setdefault(access, {})[miss] = None
            unguarded |= len(varying) < len(others)
        if unguarded and self.bound.drop_outside:
            # A gradient is exactly 0 where all terms miss, whatever the factors are.
            self.left_out |= every

    def cells(self, labels: Labels) -> int:
        return math.prod(self.sizes[label] for label in labels)

    # General path: load, contract pairwise, combine.

    def general(self) -> Combine:
        output = labels_of(self.statement.output)
        sampled = self.sampled_product()
        used = () if sampled is None else (sampled.near, sampled.far)
        rest = [access for access in self.statement.reads if not any(access is other for other in used)]
        self.guard(self.statement.reads if sampled is None else self.around(sampled, rest))
        operands = ([] if sampled is None else [self.emit(sampled)]) + [self.load(access) for access in rest]
        names = ([] if sampled is None else ["sampled product"]) + [str(access) for access in rest]
        value = self.contract(operands, output, names)
        value = self.scale(value)
        combine = self.combination(value, tuple(self.left_out))
        if len(combine.scattered) < 2 and sampled is None:
            self.choose_chunk()
        return combine

    def around(self, sampled: SampledProduct, rest: Sequence[Access]) -> list[Access]:
        """What is read, a sampled product as one: it leaves out entries that miss in either of its factors."""
        both = Access(
            "",
            (sampled.near.subscripts[sampled.near_axis], sampled.far.subscripts[sampled.far_axis]),
            sampled.near.span,
            sampled.near.span,
        )
        return [both, *rest]

    def contract(self, operands: list[_Value], keep: Labels, texts: Sequence[str] | None = None) -> _Value | None:
        """Multiply all operands, summing every label outside `keep` as early as possible."""
        if not operands:
            return None
        operands = [self.sum_alone(i, operands, keep) for i in range(len(operands))]
        if len(operands) > 2:
            order, cost, left_cost = contraction_order(
                [v.labels for v in operands], keep, self.sizes, search=self.options.order == "cost"
            )
            names = dict(enumerate(texts or map(str, self.statement.reads)))
            text = " then ".join(f"({names.get(a, 'result')} , {names.get(b, 'result')})" for a, b in order)
            reason = f"{cost:.3g} products and intermediate cells instead of {left_cost:.3g} from left to right"
            self.decide("order", text, reason)
        else:
            order = [(0, 1)] if len(operands) == 2 else []
        values = dict(enumerate(operands))
        for number, (left, right) in enumerate(order, start=len(operands)):
            a, b = values.pop(left), values.pop(right)
            needed = {*keep, *(label for v in values.values() for label in v.labels)}
            values[number] = self.pair(a, b, needed)
        (value,) = values.values()
        return value

    def sum_alone(self, position: int, operands: Sequence[_Value], keep: Labels) -> _Value:
        value = operands[position]
        others = {label for i, v in enumerate(operands) if i != position for label in v.labels}
        labels = tuple(label for label in value.labels if label in others or label in keep)
        if labels == value.labels:
            return value
        return self.emit(Sum(self.fresh(), value.name, labels))

    def pair(self, a: _Value, b: _Value, needed: set[str]) -> _Value:
        shared = [label for label in a.labels if label in b.labels]
        k = tuple(label for label in shared if label not in needed)
        batch = tuple(label for label in shared if label in needed)
        m = tuple(label for label in a.labels if label not in b.labels)
        n = tuple(label for label in b.labels if label not in a.labels)
        if not k:
            return self.emit(Multiply(self.fresh(), a.name, b.name, batch + m + n))
        if self.use_dot(m, k, n):
            if (not m and n) or (not self.compiled and n and self.last & set(m)):
                # A library call stores what it multiplies: as the output lies, or adding it up goes cell by cell.
                a, b, m, n = b, a, n, m
            self.dotted.update(k)
            return self.emit(Dot(self.fresh(), a.name, b.name, batch, m, k, n))
        unrolled = tuple((label, extent) for label, extent in self.bound.static if label in k)
        if not (self.compiled and self.bound.device_type == "cuda"):
            unrolled = ()
        self.unrolled.update(unrolled)
        if unrolled:
            self.decide(
                f"sum over {', '.join(label for label, _ in unrolled)}",
                "unrolled",
                "without a dot, a short in-group sum is faster as straight-line code than as a reduction loop",
            )
        return self.emit(Multiply(self.fresh(), a.name, b.name, batch + m + n, k, unrolled))

    def use_dot(self, m: Labels, k: Labels, n: Labels) -> bool:
        dtype = self.bound.dtype
        if not self.compiled:
            # Without m and n a batched product would call the library once per scalar.
            return dtype.is_floating_point and bool(m or n)
        if self.bound.device_type != "cuda":
            return bool(m and n)
        extents = [math.prod(self.sizes[label] for label in labels) for labels in (m, k, n)]
        fits = bool(m and n) and min(extents) > 1
        halves = dtype in (torch.float16, torch.bfloat16, torch.float32)
        what = f"{','.join(k)}: m = {','.join(m) or '1'}, n = {','.join(n) or '1'}"
        if fits and halves:
            self.decide("dot over " + what, "tl.dot", "m, k and n all exceed 1")
            return True
        reason = "m, k or n is 1" if not fits else f"tl.dot takes no {str(dtype).removeprefix('torch.')}"
        self.decide("dot over " + what, "products and a sum", reason)
        return False

    def scale(self, value: _Value | None) -> _Value | None:
        number = self.number()
        if value is None or number == 1:
            return value
        return self.emit(Scale(self.fresh(), value.name, value.labels, number))

    # Sampled product: a library call on the CPU.

    def sampled_product(self) -> SampledProduct | None:
        """`A[Row[p],k] * B[Col[p],k]`, summed over k, is torch's sampled product."""
        bound, reads = self.bound, self.statement.reads
        if self.compiled or bound.device_type != "cpu" or bound.dtype not in (torch.float32, torch.float64):
            return None
        for near, far in itertools.combinations(reads, 2):
            others = [access for access in reads if access is not near and access is not far]
            parts = _sampled_parts(self.statement.output, near, far, others)
            if parts is not None:
                near_axis, far_axis, inner, entries = parts
                reason = "a dense product at some entries only; the library needs no gathered rows"
                self.decide("library", "sampled product", reason)
                return SampledProduct(self.fresh(), near, near_axis, far, far_axis, inner, entries)
        return None

    # Sparse product: a library call on the CPU.

    def sparse_product(self) -> Combine | None:
        """`Out[Row[e],n] += Val[e] * B[Col[e],n]` is torch's CSR product."""
        if self.compiled or self.bound.device_type != "cpu" or self.bound.dtype not in (torch.float32, torch.float64):
            return None
        if not torch.backends.mkl.is_available():
            return None
        found = find_sparse_product(self.bound)
        if found is None:
            return None
        dense, axis, row_axis, entries = found
        output = self.statement.output
        others = [access for access in self.statement.reads if access is not dense]
        if any(misses_of(access, self.bound) for access in others):
            # Its entries are those that have a row and a column.
            return None
        value = self.contract([self.load(access) for access in others], entries)
        if value is not None:
            value = self.scale(value)
        elif self.number() != 1:
            return None
        labels = tuple(s.plain for i, s in enumerate(output.subscripts) if i != row_axis and s.plain is not None)
        row, col = output.subscripts[row_axis], dense.subscripts[axis]
        result = self.emit(
            SparseProduct(self.fresh(), value.name if value else None, row, col, entries, dense, axis, labels)
        )
        self.decide(
            "library", "CSR product", "one sparse matrix times one dense one; the library needs no [entries, n] tensor"
        )
        return Combine(result.name, "rows", (row_axis,))

    # Extrema: the whole index space is formed, then reduced.

    def extremum(self) -> Combine:
        value: _Value | None = None
        for access in self.statement.reads:
            loaded = self.load(access)
            if value is None:
                value = loaded
                continue
            labels = value.labels + tuple(label for label in loaded.labels if label not in value.labels)
            value = self.emit(Multiply(self.fresh(), value.name, loaded.name, labels))
        value = self.scale(value)
        every = (miss for access in self.statement.reads for miss in misses_of(access, self.bound))
        return self.combination(value, tuple(dict.fromkeys(every)))

    def combination(self, value: _Value | None, guards: tuple[Miss, ...]) -> Combine:
        scattered = scattered_axes(self.statement.output)
        name = value.name if value is not None else None
        if not scattered:
            return Combine(name, "direct", (), guards)
        reason = "several terms may meet in one cell"
        if self.options.deterministic:
            reason += "; in a fixed order, so that every run gives the same bits"
        self.decide("combine", "scatter", reason)
        return Combine(name, "scatter", scattered, guards)

    # Eager execution in pieces.

    def choose_chunk(self) -> None:
        """Pick the index along which eager execution is cut, so that gathered tensors stay in the cache."""
        if self.compiled or self.bound.device_type != "cpu":
            return
        gathered = [step for step in self.steps if isinstance(step, Load) and step.gather]
        candidates = [label for step in gathered for label in step.labels if self.sliceable(label)]
        if not candidates:
            return
        written = labels_of(self.statement.output)
        reach = {label: self.reach(label, gathered) for label in candidates}
        # Among those that cut nearly as much: rather not a feature axis, whose slices are strided; then the longest,
        # which makes the smallest pieces; then a written one, because a summed index repeats the scatter every time.
        wide = [label for label, cells in reach.items() if 2 * cells >= max(reach.values())]
        best = max(wide, key=lambda x: (not is_feature(self.bound.layout, x), self.sizes[x], x in written))
        self.chunk = best
        self.decide("pieces", f"along {best}", "gathered tensors stay in the cache instead of passing through memory")

    def reach(self, label: str, gathered: Sequence[Load]) -> int:
        return sum(math.prod(self.sizes[x] for x in step.labels) for step in gathered if label in step.labels)

    def sliceable(self, label: str) -> bool:
        """Whether cutting every axis that `label` indexes restricts the statement to a range of it."""
        cut: dict[str, tuple[int, ...]] = {}
        for access in self.statement.accesses():
            addressed = scattered_axes(access)
            axes = tuple(axis for axis, subscript in enumerate(access.subscripts) if subscript.plain == label)
            # A tensor that stands at two places must be cut alike at both.
            if cut.setdefault(access.name, axes) != axes or set(axes) & set(addressed):
                return False
            for subscript in access.subscripts:
                if subscript.plain is None and any(
                    isinstance(term.atom, Index) and term.atom.name == label for term in subscript.terms
                ):
                    return False
        return any(self.bound.layout.plain[self.bound.layout.indices.index(label)])

    def roles(self, combine: Combine) -> tuple[Role, ...]:
        written = {index.name for index in self.statement.output.indices()}
        roles: list[Role] = []
        for index in self.bound.layout.indices:
            if index in self.unrolled:
                roles.append(Role(index, "unrolled", f"{self.unrolled[index]} terms"))
            elif index in self.dotted:
                roles.append(Role(index, "tiled", "summed by the dot"))
            elif index in written:
                roles.append(Role(index, "parallel", "written"))
            else:
                roles.append(Role(index, "sequential", "summed"))
        return tuple(roles)


def scattered_axes(access: Access) -> tuple[int, ...]:
    """Axes whose cells are addressed by value rather than by an index of their own."""
    complex_labels = [i.name for s in access.subscripts if s.plain is None for i in s.indices()]
    plain = [s.plain for s in access.subscripts]
    return tuple(
        axis for axis, name in enumerate(plain) if name is None or plain.count(name) > 1 or name in complex_labels
    )


def find_sparse_product(bound: Bound) -> tuple[Access, int, int, Labels] | None:
    """The dense factor, its selected axis, the output's row axis and the entries' labels, if it is such a product."""
    statement = bound.statement
    rows = [axis for axis, s in enumerate(statement.output.subscripts) if s.indirect is not None]
    for dense in statement.reads:
        picked = [axis for axis, s in enumerate(dense.subscripts) if s.indirect is not None]
        if len(picked) > 1 or any(s.plain is None and s.indirect is None for s in dense.subscripts):
            continue
        for axis in picked or range(len(dense.subscripts)):
            for row_axis in rows or range(len(statement.output.subscripts)):
                entries = _sparse_entries(bound, dense, axis, row_axis)
                if entries is not None:
                    return dense, axis, row_axis, entries
    return None


def _sparse_entries(bound: Bound, dense: Access, axis: int, row_axis: int) -> Labels | None:
    statement = bound.statement
    output = statement.output
    row, col = output.subscripts[row_axis], dense.subscripts[axis]
    if row.indirect is None and col.indirect is None:
        return None
    free = [s.plain for i, s in enumerate(dense.subscripts) if i != axis]
    written = [s.plain for i, s in enumerate(output.subscripts) if i != row_axis]
    if not free or None in free or len(set(free)) != len(free) or sorted(map(str, free)) != sorted(map(str, written)):
        return None
    entries = tuple(dict.fromkeys(i.name for s in (row, col) for i in s.indices()))
    if set(entries) & set(free) or set(entries) | set(free) != set(statement.indices()):
        return None
    if any(set(labels_of(a)) & set(free) for a in statement.reads if a is not dense):
        return None
    if not _simple(row) or not _simple(col):
        return None
    # A gather without any sum is no matrix product.
    if row.indirect is None and len(entries) == 1:
        return None
    return entries


def _sampled_parts(
    output: Access, near: Access, far: Access, others: Sequence[Access]
) -> tuple[int, int, Labels, Labels] | None:
    """The axes of both factors that entries select along, the summed labels, and those of the entries."""
    inner = {index.name for index in near.indices()} & {index.name for index in far.indices()}
    inner -= {index.name for access in (output, *others) for index in access.indices()}
    axes: list[int] = []
    for access in (near, far):
        free = [axis for axis, s in enumerate(access.subscripts) if s.plain is None or s.plain not in inner]
        plain = [s.plain for s in access.subscripts if s.plain in inner]
        if len(free) != 1 or not _simple(access.subscripts[free[0]]) or sorted(map(str, plain)) != sorted(inner):
            return None
        axes.append(free[0])
    row, col = near.subscripts[axes[0]], far.subscripts[axes[1]]
    entries = tuple(dict.fromkeys(index.name for subscript in (row, col) for index in subscript.indices()))
    # Two plain subscripts are a dense product; without a sum there is only a gather.
    if not inner or set(entries) & inner or (row.plain is not None and col.plain is not None):
        return None
    # Another factor may narrow the entries only after the fact, so it must speak of them as they are.
    if any(scattered_axes(access) or not set(labels_of(access)) <= set(entries) for access in others):
        return None
    return axes[0], axes[1], tuple(label for label in labels_of(near) if label in inner), entries


def _simple(subscript: Subscript) -> bool:
    """A plain index, or an index tensor read at different plain indices."""
    return subscript.plain is not None or (subscript.indirect is not None and _is_view(subscript.indirect))


def make_plan(bound: Bound, sizes: Mapping[str, int], options: Options, *, compiled: bool) -> Plan:
    """Plan a bound statement.

    Args:
        bound: what is known of the statement and its tensors.
        sizes: extents of the first call; they steer the order of products, never the result.
        options: compile options.
        compiled: for a compiler that fuses (Inductor), rather than for torch's library calls.

    Returns:
        A verified plan.
    """
    return _Planner(bound, sizes, options, compiled).plan()
