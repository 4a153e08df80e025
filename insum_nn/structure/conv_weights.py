"""Weights of sparse convolutions in the layouts of other libraries, both ways.

Libraries differ in the order of a kernel's cells, in the order of channels, and in which cell of an even kernel lies on
the voxel (its anchor). Only the first two are a matter of weights; `kernel_anchor` gives the third, for `anchor=` of a
submanifold layer or `padding=` of a strided one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from insum_nn.errors import InsumFormatError, InsumNameError, InsumShapeError
from insum_nn.faults import check_choice

__all__ = ["WeightLayout", "convert_state_dict", "export_weight", "import_weight", "kernel_anchor"]

WeightLayout = Literal["spconv", "spconv_pointwise", "spconv_rsck", "spconv_rskc", "minkowski", "torchsparse"]
"""`spconv`: (O, k.., I), ours. `spconv_pointwise`: the same shape, of layers with a kernel of one cell that are
submanifold or of stride 1, spconv's and ours, which multiply by the numbers read as (I, O). `spconv_rsck`:
(k.., I, O) and `spconv_rskc`: (k.., O, I), of spconv 1 and 2.1. `minkowski`, `torchsparse`: (cells, I, O), or (I, O)
for one cell."""


def kernel_anchor(layout: WeightLayout, kernel_size: Sequence[int]) -> tuple[int, ...]:
    """Return the kernel cell that lies on the voxel in a layer of stride 1, per axis.

    For a strided layer the same numbers, times the dilation, are its padding.

    >>> kernel_anchor("spconv", (3, 2)), kernel_anchor("minkowski", (3, 2)), kernel_anchor("torchsparse", (3, 4))
    ((1, 1), (1, 0), (1, 1))
    """
    _check_layout(layout)
    if layout == "minkowski":
        return tuple(k // 2 if k % 2 else 0 for k in kernel_size)
    if layout == "torchsparse":
        return tuple((k - 1) // 2 for k in kernel_size)
    return tuple(k // 2 for k in kernel_size)


def import_weight(weight: Tensor, layout: WeightLayout, kernel_size: Sequence[int]) -> Tensor:
    """Return a weight of another library in this package's layout.

    Args:
        weight: in `layout`.
        layout: where it comes from.
        kernel_size: k_1, .., k_d.

    Returns:
        (O, k_1, .., k_d, I), contiguous, or of `spconv_pointwise` a view; differentiable.

    Raises:
        InsumShapeError: the weight has not the shape of that layout and kernel.

    >>> import torch
    >>> import_weight(torch.arange(3.0).reshape(3, 1, 1), "minkowski", (3,)).flatten().tolist()
    [0.0, 1.0, 2.0]
    """
    _check_layout(layout)
    kernel = tuple(kernel_size)
    volume, cells, ndim = math.prod(kernel), layout in _IN_CELLS, len(kernel) + 2
    if cells and weight.ndim == 2 and volume == 1:
        weight = weight.unsqueeze(0)
    axes = _axes(layout, kernel)
    # What is no number of cells is a number of channels.
    extents = [kernel[axis - 1] if 0 < axis < ndim - 1 else -1 for axis in axes]
    grid = weight.unflatten(0, extents[:-2]) if cells and weight.ndim == 3 and weight.shape[0] == volume else weight
    fits = grid.ndim == ndim and all(want in (-1, got) for want, got in zip(extents, grid.shape, strict=True))
    if not fits or (layout == "spconv_pointwise" and volume != 1):
        raise _wrong_shape(weight, layout, kernel)
    if layout == "spconv_pointwise":
        return weight.reshape(weight.shape[-1], *kernel, weight.shape[0]).transpose(0, -1)
    return grid.permute(*map(axes.index, range(ndim))).contiguous()


def export_weight(weight: Tensor, layout: WeightLayout) -> Tensor:
    """Return the inverse of `import_weight`.

    Args:
        weight: (O, k_1, .., k_d, I).
        layout: where it goes to.

    Returns:
        The weight in `layout`, contiguous.

    >>> import torch
    >>> weight = torch.randn(4, 3, 2, 5)
    >>> torch.equal(import_weight(export_weight(weight, "torchsparse"), "torchsparse", (3, 2)), weight)
    True
    """
    _check_layout(layout)
    if layout == "spconv_pointwise":
        return weight.transpose(0, -1).reshape(weight.shape)
    grid = weight.permute(_axes(layout, tuple(weight.shape[1:-1]))).contiguous()
    if layout not in _IN_CELLS:
        return grid
    cells = grid.flatten(0, -3)
    return cells[0] if cells.shape[0] == 1 else cells


def convert_state_dict(
    state: Mapping[str, Tensor], layout: WeightLayout, target: nn.Module | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the state of another library's model under the names and in the layout of ours.

    `X.kernel` becomes `X.weight`, MinkowskiEngine's `X.bn.weight` becomes `X.weight`, its biases (1, O) become (O,).

    Args:
        state: the other model's `state_dict()`.
        layout: the library it comes from.
        target: our model, which tells its keys, its kernel sizes and how its layers store their weights. Its
            `state_dict()` will do where no kernel has only one cell.

    Returns:
        A state for `load_state_dict`, with exactly the keys of `target`.

    Raises:
        InsumNameError: a key of either has no partner.
        InsumShapeError: a weight does not fit.
        InsumFormatError: `target` is a state with a kernel of one cell, whose order depends on the layer.

    >>> import torch
    >>> ours = {"c.weight": torch.zeros(2, 3, 3, 4)}
    >>> convert_state_dict({"c.kernel": torch.zeros(9, 4, 2)}, "minkowski", ours)["c.weight"].shape
    torch.Size([2, 3, 3, 4])
    """
    _check_layout(layout)
    layouts = _layouts(target)
    target = target.state_dict() if isinstance(target, nn.Module) else target
    found: dict[str, Tensor] = {}
    strangers: list[str] = []
    for key, tensor in state.items():
        name = _our_name(key, target)
        if name is None:
            strangers.append(key)
            continue
        like = target[name]
        is_kernel = name.endswith("weight") and like.ndim >= 3
        value = import_weight(tensor, layout, tuple(like.shape[1:-1])) if is_kernel else tensor
        if is_kernel and value.shape == like.shape:
            value = export_weight(value, _own_layout(name, like, layouts))
        if value.shape != like.shape and value.numel() == like.numel() and not is_kernel:
            value = value.reshape(like.shape)
        if value.shape != like.shape:
            raise InsumShapeError(
                f"'{key}' does not fit '{name}'",
                details=[
                    f"expected shape {tuple(like.shape)}; got {tuple(tensor.shape)}, which gives {tuple(value.shape)}"
                ],
                fix="build the model with the widths and kernel sizes of the saved one.",
                expected=tuple(like.shape),
                got=tuple(tensor.shape),
            )
        found[name] = value
    missing = [name for name in target if name not in found]
    if strangers or missing:
        raise InsumNameError(
            "the saved state and the model have different keys",
            details=[f"without a place: {strangers}", f"without a value: {missing}"],
            fix="build the model that was saved, or rename the keys first.",
            unexpected=tuple(strangers),
            missing=tuple(missing),
        )
    return found


