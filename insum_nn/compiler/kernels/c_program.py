"""Statements computed by one C function: its text, and the Python that allocates, sorts entries and calls it.

    def body(pool, extents, shapes, initial):
        t0, t1, t2 = pool
        (e0_0, e0_1), = extents
        (s0_0, s0_1), = shapes
        if not t0.is_contiguous(): t0 = t0.contiguous()
        ...
        begin0, order0, kept0 = order_of(t2, s0_0)
        out0 = empty(s0_0, s0_1, dtype=dtype0, device=cpu)
        run(row(t0.data_ptr(), t1.data_ptr(), begin0, order0, out0.data_ptr(), e0_0, e0_1, 1))
        return out0,

Nothing of it depends on sizes or on index tensors, but for the extents that are compiled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.codegen.c import CKernel, NotInC, c_kernel
from insum_nn.compiler.codegen.c_prelude import PIECES
from insum_nn.compiler.ir.build import INITIAL, OUTPUT, build
from insum_nn.compiler.ir.nodes import Const, Expr, Kernel, Op, Size
from insum_nn.compiler.kernels.c_compiler import CFunction, background, submit, vector_bytes
from insum_nn.compiler.kernels.c_structures import CPU, order_of, sorting
from insum_nn.compiler.kernels.description import Description
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.limits import limits_of_extents
from insum_nn.compiler.lang.printed import Body, Lists, Made, Pool, function_of_lines
from insum_nn.compiler.passes.pipeline import lower, unroll
from insum_nn.compiler.schedule.choose_unrolling import Unrolling, choose_unrolling
from insum_nn.facts import UNKNOWN, IndexFacts, Tables
from insum_nn.locks import new_lock

__all__ = [
    "NOWHERE",
    "CProgram",
    "Part",
    "algorithm_of",
    "known_in_c",
    "limits_in_c",
    "unpacking",
]

NOWHERE = 1 << 30
# The number of an extent of a call's statements and of one of these, or a number.
Extent = tuple[int, int] | int
_ENTRY = "insum"
# Multiplications from which threads share a kernel; to wake them takes as long as some thousand.
_DIVIDED = 1 << 16
# Calls by library calls before a program is compiled: most statements of a process run once.
_PATIENCE = 1
# Multiplications from which library calls take longer than the compiler does.
_LARGE = 1 << 28
# Terms of static tables in one statement: Python prints a thousand in a second, and compilers take longer. Of more than
# these a call does not wait for either.
_MOST_TERMS, _SOON = 1280, 192
# Extents up to which axes of a model are compiled in.
_MOST_FEATURES = 128


@dataclass(frozen=True, slots=True)
class Part:
    """One of the statements.

    Attributes:
        bound: the statement in canonical names, with the extents that are compiled in.
        tables: its static tensors by canonical name.
        places: of its tensors among those of the program; -1 - n: what another statement wrote as output n; `NOWHERE`:
            of static tables that a call does not pass.
        output: the number of the output that it adds to.
        extents: of its indices: which of which statement of a call, or how many.
        shape: of an output that only later statements read, likewise.
    """

    bound: Bound
    tables: Tables
    places: tuple[int, ...]
    output: int
    extents: tuple[Extent, ...]
    shape: tuple[Extent, ...] | None = None


def algorithm_of(bound: Bound, tables: Tables) -> Kernel:
    """The kernel of a statement, whose static tables are unrolled.

    Raises:
        NotInC: they have too many entries.
    """
    found = _unrolling(bound, tables)
    return unroll(build(bound), found.tables, found.names, found.places)


@lru_cache(maxsize=64)
def _unrolling(bound: Bound, tables: Tables) -> Unrolling:
    found = choose_unrolling(bound, dict(tables), _MOST_TERMS)
    if not found.tables and not found.places:
        raise NotInC(f"straight-line code of more than {_MOST_TERMS} terms")
    return found


@lru_cache(maxsize=256)
def known_in_c(masked: bool | None, facts: IndexFacts) -> IndexFacts:
    """What a C function is made for, of what is known of an index tensor: not the order of its entries."""
    own = facts if facts.proven else UNKNOWN
    return IndexFacts(masked=masked, proven=masked is not None, unique=own.unique, unique_with=own.unique_with)


def limits_in_c(bound: Bound, tables: Tables) -> list[float]:
    """Up to which extent each index is compiled in; see `limits_of_extents`."""
    return [most for _, most in limits_of_extents(bound, frozenset(name for name, _ in tables), _MOST_FEATURES)]


class CProgram:
    """Statements computed by one C function, one after the other.

    Args:
        parts: the statements; only the first of an output has an initial value.
        indices: how many indices each statement of a call has, of which these are parts.
        tensors: how many tensors a call has.
        wait: calls wait until it is compiled, as library calls round otherwise; else one of many terms is printed by a
            worker, when it is requested.

    Raises:
        NotInC: one is not of the printer's kind.

    Attributes:
        kernels: what each statement became.
        text: the C text; empty before it is printed.
        host: the text of `body`.
        compiled: all is compiled that `body` calls.
        body: runs the statements, where the function is compiled.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        indices: Sequence[int],
        tensors: int,
        *,
        wait: bool,
    ) -> None:
        self.parts = tuple(parts)
        self.text = self.host = self._refused = ""
        self.kernels: list[CKernel] = []
        self._functions: list[CFunction] = []
        self._names: dict[str, Any] = {}
        self.compiled, self._waits, self._calls, self._printing = False, wait, 0, new_lock()
        self._indices, self._tensors = indices, tensors
        # All before the first is printed, which takes longest: one may have too many terms.
        terms = max(len(_unrolling(part.bound, part.tables).places) for part in parts)
        self._later = not wait and terms > _SOON and background()
        self.body: Body = self._run
        if not self._later:
            self._print()
            for each in self._functions:
                if each.run is None:
                    # Some process may have compiled it before.
                    each.find()

    def _print(self) -> None:
        """Print all, once."""
        with self._printing:
            if self.text:
                return
            parts = self.parts
            # What adds to what an earlier statement wrote begins with it.
            first = {p.output: p for p in reversed(parts)}
            own = [p.bound if first[p.output] is p else replace(p.bound, has_initial=True) for p in parts]
            algorithms = [algorithm_of(b, p.tables) for b, p in zip(own, parts, strict=True)]
            made = [
                [t for t, at in zip(b.layout.tensors, p.places, strict=True) if at < 0]
                for b, p in zip(own, parts, strict=True)
            ]
            width = vector_bytes()
            lowered = [lower(k, names, width) for k, names in zip(algorithms, made, strict=True)]
            self.kernels = [c_kernel(each, f"k{n}") for n, each in enumerate(lowered)]
            printed = _Printed(parts, own, self.kernels, self._indices, self._tensors)
            pieces = dict.fromkeys(piece for kernel in self.kernels for piece in kernel.prelude.split(PIECES))
            text = PIECES.join([*pieces, *(kernel.text for kernel in self.kernels), printed.entry])
            function = CFunction(text, _ENTRY, printed.given)
            self._functions = [function, *(each for dtype in printed.sorted for each in sorting(dtype))]
            self.host = "\n".join(printed.lines)
            names = {**printed.names, "run": self._run, "row": function.row, "threads": torch.get_num_threads}
            names |= {"order_of": order_of, "empty": torch.empty, "zeros": torch.zeros, "cpu": CPU}
            self._names = names
            self.body = function_of_lines(printed.lines, names, f"{parts[0].bound.statement.text} in C")
            self.text = text

    def compile(self) -> None:
        """Print all, and have it compiled: what a worker does."""
        try:
            self._print()
        except NotInC as error:
            self._refused = str(error)
        for each in self._functions:
            each.request()

    def attempt(
        self, pool: Pool, extents: Lists, shapes: Lists, initial: Tensor | None, *, wait: bool = False
    ) -> Made | None:
        """Run a call by `body`; `None`: that is not compiled yet, or with `wait`: it cannot be.

        A statement that runs again is compiled, after a while or at once.
        """
        if not self.compiled:
            self._calls += 1
            if wait or self._waits or not background() or sum(map(math.prod, extents)) > _LARGE:
                self.wait()
            elif self._calls > _PATIENCE:
                self.request()
            if not self.text or any(each.run is None for each in self._functions):
                return None
            self._names["run"] = self._functions[0].run
            self.compiled = True
        return self.body(pool, extents, shapes, initial)

    @property
    def error(self) -> str:
        """Why it cannot be compiled; empty where it can, or nothing is known yet."""
        return self._refused or next((each.error for each in self._functions if each.error), "")

    def request(self) -> None:
        """Have it compiled while other code serves."""
        if self._later:
            self._later = False
            submit(self)
        elif self.text:
            self.compile()

    def wait(self) -> None:
        """Return when it is compiled, or cannot be."""
        self._later = False
        self.compile()
        for each in self._functions:
            each.wait()

    def described(self) -> Description:
        """Describe what a call runs."""
        state = "library calls serve until it is compiled"
        if self.text and self._functions[0].run is not None:
            state = "compiled" + self._functions[0].alone * ", for one thread: its compiler's OpenMP is not loaded"
        if self.error:
            state = f"library calls serve, as it could not be compiled: {self.error}"
        why = "rows share what is read, and none is written twice"
        walked = (kernel.structure[0] for kernel in self.kernels if kernel.structure)
        choices = [("structure", f"entries of {index} in the order of their values", why) for index in walked]
        return Description(f"one C function; {state}", sources=(self,), choices=tuple(choices), torch_code=self.host)

    @staticmethod
    def _run(*_: Any) -> Any:
        raise AssertionError("called before it was compiled")


