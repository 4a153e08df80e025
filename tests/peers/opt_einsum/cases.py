"""opt_einsum's own list of contractions, and equations that it draws, as statements; `tests/peers/run_from_index.py`.

Its wheel carries both. NumPy's einsum, in float64, is the oracle.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from opt_einsum import contract
from opt_einsum.parser import find_output_str
from opt_einsum.testing import build_views, rand_equation
from opt_einsum.tests.test_contract import tests as CONTRACTIONS

import insum_nn
from insum_nn import Options


def statement(equation: str) -> str:
    """The equation in our language; where it names no output, that holds the indices that stand once, in order."""
    operands, arrow, result = equation.partition("->")
    result = result if arrow else find_output_str(operands)
    number = {letter: f"i{at}" for at, letter in enumerate(sorted({*operands} - {","}))}

    def access(name: str, letters: str) -> str:
        return f"{name}[{','.join(number[letter] for letter in letters)}]" if letters else name

    factors = (access(f"T{at}", letters) for at, letters in enumerate(operands.split(",")))
    return f"{access('Out', result)} += {' * '.join(factors)}"


@pytest.mark.parametrize("order", ["cost", "left"])
@pytest.mark.parametrize("equation", CONTRACTIONS)
def test_contractions(equation: str, order: str):
    views = build_views(equation)
    named = {f"T{at}": torch.tensor(view, dtype=torch.float64) for at, view in enumerate(views)}
    got = insum_nn.insum(statement(equation), tensors=named, options=Options(order=order))
    np.testing.assert_allclose(got.numpy(), np.einsum(equation, *views), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_random_equations(seed: int):
    """Trees of two to nine tensors, with open indices and with one that all share."""
    equation, shapes = rand_equation(2 + seed % 8, 2, n_out=seed % 4, d_max=4, seed=seed, global_dim=seed % 3 == 0)
    arrays = [np.random.default_rng(at).normal(size=shape) for at, shape in enumerate(shapes)]
    named = {f"T{at}": torch.tensor(array) for at, array in enumerate(arrays)}
    want = contract(equation, *arrays, optimize="greedy")
    got = insum_nn.insum(statement(equation), tensors=named)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(want).max())))
