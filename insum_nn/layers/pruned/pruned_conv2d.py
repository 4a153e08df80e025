"""A 2-d convolution whose filters are pruned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.errors import InsumFormatError
from insum_nn.facts import IndexFacts
from insum_nn.formats import GroupSize
from insum_nn.layers.extents import IntOrInts, channels, expand_pair
from insum_nn.layers.pruned.pruned_module import PrunedModule
from insum_nn.ops.pruned_conv import (
    PRUNED_CONV2D_FACTS,
    check_pruned_conv2d,
    pruned_conv2d,
    pruned_conv2d_expression,
    pruned_conv2d_output,
)
from insum_nn.structure.pruning import filter_mask

__all__ = ["PrunedConv2d"]

Pair = tuple[int, int]
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class PrunedConv2d(PrunedModule):
    """A convolution of dense images with filters that store chosen weights only: `torch.nn.Conv2d`.

        O[n,M[g],p,q] += F[Slot[g,k]] * I[n,C[g,k],p+R[g,k],q+S[g,k]]

    A group holds up to k stored weights of one filter. Stride and padding stand in the subscripts, the dilation in the
    tables R and S, groups of channels in C.

    Source: Won, Hong, Mendis, Emer, Amarasinghe, Unified Convolution Framework (MLSys 2023), section 4.1.

    Attributes:
        weight: (p,) stored weights in ascending order of their place.
        bias: (out_channels,) or `None`.
        position: (p,) int64, places in the flattened (out_channels, in_channels / groups, rows, columns).

    >>> layer = PrunedConv2d(4, 8, 3, padding=1, density=0.25)
    >>> layer(torch.randn(2, 4, 9, 7)).shape, layer.weight.shape
    (torch.Size([2, 8, 9, 7]), torch.Size([72]))
    """

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
            kernel_size: rows and columns of the kernel; one number for both.
            stride: step of the kernel.
            padding: rows and columns added on each side, `"same"` or `"valid"`.
            dilation: step between kernel cells.
            groups: groups of channels.
            bias: add a learned constant.
            padding_mode: `"zeros"`, `"reflect"`, `"replicate"` or `"circular"`.
            device: where parameters and index tensors are made.
            dtype: of weight and bias.
            mask: which weights are stored: bool, (out_channels, in_channels / groups, rows, columns).
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
        owner = "PrunedConv2d"
        self.in_channels, self.out_channels, self.groups = channels(owner, in_channels, out_channels, groups)
        self.kernel_size = expand_pair(owner, "kernel_size", kernel_size, 1)
        self.stride = expand_pair(owner, "stride", stride, 1)
        self.dilation = expand_pair(owner, "dilation", dilation, 1)
        self.padding: Pair | str = padding if isinstance(padding, str) else expand_pair(owner, "padding", padding, 0)
        self.padding_mode = padding_mode
        self._check()
        self._store(self._choose_mask(mask, density), (), self.out_channels if bias else None, device, dtype)

    def _check(self) -> None:
        if self.padding == "same" and self.stride != (1, 1):
            raise InsumFormatError(
                f"PrunedConv2d: padding='same' with stride {self.stride} has no meaning",
                fix="pass padding as numbers.",
                argument="padding",
                got=self.padding,
            )
        paddings = ("same", "valid", *([] if isinstance(self.padding, str) else [self.padding]))
        for name, value, known in (("padding", self.padding, paddings), ("padding_mode", self.padding_mode, _MODES)):
            if value not in known:
                raise InsumFormatError(
                    f"PrunedConv2d: '{name}' is {value!r}",
                    details=[f"expected one of {', '.join(map(repr, known))}"],
                    fix="pass one of these." if name == "padding_mode" else "pass one of these, or numbers.",
                    argument=name,
                    got=value,
                )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw uniformly as `nn.Conv2d` does, within one over the root of the weights that a filter stores."""
        each = math.prod(self.grid_shape[1:])
        filters = self.position // max(each, 1)
        counts = torch.zeros(self.out_channels, dtype=torch.int64, device=filters.device)
        counts.index_add_(0, filters, torch.ones_like(filters))
        self._draw(filters, counts, 1)

    @classmethod
    def from_conv2d(
        cls,
        conv: nn.Conv2d,
        *,
        mask: Tensor | None = None,
        density: float | None = None,
        pattern: str | None = None,
        group_size: GroupSize = "auto",
        options: Options = DEFAULT,
    ) -> Self:
        """Return a layer with pruned filters and the weights of a dense one.

        Args:
            conv: the dense layer; it stays as it is.
            mask: which weights to keep, of the shape of `conv.weight`.
            density: keep this share of the weights, those of the largest magnitude.
            pattern: with a density, the axes along which the mask varies, by default all; see `filter_mask`.
            group_size: see the constructor.
            options: compile options.

        Returns:
            A layer of the same dtype, device, training mode and `requires_grad`. Without mask and density: every
            nonzero weight, so that the outputs are those of `conv`.

        Raises:
            InsumFormatError: a pattern without a density, or with a mask.

        >>> layer = PrunedConv2d.from_conv2d(nn.Conv2d(4, 8, 3), density=0.25, pattern="MC")
        >>> layer.num_stored, layer.mask[0, 0].any() == layer.mask[0, 0].all()
        (72, tensor(True))
        """
        if pattern is not None and (density is None or mask is not None):
            raise InsumFormatError(
                f"PrunedConv2d.from_conv2d: pattern={pattern!r} is for a density without a mask",
                details=[f"got: density={density}, mask={'none' if mask is None else 'a tensor'}"],
                fix="pass density= with pattern=, and no mask.",
            )
        weight = conv.weight.detach()
        if density is not None and mask is None and not weight.is_meta:
            mask, density = filter_mask(weight, density, pattern or "MCRS"), None
        elif mask is None and density is None and not weight.is_meta:
            mask = weight != 0
        layer = cls(
            **_shared_arguments(conv),
            mask=mask,
            density=density,
            group_size=group_size,
            options=options,
        )
        return layer._take_over(conv)

    # Structure.

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """(out_channels, in_channels / groups, rows, columns)."""
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size

    @property
    def dense_extents(self) -> tuple[int, ...]:
        """The grid's places are single weights, so this is `grid_shape`."""
        return self.grid_shape

    def _stored_of(self, dense: Tensor) -> Tensor:
        return dense.reshape(-1)[self.position]

    def to_dense(self) -> Tensor:
        """Return the dense filters, (out_channels, in_channels / groups, rows, columns); differentiable."""
        flat = self.weight.new_zeros(math.prod(self.grid_shape))
        return flat.index_put((self.position,), self.weight).reshape(self.grid_shape)

    def to_conv2d(self) -> nn.Conv2d:
        """Return a dense layer with the same outputs; a copy."""
        conv = nn.Conv2d(**_shared_arguments(self))
        return self._copied_to(conv)

    def _make_index(self, position: Tensor) -> dict[str, Tensor]:
        filters, inputs, rows, cols = self.grid_shape
        each = max(inputs * rows * cols, 1)
        groups = self._groups(position // each, position % each, (filters, each), self.group_size)
        used = groups.col >= 0
        place = groups.col.long()
        first = groups.row.long()[:, None] // max(filters // self.groups, 1) * inputs
        tables = {
            "Slot": groups.values,
            "C": place // (rows * cols) + first,
            "R": place // cols % rows * self.dilation[0],
            "S": place % cols * self.dilation[1],
        }
        dtype = groups.row.dtype
        return {"M": groups.row, **{name: torch.where(used, t, -1).to(dtype) for name, t in tables.items()}}

    def _grid_norms(self, dense: Tensor) -> Tensor:
        return dense.abs()

    def _example(self) -> Tensor:
        sides = zip(self.dilation, self.kernel_size, self.zeros, strict=True)
        size = [step * (cells - 1) + 1 + sum(zeros) for step, cells, zeros in sides]
        return self.weight.new_zeros(1, self.in_channels, *size)

    def _dense_gradient(self, input: Tensor, grad_output: Tensor) -> Tensor:
        batched = input.ndim == 4
        input, grad = (input, grad_output) if batched else (input[None], grad_output[None])
        wide = torch.promote_types(grad.dtype, torch.float32)
        padded, _ = self._padded(input.to(wide), every_mode=True)
        # torch types stride and dilation as integers, and takes pairs.
        steps: dict[str, Any] = {"stride": self.stride, "dilation": self.dilation}
        return conv2d_weight(padded, self.grid_shape, grad.to(wide), groups=self.groups, **steps)

    # The convolution.

    @property
    def zeros(self) -> tuple[Pair, Pair]:
        """Padding (before, after) of the rows, and of the columns."""
        if self.padding == "valid":
            return (0, 0), (0, 0)
        if self.padding == "same":
            total = [step * (cells - 1) for step, cells in zip(self.dilation, self.kernel_size, strict=True)]
            rows, cols = ((zeros // 2, zeros - zeros // 2) for zeros in total)
            return rows, cols
        rows, cols = cast(Pair, self.padding)
        return (rows, rows), (cols, cols)

    def _padded(self, input: Tensor, *, every_mode: bool = False) -> tuple[Tensor, tuple[Pair, Pair]]:
        """Return the input padded by all but zeros, and the padding that is left to the subscripts."""
        (top, bottom), (left, right) = zeros = self.zeros
        if self.padding_mode == "zeros" and not every_mode:
            return input, zeros
        padded = functional.pad(input, (left, right, top, bottom), mode=_MODES[self.padding_mode])
        return padded, ((0, 0), (0, 0))

    def _statements(self) -> tuple[str, ...]:
        (top, _), (left, _) = self.zeros
        padding = (top, left) if self.padding_mode == "zeros" else (0, 0)
        return (pruned_conv2d_expression(self.stride, padding),)

    def _facts(self) -> Mapping[str, IndexFacts]:
        return PRUNED_CONV2D_FACTS

    def forward(self, input: Tensor) -> Tensor:
        """Convolve.

        Args:
            input: (n, in_channels, rows, columns), or one image without n; differentiable.

        Returns:
            (n, out_channels, ..), or without n. Pixels that no stored weight reads do not count, not even where they
            are NaN.

        Raises:
            InsumShapeError: the input has another rank or other channels, or the kernel does not fit it.
            InsumDtypeError: the input's dtype is not the weight's.
            InsumDeviceError: the input is on another device.
        """
        single = input.ndim == 3
        images = input.unsqueeze(0) if single else input
        check_pruned_conv2d(images, self.weight, self.in_channels, self.bias, self._statements()[0])
        images, zeros = self._padded(images)
        size = images.shape[2], images.shape[3]
        output = pruned_conv2d_output(size, self.kernel_size, self.stride, zeros, self.dilation)
        result = pruned_conv2d(
            images,
            self.weight,
            self.index,
            (self.in_channels, self.out_channels),
            output,
            self.bias,
            stride=self.stride,
            padding=(zeros[0][0], zeros[1][0]),
            options=self.options,
        )
        return result.squeeze(0) if single else result

    def extra_repr(self) -> str:
        """Arguments that differ from their defaults, and what is stored."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        plain = {"padding": (0, 0), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros", "group_size": "auto"}
        parts += [
            f"{name}={getattr(self, name)!r}" for name, default in plain.items() if getattr(self, name) != default
        ]
        parts += ["bias=False"] if self.bias is None else []
        parts += [f"weights={self.num_stored} of {math.prod(self.grid_shape)}"]
        return ", ".join(parts)


def _shared_arguments(layer: nn.Conv2d | PrunedConv2d) -> dict[str, Any]:
    """Return the arguments of a layer's constructor that the dense and the pruned layer have in common."""
    names = "in_channels out_channels kernel_size stride padding dilation groups padding_mode".split()
    weight = layer.weight
    own = {"bias": layer.bias is not None, "device": weight.device, "dtype": weight.dtype}
    return {**{name: getattr(layer, name) for name in names}, **own}
