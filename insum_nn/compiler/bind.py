"""Statement + tensors -> `Bound`: ranks, dtypes, devices and facts checked, every extent found.

`Bound` holds no sizes, so that it can be the key under which a compiled program is kept: other sizes of
the same statement reuse it. The sizes of one call are an `Extents`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from insum_nn.compiler.ast import Access, Index, Number, Statement, Subscript
from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumError,
    InsumOverflowError,
    InsumRangeError,
    InsumShapeError,
    Span,
    raise_collected,
)
from insum_nn.facts import UNKNOWN, IndexFacts

__all__ = ["INDEX_DTYPES", "VALUE_DTYPES", "Bound", "Extents", "Layout", "bind", "layout_of", "resolve_extents"]

INDEX_DTYPES = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
VALUE_DTYPES = (*_FLOATS, *_INTEGERS)
_INT32_AXIS = 2**31
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """What a statement says about its tensors before any tensor is seen.

    Attributes:
        tensors: names of the tensors read, in canonical order.
        index_tensors: those that stand inside a subscript.
        value_tensors: those that are factors.
        ranks: dimensions of each tensor read.
        indices: names of all index variables, in canonical order.
        plain: for each index, the (tensor position, axis) pairs that it indexes directly.
        output_plain: for each output axis, the index that writes it directly, or `None`.
    """

    tensors: tuple[str, ...]
    index_tensors: frozenset[str]
    value_tensors: frozenset[str]
    ranks: tuple[int, ...]
    indices: tuple[str, ...]
    plain: tuple[tuple[tuple[int, int], ...], ...]
    output_plain: tuple[str | None, ...]


@lru_cache(maxsize=1024)
def layout_of(statement: Statement) -> Layout:
    """The statement's `Layout`."""
    tensors = statement.tensors()
    position = {name: i for i, name in enumerate(tensors)}
    ranks = [0] * len(tensors)
    plain: dict[str, dict[tuple[int, int], None]] = {name: {} for name in statement.indices()}
    for access in statement.accesses():
        if access is statement.output:
            continue
        where = position[access.name]
        ranks[where] = len(access.subscripts)
        for axis, subscript in enumerate(access.subscripts):
            if subscript.plain is not None:
                plain[subscript.plain][(where, axis)] = None
    return Layout(
        tensors=tensors,
        index_tensors=frozenset(statement.index_tensors()),
        value_tensors=frozenset(access.name for access in statement.reads),
        ranks=tuple(ranks),
        indices=statement.indices(),
        plain=tuple(tuple(plain[name]) for name in statement.indices()),
        output_plain=tuple(subscript.plain for subscript in statement.output.subscripts),
    )


