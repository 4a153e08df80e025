"""Convolution over the pairs of a kernel map, or over its table of neighbours where that is faster.

    Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]

Gradients of this statement are derived. Over the table they are sums of the same kind:

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

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Program,
    Sums,
    built_program,
    by_table,
    is_plain_eager,
    keep_bitmasks,
    keep_lengths,
    multilinear,
    pairs_are_faster,
)
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDeviceError, InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import Faults
from insum_nn.ops.statements import product_dtype, run, to_autocast
from insum_nn.structure.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map.tables import LIST_FACTS, MOST_ENTRIES, TABLE_FACTS

__all__ = [
    "ROW_FACTS",
    "SPARSE_CONV",
    "SPARSE_CONV_GROUPS",
    "SPARSE_CONV_POINTWISE",
    "SPARSE_CONV_POINTWISE_GROUPS",
    "VOXEL_FACTS",
    "check_features",
    "sparse_conv",
    "sparse_conv_expression",
    "table_statement",
]

SPARSE_CONV = "Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]"
SPARSE_CONV_GROUPS = "Out[OutIdx[g,q],h,d] += In[InIdx[g,q],h,c] * W[Off[g],h,c,d]"
SPARSE_CONV_POINTWISE = "Out[p,d] += In[p,c] * W[c,d]"
SPARSE_CONV_POINTWISE_GROUPS = "Out[p,h,d] += In[p,h,c] * W[h,c,d]"

# Entries of proven coordinates, and places among distinct voxels, point inside, and none is missing.
ROW_FACTS = NamedFacts(
    Batch=IndexFacts(masked=False, proven=True),
    Cell=IndexFacts(masked=False, proven=True, unique=True),
    Row=IndexFacts(masked=False, proven=True),
)
VOXEL_FACTS = NamedFacts({**FACTS, **TABLE_FACTS, **ROW_FACTS})
"""What maps and proven voxels guarantee of the index tensors of every statement over voxels."""


def sparse_conv_expression(
    *,
    groups: int = 1,
    pointwise: bool = False,
    device: torch.device | str | None = None,
    options: Options = DEFAULT,
) -> str:
    """Return the statement of a sparse convolution.

    Args:
        groups: groups of channels, as in torch's convolutions.
        pointwise: a kernel of one cell that lies on its voxel: a dense product, without a map.
        device: where it runs; a GPU runs over a table of neighbours. Default: the statement over pairs.
        options: compile options; a backend may run another statement.

    >>> sparse_conv_expression()
    'Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]'
    """
    if pointwise:
        return SPARSE_CONV_POINTWISE if groups == 1 else SPARSE_CONV_POINTWISE_GROUPS
    if device is not None and by_table(torch.device(device), options):
        return table_statement(groups=groups)
    return SPARSE_CONV if groups == 1 else SPARSE_CONV_GROUPS


def sparse_conv(
    features: Tensor,
    weight: Tensor,
    kernel_map: KernelMap | None,
    bias: Tensor | None = None,
    *,
    groups: int = 1,
    options: Options = DEFAULT,
) -> Tensor:
    """Convolve the features of active voxels.

        Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]
        Out[OutIdx[g,q],h,d] += In[InIdx[g,q],h,c] * W[Off[g],h,c,d]     with groups of channels h

    On a GPU the same sum runs over the map's table of neighbours, so that every output row is written once:

        Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 5 (sparse convolution), with pairs grouped by
    kernel offset: a group shares its slice of the weights, so nothing of the size [pairs, c, d] is formed.

    Args:
        features: `In`, (n, I); differentiable.
        weight: (O, k_1, .., k_d, I / groups), dtype and device of `features`; differentiable. `W` is this with the
            offset first, (o, c, d), or over the table in its own order, (d, o, c).
        kernel_map: the map of n input voxels to m output voxels. `None`: a kernel of one cell on its own voxel, which
            needs no map; the statement is then a dense product.
        bias: (O,), added to every output voxel; differentiable.
        groups: groups of channels.
        options: compile options; see `insum_nn.Options`.

    Returns:
        `Out`, (m, O), of the features' dtype; fp16 and bf16 accumulate in float32. Under autocast: its dtype.

    Raises:
        InsumShapeError: rows of `features` are not the map's inputs, or channels or kernel disagree with `weight`.
        InsumDtypeError: dtypes differ, or are not floating.
        InsumDeviceError: devices differ.

    >>> from insum_nn.structure.coordinates import Coordinates
    >>> from insum_nn.structure.kernel_map.kernel_map import Geometry
    >>> from insum_nn.structure.kernel_map.build import build_kernel_map
    >>> sites = Coordinates(torch.tensor([[0, 0], [0, 1]]), (4,), 1)
    >>> near = build_kernel_map(sites, Geometry("subm", (3,), (1,), (1,), (1,), (0,)))
    >>> sparse_conv(torch.tensor([[1.0], [2.0]]), torch.tensor([[[1.0], [10.0], [100.0]]]), near).tolist()
    [[210.0], [21.0]]
    """
    if kernel_map is not None and not torch.compiler.is_compiling():
        result = _table_conv(features, weight, kernel_map, bias, groups, options)
        if result is not None:
            return result
    expression = sparse_conv_expression(groups=groups, pointwise=kernel_map is None)
    if kernel_map is None or not _fit(features, weight, kernel_map, bias, groups):
        rows, device = (None, None) if kernel_map is None else (kernel_map.num_inputs, kernel_map.device)
        check_features("sparse_conv", features, rows, device)
        _check_weight(expression, features, weight, kernel_map, bias, groups)
    if options.validate and kernel_map is not None:
        kernel_map.validate()
    named, rows = _values(features, weight, groups, pointwise=kernel_map is None), None
    if kernel_map is not None:
        named, rows = {**named, **kernel_map.tensors}, kernel_map.num_outputs
    # As the sum's initial value the bias spares a pass over the output.
    initial = bias if bias is not None and bias.dtype == named["In"].dtype else None
    if initial is not None:
        named["Out"] = _split(initial, groups)
    result = run(expression, FACTS, named, options, (rows, *_AXES[int(groups > 1)]))
    if groups > 1:
        result = result.flatten(1)
    return result if bias is None or initial is not None else result + bias.to(result.dtype)


# Groups of channels are an axis of their own, h, where there are several. These are the axes of an output that channels
# take, whose extents are inferred.
_AXES = ((None,), (None, None))


def _split(rows: Tensor, groups: int) -> Tensor:
    """Return features (n, C) or a bias (C,) with groups as an axis."""
    return rows if groups == 1 else rows.unflatten(-1, (groups, rows.shape[-1] // groups))


def _values(features: Tensor, weight: Tensor, groups: int, *, pointwise: bool) -> dict[str, Tensor]:
    """Return the operands without the index tensors."""
    features, weight = to_autocast(features), to_autocast(weight)
    outputs, inputs = weight.shape[0], weight.shape[-1]
    # (h, d, o, c) -> (o, h, c, d); one copy of the weights, so that a group's slice is read in one piece.
    cells = weight.reshape(groups, outputs // groups, math.prod(weight.shape[1:-1]), inputs).permute(2, 0, 3, 1)
    if groups == 1:
        cells = cells.squeeze(1)
    if pointwise:
        cells = cells.squeeze(0)
    cells = cells.contiguous()
    return {"In": _split(features, groups), "W": cells}


def _fit(features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None, groups: int) -> bool:
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


def check_features(owner: str, features: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
    """Raise unless `features` is a floating (rows, channels) tensor on the voxels' device, where these are given."""
    faults = Faults(owner)
    message, fix = "must have one row per input voxel", "pass the features in the order of the tensor's indices."
    faults.shape("features", features, ("voxels" if rows is None else rows, "channels"), message=message, fix=fix)
    faults.floating("features", features)
    if device is not None and features.device != device:
        message, fix = f"is on {features.device}, the voxels are on {device}", f"pass features.to('{device}')."
        faults.add(InsumDeviceError, "features", message, fix=fix, expected_got=(device, features.device))
    faults.raise_all()


