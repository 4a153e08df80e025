"""Schedules that a device has room for, and the one that is taken without measuring: the default where it fits.

A program of the matrix unit holds the operands of a step in shared memory, once for each stage of the software
pipeline; what its threads hold in registers is limited by the default's own rules. Nothing predicts times. Of 86
searches on an H200, of 17 candidates in the mean, the best of the first 16, in the order in which `candidates.py`
lists them, took 0.1 % longer than the best of all; ordered by a model of the device it was the best of all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.form import Form
from insum_nn.compiler.schedule.placement import place_indices

__all__ = ["H200", "Device", "device_of", "fitting", "is_measured", "shared_memory", "without_measuring"]


class Device(NamedTuple):
    """What limits the schedules of a device.

    Attributes:
        architecture: compute capability.
        shared: bytes of shared memory that one program may have.
    """

    architecture: tuple[int, int]
    shared: int


H200 = Device((9, 0), 232_448)


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Return the limits of a device from its properties; an H200's where it is no GPU that torch names "cuda"."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return Device((found.major, found.minor), found.shared_memory_per_block_optin)


def is_measured(device: Device) -> bool:
    """Whether schedules were measured on devices of this architecture, so that defaults are known to run there."""
    return device.architecture == H200.architecture


def shared_memory(form: Form, schedule: Schedule) -> int:
    """Return the bytes of shared memory that a program needs."""
    if not schedule.dot or form.product is None:
        return 0
    tiling = place_indices(form, schedule)
    m, k, n = (1 if axis is None else axis.lanes for axis in (tiling.m, tiling.k, tiling.n))
    return (m + n) * k * form.bound.dtype.itemsize * schedule.stages


def fitting(form: Form, device: Device) -> list[Schedule]:
    """Return the candidates that a device has room for, the default first; if there are none, a smaller default."""
    found = [schedule for schedule in candidates(form) if shared_memory(form, schedule) <= device.shared]
    if found:
        return found
    smaller, half = default_schedule(form), _halved(default_schedule(form))
    while half != smaller and shared_memory(form, smaller) > device.shared:
        smaller, half = half, _halved(half)
    return [smaller]


def _halved(schedule: Schedule) -> Schedule:
    """Return a schedule of half the stages, else of half the longest axis of its tile; itself where it is the least."""
    if schedule.stages > 1:
        return replace(schedule, stages=schedule.stages // 2)
    longest = max(("m", "n", "k"), key=lambda axis: getattr(schedule, axis))
    half = max(16 if schedule.dot else 1, getattr(schedule, longest) // 2)
    return replace(schedule, **{longest: half}, warps=max(1, schedule.warps // 2))


def without_measuring(form: Form, device: Device) -> tuple[Schedule, str]:
    """Return a schedule and why: the default, or where the device has no room for it, the next that fits."""
    return form.plan.get(("schedule", device), lambda: _first_that_fits(form, device))


def _first_that_fits(form: Form, device: Device) -> tuple[Schedule, str]:
    default = default_schedule(form)
    if shared_memory(form, default) <= device.shared:
        return default, "the default"
    return fitting(form, device)[0], "the device has no room for the default"
