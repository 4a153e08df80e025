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
from typing import Literal, cast

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    BoundProgram,
    BoundSums,
    PositionalProgram,
    by_table,
    is_plain_eager,
    keep_bitmasks,
    keep_lengths,
    multilinear,
    pairs_are_faster,
    positional_program,
    product_dtype,
)
from insum_nn.compiler.options import Options
from insum_nn.facts import NamedFacts
from insum_nn.structure.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map.tables import LIST_FACTS, MOST_ENTRIES, TABLE_FACTS

__all__ = ["fit", "table_conv", "table_statement"]

Kind = Literal["Out", "In", "W"]
# A statement over a map: its program, its index tensors, and its output's shape.
_Bound = tuple[PositionalProgram, tuple[Tensor, ...], tuple[int | None, ...]]

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

# The tensors of a statement as they are given: those of `_OPERANDS`, then the index tensors.
_NAMES: dict[tuple[Kind, IndexForm], tuple[str, ...]] = {
    (kind, form): (*["dOut" if name == "Out" else name for name in operands], *facts)
    for kind, operands in _OPERANDS.items()
    for form, facts in _KNOWN.items()
}
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


def table_conv(
    features: Tensor,
    weight: Tensor,
    kernel_map: KernelMap,
    groups: int,
    options: Options,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Convolve through the neighbour table, where that is the better way.

        Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]
        Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]     with groups of channels h

    A missing neighbour counts as zero features, so an infinite or NaN weight reaches every output.

    Args:
        features: `In`, (n, I); differentiable to any order.
        weight: `W`, (O, k_1, .., k_d, I / groups), dtype and device of `features`; differentiable to any order.
        kernel_map: the map of n input voxels to m output voxels.
        groups: groups of channels.
        options: compile options.
        bias: (O,), what every output starts from; differentiable to any order.

    Returns:
        `Out`, (m, O); `None` where it goes by pairs: on other devices, under modes, for the largest tables; and where
        the operands do not fit.
    """
    of_map = kernel_map.calls
    kept: _Kept | None = of_map.get((groups, id(options)))
    if kept is None:
        rows = max(kernel_map.inputs.indices.shape[0], kernel_map.outputs.indices.shape[0])
        if not by_table(features.device, options) or kernel_map.geometry.volume * rows > MOST_ENTRIES:
            return None
        kept = of_map[groups, id(options)] = _Kept(options)
    if not is_plain_eager(features, weight, bias) or not fit(features, weight, kernel_map, bias, groups):
        return None
    if options.validate:
        # Which forgets what is kept.
        kernel_map.validate()
        kept = _Kept(options)
    # Under autocast the operands are cast later.
    dtype = product_dtype(features) if torch._C._is_any_autocast_enabled() else features.dtype
    if not kept.sent and weight.requires_grad and torch.is_grad_enabled() and pairs_are_faster(dtype):
        # The list of pairs needs their number on the host.
        kernel_map.send_counts()
        kept.sent = True
    initial = bias if bias is None or bias.dtype == dtype else None
    if initial is not None and groups > 1:
        initial = initial.unflatten(0, (groups, -1))
    conv = _Conv(kernel_map, groups, options, kept)
    result = multilinear(conv, "Out", features, weight, initial=initial, plain=True)
    return result if bias is None or initial is not None else result + bias.to(result.dtype)


def fit(features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None, groups: int) -> bool:
    """Whether shapes, dtypes and devices of the operands are those of a convolution over a map."""
    rows, kernel, device, dtype = features.shape, weight.shape, features.device, features.dtype
    sites = kernel_map.inputs.indices
    return (
        len(rows) == 2
        and rows[0] == sites.shape[0]
        and kernel[1:-1] == kernel_map.geometry.kernel_size
        and rows[1] == kernel[-1] * groups
        and kernel[0] % groups == 0
        and (weight.dtype == dtype or product_dtype(weight) == product_dtype(features))
        and dtype.is_floating_point
        and sites.device == device
        and weight.device == device
        and (bias is None or (bias.shape == kernel[:1] and bias.device == device))
    )


class _Kept:
    """What is kept with a map for convolutions of some options, which must not hold the map itself.

    Attributes:
        options: these; as long as they live, so does their identity, by which this is found.
        calls: statements over the map.
        sent: the numbers of pairs were sent to the host.
    """

    __slots__ = ("calls", "options", "sent")

    def __init__(self, options: Options) -> None:
        self.options, self.sent = options, False
        self.calls: dict[tuple[Kind, IndexForm, torch.dtype], _Bound] = {}


class _Conv(BoundSums):
    """The three sums of a convolution over one map."""

    __slots__ = ("groups", "kept", "kernel_map", "options")
    operands: Mapping[str, tuple[str, ...]] = _OPERANDS  # type: ignore[assignment]

    def __init__(self, kernel_map: KernelMap, groups: int, options: Options, kept: _Kept) -> None:
        self.kernel_map, self.groups, self.options, self.kept = kernel_map, groups, options, kept

    def call(
        self, requested: str, operands: tuple[Tensor, ...], made: dict[str, Tensor] | None
    ) -> tuple[BoundProgram, Sequence[Tensor], tuple[int | None, ...], None]:
        kind, (a, b) = cast("Kind", requested), operands
        if made is None:
            form: IndexForm = "pairs"
            a, b = self._split(kind, a, b)
        else:
            form = "list" if kind == "W" and pairs_are_faster(a.dtype) else "table"
            # Kernels are compiled for the layouts of their operands; gradients come in many, so one is enforced.
            if not a.is_contiguous():
                a = a.contiguous()
            if not b.is_contiguous():
                b = b.contiguous()
            if self.groups > 1:
                a, b = self._split(kind, a, b)
            elif kind != "W":
                # The cells of the weight's kernel as one axis, as the statement reads them.
                b = b.flatten(1, -2)
        key = (kind, form, a.dtype)
        found = self.kept.calls.get(key)
        if found is None:
            found = self.kept.calls[key] = _bound(*key, self.kernel_map, self.groups, self.options)
        (program, arrange), indices, shape = found
        return program, arrange((a, b, *indices)), shape, None

    def result(self, requested: str, written: Tensor) -> Tensor:
        if requested == "W":
            return written.reshape(-1, *self.kernel_map.geometry.kernel_size, written.shape[-1])
        return written if self.groups == 1 else written.flatten(1)

    def _split(self, kind: Kind, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The operands as a statement reads them."""
        first, second = _OPERANDS[kind]
        return _split(first, a, self.kernel_map, self.groups), _split(second, b, self.kernel_map, self.groups)


