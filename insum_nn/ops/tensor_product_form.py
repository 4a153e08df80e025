"""A tensor product ready to run: its statements, and how results become representations."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.ops.tensor_product_spec import NUMBER, Group, ProductLayout, TensorProductSpec
from insum_nn.ops.tensor_product_statement import Statement
from insum_nn.structure.clebsch_gordan import divide

__all__ = ["Form", "form_of"]


class Form(ProductLayout):
    """The statements of a spec, made when they are first needed and kept."""

    def __init__(self, spec: TensorProductSpec) -> None:
        super().__init__(spec)
        self._statements: dict[tuple[str, bool], tuple[Statement, ...]] = {}
        self._orders: dict[tuple[object, ...], Any] = {}

    def statements(self, role: str, *, split: bool = False) -> tuple[Statement, ...]:
        """What computes a role.

        Args:
            role: a letter of `ROLES`.
            split: divide rows by how many slots they need. Library calls work through the slots that fill short rows
                up, so fewer of them pay for more calls; a generated kernel would rather read everything once.
        """
        key = (role, split)
        if key not in self._statements:
            groups = [g for g in self.groups(role) if role != "w" or g.weighted]
            parts = [part for group in groups for part in (self._divided(role, group) if split else [(group, None)])]
            with _kept_tensors():
                self._statements[key] = tuple(Statement(self, role, group, rows) for group, rows in parts)
        return self._statements[key]

    def _divided(self, role: str, group: Group) -> list[tuple[Group, NDArray[np.int64] | None]]:
        """A group as one or more, each with rows of like length."""
        if group.weighted and group.mode.mixes:
            return [(group, None)]
        entries = self.coefficients(group)
        if role == "w":
            buckets = divide(entries.path, None)
            return [(replace(group, paths=tuple(group.paths[p] for p in rows)), None) for rows in buckets]
        owner = entries.component[NUMBER[role]]
        return [(group, rows) for rows in divide(owner, entries.path if group.weighted else None)]

    def packing(self, operand: str, mul: int, device: torch.device) -> tuple[int | None, Tensor]:
        """How entries of one multiplicity are brought side by side, copies fastest.

        Returns:
            The first column if they lie so already, else `None`; and the columns in their new order.
        """
        key = ("pack", operand, mul, device)
        if key not in self._orders:
            entries, starts = self.entries[operand], self.starts[operand]
            parts = [
                starts[n] + np.arange(entries[n].dim).reshape(mul, entries[n].size).T.reshape(-1)
                for n in self.packed_entries(operand, mul)
            ]
            order = np.concatenate(parts)
            start = int(order[0]) if np.array_equal(order, order[0] + np.arange(order.size)) else None
            with _kept_tensors():
                self._orders[key] = (start, torch.from_numpy(order).to(device))
        return self._orders[key]

    def unpacking(self, role: str, device: torch.device, *, split: bool) -> tuple[list[Tensor | None], bool]:
        """How the results of a role's statements, side by side, become a representation.

        Returns:
            Selections of columns that add up (`None`: all as they lie), and whether they read a column of zeros
            that stands last.
        """
        key = ("unpack", role, split, device)
        if key not in self._orders:
            with _kept_tensors():
                self._orders[key] = self._unpacking(role, device, split)
        return self._orders[key]

    def _unpacking(self, role: str, device: torch.device, split: bool) -> tuple[list[Tensor | None], bool]:
        statements = self.statements(role, split=split)
        zero = sum(statement.width for statement in statements)
        orders: list[NDArray[np.int64]] = []
        filled = np.zeros(self.dims[role], np.int64)
        base = 0
        for statement in statements:
            for row, (number, component) in enumerate(statement.rows):
                entry = self.entries[role][number]
                target = self.starts[role][number] + component + entry.size * np.arange(entry.mul)
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


def _kept_tensors() -> torch.inference_mode:
    """What is kept must be of use in training too, even if the first call is not."""
    return torch.inference_mode(False)


@lru_cache(maxsize=256)
def form_of(text: str) -> Form:
    """The form of a spec's JSON; remembered."""
    return Form(TensorProductSpec.from_json(text))
