"""What is remembered, for how long, and what makes it forgotten."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options, cache_info, clear_cache, insum, tensor_cache
from insum_nn.compiler import api
from insum_nn.compiler.api import compile_built
from insum_nn.compiler.kernels import c_structures
from insum_nn.compiler.kernels import launch as launch_module
from insum_nn.compiler.lang.bind import Extents, bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.runtime import artifact, dispatch, execution, fixed_extents
from insum_nn.errors import InsumNameError, InsumRangeError
from insum_nn.facts import StaticTable

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
# What is compiled in is decided without a device.
GPU = "cuda"
SIZES = [(rows, 2 * rows + 1, 3 + rows % 7) for rows in range(2, 22)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    clear_cache()
    yield
    clear_cache()


def spmm(rows: int, entries: int, width: int) -> dict[str, Tensor]:
    return {
        "Row": torch.randint(0, rows, (entries,)),
        "Col": torch.randint(0, rows + 1, (entries,)),
        "Val": torch.randn(entries, dtype=torch.float64),
        "B": torch.randn(rows + 1, width, dtype=torch.float64),
    }


def check(rows: int, entries: int, width: int, options: Options) -> None:
    t = spmm(rows, entries, width)
    got = insum(SPMM, **t, out_shape=(rows, None), options=options)
    want = torch.zeros(rows, width, dtype=torch.float64).index_add(0, t["Row"], t["Val"][:, None] * t["B"][t["Col"]])
    torch.testing.assert_close(got, want)


def test_twenty_sizes_are_planned_once():
    for size in SIZES:
        check(*size, Options())
    info = cache_info()
    assert (info.misses, info.size) == (1, 1)


def test_twenty_sizes_of_a_gradient_are_planned_once():
    for rows, entries, width in SIZES:
        t = spmm(rows, entries, width)
        t["Val"].requires_grad_()
        t["B"].requires_grad_()
        insum(SPMM, **t, out_shape=(rows, None)).sum().backward()
    assert cache_info().misses == 3


def test_what_tells_programs_apart():
    x, E = torch.ones(3), torch.tensor([0, 1, 2])
    variants = [
        lambda: insum("y[i] += x[E[i]]", x=x, E=E),
        lambda: insum("y[i] += x[E[i]]", x=x.double(), E=E),
        lambda: insum("y[i] += x[E[i]]", x=x, E=E.int()),
        lambda: insum("y[i] += x[E[i]]", x=x, E=torch.tensor([0, -1, 2])),
        lambda: insum("y[i] += x[E[i]]", x=x, E=E, y=x),
        lambda: insum("y[i] = x[E[i]]", x=x, E=E),
        lambda: insum("y[i] += x[E[i]]", x=x, E=E, options=Options(order="left")),
        lambda: insum("y[i] += x[E[i]] * x[i]", x=x, E=E),
    ]
    for count, variant in enumerate(variants, start=1):
        variant()
        assert cache_info().misses == count
    for variant in variants:
        variant()
    assert cache_info().misses == len(variants)


def test_what_tells_compiled_programs_apart(monkeypatch: pytest.MonkeyPatch):
    """What is compiled is remembered under all that decides it; nothing is compiled here."""
    keys: list[tuple[object, ...]] = []
    monkeypatch.setattr(execution, "_cached", lambda key, build: keys.append(key.parts))
    known = {"x": torch.ones(3, 4), "E": torch.tensor([0, 1, 2])}
    tables = [(), *((("E", StaticTable.of(torch.tensor(t))),) for t in ([0, 1, 2], [2, 1, 0]))]

    def ask(text: str, tensors: dict[str, Tensor], options: Options) -> None:
        statement = parse(text)
        bound = bind(statement, tensors, None)
        ordered = [tensors[name] for name in bound.layout.tensors]
        extents = resolve_extents(statement, ordered, None, {}, None)
        execution.from_graph(bound, extents, options, "")
        for static in tables:
            execution.Executables(bound, options, static)._generated(extents)

    double = {**known, "x": known["x"].double()}
    before = torch.get_float32_matmul_precision()
    rounds: list[list[tuple[object, ...]]] = []
    try:
        for _ in range(2):
            keys.clear()
            for precision in ("highest", "high"):
                torch.set_float32_matmul_precision(precision)
                for text in ("y[i,n] += x[E[i],n]", "y[i] += x[E[i],n]"):
                    for tensors, options in ((known, Options()), (known, Options(order="left")), (double, Options())):
                        ask(text, tensors, options)
            rounds.append(keys.copy())
    finally:
        torch.set_float32_matmul_precision(before)
    assert rounds[0] == rounds[1]
    # Torch's own calls heed the precision when they run.
    assert len(set(rounds[0])) == len(rounds[0]) - 6


def test_every_argument_of_insum_tells_its_programs_apart():
    """One text and one tensor, with each further argument of a call in turn, twice."""
    x = torch.tensor([-1.0, 3.0], dtype=torch.float64)
    activations = {None: x, "relu": x.relu(), "silu": torch.nn.functional.silu(x)}
    for (activation, want), dtype in itertools.product(list(activations.items()) * 2, (None, torch.float32)):
        got = insum("y[i] += x[i]", x=x, activation=activation, out_dtype=dtype)
        torch.testing.assert_close(got, want if dtype is None else want.to(dtype))
    for extent in (2, 3):
        assert insum("y[i,r] += x[i]", x=x, sizes={"r": extent}).shape == (2, extent)
        with pytest.raises(InsumNameError, match="'r' is written but never read"):
            insum("y[i,r] += x[i]", x=x)
    api._cached_program.cache_clear()
    for options in [Options(), Options(order="left"), Options(validate=True)] * 2:
        insum("y[i] += x[i]", x=x, options=options)
        rest = api._cached_program("y[i] += x[i]", options, (), None, None, False)
        assert rest.spec.options == options
    assert api._cached_program.cache_info().misses == 3


def test_what_does_not_tell_programs_apart():
    """Spelling, names, sizes, layout, sortedness, gradients: one program serves them all."""
    E = torch.tensor([2, 0, 1])
    insum("y[i] += x[E[i]]", x=torch.ones(3), E=E)
    insum("y[i]+=x[ E[i] ]", x=torch.ones(3), E=E)
    insum("e[E] += X[x[E]]", X=torch.ones(3), x=E)
    insum("y[i] += x[E[i]]", x=torch.ones(7), E=E.sort().values)
    insum("y[i] += x[E[i]]", x=torch.ones(6)[::2], E=E)
    insum("y[i] += x[E[i]]", x=torch.ones(3, requires_grad=True), E=E)
    insum_nn.compile("y[i] += x[E[i]]", facts={"E": IndexFacts(unique=True)})(x=torch.ones(3), E=E)
    assert cache_info().misses == 1


def test_the_cache_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "CACHE_LIMIT", 4)
    x = torch.ones(3)
    for factor in range(4):
        insum(f"y[i] += {factor} * x[i]", x=x)
    # Used again (at another size, so that the cache is asked), the first is now the youngest.
    insum("y[i] += 0 * x[i]", x=torch.ones(4))
    insum("y[i] += 4 * x[i]", x=x)
    assert cache_info().size == 4
    assert cache_info().limit == 4
    assert [str(key.parts[0].statement.factors[0]) for key in execution._cache] == ["2", "3", "0", "4"]


def test_clearing():
    check(3, 5, 2, Options())
    check(3, 5, 2, Options())
    clear_cache()
    info = cache_info()
    assert (info.hits, info.misses, info.size) == (0, 0, 0)
    check(3, 5, 2, Options())
    assert cache_info().misses == 1


def test_a_program_made_ready_is_not_used_after_a_clearing():
    """Nothing that a call left ready survives, so memory is given back and new settings take effect."""
    t = spmm(3, 5, 2)
    program = insum_nn.compile(SPMM, out_shape=(3, None))
    program(**t)
    (printed,) = program.spec.calls.values()
    assert printed.bodies
    clear_cache()
    assert not program.spec.calls
    program(**t)
    assert cache_info().misses == 1


def prepared_by(body: Any) -> dict[object, object]:
    """What a kind of call keeps, for sizes and precisions of products."""
    return inspect.getclosurevars(body).nonlocals["runs"]  # type: ignore[no-any-return]


def test_a_program_made_ready_belongs_to_a_precision_of_products():
    """What is made ready for exact float32 must not run where TF32 is allowed, nor the other way."""
    program = insum_nn.compile("c[i,k] += a[i,j] * b[j,k]", options=Options(backend="eager"))
    a = torch.randn(4, 4)
    before = torch.get_float32_matmul_precision()
    try:
        for count, precision in enumerate(("highest", "high", "highest"), start=1):
            torch.set_float32_matmul_precision(precision)
            program(a=a, b=a)
            program(a=a, b=a)
            (printed,) = program.spec.calls.values()
            (body,) = printed.bodies.values()
            assert len(prepared_by(body)) == min(count, 2)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_program_made_ready_serves_calls_of_its_kind_alone(backend: str):
    """One program and the same two tensors, and everything else that decides a call, in turn and twice."""
    options = Options(backend=backend)
    rows, x = torch.tensor([0, 2, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    scatter = insum_nn.compile("y[E[i],j] += x[i,j]", options=options)
    every_second = insum_nn.compile("y[i,j] += x[2*i,j]", options=options)
    for extent, dtype in itertools.product((3, 5, 3), (torch.float64, torch.float32, torch.int64)):
        want = torch.zeros(extent, 2, dtype=torch.float64).index_add(0, rows, x)
        given = x.to(dtype)
        for index in (rows, rows.int()):
            got = [
                scatter(E=index, x=given, out_shape=(extent, None)),
                scatter(E=index, x=given, out_shape=(extent, 2)),
            ]
            got += [scatter(E=index, x=given, y=torch.ones(extent, 2, dtype=dtype)) - 1]
            assert all(one.dtype == dtype and torch.equal(one.double(), want) for one in got)
        ones = torch.ones(extent, 2, dtype=dtype)
        ordered = [rows if name == "E" else given for name in scatter.names]
        got = [scatter.run_plain(ordered, (extent, None)), scatter.run_plain(ordered, (extent, 2), ones) - 1]
        assert all(one.dtype == dtype and torch.equal(one.double(), want) for one in got)
        for size in (1, 2, 1):
            got = [every_second(x=given, sizes={"i": size}), every_second(x=given, out_shape=(size, None))]
            assert all(torch.equal(one, given[: 2 * size : 2]) for one in got)


def test_sizes_alone_decide_which_extents_are_compiled_in():
    """Narrow features and multiples of a tile, whatever was called before."""
    statement = parse("C[i,n,m] += A[i,n] * B[i,m]")

    def fixed(n: int, m: int) -> dict[str, int]:
        tensors = {"A": torch.ones(11, n), "B": torch.ones(11, m)}
        bound = replace(bind(statement, tensors, None), device_type=GPU)
        extents = resolve_extents(statement, [*tensors.values()], None, {}, None)
        return dict(fixed_extents.fixed_extents(bound, Options(), frozenset(), extents))

    for n in (*range(2, 65), 80, 4096):
        assert fixed(n, n) == {"n": n, "m": n}
    for m in (65, 100, 1433):
        assert fixed(3, m) == {"n": 3}
        assert fixed(m, 48) == {"m": 48}


def test_ready_calls_are_bounded():
    program = insum_nn.compile("y[i] += x[i]", options=Options(backend="eager"))
    for size in range(3 * artifact._LIMIT):
        assert program(x=torch.ones(size)).shape == (size,)
    (printed,) = program.spec.calls.values()
    (body,) = printed.bodies.values()
    assert len(prepared_by(body)) == artifact._LIMIT
    assert cache_info().misses == 1


def test_ready_calls_from_many_threads():
    """Far more shapes than are kept, from eight threads that take turns as often as Python lets them."""
    program = insum_nn.compile("y[i] += x[i]")
    one = torch.ones(1)

    def work(seed: int) -> None:
        for step in range(1000):
            size = (seed * 31 + step * 17) % 997
            assert program(x=one.expand(size)).shape == (size,)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, seed) for seed in range(8)]:
                future.result()
    finally:
        sys.setswitchinterval(before)


# Proofs about index tensors.


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor whose entries are read to prove something."""
    read: list[Tensor] = []
    aminmax = Tensor.aminmax

    def watched(tensor: Tensor, *args: object, **kwargs: object) -> object:
        read.append(tensor)
        return aminmax(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "aminmax", watched)
    # Not by the C function, which an earlier test may have had compiled.
    monkeypatch.setattr(c_structures, "sorting", functools.cache(lambda _: (None, SimpleNamespace(run=None))))
    return read


