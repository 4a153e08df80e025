"""Prefetch the index tensors of a kernel with several outputs: read the next terms' while these are summed.

Each term of a row is a chain of reads: the order of the terms, what index tensors say of the term, and what lies there.
A warp waits for each of them, and few warps are there to work meanwhile where a thread holds many sums. So the loop
carries what is needed next: an index tensor is read one step before its term, and the order of the terms two steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.forms.text import Scope, Value

__all__ = ["Terms", "read_early"]

_NAMED = re.compile(r"(\w+) = (.+)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_LOAD = re.compile(
    r"tl\.load\((?P<place>.+?)(?:, mask=(?P<mask>.+), other=(?P<other>-?\d+))?\)(?P<cast>\.to\(tl\.int\d+\))?"
)


@dataclass(frozen=True, slots=True)
class Terms:
    """The loop over terms: its scope, its variable, where it begins and ends, and how far it steps."""

    depth: int
    name: str
    low: str
    high: str
    block: int


def read_early(
    scopes: Sequence[Scope],
    terms: Terms,
    order: Value | None,
    indices: Sequence[Value],
    fresh: Callable[[str], str],
) -> None:
    """Rewrite the loop over terms so that its index tensors are read in the steps before.

    Args:
        scopes: of the kernel, the loop's among them.
        terms: the loop.
        order: what is read of the order of the terms, if they are not in order.
        indices: what is read of index tensors.
        fresh: makes a name.
    """
    scope = scopes[terms.depth]
    made = {m[1]: m[2] for line in scope.lines if (m := _NAMED.fullmatch(line))}
    slices = _Slices(made, terms, fresh)
    first = [order] if order is not None and order.text in made else []
    known = [v.text for v in first]
    # What an index tensor says of where another one is read is left to its own step.
    later = [v for v in indices if v.text in made and not any(o.text in slices.needs(v) for o in indices)]
    if not later and not first:
        return
    ahead, low, name, block = scopes[terms.depth - 1].lines, terms.low, terms.name, terms.block
    following: dict[str, str] = {}
    if first:
        slices.copy(first, low, {}, ahead, known)
        following = slices.copy(first, f"{low} + {block}", {}, ahead)
    slices.copy(later, low, dict(zip(known, known, strict=True)), ahead, [v.text for v in later])
    early: list[str] = []
    second = slices.copy(first, f"{name} + {2 * block}", {}, early)
    coming = slices.copy(later, f"{name} + {block}", following, early)
    carried = {*known, *coming}
    rest = [line for line in scope.lines if not ((m := _NAMED.fullmatch(line)) and m[1] in carried)]
    scope.lines[:] = [*early, *rest]
    moves = [*coming.items(), *following.items(), *((following[text], new) for text, new in second.items())]
    scope.tail[:0] = [f"{old} = {new}" for old, new in moves]


class _Slices:
    """What some quantities of a loop's step are made of, to be written once more for other steps."""

    def __init__(self, made: Mapping[str, str], terms: Terms, fresh: Callable[[str], str]) -> None:
        self.made = made
        self.terms = terms
        self.fresh = fresh

    def needs(self, value: Value, given: Mapping[str, str] | None = None) -> set[str]:
        """What a quantity is made of in its step, but for what is given."""
        found: set[str] = set()
        waiting = [value.text]
        while waiting:
            for name in _WORD.findall(self.made[waiting.pop()]):
                if name in self.made and name not in found and name not in (given or ()):
                    found.add(name)
                    waiting.append(name)
        return found

    def copy(
        self,
        values: Sequence[Value],
        at: str,
        given: Mapping[str, str],
        lines: list[str],
        names: Sequence[str] = (),
    ) -> dict[str, str]:
        """Write quantities for the step at a place, where there is one.

        Args:
            values: what is written.
            at: the loop's variable in that step.
            given: names that stand for others there.
            lines: where to write.
            names: those of the quantities; new ones by default.

        Returns:
            The names by those in the step at hand.
        """
        wanted = {v.text: v for v in values}
        every = set(wanted).union(*(self.needs(v, given) for v in values))
        known = {self.terms.name: f"({at})", **given}
        for name in (name for name in self.made if name in every):
            text = _WORD.sub(lambda word: known.get(word[0], word[0]), self.made[name])
            if name in wanted and not wanted[name].axes:
                text = _where(text, f"({at}) < {self.terms.high}")
            known[name] = name if name in names else self.fresh("next")
            lines.append(f"{known[name]} = {text}")
        return {name: known[name] for name in wanted}


def _where(text: str, condition: str) -> str:
    """A read of one number, of nothing where there is no such term."""
    load = _LOAD.fullmatch(text)
    assert load is not None, text
    mask = f"({load['mask']}) & ({condition})" if load["mask"] else condition
    return f"tl.load({load['place']}, mask={mask}, other={load['other'] or 0}){load['cast'] or ''}"
