"""The examples' own promises: a resumed run gives the numbers of an unbroken one, and comparisons see a fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear
from insum_nn.layers.spconv import SparseConv3d, SparseInverseConv3d, SparseSequential, SubMConv3d
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CPU = torch.device("cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports an example by name, as its neighbours do: from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


class Interrupted(Exception):
    """Stands for a run that is killed."""


class StopAfter:
    """A callback that interrupts a run at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


# Resuming.


def train_gcn(example: Callable[[str], Any], checkpoint: Path, *, callback: Any = None, resume: bool = False) -> Any:
    pytest.importorskip("torch_geometric")
    module = example("train_gcn")
    settings = replace(module.TINY, epochs=8, seeds=2)
    graph = module.load_graph("KarateClub")
    return module.train(graph, settings, checkpoint=checkpoint, resume=resume, on_epoch=callback)[1]


def tetris(example: Callable[[str], Any], checkpoint: Path, *, callback: Any = None, resume: bool = False) -> Any:
    pytest.importorskip("e3nn")
    module = example("tetris")
    settings = replace(module.TINY, features=2, lmax=1, layers=2, steps=8)
    return module.train(settings, CPU, checkpoint=checkpoint, resume=resume, on_step=callback)[1]


def train_forces(example: Callable[[str], Any], checkpoint: Path, *, callback: Any = None, resume: bool = False) -> Any:
    pytest.importorskip("e3nn")
    pytest.importorskip("ase")
    module = example("train_forces")
    settings = replace(module.TINY, features=2, train=6, val=2, batch=3, epochs=4)
    data = module.load(None, settings, "energy", "forces")
    return module.train(data, settings, CPU, checkpoint=checkpoint, resume=resume, on_batch=callback)[1]


def train_s3dis(example: Callable[[str], Any], checkpoint: Path, *, callback: Any = None, resume: bool = False) -> Any:
    module = example("train_s3dis")
    settings = replace(module.TINY, voxel_size=0.2, planes=(4,) * 8, init_dim=4, epochs=6, augment=True)
    rooms, _ = replace(module.TINY_SOURCE, points=1000, generated=2).load(settings.voxel_size)
    return module.train(rooms, settings, CPU, checkpoint=checkpoint, resume=resume, on_epoch=callback).curve


def prune_mlp(example: Callable[[str], Any], checkpoint: Path, *, callback: Any = None, resume: bool = False) -> Any:
    pytest.importorskip("sklearn")
    module = example("prune_mlp")
    settings = replace(module.TINY, densities=(0.5,), hidden=32, epochs=2, seeds=2)
    digits = module.load_digits(CPU)
    return module.run_all(digits, settings, checkpoint=checkpoint, resume=resume, on_result=callback)


@pytest.mark.parametrize(
    ("train", "calls"), [(train_gcn, 13), (tetris, 5), (train_forces, 5), (train_s3dis, 4), (prune_mlp, 5)]
)
def test_a_resumed_run_gives_the_numbers_of_an_unbroken_one(example, tmp_path, train, calls):
    unbroken = train(example, tmp_path / "unbroken.pt")
    path = tmp_path / "broken.pt"
    with pytest.raises(Interrupted):
        train(example, path, callback=StopAfter(calls))
    assert path.exists(), "nothing was saved before the run was interrupted"
    torch.manual_seed(999)
    assert train(example, path, resume=True) == unbroken
    # What is finished is not trained again.
    assert train(example, path, resume=True, callback=StopAfter(1)) == unbroken


def test_other_settings_are_not_resumed(example, tmp_path):
    training = example("_training")
    settings = example("train_s3dis").TINY
    path = tmp_path / "checkpoint.pt"
    training.save_checkpoint(path, settings, number=3)
    assert training.resumed(path, settings, resume=False) is None
    assert training.resumed(path, settings, resume=True)["number"] == 3
    other = replace(settings, epochs=7)
    assert training.resumed(path, other, resume=True, free=("epochs",))["number"] == 3
    with pytest.raises(SystemExit, match=r"other settings \(epochs 100\); leave --resume out"):
        training.resumed(path, other, resume=True)


