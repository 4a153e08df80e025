"""The parts of a kernel, each for some of its programs: long code costs seconds to compile and to fetch.

Parts that are alike but for their numbers are made one. Where many lines are left, each part is a function of its own
that is not copied into its caller: to find the layout of a load, Triton goes through all that is connected with it once
for each thing connected, and constants connect everything within a function.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Merged", "branches", "merge_alike"]

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
# Where Triton wants a number to be known when it compiles.
_KNOWN = ("tl.arange(", "tl.zeros(", "tl.sum(", "tl.broadcast_to(", "range(")

# Lines of all parts from which they are functions of their own.
_LONG = 300
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Merged:
    """Lines for one part or several; `members` are those parts' numbers, and `which` in the lines counts them."""

    members: tuple[int, ...]
    lines: tuple[str, ...]


def merge_alike(parts: Sequence[Sequence[str]], *, exact: bool) -> list[Merged]:
    """Make one of parts whose lines differ in numbers only.

    Args:
        parts: the lines of each; names that a part defines end in `_` and its number, but for the first part.
        exact: fractions must not pass through float32, so that parts with unlike ones stay apart.

    >>> merge_alike([["v1 = tl.load(x + 3)"], ["v1_1 = tl.load(x + 5)"]], exact=False)[0].lines
    ('n0 = 3 + which * 2', 'v1 = tl.load(x + n0)')
    """
    classes: dict[tuple[str, ...], list[int]] = {}
    for number, lines in enumerate(parts):
        classes.setdefault(tuple(_NUMBER.sub("#", line) for line in _plain(lines, number)), []).append(number)
    found: list[Merged] = []
    for members in classes.values():
        merged = _merge([_plain(parts[n], n) for n in members], exact, f"_{members[0]}" if members[0] else "")
        if merged is None:
            found += [Merged((n,), tuple(parts[n])) for n in members]
        else:
            found.append(Merged(tuple(members), tuple(merged)))
    return found


def branches(parts: Sequence[Sequence[str]], *, exact: bool, given: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Functions, and lines that do for the programs of each part what is its own; `part` is a program's number.

    Args:
        parts: the lines of each, as for `merge_alike`.
        exact: see there.
        given: names that parts do not define: what functions take. None: there are to be no functions.

    >>> branches([["store(x + 3)"], ["store(x * 2)"]], exact=False)[1]
    ['if part < 1:', '    store(x + 3)', 'else:', '    store(x * 2)']
    """
    found = merge_alike(parts, exact=exact)
    long = bool(given) and sum(len(merged.lines) for merged in found) > _LONG
    functions: list[str] = []
    lines: list[str] = []
    first = 0
    for number, merged in enumerate(found):
        after = first + len(merged.members)
        last = after == len(parts)
        lines.append("else:" if last and first else f"{'elif' if first else 'if'} part < {after}:")
        own = list(merged.lines)
        if len(merged.members) > 1:
            own.insert(0, f"which = part - {first}")
        if long:
            used = {name for line in own for name in _NAME.findall(line)}
            call = f"part_{number}({', '.join(name for name in ('part', *given) if name in used)})"
            functions += ["@triton.jit(noinline=True)", f"def {call}:", *(f"    {line}" for line in own), "", ""]
            own = [call]
        lines += [f"    {line}" for line in own]
        first = after
    return functions, lines


def _plain(lines: Sequence[str], number: int) -> list[str]:
    """Lines without the part's mark on its names."""
    if number == 0:
        return list(lines)
    mark = re.compile(rf"\b([a-z]+\d+)_{number}\b")
    return [mark.sub(r"\1", line) for line in lines]


def _merge(parts: Sequence[Sequence[str]], exact: bool, tag: str) -> list[str] | None:
    """One text for all parts, its numbers chosen by `which`; `None` where that cannot be."""
    chosen: dict[tuple[str, ...], str] = {}
    lines: list[str] = []
    for same in zip(*parts, strict=True):
        values = list(zip(*(_NUMBER.findall(line) for line in same), strict=True))
        unlike = [len(set(each)) > 1 for each in values]
        if any(unlike) and any(word in same[0] for word in _KNOWN):
            return None
        texts: list[str] = []
        for each, differ in zip(values, unlike, strict=True):
            if not differ:
                texts.append(each[0])
                continue
            if exact and any(_fraction(text) for text in each):
                return None
            texts.append(chosen.setdefault(each, f"n{len(chosen)}{tag}"))
        replaced = iter(texts)
        lines.append(_NUMBER.sub(lambda _, replaced=replaced: next(replaced), same[0]))
    if tag:
        mark = re.compile(r"\b([a-z]+\d+)\b(?!_)")
        defined = {m for line in lines for m in re.findall(r"^\s*([a-z]+\d+) \+?=", line)}
        defined |= {m for line in lines for m in re.findall(r"^\s*for ([a-z]+\d+) in", line)}
        lines = [mark.sub(lambda m: f"{m[1]}{tag}" if m[1] in defined else m[1], line) for line in lines]
    return [*(f"{name} = {_choice(values)}" for values, name in chosen.items()), *lines]


def _fraction(text: str) -> bool:
    return "." in text or "e" in text


def _choice(values: Sequence[str]) -> str:
    """A number for each value of `which`: evenly spaced, or picked one by one."""
    if not any(map(_fraction, values)):
        numbers = [int(value) for value in values]
        step = numbers[1] - numbers[0]
        if all(b - a == step for a, b in itertools.pairwise(numbers)):
            return f"{numbers[0]} + which * {step}"
    text = values[0]
    for number, value in enumerate(values[1:], 1):
        text = f"tl.where(which == {number}, {value}, {text})"
    return text
