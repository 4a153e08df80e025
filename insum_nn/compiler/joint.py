"""Several programs on the same tensors, as one kernel where that is faster: the gradients of a product, say.

    dX[Src[e],i,u] += dZ[Dst[e],k,u] * Y[e,j] * W[e,l,u]
    dY[e,j]        += dZ[Dst[e],k,u] * X[Src[e],i,u] * W[e,l,u]
    dW[e,l,u]      += dZ[Dst[e],k,u] * X[Src[e],i,u] * Y[e,j]

One of them sums rows that an index tensor owns, the others have a row for each term; `kernel_beside` says what becomes
of them. Whatever does not fit together, or was measured to be faster apart, runs program by program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler import schedule_store as store
from insum_nn.compiler.ast import Access
from insum_nn.compiler.bind import Bound, Extents, bind
from insum_nn.compiler.call import Ready, Spec, index_versions, keep, prepare
from insum_nn.compiler.execution import generation
from insum_nn.compiler.extents import resolve_extents
from insum_nn.compiler.generated import Generated
from insum_nn.compiler.gradient import fresh_name
from insum_nn.compiler.kernel_beside import with_beside
from insum_nn.compiler.kernel_form import FormError
from insum_nn.compiler.program import Program
from insum_nn.compiler.schedule_store import size_bucket
from insum_nn.compiler.tuning import WAIT, time_calls, worth_measuring
from insum_nn.facts import IndexFacts

__all__ = ["Joint"]

Shape = tuple[int, ...]
# Kinds of calls that are kept ready.
_LIMIT = 64


@dataclass(frozen=True, slots=True)
class _One:
    """A program of a joint call: its tensors in its order, and its sizes."""

    program: Program
    tensors: tuple[Tensor, ...]
    extents: Extents
    bound: Bound
    generated: Generated


@dataclass(frozen=True, slots=True)
class _Together:
    """One kernel for all.

    Attributes:
        spec: of a statement that writes what the first of them writes, and reads what any of them reads.
        static: its known extents.
        order: where the outputs stand among those of the kernel.
        generated: the kernel.
        faster: by bucket of sizes, whether it is faster than the programs one by one, and why that is known.
    """

    spec: Spec
    static: Mapping[str, int]
    order: tuple[int, ...]
    generated: Generated
    faster: dict[tuple[int, ...], tuple[bool, str]]


@dataclass(slots=True)
class _Known:
    """What runs a kind of call, on which tensors (of which program, and their names); `None`: one by one."""

    ready: Ready | None = None
    sources: tuple[tuple[int, str], ...] = ()
    order: tuple[int, ...] = ()


class Joint:
    """Programs that are called together and record no gradients.

    Tensors of one name must be the same in all of them, but for static ones, of which each program has its own.

    Args:
        programs: two or more, of one set of options.

    Attributes:
        programs: the same.
        reason: of the last kind of call that was made ready: how it runs, and why.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = tuple(programs)
        self.reason = ""
        self._known: dict[Hashable, _Known] = {}
        self._kernels: dict[Hashable, _Together | FormError] = {}
        self._lock = threading.RLock()

    def __call__(self, named: Sequence[Mapping[str, Tensor]], shapes: Sequence[Shape], key: Hashable) -> list[Tensor]:
        """Run all programs.

        Args:
            named: the tensors of each.
            shapes: of each output.
            key: what decides shapes, dtypes and devices of all these: a promise that they are plain tensors and that
                nobody looks on.
        """
        with torch.no_grad():
            full = (key, torch.get_float32_matmul_precision())
            known = self._known.get(full)
            if known is not None and known.ready is None:
                return self._apart(named, shapes)
            tensors = None if known is None else [named[at][name] for at, name in known.sources]
            if known is None or tensors is None or known.ready is None or not known.ready.holds(tensors):
                with self._lock:
                    known = self._prepared(named, shapes)
                keep(self._known, full, known, _LIMIT)
                if known.ready is None:
                    return self._apart(named, shapes)
                tensors = [named[at][name] for at, name in known.sources]
            made: Any = known.ready.run(tensors, None)
            return [made[at] for at in known.order]

    def _apart(self, named: Sequence[Mapping[str, Tensor]], shapes: Sequence[Shape]) -> list[Tensor]:
        return [p(tensors=t, out_shape=s) for p, t, s in zip(self.programs, named, shapes, strict=True)]

    def _prepared(self, named: Sequence[Mapping[str, Tensor]], shapes: Sequence[Shape]) -> _Known:
        """Decide how a kind of call runs."""
        try:
            ones = [_one(*each) for each in zip(self.programs, named, shapes, strict=True)]
            together = self._together(ones)
        except FormError as error:
            self.reason = f"one by one: {error}"
            return _Known()
        names = together.spec.layout.tensors
        sources = tuple(next((at, name) for at, each in enumerate(named) if name in each) for name in names)
        tensors = [named[at][name] for at, name in sources]
        if not all(
            _same(each[name], t) for name, t in zip(names, tensors, strict=True) for each in named if name in each
        ):
            self.reason = "one by one: tensors of one name are not the same"
            return _Known()
        owned = ones[together.order.index(0)]
        extents = resolve_extents(together.spec.statement, tensors, None, together.static, owned.extents.output)
        faster, self.reason = _faster(together, ones, tensors, extents)
        versions = index_versions(together.spec, tensors)
        if not faster or versions is None:
            return _Known()
        run = together.generated.prepare_all(tensors, extents)
        # What is kept ready may run with a starting value, of which there is none here.
        ready = Ready(lambda tensors, _: run(tensors), versions, generation())  # type: ignore[arg-type, return-value]
        return _Known(ready, sources, together.order)

    def _together(self, ones: Sequence[_One]) -> _Together:
        """The kernel for all programs; remembered.

        Raises:
            FormError: there is none.
        """
        key = tuple((one.bound, one.generated.form.bound.static, one.extents.output[1:]) for one in ones)
        if key not in self._kernels:
            try:
                keep(self._kernels, key, _join(ones), _LIMIT)
            except FormError as error:
                keep(self._kernels, key, error, _LIMIT)
        found = self._kernels[key]
        if isinstance(found, FormError):
            raise found
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _one(program: Program, named: Mapping[str, Tensor], shape: Shape) -> _One:
    """What is known of one of the programs.

    Raises:
        FormError: there is nothing to do, or no generated kernel does it.
    """
    spec = program.spec
    tensors = tuple(named[name] for name in spec.layout.tensors)
    extents = resolve_extents(spec.statement, tensors, None, program.sizes, shape)
    if 0 in extents.indices or 0 in extents.output or any(t.numel() == 0 for t in tensors):
        raise FormError("there is nothing to sum")
    bound, chosen = prepare(spec, tensors, None, extents)
    if not isinstance(chosen.run, Generated) or spec.epilogue:
        raise FormError(f"{program.expression} is no generated kernel")
    return _One(program, tensors, extents, bound, chosen.run)