@dataclass(frozen=True, slots=True)
class Extents:
    """The sizes of one call: one per index of the statement's layout, and the output's shape."""

    indices: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A statement with everything about its tensors that a compiled program depends on, and no sizes.

    Attributes:
        statement: the statement.
        dtype: of the factors and of the output.
        index_dtypes: of each tensor of the layout; the factors' dtype where it is no index tensor.
        device_type: `"cpu"`, `"cuda"`, ...
        has_start: a starting value was passed.
        facts: of each tensor of the layout.
        drop_outside: writes outside the output are dropped instead of refused (derivative statements).
        static: indices whose extent is part of the key, with that extent.
    """

    statement: Statement
    dtype: torch.dtype
    index_dtypes: tuple[torch.dtype, ...]
    device_type: str
    has_start: bool
    facts: tuple[IndexFacts, ...]
    drop_outside: bool = False
    static: tuple[tuple[str, int], ...] = ()

    @property
    def layout(self) -> Layout:
        return layout_of(self.statement)

    def facts_of(self, name: str) -> IndexFacts:
        return self.facts[self.layout.tensors.index(name)]


def _spans(statement: Statement, name: str) -> list[Span]:
    return [access.name_span for access in statement.accesses() if access.name == name]


def _describe(name: str, tensor: Tensor) -> str:
    return f"{name} is {_shape(tensor.shape)}, {_dtype(tensor.dtype)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def bind(
    statement: Statement,
    tensors: Mapping[str, Tensor],
    start: Tensor | None,
    *,
    facts: Mapping[str, IndexFacts] | None = None,
    drop_outside: bool = False,
) -> Bound:
    """Check kinds, ranks, dtypes and devices, and collect what a program depends on.

    Args:
        statement: a checked statement.
        tensors: exactly the tensors that it reads.
        start: the starting value, or `None`.
        facts: facts of index tensors, by name; unknown where missing.
        drop_outside: see `Bound`.

    Raises:
        InsumDtypeError: a value is no tensor, an index tensor is no int32 or int64, factors mix dtypes.
        InsumShapeError: a rank differs from the number of subscripts.
        InsumDeviceError: the tensors are on different devices.
    """
    layout = layout_of(statement)
    named: dict[str, Tensor] = {name: tensors[name] for name in layout.tensors}
    if start is not None:
        named[statement.output.name] = start
    raise_collected(_check_kinds(statement, named))
    faults = _check_ranks(statement, named) + _check_dtypes(statement, named) + _check_devices(statement, named)
    faults += _check_start(statement, start)
    raise_collected(faults)
    dtype = _value_dtype(statement, named)
    device = next(iter(named.values())).device.type if named else "cpu"
    facts = facts or {}
    return Bound(
        statement=statement,
        dtype=dtype,
        index_dtypes=tuple(named[name].dtype for name in layout.tensors),
        device_type=device,
        has_start=start is not None,
        facts=tuple(facts.get(name, UNKNOWN) for name in layout.tensors),
        drop_outside=drop_outside,
    )


def _check_kinds(statement: Statement, named: Mapping[str, object]) -> list[InsumError]:
    faults: list[InsumError] = []
    for name, value in named.items():
        if not isinstance(value, Tensor):
            got = type(value).__name__
            fix = f"pass torch.as_tensor({name})." if got != "list" else f"pass torch.tensor({name})."
        elif value.layout is not torch.strided:
            got = f"a tensor of layout {value.layout}"
            fix = "convert it with a format of insum_nn.formats and pass its tensors, or pass to_dense()."
        else:
            continue
        faults.append(
            InsumDtypeError(
                f"'{name}' must be a dense torch.Tensor, got {got}",
                expression=statement.text,
                spans=_spans(statement, name),
                fix=fix,
                tensor=name,
                got=got,
            )
        )
    return faults


def _check_ranks(statement: Statement, named: Mapping[str, Tensor]) -> list[InsumError]:
    faults: list[InsumError] = []
    done: set[str] = set()
    for access in statement.accesses():
        tensor = named.get(access.name)
        if tensor is None or access.name in done or tensor.ndim == len(access.subscripts):
            continue
        done.add(access.name)
        count = len(access.subscripts)
        faults.append(
            InsumShapeError(
                f"'{access.name}' is written with {count} subscript{'s' * (count != 1)}, but has {tensor.ndim} "
                f"dimension{'s' * (tensor.ndim != 1)}",
                expression=statement.text,
                spans=[access.span],
                details=[_describe(access.name, tensor)],
                fix=f"give '{access.name}' one subscript per dimension, or reshape it.",
                tensor=access.name,
                expected=count,
                got=tensor.ndim,
            )
        )
    return faults


def _check_dtypes(statement: Statement, named: Mapping[str, Tensor]) -> list[InsumError]:
    faults: list[InsumError] = []
    layout = layout_of(statement)
    for outer in statement.accesses():
        for axis, subscript in enumerate(outer.subscripts):
            for access in subscript.index_accesses():
                tensor = named[access.name]
                if tensor.dtype in INDEX_DTYPES:
                    continue
                target = named.get(outer.name)
                extent = f" (extent {target.shape[axis]})" if target is not None and axis < target.ndim else ""
                faults.append(
                    InsumDtypeError(
                        f"index tensor '{access.name}' must be int32 or int64, got {_dtype(tensor.dtype)}",
                        expression=statement.text,
                        spans=[access.name_span],
                        details=[f"{access.name} selects along axis {axis} of {outer.name}{extent}"],
                        fix=f"pass {access.name}.long(); a float mask belongs in the product, not in an index.",
                        tensor=access.name,
                        got=tensor.dtype,
                    )
                )
    values = {name: named[name] for name in named if name in layout.value_tensors or name == statement.output.name}
    for name, tensor in values.items():
        if tensor.dtype not in VALUE_DTYPES:
            faults.append(
                InsumDtypeError(
                    f"factor '{name}' has dtype {_dtype(tensor.dtype)}, which is not supported",
                    expression=statement.text,
                    spans=_spans(statement, name),
                    details=["expected a real floating-point or integer dtype"],
                    fix="run real and imaginary parts apart." if tensor.is_complex() else f"pass {name}.to(torch.float32).",
                    tensor=name,
                    got=tensor.dtype,
                )
            )
    dtypes = {tensor.dtype for tensor in values.values()}
    if len(dtypes) > 1 and not faults:
        faults.append(
            InsumDtypeError(
                f"factors have different dtypes: {', '.join(sorted(map(_dtype, dtypes)))}",
                expression=statement.text,
                spans=[span for name in values for span in _spans(statement, name)],
                details=[_describe(name, tensor) for name, tensor in values.items()],
                fix="convert them to one dtype; nothing is cast silently.",
                got=dtypes,
            )
        )
    floats = [f for f in statement.factors if isinstance(f, Number) and isinstance(f.value, float)]
    if floats and len(dtypes) == 1 and not next(iter(dtypes)).is_floating_point:
        faults.append(
            InsumDtypeError(
                f"the number {floats[0].value!r} does not fit integer factors ({_dtype(next(iter(dtypes)))})",
                expression=statement.text,
                spans=[f.span for f in floats],
                fix="convert the tensors to a floating-point dtype, or use an integer.",
            )
        )
    return faults


def _check_devices(statement: Statement, named: Mapping[str, Tensor]) -> list[InsumError]:
    devices = {name: tensor.device for name, tensor in named.items()}
    if len(set(devices.values())) <= 1:
        return []
    target = next((d for d in devices.values() if d.type != "cpu"), next(iter(devices.values())))
    wrong = next(name for name, device in devices.items() if device != target)
    return [
        InsumDeviceError(
            f"tensors are on different devices: {', '.join(sorted({str(d) for d in devices.values()}))}",
            expression=statement.text,
            spans=[span for name, device in devices.items() if device != target for span in _spans(statement, name)],
            details=[f"{name} is on {device}" for name, device in devices.items()],
            fix=f"move them to one device, e.g. {wrong}.to('{target}').",
            got=devices,
        )
    ]


def _check_start(statement: Statement, start: Tensor | None) -> list[InsumError]:
    if start is None or statement.operator != "=":
        return []
    name = statement.output.name
    return [
        InsumShapeError(
            f"'=' always starts from zero, but a tensor was passed for '{name}'",
            expression=statement.text,
            spans=[statement.output.name_span],
            fix=f"write '+=' to add to '{name}', or do not pass it (out_shape= gives a shape).",
            tensor=name,
        )
    ]


def _value_dtype(statement: Statement, named: Mapping[str, Tensor]) -> torch.dtype:
    for access in statement.reads:
        return named[access.name].dtype
    if statement.output.name in named:
        return named[statement.output.name].dtype
    return torch.get_default_dtype()


def resolve_extents(
    statement: Statement,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    sizes: Mapping[str, int],
    out_shape: Sequence[int | None] | None,
) -> Extents:
    """Find the extent of every index and the shape of the output.

    Args:
        statement: a statement whose ranks were checked.
        tensors: the tensors read, in the layout's order.
        start: the starting value; its shape is the output's.
        sizes: extents given by name.
        out_shape: the output's shape; `None` entries are inferred.

    Raises:
        InsumShapeError: an extent is missing or has two values.
        InsumRangeError: an affine write leaves the output.
        InsumOverflowError: an extent does not fit the index type that must address it.
    """
    layout = layout_of(statement)
    found: dict[str, int] = {}
    clash = False
    for name, occurrences in zip(layout.indices, layout.plain, strict=True):
        for where, axis in occurrences:
            extent = tensors[where].shape[axis]
            if found.setdefault(name, extent) != extent:
                clash = True
    for name, extent in sizes.items():
        if name not in layout.indices:
            raise InsumShapeError(
                f"sizes= names '{name}', which is no index of the statement",
                expression=statement.text,
                details=[f"indices: {', '.join(layout.indices) or 'none'}"],
                fix="drop it, or correct its name.",
                index=name,
            )
        _check_extent(statement, f"sizes['{name}']", extent)
        if found.setdefault(name, extent) != extent:
            clash = True
    given = _given_shape(statement, start, out_shape)
    for name, extent in zip(layout.output_plain, given, strict=True):
        if name is not None and extent is not None and found.setdefault(name, extent) != extent:
            clash = True
    missing = [name for name in layout.indices if name not in found]
    if clash or missing:
        raise_collected(_extent_faults(statement, tensors, start, sizes, out_shape, missing))
    output = tuple(
        extent if extent is not None else None if name is None else found[name]
        for name, extent in zip(layout.output_plain, given, strict=True)
    )
    shape = _complete_shape(statement, output)
    return Extents(tuple(found[name] for name in layout.indices), shape)


def _check_extent(statement: Statement, what: str, extent: object) -> None:
    if isinstance(extent, bool) or not isinstance(extent, int | torch.SymInt):
        raise InsumShapeError(
            f"{what} must be an int, got {type(extent).__name__}", expression=statement.text, fix="pass a non-negative int."
        )
    if isinstance(extent, int) and not 0 <= extent <= _INT64_MAX:
        raise InsumShapeError(f"{what} is {extent}", expression=statement.text, fix="pass a non-negative int below 2**63.")


def _given_shape(
    statement: Statement, start: Tensor | None, out_shape: Sequence[int | None] | None
) -> tuple[int | None, ...]:
    rank = len(statement.output.subscripts)
    if out_shape is None:
        return tuple(start.shape) if start is not None else (None,) * rank
    if len(out_shape) != rank:
        raise InsumShapeError(
            f"out_shape has {len(out_shape)} entries, but '{statement.output.name}' is written with {rank} "
            f"subscript{'s' * (rank != 1)}",
            expression=statement.text,
            spans=[statement.output.span],
            details=[f"out_shape = {tuple(out_shape)}"],
            fix="give one entry per subscript; None where it can be inferred.",
            expected=rank,
            got=len(out_shape),
        )
    for axis, extent in enumerate(out_shape):
        if extent is not None:
            _check_extent(statement, f"out_shape[{axis}]", extent)
    if start is not None:
        for axis, extent in enumerate(out_shape):
            if extent is not None and start.shape[axis] != extent:
                raise InsumShapeError(
                    f"out_shape[{axis}] is {extent}, but the tensor passed for '{statement.output.name}' has {start.shape[axis]}",
                    expression=statement.text,
                    spans=[statement.output.span],
                    fix="drop out_shape=; the starting value gives the shape.",
                    expected=extent,
                    got=start.shape[axis],
                )
        return tuple(start.shape)
    return tuple(out_shape)


def _extent_faults(
    statement: Statement,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    sizes: Mapping[str, int],
    out_shape: Sequence[int | None] | None,
    missing: Sequence[str],
) -> list[InsumError]:
    layout = layout_of(statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    given = _given_shape(statement, start, out_shape)
    faults: list[InsumError] = []
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
                if is_output and start is None:
                    source = f"out_shape[{axis}]"
                else:
                    tensor = start if is_output and start is not None else named[access.name]
                    source = f"{access.name} is {_shape(tensor.shape)}, {_dtype(tensor.dtype)}"
                details.append(f"{access.name} axis {axis}: {name} = {extent}   ({source})")
        if name in sizes:
            values.append(sizes[name])
            details.append(f"sizes: {name} = {sizes[name]}")
        distinct = list(dict.fromkeys(values))
        if len(distinct) > 1:
            faults.append(
                InsumShapeError(
                    f"index '{name}' has {_count(len(distinct))} extents, {_and(list(map(str, distinct)))}",
                    expression=statement.text,
                    spans=spans,
                    details=details,
                    fix="make these axes equally long, or index them with different letters.",
                    index=name,
                    got=tuple(distinct),
                )
            )
    for name in missing:
        spans = [i.span for access in (statement.output, *statement.reads) for i in access.indices() if i.name == name]
        faults.append(
            InsumShapeError(
                f"index '{name}' has no extent",
                expression=statement.text,
                spans=spans,
                details=[f"'{name}' indexes no axis directly, so no tensor says how far it runs"],
                fix=f"pass sizes={{'{name}': ...}}, or out_shape= where '{name}' alone writes an axis.",
                index=name,
            )
        )
    return faults


def _count(number: int) -> str:
    return {2: "two", 3: "three", 4: "four"}.get(number, str(number))


def _and(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _complete_shape(statement: Statement, output: Sequence[int | None]) -> tuple[int, ...]:
    faults: list[InsumError] = []
    for axis, (subscript, extent) in enumerate(zip(statement.output.subscripts, output, strict=True)):
        if extent is None:
            faults.append(
                InsumShapeError(
                    f"the extent of '{statement.output.name}' along axis {axis} is unknown",
                    expression=statement.text,
                    spans=[subscript.span],
                    details=[f"'{subscript}' does not say how many entries the axis has"],
                    fix=f"pass out_shape=({', '.join('...' if e is None else 'None' for e in output)}"
                    f"{',' if len(output) == 1 else ''}), or a starting value for '{statement.output.name}'.",
                    axis=axis,
                )
            )
    raise_collected(faults)
    return tuple(extent for extent in output if extent is not None)


def check_extents(statement: Statement, tensors: Sequence[Tensor], extents: Extents, *, drop_outside: bool) -> None:
    """Check what sizes alone decide: affine writes, and integers that address what they must.

    Raises:
        InsumRangeError: an affine write leaves the output.
        InsumOverflowError: an index tensor's dtype, or int64 arithmetic, cannot address an axis.
    """
    layout = layout_of(statement)
    shapes: dict[str, Sequence[int]] = {name: t.shape for name, t in zip(layout.tensors, tensors, strict=True)}
    dtypes = {name: t.dtype for name, t in zip(layout.tensors, tensors, strict=True)}
    shapes[statement.output.name] = extents.output
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    faults: list[InsumError] = []
    empty = any(size == 0 for size in extents.indices)
    for access in statement.accesses():
        for axis, subscript in enumerate(access.subscripts):
            if subscript.plain is not None:
                continue
            extent = shapes[access.name][axis]
            faults += _check_int32(statement, access, axis, extent, subscript, dtypes)
            faults += _check_int64(statement, subscript, sizes)
            if access is statement.output and not drop_outside and not empty:
                faults += _check_affine_write(statement, access, axis, extent, subscript, sizes)
    raise_collected(faults)


def interval(subscript: Subscript, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Smallest and largest value of the part of a subscript that is made of indices."""
    low = high = subscript.offset
    for term in subscript.terms:
        if isinstance(term.atom, Index):
            reach = term.coefficient * (sizes[term.atom.name] - 1)
            low, high = low + min(0, reach), high + max(0, reach)
    return low, high


