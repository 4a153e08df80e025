"""Show the library calls of a statement in its own names."""

from __future__ import annotations

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.build import OUTPUT, Names
from insum_nn.compiler.ir.nodes import Buffer, Size
from insum_nn.compiler.lang.bind import Bound

__all__ = ["torch_code"]


def torch_code(bound: Bound, graph: CallGraph) -> str:
    """Return the torch calls of a statement as Python.

    A comment says what each numbered argument stands for. Statements that free memory are left out.
    """
    names, output = Names(bound.statement), bound.statement.output.name
    tensors = {canonical: name for name, canonical in names.tensors.items()}
    indices = {letter: name for name, letter in names.indices.items()}

    def argument(node: Buffer | Size) -> str:
        if isinstance(node, Buffer):
            return tensors.get(node.name, f"{output}, the initial value")
        if node.name in indices:
            return f"the extent of {indices[node.name]}"
        return f"the extent of axis {node.name.removeprefix(f'{OUTPUT}_')} of {output}"

    called = [f"# {call}: {argument(stands_for)}" for call, stands_for in graph.arguments]
    return "\n".join([*called, graph.code.strip()])
