"""Which path runs a statement: a generated kernel, torch's library calls or Inductor, by measurement where it pays.

A rule names the path that is likely the fastest. The others are tried if an estimate of the least time they can take is
below what was measured so far, and if there is time left to compile them. What was found is remembered on disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from insum_nn.compiler.plans.plan import Dot, Load, Multiply, Plan, SparseProduct
from insum_nn.compiler.schedule import budget
from insum_nn.compiler.schedule import database as store
from insum_nn.compiler.schedule.progress import Progress
from insum_nn.compiler.schedule.tune import WAIT, time_whole

__all__ = [
    "NAMES",
    "Candidate",
    "Choice",
    "Offer",
    "choose_path",
    "eager_offer",
    "inductor_offer",
    "is_library_call",
]

# Seconds for all that is measured of one statement and size, the search of schedules included.
_BUDGET = 15.0
# Seconds that Inductor takes to compile a statement cold: with a matrix product it tries several, and without.
_COMPILES = (5.0, 12.0)
# Bytes and operations a microsecond, no less than any GPU of today has: through memory, through caches, by dtype.
_MEMORY, _CACHE = 8e6, 12e6
_OPERATIONS = {torch.float16: 2.5e9, torch.bfloat16: 2.5e9, torch.float32: 1.2e9}
# Inductor's kernels that gather or multiply matrices took three times their floor and more, at these rates, on all that
# was measured; a compilation in vain is what a first call waits for.
_ABOVE_FLOOR = 2.8
# Microseconds that a call may save at least for each second that a path compiles: who trains calls again and again, and
# who predicts does not.
_WORTH_A_SECOND = 1.0
# A path that took so many times the rule's time for half or twice as many rows is not tried again; nor is one that has
# to be compiled, if it took so many times the rule's in any other sizes.
_HOPELESS_NEARBY, _HOPELESS = 1.5, 2.0
# A path is taken instead of the rule's if it takes less than this share of its time: below, it is noise.
_SHARE = 0.95
# Share of the free memory that a path may fill with what it puts aside.
_ROOM = 0.25
NAMES = {"triton": "generated kernel", "eager": "library calls", "inductor": "Inductor"}


@dataclass(frozen=True, slots=True)
class Offer:
    """A path that may be taken.

    Attributes:
        backend: its name among the options.
        ready: makes it ready, compiled if need be; what it returns runs the statement once.
        least: microseconds that it takes at best.
        aside: bytes of intermediate results.
        seconds: forecast of the time to make it ready.
    """

    backend: str
    ready: Callable[[], Callable[[], object]]
    least: float = 0.0
    aside: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """What became of an offer: its time in microseconds, or a note that says why there is none."""

    backend: str
    microseconds: float | None
    note: str = ""

    @property
    def row(self) -> tuple[str, str, str]:
        """Topic, choice and reason, for `explain()`."""
        found = self.note if self.microseconds is None else f"{self.microseconds:.1f} us"
        return "candidate", NAMES.get(self.backend, self.backend), found


@dataclass(frozen=True, slots=True)
class Choice:
    """The path taken, why, and all that was considered."""

    backend: str
    reason: str
    candidates: tuple[Candidate, ...]


# Estimates.


def is_library_call(plan: Plan) -> bool:
    """Whether a statement is a dense contraction, which torch's libraries compute without anything put aside."""
    contracts = any(isinstance(step, Dot) or (isinstance(step, Multiply) and step.over) for step in plan.steps)
    return contracts and plan.combine.mode == "direct" and not any(load.gather for load in plan.loads())


def _cells(labels: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)


def eager_offer(plan: Plan, sizes: Mapping[str, int], ready: Callable[[], Callable[[], object]]) -> Offer:
    """Library calls: every intermediate result is written to memory and read again."""
    results = [
        step.labels
        for step in plan.steps
        if not isinstance(step, SparseProduct) and not (isinstance(step, Load) and not step.gather)
    ]
    width = plan.bound.dtype.itemsize
    if plan.combine.mode == "direct" and results:
        # The last one is the output.
        results.pop()
    aside = sum(_cells(labels, sizes) for labels in results) * width
    return Offer("eager", ready, 2 * aside / _MEMORY, aside)


