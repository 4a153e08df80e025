"""A tensor product ready to run: its statements, and how results become representations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.ops.tensor_product_spec import NUMBER, Group, ProductLayout, TensorProductSpec
from insum_nn.ops.tensor_product_statement import Feed, Reading, Statement
from insum_nn.structure.clebsch_gordan import divide
from insum_nn.structure.constants import plain_tensors

__all__ = ["POINTS", "Form", "form_of"]


# Non-zero coefficients of one statement at most, since a generated kernel writes each out; and copies of the output
# from which on a matrix product over them is worth a step of its own.
POINTS = 5000
LONG = 16

T = TypeVar("T")


class Form(ProductLayout):
    """The statements of a spec, made when they are first needed and kept."""

    def __init__(self, spec: TensorProductSpec) -> None:
        super().__init__(spec)
        self._statements: dict[tuple[str, bool, bool, bool], tuple[Statement, ...]] = {}
        self._kept: dict[tuple[object, ...], Any] = {}

    @property
    def text(self) -> str:
        """The spec's JSON."""
        return self.spec.to_json()

    def keep(self, key: tuple[object, ...], build: Callable[[], T]) -> T:
        """What `build` makes, once for each key; plain tensors, whatever transform the first call is under."""
        found = self._kept.get(key)
        if found is None:
            with plain_tensors():
                found = self._kept[key] = build()
        return found

    def statements(
        self, role: str, *, split: bool = False, staged: bool = False, in_place: bool = False
    ) -> tuple[Statement, ...]:
        """What computes a role.

        Args:
            role: a letter of `ROLES`.
            split: divide rows by how many slots they need, and by entry where multiplicities mix. Library calls work
                through the slots that fill short rows up, and do a matrix product of one size best, so fewer slots
                pay for more calls; a generated kernel would rather read everything once.
            staged: make the gradient of `y` in two steps where its first is a long matrix product.
            in_place: write the output as it lies, where it is a single statement that can.
        """
        key = (role, split, staged, in_place)
        if key not in self._statements:
            groups = [g for g in self.groups(role, fused=not split) if role != "w" or g.weighted]
            with plain_tensors():
                made: list[Statement] = []
                for group in groups:
                    feed = self._feed(role, group) if staged else None
                    parts = self._divided(role, group) if split else self._limited(role, group)
                    made += [Statement(self, role, part, rows, feed, in_place=in_place) for part, rows in parts]
                if in_place and len(made) != 1:
                    return self.statements(role, split=split, staged=staged)
                self._statements[key] = tuple(made)
        return self._statements[key]

    def in_steps(self, role: str, group: Group) -> bool:
        """Whether a role is made in two steps where that can be: its first is a long matrix product."""
        mode = group.mode
        long = group.weighted and mode.mixes and not mode.pairs and group.extents["w"] >= LONG
        # Weights of each sample are read once for one sample: no matrix product.
        return role == "y" and long and self.spec.shared and self.coefficients(group).path.size <= POINTS

    def _feed(self, role: str, group: Group) -> Feed | None:
        return Feed(self, group) if self.in_steps(role, group) else None

    def _divided(self, role: str, group: Group) -> list[tuple[Group, NDArray[np.int64] | None]]:
        """A group as one or more, each with rows of like length."""
        if group.weighted and group.mode.mixes:
            return [(group, None)]
        entries = self.coefficients(group)
        if role == "w":
            return [(_with_paths(group, rows), None) for rows in divide(entries.path, None)]
        row = entries.component[NUMBER[role]]
        return [(group, rows) for rows in divide(row, entries.path if group.weighted else None)]

    def _limited(self, role: str, group: Group) -> list[tuple[Group, NDArray[np.int64] | None]]:
        """A group as one or more, none with more coefficients than a kernel can write out."""
        entries = self.coefficients(group)
        if entries.value.size <= POINTS:
            return [(group, None)]
        rows, counts = np.unique(entries.path if role == "w" else entries.component[NUMBER[role]], return_counts=True)
        # A part ends where the next row would be too much.
        parts: list[list[int]] = [[]]
        room = POINTS
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            if count > room and parts[-1]:
                parts.append([])
                room = POINTS
            parts[-1].append(row)
            room -= count
        chosen = [np.array(part) for part in parts]
        return [(_with_paths(group, part), None) if role == "w" else (group, part) for part in chosen]

    def packing(self, operand: str, mul: int, device: torch.device) -> tuple[int | None, Tensor]:
        """How entries of one multiplicity are brought side by side, copies fastest.

        Returns:
            The first column if they lie so already, else `None`; and the columns in their new order.
        """

        def build() -> tuple[int | None, Tensor]:
            order = np.concatenate([self.columns(operand, n).reshape(-1) for n in self.packed_entries(operand, mul)])
            start = int(order[0]) if np.array_equal(order, order[0] + np.arange(order.size)) else None
            return start, torch.from_numpy(order).to(device)

        return self.keep(("pack", operand, mul, device), build)

    def unpacking(
        self, role: str, statements: Sequence[Statement], device: torch.device
    ) -> tuple[list[Tensor | None], bool]:
        """How the results of a role's statements, side by side, become a representation.

        Returns:
            Selections of columns that add up (`None`: all as they lie), and whether they read a column of zeros
            that stands last.
        """
        zero = sum(statement.width for statement in statements)
        orders: list[NDArray[np.int64]] = []
        filled = np.zeros(self.dims[role], np.int64)
        base = 0
        for statement in statements:
            for row, (number, component) in enumerate(statement.rows):
                entry = self.entries[role][number]
                target = self.columns(role, number)[component]
                layer = int(filled[target[0]])
                filled[target] += 1
                if layer == len(orders):
                    orders.append(np.full(self.dims[role], zero))
                orders[layer][target] = base + row * entry.mul + np.arange(entry.mul)
            base += statement.width
        needs_zero = any(bool((order == zero).any()) for order in orders)
        whole = np.arange(zero)
        tensors = [
            None if np.array_equal(order, whole) and not needs_zero else torch.from_numpy(order).to(device)
            for order in orders
        ]
        return tensors, needs_zero

    def weight_pieces(self, statements: Sequence[Reading]) -> list[tuple[int, int, int]]:
        """The gradient of the weights as pieces of the statements' results: (statement, first column, columns).

        Statement -1 stands for zeros.
        """
        place: dict[int, tuple[int, int]] = {}
        for number, statement in enumerate(statements):
            paths = statement.group.paths
            size = statement.width // len(paths)
            place |= {path: (number, size * at) for at, path in enumerate(paths)}
        pieces: list[tuple[int, int, int]] = []
        for number, path in enumerate(self.spec.paths):
            if not path.weighted or not path.numel:
                continue
            source, first = place.get(number, (-1, 0))
            if pieces and pieces[-1][0] == source and (source < 0 or sum(pieces[-1][1:]) == first):
                _, before, count = pieces.pop()
                pieces.append((source, before, count + path.numel))
            else:
                pieces.append((source, first, path.numel))
        return pieces

    def join_weights(
        self,
        statements: Sequence[Reading],
        results: Sequence[Tensor],
        pieces: Sequence[tuple[int, int, int]],
        size: int,
    ) -> Tensor:
        """The gradient of the weights, put together from the statements' results."""
        batch = () if self.spec.shared else (size,)
        flats = [r.reshape(*batch, s.width) for r, s in zip(results, statements, strict=True)]
        if len(pieces) == 1 and pieces[0][0] >= 0 and pieces[0][2] == flats[pieces[0][0]].shape[-1]:
            return flats[pieces[0][0]]
        zeros = results[0].new_zeros(())
        columns = [
            zeros.expand(*batch, count)
            if source < 0
            else flats[source]
            if count == flats[source].shape[-1]
            else flats[source].narrow(-1, first, count)
            for source, first, count in pieces
        ]
        if len(columns) == 1:
            return columns[0].contiguous()
        return torch.cat(columns, -1)


def _with_paths(group: Group, numbers: NDArray[np.int64]) -> Group:
    """A group of some of its paths."""
    return replace(group, paths=tuple(group.paths[n] for n in numbers.tolist()))


@lru_cache(maxsize=256)
def form_of(text: str) -> Form:
    """The form of a spec's JSON; remembered."""
    return Form(TensorProductSpec.from_json(text))
