"""Each rule of the language on a case small enough to work out by hand."""

from __future__ import annotations

import builtins
import keyword
import math

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, insum
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.runtime import execution
from insum_nn.dtypes import FLOATS, INDEX_DTYPES, VALUE_DTYPES, is_widened
from insum_nn.errors import InsumRangeError

INTEGERS = tuple(dtype for dtype in VALUE_DTYPES if dtype not in FLOATS)
WIDENED = tuple(filter(is_widened, FLOATS))
NAN, INF = math.nan, math.inf


def ints(*entries: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(entries, dtype=dtype)


def reals(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check(want: object, expression: str, **arguments: object) -> Tensor:
    """The call gives these numbers, and so does the reference."""
    got = insum(expression, **arguments)
    expected = torch.tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, expected, equal_nan=True)
    sizes = arguments.pop("sizes", None)
    program = insum_nn.compile(expression, sizes=sizes)
    torch.testing.assert_close(program.reference(**arguments).to(got.dtype), expected, equal_nan=True)
    return got


# The loop nest.


def test_products_and_sums():
    A, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 100.0])
    check([210.0, 430.0], "y[i] += A[i,j] * x[j]", A=A, x=x)
    check([[10.0, 200.0], [30.0, 400.0]], "y[i,j] += A[i,j] * x[j]", A=A, x=x)
    check(10.0, "s += A[i,j]", A=A)
    check([[1.0, 3.0], [2.0, 4.0]], "T[j,i] = A[i,j]", A=A)
    check(
        40.0,
        "s += A[i,j] * A[j,k] * 1 * w[k] * v[i]",
        A=A,
        w=torch.tensor([0.0, 1.0]),
        v=torch.tensor([1.0, 1.0]) * 1.25,
    )


def test_diagonals_and_repeated_indices():
    A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    check([1.0, 4.0], "d[i] += A[i,i]", A=A)
    check(5.0, "t += A[i,i]", A=A)
    check([[5.0, 0.0], [0.0, 7.0]], "D[i,i] += x[i]", x=torch.tensor([5.0, 7.0]))
    check([1.0, 16.0], "y[i] += A[i,i] * A[i,i]", A=A)


def test_a_sum_beside_the_product_multiplies():
    """An index that only one factor carries is summed there: sum_j a_j * sum_k b_k."""
    check(30.0, "s += a[j] * b[k]", a=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0, 7.0]))
    check([6.0, 8.0], "y[i] += x[i]", x=torch.tensor([2.0, 3.0]), y=torch.tensor([4.0, 5.0]))


def test_scalars_and_numbers():
    x = torch.tensor([1.0, 2.0])
    check([6.0, 12.0], "y[i] += alpha * x[i] * 2", alpha=torch.tensor(3.0), x=x)
    check([-0.5, -1.0], "y[i] = -.5 * x[i]", x=x)
    check([0.0, 0.0], "y[i] += 0 * x[i]", x=x)
    check(6.0, "s += a * b", a=torch.tensor(2.0), b=torch.tensor(3.0))
    check([6.0, 6.0, 6.0], "y[i] += 2 * 3", sizes={"i": 3})
    check([2.0, 0.0], "y[0] += 2", out_shape=(2,))


def test_a_new_axis_repeats():
    check([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], "y[i,j] += x[i]", x=torch.tensor([1.0, 2.0]), sizes={"j": 3})
    # An index that is only summed counts its terms.
    check([2.0, 4.0], "y[i] += x[i] * ones[j]", x=torch.tensor([1.0, 2.0]), ones=torch.ones(2))


# Index tensors.


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_gather_and_scatter(dtype: torch.dtype):
    x = torch.tensor([1.0, 10.0, 100.0])
    E = ints(2, 0, 2, 1, dtype=dtype)
    check([100.0, 1.0, 100.0, 10.0], "y[i] += x[E[i]]", E=E, x=x)
    check([2.0, 8.0, 5.0, 0.0], "y[E[i]] += v[i]", E=ints(0, 2, 1, 1, dtype=dtype), v=reals(2, 5, 1, 7), out_shape=(4,))


