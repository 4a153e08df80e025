"""Infer the extent of every index and the shape of the output, and check what depends on sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents, layout_of, show_dtype, show_shape
from insum_nn.compiler.lang.limits import INT32_AXIS, INT64_MAX, limits_of
from insum_nn.compiler.lang.printed import function_of_lines
from insum_nn.compiler.lang.syntax import Access, Index, Statement, Subscript
from insum_nn.errors import (
    InsumError,
    InsumOverflowError,
    InsumRangeError,
    InsumShapeError,
    Span,
    plural,
    raise_collected,
)

__all__ = ["Agreement", "agreement_lines", "agreement_of", "check_extents", "interval", "overflow", "resolve_extents"]


def resolve_extents(
    statement: Statement,
    tensors: Sequence[Tensor],
    initial: Tensor | None,
    sizes: Mapping[str, int],
    out_shape: Sequence[int | None] | None,
) -> Extents:
    """Find the extent of every index and the shape of the output.

    Args:
        statement: a statement whose ranks were checked.
        tensors: the tensors read, in the layout's order.
        initial: the initial value; its shape is the output's, or broadcasts to it.
        sizes: extents given by name.
        out_shape: the output's shape; `None` entries are inferred.

    Raises:
        InsumShapeError: an extent is missing or has two values.
        InsumRangeError: an affine write is out of bounds.
        InsumOverflowError: an extent does not fit the index type that must address it.
    """
    layout, agree = layout_of(statement), agreement_of(statement)
    agreed = agree(tensors, sizes, out_shape)
    if agreed is not None and (initial is None or _lies_along(initial.shape, agreed.output)):
        return agreed
    checked: dict[str, int] = {}
    for name, extent in sizes.items():
        if name not in layout.indices:
            raise InsumShapeError(
                f"sizes= names '{name}', which is no index of the statement",
                expression=statement.text,
                details=[f"indices: {', '.join(layout.indices) or 'none'}"],
                fix="drop it, or correct its name.",
                index=name,
            )
        checked[name] = _check_extent(statement, f"sizes['{name}']", extent, _spans(statement, name))
    given = _declared_shape(statement, initial, out_shape, checked)
    agreed = agree(tensors, checked, given)
    if agreed is None:
        raise_collected(_extent_faults(statement, tensors, initial, sizes, out_shape, given))
        raise _unknown_axes(statement, given)
    return agreed


def _spans(statement: Statement, index: str) -> list[Span]:
    return [i.span for access in (statement.output, *statement.reads) for i in access.indices() if i.name == index]


def _lies_along(initial: torch.Size, output: Sequence[int]) -> bool:
    """Whether an initial value has all axes of the output, or the last one."""
    # Shapes of other lengths are not compared: a symbolic size that meets a number would be kept from being it.
    return len(initial) in (1, len(output)) and initial == output[-len(initial) :]


Agreement = Callable[[Sequence[Tensor], Mapping[str, int], Sequence[int | None] | None], Extents | None]


@lru_cache(maxsize=1024)
def agreement_of(statement: Statement) -> Agreement:
    """Return what finds the extents of a call where all that is given agrees, and `None` where it does not.

    It is given the tensors read, in the layout's order, extents by name, and the output's shape, of which `None` is
    inferred; what it returns is right, if it returns anything. 3.0 and True are equal to sizes, and are none.
    """
    lines, names = agreement_lines(statement)
    tensors = "".join(f"t{n}, " for n in range(len(layout_of(statement).ranks)))
    head = ["def agree(tensors, sizes, shape):", f"({tensors}) = tensors"]
    return function_of_lines(
        [*head, *lines, "return Extents(indices, output)"], {**names, "Extents": Extents}, f"sizes of {statement.text}"
    )


def agreement_lines(statement: Statement) -> tuple[list[str], dict[str, Any]]:
    """Return what finds the extents of a call, as lines of a function that returns `None` where something disagrees.

    Returns:
        Lines, which make `indices` and `output` of `sizes`, `shape` and tensors t0, .., and what they read besides.
    """
    layout = layout_of(statement)
    axes = [[f"a{n}_{axis}" for axis in range(rank)] for n, rank in enumerate(layout.ranks)]
    written = [f"o{axis}" for axis in range(len(layout.output_places))]
    lines = ["try:"]
    lines += [f"    ({', '.join(names)},) = t{n}.shape" for n, names in enumerate(axes) if names]
    lines += [f"    ({', '.join(written)},) = none if shape is None else shape"] if written else []
    lines += ["    pass", "except ValueError:", "    return None"]
    wrong = [f"t{n}.ndim" for n, names in enumerate(axes) if not names]
    wrong += [] if written else ["shape"]
    extents: list[str] = []
    for place, (name, places, own) in enumerate(zip(layout.indices, layout.plain, layout.written, strict=True)):
        if places:
            first, *others = [axes[n][axis] for n, axis in places]
            extents.append(first)
            wrong += [f"{first} != {other}" for other in others]
            wrong += [f"(sizes and sizes.get({name!r}, {first}) != {first})"]
            wrong += [f"(o{axis} is not None and o{axis} != {first})" for axis in own]
            continue
        # What no tensor shows.
        extents.append(f"x{place}")
        lines.append(f"x{place} = sizes.get({name!r})")
        for axis in own:
            lines += [f"if x{place} is None:", f"    x{place} = o{axis}"]
            wrong.append(f"(o{axis} is not None and o{axis} != x{place})")
        wrong.append(f"x{place} is None")
    outputs: list[str] = []
    for name, place in zip(written, layout.output_places, strict=True):
        # A symbolic size is not compared.
        valid = f"(type({name}) is int and 0 <= {name} <= {INT64_MAX} or type({name}) is SymInt)"
        if place is None:
            wrong.append(f"not {valid}")
            outputs.append(name)
        else:
            wrong.append(f"not ({name} is None or {valid})")
            # A symbolic size stays what it was given as.
            outputs.append(f"{extents[place]} if {name} is None else {name}")
    wrong.append("(sizes and unusual(sizes))")
    lines += [f"if {' or '.join(wrong)}:", "    return None"]
    lines += [f"indices = ({''.join(f'{each}, ' for each in extents)})"]
    lines += [f"output = ({''.join(f'{each}, ' for each in outputs)})"]

    def unusual(sizes: Mapping[str, Any]) -> bool:
        indices = layout.indices
        usual = (type(e) is torch.SymInt or (type(e) is int and 0 <= e <= INT64_MAX) for e in sizes.values())
        return not sizes.keys() <= {*indices} or not all(usual)

    return lines, {"none": (None,) * len(written), "unusual": unusual, "SymInt": torch.SymInt}


def _check_extent(statement: Statement, what: str, extent: Any, spans: Sequence[Span]) -> Any:
    """Return an extent that a caller gives: a symbolic size, or an int of no class derived from it."""
    if isinstance(extent, bool) or not isinstance(extent, int | torch.SymInt):
        raise InsumShapeError(
            f"{what} must be an int, got {type(extent).__name__}",
            expression=statement.text,
            spans=spans,
            fix="pass a non-negative int.",
            got=extent,
        )
    if isinstance(extent, int) and not 0 <= extent <= INT64_MAX:
        raise InsumShapeError(
            f"{what} must lie between 0 and 2**63 - 1, got {extent}",
            expression=statement.text,
            spans=spans,
            fix="pass a non-negative int of 64 bits.",
            got=extent,
        )
    return int(extent) if isinstance(extent, int) else extent


def _declared_shape(
    statement: Statement,
    initial: Tensor | None,
    out_shape: Sequence[int | None] | None,
    sizes: Mapping[str, int],
) -> tuple[int | None, ...]:
    """Return the output's shape as far as `out_shape` and the initial value give it."""
    rank = len(statement.output.subscripts)
    if out_shape is None:
        return _initial_shape(statement, initial, (None,) * rank, sizes)
    if len(out_shape) != rank:
        raise InsumShapeError(
            f"out_shape has {plural(len(out_shape), 'entry')}, but '{statement.output.name}' has "
            f"{plural(rank, 'subscript')}",
            expression=statement.text,
            spans=[statement.output.span],
            details=[f"out_shape = {tuple(out_shape)}"],
            fix="give one entry per subscript, None where it can be inferred.",
            expected=rank,
            got=len(out_shape),
        )
    axes = enumerate(zip(statement.output.subscripts, out_shape, strict=True))
    out_shape = [e if e is None else _check_extent(statement, f"out_shape[{n}]", e, [s.span]) for n, (s, e) in axes]
    shape = _initial_shape(statement, initial, out_shape, sizes)
    for axis, (own, extent) in enumerate(zip(shape, out_shape, strict=True)):
        if own is not extent and extent is not None and own != extent:
            raise InsumShapeError(
                f"out_shape[{axis}] is {extent}, but the tensor passed for '{statement.output.name}' has {own}",
                expression=statement.text,
                spans=[statement.output.subscripts[axis].span],
                fix="drop out_shape=; the initial value gives the shape.",
                expected=extent,
                got=own,
            )
    return shape


