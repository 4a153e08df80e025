"""The gradients of a call of one statement or of several, as statements: which there are, and what runs them.

Backward runs in a thread of its own, where the same Python takes longer than in the caller's. So what the derivative
programs of one kind of call are, which tensors they read and in which shapes, is found once and kept with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.derivative import counting, derivatives
from insum_nn.compiler.runtime.artifact import Step
from insum_nn.compiler.runtime.dispatch import Spec, parse_cached
from insum_nn.compiler.runtime.statement_graph import RunStatement, StatementGraph
from insum_nn.dtypes import is_widened

__all__ = ["Gradients", "attaining", "differentiate", "gradients", "gradients_of"]


class Gradients(NamedTuple):
    """The graph of the gradients of some tensors of a call, of one statement or of several.

    It reads the tensors, then what statements wrote, then the gradients of results.

    Attributes:
        graph: the graph.
        places: what each output is the gradient of, as `Step.places` says.
        kept: which of the tensors it reads; empty: all of them.
        written: the outputs of the call that it reads.
    """

    graph: StatementGraph
    places: tuple[int, ...]
    kept: tuple[bool, ...]
    written: tuple[int, ...]


@lru_cache(maxsize=2048)
def _derived(spec: Spec, position: int) -> tuple[Step, ...]:
    """Return the derivative programs of the tensor at a position, as the first output.

    They read tensors of the call, then the gradient and the extremum.
    """
    layout = spec.layout
    derivative = derivatives(spec.statement, layout.tensors[position])
    pool = {name: place for place, name in enumerate((*layout.tensors, derivative.seed, *derivative.extremum))}
    found: list[Step] = []
    for statement in derivative.statements:
        own = spec.with_statement(statement, drop_outside=True)
        places, indices = map(pool.__getitem__, own.layout.tensors), map(layout.indices.index, own.layout.indices)
        found.append(Step(own, tuple(places), 0, 0, tuple(indices)))
    return tuple(found)


def differentiate(steps: Sequence[Step], results: Sequence[int], needs: Sequence[bool]) -> Gradients | None:
    """Return the graph of the gradients of some tensors; `None`: it is not made of statements alone.

    Args:
        steps: the statements of a call, each with its own number as its source of extents.
        results: the numbers of the outputs that are returned.
        needs: which of the tensors of the call need a gradient.
    """
    learned = {at for at, need in enumerate(needs) if need}
    recorded: list[tuple[Step, list[int]]] = []
    for step in steps:
        layout = step.spec.layout
        values = [n for n, name in enumerate(layout.tensors) if name in layout.value_tensors]
        own = [n for n in values if step.places[n] in learned and _derived(step.spec, n)]
        if own and not step.spec.adds and len(steps) > 1:
            # The gradient of an extremum is divided first by how many terms attain it.
            return None
        recorded.append((step, own))
        learned |= {-1 - step.output} if own else set()
    inputs, written = len(needs), 1 + max(step.output for step in steps)
    outputs: dict[int, int] = {}
    found: list[Step] = []
    begun: set[int] = set()
    for step, own in reversed(recorded):
        place = -1 - step.output
        seed = inputs + written + results.index(step.output) if step.output in results else None
        if place in outputs:
            if seed is not None and place not in begun:
                # What the caller does with a result, besides what later statements do.
                rank = len(step.spec.layout.output_plain)
                axes = f"[{','.join(f'i{n}' for n in range(rank))}]" if rank else ""
                copy = step.spec.with_statement(parse_cached(f"Y{axes} += X{axes}"), drop_outside=True)
                found.append(Step(copy, (seed,), outputs[place], len(steps) + step.output, tuple(range(rank))))
            begun.add(place)
            seed = -1 - outputs[place]
        if seed is None:
            continue
        given = [at if at >= 0 else inputs - 1 - at for at in (*step.places, place)]
        given.insert(-1, seed)
        for n in own:
            output = outputs.setdefault(step.places[n], len(outputs))
            for each in _derived(step.spec, n):
                places = tuple(map(given.__getitem__, each.places))
                found.append(each._replace(places=places, output=output, source=step.source))
    read = {at for each in found for at in each.places}
    kept = tuple([at in read for at in range(inputs)])
    made = tuple([n for n in range(written) if inputs + n in read])
    return Gradients(StatementGraph(found), tuple(outputs), () if all(kept) else kept, made)


def gradients_of(spec: Spec, needs: tuple[bool, ...]) -> Gradients:
    """Return the graph of the gradients of some tensors of one statement; of an extremum from a divided gradient."""
    found: Gradients | None = spec.gradients.get(needs)
    if found is None:
        step = Step.of(spec, range(len(spec.layout.tensors)), 0, 0)
        found = spec.gradients[needs] = differentiate([step], (0,), needs)
        assert found is not None
    return found


@lru_cache(maxsize=2048)
def _counting(spec: Spec, one: float) -> StatementGraph:
    """Return the program that counts the terms that attain an extremum, each as `one`."""
    found, layout = counting(spec.statement, one), spec.layout
    # A tensor of the output's size is counted into, whatever else is summed in a dtype of few numbers.
    wide = replace(spec, options=replace(spec.options, accumulate="float32"))
    own = wide.with_statement(found, drop_outside=True)
    pool = (*layout.tensors, None, spec.statement.output.name)
    places = tuple(pool.index(name) for name in own.layout.tensors)
    indices = tuple(layout.indices.index(name) for name in own.layout.indices)
    return StatementGraph([Step(own, places, 0, 0, indices)])


def attaining(
    spec: Spec,
    extents: Extents,
    tensors: Sequence[Tensor | None],
    initial: Tensor | None,
    result: Tensor,
    run: RunStatement,
) -> tuple[Tensor, Tensor | None]:
    """Return how many terms attain the extremum of each cell, 1 if none does, and whether an initial value does.

    An initial value that attains it counts as one of them, and is alone where no term takes part.

    Args:
        spec: the program.
        extents: the sizes of the call.
        tensors: its tensors.
        initial: its initial value.
        result: its output.
        run: runs the program that counts.
    """
    # float16 ends at 65,504.
    one = 2**-10 if result.dtype == torch.float16 else 1
    # Index tensors stay the objects of which their order is remembered.
    pool = [t.detach() if t is not None and t.requires_grad else t for t in (*tensors, None, result)]
    (count,) = _counting(spec, one).run(pool, (extents.indices,), (extents.output,), run)
    if is_widened(count.dtype):
        count = count.to(torch.float32) / one
    if initial is None:
        return count.clamp(min=1), None
    of_initial = (initial == result) | initial.isnan()
    return (count + of_initial).clamp(min=1), of_initial.detach()


def gradients(
    spec: Spec,
    extents: Extents,
    tensors: Sequence[Tensor | None],
    shapes: Sequence[torch.Size] | None,
    initial: Tensor | None,
    result: Tensor | None,
    needs: Sequence[bool],
    grad: Tensor,
    run: RunStatement,
) -> tuple[list[Tensor | None], Tensor]:
    """Compute the gradients of the tensors that need one, and that of an initial value.

    Args:
        spec: the program.
        extents: the sizes of the call.
        tensors: its tensors; those that `Gradients.kept` does not name may be `None`, if shapes are given.
        shapes: of all of them.
        initial: its initial value; of an extremum alone.
        result: the extremum.
        needs: which of them need one.
        grad: the gradient of the output.
        run: runs one derivative program, which adds to what those before it made.
    """
    of_initial = grad
    if result is not None and not spec.adds:
        count, share = attaining(spec, extents, tensors, initial, result, run)
        grad, result = (grad / count).to(result.dtype), result.detach()
        of_initial = grad if share is None else grad * share
    graph, places, _, _ = gradients_of(spec, tuple(needs))
    outputs: list[tuple[int, ...]] = []
    for at in places:
        tensor = tensors[at]
        outputs.append(shapes[at] if tensor is None else tensor.shape)  # type: ignore[index]
    made = dict(zip(places, graph.run((*tensors, result, grad), (extents.indices,), outputs, run), strict=True))
    return list(map(made.get, range(len(needs)))), of_initial
