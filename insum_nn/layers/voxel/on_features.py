"""Dense modules on the features of a sparse tensor, and torch's modules that take either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from insum_nn.layers.voxel.base import Unscriptable
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

__all__ = ["SparseBatchNorm", "SparseReLU", "SparseSyncBatchNorm", "on_features"]


def on_features(
    module: nn.Module, x: SparseConvTensor, run: Callable[[Tensor], Tensor] | None = None
) -> SparseConvTensor:
    """Apply a dense module to the features of a sparse tensor; `run`: what it does with features, by default its call.

    In training a normalisation takes no statistics of a tensor without voxels; its parameters get gradients of zeros.
    Under `torch.compile` it refuses such a tensor, when the compiled code runs.
    """
    call = module if run is None else run
    norm = isinstance(module, _BatchNorm)
    return x.replace_feature(_normalised(module, x.features, call) if norm else call(x.features))


def _normalised(module: _BatchNorm, features: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `run(features)`, or its equivalent where torch raises.

    Torch raises for an empty cloud, which has no statistics, and reads the number of voxels, which may be unknown while
    tracing.
    """
    takes_statistics = module.training or module.running_mean is None
    if not torch.compiler.is_compiling():
        alone = not (isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized())
        # With several processes, the others wait for this one's statistics even if it has no voxels.
        if not takes_statistics or not alone or features.shape[0] > 0:
            return run(features)
        # The parameters stay in the graph: DistributedDataParallel waits for the gradient of each.
        return _affine(features, module.weight, module.bias) if module.affine else features
    if takes_statistics or type(module) not in _NORMS:
        torch._check(features.shape[0] > 1)
        return run(features)
    mean, variance = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
    scale = (variance + module.eps).rsqrt()
    if not module.affine:
        return ((features - mean) * scale).to(features.dtype)
    scale = scale * module.weight
    # A normalisation made with bias=False has none, though torch's stubs say otherwise.
    bias = cast(Tensor | None, module.bias)
    return _affine(features, scale, -mean * scale if bias is None else bias - mean * scale)


def _affine(features: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    scaled = features * scale
    return (scaled if bias is None else scaled + bias).to(features.dtype)


class _OnFeatures(Unscriptable):
    """Before a module of torch among the bases of a class, makes it take a sparse tensor too."""

    def forward(self, input: Any) -> Any:
        """Apply the module to a tensor, or to the features of a sparse one."""
        run = cast(Any, super()).forward
        return on_features(cast(Any, self), input, run) if isinstance(input, SparseConvTensor) else run(input)


class SparseBatchNorm(_OnFeatures, nn.BatchNorm1d):
    """`nn.BatchNorm1d` that also takes a sparse tensor."""


class SparseSyncBatchNorm(_OnFeatures, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` that also takes a sparse tensor, and normalises the features over all processes."""


class SparseReLU(_OnFeatures, nn.ReLU):
    """`nn.ReLU` that also takes a sparse tensor."""


# Those that normalise as torch does, by what they keep.
_NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm, SparseBatchNorm, SparseSyncBatchNorm)
