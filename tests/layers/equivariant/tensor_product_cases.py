"""Cases and oracles that the tests of tensor products share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum_nn.structure.irreps import MODES, Entry, Path
from insum_nn.testing.tolerances import Kind, assert_matches

MODE_NAMES = tuple(MODES)


@dataclass(frozen=True)
class Case:
    """Arguments of a tensor product."""

    irreps_in1: str
    irreps_in2: str
    irreps_out: str
    instructions: tuple[tuple[Any, ...], ...]

    @property
    def args(self) -> tuple[Any, ...]:
        return (self.irreps_in1, self.irreps_in2, self.irreps_out, list(self.instructions))


def multiplicities(mode: str, weighted: bool, u: int, v: int, w: int) -> tuple[int, int, int]:
    """Multiplicities of in1, in2 and out that a mode allows, near the wished ones."""
    if mode in ("uuw", "uuu", "uvu<v", "u<vw"):
        v = u
    out = {
        "uvw": w,
        "uvu": u,
        "uvv": v,
        "uuw": w if weighted else 1,
        "uuu": u,
        "uvuv": u * v,
        "uvu<v": u * (u - 1) // 2,
        "u<vw": w,
    }[mode]
    return u, v, out


def degree_name(l: int, p: int) -> str:
    return f"{l}{'e' if p == 1 else 'o'}"


def one_mode(mode: str, weighted: bool, u: int = 4, v: int = 3, w: int = 5, lmax: int = 2) -> Case:
    """All couplings of degrees up to `lmax`, in one mode; the output's last entry is out of the reach of any path."""
    a, b, c = multiplicities(mode, weighted, u, v, w)
    in1 = [(l, (-1) ** l) for l in range(lmax + 1)]
    in2 = [(l, (-1) ** l) for l in range(2)]
    out = [*in1, (1, 1), (0, 1), (lmax + 4, 1)]
    rows: list[tuple[Any, ...]] = []
    for i, (l1, p1) in enumerate(in1):
        for j, (l2, p2) in enumerate(in2):
            for k, (l3, p3) in enumerate(out):
                if p1 * p2 == p3 and abs(l1 - l2) <= l3 <= l1 + l2:
                    rows.append((i, j, k, mode, weighted, 0.5 + (len(rows) % 3)))
    text = ["+".join(f"{mul}x{degree_name(*d)}" for d in part) for mul, part in ((a, in1), (b, in2), (c, out))]
    return Case(*text, tuple(rows))


def random_case(seed: int, modes: Sequence[str] = MODE_NAMES) -> Case:
    """Several paths of any modes between entries of any multiplicities, some of them 0 or 1, some entries unused."""
    draw = random.Random(seed)
    in1: list[tuple[int, int, int]] = []
    in2: list[tuple[int, int, int]] = []
    out: list[tuple[int, int, int]] = []
    rows: list[tuple[Any, ...]] = []
    for _ in range(draw.randint(1, 6)):
        mode = draw.choice(list(modes))
        weighted = mode in ("uvw", "u<vw") or draw.random() < 0.6
        u = draw.choice([1, 2, 3, 4])
        if mode in ("uvu<v", "u<vw"):
            u = max(u, 2)
        a, b, c = multiplicities(mode, weighted, u, draw.choice([1, 2, 3]), draw.choice([1, 2, 5]))
        l1, l2 = draw.randint(0, 2), draw.randint(0, 2)
        l3 = draw.randint(abs(l1 - l2), l1 + l2)
        p1, p2 = draw.choice([-1, 1]), draw.choice([-1, 1])
        places = [
            _place(draw, part, e) for part, e in ((in1, (a, l1, p1)), (in2, (b, l2, p2)), (out, (c, l3, p1 * p2)))
        ]
        rows.append((*places, mode, weighted, draw.choice([0.0, 0.3, 1.0, 2.0])))
    for part in (in1, in2, out):
        part.append((draw.choice([0, 2]), draw.randint(0, 3), draw.choice([-1, 1])))
    text = ["+".join(f"{mul}x{degree_name(l, p)}" for mul, l, p in part) for part in (in1, in2, out)]
    return Case(*text, tuple(rows))


def _place(draw: random.Random, part: list[tuple[int, int, int]], entry: tuple[int, int, int]) -> int:
    """The place of an entry: an equal one that is there already, or a new one."""
    if entry in part and draw.random() < 0.7:
        return part.index(entry)
    part.append(entry)
    return len(part) - 1


