"""The statements of a tensor product: what is grouped together, and which static tables they read.

A tensor product is linear in four tensors: in1 `X`, in2 `Y`, the weight `W`, and (for its derivatives) the output's
gradient. Each can be computed from the other three, its *role*; a derivative of one role is another role. Every role
is a list of statements in which each component of the result has one owner, so components are never scattered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.api import Program, compile
from insum_nn.compiler.options import Options
from insum_nn.facts import IndexFacts
from insum_nn.structure.clebsch_gordan import Entries, Table, divide, make_table, path_table
from insum_nn.structure.irreps import MODES, Entry, Mode, Path, dimension, offsets, weight_offsets

__all__ = ["ROLES", "Form", "Group", "TensorProductSpec", "form_of", "others"]

ROLES = "xywz"
# The operand's number in a path, its axis of components in a statement, and the table that selects them.
_NUMBER = {"x": 0, "y": 1, "z": 2}
_ROW = {"x": "i", "y": "j", "z": "k", "w": "r"}
_TABLE = {"x": "I", "y": "J", "z": "K"}
_STATIC = IndexFacts(masked=False, proven=True)


def others(role: str) -> str:
    """The roles that a role is computed from.

    >>> others("w")
    'xyz'
    """
    return ROLES.replace(role, "")


@dataclass(frozen=True)
class TensorProductSpec:
    """A tensor product without its numbers; converts to JSON and back.

    Attributes:
        in1: entries of the first input.
        in2: entries of the second input.
        out: entries of the output.
        paths: the paths, in the order of their weights.
        shared: one weight for all samples, rather than one each.
        convolution: gather the first input along edges, and add the results up at their receivers.
        deterministic: the same bits at every run.
    """

    in1: tuple[Entry, ...]
    in2: tuple[Entry, ...]
    out: tuple[Entry, ...]
    paths: tuple[Path, ...]
    shared: bool
    convolution: bool = False
    deterministic: bool = False

    def to_json(self) -> str:
        """As text, which the registered operators carry."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> TensorProductSpec:
        """From the text of `to_json`."""
        data = json.loads(text)
        paths = tuple(Path(*values[:6], tuple(values[6])) for values in data.pop("paths"))
        in1, in2, out = (tuple(Entry(*e) for e in data.pop(name)) for name in ("in1", "in2", "out"))
        return TensorProductSpec(in1, in2, out, paths, **data)

    @property
    def weight_numel(self) -> int:
        """Weights of one sample."""
        return sum(path.numel for path in self.paths if path.weighted)

    def with_shared(self, shared: bool) -> TensorProductSpec:
        """The same product with shared weights, or with weights of each sample."""
        return replace(self, shared=shared)


@dataclass(frozen=True, eq=False)
class Group:
    """Paths of one mode, with equal multiplicities, that one statement per role computes.

    Attributes:
        mode: connection mode.
        paths: numbers of the paths in the spec.
        extents: extent of each multiplicity index.
        muls: multiplicity of the entries of x, y and z.
        weighted: the paths have weights.
        entries: entries of the output whose components the statement owns, for the role that the group belongs to.
    """

    mode: Mode
    paths: tuple[int, ...]
    extents: Mapping[str, int]
    muls: tuple[int, int, int]
    weighted: bool
    entries: tuple[int, ...]

    def letters(self, role: str) -> str:
        """Multiplicity indices of an operand; those of extent 1 are left out."""
        mode = self.mode
        letters = {"x": mode.in1, "y": mode.in2, "z": mode.out, "w": mode.weight}[role]
        if role == "z" and not self.weighted:
            letters = letters.replace("w", "")
        return "".join(x for x in letters if x == "n" or self.extents[x] != 1)

    def shape(self, role: str) -> tuple[int, ...]:
        """Extents of an operand's multiplicity axes."""
        if self.mode.pairs and role in "xy":
            return (self.muls[_NUMBER[role]],)
        return tuple(self.extents[x] for x in self.letters(role))


