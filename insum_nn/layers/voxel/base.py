"""Shared by layers over sparse grids: base classes, and maps stored under an `indice_key`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from insum_nn.errors import InsumBackendError, InsumFormatError, InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.layers.statement_layer import ExplainedLayer
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor, check_untraced
from insum_nn.ops.sparse_conv import VOXEL_FACTS
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map import ConvAlgo, Geometry, KernelMap

__all__ = [
    "VOXEL_COUNT",
    "SparseModule",
    "StatementModule",
    "Unscriptable",
    "check_ndim",
    "default_algo",
    "map_differences",
    "map_of",
    "store_map",
    "stored_map",
]

# Arguments of the constructor in which layers that share a map must agree.
_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation")

VOXEL_COUNT = "max_num_voxels_during_training"


class Unscriptable:
    """A module over sparse tensors, which TorchScript has no type for."""

    def __prepare_scriptable__(self) -> Any:
        raise InsumBackendError(
            f"torch.jit.script cannot compile {type(self).__name__}: TorchScript has no sparse tensors",
            fix="use torch.compile or torch.export; or script the dense part of the model alone.",
        )


class SparseModule(Unscriptable, nn.Module):
    """A module that takes a `SparseConvTensor`; derive from it to stand in a `SparseSequential`.

    Attributes:
        name: kept for callers that label layers.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


class StatementModule(ExplainedLayer, SparseModule):
    """A module over sparse tensors that runs a statement."""

    def _facts(self) -> Mapping[str, IndexFacts]:
        return VOXEL_FACTS


def store_map(indice_dict: dict[str, KernelMap], key: str | None, kernel_map: KernelMap) -> dict[str, KernelMap]:
    """Return the maps of a layer's input and, under `key`, its own; the input's dictionary is left as it is."""
    if key is None or indice_dict.get(key) is kernel_map:
        return indice_dict
    return {**indice_dict, key: kernel_map}


def stored_map(x: SparseConvTensor, key: str | None) -> KernelMap | None:
    """Return the map under a key; one that a caller stored as spconv's tables of pairs is made into a map of ours.

    Raises:
        InsumFormatError: what is stored is neither.
        InsumRangeError: a table of pairs points outside.
    """
    known = cast(object, x.find_indice_pair(key))
    if known is None or isinstance(known, KernelMap):
        return known
    as_map: object = getattr(known, "kernel_map", None)
    if isinstance(as_map, KernelMap):
        return as_map
    raise InsumFormatError(
        f"what is stored under indice_key {key!r} is no kernel map, got {type(known).__name__}",
        fix="store a KernelMap, an IndiceData or an ImplicitGemmIndiceData.",
        indice_key=key,
    )


def check_ndim(owner: str, ndim: int, x: SparseConvTensor) -> None:
    """Raise unless the grid has a layer's dimensions."""
    if len(x.spatial_shape) != ndim:
        raise InsumShapeError(
            f"{owner} takes grids of {ndim} dimensions, got spatial_shape {x.spatial_shape}",
            fix=f"use the layer for {len(x.spatial_shape)} dimensions.",
            expected=ndim,
            got=len(x.spatial_shape),
        )


def map_of(owner: str, key: str | None, x: SparseConvTensor, geometry: Geometry, *, again: bool = False) -> KernelMap:
    """Return the map stored under `key`, where it is this layer's own; else, or with `again`, a new one.

    Raises:
        InsumFormatError: what is stored is of another kernel or of other voxels, or a voxel stands twice.
        InsumRangeError: a voxel lies outside the grid.
        InsumShapeError: the output's grid would be empty.
    """
    known = stored_map(x, key)
    if known is None:
        return x.build_map(geometry, again=again)
    own = known.geometry is geometry or known.geometry == geometry
    own = own and not known.inverted and not again and not torch.jit.is_tracing()
    if own and known.inputs.describes(x.indices, x.spatial_shape, x.batch_size) and x.has_all_rows:
        return known
    arguments = _ARGUMENTS if geometry.kind == known.geometry.kind else ("kernel_size",)
    wrong = map_differences(known, x, geometry, known.inputs, arguments)
    if known.inverted or known.geometry.kind != geometry.kind:
        wrong.insert(0, f"kind: stored {known.geometry.kind}, this layer {geometry.kind}")
    if wrong:
        raise InsumFormatError(
            f"{owner}: the map under indice_key '{key}' is not of this layer",
            details=wrong,
            fix="give this layer an indice_key of its own.",
            indice_key=key,
        )
    return x.build_map(geometry, again=True) if again else known


def map_differences(
    known: KernelMap, x: SparseConvTensor, geometry: Geometry, sites: Coordinates, arguments: Iterable[str]
) -> list[str]:
    """List how a stored map differs from a layer's `arguments` and input, whose voxels should be `sites`."""
    x.check_rows()
    check_untraced()
    indices, shape = sites.indices, sites.spatial_shape
    wrong: list[str] = []
    for name in arguments:
        stored, own = getattr(known.geometry, name), getattr(geometry, name)
        if stored != own:
            wrong.append(f"{name}: stored {stored}, this layer {own}")
    if tuple(x.spatial_shape) != shape:
        wrong.append(f"spatial_shape: stored {shape}, input {tuple(x.spatial_shape)}")
    elif indices.shape != x.indices.shape:
        wrong.append(f"voxels: stored {indices.shape[0]}, input {x.indices.shape[0]}")
    elif indices is x.indices:
        edited = not sites.describes(indices, shape, sites.batch_size)
        wrong += ["voxels: written to since the map was made"] if edited else []
    elif not torch.compiler.is_compiling() and not torch.equal(indices, x.indices):
        wrong.append("voxels: as many as stored, at other places or in another order")
    return wrong


def default_algo(volume: int, limit: int) -> ConvAlgo:
    """Return what spconv's layers store as `algo` for a kernel of `volume` cells where none is given."""
    return ConvAlgo.MaskImplicitGemm if volume <= limit else ConvAlgo.Native
