"""Classes of statements for the kernel generator, each with an oracle written in torch's own calls.

The oracles share nothing with the compiler, and are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from insum_nn.compiler.ir.schedule import Precision, Schedule
from insum_nn.compiler.kernels.row_partition import partition_for
from insum_nn.compiler.kernels.sized import UnsizedKernel, strides_of
from insum_nn.compiler.lang.bind import Extents, bind, layout_of
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.lang.shapes import resolve_extents
from insum_nn.compiler.schedule.defaults import default_schedule
from insum_nn.compiler.schedule.form import Form, _atomic, make_form
from insum_nn.facts import IndexFacts, StaticTable

__all__ = [
    "CASES",
    "FULL",
    "HOLES",
    "SORTED",
    "Case",
    "Tensors",
    "entries",
    "form_of",
    "kernel_of",
    "put",
    "real",
    "take",
]

Tensors = dict[str, Tensor]
Shape = tuple[int | None, ...]
SORTED = IndexFacts(sorted=True, masked=False, proven=True)
FULL = IndexFacts(masked=False, proven=True)
HOLES = IndexFacts(masked=True, proven=True)
ONCE = IndexFacts(unique=True, masked=False, proven=True)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`; 0 where there is no entry."""
    rows = x[index.clamp(min=0).long()]
    return torch.where((index >= 0).reshape(*index.shape, *[1] * (x.dim() - 1)), rows, 0)


def put(terms: Tensor, index: Tensor, rows: int) -> Tensor:
    """The sum of terms by row; those without one are dropped."""
    flat = index.flatten().long()
    terms = terms.reshape(flat.shape[0], *terms.shape[index.dim() :])
    return terms.new_zeros(rows + 1, *terms.shape[1:]).index_add(0, torch.where(flat < 0, rows, flat), terms)[:rows]


@dataclass(frozen=True)
class Case:
    """One class of statements.

    Attributes:
        draw: its tensors for a scale (1: a few cells, for the interpreter; 8: for a device); values are float64.
        oracle: the output, from float64 tensors and the scale.
        out_shape: the output's shape for a scale.
        facts: facts of its index tensors.
        fixed: indices whose extents are compiled in when a schedule is tried by hand.
        static: tensors whose values are written out.
        dot: a matrix product is expected in the text for large sizes.
    """

    name: str
    expression: str
    draw: Callable[[int], Tensors]
    oracle: Callable[[Tensors, int], Tensor]
    out_shape: Callable[[int], Shape | None] = lambda scale: None
    facts: Mapping[str, IndexFacts] = field(default_factory=dict)
    fixed: str = ""
    static: tuple[str, ...] = ()
    dot: bool = False


def entries(high: int, *shape: int, holes: float = 0.0) -> Tensor:
    drawn = torch.randint(0, high, shape)
    return torch.where(torch.rand(shape) < holes, -1, drawn) if holes else drawn


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# Rows 1 and the last are empty, row 0 has many entries.
def rows_of(count: int, rows: int) -> Tensor:
    drawn = torch.where(torch.rand(count) < 0.4, 0, torch.randint(2, rows - 1, (count,)))
    return drawn.sort().values


def _tables() -> Tensors:
    """Coefficients of a small tensor product; some are 0."""
    coefficients = real(3, 2, 2)
    coefficients[0, 0, 1] = 0
    coefficients[2, 1] = 0
    return {"I": entries(3, 3, 2, 2), "J": entries(4, 3, 2, 2), "CG": coefficients}


def _edges(scale: int) -> Tensors:
    edges, nodes, width = 7 * scale * scale, 4 * scale, 5 * scale
    return {
        **_tables(),
        "L": entries(2, 3, 2),
        "Dst": entries(nodes, edges).sort().values,
        "Src": entries(nodes, edges),
        "X": real(nodes, 3, width),
        "Y": real(edges, 4),
        "W": real(edges, 2, width),
    }


def _edges_oracle(t: Tensors, scale: int) -> Tensor:
    terms = torch.einsum(
        "krq,ekrqu,ekrq,ekru->eku", t["CG"], t["X"][t["Src"]][:, t["I"]], t["Y"][:, t["J"]], t["W"][:, t["L"]]
    )
    return put(terms, t["Dst"], 4 * scale + 1)