class Form:
    """The groups, tables and programs of a spec."""

    def __init__(self, spec: TensorProductSpec) -> None:
        self.spec = spec
        self.entries = {"x": spec.in1, "y": spec.in2, "z": spec.out}
        self.dims = {role: dimension(entries) for role, entries in self.entries.items()}
        self.starts = {role: offsets(entries) for role, entries in self.entries.items()}
        self.weight_starts = weight_offsets(spec.paths)
        self._statements: dict[tuple[str, bool], tuple[Statement, ...]] = {}
        self._orders: dict[tuple[object, ...], Any] = {}

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Paths that contribute anything."""
        return tuple(number for number, path in enumerate(self.spec.paths) if self._contributes(path))

    @cached_property
    def linear_text(self) -> str:
        """The spec without the paths that have no weights: the part that is linear in the weights."""
        paths = tuple(path if path.weighted else path._replace(coefficient=0.0) for path in self.spec.paths)
        return replace(self.spec, paths=paths).to_json()

    def _contributes(self, path: Path) -> bool:
        muls = (self.entry("x", path).mul, self.entry("y", path).mul, self.entry("z", path).mul)
        return path.coefficient != 0 and 0 not in path.shape and 0 not in muls

    def entry(self, role: str, path: Path) -> Entry:
        """The entry of an operand that a path connects."""
        return self.entries[role][path[_NUMBER[role]]]

    @cached_property
    def components(self) -> dict[str, dict[int, int]]:
        """For each operand: the first component of each entry in use, counted through entries of one multiplicity."""
        found: dict[str, dict[int, int]] = {}
        for role in "xyz":
            used = sorted({self.spec.paths[p][_NUMBER[role]] for p in self.live})
            totals: dict[int, int] = {}
            found[role] = {}
            for number in used:
                entry = self.entries[role][number]
                found[role][number] = totals.get(entry.mul, 0)
                totals[entry.mul] = found[role][number] + entry.size
        return found

    def packed_entries(self, role: str, mul: int) -> tuple[int, ...]:
        """Entries in use of one multiplicity."""
        return tuple(n for n in self.components[role] if self.entries[role][n].mul == mul)

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
        owner = entries.component[_NUMBER[role]]
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

    def groups(self, role: str) -> Iterator[Group]:
        """Divide the paths: by mode and multiplicities; where multiplicities are mixed, also by the owner's entry.

        A path that mixes multiplicities is a matrix product. Those that end in one entry add up in one product.
        """
        classes: dict[tuple[object, ...], list[int]] = {}
        for number in self.live:
            path = self.spec.paths[number]
            muls = tuple(self.entry(r, path).mul for r in "xyz")
            key: tuple[object, ...] = (path.mode, path.weighted, *muls)
            if _mixes(path):
                key = (*key, path[_NUMBER["z" if role == "w" else role]])
            classes.setdefault(key, []).append(number)
        for numbers in classes.values():
            path = self.spec.paths[numbers[0]]
            mode = MODES[path.mode]
            a, b, c = (self.entry(r, path).mul for r in "xyz")
            extents = {"u": a, "v": b, "w": c, "n": a * (a - 1) // 2}
            owner = "z" if role == "w" else role
            owned = tuple(sorted({self.spec.paths[n][_NUMBER[owner]] for n in numbers}))
            yield Group(mode, tuple(numbers), extents, (a, b, c), path.weighted, owned)

    def coefficients(self, group: Group) -> Entries:
        """The group's Clebsch-Gordan entries."""
        paths = [self.spec.paths[n] for n in group.paths]
        degrees = [(self.entry("x", p).l, self.entry("y", p).l, self.entry("z", p).l) for p in paths]
        starts = [
            (self.components["x"][p.i_in1], self.components["y"][p.i_in2], self.components["z"][p.i_out]) for p in paths
        ]
        return Entries.from_paths(degrees, starts, [p.coefficient for p in paths])


