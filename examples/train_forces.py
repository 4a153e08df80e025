"""Learn energies and forces of atoms with an equivariant potential, and check what equivariance promises.

    python examples/train_forces.py                                   copper and gold, computed on the spot by ase
    python examples/train_forces.py --root DIR                        3BPA: DIR holds 3BPA_train_300K.xyz
    python examples/train_forces.py --root FILE.xyz --energy-key E    any extended XYZ file

Every round of messages is one statement, gather and scatter included; the loss on forces differentiates it twice.
Source: Batzner et al., E(3)-equivariant graph neural networks for data-efficient and accurate interatomic potentials
(2022); 3BPA: Kovacs et al., Linear atomic cluster expansion force fields (2021).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum_nn.datasets.extended_xyz import AtomBatch, Configuration, collate, read_extended_xyz
from insum_nn.models.nequip import NequIP

FILE_NAME = "3BPA_train_300K.xyz"


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    cutoff: float = 4.0
    layers: int = 3
    features: int = 16
    lmax: int = 2
    train: int = 100
    val: int = 40
    batch: int = 5
    epochs: int = 40
    learning_rate: float = 0.01
    energy_weight: float = 4.0
    seed: int = 0


@dataclass
class Curve:
    """Mean absolute errors after each epoch: energies in meV an atom, forces in meV an angstrom."""

    train_loss: list[float] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)
    force: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """Configurations to learn from and to be judged by, and the scales of the problem."""

    train: list[Configuration]
    val: list[Configuration]
    species: list[int]
    atom_energies: dict[int, float]
    force_scale: float
    neighbors: float


# Data.


def synthetic(count: int, seed: int) -> list[Configuration]:
    """Shaken cells of copper and gold with the energies and forces of ase's effective medium theory."""
    from ase.build import bulk
    from ase.calculators.emt import EMT

    generator = np.random.default_rng(seed)
    found: list[Configuration] = []
    for number in range(count):
        atoms: Any = bulk("Cu", cubic=True, a=float(generator.uniform(3.65, 3.95)))
        gold = generator.permutation(4)[: number % 4]
        atoms.numbers[gold] = 79
        atoms.positions += generator.normal(0.0, 0.12, atoms.positions.shape)
        atoms.calc = EMT()
        atoms.get_forces()
        found.append(Configuration.from_ase(atoms))
    return found


def load(root: Path | None, settings: Settings, energy_key: str, forces_key: str) -> Data:
    """Draw the two sets, and fit the energy of a lone atom of each species by least squares."""
    wanted = settings.train + settings.val
    if root is None:
        configurations = synthetic(wanted, settings.seed)
    else:
        path = root if root.is_file() else root / FILE_NAME
        if not path.exists():
            raise SystemExit(f"{root} is no extended XYZ file, and holds no {FILE_NAME}")
        configurations = read_extended_xyz(path, energy_key=energy_key, forces_key=forces_key)
    usable = [c for c in configurations if c.energy is not None and c.forces is not None]
    if len(usable) < wanted:
        raise SystemExit(f"{wanted} configurations with energies and forces are wanted, there are {len(usable)}")
    order = np.random.default_rng(settings.seed).permutation(len(usable))[:wanted]
    chosen = [usable[i] for i in order]
    train, val = chosen[: settings.train], chosen[settings.train :]
    species = sorted({int(s) for c in chosen for s in c.species})
    counts = torch.tensor([[int((c.species == s).sum()) for s in species] for c in train], dtype=torch.float64)
    energies = torch.tensor([[c.energy] for c in train], dtype=torch.float64)
    fitted = torch.linalg.lstsq(counts, energies, driver="gelsd").solution.squeeze(1)
    forces = torch.cat([c.forces for c in train if c.forces is not None])
    edges = sum(c.edges(settings.cutoff)[0].numel() for c in train)
    atoms = sum(c.species.numel() for c in train)
    return Data(
        train,
        val,
        species,
        dict(zip(species, fitted.tolist(), strict=True)),
        float(forces.square().mean().sqrt()),
        edges / atoms,
    )


