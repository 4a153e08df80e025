"""Joins a program to its derivative programs, and registers the operator that other tools see.

`insum_nn::run` takes the program as text (a `Spec` in JSON), so that exported graphs and other processes
understand it. Its derivative is the same operator with other text, which is why second derivatives need no
code of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from insum_nn.compiler.lang.bind import Extents, layout_of
from insum_nn.compiler.lang.derivative import directional, fresh_name
from insum_nn.compiler.lang.epilogue import ACTIVATIONS
from insum_nn.compiler.lang.printed import Lists
from insum_nn.compiler.lang.syntax import Statement, replaced
from insum_nn.compiler.runtime.backward import RunGraph, attaining, gradients, gradients_of
from insum_nn.compiler.runtime.batched_gradients import batched_access, each_vector, factors_of_entries
from insum_nn.compiler.runtime.dispatch import RunStatement, Spec, StatementGraph, run_plain, run_spec, value_dtype
from insum_nn.compiler.runtime.inline import inline, inlines
from insum_nn.compiler.runtime.modes import is_plain_eager, is_traced, is_transformed
from insum_nn.compiler.runtime.needed_gradients import needed_gradients
from insum_nn.compiler.runtime.recorded import Recorded, record
from insum_nn.facts import IndexFacts

__all__ = ["Call", "apply", "apply_recorded", "batched"]

# The registered operator.

_NAMESPACE = "insum_nn"


@torch.library.custom_op(f"{_NAMESPACE}::run", mutates_args=())
def _run(spec: str, tensors: list[Tensor], initial: Tensor | None, indices: list[int], output: list[int]) -> Tensor:
    return run_spec(Spec.from_json(spec), tensors, initial, Extents(tuple(indices), tuple(output)))


@_run.register_fake
def _run_fake(
    spec: str, tensors: list[Tensor], initial: Tensor | None, indices: list[int], output: list[int]
) -> Tensor:
    decoded = Spec.from_json(spec)
    dtype = value_dtype(decoded, tensors, initial)
    anchor = tensors[0] if tensors else torch.empty(0) if initial is None else initial
    return anchor.new_empty(output, dtype=dtype)


# Gradients.


def _tangent(ctx: Any, _: object, initial_tangent: Tensor | None, *tangents: Tensor | None) -> tuple[Tensor]:
    """Return the output's tangent: the statement is linear in each occurrence of a factor."""
    *tensors, result, initial = ctx.saved_tensors
    spec: Spec = ctx.call.spec
    extents, layout = ctx.call.extents, spec.layout
    named = dict(zip(layout.tensors, tensors, strict=True))
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    total, read = initial_tangent, list[Tensor]()
    if result is not None and not spec.adds:
        count, of_initial = attaining(spec, extents, tensors, initial, result, apply)
        read = [result.detach(), (1 / count).to(result.dtype)]
        total = total if total is None or of_initial is None else total * of_initial * read[1]
    for name, tangent in zip(layout.tensors, tangents, strict=True):
        if tangent is None or name not in layout.value_tensors or not tangent.is_floating_point():
            continue
        derivative = directional(spec.statement, name)
        named[derivative.seed] = tangent
        named.update(zip(derivative.extremum, read, strict=False))
        for changed in derivative.statements:
            inner = layout_of(changed)
            own = Extents(tuple(sizes[x] for x in inner.indices), extents.output)
            changed_spec = spec.with_statement(changed, drop_outside=spec.drop_outside)
            total = apply(changed_spec, [named[x] for x in inner.tensors], total, own)
    if total is None:
        shape, dtype = extents.output, value_dtype(spec, tensors, initial)
        total = torch.zeros(shape, dtype=dtype, device=tensors[0].device)
    return (total,)


