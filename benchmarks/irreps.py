"""Problems from equivariant networks, and their dense oracle: one einsum for each path, in float64."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Channelwise",
    "channelwise",
    "dense_gradients",
    "dense_product",
    "e3nn_in_double",
    "fully_connected",
    "in_pieces",
    "path_tables",
]


class Channelwise(NamedTuple):
    """Irreps as text and uvu instructions as tuples, which every library reads."""

    in1: str
    in2: str
    out: str
    instructions: list[tuple[int, int, int, str, bool]]


def o3() -> Any:
    return importlib.import_module("e3nn.o3")


def channelwise(in1: str, in2: str, kept: str) -> Channelwise:
    """Return every path of two representations whose result is among the kept irreps; each path has its own output."""
    irreps = o3().Irreps
    wanted = {ir for _, ir in irreps(kept)}
    out: list[tuple[int, Any]] = []
    instructions: list[tuple[int, int, int, str, bool]] = []
    for i, (mul, first) in enumerate(irreps(in1)):
        for j, (_, second) in enumerate(irreps(in2)):
            for ir in first * second:
                if ir in wanted:
                    instructions.append((i, j, len(out), "uvu", True))
                    out.append((mul, ir))
    return Channelwise(in1, in2, str(irreps(out)), instructions)


def fully_connected(degree: int, channels: int) -> tuple[str, str]:
    """Channels of every degree up to one, and one spherical harmonic of each."""
    harmonics = o3().Irreps.spherical_harmonics(degree)
    return str(o3().Irreps([(channels, ir) for _, ir in harmonics])), str(harmonics)


class e3nn_in_double:
    """Context in which e3nn computes its constants in float64: those of float32 have eight digits only."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


class PathTable(NamedTuple):
    """One path: the columns of its operands, and its dense Clebsch-Gordan block times its path weight."""

    in1: tuple[slice, int]
    in2: tuple[slice, int]
    out: slice
    weights: slice
    shape: tuple[int, ...]
    block: Tensor


def path_tables(product: Any, device: torch.device) -> list[PathTable]:
    """List the paths of a tensor product of e3nn; only the module's instructions are read."""
    starts = [irreps.slices() for irreps in (product.irreps_in1, product.irreps_in2, product.irreps_out)]
    tables: list[PathTable] = []
    used = 0
    for path in product.instructions:
        degrees = [
            irreps[i].ir.l
            for irreps, i in (
                (product.irreps_in1, path.i_in1),
                (product.irreps_in2, path.i_in2),
                (product.irreps_out, path.i_out),
            )
        ]
        block = o3().wigner_3j(*degrees, dtype=torch.float64).to(device) * path.path_weight
        count = 1
        for extent in path.path_shape:
            count *= extent
        tables.append(
            PathTable(
                (starts[0][path.i_in1], 2 * degrees[0] + 1),
                (starts[1][path.i_in2], 2 * degrees[1] + 1),
                starts[2][path.i_out],
                slice(used, used + count),
                tuple(path.path_shape),
                block,
            )
        )
        used += count
    return tables


def dense_product(tables: Sequence[PathTable], x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Z[z,w,k] += CG[i,j,k] * X[z,u,i] * Y[z,v,j] * W[z,u,v,w], or with w = u; `w` of one dimension is shared.

    Every entry of an output must be on some path.
    """
    z = x.shape[0]
    columns: dict[tuple[int, int], Tensor] = {}
    for path in tables:
        a = x[:, path.in1[0]].reshape(z, -1, path.in1[1])
        b = y[:, path.in2[0]].reshape(z, -1, path.in2[1])
        weight = w[..., path.weights].reshape(*w.shape[:-1], *path.shape)
        # The small operands first: then no saved tensor has the component axes of both operands.
        part = torch.einsum("zui,zvik->zuvk", a, torch.einsum("zvj,ijk->zvik", b, path.block))
        if len(path.shape) == 2:
            found = torch.einsum(f"zuvk,{'z' if w.dim() == 2 else ''}uv->zuk", part, weight)
        else:
            found = torch.einsum(f"zuvk,{'z' if w.dim() == 2 else ''}uvw->zwk", part, weight)
        key = (path.out.start, path.out.stop)
        flat = found.reshape(z, -1)
        columns[key] = columns[key] + flat if key in columns else flat
    return torch.cat([columns[key] for key in sorted(columns)], 1)


def dense_gradients(
    tables: Sequence[PathTable], x: Tensor, y: Tensor, w: Tensor, sent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a uvu product with weights for each row, by formulas that are differentiable again.

    dX[z,u,i] = CG[i,j,k] * Y[z,j] * W[z,u] * G[z,u,k]      and so on for Y and W
    """
    dx, dy, dw = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(w)
    for path in tables:
        a = x[:, path.in1[0]].reshape(x.shape[0], -1, path.in1[1])
        upstream = sent[:, path.out].reshape(x.shape[0], a.shape[1], -1)
        turned = torch.einsum("zj,ijk->zik", y[:, path.in2[0]], path.block)
        scaled = w[:, path.weights, None] * upstream
        given = torch.einsum("zui,zuk->zik", a, scaled)
        for total, where, part in (
            (dx, path.in1[0], torch.einsum("zik,zuk->zui", turned, scaled).flatten(1)),
            (dy, path.in2[0], torch.einsum("zik,ijk->zj", given, path.block)),
            (dw, path.weights, (torch.einsum("zui,zik->zuk", a, turned) * upstream).sum(-1)),
        ):
            total[:, where] += part
    return dx, dy, dw


def in_pieces(tables: Sequence[PathTable], x: Tensor, y: Tensor, w: Tensor, pieces: int) -> list[Tensor]:
    """Compute `dense_product` of parts of the rows, with activation checkpointing."""
    count = (x.shape[0] + pieces - 1) // pieces

    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return dense_product(tables, a, b, c)

    weights = w.split(count) if w.dim() == 2 else [w] * pieces
    parts = zip(x.split(count), y.split(count), weights, strict=False)
    return [checkpoint(product, *part, use_reentrant=False) for part in parts]  # type: ignore[misc]
