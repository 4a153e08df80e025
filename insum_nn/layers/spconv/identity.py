"""`spconv.pytorch.identity`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["Identity"]


class Identity(nn.Identity):
    """The identity."""

    def input_spatial_size(self, out_size: Sequence[int]) -> Sequence[int]:
        """Return the input's spatial size, which is the output's."""
        return out_size