def test_a_proof_is_read_once(readings: list[Tensor]):
    x, E = torch.arange(5.0), torch.tensor([0, 4])
    for _ in range(3):
        insum("y[i] += x[E[i]]", x=x, E=E)
        insum("s max= x[E[i]]", x=x, E=E)
    assert len(readings) == 1


def test_a_change_in_place_is_read_again(readings: list[Tensor]):
    x, E = torch.arange(5.0), torch.tensor([0, 4])
    assert insum("y[i] += x[E[i]]", x=x, E=E).tolist() == [0.0, 4.0]
    E[0] = 3
    assert insum("y[i] += x[E[i]]", x=x, E=E).tolist() == [3.0, 4.0]
    assert len(readings) == 2
    E[1] = -1
    assert insum("y[i] += x[E[i]]", x=x, E=E).tolist() == [3.0, 0.0]
    E.add_(3)
    with pytest.raises(InsumRangeError, match="maximum 6"):
        insum("y[i] += x[E[i]]", x=x, E=E)
    E.clamp_(max=4)
    assert insum("y[i] += x[E[i]]", x=x, E=E).tolist() == [4.0, 2.0]


def test_a_change_through_a_view_is_read_again():
    base = torch.tensor([0, 1, 2, 3])
    x, E = torch.arange(4.0), base[1:3]
    assert insum("y[i] += x[E[i]]", x=x, E=E).tolist() == [1.0, 2.0]
    base.fill_(9)
    with pytest.raises(InsumRangeError):
        insum("y[i] += x[E[i]]", x=x, E=E)


