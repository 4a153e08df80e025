"""Models of other packages, trained as these packages train them: NequIP's own, and MACE's.

Nothing of a model is ours but the layers that `insum_nn.swap` puts into it. Every provider starts from the same weights
and sees the same crystals. The packages are `nequip` and `mace-torch`; they pin different releases of e3nn, so only one
of them can be installed in an environment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from benchmarks import peers
from benchmarks.networks import Batches
from benchmarks.registry import Setting, Unavailable

__all__ = ["MODELS", "PeerModel", "Step", "peer_model"]

MODELS = ("nequip", "nequip_s", "mace")

CUTOFF = 5.0
NUMBERS = (29, 79)

# A training step on one batch, which returns its loss.
Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class PeerModel:
    """A model, and how its package trains it.

    Attributes:
        models: provider -> what builds the model on the setting's device.
        reference: builds the package's own model in float64.
        trained: makes a training step of a model.
        batches: as the package's data loader makes them.
        exact: the same batches in float64.
    """

    models: Mapping[str, Callable[[], nn.Module]]
    reference: Callable[[], nn.Module]
    trained: Callable[[nn.Module], Step]
    batches: Batches
    exact: Batches


def peer_model(name: str, setting: Setting) -> PeerModel:
    """Build a model of `MODELS`."""
    count = 2 if setting.tiny else 8
    return _mace(setting, count) if name == "mace" else _nequip(setting, count, small=name == "nequip_s")


def _crystals(setting: Setting, number: int, cells: tuple[int, int, int]) -> list[Any]:
    """Two copper-gold crystals, whose atoms are displaced at random; the labels of the forces are made up."""
    ase: Any = importlib.import_module("ase")
    found: list[Any] = []
    for part in range(2):
        generator = torch.Generator().manual_seed(setting.seed * 1000 + 2 * number + part)
        spacing = 3.8
        corners = torch.cartesian_prod(*[torch.arange(count) for count in cells]).double()
        sites = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
        positions = (corners[:, None] + sites).reshape(-1, 3) * spacing
        positions += 0.1 * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
        numbers = torch.full((len(positions),), NUMBERS[0])
        numbers[torch.randperm(len(positions), generator=generator)[: len(positions) // 3]] = NUMBERS[1]
        atoms = ase.Atoms(numbers.numpy(), positions.numpy(), cell=[count * spacing for count in cells], pbc=True)
        atoms.info["REF_energy"] = 0.0
        atoms.arrays["REF_forces"] = positions.sin().numpy()
        found.append(atoms)
    return found


@contextlib.contextmanager
def _as_it_was(dtype: torch.dtype) -> Generator[None]:
    """Build in a dtype, and undo what a package sets for the whole process: the default dtype, e3nn's options."""
    e3nn: Any = importlib.import_module("e3nn")
    before, options = torch.get_default_dtype(), dict(e3nn.get_optimization_defaults())
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)
        e3nn.set_optimization_defaults(**options)


def _compiled_by_all_cores(step: Step) -> Step:
    """Let Inductor compile what the first step needs in parallel; `benchmarks.run` takes that away for all others."""
    cores = [os.cpu_count() or 1]

    def made(batch: Any) -> Tensor:
        with inductor.patch(compile_threads=cores.pop()) if cores else contextlib.nullcontext():
            return step(batch)

    return made


def _swapped(model: nn.Module) -> nn.Module:
    package: Any = importlib.import_module("insum_nn")
    package.swap(model)
    return model


def _unchanged(model: nn.Module) -> nn.Module:
    return model


# NequIP ---------------------------------------------------------------------------------------------------------------


def _nequip(setting: Setting, count: int, *, small: bool) -> PeerModel:
    """Four layers of 64 features of both parities up to degree 2, on 864 atoms; or what NequIP calls its preset S.

    In two frames: its compiled mode runs a batch of one frame eagerly.
    """
    sizes: dict[str, Any] = {"num_layers": 4, "l_max": 2, "num_features": 64}
    sizes |= {"radial_mlp_depth": 2, "radial_mlp_width": 64}
    if small:
        sizes = {"num_layers": 2, "l_max": 1, "num_features": [128, 64], "parity": False}
        sizes |= {"type_embed_num_features": 32, "radial_mlp_depth": 1, "radial_mlp_width": 128}
    if setting.tiny:
        sizes |= {"num_layers": 2, "l_max": 1, "num_features": 4, "radial_mlp_width": 8}
    cutoff, cells = (3.0, (1, 1, 2)) if setting.tiny else (CUTOFF, (6, 6, 3))

    def build(dtype: torch.dtype, mode: str = "eager") -> nn.Module:
        library: Any = importlib.import_module("nequip.model")
        state: Any = importlib.import_module("nequip.utils.global_state")
        with _as_it_was(torch.float64):
            state.set_global_state()
            return library.NequIPGNNModel(
                seed=setting.seed,
                model_dtype=str(dtype).removeprefix("torch."),
                compile_mode=mode,
                type_names=["Cu", "Au"],
                r_max=cutoff,
                avg_num_neighbors=40.0,
                per_type_energy_scales=1.0,
                per_type_energy_shifts=0.0,
                **sizes,
            )

    def model(change: Callable[[nn.Module], nn.Module], mode: str = "eager") -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            if mode != "eager":
                if setting.device.type != "cuda" and not setting.tiny:
                    raise Unavailable("compiled models are timed on a GPU: the C++ takes minutes to compile")
                torch.compiler.reset()
            own = build(torch.float32, mode)
            own.load_state_dict(build(torch.float64).state_dict())
            with _as_it_was(torch.float32):
                return change(own.to(setting.device)).to(setting.device)

        return made

    def openequivariance(own: nn.Module) -> nn.Module:
        peers.oeq(setting.device)
        module: Any = importlib.import_module("nequip.nn._tp_scatter_base")
        return module.TensorProductScatter.enable_OpenEquivariance(own)

    def batch(number: int) -> Any:
        data: Any = importlib.import_module("nequip.data")
        of_ase: Any = importlib.import_module("nequip.data.ase")
        transforms: Any = importlib.import_module("nequip.data.transforms")
        steps = transforms.ChemicalSpeciesToAtomTypeMapper(["Cu", "Au"]), transforms.NeighborListTransform(cutoff)
        frames: list[Any] = []
        with _as_it_was(torch.float64):
            for atoms in _crystals(setting, number, cells):
                frame = of_ase.from_ase(atoms)
                for step in steps:
                    frame = step(frame)
                frames.append(frame)
            made = data.AtomicDataDict.batched_from_list(frames)
        return data.AtomicDataDict.to_(made, setting.device)

    def trained(own: nn.Module) -> Step:
        own.train()
        cuda = setting.device.type == "cuda"
        optimizer = torch.optim.Adam(own.parameters(), lr=0.0, fused=cuda, capturable=cuda)

        def step(data: dict[str, Tensor]) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            out = own(data.copy())
            energy = out["total_energy"] / len(data["pos"])
            loss = (out["forces"] - data["pos"].sin()).square().mean() + energy.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return _compiled_by_all_cores(step)

    batches = Batches(batch, count)
    return PeerModel(
        models={
            "insum_nn": model(_swapped),
            "insum_nn/compiled": model(_swapped, "compile"),
            "oeq": model(openequivariance),
            "oeq/compiled": model(openequivariance, "compile"),
            "e3nn": model(_unchanged),
            "e3nn/compiled": model(_unchanged, "compile"),
        },
        reference=lambda: build(torch.float64).to(setting.device),
        trained=trained,
        # Its positions are in float64 for a model of either dtype.
        batches=batches,
        exact=batches,
    )


