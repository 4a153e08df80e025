"""torch_geometric's own tests pass on our graph convolution."""

from __future__ import annotations

import pytest

from tests.peers.pyg.substitute import PyG
from tests.peers.runner import read_skips, run_apart, run_code

pytestmark = pytest.mark.peer


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_the_suite_passes(more: bool):
    run_apart(PyG, *["--more"] * more)


def test_every_skip_has_a_reason():
    assert all(read_skips(PyG.SKIPS).values())


def test_the_substitution_reaches_the_modules_that_name_the_class():
    pytest.importorskip("torch_geometric")
    found = run_code(
        "from tests.peers.pyg.substitute import substitute\n"
        "found = substitute()\n"
        "import torch_geometric.nn as nn\n"
        "from torch_geometric.nn.conv import gcn_conv\n"
        "from torch_geometric.nn.models import basic_gnn\n"
        "places = [nn.GCNConv, nn.conv.GCNConv, gcn_conv.GCNConv, basic_gnn.GCNConv, type(nn.GCN(2, 2, 1).convs[0])]\n"
        "assert all(c.__module__ == 'insum_nn.layers.graph.gcn_conv' for c in places), places\n"
        "print(*found)\n"
    )
    assert "torch_geometric.nn.models.basic_gnn" in found
