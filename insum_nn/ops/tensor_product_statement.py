"""The statements of a tensor product: their text, and the static tables that they read."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.api import Program, compile_built
from insum_nn.facts import IndexFacts
from insum_nn.ops.tensor_product_spec import NUMBER, Group, ProductLayout, others
from insum_nn.structure.clebsch_gordan import Table, make_table, path_table
from insum_nn.structure.constants import plain_tensors

__all__ = ["Feed", "Reading", "Statement", "WeightAccess"]

# An operand's axis of components in a statement, and the table that selects them.
_ROW = {"x": "i", "y": "j", "z": "k", "w": "r"}
_TABLE = {"x": "I", "y": "J", "z": "K", "g": "P"}
_STATIC = IndexFacts(masked=False, proven=True)
# The ends of edges, where an entry of -1 is a mistake.
_ENDS = {"Dst": IndexFacts(masked=False), "Src": IndexFacts(masked=False)}


def _access(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name


class WeightAccess:
    """How a statement addresses the weights of its paths.

    `stack`: the paths' weights one after the other, as a view where they lie so, else as a copy (of shared weights,
    which are small). `blocks`: a view of the weights, cut into blocks of one path's size. `flat`: the weights as they
    lie; each path is found by its offset. A fused group never copies.
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
        self.copies = layout.spec.shared and not in_order and not group.fused
        self.kind = "stack" if self.copies or in_order else "blocks" if aligned else "flat"
        self.single = len(self.starts) == 1
        self.view = self.shape if self.single else (self.count, *self.shape)

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
        length = self.count * self.size
        view = weight if length == weight.shape[-1] else weight.narrow(-1, self.low, length)
        return view.reshape((*weight.shape[:-1], *self.view))

    def subscripts(self, place: str) -> list[str]:
        """The subscripts of `W` for a path's place, `L[k,r]` or a plain index."""
        if self.kind != "flat":
            return [*([] if self.single else [place]), *self.letters]
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        terms = [place, *(f"{s}*{x}" if s != 1 else x for s, x in zip(strides, self.letters, strict=True))]
        return [" + ".join(terms)]


class Reading(ABC):
    """A compiled statement and its static tables.

    Attributes:
        layout: where the spec's numbers lie.
        group: the paths that it computes.
        tables: its static tables, by name.
        weight: how it reads the weights; `None`: it does not.
        reads: the operand that each of its tensors is made of, by the tensor's name; without the weights.
        expression: the statement.
        program: compiled.
    """

    def __init__(self, layout: ProductLayout, group: Group) -> None:
        self.layout = layout
        self.group = group
        self.tables: dict[str, Tensor] = {}
        self.weight: WeightAccess | None = None
        self.reads: dict[str, str] = {}
        self._on: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}

    def _compile(self, expression: str, sizes: Mapping[str, int]) -> None:
        self.expression = expression
        facts = {name: _STATIC for name, table in self.tables.items() if not table.is_floating_point()}
        if not self.layout.spec.masked:
            facts |= {name: _ENDS[name] for name in self.edges}
        self.program: Program = compile_built(
            expression,
            sizes=sizes,
            facts=facts,
            # Pairs of copies (U, V) are many and regular; the rest is few numbers, which kernels write out.
            static={name: table for name, table in self.tables.items() if name not in ("U", "V")},
            options=self.layout.spec.options,
        )

    @property
    def edges(self) -> tuple[str, ...]:
        """The tensors of edges' ends that it reads."""
        return tuple(name for name in ("Dst", "Src") if f"{name}[e]" in self.expression)

    def batch(self, operand: str) -> str:
        """The subscript of an operand's rows."""
        if not self.layout.spec.convolution:
            return "z"
        return {"x": "Src[e]", "z": "Dst[e]"}.get(operand, "e")

    def tables_on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The static tables on a device; kept."""
        key = (device, dtype)
        if key not in self._on:
            with plain_tensors():
                self._on[key] = {
                    name: table.to(device, dtype) if table.is_floating_point() else table.to(device)
                    for name, table in self.tables.items()
                }
        return self._on[key]

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers per row of the result; for the weights, of one sample."""

    @abstractmethod
    def out_shape(self, size: int) -> tuple[int, ...]:
        """Shape of the result for `size` rows of it."""


