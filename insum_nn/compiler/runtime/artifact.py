"""A program as one operator of torch, as straight-line Python; no call takes this way yet.

The graph of a statement is printed (`codegen.python`), registered as a `torch.library.triton_op` that is named by the
digest of its text, and differentiated by the operators of the derivative statements, which are made when they are
first asked for. Tracing sees the calls and launches inside it; an exported and compiled model needs nothing of this
package.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.codegen.python import GraphText, print_graph
from insum_nn.compiler.ir.build import OUTPUT, Names, build
from insum_nn.compiler.ir.graph import Fill, Graph, GraphNode, Launch, loops_of
from insum_nn.compiler.ir.nodes import Buffer, Kernel, Size
from insum_nn.compiler.ir.verify import verify_graph
from insum_nn.compiler.lang.bind import Bound, layout_of
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.passes.combine import combine
from insum_nn.compiler.passes.place import place
from insum_nn.compiler.schedule.space import Schedule
from insum_nn.facts import UNKNOWN

__all__ = ["Artifact", "default_schedule", "load", "lower"]

NAMESPACE = "insum_nn_programs"
# ("rows" or "order", the index tensor's name): a structure that the caller keeps and passes.
Offer = tuple[str, str]

_lock = threading.RLock()
_operators: dict[str, Any] = {}


def lower(bound: Bound, schedule: Schedule | None = None, offered: Sequence[Buffer] = ()) -> Graph:
    """The graph of a bound statement: its structures, its memory, its kernel.

    Args:
        bound: the statement.
        schedule: where its loops go; by default what `default_schedule` says.
        offered: structures that are inputs of the graph instead of steps of it, by their canonical names.
    """
    kernel = build(bound)
    structures, algorithm = combine(kernel)
    chosen = schedule or default_schedule(algorithm)
    placed = place(algorithm, chosen)
    names = {buffer.name for buffer in offered}
    known = {structure.result.name: structure.result for structure in structures}
    # From the last to the first: what nothing behind it reads is not made, such as sorted entries for offered rows.
    needed, steps = set(placed.inputs), list[GraphNode]()
    for structure in reversed(structures):
        if structure.result in needed and structure.result.name not in names:
            needed |= set(structure.inputs)
            steps.insert(0, structure)
    output = placed.results[0].buffer
    # All of them: a gradient may need what the statement itself does not.
    inputs = (*kernel.inputs, *(known.get(buffer.name, buffer) for buffer in offered))
    launch = Launch(placed, chosen.warps, chosen.stages)
    graph = Graph(inputs, (*steps, Fill(output, None), launch), (output,))
    verify_graph(graph)
    return graph


def default_schedule(kernel: Kernel) -> Schedule:
    """Lanes along the columns of the output, and along what is summed."""
    loops = loops_of(kernel)
    free = sum(loop.role == "free" for loop in loops)
    summed = free < len(loops)
    if any(loop.index.name == "row" for loop in loops):
        return Schedule(n=128, k=4, warps=1) if free > 1 else Schedule(k=32, warps=1)
    return Schedule(n=16, k=64) if summed else Schedule(n=128)


class Artifact:
    """A bound statement as an operator.

    Args:
        bound: the statement, with the dtypes and facts of its tensors.
        offered: structures that calls pass, as (kind, name of the index tensor); what is not offered is computed by
            the graph itself.
    """

    def __init__(self, bound: Bound, offered: Sequence[Offer] = ()) -> None:
        self.bound = bound
        self.names = Names(bound.statement)
        self.tensors = bound.layout.tensors
        self.offered = tuple((kind, name) for kind, name in offered if name in self.names.tensors)
        self._derivatives: dict[str, list[tuple[Artifact, str]]] = {}

    @cached_property
    def graph(self) -> Graph:
        """Structures, memory and kernels in order."""
        made = [
            Buffer(f"{self.names.tensors[name]}_{kind}", "int64", (Size(f"{self.names.tensors[name]}_{kind}_0"),))
            for kind, name in self.offered
        ]
        return lower(self.bound, None, made)

    @cached_property
    def source(self) -> GraphText:
        """The operator's text."""
        return print_graph(self.graph)

    @cached_property
    def inputs(self) -> tuple[str | Offer, ...]:
        """What each tensor parameter is: a tensor of the statement, or an offered structure."""
        by_name: dict[str, str | Offer] = {canonical: name for name, canonical in self.names.tensors.items()}
        by_name |= {f"{self.names.tensors[name]}_{kind}": (kind, name) for kind, name in self.offered}
        return tuple(by_name[name] for name in self.source.tensors)

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        out_shape: Sequence[int | None],
        given: Mapping[Offer, Tensor] | None = None,
    ) -> Tensor:
        """Run on tensors by name; `out_shape` has the extents that no tensor shows."""
        given = given or {}
        arguments = [tensors[name] if isinstance(name, str) else given[name] for name in self.inputs]
        sizes = [out_shape[int(name.removeprefix(f"{OUTPUT}_"))] for name in self.source.sizes]
        return self.operator(*arguments, *sizes)  # type: ignore[no-any-return]

    @cached_property
    def operator(self) -> Any:
        """The registered operator."""
        source = self.source
        text = "\n".join([source.text, *(kernel.text for kernel in source.kernels), repr(self.inputs)])
        digest = hashlib.sha256(f"{text}{self.bound.statement}{self.bound.facts}".encode()).hexdigest()[:16]
        with _lock:
            if digest not in _operators:
                _operators[digest] = self._register(digest)
            return _operators[digest]

    def _register(self, digest: str) -> Any:
        run = load(self.source, digest, torch.library.wrap_triton)
        operator: Any = torch.library.triton_op(f"{NAMESPACE}::p{digest}", run, mutates_args=())
        operator.register_autograd(self._backward, setup_context=_save)
        return getattr(getattr(torch.ops, NAMESPACE), f"p{digest}").default

    def _backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        named = {name: t for name, t in zip(self.inputs, saved, strict=True) if isinstance(name, str)}
        given = {name: t for name, t in zip(self.inputs, saved, strict=True) if not isinstance(name, str)}
        grads: list[Tensor | None] = [None] * (len(saved) + len(self.source.sizes))
        for position, name in enumerate(self.inputs):
            if ctx.needs_input_grad[position] and isinstance(name, str):
                found: Tensor | None = None
                for derivative, seed in self.derivatives(name):
                    # Dense gradients may come as views without memory of their own.
                    one = derivative({**named, seed: grad.contiguous()}, named[name].shape, given)
                    found = one if found is None else found + one
                grads[position] = found
        return tuple(grads)

    def derivatives(self, name: str) -> list[tuple[Artifact, str]]:
        """The derivative statements of an operand as artifacts, with the name of the incoming gradient."""
        if name not in self._derivatives:
            derivative = derivatives(self.bound.statement, name)
            self._derivatives[name] = [
                (Artifact(self._bound_of(statement, derivative.seed), self.offered), derivative.seed)
                for statement in derivative.statements
            ]
        return self._derivatives[name]

    def _bound_of(self, statement: Any, seed: str) -> Bound:
        dtypes = dict(zip(self.tensors, self.bound.index_dtypes, strict=True)) | {seed: self.bound.dtype}
        facts = dict(zip(self.tensors, self.bound.facts, strict=True))
        layout = layout_of(statement)
        return replace(
            self.bound,
            statement=statement,
            index_dtypes=tuple(dtypes[name] for name in layout.tensors),
            facts=tuple(facts.get(name, UNKNOWN) for name in layout.tensors),
            drop_outside=True,
            static=(),
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))


def load(source: GraphText, digest: str, wrap: Any) -> Any:
    """The function of a graph's text; tracebacks and Triton find the lines."""
    namespace: dict[str, Any] = {"torch": torch, "wrap": wrap}
    for number, kernel in enumerate(source.kernels):
        namespace[f"kernel_{number}"] = _module(f"insum_nn_kernel_{digest}_{number}", kernel.text).kernel
    module = _module(f"insum_nn_program_{digest}", source.text, namespace)
    return module.run


def _module(name: str, text: str, namespace: Mapping[str, Any] | None = None) -> Any:
    path = f"<{name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    module.__dict__.update(namespace or {})
    sys.modules[name] = module
    exec(compile(text, path, "exec"), module.__dict__)
    return module
