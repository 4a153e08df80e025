"""Operators on sparse formats: each is one expression per format, differentiable in values and dense operands."""

from insum_nn.ops.elementwise import add, multiply, multiply_expression, same_structure, scale, scale_cols, scale_rows
from insum_nn.ops.mttkrp import mttkrp, mttkrp_expression
from insum_nn.ops.sddmm import sddmm, sddmm_expression
from insum_nn.ops.spmm import spmm, spmm_expression, spmm_program
from insum_nn.ops.ttm import ttm, ttm_expression

__all__ = [
    "add",
    "mttkrp",
    "mttkrp_expression",
    "multiply",
    "multiply_expression",
    "same_structure",
    "scale",
    "scale_cols",
    "scale_rows",
    "sddmm",
    "sddmm_expression",
    "spmm",
    "spmm_expression",
    "spmm_program",
    "ttm",
    "ttm_expression",
]
