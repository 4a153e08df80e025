"""Joins a program to its derivative programs, and registers the operator that other tools see.

`insum_nn::run` takes the program as text (a `Spec` in JSON), so that exported graphs and other processes
understand it. Its derivative is the same operator with other text, which is why second derivatives need no
code of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from insum_nn.compiler.ast import Access, Statement
from insum_nn.compiler.bind import Bound, Extents, bind, check_extents, layout_of
from insum_nn.compiler.execution import Executable, executable
from insum_nn.compiler.gradient import Derivative, derivatives, directional, fresh_name
from insum_nn.compiler.options import Options
from insum_nn.compiler.parser import parse
from insum_nn.compiler.proofs import prove
from insum_nn.facts import IndexFacts

__all__ = ["Spec", "apply", "prepare", "run_spec"]


@dataclass(frozen=True)
class Spec:
    """Everything about a program but its tensors and sizes; converts to JSON and back.

    Attributes:
        expression: the statement's text.
        facts: facts promised of index tensors, by name.
        options: compile options.
        drop_outside: writes outside the output are dropped (derivative statements).
    """

    expression: str
    facts: tuple[tuple[str, IndexFacts], ...] = ()
    options: Options = field(default_factory=Options)
    drop_outside: bool = False

    @property
    def statement(self) -> Statement:
        return _parse(self.expression)

    def to_json(self) -> str:
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> Spec:
        return _from_json(text)

    def with_statement(self, statement: Statement, *, drop_outside: bool) -> Spec:
        return Spec(str(statement), self.facts, self.options, drop_outside)


@lru_cache(maxsize=2048)
def _parse(expression: str) -> Statement:
    return parse(expression)


@lru_cache(maxsize=2048)
def _to_json(spec: Spec) -> str:
    return json.dumps(
        {
            "expression": spec.expression,
            "facts": {name: asdict(facts) for name, facts in spec.facts},
            "options": asdict(spec.options),
            "drop_outside": spec.drop_outside,
        },
        sort_keys=True,
    )


@lru_cache(maxsize=2048)
def _from_json(text: str) -> Spec:
    data = json.loads(text)
    facts = tuple((name, IndexFacts(**values)) for name, values in data["facts"].items())
    return Spec(data["expression"], facts, Options(**data["options"]), data["drop_outside"])


def prepare(
    spec: Spec, tensors: Sequence[Tensor], start: Tensor | None, extents: Extents, *, seen: bool = False
) -> tuple[Bound, Executable]:
    """Check a call and find its program; `seen` skips what other checks of the same call already covered."""
    statement = spec.statement
    layout = layout_of(statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    if not seen:
        check_extents(statement, tensors, extents, drop_outside=spec.drop_outside)
    facts = prove(
        statement,
        tensors,
        extents,
        dict(spec.facts),
        drop_outside=spec.drop_outside,
        validate=spec.options.validate,
    )
    for name, tensor in zip(layout.tensors, tensors, strict=True):
        if name in facts and tensor.numel() == 0:
            facts[name] = IndexFacts(masked=True, proven=True)
    bound = bind(statement, named, start, facts=facts, drop_outside=spec.drop_outside)
    return bound, executable(bound, tensors, start, extents, spec.options)


def run_spec(spec: Spec, tensors: Sequence[Tensor], start: Tensor | None, extents: Extents) -> Tensor:
    """Run without recording gradients."""
    device = next((t.device.type for t in (*tensors, start) if t is not None), "cpu")
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device):
        # The operands were cast where the call was made; inside, autocast would mix dtypes that were equal.
        with torch.autocast(device, enabled=False):
            return run_spec(spec, tensors, start, extents)
    if 0 in extents.indices:
        return _without_terms(spec, tensors, start, extents)
    bound, program = prepare(spec, tensors, start, extents)
    if 0 in extents.output:
        return _without_terms(spec, tensors, start, extents)
    if any(t.numel() == 0 for t in tensors):
        tensors = [_stand_in(t, name in bound.layout.index_tensors) for name, t in zip(bound.layout.tensors, tensors, strict=True)]
    return program(tensors, extents, start)


def _without_terms(spec: Spec, tensors: Sequence[Tensor], start: Tensor | None, extents: Extents) -> Tensor:
    """Without terms or without cells the output is its start, or zero."""
    if start is not None:
        return start.detach().clone(memory_format=torch.contiguous_format)
    dtype = _dtype(spec, tensors, start)
    device = tensors[0].device if tensors else None
    return torch.zeros(extents.output, dtype=dtype, device=device)


def _stand_in(tensor: Tensor, is_index: bool) -> Tensor:
    """A tensor without elements is only ever read outside: one cell that says so is safe to address."""
    if tensor.numel():
        return tensor
    shape = [max(1, extent) for extent in tensor.shape]
    return tensor.new_full(shape, -1) if is_index else tensor.new_zeros(shape)


def _dtype(spec: Spec, tensors: Sequence[Tensor], start: Tensor | None) -> torch.dtype:
    layout = layout_of(spec.statement)
    for access in spec.statement.reads:
        return tensors[layout.tensors.index(access.name)].dtype
    return start.dtype if start is not None else torch.get_default_dtype()


# The registered operator.

_NAMESPACE = "insum_nn"


@torch.library.custom_op(f"{_NAMESPACE}::run", mutates_args=())
def _run(spec: str, tensors: list[Tensor], start: Tensor | None, indices: list[int], output: list[int]) -> Tensor:
    return run_spec(_from_json(spec), tensors, start, Extents(tuple(indices), tuple(output)))


@_run.register_fake
def _run_fake(spec: str, tensors: list[Tensor], start: Tensor | None, indices: list[int], output: list[int]) -> Tensor:
    decoded = _from_json(spec)
    dtype = _dtype(decoded, tensors, start)
    anchor = tensors[0] if tensors else start
    if anchor is None:
        return torch.empty(output, dtype=dtype)
    return anchor.new_empty(output, dtype=dtype)


@torch.library.custom_op(f"{_NAMESPACE}::shares", mutates_args=())
def _shares(
    spec: str, tensors: list[Tensor], start: Tensor | None, result: Tensor, indices: list[int], output: list[int]
) -> tuple[Tensor, Tensor]:
    """For `max=` and `min=`: the share of each term, and of the starting value, in its output cell's gradient.

    Terms that attain the extremum share equally; a starting value that attains it counts as one of them.
    """
    decoded = _from_json(spec)
    extents = Extents(tuple(indices), tuple(output))
    statement = decoded.statement
    layout = layout_of(statement)
    shape = [extents.indices[i] for i in range(len(layout.indices))]
    terms, live = _terms(decoded, tensors, extents)
    seen = _gather_output(decoded, tensors, result, extents)
    hit = (live & (terms == seen)).to(result.dtype)
    count = _scatter_output(decoded, tensors, hit, extents)
    if start is None:
        from_start = torch.zeros_like(result)
    else:
        from_start = (start == result).to(result.dtype)
        count = count + from_start
    weight = 1 / count.clamp(min=1)
    shares = hit * _gather_output(decoded, tensors, weight, extents)
    return shares.reshape(shape).contiguous(), (from_start * weight).contiguous()


@_shares.register_fake
def _shares_fake(
    spec: str, tensors: list[Tensor], start: Tensor | None, result: Tensor, indices: list[int], output: list[int]
) -> tuple[Tensor, Tensor]:
    return result.new_empty(indices), result.new_empty(output)


def _space(statement: Statement) -> tuple[str, str]:
    """A name for a tensor over the whole index space, and its access."""
    taken = {statement.output.name, *statement.tensors(), *statement.indices()}
    name = fresh_name("space", taken)
    indices = statement.indices()
    return name, f"{name}[{','.join(indices)}]" if indices else name


def _auxiliary(spec: Spec, text: str, named: dict[str, Tensor], indices: dict[str, int], output: Sequence[int]) -> Tensor:
    """Run another statement over the same index space."""
    statement = _parse(text)
    layout = layout_of(statement)
    sizes = Extents(tuple(indices[name] for name in layout.indices), tuple(output))
    return run_spec(
        spec.with_statement(statement, drop_outside=True), [named[name] for name in layout.tensors], None, sizes
    )


def _terms(spec: Spec, tensors: Sequence[Tensor], extents: Extents) -> tuple[Tensor, Tensor]:
    """Every term, and which of them take part."""
    statement = spec.statement
    layout = layout_of(statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    _, space = _space(statement)
    factors = " * ".join(map(str, statement.factors))
    # The same operator multiplies in the same order as the forward pass, so that a term equals its extremum bit for bit.
    terms = _auxiliary(spec, f"{space} {statement.operator} {factors}", named, sizes, extents.indices)
    live = torch.ones(tuple(extents.indices), dtype=torch.bool, device=terms.device)
    for access in (statement.output, *statement.reads):
        for nested in access.nested():
            # Reading ones through an index tensor gives 0 where it has no entry.
            ones = fresh_name("ones", {*named, *sizes, space.split("[")[0]})
            entry = named[nested.name]
            size = int(entry.max()) + 1 if entry.numel() else 0
            text = f"{space} = {ones}[{nested}]"
            row = torch.ones(max(size, 1), dtype=terms.dtype, device=terms.device)
            live = live & (_auxiliary(spec, text, {**named, ones: row}, sizes, extents.indices) != 0)
    return terms, live


def _gather_output(spec: Spec, tensors: Sequence[Tensor], result: Tensor, extents: Extents) -> Tensor:
    """The output's cell of every point of the index space."""
    statement = spec.statement
    layout = layout_of(statement)
    named = {**dict(zip(layout.tensors, tensors, strict=True)), statement.output.name: result}
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    return _auxiliary(spec, f"{_space(statement)[1]} = {statement.output}", named, sizes, extents.indices)


