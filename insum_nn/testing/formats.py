"""The laws of `SparseFormat` as one call, for formats of this package and of others."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from insum_nn.errors import InsumError
from insum_nn.facts import IndexFacts
from insum_nn.formats import COO, SparseFormat
from insum_nn.ops import sddmm, spmm
from insum_nn.ops.arguments import FORMATS
from insum_nn.ops.custom import registered
from insum_nn.testing.tolerances import assert_matches

__all__ = ["SHAPES", "check_format"]

SHAPES: Sequence[tuple[int, int]] = ((5, 7), (6, 6), (1, 9), (8, 1), (0, 4), (4, 0), (0, 0), (13, 11))
"""Rows and columns that no block divides, single ones, none."""


def check_format(kind: type[Any], *, shapes: Sequence[tuple[int, int]] = SHAPES, seed: int = 0, **layout: Any) -> None:
    """Assert that a format of matrices keeps its contract.

    It is built from random matrices of each shape (with an empty row, duplicates among the coordinates and explicit
    zeros),
    and then: `to_dense` gives back the numbers; conversions to and from COO, the transpose and copies keep them; so
    do other
    values, dtypes and index dtypes; gradients reach the values; facts hold, and fall when an index tensor is written
    to;
    `validate` finds an index out of range in each index tensor. `spmm` and `sddmm` agree with a dense computation, in
    value
    and in both gradients, where the format has expressions for them.

    Args:
        kind: the class, with the builders of `insum_nn.formats.CustomFormat`.
        shapes: of the matrices.
        seed: of the random numbers.
        **layout: what the builders are given beyond their own arguments.

    Raises:
        AssertionError: a law is broken; the message names it and the shape.

    >>> from insum_nn.formats import ELL
    >>> check_format(ELL, shapes=[(4, 5)])
    """
    for shape in shapes:
        generator = torch.Generator().manual_seed(seed)
        check = _Check(kind, layout, shape, generator)
        for law in (check.numbers, check.conversions, check.copies, check.values, check.faults, check.operators):
            try:
                law()
            except AssertionError as error:
                raise AssertionError(f"{kind.__name__} of shape {shape}, {law.__name__}: {error}") from error


class _Check:
    """The laws of one format at one shape."""

    def __init__(
        self, kind: type[Any], layout: dict[str, Any], shape: tuple[int, int], generator: torch.Generator
    ) -> None:
        self.kind, self.layout, self.shape, self.generator = kind, layout, shape, generator
        dense = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.dense = dense * (torch.rand(shape, generator=generator) < 0.4)
        if shape[0] > 2:
            self.dense[1] = 0
        self.matrix = self.built(kind.from_dense(self.dense, **layout))

    def built(self, matrix: SparseFormat) -> SparseFormat:
        assert isinstance(matrix, self.kind), f"a builder returned a {type(matrix).__name__}"
        matrix.validate()
        return matrix

    def equal(self, found: Tensor, expected: Tensor, what: str) -> None:
        assert found.shape == expected.shape, f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        assert torch.equal(found, expected), f"{what} has other numbers"

    def numbers(self) -> None:
        matrix = self.matrix
        assert matrix.shape == self.shape, f"its shape is {matrix.shape}"
        self.equal(matrix.to_dense(), self.dense, "from_dense(d).to_dense()")
        assert matrix.nnz >= int((self.dense != 0).sum()), "nnz is less than the nonzero elements"
        for part in matrix.index_parts:
            assert len(part.axes) == part.tensor.ndim, f"{part.field} has other axes than its letters {part.axes}"
            assert set(part.axes) <= set(matrix.value_axes), f"{part.field} has axes that values have not"
        assert list(matrix.tensors) == [*(part.name for part in matrix.index_parts), "Val"], "tensors has other names"
        facts = matrix.facts
        assert all(facts[part.name].proven for part in matrix.index_parts), "facts are not proven"
        assert len(repr(matrix)) < 200, "repr is too long; write @dataclass(frozen=True, eq=False, repr=False)"
        with_nan = self.dense.clone()
        if with_nan.numel():
            with_nan[-1, -1] = torch.nan
            found = self.kind.from_dense(with_nan, **self.layout).to_dense()
            assert torch.equal(found.isnan(), with_nan.isnan()), "NaN does not stay where it is"

    def conversions(self) -> None:
        count = 2 * sum(self.shape) if 0 not in self.shape else 0
        indices = torch.stack([torch.randint(max(1, n), (count,), generator=self.generator) for n in self.shape])
        values = torch.randint(-4, 5, (count,), generator=self.generator).double()
        summed = torch.zeros(self.shape, dtype=torch.float64).index_put(tuple(indices), values, accumulate=True)
        matrix = self.built(self.kind.from_coo(indices, values, self.shape, **self.layout))
        self.equal(matrix.to_dense(), summed, "from_coo with duplicates")
        entries = matrix.entries()
        assert isinstance(entries, COO), "entries() is no COO"
        assert entries.validate().nnz == matrix.nnz, "entries() holds other than nnz entries"
        self.equal(entries.to_dense(), summed, "entries()")
        coo = COO.from_coo(matrix).validate()
        self.equal(coo.to_dense(), summed, "COO.from_coo(f)")
        self.equal(self.built(self.kind.from_coo(coo, **self.layout)).to_dense(), summed, "from_coo(COO)")
        turned = self.built(matrix.transpose())
        self.equal(turned.to_dense(), summed.T, "transpose()")
        self.equal(self.built(turned.transpose()).to_dense(), summed, "transpose() twice")
        assert turned.index_dtype == matrix.index_dtype, "transpose() changes the index dtype"
        self.equal(self.kind.from_torch(summed.to_sparse(), **self.layout).to_dense(), summed, "from_torch")
        for dtype in (torch.int32, torch.int64):
            other = self.built(self.kind.from_dense(summed, index_dtype=dtype, **self.layout))
            assert other.index_dtype == dtype, f"index_dtype={dtype} is not kept"

    def copies(self) -> None:
        matrix, kind = self.matrix, type(self.matrix)
        clones: list[Callable[[SparseFormat], SparseFormat]] = [copy.deepcopy]
        if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind:
            clones.append(lambda each: pickle.loads(pickle.dumps(each)))
        for clone in clones:
            other = self.built(clone(matrix))
            self.equal(other.to_dense(), self.dense, "a copy")
            for name, fact in matrix.facts.items():
                assert _implies(other.facts[name], fact), f"a copy lost a fact of {name}"
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found = self.built(matrix.to(dtype))
            assert found.dtype == dtype, f"to({dtype}) has dtype {found.dtype}"
            assert found.index_dtype == matrix.index_dtype, "to(dtype) casts index tensors"
            self.equal(found.to_dense(), self.dense.to(dtype), f"to({dtype})")

    def values(self) -> None:
        matrix = self.matrix
        other = self.built(matrix.with_values(matrix.values * 3))
        self.equal(other.to_dense(), self.dense * 3, "with_values")
        assert other.facts == matrix.facts, "with_values has other facts"
        dense = self.dense.clone().requires_grad_()
        mask = self.dense != 0
        weights = torch.randn(self.shape, dtype=torch.float64, generator=self.generator)
        found = self.kind.from_dense(dense, mask=mask, **self.layout).to_dense()
        if found.requires_grad:
            (grad,) = torch.autograd.grad((found * weights).sum(), dense)
            self.equal(grad * mask, weights * mask, "the gradient through from_dense and to_dense")
        else:
            assert not mask.any(), "no gradient passes through from_dense and to_dense"

    def faults(self) -> None:
        for part in self.matrix.index_parts:
            if part.tensor.numel():
                for wrong in (self.matrix.grid_shape[part.dim], -2):
                    edited = copy.deepcopy(self.matrix)
                    tensor = next(p.tensor for p in edited.index_parts if p.name == part.name)
                    tensor.view(-1)[-1] = wrong
                    for ask in (lambda e=edited: e.facts, edited.validate):
                        with suppress(InsumError):
                            ask()
                            raise AssertionError(f"{part.field} = {wrong} is not found")

    def operators(self) -> None:
        (m, n), k = self.shape, 3
        own = isinstance(self.matrix, FORMATS)
        if own or registered("spmm", self.kind):
            for width in (0, 1, k):
                operand = torch.randn(n, width, dtype=torch.float64, generator=self.generator)
                self.operator("spmm", lambda f, b: spmm(f, b), lambda a, b: a @ b, [operand])
        if own or registered("sddmm", self.kind):
            sides = [torch.randn(shape, dtype=torch.float64, generator=self.generator) for shape in ((m, k), (k, n))]
            self.operator("sddmm", lambda f, a, b: sddmm(f, a, b).to_dense(), lambda d, a, b: d * (a @ b), sides)

    def operator(
        self, name: str, ours: Callable[..., Tensor], exact: Callable[..., Tensor], operands: Sequence[Tensor]
    ) -> None:
        """Values and gradients of an operator against a dense computation."""
        for dtype in (torch.float64, torch.float32):
            values = self.matrix.values.to(dtype).requires_grad_()
            leaves = [t.to(dtype).requires_grad_() for t in operands]
            found = ours(self.matrix.with_values(values), *leaves)
            wide = values.detach().double().requires_grad_()
            others = [t.detach().double().requires_grad_() for t in leaves]
            expected = exact(self.matrix.with_values(wide).to_dense(), *others)
            assert_matches(found, expected, dtype=dtype, kind="sum")
            upstream = torch.randn(expected.shape, dtype=torch.float64, generator=self.generator)
            unused: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            got = torch.autograd.grad(found, [values, *leaves], upstream.to(dtype), **unused)
            want = torch.autograd.grad(expected, [wide, *others], upstream, **unused)
            for label, one, other in zip(("values", "operand 0", "operand 1"), got, want, strict=False):
                try:
                    assert_matches(one, other, dtype=dtype, kind="gradient")
                except AssertionError as error:
                    raise AssertionError(f"the gradient of {name} for {label}: {error}") from error


def _implies(found: IndexFacts, known: IndexFacts) -> bool:
    """Whether facts say at least what others say; reading a copy may tell more than its builder did."""
    missing = known.masked in (None, found.masked) or found.masked is False
    pairs = set(known.unique_with) <= set(found.unique_with)
    flags = (found.sorted or not known.sorted, found.unique or not known.unique, found.proven or not known.proven)
    return missing and pairs and all(flags)
