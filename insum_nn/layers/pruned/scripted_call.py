"""What TorchScript compiles in place of a layer that it cannot read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ScriptedCall"]


class ScriptedCall(nn.Module):
    """A recorded call of a layer, for any number of samples, with any dimensions before those of one sample.

    Its parameters and buffers are the layer's, under the layer's names below `call`.
    """

    def __init__(self, layer: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.training = layer.training
        self.channels, self.sample_dims = example.shape[1], example.ndim - 1
        call: Any = torch.jit.trace(layer, example, check_trace=False)
        self.call = call

    def forward(self, input: Tensor) -> Tensor:
        """Call the layer."""
        torch._assert(input.dim() >= self.sample_dims, "Too few dimensions of the input")
        torch._assert(input.shape[-self.sample_dims] == self.channels, "Incorrect features or channels of the input")
        head = input.shape[: input.dim() - self.sample_dims]
        result = self.call(input.unsqueeze(0).flatten(0, -1 - self.sample_dims))
        return result.reshape(head + result.shape[1:])
