"""Base class of user-defined formats: `SparseFormat`, reduced to three methods."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from insum_nn.facts import IndexFacts
from insum_nn.formats.checks import Fault
from insum_nn.formats.coo import COO, ThroughCOO

__all__ = ["CustomFormat"]


@dataclass(frozen=True, eq=False, repr=False)
class CustomFormat(ThroughCOO):
    """The base of a format that is defined outside of this package.

    A subclass is a dataclass, `@dataclass(frozen=True, eq=False, repr=False)`, with a field for each index tensor. It
    says

        value_axes          a letter for each axis of `values`; `q` is an axis of slots that may be unused
        index_parts         the index tensors: name in expressions, field, tensor, letters, dimension selected along
        from_entries(coo)   lay out the entries of a coalesced COO
        entries()           the stored entries as a COO, without unused slots; differentiable in the values

    and inherits builders from dense, COO, torch and scipy tensors, conversions, `transpose`, `to`, `validate`, copies,
    and the facts of its index tensors. `insum_nn.testing.check_format` tests all of it, `insum_nn.ops.register` tells
    operators its expressions, and `insum_nn.ops.contract` runs any other.

    The index tensors of every instance are read once, at the first use of their facts: ranges, order and missing
    entries are found, and claims in `index_facts` are proven or refused. From then on the facts are believed until
    torch counts a write to one of the tensors, as those of the package's own formats are, and statements run as fast.

    Attributes:
        shape: extents of the tensor.
        values: `Val`; differentiable; 0 in unused slots.
        index_facts: claims beyond what reading tells, such as `unique`; in the order of `index_parts`.
        coalesced: no entry occurs twice, and `entries()` ascend.
    """

    shape: tuple[int, ...]
    values: Tensor
    index_facts: tuple[IndexFacts, ...] = field(default=(), kw_only=True)
    coalesced: bool = field(default=False, kw_only=True)

    num_dims: ClassVar[int | None] = 2
    """Dimensions of the tensor; `None`: any number."""

    def __post_init__(self) -> None:
        if not self._shape_faults():
            type(self)._index_fields = tuple(part.field for part in self.index_parts)
        self._store()

    # What a format defines.

    @classmethod
    @abstractmethod
    def from_entries(cls, coo: COO, *args: Any, **layout: Any) -> Self:
        """Lay out the entries of a coalesced COO; `layout` is what else the builders were given."""

    def layout(self) -> Mapping[str, Any]:
        """Return the `layout` of `from_entries` that the transpose is built with."""
        return {}

    def axis_extents(self) -> Mapping[str, int]:
        """Return extents of axis letters that the shape decides."""
        return {}

    def laws(self) -> Sequence[Fault]:
        """Laws of this format that stored numbers break, for `validate`, beyond ranges, claims and unused slots."""
        return ()

    @classmethod
    def _of(cls, coo: COO, index_dtype: torch.dtype | None, **layout: Any) -> Self:
        made = cls.from_entries(COO.from_coo(coo, index_dtype=index_dtype), **layout)
        made._verify()
        return made

    # What follows from it.

    @property
    def nnz(self) -> int:
        """Stored entries without padding; explicit zeros count."""
        return self.entries().nnz

    def transpose(self) -> Self:
        """Return the transpose in the same format and layout; differentiable in the values."""
        return self.from_coo(self.entries().transpose(), index_dtype=self.index_dtype, **self.layout())

    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        fields = {part.field: tensor for part, tensor in zip(self.index_parts, indices, strict=True)}
        return self._replace(values=values, **fields)

    def _ordered_indices(self) -> tuple[Tensor, ...]:
        return self.entries().indices

    def _fixed_extents(self) -> dict[str, int]:
        return dict(self.axis_extents())

    def _shape_faults(self) -> list[Fault]:
        if self.num_dims in (None, len(self.shape)):
            return []
        expected, got = f"{self.num_dims} extents", f"{tuple(self.shape)}"
        return [Fault("shape", "shape", expected, got, f"use a tensor of {self.num_dims} dimensions.")]

    def _value_faults(self) -> list[Fault]:
        return super()._value_faults() or list(self.laws())
