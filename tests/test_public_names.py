"""`__all__` is what can be imported: no name that does not exist, none that is missing."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import tomllib
from importlib.util import find_spec
from types import ModuleType

import insum_nn
from insum_nn.version import UNKNOWN
from tests.source_tree import PACKAGE, ROOT, Source, package_modules

MODULES = package_modules()


def defined_names(source: Source) -> set[str]:
    """Public functions and classes that a file defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {n.name for n in source.tree.body if isinstance(n, kinds) and not n.name.startswith("_")}


def test_face_lists_exactly_what_it_holds():
    held = {name for name, value in vars(insum_nn).items() if not isinstance(value, ModuleType)}
    public = {name for name in held if not name.startswith("_")} - {"annotations"}
    listed = {name for name in insum_nn.__all__ if not name.startswith("_")}
    # A subpackage may be listed too: it is imported by its name.
    modules = {name for name in listed if f"{PACKAGE}.{name}" in MODULES}
    assert listed - modules == public
    assert all(isinstance(getattr(insum_nn, name), object) for name in insum_nn.__all__)


def test_face_has_no_logic():
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    body = MODULES[PACKAGE].tree.body
    assert isinstance(body[0], ast.Expr), "starts with a docstring"
    assert [ast.unparse(n) for n in body[1:] if not isinstance(n, allowed)] == []


def test_version_comes_from_the_installation():
    """git's tags say it when the package is built; nothing in the tree repeats it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert "version" not in project
    try:
        assert insum_nn.__version__ == importlib.metadata.version("insum-nn")
    except importlib.metadata.PackageNotFoundError:
        assert insum_nn.__version__ == UNKNOWN
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)


def test_all_of_each_module():
    for name, source in MODULES.items():
        # nequip imports that one, and no test needs nequip.
        if name == PACKAGE or (name.endswith(".nequip_extension") and find_spec("nequip") is None):
            continue
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", None)
        if listed is None:
            exported = [n for n in source.tree.body if isinstance(n, ast.ImportFrom) and n.module != "__future__"]
            re_exports = source.path.name == "__init__.py" and exported
            assert not re_exports, f"{name}: a package that re-exports says what in __all__"
            continue
        assert len(listed) == len(set(listed)), f"{name}: a name stands twice"
        assert [n for n in listed if not hasattr(module, n)] == [], name
        missing = defined_names(source) - set(listed)
        assert missing == set(), f"{name}: public names are missing from __all__; or begin them with '_'"
