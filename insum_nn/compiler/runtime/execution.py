"""Programs made callable, and their cache."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.codegen.c import NotInC
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.canonical import canonical, canonical_tables, named_as
from insum_nn.compiler.kernels.c_program import CProgram, Part, compiled_extents, known_in_c
from insum_nn.compiler.kernels.c_structures import clear_orders
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.kernels.row_partition import clear_partitions
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.printed import Run
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.backends import (
    choose_backend,
    require_compiler,
    require_triton,
)
from insum_nn.compiler.runtime.library.fixed_extents import FixedExtents
from insum_nn.compiler.runtime.library.programs import integers_of, library_calls_of, without_unused_facts
from insum_nn.compiler.schedule.form import FormError
from insum_nn.compiler.tuning.build_once import BuildOnce, CacheKey, shared_key
from insum_nn.errors import InsumFormatError
from insum_nn.facts import Tables
from insum_nn.locks import new_lock

__all__ = [
    "CACHE_LIMIT",
    "CacheInfo",
    "Executable",
    "Executables",
    "cache_info",
    "clear_cache",
    "executables_of",
    "forgets_programs",
    "from_graph",
    "generation",
    "in_names_of",
]

# Programs kept; the least recently used one leaves first.
CACHE_LIMIT = 512


@dataclass(slots=True)
class Executable:
    """A compiled statement, and how it came about; in canonical names, as statements that differ in names share it.

    Attributes:
        bound: the statement, with the extents that are compiled in.
        extents: the sizes of the call for which it was planned.
        backend: `"c"`, `"eager"` or `"triton"`.
        reason: why this back end.
        run: what computes it.
        compile_seconds: time of planning and lowering.
        library: the library calls; `None` for generated kernels.
    """

    bound: Bound
    extents: Extents
    options: Options
    backend: str
    reason: str
    run: Callable[..., Tensor] | Generated | CProgram
    compile_seconds: float
    library: CallGraph | None = None

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Run:
        """Everything that sizes decide, decided: what is returned runs on any tensors of these shapes."""
        if isinstance(self.run, Generated):
            return self.run.prepare(tensors, extents, initial)
        if isinstance(self.run, CProgram):
            options = self.options

            def library() -> Run:
                other = from_graph(replace(self.bound, static=()), extents, options, self.reason)
                # Of the tensors nothing is kept: the next call may come late, or never.
                return other.prepare((), extents, None)

            return self.run.serving(extents, library, wait=options.deterministic or options.backend == "c")
        run, arguments = self.run, integers_of(self.bound, extents)
        epilogue, dtype = self.bound.epilogue or None, self.bound.dtype

        def call(tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
            made = run(*tensors, *arguments) if initial is None else run(*tensors, *arguments, initial)
            return made if epilogue is None else epilogue(made, dtype)

        return call


@lru_cache(maxsize=1024)
def executables_of(bound: Bound, options: Options, text: str) -> Executables:
    """Those of a statement; of equal ones each has its own text, which errors show."""
    return Executables(bound, options)


_cache: OrderedDict[CacheKey, Executable] = OrderedDict()
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
        for keeper in tuple(_keepers):
            keeper.clear()
        _hits = _misses = 0
    clear_partitions()
    clear_orders()


class Executables:
    """The programs of a bound statement at all sizes: what does not depend on them is found once.

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
        names = frozenset(name for name, _ in self.tables)
        self.fixed = FixedExtents(self.own, options, names)
        # With the facts that C functions are made for.
        self._known = replace(self.own, facts=tuple(known_in_c(each.masked, each) for each in self.own.facts))
        self._keys: dict[object, CacheKey] = {}
        self._refused: dict[object, str] = {}

    def of(self, extents: Extents) -> Executable:
        """Return the program for the sizes of a call, compiled now or cached under its canonical form."""
        backend, reason, options = self.backend, self.reason, self.options
        if backend == "c":
            require_compiler(self.bound)
            found = self._in_c(extents)
            if isinstance(found, Executable):
                return found
            backend, reason = "eager", f"library calls, as C has no {found}"
        if backend != "triton":
            return from_graph(self.own, extents, options, reason)
        if self.own.device_type != "cuda":
            require_triton(self.bound)
        try:
            return self._generated(extents)
        except FormError as error:
            if options.backend == "triton":
                raise InsumFormatError(
                    f"no kernel can be generated: {error}",
                    expression=self.bound.statement.text,
                    fix='choose Options(backend="auto").',
                ) from error
            backend, reason = "eager", f"library calls, as there is no generated kernel: {error}"
        return from_graph(self.own, extents, options, reason)

    def _in_c(self, extents: Extents) -> Executable | str:
        """The program of one C function, or why there is none.

        Raises:
            InsumFormatError: there is none, and it was asked for by name.
        """
        static = compiled_extents(self.own, self.tables, extents.indices)
        why = self._refused.get(static)
        if why is None:
            key = self._keys.get(static)
            if key is None:
                key = self._keys[static] = shared_key(self._known, self.options, "c", static, self.tables)
            begin, bound = time.perf_counter(), replace(self._known, static=static)

            def build() -> Executable:
                soon = self.options.backend == "c" or self.options.deterministic
                places = tuple(range(len(bound.layout.tensors)))
                program = CProgram([Part(bound, self.tables, places)], soon=soon)
                program.find()
                seconds = time.perf_counter() - begin
                return Executable(bound, extents, self.options, "c", self.reason, program, seconds)

            try:
                return _cached(key, build)
            except NotInC as error:
                why = self._refused[static] = str(error)
        if self.options.backend == "c":
            raise InsumFormatError(
                f"no C function can be printed: {why}",
                expression=self.bound.statement.text,
                fix='choose Options(backend="auto").',
            )
        return why

    def _generated(self, extents: Extents) -> Executable:
        """The program of generated kernels.

        Raises:
            FormError: the statement is not of the generator's kind.
        """
        static, precision = self.fixed.of(extents), torch.get_float32_matmul_precision()
        key = self._keys.get((static, precision))
        if key is None:
            bound = replace(self.own, static=static)
            key = shared_key(bound, self.options, "triton", precision, self.tables)
            if len(self._keys) >= CACHE_LIMIT:
                self._keys.clear()
            self._keys[static, precision] = key

        def build() -> Executable:
            begin = time.perf_counter()
            bound = replace(self.own, static=static)
            sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
            generated = Generated(bound, sizes, extents.output, dict(self.tables), self.options)
            seconds = time.perf_counter() - begin
            return Executable(bound, extents, self.options, "triton", self.reason, generated, seconds)

        return _cached(key, build)


def from_graph(bound: Bound, extents: Extents, options: Options, reason: str) -> Executable:
    """The program of torch's library calls."""
    return _cached(_library_key(bound, options), lambda: _build(without_unused_facts(bound), extents, options, reason))


@lru_cache(maxsize=1024)
def _library_key(bound: Bound, options: Options) -> CacheKey:
    return CacheKey((without_unused_facts(bound), options, "eager"))


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
    found = _find(key)
    if found is not None:
        return found

    def make() -> Executable:
        global _misses
        begun = _generation
        program = build()
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
    library = library_calls_of(own, program.extents, program.options, compiled=False)
    return replace(program, bound=own, library=library)


def _build(bound: Bound, extents: Extents, options: Options, reason: str) -> Executable:
    begin = time.perf_counter()
    library = library_calls_of(bound, extents, options, compiled=False)
    seconds = time.perf_counter() - begin
    return Executable(bound, extents, options, "eager", reason, library.forward, seconds, library)
