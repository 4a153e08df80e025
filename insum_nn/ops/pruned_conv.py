"""Dense images, sparse filters: convolution over the stored weights only, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import Faults
from insum_nn.ops.statements import run, static_shape, under_autocast

__all__ = [
    "KERNEL_AXES",
    "PRUNED_CONV_FACTS",
    "check_pruned_conv",
    "pruned_conv",
    "pruned_conv_expression",
    "pruned_conv_output",
]

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]

KERNEL_AXES = "RST"
"""The table of each axis of the kernel; of two axes the first two."""

_SLOTS = IndexFacts(masked=True, proven=True)
_GUARANTEED = {
    "M": IndexFacts(sorted=True, masked=False, proven=True),
    "Slot": IndexFacts(sorted=True, unique=True, masked=True, proven=True),
    "C": _SLOTS,
}
PRUNED_CONV_FACTS = {d: NamedFacts(_GUARANTEED | dict.fromkeys(KERNEL_AXES[:d], _SLOTS)) for d in (1, 2, 3)}
"""What a layer guarantees of the index tensors it keeps, by the number of its kernel's axes."""


def pruned_conv_expression(stride: Sequence[int] = (1, 1), padding: Sequence[int] = ()) -> str:
    """Return the statement of a convolution with sparse filters.

    Args:
        stride: step of the kernel along each axis: one to three.
        padding: zeros before the first cell of each axis, by default none; those after the last are implied, since
            reads outside are 0.

    >>> pruned_conv_expression((2, 1), (1, 0))
    'O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],2*p+R[g,k]-1,q+S[g,k]]'
    """
    axes = len(stride)
    cells = [
        f"{step}*{index}+{table}[g,k]-{before}".removeprefix("1*").removesuffix("-0")
        for step, before, index, table in zip(stride, padding or (0,) * axes, "pqr"[:axes], KERNEL_AXES, strict=False)
    ]
    return f"O[n,M[g],{','.join('pqr'[:axes])}] += F[Slot[g,k]] * I[n,C[g,k],{','.join(cells)}]"


def pruned_conv_output(
    size: Sequence[int], kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints, owner: str = "pruned_conv"
) -> Ints:
    """Return the extents of the output's axes.

    Args:
        size: of the input.
        kernel: of the kernel.
        stride: step of the kernel.
        padding: zeros (before, after) each axis.
        dilation: step between kernel cells.
        owner: the operator that an error names.

    Raises:
        InsumShapeError: the kernel reaches beyond the padded input.

    >>> pruned_conv_output((32, 32), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))
    (16, 16)
    """
    reach = tuple(step * (cells - 1) + 1 for step, cells in zip(dilation, kernel, strict=True))
    padded = tuple(extent + sum(zeros) for extent, zeros in zip(size, padding, strict=True))
    # Sizes that torch.jit.trace records are known only when the graph runs.
    known = not any(isinstance(extent, Tensor) for extent in size)
    if known and any(there < needed for there, needed in zip(padded, reach, strict=True)):
        raise InsumShapeError(
            f"{owner}{len(size)}d: a kernel that spans {reach} does not fit an input of {padded}, padding included",
            fix="pass a larger input, or pad it.",
            argument="input",
            expected=reach,
            got=padded,
        )
    return tuple((there - needed) // step + 1 for there, needed, step in zip(padded, reach, stride, strict=True))


def pruned_conv(
    input: Tensor,
    weight: Tensor,
    index: Mapping[str, Tensor],
    channels: tuple[int, int],
    output: Sequence[int],
    bias: Tensor | None = None,
    *,
    stride: Sequence[int] = (),
    padding: Sequence[int] = (),
    options: Options = DEFAULT,
) -> Tensor:
    """Convolve images with filters of which only some weights are stored, in one to three dimensions.

        O[n,M[g],p] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k]]
        O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k]]
        O[n,M[g],p,q,r] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k],r+T[g,k]]

    A group holds stored weights of one filter; -1 in an index tensor marks an unused slot. With a stride s and padding
    z the cells read are `s*p+R[g,k]-z`, and likewise along the other axes.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), section 4.1; grouped as in
    Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.1.

    Args:
        input: `I`, (n, channels, ..), with one to three axes after the channels; differentiable.
        weight: `F`, (p,) stored weights; differentiable.
        index: `M` (g,) filter; `Slot`, `C`, `R`, `S`, `T` (g, k): number of the stored weight, input channel, and place
            in the kernel along each axis times the dilation. The caller guarantees `PRUNED_CONV_FACTS`: nothing is
            read.
        channels: input and output channels.
        output: extents of the output's axes; see `pruned_conv_output`.
        bias: (output channels,), added; differentiable.
        stride: step of the kernel along each axis, by default 1.
        padding: zeros before the first cell of each axis, by default none.
        options: compile options.

    Returns:
        `O`, (n, output channels, *output), of the input's dtype; fp16 and bf16 accumulate in float32. Under autocast:
        its dtype.

    Raises:
        InsumShapeError: the input has not these channels.
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.

    >>> import torch
    >>> one = torch.zeros(1, 1, dtype=torch.int32)
    >>> index = {"M": one[0], "Slot": one, "C": one, "R": one + 1, "S": one}
    >>> pruned_conv(torch.arange(6.0).reshape(1, 1, 3, 2), torch.tensor([10.0]), index, (1, 1), (2, 2)).tolist()
    [[[[20.0, 30.0], [40.0, 50.0]]]]
    """
    axes = len(output)
    expression = pruned_conv_expression(stride or (1,) * axes, padding)
    check_pruned_conv(input, weight, channels[0], bias, expression, axes)
    named = {"I": input, "F": weight, **index}
    result = run(expression, PRUNED_CONV_FACTS[axes], named, options, (None, channels[1], *output))
    return result if bias is None else result + bias.type_as(result).reshape(-1, *(1,) * axes)


def check_pruned_conv(
    input: Tensor, weight: Tensor, channels: int, bias: Tensor | None, expression: str, axes: int
) -> None:
    """Raise unless `input` is a batch of these channels and axes that fits the weight."""
    got, device = tuple(static_shape(input)), input.device
    same = input.dtype == weight.dtype and weight.device == device and (bias is None or bias.device == device)
    if same and len(got) == 2 + axes and got[1] == channels:
        return
    faults = Faults(f"pruned_conv{axes}d", expression)
    message, fix = f"must be a batch with {channels} channels", f"pass an input with {channels} channels."
    expected = ("n", channels, *("depth", "rows", "columns")[-axes:])
    faults.shape("input", input, expected, message=message, fix=fix, symbols=["I"])
    faults.layer_input(input, weight, bias, cast=under_autocast(input.device), symbols=["F", "I"])
    faults.raise_all()
