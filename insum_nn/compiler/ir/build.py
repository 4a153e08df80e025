"""Build the algorithm of a bound statement: what is summed where, with loops that are not placed yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from insum_nn.compiler.ir.nodes import (
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Kernel,
    Load,
    Loop,
    Op,
    Result,
    Size,
    Stmt,
    Store,
    add,
    conjunction,
    multiply,
    operation,
)
from insum_nn.compiler.lang.bind import Bound, show_dtype
from insum_nn.compiler.lang.derivative import roundings
from insum_nn.compiler.lang.syntax import Access, Factor, Number, Statement, Subscript
from insum_nn.compiler.lang.syntax import Index as IndexVariable
from insum_nn.dtypes import is_widened
from insum_nn.facts import IndexFacts

__all__ = ["INITIAL", "OUTPUT", "Names", "build"]

OUTPUT = "out"
# The greatest power that is made by multiplications.
_SQUARED = 32
INITIAL = "out_initial"


class Names:
    """The canonical names of a statement: `t0`, `t1`, ... for values, `x0`, ... for index tensors, letters for loops.

    Attributes:
        tensors: canonical name by the user's.
        indices: the same for indices.
    """

    def __init__(self, statement: Statement) -> None:
        index_tensors = frozenset(statement.index_tensors())
        values = [name for name in statement.tensors() if name not in index_tensors]
        entries = [name for name in statement.tensors() if name in index_tensors]
        self.tensors = {name: f"t{i}" for i, name in enumerate(values)} | {n: f"x{i}" for i, n in enumerate(entries)}
        self.indices = {name: _letter(i) for i, name in enumerate(statement.indices())}

    def facts(self, facts: IndexFacts) -> IndexFacts:
        """Return facts in canonical names; uniqueness together with a tensor that is not read says nothing."""
        if not facts.unique_with:
            return facts
        all_read = all(name in self.tensors for name in facts.unique_with)
        return replace(facts, unique_with=tuple(sorted(self.tensors[n] for n in facts.unique_with)) if all_read else ())


def _letter(number: int) -> str:
    """a, b, ..., z, a1, b1, ..."""
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")


def build(bound: Bound, *, reads_ones: bool = False) -> Kernel:
    """Build the algorithm of a bound statement.

    C[Row[g],n] += Val[g,q] * B[Col[g,q],n] becomes

        free a in 0 .. A:
          free b in 0 .. B:
            sum c in 0 .. C:
              out[x0[a], b] += t0[a, c] * (t1[x1[a, c], b] if x1[a, c] >= 0 else 0)   where x1[a, c] >= 0

    Extents that are compiled in are numbers. `reads_ones`: what is counted by `one` is read too.
    """
    return _Builder(bound, reads_ones=reads_ones).kernel()


class _Builder:
    def __init__(self, bound: Bound, *, reads_ones: bool) -> None:
        self.bound, self.reads_ones = bound, reads_ones
        self.statement = bound.statement
        self.names = Names(bound.statement)
        self.static = dict(bound.static)
        layout = bound.layout
        self.buffers: dict[str, Buffer] = {}
        kinds = zip(layout.tensors, bound.index_dtypes, bound.facts, layout.ranks, strict=True)
        for position, (name, dtype, facts, rank) in enumerate(kinds):
            own = tuple(self.axis(name, position, axis) for axis in range(rank))
            self.buffers[name] = Buffer(self.names.tensors[name], show_dtype(dtype), own, self.names.facts(facts))
        shape = tuple(
            Size(f"{OUTPUT}_{axis}") if name is None else self.extent(name)
            for axis, name in enumerate(layout.output_plain)
        )
        self.output = Buffer(OUTPUT, show_dtype(bound.out_dtype), shape)
        self.conditions: list[Expr | None] = []

    def extent(self, index: str) -> Expr:
        """Return the extent of an index: a number where it is compiled in."""
        extent = self.static.get(index)
        return Size(self.names.indices[index]) if extent is None else Const(extent)

    def axis(self, name: str, position: int, axis: int) -> Expr:
        """Return the extent of an axis: of the index that addresses it directly, or a symbol of its own."""
        for index, places in zip(self.bound.layout.indices, self.bound.layout.plain, strict=True):
            if (position, axis) in places:
                return self.extent(index)
        return Size(f"{self.names.tensors[name]}_{axis}")

    def kernel(self) -> Kernel:
        statement = self.statement
        value = self.chain("mul", statement.factors)
        target = tuple(
            self.subscript(s, e) for s, e in zip(statement.output.subscripts, self.output.shape, strict=True)
        )
        combine = statement.combining.name
        body: Stmt = Store(self.output, target, value, combine, conjunction(self.conditions))
        written = {index.name for index in statement.output.indices()}
        for name in reversed(sorted(statement.indices(), key=lambda index: index not in written)):
            index = self.names.indices[name]
            body = Loop(Index(index), Const(0), self.extent(name), "free" if name in written else "sum", (body,))
        inputs = tuple(self.buffers[name] for name in self.bound.layout.tensors)
        result = Result(self.output, "zero", self.bound.epilogue.activation)
        if self.bound.has_initial:
            inputs = (*inputs, Buffer(INITIAL, show_dtype(self.bound.dtype), self.output.shape))
            result = Result(self.output, "tensor", self.bound.epilogue.activation)
        return Kernel(inputs, (result,), (body,), self.bound.drop_outside)

    def chain(self, name: str, factors: Sequence[Factor]) -> Expr:
        """Build what an operation makes of factors, from left to right."""
        value, *rest = map(self.value, factors)
        for each in rest:
            value = operation(name, value, each)
        return value

    def value(self, factor: Factor) -> Expr:
        if isinstance(factor, Access):
            return self.load(factor)
        if isinstance(factor, Number):
            return Const(factor.value, "float64" if isinstance(factor.value, float) else "int64")
        if factor.function in ("add", "mul"):
            return self.chain(factor.function, factor.args)
        args, last = [*map(self.value, factor.args)], factor.args[-1]
        exponent = last.value if factor.function == "pow" and isinstance(last, Number) else None
        if factor.function == "one" or exponent == 0:
            # Only the conditions of its argument are left, where they stand by themselves.
            return Op("one", tuple(args[:1])) if self.reads_ones else Const(1)
        if factor.function == "detach":
            return args[0]
        if exponent is not None:
            return _power(args[0], exponent)
        if factor.function == "eq" and is_widened(self.bound.dtype):
            # Terms that were stored, as extrema are, are compared as they were.
            dtype = show_dtype(self.bound.dtype)
            pairs = zip(args, factor.args, strict=True)
            args = [operation(dtype, arg) if roundings(of) else arg for arg, of in pairs]
        return operation(factor.function, *args)

    def load(self, access: Access) -> Load:
        """Build the read of an access, under the conditions that its address is valid."""
        buffer, outer = self.buffers[access.name], self.conditions
        self.conditions = []
        pairs = zip(access.subscripts, buffer.shape, strict=True)
        subscripts = tuple(self.subscript(subscript, extent) for subscript, extent in pairs)
        own, self.conditions = self.conditions, outer + self.conditions
        return Load(buffer, subscripts, conjunction(own))

    def entry(self, access: Access) -> Load:
        """Build the read of an index tensor, which is -1 where an entry on its own path is missing."""
        outer, self.conditions = self.conditions, []
        found = self.load(access)
        self.conditions = outer
        return found if found.where is None else Load(found.buffer, found.subscripts, found.where, -1)

    def subscript(self, subscript: Subscript, extent: Expr) -> Expr:
        """Build a position, and note the conditions under which the term takes part."""
        total: Expr = Const(0)
        bounded = subscript.plain is not None or subscript.indirect is not None
        wraps = self.wraps(subscript)
        for term in subscript.terms:
            if isinstance(term.atom, IndexVariable):
                atom: Expr = Index(self.names.indices[term.atom.name])
            else:
                atom = self.entry(term.atom)
                if self.may_lack(term.atom):
                    self.conditions.append(Op("at_least", (atom, Const(0))))
                # Entries that no axis bounds are added up without overflow.
                atom = atom if bounded or wraps else Cast(atom, "int64")
            total = add(total, multiply(Const(term.coefficient), atom))
        total = add(total, Const(subscript.offset))
        if not bounded:
            self.conditions += [operation("at_least", total, Const(0)), operation("less", total, extent)]
        return total

    def wraps(self, subscript: Subscript) -> bool:
        """Whether what overflows lies outside of every axis all the same, which C would leave undefined.

        An entry or index below 2**31 more or less than another is off by 2**32 then: below 0, or above all offsets that
        32 bits are taken for.
        """
        steps = [term.coefficient for term in subscript.terms]
        few = len(steps) <= 2 and {*steps} <= {1, -1} and steps.count(-1) < 2 and abs(subscript.offset) < 1 << 15
        narrow = all(
            isinstance(term.atom, IndexVariable) or self.buffers[term.atom.name].dtype == "int32"
            for term in subscript.terms
        )
        return few and narrow and self.bound.device_type != "cpu"

    def may_lack(self, access: Access) -> bool:
        """Return whether an entry may be missing: by -1, or because the index tensor is read out of bounds."""
        if self.bound.facts_of(access.name).masked is not False:
            return True
        return any(
            (s.plain is None and s.indirect is None)
            or any(not isinstance(term.atom, IndexVariable) and self.may_lack(term.atom) for term in s.terms)
            for s in access.subscripts
        )


def _power(base: Expr, exponent: float) -> Expr:
    """Build a power: a small whole one by squaring, others by a logarithm."""
    if exponent in (0.5, -0.5):
        return operation("sqrt" if exponent > 0 else "rsqrt", base)
    whole = exponent == int(exponent)
    if not whole or abs(exponent) > _SQUARED:
        size = operation("log", operation("abs", base) if whole else base)
        power = operation("exp", Op("mul", (Const(float(exponent), "float64"), size)))
        return Op("mul", (operation("sign", base), power)) if whole and exponent % 2 else power
    left, square, found = abs(int(exponent)), base, None
    while left:
        if left & 1:
            found = square if found is None else Op("mul", (found, square))
        left >>= 1
        square = Op("mul", (square, square)) if left else square
    assert found is not None, "the exponent is not 0"
    return operation("div", Const(1), found) if exponent < 0 else found
