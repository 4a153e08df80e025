"""Run a statement as several where that takes much less work, one after the other.

    Y[D[e],o] += Inv[D[e],R[e]] * X[S[e],c] * W[R[e],c,o]

is `T[i,j,o] += X[i,c] * W[j,c,o]`, then `Y[D[e],o] += T[S[e],R[e],o] * Inv[D[e],R[e]]`. Each statement has the program
that it would have alone. The choice is by counts (`schedule.product_cost`), made once for a statement and all sizes
within a factor of 1.4, on every device and for derivative statements too; nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.codegen.c import NotInC
from insum_nn.compiler.ir.canonical import canonical, canonical_tables
from insum_nn.compiler.kernels.ahead import collecting
from insum_nn.compiler.kernels.c_program import NOWHERE, CProgram, compiled_extents, known_in_c, limits_of_extents
from insum_nn.compiler.kernels.c_program import Part as CPart
from insum_nn.compiler.lang.bind import Bound, Extents, layout_of
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.lang.misses import labels_of
from insum_nn.compiler.lang.printed import Run
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.cut_products import Axis, Cut, cuts_of
from insum_nn.compiler.passes.split_static_tables import split_static_tables
from insum_nn.compiler.runtime.backends import choose_backend
from insum_nn.compiler.runtime.composite.read_cells import UnreadCells
from insum_nn.compiler.runtime.execution import Executable, Executables, executables_of, generation
from insum_nn.compiler.schedule.product_cost import Cost, Sizes, cost_of, machine_of, multiplies_blocks
from insum_nn.dtypes import is_widened
from insum_nn.facts import UNKNOWN, IndexFacts, Tables
from insum_nn.locks import cached_property

__all__ = ["Part", "Sequences", "Stage", "StatementSequence", "Tree", "c_program", "run_parts", "sharing"]

Shape = tuple[int, ...]

# A statement is cut if that costs less than this share of the whole: counts are no times. For products of blocks they
# agree with times measured on a CPU and a GPU, so there they decide.
_SHARE = 0.7
# Bytes that an intermediate tensor may have: so many times those of what is read and written, or this many.
_ROOM, _LEAST_ROOM = 4.0, 2.0**26
# Cuts whose parts are cut in turn: the best ones, to this depth.
_BEAM, _DEPTH = 3, 2
# Decisions kept for a statement.
_LIMIT = 1024
# What is known of the tables that a cut makes.
_ENTRIES = IndexFacts(masked=False, proven=True)


@dataclass(frozen=True, slots=True)
class Tree:
    """What is decided of a statement: it stays whole, or is cut, and both parts are decided alike."""

    cut: Cut | None = None
    first: Tree | None = None
    second: Tree | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One statement of a sequence.

    Attributes:
        bound: the statement.
        sizes: its sizes.
        writes: the tensor that it makes; "" for the last one.
        static: its static tables.
        clears: tensors that it reads with some cells cleared.
        unwritten: cells of its output that are cleared.
    """

    bound: Bound
    sizes: Sizes
    writes: str
    static: Tables = ()
    clears: tuple[UnreadCells, ...] = ()
    unwritten: tuple[UnreadCells, ...] = ()

    @property
    def extents(self) -> Extents:
        layout = self.bound.layout
        return Extents(tuple(self.sizes.indices[i] for i in layout.indices), tuple(self.sizes.output))