def test_duplicates_all_count():
    check([6.0, 0.0], "y[E[i]] += v[i]", E=ints(0, 0, 0), v=reals(1, 2, 3), out_shape=(2,))
    check([6.0, 0.0], "y[E[i]] = v[i]", E=ints(0, 0, 0), v=reals(1, 2, 3), out_shape=(2,))
    check([3.0, 0.0], "y[E[i]] max= v[i]", E=ints(0, 0, 0), v=reals(1, 3, 2), out_shape=(2,))
    check([12.0], "y[0] += v[i] * 2", v=reals(1, 2, 3), out_shape=(1,))


def test_index_tensors_of_both_dtypes_meet():
    x = torch.arange(12.0).view(3, 4)
    check([6.0, 3.0], "y[i] += x[E[i],F[i]]", E=ints(1, 0, dtype=torch.int32), F=ints(2, 3), x=x)
    out = [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0], [0.0, 7.0, 0.0, 0.0]]
    check(out, "y[E[i],F[i]] += v[i]", E=ints(1, 2, dtype=torch.int32), F=ints(2, 1), v=reals(5, 7), out_shape=(3, 4))


def test_nested_indirection():
    x = reals(1, 10, 100)
    check([100.0, 1.0], "y[i] += x[E[F[i]]]", E=ints(0, 1, 2), F=ints(2, 0), x=x)
    check([10.0, 100.0], "y[i] += x[E[F[G[i]]]]", E=ints(2, 1, 0), F=ints(1, 0), G=ints(0, 1), x=x)
    check([0.0, 7.0, 5.0], "y[E[F[i]]] += v[i]", E=ints(1, 2), F=ints(1, 0), v=reals(5, 7), out_shape=(3,))


def test_grouped_entries():
    """Insum's GroupCOO: a row per group, a column per slot, -1 in unused slots."""
    got = check(
        [[21.0], [0.0], [300.0]],
        "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]",
        Row=ints(0, 2),
        Col=torch.tensor([[0, 1], [2, -1]]),
        Val=torch.tensor([[1.0, 2.0], [3.0, 99.0]]),
        B=torch.tensor([[1.0], [10.0], [100.0]]),
        out_shape=(3, None),
    )
    assert got.shape == (3, 1)


# Affine subscripts.


def test_terms_that_read_outside_take_no_part():
    x = reals(1, 2, 3)
    check([0.0, 1.0, 2.0, 3.0, 0.0], "y[i] += x[i-1]", x=x, sizes={"i": 5})
    check([3.0, 2.0, 1.0], "y[i] += x[2-i]", x=x, sizes={"i": 3})
    check([2.0, 0.0], "y[i] += x[2*i+1]", x=x, sizes={"i": 2})
    check([3.0, 6.0, 5.0], "y[i] += x[i+r-1] * w[r]", x=x, w=reals(1, 1, 1), sizes={"i": 3})
    check([0.0, 0.0], "y[i] += x[i+1000000000000]", x=x, sizes={"i": 2})
    check([6.0, 6.0], "y[j] += x[1] * a[j] * x[2]", x=x, a=reals(1, 1))
    for constant in (3, -1):
        with pytest.raises(InsumRangeError, match=f"'{constant}' reads outside axis 0 of 'x'"):
            insum(f"y[j] += x[{constant}] * a[j]", x=x, a=reals(1, 1))


def test_two_dimensional_convolution_with_padding():
    image = torch.randn(5, 6, dtype=torch.float64)
    kernel = torch.randn(3, 3, dtype=torch.float64)
    got = insum("O[p,q] += I[2*p+r-1,q+s-1] * F[r,s]", I=image, F=kernel, sizes={"p": 3, "q": 6})
    want = torch.nn.functional.conv2d(image[None, None], kernel[None, None], stride=(2, 1), padding=1)[0, 0]
    torch.testing.assert_close(got, want)


def test_affine_writes():
    check([0.0, 1.0, 0.0, 2.0], "y[2*i+1] += x[i]", x=reals(1, 2), out_shape=(4,))
    check([2.0, 1.0], "y[1-i] += x[i]", x=reals(1, 2), out_shape=(2,))
    check([1.0, 2.0 + 3.0, 4.0], "y[i+j] += A[i,j]", A=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), out_shape=(3,))


