"""Which statements a call of a layer or an operator runs, and on what: for explanations, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from insum_nn.compiler.runtime.program import Program

__all__ = ["StatementCall", "statement_calls", "watched"]


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


# The calls of this thread; `None`: it does not collect them.
watched: ContextVar[list[StatementCall] | None] = ContextVar("watched", default=None)


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
    before = watched.set(own)
    try:
        function()
    finally:
        watched.reset(before)
    return own
