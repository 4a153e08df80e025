"""Fit a NequIP potential to energies, forces and stresses, then run molecular dynamics with it in ase.

    python examples/train_forces.py --size tiny               generated copper and gold; half a minute on a CPU
    python examples/train_forces.py                           the same, more of it
    python examples/train_forces.py --root 3BPA_train_300K.xyz --train 440 --test 60 --batch-size 10 --cutoff 5

--root takes any extended XYZ file. Model: Batzner et al., E(3)-equivariant graph neural networks (2022).
"""

import argparse
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import units
from ase.md.verlet import VelocityVerlet
from torch.utils.data import DataLoader

from insum_nn.datasets import atom_statistics, collate_atoms, copper_gold, read_extended_xyz
from insum_nn.models import NequIP, PotentialCalculator

FULL = {"train": 100, "test": 40, "batch_size": 5, "epochs": 40, "layers": 3, "features": 16, "lmax": 2, "cutoff": 4.0}
TINY = {"train": 32, "test": 16, "batch_size": 4, "epochs": 30, "layers": 2, "features": 8, "lmax": 1, "cutoff": 4.0}


def errors(model, batch):
    """Differences of forces (eV/A), energies (eV per atom) and, where known, stresses (eV/A^3)."""
    batch = batch.to(model.species_index.device, torch.float32)
    volumes = batch.volumes.nan_to_num(1.0)  # molecules have none, and their stress is not used
    energy, forces, stress = model.energy_forces_stress(*batch.model_inputs, volumes=volumes)
    stress = stress[:0] if batch.stresses is None else stress - batch.stresses
    return forces - batch.forces, (energy - batch.energies) / batch.batch.bincount(), stress


def train(model, loader, optimizer, scale):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        force, energy, stress = (error / scale for error in errors(model, batch))
        loss = force.square().mean() + 4 * energy.square().mean() + 10 * stress.square().sum() / len(energy)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()


def test(model, loader):
    """Mean absolute errors: forces in meV/A, energies in meV per atom, stresses in meV/A^3."""
    model.eval()
    found = zip(*(errors(model, batch) for batch in loader), strict=True)
    return [1000 * torch.cat([error.flatten() for error in kind]).abs().mean().item() for kind in found]


def main(argv=None, *, size="full"):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/train_forces"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--root", type=Path, help="extended XYZ file; default: generated copper and gold")
    parser.add_argument("--forces-key", default="forces", help="the file's name of the forces")
    for name, value in FULL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"{value}; tiny {TINY[name]}")
    args = parser.parse_args(argv)
    vars(args).update({k: v for k, v in (TINY if args.size == "tiny" else FULL).items() if getattr(args, k) is None})
    (checkpoint := args.out / "nequip.pt").parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    count = args.train + args.test
    frames = read_extended_xyz(args.root, forces_key=args.forces_key) if args.root else copper_gold(count)
    np.random.default_rng(0).shuffle(frames)
    frames, test_frames = frames[: args.train], frames[args.train : count]
    known = atom_statistics(frames, args.cutoff)
    collate = partial(collate_atoms, cutoff=args.cutoff, atom_energies=known.atom_energies)
    loader = DataLoader(frames, args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_frames, args.batch_size, collate_fn=collate)
    sizes = {"num_layers": args.layers, "num_features": args.features, "lmax": args.lmax, "cutoff": args.cutoff}
    model = NequIP(**known.model_options, **sizes).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, 2e-4)
    parts, history = {"model": model, "optimizer": optimizer, "schedule": schedule}, [test(model, test_loader)]
    if args.resume:
        state = torch.load(checkpoint)
        history = state["history"]
        torch.set_rng_state(state["random"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(len(history), args.epochs + 1):
        train(model, loader, optimizer, known.force_rms)
        schedule.step()
        history.append(test(model, test_loader))
        errors = "forces {:.0f}, energies {:.1f}, stresses {:.1f}".format(*history[-1])
        print(f"epoch {epoch} of {args.epochs}: {errors}", flush=True)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"history": history, "random": torch.get_rng_state()}, checkpoint)
    print("mean absolute errors: {:.1f} meV/A, {:.2f} meV per atom, {:.2f} meV/A^3".format(*history[-1]))
    # Molecular dynamics at constant energy from 300 K, in steps of 1 fs.
    atoms, energies = test_frames[0].to_ase(), []
    atoms.calc = PotentialCalculator(model, atom_energies=known.atom_energies)
    spread = np.sqrt(units.kB * 300 * atoms.get_masses())[:, None]
    atoms.set_momenta(spread * np.random.default_rng(0).normal(size=(len(atoms), 3)))
    dynamics = VelocityVerlet(atoms, timestep=1.0 * units.fs)
    dynamics.attach(lambda: energies.append(1000 * atoms.get_total_energy() / len(atoms)))
    dynamics.run(200)
    drift = 1000 * np.polyfit(range(len(energies)), energies, 1)[0]
    print(f"200 fs: the energy drifts by {drift:.3f} meV per atom and ps, and stays within {np.ptp(energies):.3f} meV")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy(history, label=["forces (meV/Å)", "energies (meV per atom)", "stresses (meV/Å³)"])
    left.set(xlabel="epoch", ylabel="mean absolute error on test cells")
    left.legend(frameon=False)
    right.plot(np.subtract(energies, energies[0]))
    right.set(xlabel="time (fs)", ylabel="total energy (meV per atom)", title="molecular dynamics, NVE")
    figure.savefig(args.out / "train_forces.png", dpi=90)
    inputs = next(iter(test_loader)).to(args.device, torch.float32).model_inputs
    before, after = (f"{errors[0]:.0f} meV/Å" for errors in (history[0], history[-1]))
    return model, inputs, before, after, f"NVE energy to {np.ptp(energies):.3f} meV"


if __name__ == "__main__":
    main()
