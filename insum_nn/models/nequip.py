"""An equivariant message-passing potential after NequIP: energies, and forces by automatic differentiation."""

from __future__ import annotations

import operator
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from insum_nn.errors import InsumShapeError
from insum_nn.layers.equivariant.adoption import e3nn, o3
from insum_nn.layers.equivariant.gate import Gate
from insum_nn.layers.equivariant.linear import Linear
from insum_nn.layers.equivariant.radial import RadialBasis
from insum_nn.layers.equivariant.spherical_harmonics import SphericalHarmonics
from insum_nn.layers.equivariant.tensor_product import FullyConnectedTensorProduct
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv
from insum_nn.models.edge_gradients import EdgeGradients
from insum_nn.models.radial import HiddenLayers, scale_of

__all__ = ["Interaction", "NequIP", "RadialBasis", "gated", "plain_e3nn"]

Irreps = Any


@contextmanager
def plain_e3nn() -> Generator[None]:
    """Let e3nn build its layers as plain modules, which `torch.compile` can see into, instead of by TorchScript."""
    before = e3nn.get_optimization_defaults()
    # e3nn 0.4 has a switch in place of a mode.
    name, plain = ("jit_mode", "eager") if "jit_mode" in before else ("jit_script_fx", False)
    e3nn.set_optimization_defaults(**{name: plain})
    try:
        yield
    finally:
        e3nn.set_optimization_defaults(**{name: before[name]})


def gated(irreps: Irreps, available: Irreps) -> Gate:
    """A gate whose output is as much of `irreps` as can be made from tensor products of what is `available`.

    Scalars pass through an activation; everything else is multiplied by an activated even scalar of its own.
    """
    kept = [(mul, ir) for mul, ir in o3.Irreps(irreps) if ir in available]
    scalars = o3.Irreps([(mul, ir) for mul, ir in kept if ir.l == 0])
    rest = o3.Irreps([(mul, ir) for mul, ir in kept if ir.l > 0])
    gates = o3.Irreps([(rest.num_irreps, (0, 1))]) if rest.num_irreps else o3.Irreps([])
    silu, tanh = nn.functional.silu, torch.tanh
    return Gate(scalars, [silu if ir.p == 1 else tanh for _, ir in scalars], gates, [silu] * len(gates), rest)


class Interaction(nn.Module):
    """One round of messages: mix channels, convolve along edges, mix again, add what the atom itself says, gate.

    The convolution's statement is `interaction.convolution.expression`.

    Args:
        irreps_in: representation of the atoms' features.
        irreps_attributes: representation of the atoms' kinds, scalars.
        irreps_edges: spherical harmonics of the edges.
        irreps_hidden: wished representation of the result; what cannot be reached is left out.
        radial_widths: of the radial network, but for its last layer, which makes the convolution's weights; the layers
            before it are not the round's: see `HiddenLayers`.
        average_neighbors: messages are divided by its root.
    """

    def __init__(
        self,
        irreps_in: Irreps,
        irreps_attributes: Irreps,
        irreps_edges: Irreps,
        irreps_hidden: Irreps,
        radial_widths: Sequence[int],
        average_neighbors: float,
    ) -> None:
        super().__init__()
        irreps_in, irreps_edges = o3.Irreps(irreps_in), o3.Irreps(irreps_edges)
        reachable = {ir for _, a in irreps_in for _, b in irreps_edges for ir in a * b} | {ir for _, ir in irreps_in}
        self.gate = gated(irreps_hidden, reachable)
        self.irreps_out = self.gate.irreps_out
        wanted = self.gate.irreps_in
        middle: list[tuple[int, Any]] = []
        paths: list[tuple[int, int, int]] = []
        for i, (mul, a) in enumerate(irreps_in):
            for j, (_, b) in enumerate(irreps_edges):
                for ir in a * b:
                    if ir in wanted:
                        paths.append((i, j, len(middle)))
                        middle.append((mul, ir))
        irreps_middle, order, _ = o3.Irreps(middle).sort()
        instructions = sorted(((i, j, order[k], "uvu", True) for i, j, k in paths), key=lambda row: row[2])
        # Between them features are in the order that the convolution takes as it is.
        self.mix_in = Linear(irreps_in, irreps_in, layout_out="ir_mul")
        self.convolution = TensorProductConv(irreps_in, irreps_edges, irreps_middle, instructions, layout="ir_mul")
        self.mix_out = Linear(irreps_middle, wanted, layout_in="ir_mul")
        self.itself = FullyConnectedTensorProduct(irreps_in, irreps_attributes, wanted)
        self.radial_weight = nn.Parameter(torch.randn(radial_widths[-1], self.convolution.weight_numel))
        # Messages are linear in the weights, which are fewer numbers before they belong to edges.
        self.scale = scale_of(radial_widths[-1], first=len(radial_widths) == 1) * average_neighbors**-0.5

    def forward(
        self, x: Tensor, attributes: Tensor, harmonics: Tensor, hidden: Tensor, receivers: Tensor, senders: Tensor
    ) -> Tensor:
        """Features after the round, (n, irreps_out.dim).

        `hidden`, (e, radial_widths[-1]), is what `HiddenLayers` makes of the radial functions.
        """
        weights = hidden @ (self.radial_weight * self.scale)
        messages = self.convolution(self.mix_in(x), harmonics, weights, receivers, senders)
        return self.gate(self.mix_out(messages) + self.itself(x, attributes))


