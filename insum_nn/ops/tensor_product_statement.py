"""The statements of a tensor product: their text, and the static tables that they read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.api import Program, compile
from insum_nn.compiler.options import Options
from insum_nn.facts import IndexFacts
from insum_nn.ops.tensor_product_spec import NUMBER, Group, ProductLayout, others
from insum_nn.structure.clebsch_gordan import Table, make_table, path_table

__all__ = ["Statement", "WeightAccess"]

# An operand's axis of components in a statement, and the table that selects them.
_ROW = {"x": "i", "y": "j", "z": "k", "w": "r"}
_TABLE = {"x": "I", "y": "J", "z": "K"}
_STATIC = IndexFacts(masked=False, proven=True)


def _access(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name


class WeightAccess:
    """How a statement addresses the weights of its paths.

    `stack`: the paths' weights one after the other, as a view where they lie so, else as a copy (of shared weights,
    which are small). `blocks`: a view of weights that belong to each sample, cut into blocks of one path's size.
    `flat`: the weights as they lie; each path is found by its offset.
    """

    def __init__(self, layout: ProductLayout, group: Group) -> None:
        self.shape = group.shape("w")
        self.letters = group.letters("w")
        self.starts = [layout.weight_starts[n] for n in group.paths]
        size = math.prod(self.shape)
        low, high = min(self.starts), max(self.starts) + size
        self.low, self.count = low, (high - low) // size
        self.size = size
        in_order = [low + n * size for n in range(len(self.starts))] == self.starts
        aligned = all((start - low) % size == 0 for start in self.starts)
        self.copies = layout.spec.shared and not in_order
        self.kind = "stack" if layout.spec.shared or in_order else "blocks" if aligned else "flat"
        self.single = len(self.starts) == 1

    @property
    def places(self) -> Tensor:
        """What the statement's `L` holds for each path: its place in the stack, its block, or its offset."""
        if self.kind == "stack":
            return torch.arange(len(self.starts), device="cpu")
        starts = torch.tensor(self.starts, device="cpu")
        return (starts - self.low) // self.size if self.kind == "blocks" else starts

    def operand(self, weight: Tensor) -> Tensor:
        """The tensor `W` that the statement reads; `weight` is (numel,) or (z, numel)."""
        if self.kind == "flat":
            return weight
        if self.copies:
            parts = [weight.narrow(-1, start, self.size) for start in self.starts]
            return torch.stack(parts, -2).reshape((*weight.shape[:-1], len(parts), *self.shape))
        view = weight.narrow(-1, self.low, self.count * self.size)
        paths = () if self.single else (self.count,)
        return view.reshape((*weight.shape[:-1], *paths, *self.shape))

    def subscripts(self, place: str) -> list[str]:
        """The subscripts of `W` for a path's place, `L[k,r]` or a plain index."""
        if self.kind != "flat":
            return [*([] if self.single else [place]), *self.letters]
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        terms = [place, *(f"{s}*{x}" if s != 1 else x for s, x in zip(strides, self.letters, strict=True))]
        return [" + ".join(terms)]


