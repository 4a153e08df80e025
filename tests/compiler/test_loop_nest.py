"""The loop-nest IR: the builder, each pass and the Triton printer compute what the reference interpreter computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.codegen.triton import TritonKernel
from insum_nn.compiler.forms import launch as launch_module
from insum_nn.compiler.ir.build import INITIAL, OUTPUT, Names, build
from insum_nn.compiler.ir.graph import Graph
from insum_nn.compiler.ir.interpret import interpret_graph, interpret_kernel, structure
from insum_nn.compiler.ir.nodes import Const, Index, Kernel, Op, Store, walk
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.ir.verify import verify_graph, verify_kernel
from insum_nn.compiler.lang.bind import Bound, Extents, bind, layout_of
from insum_nn.compiler.lang.derivative import derivatives
from insum_nn.compiler.lang.epilogue import ACTIVATIONS, Epilogue
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.passes.combine import combine
from insum_nn.compiler.passes.place import place
from insum_nn.compiler.runtime.artifact import Artifact, default_schedule, load, lower
from insum_nn.compiler.runtime.dispatch import parse_cached
from insum_nn.compiler.schedule.space import Schedule
from insum_nn.facts import IndexFacts
from insum_nn.testing.random_programs import random_program
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
FACTS = {"Row": IndexFacts(sorted=True, masked=False), "Col": IndexFacts(masked=True)}


def spmm_tensors(entries: int = 23, rows: int = 6, columns: int = 7, width: int = 11) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "Row": torch.randint(0, rows, (entries,)).sort().values,
        "Val": torch.randint(-3, 4, (entries,)).double(),
        "Col": torch.randint(-1, columns, (entries,)),
        "B": torch.randint(-3, 4, (columns, width)).double(),
    }


def bound_of(text: str, tensors: Mapping[str, Tensor], facts: Mapping[str, IndexFacts] = FACTS) -> Bound:
    statement = parse_cached(text)
    return bind(statement, {name: tensors[name] for name in layout_of(statement).tensors}, None, facts=facts)


def canonical(
    bound: Bound, tensors: Mapping[str, Tensor], extents: Extents, start: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors and sizes by their canonical names."""
    names = Names(bound.statement)
    kernel = build(bound)
    sizes = {names.indices[n]: e for n, e in zip(bound.layout.indices, extents.indices, strict=True)}
    for axis, extent in enumerate(extents.output):
        sizes[f"{OUTPUT}_{axis}"] = extent
    memory = {names.tensors[name]: tensors[name] for name in bound.layout.tensors}
    if start is not None:
        memory[INITIAL] = start
    for buffer in kernel.inputs:
        for axis, extent in enumerate(memory[buffer.name].shape):
            sizes.setdefault(f"{buffer.name}_{axis}", extent)
    return memory, sizes


def drawn_program(seed: int) -> tuple[Bound, dict[str, Tensor], Extents, Tensor | None] | None:
    """A random program without empty tensors, its values small integers, whose sums are exact in any order."""
    program = random_program(seed, max_size=4, profile="smooth")
    statement = parse_cached(program.expression)
    if any(t.numel() == 0 for t in program.tensors.values()):
        return None
    # An entry of one index tensor that points outside of another is an error, which the IR leaves to the checks.
    if any([*nested.nested()] for a in statement.accesses() for nested in a.nested()):
        return None
    ordered = [program.tensors[name] for name in layout_of(statement).tensors]
    extents = resolve_extents(statement, ordered, program.start, program.sizes, program.out_shape)
    tensors = {n: t.mul(2).round() if t.is_floating_point() else t for n, t in program.tensors.items()}
    start = None if program.start is None else program.start.mul(2).round()
    return bind(statement, tensors, start), tensors, extents, start


def test_the_builder_and_the_passes_agree_with_the_reference():
    built = walked = 0
    for seed in range(300):
        drawn = drawn_program(seed)
        if drawn is None:
            continue
        bound, tensors, extents, start = drawn
        want = interpret(bound.statement, tensors, extents, start)
        memory, sizes = canonical(bound, tensors, extents, start)
        kernel = build(bound)
        verify_kernel(kernel, placed=False)
        torch.testing.assert_close(interpret_kernel(kernel, memory, sizes)[OUTPUT], want, rtol=0, atol=0)
        built += 1
        try:
            graph = lower(bound, Schedule(m=2, n=4))
        except NotImplementedError:
            continue
        verify_graph(graph)
        torch.testing.assert_close(interpret_graph(graph, memory, sizes)[0], want, rtol=0, atol=0)
        walked += 1
    assert built > 110
    assert walked > 25


SCHEDULES = (Schedule(), Schedule(n=8), Schedule(n=8, k=4), Schedule(m=2, n=16, k=2))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("operand", [None, "Val", "B"])
def test_schedules_change_nothing(schedule: Schedule, operand: str | None):
    tensors = spmm_tensors()
    bound, extents = bound_of(SPMM, tensors), Extents((23, 11), (6, 11))
    if operand is not None:
        derivative = derivatives(bound.statement, operand)
        tensors[derivative.seed] = torch.randint(-3, 4, (6, 11)).double()
        statement = derivative.statements[0]
        bound = bound_of(str(statement), tensors)
        ordered = [tensors[name] for name in bound.layout.tensors]
        extents = resolve_extents(statement, ordered, None, {}, tuple(tensors[operand].shape))
    want = interpret(bound.statement, tensors, extents)
    memory, sizes = canonical(bound, tensors, extents)
    graph = lower(bound, schedule)
    torch.testing.assert_close(interpret_graph(graph, memory, sizes)[0], want, rtol=0, atol=0)


