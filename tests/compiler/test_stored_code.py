"""Machine code found without the kernel's text, and one launcher for all signatures; compiled for an absent H200."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insum_nn.compiler.kernels import c_launcher
from insum_nn.compiler.kernels.background import compile_all
from insum_nn.compiler.kernels.c_launcher import prepare_launcher
from insum_nn.compiler.kernels.machine_code import KernelCode, compile_code, drop_module, make_module
from insum_nn.compiler.kernels.stored_code import find_code, remember_code
from tests.compiler.test_prepare import KERNEL, code

triton: Any = pytest.importorskip("triton")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches; the folder is that of the digests."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "ours"))
    return tmp_path / "ours" / "kernels"


def compiled(kernel: KernelCode) -> Any:
    module = make_module(kernel.module, kernel.text)
    try:
        return compile_code(module.__dict__[kernel.module], kernel)
    finally:
        drop_module(module)


def test_code_is_found_without_its_text(folder: Path):
    kernel = code("stored", KERNEL)
    assert find_code(kernel) is None
    made = compiled(kernel)
    # Triton has it, and no file says where.
    assert find_code(kernel) is None
    remember_code(kernel, made.hash)
    found = find_code(kernel)
    assert found.asm["cubin"] == made.asm["cubin"]
    assert (found.hash, found.metadata, found.packed_metadata) == (made.hash, made.metadata, made.packed_metadata)
    # Profilers show the name.
    assert found.name == kernel.module
    assert f".entry {kernel.module}(" in made.asm["ptx"]
    assert kernel.module not in sys.modules


def test_what_machine_code_depends_on_tells_kernels_apart(folder: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = code("stored", KERNEL)
    remember_code(kernel, compiled(kernel).hash)
    others = [
        replace(kernel, text=KERNEL.replace("64", "32")),
        replace(kernel, module="another"),
        replace(kernel, signature=("*fp32", "i64")),
        replace(kernel, aligned=(0, 1)),
        replace(kernel, options=(("num_warps", 2), ("num_stages", 2))),
        replace(kernel, target=("cuda", 80, 32)),
    ]
    assert [find_code(each) for each in others] == [None] * len(others)
    # How long it takes to compile makes no difference.
    assert find_code(replace(kernel, narrow=True)) is not None
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert find_code(kernel) is None


def test_other_processes_tell_the_digest(folder: Path):
    kernel = code("stored", KERNEL)
    (first,) = compile_all([kernel], 1)
    assert not first.found
    assert find_code(kernel) is not None


def _no_digest(folder: Path, caches: Path) -> None:
    (path,) = folder.iterdir()
    path.write_bytes(b"\xff../../../etc")


def _another_digest(folder: Path, caches: Path) -> None:
    (path,) = folder.iterdir()
    path.write_text("0" * 64)


def _nothing_compiled(folder: Path, caches: Path) -> None:
    for path in caches.glob("*/*.cubin"):
        path.unlink()


def _damaged_metadata(folder: Path, caches: Path) -> None:
    for path in caches.glob("*/test_kernel_stored.json"):
        path.write_text("{")


@pytest.mark.parametrize("damage", [_no_digest, _another_digest, _nothing_compiled, _damaged_metadata])
def test_what_is_damaged_is_not_found(folder: Path, damage: Callable[[Path, Path], None]):
    kernel = code("stored", KERNEL)
    remember_code(kernel, compiled(kernel).hash)
    damage(folder, folder.parents[1] / "triton")
    assert find_code(kernel) is None


def test_who_looks_at_compiling_sees_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = code("stored", KERNEL)
    remember_code(kernel, compiled(kernel).hash)
    told: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **named: told.append(named["cache_hit"]))
    assert find_code(kernel) is not None
    assert told == [True]
    for name in ("always_compile", "override", "dump_ir"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.compilation, name, True)
            assert find_code(kernel) is None


def test_kernels_of_all_signatures_share_a_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = code("stored", KERNEL)
    made = compiled(kernel)
    monkeypatch.setattr(c_launcher, "_is_written", lambda backend: False)
    source = made.src
    assert prepare_launcher(made, kernel.signature) == 0
    assert made.src is source
    monkeypatch.setattr(c_launcher, "_is_written", lambda backend: backend == "cuda")
    assert prepare_launcher(made, kernel.signature) == 10
    assert made.src.signature == dict.fromkeys(range(12), "i64")
    assert prepare_launcher(made, ["*fp32"] * 13) == 11
    made.metadata = SimpleNamespace(global_scratch_size=1, profile_scratch_size=0, target=made.metadata.target)
    assert prepare_launcher(made, kernel.signature) == 0
