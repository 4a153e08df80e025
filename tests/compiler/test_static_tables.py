"""Tensors whose values are known when a statement is compiled: a promise that is checked and changes no sum."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, Program
from insum_nn.compiler.ir.build import Names
from insum_nn.compiler.kernels.generated import Generated
from insum_nn.compiler.lang.bind import bind
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.runtime.dispatch import Spec, prepare
from insum_nn.compiler.schedule.choose_unrolling import Unrolling, choose_unrolling
from insum_nn.compiler.schedule.form import Form, make_form
from insum_nn.errors import InsumDtypeError, InsumNameError, InsumRangeError, InsumShapeError
from insum_nn.facts import StaticTable
from tests.compiler.generated_cases import CASES
from tests.compiler.interpreted import interpreter

__all__ = ["interpreter"]

GENERATED = Options(backend="triton", tune=False)
# Without a name for the backend the CPU runs torch's calls, which must heed the same checks.
BACKENDS = [GENERATED, Options()]
PRODUCT = "O[z,k] += CG[k,q] * X[z,I[k,q]] * Y[z,q]"


def tables() -> dict[str, Tensor]:
    coefficients = torch.randn(3, 2, dtype=torch.float64)
    coefficients[1, 0] = 0
    return {"CG": coefficients, "I": torch.randint(0, 4, (3, 2))}


def operands() -> dict[str, Tensor]:
    return {"X": torch.randn(5, 4, dtype=torch.float64), "Y": torch.randn(5, 2, dtype=torch.float64)}


def dense(t: dict[str, Tensor]) -> Tensor:
    return torch.einsum("kq,zkq,zq->zk", t["CG"], t["X"][:, t["I"]], t["Y"])


def check(expression: str, tensors: dict[str, Tensor], static: tuple[str, ...], **given: object) -> None:
    """The same numbers with and without the promise, and both the definition's."""
    known = {name: tensors[name] for name in static}
    for chosen in ({}, known):
        program = insum_nn.compile(expression, static=chosen, options=GENERATED, **given)  # type: ignore[arg-type]
        got = program(tensors=tensors)
        torch.testing.assert_close(got.double(), program.reference(tensors=tensors), rtol=1e-10, atol=1e-11)


