"""Numbers that travel between the host and a GPU while that has other work to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from insum_nn.structure.plain_tensors import plain_tensors

__all__ = ["constant", "read_later"]

# Tensors of numbers that are kept, over all devices.
_MOST_CONSTANTS = 256

_Key = tuple[tuple[int, ...], torch.device, torch.dtype]
_constants: dict[_Key, Tensor] = {}
# Those that may still be on their way; other streams have to wait for them.
_sent: dict[_Key, torch.cuda.Event] = {}


def constant(values: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return (len(values),) these numbers on a device; kept, and not to be written.

    >>> constant((1, 2), torch.device("cpu")) is constant((1, 2), torch.device("cpu"))
    True
    """
    key = (values, device, dtype)
    found = _constants.get(key)
    if found is not None:
        sent = _sent.get(key) if _sent else None
        if sent is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).wait_event(sent)
            if sent.query():
                _sent.pop(key, None)
        return found
    with plain_tensors():
        # While a graph is captured nothing may be kept that only its replays send; torch refuses the plain way then.
        sends = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        found = _send(key) if sends else torch.tensor(values, dtype=dtype, device=device)
    # A tensor that is only traced is of no use to others.
    if type(found) is Tensor:
        if len(_constants) >= _MOST_CONSTANTS:
            _constants.clear()
            _sent.clear()
        _constants[key] = found
    return found


def _send(key: _Key) -> Tensor:
    """From memory that the device reads by itself; from other memory, the host would wait for all that is queued."""
    values, device, dtype = key
    found = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)
    sent = _sent[key] = torch.cuda.Event()
    sent.record(torch.cuda.current_stream(device))
    return found


def read_later(numbers: Tensor) -> Callable[[], list[int]]:
    """Send numbers to the host behind what the device has to do now; what is returned waits for them.

    >>> read_later(torch.tensor([3, 1]))()
    [3, 1]
    """
    copied, done = numbers, None
    if numbers.device.type == "cuda":
        copied = numbers.to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(numbers.device))
    found: list[list[int]] = []

    def read() -> list[int]:
        if not found:
            if done is not None:
                done.synchronize()
            found.append(copied.tolist())
        return found[0]

    return read
