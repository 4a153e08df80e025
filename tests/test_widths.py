"""Sgap's table: its fixed schedules, and the lines drawn from records."""

from __future__ import annotations

import re
from typing import Any, cast

from benchmarks import report
from benchmarks.cases.sgap import WIDTHS, schedule_of
from benchmarks.records import RECORD, Record
from benchmarks.widths import width_table


def entry(case: str, provider: str, us: float | None) -> Record:
    fields: dict[str, Any] = dict.fromkeys(RECORD, None)
    fields |= {"case": case, "provider": provider, "mode": "fwd", "gate": "passed", "gpu": "H", "utc": "1"}
    fields |= {"ms": None if us is None else {"p50": us / 1e3}, "max_rel_err": 0.0, "commit": "c", "torch": "t"}
    return cast(Record, fields)


def test_nothing_but_the_width_differs():
    for n in (4, 16, 64, 128):
        for width in WIDTHS:
            schedule = schedule_of(width, n)
            assert (schedule.k, schedule.n) == (width, n)
            assert schedule.m * schedule.n * schedule.k <= 4096


def test_the_table_names_the_best_width_and_the_winner():
    times = {"row-r8": 10.0, "row-r32": 30.0, "segment-r4": 20.0, "segment-r32": 24.0, "segment-r1": None}
    records = [entry("sgap/graph=ppi/n=16", f"insum_nn/{name}", us) for name, us in times.items()]
    records.append(entry("sgap/graph=ppi/n=16", "torch_csr", 15.0))
    records.append(entry("sgap/graph=hub/n=16", "insum_nn/row-r32", 90.0))
    records.append(entry("sgap/graph=hub/n=16", "insum_nn/segment-r32", 9.0))
    groups: dict[str, dict[str, Record]] = {}
    for record in records:
        groups.setdefault(record["case"], {})[record["provider"]] = record
    lines = width_table(groups)
    cells = "ppi | 16 | r = 8 | 10.0 | 3.00x | r = 4 | 20.0 | 1.20x | row | 0.50x | 1.50x"
    assert f"| {cells} |" in lines
    assert "| hub | 16 | r = 32 | 90.0 | 1.00x | r = 32 | 9.0 | 1.00x | segment | 10.00x |  |" in lines
    assert lines[-1] == "| 16 | 1.73x | 1.10x | 1 | 1 |"
    assert width_table({"spmm/n=4": groups["sgap/graph=ppi/n=16"]}) == []
    assert re.search(r"## H: sgap\n(?s:.*)### Reduction widths\n\n\| graph", report.table(records))
