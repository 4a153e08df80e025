"""States of whole models for models made of spconv's layers."""

from __future__ import annotations

from torch import Tensor, nn

from insum_nn.errors import InsumFormatError
from insum_nn.layers.voxel.conv import SparseConvolution

__all__ = ["spconv_state_dict"]


def spconv_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a whole model for the same model made of spconv's layers, which loads them strictly.

    Weights have spconv's layout in memory already; what this adds to `state_dict()` is that every convolution is one
    that spconv has.

    Args:
        model: any module with our layers in the places of spconv's.

    Returns:
        Detached tensors by name, sharing the parameters' memory.

    Raises:
        InsumFormatError: a layer has groups of channels or an anchor, which spconv's have not.

    >>> layer = SparseConvolution(3, 4, 8, 3, subm=True)
    >>> {name: tuple(value.shape) for name, value in spconv_state_dict(layer).items()}
    {'weight': (8, 3, 3, 3, 4), 'bias': (8,)}
    """
    wrong: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, SparseConvolution):
            name = path or "the model"
            wrong += [f"{name}: groups={module.groups}"] if module.groups != 1 else []
            wrong += [f"{name}: anchor={module.own_anchor}"] if module.own_anchor is not None else []
    if wrong:
        raise InsumFormatError(
            "spconv has no layers like some of this model's",
            details=wrong,
            fix="export models whose layers have groups=1 and no anchor.",
        )
    return model.state_dict()
