"""Layers whose pruned weight changes its mask in training: pruning, regrowing, rewiring, and recorded gradients.

What is stored, and how it is saved and loaded, is in the base `PrunedWeight`; here is what only training needs.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from insum_nn.errors import InsumFormatError
from insum_nn.faults import Faults
from insum_nn.layers.pruned.pruned_weight import PrunedWeight
from insum_nn.structure.pruning import carry_optimizer_state, magnitude_mask, prune_and_regrow, take_rows

__all__ = ["GradientRecord", "PrunedModule"]


class PrunedModule(PrunedWeight):
    """A layer that stores its weight at chosen places of a grid, and may change them."""

    @torch.no_grad()
    def update_mask(self, mask: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Store other places: survivors keep their values and what the optimizer remembers of them, new ones are zero.

        The parameter stays the same object. Under `DistributedDataParallel` a mask with another number of places asks
        for wrapping the model again.

        Args:
            mask: bool, over the grid or over the dense weight.
            optimizer: holds the layer's weight; its momenta and moments follow the survivors. Left out, an optimizer
                that has made a step fits another number of places no longer, and says so at its next step.

        Raises:
            InsumDtypeError: the mask is not bool.
            InsumShapeError: the mask does not fit.
            InsumNameError: the optimizer does not hold the weight.
            InsumFormatError: the optimizer remembers a tensor that does not follow the weight's rows.
        """
        chosen = self.check_mask(mask).to(self.position.device).reshape(-1).nonzero().squeeze(1)
        source = self._sources(chosen)
        if optimizer is not None:
            carry_optimizer_state(optimizer, self.weight, source)
        gradient = self.weight.grad
        self.weight.grad = None
        self._replace_weight(take_rows(self.weight.data, source))
        if gradient is not None:
            self.weight.grad = take_rows(gradient, source)
        self._adopt_places(chosen)

    def _sources(self, chosen: Tensor) -> Tensor:
        """For each place its row in the weight as it is, or -1."""
        if self.num_stored == 0:
            return torch.full_like(chosen, -1)
        at = torch.searchsorted(self.position, chosen).clamp(max=self.num_stored - 1)
        return torch.where(self.position[at] == chosen, at, -1)

    def prune(self, density: float, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keep the stored cells of the largest norm.

        Args:
            density: share of the grid's places that stay.
            optimizer: as for `update_mask`.

        Raises:
            InsumFormatError: the density is not in (0, 1], or above the present one.
        """
        norms = self.cell_norms()
        scores = norms.new_full(self.grid_shape, -torch.inf).reshape(-1)
        scores[self.position] = norms.nan_to_num(nan=0.0)
        mask = magnitude_mask(scores, density).reshape(self.grid_shape)
        if int(mask.sum()) > self.num_stored:
            raise self._out_of_reach(density, "pruned", fix="pass a lower density, or call regrow.")
        self.update_mask(mask, optimizer)

    def regrow(
        self, density: float, optimizer: torch.optim.Optimizer | None = None, *, scores: Tensor | None = None
    ) -> None:
        """Add places, as zeros, until a share of the grid is stored.

        Args:
            density: share of the grid's places that are stored in the end.
            optimizer: as for `update_mask`.
            scores: over the grid: the highest earn a place, such as those of `record_gradients`. Default: at random.

        Raises:
            InsumFormatError: the density is not in (0, 1], or below the present one.
            InsumShapeError: `scores` has not the shape of the grid.
        """
        own = self.mask
        if scores is None:
            scores = torch.rand(self.grid_shape, device=own.device)
        scores = self._check_scores(scores)
        mask = magnitude_mask(torch.where(own, torch.inf, scores.nan_to_num(nan=-torch.inf, posinf=3e38)), density)
        if int(mask.sum()) < self.num_stored:
            raise self._out_of_reach(density, "regrown", fix="pass a higher density, or call prune.")
        self.update_mask(mask, optimizer)

    def rewire(
        self, fraction: float, optimizer: torch.optim.Optimizer | None = None, *, scores: Tensor | None = None
    ) -> None:
        """Drop the share of stored cells with the smallest norms and grow as many elsewhere, as zeros.

        Source: Evci, Gale, Menick, Castro, Elsen, Rigging the Lottery: Making All Tickets Winners (ICML 2020).

        Args:
            fraction: share of the stored cells that move, in [0, 1]; see `cosine_fraction`.
            optimizer: as for `update_mask`.
            scores: over the grid: the highest earn a place, such as those of `record_gradients`. Default: at random.

        Raises:
            InsumFormatError: the fraction is not in [0, 1].
            InsumShapeError: `scores` has not the shape of the grid.
        """
        own, norms = self.mask, self.cell_norms()
        keep = norms.new_zeros(own.numel())
        keep[self.position] = norms
        grow = torch.rand(self.grid_shape, device=own.device) if scores is None else self._check_scores(scores)
        self.update_mask(prune_and_regrow(own, keep.reshape(own.shape), grow, fraction), optimizer)

    def _out_of_reach(self, density: float, changed: str, *, fix: str) -> InsumFormatError:
        return InsumFormatError(
            f"{type(self).__name__} stores {self.density:.3g} of its places, and cannot be {changed} to {density}",
            fix=fix,
            argument="density",
            expected=self.density,
            got=density,
        )

    def _check_scores(self, scores: Tensor) -> Tensor:
        faults = Faults(type(self).__name__)
        faults.shape("scores", scores, self.grid_shape, fix="pass one score per place of the grid.")
        faults.raise_all()
        return scores.to(self.position.device)

    @contextmanager
    def record_gradients(self) -> Generator[GradientRecord]:
        """While it is open, sum the dense weight's gradient over all backward passes through the layer.

        This is what RigL grows by; it costs a dense product per backward pass, so open it only for the steps before
        a change of the mask.

        Yields:
            A record whose `scores()` are the norms of that gradient over the grid.
        """
        record = GradientRecord(self)

        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: record.add(args[0].detach(), grad.detach()))

        handle = self.register_forward_hook(watch)
        try:
            yield record
        finally:
            handle.remove()


class GradientRecord:
    """The dense gradient of a pruned layer's weight, summed over backward passes."""

    def __init__(self, layer: PrunedModule) -> None:
        self._layer = layer
        self._dense: Tensor | None = None

    def add(self, input: Tensor, grad_output: Tensor) -> None:
        """Add one pass."""
        found = self._layer._dense_gradient(input, grad_output)
        self._dense = found if self._dense is None else self._dense + found

    def scores(self) -> Tensor:
        """Return the norm of the gradient at each place of the grid.

        Raises:
            InsumFormatError: no backward pass was recorded.
        """
        if self._dense is None:
            raise InsumFormatError(
                f"no backward pass through this {type(self._layer).__name__} was recorded",
                fix="call loss.backward() inside the record_gradients() block.",
            )
        return self._layer._grid_norms(self._dense)
