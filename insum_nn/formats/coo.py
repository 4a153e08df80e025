"""COO: one index per dimension for each stored entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumShapeError, import_extra
from insum_nn.facts import IndexFacts
from insum_nn.formats import arguments, checks, convert
from insum_nn.formats.base import IndexPart, RowsAndColumns, SparseFormat, dim_field, dim_name
from insum_nn.sorted_rows import compressed_rows

__all__ = ["COO", "ThroughCOO", "as_coo", "entry_facts"]


@dataclass(frozen=True, eq=False, repr=False)
class COO(RowsAndColumns):
    """Coordinates and values: the format that every conversion passes through.

        D[Index0[p], Index1[p], ...] += Val[p]          for all p; `Row` and `Col` in two dimensions

    Attributes:
        shape: extents of the tensor, one or more.
        indices: a (p,) tensor per dimension, int32 or int64; no padding.
        values: `Val`, (p,); differentiable.
        index_facts: facts of each index tensor.
        coalesced: entries ascend lexicographically, none twice.

    >>> matrix = COO.from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]]))
    >>> matrix.row.tolist(), matrix.col.tolist(), matrix.values.tolist()
    ([0, 1], [1, 0], [2.0, 3.0])
    """

    shape: tuple[int, ...]
    indices: tuple[Tensor, ...]
    values: Tensor
    index_facts: tuple[IndexFacts, ...] = ()
    coalesced: bool = False

    value_axes = "p"
    _index_fields = ("indices",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(self.indices))
        self._store()

    # Builders.

    @classmethod
    def from_dense(cls, dense: Tensor, *, mask: Tensor | None = None, index_dtype: torch.dtype | None = None) -> Self:
        """Store the nonzero elements of a dense tensor.

        Args:
            dense: Any shape of one dimension or more; differentiable.
            mask: Same shape, bool: store exactly these elements, zeros included.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced COO.

        Raises:
            InsumFormatError: `dense` is sparse.
            InsumShapeError: `mask` has another shape, or `dense` no dimension.
            InsumDtypeError: `mask` is not bool.

        >>> COO.from_dense(torch.zeros(2, 2), mask=torch.eye(2) > 0).nnz
        2
        """
        indices, values = convert.dense_entries(dense, mask)
        return cls._build(tuple(dense.shape), indices, values, index_dtype, coalesced=True)

    @classmethod
    def from_coo(
        cls,
        indices: SparseFormat | Tensor | Sequence[Tensor],
        values: Tensor | None = None,
        shape: Sequence[int] | None = None,
        *,
        coalesce: bool = True,
        index_dtype: torch.dtype | None = None,
    ) -> Self:
        """Store coordinates and values, or the entries of another format.

        Args:
            indices: (d, p), or d tensors (p,), int32 or int64; or any format of this package.
            values: (p,); differentiable. Left out with a format.
            shape: d extents. Left out with a format.
            coalesce: Sort lexicographically and sum duplicates (fp16 and bf16 in float32). Otherwise order and
                duplicates stay as they are.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A COO whose indices are proven to lie inside `shape`.

        Raises:
            InsumRangeError: an index lies outside `shape`.
            InsumShapeError: lengths or the number of index tensors disagree.
            InsumDtypeError: indices are not int32 or int64.
            InsumDeviceError: tensors of two devices.

        >>> COO.from_coo(torch.tensor([[0, 0], [1, 1]]), torch.tensor([2.0, 3.0]), (1, 2)).values.tolist()
        [5.0]
        """
        coo = as_coo(indices, values, shape, "COO.from_coo", coalesce=coalesce)
        return cls._build(coo.shape, coo.indices, coo.values, index_dtype, coo.coalesced, coo.index_facts)

    @classmethod
    def from_torch(cls, tensor: Tensor, *, index_dtype: torch.dtype | None = None) -> Self:
        """Store a torch sparse tensor: COO of any rank, CSR, CSC, BSR or BSC.

        Args:
            tensor: No dense and no batch dimensions; differentiable. Explicit zeros stay; an uncoalesced tensor
                stands for its sum.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced COO.

        Raises:
            InsumFormatError: `tensor` is dense.
            InsumShapeError: `tensor` has dense or batch dimensions.

        >>> COO.from_torch(torch.eye(3).to_sparse()).nnz
        3
        """
        indices, values = convert.torch_entries(tensor)
        # torch checks neither ranges nor the order inside a compressed row unless asked, so neither is trusted.
        ordered = tensor.layout == torch.sparse_coo
        facts = entry_facts(tensor.ndim, ordered=ordered, distinct=ordered, proven=False)
        coo = COO(tuple(tensor.shape), indices, values, facts, coalesced=ordered)
        return cls.from_coo(coo, index_dtype=index_dtype)

    @classmethod
    def from_scipy(
        cls, matrix: object, *, device: torch.device | str | None = None, index_dtype: torch.dtype | None = None
    ) -> Self:
        """Store a scipy sparse array or matrix; the numbers are copied.

        Args:
            matrix: Any scipy.sparse container. Explicit zeros stay, duplicates are summed.
            device: Where to put the tensors; default the CPU.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced COO.

        Raises:
            MissingExtraError: scipy is not installed.
            InsumFormatError: `matrix` is no scipy sparse container.
            InsumDtypeError: torch has no such dtype.

        >>> import scipy.sparse
        >>> COO.from_scipy(scipy.sparse.eye_array(3)).nnz
        3
        """
        sparse = import_extra("scipy.sparse", "matrices of scipy")
        if not sparse.issparse(matrix):
            raise InsumFormatError(
                f"from_scipy needs a scipy sparse array, got {type(matrix).__name__}",
                fix="call from_dense(torch.as_tensor(x)) for a dense array.",
            )
        coo = sparse.coo_array(matrix)
        try:
            values = torch.as_tensor(coo.data).clone()
        except TypeError as error:
            kind = coo.data.dtype
            text, fix = f"torch has no dtype for scipy's {kind}", "call .astype('float64') first."
            raise InsumDtypeError(text, fix=fix, got=kind) from error
        # `coords` came with scipy 1.13, as did more than two dimensions.
        coords = coo.coords if hasattr(coo, "coords") else (coo.row, coo.col)
        indices = [torch.as_tensor(index).to(device, torch.int64) for index in coords]
        return cls.from_coo(indices, values.to(device), [*map(int, coo.shape)], index_dtype=index_dtype)

    @classmethod
    def from_smtx(cls, path: str | PathLike[str], *, index_dtype: torch.dtype | None = None) -> Self:
        """Read a pattern in the text format of the Deep Learning Matrix Collection; each of its entries is 1.

        The first line says `rows, columns, entries`, the second holds where the entries of each row begin and where the
        last ones end, the third the column of each entry.

        Args:
            path: A `.smtx` file.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.

        Returns:
            A coalesced COO on the CPU, in float32. As a mask: `COO.from_smtx(path).to_dense() != 0`.

        Raises:
            InsumFormatError: the file is not of this format, or damaged.
        """
        shape, indices = convert.smtx_entries(path)
        return cls.from_coo(indices, torch.ones(indices[0].shape[0]), shape, index_dtype=index_dtype)

    @classmethod
    def _build(
        cls,
        shape: tuple[int, ...],
        indices: Sequence[Tensor],
        values: Tensor,
        index_dtype: torch.dtype | None,
        coalesced: bool,
        facts: tuple[IndexFacts, ...] | None = None,
    ) -> Self:
        dtype = arguments.choose_index_dtype(shape, index_dtype)
        known = entry_facts(len(shape), ordered=coalesced, distinct=coalesced) if facts is None else facts
        stored = tuple(index.to(dtype).contiguous() for index in indices)
        return cls(shape, stored, values, known, coalesced)._guaranteed()

    # Properties.

    @property
    def nnz(self) -> int:
        """Stored entries; explicit zeros count."""
        return self.values.shape[0]

    @property
    def index_parts(self) -> tuple[IndexPart, ...]:
        """One (p,) tensor per dimension."""
        ndim = self.ndim
        return tuple(
            IndexPart(dim_name(dim, ndim), dim_field(dim, ndim, f"indices[{dim}]"), index, "p", dim)
            for dim, index in enumerate(self.indices)
        )

    def occupancy(self, dim: int = 0) -> Tensor:
        """Return the number of entries at each index of `dim` that has any, (n,) int64, by ascending index.

        >>> COO.from_dense(torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])).occupancy().tolist()
        [2, 1]
        """
        (dim,) = arguments.check_dims((dim,), self.ndim, "occupancy")
        self._verify()
        keys = self.indices[dim] if self._claims[dim].sorted else self.indices[dim].sort().values
        return torch.unique_consecutive(keys, return_counts=True)[1]

    # Conversions.

    def entries(self) -> COO:
        """Itself: nothing is padding."""
        self._verify()
        return self

    def coalesce(self) -> Self:
        """Sort lexicographically and sum duplicates; differentiable in the values.

        Returns:
            `self` if it is coalesced already. fp16 and bf16 accumulate in float32.
        """
        known = self._verify()
        if self.coalesced:
            return self
        ordered = self.sort()
        indices, values = convert.merge_duplicates(ordered.indices, ordered.values)
        facts = entry_facts(self.ndim, ordered=True, distinct=True, proven=self._proven())
        return type(self)(self.shape, indices, values, facts, coalesced=True)._guaranteed_if(known)

    def sort(self) -> Self:
        """Sort lexicographically, duplicates kept in their order."""
        known = self._verify()
        if self.coalesced:
            return self
        order = convert.lexicographic_order(self.indices, self.shape)
        facts = entry_facts(self.ndim, ordered=True, distinct=False, proven=self._proven())
        indices = tuple(i[order] for i in self.indices)
        return type(self)(self.shape, indices, self.values[order], facts)._guaranteed_if(known)

    def transpose(self, dims: Sequence[int] | None = None) -> Self:
        """Permute the dimensions and sort again.

        Args:
            dims: A permutation of the dimensions; default reverses them.

        Returns:
            A COO of the permuted shape. Duplicates are kept.

        Raises:
            InsumShapeError: `dims` is no permutation.
        """
        permutation = arguments.check_permutation(dims, self.ndim)
        known = self._verify()
        shape = tuple(self.shape[dim] for dim in permutation)
        indices = tuple(self.indices[dim] for dim in permutation)
        facts = entry_facts(self.ndim, ordered=False, distinct=False, proven=self._proven())
        permuted = type(self)(shape, indices, self.values, facts)._guaranteed_if(known).sort()
        if not self.coalesced:
            return permuted
        facts = entry_facts(self.ndim, ordered=True, distinct=True, proven=self._proven())
        return permuted._replace(index_facts=facts, coalesced=True)._guaranteed_if(known)

    def to_dense(self) -> Tensor:
        """Return the dense tensor; duplicates are summed (fp16 and bf16 in float32)."""
        self._verify()
        numel = 1
        slots = torch.zeros(self.nnz, dtype=torch.int64, device=self.device)
        for index, extent in zip(self.indices, self.shape, strict=True):
            slots = slots * extent + index
            numel *= extent
        if self.coalesced:
            # No cell is written twice: a copy, which is exact and deterministic.
            return convert.scatter_rows(self.values, slots, numel).reshape(self.shape)
        return convert.sum_rows(self.values, slots, numel).reshape(self.shape)

    def to_torch(self, layout: torch.layout = torch.sparse_coo) -> Tensor:
        """Return torch's own sparse tensor, differentiable in the values (by torch's rules, so once only).

        Args:
            layout: torch.sparse_coo; in two dimensions also torch.sparse_csr and torch.sparse_csc, which sum
                duplicates and take memory by rows or columns.

        Returns:
            A tensor of that layout that shares memory where it can.

        Raises:
            InsumFormatError: another layout.
            InsumShapeError: a compressed layout of a tensor that is no matrix.
        """
        if layout == torch.sparse_coo:
            self._verify()
            indices = torch.stack([index.long() for index in self.indices])
            return torch.sparse_coo_tensor(
                indices, self.values, self.shape, is_coalesced=self.coalesced, check_invariants=False
            )
        if layout not in (torch.sparse_csr, torch.sparse_csc):
            raise InsumFormatError(
                f"{type(self).__name__}.to_torch cannot make layout {layout}",
                details=["expected torch.sparse_coo, torch.sparse_csr or torch.sparse_csc"],
                fix="call to_dense for a dense tensor, or convert to BlockCOO for torch.sparse_bsr.",
                got=layout,
            )
        arguments.require_matrix(self.shape, f"layout {layout}")
        by_row = layout == torch.sparse_csr
        coo = self.coalesce() if by_row else self.transpose().coalesce()
        pointers = compressed_rows(coo.row, coo.shape[0])
        make = torch.sparse_csr_tensor if by_row else torch.sparse_csc_tensor
        return make(pointers, coo.col, coo.values, size=self.shape, check_invariants=False)

    def to_scipy(self) -> object:
        """Return a `scipy.sparse.coo_array` on the CPU, cut from the autograd graph.

        Raises:
            MissingExtraError: scipy is not installed.
            InsumDtypeError: scipy has no such dtype (bfloat16).
        """
        sparse = import_extra("scipy.sparse", "matrices of scipy")
        self._verify()
        values = self.values.detach().cpu()
        try:
            numbers = values.numpy()
        except TypeError as error:
            raise InsumDtypeError(
                f"scipy has no dtype for {values.dtype}", fix="call .to(dtype=torch.float32) first.", got=values.dtype
            ) from error
        return sparse.coo_array((numbers, tuple(index.cpu().numpy() for index in self.indices)), shape=self.shape)

    # Pieces.

    def _with_tensors(self, indices: Sequence[Tensor], values: Tensor) -> Self:
        return self._replace(indices=tuple(indices), values=values)

    def _ordered_indices(self) -> tuple[Tensor, ...]:
        return self.indices

    def _shape_faults(self) -> list[checks.Fault]:
        faults = super()._shape_faults()
        if len(self.indices) != len(self.shape):
            expected = f"{len(self.shape)} index tensors, one per dimension"
            fix = "pass one index tensor per dimension of shape."
            faults.append(checks.Fault("indices", "shape", expected, str(len(self.indices)), fix))
        return faults

    def _repr_parts(self) -> list[str]:
        return [f"nnz={self.nnz}", *(["coalesced=True"] if self.coalesced else [])]


class ThroughCOO(SparseFormat):
    """A format that is laid out from the entries of a COO."""

    _of: ClassVar[Callable[..., Any]]
    """Lays out the entries of a COO, with indices of a dtype or `None`, and what else a builder was given."""

    @classmethod
    def from_coo(
        cls,
        indices: SparseFormat | Tensor | Sequence[Tensor],
        values: Tensor | None = None,
        shape: Sequence[int] | None = None,
        *,
        coalesce: bool = True,
        index_dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> Self:
        """Lay out coordinates and values, or the entries of another format.

        Args:
            indices: (d, p), or d tensors (p,), int32 or int64; or any format of this package.
            values: (p,); differentiable. Left out with a format.
            shape: d extents. Left out with a format.
            coalesce: Sum duplicates and sort. Otherwise duplicates keep a slot each, and entries of a group or row keep
                their order.
            index_dtype: torch.int32 or torch.int64; default int32 where every extent fits.
            layout: `group_dim`: of `GroupCOO` the grouped dimension, of `ELL` that whose index is the position;
                default 0. Of `GroupCOO`, `group_size`: slots per group, or `"auto"`: the rule of `choose_group_size`.
                Of `ELL`, `width`: slots per row; default the largest occupancy.

        Returns:
            A format with proven indices.

        Raises:
            InsumRangeError: an index lies outside `shape`.
            InsumShapeError: lengths disagree, or `group_dim` is no dimension.
            InsumFormatError: `group_size` is below 1, or a row has more than `width` entries.
            InsumDtypeError: indices are not int32 or int64.

        >>> from insum_nn.formats import ELL, GroupCOO
        >>> GroupCOO.from_coo(COO.from_dense(torch.ones(2, 3)), group_dim=1, group_size=2).col.tolist()
        [0, 1, 2]
        >>> ELL.from_coo(torch.tensor([[1, 1], [0, 2]]), torch.ones(2), (2, 3), width=3).col.tolist()
        [[-1, -1, -1], [0, 2, -1]]
        """
        coo = as_coo(indices, values, shape, f"{cls.__name__}.from_coo", coalesce=coalesce)
        return cls._of(coo, index_dtype, **layout)

    @classmethod
    def from_dense(
        cls, dense: Tensor, *, mask: Tensor | None = None, index_dtype: torch.dtype | None = None, **layout: Any
    ) -> Self:
        """Store the nonzero elements of a dense tensor, or those that `mask` selects.

        See `COO.from_dense`, and `from_coo` for `layout`.
        """
        coo = COO.from_dense(dense, mask=mask, index_dtype=torch.int64)
        return cls.from_coo(coo, index_dtype=index_dtype, **layout)

    @classmethod
    def from_torch(cls, tensor: Tensor, *, index_dtype: torch.dtype | None = None, **layout: Any) -> Self:
        """Lay out a torch sparse tensor (COO, CSR, CSC, BSR, BSC); see `COO.from_torch`, for `layout` `from_coo`."""
        return cls.from_coo(COO.from_torch(tensor, index_dtype=torch.int64), index_dtype=index_dtype, **layout)

    @classmethod
    def from_scipy(
        cls,
        matrix: object,
        *,
        device: torch.device | str | None = None,
        index_dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> Self:
        """Lay out a scipy sparse array; see `COO.from_scipy`, for `layout` `from_coo`."""
        coo = COO.from_scipy(matrix, device=device, index_dtype=torch.int64)
        return cls.from_coo(coo, index_dtype=index_dtype, **layout)


def as_coo(
    indices: SparseFormat | Tensor | Sequence[Tensor],
    values: Tensor | None,
    shape: Sequence[int] | None,
    owner: str,
    *,
    coalesce: bool = False,
) -> COO:
    """Return the arguments of a `from_coo` as a COO with validated indices; entries as given, or coalesced."""
    if isinstance(indices, SparseFormat):
        if values is not None or shape is not None:
            raise InsumFormatError(
                f"{owner} got values or shape together with a {type(indices).__name__}",
                fix="pass the format alone; use with_values to give it other values.",
            )
        coo = indices.entries()
        if not coo._proven():  # pyright: ignore[reportPrivateUsage]
            convert.check_entries(owner, coo.shape, coo.indices, coo.values, [part.field for part in coo.index_parts])
            facts = coo.index_facts or entry_facts(coo.ndim, ordered=False, distinct=False)
            facts = tuple(IndexFacts(f.sorted, f.unique, masked=False, proven=True) for f in facts)
            coo = COO(coo.shape, coo.indices, coo.values, facts, coo.coalesced)
        return coo.coalesce() if coalesce else coo
    extents = arguments.check_shape(shape, owner)
    if values is None or arguments.require_dense(values, owner, "values").ndim != 1:
        raise InsumShapeError(
            f"{owner} needs one value per entry",
            details=[f"expected values (p,); got {None if values is None else tuple(values.shape)}"],
            fix="pass values=torch.ones(p) for a pattern without values.",
        )
    given = (indices.unbind(0) if indices.ndim else (indices,)) if isinstance(indices, Tensor) else tuple(indices)
    ndim = len(extents)
    fields = [dim_field(dim, ndim, f"indices[{dim}]") for dim in range(ndim)]
    convert.check_entries(owner, extents, given, values, fields)
    coo = COO(extents, given, values, entry_facts(ndim, ordered=False, distinct=False))
    return coo.coalesce() if coalesce else coo


def entry_facts(ndim: int, *, ordered: bool, distinct: bool = False, proven: bool = True) -> tuple[IndexFacts, ...]:
    """Facts of COO indices; in lexicographic order only the first dimension ascends."""
    first = IndexFacts(sorted=ordered, unique=distinct and ndim == 1, masked=False, proven=proven)
    return (first, *(IndexFacts(masked=False, proven=proven) for _ in range(ndim - 1)))
