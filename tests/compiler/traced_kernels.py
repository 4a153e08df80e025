"""Traced graphs with launches of generated kernels, run on a CPU by Triton's interpreter."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import fx
from torch._higher_order_ops import triton_kernel_wrap as wrap
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.compiler.interpreted import Ranges

__all__ = ["Interpreted", "launches"]


def launches(graph: fx.GraphModule) -> list[fx.Node]:
    """The launches in a graph."""
    return [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]


class Interpreted(fx.Interpreter):
    """Runs a graph; its kernels are interpreted.

    Args:
        graph: the graph.
        ranges: of the fixture `interpreter`.
    """

    def __init__(self, graph: fx.GraphModule, ranges: Ranges) -> None:
        super().__init__(graph)
        self.ranges = ranges

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "triton_kernel_wrapper" not in str(target):
            return super().call_function(target, args, kwargs)
        kernel: Any = wrap.kernel_side_table.get_kernel(kwargs["kernel_idx"])
        constants = wrap.kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        cloned = {name: kwargs["kwargs"][name].clone() for name in kwargs.get("tensors_to_clone", ())}
        while not isinstance(kernel, JITFunction):
            kernel = kernel.fn
        given = {**kwargs["kwargs"], **cloned, **constants}
        self.ranges.enter(tuple(given.values()))
        _interpreted(kernel)[kwargs["grid"][0]](**given)
        return cloned or None


def _interpreted(kernel: Any) -> Any:
    """The kernel's function for the interpreter, and so what it calls."""
    function: FunctionType = kernel.fn
    names = dict(function.__globals__)
    for name, value in names.items():
        if isinstance(value, JITFunction) and value is not kernel:
            names[name] = _interpreted(value)
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return InterpretedFunction(copied)  # type: ignore[no-untyped-call]
