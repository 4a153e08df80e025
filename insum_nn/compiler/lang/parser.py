"""Parse text into a `Statement`; no other file reads characters, and nothing is executed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from insum_nn.compiler.lang.combining import OPERATORS
from insum_nn.compiler.lang.functions import FUNCTIONS, Function
from insum_nn.compiler.lang.syntax import Access, Apply, Factor, Index, Number, Statement, Subscript, Term
from insum_nn.errors import InsumError, InsumOverflowError, InsumSyntaxError, Span, plural

__all__ = ["check_text", "parse"]

# Limits far above any real statement; they keep malicious text from exhausting the stack or the time.
_MAX_LENGTH = 20_000
_MAX_DEPTH = 32
_MAX_FACTORS = 64
_MAX_ACCESSES = 256
# A torch tensor has at most this many dimensions.
_MAX_DIMENSIONS = 64
_INT64_MAX = 2**63 - 1

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?")
# Operators are symbols, or a name and an equals sign.
_NAMES = tuple(operator[:-1] for operator in OPERATORS if operator[:-1].isidentifier())
_SYMBOLS = (*(o for o in OPERATORS if o[:-1] not in _NAMES), "**", *"[](),*/+-")
_ONE_OF = f"one of {' '.join(OPERATORS)}"
_HINTS = {
    "...": "write one index per dimension.",
    ":=": "write '=' to assign, or '+=' to add.",
    "%": "pass a precomputed index tensor; subscripts are affine sums.",
    ">": "write the output first, and name the tensors, for example C[i,j] += A[i,k] * B[k,j].",
    "@": "write a matrix product with indices, for example C[i,j] += A[i,k] * B[k,j].",
    "'": "write names without quotes.",
    '"': "write names without quotes.",
    "#": "leave the comment out.",
    ".": "pass the attribute's value under a name of its own; names are Python identifiers.",
    ":": "write an index variable instead of a slice, for example A[i,j].",
    ";": "give one statement at a time.",
    "\n": "give one statement at a time.",
}

Kind = Literal["name", "number", "symbol", "end"]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: Kind
    text: str
    span: Span


def _tokenize(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        character = text[position]
        if character in " \t":
            position += 1
            continue
        number = _NUMBER.match(text, position)
        symbol = next((s for s in _SYMBOLS if text.startswith(s, position)), None)
        if number is not None:
            stop = number.end()
            yield _Token("number", number.group(), Span(position, stop))
        elif symbol is not None:
            stop = position + len(symbol)
            yield _Token("symbol", symbol, Span(position, stop))
        elif character.isidentifier():
            stop = position + 1
            while stop < len(text) and ("a" + text[stop]).isidentifier():
                stop += 1
            # Python normalises keyword arguments, so names must be normalised in the same way.
            name = unicodedata.normalize("NFKC", text[position:stop])
            yield _Token("name", name, Span(position, stop))
        else:
            raise _unexpected(text, position)
        position = stop
    yield _Token("end", "end of text", Span(len(text), len(text)))


def _unexpected(text: str, position: int) -> InsumSyntaxError:
    symbol = next((s for s in ("...", ":=") if text.startswith(s, position)), text[position])
    return InsumSyntaxError(
        f"unexpected {'character' if len(symbol) == 1 else 'symbol'} {symbol!r}",
        expression=text,
        spans=[Span(position, position + len(symbol))],
        fix=_HINTS.get(symbol, f"use names, numbers, the symbols {' '.join('[](),*/+-')} and {_ONE_OF}."),
        got=symbol,
    )


def parse(text: str) -> Statement:
    """Parse one statement.

    Args:
        text: for example `"C[Row[g],n] += Val[g,q] * B[Col[g,q],n]"`.

    Returns:
        The tree; `parse(str(tree)) == tree`.

    Raises:
        InsumSyntaxError: the text is not a statement.
        InsumOverflowError: an integer in a subscript does not fit 64 bits.

    >>> str(parse("C[ i ]+=A[i, 2 * k+1 ]*x"))
    'C[i] += A[i,2*k+1] * x'
    """
    check_text(text)
    if len(text) > _MAX_LENGTH:
        raise InsumSyntaxError(
            f"the expression has {len(text)} characters; at most {_MAX_LENGTH} are read",
            fix="split the work into several statements.",
        )
    return _Parser(text).statement()


def check_text(text: object) -> None:
    """Raise unless this is text: an unhashable list must not reach a cache.

    Raises:
        InsumSyntaxError: it is not a `str`.
    """
    if not isinstance(text, str):
        got = type(text).__name__
        raise InsumSyntaxError(f"an expression must be a str, got {got}", fix="pass the statement as text.")


class _Parser:
    """Recursive descent: `x()` consumes or raises, `maybe_x()` may return `None`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [*_tokenize(text)]
        self.position = 0
        self.depth = 0
        self.accesses = 0
        self.indices: set[str] = set()

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def advance(self) -> _Token:
        token = self.token
        if token.kind != "end":
            self.position += 1
        return token

    def maybe(self, *symbols: str) -> _Token | None:
        if self.token.kind == "symbol" and self.token.text in symbols:
            return self.advance()
        return None

    def fault(
        self, message: str, spans: Sequence[Span], fix: str, kind: type[InsumError] = InsumSyntaxError, **fields: Any
    ) -> InsumError:
        """Return an error that shows the text."""
        return kind(message, expression=self.text, spans=spans, fix=fix, **fields)

    def fail(self, expected: str, fix: str, spans: Sequence[Span] | None = None) -> InsumError:
        got = self.token.text if self.token.kind == "end" else repr(self.token.text)
        return self.fault(
            f"expected {expected}, got {got}", spans or [self.token.span], fix, expected=expected, got=self.token.text
        )

    def statement(self) -> Statement:
        output = self.access("the tensor to write", 'start with the output, for example "C[i,j] += A[i,k] * B[k,j]".')
        operator = self.operator()
        value = self.expression()
        if self.token.kind != "end":
            fix = "put '*' between factors." if self.token.kind in ("name", "number") else "end the statement here."
            raise self.fail("'*' or the end of the statement", fix)
        return Statement(output, operator, _factors(value), self.text)

    def expression(self) -> Factor:
        start = self.token.span
        terms = [*_parts("add", self.product())]
        while sign := self.maybe("+", "-"):
            term = self.product()
            terms += [_negated(term, sign.span)] if sign.text == "-" else _parts("add", term)
            self.bound(len(terms), _MAX_FACTORS, "summands", term.span, "split the sum into several statements.")
        return terms[0] if len(terms) == 1 else Apply("add", tuple(terms), start.merge(terms[-1].span))

    def product(self) -> Factor:
        start = self.token.span
        factors = [*_factors(self.unary())]
        while sign := self.maybe("*", "/"):
            right = self.unary()
            if sign.text == "*":
                factors += _factors(right)
            else:
                factors[-1] = _quotient(factors[-1], right)
            fix = "split the product into several statements."
            self.bound(len(factors), _MAX_FACTORS, "factors", right.span, fix)
        return _product(factors, start.merge(self.tokens[self.position - 1].span))

    def unary(self) -> Factor:
        sign = self.maybe("-", "+")
        if sign is None:
            return self.power()
        self.deeper(sign.span)
        value = self.unary()
        self.depth -= 1
        return value if sign.text == "+" else _negated(value, sign.span)

    def power(self) -> Factor:
        base = self.atomic()
        if self.maybe("**") is None:
            return base
        sign = self.maybe("-", "+")
        if self.token.kind != "number":
            fix = "write a number, or a power as exp(exponent * log(base))."
            raise self.fail("a number as the exponent", fix)
        token = self.advance()
        value = self.number_value(token)
        exponent = Number(-value if sign is not None and sign.text == "-" else value, token.span)
        return Apply("pow", (base, exponent), base.span.merge(token.span))

    def atomic(self) -> Factor:
        if self.token.kind == "number":
            token = self.advance()
            return Number(self.number_value(token), token.span)
        if self.token.kind == "name" and self.tokens[self.position + 1].text == "(":
            return self.function()
        bracket = self.maybe("(")
        if bracket is None:
            return self.access("a factor", self.factor_hint())
        self.deeper(bracket.span)
        value = self.expression()
        self.close(bracket.span, ")", "')'", "write the parenthesis that closes this one.")
        return value

    def function(self) -> Apply:
        name, bracket = self.advance(), self.advance()
        function = FUNCTIONS.get(name.text)
        if function is None:
            near = get_close_matches(name.text, FUNCTIONS, 1)
            raise self.fault(
                f"there is no function '{name.text}'",
                [name.span],
                f"write {near[0]}(...)." if near else "name one of these, or write subscripts in brackets: A[i].",
                details=[f"functions: {', '.join(FUNCTIONS)}"],
                got=name.text,
            )
        self.deeper(name.span)
        args = [self.expression()]
        while self.maybe(","):
            args.append(self.expression())
        fix = "write ',' between arguments, or ')' behind the last."
        span = name.span.merge(self.close(bracket.span, ")", "',' or ')'", fix))
        self.check_arguments(name, function, args, span)
        return Apply(name.text, tuple(args), span)

    def check_arguments(self, name: _Token, function: Function, args: Sequence[Factor], span: Span) -> None:
        expected = len(function.derivatives)
        if len(args) != expected:
            raise self.fault(
                f"'{name.text}' takes {plural(expected, 'argument')}, got {len(args)}",
                [span],
                "give it as many.",
                expected=expected,
                got=len(args),
            )
        if function.number and not isinstance(args[-1], Number):
            raise self.fault(
                f"the last argument of '{name.text}' must be a number, got '{args[-1]}'",
                [args[-1].span],
                "write the number.",
            )

    def deeper(self, span: Span) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.fault(
                f"parentheses, signs and accesses are nested more than {_MAX_DEPTH} deep",
                [span],
                "compute a part of it by a statement of its own.",
                expected=_MAX_DEPTH,
            )

    def close(self, bracket: Span, symbol: str, expected: str, fix: str) -> Span:
        if self.token.text != symbol:
            raise self.fail(expected, fix, [bracket, self.token.span])
        self.depth -= 1
        return self.advance().span

    def operator(self) -> str:
        token = self.token
        symbol = self.maybe(*OPERATORS)
        if symbol:
            return symbol.text
        if token.kind == "name" and token.text in _NAMES:
            after = self.tokens[self.position + 1]
            if after.text == "=" and after.span.start == token.span.stop:
                self.position += 2
                return f"{token.text}="
        raise self.fail(_ONE_OF, self.operator_hint())

    def operator_hint(self) -> str:
        symbol, after = self.token.text, self.tokens[min(self.position + 1, len(self.tokens) - 1)].text
        if after == "=" and symbol in ("+", *_NAMES):
            return f"write '{symbol}=' without a space."
        if symbol == "-" and after == "=":
            return "write '+=', and -1 as a factor."
        if symbol == "*" and after == "=":
            return "write '+=' or '='; a product with the old value is a statement of its own."
        return "put the operator between the output and its factors."

    def factor_hint(self) -> str:
        if self.token.text == "=":
            return f"write the operator once: {_ONE_OF}."
        return "write an access such as A[i,k], a number, a function such as exp(A[i]), or the name of a 0-d tensor."

    def number_value(self, token: _Token) -> int | float:
        if token.text.isdigit():
            return self.integer(token)
        value = float(token.text)
        if value in (float("inf"), float("-inf")):
            raise self.fault(
                f"the number {token.text} does not fit a float64",
                [token.span],
                "pass it as a 0-d tensor, or scale the factors.",
                kind=InsumOverflowError,
            )
        return value

    def integer(self, token: _Token) -> int:
        if len(token.text) > 19 or int(token.text) > _INT64_MAX:
            raise self.overflow("an integer", token.span, "use a smaller coefficient, offset or number.")
        return int(token.text)

    def overflow(self, what: str, span: Span, fix: str) -> InsumError:
        details = [f"expected at most {_INT64_MAX}"]
        return self.fault(f"{what} does not fit 64 bits", [span], fix, InsumOverflowError, details=details)

    def access(self, what: str, fix: str) -> Access:
        if self.token.kind != "name":
            raise self.fail(what, fix)
        name = self.advance()
        bracket = self.maybe("[")
        if bracket is None:
            return Access(name.text, (), name.span, name.span)
        self.deeper(name.span)
        if self.token.text == "]":
            raise self.fail("a subscript", f"write a 0-d tensor without brackets: {name.text}.")
        self.accesses += 1
        fix = "pass what some of them select as one tensor."
        self.bound(self.accesses, _MAX_ACCESSES, "accesses", name.span, fix)
        subscripts = [self.subscript()]
        while self.maybe(","):
            subscripts.append(self.subscript())
            fix = "flatten some of the tensor's dimensions."
            self.bound(len(subscripts), _MAX_DIMENSIONS, "subscripts of one tensor", subscripts[-1].span, fix)
        fix = "write ',' between subscripts, or ']' behind the last."
        close = self.close(bracket.span, "]", "',' or ']'", fix)
        return Access(name.text, tuple(subscripts), name.span.merge(close), name.span)

    def subscript(self) -> Subscript:
        start = self.token.span
        terms: list[Term] = []
        offset = 0
        sign = self.maybe("-", "+")
        while True:
            factor = -1 if sign is not None and sign.text == "-" else 1
            term = self.term(factor)
            if isinstance(term, int):
                offset += term
            else:
                terms.append(term)
                self.bound(len(terms), _MAX_DIMENSIONS, "terms in one subscript", term.span, "pass an index tensor.")
            sign = self.maybe("-", "+")
            if sign is None:
                break
        span = start.merge(self.tokens[self.position - 1].span)
        return Subscript(self.merge(terms), self.fit(offset, span), span)

    def term(self, sign: int) -> Term | int:
        token = self.token
        if token.kind == "number":
            coefficient = sign * self.index_integer(self.advance())
            if self.maybe("*") is None:
                return coefficient
            atom = self.atom()
            return Term(coefficient, atom, token.span.merge(atom.span))
        atom = self.atom()
        if self.maybe("*") is None:
            return Term(sign, atom, atom.span)
        if self.token.kind != "number":
            fix = "multiply indices by integers only, or close the subscript with ']' before the '*'."
            raise self.fail("an integer coefficient", fix)
        factor = self.advance()
        return Term(sign * self.index_integer(factor), atom, atom.span.merge(factor.span))

    def index_integer(self, token: _Token) -> int:
        if not token.text.isdigit():
            raise self.fault(
                f"expected an integer in a subscript, got {token.text!r}",
                [token.span],
                "write coefficients and offsets of subscripts as integers, or pass an index tensor.",
                got=token.text,
            )
        return self.integer(token)

    def atom(self) -> Index | Access:
        access = self.access("an index, an index tensor or an integer", "write a sum such as i, 2*p+r-1 or Col[g,q].")
        if access.subscripts:
            return access
        self.indices.add(access.name)
        fix = "flatten dimensions that are always indexed together."
        self.bound(len(self.indices), _MAX_DIMENSIONS, "indices", access.span, fix)
        return Index(access.name, access.span)

    def bound(self, count: int, most: int, what: str, span: Span, fix: str) -> None:
        """Raise if a statement has more of something than the limit."""
        if count > most:
            raise self.fault(f"the statement has more than {most} {what}", [span], fix, expected=most)

    def merge(self, terms: list[Term]) -> tuple[Term, ...]:
        if len(terms) == 1 and terms[0].coefficient:
            return (terms[0],)
        merged: dict[Index | Access, Term] = {}
        for term in terms:
            before = merged.get(term.atom)
            if before is not None:
                span = before.span.merge(term.span)
                term = Term(self.fit(before.coefficient + term.coefficient, span), before.atom, span)
            merged[term.atom] = term
        for term in merged.values():
            if term.coefficient == 0:
                raise self.fault(
                    f"the coefficient of '{term.atom}' is 0", [term.span], f"remove '{term.atom}' from the subscript."
                )
        return tuple(merged.values())

    def fit(self, value: int, span: Span) -> int:
        if abs(value) > _INT64_MAX:
            raise self.overflow("the sum of the integers", span, "use smaller integers.")
        return value


def _parts(function: str, value: Factor) -> tuple[Factor, ...]:
    """The summands of a sum, or the factors of a product."""
    return value.args if isinstance(value, Apply) and value.function == function else (value,)


def _factors(value: Factor) -> tuple[Factor, ...]:
    return _parts("mul", value)


def _product(factors: Sequence[Factor], span: Span) -> Factor:
    return factors[0] if len(factors) == 1 else Apply("mul", tuple(factors), span)


def _quotient(value: Factor, by: Factor) -> Factor:
    """Divide, by a product where something is divided already."""
    span = value.span.merge(by.span)
    if isinstance(value, Apply) and value.function == "div":
        value, before = value.args
        by = _product([*_factors(before), *_factors(by)], before.span.merge(by.span))
    return Apply("div", (value, by), span)


def _negated(value: Factor, sign: Span) -> Factor:
    first, *rest = _factors(value)
    span = sign.merge(value.span)
    if isinstance(first, Number):
        return _product([replace(first, value=-first.value, span=sign.merge(first.span)), *rest], span)
    return _product([Number(-1, sign), first, *rest], span)
