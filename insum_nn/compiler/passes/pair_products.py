"""Rewrite a statement of two factors over static tables as products of rows and one dense matrix product.

    Z[z,K[p,u]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,u]]

has a term for each nonzero coefficient. Several terms read the same pair of rows, and the copies `u` are not mixed:

    T[d,z,u] += X[z,I[d,u]] * Y[z,J[d,u]]          Z[z,K[k,u]] += C[k,d] * T[d,z,u]

with a `d` for each pair that stands in a term, and a `k` for each row that is written. It is the case in which both
factors have copies, which `path_products` leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.passes.path_products import NoPathsError, Terms
from insum_nn.facts import StaticTable

__all__ = ["PairSplit", "split_into_pairs"]

Integers = NDArray[np.int64]
# A matrix product may do this many multiplications for each that is needed: a library's does them as much faster.
_MOST_ZEROS = 48


@dataclass(frozen=True, slots=True, eq=False)
class PairSplit:
    """A statement as products of rows and a matrix product.

    Attributes:
        names: of the two factors.
        columns: of each factor, the columns of its rows, (rows, copies).
        pairs: (2, pairs), the row of each factor.
        matrix: (rows written, pairs), the coefficients.
        written: the columns that are written, (rows written, copies); each stands once.
    """

    names: tuple[str, str]
    columns: tuple[Integers, Integers]
    pairs: Integers
    matrix: NDArray[np.float64]
    written: Integers

    @property
    def between(self) -> int:
        """Numbers for each sample between the steps: rows of both factors for each pair, their product, the result."""
        rows, pairs = self.matrix.shape
        return (3 * pairs + 2 * rows) * self.written.shape[1]

    def __str__(self) -> str:
        a, b = self.names
        rows, pairs = self.matrix.shape
        return (
            f"T[d,z,u] += {a}[z,I[d,u]] * {b}[z,J[d,u]]\nZ[z,K[k,u]] += C[k,d] * T[d,z,u]\n"
            f"# {pairs} pairs, {rows} rows, {self.written.shape[1]} copies"
        )


def split_into_pairs(
    statement: Statement,
    tables: Mapping[str, StaticTable],
    sizes: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> PairSplit | None:
    """Split a statement; `None`: it is of another kind, or most of the matrix would be zeros.

    Args:
        statement: a sum of products.
        tables: its static tensors.
        sizes: of its indices; what the one of the samples is does not matter.
        shapes: of its tensors and its output; what their rows of samples are does not matter.
    """
    reads = [read for read in statement.reads if read.name not in tables]
    if statement.operator not in ("+=", "=") or len(reads) != 2 or reads[0].name == reads[1].name:
        return None
    try:
        terms = Terms(statement, tables, sizes, shapes)
        found = [terms.read(access) for access in (*reads, statement.output)]
    except NoPathsError:
        return None
    labels = set(found[0].steps)
    if len(labels) > 1 or any(read.operand.rows != "" or set(read.steps) != labels for read in found):
        return None
    label = next(iter(labels), "")
    copies = np.arange(sizes[label] if label else 1)
    columns: list[Integers] = []
    numbers: list[Integers] = []
    for read in found:
        key = np.stack([read.cell, read.steps.get(label, np.zeros_like(read.cell))])
        rows, number = np.unique(key, axis=1, return_inverse=True)
        columns.append(rows[0][:, None] + rows[1][:, None] * copies)
        numbers.append(number.reshape(-1))
    first, second, written = columns
    pairs, pair = np.unique(np.stack(numbers[:2]), axis=1, return_inverse=True)
    if np.unique(written).size < written.size or len(written) * pairs.shape[1] > _MOST_ZEROS * terms.value.size:
        return None
    matrix = np.zeros((len(written), pairs.shape[1]))
    np.add.at(matrix, (numbers[2], pair.reshape(-1)), terms.value)
    return PairSplit((reads[0].name, reads[1].name), (first, second), pairs, matrix, written)
