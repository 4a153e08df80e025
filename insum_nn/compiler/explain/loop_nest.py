"""Write a statement's meaning as a loop nest, and say where the extent of each loop comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.lang.bind import Extents, layout_of
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
    for position, (name, plain) in enumerate(zip(layout.indices, layout.plain, strict=True)):
        extent = extents.indices[position] if extents is not None else None
        if plain:
            source = ", ".join(f"{layout.tensors[where]} axis {axis}" for where, axis in plain)
            where, axis = plain[0]
            code = f"{layout.tensors[where]}.shape[{axis}]"
        else:
            source, code = _from_call(statement, name, extents is not None, has_initial, sizes, out_shape)
        yield ExtentSource(name, extent, source, code)
    for axis, name in enumerate(layout.output_plain):
        if name is None:
            extent = extents.output[axis] if extents is not None else None
            source, code = _output(statement, axis, extents is not None, has_initial)
            yield ExtentSource(f"{statement.output.name} axis {axis}", extent, source, code)


def _from_call(
    statement: Statement,
    name: str,
    called: bool,
    has_initial: bool,
    sizes: Mapping[str, int] | None,
    out_shape: Sequence[int | None] | None,
) -> tuple[str, str]:
    """Return where the extent of an index comes from that no tensor shows, and the code for it."""
    by_name = ("sizes=", f'sizes["{name}"]')
    written = layout_of(statement).output_plain
    if name not in written or name in (sizes or ()):
        return by_name
    axis = written.index(name)
    source, code = _output(statement, axis, called, has_initial)
    shown = has_initial or (out_shape is not None and out_shape[axis] is not None)
    return (source, code) if shown else (f"sizes= or {source}", by_name[1])


def _output(statement: Statement, axis: int, called: bool, has_initial: bool) -> tuple[str, str]:
    name = statement.output.name
    if has_initial:
        return f"the initial value, axis {axis}", f"{name}.shape[{axis}]"
    source = f"out_shape= entry {axis}"
    return source if called else f"{source}, or an initial value", f"out_shape[{axis}]"


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
    *loops, body = _loop_lines(statement, rows)
    inside = body[: len(body) - len(body.lstrip())]
    first = _initial_line(statement, shape, rows, has_initial)
    last = [_epilogue_line(statement, epilogue)] if epilogue else []
    return [first, *loops, *(f"{inside}# {note}" for note in notes), body, *last]


def _roles(statement: Statement) -> dict[str, str]:
    """Return what each index does, outermost first."""
    written = {index.name for index in statement.output.indices()}
    summed = "summed" if statement.combining.adds else "reduced"
    return {name: "parallel: written" if name in written else f"sequential: {summed}" for name in statement.indices()}


def _initial_line(
    statement: Statement, shape: Sequence[int] | None, rows: Sequence[ExtentSource], has_initial: bool
) -> str:
    """Return the line before the loops: the output's initial value."""
    name = statement.output.name
    if has_initial:
        return f"{name} = copy({name})  # the initial value"
    if shape is None:
        codes = {row.name: row.code for row in rows}
        plain = layout_of(statement).output_plain
        parts = [codes[index or f"{name} axis {axis}"] for axis, index in enumerate(plain)]
    else:
        parts = [str(extent) for extent in shape]
    size = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if statement.combining.adds:
        return f"{name} = zeros({size})"
    return f"{name} = full({size}, {statement.combining.identity})  # a cell without a term becomes 0"


def _epilogue_line(statement: Statement, epilogue: Epilogue) -> str:
    """Return the line after the loops: the epilogue of the sum."""
    name = statement.output.name
    done = name if epilogue.activation is None else f"{epilogue.activation}({name})"
    return f"{name} = {done}" + (f".to({epilogue.dtype})" if epilogue.dtype else "")


def _loop_lines(statement: Statement, rows: Sequence[ExtentSource]) -> list[str]:
    """Return one line per loop, written indices outside, then the statement; `rows` has the extents of the indices."""
    ranges = {row.name: f"range({row.code if row.extent is None else row.extent})" for row in rows}
    roles = _roles(statement)
    loops = [f"{'    ' * depth}for {name} in {ranges[name]}:" for depth, name in enumerate(roles)]
    longest = max(map(len, loops), default=0)
    lines = [f"{line:<{longest}}  # {role}" for line, role in zip(loops, roles.values(), strict=True)]
    return [*lines, f"{'    ' * len(loops)}{statement}"]


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
