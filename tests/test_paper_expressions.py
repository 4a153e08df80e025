"""Every statement of docs/expressions.md runs, and equals a computation on dense tensors.

A case names a row of the document, repeats its statement, and builds small random data for
it together with the expected result, which comes from dense torch operators alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, einsum

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "expressions.md"
ROW = re.compile(r"^\| `([a-z0-9.-]+)` \| [^|]+ \| `([^`|]+)` \| [^|]+ \| [^|]+ \|$")


@dataclass(frozen=True)
class Run:
    """One call of `insum`, and what it must return."""

    expected: Tensor
    tensors: dict[str, Tensor]
    out_shape: tuple[int | None, ...] | None
    sizes: dict[str, int]


def run(
    expected: Tensor,
    out_shape: tuple[int | None, ...] | None = None,
    sizes: dict[str, int] | None = None,
    **tensors: Tensor,
) -> Run:
    return Run(expected, tensors, out_shape, sizes or {})


@dataclass(frozen=True)
class Case:
    statement: str
    build: Callable[[Data], Run | list[Run]]


CASES: dict[str, Case] = {}


def case(key: str, statement: str) -> Callable[[Callable[[Data], Run | list[Run]]], Callable[[Data], Run | list[Run]]]:
    def register(build: Callable[[Data], Run | list[Run]]) -> Callable[[Data], Run | list[Run]]:
        assert key not in CASES, key
        CASES[key] = Case(statement, build)
        return build

    return register


class Data:
    """Random float64 data, and sparse storage of it built entry by entry."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def pick(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def keep(self, *shape: int, share: float = 0.4) -> Tensor:
        """A 0/1 mask with ones in two places at least; of three or more slices along axis 0, the first is empty."""
        mask = (torch.rand(shape, generator=self.generator) < share).double()
        if shape[0] > 2:
            mask[0] = 0
        mask.view(-1)[-3::2] = 1
        return mask

    def sparse(self, *shape: int, share: float = 0.4) -> Tensor:
        return self.rand(*shape) * self.keep(*shape, share=share)

    def coo(self, dense: Tensor) -> list[Tensor]:
        """Coordinates and values in random order, one entry stored as two halves."""
        at = dense.nonzero()
        at = at[torch.randperm(len(at), generator=self.generator)]
        values = dense[tuple(at.unbind(1))]
        values[0] /= 2
        return [*torch.cat([at, at[:1]]).unbind(1), torch.cat([values, values[:1]])]

    def grouped(self, dense: Tensor, lead: int, size: int) -> list[Tensor]:
        """Groups of entries that share their first `lead` coordinates: those (g,), the others (g, q), values (g, q).

        Unused slots hold -1; their values are not 0, which must not matter.
        """
        rows: dict[tuple[int, ...], list[list[int]]] = {}
        for at in dense.nonzero().tolist():
            rows.setdefault(tuple(at[:lead]), []).append(at)
        groups = [(key, ats[first : first + size]) for key, ats in rows.items() for first in range(0, len(ats), size)]
        keys = torch.tensor([key for key, _ in groups])
        rest = torch.full((len(groups), size, dense.dim() - lead), -1)
        values = self.rand(len(groups), size)
        for g, (_, ats) in enumerate(groups):
            for q, at in enumerate(ats):
                rest[g, q] = torch.tensor(at[lead:])
                values[g, q] = dense[tuple(at)]
        return [*keys.unbind(1), *rest.unbind(2), values]

    def ell(self, dense: Tensor, lead: int) -> list[Tensor]:
        """For each cell of the first `lead` axes as many slots as the fullest needs: coordinates and values."""
        shape = dense.shape[:lead]
        width = int((dense != 0).flatten(lead).sum(-1).max())
        rest = torch.full((*shape, width, dense.dim() - lead), -1)
        values = self.rand(*shape, width)
        used = torch.zeros(shape, dtype=torch.long)
        for at in dense.nonzero().tolist():
            cell = tuple(at[:lead])
            rest[cell][used[cell]] = torch.tensor(at[lead:])
            values[cell][used[cell]] = dense[tuple(at)]
            used[cell] += 1
        return [*rest.unbind(-1), values]


def one_hot(index: Tensor, extent: int) -> Tensor:
    return nnf.one_hot(index.long(), extent).double()


def positions(mask: Tensor) -> Tensor:
    """The number of each nonzero cell in row-major order, -1 elsewhere."""
    result = torch.full(mask.shape, -1)
    result[mask != 0] = torch.arange(int((mask != 0).sum()))
    return result


# ---- Insum ---------------------------------------------------------------------------------------


@case("insum.elementwise", "C[i] += A[i] * B[i]")
@case("ucf.elementwise", "C[i] += A[i] * B[i]")
def _(data: Data) -> Run:
    a, b = data.rand(7), data.rand(7)
    return run(a * b, A=a, B=b)


@case("insum.elementwise-coo", "C[Row[p]] += Val[p] * B[Row[p]]")
@case("ucf.elementwise-locate", "C[Row[p]] += Val[p] * B[Row[p]]")
def _(data: Data) -> Run:
    a, b = data.sparse(9), data.rand(9)
    row, val = data.coo(a)
    return run(a * b, out_shape=(9,), Row=row, Val=val, B=b)


@case("insum.matmul", "C[m,n] += A[m,k] * B[k,n]")
@case("ucf.matmul", "C[m,n] += A[m,k] * B[k,n]")
@case("sgap.spmm", "C[m,n] += A[m,k] * B[k,n]")
def _(data: Data) -> Run:
    a, b = data.sparse(5, 7), data.rand(7, 3)
    return run(a @ b, A=a, B=b)


@case("insum.indirect", "C[Dst[i]] += A[Src[i],j] * B[j]")
def _(data: Data) -> Run:
    a, b = data.rand(5, 3), data.rand(3)
    dst, src = data.pick(4, 9), data.pick(5, 9)
    return run(one_hot(dst, 4).T @ one_hot(src, 5) @ a @ b, out_shape=(4,), A=a, B=b, Dst=dst, Src=src)


@case("insum.coo", "C[Row[p],n] += Val[p] * B[Col[p],n]")
@case("sgap.spmm-coo", "C[Row[p],n] += Val[p] * B[Col[p],n]")
def _(data: Data) -> Run:
    a, b = data.sparse(5, 7), data.rand(7, 3)
    row, col, val = data.coo(a)
    return run(a @ b, out_shape=(5, None), Row=row, Col=col, Val=val, B=b)


@case("insum.ell", "C[m,n] += Val[m,q] * B[Col[m,q],n]")
@case("sgap.spmm-ell", "C[m,n] += Val[m,q] * B[Col[m,q],n]")
def _(data: Data) -> Run:
    a, b = data.sparse(5, 7), data.rand(7, 3)
    col, val = data.ell(a, 1)
    return run(a @ b, Col=col, Val=val, B=b)


@case("insum.group-coo", "C[Row[g],n] += Val[g,q] * B[Col[g,q],n]")
def _(data: Data) -> list[Run]:
    a, b = data.sparse(5, 9, share=0.6), data.rand(9, 3)
    runs: list[Run] = []
    for size in (1, 2, 3, 9):
        row, col, val = data.grouped(a, 1, size)
        runs.append(run(a @ b, out_shape=(5, None), Row=row, Col=col, Val=val, B=b))
    return runs


@case("insum.block-coo", "C[Row[p],a,n] += Val[p,a,b] * B[Col[p],b,n]")
def _(data: Data) -> Run:
    keep, b = data.keep(3, 5), data.rand(15, 7)
    blocks = data.rand(3, 5, 2, 3) * keep[:, :, None, None]
    row, col = keep.nonzero().int().unbind(1)
    dense = blocks.permute(0, 2, 1, 3).reshape(6, 15)
    tensors = {"Row": row, "Col": col, "Val": blocks[row, col], "B": b.view(5, 3, 7)}
    return run((dense @ b).view(3, 2, 7), out_shape=(3, None, None), **tensors)


@case("insum.block-group-coo", "C[Row[g],a,n] += Val[g,q,a,b] * B[Col[g,q],b,n]")
def _(data: Data) -> Run:
    keep, b = data.keep(3, 5, share=0.7), data.rand(15, 7)
    blocks = data.rand(3, 5, 2, 3) * keep[:, :, None, None]
    row, col, _ = data.grouped(keep, 1, 2)
    dense = blocks.permute(0, 2, 1, 3).reshape(6, 15)
    val = torch.where((col >= 0)[:, :, None, None], blocks[row[:, None], col], 5.0)
    expected = (dense @ b).view(3, 2, 7)
    return run(expected, out_shape=(3, None, None), Row=row, Col=col, Val=val, B=b.view(5, 3, 7))


