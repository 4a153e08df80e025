"""Programs to call together: the gradients of a product along edges, with tables of a few terms; and their oracle."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import insum_nn
from benchmarks.schedules import under_schedule
from insum_nn import Options, Program
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.runtime import fused_kernels as fused_module
from insum_nn.compiler.runtime.artifact import Artifact, Step
from insum_nn.compiler.runtime.dispatch import prepare
from insum_nn.compiler.runtime.fused_kernels import One
from insum_nn.testing.tolerances import assert_matches

__all__ = [
    "CELLS",
    "EDGES",
    "GENERATED",
    "NODES",
    "SCHEDULES",
    "TABLES",
    "Together",
    "assert_right",
    "by_terms",
    "described",
    "draw",
    "exact",
    "kernel_along",
    "kernels_of",
    "made_by",
    "named",
    "ones_of",
    "programs",
    "run",
    "scale_of",
    "shape_of",
    "together",
]

GENERATED = Options(backend="triton", tune=False)
STATEMENTS = {
    "x": "dX[Src[e],I[p],u] += CG[p] * dZ[Dst[e],K[p],u] * Y[e,J[p]] * W[e,L[p],u]",
    "y": "dY[e,J[p]] += CG[p] * dZ[Dst[e],K[p],u] * X[Src[e],I[p],u] * W[e,L[p],u]",
    "w": "dW[e,L[p],u] += CG[p] * dZ[Dst[e],K[p],u] * X[Src[e],I[p],u] * Y[e,J[p]]",
    "z": "Z[Dst[e],K[p],u] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p]] * W[e,L[p],u]",
}
TABLES = {
    "CG": torch.tensor([1.0, 0.5, -0.25, 2.0, 1.0, 0.75, -1.5, 0.3]),
    "I": torch.tensor([0, 1, 2, 0, 1, 2, 3, 3]),
    "J": torch.tensor([0, 1, 1, 2, 2, 0, 1, 2]),
    "K": torch.tensor([0, 0, 1, 2, 2, 3, 4, 4]),
    "L": torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]),
}
CELLS = {"x": 4, "y": 3, "w": 3, "z": 5}
NODES, EDGES = 7, 23


def draw(u: int, dtype: torch.dtype = torch.float32, *, holes: bool = False) -> dict[str, Tensor]:
    """Node 2 has most edges, and node 5 none."""
    src = torch.where(torch.rand(EDGES) < 0.5, 2, torch.randint(5, (EDGES,)))
    dst = torch.randint(NODES, (EDGES,))
    if holes:
        src, dst = (torch.where(torch.rand(EDGES) < 0.2, -1, index) for index in (src, dst))
    value = {
        "dZ": torch.randn(NODES, CELLS["z"], u),
        "X": torch.randn(NODES, CELLS["x"], u),
        "Y": torch.randn(EDGES, CELLS["y"]),
        "W": torch.randn(EDGES, CELLS["w"], u),
    }
    return {"Src": src, "Dst": dst, **{name: t.to(dtype) for name, t in value.items()}}


def shape_of(role: str, u: int) -> tuple[int, ...]:
    return (EDGES if role in "yw" else NODES, CELLS[role], *([] if role == "y" else [u]))


def programs(roles: str, tables: dict[str, Tensor] = TABLES, options: Options = GENERATED) -> list[insum_nn.Program]:
    return [insum_nn.compile(STATEMENTS[role], static=tables, options=options) for role in roles]


def named(roles: str, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each program reads; its tables are its own."""
    dtype = tensors["dZ"].dtype
    device = tensors["dZ"].device
    tables = {n: t.to(device, dtype) if t.is_floating_point() else t.to(device) for n, t in TABLES.items()}
    every = {**tensors, **tables}
    return [{n: every[n] for n in p.statement.tensors()} for p in programs(roles)]


