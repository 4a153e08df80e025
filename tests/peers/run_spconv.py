"""Run spconv's own tests on our point-cloud layers.

    python tests/peers/run_spconv.py --suite PATH [pytest arguments]

PATH is the folder `test` of a checkout of spconv; the environment variable `INSUM_PEER_SPCONV` names it too. spconv
itself is not needed: our modules stand for `spconv.pytorch`, and what the tests take from the rest of it is small. They
ask for a CUDA device; where there is none, the CPU stands for it. Nothing of the suite is part of this project.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this file's folder first, where packages of our own tests have the peers' names.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

    from tests.peers.runner import main
    from tests.peers.spconv.substitute import Spconv

    sys.exit(main(Spconv(), __doc__))
