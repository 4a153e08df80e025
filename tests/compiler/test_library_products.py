"""The CPU's library products keep the definition where entries are missing and factors are not finite."""

from __future__ import annotations

import pytest
import torch

import insum_nn

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


def test_a_structure_serves_the_statement_that_it_was_made_for():
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
