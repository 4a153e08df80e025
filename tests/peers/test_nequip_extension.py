"""The modifier that nequip finds of this package: by name, in its own scan of packages, changing no result."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip")

from nequip.model import modify
from nequip.model.modify_utils import get_all_modifiers, only_apply_persistent_modifiers

# nequip imports it itself where the installed package has the entry point.
import insum_nn.layers.equivariant.nequip_extension  # noqa: F401
from tests.layers.equivariant.test_nequip_extension import entry_point
from tests.peers.test_nequip_compiled import batch_of, model_of
from tests.source_tree import ROOT

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.filterwarnings("default")]

NAMED = [{"modifier": "enable_insum_nn"}]


def test_the_modifier_changes_no_energies_and_forces():
    reference, model = model_of(compile_mode="eager"), model_of(compile_mode="eager")
    model.load_state_dict(reference.state_dict())
    assert modify(model, NAMED) is model
    ours = [type(part).__name__ for part in model.modules() if type(part).__module__.startswith("insum_nn.")]
    assert ours.count("TensorProductScatter") == 2
    assert {"Linear", "Gate", "FullyConnectedTensorProduct"} <= {*ours}
    assert list(model.state_dict()) == list(reference.state_dict())
    for names in (("CH3CH2OH", "C6H6"), ("H2O",)):
        got, want = (own(batch_of(*names)) for own in (model, reference))
        for name in ("total_energy", "forces"):
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-10)


def test_it_may_be_applied_twice_and_to_several_models():
    model = torch.nn.ModuleDict({"one": model_of(compile_mode="eager"), "two": model_of(compile_mode="eager")})
    before = copy.deepcopy(model["two"])(batch_of("CH4"))["forces"]
    for _ in range(2):
        modify(model, NAMED)
    torch.testing.assert_close(model["two"](batch_of("CH4"))["forces"], before, rtol=0, atol=1e-10)


def test_what_nequip_says_of_it():
    model = model_of(compile_mode="eager")
    found = get_all_modifiers(model)["enable_insum_nn"]
    assert "insum_nn" in found.__doc__
    # Checkpoints and packages hold nequip's own layers.
    with only_apply_persistent_modifiers(persistent_only=True):
        modify(model, NAMED)
    assert not any(type(part).__module__.startswith("insum_nn") for part in model.modules())


_SCAN = """
import nequip
assert {module!r} in sys.modules
from nequip.nn.graph_model import GraphModel
assert GraphModel.enable_insum_nn.__self__ is GraphModel
from nequip.utils.versions.package_versions import get_current_code_versions
assert {module!r} in get_current_code_versions(verbose=False)
import nequip.scripts.compile, nequip.scripts.package
"""


@pytest.mark.parametrize("first", ["", "import insum_nn.layers.swap", "import {module}"])
def test_nequip_s_scan_of_packages(first: str, tmp_path: Path):
    """Import nequip where the only package with an entry point is this tree, whichever is imported first."""
    name, module = entry_point()
    info = tmp_path / "insum_nn-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: insum-nn\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[nequip.extension]\n{name} = {module}\n")
    script = "\n".join(["import sys", first, _SCAN]).format(module=module)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