def inductor_offer(
    plan: Plan,
    sizes: Mapping[str, int],
    tensors: Sequence[Tensor],
    output: Sequence[int],
    ready: Callable[[], Callable[[], object]],
) -> Offer:
    """Inductor's kernels: what must pass through memory and caches, and the operations of matrix products."""
    width = plan.bound.dtype.itemsize
    once = sum(t.numel() * t.element_size() for t in tensors) + math.prod(output) * width
    gathered = sum(_cells(load.labels, sizes) for load in plan.loads() if load.gather) * width
    dots = [step for step in plan.steps if isinstance(step, Dot)]
    rate = _OPERATIONS.get(plan.bound.dtype, 1e8)
    work = sum(2.0 * _cells((*step.labels, *step.k), sizes) for step in dots)
    floor = max(once / _MEMORY, gathered / _CACHE, work / rate)
    plain = not dots and not gathered and plan.combine.mode == "direct"
    return Offer("inductor", ready, floor if plain else _ABOVE_FLOOR * floor, 0, _COMPILES[bool(dots)])


# The choice.


def _room(device: torch.device) -> float:
    """Bytes that intermediate results may fill on a device."""
    return _ROOM * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def choose_path(key: store.Key, what: str, offers: Sequence[Offer], device: torch.device) -> Choice | None:
    """The fastest of several paths, measured now or remembered.

    Args:
        key: what the choice is for.
        what: the statement, for whoever looks on.
        offers: the rule's path first.
        device: where it runs.

    Returns:
        `None`: another process measures the same, and was not done in time.
    """
    names = [offer.backend for offer in offers]

    def measure() -> Choice:
        candidates = _measure_all(what, offers, device, _hopeless(key, offers))
        times = {c.backend: c.microseconds for c in candidates if c.microseconds is not None}
        backend = _fastest(names[0], times)
        store.write(key, _to_json(backend, candidates))
        return Choice(backend, _because(names[0], backend, times), candidates)

    return store.once(key, WAIT, lambda: _remembered(key, names), measure)


def _hopeless(key: store.Key, offers: Sequence[Offer]) -> dict[str, str]:
    """Why some paths are not worth a trial, by what they took in other sizes."""
    near = store.near(key)
    others = _behind(store.alike(key), offers)
    nearby = _behind([near] if near else [], offers)
    notes: dict[str, str] = {}
    for offer in offers[1:]:
        factor, nearest = others.get(offer.backend, 0.0), nearby.get(offer.backend, 0.0)
        if nearest >= _HOPELESS_NEARBY:
            notes[offer.backend] = f"it took {nearest:.1f} times as long for half or twice as many rows"
        elif offer.seconds and factor >= _HOPELESS:
            notes[offer.backend] = f"it took {factor:.1f} times as long in other sizes, or more"
    return notes


def _behind(entries: Sequence[store.Entry], offers: Sequence[Offer]) -> dict[str, float]:
    """How many times the time of the first path the others took at least."""
    least: dict[str, float] = {}
    names = [offer.backend for offer in offers]
    for entry in entries:
        times = {c.backend: c.microseconds for c in _parsed(entry, names) or () if c.microseconds is not None}
        rule = times.pop(names[0], 0.0)
        for name, us in times.items():
            if rule > 0:
                least[name] = min(us / rule, least.get(name, math.inf))
    return least


def _measure_all(
    what: str, offers: Sequence[Offer], device: torch.device, hopeless: Mapping[str, str]
) -> tuple[Candidate, ...]:
    begin, room = time.perf_counter(), _room(device)
    candidates: list[Candidate] = []
    best = math.inf
    with Progress(f"choosing a path for {what}", len(offers)) as progress:
        for offer in offers:
            left = _BUDGET - (time.perf_counter() - begin)
            note = hopeless.get(offer.backend, "") or _unpromising(offer, best, left, room) if candidates else ""
            if note:
                candidates.append(Candidate(offer.backend, None, f"not tried: {note}"))
            else:
                candidates.append(_measured(offer, device, rule=not candidates))
            best = min(best, candidates[-1].microseconds or math.inf)
            progress.step()
        progress.result = "; ".join(f"{name} {found}" for _, name, found in (c.row for c in candidates))
    return tuple(candidates)


