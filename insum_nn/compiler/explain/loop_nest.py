"""A statement's meaning as a loop nest, and who says how far each loop runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.lang.bind import Extents, layout_of
from insum_nn.compiler.lang.epilogue import Epilogue
from insum_nn.compiler.lang.shapes import interval
from insum_nn.compiler.lang.syntax import Access, Statement
from insum_nn.compiler.plans.plan import Plan, Role

__all__ = [
    "ExtentSource",
    "clip",
    "epilogue_line",
    "extent_sources",
    "initial_line",
    "loop_lines",
    "loop_notes",
    "text_roles",
]


@dataclass(frozen=True, slots=True)
class ExtentSource:
    """The extent of an index or of an output axis, and who says so.

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
    has_start: bool,
    sizes: Mapping[str, int] | None,
    out_shape: Sequence[int | None] | None,
) -> list[ExtentSource]:
    """One row per index, then one per output axis that no index writes directly.

    Args:
        statement: a checked statement.
        extents: extents of a call, if there is one.
        has_start: the call has a starting value.
        sizes: the call's `sizes=`; `None` where they are not known.
        out_shape: the call's `out_shape=`, likewise.
    """
    layout = layout_of(statement)
    rows: list[ExtentSource] = []
    for position, (name, plain) in enumerate(zip(layout.indices, layout.plain, strict=True)):
        extent = extents.indices[position] if extents is not None else None
        if plain:
            source = ", ".join(f"{layout.tensors[where]} axis {axis}" for where, axis in plain)
            where, axis = plain[0]
            code = f"{layout.tensors[where]}.shape[{axis}]"
        else:
            source, code = _given(statement, name, extents is not None, has_start, sizes, out_shape)
        rows.append(ExtentSource(name, extent, source, code))
    for axis, name in enumerate(layout.output_plain):
        if name is None:
            extent = extents.output[axis] if extents is not None else None
            source, code = _output(statement, axis, extents is not None, has_start)
            rows.append(ExtentSource(f"{statement.output.name} axis {axis}", extent, source, code))
    return rows


def _given(
    statement: Statement,
    name: str,
    called: bool,
    has_start: bool,
    sizes: Mapping[str, int] | None,
    out_shape: Sequence[int | None] | None,
) -> tuple[str, str]:
    """Where the extent of an index comes from that no tensor shows."""
    by_name = ("sizes=", f'sizes["{name}"]')
    written = layout_of(statement).output_plain
    if name not in written or name in (sizes or ()):
        return by_name
    axis = written.index(name)
    source, code = _output(statement, axis, called, has_start)
    shown = has_start or (out_shape is not None and out_shape[axis] is not None)
    return (source, code) if shown else (f"sizes= or {source}", by_name[1])


def _output(statement: Statement, axis: int, called: bool, has_start: bool) -> tuple[str, str]:
    name = statement.output.name
    if has_start:
        return f"the starting value, axis {axis}", f"{name}.shape[{axis}]"
    source = f"out_shape= entry {axis}"
    return source if called else f"{source}, or a starting value", f"out_shape[{axis}]"


def text_roles(statement: Statement) -> tuple[Role, ...]:
    """What the text alone says of the indices."""
    written = {index.name for index in statement.output.indices()}
    folded = "summed" if statement.operator in ("+=", "=") else "reduced"
    return tuple(
        Role(name, "parallel", "written") if name in written else Role(name, "sequential", folded)
        for name in statement.indices()
    )


def initial_line(
    statement: Statement, shape: Sequence[int] | None, rows: Sequence[ExtentSource], has_start: bool
) -> str:
    """The line before the loops: what the output starts from."""
    name = statement.output.name
    if has_start:
        return f"{name} = copy({name})  # the starting value"
    if shape is None:
        codes = {row.name: row.code for row in rows}
        plain = layout_of(statement).output_plain
        parts = [codes[index or f"{name} axis {axis}"] for axis, index in enumerate(plain)]
    else:
        parts = [str(extent) for extent in shape]
    size = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if statement.operator in ("+=", "="):
        return f"{name} = zeros({size})"
    neutral = "-inf" if statement.operator == "max=" else "inf"
    return f"{name} = full({size}, {neutral})  # a cell that no term reaches becomes 0"


