"""`spconv.pytorch.hash`: a table from integer keys to values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from insum_nn.dtypes import INDEX_DTYPES
from insum_nn.errors import InsumShapeError
from insum_nn.faults import Faults

__all__ = ["HashTable"]


class HashTable:
    """Values by key; `spconv.pytorch.hash.HashTable`'s interface, over sorted keys on any device.

    Attributes:
        is_cpu: whether the table is on a CPU, where it grows; elsewhere it holds at most `max_size` keys.
        key_dtype: int32 or int64.
        value_dtype: any.

    >>> table = HashTable(torch.device("cpu"), torch.int32, torch.int64)
    >>> table.insert(torch.tensor([7, 3], dtype=torch.int32), torch.tensor([70, 30]))
    >>> values, missing = table.query(torch.tensor([3, 4], dtype=torch.int32))
    >>> int(values[0]), missing.tolist()
    (30, [False, True])
    """

    def __init__(
        self, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype, max_size: int = -1
    ) -> None:
        """Make an empty table.

        Raises:
            InsumDtypeError: keys are neither int32 nor int64.
            InsumShapeError: a table on another device than a CPU has no `max_size`.
        """
        self.device = torch.device(device)
        self.is_cpu = self.device.type == "cpu"
        self.key_dtype, self.value_dtype, self.max_size = key_dtype, value_dtype, max_size
        faults = Faults("HashTable")
        faults.dtype_among("key_dtype", key_dtype, INDEX_DTYPES, fix="pass key_dtype=torch.int64.")
        if not self.is_cpu and max_size <= 0:
            message = f"is {max_size}, and a table on {self.device.type} holds so many keys"
            faults.add(InsumShapeError, "max_size", message, fix="pass twice the number of keys that will be stored.")
        faults.raise_all()
        self._keys = torch.empty(0, dtype=key_dtype, device=self.device)
        self._values = torch.empty(0, dtype=value_dtype, device=self.device)

    def insert(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Store values under keys, in place of those that stand there; of a key that is given twice, the last.

        Args:
            keys: (n,).
            values: (n,); without them what stands under a new key is 0, and known keys keep theirs.

        Raises:
            InsumShapeError: more than `max_size` keys.
        """
        self._check("insert", keys, values)
        values = self.query(keys)[0] if values is None else values
        every, order = torch.cat([self._keys, keys.to(self.device)]).sort(stable=True)
        # The last of equal keys, which the sort keeps in their order.
        known, counts = every.unique_consecutive(return_counts=True)
        last = counts.cumsum(0) - 1
        if not self.is_cpu and known.shape[0] > self.max_size:
            message = f"HashTable.insert: 'max_size' is {self.max_size}, and there are {known.shape[0]} keys"
            raise InsumShapeError(message, fix="make the table with a larger max_size.")
        self._values = torch.cat([self._values, values.to(self.device, self.value_dtype)])[order[last]]
        self._keys = known

    def query(self, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Look keys up.

        Args:
            keys: (n,).
            values: (n,) to write to; default: new. Places of keys that are not there stay, and are 0 where it is new.

        Returns:
            The values, and (n,) bool: whether a key is not there.
        """
        self._check("query", keys, values)
        wanted = keys.to(self.device)
        place = torch.searchsorted(self._keys, wanted.contiguous())
        # The place after the last key is that of no key.
        there = (pad(self._keys, (0, 1))[place] == wanted) & (place < self._keys.shape[0])
        out = torch.zeros(keys.shape[0], dtype=self.value_dtype, device=keys.device) if values is None else values
        out[there] = self._values[place[there]].to(out)
        return out, ~there

    def insert_exist_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Store values under keys that are there already; of a key that is given twice, the last.

        Returns:
            (n,) uint8: 1 where a key is not there.
        """
        self._check("insert_exist_keys", keys, values)
        missing = self.query(keys)[1]
        self.insert(keys[~missing], values[~missing])
        return missing.to(torch.uint8)

    def assign_arange_(self) -> Tensor:
        """Number the keys from 0, in ascending order; (1,): how many there are."""
        self._values = torch.arange(self._keys.shape[0], device=self.device).to(self.value_dtype)
        return self.items()[2]

    def items(self, max_size: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and (1,) their number.

        On a CPU these are all; elsewhere they stand at the beginning of tensors of `max_size`, by default the table's.
        """
        count = self._keys.shape[0]
        size = count if self.is_cpu else self.max_size if max_size == -1 else max_size
        number = torch.tensor([count], dtype=torch.int64 if self.is_cpu else self.key_dtype, device=self.device)
        return pad(self._keys, (0, size - count)), pad(self._values, (0, size - count)), number

    def _check(self, method: str, keys: Tensor, values: Tensor | None) -> None:
        faults = Faults(f"HashTable.{method}")
        faults.dtype_among("keys", keys.dtype, (self.key_dtype,), fix=f"pass keys.to({self.key_dtype}).")
        known, fix = ["expected one axis, and a value for each key"], "pass flat tensors of one length."
        faults.shape("keys", keys, ("n",), details=known, fix=fix)
        if values is not None:
            faults.shape("values", values, keys.shape, details=known, fix=fix)
        faults.raise_all()
