"""What follows a sum: initial values that broadcast, activations, another dtype; on every back end, to any order."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.api import Program
from insum_nn.compiler.ir.nodes import OPERATIONS
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.lang.epilogue import ACTIVATIONS
from insum_nn.compiler.lang.functions import FUNCTIONS
from insum_nn.dtypes import FLOATS
from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumShapeError
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import CASES
from tests.compiler.interpreted import interpreter
from tests.compiler.test_generated import doubled, drawn, kernel_of, rounded

__all__ = ["interpreter"]

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
EAGER = Options(backend="eager")
GENERATED = Options(backend="triton", tune=False)
TORCH = {"relu": functional.relu, "silu": functional.silu, "gelu": functional.gelu, None: lambda x: x}
NAMES = tuple(ACTIVATIONS)
# Every way of combining: own, own with divided rows, place, direct by dot, atomic, with cells that nothing reaches.
COMBINING = [
    "spmm",
    "group spmm",
    "block spmm",
    "convolution",
    "convolution by kernel map",
    "strided stencil",
    "mttkrp",
]


def starts(shape: torch.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    """Initial values that broadcast to a shape, and residuals in other layouts."""
    full = torch.randn(shape, dtype=torch.float64).to(dtype)
    return {
        "bias": torch.randn(shape[-1], dtype=torch.float64).to(dtype),
        "column": full[..., :1],
        "expanded": full[:1].expand(shape),
        "transposed": full.permute(*range(full.dim())[::-1]).contiguous().permute(*range(full.dim())[::-1]),
        "gaps": torch.stack([full, full], -1)[..., 0],
    }


def want_of(
    name: str, tensors: dict[str, Tensor], initial: Tensor | None, activation: str | None
) -> tuple[Tensor, float]:
    """The output in float64, and the size of its terms."""
    case = CASES[name]
    exact = doubled(tensors)
    total = case.oracle(exact, 1)
    scale = case.oracle({n: t.abs() if t.is_floating_point() else t for n, t in exact.items()}, 1).max()
    if initial is not None:
        total, scale = total + initial.double(), scale + initial.double().abs().max()
    return TORCH[activation](total), float(scale)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", COMBINING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_generated_kernels_start_anywhere_and_activate(name: str, dtype: torch.dtype):
    case, tensors = drawn(name, dtype)
    shape = case.oracle(doubled(tensors), 1).shape
    output = case.expression.partition("[")[0]
    for number, (kind, initial) in enumerate(starts(shape, dtype).items()):
        activation = (None, *NAMES)[number % 4]
        program = Program(
            case.expression, out_shape=tuple(shape), facts=case.facts, options=GENERATED, activation=activation
        )
        got = program(tensors={**tensors, output: initial})
        want, scale = want_of(name, tensors, initial, activation)
        assert got.is_contiguous(), kind
        assert_matches(got, want, dtype=dtype, kind="sum", scale=scale)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "schedule",
    [Schedule(n=32, k=4), Schedule(m=4, n=16), Schedule(n=8, k=2, chunk=2), Schedule(m=2, n=8, chunk=1)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bias", "column", "transposed"])
def test_schedules_add_a_start_once(schedule: Schedule, kind: str):
    """Rows that are divided among programs get it in the sum of their parts."""
    case, tensors = drawn("spmm")
    shape = case.oracle(doubled(tensors), 1).shape
    initial = starts(shape, torch.float32)[kind].expand(shape)
    _, _, got = kernel_of(case, tensors, schedule, initial=initial)
    want, scale = want_of("spmm", tensors, initial, None)
    assert_matches(got, want, dtype=torch.float32, kind="sum", scale=scale)


@pytest.mark.usefixtures("interpreter")
def test_a_bias_is_read_once_a_column():
    """Along a stride of 0 nothing is addressed: the text reads a vector, not a tile."""
    case, tensors = drawn("spmm")
    bias = torch.randn(11).expand(6, 11)
    _, kernel, _ = kernel_of(case, tensors, Schedule(m=4, n=16), initial=bias)
    (line,) = [line for line in kernel.source.text.splitlines() if "tl.load(out_initial" in line]
    assert "[" not in line.partition("tl.load")[2].partition("mask")[0]
    assert "OUT_INITIAL_STEP" not in kernel.source.text


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("activation", NAMES)
def test_a_long_sum_divided_among_programs_is_activated_after_it(activation: str):
    case, tensors = drawn("convolution's weight gradient")
    program = insum_nn.compile(case.expression, facts=case.facts, options=GENERATED, activation=activation)
    want, scale = want_of(case.name, tensors, None, activation)
    got = program(tensors=tensors)
    assert_matches(got, want, dtype=torch.float32, kind="sum", scale=scale)
    tensors["dO"] = tensors["dO"].double().float()
    schedule = Schedule(m=16, n=16, k=16, dot=True, splits=3)
    _, kernel, _ = kernel_of(case, tensors, schedule)
    assert not kernel.source.finished


def edges(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    row = torch.tensor([0, 0, 2, 3, 3, 3])
    return {
        "Row": row,
        "Col": torch.tensor([1, 4, 0, 2, 3, 1]),
        "Val": torch.randn(6, dtype=torch.float64).to(dtype),
        "B": torch.randn(5, 3, dtype=torch.float64).to(dtype),
    }


@pytest.mark.parametrize("options", [EAGER, Options(deterministic=True), GENERATED], ids=["eager", "fixed", "triton"])
@pytest.mark.parametrize("activation", [None, *NAMES])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_both_orders(
    activation: str | None, options: Options, biased: bool, request: pytest.FixtureRequest
):
    if options is GENERATED:
        request.getfixturevalue("interpreter")
    tensors = edges()
    facts = {"Row": IndexFacts(sorted=True, masked=False, proven=True)}
    program = insum_nn.compile(SPMM, out_shape=(5, None), facts=facts, activation=activation, options=options)
    leaves = [tensors["Val"].requires_grad_(), tensors["B"].requires_grad_()]
    if biased:
        leaves.append(torch.randn(3, dtype=torch.float64, requires_grad=True))

    def call(value: Tensor, dense: Tensor, *bias: Tensor) -> Tensor:
        initial = {"C": bias[0]} if bias else {}
        return program(tensors={**tensors, "Val": value, "B": dense, **initial})

    def plain(value: Tensor, dense: Tensor, *bias: Tensor) -> Tensor:
        total = torch.zeros(5, 3, dtype=torch.float64) + (bias[0] if bias else 0)
        return TORCH[activation](total.index_add(0, tensors["Row"], value[:, None] * dense[tensors["Col"]]))

    torch.testing.assert_close(call(*leaves), plain(*leaves))
    torch.testing.assert_close(
        torch.autograd.grad(call(*leaves).sin().sum(), leaves), torch.autograd.grad(plain(*leaves).sin().sum(), leaves)
    )
    # Each entry is a call, which the interpreter takes long for: there along random directions.
    assert torch.autograd.gradcheck(call, leaves, fast_mode=options is GENERATED)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=options is GENERATED)


def test_relu_keeps_no_more_than_its_output():
    tensors = edges()
    tensors["B"].requires_grad_()
    program = insum_nn.compile(SPMM, out_shape=(5, None), activation="relu", options=EAGER)
    out = program(tensors=tensors)
    saved = [s for s in out.grad_fn.saved_tensors if s is not None]  # type: ignore[union-attr]
    assert sum(s.data_ptr() == out.data_ptr() for s in saved) == 1
    # Its operands but the features, which no gradient reads.
    assert len(saved) == 4


def test_transforms_and_forward_mode():
    tensors = edges()
    program = insum_nn.compile(SPMM, out_shape=(5, None), activation="gelu", options=EAGER)

    def call(dense: Tensor) -> Tensor:
        return program(tensors={**tensors, "B": dense, "C": torch.ones(3, dtype=torch.float64)})

    def plain(dense: Tensor) -> Tensor:
        total = torch.ones(5, 3, dtype=torch.float64)
        return functional.gelu(total.index_add(0, tensors["Row"], tensors["Val"][:, None] * dense[tensors["Col"]]))

    dense = tensors["B"]
    torch.testing.assert_close(torch.func.jacrev(call)(dense), torch.func.jacrev(plain)(dense))
    torch.testing.assert_close(torch.func.jacfwd(call)(dense), torch.func.jacfwd(plain)(dense))
    batch = torch.randn(4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([plain(b) for b in batch]))


@pytest.mark.parametrize("learns", [False, True])
def test_torch_compile(learns: bool):
    tensors = edges(torch.float32)
    tensors["B"].requires_grad_(learns)

    def call(dense: Tensor, bias: Tensor) -> Tensor:
        given = {**tensors, "B": dense, "C": bias}
        return insum_nn.insum(SPMM, tensors=given, out_shape=(5, 3), activation="relu", options=EAGER)

    bias = torch.randn(3)
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(tensors["B"], bias), call(tensors["B"], bias))


@pytest.mark.parametrize("options", [EAGER, GENERATED], ids=["eager", "triton"])
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_another_dtype_of_the_output(
    dtype: torch.dtype, out: torch.dtype, options: Options, request: pytest.FixtureRequest
):
    if options is GENERATED:
        request.getfixturevalue("interpreter")
    tensors = edges(dtype)
    bias = torch.randn(3).to(dtype)
    tensors["B"].requires_grad_()
    program = insum_nn.compile(SPMM, out_shape=(5, None), out_dtype=out, activation="relu", options=options)
    got = program(tensors={**tensors, "C": bias})
    assert got.dtype == out
    narrow = max((dtype, out), key=lambda d: torch.finfo(d).eps)
    want = program.reference(tensors={**tensors, "C": bias})
    assert_matches(got.to(narrow), want, dtype=narrow, kind="sum", scale=8.0)
    (grad,) = torch.autograd.grad(got.sum(), tensors["B"])
    assert grad.dtype == dtype
    with torch.no_grad():
        assert torch.equal(program(tensors={**tensors, "C": bias}), got)


@pytest.mark.usefixtures("interpreter")
def test_a_kernel_stores_its_float32_sums():
    """The sum of halves is not rounded to a half on its way to float32."""
    tensors = rounded({"A": torch.full((1, 3), 1.0), "x": torch.tensor([1024.0, 1.0 / 1024, 1.0])}, torch.float16)
    got = insum_nn.insum("y[i] += A[i,j] * x[j]", tensors=tensors, out_dtype=torch.float32, options=GENERATED)
    assert got.item() == 1025.0 + 1.0 / 1024


# What is not there.


def test_nothing_to_sum_is_activated_too():
    none = {"Row": torch.zeros(0, dtype=torch.long), "Col": torch.zeros(0, dtype=torch.long), "Val": torch.zeros(0)}
    call = {"tensors": {**none, "B": torch.randn(2, 3), "C": torch.tensor([-1.0, 0.0, 2.0])}, "out_shape": (2, None)}
    got = insum_nn.insum(SPMM, activation="relu", out_dtype=torch.float16, **call)
    assert got.tolist() == [[0.0, 0.0, 2.0]] * 2
    assert got.dtype == torch.float16


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("options", [EAGER, GENERATED], ids=["eager", "triton"])
def test_nan_passes_through_relu(options: Options, request: pytest.FixtureRequest):
    if options is GENERATED:
        request.getfixturevalue("interpreter")
    x = torch.tensor([float("nan"), -1.0, float("inf"), -float("inf")])
    for name in NAMES:
        got = insum_nn.insum("y[i] += 1 * x[i]", x=x, activation=name, options=options)
        # On some processors torch's gelu of infinity is NaN in float32, and infinity in float64.
        want = TORCH[name](x if options is EAGER else x.double()).float()
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("operator", ["max=", "="])
def test_other_operators(operator: str):
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    program = insum_nn.compile(f"y[i] {operator} 1 * x[i,j]", activation="relu")
    want = torch.relu(x.amax(1) if operator == "max=" else x.sum(1))
    torch.testing.assert_close(program(x=x), want)
    assert torch.autograd.gradcheck(lambda x: program(x=x), [x])


def test_a_start_broadcasts_where_something_else_says_how_far():
    tensors = edges()
    for shape in ((3,), (1, 3), (1, 1), (5, 1), ()):
        initial = torch.randn(shape, dtype=torch.float64)
        got = insum_nn.insum(SPMM, tensors={**tensors, "C": initial}, out_shape=(5, None))
        want = insum_nn.insum(SPMM, tensors=tensors, out_shape=(5, None)) + initial
        torch.testing.assert_close(got, want)
    # An axis that an index tensor addresses has no other size than the initial value's, unless it is given.
    one = torch.zeros(1, 3, dtype=torch.float64)
    tensors["Row"] = torch.zeros_like(tensors["Row"])
    assert insum_nn.insum(SPMM, tensors={**tensors, "C": one}).shape == (1, 3)
    with pytest.raises(InsumShapeError, match="unknown"):
        insum_nn.insum(SPMM, tensors={**tensors, "C": one[0]})
    with pytest.raises(InsumShapeError, match="extents, 2 and 3"):
        insum_nn.insum(SPMM, tensors={**tensors, "C": one[0, :2]}, out_shape=(5, None))
    with pytest.raises(InsumShapeError, match="out_shape"):
        insum_nn.insum(SPMM, tensors={**tensors, "C": one.expand(4, 3)}, out_shape=(5, None))
    with pytest.raises(InsumShapeError, match="3 dimensions"):
        insum_nn.insum(SPMM, tensors={**tensors, "C": one[None]}, out_shape=(5, None))


# The program.


def test_programs_differ_by_their_epilogue():
    plain, relu = insum_nn.compile("y[i] += x[i]"), insum_nn.compile("y[i] += x[i]", activation="relu")
    assert plain != relu
    assert hash(plain) != hash(relu)
    again = pickle.loads(pickle.dumps(relu))
    assert again == relu
    x = torch.tensor([-1.0, 1.0])
    assert again(x=x).tolist() == [0.0, 1.0]
    assert plain(x=x).tolist() == [-1.0, 1.0]
    assert relu.reference(x=x).tolist() == [0.0, 1.0]


def test_explain_says_what_follows_the_sum():
    program = insum_nn.compile("y[i] += x[i]", activation="silu", out_dtype=torch.float64)
    assert program.explain().loop_nest.splitlines()[-1] == "y = silu(y).to(float64)"
    assert "silu(y)" in str(program.explain(x=torch.ones(3)))


def test_one_table_of_activations():
    assert set(ACTIVATIONS) <= set(OPERATIONS)
    for name in ACTIVATIONS:
        assert FUNCTIONS[name].of(0.0) == 0


def test_bad_arguments():
    with pytest.raises(InsumFormatError, match="activation='tanh' is not known"):
        insum_nn.compile("y[i] += x[i]", activation="tanh")
    with pytest.raises(InsumDtypeError, match="out_dtype"):
        insum_nn.compile("y[i] += x[i]", out_dtype=torch.int32)
    with pytest.raises(InsumDtypeError, match="tensors={'activation'"):
        insum_nn.insum("y[i] += activation[i]", activation=torch.ones(3))  # type: ignore[arg-type]
    assert insum_nn.insum("y[i] += activation[i]", tensors={"activation": torch.ones(2)}).tolist() == [1.0, 1.0]
    with pytest.raises(InsumFormatError, match="not one statement"):
        insum_nn.compile("y[i] += x[i]", activation="relu").grad("x")


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMBINING)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_way_of_combining_on_a_gpu(gpu: torch.device, name: str, dtype: torch.dtype):
    case = CASES[name]
    tensors = {n: t.to(gpu) for n, t in rounded(case.draw(8), dtype).items()}
    total = case.oracle(doubled(tensors), 8)
    scale = case.oracle({n: t.abs() if t.is_floating_point() else t for n, t in doubled(tensors).items()}, 8).max()
    output = case.expression.partition("[")[0]
    for number, initial in enumerate(starts(total.shape, dtype).values()):
        activation = (None, *NAMES)[number % 4]
        program = Program(
            case.expression, out_shape=tuple(total.shape), facts=case.facts, options=GENERATED, activation=activation
        )
        got = program(tensors={**tensors, output: initial.to(gpu)})
        want = TORCH[activation](total + initial.to(gpu).double())
        assert_matches(got, want, dtype=dtype, kind="sum", scale=float(scale + initial.double().abs().max()))
