"""The mask of an output: the kernel offsets that it has, as bits of one number by which outputs are sorted."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["MASK_BITS", "compared_offsets", "mask_powers"]

# Offsets by which outputs are compared: as bits of an int32 that is never negative, so that it sorts as its bits read.
MASK_BITS = 31


@lru_cache(maxsize=64)
def compared_offsets(volume: int) -> tuple[int, ...]:
    """Return the offset of each bit: of more than `MASK_BITS`, some from the first to the last, at equal distances.

    >>> compared_offsets(3), compared_offsets(125)[:4]
    ((0, 1, 2), (0, 4, 8, 12))
    """
    if volume <= MASK_BITS:
        return tuple(range(volume))
    return tuple([round(bit * (volume - 1) / (MASK_BITS - 1)) for bit in range(MASK_BITS)])


@lru_cache(maxsize=64)
def mask_powers(volume: int) -> tuple[int, ...]:
    """Return what each offset adds to a mask.

    >>> mask_powers(3), mask_powers(125)[:5]
    ((1, 2, 4), (1, 0, 0, 0, 2))
    """
    bits = {offset: bit for bit, offset in enumerate(compared_offsets(volume))}
    return tuple([1 << bits[offset] if offset in bits else 0 for offset in range(volume)])
