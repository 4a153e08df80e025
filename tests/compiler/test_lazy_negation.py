"""`z.conj().imag` is a view with a bit that torch's operators obey and kernels do not see, so it is carried out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum_nn import Options, compile, insum
from insum_nn.formats import COO
from insum_nn.ops import spmm
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
INDEX = {"Row": torch.tensor([0, 2, 2, 3]), "Col": torch.tensor([1, 0, 4, 1])}
GENERATED = Options(backend="triton")


def lazy(*shape: int, seed: int = 0) -> Tensor:
    """A view that is minus an imaginary part; contiguous, so that a kernel could read it as it is."""
    generator = torch.Generator().manual_seed(seed)
    made = torch._neg_view(torch.randn(shape, generator=generator))
    assert made.is_neg()
    assert made.is_contiguous()
    return made


def product(val: Tensor, dense: Tensor, initial: Tensor | None = None) -> Tensor:
    matrix = torch.zeros(4, 5).index_put((INDEX["Row"], INDEX["Col"]), val, accumulate=True)
    return matrix @ dense + (0 if initial is None else initial)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("options", [GENERATED, Options(backend="eager")], ids=["triton", "eager"])
def test_values_and_starts(options: Options):
    val, dense, initial = lazy(4), lazy(5, 2, seed=1), lazy(4, 2, seed=2)
    program = compile(SPMM, options=options)
    program(**INDEX, Val=val.resolve_neg(), B=dense.resolve_neg(), C=initial.resolve_neg())
    for tensors in ((val, dense), (val.resolve_neg(), dense), (val, dense.resolve_neg())):
        for begin in (initial, initial.resolve_neg()):
            got = program(**INDEX, Val=tensors[0], B=tensors[1], C=begin)
            torch.testing.assert_close(got, product(val, dense, initial))


@pytest.mark.usefixtures("interpreter")
def test_imaginary_parts_of_conjugates():
    z = torch.complex(torch.rand(5, 2), torch.rand(5, 2))
    got = insum("s[n] += B[i,n]", B=z.conj().imag, options=GENERATED)
    torch.testing.assert_close(got, -z.imag.sum(0))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("which", ["operand", "gradient"])
def test_gradients(which: str):
    """One bit at a time, since two cancel: that of an operand kept for backward, that of the gradient that arrives."""
    z = torch.complex(torch.rand(4), torch.rand(4)).requires_grad_()
    dense = torch.rand(5, 2).requires_grad_()
    arriving = lazy(4, 2, seed=3) if which == "gradient" else torch.rand(4, 2)
    for _ in range(2):
        val = z.conj().imag if which == "operand" else z.imag
        out = insum(SPMM, **INDEX, Val=val, B=dense, out_shape=(4, None), options=GENERATED)
        got = torch.autograd.grad(out, (z, dense), arriving)
        want = torch.autograd.grad(product(val, dense), (z, dense), arriving)
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("interpreter")
def test_forward_mode():
    val, tangent, dense = torch.rand(4), lazy(4), lazy(5, 2, seed=1)

    def run(v: Tensor) -> Tensor:
        return insum(SPMM, **INDEX, Val=v, B=dense, out_shape=(4, None), options=GENERATED)

    got = torch.func.jvp(run, (val,), (tangent,))
    torch.testing.assert_close(got[1], product(tangent, dense))


@pytest.mark.usefixtures("interpreter")
def test_operators_on_formats():
    val, dense = lazy(4), lazy(5, 2, seed=1)
    for options in (GENERATED, Options()):
        matrix = COO.from_coo(torch.stack([INDEX["Row"], INDEX["Col"]]), val, (4, 5))
        for _ in range(2):
            torch.testing.assert_close(spmm(matrix, dense, options=options), product(val, dense))
