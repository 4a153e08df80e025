"""Weights of other libraries, against their own order of kernel cells written out as loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from insum_nn.errors import InsumFormatError, InsumNameError, InsumShapeError
from insum_nn.layers.voxel.conv import SparseConvolution
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor
from insum_nn.structure.conv_weights import convert_state_dict, export_weight, import_weight, kernel_anchor
from tests.ops.conv_oracle import random_sites

KERNELS = [(3, 3, 3), (2, 2, 2), (4, 4, 4), (3, 2, 1), (5, 1, 3), (1, 1, 1), (2, 3)]


def minkowski_offsets(kernel):
    """Axis 0 runs fastest; odd extents are centred, even ones start at the voxel."""
    offsets = []
    for index in range(math.prod(kernel)):
        cell = []
        for extent in kernel:
            index, place = divmod(index, extent)
            cell.append(place if extent % 2 == 0 else place - extent // 2)
        offsets.append(tuple(cell))
    return offsets


def torchsparse_offsets(kernel):
    """Odd volumes as MinkowskiEngine's; else the last axis runs fastest. An even extent k covers 1 - k/2 .. k/2."""
    ranges = [range(-((k - 1) // 2), k // 2 + 1) for k in kernel]
    if math.prod(kernel) % 2:
        return [cell[::-1] for cell in itertools.product(*ranges[::-1])]
    return list(itertools.product(*ranges))


def by_loops(x: SparseConvTensor, weight: torch.Tensor, offsets, stride: int, outputs) -> torch.Tensor:
    """out[y] = sum over offsets of in[y * stride + offset] @ W[offset]."""
    rows = {tuple(row): place for place, row in enumerate(x.indices.tolist())}
    total = torch.zeros(len(outputs), weight.shape[-1], dtype=x.features.dtype)
    for target, (entry, *site) in enumerate(outputs.tolist()):
        for cell, offset in zip(weight, offsets, strict=True):
            source = rows.get((entry, *(y * stride + o for y, o in zip(site, offset, strict=True))))
            if source is not None:
                total[target] += x.features[source] @ cell
    return total


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("layout", "offsets"), [("minkowski", minkowski_offsets), ("torchsparse", torchsparse_offsets)]
)
@pytest.mark.parametrize("stride", [1, 2])
def test_imported_weights_convolve_as_their_library(kernel, layout, offsets, stride):
    sites = random_sites((7, 6, 5)[: len(kernel)], 1, 20)
    x = SparseConvTensor(torch.randn(20, 3, dtype=torch.float64), sites.indices, sites.spatial_shape, 1)
    weight = torch.randn(math.prod(kernel), 3, 2, dtype=torch.float64)
    anchor = kernel_anchor(layout, kernel)
    how = {"subm": True, "anchor": anchor} if stride == 1 else {"stride": 2, "padding": anchor}
    layer = SparseConvolution(len(kernel), 3, 2, kernel, bias=False, **how)
    ours = import_weight(weight, layout, kernel)
    layer.weight = torch.nn.Parameter(export_weight(ours, layer.weight_layout))
    assert torch.equal(layer.dense_weight, ours)
    y = layer(x)
    torch.testing.assert_close(y.features, by_loops(x, weight, offsets(kernel), stride, y.indices))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("layout", ["spconv", "spconv_rsck", "spconv_rskc", "minkowski", "torchsparse"])
def test_there_and_back(kernel, layout):
    weight = torch.randn(4, *kernel, 5)
    there = export_weight(weight, layout)
    assert there.is_contiguous()
    assert torch.equal(import_weight(there, layout, kernel), weight)
    if layout in ("minkowski", "torchsparse"):
        assert there.shape == ((5, 4) if math.prod(kernel) == 1 else (math.prod(kernel), 5, 4))


def test_old_spconv_layouts():
    weight = torch.randn(4, 3, 2, 5)
    assert torch.equal(import_weight(weight.permute(1, 2, 3, 0), "spconv_rsck", (3, 2)), weight)
    assert torch.equal(import_weight(weight.permute(1, 2, 0, 3), "spconv_rskc", (3, 2)), weight)


def test_one_cell_weights_of_spconv_are_read_the_other_way():
    weight = torch.randn(3, 1, 1, 5)
    ours = import_weight(weight, "spconv_pointwise", (1, 1))
    assert ours.shape == weight.shape
    assert torch.equal(ours.flatten(1).T, weight.reshape(5, 3))
    assert torch.equal(export_weight(ours, "spconv_pointwise"), weight)
    with pytest.raises(InsumShapeError, match="a kernel of one cell"):
        import_weight(torch.randn(3, 1, 2, 5), "spconv_pointwise", (1, 2))


def test_anchor_of_even_kernels_differs():
    assert kernel_anchor("spconv", (2, 4, 3)) == (1, 2, 1)
    assert kernel_anchor("minkowski", (2, 4, 3)) == (0, 0, 1)
    assert kernel_anchor("torchsparse", (2, 4, 3)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("weight", "layout", "error", "text"),
    [
        (torch.ones(27, 2), "minkowski", InsumShapeError, r"expected \(27, I, O\)"),
        (torch.ones(8, 2, 2), "torchsparse", InsumShapeError, r"cannot have shape \(8, 2, 2\)"),
        (torch.ones(2, 3, 3, 2), "spconv", InsumShapeError, r"expected \(O, 3, 3, 3, I\)"),
        (torch.ones(2, 3, 3, 3, 2), "spconv_rsck", InsumShapeError, r"expected \(3, 3, 3, I, O\)"),
        (torch.ones(2, 3, 3, 3, 2), "other", InsumFormatError, "the weight layout is 'other'"),
    ],
)
def test_wrong_weights(weight, layout, error, text):
    with pytest.raises(error, match=text):
        import_weight(weight, layout, (3, 3, 3))


def test_states_with_missing_or_strange_keys():
    target = {"c.weight": torch.zeros(2, 3, 4), "c.bias": torch.zeros(2), "n.weight": torch.zeros(2)}
    good = {"c.kernel": torch.ones(3, 4, 2), "c.bias": torch.ones(1, 2), "n.bn.weight": torch.ones(2)}
    assert {k: v.shape for k, v in convert_state_dict(good, "minkowski", target).items()} == {
        k: v.shape for k, v in target.items()
    }
    with pytest.raises(InsumNameError, match=r"without a place: \['d.kernel'\](.|\n)*without a value: \['c.weight'\]"):
        convert_state_dict(
            {**{k: v for k, v in good.items() if k != "c.kernel"}, "d.kernel": torch.ones(1)}, "minkowski", target
        )
    one = {"c.kernel": torch.ones(4, 2)}
    with pytest.raises(InsumFormatError, match=r"order depends on its layer's stride(.|\n)*target=model"):
        convert_state_dict(one, "minkowski", {"c.weight": torch.zeros(2, 1, 4)})
    with pytest.raises(InsumShapeError, match="'c.kernel' does not fit 'c.weight'"):
        convert_state_dict({**good, "c.kernel": torch.ones(3, 5, 2)}, "minkowski", target)


@pytest.mark.parametrize("layout", ["minkowski", "torchsparse", "spconv_rsck", "spconv_rskc"])
def test_a_models_state_is_converted_by_what_its_layers_are(layout):
    """One cell: of a submanifold layer, of a strided one, with groups; and three cells."""
    how = {"a": {"kernel_size": 1, "subm": True}, "b": {"kernel_size": 1, "stride": 2}, "c": {"kernel_size": (3, 1)}}
    model = torch.nn.ModuleDict({name: SparseConvolution(2, 4, 6, bias=False, **given) for name, given in how.items()})
    want = {name: torch.randn(layer.weight.shape) for name, layer in model.items()}
    state = {f"{name}.kernel": export_weight(value, layout) for name, value in want.items()}
    model.load_state_dict(convert_state_dict(state, layout, model))
    for name, layer in model.items():
        assert torch.equal(layer.dense_weight, want[name]), name
