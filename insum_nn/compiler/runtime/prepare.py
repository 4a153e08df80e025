"""`prepare`: compile the kernels of a module's step before the first step, by several processes."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from insum_nn.compiler.forms.ahead import Collection, Compiled, collect, compile_all, default_workers
from insum_nn.compiler.schedule.progress import Progress
from insum_nn.errors import InsumBackendError, InsumFormatError

__all__ = ["PrepareReport", "prepare"]

_log = logging.getLogger("insum_nn.prepare")


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` found and compiled; `str()` is a line.

    Attributes:
        kernels: the kernels of a step that were not loaded yet.
        launches: how often a step launches them.
        trace_seconds: that it took to find them.
        compile_seconds: that it took to compile them.
        workers: processes that compiled.
    """

    kernels: tuple[Compiled, ...]
    launches: int
    trace_seconds: float
    compile_seconds: float
    workers: int

    @property
    def compiled(self) -> int:
        """Kernels that were compiled now; the others were on disk."""
        return sum(not each.found and not each.error for each in self.kernels)

    @property
    def found(self) -> int:
        """Kernels whose machine code was on disk."""
        return sum(each.found for each in self.kernels)

    def __str__(self) -> str:
        return (
            f"{len(self.kernels)} kernels for {self.launches} launches, found in {self.trace_seconds:.1f} s: "
            f"{self.compiled} compiled in {self.compile_seconds:.1f} s by {self.workers} processes, "
            f"{self.found} were on disk"
        )


def prepare(
    module: nn.Module,
    *inputs: Any,
    backward: bool = True,
    double_backward: bool = False,
    workers: int | None = None,
    **named: Any,
) -> PrepareReport:
    """Compile every kernel that a step of a module needs, in parallel, before the first step.

    A copy of the module runs once on copies of the inputs, under the caller's autocast and in the module's mode.
    Generated kernels are noted and not run, and what they would write is zero; everything else runs, since the kernels
    of a step depend on sizes that index tensors decide. Nothing is measured, and neither the module, its gradients nor
    the state of random numbers changes. The machine code is kept on disk, for this process and all that follow.
    A module on a CPU has no such kernels; then its programs are planned, which takes a part of a first call too.

    Args:
        module: a module; it must be possible to copy it.
        *inputs: as in a call, of the sizes, dtypes and device of a training step.
        backward: also the gradients of the outputs by parameters, and by inputs that require them.
        double_backward: also the gradients of these gradients, where a loss contains derivatives, such as forces.
        workers: number of processes; by default as many as this one may use processors, 16 at most.
        **named: as in a call.

    Returns:
        What was found and compiled.

    Raises:
        InsumFormatError: the module or an input cannot be copied.
        InsumBackendError: a kernel could not be compiled.

    >>> layer = torch.nn.Linear(4, 2)
    >>> report = prepare(layer, torch.ones(3, 4))
    >>> len(report.kernels), layer.weight.grad
    (0, None)
    """
    begin = time.perf_counter()
    own, args, kwargs = _copied(module, inputs, named)
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with collect() as collection, torch.random.fork_rng(devices):
        _step(own, args, kwargs, backward, double_backward)
    traced = time.perf_counter() - begin
    del own, args, kwargs
    kernels, seconds, count = _compile(collection, workers)
    report = PrepareReport(tuple(kernels), collection.launches, traced, seconds, count)
    _log.info("%s", report)
    return report


def _copied(module: nn.Module, inputs: Sequence[Any], named: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """Copies that share nothing with the originals, as what is kept of tensors must not come from a step of zeros."""

    def leaf(value: Any) -> Any:
        # What was computed cannot be copied with its history.
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.detach().requires_grad_()
        return value

    given = pytree.tree_map(leaf, (tuple(inputs), dict(named)))
    try:
        own, (args, kwargs) = copy.deepcopy((module, given))
    except Exception as error:
        raise InsumFormatError(
            f"the module and its inputs cannot be copied: {type(error).__name__}: {error}",
            fix="pass a module and tensors that copy.deepcopy takes; detach tensors inside of other objects.",
        ) from error
    return own, args, kwargs


def _step(module: nn.Module, args: Any, kwargs: Any, backward: bool, double_backward: bool) -> None:
    with torch.set_grad_enabled(backward or double_backward):
        outputs = _recorded(module(*args, **kwargs))
        if not outputs:
            return
        if double_backward:
            leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            leaves = leaves or [p for p in module.parameters() if p.requires_grad]
            ones = [torch.ones_like(t) for t in outputs]
            found = torch.autograd.grad(outputs, leaves, ones, create_graph=True, allow_unused=True)
            outputs += _recorded(found)
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _recorded(value: Any) -> list[Tensor]:
    """The tensors in a value, or in the attributes of its objects, that have gradients to send back."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def visit(each: Any, depth: int) -> None:
        if isinstance(each, Tensor):
            if each.requires_grad and each.grad_fn is not None:
                found[id(each)] = each
        elif id(each) not in seen and depth < 4:
            seen.add(id(each))
            leaves = pytree.tree_leaves(each)
            if len(leaves) == 1 and leaves[0] is each:
                leaves = list(getattr(each, "__dict__", {}).values())
            for leaf in leaves:
                visit(leaf, depth + 1)

    visit(value, 0)
    return [*found.values()]


def _compile(collection: Collection, workers: int | None) -> tuple[list[Compiled], float, int]:
    codes = [*collection.codes]
    count = default_workers(len(codes)) if workers is None else max(1, min(workers, len(codes)))
    begin = time.perf_counter()
    if not codes:
        return [], 0.0, 0
    with Progress("compiling kernels", len(codes)) as progress:
        done = compile_all(codes, count, lambda _: progress.step())
    failed = [each for each in done if each.error]
    if failed:
        raise InsumBackendError(
            f"{len(failed)} of {len(done)} kernels could not be compiled; the first: {failed[0].error}",
            fix="report the statement and its sizes; Options(backend='eager') runs it by library calls.",
        )
    return done, time.perf_counter() - begin, count
