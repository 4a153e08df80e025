"""Print a graph as straight-line Python: ATen calls for structures and memory, launches for kernels.

The text is that of an operator of `runtime.artifact`, which no call takes yet, and what a person reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from insum_nn.compiler.codegen.triton import TritonKernel, print_kernel
from insum_nn.compiler.ir.graph import Fill, Graph, Launch, Structure
from insum_nn.compiler.ir.nodes import (
    Buffer,
    Const,
    Expr,
    Op,
    Size,
    walk,
)

__all__ = ["GraphText", "print_graph"]


@dataclass(frozen=True, slots=True)
class GraphText:
    """A graph as text.

    Attributes:
        text: a module with the function `run`; it expects the names `kernel_0`, ..., `wrap` and `torch`.
        kernels: the kernels that it launches, in order.
        tensors: its tensor parameters, in order.
        sizes: its integer parameters behind them: sizes that no tensor shows.
    """

    text: str
    kernels: tuple[TritonKernel, ...]
    tensors: tuple[str, ...]
    sizes: tuple[str, ...]


def print_graph(graph: Graph) -> GraphText:
    """Print the graph as Python."""
    shown: dict[str, str] = {}
    for buffer in graph.inputs:
        for axis, extent in enumerate(buffer.shape):
            if isinstance(extent, Size):
                shown.setdefault(extent.name, f"{buffer.name}.shape[{axis}]")
    sizes = list(dict.fromkeys(node.name for node in walk(graph) if isinstance(node, Size) and node.name not in shown))
    device = f"{graph.inputs[0].name}.device"
    lines: list[str] = []
    kernels: list[TritonKernel] = []
    for node in graph.nodes:
        if isinstance(node, Structure):
            lines.append(f"{node.result.name} = {_structure(node)}")
        elif isinstance(node, Fill):
            shape = "".join(f"{_size(extent)}, " for extent in node.buffer.shape)
            make = "torch.empty((" if node.value is None else "torch.full(("
            value = "" if node.value is None else f", {node.value}"
            lines.append(
                f"{node.buffer.name} = {make}{shape}){value}, dtype=torch.{node.buffer.dtype}, device={device})"
            )
        else:
            assert isinstance(node, Launch)
            kernel = print_kernel(node.kernel)
            arguments = [*(buffer.name for buffer in kernel.buffers), *kernel.sizes]
            options = f"num_warps={node.warps}, num_stages={node.stages}"
            number = len(kernels)
            lines.append(f"wrap(kernel_{number})[({_size(kernel.grid)},)]({', '.join(arguments)}, {options})")
            kernels.append(kernel)
    lines.append(f"return {', '.join(buffer.name for buffer in graph.outputs)}")
    used = {name for kernel in kernels for name in kernel.sizes}
    used |= {node.name for expr in _extents(graph, kernels) for node in walk(expr) if isinstance(node, Size)}
    lines = [*(f"{name} = {text}" for name, text in shown.items() if name in used), *lines]
    names = tuple(buffer.name for buffer in graph.inputs)
    parameters = [*(f"{name}: torch.Tensor" for name in names), *(f"{name}: int" for name in sizes)]
    head = f"def run({', '.join(parameters)}) -> torch.Tensor:"
    return GraphText("\n".join([head, *(f"    {line}" for line in lines)]) + "\n", tuple(kernels), names, tuple(sizes))


def _extents(graph: Graph, kernels: Iterable[TritonKernel]) -> Iterator[Expr]:
    """Yield the extents that the text computes: of structures, of memory, of grids."""
    for node in graph.nodes:
        if isinstance(node, Structure) and node.extent is not None:
            yield node.extent
        elif isinstance(node, Fill):
            yield from node.buffer.shape
    yield from (kernel.grid for kernel in kernels)


def _structure(node: Structure) -> str:
    first = node.inputs[0].name
    if node.kind == "order":
        return f"torch.sort({_flat(node.inputs[0])}, stable=True)[1]"
    if node.kind == "take":
        return f"torch.index_select({_flat(node.inputs[0])}, 0, {node.inputs[1].name})"
    assert node.extent is not None
    values = f"torch.arange({_size(node.extent)} + 1, dtype={first}.dtype, device={first}.device)"
    return f"torch.searchsorted({_flat(node.inputs[0])}, {values})"


def _flat(buffer: Buffer) -> str:
    return buffer.name if len(buffer.shape) == 1 else f"{buffer.name}.flatten()"


def _size(expr: Expr) -> str:
    """Print an expression of sizes in Python."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Size):
        return expr.name
    assert isinstance(expr, Op)
    left, right = (_size(arg) for arg in expr.args)
    return f"(({left} + {right} - 1) // {right})" if expr.name == "cdiv" else f"({left} {_SIGNS[expr.name]} {right})"


_SIGNS = {"add": "+", "mul": "*"}
