"""Parts of a kernel that are alike but for their numbers: merged where nothing but a number differs."""

from __future__ import annotations

import pytest

from insum_nn.compiler.forms.alike import Merged, branches, merge_alike


def part(number: int, offset: str, factor: str = "0.5", lanes: int = 16) -> list[str]:
    mark = f"_{number}" if number else ""
    return [
        f"lane1{mark} = tl.arange(0, {lanes})",
        f"acc2{mark} = tl.zeros(({lanes},), tl.float32)",
        f"for l3{mark} in range(0, extent_1, 4):",
        f"    v4{mark} = tl.load(tensor_1 + lane1{mark} + l3{mark} * stride_2 + {offset})",
        f"    acc2{mark} += v4{mark} * ({factor})",
    ]


def run(lines: tuple[str, ...], which: int) -> str:
    """The lines with the numbers that `which` chooses filled in."""
    chosen = {}
    rest: list[str] = []
    for line in lines:
        name, _, text = line.partition(" = ")
        if name.startswith("n"):

            class tl:
                where = staticmethod(lambda condition, a, b: a if condition else b)

            chosen[name] = repr(eval(text, {"which": which, "tl": tl}))
        else:
            rest.append(line)
    joined = "\n".join(rest)
    for name, value in chosen.items():
        joined = joined.replace(name, value)
    return joined


@pytest.mark.parametrize("offsets", [("3", "5", "7"), ("3", "5", "6"), ("4", "4", "9")])
@pytest.mark.parametrize("first", [0, 2])
def test_numbers_that_differ_are_chosen(offsets: tuple[str, ...], first: int):
    before = [[f"x{n}_{n} = other" if n else "x0 = other"] for n in range(first)]
    parts = [*before, *(part(first + n, each) for n, each in enumerate(offsets))]
    merged = merge_alike(parts, exact=True)[-1]
    assert merged.members == tuple(range(first, first + 3))
    for which, offset in enumerate(offsets):
        want = "\n".join(part(first, offset))
        assert run(merged.lines, which) == want


def test_what_stays_apart():
    alone = [Merged((n,), tuple(lines)) for n, lines in enumerate([part(0, "3"), part(1, "5", lanes=32)])]
    assert merge_alike([part(0, "3"), part(1, "5", lanes=32)], exact=False) == alone
    other = [part(0, "3"), part(1, "5 + i7")]
    assert [m.members for m in merge_alike(other, exact=False)] == [(0,), (1,)]


def test_fractions_in_double_precision_stay_apart():
    parts = [part(0, "3", "0.5"), part(1, "5", "0.25"), part(2, "7", "0.5")]
    assert [m.members for m in merge_alike(parts, exact=True)] == [(0,), (1,), (2,)]
    (merged,) = merge_alike(parts, exact=False)
    assert run(merged.lines, 1) == "\n".join(part(0, "5", "0.25"))
    alike = [part(0, "3", "-0.5"), part(1, "5", "-0.5")]
    assert [m.members for m in merge_alike(alike, exact=True)] == [(0, 1)]


@pytest.mark.parametrize("count", [1, 400])
def test_many_lines_are_functions(count: int):
    parts = [[f"seen.append((rest, a, {number}))"] * count for number in (3, 5, 9)] + [["seen.append(b)"] * count]
    for given in ((), ("rest", "a", "b", "unread")):
        functions, lines = branches(parts, exact=False, given=given)
        assert bool(functions) == (count > 300 and bool(given))
        text = "\n".join(functions).replace("@triton.jit(noinline=True)", "")
        assert "unread" not in text
        seen: list[object] = []

        class tl:
            where = staticmethod(lambda condition, a, b: a if condition else b)

        names = {"seen": seen, "tl": tl, "rest": 7, "a": "a", "b": "b"}
        # Functions find what is not handed to them among the names of the module.
        exec(text, module := {"seen": seen, "tl": tl})
        for part in range(4):
            exec("\n".join(lines), {**module, **names, "part": part})
        assert seen == [x for n in (3, 5, 9) for x in [(7, "a", n)] * count] + ["b"] * count
