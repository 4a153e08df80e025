"""Whole networks as benchmarks: their oracle is right, ours passes it, and a wrong network does not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from benchmarks import gate, networks, peers, registry, run, sparse_reference, unet
from benchmarks.cases import tensor_products
from benchmarks.registry import Setting
from tests.source_tree import ROOT

CPU = torch.device("cpu")
TINY = Setting(CPU, "tiny")
CASES = registry.load()


def some_voxels(shape: tuple[int, int, int] = (6, 8, 4)) -> Tensor:
    """Half of the cells of two grids."""
    generator = torch.Generator().manual_seed(3)
    return (torch.rand((2, *shape), generator=generator) < 0.5).nonzero()


def dense(features: Tensor, indices: Tensor, shape: tuple[int, int, int]) -> Tensor:
    grid = features.new_zeros(2, *shape, features.shape[1])
    grid[tuple(indices.unbind(1))] = features
    return grid.permute(0, 4, 1, 2, 3)


def test_reference_convolutions_equal_dense_ones():
    shape, indices = (6, 8, 4), some_voxels()
    x = torch.randn(len(indices), 3, dtype=torch.float64)
    tensor = sparse_reference.SparseConvTensor(x, indices, shape, 2)
    at = tuple(indices.unbind(1))
    for size in (1, 3, 5):
        conv = sparse_reference.SubMConv3d(3, 5, size).double()
        weight = conv.weight.permute(0, 4, 1, 2, 3)
        wanted = nn.functional.conv3d(dense(x, indices, shape), weight, padding=size // 2)
        torch.testing.assert_close(conv(tensor).features, wanted.permute(0, 2, 3, 4, 1)[at])
    down = sparse_reference.SparseConv3d(3, 5, 2, stride=2, indice_key="down").double()
    coarse = down(tensor)
    wanted = nn.functional.conv3d(dense(x, indices, shape), down.weight.permute(0, 4, 1, 2, 3), stride=2)
    assert coarse.spatial_shape == [3, 4, 2]
    torch.testing.assert_close(coarse.features, wanted.permute(0, 2, 3, 4, 1)[tuple(coarse.indices.unbind(1))])
    up = sparse_reference.SparseInverseConv3d(5, 3, 2, indice_key="down").double()
    back = up(coarse)
    wanted = nn.functional.conv_transpose3d(
        dense(coarse.features, coarse.indices, (3, 4, 2)), up.weight.permute(4, 0, 1, 2, 3), stride=2
    )
    assert torch.equal(back.indices, indices)
    torch.testing.assert_close(back.features, wanted.permute(0, 2, 3, 4, 1)[at])


@pytest.mark.parametrize("name", ["gcn_2k", "gcn_sampled", "spunet_fp16", "spunet_fp32", "minkunet", "nequip_32"])
@pytest.mark.parametrize("what", ["step", "inference"])
def test_ours_passes_the_oracle(name: str, what: str):
    problem = CASES[f"network/network={name}/what={what}"].problem(TINY)
    wanted = gate.reference(problem, ("fwd",))
    for provider in {"insum_nn", "insum_nn/prepared"} & {*problem.providers}:
        found = run.measure(problem, provider, "fwd", wanted, CPU, warmup_ms=0, rep_ms=0)
        assert found.gate == "passed"
        assert found.max_rel_err < problem.tolerance / 2


@pytest.mark.parametrize("name", ["gcn_2k", "spunet_fp32", "nequip_32"])
def test_a_step_with_a_wrong_weight_is_wrong(name: str):
    problem = CASES[f"network/network={name}/what=step"].problem(TINY)
    wanted = gate.reference(problem, ("fwd",))
    work = problem.providers["insum_nn"]()
    assert isinstance(work.forward, networks.Step)
    with torch.no_grad():
        parameter = next(p for p in work.forward.model.parameters() if p.dim() > 1)
        parameter.mul_(1.2)
    assert gate.accuracy(work, wanted, "fwd", recorded=True) > problem.tolerance


def test_steps_take_one_batch_after_the_other():
    found = networks.network("nequip_32", TINY)
    step = networks.train(found, "insum_nn", CPU)
    before = [p.detach().clone() for p in step.model.parameters()]
    losses = [float(step()) for _ in range(4)]
    assert losses[0] != losses[1], "another configuration"
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-4), "and the first ones again"
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in step.model.parameters())


def test_the_unet_has_spunets_shape():
    model = unet.UNet(sparse_reference, 6, 13)
    convolutions = [m for m in model.modules() if isinstance(m, sparse_reference._Convolution)]
    assert len(convolutions) == 1 + 4 + 4 + 2 * 23
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(39.2e6, rel=0.05)


def test_neighbours_of_a_crystal():
    neighbours = pytest.importorskip("ase.neighborlist")
    ase = pytest.importorskip("ase")
    positions, species, receivers, senders, offsets, _ = networks._crystal(TINY, 0, 1, 3.0)
    atoms = ase.Atoms(species.tolist(), positions.double().numpy(), cell=[3.8] * 3, pbc=True)
    i, j, shift = neighbours.neighbor_list("ijS", atoms, 3.0)
    wanted = {(a, b, *s) for a, b, s in zip(i.tolist(), j.tolist(), shift.tolist(), strict=True)}
    cells = (offsets / 3.8).round().long().tolist()
    assert {(a, b, *s) for a, b, s in zip(receivers.tolist(), senders.tolist(), cells, strict=True)} == wanted
    assert bool((receivers.diff() >= 0).all())


@pytest.mark.peer
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("tp_conv", {"shape": "nequip", "dtype": "float64"}),
        ("tp_conv", {"shape": "mace-large", "dtype": "float64"}),
        ("tp_conv_double", {"shape": "nequip", "dtype": "float64"}),
        ("fctp", {"degree": 2, "channels": 16, "weights": "shared", "dtype": "float32"}),
        ("fctp", {"degree": 1, "channels": 16, "weights": "sample", "dtype": "float32"}),
    ],
)
def test_layouts_of_cuequivariance(family: str, parameters: dict[str, str | int], monkeypatch: pytest.MonkeyPatch):
    """Its plain method computes on the CPU what its kernels compute on a GPU."""
    pytest.importorskip("cuequivariance_torch")
    for name in ("cue_convolution", "cue_fully_connected"):
        monkeypatch.setattr(peers, name, functools.partial(getattr(peers, name), method="naive"))
    problem = getattr(tensor_products, family)(TINY, **parameters)
    for mode in problem.modes:
        wanted = gate.reference(problem, (mode,))
        error = gate.accuracy(problem.providers["cue"](), wanted, mode)
        assert error < (1e-12 if parameters["dtype"] == "float64" else 1e-5)


def test_a_slow_method_is_no_baseline():
    """cuEquivariance falls back to a plain method with a warning where its kernels cannot be loaded."""
    product = torch.nn.ModuleDict({"f": torch.nn.Identity()})
    for used, asked in (("naive", "naive"), ("uniform_1d", "uniform_1d"), ("fused_tp", None)):
        product["f"].method = used
        peers._require_kernels(product, asked)
    product["f"].method = "naive"
    for asked in ("uniform_1d", None):
        with pytest.raises(RuntimeError, match="does not run its kernels here"):
            peers._require_kernels(product, asked)


def test_every_locked_baseline_has_a_provider():
    """A release in `peers.lock` belongs to a library that some case runs, or to a part of one."""
    text = (ROOT / "benchmarks" / "peers.lock").read_text(encoding="utf-8")
    locked = {line.partition("==")[0] for line in text.splitlines() if line and line[0] != "#"}
    libraries = {
        "cuequivariance": "cuequivariance",
        "cuequivariance-ops-torch-cu13": "cuequivariance_torch",
        "cuequivariance-torch": "cuequivariance_torch",
        "e3nn": "e3nn",
        "mace-torch": "mace.modules",
        "nequip": "nequip.model",
        "openequivariance": "openequivariance",
        "spconv-cu124": "spconv",
        "spconv-triton": "spconv_triton",
        "torch-geometric": "torch_geometric",
        "warpconvnet": "warpconvnet",
    }
    assert locked == set(libraries)
    folder = ROOT / "benchmarks"
    sources = [folder / name for name in ("peers.py", "peer_models.py", "cases/gcn.py", "cases/subm_conv.py")]
    imported = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert [name for name in libraries.values() if name not in imported] == []
