"""The module that nequip loads is named by an entry point, and by nothing else: nequip stays optional."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib

import pytest

from insum_nn.errors import MissingExtraError
from tests.source_tree import ROOT


def entry_point() -> tuple[str, str]:
    """Name and module of what this package declares to nequip."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    ((name, module),) = declared["nequip.extension"].items()
    return name, module


def test_the_entry_point_names_a_module():
    name, module = entry_point()
    # The name that nequip loads when it is imported.
    assert name == "init_always"
    assert importlib.util.find_spec(module) is not None


def test_nothing_else_imports_it_or_nequip():
    _, module = entry_point()
    layers = "insum_nn.layers.swap, insum_nn.layers.equivariant.tensor_product_scatter, insum_nn.models.nequip"
    script = f"import sys\nsys.modules['nequip'] = None\nimport {layers}\nassert {module!r} not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


@pytest.mark.skipif(importlib.util.find_spec("nequip") is not None, reason="nequip is installed")
def test_it_says_what_is_missing():
    with pytest.raises(MissingExtraError, match="pip install nequip"):
        importlib.import_module(entry_point()[1])
