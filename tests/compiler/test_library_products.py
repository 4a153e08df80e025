"""Products with sparse matrices keep the definition where entries are missing and factors are not finite."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import insum_nn
from insum_nn.facts import IndexFacts

NAN, INF = float("nan"), float("inf")
ROW = torch.tensor([0, 0, 1, -1])
COL = torch.tensor([-1, 1, -1, 0])


def agree(program, **tensors):
    found = program(**tensors).double()
    torch.testing.assert_close(found, program.reference(**tensors), equal_nan=True)
    return found


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_missing_entry_with_a_value_that_is_not_finite(bad):
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", out_shape=(3, None))
    dense = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    # Neither a term that reads nothing nor one that is not written shows what its value is.
    assert not agree(program, Row=ROW, Col=COL, Val=torch.tensor([bad, 1.0, bad, bad]), B=dense).isnan().any()
    assert not agree(program, Row=ROW, Col=COL, Val=torch.tensor([1.0, 1.0, 2.0, bad]), B=dense).isnan().any()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("row", [ROW, torch.tensor([-1, -1, 0, 1])], ids=["some", "others"])
def test_a_missing_row_in_a_sampled_product(bad, row):
    program = insum_nn.compile("V[p] += A[Row[p],k] * B[Col[p],k]")
    broken = torch.tensor([[bad, 1.0], [2.0, 3.0]])
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    agree(program, Row=row, Col=COL, A=broken, B=whole)
    agree(program, Row=row, Col=COL, A=whole, B=broken)


def test_every_entry_missing():
    nothing = torch.tensor([-1, -1])
    spmm = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", out_shape=(3, None))
    agree(spmm, Row=torch.tensor([0, 2]), Col=nothing, Val=torch.tensor([NAN, 1.0]), B=torch.ones(2, 3))
    sampled = insum_nn.compile("V[p] += A[Row[p],k] * B[Col[p],k]")
    agree(sampled, Row=nothing, Col=torch.tensor([0, 1]), A=torch.ones(2, 3), B=torch.full((2, 3), NAN))


def test_more_entries_than_cells():
    """A multigraph on few nodes: torch's sampled product refuses it."""
    sampled = insum_nn.compile("V[p] += A[Row[p],k] * B[Col[p],k]")
    row, col = torch.arange(40) % 3, torch.arange(40) % 2
    agree(sampled, Row=row, Col=col, A=torch.randn(3, 4), B=torch.randn(2, 4))
    agree(sampled, Row=row.flip(0), Col=torch.where(row == 1, -1, col), A=torch.randn(3, 4), B=torch.randn(2, 4))


def test_two_index_tensors_in_every_place():
    """The same two index tensors in every place that they can have, any of which may be asked for after another."""
    torch.manual_seed(0)
    E, F = torch.randint(0, 3, (3, 3)), torch.tensor([2, 0, 2])
    tensors = {"E": E, "F": F, "V": torch.randn(3, 3), "B": torch.randn(3, 4)}
    tensors |= {"W": torch.randn(3, 5), "D": torch.randn(5, 4)}
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    rows, cols = ("E[i,j]", "F[i]", "j"), ("F[i]", "F[j]", "E[i,j]", "i")
    statements = [
        (f"C[{row},n] += V[i,j] * B[{col},n]", size)
        for row in rows
        for col in cols
        for size in (3, 5)
        if "[" in row + col and (size == 3 or row == "E[i,j]")
    ]
    # The same index tensor beside an axis of another length.
    statements += [("C[F[i],n] += W[i,j] * D[j,n]", 3)]
    programs = [insum_nn.compile(text, out_shape=(size, None)) for text, size in statements]
    given = [{n: t for n, t in tensors.items() if f"{n}[" in text} for text, _ in statements]
    wanted = [p.reference(tensors=g) for p, g in zip(programs, given, strict=True)]
    for at, first in enumerate(programs):
        # No more than four are kept of two tensors, so what is asked for again must come soon.
        for other in [*range(at), *range(at + 1, len(programs))]:
            first(tensors=given[at])
            torch.testing.assert_close(programs[other](tensors=given[other]), wanted[other])


# Several subscripts that select a row or a column together.

