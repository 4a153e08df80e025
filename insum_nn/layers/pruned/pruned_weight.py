"""Base of layers that store their weight at chosen places of a grid only: what they store, save, load, and train."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from insum_nn.compiler.api import dense_uses, is_known, is_plain_eager
from insum_nn.compiler.options import Options, require_options
from insum_nn.errors import InsumDeviceError, InsumFormatError, InsumShapeError
from insum_nn.facts import IndexFacts
from insum_nn.faults import Faults
from insum_nn.formats import GroupCOO, GroupSize
from insum_nn.layers.pruned.scripted_call import ScriptedCall
from insum_nn.layers.statement_layer import StatementLayer
from insum_nn.ops.statements import run, to_autocast
from insum_nn.structure.pruning import (
    carry_optimizer_state,
    magnitude_mask,
    note_new_rows,
    prune_and_regrow,
    random_mask,
    take_rows,
)
from insum_nn.tensor_cache import unwritten

__all__ = ["DenseConv", "Forming", "GradientRecord", "PrunedWeight", "dense_parameter", "kept_of", "reaches"]

DenseConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
# A statement that forms a dense weight, as `run` takes it.
Forming = tuple[str, Mapping[str, IndexFacts], dict[str, Tensor], Options, tuple[int | None, ...]]
DenseLayer = TypeVar("DenseLayer", bound=nn.Linear | DenseConv)


class PrunedWeight(StatementLayer, nn.Module):
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

    explain = StatementLayer.explain_statement
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

    if TYPE_CHECKING:
        # Defined by subclasses.

        @property
        def grid_shape(self) -> tuple[int, ...]:
            """Extents of the grid of places."""
            ...

        def reset_parameters(self) -> None:
            """Draw the parameters again."""

        # The stored cells of a dense weight, the index tensors of places, the smallest input of a call.
        def _stored_of(self, dense: Tensor) -> Tensor: ...
        def _make_index(self, position: Tensor) -> dict[str, Tensor]: ...
        def _example(self) -> Tensor: ...

        # Torch's function of the dense layer, and the statement that forms its weight, as `run` takes it.
        def _by_library(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
        def _forming(self, weight: Tensor) -> Forming: ...

        # Which inputs a mask has each output read, features or channels of a group; the norm of each place's cell in a
        # dense tensor of the weight's shape.
        def _kernels(self, mask: Tensor) -> Tensor: ...
        def _grid_norms(self, dense: Tensor) -> Tensor: ...

    @property
    def dense_extents(self) -> tuple[int, ...]:
        """Extents of the dense weight; of single weights those of the grid."""
        return self.grid_shape

    def _grid_mask(self, mask: Tensor) -> Tensor | None:
        """Return a mask of another shape as one over the grid; `None` if it fits nothing."""
        return None

    def cell_norms(self) -> Tensor:
        """Return (p,) the norm of each stored cell."""
        cells = self.weight.detach().to(torch.promote_types(self.weight.dtype, torch.float32))
        return cells.square().sum(tuple(range(1, cells.ndim))).sqrt() if cells.ndim > 1 else cells.abs()

    def to_dense(self) -> Tensor:
        """Return the dense weight; differentiable."""
        return self._dense(self.weight)

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
        faults = Faults(type(self).__name__)
        faults.dtype_among("mask", mask.dtype, (torch.bool,), fix="pass mask != 0.")
        if mask.is_meta:
            message = "is on the meta device, where tensors have no values"
            fix = "make the mask on another device, such as 'cpu'."
            faults.add(InsumDeviceError, "mask", message, fix=fix)
        faults.raise_all()
        got = tuple(mask.shape)
        found = mask if got == self.grid_shape else self._grid_mask(mask)
        if found is None:
            shapes = [*dict.fromkeys([self.grid_shape, tuple(map(int, self.dense_extents))])]
            details, fix = [f"expected {' or '.join(map(str, shapes))}"], "pass one element per place of the grid."
            faults.add(
                InsumShapeError, "mask", f"has shape {got}", details=details, fix=fix, expected_got=(shapes, got)
            )
            faults.raise_all()
        return cast(Tensor, found)

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
            every = torch.ones(self.grid_shape, dtype=torch.bool)
            return every if density is None else random_mask(self.grid_shape, density)

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
        bias = None if outputs is None else nn.Parameter(torch.empty(outputs, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
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

    # What training changes.

    @torch.no_grad()
    def update_mask(self, mask: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Store other places: survivors keep their values and what the optimizer remembers of them, new ones are zero.

        The parameter stays the same object. Under `DistributedDataParallel` a mask with another number of places asks
        for wrapping the model again.

        Args:
            mask: bool, over the grid or over the dense weight.
            optimizer: holds the layer's weight; its momenta and moments follow the survivors. Left out, an optimizer
                that has made a step fits another number of places no longer, and says so at its next step.

        Raises:
            InsumDtypeError: the mask is not bool.
            InsumShapeError: the mask does not fit.
            InsumNameError: the optimizer does not hold the weight.
            InsumFormatError: the optimizer remembers a tensor that does not follow the weight's rows.
        """
        chosen = self.check_mask(mask).to(self.position.device).reshape(-1).nonzero().squeeze(1)
        source = self._sources(chosen)
        if optimizer is not None:
            carry_optimizer_state(optimizer, self.weight, source)
        gradient = self.weight.grad
        self.weight.grad = None
        self._replace_weight(take_rows(self.weight.data, source))
        if gradient is not None:
            self.weight.grad = take_rows(gradient, source)
        self._adopt_places(chosen)

    def _sources(self, chosen: Tensor) -> Tensor:
        """For each place its row in the weight as it is, or -1."""
        if self.num_stored == 0:
            return torch.full_like(chosen, -1)
        at = torch.searchsorted(self.position, chosen).clamp(max=self.num_stored - 1)
        return torch.where(self.position[at] == chosen, at, -1)

    def prune(self, density: float, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keep the stored cells of the largest norm.

        Args:
            density: share of the grid's places that stay.
            optimizer: as for `update_mask`.

        Raises:
            InsumFormatError: the density is not in (0, 1], or above the present one.
        """
        norms = self.cell_norms()
        scores = norms.new_full(self.grid_shape, -torch.inf).reshape(-1)
        scores[self.position] = norms.nan_to_num(nan=0.0)
        mask = magnitude_mask(scores, density).reshape(self.grid_shape)
        if int(mask.sum()) > self.num_stored:
            raise self._out_of_reach(density, "pruned", fix="pass a lower density, or call regrow.")
        self.update_mask(mask, optimizer)

    def regrow(
        self, density: float, optimizer: torch.optim.Optimizer | None = None, *, scores: Tensor | None = None
    ) -> None:
        """Add places, as zeros, until a share of the grid is stored.

        Args:
            density: share of the grid's places that are stored in the end.
            optimizer: as for `update_mask`.
            scores: over the grid: the highest earn a place, such as those of `record_gradients`. Default: at random.

        Raises:
            InsumFormatError: the density is not in (0, 1], or below the present one.
            InsumShapeError: `scores` has not the shape of the grid.
        """
        scores = self._scores(scores)
        known = scores.nan_to_num(nan=-torch.inf, posinf=3e38)
        mask = magnitude_mask(torch.where(self.mask, torch.inf, known), density)
        if int(mask.sum()) < self.num_stored:
            raise self._out_of_reach(density, "regrown", fix="pass a higher density, or call prune.")
        self.update_mask(mask, optimizer)

    def rewire(
        self, fraction: float, optimizer: torch.optim.Optimizer | None = None, *, scores: Tensor | None = None
    ) -> None:
        """Drop the share of stored cells with the smallest norms and grow as many elsewhere, as zeros.

        Source: Evci, Gale, Menick, Castro, Elsen, Rigging the Lottery: Making All Tickets Winners (ICML 2020).

        Args:
            fraction: share of the stored cells that move, in [0, 1]; see `cosine_fraction`.
            optimizer: as for `update_mask`.
            scores: over the grid: the highest earn a place, such as those of `record_gradients`. Default: at random.

        Raises:
            InsumFormatError: the fraction is not in [0, 1].
            InsumShapeError: `scores` has not the shape of the grid.
        """
        own, norms = self.mask, self.cell_norms()
        keep = norms.new_zeros(own.numel())
        keep[self.position] = norms
        self.update_mask(prune_and_regrow(own, keep.reshape(own.shape), self._scores(scores), fraction), optimizer)

    def _out_of_reach(self, density: float, changed: str, *, fix: str) -> InsumFormatError:
        return InsumFormatError(
            f"{type(self).__name__} stores {self.density:.3g} of its places, and cannot be {changed} to {density}",
            fix=fix,
            argument="density",
            expected=self.density,
            got=density,
        )

    def _scores(self, scores: Tensor | None) -> Tensor:
        """Return scores over the grid, random ones where none are given."""
        if scores is None:
            return torch.rand(self.grid_shape, device=self.position.device)
        faults = Faults(type(self).__name__)
        faults.shape("scores", scores, self.grid_shape, fix="pass one score per place of the grid.")
        faults.raise_all()
        return scores.to(self.position.device)

    @contextmanager
    def record_gradients(self) -> Generator[GradientRecord]:
        """While it is open, sum the dense weight's gradient over all backward passes through the layer.

        This is what RigL grows by; it costs a dense product per backward pass, so open it only for the steps before
        a change of the mask.

        Yields:
            A record whose `scores()` are the norms of that gradient over the grid.
        """
        record = GradientRecord(self)

        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: record.add(args[0].detach(), grad.detach()))

        handle = self.register_forward_hook(watch)
        try:
            yield record
        finally:
            handle.remove()

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

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what TorchScript is to compile in place of the layer; it calls this."""
        return ScriptedCall(self, self._example())

    # State.

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes these by position
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Load weight and places; a faulty state leaves the layer unchanged."""
        error_msgs: list[str] = rest[-1]
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
        super()._load_from_state_dict(state_dict, prefix, *rest)
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


class GradientRecord:
    """The dense gradient of a pruned layer's weight, summed over backward passes."""

    def __init__(self, layer: PrunedWeight) -> None:
        self._layer = layer
        self._dense: Tensor | None = None

    def add(self, input: Tensor, grad_output: Tensor) -> None:
        """Add one pass."""
        wide = torch.promote_types(grad_output.dtype, torch.float32)
        weight = input.new_zeros(self._layer.dense_extents, dtype=wide).requires_grad_()
        with torch.enable_grad():
            result = self._layer._by_library(input.to(wide), weight, None)
        found = torch.autograd.grad(result, weight, grad_output.to(wide))[0]
        self._dense = found if self._dense is None else self._dense + found

    def scores(self) -> Tensor:
        """Return the norm of the gradient at each place of the grid.

        Raises:
            InsumFormatError: no backward pass was recorded.
        """
        if self._dense is None:
            raise InsumFormatError(
                f"no backward pass through this {type(self._layer).__name__} was recorded",
                fix="call loss.backward() inside the record_gradients() block.",
            )
        return self._layer._grid_norms(self._dense)


def reaches(uses: int, least: float) -> bool:
    """Whether a number is not less than another; if a graph of any sizes is traced, for all of them."""
    if isinstance(uses, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        # As torch.jit.trace records it.
        return False
    return is_known(uses >= least) if torch.compiler.is_compiling() else uses >= least


def kept_of(
    weight: Tensor, kept: Tensor | None, mask: Tensor | None, density: float | None, best: Callable[..., Tensor]
) -> dict[str, Any]:
    """Return a constructor's `mask` and `density` for a dense weight, of which `best` keeps a share.

    Without mask and density: what `torch.nn.utils.prune` has `kept`, or is not zero.
    """
    if mask is None and not weight.is_meta:
        nonzero = weight != 0 if kept is None else kept
        mask, density = nonzero if density is None else best(weight, density), None
    return {"mask": mask, "density": density}


def dense_parameter(layer: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return a dense layer's parameter, cut from the graph, and what a mask of `torch.nn.utils.prune` keeps of it.

    The attribute of a layer with such a mask is what its last call computed, which no optimizer's step has reached.
    """
    mask = getattr(layer, f"{name}_mask", None)
    original: Tensor = getattr(layer, name if mask is None else f"{name}_orig")
    values = original.detach() if mask is None else original.detach() * mask
    return values.requires_grad_(original.requires_grad), None if mask is None else mask != 0
