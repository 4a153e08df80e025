"""Shared by layers over sparse grids: base classes, and maps stored under an `indice_key`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.errors import InsumBackendError, InsumFormatError, InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.layers.extents import IntOrInts, expand_nd, extent
from insum_nn.layers.statement_layer import StatementLayer
from insum_nn.layers.voxel.sparse_tensor import SparseConvTensor, check_untraced
from insum_nn.ops.sparse_conv import VOXEL_FACTS
from insum_nn.structure.kernel_map import ConvAlgo, Geometry, KernelMap

__all__ = [
    "VOXEL_COUNT",
    "MapLayer",
    "SparseModule",
    "StatementModule",
    "Unscriptable",
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

    # Written into states. mmdetection3d's loader transposes weights of other versions, as those of spconv 1.
    _version = 2

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


class StatementModule(StatementLayer, SparseModule):
    """A module over sparse tensors that runs a statement.

    Attributes:
        options: compile options.
    """

    options: Options = DEFAULT
    explain = StatementLayer.explain_statement

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


class MapLayer:
    """A kernel that moves over a grid, and its maps: what convolutions and pools share.

    Attributes:
        geometry: how the kernel moves.
        options: compile options.
    """

    geometry: Geometry
    indice_key: str | None
    options: Options
    algo: object

    def _set_kernel(
        self,
        ndim: int,
        kernel_size: IntOrInts,
        stride: IntOrInts,
        padding: IntOrInts,
        dilation: IntOrInts,
        algo: object,
        limit: int,
        subm: bool,
        indice_key: str | None,
        record_voxel_count: bool,
        options: Options,
    ) -> None:
        """Check and keep the arguments; `limit`: cells above which spconv's layers have pairs in lists."""
        owner = type(self).__name__
        self.ndim = ndim = extent(owner, "ndim", ndim, 1)
        self.kernel_size = expand_nd(owner, "kernel_size", ndim, kernel_size, 1)
        self.stride = expand_nd(owner, "stride", ndim, stride, 1)
        self.padding = expand_nd(owner, "padding", ndim, padding, 0)
        self.dilation = expand_nd(owner, "dilation", ndim, dilation, 1)
        default = ConvAlgo.MaskImplicitGemm if math.prod(self.kernel_size) <= limit else ConvAlgo.Native
        self.algo = default if algo is None else algo
        self.subm, self.indice_key, self.record_voxel_count = subm, indice_key, record_voxel_count
        self.options = require_options(options)

    def get_max_num_voxels(self) -> Tensor | None:
        """Return the largest number of output voxels seen, with `record_voxel_count`."""
        return getattr(self, VOXEL_COUNT, None)

    def reset_parameters(self) -> None:
        """Forget what was counted."""
        count = self.get_max_num_voxels()
        if count is not None:
            count.zero_()

    def _record_voxels(self, voxels: int) -> None:
        count = self.get_max_num_voxels()
        if count is not None:
            count.clamp_(min=voxels)

    def _check_grid(self, input: SparseConvTensor) -> None:
        shape = input.spatial_shape
        if len(shape) != self.ndim:
            raise InsumShapeError(
                f"{type(self).__name__} takes grids of {self.ndim} dimensions, got spatial_shape {shape}",
                fix=f"use the layer for {len(shape)} dimensions.",
                expected=self.ndim,
                got=len(shape),
            )

    def kernel_map(self, input: SparseConvTensor) -> KernelMap:
        """Return the map that the layer uses on a tensor: stored under its key where it is its own, or built now.

        Raises:
            InsumFormatError: what is stored is of another kernel or of other voxels, or a voxel occurs twice.
            InsumRangeError: a voxel lies outside the grid.
            InsumShapeError: the grid has not the layer's dimensions, or the output's would be empty.
        """
        self._check_grid(input)
        geometry, again = self.geometry, self.options.validate
        known = stored_map(input, self.indice_key)
        if known is None:
            return input.build_map(geometry, again=again)
        own = known.geometry is geometry or known.geometry == geometry
        own = own and not known.inverted and not again and not torch.jit.is_tracing()
        if own and known.inputs.describes(input.indices, input.spatial_shape, input.batch_size) and input.has_all_rows:
            return known
        self._check_map(known, input, inverse=False)
        return input.build_map(geometry, again=True) if again else known

    def _check_map(self, known: KernelMap, x: SparseConvTensor, *, inverse: bool) -> None:
        """Raise if a stored map is of another kernel, or does not begin, or of an `inverse` layer end, at the input."""
        x.check_rows()
        check_untraced()
        sites, kind = known.outputs if inverse else known.inputs, known.geometry.kind
        indices, shape = sites.indices, sites.spatial_shape
        same, own = kind == self.geometry.kind, f"this layer {self.geometry.kind}"
        unlike = kind == "subm" if inverse else known.inverted or not same
        wrong = [f"kind: stored {kind}, {'which has nothing to invert' if inverse else own}"] if unlike else []
        # Stride, padding and dilation of an inverse layer come from the other one.
        for name in _ARGUMENTS if same and not inverse else ("kernel_size",):
            stored, own = getattr(known.geometry, name), getattr(self.geometry, name)
            wrong += [f"{name}: stored {stored}, this layer {own}"] if stored != own else []
        if tuple(x.spatial_shape) != shape:
            wrong.append(f"spatial_shape: stored {shape}, input {tuple(x.spatial_shape)}")
        elif indices.shape != x.indices.shape:
            wrong.append(f"voxels: stored {indices.shape[0]}, input {x.indices.shape[0]}")
        elif indices is x.indices:
            edited = not sites.describes(indices, shape, sites.batch_size)
            wrong += ["voxels: written to since the map was made"] if edited else []
        elif not torch.compiler.is_compiling() and not torch.equal(indices, x.indices):
            wrong.append("voxels: as many as stored, at other places or in another order")
        if wrong:
            order = "invert layers in reverse order, each with the kernel_size of its partner."
            raise InsumFormatError(
                f"{type(self).__name__}: the map under indice_key '{self.indice_key}' "
                f"{'does not lead to this input' if inverse else 'is not of this layer'}",
                details=wrong,
                fix=order if inverse else "give this layer an indice_key of its own.",
                indice_key=self.indice_key,
            )
