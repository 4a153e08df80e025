"""Clebsch-Gordan coefficients: where they are not zero, and their values."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes

from insum_nn.errors import import_extra
from insum_nn.structure.plain_tensors import plain_tensors

__all__ = ["nonzeros"]


@lru_cache(maxsize=512)
def nonzeros(l1: int, l2: int, l3: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the nonzero Clebsch-Gordan coefficients of degrees `l1`, `l2` and `l3`: indices and values.

    Source: `e3nn.o3.wigner_3j`, whose real basis and sign this is; computed in float64.

    Returns:
        (3, nnz) components i, j, k, and (nnz,) values.

    Raises:
        MissingExtraError: e3nn is not installed.

    >>> index, values = nonzeros(1, 1, 1)
    >>> index.shape, round(float(np.square(values).sum()), 6)
    ((3, 6), 1.0)
    """
    wigner_3j = import_extra("e3nn.o3", "Clebsch-Gordan coefficients").wigner_3j
    # torch makes the result on its default device, which may hold no float64, and for the transform or mode that is
    # active, where it may have no values.
    with plain_tensors(), _disable_current_modes(), torch.device("cpu"):
        dense: NDArray[np.float64] = wigner_3j(l1, l2, l3, dtype=torch.float64).numpy()
    # Entries below are rounding errors of the change of basis; true ones are never this small.
    index = np.stack(np.nonzero(np.abs(dense) > 1e-10)).astype(np.int64)
    return index, dense[tuple(index)]
