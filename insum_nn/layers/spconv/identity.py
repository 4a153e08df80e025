"""`spconv.pytorch.identity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["Identity"]


class Identity(nn.Module):
    """Returns what it is given."""

    def forward(self, input: Any) -> Any:
        """Nothing is done."""
        return input

    def input_spatial_size(self, out_size: Sequence[int]) -> Sequence[int]:
        """The input's spatial size is the output's."""
        return out_size
