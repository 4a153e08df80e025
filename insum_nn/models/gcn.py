"""Graph convolutional networks: take the place of `torch_geometric.nn.models.GCN`."""

# Annotations are not postponed here: TorchScript reads those of methods as they stand.

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Tuple, Union, cast  # noqa: UP035 - as the method it overrides has them

from torch import Tensor

from insum_nn.errors import MissingExtraError
from insum_nn.layers.graph.gcn_conv import GCNConv

try:
    from torch_geometric.nn.conv import MessagePassing
    from torch_geometric.nn.models import basic_gnn
except ImportError as error:
    raise MissingExtraError(
        "GCN takes the place of torch_geometric's, which is not installed", fix="run: pip install torch_geometric"
    ) from error

__all__ = ["GCN"]


class GCN(basic_gnn.GCN):
    """Graph convolutions with activations, normalisation and dropout between: `torch_geometric.nn.models.GCN`.

    Arguments, `state_dict` and results are PyTorch Geometric's; its layers are our `GCNConv`.

    Source: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks (ICLR 2017), section 3.

    Args:
        in_channels: features of a node; -1: those of the first input.
        hidden_channels: features between layers.
        num_layers: convolutions.
        out_channels: features of the result; default `hidden_channels`.
        dropout: probability of dropping a feature between layers.
        act: activation, by name or as a callable; `None` for none.
        act_first: activate before normalising.
        act_kwargs: arguments of the activation.
        norm: normalisation, by name or as a callable; `None` for none.
        norm_kwargs: arguments of the normalisation.
        jk: jumping knowledge: `"last"`, `"cat"`, `"max"`, `"lstm"` or `None`.
        **kwargs: arguments of every `GCNConv`, `options` among them.

    >>> import torch
    >>> from insum_nn.models.gcn import GCN
    >>> model = GCN(16, 8, num_layers=2, out_channels=3)
    >>> model
    GCN(16, 3, num_layers=2)
    >>> model(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
    torch.Size([4, 3])
    """

    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def init_conv(
        self,
        in_channels: Union[int, Tuple[int, int]],  # noqa: UP006, UP007
        out_channels: int,
        **kwargs: Any,
    ) -> MessagePassing:
        """One layer."""
        return GCNConv(cast("int", in_channels), out_channels, **kwargs)
