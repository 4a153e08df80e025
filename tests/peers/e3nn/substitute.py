"""Puts our tensor products in the place of e3nn's, wherever that package names them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path

from tests.peers.runner import Substitution

__all__ = ["CLASSES", "E3nn", "substitute"]

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
        ours = importlib.import_module("insum_nn.layers.equivariant.tensor_product")
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


class E3nn(Substitution):
    """Counts the products of ours that were built."""

    NAME = "e3nn"
    SCRIPT = "run_e3nn.py"
    FOLDER = "tests"
    SKIPS = Path(__file__).with_name("skips.txt")
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

    def substitute(self) -> None:
        substitute()
        from insum_nn.layers.equivariant.tensor_product import TensorProduct

        write_statements = TensorProduct._write_statements

        def write_and_count(module: TensorProduct) -> None:
            self.met += 1
            write_statements(module)

        TensorProduct._write_statements = write_and_count
