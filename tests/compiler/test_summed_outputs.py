"""Programs that add to one output: one kernel with one sum, as of gradients of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.runtime.fused_kernels import One
from insum_nn.compiler.schedule.form import FormError
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.fused_cases import (
    EDGES,
    GENERATED,
    SCHEDULES,
    STATEMENTS,
    TABLES,
    Together,
    by_terms,
    described,
    draw,
    exact,
    kernel_along,
    made_by,
    run,
    scale_of,
    shape_of,
)
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

NAMES = {"x": "X", "y": "Y", "w": "W", "z": "dZ"}
# A role, and the operand in whose place it reads a gradient. The first is the double backward of a product.
SETS = {
    "all": ("yx", "wx", "zx", "xy", "wy", "zy", "xw", "yw", "zw"),
    "two of three": ("yx", "wx", "zx", "xy", "wy", "zy"),
    "one output": ("wx", "wy"),
    "owned alone": ("zx", "zy", "zw"),
    "edges": ("wx", "yx", "wy", "yw"),
    "of four": ("yx", "xz", "zx", "xy", "wz", "zw"),
}


def summed(pairs: Sequence[str]) -> list[insum_nn.Program]:
    texts = [STATEMENTS[role].replace(f" * {NAMES[left]}[", f" * g{NAMES[left]}[") for role, left in pairs]
    return [insum_nn.compile(text, static=TABLES, options=GENERATED) for text in texts]


def operands(u: int, dtype: torch.dtype = torch.float32, *, holes: bool = False) -> dict[str, Tensor]:
    tensors = draw(u, dtype, holes=holes)
    return tensors | {f"g{name}": torch.randn_like(tensors[name]) for name in NAMES.values()}


def given(pairs: Sequence[str], tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    like = tensors["dZ"]
    tables = {n: t.to(like) if t.is_floating_point() else t.to(like.device) for n, t in TABLES.items()}
    return [{name: (tensors | tables)[name] for name in p.statement.tensors()} for p in summed(pairs)]


def assert_right(pairs: Sequence[str], tensors: dict[str, Tensor], found: Sequence[Tensor]) -> None:
    doubled = exact(tensors)
    want: dict[str, Tensor] = {}
    scale: dict[str, Tensor] = {}
    for role, left in pairs:
        own = doubled | {NAMES[left]: doubled[f"g{NAMES[left]}"]}
        part, bound = by_terms(role, own), scale_of(role, own)
        want[role] = want[role] + part if role in want else part
        scale[role] = scale[role] + bound if role in scale else bound
    assert len(found) == len(want)
    for got, role in zip(found, want, strict=True):
        assert got.is_contiguous()
        assert_matches(got.cpu(), want[role], dtype=got.dtype, kind="sum", scale=max(float(scale[role].max()), 1e-30))


def ones_of(pairs: Sequence[str], tensors: dict[str, Tensor]) -> tuple[list[One], list[Tensor]]:
    u, numbers = tensors["dZ"].shape[2], list(dict.fromkeys(role for role, _ in pairs))
    outputs, shapes = [numbers.index(pair[0]) for pair in pairs], [shape_of(pair[0], u) for pair in pairs]
    return described(outputs, summed(pairs), given(pairs, tensors), shapes)


def by_one_kernel(
    pairs: Sequence[str], tensors: dict[str, Tensor], walk: str, schedule: Schedule | None = None
) -> list[Tensor]:
    ones, pool = ones_of(pairs, tensors)
    return made_by(kernel_along(ones, (walk, "e")), ones, pool, schedule)


def call(pairs: Sequence[str], tensors: dict[str, Tensor]) -> tuple[Together, list[Tensor]]:
    u = tensors["dZ"].shape[2]
    fused = Together(summed(pairs), [role for role, _ in pairs])
    return fused, run(fused, given(pairs, tensors), [shape_of(role, u) for role, _ in pairs], "key")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("u", [3, 34])
@pytest.mark.parametrize("which", SETS)
def test_one_sum(which: str, u: int):
    tensors = operands(u, holes=u == 3)
    fused, found = call(SETS[which], tensors)
    assert fused.reason.startswith("together")
    assert_right(SETS[which], tensors, found)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("walk", ["Src", "Dst"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, walk: str):
    tensors = operands(21, holes=True)
    found = by_one_kernel(SETS["all"], tensors, walk, SCHEDULES[schedule])
    assert_right(SETS["all"], tensors, found)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("walk", ["Src", "Dst"])
def test_float64(walk: str):
    tensors = operands(8, torch.float64)
    assert_right(SETS["all"], tensors, by_one_kernel(SETS["all"], tensors, walk))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype):
    """What terms meet in is wider than what is written, once."""
    tensors = operands(8, dtype)
    fused, found = call(SETS["edges"], tensors)
    assert fused.reason.startswith("together")
    assert_right(SETS["edges"], tensors, found)
    # Sums at both ends of an edge: of one of them memory would hold parts.
    fused, found = call(SETS["all"], tensors)
    assert fused.reason.startswith("one by one")
    assert_right(SETS["all"], tensors, [found[n] for n in range(4)])


@pytest.mark.usefixtures("interpreter")
def test_what_is_refused():
    tensors = operands(4)
    deterministic = partial(Together, deterministic=True)
    fused = deterministic(summed(SETS["all"]), [role for role, _ in SETS["all"]])
    run(fused, given(SETS["all"], tensors), [shape_of(role, 4) for role, _ in SETS["all"]], "key")
    assert fused.reason.startswith("one by one")
    # Without an output at the other end, every run gives the same.
    for pairs in (SETS["owned alone"], SETS["edges"]):
        fused = deterministic(summed(pairs), [role for role, _ in pairs])
        run(fused, given(pairs, tensors), [shape_of(role, 4) for role, _ in pairs], "key")
        assert fused.reason.startswith("together")
    # Outputs of different shapes are not one.
    fused = Together(summed(("wx", "yx")), ["one", "one"])
    shapes = [shape_of(role, 4) for role in "wy"]
    with torch.no_grad():
        assert fused(given(("wx", "yx"), tensors), shapes) is None
    ones = [replace(one, number=0) for one in ones_of(("wx", "yx"), tensors)[0]]
    with pytest.raises(FormError, match="another kind"):
        kernel_along(ones, ("Dst", "e"))


@pytest.mark.usefixtures("interpreter")
def test_no_edges():
    tensors = operands(4)
    tensors |= {n: t[:0] for n, t in tensors.items() if n in ("Src", "Dst", "Y", "W", "gY", "gW")}
    pairs = SETS["all"]
    shapes = [(0, *s[1:]) if s[0] == EDGES else s for s in (shape_of(role, 4) for role, _ in pairs)]
    fused = Together(summed(pairs), [role for role, _ in pairs])
    found = run(fused, given(pairs, tensors), shapes, "key")
    assert [tuple(t.shape) for t in found] == list(dict.fromkeys(shapes))
    assert not any(t.any() for t in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("u", [5, 64, 112])
@pytest.mark.parametrize("which", SETS)
def test_on_a_gpu(which: str, u: int, dtype: torch.dtype):
    pairs = SETS[which]
    tensors = {n: t.cuda() for n, t in operands(u, dtype, holes=True).items()}
    fused, found = call(pairs, tensors)
    ends = {role for role, _ in pairs} >= {"x", "z"}
    assert fused.reason.startswith("one by one" if ends and dtype == torch.float16 else "together")
    assert_right(pairs, tensors, found)
    # Nothing that the sums of one end read says how many rows the other has.
    walks = ("Dst",) if which == "owned alone" else ("Src", "Dst")
    for walk in () if dtype == torch.float16 else walks:
        assert_right(pairs, tensors, by_one_kernel(pairs, tensors, walk))
