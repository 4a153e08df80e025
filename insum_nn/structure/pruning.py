"""Which parts of a weight are kept: masks by magnitude, by pattern, at random; pruning and regrowing while training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from insum_nn.errors import InsumFormatError, InsumNameError
from insum_nn.faults import Faults
from insum_nn.tiles import tiles

__all__ = [
    "carry_optimizer_state",
    "cosine_fraction",
    "filter_mask",
    "group_norms",
    "kept_count",
    "magnitude_mask",
    "note_new_rows",
    "prune_and_regrow",
    "random_mask",
    "take_rows",
    "touched_blocks",
]

FILTER_AXES = "MCRST"


def kept_count(density: object, total: int) -> int:
    """Return how many of `total` parts a density keeps: the nearest integer, and at least one of any.

    Raises:
        InsumFormatError: the density is not in (0, 1].

    >>> kept_count(0.1, 64), kept_count(0.001, 64), kept_count(0.5, 0)
    (6, 1, 0)
    """
    if not isinstance(density, (int, float)) or isinstance(density, bool) or not 0 < density <= 1:
        raise InsumFormatError(
            f"density must lie in (0, 1], got {density!r}",
            fix="pass the share of the weight to keep, such as density=0.1.",
            argument="density",
            got=density,
        )
    return min(total, max(1, round(density * total)))


def group_norms(dense: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the Frobenius norm of each block of a matrix.

        N[r,c]**2 = sum over a, b of D[A*r+a,B*c+b]**2        blocks of A rows and B columns

    Args:
        dense: `D`, (m, k); floating; blocks at the edges may reach beyond it.
        block_shape: (A, B).

    Returns:
        `N`, (rows, columns) of the grid of blocks; float32, or float64 for a float64 matrix.

    >>> group_norms(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]]), (2, 2)).tolist()
    [[5.0, 2.0]]
    """
    wide = torch.float64 if dense.dtype == torch.float64 else torch.float32
    return tiles(dense.detach().to(wide), block_shape).square().sum((2, 3)).sqrt()