def _mixes(path: Path) -> bool:
    return path.weighted and MODES[path.mode].mixes


def _access(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}[{','.join(subscripts)}]" if subscripts else name


@lru_cache(maxsize=256)
def form_of(text: str) -> Form:
    """The form of a spec's JSON; remembered."""
    return Form(TensorProductSpec.from_json(text))


class WeightAccess:
    """How a statement addresses the weights of its paths.

    `stack`: the paths' weights one after the other, as a view where they lie so, else as a copy (of shared weights,
    which are small). `blocks`: a view of weights that belong to each sample, cut into blocks of one path's size.
    `flat`: the weights as they lie; each path is found by its offset.
    """

    def __init__(self, form: Form, group: Group) -> None:
        self.shape = group.shape("w")
        self.letters = group.letters("w")
        self.starts = [form.weight_starts[n] for n in group.paths]
        size = math.prod(self.shape)
        low, high = min(self.starts), max(self.starts) + size
        self.low, self.count = low, (high - low) // size
        self.size = size
        in_order = [low + n * size for n in range(len(self.starts))] == self.starts
        aligned = all((start - low) % size == 0 for start in self.starts)
        self.copies = form.spec.shared and not in_order
        self.kind = "stack" if form.spec.shared or in_order else "blocks" if aligned else "flat"
        self.single = len(self.starts) == 1

    @property
    def places(self) -> Tensor:
        """What the statement's `L` holds for each path: its place in the stack, its block, or its offset."""
        if self.kind == "stack":
            return torch.arange(len(self.starts))
        starts = torch.tensor(self.starts)
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

    def __init__(self, form: Form, role: str, group: Group, owned: NDArray[np.int64] | None = None) -> None:
        self.form = form
        self.role = role
        self.group = group
        self.mixes = group.weighted and group.mode.mixes
        self.tables: dict[str, Tensor] = {}
        self.weight = WeightAccess(form, group) if group.weighted else None
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
            options=Options(deterministic=form.spec.deterministic),
        )

    # Tables.

    def _tabulate(self, owned: NDArray[np.int64] | None) -> str:
        """Make the static tables; returns how the text names a path's place among the weights."""
        form, group, role = self.form, self.group, self.role
        entries = form.coefficients(group)
        if group.mode.pairs:
            self.tables["U"], self.tables["V"] = torch.triu_indices(group.muls[0], group.muls[0], 1).unbind()
        if role == "w" and not self.mixes:
            value, components = path_table(entries, len(group.paths))
            self._slots = self._drop("rq", value, dict(zip("xyz", components, strict=True)))
            return ""
        owner = "z" if role == "w" else role
        components = {
            form.components[owner][number] + k: (number, k)
            for number in group.entries
            for k in range(form.entries[owner][number].size)
        }
        rows = np.array(list(components)) if owned is None else owned
        self.rows = [components[int(row)] for row in rows]
        table = make_table(entries, _NUMBER[owner], rows, by_path=group.weighted)
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
        kept = [axis for axis, x in enumerate(letters) if axis == 0 or value.shape[axis] != 1]
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
        if operand == "w":
            assert self.weight is not None
            batch = [] if self.form.spec.shared else [self._batch("w")]
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
        if not self.form.spec.convolution:
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
            self._on[key] = {
                name: table.to(device, dtype) if table.is_floating_point() else table.to(device)
                for name, table in self.tables.items()
            }
        return self._on[key]

    def out_shape(self, size: int) -> tuple[int, ...]:
        """Shape of the result for `size` rows of it."""
        group = self.group
        if self.role == "w":
            batch = () if self.form.spec.shared else (size,)
            paths = (len(group.paths),) if "r" in self._slots else ()
            return (*batch, *paths, *group.shape("w"))
        rows = self.tables["CG"].shape[0]
        return (size, rows, *group.shape(self.role))
