"""Programs made callable, and their cache."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from insum_nn.compiler.codegen import inductor
from insum_nn.compiler.forms.form import FormError
from insum_nn.compiler.forms.generated import Generated
from insum_nn.compiler.forms.keyed import Keyed, generate
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime import library_calls
from insum_nn.compiler.runtime.backends import backend_without_generator, choose_backend, require_triton
from insum_nn.compiler.runtime.fixed_extents import fix_extents, forget_extents
from insum_nn.compiler.runtime.library import Library, extent_arguments, library_calls_of, piece_length, run_pieces
from insum_nn.compiler.runtime.row_partition import clear_owners
from insum_nn.compiler.schedule import budget
from insum_nn.errors import InsumFormatError
from insum_nn.facts import IndexFacts, StaticTable

__all__ = [
    "CACHE_LIMIT",
    "CacheInfo",
    "Executable",
    "cache_info",
    "clear_cache",
    "executable",
    "from_graph",
    "generation",
    "split_arguments",
]

# Programs kept; the least recently used one leaves first.
CACHE_LIMIT = 512


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
            return lambda tensors, start: run_pieces(library, options, tensors, arguments, extents, start, step)
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
        forget_extents()
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
        bound = fix_extents(bound, extents, options)
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
    bound = fix_extents(bound, extents, options, frozenset(name for name, _ in static))
    precision = torch.get_float32_matmul_precision()

    def build() -> Executable:
        begin = time.perf_counter()
        sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
        generated = generate(bound, sizes, extents.output, dict(static), options)
        return Executable(bound, options, "triton", reason, generated, time.perf_counter() - begin)

    return _remembered((bound, options, "triton", precision, static), build)


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