def touched_blocks(mask: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the blocks of a grid that a mask over single elements touches.

    Args:
        mask: (m, k), bool.
        block_shape: rows and columns of one block.

    Returns:
        (rows, columns) of the grid, bool.

    >>> touched_blocks(torch.tensor([[True, False, False]]), (2, 2)).tolist()
    [[True, False]]
    """
    return tiles(mask, block_shape).any(3).any(2)


def magnitude_mask(scores: Tensor, density: float) -> Tensor:
    """Keep the parts with the highest scores.

    Args:
        scores: any shape; a NaN counts as the lowest.
        density: share of the parts to keep; the nearest number of parts, and at least one.

    Returns:
        The shape of `scores`, bool. Of equal scores those that come first are kept.

    Raises:
        InsumFormatError: the density is not in (0, 1].

    >>> magnitude_mask(torch.tensor([[0.1, 3.0], [2.0, 0.5]]), 0.5).tolist()
    [[False, True], [True, False]]
    """
    return _highest(scores, kept_count(density, scores.numel()))


def _highest(scores: Tensor, count: int) -> Tensor:
    flat = scores.detach().reshape(-1)
    mask = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    # A stable order, so that ties do not depend on the device.
    order = flat.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).sort(descending=True, stable=True).indices
    mask[order[:count]] = True
    return mask.reshape(scores.shape)


def random_mask(
    shape: Sequence[int],
    density: float,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Keep parts at uniformly random places.

    Args:
        shape: extents of the grid.
        density: share of the parts to keep; the nearest number of parts, and at least one.
        generator: source of randomness, on the CPU: the same places on every device. Default torch's own.
        device: where the mask goes.

    Returns:
        `shape`, bool, with exactly that number of parts.

    Raises:
        InsumFormatError: the density is not in (0, 1].

    >>> int(random_mask((4, 5), 0.3).sum())
    6
    """
    total = math.prod(shape)
    mask = torch.zeros(total, dtype=torch.bool)
    mask[torch.randperm(total, generator=generator)[: kept_count(density, total)]] = True
    return mask.reshape(tuple(shape)).to(device)


def filter_mask(weight: Tensor, density: float, pattern: str | None = None) -> Tensor:
    """Keep the parts of a convolution's filters with the largest norms, whole parts at a time.

    A pattern names the axes along which the mask varies; along the others it is constant. `"M"` keeps or drops whole
    filters, `"C"` whole input channels, `"MC"` whole kernels (a filter's plane for one channel), `"RS"` the same
    kernel positions in every filter, `"MRS"` positions by filter, `"CRS"` by channel, and `"MCRS"`, in any order
    (`"RSMC"`), single weights. Kernels of one dimension have no S, those of three have T too.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), section 6.2.

    Args:
        weight: (M, C, R, S): filters, channels of a group, kernel rows and columns; or (M, C, R), or (M, C, R, S, T).
        density: share of the parts to keep; the nearest number of parts, and at least one.
        pattern: letters of M, C, R, S, T; default all.

    Returns:
        The shape of `weight`, bool.

    Raises:
        InsumShapeError: `weight` has not three to five dimensions.
        InsumFormatError: the density is not in (0, 1], or the pattern holds other letters.

    >>> weight = torch.tensor([[1.0, 2.0], [0.5, 3.0]]).reshape(2, 2, 1, 1).expand(2, 2, 3, 3)
    >>> filter_mask(weight, 0.5, "M")[:, :, 0, 0].tolist()
    [[False, False], [True, True]]
    >>> filter_mask(weight, 0.5, "MC")[:, :, 0, 0].tolist()
    [[False, True], [False, True]]
    """
    axes = FILTER_AXES[: max(3, weight.ndim)]
    faults = Faults("filter_mask")
    message, fix = f"must have three to five dimensions, got {weight.ndim}", "pass the weight of a Conv1d to Conv3d."
    faults.shape("weight", weight, tuple(axes), message=message, fix=fix)
    faults.raise_all()
    pattern = axes if pattern is None else pattern
    if not pattern or len(set(pattern)) != len(pattern) or set(pattern) - set(axes):
        raise InsumFormatError(
            f"filter_mask got the pattern {pattern!r}",
            details=[f"expected some of the letters {', '.join(axes[:-1])} and {axes[-1]}, each once"],
            fix="name the axes along which the mask varies, such as 'MC' for whole kernels.",
            argument="pattern",
            got=pattern,
        )
    shared = [axis for axis, letter in enumerate(axes) if letter not in pattern]
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scores = weight.detach().to(wide).square()
    if shared:
        scores = scores.sum(shared, keepdim=True)
    return magnitude_mask(scores, density).expand(weight.shape).clone()


def prune_and_regrow(mask: Tensor, keep_scores: Tensor, grow_scores: Tensor, fraction: float) -> Tensor:
    """Move a share of the kept parts: drop those with the lowest scores, grow as many elsewhere.

    Source: Evci, Gale, Menick, Castro, Elsen, Rigging the Lottery: Making All Tickets Winners (ICML 2020). A part
    that was just dropped may win its place back.

    Args:
        mask: bool: the parts kept now.
        keep_scores: shape of `mask`: what keeps a part, such as the norm of its weights. Read where `mask` is true.
        grow_scores: shape of `mask`: what earns a new part its place, such as the norm of the dense gradient.
        fraction: share of the kept parts to drop, in [0, 1].

    Returns:
        A mask with as many parts.

    Raises:
        InsumShapeError: shapes differ.
        InsumDtypeError: `mask` is not bool.
        InsumFormatError: the fraction is not in [0, 1].

    >>> kept = torch.tensor([True, True, False, False])
    >>> prune_and_regrow(kept, torch.tensor([2.0, 1.0, 0.0, 0.0]), torch.tensor([9.0, 1.0, 2.0, 3.0]), 0.5).tolist()
    [True, False, False, True]
    """
    faults = Faults("prune_and_regrow")
    faults.dtype_among("mask", mask.dtype, (torch.bool,), fix="pass mask != 0.")
    for name, scores in (("keep_scores", keep_scores), ("grow_scores", grow_scores)):
        message, fix = "has not the shape of the mask", "pass one score per part of the grid."
        faults.shape(name, scores, mask.shape, message=message, fix=fix)
    faults.raise_all()
    if not 0 <= fraction <= 1:
        raise InsumFormatError(
            f"fraction must lie in [0, 1], got {fraction!r}",
            fix="pass the share of the kept parts to move, such as fraction=0.3.",
            argument="fraction",
            got=fraction,
        )
    total = int(mask.sum())
    moved = min(round(fraction * total), mask.numel() - total)
    survivors = _highest_of(mask, keep_scores, total - moved)
    return survivors | _highest_of(~survivors, grow_scores, moved)


def _highest_of(among: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest scores among some parts, whatever the others hold."""
    chosen = torch.zeros(among.numel(), dtype=torch.bool, device=among.device)
    places = among.reshape(-1).nonzero().squeeze(1)
    chosen[places[_highest(scores.reshape(-1)[places], count)]] = True
    return chosen.reshape(among.shape)


def cosine_fraction(step: int, total: int, initial: float = 0.3) -> float:
    """Return the share of parts to move at a step of training: `initial` at first, falling to zero along half a cosine.

    Source: Evci et al., Rigging the Lottery (ICML 2020), section 3.

    >>> [round(cosine_fraction(step, 100), 3) for step in (0, 50, 100, 120)]
    [0.3, 0.15, 0.0, 0.0]
    """
    return initial / 2 * (1 + math.cos(math.pi * min(1.0, step / total))) if total > 0 else 0.0


def carry_optimizer_state(optimizer: torch.optim.Optimizer, parameter: Tensor, source: Tensor) -> None:
    """Rearrange what an optimizer remembers of a parameter whose rows were chosen again.

    Every tensor with one row per old row of the parameter (SGD's momentum, Adam's moments) keeps the rows of
    survivors and gets zeros for new ones. Scalars, such as a count of steps, stay. Call it before the parameter
    changes.

    Args:
        optimizer: holds the parameter.
        parameter: as it is before the change, (p, ..).
        source: (new p,) int64: the old row of each new one, -1 for a new row.

    Raises:
        InsumNameError: the parameter is none of the optimizer's.
        InsumFormatError: the optimizer remembers a tensor of another shape; nothing is changed then.
    """
    if not any(parameter is p for group in optimizer.param_groups for p in group["params"]):
        raise InsumNameError(
            f"this {type(optimizer).__name__} does not train the layer's weight",
            fix="pass the optimizer that was built from the model's parameters.",
            argument="optimizer",
        )
    state = optimizer.state.get(parameter, {})
    rows = parameter.shape[0]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0}
    odd = [key for key, value in tensors.items() if value.shape[0] != rows]
    if odd:
        raise InsumFormatError(
            f"{type(optimizer).__name__} keeps state that does not follow the weight's rows",
            details=[f"{key}: shape {tuple(tensors[key].shape)}, weight {tuple(parameter.shape)}" for key in odd],
            fix="update the mask without optimizer= and start a new optimizer.",
            argument="optimizer",
            got=tuple(odd),
        )
    for key, value in tensors.items():
        state[key] = take_rows(value, source)


# Shapes that parameters had before their number of rows changed; see `note_new_rows`.
_former_shapes = WeakTensorKeyDictionary()


def note_new_rows(parameter: Tensor, former: torch.Size) -> None:
    """Have optimizers raise before a step if they remember a parameter as it was: in the step, torch names no cause.

    Args:
        parameter: as it is now.
        former: its shape before.
    """
    _former_shapes[parameter] = {former} | (_former_shapes.get(parameter) or set[torch.Size]())
    _watch_steps()


def _check_memory(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p in _former_shapes):
        former: set[torch.Size] = _former_shapes[parameter] - {parameter.shape}
        memory = optimizer.state.get(parameter, {})
        odd = {key: value.shape for key, value in memory.items() if getattr(value, "shape", None) in former}
        if odd:
            raise InsumFormatError(
                f"{type(optimizer).__name__} remembers a pruned weight that has another number of places by now",
                details=[f"{key}: shape {tuple(shape)}, weight {tuple(parameter.shape)}" for key, shape in odd.items()],
                fix="build a new optimizer, load its state of the same checkpoint, or pass optimizer= to update_mask.",
            )


_watch_steps = cache(lambda: register_optimizer_step_pre_hook(_check_memory))


def take_rows(rows: Tensor, source: Tensor) -> Tensor:
    """`rows[source]`, with zeros where `source` is -1.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1])).tolist()
    [[2.0], [0.0]]
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(source.shape[0], *rows.shape[1:])
    found = rows.index_select(0, source.clamp(min=0))
    return found.masked_fill((source < 0).reshape(-1, *(1,) * (rows.ndim - 1)), 0)
