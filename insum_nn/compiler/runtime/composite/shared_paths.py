"""Several programs on the same tensors, path by path, so that they share what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.runtime.composite.path_program import PathProgram, Run, run_together
from insum_nn.compiler.runtime.dispatch import Ready, index_versions, prepare
from insum_nn.compiler.runtime.execution import generation
from insum_nn.compiler.runtime.program import Program
from insum_nn.dtypes import is_widened
from insum_nn.tensor_cache import insert

__all__ = ["SharedPaths"]

Shape = Sequence[int]
Named = Sequence[Mapping[str, Tensor]]
# Kinds of calls that are kept ready.
_LIMIT = 64


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What runs a kind of call, and its index tensors, of which it was made; `None`: the programs run one by one."""

    run: Run | None = None
    read: tuple[tuple[int, str], ...] = ()
    versions: Ready | None = None

    def holds(self, named: Named) -> bool:
        tensors: list[Tensor] = []
        for at, name in self.read:
            tensors.append(named[at][name])
        return self.versions is None or self.versions.holds(tensors)


class SharedPaths:
    """Programs over static tables that are called together and record no gradients.

    Args:
        programs: one or more; index tensors of one name are the same in all of them, but for static ones.
        outputs: for each, a name of the tensor that it adds to; those of one name add up.
    """

    # As of `FusedPrograms`: nothing was chosen that an explanation would have to show.
    reason = ""
    # Every tensor is read at every call.
    reads_all = True

    def __init__(self, programs: Sequence[Program], outputs: Sequence[Hashable]) -> None:
        self.programs = tuple(programs)
        self.outputs = tuple(outputs)
        self._factors = [
            tuple(
                name
                for name in program.spec.layout.tensors
                if name in program.spec.layout.value_tensors and name not in dict(program.spec.static)
            )
            for program in programs
        ]
        self._calls: dict[Hashable, _Prepared] = {}

    def together(
        self, named: Named, shapes: Callable[[], Sequence[Shape]], key: Hashable, separately: object = None
    ) -> list[Tensor] | None:
        """Run all programs; `None`: they are no dense products of paths, and run one by one.

        Args:
            named: the tensors of each.
            shapes: makes those of all outputs, where the kind of call is new.
            key: what decides shapes, dtypes and devices of all these: a promise that they are plain tensors and that
                no mode follows the call.
            separately: not read: products of paths are not measured against programs that run one by one.

        Returns:
            A tensor for each name of an output, in the order of their first programs.
        """
        full = (key, self._same(named))
        call = self._calls.get(full)
        if call is None or (call.versions is not None and not call.holds(named)):
            with torch.no_grad():
                call = self._prepare(named, shapes())
            insert(self._calls, full, call, _LIMIT)
        if call.run is None:
            return None
        with torch.no_grad():
            return call.run(named)

    def _same(self, named: Named) -> tuple[int, ...]:
        """Which factors are the same: a number for each."""
        places: dict[Hashable, int] = {}
        objects: dict[int, int] = {}
        found: list[int] = []
        for own, names in zip(named, self._factors, strict=True):
            for name in names:
                tensor = own[name]
                place = objects.get(id(tensor))
                if place is None:
                    # `same_memory`, written out.
                    memory = tensor.data_ptr(), tensor.shape, tensor.stride()
                    place = objects[id(tensor)] = places.setdefault(memory, len(places))
                found.append(place)
        return tuple(found)

    def _prepare(self, named: Named, shapes: Sequence[Shape]) -> _Prepared:
        found: list[PathProgram] = []
        read: list[tuple[int, str]] = []
        versions: list[tuple[int, object, int, bool]] = []
        seen: set[int] = set()
        for at, (program, own, shape) in enumerate(zip(self.programs, named, shapes, strict=True)):
            spec = program.spec
            tensors = [own[name] for name in spec.layout.tensors]
            extents = resolve_extents(spec.statement, tensors, None, program.sizes, shape)
            if 0 in extents.indices or 0 in extents.output or any(t.numel() == 0 for t in tensors):
                return _Prepared()
            chosen = prepare(spec, tensors, None, extents)[1]
            own_versions = index_versions(spec, tensors)
            if not isinstance(chosen, PathProgram) or own_versions is None or spec.options.validate:
                return _Prepared()
            found.append(chosen)
            for place, ref, version, spoken_for in own_versions:
                if id(tensors[place]) not in seen:
                    seen.add(id(tensors[place]))
                    versions.append((len(read), ref, version, spoken_for))
                    read.append((at, spec.layout.tensors[place]))
        if not found:
            return _Prepared()
        run = run_together(found, named, self.outputs)
        if run is not None and is_widened(found[0].bound.dtype):
            run = _narrowed(run, found[0].bound.dtype)
        ready = Ready(run, tuple(versions), generation())  # type: ignore[arg-type]
        return _Prepared() if run is None else _Prepared(run, tuple(read), ready)


def _narrowed(run: Run, dtype: torch.dtype) -> Run:
    """What computes the same, rounded to a half type."""
    return lambda named: [made.to(dtype) for made in run(named)]
