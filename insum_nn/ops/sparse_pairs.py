"""Convolution, pooling and sums over tables of pairs of voxels that a caller has, in place of a kernel map.

A table has one of two forms: lists of pairs by offset, `InIdx` and `OutIdx` (o, q); or the neighbours of each output,
`Near` (o, m). An entry of -1 is no pair. Entries are checked at every call: a caller may pass any table.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.ops.statements import run

__all__ = ["pair_conv", "pair_max", "pair_sum"]

_CONV = "Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]"
_CONV_BY_NEIGHBOURS = "Out[i,d] += In[Near[k,i],c] * W[d,k,c]"
_MAX = "Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]"
_MAX_BY_NEIGHBOURS = "Out[i,c] max= In[Near[k,i],c]"
_SUM = "Out[OutIdx[o,q],c] += In[InIdx[o,q],c]"
_SUM_BY_NEIGHBOURS = "Out[i,c] += In[Near[k,i],c]"
_FACTS = NamedFacts(dict.fromkeys(("InIdx", "OutIdx", "Near"), IndexFacts(masked=True)))


def pair_conv(
    features: Tensor, filters: Tensor, table: Mapping[str, Tensor], num_outputs: int, *, options: Options = DEFAULT
) -> Tensor:
    """Convolve over a table.

        Out[OutIdx[o,q],d] += In[InIdx[o,q],c] * W[o,c,d]
        Out[i,d] += In[Near[k,i],c] * W[d,k,c]

    Args:
        features: `In`, (n, I); differentiable.
        filters: (O, o, I); differentiable. `W` is this, for lists of pairs with the offset first.
        table: `InIdx` and `OutIdx`, or `Near`.
        num_outputs: m.
        options: compile options.

    Returns:
        `Out`, (m, O).

    Raises:
        InsumRangeError: a row points outside.
    """
    if "Near" in table:
        return run(_CONV_BY_NEIGHBOURS, _FACTS, {"In": features, "W": filters, **table}, options, (num_outputs, None))
    named = {"In": features, "W": filters.permute(1, 2, 0).contiguous(), **table}
    return run(_CONV, _FACTS, named, options, (num_outputs, None))


def pair_max(features: Tensor, table: Mapping[str, Tensor], num_outputs: int, *, options: Options = DEFAULT) -> Tensor:
    """Return (m, C) the largest feature among the inputs of each output, 0 where there is none.

    Out[OutIdx[o,q],c] max= In[InIdx[o,q],c]
    Out[i,c] max= In[Near[k,i],c]

    `features` (n, C) are differentiable; entries that tie share the gradient. See `pair_conv` for the rest.
    """
    text = _MAX_BY_NEIGHBOURS if "Near" in table else _MAX
    return run(text, _FACTS, {"In": features, **table}, options, (num_outputs, None))


def pair_sum(features: Tensor, table: Mapping[str, Tensor], num_outputs: int, *, options: Options = DEFAULT) -> Tensor:
    """Return (m, C) the sum of the features of the inputs of each output.

    Out[OutIdx[o,q],c] += In[InIdx[o,q],c]
    Out[i,c] += In[Near[k,i],c]

    `features` (n, C) are differentiable. See `pair_conv` for the rest.
    """
    text = _SUM_BY_NEIGHBOURS if "Near" in table else _SUM
    return run(text, _FACTS, {"In": features, **table}, options, (num_outputs, None))
