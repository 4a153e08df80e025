"""The cases of all layers, for tests that are about something else than `layer_case.py`."""

from __future__ import annotations

from tests.layers.equivariant import test_equivariant_layers
from tests.layers.graph import test_graph_layers
from tests.layers.layer_case import LayerCase, with_parameters
from tests.layers.pruned import test_pruned_layers
from tests.layers.voxel import test_voxel_layers

__all__ = ["ALL_CASES", "EVERY_LAYER", "NO_LAYERS", "OF_E3NN_IN_GRAPHS", "WITHOUT_OPTIONS", "with_parameters"]

_MODULES = (test_graph_layers, test_pruned_layers, test_voxel_layers, test_equivariant_layers)
ALL_CASES: dict[str, LayerCase] = {
    case.title(): case()
    for module in _MODULES
    for name, case in vars(module).items()
    if name.startswith("Test") and isinstance(case, type) and issubclass(case, LayerCase)
}

# Layers that take no options, since peers' do not.
WITHOUT_OPTIONS = {name: ALL_CASES[name] for name in ("ToDense", "AddTableMisaligned")}
EVERY_LAYER = {name: case for name, case in ALL_CASES.items() if case.ELSEWHERE and name not in WITHOUT_OPTIONS}

# No layers by themselves: what others are called with, or made of.
NO_LAYERS = {"SparseConvTensor", "SparseSequential"}
# Of these torch_geometric's own code comes first: edges whose number depends on values; or a GRU, not batched.
NO_LAYERS |= {"ChebConv", "SGConv", "GatedGraphConv"}
# It is made of a module of mace, which its own tests do without.
NO_LAYERS |= {"SymmetricContraction"}

# Layers that put e3nn's own operators into graphs that torch records.
OF_E3NN_IN_GRAPHS = ("FullyConnectedNet", "Linear", "SphericalHarmonics")
