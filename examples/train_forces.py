"""Learn energies and forces of atoms with an equivariant potential, and check what equivariance promises.

    python examples/train_forces.py --size tiny                       copper and gold, computed on the spot by ase
    python examples/train_forces.py --root DIR --train 440 --val 60 --batch 10 --cutoff 5 --epochs 100
    python examples/train_forces.py --root FILE.xyz --energy-key E    any extended XYZ file

The second line is the full setting: 3BPA, of which DIR holds 3BPA_train_300K.xyz. Every round of messages is one
statement, gather and scatter included; the loss on forces differentiates it twice. Nothing is downloaded.
Source: Batzner et al., E(3)-equivariant graph neural networks for data-efficient and accurate interatomic potentials
(2022); 3BPA: Kovacs et al., Linear atomic cluster expansion force fields (2021).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The examples are scripts side by side, no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _peers
import _training

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


TINY = replace(Settings(), layers=2, features=8, lmax=1, train=32, val=16, batch=4, epochs=30)

# What `checks` may leave in float64; the forces' differences carry the error of the step too.
EXACT = 1e-6


@dataclass
class Curve:
    """Errors, before training and after each epoch.

    Attributes:
        train_loss: mean over the batches of an epoch, none before training.
        loss: on configurations not trained on.
        energy: their mean absolute error, in meV an atom.
        force: likewise of force components, in meV an angstrom.
    """

    train_loss: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
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


def predict(model: NequIP, batch: AtomBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predicted and true energies an atom, and predicted and true forces."""
    energies, forces = model.energy_and_forces(*batch.model_inputs)
    true_energies, true_forces = targets(batch)
    atoms = batch.batch.bincount(minlength=batch.num_graphs)
    return energies / atoms, true_energies / atoms, forces, true_forces


def loss_of(predicted: tuple[Tensor, Tensor, Tensor, Tensor], data: Data, settings: Settings) -> Tensor:
    """Squared errors of forces and of energies an atom, both in units of the forces' spread."""
    energy, true_energy, force, true_force = (part / data.force_scale for part in predicted)
    return (force - true_force).square().mean() + settings.energy_weight * (energy - true_energy).square().mean()


def judge(curve: Curve, model: NequIP, given: Sequence[AtomBatch], data: Data, settings: Settings) -> None:
    """Add loss and mean absolute errors on configurations that are not trained on."""
    model.eval()
    parts = [predict(model, batch) for batch in given]
    energy, true_energy, force, true_force = (torch.cat(part) for part in zip(*parts, strict=True))
    curve.loss.append(loss_of((energy, true_energy, force, true_force), data, settings).item())
    curve.energy.append(1000 * (energy - true_energy).abs().mean().item())
    curve.force.append(1000 * (force - true_force).abs().mean().item())


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
    generator = torch.Generator().manual_seed(settings.seed)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "generator": generator}
    val = [b.to(device, torch.float32) for b in batches(data.val, data, settings)]
    curve = Curve()
    state = _training.resumed(checkpoint, settings, resume=resume)
    if state is None:
        judge(curve, model, val, data, settings)
    else:
        _training.restore(state["current"], device, **parts)
        curve = Curve(**state["curve"])
    for epoch in range(len(curve.train_loss), settings.epochs):
        order = torch.randperm(len(data.train), generator=generator).tolist()
        losses: list[Tensor] = []
        model.train()
        for number, batch in enumerate(batches([data.train[i] for i in order], data, settings)):
            loss = loss_of(predict(model, batch.to(device, torch.float32)), data, settings)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            losses.append(loss.detach())
            if on_batch is not None:
                on_batch(epoch, number + 1, curve)
        schedule.step()
        curve.train_loss.append(torch.stack(losses).mean().item())
        judge(curve, model, val, data, settings)
        if checkpoint is not None:
            current = _training.snapshot(device, **parts)
            _training.save_checkpoint(checkpoint, settings, current=current, curve=asdict(curve))
    return model, curve


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


# Showing it.


def plot(model: NequIP, curve: Curve, given: Sequence[AtomBatch], title: str, path: Path) -> Path:
    """Draw the errors by epoch, and predictions against true values of configurations that were not trained on."""
    parts = [predict(model, batch) for batch in given]
    energy, true_energy, force, true_force = (torch.cat(part).cpu().flatten() for part in zip(*parts, strict=True))
    figure = _training.new_figure(13, 4.4)
    left, middle, right = figure.subplots(1, 3)
    epochs = range(len(curve.force))
    left.semilogy(epochs, curve.force, color=_training.BLUE, label="force components, meV/Å")
    left.semilogy(epochs, curve.energy, color=_training.RED, label="energies, meV per atom")
    left.set_xlabel("epoch")
    left.set_ylabel("mean absolute error, not trained on")
    left.legend(frameon=False)
    left.set_title("learning curve", fontsize=10)
    shown = (
        (middle, 1000 * true_energy, 1000 * energy, "energy above lone atoms", "meV per atom", _training.RED),
        (right, true_force, force, "force component", "eV/Å", _training.BLUE),
    )
    for axes, true, guess, name, unit, color in shown:
        low, high = float(torch.minimum(true, guess).min()), float(torch.maximum(true, guess).max())
        axes.plot([low, high], [low, high], color="#adb5bd", linewidth=1, label="exact")
        axes.scatter(true, guess, s=8, alpha=0.5, color=color, linewidth=0, label="predicted")
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xlabel(f"true {name} ({unit})")
        axes.set_ylabel(f"predicted {name} ({unit})")
        axes.locator_params(nbins=6)
        axes.legend(frameon=False)
    middle.set_title(f"mean absolute error {curve.energy[-1]:.1f} meV per atom", fontsize=10)
    right.set_title(f"mean absolute error {curve.force[-1]:.1f} meV/Å", fontsize=10)
    _training.grid(left, middle, right)
    figure.suptitle(f"{title}: {len(true_energy)} configurations that were not trained on")
    return _training.save_figure(figure, path)


