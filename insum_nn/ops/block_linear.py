"""The linear map of a weight made of dense blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from insum_nn.compiler.api import Explanation, Program, takes_columns
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumDtypeError, InsumError, InsumShapeError, raise_collected
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.formats import BlockCOO, BlockFormat, BlockGroupCOO
from insum_nn.ops.arguments import require_format
from insum_nn.ops.block_linear_columns import BlockColumns, columns_program
from insum_nn.ops.statements import (
    layer_elsewhere,
    pad_axis,
    program,
    run,
    span_of,
    static_shape,
    to_autocast,
    under_autocast,
    untraced,
)

__all__ = [
    "BLOCK_LINEAR",
    "BLOCK_LINEAR_FACTS",
    "block_linear",
    "block_linear_expression",
    "block_linear_operands",
    "block_linear_program",
    "block_linear_stored",
    "explain_block_linear",
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

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 5 (structured SpMM), with the dense operand
    transposed.

    Args:
        input: (..., k); differentiable.
        weight: (m, k); its values `W`, of the input's dtype and device, are differentiable.
        bias: (m,), added; differentiable.
        options: compile options; see `insum_nn.Options`.

    Returns:
        (..., m), of the input's dtype; half types accumulate in float32. Under autocast: its dtype. A feature that no
        block reads does not count, not even where it is NaN.

    Raises:
        InsumFormatError: `weight` is no format of blocks.
        InsumShapeError: the last extent of `input` is not k, or `bias` is not (m,).
        InsumDtypeError: dtypes differ.
        InsumDeviceError: devices differ.

    >>> weight = BlockCOO.from_dense(torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]), block_shape=(1, 2))
    >>> block_linear(torch.tensor([1.0, 10.0, 100.0]), weight).tolist()
    [21.0, 300.0]
    """
    require_format(weight, "block_linear", "weight", (BlockCOO, BlockGroupCOO), recommended=BlockGroupCOO)
    form = "BlockCOO" if isinstance(weight, BlockCOO) else "BlockGroupCOO"
    index = {part.name: part.tensor for part in weight.index_parts}
    m, k = weight.shape
    named = block_linear_operands(input, weight.values, index, (m, k), bias)
    return _run(input, named, BLOCK_LINEAR[form], weight.facts, (m, k), bias, options)


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
        weight: `W`, (p, a, b); differentiable.
        index: `Row` and `Col`, and `Slot` for groups. The caller guarantees `BLOCK_LINEAR_FACTS`: nothing is read.
        shape: (m, k).
        bias: as for `block_linear`.
        options: compile options.

    Returns:
        As `block_linear`. Where many blocks are stored, the compiler multiplies many samples by the dense weight; NaN
        in a feature that some block reads then reaches every result.
    """
    form = "slots" if "Slot" in index else "BlockCOO"
    _check(input, weight, shape, bias)
    flat, (a, b) = _rows_of(input, weight, shape[1]), static_shape(weight)[-2:]
    grid = -(-shape[0] // a), -(-shape[1] // b)
    if form == "BlockCOO":
        x, values = to_autocast(flat), to_autocast(weight)
        if takes_columns(x, values, grid, options):
            product = BlockColumns(index["Row"], index["Col"], grid, options)
            initial, bias = _as_initial(bias, values, shape[0])
            return _finish(product(x, values, initial), input, shape, bias)
    named = _named(flat, weight, index)
    return _run(input, named, BLOCK_LINEAR[form], BLOCK_LINEAR_FACTS[form], shape, bias, options)


def _run(
    input: Tensor,
    named: Mapping[str, Tensor],
    expression: str,
    facts: Mapping[str, IndexFacts],
    shape: tuple[int, int],
    bias: Tensor | None,
    options: Options,
) -> Tensor:
    a = static_shape(named["W"])[-2]
    rows = -(-shape[0] // a)
    if named["X"].dtype == named["W"].dtype:
        initial, bias = _as_initial(bias, named["W"], shape[0])
        named = named if initial is None else {**named, "Y": initial.reshape(rows, a)}
    result = run(expression, facts, named, options, (None, rows, a)).flatten(1)
    return _finish(result, input, shape, bias)


def _as_initial(bias: Tensor | None, weight: Tensor, m: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias as the sum's initial value, which spares a pass over the output, or else to be added after it."""
    if bias is None or m % static_shape(weight)[-2] or bias.dtype != weight.dtype:
        return None, bias
    return bias, None