def _scatter_output(spec: Spec, tensors: Sequence[Tensor], values: Tensor, extents: Extents) -> Tensor:
    """Add up a tensor over the index space into the output's cells."""
    statement = spec.statement
    layout = layout_of(statement)
    name, space = _space(statement)
    named = {**dict(zip(layout.tensors, tensors, strict=True)), name: values}
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    return _auxiliary(spec, f"{statement.output} = {space}", named, sizes, extents.output)


# Gradients.


@dataclass(frozen=True, slots=True)
class _Call:
    """The constants of one call."""

    spec: Spec
    indices: tuple[int, ...]
    output: tuple[int, ...]


def _gradients(
    call: _Call, tensors: Sequence[Tensor], start: Tensor | None, result: Tensor | None, needs: Sequence[bool], grad: Tensor
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the tensors that need one, and of the start, by derivative programs."""
    statement = call.spec.statement
    layout = layout_of(statement)
    shares, start_share = _shares_of(call, tensors, start, result)
    gradients: list[Tensor | None] = []
    for name, tensor, need in zip(layout.tensors, tensors, needs, strict=True):
        if not need or name not in layout.value_tensors:
            gradients.append(None)
            continue
        gradients.append(_gradient_of(call, derivatives(statement, name), tensors, tensor, grad, shares))
    start_gradient = None
    if start is not None:
        start_gradient = grad if start_share is None else grad * start_share
    return gradients, start_gradient


def _shares_of(
    call: _Call, tensors: Sequence[Tensor], start: Tensor | None, result: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The shares of `max=` and `min=`; `None` for the other operators, whose terms all count."""
    if call.spec.statement.operator not in ("max=", "min="):
        return None, None
    assert result is not None
    return torch.ops.insum_nn.shares(  # type: ignore[no-any-return]
        call.spec.to_json(),
        [t.detach() for t in tensors],
        None if start is None else start.detach(),
        result.detach(),
        list(call.indices),
        list(call.output),
    )


def _tangent(
    call: _Call,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    result: Tensor | None,
    tangents: Sequence[Tensor | None],
    start_tangent: Tensor | None,
) -> Tensor:
    """The output's change along the operands' tangents: the statement is linear in each occurrence of a factor."""
    statement = call.spec.statement
    layout = layout_of(statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    sizes = dict(zip(layout.indices, call.indices, strict=True))
    shares, start_share = _shares_of(call, tensors, start, result)
    total = start_tangent if start_tangent is None or start_share is None else start_tangent * start_share
    for name, tangent in zip(layout.tensors, tangents, strict=True):
        if tangent is None or name not in layout.value_tensors or not tangent.is_floating_point():
            continue
        derivative = directional(statement, name)
        named[derivative.seed] = tangent
        if derivative.share is not None:
            assert shares is not None
            named[derivative.share] = shares
        for changed in derivative.statements:
            inner = layout_of(changed)
            spec = call.spec.with_statement(changed, drop_outside=call.spec.drop_outside)
            extents = Extents(tuple(sizes[x] for x in inner.indices), call.output)
            total = apply(spec, [named[x] for x in inner.tensors], total, extents)
    if total is None:
        total = torch.zeros(call.output, dtype=_dtype(call.spec, tensors, start), device=tensors[0].device)
    return total


def _gradient_of(
    call: _Call, derivative: Derivative, tensors: Sequence[Tensor], operand: Tensor, grad: Tensor, shares: Tensor | None
) -> Tensor:
    layout = layout_of(call.spec.statement)
    named = dict(zip(layout.tensors, tensors, strict=True))
    named[derivative.seed] = grad
    if derivative.share is not None:
        assert shares is not None
        named[derivative.share] = shares
    sizes = dict(zip(layout.indices, call.indices, strict=True))
    total: Tensor | None = None
    for statement in derivative.statements:
        inner = layout_of(statement)
        spec = call.spec.with_statement(statement, drop_outside=True)
        extents = Extents(tuple(sizes[name] for name in inner.indices), tuple(operand.shape))
        total = apply(spec, [named[name] for name in inner.tensors], total, extents)
    assert total is not None
    return total


class _Function(torch.autograd.Function):
    """The recorded call on plain tensors; tracing and transforms take the registered operator instead."""

    @staticmethod
    def forward(ctx: Any, call: _Call, start: Tensor | None, *tensors: Tensor) -> Tensor:
        result = run_spec(call.spec, tensors, start, Extents(call.indices, call.output))
        ctx.call = call
        keep = result if call.spec.statement.operator in ("max=", "min=") else None
        ctx.save_for_backward(start, keep, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start, result, *tensors = ctx.saved_tensors
        gradients, start_gradient = _gradients(ctx.call, tensors, start, result, ctx.needs_input_grad[2:], grads[0])
        return (None, start_gradient if ctx.needs_input_grad[1] else None, *gradients)


class _Transformed(torch.autograd.Function):
    """The call under `torch.func` and forward-mode differentiation.

    They want the context set up apart from the run, which costs an ordinary call too much of the host's time.
    """

    @staticmethod
    def forward(call: _Call, start: Tensor | None, *tensors: Tensor) -> Tensor:
        return _execute(call.spec, tensors, start, Extents(call.indices, call.output))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        call, start, *tensors = inputs
        ctx.call = call
        keep = output if call.spec.statement.operator in ("max=", "min=") else None
        ctx.save_for_backward(start, keep, *tensors)
        ctx.save_for_forward(start, keep, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Function.backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *args: Any) -> Tensor:
        _, start_tangent, *tangents = args
        start, result, *tensors = ctx.saved_tensors
        return _tangent(ctx.call, tensors, start, result, tangents, start_tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        call, start, *tensors = args
        batch = _Batch(call, info.batch_size, in_dims[2:])
        moved = batch.operands(tensors)
        return apply(batch.spec, moved, batch.start(start, in_dims[1]), batch.extents), 0


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    spec, tensors, start, indices, shape = inputs
    ctx.call = _Call(_from_json(spec), tuple(indices), tuple(shape))
    ctx.count = len(tensors)
    keep = output if ctx.call.spec.statement.operator in ("max=", "min=") else None
    ctx.save_for_backward(start, keep, *tensors)


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    start, result, *tensors = ctx.saved_tensors
    needs = [t.requires_grad or t.is_floating_point() for t in tensors]
    if isinstance(ctx.needs_input_grad[1], Sequence):
        needs = list(ctx.needs_input_grad[1])
    gradients, start_gradient = _gradients(ctx.call, tensors, start, result, needs, grad)
    # torch takes an empty list of integers for one of tensors, and wants a list of gradients back.
    lists = [None if integers else [] for integers in (ctx.call.indices, ctx.call.output)]
    return None, gradients, start_gradient, *lists


_run.register_autograd(_operator_backward, setup_context=_setup_context)


def _plain(tensors: Sequence[Tensor]) -> bool:
    return all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors)


def _traced(present: Sequence[Tensor]) -> bool:
    """Whether somebody records or replaces torch's calls, and has to be shown the registered operator."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or not _plain(present)


def _execute(spec: Spec, tensors: Sequence[Tensor], start: Tensor | None, extents: Extents) -> Tensor:
    if _traced(tensors if start is None else (*tensors, start)):
        return torch.ops.insum_nn.run(spec.to_json(), list(tensors), start, list(extents.indices), list(extents.output))
    return run_spec(spec, tensors, start, extents)


def apply(spec: Spec, tensors: Sequence[Tensor], start: Tensor | None, extents: Extents) -> Tensor:
    """Run a program, recording what its gradients need."""
    present = (*tensors, start) if start is not None else tensors
    transformed = bool(peek_interpreter_stack()) or torch.autograd.forward_ad._current_level >= 0
    if transformed and not torch.compiler.is_compiling():
        return _Transformed.apply(_Call(spec, extents.indices, extents.output), start, *tensors)  # type: ignore[no-any-return]
    if not _traced(present) and torch.is_grad_enabled() and any(t.requires_grad for t in present):
        return _Function.apply(_Call(spec, extents.indices, extents.output), start, *tensors)  # type: ignore[no-any-return]
    return _execute(spec, tensors, start, extents)


# Batching.


def _batched(access: Access, names: set[str], batch: str) -> str:
    """The access with a leading batch subscript on every batched tensor, nested ones too."""
    subscripts: list[str] = []
    for subscript in access.subscripts:
        text = ""
        for term in subscript.terms:
            atom = _batched(term.atom, names, batch) if isinstance(term.atom, Access) else str(term.atom)
            text += f"{'-' if term.coefficient < 0 else '+' if text else ''}{abs(term.coefficient)}*{atom}"
        if subscript.offset or not text:
            text += f"{subscript.offset:+d}" if text else str(subscript.offset)
        subscripts.append(text)
    if access.name in names:
        subscripts.insert(0, batch)
    return f"{access.name}[{','.join(subscripts)}]" if subscripts else access.name


class _Batch:
    """A batch of statements is one statement with one more index, the first of the output."""

    def __init__(self, call: _Call, size: int, dims: Sequence[int | None]) -> None:
        statement = call.spec.statement
        layout = layout_of(statement)
        self.size = size
        self.dims = dims
        self.layout = layout
        index = fresh_name("batch", {*statement.indices(), *statement.tensors(), statement.output.name})
        names = {name for name, dim in zip(layout.tensors, dims, strict=True) if dim is not None}
        factors = [_batched(f, names, index) if isinstance(f, Access) else str(f) for f in statement.factors]
        written = _batched(statement.output, {*names, statement.output.name}, index)
        text = f"{written} {statement.operator} {' * '.join(factors)}"
        # A batched index tensor is addressed by the batch too, so facts about it as a whole no longer hold.
        facts = tuple((name, f) for name, f in call.spec.facts if name not in names)
        self.spec = Spec(text, facts, call.spec.options, call.spec.drop_outside)
        sizes = {**dict(zip(layout.indices, call.indices, strict=True)), index: size}
        inner = layout_of(self.spec.statement)
        self.order = inner.tensors
        self.extents = Extents(tuple(sizes[name] for name in inner.indices), (size, *call.output))

    def operands(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, self.dims, strict=True)]
        named = dict(zip(self.layout.tensors, moved, strict=True))
        return [named[name] for name in self.order]

    def start(self, start: Tensor | None, dim: int | None) -> Tensor | None:
        if start is None:
            return None
        return start.expand(self.size, *start.shape) if dim is None else start.movedim(dim, 0)


def _vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    spec: str,
    tensors: list[Tensor],
    start: Tensor | None,
    indices: list[int],
    output: list[int],
) -> tuple[Tensor, int]:
    batch = _Batch(_Call(_from_json(spec), tuple(indices), tuple(output)), info.batch_size, in_dims[1])
    result = torch.ops.insum_nn.run(
        batch.spec.to_json(),
        batch.operands(tensors),
        batch.start(start, in_dims[2]),
        list(batch.extents.indices),
        list(batch.extents.output),
    )
    return result, 0


torch.library.register_vmap(f"{_NAMESPACE}::run", _vmap)


def _vmap_shares(
    info: Any,
    in_dims: tuple[Any, ...],
    spec: str,
    tensors: list[Tensor],
    start: Tensor | None,
    result: Tensor,
    indices: list[int],
    output: list[int],
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    batch = _Batch(_Call(_from_json(spec), tuple(indices), tuple(output)), info.batch_size, in_dims[1])
    results = batch.start(result, in_dims[3])
    shares = torch.ops.insum_nn.shares(
        batch.spec.to_json(),
        batch.operands(tensors),
        batch.start(start, in_dims[2]),
        results,
        list(batch.extents.indices),
        list(batch.extents.output),
    )
    return shares, (0, 0)


torch.library.register_vmap(f"{_NAMESPACE}::shares", _vmap_shares)
