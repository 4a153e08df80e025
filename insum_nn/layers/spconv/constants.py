"""`spconv.constants` and `spconv.pytorch.constants`: facts about the layers, and hints, which are not read.

As spconv's, this file has no `__all__`: projects read and set the names one by one.

In place of `SPCONV_ALLOW_TF32` give layers `options=Options(precision="tf32")`, or call
`torch.set_float32_matmul_precision`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from insum_nn.errors import InsumNameError

PACKAGE_NAME = "spconv"
PACKAGE_ROOT = Path(__file__).parent.resolve()
NDIM_DONT_CARE = 3
# Weights are (O, k.., I), and so are states.
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
SAVED_WEIGHT_LAYOUT = ""
SPCONV_DO_SORT = SPCONV_USE_DIRECT_TABLE = True
SPCONV_ALLOW_TF32 = SPCONV_FX_TRACE_MODE = SPCONV_INT8_DEBUG = False
SPCONV_CPP_GEMM = SPCONV_CPP_INDICE_PAIRS = SPCONV_CPP_INDICE_PAIRS_IGEMM = False
SPCONV_DEBUG_WEIGHT = SPCONV_DEBUG_NVRTC_KERNELS = SPCONV_DEBUG_CPP_ONLY = False
SPCONV_DEBUG_SAVE_PATH = ""
SPCONV_BWD_SPLITK = [1, 2, 4, 8, 16, 32, 64]
SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE = 1.1
DISABLE_JIT = False
EDITABLE_INSTALLED = False
BOOST_ROOT = None
PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]
TORCH_HAS_AMP = True


def is_amp_enabled() -> bool:
    """Return whether autocast is in force."""
    return torch.is_autocast_enabled()


# What may be set of constants that say in what order weights are.
_ORDER = {"ALL_WEIGHT_IS_KRSC": (True,), "FILTER_HWIO": (False,), "SAVED_WEIGHT_LAYOUT": ("", "KRSC")}


class _Constants(ModuleType):
    """A module whose hints may be set and change no result; the order of weights may not."""

    def __setattr__(self, name: str, value: Any) -> None:
        if value not in _ORDER.get(name, (value,)):
            raise InsumNameError(
                f"spconv.constants.{name} is {getattr(self, name)!r}, for weights have one order; got {value!r}",
                fix="convert other states with insum_nn.structure.conv_weights.convert_state_dict.",
                argument=name,
                got=value,
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Constants
