"""Who looks on while an operator runs: whoever records, replaces or differentiates torch's calls beside autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from insum_nn.compiler.api import transformed

__all__ = ["exact_dtypes", "ordinary", "transformed"]

_PLAIN = (Tensor, torch.nn.Parameter)


def ordinary(*tensors: Tensor) -> bool:
    """Whether nobody records, replaces or differentiates torch's calls by other means than autograd."""
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all([type(t) in _PLAIN and not t.is_meta for t in tensors])


def exact_dtypes(device: torch.device) -> AbstractContextManager[object]:
    """Operands were given their dtype where autocast was in force; inside, it would mix what was equal."""
    return torch.autocast(device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()
