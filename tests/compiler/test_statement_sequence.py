"""Statements that run as several: what is chosen by size, and the same numbers as the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.printed import Run
from insum_nn.compiler.runtime import execution, statement_cuts
from insum_nn.compiler.runtime.backends import is_matrix_product
from insum_nn.compiler.runtime.execution import Executable, Executables
from insum_nn.dtypes import FLOATS
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.cuts import CHAIN, RGCN, STATEMENTS, cut_at_random, doubled, drawn, out_shape
from tests.compiler.interpreted import interpreter
from tests.compiler.test_misses import agree
from tests.compiler.test_property import assert_close_to_reference, batch, run

__all__ = ["interpreter"]

DEFAULT = Options()
KERNELS = Options(backend="triton", tune=False)
INF, NAN = float("inf"), float("nan")


def program_of(statement: str, **options: object) -> insum_nn.compiler.api.Program:
    sizes = {"i": 2} if "+i" in statement else None
    return insum_nn.compile(statement, sizes=sizes, out_shape=out_shape(statement), **options)  # type: ignore[arg-type]


# The same numbers, whatever is cut.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STATEMENTS)
def test_values_and_both_orders_of_gradients(name: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    statement = STATEMENTS[name]
    tensors = drawn(statement)
    want = program_of(statement).reference(tensors=tensors)
    found = cut_at_random(monkeypatch, seed)
    program = program_of(statement)
    torch.testing.assert_close(program(tensors=tensors), want)
    assert found
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]

    def call(*values: Tensor) -> Tensor:
        return program(tensors={**tensors, **dict(zip(names, values, strict=True))})

    values = tuple(tensors[name].requires_grad_() for name in names)
    torch.autograd.gradcheck(call, values)
    torch.autograd.gradgradcheck(call, values, fast_mode=True)
    assert len({bound.statement for bound in found}) > 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STATEMENTS)
def test_values_in_other_dtypes(name: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch):
    statement = STATEMENTS[name]
    tensors = drawn(statement, dtype)
    positive = {n: t.double().abs() if t.is_floating_point() else t for n, t in tensors.items()}
    scale = float(program_of(statement).reference(tensors=positive).max())
    cut_at_random(monkeypatch, seed)
    program = program_of(statement)
    want = program.reference(tensors=doubled(tensors))
    assert_matches(program(tensors=tensors), want, dtype=dtype, kind="sum", scale=3 * scale)


@pytest.mark.parametrize("seed", range(2))
def test_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch):
    found = cut_at_random(monkeypatch, seed)
    for program in batch(700 + seed, 60):
        assert_close_to_reference(program, run(program))
    assert len(found) > 5


@pytest.mark.parametrize("seed", range(2))
def test_what_never_matters_stays_out_of_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Numbers that are not finite, where no term reads them that takes part, show in no output and no gradient."""
    found = cut_at_random(monkeypatch, seed)
    for program in batch(800 + seed, 40):
        agree(program, Options())
    assert len(found) > 5


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["relational graph convolution", "grouped entries", "attention"])
def test_generated_kernels(name: str, monkeypatch: pytest.MonkeyPatch):
    statement = STATEMENTS[name]
    tensors = drawn(statement, torch.float32)
    found = cut_at_random(monkeypatch, 0)
    program = program_of(statement, options=KERNELS)
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    ours, exact = (
        {n: t.requires_grad_() if t.is_floating_point() else t for n, t in each.items()}
        for each in (tensors, doubled(tensors))
    )
    got, want = program(tensors=ours), insum_nn.compile(statement)(tensors=exact, out_shape=out_shape(statement))
    assert_matches(got, want, dtype=torch.float32, kind="sum", scale=30.0)
    seed = torch.randn_like(got)
    grads, wanted = (
        torch.autograd.grad(y, [each[n] for n in names], seed.to(y.dtype)) for y, each in ((got, ours), (want, exact))
    )
    for one, other in zip(grads, wanted, strict=True):
        assert_matches(one, other, dtype=torch.float32, kind="gradient")
    assert len({bound.statement for bound in found}) > 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_an_initial_value_and_what_follows_the_sum(
    seed: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    tensors, bias = drawn(RGCN, torch.float32), torch.randn(4)
    want = torch.relu(insum_nn.compile(RGCN, out_shape=(5, 4)).reference(tensors=doubled(tensors)) + bias.double())
    assert cut_at_random(monkeypatch, seed) == []
    program = insum_nn.compile(RGCN, out_shape=(5, 4), activation="relu", out_dtype=dtype)
    got = program(tensors={**tensors, "Y": bias})
    assert_matches(got, want, dtype=dtype or torch.float32, kind="sum", scale=10.0)


def test_gradients_that_add_up(monkeypatch: pytest.MonkeyPatch):
    """A tensor that stands in two factors: the second derivative statement continues from the first."""
    statement = "Y[D[e],o] += X[D[e],c] * X[S[e],b] * W[c,b,o]"
    cut_at_random(monkeypatch, 1)
    index = {name: torch.tensor([0, 2, -1, 1, 2]) for name in ("D", "S")}
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (3, 3, 2)))
    program = insum_nn.compile(statement, out_shape=(4, None))
    torch.autograd.gradcheck(lambda x, w: program(tensors={**index, "X": x, "W": w}), (x, w))


