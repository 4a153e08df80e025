"""Run e3nn's own tests on our tensor products.

    python tests/peers/run_e3nn.py --suite PATH [--more] [pytest arguments]

PATH is the folder `tests` of a checkout of e3nn, at the version that is installed; the environment variable
`INSUM_PEER_E3NN` names it too. `--more` adds files that meet the products in passing. Nothing of the suite is part of
this project.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this file's folder first, where packages of our own tests have the peers' names.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

    from tests.peers.e3nn.substitute import E3nn
    from tests.peers.runner import main

    sys.exit(main(E3nn(), __doc__))