def test_sums_with_index_tensors():
    x = reals(1, 10, 100, 1000)
    check([10.0, 1000.0], "y[i] += x[E[i]+1]", E=ints(0, 2), x=x)
    check([0.0, 100.0], "y[i] += x[2*E[i]-F[i]]", E=ints(0, 2), F=ints(3, 2), x=x)
    check([0.0, 0.0, 5.0, 7.0], "y[E[i]+i] += v[i]", E=ints(2, 2), v=reals(5, 7), out_shape=(4,))


# "No entry".


def test_a_term_that_reads_through_minus_one_takes_no_part():
    check([0.0, 1.0], "y[i] += x[E[i]]", E=ints(-1, 0), x=reals(1, 2))
    check([5.0, 6.0], "y[i] += x[E[i]]", E=ints(-1, 0), x=reals(1, 2), y=reals(5, 5))
    check([0.0, 0.0], "y[i] += x[E[i]] * z[i]", E=ints(-1, -1), x=reals(1, 2), z=reals(3, 4))


def test_writing_through_minus_one_is_dropped():
    check([0.0, 5.0], "y[E[i]] += v[i]", E=ints(-1, 1, -1), v=reals(9, 5, 9), out_shape=(2,))
    check(
        [[0.0, 0.0], [5.0, 0.0]],
        "y[E[i],F[i]] += v[i]",
        E=ints(-1, 1, 0),
        F=ints(0, 0, -1),
        v=reals(9, 5, 9),
        out_shape=(2, 2),
    )


def test_no_entry_passes_through_nesting():
    x = reals(1, 10)
    check([0.0, 10.0, 0.0], "y[i] += x[E[F[i]]]", E=ints(1, -1), F=ints(-1, 0, 1), x=x)
    # A sum that points outside of an index tensor misses too; a bare entry that does is an error.
    check([10.0, 0.0, 0.0], "y[i] += x[E[F[i]+1]]", E=ints(-1, 1), F=ints(0, 1, 7), x=x)
    with pytest.raises(InsumRangeError, match="'F' points outside axis 0 of 'E'"):
        insum("y[i] += x[E[F[i]]]", E=ints(1), F=ints(0, 1, 7), x=x)
    check([0.0, 10.0, 0.0], "y[i] += x[E[i-1]]", E=ints(1), x=x, sizes={"i": 3})
    check([0.0, 7.0], "y[E[i-1]] += v[i]", E=ints(1), v=reals(5, 7, 9), out_shape=(2,))


def test_no_entry_is_no_number():
    """-1 inside a sum is "no entry", not minus one."""
    x = reals(1, 10, 100)
    check([0.0, 10.0], "y[i] += x[E[i]+1]", E=ints(-1, 0), x=x)
    check([0.0, 5.0, 0.0], "y[E[i]+1] += v[i]", E=ints(-1, 0), v=reals(9, 5), out_shape=(3,))
    check([0.0, 1.0], "y[i] += x[0-E[i]]", E=ints(-1, 0), x=x)


def test_other_negative_entries_are_refused():
    with pytest.raises(InsumRangeError):
        insum("y[i] += x[E[i]]", E=ints(-2, 0), x=reals(1, 2))
    with pytest.raises(InsumRangeError):
        insum("y[i] += x[E[i]+2]", E=ints(-2, 0), x=reals(1, 2))
    with pytest.raises(InsumRangeError):
        insum("y[E[i]] += v[i]", E=ints(-2, 0), v=reals(1, 2), out_shape=(2,))


# Operators.


def test_starting_values():
    x, y = reals(1, 5), reals(3, 3)
    check([4.0, 8.0], "y[i] += x[i]", x=x, y=y)
    check([3.0, 5.0], "y[i] max= x[i]", x=x, y=y)
    check([1.0, 3.0], "y[i] min= x[i]", x=x, y=y)
    check([3.0, 10.0], "y[E[i]] += x[i]", E=ints(1, 1), x=reals(3, 4), y=y)
    check(9.0, "s += x[i]", x=x, s=torch.tensor(3.0, dtype=torch.float64))
    assert y.tolist() == [3.0, 3.0]


