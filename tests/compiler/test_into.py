"""`out=`: results written to a tensor of the caller's, as torch's own functions do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insum_nn import Options, compile, insum
from insum_nn.errors import InsumError, InsumGradientError
from insum_nn.testing.random_programs import random_program
from tests.test_random_programs import Loops

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"


def operands() -> dict[str, Tensor]:
    return {
        "Row": torch.tensor([0, 2, 2, 3]),
        "Col": torch.tensor([1, 0, 4, 1]),
        "Val": torch.tensor([1.5, 2.0, -3.0, 0.5]),
        "B": torch.arange(10.0).reshape(5, 2),
    }


MEMORY: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.full((4, 2), float("nan")),
    lambda: torch.full((2, 4), float("nan")).T,
    lambda: torch.full((8, 6), float("nan"))[::2, 1:5:2],
)


@pytest.mark.parametrize("make", MEMORY)
def test_the_result_is_written_in_place_and_old_values_do_not_count(make: Callable[[], Tensor]):
    out = make()
    steps, address, version = out.stride(), out.data_ptr(), out._version
    returned = insum(SPMM, **operands(), out=out)
    assert returned is out
    assert (out.stride(), out.data_ptr()) == (steps, address)
    assert out._version > version
    assert torch.equal(out, insum(SPMM, **operands(), out_shape=(4, None)))


def test_a_tensor_that_is_both_start_and_out_is_added_to():
    """`C += A B`, which is what torch's `addmm(C, A, B, out=C)` does."""
    for make in (lambda: torch.ones(4, 2), lambda: torch.ones(2, 4).T):
        total = make()
        want = insum(SPMM, **operands(), C=make())
        for view in (total, total.view(total.shape)):
            total.fill_(1.0)
            assert insum(SPMM, **operands(), C=view, out=total) is total
            assert torch.equal(total, want)


def test_another_start_beside_out():
    out = torch.full((4, 2), float("nan"))
    bias = torch.tensor([1.0, 2.0])
    insum(SPMM, **operands(), C=bias, out=out)
    assert torch.equal(out, insum(SPMM, **operands(), out_shape=(4, None)) + bias)


@pytest.mark.parametrize("seed", range(0, 120, 3))
def test_random_programs(seed: int):
    program = random_program(seed)
    known = program.arguments()
    want = Loops(program).run()
    dtype = torch.float64 if program.initial is not None or any(
        t.is_floating_point() for t in program.tensors.values()
    ) else torch.get_default_dtype()  # fmt: skip
    out = torch.full(want.shape, float("nan"), dtype=dtype)
    # The tensor itself shows the extents.
    known["out_shape"] = None
    assert insum(program.expression, **known, out=out) is out
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-9)


def test_nothing_to_sum():
    out = torch.ones(3)
    insum("y[Row[p]] += x[p]", Row=torch.empty(0, dtype=torch.int64), x=torch.empty(0), out=out)
    assert out.tolist() == [0.0, 0.0, 0.0]
    empty = torch.empty(0)
    assert insum("y[i] += x[i]", x=torch.empty(0), out=empty) is empty


def test_activations_and_dtypes():
    out = torch.empty(2, dtype=torch.float64)
    x = torch.tensor([-1.0, 2.0])
    insum("y[i] += x[i]", x=x, activation="relu", out_dtype=torch.float64, out=out)
    assert out.tolist() == [0.0, 2.0]


def test_without_recording_leaves_may_be_written_and_read():
    weight = torch.ones(3, requires_grad=True)
    out = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        insum("y[i] += w[i]", w=weight, out=out)
    assert out.tolist() == [1.0, 1.0, 1.0]
    assert out.is_leaf


def test_columns_of_one_tensor_do_not_alias():
    whole = torch.arange(6.0).reshape(3, 2)
    insum("y[i] += 2 * x[i]", x=whole[:, 0], out=whole[:, 1])
    assert whole.tolist() == [[0.0, 0.0], [2.0, 4.0], [4.0, 8.0]]


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_what_is_written_may_overlap_what_is_read(shift: int):
    """As for torch's own functions, the result is that of tensors that do not."""
    whole = torch.arange(6.0)
    insum("y[i] += 2 * x[i]", x=whole[:3], out=whole[shift : shift + 3])
    want = torch.arange(6.0)
    want[shift : shift + 3] = torch.tensor([0.0, 2.0, 4.0])
    assert torch.equal(whole, want)


def test_an_error_leaves_the_tensor_alone():
    out = torch.ones(4, 2)
    broken = {**operands(), "Col": torch.tensor([1, 0, 9, 1])}
    with pytest.raises(InsumError):
        insum(SPMM, **broken, out=out)
    assert torch.equal(out, torch.ones(4, 2))


def test_programs_take_it_too():
    program = compile(SPMM, options=Options(deterministic=True))
    out = torch.empty(4, 2)
    for _ in range(2):
        assert program(**operands(), out=out) is out
    assert torch.equal(out, program(**operands(), out_shape=(4, None)))


@pytest.mark.parametrize("whole", [True, False])
def test_under_torch_compile(whole: bool):
    program = compile(SPMM)

    def step(out: Tensor, named: dict[str, Tensor]) -> Tensor:
        done = program(**named, out=out) if whole else insum(SPMM, **named, C=out, out=out)
        return done + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    eager, out = torch.ones(4, 2), torch.ones(4, 2)
    want = step(eager, operands())
    assert torch.equal(compiled(out, operands()), want)
    assert torch.equal(out, eager)


def test_under_torch_compile_a_gradient_is_refused():
    def step(out: Tensor, x: Tensor) -> Tensor:
        return insum("y[i] += x[i]", x=x, out=out)

    with pytest.raises(InsumGradientError):
        torch.compile(step, backend="aot_eager")(torch.zeros(3), torch.ones(3, requires_grad=True))
