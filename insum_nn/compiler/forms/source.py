"""`Form` + `Schedule` -> the text of a Triton kernel, its parameters, and what its grid counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.nest import write_nest
from insum_nn.compiler.forms.parameters import Argument, Strides
from insum_nn.compiler.forms.points import Point
from insum_nn.compiler.forms.schedule import Layout, Precision, Schedule, place_indices

__all__ = ["Source", "steps_of_vectors", "write_kernel"]


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, its parameters in order, and what each step of its grid counts.

    Attributes:
        grid: (index or "", values per program) for each factor of the number of programs, the fastest first.
        finished: it stores the output itself; else sums, to which the start and the epilogue are yet to come.
    """

    text: str
    arguments: tuple[Argument, ...]
    grid: tuple[tuple[str, int], ...]
    schedule: Schedule
    accumulator: torch.dtype
    finished: bool


def _tiles(form: Form, layout: Layout, schedule: Schedule) -> list[tuple[str, int]]:
    """The factors of the number of programs, the fastest first: an index and how many of its values one has."""
    blocks: list[tuple[str, int]] = []
    for axis in (layout.n, layout.m):
        if axis is None:
            continue
        known = form.static.get(axis.first)
        if known is None or known > axis.block:
            blocks.append((axis.first, axis.block))
    tiles = [*blocks, *((index, 1) for index in reversed(layout.grid))]
    if schedule.splits > 1:
        tiles.append(("@split", 1))
    return tiles


def _parts(points: Sequence[Point], groups: int) -> list[list[Point]]:
    """Points divided by the cells they add to, into parts of like work."""
    cells: dict[str, list[Point]] = {}
    for point in points:
        cells.setdefault(str(point.target), []).append(point)
    if groups >= len(cells):
        return list(cells.values()) or [[]]
    total = sum(4 + len(group) for group in cells.values())
    parts: list[list[Point]] = [[] for _ in range(min(groups, len(cells)))]
    done = 0
    for group in cells.values():
        parts[min(len(parts) - 1, done * len(parts) // total)] += group
        done += 4 + len(group)
    return [part for part in parts if part]


def write_kernel(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Source:
    """The kernel of a form under a schedule."""
    if form.owner is not None and schedule.splits > 1:
        # Rows are divided by their owners.
        schedule = replace(schedule, splits=1)
    if form.beside:
        schedule = replace(schedule, groups=1)
    layout = place_indices(form, schedule)
    tiles = _tiles(form, layout, schedule)
    accumulator = torch.float64 if form.bound.dtype == torch.float64 else torch.float32
    text, arguments, finished = write_nest(form, schedule, strides, precision)
    parts = len(_parts(form.points, schedule.groups))
    count = (("@part", parts),) if parts > 1 else ()
    return Source(text, arguments, (*count, *tiles), replace(schedule, groups=parts), accumulator, finished)


def steps_of_vectors(form: Form, source: Source, values: Sequence[int | None]) -> tuple[int, ...]:
    """The arguments that are steps along an axis, or the length of the output's rows, multiples of 16."""
    last = form.bound.statement.output.subscripts[-1:]
    rows = {s.plain for s in last}
    return tuple(
        place
        for place, (argument, value) in enumerate(zip(source.arguments, values, strict=True))
        if value is not None
        and value % 16 == 0
        and (
            argument.kind.endswith("stride")
            or (argument.kind == "dim" and (argument.name == "@out" or argument.axis > 0))
            or (argument.kind == "extent" and (argument.name in rows or argument.name in form.static))
        )
    )
