"""Attention over the edges of a graph: scores that become weights of each node's edges, and sums by these weights.

    M[I[e],h] max= detach(S[e,h])
    P[e,h] = exp(S[e,h] - M[I[e],h])
    Z[I[e],h] += P[e,h]
    W[e,h] = P[e,h] / Z[I[e],h]

`I[e]` is the node that receives along edge e, `J[e]` the one that sends. Kernels and C functions make nothing with an
axis of edges and one of features, forwards or backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insum_nn.compiler.api import run_statements
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.facts import NO_FACTS, NamedFacts
from insum_nn.ops.statements import promoted, static_shape
from insum_nn.tensor_cache import same_view

__all__ = ["ATTEND", "SOFTMAX", "attention", "neighbour_softmax", "run_promoted"]

SOFTMAX = """M[I[e],h] max= detach(S[e,h])
P[e,h] = exp(S[e,h] - M[I[e],h])
Z[I[e],h] += P[e,h]
W[e,h] = P[e,h] / Z[I[e],h]"""
"""The weights W of edges, of their scores S."""

ATTEND = "Y[I[e],h,c] += W[e,h] * V[J[e],h,c]"
"""What nodes receive by these weights."""

_DOTS = {
    False: "S[e,h] = Q[I[e],h,c] * K[J[e],h,c] * scale",
    True: "S[e,h] = Q[I[e],h,c] * (K[J[e],h,c] + F[e,h,c]) * scale",
}
_SUMS = {False: ATTEND, True: "Y[I[e],h,c] += W[e,h] * (V[J[e],h,c] + F[e,h,c])"}


def neighbour_softmax(scores: Tensor, receives: Tensor, num_nodes: int, *, options: Options = DEFAULT) -> Tensor:
    """Divide the exponentials of scores by their sum over the edges of each node.

        W[e,h] = exp(S[e,h]) / sum of exp(S[k,h]) over the edges k with I[k] = I[e]

    Args:
        scores: (e,) or (e, h) floating-point `S`; differentiable. float16 and bfloat16 are computed in float32.
        receives: (e,) int32 or int64 `I`: the node whose edge each is; -1: no edge, its weight is 0.
        num_nodes: nodes.
        options: compile options; see `insum_nn.Options`.

    Returns:
        Of the shape and dtype of `scores`.

    Raises:
        InsumRangeError: a node lies outside.
        InsumShapeError: not one node per edge, or scores of three or more dimensions.

    >>> neighbour_softmax(torch.zeros(3), torch.tensor([0, 0, 1]), 2)
    tensor([0.5000, 0.5000, 1.0000])
    """
    if scores.ndim not in (1, 2):
        raise InsumShapeError(
            "'scores' has one number for each edge and head",
            details=[f"expected shape (e,) or (e, heads); got {tuple(scores.shape)}"],
            fix="flatten the heads.",
            got=tuple(scores.shape),
        )
    named = {"S": scores if scores.ndim == 2 else scores.unsqueeze(1), "I": receives}
    shapes = {name: (num_nodes, static_shape(named["S"])[1]) for name in "MZ"}
    return run_statements(SOFTMAX, named, options=options, out_shape=shapes).view(scores.shape)  # type: ignore[no-any-return]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sends: Tensor,
    receives: Tensor,
    *,
    edge: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    facts: NamedFacts = NO_FACTS,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Attend along the edges of a graph: dot products of queries and keys, a softmax over each node's edges, a sum.

        S[e,h] = Q[I[e],h,c] * K[J[e],h,c] * scale                Y[I[e],h,c] += W[e,h] * V[J[e],h,c]
        S[e,h] = Q[I[e],h,c] * (K[J[e],h,c] + F[e,h,c]) * scale   Y[I[e],h,c] += W[e,h] * (V[J[e],h,c] + F[e,h,c])

    with the weights W of `neighbour_softmax`; the second of each with features of edges.

    Source: Vaswani et al., Attention Is All You Need (NeurIPS 2017), eq. (1), over the neighbours of each node.

    Args:
        query: (n, h, c) of the nodes that receive; differentiable.
        key: (m, h, c) of the nodes that send; differentiable.
        value: (m, h, c); differentiable.
        sends: (e,) int32 or int64 `J`; -1: no edge.
        receives: (e,) of the same kind, `I`.
        edge: (e, h, c) `F`, added to keys and values; differentiable.
        scale: of scores, 1 / sqrt(c) where it is not given.
        dropout: the share of weights that are set to 0, and by which the others grow.
        facts: of `I` and `J`; with `masked=False` an entry of -1 is an error.
        options: compile options; see `insum_nn.Options`.

    Returns:
        `Y` (n, h, c), 0 for nodes without an edge, and the weights (e, h) before dropout.

    Raises:
        InsumRangeError: a node lies outside.
        InsumShapeError: shapes do not agree.

    >>> ones = torch.ones(2, 1, 4)
    >>> y, weights = attention(ones, ones, ones, torch.tensor([0, 1]), torch.tensor([0, 0]))
    >>> y[:, 0, 0].tolist(), weights[:, 0].tolist()
    ([1.0, 0.0], [0.5, 0.5])
    """
    factor = static_shape(query)[-1] ** -0.5 if scale is None else scale
    ends = {"I": receives, "J": sends}
    edges = {} if edge is None else {"F": edge}
    scores = {"Q": query, "K": key, "scale": query.new_full((), factor), **edges}
    weights = run_promoted(f"{_DOTS[edge is not None]}\n{SOFTMAX}", scores, ends, options, facts=facts)
    kept = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    sums, nodes = {"W": kept, "V": value, **edges}, {"Y": (query.shape[0], None, None)}
    return run_promoted(_SUMS[edge is not None], sums, ends, options, nodes, facts), weights


def run_promoted(
    expression: str,
    values: dict[str, Tensor],
    entries: dict[str, Tensor],
    options: Options,
    out_shape: dict[str, tuple[int | None, ...]] | None = None,
    facts: NamedFacts = NO_FACTS,
) -> Tensor:
    """Run statements on values of the dtype to which torch promotes all of theirs."""
    # Views are found once for all statements.
    named = {**promoted(values), **{name: same_view(entry) for name, entry in entries.items()}}
    return run_statements(expression, named, options=options, out_shape=out_shape or {}, facts=facts)  # type: ignore[no-any-return]
