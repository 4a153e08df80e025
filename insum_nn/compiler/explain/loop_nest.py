"""Write a statement's meaning as a loop nest, and say where the extent of each loop comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.lang.bind import Extents, layout_of, show_shape
from insum_nn.compiler.lang.epilogue import Epilogue
from insum_nn.compiler.lang.shapes import interval
from insum_nn.compiler.lang.syntax import Access, Statement
from insum_nn.facts import UNKNOWN, IndexFacts

__all__ = ["ExtentSource", "extent_sources", "loop_notes", "nest_lines"]


@dataclass(frozen=True, slots=True)
class ExtentSource:
    """The extent of an index or of an output axis, and where it comes from.

    Attributes:
        name: an index, or an output axis such as `C axis 0`.
        extent: its size; `None` where the text alone does not say.
        source: the axes or arguments that show it.
        code: a Python expression for it.
    """

    name: str
    extent: int | None
    source: str
    code: str


def extent_sources(
    statement: Statement,
    extents: Extents | None,
    has_initial: bool,
    sizes: Mapping[str, int] | None,
    out_shape: Sequence[int | None] | None,
) -> Iterator[ExtentSource]:
    """Yield one row per index, then one per output axis that no index writes directly.

    Args:
        statement: a checked statement.
        extents: extents of a call, if there is one.
        has_initial: the call has an initial value.
        sizes: the call's `sizes=`; `None` where they are not known.
        out_shape: the call's `out_shape=`, likewise.
    """
    layout = layout_of(statement)

    def of_axis(axis: int) -> tuple[str, str]:
        """Where an axis of the output gets its extent that nothing else shows, and the code for it."""
        if has_initial:
            return f"the initial value, axis {axis}", f"{statement.output.name}.shape[{axis}]"
        source = f"out_shape= entry {axis}"
        return source if extents is not None else f"{source}, or an initial value", f"out_shape[{axis}]"

    def of_index(name: str) -> tuple[str, str]:
        """The same of an index that no tensor shows."""
        if name not in layout.output_plain or name in (sizes or ()):
            return "sizes=", f'sizes["{name}"]'
        axis = layout.output_plain.index(name)
        source, code = of_axis(axis)
        shown = has_initial or (out_shape is not None and out_shape[axis] is not None)
        return (source, code) if shown else (f"sizes= or {source}", f'sizes["{name}"]')

    for position, (name, plain) in enumerate(zip(layout.indices, layout.plain, strict=True)):
        extent = extents.indices[position] if extents is not None else None
        axes = [(layout.tensors[where], axis) for where, axis in plain]
        source = ", ".join(f"{tensor} axis {axis}" for tensor, axis in axes)
        source, code = (source, "{}.shape[{}]".format(*axes[0])) if axes else of_index(name)
        yield ExtentSource(name, extent, source, code)
    for axis, name in enumerate(layout.output_plain):
        if name is None:
            extent = extents.output[axis] if extents is not None else None
            yield ExtentSource(f"{statement.output.name} axis {axis}", extent, *of_axis(axis))


def nest_lines(
    statement: Statement,
    rows: Sequence[ExtentSource],
    shape: Sequence[int] | None,
    notes: Sequence[str],
    epilogue: Epilogue,
    *,
    has_initial: bool,
) -> list[str]:
    """Return the lines of the loop nest.

    Args:
        statement: a checked statement.
        rows: where extents come from.
        shape: the output's; `None` where it is not known.
        notes: what `loop_notes` found.
        epilogue: what follows the sum.
        has_initial: the call has an initial value.
    """
    name, indices, mode = statement.output.name, statement.indices(), statement.combining
    codes = {row.name: row.code for row in rows}
    plain = layout_of(statement).output_plain
    size = show_shape(
        [codes[index or f"{name} axis {axis}"] for axis, index in enumerate(plain)] if shape is None else shape
    )
    first = f"{name} = zeros({size})"
    if has_initial:
        first = f"{name} = copy({name})  # the initial value"
    elif not mode.adds:
        first = f"{name} = full({size}, {mode.identity})  # a cell without a term becomes 0"
    ranges = {row.name: row.code if row.extent is None else row.extent for row in rows}
    loops = [f"{'    ' * depth}for {index} in range({ranges[index]}):" for depth, index in enumerate(indices)]
    longest, written = max(map(len, loops), default=0), {index.name for index in statement.output.indices()}
    roles = {True: "parallel: written", False: f"sequential: {'summed' if mode.adds else 'reduced'}"}
    loops = [f"{line:<{longest}}  # {roles[index in written]}" for line, index in zip(loops, indices, strict=True)]
    body = [f"{'    ' * len(loops)}{line}" for line in (*(f"# {note}" for note in notes), statement)]
    if epilogue:
        done = name if epilogue.activation is None else f"{epilogue.activation}({name})"
        body.append(f"{name} = {done}" + (f".to({epilogue.dtype})" if epilogue.dtype else ""))
    return [first, *loops, *body]


def loop_notes(
    statement: Statement,
    facts: Mapping[str, IndexFacts],
    sizes: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    *,
    drop_outside: bool,
) -> list[str]:
    """Return what the statement's text does not show: which terms do not contribute.

    Args:
        statement: a checked statement.
        facts: what is known of its index tensors; it may rule out -1.
        sizes: known extents of indices; reads that they keep in bounds are not mentioned.
        shapes: known shapes of tensors.
        drop_outside: writes out of bounds are dropped.
    """
    layout = layout_of(statement)
    notes: dict[str, None] = {}
    for access in statement.accesses():
        if not _may_leave(access, sizes, shapes.get(access.name)):
            continue
        if access is statement.output:
            if drop_outside:
                notes[f"writes outside {access.name} are dropped"] = None
        else:
            notes[f"terms with {access} out of bounds do not contribute"] = None
    names = [name for name in layout.tensors if name in layout.index_tensors]
    masked = [name for name in names if facts.get(name, UNKNOWN).masked is not False]
    if masked:
        notes[f"terms with a missing entry (-1) in {', '.join(masked)} do not contribute"] = None
    return list(notes)


def _may_leave(access: Access, sizes: Mapping[str, int], shape: Sequence[int] | None) -> bool:
    """Return whether an affine subscript may be out of bounds; entries of a bare index tensor are validated."""
    for axis, subscript in enumerate(access.subscripts):
        if subscript.plain is not None or subscript.indirect is not None:
            continue
        bounded = shape is not None and all(index.name in sizes for index in subscript.indices())
        if not bounded or any(True for _ in subscript.index_accesses()):
            return True
        low, high = interval(subscript, sizes)
        if low < 0 or (shape is not None and high >= shape[axis]):
            return True
    return False
