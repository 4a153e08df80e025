"""Take entries in the order of the matrix that they select of a stack, so that a program multiplies many by one.

    out[a, b] += t0[a, c] * t1[x0[a], c, b]

is a vector times a matrix for every `a`. In tiles of entries with one key `x0[a]`, which are ranges of a row partition,
it is a product of matrices:

    free row in 0 .. tiles:
      free entry in begin[row] .. end[row]:
        free b in 0 .. B:
          sum c in 0 .. C:
            out[e, b] += t0[e, c] * t1[row_of[row], c, b]

with e = order[entry]. Where entries are summed too, or scattered, the tiles add to memory. On a CPU
`passes/cpu/group_entries.py` walks entries likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from insum_nn.compiler.ir.build import build
from insum_nn.compiler.ir.canonical import names_of
from insum_nn.compiler.ir.nodes import Index, Load
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.syntax import Access
from insum_nn.compiler.schedule.form import ENTRY, ROW_LOOP, Form, input_of
from insum_nn.compiler.schedule.output_strategy import in_order
from insum_nn.compiler.schedule.product_cost import worth_grouping

__all__ = ["group_by_key"]


def group_by_key(form: Form, shapes: Sequence[Sequence[int]], *, deterministic: bool) -> Form:
    """The form with its entries in the order of a key, where that makes a matrix product that pays; else the form.

    Args:
        form: what is computed.
        shapes: of the statement's tensors.
        deterministic: several programs must not add to one cell.
    """
    if form.additional or form.tables or form.product is not None:
        return form
    for key, stack in _keys(form.bound):
        found = _grouped(form, key, stack, shapes[stack[0]][stack[1]])
        terms = found.terms_of_all * math.prod(found.size(i) for i in (*found.parallel[2:], *found.reduce))
        worth = worth_grouping(found.terms_of_all, found.rows, terms)
        if worth and not (deterministic and found.strategy == "atomic") and found.product is not None:
            return found
    return form


def _keys(bound: Bound) -> Iterator[tuple[Access, tuple[int, int]]]:
    """Reads of index tensors that select a matrix of a stack: which tensor that is, and the axis of its matrices."""
    for access in bound.statement.reads:
        for axis, subscript in enumerate(access.subscripts):
            key = subscript.indirect
            names = [] if key is None else [each.plain for each in key.subscripts]
            if key is not None and len(access.subscripts) > 2 and None not in names and len({*names}) == len(names):
                yield key, (bound.layout.tensors.index(access.name), axis)


def _grouped(form: Form, key: Access, stack: tuple[int, int], count: int) -> Form:
    """The form with its entries in the order of a key, of which there are so many."""
    names = names_of(form.bound.statement)
    entries = tuple(names.indices[index.name] for index in key.indices())
    free = (*form.entries, *(i for i in form.parallel if i != ROW_LOOP))
    alone = form.strategy in ("direct", "place") and {*entries} <= {*free}
    kernel = build(form.bound)
    row_index = Load(input_of(kernel, names.tensors[key.name]), tuple(map(Index, entries)))
    return replace(
        form,
        make=lambda: kernel,
        sizes={**form.sizes, ROW_LOOP: count},
        strategy=form.strategy if alone else "atomic",
        row_index=row_index,
        row_axis=-1,
        entries=entries,
        permuted=not in_order(row_index),
        parallel=(ROW_LOOP, ENTRY, *(i for i in free if i not in entries)),
        reduce=tuple(i for i in form.reduce if i not in entries),
        plan=form.plan.at(stack=[*stack, count.bit_length()]),
        stack=stack,
    )