def _join(ones: Sequence[_One]) -> _Together:
    """The kernel for all programs.

    Raises:
        FormError: there is none.
    """
    owned = [at for at, one in enumerate(ones) if one.generated.form.combine == "own"]
    if len(owned) != 1:
        raise FormError("not one of them, and only one, sums rows that have owners")
    order = [owned[0], *(at for at in range(len(ones)) if at not in owned)]
    first = ones[owned[0]]
    expression, static = _union([ones[at] for at in order])
    spec = Spec(expression, options=first.program.options)
    tensors = {name: t for one in ones for name, t in zip(one.bound.layout.tensors, one.tensors, strict=True)}
    facts: dict[str, IndexFacts] = {}
    for one in ones:
        facts |= dict(zip(one.bound.layout.tensors, one.bound.facts, strict=True))
    kept = {name: tensors[name] for name in spec.layout.tensors}
    extents = resolve_extents(spec.statement, list(kept.values()), None, static, first.extents.output)
    bound = replace(
        bind(spec.statement, kept, None, facts=facts, drop_outside=True), static=tuple(sorted(static.items()))
    )
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    form = first.generated.form
    form = replace(form, sizes={**form.sizes, **sizes})
    form = with_beside(form, [(ones[at].generated.form, ones[at].extents) for at in order[1:]], bound)
    generated = Generated(bound, sizes, extents.output, {}, first.program.options, form=form)
    return _Together(spec, static, tuple(order.index(at) for at in range(len(ones))), generated, {})


