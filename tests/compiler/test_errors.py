"""Compare every error message with its golden file, and check its class, builtin base class and fields."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import insum_nn
from insum_nn import IndexFacts, Options, insum
from insum_nn.errors import (
    InsumAliasError,
    InsumBackendError,
    InsumDeviceError,
    InsumDtypeError,
    InsumError,
    InsumFormatError,
    InsumGradientError,
    InsumNameError,
    InsumOverflowError,
    InsumRangeError,
    InsumShapeError,
    InsumSyntaxError,
    MissingExtraError,
    Span,
    caret_lines,
)
from tests.formats.registry import NOT_DENSE
from tests.golden_fixture import Golden

# The builtin classes by which callers catch them.
BUILTINS: dict[type[InsumError], tuple[type[Exception], ...]] = {
    InsumSyntaxError: (SyntaxError,),
    InsumNameError: (NameError, ValueError),
    InsumShapeError: (ValueError,),
    InsumDtypeError: (TypeError,),
    InsumDeviceError: (RuntimeError,),
    InsumRangeError: (IndexError,),
    InsumAliasError: (ValueError,),
    InsumOverflowError: (OverflowError,),
    InsumGradientError: (RuntimeError,),
    InsumFormatError: (ValueError,),
    InsumBackendError: (RuntimeError,),
    MissingExtraError: (ImportError,),
}


@dataclass
class Case:
    """A call, and the error that it must raise."""

    raises: type[InsumError]
    call: Callable[[], object]
    fields: dict[str, Any] = field(default_factory=dict)


SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"


def spmm(expression: str = SPMM, /, **changed: Any) -> Callable[[], object]:
    """A call of SpMM with some arguments changed; `None` leaves one out."""

    def call() -> object:
        known: dict[str, Any] = {
            "Row": torch.tensor([0, 2, 2]),
            "Col": torch.tensor([1, 0, 1]),
            "Val": torch.ones(3),
            "B": torch.ones(2, 4),
            "out_shape": (3, None),
        }
        known.update(changed)
        return insum(expression, **{name: value for name, value in known.items() if value is not None})

    return call


def compiling(text: Any, **options: Any) -> Callable[[], object]:
    return lambda: insum_nn.compile(text, **options)


def running(expression: str, **arguments: Any) -> Callable[[], object]:
    return lambda: insum(expression, **arguments)


NESTED, _, UNINITIALIZED = NOT_DENSE.values()
SYNTAX = {
    "empty_text": "",
    "blank_text": " \t ",
    "no_operator": "C[i]",
    "no_factor": "C[i] +=",
    "no_output": "+= A[i]",
    "output_is_a_number": "3 += A[i]",
    "einsum_of_torch": "ik,kj->ij",
    "unknown_operator": "C[i] -= A[i]",
    "product_assign": "C[i] *= A[i]",
    "spaced_operator": "C[i] + = A[i]",
    "spaced_max": "C[i] max = A[i]",
    "equality": "C[i] == A[i]",
    "walrus": "C[i] := A[i]",
    "missing_factor": "C[i] += A[i] *",
    "missing_star": "C[i] += A[i] B[i]",
    "missing_summand": "C[i] += A[i] +",
    "lacking_summand": "C[i] += A[i,k] * x[k] + b[i] - c",
    "missing_divisor": "C[i] += A[i] / * B[i]",
    "exponent_a_tensor": "C[i] += A[i] ** B[i]",
    "exponent_of_an_exponent": "C[i] += A[i] ** 2 ** 3",
    "slope_a_tensor": "C[i] += leaky_relu(A[i], 2 * alpha)",
    "unclosed_parenthesis": "C[i] += (A[i] + B[i] * C[i]",
    "parenthesis_for_bracket": "C[i] += exp(A[i]] * B[i]",
    "empty_parentheses": "C[i] += () * B[i]",
    "no_argument": "C[i] += exp()",
    "two_arguments": "C[i] += exp(A[i], B[i])",
    "one_argument": "C[i] += leaky_relu(A[i])",
    "three_arguments": "C[i] += eq(A[i], B[i], 1)",
    "misspelt_function": "C[i] += 2 * sigmod(A[i])",
    "unknown_function": "C[i] += where(A[i], B[i])",
    "factors_in_parentheses": "C[i] += exp(A[i] B[i])",
    "attribute": "C[i] += layer.weight[i]",
    "slice": "C[i] += A[i, :]",
    "ellipsis": "C[i] += A[..., i]",
    "open_bracket": "C[i] += A[i * B[j]",
    "unclosed_at_end": "C[i] += A[i",
    "missing_comma": "C[Row[e] n] += Val[e]",
    "closed_too_often": "C[i] += A[i]]",
    "empty_subscripts": "C[i] += A[]",
    "trailing_comma": "C[i] += A[i,]",
    "missing_subscript": "C[i] += A[,i]",
    "product_of_indices": "C[i] += A[i*j]",
    "modulo": "C[i] += A[i % 2]",
    "float_subscript": "C[i] += A[0.5*i]",
    "float_offset": "C[i] += A[i + 1e3]",
    "zero_coefficient": "C[i] += A[i + 0*j]",
    "cancelled_index": "C[i] += A[i + j - j]",
    "double_sign": "C[i] += A[i - -1]",
    "second_statement": "C[i] += A[i]; D[i] C[i]",
    "statement_without_text": "# a note\n;",
    "return_alone": "return Y",
    "return_first": "S[i] += A[i]; return S; Y[i] += S[i]",
    "return_of_an_access": "S[i] += A[i]; return S[i]",
    "absent_cells": "S[i] = A[i,k+1] * B[k]; Y[i] += S[i]",
    "absent_entries": "S[E[i]] = A[i]; Y[i] += S[i]",
    "quotes": "C['i'] += A[i]",
    "unclosed_in_a_program": "S[i] += A[i]; C[i] += exp(S[i]; D[i] += C[i]",
    "several_in_parentheses": "C[i] += (A[i], B[i])",
    "null_byte": "C[i] += A[\x00i]",
    "right_to_left_mark": "C[i] += A\u202e[i]",
    "lone_surrogate": "C[i] += A[\ud800]",
    "full_width": "Ｃ[i] += Ａ[ｉ] ＋ 3",
    "wide_text": "出力[i] += 特徴量[i] @ B[i]",
    "combining_text": "Ce\u0301[i] += A[i] $ B[i]",
    "long_text": "C[i] += " + " * ".join(f"Factor{n}[i]" for n in range(30)) + " * & * D[i]",
    "too_many_factors": "C[i] += " + " * ".join(["A[i]"] * 65),
    "too_many_summands": "C[i] += " + " + ".join(["A[i]"] * 65),
    "too_many_divisors": "C[i] += A[i]" + " / exp(B[i]) * A[i]" * 64,
    "too_many_subscripts": "C[i] += A[" + ",".join(["i"] * 65) + "]",
    "too_many_terms": "C[i] += A[" + "+".join(["i"] * 65) + "]",
    "too_many_indices": "C[i] += " + " * ".join(f"A[i{n},j{n}]" for n in range(40)),
    "too_many_accesses": "C[i] += A["
    + ",".join("+".join(f"E{n}[i]" for n in range(m, m + 60)) for m in range(5))
    + "]",
    "too_deep": "C[i] += " + "A[" * 40 + "i" + "]" * 40,
    "too_many_parentheses": "C[i] += " + "exp(" * 33 + "A[i]" + ")" * 33,
    "too_many_signs": "C[i] += " + "-" * 33 + "A[i]",
    "too_long": "C[i] += A[i]" + " " * 20_000,
}

CASES: dict[str, Case] = {
    **{f"syntax_{name}": Case(InsumSyntaxError, compiling(text)) for name, text in SYNTAX.items()},
    "syntax_not_a_text": Case(InsumSyntaxError, compiling(b"C[i] += A[i]")),
    "syntax_a_list": Case(InsumSyntaxError, compiling(["C"])),
    "syntax_a_dict_run": Case(InsumSyntaxError, running({})),  # type: ignore[arg-type]
    "many_faults": Case(
        InsumNameError, compiling(f"C[{','.join(f'i{n}' for n in range(64))}] += A[0]"), {"index": "i0"}
    ),
    "syntax_token": Case(InsumSyntaxError, compiling("C[i] += A[i] B[i]"), {"got": "B"}),
    "overflow_coefficient": Case(InsumOverflowError, compiling("C[i] += A[9223372036854775808*i]")),
    "overflow_offset": Case(InsumOverflowError, compiling(f"C[i] += A[i + {'9' * 400}]")),
    "overflow_sum_of_offsets": Case(
        InsumOverflowError, compiling("C[i] += A[i + 9223372036854775807 + 9223372036854775807]")
    ),
    "overflow_sum_of_coefficients": Case(
        InsumOverflowError, compiling("C[i] += A[9223372036854775807*i + 9223372036854775807*i]")
    ),
    "overflow_number": Case(InsumOverflowError, compiling("C[i] += 99999999999999999999 * A[i]")),
    "overflow_float": Case(InsumOverflowError, compiling("C[i] += 1e400 * A[i]")),
    "overflow_exponent": Case(InsumOverflowError, compiling("C[i] += A[i] ** -1e400")),
    # Names.
    "written_never_read": Case(
        InsumNameError,
        compiling("C[D[y],z] += A[y,E[r]] * B[r,x]"),
        {"index": "z", "expected": ("r", "x", "y")},
    ),
    "written_never_read_twice": Case(InsumNameError, compiling("C[z,z+1,w] += A[i]"), {"index": "z"}),
    "written_never_read_without_factors": Case(InsumNameError, compiling("C[i] += 2"), {"index": "i"}),
    "unknown_tensor": Case(InsumNameError, spmm(Val=None), {"tensor": "Val"}),
    "misspelt_tensor": Case(InsumNameError, spmm(Val=None, val=torch.ones(3)), {"tensor": "Val"}),
    "unknown_none": Case(InsumNameError, running("y[i] += v[i] * x[i]", v=None, x=torch.ones(4)), {"tensor": "v"}),
    "two_unknown_tensors": Case(InsumNameError, spmm(Val=None, Row=None), {"tensor": "Row"}),
    "index_as_factor": Case(InsumNameError, running("y[i] += i * x[i]", x=torch.ones(3)), {"tensor": "i"}),
    "unused_tensor": Case(InsumNameError, spmm(Extra=torch.ones(3)), {"tensor": "Extra"}),
    "two_unused_tensors": Case(InsumNameError, spmm(Extra=torch.ones(3), Other=torch.ones(3)), {"tensor": "Extra"}),
    "derivative_of_an_index_tensor": Case(
        InsumNameError, lambda: insum_nn.compile(SPMM).grad("Col"), {"tensor": "Col"}
    ),
    "derivative_of_nothing": Case(InsumNameError, lambda: insum_nn.compile(SPMM).grad("Z"), {"tensor": "Z"}),
    # The output read.
    "output_also_read": Case(InsumAliasError, compiling("C[D[y],x] += A[y,E[r]] * C[r,x]"), {"tensor": "C"}),
    "output_read_twice": Case(InsumAliasError, compiling("C[i] max= C[i] * A[C[i]]"), {"tensor": "C"}),
    "output_directs_itself": Case(InsumAliasError, compiling("C[C[i]] += A[i]"), {"tensor": "C"}),
    "output_read_in_a_function": Case(InsumAliasError, compiling("C[i] += A[i] / (1 + exp(-C[i]))"), {"tensor": "C"}),
    "output_scalar_read": Case(InsumAliasError, compiling("s += s * A[i]"), {"tensor": "s"}),
    # Ranks and extents.
    "rank": Case(InsumShapeError, spmm(B=torch.ones(2)), {"tensor": "B", "expected": 2, "got": 1}),
    "rank_of_a_scalar": Case(
        InsumShapeError,
        running("y[i] += alpha * x[i]", alpha=torch.ones(1), x=torch.ones(3)),
        {"tensor": "alpha", "expected": 0, "got": 1},
    ),
    "rank_of_the_initial_value": Case(
        InsumShapeError, spmm(C=torch.ones(1, 1, 3), out_shape=None), {"tensor": "C", "expected": 2, "got": 3}
    ),
    "two_ranks": Case(InsumShapeError, compiling("C[i] += A[i] * A[i,j]"), {"tensor": "A", "got": (1, 2)}),
    "two_extents": Case(
        InsumShapeError,
        running(
            "C[D[y],x] += A[y,E[r]] * B[r,x]",
            D=torch.zeros(4, dtype=torch.int64),
            A=torch.ones(4, 512),
            E=torch.zeros(128, dtype=torch.int64),
            B=torch.ones(64, 32),
            out_shape=(100, None),
        ),
        {"index": "r", "got": (128, 64)},
    ),
    "three_extents": Case(
        InsumShapeError,
        running("y[i] += a[i] * b[i] * c[i]", a=torch.ones(1), b=torch.ones(2), c=torch.ones(3)),
        {"index": "i", "got": (1, 2, 3)},
    ),
    "extent_of_a_diagonal": Case(
        InsumShapeError, running("y[i] += A[i,i]", A=torch.ones(2, 3)), {"index": "i", "got": (2, 3)}
    ),
    "extent_against_out_shape": Case(
        InsumShapeError, running("y[i] += x[i]", x=torch.ones(3), out_shape=(5,)), {"index": "i", "got": (5, 3)}
    ),
    "extent_against_sizes": Case(
        InsumShapeError, running("y[i] += x[i]", x=torch.ones(3), sizes={"i": 4}), {"index": "i", "got": (3, 4)}
    ),
    "extent_against_the_initial_value": Case(
        InsumShapeError, running("y[i] += x[i]", x=torch.ones(3), y=torch.ones(2)), {"index": "i", "got": (2, 3)}
    ),
    "index_without_extent": Case(
        InsumShapeError, running("y[i] += x[i+2*j]", x=torch.ones(9), out_shape=(4,)), {"index": "j"}
    ),
    "two_indices_without_extent": Case(InsumShapeError, running("s += x[i+2*j]", x=torch.ones(9)), {"index": "i"}),
    "output_extent_unknown": Case(InsumShapeError, spmm(out_shape=None), {"axis": 0}),
    "output_extents_unknown": Case(InsumShapeError, running("C[2*i,j,3] += A[i,j]", A=torch.ones(2, 3)), {"axis": 0}),
    "out_shape_too_short": Case(InsumShapeError, spmm(out_shape=(3,)), {"expected": 2, "got": 1}),
    "out_shape_against_the_initial_value": Case(
        InsumShapeError, spmm(C=torch.ones(3, 4), out_shape=(4, None)), {"expected": 4, "got": 3}
    ),
    "out_shape_of_floats": Case(InsumShapeError, spmm(out_shape=(3.0, None))),
    "out_shape_negative": Case(InsumShapeError, spmm(out_shape=(-1, None))),
    "sizes_unknown_index": Case(InsumShapeError, spmm(sizes={"q": 3}), {"index": "q"}),
    "sizes_of_text": Case(InsumShapeError, spmm(sizes={"n": "4"})),
    "sizes_negative": Case(InsumShapeError, spmm(sizes={"n": -4})),
    "sizes_of_a_bool": Case(InsumShapeError, running("y[i,j] += x[i]", x=torch.ones(3), sizes={"j": True})),
    "initial_value_of_assignment": Case(
        InsumShapeError, running("y[i] = x[i]", x=torch.ones(3), y=torch.ones(3)), {"tensor": "y"}
    ),
    # Kinds, dtypes, devices.
    "not_a_tensor_list": Case(InsumDtypeError, spmm(Val=[1.0, 2.0, 3.0]), {"tensor": "Val", "got": "list"}),
    "not_a_tensor_number": Case(
        InsumDtypeError,
        running("y[i] += alpha * x[i]", alpha=2.0, x=torch.ones(3)),
        {"tensor": "alpha", "got": "float"},
    ),
    "sparse_tensor": Case(InsumDtypeError, spmm(B=torch.ones(2, 4).to_sparse()), {"tensor": "B"}),
    "nested_factor": Case(InsumDtypeError, spmm(B=NESTED), {"tensor": "B", "got": "a nested tensor"}),
    "nested_index_tensor": Case(InsumDtypeError, spmm(Col=NESTED), {"tensor": "Col"}),
    "nested_out": Case(InsumDtypeError, spmm(out=NESTED, out_shape=None)),
    "uninitialized_factor": Case(InsumDtypeError, spmm(Val=UNINITIALIZED), {"tensor": "Val"}),
    "uninitialized_initial_value": Case(InsumDtypeError, spmm(C=UNINITIALIZED, out_shape=None), {"tensor": "C"}),
    "uninitialized_static_tensor": Case(
        InsumDtypeError, compiling(SPMM, static={"Row": UNINITIALIZED}), {"tensor": "Row"}
    ),
    "index_tensor_of_floats": Case(
        InsumDtypeError,
        running(
            "C[D[y],x] += A[y,E[r]] * B[r,x]",
            D=torch.zeros(4, dtype=torch.int64),
            A=torch.ones(4, 512),
            E=torch.zeros(3),
            B=torch.ones(3, 32),
            out_shape=(100, None),
        ),
        {"tensor": "E", "got": torch.float32},
    ),
    "index_tensor_of_the_output_of_bools": Case(
        InsumDtypeError, spmm(Row=torch.tensor([True, False, True])), {"tensor": "Row", "got": torch.bool}
    ),
    "index_tensor_of_int16": Case(
        InsumDtypeError, spmm(Col=torch.tensor([1, 0, 1], dtype=torch.int16)), {"tensor": "Col", "got": torch.int16}
    ),
    "dtype_mix": Case(InsumDtypeError, spmm(B=torch.ones(2, 4).double()), {"got": {torch.float32, torch.float64}}),
    "dtype_mix_with_the_initial_value": Case(
        InsumDtypeError, spmm(C=torch.zeros(3, 4).half(), out_shape=None), {"got": {torch.float32, torch.float16}}
    ),
    "dtype_complex": Case(
        InsumDtypeError, running("y[i] += x[i]", x=torch.ones(3, dtype=torch.complex64)), {"tensor": "x"}
    ),
    "dtype_bool": Case(InsumDtypeError, running("y[i] += x[i]", x=torch.ones(3, dtype=torch.bool)), {"tensor": "x"}),
    "dtype_of_a_function": Case(
        InsumDtypeError, running("y[i] += relu(x[i]) * exp(-x[i])", x=torch.arange(3)), {"got": torch.int64}
    ),
    "dtype_of_a_quotient": Case(InsumDtypeError, running("y[i] += (x[i] + 1) / 2", x=torch.arange(3))),
    "dtype_of_a_power": Case(InsumDtypeError, running("y[i] += x[i]**-1", x=torch.arange(3))),
    "dtype_of_a_number_in_a_function": Case(InsumDtypeError, running("y[i] += relu(x[i] - 0.5)", x=torch.arange(3))),
    "dtype_of_a_number": Case(InsumDtypeError, running("y[i] += 0.5 * x[i]", x=torch.arange(3))),
    "device_mix": Case(InsumDeviceError, spmm(B=torch.ones(2, 4, device="meta"))),
    # Index values.
    "out_of_range_read": Case(
        InsumRangeError, spmm(Col=torch.tensor([0, 7, 2])), {"tensor": "Col", "expected": 2, "got": (0, 7)}
    ),
    "out_of_range_write": Case(
        InsumRangeError, spmm(Row=torch.tensor([0, 3, 5])), {"tensor": "Row", "expected": 3, "got": (0, 5)}
    ),
    "out_of_range_later_axis": Case(
        InsumRangeError,
        running("y[i,j] += A[i,E[i,j]]", A=torch.ones(2, 3), E=torch.tensor([[0, 1, 2], [2, 3, -1]])),
        {"tensor": "E", "expected": 3, "got": (0, 3)},
    ),
    "out_of_range_one_entry": Case(
        InsumRangeError, running("s += A[E[0]]", A=torch.ones(3), E=torch.tensor([4])), {"got": (4, 4)}
    ),
    "out_of_range_nested": Case(
        InsumRangeError,
        running("y[i] += x[E[F[i]]]", x=torch.ones(3), E=torch.tensor([0, 9]), F=torch.tensor([1, 0, 1, -1])),
        {"tensor": "E", "got": (0, 9)},
    ),
    "out_of_range_inner": Case(
        InsumRangeError,
        running("y[i] += x[E[F[i]]]", x=torch.ones(3), E=torch.tensor([0, 2]), F=torch.tensor([1, 0, 5, -1])),
        {"tensor": "F", "got": (0, 5)},
    ),
    "constant_read": Case(
        InsumRangeError,
        running("y[i] += A[i,3]", A=torch.ones(2, 3)),
        {"tensor": "A", "axis": 1, "expected": 3, "got": (3, 3)},
    ),
    "constant_read_below": Case(
        InsumRangeError,
        running("y[i] += A[i,-1]", A=torch.ones(0, 3)),
        {"tensor": "A", "axis": 1, "expected": 3, "got": (-1, -1)},
    ),
    "out_of_range_sum_written": Case(
        InsumRangeError,
        running("y[2*E[i]+1] += x[i]", x=torch.ones(3), E=torch.tensor([0, -1, 2]), out_shape=(4,)),
        {"expected": 4, "got": (1, 5)},
    ),
    "below_minus_one": Case(InsumRangeError, spmm(Col=torch.tensor([0, -2, -5])), {"tensor": "Col", "got": -2}),
    "below_minus_one_in_the_output": Case(InsumRangeError, spmm(Row=torch.tensor([0, -7, 1])), {"tensor": "Row"}),
    "affine_write_beyond": Case(
        InsumRangeError,
        running("y[2*i+1] += x[i]", x=torch.ones(3), out_shape=(5,)),
        {"axis": 0, "expected": 5, "got": (1, 5)},
    ),
    "affine_write_below": Case(
        InsumRangeError,
        running("y[j,i-1] += x[i,j]", x=torch.ones(3, 2), out_shape=(None, 5)),
        {"axis": 1, "expected": 5, "got": (-1, 1)},
    ),
    "constant_write": Case(
        InsumRangeError, running("y[4] += x[i]", x=torch.ones(3), out_shape=(2,)), {"axis": 0, "got": (4, 4)}
    ),
    "validated_range": Case(
        InsumRangeError, spmm(Col=torch.tensor([0, 7, 2]), validate=True), {"tensor": "Col", "got": (0, 7)}
    ),
    "validated_facts": Case(
        InsumRangeError,
        lambda: insum_nn.compile(
            SPMM,
            facts={
                "Row": IndexFacts(sorted=True, unique=True, masked=False, proven=True),
                "Col": IndexFacts(unique=True, proven=True),
            },
            options=Options(validate=True),
            out_shape=(3, None),
        )(
            Row=torch.tensor([2, 0, -1, 2]),
            Col=torch.tensor([1, 1, 0, -1]),
            Val=torch.ones(4),
            B=torch.ones(2, 4),
        ),
        {"tensor": "Row"},
    ),
    # Arguments of the call.
    "argument_sizes_a_tensor": Case(
        InsumDtypeError, running("y[i] += sizes[i]", sizes=torch.ones(3)), {"got": torch.Tensor}
    ),
    "argument_sizes_a_list": Case(InsumDtypeError, spmm(sizes=[("n", 4)]), {"got": list}),
    "argument_out_shape_an_int": Case(InsumDtypeError, spmm(out_shape=3), {"got": int}),
    "argument_by_position": Case(InsumDtypeError, lambda: insum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2))),
    "argument_by_position_a_dict": Case(InsumDtypeError, lambda: insum(SPMM, {"Val": torch.ones(3)})),
    "argument_tensors_a_list": Case(InsumDtypeError, spmm(tensors=[torch.ones(3)]), {"got": list}),
    "argument_options_a_text": Case(InsumDtypeError, spmm(options="eager"), {"got": str}),
    "argument_facts_a_set": Case(InsumDtypeError, compiling(SPMM, facts={"Row"}), {"got": set}),
    # Tensors to write to.
    "out_of_another_shape": Case(InsumShapeError, spmm(out=torch.ones(3, 5)), {"tensor": "out", "got": (3, 5)}),
    "out_of_another_rank": Case(InsumShapeError, spmm(out=torch.ones(3)), {"tensor": "out", "got": (3,)}),
    "out_of_another_dtype": Case(InsumDtypeError, spmm(out=torch.ones(3, 4).double()), {"got": torch.float64}),
    "out_on_another_device": Case(InsumDeviceError, spmm(out=torch.ones(3, 4, device="meta")), {"tensor": "out"}),
    "out_that_requires_a_gradient": Case(InsumGradientError, spmm(out=torch.ones(3, 4).requires_grad_())),
    "out_beside_a_gradient": Case(InsumGradientError, spmm(Val=torch.ones(3).requires_grad_(), out=torch.ones(3, 4))),
    "out_overlaps_itself": Case(InsumAliasError, spmm(out=torch.ones(3, 1).expand(3, 4))),
    "out_is_no_tensor": Case(InsumDtypeError, spmm(out=[1.0]), {"got": list}),
    "out_of_the_statement": Case(InsumNameError, running("out[i] += x[i]", x=torch.ones(3), out=torch.ones(3))),
    # Integers that cannot address what they must.
    "overflow_int32": Case(
        InsumOverflowError,
        running(
            "y[i] += x[E[i]]",
            x=torch.ones(1).expand(2**31 + 1),
            E=torch.zeros(3, dtype=torch.int32),
        ),
        {"tensor": "E", "got": 2**31 + 1},
    ),
    "overflow_affine": Case(
        InsumOverflowError, running("y[i] += x[9223372036854775807*i]", x=torch.ones(3), sizes={"i": 3})
    ),
    "overflow_entry_times_coefficient": Case(
        InsumOverflowError,
        running("y[i] += x[9223372036854775807*E[i]]", x=torch.ones(3), E=torch.zeros(3, dtype=torch.int64)),
    ),
    "overflow_entries": Case(
        InsumOverflowError,
        running("y[4*E[i]] += x[i]", E=torch.tensor([0, 2**62]), x=torch.ones(2), out_shape=(3,)),
        {"got": (0, 2**64)},
    ),
    "overflow_entries_read": Case(
        InsumOverflowError,
        running("y[i] += x[E[i]+F[i]]", E=torch.tensor([2**62]), F=torch.tensor([2**62]), x=torch.ones(2)),
    ),
    # Programs of several statements.
    "program_read_before_written": Case(
        InsumNameError, compiling("Y[i] += S[i]; S[i] += A[i]; return Y, S"), {"tensor": "S"}
    ),
    "program_written_after_read": Case(
        InsumNameError, compiling("S[i] += A[i]\nY[i] += S[i]\nS[i] += B[i]"), {"tensor": "S"}
    ),
    "program_two_maxima": Case(InsumNameError, compiling("Y[i] max= A[i]; Y[i] max= B[i]"), {"tensor": "Y"}),
    "program_assigned_after_a_sum": Case(InsumNameError, compiling("Y[i] += A[i]; Y[i] = B[i]"), {"tensor": "Y"}),
    "program_reads_what_it_writes": Case(InsumAliasError, compiling("S[i] += A[i]; S[i] += S[i]"), {"tensor": "S"}),
    "program_never_used": Case(InsumNameError, compiling("C[i] += A[i]; D[i] += B[i]"), {"tensor": "C"}),
    "program_returns_an_input": Case(InsumNameError, compiling("C[i] += A[i]; return C, A"), {"tensor": "A"}),
    "program_returns_a_tensor_twice": Case(InsumNameError, compiling("S[i] += A[i]; return S, S"), {"tensor": "S"}),
    "program_writes_an_index_tensor": Case(
        InsumAliasError, compiling("I[e] += K[e]\nY[i] += X[e,i] * Q[I[e]]"), {"tensor": "I"}
    ),
    "program_not_passed": Case(
        InsumNameError, running("S[i] = exp(x[i]); y += S[i] * w[i]", x=torch.ones(3)), {"tensor": "w"}
    ),
    "program_not_used": Case(
        InsumNameError,
        running("S[i] += exp(x[i]); y += S[i]", x=torch.ones(3), w=torch.ones(3)),
        {"tensor": "w"},
    ),
    "program_assignment_started": Case(
        InsumNameError, running("S[i] = exp(x[i]); y += S[i]", x=torch.ones(3), S=torch.ones(3)), {"tensor": "S"}
    ),
    "program_rank": Case(InsumShapeError, running("S[i] += x[i]; y += S[i]", x=torch.ones(3, 2)), {"tensor": "x"}),
    "program_not_a_tensor": Case(InsumDtypeError, running("S[i] += exp(x[i]); y += S[i]", x=[1.0]), {"tensor": "x"}),
    "program_rank_of_a_temporary": Case(
        InsumShapeError, running("S[i] += x[i]; y += S[i,i]", x=torch.ones(3)), {"tensor": "S"}
    ),
    "program_extents": Case(
        InsumShapeError, running("S[i] += exp(x[i]); y += S[i] * w[i]", x=torch.ones(3), w=torch.ones(2))
    ),
    "program_output_extent_unknown": Case(
        InsumShapeError, running("Z[I[e]] += x[e]; Y += exp(Z[n])", x=torch.ones(3), I=torch.tensor([0, 1, 1]))
    ),
    "program_dtype_mix": Case(
        InsumDtypeError, running("S[i] += exp(x[i]); y += S[i] * w[i]", x=torch.ones(3), w=torch.ones(3).double())
    ),
    "program_dtype_mix_with_half": Case(
        InsumDtypeError, running("S[i] += exp(x[i]); y += S[i] * w[i]", x=torch.ones(3).half(), w=torch.ones(3))
    ),
    "program_out_of_range": Case(
        InsumRangeError,
        running(
            "Z[I[e]] += exp(x[e]); Y[e] = x[e] / Z[I[e]]",
            x=torch.ones(3),
            I=torch.tensor([0, 4, 1]),
            out_shape={"Z": (3,)},
        ),
        {"tensor": "I"},
    ),
    "program_shape_of_an_unknown": Case(
        InsumFormatError, running("S[i] += x[i]; y += exp(S[i])", x=torch.ones(3), out_shape={"Z": (3,)})
    ),
    "program_shape_alone": Case(
        InsumDtypeError, running("S[i] += x[i]; y += exp(S[i])", x=torch.ones(3), out_shape=(3,))
    ),
    "program_shape_of_another_rank": Case(
        InsumShapeError,
        running("S[i] += x[i]; y += exp(S[i])", x=torch.ones(3), out_shape={"S": (3, 3)}),
        {"tensor": "S"},
    ),
    "program_with_an_activation": Case(InsumFormatError, compiling("S[i] += x[i]; y += exp(S[i])", activation="relu")),
    "program_with_out": Case(
        InsumFormatError, running("S[i] += x[i]; y += exp(S[i])", x=torch.ones(3), out=torch.ones(()))
    ),
    # Several at once: the first is raised, the others stand in its text.
    "several_names": Case(InsumNameError, compiling("C[z,w] += A[i] * C[i] * A[i,j]"), {"index": "z"}),
    "several_dtypes": Case(
        InsumDtypeError,
        running(
            "y[E[i]] += x[F[i]]", E=torch.ones(3), F=torch.ones(3), x=torch.ones(3, dtype=torch.bool), out_shape=(3,)
        ),
        {"tensor": "E"},
    ),
    "several_extents": Case(
        InsumShapeError,
        running("y[i,k] += A[i,j] * B[j,k] * C[i,k]", A=torch.ones(2, 3), B=torch.ones(4, 5), C=torch.ones(6, 7)),
        {"index": "i"},
    ),
    "several_ranges": Case(
        InsumRangeError, spmm(Row=torch.tensor([0, 3, 5]), Col=torch.tensor([-3, 0, 0])), {"tensor": "Row"}
    ),
    "several_kinds": Case(InsumDtypeError, spmm(Val=3, B="text"), {"tensor": "Val"}),
}


def caught(case: Case) -> InsumError:
    with pytest.raises(InsumError) as info:
        case.call()
    return info.value


def assert_parts(error: InsumError) -> None:
    """Check the parts of a message: the fault, the text with carets inside it, details, and a fix."""
    for one in (error, *error.others):
        text = str(one).split("\nalso, ")[0]
        lines = text.splitlines()
        assert lines[0] == one.message
        assert not one.message.endswith(".")
        assert one.fix is not None
        assert one.fix.endswith((".", "..."))
        assert lines[-1] == f"  fix: {one.fix}"
        assert all(line == line.rstrip() for line in lines), "trailing spaces would be lost in the golden files"
        for span in one.spans:
            assert 0 <= span.start < span.stop <= len(one.expression) + 1 or span.start == len(one.expression)


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, golden: Golden):
    case = CASES[name]
    error = caught(case)
    assert type(error) is case.raises
    for builtin in BUILTINS[case.raises]:
        assert isinstance(error, builtin)
    for key, expected in case.fields.items():
        assert error.fields[key] == expected, key
    assert_parts(error)
    golden(f"errors/{name}", f"{type(error).__name__}: {error}")


def test_every_class_has_a_case_or_another_test():
    """Errors of optional packages and backends have other tests; `test_backend_error` is below."""
    tested = {case.raises for case in CASES.values()}
    assert set(BUILTINS) - tested == {MissingExtraError, InsumBackendError}
    assert all(issubclass(cls, InsumError) for cls in BUILTINS)


def test_every_golden_file_has_its_case():
    """The file of a renamed case must not remain."""
    from tests.golden_fixture import GOLDEN

    assert {path.stem for path in (GOLDEN / "errors").glob("*.txt")} == set(CASES)


def test_spans_are_the_tokens_at_fault():
    error = caught(CASES["two_extents"])
    assert [error.expression[span.start : span.stop] for span in error.spans] == ["r", "r"]
    first = error.expression.index("E[r]") + 2
    assert [span.start for span in error.spans] == [first, error.expression.index("B[r") + 2]
    error = caught(CASES["syntax_full_width"])
    assert [error.expression[span.start : span.stop] for span in error.spans] == ["＋"]


def test_several_faults_are_raised_together():
    error = caught(CASES["several_names"])
    assert [type(other) for other in error.others] == [InsumNameError, InsumAliasError, InsumShapeError]
    assert all(str(other) in str(error) for other in error.others)


@pytest.mark.parametrize("name", ["several_dtypes", "two_extents", "syntax_lone_surrogate", "overflow_int32"])
def test_errors_pickle(name: str):
    """A worker process sends its error to its parent."""
    error = caught(CASES[name])
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert other.fields == error.fields
    assert [str(o) for o in other.others] == [str(o) for o in error.others]


@pytest.mark.parametrize("cls", BUILTINS)
def test_errors_have_their_builtin_base_class_and_their_text(cls: type[InsumError]):
    error = cls("wrong", expression="A[i]", spans=[Span(2, 3)], details=["fact"], fix="do it.", index="i")
    for builtin in BUILTINS[cls]:
        assert isinstance(error, builtin)
    assert str(error) == "wrong\n  A[i]\n    ^\n  fact\n  fix: do it."
    assert error.fields == {"index": "i"}


def test_carets_of_wide_and_combining_characters():
    assert caret_lines("列[é]", [Span(2, 3)]) == ["  列[é]", "     ^"]
    assert caret_lines("列[i]", [Span(0, 1)]) == ["  列[i]", "  ^^"]
    assert caret_lines("e\u0301[i]", [Span(3, 4)]) == ["  e\u0301[i]", "    ^"]


def test_carets_of_several_spans_and_without_a_span():
    assert caret_lines("A[i] * B[i]", [Span(9, 10), Span(2, 3)]) == ["  A[i] * B[i]", "    ^      ^"]
    assert caret_lines("A[i]", []) == ["  A[i]"]
    assert caret_lines("A[i]", [Span(4, 4)]) == ["  A[i]", "      ^"]
    assert caret_lines("A[i]", [Span(0, 4), Span(2, 3)]) == ["  A[i]", "  ^^^^"]
    assert caret_lines("", [Span(0, 0)]) == []


def test_carets_of_a_long_text_stay_in_the_window():
    text = "x" * 500
    shown, marks = caret_lines(text, [Span(300, 303)])
    assert len(shown) == 2 + 3 + 160 + 3
    assert shown[len(marks) - 3 : len(marks)] == "xxx"
    assert marks.strip() == "^^^"
    assert shown.startswith("  ...")
    assert shown.endswith("...")


def test_out_of_range_entries_that_are_never_read_are_allowed():
    """The check covers the entries that the statement reads, not all entries of the index tensor."""
    table = torch.tensor([0, 1, 99])
    got = insum("y[i] += x[E[F[i]]]", E=table, F=torch.tensor([1, 0]), x=torch.tensor([3.0, 4.0]))
    assert got.tolist() == [4.0, 3.0]
    got = insum("y[i] += x[E[1]] * w[i]", E=table, x=torch.tensor([3.0, 4.0]), w=torch.ones(1))
    assert got.tolist() == [4.0]


def test_no_entry_is_read_where_the_loop_nest_is_empty():
    got = insum("y[j] += x[E[i]] * w[i,j]", E=torch.tensor([9])[:0], x=torch.ones(2), w=torch.ones(0, 3))
    assert got.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "value"), [("backend", "cuda"), ("order", "best"), ("accumulate", "float64")])
def test_options_are_checked(name: str, value: str):
    with pytest.raises(ValueError, match=f"Options.{name} is '{value}'; expected one of '"):
        Options(**{name: value})


def test_an_affine_read_may_be_out_of_bounds_and_an_affine_write_may_not():
    assert insum("y[i] += x[i+5]", x=torch.ones(3), sizes={"i": 2}).tolist() == [0.0, 0.0]
    with pytest.raises(IndexError):
        insum("y[i+5] += x[i]", x=torch.ones(3), out_shape=(4,))