def test_a_proof_belongs_to_its_tensor_and_to_the_axis():
    E = torch.tensor([0, 4])
    insum("y[i] += x[E[i]]", x=torch.arange(5.0), E=E)
    # The same tensor, a shorter axis.
    with pytest.raises(InsumRangeError):
        insum("y[i] += x[E[i]]", x=torch.arange(4.0), E=E)
    # Another tensor of the same shape, perhaps at the same address.
    del E
    with pytest.raises(InsumRangeError):
        insum("y[i] += x[E[i]]", x=torch.arange(5.0), E=torch.tensor([0, 5]))


def test_another_tensor_of_the_same_shape_is_checked():
    """After a call left everything ready for these shapes, others of the same shapes are proven on their own."""
    program = insum_nn.compile("y[i] += x[E[i]]")
    x = torch.arange(5.0)
    good = torch.tensor([0, 4])
    for _ in range(3):
        assert program(x=x, E=good).tolist() == [0.0, 4.0]
    with pytest.raises(InsumRangeError):
        program(x=x, E=torch.tensor([0, 5]))
    assert program(x=x, E=torch.tensor([-1, 4])).tolist() == [0.0, 4.0]
    assert program(x=x, E=good).tolist() == [0.0, 4.0]
    # Two index tensors swapped: each was proven, for the other's axis.
    pair = insum_nn.compile("y[i] += A[E[i],F[i]]")
    A, wide = torch.arange(10.0).view(2, 5), torch.tensor([4, 3])
    narrow = torch.tensor([1, 0])
    assert pair(A=A, E=narrow, F=wide).tolist() == [9.0, 3.0]
    with pytest.raises(InsumRangeError):
        pair(A=A, E=wide, F=narrow)


