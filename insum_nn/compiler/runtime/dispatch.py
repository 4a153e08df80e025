"""One call of a program: what it is (`Spec`), its checks, and the way to compiled code.

Checks and finding a program cost the host more than a small kernel costs the device. A call whose shapes,
dtypes and devices were seen before finds everything ready, down to the variant of the compiled code.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, Extents, Layout, bind, layout_of
from insum_nn.compiler.lang.declared_facts import Origin
from insum_nn.compiler.lang.epilogue import PLAIN, Epilogue, check_epilogue
from insum_nn.compiler.lang.index_checks import check_index_values, writes_sums
from insum_nn.compiler.lang.parser import check_text, parse
from insum_nn.compiler.lang.shapes import Agreement, agreement_of, check_extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.arguments import call_key, check_static, kinds_of, stand_in
from insum_nn.compiler.runtime.artifact import ArtifactCall
from insum_nn.compiler.runtime.composite.intermediates import Common
from insum_nn.compiler.runtime.composite.statement_sequence import Sequences, StatementSequence
from insum_nn.compiler.runtime.execution import Executable, Executables, clearings, generation
from insum_nn.compiler.runtime.modes import under_autocast, without_autocast
from insum_nn.compiler.runtime.unsized_call import UnsizedCall
from insum_nn.compiler.schedule.canonical import messages_name
from insum_nn.dtypes import not_dense
from insum_nn.facts import IndexFacts, StaticTable
from insum_nn.locks import cached_property
from insum_nn.tensor_cache import insert, unwritten

__all__ = [
    "Facts",
    "Key",
    "Ready",
    "Spec",
    "broadcast",
    "call_kind",
    "checked_facts",
    "index_versions",
    "intermediates_of",
    "parse_cached",
    "prepare",
    "run_plain",
    "run_ready",
    "run_spec",
    "value_dtype",
]

Key = tuple[object, ...]
CallKind = tuple[torch.dtype, bool, torch.dtype | None]
Printed = UnsizedCall | ArtifactCall
Facts = Mapping[str, IndexFacts]
# Positions of index tensors, the tensors, their versions, and whether a builder speaks for others in their place.
Versions = tuple[tuple[int, Callable[[], "Tensor | None"], int, bool], ...]
# Shapes of one program that are kept ready; a run over ever new sizes must not grow without bound.
_READY_LIMIT = 64


@dataclass(frozen=True)
class Spec:
    """Everything about a program but its tensors and sizes; converts to JSON and back.

    Attributes:
        expression: the statement's text.
        facts: facts promised of index tensors, by name.
        options: compile options.
        drop_outside: writes outside the output are dropped (derivative statements).
        static: tensors whose values are known, by name.
        epilogue: what follows the sum.
        origin: who says the facts; see `check_index_values`.
    """

    expression: str
    facts: tuple[tuple[str, IndexFacts], ...] = ()
    options: Options = field(default_factory=Options)
    drop_outside: bool = False
    static: tuple[tuple[str, StaticTable], ...] = ()
    epilogue: Epilogue = PLAIN
    origin: Origin = "builder"
    ready: dict[Key, Ready] = field(default_factory=dict, init=False, repr=False, compare=False)
    programs: dict[Key, _Programs] = field(default_factory=dict, init=False, repr=False, compare=False)
    calls: dict[CallKind, Printed] = field(default_factory=dict, init=False, repr=False, compare=False)
    derived: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    together: dict[Key, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    kept: dict[tuple[bool, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    number: int = field(default_factory=count().__next__, init=False, repr=False, compare=False)
    kinds: set[Key] = field(default_factory=set[Key], init=False, repr=False, compare=False)
    common: dict[Key, Common] = field(default_factory=dict, init=False, repr=False, compare=False)
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._state()))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return (Spec, self._state())

    def _state(self) -> tuple[object, ...]:
        return (self.expression, self.facts, self.options, self.drop_outside, self.static, self.epilogue, self.origin)

    @cached_property
    def statement(self) -> Statement:
        return parse_cached(self.expression)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.statement)

    @cached_property
    def adds(self) -> bool:
        """Whether its terms are added; else gradients are more than sums of products."""
        return self.statement.combining.adds

    @cached_property
    def finishes(self) -> bool:
        """Whether something follows its sum."""
        return bool(self.epilogue)

    @cached_property
    def anchor(self) -> int:
        """The position of the first factor, whose dtype and device decide what runs a call."""
        return next((self.layout.tensors.index(access.name) for access in self.statement.reads), 0)

    @cached_property
    def agree(self) -> Agreement:
        """What finds the sizes of a call where all that is given agrees."""
        return agreement_of(self.statement)

    @cached_property
    def declared_facts(self) -> Mapping[str, IndexFacts]:
        """The promised facts by name."""
        return dict(self.facts)

    @cached_property
    def indexed(self) -> tuple[tuple[int, bool], ...]:
        """The positions of index tensors, and whether a builder vouches for all their entries."""
        built = {name for name, facts in self.facts if facts.proven and facts.masked is not None}
        index_tensors, vouches = self.layout.index_tensors, self.origin == "builder"
        places = enumerate(self.layout.tensors)
        return tuple((at, vouches and name in built) for at, name in places if name in index_tensors)

    def to_json(self) -> str:
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> Spec:
        return _from_json(text)

    def check_kinds(self, tensors: Sequence[Tensor], initial: Tensor | None) -> None:
        """Raise what `bind` raises of these tensors, which are in the layout's order, and of the initial value."""
        kinds = None
        for tensor in (*tensors, initial):
            if tensor is not None and not_dense(tensor) is not None:
                break
        else:
            kinds = kinds_of(tensors, initial)
            if kinds in self.kinds:
                return
        named = dict(zip(self.layout.tensors, tensors, strict=True))
        if initial is not None:
            named[self.statement.output.name] = initial
        bind(self.statement, named, initial)
        if kinds is not None:
            self.kinds.add(kinds)

    @property
    def bare(self) -> Spec:
        """The sum alone."""
        return _with_expression(self, self.expression, self.drop_outside)

    def writing(self, dtype: torch.dtype) -> Spec:
        """The same with an output of another floating-point dtype."""
        return replace(self, epilogue=check_epilogue(self.expression, self.epilogue.activation, dtype))

    def with_statement(self, statement: Statement, *, drop_outside: bool) -> Spec:
        return _with_expression(self, str(statement), drop_outside)


