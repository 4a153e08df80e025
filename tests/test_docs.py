"""The documents tell the truth: their Python blocks run, their commands and files exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.markdown_blocks import Block, BlockError, python_blocks, run_page
from tests.source_tree import ROOT


def load_tool(name: str) -> ModuleType:
    """A script of docs/tools, which is no package."""
    # `site` is a module of Python's own.
    module_name = f"docs_tools_{name}"
    spec = importlib.util.spec_from_file_location(module_name, ROOT / "docs" / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


tutorials, pictures = load_tool("tutorials"), load_tool("pictures")

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Executed when the site is built, at a tiny size by `make docs-check`.
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
# What the comment `<!-- needs: .. -->` before a block may say -> whether it is there, and why the block is skipped.
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (torch.cuda.is_available, "needs a CUDA device"),
    "torchrun": (lambda: "LOCAL_RANK" in os.environ, "runs in processes that torchrun started"),
    "mace": (lambda: False, "needs the package mace-torch, whose own imports warn"),
    "time": (lambda: False, "compiles C++ for a minute or more"),
}


RUN = {page: [b for b in python_blocks(page) if b.needs is None] for page in PAGES if page not in TUTORIALS}
MARKED = [(page, block) for page in PAGES for block in python_blocks(page) if block.needs is not None]


@pytest.mark.parametrize("page", [page for page, blocks in RUN.items() if blocks], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.name, RUN[page])


@pytest.mark.parametrize(("page", "block"), MARKED, ids=lambda p: p.name if isinstance(p, Path) else f"line {p.line}")
def test_marked_blocks_run_where_they_can(page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A marked block stands alone: it makes what it uses."""
    assert block.needs is not None
    available, reason = NEEDS[block.needs]
    compile(block.text, page.name, "exec")
    if not available():
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    run_page(page.name, [block])


@pytest.mark.parametrize("page", [page for page in TUTORIALS if python_blocks(page)], ids=lambda p: p.name)
def test_tutorials_have_a_tiny_size(page: Path):
    text = tutorials.at_tiny_size(page.read_text(encoding="utf-8"))
    for block in tutorials.python_blocks(text):
        compile(block.code, page.name, "exec")


def test_numbers_stay_with_their_units_on_the_site():
    pytest.importorskip("mkdocs")
    site = load_tool("site")
    space, hyphen = "\N{NO-BREAK SPACE}", "\N{NON-BREAKING HYPHEN}"
    got = site.on_page_content("<td>1.5 ms, 98 %, 3 sums</td> 2026-11-24 <code>x = 5 % 3</code> <code>spmm/n=32</code>")
    date = hyphen.join(("2026", "11", "24"))
    code = "<code>x = 5 % 3</code> <code>spmm/<wbr>n=32</code>"
    assert got == f"<td>1.5{space}ms, 98{space}%, 3 sums</td> {date} {code}"


def test_a_wrong_block_is_seen():
    run_page("page", [Block(0, ">>> x = 1\n"), Block(3, "assert x == 1\n"), Block(5, ">>> x\n1\n")])
    with pytest.raises(BlockError, match=r"Expected:\s+2"):
        run_page("page", [Block(0, ">>> 1\n2\n")])
    with pytest.raises(AssertionError):
        run_page("page", [Block(0, "assert False\n")])


@pytest.mark.parametrize("block", python_blocks(ROOT / "README.md"), ids=lambda block: f"line {block.line}")
def test_blocks_of_the_readme_run_one_by_one(block: Block):
    run_page("README.md", [block])


def test_the_readme_fits_a_screen():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 115
    assert python_blocks(ROOT / "README.md")
    _, begin, rest = text.partition("<!-- table: begin -->\n")
    table, end, _ = rest.partition("<!-- table: end -->\n")
    assert begin
    assert end
    assert len(re.findall(r"^\|", table, re.MULTILINE)) == 2 + 8
    assert "`make test`" in text


def test_a_page_that_fetches_from_elsewhere_is_refused():
    pytest.importorskip("mkdocs")
    site, page = load_tool("site"), SimpleNamespace(file=SimpleNamespace(src_uri="x.md"))
    kept = '<a href="https://a.b">link</a> <script src="assets/a.js"></script> <link rel="stylesheet" href="a.css">'
    assert site.on_post_page(kept, page) == kept
    for tag in ('<script src="https://a.b/c"></script>', '<img alt="" src="http://a.b/c.svg">'):
        with pytest.raises(Exception, match=r"x\.md fetches from elsewhere"):
            site.on_post_page(kept + tag, page)


def test_a_formula_that_needs_a_script_is_refused():
    pytest.importorskip("mkdocs")
    site, page = load_tool("site"), SimpleNamespace(file=SimpleNamespace(src_uri="x.md"))
    kept = "<p>5 $ and 6 $</p><pre><code>$$(id -u)</code></pre>"
    assert site.on_post_page(kept, page) == kept
    with pytest.raises(Exception, match=r"x\.md has a formula between \$\$"):
        site.on_post_page(kept + "<p>$$y = x$$</p>", page)


def test_links_of_what_is_taken_from_the_readme_lead_into_the_site():
    pytest.importorskip("mkdocs")
    site = load_tool("site")
    for uri, link in (("index.md", "](measurements.md)"), ("how-to/x.md", "](../measurements.md)")):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        built = site.on_page_markdown("<!-- include: README.md table -->", page)
        assert link in built
        assert "](docs/" not in built


def test_a_tiny_build_says_so(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mkdocs")
    site = load_tool("site")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/x.md"))
    text = "# Title\n\n<!-- tiny: epochs = 2; hidden = 8 -->\n"
    site._records["tutorials/x.md"] = tutorials.Record([], [], 1.0, "torch, CPU")
    for size, said in (("full", False), ("tiny", True)):
        monkeypatch.setenv("INSUM_TUTORIALS", size)
        built = site.on_page_markdown(text, page)
        assert built.startswith("# Title\n")
        assert ("ran at a tiny size: epochs = 2; hidden = 8." in built) == said


def test_headings_of_the_troubleshooting_page_are_messages():
    """What stands between the dots of a message stands in the package; placeholders are left out."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    package = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "insum_nn").rglob("*.py")))
    named = [name for name in re.findall(r"^### `(.*)`$", page, re.MULTILINE)]
    assert len(named) > 10
    missing = [(name, part) for name in named for part in name.split("...") if part.strip(" ,") not in package]
    assert missing == []


def test_pictures_are_small():
    pictures = [p for p in (ROOT / "docs" / "figures").iterdir() if p.suffix != ".css"]
    assert {p.name: p.stat().st_size for p in pictures if p.stat().st_size > 150_000} == {}
    named = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [p.name for p in pictures if p.name not in named] == []


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_those_of_the_script(name: str):
    drawn = pictures.PICTURES[name]().text()
    same = drawn == (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8")
    assert same, "python docs/tools/pictures.py writes the pictures"


def test_every_public_name_has_a_place_in_the_reference():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    there = {
        name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for module in ("", ".layers", ".layers.spconv", ".formats", ".ops", ".models", ".datasets", ".schedules"):
        path = f"insum_nn{module}"
        holder = importlib.import_module(path)
        names = [name for name in holder.__all__ if not isinstance(getattr(holder, name), ModuleType)]
        # The point-cloud layers stand under spconv's names.
        places = {name: {f"{path}.{name}", f"insum_nn.layers.spconv.{name}"} for name in names}
        assert [name for name, either in places.items() if not either & there] == [], path
    for name in there:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


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
