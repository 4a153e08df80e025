"""The base of layers that run statements: they print and explain these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch

from insum_nn.compiler.api import statement_calls
from insum_nn.compiler.options import DEFAULT
from insum_nn.facts import IndexFacts
from insum_nn.ops.statements import program_of

__all__ = ["StatementLayer", "renamed", "with_attributes"]


class StatementLayer:
    """A module that runs statements: `expression` and `repr` show them.

    A layer names its statements in `EXPRESSION`, or in `_statements` where they follow its arguments or its device.
    """

    if TYPE_CHECKING:
        # TorchScript reads the annotations of the first class that has any, which are to be those of the layer's peer.
        EXPRESSION: str

    def _statements(self) -> Sequence[str]:
        """Return the statements that a call runs, in order."""
        return (self.EXPRESSION,)

    def _elsewhere(self) -> Mapping[str, Sequence[str]]:
        """Return what calls of other kinds run in place of these: statements by kind, or none of ours."""
        return {}

    # TorchScript compiles properties unless told otherwise.
    @property
    @torch.jit.unused
    def expression(self) -> str:
        """The statements that the layer runs, one a line: first those of a usual call, then those of other calls."""
        return "\n".join([*self._statements(), *(text for texts in self._elsewhere().values() for text in texts)])

    def __repr__(self) -> str:
        return self._shown(super().__repr__())

    def _shown(self, head: str) -> str:
        """Return the statements below a module's own text."""
        lines = [head, *self._statements()]
        for kind, texts in self._elsewhere().items():
            lines += [f"{kind}:" if texts else kind, *(f"  {text}" for text in texts)]
        return "\n  ".join(lines)

    def _facts(self) -> Mapping[str, IndexFacts]:
        """Return what is guaranteed of the index tensors of its statements."""
        return {}

    # Which statement of a call is explained by default; no annotation, see above.
    _EXPLAINED = -1

    def explain_statement(self, *inputs: Any, statement: int | None = None, measure: bool = False, **named: Any) -> Any:
        """Explain how a statement of a call runs; see `Program.explain`. Layers whose peer has no `explain` call it so.

        Args:
            *inputs: those of the call, which runs; without any, only what the first statement's text alone says is
                shown.
            statement: which one, from 0 on; by default the last, of tensor products the first.
            measure: also time it.
            **named: inputs by name.

        Returns:
            The compiler's `Explanation`.
        """
        if not inputs and not named:
            return program_of(self._statements()[0], self._facts(), getattr(self, "options", DEFAULT)).explain()
        with torch.no_grad():
            calls = statement_calls(lambda: cast(Any, self)(*inputs, **named))
        number, count = self._EXPLAINED if statement is None else statement, len(calls)
        explained = calls[number].explain(measure=measure)
        if count > 1:
            others = f"the output is computed by {count} statements; explain(..., statement=n) shows another, from 0 on"
            explained = explained.with_choice("statement", f"{number % count + 1} of {count}", others)
        return explained


def with_attributes(new: Any, module: Any) -> Any:
    """Return a module that was given what another one is made of: its state, children and attributes."""
    new.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in vars(module).items()})
    return new


def renamed(function: Any, name: str) -> Callable[..., Any]:
    """Return the same function under another name, by which TorchScript knows methods: a class has one `forward`."""
    copy = FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__annotations__ = function.__annotations__
    return copy