class Sequences:
    """Finds what runs a bound statement at any sizes: its program, or those of the statements that it is cut into.

    Args:
        bound: the statement.
        options: compile options.
        static: its static tables.
    """

    def __init__(self, bound: Bound, options: Options, static: Tables = ()) -> None:
        self.bound, self.options, self.static = bound, options, static
        # Decisions, for all sizes within a factor of the root of two.
        self._trees: dict[tuple[int, ...], Tree] = {}

    @cached_property
    def cuttable(self) -> bool:
        """Whether it may be cut at some sizes; static tables decide that alone."""
        return not self.static and self.bound.dtype.is_floating_point and bool(cuts_of(self.bound))

    @cached_property
    def _whole(self) -> Executables:
        return Executables(self.bound, self.options, self.static)

    def program(self, tensors: Sequence[Tensor], extents: Extents) -> Executable | StatementSequence:
        """Return what runs it at these sizes."""
        return self.of(tensors, extents) or self._whole.of(extents)

    def of(self, tensors: Sequence[Tensor], extents: Extents) -> StatementSequence | None:
        """Return the statements that it is cut into at these sizes; `None`: it stays whole."""
        if self.static and 0 not in (*extents.indices, *extents.output):
            tree = self._by_tables(extents)
            if tree is _WHOLE:
                return None
            found = self._sequence(tree, self._search(_shapes(self.bound, tensors), extents, {}))
            # Where C was asked for by name, the whole statement says why it has none.
            return None if found and found.program is None and self.options.backend == "c" else found
        if not self.cuttable:
            return None
        sizes = [*extents.indices, *extents.output]
        for tensor in tensors:
            sizes += tensor.shape
        if 0 in sizes:
            return None
        # Programs are forgotten together, so that a test or a user who clears the cache sees all of it made again.
        bucket = (generation(), *[(size * size).bit_length() for size in sizes])
        tree = self._trees.get(bucket)
        if tree is _WHOLE:
            return None
        named = dict(zip(self.bound.layout.tensors, tensors, strict=True))
        search = self._search(_shapes(self.bound, tensors), extents, named)
        if tree is None or not _holds(tree, self.bound, search.sizes):
            tree = search.decide()
            if tree is None:
                return None
            if len(self._trees) >= _LIMIT:
                self._trees.clear()
            self._trees[bucket] = tree
        return self._sequence(tree, search)

    def _by_tables(self, extents: Extents) -> Tree:
        """What static tables decide: a kernel for a GPU shares what their entries have in common by itself."""
        options = self.options
        if self.bound.device_type != "cpu" or options.order != "cost" or options.backend not in ("auto", "c", "eager"):
            return _WHOLE
        # They would be rounded in between.
        if is_widened(self.bound.dtype):
            return _WHOLE
        sizes = dict(zip(self.bound.layout.indices, extents.indices, strict=True))
        cut = split_static_tables(self.bound, self.static, sizes)
        return _WHOLE if cut is None else Tree(cut, _WHOLE, _WHOLE)

    def _sequence(self, tree: Tree, search: _Search) -> StatementSequence | None:
        if tree is _WHOLE:
            return None
        parts = tuple(_parts(Part(self.bound, search.sizes, "", self.static), tree))
        cost = search.price(self.bound, search.sizes)
        cut = tree.cut if self.static else None
        return StatementSequence(self.bound, parts, self.options, cost, search.total(parts), cut, self.static)

    def symbolic(
        self, named: Mapping[str, Tensor], extents: Extents, shapes: Mapping[str, Shape], hints: Extents
    ) -> tuple[Part, ...] | None:
        """Return the statements that it is cut into at symbolic sizes; `None`: it stays whole.

        Args:
            named: its tensors.
            extents: its extents.
            shapes: numbers for the shapes of its tensors, by which to choose.
            hints: numbers for its extents.
        """
        if not (self.static or self.cuttable) or 0 in hints.output or any(0 in shape for shape in shapes.values()):
            return None
        tree = self._by_tables(hints) if self.static else self._search(shapes, hints, named).decide()
        if tree is None or tree is _WHOLE:
            return None
        own = {name: tuple(tensor.shape) for name, tensor in named.items()}
        return tuple(_parts(Part(self.bound, _sizes(self.bound, own, extents), "", self.static), tree))

    def _search(self, shapes: Mapping[str, Shape], extents: Extents, named: Mapping[str, Tensor]) -> _Search:
        return _Search(self.bound, _sizes(self.bound, shapes, extents), self.options, named)


