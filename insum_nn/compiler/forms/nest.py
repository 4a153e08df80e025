"""Write the kernels of forms through the loop-nest IR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insum_nn.compiler.codegen.triton import print_kernel
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.kernel_epilogue import finishes
from insum_nn.compiler.forms.parameters import Argument, Strides
from insum_nn.compiler.forms.points import ENTRY, OWNER
from insum_nn.compiler.forms.schedule import Axis, Layout, Precision, Schedule, place_indices, segmented, skips_steps
from insum_nn.compiler.ir.build import INITIAL, OUTPUT, Names, build
from insum_nn.compiler.ir.graph import loops_of
from insum_nn.compiler.ir.nodes import Buffer, Const, Index, Kernel, Load, Node, Size
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.passes import own_rows as walks
from insum_nn.compiler.passes.fold_static_tables import fold_static_tables
from insum_nn.compiler.passes.fuse_outputs import clusters, fuse_outputs
from insum_nn.compiler.passes.own_rows import RowWalk, own_rows
from insum_nn.compiler.passes.prefetch_indices import prefetch_indices
from insum_nn.compiler.passes.tile import WORD_BITS, Lanes, Tiling, tile
from insum_nn.compiler.passes.tile_outputs import tile_outputs

__all__ = ["SHARED_MULTIPLE", "algorithm_of", "arguments_of", "nest_of", "shared_extents", "write_nest"]


def nest_of(form: Form, schedule: Schedule, strides: Strides, precision: Precision) -> Kernel:
    """The placed kernel of a form under a schedule."""
    layout = place_indices(form, schedule)
    kernel = algorithm_of(_with_arguments(form, shared_extents(form, schedule, layout)), strides)
    names = Names(form.bound.statement)
    walk = RowWalk(kernel, 0)
    if form.combine == "own":
        assert form.owner is not None
        owner = next(b for b in kernel.inputs if b.name == names.tensors[form.owner.name])
        walk = own_rows(
            kernel,
            Load(owner, tuple(Index(names.indices[i]) for i in form.entries)),
            form.owner_axis if form.points else -1,
            permuted=form.permuted,
            chunks="equal" if segmented(form, schedule) else "long rows" if strides.split else "none",
            size=schedule.share,
            rows=build(form.bound).results[0].buffer.shape[form.owner_axis],
        )
    tiling = _tiling(form, schedule, layout, precision)
    if not form.beside:
        return tile(walk, tiling)
    placed = tile_outputs(walk, tiling, clusters(kernel))
    return prefetch_indices(placed) if schedule.early else placed


def algorithm_of(form: Form, strides: Strides) -> Kernel:
    """The algorithm of a form: of all of its outputs, for tensors that lie in memory in this way."""
    shared = _laid_out(build(form.bound), form, strides)
    if not form.beside:
        return _folded(shared, form)
    tensors, buffers = Names(form.bound.statement).tensors, {b.name: b for b in shared.inputs}
    outputs = [shared.results[0].buffer] if form.points else []
    for number, each in enumerate(form.beside, 1):
        tensor, axis = each.like
        shape = (buffers[tensors[tensor]].shape[axis], *map(Const, each.shape))
        outputs.append(Buffer(f"{OUTPUT}{number}", shared.results[0].buffer.dtype, shape))
    pairs = zip(form.outputs, outputs, strict=True)
    return fuse_outputs([_renamed(_folded(build(each.bound), each), each, shared, form, out) for each, out in pairs])


def _renamed(kernel: Kernel, form: Form, shared: Kernel, whole: Form, output: Buffer) -> Kernel:
    """The kernel of one of several outputs, in the names and with the extents of the kernel of all."""
    own, names = Names(form.bound.statement), Names(whole.bound.statement)
    inputs, extents = {b.name: b for b in shared.inputs}, {loop.index.name: loop.end for loop in loops_of(shared)}
    result = kernel.results[0].buffer
    changed: dict[Node, Node] = {}
    users = {name: user for user, name in own.tensors.items()}
    for buffer, instead in [*((b, inputs[names.tensors[users[b.name]]]) for b in kernel.inputs), (result, output)]:
        changed[buffer] = instead
        changed |= {a: b for a, b in zip(buffer.shape, instead.shape, strict=True) if isinstance(a, Size)}
    for user, letter in own.indices.items():
        if user in names.indices:
            changed[Index(letter)] = Index(names.indices[user])
            changed[Size(letter)] = extents[names.indices[user]]
    found = kernel.replace(changed)
    assert isinstance(found, Kernel)
    return found


# What an extent is a multiple of, so that rows begin at whole vectors of 16 bytes in every dtype.
SHARED_MULTIPLE = 16


def shared_extents(form: Form, schedule: Schedule, layout: Layout) -> frozenset[str]:
    """Known extents that a kernel takes as arguments, so that widths which are multiples of a tile share its code.

    These belong to the rows and columns of a tile, and to sums of several steps. A sum of one step stays one, unless it
    becomes one loop with the one around it: as a loop of its own it would leave the software pipeline nothing to
    overlap. Terms of static tables stay too, whose places are literals of their addresses.
    """
    if len(form.points) > 1 or form.tables or form.beside:
        return frozenset()
    found: set[str] = set()
    for axis in (layout.m, layout.n, layout.k):
        extent = None if axis is None else form.static.get(axis.first)
        if axis is None or extent is None or axis.inner or extent % SHARED_MULTIPLE or extent < axis.block:
            continue
        if extent > axis.block or axis is not layout.k or skips_steps(form, schedule, layout):
            found.add(axis.first)
    if schedule.dot and form.product is not None:
        # The offsets of a kernel, whose number is a step of the weights.
        found |= {index for index in layout.loops if index in form.static and form.static[index] > 1}
    return frozenset(found)


def _with_arguments(form: Form, indices: frozenset[str]) -> Form:
    """The form with some of its known extents as arguments."""
    if not indices:
        return form
    known = tuple((name, extent) for name, extent in form.bound.static if name not in indices)
    return replace(form, bound=replace(form.bound, static=known))


def write_nest(
    form: Form, schedule: Schedule, strides: Strides, precision: Precision
) -> tuple[str, tuple[Argument, ...], bool]:
    """The text of a kernel, its parameters, and whether it stores the finished output."""
    kernel = nest_of(form, schedule, strides, precision)
    verify_kernel(kernel, placed=True)
    # The target of a run stores two flag bits in addition to the row.
    wide = strides.wide or (segmented(form, schedule) and max(form.rows, form.terms_of_all) >= 2**29)
    printed = print_kernel(kernel, wide=wide)
    known = arguments_of(form)
    arguments = tuple(known[name] for name in (*(b.name for b in printed.buffers), *printed.sizes))
    return printed.text, arguments, finishes(form, schedule)


def arguments_of(form: Form) -> Mapping[str, Argument]:
    """What each name of a kernel's parameters stands for."""
    names = Names(form.bound.statement)
    layout = form.bound.layout
    found = {names.indices[index]: Argument("extent", index) for index in layout.indices}
    for name, rank in zip(layout.tensors, layout.ranks, strict=True):
        canonical = names.tensors[name]
        found |= {canonical: Argument("tensor", name), f"{canonical}_words": Argument("words", name)}
        found |= {f"{canonical}_{axis}": Argument("dim", name, axis) for axis in range(rank)}
        found |= {f"{canonical}_step_{axis}": Argument("stride", name, axis) for axis in range(rank)}
    rank = len(layout.output_plain)
    found |= {f"{OUTPUT}_{axis}": Argument("dim", "@out", axis) for axis in range(rank)}
    found |= {f"{INITIAL}_step_{axis}": Argument("start_stride", "", axis) for axis in range(rank)}
    found |= {f"{OUTPUT}{n}": Argument("beside", str(n - 1)) for n in range(1, len(form.beside) + 1)}
    found |= {OUTPUT: Argument("out"), INITIAL: Argument("start")}
    kinds = ("rows", "begin", "end", "target", "owner", "order", "scratch")
    return found | {kind: Argument(kind) for kind in kinds}


