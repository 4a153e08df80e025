"""Files of the cache folder that are not what was written: no call fails or errs because of them."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import insum_nn
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.tuning import database as store
from insum_nn.compiler.tuning.select import Selected, Task, select

# What a disk, another program or another version leaves in place of a file.
GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda old: old[: len(old) // 2],
    "empty": lambda _: b"",
    "binary": lambda _: os.urandom(300),
    "zeros": lambda old: bytes(len(old)),
    "one bit": lambda old: old[:7] + bytes([old[7] ^ 4]) + old[8:],
    "deep": lambda _: b"[" * 100_000,
    "deep but whole": lambda _: b'{"key":{"a":' + b"[" * 800 + b"]" * 800 + b'},"value":{},"versions":{}}',
    "pickle": lambda _: pickle.dumps({"guards": 3}),
    "number": lambda _: b"3",
    "huge number": lambda _: (
        b'{"key": {}, "value": {"schedule": 1e999}, "versions": {}, "guards": [' + b"9" * 5000 + b"]}"
    ),
    "null": lambda _: b"null",
    "list": lambda _: b"[[], [{}]]",
    "no text": lambda _: b"\xff\xfe\xff",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    insum_nn.clear_cache()
    store.unload()
    yield tmp_path / "cache"
    insum_nn.clear_cache()
    store.unload()


# Schedules.

KEY = store.key_of(
    "schedule",
    bind(parse("C[p] += A[p]"), {"A": torch.zeros(3)}, None),
    {},
    (2, 2),
    torch.device("cpu"),
)


def remembered() -> Schedule | None:
    """Everything that reads an entry."""
    store.near({**KEY, "bucket": [3, 2]})
    rule: Selected[Schedule | None] = Selected(None, "nothing is stored")
    return select(Task(KEY, lambda: rule, Schedule.from_json, lambda _: {})).candidate


@pytest.mark.parametrize("damage", GARBAGE.values(), ids=GARBAGE)
def test_a_damaged_schedule_is_measured_again(folder: Path, damage: Callable[[bytes], bytes]):
    value = {"schedule": Schedule(n=32).to_json(), "measured": []}
    store.write(KEY, value)
    (path,) = (folder / "schedules").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert remembered() is None
    store.unload()
    store.write(KEY, value)
    assert remembered() == Schedule(n=32)


VALUES = [
    None,
    True,
    -1,
    0,
    3,
    2**40,
    10**400,
    1e308,
    "x",
    [],
    {},
    [[]],
    {"n": 2**30},
    {"m": 4096, "n": 4096},
    {"warps": 64},
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_of_other_kinds(folder: Path, value: object):
    forms = [
        {"schedule": value, "measured": []},
        {"schedule": {}, "measured": value},
        {"schedule": {"n": value}, "measured": [{"schedule": {}, "microseconds": value}]},
        {"schedule": {"n": value}, "measured": []},
    ]
    for form in forms:
        store.write(KEY, form)
        store.unload()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = remembered()
        if found is not None:
            assert found.m * found.n * found.k <= 1 << 20
