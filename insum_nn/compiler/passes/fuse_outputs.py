"""Make one kernel of several that go over the same loops, so that what they read is read once.

free a in 0 .. A:                                         free a in 0 .. A:
free b in 0 .. 64:                                        free b in 0 .. 64:
out[x0[a], 0, b] += t0[a, b] * t2[x1[a], 1, b]            out[x0[a], 0, b] += t0[a, b] * t2[x1[a], 1, b]
and                                                ->         out1[a, b] += t1[x0[a], 0, b] * t2[x1[a], 1, b]
free a in 0 .. A:
free b in 0 .. 64:
out1[a, b] += t1[x0[a], 0, b] * t2[x1[a], 1, b]
"""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.ir.graph import around, loops_of, stores_of
from insum_nn.compiler.ir.nodes import Index, Kernel, Loop

__all__ = ["fuse_outputs"]


def fuse_outputs(kernels: Sequence[Kernel]) -> Kernel:
    """The algorithm that has the results of all; loops of one index are one, and what adds to one result is one sum."""
    loops: dict[Index, Loop] = {}
    for kernel in kernels:
        own = loops_of(kernel)
        assert not loops or loops.keys() == {loop.index for loop in own}, "kernels over other loops"
        for loop in own:
            if loop.role == "free" or loop.index not in loops:
                loops[loop.index] = loop
    body = around(loops.values(), tuple(store for kernel in kernels for store in stores_of(kernel)))
    inputs = tuple(dict.fromkeys(buffer for kernel in kernels for buffer in kernel.inputs))
    results = tuple(dict.fromkeys(result for kernel in kernels for result in kernel.results))
    return Kernel(inputs, results, body, all(kernel.exact for kernel in kernels))
