"""Programs of two factors over static tables, as products of rows and a matrix product; eager and traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.pair_products import PairSplit, split_into_pairs
from insum_nn.compiler.runtime.composite.path_program import Static, static_sum
from insum_nn.compiler.runtime.modes import graph_constant
from insum_nn.dtypes import wide_dtype

__all__ = ["PairProducts", "PairProgram", "find_pairs"]

# Bytes of intermediate results of a range of samples, and samples of one at least.
AT_ONCE = 1 << 23
_LEAST = 64


def find_pairs(
    bound: Bound, tensors: Sequence[Tensor], extents: Extents, options: Options, static: Static
) -> PairProgram | None:
    """Return a statement over static tables as a matrix product; `None`: it is none, or a kernel is generated for it.

    Sizes may be symbolic where samples are counted.
    """
    found = static_sum(bound, tensors, extents, options, static)
    if found is None:
        return None
    sizes, shapes = found.sizes, found.shapes
    numbers = [*(size for _, size in sizes), *(extent for _, shape in shapes for extent in shape)]
    # Symbolic sizes of others than the samples; nothing to sum.
    if any(type(n) is not int for n in numbers) or any(size == 0 for name, size in sizes if name != found.samples):
        return None
    products = _products(bound.statement, static, sizes, shapes)
    return None if products is None else PairProgram(bound, products)


@lru_cache(maxsize=512)
def _products(
    statement: Statement,
    static: Static,
    sizes: tuple[tuple[str, int], ...],
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> PairProducts | None:
    split = split_into_pairs(statement, dict(static), dict(sizes), dict(shapes))
    if split is None:
        return None
    shape = dict(shapes)[statement.output.name][1:]
    # It is kept, so its tensors must not belong to a graph that torch records now.
    with torch.inference_mode(False), _disable_current_modes():
        return PairProducts(split, shape, [dict(shapes)[name][1:] for name in split.names])


class PairProducts:
    """The tables of a split as tensors, and its run.

    Args:
        split: the products.
        shape: of a row of the output.
        shapes: of a row of each factor.
    """

    def __init__(self, split: PairSplit, shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> None:
        self.split, self.shape = split, tuple(shape)
        self.copies = split.written.shape[1]
        self.columns = [_order(own, int(np.prod(s))) for own, s in zip(split.columns, shapes, strict=True)]
        self.rows = [len(own) for own in split.columns]
        self.pairs = [torch.from_numpy(own.copy()) for own in split.pairs]
        width = int(np.prod(self.shape))
        # Where each column of the output stands among those that are made; behind them is a column of zeros.
        place = np.full(width, split.written.size)
        place[split.written.reshape(-1)] = np.arange(split.written.size)
        self.covers = split.written.size == width
        self.place = _order(place, split.written.size) if self.covers else torch.from_numpy(place)
        self._matrices = {
            torch.float32: torch.from_numpy(split.matrix.astype(np.float32)),
            torch.float64: torch.from_numpy(split.matrix),
        }

    def __call__(self, factors: Sequence[Tensor], *, traced: bool = False) -> Tensor:
        """The output for some samples, (samples, ...); of fp16 and bf16 in float32."""
        constant: Callable[[Tensor], Tensor] = graph_constant if traced else _itself
        count, parts = factors[0].shape[0], list[Tensor]()
        for tensor, columns, rows, pairs in zip(factors, self.columns, self.rows, self.pairs, strict=True):
            flat = tensor.reshape(count, -1)
            own = flat if columns is None else flat.index_select(1, constant(columns))
            own = own.to(wide_dtype(own.dtype)).view(count, rows, self.copies).permute(1, 0, 2).contiguous()
            parts.append(own.index_select(0, constant(pairs)))
        product = parts[0] * parts[1]
        matrix = constant(self._matrices[product.dtype])
        made = torch.mm(matrix, product.view(product.shape[0], count * self.copies))
        made = made.view(-1, count, self.copies).permute(1, 0, 2).reshape(count, -1)
        if not self.covers:
            made = torch.cat([made, made.new_zeros(count, 1)], 1)
        if self.place is not None:
            made = made.index_select(1, constant(self.place))
        return made.view(count, *self.shape)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _order(columns: np.ndarray, width: int) -> Tensor | None:
    """Columns as a tensor; `None`: all of them, in order."""
    flat = columns.reshape(-1)
    return None if np.array_equal(flat, np.arange(width)) else torch.from_numpy(flat.copy())


@dataclass(frozen=True, slots=True)
class PairProgram:
    """A statement as products of rows and a matrix product.

    Attributes:
        bound: the statement.
        products: what it computes.
    """

    bound: Bound
    products: PairProducts

    @property
    def reason(self) -> str:
        """Why it runs so."""
        return "on a CPU, a library multiplies the matrix of static coefficients by the products of rows"

    def __call__(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Tensor:
        """Run on tensors in the layout's order."""
        return self.prepare(tensors, extents, initial)(tensors, initial)

    def factors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The two factors among the tensors."""
        names = self.bound.layout.tensors
        return [tensors[names.index(name)] for name in self.products.split.names]

    def prepare(
        self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None
    ) -> Callable[[Sequence[Tensor], Tensor | None], Tensor]:
        """Return what runs the statement on tensors of these shapes."""
        products, dtype = self.products, self.bound.dtype
        most = max(_LEAST, AT_ONCE // (wide_dtype(dtype).itemsize * products.split.between))

        def run(tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
            factors = self.factors(tensors)
            count = factors[0].shape[0]
            if count <= most:
                made = products(factors)
            else:
                made = torch.cat([products(part) for part in zip(*(t.split(most) for t in factors), strict=True)])
            return (made if initial is None else made.add_(initial)).to(dtype)

        return run

    def traced(self, tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
        """Write the statement into the graph that torch records."""
        made = self.products(self.factors(tensors), traced=True)
        return (made if initial is None else made + initial).to(self.bound.dtype)