def _union(ones: Sequence[_One]) -> tuple[str, dict[str, int]]:
    """A statement that writes what the first one writes and reads what any of them reads, and its known extents.

    Where a static tensor addresses an axis, an index of its own takes its place.
    """
    first = ones[0].generated.form
    output = str(first.bound.statement.output)
    static = {i.name: first.static[i.name] for i in first.bound.statement.output.indices() if i.name in first.static}
    taken = {name for one in ones for name in (*one.bound.layout.tensors, *one.bound.layout.indices)}
    reads: dict[str, str] = {}
    for one in ones:
        form = one.generated.form
        static |= {i: extent for i, extent in form.static.items() if i in (*form.parallel, *form.reduce)}
        for access in one.bound.statement.reads:
            if access.name not in form.tables and access.name not in reads:
                where = one.bound.layout.tensors.index(access.name)
                reads[access.name] = _read(access, form.tables, one.tensors[where], taken, static)
    return f"{output} += {' * '.join(reads.values())}", static


def _read(access: Access, tables: frozenset[str], tensor: Tensor, taken: set[str], static: dict[str, int]) -> str:
    parts: list[str] = []
    for axis, subscript in enumerate(access.subscripts):
        if any(each.name in tables for each in subscript.index_accesses()):
            name = fresh_name("axis", taken)
            taken.add(name)
            static[name] = tensor.shape[axis]
            parts.append(name)
        else:
            parts.append(str(subscript))
    return f"{access.name}[{','.join(parts)}]" if parts else access.name


def _faster(together: _Together, ones: Sequence[_One], tensors: Sequence[Tensor], extents: Extents) -> tuple[bool, str]:
    """Whether one kernel is faster than one for each program, and why that is known."""
    bucket = size_bucket(extents)
    found = together.faster.get(bucket)
    if found is not None:
        return found
    if not worth_measuring(together.generated.options, extents):
        return True, "together: what they read is read once"
    times = _times(together.generated, ones, tensors, extents)
    if times is None:
        return True, f"together: another process measures, and was not done after {WAIT:.0f} s"
    faster = times[0] < times[1]
    reason = f"{times[0]:.1f} us in one kernel, {times[1]:.1f} us in one for each"
    together.faster[bucket] = faster, f"{'together' if faster else 'one by one'}: {reason}"
    return together.faster[bucket]


def _times(
    generated: Generated, ones: Sequence[_One], tensors: Sequence[Tensor], extents: Extents
) -> tuple[float, float] | None:
    """Microseconds together and one by one; `None` where another process measures for too long."""
    more = {"apart": store.digest([one.program.expression for one in ones]), "precision": generated.precision}
    more["beside"] = store.digest([str(p) for points in generated.form.statements for p in points])
    key = store.key_of("joint", generated.form.bound, {}, size_bucket(extents), tensors[0].device, **more)

    def remembered() -> tuple[float, float] | None:
        entry = store.find(key)
        if entry is None:
            return None
        try:
            return float(entry.value["together"]), float(entry.value["apart"])
        except (KeyError, TypeError, ValueError) as error:
            entry.broken(error)
            return None

    def measure() -> tuple[float, float]:
        plain = [t.detach() for t in tensors]
        run: Callable[..., Any] = generated.prepare_all(plain, extents)
        whole = time_calls(lambda tensors, _: run(tensors), plain, None)
        apart = 0.0
        for one in ones:
            own = [t.detach() for t in one.tensors]
            apart += time_calls(one.generated.prepare(own, one.extents, None), own, None)
        store.write(key, {"together": whole, "apart": apart})
        return whole, apart

    return store.once(key, WAIT, remembered, measure)
