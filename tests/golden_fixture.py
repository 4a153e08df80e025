"""Golden text: a result is compared with a committed file, and `--update-golden` rewrites the file.

    def test_plan(golden):
        golden("plan/spmm", str(plan))        # tests/golden/plan/spmm.txt

A missing file is a failure, as is any difference; line endings at the end of the text do not count.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files of tests/golden from the results")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` compares `text` with `tests/golden/<name>.txt`."""
    update = request.config.getoption("--update-golden")
    seen: set[str] = set()

    def compare(name: str, text: str) -> None:
        if not re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)*", name):
            raise ValueError(f"golden name {name!r}: use lower-case words, '_' and '/'")
        if name in seen:
            raise ValueError(f"golden name {name!r} is used twice in one test")
        seen.add(name)
        path = GOLDEN / f"{name}.txt"
        got = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name}.txt is missing; look at the text, then run with --update-golden:\n{got}")
        want = path.read_text(encoding="utf-8")
        if got != want:
            lines = difflib.unified_diff(want.splitlines(), got.splitlines(), f"golden/{name}.txt", "got", lineterm="")
            pytest.fail("\n".join([*lines, "", "if the new text is right: pytest --update-golden"]), pytrace=False)

    return compare
