"""Multiply two factors: by a library's matrix product where it is one, else as products and a sum.

v0[a, c] += t0[a, b] * t1[b, c]    is a matmul of m = a, k = b, n = c; an index that both factors and the result have
is one of a batch of products
"""

from __future__ import annotations

from insum_nn.compiler.ir.access import Labels, indices_of, plain_labels
from insum_nn.compiler.ir.graph import GraphNode, Library, Step, store_of
from insum_nn.compiler.ir.nodes import Const, Expr, Index, Load
from insum_nn.compiler.passes.library.steps import Cut, product, wide
from insum_nn.dtypes import dtype_of

__all__ = ["multiply"]


def multiply(cut: Cut, left: Load, right: Load, needed: set[str]) -> tuple[GraphNode, Load]:
    """The step that multiplies two reads whose axes are indices, and the read of its result.

    Args:
        cut: the algorithm.
        left: a read whose axes are indices.
        right: likewise.
        needed: indices of the result that later steps need; the others are summed where both reads have them.
    """
    a, b = plain_labels(left.subscripts), plain_labels(right.subscripts)
    k = tuple(label for label in a if label in b and label not in needed)
    batch = tuple(label for label in a if label in b and label in needed)
    m, n = (tuple(x for x in own if x not in other) for own, other in ((a, b), (b, a)))
    if k and _is_matmul(cut, m, k, n):
        # What lies next to each other in the output.
        last = set(indices_of(*store_of(cut.kernel).subscripts)[-1:])
        if (not m and n) or (not cut.target.compiled and n and last & set(m)):
            # A library call stores what it multiplies: as the output lies, or adding it up goes cell by cell.
            left, right, m, n = right, left, n, m
        made, result = cut.intermediate(batch + m + n, product([left, right]), k)
        return Library("matmul", made.kernel), result
    made, result = cut.intermediate(batch + m + n, product([left, right]), k, dtype=wide(cut.dtype))
    return Step(made.kernel, tuple(map(Index, _unrolled(cut, k)))), result


def _unrolled(cut: Cut, sums: Labels) -> Labels:
    """The sums of a known number of terms that a compiler for a GPU gets as straight-line code."""
    ends = cut.extents()
    if not (cut.target.compiled and cut.target.device == "cuda"):
        return ()
    found = tuple(label for label in sums if isinstance(ends[label], Const))
    if found:
        cut.decide(
            ("sum over ", *_listed(found, ", ")),
            "unrolled",
            "without a dot, a short in-group sum is faster as straight-line code than as a reduction loop",
        )
    return found


def _is_matmul(cut: Cut, m: Labels, k: Labels, n: Labels) -> bool:
    if not cut.target.compiled:
        # Without m and n a batched product would call the library once per scalar.
        return dtype_of(cut.dtype).has_products and bool(m or n)
    if cut.target.device != "cuda":
        return bool(m and n)
    fits = bool(m and n) and min(cut.cells(labels) for labels in (m, k, n)) > 1
    topic = ("dot over ", *_listed(k), ": m = ", *_listed(m), ", n = ", *_listed(n))
    if fits and dtype_of(cut.dtype).has_dot:
        cut.decide(topic, "tl.dot", "m, k and n all exceed 1")
        return True
    reason = "m, k or n is 1" if not fits else f"tl.dot takes no {cut.dtype}"
    cut.decide(topic, "products and a sum", reason)
    return False


def _listed(labels: Labels, between: str = ",") -> tuple[str | Expr, ...]:
    """Indices as text: `g,q`, or `1` where there is none."""
    parts: list[str | Expr] = []
    for label in labels:
        parts += [between, Index(label)] if parts else [Index(label)]
    return tuple(parts) or ("1",)
