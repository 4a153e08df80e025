"""`swap`: equal outputs, shared weights, an honest report, and nothing changed in a dry run."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumNameError
from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear
from insum_nn.layers.pruned.pruned_conv import PrunedConv2d
from insum_nn.layers.swap import swap
from insum_nn.layers.swap_converters import CONVERTERS, NotConvertible, register_converter
from insum_nn.layers.voxel import conv as kinds
from insum_nn.layers.voxel import pool as pools
from insum_nn.layers.voxel import sequential as modules
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"fc1": nn.Linear(64, 96), "fc2": nn.Linear(96, 64, bias=False)})
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3)).repeat(1, 8)
        return self.head(self.encoder["fc2"](self.encoder["fc1"](x).relu()))


def state_ids(model: nn.Module) -> dict[str, int]:
    return {name: id(value) for name, value in model.named_parameters()}


# Compile options.


def test_new_layers_get_the_options():
    options = Options(deterministic=True)
    model, _ = sparse_model()
    o3 = pytest.importorskip("e3nn.o3")
    geometric = pytest.importorskip("torch_geometric.nn")
    product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1o", "4x0e + 2x1o")
    whole = nn.ModuleDict({"sparse": model, "graph": geometric.GCNConv(6, 4), "product": product, "mlp": MLP()})
    pruning = {"mlp.head": {"density": 0.5, "options": Options(backend="eager")}, "mlp.stem": 0.5}
    whole.sparse.stem.fp32_accum = False
    swap(whole, block_sparse=pruning, options=options)
    for layer in (whole.graph, whole.product, whole.sparse.pool, whole.mlp.stem):
        assert layer.options == options
    assert whole.product.spec.options == options
    assert '"deterministic":true' in whole.product._text
    assert whole.sparse.stem.options == replace(options, accumulate="storage")
    assert whole.mlp.head.options == Options(backend="eager")
    x, y = torch.randn(5, 10), torch.randn(5, 3)
    torch.testing.assert_close(whole.product(x, y), product(x, y))


def test_options_are_no_dict():
    what = r"options= must be insum_nn\.Options, got dict"
    with pytest.raises(InsumDtypeError, match=what):
        swap(MLP(), options={"deterministic": True})  # type: ignore[arg-type]
    for make in (
        lambda options: BlockSparseLinear.from_linear(nn.Linear(64, 64), density=0.5, options=options),
        lambda options: PrunedConv2d.from_conv2d(nn.Conv2d(3, 8, 3), density=0.5, options=options),
        lambda options: kinds.SubMConv3d(4, 4, 3, options=options),
        lambda options: pools.SparseMaxPool3d(2, options=options),
    ):
        with pytest.raises(InsumDtypeError, match=what):
            make({"deterministic": True})


@pytest.mark.parametrize("given", [["head"], "head", {0: 0.5}, 0.5, True])
def test_what_to_prune_is_a_mapping_from_names(given: object):
    with pytest.raises(InsumDtypeError, match=r"must map names of layers .*\n  fix: write block_sparse={"):
        swap(MLP(), block_sparse=given)  # type: ignore[arg-type]


def test_a_class_is_no_model():
    with pytest.raises(InsumDtypeError, match=r"'model' must be a module, got <class .*\n  fix: pass an object"):
        swap(nn.Linear)  # type: ignore[arg-type]


# Dense layers, by name.


def test_nothing_dense_is_touched_unasked():
    model = MLP()
    report = swap(model)
    assert report.swapped == ()
    assert [row.name for row in report.left] == ["encoder.fc1", "encoder.fc2", "stem", "head"]
    assert {row.detail for row in report.left} == {"dense; name it in block_sparse= to prune it"}
    assert not any(isinstance(m, BlockSparseLinear) for m in model.modules())
    assert report.model is model


def test_pruning_by_name():
    model = MLP().double().eval()
    before = copy.deepcopy(model)
    mask = torch.rand(8, 3, 3, 3) < 0.5
    report = swap(model, block_sparse={"encoder.fc?": {"density": 0.5, "block_shape": (16, 32)}, "stem": mask})
    assert str(report) == (
        "layer        class            action      detail\n"
        "encoder.fc1  torch.nn.Linear  swapped     BlockSparseLinear, 6 of 12 blocks\n"
        "encoder.fc2  torch.nn.Linear  swapped     BlockSparseLinear, 6 of 12 blocks\n"
        f"stem         torch.nn.Conv2d  swapped     PrunedConv2d, {int(mask.sum())} of 216 weights\n"
        "head         torch.nn.Linear  left alone  dense; name it in block_sparse= to prune it\n"
        "3 swapped, 1 left alone"
    )
    assert isinstance(model.encoder["fc1"], BlockSparseLinear)
    assert isinstance(model.stem, PrunedConv2d)
    assert not model.encoder["fc1"].training
    with torch.no_grad():
        before.stem.weight.mul_(mask)
        for name in ("fc1", "fc2"):
            kept = model.encoder[name].mask.repeat_interleave(16, 0).repeat_interleave(32, 1)
            before.encoder[name].weight.mul_(kept)
    x = torch.randn(5, 3, 7, 6, dtype=torch.float64)
    assert torch.allclose(model(x), before(x), rtol=1e-12)


def test_keeping_everything_keeps_the_outputs():
    model = MLP().double()
    x = torch.randn(5, 3, 7, 6, dtype=torch.float64)
    want = model(x)
    report = swap(model, block_sparse={"*": 1.0})
    assert len(report.swapped) == 4
    assert torch.allclose(model(x), want, rtol=1e-12)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    again = swap(model)
    assert again.rows == ()


def test_dry_run_changes_nothing():
    model = MLP()
    ids, modules = state_ids(model), [id(m) for m in model.modules()]
    generator = torch.get_rng_state()
    report = swap(model, dry_run=True, block_sparse={"head": 0.5})
    assert state_ids(model) == ids
    assert [id(m) for m in model.modules()] == modules
    assert torch.equal(torch.get_rng_state(), generator)
    assert "would swap" in str(report)
    assert "1 would be swapped, 3 left alone" in str(report)
    rows = [(row.name, row.action, row.detail) for row in report.rows]
    assert rows == [(row.name, row.action, row.detail) for row in swap(model, block_sparse={"head": 0.5}).rows]


def test_the_caller_s_random_numbers_stay():
    model = MLP()
    generator = torch.get_rng_state()
    swap(model, block_sparse={"*": 0.5})
    assert torch.equal(torch.get_rng_state(), generator)


def test_include_and_exclude():
    model = MLP()
    report = swap(model, include="encoder.*", exclude=["*2"], block_sparse={"*": 0.5})
    assert {row.name: row.detail for row in report.left} == {
        "encoder.fc2": "excluded by '*2'",
        "stem": "not included",
        "head": "not included",
    }
    assert [row.name for row in report.swapped] == ["encoder.fc1"]


def test_patterns_that_fit_nothing():
    model = MLP()
    with pytest.raises(InsumNameError) as caught:
        swap(model, block_sparse={"decoder.*": 0.5})
    assert str(caught.value) == (
        "swap: the pattern 'decoder.*' fits no Linear or convolution layer\n"
        "  layers: 'encoder.fc1', 'encoder.fc2', 'stem', 'head'\n"
        "  fix: write the layer's path in the model; '*' stands for any characters."
    )
    with pytest.raises(InsumNameError, match="'out_proj' is of a subclass, NonDynamicallyQuantizableLinear"):
        swap(nn.MultiheadAttention(8, 2), block_sparse={"out_*": 0.5})
    with pytest.raises(InsumNameError, match="the pattern 'hed' fits no layer"):
        swap(model, exclude="hed")
    swap(model, block_sparse={"head": 0.5})
    with pytest.raises(InsumNameError, match=r"'head' is a BlockSparseLinear already; its prune\(\) keeps less"):
        swap(model, block_sparse={"head": 0.2})


def test_a_fault_leaves_the_model_whole():
    model = MLP()
    modules = [id(m) for m in model.modules()]
    with pytest.raises(InsumFormatError) as caught:
        swap(model, block_sparse={"encoder.*": 0.5, "head": 7.0})
    assert "block_sparse cannot be applied to 'head', Linear: density must lie in (0, 1], got 7.0" in str(caught.value)
    with pytest.raises(
        InsumFormatError, match=r"(?s)'head', Linear: unknown key 'densty'.*write 'density'\."
    ) as caught:
        swap(model, block_sparse={"head": {"densty": 0.5}})
    assert "accepted keys: mask, density, block_shape, group_size, options" in str(caught.value)
    with pytest.raises(InsumFormatError, match=r"accepted keys: mask, density, pattern"):
        swap(nn.Sequential(nn.Conv2d(4, 4, 3)), block_sparse={"0": {"xyz": 3}})
    assert [id(m) for m in model.modules()] == modules


def test_a_module_at_two_names_stays_one():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = swap(model, block_sparse={"0": 1.0})
    assert model[0] is model[2]
    assert isinstance(model[0], BlockSparseLinear)
    assert len(report.swapped) == 1


def test_layers_that_cannot_be_replaced_are_left_with_a_reason():
    class Odd(nn.Linear):
        pass

    tied = nn.Linear(8, 8)
    model = nn.ModuleDict(
        {
            "hooked": nn.Linear(8, 8),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "tied": tied,
            "embedding": nn.Embedding(8, 8),
            "transformer": nn.TransformerEncoderLayer(8, 2, 8),
            "odd": Odd(8, 8),
            "pruned": torch.nn.utils.prune.random_unstructured(Odd(8, 8), "weight", 0.5),
            "detached": nn.Linear(8, 8),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model["old"] = nn.utils.weight_norm(nn.Linear(8, 8))
    model["embedding"].weight = tied.weight
    handle = model["hooked"].register_forward_hook(lambda *_: None)
    values = model["detached"].weight.detach()
    del model["detached"].weight
    model["detached"].weight = values
    report = swap(model, block_sparse={"*": 0.5})
    reasons = {row.name: row.detail for row in report.rows}
    assert reasons == {
        "hooked": "it has hooks; .remove() of the handle that registering one returned takes it away",
        "normed": "it is parametrized; torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') ends that",
        "pruned": "a subclass of Linear, whose behaviour may differ",
        "detached": "its weight is not a parameter",
        "old": "it is normalised; torch.nn.utils.remove_weight_norm(layer) makes that permanent",
        "tied": "its weight is shared: tied.weight, embedding.weight",
        "embedding": "no counterpart",
        "odd": "a subclass of Linear, whose behaviour may differ",
        "transformer.self_attn": "no counterpart",
        "transformer.linear1": "TransformerEncoderLayer reads its weight itself",
        "transformer.linear2": "TransformerEncoderLayer reads its weight itself",
        "transformer.norm1": "no counterpart",
        "transformer.norm2": "no counterpart",
    }
    assert report.swapped == ()
    # The calls that the rows name.
    handle.remove()
    torch.nn.utils.parametrize.remove_parametrizations(model["normed"], "weight")
    torch.nn.utils.remove_weight_norm(model["old"])
    swapped = [row.name for row in swap(model, block_sparse={"*": 0.5}).swapped]
    assert swapped == ["hooked", "normed", "old"]


def test_masks_of_torch_s_pruning_are_taken_over():
    kinds = {"line": nn.Conv1d(3, 4, 2), "image": nn.Conv2d(3, 4, 2), "volume": nn.Conv3d(3, 4, 2)}
    kinds |= {"single": nn.Linear(8, 6), "blocks": nn.Linear(8, 6), "left": nn.Linear(8, 6), "hooked": nn.Linear(8, 6)}
    model = nn.ModuleDict({**kinds, "dense": nn.Conv3d(3, 4, 2)}).double()
    for layer in kinds.values():
        torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    torch.nn.utils.prune.ln_structured(model["blocks"], "weight", 0.5, n=2, dim=0)
    model["hooked"].register_forward_hook(lambda *_: None)
    before = dict(model.items())
    named: dict[str, dict[str, object]] = {name: {} for name in ("line", "image", "volume", "hooked")}
    report = swap(model, block_sparse={**named, "single": {"block_shape": 1}, "blocks": {"block_shape": (1, 8)}})
    assert {row.name: row.detail for row in report.rows} == {
        "line": "PrunedConv1d, 12 of 24 weights",
        "image": "PrunedConv2d, 24 of 48 weights",
        "volume": "PrunedConv3d, 48 of 96 weights",
        "single": "SparseLinear, 24 of 48 weights",
        "blocks": "BlockSparseLinear, 3 of 6 blocks",
        "left": "masked; name it in block_sparse= to prune it",
        "hooked": "it has hooks; .remove() of the handle that registering one returned takes it away",
        "dense": "dense; name it in block_sparse= to prune it",
    }
    for name, extents in {"line": (5,), "image": (5, 4), "volume": (5, 4, 3), "single": (), "blocks": ()}.items():
        x = torch.randn(2, *((3, *extents) if extents else (8,)), dtype=torch.float64)
        torch.testing.assert_close(model[name](x), before[name](x), msg=name)


class Contraction(nn.Module):
    """As MACE's: its weights stand in a list, and parts of it are generated."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(2), torch.ones(2)])
        self.generated = nn.ModuleList([torch.fx.symbolic_trace(nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        return sum(weight * self.generated[0](x) for weight in self.weights)


class Contractions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.contractions = nn.ModuleList([Contraction(), Contraction()])

    def forward(self, x: Tensor) -> Tensor:
        return sum(contraction(x) for contraction in self.contractions)


class Attention(nn.Module):
    """Nothing of it is in its children, and it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout())
        self.attention = Attention()
        self.several = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.mlp(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.symmetric = Contractions()
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(self.symmetric(x)) * self.scale


def test_what_holds_parameters_or_computes_has_a_row():
    model = Net()
    report = swap(model, block_sparse={"blocks.0.mlp.0": 1.0})
    assert [(row.name, row.action) for row in report.rows] == [
        ("", "left"),  # For its parameter.
        ("blocks.0.mlp.0", "swapped"),
        ("blocks.0.attention", "left"),
        ("blocks.0.several", "left"),
        ("blocks.1", "left"),
        ("blocks.1.mlp.0", "left"),
        ("blocks.1.attention", "left"),
        ("blocks.1.several", "left"),
        ("symmetric", "left"),
        ("symmetric.contractions.0", "left"),
        ("symmetric.contractions.1", "left"),
    ]
    # What was swapped before is no news, and what holds it is no candidate.
    assert [row.name for row in swap(model).rows if row.name.startswith("blocks.0")] == [
        "blocks.0.attention",
        "blocks.0.several",
    ]
    assert [row.name for row in swap(Net(), include="symm*").rows] == [
        "symmetric",
        "symmetric.contractions.0",
        "symmetric.contractions.1",
    ]


def test_the_model_itself():
    layer = nn.Linear(8, 8)
    report = swap(layer, block_sparse={"*": 0.5})
    assert isinstance(report.model, BlockSparseLinear)
    assert "(model)  torch.nn.Linear  swapped" in str(report)


def test_a_converter_of_one_s_own():
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Fast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    path = f"{Doubling.__module__}.{Doubling.__qualname__}"
    try:
        register_converter(path, lambda module: Fast())
        model = nn.Sequential(Doubling())
        assert [row.detail for row in swap(model).swapped] == ["Fast"]

        def refuse(module: nn.Module) -> nn.Module:
            raise NotConvertible("it is too slow already")

        def fail(module: nn.Module) -> nn.Module:
            return module.of_another_version  # type: ignore[return-value]

        register_converter(path, fail)
        (row,) = swap(nn.Sequential(Doubling())).left
        assert row.detail.startswith("it could not be converted: AttributeError: 'Doubling' object has no attribute")

        register_converter(path, refuse)
        assert [row.detail for row in swap(nn.Sequential(Doubling())).left] == ["it is too slow already"]
    finally:
        del CONVERTERS[path]


# torch_geometric.


@pytest.mark.peer
def test_graph_models():
    geometric = pytest.importorskip("torch_geometric.nn")
    ours = pytest.importorskip("insum_nn.layers.graph.gcn_conv")
    model = geometric.GCN(6, 16, num_layers=3, out_channels=4, norm="batch_norm").double().eval()
    reference = copy.deepcopy(model)
    ids = state_ids(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = swap(model)
    assert [row.name for row in report.swapped] == ["convs.0", "convs.1", "convs.2"]
    assert all(row.layer == "torch_geometric.nn.GCNConv" for row in report.swapped)
    assert all(type(conv) is ours.GCNConv for conv in model.convs)
    assert state_ids(model) == ids, "an optimizer built before the swap stays valid"
    assert list(model.state_dict()) == list(reference.state_dict())
    x = torch.randn(9, 6, dtype=torch.float64)
    edges = torch.randint(9, (2, 30))
    weight = torch.rand(30, dtype=torch.float64)
    want = reference(x, edges, weight)
    assert torch.allclose(model(x, edges, weight), want, rtol=1e-10)
    for net in (model, reference):
        net(x, edges, weight).square().sum().backward()
    for ours_p, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours_p.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    optimizer.step()


@pytest.mark.peer
@pytest.mark.parametrize(
    "arguments",
    [
        {"improved": True, "bias": False},
        {"normalize": False, "aggr": "mean"},
        {"flow": "target_to_source", "add_self_loops": False},
        {"cached": True},
        {"node_dim": 0},
        {"decomposed_layers": 2},
    ],
    ids=str,
)
def test_graph_convolutions(arguments: dict[str, Any]):
    geometric = pytest.importorskip("torch_geometric.nn")
    pytest.importorskip("insum_nn.layers.graph.gcn_conv")
    model = nn.ModuleList([geometric.GCNConv(6, 4, **arguments).double()])
    reference = copy.deepcopy(model)
    assert len(swap(model).swapped) == 1
    x, edges = torch.randn(9, 6, dtype=torch.float64), torch.randint(9, (2, 30))
    assert torch.allclose(model[0](x, edges), reference[0](x, edges), rtol=1e-10, atol=1e-12)
    assert list(model.state_dict()) == list(reference.state_dict())


@pytest.mark.peer
def test_lazy_graph_convolutions_and_subclasses():
    geometric = pytest.importorskip("torch_geometric.nn")
    pytest.importorskip("insum_nn.layers.graph.gcn_conv")

    class Own(geometric.GCNConv):
        pass

    model = nn.ModuleDict({"lazy": geometric.GCNConv(-1, 4), "own": Own(3, 4), "arma": geometric.ARMAConv(3, 4)})
    report = swap(model)
    assert [row.name for row in report.swapped] == ["lazy"]
    assert {row.name: row.detail for row in report.left} == {
        "own": "a subclass of GCNConv, whose behaviour may differ",
        "arma": "no counterpart",
    }
    assert model["lazy"](torch.randn(5, 7), torch.randint(5, (2, 9))).shape == (5, 4)


# e3nn.


@pytest.mark.peer
def test_equivariant_models():
    o3 = pytest.importorskip("e3nn.o3")
    e3nn_nn = pytest.importorskip("e3nn.nn")
    ours = pytest.importorskip("insum_nn.layers.equivariant.tensor_product")
    model = nn.ModuleDict(
        {
            "mix": o3.FullyConnectedTensorProduct("4x0e + 2x1o", "0e + 1o", "3x0e + 2x1o"),
            "uvu": o3.TensorProduct("4x1o", "0e + 1o", "4x1o + 4x0e", [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)]),
            "linear": o3.Linear("4x0e + 2x1o", "2x0e + 3x1o"),
            "gate": e3nn_nn.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o"),
            "harmonics": o3.SphericalHarmonics([0, 1, 2], True),
            "norm": o3.Norm("2x1o"),
            "batch": e3nn_nn.BatchNorm("4x0e"),
            "radial": e3nn_nn.FullyConnectedNet([2, 4, 3], torch.tanh),
            "single": e3nn_nn.FullyConnectedNet([2, 3], torch.tanh),
        }
    ).double()
    reference = copy.deepcopy(model)
    ids = state_ids(model)
    report = swap(model)
    assert [(row.name, row.layer, row.detail) for row in report.swapped] == [
        ("mix", "e3nn.o3.FullyConnectedTensorProduct", "FullyConnectedTensorProduct"),
        ("uvu", "e3nn.o3.TensorProduct", "TensorProduct"),
        ("linear", "e3nn.o3.Linear", "Linear"),
        ("gate", "e3nn.nn.Gate", "Gate"),
        ("harmonics", "e3nn.o3.SphericalHarmonics", "SphericalHarmonics"),
        ("norm.tp", "e3nn.o3.TensorProduct", "TensorProduct"),
        ("radial", "e3nn.nn.FullyConnectedNet", "FullyConnectedNet"),
    ]
    assert [(row.name, row.layer, row.detail) for row in report.left] == [
        ("batch", "e3nn.nn.BatchNorm", "no counterpart"),
        ("single", "e3nn.nn.FullyConnectedNet", "it has no activations that statements have"),
    ]
    assert type(model["mix"]) is ours.FullyConnectedTensorProduct
    assert state_ids(model) == ids
    hooked = copy.deepcopy(reference)
    hooked["uvu"].register_forward_hook(lambda *_: None)
    torch.nn.utils.parametrize.register_parametrization(hooked["mix"], "weight", nn.Identity())
    reasons = {row.name: row.detail.partition(";")[0] for row in swap(hooked).rows}
    assert reasons["mix"] == "it is parametrized"
    assert reasons["uvu"] == "it has hooks"
    for name in ("mix", "uvu"):
        x = torch.randn(5, reference[name].irreps_in1.dim, dtype=torch.float64)
        y = torch.randn(5, reference[name].irreps_in2.dim, dtype=torch.float64)
        assert torch.allclose(model[name](x, y), reference[name](x, y), rtol=1e-10, atol=1e-12)
    for name, columns in (("linear", 10), ("gate", 12), ("harmonics", 3), ("norm", 6), ("radial", 2)):
        x = torch.randn(5, columns, dtype=torch.float64)
        assert torch.allclose(model[name](x), reference[name](x), rtol=1e-10, atol=1e-12)


@pytest.mark.peer
def test_the_report_names_what_gains_from_a_convolution():
    o3 = pytest.importorskip("e3nn.o3")
    paths = [(0, 0, 0, "uvu", True)]
    model = nn.ModuleDict(
        {
            "edges": o3.TensorProduct("4x0e", "1o", "4x1o", paths, shared_weights=False),
            "shared": o3.TensorProduct("4x0e", "1o", "4x1o", paths),
            "square": o3.TensorSquare("4x0e"),
        }
    )
    details = {row.name: row.detail for row in swap(model).rows}
    assert details == {
        "edges": "TensorProduct; between a gather and a scatter, write TensorProductConv(product) for all three",
        "shared": "TensorProduct",
        "square": "TensorSquare",
    }


# spconv, whose class names and attributes stand-ins carry where it is not installed.


def stand_in(source: Any, name: str, path: str) -> Any:
    """A class that `swap` takes for spconv's: its path and name, and layers with the attributes of spconv's."""
    return type(name, (getattr(source, name),), {"__module__": path, "__qualname__": name})


def sparse_model() -> tuple[nn.Module, Any]:
    conv = lambda name: stand_in(kinds, name, "spconv.pytorch.conv")  # noqa: E731
    small = lambda name: stand_in(modules, name, "spconv.pytorch.modules")  # noqa: E731
    pool = stand_in(pools, "SparseMaxPool2d", "spconv.pytorch.pool")
    to_dense = stand_in(modules, "ToDense", "spconv.pytorch")
    sequential = small("SparseSequential")
    model = sequential(
        OrderedDict(
            stem=conv("SubMConv2d")(3, 8, 3, indice_key="a", bias=False),
            norm=nn.BatchNorm1d(8),
            act=small("SparseReLU")(),
            inner=sequential(conv("SparseConv2d")(8, 8, 2, 2, indice_key="down"), nn.ReLU()),
            up=conv("SparseInverseConv2d")(8, 4, 2, indice_key="down"),
            pool=pool(2, 2),
            dense=to_dense(),
        )
    )
    return model, sequential


def sparse_input() -> SparseConvTensor:
    indices = torch.cat([torch.zeros(12, 1, dtype=torch.int64), torch.randperm(48)[:12, None]], 1)
    indices = torch.stack([indices[:, 0], indices[:, 1] // 8, indices[:, 1] % 8], 1).int()
    return SparseConvTensor(torch.randn(12, 3, dtype=torch.float64), indices, [6, 8], 1)


def test_sparse_convolutions_and_their_containers():
    model, sequential = sparse_model()
    model = model.double().eval()
    x = sparse_input()
    want, ids = model(x), state_ids(model)
    keys = list(model.state_dict())
    holder = nn.ModuleList([model])
    dry = swap(holder, dry_run=True)
    assert type(holder[0]) is sequential
    assert type(holder[0].stem).__module__ == "spconv.pytorch.conv"
    assert type(holder[0].inner[0]).__module__ == "spconv.pytorch.conv"
    report = swap(holder)
    assert [(row.name, row.detail) for row in report.swapped] == [
        ("0", "SparseSequential"),
        ("0.stem", "SubMConv2d"),
        ("0.act", "SparseReLU"),
        ("0.inner", "SparseSequential"),
        ("0.inner.0", "SparseConv2d"),
        ("0.up", "SparseInverseConv2d"),
        ("0.pool", "SparseMaxPool2d"),
        ("0.dense", "ToDense"),
    ]
    assert [row.name for row in report.left] == ["0.norm"]
    assert [row.name for row in dry.rows] == [row.name for row in report.rows]
    ours = holder[0]
    assert not any(type(m).__module__.startswith("spconv") for m in ours.modules())
    assert state_ids(ours) == ids
    assert list(ours.state_dict()) == keys
    assert torch.equal(ours(x), want)
    assert not ours.training
    assert not ours.stem.training


def test_the_model_itself_may_be_a_container():
    model, _ = sparse_model()
    report = swap(model)
    assert type(report.model) is modules.SparseSequential


def test_weights_in_another_order_are_left_alone():
    kind = stand_in(kinds, "SubMConv2d", "spconv.pytorch.conv")
    layer = kind(3, 8, 3)
    layer.weight = nn.Parameter(layer.weight.detach().permute(1, 2, 3, 0).contiguous())
    (row,) = swap(nn.Sequential(layer)).rows
    assert row.detail == "its weight is (3, 3, 3, 8), not (out, kernel.., in) = (8, 3, 3, 3)"


@pytest.mark.peer
def test_spconv_itself():
    spconv = pytest.importorskip("spconv.pytorch")
    model = spconv.SparseSequential(spconv.SubMConv3d(3, 8, 3, indice_key="a"), nn.ReLU(), spconv.SparseMaxPool3d(2, 2))
    report = swap(model)
    assert len(report.swapped) == 3
    assert type(report.model) is modules.SparseSequential
