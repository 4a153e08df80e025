"""Sparse convolution through the neighbour table of a kernel map, and its gradients, as sums of the same kind.

    Out[Order[i],d] += In[Near[k,i],c] * W[k,c,d]              Out:  each output row is written once, by one tile
    dIn[Order[i],c] += dOut[Near[k,i],d] * W[k,c,d]            In:   the same by the table of the inverse map
    dW[k,c,d] += In[Near[k,i],c] * dOut[Order[i],d]            W:    for each offset by itself

All three contract one form, linear in each of `In`, `W` and `Out`, with two of its tensors, and so leave the third. The
gradient of a contraction is made of the other two, so that derivatives of any order add to no cell from several sides.

The laws of kernel maps make the table complete: at one offset an output meets at most one input, and an input one
output, whatever the kernel; so it needs no other way for maps of certain kinds.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from insum_nn.compiler.api import generates_kernels
from insum_nn.compiler.options import Options
from insum_nn.ops.arguments import run
from insum_nn.ops.graph_product import _exact_dtypes, transformed
from insum_nn.structure.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map_table import TABLE_FACTS

__all__ = ["by_table", "table_conv", "table_operands", "table_statement", "takes_table"]

Kind = Literal["Out", "In", "W"]

# What a contraction leaves, by the tensors it is made of.
_OPERANDS: dict[Kind, tuple[Kind, Kind]] = {"Out": ("In", "W"), "In": ("Out", "W"), "W": ("In", "Out")}
_STATEMENTS: dict[Kind, str] = {
    "Out": "Out[{output},{h}d] += In[{input},{h}c] * W[{cell},{h}c,d]",
    "In": "dIn[{input},{h}c] += dOut[{output},{h}d] * W[{cell},{h}c,d]",
    "W": "dW[{cell},{h}c,d] += In[{input},{h}c] * dOut[{output},{h}d]",
}
_PAIRS = {"output": "OutIdx[g,q]", "input": "InIdx[g,q]", "cell": "Off[g]"}
_TABLES: dict[Kind, dict[str, str]] = {
    "Out": {"output": "Order[i]", "input": "Near[k,i]", "cell": "k"},
    "In": {"output": "Near[k,i]", "input": "Order[i]", "cell": "k"},
    "W": {"output": "Order[i]", "input": "Near[k,i]", "cell": "k"},
}
_FACTS = {**FACTS, **TABLE_FACTS}
# Entries of the largest table: past it (1 GiB of int32, in either direction) the pairs take far less memory.
_MOST_ENTRIES = 1 << 28
# Tests let every device and backend go through the table.
_everywhere = False


def table_statement(*, groups: int = 1) -> str:
    """The statement of a convolution through the table.

    >>> table_statement()
    'Out[Order[i],d] += In[Near[k,i],c] * W[k,c,d]'
    >>> table_statement(groups=2)
    'Out[Order[i],h,d] += In[Near[k,i],h,c] * W[k,h,c,d]'
    """
    return _statement("Out", groups > 1, table=True)


def by_table(device: torch.device, options: Options) -> bool:
    """Whether convolutions on a device go through the table: where a generated kernel runs them.

    Other backends would form what is gathered for all offsets of all outputs, of which the pairs are a small part.
    """
    if _everywhere or options.backend == "triton":
        return True
    return device.type == "cuda" and options.backend == "auto" and generates_kernels()


def takes_table(kernel_map: KernelMap, features: Tensor, cells: Tensor, options: Options) -> bool:
    """Whether `table_conv` can take these tensors, and is the better way.

    Args:
        kernel_map: the map.
        features: `In`.
        cells: `W`.
        options: compile options.
    """
    if torch.compiler.is_compiling() or not by_table(features.device, options) or not _ordinary(features, cells):
        return False
    return kernel_map.geometry.volume * max(kernel_map.num_inputs, kernel_map.num_outputs) <= _MOST_ENTRIES


def table_operands(features: Tensor, cells: Tensor, kernel_map: KernelMap) -> dict[str, Tensor]:
    """The tensors of a convolution by their names in `table_statement`."""
    return {**kernel_map.table.tensors, "In": features, "W": cells}


def table_conv(
    features: Tensor, cells: Tensor, kernel_map: KernelMap, options: Options, bias: Tensor | None = None
) -> Tensor:
    """Convolve through the neighbour table.

        Out[Order[i],d] += In[Near[k,i],c] * W[k,c,d]
        Out[Order[i],h,d] += In[Near[k,i],h,c] * W[k,h,c,d]     with groups of channels h

    A missing neighbour counts as features of zero, so a cell of `W` that is not finite reaches every output.

    Args:
        features: `In`, (n, c) or (n, h, c); differentiable to any order.
        cells: `W`, (o, c, d) or (o, h, c, d), dtype and device of `features`; differentiable to any order.
        kernel_map: the map of n input voxels to m output voxels.
        options: compile options.
        bias: (d,) or (h, d), what every output starts from; dtype of `features`; differentiable to any order.

    Returns:
        `Out`, (m, d) or (m, h, d).
    """
    return _contract("Out", features, cells, kernel_map, options, bias)


def _contract(
    kind: Kind, a: Tensor, b: Tensor, kernel_map: KernelMap, options: Options, bias: Tensor | None = None
) -> Tensor:
    """The tensor of a kind from the two others, in the order of `_OPERANDS`."""
    present = (a, b) if bias is None else (a, b, bias)
    if torch.compiler.is_compiling() or not _ordinary(*present):
        # Who looks on knows the compiler's operator, and wants its derivatives from there.
        return _run(kind, a, b, kernel_map, options, bias, table=False)
    if torch.is_grad_enabled() and any(t.requires_grad for t in present):
        return _Contract.apply(kind, a, b, kernel_map, options, bias)  # type: ignore[no-any-return]
    return _contracted(kind, a, b, kernel_map, options, bias)


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: Kind, a: Tensor, b: Tensor, kernel_map: KernelMap, options: Options, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.rest = kind, kernel_map, options
        return _contracted(kind, a, b, kernel_map, options, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kind, kernel_map, options = ctx.rest
        operands = _OPERANDS[kind]
        known: dict[Kind, Tensor] = {kind: grads[0], **dict(zip(operands, ctx.saved_tensors, strict=True))}
        found: list[Tensor | None] = []
        for wanted, needed in zip(operands, ctx.needs_input_grad[1:3], strict=True):
            a, b = (known[other] for other in _OPERANDS[wanted])
            found.append(_contract(wanted, a, b, kernel_map, options) if needed else None)
        return None, *found, None, None, grads[0].sum(0) if ctx.needs_input_grad[5] else None


def _contracted(
    kind: Kind, a: Tensor, b: Tensor, kernel_map: KernelMap, options: Options, bias: Tensor | None
) -> Tensor:
    with torch.no_grad(), _exact_dtypes(a.device):
        # A kernel is written for the layout of its operands; one layout is enough, and gradients have many.
        return _run(kind, a.contiguous(), b.contiguous(), kernel_map, options, bias, table=True)


def _run(
    kind: Kind,
    a: Tensor,
    b: Tensor,
    kernel_map: KernelMap,
    options: Options,
    bias: Tensor | None,
    *,
    table: bool,
) -> Tensor:
    inner = {"Out": 2, "In": 2, "W": 3}
    grouped = a.ndim > inner[_OPERANDS[kind][0]]
    rows = {"Out": kernel_map.num_outputs, "In": kernel_map.num_inputs, "W": kernel_map.geometry.volume}[kind]
    names = ("dOut" if operand == "Out" else operand for operand in _OPERANDS[kind])
    named = {**_indices(kind, kernel_map, table), **dict(zip(names, (a, b), strict=True))}
    if bias is not None:
        named[kind] = bias
    shape = (rows, *(None,) * (inner[kind] - 1 + grouped))
    return run(_statement(kind, grouped, table=table), _FACTS, named, options, shape)


def _indices(kind: Kind, kernel_map: KernelMap, table: bool) -> dict[str, Tensor]:
    if not table:
        return dict(kernel_map.tensors)
    return dict((kernel_map.inverse if kind == "In" else kernel_map).table.tensors)


def _statement(kind: Kind, grouped: bool, *, table: bool) -> str:
    return _STATEMENTS[kind].format(h="h," if grouped else "", **(_TABLES[kind] if table else _PAIRS))


def _ordinary(*tensors: Tensor) -> bool:
    """Whether nobody records, replaces or differentiates torch's calls by other means than autograd."""
    if transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors)
