"""Convolutions of sparse activations, by dense or by sparse filters, and convolutions under a mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.facts import UNKNOWN, IndexFacts
from insum_nn.formats import COO, ELL, SparseFormat
from insum_nn.formats.arguments import expand_nd
from insum_nn.formats.base import dim_name
from insum_nn.ops.arguments import Operand, named_tensors, require_format
from insum_nn.ops.pruned_conv import KERNEL_AXES, pruned_conv_output
from insum_nn.ops.statements import run

__all__ = ["activation_conv", "activation_conv_expression", "masked_conv"]

Ints = int | Sequence[int]

_MASKED = IndexFacts(masked=True, proven=True)


def activation_conv_expression(axes: int = 2, *, dual: bool = False, masked: bool = False) -> str:
    """Return the statement of a convolution with one to three axes.

    Args:
        axes: of the kernel.
        dual: filters are sparse too.
        masked: activations are dense, and cells of the output are selected.

    >>> activation_conv_expression(1)
    'O[Index0[p],U[Index2[p],r],G[Index1[p]],m] += Val[p] * F[Index1[p],r,m]'
    """
    ndim = axes + 2 - masked
    entry = [f"{dim_name(dim, ndim)}[p]" for dim in range(ndim)]
    sample, channel, cells = entry[0], entry[1], ",".join(entry[1:])
    kernel = [f"{table}[{channel},k]" if dual else table.lower() for table in KERNEL_AXES[:axes]]
    reached = ",".join(f"{u}[{cell},{r}]" for u, cell, r in zip("UVW", entry[-axes:], kernel, strict=False))
    if masked:
        return f"O[{sample},{cells},g,m] += I[{sample},{reached},g,c] * F[g,{','.join(kernel)},c,m]"
    if dual:
        return f"O[{sample},{reached},M[{channel},k]] += Val[p] * F[{channel},k]"
    return f"O[{sample},{reached},G[{channel}],m] += Val[p] * F[{channel},{','.join(kernel)},m]"


def activation_conv(
    input: SparseFormat,
    weight: Tensor | SparseFormat,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    options: Options = DEFAULT,
) -> Tensor:
    """Convolve sparse activations, by dense or by sparse filters, in one to three dimensions.

        dense     O[Index0[p],U[Index2[p],r],V[Index3[p],s],G[Index1[p]],m] += Val[p] * F[Index1[p],r,s,m]
        sparse    O[Index0[p],U[Index2[p],R[Index1[p],k]],V[Index3[p],S[Index1[p],k]],M[Index1[p],k]]
                      += Val[p] * F[Index1[p],k]

    A stored activation `p` meets the filters of its channel. The small tables `U`, `V` and `W` hold, for each place of
    the input along an axis and each cell of the kernel, the place of the output that is reached, or -1: stride, padding
    and dilation stand in them alone. `G` is the group of a channel, and `M` the filter of a stored weight.

    On one core of a Xeon, forward, in milliseconds, with 3x3 filters and one image in float32:

        zeros                               50 %    80 %    90 %    95 %    99 %    conv2d
        dense filters, 64 of 56 x 56         5.2     2.6     1.7     1.1     0.6       1.9
        dense filters, 256 of 14 x 14        3.9     2.4     1.6     1.1     0.7       2.0
        dense filters, 512 of 7 x 7          4.4     2.7     2.0     1.6     0.9       4.0
        sparse filters, 256 of 14 x 14        75      15     4.7     1.8     0.6       2.0

    So dense filters win from 80 to 90 % zeros on, and with their gradients from about 80 %. Sparse filters, whose terms
    are added one by one, beat `conv2d` where both sides have 95 % zeros, and dense filters at 99 %. `COO.from_dense` of
    the activations is not in these times. It takes 0.3 to 1.2 ms at 90 %: with it, the 64 filters win at 99 % only, the
    256 from 90 %, and the 512 from 80 % on.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), table 2, section 4.1.2.

    Args:
        input: (n, channels, ..) with one to three axes after the channels, in any format, as of `COO.from_dense`. Its
            values are differentiable; activations that are not stored have no gradient.
        weight: (filters, channels / groups, ..) as in torch, dense or in a sparse format; dtype and device of the
            values; differentiable. Dense filters are read in place if they are last in memory, sparse ones if they are
            `ELL.from_dense(weight, group_dim=1)`.
        bias: (filters,), added; differentiable.
        stride: step of the kernel; one number, or one for each axis.
        padding: zeros before and after each axis.
        dilation: step between cells of the kernel.
        groups: groups of channels.
        options: compile options; see `insum_nn.Options`.

    Returns:
        (n, filters, ..), dense, the filters last in memory (`torch.channels_last`); fp16 and bf16 accumulate in
        float32.

    Raises:
        InsumShapeError: ranks, channels or groups do not fit, or the kernel does not fit the input.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.
        InsumFormatError: the input is in no sparse format.

    >>> sparse = COO.from_dense(torch.tensor([[[0.0, 0.0, 5.0, 0.0]]]))
    >>> activation_conv(sparse, torch.tensor([[[1.0, 2.0, 3.0]]]), padding=1).tolist()
    [[[0.0, 15.0, 10.0, 5.0]]]
    """
    require_format(input, "activation_conv", "input", recommended=COO)
    size, tables = _geometry("activation_conv", input, weight, (stride, padding, dilation), groups)
    channels, filters, entries, known = input.shape[1], weight.shape[0], input.entries(), _MASKED
    group = torch.arange(channels, dtype=torch.int32, device=input.device) * groups // max(channels, 1)
    if isinstance(weight, Tensor):
        tables, last = {**tables, "G": group}, (groups, filters // groups)
        factor, extents = weight, (filters, channels // groups, *weight.shape[2:])
    else:
        stored = weight if isinstance(weight, ELL) and weight.group_dim == 1 else ELL.from_coo(weight, group_dim=1)
        factor, extents = stored.values, (channels // groups, stored.width)
        last = (filters,)
        known = _MASKED if all(fact.proven for fact in stored.facts.values()) else UNKNOWN
        # What is stored of a channel, once for each group; -1 stands for a filter of another group.
        tables |= zip("MRST", (table.repeat(groups, 1) for table in stored.indices), strict=False)
        tables["M"] = tables["M"].where(tables["M"] * groups // max(filters, 1) == group[:, None], -1)
    dense, expression = len(last) == 2, activation_conv_expression(input.ndim - 2, dual=len(last) == 1)
    operands = _operands(("weight", "F", factor, extents), ("bias", "Bias", bias, (filters,)))
    named = named_tensors("activation_conv", expression, entries, operands) | tables
    added, f = named.pop("Bias", None), named["F"]
    named["F"] = f.unflatten(0, last).movedim(1, -1).flatten(0, 1).contiguous() if dense else f.repeat(groups, 1)
    facts = {**entries.facts, **dict.fromkeys("UVWG", _MASKED), **dict.fromkeys("MRST", known)}
    result = run(expression, facts, named, options, (*size, *last)).reshape(*size, filters)
    return (result if added is None else result + added).movedim(-1, 1)


def masked_conv(
    input: Tensor,
    weight: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    options: Options = DEFAULT,
) -> Tensor:
    """Convolve where a mask is set and nowhere else, in one to three dimensions.

        O[Index0[p],Index1[p],Index2[p],g,m] += I[Index0[p],U[Index1[p],r],V[Index2[p],s],g,c] * F[g,r,s,c,m]

    The entries `p` are the cells of the output at which the mask is set. The small tables `U`, `V` and `W` hold, for
    each place of the output along an axis and each cell of the kernel, the place of the input that is read, or -1.
    With the mask of the cells that are not zero this is a submanifold convolution; that of a list of cells is
    `insum_nn.ops.sparse_conv`.

    On one core of a Xeon it takes 1.9, 1.3, 0.9 and 0.6 ms at masks of 20, 10, 5 and 1 %, where `conv2d` takes 1.9 ms
    (64 filters of 3 x 3, one image of 56 x 56, float32, forward), and wins from 20 % on; with 256 filters of 14 x 14
    from 10 % on.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), table 2, section 4.2.

    Args:
        input: `I`, (n, channels, ..) with one to three axes after the channels; differentiable.
        weight: (filters, channels / groups, ..) as in torch; dtype and device of the input; differentiable.
        mask: (n, ..), bool: cells of the output.
        bias: (filters,), added where the mask is set; differentiable.
        stride: as in `activation_conv`.
        padding: as in `activation_conv`.
        dilation: as in `activation_conv`.
        groups: groups of channels.
        options: compile options; see `insum_nn.Options`.

    Returns:
        (n, filters, ..), 0 where the mask is not set, the filters last in memory (`torch.channels_last`); fp16 and bf16
        accumulate in float32.

    Raises:
        InsumShapeError: ranks, channels, groups or the mask do not fit, or the kernel does not fit the input.
        InsumDtypeError: dtypes differ, or the mask is not bool.
        InsumDeviceError: devices differ.

    >>> masked_conv(torch.ones(1, 1, 4), torch.ones(1, 1, 3), torch.tensor([[True, False, True, False]]), padding=1)
    tensor([[[2., 0., 3., 0.]]])
    """
    size, tables = _geometry("masked_conv", input, weight, (stride, padding, dilation), groups)
    channels, filters = input.shape[1], weight.shape[0]
    entries = COO.from_dense(input.new_zeros(size), mask=mask)
    expression = activation_conv_expression(len(size) - 1, masked=True)
    extents = (filters, channels // groups, *weight.shape[2:])
    given = ("input", "I", input, input.shape), ("weight", "F", weight, extents), ("bias", "Bias", bias, (filters,))
    named = named_tensors("masked_conv", expression, entries, _operands(*given)) | tables
    added, _ = named.pop("Bias", None), named.pop("Val")
    named["I"] = named["I"].movedim(1, -1).unflatten(-1, (groups, channels // groups)).contiguous()
    named["F"] = named["F"].unflatten(0, (groups, filters // groups)).movedim((1, 2), (-1, -2)).contiguous()
    facts = {**entries.facts, **dict.fromkeys("UVW", _MASKED)}
    result = run(expression, facts, named, options, (*size, groups, filters // groups)).flatten(-2)
    return (result if added is None else result + mask.unsqueeze(-1) * added).movedim(-1, 1)


def _geometry(
    caller: str, input: Tensor | SparseFormat, weight: Tensor | SparseFormat, steps: tuple[Ints, ...], groups: int
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return samples and cells of the output, and the table of each axis, after checks of what no tensor knows alone.

    A table holds the place of the output that each place of the input reaches through each cell of the kernel. That of
    `masked_conv` holds the place of the input that each place of the output reads. -1: none.
    """
    shape, kernel, axes = input.shape, weight.shape, len(input.shape) - 2
    fits = 1 <= axes <= 3 and len(kernel) == len(shape) and groups > 0
    if not fits or kernel[1] * groups != shape[1] or kernel[0] % groups:
        raise InsumShapeError(
            f"{caller} cannot convolve an input {tuple(shape)} with a weight {tuple(kernel)} and groups={groups}",
            details=["expected (n, channels, ..) and (filters, channels / groups, ..), with one to three axes"],
            fix="pass as many axes in both, and groups that divide the filters.",
        )
    names = ("stride", 1), ("padding", 0), ("dilation", 1)
    each = [expand_nd(caller, name, axes, value, least) for (name, least), value in zip(names, steps, strict=True)]
    stride, zeros, gaps = map(tuple, each)
    output = pruned_conv_output(shape[2:], tuple(kernel[2:]), stride, tuple((z, z) for z in zeros), gaps, caller)
    tables: dict[str, Tensor] = {}
    for name, here, there, cells, step, before, gap in zip("UVW", shape[2:], output, kernel[2:], *each, strict=False):
        cell, place = (
            torch.arange(count, dtype=torch.int32, device=input.device) for count in (cells, max(here, there))
        )
        shift = gap * cell - before
        if caller == "masked_conv":
            reached, extent = step * place[:there, None] + shift, here
        else:
            reached, extent = place[:here, None] - shift, there
            reached = reached if step == 1 else (reached // step).where(reached % step == 0, -1)
        tables[name] = reached.where(reached < extent, -1).clamp(min=-1)
    return (shape[0], *output), tables


def _operands(*given: tuple[str, str, Tensor | None, Sequence[int]]) -> list[Operand]:
    """Return dense arguments with their names and extents; what is not there is left out."""
    return [
        Operand(argument, symbol, tensor, tuple((f"d{axis}", extent) for axis, extent in enumerate(extents)))
        for argument, symbol, tensor, extents in given
        if tensor is not None
    ]
