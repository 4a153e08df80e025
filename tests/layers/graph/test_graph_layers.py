"""The case of every layer of graphs, against torch_geometric's layer of the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as peers

from insum_nn import layers
from insum_nn.compiler.options import Options
from tests.layers.layer_case import Inputs, LayerCase, real, whole


class GraphCase(LayerCase):
    """A subclass says how to build the layer from a package that has it.

    Attributes:
        CHANNELS: the features of a node.
        WEIGHTED: edges have weights.
    """

    CHANNELS: ClassVar[int] = 3
    WEIGHTED: ClassVar[bool] = False
    SWAPPED = True
    ERRORS: ClassVar[Mapping[str, Any]] = {
        "another width": (lambda x, *rest: (x[:, :-1], *rest), r"cannot be multiplied|index 'c' has two extents"),
        "no node": (
            lambda x, edges, *rest: (x, edges + 5, *rest),
            r"index tensor '[IJ]' (points|writes) outside axis 0 of (.|\n)*first at e = |indices in 'edge_index'",
        ),
        "a negative node": (
            lambda x, edges, *rest: (x, edges - 1, *rest),
            r"index tensor '[IJ]' holds -1|negative indices in 'edge_index'",
        ),
        "no integers": (lambda x, edges, *rest: (x, edges.double(), *rest), "'edge_index' to be of integer type"),
    }

    build: ClassVar[Callable[..., Any]]

    def make(self, options: Options) -> nn.Module:
        return self.build(layers, options=options)

    def peer(self) -> nn.Module:
        return self.build(peers)

    def inputs(self, n: int) -> Inputs:
        """Features, edges, and weights of the edges: three edges to two nodes, self-loops among them."""
        edges = whole(1, n, 2, n + n // 2)
        weights = (real(2, edges.shape[1]).abs() + 0.5,) if self.WEIGHTED else ()
        return real(0, n, self.CHANNELS), edges, *weights

    @property
    def sizes(self) -> tuple[Mapping[int, str], ...]:  # type: ignore[override]
        return ({0: "nodes"}, {1: "edges"}, *([{0: "edges"}] if self.WEIGHTED else []))


# Where torch_geometric's own normalisation comes first: the number of edges depends on values.
OWN_NORM = {
    "test_other_sizes_and_strides": "torch_geometric's normalisation fails without edges",
    "test_results_on_the_meta_device": "torch_geometric's normalisation counts self-loops",
    "test_traced_graphs_take_any_size": "torch_geometric's normalisation counts self-loops",
    "test_functions_of_torch": "torch_geometric's normalisation counts self-loops",
}
_ON_CPU = "its parameters are made by a constructor that takes no notice of the default device"
NOT_ON_META = dict.fromkeys(
    (
        "test_a_state_fills_what_was_made_on_the_meta_device",
        "test_reset_parameters",
        "test_results_on_the_meta_device",
    ),
    _ON_CPU,
)


# Errors of a layer that takes features of any width, and of one that begins with torch_geometric's normalisation.
OF_ANY_WIDTH = {kind: GraphCase.ERRORS[kind] for kind in ("no node", "a negative node", "no integers")}
OF_WIDTH_ALONE = {"another width": GraphCase.ERRORS["another width"]}


class TestGCNConv(GraphCase):
    CHANNELS, WEIGHTED = 2, True

    build = staticmethod(lambda home, **how: home.GCNConv(2, 3, **how))


class TestGCNConv_narrowing(GraphCase):
    VARIANT, WEIGHTED = "narrowing", True

    build = staticmethod(lambda home, **how: home.GCNConv(3, 2, **how))


class TestGCNConv_no_weights(TestGCNConv_narrowing):
    VARIANT, WEIGHTED = "no weights", False


class TestGCNConv_not_normalised(GraphCase):
    VARIANT, CHANNELS, WEIGHTED = "not normalised", 2, True
    ELSEWHERE = False

    build = staticmethod(lambda home, **how: home.GCNConv(2, 3, normalize=False, **how))


class TestGCNConv_other_flow(GraphCase):
    VARIANT, WEIGHTED = "other flow", True
    ELSEWHERE = False

    build = staticmethod(lambda home, **how: home.GCNConv(3, 2, flow="target_to_source", improved=True, **how))


class TestGATConv(GraphCase):
    build = staticmethod(lambda home, **how: home.GATConv(3, 2, 2, add_self_loops=False, **how))


class TestGATv2Conv(GraphCase):
    WEIGHTED = True

    build = staticmethod(lambda home, **how: home.GATv2Conv(3, 2, 2, edge_dim=1, add_self_loops=False, **how))


class TestTransformerConv(GraphCase):
    build = staticmethod(lambda home, **how: home.TransformerConv(3, 2, 2, **how))


class TestSAGEConv(GraphCase):
    build = staticmethod(lambda home, **how: home.SAGEConv(3, 2, root_weight=False, **how))


class TestSAGEConv_maxima(GraphCase):
    VARIANT = "maxima"

    build = staticmethod(lambda home, **how: home.SAGEConv(3, 2, "max", **how))


class TestGINConv(GraphCase):
    ERRORS: ClassVar[Mapping[str, Any]] = OF_ANY_WIDTH

    build = staticmethod(lambda home, **how: home.GINConv(nn.Identity(), **how))


class TestGINEConv(GraphCase):
    ERRORS: ClassVar[Mapping[str, Any]] = OF_ANY_WIDTH
    WEIGHTED = True

    build = staticmethod(lambda home, **how: home.GINEConv(nn.Identity(), **how))

    @staticmethod
    def call(layer: nn.Module, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return layer(x, edges, weight[:, None].expand(-1, x.shape[1]))


class TestGraphConv(GraphCase):
    WEIGHTED = True

    build = staticmethod(lambda home, **how: home.GraphConv(3, 2, **how))


class TestTAGConv(GraphCase):
    WEIGHTED = True

    build = staticmethod(lambda home, **how: home.TAGConv(3, 2, 1, **how))


class TestChebConv(GraphCase):
    ELSEWHERE = False
    WEIGHTED = True
    ERRORS: ClassVar[Mapping[str, Any]] = OF_WIDTH_ALONE
    NOT_PROMISED: ClassVar[Mapping[str, str]] = OWN_NORM | NOT_ON_META

    build = staticmethod(lambda home, **how: home.ChebConv(3, 2, 2, **how))


class TestSGConv(GraphCase):
    ELSEWHERE = False
    WEIGHTED = True
    ERRORS: ClassVar[Mapping[str, Any]] = OF_WIDTH_ALONE
    NOT_PROMISED: ClassVar[Mapping[str, str]] = OWN_NORM

    build = staticmethod(lambda home, **how: home.SGConv(3, 2, 2, **how))


class TestAPPNP(GraphCase):
    ERRORS: ClassVar[Mapping[str, Any]] = OF_ANY_WIDTH
    WEIGHTED = True

    build = staticmethod(lambda home, **how: home.APPNP(2, 0.5, add_self_loops=False, **how))


class TestLGConv(GraphCase):
    ERRORS: ClassVar[Mapping[str, Any]] = OF_ANY_WIDTH
    WEIGHTED = True
    # The product of weights and features is one of those that autocast rounds.
    AUTOCAST = torch.bfloat16

    build = staticmethod(lambda home, **how: home.LGConv(**how))


class TestGatedGraphConv(GraphCase):
    ELSEWHERE = False
    ERRORS: ClassVar[Mapping[str, Any]] = OF_ANY_WIDTH
    WEIGHTED = True
    NOT_PROMISED: ClassVar[Mapping[str, str]] = NOT_ON_META | {
        "test_derivatives": "torch has no batching rule of its GRU",
        "test_functions_of_torch": "torch has no batching rule of its GRU",
    }

    build = staticmethod(lambda home, **how: home.GatedGraphConv(3, 2, **how))


class TestNNConv(GraphCase):
    WEIGHTED = True

    build = staticmethod(lambda home, **how: home.NNConv(3, 2, nn.Linear(1, 6), **how))

    @staticmethod
    def call(layer: nn.Module, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return layer(x, edges, weight[:, None])


class TestEdgeConv(GraphCase):
    build = staticmethod(lambda home, **how: home.EdgeConv(nn.Linear(6, 2), aggr="sum", **how))


class TestPNAConv(GraphCase):
    ERRORS: ClassVar[Mapping[str, Any]] = OF_ANY_WIDTH

    build = staticmethod(
        lambda home, **how: home.PNAConv(3, 2, ["mean", "var"], ["identity"], torch.tensor([0, 2], device="cpu"), **how)
    )


class RelationalCase(GraphCase):
    @staticmethod
    def call(layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        return layer(x, edges, edges[0] % 2)


class TestRGCNConv(RelationalCase):
    build = staticmethod(lambda home, **how: home.RGCNConv(3, 2, 2, **how))


class TestFastRGCNConv(RelationalCase):
    build = staticmethod(lambda home, **how: home.FastRGCNConv(3, 2, 2, aggr="sum", **how))


class TestHeteroLinear(GraphCase):
    # As of any linear layer.
    AUTOCAST = torch.bfloat16
    ERRORS: ClassVar[Mapping[str, Any]] = {
        "another width": (lambda x, edges: (x[:, :-1], edges), "index 'c' has two extents")
    }

    build = staticmethod(lambda home, **how: home.HeteroLinear(3, 2, 2, **how))

    @staticmethod
    def call(layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        return layer(x, edges[0, : x.shape[0]] % 2)


class TestGroupedLinear(TestHeteroLinear):
    SWAPPED = False

    build = staticmethod(lambda home, **how: home.GroupedLinear(2, 3, 2, **how))

    def peer(self) -> None:  # type: ignore[override]
        return None

    def oracle(self, layer: Any, *inputs: Tensor) -> Tensor:
        x, edges = inputs
        group = edges[0, : x.shape[0]] % 2
        return (x[:, :, None] * layer.weight[group]).sum(1) + layer.bias[group]
