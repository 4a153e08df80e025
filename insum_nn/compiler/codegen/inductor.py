"""Compile a graph of torch calls by TorchInductor. The only file that names Inductor's options.

A graph is traced under fake tensors whose axes carry one symbol per index, so that one compilation serves every
size, and Inductor knows which extents agree. What Inductor assumes about sizes beyond that (its guards) is kept
with the compiled code and checked at each call. Torch's own cache keeps compiled code on disk for other processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumBackendError

__all__ = ["Compiled", "compile_graph", "inductor_options", "kernel_sources", "size_class"]

_INT32 = 2**31


def inductor_options(bound: Bound, options: Options) -> dict[str, Any]:
    """Options for our graphs; they are passed with each compilation and never set for the whole process."""
    device_type = bound.device_type
    chosen: dict[str, Any] = {
        # Every index was proven or clamped before the graph reads through it.
        "assert_indirect_indexing": False,
    }
    if device_type == "cuda":
        # An exact float32 dot has no tensor-core instruction: each candidate takes seconds to compile, and the
        # heuristic choice measured better than the tuned one.
        exact = bound.dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
        chosen["max_autotune_pointwise"] = not exact
        if options.native_matmul:
            chosen["triton.native_matmul"] = True
            chosen["triton.prefer_nd_tiling"] = True
    return chosen


def size_class(bound: Bound, tensors: Sequence[Tensor], extents: Extents) -> tuple[object, ...]:
    """Return what distinguishes compiled programs by size: axes of length 1, and sizes that need 64-bit addresses."""
    ones = tuple(size == 1 for tensor in tensors for size in tensor.shape) + tuple(e == 1 for e in extents.output)
    space = 1
    for extent in extents.indices:
        space *= extent
    output = 1
    for extent in extents.output:
        output *= extent
    large = max([space, output, *(t.numel() for t in tensors)]) >= _INT32
    return ones, large


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiled code and what it assumes.

    Attributes:
        run: the code; takes the sizes of `symbols`, then the graph's arguments.
        symbols: the sizes that guards speak of: the argument and the axis that shows each.
        holds: whether the code serves some sizes, in the order of `symbols`; `None`: it serves all.
    """

    run: Callable[..., Any]
    symbols: tuple[tuple[int, int], ...]
    holds: Callable[..., bool] | None

    def fits(self, args: Sequence[Any]) -> bool:
        """Return whether the arguments' sizes are among those the code was compiled for."""
        return self.holds is None or self.holds(*_sizes(self.symbols, args))

    def __call__(self, *args: Any) -> Tensor:
        result = self.run(*_sizes(self.symbols, args), *args)
        return result[0] if isinstance(result, tuple | list) else result


def _sizes(symbols: Sequence[tuple[int, int]], args: Sequence[Any]) -> list[int]:
    return [args[at] if axis < 0 else args[at].shape[axis] for at, axis in symbols]


