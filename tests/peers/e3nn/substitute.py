"""A pytest plugin that puts our tensor products in the place of e3nn's, wherever e3nn names them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path

import pytest

SKIPS = Path(__file__).with_name("skips.txt")
CLASSES = (
    "TensorProduct",
    "FullyConnectedTensorProduct",
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "TensorSquare",
)
# Where the originals are defined they stay, for they are the bases of ours.
DEFINING = {"e3nn.o3._tensor_product._tensor_product", "e3nn.o3._tensor_product._sub"}


def import_everything() -> None:
    """Import all modules of e3nn that can be imported here, so that none takes the originals later."""
    package = importlib.import_module("e3nn")
    for module in pkgutil.walk_packages(package.__path__, "e3nn.", onerror=lambda _: None):
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue


def substitute() -> dict[str, int]:
    """Replace the classes; returns how many modules named each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_everything()
        ours = importlib.import_module("insum_nn.layers.tensor_product")
    from e3nn import o3

    originals = {name: getattr(o3, name) for name in CLASSES}
    counts = dict.fromkeys(CLASSES, 0)
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "e3nn" or module_name in DEFINING or module is None:
            continue
        for name, value in list(vars(module).items()):
            for wanted, original in originals.items():
                if value is original:
                    setattr(module, name, getattr(ours, wanted))
                    counts[wanted] += 1
    return counts


def read_skips() -> dict[str, str]:
    """Test names (up to a parameter list) to skip, with the reason of each."""
    found: dict[str, str] = {}
    for line in SKIPS.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, reason = line.split("|", 1)
            found[name.strip()] = reason.strip()
    return found


class Plugin:
    """Substitutes on start, skips what the list names, and counts the products of ours that the tests built."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.built = 0
        self.outcomes: dict[str, int] = {}
        self.skipped_by_list: dict[str, str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        self.counts = substitute()
        from insum_nn.layers.tensor_product import TensorProduct

        finish = TensorProduct._finish

        def finish_and_count(module: TensorProduct) -> None:
            finish(module)
            self.built += 1

        TensorProduct._finish = finish_and_count

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        skips = read_skips()
        for item in items:
            for name, reason in skips.items():
                if item.nodeid.endswith(name) or item.nodeid.split("[")[0].endswith(name):
                    item.add_marker(pytest.mark.skip(reason=reason))
                    self.skipped_by_list[item.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
