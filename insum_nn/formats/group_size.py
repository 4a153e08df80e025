"""How many entries a group holds: the count of indirect accesses and the rule that follows from it.

With groups of `g` slots, a row of `occ` entries takes `ceil(occ / g)` groups. Each group costs one scatter (its
row index) and `g` gathers (its column indices, the unused slots included).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from insum_nn.errors import InsumFormatError
from insum_nn.formats.arguments import integers

__all__ = [
    "GroupSize",
    "candidate_group_sizes",
    "choose_group_size",
    "estimate_group_size",
    "indirect_accesses",
    "resolve_group_size",
]

GroupSize = int | Literal["auto"]


def indirect_accesses(occupancy: Tensor | Sequence[int], group_size: int) -> int:
    """Count the gathers and scatters of a grouped format.

        F(g) = (g + 1) * sum_i ceil(occ_i / g)

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.2.

    Args:
        occupancy: (n,), integers: stored entries of each row; empty rows may be listed or left out, they add 0.
        group_size: `g`, at least 1.

    Returns:
        F(g). Reads the device once.

    Raises:
        InsumFormatError: `group_size` is no integer of at least 1.

    >>> [indirect_accesses([3, 1, 1, 2], g) for g in (1, 2, 3)]
    [14, 15, 16]
    """
    size = _checked(group_size)
    counts = _counts(occupancy)
    return (size + 1) * int(_ceil_div(counts, size).sum().item())


def estimate_group_size(nnz: int, num_nonempty_rows: int) -> float:
    """Return the real-valued group size that minimises the relaxed count of indirect accesses.

        g* = sqrt(S / n)

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 4.2. There `n` is the number of rows, because
    `ceil(occ / g)` is relaxed to `occ / g + 1`, which charges a group to every row. An empty row has no group, so its
    true cost is 0; counting only rows that hold an entry keeps the relaxation close in hypersparse matrices, and is
    the same number where no row is empty.

    Args:
        nnz: `S`, the stored entries.
        num_nonempty_rows: `n`, the rows that hold at least one entry.

    Returns:
        g*, at least 1; 1.0 where nothing is stored.

    >>> round(estimate_group_size(7, 4), 3)
    1.323
    """
    if nnz <= 0 or num_nonempty_rows <= 0:
        return 1.0
    return max(1.0, math.sqrt(nnz / num_nonempty_rows))


def candidate_group_sizes(occupancy: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return the powers of two next to g*: the one at or below it and the one at or above it.

    Args:
        occupancy: (n,), integers: stored entries of each row. Empty rows are not counted.

    Returns:
        One power of two where g* is one, else two, ascending.

    >>> candidate_group_sizes([3, 1, 1, 2])
    (1, 2)
    >>> candidate_group_sizes([16, 16])
    (4,)
    """
    counts = _counts(occupancy)
    if counts.numel() == 0:
        return (1,)
    nnz, rows = torch.stack([counts.sum(), (counts > 0).sum()]).tolist()
    # Squares keep this exact: 4^k <= S / n is decided in integers, not on a rounded root.
    low = 1
    while rows > 0 and 4 * low * low * rows <= nnz:
        low *= 2
    exact = rows == 0 or low * low * rows >= nnz
    return (low,) if exact else (low, 2 * low)


def choose_group_size(
    occupancy: Tensor | Sequence[int],
    measure: Callable[[int], float] | None = None,
) -> int:
    """Choose among the powers of two next to g*.

    Args:
        occupancy: (n,), integers: stored entries of each row.
        measure: Seconds (or any cost) of running with a group size. `None`: the count F(g) decides.

    Returns:
        The cheapest candidate; the smaller one, which pads less, where two cost the same.

    >>> choose_group_size([3, 1, 1, 2])
    1
    >>> choose_group_size([3, 1, 1, 2], measure=lambda g: 1.0 / g)
    2
    """
    candidates = candidate_group_sizes(occupancy)
    if len(candidates) == 1:
        return candidates[0]
    if measure is not None:
        return min(candidates, key=measure)
    counts = _counts(occupancy)
    groups = torch.stack([_ceil_div(counts, size).sum() for size in candidates]).tolist()
    costs = {size: (size + 1) * number for size, number in zip(candidates, groups, strict=True)}
    return min(candidates, key=lambda size: costs[size])


def resolve_group_size(group_size: GroupSize, occupancy: Tensor) -> int:
    """Return `group_size`, or the rule's choice for `"auto"`."""
    if group_size == "auto":
        return choose_group_size(occupancy)
    return _checked(group_size)


def _checked(group_size: object) -> int:
    """Return a group size as an int, after a check."""
    size = integers((group_size,))
    if isinstance(group_size, bool) or size is None or size[0] < 1:
        raise InsumFormatError(
            f"group_size must be an integer of at least 1 or 'auto', got {group_size!r}",
            fix="pass group_size='auto' to let the rule choose.",
            argument="group_size",
            got=group_size,
        )
    return size[0]


def _counts(occupancy: Tensor | Sequence[int]) -> Tensor:
    if isinstance(occupancy, Tensor):
        return occupancy.reshape(-1).to(torch.int64)
    return torch.tensor(list(occupancy), dtype=torch.int64)


def _ceil_div(counts: Tensor, size: int) -> Tensor:
    return (counts + (size - 1)) // size
