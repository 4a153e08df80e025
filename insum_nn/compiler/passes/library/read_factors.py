"""Give each factor that is gathered, or read under a condition, a step of its own.

out[b] += (t0[x0[b]] if x0[b] >= 0 else 0) * t1[b]    ->    v0[b] = (t0[x0[b]] if x0[b] >= 0 else 0)
out[b] += v0[b] * t1[b]
"""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.ir.access import indices_of, scattered_axes
from insum_nn.compiler.ir.graph import GraphNode
from insum_nn.compiler.ir.nodes import Load
from insum_nn.compiler.passes.library.steps import Cut

__all__ = ["read_factors"]


def read_factors(cut: Cut, reads: Sequence[Load]) -> tuple[list[GraphNode], list[Load]]:
    """The steps that read factors, and the reads of their results; a plain read stays as it is."""
    steps: list[GraphNode] = []
    found: list[Load] = []
    for read in reads:
        if scattered_axes(read.subscripts) or read.where is not None:
            step, read = cut.intermediate(indices_of(read), read)
            steps.append(step)
        found.append(read)
    return steps, found
