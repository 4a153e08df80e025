"""Run a list of statements, in which later ones read what earlier ones wrote: programs, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.printed import Lists, Sizes
from insum_nn.compiler.runtime.artifact import Artifact, Step
from insum_nn.compiler.runtime.dispatch import Spec, dtype_of, run_plain
from insum_nn.compiler.runtime.execution import sharing

__all__ = ["RunStatement", "StatementGraph"]

# Runs one statement: its tensors, what it adds to, its sizes.
RunStatement = Callable[[Spec, Sequence[Tensor], Tensor | None, Extents], Tensor]


class StatementGraph:
    """Runs steps in order: on a CPU by one C function where there is one, else one after the other.

    Args:
        steps: the statements.
        deterministic: a kernel of several statements is to give the same bits at every run.
        fixed: places of static tables that are the same in every call.
    """

    __slots__ = ("_artifacts", "_deterministic", "_fixed", "_read", "_steps")

    def __init__(self, steps: Sequence[Step], *, deterministic: bool = False, fixed: Collection[int] = ()) -> None:
        self._steps = tuple(steps)
        self._deterministic, self._fixed = deterministic, fixed
        self._read = tuple(dict.fromkeys(at for step in steps for at in step.places if at >= 0))
        self._artifacts: dict[tuple[torch.dtype, ...], Artifact] = {}

    def run(
        self, pool: Sequence[Tensor | None], extents: Lists, shapes: Lists, run: RunStatement = run_plain
    ) -> Sequence[Tensor]:
        """Return the outputs.

        Args:
            pool: the tensors of a call; those that no step reads may be `None`.
            extents: the lists of extents that steps name.
            shapes: of the outputs.
            run: runs one step, which adds to what those before it made; by default where nothing is recorded.
        """
        # Loops and `map`: every backward pass comes here.
        sizes: list[Sizes] = []
        for step in self._steps:
            sizes.append(tuple(map(extents[step.source].__getitem__, step.indices)))
        if run is run_plain and self._read:
            given: list[Any] = list(map(pool.__getitem__, self._read))
            # Whether one kernel of several statements is faster depends on sizes: operators say where it is made.
            if given[0].is_cpu and (artifact := self.artifact(given)) is not None and not artifact.generated:
                found = artifact.run(given, sizes, shapes, None)
                if found is not None:
                    return found
        # Output n is at -1 - n.
        tensors: list[Any] = [*pool, *[None] * len(shapes)]
        outer = sharing.set({} if run is run_plain and len(sizes) > 1 else None)
        try:
            for step, own in zip(self._steps, sizes, strict=True):
                given = list(map(tensors.__getitem__, step.places))
                at = -1 - step.output
                tensors[at] = run(step.spec, given, tensors[at], Extents(own, shapes[step.output]))
        finally:
            sharing.reset(outer)
        return tensors[: -1 - len(shapes) : -1]

    def artifact(self, given: Sequence[Tensor]) -> Artifact | None:
        """Return what runs all at once on tensors of these dtypes, which are those that the steps read, in order."""
        kind = tuple(map(dtype_of, given))
        found = self._artifacts.get(kind)
        if found is None and len(self._steps) == 1:
            # What runs one statement alone is that of its own calls.
            found = self._steps[0].spec.calls.get((False, *kind))
        elif found is None:
            slot = {place: n for n, place in enumerate(self._read)}
            steps = [step._replace(places=tuple(slot.get(at, at) for at in step.places)) for step in self._steps]
            order, fixed = self._deterministic, [slot[at] for at in self._fixed]
            found = Artifact(steps, given, deterministic=order, fixed=fixed)
        if found is not None:
            self._artifacts[kind] = found
        return found