class Statement:
    """One statement of a role: its text, its static tables, its program.

    Attributes:
        expression: the statement.
        group: the paths that it computes.
        rows: the entry and the component in it that each row owns; for the weights, the group's paths are the rows.
    """

    def __init__(self, layout: ProductLayout, role: str, group: Group, owned: NDArray[np.int64] | None = None) -> None:
        self.layout = layout
        self.role = role
        self.group = group
        self.mixes = group.weighted and group.mode.mixes
        self.tables: dict[str, Tensor] = {}
        self.weight = WeightAccess(layout, group) if group.weighted else None
        self._on: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        # A group that owns an entry as a whole reads a gradient of it without a table.
        self.whole = self.mixes and role == "w"
        self.rows: list[tuple[int, int]] = []
        place = self._tabulate(owned)
        self.expression = self._text(place)
        self.program: Program = compile(
            self.expression,
            sizes=self._unread(),
            facts={name: _STATIC for name, table in self.tables.items() if not table.is_floating_point()},
            # Pairs of copies (U, V) are many and regular; the rest is few numbers, which kernels write out.
            static={name: table for name, table in self.tables.items() if name not in ("U", "V")},
            options=Options(deterministic=layout.spec.deterministic),
        )

    # Tables.

    def _tabulate(self, owned: NDArray[np.int64] | None) -> str:
        """Make the static tables; returns how the text names a path's place among the weights."""
        layout, group, role = self.layout, self.group, self.role
        entries = layout.coefficients(group)
        if group.mode.pairs:
            self.tables["U"], self.tables["V"] = torch.triu_indices(
                group.muls[0], group.muls[0], 1, device="cpu"
            ).unbind()
        if role == "w" and not self.mixes:
            value, components = path_table(entries, len(group.paths))
            self._slots = self._drop("rq", value, dict(zip("xyz", components, strict=True)))
            return ""
        owner = "z" if role == "w" else role
        components = {
            layout.components[owner][number] + k: (number, k)
            for number in group.entries
            for k in range(layout.entries[owner][number].size)
        }
        rows = np.array(list(components)) if owned is None else owned
        self.rows = [components[int(row)] for row in rows]
        table = make_table(entries, NUMBER[owner], rows, by_path=group.weighted)
        return self._from_table(table, owner)

    def _from_table(self, table: Table, owner: str) -> str:
        row = _ROW[owner]
        letters = f"{row}rq" if self.group.weighted else f"{row}q"
        read = dict(zip("xyz".replace(owner, ""), (table.first, table.second), strict=True))
        self._slots = self._drop(letters, table.value, read)
        if self.role == "w" or table.path is None or self.weight is None or self.weight.single:
            return ""
        places = self.weight.places[table.path]
        if self.mixes:
            # Every path of the group reaches every component of the entry, so one row says it all.
            if self.weight.kind == "stack":
                return "r"
            self.tables["L"] = places[0].contiguous()
            return "L[r]"
        self.tables["L"] = places if "r" in self._slots else places[:, 0].contiguous()
        return f"L[{row},r]" if "r" in self._slots else f"L[{row}]"

    def _drop(self, letters: str, value: Tensor, components: Mapping[str, Tensor]) -> str:
        """Keep the tables under their names, without slots of extent 1; returns the letters of their axes."""
        kept = [axis for axis in range(len(letters)) if axis == 0 or value.shape[axis] != 1]
        shape = [value.shape[axis] for axis in kept]
        self.tables["CG"] = value.reshape(shape)
        for operand, table in components.items():
            self.tables[_TABLE[operand]] = table.reshape(shape).contiguous()
        return "".join(letters[axis] for axis in kept)

    # Text.

    def _text(self, place: str) -> str:
        role, group = self.role, self.group
        operands = [x for x in ("x", "y", "w", "z") if x != role and (x != "w" or group.weighted)]
        factors = [f"CG[{','.join(self._slots)}]", *(self._access(x, place) for x in operands)]
        return f"{self._access(role, place)} += {' * '.join(factors)}"

    def _access(self, operand: str, place: str) -> str:
        # In the statements of the gradients, the output stands for its own gradient.
        name = operand.upper() if operand != "z" or self.role == "z" else "dZ"
        if operand == self.role != "z":
            name = f"d{name}"
        if operand == "w" and self.weight is not None:
            batch = [] if self.layout.spec.shared else [self._batch("w")]
            if self.role == "w":
                return _access(name, [*batch, *(["r"] if "r" in self._slots else []), *self.weight.letters])
            return _access(name, [*batch, *self.weight.subscripts(place)])
        owner = "z" if self.whole else self.role
        component = _ROW[owner] if operand == owner else f"{_TABLE[operand]}[{','.join(self._slots)}]"
        letters = list(self.group.letters(operand))
        if self.group.mode.pairs and operand in "xy":
            letters = ["U[n]" if operand == "x" else "V[n]"]
        return _access(name, [self._batch(operand), component, *letters])

    def _batch(self, operand: str) -> str:
        if not self.layout.spec.convolution:
            return "z"
        return {"x": "Src[e]", "y": "e", "w": "e", "z": "Dst[e]"}[operand]

    def _unread(self) -> dict[str, int]:
        """Multiplicities that the result has and no factor: they repeat it."""
        group = self.group
        read = set("".join(group.letters(x) for x in others(self.role) if x != "w" or group.weighted))
        return {x: group.extents[x] for x in group.letters(self.role) if x not in read}

    # Numbers.

    @property
    def width(self) -> int:
        """Columns of the result; for the weights, of one sample."""
        if self.role == "w":
            return len(self.group.paths) * math.prod(self.group.shape("w"))
        return self.tables["CG"].shape[0] * math.prod(self.group.shape(self.role))

    def tables_on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The static tables on a device; kept."""
        key = (device, dtype)
        if key not in self._on:
            # What is kept must be of use in training too, even if the first call is not.
            with torch.inference_mode(False):
                self._on[key] = {
                    name: table.to(device, dtype) if table.is_floating_point() else table.to(device)
                    for name, table in self.tables.items()
                }
        return self._on[key]

    def out_shape(self, size: int) -> tuple[int, ...]:
        """Shape of the result for `size` rows of it."""
        group = self.group
        if self.role == "w":
            batch = () if self.layout.spec.shared else (size,)
            paths = (len(group.paths),) if "r" in self._slots else ()
            return (*batch, *paths, *group.shape("w"))
        rows = self.tables["CG"].shape[0]
        return (size, rows, *group.shape(self.role))
