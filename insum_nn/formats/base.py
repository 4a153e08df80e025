"""The contract of every sparse format, and the laws that tests check."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor

from insum_nn.dtypes import INDEX_DTYPES, not_dense
from insum_nn.errors import InsumFormatError, InsumShapeError
from insum_nn.facts import UNKNOWN, IndexFacts, NamedFacts
from insum_nn.formats import arguments, checks
from insum_nn.formats.checks import Fault
from insum_nn.formats.verification import IndexPart, Verifiable

if TYPE_CHECKING:
    from insum_nn.formats.coo import COO

__all__ = ["IndexPart", "RowsAndColumns", "SparseFormat", "dim_field", "dim_name"]


# What is known of a format's own tensors, which a copy does not have.
_NOT_COPIED = ("_shared", "_verified", "_named_facts", "_named_indices")


class SparseFormat(Verifiable):
    """A sparse tensor as dense tensors: indices, values, and facts about them.

    A format holds tensors and laws, never an expression. Constructors store what they are given (after checks of
    rank, length, dtype and device that read no element); `from_dense`, `from_coo`, `from_torch` and `from_scipy` do
    the work and set the facts they guarantee; `validate` proves the facts.

    Laws, for a format `F`, a dense tensor `d` and a format object `f`:

        F.from_dense(d).to_dense() == d
        F.from_coo(f).to_dense() == f.to_dense()                    whatever the format of f
        f.transpose().to_dense() == f.to_dense().T
        f.transpose().transpose().to_dense() == f.to_dense()
        f.with_values(f.values) is f in everything but identity
        f.entries() holds nnz entries, none of them padding
        an unused slot has index -1 in every index tensor and value 0
        d(f.to_dense()) / d(f.values) exists: every conversion is differentiable in the values

    Index tensors may be written to in place. Writes that torch counts (`Tensor._version`) are noticed: facts fall, and
    the next use of the format reads its index tensors again, which waits for the device once. Facts that a caller
    claims are read once in the same way. Tensors made in inference mode have no count, and are copied. Writes
    through `.data`, a NumPy array or DLPack are not counted: after one, call `validate`, or pass
    `Options(validate=True)` to the operator; until then results may be those of the old indices, or of no indices at
    all, since memory outside of a tensor may be read.

    Attributes:
        shape: extents of the tensor that is represented.
        values: stored values; differentiable; 0 in unused slots.
        index_facts: facts of each index tensor, in the order of `index_parts`; `()` when nothing is known.
        coalesced: no entry occurs twice and entries ascend, by the grouped dimension first.
    """

    values: Tensor

    value_axes: ClassVar[str]
    """A letter per axis of `values`; letters are shared with the index tensors."""

    # What a format defines.

    @abstractmethod
    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        """This format with other index tensors, in the order of `index_parts`, and other values."""

    @abstractmethod
    def entries(self) -> COO:
        """Return the stored entries without padding, in stored order."""

    @abstractmethod
    def transpose(self) -> Self:
        """Return the transpose in the same format, sorted again; differentiable in the values."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Stored entries without padding; explicit zeros count."""

    # What every format inherits.

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where every tensor lives."""
        return self.values.device

    @property
    def index_dtype(self) -> torch.dtype:
        """The dtype of the index tensors."""
        return self.index_parts[0].tensor.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the values take part in autograd."""
        return self.values.requires_grad

    @property
    def num_rows(self) -> int:
        """The extent of dimension 0."""
        return self.shape[0]

    @property
    def num_cols(self) -> int:
        """The extent of dimension 1; only for two dimensions and more."""
        if self.ndim < 2:
            raise InsumShapeError(
                f"{type(self).__name__} of shape {self.shape} has no columns",
                fix="read shape instead.",
                shape=self.shape,
            )
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, unused slots included."""
        tensors = [self.values, *(part.tensor for part in self.index_parts)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def facts(self) -> NamedFacts:
        """Facts of each index tensor by its name in expressions.

        They hold of the tensors as they are now: what a caller claimed, or has written to, is read once. No entry of a
        coalesced format occurs twice, which is a fact of all index tensors together.

        Raises:
            InsumError: as `validate`, where something has to be read.
        """
        if not self._verify():
            return NamedFacts((part.name, UNKNOWN) for part in self.index_parts)
        kept = self.__dict__.get("_named_facts")
        if kept is not None and kept[0] is self._verified:
            return kept[1]
        parts = self.index_parts
        facts = NamedFacts((part.name, fact) for part, fact in zip(parts, self._claims, strict=True))
        # In ELL one dimension has no index tensor: the position is the index.
        if self.coalesced and len(parts) == self.ndim > 1:
            first, *others = facts
            known = facts[first]
            facts[first] = IndexFacts(known.sorted, known.unique, known.masked, known.proven, tuple(others))
        if self._verified is not None:
            # An operator asks at every call.
            object.__setattr__(self, "_named_facts", (self._verified, facts))
        return facts

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by its name in expressions: the index tensors and `"Val"`."""
        named = self.__dict__.get("_named_indices")
        if named is None:
            named = {part.name: part.tensor for part in self.index_parts}
            if not torch.compiler.is_dynamo_compiling():
                object.__setattr__(self, "_named_indices", named)
        return {**named, "Val": self.values}

    def with_values(self, values: Tensor) -> Self:
        """Return the same structure and facts with other values.

        Args:
            values: shape of `self.values`, on its device; any dtype; differentiable. The caller keeps 0 in unused
                slots (`validate` proves it).

        Returns:
            A format that shares the index tensors.

        Raises:
            InsumShapeError: another shape.
            InsumDeviceError: another device.
        """
        if arguments.require_dense(values, f"{type(self).__name__}.with_values", "values").shape != self.values.shape:
            raise InsumShapeError(
                f"values of {type(self).__name__}.with_values have another shape",
                details=[f"expected {tuple(self.values.shape)}; got {tuple(values.shape)}"],
                fix="pass one value per stored slot, unused slots included.",
                expected=tuple(self.values.shape),
                got=tuple(values.shape),
            )
        return self._with_values(values)

    def detach(self) -> Self:
        """Return the same format with values cut from the autograd graph."""
        return self._with_values(self.values.detach())

    def _with_values(self, values: Tensor) -> Self:
        shared = self.shared
        if values.dtype != self.values.dtype:
            other = self._replace(values=values)
            vars(other).update(_shared=shared, _verified=self._verified)
            return other
        # Everything that is checked of a format is as it was.
        other = object.__new__(type(self))
        vars(other).update(vars(self), values=values)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy's tensors are new: what is said of them is read once.
        vars(self).update(state)
        self._own_versions()

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move every tensor to `device` and cast the values to `dtype`; indices keep their dtype.

        As with a tensor, `to(torch.float64)` casts.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        values = self.values.to(device=device, dtype=dtype)
        moved = self._with_tensors([part.tensor.to(device=values.device) for part in self.index_parts], values)
        return moved._guaranteed_if(self._holds())

    def to_dense(self) -> Tensor:
        """Return the dense tensor, `shape`; duplicates are summed (fp16 and bf16 in float32), unused slots are 0."""
        return self.entries().to_dense()

    def to_coo(self) -> COO:
        """Return the stored entries as a coalesced `COO`: sorted, duplicates summed, explicit zeros kept."""
        return self.entries().coalesce()

    def to_torch(self, layout: torch.layout = torch.sparse_coo) -> Tensor:
        """Return torch's own sparse tensor; see `COO.to_torch`."""
        return self.to_coo().to_torch(layout)

    def to_scipy(self) -> object:
        """Return the stored entries as a `scipy.sparse.coo_array` on the CPU, cut from the autograd graph."""
        return self.to_coo().to_scipy()

    def validate(self) -> Self:
        """Prove the laws and every claimed fact against the stored numbers; reads the device.

        What was kept of the index tensors is forgotten, so that writes that torch did not count are noticed. Facts
        that fell by a counted write are not claimed any more.

        Returns:
            `self`.

        Raises:
            InsumRangeError: only ranges are wrong.
            InsumFormatError: anything else; the message lists all faults, the first bad entry of each.
        """
        self._raise(self._structure_faults())
        self._forget()
        self._raise(self._value_faults())
        self._keep_measured()
        return self

    def __repr__(self) -> str:
        parts = [f"shape={self.shape}", *self._repr_parts()]
        parts.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        parts.append(f"device={self.device}")
        if self.requires_grad:
            parts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join(parts)})"

    # Pieces of the above.

    def _repr_parts(self) -> list[str]:
        return []

    def _replace(self, **changes: object) -> Self:
        # Every concrete format is a dataclass; this base is not, so that each lists its fields in its own order.
        return cast("Self", dataclasses.replace(cast("Any", self), **changes))

    def _store(self) -> None:
        """Check what needs no element to be read; called by each `__post_init__`."""
        object.__setattr__(self, "shape", arguments.check_shape(self.shape, type(self).__name__))
        object.__setattr__(self, "index_facts", tuple(self.index_facts))
        title = f"{type(self).__name__} of shape {self.shape} cannot hold these tensors"
        checks.raise_faults(title, self._structure_faults(), by_kind=True)
        self._own_versions()

    def _proven(self) -> bool:
        """Return whether the facts say that every index was checked to lie inside."""
        return all(facts.proven for facts in self._claims)

    def _fixed_extents(self) -> dict[str, int]:
        """Return extents of axis letters that the shape decides."""
        return {}

    def _shape_faults(self) -> list[Fault]:
        return []

    def _structure_faults(self) -> list[Fault]:
        """Ranks, lengths, dtypes and devices."""
        faults = self._shape_faults()
        if faults:
            return faults
        extents = self._fixed_extents()
        owner = dict.fromkeys(extents, "shape")
        parts = self.index_parts
        for part in parts:
            faults += _tensor_faults(part.field, part.tensor, part.axes, extents, owner)
        faults += _tensor_faults("values", self.values, self.value_axes, extents, owner)
        if faults:
            return faults
        dtype, device = parts[0].tensor.dtype, self.values.device
        for part in parts:
            got = part.tensor.dtype
            if got != dtype and got in INDEX_DTYPES and dtype in INDEX_DTYPES:
                expected = f"{_short(dtype)} as in {parts[0].field}"
                faults.append(Fault(part.field, "dtype", expected, _short(got), "give all index tensors one dtype."))
            faults += checks.kind_faults(part.field, part.tensor, device)
        if len(self.index_facts) not in (0, len(parts)):
            expected = f"{len(parts)} IndexFacts, or () for unknown"
            got = f"{len(self.index_facts)}"
            fields = ", ".join(part.field for part in parts)
            faults.append(Fault("index_facts", "law", expected, got, f"give facts for {fields}, in this order."))
        return faults

    def _value_faults(self) -> list[Fault]:
        """Ranges, claims and padding."""
        faults = self._index_faults(claims=True) + self._slot_faults()
        padded = [part.tensor for part in self.index_parts if part.padded]
        if padded:
            unused = torch.stack([index == -1 for index in padded]).all(0)
            stray = checks.unused_value_fault(self.values, unused)
            faults += [] if stray is None else [stray]
        return faults + self._order_faults()


