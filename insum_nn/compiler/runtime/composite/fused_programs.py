"""Several programs on the same tensors as one C function, or as one kernel of several outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.runtime.artifact import Artifact
from insum_nn.compiler.runtime.program import Program
from insum_nn.tensor_cache import insert

__all__ = ["FusedPrograms"]

Sizes = tuple[int, ...]
Named = Sequence[Mapping[str, Tensor]]
# Kinds of calls that are kept ready.
_LIMIT = 64


@dataclass(frozen=True, slots=True)
class _Kind:
    """What runs a kind of call.

    Attributes:
        artifact: it.
        tables: the static tables among its tensors, which stay.
        sources: of the other tensors their places, and of which program they are, under which name.
        extents, shapes: its sizes.
    """

    artifact: Artifact
    tables: Sequence[Tensor]
    sources: Sequence[tuple[int, int, str]]
    extents: tuple[Sizes, ...]
    shapes: tuple[Sizes, ...]


class FusedPrograms:
    """Programs that are called together and record no gradients.

    Tensors of one name must be the same in all of them, but for static ones, of which each program has its own.

    Args:
        programs: one or more, of one set of options.
        outputs: for each, a name of the tensor that it adds to; those of one name add up. By default each has its own.
        deterministic: every run is to give the same bits.

    Attributes:
        programs, outputs: the same.
        reason: how one kernel was decided on last, or why there is none; "" for C functions.
    """

    def __init__(
        self, programs: Sequence[Program], outputs: Sequence[Hashable] = (), *, deterministic: bool = False
    ) -> None:
        self.programs, self.outputs = tuple(programs), tuple(outputs)
        numbers: dict[Hashable, int] = {}
        self._outputs = tuple([numbers.setdefault(name, len(numbers)) for name in outputs or range(len(programs))])
        self._deterministic = deterministic or any(p.options.deterministic for p in programs)
        self._artifacts: dict[Hashable, Artifact] = {}
        self._kinds: dict[Hashable, _Kind | None] = {}
        self._last: Artifact | None = None

    @property
    def reason(self) -> str:
        return "" if self._last is None else self._last.reason

    def together(self, named: Named, shapes: Callable[[], Sequence[Sizes]], key: Hashable) -> list[Tensor] | None:
        """Run all programs; `None`: they are to run one by one, or until a C function is compiled.

        Args:
            named: the tensors of each.
            shapes: makes those of all outputs, where the kind of call is new.
            key: what decides shapes, dtypes and devices of all these: a promise that they are plain tensors and that
                no mode follows the call.

        Returns:
            A tensor for each name of an output, in the order of their first programs.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.together(named, shapes, key)
        if key in self._kinds:
            kind = self._kinds[key]
        else:
            kind = self._kind(named, shapes())
            insert(self._kinds, key, kind, _LIMIT)
        if kind is None:
            return None
        self._last = kind.artifact
        pool = list(kind.tables)
        for slot, at, name in kind.sources:
            pool[slot] = named[at][name]
        made = kind.artifact.run(pool, kind.extents, kind.shapes, None)
        return None if made is None else list(made)

    def _kind(self, named: Named, shapes: Sequence[Sizes]) -> _Kind | None:
        """Find the sizes of a kind of call, and which tensors are the same in several programs."""
        slots: dict[str, list[tuple[int, Tensor]]] = {}
        sources: list[tuple[int, int, str]] = []
        tables: list[Any] = []
        pool: list[Tensor] = []
        places: list[tuple[int, ...]] = []
        extents: list[Sizes] = []
        outputs: dict[int, Sizes] = {}
        for at, (program, own, shape, output) in enumerate(
            zip(self.programs, named, shapes, self._outputs, strict=True)
        ):
            spec = program.spec
            static = dict(spec.static)
            place: list[int] = []
            tensors = [own[name] for name in spec.layout.tensors]
            for name, tensor in zip(spec.layout.tensors, tensors, strict=True):
                same = [] if name in static else slots.setdefault(name, [])
                slot = next((slot for slot, other in same if _same(other, tensor)), None)
                if slot is None:
                    slot = len(pool)
                    pool.append(tensor)
                    tables.append(tensor if name in static else None)
                    if name not in static:
                        sources.append((slot, at, name))
                    same.append((slot, tensor))
                place.append(slot)
            found = spec.agree(tensors, program.sizes, shape)
            if found is None:
                return None
            if outputs.setdefault(output, found.output) != found.output:
                # They add to two views of one tensor.
                return None
            places.append(tuple(place))
            extents.append(found.indices)
        if not places:
            return None
        kinds = (*(t.dtype for t in pool), *places)
        artifact = self._artifacts.get(kinds)
        if artifact is None:
            specs = [program.spec for program in self.programs]
            fixed = [slot for slot, table in enumerate(tables) if table is not None]
            artifact = Artifact(specs, places, self._outputs, pool, deterministic=self._deterministic, fixed=fixed)
            insert(self._artifacts, kinds, artifact, _LIMIT)
        shapes = tuple(outputs[number] for number in sorted(outputs))
        return _Kind(artifact, tables, sources, tuple(extents), shapes) if artifact.printed else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
