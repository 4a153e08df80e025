"""Run calls on tensors of some dtypes by a function that is printed once: guards, and a table of what is behind them.

    def run(pool, extents, shapes, initial):
        t0, t1, t2, t3 = pool
        (e0_0, e0_1), = extents
        (s0_0, s0_1), = shapes
        if not (e0_0 and e0_1 and ...):
            return None
        i0 = kept.get(id(t0))
        if i0 is None or i0() is not t0 or i0.version < 0 or i0.version != t0._version:
            i0 = entries_of(t0)
        ...
        if i0.low < -1 or i0.high >= s0_0 or ...:
            return None
        body = bodies.get((i0.low < 0, ..., e0_1 if e0_1 <= 128 else -1))
        return meet(...) if body is None else body(pool, extents, shapes, initial)

It returns `None` for other calls: what is wrong with their arguments, or what they need, is for `dispatch` to find.
Behind the guards is one C function, a generated kernel, or library calls. Kinds of calls are told apart by what holds
of entries, and by sizes as far as code differs in them. Nothing else of a call prints or compiles anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.ir.canonical import messages_name
from insum_nn.compiler.kernels.background import run_or_compile, shared
from insum_nn.compiler.kernels.c_program import CProgram, limits_in_c, unpacking
from insum_nn.compiler.kernels.c_structures import entries_of
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.kernels.sized import WIDE
from insum_nn.compiler.lang.bind import Extents, bind
from insum_nn.compiler.lang.declared_facts import verified
from insum_nn.compiler.lang.index_checks import completed, lowest_entry, writes_sums
from insum_nn.compiler.lang.limits import limits_of
from insum_nn.compiler.lang.printed import Attempt, Lists, Made, Pool, Run, function_of_lines
from insum_nn.compiler.lang.shapes import agreement_lines
from insum_nn.compiler.runtime.arguments import kinds_of
from insum_nn.compiler.runtime.execution import Executable, Executables, generation, one_function
from insum_nn.compiler.runtime.fixed_extents import limits_of_fixed
from insum_nn.compiler.runtime.fused_kernels import Fused, One, choose
from insum_nn.compiler.schedule.form import FormError
from insum_nn.compiler.schedule.tune import capturing
from insum_nn.compiler.tuning.select import active
from insum_nn.dtypes import is_widened
from insum_nn.facts import UNKNOWN, IndexFacts, StaticTable
from insum_nn.tensor_cache import insert, kept, kept_of

if TYPE_CHECKING:
    from insum_nn.compiler.runtime.dispatch import Spec

__all__ = ["Artifact", "Call", "Facts", "Step", "programs_of"]

Facts = Mapping[str, IndexFacts]
Known = Mapping[int, IndexFacts]
# A statement on the tensors of a call: what runs it at any sizes, its tensors, its sizes.
Called = tuple[Executables, list[Tensor], Extents]
Call = Callable[[Sequence[Tensor], Tensor | None, Mapping[str, int], Sequence[int | None] | None], Tensor | None]
# How often a kind of call that is repeated falls back to library calls while no other kernel is requested.
_REPEATS = 3
# Bytes that library calls may read and write at a time, which limits the memory of their intermediate tensors.
_ROOM = 1 << 27
# Kinds of calls that are kept, and sizes of those that library calls run.
_LIMIT = 64
# Entries and extents from which sums of a subscript, or numbers of entries, might overflow.
_FAR, _MANY = 1 << 40, 1 << 31


def programs_of(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, facts: Facts) -> Executables:
    """Bind a statement to tensors; sizes change at each call of many, and what a program depends on does not."""
    key = (generation(), *kinds_of(tensors, initial), *facts.values())
    found = spec.programs.get(key)
    if found is None:
        found = _bound(spec, tensors, initial, facts)
        insert(spec.programs, key, found, _LIMIT)
    return found


def _bound(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, facts: Facts) -> Executables:
    named, drops = dict(zip(spec.layout.tensors, tensors, strict=True)), spec.drop_outside
    bound = bind(spec.statement, named, initial, facts=facts, drop_outside=drops, epilogue=spec.epilogue)
    return Executables(bound, spec.options, spec.static)


class Step(NamedTuple):
    """One of the statements.

    Attributes:
        spec: the statement.
        places: of its tensors among those of a call; -1 - n: what is written as output n.
        output: the number of the output that it adds to.
        source: which of the lists of extents of a call has its own.
        indices: the positions of its extents there.
    """

    spec: Spec
    places: tuple[int, ...]
    output: int
    source: int
    indices: tuple[int, ...]

    @staticmethod
    def of(spec: Spec, places: Sequence[int], output: int, source: int) -> Step:
        """A statement whose own extents the list has."""
        return Step(spec, tuple(places), output, source, tuple(range(len(spec.layout.indices))))


class Artifact:
    """What runs statements on tensors of some dtypes, at any sizes; it records no gradients.

    Args:
        steps: the statements; several are computed by one C function, or by one kernel, or not here.
        pool: tensors of a first call.

    Attributes:
        generated: kernels are generated for all statements.
        reason: how one kernel was decided on for several statements, or why there is none.
        run: runs them on the tensors of a call, the extents of each statement, the shape of each output, and an initial
            value of the first one, which may be of its last axes alone. It returns the outputs; `None`: it does not.
        call: runs one statement on tensors in the layout's order, with an initial value, extents by name and the
            output's shape, from which it finds the sizes as `lang.shapes.agreement_of` does.
    """

    def __init__(self, steps: Sequence[Step], pool: Pool) -> None:
        self.steps, self.reason = steps, ""
        self.bodies: dict[object, Attempt] = {}
        specs = [step.spec for step in steps]
        self._kernels: dict[Hashable, Fused] = {}
        # In place of what statements write, for those that read it.
        self._written: dict[int, Tensor] = {}
        # Of entries nothing is known yet.
        self.programs: list[Executables] = []
        for spec, places, output, _, _ in steps:
            tensors = [pool[at] if at >= 0 else self._written[-1 - at] for at in places]
            self.programs.append(own := _bound(spec, tensors, None, {}))
            rank = len(spec.layout.output_plain)
            self._written[output] = torch.empty((1,) * rank, dtype=own.bound.out_dtype, device=pool[0].device)
        backends = {own.backend for own in self.programs}
        self.generated = backends == {"triton"}
        # C functions add to sums of half types what an earlier statement has rounded.
        rounded = any(is_widened(own.bound.dtype) for own in self.programs) and len(self._written) < len(steps)
        jointly = self.generated or (backends == {"c"} and not rounded)
        self.run: Attempt = _nothing_printed
        self.call: Call = _nothing_printed
        lines = _Lines(self, pool).printed() if len(steps) == 1 or jointly else None
        if lines is not None:
            what = f"call of {specs[0].statement.text}"
            head, pool_of, *rest = lines.text
            self.run = function_of_lines([head, pool_of, *rest, "return made"], lines.names, what)
            if len(steps) == 1:
                found, read = agreement_lines(specs[0].statement)
                head = "def call(pool, initial, sizes, shape):"
                found += ["extents = (indices,)", "shapes = (output,)"]
                text = [head, pool_of, *found, *rest, "return None if made is None else made[0]"]
                self.call = function_of_lines(text, {**lines.names, **read}, what)

    def _facts(self, number: int, known: Known) -> dict[str, IndexFacts]:
        """What holds of the index tensors of a statement."""
        spec, places = self.steps[number][:2]
        tables, indexed = dict(spec.static), spec.layout.index_tensors
        place = zip(spec.layout.tensors, places, strict=True)
        declared = spec.declared_facts
        return {
            n: _facts_of_table(tables[n], declared.get(n, UNKNOWN)) if n in tables else known[at]
            for n, at in place
            if n in indexed
        }

    def _meet(
        self, key: object, pool: Pool, extents: Lists, shapes: Lists, initial: Tensor | None, known: Known
    ) -> Made | None:
        """Decide what runs a kind of call that was not met before."""
        called = list[Called]()
        first = None if initial is None else initial.expand(shapes[0])
        for number, (spec, places, output, _, _) in enumerate(self.steps):
            read = [pool[at] if at >= 0 else self._written[-1 - at].expand(shapes[-1 - at]) for at in places]
            programs = programs_of(spec, read, None if number else first, self._facts(number, known))
            called.append((programs, read, Extents(extents[number], shapes[output])))
        if len(called) == 1:
            body = self._alone(key, *called[0], initial)
        elif self.generated:
            body = self._by_one_kernel(key, called, pool, shapes)
        else:
            body = self._by_one_function(key, called)
        # While a CUDA graph is captured, nothing is decided for other calls.
        if not (pool[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            insert(self.bodies, key, body, _LIMIT)
        return body(pool, extents, shapes, initial)

    def _alone(
        self, key: object, programs: Executables, pool: Pool, extents: Extents, initial: Tensor | None
    ) -> Attempt:
        """What runs a kind of call of one statement."""
        statement = self.steps[0].spec.statement
        with messages_name(statement):
            found = programs.of(pool, extents)
            if isinstance(found.run, Generated):
                return self._launched(key, found.run.at(pool, extents, initial), [programs])
        if isinstance(program := found.run, CProgram):
            return self._with_fallback(key, program.attempt, lambda: program.body, [programs])
        first, runs = _key_of(pool, extents), dict[object, Run]()

        def sized(pool: Pool, extents: Lists, shapes: Lists, initial: Tensor | None) -> Made:
            """Run it by what is prepared for the sizes of a call: library calls, or several statements."""
            sizes = Extents(extents[0], shapes[0])
            initial = None if initial is None else initial.expand(sizes.output)
            own = _key_of(pool, sizes)
            prepared = runs.get(own)
            if prepared is None:
                with messages_name(statement):
                    chosen = found if own == first else programs.of(pool, sizes)
                    prepared = chosen.prepare(pool, sizes, initial)
                insert(runs, own, prepared, _LIMIT)
            return (prepared(pool, initial),)

        return self._launched(key, sized, [programs]) if self.generated else sized

    def _launched(self, key: object, body: Attempt, programs: Sequence[Executables]) -> Attempt:
        """What runs a kind of call by generated kernels.

        A call whose kernel is not compiled yet does not block, so that the kernels of later calls are requested too,
        and all are compiled in parallel. A call that is repeated while no other kernel is requested waits for its own:
        by then all kernels of the step are known.
        """
        options = self.steps[0].spec.options
        if options.deterministic or options.tune or options.backend == "triton":
            return body
        left, last = _REPEATS, -1

        def attempt(*call: Any, wait: bool = False) -> Made | None:
            nonlocal left, last

            def run() -> Made:
                # Nothing is made where something else is to run the call.
                return body(*call) or ()

            if wait or not left or capturing() or active() is not None or torch.are_deterministic_algorithms_enabled():
                return run()
            made = run_or_compile(run)
            if made is None:
                requested = shared().requested
                left, last = left - (last == requested), requested
            return made

        return self._with_fallback(key, attempt, lambda: body, programs)

    def _with_fallback(
        self, key: object, attempt: Callable[..., Any], body: Callable[[], Attempt], programs: Sequence[Executables]
    ) -> Attempt:
        """What runs a kind of call by library calls while `attempt` returns `None`: its code is compiled.

        Args:
            key: of the kind of call.
            attempt: runs a call where its code is compiled; with `wait` it is then.
            body: returns what runs calls from then on.
            programs: of each statement.
        """

        def run(pool: Pool, extents: Lists, shapes: Lists, initial: Tensor | None) -> Made | None:
            made = attempt(pool, extents, shapes, initial)
            if made is None:
                with suppress(torch.OutOfMemoryError):
                    served = self._by_library(programs, pool, extents, shapes, initial)
                    if served is not None:
                        return served
                made = attempt(pool, extents, shapes, initial, wait=True)
            if made is not None and key in self.bodies:
                self.bodies[key] = body()
            return made or None

        return run

    def _by_library(
        self, programs: Sequence[Executables], pool: Pool, extents: Lists, shapes: Lists, initial: Tensor | None
    ) -> Made | None:
        """Compute the statements one by one by library calls; `None`: their intermediate tensors would be too large."""
        made: dict[int, Tensor] = {}
        for number, (own, (_, places, output, _, _)) in enumerate(zip(programs, self.steps, strict=True)):
            sizes = Extents(extents[number], shapes[output])
            tensors = [pool[at] if at >= 0 else made[-1 - at] for at in places]
            start = initial.expand(sizes.output) if initial is not None and not number else None
            part = own.by_library(tensors, sizes, start, made.get(output), _ROOM)
            if part is None:
                return None
            made[output] = part
        return tuple([made[output] for output in sorted(made)])

    def _by_one_kernel(self, key: object, called: Sequence[Called], pool: Pool, shapes: Lists) -> Attempt:
        """What runs a kind of call of several statements by one kernel, where there is one, and it is faster."""
        try:
            ones = [
                One(output, programs.bound, programs.of(read, sizes), places, read, sizes)
                for (programs, read, sizes), (_, places, output, _, _) in zip(called, self.steps, strict=True)
            ]
            options = self.steps[0].spec.options
            fused, self.reason = choose(ones, pool, shapes, options, self._kernels)
            if fused is None:
                return _nothing_printed
            return self._launched(key, fused.run(pool, shapes), [programs for programs, _, _ in called])
        except FormError as error:
            self.reason = f"one by one: {error}"
            return _nothing_printed

    def _by_one_function(self, key: object, called: Sequence[Called]) -> Attempt:
        """What runs a kind of call of several statements by one C function, where there is one."""
        every = zip(called, self.steps, strict=True)
        decided = [(own, *own.decided(read, sizes), step.places, step.output) for (own, read, sizes), step in every]
        made = one_function(decided, "several statements in one C function")
        program = made.run if isinstance(made, Executable) else None
        if not isinstance(program, CProgram):
            return _nothing_printed
        return self._with_fallback(key, program.attempt, lambda: program.body, [own for own, _, _ in called])


def _key_of(pool: Sequence[Tensor], sizes: Extents) -> object:
    # Compiled float32 products follow the precision that was set when they were compiled.
    return (sizes, torch._C._get_float32_matmul_precision(), *[tensor.shape for tensor in pool])


def _nothing_printed(*_: object) -> None:
    """Something else runs these calls."""


def _facts_of_table(table: StaticTable, declared: IndexFacts) -> IndexFacts:
    """What holds of the entries of a static table."""
    if declared.proven and declared.masked is not None:
        return declared
    entries = list(table.values)
    low = min(entries, default=0)
    return completed(declared, declared.sorted or (low >= 0 and entries == sorted(entries)), low < 0)


class _Lines:
    """The lines of `run`."""

    def __init__(self, artifact: Artifact, pool: Sequence[Tensor]) -> None:
        self.artifact, self.pool = artifact, pool
        self.names: dict[str, Any] = {}
        self.text: list[str] = []
        # Whether it depends on sizes if a statement runs as several.
        self.cuttable = any(own.cuttable for own in artifact.programs)
        # The extents of each statement, and the sizes of each output.
        counts = [len(step.spec.layout.indices) for step in artifact.steps]
        self.extents = [[f"e{n}_{i}" for i in range(count)] for n, count in enumerate(counts)]
        ranks = {step.output: len(step.spec.layout.output_plain) for step in artifact.steps}
        self.shapes = {n: [f"s{n}_{axis}" for axis in range(rank)] for n, rank in sorted(ranks.items())}
        # Of the index tensors those whose entries are read.
        self.read: set[int] = set()
        # Static tables that a builder passes are the same in every call.
        fixed = {
            at
            for spec, places, *_ in artifact.steps
            for at, name in zip(places, spec.layout.tensors, strict=True)
            if spec.origin == "builder" and name in dict(spec.static)
        }
        self.given = [n for n in range(len(pool)) if n not in fixed]

    def printed(self) -> _Lines | None:
        """Print them; `None`: what is to check of such calls depends on more than the range of entries."""
        artifact, pool = self.artifact, self.pool
        elsewhere = any(_elsewhere(s.spec) for s in artifact.steps) or pool[0].device.type not in ("cpu", "cuda")
        if elsewhere or not self.given:
            return None
        self.names = {"Extents": Extents, "bodies": artifact.bodies, "completed": completed, "entries_of": entries_of}
        self.names |= {"meet": artifact._meet, "kept": kept, "kept_of": kept_of}
        known: dict[int, str] = {}
        wrong: list[str] = []
        reads: list[str] = []
        key: list[str] = []
        for number, (spec, places, output, _, _) in enumerate(artifact.steps):
            layout, tables = spec.layout, dict(spec.static)
            place = dict(zip(layout.tensors, places, strict=True))
            extents = self.extents[number]
            wrong += [f"not 0 < {e} < {_MANY}" for e in extents]
            for name, at in place.items():
                if name in tables:
                    if at in self.given:
                        self.names[f"shape{at}"] = torch.Size(tables[name].shape)
                        wrong.append(f"t{at}.shape != shape{at}")
                elif name in layout.index_tensors and at not in known:
                    known[at] = self.reading(spec, name, place, reads, key)
            key += self.limits(number, extents)
            wrong += self.ranges(spec, place, output)
            limits = limits_of(spec.statement)
            if limits.writes or any(least > 1 for _, _, least in limits.axes):
                self.names[f"hold{number}"] = partial(limits.hold, drop_outside=spec.drop_outside)
                if min(places) < 0:
                    return None
                own = "".join(f"t{at}, " for at in places)
                wrong.append(f"not hold{number}(({own}), Extents(extents[{number}], shapes[{output}]))")
        kinds = self.kinds()
        # Offsets of 32 bits address all cells, in generated kernels by far.
        most = WIDE if artifact.generated else _MANY
        wrong += [f"not 0 < t{n}.numel() < {most}" for n in self.given if f"shape{n}" not in self.names]
        wrong += [f"not 0 < {' * '.join(sizes)} < {most}" for sizes in self.shapes.values() if sizes]
        if self.cuttable:
            # As `Sequences` tells sizes apart.
            sizes = chain(*self.extents, *self.shapes.values(), self.hidden())
            key += [f"({e} * {e}).bit_length()" for e in sizes]
        facts = ", ".join(f"{at}: {text}" for at, text in known.items())
        self.text = [
            "def run(pool, extents, shapes, initial):",
            f"({''.join(f't{n}, ' for n in range(len(pool)))}) = pool",
            unpacking(self.extents, "extents"),
            unpacking(self.shapes.values(), "shapes"),
            f"if {' or '.join(kinds)}:",
            "    return None",
            *reads,
            f"if {' or '.join(wrong) or 'False'}:",
            "    return None",
            f"key = (initial is None, {''.join(f'{each}, ' for each in key)})",
            "body = bodies.get(key)",
            "if body is None:",
            f"    made = meet(key, pool, extents, shapes, initial, {{{facts}}})",
            "else:",
            "    made = body(pool, extents, shapes, initial)",
        ]
        return self

    def hidden(self) -> list[str]:
        """Sizes of tensors that are no extent of an index."""
        found: dict[str, None] = {}
        for spec, places, *_ in self.artifact.steps:
            layout = spec.layout
            shown = {each for axes in layout.plain for each in axes}
            axes = ((n, axis) for n, rank in enumerate(layout.ranks) for axis in range(rank))
            found |= dict.fromkeys(self.size(places[n], axis) for n, axis in axes if (n, axis) not in shown)
        return list(found)

    @staticmethod
    def size(place: int, axis: int) -> str:
        return f"t{place}.shape[{axis}]" if place >= 0 else f"s{-1 - place}_{axis}"

    def kinds(self) -> list[str]:
        """What tells that tensors are of other kinds than those of the first call, or of several devices."""
        first, *others = self.given
        wrong = [f"not t{n}.is_cpu" for n in self.given]
        if self.pool[first].is_cuda:
            # On the device of the first one.
            wrong = [f"(at := t{first}.get_device()) < 0", *[f"t{n}.get_device() != at" for n in others]]
            if any(step.spec.origin == "format" for step in self.artifact.steps):
                # Nothing of theirs is read meanwhile.
                self.names["capturing"] = torch.cuda.is_current_stream_capturing
                wrong.append("capturing()")
        if len(self.artifact.steps) > 1:
            # Those of a single statement are what it is found by.
            self.names |= {f"d{n}": self.pool[n].dtype for n in self.given}
            wrong += [f"t{n}.dtype is not d{n}" for n in self.given]
        spec = self.artifact.steps[0].spec
        rank = len(spec.layout.output_plain)
        if not spec.statement.combining.takes_initial:
            return [*wrong, "initial is not None"]
        self.names["dtype"] = self.artifact.programs[0].bound.dtype
        fits = f"initial.dtype is dtype and initial.get_device() == t{first}.get_device()"
        fits += f" and initial.shape == shapes[0][{rank} - initial.ndim:]" if rank else " and not initial.ndim"
        return [*wrong, f"not (initial is None or ({fits}))"]

    def reading(self, spec: Spec, name: str, place: Mapping[str, int], reads: list[str], key: list[str]) -> str:
        """Print what is read of an index tensor, and return what makes its facts."""
        declared, at = spec.declared_facts.get(name, UNKNOWN), place[name]
        self.names[f"f{at}"], known = declared, f"f{at}"
        whole = declared.proven and declared.masked is not None
        reads += [f"i{at} = kept.get(id(t{at}))"]
        if spec.origin == "builder" and declared != UNKNOWN:
            reads += [f"if i{at} is None or i{at}() is not t{at} or i{at}.first != t{at}._version:"]
            reads += [f"    i{at} = kept_of(t{at})"]
            reads += [f"    if i{at}.first is not None and i{at}.first != t{at}._version:", "        return None"]
            if whole:
                return known
        elif declared.sorted or declared.unique or declared.unique_with:
            self.names |= {"verified": verified}
            together = [n for n in (name, *declared.unique_with) if n in place]
            reads += [f"k{at} = verified({name!r}, f{at}, {{{', '.join(f'{n!r}: t{place[n]}' for n in together)}}})"]
            known = f"k{at}"
            key.append(known)
        # Inference tensors have no version.
        reads += [f"if i{at} is None or i{at}() is not t{at} or i{at}.version < 0 or i{at}.version != t{at}._version:"]
        reads += [f"    i{at} = entries_of(t{at})"]
        self.read.add(at)
        if whole:
            return known
        key.append(f"i{at}.low < 0")
        ascending = f"{known}.sorted"
        if self.artifact.generated or self.cuttable:
            ascending = f"i{at}.ascending or {ascending}"
            key.append(f"i{at}.ascending")
        return f"completed({known}, {ascending}, i{at}.low < 0)"

    def ranges(self, spec: Spec, place: Mapping[str, int], output: int) -> list[str]:
        """What tells that some entry may lie outside of what it addresses."""
        wrong: dict[str, None] = {}
        statement = spec.statement
        for access in statement.accesses():
            own = f"s{output}_" if access is statement.output else None
            for axis, subscript in enumerate(access.subscripts):
                for inner in subscript.index_accesses():
                    at = place[inner.name]
                    if at not in self.read:
                        continue
                    low = lowest_entry(spec.declared_facts.get(inner.name, UNKNOWN))
                    wrong[f"i{at}.low < {low}"] = None
                    extent = f"{own}{axis}" if own else self.size(place[access.name], axis)
                    wrong[f"i{at}.high >= {extent if subscript.indirect is not None else _FAR}"] = None
        return list(wrong)

    def limits(self, number: int, extents: Sequence[str]) -> list[str]:
        """The sizes of a statement as far as code differs in them."""
        (spec, _, output), own = self.artifact.steps[number][:3], self.artifact.programs[number]
        if not self.artifact.generated:
            found = zip(extents, limits_in_c(own.own, own.tables), strict=True)
            return [f"{e} if {e} <= {most} else -1" if most < math.inf else e for e, most in found if most > 0]
        limits = limits_of_fixed(own.own, spec.options, frozenset(name for name, _ in own.tables))
        key = [_magnitude(e, most) for e, (_, most) in zip(extents, limits, strict=True)]
        hidden = zip(self.shapes[output], spec.layout.output_places, strict=True)
        key += [_magnitude(extent, -1) for extent, place in hidden if place is None]
        if own.own.dtype == torch.float32:
            self.names["precision"] = torch._C._get_float32_matmul_precision
            key.append("precision()")
        return key


def _magnitude(extent: str, most: float) -> str:
    """A size as far as kernels differ in it: itself up to a limit, else its magnitude."""
    if most == math.inf:
        return extent
    bits = f"({extent} - 1).bit_length()"
    return bits if most <= 1 else f"({extent} if {extent} <= {most} else -{bits})"


def _elsewhere(spec: Spec) -> bool:
    """Whether `dispatch` has to look at each call."""
    sums = writes_sums(spec.statement) and not spec.drop_outside
    return spec.options.validate or sums or limits_of(spec.statement).steep
