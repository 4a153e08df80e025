"""Which extents a program is compiled for: those of a model rather than of its data."""

from __future__ import annotations

from dataclasses import replace

from insum_nn.compiler.forms import launch
from insum_nn.compiler.forms.placement import SHARED_MULTIPLE
from insum_nn.compiler.lang.bind import Bound, Extents, Layout
from insum_nn.compiler.options import Options

__all__ = ["fix_extents", "forget_extents", "is_feature", "slot_indices"]

# Longest in-group sum that is unrolled; longer ones keep a reduction loop.
_UNROLL_LIMIT = 32
# Extents that a statement was compiled for, by statement and index; past the limit an index stays dynamic.
_VALUES_LIMIT = 4
_STATEMENTS_LIMIT = 4096
_values: dict[tuple[object, str], set[int]] = {}


def forget_extents() -> None:
    """Forget the extents that statements were compiled for."""
    _values.clear()


def fix_extents(
    bound: Bound,
    extents: Extents,
    options: Options,
    tables: frozenset[str] = frozenset(),
    *,
    shared: bool = False,
) -> Bound:
    """Fix the extents that are properties of a model rather than of its data, and those of 1, which broadcast.

    These are slots of a group, and dense feature axes: axes that no index tensor has and that some tensor carries
    behind its first axis. An index that keeps changing is compiled for every extent. Axes of static tables are fixed.
    `shared`: of multiples of a tile any number is fixed, since a generated kernel takes them as arguments.
    """
    layout = bound.layout
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    fixed = {name: size for name, size in sizes.items() if size == 1}
    if options.specialize:
        accesses = [access for access in bound.statement.accesses() if access.name in tables]
        fixed |= {index.name: sizes[index.name] for access in accesses for index in access.indices()}
    if (bound.device_type == "cuda" or launch.interpreted()) and options.specialize:
        slots = {name for name in slot_indices(bound) if sizes[name] <= _UNROLL_LIMIT}
        for name in layout.indices:
            if name in slots or is_feature(layout, name) or _in_written_rows(layout, name):
                if len(_values) >= _STATEMENTS_LIMIT:
                    _values.clear()
                if shared and sizes[name] % SHARED_MULTIPLE == 0:
                    # Widths that are multiples of a tile share a kernel; others have one each.
                    fixed[name] = sizes[name]
                    continue
                seen = _values.setdefault((bound, name), set())
                if len(seen) < _VALUES_LIMIT:
                    seen.add(sizes[name])
                if sizes[name] in seen:
                    fixed[name] = sizes[name]
    return replace(bound, static=tuple(sorted(fixed.items())))


def _in_written_rows(layout: Layout, index: str) -> bool:
    """Return whether an index of no index tensor lies inside of the rows that are written, as features do."""
    places = layout.plain[layout.indices.index(index)]
    if any(layout.tensors[where] in layout.index_tensors for where, _ in places):
        return False
    written = layout.output_plain
    return index in written and None in written[: written.index(index)]


def slot_indices(bound: Bound) -> tuple[str, ...]:
    """Return the indices that count the slots of a group: summed, and an axis of an index tensor of several axes.

    Their extent is a property of the format rather than of the data, so a compiled program may fix it.
    """
    statement = bound.statement
    written = {index.name for index in statement.output.indices()}
    slots: dict[str, None] = {}
    for read in statement.reads:
        for access in read.nested():
            if len(access.subscripts) < 2:
                continue
            slots.update((s.plain, None) for s in access.subscripts if s.plain is not None and s.plain not in written)
    return tuple(slots)


def is_feature(layout: Layout, index: str) -> bool:
    """Return whether an index is a dense feature axis: of no index tensor, and not the first axis of some tensor."""
    places = layout.plain[layout.indices.index(index)]
    indexed = any(layout.tensors[where] in layout.index_tensors for where, _ in places)
    return not indexed and any(axis > 0 for _, axis in places)
