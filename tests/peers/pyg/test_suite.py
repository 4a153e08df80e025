"""torch_geometric's own tests pass on our graph convolution."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.peers.pyg.substitute import SKIPS
from tests.peers.run_pyg import ENVIRONMENT, ROOT
from tests.peers.runner import read_skips

pytestmark = pytest.mark.peer


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_the_suite_passes(more: bool):
    suite = os.environ.get(ENVIRONMENT)
    if not suite:
        pytest.skip(f"set {ENVIRONMENT} to the folder `test` of a checkout of torch_geometric")
    # A process of its own: the substitution lasts as long as the process.
    command = [sys.executable, str(ROOT / "tests" / "peers" / "run_pyg.py"), "--suite", suite]
    done = subprocess.run(command + ["--more"] * more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_skip_has_a_reason():
    assert all(read_skips(SKIPS).values())


def test_the_substitution_reaches_the_modules_that_name_the_class():
    pytest.importorskip("torch_geometric")
    code = (
        "from tests.peers.pyg.substitute import substitute\n"
        "found = substitute()\n"
        "import torch_geometric.nn as nn\n"
        "from torch_geometric.nn.conv import gcn_conv\n"
        "from torch_geometric.nn.models import basic_gnn\n"
        "places = [nn.GCNConv, nn.conv.GCNConv, gcn_conv.GCNConv, basic_gnn.GCNConv, type(nn.GCN(2, 2, 1).convs[0])]\n"
        "assert all(c.__module__ == 'insum_nn.layers.gcn_conv' for c in places), places\n"
        "print(*found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch_geometric.nn.models.basic_gnn" in done.stdout.split()
