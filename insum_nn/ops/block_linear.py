"""The linear map of a weight made of dense blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import Faults
from insum_nn.formats import BlockCOO, BlockFormat, BlockGroupCOO
from insum_nn.ops.arguments import require_format
from insum_nn.ops.statements import pad_axis, run, static_shape, under_autocast, untraced

__all__ = [
    "BLOCK_LINEAR",
    "BLOCK_LINEAR_FACTS",
    "block_linear",
    "block_linear_expression",
    "block_linear_stored",
    "block_linear_text",
]

BLOCK_LINEAR: Mapping[str, str] = MappingProxyType(
    {
        "BlockCOO": "Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]",
        "BlockGroupCOO": "Y[n,Row[g],a] += W[g,q,a,b] * X[n,Col[g,q],b]",
        "slots": "Y[n,Row[g],a] += W[Slot[g,q],a,b] * X[n,Col[g,q],b]",
    }
)
"""The expression of each format; the last one groups blocks that are stored without padding."""

BLOCK_LINEAR_FACTS: Mapping[str, NamedFacts] = MappingProxyType(
    {
        "BlockCOO": NamedFacts(
            Row=IndexFacts(sorted=True, masked=False, proven=True, unique_with=("Col",)),
            Col=IndexFacts(masked=False, proven=True),
        ),
        "slots": NamedFacts(
            Row=IndexFacts(sorted=True, masked=False, proven=True),
            Col=IndexFacts(masked=True, proven=True),
            Slot=IndexFacts(sorted=True, unique=True, masked=True, proven=True),
        ),
    }
)
"""What a layer guarantees of the index tensors it keeps."""


def block_linear(
    input: Tensor, weight: BlockFormat, bias: Tensor | None = None, *, options: Options = DEFAULT
) -> Tensor:
    """Apply a linear map whose weight is sparse by blocks: `torch.nn.functional.linear`.

        BlockCOO         Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]
        BlockGroupCOO    Y[n,Row[g],a] += W[g,q,a,b] * X[n,Col[g,q],b]

    `X` is the input with its leading dimensions flattened to n and its features cut into blocks, zeros beyond the edge.
    Blocks of a single number have no axes `a` and `b`.

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 5 (structured SpMM), with the dense operand
    transposed.

    Args:
        input: (..., k); differentiable.
        weight: (m, k); its values `W`, of the input's dtype and device, are differentiable.
        bias: (m,), added; differentiable.
        options: compile options; see `insum_nn.Options`.

    Returns:
        (..., m), of the input's dtype; fp16 and bf16 accumulate in float32. Under autocast: its dtype. A feature that
        no block reads does not count, not even where it is NaN.

    Raises:
        InsumFormatError: `weight` is no format of blocks.
        InsumShapeError: the last extent of `input` is not k, or `bias` is not (m,).
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.

    >>> weight = BlockCOO.from_dense(torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]), block_shape=(1, 2))
    >>> block_linear(torch.tensor([1.0, 10.0, 100.0]), weight).tolist()
    [21.0, 300.0]
    """
    form, index = _form_of(weight), {part.name: part.tensor for part in weight.index_parts}
    return _apply(input, weight.values, index, form, weight.facts, weight.shape, bias, options)


def block_linear_stored(
    input: Tensor,
    weight: Tensor,
    index: Mapping[str, Tensor],
    shape: tuple[int, int],
    bias: Tensor | None = None,
    *,
    options: Options = DEFAULT,
) -> Tensor:
    """`block_linear` on blocks stored without padding, and index tensors that a layer keeps.

        Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]
        Y[n,Row[g],a] += W[Slot[g,q],a,b] * X[n,Col[g,q],b]         with groups of blocks that share their row

    Args:
        input: as for `block_linear`.
        weight: `W`, (p, a, b), or (p,) for blocks of a single number; differentiable.
        index: `Row` and `Col`, and `Slot` for groups. The caller guarantees `BLOCK_LINEAR_FACTS`: nothing is read.
        shape: (m, k).
        bias: as for `block_linear`.
        options: compile options.

    Returns:
        As `block_linear`. Where many blocks are stored, the compiler multiplies many samples by the dense weight; NaN
        in a feature that some block reads then reaches every result.
    """
    form = "slots" if "Slot" in index else "BlockCOO"
    return _apply(input, weight, index, form, BLOCK_LINEAR_FACTS[form], shape, bias, options)


def _apply(
    input: Tensor,
    weight: Tensor,
    index: Mapping[str, Tensor],
    form: str,
    facts: NamedFacts,
    shape: tuple[int, ...],
    bias: Tensor | None,
    options: Options,
) -> Tensor:
    """Check a call, and run the statement of a form."""
    _check(input, weight, shape, bias)
    m, k = shape
    a, b = (1, 1) if weight.ndim == 1 else static_shape(weight)[-2:]
    rows, cols = -(-m // a), -(-k // b)
    flat = input if input.ndim == 2 else input.reshape(math.prod(input.shape[:-1]), k)
    # With zeros after the last feature.
    x = flat if cols * b == k else pad_axis(flat, 1, cols * b)
    # As the sum's initial value, the bias spares a pass over the output.
    starts = bias is not None and rows * a == m and x.dtype == weight.dtype == bias.dtype
    initial = bias if starts else None
    single = a == b == 1
    named = {"W": weight, "X": x if single else x.reshape(x.shape[0], cols, b), **index}
    if single and weight.ndim > 1:
        named["W"] = weight.squeeze(-1).squeeze(-1)
    if initial is not None:
        named["Y"] = initial if single else initial.reshape(rows, a)
    out_shape = (None, rows) if single else (None, rows, a)
    result = run(block_linear_text(form, single=single), facts, named, options, out_shape).flatten(1)
    if rows * a != m:
        result = result[:, :m]
    if bias is not None and initial is None:
        result = result + bias.type_as(result)
    # Each view of a recorded tensor adds a node to the backward graph.
    return (result if input.ndim == 2 else result.reshape(*input.shape[:-1], m)).contiguous()


def _check(input: Tensor, weight: Tensor, shape: tuple[int, ...], bias: Tensor | None) -> None:
    if torch.jit.is_tracing():
        with untraced():
            return _check(input, weight, shape, bias)
    (m, k), got, device = shape, tuple(input.shape), input.device
    fits = got[-1:] == (k,) and input.dtype == weight.dtype and input.dtype.is_floating_point
    if fits and weight.device == device and (bias is None or (bias.shape == (m,) and bias.device == device)):
        # One look instead of each.
        return
    faults = Faults("block_linear", BLOCK_LINEAR["BlockCOO"])
    if input.ndim == 0 or got[-1] != k:
        message = f"has {got[-1] if got else 'no'} features, the weight reads {k}"
        details = [f"expected shape (..., {k}); got {got}"]
        fix = f"pass an input whose last dimension is {k}."
        faults.add(InsumShapeError, "input", message, details=details, fix=fix, symbols=["X"], expected_got=(k, got))
    faults.bias(bias, m, "feature")
    faults.layer_input(input, weight, bias, cast=under_autocast(input.device), symbols=["W", "X"])
    return faults.raise_all()


def block_linear_text(form: str, *, single: bool) -> str:
    """Return the expression of a form; of blocks of a `single` number, a product with a plain sparse matrix."""
    text = BLOCK_LINEAR[form]
    return text.replace(",a,b]", "]").replace(",a]", "]").replace(",b]", "]") if single else text


def block_linear_expression(weight: BlockFormat) -> str:
    """Return the expression that `block_linear` runs for a weight of this format.

    >>> block_linear_expression(BlockCOO.from_dense(torch.eye(2), block_shape=(1, 1)))
    'Y[n,Row[p]] += W[p] * X[n,Col[p]]'
    """
    return block_linear_text(_form_of(weight), single=weight.block_shape == (1, 1))


def _form_of(weight: BlockFormat) -> str:
    require_format(weight, "block_linear", "weight", (BlockCOO, BlockGroupCOO), recommended=BlockGroupCOO)
    return "BlockCOO" if isinstance(weight, BlockCOO) else "BlockGroupCOO"