def test_equal_nodes_are_one_object():
    assert Op("add", (Index("a"), Const(1))) is Op("add", (Index("a"), Const(1)))
    assert Const(1) is not Const(True) is not Const(1.0)
    assert Const(0.0) is not Const(-0.0)
    tensors = spmm_tensors()
    renamed = {"row": tensors["Row"], "ROW": tensors["Val"], "Row": tensors["Col"], "x": tensors["B"]}
    facts = {"row": FACTS["Row"], "Row": FACTS["Col"]}
    assert build(bound_of(SPMM, tensors)) is build(bound_of("c[row[X],acc] += ROW[X] * x[Row[X],acc]", renamed, facts))


def test_kernels_print_as_text():
    bound = bound_of(SPMM, spmm_tensors())
    kernel = build(bound)
    structures, algorithm = combine(kernel)
    assert (
        show(Graph(kernel.inputs, structures, ())).splitlines()[1]
        == "  structure x0_rows: int64[OUT_0 + 1] = rows(x0, OUT_0)"
    )
    assert show(algorithm).splitlines()[1:] == [
        "  free row in 0 .. OUT_0:",
        "    free b in 0 .. B:",
        "      sum a in x0_rows[row] .. x0_rows[row + 1]:",
        "        out[row, b] += t0[a] * (t1[x1[a], b] if x1[a] >= 0 else 0)   where x1[a] >= 0",
    ]


def test_what_the_passes_do_not_cover_is_refused():
    tensors = spmm_tensors()
    bound = bound_of(SPMM, tensors)
    for other in (replace(bound, epilogue=Epilogue("relu")), replace(bound, has_start=True)):
        with pytest.raises(NotImplementedError, match="an initial value or an activation"):
            lower(other)
    with pytest.raises(NotImplementedError, match="a sum of floating-point products"):
        lower(replace(bound, dtype=torch.int64))


def test_an_activation_follows_the_sum():
    tensors = spmm_tensors()
    bound, extents = bound_of(SPMM, tensors), Extents((23, 11), (6, 11))
    memory, sizes = canonical(bound, tensors, extents)
    plain = interpret_kernel(build(bound), memory, sizes)[OUTPUT]
    for name in ("relu", "silu", "gelu"):
        kernel = build(replace(bound, epilogue=Epilogue(name)))
        found = interpret_kernel(kernel, memory, sizes)[OUTPUT]
        torch.testing.assert_close(found, ACTIVATIONS[name].forward(plain))


def test_malformed_kernels_are_refused():
    kernel = place(combine(build(bound_of(SPMM, spmm_tensors())))[1], Schedule(n=8))
    verify_kernel(kernel, placed=True)
    with pytest.raises(AssertionError, match="role"):
        verify_kernel(kernel, placed=False)
    with pytest.raises(AssertionError, match="outside of its loop"):
        verify_kernel(Kernel(kernel.inputs, kernel.results, _stores(kernel)), placed=True)
    with pytest.raises(AssertionError, match="not known here"):
        verify_kernel(Kernel(kernel.inputs[1:], kernel.results, kernel.body), placed=True)


def _stores(kernel: Kernel) -> tuple[Store, ...]:
    """The stores to memory without the loops around them."""
    return tuple(node for node in walk(kernel) if isinstance(node, Store) and not node.buffer.local)


class Launcher:
    """A kernel of a printed program in Triton's interpreter, whose addresses are checked."""

    def __init__(self, kernel: TritonKernel) -> None:
        self.function = launch_module._jit(SimpleNamespace(text=kernel.text))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, num_warps, num_stages: self.function[grid](*arguments)


@pytest.mark.parametrize("given", [False, True], ids=["structures in the graph", "structures offered"])
def test_printed_programs_and_their_gradients(interpreter: None, given: bool):
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in spmm_tensors().items()}
    bound = bound_of(SPMM, tensors)
    offers = (("rows", "Row"), ("order", "Col"), ("rows", "Col")) if given else ()
    order = structure("order", [tensors["Col"]], None)
    structures = {
        ("rows", "Row"): structure("rows", [tensors["Row"]], 6),
        ("order", "Col"): order,
        ("rows", "Col"): structure("rows", [tensors["Col"][order]], 7),
    }
    artifact = Artifact(bound, offers)
    seed = torch.randint(-3, 4, (6, 11)).float()
    cases = [(artifact, tensors, (6, None))]
    for operand in ("Val", "B"):
        [(derivative, name)] = artifact.derivatives(operand)
        cases.append((derivative, {**tensors, name: seed}, tuple(tensors[operand].shape)))
    for each, named, shape in cases:
        run = load(each.source, f"test_{id(each)}", lambda _, kernels=each.source.kernels: Launcher(kernels[0]))
        arguments = [named[name] if isinstance(name, str) else structures[name] for name in each.inputs]
        got = run(*arguments, *[shape[int(name.removeprefix("out_"))] for name in each.source.sizes])
        ordered = [named[name] for name in each.bound.layout.tensors]
        extents = resolve_extents(each.bound.statement, ordered, None, {}, shape)
        torch.testing.assert_close(got.double(), interpret(each.bound.statement, named, extents), rtol=0, atol=0)


def test_default_schedules_are_for_any_algorithm():
    for text, count in ((SPMM, 2), ("y[Row[p]] += Val[p] * x[Col[p]]", 1), ("V[p] += X[Row[p],c] * Y[Col[p],c]", 2)):
        names = layout_of(parse_cached(text)).tensors
        shape = {"Val": 1, "x": 1, "B": 2, "X": 2, "Y": 2}
        tensors = {n: torch.zeros([3] * shape[n]) if n in shape else torch.zeros(3).long() for n in names}
        schedule = default_schedule(combine(build(bound_of(text, tensors, {})))[1])
        assert sum(lanes > 1 for lanes in (schedule.m, schedule.n, schedule.k)) == count
