"""Convolution over the pairs of a kernel map, or over its table of neighbours where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor

from insum_nn.compiler.api import by_table
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.ops.faults import Faults
from insum_nn.ops.sparse_conv_table import fit, table_conv, table_statement
from insum_nn.ops.statements import product_dtype, run, to_autocast
from insum_nn.structure.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map.tables import TABLE_FACTS

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
]

# A statement, its tensors by name, and the shape of its output.
_Statement = tuple[str, dict[str, Tensor], tuple[int | None, ...]]

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
        result = table_conv(features, weight, kernel_map, groups, options, bias)
        if result is not None:
            return result
    _check(features, weight, kernel_map, bias, groups)
    if options.validate and kernel_map is not None:
        kernel_map.validate()
    initial = _initial(features, weight, bias, groups)
    expression, named, shape = _statement(features, weight, kernel_map, groups, initial)
    result = run(expression, FACTS, named, options, shape)
    if groups > 1:
        result = result.flatten(1)
    return result if bias is None or initial is not None else result + bias.to(result.dtype)


def _initial(features: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor | None:
    """Return a bias as the sum's initial value, where it can be: it spares a pass over the output."""
    if bias is None or not bias.dtype == product_dtype(features) == product_dtype(weight):
        return None
    return bias.unflatten(0, (groups, -1)) if groups > 1 else bias


def _statement(
    features: Tensor,
    weight: Tensor,
    kernel_map: KernelMap | None,
    groups: int,
    initial: Tensor | None,
) -> _Statement:
    expression = sparse_conv_expression(groups=groups, pointwise=kernel_map is None)
    named = _values(features, weight, groups, pointwise=kernel_map is None)
    named |= {} if kernel_map is None else kernel_map.tensors
    if initial is not None:
        named["Out"] = initial
    rows = None if kernel_map is None else kernel_map.num_outputs
    return expression, named, (rows, *(None,) * (1 if groups == 1 else 2))


def _check(features: Tensor, weight: Tensor, kernel_map: KernelMap | None, bias: Tensor | None, groups: int) -> None:
    if kernel_map is not None and fit(features, weight, kernel_map, bias, groups):
        return
    if kernel_map is not None:
        check_features("sparse_conv", features, kernel_map.num_inputs, kernel_map.device)
    else:
        check_features("sparse_conv", features)
    expression = sparse_conv_expression(groups=groups, pointwise=kernel_map is None)
    _check_weight(expression, features, weight, kernel_map, bias, groups)


def _values(features: Tensor, weight: Tensor, groups: int, *, pointwise: bool) -> dict[str, Tensor]:
    """Return the operands without the index tensors."""
    features, weight = to_autocast(features), to_autocast(weight)
    outputs, inputs = weight.shape[0], weight.shape[-1]
    # (h, d, o, c) -> (o, h, c, d); one copy of the weights, so that a group's slice is read in one piece.
    cells = weight.reshape(groups, outputs // groups, -1, inputs).permute(2, 0, 3, 1)
    if groups == 1:
        cells = cells.squeeze(1)
    if pointwise:
        cells = cells.squeeze(0)
    cells = cells.contiguous()
    source = features if groups == 1 else features.unflatten(1, (groups, inputs))
    return {"In": source, "W": cells}


def check_features(owner: str, features: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
    """Raise unless `features` is a floating (rows, channels) tensor on the voxels' device, where these are given."""
    faults = Faults(owner)
    shape = tuple(features.shape)
    if features.ndim != 2 or (rows is not None and shape[0] != rows):
        faults.add(
            InsumShapeError,
            "features",
            "must have one row per input voxel",
            details=[f"expected shape ({'voxels' if rows is None else rows}, channels); got {shape}"],
            fix="pass the features in the order of the tensor's indices.",
            expected_got=(rows, shape),
        )
    if not features.dtype.is_floating_point:
        message = f"must be floating, got {str(features.dtype).removeprefix('torch.')}"
        faults.add(InsumDtypeError, "features", message, fix="pass features.float().", got=features.dtype)
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
