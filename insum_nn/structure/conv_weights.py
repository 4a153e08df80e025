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

__all__ = ["WeightLayout", "convert_state_dict", "export_weight", "import_weight", "kernel_anchor"]

WeightLayout = Literal["spconv", "spconv_pointwise", "spconv_rsck", "spconv_rskc", "minkowski", "torchsparse"]
"""`spconv`: (O, k.., I), ours. `spconv_pointwise`: the same shape, of layers with a kernel of one cell that are
submanifold or of stride 1, spconv's and ours, which multiply by the numbers read as (I, O). `spconv_rsck`:
(k.., I, O) and `spconv_rskc`: (k.., O, I), of spconv 1 and 2.1. `minkowski`, `torchsparse`: (cells, I, O), or (I, O)
for one cell."""


# The axis of output channels where cells have an axis each.
_OUTPUTS: dict[WeightLayout, int] = {"spconv": 0, "spconv_pointwise": 0, "spconv_rsck": -1, "spconv_rskc": -2}


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
    if layout in ("minkowski", "torchsparse"):
        cells = _with_cells(weight, layout, kernel)
        grid = cells.unflatten(0, kernel[::-1] if _first_axis_fastest(layout, kernel) else kernel)
        if _first_axis_fastest(layout, kernel):
            grid = grid.permute(*reversed(range(len(kernel))), -2, -1)
        return grid.movedim(-1, 0).contiguous()
    outputs = _OUTPUTS[layout]
    cells = weight.shape[1:-1] if outputs == 0 else weight.shape[:-2]
    several = layout == "spconv_pointwise" and any(extent != 1 for extent in kernel)
    if weight.ndim != len(kernel) + 2 or tuple(cells) != kernel or several:
        raise _wrong_shape(weight, layout, kernel)
    if layout == "spconv_pointwise":
        return weight.reshape(weight.shape[-1], *kernel, weight.shape[0]).transpose(0, -1)
    return weight.movedim(outputs, 0).contiguous()


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
    kernel = tuple(weight.shape[1:-1])
    if layout in ("minkowski", "torchsparse"):
        grid = weight.movedim(0, -1)
        if _first_axis_fastest(layout, kernel):
            grid = grid.permute(*reversed(range(len(kernel))), -2, -1)
        cells = grid.reshape(math.prod(kernel), *grid.shape[-2:]).contiguous()
        return cells[0] if cells.shape[0] == 1 else cells
    if layout == "spconv_pointwise":
        return weight.transpose(0, -1).reshape(weight.shape)
    return weight.movedim(0, _OUTPUTS[layout]).contiguous()


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


def _first_axis_fastest(layout: WeightLayout, kernel: tuple[int, ...]) -> bool:
    """Return whether consecutive cells step along the first axis; else along the last, as ours do."""
    return layout == "minkowski" or math.prod(kernel) % 2 == 1


def _with_cells(weight: Tensor, layout: WeightLayout, kernel: tuple[int, ...]) -> Tensor:
    volume = math.prod(kernel)
    cells = weight.unsqueeze(0) if weight.ndim == 2 and volume == 1 else weight
    if cells.ndim != 3 or cells.shape[0] != volume:
        raise _wrong_shape(weight, layout, kernel)
    return cells


def _wrong_shape(weight: Tensor, layout: WeightLayout, kernel: tuple[int, ...]) -> InsumShapeError:
    sizes = ", ".join(map(str, kernel))
    shapes = {
        "spconv": f"(O, {sizes}, I)",
        "spconv_pointwise": f"(O, {sizes}, I), a kernel of one cell",
        "spconv_rsck": f"({sizes}, I, O)",
        "spconv_rskc": f"({sizes}, O, I)",
    }
    expected = shapes.get(layout, f"({math.prod(kernel)}, I, O)")
    return InsumShapeError(
        f"a weight of layout '{layout}' with kernel size {kernel} cannot have shape {tuple(weight.shape)}",
        details=[f"expected {expected}"],
        fix="name the layout and the kernel size that the weight was saved with.",
        expected=expected,
        got=tuple(weight.shape),
    )


def _check_layout(layout: str) -> None:
    if layout not in get_args(WeightLayout):
        raise InsumFormatError(
            f"there is no weight layout '{layout}'",
            details=[f"expected one of {', '.join(get_args(WeightLayout))}"],
            fix="choose one of these.",
            got=layout,
        )
