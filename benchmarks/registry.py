"""The registry of benchmarks: a problem, the providers that solve it, an oracle, and the least work that it takes.

A case is a function that builds a problem; its keyword parameters are a grid, one case for each combination:

    @case("spmm", n=(32, 128), dtype=("float32", "float16"), tests=("tests/ops/test_spmm.py",))
    def spmm(setting: Setting, *, n: int, dtype: str) -> Problem:
        '''A grouped sparse matrix times a dense one.'''
        ...
        return Problem(providers={"insum_nn": ours, "torch_csr": theirs}, oracle=exact, tolerance=1e-5)

registers `spmm/n=32/dtype=float32` and three more. Providers whose name begins with `insum_nn` are ours.
"""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

__all__ = [
    "MODES",
    "OURS",
    "REGISTRY",
    "Builder",
    "Case",
    "Floor",
    "Mode",
    "Output",
    "Problem",
    "Registry",
    "Setting",
    "Size",
    "Unavailable",
    "Work",
    "case",
    "is_ours",
    "load",
]

Mode = Literal["fwd", "bwd", "fwdbwd"]
MODES: tuple[Mode, ...] = get_args(Mode)

Size = Literal["tiny", "full"]
Device = Literal["cpu", "cuda"]
Clock = Literal["device", "host"]
Precision = Literal["highest", "high"]

Output = Tensor | tuple[Tensor, ...]

OURS = "insum_nn"
_NAME = re.compile(r"[a-z0-9_]+(/[A-Za-z0-9_.=+-]+)*")


class Unavailable(Exception):
    """Raised by a provider's builder that cannot run here; the reason is recorded with the results."""


@dataclass(frozen=True)
class Setting:
    """Device and size of a problem.

    Attributes:
        device: where all tensors live.
        size: "full" is what is measured; "tiny" is the same problem small enough for a test on a CPU.
        seed: of the problem's own generator; each provider gets the same numbers.
        root: folder of data sets; the cases that read it are unavailable without it.
    """

    device: torch.device
    size: Size = "full"
    seed: int = 0
    root: Path | None = None

    @property
    def tiny(self) -> bool:
        return self.size == "tiny"

    def generator(self) -> torch.Generator:
        """Return a new generator on the device, with the same seed at each call."""
        return torch.Generator(device=self.device).manual_seed(self.seed)


def _same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _as_it_is(output: Any) -> Output:
    return output


