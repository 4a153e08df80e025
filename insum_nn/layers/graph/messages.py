"""Whether a layer of PyTorch Geometric is asked for its messages, which fused layers do not form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["asks_for_messages"]

# What a subclass or an instance may define to change how messages are made, combined or read.
_METHODS = ("message", "aggregate", "message_and_aggregate", "update", "edge_update")
_HOOKS = tuple(
    f"_{name}_forward_{when}hooks"
    for name in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
)


def asks_for_messages(layer: Any, peer: type, edge_index: Any) -> bool:
    """Return whether messages are asked for, by an explainer, a hook, a subclass, an aggregation or a sparse matrix."""
    if layer.explain or layer._edge_mask is not None or layer.decomposed_layers != 1:
        return True
    sums = layer.aggr_module
    if layer.aggr not in ("add", "sum") or type(sums).__name__ != "SumAggregation":
        return True
    if sums._forward_hooks or sums._forward_pre_hooks or sums._backward_hooks or sums._backward_pre_hooks:
        return True
    if any(getattr(layer, name) for name in _HOOKS):
        return True
    kind = type(layer)
    if any(name in layer.__dict__ or getattr(kind, name) is not getattr(peer, name) for name in _METHODS):
        return True
    return type(edge_index) is not Tensor or edge_index.layout != torch.strided
