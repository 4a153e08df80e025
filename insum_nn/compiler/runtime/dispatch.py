"""One call of a program: what it is (`Spec`), its checks, and the way to compiled code.

Checks and finding a program cost the host more than a small kernel costs the device. So calls on tensors of one kind
run by what was printed for it (`Artifact`), at any sizes; what that leaves to others is checked and found here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.ir.canonical import messages_name
from insum_nn.compiler.lang.bind import Bound, Extents, Layout, bind, layout_of
from insum_nn.compiler.lang.declared_facts import Origin
from insum_nn.compiler.lang.derivative import apart, roundings
from insum_nn.compiler.lang.epilogue import PLAIN, Epilogue, check_epilogue
from insum_nn.compiler.lang.index_checks import check_index_values
from insum_nn.compiler.lang.parser import check_text, parse
from insum_nn.compiler.lang.printed import Lists, Sizes
from insum_nn.compiler.lang.shapes import Agreement, agreement_of, check_extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.arguments import check_static, kinds_of, stand_in
from insum_nn.compiler.runtime.artifact import Artifact, Facts, Step, programs_of
from insum_nn.compiler.runtime.execution import Executable, Executables, forgets_programs, sharing
from insum_nn.compiler.runtime.modes import without_autocast
from insum_nn.dtypes import not_dense
from insum_nn.facts import IndexFacts, StaticTable
from insum_nn.locks import cached_property

__all__ = [
    "RunStatement",
    "Spec",
    "StatementGraph",
    "broadcast",
    "dtype_of",
    "parse_cached",
    "prepare",
    "run_plain",
    "run_spec",
    "value_dtype",
]

Key = tuple[object, ...]
# What tells the printed calls of a program apart: whether tensors are on a GPU, and their dtypes.
CallKind = tuple[bool | torch.dtype, ...]
dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


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
    programs: dict[Key, Executables] = field(default_factory=dict, init=False, repr=False, compare=False)
    kinds: set[Key] = field(default_factory=set[Key], init=False, repr=False, compare=False)
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
    def apart(self) -> tuple[Spec, Spec] | None:
        """Where terms of an extremum may be other numbers when gradients form them again: `apart` of its statement."""
        if self.adds or roundings(*self.statement.factors) <= 1:
            return None
        first, second = (self.with_statement(s, drop_outside=self.drop_outside) for s in apart(self.statement))
        return first, second

    @cached_property
    def finishes(self) -> bool:
        """Whether something follows its sum."""
        return bool(self.epilogue)

    @cached_property
    def agree(self) -> Agreement:
        """What finds the sizes of a call where all that is given agrees."""
        return agreement_of(self.statement)

    @cached_property
    def graph(self) -> StatementGraph:
        """The statement by itself."""
        return StatementGraph([Step.of(self, range(len(self.layout.tensors)), 0, 0)], (0,))

    @cached_property
    def calls(self) -> Mapping[CallKind, Artifact]:
        """What runs its calls, by their kind."""
        return self.graph.artifacts

    @cached_property
    def declared_facts(self) -> Mapping[str, IndexFacts]:
        """The promised facts by name."""
        return dict(self.facts)

    @lru_cache(maxsize=2048)  # noqa: B019
    def to_json(self) -> str:
        return json.dumps(
            {
                "expression": self.expression,
                "facts": {name: asdict(facts) for name, facts in self.facts},
                "options": self.options.to_dict(),
                "drop_outside": self.drop_outside,
                "static": {name: [table.shape, table.values] for name, table in self.static},
                "epilogue": asdict(self.epilogue),
                "origin": self.origin,
            },
            sort_keys=True,
        )

    @staticmethod
    @lru_cache(maxsize=2048)
    def from_json(text: str) -> Spec:
        data = json.loads(text)
        facts = tuple((name, _facts(values)) for name, values in data["facts"].items())
        tables = data.get("static", {}).items()
        static = tuple((name, StaticTable(tuple(shape), tuple(values))) for name, (shape, values) in tables)
        epilogue, options = Epilogue(**data.get("epilogue", {})), Options.from_dict(data["options"])
        origin: Origin = data.get("origin", "caller")
        return Spec(data["expression"], facts, options, data["drop_outside"], static, epilogue, origin)

    def check_kinds(self, tensors: Sequence[Tensor], initial: Tensor | None) -> None:
        """Raise what `bind` raises of these tensors, which are in the layout's order, and of the initial value."""
        dense = all(tensor is None or not_dense(tensor) is None for tensor in (*tensors, initial))
        kinds = kinds_of(tensors, initial) if dense else ()
        if kinds in self.kinds:
            return
        named = dict(zip(self.layout.tensors, tensors, strict=True))
        if initial is not None:
            named[self.statement.output.name] = initial
        bind(self.statement, named, initial)
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


def _facts(values: dict[str, Any]) -> IndexFacts:
    """Facts from JSON, which knows no tuples."""
    values["unique_with"] = tuple(values["unique_with"])
    return IndexFacts(**values)


def prepare(
    spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents
) -> tuple[Bound, Executable]:
    """Check a call and find its program, or those of the statements that it is cut into."""
    check_extents(spec.statement, tensors, extents, drop_outside=spec.drop_outside)
    facts = _checked_facts(spec, tensors, extents)
    if spec.static:
        named = dict(zip(spec.layout.tensors, tensors, strict=True))
        check_static(spec.statement.text, spec.static, named, validate=spec.options.validate)
    programs = programs_of(spec, tensors, initial, facts)
    return programs.bound, programs.of(tensors, extents)


def _checked_facts(spec: Spec, tensors: Sequence[Tensor], extents: Extents) -> Facts:
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


# What is known of an index tensor without entries.
_EMPTY = IndexFacts(masked=True, proven=True)