def parse_cached(expression: str) -> Statement:
    """Parse an expression once."""
    check_text(expression)
    return _parsed(expression)


_parsed = lru_cache(maxsize=2048)(parse)


@lru_cache(maxsize=2048)
def _with_expression(spec: Spec, expression: str, drop_outside: bool) -> Spec:
    return Spec(expression, spec.facts, spec.options, drop_outside, spec.static, origin=spec.origin)


@lru_cache(maxsize=2048)
def _to_json(spec: Spec) -> str:
    return json.dumps(
        {
            "expression": spec.expression,
            "facts": {name: asdict(facts) for name, facts in spec.facts},
            "options": spec.options.to_dict(),
            "drop_outside": spec.drop_outside,
            "static": {name: [table.shape, table.values] for name, table in spec.static},
            "epilogue": asdict(spec.epilogue),
            "origin": spec.origin,
        },
        sort_keys=True,
    )


@lru_cache(maxsize=2048)
def _from_json(text: str) -> Spec:
    data = json.loads(text)
    facts = tuple((name, _facts(values)) for name, values in data["facts"].items())
    tables = data.get("static", {}).items()
    static = tuple((name, StaticTable(tuple(shape), tuple(values))) for name, (shape, values) in tables)
    epilogue = Epilogue(**data.get("epilogue", {}))
    origin: Origin = data.get("origin", "caller")
    return Spec(
        data["expression"], facts, Options.from_dict(data["options"]), data["drop_outside"], static, epilogue, origin
    )


def _facts(values: dict[str, Any]) -> IndexFacts:
    """Facts from JSON, which knows no tuples."""
    values["unique_with"] = tuple(values["unique_with"])
    return IndexFacts(**values)


def prepare(
    spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents
) -> tuple[Bound, Executable | StatementSequence]:
    """Check a call and find its program, or those of the statements that it is cut into."""
    programs = _checked_programs(spec, tensors, initial, extents)
    return programs.bound, programs.sequences.of(tensors, extents) or programs.executables.of(tensors, extents)


def intermediates_of(spec: Spec, tensors: Sequence[Tensor], extents: Extents) -> tuple[Hashable, ...]:
    """Return what a call on such tensors makes of its own tensors before its last statement, if it runs as several."""
    if spec.static or 0 in (*extents.indices, *extents.output):
        return ()
    sequence = _checked_programs(spec, tensors, None, extents).sequences.of(tensors, extents)
    return () if sequence is None else tuple(key for key in sequence.made if key is not None)


