"""The parts of a tensor product: representations, paths, and the groups of paths that one statement computes.

A tensor product is linear in four tensors: in1 `X`, in2 `Y`, the weight `W`, and (for its derivatives) the output's
gradient. Each can be computed from the other three, its *role*; a derivative of one role is another role. Every role
is a list of statements, one for each group of paths of one mode and equal multiplicities. So is the matrix `B` that
maps `X` to the output, which is computed from `Y` and `W`.

Two letters have two meanings each. As a role `w` is the weight and `z` the output; as an index of a statement `w` runs
over the output's copies and `z` over samples: `Z[z,K[p,w]]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.faults import check_choice
from insum_nn.locks import cached_property
from insum_nn.structure.irreps import MODES, Entry, Mode, Path, dimension, offsets, weight_offsets
from insum_nn.structure.plain_tensors import plain_tensors

__all__ = ["LAYOUTS", "NUMBER", "ROLES", "Group", "ProductLayout", "TensorProductSpec", "layout_of", "others"]

T = TypeVar("T")

ROLES = "xywz"
_OTHERS = {role: ROLES.replace(role, "") for role in ROLES} | {"b": "yw"}
# The operand's number in a path.
NUMBER = {"x": 0, "y": 1, "z": 2}
# The outer axis of an entry: its copies, as in e3nn, or its components.
LAYOUTS = ("mul_ir", "ir_mul")


def others(role: str) -> str:
    """Return the roles that a role is computed from.

    >>> others("w"), others("b")
    ('xyz', 'yw')
    """
    return _OTHERS[role]


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
        layout: order of the numbers of an entry in inputs and outputs: `"mul_ir"` (copies, components), which is
            e3nn's, or `"ir_mul"` (components, copies). Weights have one order.
        out_layout: the same for the output, where it is another.
        masked: an edge with an end of -1 is no edge; `False`: it is refused.
        options: compile options of every statement.
    """

    in1: tuple[Entry, ...]
    in2: tuple[Entry, ...]
    out: tuple[Entry, ...]
    paths: tuple[Path, ...]
    shared: bool
    convolution: bool = False
    layout: str = "mul_ir"
    out_layout: str = ""
    masked: bool = True
    options: Options = DEFAULT

    def __post_init__(self) -> None:
        for layout in (self.layout, self.out_layout or self.layout):
            check_choice("layout", layout, LAYOUTS)

    def to_json(self) -> str:
        """As text, which the registered operators carry."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return json.dumps({**asdict(self), "options": self.options.to_dict()}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> TensorProductSpec:
        """From the text of `to_json`."""
        data = json.loads(text)
        paths = tuple(Path(a, b, c, mode, w, f, tuple(shape)) for a, b, c, mode, w, f, shape in data.pop("paths"))
        in1, in2, out = (tuple(Entry(*e) for e in data.pop(name)) for name in ("in1", "in2", "out"))
        options = Options.from_dict(data.pop("options"))
        return TensorProductSpec(in1, in2, out, paths, **data, options=options)

    @property
    def weight_numel(self) -> int:
        """Weights of one sample."""
        return sum(path.numel for path in self.paths if path.weighted)

    def with_shared(self, shared: bool) -> TensorProductSpec:
        """Return the same product with shared weights, or with weights of each sample."""
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
    """

    mode: Mode
    paths: tuple[int, ...]
    extents: Mapping[str, int]
    muls: tuple[int, int, int]
    weighted: bool

    def letters(self, role: str) -> str:
        """Multiplicity indices of an operand; those of extent 1 are left out."""
        mode = self.mode
        letters = {"x": mode.in1, "y": mode.in2, "z": mode.out, "w": mode.weight}[role]
        if role == "z" and not self.weighted:
            letters = letters.replace("w", "")
        return "".join(x for x in letters if x == "n" or self.extents[x] != 1)

    def shape(self, role: str) -> tuple[int, ...]:
        """Return extents of an operand's multiplicity axes."""
        if self.mode.pairs and role in "xy":
            return (self.muls[NUMBER[role]],)
        return tuple(self.extents[x] for x in self.letters(role))


