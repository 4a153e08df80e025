"""Run torch_geometric's own tests on our graph convolution.

    python tests/peers/run_pyg.py --suite PATH [--more] [pytest arguments]

PATH is the folder `test` of a checkout of torch_geometric, at the version that is installed; the environment variable
`INSUM_PEER_PYG` names it too. `--more` adds files that meet the layer in passing: compilation, hooks, explainers,
heterogeneous graphs. Nothing of the suite is part of this project.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this file's folder first, where packages of our own tests have the peers' names.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

    from tests.peers.pyg.substitute import PyG
    from tests.peers.runner import main

    sys.exit(main(PyG(), __doc__))