def by_terms(role: str, tensors: dict[str, Tensor], coefficients: Tensor = TABLES["CG"]) -> Tensor:
    """What a statement computes, by torch's operators alone: the reference interpreter takes seconds for wide rows."""
    present = (tensors["Src"] >= 0) & (tensors["Dst"] >= 0)
    src, dst = (tensors[n][present] for n in ("Src", "Dst"))
    factors = {
        "x": tensors["X"][src][:, TABLES["I"]],
        "y": tensors["Y"][present][:, TABLES["J"], None],
        "w": tensors["W"][present][:, TABLES["L"]],
        "z": tensors["dZ"][dst][:, TABLES["K"]],
    }
    terms = coefficients.to(tensors["dZ"])[:, None]
    for name, factor in factors.items():
        terms = terms if name == role else terms * factor
    terms = terms.sum(2) if role == "y" else terms
    rows = {"x": src, "z": dst}.get(role, present.nonzero()[:, 0])
    cells = TABLES[{"x": "I", "y": "J", "w": "L", "z": "K"}[role]]
    shape = shape_of(role, tensors["dZ"].shape[2])
    return torch.zeros(shape, dtype=terms.dtype).index_put((rows[:, None], cells), terms, accumulate=True)


def scale_of(role: str, tensors: dict[str, Tensor]) -> Tensor:
    """What the terms would add up to without their signs."""
    absolute = {n: t.abs() if t.is_floating_point() else t for n, t in tensors.items()}
    return by_terms(role, absolute, TABLES["CG"].abs())


def exact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().cpu().double() if t.is_floating_point() else t.cpu() for n, t in tensors.items()}


def assert_right(roles: str, tensors: dict[str, Tensor], found: list[Tensor]) -> None:
    doubled = exact(tensors)
    for role, got in zip(roles, found, strict=True):
        scale = max(float(scale_of(role, doubled).max()), 1e-30)
        assert got.is_contiguous()
        assert_matches(got.cpu(), by_terms(role, doubled), dtype=got.dtype, kind="sum", scale=scale)


