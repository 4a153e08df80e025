"""A pytest plugin that writes the statements of the tests it ran to `statements.json`, each with its first sizes.

python -m pytest -p tests.compiler.corpus.record tests/ops tests/layers tests/test_paper_expressions.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from insum_nn.compiler.runtime.execution import Executables
from insum_nn.compiler.tuning.database import digest
from tests.compiler.corpus.statements import RECORDED, Entry, from_call

# Of statements with static tables so many are kept, those of the fewest numbers.
_MOST_NUMBERS, _MOST_WITH_TABLES = 200, 100

_found: dict[str, Entry] = {}
_prepare: Any = Executables.of


def _recording(self: Executables, tensors: Any, extents: Any) -> Any:
    bound, options, static = self.bound, self.options, self.static
    sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
    dense = 0 not in extents.indices and 0 not in extents.output and bound.dtype.is_floating_point
    if dense and sum(len(table.values) for _, table in static) <= _MOST_NUMBERS:
        fixed = tuple(sorted((name, sizes[name]) for name in _features(bound, tensors)))
        entry = from_call("", replace(bound, static=fixed), tuple(tuple(t.shape) for t in tensors), extents, options,
                          static)  # fmt: skip
        # Tests repeat a statement at many sizes and dtypes; one of each kind of facts is enough.
        seen = {k: v for k, v in entry.to_json().items() if k not in ("shapes", "extents", "fixed", "dtype", "tables")}
        _found.setdefault(digest(seen), entry)
    return _prepare(self, tensors, extents)


def _features(bound: Any, tensors: Any) -> set[str]:
    """Indices of dense feature axes, whose extents a kernel is compiled for."""
    layout = bound.layout
    indexed = {where for where, name in enumerate(layout.tensors) if name in layout.index_tensors}
    return {
        name
        for name, places in zip(layout.indices, layout.plain, strict=True)
        if places and all(where not in indexed and axis > 0 for where, axis in places)
    }


def pytest_configure() -> None:
    Executables.of = _recording  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    Executables.of = _prepare
    entries = sorted(_found.values(), key=lambda entry: sum(len(table.values) for _, table in entry.tables))
    plain, tabled = [e for e in entries if not e.tables], [e for e in entries if e.tables]
    chosen = [*plain, *tabled[:_MOST_WITH_TABLES]]
    lines = sorted(json.dumps(entry.to_json(), ensure_ascii=False, separators=(",", ":")) for entry in chosen)
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
