"""Read from library calls what `explain()` shows: code and choices."""

from __future__ import annotations

from insum_nn.compiler.ir.access import affine_terms
from insum_nn.compiler.ir.build import OUTPUT
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Load, Size
from insum_nn.compiler.runtime.library.programs import Library

__all__ = ["choices_of", "torch_code"]


def torch_code(library: Library) -> str:
    """Return the torch calls of a call as Python.

    A comment says what each numbered argument stands for. Statements that free memory are left out.
    """
    names = _Names(library)
    called = [f"# {call}: {names.argument(stands_for)}" for call, stands_for in library.graph.arguments]
    return "\n".join([*called, library.graph.code.strip()])


def choices_of(library: Library) -> tuple[tuple[str, str, str], ...]:
    """Return topic, choice and reason of every choice behind the calls."""
    names = _Names(library)
    return tuple(each.text(names.text) for each in library.made.decisions)


class _Names:
    """Expressions of the IR in the names of the statement."""

    def __init__(self, library: Library) -> None:
        self.output = library.bound.statement.output
        self.tensors = {canonical: name for name, canonical in library.names.tensors.items()}
        self.indices = {letter: name for name, letter in library.names.indices.items()}

    def text(self, expr: Expr) -> str:
        """An index, a read or a subscript, as the statement writes it."""
        if isinstance(expr, Load):
            name = self.tensors.get(expr.buffer.name, expr.buffer.name)
            return f"{name}[{','.join(map(self.text, expr.subscripts))}]" if expr.subscripts else name
        terms, offset = affine_terms(expr)
        parts = ""
        for coefficient, atom in terms:
            sign = "-" if coefficient < 0 else "+" if parts else ""
            factor = f"{abs(coefficient)}*" if abs(coefficient) != 1 else ""
            parts += f"{sign}{factor}{self.index(atom.name) if isinstance(atom, Index) else self.text(atom)}"
        return parts + (f"{offset:+d}" if parts and offset else "" if parts else str(offset))

    def index(self, letter: str) -> str:
        return self.indices.get(letter, letter)

    def argument(self, node: Buffer | Size) -> str:
        """What an argument of the printed graph is."""
        if isinstance(node, Buffer):
            return self.tensors.get(node.name, f"{self.output.name}, the initial value")
        if node.name in self.indices:
            return f"the extent of {self.indices[node.name]}"
        return f"the extent of axis {node.name.removeprefix(f'{OUTPUT}_')} of {self.output.name}"
