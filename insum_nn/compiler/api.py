"""`insum()`, `compile()` and `Program`; a call goes on in `runtime/program.py`, `dispatch.py` and `execution.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from insum_nn.compiler.explain.report import Explanation
from insum_nn.compiler.explain.sections import table
from insum_nn.compiler.kernels.c_structures import stable_order
from insum_nn.compiler.kernels.row_partition import keep_bitmasks, keep_lengths
from insum_nn.compiler.lang.parser import check_text
from insum_nn.compiler.lang.programs import is_program
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.compiler.runtime.arguments import check_kinds
from insum_nn.compiler.runtime.artifact import Step
from insum_nn.compiler.runtime.dispatch import StatementGraph
from insum_nn.compiler.runtime.inline import inline_by_rows
from insum_nn.compiler.runtime.modes import (
    graph_constant,
    is_known,
    is_plain_eager,
    is_traced,
    is_transformed,
    product_dtype,
    records_graph,
    to_autocast,
    under_autocast,
    without_autocast,
)
from insum_nn.compiler.runtime.multilinear import Sums, multilinear
from insum_nn.compiler.runtime.needed_gradients import keep_inner
from insum_nn.compiler.runtime.out_argument import check_unrecorded, write_out
from insum_nn.compiler.runtime.program import Program, Shape, StatementsProgram, run_statements
from insum_nn.compiler.runtime.statement_choice import (
    LONG_SUM,
    MOST_CELLS,
    MOST_TERMS,
    by_table,
    dense_uses,
    fits_between,
    fits_both_ends,
    pairs_are_faster,
    paths_are_products,
    pays_between,
)
from insum_nn.compiler.runtime.traced import call_operator, call_traced, option_values, options_text, spec_text
from insum_nn.compiler.runtime.watch import statement_calls, watched
from insum_nn.errors import InsumDtypeError, InsumFormatError, plural
from insum_nn.facts import IndexFacts, NamedFacts, StaticTable

__all__ = [
    "LONG_SUM",
    "MOST_CELLS",
    "MOST_TERMS",
    "Explanation",
    "Program",
    "StatementGraph",
    "Step",
    "Sums",
    "built_program",
    "by_table",
    "call_traced",
    "compile",
    "compile_built",
    "dense_uses",
    "fits_between",
    "fits_both_ends",
    "graph_constant",
    "inline_by_rows",
    "insum",
    "is_known",
    "is_plain_eager",
    "is_traced",
    "is_transformed",
    "keep_bitmasks",
    "keep_inner",
    "keep_lengths",
    "multilinear",
    "options_text",
    "pairs_are_faster",
    "paths_are_products",
    "pays_between",
    "product_dtype",
    "records_graph",
    "run_statements",
    "stable_order",
    "statement_calls",
    "table",
    "to_autocast",
    "under_autocast",
    "watched",
    "without_autocast",
]


def compile(
    expression: str,
    *,
    sizes: Mapping[str, int] | None = None,
    out_shape: Shape | None = None,
    facts: Mapping[str, IndexFacts] | None = None,
    static: Mapping[str, Tensor | StaticTable] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    options: Options = DEFAULT,
    drop_outside: bool = False,
) -> Program:
    """Check a statement once and return a `Program` to call with tensors.

    Of several statements it is a `StatementsProgram`: `out_shape` then names tensors that they write, and `activation`,
    `out_dtype` and `drop_outside`, which are about one sum, are errors.

    Args:
        expression: the statement, or several, divided by semicolons or line ends; see `docs/language.md`.
        sizes: extents of indices that no tensor shows.
        out_shape: shape of the output; `None` entries are inferred.
        facts: claims about index tensors, by name. Each is read once for each tensor and version of it: entries outside
            are an error, and what is claimed of order and does not hold is not used (`validate=True` names it).
        static: tensors whose values are known now and stay, by name: small tables of indices and coefficients, whose
            terms a generated kernel writes out. They are still passed to every call.
        activation: applied to the sum with its initial value, before it is stored, such as `"relu"`;
            docs/language.md lists them.
        out_dtype: floating-point dtype of the output, where it is not that of the factors. A generated kernel stores
            its float32 sums in it; the other back ends cast their result.
        options: compile options.
        drop_outside: for derivative statements: an affine write outside the output is dropped, not refused, and indices
            that are only written get their extents from `sizes=` of the call.

    Raises:
        InsumSyntaxError: the text is not a statement.
        InsumNameError: an index is written but never read.
        InsumAliasError: the output is also read.
        InsumFormatError: an unknown activation.
        InsumDtypeError: `out_dtype` is no floating-point dtype.

    >>> program = compile("y[i] += A[i,j] * x[j]")
    >>> program(A=torch.eye(2), x=torch.tensor([3.0, 4.0])).tolist()
    [3.0, 4.0]
    >>> layer = compile("y[i] += A[i,j] * x[j]", activation="relu")
    >>> layer(A=torch.eye(2), x=torch.tensor([3.0, 4.0]), y=torch.tensor([-5.0])).tolist()
    [0.0, 0.0]
    """
    if is_program(expression):
        _one_statement_only(expression, activation, out_dtype, drop_outside)
        several = StatementsProgram(
            expression, sizes=sizes, out_shape=cast(Any, out_shape), facts=facts, static=static, options=options
        )
        return cast(Program, several)
    return Program(
        expression,
        sizes=sizes,
        out_shape=out_shape,
        facts=facts,
        static=static,
        activation=activation,
        out_dtype=out_dtype,
        options=options,
        drop_outside=drop_outside,
    )


def _one_statement_only(
    expression: str, activation: object, out_dtype: object, drop_outside: object, out: object = None
) -> None:
    given = {"activation": activation, "out_dtype": out_dtype, "drop_outside": drop_outside, "out": out}
    for name, value in given.items():
        if value is not None and value is not False:
            raise InsumFormatError(
                f"{name}= is for a text that is one statement alone",
                expression=expression,
                fix="write the function as a statement, or convert what is returned.",
            )


compile_built = partial(Program, origin="builder")
"""`compile` for index tensors that a builder has made: its facts are believed until a tensor is written to."""


@lru_cache(maxsize=2048)
def built_program(
    expression: str, facts: NamedFacts, options: Options, sizes: tuple[tuple[str, int], ...] = ()
) -> Program:
    """`compile_built`, remembered: equal requests share one program, so that an operator asks at every call.

    >>> built_program("y[i] += x[i]", NamedFacts(), DEFAULT) is built_program("y[i] += x[i]", NamedFacts(), DEFAULT)
    True
    """
    return compile_built(expression, sizes=dict(sizes), facts=facts, options=options)


def insum(
    expression: str,
    *positional: object,
    sizes: Mapping[str, int] | None = None,
    out_shape: Shape | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    options: Options | None = None,
    validate: bool = False,
    drop_outside: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
    out: Tensor | None = None,
    **named: Tensor,
) -> Tensor:
    """Run one indirect einsum, or several statements.

        C[Row[g],n] += Val[g,q] * B[Col[g,q],n]        for all g, q, n

    Meaning: loop over every combination of the index variables, evaluate the right-hand side, combine into the output.

    Source: Won et al., "Insum: Sparse GPU Kernels Simplified and Optimized with Indirect Einsums", section 3.

    Args:
        expression: the statement; see the language reference.
        *positional: an error, as tensors are passed by name.
        sizes: extents of indices that no tensor shows, by name.
        out_shape: shape of the output; `None` entries are inferred. Of several statements shapes by name.
        activation: applied to the sum; see `compile`.
        out_dtype: the output's dtype; see `compile`.
        options: compile options.
        validate: prove every index tensor again and name the first bad entries.
        drop_outside: for derivative statements; see `compile`.
        tensors: tensors by name, for names that cannot be keyword arguments here.
        out: a tensor of the output's shape, dtype and device, of any strides, that is overwritten with the result and
            returned, as torch's `out=`. Its old values count only if it is the initial value too. It supplies extents
            as `out_shape=` does. The result is made before it is written; no gradients are recorded.
        **named: tensors by name. One passed under the output's name is the initial value, broadcast to the output.
            Factors are differentiable; index tensors are int32 or int64.

    Returns:
        The output, of the factors' dtype and device; fp16 and bf16 are summed in float32. With `out`, that tensor. Of
        several statements what the last one writes, or the tuple of what `return` names.

    Raises:
        InsumError: a subclass that says what is wrong with the text, a name, a shape, a dtype, a device or an index.

    >>> row, col, val = torch.tensor([0, 0, 2]), torch.tensor([1, 2, 0]), torch.tensor([1.0, 2.0, 3.0])
    >>> x = torch.tensor([1.0, 10.0, 100.0])
    >>> insum("y[Row[p]] += Val[p] * x[Col[p]]", Row=row, Col=col, Val=val, x=x, out_shape=(3,))
    tensor([210.,   0.,   3.])
    >>> y = torch.ones(3)
    >>> _ = insum("y[Row[p]] += Val[p] * x[Col[p]]", Row=row, Col=col, Val=val, x=x, y=y, out=y)
    >>> y
    tensor([211.,   1.,   4.])
    """
    if positional:
        check_text(expression)
        raise InsumDtypeError(
            f"insum takes the expression alone by position, got {plural(len(positional), 'further argument')}",
            expression=expression,
            fix='pass tensors by name: insum("C[i,k] += A[i,j] * B[j,k]", A=..., B=...).',
        )
    chosen = DEFAULT if options is None else options
    if is_program(expression):
        _one_statement_only(expression, activation, out_dtype, drop_outside, out)
        check_kinds(sizes=sizes, shapes=out_shape, tensors=tensors, options=options)
        chosen = replace(chosen, validate=True) if validate else chosen
        shapes = cast(Any, out_shape) or {}
        merged = {**(tensors or {}), **named}
        return cast(Tensor, run_statements(expression, merged, options=chosen, sizes=sizes, out_shape=shapes))
    if torch.compiler.is_dynamo_compiling():
        merged = {**(tensors or {}), **named}
        if out is not None:
            check_unrecorded(expression, out, merged)
            out_shape = out.shape if out_shape is None else out_shape
        text = spec_text(expression, option_values(chosen), (), activation, out_dtype, validate, drop_outside)
        result = call_operator(text, merged, sizes or {}, {} if out_shape is None else {"": out_shape})[0]
        return result if out is None else write_out(expression, out, result)
    check_kinds(sizes=sizes, out_shape=out_shape, tensors=tensors, options=options)
    check_kinds(activation=activation, out_dtype=out_dtype)
    check_text(expression)
    if validate and not chosen.validate:
        chosen = replace(chosen, validate=True)
    program = _cached_program(expression, chosen, tuple(sizes) if sizes else (), activation, out_dtype, drop_outside)
    return program(sizes=sizes, out_shape=out_shape, tensors=tensors, out=out, **named)


@lru_cache(maxsize=1024)
def _cached_program(
    expression: str,
    options: Options,
    sized: tuple[str, ...],
    activation: str | None,
    out_dtype: torch.dtype | None,
    drop_outside: bool,
) -> Program:
    given: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype, "drop_outside": drop_outside}
    # Their extents come with each call.
    return Program(expression, sizes=dict.fromkeys(sized, 0), options=options, **given)