def _initial_shape(
    statement: Statement, initial: Tensor | None, expected: Sequence[int | None], sizes: Mapping[str, int]
) -> tuple[int | None, ...]:
    """Return the initial value's shape, with `expected` along axes that it lacks or broadcasts along."""
    if initial is None:
        return tuple(expected)
    layout, missing = layout_of(statement), len(expected) - initial.ndim
    known = {name for name, read in zip(layout.indices, layout.plain, strict=True) if read or name in sizes}
    shape: list[int | None] = []
    for axis, (name, extent) in enumerate(zip(layout.output_plain, expected, strict=True)):
        own = initial.shape[axis - missing] if axis >= missing else None
        if own is None or (own == 1 and (extent is not None or name in known)):
            own = extent
        shape.append(own)
    return tuple(shape)


def _extent_faults(
    statement: Statement,
    tensors: Sequence[Tensor],
    initial: Tensor | None,
    sizes: Mapping[str, int],
    out_shape: Sequence[int | None] | None,
    given: Sequence[int | None],
) -> Iterator[InsumError]:
    layout, missing = layout_of(statement), list[str]()
    named = dict(zip(layout.tensors, tensors, strict=True))
    for name in layout.indices:
        values: list[int] = []
        spans: list[Span] = []
        details: list[str] = []
        for access in statement.accesses():
            for axis, subscript in enumerate(access.subscripts):
                if subscript.plain != name:
                    continue
                is_output = access is statement.output
                extent = given[axis] if is_output else named[access.name].shape[axis]
                if extent is None:
                    continue
                values.append(extent)
                spans.append(subscript.span)
                if is_output and initial is None:
                    source = f"out_shape[{axis}]"
                else:
                    tensor = initial if is_output and initial is not None else named[access.name]
                    source = f"{access.name} is {show_shape(tensor.shape)}, {show_dtype(tensor.dtype)}"
                details.append(f"{access.name} axis {axis}: {name} = {extent}   ({source})")
        explicit = [f"sizes['{name}']"] if name in sizes else []
        if out_shape is not None and initial is None:
            entries = zip(layout.output_plain, out_shape, strict=True)
            explicit += [f"out_shape[{axis}]" for axis, (own, e) in enumerate(entries) if own == name and e is not None]
        if name in sizes:
            values.append(sizes[name])
            details.append(f"sizes: {name} = {sizes[name]}")
        distinct = list(dict.fromkeys(values))
        if not distinct:
            missing.append(name)
        if len(distinct) > 1:
            yield InsumShapeError(
                f"index '{name}' has {_count(len(distinct))} extents, {_and(list(map(str, distinct)))}",
                expression=statement.text,
                spans=spans,
                details=details,
                fix=f"leave out {_and(explicit)}, or pass tensors that agree with it."
                if explicit
                else "make these axes equally long, or index them with different letters.",
                index=name,
                got=tuple(distinct),
            )
    for name in missing:
        yield InsumShapeError(
            f"index '{name}' has no extent",
            expression=statement.text,
            spans=_spans(statement, name),
            details=[f"'{name}' indexes no axis directly, so no tensor says how far it runs"],
            fix=f"pass sizes={{'{name}': ...}}, or out_shape= where '{name}' alone writes an axis.",
            index=name,
        )