def _check_weight(
    expression: str, features: Tensor, weight: Tensor, kernel_map: KernelMap | None, bias: Tensor | None, groups: int
) -> None:
    faults = Faults("sparse_conv", expression)
    shape = tuple(weight.shape)
    kernel = (1,) * (len(shape) - 2) if kernel_map is None else kernel_map.geometry.kernel_size
    if weight.ndim != len(kernel) + 2 or shape[1:-1] != kernel or shape[0] % groups:
        faults.add(
            InsumShapeError,
            "weight",
            f"has shape {shape}",
            details=[f"expected (out_channels, {', '.join(map(str, kernel))}, in_channels / {groups} groups)"],
            fix="give the weight the kernel size of the map, with in_channels last.",
            symbols=["W"],
            expected_got=(kernel, shape),
        )
    elif features.shape[1] != (channels := shape[-1] * groups):
        faults.add(
            InsumShapeError,
            "features",
            f"has {features.shape[1]} channels, 'weight' reads {channels}",
            details=[f"features {tuple(features.shape)}, weight {shape}, groups {groups}"],
            fix=f"pass features with {channels} channels.",
            symbols=["In", "W"],
            expected_got=(channels, features.shape[1]),
        )
    faults.bias(bias, shape[0], "channel")
    if product_dtype(weight) != product_dtype(features):
        fix = f"pass features.to({weight.dtype}), or run under torch.autocast."
        faults.dtype("features", features, "weight", weight, fix=fix, symbols=["In", "W"])
    faults.layer_devices(weight, bias, "features", features)
    faults.raise_all()


