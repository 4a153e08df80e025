"""Multi-output fusion: several statements on the same tensors as one kernel, such as the gradients of a product.

    dX[Src[e],i,u] += dZ[Dst[e],k,u] * Y[e,j] * W[e,l,u]
    dY[e,j]        += dZ[Dst[e],k,u] * X[Src[e],i,u] * W[e,l,u]
    dW[e,l,u]      += dZ[Dst[e],k,u] * X[Src[e],i,u] * Y[e,j]

Terms are walked by the index tensor for which a term then reads and adds least; `additional` says what becomes of the
outputs. What one kernel cannot compute, or was measured to be slower in one kernel, runs program by program.
Programs may add to one output, which then is one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, filterfalse
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.ir.access import affine_terms
from insum_nn.compiler.ir.canonical import named_as, names_of
from insum_nn.compiler.ir.graph import ROW
from insum_nn.compiler.ir.nodes import Load
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.lang.bind import Bound, Extents, bind, layout_of
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.printed import Attempt, Lists, Made, Pool, Sizes
from insum_nn.compiler.lang.shapes import agreement_of
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.execution import Executable
from insum_nn.compiler.schedule.additional import Walk, fused_form, is_owned, read_at, union
from insum_nn.compiler.schedule.form import Form, FormError, atoms
from insum_nn.compiler.schedule.plan import Plan
from insum_nn.compiler.schedule.tune import select_or_tune, worth_selecting
from insum_nn.compiler.tuning import database as store
from insum_nn.compiler.tuning.database import size_bucket
from insum_nn.compiler.tuning.select import Selected, Task
from insum_nn.compiler.tuning.timing import time_whole
from insum_nn.facts import IndexFacts
from insum_nn.tensor_cache import insert

__all__ = ["Fused", "One", "choose"]

T = TypeVar("T")
# Kernels that are kept.
_LIMIT = 64
# In place of a kernel's place among those that compute all statements.
_ONE_BY_ONE = -1


@dataclass(slots=True)
class One:
    """One of the statements, on the tensors of a call.

    Raises:
        FormError: no generated kernel runs it.

    Attributes:
        number: of the output that it adds to.
        bound: the statement, in the names of the caller: these say which tensors statements share.
        chosen: what runs it by itself.
        form: the same in these names.
        places: of its tensors among those of the call.
        tensors: its tensors.
        extents: its sizes.
    """

    number: int
    bound: Bound
    chosen: Executable
    places: tuple[int, ...]
    tensors: Sequence[Tensor]
    extents: Extents
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        bound, chosen = self.bound, self.chosen
        if not isinstance(chosen.run, Generated) or bound.epilogue:
            raise FormError(f"{bound.statement} is no generated kernel")
        self.form = chosen.run.form.named(named_as(bound, chosen.bound))
        if self.form.cells:
            raise FormError(f"{bound.statement} writes at affine subscripts")


@dataclass(frozen=True, slots=True)
class Fused:
    """One kernel for all.

    Attributes:
        statement: it writes what the first of them writes, and reads what any of them reads.
        static: its known extents.
        order: where each output stands among those of the kernel.
        walk: by which index tensor terms are walked.
        generated: the kernel.
        places: of its tensors among those of the call.
        rows: of outputs their numbers, and whose rows they have: the place of a tensor, and its axis.
        owned: the number of the output whose rows are the walk's own.
    """

    statement: Statement
    static: Mapping[str, int]
    order: tuple[int, ...]
    walk: Walk
    generated: Generated
    places: tuple[int, ...]
    rows: tuple[tuple[int, int, int], ...]
    owned: int | None

    def sizes(self, pool: Pool, shapes: Lists) -> Extents:
        """The sizes of the kernel's statement in a call.

        Raises:
            FormError: an output has other rows than it is to have, or sizes do not agree.
        """
        for number, at, axis in self.rows:
            if shapes[number][0] != pool[at].shape[axis]:
                raise FormError("an output does not have as many rows as what it is the gradient of")
        own = None if self.owned is None else shapes[self.owned]
        return _sizes(self.statement, self.static, self.walk, [pool[at] for at in self.places], own)

    def run(self, pool: Sequence[Tensor], shapes: Lists) -> Attempt:
        """What makes them of any call of this kind."""
        order, places = self.order, self.places
        made_by = self.generated.at([pool[at] for at in places], self.sizes(pool, shapes), None)

        def run(pool: Pool, extents: Lists, shapes: Lists, initial: Tensor | None) -> Made | None:
            try:
                found = self.sizes(pool, shapes)
            except FormError:
                return None
            made = made_by([pool[at] for at in places], (found.indices,), (found.output,), None)
            return tuple([made[at] for at in order])

        return run


def choose(
    ones: Sequence[One], pool: Pool, shapes: Lists, options: Options, kernels: dict[Hashable, Fused]
) -> tuple[Fused | None, str]:
    """Select the fastest kernel, or none where the statements are faster one by one; and say why.

    Args:
        ones: the statements.
        pool: the tensors of a call.
        shapes: of its outputs.
        options: of all of them.
        kernels: those that were written before; a new one is added.

    Raises:
        FormError: there is none, or not for these tensors.
    """
    plan, deterministic = _plan_of(ones), options.deterministic or torch.are_deterministic_algorithms_enabled()
    # Equal for all calls of one kernel.
    kinds = [(one.bound, one.chosen.bound, one.extents.output[1:]) for one in ones]
    key = (*kinds, torch._C._get_float32_matmul_precision())

    def kernel(walk: Walk) -> Fused:
        found = kernels.get((key, walk))
        if found is None:
            found = _along(ones, walk, plan, options, deterministic)
            insert(kernels, (key, walk), found, _LIMIT)
        found.sizes(pool, shapes)
        return found

    fitting = _those_that_fit(partial(kernel, walk) for walk in _walks(ones, plan))
    first = next(fitting)
    generated, extents = first.generated, first.sizes(pool, shapes)
    if not worth_selecting(extents):
        # Where speed does not matter, the same bits at every run do.
        def scatters(kernel: Fused) -> bool:
            return any(each.scattered for each in kernel.generated.form.additional)

        fixed = next(filterfalse(scatters, chain([first], fitting)), first)
        return fixed, "together: what they read is read once"
    # Others are made where one may be faster.
    every = cache(lambda: [first, *fitting])
    # Which kernels there are to select from depends on it; what each of them computes does not.
    algorithm = {**(generated.form.plan.key or {}), "deterministic": deterministic}
    more = {"algorithm": store.digest(algorithm), "precision": generated.precision}
    stored = store.key_of("together", generated.form.bound, {}, size_bucket(extents), pool[0].device, **more)

    def read(place: Any) -> int:
        if place not in range(_ONE_BY_ONE, len(every())):
            raise ValueError(f"{place} is none of {len(every())} kernels")
        return place

    def measure(_: object) -> list[tuple[int, float]]:
        given, lists = [tensor.detach() for tensor in pool], [one.extents.indices for one in ones]
        together = [partial(kernel.run(given, shapes), given, lists, shapes, None) for kernel in every()]
        runs = [_separately(ones), *together]
        times = [(place, time_whole(run)) for place, run in enumerate(runs, start=_ONE_BY_ONE)]
        return sorted(times, key=lambda each: each[1])

    task = Task(stored, lambda: Selected(0, "what they read is read once"), read, int, measure)
    place, reason = select_or_tune(task, generated.options)
    return (None, f"one by one: {reason}") if place == _ONE_BY_ONE else (every()[place], f"together: {reason}")


def _those_that_fit(makes: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What can be made, each when it is requested.

    Raises:
        FormError: nothing can; that of the last.
    """
    refused: FormError | None = FormError("no index tensor has an entry for each term")
    for make in makes:
        try:
            made = make()
        except FormError as error:
            refused = refused and error
        else:
            refused = None
            yield made
    if refused is not None:
        raise refused


