"""What torch records of a layer on the CPU: its own operations and nothing of ours, forward and backward."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.export import Dim, ExportedProgram, export
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import cpp_extension
from torch.utils._sympy.numbers import int_oo

import insum_nn
from insum_nn.compiler.runtime import statement_choice
from insum_nn.layers import (
    BlockSparseLinear,
    GCNConv,
    SparseConv3d,
    SparseConvTensor,
    SparseInverseConv3d,
    SparseSequential,
    SubMConv3d,
    TensorProductConv,
)
from insum_nn.models import minkunet
from tests.layers.layer_case import foreign
from tests.packages import run_all_alone


def test_options_that_promise_more_stay_one_operator():
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layer = GCNConv(4, 3, options=insum_nn.Options(deterministic=True))
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    x, edges = torch.randn(5, 4), torch.tensor([[0, 1, 4], [1, 2, 2]])
    torch.testing.assert_close(compiled(x, edges), layer(x, edges))
    assert foreign(graphs[0]) == {"insum_nn.run.default"}


def test_a_compiled_graph_convolution_refuses_edges_that_point_outside():
    layer = torch.compile(GCNConv(4, 3), backend="aot_eager", fullgraph=True)
    with pytest.raises((RuntimeError, IndexError), match="out of|outside"):
        layer(torch.randn(5, 4), torch.tensor([[0, 5], [1, 1]]))


# Packages of AOTInductor, which run without this package.


class Graph(nn.Module):
    """Two graph convolutions around a block-sparse linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(7, 48), GCNConv(64, 3)
        self.sparse = BlockSparseLinear(48, 64, block_shape=16, density=0.4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.sparse(self.first(x, edges).relu()).relu(), edges)