def test_extrema():
    A = torch.tensor([[1.0, -2.0], [-3.0, -4.0]])
    check([1.0, -3.0], "y[i] max= A[i,j]", A=A)
    check([-2.0, -4.0], "y[i] min= A[i,j]", A=A)
    check(1.0, "s max= A[i,j]", A=A)
    check([-3.0, -5.0, 0.0], "y[E[i]] max= v[i]", E=ints(1, 0, 1), v=reals(-5, -3, -7), out_shape=(3,))
    # The product is formed first: the largest of -1 * x.
    check(-1.0, "s max= -1 * x[i]", x=reals(1, 5))


def test_extrema_leave_cells_that_nobody_wrote():
    check([0.0, -3.0], "y[E[i]] max= v[i]", E=ints(1, -1), v=reals(-3, 9), out_shape=(2,))
    check([7.0, -3.0], "y[E[i]] max= v[i]", E=ints(1, -1), v=reals(-3, 9), y=reals(7, -8))
    check([0.0, 0.0], "y[i] max= x[E[i,j]]", E=ints(-1, -1, -1, -1).view(2, 2), x=reals(5))
    check([0.0, 0.0], "y[i] min= x[i,j]", x=torch.zeros(2, 0, dtype=torch.float64))


def test_a_term_without_an_entry_takes_no_part_in_an_extremum():
    x = reals(-5, -7)
    check([-5.0, -7.0], "y[i] max= x[E[i,j]]", E=torch.tensor([[0, -1], [-1, 1]]), x=x)
    check([-5.0], "y[i] max= x[E[i,j]] * w[j]", E=torch.tensor([[-1, 0]]), x=x, w=reals(9, 1))
    # Nor does one that reads outside by an affine subscript.
    check([0.0, -5.0], "y[i] max= x[i-1]", x=x, sizes={"i": 2})
    check([-5.0], "y[j] max= x[i-1] * w[i,j]", x=x, w=torch.ones(3, 1, dtype=torch.float64))


def test_nan_and_infinity_arrive():
    check([NAN, INF], "y[i] += x[i]", x=reals(NAN, INF))
    check(NAN, "s += x[i]", x=reals(1, NAN))
    check(NAN, "s += x[i]", x=reals(INF, -INF))
    check([NAN, 2.0], "y[i] max= A[i,j]", A=torch.tensor([[1.0, NAN], [2.0, 1.0]]))
    check([NAN, 1.0], "y[i] min= A[i,j]", A=torch.tensor([[1.0, NAN], [2.0, 1.0]]))
    check([-INF], "y[i] max= A[i,j]", A=torch.tensor([[-INF, -INF]]))
    check([NAN], "y[E[i]] max= v[i]", E=ints(0, 0), v=reals(NAN, 3), out_shape=(1,))
    check(NAN, "s += 0 * x[i]", x=reals(INF))


def test_nan_behind_no_entry_does_not_leak():
    """What -1 or padding keeps from being read cannot spoil the sum, whatever a clamped index would find there."""
    x = reals(NAN, 2)
    check([0.0, 2.0], "y[i] += x[E[i]]", E=ints(-1, 1), x=x)
    check([0.0, 2.0], "y[i] += x[i+E[i]]", E=ints(-1, 0), x=x)
    check([0.0, 0.0], "y[i] += x[i+5]", x=reals(NAN, NAN), sizes={"i": 2})
    check([5.0], "y[E[i]] += v[i]", E=ints(-1, 0), v=reals(NAN, 5), out_shape=(1,))
    check([2.0], "y[i] max= x[E[i,j]]", E=torch.tensor([[-1, 1]]), x=x)
    B = reals(NAN, 2).view(2, 1)
    arguments = {"Row": ints(0, 0), "Col": ints(-1, 1), "Val": reals(3, 1), "B": B, "out_shape": (1, None)}
    check([[2.0]], "C[Row[p],n] += Val[p] * B[Col[p],n]", **arguments)


def test_what_a_term_that_misses_would_multiply_does_not_matter():
    check(1.0, "s += x[E[i]] * w[i]", E=ints(-1, 0), x=reals(1), w=reals(NAN, 1))
    check([0.0, 1.0, 0.0], "y[i] += x[i-1] * w[i]", x=reals(1), w=reals(INF, 1, NAN))


# Dtypes.