def _unpromising(offer: Offer, best: float, left: float, room: float) -> str:
    """Why an offer is not worth a trial; empty if it is."""
    if offer.least >= _SHARE * best:
        return f"it takes {offer.least:.0f} us at best, by what it moves and multiplies"
    if best - offer.least < _WORTH_A_SECOND * offer.seconds:
        return f"it saves {best - offer.least:.0f} us at most, and compiles for about {offer.seconds:.0f} s"
    if offer.aside > room:
        return f"it puts {offer.aside / 2**20:.0f} MiB aside"
    if offer.seconds and offer.seconds > left:
        return f"it compiles for about {offer.seconds:.0f} s, and {max(0.0, left):.0f} s are left"
    if offer.seconds > budget.left():
        return f"it compiles for about {offer.seconds:.0f} s, and {budget.spent():.0f} s went into searches before"
    return ""


def _measured(offer: Offer, device: torch.device, *, rule: bool) -> Candidate:
    """An offer's time; what fails is no candidate, but the rule's path has to run."""
    try:
        with budget.spending() if offer.seconds else nullcontext():
            run = offer.ready()
        return Candidate(offer.backend, _measure(run, device))
    except torch.OutOfMemoryError:
        if rule:
            raise
        torch.cuda.empty_cache()
        return Candidate(offer.backend, None, "it runs out of memory")
    except Exception as error:
        if rule:
            raise
        return Candidate(offer.backend, None, f"it fails: {(str(error).strip().splitlines() or [''])[0][:160]}")


def _measure(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one run."""
    with torch.no_grad():
        _seconds(run, device)
        repeat = max(3, min(20, int(0.2 / max(_seconds(run, device), 1e-6))))
        if device.type == "cuda":
            return time_whole(run, repeat)
        return 1e6 * min(_seconds(run, device) for _ in range(repeat))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _fastest(rule: str, times: Mapping[str, float]) -> str:
    best = min(times, key=lambda name: times[name])
    return best if times[best] < _SHARE * times.get(rule, math.inf) else rule


def _because(rule: str, backend: str, times: Mapping[str, float]) -> str:
    own = f"{NAMES[backend]} {times[backend]:.1f} us" if backend in times else NAMES[backend]
    others = ", ".join(f"{NAMES[name]} {us:.1f} us" for name, us in times.items() if name != backend)
    if not others:
        return f"measured: {own}; no other path was worth a trial"
    return f"measured: {own} against {others}" + ("" if backend != rule else "; the rule's path")


def _to_json(backend: str, candidates: Sequence[Candidate]) -> dict[str, object]:
    rows = [{"backend": c.backend, "microseconds": c.microseconds, "note": c.note} for c in candidates]
    return {"backend": backend, "candidates": rows}


def _remembered(key: store.Key, names: Sequence[str]) -> Choice | None:
    entry = store.find(key)
    found = None if entry is None else _parsed(entry, names)
    if entry is None or found is None:
        return None
    times = {c.backend: c.microseconds for c in found if c.microseconds is not None and c.backend in NAMES}
    backend = entry.value["backend"]
    return Choice(backend, f"{_because(names[0], backend, times)}; {entry.origin()}", found)


def _parsed(entry: store.Entry, names: Sequence[str]) -> tuple[Candidate, ...] | None:
    """What was measured; `None`, and a warning, if the entry makes no sense."""
    try:
        found = tuple(
            Candidate(
                str(row["backend"]),
                None if row["microseconds"] is None else float(row["microseconds"]),
                str(row["note"]),
            )
            for row in entry.value["candidates"]
        )
        if entry.value["backend"] not in names:
            raise ValueError(f"{entry.value['backend']!r} is none of {', '.join(names)}")
    except store.UNREADABLE as error:
        entry.broken(error)
        return None
    return found