class _Symbols:
    """Fake arguments of a graph: one symbol per index, one per axis that an index tensor selects along."""

    def __init__(self) -> None:
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.by_name: dict[str, Any] = {}
        self.shown: dict[Any, tuple[int, int]] = {}

    def size(self, name: str, extent: int, where: tuple[int, int], *, fixed: bool) -> Any:
        if fixed:
            return extent
        if name not in self.by_name:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            source = ConstantSource(name)
            symbol = self.env.create_symbol(max(2, extent), source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self.by_name[name] = self.env.create_symintnode(symbol, hint=max(2, extent), source=source)
            self.shown[symbol] = where
        return self.by_name[name]

    def guard(self, arguments: Sequence[Any]) -> Callable[..., bool] | None:
        """Return what Inductor assumed of sizes as a function of them; `None`: nothing."""
        import sympy

        assumed = {*(guard.expr for guard in self.env.guards)} - {sympy.true}
        first = _sizes(tuple(self.shown.values()), arguments)

        def holds(*sizes: int) -> bool:
            known = dict(zip(self.shown, map(sympy.Integer, sizes), strict=True))
            return all(each.xreplace(known) is sympy.true for each in assumed)

        if not holds(*first):
            # Inductor never sees a size below 2.
            return lambda *sizes: list(sizes) == first
        return holds if assumed else None


def _fake_arguments(
    bound: Bound, integers: Sequence[tuple[str, int]], tensors: Sequence[Tensor], initial: Tensor | None
) -> tuple[_Symbols, list[Any]]:
    layout = bound.layout
    symbols = _Symbols()
    static = dict(bound.static)
    # Sizes are numbered, because an index `A_1` is not axis 1 of a tensor `A`.
    numbered = {name: f"i{number}" for number, name in enumerate(layout.indices)}
    fixed = {numbered[name] for name in static}
    plain: dict[tuple[int, int], str] = {}
    for name, places in zip(layout.indices, layout.plain, strict=True):
        plain.update(dict.fromkeys(places, numbered[name]))
    fake: list[Any] = []

    def tensor(value: Tensor, names: Sequence[str], at: int) -> Any:
        shape = [
            # An output axis that is also an integer argument keeps the argument's symbol, whatever its length.
            symbols.size(name, extent, (at, axis), fixed=(extent == 1 and name not in symbols.by_name) or name in fixed)
            for axis, (name, extent) in enumerate(zip(names, value.shape, strict=True))
        ]
        with symbols.mode:
            return torch.empty(shape, dtype=value.dtype, device=value.device)

    for where, value in enumerate(tensors):
        names = [plain.get((where, axis), f"t{where}_{axis}") for axis in range(value.ndim)]
        fake.append(tensor(value, names, where))
    for name, extent in integers:
        fake.append(symbols.size(name, extent, (len(fake), -1), fixed=False))
    if initial is not None:
        names = [numbered[name] if name else f"output_extent_{axis}" for axis, name in enumerate(layout.output_plain)]
        fake.append(tensor(initial, names, len(fake)))
    return symbols, fake


def compile_graph(
    graph: CallGraph,
    bound: Bound,
    options: Options,
    integers: Sequence[tuple[str, int]],
    tensors: Sequence[Tensor],
    initial: Tensor | None,
) -> Compiled:
    """Compile a graph for all sizes of a class.

    Args:
        graph: torch calls, as `codegen.aten` prints them.
        bound: what the graph was lowered from.
        options: compile options.
        integers: names and values of the graph's integer arguments.
        tensors: the first call's tensors, contiguous.
        initial: its initial value.

    Raises:
        InsumBackendError: Inductor does not compile the graph.
    """
    try:
        traced, fake, symbols = _trace(graph, bound, integers, tensors, initial)
        run = _standalone(traced, fake, inductor_options(bound, options))
    except Exception as error:
        # The fused product of some shapes (a batch of few, small blocks) does not compile, separate kernels do.
        others = ' or Options(backend="inductor", native_matmul=False)' if options.native_matmul else ""
        raise InsumBackendError(
            f"Inductor could not compile the statement for {bound.device_type}: {type(error).__name__}: {error}",
            expression=bound.statement.text,
            fix=f'choose Options(backend="eager"){others}.',
        ) from error
    arguments = [*tensors, *(value for _, value in integers), *([] if initial is None else [initial])]
    return Compiled(run, tuple(symbols.shown.values()), symbols.guard(arguments))


def _trace(
    graph: CallGraph,
    bound: Bound,
    integers: Sequence[tuple[str, int]],
    tensors: Sequence[Tensor],
    initial: Tensor | None,
) -> tuple[fx.GraphModule, list[Any], _Symbols]:
    from torch.fx.experimental.proxy_tensor import make_fx

    symbols, fake = _fake_arguments(bound, integers, tensors, initial)
    # Torch's cache on disk forgets what is assumed of sizes that are no arguments.
    sizes = [*symbols.by_name.values()]
    fake = [*sizes, *fake]
    with torch.no_grad():
        traced = make_fx(lambda *args: graph.forward(*args[len(sizes) :]), tracing_mode="symbolic")(*fake)
    for node in traced.graph.nodes:
        # Inductor finds the symbols of a graph through this entry of its nodes; without it, it would make new ones.
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    return traced, fake, symbols


def _standalone(traced: fx.GraphModule, fake: list[Any], chosen: dict[str, Any]) -> Any:
    from torch._inductor import config, standalone_compile

    # One or two kernels need no pool of compiling processes: it is a Python for each core, which take the cores from
    # what runs, and start again after each minute's pause.
    with torch.no_grad(), config.patch({**chosen, "compile_threads": 1}), warnings.catch_warnings():
        # Advice to the author of a model (use TF32) or to Inductor's (a deprecated Triton call); not to our caller.
        warnings.simplefilter("ignore")
        return standalone_compile(traced, fake, dynamic_shapes="from_graph", options={})


def kernel_sources(
    graph: CallGraph,
    bound: Bound,
    options: Options,
    integers: Sequence[tuple[str, int]],
    tensors: Sequence[Tensor],
    initial: Tensor | None,
) -> list[str]:
    """Return the code that Inductor writes, for `explain()` and for tests of its shape."""
    from torch._inductor.utils import run_and_get_code

    traced, fake, _ = _trace(graph, bound, integers, tensors, initial)
    chosen = {**inductor_options(bound, options), "fx_graph_cache": False, "max_autotune_pointwise": False}
    _, sources = run_and_get_code(lambda: _standalone(traced, fake, chosen))
    return list(sources)
