"""A drop-in replacement for the equivariant linear map of `e3nn.o3`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import LONG_SUM
from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.faults import check_choice
from insum_nn.layers.equivariant.adoption import E3NN_IN_GRAPHS, WeightedLayer, o3, runs_directly
from insum_nn.layers.equivariant.checks import InputError
from insum_nn.ops.tensor_product import TensorProductSpec, checked_product
from insum_nn.ops.tensor_product_spec import LAYOUTS
from insum_nn.structure.irreps import Entry, Path, entries_of
from insum_nn.structure.transfers import constant

__all__ = ["Linear", "axes_of", "turned"]

Irreps = Any


class Linear(WeightedLayer, o3.Linear):
    """Mix the copies of each irrep: `e3nn.o3.Linear`.

        Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]

    It is the fully connected tensor product with a scalar `Y` that is 1; `p` counts the components of each path. In
    eager mode all paths of equal multiplicities are one kernel, and so is each of their gradients. While torch traces
    a call, under autocast, with channels (`f_in`, `f_out`), and where one matrix product of scalars is all that there
    is, e3nn's own code runs.

    Source: Geiger and Smidt, e3nn (2022), section 4.

    Args:
        irreps_in: representation of the input.
        irreps_out: representation of the output.
        layout_in: order of an entry's numbers in the input: `"mul_ir"` (copies, components), which is e3nn's and the
            default, or `"ir_mul"` (components, copies), which `TensorProductConv` takes as it is.
        layout_out: the same for the output. Weights have one order, which is e3nn's.
        options: compile options.
        **kwargs: of `e3nn.o3.Linear`.

    >>> from insum_nn.layers.equivariant.linear import Linear
    >>> linear = Linear("8x0e + 4x1o", "2x0e + 8x1o")
    >>> linear(torch.randn(5, 20)).shape
    torch.Size([5, 26])
    >>> original = o3.Linear("4x0e + 1o", "2x0e + 2x1o")
    >>> Linear.from_e3nn(original).weight is original.weight
    True
    """

    def __init__(
        self,
        irreps_in: Irreps,
        irreps_out: Irreps,
        *,
        layout_in: str = "mul_ir",
        layout_out: str = "mul_ir",
        options: Options = DEFAULT,
        **kwargs: Any,
    ) -> None:
        o3.Linear.__init__(self, irreps_in, irreps_out, **kwargs)
        self._prepare(options, layout_in, layout_out)

    def _prepare(self, options: Options, layout_in: str = "mul_ir", layout_out: str = "mul_ir") -> None:
        check_choice("layout_in", layout_in, LAYOUTS, InputError)
        check_choice("layout_out", layout_out, LAYOUTS, InputError)
        self.layout_in, self.layout_out = layout_in, layout_out
        # Of entries that are in another order than e3nn's code reads and writes.
        self._turned_in = axes_of(self.irreps_in, layout_in)
        self._turned_out = [(mul, size) for size, mul in axes_of(self.irreps_out, layout_out)]
        self.options = options

    def _write_statements(self) -> None:
        self._dims: tuple[int, int] = (self.irreps_in.dim, self.irreps_out.dim)
        self._text: str = self.spec.to_json() if self._is_sparse() else ""

    def _is_sparse(self) -> bool:
        """Return whether there are statements for it: no channels, and more than one matrix product of scalars."""
        paths = self._paths()[1]
        if self.weight.dim() != 1 or sum(path.numel for path in paths) != self.weight_numel:
            return False
        used = [i for i in self.instructions if i.i_in >= 0 and 0 not in i.path_shape]
        return len(used) > 1 or any(self.irreps_out[i.i_out].ir.l for i in used)

    @property
    def spec(self) -> TensorProductSpec:
        """The tensor product with the scalar 1 that it is."""
        in1, paths = self._paths()
        return TensorProductSpec(
            in1,
            (Entry(1, 0, 1),),
            entries_of(self.irreps_out),
            paths,
            self.shared_weights,
            layout=self.layout_in,
            out_layout=self.layout_out,
            options=self.options,
        )

    def _paths(self) -> tuple[tuple[Entry, ...], tuple[Path, ...]]:
        """Return the entries of the input, and the paths, in the order of their weights.

        Where multiplicities of the input differ, its entries are divided into parts of one multiplicity: their weights
        lie one after the other, and paths of equal multiplicities are one statement.
        """
        whole, out = entries_of(self.irreps_in), entries_of(self.irreps_out)
        used = [i for i in self.instructions if i.i_in >= 0 and 0 not in i.path_shape]
        part = math.gcd(*(whole[i.i_in].mul for i in used))
        # With copies innermost, a part's columns are not contiguous.
        divides = part >= LONG_SUM and self.layout_in == "mul_ir"
        entries: list[Entry] = []
        parts: list[range] = []
        for entry in whole:
            count = entry.mul // part if divides and entry.mul % part == 0 else 1
            parts.append(range(len(entries), len(entries) + count))
            entries += [entry._replace(mul=entry.mul // max(1, count))] * count
        paths: list[Path] = []
        for row in used:
            # The squares of a path's coefficients, those of a product with a scalar, add up to 1.
            factor = float(row.path_weight) * math.sqrt(whole[row.i_in].size)
            for at in parts[row.i_in]:
                shape = (entries[at].mul, 1, out[row.i_out].mul)
                paths.append(Path(at, 0, row.i_out, "uvw", True, factor, shape))
        return tuple(entries), tuple(paths)

    def _specs(self) -> tuple[TensorProductSpec, ...]:
        return (self.spec,) if self._text else ()

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        return super()._elsewhere() | {E3NN_IN_GRAPHS if self._text else "e3nn's own code": ()}

    def _placed(self, bias: Tensor) -> Tensor:
        """Return the bias at the columns that it is added to, and zeros."""
        bias = bias.reshape(-1, self.bias_numel)
        biased = {row.i_out for row in self.instructions if row.i_in < 0}
        widths = [entry.dim for entry in entries_of(self.irreps_out)]
        own = iter(bias.split([width for number, width in enumerate(widths) if number in biased], 1))
        zero = bias.new_zeros(bias.shape[0], 1)
        pieces = [next(own) if n in biased else zero.expand(-1, width) for n, width in enumerate(widths)]
        return torch.cat(pieces, 1)

    def forward(self, features: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Mix the copies.

        Args:
            features: (..., irreps_in.dim); differentiable.
            weight: (weight_numel,), or (..., weight_numel) if weights are not shared; needed unless the module holds
                them; differentiable.
            bias: (bias_numel,); needed unless the module holds it; differentiable.

        Returns:
            (..., irreps_out.dim).
        """
        w: Tensor = self.weight if weight is None else weight
        b: Tensor = self.bias if bias is None else bias
        if self._text and runs_directly(features, self._dims[0], w, b):
            dtype, device = features.dtype, features.device
            x = features if features.dim() == 2 else features.reshape(-1, self._dims[0])
            rows, numel = x.shape[0], self.weight_numel
            alike = w.shape == ((numel,) if self.shared_weights else (rows, numel)) and w.dtype == dtype
            if alike and w.device == device and bool(self.bias_numel) == bool(b.numel()):
                z = checked_product(self._text, x, constant((1,), device, dtype).expand(rows, 1), w)
                z = z + self._placed(b) if self.bias_numel else z
                return z if features.dim() == 2 else z.reshape(*features.shape[:-1], self._dims[1])
        result = o3.Linear.forward(self, turned(features, self._turned_in), weight, bias)
        return turned(result, self._turned_out)

    def __prepare_scriptable__(self) -> Any:
        """Return e3nn's own layer, between changes of the order of its columns."""
        plain = super().__prepare_scriptable__()
        return (
            plain
            if self.layout_in == self.layout_out == "mul_ir"
            else _Turned(plain, self._turned_in, self._turned_out)
        )


class _Turned(torch.nn.Module):
    """A linear map between changes of the order of columns, for TorchScript."""

    def __init__(self, inner: Any, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, features: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return turned(self.inner(turned(features, self.before), weight, bias), self.after)


def axes_of(irreps: Irreps, layout: str) -> list[tuple[int, int]]:
    """Return the axes of each entry in a layout, for `turned`; TorchScript infers a list's type from what is in it."""
    return [(0, 0), *((e.size, e.mul) for e in entries_of(irreps) if layout != "mul_ir")]


def turned(features: Tensor, entries: list[tuple[int, int]]) -> Tensor:
    """Return features with the axes of each entry exchanged, by views, since constants would be a part of the state."""
    if len(entries) < 2:
        return features
    pieces: list[Tensor] = []
    start = 0
    for rows, columns in entries:
        piece = features.narrow(-1, start, rows * columns)
        pieces.append(piece.unflatten(-1, (rows, columns)).transpose(-2, -1).flatten(-2))
        start += rows * columns
    return torch.cat(pieces, -1)
