"""Names that something between a statement and its kernel could take for one another, or for a word of its own.

A name means nothing: a statement with other names is the same statement. FX writes names in lower case with underscores
and numbers what is taken; generated code has names of its own; derivatives are named after what they differentiate.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping

__all__ = ["confusable", "renamed"]

# Names of one group differ in case, underscores or a number, or are words of the same generated code.
_GROUPS = (
    ("x", "X", "x_", "X_1", "x_1"),
    ("y", "Y", "y_", "Y1"),
    ("W", "w", "_w", "w_1"),
    ("Row", "row", "ROW"),
    ("ColIdx", "col_idx", "colIdx", "Col_Idx"),
    ("a", "A", "a_1", "A_1", "a1", "A_0"),
    ("i", "I", "i0", "i_1", "extent_i", "output_extent_0"),
    ("T", "t", "t0", "t1", "Tl", "tl", "tmp0"),
    ("arg0", "arg1", "Arg0", "arg_0", "args", "arg0_1"),
    ("pid", "acc", "acc1", "lane", "lane1", "v1", "j1", "kernel", "triton"),
    ("tensor_0", "out", "start", "order", "begin", "end", "stride_1", "extent_0"),
    ("dX", "dx", "dY", "dy", "dx_", "share", "batch", "batch_"),
    ("torch", "self", "device", "inf", "nan", "getattr", "getattr_1", "size", "size_1", "Size"),
    ("max", "min", "sum", "len", "int", "print", "type", "match", "_"),
)
_NAME = re.compile(r"(?:max|min)=|(?<![\w.])[^\W\d]\w*")


def confusable(rng: random.Random) -> Iterator[str]:
    """Distinct names, those of one group after one another.

    >>> names = list(confusable(random.Random(0)))
    >>> len(names) == len(set(names)) > 60
    True
    """
    for group in rng.sample(_GROUPS, len(_GROUPS)):
        yield from rng.sample(group, len(group))


def renamed(expression: str, names: Mapping[str, str]) -> str:
    """A statement with other names of tensors and indices.

    >>> renamed("y[i] max= 2.5e1 * A[i, Row[p]]", {"y": "max", "A": "a", "Row": "row", "i": "e1", "p": "P"})
    'max[e1] max= 2.5e1 * a[e1, row[P]]'
    """
    return _NAME.sub(lambda found: names.get(found[0], found[0]), expression)
