"""Sums whose terms meet in cells of several subscripts, in a fixed order: by the number of their cell.

    C[Row[p],Col[p],n] += Val[p,n]         as         C'[Cell[p],n] += Val[p,n]

`Cell` numbers the cells of the axes that are not each addressed by an index of its own. It is computed from the
statement's index tensors and kept for as long as they live; its entries are then sorted by the row that owns them, as
those of any index tensor. Terms without a cell have the number -1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from insum_nn.compiler.forms.form import FormError, UnorderedError
from insum_nn.compiler.kernels.description import Description
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.derivative import fresh_name
from insum_nn.compiler.lang.index_checks import cell_numbers
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Statement
from insum_nn.compiler.options import Options
from insum_nn.facts import IndexFacts, StaticTable
from insum_nn.tensor_cache import TensorCache

__all__ = ["Keyed", "generate"]

# Sets of index tensors whose cells are kept.
_LIMIT = 64


def generate(
    bound: Bound, sizes: dict[str, int], output: Sequence[int], tables: dict[str, StaticTable], options: Options
) -> Generated | Keyed:
    """Return the program of generated kernels for a statement.

    Args:
        bound: the statement.
        sizes: extents of the first call.
        output: the output's shape in the first call.
        tables: static tensors by name.
        options: compile options.

    Raises:
        FormError: the statement is not of the generator's kind.
    """
    try:
        return Generated(bound, sizes, output, tables, options)
    except UnorderedError:
        # Where there is a choice, library calls that sum in order are the better one.
        if options.backend != "triton":
            raise
        return Keyed(bound, sizes, output, options)


class Keyed:
    """A statement whose output is addressed by the numbers of its cells.

    Args:
        bound: the statement.
        sizes: extents of the first call.
        output: the output's shape in the first call.
        options: compile options.

    Raises:
        FormError: the statement is not of the generator's kind.
    """

    def __init__(self, bound: Bound, sizes: dict[str, int], output: Sequence[int], options: Options) -> None:
        self.validate = options.validate
        self._number(bound)
        self.inner = Generated(self.inner_bound, sizes, self._shape(output), {}, options)
        self._cells: TensorCache[Tensor] = TensorCache(_LIMIT)

    def _number(self, bound: Bound) -> None:
        """Write the statement with numbered cells."""
        self.bound = bound
        access = bound.statement.output
        self.folded, self.labels = _folded(access)
        if not self.labels:
            raise FormError("no index addresses the output")
        self.rest = tuple(axis for axis in range(len(access.subscripts)) if axis not in self.folded)
        own = _numbered(bound.statement, self.folded, self.labels)
        # The numbers are the first tensor of the new output's only access that has one.
        (self.cell,) = (nested.name for nested in own.output.nested())
        self.inner_bound = _bound(bound, own, self.cell)
        layout = self.inner_bound.layout
        self.places = [-1 if n == self.cell else bound.layout.tensors.index(n) for n in layout.tensors]
        self.sources = [bound.layout.tensors.index(n) for n in dict.fromkeys(n.name for n in access.nested())]

    def named(self, bound: Bound) -> Keyed:
        """The same for a statement that differs in names, with the same choices."""
        other = copy.copy(self)
        other._number(bound)
        other.inner = self.inner.named(other.inner_bound)
        return other

    def _shape(self, output: Sequence[int]) -> tuple[int, ...]:
        """The output's shape with its cells numbered along the first axis."""
        return (math.prod(output[axis] for axis in self.folded), *(output[axis] for axis in self.rest))

    def _extents(self, extents: Extents) -> Extents:
        sizes = dict(zip(self.bound.layout.indices, extents.indices, strict=True))
        indices = self.inner_bound.layout.indices
        return Extents(tuple(sizes[name] for name in indices), self._shape(extents.output))

    def _operands(self, tensors: Sequence[Tensor], extents: Extents) -> list[Tensor]:
        cell = self._numbers(tensors, extents)
        return [cell if place < 0 else tensors[place] for place in self.places]

    def _start(self, start: Tensor | None) -> Tensor | None:
        if start is None:
            return None
        return start.permute(*self.folded, *self.rest).reshape(self._shape(start.shape))

    def _numbers(self, tensors: Sequence[Tensor], extents: Extents) -> Tensor:
        """`Cell`; the same tensor for the same index tensors, until one of them is written to."""
        sources = [tensors[place] for place in self.sources]
        key = (extents, tensors[0].device)
        # `validate=True` means that index tensors may have been written to without a new version.
        found = None if self.validate else self._cells.find(sources, key)
        if found is not None:
            return found
        named = dict(zip(self.bound.layout.tensors, tensors, strict=True))
        sizes = dict(zip(self.bound.layout.indices, extents.indices, strict=True))
        with torch.inference_mode(False), torch.no_grad():
            cell = cell_numbers(self.bound.statement.output, self.folded, self.labels, named, sizes, extents.output)
        return cell if self.validate else self._cells.keep(sources, key, cell)

    def prepare(
        self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None
    ) -> Callable[[Sequence[Tensor], Tensor | None], Tensor]:
        """What runs the statement on tensors of these shapes."""
        inner = self.inner.prepare(self._operands(tensors, extents), self._extents(extents), self._start(start))
        order = (*self.folded, *self.rest)
        shape = [extents.output[axis] for axis in order]
        back = [order.index(axis) for axis in range(len(order))]

        def run(tensors: Sequence[Tensor], start: Tensor | None) -> Tensor:
            start = None if start is None else self._start(start.detach())
            return inner(self._operands(tensors, extents), start).reshape(shape).permute(back).contiguous()

        return run

    def described(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Description:
        """Describe what a call runs, and each choice behind it with its reason."""
        operands = self._operands(tensors, extents)
        inner = self.inner.described(operands, self._extents(extents), self._start(start))
        statement = str(self.inner_bound.statement)
        why = f"{self.cell} numbers the cells of the output, so that each has the terms of one row, in their order"
        order = (*self.folded, *self.rest)
        steps = inner.steps if order == (*sorted(order),) else (*inner.steps, "torch: put the axes in order")
        return replace(inner, steps=steps, choices=(("statement", statement, why), *inner.choices))


def _folded(output: Access) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The output axes whose cells are numbered, and the indices of them; other axes have an index of their own."""
    plain = [subscript.plain for subscript in output.subscripts]
    folded = [axis for axis, name in enumerate(plain) if name is None or plain.count(name) > 1]
    while True:
        labels = dict.fromkeys(index.name for axis in folded for index in output.subscripts[axis].indices())
        more = [axis for axis, name in enumerate(plain) if axis not in folded and name in labels]
        if not more:
            return tuple(sorted(folded)), tuple(labels)
        folded += more


def _numbered(statement: Statement, folded: Sequence[int], labels: Sequence[str]) -> Statement:
    """The statement that writes to numbered cells."""
    taken = {statement.output.name, *statement.tensors(), *statement.indices()}
    cell = f"{fresh_name('Cell', taken)}[{','.join(labels)}]"
    rest = [str(s) for axis, s in enumerate(statement.output.subscripts) if axis not in folded]
    factors = " * ".join(map(str, statement.factors))
    return parse(f"{statement.output.name}[{','.join([cell, *rest])}] {statement.operator} {factors}")


def _bound(bound: Bound, statement: Statement, cell: str) -> Bound:
    """What is known of the statement's tensors, and of the numbers of cells."""
    places = {name: at for at, name in enumerate(bound.layout.tensors)}
    names = replace(bound, statement=statement).layout.tensors
    known = IndexFacts(masked=True, proven=True)
    return replace(
        bound,
        statement=statement,
        index_dtypes=tuple(torch.int64 if n == cell else bound.index_dtypes[places[n]] for n in names),
        facts=tuple(known if n == cell else bound.facts[places[n]] for n in names),
    )