def targets(batch: AtomBatch) -> tuple[Tensor, Tensor]:
    """Energies and forces that a batch is known to have."""
    if batch.energies is None or batch.forces is None:
        raise ValueError("the configurations lack energies or forces")
    return batch.energies, batch.forces


def batches(configurations: Sequence[Configuration], data: Data, settings: Settings) -> list[AtomBatch]:
    """Put together batches in the given order; energies become what the lone atoms leave over, a small number."""
    found: list[AtomBatch] = []
    for start in range(0, len(configurations), settings.batch):
        batch = collate(configurations[start : start + settings.batch], settings.cutoff)
        lone = torch.tensor([data.atom_energies[int(s)] for s in batch.species], dtype=torch.float64)
        rest = targets(batch)[0].index_add(0, batch.batch, -lone)
        found.append(replace(batch, energies=rest))
    return found


# Training.


def make_model(data: Data, settings: Settings) -> NequIP:
    torch.manual_seed(settings.seed)
    return NequIP(
        data.species,
        cutoff=settings.cutoff,
        num_layers=settings.layers,
        num_features=settings.features,
        lmax=settings.lmax,
        average_neighbors=data.neighbors,
        energy_scale=data.force_scale,
    )


def predict(model: NequIP, given: Sequence[AtomBatch]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Predicted and true energies an atom, and predicted and true forces, batch by batch."""
    model.eval()
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for batch in given:
        energies, forces = model.energy_and_forces(*batch.model_inputs)
        true_energies, true_forces = targets(batch)
        atoms = batch.batch.bincount(minlength=batch.num_graphs)
        found.append((energies / atoms, true_energies / atoms, forces, true_forces))
    return found


def errors(model: NequIP, given: Sequence[AtomBatch]) -> tuple[float, float]:
    """Mean absolute errors: energies in meV an atom, forces in meV an angstrom."""
    parts = predict(model, given)
    energy = torch.cat([(a - b).abs() for a, b, _, _ in parts]).mean()
    force = torch.cat([(a - b).abs().flatten() for _, _, a, b in parts]).mean()
    return 1000 * energy.item(), 1000 * force.item()


def loss_of(model: NequIP, batch: AtomBatch, data: Data, settings: Settings) -> Tensor:
    """Squared errors of forces and of energies an atom, both in units of the forces' spread."""
    energies, forces = model.energy_and_forces(*batch.model_inputs)
    true_energies, true_forces = targets(batch)
    atoms = batch.batch.bincount(minlength=batch.num_graphs)
    force = ((forces - true_forces) / data.force_scale).square().mean()
    energy = ((energies - true_energies) / atoms / data.force_scale).square().mean()
    return force + settings.energy_weight * energy


def train(
    data: Data,
    settings: Settings,
    device: torch.device,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    on_batch: Callable[[int, int, Curve], None] | None = None,
) -> tuple[NequIP, Curve]:
    """Train; the checkpoint is written after each epoch, and a resumed run gives the numbers of an unbroken one."""
    model = make_model(data, settings).to(device)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs, settings.learning_rate / 50)
    curve = Curve()
    generator = torch.Generator().manual_seed(settings.seed)
    if resume and checkpoint is not None and checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["settings"] != asdict(settings):
            raise SystemExit(f"{checkpoint} was written with other settings; leave --resume out")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        generator.set_state(state["generator"].cpu())
        curve = Curve(**state["curve"])
    val = [b.to(device, torch.float32) for b in batches(data.val, data, settings)]
    for epoch in range(len(curve.force), settings.epochs):
        order = torch.randperm(len(data.train), generator=generator).tolist()
        losses: list[float] = []
        model.train()
        for number, batch in enumerate(batches([data.train[i] for i in order], data, settings)):
            loss = loss_of(model, batch.to(device, torch.float32), data, settings)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            losses.append(loss.item())
            if on_batch is not None:
                on_batch(epoch, number + 1, curve)
        schedule.step()
        energy, force = errors(model, val)
        curve.train_loss.append(sum(losses) / len(losses))
        curve.energy.append(energy)
        curve.force.append(force)
        if checkpoint is not None:
            state = {
                "settings": asdict(settings),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "generator": generator.get_state(),
                "curve": asdict(curve),
            }
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)
    return model, curve