def test_a_table_gives_its_values():
    table = StaticTable.of(torch.tensor([[1.5, 2.0], [3.0, 4.0]], requires_grad=True))
    assert (table.shape, table.values) == ((2, 2), (1.5, 2.0, 3.0, 4.0))
    assert table.at((1, 0)) == 3.0
    assert StaticTable.of(torch.arange(6).view(2, 3).t()).at((2, 1)) == 5
    assert StaticTable.of(torch.tensor(7)).at(()) == 7
    assert len({StaticTable.of(torch.tensor([1, 2])), StaticTable.of(torch.tensor([1, 2]))}) == 1


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("options", BACKENDS, ids=str)
def test_results_and_gradients_are_the_same_with_and_without(options: Options):
    known, t = tables(), operands()
    plain = {n: v.clone().requires_grad_() for n, v in t.items()}
    exact = {n: v.clone().requires_grad_() for n, v in t.items()}
    program = insum_nn.compile(PRODUCT, static=known, options=options)
    out, want = program(**known, **plain), dense({**known, **exact})
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(insum_nn.compile(PRODUCT, options=options)(**known, **t), want)
    weights = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad(out, list(plain.values()), weights),
        torch.autograd.grad(want, list(exact.values()), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("interpreter")
def test_second_derivatives():
    known, t = tables(), {n: v.requires_grad_() for n, v in operands().items()}
    program = insum_nn.compile(PRODUCT, static=known, options=GENERATED)
    assert torch.autograd.gradgradcheck(lambda x, y: program(**known, X=x, Y=y), (t["X"], t["Y"]))


def test_gradients_keep_the_tables():
    program = insum_nn.compile(PRODUCT, static=tables())
    derived = program.grad("X")
    assert isinstance(derived, Program)
    assert derived.spec.static == program.spec.static
    assert {name for name, _ in derived.spec.static} == {"CG", "I"}


@pytest.mark.usefixtures("interpreter")
def test_the_gradient_of_a_table_itself():
    known, t = tables(), operands()
    program = insum_nn.compile(PRODUCT, static=known, options=GENERATED)
    ours, theirs = (known["CG"].clone().requires_grad_() for _ in range(2))
    program(CG=ours, I=known["I"], **t).sum().backward()
    dense({**known, **t, "CG": theirs}).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


# What stands in the text.


@pytest.mark.usefixtures("interpreter")
def test_terms_of_0_are_not_written():
    known, t = tables(), operands()
    program = insum_nn.compile(PRODUCT, static=known, options=GENERATED)
    zero = {**known, "CG": torch.zeros(3, 2, dtype=torch.float64).index_fill(1, torch.tensor([1]), 1.0)}
    sparse = insum_nn.compile(PRODUCT, static=zero, options=GENERATED)
    torch.testing.assert_close(program(**known, **t), dense({**known, **t}))
    torch.testing.assert_close(sparse(**zero, **t), dense({**zero, **t}))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("expression", "tensors", "static"),
    [
        # Read outside a table, at a missing entry, and past one: all of them 0.
        ("O[z] += CG[k+1] * X[z,k]", {"CG": (4,), "X": (3, 4)}, ("CG",)),
        ("O[z] += CG[k-2] * X[z,k]", {"CG": (4,), "X": (3, 4)}, ("CG",)),
        ("O[z] += CG[I[k]] * X[z,k]", {"CG": (4,), "I": [-1, 0, 2], "X": (3, 3)}, ("CG", "I")),
        ("O[z] += CG[I[k]+1] * X[z,k]", {"CG": (4,), "I": [-1, 0, 2], "X": (3, 3)}, ("CG", "I")),
        ("O[z] += CG[2*I[k]-1] * X[z,k]", {"CG": (4,), "I": [1, 0, 3], "X": (3, 3)}, ("CG", "I")),
        # A table addressed by a tensor that is none.
        ("O[p] += CG[Row[p]] * X[p]", {"CG": (4,), "Row": [1, 0, 2], "X": (3,)}, ("CG",)),
        ("O[p] += X[I[Row[p]]] * Y[p]", {"I": [2, 0, 1], "Row": [1, 0, 2], "X": (3,), "Y": (3,)}, ("I",)),
        # Twice the same table, a table of one axis of two, no index at all.
        ("O[z] += CG[k] * CG[k] * X[z,k]", {"CG": (4,), "X": (3, 4)}, ("CG",)),
        ("O[z,k] += CG[k,q] * X[z,q]", {"CG": (2, 3), "X": (4, 3)}, ("CG",)),
        ("O[z] += CG * X[z,k]", {"CG": (), "X": (3, 4)}, ("CG",)),
        ("O[z] += 0.5 * CG[k] * X[z,k]", {"CG": (4,), "X": (3, 4)}, ("CG",)),
        # A table under the output.
        ("O[z,I[k]] += CG[k] * X[z,k]", {"CG": (3,), "I": [2, 0, 2], "X": (3, 3)}, ("CG", "I")),
        ("O[I[k],z] += X[z,k]", {"I": [2, 0, 2], "X": (3, 3)}, ("I",)),
        ("O[I[k],Row[z]] += X[z,k]", {"I": [2, 0, 2], "Row": [0, 2, 2], "X": (3, 3)}, ("I",)),
        ("O[z,k+1] += CG[k] * X[z]", {"CG": (2,), "X": (3,)}, ("CG",)),
    ],
)
def test_where_tables_may_stand(
    expression: str, tensors: dict[str, tuple[int, ...] | list[int]], static: tuple[str, ...]
):
    made = {
        n: torch.tensor(t) if isinstance(t, list) else torch.randn(t, dtype=torch.float64) for n, t in tensors.items()
    }
    left = expression.split("+=")[0].strip()
    shapes = {"O[z,I[k]]": (None, 4), "O[I[k],z]": (4, None), "O[I[k],Row[z]]": (4, 5), "O[z,k+1]": (None, 5)}
    check(expression, made, static, out_shape=shapes.get(left))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "expression",
    [
        "O[z] += X[z,I[k]] * CG[k]",
        "O[z,k] += X[z,I[k]] * CG[k]",
        "O[z] += X[z,I[k]+1] * CG[k]",
        "O[z,I[k]] += X[z,k] * CG[k]",
    ],
)
def test_a_missing_entry_of_a_static_table_is_left_out(expression: str):
    """It is no address: -1 must not read the last element, nor an element before the tensor."""
    tensors = {"I": torch.tensor([1, -1, 0]), "CG": torch.randn(3, dtype=torch.float64)}
    tensors["X"] = torch.randn(4, 3, dtype=torch.float64)
    shape = (None, 3) if expression.startswith("O[z,I") else None
    for options in BACKENDS:
        static = {"I": tensors["I"]}
        program = insum_nn.compile(expression, static=static, options=options, out_shape=shape)
        got = program(tensors=tensors)
        torch.testing.assert_close(got, program.reference(tensors=tensors))


