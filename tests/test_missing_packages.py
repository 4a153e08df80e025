"""Errors about missing packages name what is to be installed, as it is called on the package index."""

from __future__ import annotations

import ast
import re

from tests.source_tree import PACKAGE, ROOT


def test_errors_name_the_package_to_install():
    """Extras of this package cannot be installed by name: the index's project of that name need not be ours."""
    calls: list[str] = []
    extras: list[str] = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install '?insum", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingExtraError":
                calls.append(ast.unparse(node))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_extra":
                extras.append(ast.unparse(node))
    assert len(calls) >= 3
    assert len(extras) >= 9
    assert [call for call in calls if "pip install " not in call] == []
