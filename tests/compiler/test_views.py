"""Views of one tensor that are made again at each call, as `row, col = edge_index` makes them."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import insum
from insum_nn.compiler.kernels import c_structures
from insum_nn.errors import InsumRangeError
from insum_nn.tensor_cache import Kept, same_view

STATEMENT = "Y[Dst[e],f] += X[Src[e],f]"


def aggregate(x: Tensor, edges: Tensor, **more: bool) -> Tensor:
    src, dst = edges
    return insum(STATEMENT, X=x, Src=src, Dst=dst, out_shape=(x.shape[0], None), **more)


def exact(x: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the entries of an index tensor were read."""
    counts = {"read": 0}
    read = Kept.read

    def reading(*args: Any) -> Kept:
        counts["read"] += 1
        return read(*args)

    monkeypatch.setattr(Kept, "read", reading)
    # Not by the C function, which an earlier test may have had compiled.
    monkeypatch.setattr(c_structures, "sorting", functools.cache(lambda _: (None, SimpleNamespace(run=None))))
    return counts


@pytest.mark.library_calls
def test_views_are_checked_once(counted):
    edges = torch.randint(20, (2, 90))
    x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        y = aggregate(x, edges)
        torch.testing.assert_close(y, exact(x, edges))
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        (expected,) = torch.autograd.grad(exact(x, edges).square().sum(), x)
        torch.testing.assert_close(grad, expected)
    assert counted == {"read": 2}


def test_a_write_to_what_is_viewed_is_noticed():
    edges, x = torch.randint(20, (2, 90)), torch.randn(20, 3, dtype=torch.float64)
    aggregate(x, edges)
    edges[1] = edges[1].flip(0)
    torch.testing.assert_close(aggregate(x, edges), exact(x, edges))
    edges[0, 5] = 20
    with pytest.raises(InsumRangeError):
        aggregate(x, edges)


def test_a_write_that_torch_does_not_count_is_noticed_on_request():
    edges, x = torch.randint(20, (2, 90)), torch.randn(20, 3, dtype=torch.float64)
    aggregate(x, edges)
    edges.numpy()[1] = edges.numpy()[1][::-1].copy()
    torch.testing.assert_close(aggregate(x, edges, validate=True), exact(x, edges))
    torch.testing.assert_close(aggregate(x, edges), exact(x, edges))


def test_other_elements_are_other_tensors():
    base = torch.randint(20, (4, 90))
    x = torch.randn(20, 3, dtype=torch.float64)
    for edges in (base[:2], base[2:], base[::2], base[:2, 3:50], base[:2, 1:90:2], base[:, :45].reshape(2, 90), base):
        pair = edges if edges.shape[0] == 2 else edges[1:3]
        torch.testing.assert_close(aggregate(x, pair), exact(x, pair))
    assert same_view(base) is base
    assert same_view(base[0]) is same_view(base[:2][0])
    assert same_view(base[0]) is not same_view(base[1])
    assert same_view(base[0]) is not same_view(base[0, :30])
    assert same_view(base[0, ::3]) is not same_view(base[0, :30])


def test_another_storage_is_another_tensor():
    base, x = torch.randint(20, (2, 90)), torch.randn(20, 3, dtype=torch.float64)
    before = base[0]
    aggregate(x, base)
    base.set_(torch.randint(20, (2, 90)))
    assert same_view(before) is not same_view(base[0])
    torch.testing.assert_close(aggregate(x, base), exact(x, base))


@pytest.mark.parametrize("route", ["library", pytest.param("c", marks=pytest.mark.c)])
def test_nothing_outlives_what_is_viewed(route: str):
    edges, x = torch.randint(20, (2, 90)), torch.randn(20, 3, requires_grad=True)
    aggregate(x, edges).sum().backward()
    kept = [weakref.ref(edges), weakref.ref(same_view(edges[0])), weakref.ref(same_view(edges[1]))]
    del edges
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


def test_few_views_of_a_tensor_are_kept():
    order, x = torch.randperm(200), torch.randn(200, 2)
    first = weakref.ref(same_view(order[:10]))
    for at in range(0, 200, 10):
        torch.testing.assert_close(insum("y[i,f] = x[At[i],f]", x=x, At=order[at : at + 10]), x[order[at : at + 10]])
    gc.collect()
    assert first() is None


def test_inference_mode_keeps_nothing_of_its_own_tensors():
    with torch.inference_mode():
        edges, x = torch.randint(20, (2, 90)), torch.randn(20, 3, dtype=torch.float64)
        for _ in range(2):
            torch.testing.assert_close(aggregate(x, edges), exact(x, edges))
            edges[1] = edges[1].flip(0)


def test_transforms_see_the_views_themselves():
    edges, x = torch.randint(20, (3, 2, 90)), torch.randn(20, 3, dtype=torch.float64)
    found = torch.vmap(lambda each: aggregate(x, each))(edges)
    torch.testing.assert_close(found, torch.stack([exact(x, each) for each in edges]))


def test_facts_of_a_caller_are_verified_once_for_views():
    facts = {"Dst": insum_nn.IndexFacts(sorted=True)}
    program = insum_nn.compile(STATEMENT, facts=facts)
    edges, x = torch.randint(20, (2, 90)), torch.randn(20, 3, dtype=torch.float64)
    edges[1] = edges[1].sort().values
    for _ in range(2):
        y = program(X=x, Src=edges[0], Dst=edges[1], out_shape=(20, None))
        torch.testing.assert_close(y, exact(x, edges))
        # The claim does not hold from now on, and is not used.
        edges[1] = edges[1].flip(0)
