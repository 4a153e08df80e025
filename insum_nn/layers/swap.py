"""Replacing the supported layers of a model in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod

from insum_nn.compiler.api import table
from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.errors import InsumDtypeError, InsumError, InsumFormatError, InsumNameError
from insum_nn.layers.pruned.block_sparse_linear import BlockSparseLinear, SparseLinear
from insum_nn.layers.pruned.pruned_conv import PrunedConv, PrunedConv1d, PrunedConv2d, PrunedConv3d
from insum_nn.layers.swap_converters import CONVERTERS, NotConvertible

__all__ = ["SwapReport", "SwapRow", "swap"]

# Where peers define their layers -> where users import these from. The parts of such a layer have no rows of their own.
_PEERS = {
    "torch_geometric.nn.conv": "torch_geometric.nn",
    "spconv.pytorch": "spconv.pytorch",
    "e3nn.o3": "e3nn.o3",
    "e3nn.nn": "e3nn.nn",
}

_Replaced = tuple[nn.Module | None, str, nn.Module, nn.Module]


# The report.


@dataclass(frozen=True)
class SwapRow:
    """What became of one layer.

    Attributes:
        name: its path in the model; empty for the model itself.
        layer: its class.
        action: "swapped" or "left"; in a dry run what would be done.
        detail: the class that took its place, or why it was left alone.
    """

    name: str
    layer: str
    action: Literal["swapped", "left"]
    detail: str


@dataclass(frozen=True)
class SwapReport:
    """What `swap` did; `str()` is a table, and so is what a notebook shows.

    Attributes:
        rows: one per layer that was swapped, and per module that was not, and holds parameters or computes something.
        model: the model; another object only if the model itself was a supported layer.
        dry_run: nothing was changed.
        replaced: owner (none of the model itself), attribute, and the old and the new layer in its place.
    """

    rows: tuple[SwapRow, ...]
    model: nn.Module = field(repr=False)
    dry_run: bool = False
    replaced: tuple[_Replaced, ...] = field(default=(), repr=False)

    @property
    def swapped(self) -> tuple[SwapRow, ...]:
        """The layers that were swapped."""
        return tuple(row for row in self.rows if row.action == "swapped")

    @property
    def left(self) -> tuple[SwapRow, ...]:
        """The layers that were left alone."""
        return tuple(row for row in self.rows if row.action == "left")

    def undo(self) -> nn.Module:
        """Put layers of other packages back, with the present state, such as to save a model in its package's own form.

        Dense layers that were pruned stay pruned.

        Returns:
            The model; another object only if the model itself was swapped.
        """
        for parent, key, old, new in self.replaced:
            state = new.state_dict()
            for like in [tensor for tensor in state.values() if tensor.is_floating_point()][:1]:
                old.to(like)
            old.load_state_dict(state)
            old.train(new.training)
            _put(parent, key, old, new, False)
        return next((old for parent, _, old, _ in self.replaced if parent is None), self.model)

    def __str__(self) -> str:
        action = {"swapped": "would swap" if self.dry_run else "swapped", "left": "left alone"}
        rows = [(row.name or "(model)", row.layer, action[row.action], row.detail) for row in self.rows]
        count = f"{len(self.swapped)} {'would be ' * self.dry_run}swapped, {len(self.left)} left alone"
        return f"{table(('layer', 'class', 'action', 'detail'), rows)}\n{count}"


# The swap.

_STORAGE = replace(DEFAULT, accumulate="storage")

Pruning = float | Tensor | Mapping[str, Any]

# Dense layers -> what makes a pruned one of them.
_PRUNED: dict[type, Callable[..., BlockSparseLinear | PrunedConv[Any]]] = {
    nn.Linear: BlockSparseLinear.from_linear,
    nn.Conv1d: PrunedConv1d.from_conv1d,
    nn.Conv2d: PrunedConv2d.from_conv2d,
    nn.Conv3d: PrunedConv3d.from_conv3d,
}


def swap(
    model: nn.Module,
    *,
    dry_run: bool = False,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    block_sparse: Mapping[str, Pruning] | None = None,
    options: Options = DEFAULT,
) -> SwapReport:
    """Replace every supported layer of a model in place, weights kept.

    Supported are those convolutions of `torch_geometric` that `insum_nn.layers` has, e3nn's tensor products with what
    stands around them (`Linear`, `Gate`, `SphericalHarmonics`, `FullyConnectedNet`), nequip's `TensorProductScatter`,
    the products of mace's interactions with their gather and scatter, its contractions and radial functions, and the
    modules of `spconv.pytorch` (build the model's inputs with our `SparseConvTensor` then). New layers share the
    parameters of those they replace, so an optimizer that holds
    them stays valid, and give equal outputs. Dense layers of torch are replaced only where `block_sparse` names them;
    these get parameters of their own, and equal outputs only as far as nothing is pruned.

    Args:
        model: any module.
        dry_run: change nothing; the report says what would be done.
        include: patterns (`"encoder.*"`) of the names of layers to consider; default all.
        exclude: patterns of names to leave alone.
        block_sparse: pattern -> what to keep of the `Linear`, `Conv1d`, `Conv2d` and `Conv3d` layers whose names fit: a
            density, a mask, or the keyword arguments of `BlockSparseLinear.from_linear` (those of `SparseLinear` with
            `block_shape=1`) or of `PrunedConv2d.from_conv2d`; none, `{}`, for what is not zero, or what a mask of
            `torch.nn.utils.prune` keeps. The first pattern that fits a name counts.
        options: compile options of the new layers, the deterministic switch among them.

    A layer that cannot be replaced is left alone, and its row says why: what is parametrized, pruned or has hooks would
    lose that, and the row names the call that takes it away. Every other module that holds parameters, or computes
    something by code of its own, has a row as well, unless layers in it were swapped. `swap` does not see the code
    between layers: the row of a tensor product that may stand between a gather and a scatter names what fuses them.

    Returns:
        The report; its `model` is `model`, unless that is itself a supported layer.

    Raises:
        InsumNameError: a pattern fits no layer.
        InsumFormatError: what `block_sparse` asks for a layer cannot be done; nothing is changed then.
        InsumDtypeError: `model` is no module, `block_sparse` no mapping from names, or `options` no `Options`.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> print(swap(model, block_sparse={"0": {"density": 0.5, "block_shape": (16, 16)}}))
    layer  class                   action      detail
    0      torch.nn.Linear         swapped     BlockSparseLinear, 8 of 16 blocks
    2      torch.nn.Linear         left alone  dense; name it in block_sparse= to prune it
    1 swapped, 1 left alone
    >>> type(model[0]).__name__
    'BlockSparseLinear'
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InsumDtypeError(f"swap: 'model' must be a module, got {model!r:.60}", fix="pass an object of its class.")
    work = _Swap(model, _patterns(include), _patterns(exclude) or (), _prunings(block_sparse), require_options(options))
    root = work.visit(model, "", None)
    work.check_patterns()
    if dry_run:
        return SwapReport(tuple(work.rows), model, dry_run)
    work.pending += [(None, "", model, root)] * (root is not model)
    for parent, key, _, new in work.pending:
        _put(parent, key, new, new, True)
    replaced = tuple(row for row in work.pending if not isinstance(row[-1], (BlockSparseLinear, PrunedConv)))
    return SwapReport(tuple(work.rows), root, dry_run, replaced)


def _put(parent: nn.Module | None, key: str, layer: nn.Module, new: Any, attached: bool) -> None:
    """Put a layer in its place, where a new one is to be attached or is no more."""
    if parent is not None:
        parent._modules[key] = layer
    if hasattr(new, "attach_to"):
        new.attach_to(parent, attached)


def _patterns(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return None if given is None else (given,) if isinstance(given, str) else tuple(given)


def _prunings(given: object) -> dict[str, Pruning]:
    if given is None:
        return {}
    # A list of names is the first thing one tries, and says nothing of how much to keep.
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InsumDtypeError(
            f"swap: block_sparse= must map names of layers to what to keep of each, got {given!r:.60}",
            fix="write block_sparse={'encoder.*': 0.1} to keep a tenth of the blocks of each layer whose name fits.",
        )
    return dict(cast(Mapping[str, Pruning], given))


@dataclass
class _Swap:
    """One walk over a model; replacements are made first and attached together at the end."""

    # Modules stay alive for as long as their ids are keys.
    model: nn.Module
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    block_sparse: dict[str, Pruning]
    options: Options
    rows: list[SwapRow] = field(default_factory=list[SwapRow])
    made: dict[int, nn.Module] = field(default_factory=dict[int, nn.Module])
    pending: list[_Replaced] = field(default_factory=list[_Replaced])
    fitted: set[str] = field(default_factory=set[str])
    # Modules that are swapped, and those that hold such or layers of ours.
    changed: set[int] = field(default_factory=set[int])
    owners: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def __post_init__(self) -> None:
        # A module that stands at two names owns its parameters once.
        for name, module in self.model.named_modules():
            for key, parameter in module.named_parameters(name, recurse=False):
                self.owners.setdefault(id(parameter), []).append(key)

    def visit(self, module: nn.Module, name: str, parent: nn.Module | None, *, part: bool = False) -> nn.Module:
        """Return the replacement of a module, or itself; children first, for containers take theirs along.

        Of a `part` of a peer's or torch's layer the layer's row speaks.
        """
        if id(module) in self.made:
            return self.made[id(module)]
        self.made[id(module)] = module
        place = len(self.rows)
        inside = self.convert(module, name, parent)
        listed = len(self.rows) > place
        if inside is not None and not _is_container(inside):
            self.made[id(module)] = inside
            self.changed.add(id(module))
            return inside
        target = module if inside is None else inside
        # One that stands at two names is visited at both.
        for key, child in [(key, child) for key, child in module._modules.items() if child is not None]:
            new = self.visit(child, f"{name}.{key}" if name else key, module, part=part or _has_parts(module))
            if id(child) in self.changed or _path_of(type(child)).startswith("insum_nn."):
                self.changed.add(id(module))
            if inside is not None:
                target._modules[key] = new
            elif new is not child:
                self.pending.append((module, key, child, new))
        # Only now is it known whether something in it was swapped.
        reason = None if listed or self.skipped(name) else self.why_not(module, parent, part)
        if reason is not None:
            self.rows.insert(place, SwapRow(name, _shown(_path_of(_class_of(module))), "left", reason))
        self.made[id(module)] = target
        return target

    def convert(self, module: nn.Module, name: str, parent: nn.Module | None) -> nn.Module | None:
        """Our layer for a module, and a row of the report; `None` where there is none."""
        kind = _class_of(module)
        path = _path_of(kind)
        fitting = self.fitting(self.block_sparse, name) if kind in _PRUNED else []
        pruning = self.block_sparse[fitting[0]] if fitting else None
        place = "" if parent is None else f"{_path_of(_class_of(parent))}.{name.rpartition('.')[2]}"
        found = place if {place, path} <= CONVERTERS.keys() else path
        if found not in CONVERTERS and pruning is None:
            return None
        reason = self.skipped(name) or _attached(module, masks=pruning is None)
        if reason is None and pruning is not None:
            reason = self.why_not_prune(module, parent)
        if reason is None:
            # Constructors draw weights that are thrown away: the caller's random numbers stay as they are.
            with torch.random.fork_rng(devices=[]):
                new, detail = self.convert_peer(module, found) if pruning is None else self.prune(module, name, pruning)
            reason = detail
            if new is not None:
                self.rows.append(SwapRow(name, _shown(path), "swapped", detail))
                self.steer(new)
                # Not `train`, which would reach into what both share.
                new.training = module.training
                return new
        self.rows.append(SwapRow(name, _shown(path), "left", reason))
        return None

    def steer(self, layer: Any) -> None:
        """Give a new layer the compile options, unless its pattern named some; containers have none."""
        own = getattr(layer, "options", None)
        if self.options == DEFAULT or own not in (DEFAULT, _STORAGE):
            return
        # The peer's convolution may have been told to sum in its features' dtype.
        layer.options = self.options if own == DEFAULT else replace(self.options, accumulate="storage")

    def convert_peer(self, module: nn.Module, path: str) -> tuple[nn.Module | None, str]:
        """Return our layer and its class, or none and why."""
        try:
            new: Any = CONVERTERS[path](module)
        except (NotConvertible, InsumError) as error:
            return None, error.message if isinstance(error, InsumError) else str(error)
        except Exception as error:
            # Versions of peers differ; a layer that ours does not understand works on as it is.
            return None, f"it could not be converted: {type(error).__name__}: {error}"
        kind = type(new).__name__
        # Weights of each sample's own are those of edges, as a rule.
        if kind == "TensorProduct" and new.weight_numel and not new.shared_weights:
            kind += "; between a gather and a scatter, write TensorProductConv(product) for all three"
        return new, kind

    def prune(self, module: nn.Module, name: str, pruning: Pruning) -> tuple[nn.Module, str]:
        """Return a pruned layer, and what it stores."""
        arguments: dict[str, Any] = {"mask" if isinstance(pruning, Tensor) else "density": pruning}
        if isinstance(pruning, Mapping):
            arguments = dict(pruning)
        build = _PRUNED[type(module)]
        if isinstance(module, nn.Linear) and arguments.get("block_shape") in (1, (1, 1)):
            build = SparseLinear.from_linear
            del arguments["block_shape"]
        accepted = list(signature(build).parameters)[1:]
        fix = "correct the density, the mask or the arguments under its pattern, or exclude the layer."
        try:
            for key in [key for key in arguments if key not in accepted]:
                fix = "".join(f"write '{nearest}'." for nearest in get_close_matches(str(key), accepted, 1)) or fix
                raise TypeError(f"unknown key {key!r}; accepted keys: {', '.join(accepted)}")
            layer = build(cast(Any, module), **arguments)
        except (InsumError, TypeError) as error:
            message = error.message if isinstance(error, InsumError) else str(error)
            raise InsumFormatError(
                f"block_sparse cannot be applied to '{name}', {type(module).__name__}: {message}", fix=fix, layer=name
            ) from error
        total, what = layer.mask.numel(), "weights"
        if type(layer) is BlockSparseLinear:
            what = "blocks" if layer.num_stored < total else "blocks: nothing is saved"
        return layer, f"{type(layer).__name__}, {layer.num_stored} of {total} {what}"

    # Reasons.

    def skipped(self, name: str) -> str | None:
        if self.include is not None and not self.fitting(self.include, name):
            return "not included"
        excluded = self.fitting(self.exclude, name)
        return f"excluded by '{excluded[0]}'" if excluded else None

    def fitting(self, patterns: Iterable[str], name: str) -> list[str]:
        """Return the patterns that fit a name, and note them."""
        found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        self.fitted.update(found)
        return found

    def why_not(self, module: nn.Module, parent: nn.Module | None, part: bool) -> str | None:
        """Why a module that was not swapped is worth a line, or `None`."""
        path = _path_of(_class_of(module))
        if type(module) in _PRUNED:
            kept = "masked" if hasattr(module, "weight_mask") else "dense"
            return f"{kept}; name it in block_sparse= to prune it"
        if part or path.startswith("insum_nn.") or _is_container(module):
            return None
        for kind in _class_of(module).__mro__[1:]:
            if kind in _PRUNED or _path_of(kind) in CONVERTERS:
                return f"a subclass of {kind.__name__}, whose behaviour may differ"
        if isinstance(module, torch.jit.ScriptModule):
            return "compiled by TorchScript"
        # The model itself is no layer, unless it is all that there is.
        apart = id(module) not in self.changed and (parent is not None or not module._modules)
        return "no counterpart" if (apart and _computes(module, path)) or _holds_parameters(module) else None

    def why_not_prune(self, module: nn.Module, parent: nn.Module | None) -> str | None:
        if isinstance(parent, nn.TransformerEncoderLayer):
            return "TransformerEncoderLayer reads its weight itself"
        weight = getattr(module, "weight_orig", module.weight)
        if not isinstance(weight, nn.Parameter):
            return "its weight is not a parameter"
        names = self.owners[id(weight)]
        return f"its weight is shared: {', '.join(names)}" if len(names) > 1 else None

    def check_patterns(self) -> None:
        asked = [*(self.include or ()), *self.exclude, *self.block_sparse]
        for pattern in asked:
            if pattern not in self.fitted:
                kind = "Linear or convolution layer" if pattern in self.block_sparse else "layer"
                known = [f"'{row.name}'" for row in self.rows if row.name]
                details = [f"layers: {', '.join(known) or 'none'}"]
                for name, module in self.model.named_modules():
                    if not fnmatchcase(name, pattern):
                        continue
                    if isinstance(module, (BlockSparseLinear, PrunedConv)):
                        details.append(f"'{name}' is a {type(module).__name__} already; its prune() keeps less")
                    # Such as the output projection of torch's attention, which calls no forward of it.
                    elif isinstance(module, tuple(_PRUNED)):
                        details.append(f"'{name}' is of a subclass, {type(module).__name__}, and cannot be replaced")
                raise InsumNameError(
                    f"swap: the pattern '{pattern}' fits no {kind}",
                    details=details,
                    fix="write the layer's path in the model; '*' stands for any characters.",
                    pattern=pattern,
                )


def _holds_parameters(module: nn.Module) -> bool:
    lists = (nn.ParameterList, nn.ParameterDict)
    own = [module, *(child for child in module.children() if isinstance(child, lists))]
    return not isinstance(module, lists) and any([*part.parameters(recurse=False)] for part in own)


def _computes(module: nn.Module, path: str) -> bool:
    """Return whether a module has code of its own, or is a peer's layer; what torch made of such is a part of it."""
    code = getattr(type(module).forward, "__module__", "")
    return _peer_of(path) is not None or not any(f"{name}.".startswith("torch.") for name in (code, path))


def _has_parts(module: nn.Module) -> bool:
    """Return whether what a module consists of are parts of one layer, of ours, torch's or a peer's."""
    paths = [_path_of(kind) for kind in _class_of(module).__mro__]
    known = paths[0].startswith("insum_nn.layers.") or _peer_of(paths[0]) is not None or {*paths} & CONVERTERS.keys()
    torch_s = paths[0].startswith("torch.nn.") and (_holds_parameters(module) or is_parametrized(module))
    return bool(known or torch_s) and not _is_container(module)


def _class_of(module: nn.Module) -> type:
    """Return a layer's class; a parametrization gives each layer one of its own."""
    return type(module).__mro__[1] if is_parametrized(module) else type(module)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_container(module: nn.Module) -> bool:
    """Return whether a module is a peer's container, or ours, whose children are layers of their own."""
    return type(module).__name__ in ("SparseSequential", "ConcatTable")


# Attributes that hold a module's hooks, and torch's hooks that compute a weight before each call.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMOVED_BY = {"WeightNorm": "torch.nn.utils.remove_weight_norm", "SpectralNorm": "torch.nn.utils.remove_spectral_norm"}


def _attached(module: nn.Module, *, masks: bool) -> str | None:
    """Return which hook or parametrization of a layer, its `masks` included, would be lost, and how to remove it."""
    if is_parametrized(module):
        names = ", ".join(repr(name) for name in cast(nn.ModuleDict, module.parametrizations))
        return f"it is parametrized; torch.nn.utils.parametrize.remove_parametrizations(layer, {names}) ends that"
    # What a container holds are layers of their own.
    parts = [("", module)] if _is_container(module) else list(module.named_modules())
    for name, part in parts:
        it, layer = (f"its {name}", f"layer.{name}") if name else ("it", "layer")
        for hook in [hook for kind in _HOOKS for hook in (getattr(part, kind, None) or {}).values()]:
            if getattr(hook, "__self__", None) is part:
                # A method of its own, such as the one that makes the weights of a lazy layer.
                continue
            if isinstance(hook, BasePruningMethod):
                if not masks and part is module:
                    continue
                call = f"torch.nn.utils.prune.remove({layer}, {hook._tensor_name!r})"
                return f"{it} is pruned; {call} makes that permanent"
            call = _REMOVED_BY.get(type(hook).__name__)
            if call is not None:
                return f"{it} is normalised; {call}({layer}) makes that permanent"
            return f"{it} has hooks; .remove() of the handle that registering one returned takes it away"
    return None


def _shown(path: str) -> str:
    """Return the path by which a class is imported."""
    package, _, name = path.rpartition(".")
    if package.startswith("torch.nn.modules"):
        return f"torch.nn.{name}"
    peer = _peer_of(path)
    return path if peer is None else f"{_PEERS[peer]}.{name}"


def _peer_of(path: str) -> str | None:
    """Return which of `_PEERS` defines what has a path."""
    return next((peer for peer in _PEERS if f"{path}.".startswith(f"{peer}.")), None)