def described(
    numbers: Sequence[int],
    programs: Sequence[insum_nn.Program],
    given: Sequence[dict[str, Tensor]],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[list[One], list[Tensor]]:
    """Programs on tensors, of which each stands once among those of the call, but for tables; and these tensors."""
    pool: list[Tensor] = []
    slots: dict[object, int] = {}
    ones: list[One] = []
    for number, program, named, shape in zip(numbers, programs, given, shapes, strict=True):
        spec, places = program.spec, list[int]()
        for name in spec.layout.tensors:
            key = (name, len(ones)) if name in dict(spec.static) else name
            if key not in slots:
                slots[key] = len(pool)
                pool.append(named[name])
            places.append(slots[key])
        tensors = [pool[at] for at in places]
        extents = spec.agree(tensors, program.sizes, shape)
        assert extents is not None
        bound, chosen = prepare(spec, tensors, None, extents)
        ones.append(One(number, bound, chosen, tuple(places), tensors, extents))
    return ones, pool


def ones_of(roles: str, tensors: dict[str, Tensor]) -> tuple[list[One], list[Tensor]]:
    shapes = [shape_of(role, tensors["dZ"].shape[2]) for role in roles]
    return described(range(len(roles)), programs(roles), named(roles, tensors), shapes)


def kernels_of(ones: Sequence[Any], *, deterministic: bool = False) -> list[Any]:
    """The kernels that compute all, the one that reads and adds least first."""
    walks = fused_module._walks(ones, fused_module._plan_of(ones))
    makes = (partial(kernel_along, ones, walk, deterministic=deterministic) for walk in walks)
    return [*fused_module._those_that_fit(makes)]


def kernel_along(ones: Sequence[Any], walk: tuple[str, str], *, deterministic: bool = False) -> Any:
    """The kernel whose terms are walked by one index tensor."""
    return fused_module._along(ones, walk, fused_module._plan_of(ones), GENERATED, deterministic)


def shapes_of(ones: Sequence[One]) -> list[tuple[int, ...]]:
    """The shapes of the outputs."""
    return [*dict(sorted((one.number, one.extents.output) for one in ones)).values()]


def made_by(found: Any, ones: Sequence[One], pool: Sequence[Tensor], schedule: Schedule | None = None) -> list[Tensor]:
    """All outputs by a kernel, under a schedule."""
    extents = found.sizes(pool, shapes_of(ones))
    generated = found.generated if schedule is None else under_schedule(found.generated, schedule)
    tensors = [pool[at] for at in found.places]
    made = generated.at(tensors, extents, None)(tensors, [extents.indices], [extents.output], None)
    return [made[at] for at in found.order]


class Together:
    """Programs that are called together. Tensors of one name are the same in all, but for tables."""

    def __init__(
        self, programs: Sequence[Program], outputs: Sequence[Hashable] = (), *, deterministic: bool = False
    ) -> None:
        self.programs = programs
        numbers: dict[Hashable, int] = {}
        self.outputs = [numbers.setdefault(name, len(numbers)) for name in outputs or range(len(programs))]
        self.deterministic = deterministic
        self.artifacts: dict[object, Artifact] = {}
        self.reason = ""

    def __call__(
        self, named: Sequence[dict[str, Tensor]], shapes: Sequence[tuple[int, ...]]
    ) -> Sequence[Tensor] | None:
        pool, places, extents = list[Tensor](), list[tuple[int, ...]](), list[tuple[int, ...]]()
        slots: dict[tuple[str, int], int] = {}
        made: dict[int, tuple[int, ...]] = {}
        for at, (program, own, shape) in enumerate(zip(self.programs, named, shapes, strict=True)):
            spec = program.spec
            keys = [(name, at if name in dict(spec.static) else own[name].data_ptr()) for name in program.names]
            for name, key in zip(program.names, keys, strict=True):
                if slots.setdefault(key, len(pool)) == len(pool):
                    pool.append(own[name])
            places.append(tuple(slots[key] for key in keys))
            found = spec.agree([own[name] for name in program.names], program.sizes, shape)
            if found is None or made.setdefault(self.outputs[at], found.output) != found.output:
                return None
            extents.append(found.indices)
        kind = (*places, *(t.dtype for t in pool))
        artifact = self.artifacts.get(kind)
        if artifact is None:
            given = zip(self.programs, places, self.outputs, strict=True)
            steps = [Step.of(program.spec, own, output, n) for n, (program, own, output) in enumerate(given)]
            artifact = Artifact(steps, pool)
            self.artifacts[kind] = artifact
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.deterministic or before)
        try:
            written = artifact.run(pool, extents, [*made.values()], None)
        finally:
            torch.use_deterministic_algorithms(before)
        self.reason = artifact.reason
        return written


def run(
    fused: Together, named: Sequence[dict[str, Tensor]], shapes: Sequence[tuple[int, ...]], _: object = None
) -> Sequence[Tensor]:
    """All outputs: by one kernel, or one by one."""
    with torch.no_grad():
        made = fused(named, shapes)
        if made is not None:
            return made
        sums: dict[int, Tensor] = {}
        for program, number, given, shape in zip(fused.programs, fused.outputs, named, shapes, strict=True):
            part = program(tensors=given, out_shape=shape)
            sums[number] = sums[number] + part if number in sums else part
        return [*sums.values()]


def together(
    roles: str, tensors: dict[str, Tensor], schedule: Schedule | None = None, walk: tuple[str, str] | None = None
) -> list[Tensor]:
    """All outputs by one kernel, under a schedule and along a walk."""
    ones, pool = ones_of(roles, tensors)
    return made_by(kernels_of(ones)[0] if walk is None else kernel_along(ones, walk), ones, pool, schedule)


SCHEDULES = {
    "two tiles": Schedule(n=16),
    "wide": Schedule(n=64, warps=2),
    "divided": Schedule(n=32, chunk=2),
    "divided, two tiles": Schedule(n=16, chunk=3),
    "rows on lanes": Schedule(m=4, n=32),
    "rows on lanes, two tiles": Schedule(m=2, n=16, chunk=5),
    "terms on lanes": Schedule(n=32, k=4),
    "divided, rows and terms on lanes": Schedule(m=2, n=16, k=4, chunk=5),
}