# MACE -----------------------------------------------------------------------------------------------------------------


def _mace(setting: Setting, count: int) -> PeerModel:
    """128 channels, two interactions of correlation 3, harmonics up to degree 3; its own step on 216 atoms."""
    channels, degree, cutoff, cells = (4, 1, 3.0, (1, 1, 2)) if setting.tiny else (128, 3, CUTOFF, (3, 3, 3))

    def build(dtype: torch.dtype, **options: Any) -> nn.Module:
        modules: Any = importlib.import_module("mace.modules")
        o3: Any = importlib.import_module("e3nn.o3")
        interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
        with _as_it_was(dtype):
            torch.manual_seed(setting.seed)
            return modules.ScaleShiftMACE(
                r_max=cutoff,
                num_bessel=8,
                num_polynomial_cutoff=5,
                max_ell=degree,
                interaction_cls=interaction,
                interaction_cls_first=interaction,
                num_interactions=2,
                num_elements=2,
                hidden_irreps=o3.Irreps(f"{channels}x0e + {channels}x1o"),
                MLP_irreps=o3.Irreps("16x0e"),
                atomic_energies=torch.zeros(2, dtype=torch.float64).numpy(),
                avg_num_neighbors=40.0,
                atomic_numbers=list(NUMBERS),
                correlation=3,
                gate=nn.functional.silu,
                atomic_inter_scale=1.0,
                atomic_inter_shift=0.0,
                **options,
            )

    def model(change: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            own = build(torch.float32)
            own.load_state_dict(build(torch.float64).state_dict())
            with _as_it_was(torch.float32):
                return change(own.to(setting.device))

        return made

    def openequivariance(own: nn.Module) -> nn.Module:
        peers.oeq(setting.device)
        convert: Any = importlib.import_module("mace.cli.convert_e3nn_oeq")
        return convert.run(own, device=str(setting.device))

    def batch(dtype: torch.dtype) -> Callable[[int], Any]:
        def made(number: int) -> Any:
            data: Any = importlib.import_module("mace.data")
            tools: Any = importlib.import_module("mace.tools")
            graphs: Any = importlib.import_module("mace.tools.torch_geometric")
            table = tools.AtomicNumberTable(list(NUMBERS))
            keys = data.KeySpecification({"energy": "REF_energy"}, {"forces": "REF_forces"})
            with _as_it_was(dtype):
                found = [
                    data.AtomicData.from_config(data.config_from_atoms(atoms, keys), table, cutoff)
                    for atoms in _crystals(setting, number, cells)
                ]
                return graphs.Batch.from_data_list(found).to(setting.device)

        return made

    def trained(own: nn.Module) -> Step:
        modules: Any = importlib.import_module("mace.modules")
        train: Any = importlib.import_module("mace.tools.train")
        loss_of = modules.WeightedEnergyForcesLoss(energy_weight=1.0, forces_weight=100.0)
        own.train()
        optimizer = torch.optim.Adam(own.parameters(), lr=0.0, amsgrad=True)
        wanted = {"forces": True, "virials": False, "stress": False}

        def step(data: Any) -> Tensor:
            loss, _ = train.take_step(
                model=own,
                loss_fn=loss_of,
                batch=data,
                optimizer=optimizer,
                ema=None,
                output_args=wanted,
                max_grad_norm=10.0,
                device=setting.device,
            )
            return loss.detach()

        return step

    return PeerModel(
        models={"insum_nn": model(_swapped), "oeq": model(openequivariance), "e3nn": model(_unchanged)},
        reference=lambda: build(torch.float64).to(setting.device),
        trained=trained,
        batches=Batches(batch(torch.float32), count),
        exact=Batches(batch(torch.float64), count),
    )
