"""The corpus' statements: each with the dtypes, facts and sizes of one call, and no tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, Extents, layout_of, show_dtype
from insum_nn.compiler.lang.epilogue import Epilogue
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.dispatch import parse_cached
from insum_nn.facts import UNKNOWN, IndexFacts, StaticTable
from insum_nn.testing.random_programs import random_program
from tests.compiler.generated_cases import CASES

__all__ = ["RECORDED", "Entry", "entries", "from_call", "recorded"]

RECORDED = Path(__file__).with_name("statements.json")
SHIPPED = Path(__file__).parent / "shipped.json"
# Kernels are written for a GPU, and none is needed to write them.
DEVICE_TYPE = "cuda"
RANDOM_PROGRAMS = 500
SCALES = (1, 8)
DTYPES = (torch.float32, torch.float16, torch.float64)


@dataclass(frozen=True)
class Entry:
    """One statement of the corpus.

    Attributes:
        name: where it is from, unique.
        bound: the statement with dtypes, facts and compiled-in extents.
        shapes: of the tensors in the layout's order.
        extents: the sizes of the call.
        options: compile options.
        tables: static tensors by name.
        every_candidate: digest the kernel of every candidate schedule, not of the default alone.
    """

    name: str
    bound: Bound
    shapes: tuple[tuple[int, ...], ...]
    extents: Extents
    options: Options
    tables: tuple[tuple[str, StaticTable], ...] = ()
    every_candidate: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Stand-ins of the call's shapes and dtypes; none has memory."""
        pairs = zip(self.shapes, self.bound.index_dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in pairs]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.bound.layout.indices, self.extents.indices, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The entry as `recorded` reads it."""
        bound = self.bound
        named = zip(bound.layout.tensors, bound.index_dtypes, bound.facts, strict=True)
        line = {
            "statement": bound.statement.text,
            "dtype": show_dtype(bound.dtype),
            "indices": {n: [show_dtype(d), _changed(f)] for n, d, f in named if n in bound.layout.index_tensors},
            "shapes": self.shapes,
            "extents": [self.extents.indices, self.extents.output],
            "fixed": bound.static,
            "drop_outside": bound.drop_outside,
            "has_initial": bound.has_initial,
            "epilogue": _changed(bound.epilogue),
            "options": _changed(self.options),
            "tables": {name: [table.shape, table.values] for name, table in self.tables},
        }
        return {key: value for key, value in line.items() if value not in ({}, (), False)}


def entries() -> Iterator[Entry]:
    """Every statement of the corpus."""
    yield from _generator_cases()
    yield from _shipped()
    yield from recorded()
    for seed in range(RANDOM_PROGRAMS):
        yield from _random(seed)


def from_call(
    name: str,
    bound: Bound,
    shapes: tuple[tuple[int, ...], ...],
    extents: Extents,
    options: Options,
    tables: tuple[tuple[str, StaticTable], ...] = (),
) -> Entry:
    return Entry(name, replace(bound, device_type=DEVICE_TYPE), shapes, extents, options, tables)


def _bound(
    text: str,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    facts: tuple[IndexFacts, ...],
    *,
    fixed: tuple[tuple[str, int], ...] = (),
    has_initial: bool = False,
    drop_outside: bool = False,
    epilogue: Epilogue | None = None,
) -> Bound:
    return Bound(
        parse_cached(text), dtype, dtypes, DEVICE_TYPE, has_initial, facts, drop_outside, fixed, epilogue or Epilogue()
    )


def _generator_cases() -> Iterator[Entry]:
    for name, case in CASES.items():
        statement = parse_cached(case.expression)
        layout = layout_of(statement)
        for scale in SCALES:
            torch.manual_seed(0)
            drawn = case.draw(scale)
            ordered = [drawn[tensor] for tensor in layout.tensors]
            extents = resolve_extents(statement, ordered, None, {}, case.out_shape(scale))
            sizes = dict(zip(layout.indices, extents.indices, strict=True))
            facts = tuple(case.facts.get(tensor, UNKNOWN) for tensor in layout.tensors)
            tables = tuple((tensor, StaticTable.of(drawn[tensor])) for tensor in sorted(case.static))
            for dtype in DTYPES:
                dtypes = tuple(t.dtype if tensor in layout.index_tensors else dtype
                               for tensor, t in zip(layout.tensors, ordered, strict=True))  # fmt: skip
                fixed = tuple(sorted((index, sizes[index]) for index in case.fixed))
                bound = _bound(case.expression, dtype, dtypes, facts, fixed=fixed)
                shapes = tuple(tuple(t.shape) for t in ordered)
                title = f"case: {name}, scale {scale}, {dtype}"
                yield Entry(title, bound, shapes, extents, Options(), tables, every_candidate=scale == 8)


def _shipped() -> Iterator[Entry]:
    """Statements whose schedules were shipped with the package, but for those with static tables."""
    for line in json.loads(SHIPPED.read_text()):
        layout = layout_of(parse_cached(line["statement"]))
        dtype = getattr(torch, line["dtype"])
        known = {name: (getattr(torch, kind), _facts(facts)) for name, (kind, facts) in line["indices"].items()}
        fixed = tuple((name, size) for name, size in line["fixed"])
        bucket = line["bucket"]
        sizes = {name: 1 << power for name, power in zip(layout.indices, bucket, strict=False)} | dict(fixed)
        output = tuple(
            1 << power if name is None else sizes[name]
            for name, power in zip(layout.output_plain, bucket[len(layout.indices) :], strict=True)
        )
        shapes = tuple(_shape(layout.plain, layout.indices, sizes, where, rank) for where, rank in
                       enumerate(layout.ranks))  # fmt: skip
        bound = _bound(
            line["statement"],
            dtype,
            tuple(known.get(name, (dtype,))[0] for name in layout.tensors),
            tuple(known[name][1] if name in known else UNKNOWN for name in layout.tensors),
            fixed=fixed,
            has_initial="has_initial" in line,
            drop_outside="drop_outside" in line,
        )
        extents = Extents(tuple(sizes[name] for name in layout.indices), output)
        title = f"shipped {line['number']}: {line['statement']}, {line['dtype']}"
        yield Entry(title, bound, shapes, extents, Options(), (), every_candidate=True)


def _shape(
    plain: tuple[tuple[tuple[int, int], ...], ...],
    indices: tuple[str, ...],
    sizes: dict[str, int],
    where: int,
    rank: int,
) -> tuple[int, ...]:
    """A tensor's shape; an axis that no index addresses directly has as many cells as the largest index."""
    shape = [max(sizes.values())] * rank
    for name, places in zip(indices, plain, strict=True):
        for tensor, axis in places:
            if tensor == where:
                shape[axis] = sizes[name]
    return tuple(shape)


