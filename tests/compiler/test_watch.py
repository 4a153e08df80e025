"""The statements that a call runs, as `explain` and tests see them."""

from __future__ import annotations

import threading

import pytest
import torch

from insum_nn.compiler.api import compile, statement_calls
from insum_nn.compiler.runtime.watch import watched

TEXT = "y[Row[p]] += Val[p] * x[Col[p]]"
INDEX = {"Row": torch.tensor([0, 1, 1]), "Col": torch.tensor([1, 1, 0])}


def test_calls_are_listed_in_order_with_their_tensors():
    program, total = compile(TEXT), compile("s += y[i]")
    val, x, start = torch.randn(3, requires_grad=True), torch.randn(2), torch.randn(2)

    def run() -> None:
        y = program(**INDEX, Val=val, x=x, y=start, out_shape=(2,))
        total(y=y, sizes={"i": 2})

    first, second = statement_calls(run)
    assert (first.program, second.program) == (program, total)
    assert first.tensors.keys() == {"Row", "Col", "Val", "x", "y"}
    assert (first.out_shape, second.sizes) == ((2,), {"i": 2})
    expected = program.reference(tensors=first.tensors, out_shape=(2,))
    torch.testing.assert_close(second.tensors["y"].double(), expected)
    assert TEXT in str(first.explain())


def test_calls_by_position_are_listed_once_and_compute_the_same():
    program = compile(TEXT)
    named, start = {**INDEX, "Val": torch.randn(3), "x": torch.randn(2)}, torch.randn(2)
    ordered = [named[name] for name in program.names]
    for _ in range(3):
        want = program(tensors=named, out_shape=(2,), y=start)
        found: list[torch.Tensor] = []
        (call,) = statement_calls(lambda found=found: found.append(program.run_plain(ordered, (2,), start)))
        torch.testing.assert_close(found[0], want)
        assert call.tensors["y"] is start


def test_lists_may_nest():
    program = compile("y[i] += x[i]")

    def run() -> None:
        program(x=torch.ones(1))
        assert len(statement_calls(lambda: program(x=torch.ones(2)))) == 1
        program(x=torch.ones(4))

    assert [len(call.tensors["x"]) for call in statement_calls(run)] == [1, 4]
    assert watched.get() is None


def test_other_threads_are_not_watched_and_errors_end_it():
    program = compile("y[i] += x[i]")
    other = threading.Thread(target=lambda: program(x=torch.ones(2)))

    def run() -> None:
        other.start()
        other.join()
        program(x=torch.ones(3))
        raise RuntimeError("afterwards")

    with pytest.raises(RuntimeError, match="afterwards"):
        statement_calls(run)
    assert watched.get() is None
    assert [len(call.tensors["x"]) for call in statement_calls(lambda: program(x=torch.ones(3)))] == [3]