def test_sums_of_index_tensors_are_checked_together():
    """Each tensor alone is harmless, and their sum leaves the output."""
    program = insum_nn.compile("y[E[i]+F[i]] += v[i]", out_shape=(5,))
    v, low, high = torch.ones(2), torch.tensor([0, 1]), torch.tensor([3, 3])
    assert program(v=v, E=low, F=high).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert program(v=v, E=low, F=low).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    with pytest.raises(InsumRangeError):
        program(v=v, E=high, F=high)


def test_facts_of_callers_are_verified_once_and_those_of_builders_after_a_write(readings: list[Tensor]):
    facts = {name: IndexFacts(masked=False, proven=True) for name in ("Row", "Col")}
    program, built = insum_nn.compile(SPMM, facts=facts, out_shape=(3, None)), compile_built(SPMM, facts=facts)
    tensors = spmm(3, 5, 2)
    for _ in range(2):
        program(**tensors)
    assert len(readings) == 2
    tensors = spmm(3, 5, 2)
    for _ in range(2):
        built(**tensors, out_shape=(3, None))
    assert len(readings) == 2
    tensors["Col"].fill_(1)
    for _ in range(2):
        assert torch.equal(built(**tensors, out_shape=(3, None)), program(**tensors))
    assert len(readings) == 4
    tensors["Col"][0] = 10**9
    for each in (built, program):
        with pytest.raises(InsumRangeError, match="'Col' points outside axis 0 of 'B'"):
            each(**tensors, out_shape=(3, None))
    readings.clear()
    # `validate` does not believe them.
    again = insum_nn.compile(SPMM, facts=facts, out_shape=(3, None), options=Options(validate=True))
    t = spmm(3, 5, 2)
    again(**t)
    again(**t)
    assert len(readings) == 4
    with pytest.raises(InsumRangeError, match="'Row' contradicts a fact that is declared for it"):
        again(**{**t, "Row": torch.full_like(t["Row"], -1)})


