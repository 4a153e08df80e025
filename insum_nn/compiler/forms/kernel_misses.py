"""Terms that miss, kept out of the sums of a kernel with several outputs: none of their factors may matter.

What misses is loaded as 0, but 0 times a factor that is not finite is none. So the term is set to 0 by a condition that
the kernel has computed anyway: the product, a factor that is smaller than it, one side of a matrix product, or, where
the condition is the same for all terms of a sum, the sum. No load waits for another one because of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insum_nn.compiler.forms.points import Point, Read, Sub
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

    def conditions(self, read: Read) -> list[Condition]:
        """The conditions under which a read does not miss: where one does not hold, it is 0."""
        found: list[Condition] = []
        for axis, sub in enumerate(read.subs):
            atoms = [atom for _, atom in sub.terms if not isinstance(atom, str) and self.may_lack(atom)]
            found += [Condition(atom.subs, atom.name, wide=not sub.safe) for atom in atoms]
            if not sub.safe:
                found.append(Condition((sub,), read.name, axis))
        return found

    def loose(self, reads: Sequence[Read]) -> list[Condition]:
        """The conditions of some reads by which others of them are not 0."""
        each = [self.conditions(read) for read in reads]
        every = dict.fromkeys(c for found in each for c in found)
        return [c for c in every if any(c not in found for found in each)]

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
