"""Compile a graph of torch calls by TorchInductor. The only file that names Inductor's options.

A graph is traced under fake tensors whose axes carry one symbol per index, so that one compilation serves every
size, and Inductor knows which extents agree. What Inductor assumes about sizes beyond that (its guards) is kept
with the compiled code and checked at each call. Compiled code is stored on disk and found again by other processes.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.codegen.inductor_guards import Guard, Tree, checked, compiled, tree_of
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.cache_folder import own_folder
from insum_nn.errors import InsumBackendError

__all__ = ["Compiled", "compile_graph", "inductor_options", "kernel_sources", "size_class"]

_INT32 = 2**31
_FORMAT = 3


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


@dataclass(slots=True)
class Compiled:
    """Compiled code and what it assumes.

    Attributes:
        run: the code; takes the graph's arguments as a flat list.
        guards: assumptions about sizes, as trees over the names of `symbols`.
        symbols: names of the sizes that guards speak of, each with the argument and axis that shows it.
        note: what is out of the ordinary about it, for `explain()`.
        from_disk: it was found on disk.
        only: the one set of sizes that it serves, where its assumptions cannot be told.
    """

    run: Callable[..., Any]
    guards: tuple[Tree, ...]
    symbols: tuple[tuple[str, int, int], ...]
    note: str
    from_disk: bool
    only: tuple[int, ...] | None = None
    checks: tuple[Guard, ...] = ()

    def __post_init__(self) -> None:
        self.checks = tuple(compiled(tree) for tree in self.guards)

    def sizes(self, args: Sequence[Any]) -> dict[str, int]:
        """Return the sizes that guards refer to."""
        return {name: args[at] if axis < 0 else args[at].shape[axis] for name, at, axis in self.symbols}

    def fits(self, args: Sequence[Any]) -> bool:
        """Return whether the arguments' sizes are among those the code was compiled for."""
        if not self.checks and self.only is None:
            return True
        sizes = self.sizes(args)
        if self.only is not None:
            return self.only == tuple(sizes.values())
        return all(check(sizes) for check in self.checks)

    def __call__(self, *args: Any) -> Tensor:
        result = self.run(*args)
        return result[0] if isinstance(result, tuple | list) else result


def _key(graph: CallGraph, bound: Bound, options: Options, sizes: tuple[object, ...], device: torch.device) -> str:
    parts: list[object] = [_FORMAT, repr(bound), repr(options), sizes, torch.__version__, torch.version.git_version]
    # Another version of this package may write another graph for the same statement.
    parts.append(graph.code)
    parts.append(sorted(inductor_options(bound, options).items()))
    parts.append(torch.get_float32_matmul_precision())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        parts += [properties.name, torch.cuda.get_device_capability(device), torch.version.cuda]
    else:
        parts.append(_instruction_set())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _load(path: pathlib.Path, arguments: Sequence[Any]) -> Compiled | None:
    """Load a compiled program from disk; `None`: the file holds none, or none for these arguments.

    Guards and code are read only if they are what was written: their digests are stored with them.
    """
    from torch._inductor import CompiledArtifact

    data = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    facts = data["facts"]
    if data["digest"] != _digest(json.dumps(facts, sort_keys=True).encode()):
        raise ValueError("the guards are not what was written")
    code = path / "artifact"
    if facts["artifact"] != _digest(code.read_bytes()):
        raise ValueError("the code is not what was written")
    symbols = tuple((name, at, axis) for name, at, axis in facts["symbols"])
    if not all(type(name) is str and type(at) is int and type(axis) is int for name, at, axis in symbols):
        raise ValueError("sizes are a name, an argument and an axis")
    guards = checked(facts["guards"], [name for name, _, _ in symbols])
    found = Compiled(_absent, guards, symbols, str(facts["note"]), from_disk=True)
    if not found.fits(arguments):
        return None
    found.run = CompiledArtifact.load(path=str(code), format="binary")
    return found


_FACTS = "guards.json"


def _absent(*_: Any) -> Any:
    raise AssertionError("no code was loaded")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _store(artifact: Any, compiled: Compiled, path: pathlib.Path, *, instead: bool) -> None:
    """Write elsewhere, then rename: another process sees the whole entry or none.

    Args:
        artifact: the code.
        compiled: what it assumes.
        path: the entry's folder.
        instead: of what is there, which is no entry.
    """
    staging: pathlib.Path | None = None
    try:
        staging = pathlib.Path(tempfile.mkdtemp(dir=path.parent))
        folder = staging / "new"
        folder.mkdir(mode=0o700)
        artifact.save(path=str(folder / "artifact"), format="binary")
        code = _digest((folder / "artifact").read_bytes())
        facts = {"guards": compiled.guards, "symbols": compiled.symbols, "note": compiled.note, "artifact": code}
        whole = {"facts": facts, "digest": _digest(json.dumps(facts, sort_keys=True).encode())}
        (folder / _FACTS).write_text(json.dumps(whole), encoding="utf-8")
        if instead:
            with suppress(FileNotFoundError):
                path.rename(staging / "old")
        folder.rename(path)
    except OSError:
        # Another process was first, or the disk is full or read-only: the program in memory serves all the same.
        pass
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


