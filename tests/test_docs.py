"""The documents tell the truth: their Python blocks run, their commands and files exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.markdown_blocks import BlockError, python_blocks, run_page
from tests.source_tree import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.name, python_blocks(page))


def test_a_wrong_block_is_seen():
    run_page("page", [(0, ">>> x = 1\n"), (3, "assert x == 1\n"), (5, ">>> x\n1\n")])
    with pytest.raises(BlockError, match=r"Expected:\s+2"):
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


def test_the_matrix_covers_the_supported_versions():
    """Each Python of the classifiers, the oldest torch and e3nn, and the pinned ones are in the CI's matrix."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    matrix = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    rows = re.findall(r'\{ python: "([\d.]+)", torch: "([\d.]+)" \}', matrix)
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert sorted({python for python, _ in rows}) == sorted(pythons)
    assert project["requires-python"] == f">={min(pythons, key=lambda v: int(v.partition('.')[2]))}"
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert oldest
    torches = {torch for _, torch in rows}
    assert {oldest[1] + ".0", pins["torch"]} <= torches
    listed = re.search(r"e3nn: (\[.*\])", matrix)
    assert listed
    releases = ast.literal_eval(listed[1])
    floor = re.search(r"e3nn>=([\d.]+)", " ".join(project["optional-dependencies"]["e3nn"]))
    assert floor
    assert {floor[1], pins["e3nn"]} <= set(releases)


def test_files_for_contributors_and_citations_are_valid():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert path.name == "config.yml" or {"name", "description", "body"} <= set(form), path.name
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert steps
        assert all(("uses" in step) != ("run" in step) for step in steps), path.name
