"""What a recorded call keeps for its gradients: nothing that they do not read."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn.compiler.api import Sums, multilinear

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"


def tensors(*learned: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "Val": torch.rand(6, generator=generator, dtype=torch.float64),
        "B": torch.rand(5, 3, generator=generator, dtype=torch.float64),
        "C": torch.rand(4, 3, generator=generator, dtype=torch.float64),
        "Row": torch.tensor([0, 0, 1, 3, 3, 3]),
        "Col": torch.tensor([4, 1, 1, 0, 2, 4]),
    }
    return {name: tensor.requires_grad_(name in learned) for name, tensor in made.items()}


def recorded(expression: str, named: dict[str, Tensor], **arguments: object) -> tuple[Tensor, set[str]]:
    """The result, and which of the tensors autograd keeps."""
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = insum_nn.insum(expression, tensors=named, **arguments)
    known = {"@result": result, **named}
    return result, {name for name, tensor in known.items() if tensor.data_ptr() in kept}


@pytest.mark.parametrize(
    ("learned", "expected"),
    [
        (("B",), {"Val", "Row", "Col"}),
        (("Val",), {"B", "Row", "Col"}),
        (("Val", "B"), {"Val", "B", "Row", "Col"}),
        (("C",), set()),
        (("B", "C"), {"Val", "Row", "Col"}),
    ],
)
def test_only_what_gradients_read_is_kept(learned: tuple[str, ...], expected: set[str]):
    named = tensors(*learned)
    result, kept = recorded(SPMM, named)
    assert kept == expected
    seed = torch.rand(4, 3, dtype=torch.float64)
    got = torch.autograd.grad(result, [named[name] for name in learned], seed)
    again = {name: tensor.detach().clone().requires_grad_(name in learned) for name, tensor in named.items()}
    rows = again["C"].index_add(0, again["Row"], again["Val"][:, None] * again["B"][again["Col"]])
    want = torch.autograd.grad(rows, [again[name] for name in learned], seed)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_factor_that_stands_twice_is_kept():
    x = torch.rand(4, dtype=torch.float64, requires_grad=True)
    result, kept = recorded("s += X[i] * X[i]", {"X": x})
    assert kept == {"X"}
    torch.testing.assert_close(torch.autograd.grad(result, x)[0], 2 * x.detach())


def test_what_is_not_kept_may_be_written_to():
    named = tensors("B", "C")
    result = insum_nn.insum(SPMM, tensors=named)
    want = torch.zeros(5, dtype=torch.float64).index_add(0, named["Col"], named["Val"])
    with torch.no_grad():
        named["B"].mul_(3)
        named["C"].zero_()
    (got,) = torch.autograd.grad(result.sum(), named["B"], retain_graph=True)
    torch.testing.assert_close(got, want[:, None].expand(5, 3))
    # What was kept is guarded as in any operator of torch's.
    named["Val"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), named["B"])


def test_second_derivatives_of_what_was_not_kept():
    named = tensors("B")
    result, _ = recorded(SPMM, named)
    seed = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(result, named["B"], seed, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), seed)
    dense = torch.zeros(4, 5, dtype=torch.float64).index_put(
        (named["Row"], named["Col"]), named["Val"], accumulate=True
    )
    torch.testing.assert_close(second, 2 * dense @ dense.T @ seed.detach())


@pytest.mark.parametrize(
    ("activation", "expected"), [("relu", {"Val", "Row", "Col", "@result"}), (None, {"Val", "Row", "Col"})]
)
def test_an_activation_keeps_the_result_and_a_cast_does_not(activation: str | None, expected: set[str]):
    named = tensors("B")
    program = insum_nn.compile(SPMM, activation=activation, out_dtype=torch.float32)
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = program(tensors=named)
    assert {n for n, t in {"@result": result, **named}.items() if t.data_ptr() in kept} == expected
    assert result.dtype == torch.float32
    (got,) = torch.autograd.grad(result.sum(), named["B"])
    want = torch.zeros(5, dtype=torch.float64).index_add(0, named["Col"], named["Val"])
    torch.testing.assert_close(got, want[:, None].expand(5, 3))


@pytest.mark.parametrize("operator", ["max=", "min="])
def test_extrema_keep_everything(operator: str):
    named = tensors("B")
    _, kept = recorded(f"C[Row[p],n] {operator} Val[p] * B[Col[p],n]", named)
    assert kept == {"@result", *named}


class Products(Sums):
    """Sums that are each the product of the three others, cell by cell; what they made is watched."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def run(
        self,
        requested: Sequence[str],
        operands: Mapping[str, Tensor],
        initial: Tensor | None = None,
        *,
        plain: bool = False,
    ) -> dict[str, Tensor]:
        self.alive.append(sum(made() is not None for made in self.made))
        found = {}
        for name in requested:
            a, b, c = (tensor for other, tensor in operands.items() if other != name)
            found[name] = a * b * c
            self.made.append(weakref.ref(found[name]))
        return found


def test_parts_of_gradients_are_freed_once_they_were_added():
    """Those of weights of edges are as large as all else of a layer together."""
    named = {name: torch.rand(5, dtype=torch.float64, requires_grad=True) for name in "xywz"}
    sums = Products()
    made = multilinear(sums, ("x", "y", "w"), named, plain=True)
    got = torch.autograd.grad(sum(each.sum() for each in made.values()), list(named.values()))
    # The results, then the first parts of all gradients.
    assert sums.alive == [0, 3, 6, 7]
    x, y, w, z = (tensor.detach() for tensor in named.values())
    for own, want in zip(got, (z * (w + y), z * (w + x), z * (y + x), y * w + x * w + x * y), strict=True):
        torch.testing.assert_close(own, want)


class Views(Products):
    """The same, of which each is a view of other memory, as weights are of which a kernel has several axes."""

    def run(
        self,
        requested: Sequence[str],
        operands: Mapping[str, Tensor],
        initial: Tensor | None = None,
        *,
        plain: bool = False,
    ) -> dict[str, Tensor]:
        return {name: made[None].reshape(-1) for name, made in super().run(requested, operands, plain=plain).items()}


def test_torch_adds_to_gradients_in_place():
    """Of a tensor that several calls read: a sum in new memory is a third tensor of that size."""
    leaves = {name: torch.rand(5, dtype=torch.float64, requires_grad=True) for name in "xyw"}
    named = {name: leaf * 1 for name, leaf in leaves.items()}
    made = [multilinear(Views(), ("z",), named, plain=True)["z"] for _ in range(2)]
    with torch.profiler.profile() as profile:
        torch.autograd.backward(made, [torch.ones_like(each) for each in made])
    names = [event.name for event in profile.events() or ()]
    assert names.count("aten::add_") == 3
    assert "aten::add" not in names
    x, y, w = (leaf.detach() for leaf in leaves.values())
    for leaf, want in zip(leaves.values(), (2 * y * w, 2 * x * w, 2 * x * y), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, want)