def _checked_programs(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> _Programs:
    """Check a call, and find what may run it."""
    named = dict(zip(spec.layout.tensors, tensors, strict=True))
    check_extents(spec.statement, tensors, extents, drop_outside=spec.drop_outside)
    facts = checked_facts(spec, tensors, extents)
    if spec.static:
        check_static(spec.statement.text, spec.static, named, validate=spec.options.validate)
    return _programs(spec, named, initial, facts)


def checked_facts(spec: Spec, tensors: Sequence[Tensor], extents: Extents) -> Facts:
    """Check the values of a call's index tensors, and return what holds of each."""
    found = check_index_values(
        spec.statement,
        tensors,
        extents,
        spec.declared_facts,
        drop_outside=spec.drop_outside,
        validate=spec.options.validate,
        origin=spec.origin,
    )
    for name, tensor in zip(spec.layout.tensors, tensors, strict=True):
        if name in found and tensor.numel() == 0:
            found[name] = _EMPTY
    return found


@dataclass(frozen=True, slots=True)
class _Programs:
    """What may run a bound statement, at any sizes."""

    bound: Bound
    executables: Executables
    sequences: Sequences


# What is known of an index tensor without entries.
_EMPTY = IndexFacts(masked=True, proven=True)


def _programs(spec: Spec, named: Mapping[str, Tensor], initial: Tensor | None, facts: Facts) -> _Programs:
    """Bind a statement to tensors; sizes change at each call of many, and what a program depends on does not."""
    key = (generation(), *kinds_of(named.values(), initial), *facts.values())
    found = spec.programs.get(key)
    if found is None:
        bound = bind(
            spec.statement, named, initial, facts=facts, drop_outside=spec.drop_outside, epilogue=spec.epilogue
        )
        sequences = Sequences(bound, spec.options, spec.static)
        found = _Programs(bound, Executables(bound, spec.options, spec.static), sequences)
        insert(spec.programs, key, found, _READY_LIMIT)
        _print_call(spec, list(named.values()), found, facts)
    return found


def _print_call(spec: Spec, tensors: Sequence[Tensor], programs: _Programs, facts: Facts) -> None:
    """Have calls on tensors of these kinds run at any sizes, where only a builder's tensors and sizes are to check."""
    if programs.executables.backend == "c" and tensors:
        kind = call_kind(spec, tensors)
        if kind not in spec.calls and (found := ArtifactCall(spec, tensors)).printed:
            spec.calls[kind] = found
    plain = not (spec.static or spec.options.validate or writes_sums(spec.statement))
    if programs.executables.backend != "triton" or not plain or not all(vouched for _, vouched in spec.indexed):
        return
    if any(spec.declared_facts[name] is not found for name, found in facts.items()):
        return
    call = UnsizedCall(
        programs.bound,
        tensors,
        programs.executables.fixed,
        lambda tensors, initial, extents: prepare(spec, tensors, initial, extents)[1],
        drop_outside=spec.drop_outside,
        cuttable=programs.sequences.cuttable,
    )
    if call.printed:
        spec.calls[call_kind(spec, tensors)] = call


def call_kind(spec: Spec, tensors: Sequence[Tensor]) -> CallKind:
    """What tells the printed calls of a program apart (`Spec.calls`); each checks the rest itself."""
    anchor = tensors[spec.anchor]
    return anchor.dtype, anchor.is_cuda, tensors[spec.indexed[0][0]].dtype if spec.indexed else None


@dataclass(slots=True)
class Ready:
    """Everything decided for one key, and the index tensors whose values were read for it.

    `facts`: what holds of these, where what runs the call depends on nothing else of them.
    """

    run: Callable[[Sequence[Tensor], Tensor | None], Tensor]
    read: Versions
    generation: int
    facts: Facts | None = None
    precision: str = field(default_factory=torch._C._get_float32_matmul_precision)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        if self.generation != clearings.count or self.precision != torch._C._get_float32_matmul_precision():
            return False
        for at, ref, version, spoken_for in self.read:
            tensor = tensors[at]
            if ref() is tensor:
                if tensor._version != version:
                    return False
            elif not (spoken_for and unwritten(tensor)):
                return False
        return True

    def for_others(self, spec: Spec, tensors: Sequence[Tensor], extents: Extents) -> Ready | None:
        """Return the same for other index tensors of these shapes, whose values are checked; `None`: decide again."""
        if self.facts is None or self.generation != generation() or checked_facts(spec, tensors, extents) != self.facts:
            return None
        read = index_versions(spec, tensors)
        return None if read is None else replace(self, read=read)


def broadcast(initial: Tensor | None, extents: Extents) -> Tensor | None:
    """The initial value in the output's shape, without a copy."""
    # Symbolic extents are not compared where the ranks differ already.
    if initial is None or (initial.ndim == len(extents.output) and initial.shape == extents.output):
        return initial
    return initial.expand(extents.output)


def run_plain(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """Run on plain tensors of sizes that agree, where nothing is recorded and no mode follows, by what was printed.

    Args:
        spec: the program.
        tensors: in the layout's order.
        initial: the initial value, which may be of the output's last axes alone.
        extents: the call's sizes.
    """
    printed = spec.calls.get(call_kind(spec, tensors)) if spec.calls else None
    result = None if printed is None else printed.run(tensors, initial, *extents)
    return run_spec(spec, tensors, broadcast(initial, extents), extents) if result is None else result


def run_spec(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """Run without recording gradients; the arguments are those of `run_ready`."""
    return run_ready(spec, tensors, initial, extents)[0]


def run_ready(
    spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents
) -> tuple[Tensor, Ready | None]:
    """Run without recording gradients, and return what runs further calls of the key, where it can be kept.

    Args:
        spec: the program.
        tensors: in the layout's order.
        initial: the initial value.
        extents: the call's sizes.
    """
    if torch._C._is_any_autocast_enabled():
        device = next((t.device for t in (*tensors, initial) if t is not None), torch.device("cpu"))
        if under_autocast(device):
            # The operands were cast where the call was made; inside, autocast would mix dtypes that were equal.
            with without_autocast(device):
                return run_ready(spec, tensors, initial, extents)
    # Compiled float32 products follow the precision that was set when they were compiled.
    key = (call_key(tensors, initial), initial is None, extents, torch.get_float32_matmul_precision())
    ready = spec.ready.get(key)
    if ready is not None and not ready.holds(tensors):
        ready = ready.for_others(spec, tensors, extents)
        if ready is not None:
            insert(spec.ready, key, ready, _READY_LIMIT)
    if ready is not None:
        return ready.run(tensors, initial), ready
    spec.check_kinds(tensors, initial)
    if 0 in extents.indices:
        check_extents(spec.statement, tensors, extents, drop_outside=spec.drop_outside)
        return _without_terms(spec, tensors, initial, extents), None
    bound, program = prepare(spec, tensors, initial, extents)
    layout = spec.layout
    indexed = layout.index_tensors
    empty = [name for name, t in zip(layout.tensors, tensors, strict=True) if t.numel() == 0]
    if 0 in extents.output or not indexed.issuperset(empty):
        # Every read of a factor without cells misses.
        return _without_terms(spec, tensors, initial, extents), None
    with messages_name(spec.statement):
        if empty:
            stand = [stand_in(t, n in indexed) for n, t in zip(layout.tensors, tensors, strict=True)]
            return program(stand, extents, initial), None
        run = program.prepare(tensors, extents, initial)
    read = None if spec.options.validate else index_versions(spec, tensors)
    if read is None:
        return run(tensors, initial), None
    facts = {n: f for n, f in zip(layout.tensors, bound.facts, strict=True) if n in indexed}
    ready = Ready(run, read, generation(), facts if isinstance(program, Executable) else None)
    insert(spec.ready, key, ready, _READY_LIMIT)
    return run(tensors, initial), ready


def index_versions(spec: Spec, tensors: Sequence[Tensor]) -> Versions | None:
    """The index tensors whose values were read for a call; `None`: they have to be read at every call."""
    read: list[tuple[int, Callable[[], Tensor | None], int, bool]] = []
    # The range of a sum that addresses the output is of the very tensors that were read, whatever a builder says.
    sums = writes_sums(spec.statement)
    for at, vouched in spec.indexed:
        tensor = tensors[at]
        spoken_for = vouched and not sums and unwritten(tensor)
        if not tensor.is_inference():
            read.append((at, weakref.ref(tensor), tensor._version, spoken_for))
        elif spoken_for:
            read.append((at, _nothing, 0, True))
        else:
            # No version is tracked.
            return None
    return tuple(read)


def _nothing() -> None:
    """The weak reference of a tensor that is not known again."""


def _without_terms(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """Without terms or without cells the output is its initial value, or zero."""
    dtype = value_dtype(spec, tensors, initial)
    if initial is not None:
        total = initial.detach().clone(memory_format=torch.contiguous_format)
        return spec.epilogue(total, dtype) if spec.epilogue else total
    device = tensors[0].device if tensors else None
    return torch.zeros(extents.output, dtype=spec.epilogue.out_dtype(dtype), device=device)


def value_dtype(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None) -> torch.dtype:
    """The dtype of the factors, and of the sum."""
    layout = spec.layout
    for access in spec.statement.reads:
        return tensors[layout.tensors.index(access.name)].dtype
    return initial.dtype if initial is not None else torch.get_default_dtype()
