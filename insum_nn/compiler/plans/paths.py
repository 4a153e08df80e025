"""The program of a call: the one that the rule of `execution` names, or one that was measured to be faster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.options import Options
from insum_nn.compiler.plans import choice
from insum_nn.compiler.runtime.execution import Executable, executable, from_graph
from insum_nn.compiler.schedule.database import key_of, size_bucket
from insum_nn.compiler.schedule.tune import worth_measuring
from insum_nn.errors import InsumError
from insum_nn.facts import StaticTable

__all__ = ["fastest"]

# Fewest multiplications for which a dense contraction is measured against the library: neither compiles for long.
_WORTH_A_CALL = 2**20
_choosing = threading.RLock()


def fastest(
    bound: Bound,
    tensors: Sequence[Tensor],
    start: Tensor | None,
    extents: Extents,
    options: Options,
    static: tuple[tuple[str, StaticTable], ...] = (),
) -> Executable:
    """The program for a bound statement and sizes like these.

    Only `backend="auto"` has a choice, and only where terms may be added in any order: with `deterministic=True`, and
    for what is too small to be worth a measurement, the rule stands.
    """
    program = executable(bound, tensors, start, extents, options, static)
    if options.backend != "auto" or options.deterministic:
        return program
    if program.backend == "eager":
        # There is no other path, but for Inductor on a CPU: half a minute of C++, which no call can wait for.
        return program
    bucket = size_bucket(extents)
    chosen = program.chosen.get(bucket)
    if chosen is not None:
        return chosen
    least = {"least": _WORTH_A_CALL} if choice.is_library_call(program.plan) else {}
    if not worth_measuring(options, extents, **least) or 0 in extents.output or any(t.numel() == 0 for t in tensors):
        return program
    with _choosing:
        if bucket not in program.chosen:
            alternatives = _Alternatives(program, bound, tensors, start, extents, options)
            program.chosen[bucket] = alternatives.choose(bucket, dict(static))
        return program.chosen[bucket]


class _Alternatives:
    """The paths that compute one call."""

    def __init__(
        self,
        program: Executable,
        bound: Bound,
        tensors: Sequence[Tensor],
        start: Tensor | None,
        extents: Extents,
        options: Options,
    ) -> None:
        self.program = program
        self.bound = bound
        self.tensors = [t.detach() for t in tensors]
        self.start = start
        self.extents = extents
        self.options = options

    def choose(self, bucket: tuple[int, ...], tables: dict[str, StaticTable]) -> Executable:
        """The fastest, with what was measured."""
        program, options = self.program, self.options
        sizes = dict(zip(self.bound.layout.indices, self.extents.indices, strict=True))
        device = self.tensors[0].device
        key = key_of(
            "path",
            self.bound,
            tables,
            bucket,
            device,
            rule=program.backend,
            matmul=torch.get_float32_matmul_precision(),
            precision=options.precision,
            accumulate=options.accumulate,
            order=options.order,
            native_matmul=str(options.native_matmul),
        )
        offers = [choice.Offer(program.backend, lambda: self.ready(program))]
        if program.backend != "eager" and self.library_is_as_exact():
            library = self.other("eager")
            offers.append(choice.eager_offer(library.plan, sizes, lambda: self.ready(library)))
        if program.backend != "inductor" and not tables:
            ready = lambda: self.ready(self.other("inductor"))  # noqa: E731
            offers.append(choice.inductor_offer(program.plan, sizes, self.tensors, self.extents.output, ready))
        found = choice.choose_path(key, str(self.bound.statement), offers, device)
        if found is None:
            return program
        taken, reason = program, found.reason
        if found.backend != program.backend:
            try:
                taken = self.other(found.backend)
                self.ready(taken)
            except InsumError as error:
                # It ran where it was measured, perhaps under other versions.
                taken, reason = program, f"{reason}; not here: {error}"
        rule = ("rule", choice.NAMES[program.backend], program.reason)
        rows = (rule, *(candidate.row for candidate in found.candidates))
        if tables and program.backend != "inductor":
            why = "not tried: static tables are written out by generated kernels alone"
            rows = (*rows, choice.Candidate("inductor", None, why).row)
        return replace(taken, reason=reason, candidates=rows, chosen={})

    def other(self, backend: str) -> Executable:
        return from_graph(self.bound, self.tensors, self.extents, self.options, backend, "by measurement")

    def ready(self, program: Executable) -> Callable[[], Tensor]:
        run = program.prepare(self.tensors, self.extents, self.start)
        return lambda: run(self.tensors, self.start)

    def library_is_as_exact(self) -> bool:
        """Whether torch multiplies float32 no less exactly than was asked for by name."""
        asked, exact = self.options.precision, torch.get_float32_matmul_precision() == "highest"
        return asked in ("auto", "tf32") or self.bound.dtype != torch.float32 or exact
