"""The ways to cut a statement in two, by the reference interpreter alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts
from insum_nn.compiler.lang.bind import Bound, Extents, bind
from insum_nn.compiler.lang.interpreter import interpret
from insum_nn.compiler.lang.parser import parse
from insum_nn.compiler.passes.cut_products import Cut, cuts_of
from insum_nn.compiler.runtime.statement_cuts import Part, both_of, fits
from insum_nn.compiler.schedule.product_cost import Sizes
from tests.compiler.cuts import CHAIN, RGCN, STATEMENTS, drawn, out_shape


def bound_of(statement: str, tensors: dict[str, Tensor], *, masked: bool | None = True) -> Bound:
    facts = {name: IndexFacts(masked=masked, proven=True) for name in parse(statement).index_tensors()}
    return bind(parse(statement), tensors, None, facts=facts)


def cuts(statement: str, **known: bool) -> list[str]:
    tensors = drawn(statement, missing=0.0)
    return [str(cut) for cut in cuts_of(bound_of(statement, tensors, **known))]


def by_parts(cut: Cut, bound: Bound, tensors: dict[str, Tensor], sizes: Sizes) -> Tensor:
    """What both parts compute one after the other, cleared cells included."""
    named = dict(tensors)
    result = torch.empty(0)
    for part in both_of(cut, Part(bound, sizes, "")):
        for each in part.clears:
            unread = each.unread(tensors, torch.device("cpu"))
            named[each.clear.name] = named[each.clear.place.access.name].masked_fill(unread, 0)
        inputs = {name: named[name] for name in part.bound.layout.tensors}
        result = interpret(part.bound.statement, inputs, part.extents, drop_outside=part.bound.drop_outside)
        for each in part.unwritten:
            result = result.masked_fill(each.unread(tensors, torch.device("cpu")), 0)
        named[part.writes] = result
    return result


def sizes_of(statement: str, tensors: dict[str, Tensor]) -> Sizes:
    program = insum_nn.compile(statement, sizes={"i": 2} if "+i" in statement else None)
    _, _, extents = program._checked(tensors, None, out_shape(statement))
    indices = dict(zip(program.spec.layout.indices, extents.indices, strict=True))
    return Sizes(indices, {name: tuple(t.shape) for name, t in tensors.items()}, extents.output, 8)


def test_a_relational_convolution_can_be_cut_at_distinct_addresses_and_by_relation():
    found = cuts(RGCN)
    assert "T[i,j,o] += X[i,c] * W[j,c,o]; Y[D[e],o] += T[S[e],R[e],o] * Inv[D[e],R[e]]" in found
    by_relation = "T[D[e],R[e],c] += Inv[D[e],R[e]] * X[S[e],c]; Y[i,o] += T[i,j,c] * W_read[j,c,o]"
    assert by_relation in found


def test_a_matrix_features_and_a_weight_can_be_multiplied_in_both_orders():
    found = cuts(CHAIN)
    assert "T[D[e],c] += Val[e] * X[S[e],c]; Y[i,o] += T[i,c] * W[c,o]" in found
    assert "T[i,o] += X[i,c] * W[c,o]; Y[D[e],o] += T[S[e],o] * Val[e]" in found


def test_blocks_are_copied_so_that_neighbours_are_what_is_written():
    turned = "T[e,c,o] += W[e,o,c]; Y[k,D[e],o] += T[e,c,o] * X[k,S[e],c]"
    assert turned in cuts(STATEMENTS["blocks"])
    # What is written is the last axis already, or the blocks' entries are no index of the output's tables.
    assert not any(cut.startswith("T[e,o,c] +=") for cut in cuts("Y[k,D[e],c] += W[e,o,c] * X[k,S[e],o]"))
    assert not any(cut.startswith("T[c,o] +=") for cut in cuts("Y[D[e],o] += Val[e] * X[S[e],c] * W[o,c]"))
    assert not any(cut.startswith("T[c,e] +=") for cut in cuts("Y[k,e] += W[e,c] * X[k,S[e],c]"))


def test_blocks_are_written_into_a_matrix_that_a_library_multiplies_as_it_lies():
    found = cuts(STATEMENTS["blocks"])
    assert "T[D[e],o,S[e],c] += W[e,o,c]; Y[k,i,o] += T[i,o,j,c] * X_read[k,j,c]" in found
    found = cuts(STATEMENTS["groups of blocks"])
    assert "T[G[g],o,Col[g,q],c] += Val[g,q,o,c]; Y[i,o,k] += T[i,o,j,c] * X_read[j,c,k]" in found
    # Of single entries the matrix would be the sparse one with all its zeros.
    assert not any(text.startswith("T[D[e],S[e]") for text in cuts("Y[D[e],o] += Val[e] * X[S[e],o]"))


@pytest.mark.parametrize("name", STATEMENTS)
def test_both_parts_are_the_whole(name: str):
    statement = STATEMENTS[name]
    tensors = drawn(statement)
    sizes = sizes_of(statement, tensors)
    bound = bound_of(statement, tensors)
    want = interpret(bound.statement, tensors, _extents(bound, sizes))
    found = [cut for cut in cuts_of(bound) if fits(cut, Part(bound, sizes, ""))]
    assert found
    for cut in found:
        torch.testing.assert_close(by_parts(cut, bound, tensors, sizes), want, msg=str(cut))


def _extents(bound: Bound, sizes: Sizes) -> Extents:
    return Extents(tuple(sizes.indices[i] for i in bound.layout.indices), tuple(sizes.output))


@pytest.mark.parametrize(
    "text",
    [
        # Products under a maximum do not sum.
        "Y[D[e],o] max= Val[e] * X[S[e],c] * W[c,o]",
        # One factor, and no sum that others do not take part in.
        "Y[D[e],o] += X[S[e],o]",
        "Y[e,o] += X[S[e],o] * Z[R[e],o]",
        "Y[i,o] += A[i,o] * B[o,i]",
    ],
)
def test_statements_that_stay_whole(text: str):
    assert cuts(text) == []


def test_a_value_of_a_missing_entry_does_not_meet_its_zero():
    """Entry by entry, the product of a missing entry is 0, and its value, which may be anything, must not meet it."""
    statement = "Y[e] += Val[e] * A[D[e],c] * B[S[e],c]"
    entry_by_entry = "T[e] += A[D[e],c] * B[S[e],c]; Y[e] += T[e] * Val[e]"
    assert entry_by_entry in cuts(statement, masked=False)
    assert entry_by_entry not in cuts(statement, masked=True)


def test_axes_that_share_an_index_must_agree():
    statement = "Y[D[e],o] += X[S[e],c] * Z[S[e],c,o]"
    tensors = drawn(statement, missing=0.0)
    tensors["Z"] = torch.randn(7, 3, 4, dtype=torch.float64)
    sizes, bound = sizes_of(statement, tensors), bound_of(statement, tensors)
    (shared,) = [cut for cut in cuts_of(bound) if str(cut.first).startswith("T[i,o] += X[i,c] * Z[i,c,o]")]
    assert shared.equal == ((("X", 0), ("Z", 0)),)
    assert not fits(shared, Part(bound, sizes, ""))


def test_new_names_are_taken_by_nothing_else():
    statement = "T[i[e],o] += Val[e] * X[j[e],c] * T_[c,o]"
    found = cuts(statement, masked=False)
    assert "T__[l,o] += X[l,c] * T_[c,o]; T[i[e],o] += T__[j[e],o] * Val[e]" in found
    assert not any(
        "T__" in str(cut.first) for cut in cuts_of(_bound(statement), frozenset({"T__"})) if cut.intermediate == "T__"
    )


def _bound(statement: str) -> Bound:
    return bound_of(statement, drawn(statement, missing=0.0))