def _shapes(bound: Bound, tensors: Sequence[Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in zip(bound.layout.tensors, tensors, strict=True)}


def _sizes(bound: Bound, shapes: Mapping[str, Shape], extents: Extents) -> Sizes:
    indices = dict(zip(bound.layout.indices, extents.indices, strict=True))
    return Sizes(indices, dict(shapes), extents.output, bound.dtype.itemsize)


# Sizes of parts.


def _extent(of: str | Axis | int, sizes: Sizes, output: str) -> int:
    if isinstance(of, int):
        return of
    if isinstance(of, str):
        return sizes.indices[of]
    name, axis = of
    return sizes.output[axis] if name == output else sizes.shapes[name][axis]


def _fits(cut: Cut, bound: Bound, sizes: Sizes) -> bool:
    """Whether axes that share an index have one extent."""
    output = bound.statement.output.name
    return all(len({_extent(axis, sizes, output) for axis in axes}) == 1 for axes in cut.equal)


def _both(cut: Cut, bound: Bound, sizes: Sizes, static: Tables = ()) -> tuple[Part, Part]:
    """The two parts of a statement that is cut; the second writes what the whole writes."""
    output = bound.statement.output.name
    indices = {**sizes.indices, **{name: _extent(axis, sizes, output) for name, axis in cut.fresh.items()}}
    made = tuple(_extent(of, sizes, output) for of in cut.shape)
    shapes = {
        **sizes.shapes,
        **{clear.name: sizes.shapes[clear.place.access.name] for clear in cut.clears},
        **{name: table.shape for name, table in cut.tables.items()},
        cut.intermediate: made,
    }
    inner = replace(sizes, indices=indices, shapes=shapes)
    first, second = _bound(bound, cut, last=False), _bound(bound, cut, last=True)
    clears = tuple(UnreadCells(clear, sizes, output) for clear in cut.clears)
    unwritten = () if cut.unwritten is None else (UnreadCells(cut.unwritten, sizes, output),)
    tables = {**dict(static), **cut.tables}
    one, other = (
        tuple((name, tables[name]) for name in part.layout.tensors if name in tables) for part in (first, second)
    )
    return (
        Part(first, replace(inner, output=made), cut.intermediate, one),
        Part(second, inner, "", other, clears, unwritten),
    )


def _bound(bound: Bound, cut: Cut, *, last: bool) -> Bound:
    """What is known of a part, from what is known of the whole."""
    statement = cut.second if last else cut.first
    layout, whole = layout_of(statement), bound.layout
    known = dict(zip(whole.tensors, zip(bound.index_dtypes, bound.facts, strict=True), strict=True))
    known |= {name: (torch.int64, _ENTRIES) for name, table in cut.tables.items() if not table.is_floating}
    dtypes, facts = zip(*[known.get(name, (bound.dtype, UNKNOWN)) for name in layout.tensors], strict=True)
    return replace(
        bound,
        statement=statement,
        index_dtypes=dtypes,
        has_initial=last and bound.has_initial,
        facts=facts,
        drop_outside=bound.drop_outside or (cut.drops and not last),
        epilogue=bound.epilogue if last else PLAIN,
    )


def _parts(part: Part, tree: Tree) -> Iterator[Part]:
    """The statements that a decision makes of one, in their order."""
    if tree.cut is None:
        yield part
        return
    assert tree.first is not None
    assert tree.second is not None
    first, second = _both(tree.cut, part.bound, part.sizes, part.static)
    # What the whole reads with cleared cells is made before its first part.
    yield from _parts(replace(first, clears=part.clears), tree.first)
    unwritten = (*second.unwritten, *part.unwritten)
    yield from _parts(replace(second, writes=part.writes, unwritten=unwritten), tree.second)


# The decision.

_WHOLE = Tree()


class _Search:
    """Counts what the cuts of a statement cost, and the cuts of their parts."""

    def __init__(self, bound: Bound, sizes: Sizes, options: Options, tensors: Mapping[str, Tensor]) -> None:
        self.bound = bound
        self.sizes = sizes
        self.options = options
        self.tensors = tensors
        read = sum(math.prod(shape) for shape in sizes.shapes.values())
        self.taken = frozenset((bound.statement.output.name, *sizes.shapes))
        self.room = max(_LEAST_ROOM, _ROOM * sizes.width * (read + math.prod(sizes.output)))

    def decide(self) -> Tree | None:
        """Return the decision for the sizes; `None`: it waits for entries that cannot be counted now."""
        tree, _ = self.best(self.bound, self.sizes, self.taken, _DEPTH)
        if tree.cut is not None and self.skips():
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return None
            self.sizes = replace(self.sizes, present=self.present())
            tree, _ = self.best(self.bound, self.sizes, self.taken, _DEPTH)
        return tree

    def best(self, bound: Bound, sizes: Sizes, taken: frozenset[str], depth: int) -> tuple[Tree, Cost]:
        """The cheapest way to compute a statement."""
        whole = self.price(bound, sizes)
        if depth == 0 or whole.total <= 2 * machine_of(bound.device_type, sizes.width, pairwise=True).call:
            return _WHOLE, whole
        found: list[tuple[float, int, Cut, Part, Part]] = []
        for number, cut in enumerate(cuts_of(bound, taken)):
            if not _fits(cut, bound, sizes):
                continue
            first, second = _both(cut, bound, sizes)
            if sizes.width * math.prod(first.sizes.output) > self.room:
                continue
            total = self.total((first, second)).total
            found.append((total, number, cut, first, second))
        best: tuple[Tree, Cost] = _WHOLE, whole
        share = 1.0 if multiplies_blocks(bound.statement) else _SHARE
        found.sort(key=lambda each: each[:2])
        for _, _, cut, first, second in found[:_BEAM]:
            # A name that is made inside of one part must not hide what the other reads.
            names = taken | {cut.intermediate, *(clear.name for clear in cut.clears)}
            one, before = self.best(first.bound, first.sizes, names, depth - 1)
            other, after = self.best(second.bound, second.sizes, names, depth - 1)
            cost = before + after + self.clearing(second)
            limit = share * whole.total if best[0].cut is None else best[1].total
            if cost.total < limit:
                best = Tree(cut, one, other), cost
        return best

    def price(self, bound: Bound, sizes: Sizes) -> Cost:
        """What a statement costs by the backend that would run it."""
        pairwise = choose_backend(bound, self.options)[0] not in ("c", "triton")
        ordered = frozenset(name for name in bound.statement.index_tensors() if bound.facts_of(name).sorted)
        # A generated kernel's dense product would be no faster than its products of blocks.
        library = self.options.backend == "auto" and not self.options.deterministic
        adds = not self.options.deterministic
        machine = machine_of(bound.device_type, sizes.width, pairwise=pairwise, library=library, adds=adds)
        return cost_of(bound.statement, sizes, machine, ordered)

    def clearing(self, part: Part) -> Cost:
        """What it costs to copy factors with some cells cleared."""
        cells = sum(math.prod(part.sizes.shapes[each.clear.name]) for each in part.clears)
        moved = 2.0 * part.sizes.width * cells
        return Cost(moved, 0.0, moved)

    def total(self, parts: Sequence[Part]) -> Cost:
        """What a sequence costs."""
        return sum((self.price(p.bound, p.sizes) + self.clearing(p) for p in parts), Cost(0.0, 0.0, 0.0))

    # Entries that are there.

    def skips(self) -> bool:
        """Whether a kernel over the whole may skip missing entries."""
        return bool(self.masked()) and choose_backend(self.bound, self.options)[0] == "triton"

    def masked(self) -> list[str]:
        return [name for name in self.bound.statement.index_tensors() if self.bound.facts_of(name).masked is not False]

    def present(self) -> tuple[tuple[frozenset[str], float], ...]:
        """The share of entries that are there, of each index tensor that may miss some."""
        accesses = [nested for access in self.bound.statement.accesses() for nested in access.nested()]
        shares = {name: float((self.tensors[name] >= 0).double().mean()) for name in self.masked()}
        return tuple((frozenset(labels_of(a)), shares[a.name]) for a in accesses if a.name in shares)


def _holds(tree: Tree, bound: Bound, sizes: Sizes) -> bool:
    """Whether what was decided at other sizes is right at these."""
    if tree.cut is None:
        return True
    # A cut that does not fit has no parts.
    return _fits(tree.cut, bound, sizes) and all(
        inner is not None and _holds(inner, part.bound, part.sizes)
        for part, inner in zip(_both(tree.cut, bound, sizes), (tree.first, tree.second), strict=True)
    )


# Running.


@lru_cache(maxsize=512)
def c_program(_generation: int, parts: tuple[CPart, ...], indices: tuple[int, ...], tensors: int) -> CProgram | None:
    """One C function of parts, printed once; `None`: one is not of the printer's kind."""
    try:
        program = CProgram(parts, indices, tensors, soon=False)
    except NotInC:
        return None
    program.find()
    return program


# What the statements of a graph made first, for those that begin with the same; `None`: nothing is shared.
sharing: ContextVar[dict[Hashable, tuple[Tensor, Sequence[Tensor]]] | None] = ContextVar("sharing", default=None)


@dataclass(frozen=True, eq=False)
class StatementSequence:
    """A statement that runs as several, one after the other.

    Attributes:
        bound: the whole.
        parts: its statements.
        options: compile options.
        whole: what the whole would cost.
        cost: what the parts cost.
        cut: the cut, where static tables alone decided it.
        static: these tables.
    """

    bound: Bound
    parts: tuple[Part, ...]
    options: Options
    whole: Cost
    cost: Cost
    cut: Cut | None = None
    static: Tables = ()

    @property
    def reason(self) -> str:
        return f"the statement runs as {len(self.parts)}"

    @cached_property
    def program(self) -> CProgram | None:
        """One C function of all parts, if there is one; library calls serve until it is compiled."""
        layout = self.bound.layout
        parts = self.in_c(0, range(len(layout.tensors)), 0, 1)
        counts = (len(layout.indices),), len(layout.tensors)
        return None if parts is None else c_program(generation(), parts, *counts)

    @cached_property
    def tables(self) -> dict[str, Tensor]:
        """The tables that the cut makes, for library calls."""
        made = {} if self.cut is None else self.cut.tables
        return {name: table.tensor(self.bound.dtype) for name, table in made.items()}

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Run:
        """Return what runs the statement on tensors of these shapes."""
        if self.program is None:
            return self._staged(tensors, initial)
        wait = self.options.deterministic or self.options.backend == "c"
        return self.program.serving(extents, lambda: self._staged(tensors, initial), wait=wait)

    def _staged(self, tensors: Sequence[Tensor], initial: Tensor | None) -> Run:
        """Return what runs the parts one after the other."""
        names, tables, validate = self.bound.layout.tensors, self.tables, self.options.validate
        runs = [(stage.part, self._shared(stage)) for stage in self.stages(tensors, initial)]

        def run(tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
            named = {**dict(zip(names, tensors, strict=True)), **tables}
            return run_parts(runs, named, initial, validate=validate)

        return run

    def _shared(self, stage: Stage) -> Run:
        """What runs a part; what another statement of the same graph has made of the same tensors is not made again."""
        key = self._key(stage.part)
        if key is None:
            return stage.run

        def run(operands: Sequence[Tensor], initial: Tensor | None) -> Tensor:
            made = sharing.get()
            # What a rehearsal makes is zero.
            if made is None or collecting() is not None:
                return stage.run(operands, initial)
            own = (key, *map(id, operands))
            if own not in made:
                # Operands are kept, so that no other tensor has their identity.
                made[own] = stage.run(operands, initial), operands
            return made[own][0]

        return run

    def in_c(self, number: int, places: Sequence[int], output: int, made: int) -> tuple[CPart, ...] | None:
        """The parts for a C function; `None`: it may have none, or is cut where sizes decide.

        Args:
            number: of the statement among those of the function.
            places: of its tensors among those of a call.
            output: the number of what it writes.
            made: the number of the intermediate tensor.
        """
        cut, options = self.cut, self.options
        if cut is None or any(choose_backend(p.bound, options, tables=bool(p.static))[0] != "c" for p in self.parts):
            return None
        place = dict(zip(self.bound.layout.tensors, places, strict=True)) | {cut.intermediate: -1 - made}
        position = {name: (number, at) for at, name in enumerate(self.bound.layout.indices)}
        limits = limits_of_extents(self.bound, frozenset(name for name, _ in self.static))
        fixed = {name for name, most in limits if most > 0}
        found: list[CPart] = []
        for part in self.parts:
            own, tables = canonical(part.bound), canonical_tables(part.bound.statement, part.static)
            names = part.bound.layout.indices
            extents = tuple(part.sizes.indices[n] if n in cut.fresh else position[n] for n in names)
            inner = dict(zip(own.layout.indices, names, strict=True))
            static = compiled_extents(own, tables, part.extents.indices)
            static = tuple(each for each in static if inner[each[0]] in fixed or inner[each[0]] in cut.fresh)
            where = tuple(place.get(name, NOWHERE) for name in part.bound.layout.tensors)
            shape = None
            if part.writes:
                axes = zip(cut.shape, part.sizes.output, strict=True)
                shape = tuple([position[of] if isinstance(of, str) else extent for of, extent in axes])
            # What tells functions apart: nothing else is asked of entries.
            facts = tuple(known_in_c(each.masked, each) for each in own.facts)
            found.append(
                CPart(
                    replace(own, static=static, facts=facts), tables, where, made if shape else output, extents, shape
                )
            )
        return tuple(found)

    def _key(self, part: Part) -> Hashable | None:
        """What a first part computes of its tensors; `None` where it reads more than tensors of the call."""
        own = set(self.bound.layout.tensors)
        if not part.writes or part.clears or part.unwritten or not own.issuperset(part.bound.layout.tensors):
            return None
        written, factors = part.bound.statement.output.subscripts, part.bound.statement.factors
        return tuple(map(str, written)), tuple(map(str, factors)), part.sizes.output, part.bound.drop_outside

    def stages(self, tensors: Sequence[Tensor], initial: Tensor | None) -> Iterator[Stage]:
        """The parts with their programs, prepared for tensors of the right shapes."""
        named = {**dict(zip(self.bound.layout.tensors, tensors, strict=True)), **self.tables}
        for part in self.parts:
            named |= {each.clear.name: named[each.clear.place.access.name] for each in part.clears}
            operands = [named[name] for name in part.bound.layout.tensors]
            start = None if part.writes or part.unwritten else initial
            bound = replace(part.bound, has_initial=start is not None)
            # What one C function is compiled for runs as library calls until then.
            options = replace(self.options, backend="eager") if part.static else self.options
            program = executables_of(bound, options, bound.statement.text).of(part.extents)
            yield Stage(part, program, operands, program.prepare(operands, part.extents, start))
            if part.writes:
                named[part.writes] = tensors[0].new_empty(part.sizes.output, dtype=self.bound.dtype)


class Stage(NamedTuple):
    """A part of a sequence with its program.

    Attributes:
        part: the statement.
        program: what runs it.
        operands: tensors of the right shapes.
        run: runs it on such tensors, and an initial value.
    """

    part: Part
    program: Executable
    operands: list[Tensor]
    run: Run


def run_parts(
    runs: Iterable[tuple[Part, Run]],
    named: dict[str, Tensor],
    initial: Tensor | None,
    *,
    validate: bool = False,
    traced: bool = False,
) -> Tensor:
    """Compute the parts of a statement, one after the other.

    Args:
        runs: each part, and what runs it on its tensors and an initial value.
        named: the tensors of the whole and the tables of its parts, by name; what parts make is added.
        initial: the initial value of the whole.
        validate: index tensors may have been written to without a new version.
        traced: torch records what is computed.
    """

    def unread(cells: UnreadCells) -> Tensor | None:
        return cells.unread(named, result.device) if traced else cells.kept(named, validate=validate)

    result = next(iter(named.values()))
    for part, run in runs:
        for each in part.clears:
            source, cells = named[each.clear.place.access.name], unread(each)
            named[each.clear.name] = source if cells is None else source.masked_fill(cells, 0)
        # What is cleared starts from nothing, and the initial value is added.
        start = None if part.writes or part.unwritten else initial
        result = run([named[name] for name in part.bound.layout.tensors], start)
        for each in part.unwritten:
            if (cells := unread(each)) is not None:
                result = result.masked_fill(cells, 0) if traced else result.masked_fill_(cells, 0)
        if part.writes:
            named[part.writes] = result
        elif part.unwritten and initial is not None:
            result = result + initial if traced else result.add_(initial)
    return result
