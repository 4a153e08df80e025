"""`StatementsProgram`: statements that run one after the other, each with its gradients, as torch records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.lang.declared_facts import Origin
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.programs import ProgramText, parse_program
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.compiler.runtime.arguments import check_kinds
from insum_nn.compiler.runtime.program import Program
from insum_nn.dtypes import is_widened
from insum_nn.errors import InsumFormatError, InsumNameError, InsumShapeError
from insum_nn.facts import IndexFacts, StaticTable
from insum_nn.tensor_cache import insert

__all__ = ["StatementsProgram"]

Shapes = Mapping[str, tuple[int | None, ...]]
# The shapes of what statements write, by those of what a call passes.
_LIMIT = 64


class StatementsProgram:
    """A program of several statements, ready to be called with tensors of any size.

    Attributes:
        text: its statements.
        programs: what runs, in order.
        options: compile options.
    """

    def __init__(
        self,
        expression: str,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shapes | None = None,
        facts: Mapping[str, IndexFacts] | None = None,
        static: Mapping[str, Tensor | StaticTable] | None = None,
        options: Options = DEFAULT,
        origin: Origin = "caller",
    ) -> None:
        check_kinds(sizes=sizes, facts=facts, static=static, options=options)
        self.text: ProgramText = parse_program(expression)
        self.options = options
        self._arguments = (expression, dict(sizes or {}), dict(out_shape or {}), facts, static, options, origin)
        self._sizes, self._out_shape = dict(sizes or {}), dict(out_shape or {})
        self.programs: tuple[Program, ...] = tuple(
            Program(
                str(step),
                sizes={name: size for name, size in self._sizes.items() if name in step.indices()},
                facts={name: each for name, each in (facts or {}).items() if name in step.index_tensors()},
                static={name: each for name, each in (static or {}).items() if name in step.tensors()},
                options=options,
                origin=origin,
            )
            for step in self.text.steps
        )
        self._inert = [frozenset(_without_gradient(program.statement)) for program in self.programs]
        self._shapes: dict[object, list[tuple[int | None, ...]]] = {}

    def __repr__(self) -> str:
        return f"StatementsProgram({str(self.text)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuilt, self._arguments)

    def __deepcopy__(self, memo: dict[int, object]) -> StatementsProgram:
        return self

    def __call__(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        out_shape: Shapes | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Any:
        """Run the statements.

        Args:
            sizes: extents of indices that no tensor shows.
            out_shape: shapes of tensors that statements write, by name; `None` entries are inferred.
            tensors: tensors by name, for names that are no Python keywords arguments.
            **named: tensors by name. One under a name that a statement writes by `+=`, `max=` or `min=` starts it.

        Returns:
            The tensor of the last statement, or the tuple of those that `return` names. In float16 and bfloat16
            programs everything is computed in float32, and what is returned is rounded.
        """
        found: dict[str, Tensor] = {**(tensors or {}), **named}
        self._check_names(found)
        dtype = next((t.dtype for t in found.values() if is_widened(t.dtype)), None)
        if dtype is not None:
            found = {name: t.to(torch.float32) if is_widened(t.dtype) else t for name, t in found.items()}
        extents = {**self._sizes, **(sizes or {})}
        shapes = self._shapes_of(found, extents, {**self._out_shape, **(out_shape or {})})
        for program, inert, shape in zip(self.programs, self._inert, shapes, strict=True):
            statement = program.statement
            given = {n: found[n].detach() if n in inert else found[n] for n in statement.tensors()}
            if (initial := found.get(statement.output.name)) is not None:
                given[statement.output.name] = initial
            own = {name: size for name, size in extents.items() if name in statement.indices()}
            found[statement.output.name] = program(sizes=own, out_shape=shape, tensors=given)
        results = tuple([found[name] for name in self.text.results])
        if dtype is not None:
            results = tuple([result.to(dtype) for result in results])
        return results if len(results) > 1 else results[0]

    def _check_names(self, passed: Mapping[str, Tensor]) -> None:
        expression = str(self.text)
        starts = {s.output.name for s in self.text.statements if s.operator != "="}
        for name in self.text.inputs:
            if name not in passed:
                raise InsumNameError(
                    f"tensor '{name}' was not passed",
                    expression=expression,
                    details=[f"passed: {', '.join(sorted(passed)) or 'none'}"],
                    fix=f"pass {name}=...",
                    tensor=name,
                )
        for name in passed:
            if name not in self.text.inputs and name not in starts:
                raise InsumNameError(
                    f"tensor '{name}' is not used by the program",
                    expression=expression,
                    details=[f"tensors of the program: {', '.join((*self.text.inputs, *self.text.written))}"],
                    fix="drop it, or use it in a statement.",
                    tensor=name,
                )

    def _shapes_of(
        self, found: Mapping[str, Tensor], sizes: Mapping[str, int], declared: Shapes
    ) -> list[tuple[int | None, ...]]:
        """Return the shape of what each program writes, as far as all that is passed shows it."""
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        key = (*shapes.items(), *sizes.items(), *declared.items())
        if any(type(extent) is not int for shape in shapes.values() for extent in shape):
            # Symbolic extents are no keys.
            return self._inferred(shapes, sizes, declared)
        known = self._shapes.get(key)
        if known is None:
            known = self._inferred(shapes, sizes, declared)
            insert(self._shapes, key, known, _LIMIT)
        return known

    def _inferred(
        self, given: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int], declared: Shapes
    ) -> list[tuple[int | None, ...]]:
        """Find extents by indices, and by entries that address axes of several tensors."""
        shapes: dict[str, list[int | None]] = {name: [*shape] for name, shape in given.items()}
        for name, shape in declared.items():
            if name not in self.text.written:
                raise InsumFormatError(
                    f"out_shape= names '{name}', which no statement writes",
                    expression=str(self.text),
                    fix=f"name one of {', '.join(self.text.written)}.",
                )
            shapes.setdefault(name, [*shape])
        statements = [*self.text.statements, *(program.statement for program in self.programs)]
        accesses = [access for s in statements for outer in (s.output, *s.reads) for access in (outer, *outer.nested())]
        extents: dict[str, int] = dict(sizes)
        for access in accesses:
            shape = shapes.setdefault(access.name, [None] * len(access.subscripts))
            if len(shape) != len(access.subscripts):
                raise InsumShapeError(
                    f"'{access.name}' has {len(shape)} dimensions, and {len(access.subscripts)} subscripts",
                    expression=str(self.text),
                    fix="give it one subscript for each dimension.",
                    tensor=access.name,
                )
        # What one pass finds, the next one uses: each finds at least one extent, or is the last.
        changed = True
        while changed:
            changed = False
            for access in accesses:
                for axis, subscript in enumerate(access.subscripts):
                    entry = subscript.indirect
                    name = subscript.plain if entry is None else str(entry)
                    if name is None:
                        continue
                    extent = shapes[access.name][axis]
                    if extent is None and name in extents:
                        shapes[access.name][axis] = extents[name]
                        changed = True
                    elif extent is not None and name not in extents:
                        extents[name] = extent
                        changed = True
        return [tuple(shapes[program.statement.output.name]) for program in self.programs]


def _without_gradient(statement: Statement) -> list[str]:
    """Return the tensors of which no derivative is left: nothing is recorded of them."""
    names = dict.fromkeys(access.name for access in statement.reads)
    return [name for name in names if not derivatives(statement, name).statements]


def _rebuilt(
    expression: str,
    sizes: dict[str, int],
    out_shape: dict[str, tuple[int | None, ...]],
    facts: Mapping[str, IndexFacts] | None,
    static: Mapping[str, Tensor | StaticTable] | None,
    options: Options,
    origin: Origin,
) -> StatementsProgram:
    return StatementsProgram(
        expression, sizes=sizes, out_shape=out_shape, facts=facts, static=static, options=options, origin=origin
    )