class NequIP(nn.Module):
    """A potential: the energy of a configuration of atoms is a sum of terms that see their neighbours' directions.

    Energies do not change under rotations, reflections, translations and permutations of equal atoms; forces turn
    with the atoms. Molecules and periodic cells: an edge says by its offset which image of the sender is meant.

    Source: Batzner et al., E(3)-equivariant graph neural networks for data-efficient and accurate interatomic
    potentials (Nature Communications 2022).

    Args:
        species: atomic numbers that occur.
        cutoff: distance up to which atoms see each other.
        num_layers: rounds of messages.
        num_features: copies of each irrep.
        lmax: highest degree of features and harmonics.
        parity: features of both parities, instead of those of the harmonics only.
        num_basis: radial functions.
        radial_hidden: hidden widths of the radial networks.
        average_neighbors: mean number of neighbours in the data.
        energy_scale: standard deviation of the energy of an atom, or of the forces.
        energy_shift: energy of a lone atom of each species; default 0.

    >>> _ = torch.manual_seed(0)
    >>> model = NequIP([1, 8], cutoff=2.0, num_layers=2, num_features=4, lmax=1)
    >>> water = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    >>> receivers, senders = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])
    >>> energy, forces = model.energy_and_forces(water, torch.tensor([8, 1, 1]), receivers, senders)
    >>> energy.shape, forces.shape, bool(forces.sum(0).abs().max() < 1e-5)
    (torch.Size([1]), torch.Size([3, 3]), True)
    """

    def __init__(
        self,
        species: Sequence[int],
        *,
        cutoff: float = 5.0,
        num_layers: int = 3,
        num_features: int = 16,
        lmax: int = 2,
        parity: bool = True,
        num_basis: int = 8,
        radial_hidden: Sequence[int] = (64, 64),
        average_neighbors: float = 16.0,
        energy_scale: float = 1.0,
        energy_shift: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.species_index: Tensor
        self.energy_shift: Tensor
        self.energy_scale: Tensor
        numbers = sorted({int(s) for s in species})
        shift = [0.0] * len(numbers) if energy_shift is None else [float(e) for e in energy_shift]
        if len(shift) != len(numbers):
            raise InsumShapeError(
                f"energy_shift has {len(shift)} energies for {len(numbers)} species",
                fix="give one for each atomic number, in ascending order.",
                expected=len(numbers),
                got=len(shift),
            )
        self.cutoff = cutoff
        # e3nn takes no integers of NumPy.
        num_features, self.lmax = operator.index(num_features), operator.index(lmax)
        index = torch.full((max(numbers) + 1,), -1, dtype=torch.int64)
        index[numbers] = torch.arange(len(numbers))
        self.register_buffer("species_index", index)
        self.register_buffer("energy_shift", torch.tensor(shift))
        self.register_buffer("energy_scale", torch.tensor(float(energy_scale)))
        self.num_species = len(numbers)
        attributes = o3.Irreps([(len(numbers), (0, 1))])
        edges = o3.Irreps.spherical_harmonics(lmax)
        parities = [(l, p) for l in range(lmax + 1) for p in ((1, -1) if parity else ((-1) ** l,))]
        hidden = o3.Irreps([(num_features, ir) for ir in parities])
        with plain_e3nn():
            self.embedding = Linear(attributes, o3.Irreps([(num_features, (0, 1))]))
            self.radial_basis = RadialBasis(cutoff, num_basis)
            self.harmonics = SphericalHarmonics(edges, normalize=False, normalization="component")
            widths = [num_basis, *radial_hidden]
            self.radial = HiddenLayers(num_layers, widths)
            layers: list[Interaction] = []
            irreps = self.embedding.irreps_out
            for number in range(num_layers):
                # The last round only has to provide what the energy is read from.
                wished = hidden if number + 1 < num_layers else o3.Irreps([(num_features, (0, 1))])
                layer = Interaction(irreps, attributes, edges, wished, widths, average_neighbors)
                irreps = layer.irreps_out
                layers.append(layer)
            self.layers = nn.ModuleList(layers)
            self.readout = nn.Sequential(
                Linear(irreps, o3.Irreps([(max(num_features // 2, 1), (0, 1))])),
                Linear(o3.Irreps([(max(num_features // 2, 1), (0, 1))]), o3.Irreps("0e")),
            )

    def forward(
        self,
        positions: Tensor,
        species: Tensor,
        receivers: Tensor,
        senders: Tensor,
        offsets: Tensor | None = None,
        batch: Tensor | None = None,
        num_graphs: int = 1,
        edges: EdgeGradients | None = None,
    ) -> Tensor:
        """Energies.

        Args:
            positions: (n, 3); differentiable.
            species: (n,) atomic numbers.
            receivers: (e,) atom that an edge informs.
            senders: (e,) atom that it is informed of.
            offsets: (e, 3) what is added to the sender's position to reach the meant image of it; default 0.
            batch: (n,) configuration of each atom; default all in one.
            num_graphs: configurations.
            edges: what is to compute the gradient by the edges' vectors.

        Returns:
            (num_graphs,) energies.

        Raises:
            InsumShapeError: an atom's species is unknown, or shapes do not fit.
        """
        kinds = self._kinds(positions, species)
        vectors = positions.index_select(0, senders) - positions.index_select(0, receivers)
        if offsets is not None:
            vectors = vectors + offsets
        if edges is None:
            distances = torch.linalg.vector_norm(vectors, dim=1)
            basis, harmonics = self.radial_basis(distances), self.harmonics(vectors / distances[:, None])
        else:
            basis, harmonics = edges.functions_of(vectors, self.radial_basis, self.harmonics)
        radial = self.radial(basis)
        attributes = nn.functional.one_hot(kinds, self.num_species).to(positions.dtype)
        x = self.embedding(attributes)
        for layer, hidden in zip(self.layers, radial, strict=True):
            x = layer(x, attributes, harmonics, hidden, receivers, senders)
        atoms = self.readout(x).squeeze(1) * self.energy_scale + self.energy_shift[kinds]
        if batch is None:
            batch = torch.zeros_like(kinds)
        return atoms.new_zeros(num_graphs).index_add(0, batch, atoms)

    def _kinds(self, positions: Tensor, species: Tensor) -> Tensor:
        if positions.dim() != 2 or positions.shape[1] != 3 or species.shape != positions.shape[:1]:
            raise InsumShapeError(
                "positions and species do not describe atoms",
                details=[f"expected (n, 3) and (n,); got {tuple(positions.shape)} and {tuple(species.shape)}"],
                fix="pass one row of positions and one atomic number for each atom.",
                got=(tuple(positions.shape), tuple(species.shape)),
            )
        kinds = self.species_index[species.clamp(0, self.species_index.numel() - 1)]
        kinds = torch.where(species < self.species_index.numel(), kinds, -1)
        # A tracer gives tensors that have no values.
        traced = torch.compiler.is_compiling() or type(kinds) is not Tensor
        if not traced and bool((kinds < 0).any()):
            unknown = sorted(set(species[kinds < 0].tolist()))
            known = [n for n, k in enumerate(self.species_index.tolist()) if k >= 0]
            raise InsumShapeError(
                f"the model knows no species {unknown}",
                details=[f"expected atomic numbers among {known}"],
                fix="build the model with all species of the data.",
                expected=known,
                got=unknown,
            )
        return kinds

    def energy_and_forces(
        self,
        positions: Tensor,
        species: Tensor,
        receivers: Tensor,
        senders: Tensor,
        offsets: Tensor | None = None,
        batch: Tensor | None = None,
        num_graphs: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Energies, and forces: minus their gradient by the positions.

        In training mode the forces can be differentiated again, which is what a loss on forces needs.

        Returns:
            (num_graphs,) energies and (n, 3) forces.
        """
        energy, gradient, _ = self._with_gradient(positions, species, receivers, senders, offsets, batch, num_graphs)
        return energy, _forces(gradient, receivers, senders, positions.shape[0])

    def energy_forces_stress(
        self,
        positions: Tensor,
        species: Tensor,
        receivers: Tensor,
        senders: Tensor,
        offsets: Tensor,
        batch: Tensor | None = None,
        num_graphs: int = 1,
        *,
        volumes: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Energies, forces and stresses: the derivative by a symmetric strain of cell and atoms, over the volume.

            F[n,i] = -dE / dr[n,i],        stress[g,i,j] = dE / d(strain[g,i,j]) / V[g]

        Source: Thompson, Plimpton, Mattson, General formulation of pressure and stress tensor for arbitrary many-body
        interaction potentials under periodic boundary conditions (J. Chem. Phys. 2009), of the opposite sign.

        In training mode forces and stresses can be differentiated again, which is what a loss on them needs.

        Args:
            positions: (n, 3); the others likewise as in `forward`.
            species: (n,).
            receivers: (e,).
            senders: (e,).
            offsets: (e, 3).
            batch: (n,).
            num_graphs: configurations.
            volumes: (num_graphs,) volumes of the periodic cells; NaN or 0 for a configuration without one, whose stress
                is NaN.

        Returns:
            (num_graphs,) energies, (n, 3) forces and (num_graphs, 3, 3) stresses, symmetric, positive under tension,
            as in ase.

        >>> model = NequIP([29], cutoff=3.0, num_layers=1, num_features=4, lmax=1)
        >>> atom, self_edges = torch.zeros(1, 3), torch.zeros(2, dtype=torch.int64)
        >>> offsets = torch.tensor([[2.5, 0.0, 0.0], [-2.5, 0.0, 0.0]])
        >>> inputs = (atom, torch.tensor([29]), self_edges, self_edges, offsets)
        >>> energy, forces, stress = model.energy_forces_stress(*inputs, volumes=torch.tensor([15.6]))
        >>> stress.shape, bool(stress[0, 1].abs().max() < 1e-6)
        (torch.Size([1, 3, 3]), True)
        """
        if batch is None:
            batch = torch.zeros_like(species)
        given = (positions, species, receivers, senders, offsets, batch, num_graphs)
        energy, gradient, vectors = self._with_gradient(*given)
        # A strain changes each vector by its product with it.
        parts = (vectors[:, :, None] * gradient[:, None]).flatten(1)
        whole = parts.new_zeros(num_graphs, 9).index_add(0, batch[receivers], parts).unflatten(1, (3, 3))
        virial = (whole + whole.mT) / 2
        # A configuration without a cell has no stress, and must not make the gradients of the others NaN.
        periodic = (volumes > 0)[:, None, None]
        stress = torch.where(periodic, virial / volumes.where(volumes > 0, 1.0)[:, None, None], torch.nan)
        return energy, _forces(gradient, receivers, senders, positions.shape[0]), stress

    def _with_gradient(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Energies, the gradient of their sum by the edges' vectors, and these vectors."""
        edges = EdgeGradients(create_graph=self.training)
        with torch.enable_grad():
            energy = self(*given, edges=edges)
            gradient = edges.of(energy.sum())
        return (energy if self.training else energy.detach()), gradient, edges.vectors


def _forces(gradient: Tensor, receivers: Tensor, senders: Tensor, atoms: int) -> Tensor:
    """Minus the gradient by the positions, from that by the vectors from receivers to senders."""
    zeros = gradient.new_zeros(atoms, 3)
    return zeros.index_add(0, receivers, gradient).index_add(0, senders, gradient, alpha=-1)
