"""Multi-output fusion: several programs on the same tensors as one kernel, such as the gradients of a product.

    dX[Src[e],i,u] += dZ[Dst[e],k,u] * Y[e,j] * W[e,l,u]
    dY[e,j]        += dZ[Dst[e],k,u] * X[Src[e],i,u] * W[e,l,u]
    dW[e,l,u]      += dZ[Dst[e],k,u] * X[Src[e],i,u] * Y[e,j]

Terms are walked by the index tensor for which a term then reads and adds least; `additional` says what becomes of the
outputs. What one kernel cannot compute, or was measured to be slower in one kernel, runs program by program.
Programs may add to one output, which then is one sum.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, filterfalse
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.forms.additional import Walk, fused_form, is_owned, read_at, union
from insum_nn.compiler.forms.form import Form, FormError, atoms
from insum_nn.compiler.forms.plan import Plan
from insum_nn.compiler.ir.access import affine_terms
from insum_nn.compiler.ir.nodes import Load
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.lang.bind import Bound, Extents, bind
from insum_nn.compiler.lang.index_checks import writes_sums
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.passes.own_rows import ROW
from insum_nn.compiler.runtime.artifact import Facts
from insum_nn.compiler.runtime.dispatch import Spec, checked_facts, prepare
from insum_nn.compiler.runtime.execution import Executable, generation
from insum_nn.compiler.runtime.program import Program
from insum_nn.compiler.schedule import database as store
from insum_nn.compiler.schedule.build_once import BuildOnce
from insum_nn.compiler.schedule.canonical import named_as, names_of
from insum_nn.compiler.schedule.database import size_bucket
from insum_nn.compiler.schedule.select import Measured, Selected, Task
from insum_nn.compiler.schedule.timing import time_whole
from insum_nn.compiler.schedule.tune import select_or_tune, worth_selecting
from insum_nn.facts import IndexFacts
from insum_nn.tensor_cache import insert, unwritten

__all__ = ["FusedPrograms"]

Shape = tuple[int, ...]
Shapes = Callable[[], Sequence[Shape]]
Run = Callable[[], list[Tensor]]
T = TypeVar("T")
# Kinds of calls that are kept ready.
_LIMIT = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What runs a program by itself, in the caller's names; one object for all calls that it runs."""

    bound: Bound
    chosen: Executable
    form: Form


@dataclass(frozen=True, slots=True)
class _One:
    """A program of a fused call: the number of the output that it adds to, its tensors in its order, and its sizes."""

    number: int
    program: Program
    tensors: tuple[Tensor, ...]
    extents: Extents
    kind: _Kind
    bound: Bound
    form: Form

    @property
    def facts(self) -> Facts:
        """What holds of its index tensors."""
        layout = self.bound.layout
        return {n: f for n, f in zip(layout.tensors, self.bound.facts, strict=True) if n in layout.index_tensors}


@dataclass(frozen=True, slots=True)
class _Fused:
    """One kernel for all.

    Attributes:
        spec: of a statement that writes what the first of them writes, and reads what any of them reads.
        static: its known extents.
        order: where each output stands among those of the kernel.
        walk: by which index tensor terms are walked.
        generated: the kernel.
    """

    spec: Spec
    static: Mapping[str, int]
    order: tuple[int, ...]
    walk: Walk
    generated: Generated


# Positions of index tensors, the tensors, their versions, and whether a builder speaks for others in their place.
Versions = tuple[tuple[int, Callable[[], Tensor | None], int, bool], ...]


