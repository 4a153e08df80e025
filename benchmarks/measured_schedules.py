"""Times of schedules that were measured, as forms and schedules again: what the cost model is fitted to and judged by.

Two sources lie in the repository: the schedules that the package ships, each with the few fastest of its search, for
sizes known within a factor of two; and the benchmark `sgap`, reduction widths good and bad for sizes that are known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.sgap import schedule_of
from benchmarks.graphs import GRAPHS, pattern
from benchmarks.registry import Setting, Unavailable
from insum_nn.compiler.forms.form import LONGEST, ROW_LOOP, Form, make_form
from insum_nn.compiler.lang.bind import Bound, layout_of
from insum_nn.compiler.lang.epilogue import Epilogue
from insum_nn.compiler.runtime.dispatch import parse_cached
from insum_nn.compiler.schedule.space import Precision, Schedule
from insum_nn.facts import UNKNOWN, IndexFacts, StaticTable

__all__ = ["SPMM", "Measured", "form_of", "of_sgap", "of_shipped", "sized"]

SHIPPED = Path(__file__).parents[1] / "insum_nn" / "schedules" / "h200.json"


@dataclass(frozen=True)
class Measured:
    """What schedules of one form took.

    Attributes:
        name: where it is from.
        form: the form with its sizes.
        precision: of float32 products.
        times: microseconds by schedule, the fastest first.
        exact: the sizes are those that were measured, else the largest of their bucket.
        key: of the database, where it is from there.
    """

    name: str
    form: Form
    precision: Precision
    times: Mapping[Schedule, float]
    exact: bool
    key: Mapping[str, Any] = field(default_factory=dict)


def form_of(key: Mapping[str, Any], tables: Mapping[str, StaticTable], longest: int | None = None) -> Form:
    """The form of a stored key, of the largest sizes of its bucket but for those compiled in."""
    statement = parse_cached(key["statement"])
    layout = layout_of(statement)
    dtype = getattr(torch, key["dtype"])
    fixed = dict(key["static"])
    bucket = key["bucket"]
    # Sizes are anywhere between half of these and these.
    sizes = {name: max(1, round(0.75 * (1 << power))) for name, power in zip(layout.indices, bucket, strict=False)}
    sizes |= fixed
    output = tuple(
        max(1, round(0.75 * (1 << power))) if name is None else sizes[name]
        for name, power in zip(layout.output_plain, bucket[len(layout.indices) :], strict=True)
    )
    facts = {
        name: IndexFacts(
            sorted=told.get("sorted", False),
            unique=told.get("unique", False),
            masked=told.get("masked"),
            unique_with=tuple(told.get("unique_with", ())),
            proven=True,
        )
        for name, told in key["facts"].items()
    }
    bound = Bound(
        statement,
        dtype,
        tuple(getattr(torch, key["index_dtypes"].get(name, key["dtype"])) for name in layout.tensors),
        "cuda",
        key["has_initial"] == "True",
        tuple(facts.get(name, UNKNOWN) for name in layout.tensors),
        key["drop_outside"] == "True",
        tuple(sorted(fixed.items())),
        Epilogue("relu") if key["epilogue"] == "relu" else Epilogue(),
    )
    form = make_form(bound, sizes, output, tables, deterministic=False)
    if form.row_index is not None and form.product is None:
        mean = max(1, form.terms_of_all // max(1, form.rows))
        skew = 3 if key.get("rows") == "even" else 20
        form = replace(form, sizes={**form.sizes, LONGEST: longest or skew * mean})
    return form


def _of_graph(form: Form, key: Mapping[str, Any], root: Path | None) -> Form:
    """A sparse product with the sizes of the first graph of the benchmarks that its bucket and its groups belong to."""
    if form.row_index is None or form.product is not None or len(form.entries) != 1:
        return form
    group, (entries,) = form.terms, form.entries
    for graph in GRAPHS:
        known = _rows_of(graph, root)
        if known is None:
            continue
        nodes, terms, longest = known
        groups = terms if group == 1 else int(terms / group + 0.5 * nodes)
        longest = -(-longest // group)
        even = longest * nodes <= 4 * groups
        fits = _bucket(nodes) == _bucket(form.rows) and _bucket(groups) == _bucket(form.sizes[entries])
        if fits and even == (key.get("rows") == "even"):
            return sized(form, nodes, groups, longest)
    return form


def _bucket(size: int) -> int:
    return max(0, size - 1).bit_length()


def sized(form: Form, rows: int, entries: int, longest: int) -> Form:
    """A sum by the rows of one index tensor, of so many rows and entries."""
    (name,) = form.entries
    return replace(form, sizes={**form.sizes, name: entries, ROW_LOOP: rows, LONGEST: longest})


def of_shipped(tables: Mapping[str, StaticTable], root: Path | None) -> Iterator[Measured]:
    """The schedules of the package, but for kernels of several outputs and tables that are not among those given.

    Args:
        tables: static tensors by the digest under which keys name them.
        root: folder of the graphs that the benchmarks read.
    """
    for number, entry in enumerate(json.loads(SHIPPED.read_text())["entries"]):
        key, value = entry["key"], entry["value"]
        if key["kind"] != "schedule" or "algorithm" in key or not set(key["tables"].values()) <= tables.keys():
            continue
        form = form_of(key, {name: tables[digest] for name, digest in key["tables"].items()})
        form = _of_graph(form, key, root)
        # A schedule that was measured twice has its better time.
        times = {Schedule(**each["schedule"]): each["microseconds"] for each in reversed(value["measured"])}
        times = dict(sorted(times.items(), key=lambda pair: pair[1]))
        yield Measured(f"shipped {number}", form, key["precision"], times, False, key)


SPMM: dict[str, Any] = {
    "statement": "out[x0[a],b] += t0[a] * t1[x1[a],b]",
    "dtype": "float32",
    "bucket": [0, 0, 0, 0],
    "index_dtypes": {"x0": "int64", "x1": "int64"},
    "facts": {"x0": {"sorted": True, "masked": False}, "x1": {"masked": False}},
    "has_initial": "False",
    "drop_outside": "False",
    "epilogue": "nothing",
}


def of_sgap(files: Sequence[Path], root: Path | None) -> Iterator[Measured]:
    """The reduction widths of the benchmark `sgap`, of graphs that are under `root` or synthetic."""
    found: dict[tuple[str, int], dict[Schedule, float]] = {}
    for file in files:
        for record in json.loads(file.read_text()):
            kind, _, width = record["provider"].removeprefix("insum_nn/").partition("-r")
            if not record["case"].startswith("sgap/") or kind != "row" or record["gate"] != "passed":
                continue
            graph, columns = (part.split("=")[1] for part in record["case"].split("/")[1:])
            times = found.setdefault((graph, int(columns)), {})
            schedule = schedule_of(int(width), int(columns))
            times[schedule] = min(1000.0 * record["ms"]["p50"], times.get(schedule, float("inf")))
    for (graph, columns), times in found.items():
        known = _rows_of(graph, root)
        if known is None:
            continue
        nodes, entries, longest = known
        key = {**SPMM, "static": {"b": columns}}
        form = sized(form_of(key, {}), nodes, entries, longest)
        times = dict(sorted(times.items(), key=lambda pair: pair[1]))
        yield Measured(f"sgap {graph} {columns}", form, "tf32x3", times, True)


@cache
def _rows_of(graph: str, root: Path | None) -> tuple[int, int, int] | None:
    """Nodes, entries and the longest row of a graph."""
    try:
        nodes, row, _ = pattern(Setting(torch.device("cpu"), root=root), graph)
    except Unavailable:
        return None
    return nodes, row.numel(), int(row.bincount().max())