@case("insum.gather-matmul-scatter", "C[Row[m],n] += A[m,Col[k]] * B[k,n]")
def _(data: Data) -> Run:
    a, b, start = data.rand(5, 4), data.rand(7, 3), data.rand(6, 3)
    row, col = data.pick(6, 5), data.pick(4, 7)
    expected = start + one_hot(row, 6).T @ (a @ one_hot(col, 4).T) @ b
    return run(expected, C=start, A=a, B=b, Row=row, Col=col)


@case("insum.gather", "G[m,k] = A[m,Col[k]]")
def _(data: Data) -> Run:
    a, col = data.rand(5, 4), data.pick(4, 7)
    return run(a @ one_hot(col, 4).T, A=a, Col=col)


@case("insum.einsum", "H[m,n] = G[m,k] * B[k,n]")
def _(data: Data) -> Run:
    g, b = data.rand(5, 7), data.rand(7, 3)
    return run(g @ b, G=g, B=b)


@case("insum.scatter", "C[Row[m],n] += H[m,n]")
def _(data: Data) -> Run:
    h, start, row = data.rand(5, 3), data.rand(4, 3), data.pick(4, 5)
    return run(start + one_hot(row, 4).T @ h, C=start, H=h, Row=row)


@case("insum.replicated-product", "T[m,k,n] = A[m,k] * B[k,n]")
def _(data: Data) -> Run:
    a, b = data.rand(5, 7), data.rand(7, 3)
    return run(a.unsqueeze(2) * b.unsqueeze(0), A=a, B=b)


@case("insum.sum", "C[m,n] = T[m,k,n]")
def _(data: Data) -> Run:
    t = data.rand(5, 7, 3)
    return run(t.sum(1), T=t)


