"""Statements print canonically, and reading what was printed gives the same statement."""

from __future__ import annotations

import dataclasses
import math
import operator
import pickle
import random
from functools import partial
from typing import Any

import pytest

from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Factor, Index, Number, Statement, Subscript, Term
from insum_nn.errors import InsumSyntaxError, Span
from insum_nn.testing.random_programs import random_program

NOWHERE = Span(0, 0)

# What is written, and how it prints.
CANONICAL = {
    "C[i]+=A[i]": "C[i] += A[i]",
    "C [ i , j ]  +=  A [ i , k ]  *  B [ k , j ]": "C[i,j] += A[i,k] * B[k,j]",
    "\tC[i]\t=\tA[i]": "C[i] = A[i]",
    "s += x": "s += x",
    "s max= A[i]": "s max= A[i]",
    "s min=A[i]": "s min= A[i]",
    "max[i] max= min[i] * max0[i]": "max[i] max= min[i] * max0[i]",
    "C[i] += A[1*i]": "C[i] += A[i]",
    "C[i] += A[i*2]": "C[i] += A[2*i]",
    "C[i] += A[-i]": "C[i] += A[-i]",
    "C[i] += A[+i]": "C[i] += A[i]",
    "C[i] += A[i+i]": "C[i] += A[2*i]",
    "C[i] += A[3*i-i]": "C[i] += A[2*i]",
    "C[i] += A[i-3*i]": "C[i] += A[-2*i]",
    "C[i] += A[1+i+2]": "C[i] += A[i+3]",
    "C[i] += A[3-i-5]": "C[i] += A[-i-2]",
    "C[i] += A[i+2-2]": "C[i] += A[i]",
    "C[i] += A[i+0]": "C[i] += A[i]",
    "C[0] += A[007]": "C[0] += A[7]",
    "C[-0] += A[i]": "C[0] += A[i]",
    "C[i] += A[-3]": "C[i] += A[-3]",
    "C[i] += A[E[i]+E[i]]": "C[i] += A[2*E[i]]",
    "C[i] += A[2*E[j+i]-r+F[E[i]]-1]": "C[i] += A[2*E[j+i]-r+F[E[i]]-1]",
    "C[i] += A[E[i]*3]": "C[i] += A[3*E[i]]",
    "C[D[y],x] += A[y,E[r]] * B[r,x]": "C[D[y],x] += A[y,E[r]] * B[r,x]",
    "C[i] += 2 * A[i]": "C[i] += 2 * A[i]",
    "C[i] += -2 * A[i] * +3": "C[i] += -2 * A[i] * 3",
    "C[i] += 2. * .5 * 1e3 * 1E-3 * 00.50": "C[i] += 2.0 * 0.5 * 1000.0 * 0.001 * 0.5",
    "C[i] += -0.0 * A[i]": "C[i] += -0.0 * A[i]",
    "C[i] += 0.1 * 1e300 * 5e-324": "C[i] += 0.1 * 1e+300 * 5e-324",
    "C[i] += 9223372036854775807 * A[9223372036854775807*i-9223372036854775807]": (
        "C[i] += 9223372036854775807 * A[9223372036854775807*i-9223372036854775807]"
    ),
    "出力[列] += 特徴量[索引[列]] * λ": "出力[列] += 特徴量[索引[列]] * λ",
    "Größe_2[é] += _x[é]": "Größe_2[é] += _x[é]",
    "__dunder__[lambda] += None[lambda] * self": "__dunder__[lambda] += None[lambda] * self",
    # Python reads names in their NFKC form, and keyword arguments arrive in it.
    "Ｃ[ｉ] += ﬁ[ｉ]": "C[i] += fi[i]",
    "Ce\u0301[i] += A[i]": "C\u00e9[i] += A[i]",
    "e1[i] += e1e[i] * e": "e1[i] += e1e[i] * e",
    "x[i] += 1e1*e1": "x[i] += 10.0 * e1",
    "C[i] += (A[i]) * ((B[i]))": "C[i] += A[i] * B[i]",
    "C[i] += A[i]*(B[i]*x)": "C[i] += A[i] * B[i] * x",
    "C[i] += A[i]+B[i]-2*x": "C[i] += A[i] + B[i] - 2 * x",
    "C[i] += A[i]-B[i]": "C[i] += A[i] - B[i]",
    "C[i] += A[i]-(B[i]-x)": "C[i] += A[i] - (B[i] - x)",
    "C[i] += (A[i]+B[i])+(x+y)": "C[i] += A[i] + B[i] + x + y",
    "C[i] += -A[i]": "C[i] += -1 * A[i]",
    "C[i] += A[i] + -2/B[i]": "C[i] += A[i] + -2 / B[i]",
    "C[i] += A[i] * (-2)**2": "C[i] += A[i] * ((-2)**2)",
    "C[i] += --A[i]": "C[i] += 1 * A[i]",
    "C[i] += - 2": "C[i] += -2",
    "C[i] += -A[i]**2": "C[i] += -1 * (A[i]**2)",
    "C[i] += (-A[i])**-2": "C[i] += (-A[i])**-2",
    "C[i] += A[i]/B[i]/x*y": "C[i] += (A[i] / (B[i] * x)) * y",
    "C[i] += A[i]/(B[i]/x)": "C[i] += A[i] / (B[i] / x)",
    "C[i] += exp(A[i]-M[E[i]])*2": "C[i] += exp(A[i] - M[E[i]]) * 2",
    "C[i] += leaky_relu( A[i] , -.2 )": "C[i] += leaky_relu(A[i], -0.2)",
    "exp[i] += exp(exp[i])*return": "exp[i] += exp(exp[i]) * return",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_text(text: str):
    statement = parse(text)
    assert str(statement) == CANONICAL[text]
    assert statement.text == text
    again = parse(str(statement))
    assert again == statement
    assert hash(again) == hash(statement)
    assert str(again) == str(statement)


@pytest.mark.parametrize("profile", ["full", "smooth"])
def test_random_statements_read_back(profile: str):
    for seed in range(1500):
        statement = parse(random_program(seed, profile=profile).expression)
        assert parse(str(statement)) == statement
        assert str(parse(str(statement))) == str(statement)


def _expression(rng: random.Random, depth: int) -> str:
    """Random text of numbers, names, signs and functions, with and without parentheses, that Python reads too."""
    kind = rng.randrange(9) if depth else 8
    part = partial(_expression, rng, depth - 1)
    if kind < 4:
        sign = rng.choice(["+", " - ", "*", " / ", " * "])
        return f"{part()}{sign}{part()}"
    if kind == 4:
        return f"({part()})"
    if kind == 5:
        return f"{rng.choice('-+')}{part()}"
    if kind == 6:
        return f"{rng.choice(['a', 'c', '2', '(-2)', '(a - b)', 'exp(b)'])}**{rng.choice(['2', '-1', '3', '0'])}"
    if kind == 7 and rng.random() < 0.2:
        return f"exp({part()})**0.5"
    if kind == 7:
        return f"leaky_relu({part()}, -0.5)" if rng.random() < 0.3 else f"{rng.choice(['tanh', 'sin'])}({part()})"
    return rng.choice(["a", "b", "c", "2", "0.5", "3", "1e-1"])


_PYTHON: dict[str, Any] = {
    "exp": math.exp,
    "tanh": math.tanh,
    "sin": math.sin,
    "leaky_relu": lambda u, slope: u if u > 0 else u * slope,
    "add": lambda *each: sum(each),
    "mul": lambda *each: math.prod(each),
    "div": operator.truediv,
    "pow": operator.pow,
}


def _value(factor: Factor, names: dict[str, float]) -> Any:
    if isinstance(factor, Number):
        return factor.value
    if isinstance(factor, Access):
        return names[factor.name]
    return _PYTHON[factor.function](*(_value(arg, names) for arg in factor.args))


def test_expressions_mean_what_they_mean_in_python():
    rng, names, compared = random.Random(7), {"a": 1.25, "b": -0.75, "c": 3.0}, 0
    for _ in range(3000):
        text = _expression(rng, 5)
        try:
            statement = parse(f"r += {text}")
        except InsumSyntaxError:
            # Deeper than a statement may be.
            continue
        again = parse(str(statement))
        assert again == statement, text
        assert str(again) == str(statement)
        try:
            want = eval(text, {"__builtins__": {}}, {**_PYTHON, **names})
        except (ZeroDivisionError, OverflowError):
            continue
        got = math.prod(_value(factor, names) for factor in statement.factors)
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12), text
        printed = eval(str(statement).removeprefix("r += "), {"__builtins__": {}}, {**_PYTHON, **names})
        assert printed == pytest.approx(want, rel=1e-9, abs=1e-12), str(statement)
        compared += 1
    assert compared > 2000


