"""The benchmark of several processes: its records, what it checks, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import archive, data_parallel, tables
from benchmarks.data_parallel import Throughput, speedup
from tests.ranks import device_of, meeting

WORDS = ["--size", "tiny", "--device", "cpu", "--rounds", "2", "--commit", "a_commit", "--out"]


@pytest.mark.slow
def test_steps_in_one_process_and_in_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "data-parallel-some-day.json"
    assert data_parallel.main(["gcn_sampled", "nequip_32", *WORDS, str(out)]) == 0
    records: list[Throughput] = json.loads(out.read_text(encoding="utf-8"))
    names = [(r["network"], r["provider"], r["way"], r["ranks"]) for r in records]
    ways = [("plain", 1), ("ddp", 1), ("plain", 2), ("ddp", 2)]
    assert names == [(name, "insum_nn", *way) for name in ("gcn_sampled", "nequip_32") for way in ways]
    for record in records:
        assert list(record) == list(Throughput.__annotations__)
        assert (record["gate"], record["backend"], record["commit"]) == ("passed", "gloo", "a_commit")
        assert record["seconds"] is not None
        assert len(record["seconds"]) == 2
        assert record["batches_per_s"] == pytest.approx(record["ranks"] / (sum(record["seconds"]) / 2))
    for record in records[3::4]:
        assert record["between_ranks"] == 0
        assert record["from_mean"] is not None
        assert record["from_mean"] < 1e-5
    assert "times the batches a second of one" in capsys.readouterr().out
    found: Any = archive.data_parallel(tmp_path)
    table = tables.data_parallel_table(found)
    ratio = speedup(records, "nequip_32", "insum_nn")
    assert f"{ratio:.2f}x" in next(line for line in table.splitlines() if "nequip_32" in line)
    assert "not measured" in next(line for line in table.splitlines() if "nequip_864" in line)


def test_what_cannot_run_has_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "x.json"
    assert data_parallel.main(["nequip_32", *WORDS, str(out), "--budget", "0"]) == 1
    assert [r["gate"] for r in json.loads(out.read_text())] == ["not run: the budget was spent"]
    assert data_parallel.main(["nequip_32", *WORDS, str(out), "--limit", "0.2"]) == 1
    assert [r["gate"] for r in json.loads(out.read_text())] == ["error: no result after 0 s"]
    for wrong in (["gcn_2k"], ["another"]):
        with pytest.raises(SystemExit):
            data_parallel.main([*wrong, *WORDS, str(out)])
    assert "1 batches of gcn_2k cannot be divided among 2 processes" in capsys.readouterr().err


def check_as_a_rank(rank: int, folder: str) -> None:
    """Gradients that are averaged, that are not, and that differ between processes."""
    device = device_of("cpu", rank)
    with meeting(device, rank, folder):
        own, mean = torch.tensor([3.0, 4.0]) * (1 + 2 * rank), torch.tensor([6.0, 8.0])
        found = [data_parallel._check([got], [own], 2) for got in (mean, mean * 1.1, own)]
        torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_gradients_are_compared(tmp_path: Path):
    torch.multiprocessing.spawn(check_as_a_rank, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        good, far, different = torch.load(tmp_path / f"{rank}.pt")
        assert good == (0.0, 0.0)
        assert far == (0.0, pytest.approx(0.1))
        assert different == (8.0, pytest.approx(0.5))