def broadcast(initial: Tensor | None, extents: Extents) -> Tensor | None:
    """The initial value in the output's shape, without a copy."""
    # Symbolic extents are not compared where the ranks differ already.
    if initial is None or (initial.ndim == len(extents.output) and initial.shape == extents.output):
        return initial
    return initial.expand(extents.output)


def run_plain(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """Run on tensors of sizes that agree, where nothing is recorded, no mode follows, and autocast is off.

    Args:
        spec: the program.
        tensors: in the layout's order.
        initial: the initial value, which may be of the output's last axes alone.
        extents: the call's sizes.
    """
    printed = spec.calls.get((tensors[0].is_cuda, *map(dtype_of, tensors))) if spec.calls else None
    made = None if printed is None else printed.run(tensors, (extents.indices,), (extents.output,), initial)
    return _looked_at(spec, tensors, initial, extents, printed) if made is None else made[0]


def run_spec(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """Run without recording gradients; the arguments are those of `run_plain`."""
    if torch._C._is_any_autocast_enabled():
        device = next((t.device for t in (*tensors, initial) if t is not None), torch.device("cpu"))
        # The operands were cast where the call was made; inside, autocast would mix dtypes that were equal.
        with without_autocast(device):
            return run_plain(spec, tensors, initial, extents)
    return run_plain(spec, tensors, initial, extents)


def _looked_at(
    spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents, printed: Artifact | None
) -> Tensor:
    """Run what nothing printed runs: a first call of a kind, or one that is wrong, empty or out of the ordinary."""
    initial = broadcast(initial, extents)
    spec.check_kinds(tensors, initial)
    if 0 in extents.indices:
        check_extents(spec.statement, tensors, extents, drop_outside=spec.drop_outside)
        return _without_terms(spec, tensors, initial, extents)
    if printed is None and tensors:
        printed = spec.graph.artifact(tensors)
        made = printed.run(tensors, (extents.indices,), (extents.output,), initial)
        if made is not None:
            return made[0]
    _, program = prepare(spec, tensors, initial, extents)
    layout = spec.layout
    indexed = layout.index_tensors
    empty = [name for name, t in zip(layout.tensors, tensors, strict=True) if t.numel() == 0]
    if 0 in extents.output or not indexed.issuperset(empty):
        # Every read of a factor without cells misses.
        return _without_terms(spec, tensors, initial, extents)
    stand = [stand_in(t, n in indexed) if empty else t for n, t in zip(layout.tensors, tensors, strict=True)]
    with messages_name(spec.statement):
        return program.prepare(stand, extents, initial)(stand, initial)


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


# Several statements, and gradients.

# Runs one statement: its tensors, what it adds to, its sizes.
RunStatement = Callable[[Spec, Sequence[Tensor], Tensor | None, Extents], Tensor]


class StatementGraph:
    """Runs steps in order: on a CPU by one C function where there is one, else one after the other.

    Args:
        steps: the statements, in which later ones read what earlier ones wrote.
        results: the numbers of the outputs that are returned to who is given gradients of them.
        lists: how many lists of extents a call has; by default one for each step.

    Attributes:
        alone: the only statement.
        artifacts: what runs all at once, by the kind of its tensors.
        gradients: what its gradients are, by which of its tensors need one and which results have one; see `backward`.
    """

    def __init__(self, steps: Sequence[Step], results: Sequence[int] = (), *, lists: int = 0) -> None:
        self.steps, self.results = tuple(steps), results
        self.lists = lists or len(steps)
        self.alone = steps[0].spec if len(steps) == 1 else None
        self.gradients: dict[tuple[tuple[bool, ...], tuple[bool, ...] | None], Any] = {}
        self._read = tuple(dict.fromkeys(at for step in steps for at in step.places if at >= 0))
        self.artifacts: dict[CallKind, Artifact] = {}

    def run(
        self, pool: Sequence[Any], extents: Lists, shapes: Lists, run: RunStatement | None = None
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
        for step in self.steps:
            sizes.append(tuple(map(extents[step.source].__getitem__, step.indices)))
        if run is None and self.alone is not None:
            given = list(map(pool.__getitem__, self.steps[0].places))
            return (run_plain(self.alone, given, None, Extents(sizes[0], shapes[0])),)
        if run is None and self._read:
            given = list(map(pool.__getitem__, self._read))
            # Whether one kernel of several statements is faster depends on sizes: operators say where it is made.
            if given[0].is_cpu and not (artifact := self.artifact(given)).generated:
                found = artifact.run(given, sizes, shapes, None)
                if found is not None:
                    return found
        # Output n is at -1 - n.
        tensors: list[Any] = [*pool, *[None] * len(shapes)]
        outer = sharing.set({} if run is None and len(sizes) > 1 else None)
        try:
            for step, own in zip(self.steps, sizes, strict=True):
                given = list(map(tensors.__getitem__, step.places))
                at = -1 - step.output
                tensors[at] = (run or run_plain)(step.spec, given, tensors[at], Extents(own, shapes[step.output]))
        finally:
            sharing.reset(outer)
        return tensors[: -1 - len(shapes) : -1]

    def artifact(self, given: Sequence[Tensor]) -> Artifact:
        """Return what runs all at once on tensors of these dtypes, which are those that the steps read, in order."""
        kind = (given[0].is_cuda, *map(dtype_of, given))
        found = self.artifacts.get(kind)
        if found is None:
            slot = {place: n for n, place in enumerate(self._read)}
            steps = [step._replace(places=tuple(slot.get(at, at) for at in step.places)) for step in self.steps]
            found = self.artifacts[kind] = Artifact(steps, given)
            forgets_programs(self)
        return found

    def clear(self) -> None:
        """Forget what runs all at once, and with it which back ends there were."""
        self.artifacts.clear()
