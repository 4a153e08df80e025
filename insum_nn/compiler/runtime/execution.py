"""What runs a statement, made callable, and its cache."""

from __future__ import annotations

import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.codegen.c import NotInC
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.canonical import canonical, canonical_tables, named_as
from insum_nn.compiler.kernels.ahead import collecting
from insum_nn.compiler.kernels.c_program import NOWHERE, CProgram, known_in_c, limits_in_c
from insum_nn.compiler.kernels.c_program import Part as CPart
from insum_nn.compiler.kernels.c_structures import clear_orders
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.kernels.row_partition import clear_partitions
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.printed import Run
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.cut_products import Axis, cuts_of
from insum_nn.compiler.runtime.backends import choose_backend, require_compiler, require_triton
from insum_nn.compiler.runtime.fixed_extents import fixed_extents
from insum_nn.compiler.runtime.library_calls import integers_of, library_calls_of, without_unused_facts
from insum_nn.compiler.runtime.read_cells import UnreadCells
from insum_nn.compiler.runtime.statement_cuts import WHOLE, Part, Tree, decide, sizes_of, total
from insum_nn.compiler.runtime.tiled_entries import tiled
from insum_nn.compiler.schedule.form import FormError, make_form
from insum_nn.compiler.schedule.product_cost import Cost
from insum_nn.compiler.tuning.build_once import BuildOnce, CacheKey, shared_key
from insum_nn.errors import InsumFormatError
from insum_nn.facts import Tables
from insum_nn.locks import cached_property, new_lock
from insum_nn.tensor_cache import insert

__all__ = [
    "CACHE_LIMIT",
    "CacheInfo",
    "Executable",
    "Executables",
    "cache_info",
    "clear_cache",
    "forgets_programs",
    "from_graph",
    "generation",
    "in_names_of",
    "one_function",
    "run_parts",
    "sharing",
    "stages",
]

# Programs kept; the least recently used one leaves first.
CACHE_LIMIT = 512
# Decisions on cuts kept for a statement.
_LIMIT = 1024


