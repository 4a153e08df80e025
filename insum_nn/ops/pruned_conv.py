"""Dense images, sparse filters: convolution in two dimensions over the stored weights only."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDtypeError, InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import Faults
from insum_nn.ops.statements import run, static_shape, under_autocast

__all__ = [
    "PRUNED_CONV2D_FACTS",
    "check_pruned_conv2d",
    "pruned_conv2d",
    "pruned_conv2d_expression",
    "pruned_conv2d_output",
]

Pair = tuple[int, int]

_SLOTS = IndexFacts(masked=True, proven=True)

PRUNED_CONV2D_FACTS = NamedFacts(
    {
        "M": IndexFacts(sorted=True, masked=False, proven=True),
        "Slot": IndexFacts(sorted=True, unique=True, masked=True, proven=True),
        "C": _SLOTS,
        "R": _SLOTS,
        "S": _SLOTS,
    }
)
"""What a layer guarantees of the index tensors it keeps."""


def pruned_conv2d_expression(stride: Pair = (1, 1), padding: Pair = (0, 0)) -> str:
    """Return the statement of a convolution with sparse filters.

    Args:
        stride: step of the kernel along rows and columns.
        padding: zeros before the first row and column; those after the last are implied, since reads outside are 0.

    >>> pruned_conv2d_expression((2, 1), (1, 0))
    'O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],2*p+R[g,k]-1,q+S[g,k]]'
    """
    row, col = (
        f"{step}*{index}+{table}[g,k]-{before}".removeprefix("1*").removesuffix("-0")
        for step, before, index, table in zip(stride, padding, "pq", "RS", strict=True)
    )
    return f"O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],{row},{col}]"


def pruned_conv2d_output(size: Pair, kernel: Pair, stride: Pair, padding: tuple[Pair, Pair], dilation: Pair) -> Pair:
    """Return rows and columns of the output.

    Args:
        size: rows and columns of the input.
        kernel: of the kernel.
        stride: step of the kernel.
        padding: zeros (before, after) the rows, and the columns.
        dilation: step between kernel cells.

    Raises:
        InsumShapeError: the kernel reaches beyond the padded input.

    >>> pruned_conv2d_output((32, 32), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))
    (16, 16)
    """
    reach = tuple(step * (cells - 1) + 1 for step, cells in zip(dilation, kernel, strict=True))
    padded = tuple(extent + sum(zeros) for extent, zeros in zip(size, padding, strict=True))
    # Sizes that torch.jit.trace records are known only when the graph runs.
    known = not any(isinstance(extent, Tensor) for extent in size)
    if known and any(there < needed for there, needed in zip(padded, reach, strict=True)):
        raise InsumShapeError(
            f"pruned_conv2d: a kernel that spans {reach} does not fit an input of {padded}, padding included",
            fix="pass a larger image, or pad it.",
            argument="input",
            expected=reach,
            got=padded,
        )
    rows, cols = ((there - needed) // step + 1 for there, needed, step in zip(padded, reach, stride, strict=True))
    return rows, cols


def pruned_conv2d(
    input: Tensor,
    weight: Tensor,
    index: Mapping[str, Tensor],
    channels: Pair,
    output: Pair,
    bias: Tensor | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    options: Options = DEFAULT,
) -> Tensor:
    """Convolve images with filters of which only some weights are stored.

        O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k]]

    A group holds stored weights of one filter; -1 in an index tensor marks an unused slot. With a stride s and padding
    z the rows read are `s*p+R[g,k]-z`, and the columns likewise.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), section 4.1; grouped as in
    Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.1.

    Args:
        input: `I`, (n, channels, rows, columns); differentiable.
        weight: `F`, (p,) stored weights; differentiable.
        index: `M` (g,) filter; `Slot`, `C`, `R`, `S` (g, k): number of the stored weight, input channel, kernel row
            and column times the dilation. The caller guarantees `PRUNED_CONV2D_FACTS`: nothing is read.
        channels: input and output channels.
        output: rows and columns of the output; see `pruned_conv2d_output`.
        bias: (output channels,), added; differentiable.
        stride: step of the kernel.
        padding: zeros before the first row and column.
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
    >>> pruned_conv2d(torch.arange(6.0).reshape(1, 1, 3, 2), torch.tensor([10.0]), index, (1, 1), (2, 2)).tolist()
    [[[[20.0, 30.0], [40.0, 50.0]]]]
    """
    expression = pruned_conv2d_expression(stride, padding)
    check_pruned_conv2d(input, weight, channels[0], bias, expression)
    named = {"I": input, "F": weight, **index}
    result = run(expression, PRUNED_CONV2D_FACTS, named, options, (None, channels[1], *output))
    return result if bias is None else result + bias.type_as(result)[:, None, None]


def check_pruned_conv2d(input: Tensor, weight: Tensor, channels: int, bias: Tensor | None, expression: str) -> None:
    """Raise unless `input` is an image batch that fits the weight."""
    got, device = tuple(static_shape(input)), input.device
    same = input.dtype == weight.dtype and weight.device == device and (bias is None or bias.device == device)
    if same and len(got) == 4 and got[1] == channels:
        return
    faults = Faults("pruned_conv2d", expression)
    message, fix = f"must be a batch of images of {channels} channels", f"pass images with {channels} channels."
    faults.shape("input", input, ("n", channels, "rows", "columns"), message=message, fix=fix, symbols=["I"])
    if input.dtype != weight.dtype and not (input.dtype.is_floating_point and under_autocast(input.device)):
        message = f"is {input.dtype}, the weight is {weight.dtype}"
        fix = f"pass input.to({weight.dtype}), or run floating inputs under torch.autocast."
        faults.add(
            InsumDtypeError, "input", message, fix=fix, symbols=["F", "I"], expected_got=(weight.dtype, input.dtype)
        )
    faults.layer_devices(weight, bias, "input", input)
    faults.raise_all()