def test_all_spellings_are_one_statement():
    spellings = ["C[i]+=A[2*i+1]*x", "C [i] += A[ 1 + i*2 ] * x", "C[i] += A[i+i+1]*x", "Ｃ[i] += A[3*i-i+1] * x"]
    assert len({parse(text) for text in spellings}) == 1


def test_other_statements_differ():
    texts = [
        "C[i] += A[i]",
        "C[i] = A[i]",
        "C[i] max= A[i]",
        "C[i] min= A[i]",
        "D[i] += A[i]",
        "C[j] += A[j]",
        "C[i] += A[i] * A[i]",
        "C[i] += A[i] * 1",
        "C[i] += A[i] * -1",
        "C[i] += A[i,i]",
        "C[i] += A[i+1]",
        "C[i] += A[2*i]",
        "C[i] += A[E[i]]",
        "C[i] += A",
        "C[i] += A[i] * (-1 * -1)",
        "C[i] += A[i] + A[i]",
        "C[i] += A[i] - A[i]",
        "C[i] += A[i] / A[i]",
        "C[i] += A[i]**2",
        "C[i] += exp(A[i])",
        "C[i] += exp[i]",
        "C[i] += detach(A[i])",
    ]
    assert len({parse(text) for text in texts}) == len(texts)


def test_spans_name_their_tokens():
    text = "C[D[y], 2*x+1] += A[y,E[r]] * -3 * alpha"
    statement = parse(text)

    def shown(span: Span) -> str:
        return text[span.start : span.stop]

    assert shown(statement.output.span) == "C[D[y], 2*x+1]"
    assert shown(statement.output.name_span) == "C"
    assert [shown(s.span) for s in statement.output.subscripts] == ["D[y]", "2*x+1"]
    assert shown(statement.output.subscripts[1].terms[0].span) == "2*x"
    first, number, scalar = statement.factors
    assert shown(first.span) == "A[y,E[r]]"
    assert shown(number.span) == "-3"
    assert shown(scalar.span) == "alpha"
    assert [shown(index.span) for index in first.indices()] == ["y", "r"]
    assert [shown(access.name_span) for access in statement.accesses()] == ["C", "D", "A", "E", "alpha"]