def _folded(kernel: Kernel, form: Form) -> Kernel:
    """The kernel with its static tables as numbers."""
    if not form.tables:
        return kernel
    names, written = Names(form.bound.statement), form.written
    points = [{names.indices[name]: value for name, value in place.items()} for place in written.places]
    tables = {names.tensors[name]: table for name, table in written.tables.items() if name in names.tensors}
    return fold_static_tables(kernel, tables, [names.indices[name] for name in written.names], points)


def _laid_out(kernel: Kernel, form: Form, strides: Strides) -> Kernel:
    """The kernel with the strides of tensors that are not contiguous."""
    names, layout = Names(form.bound.statement), form.bound.layout
    plain = {names.tensors[name]: c for name, c in zip(layout.tensors, strides.contiguous, strict=True)}
    changed: dict[Node, Node] = {}
    for buffer in kernel.inputs:
        steps = None
        if buffer.name == INITIAL and strides.start is not None:
            each = enumerate(strides.start)
            steps = tuple(Const(int(step)) if step else Size(f"{INITIAL}_step_{axis}") for axis, step in each)
        elif not plain.get(buffer.name, True):
            steps = tuple(Size(f"{buffer.name}_step_{axis}") for axis in range(len(buffer.shape)))
        if steps is not None:
            changed[buffer] = Buffer(buffer.name, buffer.dtype, buffer.shape, buffer.facts, strides=steps)
    found = kernel.replace(changed) if changed else kernel
    assert isinstance(found, Kernel)
    return found


def _tiling(form: Form, schedule: Schedule, layout: Layout, precision: Precision) -> Tiling:
    letters = {**Names(form.bound.statement).indices, OWNER: walks.ROW.name, ENTRY: walks.ENTRY.name}
    shared = shared_extents(form, schedule, layout)

    def lanes(axis: Axis | None) -> Lanes | None:
        if axis is None:
            return None
        whole = axis.first in shared and form.static[axis.first] % axis.block == 0
        return Lanes(tuple(letters[i] for i in axis.indices), axis.lanes, axis.block, axis.inner, whole)

    dot = schedule.dot and form.product is not None
    return Tiling(
        m=lanes(layout.m),
        k=lanes(layout.k),
        n=lanes(layout.n),
        grid=tuple(letters[i] for i in layout.grid),
        loops=tuple(letters[i] for i in layout.loops),
        splits=schedule.splits,
        parts=schedule.groups,
        combine="add" if form.combine == "atomic" else "set",
        product=(form.product.left, form.product.right) if dot and form.product is not None else None,
        transposed=dot and schedule.swap,
        precision=precision,
        few=frozenset(letters[i] for i in layout.loops if form.static.get(i, WORD_BITS + 1) <= WORD_BITS),
        pipeline=schedule.stages if schedule.stages >= 3 and not dot else 0,
    )