def _stencil_oracle(t: Tensors, scale: int) -> Tensor:
    y = 2 * t["R"][:, None] + torch.arange(3, device=t["R"].device) - 1
    x = 3 * t["Q"][:, None] + torch.arange(2, device=t["R"].device) - 1
    grid = t["G"]
    inside = ((y >= 0) & (y < grid.shape[0]))[:, :, None] & ((x >= 0) & (x < grid.shape[1]))[:, None, :]
    found = grid[y.clamp(0, grid.shape[0] - 1)[:, :, None], x.clamp(0, grid.shape[1] - 1)[:, None, :]]
    return torch.einsum("ab,pabc->pc", t["S"], torch.where(inside[..., None], found, 0))


def _shifted(t: Tensors, scale: int) -> Tensor:
    """Images added up where entries say, channel by channel and cell by cell."""
    rows, columns = 6 * scale + 2, 7 * scale + 2
    parts = [[] for _ in range(3 * scale)]
    blank = t["X"].new_zeros(t["X"].shape[0], rows, columns)
    for g, k in torch.cartesian_prod(*map(torch.arange, t["C"].shape)).tolist():
        if (channel := int(t["C"][g, k])) >= 0:
            r, c = int(t["R"][g, k]), int(t["S"][g, k])
            sides = (c, 2 - c, r, 2 - r)
            image = t["X"][:, int(t["M"][g])]
            parts[channel].append(t["F"][g, k] * torch.nn.functional.pad(image, sides))
    return torch.stack([sum(each, blank) for each in parts], 1)


def _filters(scale: int) -> Tensors:
    groups = 5 * scale
    return {
        "M": entries(4 * scale, groups).sort().values.int(),
        "C": entries(3 * scale, groups, 2, holes=0.2).int(),
        "R": entries(3, groups, 2).int(),
        "S": entries(3, groups, 2).int(),
        "F": real(groups, 2),
    }


def _pruned(t: Tensors, scale: int) -> Tensor:
    dense = t["F"].new_zeros(4 * scale, 3 * scale, 3, 3)
    there = t["C"] >= 0
    rows = t["M"][:, None].expand_as(t["C"])
    at = tuple(each[there].long() for each in (rows, t["C"], t["R"], t["S"]))
    return torch.nn.functional.conv2d(t["X"], dense.index_put(at, t["F"][there], accumulate=True), padding=1)


def _strided_tables(u: int, w: int) -> Tensors:
    """Of two entries each, of one component and of three, the copies one after the other; W[2] goes backwards in u."""
    copies, columns = torch.arange(u), torch.arange(w)
    # (first cell, step) of the components of x and of the output; cells of the output between them stay empty.
    x = [(0, 1)] + [(u + 3 + c, 3) for c in range(3)]
    z = [(1, 1)] + [(w + 2 + c, 3) for c in range(3)]
    points = [(0, 0, 0, 0), (0, 1, 1, 1), (0, 2, 2, 1), (1, 0, 1, 2), (2, 0, 2, 2), (3, 0, 3, 2), (1, 1, 0, 0)]
    return {
        "CG": torch.cat([real(len(points) - 1), torch.zeros(1, dtype=torch.float64)]),
        "I": torch.stack([x[a][0] + x[a][1] * (copies.flip(0) if w_ == 2 else copies) for a, _, _, w_ in points]),
        "J": torch.tensor([b for _, b, _, _ in points]),
        "K": torch.stack([z[c][0] + z[c][1] * columns for _, _, c, _ in points]),
        "L": torch.tensor([w_ for _, _, _, w_ in points]),
    }