@dataclass(slots=True)
class Executable:
    """A compiled statement, and how it came about; in canonical names, as statements that differ in names share it.

    Attributes:
        bound: the statement, with the extents that are compiled in; in its own names where it is cut.
        extents: the sizes of the call for which it was planned.
        backend: `"c"`, `"eager"` or `"triton"`; "" where it runs as several that have their own.
        reason: why this back end.
        run: what computes it; `None`: its parts do, one after the other.
        compile_seconds: time of planning and lowering.
        parts: the statements that it is cut into.
        costs: what they cost, and what the whole would.
    """

    bound: Bound
    extents: Extents
    options: Options
    backend: str
    reason: str
    run: CallGraph | Generated | CProgram | None
    compile_seconds: float = 0.0
    parts: tuple[Part, ...] = ()
    costs: tuple[Cost, Cost] | None = None

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Run:
        """Everything that sizes decide, decided: what is returned runs on any tensors of these shapes."""
        run = self.run
        if isinstance(run, Generated):
            return run.prepare(tensors, extents, initial)
        if isinstance(run, CProgram):
            return partial(self._in_c, run, extents)
        if run is None:
            return _one_by_one(self, tensors, initial)
        integers, epilogue, dtype = integers_of(self.bound, extents), self.bound.epilogue or None, self.bound.dtype
        forward = run.forward

        def call(tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
            made = forward(*tensors, *integers) if initial is None else forward(*tensors, *integers, initial)
            return made if epilogue is None else epilogue(made, dtype)

        return call

    def _in_c(self, program: CProgram, extents: Extents, tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
        """Run a call by a C function, and by library calls until that is compiled."""
        made = program.attempt(tensors, (extents.indices,), (extents.output,), initial)
        if made is not None:
            return made[0]
        if self.parts:
            return _one_by_one(self, tensors, initial)(tensors, initial)
        other = from_graph(replace(self.bound, static=()), extents, self.options, self.reason)
        return other.prepare((), extents, None)(tensors, initial)


_cache: OrderedDict[CacheKey, Executable] = OrderedDict()
# Why there is no C function of some statements.
_refused: dict[CacheKey, str] = {}
# Held for look-ups alone; programs are built without it.
_lock = new_lock()
_building: BuildOnce[Executable] = BuildOnce()


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How the cache of programs has been used since it was cleared."""

    hits: int
    misses: int
    size: int
    limit: int


_hits = 0
_misses = 0


# How often programs were forgotten.
_generation = 0
# What else keeps programs; `clear` forgets them.
_keepers: weakref.WeakSet[Any] = weakref.WeakSet()


def forgets_programs(keeper: Any) -> None:
    """Register an object whose `clear()` is called when programs are to be forgotten."""
    _keepers.add(keeper)


def generation() -> int:
    """How often the cache was cleared: what was made ready before a clearing must not be used after it."""
    return _generation


def cache_info() -> CacheInfo:
    """Hits, misses, and the number of programs kept.

    >>> cache_info().limit
    512
    """
    return CacheInfo(_hits, _misses, len(_cache), CACHE_LIMIT)


def clear_cache() -> None:
    """Forget every compiled program and every cached sparse structure."""
    global _generation, _hits, _misses
    with _lock:
        _generation += 1
        _cache.clear()
        _refused.clear()
        for keeper in tuple(_keepers):
            keeper.clear()
        _hits = _misses = 0
    clear_partitions()
    clear_orders()


class Executables:
    """What runs a bound statement at any sizes: what does not depend on them is found once.

    Args:
        bound: the statement.
        options: compile options.
        static: its static tensors.
    """

    def __init__(self, bound: Bound, options: Options, static: Tables = ()) -> None:
        self.bound, self.options, self.static = bound, options, static
        self.own = canonical(bound)
        self.tables = canonical_tables(bound.statement, static)
        self.backend, self.reason = choose_backend(self.own, options, tables=bool(static))
        # With the facts that C functions are made for.
        self._known = replace(self.own, facts=tuple(known_in_c(each.masked, each) for each in self.own.facts))
        # Decisions, for all sizes within a factor of the root of two.
        self._trees: dict[object, Tree] = {}
        # Slices of the calls that library calls compute.
        self._slices: dict[Extents, int] = {}

    @cached_property
    def cuttable(self) -> bool:
        """Whether it may be cut at some sizes; static tables decide that alone."""
        return not self.static and self.bound.dtype.is_floating_point and bool(cuts_of(self.bound))

    def of(self, tensors: Sequence[Tensor], extents: Extents) -> Executable:
        """Return what runs it at these sizes: its program, or those of the statements that it is cut into."""
        tree, whole = self.decided(tensors, extents)
        if tree.cut is None:
            return self.alone(whole)
        options, parts, reason = self.options, tree.parts(whole), "the statement runs as"
        costs = total(parts, options), total((whole,), options)
        found = one_function([(self, tree, whole, range(len(tensors)), 0)], reason)
        if isinstance(found, Executable):
            reason = f"{reason} {len(parts)}, in one C function"
            return replace(found, bound=self.bound, reason=reason, parts=parts, costs=costs)
        if self.static and options.backend == "c":
            # The whole statement says why it has none.
            return self.alone(whole)
        return Executable(self.bound, extents, options, "", f"{reason} {len(parts)}", None, parts=parts, costs=costs)

    def by_library(
        self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None, into: Tensor | None, room: int
    ) -> Tensor | None:
        """Compute it by library calls, a slice of one index at a time: the fallback while its code is compiled.

        Args:
            tensors: its tensors.
            extents: its sizes.
            initial: the initial value.
            into: what other statements have made of the same output; it is changed in place.
            room: bytes that the calls of a slice may read and write, which limits the memory of intermediate tensors.

        Returns:
            The output; `None`: it cannot be divided into such small slices.
        """
        # On a GPU, static tables cut nothing; on a CPU they are what is divided.
        static = self.static if self.bound.device_type == "cpu" else ()
        bound, tensors, extents = (self.bound, tensors, extents) if static else tiled(self.bound, tensors, extents)
        own = _executables_of(bound, replace(self.options, backend="eager"), self.bound.statement.text, static)
        layout, slices = bound.layout, 1 if static else own._slices.get(extents)
        if slices is None:
            tree, whole = own.decided(tensors, extents)
            slices = math.ceil(total(tree.parts(whole), own.options).moved / room)
            insert(own._slices, extents, slices, _LIMIT)
        at = max(own._divisible(), key=extents.indices.__getitem__, default=-1) if slices > 1 else -1
        extent, axes = (extents.indices[at], layout.written[at]) if at >= 0 else (1, ())
        if extent < slices:
            return None
        runs, step, result = dict[int, Run](), extent // max(slices, 1), into
        for begin in range(0, extent, step):
            size = min(step, extent - begin)
            given, output, inner = [*tensors], [*extents.output], [*extents.indices]
            start = initial if initial is None or result is None else result
            if at >= 0:
                inner[at] = size
                for place, axis in layout.plain[at]:
                    given[place] = given[place].narrow(axis, begin, size)
                for axis in axes:
                    output[axis] = size
                    start = None if initial is None else initial.narrow(axis, begin, size)
            run = runs.get(size)
            if run is None:
                part = Extents(tuple(inner), tuple(output))
                run = runs[size] = own.of(given, part).prepare(given, part, start)
            made = run(given, start)
            if axes:
                result = made.new_zeros(extents.output) if result is None else result
                result.narrow(axes[0], begin, size).add_(made)
            else:
                result = made if result is None or start is not None else result.add_(made)
        return result

    def _divisible(self) -> list[int]:
        """The indices by whose slices it may be computed: they stand alone wherever they stand."""
        statement, layout = self.bound.statement, self.bound.layout
        within = {
            str(term.atom)
            for access in statement.accesses()
            for subscript in access.subscripts
            for term in subscript.terms
            if subscript.plain is None
        }
        sums = statement.combining.adds and not self.bound.epilogue
        return [
            at
            for at, (name, axes) in enumerate(zip(layout.indices, layout.written, strict=True))
            if name not in within and (len(axes) == 1 or (sums and not axes))
        ]

    def in_c(
        self, tree: Tree, whole: Part, number: int, places: Sequence[int], output: int, made: int
    ) -> tuple[CPart, ...] | None:
        """The statements for a C function; `None`: it may have none, or is cut where sizes decide.

        Args:
            tree: what is decided of it.
            whole: at its sizes.
            number: of the statement among those of the function.
            places: of its tensors among those of a call.
            output: the number of what it writes.
            made: the number of an intermediate tensor.
        """
        cut, parts, layout = tree.cut, tree.parts(whole), self.bound.layout
        every = [self] if cut is None else [Executables(part.bound, self.options, part.static) for part in parts]
        if (cut and not self.static) or any(own.backend != "c" for own in every):
            return None
        position = {name: (number, at) for at, name in enumerate(layout.indices)}
        place, fresh = dict(zip(layout.tensors, places, strict=True)), dict[str, Axis | int]()
        if cut is not None:
            place[cut.intermediate], fresh = -1 - made, cut.fresh
        limits = zip(layout.indices, limits_in_c(self.bound, self.static), strict=True)
        fixed = {*fresh, *(name for name, most in limits if most > 0)}
        found: list[CPart] = []
        for part, own in zip(parts, every, strict=True):
            names, sizes, shape = part.bound.layout.indices, part.extents.indices, None
            limits = zip(own.own.layout.indices, names, sizes, limits_in_c(own.own, own.tables), strict=True)
            static = tuple([(short, n) for short, name, n, most in limits if n <= most and name in fixed])
            if cut is not None and part.writes:
                axes = zip(cut.shape, part.sizes.output, strict=True)
                shape = tuple([position[of] if isinstance(of, str) else extent for of, extent in axes])
            where = tuple([place.get(name, NOWHERE) for name in part.bound.layout.tensors])
            extents = tuple([n if name in fresh else position[name] for name, n in zip(names, sizes, strict=True)])
            bound, written = replace(own._known, static=static), output if shape is None else made
            found.append(CPart(bound, own.tables, where, written, extents, shape))
        return tuple(found)

    def decided(
        self, tensors: Sequence[Tensor], extents: Extents, hint: Callable[[int], int] = int
    ) -> tuple[Tree, Part]:
        """What is decided for a call, and the statement at its sizes.

        `hint` is the number by which to choose for a size.
        """
        whole = Part(self.bound, sizes_of(self.bound, tensors, extents), "", self.static)
        if not (self.static or self.cuttable):
            return WHOLE, whole
        hinted = sizes_of(self.bound, tensors, extents, hint)
        every = [*hinted.indices.values(), *hinted.output, *chain.from_iterable(hinted.shapes.values())]
        # Some cuts need axes of one extent. Programs are forgotten together, so that a test or a user who clears the
        # cache sees all of it made again.
        bucket = (generation(), *[(size * size).bit_length() for size in every], *map(every.index, every))
        # Tables are cut for the sizes of a call.
        tree = None if self.static else self._trees.get(bucket)
        if tree is None:
            tree = WHOLE if 0 in every else decide(replace(whole, sizes=hinted), self.options, tensors)
            if tree is None:
                return WHOLE, whole
            insert(self._trees, bucket, tree, _LIMIT)
        return tree, whole

    def alone(self, whole: Part) -> Executable:
        """Return the program for the sizes of a call, compiled now or cached under its canonical form."""
        reason, options, refused, extents = self.reason, self.options, "", whole.extents
        if self.backend == "c":
            require_compiler(self.bound)
            found = one_function([(self, WHOLE, whole, range(len(self.bound.layout.tensors)), 0)], reason)
            if isinstance(found, Executable):
                return found
            refused, reason = f"no C function can be printed: {found}", f"library calls, as C has no {found}"
        elif self.backend == "triton":
            if self.own.device_type != "cuda":
                require_triton(self.bound)
            try:
                return self._generated(extents)
            except FormError as error:
                refused = f"no kernel can be generated: {error}"
                reason = f"library calls, as there is no generated kernel: {error}"
        if refused and options.backend == self.backend:
            fix = 'choose Options(backend="auto").'
            raise InsumFormatError(refused, expression=self.bound.statement.text, fix=fix)
        return from_graph(self.own, extents, options, reason)

    def _generated(self, extents: Extents) -> Executable:
        """The program of generated kernels.

        Raises:
            FormError: the statement is not of the generator's kind.
        """
        precision, tables, options = torch.get_float32_matmul_precision(), dict(self.tables), self.options
        bound = replace(self.own, static=fixed_extents(self.own, options, frozenset(tables), extents))

        def build() -> Executable:
            sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
            form = make_form(bound, sizes, extents.output, tables, deterministic=options.deterministic)
            return Executable(bound, extents, options, "triton", self.reason, Generated(form, tables, options))

        return _cached(shared_key(bound, options, "triton", precision, self.tables), build)


# Of a statement of a function: what runs it, what is decided of it, at its sizes; the places of its tensors among those
# of a call; the number of what it writes.
Decided = tuple[Executables, Tree, Part, Sequence[int], int]


def one_function(statements: Sequence[Decided], reason: str) -> Executable | str | None:
    """The program of one C function of some statements, or why there is none; `None`: it may have none.

    Args:
        statements: these, in order; together they read all tensors of a call.
        reason: why it is C.
    """
    parts: list[CPart] = []
    firsts: dict[object, int] = {}
    count = 1 + max(output for *_, output in statements)
    for number, (own, tree, whole, places, output) in enumerate(statements):
        found = own.in_c(tree, whole, number, places, output, count)
        if found is None:
            return None
        *before, last = found
        for first in before:
            # What several statements make of their tensors first is made once.
            made = firsts.setdefault((first.bound, first.tables, first.places), count)
            last = replace(last, places=tuple([-1 - made if at == -1 - count else at for at in last.places]))
            if made == count:
                parts.append(first)
                count += 1
        parts.append(last)
    (own, _, whole, *_), indices = statements[0], [len(each.bound.layout.indices) for each, *_ in statements]
    tensors = 1 + max((at for *_, places, _ in statements for at in places), default=-1)
    key = shared_key(parts[0].bound, own.options, "c", *parts, *indices, tensors)

    def build() -> Executable:
        program = CProgram(parts, indices, tensors, wait=own.options.backend == "c" or own.options.deterministic)
        return Executable(parts[0].bound, whole.extents, own.options, "c", reason, program)

    try:
        return _refused.get(key) or _cached(key, build)
    except NotInC as error:
        insert(_refused, key, str(error), CACHE_LIMIT)
        return str(error)


def from_graph(bound: Bound, extents: Extents, options: Options, reason: str) -> Executable:
    """The program of torch's library calls."""
    bound = without_unused_facts(bound)
    return _cached(shared_key(bound, options, "eager"), lambda: _build(bound, extents, options, reason))


def _find(key: CacheKey) -> Executable | None:
    global _hits
    with _lock:
        program = _cache.get(key)
        if program is not None:
            _cache.move_to_end(key)
            _hits += 1
        return program


def _cached(key: CacheKey, build: Callable[[], Executable]) -> Executable:
    """Return the program of a key, built once; nothing else waits while it is built."""

    def make() -> Executable:
        global _misses
        begun, begin = _generation, time.perf_counter()
        program = build()
        program.compile_seconds = time.perf_counter() - begin
        with _lock:
            _misses += 1
            # What was cleared in the meantime stays so.
            if begun == _generation:
                _cache[key] = program
            while len(_cache) > CACHE_LIMIT:
                _cache.popitem(last=False)
        return program

    return _building.get(key, lambda: _find(key), make)


def in_names_of(program: Executable, bound: Bound) -> Executable:
    """Return a program as it is explained to the user of a statement: in its names, planned for the same sizes."""
    own = named_as(bound, program.bound)
    if isinstance(program.run, Generated):
        return replace(program, bound=own, run=program.run.named(own))
    if isinstance(program.run, CProgram):
        return replace(program, bound=own)
    own = without_unused_facts(own)
    return replace(program, bound=own, run=library_calls_of(own, program.extents, program.options, compiled=False))


def _build(bound: Bound, extents: Extents, options: Options, reason: str) -> Executable:
    library = library_calls_of(bound, extents, options, compiled=False)
    return Executable(bound, extents, options, "eager", reason, library)


# Statements that run as several.


def _one_by_one(program: Executable, tensors: Sequence[Tensor], initial: Tensor | None) -> Run:
    """Return what runs the parts of a statement on tensors of these shapes, one after the other."""
    names, tables = program.bound.layout.tensors, _tables_of(program)
    runs = [(part, _shared(program, part, run)) for part, _, _, run in stages(program, tensors, initial)]

    def run(tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
        return run_parts(runs, {**dict(zip(names, tensors, strict=True)), **tables}, initial)

    return run


def _tables_of(program: Executable) -> dict[str, Tensor]:
    """The tables that a cut made, for library calls."""
    own, dtype = program.bound.layout.tensors, program.bound.dtype
    return {n: table.tensor(dtype) for part in program.parts for n, table in part.static if n not in own}


def stages(
    program: Executable, tensors: Sequence[Tensor], initial: Tensor | None
) -> Iterator[tuple[Part, Executable, list[Tensor], Run]]:
    """The parts of a statement with their programs, tensors of the right shapes, and what runs them on such tensors."""
    named = {**dict(zip(program.bound.layout.tensors, tensors, strict=True)), **_tables_of(program)}
    for part in program.parts:
        named |= {each.clear.name: named[each.clear.place.access.name] for each in part.clears}
        operands = [named[name] for name in part.bound.layout.tensors]
        start = None if part.writes or part.unwritten else initial
        bound = replace(part.bound, has_initial=start is not None)
        # What one C function is compiled for runs as library calls until then.
        options = replace(program.options, backend="eager") if part.static else program.options
        own = _executables_of(bound, options, bound.statement.text).alone(part)
        yield part, own, operands, own.prepare(operands, part.extents, start)
        if part.writes:
            named[part.writes] = tensors[0].new_empty(part.sizes.output, dtype=program.bound.dtype)


@lru_cache(maxsize=1024)
def _executables_of(bound: Bound, options: Options, text: str, static: Tables = ()) -> Executables:
    """Those of a statement; of equal ones each has its own text, which errors show."""
    return Executables(bound, options, static)


# What the statements of a graph made first, for those that begin with the same; `None`: nothing is shared.
sharing: ContextVar[dict[Hashable, tuple[Tensor, Sequence[Tensor]]] | None] = ContextVar("sharing", default=None)


def _shared(program: Executable, part: Part, run: Run) -> Run:
    """What runs a part; what another statement of the same graph has made of the same tensors is not made again."""
    own = set(program.bound.layout.tensors)
    if not part.writes or part.clears or part.unwritten or not own.issuperset(part.bound.layout.tensors):
        return run
    written, factors = part.bound.statement.output.subscripts, part.bound.statement.factors
    key = tuple(map(str, written)), tuple(map(str, factors)), part.sizes.output, part.bound.drop_outside

    def shared(operands: Sequence[Tensor], initial: Tensor | None) -> Tensor:
        made = sharing.get()
        # What is made while launches are collected is zero.
        if made is None or collecting() is not None:
            return run(operands, initial)
        own = (key, *map(id, operands))
        if own not in made:
            # Operands are kept, so that no other tensor has their identity.
            made[own] = run(operands, initial), operands
        return made[own][0]

    return shared


def run_parts(
    runs: Iterable[tuple[Part, Run]], named: dict[str, Tensor], initial: Tensor | None, *, traced: bool = False
) -> Tensor:
    """Compute the parts of a statement, one after the other.

    Args:
        runs: each part, and what runs it on its tensors and an initial value.
        named: the tensors of the whole and the tables of its parts, by name; what parts make is added.
        initial: the initial value of the whole.
        traced: torch records what is computed.
    """

    def unread(cells: UnreadCells) -> Tensor | None:
        return cells.unread(named, result.device) if traced else cells.kept(named)

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
