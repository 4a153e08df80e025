"""What a read or write says about its tensor: the indices it varies with, and the axes it addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from insum_nn.compiler.ir.nodes import Buffer, Cast, Const, Expr, Index, Load, Op

__all__ = [
    "Labels",
    "affine_terms",
    "indices_of",
    "is_index",
    "loads_in_order",
    "plain_labels",
    "scattered_axes",
]

# Names of indices.
Labels = tuple[str, ...]


def is_index(buffer: Buffer) -> bool:
    """Whether a tensor is one of entries, by the name that `ir.build` gives it."""
    return buffer.name.startswith("x")


def indices_of(*exprs: Expr) -> Labels:
    """Return the indices that values vary with, including those of index tensors, in reading order."""
    found: dict[str, None] = {}

    def visit(expr: Expr) -> None:
        if isinstance(expr, Index):
            found[expr.name] = None
        for part in expr.subscripts if isinstance(expr, Load) else expr.args if isinstance(expr, Op) else ():
            visit(part)
        if isinstance(expr, Cast):
            visit(expr.value)

    for expr in exprs:
        visit(expr)
    return tuple(found)


def affine_terms(subscript: Expr) -> tuple[list[tuple[int, Expr]], int]:
    """Split a subscript into coefficients of indices and entries, and its offset."""
    if isinstance(subscript, Cast):
        return affine_terms(subscript.value)
    if isinstance(subscript, Const):
        return [], int(subscript.value)
    if isinstance(subscript, Op) and subscript.name == "add":
        (left, first), (right, second) = map(affine_terms, subscript.args)
        return left + right, first + second
    if isinstance(subscript, Op) and subscript.name == "mul" and isinstance(subscript.args[0], Const):
        factor = int(subscript.args[0].value)
        terms, offset = affine_terms(subscript.args[1])
        return [(factor * coefficient, atom) for coefficient, atom in terms], factor * offset
    assert isinstance(subscript, Index | Load), f"no affine subscript: {subscript}"
    return [(1, subscript)], 0


def scattered_axes(subscripts: Sequence[Expr]) -> tuple[int, ...]:
    """Return the axes that are addressed by a value rather than by an index of their own."""
    computed = {name for s in subscripts if not isinstance(s, Index) for name in indices_of(s)}
    return tuple(
        axis
        for axis, s in enumerate(subscripts)
        if not isinstance(s, Index) or subscripts.count(s) > 1 or s.name in computed
    )


def plain_labels(subscripts: Sequence[Expr]) -> Labels:
    """Return the indices of subscripts that are nothing but indices."""
    return tuple(s.name for s in subscripts if isinstance(s, Index))


def loads_in_order(*exprs: Expr) -> Iterator[Load]:
    """Yield every read of a tensor inside of some expressions, outer before inner."""
    for expr in exprs:
        if isinstance(expr, Load):
            yield expr
            yield from loads_in_order(*expr.subscripts)
        elif isinstance(expr, Op):
            yield from loads_in_order(*expr.args)
        elif isinstance(expr, Cast):
            yield from loads_in_order(expr.value)
