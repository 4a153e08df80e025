"""Operators on sparse formats: each is one expression per format, differentiable in values and dense operands."""

from insum_nn.ops.spmm import spmm, spmm_expression, spmm_program

__all__ = ["spmm", "spmm_expression", "spmm_program"]