class Potential(nn.Module):
    """An energy of pairs of atoms by a convolution of tensor products, and its forces."""

    def __init__(self) -> None:
        super().__init__()
        paths = [(a, b, c, "uvu", True) for a, b, c in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0))]
        self.conv = TensorProductConv("4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o", paths, shared_weights=False)
        self.weights = nn.Linear(1, self.conv.weight_numel)

    def forward(self, positions: Tensor, features: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        given = positions.requires_grad_()
        way = given[edges[1]] - given[edges[0]]
        length = way.norm(dim=1, keepdim=True) + 0.1
        shape = torch.cat([torch.ones_like(length), way / length], 1)
        out = self.conv(features, shape, self.weights((-length).exp()), edges[1], edges[0])
        energy = out.square().sum()
        return energy, -torch.autograd.grad(energy, given, create_graph=True)[0]


class Scene(nn.Module):
    """Scores of voxels by a network that builds its maps, by default one layer of each kind of a MinkUNet's."""

    SHAPE = (20, 17, 9)

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or SparseSequential(
            SubMConv3d(4, 4, 5, bias=False),
            *(SparseConv3d(4, 6, 2, 2, indice_key="down"), nn.BatchNorm1d(6), nn.ReLU()),
            SparseInverseConv3d(6, 4, 2, "down"),
            SubMConv3d(4, 5, 1),
        )

    def forward(self, features: Tensor, voxels: Tensor) -> Tensor:
        return self.net(SparseConvTensor(features, voxels, self.SHAPE, 2)).features


def _recorded(module: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    """A module with a gradient inside, as torch's operations: `torch.export` follows no gradient."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(*inputs: Tensor) -> Any:
        return functional_call(module, state, inputs)

    return make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)


NODES, EDGES = Dim("nodes", min=2, max=1 << 20), Dim("edges", min=2, max=1 << 24)


def _graph(nodes: int, edges: int) -> tuple[Tensor, ...]:
    return torch.randn(nodes, 7), torch.randint(nodes, (2, edges))


def _atoms(atoms: int, edges: int) -> tuple[Tensor, ...]:
    first = torch.randint(atoms, (edges,))
    pairs = torch.stack([first, (first + torch.randint(1, atoms, (edges,))) % atoms])
    return torch.randn(atoms, 3), torch.randn(atoms, 16), pairs


def _cloud(voxels: int, _: int) -> tuple[Tensor, ...]:
    cells = torch.randperm(2 * math.prod(Scene.SHAPE))[:voxels]
    places = torch.stack(torch.unravel_index(cells, (2, *Scene.SHAPE)), 1)
    return torch.randn(voxels, 4), places.int()


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SparseConv3d(4, 4, 2, 2)

    def forward(self, features: Tensor, voxels: Tensor) -> Tensor:
        return self.conv(SparseConvTensor(features, voxels, list(Scene.SHAPE), 2)).features


def test_numbers_of_voxels_without_a_bound_stay_within_int64():
    count = Dim("count")
    program = export(Strided(), _cloud(20, 0), dynamic_shapes=({0: count}, {0: count}))
    uppers = [bounds.upper for bounds in program.range_constraints.values()]
    # AOTInductor writes each finite bound into C++.
    assert len(uppers) >= 3
    assert all(upper == int_oo or upper < 2**63 for upper in uppers)


VOXELS = Dim("voxels", min=2, max=1 << 20)
PACKAGES: dict[str, tuple[Any, Any, Any]] = {
    "graph": (Graph, _graph, ({0: NODES}, {1: EDGES})),
    "scene": (Scene, _cloud, ({0: VOXELS}, {0: VOXELS})),
    "forces": (Potential, _atoms, ({0: NODES}, {0: NODES}, {1: EDGES})),
}


def exported(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """Export a network of `PACKAGES`, which it leaves in evaluation, on inputs of some sizes."""
    dynamic = PACKAGES[name][2]
    if name == "forces":
        recorded = _recorded(module, inputs)
        with torch.no_grad():
            return export(recorded, inputs, dynamic_shapes=dynamic, strict=False)
    return export(module.requires_grad_(False).eval(), inputs, dynamic_shapes=dynamic)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[str], tuple[Any, str]]]:
    """Builds a network of `PACKAGES` and its package, once: compiling C++ takes ten seconds and more."""

    @functools.cache
    def build(name: str) -> tuple[Any, str]:
        make, draw, _ = PACKAGES[name]
        torch.manual_seed(0)
        module = make()
        program = exported(name, module, draw(9, 40))
        assert not foreign(program.graph_module)
        path = tmp_path_factory.mktemp(name) / "model.pt2"
        return module, str(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))

    # Only C++ compiles faster without these; the kernels are compiled as for anyone. By torch's own `patch`: to set and
    # restore an option in another way hides it from all that compiles later.
    how = {"compile_wrapper_opt_level": "O0", "enable_line_tables": False, "enable_frame_pointer": False}
    with torch._inductor.config.patch({f"aot_inductor.{name}": value for name, value in how.items()}):
        yield build


@pytest.mark.slow
@pytest.mark.compile
# Of torch's own exporter.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_packages_run_where_this_package_cannot_be_imported(packaged: Callable[[str], tuple[Any, str]], tmp_path: Path):
    models = []
    # That of graph convolutions runs in a program without Python, below.
    for name in ("scene", "forces"):
        module, package = packaged(name)
        models.append((module, [PACKAGES[name][1](*sizes) for sizes in ((9, 40), (23, 11))], package))
    assert run_all_alone(models, tmp_path) == "equal"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_package_runs_in_a_program_without_python(packaged: Callable[[str], tuple[Any, str]], tmp_path: Path):
    module, package = packaged("graph")
    folders = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    libraries = cpp_extension.library_paths()[0]
    source, program = Path(__file__).with_name("run_package.cpp"), str(tmp_path / "run")
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", "-std=c++20", "-O0", *folders, str(source), "-o", program, *linked], check=True)
    printed = subprocess.run([program, package], capture_output=True, text=True, check=True).stdout
    out = module(torch.arange(77.0).reshape(11, 7).sin(), torch.arange(40).remainder(11).reshape(2, 20))
    assert float(printed) == pytest.approx(float(out.square().sum()), rel=1e-5)


def test_the_sizes_of_traced_maps_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    """How large a map is that a program makes decides nothing while it is traced, on a GPU too."""
    monkeypatch.setattr(statement_choice, "by_table", lambda *_: True)
    # The three other resolutions repeat this.
    monkeypatch.setattr(minkunet, "_LEVELS", 1)
    net = minkunet.MinkUNet(4, 5, layers=(1, 1), planes=(4, 4), init_dim=4)
    exported("scene", Scene(net), _cloud(9, 40))