def _count(number: int) -> str:
    return {2: "two", 3: "three", 4: "four"}.get(number, str(number))


def _and(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _unknown_axes(statement: Statement, given: Sequence[int | None]) -> InsumShapeError:
    """Return the error of an output some of whose axes nothing gives an extent."""
    output = statement.output
    lacking = [e is None and s.plain is None for e, s in zip(given, output.subscripts, strict=True)]
    unknown = [axis for axis, lacks in enumerate(lacking) if lacks]
    many = len(unknown) > 1
    return InsumShapeError(
        f"the extent{'s' * many} of '{output.name}' along ax{'es' if many else 'is'} {_and(list(map(str, unknown)))} "
        f"{'are' if many else 'is'} unknown",
        expression=statement.text,
        spans=[output.subscripts[axis].span for axis in unknown],
        details=[f"'{output.subscripts[axis]}' does not say how many entries the axis has" for axis in unknown],
        fix=f"pass out_shape=({', '.join('extent' if lacks else 'None' for lacks in lacking)}"
        f"{',' if len(lacking) == 1 else ''}), or an initial value for '{output.name}'.",
        axis=unknown[0],
        axes=tuple(unknown),
    )


def check_extents(statement: Statement, tensors: Sequence[Tensor], extents: Extents, *, drop_outside: bool) -> None:
    """Check what depends on sizes alone: constant subscripts, affine writes, and integer ranges.

    Raises:
        InsumRangeError: a constant subscript or an affine write is out of bounds.
        InsumOverflowError: an index tensor's dtype, or int64 arithmetic, cannot address an axis.
    """
    if not limits_of(statement).hold(tensors, extents, drop_outside=drop_outside):
        raise_collected(_size_faults(statement, tensors, extents, drop_outside=drop_outside))


def _size_faults(
    statement: Statement, tensors: Sequence[Tensor], extents: Extents, *, drop_outside: bool
) -> Iterator[InsumError]:
    layout = layout_of(statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    for access in statement.accesses():
        is_output = access is statement.output
        for axis, subscript in enumerate(access.subscripts):
            if subscript.plain is not None:
                continue
            extent, inner = extents.output[axis] if is_output else named[access.name].shape[axis], subscript.indirect
            if inner is not None and named[inner.name].dtype == torch.int32 and extent > INT32_AXIS:
                yield InsumOverflowError(
                    f"index tensor '{inner.name}' is int32, which cannot address axis {axis} of '{access.name}'",
                    expression=statement.text,
                    spans=[inner.span],
                    details=[f"expected an extent of at most {INT32_AXIS}; got {extent}"],
                    fix=f"pass {inner.name}.long().",
                    tensor=inner.name,
                    got=extent,
                )
            # Entries are below 2**31 or 2**63; any coefficient that keeps an int32 entry inside int64 is accepted.
            entries = {each.name: (-INT32_AXIS, INT32_AXIS) for each in subscript.index_accesses()}
            low, high = interval(subscript, sizes, entries)
            if low < -INT64_MAX or high > INT64_MAX:
                yield overflow(statement, subscript, low, high, "", "coefficients or extents")
            # A constant out of bounds is an error even where nothing is iterated.
            written = is_output and not drop_outside and not entries and 0 not in extents.indices
            if (written or not subscript.terms) and not (0 <= low and high < extent):
                yield _outside(statement, access, axis, extent, sizes, low, high)


def interval(
    subscript: Subscript, sizes: Mapping[str, int], entries: Mapping[str, tuple[int, int]] = MappingProxyType({})
) -> tuple[int, int]:
    """Return the smallest and largest value of a subscript; `entries`: those of its index tensors."""
    low = high = subscript.offset
    for term in subscript.terms:
        name = term.atom.name
        first, last = (0, sizes[name] - 1) if isinstance(term.atom, Index) else entries[name]
        ends = term.coefficient * first, term.coefficient * last
        low, high = low + min(ends), high + max(ends)
    return low, high


def overflow(
    statement: Statement, subscript: Subscript, low: int, high: int, where: str, smaller: str
) -> InsumOverflowError:
    """Return the error of a subscript that reaches too far, `where`; what is to be `smaller`."""
    return InsumOverflowError(
        f"the subscript '{subscript}' overflows int64",
        expression=statement.text,
        spans=[subscript.span],
        details=[f"{where}it reaches from {low} to {high}"],
        fix=f"use smaller {smaller}.",
        got=(low, high),
    )


def _outside(
    statement: Statement, access: Access, axis: int, extent: int, sizes: Mapping[str, int], low: int, high: int
) -> InsumRangeError:
    """Return the error of a constant subscript, or of one of indices that is written."""
    subscript = access.subscripts[axis]
    constant = not subscript.terms
    reach = ", ".join(f"{name} = {sizes[name]}" for name in dict.fromkeys(i.name for i in subscript.indices()))
    fix = f"give '{access.name}' at least {high + 1} entries along axis {axis}"
    if low < 0:
        last = f"the last entry is {extent - 1}" if extent else "the axis has no entries"
        fix = f"count from 0: negative subscripts do not wrap, and {last}."
        fix = fix if constant else "shift the subscript with an offset so that it starts at 0"
    elif constant:
        fix += ", or correct the constant."
    if not constant:
        fix += ", or pass drop_outside=True if it is a derivative, whose writes outside are dropped."
    return InsumRangeError(
        f"'{subscript}' {'writes' if access is statement.output else 'reads'} outside axis {axis} of '{access.name}'",
        expression=statement.text,
        spans=[subscript.span],
        details=[
            f"expected 0 <= {subscript} < {extent}; got {low}{f' to {high}' if high != low else ''}"
            f"{f' (extents: {reach})' if reach else ''}"
        ],
        fix=fix,
        tensor=access.name,
        axis=axis,
        expected=extent,
        got=(low, high),
    )
