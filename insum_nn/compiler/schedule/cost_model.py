"""What a kernel takes under a schedule, without running it: a model of the device.

`kernel_work.count` reads a form and a schedule: programs, the steps of one, bytes, instructions, products of the matrix
unit, registers and shared memory. `microseconds` weighs these counts:

    launches + p-norm of  memory     bytes through the device's memory: tensors once, and gathers that miss its cache
                          cache      bytes between the cache and the multiprocessors; short rows count for more
                          issue      instructions of all programs
                          products   of the matrix unit, tiles filled up
                          waiting    programs / resident programs, in waves, times the steps of one: chains of
                                     dependent loads, of which the software pipeline hides a part
    and no less than      the longest program alone

    resident     as many programs as registers, shared memory and warps of the multiprocessors hold
    row lengths  a tile of rows waits for the longest of them; parts of divided rows are added up by a launch more

The model orders the schedules of one statement for a search; what is the same for all of them may be wrong. Without a
search the default is taken wherever it fits, however much faster another one is predicted to be: on an H200 the ones
that were predicted 1.5 times as fast took 1.3 to 1.9 times as long. How registers are given to straight-line code, and
to code of several outputs, is not modelled.

Nothing is measured here. The rates were fitted to times of an H200 by `benchmarks/fit_cost_model.py`, which prints and
draws the error. Other architectures take them in proportion to their multiprocessors, which was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from insum_nn.compiler.forms.candidates import candidates
from insum_nn.compiler.forms.defaults import default_schedule
from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.placement import MANY_TERMS
from insum_nn.compiler.schedule.kernel_work import Work, count
from insum_nn.compiler.schedule.space import Precision, Schedule

__all__ = [
    "H200",
    "Device",
    "Rates",
    "device_of",
    "fits",
    "is_fitted",
    "microseconds",
    "models",
    "predicted",
    "ranked",
    "rates_of",
    "residents",
    "without_measuring",
]


@dataclass(frozen=True, slots=True)
class Device:
    """The limits of a device.

    Attributes:
        architecture: compute capability.
        multiprocessors: how many there are.
        shared: bytes of shared memory that one program may have.
        shared_of_all: bytes of shared memory of a multiprocessor.
        registers: 32-bit registers of a multiprocessor.
        warps: warps that a multiprocessor holds.
        cache: bytes of the cache that all multiprocessors share.
    """

    architecture: tuple[int, int]
    multiprocessors: int
    shared: int
    shared_of_all: int
    registers: int
    warps: int
    cache: int


H200 = Device((9, 0), 132, 232_448, 233_472, 65_536, 64, 60 << 20)


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Return the limits of a device from its properties; an H200's where it is no GPU that torch names "cuda"."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return Device(
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        found.shared_memory_per_multiprocessor,
        found.regs_per_multiprocessor,
        found.max_threads_per_multi_processor // found.warp_size,
        found.L2_cache_size,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """The constants of the model. Times are in microseconds; bytes, instructions and products are a microsecond's.

    Attributes:
        launch: time of a kernel, whatever it does.
        collect: time of the kernel that adds up the parts of divided rows.
        memory: bytes through the device's memory.
        cache: bytes through its cache.
        row: bytes by which a gathered row counts as longer than it is.
        issue: instructions of one multiprocessor.
        alone: instructions of one warp.
        latency: time of a load on which another one depends.
        step: further time of a step.
        program: further time of a program.
        half: products of fp16 or bf16 numbers in one multiprocessor.
        single: the same of tf32.
        thrice: the same of float32 in three products of tf32.
        held: registers of a thread for other than its values.
        power: of the norm that adds up the terms.
    """

    launch: float = 7.4
    collect: float = 12.3
    memory: float = 4.75e6
    cache: float = 1.23e7
    row: float = 21.8
    issue: float = 3564.0
    alone: float = 2732.0
    latency: float = 0.304
    step: float = 0.068
    program: float = 0.656
    half: float = 2.82e6
    single: float = 1.35e6
    thrice: float = 4.5e5
    held: float = 36.8
    power: float = 4.0


_FITTED: Mapping[tuple[int, int], tuple[Device, Rates]] = {H200.architecture: (H200, Rates())}


def is_fitted(device: Device) -> bool:
    """Whether the rates were fitted on devices of this architecture."""
    return device.architecture in _FITTED


def rates_of(device: Device) -> Rates:
    """Return the rates of a device: fitted for its architecture, else an H200's by the number of multiprocessors."""
    fitted, rates = _FITTED.get(device.architecture, _FITTED[H200.architecture])
    share = device.multiprocessors / fitted.multiprocessors
    return rates if share == 1.0 else replace(rates, memory=rates.memory * share, cache=rates.cache * share)


# Time.


