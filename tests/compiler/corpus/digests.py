"""What the compiler writes for a statement of the corpus: ATen graphs, kernels' text, and Triton's own IR of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import _get_qualified_name

from insum_nn.compiler.codegen.calls import Call, CallGraph
from insum_nn.compiler.ir.schedule import Schedule, precision_of
from insum_nn.compiler.kernels.launch import function_of
from insum_nn.compiler.kernels.sized import strides_of
from insum_nn.compiler.kernels.source import Source, write_kernel
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.library_calls import library_calls_of
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.form import Form, FormError, make_form
from insum_nn.dtypes import dtype_of
from tests.compiler.corpus.statements import DEVICE_TYPE, Entry

__all__ = ["Code", "code_of", "digest", "graphs_of", "ttir", "without_call_names", "without_names"]

# (what it is, its text)
Code = tuple[str, str]
_CAPABILITY = 90
_NAME = re.compile(r"%[A-Za-z_0-9]+")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_of(entry: Entry, *, intermediate: bool = True, kernels: bool = True) -> Iterator[Code]:
    """Everything that is written for a statement.

    Args:
        entry: the statement.
        intermediate: also Triton's IR of the kernel under the default schedule.
        kernels: also generated kernels.
    """
    yield from graphs_of(entry)
    if not kernels:
        return
    try:
        tables, deterministic = dict(entry.tables), entry.options.deterministic
        form = make_form(entry.bound, entry.sizes, entry.extents.output, tables, deterministic=deterministic)
    except FormError as error:
        yield "kernel", f"none: {error}"
        return
    default = default_schedule(form)
    for schedule in candidates(form) if entry.every_candidate else (default,):
        source = _source(entry, form, schedule)
        chosen = {k: v for k, v in schedule.to_json().items() if v != getattr(Schedule(), k)}
        yield f"kernel, {chosen}", source.text
        if intermediate and schedule == default:
            yield f"ttir, {chosen}", ttir(entry, form, source)


def graphs_of(entry: Entry) -> Iterator[Code]:
    """The graphs of library calls, which are the same for all devices."""
    deterministic = replace(entry.options, deterministic=True)
    plain = replace(entry.bound, static=())
    yield "graph, eager", _graph(entry, plain, entry.options)
    yield "graph, compiled", _graph(entry, plain, entry.options, compiled=True)
    yield "graph, eager, deterministic", _graph(entry, plain, deterministic)
    if entry.bound.static:
        yield "graph, compiled, fixed extents", _graph(entry, entry.bound, entry.options, compiled=True)


def _graph(entry: Entry, bound: Bound, options: Options, *, compiled: bool = False) -> str:
    return without_call_names(library_calls_of(bound, entry.extents, options, compiled=compiled))


def without_call_names(graph: CallGraph) -> str:
    """A graph's calls as text, its values numbered in their order."""
    numbers = {call: f"%{number}" for number, call in enumerate([*(call for call, _ in graph.arguments), *graph.calls])}

    def numbered(value: object) -> object:
        if isinstance(value, Call):
            return _Name(numbers[value])
        if isinstance(value, tuple):
            return tuple(map(numbered, value))
        return [*map(numbered, value)] if isinstance(value, list) else value

    lines = [f"{numbers[call]} = placeholder  () {{}}" for call, _ in graph.arguments]
    for call in graph.calls:
        target = call.target if isinstance(call.target, str) else _qualified(call.target)
        kwargs = {name: numbered(value) for name, value in call.kwargs.items()}
        kind = "method" if isinstance(call.target, str) else "function"
        lines.append(f"{numbers[call]} = call_{kind} {target} {numbered(call.args)} {kwargs}")
    lines.append(f"%{len(numbers)} = output output ({numbers[graph.output]},) {{}}")
    return "\n".join(lines)


def _qualified(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    if module in ("_operator", "builtins"):
        return f"{module.removeprefix('_')}.{function.__name__}"
    return _get_qualified_name(function)


class _Name(str):
    """A value's number, printed without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _source(entry: Entry, form: Form, schedule: Schedule) -> Source:
    strides = strides_of(form, entry.tensors, entry.extents, False, None)
    return write_kernel(form, schedule, strides, precision_of(entry.bound.dtype, entry.options.precision))


def ttir(entry: Entry, form: Form, source: Source) -> str:
    """Triton's IR of a kernel, without names and locations; needs no GPU."""
    from triton._C.libtriton import ir  # type: ignore[attr-defined]
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget(DEVICE_TYPE, _CAPABILITY, 32)
    backend = make_backend(target)
    function = function_of(source)
    sums = source.accumulator
    dtypes = {"out": form.bound.out_dtype if source.finished else sums, "workspace": sums, "bitmasks": torch.int32}
    dtypes |= {"initial": form.bound.dtype, "additional": form.bound.out_dtype}
    # Orders and bounds of rows are made from an index tensor, in its own dtype or int64.
    dtypes |= dict.fromkeys(("begin", "end", "target", "row_of", "order"), torch.int64)
    signature: dict[str, str] = {}
    for name, (kind, place, _) in zip(function.arg_names, source.arguments, strict=True):
        dtype = entry.tensors[place].dtype if kind == "tensor" else dtypes.get(kind)
        signature[name] = "i32" if dtype is None else dtype_of(dtype).pointer
    options = backend.parse_options(dict(source.schedule.launch_options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    written = ASTSource(function, signature, {}, {})
    functions = backend.get_codegen_implementation(options)
    module = written.make_ir(target, options, functions, backend.get_module_map(), context)
    made = backend.make_ttir(module, {}, options, _CAPABILITY).str_nodebug()
    return without_names(made.replace(function.__name__, "kernel"))


def without_names(text: str) -> str:
    """Triton's IR with its values numbered in the order of their appearance."""
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), text)