def train_with_progress(data: Data, settings: Settings, device: torch.device, **more: Any) -> tuple[NequIP, Curve]:
    """`train` under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    steps = -(-len(data.train) // settings.batch)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("potential", total=settings.epochs * steps)

        def show(epoch: int, number: int, curve: Curve) -> None:
            last = f", {curve.energy[-1]:.1f} meV an atom, {curve.force[-1]:.0f} meV/A" if curve.force else ""
            progress.update(task, completed=epoch * steps + number, description=f"epoch {epoch + 1}{last}")

        return train(data, settings, device, on_batch=show, **more)


# Checks.


def checks(model: NequIP, given: Configuration, settings: Settings) -> dict[str, float]:
    """What equivariance and differentiation promise, in float64; each number should be near 0.

    Energies under a turned and mirrored configuration, forces that turn along, and forces against differences of
    energies, all relative to the size of what is compared.
    """
    from e3nn import o3

    exact = copy.deepcopy(model).to("cpu", torch.float64).eval()
    turn = -o3.rand_matrix(dtype=torch.float64)
    cell = None if given.cell is None else given.cell @ turn.T
    other = Configuration(given.positions @ turn.T + 1.0, given.species, cell, given.periodic)
    batch, moved = (collate([c], settings.cutoff) for c in (given, other))
    energy, forces = exact.energy_and_forces(*batch.model_inputs)
    turned_energy, turned_forces = exact.energy_and_forces(*moved.model_inputs)
    step, worst = 1e-5, 0.0
    with torch.no_grad():
        for atom in range(min(3, len(given.positions))):
            for axis in range(3):
                shifted = batch.positions.repeat(2, 1, 1)
                shifted[0, atom, axis] += step
                shifted[1, atom, axis] -= step
                up, down = (exact(p, *batch.model_inputs[1:]) for p in shifted)
                worst = max(worst, abs(float(-(up - down) / (2 * step)) - float(forces[atom, axis])))
    size = float(forces.abs().max())
    return {
        "energy, turned and mirrored": abs(float(energy - turned_energy)) / max(abs(float(energy)), 1e-12),
        "forces, turned and mirrored": float((forces @ turn.T - turned_forces).abs().max()) / size,
        "forces against energy differences": worst / size,
    }


def difference_to_e3nn(model: NequIP) -> float:
    """Largest difference between a round's convolution and e3nn's product of gathered features, added up by hand."""
    from e3nn import o3

    layer: Any = model.layers[-1]
    conv = layer.convolution
    own = conv.tensor_product
    rows = [(*tuple(i)[:5], i.path_weight**2) for i in own.instructions]
    options = {"irrep_normalization": "none", "path_normalization": "none", "shared_weights": False}
    peer = o3.TensorProduct(own.irreps_in1, own.irreps_in2, own.irreps_out, rows, **options)
    generator = torch.Generator().manual_seed(0)
    shapes = ((20, own._in1_dim), (90, own._in2_dim), (90, own.weight_numel))
    x, y, w = (torch.randn(shape, generator=generator) for shape in shapes)
    receivers, senders = torch.randint(0, 20, (2, 90), generator=generator)
    expected = torch.zeros(20, own.irreps_out.dim).index_add(0, receivers, peer(x[senders], y, w))
    device = next(model.parameters()).device
    got = conv(*(t.to(device) for t in (x, y, w, receivers, senders)))
    return (got.cpu() - expected).abs().max().item()


# Showing it.


def plot(model: NequIP, curve: Curve, given: Sequence[AtomBatch], title: str, path: Path) -> Path:
    """Draw the errors by epoch, and predictions against true values of configurations that were not trained on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = predict(model, given)
    energy, true_energy, force, true_force = (torch.cat([p[n] for p in parts]).cpu().flatten() for n in range(4))
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    epochs = range(1, len(curve.force) + 1)
    left.semilogy(epochs, curve.force, color="#0b6e99", label="forces, meV/Å")
    left.semilogy(epochs, curve.energy, color="#e07a5f", label="energies, meV an atom")
    left.set_xlabel("epoch")
    left.set_ylabel("mean absolute error")
    left.legend(frameon=False)
    shown = (
        (middle, 1000 * true_energy, 1000 * energy, "energy, meV an atom beyond lone atoms", "#e07a5f"),
        (right, true_force, force, "force component, eV/Å", "#0b6e99"),
    )
    for axes, true, guess, name, color in shown:
        low, high = float(torch.minimum(true, guess).min()), float(torch.maximum(true, guess).max())
        axes.plot([low, high], [low, high], color="#adb5bd", linewidth=1)
        axes.scatter(true, guess, s=8, alpha=0.5, color=color, linewidth=0)
        axes.set_xlabel(f"true {name}")
        axes.set_ylabel("predicted")
    for axes in (left, middle, right):
        axes.grid(linewidth=0.4, alpha=0.5)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def parse(argv: Sequence[str], size: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help=f"folder that holds {FILE_NAME}, or an extended XYZ file")
    parser.add_argument("--energy-key", default="energy")
    parser.add_argument("--forces-key", default="forces")
    parser.add_argument("--size", choices=("tiny", "full"), default=size, help="tiny: few configurations, small model")
    for name, kind in (("cutoff", float), ("epochs", int), ("train", int), ("val", int), ("features", int)):
        parser.add_argument(f"--{name}", type=kind, help=f"default {getattr(Settings, name)}, less at size tiny")
    parser.add_argument("--lmax", type=int)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "train_forces", help="of picture and checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, check, draw.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean absolute error of the forces, in meV an angstrom, of configurations that were not trained on.
    """
    options = parse(argv or [], size)
    settings = Settings(seed=options.seed)
    if options.size == "tiny":
        settings = replace(settings, layers=2, features=8, lmax=1, train=24, val=8, batch=4, epochs=25)
    given = {n: getattr(options, n) for n in ("cutoff", "epochs", "train", "val", "features", "lmax")}
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    data = load(options.root, settings, options.energy_key, options.forces_key)
    title = (
        "3BPA"
        if options.root is not None and options.root.is_dir()
        else "copper and gold"
        if options.root is None
        else options.root.stem
    )
    print(f"{title}: {len(data.train)} configurations to learn from, {len(data.val)} to be judged by")
    print(f"forces spread by {1000 * data.force_scale:.0f} meV/A, an atom sees {data.neighbors:.1f} neighbours")
    model, curve = train_with_progress(
        data, settings, device, checkpoint=options.out / "potential.pt", resume=options.resume
    )
    layer: Any = model.layers[-1]
    print("A round's statements:\n  " + layer.convolution.expression.replace("\n", "\n  "))
    print(f"loss {curve.train_loss[0]:.3f} in the first epoch, {curve.train_loss[-1]:.4f} in the last")
    print(f"mean absolute errors: {curve.energy[-1]:.2f} meV an atom, {curve.force[-1]:.1f} meV/A")
    for what, value in checks(model, data.val[0], settings).items():
        print(f"relative difference of {what}: {value:.1e}")
    print(f"largest difference of a layer to e3nn's: {difference_to_e3nn(model):.1e}")
    val = [b.to(device, torch.float32) for b in batches(data.val, data, settings)]
    print(f"picture: {plot(model, curve, val, title, options.out / 'train_forces.png')}")
    return curve.force[-1]


if __name__ == "__main__":
    main(sys.argv[1:])