def epilogue_line(statement: Statement, epilogue: Epilogue) -> str:
    """The line after the loops: what is done to the sum."""
    name = statement.output.name
    done = name if epilogue.activation is None else f"{epilogue.activation}({name})"
    return f"{name} = {done}" + (f".to({epilogue.dtype})" if epilogue.dtype else "")


def loop_lines(
    statement: Statement, rows: Sequence[ExtentSource], roles: Sequence[Role], *, merge: bool = False, width: int = 0
) -> list[str]:
    """One line per loop, in the order of the roles, then the statement.

    Args:
        statement: a checked statement.
        rows: extents of the indices.
        roles: what each index does, outermost first.
        merge: put neighbours of one role into one line.
        width: cut each loop to so many characters; 0 for no limit.
    """
    ranges = {row.name: f"range({row.code if row.extent is None else row.extent})" for row in rows}
    groups: list[tuple[str, list[str]]] = []
    for role in roles:
        comment = f"{role.role}{f': {role.detail}' if role.detail else ''}"
        if merge and groups and groups[-1][0] == comment:
            groups[-1][1].append(role.index)
        else:
            groups.append((comment, [role.index]))
    loops: list[str] = []
    for depth, (_, names) in enumerate(groups):
        over = ", ".join(ranges[name] for name in names)
        over = over if len(names) == 1 else f"product({over})"
        line = f"{'    ' * depth}for {', '.join(names)} in {over}:"
        loops.append(clip(line, width) if width else line)
    longest = max(map(len, loops), default=0)
    lines = [f"{line:<{longest}}  # {comment}" for line, (comment, _) in zip(loops, groups, strict=True)]
    return [*lines, f"{'    ' * len(loops)}{statement}"]


def loop_notes(
    statement: Statement, plan: Plan | None, sizes: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """What the statement's text does not show: which terms take no part.

    Args:
        statement: a checked statement.
        plan: its plan, whose facts may rule out -1.
        sizes: known extents of indices; reads that stay inside because of them are not mentioned.
        shapes: known shapes of tensors.
    """
    layout = layout_of(statement)
    notes: dict[str, None] = {}
    for access in statement.accesses():
        if not _may_leave(access, sizes, shapes.get(access.name)):
            continue
        if access is statement.output:
            if plan is not None and plan.bound.drop_outside:
                notes[f"a write outside {access.name} is dropped"] = None
        else:
            notes[f"terms with {access} outside {access.name} take no part"] = None
    names = [name for name in layout.tensors if name in layout.index_tensors]
    holes = [name for name in names if plan is None or plan.bound.facts_of(name).masked is not False]
    if holes:
        notes[f"-1 in {', '.join(holes)} is 'no entry': such a term takes no part"] = None
    return list(notes)


def _may_leave(access: Access, sizes: Mapping[str, int], shape: Sequence[int] | None) -> bool:
    """Whether an affine subscript may point outside; positions from an index tensor alone were proven inside."""
    for axis, subscript in enumerate(access.subscripts):
        if subscript.plain is not None or subscript.indirect is not None:
            continue
        known = shape is not None and all(index.name in sizes for index in subscript.indices())
        if not known or any(True for _ in subscript.index_accesses()):
            return True
        low, high = interval(subscript, sizes)
        if low < 0 or (shape is not None and high >= shape[axis]):
            return True
    return False


def clip(line: str, width: int) -> str:
    """Cut a line to `width` characters.

    >>> clip("for i in range(1000):", 12)
    'for i in ...'
    """
    return line if len(line) <= width else f"{line[: width - 3]}..."
