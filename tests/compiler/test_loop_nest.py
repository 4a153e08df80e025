"""The loop-nest IR: the builder against the reference interpreter, nodes, text, what the verifier refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from insum_nn.compiler.ir.build import INITIAL, OUTPUT, Names, build
from insum_nn.compiler.ir.nodes import Const, Index, Kernel, Op, Size, Store, conjunction, operation, walk
from insum_nn.compiler.ir.printer import show
from insum_nn.compiler.ir.schedule import Schedule
from insum_nn.compiler.ir.verify import verify_kernel
from insum_nn.compiler.kernels.source import Strides, nest_of
from insum_nn.compiler.lang.bind import Bound, Extents, bind, layout_of
from insum_nn.compiler.lang.epilogue import ACTIVATIONS, Epilogue
from insum_nn.compiler.lang.functions import FUNCTIONS
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.runtime.dispatch import parse_cached
from insum_nn.compiler.schedule.form import make_form
from insum_nn.facts import IndexFacts
from insum_nn.testing.random_programs import random_program
from tests.compiler.ir_interpreter import interpret_kernel

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


def placed_spmm() -> Kernel:
    """The kernel of a sparse product, its loops placed."""
    tensors = spmm_tensors()
    bound = bound_of(SPMM, tensors)
    form = make_form(bound, {"p": 23, "n": 11}, (6, 11), {}, deterministic=False)
    return nest_of(form, Schedule(n=8, k=4), Strides((True,) * len(tensors)), "ieee")


def canonical(
    bound: Bound, tensors: Mapping[str, Tensor], extents: Extents, initial: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors and sizes by their canonical names."""
    names = Names(bound.statement)
    kernel = build(bound)
    sizes = {names.indices[n]: e for n, e in zip(bound.layout.indices, extents.indices, strict=True)}
    for axis, extent in enumerate(extents.output):
        sizes[f"{OUTPUT}_{axis}"] = extent
    memory = {names.tensors[name]: tensors[name] for name in bound.layout.tensors}
    if initial is not None:
        memory[INITIAL] = initial
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
    extents = resolve_extents(statement, ordered, program.initial, program.sizes, program.out_shape)
    tensors = {n: t.mul(2).round() if t.is_floating_point() else t for n, t in program.tensors.items()}
    initial = None if program.initial is None else program.initial.mul(2).round()
    return bind(statement, tensors, initial), tensors, extents, initial


def test_the_builder_agrees_with_the_reference():
    built = 0
    for seed in range(300):
        drawn = drawn_program(seed)
        if drawn is None:
            continue
        bound, tensors, extents, initial = drawn
        want = interpret(bound.statement, tensors, extents, initial)
        memory, sizes = canonical(bound, tensors, extents, initial)
        kernel = build(bound)
        verify_kernel(kernel, placed=False)
        torch.testing.assert_close(interpret_kernel(kernel, memory, sizes)[OUTPUT], want, rtol=0, atol=0)
        built += 1
    assert built > 110


def test_equal_nodes_are_one_object():
    assert Op("add", (Index("a"), Const(1))) is Op("add", (Index("a"), Const(1)))
    assert Const(1) is not Const(True) is not Const(1.0)
    assert Const(0.0) is not Const(-0.0)
    tensors = spmm_tensors()
    renamed = {"row": tensors["Row"], "ROW": tensors["Val"], "Row": tensors["Col"], "x": tensors["B"]}
    facts = {"row": FACTS["Row"], "Row": FACTS["Col"]}
    assert build(bound_of(SPMM, tensors)) is build(bound_of("c[row[X],acc] += ROW[X] * x[Row[X],acc]", renamed, facts))


def test_what_is_known_of_constants_is_no_condition():
    size, index = Size("A"), Index("a")
    assert operation("less", Const(1), Const(2)) is Const(True, "bool")
    assert operation("less", Const(1), size) is Op("less", (Const(1), size))
    assert conjunction([operation("at_least", Const(0), Const(0)), None]) is None
    false, inside = operation("less", Const(2), Const(2)), operation("less", index, size)
    assert conjunction([operation("at_least", Const(3), Const(0)), inside, false]) is Op("and", (inside, false))
    tensors = {"R": torch.zeros(1, 1, dtype=torch.int64), "s": torch.ones(1, 2)}
    (store,) = _stores(build(bound_of("y[R[k,k]] += s[k,1]", tensors, {"R": IndexFacts(masked=False)})))
    assert store.where is Op("less", (Const(1), Size("t0_1")))


def test_kernels_print_as_text():
    assert show(build(bound_of(SPMM, spmm_tensors()))).splitlines()[1:] == [
        "  free a in 0 .. A:",
        "    free b in 0 .. B:",
        "      out[x0[a], b] += t0[a] * (t1[x1[a], b] if x1[a] >= 0 else 0)   where x1[a] >= 0",
    ]
    assert show(placed_spmm()).splitlines()[1:] == [
        "  grid row in 0 .. OUT_0:",
        "    grid b_program in 0 .. cdiv(B, 8):",
        "      tile b in b_program * 8 .. (b_program * 8) + 8 of B:",
        "        alloc acc0: float64 = 0",
        "        serial entry_step in begin[row] .. begin[row + 1] step 4:",
        "          tile entry in entry_step .. entry_step + 4 of begin[row + 1]:",
        "            acc0 += (t1[x1[entry], b] if x1[entry] >= 0 else 0) * (t0[entry] if (x1[entry] >= 0) else 0.0)",
        "        out[row, b] = acc0",
    ]


def test_an_activation_follows_the_sum():
    tensors = spmm_tensors()
    bound, extents = bound_of(SPMM, tensors), Extents((23, 11), (6, 11))
    memory, sizes = canonical(bound, tensors, extents)
    plain = interpret_kernel(build(bound), memory, sizes)[OUTPUT]
    for name in ACTIVATIONS:
        kernel = build(replace(bound, epilogue=Epilogue(name)))
        found = interpret_kernel(kernel, memory, sizes)[OUTPUT]
        torch.testing.assert_close(found, FUNCTIONS[name].forward(plain))


def test_malformed_kernels_are_refused():
    kernel = placed_spmm()
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
