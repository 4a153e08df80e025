"""Group statements over static tables whose dense products (`passes.path_products`) are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insum_nn.compiler.passes.path_products import PathSplit

__all__ = ["Family", "Number", "Output", "families_of"]

# A tensor of a call: its number among those that are read, or written.
Number = int


@dataclass(frozen=True, slots=True)
class Output:
    """A side that is written: which tensor, and by what split."""

    side: str
    number: Number
    split: PathSplit


@dataclass(slots=True)
class Family:
    """Splits with the same paths.

    Attributes:
        reads: the tensor on each side that is read, and how its rows are selected.
        cells: a split that reads a side, and so knows where its cells lie.
        outputs: the sides that are written.
    """

    reads: dict[str, tuple[Number, str | None]]
    cells: dict[str, PathSplit]
    outputs: list[Output]

    @property
    def some(self) -> PathSplit:
        """One of the splits, for what all have in common."""
        return self.outputs[0].split

    def written(self, side: str) -> Output | None:
        """What is written on a side."""
        return next((output for output in self.outputs if output.side == side), None)


def families_of(splits: Sequence[tuple[PathSplit, Mapping[str, Number], Number]]) -> tuple[Family, ...]:
    """Bring splits with the same paths together.

    Args:
        splits: each with the numbers of the tensors that it reads, by name, and of the one that it writes.
    """
    turned: list[tuple[PathSplit, Mapping[str, Number], Number]] = []
    sides: dict[Number, str] = {}
    for split, numbers, _ in splits:
        if split.written in ("scale", "weight"):
            for side in ("left", "right"):
                sides.setdefault(numbers[split.operands[side].name], side)
    for split, numbers, written in splits:
        if split.written in ("left", "right"):
            split = _oriented(split, numbers, sides)
            side = "left" if split.written == "right" else "right"
            sides.setdefault(numbers[split.operands[side].name], side)
        turned.append((split, numbers, written))
    families: list[Family] = []
    for split, numbers, written in turned:
        reads = {
            side: (numbers[operand.name], operand.rows)
            for side, operand in split.operands.items()
            if side != split.written
        }
        output = Output(split.written, written, split)
        family = next((each for each in families if _joins(each, output, reads)), None)
        if family is None:
            families.append(Family(reads, dict.fromkeys(reads, split), [output]))
            continue
        for side in reads.keys() - family.reads.keys():
            family.reads[side], family.cells[side] = reads[side], split
        family.outputs.append(output)
    return tuple(families)


def _oriented(split: PathSplit, numbers: Mapping[str, Number], sides: Mapping[Number, str]) -> PathSplit:
    """The split with what it reads on the side where others read it; else where fewer multiplications are left."""
    read = "left" if split.written == "right" else "right"
    side = sides.get(numbers[split.operands[read].name])
    other = split.turned()
    if side is not None:
        return split if side == read else other
    taken = set(sides.values())
    if len(taken) == 1:
        # The other tensor of the same products.
        return split if read not in taken else other
    return min(split, other, key=PathSplit.multiplications)


def _joins(family: Family, output: Output, reads: Mapping[str, tuple[Number, str | None]]) -> bool:
    some, split = family.some, output.split
    if family.written(output.side) or some.mixes != split.mixes or len(some.paths) != len(split.paths):
        return False
    if any(family.reads.get(side, own) != own for side, own in reads.items()):
        return False
    pairs = zip(some.paths, split.paths, strict=True)
    return all(path.signature == other.signature for path, other in pairs)
