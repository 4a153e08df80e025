"""Graph convolution: takes the place of `torch_geometric.nn.GCNConv`."""

# No postponed annotations here: TorchScript reads those of `forward` as they stand.

from typing import Any, ClassVar

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError, MissingExtraError
from insum_nn.ops.graph_conv import CARRY, Recipe, explain_graph_conv, graph_conv
from insum_nn.structure.gcn_norm import check_edge_index, gcn_norm

try:
    from torch_geometric.nn import MessagePassing
    from torch_geometric.nn.aggr import SumAggregation
    from torch_geometric.nn.conv import gcn_conv as peer
    from torch_geometric.nn.parameter_dict import ParameterDict as _ParameterDict  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "GCNConv takes the place of torch_geometric's, which is not installed", fix="run: pip install insum-nn[pyg]"
    ) from error
