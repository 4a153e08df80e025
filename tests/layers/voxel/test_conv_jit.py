"""torch.jit around layers over sparse grids: one cell is traced, as in spconv; all else is refused in clear words."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import insum_nn.layers.spconv as spconv
from insum_nn.errors import InsumBackendError
from tests.ops.conv_oracle import random_sites

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
]

SHAPE = [6, 5, 7]


class Wrapped(nn.Module):
    """Tensors in and out, as torch.jit wants them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        found = self.layer(spconv.SparseConvTensor(features, indices, SHAPE, 2))
        return found if isinstance(found, torch.Tensor) else found.features


def layers() -> dict[str, nn.Module]:
    return {
        "submanifold": spconv.SubMConv3d(4, 3, 3),
        "strided": spconv.SparseConv3d(4, 3, 2, 2),
        "transposed": spconv.SparseConvTranspose3d(4, 3, 2, 2),
        "max": spconv.SparseMaxPool3d(2),
        "global mean": spconv.SparseGlobalAvgPool(),
        "dense": spconv.ToDense(),
        "sequence": spconv.SparseSequential(nn.Linear(4, 4), spconv.SubMConv3d(4, 3, 3), nn.ReLU()),
    }


@pytest.mark.parametrize("name", layers())
def test_what_depends_on_voxels_is_not_traced(name):
    sites = random_sites(SHAPE, 2, 25)
    layer = Wrapped(layers()[name])
    with pytest.raises(
        InsumBackendError, match=r"torch.jit.trace cannot record(.|\n)*use torch.compile or torch.export"
    ):
        torch.jit.trace(layer, (torch.randn(50, 4), sites.indices))
    # And works as before.
    assert layer(torch.randn(50, 4), sites.indices).isfinite().all()


def test_a_shared_map_is_not_traced():
    first, second = (spconv.SubMConv3d(4, 4, 3, indice_key="a") for _ in range(2))
    x = first(spconv.SparseConvTensor(torch.randn(50, 4), random_sites(SHAPE, 2, 25).indices, SHAPE, 2))
    with pytest.raises(InsumBackendError, match="torch.jit.trace cannot record"):
        torch.jit.trace(lambda features: second(x.replace_feature(features)).features, x.features.detach())


@pytest.mark.parametrize("groups", [1, 2])
def test_one_cell_is_traced(groups):
    model = Wrapped(
        spconv.SparseSequential(
            spconv.SubMConv3d(4, 6, 1, groups=groups),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            spconv.SparseConv3d(6, 4, 1, bias=False, indice_key="k"),
        )
    ).eval()
    sites = random_sites(SHAPE, 2, 25)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, (torch.randn(50, 4), sites.indices)), file)
    file.seek(0)
    traced = torch.jit.load(file)
    features = torch.randn(17, 4)
    torch.testing.assert_close(traced(features, sites.indices[:17]), model(features, sites.indices[:17]))


@pytest.mark.parametrize("name", [*layers(), "norm", "relu", "one cell"])
def test_no_layer_is_scripted(name):
    more = {"norm": spconv.SparseBatchNorm(4), "relu": spconv.SparseReLU(), "one cell": spconv.SubMConv3d(4, 4, 1)}
    layer = (layers() | more)[name]
    for model in (layer, Wrapped(layer), nn.Sequential(nn.Linear(4, 4), layer)):
        with pytest.raises(InsumBackendError, match=rf"cannot compile {type(layer).__name__}(.|\n)*use torch.compile"):
            torch.jit.script(model)