E = 31
ADDRESSED = {
    "two columns": ("Y[Dst[e],h] += T[Src[e],Type[e],h] * Inv[Dst[e],Type[e]]", (7, 4)),
    "two columns, the axes apart": ("Y[Dst[e],h] += T2[Src[e],h,Type[e]]", (7, 4)),
    "two rows": ("T[Type[e],h,Src[e]] += D[Dst[e],h] * Inv[Dst[e],Type[e]]", (3, 4, 7)),
    "heads": ("Y[Dst[e],a,f] += P[e,a] * Z[Src[e],a,f]", (7, 2, 4)),
    "heads in front": ("Y[a,Dst[e],f] += P[e,a] * Z2[f,Src[e],a]", (2, 7, 4)),
    "heads and types": ("Y[Dst[e],a,Type[e],f] += P[e,a] * Z[Src[e],a,f]", (7, 2, 3, 4)),
    "a grid": ("Y[Dst2[i,q],a,f] += P2[i,q,a] * Z[i,a,f]", (7, 2, 4)),
    "sampled, heads": ("S[e,a] += Z3[Dst[e],a,f] * Z[Src[e],a,f]", (E, 2)),
    "sampled, types": ("S[e] += D[Dst[e],h] * T[Src[e],Type[e],h]", (E,)),
    "diagonals": ("Y[m,h] += V[d,m] * D[m+Up[d]-Down[d],h]", (9, 4)),
    "wide diagonals": ("Y[m,h] += V[d,m] * D[2*m-3*Up[d]+1,h]", (9, 4)),
    "sampled, diagonals": ("S[d,m] += V[d,m] * D2[m,h] * D[m+Up[d]-Down[d],h]", (5, 9)),
}


