"""A call gives the same numbers whoever runs, records or transforms it: opcheck, compile, export, func, autocast..."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import insum_nn
from insum_nn import IndexFacts, Options, Program, insum
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.runtime.modes import is_plain_eager
from insum_nn.errors import InsumShapeError
from tests.ranks import new_pool

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
OPERATORS = ("+=", "max=", "min=")
ROWS = 5


def spmm_tensors(*, requires_grad: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Row 2 is written three times, rows 1 and 3 never; entry 1 has no column."""
    return {
        "Row": torch.tensor([0, 2, 2, 4, 2]),
        "Col": torch.tensor([1, -1, 3, 0, 2], dtype=torch.int32),
        "Val": torch.randn(5, dtype=dtype, requires_grad=requires_grad),
        "B": torch.randn(4, 3, dtype=dtype, requires_grad=requires_grad),
    }


def spmm_dense(t: dict[str, Tensor], initial: Tensor | None = None) -> Tensor:
    """The same product, written with torch's own calls."""
    keep = t["Col"] >= 0
    terms = t["Val"][keep, None] * t["B"][t["Col"][keep]]
    base = torch.zeros(ROWS, 3, dtype=terms.dtype) if initial is None else initial
    return base.index_add(0, t["Row"][keep], terms)


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# Programs for opcheck: expression, tensors, initial value, sizes, out_shape.
def _checked() -> dict[
    str, tuple[str, dict[str, Tensor], Tensor | None, dict[str, int], tuple[int | None, ...] | None]
]:
    torch.manual_seed(1)
    t = spmm_tensors(requires_grad=True)
    initial = draw(ROWS, 3).requires_grad_()
    a, b = draw(3, 4).requires_grad_(), draw(4, 2).requires_grad_()
    vector = draw(7).requires_grad_()
    return {
        "spmm": (SPMM, t, None, {}, (ROWS, None)),
        "spmm_without_grad": (SPMM, spmm_tensors(), None, {}, (ROWS, None)),
        "initial": (SPMM, t, initial, {}, None),
        "largest": (SPMM.replace("+=", "max="), t, None, {}, (ROWS, None)),
        "smallest_with_start": (SPMM.replace("+=", "min="), t, initial, {}, None),
        "dense": ("D[i,j] = A[i,k] * B[k,j]", {"A": a, "B": b}, None, {}, None),
        "diagonal": ("D[i,i] += A[i,i]", {"A": draw(3, 3).requires_grad_()}, None, {}, (None, None)),
        "to_scalar": ("s += x[i] * x[i]", {"x": vector}, None, {}, None),
        "scalar_factor": (
            "y[i] += alpha * x[i]",
            {"alpha": torch.tensor(2.0, dtype=torch.float64).requires_grad_(), "x": vector},
            None,
            {},
            None,
        ),
        "convolution": ("y[i] += x[2*i+r-1] * w[r]", {"x": vector, "w": draw(3).requires_grad_()}, None, {}, (4,)),
        "repeat": ("y[i,j] += x[i]", {"x": vector}, None, {"j": 2}, None),
        "no_tensors": ("y[i] += 2 * 3", {}, None, {"i": 4}, None),
        "transposed_input": ("y[j,i] = A[i,j]", {"A": draw(4, 3).t().requires_grad_()}, None, {}, None),
        "empty": ("y[i] += A[i,k] * x[k]", {"A": draw(3, 0), "x": draw(0)}, None, {}, None),
        "integers": ("y[i] += A[i,k]", {"A": torch.arange(6).view(2, 3)}, None, {}, None),
        "nested": (
            "y[i] += x[E[F[i]]]",
            {"E": torch.tensor([2, -1, 0]), "F": torch.tensor([0, 1, 2, 1]), "x": vector},
            None,
            {},
            None,
        ),
    }


CHECKED = _checked()


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str):
    expression, tensors, initial, sizes, out_shape = CHECKED[name]
    program = insum_nn.compile(expression, sizes=sizes)
    ordered = [tensors[tensor] for tensor in program.statement.tensors()]
    extents = resolve_extents(program.statement, ordered, initial, sizes, out_shape)
    arguments = (program.spec.to_json(), ordered, initial, list(extents.indices), list(extents.output))
    torch.library.opcheck(torch.ops.insum_nn.run, arguments)


def _compare_compiled(
    backend: str, function: Callable[..., Tensor], tensors: dict[str, Tensor], **options: object
) -> Tensor:
    """Value and gradients of a compiled function against the plain one."""
    compiled = torch.compile(function, fullgraph=True, backend=backend, **options)
    own, other = clones(tensors), clones(tensors)
    got, want = compiled(**own), function(**other)
    torch.testing.assert_close(got, want)
    if want.requires_grad:
        got.sin().sum().backward()
        want.sin().sum().backward()
        for name, tensor in other.items():
            torch.testing.assert_close(own[name].grad, tensor.grad)
    return got