class Feed(Reading):
    """What the weights make of the output's gradient, path by path: the first of two steps to the gradient of `y`.

        G[z,p,u,v] += dZ[z,K[p],w] * W[L[p],u,v,w]

    `p` counts pairs of a path and a component that it ends in. It sums over `w` by a matrix product; what is left for
    the second step, the coefficients and `u`, is short.
    """

    def __init__(self, layout: ProductLayout, group: Group) -> None:
        super().__init__(layout, group)
        entries = layout.coefficients(group)
        self.pairs = np.unique(np.stack([entries.path, entries.component[NUMBER["z"]]]), axis=1)
        self.weight = weight = WeightAccess(layout, group)
        self.tables["K"] = torch.from_numpy(self.pairs[1].copy())
        if not weight.single:
            self.tables["L"] = weight.places[torch.from_numpy(self.pairs[0].copy())]
        self.reads = {"dZ": "z"}
        self.letters = [x for x in weight.letters if x != "w"]
        self.shape = tuple(group.extents[x] for x in self.letters)
        read = [_access("dZ", [self.batch("z"), "K[p]", "w"]), _access("W", weight.subscripts("L[p]"))]
        self._compile(f"{_access('G', [self.batch('g'), 'p', *self.letters])} += {' * '.join(read)}", {})

    @property
    def width(self) -> int:
        """Numbers per row of the result."""
        return self.pairs.shape[1] * math.prod(self.shape)

    def place(self, path: Tensor, component: Tensor) -> Tensor:
        """The pairs of paths and components."""
        known = np.zeros((int(self.pairs[0].max()) + 1, int(self.pairs[1].max()) + 1), np.int64)
        known[self.pairs[0], self.pairs[1]] = np.arange(self.pairs.shape[1])
        return torch.from_numpy(known)[path, component]

    def out_shape(self, size: int) -> tuple[int, ...]:
        """(rows, pairs, copies...)."""
        return (size, self.pairs.shape[1], *self.shape)


