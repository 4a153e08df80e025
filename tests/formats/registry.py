"""The formats under test: a new format is a row here, and a class in test_every_format.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum_nn.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat

# What is no dense tensor, by the words of messages.
with warnings.catch_warnings():
    # That the layout is a prototype.
    warnings.simplefilter("ignore")
    NOT_DENSE: dict[str, Tensor] = {
        "a nested tensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided),
        "a tensor of layout torch.sparse_coo": torch.eye(4).to_sparse(),
        "an uninitialized parameter or buffer": torch.nn.UninitializedBuffer(),
    }


@dataclass(frozen=True)
class Entry:
    """One way of building one format."""

    name: str
    cls: type[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    any_rank: bool = False
    """Takes tensors of more than two dimensions."""

    def from_dense(self, dense: Tensor, **more: Any) -> SparseFormat:
        return self.cls.from_dense(dense, **{**self.options, **more})

    def from_coo(self, *args: Any, **more: Any) -> SparseFormat:
        return self.cls.from_coo(*args, **{**self.options, **more})

    def from_torch(self, tensor: Tensor, **more: Any) -> SparseFormat:
        return self.cls.from_torch(tensor, **{**self.options, **more})

    def from_scipy(self, matrix: object, **more: Any) -> SparseFormat:
        return self.cls.from_scipy(matrix, **{**self.options, **more})


REGISTRY = [
    Entry("coo", COO, any_rank=True),
    Entry("ell", ELL, any_rank=True),
    Entry("ell-columns", ELL, {"group_dim": 1}, any_rank=True),
    Entry("group-auto", GroupCOO, any_rank=True),
    Entry("group-1", GroupCOO, {"group_size": 1}, any_rank=True),
    Entry("group-3", GroupCOO, {"group_size": 3}, any_rank=True),
    Entry("group-columns", GroupCOO, {"group_size": 2, "group_dim": 1}, any_rank=True),
    Entry("block", BlockCOO, {"block_shape": (2, 3)}),
    Entry("block-1x1", BlockCOO, {"block_shape": (1, 1)}),
    Entry("block-group-auto", BlockGroupCOO, {"block_shape": (2, 3)}),
    Entry("block-group-2", BlockGroupCOO, {"block_shape": (3, 2), "group_size": 2}),
    Entry("row-block", BlockGroupCOO, {"block_shape": (3, 1), "group_size": 2}),
]

BY_NAME = {entry.name: entry for entry in REGISTRY}

# Rows and columns that no block divides, empty rows, empty extents, one full matrix.
SHAPES: list[tuple[int, int]] = [(5, 7), (6, 6), (1, 9), (8, 1), (0, 4), (4, 0), (0, 0), (13, 11)]


def sparse_dense(shape: Sequence[int], density: float = 0.4, dtype: torch.dtype = torch.float64) -> Tensor:
    """A dense tensor of which about `density` is nonzero; its second row is empty."""
    dense = torch.randn(tuple(shape), dtype=dtype) * (torch.rand(tuple(shape)) < density)
    if len(dense.shape) > 1 and dense.shape[0] > 2:
        dense[1] = 0
    return dense


def random_entries(shape: Sequence[int], count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """`count` coordinates (d, count), some of them equal, and values."""
    indices = torch.stack([torch.randint(max(1, extent), (count,)) for extent in shape])
    if count > 3:
        indices[:, -2:] = indices[:, :2]
    return indices, torch.randn(count, dtype=dtype)


def accumulate(shape: Sequence[int], indices: Tensor, values: Tensor) -> Tensor:
    """The dense tensor of coordinates and values by a Python loop: the oracle."""
    dense = torch.zeros(tuple(shape), dtype=values.dtype)
    for position, value in zip(indices.T.tolist(), values.detach(), strict=True):
        dense[tuple(position)] += value
    return dense


Build = Callable[[Tensor], SparseFormat]
