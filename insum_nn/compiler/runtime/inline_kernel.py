"""Write the launch of a generated kernel into the graph that torch is tracing.

    begin = searchsorted(Row, arange(rows + 1))
    out = empty(rows, n)
    triton_kernel_wrapper_mutation(kernel, grid, Val, B, begin, out)

Inductor sees the kernel's text and what it reads and writes: it plans the memory of the output, fuses what stands
around the launch, and puts the machine code into a package. The index tensors of a traced graph may be others at every
call, so what the kernel reads of their order is computed in the graph, in sizes that are known ahead: rows are never
divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.ir.schedule import precision_of
from insum_nn.compiler.kernels.launch import function_of
from insum_nn.compiler.kernels.row_partition import RowPartition, new_bitmasks_of, rows_of, tiles_of
from insum_nn.compiler.kernels.sized import WIDE, UnsizedKernel, reaches
from insum_nn.compiler.kernels.source import Strides, initial_steps
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.fixed_extents import fixed_extents
from insum_nn.compiler.runtime.modes import exceeds, size_hint
from insum_nn.compiler.schedule.form import Form, FormError, make_form
from insum_nn.compiler.schedule.group_by_key import group_by_key
from insum_nn.compiler.schedule.tune import choose_schedule
from insum_nn.compiler.tuning.database import size_bucket
from insum_nn.facts import StaticTable

__all__ = ["inline_kernel"]


def inline_kernel(
    bound: Bound,
    tensors: Sequence[Tensor],
    initial: Tensor | None,
    extents: Extents,
    options: Options,
    tables: Mapping[str, StaticTable],
    row_begins: tuple[int, Tensor] | None = None,
) -> Tensor | None:
    """Compute a statement by one launch; `None`: no kernel can be generated.

    Args:
        bound: the statement, under canonical names.
        tensors: in the layout's order.
        initial: the initial value.
        extents: the call's sizes, which may be symbolic.
        options: compile options.
        tables: static tensors by name.
        row_begins: the position of an ascending index tensor of output rows, and where the terms of each row begin,
            (rows + 1,).
    """
    likely = Extents(tuple(map(size_hint, extents.indices)), tuple(map(size_hint, extents.output)))
    if 0 in likely.indices or 0 in likely.output:
        return None
    steady = dict(zip(bound.layout.indices, extents.indices, strict=True))
    static = fixed_extents(bound, options, frozenset(tables), likely)
    fixed = replace(bound, static=tuple((name, size) for name, size in static if type(steady[name]) is int))
    sizes = dict(zip(fixed.layout.indices, likely.indices, strict=True))
    try:
        form = make_form(fixed, sizes, likely.output, tables, deterministic=False)
    except FormError:
        return None
    shapes = [tuple(map(size_hint, tensor.shape)) for tensor in tensors]
    form = group_by_key(form, shapes, deterministic=False)
    precision = precision_of(fixed.dtype, options.precision)
    device = tensors[0].device
    bucket = size_bucket(likely)
    schedule = choose_schedule(form, tables, bucket, device, likely, None, precision, options).candidate
    wide = exceeds(reaches(form, tensors, initial, extents), WIDE)
    strides = Strides(tuple(t.is_contiguous() for t in tensors), wide, False, initial_steps(initial))
    partition: RowPartition | None = None
    if form.row_index:
        rows = rows_of(form, tensors, extents.output)
        if (
            form.stack is None
            and row_begins is not None
            and row_begins[0] == form.row_index_place
            and not form.permuted
        ):
            partition = RowPartition(rows, row_begins[1])
        else:
            partition = _undivided(form, tensors[form.row_index_place], rows, wide, schedule.m)
    kernel = UnsizedKernel(form, schedule, strides, precision)

    def launch(arguments: list[Any], grid: int) -> None:
        written: Any = torch.library.wrap_triton(function_of(kernel.source))
        written[(grid,)](*arguments, **dict(kernel.source.schedule.launch_options))

    sizes = extents.indices, extents.output
    return kernel.call(tensors, initial, *sizes, partition, bitmasks=new_bitmasks_of, launch=launch)


def _undivided(form: Form, index: Tensor, rows: int, wide: bool, size: int) -> RowPartition:
    """The terms of every output row, none divided; of a key in tiles of so many."""
    # Of 32 bits a sort takes half the launches.
    flat, order = index.reshape(-1) if wide else index.reshape(-1).int(), None
    if form.permuted:
        flat, order = flat.sort(stable=True)
        order = order if wide else order.int()
    if form.stack is not None:
        return tiles_of(flat, order, rows, size, torch.int64 if wide else torch.int32)
    bounds = torch.arange(rows + 1, dtype=flat.dtype, device=flat.device)
    return RowPartition(rows, torch.searchsorted(flat, bounds, out_int32=not wide), order=order)
