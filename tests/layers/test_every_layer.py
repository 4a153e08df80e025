"""Every layer that is public has a case."""

from __future__ import annotations

from typing import Any

from torch import nn

from insum_nn import layers
from insum_nn.layers import spconv
from tests.layers.every_layer import ALL_CASES

# What others are called with, made of, or derived from.
PARTS = {"SparseConvTensor", "SparseSequential", "SparseModule", "SparseConvolution", "SparseMaxPool", "SparseAvgPool"}
# Torch's modules applied to features, and modules that move tensors: test_sparse_tensor.py, test_spconv_tables.py.
PARTS |= {"Identity", "SparseIdentity", "SparseReLU", "SparseBatchNorm", "SparseSyncBatchNorm", "ConcatTable"}
PARTS |= {"AddTable", "JoinTable", "RemoveDuplicate", "RemoveGrid"}


def classes(home: Any) -> set[str]:
    named = {name: getattr(home, name) for name in home.__all__}
    return {name for name, kind in named.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}


def test_every_layer_has_a_case():
    tested = {type(part).__name__ for case in ALL_CASES.values() for part in case.module().modules()}
    assert (classes(layers) | classes(spconv)) - tested - PARTS == set()
    assert {*map(str, PARTS)} <= {*layers.__all__, *spconv.__all__}