def unpacking(names: Iterable[Sequence[str]], lists: str) -> str:
    """The line that names the numbers of some lists."""
    text = "".join(f"({''.join(f'{name}, ' for name in each)}), " if each else "_, " for each in names)
    return f"({text}) = {lists}"


class _Printed:
    """The entry of the C text, and the lines of `body`."""

    def __init__(
        self,
        parts: Sequence[Part],
        bounds: Sequence[Bound],
        kernels: Sequence[CKernel],
        indices: Sequence[int],
        tensors: int,
    ) -> None:
        self.arguments: dict[str, str] = {}
        self.numbers: dict[str, str] = {}
        self.names: dict[str, Any] = {}
        self.sorted: dict[torch.dtype, None] = {}
        self.made: dict[str, tuple[str, str]] = {}
        self.calls: list[str] = []
        given = sorted({part.output for part in parts if part.shape is None})
        self.lines = ["def body(pool, extents, shapes, initial):"]
        self.lines += [f"({''.join(f't{n}, ' for n in range(tensors))}) = pool"] if tensors else []
        sizes = [[f"e{n}_{i}" for i in range(many)] for n, many in enumerate(indices)]

        def texts(extents: Sequence[Extent]) -> list[str]:
            return [str(each) if isinstance(each, int) else sizes[each[0]][each[1]] for each in extents]

        shapes = {
            p.output: [f"s{p.output}_{a}" for a in range(len(p.bound.layout.output_plain))]
            if p.shape is None
            else texts(p.shape)
            for p in parts
        }
        self.lines += [unpacking(sizes, "extents"), unpacking([shapes[n] for n in given], "shapes")]
        read = {p.places[i] for p, k in zip(parts, kernels, strict=True) for i in _read(p, k)}
        used = {place for place in read if 0 <= place < NOWHERE}
        for n in sorted(used):
            self.lines += [f"if not t{n}.is_contiguous():", f"    t{n} = t{n}.contiguous()"]
        for part, bound, kernel in zip(parts, bounds, kernels, strict=True):
            places = dict(zip(map(str, bound.layout.tensors), part.places, strict=True))
            where = {name: f"t{n}" if n >= 0 else f"out{-1 - n}" for name, n in places.items()}
            if any(places.get(name) == NOWHERE for name in kernel.pointers):
                raise NotInC("static table that is known in part")
            own = texts(part.extents)
            letters = dict(zip(bound.layout.indices, own, strict=True))
            out = where[OUTPUT] = f"out{part.output}"
            for copy in kernel.copies:
                source, name = where[copy.source.name], f"{where[copy.source.name]}_{copy.swapped}"
                line = f"{name} = {source}.transpose({copy.swapped}, -1).contiguous()"
                self.lines += [line] if line not in self.lines else []
                where[copy.copy.name] = name
            known = {
                f"{name}_{axis}": f"{where[name]}.shape[{axis}]" if n >= 0 else shapes[-1 - n][axis]
                for (name, n), rank in zip(places.items(), bound.layout.ranks, strict=True)
                for axis in range(rank)
            }
            known |= {f"{OUTPUT}_{axis}": text for axis, text in enumerate(shapes[part.output])} | letters
            if kernel.structure is not None:
                index, rows = kernel.structure
                self.sort(bound.index_dtypes[bound.layout.tensors.index(index)], where, index, _text(rows, known))
            first = bound is part.bound
            where[INITIAL] = "initial" if first else out
            if first:
                self.fill(part, bound, kernel, out, shapes[part.output])
            pointers = [self.argument(where[name]) for name in kernel.pointers]
            numbers = [self.number(known[name]) for name in kernel.numbers]
            work = " * ".join(letters.values()) or "1"
            numbers.append(self.number(f"threads() if {work} > {_DIVIDED} else 1"))
            self.calls.append(f"{kernel.name}({', '.join([*pointers, *numbers])})")
        sorted_ = {*chain(*self.made.values())}
        passed = [name if name in sorted_ else f"{name}.data_ptr()" for name in self.arguments] + [*self.numbers]
        results = "".join(f"out{n}, " for n in given)
        self.lines += [f"if run(row({', '.join(passed)})):", "    raise MemoryError", f"return {results}"]
        self.given = len(passed)
        head = [f"  void *{p} = (void *)given[{n}];" for n, p in enumerate(self.arguments.values())]
        head += [f"  const long {each} = given[{n}];" for n, each in enumerate(self.numbers.values(), len(head))]
        lines = [f"long {_ENTRY}(const long *given) {{", *head, f"  return {' || '.join(self.calls)};", "}\n"]
        self.entry = "\n".join(lines)

    def argument(self, name: str) -> str:
        return self.arguments.setdefault(name, f"p{len(self.arguments)}")

    def number(self, text: str) -> str:
        return self.numbers.setdefault(text, f"n{len(self.numbers)}")

    def sort(self, dtype: torch.dtype, where: dict[str, str], index: str, rows: str) -> None:
        """Sort entries, once for all statements that walk them."""
        made = f"{where[index]}, {rows}"
        if made not in self.made:
            n = len(self.made)
            self.made[made] = f"begin{n}", f"order{n}"
            self.sorted[dtype] = None
            # What holds them lives as long as the call.
            self.lines.append(f"begin{n}, order{n}, kept{n} = order_of({made})")
        where["begin"], where["order"] = self.made[made]

    def fill(self, part: Part, bound: Bound, kernel: CKernel, out: str, shape: Sequence[str]) -> None:
        """Allocate an output, with what it holds before the first statement."""
        self.names[f"dtype{part.output}"] = bound.out_dtype
        # Sizes one by one take torch a third less time than a tuple, and `torch.device(...)` is another default.
        made = f"({', '.join(shape) or '()'}, dtype=dtype{part.output}, device=cpu)"
        if bound.has_initial:
            self.lines.append(f"initial = initial.expand(({''.join(f'{s}, ' for s in shape)})).contiguous()")
        self.lines.append(f"{out} = {'zeros' if kernel.filled else 'empty'}{made}")


def _read(part: Part, kernel: CKernel) -> list[int]:
    """The positions of the tensors of a statement that its kernel reads, or that entries are sorted of."""
    names = {*kernel.pointers, *(kernel.structure or ())[:1], *(copy.source.name for copy in kernel.copies)}
    return [at for at, name in enumerate(part.bound.layout.tensors) if name in names]


def _text(size: Expr, names: Mapping[str, str]) -> str:
    """A size of a kernel as it is called in `body`."""
    if isinstance(size, Const):
        return str(int(size.value))
    if isinstance(size, Op):
        left, right = (_text(each, names) for each in size.args)
        return f"({left} {'+' if size.name == 'add' else '*'} {right})"
    assert isinstance(size, Size)
    return names[size.name]
