"""The sanitizer's sweep: which kernels it runs, and that it fails where it must."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from insum_nn.compiler.kernels import sized
from insum_nn.compiler.kernels.row_partition import partition_for
from insum_nn.compiler.kernels.sized import strides_of
from insum_nn.compiler.kernels.source import write_kernel
from insum_nn.compiler.schedule.defaults import default_schedule
from tests.compiler import sweep
from tests.compiler.generated_cases import form_of
from tests.compiler.interpreted import interpreter
from tests.pretended_gpu import pretended_gpu

__all__ = ["interpreter"]

CPU = torch.device("cpu")


def kinds(setting: sweep.Setting) -> set[str]:
    """What a setting's kernel is an example of, from its text alone."""
    tensors, _, initial = setting.tensors(CPU)
    form, ordered, extents = form_of(
        setting.case,
        tensors,
        facts=setting.facts,
        initial=initial,
        by_rows=setting.own,
        fixed="" if setting.loose else None,
    )
    schedule = setting.schedule or default_schedule(form)
    partition = partition_for(form, ordered, extents, schedule)
    strides = strides_of(form, ordered, extents, partition is not None and partition.split, initial)
    source = write_kernel(form, schedule, strides, setting.precision)
    arguments = [argument.kind for argument in source.arguments]
    return sweep.kinds_of(setting, form, source.schedule, arguments, "end" in arguments)


def test_the_sweep_has_every_kind():
    chosen = list(sweep.settings())
    assert len(set(map(str, chosen))) == len(chosen)
    assert set().union(*map(kinds, chosen)) >= sweep.KINDS


@pytest.mark.usefixtures("interpreter")
def test_some_of_the_sweep_in_the_interpreter():
    some = [s for s in sweep.settings() if s.name in ("spmm", "group spmm") and s.precision == "ieee"][::3]
    met = sweep.run_all(CPU, some)
    assert met["own"]


@pytest.mark.usefixtures("interpreter")
def test_some_kernels_of_several_outputs_in_the_interpreter():
    met = sum((sweep.run_joint(setting, CPU) for setting in sweep.JOINT[::9]), Counter[str]())
    assert met["several outputs"] == len(sweep.JOINT[::9])


@pytest.mark.usefixtures("interpreter")
def test_some_maps_in_the_interpreter():
    with pretended_gpu():
        assert sweep.run_maps(CPU, sweep.MAPS[::4])["kernel maps"] == 3


@pytest.mark.usefixtures("interpreter")
def test_parts_as_functions_in_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    texts: list[bool] = []

    def spied(*arguments: Any, **named: Any) -> Any:
        made = write(*arguments, **named)
        texts.append("noinline" in made.text)
        return made

    write = sized.write_kernel
    monkeypatch.setattr(sized, "write_kernel", spied)
    some = sweep.FUNCTIONS[::3]
    assert sweep.run_functions(CPU, some)["parts as functions"] == len(some)
    assert texts == [True] * len(some)


def outcomes(
    monkeypatch: pytest.MonkeyPatch, outputs: dict[str, tuple[int, str]], only: str = ""
) -> tuple[int, list[Sequence[str]]]:
    """What comes of a check, and the command lines that it runs."""
    lines: list[Sequence[str]] = []
    monkeypatch.setattr(sweep, "sanitizer", lambda: "compute-sanitizer")

    def run(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        key = "wild" if "--wild" in line else line[line.index("--tool") + 1] if "--tool" in line else "plain"
        return subprocess.CompletedProcess(line, outputs[key][0], outputs[key][1], "")

    return sweep.check(["memcheck", "racecheck"], run, only=only), lines


GOOD = {
    "plain": (0, "7 kernels ran"),
    "memcheck": (0, "7 kernels ran\nERROR SUMMARY: 0 errors"),
    "racecheck": (0, "7 kernels ran\nRACECHECK SUMMARY: 0 hazards displayed"),
    "wild": (9, "Invalid __global__ read of size 4 bytes"),
}


@pytest.mark.parametrize(
    ("key", "outcome"),
    [
        ("plain", (1, "0 kernels ran")),
        ("memcheck", (9, "7 kernels ran\nERROR SUMMARY: 2 errors")),
        ("memcheck", (0, "7 kernels ran")),
        ("racecheck", (0, "0 kernels ran\nRACECHECK SUMMARY: 0 hazards displayed")),
        ("wild", (0, "")),
    ],
)
def test_a_sweep_that_is_not_clean_fails(monkeypatch: pytest.MonkeyPatch, key: str, outcome: tuple[int, str]):
    assert outcomes(monkeypatch, GOOD)[0] == 0
    assert outcomes(monkeypatch, {**GOOD, key: outcome})[0] == 1


def test_a_part_of_the_sweep_is_asked_of_every_run(monkeypatch: pytest.MonkeyPatch):
    code, lines = outcomes(monkeypatch, GOOD, only="uvw")
    assert code == 0
    assert [line[line.index("--only") + 1] for line in lines if "--wild" not in line] == ["uvw", "uvw", "uvw"]


def test_a_missing_tool_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="compute-sanitizer was not found"):
        sweep.main(["memcheck"])


def test_without_a_device_nothing_ran(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main([]) == 1


RACE = """========= Error: Race reported between Write access at kernel+0x8a0 in <insum_nn_kernel_ab>:31
=========     and {other} access at {where} in <insum_nn_kernel_ab>:31 [6 hazards]
"""


def test_copies_of_one_value_are_told_from_races():
    same = RACE.format(other="Write", where="kernel+0x8a0")
    assert sweep.only_copies(same * 2) == 2
    assert sweep.only_copies(same + RACE.format(other="Write", where="kernel+0x8b0")) == 0
    assert sweep.only_copies(same + RACE.format(other="Read", where="kernel+0x8a0")) == 0
    assert sweep.only_copies("") == 0
