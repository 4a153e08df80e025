"""Packages of AOTInductor for a GPU: built, loaded and run by a process that cannot import this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import export
from torch.fx import Interpreter

from tests.layers.test_traced_graphs import PACKAGES, VOXELS, Scene, _cloud, exported
from tests.packages import run_alone

# Of torch's own exporter.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


def build(name: str, device: torch.device, folder: Path) -> tuple[Any, Any, str]:
    """Package a network of `PACKAGES`; return the module, what draws its inputs, and the package's path."""
    make, draw, _ = PACKAGES[name]
    torch.manual_seed(0)
    module = make().to(device)

    def inputs(*sizes: int) -> tuple[Tensor, ...]:
        return tuple(x.to(device) for x in draw(*sizes))

    program = exported(name, module, inputs(9, 40))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / f"{name}.pt2"))
    return module, inputs, str(path)


class _Dense(torch.nn.Module):
    """Nothing of this package."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().cumsum(0) + 1


def _works(device: torch.device, folder: Path) -> str:
    """Package what is torch's alone: where the C++ compiler links its library statically, no package can be loaded."""
    inputs = (torch.randn(9, 4, device=device),)
    path = torch._inductor.aoti_compile_and_package(export(_Dense(), inputs), package_path=str(folder / "dense.pt2"))
    return run_alone(_Dense(), [inputs], str(path), folder)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_runs_where_this_package_cannot_be_imported(name: str, gpu: torch.device, tmp_path: Path):
    module, draw, package = build(name, gpu, tmp_path)
    said = run_alone(module, [draw(9, 40), draw(23, 11)], package, tmp_path)
    if said != "equal" and _works(gpu, tmp_path) != "equal":
        pytest.xfail("packages of torch's own operators do not run here: set CXX to another compiler")
    assert said == "equal"


class _OnZeros(Interpreter):
    """Zeros in place of what a sort gives: a packager tries the kernel that follows on memory of its own."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        return tuple(map(torch.zeros_like, out)) if target is torch.ops.aten.sort.stable else out


def _checked(voxels: Tensor) -> tuple[Any, list[Tensor]]:
    """The part of a network's graph that checks voxels."""
    from insum_nn.structure.cell_numbers import assert_distinct

    class Check(torch.nn.Module):
        def forward(self, voxels: Tensor) -> Tensor:
            assert_distinct(voxels, (2, *Scene.SHAPE))
            return voxels + 1

    program = export(Check(), (voxels,), dynamic_shapes=({0: VOXELS},)).run_decompositions({})
    return program.graph_module, [voxels]


def test_a_check_of_voxels_holds_on_made_up_order():
    graph, inputs = _checked(_cloud(9, 0)[1])
    assert any(node.target is torch.ops.aten.sort.stable for node in graph.graph.nodes)
    _OnZeros(graph).run(*inputs)
    Interpreter(graph).run(*inputs)
    with pytest.raises(RuntimeError, match="the same voxel more than once"):
        Interpreter(graph).run(torch.cat([inputs[0], inputs[0][3:4]]))
