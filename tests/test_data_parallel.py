"""The benchmark of several processes: its records, what it checks, and its table."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import archive, data_parallel, tables
from benchmarks.data_parallel import Throughput, speedup

HOW = ["--size", "tiny", "--device", "cpu", "--rounds", "2", "--commit", "a_commit"]
WORDS = [*HOW, "--out"]


@pytest.mark.slow
def test_steps_in_one_process_and_in_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    update = archive.update
    monkeypatch.setattr(archive, "HISTORY", tmp_path / "history")
    monkeypatch.setattr(archive, "update", lambda: update(tmp_path))
    assert data_parallel.main(["nequip_32", *HOW, "--save"]) == 0
    (out,) = (tmp_path / "history" / "data_parallel").iterdir()
    records: list[Throughput] = json.loads(out.read_text(encoding="utf-8"))
    names = [(r["network"], r["provider"], r["way"], r["ranks"]) for r in records]
    assert names == [("nequip_32", "insum_nn", *way) for way in (("plain", 1), ("ddp", 1), ("plain", 2), ("ddp", 2))]
    for record in records:
        assert list(record) == list(Throughput.__annotations__)
        assert (record["gate"], record["backend"], record["commit"]) == ("passed", "gloo", "a_commit")
        assert record["seconds"] is not None
        assert len(record["seconds"]) == 2
        assert record["batches_per_s"] == pytest.approx(record["ranks"] / (sum(record["seconds"]) / 2))
    assert records[3]["between_ranks"] == 0
    assert records[3]["from_mean"] is not None
    assert records[3]["from_mean"] < 1e-5
    assert "times the batches a second of one" in capsys.readouterr().out
    table = tables.data_parallel_table(archive.current_entries("data_parallel", results=tmp_path))
    ratio = speedup(records, "nequip_32", "insum_nn")
    assert f"{ratio:.2f}x" in next(line for line in table.splitlines() if "nequip_32" in line)
    assert "not measured" in next(line for line in table.splitlines() if "nequip_864" in line)


def test_what_cannot_run_has_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "x.json"
    assert data_parallel.main(["gcn_sampled", "nequip_32", *WORDS, str(out), "--budget", "0"]) == 1
    found = [(r["network"], r["gate"]) for r in json.loads(out.read_text())]
    assert found == [(name, "not run: the budget was spent") for name in ("gcn_sampled", "nequip_32")]
    assert data_parallel.main(["nequip_32", *WORDS, str(out), "--limit", "0.2"]) == 1
    assert [r["gate"] for r in json.loads(out.read_text())] == ["error: no result after 0 s"]
    for wrong in (["gcn_2k"], ["another"]):
        with pytest.raises(SystemExit):
            data_parallel.main([*wrong, *WORDS, str(out)])
    assert "1 batches of gcn_2k cannot be divided among 2 processes" in capsys.readouterr().err


class Ranks:
    """`torch.distributed.all_reduce` among threads of this process, each of which is a rank."""

    def __init__(self) -> None:
        self.local = threading.local()

    def run(self, ranks: int, body: Callable[[int], Any]) -> list[Any]:
        """Call a function in each rank at the same time; return what it returns, by rank."""
        store: Any = torch.distributed.HashStore()

        def one(rank: int) -> Any:
            options = datetime.timedelta(seconds=60)
            self.local.group = torch.distributed.ProcessGroupGloo(store, rank, ranks, options)
            return body(rank)

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))

    def all_reduce(self, tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = op
        self.local.group.allreduce([tensor], options).wait()


def test_gradients_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Gradients that are averaged, that are not, and that differ between processes."""
    ranks = Ranks()
    monkeypatch.setattr(torch.distributed, "all_reduce", ranks.all_reduce)

    def check(rank: int) -> list[tuple[float, float]]:
        own, mean = torch.tensor([3.0, 4.0]) * (1 + 2 * rank), torch.tensor([6.0, 8.0])
        return [data_parallel._check([got], [own], 2) for got in (mean, mean * 1.1, own)]

    for good, far, different in ranks.run(2, check):
        assert good == (0.0, 0.0)
        assert far == (0.0, pytest.approx(0.1))
        assert different == (8.0, pytest.approx(0.5))
