"""Small convolutions in whole numbers, and what spconv 2.3.8 made of them (`spconv_record.json`).

Where spconv is installed, `python -m tests.layers.spconv.spconv_record` writes the file again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

__all__ = ["CASES", "RECORD", "digest"]

RECORD = Path(__file__).with_suffix(".json")

SHAPES = {1: (9,), 2: (6, 5), 3: (5, 4, 4), 4: (4, 3, 3, 4)}
_HOWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SubMConv", {"kernel_size": 1}),
    ("SubMConv", {"kernel_size": 1, "stride": 2}),
    ("SubMConv", {"kernel_size": 3, "padding": 1}),
    ("SubMConv", {"kernel_size": 3, "stride": 2, "dilation": 2}),
    ("SparseConv", {"kernel_size": 1}),
    ("SparseConv", {"kernel_size": 1, "dilation": 2}),
    ("SparseConv", {"kernel_size": 1, "stride": 2}),
    ("SparseConv", {"kernel_size": 2}),
    ("SparseConv", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("SparseConvTranspose", {"kernel_size": 1}),
    ("SparseConvTranspose", {"kernel_size": 1, "stride": 2}),
    ("SparseConvTranspose", {"kernel_size": 2, "stride": 2}),
    ("SparseConvTranspose", {"kernel_size": 3, "stride": 2, "padding": 1}),
    # The partner is the convolution of the same kernel; one of stride 1 and one cell stores no key in spconv.
    ("SparseInverseConv", {"kernel_size": 1}),
    ("SparseInverseConv", {"kernel_size": 2, "stride": 2}),
    ("SparseInverseConv", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("SparseMaxPool", {"kernel_size": 2}),
    ("SparseMaxPool", {"kernel_size": 3, "stride": 1, "padding": 1}),
)
CASES = {
    f"{kind}{ndim}d {', '.join(f'{name}={value}' for name, value in how.items())}": (kind, ndim, how)
    for ndim in SHAPES
    for kind, how in _HOWS
}


def cloud(ndim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features from -3 to 3 at every third cell or so, in an order of their own."""
    shape = SHAPES[ndim]
    cells = math.prod(shape)
    flat = torch.tensor(sorted({(7 * i * i + 3 * i) % cells for i in range(max(4, cells // 2))}))
    flat = flat[torch.arange(len(flat)) * (len(flat) // 2 + 1 if len(flat) % 2 else 1) % len(flat)]
    columns = torch.unravel_index(flat, shape)
    indices = torch.stack([torch.zeros_like(flat), *columns], dim=1).int()
    return whole((len(flat), 2)), indices


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    """Whole numbers from -3 to 3 in no simple order."""
    place = torch.arange(math.prod(shape))
    return ((place * place * 5 + place * 11 + 2) % 17 % 7 - 3).float().reshape(shape)


def make(lib: Any, case: str) -> tuple[Any, Any]:
    """The layer of a case with whole numbers for its parameters, and the layer that makes an inverse one's map."""
    kind, ndim, how = CASES[case]
    if "Pool" in kind:
        return getattr(lib, f"{kind}{ndim}d")(**how), None
    if "Inverse" in kind:
        partner = getattr(lib, f"SparseConv{ndim}d")(2, 4, **how, bias=False, indice_key="key")
        layer = getattr(lib, f"{kind}{ndim}d")(4, 3, how["kernel_size"], indice_key="key")
    else:
        partner, layer = None, getattr(lib, f"{kind}{ndim}d")(2, 3, **how)
    for module in (partner, layer):
        if module is not None:
            module.load_state_dict({name: whole(tuple(value.shape)) for name, value in module.state_dict().items()})
    return layer, partner


def digest(lib: Any, case: str) -> dict[str, Any]:
    """What is left of a case's outputs and gradients, exact in float32."""
    layer, partner = make(lib, case)
    features, indices = cloud(CASES[case][1])
    if partner is None and not list(layer.parameters()):
        # Distinct: to features that tie spconv's pools give the whole gradient each.
        features = ((torch.arange(features.numel()) * 7919) % 10007 - 5000).float().reshape(features.shape)
    features = features.requires_grad_()
    x = lib.SparseConvTensor(features, indices, SHAPES[CASES[case][1]], 1)
    y = layer(x if partner is None else partner(x))
    flat = torch.zeros(y.indices.shape[0], dtype=torch.int64)
    for axis, extent in enumerate(y.spatial_shape):
        flat = flat * extent + y.indices[:, axis + 1]
    order = flat.argsort()
    out = y.features[order]
    out.backward(whole(tuple(out.shape)))
    found = {
        "shape": [*y.spatial_shape],
        "voxels": weighted(y.indices[order].float()),
        "features": weighted(out),
        "input gradient": weighted(features.grad),
    }
    found |= {
        f"{name} gradient": weighted(value.grad.flatten(1) if value.ndim > 1 else value.grad[:, None])
        for name, value in layer.named_parameters()
    }
    return found


def weighted(rows: torch.Tensor) -> list[int]:
    """Rows added up with the weights 1, 2, .. 5, 1, .."""
    return (rows.detach() * (torch.arange(len(rows)) % 5 + 1)[:, None]).sum(0).int().tolist()


def main() -> None:
    import spconv.pytorch as spconv  # type: ignore[import-not-found]

    for part in (spconv.ops, spconv.functional):
        part.get_current_stream = lambda: 0
    lines = [f"  {json.dumps(case)}: {json.dumps(digest(spconv, case))}" for case in CASES]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
