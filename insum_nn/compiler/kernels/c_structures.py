"""What is made of the entries of an index tensor: their range, and on a CPU their order by value, read once in C.

Both are kept for as long as the tensor lives and is not written to.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor

from insum_nn.compiler.kernels.c_compiler import CFunction
from insum_nn.compiler.lang.index_checks import stats_of
from insum_nn.tensor_cache import forgets

__all__ = ["Entries", "clear_entries", "entries_of", "order_of", "seen", "sorting", "stable_order"]

_TEXT = """\
void sort(const long *given) {{
  const {type} *x = (void *)given[0];
  int *begin = (void *)given[1], *order = (void *)given[2];
  const long n = given[3], rows = given[4];
  for (long i = 0; i <= rows; i++) begin[i] = 0;
  for (long i = 0; i < n; i++) if (x[i] >= 0) begin[x[i] + 1]++;
  for (long i = 0; i < rows; i++) begin[i + 1] += begin[i];
  for (long i = 0; i < n; i++) if (x[i] >= 0) order[begin[x[i]]++] = i;
  for (long i = rows; i > 0; i--) begin[i] = begin[i - 1];
  begin[0] = 0;
}}
void range(const long *given) {{
  const {type} *x = (void *)given[0];
  long *found = (void *)given[1];
  const long n = given[2];
  {type} low = x[0], high = x[0], falls = 0;
  for (long i = 1; i < n; i++) {{
    low = x[i] < low ? x[i] : low; high = x[i] > high ? x[i] : high; falls |= x[i] < x[i - 1];
  }}
  found[0] = low; found[1] = high; found[2] = !falls;
}}
"""
_TYPES = {torch.int32: "int", torch.int64: "long"}


@cache
def sorting(dtype: torch.dtype) -> tuple[CFunction, CFunction]:
    """The functions that sort entries of a dtype, and find their range."""
    text = _TEXT.format(type=_TYPES[dtype])
    return CFunction(text, "sort", 5), CFunction(text, "range", 3)


class Entries:
    """An index tensor at one version.

    Attributes:
        ref: the tensor.
        version: its version.
        low, high: smallest and largest entry; 0 and -1 without entries.
        ascending: none is missing, and none is smaller than the one before it.
        orders: by number of rows, what `order_of` returns.
    """

    __slots__ = ("__weakref__", "ascending", "high", "low", "orders", "ref", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.orders: dict[int, tuple[Tensor, Tensor]] = {}
        find = sorting(tensor.dtype)[1] if tensor.is_cpu else None
        if find is None or find.run is None or tensor.numel() == 0:
            stats = stats_of(tensor)
            self.low, self.high, ascending = stats.smallest, stats.largest, stats.ascending
        else:
            flat, found = tensor.contiguous(), torch.empty(3, dtype=torch.int64, device="cpu")
            find.run(find.row(flat.data_ptr(), found.data_ptr(), flat.numel()))
            self.low, self.high, ascending = found.tolist()
        self.ascending = bool(ascending) and self.low >= 0


seen: dict[int, Entries] = {}
"""By the identity of a tensor; printed calls look here, and compare tensor and version."""


def entries_of(tensor: Tensor) -> Entries:
    """Return what is known of an index tensor, read now if it is new or was written to."""
    key = id(tensor)
    found = seen.get(key)
    if found is not None and found.ref() is tensor and found.version == tensor._version:
        return found
    made = Entries(tensor)
    if not tensor.is_inference():

        def gone(ref: object) -> None:
            if (kept := seen.get(key)) is not None and kept.ref is ref:
                del seen[key]

        made.version, made.ref = tensor._version, weakref.ref(tensor, gone)
        seen[key] = made
    return made


def order_of(entries: Entries, tensor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sort the entries of an index tensor by value.

    Args:
        entries: what is known of it.
        tensor: contiguous; entries of -1 are left out, all others lie below `rows`.
        rows: number of values.

    Returns:
        `begin`, (rows + 1,) int32: where the entries of each value begin in `order`. `order`, int32: their places, of
        equal values in order.
    """
    found = entries.orders.get(rows)
    if found is None:
        begin = torch.empty(rows + 1, dtype=torch.int32, device="cpu")
        order = torch.empty(tensor.numel(), dtype=torch.int32, device="cpu")
        sort = sorting(tensor.dtype)[0]
        sort.run(sort.row(tensor.data_ptr(), begin.data_ptr(), order.data_ptr(), tensor.numel(), rows))
        found = entries.orders[rows] = begin, order
    return found


def stable_order(tensor: Tensor, rows: int) -> Tensor:
    """Return the places of the entries of an index tensor, (e,) below `rows`, in ascending order of these."""
    if tensor.is_cpu and tensor.numel() and sorting(tensor.dtype)[0].run is not None:
        tensor = tensor.contiguous()
        return order_of(Entries(tensor), tensor, rows)[1]
    return tensor.argsort(stable=True)


@forgets
def _forget(tensor: Tensor) -> None:
    seen.pop(id(tensor), None)


def clear_entries() -> None:
    """Forget everything."""
    seen.clear()
    sorting.cache_clear()
