"""Which statements a call of a layer or an operator runs, and on what: for explanations, and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from insum_nn.locks import new_lock

if TYPE_CHECKING:
    from insum_nn.compiler.runtime.program import Program

__all__ = ["StatementCall", "statement_calls", "unwatched", "watch"]


class StatementCall(NamedTuple):
    """A statement that ran.

    Attributes:
        program: its program.
        tensors: what it read by name, the initial value among them.
        sizes: extents that no tensor shows.
        out_shape: the output's, as the call gave it.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int] | None
    out_shape: Sequence[int | None] | None

    def explain(self, *, measure: bool = False) -> Any:
        """Explain how it ran; see `Program.explain`."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return self.program.explain(tensors=tensors, sizes=self.sizes, out_shape=self.out_shape, measure=measure)


class _Watch:
    """What calls of programs look at: `calls` is `None` unless some thread collects its own.

    One attribute of one object, since each call of each program reads it.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: dict[int, list[StatementCall]] | None = None

    def saw(self, *call: Any) -> None:
        """Keep a call of the thread that runs, if it collects its calls."""
        own = None if self.calls is None else self.calls.get(threading.get_ident())
        if own is not None:
            own.append(StatementCall(*call))


watch = _Watch()
_lock = new_lock()


@contextmanager
def _collected_by(own: list[StatementCall] | None) -> Generator[None]:
    """Have the calls of this thread listed in `own`, or not at all."""
    key = threading.get_ident()
    before = (watch.calls or {}).get(key)
    _set(key, own)
    try:
        yield
    finally:
        _set(key, before)


def _set(key: int, own: list[StatementCall] | None) -> None:
    with _lock:
        calls = {thread: listed for thread, listed in (watch.calls or {}).items() if thread != key}
        if own is not None:
            calls[key] = own
        watch.calls = calls or None


def unwatched() -> AbstractContextManager[object]:
    """Leave out calls of this thread that are no part of what it was asked to run."""
    return nullcontext() if watch.calls is None else _collected_by(None)


def statement_calls(function: Callable[[], object]) -> list[StatementCall]:
    """Call a function, and return the statements that it ran in this thread, in order.

    The gradients of a statement are listed only where a layer computes them by statements of its own.

    >>> from insum_nn.compiler.runtime.program import Program
    >>> import torch
    >>> calls = statement_calls(lambda: Program("y[i] += x[i]")(x=torch.ones(2)))
    >>> calls[0].program.expression, calls[0].tensors["x"].tolist()
    ('y[i] += x[i]', [1.0, 1.0])
    """
    own: list[StatementCall] = []
    with _collected_by(own):
        function()
    return own
