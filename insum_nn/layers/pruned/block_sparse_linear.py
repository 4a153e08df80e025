"""Linear layers whose weight is sparse, by blocks or by single numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.formats import BlockCOO, GroupSize
from insum_nn.layers.extents import expand_pair, extent
from insum_nn.layers.pruned.pruned_weight import Forming, PrunedWeight, dense_parameter, kept_of, reaches
from insum_nn.ops.block_linear import (
    BLOCK_LINEAR_FACTS,
    block_linear_stored,
    block_linear_text,
)
from insum_nn.structure.pruning import group_norms, magnitude_mask, touched_blocks
from insum_nn.tiles import tiles

__all__ = ["BlockSparseLinear", "SparseLinear"]


class BlockSparseLinear(PrunedWeight):
    """A linear map whose weight holds dense blocks at chosen places and zeros elsewhere: `torch.nn.Linear`.

        Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]
        Y[n,Row[g],a] += W[Slot[g,q],a,b] * X[n,Col[g,q],b]         with groups of blocks that share their row

    `X` is the input with its leading dimensions flattened to n and its features cut into blocks. Only stored blocks
    are parameters: optimizer state, gradients and checkpoints are as small as the weight. Where many blocks are stored,
    the dense weight is formed for a call, and the library multiplies by it: `repr` says from how many samples on.

    Source: Won, Ahrens, Amarasinghe, Emer, Insum (ASPLOS 2026), section 5 (structured SpMM).

    Attributes:
        weight: (p, a, b) stored blocks, in ascending order of (block row, block column); blocks at the edges of a
            shape that is no multiple of the block hold zeros beyond it.
        bias: (out_features,) or `None`.
        position: (p,) int64, block row times the number of block columns plus block column.

    >>> layer = BlockSparseLinear(96, 64, block_shape=(32, 32), density=0.5)
    >>> layer(torch.randn(2, 7, 96)).shape, layer.weight.shape
    (torch.Size([2, 7, 64]), torch.Size([3, 32, 32]))
    """

    _SINGLE: ClassVar[bool] = False
    _USES = "samples"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block_shape: tuple[int, int] | int = (32, 32),
        mask: Tensor | None = None,
        density: float | None = None,
        group_size: GroupSize = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: Options = DEFAULT,
    ) -> None:
        """Make the parameters.

        Args:
            in_features: extent of the last dimension of the input.
            out_features: extent of the last dimension of the output.
            bias: add a learned constant.
            block_shape: rows (output features) and columns (input features) of a block; one number for both.
            mask: which blocks are stored: bool, over the grid of blocks, or (out_features, in_features): every block
                that it touches is stored whole.
            density: share of the blocks to store, at random places; default all.
            group_size: blocks of one row that a group holds, or `"auto"`: one. It changes speed only.
            device: where parameters and index tensors are made.
            dtype: of weight and bias.
            options: compile options; see `insum_nn.Options`.

        Raises:
            InsumShapeError: an extent is negative, a block's is below 1, or the mask does not fit.
            InsumDtypeError: the mask is not bool.
            InsumFormatError: the density is not in (0, 1], `group_size` is below 1, or mask and density are given.
        """
        super().__init__(group_size, options)
        owner = type(self).__name__
        self.in_features = extent(owner, "in_features", in_features)
        self.out_features = extent(owner, "out_features", out_features)
        self.block_shape = expand_pair(owner, "block_shape", block_shape, 1)
        # Lanes run along samples, which lie a row apart, of single weights.
        self._moved = 4 * sum(self.dense_extents) if self._SINGLE else 0
        cell, outputs = () if self._SINGLE else self.block_shape, self.out_features if bias else None
        self._store(self._choose_mask(mask, density), cell, outputs, device, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw uniformly from +-1/sqrt(k), where an output feature reads k inputs through stored blocks.

        With all blocks stored, this is `nn.Linear`'s rule. With fewer inputs the bound is larger, so that outputs have
        the spread of a dense layer's.
        """
        used, size = self._kernels(self.mask), self.block_shape[0]
        self._draw(self.position // max(self.grid_shape[1], 1), used[::size].sum(1), size)
        # Edge blocks hold zeros beyond the shape.
        self.weight.mul_(self._stored_of(used))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        mask: Tensor | None = None,
        density: float | None = None,
        block_shape: tuple[int, int] | int = (32, 32),
        group_size: GroupSize = "auto",
        options: Options = DEFAULT,
    ) -> Self:
        """Return a block-sparse layer with the weights of a dense one.

        Args:
            linear: the dense layer; it stays as it is.
            mask: which blocks to keep; see the constructor. An element-wise mask keeps whole blocks, their values
                as they are.
            density: keep this share of the blocks, those of the largest Frobenius norm.
            block_shape: rows and columns of a block.
            group_size: see the constructor.
            options: compile options.

        Returns:
            A layer of the same dtype, device, training mode and `requires_grad`. Without mask and density: every
            block that holds a nonzero, or a weight that a mask of `torch.nn.utils.prune` keeps, so that the outputs are
            those of `linear`.

        Warns:
            UserWarning: the blocks that an element-wise mask touches hold more than twice the weights that it keeps.

        >>> dense = nn.Linear(8, 8)
        >>> layer = BlockSparseLinear.from_linear(dense, density=0.25, block_shape=(4, 4))
        >>> layer.num_stored, layer.density
        (1, 0.25)
        """
        shape = expand_pair("BlockSparseLinear", "block_shape", block_shape, 1)
        return cls._made(linear, shape, mask, density, block_shape=shape, group_size=group_size, options=options)

    @classmethod
    def _made(
        cls, linear: nn.Linear, shape: tuple[int, int], mask: Tensor | None, density: float | None, **arguments: Any
    ) -> Self:
        weight, kept = dense_parameter(linear, "weight")
        if weight.dim() != 2:
            raise InsumShapeError(
                f"from_linear takes a layer whose weight is a matrix, got {type(linear).__name__}",
                details=[f"weight: {tuple(weight.shape)}"],
                fix="pass an nn.Linear; a convolution is pruned by PrunedConv2d.from_conv2d.",
            )
        chosen = kept_of(weight, kept, mask, density, lambda w, share: magnitude_mask(group_norms(w, shape), share))
        mask = chosen["mask"]
        bias = linear.bias is not None  # pyright: ignore[reportUnnecessaryComparison] - torch types it as always there
        arguments |= {**chosen, "device": weight.device, "dtype": weight.dtype}
        layer = cls(linear.in_features, linear.out_features, bias, **arguments)
        if mask is not None and mask.shape == weight.shape:
            blocks = touched_blocks(mask, shape)
            if int(_elements(blocks, shape, mask.shape).sum()) > 2 * (elements := int(mask.sum())):
                warnings.warn(
                    f"{cls.__name__}.from_linear: {elements} of {mask.numel()} weights are kept, and the blocks of "
                    f"{shape} that they touch are stored whole: {layer.num_stored} of {blocks.numel()} blocks. "
                    "SparseLinear.from_linear stores the weights alone",
                    stacklevel=3,
                )
        return layer._take_over(linear)

    # Structure.

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Rows and columns of the grid of blocks."""
        return -(-self.out_features // self.block_shape[0]), -(-self.in_features // self.block_shape[1])

    @property
    def dense_extents(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.out_features, self.in_features

    @property
    def matrix(self) -> BlockCOO:
        """The weight as a sparse matrix, (out_features, in_features), that shares the parameter."""
        row, col = self._coordinates(self.position)
        facts = tuple(BLOCK_LINEAR_FACTS["BlockCOO"].values())
        shape = (self.out_features, self.in_features)
        values = self.weight[:, None, None] if self._SINGLE else self.weight
        return BlockCOO(shape, self.block_shape, row, col, values, facts, coalesced=True)

    def to_linear(self) -> nn.Linear:
        """Return a dense layer with the same outputs; a copy."""
        sizes = self.in_features, self.out_features, self.bias is not None
        return self._copied_to(nn.Linear(*sizes, self.weight.device, self.weight.dtype))

    def _coordinates(self, position: Tensor) -> tuple[Tensor, Tensor]:
        cols = max(self.grid_shape[1], 1)
        position = position.to(torch.int32) if math.prod(self.grid_shape) < 1 << 31 else position
        return position // cols, position % cols

    def _make_index(self, position: Tensor) -> dict[str, Tensor]:
        # A library's product takes single blocks, and a generated kernel walks the blocks of a row by itself.
        size = 1 if self.group_size == "auto" else self.group_size
        row, col = self._coordinates(position)
        if size == 1 and type(size) is int:
            return {"Row": row, "Col": col}
        groups = self._groups(row, col, cast("tuple[int, int]", self.grid_shape), size)
        slot = torch.where(groups.col >= 0, groups.values, -1).to(groups.col.dtype)
        return {"Row": groups.row, "Col": groups.col, "Slot": slot}

    def _stored_of(self, dense: Tensor) -> Tensor:
        return tiles(dense, self.block_shape).flatten(0, 1)[self.position].reshape(self.weight.shape)

    def _grid_mask(self, mask: Tensor) -> Tensor | None:
        if tuple(mask.shape) != self.dense_extents:
            return None
        return touched_blocks(mask, self.block_shape)

    def _grid_norms(self, dense: Tensor) -> Tensor:
        return group_norms(dense, self.block_shape)

    def _example(self) -> Tensor:
        return self.weight.new_zeros(1, self.in_features)

    # The dense product.

    def _by_library(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(input, weight, bias)

    def _forming(self, weight: Tensor) -> Forming:
        written, read = self._statements()[0].split(" += ")
        stored, samples = read.split(" * ")
        # With the index of a sample, `n`, left out.
        text = f"H[{written[4:-1]},{samples[4:-1]}] += {stored}"
        rows, cols = self.grid_shape
        shape = (rows, cols) if self._SINGLE else (rows, None, cols, None)
        return text, self._facts(), {"W": weight, **self.index}, self.options, shape

    def _kernels(self, mask: Tensor) -> Tensor:
        return _elements(mask, self.block_shape, self.dense_extents)

    # The map.

    def _statements(self) -> tuple[str, ...]:
        return (block_linear_text(self._form, single=self.block_shape == (1, 1)),)

    @property
    def _form(self) -> str:
        return "slots" if "Slot" in self._index_names else "BlockCOO"

    def forward(self, input: Tensor) -> Tensor:
        """Apply the map.

        Args:
            input: (..., in_features); differentiable.

        Returns:
            (..., out_features). Features that no stored block reads do not count, not even where they are NaN. NaN in
            others reaches every result where the product is the dense weight's; see `repr`.

        Raises:
            InsumShapeError: the last extent of the input is not `in_features`.
            InsumDtypeError: the input's dtype is not the weight's.
            InsumDeviceError: the input is on another device.
        """
        shape = (self.out_features, self.in_features)
        samples = math.prod(input.shape[:-1])
        if reaches(samples, self._fewest) and input.shape[-1:] == shape[1:] and input.device == self.weight.device:
            result = self._by_dense(input, samples, None)
            if result is not None:
                return result
        return block_linear_stored(input, self.weight, self.index, shape, self.bias, options=self.options)

    def _facts(self) -> Mapping[str, IndexFacts]:
        return BLOCK_LINEAR_FACTS[self._form]

    def extra_repr(self) -> str:
        """Sizes, and what is stored."""
        total = math.prod(self.grid_shape)
        parts = [f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"]
        what = "weights" if self._SINGLE else f"block_shape={self.block_shape}, blocks"
        parts += [f"{what}={self.num_stored} of {total}"]
        parts += [f"group_size={self.group_size}"] if self.group_size != "auto" else []
        return ", ".join(parts)


def _elements(blocks: Tensor, block_shape: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """Return a mask over a matrix of a mask over its blocks."""
    return blocks.repeat_interleave(block_shape[0], 0)[: shape[0]].repeat_interleave(block_shape[1], 1)[:, : shape[1]]


class SparseLinear(BlockSparseLinear):
    """A linear map whose weight holds numbers at chosen places and zeros elsewhere: `torch.nn.Linear`.

        Y[n,Row[p]] += W[p] * X[n,Col[p]]

    What `BlockSparseLinear` is for blocks, this is for single weights, such as those of an unstructured or a 2:4 mask.

    Attributes:
        weight: (p,) stored weights, in ascending order of (row, column).
        bias: (out_features,) or `None`.
        position: (p,) int64, row times `in_features` plus column.

    >>> layer = SparseLinear(96, 64, density=0.1)
    >>> layer(torch.randn(2, 7, 96)).shape, layer.weight.shape
    (torch.Size([2, 7, 64]), torch.Size([614]))
    """

    _SINGLE = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mask: Tensor | None = None,
        density: float | None = None,
        options: Options = DEFAULT,
    ) -> None:
        """Make the parameters.

        Args:
            in_features: extent of the last dimension of the input.
            out_features: extent of the last dimension of the output.
            bias: add a learned constant.
            device: where parameters and index tensors are made.
            dtype: of weight and bias.
            mask: which weights are stored: bool, (out_features, in_features).
            density: share of the weights to store, at random places; default all.
            options: compile options; see `insum_nn.Options`.

        Raises:
            InsumShapeError: an extent is negative, or the mask does not fit.
            InsumDtypeError: the mask is not bool.
            InsumFormatError: the density is not in (0, 1], or mask and density are given.
        """
        given: dict[str, Any] = {"mask": mask, "density": density, "device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, block_shape=1, **given, options=options)

    @classmethod
    def from_linear(  # pyright: ignore[reportIncompatibleMethodOverride] - single weights have no blocks and groups
        cls, linear: nn.Linear, *, mask: Tensor | None = None, density: float | None = None, options: Options = DEFAULT
    ) -> Self:
        """Return a sparse layer with the weights of a dense one.

        Args:
            linear: the dense layer; it stays as it is.
            mask: which weights to keep, (out_features, in_features), bool.
            density: keep this share of the weights, those of the largest magnitude.
            options: compile options.

        Returns:
            A layer of the same dtype, device, training mode and `requires_grad`. Without mask and density: every
            nonzero weight, or those that a mask of `torch.nn.utils.prune` keeps, so that the outputs are those of
            `linear`.

        >>> layer = SparseLinear.from_linear(nn.Linear(8, 8), density=0.25)
        >>> layer.num_stored, layer.density
        (16, 0.25)
        """
        return cls._made(linear, (1, 1), mask, density, options=options)
