"""Kernels of several outputs: the form of the outputs that one walk over shared rows can make too.

The gradients of one product read the same rows, those of the gradient of its output most of all. A program that walks
the terms of a row `Dst[e] = i` reads `dZ[i]` once, and passes all that these are made of:

    dX[Src[e],i,u] += dZ[Dst[e],k,u] * Y[e,j] * W[e,l,u]
    dY[e,j]        += dZ[Dst[e],k,u] * X[Src[e],i,u] * W[e,l,u]
    dW[e,l,u]      += dZ[Dst[e],k,u] * X[Src[e],i,u] * Y[e,j]

It writes rows of `dY` and `dW` as it goes, and adds to rows of `dX`, which other programs add to as well. Walking the
terms by `Src` instead it owns rows of `dX`, adds to nothing, and reads a row of `dZ` for every term.

Several statements may add to one output, as those do that a second derivative is the sum of. Their terms are then terms
of one sum, which is written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from insum_nn.compiler.ir.build import OUTPUT, Names, build
from insum_nn.compiler.ir.canonical import names_of
from insum_nn.compiler.ir.graph import loops_of
from insum_nn.compiler.ir.nodes import Buffer, Const, Index, Kernel, Load, Node, Size
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.syntax import Access, Statement
from insum_nn.compiler.passes.fuse_outputs import fuse_outputs
from insum_nn.compiler.schedule.coverage import coverage_of
from insum_nn.compiler.schedule.form import ROW_LOOP, AdditionalOutput, Form, FormError, input_of
from insum_nn.compiler.schedule.output_strategy import in_order
from insum_nn.compiler.schedule.placement import adds_rows, element_axes
from insum_nn.compiler.schedule.plan import Plan
from insum_nn.dtypes import is_widened

__all__ = ["Memory", "Walk", "fused_form", "indices_named", "is_owned", "memory_of", "read_at", "union"]

Walk = tuple[str, str]
"""An index tensor with an entry for each term, and the index of its entries."""


def fused_form(
    walk: Walk,
    forms: Sequence[tuple[Form, Extents]],
    outputs: Sequence[int],
    bound: Bound,
    sizes: Mapping[str, int],
    rows: int,
    plan: Plan,
    *,
    deterministic: bool,
) -> Form:
    """The form of several statements.

    Args:
        walk: whose rows a program owns.
        forms: of each statement, and its sizes; of those whose rows are the walk's own, first.
        outputs: the number of the output that each of them adds to, from 0 on in their order.
        bound: of a statement that writes what the first one does, or a number for each row, and reads what any reads.
        sizes: extents of the first call.
        rows: the number of the walk's rows.
        plan: what was decided for it.
        deterministic: several programs must not add to one cell.

    Raises:
        FormError: one kernel cannot compute them.
    """
    tensor, entry = walk
    names = names_of(bound.statement)
    first = forms[0][0]
    owns = is_owned(first, walk)
    axis = first.row_axis if owns else 0
    columns = indices_named(first, first.parallel, without=entry) or indices_named(first, first.reduce)
    statements = [form.bound.statement for form, _ in forms]
    written: list[AdditionalOutput | None] = [None] * len({*outputs})
    for (form, extents), number in zip(forms, outputs, strict=True):
        if owns and number == 0:
            if not is_owned(form, walk):
                raise FormError(f"{form.bound.statement} sums other terms than those of rows of {tensor}")
            continue
        found, earlier = _additional(form, extents, walk, columns, statements), written[number]
        if earlier is not None:
            if replace(earlier, reduced=found.reduced) != found:
                raise FormError(f"{form.bound.statement} adds to an output of another kind")
            found = replace(found, reduced=found.reduced or earlier.reduced)
        written[number] = found
    additional = tuple([each for each in written if each is not None])
    shared = build(bound)
    row_index = Load(input_of(shared, names.tensors[tensor]), (Index(names.indices[entry]),))

    form = Form(
        bound,
        cache(lambda: _fused([form for form, _ in forms], outputs, additional, shared, names)),
        {**{names.indices[name]: extent for name, extent in sizes.items()}, ROW_LOOP: rows},
        "own",
        row_index,
        axis,
        (names.indices[entry],),
        not in_order(row_index),
        (ROW_LOOP, *(names.indices[name] for name in columns)),
        (),
        frozenset(),
        plan,
        additional,
    )
    lanes = element_axes(form)[1]
    if len(columns) != 1 or (ROW_LOOP, *lanes) != form.parallel or lanes[0] not in form.static:
        raise FormError("there are no columns of a known number")
    if any(each.scattered for each in additional) and (deterministic or is_widened(bound.dtype)):
        raise FormError("several terms meet in one cell, in no fixed order or in fp16 or bf16")
    return form


def indices_named(form: Form, letters: Sequence[str], *, without: str = "") -> list[str]:
    """Indices of a form by the names of its statement; the loop over rows has none."""
    names = {letter: name for name, letter in names_of(form.bound.statement).indices.items()}
    return [names[letter] for letter in letters if letter != ROW_LOOP and names[letter] != without]


def is_owned(form: Form, walk: Walk) -> bool:
    """Whether a statement sums the rows of a walk, over its terms alone."""
    return (
        form.row_index is not None
        and not form.reduce
        and _row_tensor(form) == walk[0]
        and indices_named(form, form.entries) == [walk[1]]
    )


def _row_tensor(form: Form) -> str:
    read = form.bound.statement.output.subscripts[form.row_axis].indirect
    assert read is not None
    return read.name


def _additional(
    form: Form, extents: Extents, walk: Walk, columns: Sequence[str], statements: Sequence[Statement]
) -> AdditionalOutput:
    """An output that has a row for each term, or rows that another index tensor owns.

    Raises:
        FormError: it is of another kind.
    """
    statement = form.bound.statement
    tensor, entry = walk
    if {*indices_named(form, (*form.parallel, *form.reduce), without=entry)} != {*columns}:
        raise FormError(f"{statement} goes over other indices")
    like, scattered = (tensor, 0), form.strategy == "own"
    if scattered:
        if indices_named(form, form.entries) != [entry] or form.reduce or form.row_axis:
            raise FormError(f"{statement} sums other terms")
        like = read_at(statements, (_row_tensor(form), entry))
    elif form.strategy != "direct" or statement.output.subscripts[0].plain != entry:
        raise FormError(f"{statement} has no row for each term")
    elif not coverage_of(form)(*extents):
        raise FormError(f"{statement} leaves cells out")
    if any(s.plain is None and s.indirect is None for s in statement.output.subscripts):
        raise FormError(f"{statement} may write outside of its output")
    return AdditionalOutput(extents.output[1:], bool(form.reduce), like, scattered)


def read_at(statements: Sequence[Statement], rows: Walk) -> tuple[str, int]:
    """A tensor that is read at the rows that an index tensor says, and its axis of rows.

    Raises:
        FormError: there is none, so that nothing tells how many rows there are.
    """
    row = f"{rows[0]}[{rows[1]}]"
    for access in (access for statement in statements for access in statement.reads):
        for axis, subscript in enumerate(access.subscripts):
            if str(subscript.indirect) == row:
                return access.name, axis
    raise FormError(f"no tensor is read at rows of {row}")


def union(
    parts: Sequence[tuple[Form, Extents, Sequence[Sequence[int]]]], walk: Walk, *, owns: bool
) -> tuple[str, dict[str, int]]:
    """A statement that reads what any of several reads, and its known extents.

    It writes what the first one writes, or where no output has rows of the walk, a number for each row. Where a static
    tensor addresses an axis, an index of its own takes its place.

    Args:
        parts: the form of each statement, its sizes, and the shapes of its tensors.
        walk: by whose entries terms are walked.
        owns: the first one sums its rows.
    """
    layouts = [form.bound.layout for form, _, _ in parts]
    taken = {name for layout in layouts for name in (*layout.tensors, *layout.indices)}
    taken |= {form.bound.statement.output.name for form, _, _ in parts}
    static: dict[str, int] = {}
    reads: dict[str, str] = {}
    output = f"{fresh_name('Rows', taken)}[{walk[0]}[{walk[1]}]]"
    if owns:
        form, extents, _ = parts[0]
        written = form.bound.statement.output
        fixed = dict(form.bound.static)
        static |= {s.plain: fixed[s.plain] for s in written.subscripts if s.plain in fixed}
        output = _without_tables(written, form.tables, extents.output, taken, static)
    for (form, _, shapes), layout in zip(parts, layouts, strict=True):
        left = indices_named(form, (*form.parallel, *form.reduce))
        static |= {index: extent for index, extent in form.bound.static if index in left}
        for access in form.bound.statement.reads:
            if access.name not in form.tables and access.name not in reads:
                shape = shapes[layout.tensors.index(access.name)]
                reads[access.name] = _without_tables(access, form.tables, shape, taken, static)
    return f"{output} += {' * '.join(reads.values())}", static


def _without_tables(
    access: Access, tables: frozenset[str], shape: Sequence[int], taken: set[str], static: dict[str, int]
) -> str:
    """An access without static tensors."""
    parts: list[str] = []
    for axis, subscript in enumerate(access.subscripts):
        if any(each.name in tables for each in subscript.index_accesses()):
            name = fresh_name("axis", taken)
            taken.add(name)
            static[name] = shape[axis]
            parts.append(name)
        else:
            parts.append(str(subscript))
    return f"{access.name}[{','.join(parts)}]" if parts else access.name


def _fused(
    forms: Sequence[Form],
    numbers: Sequence[int],
    additional: Sequence[AdditionalOutput],
    shared: Kernel,
    names: Names,
) -> Kernel:
    """The algorithm of all outputs, in the names of the statement that reads what any of them reads."""
    buffers = {b.name: b for b in shared.inputs}
    written = shared.results[0].buffer
    outputs = [written] if len(additional) < len({*numbers}) else []
    for number, each in enumerate(additional, 1):
        tensor, axis = each.like
        shape = (buffers[names.tensors[tensor]].shape[axis], *map(Const, each.shape))
        outputs.append(Buffer(f"{OUTPUT}{number}", written.dtype, shape))
    pairs = zip(forms, numbers, strict=True)
    return fuse_outputs([_renamed(form, shared, names, outputs[number]) for form, number in pairs])


def _renamed(form: Form, shared: Kernel, names: Names, output: Buffer) -> Kernel:
    """The kernel of one of several outputs, in the names and with the extents of the kernel of all."""
    own, kernel = names_of(form.bound.statement), form.algorithm
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


@dataclass(frozen=True, slots=True)
class Memory:
    """What memory an additional output needs.

    Attributes:
        place: the position of a tensor, and its axis, with as many entries as this output has rows.
        axis: that axis.
        shape: of a row.
        zero: cells are added to.
    """

    place: int
    axis: int
    shape: tuple[int, ...]
    zero: bool


def memory_of(form: Form, schedule: Schedule) -> tuple[Memory, ...]:
    """The memory of each additional output."""
    if not form.additional:
        return ()
    adds = form.plan.get(("adds rows", schedule), lambda: adds_rows(form, schedule))
    names = form.bound.layout.tensors
    return tuple(
        Memory(names.index(each.like[0]), each.like[1], each.shape, each.scattered or (adds and each.reduced))
        for each in form.additional
    )
