"""Sparse formats: dense tensors of indices and values, laws, and facts."""

from insum_nn.formats.base import IndexPart, SparseFormat
from insum_nn.formats.block_group_coo import BlockGroupCOO
from insum_nn.formats.blocks import BlockCOO, BlockFormat
from insum_nn.formats.checks import Fault
from insum_nn.formats.coo import COO
from insum_nn.formats.custom import CustomFormat
from insum_nn.formats.ell import ELL
from insum_nn.formats.group_coo import GroupCOO
from insum_nn.formats.group_size import (
    GroupSize,
    candidate_group_sizes,
    choose_group_size,
    estimate_group_size,
    indirect_accesses,
)

__all__ = [
    "COO",
    "ELL",
    "BlockCOO",
    "BlockFormat",
    "BlockGroupCOO",
    "CustomFormat",
    "Fault",
    "GroupCOO",
    "GroupSize",
    "IndexPart",
    "SparseFormat",
    "candidate_group_sizes",
    "choose_group_size",
    "estimate_group_size",
    "indirect_accesses",
]