def kernel_map(data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A map of 6 output points, 7 input points and 5 offsets; features; weights; the convolution by dense products."""
    kernel, features, weight = data.sparse(6, 7, 5, share=0.15), data.rand(7, 3), data.rand(5, 3, 4)
    expected = sum((kernel[:, :, o] @ features @ weight[o] for o in range(5)), torch.zeros(6, 4).double())
    return kernel, features, weight, expected


@case("insum.conv-map", "Out[x,d] += Map[x,y,o] * In[y,c] * W[o,c,d]")
@case("ucf.map-aggregate", "Out[x,d] += Map[x,y,o] * In[y,c] * W[o,c,d]")
def _(data: Data) -> Run:
    kernel, features, weight, expected = kernel_map(data)
    return run(expected, Map=kernel, In=features, W=weight)


@case("insum.conv-coo", "Out[Dst[p],d] += Val[p] * In[Src[p],c] * W[Off[p],c,d]")
def _(data: Data) -> Run:
    kernel, features, weight, expected = kernel_map(data)
    dst, src, off, val = data.coo(kernel)
    return run(expected, out_shape=(6, None), Dst=dst, Src=src, Off=off, Val=val, In=features, W=weight)


@case("insum.conv-grouped", "Out[Dst[g,q],d] += Val[g,q] * In[Src[g,q],c] * W[Off[g],c,d]")
def _(data: Data) -> Run:
    kernel, features, weight, expected = kernel_map(data)
    off, dst, src, val = data.grouped(kernel.permute(2, 0, 1), 1, 3)
    return run(expected, out_shape=(6, None), Dst=dst, Src=src, Off=off, Val=val, In=features, W=weight)


@case("insum.conv-batched-matmul", "H[g,q,d] += G[g,q,c] * V[g,c,d]")
def _(data: Data) -> Run:
    g, v = data.rand(5, 3, 7), data.rand(5, 7, 2)
    return run(torch.bmm(g, v), G=g, V=v)


def wigner(first: int, second: int, out: int) -> Tensor:
    """Real Clebsch-Gordan coefficients up to their norm, [2 first + 1, 2 second + 1, 2 out + 1]."""
    o3 = pytest.importorskip("e3nn.o3")
    return o3.wigner_3j(first, second, out, dtype=torch.float64)


def paths(most: int) -> list[tuple[int, int, int]]:
    degrees = range(most + 1)
    return [(a, b, c) for a in degrees for b in degrees for c in degrees if abs(a - b) <= c <= a + b]


def all_paths() -> Tensor:
    """CG[i,j,k,path] of all degrees up to 1, components of one operand side by side."""
    start = {0: 0, 1: 1}
    table = torch.zeros(4, 4, 4, len(paths(1)), dtype=torch.float64)
    for number, (a, b, c) in enumerate(paths(1)):
        block = wigner(a, b, c)
        i, j, k = (slice(start[degree], start[degree] + 2 * degree + 1) for degree in (a, b, c))
        table[i, j, k, number] = block
    return table


def fully_connected(data: Data) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    table = all_paths()
    x, y, w = data.rand(3, 4, 5), data.rand(3, 4), data.rand(3, table.shape[3], 5, 2)
    expected = einsum("ijkl,ziu,zj,zluw->zkw", table, x, y, w)
    return table, {"X": x, "Y": y, "W": w}, expected


@case("insum.tp", "Z[z,k,w] += CG[i,j,k,t] * X[z,i,u] * Y[z,j] * W[z,t,u,w]")
def _(data: Data) -> Run:
    table, operands, expected = fully_connected(data)
    return run(expected, CG=table, **operands)


@case("insum.tp-coo", "Z[z,K[p],w] += CG[p] * X[z,I[p],u] * Y[z,J[p]] * W[z,Path[p],u,w]")
def _(data: Data) -> Run:
    table, operands, expected = fully_connected(data)
    i, j, k, path, val = data.coo(table)
    return run(expected, out_shape=(None, 4, None), I=i, J=j, K=k, Path=path, CG=val, **operands)


@case("insum.tp-grouped", "Z[z,K[g,q],w] += CG[g,q] * X[z,I[g,q],u] * Y[z,J[g,q]] * W[z,Path[g],u,w]")
def _(data: Data) -> Run:
    table, operands, expected = fully_connected(data)
    path, i, j, k, val = data.grouped(table.permute(3, 0, 1, 2), 1, 3)
    return run(expected, out_shape=(None, 4, None), I=i, J=j, K=k, Path=path, CG=val, **operands)


@case("insum.tp-batched-matmul", "Z[z,g,q,w] += X[z,g,q,u] * W[z,g,u,w]")
def _(data: Data) -> Run:
    x, w = data.rand(3, 5, 2, 7), data.rand(3, 5, 7, 4)
    return run(torch.matmul(x, w), X=x, W=w)


# ---- Unified Convolution Framework ------------------------------------------------------------------


def conv(inputs: Tensor, weight: Tensor, **options: object) -> Tensor:
    """`torch`'s convolution on the layouts of the statements: In[n,...,c], F[...,c,d], Out[n,...,d]."""
    function = {3: nnf.conv1d, 4: nnf.conv2d, 5: nnf.conv3d}[inputs.dim()]
    out = function(inputs.movedim(-1, 1), weight.movedim(-1, 0).movedim(-1, 1), **options)
    return out.movedim(1, -1)


@case("ucf.conv1d", "Out[p] += In[p + r] * F[r]")
def _(data: Data) -> list[Run]:
    x, f = data.rand(11), data.rand(3)
    expected = conv(x.view(1, -1, 1), f.view(-1, 1, 1)).flatten()
    return [run(expected, out_shape=(9,), In=x, F=f), run(expected, sizes={"p": 9}, In=x, F=f)]


@case("ucf.conv1d-channels", "Out[n,p,d] += In[n,p + r,c] * F[r,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 11, 3), data.rand(4, 3, 5)
    return run(conv(x, f), out_shape=(None, 8, None), In=x, F=f)


@case("ucf.stride-access", "C[i] = A[2*i]")
def _(data: Data) -> Run:
    a = data.rand(9)
    return run(a[::2], out_shape=(5,), A=a)


@case("ucf.conv2d", "Out[n,p,q,d] += In[n,p + r,q + s,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 7, 5, 3), data.rand(3, 2, 3, 4)
    return run(conv(x, f), out_shape=(None, 5, 4, None), In=x, F=f)


@case("ucf.conv2d-padded", "Out[n,p,q,d] += In[n,p + r - 1,q + s - 1,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 7, 5, 3), data.rand(3, 3, 3, 4)
    return run(conv(x, f, padding=1), out_shape=(None, 7, 5, None), In=x, F=f)


@case("ucf.conv2d-strided", "Out[n,p,q,d] += In[n,2*p + r - 1,2*q + s - 1,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 7, 5, 3), data.rand(3, 3, 3, 4)
    return run(conv(x, f, padding=1, stride=2), out_shape=(None, 4, 3, None), In=x, F=f)


@case("ucf.conv2d-dilated", "Out[n,p,q,d] += In[n,p + 2*r,q + 3*s,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 7, 9, 3), data.rand(3, 2, 3, 4)
    return run(conv(x, f, dilation=(2, 3)), out_shape=(None, 3, 6, None), In=x, F=f)


@case("ucf.conv2d-channel-groups", "Out[n,p,q,g,d] += In[n,p + r,q + s,g,c] * F[g,r,s,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 7, 5, 3, 2), data.rand(3, 3, 3, 2, 4)
    weight = f.permute(1, 2, 3, 0, 4).reshape(3, 3, 2, 12)
    expected = conv(x.flatten(3), weight, groups=3).unflatten(3, (3, 4))
    return run(expected, out_shape=(None, 5, 3, None, None), In=x, F=f)


@case("ucf.conv3d", "Out[n,p,q,y,d] += In[n,p + r,q + s,y + k,c] * F[r,s,k,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(2, 5, 4, 3, 2), data.rand(3, 2, 2, 2, 3)
    return run(conv(x, f), out_shape=(None, 3, 3, 2, None), In=x, F=f)


@case("ucf.conv3d-strided", "Out[n,p,q,y,d] += In[n,2*p + r - 1,2*q + s - 1,2*y + k - 1,c] * F[r,s,k,c,d]")
def _(data: Data) -> Run:
    x, f = data.rand(1, 5, 4, 3, 2), data.rand(3, 3, 3, 2, 3)
    return run(conv(x, f, padding=1, stride=2), out_shape=(None, 3, 2, 2, None), In=x, F=f)


def pruned(data: Data, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A pruned filter F[d,c,r,s], an input In[n,c,h,w], their convolution."""
    f = data.rand(5, 3, 3, 2) * keep
    x = data.rand(2, 3, 7, 5)
    return f, x, nnf.conv2d(x, f)


@case("ucf.filter-ell", "Out[n,d,p,q] += Val[d,k] * In[n,Src[d,k],p + R[d,k],q + S[d,k]]")
def _(data: Data) -> Run:
    f, x, expected = pruned(data, data.keep(5, 3, 3, 2))
    src, r, s, val = data.ell(f, 1)
    return run(expected, out_shape=(None, None, 5, 4), In=x, Val=val, Src=src, R=r, S=s)


@case("ucf.filter-grouped", "Out[n,Dst[g],p,q] += Val[g,k] * In[n,Src[g,k],p + R[g,k],q + S[g,k]]")
def _(data: Data) -> Run:
    f, x, expected = pruned(data, data.keep(5, 3, 3, 2))
    dst, src, r, s, val = data.grouped(f, 1, 4)
    return run(expected, out_shape=(None, 5, 5, 4), In=x, Val=val, Dst=dst, Src=src, R=r, S=s)


@case("ucf.filter-grouped-strided", "Out[n,Dst[g],p,q] += Val[g,k] * In[n,Src[g,k],2*p + R[g,k] - 1,2*q + S[g,k] - 1]")
def _(data: Data) -> Run:
    f, x, _ = pruned(data, data.keep(5, 3, 3, 2))
    dst, src, r, s, val = data.grouped(f, 1, 4)
    expected = nnf.conv2d(x, f, stride=2, padding=1)
    return run(expected, out_shape=(None, 5, *expected.shape[2:]), In=x, Val=val, Dst=dst, Src=src, R=r, S=s)


@case("ucf.filter-mcrs-cccc", "Out[n,Dst[t],p,q] += Val[t] * In[n,Src[t],p + R[t],q + S[t]]")
def _(data: Data) -> Run:
    f, x, expected = pruned(data, data.keep(5, 3, 3, 2))
    dst, src, r, s, val = data.coo(f)
    return run(expected, out_shape=(None, 5, 5, 4), In=x, Val=val, Dst=dst, Src=src, R=r, S=s)


@case("ucf.filter-mcrs-uucc", "Out[n,d,p,q] += Val[d,c,k] * In[n,c,p + R[d,c,k],q + S[d,c,k]]")
def _(data: Data) -> Run:
    f, x, expected = pruned(data, data.keep(5, 3, 3, 2))
    r, s, val = data.ell(f, 2)
    return run(expected, out_shape=(None, None, 5, 4), In=x, Val=val, R=r, S=s)


@case("ucf.filter-m", "Out[n,Dst[t],p,q] += Val[t,c,r,s] * In[n,c,p + r,q + s]")
def _(data: Data) -> Run:
    keep = data.keep(5)
    f, x, expected = pruned(data, keep[:, None, None, None])
    (dst,) = keep.nonzero().unbind(1)
    return run(expected, out_shape=(None, 5, 5, 4), In=x, Val=f[dst], Dst=dst)


@case("ucf.filter-mc", "Out[n,Dst[t],p,q] += Val[t,r,s] * In[n,Src[t],p + r,q + s]")
def _(data: Data) -> Run:
    keep = data.keep(5, 3)
    f, x, expected = pruned(data, keep[:, :, None, None])
    dst, src = keep.nonzero().unbind(1)
    return run(expected, out_shape=(None, 5, 5, 4), In=x, Val=f[dst, src], Dst=dst, Src=src)


@case("ucf.filter-mc-grouped", "Out[n,Dst[g],p,q] += Val[g,k,r,s] * In[n,Src[g,k],p + r,q + s]")
def _(data: Data) -> Run:
    keep = data.keep(5, 3, share=0.7)
    f, x, expected = pruned(data, keep[:, :, None, None])
    dst, src, _ = data.grouped(keep, 1, 2)
    return run(expected, out_shape=(None, 5, 5, 4), In=x, Val=f[dst[:, None], src], Dst=dst, Src=src)


@case("ucf.filter-rs", "Out[n,d,p,q] += Val[t,d,c] * In[n,c,p + R[t],q + S[t]]")
def _(data: Data) -> Run:
    keep = data.keep(3, 2)
    f, x, expected = pruned(data, keep)
    r, s = keep.nonzero().unbind(1)
    return run(expected, out_shape=(None, None, 5, 4), In=x, Val=f[:, :, r, s].permute(2, 0, 1), R=r, S=s)


@case("ucf.filter-rsmc", "Out[n,Dst[g,k],p,q] += Val[g,k] * In[n,Src[g,k],p + R[g],q + S[g]]")
def _(data: Data) -> Run:
    f, x, expected = pruned(data, data.keep(5, 3, 3, 2))
    r, s, dst, src, val = data.grouped(f.permute(2, 3, 0, 1), 2, 4)
    return run(expected, out_shape=(None, 5, 5, 4), In=x, Val=val, Dst=dst, Src=src, R=r, S=s)


@case("ucf.im2col", "Patch[n,p,q,r,s,c] = In[n,p + r,q + s,c]")
def _(data: Data) -> Run:
    x = data.rand(2, 7, 5, 3)
    expected = x.unfold(1, 3, 1).unfold(2, 2, 1).permute(0, 1, 2, 4, 5, 3)
    return run(expected, out_shape=(None, 5, 4, 3, 2, None), In=x)


@case("ucf.im2col-matmul", "Out[n,p,q,d] += Patch[n,p,q,r,s,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    patch, f = data.rand(2, 3, 4, 3, 2, 3), data.rand(3, 2, 3, 5)
    expected = patch.flatten(3) @ f.flatten(0, 2)
    return run(expected, Patch=patch, F=f)


@case("ucf.im2col-spmm", "Out[x,d] += Patch[x,Col[d,k]] * Val[d,k]")
def _(data: Data) -> Run:
    patch, f = data.rand(13, 18), data.sparse(5, 18)
    col, val = data.ell(f, 1)
    return run(patch @ f.T, Patch=patch, Col=col, Val=val)


@case("ucf.activation-ell", "Out[n,p,q,d] += Val[n,p + r,q + s,k] * F[r,s,Src[n,p + r,q + s,k],d]")
def _(data: Data) -> Run:
    x, f = data.sparse(2, 7, 5, 3), data.rand(3, 2, 3, 4)
    src, val = data.ell(x, 3)
    return run(conv(x, f), out_shape=(None, 5, 4, None), Val=val, Src=src, F=f)


@case("ucf.activation-coo", "Out[Batch[t],H[t] - r + 2,V[t] - s + 2,d] += Val[t] * F[r,s,Src[t],d]")
def _(data: Data) -> Run:
    x, f = data.sparse(2, 7, 5, 3), data.rand(3, 3, 3, 4)
    batch, h, v, src, val = data.coo(x)
    tensors = {"Batch": batch, "H": h, "V": v, "Src": src, "Val": val, "F": f}
    return run(conv(x, f, padding=2), out_shape=(2, 9, 7, None), **tensors)


@case("ucf.dual", "Out[n,p,q,Dst[t]] += Val[t] * In[Pos[n,p + R[t],q + S[t],Src[t]]]")
def _(data: Data) -> Run:
    x, f = data.sparse(2, 7, 5, 3), data.sparse(3, 2, 3, 4)
    r, s, src, dst, val = data.coo(f)
    tensors = {"In": x[x != 0], "Pos": positions(x), "Val": val, "R": r, "S": s, "Src": src, "Dst": dst}
    return run(conv(x, f), out_shape=(None, 5, 4, 4), **tensors)


@case("ucf.masked", "Out[n,p,q,d] += Mask[n,p,q] * In[n,p + r,q + s,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    x, f, mask = data.rand(2, 7, 5, 3), data.rand(3, 2, 3, 4), data.keep(2, 5, 4)
    return run(mask[..., None] * conv(x, f), Mask=mask, In=x, F=f)


@case("ucf.submanifold", "Out[n,p,q,d] += Mask[n,p,q] * In[n,p + r - 1,q + s - 1,c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    mask, f = data.keep(2, 7, 5), data.rand(3, 3, 3, 4)
    x = data.rand(2, 7, 5, 3) * mask[..., None]
    return run(mask[..., None] * conv(x, f, padding=1), Mask=mask, In=x, F=f)


def voxels(data: Data, shape: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Occupancy, features of the occupied cells, a filter, and the submanifold convolution at those cells."""
    mask, f = data.keep(*shape), data.rand(*kernel, 3, 4)
    features = data.rand(int(mask.sum()), 3)
    dense = torch.zeros(*shape, 3, dtype=torch.float64)
    dense[mask != 0] = features
    return mask, features, f, conv(dense, f, padding=tuple(size // 2 for size in kernel))[mask != 0]


@case("ucf.submanifold-1d", "Out[t,d] += In[Pos[Batch[t],H[t] + r - 1],c] * F[r,c,d]")
def _(data: Data) -> Run:
    mask, features, f, expected = voxels(data, (2, 9), (3,))
    batch, h = mask.nonzero().unbind(1)
    return run(expected, In=features, F=f, Pos=positions(mask), Batch=batch, H=h)


@case("ucf.submanifold-2d", "Out[t,d] += In[Pos[Batch[t],H[t] + r - 1,V[t] + s - 1],c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    mask, features, f, expected = voxels(data, (2, 7, 5), (3, 3))
    batch, h, v = mask.nonzero().unbind(1)
    return run(expected, In=features, F=f, Pos=positions(mask), Batch=batch, H=h, V=v)


@case("ucf.submanifold-3d", "Out[t,d] += In[Pos[Batch[t],H[t] + r - 1,V[t] + s - 1,D[t] + k - 1],c] * F[r,s,k,c,d]")
def _(data: Data) -> Run:
    mask, features, f, expected = voxels(data, (2, 5, 4, 3), (3, 3, 3))
    batch, h, v, depth = mask.nonzero().unbind(1)
    return run(expected, In=features, F=f, Pos=positions(mask), Batch=batch, H=h, V=v, D=depth)


@case("ucf.masked-strided", "Out[t,d] += In[Pos[Batch[t],2*H[t] + r - 1,2*V[t] + s - 1],c] * F[r,s,c,d]")
def _(data: Data) -> Run:
    mask, target, f = data.keep(2, 7, 5), data.keep(2, 4, 3), data.rand(3, 3, 3, 4)
    x = data.rand(2, 7, 5, 3) * mask[..., None]
    expected = conv(x, f, padding=1, stride=2)[target != 0]
    batch, h, v = target.nonzero().unbind(1)
    return run(expected, In=x[mask != 0], F=f, Pos=positions(mask), Batch=batch, H=h, V=v)


def neighbours(data: Data) -> tuple[Tensor, Tensor]:
    """Occupancy of a 7 x 5 grid, and Map[x,y,o] by comparing the coordinates of all pairs with the 3 x 3 offsets."""
    mask = data.keep(7, 5)
    at = mask.nonzero()
    offsets = torch.cartesian_prod(torch.arange(3), torch.arange(3)) - 1
    found = (at[:, None, None] + offsets == at[None, :, None]).all(-1)
    return mask, found.double()


@case("ucf.map-build", "Map[OutPos[p,q],InPos[p + r - 1,q + s - 1],Off[r,s]] = 1")
def _(data: Data) -> Run:
    mask, found = neighbours(data)
    place = positions(mask)
    tensors = {"OutPos": place, "InPos": place.clone(), "Off": torch.arange(9).view(3, 3)}
    return run(found, out_shape=tuple(found.shape), **tensors)


@case("ucf.map-coo", "Out[Dst[p],d] += In[Src[p],c] * W[Off[p],c,d]")
def _(data: Data) -> Run:
    _, found = neighbours(data)
    x, w = data.rand(len(found), 3), data.rand(9, 3, 4)
    off, dst, src = found.permute(2, 0, 1).nonzero().unbind(1)
    expected = einsum("xyo,yc,ocd->xd", found, x, w)
    return run(expected, out_shape=(len(found), None), In=x, W=w, Dst=dst, Src=src, Off=off)


@case("ucf.map-ell", "Out[x,d] += In[Map[x,o],c] * W[o,c,d]")
def _(data: Data) -> Run:
    _, found = neighbours(data)
    x, w = data.rand(len(found), 3), data.rand(9, 3, 4)
    table = torch.where(found.any(1), found.argmax(1), -1)
    return run(einsum("xyo,yc,ocd->xd", found, x, w), In=x, W=w, Map=table)


@case("ucf.odd-elementwise", "C[i] += A[2*i + 1] * B[i]")
def _(data: Data) -> Run:
    a, b = data.rand(8), data.rand(4)
    return run(a[1::2] * b, A=a, B=b)


@case("ucf.odd-locate", "C[i] += A[Pos[2*i + 1]] * B[i]")
def _(data: Data) -> Run:
    a, b = data.sparse(8), data.rand(4)
    return run(a[1::2] * b, A=a[a != 0], Pos=positions(a), B=b)


@case("ucf.elementwise-merge", "C[Row[p]] += A[p] * B[Pos[Row[p]]]")
def _(data: Data) -> Run:
    a, b = data.sparse(9), data.sparse(9)
    (row,) = a.nonzero().unbind(1)
    return run(a * b, out_shape=(9,), Row=row, A=a[a != 0], B=b[b != 0], Pos=positions(b))


@case("ucf.conv1d-strided", "C[i] += A[2*i + k] * B[k]")
def _(data: Data) -> Run:
    a, b = data.rand(11), data.rand(3)
    return run(a.unfold(0, 3, 2) @ b, out_shape=(5,), A=a, B=b)


@case("ucf.conv1d-strided-locate", "C[i] += A[2*i + Col[t]] * Val[t]")
def _(data: Data) -> Run:
    a, b = data.rand(13), data.sparse(5)
    col, val = data.coo(b)
    return run(a.unfold(0, 5, 2) @ b, out_shape=(5,), A=a, Col=col, Val=val)


@case("ucf.conv1d-merge", "C[i] += A[Pos[i + Col[t]]] * Val[t]")
def _(data: Data) -> Run:
    a, b = data.sparse(13), data.sparse(5)
    col, val = data.coo(b)
    return run(a.unfold(0, 5, 1) @ b, out_shape=(9,), A=a[a != 0], Pos=positions(a), Col=col, Val=val)


@case("ucf.conv1d-scatter", "C[Row[s] - Col[t] + 4] += A[s] * B[t]")
def _(data: Data) -> Run:
    a, b = data.sparse(13), data.sparse(5)
    (row, left), (col, right) = data.coo(a), data.coo(b)
    return run(nnf.pad(a, (4, 4)).unfold(0, 5, 1) @ b, out_shape=(17,), Row=row, A=left, Col=col, B=right)


@case("ucf.affine", "C[i] += A[2*i + 3*j + k + 3] * B[j,k]")
def _(data: Data) -> Run:
    a, b = data.rand(17), data.rand(3, 2)
    windows = a[3:].as_strided((4, 3, 2), (2, 3, 1), 3)
    return run((windows * b).sum((1, 2)), out_shape=(4,), A=a, B=b)


# ---- Sgap ---------------------------------------------------------------------------------------------


def third_order(data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A sparse A[i,k,l], factors X1[k,j] and X2[l,j], and the MTTKRP of them."""
    a, x1, x2 = data.sparse(5, 4, 7, share=0.3), data.rand(4, 3), data.rand(7, 3)
    khatri_rao = (x1[:, None] * x2[None]).flatten(0, 1)
    return a, x1, x2, a.flatten(1) @ khatri_rao


@case("sgap.mttkrp", "Y[i,j] += A[i,k,l] * X1[k,j] * X2[l,j]")
def _(data: Data) -> Run:
    a, x1, x2, expected = third_order(data)
    return run(expected, A=a, X1=x1, X2=x2)


@case("sgap.mttkrp-coo", "Y[I[p],j] += Val[p] * X1[K[p],j] * X2[L[p],j]")
def _(data: Data) -> Run:
    a, x1, x2, expected = third_order(data)
    i, k, l, val = data.coo(a)
    return run(expected, out_shape=(5, None), Val=val, I=i, K=k, L=l, X1=x1, X2=x2)


@case("sgap.mttkrp-grouped", "Y[I[g],j] += Val[g,q] * X1[K[g,q],j] * X2[L[g,q],j]")
def _(data: Data) -> Run:
    a, x1, x2, expected = third_order(data)
    i, k, l, val = data.grouped(a, 1, 3)
    return run(expected, out_shape=(5, None), Val=val, I=i, K=k, L=l, X1=x1, X2=x2)


@case("sgap.mttkrp-fibers", "Y[I[g],j] += Val[g,q] * X1[K[g],j] * X2[L[g,q],j]")
def _(data: Data) -> Run:
    a, x1, x2, expected = third_order(data)
    i, k, l, val = data.grouped(a, 2, 3)
    return run(expected, out_shape=(5, None), Val=val, I=i, K=k, L=l, X1=x1, X2=x2)


@case("sgap.mttkrp-first-reduction", "T[g,j] += Val[g,q] * X2[L[g,q],j]")
def _(data: Data) -> Run:
    a, _, x2, _ = third_order(data)
    i, k, l, val = data.grouped(a, 2, 7)
    return run(a[i, k] @ x2, Val=val, L=l, X2=x2)


@case("sgap.mttkrp-second-reduction", "Y[I[g],j] += T[g,j] * X1[K[g],j]")
def _(data: Data) -> Run:
    a, x1, x2, expected = third_order(data)
    i, k = (a != 0).any(2).nonzero().unbind(1)
    return run(expected, out_shape=(5, None), T=a[i, k] @ x2, I=i, K=k, X1=x1)


@case("sgap.ttm", "Y[i,j,l] += A[i,j,k] * X[k,l]")
def _(data: Data) -> Run:
    a, x = data.sparse(5, 4, 7), data.rand(7, 3)
    return run(a @ x, A=a, X=x)


@case("sgap.ttm-coo", "Y[I[p],J[p],l] += Val[p] * X[K[p],l]")
def _(data: Data) -> Run:
    a, x = data.sparse(5, 4, 7), data.rand(7, 3)
    i, j, k, val = data.coo(a)
    return run(a @ x, out_shape=(5, 4, None), Val=val, I=i, J=j, K=k, X=x)


@case("sgap.ttm-grouped", "Y[I[g],J[g],l] += Val[g,q] * X[K[g,q],l]")
def _(data: Data) -> Run:
    a, x = data.sparse(5, 4, 7), data.rand(7, 3)
    i, j, k, val = data.grouped(a, 2, 2)
    return run(a @ x, out_shape=(5, 4, None), Val=val, I=i, J=j, K=k, X=x)


@case("sgap.ttm-fibers", "Y[Fiber[p],l] += Val[p] * X[K[p],l]")
def _(data: Data) -> Run:
    a, x = data.sparse(5, 4, 7), data.rand(7, 3)
    full = (a != 0).any(2)
    i, j, k, val = data.coo(a)
    fiber = positions(full)[i, j]
    return run((a @ x)[full], out_shape=(int(full.sum()), None), Val=val, Fiber=fiber, K=k, X=x)


@case("sgap.sddmm", "Y[m,n] += A[m,n] * X1[m,k] * X2[k,n]")
def _(data: Data) -> Run:
    a, x1, x2 = data.sparse(5, 7), data.rand(5, 3), data.rand(3, 7)
    return run(a * (x1 @ x2), A=a, X1=x1, X2=x2)


@case("sgap.sddmm-coo", "Y[p] += Val[p] * X1[Row[p],k] * X2[k,Col[p]]")
def _(data: Data) -> Run:
    a, x1, x2 = data.sparse(5, 7), data.rand(5, 3), data.rand(3, 7)
    row, col = a.nonzero().int().unbind(1)
    return run((a * (x1 @ x2))[a != 0], Val=a[a != 0], Row=row, Col=col, X1=x1, X2=x2)


@case("sgap.sddmm-grouped", "Y[g,q] += Val[g,q] * X1[Row[g],k] * X2[k,Col[g,q]]")
def _(data: Data) -> Run:
    a, x1, x2 = data.sparse(5, 7), data.rand(5, 3), data.rand(3, 7)
    row, col, val = data.grouped(a, 1, 2)
    expected = (a * (x1 @ x2))[row[:, None], col] * (col >= 0)
    return run(expected, Val=val, Row=row, Col=col, X1=x1, X2=x2)


@case("sgap.sddmm-dense-output", "Y[Row[p],Col[p]] += Val[p] * X1[Row[p],k] * X2[k,Col[p]]")
def _(data: Data) -> Run:
    a, x1, x2 = data.sparse(5, 7), data.rand(5, 3), data.rand(3, 7)
    row, col, val = data.coo(a)
    return run(a * (x1 @ x2), out_shape=(5, 7), Val=val, Row=row, Col=col, X1=x1, X2=x2)


@case("sgap.spmm-product", "T[p,n] = Val[p] * B[Col[p],n]")
def _(data: Data) -> Run:
    val, col, b = data.rand(9), data.pick(7, 9), data.rand(7, 3)
    return run(torch.diag(val) @ one_hot(col, 7) @ b, Val=val, Col=col, B=b)


@case("sgap.spmm-segment", "C[Row[p],n] += T[p,n]")
def _(data: Data) -> Run:
    t, row = data.rand(9, 3), data.pick(5, 9).sort().values
    return run(one_hot(row, 5).T @ t, out_shape=(5, None), T=t, Row=row)


def messages(data: Data) -> tuple[dict[str, Tensor], Tensor]:
    """Edges of a graph of 5 nodes where node 0 receives nothing, and each message at its receiver, [n, e, f]."""
    x, val = data.rand(5, 3), data.rand(11)
    src, dst = data.pick(5, 11), data.pick(4, 11) + 1
    sent = (one_hot(src, 5) @ x) * val[:, None]
    at_receiver = torch.where(one_hot(dst, 5).T[..., None] != 0, sent, torch.nan)
    return {"X": x, "Val": val, "Src": src, "Dst": dst}, at_receiver


@case("sgap.messages-sum", "Y[Dst[e],f] += Val[e] * X[Src[e],f]")
@case("graphcuda.ax", "Y[Dst[e],f] += Val[e] * X[Src[e],f]")
def _(data: Data) -> Run:
    tensors, at_receiver = messages(data)
    return run(at_receiver.nansum(1), out_shape=(5, None), **tensors)


@case("sgap.messages-max", "Y[Dst[e],f] max= Val[e] * X[Src[e],f]")
def _(data: Data) -> Run:
    tensors, at_receiver = messages(data)
    best = at_receiver.nan_to_num(nan=-torch.inf).amax(1)
    return run(best.where(best.isfinite(), 0), out_shape=(5, None), **tensors)


@case("sgap.messages-min", "Y[Dst[e],f] min= Val[e] * X[Src[e],f]")
def _(data: Data) -> Run:
    tensors, at_receiver = messages(data)
    best = at_receiver.nan_to_num(nan=torch.inf).amin(1)
    return run(best.where(best.isfinite(), 0), out_shape=(5, None), **tensors)


# ---- GraphCUDA ----------------------------------------------------------------------------------------


@case("graphcuda.three-matrices", "Y[m,n] += A[m,k] * B[k,l] * C[l,n]")
def _(data: Data) -> Run:
    a, b, c = data.rand(5, 7), data.rand(7, 3), data.rand(3, 4)
    return run(a @ b @ c, A=a, B=b, C=c)


@case("graphcuda.attention-chain", "Y[m,d] += Q[m,k] * K[n,k] * V[n,d]")
def _(data: Data) -> Run:
    q, k, v = data.rand(5, 3), data.rand(7, 3), data.rand(7, 4)
    return run(q @ k.T @ v, Q=q, K=k, V=v)


def graph(data: Data) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """A weighted adjacency matrix of 9 nodes, its edges, and X, W, dY."""
    a = data.sparse(9, 9, share=0.3)
    dst, src = a.nonzero().unbind(1)
    edges = {"Dst": dst, "Src": src, "Val": a[dst, src]}
    return a, edges, {"X": data.rand(9, 5), "W": data.rand(5, 3), "dY": data.rand(9, 3)}


def only(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


@case("graphcuda.axw", "Y[Dst[e],h] += Val[e] * X[Src[e],f] * W[f,h]")
def _(data: Data) -> Run:
    a, edges, dense = graph(data)
    return run(a @ dense["X"] @ dense["W"], out_shape=(9, None), **edges, **only(dense, "X", "W"))


@case("graphcuda.axw-bias", "Y[Dst[e],h] += Val[e] * X[Src[e],f] * W[f,h]")
def _(data: Data) -> Run:
    a, edges, dense = graph(data)
    start = data.rand(3).expand(9, 3)
    return run(a @ dense["X"] @ dense["W"] + start, Y=start, **edges, **only(dense, "X", "W"))


@case("graphcuda.bias", "Y[n,h] += Bias[h]")
def _(data: Data) -> Run:
    y, bias = data.rand(9, 3), data.rand(3)
    return run(y + bias, sizes={"n": 9}, Y=y, Bias=bias)


@case("graphcuda.relu", "Y[n,h] max= 0")
def _(data: Data) -> Run:
    y = data.rand(9, 3)
    return run(y.relu(), sizes={"n": 9, "h": 3}, Y=y)


@case("graphcuda.relu-backward", "dP[n,h] = Mask[n,h] * dY[n,h]")
def _(data: Data) -> Run:
    pre, grad = data.rand(9, 3).requires_grad_(), data.rand(9, 3)
    (expected,) = torch.autograd.grad(pre.relu(), pre, grad)
    return run(expected, Mask=(pre.detach() > 0).double(), dY=grad)


@case("graphcuda.bias-backward", "dBias[h] += dY[n,h]")
def _(data: Data) -> Run:
    grad = data.rand(9, 3)
    return run(grad.sum(0), dY=grad)


@case("graphcuda.axw-dx", "dX[Src[e],f] += Val[e] * dY[Dst[e],h] * W[f,h]")
def _(data: Data) -> Run:
    a, edges, dense = graph(data)
    return run(a.T @ dense["dY"] @ dense["W"].T, out_shape=(9, None), **edges, **only(dense, "W", "dY"))


@case("graphcuda.axw-dw", "dW[f,h] += Val[e] * X[Src[e],f] * dY[Dst[e],h]")
def _(data: Data) -> Run:
    a, edges, dense = graph(data)
    return run((a @ dense["X"]).T @ dense["dY"], **edges, **only(dense, "X", "dY"))


@case("graphcuda.axw-da", "dVal[e] += dY[Dst[e],h] * X[Src[e],f] * W[f,h]")
def _(data: Data) -> Run:
    _, edges, dense = graph(data)
    expected = (dense["dY"] @ (dense["X"] @ dense["W"]).T)[edges["Dst"], edges["Src"]]
    return run(expected, **only(edges, "Dst", "Src"), **dense)


def row_blocks(data: Data) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Blocks of 3 rows with their distinct columns: the matrix (9, 7), Col[t,q], Val[t,a,q], and X, W, dY."""
    a = data.sparse(9, 7, share=0.2)
    used = a.view(3, 3, 7).ne(0).any(1)
    (col, _), width = data.ell(used.double(), 1), int(used.sum(1).max())
    val = torch.stack([a.view(3, 3, 7)[t][:, col[t]] for t in range(3)])
    val = torch.where((col >= 0)[:, None], val, 2.0)
    assert val.shape == (3, 3, width)
    return a, col, val, {"X": data.rand(7, 5), "W": data.rand(5, 4), "dY": data.rand(9, 4)}


@case("graphcuda.row-block", "Y[3*t + a,f] += Val[t,a,q] * X[Col[t,q],f]")
def _(data: Data) -> Run:
    a, col, val, dense = row_blocks(data)
    return run(a @ dense["X"], out_shape=(9, None), Val=val, Col=col, X=dense["X"])


@case("graphcuda.row-block-axw", "Y[3*t + a,h] += Val[t,a,q] * X[Col[t,q],f] * W[f,h]")
def _(data: Data) -> Run:
    a, col, val, dense = row_blocks(data)
    return run(a @ dense["X"] @ dense["W"], out_shape=(9, None), Val=val, Col=col, **only(dense, "X", "W"))


@case("graphcuda.row-block-grouped", "Y[Row[g],a,h] += Val[g,a,q] * X[Col[g,q],f] * W[f,h]")
def _(data: Data) -> Run:
    a, _, _, dense = row_blocks(data)
    blocks = a.view(3, 3, 7)
    row, col, _ = data.grouped(blocks.ne(0).any(1).double(), 1, 2)
    val = torch.stack([blocks[t][:, at] for t, at in zip(row, col, strict=True)])
    expected = (a @ dense["X"] @ dense["W"]).view(3, 3, 4)
    return run(expected, out_shape=(3, None, None), Val=val, Row=row, Col=col, **only(dense, "X", "W"))


@case("graphcuda.row-block-dx", "dX[Col[t,q],f] += Val[t,a,q] * dY[3*t + a,h] * W[f,h]")
def _(data: Data) -> Run:
    a, col, val, dense = row_blocks(data)
    expected = a.T @ dense["dY"] @ dense["W"].T
    return run(expected, out_shape=(7, None), Val=val, Col=col, **only(dense, "W", "dY"))


@case("graphcuda.row-block-dw", "dW[f,h] += Val[t,a,q] * X[Col[t,q],f] * dY[3*t + a,h]")
def _(data: Data) -> Run:
    a, col, val, dense = row_blocks(data)
    return run((a @ dense["X"]).T @ dense["dY"], Val=val, Col=col, **only(dense, "X", "dY"))


@case("graphcuda.row-block-da", "dVal[t,a,q] += dY[3*t + a,h] * X[Col[t,q],f] * W[f,h]")
def _(data: Data) -> Run:
    _, col, _, dense = row_blocks(data)
    full = (dense["dY"] @ (dense["X"] @ dense["W"]).T).view(3, 3, 7)
    expected = torch.stack([full[t][:, col[t]] * (col[t] >= 0) for t in range(3)])
    return run(expected, out_shape=(None, 3, None), Col=col, **dense)


# ---- OpenEquivariance -----------------------------------------------------------------------------------


def one_block(data: Data) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The block of degrees (2, 1, 1), its entries as I, J, K, CG, and x, y, W, dz."""
    table = wigner(2, 1, 1)
    i, j, k, val = data.coo(table)
    operands = {"X": data.rand(5), "Y": data.rand(3), "W": data.rand(3, 4), "dZ": data.rand(4)}
    return table, {"I": i, "J": j, "K": k, "CG": val}, operands


@case("oeq.kronecker", "T[3*i + j] = X[i] * Y[j]")
def _(data: Data) -> Run:
    x, y = data.rand(5), data.rand(3)
    return run(torch.kron(x, y), out_shape=(15,), X=x, Y=y)


@case("oeq.tp-dense", "Z[l] += P[i,j,k] * X[i] * Y[j] * W[k,l]")
def _(data: Data) -> Run:
    table, _, ops = one_block(data)
    expected = einsum("ijk,i,j,kl->l", table, ops["X"], ops["Y"], ops["W"])
    return run(expected, P=table, **only(ops, "X", "Y", "W"))


@case("oeq.tp", "Z[l] += CG[p] * X[I[p]] * Y[J[p]] * W[K[p],l]")
def _(data: Data) -> Run:
    table, entries, ops = one_block(data)
    expected = einsum("ijk,i,j,kl->l", table, ops["X"], ops["Y"], ops["W"])
    return run(expected, **entries, **only(ops, "X", "Y", "W"))


@case("oeq.tp-dx", "dX[I[p]] += CG[p] * Y[J[p]] * W[K[p],l] * dZ[l]")
def _(data: Data) -> Run:
    table, entries, ops = one_block(data)
    expected = einsum("ijk,j,k->i", table, ops["Y"], ops["W"] @ ops["dZ"])
    return run(expected, out_shape=(5,), **entries, **only(ops, "Y", "W", "dZ"))


@case("oeq.tp-dy", "dY[J[p]] += CG[p] * X[I[p]] * W[K[p],l] * dZ[l]")
def _(data: Data) -> Run:
    table, entries, ops = one_block(data)
    expected = einsum("ijk,i,k->j", table, ops["X"], ops["W"] @ ops["dZ"])
    return run(expected, out_shape=(3,), **entries, **only(ops, "X", "W", "dZ"))


@case("oeq.tp-dw", "dW[K[p],l] += CG[p] * X[I[p]] * Y[J[p]] * dZ[l]")
def _(data: Data) -> Run:
    table, entries, ops = one_block(data)
    expected = torch.outer(einsum("ijk,i,j->k", table, ops["X"], ops["Y"]), ops["dZ"])
    return run(expected, out_shape=(3, None), **entries, **only(ops, "X", "Y", "dZ"))


@case("oeq.subkernel-a", "Z[K[p]] += W * CG[p] * X[I[p]] * Y[J[p]]")
def _(data: Data) -> Run:
    table, entries, ops = one_block(data)
    w = data.rand()
    expected = w * einsum("ijk,i,j->k", table, ops["X"], ops["Y"])
    return run(expected, out_shape=(3,), W=w, **entries, **only(ops, "X", "Y"))


# The dense form of a statement is the subscripts of X, Y, W and Z. It serves the forward statement and every first
# and second derivative alike, since these differ only in what stands where. `e` with `n` and `m` is the graph: an
# edge takes X from node n and gives to node m.
UVU = ("zui", "zj", "zu", "zuk")
UVW = ("zui", "zj", "zuw", "zwk")
UVW_SHARED = ("zui", "zj", "uw", "zwk")
CONV_UVU = ("nui", "ej", "eu", "muk")
CONV_UVW = ("nui", "ej", "euw", "mwk")
SHAPES = {"z": 3, "u": 5, "w": 4, "i": 5, "j": 3, "k": 3, "e": 11, "n": 6, "m": 6}
PLACES = {"X": 0, "Y": 1, "W": 2, "dZ": 3, "GX": 0, "GY": 1, "GW": 2}
Form = tuple[str, str, str, str]


def product(data: Data, form: Form) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The block (2, 1, 1); its entries, with the graph's edges; X, Y, W, dZ and GX, GY, GW."""
    table = wigner(2, 1, 1)
    i, j, k, val = data.coo(table)
    ops = {name: data.rand(*(SHAPES[letter] for letter in form[place])) for name, place in PLACES.items()}
    ops |= {"Src": data.pick(6, 11), "Dst": data.pick(6, 11).sort().values}
    return table, {"I": i, "J": j, "K": k, "CG": val}, ops


def dense_product(table: Tensor, form: Form, result: int, names: list[str], ops: dict[str, Tensor]) -> Tensor:
    terms = [form[PLACES[name]] for name in names]
    values = [ops[name] for name in names]
    if "e" in form[1]:
        terms += ["en", "em"]
        values += [one_hot(ops["Src"], 6), one_hot(ops["Dst"], 6)]
    return einsum(f"ijk,{','.join(terms)}->{form[result]}", table, *values)


def product_case(key: str, statement: str, form: Form, result: int) -> None:
    """Register a statement of the product; its operands are read off its text."""
    names = re.findall(r"\b(G?[XYW]|dZ)\[", statement.split("= ")[1])
    graph_names = [name for name in ("Src", "Dst") if f"{name}[" in statement]

    @case(key, statement)
    def _(data: Data) -> Run:
        table, entries, ops = product(data, form)
        expected = dense_product(table, form, result, names, ops)
        used = {name: value for name, value in entries.items() if f"{name}[" in statement}
        return run(expected, out_shape=tuple(expected.shape), **used, **only(ops, *names, *graph_names))


for _key, _statement, _form, _result in (
    ("oeq.uvu", "Z[z,u,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * W[z,u]", UVU, 3),
    ("oeq.uvu-dx", "dX[z,u,I[p]] += CG[p] * Y[z,J[p]] * W[z,u] * dZ[z,u,K[p]]", UVU, 0),
    ("oeq.uvu-dy", "dY[z,J[p]] += CG[p] * X[z,u,I[p]] * W[z,u] * dZ[z,u,K[p]]", UVU, 1),
    ("oeq.uvu-dw", "dW[z,u] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * dZ[z,u,K[p]]", UVU, 2),
    ("oeq.uvw", "Z[z,w,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * W[z,u,w]", UVW, 3),
    ("oeq.uvw-shared", "Z[z,w,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * W[u,w]", UVW_SHARED, 3),
    ("oeq.uvw-dx", "dX[z,u,I[p]] += CG[p] * Y[z,J[p]] * W[z,u,w] * dZ[z,w,K[p]]", UVW, 0),
    ("oeq.uvw-dy", "dY[z,J[p]] += CG[p] * X[z,u,I[p]] * W[z,u,w] * dZ[z,w,K[p]]", UVW, 1),
    ("oeq.uvw-dw", "dW[z,u,w] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * dZ[z,w,K[p]]", UVW, 2),
    ("oeq.op1-x", "LX[z,u,I[p]] += CG[p] * GY[z,J[p]] * W[z,u] * dZ[z,u,K[p]]", UVU, 0),
    ("oeq.op2-x", "LX[z,u,I[p]] += CG[p] * Y[z,J[p]] * GW[z,u] * dZ[z,u,K[p]]", UVU, 0),
    ("oeq.op1-y", "LY[z,J[p]] += CG[p] * GX[z,u,I[p]] * W[z,u] * dZ[z,u,K[p]]", UVU, 1),
    ("oeq.op2-y", "LY[z,J[p]] += CG[p] * X[z,u,I[p]] * GW[z,u] * dZ[z,u,K[p]]", UVU, 1),
    ("oeq.op4-w", "LW[z,u] += CG[p] * GX[z,u,I[p]] * Y[z,J[p]] * dZ[z,u,K[p]]", UVU, 2),
    ("oeq.op5-w", "LW[z,u] += CG[p] * X[z,u,I[p]] * GY[z,J[p]] * dZ[z,u,K[p]]", UVU, 2),
    ("oeq.op3", "LZ[z,u,K[p]] += CG[p] * GX[z,u,I[p]] * Y[z,J[p]] * W[z,u]", UVU, 3),
    ("oeq.op6", "LZ[z,u,K[p]] += CG[p] * X[z,u,I[p]] * GY[z,J[p]] * W[z,u]", UVU, 3),
    ("oeq.op7", "LZ[z,u,K[p]] += CG[p] * X[z,u,I[p]] * Y[z,J[p]] * GW[z,u]", UVU, 3),
    ("oeq.conv", "Z[Dst[e],u,K[p]] += CG[p] * X[Src[e],u,I[p]] * Y[e,J[p]] * W[e,u]", CONV_UVU, 3),
    ("oeq.conv-uvw", "Z[Dst[e],w,K[p]] += CG[p] * X[Src[e],u,I[p]] * Y[e,J[p]] * W[e,u,w]", CONV_UVW, 3),
    ("oeq.conv-dx", "dX[Src[e],u,I[p]] += CG[p] * Y[e,J[p]] * W[e,u] * dZ[Dst[e],u,K[p]]", CONV_UVU, 0),
    ("oeq.conv-dy", "dY[e,J[p]] += CG[p] * X[Src[e],u,I[p]] * W[e,u] * dZ[Dst[e],u,K[p]]", CONV_UVU, 1),
    ("oeq.conv-dw", "dW[e,u] += CG[p] * X[Src[e],u,I[p]] * Y[e,J[p]] * dZ[Dst[e],u,K[p]]", CONV_UVU, 2),
    ("oeq.conv-op1-x", "LX[Src[e],u,I[p]] += CG[p] * GY[e,J[p]] * W[e,u] * dZ[Dst[e],u,K[p]]", CONV_UVU, 0),
    ("oeq.conv-op2-x", "LX[Src[e],u,I[p]] += CG[p] * Y[e,J[p]] * GW[e,u] * dZ[Dst[e],u,K[p]]", CONV_UVU, 0),
    ("oeq.conv-op1-y", "LY[e,J[p]] += CG[p] * GX[Src[e],u,I[p]] * W[e,u] * dZ[Dst[e],u,K[p]]", CONV_UVU, 1),
    ("oeq.conv-op2-y", "LY[e,J[p]] += CG[p] * X[Src[e],u,I[p]] * GW[e,u] * dZ[Dst[e],u,K[p]]", CONV_UVU, 1),
    ("oeq.conv-op4-w", "LW[e,u] += CG[p] * GX[Src[e],u,I[p]] * Y[e,J[p]] * dZ[Dst[e],u,K[p]]", CONV_UVU, 2),
    ("oeq.conv-op5-w", "LW[e,u] += CG[p] * X[Src[e],u,I[p]] * GY[e,J[p]] * dZ[Dst[e],u,K[p]]", CONV_UVU, 2),
    ("oeq.conv-op3", "LZ[Dst[e],u,K[p]] += CG[p] * GX[Src[e],u,I[p]] * Y[e,J[p]] * W[e,u]", CONV_UVU, 3),
    ("oeq.conv-op6", "LZ[Dst[e],u,K[p]] += CG[p] * X[Src[e],u,I[p]] * GY[e,J[p]] * W[e,u]", CONV_UVU, 3),
    ("oeq.conv-op7", "LZ[Dst[e],u,K[p]] += CG[p] * X[Src[e],u,I[p]] * Y[e,J[p]] * GW[e,u]", CONV_UVU, 3),
):
    product_case(_key, _statement, _form, _result)


@case("oeq.uvw-contraction", "T[u,K[p]] += CG[p] * X[u,I[p]] * Y[J[p]]")
def _(data: Data) -> Run:
    table, entries, ops = one_block(data)
    x = data.rand(7, 5)
    expected = einsum("ijk,ui,j->uk", table, x, ops["Y"])
    return run(expected, out_shape=(None, 3), X=x, Y=ops["Y"], **entries)


@case("oeq.uvw-weights", "Z[w,k] += W[w,u] * T[u,k]")
def _(data: Data) -> Run:
    w, t = data.rand(4, 7), data.rand(7, 3)
    return run(w @ t, W=w, T=t)


@case("oeq.uvw-weights-transposed", "GT[u,k] += W[w,u] * dZ[w,k]")
def _(data: Data) -> Run:
    w, grad = data.rand(4, 7), data.rand(4, 3)
    return run(w.T @ grad, W=w, dZ=grad)


@case("oeq.conv-gather", "XE[e,u,i] = X[Src[e],u,i]")
def _(data: Data) -> Run:
    x, src = data.rand(6, 5, 3), data.pick(6, 11)
    return run((one_hot(src, 6) @ x.flatten(1)).view(11, 5, 3), X=x, Src=src)


@case("oeq.conv-scatter", "Z[Dst[e],u,k] += ZE[e,u,k]")
def _(data: Data) -> Run:
    ze, dst = data.rand(11, 5, 3), data.pick(6, 11)
    return run((one_hot(dst, 6).T @ ze.flatten(1)).view(6, 5, 3), out_shape=(6, None, None), ZE=ze, Dst=dst)


@case("oeq.problem", "Z[z,ZAt[p,w]] += CG[p] * X[z,XAt[p,u]] * Y[z,YAt[p]] * W[z,WAt[p,u,w]]")
def _(data: Data) -> Run:
    """x = 3x2e + 2x1e, y = 1x3e + 1x1e, z = 3x5e + 2x2e + 4x3e; subkernels (1,1,1,B), (1,2,2,C), (1,2,3,C)."""
    x, y, w = data.rand(3, 21), data.rand(3, 10), data.rand(3, 3 + 6 + 12)
    x1, y1, y2 = x[:, :15].reshape(3, 3, 5), y[:, :7], y[:, 7:]
    parts = [
        einsum("ijk,zui,zj,zu->zuk", wigner(2, 3, 5), x1, y1, w[:, :3]),
        einsum("ijk,zui,zj,zuw->zwk", wigner(2, 1, 2), x1, y2, w[:, 3:9].reshape(3, 3, 2)),
        einsum("ijk,zui,zj,zuw->zwk", wigner(2, 1, 3), x1, y2, w[:, 9:].reshape(3, 3, 4)),
    ]
    rows: list[tuple[float, list[int], int, list[int], list[list[int]]]] = []
    # Degrees in y and z, where y, z and the weights begin, multiplicity in z (0: the weights are diagonal).
    for ly, lz, y0, z0, w0, many in ((3, 5, 0, 0, 0, 0), (1, 2, 7, 33, 3, 2), (1, 3, 7, 43, 9, 4)):
        table = wigner(2, ly, lz)
        if many:
            w_row = [[w0 + u * many + c if c < many else -1 for c in range(4)] for u in range(3)]
        else:
            w_row = [[w0 + u if c == u else -1 for c in range(4)] for u in range(3)]
        for i, j, k in table.nonzero().tolist():
            z_row = [z0 + c * (2 * lz + 1) + k if c < (many or 3) else -1 for c in range(4)]
            rows.append((table[i, j, k].item(), [u * 5 + i for u in range(3)], y0 + j, z_row, w_row))
    value, *tables = zip(*rows, strict=True)
    x_at, y_at, z_at, w_at = (torch.tensor(column) for column in tables)
    val = torch.tensor(value, dtype=torch.float64)
    tensors = {"CG": val, "XAt": x_at, "YAt": y_at, "ZAt": z_at, "WAt": w_at, "X": x, "Y": y, "W": w}
    return run(torch.cat([part.flatten(1) for part in parts], 1), out_shape=(None, 71), **tensors)


# ---- the tests ------------------------------------------------------------------------------------------


def runs(key: str) -> list[Run]:
    found = CASES[key].build(Data(zlib.crc32(key.encode())))
    return found if isinstance(found, list) else [found]


def assert_not_trivial(statement: str, one: Run) -> None:
    """A case of zeros, or of tensors that the statement does not name, would prove nothing."""
    assert one.expected.count_nonzero() > 0
    output = re.match(r"\w+", statement).group()
    for name, tensor in one.tensors.items():
        assert re.search(rf"\b{name}\b", statement), f"{name} is not in the statement"
        assert tensor.numel() > 0
        assert name == output or not tensor.is_floating_point() or tensor.count_nonzero() > 0


@pytest.mark.parametrize("key", CASES)
def test_statement_equals_dense_computation(key: str) -> None:
    from insum_nn import insum

    for one in runs(key):
        assert_not_trivial(CASES[key].statement, one)
        result = insum(CASES[key].statement, tensors=one.tensors, out_shape=one.out_shape, sizes=one.sizes)
        # A statement of numbers alone has torch's default dtype.
        floats = any(tensor.is_floating_point() for tensor in one.tensors.values())
        assert result.dtype == (torch.float64 if floats else torch.get_default_dtype())
        torch.testing.assert_close(result.double(), one.expected, rtol=1e-12, atol=1e-12)


def test_document_and_cases_agree() -> None:
    rows: dict[str, str] = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            match = ROW.match(line)
            assert match, f"not a row of five cells: {line}"
            assert match[1] not in rows, match[1]
            rows[match[1]] = match[2]
    assert rows == {key: found.statement for key, found in CASES.items()}


@pytest.mark.parametrize("form", [UVU, CONV_UVU])
def test_double_backward_is_the_sum_of_its_statements(form: Form) -> None:
    """The nine second-derivative statements, added up through the initial value, are autograd's double backward."""
    from insum_nn import insum

    prefix = "oeq.conv-op" if form is CONV_UVU else "oeq.op"
    table, entries, ops = product(Data(7), form)
    leaves = [ops[name].clone().requires_grad_() for name in ("X", "Y", "W", "dZ")]
    live = {**ops, **dict(zip(("X", "Y", "W", "dZ"), leaves, strict=True))}
    out = dense_product(table, form, 3, ["X", "Y", "W"], live)
    first = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
    second = torch.autograd.grad(first, leaves, [ops["GX"], ops["GY"], ops["GW"]])
    for letter, place, expected in zip("XYWZ", range(4), second, strict=True):
        total = torch.zeros(*(SHAPES[at] for at in form[place]), dtype=torch.float64)
        parts = [found.statement for key, found in CASES.items() if key.startswith(prefix)]
        parts = [statement for statement in parts if statement.startswith(f"L{letter}[")]
        assert len(parts) == (3 if letter == "Z" else 2)
        for statement in parts:
            tensors = {name: value for name, value in {**entries, **ops}.items() if f"{name}[" in statement}
            tensors = {name: value for name, value in tensors.items() if re.search(rf"\b{name}\[", statement)}
            total = insum(statement, tensors={**tensors, f"L{letter}": total})
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
