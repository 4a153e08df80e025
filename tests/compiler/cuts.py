"""Statements that are worth cutting, small tensors for them, and a choice of cuts that does not ask what they cost."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.passes.cut_products import cuts_of
from insum_nn.compiler.runtime import statement_cuts
from insum_nn.compiler.schedule.product_cost import Cost

__all__ = ["STATEMENTS", "cut_at_random", "drawn"]

RGCN = "Y[D[e],o] += Inv[D[e],R[e]] * X[S[e],c] * W[R[e],c,o]"
CHAIN = "Y[D[e],o] += Val[e] * X[S[e],c] * W[c,o]"

# A name, the statement, and the indices whose sizes tensors and output need beyond those below.
STATEMENTS = {
    "relational graph convolution": RGCN,
    "the same without a mean": "Y[D[e],o] += X[S[e],c] * W[R[e],c,o]",
    "matrix, features, weight": CHAIN,
    "a transposed weight and a number": "Y[D[e],o] += 0.5 * W[o,c] * Val[e] * X[S[e],c]",
    "a transposed output": "Y[o,D[e]] += Val[e] * X[c,S[e]] * W[c,o]",
    "grouped entries": "Y[G[g],o] += Val[g,q] * X[Col[g,q],c] * W[c,o]",
    "gradient of the weight": "Y[c,o] += A[D[e],o] * Val[e] * X[S[e],c]",
    "gradient of the values": "Y[e] += A[D[e],o] * X[S[e],c] * W[c,o]",
    "two hops": "Y[i,o] += A[i,j] * B[j,k] * C[k,o]",
    "two sparse hops": "Y[D[e],o] += Val[e] * Far[S[e],k] * C[k,o]",
    "attention": "Y[D[e],o] += Q[D[e],c] * K[S[e],c] * X[S[e],o]",
    "bilinear edges": "Y[e] += X[D[e],a] * M[R[e],a,b] * Z[S[e],b]",
    "four factors": "Y[D[e],o] += Val[e] * X[S[e],c] * W[c,b] * V[b,o]",
    "blocks": "Y[k,D[e],o] += W[e,o,c] * X[k,S[e],c]",
    "groups of blocks": "Y[G[g],o,k] += Val[g,q,o,c] * X[Col[g,q],c,k]",
    "sampled blocks": "Y[e,o,c] += A[k,D[e],o] * X[k,S[e],c]",
    "a shifted read": "Y[D[e],o] += Val[e] * X[e+i-1,c] * W[c,o]",
}
_ENTRIES, _NODES, _EXTENTS = 9, 5, {"c": 3, "o": 4, "a": 3, "b": 2, "k": 4, "i": 2, "j": 5, "g": 6, "q": 2, "e": 9}


def drawn(statement: str, dtype: torch.dtype = torch.float64, *, missing: float = 0.2) -> dict[str, Tensor]:
    """Tensors for one of the statements; a share of the entries is missing."""
    parsed = insum_nn.compile(statement, sizes={"i": 2}).statement
    found: dict[str, Tensor] = {}
    for access in parsed.accesses():
        index = access.name in parsed.index_tensors()
        shape = [_EXTENTS[s.plain] if s.plain else _ENTRIES if not s.indirect else _NODES for s in access.subscripts]
        if access is parsed.output or access.name in found:
            continue
        if index:
            entries = torch.randint(_NODES - 1, shape)
            found[access.name] = torch.where(torch.rand(shape) < missing, -1, entries)
        else:
            found[access.name] = torch.randn(shape, dtype=torch.float64).to(dtype)
    return found


def out_shape(statement: str) -> tuple[int, ...]:
    """The output's shape for such tensors."""
    output = insum_nn.compile(statement, sizes={"i": 2}).statement.output
    return tuple(_EXTENTS[s.plain] if s.plain else _NODES for s in output.subscripts)


def cut_at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Bound]:
    """Cut every statement that can be cut, and its parts, at random; returns what was cut, as it is."""
    found: list[Bound] = []

    def best(
        whole: statement_cuts.Part, taken: frozenset[str], depth: int, options: Options, room: float
    ) -> tuple[statement_cuts.Tree, Cost]:
        cuts = [cut for cut in cuts_of(whole.bound, taken) if statement_cuts.fits(cut, whole)]
        random.Random(f"{whole.bound.statement} {seed}").shuffle(cuts)
        for cut in cuts if depth else []:
            first, second = statement_cuts.both_of(cut, whole)
            if math.prod(first.sizes.output) > 2**20:
                continue
            found.append(whole.bound)
            names = taken | {cut.intermediate, *(clear.name for clear in cut.clears)}
            one, before = best(first, names, depth - 1, options, room)
            other, after = best(second, names, depth - 1, options, room)
            return statement_cuts.Tree(cut, (one, other)), before + after
        return statement_cuts.WHOLE, statement_cuts.price_of(whole, options)

    monkeypatch.setattr(statement_cuts, "_best", best)
    insum_nn.clear_cache()
    return found


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