def _strided_oracle(t: Tensors, s: int) -> Tensor:
    terms = torch.einsum("p,zpu,zp,puw->zpw", t["CG"], t["X"][:, t["I"]], t["Y"][:, t["J"]], t["W"][t["L"]])
    out = terms.new_zeros(terms.shape[0], 64 * s + 2)
    return out.index_add(1, t["K"].flatten(), terms.flatten(1))


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "spmm",
            "C[Row[p],n] += Val[p] * B[Col[p],n]",
            lambda s: {
                "Row": rows_of(23 * s * s, 6 * s),
                "Col": entries(7 * s, 23 * s * s),
                "Val": real(23 * s * s),
                "B": real(7 * s, 11 * s),
            },
            lambda t, s: put(t["Val"][:, None] * t["B"][t["Col"]], t["Row"], 6 * s),
            lambda s: (6 * s, None),
            {"Row": SORTED, "Col": FULL},
            fixed="n",
        ),
        Case(
            "spmv",
            "y[Row[p]] += Val[p] * x[Col[p]]",
            lambda s: {
                "Row": rows_of(23 * s * s, 6 * s),
                "Col": entries(7 * s, 23 * s * s),
                "Val": real(23 * s * s),
                "x": real(7 * s),
            },
            lambda t, s: put(t["Val"] * t["x"][t["Col"]], t["Row"], 6 * s),
            lambda s: (6 * s,),
            {"Row": SORTED, "Col": FULL},
        ),
        Case(
            "group spmm",
            "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]",
            lambda s: {
                "Row": rows_of(9 * s * s, 6 * s),
                "Col": entries(7 * s, 9 * s * s, 3, holes=0.3),
                "Val": real(9 * s * s, 3),
                "B": real(7 * s, 11 * s),
            },
            lambda t, s: put((t["Val"][..., None] * take(t["B"], t["Col"])).sum(1), t["Row"], 6 * s),
            lambda s: (6 * s, None),
            {"Row": SORTED, "Col": HOLES},
            fixed="nq",
        ),
        Case(
            "block spmm",
            "C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]",
            lambda s: {
                "Row": rows_of(5 * s, 5 * s),
                "Col": entries(4, 5 * s, 2, holes=0.3),
                "Val": real(5 * s, 2, 16, 16),
                "B": real(4, 16, 19 * s),
            },
            lambda t, s: put(torch.einsum("gqab,gqbn->gan", t["Val"], take(t["B"], t["Col"])), t["Row"], 5 * s),
            lambda s: (5 * s, None, None),
            {"Row": SORTED, "Col": HOLES},
            fixed="abnq",
            dot=True,
        ),
        Case(
            "sddmm",
            "V[g,q] += X[Row[g],c] * Y[Col[g,q],c]",
            lambda s: {
                "Row": rows_of(9 * s, 6 * s),
                "Col": entries(7 * s, 9 * s, 3, holes=0.3),
                "X": real(6 * s, 11 * s),
                "Y": real(7 * s, 11 * s),
            },
            lambda t, s: torch.einsum("gc,gqc->gq", t["X"][t["Row"]], take(t["Y"], t["Col"])),
            facts={"Row": SORTED, "Col": HOLES},
            fixed="cq",
        ),
        Case(
            "convolution",
            "O[P[i],d] += F[NB[k,i],c] * W[k,c,d]",
            lambda s: {
                "P": torch.randperm(19 * s),
                # No voxel has the second neighbour, so its tiles are skipped.
                "NB": entries(13 * s, 4, 19 * s, holes=0.4).index_fill(0, torch.tensor([1]), -1),
                "F": real(13 * s, 9 * s),
                "W": real(4, 9 * s, 16 * s),
            },
            lambda t, s: put(torch.einsum("kic,kcd->id", take(t["F"], t["NB"]), t["W"]), t["P"], 19 * s),
            lambda s: (19 * s, None),
            {"P": ONCE, "NB": HOLES},
            fixed="cd",
            dot=True,
        ),
        Case(
            "convolution by kernel map",
            "O[OI[g,q],d] += F[II[g,q],c] * W[Off[g],c,d]",
            lambda s: {
                "OI": entries(13 * s, 4 * s, 16, holes=0.2),
                "II": entries(13 * s, 4 * s, 16, holes=0.2),
                "Off": entries(3, 4 * s),
                "F": real(13 * s, 9 * s),
                "W": real(3, 9 * s, 16 * s),
            },
            lambda t, s: put(torch.einsum("gqc,gcd->gqd", take(t["F"], t["II"]), t["W"][t["Off"]]), t["OI"], 13 * s),
            lambda s: (13 * s, None),
            {"OI": HOLES, "II": HOLES, "Off": FULL},
            fixed="cdq",
            dot=True,
        ),
        Case(
            "convolution's weight gradient",
            "dW[k,c,d] += F[NB[k,i],c] * dO[P[i],d]",
            lambda s: {
                "P": torch.randperm(37 * s),
                "NB": entries(13 * s, 3, 37 * s, holes=0.4),
                "F": real(13 * s, 9 * s),
                "dO": real(37 * s, 16 * s),
            },
            lambda t, s: torch.einsum("kic,id->kcd", take(t["F"], t["NB"]), t["dO"][t["P"]]),
            facts={"P": ONCE, "NB": HOLES},
            fixed="cd",
            dot=True,
        ),
        Case(
            "convolution's weight gradient by pairs",
            "dW[d,Off[p],c] += dO[OI[p],d] * F[II[p],c]",
            lambda s: {
                "Off": torch.sort(entries(5, 61 * s)).values,
                "OI": entries(11 * s, 61 * s),
                "II": entries(13 * s, 61 * s),
                "dO": real(11 * s, 16 * s),
                "F": real(13 * s, 9 * s),
            },
            lambda t, s: put(torch.einsum("pd,pc->pdc", t["dO"][t["OI"]], t["F"][t["II"]]), t["Off"], 5).movedim(0, 1),
            lambda s: (None, 5, None),
            {"Off": SORTED, "OI": FULL, "II": FULL},
            fixed="cd",
            dot=True,
        ),
        Case(
            "tensor product uvu",
            "Z[Dst[e],k,u] += CG[k,r,q] * X[Src[e],I[k,r,q],u] * Y[e,J[k,r,q]] * W[e,L[k,r],u]",
            _edges,
            _edges_oracle,
            lambda s: (4 * s + 1, None, None),
            {"I": FULL, "J": FULL, "L": FULL, "Dst": SORTED, "Src": FULL},
            fixed="krqu",
            static=("CG", "I", "J", "L"),
        ),
        Case(
            "tensor product uvw",
            "O[z,k,w] += CG[k,r,q] * X[z,I[k,r,q],u] * Y[z,J[k,r,q]] * W[r,u,w]",
            lambda s: {
                **_tables(),
                "X": real(9 * s, 3, 8 * s),
                "Y": real(9 * s, 4),
                "W": real(2, 8 * s, 16 * s),
            },
            lambda t, s: torch.einsum("krq,zkrqu,zkrq,ruw->zkw", t["CG"], t["X"][:, t["I"]], t["Y"][:, t["J"]], t["W"]),
            facts={"I": FULL, "J": FULL},
            fixed="krquw",
            static=("CG", "I", "J"),
            dot=True,
        ),
        Case(
            "tensor product of representations",
            "O[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]",
            lambda s: {
                **_strided_tables(8 * s, 16 * s),
                "X": real(9 * s, 32 * s + 3),
                "Y": real(9 * s, 4),
                "W": real(3, 8 * s, 16 * s),
            },
            _strided_oracle,
            lambda s: (None, 64 * s + 2),
            {"I": FULL, "J": FULL, "K": FULL, "L": FULL},
            fixed="puw",
            static=("CG", "I", "J", "K", "L"),
            dot=True,
        ),
        # Three statements that no application is made of.
        Case(
            "mttkrp",
            "M[I0[p],r] += V[p] * B[J0[p],r] * D[K0[p],r]",
            lambda s: {
                "I0": entries(5 * s, 21 * s),
                "J0": entries(6 * s, 21 * s),
                "K0": entries(4 * s, 21 * s, holes=0.3),
                "V": real(21 * s),
                "B": real(6 * s, 7 * s),
                "D": real(4 * s, 7 * s),
            },
            lambda t, s: put(t["V"][:, None] * t["B"][t["J0"]] * take(t["D"], t["K0"]), t["I0"], 5 * s),
            lambda s: (5 * s, None),
            {"I0": FULL, "J0": FULL, "K0": HOLES},
            fixed="r",
        ),
        Case(
            "strided stencil",
            "O[p,c] += S[a,b] * G[2*R[p] + a - 1, 3*Q[p] + b - 1, c]",
            lambda s: {
                "R": entries(5 * s, 17 * s),
                "Q": entries(4 * s, 17 * s),
                "S": real(3, 2),
                # Smaller than the stencil's reach: reads outside give 0.
                "G": real(9 * s, 10 * s, 6 * s),
            },
            _stencil_oracle,
            facts={"R": FULL, "Q": FULL},
            fixed="abc",
        ),
        Case(
            "pruned convolution",
            "O[n,M[g],p,q] += F[g,k] * X[n,C[g,k],p+R[g,k]-1,q+S[g,k]-1]",
            lambda s: {**_filters(s), "X": real(2, 3 * s, 6 * s, 7 * s)},
            _pruned,
            lambda s: (None, 4 * s, 6 * s, 7 * s),
            {"M": SORTED, "C": HOLES, "R": FULL, "S": FULL},
            fixed="k",
        ),
        Case(
            "pruned convolution, transposed",
            "O[n,C[g,k],p+R[g,k],q+S[g,k]] += F[g,k] * X[n,M[g],p,q]",
            lambda s: {**_filters(s), "X": real(2, 4 * s, 6 * s, 7 * s)},
            _shifted,
            lambda s: (None, 3 * s, 6 * s + 2, 7 * s + 2),
            {"M": SORTED, "C": HOLES, "R": FULL, "S": FULL},
            fixed="k",
        ),
        Case(
            "batched sddmm with scatter",
            "Z[b,Seg[p]] += Val[p] * X[b,Row[p],c] * Y[b,Col[p],c]",
            lambda s: {
                "Seg": entries(4 * s, 13 * s, holes=0.2),
                "Row": entries(5 * s, 13 * s),
                "Col": entries(6 * s, 13 * s, holes=0.2),
                "Val": real(13 * s),
                "X": real(3, 5 * s, 7 * s),
                "Y": real(3, 6 * s, 7 * s),
            },
            lambda t, s: put(
                torch.einsum("p,bpc,pbc->pb", t["Val"], t["X"][:, t["Row"]], take(t["Y"].transpose(0, 1), t["Col"])),
                t["Seg"],
                4 * s,
            ).t(),
            lambda s: (None, 4 * s),
            {"Seg": HOLES, "Row": FULL, "Col": HOLES},
            fixed="bc",
        ),
    )
}


