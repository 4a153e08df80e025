"""Run the backward pass of a call, where no second derivative is recorded, by its derivative programs.

Backward runs in a thread of its own, where the same Python takes longer than in the caller's. So what the derivative
programs of one kind of call are, which tensors they read and in which shapes, is found once and kept with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.derivative import Derivative, counting, derivatives
from insum_nn.compiler.runtime.dispatch import Spec, run_plain
from insum_nn.compiler.runtime.statement_graph import RunStatement, StatementGraph, Step
from insum_nn.dtypes import is_widened

__all__ = ["Call", "Shapes", "attaining", "derived_of", "gradients", "kept_tensors"]

# Of all tensors of a call, where some of them were not kept.
Shapes = Sequence[torch.Size] | None


@dataclass(slots=True)
class Call:
    """The constants of a call, or of all calls of one kind.

    Attributes:
        spec: the program.
        extents: the sizes.
    """

    spec: Spec
    extents: Extents


@lru_cache(maxsize=2048)
def _derivative_specs(
    spec: Spec, operand: str
) -> tuple[Derivative, tuple[tuple[Spec, tuple[str, ...], tuple[str, ...]], ...]]:
    """Return the derivative's programs, each with the tensors and the indices that it takes."""
    derivative = derivatives(spec.statement, operand)
    inner = tuple(spec.with_statement(statement, drop_outside=True) for statement in derivative.statements)
    return derivative, tuple((each, each.layout.tensors, each.layout.indices) for each in inner)


def derived_of(spec: Spec, position: int) -> tuple[Step, ...]:
    """Return the derivative programs of the tensor at a position, as the first output.

    They read tensors of the call, then the gradient and the extremum.
    """
    found: tuple[Step, ...] | None = spec.derived.get(position)
    if found is None:
        layout = spec.layout
        derivative, programs = _derivative_specs(spec, layout.tensors[position])
        pool = {name: place for place, name in enumerate((*layout.tensors, derivative.seed, *derivative.extremum))}
        own = layout.indices
        found = spec.derived[position] = tuple(
            Step(each, tuple(pool[x] for x in names), 0, 0, tuple(own.index(x) for x in indices))
            for each, names, indices in programs
        )
    return found


def kept_tensors(spec: Spec, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which tensors the gradients depend on; empty: all of them."""
    found: tuple[bool, ...] | None = spec.kept.get(needs)
    if found is None:
        layout = spec.layout
        learned = [x for x, need in zip(layout.tensors, needs, strict=True) if need and x in layout.value_tensors]
        read = {x for name in learned for _, tensors, _ in _derivative_specs(spec, name)[1] for x in tensors}
        needed = tuple(name in read for name in layout.tensors)
        found = spec.kept[needs] = () if all(needed) else needed
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
    call: Call, tensors: Sequence[Tensor | None], initial: Tensor | None, result: Tensor, run: RunStatement
) -> tuple[Tensor, Tensor | None]:
    """Return how many terms attain the extremum of each cell, 1 if none does, and whether an initial value does.

    An initial value that attains it counts as one of them, and is alone where no term takes part.

    Args:
        call: the call.
        tensors: its tensors.
        initial: its initial value.
        result: its output.
        run: runs the program that counts.
    """
    # float16 ends at 65,504.
    one = 2**-10 if result.dtype == torch.float16 else 1
    # Index tensors stay the objects of which their order is remembered.
    pool = [t.detach() if t is not None and t.requires_grad else t for t in (*tensors, None, result)]
    (count,) = _counting(call.spec, one).run(pool, (call.extents.indices,), (call.extents.output,), run)
    if is_widened(count.dtype):
        count = count.to(torch.float32) / one
    if initial is None:
        return count.clamp(min=1), None
    of_initial = (initial == result) | initial.isnan()
    return (count + of_initial).clamp(min=1), of_initial.detach()


def _graph(spec: Spec, needs: tuple[bool, ...]) -> tuple[StatementGraph, tuple[int, ...]]:
    """Return the derivative programs of the tensors that need a gradient, and the positions of these tensors."""
    values, names = spec.layout.value_tensors, spec.layout.tensors
    read = tuple(at for at, need in enumerate(needs) if need and names[at] in values and derived_of(spec, at))
    steps = [step._replace(output=n) for n, at in enumerate(read) for step in derived_of(spec, at)]
    found = spec.together[needs] = StatementGraph(steps), read
    return found


def gradients(
    call: Call,
    tensors: Sequence[Tensor | None],
    shapes: Shapes,
    needs: Sequence[bool],
    grad: Tensor,
    extremum: Tensor | None = None,
    run: RunStatement = run_plain,
) -> list[Tensor | None]:
    """Compute the gradients of the tensors that need one.

    Args:
        call: the call.
        tensors: its tensors; those that `kept_tensors` does not name may be `None`, if shapes are given.
        shapes: of all of them.
        needs: which of them need one.
        grad: the gradient of the sum, or that of an extremum by how many terms attain it.
        extremum: the output, where it is one.
        run: runs one derivative program, which adds to what those before it made; by default where nothing is recorded.
    """
    key = tuple(needs)
    graph, positions = call.spec.together.get(key) or _graph(call.spec, key)
    found: list[Tensor | None] = [None] * len(needs)
    outputs: list[tuple[int, ...]] = []
    for at in positions:
        tensor = tensors[at]
        outputs.append(shapes[at] if tensor is None else tensor.shape)  # type: ignore[index]
    pool, sizes = (*tensors, grad, extremum), (call.extents.indices,)
    for at, made in zip(positions, graph.run(pool, sizes, outputs, run), strict=True):
        found[at] = made
    return found
