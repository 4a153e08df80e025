"""e3nn's own tests pass on our tensor products."""

from __future__ import annotations

import pytest

pytest.importorskip("e3nn")

from tests.peers.e3nn.substitute import CLASSES, E3nn
from tests.peers.runner import read_skips, run_apart, run_code

pytestmark = pytest.mark.peer


@pytest.mark.slow
def test_the_suite_passes():
    run_apart(E3nn)


def test_every_skip_has_a_reason():
    assert all(read_skips(E3nn.SKIPS).values())


def test_the_substitution_reaches_the_modules_that_name_the_classes():
    printed = run_code(
        "from tests.peers.e3nn.substitute import substitute\n"
        "counts = substitute()\n"
        "from e3nn import o3\n"
        "from e3nn.nn import _gate\n"
        "from e3nn.nn.models import gate_points_2101\n"
        "classes = [o3.TensorProduct, _gate.ElementwiseTensorProduct, gate_points_2101.FullyConnectedTensorProduct]\n"
        "assert all(c.__module__ == 'insum_nn.layers.equivariant.tensor_product' for c in classes), classes\n"
        "print(*[f'{k}={v}' for k, v in counts.items()])\n"
    )
    counts = dict(item.split("=") for item in printed)
    assert set(counts) == set(CLASSES)
    assert all(int(n) > 0 for n in counts.values())
