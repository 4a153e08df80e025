"""Code that Inductor has compiled outlives its process, in torch's cache; guards decide which sizes it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

import insum_nn
from insum_nn import Options
from insum_nn.compiler.codegen import inductor

SCRIPT = """
import torch, insum_nn
from torch._dynamo.utils import counters
from insum_nn import Options
program = insum_nn.compile("C[Row[g],n] += Val[g,q] * B[Col[g,q],n]", options=Options(backend="inductor"))
torch.manual_seed(0)
for size in (6, 11):
    tensors = {
        "Row": torch.randint(0, 5, (size,)), "Col": torch.randint(-1, 7, (size, 3)),
        "Val": torch.randn(size, 3), "B": torch.randn(7, 9),
    }
    found = program(tensors=tensors, out_shape=(5, None)).double()
    assert torch.allclose(found, program.reference(tensors=tensors, out_shape=(5, None)), atol=1e-5)
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


def run(folder: Path) -> str:
    environment = {**os.environ, "INSUM_NN_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    # Each would compile torch's headers in an empty folder, for longer than the one kernel: by themselves, and to see
    # which vectors a compiler knows.
    environment |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.compile
def test_a_second_process_finds_the_code(tmp_path: Path):
    assert run(tmp_path) == "1 0"
    assert run(tmp_path) == "0 1"


# Guards.


@pytest.mark.compile
def test_what_is_assumed_of_sizes_is_known_of_code_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assumed: list[set[str]] = []
    plain = inductor._Symbols.guard

    def noted(symbols: inductor._Symbols, arguments: Sequence[object]) -> object:
        assumed.append({str(guard.expr) for guard in symbols.env.guards})
        return plain(symbols, arguments)

    monkeypatch.setattr(inductor._Symbols, "guard", noted)
    x, w = torch.randn(12), torch.randn(3)
    for _ in range(2):
        insum_nn.clear_cache()
        found = insum_nn.insum("y[i] += x[i+k] * w[k]", x=x, w=w, sizes={"i": 10}, options=Options(backend="inductor"))
        torch.testing.assert_close(found, x.unfold(0, 3, 1) @ w)
    assert assumed[0] == assumed[1]


SIZE, OTHER = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
GUARDS = [
    sympy.Eq(SIZE, 2 * OTHER + 1),
    sympy.And(SIZE > 1, sympy.Or(OTHER <= 7, sympy.Not(sympy.Ne(Mod(SIZE, 4), 3)))),
    FloorDiv(SIZE * OTHER, 3) < SIZE**2,
    sympy.Max(SIZE, OTHER) >= sympy.Min(SIZE, 5) - OTHER,
    SIZE / 2 > OTHER,
]


def symbols(*guards: sympy.Basic) -> inductor._Symbols:
    """Sizes of the first and the second axis of one tensor, of which guards speak."""
    found = inductor._Symbols()
    found.shown = {SIZE: (0, 0), OTHER: (0, 1)}
    found.env = SimpleNamespace(guards=[SimpleNamespace(expr=guard) for guard in guards])  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("guard", GUARDS, ids=str)
def test_guards_hold_for_the_sizes_that_sympy_says(guard: sympy.Basic):
    sizes = [(a, b) for a in range(1, 12) for b in range(1, 12)]
    # Of the first call they hold.
    first = next((a, b) for a, b in sizes if guard.subs({SIZE: a, OTHER: b}))
    made = symbols(guard, sympy.true, OTHER < 11)
    code = inductor.Compiled(len, tuple(made.shown.values()), made.guard([torch.zeros(first)]))
    for a, b in sizes:
        expected = bool(guard.subs({SIZE: a, OTHER: b})) and b < 11
        assert code.fits([torch.zeros(a, b)]) == expected, (guard, a, b)


def test_without_guards_all_sizes_are_served():
    assert symbols(sympy.true).guard([torch.zeros(3, 4)]) is None


@pytest.mark.parametrize("guard", [sympy.Function("unheard_of")(SIZE) > 0, sympy.Symbol("s9") > 2, SIZE > 5], ids=str)
def test_a_guard_that_says_nothing_serves_the_sizes_of_its_call(guard: sympy.Basic):
    holds = symbols(guard).guard([torch.zeros(3, 4)])
    assert holds is not None
    assert holds(3, 4)
    assert not holds(3, 5)