@dataclass(slots=True)
class Call:
    """A call that autograd records, of one statement or of several.

    Attributes:
        graph: the statements.
        sizes: the extents of each.
        shapes: of what they write.
        plain: its tensors are plain ones.
    """

    graph: StatementGraph
    sizes: Lists
    shapes: Lists
    plain: bool = False

    @property
    def spec(self) -> Spec:
        """The only statement, whose sizes are `extents`."""
        assert self.graph.alone is not None
        return self.graph.alone

    @property
    def extents(self) -> Extents:
        return Extents(self.sizes[0], self.shapes[0])

    def run(self, ctx: Any, initial: Tensor | None, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        graph, sizes, shapes = self.graph, self.sizes, self.shapes
        spec, needs = graph.alone, ctx.needs_input_grad[2:]
        found = graph.gradients.get((needs, None)) or gradients_of(graph, needs)
        ctx.has_initial, ctx.shapes = initial is not None, None
        assert found is not None
        saved: Sequence[Tensor | None] = tensors
        if found.kept and (spec is None or spec.adds):
            ctx.shapes = [tensor.shape for tensor in tensors]
            saved = [t if need else None for t, need in zip(tensors, found.kept, strict=True)]
        if spec is None:
            made = graph.run(tensors, sizes, shapes)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*saved, *[t if n in found.written else None for n, t in enumerate(made)], None)
            return tuple(map(made.__getitem__, graph.results))
        extents = Extents(sizes[0], shapes[0])
        if not self.plain and inlines(spec, (*tensors, initial)):
            result = inline(spec, tensors, initial, extents)
        else:
            result = (run_plain if self.plain else run_spec)(spec, tensors, initial, extents)
        ctx.dtype = value_dtype(spec, tensors, initial) if spec.finishes else None
        # An extremum is compared with its terms, and an activation may be differentiated from its output.
        keeps = spec.epilogue.activation or not spec.adds
        ctx.save_for_backward(*saved, result if keeps else None, None if spec.adds else initial)
        return result

    def gradients(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        graph, sizes, shapes = self.graph, self.sizes, self.shapes
        *pool, initial = ctx.saved_tensors
        spec, needs = graph.alone, ctx.needs_input_grad[2:]
        if spec is not None and spec.finishes:
            name = spec.epilogue.activation
            backward = None if name is None else ACTIVATIONS[name]
            grads = ((grads[0] if backward is None else backward(grads[0], pool[-1])).to(ctx.dtype),)
        run: RunStatement | None = apply
        record_all: RunGraph | None = None
        if is_plain_eager(*grads) and not torch._C._is_any_autocast_enabled():
            needs = needed_gradients(ctx, len(needs), id(graph), before=ctx.has_initial)
            run, record_all = (apply, _record_all) if torch.is_grad_enabled() else (None, None)
        found, of_initial = gradients(graph, sizes, shapes, pool, ctx.shapes, initial, needs, grads, run, record_all)
        return (of_initial if ctx.needs_input_grad[1] else None, *found)


def _record_all(graph: StatementGraph, sizes: Lists, shapes: Lists, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run statements that autograd records as one call."""
    return record(Call(graph, sizes, shapes, True), None, *tensors)  # type: ignore[no-any-return]


class _Transformed(torch.autograd.Function):
    """The call under `torch.func` and forward-mode differentiation.

    They require a separate `setup_context`, which costs an ordinary call too much time on the CPU.
    """

    @staticmethod
    def forward(call: Call, initial: Tensor | None, *tensors: Tensor) -> Tensor:
        run = _registered if is_traced(*tensors, initial) else run_spec
        return run(call.spec, tensors, initial, call.extents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        call, initial, *tensors = inputs
        ctx.call, ctx.shapes, ctx.has_initial = call, None, initial is not None
        ctx.dtype = value_dtype(call.spec, tensors, initial)
        keep = None if call.spec.adds else output
        ctx.save_for_backward(*tensors, keep, initial)
        ctx.save_for_forward(*tensors, keep, initial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Recorded.backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor | None:
        return each_vector(_tangent, ctx, tangents)[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        call, initial, *tensors = args
        given = list(zip(tensors, in_dims[2:], strict=True))
        return batched(call.spec, call.extents, info.batch_size, given, (initial, in_dims[1])), 0


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    spec, tensors, initial, indices, shape = inputs
    ctx.call = Call(Spec.from_json(spec).graph, (tuple(indices),), (tuple(shape),))
    keep = None if ctx.call.spec.adds else output
    ctx.save_for_backward(*tensors, keep, initial)


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *pool, initial = ctx.saved_tensors
    graph, sizes, shapes = ctx.call.graph, ctx.call.sizes, ctx.call.shapes
    needs = [t.requires_grad or t.is_floating_point() for t in pool[:-1]]
    if isinstance(ctx.needs_input_grad[1], Sequence):
        needs = list(ctx.needs_input_grad[1])
    found, initial_gradient = gradients(graph, sizes, shapes, pool, None, initial, needs, (grad,), apply)
    # torch takes an empty list of integers for one of tensors, and wants a list of gradients back.
    lists = [None if integers else [] for integers in (*sizes, *shapes)]
    return None, found, None if initial is None else initial_gradient, *lists


_run.register_autograd(_operator_backward, setup_context=_setup_context)


def _seen_through(mode: Any, operator: Any, types: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """What AOTAutograd and `torch.export` record in place of the operator."""
    text, tensors, initial, indices, output = arguments
    spec = Spec.from_json(text)
    if not inlines(spec, (*tensors, initial)):
        return mode.__torch_dispatch__(operator, types, arguments, options)  # type: ignore[no-any-return]
    with mode:
        return inline(spec, tensors, initial, Extents(tuple(indices), tuple(output)))


@cache
def _let_tracers_through() -> None:
    # Where a call is traced, this module is loaded; to import it always takes longer than to import torch.
    functional = importlib.import_module("torch._subclasses.functional_tensor")
    _run.register_torch_dispatch(functional.FunctionalTensorMode, _seen_through)


def _registered(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    _let_tracers_through()
    return torch.ops.insum_nn.run(spec.to_json(), list(tensors), initial, list(extents.indices), list(extents.output))


def apply(
    spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents, *, plain: bool = False
) -> Tensor:
    """Run a program, recording what its gradients need.

    Args:
        spec: the program.
        tensors: in the layout's order.
        initial: the initial value, in the output's shape.
        extents: the call's sizes.
        plain: the caller knows that the tensors are plain ones, and none is lazily negated.
    """
    traced = is_traced(*tensors, initial)
    # The operator has a rule for batches, and not all that would be written in its place.
    in_batch = traced and any(t is not None and is_batchedtensor(t) for t in (*tensors, initial))
    inlined = traced and not in_batch and inlines(spec, (*tensors, initial))
    if not plain and not inlined:
        # `z.conj().imag` is a view of `z` and a bit that torch's operators obey; kernels read memory as it is.
        tensors = [t.resolve_neg() for t in tensors]
        initial = None if initial is None else initial.resolve_neg()
    if spec.finishes:
        return _finished(spec, tensors, initial, extents, traced=traced)
    may_learn = traced and torch.is_grad_enabled()
    if spec.apart is not None and (may_learn or is_transformed() or _learned((*tensors, initial))):
        return _apart(spec, tensors, initial, extents)
    call = Call(spec.graph, (extents.indices,), (extents.output,), plain and not inlined)
    if is_transformed() and not torch.compiler.is_compiling():
        return _Transformed.apply(call, initial, *tensors)  # type: ignore[no-any-return]
    if traced and not inlined:
        return _registered(spec, tensors, initial, extents)
    if _learned((*tensors, initial)):
        return Recorded.apply(call, initial, *tensors)  # type: ignore[no-any-return]
    return (inline if inlined else run_spec)(spec, tensors, initial, extents)


def apply_recorded(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """`apply` where autograd records a call on plain tensors, none lazily negated, and nothing else follows it."""
    if spec.finishes or spec.apart is not None:
        return apply(spec, tensors, initial, extents, plain=True)
    return record(Call(spec.graph, (extents.indices,), (extents.output,), True), initial, *tensors)  # type: ignore[no-any-return]


def _learned(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether autograd records a gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _apart(spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents) -> Tensor:
    """Select an extremum of terms that are stored, since gradients compare them with it."""
    assert spec.apart is not None
    named = dict(zip(spec.layout.tensors, tensors, strict=True))
    sizes = dict(zip(spec.layout.indices, extents.indices, strict=True))
    first, second = spec.apart
    if spec.statement.output.name in first.layout.tensors:
        # Only its shape is read.
        blank = torch.zeros((), dtype=value_dtype(spec, tensors, initial), device=tensors[0].device)
        named[spec.statement.output.name] = blank.expand(extents.output)
    every = tuple(sizes[name] for name in spec.statement.indices())
    own = Extents(tuple(sizes[name] for name in first.layout.indices), every)
    named[first.statement.output.name] = apply(first, [named[x] for x in first.layout.tensors], None, own)
    own = Extents(tuple(sizes[name] for name in second.layout.indices), extents.output)
    return apply(second, [named[x] for x in second.layout.tensors], initial, own)


def _finished(
    spec: Spec, tensors: Sequence[Tensor], initial: Tensor | None, extents: Extents, *, traced: bool
) -> Tensor:
    """`apply` for a sum that is activated or cast.

    Where gradients are recorded, an activation that is differentiated from its output stays in the sum's own store. One
    that takes its input is applied by torch: the input must be written for backward anyway, so to fuse would save one
    read of the output, and cost every back end a second output.
    """
    if not (traced or is_transformed()):
        if not _learned((*tensors, initial)):
            return run_spec(spec, tensors, initial, extents)
        name = spec.epilogue.activation
        if spec.adds and (name is None or ACTIVATIONS[name] is not None):
            return Recorded.apply(Call(spec.graph, (extents.indices,), (extents.output,)), initial, *tensors)  # type: ignore[no-any-return]
    return spec.epilogue(apply(spec.bare, tensors, initial, extents), value_dtype(spec, tensors, initial))


# Batching.

# A tensor, and along which axis it is batched.
_Batched = tuple[Any, int | None]


def batched(
    spec: Spec,
    extents: Extents,
    size: int,
    given: Sequence[_Batched],
    initial: _Batched,
    run: RunStatement | None = None,
) -> Tensor:
    """Run a batch of calls, along the first axis of the result.

    A batch of statements is one statement with one more index, the first of the output.
    """
    statement, layout = spec.statement, spec.layout
    index = fresh_name("batch", {*statement.indices(), *statement.tensors(), statement.output.name})
    names = {name for name, (_, dim) in zip(layout.tensors, given, strict=True) if dim is not None}
    repeated = factors_of_entries(statement, names)
    names |= repeated
    factors = [replaced(f, lambda each: batched_access(each, names, index)) for f in statement.factors]
    written = batched_access(statement.output, {*names, statement.output.name}, index)
    text = str(Statement(written, statement.operator, tuple(factors), ""))
    # A batched index tensor is addressed by the batch too, so facts about it as a whole no longer hold.
    facts = tuple((n, f if n not in names else IndexFacts(masked=f.masked)) for n, f in spec.facts)
    static = tuple((name, table) for name, table in spec.static if name not in names)
    own = Spec(text, facts, spec.options, spec.drop_outside, static, origin=spec.origin)
    sizes = {**dict(zip(layout.indices, extents.indices, strict=True)), index: size}
    inner = Extents(tuple(sizes[name] for name in own.layout.indices), (size, *extents.output))

    def first(tensor: Tensor, dim: int | None, *, repeat: bool) -> Tensor:
        if dim is not None:
            return tensor.movedim(dim, 0)
        return tensor.expand(size, *tensor.shape) if repeat else tensor

    named = {n: first(*each, repeat=n in repeated) for n, each in zip(layout.tensors, given, strict=True)}
    start = None if initial[0] is None else first(*initial, repeat=True)
    return (run or apply)(own, [named[name] for name in own.layout.tensors], start, inner)


def _vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    spec: str,
    tensors: list[Tensor],
    initial: Tensor | None,
    indices: list[int],
    output: list[int],
) -> tuple[Tensor, int]:
    extents = Extents(tuple(indices), tuple(output))
    given = list(zip(tensors, in_dims[1], strict=True))
    return batched(Spec.from_json(spec), extents, info.batch_size, given, (initial, in_dims[2]), _registered), 0


torch.library.register_vmap(f"{_NAMESPACE}::run", _vmap)
