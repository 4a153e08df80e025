"""Run torch_geometric's own tests on our graph convolution.

    python tests/peers/run_pyg.py --suite PATH [--more] [pytest arguments]

PATH is the folder `test` of a checkout of torch_geometric, at the version that is installed; the environment variable
`INSUM_PEER_PYG` names it too. `--more` adds files that meet the layer in passing: compilation, hooks, explainers,
heterogeneous graphs. Nothing of the suite is part of this project.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python puts this file's folder first, where packages of our own tests have the peers' names.
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(ROOT)

ENVIRONMENT = "INSUM_PEER_PYG"
FILES = (
    "nn/conv/test_gcn_conv.py",
    "nn/conv/test_static_graph.py",
    "nn/conv/test_create_gnn.py",
    "nn/models/test_basic_gnn.py",
)
MORE = (
    "nn/conv/test_message_passing.py",
    "nn/conv/test_hetero_conv.py",
    "nn/conv/test_gcn2_conv.py",
    "nn/models/test_deep_graph_infomax.py",
    "nn/models/test_deepgcn.py",
    "nn/test_compile_conv.py",
    "nn/test_model_summary.py",
    "nn/test_sequential.py",
    "nn/test_to_hetero_transformer.py",
    "nn/test_to_hetero_with_bases_transformer.py",
    "nn/pool/test_sag_pool.py",
    "nn/pool/test_asap.py",
    "explain",
    "utils/test_embedding.py",
    "utils/test_subgraph.py",
)


def main() -> int:
    from tests.peers.pyg.substitute import PyG
    from tests.peers.runner import run_suite

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, default=os.environ.get(ENVIRONMENT), help="the peer's folder `test`")
    parser.add_argument("--more", action="store_true", help="also files that meet the layer in passing")
    known, rest = parser.parse_known_args()
    if known.suite is None:
        parser.error(f"give --suite PATH, or set {ENVIRONMENT}")
    files = FILES + MORE if known.more else FILES
    # The suite's own switch for its slower parts: TorchScript and compilation.
    os.environ.setdefault("FULL_TEST", "1")
    status, summary = run_suite("torch_geometric", PyG(), Path(known.suite).resolve(), files, rest)
    print(summary)
    return status


if __name__ == "__main__":
    sys.exit(main())
