"""Containers and small modules over `SparseConvTensor`."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from insum_nn.errors import InsumNameError
from insum_nn.layers.voxel.base import SparseModule, StatementModule
from insum_nn.layers.voxel.on_features import SparseBatchNorm, SparseReLU, SparseSyncBatchNorm, on_features
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor, check_same_voxels, sparse_add
from insum_nn.ops.sparse_pool import SPARSE_SUM, SPARSE_TO_DENSE

__all__ = [
    "AddTable",
    "AddTableMisaligned",
    "ConcatTable",
    "JoinTable",
    "RemoveDuplicate",
    "RemoveGrid",
    "SparseIdentity",
    "SparseModule",
    "SparseSequential",
    "ToDense",
    "assign_name_for_sparse_modules",
]


def _takes_sparse(module: nn.Module) -> bool:
    return isinstance(module, SparseModule | SparseBatchNorm | SparseSyncBatchNorm | SparseReLU | SparseIdentity)


class SparseSequential(SparseModule):
    """A sequence of sparse modules and dense ones, which are applied to the features.

    Takes modules, one `OrderedDict` of them, or keyword arguments. A module that is no `SparseModule` gets the features
    of a sparse tensor; after `ToDense` modules get the dense tensor. A call returns what the last module returns, so
    its type is `Any`, as that of `torch.nn.Sequential` is.

    >>> model = SparseSequential(nn.Linear(1, 2), nn.ReLU())
    >>> x = SparseConvTensor(torch.ones(3, 1), torch.tensor([[0, 0], [0, 1], [0, 2]], dtype=torch.int32), [3], 1)
    >>> model(x).features.shape, len(model), type(model[-1]).__name__
    (torch.Size([3, 2]), 2, 'ReLU')
    """

    def __init__(self, *args: nn.Module | OrderedDict[str, nn.Module], **kwargs: nn.Module) -> None:
        super().__init__()
        first = args[0] if args else None
        if len(args) == 1 and isinstance(first, OrderedDict):
            named = list(first.items())
        else:
            named = [(str(place), module) for place, module in enumerate(args)]
        for key, module in [*named, *kwargs.items()]:
            self.add(module, key)  # type: ignore[arg-type]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(OrderedDict(list(self._modules.items())[index]))  # type: ignore[arg-type]
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(module for module in self._modules.values() if module is not None)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module; its name is its place unless given.

        Raises:
            InsumNameError: the name is taken.
        """
        key = str(len(self._modules)) if name is None else name
        if key in self._modules:
            raise InsumNameError(f"SparseSequential has a module '{key}' already", fix="give each module its own name.")
        self.add_module(key, module)

    def forward(self, input: Any) -> Any:
        """Run every module in order."""
        for module in self:
            if not _takes_sparse(module) and isinstance(input, SparseConvTensor):
                input = on_features(module, input)
            else:
                input = module(input)
        return input


class ToDense(StatementModule):
    """`SparseConvTensor.dense`: (batch, C, x_1, .., x_d), zeros where no voxel is.

    Out[Cell[p],c] += In[p,c]
    """

    __call__: Callable[..., Tensor]
    EXPRESSION = SPARSE_TO_DENSE

    def forward(self, x: SparseConvTensor) -> Tensor:
        """Densify."""
        return x.dense()


class RemoveGrid(SparseModule):
    """Forget the preallocated grid of a tensor."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Drop it."""
        x.grid = None
        return x


class RemoveDuplicate(SparseModule):
    """Keep the first row of each voxel; kernel maps are dropped if a row is."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Drop rows that repeat a voxel."""
        x.check_rows()
        _, place = torch.unique(x.indices, dim=0, return_inverse=True)
        rows = torch.arange(place.shape[0], device=place.device)
        voxels = int(place.max()) + 1 if place.shape[0] else 0
        if voxels == place.shape[0]:
            return x
        first = torch.full((voxels,), place.shape[0], device=place.device).scatter_reduce_(0, place, rows, "amin")
        return x.select_by_index(first.sort().values)


class SparseIdentity(nn.Identity):
    """`nn.Identity` for sparse and dense tensors."""


class _Table(SparseModule):
    """Base of modules over several tensors, which keep the grid."""

    __call__: Callable[..., SparseConvTensor]

    def input_spatial_size(self, out_size: Sequence[int]) -> Sequence[int]:
        """Return the input's spatial size, which is the output's."""
        return out_size


class JoinTable(_Table):
    """Concatenate the channels of sparse tensors over the same voxels."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """Join."""
        check_same_voxels("JoinTable", input)
        return input[0].replace_feature(torch.cat([x.features for x in input], dim=1))


class AddTable(_Table):
    """Add sparse tensors over the same voxels."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """Add."""
        check_same_voxels("AddTable", input)
        return input[0].replace_feature(reduce(operator.add, [x.features for x in input]))


class AddTableMisaligned(_Table, StatementModule):
    """Add sparse tensors whose voxels may differ; see `sparse_add`.

    Out[Row[p],c] += In[p,c]        for the voxels p of all tensors
    """

    EXPRESSION = SPARSE_SUM

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """Merge and add."""
        return sparse_add(*input)


class ConcatTable(SparseModule):
    """Run several modules on one tensor and return a list of their results."""

    def forward(self, input: SparseConvTensor) -> list[Any]:
        """Fan out."""
        return [module(input) for module in self._modules.values() if module is not None]

    def input_spatial_size(self, out_size: Sequence[int]) -> Sequence[int]:
        """Return the first branch's input spatial size."""
        first: Any = self._modules["0"]
        return first.input_spatial_size(out_size)

    def add(self, module: nn.Module) -> ConcatTable:
        """Append a branch."""
        self.add_module(str(len(self._modules)), module)
        return self


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Give each sparse module its path in `module` as its unique name."""
    for path, child in module.named_modules():
        if isinstance(child, SparseModule):
            child._sparse_unique_name = path
