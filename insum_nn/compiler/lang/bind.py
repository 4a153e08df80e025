"""Bind a statement to tensors: check ranks, dtypes and devices, and collect what a compiled program depends on.

A `Bound` holds no sizes, so that it can be the key of a compiled program, which calls with other sizes reuse. The sizes
of one call are `Extents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.lang.epilogue import PLAIN, Epilogue
from insum_nn.compiler.lang.functions import OPERATIONS
from insum_nn.compiler.lang.syntax import Apply, Factor, Number, Statement, leaves
from insum_nn.dtypes import INDEX_DTYPES, VALUE_DTYPES, not_dense
from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumError,
    InsumShapeError,
    Span,
    plural,
    raise_collected,
)
from insum_nn.facts import UNKNOWN, IndexFacts

__all__ = [
    "Bound",
    "Extents",
    "Layout",
    "bind",
    "dense_faults",
    "layout_of",
    "show_dtype",
    "show_shape",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors and indices of a statement, as its text gives them.

    Attributes:
        tensors: names of the tensors read, in canonical order.
        index_tensors: those inside subscripts.
        value_tensors: those that are factors.
        ranks: dimensions of each tensor read.
        indices: names of all index variables, in canonical order.
        plain: for each index, the (tensor position, axis) pairs that it indexes directly.
        output_plain: for each output axis, the index that writes it directly, or `None`.
        output_places: the same as places among the indices.
        written: for each index, the output axes that it writes directly.
    """

    tensors: tuple[str, ...]
    index_tensors: frozenset[str]
    value_tensors: frozenset[str]
    ranks: tuple[int, ...]
    indices: tuple[str, ...]
    plain: tuple[tuple[tuple[int, int], ...], ...]
    output_plain: tuple[str | None, ...]
    output_places: tuple[int | None, ...]
    written: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def layout_of(statement: Statement) -> Layout:
    """Return the statement's `Layout`."""
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
    indices = statement.indices()
    written = tuple(subscript.plain for subscript in statement.output.subscripts)
    return Layout(
        tensors=tensors,
        index_tensors=frozenset(statement.index_tensors()),
        value_tensors=frozenset(access.name for access in statement.reads),
        ranks=tuple(ranks),
        indices=indices,
        plain=tuple(tuple(plain[name]) for name in indices),
        output_plain=written,
        output_places=tuple(None if name is None else indices.index(name) for name in written),
        written=tuple(tuple(axis for axis, own in enumerate(written) if own == name) for name in indices),
    )


class Extents(NamedTuple):
    """The sizes of one call: one per index of the statement's layout, and the output's shape."""

    indices: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A statement with everything about its tensors that a compiled program depends on, and no sizes.

    Attributes:
        statement: the statement.
        dtype: of the factors and of the initial value.
        index_dtypes: of each tensor of the layout; the factors' dtype where it is no index tensor.
        device_type: `"cpu"`, `"cuda"`, ...
        has_initial: an initial value was passed.
        facts: of each tensor of the layout.
        drop_outside: writes out of bounds are dropped instead of raising (derivative statements).
        static: indices whose extent is compiled in, with that extent.
        epilogue: the activation and the cast after the sum.
    """

    statement: Statement
    dtype: torch.dtype
    index_dtypes: tuple[torch.dtype, ...]
    device_type: str
    has_initial: bool
    facts: tuple[IndexFacts, ...]
    drop_outside: bool = False
    static: tuple[tuple[str, int], ...] = ()
    epilogue: Epilogue = PLAIN

    @property
    def out_dtype(self) -> torch.dtype:
        """Return the output's dtype."""
        return self.epilogue.out_dtype(self.dtype)

    @property
    def layout(self) -> Layout:
        return layout_of(self.statement)

    def facts_of(self, name: str) -> IndexFacts:
        return self.facts[self.layout.tensors.index(name)]

    @property
    def named_facts(self) -> dict[str, IndexFacts]:
        """The facts by the names of the tensors."""
        return dict(zip(self.layout.tensors, self.facts, strict=True))


def _spans(statement: Statement, name: str) -> list[Span]:
    return [access.name_span for access in statement.accesses() if access.name == name]


def _describe(name: str, tensor: Tensor) -> str:
    return f"{name} is {show_shape(tensor.shape)}, {show_dtype(tensor.dtype)}"


