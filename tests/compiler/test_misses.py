"""A term that misses takes no part: not in sums, extrema, ties or gradients, whatever its factors hold.

Random statements are run with values that are not finite where only terms that miss read them, and compared with loops
over Python's own syntax tree, which know nothing of the package.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, insum
from insum_nn.compiler.kernels import sized
from insum_nn.compiler.schedule.candidates import candidates
from insum_nn.errors import InsumBackendError, InsumFormatError, InsumRangeError
from insum_nn.testing.random_programs import RandomProgram, random_program
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES, kernel_of
from tests.compiler.interpreted import interpreter
from tests.test_random_programs import bind, factors, output_shape, split, subscripts, variables

__all__ = ["interpreter"]

NAN, INF = math.nan, math.inf
Cell = tuple[str, tuple[int, ...]]


@dataclass
class Term:
    """One point of a loop nest: what it writes and reads, and the indices of each way in which it misses."""

    target: tuple[int, ...]
    reads: list[tuple[Cell, frozenset[str]]]
    number: float
    misses: list[frozenset[str]]


class Oracle:
    """The terms of a program, and what follows from them."""

    def __init__(self, program: RandomProgram) -> None:
        self.program = program
        self.left, self.operator, self.right = split(program)
        self.extents = bind(program)
        self.shape = output_shape(program, self.extents)
        self.tables = {n: t.tolist() for n, t in program.tensors.items() if not t.is_floating_point()}
        self.terms = [
            self.term(dict(zip(self.extents, at, strict=True)))
            for at in itertools.product(*map(range, self.extents.values()))
        ]

    def term(self, point: dict[str, int]) -> Term:
        misses: list[frozenset[str]] = []
        term = Term(self.place(self.left, self.shape, point, misses), [], 1.0, misses)
        for node in factors(self.right):
            if isinstance(node, ast.Subscript | ast.Name):
                own: list[frozenset[str]] = []
                name = node.value.id if isinstance(node, ast.Subscript) else node.id
                at = self.place(node, self.program.tensors[name].shape, point, own)
                misses += own
                if not own:
                    term.reads.append(((name, at), frozenset(variables(node))))
            else:
                term.number *= float(ast.literal_eval(node))
        return term

    def place(self, node: ast.expr, shape: torch.Size, point: dict[str, int], misses: list[frozenset[str]]):
        found = []
        for part, extent in zip(subscripts(node), shape, strict=True):
            at = self.position(part, point, misses)
            if at is not None and not 0 <= at < extent:
                misses.append(frozenset(variables(ast.Subscript(ast.Name("T"), part))))
            found.append(-1 if at is None else at)
        return tuple(found)

    def position(self, node: ast.expr, point: dict[str, int], misses: list[frozenset[str]]) -> int | None:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return point[name]
            case ast.UnaryOp(operand=operand):
                at = self.position(operand, point, misses)
                return None if at is None else -at
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.position(left, point, misses), self.position(right, point, misses)
                if a is None or b is None:
                    return None
                return a * b if isinstance(op, ast.Mult) else a + b if isinstance(op, ast.Add) else a - b
            case ast.Subscript():
                before = len(misses)
                at = self.place(node, self.program.tensors[node.value.id].shape, point, misses)
                if len(misses) > before:
                    return None
                entry = self.tables[node.value.id]
                for axis in at:
                    entry = entry[axis]
                if entry == -1:
                    misses.append(frozenset(variables(node)))
                return None if entry == -1 else entry
            case _:
                raise AssertionError(ast.dump(node))

    def only_missed(self) -> dict[str, Tensor]:
        """For each factor, the cells that no term reads which takes part."""
        found = {n: torch.ones(t.shape, dtype=torch.bool) for n, t in self.program.tensors.items()}
        for term in self.terms:
            for (name, at), _ in term.reads if not term.misses else ():
                found[name][at] = False
        return {name: mask for name, mask in found.items() if self.program.tensors[name].is_floating_point()}

    def varying(self) -> dict[str, Tensor]:
        """The cells of factors that vary with a miss of each term that misses and reads them."""
        found = {n: torch.ones(t.shape, dtype=torch.bool) for n, t in self.program.tensors.items()}
        for term in self.terms:
            for (name, at), labels in term.reads if term.misses else ():
                if not any(miss <= labels for miss in term.misses):
                    found[name][at] = False
        return {name: mask for name, mask in found.items() if self.program.tensors[name].is_floating_point()}

    def never_matters(self) -> dict[str, Tensor]:
        """The cells whose value nothing may depend on."""
        varying = self.varying()
        return {name: mask & varying[name] for name, mask in self.only_missed().items()}

    def live(self, tensors: dict[str, Tensor]) -> Iterator[tuple[Term, list[float]]]:
        values = {name: t.tolist() for name, t in tensors.items()}

        def value(cell: Cell) -> float:
            found = values[cell[0]]
            for at in cell[1]:
                found = found[at]
            return float(found)

        for term in self.terms:
            if not term.misses:
                yield term, [value(cell) for cell, _ in term.reads]

    def run(self, tensors: dict[str, Tensor], weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the gradients of its cells' weighted sum; the initial value's under the output's name."""
        program = self.program
        out = torch.zeros(self.shape, dtype=torch.float64)
        grads = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in tensors.items() if t.is_floating_point()}
        by_cell: dict[tuple[int, ...], list[tuple[Term, list[float], float]]] = {}
        for term, values in self.live(tensors):
            by_cell.setdefault(term.target, []).append((term, values, math.prod(values) * term.number))
        start_grad = weights.clone()
        for at in itertools.product(*map(range, self.shape)):
            terms = by_cell.get(at, [])
            sums = self.operator in ("+=", "=")
            first = [] if program.initial is None else [program.initial[at].item()]
            results = [*first, *(result for _, _, result in terms)]
            if not results:
                continue
            best = sum(results) if sums else max(results) if self.operator == "max=" else min(results)
            out[at] = best
            count = 1 if sums else sum(result == best for result in results)
            start_grad[at] = weights[at] / count if sums or first == [best] else 0.0
            for term, values, result in terms:
                if sums or result == best:
                    for n, (cell, _) in enumerate(term.reads):
                        others = math.prod(values[:n]) * math.prod(values[n + 1 :]) * term.number
                        grads[cell[0]][cell[1]] += weights[at] / count * others
        if program.initial is not None:
            grads[program.output] = start_grad
        return out, grads


