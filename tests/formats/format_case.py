"""The laws of `SparseFormat` as tests that a subclass inherits, whatever a format was built from."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import ClassVar

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from insum_nn.errors import (
    InsumDeviceError,
    InsumDtypeError,
    InsumFormatError,
    InsumRangeError,
    InsumShapeError,
)
from insum_nn.formats import COO, ELL, SparseFormat
from insum_nn.testing import check_format
from tests.formats.registry import NOT_DENSE, REGISTRY, SHAPES, Entry, accumulate, random_entries, sparse_dense

__all__ = ["AnyRankCase", "FormatCase", "LargestTensor"]

matrices = pytest.mark.parametrize("shape", SHAPES, ids=str)

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


def same_structure(left: SparseFormat, right: SparseFormat) -> bool:
    pairs = zip(left.index_parts, right.index_parts, strict=True)
    return left.facts == right.facts and all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return result


# torch says both once per process, of its own sparse tensors.
@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
class FormatCase:
    """The promises of one way to build one format; subclasses whose names begin with `Test` are run."""

    entry: ClassVar[Entry]

    def test_the_public_check(self):
        check_format(self.entry.cls, shapes=[(5, 7), (1, 9), (0, 4)], **self.entry.options)

    def test_valid_without_claims(self):
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        assert matrix.validate() is matrix
        assert dataclasses.replace(matrix, index_facts=(), coalesced=False).validate()

    def test_saved_tensors(self):
        """What is saved of a format loads with `weights_only`, and is the format again."""
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        file = io.BytesIO()
        torch.save(matrix.tensors, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert list(loaded) == list(matrix.tensors)
        assert torch.equal(matrix.with_values(loaded["Val"]).to_dense(), matrix.to_dense())

    def test_same_bits_each_time(self):
        """Duplicates are summed in the same order for each number of threads."""
        indices, values = random_entries((5, 7), 400)
        threads, found = torch.get_num_threads(), []
        try:
            for number in (1, 1, 3):
                torch.set_num_threads(number)
                found.append(self.entry.from_coo(indices, values, (5, 7)))
        finally:
            torch.set_num_threads(threads)
        for other in found[1:]:
            assert same_structure(found[0], other)
            assert torch.equal(found[0].values, other.values)
            assert torch.equal(found[0].to_dense(), other.to_dense())

    def test_functions_of_torch(self):
        """`vmap`, `grad` and `jvp` by the values."""
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        values, weight = matrix.values, torch.randn(5, 7, dtype=torch.float64)

        def dense(v):
            return matrix.with_values(v).to_dense()

        twice = torch.stack([values, 2 * values])
        assert torch.equal(torch.func.vmap(dense)(twice), torch.stack([dense(v) for v in twice]))
        (want,) = torch.autograd.grad((dense(leaf := values.clone().requires_grad_()) * weight).sum(), leaf)
        assert torch.equal(torch.func.grad(lambda v: (dense(v) * weight).sum())(values), want)
        assert torch.equal(torch.func.jvp(dense, (values,), (2 * values,))[1], 2 * dense(values))

    @matrices
    def test_dense_round_trip(self, shape, device):
        dense = sparse_dense(shape).to(device)
        matrix = self.entry.from_dense(dense).validate()
        assert matrix.shape == shape
        assert matrix.to_dense().shape == shape
        assert torch.equal(matrix.to_dense(), dense)
        assert matrix.device.type == device.type
        assert matrix.dtype == dense.dtype

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.bool], ids=str
    )
    def test_dense_round_trip_of_other_dtypes(self, dtype):
        dense = (sparse_dense((5, 7), dtype=torch.float32) * 4).to(dtype)
        assert torch.equal(self.entry.from_dense(dense).validate().to_dense(), dense)

    def test_nan_and_inf_are_stored(self):
        dense = torch.zeros(4, 6)
        dense[0, 1], dense[3, 5] = float("nan"), float("inf")
        got = self.entry.from_dense(dense).to_dense()
        assert torch.equal(got.isnan(), dense.isnan())
        assert torch.equal(got.isinf(), dense.isinf())

    @matrices
    def test_transpose(self, shape, device):
        dense = sparse_dense(shape).to(device)
        matrix = self.entry.from_dense(dense)
        turned = matrix.transpose().validate()
        assert type(turned) is type(matrix)
        assert turned.shape == shape[::-1]
        assert torch.equal(turned.to_dense(), dense.T)
        back = turned.transpose().validate()
        assert torch.equal(back.to_dense(), dense)
        assert turned.index_dtype == matrix.index_dtype
        assert all(fact.proven for fact in turned.facts.values())

    @pytest.mark.parametrize("target", REGISTRY, ids=lambda entry: entry.name)
    def test_conversions_commute(self, target: Entry):
        source = self.entry
        dense = sparse_dense((7, 10))
        through = target.from_coo(source.from_dense(dense)).validate()
        assert torch.equal(through.to_dense(), dense)
        # From scalars the structure is the same as the one built directly; blocks bring their zeros along.
        if "block_shape" not in source.options:
            assert same_structure(through, target.from_dense(dense))
            assert torch.equal(through.values, target.from_dense(dense).values)

    def test_with_values_keeps_structure_and_facts(self):
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        other = matrix.with_values(matrix.values * 3)
        assert same_structure(matrix, other)
        assert all(a.tensor is b.tensor for a, b in zip(matrix.index_parts, other.index_parts, strict=True))
        assert torch.equal(other.validate().to_dense(), matrix.to_dense() * 3)
        assert other.coalesced == matrix.coalesced
        with pytest.raises(InsumShapeError, match=r"values of .*with_values have another shape"):
            matrix.with_values(torch.zeros(*matrix.values.shape, 1))

    def test_to(self, device):
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        moved = matrix.to(device, torch.float32)
        assert moved.dtype == torch.float32
        assert moved.device.type == device.type
        assert {part.tensor.device.type for part in moved.index_parts} == {device.type}
        assert moved.index_dtype == matrix.index_dtype
        assert moved.facts == matrix.facts
        assert torch.equal(moved.to_dense().cpu(), matrix.to_dense().float())
        assert matrix.to(dtype=torch.float16).dtype == torch.float16
        meta = matrix.to("meta")
        assert {meta.device.type, *(part.tensor.device.type for part in meta.index_parts)} == {"meta"}

    @pytest.mark.parametrize(
        "clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
    )
    def test_copies(self, clone):
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        other = clone(matrix)
        assert same_structure(matrix, other.validate())
        assert torch.equal(matrix.values, other.values)
        assert other.values is not matrix.values
        assert repr(other) == repr(matrix)

    @pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
    def test_tensors_of_a_copy_are_its_own(self, clone):
        """In inference mode too, where a copy makes new index tensors, whose writes torch counts."""
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        with torch.inference_mode():
            matrix = matrix.to(torch.float64)
            assert matrix.tensors
            other = clone(matrix)
        assert all(other.tensors[part.name] is part.tensor for part in other.index_parts)

    @matrices
    def test_entries_are_what_is_stored(self, shape):
        dense = sparse_dense(shape)
        matrix = self.entry.from_dense(dense)
        entries = matrix.entries().validate()
        assert entries.nnz == matrix.nnz
        assert torch.equal(accumulate(shape, torch.stack(entries.indices), entries.values), dense)
        assert matrix.to_coo().validate().coalesced
        if "block_shape" not in self.entry.options:
            assert matrix.nnz == int((dense != 0).sum())

    def test_frozen_and_named(self):
        matrix = self.entry.from_dense(sparse_dense((5, 7)))
        with pytest.raises(AttributeError):
            matrix.values = torch.zeros(1)
        assert list(matrix.tensors) == [*matrix.facts, "Val"]
        assert set(matrix.facts) <= {"Row", "Col"}
        assert "Col" in matrix.facts or "Row" in matrix.facts
        assert matrix.num_rows == 5
        assert matrix.num_cols == 7
        assert matrix.nbytes == sum(t.numel() * t.element_size() for t in matrix.tensors.values())
        assert len(repr(matrix)) < 160

    def test_torch_compile_sees_no_graph_break(self):
        dense = sparse_dense((5, 7))
        matrix = self.entry.from_dense(dense)
        torch.compiler.reset()
        double = torch.compile(lambda v: matrix.with_values(v * 2).tensors["Val"], fullgraph=True, backend="eager")
        assert torch.equal(double(matrix.values), matrix.values * 2)

    def test_mask_forces_explicit_zeros(self):
        dense = sparse_dense((5, 7))
        mask = torch.rand(5, 7) < 0.5
        matrix = self.entry.from_dense(dense, mask=mask).validate()
        assert torch.equal(matrix.to_dense(), torch.where(mask, dense, 0.0))
        entries = matrix.entries()
        stored = torch.zeros(5, 7, dtype=torch.bool)
        stored[entries.indices] = True
        assert bool(stored[mask].all())
        if "block_shape" not in self.entry.options:
            assert torch.equal(stored, mask)
        # Explicit zeros survive every conversion and the transpose.
        assert self.entry.from_coo(matrix).nnz == matrix.nnz
        assert matrix.transpose().nnz == matrix.nnz
        assert COO.from_coo(matrix).nnz == matrix.nnz

    def test_mask_errors(self):
        dense = torch.zeros(4, 6)
        with pytest.raises(InsumDtypeError, match="mask must be bool"):
            self.entry.from_dense(dense, mask=torch.ones(4, 6))
        with pytest.raises(InsumShapeError, match="mask does not fit"):
            self.entry.from_dense(dense, mask=torch.ones(4, 5, dtype=torch.bool))
        with pytest.raises(InsumFormatError, match="needs a dense"):
            self.entry.from_dense(dense.to_sparse())
        for got, tensor in NOT_DENSE.items():
            with pytest.raises((InsumFormatError, InsumDtypeError), match=got):
                self.entry.from_dense(tensor)
            with pytest.raises((InsumFormatError, InsumDtypeError), match=f"values.*{got}"):
                self.entry.from_dense(dense).with_values(tensor)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
    def test_duplicates_are_summed(self, dtype, device):
        indices, values = random_entries((5, 7), 40)
        values = (values * 8).round().to(dtype)
        matrix = self.entry.from_coo(indices.to(device), values.to(device), (5, 7)).validate()
        assert torch.equal(matrix.to_dense().cpu(), accumulate((5, 7), indices, values))
        assert matrix.coalesced

    def test_half_duplicates_accumulate_in_single(self):
        # 2048 + 1 is 2048 in float16, so a half accumulator would never move.
        indices = torch.zeros(2, 1025, dtype=torch.int64)
        values = torch.ones(1025, dtype=torch.float16)
        values[0] = 2048
        assert self.entry.from_coo(indices, values, (2, 2)).to_dense()[0, 0] == 3072

    def test_non_contiguous_inputs(self):
        dense = sparse_dense((14, 10)).T[::2, 1::2]
        assert not dense.is_contiguous()
        assert torch.equal(self.entry.from_dense(dense).validate().to_dense(), dense)
        indices, values = random_entries((5, 7), 40)
        wide_indices, wide_values = indices.T.contiguous().T, torch.stack([values, values], 1)[:, 0]
        assert not wide_values.is_contiguous()
        got = self.entry.from_coo(wide_indices, wide_values, (5, 7)).to_dense()
        torch.testing.assert_close(got, accumulate((5, 7), indices, values))

    def test_empty(self, device):
        for shape in SHAPES:
            indices = torch.zeros(2, 0, dtype=torch.int64, device=device)
            matrix = self.entry.from_coo(indices, torch.zeros(0, device=device), shape).validate()
            assert matrix.nnz == 0
            assert torch.equal(matrix.to_dense(), torch.zeros(shape, device=device))
            assert matrix.transpose().validate().nnz == 0
            assert matrix.to_coo().nnz == 0

    def test_index_dtype(self):
        dense = sparse_dense((5, 7))
        assert self.entry.from_dense(dense).index_dtype == torch.int32
        assert self.entry.from_dense(dense, index_dtype=torch.int64).index_dtype == torch.int64
        indices, values = random_entries((5, 7), 12)
        assert self.entry.from_coo(indices.int(), values, (5, 7), index_dtype=torch.int64).index_dtype == torch.int64
        assert self.entry.from_dense(dense, index_dtype=torch.int64).transpose().index_dtype == torch.int64
        assert self.entry.from_torch(dense.to_sparse(), index_dtype=torch.int64).index_dtype == torch.int64
        with pytest.raises(InsumDtypeError, match=r"index_dtype must be torch\.int32 or torch\.int64"):
            self.entry.from_dense(dense, index_dtype=torch.int16)

    @pytest.mark.parametrize("extent", [10**7, 2**33, 2**40], ids=["1e7", "2^33", "2^40"])
    def test_hypersparse_costs_by_entries(self, extent):
        if self.entry.cls is ELL:
            pytest.skip("it has as many slots as rows")
        indices = torch.randint(extent, (2, 1000))
        indices[:, :3] = torch.tensor([[extent - 1, 0, extent - 1], [extent - 1, 0, 0]])
        values = torch.randn(1000, dtype=torch.float64)
        with LargestTensor() as seen:
            matrix = self.entry.from_coo(indices, values, (extent, extent)).validate()
            turned = matrix.transpose()
            entries = matrix.to_coo()
            _ = matrix.nnz
        # An entry brings at most one block of 6, in a group of 3, and a message-free check a few of them.
        assert seen.elements <= 40_000
        assert matrix.index_dtype == (torch.int32 if extent < 2**31 else torch.int64)
        order = sorted(range(1000), key=lambda p: indices[:, p].tolist())
        nonzero = entries.values != 0
        assert torch.equal(torch.stack(entries.indices)[:, nonzero].long(), indices[:, order])
        assert torch.equal(entries.values[nonzero], values[order])
        swapped = turned.to_coo()
        assert sorted(swapped.values.tolist()) == sorted(entries.values.tolist())

    def test_gradients_of_every_conversion(self):
        indices, values = random_entries((3, 4), 8)
        values.requires_grad_()
        weight = torch.randn(3, 4, dtype=torch.float64)

        def dense(v):
            return self.entry.from_coo(indices, v, (3, 4)).to_dense() ** 2

        def through(v):
            built = self.entry.from_coo(indices, v, (3, 4))
            return built.transpose().to_coo().with_values(built.transpose().to_coo().values ** 2).to_dense() * weight.T

        def back(v):
            return (
                self.entry.from_torch(self.entry.from_coo(indices, v, (3, 4)).to_torch(torch.sparse_coo)).to_dense()
                ** 2
            )

        for function in (dense, through, back):
            assert gradcheck(function, (values,))
            # torch's own sparse tensors are differentiable once only.
            assert function is back or gradgradcheck(function, (values,), fast_mode=True)

    def test_gradient_through_from_dense_and_with_values(self):
        dense = sparse_dense((4, 5)).requires_grad_()
        mask = dense.detach() != 0
        assert gradcheck(lambda d: self.entry.from_dense(d, mask=mask).to_dense() ** 2, (dense,))
        matrix = self.entry.from_dense(dense.detach())
        values = matrix.values.clone().requires_grad_()
        with_grad = matrix.with_values(values)
        assert with_grad.requires_grad
        assert not matrix.requires_grad
        assert not with_grad.detach().requires_grad
        assert gradcheck(lambda v: matrix.with_values(v).transpose().to_dense() ** 2, (values,))

    @matrices
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_torch_round_trip(self, shape, layout, device):
        dense = sparse_dense(shape).to(device)
        matrix = self.entry.from_torch(dense.to_sparse(layout=layout)).validate()
        assert torch.equal(matrix.to_dense(), dense)
        tensor = matrix.to_torch(layout)
        assert tensor.layout == layout
        assert torch.equal(tensor.to_dense(), dense)
        parts = {
            torch.sparse_coo: lambda: torch.sparse_coo_tensor(
                tensor.indices(), tensor.values(), shape, is_coalesced=True, check_invariants=True
            ),
            torch.sparse_csr: lambda: torch.sparse_csr_tensor(
                tensor.crow_indices(), tensor.col_indices(), tensor.values(), shape, check_invariants=True
            ),
            torch.sparse_csc: lambda: torch.sparse_csc_tensor(
                tensor.ccol_indices(), tensor.row_indices(), tensor.values(), shape, check_invariants=True
            ),
        }
        assert torch.equal(parts[layout]().to_dense(), dense)

    @pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_bsc], ids=str)
    def test_torch_blocks(self, layout):
        dense = sparse_dense((6, 12), density=0.2)
        tensor = dense.to_sparse(layout=layout, blocksize=(2, 3))
        matrix = self.entry.from_torch(tensor).validate()
        assert torch.equal(matrix.to_dense(), dense)
        if "block_shape" in self.entry.options:
            again = matrix.to_torch(layout)
            assert again.layout == layout
            assert tuple(again.values().shape[1:]) == self.entry.options["block_shape"]
            assert torch.equal(again.to_dense(), dense)
        else:
            with pytest.raises(InsumFormatError, match="cannot make layout"):
                matrix.to_torch(layout)

    def test_torch_gradients_of_compressed_layouts(self):
        dense = sparse_dense((4, 6))
        for layout in (torch.sparse_csr, torch.sparse_csc):
            source = dense.to_sparse(layout=layout)
            values = source.values().clone().requires_grad_()
            plain = source.col_indices() if layout == torch.sparse_csr else source.row_indices()
            pointers = source.crow_indices() if layout == torch.sparse_csr else source.ccol_indices()
            make = torch.sparse_csr_tensor if layout == torch.sparse_csr else torch.sparse_csc_tensor
            (self.entry.from_torch(make(pointers, plain, values, (4, 6))).to_dense() ** 2).sum().backward()
            torch.testing.assert_close(values.grad, 2 * values.detach())
            values.grad = None
            matrix = self.entry.from_coo(self.entry.from_torch(make(pointers, plain, values, (4, 6))))
            (matrix.to_torch(layout).values() ** 2).sum().backward()
            torch.testing.assert_close(values.grad, 2 * values.detach())

    def test_torch_unsorted_and_explicit_zeros(self):
        # torch does not check the order inside a row unless asked.
        tensor = torch.sparse_csr_tensor(
            torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 0.0]), (2, 3)
        )
        matrix = self.entry.from_torch(tensor).validate()
        assert torch.equal(matrix.to_dense(), torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
        if "block_shape" not in self.entry.options:
            assert matrix.nnz == 3
        loose = torch.sparse_coo_tensor(torch.tensor([[1, 0, 1], [2, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (2, 3))
        assert self.entry.from_torch(loose).validate().to_dense()[1, 2] == 5

    def test_torch_wild_indices_are_refused(self):
        wild = torch.sparse_coo_tensor(
            torch.tensor([[0], [9]]), torch.ones(1), (2, 3), is_coalesced=True, check_invariants=False
        )
        with pytest.raises(InsumRangeError, match=r"expected 0 <= col\[p\] < 3; got 9 at \[0\]"):
            self.entry.from_torch(wild)

    def test_torch_refusals(self):
        with pytest.raises(InsumFormatError, match="needs a sparse tensor, got a dense one"):
            self.entry.from_torch(torch.eye(3))
        hybrid = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 3), (2, 3))
        with pytest.raises(InsumShapeError, match="1 sparse and 1 dense dimensions"):
            self.entry.from_torch(hybrid)
        batch = torch.eye(3).expand(2, 3, 3).to_sparse_csr()
        with pytest.raises(InsumShapeError, match="no batch dimension"):
            self.entry.from_torch(batch)

    @matrices
    @pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "lil"])
    def test_scipy_round_trip(self, shape, kind):
        sparse = pytest.importorskip("scipy.sparse")
        if kind == "bsr" and 0 in shape:
            pytest.skip("scipy cannot build an empty BSR")
        dense = sparse_dense(shape)
        matrix = self.entry.from_scipy(sparse.coo_array(dense.numpy()).asformat(kind)).validate()
        assert torch.equal(matrix.to_dense(), dense)
        back = matrix.to_scipy()
        assert back.shape == shape
        assert torch.equal(torch.from_numpy(back.toarray()), dense)
        old = sparse.csr_matrix(dense.numpy())
        assert torch.equal(self.entry.from_scipy(old).to_dense(), dense)

    def test_scipy_duplicates_dtypes_and_refusals(self, device):
        sparse = pytest.importorskip("scipy.sparse")
        source = sparse.coo_array(([1.0, 2.0, 3.0], ([0, 0, 1], [1, 1, 0])), shape=(2, 2))
        matrix = self.entry.from_scipy(source, device=device)
        assert matrix.device.type == device.type
        assert matrix.to_dense().tolist() == [[0.0, 3.0], [3.0, 0.0]]
        source.data[:] = 7
        assert matrix.to_dense().tolist() == [[0.0, 3.0], [3.0, 0.0]]
        with pytest.raises(InsumFormatError, match="needs a scipy sparse array, got ndarray"):
            self.entry.from_scipy(source.toarray())
        with pytest.raises(InsumDtypeError, match="torch has no dtype for scipy's"):
            self.entry.from_scipy(source.astype("longdouble"))
        with pytest.raises(InsumDtypeError, match=r"scipy has no dtype for torch\.bfloat16"):
            matrix.to(dtype=torch.bfloat16).to_scipy()

    def test_from_coo_refusals(self):
        indices, values = torch.tensor([[0, 1], [1, 5]]), torch.ones(2)
        with pytest.raises(
            InsumRangeError, match=r"col: expected 0 <= col\[p\] < 5; got 5 at \[1\] \(1 of 2 entries\)"
        ):
            self.entry.from_coo(indices, values, (2, 5))
        with pytest.raises(InsumRangeError, match=r"row: expected 0 <= row\[p\] < 2; got -1 at \[0\]"):
            self.entry.from_coo(indices - 1, values, (2, 5))
        with pytest.raises(InsumShapeError, match="expected 3 index tensors; got 2"):
            self.entry.from_coo(indices, values, (2, 5, 6))
        with pytest.raises(InsumShapeError, match=r"row: expected shape \(3,\) as values; got shape \(2,\)"):
            self.entry.from_coo(indices, torch.ones(3), (2, 6))
        with pytest.raises(InsumDtypeError, match=r"row: expected int32 or int64; got float32"):
            self.entry.from_coo(indices.float(), values, (2, 6))
        with pytest.raises(InsumDeviceError, match=r"row: expected device cpu of values; got meta"):
            self.entry.from_coo(indices.to("meta"), values, (2, 6))
        with pytest.raises(InsumShapeError, match="needs the shape of the dense tensor"):
            self.entry.from_coo(indices, values)
        with pytest.raises(InsumShapeError, match="needs one value per entry"):
            self.entry.from_coo(indices, None, (2, 6))
        with pytest.raises(InsumShapeError, match="extents of at least 0"):
            self.entry.from_coo(indices, values, (2, -1))
        for shape in ((2.5, 6), "26", 6):
            with pytest.raises(InsumShapeError, match="got the shape"):
                self.entry.from_coo(indices, values, shape)
        with pytest.raises(InsumDtypeError, match=r"needs a torch\.Tensor for row, got list"):
            self.entry.from_coo([[0, 1], [1, 5]], values, (2, 6))
        with pytest.raises(InsumDtypeError, match=r"needs a torch\.Tensor for values, got list"):
            self.entry.from_coo(indices, [1.0, 2.0], (2, 6))
        with pytest.raises(InsumDtypeError, match=r"from_dense needs a torch\.Tensor for dense, got list"):
            self.entry.from_dense([[1.0]])
        with pytest.raises(InsumDtypeError, match=r"from_torch needs a torch\.Tensor for tensor, got list"):
            self.entry.from_torch([[1.0]])
        with pytest.raises(InsumShapeError, match="expected 2 index tensors; got 1"):
            self.entry.from_coo(torch.tensor(0), values, (2, 6))
        with pytest.raises(InsumFormatError, match="got values or shape together with a COO"):
            self.entry.from_coo(COO.from_dense(torch.eye(2)), values)

    def test_from_coo_proves_what_a_constructor_took_on_trust(self):
        wild = COO((2, 3), (torch.tensor([0, 1]), torch.tensor([0, 3])), torch.ones(2))
        with pytest.raises(InsumRangeError, match=r"col: expected 0 <= col\[p\] < 3; got 3 at \[1\]"):
            self.entry.from_coo(wild)
        fine = COO((2, 3), (torch.tensor([1, 0]), torch.tensor([0, 2])), torch.ones(2))
        assert all(fact.proven for fact in self.entry.from_coo(fine).validate().facts.values())


class AnyRankCase(FormatCase):
    """A format of tensors of any number of dimensions."""

    def test_duplicates_can_stay(self):
        indices, values = random_entries((5, 7), 40)
        matrix = self.entry.from_coo(indices, values, (5, 7), coalesce=False).validate()
        assert matrix.nnz == 40
        assert not matrix.coalesced
        torch.testing.assert_close(matrix.to_dense(), accumulate((5, 7), indices, values))
        assert matrix.transpose().validate().nnz == 40
        torch.testing.assert_close(matrix.transpose().to_dense(), accumulate((5, 7), indices, values).T)
        assert matrix.to_coo().nnz < 40

    @pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 2, 4), (3, 0, 2)], ids=str)
    def test_any_rank(self, shape):
        dense = sparse_dense(shape)
        tensor = self.entry.from_dense(dense).validate()
        assert torch.equal(tensor.to_dense(), dense)
        assert torch.equal(tensor.transpose().validate().to_dense(), dense.permute(*reversed(range(len(shape)))))
        indices, values = random_entries(shape, 0 if 0 in shape else 30)
        built = self.entry.from_coo(indices, values, shape).validate()
        torch.testing.assert_close(built.to_dense(), accumulate(shape, indices, values))

    def test_group_dim_is_checked(self):
        if "group_dim" not in self.entry.cls.__dataclass_fields__:
            pytest.skip("not a grouped format")
        with pytest.raises(InsumShapeError, match="group_dim got dimension 2 of a tensor with 2"):
            self.entry.from_dense(torch.eye(3), group_dim=2)
