"""Who looks on while an operator runs: whoever records, replaces or differentiates torch's calls beside autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from insum_nn.compiler.api import transformed

__all__ = ["ordinary", "transformed"]

_PLAIN = (Tensor, torch.nn.Parameter)


def ordinary(*tensors: Tensor) -> bool:
    """Whether nobody records, replaces or differentiates torch's calls by other means than autograd."""
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all([type(t) in _PLAIN and not t.is_meta for t in tensors])