class ProductLayout:
    """Where a spec's numbers are stored, its groups of paths, and what is kept for them."""

    def __init__(self, spec: TensorProductSpec) -> None:
        self.spec = spec
        self._kept: dict[tuple[object, ...], Any] = {}
        self.entries = {"x": spec.in1, "y": spec.in2, "z": spec.out}
        self.dims = {role: dimension(entries) for role, entries in self.entries.items()} | {"w": spec.weight_numel}
        self.starts = {role: offsets(entries) for role, entries in self.entries.items()}
        self.weight_starts = weight_offsets(spec.paths)

    def keep(self, key: tuple[object, ...], build: Callable[[], T]) -> T:
        """Return what `build` makes, once for each key; plain tensors, whatever transform the first call is under."""
        found = self._kept.get(key)
        if found is None:
            with plain_tensors():
                found = self._kept[key] = build()
        return found

    def shape(self, role: str) -> tuple[int, ...]:
        """Return the shape of a sample's tensor of a role, or of `b`."""
        return tuple(self.dims[each] for each in ("xz" if role == "b" else role))

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
        return path.coefficient != 0 and 0 not in (*path.shape, *(self.entry(role, path).mul for role in "xyz"))

    def entry(self, role: str, path: Path) -> Entry:
        """Return the entry of an operand that a path connects."""
        return self.entries[role][path.ends[NUMBER[role]]]

    @cached_property
    def components(self) -> dict[str, dict[int, int]]:
        """For each operand: the first component of each entry in use, counted through entries of one multiplicity."""
        found: dict[str, dict[int, int]] = {}
        for role in "xyz":
            used = sorted({self.spec.paths[p].ends[NUMBER[role]] for p in self.live})
            totals: dict[int, int] = {}
            found[role] = {}
            for number in used:
                entry = self.entries[role][number]
                found[role][number] = totals.get(entry.mul, 0)
                totals[entry.mul] = found[role][number] + entry.size
        return found

    def columns(self, role: str, number: int) -> NDArray[np.int64]:
        """Return an entry's columns in a representation, (components, copies)."""
        entry = self.entries[role][number]
        layout = (self.spec.out_layout if role == "z" else "") or self.spec.layout
        own = self.starts[role][number] + np.arange(entry.dim)
        return own.reshape(entry.mul, entry.size).T if layout == "mul_ir" else own.reshape(entry.size, entry.mul)

    def packed_columns(self, role: str, mul: int) -> NDArray[np.int64]:
        """Return the columns of all entries in use of one multiplicity, entry by entry, copies innermost."""
        used = [n for n in self.components[role] if self.entries[role][n].mul == mul]
        return np.concatenate([self.columns(role, n).reshape(-1) for n in used])

    def packing(self, role: str, mul: int, device: torch.device) -> tuple[int | None, Tensor]:
        """Return how entries of one multiplicity are packed: next to each other, copies innermost.

        Returns:
            The first column if they are so already, else `None`; and the columns in their new order.
        """

        def build() -> tuple[int | None, Tensor]:
            order = self.packed_columns(role, mul)
            start = int(order[0]) if np.array_equal(order, order[0] + np.arange(order.size)) else None
            return start, torch.from_numpy(order).to(device)

        return self.keep(("pack", role, mul, device), build)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The paths, divided by mode and multiplicities."""
        classes: dict[tuple[str, bool, tuple[int, int, int]], list[int]] = {}
        for number in self.live:
            path = self.spec.paths[number]
            a, b, c = (self.entry(role, path).mul for role in "xyz")
            classes.setdefault((path.mode, path.weighted, (a, b, c)), []).append(number)
        return tuple(
            Group(MODES[mode], tuple(numbers), Mode.extents(*muls), muls, weighted)
            for (mode, weighted, muls), numbers in classes.items()
        )


@lru_cache(maxsize=256)
def layout_of(text: str) -> ProductLayout:
    """Return the layout of a spec's JSON; remembered."""
    return ProductLayout(TensorProductSpec.from_json(text))