@pytest.mark.parametrize("dtype", WIDENED)
def test_fp16_and_bf16_are_summed_in_float32(dtype: torch.dtype):
    count = 4096
    ones = torch.ones(count, dtype=dtype)
    assert insum("s += x[i]", x=ones).item() == count
    assert insum("s += x[i] * y[i]", x=ones, y=ones).item() == count
    zero = torch.zeros(count, dtype=torch.int64)
    assert insum("y[E[i]] += x[i]", E=zero, x=ones, out_shape=(1,)).item() == count
    grouped = insum(
        "C[E[g],n] += V[g,q] * B[F[g,q],n]",
        E=zero,
        V=ones.view(-1, 1),
        F=zero.view(-1, 1),
        B=ones[:2].view(1, 2),
        out_shape=(1, None),
    )
    assert grouped.tolist() == [[count, count]]
    assert grouped.dtype == dtype
    many = insum("s += x[i]", x=torch.full((60_000,), 2.0, dtype=torch.bfloat16)[:: 60_000 // count])
    assert many.item() == pytest.approx(2 * len(range(0, 60_000, 60_000 // count)), rel=2**-8)


@pytest.mark.parametrize("dtype", WIDENED)
def test_many_ties_share_a_gradient(dtype: torch.dtype):
    """fp16 counts no 70,000 terms."""
    x = torch.zeros(70_000, dtype=dtype, requires_grad=True)
    insum("m max= x[i]", x=x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), torch.full_like(x, 1 / 70_000, dtype=torch.float64), rtol=2e-2, atol=0)


def test_fp16_may_be_summed_in_fp16_by_request():
    ones = torch.ones(4096, dtype=torch.float16)
    zero = torch.zeros(4096, dtype=torch.int64)
    options = Options(accumulate="storage")
    got = insum("y[E[i]] += x[i]", E=zero, x=ones, out_shape=(1,), options=options)
    assert got.item() <= 4096


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_keep_their_dtype(dtype: torch.dtype):
    x = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    for expression in ("y[i] += x[i] * 2", "y[i] = x[i]", "y[i] max= x[i]", "y[E[i]] += x[i]", "y[i] += x[E[i]]"):
        arguments = {"E": ints(2, 1, 0)} if "E" in expression else {}
        got = insum(expression, x=x, out_shape=(3,), **arguments)
        assert got.dtype == dtype
        assert torch.equal(got, insum_nn.compile(expression).reference(x=x, out_shape=(3,), **arguments).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype: torch.dtype):
    x = torch.tensor([1, 2, 3], dtype=dtype)
    for operator, want in (("+=", [5, 2]), ("max=", [6, 2]), ("min=", [2, 2])):
        want = [2 + 6, 4] if operator == "+=" else [6, 4] if operator == "max=" else [2, 4]
        got = insum(f"y[E[i]] {operator} 2 * x[i]", E=ints(0, 1, 0), x=x, out_shape=(2,))
        assert got.dtype == dtype
        assert got.tolist() == want
    got = insum("C[i,j] += A[i,k] * A[j,k]", A=x.view(1, 3))
    assert got.dtype == dtype
    assert got.tolist() == [[14]]


def test_large_integers_are_exact():
    big = 2**53 + 1
    x = torch.tensor([big, big], dtype=torch.int64)
    assert insum("s += x[i]", x=x).item() == 2 * big
    assert insum("y[i] += x[i] * 3", x=x).tolist() == [3 * big] * 2
    assert insum("y[E[i]] max= x[i]", E=ints(0, 0), x=torch.tensor([-big, -big - 1]), out_shape=(1,)).tolist() == [-big]
    assert insum_nn.compile("s += x[i]").reference(x=x).item() == 2 * big


# Shapes.


def test_zero_and_six_dimensions():
    a = torch.randn(2, 3, 1, 2, 3, 2, dtype=torch.float64)
    got = insum("y[n,m,k,j,i,h] = a[h,i,j,k,m,n]", a=a)
    assert torch.equal(got, a.permute(5, 4, 3, 2, 1, 0))
    assert insum("s += a[h,i,j,k,m,n] * a[h,i,j,k,m,n]", a=a).item() == pytest.approx(float((a * a).sum()))
    assert insum("y[h,i,j,k,m,n] += s", s=torch.tensor(2.0), sizes=dict.fromkeys("hijkmn", 2)).shape == (2,) * 6
    E = torch.randint(-1, 2, (2, 3, 1, 2, 3, 2))
    got = insum("y[h,n] += x[E[h,i,j,k,m,n]]", E=E, x=reals(1, 10))
    want = torch.where(E < 0, 0, reals(1, 10)[E.clamp(min=0)]).sum((1, 2, 3, 4))
    torch.testing.assert_close(got, want)


EMPTY = {
    "summed": ("y[i] += A[i,j] * x[j]", {"A": torch.ones(2, 0), "x": torch.ones(0)}, {}, [0.0, 0.0]),
    "summed, with a start": ("y[i] += A[i,j]", {"A": torch.ones(2, 0), "y": torch.ones(2)}, {}, [1.0, 1.0]),
    "written": ("y[i] += x[i]", {"x": torch.ones(0)}, {}, []),
    "entries": ("y[E[p]] += v[p]", {"E": ints()[:0], "v": torch.ones(0)}, {"out_shape": (2,)}, [0.0, 0.0]),
    "target": ("y[i] += x[E[i]]", {"E": ints(-1, -1), "x": torch.ones(0)}, {}, [0.0, 0.0]),
    "target of an affine read": ("y[i] += x[i-1]", {"x": torch.ones(0)}, {"sizes": {"i": 2}}, [0.0, 0.0]),
    "index tensor": ("y[i] += x[E[i-1]]", {"E": ints()[:0], "x": torch.ones(2)}, {"sizes": {"i": 2}}, [0.0, 0.0]),
    "output axis": ("y[i,E[i]] += v[i]", {"E": ints(-1, -1), "v": torch.ones(2)}, {"out_shape": (None, 0)}, [[], []]),
    "maximum": ("y[i] max= A[i,j]", {"A": torch.ones(2, 0)}, {}, [0.0, 0.0]),
    "size": ("y[i] += x[i] * w[j]", {"x": torch.ones(2), "w": torch.ones(0)}, {}, [0.0, 0.0]),
    "scalar": ("s += x[i]", {"x": torch.ones(0)}, {}, 0.0),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_extents(name: str):
    expression, tensors, others, want = EMPTY[name]
    got = insum(expression, **tensors, **others)
    assert got.tolist() == want
    assert got.dtype == torch.float32
    leaves = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in tensors.items()}
    insum(expression, **leaves, **others).sum().backward()
    for tensor in leaves.values():
        if tensor.is_floating_point():
            assert tensor.grad.shape == tensor.shape


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, torch.full_like(t, NAN)], -1).flatten(1)[:, ::2],
    "offset": lambda t: torch.cat([torch.full_like(t, NAN), t])[t.shape[0] :],
    "expanded": lambda t: t[:1].expand_as(t),
    "conjugate of nothing": lambda t: t.flip(0).flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout: str):
    """The same shapes as a contiguous call, which came before and left everything ready."""
    expression = "C[i,n] += A[i,k] * B[E[k],n]"
    A, B, E = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64), ints(4, -1, 0, 4)
    insum(expression, A=A, B=B, E=E)
    change = LAYOUTS[layout]
    a, b = change(A), change(B)
    entries = torch.stack([E, torch.full_like(E, 99)], 1)[:, 0]
    got = insum(expression, A=a, B=b, E=entries)
    want = insum_nn.compile(expression).reference(A=a, B=b, E=entries)
    torch.testing.assert_close(got, want)
    initial = change(torch.randn(3, 2, dtype=torch.float64))
    got = insum(expression, A=a, B=b, E=entries, C=initial)
    torch.testing.assert_close(got, want + initial)