# What is decided for programs together, whatever they call what they share, and the numbers of its names.
_Plan = tuple[Plan, dict[str, int]]


def _plan_of(ones: Sequence[One]) -> _Plan:
    plans = [one.form.plan.at(bucket=list(one.extents.output[1:])).key for one in ones]
    shared = [(*one.bound.layout.tensors, *one.bound.layout.indices) for one in ones]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for each in shared for name in each))}
    key = {"together": plans, "names": [[numbers[n] for n in each] for each in shared]}
    written = [one.number for one in ones]
    return Plan(key | ({"outputs": written} if len({*written}) < len(written) else {})), numbers


def _walks(ones: Sequence[One], decided: _Plan) -> list[Walk]:
    """The index tensors by whose entries terms can be walked, the one by which a term reads and adds least first."""
    plan, numbers = decided
    names = [*numbers]

    def make() -> list[tuple[int, int]]:
        walks = sorted(_all_walks(ones), key=lambda walk: _cost(ones, walk))
        return [(numbers[tensor], numbers[index]) for tensor, index in walks]

    return [(names[tensor], names[index]) for tensor, index in plan.get("walks", make)]


def _all_walks(ones: Sequence[One]) -> list[Walk]:
    found: dict[Walk, None] = {}
    for one in ones:
        for access in one.bound.statement.accesses():
            if access.name in one.bound.layout.index_tensors and access.name not in one.form.tables:
                names = [subscript.plain for subscript in access.subscripts]
                if len(names) == 1 and names[0] is not None:
                    found[access.name, names[0]] = None
    return list(found)


