"""Errors that name the user's own symbols, and the text spans they point at.

Every message has the same parts, in this order: what is wrong, the expression with
carets under each guilty token, facts (expected, got, inferred so far), and one fix.
"""

from __future__ import annotations

import importlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = [
    "InsumAliasError",
    "InsumBackendError",
    "InsumDeviceError",
    "InsumDtypeError",
    "InsumError",
    "InsumFormatError",
    "InsumGradientError",
    "InsumNameError",
    "InsumOverflowError",
    "InsumRangeError",
    "InsumShapeError",
    "InsumSyntaxError",
    "MissingExtraError",
    "Span",
    "caret_lines",
    "import_extra",
    "plural",
    "raise_collected",
]


# What a message shows of a hostile text: characters of a line, lines of details, further faults.
_LINE = 500
_LINES = 20
_OTHERS = 8


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range of characters, `text[start:stop]`, of one expression."""

    start: int
    stop: int

    def merge(self, other: Span) -> Span:
        """The shortest span that holds both."""
        return Span(min(self.start, other.start), max(self.stop, other.stop))


class InsumError(Exception):
    """Base of all errors of this package.

    Attributes:
        message: the first line, without decoration.
        expression: the expression text the spans refer to, or `None`.
        spans: the guilty tokens of `expression`.
        details: lines of facts (expected, got, inferred).
        fix: one imperative sentence.
        fields: the facts as values, by name (`index`, `tensor`, `expected`, `got`, ...).
    """

    def __init__(
        self,
        message: str,
        *,
        expression: str | None = None,
        spans: Sequence[Span] = (),
        details: Sequence[str] = (),
        fix: str | None = None,
        **fields: object,
    ) -> None:
        self.message = message
        self.expression = expression
        self.spans = tuple(spans)
        self.details = tuple(details)
        self.fix = fix
        self.fields = fields
        self.others: tuple[InsumError, ...] = ()
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [_clipped(self.message)]
        if self.expression is not None:
            lines += caret_lines(self.expression, self.spans)
        lines += [f"  {_clipped(line)}" for line in self.details[:_LINES]]
        if len(self.details) > _LINES:
            lines.append(f"  and {len(self.details) - _LINES} lines more")
        if self.fix is not None:
            lines.append(f"  fix: {_clipped(self.fix)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        # SyntaxError, NameError and others format themselves from attributes of their own.
        also = [f"also, {type(other).__name__}: {other._render()}" for other in self.others[:_OTHERS]]
        if len(self.others) > _OTHERS:
            also.append(f"and {plural(len(self.others) - _OTHERS, 'fault')} more")
        return "\n".join([self._render(), *also])

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments do not survive Exception's default pickling, which
        # multiprocessing relies on to carry an error back to its parent.
        facts: dict[str, Any] = {"expression": self.expression, "spans": self.spans, "details": self.details}
        return partial(type(self), self.message, **facts, fix=self.fix, **self.fields), (), {"others": self.others}


def _clipped(line: str) -> str:
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def raise_collected(faults: Iterable[InsumError]) -> None:
    """Raise the first fault, carrying the others in its `others` and in its text; do nothing without faults."""
    found = tuple(faults)
    if found:
        found[0].others = found[1:]
        raise found[0]


class InsumSyntaxError(InsumError, SyntaxError):
    """The text is not a statement of the language."""


class InsumNameError(InsumError, NameError, ValueError):
    """A tensor or an index is unknown, unused, unbound or misused by name."""


class InsumShapeError(InsumError, ValueError):
    """Ranks or extents disagree, or cannot be inferred."""


class InsumDtypeError(InsumError, TypeError):
    """A tensor's dtype does not fit its use."""


class InsumDeviceError(InsumError, RuntimeError):
    """Tensors of one statement live on different devices, or on an unusable one."""


class InsumRangeError(InsumError, IndexError):
    """An index value points outside a tensor."""


class InsumAliasError(InsumError, ValueError):
    """A statement reads the tensor that it writes."""


class InsumOverflowError(InsumError, OverflowError):
    """An extent or a coefficient does not fit the integer type that carries it."""


class InsumGradientError(InsumError, RuntimeError):
    """Gradients were to be recorded where there are none."""


class InsumFormatError(InsumError, ValueError):
    """A sparse format breaks one of its laws."""


class InsumBackendError(InsumError, RuntimeError):
    """A back end that was asked for by name cannot run the statement."""


class MissingExtraError(InsumError, ImportError):
    """An optional dependency is missing; the message names the package to install."""


def import_extra(module: str, purpose: str, package: str = "") -> Any:
    """Import a module of an optional dependency.

    Args:
        module: its full name.
        purpose: what it is needed for.
        package: what is to be installed; default: the first part of the module's name.

    Raises:
        MissingExtraError: it is not installed.

    >>> import_extra("absent.io", "pictures")
    Traceback (most recent call last):
    ...
    insum_nn.errors.MissingExtraError: absent is not installed, and is needed for pictures
      fix: run: pip install absent
    """
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{name} is not installed, and is needed for {purpose}",
            fix=f"run: pip install {package or name}",
            package=name,
        ) from error


def plural(number: int, word: str) -> str:
    """A count with its noun.

    >>> plural(1, "entry"), plural(2, "entry"), plural(0, "subscript")
    ('1 entry', '2 entries', '0 subscripts')
    """
    if number == 1:
        return f"1 {word}"
    return f"{number} {word[:-1]}ies" if word.endswith("y") else f"{number} {word}s"


def _width(text: str) -> int:
    """Terminal cells of `text`: wide East Asian letters take two, combining marks none."""
    cells = 0
    for character in text:
        if unicodedata.combining(character):
            continue
        cells += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return cells


def caret_lines(expression: str, spans: Iterable[Span], *, indent: int = 2, window: int = 160) -> list[str]:
    """The expression and, under it, a line of carets below each span.

    A long expression is cut to `window` characters around the first span. Line breaks and
    control characters are shown as spaces so that carets stay under their tokens. A blank expression shows nothing.
    """
    if not expression.strip():
        return []
    shown = "".join(c if c.isprintable() else " " for c in expression)
    ordered = sorted(spans)
    start = 0
    if len(shown) > window:
        start = max(0, min((ordered[0].start if ordered else 0) - window // 3, len(shown) - window))
    stop = min(len(shown), start + window)
    prefix = "..." if start else ""
    suffix = "..." if stop < len(shown) else ""
    pad = " " * indent
    lines = [f"{pad}{prefix}{shown[start:stop]}{suffix}"]
    marks = ""
    for span in ordered:
        lo, hi = max(span.start, start), min(max(span.stop, span.start + 1), stop + 1)
        if hi <= lo:
            continue
        column = len(prefix) + _width(shown[start:lo])
        if column < len(marks):
            continue
        marks += " " * (column - len(marks)) + "^" * max(1, _width(shown[lo:hi]))
    if marks:
        lines.append(pad + marks)
    return lines
