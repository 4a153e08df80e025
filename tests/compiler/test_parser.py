"""What the parser takes, what it refuses, and its limits."""

from __future__ import annotations

import inspect
import sys
import time

import pytest

from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.syntax import Access, Number
from insum_nn.errors import InsumOverflowError, InsumSyntaxError

INT64_MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        ("- 7", -7),
        ("12.5", 12.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("1e+3", 1000.0),
        ("-1E-3", -0.001),
        ("1e-400", 0.0),
        (str(INT64_MAX), INT64_MAX),
        (f"-{INT64_MAX}", -INT64_MAX),
        ("0000000000000000001", 1),
    ],
)
def test_numbers(text: str, value: float):
    (number,) = parse(f"s += {text}").factors
    assert isinstance(number, Number)
    assert number.value == value
    assert type(number.value) is type(value)


@pytest.mark.parametrize("text", ["1e999", "-1e999", str(INT64_MAX + 1), "9" * 5000])
def test_numbers_beyond_64_bits(text: str):
    with pytest.raises(InsumOverflowError):
        parse(f"s += {text} * x")


@pytest.mark.parametrize(
    "text",
    ["0x10", "1_000", "1j", "1.2.3", "1e", "١٢", "²", "½", "Ⅻ2[", "inf[", "1 2", "--", "1-", "2**x", "2**", "1 +"],
)
def test_no_numbers(text: str):
    with pytest.raises(InsumSyntaxError):
        parse(f"s += {text}")


@pytest.mark.parametrize(
    "name", ["i", "_", "__", "x1", "é", "列", "λ_2", "for", "None", "max", "min", "ª", "𝒳", "x" * 500]
)
def test_names(name: str):
    statement = parse(f"{name} += {name}0[q]")
    assert statement.output.subscripts == ()
    (factor,) = statement.factors
    assert isinstance(factor, Access)
    assert factor.name.isidentifier()


def test_a_name_may_look_like_an_operator():
    assert parse("max max= min").output.name == "max"
    assert parse("min = max").operator == "="
    assert parse("max += x").operator == "+="
    assert parse("x min= max").operator == "min="
    assert parse("max=x").operator == "="
    assert parse("x max=y").operator == "max="


@pytest.mark.parametrize("space", ["", " ", "\t", "  \t "])
def test_space_is_free_between_tokens(space: str):
    tokens = [
        "C",
        "[",
        "E",
        "[",
        "i",
        "]",
        "-",
        "2",
        ",",
        "j",
        "]",
        "+=",
        "-",
        "1.5",
        "*",
        "A",
        "[",
        "i",
        ",",
        "j",
        "]",
    ]
    assert parse(space.join(["", *tokens, ""])) == parse("C[E[i]-2,j] += -1.5 * A[i,j]")


@pytest.mark.parametrize("text", ["C[i] + = A[i]", "C[i] max = A[i]", "C[i] += 1 e3", "C[i] += A[i j]", "C[i] += 1 .5"])
def test_space_is_not_free_inside_tokens(text: str):
    with pytest.raises(InsumSyntaxError):
        parse(text)


@pytest.mark.parametrize("space", ["\n", "\r", "\u00a0", "\u2003", "\u200b", "\ufeff", "\x0b", "\x85"])
def test_other_space_is_no_space(space: str):
    with pytest.raises(InsumSyntaxError) as info:
        parse(f"C[i] +={space}A[i]")
    assert info.value.fields["got"] == space


@pytest.mark.parametrize("value", [None, 3, b"s += x", ["s += x"], object()])
def test_only_text_is_read(value: object):
    with pytest.raises(InsumSyntaxError, match="an expression must be a str"):
        parse(value)


def test_a_subclass_of_str_is_text():
    class Text(str):
        __slots__ = ()

    assert parse(Text("s += x")) == parse("s += x")


def test_limits_are_generous_and_sharp():
    nested = "E[" * 31 + "i" + "]" * 31
    assert len(list(parse(f"s += A[{nested}]").reads[0].nested())) == 31
    with pytest.raises(InsumSyntaxError, match="nested more than 32 deep"):
        parse(f"s += A[E[{nested}]]")
    assert len(parse("s += " + " * ".join(["x"] * 64)).factors) == 64
    with pytest.raises(InsumSyntaxError, match="more than 64 factors"):
        parse("s += " + " * ".join(["x"] * 65))
    padded = "s += x"
    padded += " " * (20_000 - len(padded))
    assert parse(padded) == parse("s += x")
    with pytest.raises(InsumSyntaxError, match="20001 characters"):
        parse(padded + " ")


def test_many_terms_and_subscripts():
    terms = "+".join(f"{n + 1}*i{n}" for n in range(64))
    (subscript,) = parse(f"s += A[{terms}]").reads[0].subscripts
    assert len(subscript.terms) == 64
    subscripts = ",".join(f"i{n}" for n in range(64))
    assert len(parse(f"s += A[{subscripts}]").reads[0].subscripts) == 64
    accesses = ",".join("+".join(f"E{m}[{n}]" for n in range(51)) for m in range(5))
    assert len(list(parse(f"s += A[{accesses}]").accesses())) == 257, "the output, the factor and what it reads"


def test_the_longest_texts_take_no_time():
    worst = [
        "s += " + "A[" * 9_990,
        "s += A[" + "i+" * 9_990,
        "s += A[" + "-" * 19_900,
        "s += " + "9" * 19_900,
        "s += ." + "9" * 19_900,
        "s += 1e" + "9" * 19_900,
        "x" * 20_000,
        "é" * 20_000,
        "e\u0301" * 10_000,
        "=" * 20_000,
        "]" * 20_000,
        "s += A[" + "E[i]+" * 3_900 + "i]",
        "s += A[" + "E[E[E[i]]]*2+" * 1_500 + "i]",
    ]
    begin = time.process_time()
    for text in worst:
        try:
            parse(text)
        except (InsumSyntaxError, InsumOverflowError):
            continue
    assert time.process_time() - begin < 30


def test_nesting_does_not_depend_on_the_recursion_limit():
    text = "s += A[" + "E[" * 31 + "i" + "]" * 32
    limit = sys.getrecursionlimit()
    frames = len(inspect.stack())
    try:
        sys.setrecursionlimit(frames + 200)
        parse(text)
    finally:
        sys.setrecursionlimit(limit)
