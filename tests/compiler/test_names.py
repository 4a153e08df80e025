"""Names mean nothing: a statement with other names has the same kernel and the same result."""

from __future__ import annotations

import keyword
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from insum_nn import Options, compile, insum
from insum_nn.testing.random_programs import random_program
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

SPMM = "{C}[{Row}[{p}],{n}] += {Val}[{p}] * {B}[{Col}[{p}],{n}]"
ROLES = ("C", "Row", "p", "n", "Val", "B", "Col")
# Names in the order of `ROLES`; those of the indices may be those of tensors.
NAMINGS = (
    ("C", "Row", "p", "n", "Val", "B", "Col"),
    ("y", "row", "Row", "x", "Y", "X", "ROW"),
    ("x", "ColIdx", "i", "I", "X", "X_1", "col_idx"),
    ("Y", "w", "W", "w", "y", "W", "_w"),
    ("arg0", "arg1", "arg3", "arg2", "arg_1", "arg2", "Arg1"),
    ("kernel", "pid", "acc", "pid", "tl", "acc", "triton"),
    ("T", "t0", "t", "t0", "t", "t1", "Tl"),
    ("torch", "self", "A_1", "device", "inf", "nan", "getattr_1"),
    ("dB", "dVal", "dC", "share", "dC", "batch", "dC_"),
    ("class", "None", "lambda", "def", "True", "import", "async"),
)


def operands() -> dict[str, Tensor]:
    return {
        "Row": torch.tensor([0, 2, 2, 3]),
        "Col": torch.tensor([1, 0, 4, 1]),
        "Val": torch.tensor([1.5, 2.0, -3.0, 0.5]),
        "B": torch.arange(10.0).reshape(5, 2),
    }


def dense() -> Tensor:
    given = operands()
    matrix = torch.zeros(4, 5)
    matrix[given["Row"], given["Col"]] = given["Val"]
    return matrix @ given["B"]


def run(naming: tuple[str, ...], options: Options) -> tuple[Tensor, list[Tensor]]:
    """The product in these names, and the gradients of a weighted sum of its cells."""
    names = dict(zip(ROLES, naming, strict=True))
    tensors = {names[role]: t.clone() for role, t in operands().items()}
    learned = [tensors[names[role]].requires_grad_() for role in ("Val", "B")]
    out = insum(SPMM.format(**names), tensors=tensors, out_shape=(4, None), options=options)
    return out.detach(), list(torch.autograd.grad((out * torch.arange(8.0).reshape(4, 2)).sum(), learned))


@pytest.mark.parametrize("naming", NAMINGS)
def test_a_product_in_other_names(naming: tuple[str, ...]):
    for options in (Options(), Options(order="left", deterministic=True), Options(validate=True)):
        (out, gradients), (_, expected) = run(naming, options), run(NAMINGS[0], options)
        assert torch.equal(out, dense())
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.usefixtures("interpreter")
def test_a_generated_product_in_other_names(naming: tuple[str, ...]):
    out, gradients = run(naming, Options(backend="triton"))
    torch.testing.assert_close(out, dense())
    for got, want in zip(gradients, run(NAMINGS[0], Options(backend="eager"))[1], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("expression", "tensors", "expected"),
    [
        ("y[i] += W[i] * w[i]", {"W": [1.0, 2.0, 3.0], "w": [10.0, 10.0, 10.0]}, [10.0, 20.0, 30.0]),
        ("y[i] += X[i,k] * x[k]", {"X": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "x": [1.0, 10.0]}, [21.0, 43.0, 65.0]),
        ("y[Row[p]] += row[p]", {"Row": [2, 0], "row": [1.0, 2.0]}, [2.0, 0.0, 1.0]),
        ("y[p] += x[ColIdx[p]] * col_idx[p]", {"ColIdx": [1, 0], "col_idx": [5.0, 7.0], "x": [1.0, 2.0]}, [10.0, 7.0]),
        ("y[i] max= Y[i,k]", {"Y": [[1.0, 2.0], [3.0, -4.0]]}, [2.0, 3.0]),
    ],
)
def test_names_that_differ_in_case(expression: str, tensors: dict[str, list[float]], expected: list[float]):
    named = {name: torch.tensor(values) for name, values in tensors.items()}
    shape = (3,) if expression.startswith("y[Row") else None
    assert insum(expression, out_shape=shape, **named).tolist() == expected


def test_a_starting_value_beside_a_tensor_of_almost_its_name():
    initial = torch.tensor([100.0, 200.0])
    assert insum("y[i] += Y[i]", Y=torch.tensor([1.0, 2.0]), y=initial).tolist() == [101.0, 202.0]


def test_every_keyword_of_python_may_be_a_name():
    for a, b in pairwise(keyword.kwlist):
        result = insum(f"{a}[{b}] += {b}[{a}] * {a}_[{b},{a}]", tensors={b: torch.ones(2), f"{a}_": torch.ones(3, 2)})
        assert result.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.usefixtures("interpreter")
def test_kernels_and_graphs_of_other_names_are_the_same_text():
    texts: set[tuple[str, str]] = set()
    for naming in NAMINGS:
        names = dict(zip(ROLES, naming, strict=True))
        tensors = {names[role]: t for role, t in operands().items()}
        kernel, library = (
            compile(SPMM.format(**names), options=Options(backend=backend)).explain(
                tensors=tensors, out_shape=(4, None)
            )
            for backend in ("triton", "eager")
        )
        graph = [line for line in str(library.torch_code).splitlines() if not line.startswith("#")]
        texts.add((str(kernel.kernel_source()), "\n".join(graph)))
    assert len(texts) == 1


@pytest.mark.library_calls
def test_explain_says_what_the_arguments_of_the_graph_are():
    explanation = compile("y[Row[p]] += row[p]").explain(Row=torch.tensor([0, 1]), row=torch.rand(2), y=torch.zeros(3))
    lines = str(explanation.torch_code).splitlines()
    assert lines[:4] == [
        "# arg0: Row",
        "# arg1: row",
        "# arg2: the extent of axis 0 of y",
        "# arg3: y, the initial value",
    ]


def test_random_programs_can_be_explained():
    for seed in range(40):
        program = random_program(seed)
        known = program.arguments()
        explanation = compile(program.expression, sizes=program.sizes).explain(**known)
        assert program.expression.split("[")[0].split(" ")[0] in str(explanation)
