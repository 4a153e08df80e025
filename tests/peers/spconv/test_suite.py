"""spconv's own tests pass on our point-cloud layers."""

from __future__ import annotations

import pytest

from tests.peers.runner import read_skips, run_apart, run_code
from tests.peers.spconv.substitute import Spconv

pytestmark = pytest.mark.peer


@pytest.mark.slow
def test_the_suite_passes():
    run_apart(Spconv)


def test_every_skip_has_a_reason():
    lists = sorted(Spconv.SKIPS.parent.glob("skips*.txt"))
    assert len(lists) == 2
    assert all(reason for path in lists for reason in read_skips(path).values())


def test_our_modules_answer_to_the_names_of_spconv():
    names = run_code(
        "from tests.peers.spconv.substitute import substitute\n"
        "names = substitute(None)\n"
        "import spconv.pytorch as spconv\n"
        "from spconv.core import ConvAlgo\n"
        "from spconv.constants import ALL_WEIGHT_IS_KRSC\n"
        "from spconv.pytorch.utils import PointToVoxel\n"
        "from spconv.utils import Point2VoxelCPU3d\n"
        "from spconv.pytorch.core import IndiceData, ImplicitGemmIndiceData, expand_nd, scatter_nd\n"
        "from spconv.pytorch.conv import SparseConvolutionBase\n"
        "from spconv.pytorch.hash import HashTable\n"
        "from spconv.pytorch.cppcore import get_current_stream\n"
        "from spconv.pytorch import functional as Fsp\n"
        "from spconv.pytorch.modules import SparseModule\n"
        "ours = [spconv.SubMConv3d, PointToVoxel, Fsp.sparse_add, SparseModule, ConvAlgo]\n"
        "assert all(c.__module__.startswith('insum_nn.') for c in ours), ours\n"
        "assert ALL_WEIGHT_IS_KRSC\n"
        "print(*names)\n"
    )
    assert {"spconv.pytorch", "spconv.pytorch.utils", "spconv.pytorch.ops", "spconv.core"} <= set(names)
