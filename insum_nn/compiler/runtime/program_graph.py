"""Run a program of several statements as one call, which autograd records as one function with one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.lang.printed import Sizes
from insum_nn.compiler.runtime.artifact import Step
from insum_nn.compiler.runtime.autograd import apply
from insum_nn.compiler.runtime.backward import Gradients, differentiate
from insum_nn.compiler.runtime.dispatch import Spec, run_plain
from insum_nn.compiler.runtime.modes import followed_by, is_plain, is_plain_eager
from insum_nn.compiler.runtime.recorded import record
from insum_nn.compiler.runtime.statement_graph import StatementGraph
from insum_nn.compiler.runtime.steps.needed_gradients import needed_gradients
from insum_nn.compiler.runtime.steps.watch import watch
from insum_nn.tensor_cache import same_views

__all__ = ["ProgramGraph"]

# An access: a name, and for each axis the index or the entry that has its extent.
Axes = tuple[str, tuple[str | None, ...]]

_numbers = count()


class _Call(NamedTuple):
    """A call of a program.

    Attributes:
        graph: the program.
        sizes: the extents of each statement.
        shapes: of what they write.
    """

    graph: ProgramGraph
    sizes: Sequence[Sizes]
    shapes: Sequence[Sizes]

    def run(self, ctx: Any, initial: Tensor | None, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        graph = self.graph
        made = graph.forward.run(tensors, self.sizes, self.shapes)
        found = graph.gradients(tuple(ctx.needs_input_grad[2:]))
        assert found is not None
        ctx.save_for_backward(*tensors, *[t if n in found.written else None for n, t in enumerate(made)])
        return tuple(map(made.__getitem__, graph.results))

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        graph, sizes, shapes = self
        pool, needs, run = [*ctx.saved_tensors], ctx.needs_input_grad[2:], run_plain
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled() or not is_plain_eager(*grads):
            # What statements wrote depends on the tensors, of which the gradients are differentiated in turn.
            run = apply
            pool[len(needs) :] = graph.forward.run(pool[: len(needs)], sizes, shapes, apply)
        else:
            needs = needed_gradients(ctx, 2, len(needs), graph.name)
        found = graph.gradients(tuple(needs))
        assert found is not None
        written = [pool[at].shape if at >= 0 else shapes[-1 - at] for at in found.places]
        made = found.graph.run([*pool, *grads], (*sizes, *shapes), written, run)
        gradients = dict(zip(found.places, made, strict=True))
        return None, *map(gradients.get, range(len(needs)))


class ProgramGraph:
    """The statements of a program, to be run and differentiated as one call.

    Args:
        inputs: names of the tensors that are passed.
        specs: the statements, in order.
        results: names of those that are returned.

    Attributes:
        forward: the graph of the statements.
    """

    def __init__(self, inputs: Sequence[str], specs: Sequence[Spec], results: Sequence[str]) -> None:
        self.inputs, self.name = tuple(inputs), ("program", next(_numbers))
        self.written = tuple(dict.fromkeys(spec.statement.output.name for spec in specs))
        self.results = tuple(map(self.written.index, results))
        self.indexed = tuple(dict.fromkeys(name for spec in specs for name in spec.statement.index_tensors()))
        place = {name: n for n, name in enumerate(inputs)} | {name: -1 - n for n, name in enumerate(self.written)}
        self.steps = [
            Step.of(spec, [place[name] for name in spec.layout.tensors], -1 - place[spec.statement.output.name], number)
            for number, spec in enumerate(specs)
        ]
        self.forward = StatementGraph(self.steps)
        # Statements that read no values, but count, have torch's default dtype.
        self.counts = any(not spec.layout.value_tensors for spec in specs)
        self._gradients: dict[tuple[bool, ...], Gradients | None] = {}

    def call_at(self, axes: Sequence[Axes], shapes: Mapping[str, Sizes], extents: Mapping[str, int]) -> _Call | None:
        """Return the sizes of a call; `None`: those that are given do not agree, or do not show some extent."""
        for name, own in axes:
            for index, extent in zip(own, shapes[name], strict=True):
                if index is not None and "[" not in index and extents.get(index) != extent:
                    return None
        sizes = [tuple(map(extents.get, step.spec.layout.indices)) for step in self.steps]
        if any(None in each for each in sizes):
            return None
        return _Call(self, sizes, [shapes[name] for name in self.written])  # type: ignore[arg-type]

    def run(self, call: _Call, named: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
        """Return the results; `None`: something else than autograd follows, or a value is passed that starts a sum."""
        if len(named) != len(self.inputs) or watch.calls is not None:
            return None
        if torch._C._is_any_autocast_enabled() or torch._C._is_tracing():
            return None
        # Statements refuse several.
        dtypes = {tensor.dtype for tensor in named.values() if tensor.is_floating_point()}
        if len(dtypes) > 1 or (self.counts and dtypes != {torch.get_default_dtype()}):
            return None
        tensors = [*map(same_views(named, self.indexed).__getitem__, self.inputs)]
        if not all(map(is_plain, tensors)):
            return None
        followed = followed_by(tensors, None)
        if followed is None:
            made = self.forward.run(tensors, call.sizes, call.shapes)
            return tuple(map(made.__getitem__, self.results))
        if followed == "mode" or self.gradients(tuple([t.requires_grad for t in tensors])) is None:
            return None
        return record(call, None, *tensors)  # type: ignore[no-any-return]

    def gradients(self, needs: tuple[bool, ...]) -> Gradients | None:
        """Return the graph of the gradients of some tensors; `None`: it is not made of statements."""
        if needs not in self._gradients:
            self._gradients[needs] = differentiate(self.steps, self.results, needs)
        return self._gradients[needs]