class Statement(Reading):
    """One statement of a role: its text, its static tables, its program.

    Attributes:
        role: what it computes.
        rows: the entry and the component in it of each row; for the weights, the group's paths are the rows.
        mixes: it writes one entry, all of whose components every path of the group reaches.
        whole: it reads the components of that entry in their order, without a table.
        feed: what makes `G`, which it reads in the place of the weights and the output's gradient.
        in_place: it writes the output as a representation lies: a component of all copies is a start and a step. Rows
            that are written once are not worth bringing side by side.
    """

    def __init__(
        self,
        layout: ProductLayout,
        role: str,
        group: Group,
        selected: NDArray[np.int64] | None = None,
        feed: Feed | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(layout, group)
        self.role = role
        self.feed = feed
        # Where multiplicities mix, a component of all copies is more than that.
        single = not group.mode.mixes and len(group.letters("z")) == 1
        self.in_place = in_place and role == "z" and layout.spec.convolution and single
        separate = role == "w" and group.fused
        self.mixes = group.weighted and group.mode.mixes and len(group.entries) == 1 and not separate and feed is None
        self.weight = WeightAccess(layout, group) if group.weighted and feed is None else None
        # A group that writes an entry as a whole reads a gradient of it without a table.
        self.whole = self.mixes and role == "w"
        self.rows: list[tuple[int, int]] = []
        operands = [x for x in "xyz" if x != role and (x != "z" or feed is None)]
        self.reads = {self._name(x): x for x in operands}
        place = self._tabulate(selected)
        self._compile(self._text(place), self._unread())

    # Tables.

    def _cells(self) -> Tensor:
        """(rows, copies) the cells of the output's rows in a representation."""
        return torch.from_numpy(np.stack([self.layout.columns("z", number)[m] for number, m in self.rows]))

    def _tabulate(self, selected: NDArray[np.int64] | None) -> str:
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
        row_role = "z" if role == "w" else role
        components = {
            layout.components[row_role][number] + k: (number, k)
            for number in group.entries
            for k in range(layout.entries[row_role][number].size)
        }
        rows = np.array(list(components)) if selected is None else selected
        self.rows = [components[int(row)] for row in rows]
        table = make_table(entries, NUMBER[row_role], rows, by_path=group.weighted)
        return self._from_table(table, row_role)

    def _from_table(self, table: Table, row_role: str) -> str:
        row = _ROW[row_role]
        letters = f"{row}rq" if self.group.weighted else f"{row}q"
        read = dict(zip("xyz".replace(row_role, ""), (table.first, table.second), strict=True))
        if self.feed is not None and table.path is not None:
            read["g"] = self.feed.place(table.path[:, :, None], read.pop("z"))
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
        if self.in_place:
            self.tables[_TABLE["z"]] = self._cells()
        return "".join(letters[axis] for axis in kept)

    # Text.

    def _text(self, place: str) -> str:
        role, group = self.role, self.group
        operands = [x for x in "xywz" if x != role and (x != "w" or group.weighted)]
        if self.feed is not None:
            operands = ["x", "g"]
        factors = [f"CG[{','.join(self._slots)}]", *(self._access(x, place) for x in operands)]
        return f"{self._access(role, place)} += {' * '.join(factors)}"

    def _name(self, operand: str) -> str:
        """An operand's tensor; in the statements of the gradients, the output stands for its own gradient."""
        gradient = operand == self.role != "z" or (operand == "z" != self.role)
        return f"{'d' if gradient else ''}{operand.upper()}"

    def _access(self, operand: str, place: str) -> str:
        name = self._name(operand)
        if operand == "w" and self.weight is not None:
            batch = [] if self.layout.spec.shared else [self.batch("w")]
            if self.role == "w":
                return _access(name, [*batch, *(["r"] if "r" in self._slots else []), *self.weight.letters])
            return _access(name, [*batch, *self.weight.subscripts(place)])
        row_role = "z" if self.whole else self.role
        component = _ROW[row_role] if operand == row_role else f"{_TABLE[operand]}[{','.join(self._slots)}]"
        if operand == "g" and self.feed is not None:
            return _access(name, [self.batch("g"), component, *self.feed.letters])
        if operand == "z" and self.in_place:
            return f"{name}[{self.batch('z')},{_TABLE['z']}[{_ROW['z']},{self.group.letters('z')}]]"
        letters = list(self.group.letters(operand))
        if self.group.mode.pairs and operand in "xy":
            letters = ["U[n]" if operand == "x" else "V[n]"]
        return _access(name, [self.batch(operand), component, *letters])

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

    @property
    def between(self) -> int:
        """Numbers for each row between two products of library calls: paths, components, and the fewest copies."""
        group, out = self.group, set(self.group.letters(self.role))
        given = [set(group.letters(x)) for x in others(self.role) if x != "w" or group.weighted]
        # Two operands meet first; what neither the third nor the result has is summed.
        least = min(
            math.prod(group.extents[x] for x in (a | b) & out.union(*(c for c in given if c is not a and c is not b)))
            for a, b in itertools.combinations(given, 2)
        )
        slots = zip(self._slots, self.tables["CG"].shape, strict=True)
        # A path's coefficients are summed by the first product.
        return least * math.prod(extent for letter, extent in slots if letter != "q")

    def out_shape(self, size: int) -> tuple[int, ...]:
        """(rows, components, copies...), or for the weights (rows if not shared, paths, copies...)."""
        group = self.group
        if self.role == "w":
            batch = () if self.layout.spec.shared else (size,)
            paths = (len(group.paths),) if "r" in self._slots else ()
            return (*batch, *paths, *group.shape("w"))
        if self.in_place:
            return (size, self.layout.dims["z"])
        rows = self.tables["CG"].shape[0]
        return (size, rows, *group.shape(self.role))