def test_an_unproven_promise_of_no_missing_entry_is_checked_when_the_values_are_read():
    program = insum_nn.compile("y[E[i]] += x[i]", facts={"E": IndexFacts(masked=False)}, out_shape=(3,))
    x, E = torch.ones(2), torch.tensor([2, -1])
    assert insum("y[E[i]] += x[i]", x=x, E=E, out_shape=(3,)).tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(InsumRangeError, match=r"expected E\[i\] >= 0; got minimum -1 \(1 of 2 entries; first at i = 1"):
        program(x=x, E=E)
    E[1] = 2
    assert program(x=x, E=E).tolist() == [0.0, 0.0, 2.0]
    E[0] = -1
    with pytest.raises(InsumRangeError, match="'E' holds -1"):
        program(x=x, E=E)


def test_validate_reads_at_every_call(readings: list[Tensor]):
    x, E = torch.arange(5.0), torch.tensor([0, 4])
    for _ in range(3):
        insum("y[i] += x[E[i]]", x=x, E=E, validate=True)
    assert len(readings) == 3


def test_nothing_keeps_a_tensor_alive():
    t = spmm(3, 5, 2)
    program = insum_nn.compile(SPMM, out_shape=(3, None))
    t["Val"].requires_grad_()
    program(**t).sum().backward()
    insum(SPMM.replace("+=", "max="), **t, out_shape=(3, None)).sum().backward()
    references = [weakref.ref(tensor) for tensor in t.values()]
    assert any(tensor_cache.kept[id(t[name])]() is t[name] for name in ("Row", "Col"))
    del t
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_a_compiled_kernel_s_function_is_forgotten_with_it():
    """Without the interpreter too: Triton must not keep every function that a search made."""
    source = SimpleNamespace(text="import triton\n\n\n@triton.jit\ndef kernel(a):\n    pass\n")
    function = launch_module.function_of(source)  # type: ignore[arg-type]
    assert launch_module.function_of(source) is function  # type: ignore[arg-type]
    name = function.__module__
    assert name in sys.modules
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None
    assert name not in sys.modules


@pytest.mark.parametrize("proven", [True, False])
def test_programs_with_other_tensors_given_share_what_was_made_ready(proven: bool):
    facts = {"I": IndexFacts(masked=False, proven=True)} if proven else {}
    program = (compile_built if proven else insum_nn.compile)("C[i,n] = B[I[i],n]", facts=facts)
    rows = torch.arange(6.0).reshape(3, 2)
    for index in ([2, 0], [1, 1], [0, 2]):
        known = torch.tensor(index)
        for _ in range(3):
            assert torch.equal(program(I=known, B=rows, out_shape=(2, 2)), rows[index])
    assert len(program.spec.programs) == 1
    if not proven:
        with pytest.raises(InsumRangeError, match="I"):
            program(I=torch.tensor([1, 3]), B=rows, out_shape=(2, 2))


def test_claims_of_a_caller_fall_where_they_do_not_hold():
    expression, b = "D[Row[p],Col[p]] += Val[p]", torch.tensor([0, 1, 0])
    facts = {
        "Row": IndexFacts(sorted=True, masked=False, proven=True, unique_with=("Col",)),
        "Col": IndexFacts(proven=True),
    }
    program = insum_nn.compile(expression, facts=facts, out_shape=(2, 2))
    for row in ([0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 0]):
        index = {"Row": torch.tensor(row), "Col": b.clone()}
        expected = torch.zeros(2, 2).index_put((index["Row"], index["Col"]), torch.ones(3), accumulate=True)
        for _ in range(2):
            assert torch.equal(program(**index, Val=torch.ones(3)), expected)
        bound, _ = dispatch.prepare(program.spec, [*index.values(), torch.ones(3)], None, Extents((3,), (2, 2)))
        assert bound.facts_of("Row").sorted == (row == sorted(row))
        assert bool(bound.facts_of("Row").unique_with) == (row == [0, 0, 1])
