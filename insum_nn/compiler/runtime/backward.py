"""The gradients of a call of one statement or of several, as statements: which there are, and what runs them.

Backward runs in a thread of its own, where the same Python takes longer than in the caller's. So what the derivative
programs of one kind of call are, which tensors they read and in which shapes, is found once and kept with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.derivative import counting, derivatives
from insum_nn.compiler.lang.printed import Lists
from insum_nn.compiler.runtime.artifact import Step
from insum_nn.compiler.runtime.dispatch import RunStatement, Spec, StatementGraph, parse_cached
from insum_nn.dtypes import is_widened

__all__ = ["Differentiated", "RunGraph", "attaining", "gradients", "gradients_of"]

# Runs a graph: its lists of extents, the shapes of its outputs, its tensors.
RunGraph = Callable[[StatementGraph, Lists, Lists, Sequence[Tensor]], Sequence[Tensor]]


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


class Differentiated(NamedTuple):
    """The gradients of a call.

    Attributes:
        graph: their statements. It reads the tensors of the call, then what its statements wrote, then the gradients of
            its results.
        places: what each output is the gradient of, as `Step.places` says.
        written: the outputs of the call that it reads.
        again: the same from tensors and gradients alone, to be differentiated in turn: first it computes again what
            the call wrote. Its first outputs are the gradients, and its results.
        read: what that reads, as places of the pool of `graph`.
        made: the outputs of the call that it computes again.
        kept: which of the tensors of the call it reads; empty: all of them.
    """

    graph: StatementGraph
    places: tuple[int, ...]
    written: tuple[int, ...]
    again: StatementGraph
    read: tuple[int, ...]
    made: tuple[int, ...]
    kept: tuple[bool, ...]


def gradients_of(
    graph: StatementGraph, needs: tuple[bool, ...], given: tuple[bool, ...] | None = None
) -> Differentiated | None:
    """Return the gradients of some tensors of a call; of an extremum alone from a divided gradient.

    `None`: they are not made of statements alone.

    Args:
        graph: the statements of the call.
        needs: which of the tensors of the call need a gradient.
        given: which of the results have one; by default all.
    """
    key = needs, given
    if key not in graph.gradients:
        graph.gradients[key] = _differentiated(graph, needs, given or (True,) * len(graph.results))
    return graph.gradients[key]  # type: ignore[no-any-return]


def _differentiated(graph: StatementGraph, needs: Sequence[bool], given: Sequence[bool]) -> Differentiated | None:
    steps, results = graph.steps, [*compress(graph.results, given)]
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
                found.append(Step(copy, (seed,), outputs[place], graph.lists + step.output, tuple(range(rank))))
            begun.add(place)
            seed = -1 - outputs[place]
        if seed is None:
            continue
        pool = [at if at >= 0 else inputs - 1 - at for at in (*step.places, place)]
        pool.insert(-1, seed)
        for n in own:
            output = outputs.setdefault(step.places[n], len(outputs))
            for each in _derived(step.spec, n):
                places, indices = map(pool.__getitem__, each.places), map(step.indices.__getitem__, each.indices)
                found.append(Step(each.spec, tuple(places), output, step.source, tuple(indices)))
    read = {at - inputs for each in found for at in each.places}
    own_written = tuple([n for n in range(written) if n in read])
    whole = StatementGraph(found, lists=graph.lists + written)
    again, places, made = _from_tensors(graph, whole, inputs, len(outputs), () if graph.alone else own_written)
    kept = tuple([at in places for at in range(inputs)])
    return Differentiated(whole, tuple(outputs), own_written, again, places, made, () if all(kept) else kept)


def _from_tensors(
    graph: StatementGraph, derived: StatementGraph, inputs: int, outputs: int, wanted: Sequence[int]
) -> tuple[StatementGraph, tuple[int, ...], tuple[int, ...]]:
    """Return derived statements behind those that compute again what they read of a call; see `Differentiated`."""
    missing, steps = {*wanted}, list[Step]()
    for step in reversed(graph.steps):
        if step.output in missing:
            steps.insert(0, step)
            missing.update(-1 - at for at in step.places if at < 0)
    numbers = {output: outputs + n for n, output in enumerate(sorted(missing))}
    moved = {inputs + n: -1 - number for n, number in numbers.items()}
    moved |= {-1 - n: -1 - number for n, number in numbers.items()}
    first = [step._replace(output=numbers[step.output]) for step in steps]
    places = [[moved.get(at, at) for at in step.places] for step in first]
    places += [[moved.get(at, at) if at >= 0 else at for at in step.places] for step in derived.steps]
    read = tuple(sorted({at for each in places for at in each if at >= 0}))
    slots = {at: n for n, at in enumerate(read)}
    every = [
        step._replace(places=tuple(slots.get(at, at) for at in own))
        for step, own in zip((*first, *derived.steps), places, strict=True)
    ]
    return StatementGraph(every, tuple(range(outputs)), lists=derived.lists), read, tuple(numbers)


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
    run: RunStatement | None,
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
    graph: StatementGraph,
    sizes: Lists,
    shapes: Lists,
    pool: Sequence[Tensor | None],
    given: Sequence[torch.Size] | None,
    initial: Tensor | None,
    needs: Sequence[bool],
    grads: tuple[Tensor | None, ...],
    run: RunStatement | None,
    record: RunGraph | None = None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Compute the gradients of the tensors that need one, and that of an initial value.

    Args:
        graph: the statements of the call.
        sizes: the extents of each.
        shapes: of what they write.
        pool: the tensors of the call, and what its statements wrote; those that no gradient reads may be `None`.
        given: shapes of the tensors of the call, where some are not there.
        initial: its initial value; of an extremum alone.
        needs: which of the tensors need a gradient.
        grads: those of the results; `None` of those that have none.
        run: runs one derivative program, which adds to what those before it made; by default where nothing is recorded.
        record: runs several that autograd is to record as one call.
    """
    of_initial, spec = grads[0], graph.alone
    if spec is not None and not spec.adds:
        *tensors, result = pool
        assert result is not None
        count, share = attaining(spec, Extents(sizes[0], shapes[0]), tensors, initial, result, run)
        assert of_initial is not None
        of_each = (of_initial / count).to(result.dtype)
        pool, of_initial, grads = [*tensors, result.detach()], of_each if share is None else of_each * share, (of_each,)
    some, given_grads = None, grads
    # A loop instead of `any`: every backward pass comes here.
    for each in grads:
        if each is None:
            some, given_grads = tuple([g is not None for g in grads]), tuple([g for g in grads if g is not None])
            break
    found = gradients_of(graph, tuple(needs), some)
    assert found is not None
    outputs: list[Any] = []
    for at in found.places:
        tensor = pool[at] if at >= 0 else None
        outputs.append(shapes[-1 - at] if at < 0 else given[at] if tensor is None else tensor.shape)  # type: ignore[index]
    lists, every = (*sizes, *shapes), (*pool, *given_grads)
    if run is None or not torch.is_grad_enabled():
        made = found.graph.run(every, lists, outputs, run)
    else:
        outputs += map(shapes.__getitem__, found.made)
        read: list[Any] = list(map(every.__getitem__, found.read))
        whole = record is not None and len(found.again.steps) > 1
        made = record(found.again, lists, outputs, read) if whole else found.again.run(read, lists, outputs, run)  # type: ignore[misc]
    by_place = dict(zip(found.places, made, strict=False))
    return list(map(by_place.get, range(len(needs)))), of_initial