@dataclass(slots=True)
class _Prepared:
    """What runs a kind of call, on which tensors (of which program, and their names); `None`: one by one.

    Attributes:
        versions: the index tensors whose values were read.
        parts: the sizes of each program, and what holds of its index tensors, on which the choice depends.
    """

    run: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    spec: Spec | None = None
    versions: Versions = ()
    sources: tuple[tuple[int, str], ...] = ()
    order: tuple[int, ...] = ()
    parts: tuple[tuple[Spec, Extents, Facts], ...] = ()
    made: int = field(default_factory=generation)

    def read(self, named: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Its tensors among those of a call."""
        return [named[at][name] for at, name in self.sources]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is for these tensors."""
        if self.run is None:
            return True
        if self.made != generation():
            return False
        for at, ref, version, spoken_for in self.versions:
            tensor = tensors[at]
            if ref() is tensor:
                if tensor._version != version:
                    return False
            elif not (spoken_for and unwritten(tensor)):
                return False
        return True

    def for_others(self, named: Sequence[Mapping[str, Tensor]]) -> _Prepared | None:
        """Return the same for other index tensors, whose values are checked; `None`: decide again."""
        if self.run is None or self.spec is None or self.made != generation():
            return None
        for each, (part, extents, facts) in zip(named, self.parts, strict=True):
            if checked_facts(part, [each[name] for name in part.layout.tensors], extents) != facts:
                return None
        versions = _versions(self.spec, self.read(named))
        return None if versions is None else replace(self, versions=versions)


def _versions(spec: Spec, tensors: Sequence[Tensor]) -> Versions | None:
    """The index tensors whose values were read for a call; `None`: they have to be read at every call."""
    found: list[tuple[int, Callable[[], Tensor | None], int, bool]] = []
    # The range of a sum that addresses the output is of the very tensors that were read, whatever a builder says.
    sums = writes_sums(spec.statement)
    built = {name for name, facts in spec.facts if facts.proven and facts.masked is not None}
    for at, name in enumerate(spec.layout.tensors):
        if name not in spec.layout.index_tensors:
            continue
        tensor = tensors[at]
        spoken_for = name in built and spec.origin == "builder" and not sums and unwritten(tensor)
        if not tensor.is_inference():
            found.append((at, weakref.ref(tensor), tensor._version, spoken_for))
        elif spoken_for:
            # It is not known again.
            found.append((at, lambda: None, 0, True))
        else:
            # No version is tracked.
            return None
    return tuple(found)


class FusedPrograms:
    """Programs that are called together and record no gradients.

    Tensors of one name must be the same in all of them, but for static ones, of which each program has its own.

    Args:
        programs: two or more, of one set of options.
        outputs: for each, a name of the tensor that it adds to; those of one name add up. By default each has its own.
        deterministic: every run is to give the same bits.

    Attributes:
        programs: the same.
        reason: of the last kind of call that was made ready: how it runs, and why.
    """

    # Of tensors of one name, one is read.
    reads_all = False

    def __init__(
        self, programs: Sequence[Program], outputs: Sequence[Hashable] = (), *, deterministic: bool = False
    ) -> None:
        self.programs = tuple(programs)
        numbers: dict[Hashable, int] = {}
        self._outputs = tuple([numbers.setdefault(name, len(numbers)) for name in outputs or range(len(programs))])
        self.deterministic = deterministic or any(p.options.deterministic for p in programs)
        self.reason = ""
        self._calls: dict[Hashable, _Prepared] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        self._kernels: dict[Hashable, _Fused] = {}
        self._chosen: dict[Hashable, tuple[_Fused | None, str]] = {}
        self._preparing: BuildOnce[_Prepared] = BuildOnce()

    def together(
        self, named: Sequence[Mapping[str, Tensor]], shapes: Shapes, key: Hashable, separately: Run
    ) -> list[Tensor] | None:
        """Run all programs as one kernel; `None`: they are to run one by one.

        Args:
            named: the tensors of each.
            shapes: makes those of all outputs, where the kind of call is new.
            key: what decides shapes, dtypes and devices of all these: they are plain, and no dispatch mode is active.
            separately: makes the same one by one: what one kernel is measured against.

        Returns:
            A tensor for each name of an output, in the order of their first programs.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.together(named, shapes, key, separately)
        full = (key, torch._C._get_float32_matmul_precision())
        call = self._calls.get(full)
        tensors = [] if call is None else call.read(named)
        if call is None or not call.holds(tensors):
            # A mapping may make a tensor at each look-up.
            named = [dict(each) for each in named]

            def prepare() -> _Prepared:
                found = None if call is None else call.for_others(named)
                found = self._prepare(named, shapes(), separately) if found is None else found
                insert(self._calls, full, found, _LIMIT)
                return found

            call = self._preparing.get(
                full, lambda: f if (f := self._calls.get(full)) and f.holds(f.read(named)) else None, prepare
            )
            tensors = call.read(named)
        if call.run is None:
            return None
        made = call.run(tensors)
        return [made[at] for at in call.order]

    def _prepare(self, named: Sequence[Mapping[str, Tensor]], shapes: Sequence[Shape], separately: Run) -> _Prepared:
        """Decide how a kind of call runs."""
        try:
            given = zip(self._outputs, self.programs, named, shapes, strict=True)
            ones = [_one(*each, self._kinds) for each in given]
            key = tuple([(one.kind, one.extents.output[1:]) for one in ones])
            bucket = (key, *[size_bucket(one.extents) for one in ones])
            chosen = self._chosen.get(bucket)
            if chosen is None:
                plan = _plan_of(ones)
                calls = [partial(self._call, key, walk, plan, ones, named) for walk in _walks(ones, plan)]
                chosen = _choose(calls, separately, self.deterministic)
                insert(self._chosen, bucket, chosen, _LIMIT)
            together, self.reason = chosen
            if together is None:
                return _Prepared()
            call = _Call(together, ones, named)
        except FormError as error:
            self.reason = f"one by one: {error}"
            return _Prepared()
        run = together.generated.prepare_all(call.tensors, call.extents)
        parts = tuple([(one.program.spec, one.extents, one.facts) for one in ones])
        return _Prepared(run, together.spec, call.versions, call.sources, together.order, parts)

    def _call(
        self, key: Hashable, walk: Walk, plan: _Plan, ones: Sequence[_One], named: Sequence[Mapping[str, Tensor]]
    ) -> _Call:
        """The kernel that walks terms by one index tensor, which is remembered, on the tensors of a call.

        Raises:
            FormError: there is none, or not for these tensors.
        """
        found = self._kernels.get((key, walk))
        if found is None:
            found = _along(ones, walk, plan, self.deterministic)
            insert(self._kernels, (key, walk), found, _LIMIT)
        return _Call(found, ones, named)


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


class _Call:
    """One kernel on the tensors of a call.

    Raises:
        FormError: tensors of one name are not the same, an output has other rows than what it is the gradient of, or
            index tensors have to be read at every call.
    """

    def __init__(self, together: _Fused, ones: Sequence[_One], named: Sequence[Mapping[str, Tensor]]) -> None:
        self.together = together
        names = together.spec.layout.tensors
        found: dict[str, tuple[int, Tensor]] = {}
        for at, each in enumerate(named):
            for name, tensor in each.items():
                if not _same(found.setdefault(name, (at, tensor))[1], tensor) and name in names:
                    raise FormError(f"'{name}' is not the same tensor in all of them")
        self.sources = tuple([(found[name][0], name) for name in names])
        self.tensors = [found[name][1] for name in names]
        versions = _versions(together.spec, self.tensors)
        if versions is None:
            raise FormError("index tensors without versions are read at every call")
        self.versions = versions
        owned = [one for one in ones if together.order[one.number] == 0]
        self.extents = _extents(owned, together.walk, self.tensors, together.spec, together.static)
        additional = together.generated.form.additional
        for one in ones:
            place = together.order[one.number] - 1
            name, axis = additional[place].like if place >= 0 else (together.walk[0], 0)
            rows = self.tensors[names.index(name)].shape[axis] if place >= 0 else self.extents.output[0]
            if one.extents.output[0] != rows:
                raise FormError(f"{one.program.expression} does not have as many rows as '{name}'")

    def run(self) -> Callable[[], object]:
        """What makes all outputs."""
        tensors = [t.detach() for t in self.tensors]
        run = self.together.generated.prepare_all(tensors, self.extents)
        return lambda: run(tensors)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _one(
    number: int, program: Program, named: Mapping[str, Tensor], shape: Shape, kinds: dict[Hashable, _Kind]
) -> _One:
    """Describe one of the programs, in the names of the caller: these say which tensors programs share.

    Args:
        number: of the output that it adds to.
        program: the program.
        named: its tensors.
        shape: of its output.
        kinds: those of earlier calls.

    Raises:
        FormError: there is nothing to do, or no generated kernel does it.
    """
    spec = program.spec
    tensors = tuple([named[name] for name in spec.layout.tensors])
    extents = resolve_extents(spec.statement, tensors, None, program.sizes, shape)
    if 0 in extents.indices or 0 in extents.output or 0 in [t.numel() for t in tensors]:
        raise FormError("there is nothing to sum")
    bound, chosen = prepare(spec, tensors, None, extents)
    if not isinstance(chosen, Executable) or not isinstance(chosen.run, Generated) or spec.epilogue:
        raise FormError(f"{program.expression} is no generated kernel")
    # As long as a kind lives, so do the objects whose identities are its key.
    key = id(bound), id(chosen)
    kind = kinds.get(key)
    if kind is None:
        kind = _Kind(bound, chosen, chosen.run.form.named(named_as(bound, chosen.bound)))
        insert(kinds, key, kind, _LIMIT)
    return _One(number, program, tensors, extents, kind, kind.bound, kind.form)


# What is decided for programs together, whatever they call what they share, and the numbers of its names.
_Plan = tuple[Plan, dict[str, int]]


def _plan_of(ones: Sequence[_One]) -> _Plan:
    plans = [one.form.plan.at(bucket=list(one.extents.output[1:])).key for one in ones]
    shared = [(*one.bound.layout.tensors, *one.bound.layout.indices) for one in ones]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for each in shared for name in each))}
    key = {"together": plans, "names": [[numbers[n] for n in each] for each in shared]}
    written = [one.number for one in ones]
    return Plan(key | ({"outputs": written} if len({*written}) < len(written) else {})), numbers


def _walks(ones: Sequence[_One], decided: _Plan) -> list[Walk]:
    """The index tensors by whose entries terms can be walked, the one by which a term reads and adds least first."""
    plan, numbers = decided
    names = [*numbers]
    return plan.get(
        ["walks"],
        lambda: sorted(_all_walks(ones), key=lambda walk: _cost(ones, walk)),
        lambda walks: [[numbers[name] for name in walk] for walk in walks],
        lambda found: [(names[tensor], names[index]) for tensor, index in found],
        [(int, int)],
    )


def _all_walks(ones: Sequence[_One]) -> list[Walk]:
    found: dict[Walk, None] = {}
    for one in ones:
        for access in one.bound.statement.accesses():
            if access.name in one.bound.layout.index_tensors and access.name not in one.form.tables:
                names = [subscript.plain for subscript in access.subscripts]
                if len(names) == 1 and names[0] is not None:
                    found[access.name, names[0]] = None
    return list(found)


def _cost(ones: Sequence[_One], walk: Walk) -> int:
    """Cells that a term reads and adds to at other rows than the walk's own, over one column."""
    cells: set[str] = set()
    adds: dict[int, int] = {}
    for one in ones:
        form = one.form
        own = is_owned(form, walk)
        if form.combine == "own" and not own:
            # They are read and written.
            adds[one.number] = max(adds.get(one.number, 0), 2 * form.accumulators)
        names = {short: name for name, short in names_of(one.bound.statement).tensors.items()}
        for read in (read for reads in form.factors for read in reads):
            found = [atom for subscript in read.subscripts for atom, _ in atoms(subscript)]
            others = [atom for atom in found if isinstance(atom, Load) and names[atom.buffer.name] != walk[0]]
            if others or (ROW in found and not own):
                cells.add(f"{names[read.buffer.name]}{[affine_terms(subscript)[1] for subscript in read.subscripts]}")
    return len(cells) + sum(adds.values())


def _along(ones: Sequence[_One], walk: Walk, decided: _Plan, deterministic: bool) -> _Fused:
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
    spec = Spec(expression, options=ones[0].program.options)
    tensors = {name: t for one in ones for name, t in zip(one.bound.layout.tensors, one.tensors, strict=True)}
    facts: dict[str, IndexFacts] = {}
    for one in ones:
        facts |= one.bound.named_facts
    operands = {name: tensors[name] for name in spec.layout.tensors}
    own = [one for one in ordered if one.number in owned]
    extents = _extents(own, walk, list(operands.values()), spec, static)
    bound = bind(spec.statement, operands, None, facts=facts, drop_outside=True)
    bound = replace(bound, static=tuple(sorted(static.items())))
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    axis = own[0].form.row_axis if own else 0
    forms = [(one.form, one.extents) for one in ordered]
    order = [*dict.fromkeys(one.number for one in ordered)]
    outputs = [order.index(one.number) for one in ordered]
    plan, numbers = decided
    plan = plan.at(walk=[numbers[name] for name in walk])
    form = fused_form(walk, forms, outputs, bound, sizes, extents.output[axis], plan, deterministic=deterministic)
    generated = Generated(bound, sizes, extents.output, {}, ones[0].program.options, form=form)
    places = tuple([order.index(number) + (not owned) for number in range(len(order))])
    return _Fused(spec, static, places, walk, generated)


def _extents(
    owned: Sequence[_One],
    walk: Walk,
    tensors: Sequence[Tensor],
    spec: Spec,
    static: Mapping[str, int],
) -> Extents:
    """The sizes of a kernel's statement, which writes what the walk's rows own, or a number for each row.

    Raises:
        FormError: nothing tells how many rows there are.
    """
    if owned:
        shape = owned[0].extents.output
    else:
        name, axis = read_at([spec.statement], walk)
        shape = (tensors[spec.layout.tensors.index(name)].shape[axis],)
    return resolve_extents(spec.statement, tensors, None, static, shape)


def _choose(makes: Iterable[Callable[[], _Call]], separately: Run, deterministic: bool) -> tuple[_Fused | None, str]:
    """Select the fastest kernel, or none where the programs are faster one by one; and say why.

    Raises:
        FormError: there is none.
    """
    fitting = _those_that_fit(makes)
    first = next(fitting)
    generated = first.together.generated
    if not worth_selecting(first.extents):
        # Where speed does not matter, the same bits at every run do.
        def scatters(call: _Call) -> bool:
            return any(each.scattered for each in call.together.generated.form.additional)

        fixed = next(filterfalse(scatters, chain([first], fitting)), first)
        return fixed.together, "together: what they read is read once"
    # Others are made where one may be faster.
    calls = cache(lambda: [first, *fitting])
    # Which kernels there are to select from depends on it; what each of them computes does not.
    algorithm = {**(generated.form.plan.key or {}), "deterministic": deterministic}
    more = {"algorithm": store.digest(algorithm), "precision": generated.precision}
    bucket = size_bucket(first.extents)
    key = store.key_of("fusion", generated.form.bound, {}, bucket, first.tensors[0].device, **more)

    def decode(value: Mapping[str, Any], origin: str) -> Selected[_Fused | None]:
        times = tuple(math.inf if us is None else float(us) for us in value["times"])
        if len(times) != len(calls()) + 1 or not all(us > 0 for us in times):
            raise ValueError(f"{times} are not the times of {len(calls())} kernels and of none")
        return _fastest(calls(), times)

    def measure() -> Measured[_Fused | None]:
        times = tuple(time_whole(run) for run in (*(call.run() for call in calls()), separately))
        return Measured(_fastest(calls(), times), {"times": [None if math.isinf(us) else us for us in times]})

    rule: Selected[_Fused | None] = Selected(first.together, "together: what they read is read once")
    task = Task(key, lambda: rule, decode, measure)
    found = select_or_tune(task, generated.options)
    return found.candidate, found.reason


def _fastest(calls: Sequence[_Call], times: Sequence[float]) -> Selected[_Fused | None]:
    """Return the kernel that took the least time; the last time is of the programs one by one."""
    best = min(range(len(calls)), key=lambda at: times[at])
    rows = [f"{us:.1f} us by {call.together.walk[0]}" for us, call in zip(times, calls, strict=False)]
    shown = f"{', '.join(rows)}; one by one {times[-1]:.1f} us"
    if times[-1] <= times[best]:
        return Selected(None, f"one by one: in one kernel {shown}")
    return Selected(calls[best].together, f"together: in one kernel {shown}")