def _check_int32(
    statement: Statement,
    access: Access,
    axis: int,
    extent: int,
    subscript: Subscript,
    dtypes: Mapping[str, torch.dtype],
) -> list[InsumError]:
    inner = subscript.indirect
    if inner is None or dtypes[inner.name] != torch.int32 or extent <= _INT32_AXIS:
        return []
    return [
        InsumOverflowError(
            f"index tensor '{inner.name}' is int32, which cannot address axis {axis} of '{access.name}'",
            expression=statement.text,
            spans=[inner.span],
            details=[f"expected an extent of at most {_INT32_AXIS}; got {extent}"],
            fix=f"pass {inner.name}.long().",
            tensor=inner.name,
            got=extent,
        )
    ]


def _check_int64(statement: Statement, subscript: Subscript, sizes: Mapping[str, int]) -> list[InsumError]:
    low, high = interval(subscript, sizes)
    for term in subscript.terms:
        if not isinstance(term.atom, Index):
            # Entries are below 2**31 or 2**63; any coefficient that keeps an int32 entry inside int64 is accepted.
            low, high = low - abs(term.coefficient) * _INT32_AXIS, high + abs(term.coefficient) * _INT32_AXIS
    if -_INT64_MAX <= low and high <= _INT64_MAX:
        return []
    return [
        InsumOverflowError(
            f"the subscript '{subscript}' overflows int64",
            expression=statement.text,
            spans=[subscript.span],
            details=[f"it reaches from {low} to {high}"],
            fix="use smaller coefficients or extents.",
            got=(low, high),
        )
    ]


def _check_affine_write(
    statement: Statement, access: Access, axis: int, extent: int, subscript: Subscript, sizes: Mapping[str, int]
) -> list[InsumError]:
    if any(True for _ in subscript.index_accesses()):
        return []
    low, high = interval(subscript, sizes)
    if low >= 0 and high < extent:
        return []
    reach = ", ".join(f"{name} = {sizes[name]}" for name in dict.fromkeys(i.name for i in subscript.indices()))
    return [
        InsumRangeError(
            f"'{subscript}' writes outside axis {axis} of '{access.name}'",
            expression=statement.text,
            spans=[subscript.span],
            details=[f"expected 0 <= {subscript} < {extent}; got {low} to {high}{f' (extents: {reach})' if reach else ''}"],
            fix=f"give '{access.name}' at least {high + 1} entries along axis {axis}."
            if low >= 0
            else "shift the subscript with an offset so that it starts at 0.",
            axis=axis,
            expected=extent,
            got=(low, high),
        )
    ]
