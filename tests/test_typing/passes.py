"""Uses of the public interface that pyright must accept; read by `test_typing.py`, never run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import insum_nn
from insum_nn import Options, Program, insum
from insum_nn.errors import InsumShapeError
from insum_nn.formats import COO, GroupCOO
from insum_nn.ops import spmm


def by_keyword(row: Tensor, val: Tensor, dense: Tensor) -> Tensor:
    out = insum("C[Row[e],n] += Val[e] * B[e,n]", Row=row, Val=val, B=dense, out_shape=(4, None))
    assert_type(out, Tensor)
    return out


def by_mapping(tensors: dict[str, Tensor]) -> Tensor:
    return insum("y[i] += a[i,k] * x[k]", tensors=tensors, sizes={"i": 3}, validate=True, options=Options())


def program(a: Tensor) -> Tensor:
    compiled = insum_nn.compile("s += a[i] * a[i]")
    assert_type(compiled, Program)
    print(compiled.explain(a=a))
    derivative = compiled.grad("a")
    return derivative(a=a, ds=torch.ones(()), out_shape=a.shape)


def formats(dense: Tensor) -> Tensor:
    matrix = GroupCOO.from_dense(dense, group_size=2)
    assert_type(matrix, GroupCOO)
    assert_type(matrix.with_values(matrix.values * 2), GroupCOO)
    assert_type(matrix.to(torch.float64), GroupCOO)
    assert_type(COO.from_dense(dense).shape, tuple[int, ...])
    product = spmm(matrix, dense, options=Options(backend="eager"))
    assert_type(product, Tensor)
    return product


def errors(dense: Tensor) -> tuple[int, ...]:
    try:
        return tuple(insum("y[i] += a[i,j]", a=dense).shape)
    except InsumShapeError as error:
        raise ValueError(error.message) from error
