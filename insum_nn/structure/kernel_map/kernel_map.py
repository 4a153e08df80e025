"""Kernel maps: which input voxel meets which output voxel under which kernel offset.

A map holds triples (offset, output row, input row), in two forms: grouped by offset into groups of equal length, so
that a whole group shares one slice of the weights; and as a table with a column for each output. Whichever the builder
makes, the other is made from it at the first use. All is done on the device of the coordinates, by sorting keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum_nn.errors import InsumFormatError, InsumRangeError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map.geometry import ConvAlgo, Geometry
from insum_nn.structure.kernel_map.tables import (
    Groups,
    NeighbourTable,
    Pairs,
    groups_of_table,
    list_of_groups,
    list_of_table,
    neighbour_rows,
    order_by_mask,
)
from insum_nn.structure.plain_tensors import plain_integers
from insum_nn.structure.transfers import read_later

__all__ = ["FACTS", "KernelMap"]

Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False, repr=False)
class KernelMap:
    """A kernel map, grouped by offset.

        Out[OutIdx[g,q],d] += In[InIdx[g,q],c] * W[Off[g],c,d]

    Laws: `Off` ascends; groups without a used slot, which a map has that was traced, stand last; a slot is unused (-1)
    in `InIdx` exactly where it is in `OutIdx`; in a group, and over the groups of one offset, outputs stand at most
    once, inputs too. Used slots of one offset ascend by output row.

    `of_groups` and `of_table` make a map.

    Attributes:
        inputs: the voxels that are read, n of them.
        outputs: the voxels that are written, m of them.
        geometry: the kernel's movement.
        inverted: the map of another one read backwards.

    >>> sites = Coordinates(torch.tensor([[0, 0], [0, 1], [0, 3]], dtype=torch.int32), (4,), 1)
    >>> from insum_nn.structure.kernel_map.build import build_kernel_map
    >>> near = build_kernel_map(sites, Geometry("subm", (3,), (1,), (1,), (1,), (0,)))
    >>> near.counts, near.neighbours.tolist()
    ((1, 3, 1), [[-1, 0, -1], [0, 1, 2], [1, -1, -1]])
    """

    inputs: Coordinates
    outputs: Coordinates
    geometry: Geometry
    inverted: bool = False
    # The map and what was computed from it, by name and direction; shared with the inverse. Holds "groups" or "table"
    # of the direction that is not inverted from the beginning.
    _cache: dict[tuple[str, bool], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_groups(cls, inputs: Coordinates, outputs: Coordinates, geometry: Geometry, groups: Groups) -> KernelMap:
        """Return the map of grouped pairs."""
        return cls(inputs, outputs, geometry, _cache={("groups", False): groups})

    @classmethod
    def of_table(
        cls,
        inputs: Coordinates,
        outputs: Coordinates,
        geometry: Geometry,
        table: NeighbourTable,
        counts: tuple[int, ...] | None = None,
    ) -> KernelMap:
        """Return the map of a table of neighbours; `counts`: the pairs of each offset, where they are known."""
        cache: dict[tuple[str, bool], Any] = {("table", False): table}
        if counts is not None:
            cache["counts", False] = counts
        return cls(inputs, outputs, geometry, _cache=cache)

    def __repr__(self) -> str:
        return (
            f"KernelMap({self.geometry.kind}{', inverted' if self.inverted else ''}, inputs={self.num_inputs}, "
            f"outputs={self.num_outputs}, offsets={self.geometry.volume}, pairs={self.num_pairs})"
        )

    @property
    def num_inputs(self) -> int:
        """Rows of the features that are read."""
        return self.inputs.indices.shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows of the result."""
        return self.outputs.indices.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the map is stored."""
        return self.inputs.indices.device

    def _kept(self, name: str, make: Callable[[], Kept], *, both: bool = False) -> Kept:
        """Return what is derived from the map, made at its first use; `both`: one for both directions.

        Ordinary tensors count their changes, so that a compiler can keep what it makes of them.
        """
        key = name, self.inverted and not both
        found: Kept | None = self._cache.get(key)
        if found is None:
            found = self._cache[key] = plain_integers(make, self.inputs.indices)
        return found

    @property
    def _groups(self) -> Groups:
        """Pairs in groups, of the direction that is not inverted."""
        groups = self._cache.get(("groups", False))
        if groups is None:
            near = self._cache["table", False].neighbours
            groups = self._cache["groups", False] = groups_of_table(near, self.counts if self._counts_first() else None)
        return groups

    @property
    def offset(self) -> Tensor:
        """`Off`, (g,) int32: place of the kernel cell, row by row."""
        return self._groups.offset

    @property
    def in_index(self) -> Tensor:
        """`InIdx`, (g, q) int32; -1 in unused slots."""
        return self._groups.out_index if self.inverted else self._groups.in_index

    @property
    def out_index(self) -> Tensor:
        """`OutIdx`, (g, q) int32; -1 in unused slots."""
        return self._groups.in_index if self.inverted else self._groups.out_index

    @property
    def filled(self) -> Tensor:
        """(o,) int64: pairs of each offset; `counts` as numbers."""
        return self.lengths.long()

    @property
    def lengths(self) -> Tensor:
        """`filled` in int32 or int64."""
        groups = self._cache.get(("groups", False))
        if groups is not None:
            return groups.filled
        return self._kept("lengths", lambda: self._cache["table", False].counts, both=True)

    @property
    def counts(self) -> tuple[int, ...]:
        """Pairs of each offset; read from the device once, where the builder did not have to."""
        found = self._cache.get(("counts", False))
        if type(found) is tuple:
            return found
        groups = self._cache.get(("groups", False))
        if groups is not None and groups.counts is not None:
            return groups.counts
        self.send_counts()
        found = self._cache["counts", False] = tuple(self._cache["counts", False]())
        return found

    def send_counts(self) -> None:
        """Have `counts` sent to the host, so that who asks for them later does not wait for what was queued since."""
        if ("counts", False) not in self._cache:
            self._kept("counts", lambda: read_later(self.lengths), both=True)

    def _counts_first(self) -> bool:
        """Return whether to read the pair counts before the pairs, as on a GPU; on a CPU they come with the pairs."""
        return not torch.compiler.is_compiling() and self.device.type != "cpu"

    @property
    def num_pairs(self) -> int:
        """Used slots."""
        return sum(self.counts)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The index tensors by their names in expressions."""
        return {"Off": self.offset, "InIdx": self.in_index, "OutIdx": self.out_index}

    @property
    def pair_list(self) -> Mapping[str, Tensor]:
        """Every pair once, ascending by offset: `Off`, `OutIdx`, `InIdx`, (p,) int32; kept once built."""
        return self._kept("list", self._pair_list)

    def _pair_list(self) -> Mapping[str, Tensor]:
        if self.inverted:
            cached = self.inverse.pair_list
            return {"Off": cached["Off"], "OutIdx": cached["InIdx"], "InIdx": cached["OutIdx"]}
        groups = self._cache.get(("groups", False))
        if groups is not None:
            return list_of_groups(groups)
        table: NeighbourTable = self._cache["table", False]
        return table.pair_list(sum(self.counts)) if self._counts_first() else list_of_table(table.neighbours)

    @property
    def calls(self) -> dict[Any, Any]:
        """What operators keep with the map, of this direction."""
        return self._cache.setdefault(("calls", self.inverted), {})

    @property
    def inverse(self) -> KernelMap:
        """The map with inputs and outputs exchanged; shares its tensors."""
        return KernelMap(self.outputs, self.inputs, self.geometry, not self.inverted, self._cache)

    @property
    def pairs(self) -> Pairs:
        """The triples of used slots, in stored order; reads the device."""
        used = self.in_index >= 0
        offset = self.offset.long()[:, None].expand(self.in_index.shape)
        return Pairs(offset[used], self.out_index[used].long(), self.in_index[used].long())

    @property
    def neighbours(self) -> Tensor:
        """(o, m) int32: the input row that each output row meets at each offset, or -1; kept once built."""
        rows = self._cache.get(("neighbours", self.inverted))
        if rows is None:
            rows = self._neighbours() if ("groups", False) in self._cache else self.table.neighbours
            self._cache["neighbours", self.inverted] = rows
        return rows

    def _neighbours(self) -> Tensor:
        return neighbour_rows(self.offset, self.in_index, self.out_index, self.geometry.volume, self.num_outputs)

    @property
    def table(self) -> NeighbourTable:
        """`neighbours` with an order of the outputs in which those of like offsets are together; kept once built.

        `map.inverse.table` is the same for the transposed direction, whose owners are the inputs.
        """
        return self._kept("table", self._table)

    @property
    def inverse_table(self) -> NeighbourTable:
        """`map.inverse.table`."""
        found = self._cache.get(("table", not self.inverted))
        return self.inverse.table if found is None else found

    def _table(self) -> NeighbourTable:
        cached = self._cache.get(("table", not self.inverted))
        if self.inverted and self.geometry.is_mirrored:
            return (self.inverse.table if cached is None else cached).mirrored()
        if cached is not None:
            return order_by_mask(cached.exchanged(self.num_outputs))
        rows = self._cache.get(("neighbours", self.inverted))
        return order_by_mask(self._neighbours() if rows is None else rows)

    def output_counts(self, dtype: torch.dtype) -> Tensor:
        """Return the number of pairs of each output voxel, (m,); at least one, except in submanifold maps.

        Of each input voxel: `map.inverse.output_counts`.
        """
        return self._kept("output_counts", self._output_counts).to(dtype)

    def _output_counts(self) -> Tensor:
        if ("groups", False) not in self._cache:
            return (self.neighbours >= 0).sum(0)
        # A slot that is not used counts into a place of its own, after the last.
        flat = self.out_index.reshape(-1).long()
        place = torch.where(flat >= 0, flat, self.num_outputs)
        zeros = torch.zeros(self.num_outputs + 1, dtype=torch.int64, device=flat.device)
        return zeros.scatter_add_(0, place, torch.ones_like(place))[: self.num_outputs]

    def validate(self) -> None:
        """Prove the laws of the map against its values; reads the device. What was derived from it is forgotten.

        Raises:
            InsumRangeError: an index lies outside.
            InsumFormatError: another law is broken.
        """
        first = ("groups", False) if ("groups", False) in self._cache else ("table", False)
        for key in [key for key in self._cache if key != first]:
            del self._cache[key]
        extents = {"offset": self.geometry.volume, "in_index": self.num_inputs, "out_index": self.num_outputs}
        for name, extent in extents.items():
            tensor: Tensor = getattr(self, name)
            low = 0 if name == "offset" else -1
            if tensor.numel() and (int(tensor.min()) < low or int(tensor.max()) >= extent):
                raise InsumRangeError(
                    f"kernel map: '{name}' points outside",
                    details=[f"expected {low} <= {name} < {extent}; got {int(tensor.min())} to {int(tensor.max())}"],
                    fix="rebuild the map with build_kernel_map.",
                    field=name,
                    expected=extent,
                )
        pairs = self.pairs
        keys = [
            pairs.offset * max(1, self.num_outputs) + pairs.output,
            pairs.offset * max(1, self.num_inputs) + pairs.input,
        ]
        laws = {
            "offsets ascend": bool((self.offset[1:] >= self.offset[:-1]).all()),
            "a slot is unused in both index tensors or in none": torch.equal(self.in_index < 0, self.out_index < 0),
            "groups without a pair stand last": bool(((self.in_index >= 0).any(1).diff().int() <= 0).all()),
            "counts are those of the offsets": torch.equal(
                torch.bincount(pairs.offset, minlength=self.geometry.volume), self.filled
            ),
            "a voxel stands once at each offset": all(torch.unique(key).numel() == key.numel() for key in keys),
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise InsumFormatError(
                "kernel map: a law is broken",
                details=[f"expected: {law}" for law in broken],
                fix="rebuild the map with build_kernel_map.",
                laws=tuple(broken),
            )

    # Names that callers of spconv's IndiceData read.

    @property
    def indices(self) -> Tensor:
        """Voxels of the layer's input, (n, 1 + d)."""
        return self.inputs.indices

    @property
    def out_indices(self) -> Tensor:
        """Voxels of the layer's output, (m, 1 + d)."""
        return self.outputs.indices

    @property
    def spatial_shape(self) -> list[int]:
        """Spatial shape of the layer's input."""
        return list(self.inputs.spatial_shape)

    @property
    def out_spatial_shape(self) -> list[int]:
        """Spatial shape of the layer's output."""
        return list(self.outputs.spatial_shape)

    @property
    def is_subm(self) -> bool:
        """Whether outputs are the inputs' voxels."""
        return self.geometry.kind == "subm"

    @property
    def ksize(self) -> list[int]:
        """Kernel size."""
        return list(self.geometry.kernel_size)

    @property
    def stride(self) -> list[int]:
        """Stride."""
        return list(self.geometry.stride)

    @property
    def padding(self) -> list[int]:
        """Padding."""
        return list(self.geometry.padding)

    @property
    def dilation(self) -> list[int]:
        """Dilation."""
        return list(self.geometry.dilation)

    @property
    def algo(self) -> ConvAlgo:
        """The way that has pairs in lists."""
        return ConvAlgo.Native

    @property
    def voxel_num(self) -> None:
        """Not kept."""

    @property
    def indice_pair_num(self) -> Tensor:
        """(o,) int32: pairs of each offset."""
        return self.filled.int()

    @property
    def indice_pairs(self) -> Tensor:
        """(2, o, n) int32: input and output rows of each offset's pairs, from the left, then -1."""
        pairs = self.pairs
        first = self.filled.cumsum(0) - self.filled
        rank = torch.arange(self.num_pairs, device=pairs.offset.device) - first[pairs.offset]
        shape = (2, self.geometry.volume, max(self.num_inputs, max(self.counts, default=0)))
        table = torch.full(shape, -1, dtype=torch.int32, device=pairs.offset.device)
        table[0, pairs.offset, rank] = pairs.input.int()
        table[1, pairs.offset, rank] = pairs.output.int()
        return table


# `masked` holds also where a map has no unused slot: one program serves maps of all sizes.
FACTS = NamedFacts(
    {
        "Off": IndexFacts(sorted=True, masked=False, proven=True),
        "InIdx": IndexFacts(masked=True, proven=True),
        "OutIdx": IndexFacts(masked=True, proven=True),
    }
)