@pytest.mark.usefixtures("interpreter")
def test_a_gradient_whose_written_out_cells_lie_partly_outside():
    """As many terms as cells, but one of them is outside, and one cell gets none."""
    coefficients = torch.randn(4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    program = insum_nn.compile("O[z] += CG[k] * X[z,k+1]", static={"CG": coefficients}, options=GENERATED)
    program(CG=coefficients, X=x).sum().backward()
    want = torch.cat([torch.zeros(1, dtype=torch.float64), coefficients[:3]]).expand(3, 4)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.usefixtures("interpreter")
def test_a_divided_row_with_cells_that_no_point_writes():
    row = torch.tensor([1] * 700 + [2])
    known = {"CG": torch.randn(2, dtype=torch.float64), "I": torch.tensor([0, 3])}
    x = torch.randn(701, dtype=torch.float64)
    program = insum_nn.compile("O[Row[p],I[k]] += CG[k] * X[p]", static=known, options=GENERATED, out_shape=(4, 5))
    want = torch.zeros(4, 5, dtype=torch.float64).index_add(0, row, torch.zeros(701, 5, dtype=torch.float64))
    for column, factor in zip(known["I"].tolist(), known["CG"], strict=True):
        want[:, column] = torch.zeros(4, dtype=torch.float64).index_add(0, row, factor * x)
    torch.testing.assert_close(program(Row=row, X=x, **known), want)


# Tables that are affine in an index, which then is not written out.


def form_of(program: Program, tensors: dict[str, Tensor]) -> Form:
    _, chosen = prepare(program.spec, *program._checked(tensors, None, None))
    assert isinstance(chosen.run, Generated)
    return chosen.run.form


STEPS = torch.arange(3)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("expression", "indices", "width", "points", "combine"),
    [
        # A start and a step at each point, in the operand and in the output.
        ("O[z,p] += CG[p] * X[z,I[p,u]]", {"I": torch.stack([2 + 3 * STEPS, 8 - STEPS])}, None, 2, "direct"),
        ("O[z,I[p,u]] += CG[p] * X[z,u]", {"I": torch.stack([1 + 2 * STEPS, 2 * STEPS])}, 9, 2, "direct"),
        # Points that share all cells, some, and one in which the values of the index meet.
        ("O[z,I[p,u]] += CG[p] * X[z,u]", {"I": torch.stack([2 * STEPS, 2 * STEPS])}, 9, 2, "direct"),
        ("O[z,I[p,u]] += CG[p] * X[z,u]", {"I": torch.stack([STEPS, 1 + STEPS])}, 9, 2, "atomic"),
        ("O[z,I[p,u]] += CG[p] * X[z,u]", {"I": torch.stack([0 * STEPS, 1 + STEPS])}, 9, 6, "direct"),
        # Not affine: written out; two indices, together and not.
        ("O[z,p] += CG[p] * X[z,I[p,u]]", {"I": torch.tensor([[0, 1, 3], [0, 1, 2]])}, None, 6, "direct"),
        ("O[z,p] += CG[p] * X[z,I[p,u,v]]", {"I": (4 * STEPS[:, None] + STEPS[:2]).expand(2, 3, 2)}, None, 2, "direct"),
        (
            "O[z,p] += CG[p] * X[z,I[p,u,v]]",
            {"I": ((1 + STEPS[:, None]) * (1 + STEPS[:2])).expand(2, 3, 2)},
            None,
            6,
            "direct",
        ),
        # A single value, in the output too; part of a sum; under another table.
        ("O[z,I[p,u]] += CG[p] * X[z,u]", {"I": torch.tensor([[4], [2]])}, 9, 2, "direct"),
        ("O[z,p] += CG[p] * X[z,I[p,u]+u]", {"I": torch.stack([STEPS, 1 + STEPS])}, None, 2, "direct"),
        ("O[z,p] += CG[p] * X[z,2*I[p,u]-1]", {"I": torch.stack([STEPS, 1 + STEPS])}, None, 2, "direct"),
        ("O[z,p] += CG[p] * X[z,I[J[p],u]]", {"I": torch.stack([STEPS, 5 - STEPS]), "J": STEPS[:2]}, None, 2, "direct"),
        ("O[I[p,u],J[p,u]] += CG[p] * X[z,u]", {"I": STEPS.expand(2, 3), "J": STEPS.expand(2, 3)}, 9, 2, "place"),
    ],
    ids=str,
)
def test_an_index_in_which_tables_are_affine_stays(
    expression: str, indices: dict[str, Tensor], width: int | None, points: int, combine: str
):
    columns = indices["I"].shape[-1] if "X[z,u]" in expression else 13
    known = {"CG": torch.randn(2, dtype=torch.float64), **{name: index.clone() for name, index in indices.items()}}
    tensors = {**known, "X": torch.randn(5, columns, dtype=torch.float64)}
    shape = None if width is None else (None, width) if expression.startswith("O[z") else (width, width)
    check(expression, tensors, tuple(known), out_shape=shape)
    program = insum_nn.compile(expression, static=known, options=GENERATED, out_shape=shape)
    form = form_of(program, tensors)
    assert (len(form.unrolled), form.strategy) == (points, combine)
    x = tensors["X"].clone().requires_grad_()
    weights = torch.randn_like(program(**known, X=x))
    program(**known, X=x).backward(weights)
    again = tensors["X"].clone().requires_grad_()
    insum_nn.compile(expression, options=Options(backend="eager"), out_shape=shape)(**known, X=again).backward(weights)
    torch.testing.assert_close(x.grad, again.grad)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rows", [3, 4, 7])
