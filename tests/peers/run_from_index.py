"""Run on our classes what the package index carries of the peers' suites, and name what it does not carry.

    python tests/peers/run_from_index.py --folder PATH

PATH keeps what was downloaded, at fixed versions. `make peers` calls this, and `.ci/run` calls that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
# Parameter sets of one test of e3nn's suite, where 64 sets of options differ in how its own code is generated.
MOST = 4
NOT_RUN = {
    "torch_geometric's suite": "its source package carries no tests; see tests/peers/run_pyg.py",
    "spconv's suite": "the index has no source package; see tests/peers/run_spconv.py",
}


def e3nn_suite(folder: Path) -> Path:
    """The tests in the source package of the installed version."""
    version = importlib.metadata.version("e3nn")
    suite = folder / f"e3nn-{version}" / "tests"
    if not suite.is_dir():
        wanted = ("--no-deps", "--no-binary", "e3nn", f"e3nn=={version}")
        subprocess.run([*PIP, "download", *wanted, "-d", str(folder)], check=True)
        with tarfile.open(folder / f"e3nn-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return suite


def spconv_packages(folder: Path) -> Path | None:
    """A folder with the installed spconv; `None` where it has no wheel."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or sys.version_info >= (3, 14):
        return None
    pins = Path(__file__).with_name("spconv") / "requirements.txt"
    made = folder / f"spconv-{platform.python_version()}"
    stamp = made / "requirements.txt"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != pins.read_text(encoding="utf-8"):
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(made), "-r", str(pins)], check=True)
        shutil.copy(pins, stamp)
    return made


def main() -> int:
    """Run what there is, side by side, and print what each said last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where downloads are kept")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    script, suite = str(ROOT / "tests" / "peers" / "run_e3nn.py"), str(e3nn_suite(folder))
    cases = str(ROOT / "tests" / "peers" / "opt_einsum" / "cases.py")
    commands: dict[str, tuple[list[str], Path | None]] = {
        "e3nn's suite on our products": ([sys.executable, script, "--suite", suite, "--most", str(MOST)], None),
        "opt_einsum's contractions as statements": (
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cases],
            None,
        ),
    }
    not_run = dict(NOT_RUN)
    packages = spconv_packages(folder)
    beside = "our layers beside spconv's on the CPU"
    if packages is None:
        not_run[beside] = f"no wheel for {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    else:
        test = str(ROOT / "tests" / "peers" / "spconv" / "test_installed.py")
        # A skip would mean that it was not imported.
        check = f"import sys, pytest, spconv.pytorch; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}]))"
        commands[beside] = ([sys.executable, "-W", "ignore", "-c", check], packages)
    runs: dict[str, subprocess.Popen[str]] = {}
    for name, (command, path) in commands.items():
        seen = os.pathsep.join(filter(None, (str(ROOT), path and str(path), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": seen}
        runs[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    failed = False
    for name, run in runs.items():
        said = run.communicate()[0]
        failed |= run.returncode != 0
        lines = said.strip().splitlines()
        shown = lines if run.returncode else lines[-2:]
        print(f"{'FAILED' if run.returncode else 'passed'}: {name}", *(f"  {line}" for line in shown), sep="\n")
    for name, reason in not_run.items():
        print(f"not run: {name}: {reason}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
