"""Write a call into the graph that torch is tracing: as torch's own operations, on a GPU as launches of kernels too.

`torch.compile`, `torch.export` and `make_fx` see what a statement computes instead of one opaque operator: Inductor
fuses it with what stands around it, and an exported or compiled model needs nothing of this package to run.

Nothing is known of the values of tensors while torch traces. Index tensors that no builder vouches for are checked when
the graph runs, by assertions in it that name them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain

import torch
from torch import Tensor

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.canonical import canonical, canonical_tables
from insum_nn.compiler.lang.bind import Bound, Extents, bind, layout_of
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.lang.index_checks import is_inside, lowest_entry
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.backends import choose_backend, require_triton
from insum_nn.compiler.runtime.dispatch import Spec, broadcast
from insum_nn.compiler.runtime.execution import Executables, run_parts
from insum_nn.compiler.runtime.inline_kernel import inline_kernel
from insum_nn.compiler.runtime.library_calls import integers_of, library_calls_of, without_unused_facts
from insum_nn.compiler.runtime.modes import graph_constant, is_functional, may_be_empty, records_graph
from insum_nn.compiler.runtime.statement_cuts import Part
from insum_nn.facts import UNKNOWN, IndexFacts, StaticTable

__all__ = ["inline", "inline_by_rows", "inlines"]


def inlines(spec: Spec, tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch records a graph of a computation, as AOTAutograd, `torch.export` and `make_fx` do.

    Under `validate=True` and `deterministic=True` a call stays one operator, which keeps what these promise. So it does
    on a GPU in a graph that `make_fx` alone records: AOTAutograd may still differentiate that graph, and launches have
    no derivatives. It sees through the operator then, and so does `torch.export`.
    """
    if spec.options.validate or spec.options.deterministic or not records_graph(tensors):
        return False
    return is_functional(tensors) or not _launches(spec, tensors)


