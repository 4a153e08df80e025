"""Plans made callable: the cache of programs, and eager execution in pieces."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from insum_nn.compiler.codegen import inductor
from insum_nn.compiler.forms import launch
from insum_nn.compiler.forms.form import FormError
from insum_nn.compiler.forms.generated import Generated
from insum_nn.compiler.forms.keyed import Keyed, generate
from insum_nn.compiler.lang.bind import Bound, Extents, Layout
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.fx_lowering import extent_arguments, lower
from insum_nn.compiler.plans.plan import Dot, Load, Plan
from insum_nn.compiler.plans.planner import UNROLL_LIMIT, is_feature, make_plan, slot_indices
from insum_nn.compiler.runtime import library_calls
from insum_nn.compiler.runtime.backends import backend_without_generator, choose_backend, require_triton
from insum_nn.compiler.runtime.row_partition import clear_owners
from insum_nn.compiler.schedule import budget
from insum_nn.errors import InsumFormatError
from insum_nn.facts import IndexFacts, StaticTable

__all__ = [
    "CACHE_LIMIT",
    "CacheInfo",
    "Executable",
    "Library",
    "cache_info",
    "clear_cache",
    "executable",
    "from_graph",
    "generation",
    "library_calls_of",
    "piece_length",
    "split_arguments",
]

# Programs kept; the least recently used one leaves first.
CACHE_LIMIT = 512
# Bytes of gathered operands per piece of an eager program: what a core's cache holds.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Library:
    """A statement as calls of torch's library, which run as they are or are compiled by Inductor.

    Attributes:
        plan: its steps.
        graph: the FX module that runs, or that Inductor compiles.
        pieces: the same for a range of one index, added to the output; `None` where it always runs at once.
    """

    plan: Plan
    graph: fx.GraphModule
    pieces: fx.GraphModule | None = None


@dataclass(slots=True)
class Executable:
    """A compiled statement, and how it came about.

    Attributes:
        bound: the statement, with the extents that are compiled in.
        backend: `"eager"`, `"inductor"` or `"triton"`.
        reason: why this back end.
        run: what computes it.
        compile_seconds: time of planning and lowering, and of the first call where that compiles.
        library: the library calls; `None` for generated kernels.
    """

    bound: Bound
    options: Options
    backend: str
    reason: str
    run: Callable[..., Tensor] | Generated | Keyed
    compile_seconds: float
    library: Library | None = None
    warm: bool = False

    def __call__(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Tensor:
        """Run on tensors in the layout's order."""
        return self.prepare(tensors, extents, start)(tensors, start)

    def prepare(
        self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None
    ) -> Callable[[Sequence[Tensor], Tensor | None], Tensor]:
        """Everything that sizes decide, decided: what is returned runs on any tensors of these shapes."""
        run = self._prepared(tensors, extents, start)
        epilogue, dtype = self.bound.epilogue, self.bound.dtype
        if isinstance(self.run, Generated | Keyed) or not epilogue:
            return run
        return lambda tensors, start: epilogue(run(tensors, start), dtype)

    def _prepared(
        self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None
    ) -> Callable[[Sequence[Tensor], Tensor | None], Tensor]:
        run = self.run
        if isinstance(run, Generated | Keyed):
            return run.prepare(tensors, extents, start)
        arguments = _integers(self.bound, extents)
        library, options = self.library, self.options
        step = None if library is None else piece_length(library, extents)
        if library is not None and step is not None:
            return lambda tensors, start: _run_pieces(library, options, tensors, arguments, extents, start, step)
        if isinstance(run, _Inductor):
            inductor_run = run
            begin = time.perf_counter()
            run = inductor_run.variant([*tensors, *arguments, *([] if start is None else [start])])
            self.compile_seconds += 0.0 if self.warm else time.perf_counter() - begin
            self.warm = True
            note = inductor_run.note
            if note and note not in self.reason:
                self.reason += f"; {note}"

        def call(tensors: Sequence[Tensor], start: Tensor | None) -> Tensor:
            return run(*tensors, *arguments) if start is None else run(*tensors, *arguments, start)

        return call


