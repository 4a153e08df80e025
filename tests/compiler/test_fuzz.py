"""10,000 random and hostile texts: a program or one of our errors comes out, quickly, and nothing is executed."""

from __future__ import annotations

import builtins
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import insum_nn
from insum_nn.errors import InsumError
from insum_nn.testing.random_programs import random_program

COUNT = 10_000
BATCHES = 4
# A batch takes about two; a slow machine takes a few times as long, and a text of quadratic cost takes minutes.
SECONDS = 30.0

ALPHABET = (
    "CABxyij0123456789.eE+-*=[], \tmaxmin_"
    + "()/%@:;#'\"\\{}<>!?&|^~$`\n\r\0"
    + "éλ列Ⅷ²½\u0301\u202e\u200b\ud800\U0001f600"
)
TOKENS = ("C", "A", "E", "i", "j", "[", "]", ",", "*", "+", "-", "+=", "=", "max=", "min=", "max", "2", "0", "1.5", " ")
TOKENS += ("(", ")", "/", "**", "exp", "eq", "one", "return", ";", "\n", "#")
PROGRAMS = (
    "S[e] = exp(Q[I[e]] - K[J[e]]); Z[I[e]] += S[e]; Y[I[e]] += S[e] / Z[I[e]]",
    "M max= detach(x[i]) # largest\nZ += exp(x[i] - M)\nreturn M, Z",
    "Y[i] = -(A[i] + 2 * leaky_relu(B[i], 0.1) ** 2) / (1 - one(A[i]))",
)
HOSTILE = (
    "__import__('os').system('touch pwned')",
    "C[i] += __import__('os')[i]",
    "C[__import__] += __builtins__[__import__]",
    "exec[i] += eval[i] * compile[i] * open[i]",
    "C[i] += A[i].__class__.__mro__[1].__subclasses__()",
    "{A.__init__.__globals__}[i] += B[i]",
    "C[i] += {0.__class__}",
    "C[i] += %s%s%n%x * A[i]",
    "C[i] += ${HOME} * `id` * $(id)",
    "C[i] += A[lambda: 0]",
    "C[(lambda: exit())()] += A[i]",
    "C[i] += f'{1/0}'",
    "C[i] += A[i]; import os; os._exit(1)",
    "C[i] += A[i]\nimport os\nos._exit(1)",
    "C[i] += A[i] # '''",
    "C[i] += A[i]\\",
    "C[\x00i\x00] += A[i]",
    "C[i] += A[i]\x00",
    "\x00" * 50,
    "\ud800\udfff" * 20,
    "C[\ud800] += A[\udfff]",
    "C\u202e[i] += \u2066A[i]\u2069",
    "\ufeffC[i] += A[i]",
    "C[i] += A[i" + "\u0301" * 200 + "]",
    "C[i] += " + "9" * 4301 + " * A[i]",
    "C[i] += A[" + "9" * 4301 + "*i]",
    "C[i] += 1e" + "9" * 4301 + " * A[i]",
    "C[i] += 0." + "0" * 4301 + "1 * A[i]",
    "C[i] += " + "-" * 5000 + "1",
    "C[i] += A[" + "i*" * 5000 + "2]",
    "C[" * 9000,
    "[" * 20_000,
    "]" * 20_000,
    "C[i] += " + "A[" * 3000 + "i" + "]" * 3000,
    "C[i] += A[" + "+".join(["i"] * 9000) + "]",
    "C[i] += A[" + ",".join(["i"] * 9000) + "]",
    "C[i] += " + "*".join(["A"] * 9000),
    "C[i] += A[" + ",".join(f"i{n}" for n in range(3000)) + "]",
    "C[" + ",".join(f"i{n}" for n in range(3000)) + "] += A[i]",
    "C[i] += A[" + "+".join(f"i{n}" for n in range(3000)) + "]",
    "C[" + "+".join(f"i{n}" for n in range(3000)) + "] += A[i]",
    "C[" + "+".join(f"E{n}[i]" for n in range(2000)) + "] += A[i]",
    "C[i] += " + "*".join(f"A[{','.join(f'i{n}x{m}' for m in range(30))}]" for n in range(60)),
    "C[" + ",".join(f"i{n}" for n in range(64)) + "] += A[0]",
    "C[" + "i" * 9000 + "] += " + "A" * 9000 + "[0]",
    "C[i] += " + "A" * 19_000,
    "x" * 1_000_000,
    "=" * 1000,
    "+=" * 1000,
    "max=min=" * 100,
    "C[i] += " + "(" * 9_000 + "A[i]" + ")" * 9_000,
    "C[i] += " + "exp(" * 3_000,
    "C[i] += A[i]" + " / A[i]" * 2_000,
    "C[i] += A[i]" + " ** 2" * 2_000,
    "C[i] += " + "(" + " + ".join(["A[i]"] * 60) + ")" + " * A[i]" * 60,
    "C[i] += A[i]; " + "(" * 100_000,
    ";".join(f"S{n}[i] += A[i]" for n in range(500)),
    ";".join(f"S{n + 1}[i] = S{n}[i] * S{n}[i]" for n in range(30)),
    "; ".join(f"return C{n}" for n in range(500)),
    ";" * 10_000 + "#" * 10_000 + "\n" * 10_000,
    "",
    " ",
    "i",
    "+=",
)


