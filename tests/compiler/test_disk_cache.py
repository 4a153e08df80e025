"""Compiled programs outlive their process: found on disk, damaged entries ignored, several processes at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

SCRIPT = """
import torch, insum_nn
from insum_nn import Options
from insum_nn.compiler.runtime import execution
program = insum_nn.compile("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]", options=Options(backend="inductor"))
torch.manual_seed(0)
for size in (6, 11):
    tensors = {
        "Row": torch.randint(0, 5, (size,)), "Col": torch.randint(-1, 7, (size, 3)),
        "Val": torch.randn(size, 3), "B": torch.randn(7, 9),
    }
    found = program(tensors=tensors, out_shape=(5, None)).double()
    assert torch.allclose(found, program.reference(tensors=tensors, out_shape=(5, None)), atol=1e-5)
(held,) = execution._cache.values()
print([variant.from_disk for variant in held.run.variants])
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "INSUM_NN_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which a first process has compiled the program; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("compiled")
    assert finish(start(folder)) == "[False]"
    return folder


def test_a_second_process_finds_the_program(compiled: Path):
    assert finish(start(compiled)) == "[True]"


def test_a_torn_entry_is_compiled_again(compiled: Path, tmp_path: Path):
    shutil.copytree(compiled, tmp_path / "copy")
    (entry,) = (tmp_path / "copy" / "inductor").iterdir()
    (entry / "artifact").write_bytes(b"torn")
    assert finish(start(tmp_path / "copy")) == "[False]"


def test_several_processes_start_at_once(tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    for process in processes:
        assert finish(process) in ("[False]", "[True]")
    entries = list((tmp_path / "inductor").iterdir())
    # The one that lost the race may leave nothing half-written behind.
    assert all((entry / "artifact").is_file() and (entry / "guards.json").is_file() for entry in entries)
    assert finish(start(tmp_path)) == "[True]"