# What several statements of a call begin with.


def statements_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements of sequences, as they run."""
    ran: list[str] = []
    stages = execution.stages

    def counted(*call: Any) -> Iterator[tuple[statement_cuts.Part, Executable, list[Tensor], Run]]:
        for part, program, tensors, plain in stages(*call):

            def run(
                operands: Sequence[Tensor],
                initial: Tensor | None,
                part: statement_cuts.Part = part,
                plain: Run = plain,
            ) -> Tensor:
                ran.append(str(part.bound.statement))
                return plain(operands, initial)

            yield part, program, tensors, run

    monkeypatch.setattr(execution, "stages", counted)
    insum_nn.clear_cache()
    return ran


def many_blocks() -> dict[str, Tensor]:
    position = torch.randperm(64 * 64)[: 64 * 32].sort().values
    return {"Row": position // 64, "Col": position % 64, "W": torch.randn(2048, 16, 16), "X": torch.randn(256, 64, 16)}


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.library_calls
def test_gradients_of_a_product_with_a_dense_matrix_of_blocks(activation: str | None):
    tensors = many_blocks()
    product = insum_nn.compile(BLOCK_STATEMENTS["forward"], out_shape=(None, 64, None))
    program = insum_nn.compile(BLOCK_STATEMENTS["forward"], out_shape=(None, 64, None), activation=activation)
    exact, seed = doubled(tensors), torch.randn(256, 64, 16)
    for each in (tensors, exact):
        for name in "WX":
            each[name].requires_grad_()
    for _ in range(2):
        result = program(tensors=tensors)
        torch.autograd.grad(result, [tensors["W"], tensors["X"]], seed, retain_graph=True)
        got = torch.autograd.grad(result, [tensors["W"], tensors["X"]], seed)
        sent = seed if activation is None else seed * (result > 0)
        want = torch.autograd.grad(product(tensors=exact), [exact["W"], exact["X"]], sent.double())
        for one, other in zip(got, want, strict=True):
            assert_matches(one, other, dtype=torch.float32, kind="gradient")


def test_a_weight_that_was_written_to_is_not_read_as_it_was():
    tensors = many_blocks()
    for name in "WX":
        tensors[name].requires_grad_()
    result = insum_nn.insum(BLOCK_STATEMENTS["forward"], out_shape=(None, 64, None), **tensors)
    with torch.no_grad():
        tensors["W"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_gradients_share_what_they_begin_with(monkeypatch: pytest.MonkeyPatch):
    """The gradients of features and of weights both read what edges send back to their sources."""
    ran = statements_run(monkeypatch)
    tensors = {name: torch.randint(9_000, (90_000,)) for name in "DS"}
    tensors |= {"Val": torch.rand(90_000), "X": torch.randn(9_000, 32), "W": torch.randn(32, 16)}
    tensors["X"].requires_grad_()
    tensors["W"].requires_grad_()
    result = insum_nn.compile(CHAIN, out_shape=(9_000, None))(tensors=tensors)
    seed = torch.randn_like(result)
    got = torch.autograd.grad(result, [tensors["X"], tensors["W"]], seed)
    assert ran.count("T[S[e],o] += dY[D[e],o] * Val[e]") == 1, ran
    back = torch.zeros(9_000, 16).index_add(0, tensors["S"], tensors["Val"][:, None] * seed[tensors["D"]])
    assert_matches(got[0], back.double() @ tensors["W"].double().T, dtype=torch.float32, kind="gradient")
    assert_matches(got[1], tensors["X"].double().T @ back.double(), dtype=torch.float32, kind="gradient")


# What is not finite and not read.


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_nothing_reads_do_not_show(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Node 4 has no edges, node 3 only missing ones, relation 2 none; a mean over no edges is infinite."""
    cut_at_random(monkeypatch, seed)
    tensors = {
        "D": torch.tensor([0, 1, 2, 2, 3, -1]),
        "S": torch.tensor([1, 0, 2, 0, -1, 3]),
        "R": torch.tensor([0, 1, 1, 0, 1, 0]),
        "Inv": torch.full((5, 3), INF, dtype=torch.float64),
        "X": torch.randn(5, 3, dtype=torch.float64),
        "W": torch.randn(3, 3, 4, dtype=torch.float64),
    }
    for node, relation in ((0, 0), (1, 1), (2, 1), (2, 0)):
        tensors["Inv"][node, relation] = 0.5
    clean = {name: torch.nan_to_num(t, posinf=0.0) if t.is_floating_point() else t for name, t in tensors.items()}
    tensors["X"][3:], tensors["W"][2] = NAN, NAN
    want = insum_nn.compile(RGCN, out_shape=(5, 4)).reference(tensors=clean)
    program = insum_nn.compile(RGCN, out_shape=(5, 4))
    names = ("Inv", "X", "W")
    leaves = {name: t.requires_grad_() if name in names else t for name, t in tensors.items()}
    exact = {name: t.requires_grad_() if name in names else t for name, t in clean.items()}
    got = program(tensors=leaves)
    torch.testing.assert_close(got, want)
    seed_gradient = torch.randn(5, 4, dtype=torch.float64)
    # What the loss makes of nodes without edges, as the derivative of a norm of 0.
    poisoned = seed_gradient.clone()
    poisoned[3:] = NAN
    found = torch.autograd.grad(got, [leaves[name] for name in names], poisoned)
    monkeypatch.undo()
    insum_nn.clear_cache()
    wanted = torch.autograd.grad(
        insum_nn.compile(RGCN, out_shape=(5, 4))(tensors=exact), [exact[name] for name in names], seed_gradient
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_a_row_that_nothing_reads_is_zero(seed: int, monkeypatch: pytest.MonkeyPatch):
    cut_at_random(monkeypatch, seed)
    tensors = drawn(CHAIN, missing=0.0)
    tensors["S"][:], tensors["S"][0] = 1, 2
    tensors["D"][0] = -1
    tensors["W"] = torch.full_like(tensors["W"], INF)
    x = tensors["X"].requires_grad_()
    (found,) = torch.autograd.grad(insum_nn.compile(CHAIN, out_shape=(5, 4))(tensors=tensors).sum(), x)
    assert not found[[0, 2, 3, 4]].any()
    assert not found[1].isfinite().any()


# The choice.


def sequence(
    statement: str,
    options: Options = DEFAULT,
    *,
    masked: bool = False,
    in_order: str = "",
    dtype: torch.dtype = torch.float32,
    **shapes: object,
) -> tuple[statement_cuts.Part, ...]:
    """What is decided of a statement at some shapes; index tensors are zeros, or as given."""
    parsed = parse(statement)
    tensors: dict[str, Tensor] = {}
    for name in parsed.tensors():
        given = shapes[name]
        index = name in parsed.index_tensors()
        kind = torch.long if index else dtype
        tensors[name] = given if isinstance(given, Tensor) else torch.zeros((), dtype=kind).expand(given)  # type: ignore[arg-type]
    facts = {name: IndexFacts(masked=masked, sorted=name == in_order, proven=True) for name in parsed.index_tensors()}
    bound = bind(parsed, tensors, None, facts=facts)
    program = insum_nn.compile(statement)
    ordered, _, extents = program._checked(tensors, None, shapes["out"])  # type: ignore[arg-type]
    tree, whole = _sequences(bound, options).decided(ordered, extents)
    return () if tree.cut is None else tree.parts(whole)


_sequences = lru_cache(Executables)


def texts(found: Sequence[statement_cuts.Part]) -> list[str]:
    return [str(part.bound.statement) for part in found]


def chain_of(k: int, n: int, entries: int, rows: int, options: Options = DEFAULT) -> list[str]:
    return texts(
        sequence(CHAIN, options, D=(entries,), S=(entries,), Val=(entries,), X=(rows, k), W=(k, n), out=(rows, n))
    )


@pytest.mark.parametrize("options", [Options(), KERNELS], ids=["library", "kernels"])
def test_the_order_with_the_narrower_gather_wins(options: Options):
    assert chain_of(32, 128, 500_000, 50_000, options)[0] == "T[D[e],c] += Val[e] * X[S[e],c]"
    assert chain_of(128, 16, 500_000, 50_000, options)[0] == "T[i,o] += X[i,c] * W[c,o]"


def test_what_is_small_stays_whole():
    assert chain_of(8, 8, 50, 10) == []


def test_two_hops_take_the_sparse_factor_first_or_last():
    statement = STATEMENTS["two sparse hops"]
    shapes = {"D": (90_000,), "S": (90_000,), "Val": (90_000,), "C": (64, 64)}
    found = texts(sequence(statement, Far=(9_000, 64), out=(9_000, 64), **shapes))
    assert len(found) == 2
    assert all(" * C[" not in text or "Val" not in text for text in found)


def test_attention_without_its_softmax_is_a_product_at_the_edges_and_one_along_them():
    found = texts(
        sequence(
            STATEMENTS["attention"], KERNELS, D=(90_000,), S=(90_000,), Q=(9_000, 64), K=(9_000, 64), X=(9_000, 64),
            out=(9_000, 64),
        )
    )  # fmt: skip
    assert found == ["T[e] += Q[D[e],c] * K[S[e],c]", "Y[D[e],o] += T[e] * X[S[e],o]"]


def test_dense_products_are_ordered_inside_of_their_program():
    """A library multiplies pairs of dense factors in the best order by itself."""
    assert (
        texts(sequence("Y[i,o] += A[i,j] * B[j,k] * C[k,o]", A=(900, 900), B=(900, 64), C=(64, 64), out=(900, 64)))
        == []
    )


def test_an_intermediate_tensor_of_too_many_bytes_is_not_made():
    """Nodes by relations are more than edges."""
    shapes = {
        "D": (4_000,),
        "S": (4_000,),
        "R": (4_000,),
        "X": (200_000, 64),
        "W": (4_000, 64, 64),
        "out": (200_000, 64),
    }
    found = texts(sequence(STATEMENTS["the same without a mean"], **shapes))
    assert not any("j,o] += X[i,c] * W[j,c,o]" in text for text in found)


def test_a_kernel_that_skips_missing_entries_is_not_cut():
    """Of a table of neighbours most entries are missing, and a product for every voxel and offset would be more."""
    statement = "Y[v,d] += F[N[k,v],c] * W[k,c,d]"
    shapes = {"F": (2_000, 32), "W": (27, 32, 32), "out": (40_000, 32)}
    full, few = torch.zeros(27, 40_000, dtype=torch.long), torch.full((27, 40_000), -1)
    few[0] = 0
    assert texts(sequence(statement, KERNELS, masked=True, N=full, **shapes))
    insum_nn.clear_cache()
    assert texts(sequence(statement, KERNELS, masked=True, N=few, **shapes)) == []


def test_a_product_for_each_row_of_terms_is_one_of_matrices(monkeypatch: pytest.MonkeyPatch):
    """Terms of a row are multiplied by the matrix unit; to spread them over all cells would be more."""
    machine = statement_cuts.machine_of
    monkeypatch.setattr(statement_cuts, "machine_of", lambda _, width, **about: machine("gpu", width, **about))
    statement = "dW[d,Off[p],c] += dOut[OutIdx[p],d] * In[InIdx[p],c]"
    pairs = dict.fromkeys(("Off", "OutIdx", "InIdx"), (45_000,))
    shapes = {**pairs, "dOut": (3_500, 256), "In": (3_500, 256), "out": (256, 27, 256)}
    insum_nn.clear_cache()
    assert texts(sequence(statement, KERNELS, dtype=torch.float16, **shapes)) == []
    assert texts(sequence(statement, KERNELS, in_order="Off", dtype=torch.float16, **shapes)) == []


BLOCK_STATEMENTS = {
    "forward": "Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]",
    "gradient of the input": "Y[n,Col[p],b] += X[n,Row[p],a] * W[p,a,b]",
    "SpMM": "Y[Row[p],a,n] += W[p,a,b] * X[Col[p],b,n]",
}
DENSE_FIRST = "T[Row[p],a,Col[p],b] += W[p,a,b]"


def blocks_of(
    kind: str, side: int, share: float, extent: int, samples: int, dtype: torch.dtype, options: Options = DEFAULT
) -> list[str]:
    """The statements of a product with the blocks of a square matrix."""
    grid, count = extent // side, int(share * (extent // side) ** 2)
    operand = (grid, side, samples) if kind == "SpMM" else (samples, grid, side)
    shapes = {"Row": (count,), "Col": (count,), "W": (count, side, side), "X": operand, "out": operand}
    return texts(sequence(BLOCK_STATEMENTS[kind], options, in_order="Row", dtype=dtype, **shapes))


@pytest.mark.parametrize(
    ("side", "share", "dense"),
    [(16, 0.19, False), (16, 0.25, True), (32, 0.32, False), (32, 0.45, True), (64, 0.45, False), (64, 0.9, True)],
)
@pytest.mark.parametrize("kind", BLOCK_STATEMENTS)
@pytest.mark.library_calls
def test_many_blocks_on_a_cpu_are_multiplied_as_a_dense_matrix(kind: str, side: int, share: float, dense: bool):
    """Near the shares that were measured on two cores, 1024 x 1024 times 256 columns: 0.22 and 0.4."""
    found = blocks_of(kind, side, share, 1024, 256, torch.float32)
    assert found[:1] == ([DENSE_FIRST] if dense else [])
    assert not found or " * X" in found[1]


@pytest.mark.parametrize(("side", "half", "single"), [(32, 0.37, 0.76), (64, 0.6, 0.94), (128, 0.6, 0.94)])
@pytest.mark.parametrize("kind", BLOCK_STATEMENTS)
def test_many_blocks_on_a_gpu_are_multiplied_as_a_dense_matrix(
    kind: str, side: int, half: float, single: float, monkeypatch: pytest.MonkeyPatch
):
    """From the shares on that were measured on an H200, and only where a library may multiply."""
    machine = statement_cuts.machine_of
    monkeypatch.setattr(statement_cuts, "machine_of", lambda _, width, **about: machine("gpu", width, **about))
    monkeypatch.setattr(
        statement_cuts,
        "choose_backend",
        lambda bound, _: ("eager" if is_matrix_product(bound.statement) else "triton", ""),
    )
    for dtype, options, least in (
        (torch.float16, Options(), half),
        (torch.float32, Options(), single),
        (torch.float16, Options(deterministic=True), 2.0),
        (torch.float16, Options(backend="triton"), 2.0),
    ):
        for share in (0.1, min(least, 1.0) - 0.04, min(least + 0.04, 1.0), 1.0):
            insum_nn.clear_cache()
            found = blocks_of(kind, side, share, 4096, 4096, dtype, options)
            assert found[:1] == ([DENSE_FIRST] if share > least else [])


def test_what_is_never_cut():
    size = {"D": (50_000,), "S": (50_000,), "Val": (50_000,), "X": (5_000, 64), "W": (64, 64), "out": (5_000, 64)}
    assert texts(sequence(CHAIN, **size))
    assert texts(sequence(CHAIN.replace("+=", "max="), **size)) == []
    assert texts(sequence(CHAIN, dtype=torch.int32, **size)) == []
    assert texts(sequence(CHAIN, **{**size, "X": (0, 64)})) == []


def test_one_decision_for_all_sizes_nearby(monkeypatch: pytest.MonkeyPatch):
    insum_nn.clear_cache()
    decided: list[object] = []
    best = statement_cuts._best

    def counted(*about: Any, **more: Any) -> Any:
        decided.append(about)
        return best(*about, **more)

    monkeypatch.setattr(statement_cuts, "_best", counted)
    first = chain_of(60, 63, 90_000, 9_000)
    made = len(decided)
    assert made
    assert chain_of(50, 61, 70_000, 9_100) == first
    assert len(decided) == made
    chain_of(50, 61, 70_000, 40_000)
    assert len(decided) > made


def test_a_decision_does_not_serve_sizes_at_which_axes_disagree():
    statement = "Y[D[e],o] += X[S[e],c] * Z[S[e],c,o]"
    shapes = {"D": (90_000,), "S": (90_000,), "X": (300, 64), "out": (300, 64)}
    insum_nn.clear_cache()
    together = texts(sequence(statement, Z=(300, 64, 64), **shapes))
    assert together[0] == "T[i,o] += X[i,c] * Z[i,c,o]"
    assert together != texts(sequence(statement, Z=(310, 64, 64), **shapes))


# Seen from outside.


def relational(nodes: int, edges: int, relations: int, features: int) -> dict[str, Tensor]:
    return {
        "D": torch.randint(nodes, (edges,)),
        "S": torch.randint(nodes, (edges,)),
        "R": torch.randint(relations, (edges,)),
        "Inv": torch.rand(nodes, relations),
        "X": torch.randn(nodes, features),
        "W": torch.randn(relations, features, features) / features**0.5,
    }


def by_relation(t: dict[str, Tensor]) -> Tensor:
    """The same convolution, one relation after the other."""
    total = t["X"].new_zeros(t["X"].shape[0], t["W"].shape[2])
    for relation in range(t["W"].shape[0]):
        edge = t["R"] == relation
        messages = (t["X"] @ t["W"][relation])[t["S"][edge]] * t["Inv"][t["D"][edge], relation][:, None]
        total = total.index_add(0, t["D"][edge], messages)
    return total


def test_a_relational_convolution_takes_no_second():
    """Forward and backward, with what is decided on the way; formed edge by edge they take 5 s and more."""
    tensors, names = relational(3_000, 60_000, 8, 64), ("Inv", "X", "W")
    ours = {n: t.requires_grad_() if n in names else t for n, t in tensors.items()}
    exact = {n: t.detach().double().requires_grad_() if n in names else t for n, t in tensors.items()}
    program = insum_nn.compile(RGCN, out_shape=(3_000, None))
    seed = torch.randn(3_000, 64)

    def step() -> tuple[Tensor, ...]:
        out = program(tensors=ours)
        return out, *torch.autograd.grad(out, [ours[n] for n in names], seed)

    got = step()
    begin = time.perf_counter()
    step()
    assert time.perf_counter() - begin < 1.0
    out = by_relation(exact)
    want = out, *torch.autograd.grad(out, [exact[n] for n in names], seed.double())
    for one, other in zip(got, want, strict=True):
        assert_matches(one, other, dtype=torch.float32, kind="gradient")


@pytest.mark.library_calls
def test_explain_shows_the_order_with_its_counts():
    program = insum_nn.compile(RGCN, out_shape=(3_000, None))
    explanation = program.explain(tensors=relational(3_000, 60_000, 8, 64))
    decision = next(d for d in explanation.decisions if d.topic == "order")
    first, second = decision.choice.split(", then ")
    assert first == "T[i,j,o] += X[i,c] * W[j,c,o]"
    assert second == "Y[D[e],o] += T[S[e],R[e],o] * Inv[D[e],R[e]]"
    assert decision.reason == (
        "1.02e+08 multiplications and 102 MB, where the whole takes 2.5e+08 multiplications and 3.07e+03 MB"
    )
    shown = str(explanation)
    assert f"statement 1 of 2\n  {first}" in shown
    assert f"statement 2 of 2\n  {second}" in shown
    assert shown.count("torch code") == 2
    assert "matmul" in (explanation.kernel_source() or "")
    assert "index_add" in (explanation.kernel_source() or "")
    assert explanation.backend == "eager"


def test_explain_names_what_is_cleared():
    tensors = {"D": torch.zeros(90_000, dtype=torch.long), "S": torch.zeros(90_000, dtype=torch.long)}
    tensors |= {"A": torch.ones(9_000, 64), "X": torch.ones(9_000, 64), "Val": torch.ones(90_000)}
    program = insum_nn.compile("dW[c,o] += A[D[e],o] * Val[e] * X[S[e],c]")
    (cleared,) = (str(d) for d in program.explain(tensors=tensors).decisions if d.topic == "cleared")
    want = "cleared: in X_read, entries of X that no term reads are set to 0; a NaN there cannot spread"
    assert cleared == want


@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (5, 0), (1, 1)])
def test_empty_and_single(nodes: int, edges: int, monkeypatch: pytest.MonkeyPatch):
    cut_at_random(monkeypatch, 0)
    tensors = relational(max(nodes, 1), edges, 2, 3)
    tensors["X"], tensors["Inv"] = tensors["X"][:nodes], tensors["Inv"][:nodes]
    got = insum_nn.compile(RGCN, out_shape=(nodes, None))(tensors=tensors)
    torch.testing.assert_close(got, by_relation(tensors) if nodes else got.new_zeros(0, 3))


