"""Programs for statements that are a sparse sum and a dense product: the candidates, and the choice among them.

one kernel        every term times every weight, where the terms meet
two stages        a generated kernel and a library product, in either order, with a tensor between
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from insum_nn.compiler.forms.description import Description
from insum_nn.compiler.forms.form import FormError, UnorderedError
from insum_nn.compiler.forms.generated import Generated
from insum_nn.compiler.forms.keyed import Keyed
from insum_nn.compiler.lang.bind import Bound, Extents, layout_of
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans.chain import Split, find_splits
from insum_nn.compiler.schedule.database import size_bucket
from insum_nn.facts import UNKNOWN, StaticTable

__all__ = ["Chained", "generate"]

Run = Callable[[Sequence[Tensor], Tensor | None], Tensor]

# Multiplications that cost as much as a byte moved: by the matrix unit, and one by one.
_BY_UNIT = {2: 100.0, 4: 12.0, 8: 6.0}
_BY_ELEMENT = 4.0
# Bytes that a further kernel costs by being launched.
_LAUNCH = 6e6


def generate(
    bound: Bound,
    sizes: dict[str, int],
    tensors: Sequence[Tensor],
    output: Sequence[int],
    tables: dict[str, StaticTable],
    options: Options,
) -> Generated | Keyed | Chained:
    """The program of generated kernels for a statement.

    Args:
        bound: the statement.
        sizes: extents of the first call.
        tensors: those of the first call, in the layout's order; only shapes matter.
        output: the output's shape in the first call.
        tables: static tensors by name.
        options: compile options.

    Raises:
        FormError: the statement is not of the generator's kind.
    """
    splits = () if tables or not bound.dtype.is_floating_point else find_splits(bound.statement)
    try:
        if not splits:
            return Generated(bound, sizes, output, tables, options)
        shapes = {name: tuple(t.shape) for name, t in zip(bound.layout.tensors, tensors, strict=True)}
        return Chained(bound, sizes, shapes, output, splits, options)
    except UnorderedError:
        # Where there is a choice, library calls that sum in order are the better one.
        if options.backend != "triton":
            raise
        return Keyed(bound, sizes, output, options)


class Chained:
    """A statement that may be computed in two orders, in one kernel or two.

    Args:
        bound: the statement.
        sizes: extents of the first call.
        shapes: of the tensors in the first call.
        output: the output's shape in the first call.
        splits: the ways to take it as two.
        options: compile options.

    Raises:
        FormError: no candidate can be generated.

    Attributes:
        candidates: what may run, by name.
        refused: what cannot, and why.
    """

    def __init__(
        self,
        bound: Bound,
        sizes: dict[str, int],
        shapes: Mapping[str, Sequence[int]],
        output: Sequence[int],
        splits: Sequence[Split],
        options: Options,
    ) -> None:
        self.bound = bound
        self.options = options
        self.candidates: dict[str, Generated | _Staged] = {}
        self.refused: dict[str, str] = {}
        self._first_error: FormError | None = None
        self._chosen: dict[tuple[int, ...], str] = {}
        self._lock = threading.RLock()
        self._add("one kernel over all terms", lambda: Generated(bound, sizes, output, {}, options))
        for split in splits:
            name = f"{split.first}, then {split.second}"
            about = (bound, sizes, shapes, output, split, options)
            self._add(name, partial(_Staged, *about))
        if self._first_error is not None and not self.candidates:
            raise self._first_error

    def _add(self, name: str, make: Callable[[], Generated | _Staged]) -> None:
        try:
            self.candidates[name] = make()
        except FormError as error:
            self._first_error = self._first_error or error
            self.refused[name] = str(error)

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Run:
        """What runs the statement on tensors of these shapes."""
        return self.candidates[self.choose(tensors, extents)].prepare(tensors, extents, start)

    def choose(self, tensors: Sequence[Tensor], extents: Extents) -> str:
        """The name of the candidate for a call's sizes: one for all sizes within a factor of two."""
        bucket = size_bucket(extents)
        with self._lock:
            if bucket not in self._chosen:
                costs = self.costs(tensors, extents)
                self._chosen[bucket] = min(costs, key=lambda name: costs[name])
            return self._chosen[bucket]

    def costs(self, tensors: Sequence[Tensor], extents: Extents) -> dict[str, float]:
        """What each candidate moves, in bytes, with its multiplications weighed as bytes."""
        count = _Count(self.bound, tensors, extents)
        costs: dict[str, float] = {}
        for name, candidate in self.candidates.items():
            if isinstance(candidate, _Staged):
                costs[name] = count.staged(candidate.split)
            else:
                form = candidate.form
                costs[name] = count.whole(form.product is not None, form.combine == "atomic")
        return costs

    def described(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Description:
        """Describe what a call runs, and each choice behind it with its reason."""
        chosen = self.choose(tensors, extents)
        inner = self.candidates[chosen].described(tensors, extents, start)
        order = ("order", chosen, "the least bytes and multiplications")
        return replace(inner, choices=(order, *inner.choices))


def _part(bound: Bound, statement: Statement, split: Split, *, has_start: bool = False) -> Bound:
    """What is known of a part of a statement, from what is known of the whole."""
    layout, whole = layout_of(statement), bound.layout
    place = {name: at for at, name in enumerate(whole.tensors)}
    return replace(
        bound,
        statement=statement,
        index_dtypes=tuple(bound.index_dtypes[place[n]] if n in place else bound.dtype for n in layout.tensors),
        has_start=has_start,
        facts=tuple(bound.facts[place[n]] if n in place else UNKNOWN for n in layout.tensors),
        static=tuple((name, extent) for name, extent in bound.static if name in layout.indices),
        epilogue=bound.epilogue if statement is split.second else PLAIN,
    )


class _Staged:
    """Two programs, one after the other."""

    def __init__(
        self,
        bound: Bound,
        sizes: dict[str, int],
        shapes: Mapping[str, Sequence[int]],
        output: Sequence[int],
        split: Split,
        options: Options,
    ) -> None:
        self.split = split
        self.bound = bound
        # An explicit precision is the generator's; else the library follows torch's own setting, as the generator does.
        library = options.precision == "auto" or bound.dtype != torch.float32
        lengths, shape = split.sizes(sizes, shapes, output)
        self.stages: list[tuple[Statement, Generated | _Library, tuple[int, ...]]] = []
        for statement in (split.first, split.second):
            last = statement is split.second
            part = _part(bound, statement, split, has_start=last and bound.has_start)
            run: Generated | _Library
            if statement is split.dense and library and len(statement.output.subscripts) == 2:
                run = _Library(part)
            else:
                within = {name: lengths[name] for name in part.layout.indices}
                run = Generated(part, within, output if last else shape, {}, options)
            names = bound.layout.tensors
            where = tuple(names.index(n) if n != split.made else -1 for n in part.layout.tensors)
            self.stages.append((statement, run, where))

    def extents(self, tensors: Sequence[Tensor], extents: Extents) -> tuple[Extents, Extents]:
        """The sizes of both stages."""
        layout = self.bound.layout
        shapes = {name: t.shape for name, t in zip(layout.tensors, tensors, strict=True)}
        sizes = dict(zip(layout.indices, extents.indices, strict=True))
        sizes, made = self.split.sizes(sizes, shapes, extents.output)
        found = [
            Extents(tuple(sizes[i] for i in layout_of(statement).indices), shape)
            for statement, shape in ((self.split.first, made), (self.split.second, extents.output))
        ]
        return found[0], found[1]

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Run:
        """What runs both on tensors of these shapes."""
        (_, one, where), (_, other, there) = self.stages
        before, after = self.extents(tensors, extents)
        made = tensors[0].new_empty(before.output, dtype=self.bound.dtype)
        first = one.prepare([tensors[at] for at in where], before, None)
        second = other.prepare([made if at < 0 else tensors[at] for at in there], after, start)

        def run(tensors: Sequence[Tensor], start: Tensor | None) -> Tensor:
            made = first([tensors[at] for at in where], None)
            return second([made if at < 0 else tensors[at] for at in there], start)

        return run

    def described(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Description:
        """Describe both stages."""
        sizes = self.extents(tensors, extents)
        whole = Description(())
        made = torch.empty(sizes[0].output, dtype=self.bound.dtype, device=tensors[0].device)
        for (statement, run, where), each in zip(self.stages, sizes, strict=True):
            how = "by the library's matrix product" if isinstance(run, _Library) else "by a generated kernel"
            whole = whole.then(Description((), choices=(("stage", str(statement), how),)))
            operands = [made if at < 0 else tensors[at] for at in where]
            whole = whole.then(run.described(operands, each, start if statement is self.split.second else None))
        return whole


class _Library:
    """A product of two matrices by the library: `C[i,n] += T[i,k] * W[k,n]`, in any order of axes."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        row, column = (str(s.plain) for s in bound.statement.output.subscripts)
        names = bound.layout.tensors
        left, right = bound.statement.reads
        if not any(s.plain == row for s in left.subscripts):
            left, right = right, left
        self.places = names.index(left.name), names.index(right.name)
        self.turned = left.subscripts[0].plain != row, right.subscripts[1].plain != column

    def prepare(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Run:
        """What multiplies, adds the start and does what follows."""
        one, other = self.places
        turn_one, turn_other = self.turned
        epilogue, dtype = self.bound.epilogue, self.bound.dtype

        def run(tensors: Sequence[Tensor], start: Tensor | None) -> Tensor:
            left, right = tensors[one], tensors[other]
            left, right = left.t() if turn_one else left, right.t() if turn_other else right
            if start is None:
                total = torch.mm(left, right)
            else:
                # A bias is one row to the library.
                total = torch.addmm(start[0] if start.stride(0) == 0 else start, left, right)
            return epilogue(total, dtype) if epilogue else total

        return run

    def described(self, tensors: Sequence[Tensor], extents: Extents, start: Tensor | None) -> Description:
        """Describe the library's call, and what follows it."""
        names = [self.bound.layout.tensors[place] for place in self.places]
        operands = [f"{name}.t()" if turned else name for name, turned in zip(names, self.turned, strict=True)]
        call = f"mm({', '.join(operands)})" if start is None else f"addmm(initial value, {', '.join(operands)})"
        epilogue = self.bound.epilogue
        steps = [f"torch: {call}"]
        steps += [] if epilogue.activation is None else [f"torch: {epilogue.activation}"]
        if epilogue.out_dtype(self.bound.dtype) != self.bound.dtype:
            steps.append(f"torch: cast to {epilogue.dtype}")
        return Description(tuple(steps))


class _Count:
    """Bytes and multiplications of a statement's candidates at some sizes."""

    def __init__(self, bound: Bound, tensors: Sequence[Tensor], extents: Extents) -> None:
        self.bound = bound
        self.tensors = dict(zip(bound.layout.tensors, tensors, strict=True))
        self.sizes = dict(zip(bound.layout.indices, extents.indices, strict=True))
        self.output = extents.output
        self.width = bound.dtype.itemsize

    def work(self, statement: Statement, by_unit: bool, sizes: Mapping[str, int]) -> float:
        """Multiplications, as bytes."""
        count = math.prod(sizes[i] for i in statement.indices())
        return count / (_BY_UNIT[self.width] if by_unit else _BY_ELEMENT)

    def reads(self, statement: Statement, shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int]) -> float:
        """Bytes read: of a factor that is looked up what its indices reach, else all of it."""
        total = 0.0
        for factor in statement.reads:
            looked_up = any(True for _ in factor.nested())
            cells = math.prod(sizes[i] for i in {i.name for i in factor.indices()}) if looked_up else 0
            total += self.width * (cells or math.prod(shapes[factor.name]))
        return total + sum(math.prod(shapes[n]) * 4.0 for n in statement.index_tensors())

    def shapes(self, made: Mapping[str, Sequence[int]] | None = None) -> dict[str, Sequence[int]]:
        return {**{name: tuple(t.shape) for name, t in self.tensors.items()}, **(made or {})}

    def written(self, cells: int) -> float:
        return float(cells * self.width)

    def whole(self, by_unit: bool, atomic: bool) -> float:
        statement = self.bound.statement
        written = self.written(math.prod(self.output))
        if atomic:
            # Each sum over what a program has goes to memory by itself, in float32.
            inner = {i.name for i in statement.output.indices()}
            written += 2 * 4.0 * math.prod(self.sizes[i] for i in inner)
        return self.reads(statement, self.shapes(), self.sizes) + written + self.work(statement, by_unit, self.sizes)

    def made(self, split: Split) -> tuple[dict[str, int], tuple[int, ...]]:
        return split.sizes(self.sizes, self.shapes(), self.output)

    def staged(self, split: Split) -> float:
        sizes, shape = self.made(split)
        shapes = self.shapes({split.made: shape})
        total = _LAUNCH + self.written(math.prod(shape)) + self.written(math.prod(self.output))
        for statement in (split.first, split.second):
            total += self.reads(statement, shapes, sizes) + self.work(statement, statement is split.dense, sizes)
        return total