def _layouts(target: nn.Module | Mapping[str, Tensor]) -> dict[str, WeightLayout] | None:
    """Return the layouts of weights that differ from ours, by the weight's name; `None` where it is unknown."""
    if not isinstance(target, nn.Module):
        return None
    found: dict[str, WeightLayout] = {}
    for path, module in target.named_modules():
        layout = getattr(module, "weight_layout", None)
        if layout is not None:
            found[f"{path}.weight" if path else "weight"] = layout
    return found


def _own_layout(name: str, like: Tensor, layouts: Mapping[str, WeightLayout] | None) -> WeightLayout:
    if layouts is not None:
        return layouts.get(name, "spconv")
    if math.prod(like.shape[1:-1]) == 1:
        raise InsumFormatError(
            f"'{name}' is a kernel of one cell, whose order depends on its layer's stride",
            details=["expected the model as target; got a state"],
            fix="pass target=model instead of model.state_dict().",
            argument="target",
        )
    return "spconv"


def _our_name(key: str, target: Mapping[str, Tensor]) -> str | None:
    stem, _, leaf = key.rpartition(".")
    candidates = [key, f"{stem}.weight" if leaf == "kernel" else key, f"{stem.removesuffix('.bn')}.{leaf}"]
    return next((name for name in candidates if name in target), None)


# The layouts that have one axis for all cells.
_IN_CELLS = ("minkowski", "torchsparse")


def _axes(layout: WeightLayout, kernel: tuple[int, ...]) -> list[int]:
    """Return the axes of our layout in the order of another one, in which each axis of the kernel is one too."""
    cells, read = [*range(1, len(kernel) + 1)], len(kernel) + 1
    if layout.startswith("spconv") and layout not in ("spconv_rsck", "spconv_rskc"):
        return [0, *cells, read]
    if layout == "minkowski" or (layout == "torchsparse" and math.prod(kernel) % 2 == 1):
        # The first axis of the kernel varies fastest.
        cells.reverse()
    return [*cells, 0, read] if layout == "spconv_rskc" else [*cells, read, 0]


def _wrong_shape(weight: Tensor, layout: WeightLayout, kernel: tuple[int, ...]) -> InsumShapeError:
    ours = ("O", *map(str, kernel), "I")
    named = (str(math.prod(kernel)), "I", "O") if layout in _IN_CELLS else [ours[at] for at in _axes(layout, kernel)]
    expected = f"({', '.join(named)}){', a kernel of one cell' * (layout == 'spconv_pointwise')}"
    return InsumShapeError(
        f"a weight of layout '{layout}' with kernel size {kernel} cannot have shape {tuple(weight.shape)}",
        details=[f"expected {expected}"],
        fix="name the layout and the kernel size that the weight was saved with.",
        expected=expected,
        got=tuple(weight.shape),
    )


def _check_layout(layout: str) -> None:
    check_choice("the weight layout", layout, get_args(WeightLayout))
