"""Sparse convolution through the neighbour table of a kernel map, and its gradients, as sums of the same kind.

    Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]              Out:  each output row is written once, by one tile
    dIn[Order[i],c] += dOut[Near[k,i],d] * W[d,k,c]            In:   the same by the table of the inverse map
    dW[d,Off[p],c] += dOut[OutIdx[p],d] * In[InIdx[p],c]       W:    by the list of pairs, sorted by offset

All three are contractions of one trilinear form in `In`, `W` and `Out` with two of its arguments. The gradients of one
are the other two, so derivatives of any order need no atomic additions.

`W` is the layer's weight as it is in memory, its kernel cells as one axis. The gradient of `W` takes pairs where they
can be the summed axis of a matrix product: over the table, rows of `dOut` would be read also where there is no pair.

The table holds every pair of any map: at one offset an output has at most one input, and an input at most one output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    BoundProgram,
    BoundSums,
    autocast_dtype,
    built_program,
    is_plain_eager,
    keep_bitmasks,
    keep_lengths,
    multilinear,
    pairs_are_faster,
    product_dtype,
)
from insum_nn.compiler.options import Options
from insum_nn.facts import NamedFacts
from insum_nn.structure.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map.tables import LIST_FACTS, TABLE_FACTS

__all__ = ["repeated_conv", "table_conv", "table_entries", "table_statement"]

Kind = Literal["Out", "In", "W"]
# A statement with a map's index tensors bound, which takes the two of `_OPERANDS` in order, and its output's shape.
_Bound = tuple[BoundProgram, tuple[int | None, ...]]

# For each result, the two tensors that are contracted.
_OPERANDS: dict[Kind, tuple[Kind, Kind]] = {"Out": ("In", "W"), "In": ("Out", "W"), "W": ("Out", "In")}
_TEXTS: dict[Kind, str] = {
    "Out": "Out[{output},{h}d] += In[{input},{h}c] * W[{h}d,{cell},c]",
    "In": "dIn[{input},{h}c] += dOut[{output},{h}d] * W[{h}d,{cell},c]",
    "W": "dW[{h}d,{cell},c] += dOut[{output},{h}d] * In[{input},{h}c]",
}
_PAIRS = {"output": "OutIdx[g,q]", "input": "InIdx[g,q]", "cell": "Off[g]"}
_LIST = {"output": "OutIdx[p]", "input": "InIdx[p]", "cell": "Off[p]"}
_TABLE = {"output": "Order[i]", "input": "Near[k,i]", "cell": "k"}
_INVERSE = {"output": "Near[k,i]", "input": "Order[i]", "cell": "k"}
# Which index tensors of a map a statement reads: grouped pairs, its table (or its inverse's), or the list of pairs.
IndexForm = Literal["pairs", "table", "list"]
_SUBSCRIPTS: dict[IndexForm, dict[str, str]] = {"pairs": _PAIRS, "table": _TABLE, "list": _LIST}
_KNOWN: dict[IndexForm, NamedFacts] = {"pairs": FACTS, "table": TABLE_FACTS, "list": LIST_FACTS}

_STATEMENTS: dict[tuple[Kind, bool, IndexForm], str] = {
    (kind, grouped, form): text.format(
        h="h," if grouped else "", **(_INVERSE if (kind, form) == ("In", "table") else subscripts)
    )
    for kind, text in _TEXTS.items()
    for grouped in (False, True)
    for form, subscripts in _SUBSCRIPTS.items()
}


def table_statement(*, groups: int = 1) -> str:
    """Return the statement of a convolution through the table.

    >>> table_statement()
    'Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]'
    >>> table_statement(groups=2)
    'Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]'
    """
    return _STATEMENTS["Out", groups > 1, "table"]


def table_entries(kernel_map: KernelMap) -> int:
    """Return entries of a map's table, or of its inverse's where that is larger."""
    return kernel_map.geometry.volume * max(kernel_map.num_inputs, kernel_map.num_outputs)


def table_conv(
    features: Tensor,
    weight: Tensor,
    kernel_map: KernelMap,
    groups: int,
    options: Options,
    bias: Tensor | None = None,
) -> Tensor:
    """Convolve through the neighbour table, where `takes_table` says so.

        Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]
        Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]     with groups of channels h

    A missing neighbour counts as zero features, so an infinite or NaN weight reaches every output.

    Args:
        features: `In`, (n, I); differentiable to any order.
        weight: `W`, (O, k_1, .., k_d, I / groups), dtype and device of `features`; differentiable to any order.
        kernel_map: the map of n input voxels to m output voxels.
        groups: groups of channels.
        options: compile options.
        bias: (d,) or (h, d), what every output starts from; dtype of `features`; differentiable to any order.

    Returns:
        `Out`, (m, O).
    """
    if weight.requires_grad and torch.is_grad_enabled():
        dtype = product_dtype(features) if torch._C._is_any_autocast_enabled() else features.dtype
        if pairs_are_faster(dtype):
            # The list of pairs needs their number on the host.
            kernel_map.send_counts()
    conv = _Conv(kernel_map, groups, options)
    conv.kept.checked.add(_operand_kinds(features, weight, bias))
    return multilinear(conv, "Out", features, weight, initial=bias, plain=True)


def repeated_conv(
    features: Tensor,
    weight: Tensor,
    kernel_map: KernelMap,
    groups: int,
    options: Options,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Return `table_conv` of plain operands in eager mode whose kinds were checked in an earlier call on this map.

    `None`: there was none, or a mode is active.
    """
    kept: _Kept | None = kernel_map.calls.get((groups, id(options)))
    if kept is None or not is_plain_eager(features, weight, bias):
        return None
    if _operand_kinds(features, weight, bias) not in kept.checked:
        return None
    return multilinear(_Conv(kernel_map, groups, options, kept), "Out", features, weight, initial=bias, plain=True)


