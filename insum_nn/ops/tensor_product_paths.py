"""Tensor products with single copies, such as harmonics, by matrix products of a library: one path after the other.

The coefficients and the single copies of `y` make a small matrix of each sample and path, `M`. What is left are matrix
products, for each path (k counts components of its output, i of its first input):

    M[z,k,i] += CG[j,k,i] * Y[z,j]          T[z,k,u] += M[z,k,i] * X[z,i,u]         G[z,k,u] += dZ[z,k,w] * W[u,w]

    Z[z,k,w] += T[z,k,u] * W[u,w]           dX[z,i,u] += M[z,k,i] * G[z,k,u]
    dW[u,w] += T[z,k,u] * dZ[z,k,w]         dM[z,k,i] += G[z,k,u] * X[z,i,u]        dY[z,j] += CG[j,k,i] * dM[z,k,i]

so that several gradients share them. Where copies are not mixed, `w` is `u`, and weights multiply cell by cell. A
statement over the coefficients that are not zero, as generated kernels take it, would have a library gather the copies
of a component once for each of them.

Along edges `X` and `dZ` are read at a sample's sender and receiver, and `dX` and `Z` added up there. Zeros of a matrix
are multiplied too, so that a NaN reaches all components that its path ends in, of its sample and copy, as in e3nn.

Source: the order in which e3nn contracts its paths (Geiger and Smidt, e3nn, 2022). Between two products are as many
numbers as a path's output has components and its first input copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from insum_nn.ops.tensor_product_form import Form
from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.constants import plain_tensors
from insum_nn.structure.irreps import Entry

__all__ = ["AT_ONCE", "PathProducts", "path_products"]

# Bytes between two products. Memory of more than 32 MiB is handed back at once, and made anew page by page.
AT_ONCE = 1 << 24
_DTYPES = (torch.float32, torch.float64)


class _Path(NamedTuple):
    """A path.

    Attributes:
        x: the entry of the first input.
        z: the entry of the output.
        first: the first of its columns of `M`.
        k: components of its output; 1 where these are those of the first input times one number, as of a scalar `y`.
        i: components of its first input, likewise.
        mixes: it makes other copies of those of the first input; else its weights multiply these.
        weight: where its weights begin; -1 without weights.
        shape: (u, w), or (u,).
    """

    x: int
    z: int
    first: int
    k: int
    i: int
    mixes: bool
    weight: int
    shape: tuple[int, ...]

    def matrix(self, numbers: Tensor) -> Tensor:
        """This path's part of `M`, or of its gradient: (rows, k, i)."""
        return numbers.narrow(1, self.first, self.k * self.i).unflatten(1, (self.k, self.i))

    def weights(self, numbers: Tensor) -> Tensor:
        """This path's part of all weights: (u, w) or (u,), after the rows where each sample has its own."""
        return numbers.narrow(-1, self.weight, math.prod(self.shape)).unflatten(-1, self.shape)


def path_products(form: Form) -> PathProducts | None:
    """The products of a form; `None` where it is not of this kind. Remembered."""
    return form.keep(("paths",), lambda: (PathProducts(form) if _fits(form) else None,))[0]


def _fits(form: Form) -> bool:
    """Whether all paths are of single copies of the second input."""
    paths = [form.spec.paths[number] for number in form.live]
    single = all(form.entry("y", path).mul == 1 for path in paths)
    plain = all(path.mode == "uvu" or (path.mode == "uvw" and path.weighted) for path in paths)
    return bool(paths) and single and plain