# Over the table.

# A statement over a map: its program, what puts tensors into its order, its index tensors, and its output's shape.
_Bound = tuple[Program, Callable[[Sequence[Tensor]], Sequence[Tensor]], tuple[Tensor, ...], tuple[int | None, ...]]

# The statement of each result with groups of channels `h`, and what it reads as it is given: the two tensors that are
# contracted, then the index tensors of the map's table (of its inverse's, for `In`), or of the list of pairs.
_TEXTS = {
    "Out": "Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]",
    "In": "dIn[Order[i],h,c] += dOut[Near[k,i],h,d] * W[h,d,k,c]",
    "W": "dW[h,d,k,c] += dOut[Order[i],h,d] * In[Near[k,i],h,c]",
    "W by pairs": "dW[h,d,Off[p],c] += dOut[OutIdx[p],h,d] * In[InIdx[p],h,c]",
}
_OPERANDS = {"Out": ("In", "W"), "In": ("Out", "W"), "W": ("Out", "In")}
_GIVEN = {"Out": ("In", "W"), "In": ("dOut", "W"), "W": ("dOut", "In")}


def table_statement(*, groups: int = 1) -> str:
    """Return the statement of a convolution through the table.

    >>> table_statement()
    'Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]'
    >>> table_statement(groups=2)
    'Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]'
    """
    return _TEXTS["Out"] if groups > 1 else _TEXTS["Out"].replace("h,", "")


def _table_conv(
    features: Tensor, weight: Tensor, kernel_map: KernelMap, bias: Tensor | None, groups: int, options: Options
) -> Tensor | None:
    """Convolve through the neighbour table, where that is the better way.

        Out[Order[i],d] += In[Near[k,i],c] * W[d,k,c]
        Out[Order[i],h,d] += In[Near[k,i],h,c] * W[h,d,k,c]     with groups of channels h

    A missing neighbour counts as zero features, so an infinite or NaN weight reaches every output. All of `features`,
    `weight` and `bias` are differentiable to any order.

    Returns:
        `Out`, (m, O); `None` where it goes by pairs: on other devices, under modes, for the largest tables; and where
        the operands do not fit.
    """
    if options.validate:
        # Which forgets what is kept.
        kernel_map.validate()
    calls, key = kernel_map.calls, (groups, id(options))
    if key not in calls:
        rows = max(kernel_map.inputs.indices.shape[0], kernel_map.outputs.indices.shape[0])
        if not by_table(features.device, options) or kernel_map.geometry.volume * rows > MOST_ENTRIES:
            return None
        # As long as the options are kept, so is their identity; and whether the numbers of pairs were sent to the host.
        calls[key] = [options, False]
    if not is_plain_eager(features, weight, bias) or not _fit(features, weight, kernel_map, bias, groups):
        return None
    if torch._C._is_any_autocast_enabled():
        features, weight = to_autocast(features), to_autocast(weight)
    dtype = features.dtype
    if weight.requires_grad and not calls[key][1] and torch.is_grad_enabled() and pairs_are_faster(dtype):
        # The list of pairs needs them.
        kernel_map.send_counts()
        calls[key][1] = True
    initial = None if bias is None or bias.dtype != dtype else _split(bias, groups)
    conv = _Conv(kernel_map, groups, options, calls)
    result = multilinear(conv, ("Out",), {"In": features, "W": weight}, initial, plain=True)["Out"]
    return result if bias is None or initial is not None else result + bias.to(result.dtype)