@lru_cache(maxsize=1)
def _instruction_set() -> str:
    """Return the instruction set of this processor: code for another one may end the process."""
    flags = ""
    with suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    features = sorted(flags.partition(":")[2].split())
    return " ".join([platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *features])


class _Symbols:
    """Fake arguments of a graph: one symbol per index, one per axis that an index tensor selects along."""

    def __init__(self) -> None:
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.by_name: dict[str, Any] = {}
        self.shown: dict[str, tuple[int, int]] = {}

    def size(self, name: str, extent: int, where: tuple[int, int], *, fixed: bool) -> Any:
        if fixed:
            return extent
        if name not in self.by_name:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            source = ConstantSource(name)
            symbol = self.env.create_symbol(max(2, extent), source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self.by_name[name] = self.env.create_symintnode(symbol, hint=max(2, extent), source=source)
            self.shown[str(symbol)] = where
        return self.by_name[name]


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
    sizes: tuple[object, ...],
) -> Compiled:
    """Compile a graph for all sizes of a class, or find it on disk.

    Args:
        graph: torch calls, as `fx_lowering` writes them.
        bound: what the graph was lowered from.
        options: compile options.
        integers: names and values of the graph's integer arguments.
        tensors: the first call's tensors, contiguous.
        initial: its initial value.
        sizes: the size class.

    Raises:
        InsumBackendError: Inductor does not compile the graph.
    """
    anchor = next(iter(tensors), initial)
    device = torch.device("cpu") if anchor is None else anchor.device
    home = own_folder("inductor")
    path = None if home is None else home / _key(graph, bound, options, sizes, device)
    arguments = [*tensors, *(value for _, value in integers), *([] if initial is None else [initial])]
    broken = False
    if path is not None and path.exists():
        try:
            found = _load(path, arguments)
        except Exception:
            # Whatever keeps it from being read: it is compiled again and replaced.
            found, broken = None, True
        if found is not None:
            return found
    note = ""
    try:
        artifact, symbols = _compile(graph, bound, options, integers, tensors, initial)
    except Exception as error:
        if device.type != "cuda" or not options.native_matmul:
            raise _cannot(bound, device, error) from error
        # Inductor's fused product fails to compile for some shapes (a batch of few, small blocks); its separate
        # gather, product and scatter do not. Explain says which one runs.
        note = f"gather, product and scatter in separate kernels: the fused one does not compile ({_first_line(error)})"
        try:
            artifact, symbols = _compile(
                graph, bound, replace(options, native_matmul=False), integers, tensors, initial
            )
        except Exception as second:
            raise _cannot(bound, device, second) from error
    shown = tuple((name, at, axis) for name, (at, axis) in symbols.shown.items())
    found = Compiled(artifact, (), shown, note, from_disk=False)
    try:
        trees = [tree_of(guard.expr) for guard in symbols.env.guards]
        guards = checked([tree for tree in trees if tree != ["And"]], [name for name, _, _ in shown])
    except ValueError:
        found.only = tuple(found.sizes(arguments).values())
        return found
    found = Compiled(artifact, guards, shown, note, from_disk=False)
    if path is not None and (broken or not path.exists()):
        _store(artifact, found, path, instead=broken)
    return found


def _compile(
    graph: CallGraph,
    bound: Bound,
    options: Options,
    integers: Sequence[tuple[str, int]],
    tensors: Sequence[Tensor],
    initial: Tensor | None,
) -> tuple[Any, _Symbols]:
    traced, fake, symbols = _trace(graph, bound, integers, tensors, initial)
    return _standalone(traced, fake, inductor_options(bound, options)), symbols


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def _cannot(bound: Bound, device: torch.device, error: Exception) -> InsumBackendError:
    return InsumBackendError(
        f"Inductor could not compile the statement for {device.type}: {type(error).__name__}: {error}",
        expression=bound.statement.text,
        fix='choose Options(backend="eager"), and report the statement.',
    )


def _trace(
    graph: CallGraph,
    bound: Bound,
    integers: Sequence[tuple[str, int]],
    tensors: Sequence[Tensor],
    initial: Tensor | None,
) -> tuple[fx.GraphModule, list[Any], _Symbols]:
    from torch.fx.experimental.proxy_tensor import make_fx

    symbols, fake = _fake_arguments(bound, integers, tensors, initial)
    with torch.no_grad():
        traced = make_fx(graph.forward, tracing_mode="symbolic")(*fake)
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
