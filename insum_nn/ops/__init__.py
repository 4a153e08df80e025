"""Operators on sparse formats: each is one expression per format, differentiable in values and dense operands."""

from __future__ import annotations

from insum_nn.ops.activation_conv import activation_conv, activation_conv_expression, masked_conv
from insum_nn.ops.attention import attention, neighbour_softmax
from insum_nn.ops.block_linear import block_linear, block_linear_expression
from insum_nn.ops.custom import contract, register
from insum_nn.ops.elementwise import (
    add,
    multiply,
    multiply_expression,
    same_structure,
    scale,
    scale_cols,
    scale_expression,
    scale_rows,
)
from insum_nn.ops.mttkrp import mttkrp, mttkrp_expression
from insum_nn.ops.pruned_conv import pruned_conv, pruned_conv_expression
from insum_nn.ops.sddmm import sddmm, sddmm_expression
from insum_nn.ops.sparse_conv import sparse_conv, sparse_conv_expression
from insum_nn.ops.sparse_pool import sparse_avg_pool, sparse_max_pool
from insum_nn.ops.spmm import spmm, spmm_expression, spmm_program
from insum_nn.ops.tensor_product import tensor_product
from insum_nn.ops.ttm import ttm, ttm_expression

pruned_conv2d = pruned_conv
pruned_conv2d_expression = pruned_conv_expression

__all__ = [
    "activation_conv",
    "activation_conv_expression",
    "add",
    "attention",
    "block_linear",
    "block_linear_expression",
    "contract",
    "masked_conv",
    "mttkrp",
    "mttkrp_expression",
    "multiply",
    "multiply_expression",
    "neighbour_softmax",
    "pruned_conv",
    "pruned_conv2d",
    "pruned_conv2d_expression",
    "pruned_conv_expression",
    "register",
    "same_structure",
    "scale",
    "scale_cols",
    "scale_expression",
    "scale_rows",
    "sddmm",
    "sddmm_expression",
    "sparse_avg_pool",
    "sparse_conv",
    "sparse_conv_expression",
    "sparse_max_pool",
    "spmm",
    "spmm_expression",
    "spmm_program",
    "tensor_product",
    "ttm",
    "ttm_expression",
]