class PathProducts:
    """Any roles of a tensor product, from the others."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.shared = form.spec.shared
        self.paths: list[_Path] = []
        parts: list[Tensor] = []
        count = 0
        for number in form.live:
            path = form.spec.paths[number]
            l1, l2, l3 = (form.entry(role, path).l for role in "xyz")
            (i, j, k), values = nonzeros(l1, l2, l3)
            sizes = (2 * l3 + 1, 2 * l1 + 1)
            if l2 == 0 and np.array_equal(i, k) and np.allclose(values, values[0], rtol=1e-12):
                sizes, (i, j, k), values = (1, 1), np.zeros((3, 1), np.int64), values[:1]
            table = torch.zeros(form.dims["y"], *sizes, dtype=torch.float64, device="cpu")
            table[form.starts["y"][path.i_in2] + j, k, i] = torch.from_numpy(values * path.coefficient)
            mixes = path.mode == "uvw"
            shape = (form.entry("x", path).mul, *((form.entry("z", path).mul,) if mixes else ()))
            weight = form.weight_starts[number] if path.weighted else -1
            self.paths.append(_Path(path.i_in1, path.i_out, count, *sizes, mixes, weight, shape))
            parts.append(table.flatten(1))
            count += parts[-1].shape[1]
        self._table = torch.cat(parts, 1)
        self._tables: dict[torch.dtype, Tensor] = {}
        # Numbers of a sample beside its operands: matrices and their gradients; of a path `T`, `G` and a result; along
        # edges what is gathered.
        gathered = form.dims["x"] + form.dims["z"] if form.spec.convolution else 0
        largest = max(form.entries["z"][path.z].size * max(path.shape) for path in self.paths)
        self._between = gathered + 2 * count + 3 * largest

    def takes(self, operands: Mapping[str, Tensor], rows: Mapping[str, int]) -> bool:
        """Whether products of these are faster, or as fast as others, and all is as it should be.

        Halves are left to statements, which round once; and so is what does not fit together, of which they say why.

        Args:
            operands: by role.
            rows: what each of them has.
        """
        some, dims = next(iter(operands.values())), {**self.form.dims, "w": self.form.spec.weight_numel}
        return some.dtype in _DTYPES and all(
            tensor.dtype == some.dtype
            and tensor.device == some.device
            and tensor.shape == ((dims[role],) if role == "w" and self.shared else (rows[role], dims[role]))
            for role, tensor in operands.items()
        )

    def __call__(
        self, roles: Sequence[str], operands: Mapping[str, Tensor], ends: Mapping[str, Tensor], rows: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """The tensors of some roles.

        Args:
            roles: letters of `ROLES`.
            operands: by role, what these are made of; `z` is the gradient of the output.
            ends: along edges, where they begin (`x`) and end (`z`), proven.
            rows: what each role has.

        Returns:
            For each role (rows, dimension); of the weights (numel,) or, if they are not shared, (rows, numel).
        """
        some, form, samples = next(iter(operands.values())), self.form, rows["y"]
        found: dict[str, Tensor] = {}
        for role in roles:
            if role == "w":
                found[role] = some.new_zeros(*(() if self.shared else (samples,)), form.spec.weight_numel)
            else:
                found[role] = some.new_zeros(rows[role], form.dims[role])
        most = max(64, AT_ONCE // (some.element_size() * self._between))
        if ends:
            # Never as much as the messages of all edges, unless these are few.
            most = min(most, max(256, samples // 8))
        size = -(-samples // max(1, -(-samples // most)))
        # What is added up at nodes, before it is.
        apart = {role: some.new_zeros(size, form.dims[role]) for role in roles if role in ends}
        for start in range(0, samples, max(1, size)):
            own = min(size, samples - start)

            def part(role: str, tensor: Tensor, start: int = start, own: int = own) -> Tensor:
                return tensor if role == "w" and self.shared else tensor.narrow(0, start, own)

            given = {
                role: tensor.index_select(0, ends[role].narrow(0, start, own)) if role in ends else part(role, tensor)
                for role, tensor in operands.items()
            }
            made = {x: apart[x].narrow(0, 0, own) if x in apart else part(x, t) for x, t in found.items()}
            _Part(self, own, given, made).run()
            for role in apart:
                found[role].index_add_(0, ends[role].narrow(0, start, own), made[role])
        return found

    def table(self, dtype: torch.dtype) -> Tensor:
        """`CG`, (dimension of y, columns of `M`)."""
        found = self._tables.get(dtype)
        if found is None:
            with plain_tensors():
                found = self._tables[dtype] = self._table.to(dtype)
        return found


class _Part:
    """Some of the samples."""

    def __init__(
        self, products: PathProducts, rows: int, given: Mapping[str, Tensor], found: Mapping[str, Tensor]
    ) -> None:
        self.products, self.rows, self.given, self.found = products, rows, given, found
        self.table = products.table(next(iter(given.values())).dtype)
        # Entries of operands and of results, copies fastest; made when they are first read, or added to.
        self.entries: dict[tuple[str, int], Tensor] = {}
        self.sums: dict[str, dict[int, Tensor]] = {"x": {}, "z": {}}

    def run(self) -> None:
        """Add what the samples make to the roles that are wanted."""
        given, found = self.given, self.found
        matrices = given["y"] @ self.table if "y" in given else None
        slopes = self.table.new_empty(self.rows, self.table.shape[1]) if "y" in found else None
        for path in self.products.paths:
            matrix = None if matrices is None else path.matrix(matrices)
            if matrix is not None and ("z" in found or "w" in found):
                turned = _product(matrix, self.entry("x", path.x))
                if "z" in found:
                    self.add_weighted(path, turned)
                if "w" in found and path.weight >= 0:
                    self.add_weights(path, turned)
            if "x" in found or slopes is not None:
                back = self.back(path)
                if "x" in found and matrix is not None:
                    self.add(path.x, matrix.mT, back)
                if slopes is not None:
                    path.matrix(slopes).copy_(self.slope(path, back))
        if slopes is not None:
            torch.mm(slopes, self.table.mT, out=found["y"])
        for role in ("x", "z"):
            for number, total in self.sums[role].items():
                self.lying(role, number, found[role]).copy_(total.mT)

    def lying(self, role: str, number: int, tensor: Tensor) -> Tensor:
        """An entry of a representation, a view: (rows, copies, components)."""
        form = self.products.form
        entry: Entry = form.entries[role][number]
        own = tensor.narrow(1, form.starts[role][number], entry.dim)
        if form.spec.layout == "mul_ir":
            return own.unflatten(1, (entry.mul, entry.size))
        return own.unflatten(1, (entry.size, entry.mul)).mT

    def entry(self, role: str, number: int) -> Tensor:
        """An entry of an operand, copies fastest: (rows, components, copies)."""
        found = self.entries.get((role, number))
        if found is None:
            found = self.entries[role, number] = self.lying(role, number, self.given[role]).mT.contiguous()
        return found

    def slope(self, path: _Path, back: Tensor) -> Tensor:
        """`dM`."""
        entry = self.entry("x", path.x)
        if path.k * path.i == 1:
            return (back * entry).sum((1, 2), keepdim=True)
        return _product(back, entry.mT)

    def add_weighted(self, path: _Path, turned: Tensor) -> None:
        """Add `T` times the weights to an entry of the output."""
        sums, into = self.sums["z"], self.sums["z"].get(path.z)
        if path.weight < 0:
            sums[path.z] = turned if into is None else into.add_(turned)
            return
        weights = path.weights(self.given["w"])
        if not path.mixes:
            weights = weights.unsqueeze(-2)
            sums[path.z] = turned * weights if into is None else into.addcmul_(turned, weights)
        elif into is None:
            sums[path.z] = turned @ weights
        elif self.products.shared:
            into.flatten(0, 1).addmm_(turned.flatten(0, 1), weights)
        else:
            into.baddbmm_(turned, weights)

    def back(self, path: _Path) -> Tensor:
        """`G`: what the weights make of the output's gradient."""
        slope = self.entry("z", path.z)
        if path.weight < 0:
            return slope
        weights = path.weights(self.given["w"])
        return slope @ weights.mT if path.mixes else slope * weights.unsqueeze(-2)

    def add(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product to an entry of the first input's gradient."""
        sums, into = self.sums["x"], self.sums["x"].get(number)
        if into is None:
            sums[number] = _product(left, right)
        elif left.shape[2] == 1:
            into.addcmul_(left, right)
        else:
            into.baddbmm_(left, right)

    def add_weights(self, path: _Path, turned: Tensor) -> None:
        """Add a path's share of the weights' gradient."""
        into, slope = path.weights(self.found["w"]), self.entry("z", path.z)
        if not path.mixes:
            into.add_((turned * slope).sum((0, 1) if self.products.shared else 1))
        elif self.products.shared:
            into.addmm_(turned.flatten(0, 1).mT, slope.flatten(0, 1))
        else:
            torch.bmm(turned.mT, slope, out=into)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """(rows, a, b) times (rows, b, c); of one term without a library's call for each row."""
    return left * right if left.shape[2] == 1 else torch.bmm(left, right)
