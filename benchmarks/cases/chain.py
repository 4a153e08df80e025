"""A graph's matrix times features times a weight: one statement, compared with two separate products.

The statement may run as two stages in either order; each is timed, and so is the one that the program chooses. With
bias and ReLU these are part of the statement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.graphs import pattern
from benchmarks.registry import Floor, Problem, Setting, Unavailable, Work, case
from insum_nn import IndexFacts, Options, compile
from insum_nn.compiler.api import Program

__all__ = ["chain", "chain_step"]

STATEMENT = "C[Row[p],n] += Val[p] * X[Col[p],k] * W[k,n]"
FACTS = {
    "Row": IndexFacts(sorted=True, masked=False, proven=True),
    "Col": IndexFacts(masked=False, proven=True),
}
TESTS = ("tests/compiler/test_statement_sequence.py", "tests/compiler/test_epilogue.py")
# A X is rounded to the operands' dtype before its product with W.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
LOOSE = {torch.float32: 1e-4, torch.float16: 2e-2}


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True).requires_grad_()


def _product(values: Tensor, x: Tensor, w: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, row, values[:, None] * x.index_select(0, col)) @ w


def _bias(product: Tensor) -> Tensor:
    """Return a bias that keeps every value far from zero, so that its ReLU passes whole columns or none of them.

    A value near zero is positive or negative as its rounding goes, and its gradient passes the ReLU or does not: with a
    random bias every provider's gradients in float16 differ from the oracle's, by up to 15 %. With this one the gate
    compares the gradients at the same tolerance as the outputs.
    """
    bias = torch.full_like(product[0], 1.25 * product.abs().max().item())
    bias[1::2] *= -1
    return bias


def _in_order(named: dict[str, Tensor], rows: int, activation: str | None, dense_first: bool) -> Work:
    """Run the two statements of one order by hand, forward only."""
    named = {name: tensor.detach() for name, tensor in named.items()}
    sparse = compile("T[Row[p],k] += Val[p] * X[Col[p],k]", facts=FACTS, activation=activation if dense_first else None)
    dense = compile("C[i,n] += X[i,k] * W[k,n]", activation=None if dense_first else activation)
    index = {name: named[name] for name in ("Row", "Col", "Val")}
    start = {"C": named["C"]} if "C" in named else {}

    def product_first() -> Tensor:
        between = dense(X=named["X"], W=named["W"])
        initial = {"T": named["C"]} if start else {}
        return sparse(tensors={**index, "X": between, **initial}, out_shape=(rows, None))

    def sum_first() -> Tensor:
        between = sparse(tensors={**index, "X": named["X"]}, out_shape=(rows, None))
        return dense(tensors={"X": between, "W": named["W"], **start})

    return Work(product_first if dense_first else sum_first)


GRID: dict[str, Any] = {
    "graph": ("ppi", "artist"),
    "k": (32, 64, 128),
    "n": (32, 64, 128),
    "end": ("linear", "bias_relu"),
    "dtype": ("float32", "float16"),
}


@case("chain", tests=TESTS, **GRID, quick={"k": (64, 128), "n": (64, 128)})
def chain(setting: Setting, *, graph: str, k: int, n: int, end: str, dtype: str) -> Problem:
    """A X W, and with bias and ReLU: every order by itself."""
    return _problem(setting, graph, k, n, end, dtype, step=False)


@case("chain_step", tests=TESTS, **GRID, quick={"k": (64, 128), "n": (64, 128)})
def chain_step(setting: Setting, *, graph: str, k: int, n: int, end: str, dtype: str) -> Problem:
    """A X W, and with bias and ReLU, with the gradients of X, W and the bias."""
    return _problem(setting, graph, k, n, end, dtype, step=True)


def _problem(setting: Setting, graph: str, k: int, n: int, end: str, dtype: str, *, step: bool) -> Problem:
    kind = getattr(torch, dtype)
    nodes, row, col = pattern(setting, graph)
    generator = setting.generator()
    values = torch.randn(row.numel(), generator=generator, device=setting.device).to(kind)
    features = torch.randn(nodes, k, generator=generator, device=setting.device).to(kind)
    weight = (torch.randn(k, n, generator=generator, device=setting.device) / k**0.5).to(kind)
    full = end == "bias_relu"
    bias = _bias(_product(values.float(), features.float(), weight.float(), row, col)).to(kind)

    def given(options: Options) -> tuple[Program, dict[str, Tensor], tuple[Tensor, ...]]:
        leaves = _leaf(features, kind), _leaf(weight, kind), _leaf(bias, kind)
        named = {"Row": row, "Col": col, "Val": values, "X": leaves[0], "W": leaves[1]}
        named |= {"C": leaves[2]} if full else {}
        program = compile(STATEMENT, facts=FACTS, activation="relu" if full else None, options=options)
        return program, named, leaves if full else leaves[:2]

    def ours() -> Work:
        program, named, leaves = given(Options())
        return Work(lambda: program(tensors=named, out_shape=(nodes, None)), leaves)

    def one_of(dense_first: bool) -> Work:
        _, named, _ = given(Options())
        return _in_order(named, nodes, "relu" if full else None, dense_first)

    def csr(dense_first: bool) -> Work:
        if setting.device.type == "cpu" and kind != torch.float32:
            raise Unavailable("torch multiplies sparse halves on a GPU only")
        crow = torch.searchsorted(row, torch.arange(nodes + 1, device=row.device)).int()
        matrix = torch.sparse_csr_tensor(crow, col.int(), values, (nodes, nodes), check_invariants=False)
        x, w, b = _leaf(features, kind), _leaf(weight, kind), _leaf(bias, kind)

        def forward() -> Tensor:
            if dense_first:
                out = torch.sparse.mm(matrix, x @ w)
                return torch.relu(out + b) if full else out
            out = torch.sparse.mm(matrix, x)
            return torch.relu(torch.addmm(b, out, w)) if full else out @ w

        return Work(forward, (x, w, b) if full else (x, w))

    def exact() -> Work:
        x, w, b = _leaf(features, torch.float64), _leaf(weight, torch.float64), _leaf(bias, torch.float64)

        def forward() -> Tensor:
            out = _product(values.double(), x, w, row, col)
            return torch.relu(out + b) if full else out

        return Work(forward, (x, w, b) if full else (x, w))

    cell, entries = features.element_size(), row.numel()
    narrow = min(k, n) * cell
    floor = Floor(
        bytes=entries * (cell + 4) + 4 * nodes + nodes * (k + n) * cell + k * n * cell,
        flops=2 * entries * min(k, n) + 2 * nodes * k * n,
        gathered=entries * narrow,
        row=narrow,
        table=nodes * narrow,
    )
    orders = {
        "insum_nn/sum_first": lambda: one_of(False),
        "insum_nn/product_first": lambda: one_of(True),
    }
    theirs = {"torch_csr/sum_first": lambda: csr(False), "torch_csr/product_first": lambda: csr(True)}
    return Problem(
        providers={"insum_nn": ours, **({} if step else orders), **theirs},
        oracle=exact,
        tolerance=TOLERANCE[kind],
        tolerances=dict.fromkeys(theirs, LOOSE[kind]),
        floors={} if step else {"fwd": floor},
        modes=("fwdbwd",) if step else ("fwd",),
    )