ALIASES = {
    "copy": ("y[i,j] = x[i,j]", {}),
    "copy added": ("y[i,j] += x[i,j]", {}),
    "transposed": ("y[j,i] = x[i,j]", {}),
    "largest": ("y[i,j] max= x[i,j]", {}),
    "once": ("y[i,j] = 1 * x[i,j]", {}),
    "diagonal": ("y[i] = x[i,i]", {}),
    "row": ("y[j] = x[0,j]", {}),
    "gathered": ("y[i,j] = x[E[i],j]", {"E": ints(0, 1, 2)}),
    "scattered": ("y[E[i],j] = x[i,j]", {"E": ints(0, 1, 2)}),
    "empty": ("y[i,j] = x[i,j] * w[k]", {"w": reals()}),
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("initial", [False, True])
def test_the_output_is_its_own(name: str, initial: bool):
    expression, others = ALIASES[name]
    x = torch.randn(3, 3, dtype=torch.float64)
    arguments = {"x": x, **others}
    shape = (3,) if "y[i] " in expression or "y[j] " in expression else (3, 3)
    if initial:
        expression = expression.replace(" = ", " += ")
        arguments["y"] = torch.randn(shape, dtype=torch.float64).t()
    elif "E" in others:
        arguments["out_shape"] = (3, None)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    got = insum(expression, **arguments)
    assert got.is_contiguous()
    got.fill_(7)
    for key, value in before.items():
        assert torch.equal(arguments[key], value), key


def test_one_tensor_under_two_names():
    x = reals(1, 2, 3)
    check([1.0, 4.0, 9.0], "y[i] += a[i] * b[i]", a=x, b=x)
    E = ints(1, 2, 0)
    check([3.0, 1.0, 2.0], "y[i] += x[E[F[i]]]", E=E, F=E, x=x)
    y = reals(1, 2)
    check([2.0, 4.0], "y[i] += x[i]", x=y, y=y)


def test_an_index_tensor_may_also_be_a_factor():
    E = ints(1, 0)
    check([3, 0], "y[i] += E[i] * x[E[i]]", E=E, x=ints(5, 3))


def test_the_default_dtype_is_that_of_a_statement_without_tensors():
    assert insum("s += 2").dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert insum("s += 2").dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# Names.

NAMES = (
    *(
        "self",
        "torch",
        "inf",
        "nan",
        "device",
        "accumulator",
        "extent_j",
        "output_extent_0",
        "t0",
        "space",
        "one",
        "entry",
    ),
    *(
        "share",
        "batch",
        "dx",
        "dy",
        "dN",
        "tensors",
        "sizes",
        "options",
        "validate",
        "expression",
        "_",
        "__class__",
        "ξ",
    ),
    *("call", "size", "operator", "getattr", "slice", "input", "max", "min", "id"),
    *keyword.kwlist,
)


@pytest.mark.parametrize(
    "expression",
    [
        "y[i] += N[E[i]+1] * x[i]",
        "N[E[i]+1] += x[i]",
        "y[i,j] max= N[F[i]] * x[j]",
        "y[i] += N * x[i]",
        "y[i] += x[N[i]]",
    ],
)
def test_any_identifier_is_a_name(expression: str):
    """Names of Python, of torch and of generated code: value and gradient do not depend on them."""
    tensors = {"E": ints(0, 1, 2), "F": ints(2, -1, 0), "x": reals(3, 5, 7)}
    table = expression.endswith("x[N[i]]")
    role = (
        ints(2, 0, 1) if table else torch.tensor(2.0, dtype=torch.float64) if "N *" in expression else reals(1, 2, 4, 8)
    )
    if expression.startswith("N"):
        role = torch.zeros(4, dtype=torch.float64)
    used = {k: v for k, v in tensors.items() if f"{k}[" in expression}

    def results(name: str) -> list[Tensor]:
        known = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in {**used, name: role}.items()}
        got = insum(expression.replace("N", name), tensors=known)
        leaves = [t for t in known.values() if t.is_floating_point()]
        return [got.detach(), *torch.autograd.grad(got.square().sum(), leaves)]

    want = results("Plain")
    for name in NAMES:
        if name not in used:
            torch.testing.assert_close(results(name), want, msg=lambda m, name=name: f"{name}: {m}")
    assert hasattr(builtins, "input")


@pytest.mark.library_calls
def test_flat_addresses_of_int32_index_tensors_have_64_bits():
    """Rows times columns may exceed 2**31 where neither does."""
    row, col = ints(1, dtype=torch.int32), ints(1, dtype=torch.int32)
    insum_nn.clear_cache()
    insum("y[R[p],C[p]] max= v[p]", R=row, C=col, v=reals(1), out_shape=(2, 2))
    (program,) = execution._cache.values()
    assert isinstance(program.run, CallGraph)
    seen: list[torch.dtype] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.scatter_reduce:
                seen.append(args[2].dtype)
            return func(*args, **(kwargs or {}))

    with Watch():
        program.run(row, col, reals(1), 2, 2)
    assert seen == [torch.int64] * 2
