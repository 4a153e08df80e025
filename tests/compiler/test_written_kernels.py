"""When kernels written by hand are launched: once their machine code is there, which is not asked at every call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from insum_nn.compiler.kernels import background, launch, written
from insum_nn.compiler.kernels.launch import Launcher
from insum_nn.compiler.kernels.written import WrittenKernels
from tests.compiler.corpus.statements import DEVICE_TYPE

TEXT = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    pass\n"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> WrittenKernels:
    monkeypatch.setattr(written, "available", lambda: True)
    monkeypatch.setattr(written, "launcher", lambda *given, **_: given[:2])
    return written.written.__wrapped__((TEXT, (torch.int32,)))


def test_their_machine_code_is_looked_for_now_and_then(kernels: WrittenKernels, monkeypatch: pytest.MonkeyPatch):
    now, asked, there = [100.0], [0], [False]

    def load_ahead(_: Sequence[Launcher]) -> bool:
        asked[0] += 1
        return there[0]

    monkeypatch.setattr(written, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(written, "load_ahead", load_ahead)
    one, other = torch.device(DEVICE_TYPE, 0), torch.device(DEVICE_TYPE, 1)
    for _ in range(3):
        assert kernels.launchers(one) is None
    assert asked == [1]
    # Of another device nothing is known.
    assert kernels.launchers(other) is None
    assert asked == [2]
    there[0] = True
    assert kernels.launchers(one) is None
    now[0] += 1
    assert kernels.launchers(one) == kernels.kernels
    assert kernels.launchers(one) == kernels.kernels
    assert asked == [3]
    assert kernels.launchers(torch.device("cpu")) is None


@pytest.mark.parametrize("storable", [True, False])
def test_without_a_folder_for_machine_code_they_are_compiled_here(monkeypatch: pytest.MonkeyPatch, *, storable: bool):
    submitted: list[bool] = []

    class Launch:
        """What `load_ahead` asks of a launcher."""

        aligned, number = (True,), 0

        def __init__(self) -> None:
            self.codes: dict[Any, str] = {}

        def code(self, aligned: object, target: object) -> str:
            return "code"

        def load(self, aligned: object) -> None:
            self.codes[aligned] = "loaded"

    made: Any = Launch()
    monkeypatch.setattr(launch, "_Launch", Launch)
    monkeypatch.setattr(launch, "target_of", lambda _: ("", 90, 32))
    monkeypatch.setattr(launch, "is_stored", lambda _: False)
    monkeypatch.setattr(launch, "is_storable", lambda _: storable)
    pool = SimpleNamespace(most=1, submit=lambda _: submitted.append(True))
    monkeypatch.setattr(background, "shared", lambda: pool)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    assert launch.load_ahead([made]) is not storable
    assert submitted == [True] * storable
    assert made.codes == ({} if storable else {(True,): "loaded"})
