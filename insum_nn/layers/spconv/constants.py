"""`spconv.constants` and `spconv.pytorch.constants`: facts about the layers, and switches that they have not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from insum_nn.errors import InsumNameError

__all__ = [
    "ALL_WEIGHT_IS_KRSC",
    "BOOST_ROOT",
    "DISABLE_JIT",
    "EDITABLE_INSTALLED",
    "FILTER_HWIO",
    "NDIM_DONT_CARE",
    "PACKAGE_NAME",
    "PACKAGE_ROOT",
    "PYTORCH_VERSION",
    "SAVED_WEIGHT_LAYOUT",
    "SPCONV_ALLOW_TF32",
    "SPCONV_BWD_SPLITK",
    "SPCONV_DEBUG_SAVE_PATH",
    "SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE",
    "SPCONV_DO_SORT",
    "SPCONV_FX_TRACE_MODE",
    "SPCONV_INT8_DEBUG",
    "SPCONV_USE_DIRECT_TABLE",
    "TORCH_HAS_AMP",
    "is_amp_enabled",
]

PACKAGE_NAME = "spconv"
PACKAGE_ROOT = Path(__file__).parent.resolve()
NDIM_DONT_CARE = 3
# Weights are (O, k.., I), and so are states.
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
SAVED_WEIGHT_LAYOUT = ""
SPCONV_ALLOW_TF32 = False
SPCONV_DO_SORT = True
SPCONV_USE_DIRECT_TABLE = True
SPCONV_FX_TRACE_MODE = False
SPCONV_INT8_DEBUG = False
SPCONV_DEBUG_SAVE_PATH = ""
SPCONV_BWD_SPLITK = [1, 2, 4, 8, 16, 32, 64]
SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE = 1.1
DISABLE_JIT = False
EDITABLE_INSTALLED = False
BOOST_ROOT = None
PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]
TORCH_HAS_AMP = True

_INSTEAD = {
    "SPCONV_ALLOW_TF32": "give layers options=Options(precision='tf32'), or call torch.set_float32_matmul_precision.",
    "SAVED_WEIGHT_LAYOUT": "convert the state with insum_nn.structure.conv_weights.convert_state_dict.",
}


def is_amp_enabled() -> bool:
    """Return whether autocast is in force."""
    return torch.is_autocast_enabled()


class _Constants(ModuleType):
    """A module whose constants cannot be set, since nothing would read them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and getattr(self, name) != value:
            raise InsumNameError(
                f"spconv.constants.{name} is no switch here",
                details=[f"it is {getattr(self, name)!r}; got {value!r}"],
                fix=_INSTEAD.get(name, "leave it as it is."),
                argument=name,
                got=value,
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Constants
