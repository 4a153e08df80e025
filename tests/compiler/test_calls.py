"""The list of torch calls that a statement becomes, and the function that is printed from it."""

from __future__ import annotations

import operator
import weakref

import torch
from torch import Tensor

from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir.nodes import Size


def two_arguments() -> CallGraph:
    graph = CallGraph()
    x, y = (graph.argument(Size(name)) for name in "AB")
    size = graph.function(getattr, (x, "shape"), {})
    graph.method("exp", (x,), {})
    total = graph.function(torch.any, (graph.function(operator.gt, (x, y), {}), [0]), {"keepdim": True})
    sized = graph.method("expand", (total, graph.function(operator.getitem, (size, slice(None)), {})), {})
    graph.finish(graph.function(torch.where, (sized, float("-inf"), x), {}))
    return graph


def test_the_text_is_the_function_that_runs():
    graph = two_arguments()
    assert graph.code.splitlines() == [
        "def forward(arg0, arg1):",
        "    getattr_1 = arg0.shape",
        "    gt = arg0 > arg1",
        "    any_1 = torch.any(gt, [0], keepdim=True)",
        "    getitem = operator.getitem(getattr_1, slice(None, None, None))",
        "    expand = any_1.expand(getitem)",
        "    where = torch.where(expand, -inf, arg0)",
        "    return where",
    ]
    x = torch.tensor([1.0, 2.0])
    assert graph.forward(x, torch.tensor([3.0, 4.0])).tolist() == [1.0, 2.0]
    assert graph(x, torch.tensor([3.0, 1.0])).tolist() == [-torch.inf] * 2


def test_names_differ_and_shadow_nothing():
    graph = CallGraph()
    value = graph.argument(Size("A"))
    names = [graph.method(name, (value,), {}).name for name in ("sum", "sum", "to", "to")]
    assert names == ["sum_1", "sum_2", "to", "to_1"]


def test_values_are_freed_after_their_last_use():
    freed: list[bool] = []
    found: list[weakref.ref[Tensor]] = []

    def made(x: Tensor) -> Tensor:
        result = x + 1
        found.append(weakref.ref(result))
        return result

    def looked(x: Tensor) -> Tensor:
        freed.append(found[0]() is None)
        return x

    for function in (made, looked):
        # As a function of torch's is.
        function.__module__ = "torch"
        setattr(torch, function.__name__, function)
    try:
        graph = CallGraph()
        first = graph.function(made, (graph.argument(Size("A")),), {})
        second = graph.function(operator.mul, (first, 2), {})
        graph.finish(graph.function(looked, (second,), {}))
        assert graph.forward(torch.ones(2)).tolist() == [4.0, 4.0]
    finally:
        for function in (made, looked):
            delattr(torch, function.__name__)
    assert freed == [True]