@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_of_insum(operator: str):
    expression = SPMM.replace("+=", operator)

    def function(Row: Tensor, Col: Tensor, Val: Tensor, B: Tensor) -> Tensor:
        return insum(expression, Row=Row, Col=Col, Val=Val * 2, B=B.sin(), out_shape=(ROWS, None)).cos()

    _compare_compiled("aot_eager", function, spmm_tensors(requires_grad=True))


# Statements whose terms are counted by an extent: their text, and the shapes of their tensors with `None` for it.
COUNTED: dict[str, dict[str, tuple[int | None, ...]]] = {
    "y {} x[q]": {"x": (None,)},
    "y {} x[S[q]]": {"x": (3,), "S": (None,)},
    "y[i] {} x[i,q]": {"x": (2, None)},
    "y[R[i]] {} x[i,q] * w[q]": {"R": (3,), "x": (3, None), "w": (None,), "y": (4,)},
    "y[S[q],n] {} x[q,n]": {"S": (None,), "x": (None, 2), "y": (3, 2)},
    "y[i] {} x[i,q] * w[k]": {"x": (2, None), "w": (3,), "y": (2,)},
}


def _counted(text: str, count: int) -> dict[str, Tensor]:
    shapes = {name: [count if n is None else n for n in shape] for name, shape in COUNTED[text].items()}
    return {
        name: torch.zeros(shape, dtype=torch.int64) if name in "RS" else draw(*shape).requires_grad_()
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("text", COUNTED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_graph_over_nothing(text: str, operator: str):
    """Cells without terms are 0, or keep their initial value, as in a call that nothing records."""
    tensors = {name: tensor.detach() for name, tensor in _counted(text, 0).items()}
    graph = make_fx(lambda tensors: insum(text.format(operator), tensors=tensors))(tensors)
    want = tensors["y"] if "y" in tensors else torch.zeros(COUNTED[text]["x"][:1] if "y[" in text else ())
    assert torch.equal(graph(tensors), want.double())
    if "y" in tensors and "R" not in tensors:
        del tensors["y"]
        shape = COUNTED[text]["y"]
        graph = make_fx(lambda tensors: insum(text.format(operator), tensors=tensors, out_shape=shape))(tensors)
        assert torch.equal(graph(tensors), torch.zeros_like(want))


def test_compile_over_nothing():
    text = "y[S[q],n] {} x[q,n]"
    function = lambda **tensors: insum(text.format("max="), tensors=tensors)  # noqa: E731
    for count in (2, 0):
        _compare_compiled("aot_eager", function, _counted(text, count), dynamic=True)


class Counted(torch.nn.Module):
    """A statement of COUNTED, of which another call may have no terms."""

    def __init__(self, text: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.text, self.shape = text, shape

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return insum(self.text, tensors=tensors, out_shape=self.shape)


@pytest.mark.parametrize("text", COUNTED)
@pytest.mark.parametrize("operator", ["max=", "min="])
@pytest.mark.parametrize("starts", [False, True])
def test_an_exported_graph_called_over_nothing(text: str, operator: str, starts: bool):
    """Torch takes any size for 2 or more while it traces; with 0 cells are those of an eager call."""
    tensors = {name: tensor.detach() for name, tensor in _counted(text, 3).items()}
    initial = tensors.pop("y", draw(*(2,) if "y[" in text else ()))
    count = torch.export.Dim("count", min=0)
    sizes = {name: {d: count for d, n in enumerate(shape) if n is None} for name, shape in COUNTED[text].items()}
    tensors |= {"y": initial} if starts else {}
    module = Counted(text.format(operator), tuple(initial.shape))
    shapes = {name: sizes.get(name, {}) for name in tensors}
    graph = torch.export.export(module, (tensors,), dynamic_shapes=(shapes,)).module()
    for count in (3, 1, 0):
        other = {name: tensor.detach() for name, tensor in _counted(text, count).items()}
        other = {name: initial if name == "y" else other[name] for name in tensors}
        torch.testing.assert_close(graph(other), module(other), rtol=0, atol=0)


@pytest.mark.parametrize("operator", ["max=", "min="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_unbacked_sizes_over_nothing(operator: str, dtype: torch.dtype):
    # One code object for all statements.
    torch._dynamo.reset()
    module = Counted(f"y[i] {operator} x[i,q]", (2,))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for count in (3, 0, 1):
        x = draw(2, count).mul(9).to(dtype)
        # Not among its stubs.
        torch._dynamo.decorators.mark_unbacked(x, 1)  # pyright: ignore[reportPrivateImportUsage]
        assert torch.equal(compiled({"x": x}), module({"x": x}))


def test_a_graph_pads_only_where_a_call_may_be_empty():
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x = draw(2, 5)
    module = Counted("y[i] max= x[i,q]", (2,))
    torch.compile(module, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=True)({"x": x})
    for least in (0, 3):
        sizes = {"x": {1: torch.export.Dim("count", min=least)}}
        graphs.append(torch.export.export(module, ({"x": x},), dynamic_shapes=(sizes,)).graph_module)
    pads = [sum(node.target == torch.ops.aten.constant_pad_nd.default for node in g.graph.nodes) for g in graphs]
    assert pads == [0, 1, 0]


def test_compile_of_a_program_with_a_start_and_facts():
    program = insum_nn.compile(SPMM, facts={"Row": IndexFacts(masked=False, proven=True)})

    def function(Row: Tensor, Col: Tensor, Val: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return program(Row=Row, Col=Col, Val=Val, B=B, C=C * 2)

    initial = draw(ROWS, 3).requires_grad_()
    _compare_compiled("aot_eager", function, {**spmm_tensors(requires_grad=True), "C": initial})


def test_compile_of_a_derivative_program():
    gradient = insum_nn.compile(SPMM).grad("Val")

    def function(Row: Tensor, Col: Tensor, B: Tensor, dC: Tensor) -> Tensor:
        return gradient(Row=Row, Col=Col, B=B, dC=dC)

    t = spmm_tensors()
    got = _compare_compiled("aot_eager", function, {**{k: t[k] for k in ("Row", "Col", "B")}, "dC": draw(ROWS, 3)})
    assert got.shape == (5,)


def test_compile_to_and_from_scalars():
    def function(x: Tensor, alpha: Tensor) -> Tensor:
        return insum("s += alpha * x[i] * x[i]", x=x, alpha=alpha, options=Options(order="left"), validate=True)

    _compare_compiled("aot_eager", function, {"x": draw(4).requires_grad_(), "alpha": draw().requires_grad_()})


def test_compile_takes_any_names():
    def function(x: Tensor) -> Tensor:
        return insum("out[i,j] += self[i] * 列", tensors={"self": x, "列": x[0]}, sizes={"j": 2})

    _compare_compiled("aot_eager", function, {"x": draw(3).requires_grad_()})


@pytest.mark.parametrize("entries", [[0, 5], [-2, 1]])
def test_compiled_calls_refuse_bad_entries(entries: list[int]):
    compiled = torch.compile(lambda e, x: insum("y[i] += x[E[i]]", E=e, x=x), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"index tensor 'E' points outside axis 0 of 'x' in y\[i\] \+= x\[E\[i\]\]"):
        compiled(torch.tensor(entries), torch.ones(3))
    torch.testing.assert_close(compiled(torch.tensor([-1, 2]), torch.ones(3)), torch.tensor([0.0, 1.0]))


def test_a_validated_call_stays_one_operator_when_compiled():
    options = insum_nn.Options(validate=True)
    compiled = torch.compile(
        lambda e, x: insum("y[i] += x[E[i]]", E=e, x=x, options=options), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(insum_nn.errors.InsumRangeError, match="'E' points outside axis 0 of 'x'"):
        compiled(torch.tensor([0, 5]), torch.ones(3))


def test_compile_reports_our_errors():
    compiled = torch.compile(lambda a, b: insum("y[i] += a[i] * b[i]", a=a, b=b), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="index 'i' has two extents, 3 and 4") as caught:
        compiled(torch.ones(3), torch.ones(4))
    causes = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert any(isinstance(cause, InsumShapeError) or "InsumShapeError" in str(cause) for cause in causes)


def test_compile_is_not_repeated_for_other_sizes():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def function(Row: Tensor, Col: Tensor, Val: Tensor, B: Tensor) -> Tensor:
        rows = B.shape[0] + 3
        return insum(SPMM, Row=Row, Col=Col, Val=Val, B=B, out_shape=(rows, None)).sum(0)

    for columns, entries, width in ((4, 5, 3), (9, 14, 6), (17, 8, 11)):
        row, col = torch.randint(0, columns + 3, (entries,)), torch.randint(-1, columns, (entries,))
        value, dense = draw(entries).requires_grad_(), draw(columns, width).requires_grad_()
        got = function(row, col, value, dense)
        got.sum().backward()
        want = insum(SPMM, Row=row, Col=col, Val=value, B=dense, out_shape=(columns + 3, None)).sum(0)
        torch.testing.assert_close(got, want)
        gradients = torch.autograd.grad(want.sum(), [value, dense])
        torch.testing.assert_close([value.grad, dense.grad], list(gradients))
    assert counter.frame_count == 1


# torch 2.15: Dynamo traces into a function of ours that keeps its result.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_compile_of_a_torch_func_gradient_is_refused_or_right():
    """Before 2.15, torch lets no `torch.func.grad` that Dynamo has traced pass through a registered operator."""
    t = spmm_tensors()

    def loss(value: Tensor) -> Tensor:
        return insum(SPMM, **{**t, "Val": value}, out_shape=(ROWS, None)).sin().sum()

    want = torch.func.grad(loss)(t["Val"])
    compiled = torch.compile(torch.func.grad(loss), backend="aot_eager")
    try:
        got = compiled(t["Val"])
    except Exception as error:
        got, refused = want, str(error)
    else:
        refused = ""
    assert not refused or "functorch transforms" in refused
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(want, torch.func.grad(loss)(t["Val"]))


@pytest.mark.compile
def test_compile_through_inductor():
    def function(Row: Tensor, Col: Tensor, Val: Tensor, B: Tensor) -> Tensor:
        return insum(SPMM, Row=Row, Col=Col, Val=Val * 2, B=B, out_shape=(ROWS, None)).relu() + 1

    _compare_compiled("inductor", function, spmm_tensors(requires_grad=True))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(draw(5))
        self.program = insum_nn.compile(SPMM)

    def forward(self, row: Tensor, col: Tensor, dense: Tensor) -> Tensor:
        return self.program(Row=row, Col=col, Val=self.weight, B=dense, out_shape=(ROWS, None)).relu()


@pytest.mark.parametrize("strict", [False, True])
def test_export_runs_saves_and_loads(strict: bool):
    layer, t = Layer(), spmm_tensors()
    dims = (None, None, {1: torch.export.Dim("n", min=2, max=1000)})
    exported = torch.export.export(layer, (t["Row"], t["Col"], t["B"]), dynamic_shapes=dims, strict=strict)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    loaded = torch.export.load(stored)
    wide = draw(4, 7)
    for module in (exported.module(), loaded.module()):
        torch.testing.assert_close(module(t["Row"], t["Col"], wide), layer(t["Row"], t["Col"], wide))


def test_make_fx_records_operations_of_torch():
    t = spmm_tensors()
    names = tuple(t)
    graph = make_fx(lambda *xs: insum(SPMM, **dict(zip(names, xs, strict=True)), out_shape=(ROWS, None)))(*t.values())
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert {target.namespace for target in called} == {"aten"}
    torch.testing.assert_close(graph(*t.values()), spmm_dense(t))


@pytest.mark.parametrize(
    ("written", "shape", "entries"),
    [
        ("i+1", (5,), []),
        ("i-1", (5,), []),
        ("E[p]+i", (6,), [0, 2]),
        ("E[p]+i-2", (7,), [2, 0]),
        ("i,E[p]+i", (5, 6), [0, 2]),
    ],
)
@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_a_traced_graph_refuses_an_affine_write_outside(
    written: str, shape: tuple[int, ...], entries: list[int], tracing: str
):
    tensors = {"x": torch.randn(5, dtype=torch.float64)} | ({"E": torch.tensor(entries)} if entries else {})
    names = tuple(tensors)
    text = f"y[{written}] += x[i]"

    def run(*passed: Tensor) -> Tensor:
        return insum(text, **dict(zip(names, passed, strict=True)), out_shape=shape)

    with pytest.raises(insum_nn.errors.InsumRangeError, match="writes outside axis"):
        run(*tensors.values())
    graph = make_fx(run, tracing_mode=tracing)(*tensors.values())
    with pytest.raises(RuntimeError, match="writes outside axis"):
        graph(*tensors.values())
    if entries:
        # A missing entry writes nowhere.
        tensors["E"] = torch.tensor([max(entries[1], entries[0]) if "-2" in written else 0, -1])
        torch.testing.assert_close(graph(*tensors.values()), run(*tensors.values()))


# A statement with a constant subscript -> the shapes of its tensors, with `None` for the extent that it is inside of.
CONSTANT: dict[str, dict[str, tuple[int | None, ...]]] = {
    "y[i] += x[7] * z[i]": {"x": (None,), "z": (2,)},
    "y[i] max= x[i,7]": {"x": (2, None)},
    "y[i] += w[i,E[0,7]]": {"E": (1, None), "w": (2, 3)},
    "y[i,7] += z[i] * x[k]": {"y": (2, None), "x": (None,), "z": (2,)},
}


@pytest.mark.parametrize("text", CONSTANT)
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_a_traced_graph_refuses_a_constant_outside(text: str, tracing: str):
    """It is an error of every call, whether or not torch knows the size while it traces."""

    def tensors(extent: int) -> list[Tensor]:
        shapes = {name: [extent if n is None else n for n in shape] for name, shape in CONSTANT[text].items()}
        return [torch.zeros(s, dtype=torch.int64) if name == "E" else draw(*s) for name, s in shapes.items()]

    def run(*passed: Tensor) -> Tensor:
        return insum(text, tensors=dict(zip(CONSTANT[text], passed, strict=True)))

    few, many = tensors(4), tensors(8)
    with pytest.raises(insum_nn.errors.InsumRangeError, match=r"'7' (reads|writes) outside axis"):
        run(*few)
    with pytest.raises(RuntimeError, match=r"'7' (reads|writes) outside axis"):
        make_fx(run, tracing_mode=tracing)(*few)(*few)
    graph = make_fx(run, tracing_mode=tracing)(*many)
    torch.testing.assert_close(graph(*many), run(*many))
    # What is known while torch traces is not asked again.
    asked = any("'7' " in str(node.args) for node in graph.graph.nodes)
    assert asked == (tracing == "symbolic")
    if asked:
        with pytest.raises(RuntimeError, match=r"'7' (reads|writes) outside axis"):
            graph(*few)


class Wrapped(Tensor):
    """A class that replaces torch's calls."""


def test_plain_eager_calls_are_told_from_all_others():
    """They take shorter paths of equal results, which no comparison of numbers would miss."""
    x = torch.ones(2)
    assert is_plain_eager()
    assert is_plain_eager(x, None, torch.nn.Parameter(x), torch.ones(2, requires_grad=True).exp())
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    for other in (torch.ones(2, device="meta"), x.as_subclass(Wrapped), negated):
        assert not is_plain_eager(x, other)
    found: list[bool] = []

    def ask(y: Tensor) -> Tensor:
        found.append(is_plain_eager(x))
        return y + x

    with FakeTensorMode():
        found.append(is_plain_eager(x))
    with forward_ad.dual_level():
        ask(x)
    torch.func.vmap(ask)(x.expand(3, 2))
    torch.func.grad(lambda y: ask(y).sum())(x)
    make_fx(ask)(x)
    torch.jit.trace(ask, x, check_trace=False)
    assert found == [False] * 6
    assert is_plain_eager(x)


BATCH = 4
MASKS = [mask for mask in itertools.product((False, True), repeat=4) if any(mask)]


@pytest.mark.parametrize("batched", MASKS, ids=lambda m: "".join("x" if b else "-" for b in m))
def test_vmap_over_any_of_the_tensors(batched: tuple[bool, ...]):
    single = spmm_tensors()
    full = {
        "Row": torch.randint(-1, ROWS, (BATCH, 5)),
        "Col": torch.randint(-1, 4, (BATCH, 5), dtype=torch.int32),
        "Val": draw(BATCH, 5),
        "B": draw(BATCH, 4, 3),
    }
    names = tuple(single)

    def function(*tensors: Tensor) -> Tensor:
        return insum(SPMM, **dict(zip(names, tensors, strict=True)), out_shape=(ROWS, None))

    arguments = [full[name] if many else single[name] for name, many in zip(names, batched, strict=True)]
    dims = tuple(0 if many else None for many in batched)
    got = torch.func.vmap(function, dims)(*arguments)
    rows = [function(*(a[i] if many else a for a, many in zip(arguments, batched, strict=True))) for i in range(BATCH)]
    torch.testing.assert_close(got, torch.stack(rows))


def test_vmap_over_inner_dimensions_and_twice():
    t = spmm_tensors()
    values, dense = draw(5, BATCH), draw(4, 3, BATCH)

    def function(value: Tensor, b: Tensor) -> Tensor:
        return insum(SPMM, Row=t["Row"], Col=t["Col"], Val=value, B=b, out_shape=(ROWS, None))

    got = torch.func.vmap(function, (1, 2), out_dims=1)(values, dense)
    want = torch.stack([function(values[:, i], dense[:, :, i]) for i in range(BATCH)], 1)
    torch.testing.assert_close(got, want)
    twice = torch.func.vmap(torch.func.vmap(function, (1, None)), (None, 2))(values, dense)
    want = torch.stack(
        [torch.stack([function(values[:, i], dense[:, :, j]) for i in range(BATCH)]) for j in range(BATCH)]
    )
    torch.testing.assert_close(twice, want)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_vmap_with_a_start(operator: str, dims: tuple[int | None, int | None]):
    t = spmm_tensors()
    values = draw(BATCH, 5) if dims[0] == 0 else draw(5)
    starts = draw(BATCH, ROWS, 3) if dims[1] == 0 else draw(ROWS, 3)

    def function(value: Tensor, initial: Tensor) -> Tensor:
        return insum(SPMM.replace("+=", operator), **{**t, "Val": value, "C": initial})

    got = torch.func.vmap(function, dims)(values, starts)
    rows = [
        function(values[i] if dims[0] == 0 else values, starts[i] if dims[1] == 0 else starts) for i in range(BATCH)
    ]
    torch.testing.assert_close(got, torch.stack(rows))


def test_vmap_of_scalars_and_with_given_sizes():
    xs = draw(BATCH, 3)
    got = torch.func.vmap(lambda x: insum("s += x[i] * x[i]", x=x))(xs)
    torch.testing.assert_close(got, (xs * xs).sum(1))
    repeated = torch.func.vmap(lambda x: insum("y[i,batch] += x[i]", x=x, sizes={"batch": 2}))(xs)
    torch.testing.assert_close(repeated, xs[..., None].expand(BATCH, 3, 2))


def _loss(operator: str, t: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(value: Tensor, dense: Tensor) -> Tensor:
        tensors = {**t, "Val": value, "B": dense}
        return insum(SPMM.replace("+=", operator), **tensors, out_shape=(ROWS, None)).sin().sum()

    return loss


@pytest.mark.parametrize("operator", OPERATORS)
def test_func_grad_equals_backward(operator: str):
    t = spmm_tensors(requires_grad=True)
    loss = _loss(operator, t)
    want = torch.autograd.grad(loss(t["Val"], t["B"]), [t["Val"], t["B"]])
    got = torch.func.grad(loss, (0, 1))(t["Val"].detach(), t["B"].detach())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("operator", OPERATORS)
def test_vmap_of_func_grad(operator: str):
    t = spmm_tensors()
    values = draw(BATCH, 5)
    gradient = torch.func.grad(_loss(operator, t))
    got = torch.func.vmap(gradient, (0, None))(values, t["B"])
    torch.testing.assert_close(got, torch.stack([gradient(value, t["B"]) for value in values]))


def test_func_jacobians_and_hessian():
    t = spmm_tensors()

    def function(value: Tensor) -> Tensor:
        return insum(SPMM, **{**t, "Val": value}, out_shape=(ROWS, None))

    want = torch.autograd.functional.jacobian(function, t["Val"])
    torch.testing.assert_close(torch.func.jacrev(function)(t["Val"]), want)
    torch.testing.assert_close(torch.func.jacfwd(function)(t["Val"]), want)

    def loss(value: Tensor) -> Tensor:
        return (function(value).sin() * function(value)).sum()

    hessian = torch.autograd.functional.hessian(loss, t["Val"])
    torch.testing.assert_close(torch.func.hessian(loss)(t["Val"]), hessian)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(t["Val"]), hessian)


@pytest.mark.parametrize("operator", OPERATORS)
def test_forward_mode(operator: str):
    """Tangents of every factor and of the initial value, also of one that stands twice, against differences."""
    t = spmm_tensors()
    expression = SPMM.replace("+=", operator).replace("Val[p]", "Val[p] * Val[p]")

    def function(value: Tensor, dense: Tensor, initial: Tensor) -> Tensor:
        return insum(expression, **{**t, "Val": value, "B": dense}, C=initial)

    primals = (t["Val"].requires_grad_(), t["B"].requires_grad_(), draw(ROWS, 3).requires_grad_())
    torch.autograd.gradcheck(function, primals, check_forward_ad=True)
    fixed = tuple(p.detach() for p in primals)
    tangents = tuple(map(torch.randn_like, fixed))
    value, tangent = torch.func.jvp(function, fixed, tangents)[:2]
    torch.testing.assert_close(value, function(*fixed))
    alone = torch.func.jvp(lambda dense: function(fixed[0], dense, fixed[2]), (fixed[1],), (tangents[1],))[1]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, d) for p, d in zip(fixed, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(function(*duals)).tangent, tangent)
        one = function(fixed[0], duals[1], fixed[2])
        torch.testing.assert_close(forward_ad.unpack_dual(one).tangent, alone)


def test_forward_over_reverse():
    t = spmm_tensors(requires_grad=True)

    def function(value: Tensor, dense: Tensor) -> Tensor:
        return insum(
            SPMM.replace("Val[p]", "Val[p] * Val[p]"), **{**t, "Val": value, "B": dense}, out_shape=(ROWS, None)
        )

    torch.autograd.gradgradcheck(function, (t["Val"], t["B"]), check_fwd_over_rev=True)


def test_autocast_casts_as_for_a_matrix_product():
    t = spmm_tensors(requires_grad=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = insum(SPMM, **t, out_shape=(ROWS, None))
        want = spmm_dense({**t, "Val": t["Val"].bfloat16(), "B": t["B"].bfloat16()})
        # What reaches a layer is a mix: activations of the product before it, and its own float32 weights.
        mixed = insum(SPMM, **{**t, "B": t["B"].bfloat16()}, C=torch.zeros(ROWS, 3))
        double = insum(
            SPMM, **{k: v.double() if v.is_floating_point() else v for k, v in t.items()}, out_shape=(ROWS, None)
        )
    assert got.dtype == mixed.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert torch.equal(got, mixed)
    got.sum().backward()
    assert t["Val"].grad.dtype == t["B"].grad.dtype == torch.float32


def test_autocast_leaves_a_backward_of_other_dtypes_alone():
    """Autocast that begins after the call must not mix bfloat16 into the sums of a float32 derivative."""
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    out = insum("C[i,j] += A[i,k] * B[k,j]", A=a, B=b)
    with torch.autocast("cpu", torch.bfloat16):
        out.sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(3, 4))


@pytest.mark.gpu
def test_autocast_of_a_gpu_leaves_the_cpu_alone():
    with torch.autocast("cuda", torch.float16):
        assert insum("y[i] += x[i]", x=torch.ones(2)).dtype == torch.float32


def test_autocast_inside_compile():
    def function(Row: Tensor, Col: Tensor, Val: Tensor, B: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return insum(SPMM, Row=Row, Col=Col, Val=Val, B=B, out_shape=(ROWS, None))

    got = _compare_compiled("aot_eager", function, spmm_tensors(requires_grad=True, dtype=torch.float32))
    assert got.dtype == torch.bfloat16


PROGRAMS = {
    "plain": lambda: insum_nn.compile(SPMM),
    "full": lambda: insum_nn.compile(
        SPMM,
        out_shape=(ROWS, None),
        facts={"Row": IndexFacts(sorted=False, masked=False)},
        options=Options(order="left"),
    ),
    "sized": lambda: insum_nn.compile("y[i,j] += x[i]", sizes={"j": 2}),
    "derivative": lambda: insum_nn.compile(SPMM).grad("B"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_copies_are_equal(name: str):
    program = PROGRAMS[name]()
    for other in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program), copy.copy(program), PROGRAMS[name]()):
        assert other == program
        assert hash(other) == hash(program)
        assert other.expression == program.expression
        assert other.options == program.options
    assert program != insum_nn.compile("y[i] += x[i]")
    assert program != "y[i] += x[i]"


def test_a_pickled_program_runs():
    t = spmm_tensors()
    program = pickle.loads(pickle.dumps(insum_nn.compile(SPMM, out_shape=(ROWS, None))))
    torch.testing.assert_close(program(**t), spmm_dense(t))
    gradient = pickle.loads(pickle.dumps(program.grad("B")))
    weights = draw(ROWS, 3)
    got = gradient(Row=t["Row"], Col=t["Col"], Val=t["Val"], dC=weights, out_shape=(4, None))
    dense = t["B"].requires_grad_()
    (want,) = torch.autograd.grad(spmm_dense({**t, "B": dense}), dense, weights)
    torch.testing.assert_close(got, want)


def test_a_pickled_sum_of_programs_runs():
    total = pickle.loads(pickle.dumps(insum_nn.compile("s += a[i] * a[i]").grad("a")))
    a = draw(3)
    one = torch.tensor(1.0, dtype=torch.float64)
    compiled = torch.compile(lambda a: total(a=a, ds=one, out_shape=a.shape), fullgraph=True, backend="aot_eager")
    for function in (compiled, lambda a: total(a=a, ds=one), lambda a: total(a=a, ds=one, out_shape=[3])):
        torch.testing.assert_close(function(a), 2 * a)


def test_module_with_a_program_deep_copies_and_pickles():
    layer, t = Layer(), spmm_tensors()
    want = layer(t["Row"], t["Col"], t["B"])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(t["Row"], t["Col"], t["B"]), want)


def _in_another_process(program: Program, tensors: dict[str, Tensor]) -> tuple[list[list[float]], str]:
    torch.set_num_threads(1)
    try:
        program(**{**tensors, "B": tensors["B"][0]})
    except insum_nn.errors.InsumError as error:
        return program(**tensors).tolist(), str(error)
    raise AssertionError("a vector passed for the matrix 'B' was accepted")


@pytest.mark.slow
def test_other_processes():
    """Programs go to a fresh process, and results and errors come back."""
    t = spmm_tensors()
    program = insum_nn.compile(SPMM, out_shape=(ROWS, None))
    with new_pool(2) as pool:
        answers = pool.starmap(_in_another_process, [(program, t)] * 3)
        with pytest.raises(InsumShapeError, match="'B' has 2 subscripts, but 1 dimension") as caught:
            pool.apply(program, kwds={**t, "B": t["B"][0]})
    for values, message in answers:
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), spmm_dense(t))
        assert message == str(caught.value)


def test_inference_mode_and_no_grad():
    t = spmm_tensors(requires_grad=True)
    want = spmm_dense(t).detach()
    with torch.no_grad():
        got = insum(SPMM, **t, out_shape=(ROWS, None))
    assert not got.requires_grad
    torch.testing.assert_close(got, want)
    with torch.inference_mode():
        made_inside = {name: tensor.clone() for name, tensor in t.items()}
        for tensors in (t, made_inside):
            got = insum(SPMM, **tensors, out_shape=(ROWS, None))
            assert got.is_inference()
            torch.testing.assert_close(got, want)
        # An inference tensor has no version to remember a proof by, so each call reads it anew.
        made_inside["Col"].fill_(9)
        with pytest.raises(insum_nn.errors.InsumRangeError):
            insum(SPMM, **made_inside, out_shape=(ROWS, None))
    torch.testing.assert_close(insum(SPMM, **t, out_shape=(ROWS, None)), want)


def test_eight_threads_at_once():
    """First calls and gradients from eight threads; half of them share a statement, half have their own."""
    insum_nn.clear_cache()

    def work(number: int) -> None:
        t = spmm_tensors(requires_grad=True)
        t["Val"] = torch.full((5,), float(number), dtype=torch.float64, requires_grad=True)
        expression = SPMM if number % 2 else SPMM.replace("p", f"p{number}")
        got = insum(expression, **t, out_shape=(ROWS, None))
        torch.testing.assert_close(got, spmm_dense(t))
        (gradient,) = torch.autograd.grad(got.sum(), t["Val"])
        keep = t["Col"] >= 0
        want = torch.where(keep, t["B"][t["Col"].clamp(min=0)].sum(1), 0)
        torch.testing.assert_close(gradient, want)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(64)]:
            future.result()


def test_fake_tensors():
    with FakeTensorMode() as mode:
        row, col = torch.empty(5, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
        value = torch.empty(5, requires_grad=True)
        out = insum(SPMM, Row=row, Col=col, Val=value, B=torch.empty(4, 3), out_shape=(ROWS, None))
        assert isinstance(out, FakeTensor)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((ROWS, 3), torch.float32, True)
        out.sum().backward()
        assert value.grad.shape == (5,)
    t = {name: mode.from_tensor(tensor) for name, tensor in spmm_tensors().items()}
    out = insum(SPMM, **t, out_shape=(ROWS, None))
    assert isinstance(out, FakeTensor)
    assert out.dtype == torch.float64


@pytest.mark.parametrize("operator", OPERATORS)
def test_meta_tensors(operator: str):
    t = {name: tensor.to("meta").requires_grad_(tensor.requires_grad) for name, tensor in spmm_tensors().items()}
    t["B"].requires_grad_()
    out = insum(SPMM.replace("+=", operator), **t, out_shape=(ROWS, None))
    assert (out.device.type, out.shape, out.dtype) == ("meta", (ROWS, 3), torch.float64)
    out.sum().backward()
    assert t["B"].grad.shape == (4, 3)


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_tensor_subclasses():
    t = spmm_tensors()
    want = spmm_dense(t)
    got = insum(SPMM, **{**t, "B": t["B"].as_subclass(Tagged)}, out_shape=(ROWS, None))
    assert isinstance(got, Tagged)
    torch.testing.assert_close(got.as_subclass(Tensor), want)
    parameter, buffer = torch.nn.Parameter(t["Val"]), torch.nn.Buffer(t["B"])
    got = insum(SPMM, **{**t, "Val": parameter, "B": buffer}, out_shape=(ROWS, None))
    assert type(got) is Tensor
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert parameter.grad is not None


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradient_of_the_start(operator: str):
    """It is the output's gradient, less what other terms attained."""
    t = spmm_tensors(requires_grad=True)
    initial = draw(ROWS, 3).requires_grad_()
    out = insum(SPMM.replace("+=", operator), **t, C=initial)
    weights = draw(ROWS, 3)
    (gradient,) = torch.autograd.grad(out, initial, weights)
    want = weights if operator == "+=" else torch.where(out == initial, weights, 0)
    torch.testing.assert_close(gradient, want)
    assert initial.grad is None
    only_start = insum("y[i] += 2 * 3", y=draw(4).requires_grad_(), sizes={"i": 4})
    assert only_start.requires_grad


def test_a_gradient_is_made_only_where_one_is_needed():
    t = spmm_tensors()
    t["B"].requires_grad_()
    out = insum(SPMM, **t, out_shape=(ROWS, None))
    out.sum().backward()
    assert t["Val"].grad is None
    assert t["B"].grad is not None


def test_double_backward_through_the_operator_and_through_the_function():
    t = spmm_tensors(requires_grad=True)

    def second(loss: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss, t["Val"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), t["B"])[0]

    def direct() -> Tensor:
        return insum(SPMM, **t, out_shape=(ROWS, None)).square().sum()

    tagged = insum(SPMM, **{**t, "B": t["B"].as_subclass(Tagged)}, out_shape=(ROWS, None)).square().sum()
    torch.testing.assert_close(second(tagged).as_subclass(Tensor), second(direct()))
