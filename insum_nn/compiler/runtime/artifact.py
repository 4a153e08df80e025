"""Statements of one kind of call on a CPU: guards, printed as Python, and one C function.

    def run(pool, extents, shapes, initial):
        t0, t1, t2, t3 = pool
        (e0_0, e0_1), = extents
        (s0_0, s0_1), = shapes
        if not (e0_0 and e0_1 and ...):
            return None
        i0 = seen.get(id(t0))
        if i0 is None or i0.version != t0._version or i0.ref() is not t0:
            i0 = entries_of(t0)
        ...
        if i0.low < -1 or i0.high >= s0_0 or ...:
            return None
        body = bodies.get((t1.dtype, i0.low < 0, ..., e0_1 if e0_1 <= 128 else -1))
        return meet(...) if body is None else body(pool, extents, shapes, initial)

It returns `None` for other calls: what is wrong with their arguments, or that library calls do them, is for `dispatch`
to find. Kinds are told apart by dtypes, by whether entries are missing, and by the extents that are compiled in.
Nothing else of a call prints or compiles anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum_nn.compiler.kernels.c_program import (
    Body,
    CProgram,
    Part,
    Sizes,
    compiled_extents,
    known_in_c,
    limits_of_extents,
)
from insum_nn.compiler.kernels.c_structures import entries_of, seen
from insum_nn.compiler.lang.bind import Bound, Extents, bind
from insum_nn.compiler.lang.index_checks import writes_sums
from insum_nn.compiler.lang.limits import limits_of
from insum_nn.compiler.lang.printed import function_of_lines
from insum_nn.compiler.lang.shapes import agreement_lines
from insum_nn.compiler.runtime.backends import choose_backend
from insum_nn.compiler.runtime.composite.statement_sequence import Sequences, c_program
from insum_nn.compiler.runtime.execution import Executables, forgets_programs, generation
from insum_nn.compiler.runtime.unsized_call import Call, nothing_printed
from insum_nn.compiler.schedule.canonical import canonical, canonical_tables
from insum_nn.facts import UNKNOWN, IndexFacts
from insum_nn.tensor_cache import builder_versions, unwritten

if TYPE_CHECKING:
    from insum_nn.compiler.runtime.dispatch import Spec

__all__ = ["Artifact", "ArtifactCall"]

Run = Callable[[Sequence[Tensor], Sequence[Sizes], Sequence[Sizes], Tensor | None], tuple[Tensor, ...] | None]
# Kinds of calls that are kept.
_LIMIT = 64
# Entries and extents from which sums of a subscript, or numbers of entries, might overflow.
_FAR, _MANY = 1 << 40, 1 << 31


class Artifact:
    """What runs statements on tensors of some dtypes, at any sizes; it records no gradients.

    Args:
        specs: the statements.
        places: for each the positions of its tensors among those of a call.
        outputs: for each the number of the output that it adds to.
        pool: tensors of a first call.
        initial: the initial value of a first call.

    Attributes:
        run: runs them on the tensors of a call, the extents of each statement, the shape of each output, and an initial
            value of the first one, which may be of its last axes alone. It returns the outputs; `None`: it does not.
        call: as of `ArtifactCall`, of one statement.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        places: Sequence[tuple[int, ...]],
        outputs: Sequence[int],
        pool: Sequence[Tensor],
        initial: Tensor | None = None,
    ) -> None:
        self.specs, self.places, self.outputs = tuple(specs), tuple(places), tuple(outputs)
        self.bodies: dict[object, Body | Run] = {}
        self._tables = [canonical_tables(spec.statement, spec.static) for spec in specs]
        bounds = [self._bound(n, pool, initial, {}) for n in range(len(specs))]
        self._sequences = [Sequences(b, s.options, s.static) for b, s in zip(bounds, specs, strict=True)]
        self.run: Run = nothing_printed
        self.call: Call = nothing_printed
        lines = _Lines(self, pool, initial).printed()
        if lines is not None:
            names = {**lines.names, "seen": seen, "entries_of": entries_of, "bodies": self.bodies, "meet": self._meet}
            what = f"call of {specs[0].statement.text}"
            head, pool_of, *rest = lines.text
            self.run = function_of_lines([head, pool_of, *rest, "return made"], names, what)
            if len(specs) == 1:
                found, read = agreement_lines(specs[0].statement)
                head = "def call(pool, initial, sizes, shape):"
                found += ["extents = (indices,)", "shapes = (output,)"]
                text = [head, pool_of, *found, *rest, "return None if made is None else made[0]"]
                self.call = function_of_lines(text, {**names, **read}, what)
            forgets_programs(self)

    @property
    def printed(self) -> bool:
        """Whether `run` is for any call."""
        return self.run is not nothing_printed

    def clear(self) -> None:
        """Forget what runs each kind of call."""
        self.bodies.clear()

    @property
    def cuttable(self) -> bool:
        """Whether it depends on sizes if a statement runs as several."""
        return any(sequences.cuttable for sequences in self._sequences)

    def _bound(
        self, number: int, pool: Sequence[Tensor], initial: Tensor | None, facts: Mapping[str, IndexFacts]
    ) -> Bound:
        """One of the statements, bound to the tensors of a call."""
        spec = self.specs[number]
        named = {n: pool[at] for n, at in zip(spec.layout.tensors, self.places[number], strict=True)}
        own = initial if number == 0 else None
        drops, epilogue = spec.drop_outside, spec.epilogue
        return bind(spec.statement, named, own, facts=facts, drop_outside=drops, epilogue=epilogue)

    def _meet(
        self,
        key: object,
        pool: Sequence[Tensor],
        extents: Sequence[Sizes],
        shapes: Sequence[Sizes],
        initial: Tensor | None,
        masked: Mapping[int, bool],
    ) -> tuple[Tensor, ...] | None:
        """Decide what runs a kind of call that was not met before."""
        begun = generation()
        found = self._found(pool, extents, shapes, initial, masked)
        if begun == generation():
            if len(self.bodies) >= _LIMIT:
                self.bodies.clear()
            self.bodies[key] = nothing_printed if found is None else self._waiting(key, found)
        return None if found is None else self.bodies.get(key, nothing_printed)(pool, extents, shapes, initial)

    def _found(
        self,
        pool: Sequence[Tensor],
        extents: Sequence[Sizes],
        shapes: Sequence[Sizes],
        initial: Tensor | None,
        masked: Mapping[int, bool],
    ) -> CProgram | None:
        """The C function for a kind of call; `None`: some statement runs otherwise."""
        parts: list[Part] = []
        firsts: dict[object, int] = {}
        count = len(shapes)
        for number, (spec, places, output) in enumerate(zip(self.specs, self.places, self.outputs, strict=True)):
            known = {n: masked[at] for n, at in zip(spec.layout.tensors, places, strict=True) if at in masked}
            known |= {name: min(table.values, default=0) < 0 for name, table in spec.static}
            facts = {n: known_in_c(missing, spec.declared_facts.get(n, UNKNOWN)) for n, missing in known.items()}
            bound = self._bound(number, pool, initial, facts)
            sizes = Extents(extents[number], shapes[output])
            tensors = [pool[at] for at in places]
            if choose_backend(bound, spec.options, tables=bool(spec.static))[0] != "c":
                return None
            sequences = Sequences(bound, spec.options, spec.static) if spec.static else self._sequences[number]
            sequence = sequences.of(tensors, sizes)
            if len(self.specs) == 1:
                if sequence is not None:
                    return sequence.program
                run = Executables(bound, spec.options, spec.static).of(tensors, sizes).run
                return run if isinstance(run, CProgram) else None
            if sequence is not None:
                found = sequence.in_c(number, places, output, count)
                if found is None:
                    return None
                first, second = found
                # What several statements make of their tensors first is made once.
                made = firsts.setdefault((first.bound, first.tables, first.places), count)
                if made == count:
                    parts.append(first)
                    count += 1
                parts.append(replace(second, places=tuple([-1 - made if at < 0 else at for at in second.places])))
                continue
            own = canonical(bound)
            static = compiled_extents(own, self._tables[number], sizes.indices)
            named = tuple([(number, at) for at in range(len(sizes.indices))])
            parts.append(Part(replace(own, static=static), self._tables[number], places, output, named))
        return c_program(generation(), tuple(parts), tuple([len(each) for each in extents]), len(pool))

    def _waiting(self, key: object, program: CProgram) -> Run:
        """What runs a kind of call once its function is compiled, and nothing before."""
        # What runs a statement alone counts its calls.
        alone = len(self.specs) == 1
        options = self.specs[0].options
        wait = options.deterministic or options.backend == "c"

        def run(
            pool: Sequence[Tensor], extents: Sequence[Sizes], shapes: Sequence[Sizes], initial: Tensor | None
        ) -> tuple[Tensor, ...] | None:
            if not program.compiled and (alone or not program.called(extents, wait=wait)):
                return None
            self.bodies[key] = program.body
            return program.body(pool, extents, shapes, initial)

        return run


