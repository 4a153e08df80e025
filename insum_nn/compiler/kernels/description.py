"""What a call runs, step by step, for `explain()`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from insum_nn.compiler.forms.nest import Source
from insum_nn.compiler.kernels.row_partition import RowPartition
from insum_nn.compiler.kernels.sized import Kernel

__all__ = ["Description", "Printed", "describe_kernel"]

Choice = tuple[str, str, str]


class Printed(Protocol):
    """Something whose code can be shown."""

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Description:
    """What a call runs, and why.

    Attributes:
        schedule: how it is carried out; of a kernel, how it spreads over programs and lanes.
        steps: launches of generated kernels, and the torch calls between them, in order.
        sources: these kernels, in order.
        choices: topic, choice and reason of every choice.
        torch_code: library calls, where no kernel is generated.
    """

    schedule: str | None = None
    steps: tuple[str, ...] = ()
    sources: tuple[Printed, ...] = ()
    choices: tuple[Choice, ...] = ()
    torch_code: str | None = None


def describe_kernel(
    kernel: Kernel, initial: Tensor | None, partition: RowPartition | None, choices: Iterable[Choice]
) -> Description:
    """Describe a call of a prepared kernel: memory that is filled, the kernel, and what completes its sums.

    Args:
        kernel: the kernel.
        initial: the initial value.
        partition: the row partition of its terms, where it reads one.
        choices: topic, choice and reason of every choice behind it.
    """
    source, schedule, dtype = kernel.source, kernel.source.schedule, kernel.of.dtype
    epilogue = kernel.of.form.bound.epilogue
    divided = 0 if partition is None or not kernel.grid else partition.slots
    steps = [*_filled(kernel, initial, partition)]
    sources: list[Source] = []
    if kernel.grid:
        steps.append(f"kernel on {_count(kernel.grid, 'program')}: {schedule}")
        sources.append(source)
    if divided:
        assert partition is not None
        assert partition.divided is not None
        assert kernel.of.collector is not None
        rows = _count(partition.divided.shape[0], "row")
        steps.append(f"kernel that sums the {divided} parts of {rows} in order")
        shape, axis = kernel.extents.output, kernel.of.form.row_axis
        sources.append(kernel.of.collector.source(math.prod((*shape[:axis], *shape[axis + 1 :]))))
        then = [] if initial is None else ["add the initial value"]
        then += [] if epilogue.activation is None else [epilogue.activation]
        if then:
            steps.append(f"torch: {', '.join(then)}, and copy these rows to the output")
    if schedule.splits > 1:
        steps.append(f"torch: sum the {schedule.splits} parts{'' if initial is None else ', add the initial value'}")
    if not source.finished and epilogue.activation is not None:
        steps.append(f"torch: {epilogue.activation}")
    if source.accumulator != dtype and (schedule.splits > 1 or not source.finished):
        steps.append(f"torch: cast to {_name(dtype)}")
    return Description(str(schedule), tuple(steps), tuple(sources), tuple(choices))


def _filled(kernel: Kernel, initial: Tensor | None, partition: RowPartition | None) -> Iterable[str]:
    """Describe what is written to memory before the kernel runs: nothing where it writes every cell itself."""
    source, output = kernel.source, kernel.of.form.bound.statement.output.name
    dtype = _name(kernel.of.dtype if source.finished else source.accumulator)
    if source.schedule.splits > 1:
        if not kernel.empty:
            yield f"torch: zeros for {source.schedule.splits} parts of the sum, in {_name(source.accumulator)}"
    elif not kernel.empty or (partition is not None and partition.empty_rows):
        # Rows that no term reaches, or cells that terms are added to.
        if initial is None:
            yield f"torch: zeros for {output}, in {dtype}"
        else:
            activation = kernel.of.form.bound.epilogue.activation if source.finished else None
            what = "the initial value" if activation is None else f"{activation} of the initial value"
            yield f"torch: copy {what} to {output}, in {dtype}"
    if partition is not None and partition.split and not kernel.empty:
        yield "torch: zeros for the parts of divided rows"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
