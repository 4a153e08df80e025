"""What a read or write says about its tensor: the indices it varies with, and the axes it addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from insum_nn.compiler.ir.nodes import Buffer, Cast, Const, Expr, Index, Load, Node, Op, Store, walk

__all__ = [
    "Labels",
    "affine_terms",
    "apart",
    "coefficient",
    "indices_in",
    "is_index",
    "is_sum",
    "labels_of",
    "plain_labels",
    "scattered_axes",
    "steps_of",
]

# Names of indices.
Labels = tuple[str, ...]


def is_index(buffer: Buffer) -> bool:
    """Whether a tensor is one of entries, by the name that `ir.build` gives it."""
    return buffer.name.startswith("x")


def labels_of(*exprs: Expr) -> Labels:
    """Return the indices that values vary with, including those of index tensors and conditions, in reading order."""
    return tuple(dict.fromkeys(node.name for node in walk(*exprs) if isinstance(node, Index)))


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
    computed = {name for s in subscripts if not isinstance(s, Index) for name in labels_of(s)}
    return tuple(
        axis
        for axis, s in enumerate(subscripts)
        if not isinstance(s, Index) or subscripts.count(s) > 1 or s.name in computed
    )


def plain_labels(subscripts: Sequence[Expr]) -> Labels:
    """Return the indices of subscripts that are nothing but indices."""
    return tuple(s.name for s in subscripts if isinstance(s, Index))


def indices_in(*nodes: Node) -> set[Index]:
    """The indices that nodes vary with, those of their conditions too."""
    return set[Index]().union(*map(_indices_of, nodes))


# Half of the time of printing a thousand terms, without.
@lru_cache(maxsize=1 << 14)
def _indices_of(node: Node) -> frozenset[Index]:
    return frozenset([each for each in walk(node) if isinstance(each, Index)])


def coefficient(subscript: Expr, index: Index) -> int | None:
    """By how much a subscript grows with an index; `None`: by what a tensor or a division says."""
    if index not in indices_in(subscript):
        return 0
    if not is_sum(subscript):
        return None
    terms, _ = affine_terms(subscript)
    if any(index in indices_in(atom) for _, atom in terms if atom is not index):
        return None
    return sum(factor for factor, atom in terms if atom is index)


def is_sum(subscript: Node) -> bool:
    """Whether indices and entries are multiplied by numbers and added up; how an entry is found does not count."""
    parts = subscript.args if isinstance(subscript, Op) else (subscript.value,) if isinstance(subscript, Cast) else ()
    return (not isinstance(subscript, Op) or subscript.name in ("add", "mul")) and all(map(is_sum, parts))


def steps_of(access: Load | Store, index: Index) -> list[int | None]:
    """By how much the subscripts of an access grow with an index."""
    return [coefficient(subscript, index) for subscript in access.subscripts]


def apart(access: Load | Store, index: Index) -> int:
    """How far apart an access's neighbours along an index are in memory: 0, 1, or 2 for anything else."""
    steps = steps_of(access, index)
    if not any(steps):
        return 0
    near = steps[-1] == 1 and not any(steps[:-1])
    return 1 if near else 2
