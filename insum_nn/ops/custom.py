"""Operators on formats that are defined outside of this package: their expressions, and any other statement."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from insum_nn.compiler.api import compile
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumFormatError, InsumNameError
from insum_nn.formats import SparseFormat
from insum_nn.ops.arguments import FORMATS, named_tensors
from insum_nn.ops.statements import run

__all__ = ["contract", "register", "registered"]

# Of each operator: the output, and the dense operands by the names that it gives them.
_OPERATORS = {"spmm": ("C", ("B",)), "sddmm": ("D", ("A", "Bt"))}
_expressions: dict[tuple[str, type[SparseFormat]], str] = {}


def register(kind: type[SparseFormat], **expressions: str) -> None:
    """Register expressions of operators for a format of your own.

        spmm     C of (m, n) from `Val`, the format's index tensors, and B of (k, n)
        sddmm    D of the values' shape from `Val`, the index tensors, A of (m, k) and Bt of (n, k)

    Args:
        kind: the format; it and its subclasses are accepted from now on.
        **expressions: a statement for each operator. A later one replaces an earlier one.

    Raises:
        InsumFormatError: `kind` is no format, or one of the package's own.
        InsumNameError: an operator that takes no formats of others, or a statement of other tensors.
        InsumSyntaxError: no statement.

    >>> from insum_nn.formats import CustomFormat
    >>> class Diagonals(CustomFormat): ...
    >>> register(Diagonals, spmm="C[m,n] += Val[d,m] * B[m+Col[d]-Row[d],n]")
    >>> registered("spmm", Diagonals)
    'C[m,n] += Val[d,m] * B[m+Col[d]-Row[d],n]'
    """
    if not (isinstance(kind, type) and issubclass(kind, SparseFormat)) or issubclass(kind, FORMATS):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InsumFormatError(
            f"register takes a format of your own, got {getattr(kind, '__name__', kind)}",
            fix="derive a class from insum_nn.formats.CustomFormat.",
            got=kind,
        )
    for operator, expression in expressions.items():
        if operator not in _OPERATORS:
            raise InsumNameError(
                f"register knows no operator '{operator}'",
                details=[f"operators that take formats of others: {', '.join(_OPERATORS)}"],
                fix="run the statement with insum_nn.ops.contract.",
            )
        statement = compile(expression, options=DEFAULT).statement
        output, operands = _OPERATORS[operator]
        missing = [name for name in ("Val", *operands) if name not in statement.tensors()]
        if statement.output.name != output or missing:
            raise InsumNameError(
                f"the statement of {operator} for {kind.__name__} has other tensors",
                expression=expression,
                details=[f"expected output {output} and factors Val, {', '.join(operands)}"],
                fix="name the tensors as the operator does.",
            )
    _expressions.update({(operator, kind): expression for operator, expression in expressions.items()})


def registered(operator: str, kind: type) -> str | None:
    """Return the expression that an operator has for a format or one of its base classes; `None`: there is none."""
    if not _expressions:
        return None
    found = (_expressions.get((operator, base)) for base in kind.__mro__)
    return next((expression for expression in found if expression is not None), None)


def contract(
    expression: str,
    matrix: SparseFormat,
    *,
    out_shape: Sequence[int | None] | None = None,
    options: Options = DEFAULT,
    **operands: Tensor,
) -> Tensor:
    """Run a statement on the tensors of a format, with what is known of its index tensors.

        C[Row[g],n] += Val[g,q] * B[Col[g,q],n]        contract(this, grouped, B=dense, out_shape=(m, None))

    It is `insum_nn.insum` with the format's tensors by their names and with its facts, which were verified when it was
    built or are verified now, and are trusted until torch counts a write: nothing is checked at each call.

    Args:
        expression: the statement; `matrix.tensors` lists the names that the format gives.
        matrix: a format of this package or your own; its values `Val` are differentiable.
        out_shape: shape of the output; `None` entries are inferred.
        options: compile options.
        **operands: the other tensors by name; one under the output's name is the initial value. Differentiable.

    Returns:
        The output, of the factors' dtype and device.

    Raises:
        InsumFormatError: `matrix` is no format.
        InsumNameError: an operand has the name of one of the format's tensors.
        InsumError: what `insum_nn.insum` raises.

    >>> import torch
    >>> from insum_nn.formats import COO
    >>> coo = COO.from_dense(torch.tensor([[0.0, 2.0], [3.0, 4.0]]))
    >>> contract("c[Row[p]] += Val[p]", coo, out_shape=(2,)).tolist()
    [2.0, 7.0]
    """
    if not isinstance(matrix, SparseFormat):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InsumFormatError(
            f"contract takes a sparse format for 'matrix', got {type(matrix).__name__}",
            fix="pass tensors alone to insum_nn.insum.",
        )
    tensors = named_tensors("contract", expression, matrix, [])
    taken = [name for name in operands if name in tensors]
    if taken:
        raise InsumNameError(
            f"contract got an operand '{taken[0]}', which is a tensor of the {type(matrix).__name__}",
            expression=expression,
            details=[f"its tensors: {', '.join(tensors)}"],
            fix="give the operand another name; other values go in with matrix.with_values(...).",
            tensor=taken[0],
        )
    read = _tensors_of(expression)
    named = {name: tensor for name, tensor in tensors.items() if name in read}
    return run(expression, matrix.facts, {**named, **operands}, options, out_shape)


def _tensors_of(expression: str) -> list[str]:
    """Return the names of the tensors that a statement reads."""
    return list(compile(expression, drop_outside=True, options=DEFAULT).statement.tensors())


# Dynamo calls it while tracing, and keeps the result as a constant.
_tensors_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