class RowsAndColumns(SparseFormat):
    """A format of any number of dimensions, which names the index tensors of a matrix."""

    @property
    def row(self) -> Tensor:
        """The index tensor of rows; two dimensions only. Along dimension 0 an ELL has none."""
        return self._matrix_index(0)

    @property
    def col(self) -> Tensor:
        """The index tensor of columns; two dimensions only. Along dimension 1 an ELL has none."""
        return self._matrix_index(1)

    def _matrix_index(self, dim: int) -> Tensor:
        own, other = ("row", "col")[dim], ("col", "row")[dim]
        arguments.require_matrix(self.shape, own)
        found = [part.tensor for part in self.index_parts if part.dim == dim]
        if not found:
            raise InsumFormatError(
                f"{type(self).__name__} along dimension {dim} stores no {own}: it is the position",
                fix=f"read {other}, or use GroupCOO, which stores both.",
            )
        return found[0]


def dim_name(dim: int, ndim: int) -> str:
    """Return the name in expressions of the index tensor of dimension `dim`.

    >>> dim_name(1, 2), dim_name(1, 3)
    ('Col', 'Index1')
    """
    return ("Row", "Col")[dim] if ndim == 2 else f"Index{dim}"


def dim_field(dim: int, ndim: int, otherwise: str) -> str:
    """Return the attribute under which the index tensor of dimension `dim` is read: `row`, `col`, or `otherwise`."""
    return ("row", "col")[dim] if ndim == 2 else otherwise


def _tensor_faults(
    field: str, tensor: object, axes: str, extents: dict[str, int], owner: dict[str, str]
) -> list[Fault]:
    """Return faults of one tensor's type, rank and lengths; binds the letters it is the first to carry."""
    letters = "(" + ", ".join(axes) + ("," if len(axes) == 1 else "") + ")"
    if not isinstance(tensor, Tensor) or not_dense(tensor):
        fix = f"pass {field} as a dense torch.Tensor."
        return [Fault(field, "dtype", f"a dense tensor {letters}", str(not_dense(tensor)), fix)]
    if tensor.ndim != len(axes):
        fix = f"give {field} the axes {letters}."
        return [Fault(field, "shape", f"axes {letters}", f"shape {tuple(tensor.shape)}", fix)]
    faults: list[Fault] = []
    for letter, extent in zip(axes, tensor.shape, strict=True):
        if letter not in extents:
            extents[letter], owner[letter] = extent, field
        elif extents[letter] != extent:
            expected = f"{letters} with {letter} = {extents[letter]} as in {owner[letter]}"
            fix = f"give {field} and {owner[letter]} the same extent of {letter}."
            faults.append(Fault(field, "shape", expected, f"shape {tuple(tensor.shape)}", fix))
    return faults


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