_EINSUM = {
    "uvw": ("uvw", "zui,zvj->zwk"),
    "uvu": ("uv", "zui,zvj->zuk"),
    "uvv": ("uv", "zui,zvj->zvk"),
    "uuw": ("uw", "zui,zuj->zwk"),
    "uuu": ("u", "zui,zuj->zuk"),
    "uvuv": ("uv", "zui,zvj->zuvk"),
}


def dense_oracle(
    entries: tuple[Sequence[Entry], Sequence[Entry], Sequence[Entry]],
    paths: Sequence[Path],
    shared: bool,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
) -> Tensor:
    """Path by path with dense coefficient blocks: shares nothing with the code under test but e3nn's `wigner_3j`."""
    from e3nn.o3 import wigner_3j

    def part(tensor: Tensor, own: Sequence[Entry], number: int) -> Tensor:
        start = sum(e.mul * (2 * e.l + 1) for e in own[:number])
        e = own[number]
        return tensor[:, start : start + e.mul * (2 * e.l + 1)].reshape(-1, e.mul, 2 * e.l + 1)

    in1, in2, out = entries
    columns = [x.new_zeros(x.shape[0], e.mul, 2 * e.l + 1) for e in out]
    offset = 0
    for path in paths:
        numel = math.prod(path.shape)
        w = weight[..., offset : offset + numel] if path.weighted else weight.new_ones(numel)
        offset += numel if path.weighted else 0
        a, b, c = in1[path.i_in1], in2[path.i_in2], out[path.i_out]
        if 0 in (a.mul, b.mul, c.mul) or 0 in path.shape:
            continue
        block = wigner_3j(a.l, b.l, c.l, dtype=torch.float64).to(x)
        xs, ys = part(x, in1, path.i_in1), part(y, in2, path.i_in2)
        batch = "z" if path.weighted and not shared else ""
        w = w.reshape((-1, *path.shape) if batch else path.shape)
        if path.mode in ("uvu<v", "u<vw"):
            first, second = torch.triu_indices(a.mul, a.mul, 1)
            xs, ys = xs[:, first], ys[:, second]
            subscripts, body = ("n", "zni,znj->znk") if path.mode == "uvu<v" else ("nw", "zni,znj->zwk")
        else:
            subscripts, body = _EINSUM[path.mode]
            if path.mode == "uuw" and not path.weighted:
                body = "zui,zuj->zk"
        operands, result = body.split("->")
        if path.mode == "uuw" and not path.weighted:
            subscripts, w = "u", w.new_ones(a.mul)
        found = torch.einsum(f"{operands},ijk,{batch}{subscripts}->{result}", xs, ys, block, w)
        columns[path.i_out] = columns[path.i_out] + path.coefficient * found.reshape(-1, c.mul, 2 * c.l + 1)
    return torch.cat([column.flatten(1) for column in columns], 1)


def assert_same_derivatives(
    function: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    second: bool = True,
) -> None:
    """Value, gradients and (weighted sums of) second derivatives agree with the oracle, which runs in float64."""
    ours = [t.detach().clone().requires_grad_() for t in inputs]
    theirs = [t.detach().double().cpu().requires_grad_() for t in inputs]
    generator = torch.Generator().manual_seed(7)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    value, expected = function(*ours), oracle(*theirs)
    assert_matches(value, expected, dtype=dtype, kind="sum")
    seed = draw(expected)
    probes = [draw(t) for t in theirs]

    def derive(result: Tensor, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        grad = seed.to(result).requires_grad_()
        first = torch.autograd.grad(
            result, leaves, grad, create_graph=second, allow_unused=True, materialize_grads=True
        )
        if not second:
            return list(first), []
        total = sum((g * p.to(g)).sum() for g, p in zip(first, probes, strict=True))
        assert isinstance(total, Tensor)
        if not total.requires_grad:
            return list(first), [torch.zeros_like(t) for t in (*leaves, grad)]
        later = torch.autograd.grad(total, [*leaves, grad], allow_unused=True, materialize_grads=True)
        return list(first), list(later)

    kinds: tuple[Kind, Kind] = ("gradient", "second")
    for kind, mine, wanted in zip(kinds, derive(value, ours), derive(expected, theirs), strict=True):
        for a, b in zip(mine, wanted, strict=True):
            assert_matches(a, b, dtype=dtype, kind=kind)
