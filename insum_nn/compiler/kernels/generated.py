"""Programs made of generated kernels: the form of a statement, the schedule for its sizes, the kernels made so far."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from insum_nn.compiler.ir.schedule import Precision, Schedule, precision_of
from insum_nn.compiler.kernels.collection import collection_of
from insum_nn.compiler.kernels.description import Description
from insum_nn.compiler.kernels.row_partition import (
    RowPartition,
    divisions_of,
    partition_for,
    partition_of,
)
from insum_nn.compiler.kernels.sized import WIDE, UnsizedKernel, reach_of, strides_of
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.printed import Body, Run, Sizes
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.form import CELLS, ROW_LOOP, Form
from insum_nn.compiler.schedule.group_by_key import group_by_key
from insum_nn.compiler.schedule.plan import keep_plans
from insum_nn.compiler.schedule.tune import capturing, choose_schedule
from insum_nn.compiler.tuning.build_once import BuildOnce
from insum_nn.compiler.tuning.database import size_bucket
from insum_nn.compiler.tuning.select import Selected
from insum_nn.facts import StaticTable
from insum_nn.tensor_cache import insert

__all__ = ["Generated"]

# Kernels prepared for one program, by sizes and memory layout; a run over ever new sizes must not grow without bound.
_LIMIT = 128


class Generated:
    """A statement computed by generated kernels.

    Args:
        form: what its kernels compute.
        tables: static tensors by name.
        options: compile options.
    """

    def __init__(self, form: Form, tables: Mapping[str, StaticTable], options: Options) -> None:
        self.form, self.tables, self.options = form, tables, options
        self.precision: Precision = precision_of(form.bound.dtype, options.precision)
        self._schedules: dict[object, Selected[Schedule]] = {}
        self._forms: dict[tuple[int, ...], Form] = {}
        self._kernels: dict[object, UnsizedKernel] = {}
        # Unrolled tables are not read.
        self._read = [place for place, name in enumerate(form.bound.layout.tensors) if name not in form.tables]
        self._choosing: BuildOnce[Selected[Schedule]] = BuildOnce()

    def named(self, bound: Bound) -> Generated:
        """The same for a statement that differs in names, with the same choices."""
        other = copy.copy(self)
        renamed = dict(zip(self.form.bound.statement.tensors(), bound.statement.tensors(), strict=True))
        other.tables = {renamed[name]: table for name, table in self.tables.items()}
        other.form, other._forms, other._kernels = self.form.named(bound), {}, {}
        return other

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Run:
        """What runs the statement on tensors of these shapes."""
        run, indices, shapes = self.at(tensors, extents, initial), (extents.indices,), (extents.output,)
        return lambda tensors, initial: run(tensors, indices, shapes, initial)[0]

    def at(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Body:
        """What makes the output and all further ones at all sizes that share a schedule with these.

        They need as many bits for the offsets in contiguous tensors.
        """
        bucket, read = size_bucket(extents), self._read
        form = self._form(bucket, tensors, extents)
        place, permuted, stack = form.row_index_place, form.permuted, form.stack
        # By how tensors lie in memory.
        kernels: dict[object, UnsizedKernel] = {}
        decided: list[Schedule] = []
        further = bool(form.additional)

        def decide(tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Schedule:
            schedule = self._schedule(bucket, tensors, extents, initial).candidate
            if not self.undecided(tensors):
                decided.append(schedule)
            return schedule

        def run(
            tensors: Sequence[Tensor], extents: Sequence[Sizes], shapes: Sequence[Sizes], initial: Tensor | None
        ) -> tuple[Tensor, ...]:
            (indices,), (output,) = extents, shapes
            partition, rows = None, 0
            divisions: Mapping[int, RowPartition] = {}
            if place >= 0:
                rows = output[form.row_axis] if stack is None else tensors[stack[0]].shape[stack[1]]
                divisions = divisions_of(tensors[place], rows, permuted)
            schedule = decided[0] if decided else decide(tensors, Extents(indices, output), initial)
            key: object = None
            if place >= 0:
                chunk = schedule.chunk if stack is None else -schedule.m
                partition = divisions.get(chunk)
                if partition is None:
                    partition = partition_of(tensors[place], rows, permuted, chunk)
                key = partition.target is not None
            if initial is not None:
                key = (key, initial.ndim if initial.is_contiguous() else initial.stride())
            for n in read:
                if not tensors[n].is_contiguous():
                    # Of all that a kernel reads: its text depends on which axes are contiguous.
                    key = (key, *[(tensors[n].stride(), reach_of(tensors[n]) < WIDE) for n in read])
                    break
            kernel = kernels.get(key)
            if kernel is None:
                expanded = None if initial is None else initial.expand(output)
                kernel = self._kernel(bucket, schedule, tensors, Extents(indices, output), expanded, partition)
                insert(kernels, key, kernel, _LIMIT)
            if further:
                others = kernel.additional(tensors, partition)
                return kernel.call(tensors, initial, indices, output, partition, others), *others
            return (kernel.call(tensors, initial, indices, output, partition),)

        return run

    def described(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Description:
        """Describe what a call runs, and each choice behind it with its reason."""
        bucket = size_bucket(extents)
        form = self._form(bucket, tensors, extents)
        chosen = self._schedule(bucket, tensors, extents, initial)
        partition = partition_for(form, tensors, extents, chosen.candidate)
        kernel = self._kernel(bucket, chosen.candidate, tensors, extents, initial, partition)
        sources = [kernel.source] if math.prod(extents.output) else []
        if sources and partition is not None and partition.slots:
            cells = [*extents.output[: form.row_axis], *extents.output[form.row_axis + 1 :]]
            sources.append(collection_of(math.prod(cells), kernel.source.accumulator, kernel.mode))
        schedule = ("schedule", str(chosen.candidate), chosen.reason)
        choices = (_combining(form), *_by_key(form), schedule, *_unrolled(form))
        return Description(str(chosen.candidate), tuple(sources), choices, "\n".join(kernel.host_code()))

    def _kernel(
        self,
        bucket: tuple[int, ...],
        schedule: Schedule,
        tensors: Sequence[Tensor],
        extents: Extents,
        initial: Tensor | None,
        partition: RowPartition | None,
    ) -> UnsizedKernel:
        # Sizes are arguments: what is written for some is right for all, if not the best.
        form = self._form(bucket, tensors, extents)
        strides = strides_of(form, tensors, extents, partition is not None and partition.split, initial)
        key = (bucket, schedule, strides)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = UnsizedKernel(form, schedule, strides, self.precision)
            keep_plans()
            # As long as it lives, so does its machine code.
            insert(self._kernels, key, kernel, _LIMIT)
        return kernel

    def _form(self, bucket: tuple[int, ...], tensors: Sequence[Tensor], extents: Extents) -> Form:
        """The form with the sizes of the first call of a bucket, by which choices are made for all of them."""
        form = self._forms.get(bucket)
        if form is None:
            sizes = dict(self.form.sizes)
            sizes.update((index, extents.indices[place]) for index, place in self.form.places.items())
            sizes.update((index, extents.output[axis]) for index, axis in self.form.cells.items())
            sizes[CELLS] = math.prod(extents.output)
            if self.form.row_index is not None:
                sizes[ROW_LOOP] = extents.output[self.form.row_axis]
            form = replace(self.form, sizes=sizes, plan=self.form.plan.at(bucket=list(bucket)))
            shapes = [tensor.shape for tensor in tensors]
            form = group_by_key(form, shapes, deterministic=self.options.deterministic)
            insert(self._forms, bucket, form, _LIMIT)
        return form

    def undecided(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a later call may decide otherwise: while a CUDA graph is captured nothing is measured."""
        return self.options.tune and tensors[0].is_cuda and capturing()

    def _schedule(
        self, bucket: tuple[int, ...], tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None
    ) -> Selected[Schedule]:
        """The schedule for a call: one for all sizes within a factor of two."""
        form = self._form(bucket, tensors, extents)

        def choose() -> Selected[Schedule]:
            chosen = choose_schedule(form, self.tables, bucket, tensors, extents, initial, self.precision, self.options)
            if not self.undecided(tensors):
                self._schedules[bucket] = chosen
            return chosen

        return self._choosing.get(bucket, lambda: self._schedules.get(bucket), choose)


def _combining(form: Form) -> tuple[str, str, str]:
    """Return how terms reach the output, and why."""
    what, why = {
        "direct": ("direct", "every cell of the output belongs to one program"),
        "place": ("place", "no two terms have the same place, so each is stored"),
        "own": (
            "own: a program walks the terms of a row",
            "no two programs add to one cell, and every run gives the same",
        ),
        "atomic": ("atomic", "terms meet in memory, in float32 or better"),
    }[form.strategy]
    if form.strategy == "own" and form.permuted:
        why = f"{why}; the terms are sorted once for each index tensor"
    return "combine", what, why


def _by_key(form: Form) -> list[tuple[str, str, str]]:
    if form.stack is None:
        return []
    stack = form.bound.layout.tensors[form.stack[0]]
    what = f"in tiles of one index of axis {form.stack[1]} of {stack}"
    return [("entries", what, "a tile is multiplied by one matrix, in the matrix unit")]


def _unrolled(form: Form) -> list[tuple[str, str, str]]:
    if len(form.unrolled) == 1:
        return []
    added = f"they add to {form.accumulators} accumulators"
    return [("static tables", f"{len(form.unrolled)} unrolled terms", added)]