def test_spans_do_not_take_part_in_equality():
    assert Index("i", Span(1, 2)) == Index("i", NOWHERE)
    assert Number(2, Span(1, 2)) == Number(2, NOWHERE)


def test_what_a_statement_says_of_itself():
    statement = parse("C[Row[g],n] += Val[g,q] * B[Col[g,q],n] * Val[q,F[E[g]]] * 2 * alpha")
    assert statement.indices() == ("g", "n", "q")
    assert statement.index_tensors() == ("Row", "Col", "F", "E")
    assert statement.tensors() == ("Row", "Val", "B", "Col", "F", "E", "alpha")
    assert [access.name for access in statement.reads] == ["Val", "B", "Val", "alpha"]
    assert [access.name for access in statement.accesses()] == ["C", "Row", "Val", "B", "Col", "Val", "F", "E", "alpha"]


def test_plain_and_indirect_subscripts():
    output = parse("C[i, 1*i, i+1, 2*i, E[i], E[i]+1, 3, -i] += x").output
    assert [subscript.plain for subscript in output.subscripts] == ["i", "i", *[None] * 6]
    assert [s.indirect.name if s.indirect else None for s in output.subscripts] == [*[None] * 4, "E", *[None] * 3]


def test_nodes_are_frozen_and_pickle():
    statement = parse("C[E[i]+1] += 2 * A[i]")
    with pytest.raises(dataclasses.FrozenInstanceError):
        statement.operator = "="
    other = pickle.loads(pickle.dumps(statement))
    assert other == statement
    assert other.text == statement.text
    assert other.output.span == statement.output.span


def test_nodes_made_by_hand_print():
    i = Index("i", NOWHERE)
    subscript = Subscript((Term(-1, i, NOWHERE), Term(2, Access("E", (), NOWHERE, NOWHERE), NOWHERE)), -4, NOWHERE)
    access = Access("A", (subscript, Subscript((), 0, NOWHERE)), NOWHERE, NOWHERE)
    assert str(Statement(access, "=", (Number(0.5, NOWHERE),), "")) == "A[-i+2*E-4,0] = 0.5"