def test_an_index_that_steps_stays_however_many_rows_its_table_has(rows: int):
    """Without the index that names the row the table is affine; without the other it is not."""
    starts = 3 * torch.arange(rows) ** 2
    known = {"I": starts[:, None] + STEPS * (1 + torch.arange(rows)[:, None] % 2), "L": torch.arange(rows) % 2}
    tensors = {**known, "X": torch.randn(5, 3 * rows**2), "W": torch.randn(2, 3, 4)}
    expression = "O[z,p,v] += X[z,I[p,u]] * W[L[p],u,v]"
    program = insum_nn.compile(expression, static=known, options=GENERATED)
    form = form_of(program, tensors)
    assert (len(form.unrolled), form.reduce) == (rows, (Names(program.statement).indices["u"],))
    got = program(tensors=tensors)
    want = torch.einsum("zpu,puv->zpv", tensors["X"][:, known["I"]], tensors["W"][known["L"]])
    torch.testing.assert_close(got, want)


# The promise.


@pytest.mark.parametrize(
    "static", [{"Z": torch.zeros(2)}, {"O": torch.zeros(2)}, {"CG": torch.zeros(2), "i": torch.ones(1)}]
)
def test_names_that_are_not_read(static: dict[str, Tensor]):
    with pytest.raises(InsumNameError, match="does not read"):
        insum_nn.compile(PRODUCT, static=static)


