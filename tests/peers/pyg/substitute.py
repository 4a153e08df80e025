"""Puts our graph convolution in the place of torch_geometric's, wherever that package names it."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.peers.runner import Substitution

__all__ = ["SKIPS", "PyG", "substitute"]

SKIPS = Path(__file__).with_name("skips.txt")
# Modules that take the class when they are imported; others of the package look it up in these.
MODULES = (
    "torch_geometric.nn",
    "torch_geometric.nn.conv",
    "torch_geometric.nn.conv.gcn_conv",
    "torch_geometric.nn.models",
    "torch_geometric.nn.models.basic_gnn",
    "torch_geometric.explain",
    "torch_geometric.contrib.nn",
)


def substitute() -> list[str]:
    """Replace the class; returns the modules where it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
        ours = importlib.import_module("insum_nn.layers.gcn_conv").GCNConv
    theirs = ours.__mro__[1]
    found: list[str] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch_geometric" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, key, ours)
                found.append(name)
    return found


class PyG(Substitution):
    """Counts calls that took the fused path."""

    def __init__(self) -> None:
        super().__init__(SKIPS)

    def substitute(self) -> None:
        substitute()
        from insum_nn.layers.gcn_conv import GCNConv

        fused = GCNConv._fused

        def fused_and_counted(module: GCNConv, *arguments: Any) -> Any:
            self.met += 1
            return fused(module, *arguments)

        GCNConv._fused = fused_and_counted
