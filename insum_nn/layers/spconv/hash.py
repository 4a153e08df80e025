"""`spconv.pytorch.hash`: a table from integer keys to values."""

from __future__ import annotations

import torch
from torch import Tensor

from insum_nn.dtypes import INDEX_DTYPES
from insum_nn.errors import InsumDtypeError, InsumShapeError
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
        if key_dtype not in INDEX_DTYPES:
            raise InsumDtypeError(
                f"HashTable: keys must be int32 or int64, got {str(key_dtype).removeprefix('torch.')}",
                fix="pass key_dtype=torch.int64.",
                argument="key_dtype",
                got=key_dtype,
            )
        if not self.is_cpu and max_size <= 0:
            raise InsumShapeError(
                f"HashTable: a table on {self.device.type} needs 'max_size', got {max_size}",
                fix="pass the number of keys that may be stored, usually twice those that will be.",
                argument="max_size",
                got=max_size,
            )
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
        if values is None:
            new = keys[~self._find(keys)[1]].unique()
            keys, values = new, torch.zeros(new.shape[0], dtype=self.value_dtype, device=self.device)
        every = torch.cat([self._keys, keys.to(self.device)])
        ordered, order = every.sort(stable=True)
        # The last of equal keys, which the sort keeps in their order.
        last = torch.ones_like(ordered, dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        count = int(last.sum())
        if not self.is_cpu and count > self.max_size:
            raise InsumShapeError(
                f"HashTable: {count} keys, and max_size is {self.max_size}",
                fix="make the table with a larger max_size.",
                expected=self.max_size,
                got=count,
            )
        self._keys = ordered[last]
        self._values = torch.cat([self._values, values.to(self.device, self.value_dtype)])[order[last]]

    def query(self, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Look keys up.

        Args:
            keys: (n,).
            values: (n,) to write to; default: new. Places of keys that are not there stay, and are 0 where it is new.

        Returns:
            The values, and (n,) bool: whether a key is not there.
        """
        self._check("query", keys, values)
        place, there = self._find(keys)
        out = torch.zeros(keys.shape[0], dtype=self.value_dtype, device=keys.device) if values is None else values
        out[there] = self._values[place[there]].to(out)
        return out, ~there

    def insert_exist_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Store values under keys that are there already; of a key that is given twice, the last.

        Returns:
            (n,) uint8: 1 where a key is not there.
        """
        self._check("insert_exist_keys", keys, values)
        place, there = self._find(keys)
        # Writes to one place have no order on a GPU, so the last one is found first.
        last = torch.full_like(self._keys, -1, dtype=torch.int64)
        last.scatter_reduce_(0, place[there], there.nonzero().flatten(), "amax")
        written = last >= 0
        self._values[written] = values[last[written]].to(self._values)
        return (~there).to(torch.uint8)

    def assign_arange_(self) -> Tensor:
        """Number the keys from 0, in ascending order; (1,): how many there are."""
        self._values = torch.arange(self._keys.shape[0], device=self.device).to(self.value_dtype)
        return self._count()

    def items(self, max_size: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and (1,) their number.

        On a CPU these are all; elsewhere they stand at the beginning of tensors of `max_size`, by default the table's.
        """
        if self.is_cpu:
            return self._keys.clone(), self._values.clone(), self._count()
        size = self.max_size if max_size == -1 else max_size
        padded = [torch.zeros(size, dtype=t.dtype, device=self.device) for t in (self._keys, self._values)]
        for target, source in zip(padded, (self._keys, self._values), strict=True):
            target[: source.shape[0]] = source[:size]
        return padded[0], padded[1], self._count()

    def _count(self) -> Tensor:
        dtype = torch.int64 if self.is_cpu else self.key_dtype
        return torch.tensor([self._keys.shape[0]], dtype=dtype, device=self.device)

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each key stands, and whether it does."""
        wanted = keys.to(self.device)
        if not self._keys.shape[0]:
            return torch.zeros_like(wanted, dtype=torch.int64), torch.zeros_like(wanted, dtype=torch.bool)
        place = torch.searchsorted(self._keys, wanted.contiguous()).clamp_(max=self._keys.shape[0] - 1)
        return place, self._keys[place] == wanted

    def _check(self, method: str, keys: Tensor, values: Tensor | None) -> None:
        faults = Faults(f"HashTable.{method}")
        if keys.dtype != self.key_dtype:
            message, fix = f"must be {self.key_dtype}, got {keys.dtype}", f"pass keys.to({self.key_dtype})."
            faults.add(InsumDtypeError, "keys", message, fix=fix, expected_got=(self.key_dtype, keys.dtype))
        known, fix = ["expected one axis, and a value for each key"], "pass flat tensors of one length."
        faults.shape("keys", keys, ("n",), details=known, fix=fix)
        if values is not None:
            faults.shape("values", values, keys.shape, details=known, fix=fix)
        faults.raise_all()
