"""Record torch calls, and print them as the Python function that runs.

`torch.fx` could do the same and took half of the time of a first call.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.ir.nodes import Buffer, Size
from insum_nn.compiler.lang import functions
from insum_nn.locks import cached_property

__all__ = ["Call", "CallGraph"]

_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.ge: ">=",
    operator.gt: ">",
    operator.lt: "<",
}
_SHADOWING = {*dir(builtins), *keyword.kwlist, "torch", "inf", "nan"}


@dataclass(slots=True, eq=False)
class Call:
    """An argument, or the value of a call.

    Attributes:
        name: of the variable.
        target: the function, or a method's name, of which `args[0]` is the object; `None`: it is an argument.
        args: what it is called with; tuples and lists may hold calls.
        kwargs: by name.
    """

    name: str
    target: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def inputs(self) -> Iterator[Call]:
        """Yield the calls whose values it takes."""
        return _calls_in((*self.args, *self.kwargs.values()))

    def __repr__(self) -> str:
        return self.name

    def text(self) -> str:
        """Return the call in Python."""
        args = self.args
        if self.target is getattr:
            return f"{args[0]!r}.{args[1]}"
        if self.target in _INFIX:
            return f"{args[0]!r} {_INFIX[self.target]} {args[1]!r}"
        listed = [*map(repr, args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        if isinstance(self.target, str):
            return f"{listed[0]}.{self.target}({', '.join(listed[1:])})"
        return f"{_name_of(self.target)}({', '.join(listed)})"


class CallGraph:
    """Calls in order; once it is finished, `forward` runs them.

    Attributes:
        arguments: what it takes, and what that stands for.
        calls: of functions and methods.
        output: whose value it returns.
        decisions: the choices that led to the calls: about what, which, and why.
    """

    output: Call

    def __init__(self) -> None:
        self.arguments: list[tuple[Call, Buffer | Size]] = []
        self.calls: list[Call] = []
        self.counts: dict[str, int] = {}
        self.decisions: list[tuple[str, str, str]] = []

    # Recording.

    def argument(self, stands_for: Buffer | Size) -> Call:
        """Take one more argument."""
        call = Call(f"arg{len(self.arguments)}")
        self.arguments.append((call, stands_for))
        return call

    def function(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Call a function."""
        return self._called(target.__name__.replace(".", "_").lower(), target, args, kwargs)

    def method(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Call a method of the first of `args`."""
        return self._called(name, name, args, kwargs)

    def finish(self, output: Call) -> None:
        """Return the value of a call, and drop those that nothing needs."""
        self.output = output
        needed = {output}
        for call in reversed(self.calls):
            if call in needed:
                needed.update(call.inputs())
        self.calls = [call for call in self.calls if call in needed]

    def _called(self, name: str, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Any) -> Call:
        count = self.counts.get(name, int(name in _SHADOWING))
        self.counts[name] = count + 1
        self.calls.append(Call(f"{name}_{count}" if count else name, target, args, kwargs))
        return self.calls[-1]

    # What was recorded.

    @property
    def code(self) -> str:
        """Return the function's text, without the statements that free memory."""
        return self._text(free=False)

    @cached_property
    def forward(self) -> Callable[..., Tensor]:
        """Compile the function."""
        names: dict[str, Any] = {"torch": torch, "operator": operator, "inf": math.inf, "nan": math.nan}
        names["functions"] = functions
        exec(compile(self._text(free=True), "<insum_nn library calls>", "exec"), names)
        return names["forward"]  # type: ignore[no-any-return]

    def __call__(self, *args: Any) -> Tensor:
        return self.forward(*args)

    def _text(self, *, free: bool) -> str:
        lines = [f"def forward({', '.join(call.name for call, _ in self.arguments)}):"]
        done = self._last_uses() if free else {}
        for call in self.calls:
            lines.append(f"    {call.name} = {call.text()}")
            if call in done:
                lines.append(f"    del {', '.join(each.name for each in done[call])}")
        lines.append(f"    return {self.output.name}")
        return "\n".join(lines) + "\n"

    def _last_uses(self) -> dict[Call, list[Call]]:
        """Find the values that no later call takes, after each call; arguments are the caller's."""
        seen = {self.output}
        found: dict[Call, list[Call]] = {}
        for call in reversed(self.calls):
            for value in call.inputs():
                if value not in seen and value.target is not None:
                    seen.add(value)
                    found.setdefault(call, []).append(value)
        return found


def _calls_in(values: Any) -> Iterator[Call]:
    for value in values:
        if isinstance(value, Call):
            yield value
        elif isinstance(value, tuple | list):
            yield from _calls_in(value)


def _name_of(target: Any) -> str:
    """Return the text by which a function is called."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = target.__name__
    if getattr(target, "__module__", None) == "_operator":
        return f"operator.{name}"
    if target.__module__ == functions.__name__:
        return f"functions.{name}"
    for place, where in (("torch", torch), ("torch.nn.functional", torch.nn.functional)):
        if target is getattr(where, name, None):
            return f"{place}.{name}"
    raise AssertionError(f"no name for {target}")