# A case under a schedule chosen by hand.


def form_of(
    case: Case,
    tensors: Tensors,
    *,
    facts: Mapping[str, IndexFacts] | None = None,
    initial: Tensor | None = None,
    by_rows: bool = True,
    fixed: str | None = None,
) -> tuple[Form, list[Tensor], Extents]:
    """What a kernel of the case computes, its tensors in order, and the call's sizes."""
    statement = parse(case.expression)
    layout = layout_of(statement)
    ordered = [tensors[name] for name in layout.tensors]
    extents = resolve_extents(statement, ordered, initial, {}, None if initial is not None else case.out_shape(1))
    bound = bind(statement, tensors, initial, facts={**case.facts, **(facts or {})})
    sizes = dict(zip(layout.indices, extents.indices, strict=True))
    fixed = case.fixed if fixed is None else fixed
    bound = replace(bound, static=tuple(sorted((name, sizes[name]) for name in fixed)))
    tables = {name: StaticTable.of(tensors[name]) for name in case.static}
    form = make_form(bound, sizes, extents.output, tables, deterministic=False)
    if form.permuted and not by_rows:
        form = _atomic(form)
    return form, ordered, extents


def kernel_of(
    case: Case,
    tensors: Tensors,
    schedule: Schedule | None,
    *,
    facts: Mapping[str, IndexFacts] | None = None,
    initial: Tensor | None = None,
    by_rows: bool = True,
    fixed: str | None = None,
    precision: Precision = "ieee",
) -> tuple[Form, UnsizedKernel, Tensor]:
    """The form, the kernel under a schedule, and what it computes."""
    form, ordered, extents = form_of(case, tensors, facts=facts, initial=initial, by_rows=by_rows, fixed=fixed)
    schedule = schedule or default_schedule(form)
    partition = partition_for(form, ordered, extents, schedule)
    strides = strides_of(form, ordered, extents, partition is not None and partition.split, initial)
    kernel = UnsizedKernel(form, schedule, strides, precision)
    return form, kernel, kernel.call(ordered, initial, *extents, partition)