def _bound(
    kind: Kind, form: IndexForm, dtype: torch.dtype, kernel_map: KernelMap, groups: int, options: Options
) -> _Bound:
    rest: tuple[int | None, ...] = (None,) * (1 if groups == 1 else 2)
    if kind == "W":
        shape = (*rest, kernel_map.geometry.volume, None)
    else:
        rows = kernel_map.outputs if kind == "Out" else kernel_map.inputs
        shape = (rows.indices.shape[0], *rest)
    if form == "list":
        indices = kernel_map.pair_list
        if not torch.compiler.is_compiling():
            keep_lengths(indices["Off"], kernel_map.counts, kernel_map.lengths)
    elif form == "table":
        table = kernel_map.inverse_table if kind == "In" else kernel_map.table
        indices = table.tensors
        if table.words is not None and not torch.compiler.is_compiling():
            keep_bitmasks(table.sorted_neighbours, table.words)
    else:
        indices = kernel_map.tensors
    facts, operands = _KNOWN[form], _NAMES[kind, form]
    found = positional_program(_STATEMENTS[kind, groups > 1, form], facts, options, dtype, operands)
    return found, tuple([indices[name] for name in facts]), shape


def _split(kind: Kind, tensor: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
    """Return a tensor with groups of channels, and the cells of the kernel, as axes of their own."""
    if kind == "W":
        outputs, volume, inputs = tensor.shape[0], kernel_map.geometry.volume, tensor.shape[-1]
        return tensor.reshape(*((groups,) if groups > 1 else ()), outputs // groups, volume, inputs)
    return tensor if groups == 1 else tensor.unflatten(1, (groups, tensor.shape[1] // groups))
