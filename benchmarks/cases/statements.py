"""Plain statements of all kinds, as one writes them down, against the torch calls that one would write by hand.

The statements are called directly, without a layer: what is measured is the compiler's performance on statements for
which it has no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.registry import Floor, Problem, Setting, Work, case
from insum_nn import compile

__all__ = ["statements"]


class Statement(NamedTuple):
    """A statement, or several, and what torch has for it.

    Attributes:
        text: the statement.
        by_hand: the same of its tensors, by torch.
        learned: tensors that gradients are asked of.
        shape: of the output, where the statement does not tell.
        sizes: extents that no tensor shows.
    """

    text: str
    by_hand: Callable[..., Tensor]
    learned: tuple[str, ...] = ("X",)
    shape: tuple[int | None, ...] | None = None
    sizes: Mapping[str, int] | None = None


# Graphs of a batch.
GRAPHS = 8
_SOFTMAX = "M[n] max= detach(X[n,f]); Z[n] += exp(X[n,f] - M[n]);"
_SCORES = "S[h,q,k] += Q[h,q,d] * X[h,k,d]; M[h,q] max= detach(S[h,q,k]); Z[h,q] += exp(S[h,q,k] - M[h,q]);"


def _sum(rows: Tensor, terms: Tensor, count: int) -> Tensor:
    return terms.new_zeros(count, terms.shape[1]).index_add(0, rows, terms)


def _largest(rows: Tensor, terms: Tensor, count: int) -> Tensor:
    places = rows[:, None].expand_as(terms)
    return terms.new_zeros(count, terms.shape[1]).scatter_reduce(0, places, terms, "amax", include_self=False)


def _known(rows: int) -> dict[str, Statement]:
    pool: dict[str, int] = {"p": 2, "q": 2}
    return {
        # Three quarters of the edges end at one node.
        "hub_sum": Statement("Y[H[e],f] += X[J[e],f]", lambda X, H, J: _sum(H, X[J], rows), ("X",), (rows, None)),
        "hub_max": Statement("Y[H[e],f] max= X[J[e],f]", lambda X, H, J: _largest(H, X[J], rows), ("X",), (rows, None)),
        "graph_sum": Statement("Y[B[e],f] += E[e,f]", lambda E, B: _sum(B, E, GRAPHS), ("E",), (GRAPHS, None)),
        "graph_max": Statement("Y[B[e],f] max= E[e,f]", lambda E, B: _largest(B, E, GRAPHS), ("E",), (GRAPHS, None)),
        "gather_sum": Statement("Y[e,f] = X[I[e],f] + X[J[e],f]", lambda X, I, J: X[I] + X[J]),
        "edge_relu": Statement(
            "Y[I[e],f] += relu(X[J[e],f] + E[e,f])",
            lambda X, E, I, J: _sum(I, torch.relu(X[J] + E), rows),
            ("X", "E"),
            (rows, None),
        ),
        "sum_of_all": Statement("s += E[e,f]", lambda E: E.sum(), ("E",)),
        "max_of_columns": Statement("Y[e] max= E[e,f]", lambda E: E.amax(1), ("E",)),
        "max_of_rows": Statement("Y[f] max= E[e,f]", lambda E: E.amax(0), ("E",)),
        "softmax": Statement(f"{_SOFTMAX} Y[n,f] = exp(X[n,f] - M[n]) / Z[n]", lambda X: X.softmax(1)),
        "cross_entropy": Statement(
            f"{_SOFTMAX} loss += M[n] + log(Z[n]) - X[n,T[n]]",
            lambda X, T: functional.cross_entropy(X, T, reduction="sum"),
        ),
        "attention": Statement(
            f"{_SCORES} Y[h,q,c] += exp(S[h,q,k] - M[h,q]) * V[h,k,c] / Z[h,q]",
            lambda Q, X, V: functional.scaled_dot_product_attention(Q, X, V, scale=1.0),
            ("Q", "X", "V"),
        ),
        "mean_pool": Statement(
            "Y[b,h,w] += P[b,2*h+p,2*w+q] / 4", lambda P: functional.avg_pool2d(P, 2), ("P",), (None, 56, 56), pool
        ),
        "max_pool": Statement(
            "Y[b,h,w] max= P[b,2*h+p,2*w+q]", lambda P: functional.max_pool2d(P, 2), ("P",), (None, 56, 56), pool
        ),
    }


@case("statements", tests=("tests/compiler/test_programs.py", "tests/compiler/test_generated.py"), name=(*_known(0),))
def statements(setting: Setting, *, name: str) -> Problem:
    """A statement by itself: on a GPU of 50,000 nodes and 800,000 edges, on a CPU of a twentieth."""
    scale = 100 if setting.tiny else 1 if setting.device.type == "cuda" else 20
    rows, edges, generator = 50_000 // scale, 800_000 // scale, setting.generator()
    known = _known(rows)[name]

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.device)

    def drawn(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator, device=setting.device)

    ends = drawn(rows, edges)
    hub = torch.where(torch.rand(edges, generator=generator, device=setting.device) < 0.75, rows // 3, ends)
    made: dict[str, Callable[[], Tensor]] = {
        "X": lambda: real(32, max(8, rows // 50), 32) if name == "attention" else real(rows, 64),
        "E": lambda: real(edges, 64),
        "Q": lambda: real(32, max(8, rows // 50), 32),
        "V": lambda: real(32, max(8, rows // 50), 32),
        "P": lambda: real(max(1, 512 // scale), 112, 112),
        "I": lambda: ends.sort().values,
        "J": lambda: drawn(rows, edges),
        "H": lambda: hub,
        "B": lambda: (torch.arange(edges, device=setting.device) * GRAPHS) // edges,
        "T": lambda: drawn(64, rows),
    }
    given = {each: made[each]() for each in known.by_hand.__code__.co_varnames}

    def leaves(dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            each: tensor.to(dtype, copy=True).requires_grad_() if each in known.learned else tensor
            for each, tensor in given.items()
        }

    def ours() -> Work:
        tensors = leaves(torch.float32)
        program = compile(known.text, out_shape=known.shape, sizes=known.sizes)
        call = lambda: program(tensors=tensors, sizes=known.sizes)  # noqa: E731
        return Work(call, tuple(tensors[each] for each in known.learned))

    def by_torch(dtype: torch.dtype = torch.float32) -> Work:
        tensors = leaves(dtype)
        return Work(lambda: known.by_hand(**tensors), tuple(tensors[each] for each in known.learned))

    read = sum(tensor.nbytes for tensor in given.values())
    return Problem(
        providers={"insum_nn": ours, "torch": by_torch},
        oracle=lambda: by_torch(torch.float64),
        # Sums of up to a million terms in float32.
        tolerance=1e-4,
        floors={"fwd": Floor(bytes=read, flops=0)},
        modes=("fwd", "fwdbwd"),
    )