def test_not_a_mapping():
    with pytest.raises(InsumDtypeError):
        insum_nn.compile(PRODUCT, static=torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("options", BACKENDS, ids=str)
def test_another_shape_is_refused(options: Options):
    known, t = tables(), operands()
    program = insum_nn.compile(PRODUCT, static=known, options=options)
    other = {"CG": torch.randn(2, 2, dtype=torch.float64), "I": known["I"][:2]}
    with pytest.raises(InsumShapeError, match="compiled as a static tensor") as raised:
        program(**other, **t)
    assert "(3, 2)" in str(raised.value)
    assert "(2, 2)" in str(raised.value)
    # And still runs for what was promised.
    torch.testing.assert_close(program(**known, **t), dense({**known, **t}))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("name", ["CG", "I"])
def test_validate_finds_other_values(backend: str, name: str):
    known, t = tables(), operands()
    options = Options(backend=backend, tune=False, validate=True)  # type: ignore[arg-type]
    program = insum_nn.compile(PRODUCT, static=known, options=options)
    torch.testing.assert_close(program(**known, **t), dense({**known, **t}))
    changed = {**known, name: known[name].clone()}
    changed[name][2, 1] += 1 if name == "CG" or known[name][2, 1] < 3 else -1
    with pytest.raises(InsumRangeError, match=f"'{name}' differs from the static tensor"):
        program(**changed, **t)
    # Nor is a later write to the promised tensor missed.
    known[name].copy_(changed[name])
    with pytest.raises(InsumRangeError, match=f"'{name}' differs"):
        program(**known, **t)


# Programs that are copied.


def test_copies_are_equal_and_others_are_not():
    known, t = tables(), operands()
    program = insum_nn.compile(PRODUCT, static=known)
    for copied in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program), copy.copy(program)):
        assert copied == program
        assert hash(copied) == hash(program)
        assert copied.spec.static == program.spec.static
        torch.testing.assert_close(copied(**known, **t), dense({**known, **t}))
    assert insum_nn.compile(PRODUCT) != program
    assert insum_nn.compile(PRODUCT, static={"I": known["I"]}) != program
    other = {**known, "CG": known["CG"] + 1}
    assert insum_nn.compile(PRODUCT, static=other) != program
    assert insum_nn.compile(PRODUCT, static={n: StaticTable.of(v) for n, v in known.items()}) == program


def test_a_spec_survives_json():
    program = insum_nn.compile(PRODUCT, static=tables(), options=GENERATED)
    spec = program.spec
    back = Spec.from_json(spec.to_json())
    assert back == spec
    assert hash(back) == hash(spec)
    assert back.static == spec.static
    assert all(isinstance(v, int) for v in dict(back.static)["I"].values)
    # As text that knew of no tables was written.
    plain = Spec(PRODUCT)
    assert Spec.from_json(plain.to_json().replace(', "static": {}', "")) == plain


@pytest.mark.usefixtures("interpreter")
def test_two_tables_make_two_programs():
    known, t = tables(), operands()
    other = {**known, "CG": torch.randn(3, 2, dtype=torch.float64)}
    for one in (known, other, known):
        program = insum_nn.compile(PRODUCT, static=one, options=GENERATED)
        torch.testing.assert_close(program(**one, **t), dense({**one, **t}))


