"""A graph compiled by Inductor, for all sizes that it meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.codegen import inductor
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.library.programs import extent_arguments
from insum_nn.locks import new_lock

__all__ = ["InductorProgram", "split_arguments"]

# Inductor's configuration belongs to the process, so that one thread compiles at a time. Nothing else waits for it.
_compiling = new_lock()
# Variants of one program that are kept.
_MOST = 8


class InductorProgram:
    """A graph compiled by Inductor: one variant per set of assumptions about sizes that Inductor made."""

    def __init__(self, graph: CallGraph, bound: Bound, options: Options) -> None:
        self.graph = graph
        self.bound = bound
        self.options = options
        self.variants: list[inductor.Compiled] = []

    def __call__(self, *args: object) -> Tensor:
        return self.variant(args)(*args)

    def variant(self, args: Sequence[object]) -> Callable[..., Tensor]:
        """Return the code for arguments of these sizes, compiled now if there is none."""
        # One memory layout per program, or each new stride pattern would need another one.
        flat = [a.detach().contiguous() if isinstance(a, Tensor) else a for a in args]
        found = self._fitting(flat)
        if found is None:
            with torch.no_grad(), _compiling:
                # Another thread may have compiled it in the meantime.
                found = self._fitting(flat)
                if found is None:
                    found = self._compile(flat)
                    self.variants = [found, *self.variants[: _MOST - 1]]
        return _contiguous(found)

    def _fitting(self, flat: Sequence[object]) -> inductor.Compiled | None:
        return next((v for v in self.variants if v.fits(flat)), None)

    def _compile(self, flat: Sequence[object]) -> inductor.Compiled:
        tensors, integers, initial = split_arguments(self.bound, flat)
        return inductor.compile_graph(self.graph, self.bound, self.options, integers, tensors, initial)


def _contiguous(compiled: inductor.Compiled) -> Callable[..., Tensor]:
    def call(*args: object) -> Tensor:
        with torch.no_grad():
            return compiled(*[a.detach().contiguous() if isinstance(a, Tensor) else a for a in args])

    return call


def split_arguments(bound: Bound, flat: Sequence[object]) -> tuple[list[Tensor], list[tuple[str, int]], Tensor | None]:
    """Return a graph's flat arguments as tensors, named integers, and the initial value."""
    indices, axes = extent_arguments(bound)
    names = [*(f"extent_{name}" for name in indices), *(f"output_extent_{axis}" for axis in axes)]
    count = len(bound.layout.tensors)
    tensors = [a for a in flat[:count] if isinstance(a, Tensor)]
    integers = [
        (name, a) for name, a in zip(names, flat[count : count + len(names)], strict=True) if isinstance(a, int)
    ]
    initial = flat[-1] if bound.has_initial else None
    return tensors, integers, initial if isinstance(initial, Tensor) else None