def _cost(ones: Sequence[One], walk: Walk) -> int:
    """Cells that a term reads and adds to at other rows than the walk's own, over one column."""
    cells: set[str] = set()
    adds: dict[int, int] = {}
    for one in ones:
        form = one.form
        own = is_owned(form, walk)
        if form.strategy == "own" and not own:
            # They are read and written.
            adds[one.number] = max(adds.get(one.number, 0), 2 * form.accumulators)
        names = {short: name for name, short in names_of(one.bound.statement).tensors.items()}
        for read in (read for reads in form.factors for read in reads):
            found = [atom for subscript in read.subscripts for atom, _ in atoms(subscript)]
            others = [atom for atom in found if isinstance(atom, Load) and names[atom.buffer.name] != walk[0]]
            if others or (ROW in found and not own):
                cells.add(f"{names[read.buffer.name]}{[affine_terms(subscript)[1] for subscript in read.subscripts]}")
    return len(cells) + sum(adds.values())


def _along(ones: Sequence[One], walk: Walk, decided: _Plan, options: Options, deterministic: bool) -> Fused:
    """The kernel that walks terms by one index tensor.

    Raises:
        FormError: there is none.
    """
    owned = {one.number for one in ones if is_owned(one.form, walk)}
    if len(owned) > 1:
        raise FormError(f"several outputs have rows of {walk[0]}")
    ordered = sorted(ones, key=lambda one: one.number not in owned)
    parts = [(one.form, one.extents, [tensor.shape for tensor in one.tensors]) for one in ordered]
    expression, static = union(parts, walk, owns=bool(owned))
    statement = parse(expression)
    tensors = {name: t for one in ones for name, t in zip(one.bound.layout.tensors, one.tensors, strict=True)}
    facts: dict[str, IndexFacts] = {}
    for one in ones:
        facts |= one.bound.named_facts
    operands = {name: tensors[name] for name in layout_of(statement).tensors}
    at: dict[str, int] = {}
    for one in ones:
        for name, place in zip(one.bound.layout.tensors, one.places, strict=True):
            if at.setdefault(name, place) != place and name in operands:
                raise FormError(f"'{name}' is not the same tensor in all of them")
    own = [one for one in ordered if one.number in owned]
    extents = _sizes(statement, static, walk, list(operands.values()), own[0].extents.output if own else None)
    bound = bind(statement, operands, None, facts=facts, drop_outside=True)
    bound = replace(bound, static=tuple(sorted(static.items())))
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    axis = own[0].form.row_axis if own else 0
    forms = [(one.form, one.extents) for one in ordered]
    order = [*dict.fromkeys(one.number for one in ordered)]
    outputs = [order.index(one.number) for one in ordered]
    plan, numbers = decided
    plan = plan.at(walk=[numbers[name] for name in walk])
    form = fused_form(walk, forms, outputs, bound, sizes, extents.output[axis], plan, deterministic=deterministic)
    generated = Generated(form, {}, options)
    order = [order.index(number) + (not owned) for number in range(len(order))]
    likes = [each.like for each in form.additional]
    rows = tuple([(n, at[likes[own - 1][0]], likes[own - 1][1]) for n, own in enumerate(order) if own])
    places = tuple([at[name] for name in operands])
    return Fused(statement, static, tuple(order), walk, generated, places, rows, order.index(0) if owned else None)


def _sizes(
    statement: Statement, static: Mapping[str, int], walk: Walk, tensors: Sequence[Tensor], owned: Sizes | None
) -> Extents:
    """The sizes of a kernel's statement, which writes what the walk's rows own, or a number for each row.

    Raises:
        FormError: nothing tells how many rows there are, or sizes do not agree.
    """
    if owned is None:
        name, axis = read_at([statement], walk)
        owned = (tensors[layout_of(statement).tensors.index(name)].shape[axis],)
    extents = agreement_of(statement)(tensors, static, owned)
    if extents is None:
        raise FormError("their sizes do not agree")
    return extents


def _separately(ones: Sequence[One]) -> Callable[[], object]:
    """What makes all outputs one by one."""
    runs = [(one.number, one.chosen.prepare(one.tensors, one.extents, None), one.tensors) for one in ones]

    def run() -> object:
        made: dict[int, Tensor] = {}
        for number, each, tensors in runs:
            part = each(tensors, None)
            made[number] = made[number].add_(part) if number in made else part
        return made

    return run
