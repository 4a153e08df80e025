"""The comparison of selected with stored schedules: what it writes, and that it leaves stored schedules out."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import selection
from benchmarks.selection import Compared
from benchmarks.timing import Kernel
from insum_nn.compiler.tuning import database

CASE = "pruned_conv2d/channels=64/pattern=MC/density=0.05"


class InThisProcess:
    """A context of processes whose pools run everything here."""

    def Pool(self, _: int) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def starmap(self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], chunksize: int) -> list[Any]:
        return [function(*each) for each in calls]

    def apply(self, function: Callable[..., Any], call: Sequence[Any]) -> Any:
        return function(*call)


def test_each_call_is_timed_with_and_without_stored_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = database.find

    def took(call: Callable[[], object], calls: int) -> list[Kernel]:
        return [Kernel("one", 2.0 if database.find is plain else 3.0, calls)]

    monkeypatch.setattr(multiprocessing, "get_context", lambda _: InThisProcess())
    monkeypatch.setattr(selection, "kernels", took)
    file = tmp_path / "selection.json"
    words = ["--device", "cpu", "--size", "tiny", "--commit", "a_commit", "--out", str(file)]
    ratios = selection.main([CASE, *words])
    assert ratios == {f"{CASE} insum_nn fwd": 1.5}
    assert database.find is plain
    (record,) = json.loads(file.read_text(encoding="utf-8"))
    assert list(record) == list(Compared.__annotations__)
    assert (record["case"], record["provider"], record["mode"]) == (CASE, "insum_nn", "fwd")
    assert (record["stored_us"], record["selected_us"]) == (2.0, 3.0)
