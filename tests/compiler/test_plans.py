"""What is decided for a statement stays on disk: a second process decides nothing, and believes no damaged file."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from insum_nn.compiler.ir.schedule import precision_of
from insum_nn.compiler.kernels import sized
from insum_nn.compiler.kernels.sized import UnsizedKernel, strides_of
from insum_nn.compiler.lang.bind import Bound, bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.runtime import fused_kernels
from insum_nn.compiler.schedule import device as device_module
from insum_nn.compiler.schedule import form as form_module
from insum_nn.compiler.schedule import plan as plan_module
from insum_nn.compiler.schedule.coverage import coverage_of
from insum_nn.compiler.schedule.device import H200, without_measuring
from insum_nn.compiler.schedule.form import Form, FormError, make_form
from insum_nn.compiler.schedule.plan import Plan, keep_plans
from insum_nn.compiler.tuning.database import versions
from tests.compiler.corpus.statements import Entry, entries
from tests.compiler.fused_cases import Together, draw, named, programs, run, shape_of
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]
ROOT = Path(__file__).parents[2]
KEY = {"statement": "C[i] += A[i]"}


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of plans."""
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_module, "_changed", {})
    monkeypatch.setattr(plan_module, "_cleared", False)
    return tmp_path / "cache" / "plans"


def noted(value: Any = 1) -> None:
    Plan(KEY).get("what", lambda: value)
    keep_plans()


def known() -> Any:
    """What a process that begins now knows; nothing is noted, which would be written with the next decision."""
    return Plan(KEY)._decisions.get("what")


# Statements.


