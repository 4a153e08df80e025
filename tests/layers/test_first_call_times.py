"""A first call waits for no search and no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.source_tree import ROOT

# The gradient of TensorSquare of degree 6, pairs of copies over thousands of coefficients, takes 1.2 by library
# calls; beside other tests, and gcc, which compiles what was called before, up to twice as long.
SECONDS = 2.5


def test_no_first_call_on_a_cpu_takes_long(tmp_path: Path):
    environment = {**os.environ, "INSUM_NN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.layers.first_call_times", "--json"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    slow = {name: times for name, times in json.loads(done.stdout).items() if max(times) > SECONDS}
    assert slow == {}