def poisoned(program: RandomProgram, where: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with NaN and infinities in some cells."""
    bad = torch.tensor([NAN, INF, -INF], dtype=torch.float64)
    changed = dict(program.tensors)
    for name, mask in where.items():
        drawn = bad[torch.randint(0, 3, mask.shape)]
        changed[name] = torch.where(mask, drawn, program.tensors[name].double()).to(program.tensors[name].dtype)
    return changed


def leaves_of(program: RandomProgram, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {n: t for n, t in tensors.items() if t.is_floating_point()}
    if program.initial is not None:
        named[program.output] = program.initial
    return {name: t.detach().clone().requires_grad_() for name, t in named.items()}


def agree(program: RandomProgram, options: Options) -> int:
    """Compare a program's output and gradients with the oracle's; how many cells were not finite."""
    oracle = Oracle(program)
    where = oracle.never_matters()
    tensors = poisoned(program, where)
    weights = torch.linspace(-1, 2, max(1, math.prod(oracle.shape)), dtype=torch.float64)
    weights = weights[: math.prod(oracle.shape)].reshape(oracle.shape)
    want, want_grads = oracle.run(program.tensors, weights)
    named = leaves_of(program, tensors)
    given = program.arguments() | {"tensors": {**tensors, **named}}
    got = insum(program.expression, **given, options=options)
    close = {"rtol": 1e-9, "atol": 1e-10, "msg": lambda m: f"{program.expression}\n{m}"}
    torch.testing.assert_close(got.detach().double(), want, **close)
    plain = program.arguments() | {
        "tensors": {**tensors, **({} if program.initial is None else {program.output: program.initial})}
    }
    reference = insum_nn.compile(program.expression, sizes=plain.pop("sizes")).reference(**plain)
    torch.testing.assert_close(reference.double(), want, **close)
    if not named or not got.requires_grad:
        return 0
    grads = dict(
        zip(named, torch.autograd.grad(got, list(named.values()), weights.to(got), retain_graph=True), strict=True)
    )
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, want_grads[name], **{**close, "msg": lambda m, n=name: f"{program.expression}, d{n}\n{m}"}
        )
    # Whatever else is not finite, nothing reaches what only terms that miss have read.
    everything = torch.autograd.grad(got, list(named.values()), torch.full_like(got, NAN))
    unread = oracle.only_missed()
    for name, grad in zip(named, everything, strict=True):
        if name in unread:
            assert not grad[unread[name]].any(), f"{program.expression}, d{name}: {grad}"
    return sum(int(mask.sum()) for mask in where.values())


@pytest.mark.parametrize("number", range(2))
def test_random_programs(number: int):
    torch.manual_seed(number)
    found = 0
    for seed in range(5000 + 60 * number, 5060 + 60 * number):
        found += agree(random_program(seed, max_size=4), Options())
    assert found > 200


def generated(program: RandomProgram) -> RandomProgram | None:
    """The program with an operator that kernels are generated for."""
    expression = program.expression.replace(" max= ", " += ").replace(" min= ", " += ")
    return (
        replace(program, expression=expression)
        if any(t.is_floating_point() for t in program.tensors.values())
        else None
    )


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_generated_kernels(interpreter: None):
    torch.manual_seed(0)
    ran = found = 0
    for seed in range(6000, 6040):
        program = generated(random_program(seed, max_size=3, profile="smooth"))
        if program is None:
            continue
        try:
            found += agree(program, Options(backend="triton", tune=False))
            ran += 1
        except (InsumFormatError, InsumBackendError):
            continue
    assert ran > 24
    assert found > 60


# Factors of generated kernels that belong to a slot: where the slot has no entry, they are not finite.
SLOTS = {
    "group spmm": ("Val", lambda t: t["Col"] < 0),
    "block spmm": ("Val", lambda t: t["Col"] < 0),
    "mttkrp": ("V", lambda t: t["K0"] < 0),
    "batched sddmm with scatter": ("Val", lambda t: (t["Col"] < 0) | (t["Seg"] < 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_slots_without_an_entry_under_many_schedules(interpreter: None, name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    case = CASES[name]
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in case.draw(1).items()}
    want = case.oracle({n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}, 1)
    factor, missing = SLOTS[name]
    at = missing(tensors)
    values = tensors[factor].clone()
    values[at] = values.new_tensor([NAN, INF, -INF])[torch.randint(0, 3, values[at].shape)]
    tensors[factor] = values
    form, _, _ = kernel_of(case, tensors, None)
    dotted = 0
    for schedule in itertools.islice(candidates(form), 0, 24, 3):
        _, kernel, got = kernel_of(case, tensors, schedule)
        assert_matches(got, want, dtype=dtype, kind="sum")
        dotted += "tl.dot" in kernel.source.text
    assert bool(dotted) == case.dot


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize(
    ("expression", "zero"),
    [
        ("dW[k,c,d] += dO[i,d] * I[NB[k,i],c]", lambda out: out[1]),
        ("dW[k,c,d] += I[NB[k,i],c] * dO[P[i],d]", lambda out: out[1]),
        ("dI[i,c] += dO[NB[k,i],d] * W[k,c,d]", lambda out: out[5]),
        ("dI[i,c] += W[k,c,d] * dO[NB[k,i],d]", lambda out: out[5]),
    ],
)
def test_a_matrix_product_of_terms_that_all_miss_is_zero_in_a_gradient(
    interpreter: None, backend: str, expression: str, zero: Callable[[Tensor], Tensor]
):
    near = torch.randint(0, 20, (3, 40))
    near[1], near[:, 5] = -1, -1
    tensors = {
        "dO": torch.randn(40, 32) if "dW" in expression else torch.randn(20, 32),
        "I": torch.randn(20, 16),
        "W": torch.full((3, 16, 32), INF),
        "NB": near,
        "P": torch.randperm(40),
    }
    if "dW" in expression:
        tensors["dO"][:] = NAN
    named = {name: t for name, t in tensors.items() if f"{name}[" in expression.split("+=")[1]}
    program = insum_nn.compile(expression, drop_outside=True, options=Options(backend=backend, tune=False))
    got = program(**named)
    assert not zero(got).any()
    assert not got.isfinite().all()
    if backend == "triton":
        assert "tl.dot" in str(program.explain(**named))


# By hand.


@pytest.mark.parametrize("name", ["convolution by kernel map", "block spmm", "convolution's weight gradient"])
def test_no_matrix_product_is_selected_against_a_literal_zero(
    interpreter: None, name: str, monkeypatch: pytest.MonkeyPatch
):
    """A compiler was seen to take such a product for 0, and to leave it out."""
    texts: list[str] = []
    write = sized.write_kernel

    def recorded(*arguments: Any) -> Any:
        source = write(*arguments)
        texts.append(source.text)
        return source

    monkeypatch.setattr(sized, "write_kernel", recorded)
    case = CASES[name]
    torch.manual_seed(0)
    named = {n: t.half().requires_grad_() if t.is_floating_point() else t for n, t in case.draw(1).items()}
    options = Options(backend="triton", tune=False)
    program = insum_nn.compile(case.expression, facts=case.facts, out_shape=case.out_shape(1), options=options)
    out = program(tensors=named)
    torch.autograd.grad(out, [t for t in named.values() if t.requires_grad], torch.ones_like(out))
    sums = [(text, name) for text in texts for name in re.findall(r"(\w+) = tl\.dot", text)]
    assert any("tl.program_id(2)" in text for text, _ in sums)
    assert [text for text, name in sums if re.search(rf"tl\.where\(.*, {name}, 0\.0\)", text)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_an_unused_slot_of_a_grouped_matrix(dtype: torch.dtype):
    value = torch.tensor([[1, NAN], [2, 3]], dtype=dtype, requires_grad=True)
    dense = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    out = insum(
        "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]",
        Row=torch.tensor([0, 1]),
        Col=torch.tensor([[0, -1], [1, 2]]),
        Val=value,
        B=dense,
        out_shape=(2, None),
    )
    assert out.tolist() == [[1, 1], [5, 5]]
    grad = torch.full_like(out, INF)
    by_value, by_dense = torch.autograd.grad(out, (value, dense), grad)
    assert by_value.tolist() == [[INF, 0], [INF, INF]]
    assert by_dense.tolist() == [[INF, INF]] * 3


def test_slots_of_a_batch_of_grouped_matrices():
    col = torch.tensor([[[0, -1], [1, 2]], [[0, -1], [-1, 2]]])
    value, dense = torch.tensor([[1.0, NAN], [2.0, 3.0]]), torch.ones(3, 2)

    def product(col: Tensor, value: Tensor) -> Tensor:
        return insum("C[g,n] += Val[g,q] * B[Col[g,q],n]", Col=col, Val=value, B=dense)

    got = torch.func.vmap(product, (0, None))(col, value)
    assert got.tolist() == [[[1, 1], [5, 5]], [[1, 1], [3, 3]]]
    grads = torch.func.vmap(torch.func.grad(lambda v, c: product(c, v).sum()), (None, 0))(value, col)
    assert grads.tolist() == [[[2, 0], [2, 2]], [[2, 0], [0, 2]]]


def test_padding_takes_no_part_in_a_maximum():
    x = torch.tensor([-3.0, -1.0, -2.0, -5.0], requires_grad=True)
    want = torch.nn.functional.max_pool1d(x[None], 3, 1, 1)[0]
    out = insum("y[p] max= x[p+r-1]", x=x, sizes={"p": 4, "r": 3})
    assert torch.equal(out, want)
    out.sum().backward()
    assert x.grad.tolist() == [0, 3, 1, 0]
    x = torch.zeros(4, requires_grad=True)
    insum("y[p] max= x[p+r-1]", x=x, sizes={"p": 4, "r": 3}).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([5 / 6, 7 / 6, 7 / 6, 5 / 6]))


@pytest.mark.parametrize("operator", ["max=", "min="])
def test_an_unwritten_cell_passes_its_gradient_to_the_initial_value(operator: str):
    initial = torch.tensor([1.0, NAN, 2.0], requires_grad=True)
    values = torch.tensor([1.0, 7.0], requires_grad=True)
    out = insum(f"y[E[i]] {operator} v[i]", E=torch.tensor([0, -1]), v=values, y=initial)
    out.backward(torch.tensor([1.0, 10.0, 100.0]))
    assert initial.grad.tolist() == [0.5, 10, 100]
    assert values.grad.tolist() == [0.5, 0]


def test_the_text_of_a_derivative_that_reads_outside_runs():
    program = insum_nn.compile("y[p] += x[2*p+r-1] * w[r]", sizes={"p": 4})
    x, w, grad = torch.randn(6, requires_grad=True), torch.randn(3), torch.randn(4)
    program(x=x, w=w).backward(grad)
    derivative = program.grad("x")
    assert repr(derivative) == "Program('dx[2*p+r-1] += dy[p] * w[r]', drop_outside=True)"
    for found in (
        insum(derivative.expression, dy=grad, w=w, out_shape=(6,), drop_outside=True),
        insum_nn.compile(derivative.expression, drop_outside=True)(dy=grad, w=w, out_shape=(6,)),
        derivative(dy=grad, w=w, out_shape=(6,)),
        derivative.reference(dy=grad, w=w, out_shape=(6,)).float(),
    ):
        torch.testing.assert_close(found, x.grad)
    with pytest.raises(InsumRangeError, match="drop_outside=True"):
        insum(derivative.expression, dy=grad, w=w, out_shape=(6,))
    # An index that only the operand shows gets its extent from the call.
    alone = insum_nn.compile("y[p] += x[2*p+r-1]", sizes={"p": 4, "r": 3}).grad("x").expression
    got = insum(alone, dy=grad, sizes={"r": 3}, out_shape=(6,), drop_outside=True)
    torch.testing.assert_close(
        got, insum("dx[2*p+r-1] += dy[p]", dy=grad, sizes={"r": 3}, out_shape=(6,), drop_outside=True)
    )


@pytest.mark.parametrize(
    "missing", [{"A": torch.ones(3, 3)}, {"A": torch.ones(0, 3)}], ids=["some", "nothing iterated"]
)
@pytest.mark.parametrize("constant", ["-1", "3", "7"])
def test_a_constant_outside_is_an_error(missing: dict[str, Tensor], constant: str):
    expression = f"y[i] += A[i,{constant}]"
    with pytest.raises(InsumRangeError) as caught:
        insum(expression, **missing)
    error = caught.value
    assert (error.fields["tensor"], error.fields["axis"], error.fields["expected"]) == ("A", 1, 3)
    with pytest.raises(InsumRangeError):
        insum_nn.compile(expression).reference(**missing)
    assert insum("y[i] += A[i,2]", **missing).shape == missing["A"].shape[:1]


def test_a_static_entry_of_minus_one_is_not_unrolled(interpreter: None):
    tensors = {"K": torch.tensor([1, 0, -1, 2]), "I": torch.tensor([0, -1, 2, 1]), "CG": torch.randn(4)}
    x = torch.randn(5, 3)
    x[:, 2] = NAN
    program = insum_nn.compile(
        "z[b,K[p]] += CG[p] * x[b,I[p]]", static=tensors, out_shape=(None, 4), options=Options(backend="triton")
    )
    got = program(x=x, **tensors)
    want = torch.zeros(5, 4)
    want[:, 1], want[:, 2] = tensors["CG"][0] * x[:, 0], tensors["CG"][3] * x[:, 1]
    torch.testing.assert_close(got, want)
    source = str(program.explain(x=x, **tensors)).split("kernel source")[1]
    assert source.count("tl.load") == 2
    assert ">= 0" not in source


@pytest.mark.parametrize(
    ("expression", "tables"),
    [
        # Terms that miss would read entry 0 or 2 of x, others read entry 1.
        ("y[i] += A[x[I[i]],j]", {"I": [-1, 1, 1]}),
        ("y[i] += A[x[2*i-1],j]", {}),
        ("y[x[I[i]]] += B[i]", {"I": [-1, 1, 1]}),
        ("y[i] max= A[x[I[i]],j] * B[x[2*I[i]-1]]", {"I": [-1, 1, 1]}),
    ],
)
@pytest.mark.parametrize("backend", ["eager", pytest.param("c", marks=pytest.mark.c)])
def test_an_entry_that_no_term_reads_may_point_anywhere(
    backend: Literal["eager", "c"], expression: str, tables: dict[str, list[int]]
):
    given = {"x": torch.tensor([13, 1, 13]), **{name: torch.tensor(each) for name, each in tables.items()}}
    named = {"A": torch.randn(3, 2, requires_grad=True), "B": torch.randn(3, requires_grad=True)}
    program = insum_nn.compile(expression, sizes={"i": 3}, out_shape=(3,), options=Options(backend=backend))
    named = {name: tensor for name, tensor in named.items() if name in program.statement.tensors()}
    got = program(tensors={**given, **named})
    want = program.reference(tensors={**given, **named})
    torch.testing.assert_close(got.double(), want.double())
    safe = {**given, "x": torch.where(given["x"] > 2, 0, given["x"])}
    for one, other in zip(
        torch.autograd.grad(got.sum(), [*named.values()]),
        torch.autograd.grad(program(tensors={**safe, **named}).sum(), [*named.values()]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