def inline(
    spec: Spec,
    tensors: Sequence[Tensor],
    initial: Tensor | None,
    extents: Extents,
    row_begins: tuple[int, Tensor] | None = None,
) -> Tensor:
    """Compute a statement by torch's operations and launches; its epilogue is left to the caller.

    Args:
        spec: the program.
        tensors: in the layout's order.
        initial: the initial value.
        extents: the call's sizes, which may be symbolic.
        row_begins: as in `inline_kernel`.
    """
    statement = spec.statement
    named = dict(zip(spec.layout.tensors, tensors, strict=True))
    declared = dict(spec.facts)
    # What a builder has made holds what it guarantees; the derivatives of a statement read what that has checked.
    built = {name for name, own in spec.facts if own.proven} if spec.origin == "builder" else set[str]()
    checked = set[str]() if spec.drop_outside else spec.layout.index_tensors - built
    if not spec.drop_outside:
        present = named if initial is None else {statement.output.name: initial, **named}
        _assert_inside(statement, checked, present, declared, extents)
    facts = {name: own for name, own in declared.items() if name in built}
    # Of what the caller says of the others the graph checks one thing.
    facts |= {name: IndexFacts(masked=declared[name].masked) for name in checked if name in declared}
    bound = bind(statement, named, initial, facts=facts, drop_outside=spec.drop_outside, epilogue=PLAIN)
    tree, whole = Executables(bound, spec.options, spec.static).decided(tensors, extents, _hint)
    parts = tree.parts(whole)
    pool = dict(named)
    for name, table in chain.from_iterable(part.static for part in parts):
        if name not in pool:
            pool[name] = graph_constant(table.tensor(bound.dtype))

    def run(part: Part, tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
        own = replace(part.bound, has_initial=initial is not None)
        begins = row_begins if len(parts) == 1 else None
        return _run(own, tensors, initial, part.extents, spec.options, part.static, begins)

    return run_parts([(part, partial(run, part)) for part in parts], pool, initial, traced=True)


def inline_by_rows(
    spec: Spec, named: Mapping[str, Tensor], row: str, begin: Tensor, out_shape: Sequence[int | None]
) -> Tensor | None:
    """Compute a statement whose index tensor of output rows ascends; `None` where torch does not record a graph of it.

    Args:
        spec: the program.
        named: the tensors; one under the output's name is the initial value.
        row: the name of that index tensor.
        begin: (rows + 1,) where the terms of each row begin, and how many there are: the graph computes it else.
        out_shape: shape of the output; `None` entries are inferred.
    """
    tensors = [named[name] for name in spec.layout.tensors]
    initial = named.get(spec.statement.output.name)
    if not inlines(spec, (*tensors, initial)):
        return None
    extents = resolve_extents(spec.statement, tensors, initial, {}, out_shape)
    row_begins = spec.layout.tensors.index(row), begin
    return inline(spec, tensors, broadcast(initial, extents), extents, row_begins)


def _launches(spec: Spec, tensors: Sequence[Tensor | None]) -> bool:
    """Whether a statement may be written as launches of kernels."""
    backend = spec.options.backend
    return backend == "triton" or (backend == "auto" and any(t is not None and t.is_cuda for t in tensors))


def _assert_inside(
    statement: Statement,
    checked: Collection[str],
    named: Mapping[str, Tensor],
    facts: Mapping[str, IndexFacts],
    extents: Extents,
) -> None:
    """Have the graph raise where one of the checked index tensors points outside, or holds what is no entry.

    So it does where a constant subscript lies outside, or an affine one of the output.
    """
    sizes = dict(zip(layout_of(statement).indices, extents.indices, strict=True))
    seen: set[tuple[str, str, int]] = set()
    for access in statement.accesses():
        is_output = access is statement.output
        shape = extents.output if is_output else named[access.name].shape
        for axis, (subscript, extent) in enumerate(zip(access.subscripts, shape, strict=True)):
            if not subscript.terms and type(extent) is int and 0 <= subscript.offset < extent:
                continue
            if subscript.plain is None and subscript.indirect is None and (is_output or not subscript.terms):
                what = f"'{subscript}' {'writes' if is_output else 'reads'} outside axis {axis} of '{access.name}'"
                inside = is_inside(subscript, extent, named, sizes)
                torch.ops.aten._assert_async.msg(inside, f"{what} in {statement.text}")
            for name in [inner.name for inner in subscript.index_accesses()]:
                if name not in checked or (name, access.name, axis) in seen:
                    continue
                seen.add((name, access.name, axis))
                inside, what = named[name] >= lowest_entry(facts.get(name, UNKNOWN)), "holds what is no entry"
                if subscript.indirect is not None:
                    # Where an affine subscript falls outside of a tensor, its term takes no part.
                    what = f"points outside axis {axis} of '{access.name}'"
                    inside = inside & (named[name] < extent)
                torch.ops.aten._assert_async.msg(inside.all(), f"index tensor '{name}' {what} in {statement.text}")


# In place of a symbolic size: a traced graph is for all sizes, so that none of them may decide what it looks like.
_NOMINAL = 4096


def _hint(extent: int) -> int:
    """A size by which to choose."""
    return extent if type(extent) is int else _NOMINAL


def _run(
    bound: Bound,
    tensors: Sequence[Tensor],
    initial: Tensor | None,
    extents: Extents,
    options: Options,
    static: tuple[tuple[str, StaticTable], ...] = (),
    row_begins: tuple[int, Tensor] | None = None,
) -> Tensor:
    # Whether a call of the graph may have an extremum of nothing: cells without terms.
    empty = not bound.statement.combining.adds and may_be_empty(extents.indices)
    if not empty and choose_backend(bound, options, tables=bool(static))[0] == "triton":
        require_triton(bound)
        tables = dict(canonical_tables(bound.statement, static))
        result = inline_kernel(canonical(bound), tensors, initial, extents, options, tables, row_begins)
        if result is not None:
            return result
    own = canonical(without_unused_facts(bound))
    hints = tuple(0 if empty else _magnitude(_hint(extent)) for extent in extents.indices)
    library = _library(own, hints, options)
    given = [*tensors, *integers_of(own, extents)]
    return library.forward(*given) if initial is None else library.forward(*given, initial)


def _magnitude(extent: int) -> int:
    """The power of two at or above an extent: sizes nearby share a graph."""
    return 1 << max(0, extent - 1).bit_length() if extent else 0


@lru_cache(maxsize=512)
def _library(bound: Bound, hints: tuple[int, ...], options: Options) -> CallGraph:
    return library_calls_of(bound, Extents(hints, ()), options, compiled=True)