def _from_bytes(rng: random.Random) -> str:
    return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60))).decode("latin-1")


def _from_code_points(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(sys.maxunicode + 1)) for _ in range(rng.randrange(1, 40)))


def _from_alphabet(rng: random.Random) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 80)))


def _from_tokens(rng: random.Random) -> str:
    return "".join(rng.choice(TOKENS) for _ in range(rng.randrange(1, 40)))


def _nested(rng: random.Random) -> str:
    depth = rng.randrange(1, 60)
    return (
        "C[i] += " + "".join(f"{rng.choice('AEF')}[" for _ in range(depth)) + "i" + "]" * (depth + rng.randrange(-1, 2))
    )


def _huge(rng: random.Random) -> str:
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 60)))
    template = rng.choice(
        ("C[i] += {} * A[i]", "C[i] += A[{}*i]", "C[i] += A[i-{}]", "C[{}] += A[i]", "s += 1e{}", "s += {}.")
    )
    return template.replace("{}", digits)


def _mutated(rng: random.Random) -> str:
    """A valid statement with a few characters dropped, doubled, replaced or moved, or spliced with a hostile text."""
    text = list(rng.choice((random_program(rng.randrange(300)).expression, *PROGRAMS)))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text)) if text else 0
        kind = rng.randrange(5)
        if kind == 0:
            del text[at : at + rng.randrange(1, 4)]
        elif kind == 1:
            text[at:at] = text[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            text[at : at + 1] = rng.choice(ALPHABET)
        elif kind == 3:
            other = rng.randrange(len(text)) if text else 0
            text[min(at, other) : max(at, other)] = reversed(text[min(at, other) : max(at, other)])
        else:
            text[at:at] = rng.choice(HOSTILE)[: rng.randrange(1, 40)]
    return "".join(text)


SOURCES: tuple[Callable[[random.Random], str], ...] = (
    _from_bytes,
    _from_code_points,
    _from_alphabet,
    _from_tokens,
    _nested,
    _huge,
    _mutated,
    _mutated,
    _mutated,
)


def texts(batch: int) -> Iterator[str]:
    """A quarter of the texts; every batch begins with the hostile ones, as they are and inside a statement."""
    rng = random.Random(f"insum_nn fuzz {batch}")
    count = COUNT // BATCHES
    for hostile in HOSTILE:
        yield hostile
        yield f"C[i] += A[{hostile}]"
        count -= 2
    for _ in range(count):
        yield rng.choice(SOURCES)(rng)


@contextmanager
def forbidden(calls: list[str]) -> Iterator[None]:
    """Everything through which a text could act; a call leaves its name and fails.

    Held around our own calls alone: pytest opens files and compiles code too, to show how a test failed.
    """

    def trap(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            raise AssertionError(f"{name} was called with {args!r:.200}")

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "exec", "compile", "open", "input", "breakpoint"):
            patch.setattr(builtins, name, trap(name))
        for name in ("system", "popen", "remove", "_exit", "fork"):
            patch.setattr(os, name, trap(name))
        patch.setattr(subprocess, "Popen", trap("Popen"))
        yield


def compiled(text: str) -> insum_nn.Program | InsumError:
    try:
        return insum_nn.compile(text)
    except InsumError as error:
        return error


def seen(text: str) -> insum_nn.Program | InsumError:
    """What comes of a text once a user has looked at it: the message made, or the program's own text read back."""
    result = compiled(text)
    if isinstance(result, InsumError):
        # The message can be made, printed and sent: a surrogate in the text must not break a terminal.
        assert str(result).split("\n")[0]
        assert len(str(result)) < 10_000
        str(result).encode("utf-8")
    else:
        assert insum_nn.compile(result.expression).expression == result.expression
    return result


@pytest.mark.parametrize("batch", range(BATCHES))
def test_only_our_errors_come_out(batch: int):
    given = list(texts(batch))
    calls: list[str] = []
    # This thread's processor time: a busy machine must not fail this.
    begin = time.thread_time()
    with forbidden(calls):
        results = [seen(text) for text in given]
    spent = time.thread_time() - begin
    refused = sum(isinstance(result, InsumError) for result in results)
    assert len(results) == COUNT // BATCHES
    # Both kinds have to be there, or the texts are too tame or too wild to say anything.
    assert len(results) - refused > 20
    assert refused > COUNT // BATCHES // 2
    assert calls == []
    assert spent < SECONDS


def test_names_reach_generated_code_as_data():
    """Names become parameters of generated Python code, so a name that is code must never be taken for a name."""
    import torch

    for name in ("import", "__import__", "lambda", "self", "torch", "exec", "𝓽𝓸𝓻𝓬𝓱", "ﬁ"):
        got = insum_nn.insum(
            f"y[i] += 2 * {name}[i]", tensors={insum_nn.compile(f"s += {name}").statement.reads[0].name: torch.ones(2)}
        )
        assert got.tolist() == [2.0, 2.0]