def test_index_tensors_that_are_written_to_clear_other_cells(monkeypatch: pytest.MonkeyPatch):
    statement = "dW[c,o] += A[D[e],o] * Val[e] * X[S[e],c]"
    cut_at_random(monkeypatch, 0)
    tensors = {"D": torch.tensor([0, 1, 1]), "S": torch.tensor([1, 0, 1]), "Val": torch.ones(3)}
    tensors |= {"A": torch.tensor([[1.0], [2.0], [NAN]]), "X": torch.tensor([[1.0], [2.0], [NAN]])}
    program = insum_nn.compile(statement)
    assert program(tensors=tensors).tolist() == [[8.0]]
    tensors["A"][0] = tensors["X"][0] = NAN
    tensors["A"][2] = tensors["X"][2] = 3.0
    tensors["D"].copy_(torch.tensor([2, 1, 1]))
    tensors["S"].copy_(torch.tensor([2, 1, 1]))
    assert program(tensors=tensors).tolist() == [[17.0]]


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("k", "n"), [(64, 64), (32, 128), (100, 37), (256, 256)])
@pytest.mark.parametrize("longest", [0, 100_000])
def test_a_chain_on_a_gpu(gpu: torch.device, dtype: torch.dtype, k: int, n: int, longest: int):
    rows = 4_000
    row = torch.randint(rows, (30_000 + longest,))
    row[:longest] = 17
    tensors = {
        "D": row.sort().values,
        "S": torch.randint(rows, (row.numel(),)),
        "Val": torch.randn(row.numel()),
        "X": torch.randn(rows, k),
        "W": torch.randn(k, n) / k**0.5,
    }
    compare_on(gpu, CHAIN, tensors, dtype, (rows, n))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_relational_convolution_on_a_gpu(gpu: torch.device, dtype: torch.dtype):
    compare_on(gpu, RGCN, relational(3_000, 60_000, 8, 64), dtype, (3_000, 64))


def compare_on(
    device: torch.device, statement: str, tensors: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Compare values and gradients on a device with the same in float64 on the CPU."""
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    ours = {n: t.to(device).requires_grad_(t.is_floating_point()) for n, t in rounded.items()}
    exact = {n: t.requires_grad_(t.is_floating_point()) for n, t in doubled(rounded).items()}
    program = insum_nn.compile(statement, out_shape=shape)
    explanation = program.explain(tensors={n: t.detach() for n, t in ours.items()})
    assert any(d.topic == "order" for d in explanation.decisions)
    got, want = program(tensors=ours), program(tensors=exact)
    scale = float(program(tensors={n: t.detach().abs() for n, t in exact.items()}).max())
    assert_matches(got, want, dtype=dtype, kind="sum", scale=scale)
    seed = torch.randn(shape).to(dtype)
    names = [n for n, t in rounded.items() if t.is_floating_point()]
    found = torch.autograd.grad(got, [ours[n] for n in names], seed.to(device))
    wanted = torch.autograd.grad(want, [exact[n] for n in names], seed.double())
    for one, other in zip(found, wanted, strict=True):
        assert_matches(one, other, dtype=dtype, kind="gradient")
