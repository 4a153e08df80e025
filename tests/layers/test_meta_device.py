"""What is made on torch's meta device, beyond what `layer_case.py` says of every layer: networks, masks, counters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import insum_nn
from insum_nn import models
from insum_nn.errors import InsumDeviceError
from insum_nn.layers import BlockSparseLinear, Linear, PrunedConv2d, SparseConv3d, SparseConvTensor, SparseMaxPool3d
from tests.layers.layer_case import RECIPES, emptied, on_meta, reset

o3 = pytest.importorskip("e3nn.o3")
each_recipe = pytest.mark.parametrize("fill", RECIPES.values(), ids=RECIPES)


def _network() -> nn.Module:
    return nn.Sequential(
        o3.Linear("4x0e + 2x1o", "3x0e + 2x1o", biases=True),
        o3.TensorSquare("3x0e + 2x1o", "4x0e + 2x1o"),
        o3.FullyConnectedTensorProduct("4x0e + 2x1o", "0e", "2x0e + 2x1o", shared_weights=True),
    )


class _Squared(nn.Module):
    """Feeds a constant to the product at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = _network()

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[2](self.parts[1](self.parts[0](x)), x.new_ones(len(x), 1))


@each_recipe
def test_swapped_on_the_meta_device(fill: Callable[[nn.Module, dict[str, Tensor]], object]):
    torch.manual_seed(0)
    trained = _Squared()
    module = on_meta(_Squared)
    assert len(insum_nn.swap(module).swapped) == 3
    fill(module, copy.deepcopy(trained.state_dict()))
    x = torch.randn(5, 10)
    torch.testing.assert_close(module(x), trained(x))


@each_recipe
def test_graph_layers_swapped_on_the_meta_device(fill: Callable[[nn.Module, dict[str, Tensor]], object]):
    pyg = pytest.importorskip("torch_geometric.nn")
    trained, module = pyg.GCNConv(3, 2), on_meta(lambda: nn.Sequential(pyg.GCNConv(3, 2)))
    assert insum_nn.swap(module).swapped
    layer = module[0]
    fill(layer, copy.deepcopy(trained.state_dict()))
    x, edges = torch.randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])
    torch.testing.assert_close(layer(x, edges), trained(x, edges))


def test_models():
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    water = positions, torch.tensor([8, 1, 1]), *torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])

    def potential() -> nn.Module:
        return models.NequIP([1, 8], cutoff=2.0, num_layers=2, num_features=2, lmax=1, energy_shift=[1.0, 2.0])

    trained, module = potential(), on_meta(potential)
    RECIPES["emptied, loaded"](module, trained.state_dict())
    assert torch.equal(module(*water), trained(*water))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_places_of_a_mask(kind: str):
    """The places that a caller chose, and no others, whatever happens to the device."""
    if kind == "linear":
        mask = torch.tensor([[True, False, True], [False, True, False]])

        def make(**rest: Any) -> Any:
            return BlockSparseLinear(6, 4, block_shape=2, mask=mask, group_size=2, **rest)
    else:
        mask = torch.rand(3, 2, 2, 2) < 0.5

        def make(**rest: Any) -> Any:
            return PrunedConv2d(2, 3, 2, mask=mask, **rest)

    for layer in (make(device="meta"), on_meta(make), make().to("meta"), copy.deepcopy(make(device="meta"))):
        layer.to_empty(device="cpu")
        assert torch.equal(layer.mask, mask)
        assert layer.dense_shape.tolist() == list(layer.dense_extents)
        built = make()
        for name, tensor in built.index.items():
            assert torch.equal(layer.index[name], tensor), name
    skipped = nn.utils.skip_init(type(layer), *((6, 4) if kind == "linear" else (2, 3, 2)), mask=mask, **_shape(kind))
    assert torch.equal(skipped.mask, mask)


def _shape(kind: str) -> dict[str, int]:
    return {"block_shape": 2} if kind == "linear" else {}


def test_places_of_a_state_that_is_on_the_meta_device():
    """They are the layer's own where there are as many, since the state's have no values."""
    layer = BlockSparseLinear(6, 4, block_shape=2, density=0.5)
    mask = layer.mask
    layer.load_state_dict(BlockSparseLinear(6, 4, block_shape=2, density=0.5, device="meta").state_dict(), assign=True)
    assert layer.weight.is_meta
    assert torch.equal(layer.to_empty(device="cpu").mask, mask)
    more = BlockSparseLinear(6, 4, block_shape=2, device="meta").state_dict()
    with pytest.raises(RuntimeError, match="its positions are on the meta device"):
        layer.load_state_dict(more, assign=True)


@pytest.mark.filterwarnings("ignore:for .*which is a no-op:UserWarning")
def test_a_load_that_copies_nothing_adopts_the_places():
    """Without `assign=True` torch copies nothing into tensors on the meta device, and says so."""
    trained = BlockSparseLinear(6, 4, block_shape=2, density=0.8)
    layer = BlockSparseLinear(6, 4, block_shape=2, density=0.2, device="meta")
    layer.load_state_dict(trained.state_dict())
    layer.to_empty(device="cpu")
    assert torch.equal(layer.mask, trained.mask)
    assert layer.weight.shape == trained.weight.shape


@pytest.mark.parametrize("kind", [BlockSparseLinear, PrunedConv2d])
def test_a_mask_without_values_is_refused(kind: Any):
    shape = (2, 2) if kind is BlockSparseLinear else (2, 2, 3, 3)
    mask = torch.ones(shape, dtype=torch.bool, device="meta")
    arguments = (64, 64) if kind is BlockSparseLinear else (2, 2, 3)
    with pytest.raises(InsumDeviceError, match=r"'mask' is on the meta device(.|\n)*fix: make the mask on another"):
        kind(*arguments, mask=mask)


def test_counted_voxels():
    for make in (
        lambda: SparseConv3d(2, 2, 2, record_voxel_count=True),
        lambda: SparseMaxPool3d(2, record_voxel_count=True),
    ):
        layer = reset(on_meta(make))
        assert layer.get_max_num_voxels().item() == 0  # type: ignore[operator]
        sites = torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3]], dtype=torch.int32)
        layer(SparseConvTensor(torch.randn(2, 2), sites, [4, 4, 4], 1))
        assert layer.get_max_num_voxels().item() == len(
            layer(SparseConvTensor(torch.randn(2, 2), sites, [4, 4, 4], 1)).features
        )  # type: ignore[operator]


@pytest.mark.parametrize("layouts", [("ir_mul", "mul_ir"), ("mul_ir", "ir_mul"), ("ir_mul", "ir_mul")])
def test_linear_layouts(layouts: tuple[str, str]):
    """In graphs that torch records, e3nn's code runs between two changes of layout."""

    def make() -> Linear:
        return Linear("2x0e + 3x1o + 1x2e", "2x1o + 2x0e", layout_in=layouts[0], layout_out=layouts[1])

    trained, module = make(), on_meta(make)
    emptied(module).load_state_dict(trained.state_dict())
    x = torch.randn(4, trained.irreps_in.dim)
    expected = trained(x)
    assert torch.equal(module(x), expected)
    torch.testing.assert_close(torch.jit.trace(module, x, check_trace=False)(x), expected)
