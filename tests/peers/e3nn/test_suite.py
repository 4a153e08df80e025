"""e3nn's own tests pass on our tensor products."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("e3nn")

from tests.peers.e3nn.substitute import CLASSES, SKIPS
from tests.peers.run_e3nn import ENVIRONMENT, ROOT
from tests.peers.runner import read_skips

pytestmark = pytest.mark.peer


@pytest.mark.slow
def test_the_suite_passes():
    suite = os.environ.get(ENVIRONMENT)
    if not suite:
        pytest.skip(f"set {ENVIRONMENT} to the folder `tests` of a checkout of e3nn")
    # A process of its own: the substitution lasts as long as the process.
    command = [sys.executable, str(ROOT / "tests" / "peers" / "run_e3nn.py"), "--suite", suite]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_skip_has_a_reason():
    assert all(read_skips(SKIPS).values())


def test_the_substitution_reaches_the_modules_that_name_the_classes():
    code = (
        "from tests.peers.e3nn.substitute import substitute\n"
        "counts = substitute()\n"
        "from e3nn import o3\n"
        "from e3nn.nn import _gate\n"
        "from e3nn.nn.models import gate_points_2101\n"
        "classes = [o3.TensorProduct, _gate.ElementwiseTensorProduct, gate_points_2101.FullyConnectedTensorProduct]\n"
        "assert all(c.__module__ == 'insum_nn.layers.tensor_product' for c in classes), classes\n"
        "print(*[f'{k}={v}' for k, v in counts.items()])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    counts = dict(item.split("=") for item in done.stdout.split())
    assert set(counts) == set(CLASSES)
    assert all(int(n) > 0 for n in counts.values())