@dataclass(frozen=True)
class Work:
    """A provider (or the oracle), ready to run.

    Attributes:
        forward: computes the output; called many times. Where there is a backward it returns a tensor or several.
        leaves: what is differentiated, in the order of the oracle's leaves; empty when there is no backward.
        gradients: converts this provider's gradients to the oracle's layout (a format may store the values
            of a matrix in another order, or padded).
        output: converts the result of `forward` to the oracle's layout; called by the gate, never timed.
        upstream: converts the upstream gradients from the oracle's layout to this provider's.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor] = ()
    gradients: Callable[[Sequence[Tensor]], Sequence[Tensor]] = _same
    output: Callable[[Any], Output] = _as_it_is
    upstream: Callable[[Sequence[Tensor]], Sequence[Tensor]] = _same


Builder = Callable[[], Work]


@dataclass(frozen=True)
class Floor:
    """The least work of the device: each byte moved once, arithmetic, and gathered rows.

    Attributes:
        bytes: each byte of operands and result, once.
        flops: additions and multiplications.
        gathered: bytes of the rows that index tensors pick, as often as they are picked.
        row: bytes of one such row.
        table: bytes of what they are picked from: whether it fits into a cache decides how fast that goes.
    """

    bytes: int | None = None
    flops: int | None = None
    gathered: int | None = None
    row: int | None = None
    table: int | None = None


@dataclass(frozen=True)
class Problem:
    """One problem with all its providers.

    Attributes:
        providers: name -> builder. A builder does what is not timed: conversion, compilation. It raises
            `ModuleNotFoundError` or `Unavailable` when its package is not there.
        oracle: the same in float64, from the same numbers, by dense means.
        tolerance: largest error that passes the gate; see `benchmarks.gate.relative_error`.
        tolerances: the same for single providers that accumulate in less precision; a comment says why.
        gradient_tolerance: of the modes with gradients, where these need another one than the outputs; a comment says
            why.
        floors: by mode.
        modes: those that are measured.
        clock: what is timed: the device's work, or the host's until the kernels are launched.
        recorded: whether `fwd` is run with autograd recording, as in training.
        precision: of float32 products, as `torch.set_float32_matmul_precision` names it, for every provider.
    """

    providers: Mapping[str, Builder]
    oracle: Builder
    tolerance: float
    tolerances: Mapping[str, float] = field(default_factory=dict[str, float])
    floors: Mapping[Mode, Floor] = field(default_factory=dict[Mode, Floor])
    modes: tuple[Mode, ...] = ("fwd",)
    clock: Clock = "device"
    recorded: bool = False
    precision: Precision = "highest"
    gradient_tolerance: float | None = None

    def limit(self, provider: str, mode: Mode) -> float:
        """Return the largest error of this provider that passes the gate in this mode."""
        general = self.tolerance if mode == "fwd" or self.gradient_tolerance is None else self.gradient_tolerance
        return self.tolerances.get(provider, general)


class Build(Protocol):
    """A case's function: the setting by position, the grid's parameters by keyword."""

    __doc__: str | None

    def __call__(self, setting: Setting, /, **parameters: Any) -> Problem: ...


@dataclass(frozen=True)
class Case:
    """One registered problem.

    Attributes:
        name: `family/parameter=value/...`.
        family: the first argument of `case`.
        build: the decorated function.
        parameters: this case's point of the grid.
        tests: files of the operator's tests; the gate runs them before anything is timed.
        devices: where the case is measured.
        quick: whether it is one of the representative cases of its family.
    """

    name: str
    family: str
    build: Build
    parameters: Mapping[str, object]
    tests: tuple[str, ...]
    devices: tuple[Device, ...]
    quick: bool = True

    def problem(self, setting: Setting) -> Problem:
        return self.build(setting, **self.parameters)


class Registry:
    """Cases by name, in the order of registration."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, name: str) -> Case:
        return self._cases[name]

    def case(
        self,
        family: str,
        *,
        tests: Sequence[str] = (),
        devices: Sequence[Device] = ("cpu", "cuda"),
        quick: Mapping[str, Sequence[object]] | None = None,
        **grid: Sequence[object],
    ) -> Callable[[Callable[..., Problem]], Callable[..., Problem]]:
        """Register a builder of problems, once for each point of the grid.

        Args:
            family: first part of the names.
            tests: files of the operator's tests, from the project's root.
            devices: "cpu", "cuda" or both.
            quick: parameter -> the values of the representative cases; a parameter left out keeps all of its values.
            **grid: parameter -> its values; all combinations are registered.

        Returns:
            The decorator; it leaves the function as it is.

        Raises:
            ValueError: a name is malformed or taken, or an axis of the grid is empty.
        """

        def register(build: Callable[..., Problem]) -> Callable[..., Problem]:
            for values in itertools.product(*grid.values()):
                parameters = dict(zip(grid, values, strict=True))
                name = "/".join([family, *(f"{key}={value}" for key, value in parameters.items())])
                if not _NAME.fullmatch(name):
                    raise ValueError(f"case {name!r}: letters, digits and '_.=+-' between slashes")
                if name in self._cases:
                    raise ValueError(f"case {name!r} is registered twice")
                chosen = all(parameters[key] in values for key, values in few.items())
                self._cases[name] = Case(name, family, build, parameters, tuple(tests), tuple(devices), chosen)
            return build

        few = quick or {}
        if not all(grid.values()):
            raise ValueError(f"case {family!r}: an axis of its grid is empty")
        if unknown := [f"{k}={v}" for k, values in few.items() for v in values if v not in grid.get(k, ())]:
            raise ValueError(f"case {family!r}: quick names {', '.join(unknown)}, which its grid does not have")
        return register

    def select(self, patterns: Sequence[str]) -> list[Case]:
        """Return the cases that match any of the shell patterns; a family's name matches all its cases.

        Raises:
            KeyError: a pattern matches nothing.
        """
        chosen: dict[str, Case] = {}
        for pattern in patterns:
            found = [c for c in self._cases.values() if c.family == pattern or fnmatch.fnmatchcase(c.name, pattern)]
            if not found:
                families = ", ".join(dict.fromkeys(case.family for case in self._cases.values())) or "none"
                raise KeyError(f"no case matches {pattern!r}; families: {families}")
            chosen.update((c.name, c) for c in found)
        return list(chosen.values())


REGISTRY = Registry()
case = REGISTRY.case


def load() -> Registry:
    """Import every module of `benchmarks.cases`, which registers its cases."""
    from benchmarks import cases

    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    return REGISTRY


def is_ours(provider: str) -> bool:
    """Whether a provider is this package: its name is `insum_nn`, alone or before a slash."""
    return provider.partition("/")[0] == OURS
