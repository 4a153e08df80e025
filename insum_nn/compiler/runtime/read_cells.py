"""Find the cells that no term addresses.

    dW[k,n] += dC[Row[p],n] * Val[p] * X[Col[p],k]

is `T[Row[p],k] += Val[p] * X[Col[p],k]`, then `dW[k,n] += T[i,k] * dC[i,n]`. A row of `dC` that no term reads meets a
row of `T` that is 0, and what is not finite there must not show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.lang.index_checks import cell_numbers
from insum_nn.compiler.passes.cut_products import Clear, Place
from insum_nn.compiler.schedule.product_cost import Sizes
from insum_nn.tensor_cache import TensorCache

__all__ = ["UnreadCells"]

# Such cells at the sizes of a call; of a tensor that has none, `None`.
_found: TensorCache[tuple[Tensor | None]] = TensorCache(limit=64)


class UnreadCells:
    """The cells of a `Clear` at the sizes of a call, kept while its index tensors live and are not written to.

    Args:
        clear: what is cleared.
        sizes: of the statement that was cut.
        output: the name of its output.
    """

    def __init__(self, clear: Clear, sizes: Sizes, output: str) -> None:
        self.clear = clear
        places = (clear.place, *clear.terms)
        self.shapes = [tuple(sizes.output if p.access.name == output else sizes.shapes[p.access.name]) for p in places]
        self.labels = tuple(dict.fromkeys(index for place in places for index in place.indices))
        self.sizes = {label: sizes.indices[label] for label in self.labels}
        nested = [access for place in places for s in place.subscripts for access in s.index_accesses()]
        self._indexed = tuple(dict.fromkeys(a.name for access in nested for a in (access, *access.nested())))

    def unread(self, named: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """True for the cells that no term addresses, in a shape that broadcasts to the tensor's."""
        shape, axes = self.shapes[0], self.clear.place.axes
        numbers = self._numbers(self.clear.place, shape, named, device)
        for place, other in zip(self.clear.terms, self.shapes[1:], strict=True):
            numbers = torch.where(self._numbers(place, other, named, device) < 0, -1, numbers)
        # Missing entries point to one more cell before the others.
        unread = torch.ones(1 + math.prod(shape[axis] for axis in axes), dtype=torch.bool, device=device)
        unread[numbers.reshape(-1) + 1] = False
        return unread[1:].reshape([extent if axis in axes else 1 for axis, extent in enumerate(shape)])

    def _numbers(self, place: Place, shape: Sequence[int], named: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Number the cells that terms address, over all indices; -1 where they miss."""
        own = tuple(label for label in self.labels if label in place.indices)
        # Without an index tensor the accessed tensor gives the device.
        named = {"": torch.empty(0, device=device), **named}
        numbers = cell_numbers(place.access, place.axes, own, named, self.sizes, shape)
        return numbers.reshape([self.sizes[label] if label in own else 1 for label in self.labels])

    def kept(self, named: Mapping[str, Tensor]) -> Tensor | None:
        """`unread` of the tensors of a call, found once for the same index tensors; `None`: there are no such cells."""
        indexed, first = [named[name] for name in self._indexed], next(iter(named.values()))
        found = _found.find(indexed, self)
        if found is not None:
            return found[0]
        with torch.inference_mode(False), torch.no_grad():
            unread = self.unread(named, first.device)
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return unread
        return _found.keep(indexed, self, (unread if bool(unread.any()) else None,))[0]