def _operand_kinds(features: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    """What of the operands decides whether a call is right, and what it prepares for its gradients."""
    kinds = (features.shape, features.dtype, features.device, weight.shape, weight.dtype, weight.device)
    recorded = weight.requires_grad and torch.is_grad_enabled()
    if torch._C._is_any_autocast_enabled():
        kinds += (autocast_dtype(features.device),)
    return (*kinds, recorded) if bias is None else (*kinds, recorded, bias.shape, bias.dtype, bias.device)


class _Kept(NamedTuple):
    """What is kept with a map for convolutions of some options, which must not hold the map itself.

    Attributes:
        options: these; as long as they live, so does their identity, by which this is found.
        calls: statements over the map.
        checked: kinds of operands that were checked.
    """

    options: Options
    calls: dict[tuple[Kind, IndexForm], _Bound]
    checked: set[tuple[object, ...]]


class _Conv(BoundSums):
    """The three sums of a convolution over one map."""

    __slots__ = ("groups", "kept", "kernel_map", "options")
    operands: Mapping[str, tuple[str, ...]] = _OPERANDS  # type: ignore[assignment]

    def __init__(self, kernel_map: KernelMap, groups: int, options: Options, kept: _Kept | None = None) -> None:
        self.kernel_map, self.groups, self.options = kernel_map, groups, options
        if kept is None:
            # To hash options takes longer than to find them.
            of_map: dict[Any, _Kept] = {} if torch.compiler.is_compiling() else kernel_map.calls
            self.kept = of_map.setdefault((groups, id(options)), _Kept(options, {}, set()))
        else:
            self.kept = kept

    def call(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor] | None
    ) -> tuple[BoundProgram, Sequence[Tensor], tuple[int | None, ...], None]:
        kind, (a, b) = cast("Kind", requested), operands
        if made is None:
            bound, shape = self._bound(kind, "pairs")
            return bound, self._split(kind, a, b), shape, None
        # Kernels are compiled for the layouts of their operands; gradients come in many, so one is enforced.
        if not a.is_contiguous():
            a = a.contiguous()
        if not b.is_contiguous():
            b = b.contiguous()
        bound, shape = self._bound(kind, "list" if kind == "W" and pairs_are_faster(a.dtype) else "table")
        if self.groups > 1:
            return bound, self._split(kind, a, b), shape, None
        # The cells of the weight's kernel as one axis, as the statement reads them.
        return bound, (a, b if kind == "W" else b.flatten(1, -2)), shape, None

    def result(self, requested: str, written: Tensor) -> Tensor:
        if requested == "W":
            return written.reshape(-1, *self.kernel_map.geometry.kernel_size, written.shape[-1])
        return written if self.groups == 1 else written.flatten(1)

    def _split(self, kind: Kind, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The operands as a statement reads them."""
        first, second = _OPERANDS[kind]
        return _split(first, a, self.kernel_map, self.groups), _split(second, b, self.kernel_map, self.groups)

    def _bound(self, kind: Kind, form: IndexForm) -> _Bound:
        calls = self.kept.calls
        found = calls.get((kind, form))
        if found is None:
            found = calls[kind, form] = _bound(kind, self.kernel_map, self.groups, self.options, form)
        return found


def _bound(kind: Kind, kernel_map: KernelMap, groups: int, options: Options, form: IndexForm) -> _Bound:
    rest: tuple[int | None, ...] = (None,) * (1 if groups == 1 else 2)
    if kind == "W":
        shape = (*rest, kernel_map.geometry.volume, None)
    else:
        shape = (kernel_map.num_outputs if kind == "Out" else kernel_map.num_inputs, *rest)
    if form == "list":
        indices = kernel_map.pair_list
        if not torch.compiler.is_compiling():
            keep_lengths(indices["Off"], kernel_map.counts, kernel_map.filled)
    elif form == "table":
        table = (kernel_map.inverse if kind == "In" else kernel_map).table
        indices = table.tensors
        if table.words is not None and not torch.compiler.is_compiling():
            keep_bitmasks(table.sorted_neighbours, table.words)
    else:
        indices = kernel_map.tensors
    return built_program(_STATEMENTS[kind, groups > 1, form], _KNOWN[form], options).bind(indices), shape


def _split(kind: Kind, tensor: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
    """Return a tensor with groups of channels, and the cells of the kernel, as axes of their own."""
    if kind == "W":
        outputs, volume, inputs = tensor.shape[0], kernel_map.geometry.volume, tensor.shape[-1]
        return tensor.reshape(*((groups,) if groups > 1 else ()), outputs // groups, volume, inputs)
    return tensor if groups == 1 else tensor.unflatten(1, (groups, tensor.shape[1] // groups))