class ArtifactCall:
    """One statement by its artifact, as `UnsizedCall` is called.

    Attributes:
        run: on tensors in the layout's order, an initial value, the extents and the output's shape of the call.
        call: the same without known sizes: it finds them as `lang.shapes.agreement_of` does.
    """

    def __init__(self, spec: Spec, tensors: Sequence[Tensor]) -> None:
        artifact = Artifact([spec], [tuple(range(len(tensors)))], [0], tensors)
        self.printed, self.call = artifact.printed, artifact.call

        def run(tensors: Sequence[Tensor], initial: Tensor | None, indices: Sizes, output: Sizes) -> Tensor | None:
            made = artifact.run(tensors, (indices,), (output,), initial)
            return None if made is None else made[0]

        self.run = run


class _Lines:
    """The lines of `run`."""

    def __init__(self, artifact: Artifact, pool: Sequence[Tensor], initial: Tensor | None) -> None:
        self.artifact, self.pool, self.initial = artifact, pool, initial
        self.names: dict[str, Any] = {}
        self.text: list[str] = []

    def printed(self) -> _Lines | None:
        """Print them; `None`: what is to check of such calls depends on more than the range of entries."""
        artifact, pool = self.artifact, self.pool
        if any(_elsewhere(spec) for spec in artifact.specs):
            return None
        known: dict[int, str] = {}
        wrong: list[str] = []
        reads: list[str] = []
        key: list[str] = []
        for number, (spec, places, output) in enumerate(
            zip(artifact.specs, artifact.places, artifact.outputs, strict=True)
        ):
            layout, tables = spec.layout, dict(spec.static)
            place = dict(zip(layout.tensors, places, strict=True))
            extents = [f"e{number}_{i}" for i in range(len(layout.indices))]
            wrong += [f"not 0 < {e} < {_MANY}" for e in extents]
            for name, at in place.items():
                if name in tables:
                    self.names[f"shape{at}"] = torch.Size(tables[name].shape)
                    wrong.append(f"t{at}.shape != shape{at}")
                elif name in layout.index_tensors and at not in known:
                    known[at] = self.reading(spec, name, at, reads)
            key += [
                f"{e} if {e} <= {most} else -1" if most < math.inf else e for e, most in self.limits(number, extents)
            ]
            wrong += self.ranges(spec, place, output, known)
            limits = limits_of(spec.statement)
            if limits.writes or any(least > 1 for _, _, least in limits.axes):
                self.names[f"hold{number}"] = partial(limits.hold, drop_outside=spec.drop_outside)
                own = "".join(f"t{at}, " for at in places)
                wrong.append(f"not hold{number}(({own}), Extents(extents[{number}], shapes[{output}]))")
        kinds = self.kinds()
        values = [n for n in range(len(pool)) if n not in known and f"shape{n}" not in self.names]
        wrong += [f"not t{n}.numel()" for n in values]
        key += [f"{flag}" for flag in known.values()]
        if artifact.cuttable:
            key += [f"({e} * {e}).bit_length()" for n, s in enumerate(artifact.specs) for e in self.extents(n, s)]
            key += [f"({e} * {e}).bit_length()" for e in self.shapes()]
            key += [f"t{n}.shape" for n in values]
        masked = ", ".join(f"{at}: {flag}" for at, flag in known.items())
        self.names["Extents"] = Extents
        self.text = [
            "def run(pool, extents, shapes, initial):",
            f"({''.join(f't{n}, ' for n in range(len(pool)))}) = pool" if pool else "pass",
            *self.unpacked(),
            f"if {' or '.join(kinds)}:",
            "    return None",
            *reads,
            f"if {' or '.join(wrong) or 'False'}:",
            "    return None",
            f"key = (initial is None, {''.join(f'{each}, ' for each in key)})",
            "body = bodies.get(key)",
            "if body is None:",
            f"    made = meet(key, pool, extents, shapes, initial, {{{masked}}})",
            "else:",
            "    made = body(pool, extents, shapes, initial)",
        ]
        return self

    def unpacked(self) -> list[str]:
        specs = self.artifact.specs
        extents = [self.extents(number, spec) for number, spec in enumerate(specs)]
        text = "".join(f"({''.join(f'{e}, ' for e in each)}), " if each else "_, " for each in extents)
        shapes: dict[int, list[str]] = {}
        for spec, output in zip(specs, self.artifact.outputs, strict=True):
            shapes[output] = [f"s{output}_{a}" for a in range(len(spec.layout.output_plain))]
        made = "".join(f"({''.join(f'{e}, ' for e in shapes[n])}), " if shapes[n] else "_, " for n in sorted(shapes))
        return [f"({text}) = extents", f"({made}) = shapes"]

    @staticmethod
    def extents(number: int, spec: Spec) -> list[str]:
        return [f"e{number}_{i}" for i in range(len(spec.layout.indices))]

    def shapes(self) -> list[str]:
        found = zip(self.artifact.specs, self.artifact.outputs, strict=True)
        return list(dict.fromkeys(f"s{o}_{a}" for spec, o in found for a in range(len(spec.layout.output_plain))))

    def kinds(self) -> list[str]:
        """What tells that tensors are of other kinds than those of the first call."""
        wrong: list[str] = []
        for n, tensor in enumerate(self.pool):
            self.names[f"d{n}"] = tensor.dtype
            wrong += [f"t{n}.dtype is not d{n}", f"not t{n}.is_cpu"]
        spec, shape = self.artifact.specs[0], len(self.artifact.specs[0].layout.output_plain)
        self.names["dtype"] = self.artifact._bound(0, self.pool, self.initial, {}).dtype
        fits = f"initial.dtype is dtype and initial.shape == shapes[0][{shape} - initial.ndim:]" if shape else "True"
        return [*wrong, f"not (initial is None or ({fits}))"] if spec.statement.combining.takes_initial else wrong

    def reading(self, spec: Spec, name: str, at: int, reads: list[str]) -> str:
        """Print what is read of an index tensor, and return what tells whether it may have missing entries."""
        declared = spec.declared_facts.get(name, UNKNOWN)
        if spec.origin == "builder" and declared.proven and declared.masked is not None:
            self.names |= {"met": builder_versions, "unwritten": unwritten}
            reads += [f"cached = met.get(id(t{at}))"]
            reads += [f"if cached is None or cached[0]() is not t{at} or cached[1] != t{at}._version:"]
            reads += [f"    if not unwritten(t{at}):", "        return None"]
            return str(declared.masked)
        reads += [f"i{at} = seen.get(id(t{at}))"]
        reads += [f"if i{at} is None or i{at}.version != t{at}._version or i{at}.ref() is not t{at}:"]
        reads += [f"    i{at} = entries_of(t{at})"]
        return f"i{at}.low < 0"

    def ranges(self, spec: Spec, place: Mapping[str, int], output: int, known: Mapping[int, str]) -> list[str]:
        """What tells that some entry may lie outside of what it addresses."""
        wrong: dict[str, None] = {}
        statement = spec.statement
        for access in statement.accesses():
            own = f"s{output}_" if access is statement.output else None
            for axis, subscript in enumerate(access.subscripts):
                for inner in subscript.index_accesses():
                    at = place[inner.name]
                    if not known.get(at, "").startswith("i"):
                        continue
                    low = 0 if spec.declared_facts.get(inner.name, UNKNOWN).masked is False else -1
                    wrong[f"i{at}.low < {low}"] = None
                    extent = f"{own}{axis}" if own else f"t{place[access.name]}.shape[{axis}]"
                    wrong[f"i{at}.high >= {extent if subscript.indirect is not None else _FAR}"] = None
        return list(wrong)

    def limits(self, number: int, extents: Sequence[str]) -> list[tuple[str, float]]:
        bound = canonical(self.artifact._bound(number, self.pool, self.initial, {}))
        tables = frozenset(name for name, _ in self.artifact._tables[number])
        found = [most for _, most in limits_of_extents(bound, tables)]
        return [(e, most) for e, most in zip(extents, found, strict=True) if most > 0]


def _elsewhere(spec: Spec) -> bool:
    """Whether `dispatch` has to look at each call."""
    if spec.options.validate or spec.options.backend not in ("auto", "c") or limits_of(spec.statement).steep:
        return True
    return writes_sums(spec.statement) and not spec.drop_outside