Operands = Mapping[str, Tensor]


class _Conv(Sums):
    """The three sums of a convolution over one map, which keeps their statements."""

    # Without a Python function for each.
    indices, kind = (), property(type)  # type: ignore[assignment]

    def __init__(self, kernel_map: KernelMap, groups: int, options: Options, calls: dict[Any, Any]) -> None:
        self.kernel_map, self.groups, self.options, self.calls = kernel_map, groups, options, calls

    def run(
        self, requested: Sequence[str], operands: Operands, initial: Tensor | None = None, *, plain: bool = False
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in requested:
            program, read, shape = self._call(name, *map(operands.__getitem__, _OPERANDS[name]), plain=plain)
            if plain:
                written = program.run_plain(read, shape, initial)
            else:
                written = program(tensors=program.named(read, initial), out_shape=shape)
            if name == "W":
                written = written.flatten(0, -3).unflatten(1, self.kernel_map.geometry.kernel_size)
            found[name] = written if name == "W" or self.groups == 1 else written.flatten(1)
        return found

    def in_modes(self, requested: str, operands: Operands, initial: Tensor | None = None) -> Tensor:
        """Compute one; where tensors are not plain by a program, which follows every mode and has its derivatives."""
        if is_plain_eager(*operands.values(), initial):
            return multilinear(self, (requested,), operands, initial, plain=True)[requested]
        return self.run((requested,), operands, initial)[requested]

    def _call(
        self, kind: str, a: Tensor, b: Tensor, *, plain: bool
    ) -> tuple[Program, Sequence[Tensor], tuple[int | None, ...]]:
        """Return the statement that computes a tensor, what it reads, and its output's shape."""
        groups = self.groups
        text = "W by pairs" if kind == "W" and pairs_are_faster(a.dtype) else kind
        if plain:
            # Kernels are compiled for the layouts of their operands; gradients come in many, so one is enforced.
            a, b = a.contiguous(), b.contiguous()
        # Groups of channels, and the cells of the weight's kernel, are axes of a statement's operands.
        if kind != "W":
            b = b.flatten(1, -2)
        if groups > 1:
            a = _split(a, groups)
            b = _split(b, groups) if kind == "W" else b.unflatten(0, (groups, b.shape[0] // groups))
        key = (text, groups, id(self.options))
        found = self.calls.get(key)
        if found is None:
            found = self.calls[key] = _bound(kind, text, self.kernel_map, groups, self.options)
        program, arrange, indices, shape = found
        return program, arrange((a, b, *indices)), shape


def _bound(kind: str, text: str, kernel_map: KernelMap, groups: int, options: Options) -> _Bound:
    if kind == "W":
        shape = (*_AXES[int(groups > 1)], kernel_map.geometry.volume, None)
    else:
        rows = kernel_map.outputs if kind == "Out" else kernel_map.inputs
        shape = (rows.indices.shape[0], *_AXES[int(groups > 1)])
    if text != kind:
        indices, facts = kernel_map.pair_list, LIST_FACTS
        if not torch.compiler.is_compiling():
            keep_lengths(indices["Off"], kernel_map.counts, kernel_map.lengths)
    else:
        table = kernel_map.inverse_table if kind == "In" else kernel_map.table
        indices, facts = table.tensors, TABLE_FACTS
        if table.words is not None and not torch.compiler.is_compiling():
            keep_bitmasks(table.sorted_neighbours, table.words)
    program = built_program(_TEXTS[text] if groups > 1 else _TEXTS[text].replace("h,", ""), facts, options)
    names = [*_GIVEN[kind], *facts]
    arrange = itemgetter(*map(names.index, program.names))
    return program, arrange, tuple([indices[name] for name in facts]), shape