@pytest.mark.usefixtures("interpreter")
def test_batched_by_vmap():
    known, t = tables(), operands()
    program = insum_nn.compile(PRODUCT, static=known, options=GENERATED)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    got = torch.func.vmap(lambda one: program(**known, X=one, Y=t["Y"]))(x)
    want = torch.stack([dense({**known, **t, "X": one}) for one in x])
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("options", BACKENDS, ids=str)
@pytest.mark.parametrize("batched", [("CG",), ("I",), ("CG", "I", "Y")])
def test_batched_by_vmap_over_the_tables(batched: tuple[str, ...], options: Options):
    """A table that is one of a batch is an operand like others; the rest of them stay known."""
    known, t = tables(), operands()
    program = insum_nn.compile(PRODUCT, static=known, options=options)
    rest = {n: v for n, v in {**known, **t}.items() if n not in batched}
    many = {n: v.expand(3, *v.shape).clone() for n, v in {**known, **t}.items() if n in batched}
    if "Y" in many:
        many["Y"] = torch.randn_like(many["Y"])
    got = torch.func.vmap(lambda each: program(tensors={**rest, **each}))(many)
    want = torch.stack([dense({**rest, **{n: v[at] for n, v in many.items()}}) for at in range(3)])
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["tensor product uvu", "tensor product uvw"])
def test_extents_follow_the_data(name: str):
    """One program for any number of edges: only the tables' axes are compiled in."""
    case = CASES[name]
    tensors = case.draw(1)
    program = insum_nn.compile(
        case.expression,
        static={n: tensors[n] for n in case.static},
        facts=case.facts,
        options=GENERATED,
        out_shape=case.out_shape(1),
    )
    edges = {"tensor product uvu": ("Dst", "Src", "Y", "W"), "tensor product uvw": ("X", "Y")}[name]
    for count in (1, 3, 6):
        fewer = {n: t[:count] if n in edges else t for n, t in tensors.items()}
        torch.testing.assert_close(program(tensors=fewer), case.oracle(fewer, 1))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("weight", ["L[k] + u", "3*k + u", "u + L[k]", "2*L[k] + u"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_part_of_an_axis_is_not_taken_for_the_whole(weight: str, rows: int):
    """Where an offset comes to 0, what is left looks like the axis itself, which is longer."""
    tensors = {
        "CG": torch.tensor([0.5, 2.0], dtype=torch.float64),
        "L": torch.tensor([0, 3]),
        "X": torch.randn(rows, 3, dtype=torch.float64),
        "W": torch.randn(rows, 11, dtype=torch.float64),
    }
    static = tuple(name for name in ("CG", "L") if name == "CG" or "L" in weight)
    used = {name: t for name, t in tensors.items() if name != "L" or "L" in weight}
    check(f"O[z,k,u] += CG[k] * X[z,u] * W[z,{weight}]", used, static)
    check(f"O[k,u] += CG[k] * X[z,u] * W[z,{weight}]", used, static)


def unrolled(text: str, **tables: list[object]) -> Unrolling:
    """What becomes of two indices p and k, of 2 and 3 values, that address tables."""
    known = {name: torch.tensor(values) for name, values in tables.items()}
    bound = bind(parse(text), {**known, "T": torch.randn(5, 9)}, None)
    fixed = replace(bound, static=(("k", 3), ("p", 2)))
    return choose_unrolling(fixed, {name: StaticTable.of(values) for name, values in known.items()})


def test_a_step_has_no_missing_entries():
    text = "O[z,X[Y[k]+1]] += T[z,k]"
    assert unrolled(text, X=[0, 1, 2, 3], Y=[0, 1, 2]).steps == {"k"}
    # The first entry is missing, though the place after it is that of a number.
    without = unrolled(text, X=[0, 1, 2, 3], Y=[-1, 0, 1])
    assert not without.steps
    assert without.places == ({"k": 1}, {"k": 2})


@pytest.mark.parametrize(
    ("entries", "distinct"),
    [
        ([[0, 1, 2], [3, 4, 5]], True),
        ([[0, 1, 2], [0, 1, 2]], True),
        ([[0, 1, 2], [2, 3, 4]], False),
        # From one start in other steps.
        ([[0, 1, 2], [0, 2, 4]], False),
    ],
)
def test_steps_that_share_cells_of_other_terms(entries: list[object], distinct: bool):
    text = "O[z,X[p,k]] += V[p] * T[z,k]"
    assert unrolled(text, X=entries, V=[1.0, 2.0]).steps == {"k"}
    known = {"X": torch.tensor(entries), "V": torch.tensor([1.0, 2.0])}
    bound = replace(bind(parse(text), {**known, "T": torch.randn(5, 3)}, None), static=(("k", 3), ("p", 2)))
    tables = {name: StaticTable.of(values) for name, values in known.items()}
    form = make_form(bound, {"z": 5, "p": 2, "k": 3}, (5, 9), tables, deterministic=False)
    assert form.strategy == ("direct" if distinct else "atomic")
