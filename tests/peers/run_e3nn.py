"""Run e3nn's own tests on our tensor products.

    python tests/peers/run_e3nn.py --suite PATH [pytest arguments]

PATH is the folder `tests` of a checkout of e3nn, at the version that is installed; the environment variable
`INSUM_PEER_E3NN` names it too. Nothing of the suite is part of this project.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python puts this file's folder first, where `e3nn` would be the folder of our own tests of that name.
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(ROOT)

ENVIRONMENT = "INSUM_PEER_E3NN"
FILES = (
    "o3/tensor_product_test.py",
    "o3/tensor_product_sub_test.py",
    "nn/models/gate_points_2101_test.py",
    "nn/models/gate_points_2102_test.py",
)
MORE = (
    "nn/models/v2203/sparse_voxel_convolution_test.py",
    "nn/gate_test.py",
    "nn/normact_test.py",
    "o3/norm_test.py",
    "o3/reduce_tensor_test.py",
    "util/test_jit.py",
)


def main() -> int:
    from tests.peers.e3nn.substitute import E3nn
    from tests.peers.runner import run_suite

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, default=os.environ.get(ENVIRONMENT), help="the peer's folder `tests`")
    parser.add_argument("--more", action="store_true", help="also files that meet the products in passing")
    known, rest = parser.parse_known_args()
    if known.suite is None:
        parser.error(f"give --suite PATH, or set {ENVIRONMENT}")
    files = FILES + MORE if known.more else FILES
    status, summary = run_suite("e3nn", E3nn(), Path(known.suite).resolve(), files, rest)
    print(summary)
    return status


if __name__ == "__main__":
    sys.exit(main())
