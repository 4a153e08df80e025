"""Sparse convolution through the neighbour table of a kernel map, and its gradients, as sums of the same kind.

    Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]              Out:  each output row is written once, by one tile
    dIn[Order[i],c] += dOut[Near[k,i],d] * W[d,k,c]            In:   the same by the table of the inverse map
    dW[d,Off[p],c] += dOut[OutIdx[p],d] * In[InIdx[p],c]       W:    by the list of pairs, which stand by their offset

All three contract one form, linear in each of `In`, `W` and `Out`, with two of its tensors, and so leave the third. The
gradient of a contraction is made of the other two, so that derivatives of any order add to no cell from several sides.

`W` is the layer's weight as it lies in memory, its kernel cells as one axis. The gradient of `W` takes pairs where they
can be the summed axis of a matrix product: over the table, rows of `dOut` would be read also where there is no pair.

The laws of kernel maps make the table complete: at one offset an output meets at most one input, and an input one
output, whatever the kernel; so it needs no other way for maps of certain kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    BoundProgram,
    Program,
    contract,
    keep_lengths,
    keep_words,
    pairs_are_faster,
)
from insum_nn.compiler.options import Options
from insum_nn.facts import IndexFacts
from insum_nn.ops.arguments import program
from insum_nn.structure.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map.tables import LIST_FACTS, TABLE_FACTS

__all__ = ["table_conv", "table_entries", "table_operands", "table_statement"]

Kind = Literal["Out", "In", "W"]

# What a contraction leaves, by the tensors it is made of.
_OPERANDS: dict[Kind, tuple[Kind, Kind]] = {"Out": ("In", "W"), "In": ("Out", "W"), "W": ("Out", "In")}
_STATEMENTS: dict[Kind, str] = {
    "Out": "Out[{output},{h}d] += In[{input},{h}c] * W[{h}d,{cell},c]",
    "In": "dIn[{input},{h}c] += dOut[{output},{h}d] * W[{h}d,{cell},c]",
    "W": "dW[{h}d,{cell},c] += dOut[{output},{h}d] * In[{input},{h}c]",
}
_GROUPS = {"output": "OutIdx[g,q]", "input": "InIdx[g,q]", "cell": "Off[g]"}
_LIST = {"output": "OutIdx[p]", "input": "InIdx[p]", "cell": "Off[p]"}
_TABLES: dict[Kind, dict[str, str]] = {
    "Out": {"output": "Order[i]", "input": "Near[k,i]", "cell": "k"},
    "In": {"output": "Near[k,i]", "input": "Order[i]", "cell": "k"},
    "W": {"output": "Order[i]", "input": "Near[k,i]", "cell": "k"},
}
# How the index tensors of a statement are taken from a map: its groups, its table, its list of pairs.
Way = Literal["groups", "table", "list"]
_KNOWN: dict[Way, Mapping[str, IndexFacts]] = {"groups": FACTS, "table": TABLE_FACTS, "list": LIST_FACTS}


def table_statement(*, groups: int = 1) -> str:
    """The statement of a convolution through the table.

    >>> table_statement()
    'Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]'
    >>> table_statement(groups=2)
    'Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]'
    """
    return _statement("Out", groups > 1, "table")


def table_entries(kernel_map: KernelMap) -> int:
    """Entries of a map's table, or of its inverse's where that is larger."""
    return kernel_map.geometry.volume * max(kernel_map.num_inputs, kernel_map.num_outputs)


def table_operands(features: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int) -> dict[str, Tensor]:
    """The tensors of a convolution by their names in `table_statement`."""
    values = {"In": _split("In", features, kernel_map, groups), "W": _split("W", weight, kernel_map, groups)}
    return {**kernel_map.table.tensors, **values}


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

    A missing neighbour counts as features of zero, so a cell of `W` that is not finite reaches every output.

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
    if weight.requires_grad and torch.is_grad_enabled() and pairs_are_faster(features.dtype):
        # The list of pairs has to know their number.
        kernel_map.send_counts()
    return contract(_Conv(kernel_map, groups, options), "Out", features, weight, start=bias)


@dataclass(frozen=True, slots=True)
class _Conv:
    """The three sums of a convolution over one map."""

    kernel_map: KernelMap
    groups: int
    options: Options

    @property
    def operands(self) -> Mapping[str, tuple[str, ...]]:
        return _OPERANDS  # type: ignore[return-value]

    def eager(
        self, wanted: str, operands: tuple[Tensor, ...], made: dict[str, Tensor], start: Tensor | None = None
    ) -> Tensor:
        a, b = operands
        # A kernel is written for the layout of its operands; one layout is enough, and gradients have many.
        if not a.is_contiguous():
            a = a.contiguous()
        if not b.is_contiguous():
            b = b.contiguous()
        kind = cast("Kind", wanted)
        way: Way = "list" if kind == "W" and pairs_are_faster(a.dtype) else "table"
        return self._run(kind, a, b, way, start)

    def in_modes(self, wanted: str, operands: tuple[Tensor, ...], start: Tensor | None = None) -> Tensor:
        a, b = operands
        return self._run(cast("Kind", wanted), a, b, "groups", start)

    def _run(self, kind: Kind, a: Tensor, b: Tensor, way: Way, start: Tensor | None) -> Tensor:
        kernel_map, groups = self.kernel_map, self.groups
        call = self._call(kind, way)
        first, second = _OPERANDS[kind]
        # What decides the shapes of all tensors, where no dispatch mode is active.
        key = None if way == "groups" else (a.shape, b.shape, a.dtype, a.device, start is None)
        if groups > 1 or first == "W":
            a = _split(first, a, kernel_map, groups)
        if groups > 1 or second == "W":
            b = _split(second, b, kernel_map, groups)
        if key is not None:
            pair = (a, b) if call.given.names == call.names else (b, a)
            result = call.given(*pair, out_shape=call.shape, start=start, key=key)
        else:
            named = {**call.indices, call.names[0]: a, call.names[1]: b}
            if start is not None:
                named[call.program.statement.output.name] = start
            result = call.program(tensors=named, out_shape=call.shape)
        if kind == "W":
            return result.reshape(-1, *kernel_map.geometry.kernel_size, result.shape[-1])
        return result if groups == 1 else result.flatten(1)

    def _call(self, kind: Kind, way: Way) -> _Call:
        if torch.compiler.is_compiling():
            return _call(kind, self.kernel_map, self.groups, self.options, way)
        calls, key = self.kernel_map.calls, (kind, self.groups, self.options, way)
        call = calls.get(key)
        if call is None:
            call = calls[key] = _call(kind, self.kernel_map, self.groups, self.options, way)
        return call


class _Call(NamedTuple):
    """A statement over a map, ready for the two operands; `given` has the index tensors bound."""

    program: Program
    indices: Mapping[str, Tensor]
    names: tuple[str, str]
    shape: tuple[int | None, ...]
    given: BoundProgram


def _call(kind: Kind, kernel_map: KernelMap, groups: int, options: Options, way: Way) -> _Call:
    rest: tuple[int | None, ...] = (None,) * (1 if groups == 1 else 2)
    if kind == "W":
        shape = (*rest, kernel_map.geometry.volume, None)
    else:
        shape = (kernel_map.num_outputs if kind == "Out" else kernel_map.num_inputs, *rest)
    first, second = _OPERANDS[kind]
    if first == "Out":
        first = "dOut"
    if way == "list":
        indices = kernel_map.pair_list
        if not torch.compiler.is_compiling():
            keep_lengths(indices["Off"], kernel_map.counts)
    elif way == "table":
        table = (kernel_map.inverse if kind == "In" else kernel_map).table
        indices = table.tensors
        if table.words is not None and not torch.compiler.is_compiling():
            keep_words(table.sorted_neighbours, table.words)
    else:
        indices = kernel_map.tensors
    contraction = _program(kind, groups > 1, way, options)
    return _Call(contraction, indices, (first, second), shape, contraction.given(indices))


@lru_cache(maxsize=256)
def _program(kind: Kind, grouped: bool, way: Way, options: Options) -> Program:
    """The statement of all maps, found without comparing facts: a new map comes at each step."""
    return program(_statement(kind, grouped, way), _KNOWN[way], options)


def _split(kind: Kind, tensor: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
    """A tensor with groups of channels, and the cells of the kernel, as axes of their own."""
    if kind == "W":
        outputs, volume, inputs = tensor.shape[0], kernel_map.geometry.volume, tensor.shape[-1]
        return tensor.reshape(*((groups,) if groups > 1 else ()), outputs // groups, volume, inputs)
    return tensor if groups == 1 else tensor.unflatten(1, (groups, tensor.shape[1] // groups))


def _statement(kind: Kind, grouped: bool, way: Way) -> str:
    subscripts = _TABLES[kind] if way == "table" else _LIST if way == "list" else _GROUPS
    return _STATEMENTS[kind].format(h="h," if grouped else "", **subscripts)
