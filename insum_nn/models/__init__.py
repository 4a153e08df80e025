"""Whole networks, composed from layers; each is imported at its first use, with the extra that it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insum_nn.models.calculator import PotentialCalculator
    from insum_nn.models.gcn import GCN
    from insum_nn.models.minkunet import MinkUNet, MinkUNet14, MinkUNet18, MinkUNet34, MinkUNet50, MinkUNet101
    from insum_nn.models.nequip import NequIP
    from insum_nn.models.tetris import TetrisClassifier, tetris_pieces

__all__ = [
    "GCN",
    "MinkUNet",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNet50",
    "MinkUNet101",
    "NequIP",
    "PotentialCalculator",
    "TetrisClassifier",
    "tetris_pieces",
]

_HOMES = {
    "calculator": ("PotentialCalculator",),
    "gcn": ("GCN",),
    "minkunet": ("MinkUNet", "MinkUNet14", "MinkUNet18", "MinkUNet34", "MinkUNet50", "MinkUNet101"),
    "nequip": ("NequIP",),
    "tetris": ("TetrisClassifier", "tetris_pieces"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
