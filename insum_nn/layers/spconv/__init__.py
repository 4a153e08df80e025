"""The point-cloud layers under the names of `spconv.pytorch`, its submodules included.

    # import spconv.pytorch as spconv
    # from spconv.pytorch.utils import PointToVoxel
    import insum_nn.layers.spconv as spconv
    from insum_nn.layers.spconv.utils import PointToVoxel

What differs from spconv 2.3: `algo` is not read, for the compiler chooses. Output voxels are in lexicographic order. A
repeated voxel is refused. A dilation enlarges the output of a transposed convolution, as in torch. Features that tie in
a pool share its gradient.

>>> import torch
>>> conv = SubMConv3d(4, 8, kernel_size=3, bias=False)
>>> indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
>>> x = SparseConvTensor(torch.ones(2, 4), indices, spatial_shape=[4, 4, 4], batch_size=1)
>>> conv(x).features.shape
torch.Size([2, 8])
"""

from __future__ import annotations

from insum_nn.layers.spconv import (
    constants,
    conv,
    core,
    cppcore,
    functional,
    hash,
    identity,
    modules,
    ops,
    pool,
    spatial,
    tables,
    tools,
    utils,
)
from insum_nn.layers.spconv.core import AlgoHint, ConvAlgo
from insum_nn.layers.spconv.identity import Identity
from insum_nn.layers.spconv.states import spconv_state_dict
from insum_nn.layers.voxel import conv as _convs
from insum_nn.layers.voxel import pool as _pools
from insum_nn.layers.voxel import sequential as _modules
from insum_nn.layers.voxel.conv import *
from insum_nn.layers.voxel.on_features import SparseBatchNorm, SparseReLU, SparseSyncBatchNorm
from insum_nn.layers.voxel.pool import *
from insum_nn.layers.voxel.sequential import *
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor, sparse_add

# The release of spconv whose names these are: projects ask for it before they choose names.
__version__ = "2.3.8"
SPCONV_VERSION_NUMBERS = [2, 3, 8]

__all__ = [
    "SPCONV_VERSION_NUMBERS",
    "AlgoHint",
    "ConvAlgo",
    "Identity",
    "SparseBatchNorm",
    "SparseConvTensor",
    "SparseReLU",
    "SparseSyncBatchNorm",
    "constants",
    "conv",
    "core",
    "cppcore",
    "functional",
    "hash",
    "identity",
    "modules",
    "ops",
    "pool",
    "sparse_add",
    "spatial",
    "spconv_state_dict",
    "tables",
    "tools",
    "utils",
]
__all__ += _convs.__all__
__all__ += _pools.__all__
__all__ += _modules.__all__
