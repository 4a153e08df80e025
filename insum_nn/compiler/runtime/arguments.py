"""The arguments of programs: what they must be, keys of tensors, and static tensors as a program holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import dense_faults
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.dtypes import not_dense
from insum_nn.errors import InsumDtypeError, InsumNameError, InsumRangeError, InsumShapeError, raise_collected
from insum_nn.facts import StaticTable

__all__ = ["check_kinds", "check_static", "kinds_of", "stand_in", "static_tables"]

_KINDS: dict[str, tuple[type, str]] = {
    "sizes": (Mapping, "a dict of extents by index name"),
    "out_shape": (Sequence, "a tuple of extents such as (4, None)"),
    "shapes": (Mapping, "a dict of shapes by tensor name"),
    "tensors": (Mapping, "a dict of tensors by name"),
    "facts": (Mapping, "a dict of IndexFacts by tensor name"),
    "static": (Mapping, "a dict of tensors by name"),
    "options": (Options, "insum_nn.Options"),
    "activation": (str, "the name of an activation"),
    "out_dtype": (torch.dtype, "a torch.dtype"),
    "out": (Tensor, "a dense torch.Tensor"),
}


def check_kinds(**arguments: object) -> None:
    """Check the keyword arguments of a call: a tensor with the name of one of them arrives in its place.

    Raises:
        InsumDtypeError: one is of another type.
    """
    for name, value in arguments.items():
        kind, what = _KINDS[name]
        if value is None or (isinstance(value, kind) and not (kind is Tensor and not_dense(value))):
            continue
        tensor = isinstance(value, Tensor) and kind is not Tensor
        name = "out_shape" if name == "shapes" else name
        fix = f"pass a tensor of that name as tensors={{'{name}': ...}}." if tensor else f"pass {name}= as {what}."
        got = not_dense(value) or type(value).__name__
        raise InsumDtypeError(f"{name}= must be {what}, got {got}", fix=fix, expected=kind, got=type(value))


def static_tables(
    statement: Statement, static: Mapping[str, Tensor | StaticTable]
) -> tuple[tuple[str, StaticTable], ...]:
    """Static tensors as a `Spec` holds them.

    Raises:
        InsumNameError: the statement reads no tensor of a name.
    """
    unknown = [name for name in static if name not in statement.tensors()]
    if unknown:
        raise InsumNameError(
            f"static= names '{unknown[0]}', which the statement does not read",
            expression=statement.text,
            details=[f"tensors read: {', '.join(statement.tensors())}"],
            fix="name a tensor of the statement.",
            tensor=unknown[0],
        )
    raise_collected(dense_faults(statement, {n: t for n, t in static.items() if not isinstance(t, StaticTable)}))
    return tuple(
        (name, table if isinstance(table, StaticTable) else StaticTable.of(table))
        for name, table in sorted(static.items())
    )


def check_static(
    expression: str, static: Iterable[tuple[str, StaticTable]], named: Mapping[str, Tensor], *, validate: bool
) -> None:
    """Raise unless tensors promised to be static have the promised shape, and with `validate` the promised values."""
    for name, table in static:
        tensor = named.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != table.shape:
            raise InsumShapeError(
                f"'{name}' was compiled as a static tensor of shape {table.shape}, got {tuple(tensor.shape)}",
                expression=expression,
                fix="pass the tensor that was given as static= to compile(), or compile again.",
                tensor=name,
                expected=table.shape,
                got=tuple(tensor.shape),
            )
        if validate:
            promised = torch.tensor(table.values, dtype=tensor.dtype, device=tensor.device).reshape(table.shape)
            if not torch.equal(promised, tensor):
                raise InsumRangeError(
                    f"'{name}' differs from the static tensor that the statement was compiled for",
                    expression=expression,
                    fix="pass the tensor that was given as static= to compile(), or compile again.",
                    tensor=name,
                )


def kinds_of(tensors: Iterable[Tensor], initial: Tensor | None) -> tuple[object, ...]:
    """Return what of a call's tensors `bind` checks: everything but extents."""
    key: list[object] = []
    for tensor in tensors:
        key += (tensor.dtype, tensor.ndim, tensor.layout, tensor.device)
    if not key and initial is None:
        key.append(torch.get_default_dtype())
    return (*key, None) if initial is None else (*key, initial.dtype, initial.ndim, initial.layout, initial.device)


def stand_in(tensor: Tensor, is_index: bool) -> Tensor:
    """A tensor without elements is only ever read outside: one cell that says so is safe to address."""
    if tensor.numel():
        return tensor
    shape = [max(1, extent) for extent in tensor.shape]
    return tensor.new_full(shape, -1) if is_index else tensor.new_zeros(shape)
