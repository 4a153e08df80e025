"""Base of layers that store their weight at chosen places of a grid only.

`PrunedWeight` is what a layer stores, saves and loads. `PrunedModule`, from which the layers derive, adds what changes
the places in training. They are two classes so that each has one subject.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from insum_nn.compiler.api import dense_uses, is_known, is_plain_eager
from insum_nn.compiler.options import Options, require_options
from insum_nn.errors import InsumDeviceError, InsumFormatError, InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.faults import Faults
from insum_nn.formats import GroupCOO, GroupSize
from insum_nn.layers.pruned.scripted_call import ScriptedCall
from insum_nn.layers.statement_layer import ExplainedLayer
from insum_nn.ops.statements import run, to_autocast
from insum_nn.structure.pruning import note_new_rows, random_mask
from insum_nn.tensor_cache import unwritten

__all__ = ["DenseConv", "Forming", "PrunedWeight", "dense_parameter", "reaches"]

DenseConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
# A statement that forms a dense weight, as `run` takes it.
Forming = tuple[str, Mapping[str, IndexFacts], dict[str, Tensor], Options, tuple[int | None, ...]]
DenseLayer = TypeVar("DenseLayer", bound=nn.Linear | DenseConv)


class PrunedWeight(ExplainedLayer, nn.Module):
    """A layer whose weight is a list of cells at chosen places of a grid.

    What is stored is a parameter like any other: gradients, optimizers and `state_dict` see the stored cells only.
    The places are the buffer `position`; loading a state of other places adopts them. Index tensors that follow from
    `position` are buffers that are not saved. Places are chosen once: they outlast the meta device and `to_empty`.

    Attributes:
        weight: (p, ..) stored cells in ascending order of their place.
        bias: one number per output, or `None`.
        position: (p,) int64, the place of each cell in the flattened grid.
        dense_shape: shape of the dense weight, a tensor in the state, so that a state of another shape is refused.
        group_size: cells of a row that one group holds, or `"auto"`.
        options: compile options.
    """

    _USES: ClassVar[str]
    # A row of outputs, of an image; `None`: they all lie in one.
    _SHORT: ClassVar[int | None] = None
    # Numbers that a kernel over stored weights moves between layouts, each time that a weight is used.
    _moved: int
    __call__: Callable[..., Tensor]
    weight: nn.Parameter
    bias: nn.Parameter | None
    position: Tensor
    dense_shape: Tensor
    _read: Tensor | None
    _written: Tensor | None

    def __init__(self, group_size: GroupSize, options: Options) -> None:
        super().__init__()
        self.group_size: GroupSize = group_size
        self.options = require_options(options)
        self._index_names: tuple[str, ...] = ()
        # The places while `position` is on the meta device, where tensors have no values.
        self._places: Tensor | None = None

    # Defined by subclasses.

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Extents of the grid of places."""
        raise NotImplementedError

    def cell_norms(self) -> Tensor:
        """Return (p,) the norm of each stored cell."""
        cells = self.weight.detach().to(torch.promote_types(self.weight.dtype, torch.float32))
        return cells.square().sum(tuple(range(1, cells.ndim))).sqrt() if cells.ndim > 1 else cells.abs()

    def to_dense(self) -> Tensor:
        """Return the dense weight; differentiable."""
        return self._dense(self.weight)

    def reset_parameters(self) -> None:
        """Draw the parameters again."""
        raise NotImplementedError

    def _stored_of(self, dense: Tensor) -> Tensor:
        """Return the stored cells of a dense weight."""
        raise NotImplementedError

    def _make_index(self, position: Tensor) -> dict[str, Tensor]:
        """Return the index tensors of the statement for these places."""
        raise NotImplementedError

    def _example(self) -> Tensor:
        """Return the smallest input of a call."""
        raise NotImplementedError

    def _by_library(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Call torch's function of the dense layer."""
        raise NotImplementedError

    def _forming(self, weight: Tensor) -> Forming:
        """Return the statement that forms the dense weight, as `run` takes it."""
        raise NotImplementedError

    def _kernels(self, mask: Tensor) -> Tensor:
        """Return which inputs a mask has each output read: features, or channels of a group."""
        raise NotImplementedError

    def _grid_norms(self, dense: Tensor) -> Tensor:
        """Return the norm of each place's cell in a dense tensor of the weight's shape."""
        raise NotImplementedError

    def _grid_mask(self, mask: Tensor) -> Tensor | None:
        """Return a mask of another shape as one over the grid; `None` if it fits nothing."""
        return None

    # Structure.

    @property
    def num_stored(self) -> int:
        """Stored cells."""
        return self.position.shape[0]

    @property
    def density(self) -> float:
        """The share of the grid's places that are stored; 0 for a grid without any."""
        total = torch.Size(self.grid_shape).numel()
        return self.num_stored / total if total else 0.0

    @property
    def mask(self) -> Tensor:
        """Which places are stored, (grid_shape), bool."""
        return self._mask_of(self.position)

    def _mask_of(self, position: Tensor) -> Tensor:
        mask = torch.zeros(torch.Size(self.grid_shape).numel(), dtype=torch.bool, device=position.device)
        mask[position] = True
        return mask.reshape(self.grid_shape)

    @property
    def index(self) -> Mapping[str, Tensor]:
        """The index tensors of the statement, by name."""
        return {name: getattr(self, name) for name in self._index_names}

    def check_mask(self, mask: Tensor) -> Tensor:
        """Return a mask over the grid, bool, on the weight's device.

        Raises:
            InsumDtypeError: not bool.
            InsumDeviceError: on the meta device.
            InsumShapeError: neither of the grid's shape nor of the dense weight's.
        """
        caller = type(self).__name__
        faults = Faults(caller)
        faults.dtype_among("mask", mask.dtype, (torch.bool,), fix="pass mask != 0.")
        faults.raise_all()
        if mask.is_meta:
            fault = f"{caller}: 'mask' is on the meta device, where tensors have no values"
            raise InsumDeviceError(fault, fix="make the mask on another device, such as 'cpu'.", argument="mask")
        found = mask if tuple(mask.shape) == self.grid_shape else self._grid_mask(mask)
        if found is None:
            dense = tuple(int(extent) for extent in self.dense_extents)
            shapes = [self.grid_shape] if dense == self.grid_shape else [self.grid_shape, dense]
            raise InsumShapeError(
                f"{caller}: 'mask' has shape {tuple(mask.shape)}",
                details=[f"expected {' or '.join(map(str, shapes))}"],
                fix="pass a mask with one element per place of the grid.",
                argument="mask",
                expected=shapes,
                got=tuple(mask.shape),
            )
        return found

    @property
    def dense_extents(self) -> tuple[int, ...]:
        """Extents of the dense weight."""
        raise NotImplementedError

    def _choose_mask(self, mask: Tensor | None, density: float | None) -> Tensor:
        """Return the mask of a new layer, on the CPU whatever torch's default device: given, at random, or full."""
        if mask is not None and density is not None:
            raise InsumFormatError(
                f"{type(self).__name__} got both mask= and density=",
                fix="pass one of them; a mask says how many places are kept.",
                argument="density",
            )
        if mask is not None:
            return self.check_mask(mask).cpu()
        with torch.device("cpu"):
            if density is not None:
                return random_mask(self.grid_shape, density)
            return torch.ones(self.grid_shape, dtype=torch.bool)

    def _store(
        self,
        mask: Tensor,
        cell: tuple[int, ...],
        outputs: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make parameters and buffers for a mask on the CPU; without `outputs` there is no bias."""
        position = mask.reshape(-1).nonzero().squeeze(1)
        target = torch.get_default_device() if device is None else torch.device(device)
        self.weight = nn.Parameter(torch.empty(position.shape[0], *cell, device=target, dtype=dtype))
        self.register_buffer("position", position.to(target))
        self._adopt_places(position)
        if outputs is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def _draw(self, rows: Tensor, fan_in: Tensor, outputs: int) -> None:
        """Draw uniformly within one over the root of the inputs read: `rows` of cells, `fan_in`, `outputs` of rows."""
        bound = fan_in.clamp(min=1).float().rsqrt()
        cells = bound[rows].to(self.weight.dtype)
        self.weight.uniform_(-1, 1).mul_(cells.reshape(-1, *(1,) * (self.weight.ndim - 1)))
        if self.bias is not None:
            spread = torch.where(fan_in > 0, bound, 0).to(self.bias.dtype)
            self.bias.uniform_(-1, 1).mul_(spread.repeat_interleave(outputs)[: self.bias.shape[0]])

    @torch.no_grad()
    def _copied_to(self, layer: DenseLayer) -> DenseLayer:
        """Copy the weights to a dense layer; return that."""
        layer.weight.copy_(self.to_dense())
        if self.bias is not None and layer.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            layer.bias.copy_(self.bias)
        return layer.train(self.training)

    @torch.no_grad()
    def _take_over(self, layer: nn.Linear | DenseConv) -> Self:
        """Copy parameters and modes of a dense layer; return this one."""
        weight, _ = dense_parameter(layer, "weight")
        if not weight.is_meta:
            self.weight.copy_(self._stored_of(weight))
        self.weight.requires_grad_(weight.requires_grad)
        if self.bias is not None:
            bias, _ = dense_parameter(layer, "bias")
            self.bias.copy_(bias)
            self.bias.requires_grad_(bias.requires_grad)
        return self.train(layer.training)

    def _adopt_places(self, position: Tensor) -> None:
        """Store at these places, and make what follows from them, on the device on which `position` is now."""
        device, self._places = self.position.device, position.cpu() if self.position.is_meta else None
        for name in self._index_names:
            delattr(self, name)
        # A default device is no matter of what is computed here.
        with position.device:
            index = self._make_index(position)
            shape = torch.tensor(self.dense_extents)
            used = self._kernels(self._mask_of(position))
        self._index_names = tuple(index)
        for name, tensor in {"position": position, "dense_shape": shape, **index}.items():
            moved = tensor.to(device)
            self.register_buffer(name, moved, persistent=name not in index)
            unwritten(moved)
        for name, each in (("_read", used.any(0)), ("_written", used.any(1))):
            places = None if bool(each.all()) else each.nonzero().squeeze(1).to(device)
            self.register_buffer(name, places, persistent=False)
        self._note_uses()

    def _replace_weight(self, data: Tensor) -> None:
        former, self.weight.data = self.weight.shape, data
        note_new_rows(self.weight, former)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As for all modules; but `to_empty` and the meta device, which drop values, leave the places as they are."""
        places = self._places_with_values
        super()._apply(fn, recurse)
        if self.position is not places:
            self._adopt_places(places)
        else:
            self._note_uses()
        return self

    @property
    def _places_with_values(self) -> Tensor:
        return self._places if self._places is not None and self.position.is_meta else self.position

    def _groups(self, row: Tensor, col: Tensor, shape: tuple[int, int], size: GroupSize) -> GroupCOO:
        """Return cells at (row, col) in groups that share their row; the values are the cells' numbers."""
        number = torch.arange(row.shape[0], device=row.device)
        return GroupCOO.from_coo((row, col), number, shape, group_size=size)

    # The dense product, where it is faster.

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        first = self._uses(self.weight.itemsize, self._SHORT)
        if first == math.inf:
            return {}
        return {f"from {math.ceil(first)} {self._USES} on, by the dense weight": (self._forming(self.weight)[0],)}

    def _uses(self, width: int, row: int | None) -> float:
        """Return from how many uses of each weight on the dense product is faster; see `dense_uses`."""
        cells = math.prod(self.dense_extents)
        for extent, kept in zip(self.dense_extents, (self._written, self._read), strict=False):
            cells = cells if kept is None else cells // extent * kept.shape[0]
        return dense_uses(self.weight, width, cells, self._moved, row, self.options)

    def _note_uses(self) -> None:
        """Keep the fewest uses from which on a dense product may be faster, of this dtype or under autocast."""
        self._fewest = min(self._uses(width, self._SHORT) for width in {2, self.weight.itemsize})

    def _by_dense(self, input: Tensor, uses: int, row: int | None) -> Tensor | None:
        """Return the result of the dense product, with gradients of stored weights; `None` where it is not faster.

        Features or channels that no weight reads, or none writes, take no part.
        """
        weight, bias, read, written = self.weight, self.bias, self._read, self._written
        if torch._C._is_any_autocast_enabled():
            input, weight = to_autocast(input), to_autocast(weight)
        if not (torch.compiler.is_dynamo_compiling() or is_plain_eager(input, weight)) or input.dtype != weight.dtype:
            return None
        if torch.are_deterministic_algorithms_enabled() or not reaches(uses, self._uses(weight.itemsize, row)):
            return None
        dense, extents = self._dense(weight), self.dense_extents
        axis = 1 - len(extents)
        if read is not None:
            input, dense = input.index_select(axis, read), dense.index_select(1, read)
        if written is None:
            return self._by_library(input, dense, bias)
        own = None if bias is None else bias.index_select(0, written)
        result = self._by_library(input, dense.index_select(0, written), own)
        shape = [*result.shape]
        shape[axis] = extents[0]
        start = result.new_zeros(()) if bias is None else bias.reshape(-1, *(1,) * (-1 - axis)).type_as(result)
        return start.expand(shape).index_copy(axis, written, result)

    def _dense(self, weight: Tensor) -> Tensor:
        """Return the dense weight, of stored ones."""
        whole = tuple(n * cell for n, cell in zip_longest(self.grid_shape, weight.shape[1:], fillvalue=1))
        dense = run(*self._forming(weight)).reshape(whole)
        return dense if whole == self.dense_extents else dense[tuple(map(slice, self.dense_extents))]

    def _dense_gradient(self, input: Tensor, grad_output: Tensor) -> Tensor:
        """Return the gradient of the dense weight from one call's input and its output's gradient."""
        wide = torch.promote_types(grad_output.dtype, torch.float32)
        weight = input.new_zeros(self.dense_extents, dtype=wide).requires_grad_()
        with torch.enable_grad():
            result = self._by_library(input.to(wide), weight, None)
        return torch.autograd.grad(result, weight, grad_output.to(wide))[0]

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what TorchScript is to compile in place of the layer; it calls this."""
        return ScriptedCall(self, self._example())

    # State.

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load weight and places; a faulty state leaves the layer unchanged."""
        names = ("weight", "position", "dense_shape")
        given = {name: t for name in names if isinstance(t := state_dict.get(prefix + name), Tensor)}
        weight, position, shape = (given.get(name, cast(Tensor, getattr(self, name))) for name in names)
        places = self._places_with_values
        if "weight" in given and "position" not in given and tuple(weight.shape) == self.dense_extents:
            error_msgs.append(
                f"'{prefix}weight' is dense, {tuple(weight.shape)}; {type(self).__name__} stores chosen places only. "
                "Load it into the dense layer and convert that."
            )
            return
        if "position" in given:
            fault = self._state_fault(weight, position, shape)
            if fault is not None:
                error_msgs.append(f"{type(self).__name__} '{prefix}': {fault}")
                return
            if position.shape != self.position.shape:
                self.position = self.position.new_empty(position.shape)
                self.weight.grad = None
                self._replace_weight(self.weight.data.new_empty(weight.shape))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if "position" in given:
            self._adopt_places(next(t for t in (self.position, position, places) if not t.is_meta))

    def _state_fault(self, weight: Tensor, position: Tensor, shape: Tensor) -> str | None:
        """Return why a state does not fit this layer, or `None`; positions are checked, since kernels rely on them."""
        if weight.shape[1:] != self.weight.shape[1:]:
            return f"stored cells are {tuple(weight.shape[1:])}, the layer's are {tuple(self.weight.shape[1:])}"
        if weight.shape[0] != position.shape[0] or position.ndim != 1 or position.dtype != torch.int64:
            return f"weight {tuple(weight.shape)} and position {tuple(position.shape)} do not belong together"
        extents = self.dense_extents if shape.is_meta else tuple(shape.tolist())
        if extents != self.dense_extents:
            return f"the state is of a dense weight {extents}, the layer's is {self.dense_extents}"
        if position.is_meta:
            # The layer's own places serve, where there are as many.
            return None if position.shape == self.position.shape else "its positions are on the meta device"
        total = torch.Size(self.grid_shape).numel()
        if position.numel() and not bool(
            ((position[1:] > position[:-1]).all() & (position[0] >= 0) & (position[-1] < total)).item()
        ):
            return f"positions must ascend and lie in [0, {total})"
        return None


def reaches(uses: int, least: float) -> bool:
    """Whether a number is not less than another; if a graph of any sizes is traced, for all of them."""
    if isinstance(uses, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        # As torch.jit.trace records it.
        return False
    return is_known(uses >= least) if torch.compiler.is_compiling() else uses >= least


def dense_parameter(layer: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return a dense layer's parameter, cut from the graph, and what a mask of `torch.nn.utils.prune` keeps of it.

    The attribute of a layer with such a mask is what its last call computed, which no optimizer's step has reached.
    """
    mask = getattr(layer, f"{name}_mask", None)
    original: Tensor = getattr(layer, name if mask is None else f"{name}_orig")
    values = original.detach() if mask is None else original.detach() * mask
    return values.requires_grad_(original.requires_grad), None if mask is None else mask != 0