def forbid_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        pytest.fail("decided again")

    for module, names in (
        (form_module, ("choose_unrolling", "output_strategy", "unroll", "_find_product")),
        (sized, ("write_kernel",)),
        (device_module, ("_first_that_fits",)),
        (fused_kernels, ("_all_walks", "_cost")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(Form, "algorithm", property(fail))
    monkeypatch.setattr(Form, "stores", property(fail))


def planned(entry: Entry) -> list[object]:
    """All that a first call decides."""
    try:
        form = make_form(entry.bound, entry.sizes, entry.extents.output, dict(entry.tables), deterministic=False)
    except FormError as error:
        return [str(error)]
    precision = precision_of(entry.bound.dtype, entry.options.precision)
    schedule, reason = without_measuring(form, H200)
    kernel = UnsizedKernel(form, schedule, strides_of(form, entry.tensors, entry.extents, False, None), precision)
    facts = [form.strategy, form.row_index, form.row_axis, form.entries, form.parallel, form.reduce, form.tables]
    covered = coverage_of(form)(*entry.extents)
    return [schedule, reason, kernel.source, kernel.host_code(), kernel.further, covered, form.product, *facts]


def test_every_decision_of_the_corpus_is_read_as_it_was_made(monkeypatch: pytest.MonkeyPatch):
    some = [*itertools.islice(entries(), 0, None, 12)]
    with monkeypatch.context() as without:
        without.setattr(plan_module, "read", lambda *_: None)
        made = {entry.name: planned(entry) for entry in some}
    for entry in some:
        # No two of them take each other's.
        assert planned(entry) == made[entry.name], entry.name
    keep_plans()
    refused = {name for name, found in made.items() if len(found) == 1}
    assert len(refused) < len(some) / 2
    forbid_decisions(monkeypatch)
    for entry in some:
        if entry.name not in refused:
            assert planned(entry) == made[entry.name], entry.name


def bound_of(text: str) -> Bound:
    index = torch.tensor([0, 2, 1])
    row, value, matrix, column = parse(text).tensors()
    tensors = {row: index, value: torch.ones(3), column: index, matrix: torch.ones(5, 8)}
    return bind(parse(text), tensors, None)


def test_names_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    def kernel(text: str, p: str, n: str) -> UnsizedKernel:
        form = make_form(bound_of(text), {p: 3, n: 8}, (5, 8), {}, deterministic=False)
        strides = sized.Strides((True, False, True, True))
        return UnsizedKernel(form, without_measuring(form, H200)[0], strides, "tf32")

    first = kernel("C[Row[p],n] += Val[p] * B[Col[p],n]", "p", "n")
    keep_plans()
    forbid_decisions(monkeypatch)
    second = kernel("Z[y[a],b] += x[a] * U[a0[a],b]", "a", "b")
    assert second.source.text == first.source.text
    assert second.host_code() == first.host_code()
    assert second.source.arguments == first.source.arguments


@pytest.mark.usefixtures("interpreter")
def test_programs_that_run_together(monkeypatch: pytest.MonkeyPatch):
    tensors, shapes = draw(8), [shape_of(role, 8) for role in "xyw"]
    first = Together(programs("xyw"))
    found = run(first, named("xyw", tensors), shapes, 0)
    assert first.reason.startswith("together")
    keep_plans()
    forbid_decisions(monkeypatch)
    again = Together(programs("xyw"))
    for a, b in zip(run(again, named("xyw", tensors), shapes, 0), found, strict=True):
        torch.testing.assert_close(a, b)
    assert again.reason == first.reason


SCRIPT = """
import hashlib, json, torch
from benchmarks import networks
from benchmarks.registry import Setting
from insum_nn.compiler.schedule import device, form as form_module
from insum_nn.compiler.kernels import sized
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.runtime import fused_kernels
from tests.pretended_gpu import H200, pretended_gpu

counts = {}
def count(module, name):
    plain = getattr(module, name)
    counts[name] = 0
    def counted(*args, **kwargs):
        counts[name] += 1
        return plain(*args, **kwargs)
    setattr(module, name, counted)

count(sized, "write_kernel")
count(form_module, "choose_unrolling")
count(form_module, "unroll")
count(fused_kernels, "_cost")
count(device, "_first_that_fits")
torch.manual_seed(0)
cpu = torch.device("cpu")
step = networks.train(networks.network("nequip_32", Setting(cpu, "tiny")), "insum_nn", cpu)
with pretended_gpu(), collect(H200) as collection:
    step.on(step.batches[0])
texts = sorted(repr((code.text, code.signature, code.aligned, code.options)) for code in collection.codes)
print(json.dumps([counts, len(texts), hashlib.sha256("".join(texts).encode()).hexdigest()]))
"""


@pytest.mark.slow
def test_a_second_process_plans_nothing(tmp_path: Path):
    pytest.importorskip("e3nn")
    found: list[Any] = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (first, kernels, texts), (second, *same) = found
    assert kernels > 5
    assert all(first.values())
    assert set(second.values()) == {0}
    assert same == [kernels, texts]


# Files.


def test_a_decision_is_made_once():
    noted(5)
    assert known() == 5
    # Another name, and another key.
    assert Plan(KEY).get("else", lambda: 6) == 6
    assert Plan(KEY).at(bucket=[3]).get("what", lambda: 7) == 7


def test_another_state_of_the_compiler_or_other_versions(monkeypatch: pytest.MonkeyPatch):
    noted()
    for name, other in (("_compiler", lambda: "another"), ("versions", lambda: {**versions(), "torch": "9.9"})):
        with monkeypatch.context() as patched:
            patched.setattr(plan_module, name, other)
            assert known() is None
    assert known() == 1


def test_the_compilers_own_files_are_digested():
    assert re.fullmatch("[0-9a-f]{64}", plan_module._compiler())
    assert (Path(plan_module.__file__).parents[2] / "compiler" / "ir" / "nodes.py").exists()


def _truncate(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path, _: Path) -> None:
    whole = bytearray(path.read_bytes())
    assert whole.count(41) == 1
    whole[whole.index(41)] = 42
    path.write_bytes(whole)


def _no_text(path: Path, _: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def _of_another_key(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [_truncate, _empty, _flip, _no_text, _of_another_key])
def test_a_damaged_file_is_ignored_and_written_again(plans: Path, damage: Callable[[Path, Path], None]):
    Plan({"statement": "another"}).get("what", lambda: 99)
    keep_plans()
    (other,) = plans.iterdir()
    noted(41)
    (path,) = {*plans.iterdir()} - {other}
    damage(path, other)
    assert known() is None
    path.unlink()
    noted(41)
    damage(path, other)
    noted(5)
    assert known() == 5


def test_a_folder_that_is_not_this_users_alone(plans: Path):
    noted()
    plans.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write to it"):
        assert known() is None
    plans.chmod(0o700)
    assert known() == 1


def test_a_folder_that_cannot_be_written(plans: Path, monkeypatch: pytest.MonkeyPatch):
    noted()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    plan = Plan(KEY)
    assert plan.get("what", lambda: None) == 1
    assert plan.get("else", lambda: 2) == plan.get("else", lambda: 3) == 2
    keep_plans()
    assert len([*plans.iterdir()]) == 1
    assert known() == 1


def test_old_files_of_other_states_are_deleted(plans: Path, monkeypatch: pytest.MonkeyPatch):
    def written(days: float) -> Path:
        before = {*plans.iterdir()} if plans.exists() else set()
        noted(days)
        (path,) = {*plans.iterdir()} - before
        then = time.time() - days * 86_400
        os.utime(path, (then, then))
        return path

    own = written(60)
    with monkeypatch.context() as patched:
        patched.setattr(plan_module, "_compiler", lambda: "another")
        other = written(31)
        patched.setattr(plan_module, "_compiler", lambda: "a third")
        young = written(29)
    assert {*plans.iterdir()} == {own, other, young}
    monkeypatch.setattr(plan_module, "_cleared", False)
    # Another process may delete the same files meanwhile.
    plain = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **at: (plain(path, **at), plain(path, **at)))
    Plan(KEY).get("else", lambda: 1)
    keep_plans()
    assert {*plans.iterdir()} == {own, young}


def test_two_processes_keep_what_each_noted(plans: Path):
    one, two = Plan(KEY), Plan(KEY)
    one.get("one", lambda: 1)
    two.get("two", lambda: 2)
    keep_plans()
    assert [Plan(KEY).get(name, lambda: None) for name in ("one", "two")] == [1, 2]
    assert len([*plans.iterdir()]) == 1


def test_a_file_is_whole_whenever_it_is_read():
    noted("x" * 100_000)
    stop = threading.Event()

    def rewrite(number: int) -> None:
        while not stop.is_set():
            plan = Plan(KEY)
            plan.get(f"of {number}", lambda: "y" * 100_000)
            plan.write()

    writers = [threading.Thread(target=rewrite, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    try:
        assert all(known() == "x" * 100_000 for _ in range(200))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