def _finish(result: Tensor, input: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
    """Return (n, rows * a) without what lies beyond the edge, with the bias, in the input's leading dimensions."""
    m = shape[0]
    if static_shape(result)[1] != m:
        result = result[:, :m]
    if bias is not None:
        result = result + bias.to(result.dtype)
    # Each view of a recorded tensor adds a node to the backward graph.
    return (result if input.ndim == 2 else result.reshape(*input.shape[:-1], m)).contiguous()


def block_linear_operands(
    input: Tensor, weight: Tensor, index: Mapping[str, Tensor], shape: tuple[int, int], bias: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a call by their names in its statement, after all checks; see `block_linear`."""
    _check(input, weight, shape, bias)
    return _named(_rows_of(input, weight, shape[1]), weight, index)


def _named(flat: Tensor, weight: Tensor, index: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a statement, from an input (n, cols * b)."""
    b = static_shape(weight)[-1]
    return {"W": weight, "X": flat.unflatten(1, (static_shape(flat)[1] // b, b)), **index}


def _rows_of(input: Tensor, weight: Tensor, k: int) -> Tensor:
    """Return an input (..., k) as (n, cols * b), with zeros beyond the edge."""
    flat = input if input.ndim == 2 else input.reshape(math.prod(input.shape[:-1]), k)
    b = static_shape(weight)[-1]
    return pad_axis(flat, 1, -(-k // b) * b)


def _check(input: Tensor, weight: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
    if torch.jit.is_tracing():
        with untraced():
            return _check(input, weight, shape, bias)
    faults: list[InsumError] = []
    expression = BLOCK_LINEAR["BlockCOO"]
    (m, k), got = shape, tuple(input.shape)
    if input.ndim == 0 or got[-1] != k:
        faults.append(
            InsumShapeError(
                f"block_linear: 'input' has {got[-1] if got else 'no'} features, the weight reads {k}",
                expression=expression,
                spans=span_of(expression, "X"),
                details=[f"expected shape (..., {k}); got {got}"],
                fix=f"pass an input whose last dimension is {k}.",
                argument="input",
                expected=k,
                got=got,
            )
        )
    if bias is not None and tuple(bias.shape) != (m,):
        faults.append(
            InsumShapeError(
                f"block_linear: 'bias' has shape {tuple(bias.shape)}",
                details=[f"expected ({m},)"],
                fix="give the bias one entry per output feature.",
                argument="bias",
                expected=(m,),
                got=tuple(bias.shape),
            )
        )
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        fix = f"pass input.to({weight.dtype})."
        faults.append(_dtype_fault(f"'input' must be floating, got {input.dtype}", weight.dtype, input.dtype, fix))
    elif input.dtype != weight.dtype and not under_autocast(input.device):
        fix = f"pass input.to({weight.dtype}), or run under torch.autocast."
        message = f"'input' is {input.dtype}, the weight is {weight.dtype}"
        faults.append(_dtype_fault(message, weight.dtype, input.dtype, fix))
    faults += layer_elsewhere("block_linear", weight, bias, "input", input)
    return raise_collected(faults)


def _dtype_fault(message: str, expected: torch.dtype, got: torch.dtype, fix: str) -> InsumError:
    expression = BLOCK_LINEAR["BlockCOO"]
    spans = span_of(expression, "W") + span_of(expression, "X")
    text = f"block_linear: {message}"
    return InsumDtypeError(
        text, expression=expression, spans=spans, fix=fix, argument="input", expected=expected, got=got
    )


def block_linear_expression(weight: BlockFormat) -> str:
    """Return the expression that `block_linear` runs for a weight of this format.

    >>> block_linear_expression(BlockCOO.from_dense(torch.eye(2), block_shape=(1, 1)))
    'Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]'
    """
    require_format(weight, "block_linear", "weight", (BlockCOO, BlockGroupCOO), recommended=BlockGroupCOO)
    return BLOCK_LINEAR["BlockCOO" if isinstance(weight, BlockCOO) else "BlockGroupCOO"]


def explain_block_linear(
    input: Tensor,
    weight: Tensor,
    index: Mapping[str, Tensor],
    shape: tuple[int, int],
    bias: Tensor | None = None,
    *,
    options: Options = DEFAULT,
    measure: bool = False,
) -> Explanation:
    """Explain how the statement of `block_linear_stored` runs; the arguments are the same."""
    form = "slots" if "Slot" in index else "BlockCOO"
    named = block_linear_operands(input, weight, index, shape, bias)
    product, grid = block_linear_program(form, options), (-(-shape[0] // weight.shape[1]), named["X"].shape[1])
    flat, values = to_autocast(named["X"].flatten(1)), to_autocast(named["W"])
    if form == "BlockCOO" and takes_columns(flat, values, grid, options):
        product = columns_program("Y", options)
        named = BlockColumns(index["Row"], index["Col"], grid, options).operands_of(flat, values)
    return product.explain(tensors=named, out_shape=(None, grid[0], None), measure=measure)


def block_linear_program(form: str, options: Options = DEFAULT) -> Program:
    """Return the program of a form of `BLOCK_LINEAR`, with the facts that a layer guarantees: to explain it.

    >>> block_linear_program("BlockCOO").expression
    'Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]'
    """
    return program(BLOCK_LINEAR[form], BLOCK_LINEAR_FACTS.get(form, {}), options)
