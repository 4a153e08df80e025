"""Convolutions whose filters are pruned, in one to three dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumFormatError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.faults import check_choice
from insum_nn.formats import GroupSize
from insum_nn.layers.extents import IntOrInts, OfDimension, channels, expand_nd
from insum_nn.layers.pruned.pruned_weight import DenseConv, Forming, PrunedWeight, dense_parameter, kept_of, reaches
from insum_nn.ops.pruned_conv import (
    KERNEL_AXES,
    PRUNED_CONV_FACTS,
    check_pruned_conv,
    pruned_conv,
    pruned_conv_expression,
    pruned_conv_output,
)
from insum_nn.structure.pruning import filter_mask

__all__ = ["PrunedConv", "PrunedConv1d", "PrunedConv2d", "PrunedConv3d"]

Dense = TypeVar("Dense", bound=DenseConv)
Layer = TypeVar("Layer", bound="PrunedConv[Any]")
_PLACES = NamedFacts(P=IndexFacts(sorted=True, unique=True, masked=False, proven=True))
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class PrunedConv(PrunedWeight, OfDimension, Generic[Dense]):
    """A convolution of dense inputs with filters that store chosen weights only; base of the three dimensions.

        O[n,M[g],p,q,..] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k],..]

    A group holds up to k stored weights of one filter. Stride and padding stand in the subscripts, the dilation in the
    tables R, S and T, groups of channels in C.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), section 4.1.

    Attributes:
        weight: (p,) stored weights in ascending order of their place.
        bias: (out_channels,) or `None`.
        position: (p,) int64, places in the flattened (out_channels, in_channels / groups, *kernel_size).
        zeros: padding (before, after) of each axis.
    """

    _USES, _SHORT = "cells of an output channel", 7

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts | str = 0,
        dilation: IntOrInts = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mask: Tensor | None = None,
        density: float | None = None,
        group_size: GroupSize = "auto",
        options: Options = DEFAULT,
    ) -> None:
        """Make the parameters.

        Args:
            in_channels: channels read.
            out_channels: filters.
            kernel_size: extents of the kernel; one number for all axes.
            stride: step of the kernel.
            padding: cells added on each side of each axis, `"same"` or `"valid"`.
            dilation: step between kernel cells.
            groups: groups of channels.
            bias: add a learned constant.
            padding_mode: `"zeros"`, `"reflect"`, `"replicate"` or `"circular"`.
            device: where parameters and index tensors are made.
            dtype: of weight and bias.
            mask: which weights are stored: bool, (out_channels, in_channels / groups, *kernel_size).
            density: share of the weights to store, at random places; default all.
            group_size: stored weights of one filter that a group holds, or `"auto"`: the rule of
                `choose_group_size`. It changes speed only.
            options: compile options; see `insum_nn.Options`.

        Raises:
            InsumShapeError: an extent is out of range, groups do not divide the channels, or the mask does not fit.
            InsumDtypeError: the mask is not bool.
            InsumFormatError: an unknown padding; the density is not in (0, 1]; mask and density are given.
        """
        super().__init__(group_size, options)
        owner = type(self).__name__
        self.in_channels, self.out_channels, self.groups = channels(owner, in_channels, out_channels, groups)

        def sizes(name: str, value: object, least: int = 1) -> tuple[int, ...]:
            return tuple(expand_nd(owner, name, self.NDIM, value, least))

        self.kernel_size, self.stride = sizes("kernel_size", kernel_size), sizes("stride", stride)
        self.dilation = sizes("dilation", dilation)
        self.padding = padding if isinstance(padding, str) else sizes("padding", padding, 0)
        self.padding_mode = padding_mode
        self._check()
        self.zeros, self._moved = self._zeros(), self.in_channels + self.out_channels
        self._store(self._choose_mask(mask, density), (), self.out_channels if bias else None, device, dtype)

    def _check(self) -> None:
        if self.padding == "same" and max(self.stride) > 1:
            raise InsumFormatError(
                f"{type(self).__name__}: padding='same' with stride {self.stride} has no meaning",
                fix="pass padding as numbers.",
                argument="padding",
                got=self.padding,
            )
        owner = type(self).__name__
        if isinstance(self.padding, str):
            check_choice(f"{owner}: 'padding'", self.padding, ("same", "valid"))
        check_choice(f"{owner}: 'padding_mode'", self.padding_mode, [*_MODES])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw uniformly as torch's convolutions do, within one over the root of the weights that a filter stores."""
        filters = self.position // max(math.prod(self.grid_shape[1:]), 1)
        self._draw(filters, self.mask.flatten(1).sum(1), 1)

    # Structure.

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """(out_channels, in_channels / groups, *kernel_size)."""
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size

    def _stored_of(self, dense: Tensor) -> Tensor:
        return dense.reshape(-1)[self.position]

    def to_conv(self) -> Dense:
        """Return a dense layer with the same outputs; a copy."""
        return self._copied_to(cast(Dense, getattr(nn, f"Conv{self.NDIM}d")(**_shared_arguments(self))))

    def _make_index(self, position: Tensor) -> dict[str, Tensor]:
        filters, *shape = self.grid_shape
        each = max(math.prod(shape), 1)
        groups = self._groups(position // each, position % each, (filters, each), self.group_size)
        dtype, used = groups.row.dtype, groups.col >= 0
        inputs, *cells = torch.unravel_index(groups.col.long(), [max(extent, 1) for extent in shape])
        first = groups.row.long()[:, None] // max(filters // self.groups, 1) * shape[0]
        tables = {"Slot": groups.values, "C": inputs + first}
        tables |= {name: at * step for name, at, step in zip(KERNEL_AXES, cells, self.dilation, strict=False)}
        return {"M": groups.row, **{name: torch.where(used, t, -1).to(dtype) for name, t in tables.items()}}

    def _grid_norms(self, dense: Tensor) -> Tensor:
        return dense.abs()

    def _example(self) -> Tensor:
        sides = zip(self.dilation, self.kernel_size, self.zeros, strict=True)
        size = [step * (cells - 1) + 1 + sum(zeros) for step, cells, zeros in sides]
        return self.weight.new_zeros(1, self.in_channels, *size)

    # The dense product.

    def _by_library(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        even = self._before and all(before == after for before, after in self.zeros)
        padded, padding = (input, self._before) if even else (self._padded(input), 0)
        steps = self.stride, padding, self.dilation, self.groups
        return getattr(functional, f"conv{self.NDIM}d")(padded, weight, bias, *steps)

    def _forming(self, weight: Tensor) -> Forming:
        named, size = {"P": self.position, "F": weight}, math.prod(self.grid_shape)
        return "H[P[p]] += F[p]", _PLACES, named, self.options, (size,)

    def _kernels(self, mask: Tensor) -> Tensor:
        return torch.block_diag(*mask.flatten(2).any(2).chunk(self.groups))

    def _uses(self, width: int, row: int | None) -> float:
        # A library takes as many channels of each group.
        alike = self.groups == 1 or (self._read is None and self._written is None)
        return super()._uses(width, row) if alike else math.inf

    # The convolution.

    def _zeros(self) -> tuple[tuple[int, int], ...]:
        if self.padding == "same":
            total = (step * (cells - 1) for step, cells in zip(self.dilation, self.kernel_size, strict=True))
            return tuple((zeros // 2, zeros - zeros // 2) for zeros in total)
        numbers = (0,) * self.NDIM if isinstance(self.padding, str) else self.padding
        return tuple((zeros, zeros) for zeros in numbers)

    @property
    def _before(self) -> list[int]:
        """Zeros before each axis, which stand in the subscripts; none where the padding is no zeros."""
        return [before for before, _ in self.zeros] if self.padding_mode == "zeros" else []

    def _padded(self, input: Tensor) -> Tensor:
        # torch takes the last axis first.
        sides = [side for axis in reversed(self.zeros) for side in axis]
        return functional.pad(input, sides, mode=_MODES[self.padding_mode])

    def _statements(self) -> tuple[str, ...]:
        return (pruned_conv_expression(self.stride, self._before),)

    def _facts(self) -> Mapping[str, IndexFacts]:
        return PRUNED_CONV_FACTS[self.NDIM]

    def forward(self, input: Tensor) -> Tensor:
        """Convolve.

        Args:
            input: (n, in_channels, ..) with the kernel's number of axes, or one sample without n; differentiable.

        Returns:
            (n, out_channels, ..), or without n. Cells that no stored weight reads do not count, not even where they
            are NaN; where the product is the dense weight's (see `repr`), that holds of channels.

        Raises:
            InsumShapeError: the input has another rank or other channels, or the kernel does not fit it.
            InsumDtypeError: the input's dtype is not the weight's.
            InsumDeviceError: the input is on another device.
        """
        single = input.ndim == 1 + self.NDIM
        samples = input.unsqueeze(0) if single else input
        check_pruned_conv(samples, self.weight, self.in_channels, self.bias, self._statements()[0], self.NDIM)
        steps = self.kernel_size, self.stride
        output = pruned_conv_output(samples.shape[2:], *steps, self.zeros, self.dilation)
        uses = samples.shape[0] * math.prod(output)
        if reaches(uses, self._fewest) and (result := self._by_dense(input, uses, output[-1])) is not None:
            return result
        result = pruned_conv(
            samples if self._before else self._padded(samples),
            self.weight,
            self.index,
            (self.in_channels, self.out_channels),
            output,
            self.bias,
            stride=self.stride,
            padding=self._before,
            options=self.options,
        )
        return result.squeeze(0) if single else result

    def extra_repr(self) -> str:
        """Arguments that differ from their defaults, and what is stored."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        zeros, ones = (0,) * self.NDIM, (1,) * self.NDIM
        plain = {"padding": zeros, "dilation": ones, "groups": 1, "padding_mode": "zeros", "group_size": "auto"}
        parts += [f"{name}={own!r}" for name, default in plain.items() if (own := getattr(self, name)) != default]
        parts += ["bias=False"] if self.bias is None else []
        parts += [f"weights={self.num_stored} of {math.prod(self.grid_shape)}"]
        return ", ".join(parts)


def _shared_arguments(layer: DenseConv | PrunedConv[Any]) -> dict[str, Any]:
    """Return the arguments of a layer's constructor that the dense and the pruned layer have in common."""
    names = "in_channels out_channels kernel_size stride padding dilation groups padding_mode".split()
    weight = layer.weight
    own = {"bias": layer.bias is not None, "device": weight.device, "dtype": weight.dtype}
    return {**{name: getattr(layer, name) for name in names}, **own}


def _from_conv(
    cls: type[Layer],
    conv: DenseConv,
    *,
    mask: Tensor | None = None,
    density: float | None = None,
    pattern: str | None = None,
    group_size: GroupSize = "auto",
    options: Options = DEFAULT,
) -> Layer:
    """Return a layer with pruned filters and the weights of a dense one.

    Args:
        cls: a class of as many dimensions.
        conv: the dense layer; it stays as it is.
        mask: which weights to keep, of the shape of `conv.weight`.
        density: keep this share of the weights, those of the largest magnitude.
        pattern: with a density, the axes along which the mask varies, by default all; see `filter_mask`.
        group_size: see the constructor.
        options: compile options.

    Returns:
        A layer of the same dtype, device, training mode and `requires_grad`. Without mask and density: every
        nonzero weight, or those that a mask of `torch.nn.utils.prune` keeps, so that the outputs are those of `conv`.

    Raises:
        InsumFormatError: a pattern without a density, or with a mask.
    """
    if pattern is not None and (density is None or mask is not None):
        raise InsumFormatError(
            f"{cls.__name__}.from_conv{cls.NDIM}d: pattern={pattern!r} is for a density without a mask",
            details=[f"got: density={density}, mask={'none' if mask is None else 'a tensor'}"],
            fix="pass density= with pattern=, and no mask.",
        )
    weight, kept = dense_parameter(conv, "weight")
    chosen = kept_of(weight, kept, mask, density, partial(filter_mask, pattern=pattern))
    layer = cls(**_shared_arguments(conv), **chosen, group_size=group_size, options=options)
    return layer._take_over(conv)


class PrunedConv1d(PrunedConv[nn.Conv1d], ndim=1):
    """A convolution of sequences with filters that store chosen weights only: `torch.nn.Conv1d`; see `PrunedConv`.

        O[n,M[g],p] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k]]

    >>> layer = PrunedConv1d(4, 8, 3, padding=1, density=0.25)
    >>> layer(torch.randn(2, 4, 9)).shape, layer.weight.shape
    (torch.Size([2, 8, 9]), torch.Size([24]))
    """

    from_conv1d, to_conv1d = classmethod(_from_conv), PrunedConv[nn.Conv1d].to_conv


class PrunedConv2d(PrunedConv[nn.Conv2d], ndim=2):
    """A convolution of images with filters that store chosen weights only: `torch.nn.Conv2d`; see `PrunedConv`.

        O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k]]

    >>> layer = PrunedConv2d(4, 8, 3, padding=1, density=0.25)
    >>> layer(torch.randn(2, 4, 9, 7)).shape, layer.weight.shape
    (torch.Size([2, 8, 9, 7]), torch.Size([72]))
    >>> layer = PrunedConv2d.from_conv2d(nn.Conv2d(4, 8, 3), density=0.25, pattern="MC")
    >>> layer.num_stored, layer.mask[0, 0].any() == layer.mask[0, 0].all()
    (72, tensor(True))
    """

    from_conv2d, to_conv2d = classmethod(_from_conv), PrunedConv[nn.Conv2d].to_conv


class PrunedConv3d(PrunedConv[nn.Conv3d], ndim=3):
    """A convolution of volumes with filters that store chosen weights only: `torch.nn.Conv3d`; see `PrunedConv`.

        O[n,M[g],p,q,r] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k],r+T[g,k]]

    >>> layer = PrunedConv3d(4, 8, 3, padding=1, density=0.25)
    >>> layer(torch.randn(2, 4, 5, 7, 3)).shape, layer.weight.shape
    (torch.Size([2, 8, 5, 7, 3]), torch.Size([216]))
    """

    from_conv3d, to_conv3d = classmethod(_from_conv), PrunedConv[nn.Conv3d].to_conv
