"""Misuses of the public interface; pyright must refuse each marked line, by the named rule, and no other."""

from __future__ import annotations

from torch import Tensor

import insum_nn
from insum_nn import Options, insum
from insum_nn.formats import GroupCOO
from insum_nn.ops import spmm


def calls(a: Tensor) -> None:
    insum(3, a=a)  # expect: reportArgumentType
    insum("y[i] += a[i,j]", a="not a tensor")  # expect: reportArgumentType
    insum("y[i] += a[i,j]", a=a, out_shape=5)  # expect: reportArgumentType
    insum("y[i] += a[i,j]", a=a, sizes={"j": "three"})  # expect: reportArgumentType
    insum("y[i] += a[i,j]", a=a, options=Options(backend="magic"))  # expect: reportArgumentType
    insum()  # expect: reportCallIssue


def results(a: Tensor) -> int:
    return insum("y[i] += a[i,j]", a=a)  # expect: reportReturnType


def programs(a: Tensor) -> None:
    program = insum_nn.compile("y[i] += a[i,j]")
    program.grad(1)  # expect: reportArgumentType
    program.explane()  # expect: reportAttributeAccessIssue
    program(a=[1.0, 2.0])  # expect: reportArgumentType


def formats(dense: Tensor) -> None:
    matrix = GroupCOO.from_dense(dense, group_size=2)
    matrix.values = dense  # expect: reportAttributeAccessIssue
    GroupCOO.from_dense([[1.0, 2.0]], group_size=2)  # expect: reportArgumentType
    spmm(dense, dense)  # expect: reportArgumentType
