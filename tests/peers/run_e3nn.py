"""Run e3nn's own tests on our tensor products.

    python tests/peers/run_e3nn.py --suite PATH [pytest arguments]

PATH is the folder `tests` of a checkout of e3nn, at the version that is installed; the environment variable
`INSUM_E3NN_TESTS` names it too. Nothing of the suite is part of this project.
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

import pytest  # noqa: E402

ENVIRONMENT = "INSUM_E3NN_TESTS"
FILES = (
    "o3/tensor_product_test.py",
    "o3/tensor_product_sub_test.py",
    "nn/models/gate_points_2101_test.py",
    "nn/models/gate_points_2102_test.py",
)


def run(suite: Path, arguments: list[str]) -> tuple[int, str]:
    """Run the suite's files in this process; returns pytest's exit status and a line that sums up."""
    from tests.peers.e3nn.substitute import Plugin

    files = [suite / name for name in FILES]
    missing = [str(f) for f in files if not f.exists()]
    if missing:
        return int(pytest.ExitCode.USAGE_ERROR), f"the suite lacks {', '.join(missing)}"
    plugin = Plugin()
    options = ["-c", os.devnull, "--rootdir", str(suite), "-p", "no:cacheprovider", "-p", "no:dash", "-q"]
    status = pytest.main([*options, *arguments, *map(str, files)], plugins=[plugin])
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in sorted(plugin.outcomes.items()))
    summary = f"e3nn's suite: {numbers or 'no tests'}; {plugin.built} tensor products built; {plugin.counts}"
    if status == 0 and (plugin.built == 0 or not plugin.outcomes.get("passed")):
        return 1, summary + "; the suite never met our classes"
    return int(status), summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, default=os.environ.get(ENVIRONMENT), help="e3nn's folder `tests`")
    known, rest = parser.parse_known_args()
    if known.suite is None:
        parser.error(f"give --suite PATH, or set {ENVIRONMENT}")
    status, summary = run(Path(known.suite).resolve(), rest)
    print(summary)
    return status


if __name__ == "__main__":
    sys.exit(main())