def show_dtype(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def show_shape(shape: Sequence[object]) -> str:
    """Return `(3, 4)` or `(3,)`."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def bind(
    statement: Statement,
    tensors: Mapping[str, Tensor],
    initial: Tensor | None,
    *,
    facts: Mapping[str, IndexFacts] | None = None,
    drop_outside: bool = False,
    epilogue: Epilogue = PLAIN,
) -> Bound:
    """Check kinds, ranks, dtypes and devices, and collect what a program depends on.

    Args:
        statement: a checked statement.
        tensors: exactly the tensors that it reads.
        initial: the initial value, or `None`.
        facts: facts of index tensors, by name; unknown where missing.
        drop_outside: see `Bound`.
        epilogue: see `Bound`.

    Raises:
        InsumDtypeError: a value is no tensor, an index tensor is no int32 or int64, factors mix dtypes.
        InsumShapeError: a rank differs from the number of subscripts.
        InsumDeviceError: the tensors are on different devices.
    """
    layout = layout_of(statement)
    named: dict[str, Tensor] = {name: tensors[name] for name in layout.tensors}
    if initial is not None:
        named[statement.output.name] = initial
    raise_collected(dense_faults(statement, named))
    checks = (_check_ranks, _check_dtypes, _check_devices)
    raise_collected([*chain(*(check(statement, named) for check in checks)), *_check_initial(statement, initial)])
    values = (named[access.name] for access in (*statement.reads, statement.output) if access.name in named)
    dtype = next((value.dtype for value in values), torch.get_default_dtype())
    device = next(iter(named.values())).device.type if named else "cpu"
    facts = facts or {}
    return Bound(
        statement=statement,
        dtype=dtype,
        index_dtypes=tuple(named[name].dtype for name in layout.tensors),
        device_type=device,
        has_initial=initial is not None,
        facts=tuple(facts.get(name, UNKNOWN) for name in layout.tensors),
        drop_outside=drop_outside,
        epilogue=epilogue,
    )


def dense_faults(statement: Statement, named: Mapping[str, object]) -> Iterator[InsumError]:
    """Return an error for each of a statement's tensors, by name, that is no dense tensor."""
    for name, value in named.items():
        got = not_dense(value)
        if got is None:
            continue
        if not isinstance(value, Tensor):
            fix = f"pass torch.as_tensor({name})." if got != "list" else f"pass torch.tensor({name})."
        elif "layout" in got:
            fix = "convert it with a format of insum_nn.formats and pass its tensors, or pass to_dense()."
        elif value.is_nested:
            fix = f"pass its parts in calls of their own, or {name}.to_padded_tensor(0)."
        else:
            fix = f"initialize '{name}' first, as a lazy module does in its first call."
        yield InsumDtypeError(
            f"'{name}' must be a dense torch.Tensor, got {got}",
            expression=statement.text,
            spans=_spans(statement, name),
            fix=fix,
            tensor=name,
            got=got,
        )


def _check_ranks(statement: Statement, named: Mapping[str, Tensor]) -> Iterator[InsumError]:
    done: set[str] = set()
    for access in statement.accesses():
        tensor = named.get(access.name)
        if tensor is None or access.name in done or tensor.ndim == len(access.subscripts):
            continue
        if access is statement.output and tensor.ndim < len(access.subscripts):
            # An initial value is broadcast.
            continue
        done.add(access.name)
        count = len(access.subscripts)
        yield InsumShapeError(
            f"'{access.name}' has {plural(count, 'subscript')}, but {plural(tensor.ndim, 'dimension')}",
            expression=statement.text,
            spans=[access.span],
            details=[_describe(access.name, tensor)],
            fix=f"give '{access.name}' one subscript per dimension, or reshape it.",
            tensor=access.name,
            expected=count,
            got=tensor.ndim,
        )


def _unusable_dtypes(
    statement: Statement, named: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Iterator[InsumError]:
    for outer in statement.accesses():
        for axis, subscript in enumerate(outer.subscripts):
            for access in subscript.index_accesses():
                tensor = named[access.name]
                if tensor.dtype in INDEX_DTYPES:
                    continue
                target = named.get(outer.name)
                extent = f" (extent {target.shape[axis]})" if target is not None and axis < target.ndim else ""
                yield InsumDtypeError(
                    f"index tensor '{access.name}' must be int32 or int64, got {show_dtype(tensor.dtype)}",
                    expression=statement.text,
                    spans=[access.name_span],
                    details=[f"{access.name} selects along axis {axis} of {outer.name}{extent}"],
                    fix=f"pass {access.name}.long(); a float mask belongs in the product, not in an index.",
                    tensor=access.name,
                    got=tensor.dtype,
                )
    for name, tensor in values.items():
        if tensor.dtype not in VALUE_DTYPES:
            yield InsumDtypeError(
                f"factor '{name}' has dtype {show_dtype(tensor.dtype)}, which is not supported",
                expression=statement.text,
                spans=_spans(statement, name),
                details=["expected a real floating-point or integer dtype"],
                fix="run the real and the imaginary part separately."
                if tensor.is_complex()
                else f"pass {name}.to(torch.float32).",
                tensor=name,
                got=tensor.dtype,
            )


def _check_dtypes(statement: Statement, named: Mapping[str, Tensor]) -> Iterator[InsumError]:
    own = {*layout_of(statement).value_tensors, statement.output.name}
    values = {name: tensor for name, tensor in named.items() if name in own}
    yield from (unusable := [*_unusable_dtypes(statement, named, values)])
    dtypes = {tensor.dtype for tensor in values.values()}
    if len(dtypes) > 1 and not unusable:
        yield InsumDtypeError(
            f"factors have different dtypes: {', '.join(sorted(map(show_dtype, dtypes)))}",
            expression=statement.text,
            spans=[span for name in values for span in _spans(statement, name)],
            details=[_describe(name, tensor) for name, tensor in values.items()],
            fix="convert them to one dtype; nothing is cast silently.",
            got=dtypes,
        )
    if len(dtypes) != 1 or next(iter(dtypes)).is_floating_point:
        return
    (dtype,) = dtypes
    functions = [f for f in _applied(*statement.factors) if not OPERATIONS[f.function].integers]
    for function in functions[:1]:
        name = {"div": "a quotient", "pow": "a power"}.get(function.function, f"the function '{function.function}'")
        yield InsumDtypeError(
            f"{name} takes floating-point numbers, got {show_dtype(dtype)}",
            expression=statement.text,
            spans=[f.span for f in functions],
            fix="convert the tensors to a floating-point dtype.",
            got=dtype,
        )
    floats = [f for f in leaves(*statement.factors) if isinstance(f, Number) and isinstance(f.value, float)]
    if floats:
        yield InsumDtypeError(
            f"the number {floats[0].value!r} does not fit integer factors ({show_dtype(dtype)})",
            expression=statement.text,
            spans=[f.span for f in floats],
            fix="convert the tensors to a floating-point dtype, or use an integer.",
        )


def _applied(*factors: Factor) -> Iterator[Apply]:
    """Yield the functions of factors, outer before inner."""
    for factor in factors:
        if isinstance(factor, Apply):
            yield factor
            yield from _applied(*factor.args)


def _check_devices(statement: Statement, named: Mapping[str, Tensor]) -> Iterator[InsumError]:
    devices = {name: tensor.device for name, tensor in named.items()}
    if len(set(devices.values())) <= 1:
        return
    target = next((d for d in devices.values() if d.type != "cpu"), next(iter(devices.values())))
    wrong = next(name for name, device in devices.items() if device != target)
    yield InsumDeviceError(
        f"tensors are on different devices: {', '.join(sorted({str(d) for d in devices.values()}))}",
        expression=statement.text,
        spans=[span for name, device in devices.items() if device != target for span in _spans(statement, name)],
        details=[f"{name} is on {device}" for name, device in devices.items()],
        fix=f"move them to one device, e.g. {wrong}.to('{target}').",
        got=devices,
    )


def _check_initial(statement: Statement, initial: Tensor | None) -> Iterator[InsumError]:
    if initial is None or statement.combining.takes_initial:
        return
    name = statement.output.name
    yield InsumShapeError(
        f"'=' always starts from zero, but a tensor was passed for '{name}'",
        expression=statement.text,
        spans=[statement.output.name_span],
        fix=f"write '+=' to add to '{name}', or do not pass it (out_shape= gives a shape).",
        tensor=name,
    )
