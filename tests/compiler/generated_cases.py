"""Classes of statements for the kernel generator, each with an oracle written in torch's own calls.

The oracles are dense where that is affordable, share nothing with the compiler, and are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts

__all__ = ["CASES", "Case", "put", "take"]

Tensors = dict[str, Tensor]
SORTED = IndexFacts(sorted=True, masked=False, proven=True)
FULL = IndexFacts(masked=False, proven=True)
HOLES = IndexFacts(masked=True, proven=True)
ONCE = IndexFacts(unique=True, masked=False, proven=True)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`; of 0 where there is no entry."""
    rows = x[index.clamp(min=0)]
    return torch.where((index >= 0).reshape(*index.shape, *[1] * (x.dim() - 1)), rows, 0)


def put(terms: Tensor, index: Tensor, rows: int) -> Tensor:
    """The sum of terms by row; those without one are dropped."""
    flat = index.flatten().long()
    terms = terms.reshape(flat.shape[0], *terms.shape[index.dim() :])
    return terms.new_zeros(rows + 1, *terms.shape[1:]).index_add(0, torch.where(flat < 0, rows, flat), terms)[:rows]


@dataclass(frozen=True)
class Case:
    """One class of statements.

    Attributes:
        draw: its tensors, values in float64, for a scale (1: a few cells; 8: a device's worth).
        oracle: the output from float64 tensors.
        fixed: indices whose extents are compiled in when a schedule is tried by hand.
        static: tensors whose values are written out.
        dot: a matrix product is expected in the text at a large scale.
    """

    name: str
    expression: str
    draw: Callable[[int], Tensors]
    oracle: Callable[[Tensors, int], Tensor]
    out_shape: Callable[[int], tuple[int | None, ...] | None] = lambda s: None
    facts: Mapping[str, IndexFacts] = torch.jit.annotate(dict, {}) if False else None  # type: ignore[assignment]
    fixed: str = ""
    static: tuple[str, ...] = ()
    dot: bool = False


def index(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)