def _integers(bound: Bound, extents: Extents) -> tuple[int, ...]:
    indices, axes = extent_arguments(bound)
    if not indices and not axes:
        return ()
    names = bound.layout.indices
    return (*(extents.indices[names.index(i)] for i in indices), *(extents.output[a] for a in axes))


def piece_length(library: Library, extents: Extents) -> int | None:
    """How many values of the cut index fit one piece; `None` when everything fits."""
    plan = library.plan
    if library.pieces is None:
        return None
    sizes = dict(zip(plan.bound.layout.indices, extents.indices, strict=True))
    width = plan.bound.dtype.itemsize
    cells = sum(
        math.prod(sizes[x] for x in step.labels if x != plan.chunk)
        for step in plan.steps
        if isinstance(step, Load) and step.gather and plan.chunk in step.labels
    )
    # A batched product is one call for each piece, whose rows are added by as many calls as there are.
    room = 2 * _PIECE_BYTES if any(isinstance(step, Dot) for step in plan.steps) else _PIECE_BYTES
    step = max(1, room // max(1, cells * width))
    assert plan.chunk is not None
    return step if 2 * step <= sizes[plan.chunk] else None


def _run_pieces(
    library: Library,
    options: Options,
    tensors: Sequence[Tensor],
    arguments: Sequence[int],
    extents: Extents,
    start: Tensor | None,
    step: int,
) -> Tensor:
    """Add the statement's contributions range by range into one output."""
    plan = library.plan
    bound = plan.bound
    layout = bound.layout
    assert plan.chunk is not None
    assert library.pieces is not None
    position = layout.indices.index(plan.chunk)
    wide = bound.dtype in (torch.float16, torch.bfloat16) and options.accumulate == "float32"
    dtype = torch.float32 if wide or _direct_half(plan) else bound.dtype
    device = tensors[0].device if tensors else start.device if start is not None else None
    # Library calls add a row at a time, fastest where rows are what lies outermost.
    outer = plan.combine.scattered[0] if len(plan.combine.scattered) == 1 else 0
    shape = list(extents.output)
    if outer:
        shape.insert(0, shape.pop(outer))
    output = (torch.zeros if start is None else torch.empty)(shape, dtype=dtype, device=device)
    if outer:
        output = output.movedim(0, outer)
    if start is not None:
        output.copy_(start.detach())
    axes = [[axis for where, axis in layout.plain[position] if where == i] for i in range(len(tensors))]
    written = [axis for axis, name in enumerate(layout.output_plain) if name == plan.chunk]
    total = extents.indices[position]
    for begin in range(0, total, step):
        length = min(step, total - begin)
        cut = [_narrow(t, own, begin, length) for t, own in zip(tensors, axes, strict=True)]
        library.pieces(*cut, *arguments, _narrow(output, written, begin, length))
    return output.to(bound.dtype).contiguous()


def _direct_half(plan: Plan) -> bool:
    return plan.combine.mode == "direct" and plan.bound.dtype in (torch.float16, torch.bfloat16)


def _narrow(tensor: Tensor, axes: Sequence[int], begin: int, length: int) -> Tensor:
    for axis in axes:
        tensor = tensor.narrow(axis, begin, length)
    return tensor


_cache: OrderedDict[tuple[object, ...], Executable] = OrderedDict()
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How the cache of programs has been used since it was cleared."""

    hits: int
    misses: int
    size: int
    limit: int


_hits = 0
_misses = 0
_generation = 0


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
    """Forget every compiled program and every remembered sparse structure."""
    global _hits, _misses, _generation
    with _lock:
        _generation += 1
        _cache.clear()
        _values.clear()
        _hits = _misses = 0
    library_calls.clear_structures()
    clear_owners()
    budget.forget()


def _without_unused_facts(bound: Bound) -> Bound:
    """Facts that no lowering reads must not tell programs apart."""
    return replace(bound, facts=tuple(IndexFacts(masked=f.masked) for f in bound.facts))


def executable(
    bound: Bound,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    extents: Extents,
    options: Options,
    static: tuple[tuple[str, StaticTable], ...] = (),
) -> Executable:
    """The program that the rule names for a bound statement, compiled now or remembered."""
    backend, reason = choose_backend(bound, options, tables=bool(static))
    if backend == "triton":
        require_triton(bound)
        try:
            return _generated(bound, tensors, extents, options, reason, static)
        except FormError as error:
            if options.backend == "triton":
                raise InsumFormatError(
                    f"no kernel can be generated: {error}",
                    expression=bound.statement.text,
                    fix='choose Options(backend="auto").',
                ) from error
            backend, other = backend_without_generator(options)
            reason = f"{other}; no generated kernel: {error}"
    return from_graph(bound, tensors, extents, options, backend, reason)


def from_graph(
    bound: Bound, tensors: Sequence[Tensor], extents: Extents, options: Options, backend: str, reason: str
) -> Executable:
    """The program of torch's library calls, or of Inductor."""
    bound = _without_unused_facts(bound)
    key: tuple[object, ...] = (bound, options, backend)
    if backend == "inductor":
        bound = _specialise(bound, extents, options)
        precision = torch.get_float32_matmul_precision()
        key = (bound, options, backend, precision, inductor.size_class(bound, tensors, extents))
    return _remembered(key, lambda: _build(bound, extents, options, backend, reason))


def _remembered(key: tuple[object, ...], build: Callable[[], Executable]) -> Executable:
    global _hits, _misses
    with _lock:
        program = _cache.get(key)
        if program is not None:
            _cache.move_to_end(key)
            _hits += 1
            return program
        program = build()
        _misses += 1
        _cache[key] = program
        while len(_cache) > CACHE_LIMIT:
            _cache.popitem(last=False)
        return program


def _generated(
    bound: Bound,
    tensors: Sequence[Tensor],
    extents: Extents,
    options: Options,
    reason: str,
    static: tuple[tuple[str, StaticTable], ...],
) -> Executable:
    """The program of generated kernels.

    Raises:
        FormError: the statement is not of the generator's kind.
    """
    bound = _specialise(bound, extents, options, frozenset(name for name, _ in static))
    precision = torch.get_float32_matmul_precision()

    def build() -> Executable:
        begin = time.perf_counter()
        sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
        generated = generate(bound, sizes, extents.output, dict(static), options)
        return Executable(bound, options, "triton", reason, generated, time.perf_counter() - begin)

    return _remembered((bound, options, "triton", precision, static), build)


# Extents that a statement was compiled for, by statement and index; past the limit an index stays dynamic.
_VALUES_LIMIT = 4
_STATEMENTS_LIMIT = 4096
_values: dict[tuple[object, str], set[int]] = {}


def _specialise(bound: Bound, extents: Extents, options: Options, tables: frozenset[str] = frozenset()) -> Bound:
    """Fix the extents that are properties of a model rather than of its data, and those of 1, which broadcast.

    These are slots of a group, and dense feature axes: axes that no index tensor has and that some tensor carries
    behind its first axis. An index that keeps changing is compiled for every extent. Axes of static tables are fixed.
    """
    layout = bound.layout
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    fixed = {name: size for name, size in sizes.items() if size == 1}
    if options.specialize:
        accesses = [access for access in bound.statement.accesses() if access.name in tables]
        fixed |= {index.name: sizes[index.name] for access in accesses for index in access.indices()}
    if (bound.device_type == "cuda" or launch.interpreted()) and options.specialize:
        slots = {name for name in slot_indices(bound) if sizes[name] <= UNROLL_LIMIT}
        for name in layout.indices:
            if name in slots or is_feature(layout, name) or _in_written_rows(layout, name):
                if len(_values) >= _STATEMENTS_LIMIT:
                    _values.clear()
                seen = _values.setdefault((bound, name), set())
                if len(seen) < _VALUES_LIMIT:
                    seen.add(sizes[name])
                if sizes[name] in seen:
                    fixed[name] = sizes[name]
    return replace(bound, static=tuple(sorted(fixed.items())))


def _in_written_rows(layout: Layout, index: str) -> bool:
    """Whether an index that no index tensor has lies inside of rows that the output is written by, as features do."""
    places = layout.plain[layout.indices.index(index)]
    if any(layout.tensors[where] in layout.index_tensors for where, _ in places):
        return False
    written = layout.output_plain
    return index in written and None in written[: written.index(index)]


def library_calls_of(bound: Bound, extents: Extents, options: Options, *, compiled: bool) -> Library:
    """Write a statement as library calls.

    Args:
        bound: the statement.
        extents: sizes of a call, by which the order of the products is chosen.
        options: compile options.
        compiled: for Inductor.
    """
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    plan = make_plan(bound, sizes, options, compiled=compiled)
    graph = lower(plan, options, compiled=compiled)
    return Library(plan, graph, None if plan.chunk is None else lower(plan, options, accumulate=True))


def _build(bound: Bound, extents: Extents, options: Options, backend: str, reason: str) -> Executable:
    begin = time.perf_counter()
    library = library_calls_of(bound, extents, options, compiled=backend == "inductor")
    run = _Inductor(library.graph, bound, options) if backend == "inductor" else library.graph
    return Executable(bound, options, backend, reason, run, time.perf_counter() - begin, library)


class _Inductor:
    """A graph compiled by Inductor: one variant per set of assumptions about sizes that Inductor made."""

    def __init__(self, graph: fx.GraphModule, bound: Bound, options: Options) -> None:
        self.graph = graph
        self.bound = bound
        self.options = options
        self.variants: list[inductor.Compiled] = []
        self.note = ""

    def __call__(self, *args: object) -> Tensor:
        return self.variant(args)(*args)

    def variant(self, args: Sequence[object]) -> Callable[..., Tensor]:
        """The code for arguments of these sizes, compiled now if there is none."""
        # One memory layout per program, or each new stride pattern would need another one.
        flat = [a.detach().contiguous() if isinstance(a, Tensor) else a for a in args]
        with torch.no_grad(), _lock:
            found = next((v for v in self.variants if v.fits(flat)), None)
            if found is None:
                found = self.compile(flat)
                self.variants.append(found)
            self.note = found.note
        return _contiguous(found)

    def compile(self, flat: Sequence[object]) -> inductor.Compiled:
        tensors, integers, start = split_arguments(self.bound, flat)
        sizes = (
            len(self.variants),
            inductor.size_class(self.bound, tensors, _sizes_of(self.bound, tensors, integers, start)),
        )
        return inductor.compile_graph(self.graph, self.bound, self.options, integers, tensors, start, sizes)


def _contiguous(compiled: inductor.Compiled) -> Callable[..., Tensor]:
    def call(*args: object) -> Tensor:
        with torch.no_grad():
            return compiled(*[a.detach().contiguous() if isinstance(a, Tensor) else a for a in args])

    return call


def _sizes_of(
    bound: Bound, tensors: Sequence[Tensor], integers: Sequence[tuple[str, int]], start: Tensor | None
) -> Extents:
    given = dict(integers)
    layout = bound.layout
    static = dict(bound.static)
    sizes = {
        name: tensors[places[0][0]].shape[places[0][1]]
        if places
        else static[name]
        if name in static
        else given[f"extent_{name}"]
        for name, places in zip(layout.indices, layout.plain, strict=True)
    }
    output = tuple(
        given[f"output_extent_{axis}"] if name is None else sizes[name] for axis, name in enumerate(layout.output_plain)
    )
    return Extents(tuple(sizes.values()), output)


def split_arguments(bound: Bound, flat: Sequence[object]) -> tuple[list[Tensor], list[tuple[str, int]], Tensor | None]:
    """A graph's flat arguments as tensors, named integers, and the starting value."""
    indices, axes = extent_arguments(bound)
    names = [*(f"extent_{name}" for name in indices), *(f"output_extent_{axis}" for axis in axes)]
    count = len(bound.layout.tensors)
    tensors = [a for a in flat[:count] if isinstance(a, Tensor)]
    integers = [
        (name, a) for name, a in zip(names, flat[count : count + len(names)], strict=True) if isinstance(a, int)
    ]
    start = flat[-1] if bound.has_start else None
    return tensors, integers, start if isinstance(start, Tensor) else None