def operands(seed: int, *, missing: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low = -1 if missing else 0
    indices = {"Src": 7, "Dst": 7, "Type": 3}
    found = {name: torch.randint(low, high, (E,), generator=generator) for name, high in indices.items()}
    found["Dst2"] = torch.randint(low, 7, (7, 3), generator=generator, dtype=torch.int32)
    shapes = {"T": (7, 3, 4), "T2": (7, 4, 3), "Inv": (7, 3), "D": (7, 4), "P": (E, 2), "Z": (7, 2, 4), "Z3": (7, 2, 4)}
    shapes |= {"Z2": (4, 7, 2), "P2": (7, 3, 2), "V": (5, 9), "D2": (9, 4)}
    found |= {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()}
    return found | {name: torch.randint(low, 3, (5,), generator=generator) for name in ("Up", "Down")}


def read_by(program, tensors):
    names = program.spec.layout.tensors
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("name", ADDRESSED)
@pytest.mark.parametrize("missing", [False, True], ids=["whole", "missing"])
def test_entries_with_several_subscripts(name, missing):
    text, shape = ADDRESSED[name]
    program = insum_nn.compile(text, out_shape=shape)
    for seed in range(2):
        agree(program, **read_by(program, operands(seed, missing=missing)))
    tensors = read_by(program, operands(2, missing=missing))
    out = agree(program, **tensors)
    factors = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    assert torch.autograd.gradcheck(lambda *_: program(**tensors), factors)
    initial = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(program(**tensors, **{text[: text.index("[")]: initial}), initial + out)


# By turns with entries that are missing: above, every product is computed with and without.
@pytest.mark.parametrize(
    ("name", "missing"), [(name, n % 2 == 1) for n, name in enumerate(n for n in ADDRESSED if "sampled" not in n)]
)
def test_recorded_products(name, missing):
    text, shape = ADDRESSED[name]
    program = insum_nn.compile(text, out_shape=shape)
    names = program.spec.layout.tensors

    def run(*tensors):
        factors = [tensor for tensor in tensors if tensor.is_floating_point()]
        out = program(tensors=dict(zip(names, tensors, strict=True)))
        return out, *torch.autograd.grad(out.square().sum(), factors)

    def drawn(seed):
        given = read_by(program, operands(seed, missing=missing)).values()
        return [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in given]

    recorded = make_fx(dispatch_functionalize(run), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*drawn(0))
    for seed in range(3):
        torch.testing.assert_close(recorded(*drawn(seed)), run(*drawn(seed)))


@pytest.mark.parametrize(("rows", "entries", "width"), [(3, 0, 4), (0, 0, 4), (4, 5, 0), (1, 1, 1)])
@pytest.mark.parametrize("ascending", [False, True])
def test_recorded_products_of_nothing(rows, entries, width, ascending):
    facts = {"Row": IndexFacts(sorted=ascending, masked=False, proven=True)}
    program = insum_nn.compile("C[Row[p],n] += Val[p] * B[Col[p],n]", facts=facts, out_shape=(rows, width))
    row = torch.zeros(entries, dtype=torch.int64)
    tensors = {"Row": row, "Col": row, "Val": torch.ones(entries), "B": torch.ones(rows, width)}
    functional = dispatch_functionalize(lambda *given: program(tensors=dict(zip(tensors, given, strict=True))))
    recorded = make_fx(functional, _allow_non_fake_inputs=True)(*tensors.values())
    torch.testing.assert_close(recorded(*tensors.values()), program(**tensors))


@pytest.mark.parametrize(
    "text",
    [
        "Y[Dst[e],a,n] += V[e,a,b] * B[Src[e],b,n]",
        "S[e,a,b] += Y[Dst[e],a,n] * B[Src[e],b,n]",
        "Y[Dst[e],a,n] += V[e,a] * B[Src[e],n]",
    ],
)
def test_blocks_are_multiplied_whole(text):
    torch.manual_seed(0)
    tensors = {"Src": torch.randint(5, (9,)), "Dst": torch.randint(6, (9,)), "B": torch.randn(5, 3, 4)}
    tensors |= {"V": torch.randn(9, 2, 3), "Y": torch.randn(6, 2, 4)}
    if "B[Src[e],n]" in text:
        tensors |= {"B": torch.randn(5, 4), "V": torch.randn(9, 2)}
    program = insum_nn.compile(text, out_shape=(6, 2, 4) if text[0] == "Y" else (9, 2, 3))
    tensors = read_by(program, tensors)
    agree(program, **{n: t.double() if t.is_floating_point() else t for n, t in tensors.items()})


@pytest.mark.parametrize("bad", [NAN, INF])
def test_diagonals_hide_what_lies_outside(bad):
    tensors = {"Up": torch.tensor([0, 2, -1, 4]), "V": torch.randn(4, 3), "B": torch.randn(4, 5)}
    tensors["V"][1, 2] = tensors["V"][2:] = tensors["B"][3] = bad
    program = insum_nn.compile("Y[m,h] += V[d,m] * B[m+Up[d],h]")
    out = agree(program, **tensors)
    assert not out[[0, 2]].isnan().any()
    seed = torch.ones_like(out)
    tensors["V"].requires_grad_()
    tensors["B"].requires_grad_()
    of_values, of_dense = torch.autograd.grad(program(**tensors), [tensors["V"], tensors["B"]], seed)
    assert not of_values[2:].any()
    assert not of_values[1, 2].any()
    assert not of_dense[:3].isnan().any()


def test_windows_of_a_convolution_are_no_sparse_product():
    """The entries would be as many as filters and positions."""
    tensors = {"M": torch.tensor([0, 1, 1]), "C": torch.tensor([1, 0, 1]), "R": torch.tensor([0, 2, 1])}
    tensors |= {"F": torch.randn(3), "I": torch.randn(4, 2, 8)}
    program = insum_nn.compile("O[n,M[k],p] += F[k] * I[n,C[k],p+R[k]-1]", out_shape=(None, 2, 8))
    agree(program, **tensors)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_missing_entries_of_several_subscripts_hide_their_values(bad):
    text, shape = ADDRESSED["heads"]
    tensors = operands(0, missing=True, dtype=torch.float32)
    tensors["P"][tensors["Src"] < 0] = bad
    program = insum_nn.compile(text, out_shape=shape)
    assert not agree(program, **read_by(program, tensors)).isnan().any()
    text, shape = ADDRESSED["two columns"]
    program = insum_nn.compile(text, out_shape=shape)
    tensors["T"][:, 0] = bad
    tensors["Type"][tensors["Type"] == 0] = -1
    assert not agree(program, **read_by(program, tensors)).isnan().any()


def test_index_tensors_are_read_at_every_call():
    text, shape = ADDRESSED["two columns"]
    program = insum_nn.compile(text, out_shape=shape)
    tensors = read_by(program, operands(0))
    agree(program, **tensors)
    for name in ("Src", "Dst", "Type"):
        tensors[name][:5] = tensors[name].flip(0)[:5].clone()
        agree(program, **tensors)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("text", "extents"),
    [
        ("Out[Row[p],d] += X[p,d] * Y[p,d]", {"Out": (5, 3), "X": (7, 3), "Y": (7, 3), "Row": (7,)}),
        ("Out[Row[g,q],d] += X[g,q,c] * W[Off[g],c,d]", {"Out": (5, 3), "X": (4, 2, 6), "Row": (4, 2), "W": (3, 6, 3)}),
        ("Out[h,Row[p],d] += X[p,d] * W[h,p]", {"Out": (2, 5, 3), "X": (7, 3), "Row": (7,), "W": (2, 7)}),
        ("Out[Row[p],Col[p]] += X[p]", {"Out": (5, 4), "X": (7,), "Row": (7,), "Col": (7,)}),
    ],
)
def test_what_is_added_is_not_written_to(text, extents, index):
    named = {name: torch.randn(shape) for name, shape in extents.items() if name not in ("Out", "Row", "Col")}
    named |= {name: torch.randint(-1, 4, extents[name], dtype=index) for name in ("Row", "Col") if name in extents}
    if "Off" in text:
        named["Off"] = torch.tensor([0, 2, 0, 1], dtype=index)
    copies = {name: tensor.clone() for name, tensor in named.items()}
    agree(insum_nn.compile(text, out_shape=extents["Out"]), **named)
    for name, tensor in named.items():
        assert torch.equal(tensor, copies[name]), name
