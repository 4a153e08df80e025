"""Files of the cache folder that are not what was written: no call fails or errs because of them."""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

import insum_nn
from insum_nn import Options
from insum_nn.compiler.codegen import inductor, inductor_guards
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.nodes import Size
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.runtime import execution
from insum_nn.compiler.schedule import cache_folder, tune
from insum_nn.compiler.schedule import database as store
from insum_nn.compiler.schedule.select import Selected
from insum_nn.compiler.schedule.space import Schedule

EXPRESSION = "C[Row[p],n] += Val[p] * B[Col[p],n]"

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


def remembered() -> Selected[Schedule] | None:
    """Everything that reads an entry."""
    entry = store.find(KEY)
    store.near({**KEY, "bucket": [3, 2]})
    return tune._decoded(entry)


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
    entry = store.find(KEY)
    assert entry is not None
    assert tune._decoded(entry).candidate == Schedule(n=32)


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
            known = remembered()
        if known is not None:
            found = known.candidate
            assert found.m * found.n * found.k <= 1 << 20


# Compiled code.


def call() -> bool:
    """Whether a program that Inductor compiles, and whose result is right, was found on disk."""
    insum_nn.clear_cache()
    torch.manual_seed(0)
    row, col, val, dense = torch.randint(5, (9,)), torch.randint(7, (9,)), torch.randn(9), torch.randn(7, 4)
    program = insum_nn.compile(EXPRESSION, options=Options(backend="inductor"))
    result = program(Row=row, Col=col, Val=val, B=dense, out_shape=(5, None))
    (held,) = execution._cache.values()
    torch.testing.assert_close(result, torch.zeros(5, 4).index_add(0, row, val[:, None] * dense[col]))
    return held.run.variants[-1].from_disk  # type: ignore[union-attr]


def signed(facts: object) -> str:
    """Facts as they are written."""
    return json.dumps({"facts": facts, "digest": store.digest(facts)})


@pytest.mark.compile
def test_a_damaged_program_is_compiled_again_and_replaced(folder: Path):
    assert not call()
    assert call()
    (entry,) = (folder / "inductor").iterdir()
    assert {"artifact", "guards.json"} == {file.name for file in entry.iterdir()}
    text, artifact = (entry / "guards.json").read_bytes(), (entry / "artifact").read_bytes()
    facts = json.loads(text)["facts"]
    assert signed(facts).encode() == text
    damaged = [damage(text) for damage in GARBAGE.values()]
    draw = random.Random(0)
    for place in draw.sample(range(len(text)), 40):
        damaged.append(text[:place] + bytes([text[place] ^ (1 << draw.randrange(8))]) + text[place + 1 :])
    # Well-formed, and still no entry.
    damaged += [
        signed(value).encode()
        for value in (
            {**facts, "artifact": ""},
            {**facts, "guards": [["Pow", "s0", 10**9]]},
            {**facts, "guards": [["__import__", "os"]]},
            {**facts, "guards": ["import os"]},
            {**facts, "symbols": [["s0", 99, 0]], "guards": [["Equality", "s0", 3]]},
            {**facts, "symbols": [["s0", 0.5, None]]},
            {"guards": []},
        )
    ]
    for content in damaged:
        (entry / "guards.json").write_bytes(content)
        with pytest.raises((OSError, *store.UNREADABLE)):
            inductor._load(entry, [])
    for file, content in (("guards.json", GARBAGE["deep"](b"")), ("artifact", artifact[:-100])):
        (entry / file).write_bytes(content)
        assert not call()
        assert call()
    # A file in place of the folder.
    for file in tuple(entry.iterdir()):
        file.unlink()
    entry.rmdir()
    entry.write_text("no folder")
    assert not call()
    assert call()
    assert [path.name for path in (folder / "inductor").iterdir()] == [entry.name]


def test_guards_are_data():
    size, other = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("s1", integer=True, positive=True)
    expressions = [
        sympy.Eq(size, 2 * other + 1),
        sympy.And(size > 1, sympy.Or(other <= 7, sympy.Not(sympy.Ne(Mod(size, 4), 3)))),
        FloorDiv(size * other, 3) < size**2,
        sympy.Max(size, other) >= sympy.Min(size, 5) - other,
    ]
    trees = json.loads(json.dumps([inductor_guards.tree_of(expression) for expression in expressions]))
    for tree, expression in zip(inductor_guards.checked(trees, ["s0", "s1"]), expressions, strict=True):
        check = inductor_guards.compiled(tree)
        for a in range(1, 12):
            for b in range(1, 12):
                assert check({"s0": a, "s1": b}) == bool(expression.subs({size: a, other: b})), (expression, a, b)
    with pytest.raises(ValueError, match="has no form on disk"):
        inductor_guards.tree_of(sympy.sin(size))
    with pytest.raises(ValueError, match="is no guard"):
        inductor_guards.checked(["s2"], ["s0"])


def test_a_guard_without_a_form_serves_its_own_sizes():
    compiled = inductor.Compiled(lambda x: x, (), (("s0", 0, 0),), "", from_disk=False, only=(3,))
    assert compiled.fits([torch.zeros(3)])
    assert not compiled.fits([torch.zeros(4)])


# Whose folder it is.


def test_folders_are_their_owners_alone(folder: Path):
    before = os.umask(0)
    try:
        store.write(KEY, {})
    finally:
        os.umask(before)
    for path in (folder, folder / "schedules"):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_others_can_write_is_not_used(folder: Path, mode: int, inner: bool):
    store.write(KEY, {"schedule": {}, "measured": []})
    assert store.find(KEY) is not None
    (folder / "schedules" if inner else folder).chmod(mode)
    with pytest.warns(UserWarning, match="is not used, because others may write to it") as caught:
        store.write({**KEY, "bucket": [9]}, {})
    assert store.find(KEY) is None
    assert len(caught) == 1
    assert len(list((folder / "schedules").iterdir())) == 1


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    store.write(KEY, {})
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="it belongs to user"):
        assert cache_folder.own_folder("inductor") is None


@pytest.mark.compile
def test_without_a_folder_programs_are_compiled_in_memory(folder: Path):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="is not used"):
        assert not call()
    assert not list(folder.iterdir())


def test_the_key_holds_the_instruction_set(monkeypatch: pytest.MonkeyPatch):
    bound = bind(parse("C[p] += A[p]"), {"A": torch.zeros(3)}, None)
    graph = CallGraph()
    graph.finish(graph.argument(Size("A")))
    first = inductor._key(graph, bound, Options(), (), torch.device("cpu"))
    monkeypatch.setattr(inductor, "_instruction_set", lambda: "another processor")
    assert inductor._key(graph, bound, Options(), (), torch.device("cpu")) != first