def _facts(values: dict[str, Any]) -> IndexFacts:
    return IndexFacts(**{**values, "unique_with": tuple(values.get("unique_with", ()))})


def recorded() -> Iterator[Entry]:
    """The calls that tests made."""
    if not RECORDED.exists():
        return
    for number, line in enumerate(json.loads(RECORDED.read_text())):
        known = {
            name: (getattr(torch, dtype), _facts(facts)) for name, (dtype, facts) in line.get("indices", {}).items()
        }
        dtype = getattr(torch, line["dtype"])
        tensors = layout_of(parse_cached(line["statement"])).tensors
        bound = _bound(
            line["statement"],
            dtype,
            tuple(known.get(name, (dtype,))[0] for name in tensors),
            tuple(known[name][1] if name in known else UNKNOWN for name in tensors),
            fixed=tuple((name, size) for name, size in line.get("fixed", ())),
            has_initial="has_initial" in line,
            drop_outside="drop_outside" in line,
            epilogue=Epilogue(**line.get("epilogue", {})),
        )
        indices, output = line["extents"]
        named = line.get("tables", {}).items()
        tables = tuple((name, StaticTable(tuple(shape), tuple(values))) for name, (shape, values) in named)
        shapes = tuple(tuple(shape) for shape in line.get("shapes", ()))
        extents = Extents(tuple(indices), tuple(output))
        title = f"recorded {number}: {line['statement']}, {line['dtype']}"
        yield Entry(title, bound, shapes, extents, Options(**line.get("options", {})), tables)


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    plain = type(value)()
    return {name: field for name, field in asdict(value).items() if field != getattr(plain, name)}


def _random(seed: int) -> Iterator[Entry]:
    program = random_program(seed)
    statement = parse_cached(program.expression)
    layout = layout_of(statement)
    ordered = [program.tensors[name] for name in layout.tensors]
    extents = resolve_extents(statement, ordered, program.initial, program.sizes, program.out_shape)
    if 0 in extents.indices or 0 in extents.output or any(t.numel() == 0 for t in ordered):
        return
    dtypes = tuple(t.dtype for t in ordered)
    dtype = next((t.dtype for t in ordered if t.is_floating_point()), torch.float64)
    bound = _bound(
        program.expression, dtype, dtypes, (UNKNOWN,) * len(ordered), has_initial=program.initial is not None
    )  # fmt: skip
    yield Entry(f"random {seed}", bound, tuple(tuple(t.shape) for t in ordered), extents, Options())
