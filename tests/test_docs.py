"""The documents tell the truth: their Python blocks run, their commands and files exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The page's blocks fenced as `python`: the line of the first, and the text."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in found]


def run_page(name: str, blocks: list[tuple[int, str]]) -> None:
    """Run blocks in order, in one namespace; those with a `>>>` are compared with the output that they show."""
    names: dict[str, object] = {"__name__": "__main__"}
    for line, block in blocks:
        if ">>> " not in block:
            # Line breaks in front put the page's own line numbers into a traceback.
            exec(compile("\n" * line + block, name, "exec", dont_inherit=True), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, name, name, line)
        report: list[str] = []
        outcome = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
        if outcome.failed:
            pytest.fail("".join(report), pytrace=False)
        names = test.globs


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.name, python_blocks(page))


def test_a_wrong_block_is_seen():
    run_page("page", [(0, ">>> x = 1\n"), (3, "assert x == 1\n"), (5, ">>> x\n1\n")])
    with pytest.raises(pytest.fail.Exception, match=r"Expected:\s+2"):
        run_page("page", [(0, ">>> 1\n2\n")])
    with pytest.raises(AssertionError):
        run_page("page", [(0, "assert False\n")])


def test_the_readme_has_a_block_that_runs():
    assert python_blocks(ROOT / "README.md")


def test_commands_exist():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"^\s*make ([a-z0-9-]+)|`make ([a-z0-9-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {a or b for a, b in named} <= targets, page.name


def test_every_command_is_described():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert declared
    described = set(re.findall(r"^([a-z0-9-]+):.*##", makefile, re.MULTILINE))
    assert set(declared.group(1).split()) == described


def test_linked_files_exist():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name