def microseconds(work: Work, device: Device, rates: Rates) -> float:
    """Return what a kernel is predicted to take."""
    spilled = 4.0 * max(0.0, work.values + rates.held - 255.0)
    per_step = work.instructions + (8.0 + spilled) * work.warps
    own = work.instructions / work.warps + spilled
    step = rates.step + work.chain * rates.latency / work.ahead + own / rates.alone
    resident = device.multiprocessors * max(1, residents(work, device, rates))
    waves = max(1.0, work.programs / resident)
    # A last wave that is not full; behind many waves, programs end at different times.
    waves += min(0.5, math.ceil(waves) - waves) if waves < 4.0 else 0.0
    waiting = waves * (rates.program + work.steps * step)
    busy = device.multiprocessors * min(1.0, work.programs / device.multiprocessors)
    issue = work.programs * (work.steps * per_step + work.once) / (rates.issue * busy)
    unit = {"half": rates.half, "single": rates.single, "thrice": rates.thrice}[work.unit]
    products = work.programs * work.steps * work.products / (unit * busy)
    memory, cache = work.written, work.written
    for load in work.loads:
        kept = min(1.0, 0.7 * device.cache / max(1.0, load.table))
        cold = min(load.requested, load.table)
        memory += cold + 0.8 * (load.requested - cold) * (1.0 - kept)
        cache += load.requested * (1.0 + rates.row / load.row)
    terms = (memory / rates.memory, cache / rates.cache, issue, products, waiting)
    total = sum(term**rates.power for term in terms) ** (1.0 / rates.power)
    total = max(total, rates.program + work.longest * step)
    return rates.launch + total + (rates.collect if work.collected else 0.0)


# Registers that a thread can have.
_REGISTERS = 255


def residents(work: Work, device: Device, rates: Rates) -> int:
    """Return how many programs one multiprocessor holds at once; 0: it has no room for one."""
    # A thread gets registers in units of eight.
    each = 8 * math.ceil(min(float(_REGISTERS), rates.held + work.values) / 8)
    by_registers = device.registers // (each * 32 * work.warps)
    by_shared = int(device.shared_of_all // (work.shared + 1024.0)) if work.shared else 32
    return min(32, device.warps // work.warps, by_registers, by_shared)


# Times as many registers as there are, beyond which a thread's values are mostly in memory.
_SPILLED = 2.0


def fits(work: Work, device: Device) -> bool:
    """Whether a device has room for a program: shared memory, warps, and the fewest registers of a thread."""
    threads = 32 * work.warps
    return work.shared <= device.shared and work.warps <= min(32, device.warps) and 32 * threads <= device.registers


def _usable(form: Form, work: Work, device: Device) -> bool:
    """Whether a program fits, and its values are not mostly in memory, where their number is modelled."""
    return fits(work, device) and (not models(form) or work.values <= _SPILLED * _REGISTERS)


# Choice.


def models(form: Form) -> bool:
    """Whether predictions say anything of a form: not of straight-line code, and not of several outputs."""
    return len(form.unrolled) <= MANY_TERMS and form.accumulators <= 1 and not form.additional


def predicted(form: Form, schedule: Schedule, precision: Precision, device: Device) -> float:
    """Return the microseconds that a schedule is predicted to take; infinite where the device has no room for it."""
    work = count(form, schedule, precision)
    return microseconds(work, device, rates_of(device)) if _usable(form, work, device) else math.inf


def ranked(form: Form, precision: Precision, device: Device) -> dict[Schedule, float]:
    """Return the candidates that fit a device, and what they are predicted to take.

    The default comes first, then the fastest predicted; without a prediction the order is that of `candidates`. Where
    none fits it is a smaller default alone.
    """
    times = {schedule: predicted(form, schedule, precision, device) for schedule in candidates(form)}
    default, *others = times
    if models(form):
        others.sort(key=times.__getitem__)
    usable = [schedule for schedule in (default, *others) if not math.isinf(times[schedule])]
    if usable:
        return {schedule: times[schedule] for schedule in usable}
    smaller, half = default, _halved(default)
    while half != smaller and math.isinf(predicted(form, smaller, precision, device)):
        smaller, half = half, _halved(half)
    return {smaller: predicted(form, smaller, precision, device)}


def _halved(schedule: Schedule) -> Schedule:
    """Return a schedule of half the stages, else of half the longest axis of its tile; itself where it is the least."""
    if schedule.stages > 1:
        return replace(schedule, stages=schedule.stages // 2)
    longest = max(("m", "n", "k"), key=lambda axis: getattr(schedule, axis))
    half = max(16 if schedule.dot else 1, getattr(schedule, longest) // 2)
    return replace(schedule, **{longest: half}, warps=max(1, schedule.warps // 2))


def without_measuring(form: Form, precision: Precision, device: Device) -> tuple[Schedule, str]:
    """Return a schedule and why: the default, or where the device has no room for it, the next that fits.

    Args:
        form: what is computed, with the sizes of a call.
        precision: of float32 products.
        device: the limits.
    """
    longest = 0 if form.longest is None else form.longest.bit_length()
    return form.plan.get(
        ["schedule", precision, asdict(device), form.even, longest],
        lambda: _first_that_fits(form, precision, device),
        lambda found: [found[0].to_json(), found[1]],
        lambda value: (Schedule.from_json(value[0]), str(value[1])),
    )


def _first_that_fits(form: Form, precision: Precision, device: Device) -> tuple[Schedule, str]:
    default = default_schedule(form)
    if _usable(form, count(form, default, precision), device):
        return default, "the default"
    return next(iter(ranked(form, precision, device))), "the device has no room for the default"
