"""What is made of the entries of an index tensor: their range, and on a CPU their order by value, read once in C.

Both are kept for as long as the tensor lives and is not written to.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from insum_nn.compiler.kernels.c_compiler import CFunction
from insum_nn.compiler.lang.index_checks import stats_of
from insum_nn.tensor_cache import Kept, kept, kept_of

__all__ = ["CPU", "clear_orders", "entries_of", "order_of", "sorting", "stable_order"]

_TEXT = """\
void sort(const long *given) {{
  const {type} *x = (void *)given[0];
  const long n = given[2], rows = given[3];
  int *begin = (void *)given[1], *order = begin + rows + 1;
  for (long i = 0; i <= rows; i++) begin[i] = 0;
  for (long i = 0; i < n; i++) if (x[i] >= 0) begin[x[i] + 1]++;
  for (long i = 0; i < rows; i++) begin[i + 1] += begin[i];
  for (long i = 0; i < n; i++) if (x[i] >= 0) order[begin[x[i]]++] = i;
  for (long i = rows; i > 0; i--) begin[i] = begin[i - 1];
  begin[0] = 0;
}}
long range(const long *given) {{
  const {type} *x = (void *)given[0];
  const long n = given[1];
  {type} low = x[0], high = x[0], falls = 0;
  for (long i = 1; i < n; i++) {{
    low = x[i] < low ? x[i] : low; high = x[i] > high ? x[i] : high; falls |= x[i] < x[i - 1];
  }}
  return low < -1 || high >= {high} ? -1 : (long)high + 1 << 32 | (long)low + 1 << 1 | !falls;
}}
"""
# Of larger entries, and of smaller ones than -1, the range is found by torch.
_HIGH = (1 << 31) - 1
CPU = torch.device("cpu")
_TYPES = {torch.int32: "int", torch.int64: "long"}


@cache
def sorting(dtype: torch.dtype) -> tuple[CFunction, CFunction]:
    """The functions that sort entries of a dtype, and find their range."""
    text = _TEXT.format(type=_TYPES[dtype], high=_HIGH)
    return CFunction(text, "sort", 4), CFunction(text, "range", 2)


def entries_of(tensor: Tensor) -> Kept:
    """Return what is known of an index tensor, read now if it is new or was written to."""
    found, version = kept_of(tensor), 0 if tensor.is_inference() else tensor._version
    if found.version == version:
        return found
    find = sorting(tensor.dtype)[1] if tensor.is_cpu and tensor.numel() else None
    if find is None or find.run is None:
        return stats_of(tensor)
    flat = tensor.contiguous()
    read = find.run(find.row(flat.data_ptr(), flat.numel()))
    return stats_of(tensor) if read < 0 else found.read(version, (read >> 1 & _HIGH) - 1, (read >> 32) - 1, read & 1)


def order_of(tensor: Tensor, rows: int) -> tuple[int, int, Tensor]:
    """Sort the entries of an index tensor by value.

    Args:
        tensor: contiguous; entries of -1 are left out, all others lie below `rows`.
        rows: number of values.

    Returns:
        The addresses of two rows of int32, and the tensor that holds both: where the entries of each value begin in the
        second, and where the last ones end; the places of entries, of equal values in order.
    """
    found = kept.get(id(tensor))
    if found is None or found() is not tensor or found.version != tensor._version:
        found = entries_of(tensor)
    order = found.orders.get(rows)
    if order is None:
        made = torch.empty(1 + rows + tensor.numel(), dtype=torch.int32, device=CPU)
        sort, begin = sorting(tensor.dtype)[0], made.data_ptr()
        sort.run(sort.row(tensor.data_ptr(), begin, tensor.numel(), rows))
        order = found.orders[rows] = begin, begin + 4 * (1 + rows), made
    return order


def stable_order(tensor: Tensor, rows: int) -> Tensor:
    """Return the places of the entries of an index tensor, (e,) below `rows`, in ascending order of these."""
    if tensor.is_cpu and tensor.numel() and sorting(tensor.dtype)[0].run is not None:
        return order_of(tensor.contiguous(), rows)[2][1 + rows :]
    return tensor.argsort(stable=True)


def clear_orders() -> None:
    """Forget every order, and the functions that sort."""
    for each in [*kept.values()]:
        each.orders = {}
    sorting.cache_clear()