def run(
    settings: Settings,
    device: torch.device,
    out: Path,
    *,
    root: Path | None = None,
    keys: tuple[str, str] = ("energy", "forces"),
    resume: bool = False,
) -> _training.Outcome:
    """Train with a progress bar, check equivariance and forces, compare the layers with e3nn's, draw.

    Args:
        settings: what to train.
        device: where.
        out: folder of picture and checkpoint.
        root: an extended XYZ file, or the folder of 3BPA; `None`: copper and gold.
        keys: the file's names of energies and forces.
        resume: continue from the checkpoint in `out`.

    Returns:
        What came out; the score is the mean absolute error of the forces in meV an angstrom.

    Raises:
        SystemExit: a check of equivariance failed.
    """
    data = load(root, settings, *keys)
    title = "copper and gold" if root is None else "3BPA" if root.is_dir() else root.stem
    print(f"{title}: {len(data.train)} configurations to learn from, {len(data.val)} to be judged by; {device}")
    print(f"forces spread by {1000 * data.force_scale:.0f} meV/Å, an atom sees {data.neighbors:.1f} neighbours")
    steps = -(-len(data.train) // settings.batch)
    with _training.progress(title, settings.epochs * steps) as bar:

        def show(epoch: int, number: int, curve: Curve) -> None:
            text = f"epoch {epoch + 1}, {curve.energy[-1]:.1f} meV per atom, {curve.force[-1]:.0f} meV/Å"
            bar(epoch * steps + number, text)

        model, curve = train(data, settings, device, checkpoint=out / "potential.pt", resume=resume, on_batch=show)
    layer: Any = model.layers[-1]
    print("a round's statements:\n  " + layer.convolution.expression.replace("\n", "\n  "))
    print(f"mean absolute errors: {curve.energy[-1]:.2f} meV per atom, {curve.force[-1]:.1f} meV/Å")
    for what, value in checks(model, data.val[0], settings).items():
        print(f"relative difference of {what}: {value:.1e}")
        if not value <= EXACT:
            raise SystemExit(f"{what} should agree to {EXACT:.0e}, and differ by {value:.1e}")
    val = [b.to(device, torch.float32) for b in batches(data.val, data, settings)]
    with torch.no_grad():
        found = _peers.compare(model.eval(), _peers.e3nn_peers(), lambda: model(*val[0].model_inputs))
    return _training.Outcome(
        model=f"NequIP, {title}\n{settings.layers} rounds, lmax {settings.lmax}",
        layers=found.layers,
        peer=_peers.version("e3nn"),
        difference=found.difference,
        largest=found.largest,
        loss_before=curve.loss[0],
        loss_after=curve.loss[-1],
        accuracy=f"forces to {curve.force[-1]:.0f} meV/Å\nof {1000 * data.force_scale:.0f}",
        score=curve.force[-1],
        pictures=(plot(model, curve, val, title, out / "train_forces.png"),),
    )


def main(argv: Sequence[str] | None = None, *, size: str = "full") -> float:
    """Train, check, draw.

    Args:
        argv: command line arguments; none by default.
        size: "tiny" or "full", unless `argv` says.

    Returns:
        The mean absolute error of the forces, in meV an angstrom, of configurations that were not trained on.
    """
    parser = _training.argument_parser(__doc__, "train_forces", size)
    parser.add_argument("--root", type=Path, help=f"folder that holds {FILE_NAME}, or an extended XYZ file")
    parser.add_argument("--energy-key", default="energy")
    parser.add_argument("--forces-key", default="forces")
    _training.add_settings(
        parser,
        Settings(),
        TINY,
        train="configurations to learn from",
        val="configurations to be judged by",
        batch="configurations of a step",
        epochs="",
        cutoff="in angstrom",
        layers="rounds of messages",
        features="copies of each irrep",
        lmax="highest degree",
        learning_rate="",
        seed="",
    )
    options = parser.parse_args(argv or [])
    settings = _training.chosen_settings(options, Settings(), TINY)
    device, keys = _training.choose_device(options.device), (options.energy_key, options.forces_key)
    outcome = run(settings, device, options.out, root=options.root, keys=keys, resume=options.resume)
    outcome.report()
    return outcome.score


if __name__ == "__main__":
    main(sys.argv[1:])
