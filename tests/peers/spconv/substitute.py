"""Puts our point-cloud layers in the place of spconv, which need not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.peers.runner import Substitution, read_skips

__all__ = ["Spconv", "substitute"]

OURS = "insum_nn.layers.spconv"


def substitute(utilities: Path | None) -> list[str]:
    """Enter our modules under spconv's names; returns these.

    Args:
        utilities: the peer's file of helpers for its tests, which is theirs and is run as it is.
    """
    ours = importlib.import_module(OURS)
    modules: dict[str, ModuleType] = {name: ModuleType(name) for name in ("spconv",)}
    modules["spconv.pytorch"] = ours
    for part in ("constants", "core", "tools", "utils"):
        modules[f"spconv.{part}"] = getattr(ours, part)
    for part in pkgutil.iter_modules(ours.__path__):
        modules[f"spconv.pytorch.{part.name}"] = importlib.import_module(f"{OURS}.{part.name}")
    # Imported by a test that does not use it.
    modules["cumm"], modules["cumm.tensorview"] = ModuleType("cumm"), ModuleType("cumm.tensorview")
    if utilities is not None:
        spec = importlib.util.spec_from_file_location("spconv.test_utils", utilities)
        assert spec is not None
        assert spec.loader is not None
        modules["spconv.test_utils"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules["spconv.test_utils"])
    for name, module in modules.items():
        sys.modules[name] = module
        package, _, leaf = name.rpartition(".")
        if package and not hasattr(modules[package], leaf):
            setattr(modules[package], leaf, module)
    # Packages, so that their parts are found under their names.
    vars(modules["spconv"])["__path__"] = vars(modules["cumm"])["__path__"] = []
    return list(modules)


class _OnCpu(ModuleType):
    """torch, for a test module that asks for a CUDA device where there is none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")


class Spconv(Substitution):
    """Counts the convolutions and pools of ours that were run."""

    NAME = "spconv"
    SCRIPT = "run_spconv.py"
    FOLDER = "test"
    SKIPS = Path(__file__).with_name("skips.txt")
    FILES = ("test_conv.py", "test_multi_impl.py", "test_all_algo.py")

    def __init__(self) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            self.skips |= read_skips(self.SKIPS.with_name("skips_cpu.txt"))

    def substitute(self) -> None:
        substitute(self.suite.parent / "spconv" / "test_utils.py")
        from insum_nn.layers.voxel import conv, pool

        for kind in (
            conv.SparseConvolution,
            pool.SparseMaxPool,
            pool.SparseAvgPool,
            pool.SparseGlobalMaxPool,
            pool.SparseGlobalAvgPool,
        ):
            self._count(kind)
        if not torch.cuda.is_available():
            torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]

    def _count(self, kind: Any) -> None:
        forward = kind.forward

        def forward_and_count(module: Any, *arguments: Any, **named: Any) -> Any:
            self.met += 1
            return forward(module, *arguments, **named)

        kind.forward = forward_and_count

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        super().pytest_collection_modifyitems(items)
        if torch.cuda.is_available():
            return
        for module in {item.module for item in items if isinstance(item, pytest.Function)}:
            module.torch = _OnCpu("torch")