def test_settings_come_from_the_size_and_the_flags(example):
    training, prune = example("_training"), example("prune_mlp")
    parser = training.argument_parser("doc", "prune_mlp", "full")
    training.add_settings(parser, prune.Settings(), prune.TINY, densities="", epochs="", learning_rate="")
    full, tiny = prune.Settings(), prune.TINY
    assert training.chosen_settings(parser.parse_args([]), full, tiny) == full
    given = parser.parse_args(["--size", "tiny", "--densities", "0.5", "0.25", "--lr", "0.1"])
    expected = replace(tiny, densities=(0.5, 0.25), learning_rate=0.1)
    assert training.chosen_settings(given, full, tiny) == expected


# Comparing.


def cloud(channels: int) -> SparseConvTensor:
    sites = (torch.rand(2, 8, 8, 8) < 0.2).nonzero().int()
    return SparseConvTensor(torch.randn(len(sites), channels), sites, [8, 8, 8], 2)


def gcn_case(example: Callable[[str], Any]) -> tuple[nn.Module, Any, Callable[[], object]]:
    module = example("train_gcn")
    graph = module.load_graph("KarateClub")
    model, _ = module.make_model(graph, module.TINY, 0)
    peers = example("_peers")
    kind = type(model.layers[0])
    return model.eval(), {kind: peers.pyg_gcn_conv}, lambda: model(graph.features, graph.edge_index)


def sparse_case(example: Callable[[str], Any]) -> tuple[nn.Module, Any, Callable[[], object]]:
    peers = example("_peers")
    model = SparseSequential(
        SubMConv3d(3, 4, 5),
        SubMConv3d(4, 4, 3, dilation=2, bias=False),
        SparseConv3d(4, 6, 2, 2, indice_key="down"),
        SparseInverseConv3d(6, 5, 2, indice_key="down"),
    )
    kinds = {type(layer): peers.dense_convolution for layer in model.children()}
    x = cloud(3)
    return model, kinds, lambda: model(x)


def equivariant_case(example: Callable[[str], Any]) -> tuple[nn.Module, Any, Callable[[], object]]:
    from insum_nn.models.tetris import TetrisClassifier, tetris_pieces

    positions, batch, labels = tetris_pieces()
    model = TetrisClassifier(num_features=2, lmax=1, num_layers=2)
    return model, example("_peers").e3nn_peers(), lambda: model(positions, batch, len(labels))


def block_case(example: Callable[[str], Any]) -> tuple[nn.Module, Any, Callable[[], object]]:
    model = nn.Sequential(BlockSparseLinear(37, 21, block_shape=(8, 16), density=0.6), nn.ReLU())
    x = torch.randn(3, 5, 37)
    return model, {BlockSparseLinear: example("_peers").dense_linear}, lambda: model(x)


@pytest.mark.parametrize("case", [gcn_case, sparse_case, equivariant_case, block_case])
def test_layers_equal_their_peers_and_a_fault_is_seen(example, case):
    training, peers = example("_training"), example("_peers")
    model, kinds, run = case(example)
    with torch.no_grad():
        found = peers.compare(model, kinds, run)
        assert found.difference <= training.ROUNDING * found.largest
        compared = [m for m in model.modules() if type(m) in kinds]
        assert sum(int(part.split()[0]) for part in found.layers.split(", ")) == len(compared)
        # The same layers with one of them bent.
        layer = compared[-1]
        layer.register_forward_hook(bent)
        # A hook that was there before is called before: the comparison sees what it returns.
        assert peers.compare(model, kinds, run).difference >= 0.01


def bent(_layer: nn.Module, _inputs: object, output: Any) -> Any:
    if isinstance(output, SparseConvTensor):
        return output.replace_feature(output.features + 0.01)
    return output + 0.01


def test_a_comparison_of_nothing_is_refused(example):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="no layer ran"):
        example("_peers").compare(model, {BlockSparseLinear: lambda *_: None}, lambda: model(torch.ones(1, 2)))


def test_cells_of_several_lines_stay_in_their_column(example):
    text = example("_training").table([("a", "number"), ("long\nx", "1")], right=(1,))
    assert text == "a     number\nlong       1\nx"
