"""Terms that miss, kept out of a kernel's sums: where a read misses, no factor of the term may matter.

What misses is loaded as 0, but 0 times a factor that is not finite is none. So the term is set to 0 by a condition that
the kernel has computed anyway: the product, a factor that is smaller than it, one side of a matrix product, or, where
the condition is the same for all terms of a sum, the sum. No load waits for another one because of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from insum_nn.compiler.forms.points import OWNER, Point, Product, Read, Sub
from insum_nn.compiler.forms.text import KernelText, Value, join_axes, spread

__all__ = ["Condition", "KernelMisses"]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition under which a read does not miss.

    Attributes:
        subs: the subscripts that it is about: of an index tensor's entry, or one that may leave its axis.
        name: that index tensor, or the tensor that is left.
        axis: the axis that is left; -1 for an entry.
        wide: the entry is read with 64 bits.
    """

    subs: tuple[Sub, ...]
    name: str
    axis: int = -1
    wide: bool = False

    @property
    def indices(self) -> frozenset[str]:
        return frozenset(Read(self.name, self.subs).indices())


class KernelMisses(KernelText):
    """Selects by the conditions under which reads do not miss."""

    # Conditions by which the sums being written are selected once they are complete.
    settled: tuple[Condition, ...] = ()

    def conditions(self, read: Read) -> list[Condition]:
        """The conditions under which a read does not miss: where one does not hold, it is 0."""
        found: list[Condition] = []
        for axis, sub in enumerate(read.subs):
            atoms = [atom for _, atom in sub.terms if not isinstance(atom, str) and self.may_lack(atom)]
            found += [Condition(atom.subs, atom.name, wide=not sub.safe) for atom in atoms]
            if not sub.safe:
                found.append(Condition((sub,), read.name, axis))
        return found

    def all_conditions(self, reads: Iterable[Read]) -> list[Condition]:
        return list(dict.fromkeys(c for read in reads for c in self.conditions(read)))

    def loose(self, reads: Sequence[Read]) -> list[Condition]:
        """The conditions of some reads by which others of them are not 0."""
        each = [self.conditions(read) for read in reads]
        every = dict.fromkeys(c for found in each for c in found)
        return [c for c in every if c not in self.settled and any(c not in found for found in each)]

    def value_of(self, condition: Condition) -> Value:
        """The condition's name in the kernel; the reads that it belongs to are written already."""
        if condition.axis >= 0:
            return self.position(condition.subs[0], condition.name, condition.axis)[1][-1]
        entry = self.load(Read(condition.name, condition.subs), integer=True, wide=condition.wide)
        return self.define("has", f"{entry.text} >= 0", entry.axes, entry.depth)

    def axes_of(self, condition: Condition) -> str:
        return join_axes(*(self.indices[index].axes for index in condition.indices))

    def lanes_of(self, axes: str) -> int:
        count = 1
        for axis in axes:
            count *= self.axes[axis].lanes
        return count

    def kept(self, value: Value, conditions: Sequence[Condition]) -> Value:
        """A value, 0 where a condition does not hold; named, if it was."""
        if not conditions:
            return value
        found = [self.value_of(condition) for condition in conditions]
        named = value.text.isidentifier()
        axes = join_axes(value.axes, *(c.axes for c in found))
        depth = max(value.depth if named else len(self.scopes) - 1, *(c.depth for c in found))
        inner = value if named else self.define("x", value.text, value.axes, depth)
        text = f"tl.where({self.all_of(found, axes)}, {spread(inner, axes)}, 0.0)"
        return self.define("kept", text, axes, depth) if named else Value(text, axes, depth)

    def by_factor(
        self, point: Point, factors: Sequence[Value], conditions: list[Condition]
    ) -> tuple[tuple[Value, ...], list[Condition]]:
        """The factors of a point, set to 0 by conditions that select fewer numbers there than in the product.

        Returns:
            The factors, and the other conditions.
        """
        values, rest = list(factors), list[Condition]()
        whole = self.lanes_of(join_axes(*(v.axes for v in values), *map(self.axes_of, conditions)))
        for condition in conditions:
            lacking = [n for n, read in enumerate(point.reads) if condition not in self.conditions(read)]
            axes = self.axes_of(condition)
            if sum(self.lanes_of(join_axes(values[n].axes, axes)) for n in lacking) >= whole:
                rest.append(condition)
                continue
            for n in lacking:
                values[n] = self.kept(values[n], [condition])
        return tuple(values), rest

    def private(self, read: Read, indices: frozenset[str]) -> bool:
        """Whether a factor's own subscripts, outside index tensors, have all of these indices."""
        own = {atom for sub in read.subs for _, atom in sub.terms if isinstance(atom, str)}
        if self.form.entries and own.issuperset(self.form.entries):
            own.add(OWNER)
        return indices <= own

    # Matrix products.

    def sides_of(self, point: Point, product: Product) -> tuple[tuple[Read, ...], tuple[Read, ...]]:
        left, right = (tuple(point.reads[n] for n in side) for side in (product.left, product.right))
        return left, right

    def side_needs(self, reads: Sequence[Read], others: Sequence[Read]) -> tuple[Condition, ...]:
        """The conditions by which one side of a matrix product is selected: its own, and some of the other side's."""
        found = dict.fromkeys(self.loose(reads))
        for condition in self.all_conditions(others):
            lacking = [read for read in reads if condition not in self.conditions(read)]
            if set(self.axes_of(condition)) <= {"k"} and condition not in self.settled:
                if any(self.private(read, condition.indices) for read in lacking):
                    found[condition] = None
        return tuple(found)

    # Sums.

    def settle(self, points: Sequence[Point], axes: str) -> tuple[Condition, ...]:
        """The conditions that are the same for all terms that a cell's points sum: its sum is selected by them."""
        if self.segment or self.form.beside:
            return ()
        first, *rest = [self.loose(point.reads) for point in points]
        shared = [c for c in first if all(c in each for each in rest)]
        return tuple(c for c in shared if set(self.axes_of(c)) <= set(axes) and not self.depth_of(c))

    def depth_of(self, condition: Condition) -> int:
        return max((self.indices[index].depth for index in condition.indices), default=0)

    def selected(self, name: str, order: str, conditions: Sequence[Condition]) -> list[str]:
        """The lines that set a sum to 0 where a condition does not hold."""
        if not conditions:
            return []
        found = [self.value_of(condition) for condition in conditions]
        axes = join_axes(*(c.axes for c in found))
        return self.select(name, order, self.define("live", self.all_of(found, axes), axes, 0).text, axes)

    def any_term(self, name: str, order: str, points: Sequence[Point], product: Product) -> list[str]:
        """The lines that set the sum of matrix products to 0 where all terms miss.

        A gradient is 0 there, whatever the factors are; the conditions under which terms do not miss are collected as
        the loops meet them.
        """
        terms: list[list[Condition]] = []
        for point in points if self.form.bound.drop_outside else ():
            left, right = self.sides_of(point, product)
            every = [c for c in self.all_conditions(point.reads) if c not in self.settled]
            safe = [{*self.all_conditions(a), *self.side_needs(a, b)} for a, b in ((left, right), (right, left))]
            loose = [c for c in every if not all(c in side for side in safe)]
            if not loose:
                return []
            terms.append(every if len(join_axes(*map(self.axes_of, every))) < 3 else loose)
        axes = join_axes(*(self.axes_of(c) for each in terms for c in each))
        if not terms or len(axes) > 2:
            return []
        live = self.fresh("live")
        self.scopes[0].lines.append(f"{live} = tl.zeros({self.shape(axes) if axes else '()'}, tl.int32)")
        inside = [self.masks[a] for a in axes if a in self.masks]
        for each in terms:
            found = [*map(self.value_of, each), *inside]
            line = f"{live} = tl.where({self.all_of(found, axes)}, 1, {live})"
            self.scopes[max(c.depth for c in found)].lines.append(line)
        text = f"tl.max({live}, {axes.index('k')})" if "k" in axes else live
        return self.select(name, order, f"{text} > 0", axes.replace("k", ""))

    def select(self, name: str, order: str, condition: str, axes: str) -> list[str]:
        """The lines that set an accumulator to 0 where a condition over some of its axes does not hold."""
        if len(axes) == 2 and join_axes(order) != order:
            condition = f"tl.trans({condition})"
        elif len(axes) == 1 and axes != order:
            condition = f"({condition})[{', '.join(':' if a in axes else 'None' for a in order)}]"
        if self.product is None:
            return [f"{name} = tl.where({condition}, {name}, 0.0)"]
        # ptxas 12.8 (sm_90) takes a matrix product that begins with 0 and is selected against a literal
        # 0 for 0, and drops it. The grid has one axis, so this is a 0 that no compiler knows.
        zero = self.fresh("zero")
        return [
            f"{zero} = tl.program_id(2).to({self.type})",
            f"{name} = tl.where({condition}, {name}, {zero})",
        ]
