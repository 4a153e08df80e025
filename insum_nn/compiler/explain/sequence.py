"""What becomes of a statement that runs as several: the order, and each statement's explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from insum_nn.compiler.explain.report import Decision, Explanation, explain_program
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.execution import Executable, in_names_of, stages

__all__ = ["explain_call", "median_seconds"]

Inputs = tuple[Sequence[Tensor], Tensor | None]


def explain_call(
    statement: Statement,
    options: Options,
    extents: Extents | None,
    program: Executable | None,
    inputs: Inputs | None,
    seconds: float | None = None,
    **about: Any,
) -> Explanation:
    """Collect what there is to say of a call; the arguments are those of `explain_program`."""
    if program is None or program.run is not None:
        whole = explain_program(statement, options, extents, program, inputs, seconds, **about)
        order = (_order(program),) if program is not None and program.parts else ()
        return replace(whole, _choices=(*order, *whole._choices))
    assert inputs is not None
    parts: list[Explanation] = []
    for stage, own, tensors, _ in stages(program, *inputs):
        has_initial = own.bound.has_initial
        part = in_names_of(own, replace(stage.bound, has_initial=has_initial))
        bound, operands = part.bound, (tensors, inputs[1] if has_initial else None)
        found = explain_program(bound.statement, options, stage.extents, part, operands, epilogue=bound.epilogue)
        parts.append(found)
    whole = explain_program(statement, options, extents, None, inputs, seconds, **about)
    backends = dict.fromkeys(str(part.backend) for part in parts)
    return replace(
        whole,
        backend=" and ".join(backends),
        reason=program.reason,
        parts=tuple(parts),
        schedule="one statement after the other",
        compile_seconds=sum(part.compile_seconds or 0.0 for part in parts),
        _choices=tuple(_choices(program, parts)),
    )


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median seconds of a call."""
    from torch.utils.benchmark import Timer

    call()
    return float(Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.1).median)


def _order(program: Executable) -> Decision:
    order = ", then ".join(str(part.bound.statement) for part in program.parts)
    assert program.costs is not None
    cost, whole = program.costs
    return Decision("order", order, f"{cost}, where the whole takes {whole}")


def _choices(program: Executable, parts: Sequence[Explanation]) -> Iterator[Decision]:
    """Return the order with its counts, what is cleared for it, and the choices of each statement."""
    yield _order(program)
    for part in program.parts:
        for each in part.clears:
            what = f"in {each.clear.name}, entries of {each.clear.place.access.name} that no term reads are set to 0"
            yield Decision("cleared", what, "a NaN there cannot spread")
        for each in part.unwritten:
            what = f"entries of {each.clear.name} that no term writes are set to 0"
            yield Decision("cleared", what, "the gradient of what no term reads is 0")
    for number, part in enumerate(parts, start=1):
        yield from (replace(d, topic=f"statement {number}, {d.topic}") for d in part.decisions)
