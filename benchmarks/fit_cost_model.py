"""Fit the rates of the cost model to measured times, and say how far it is off.

    python -m benchmarks.fit_cost_model                         # fit to what is in the repository, print and draw
    python -m benchmarks.fit_cost_model --measure grid.json     # on a GPU: measure a grid first, ten minutes at most
    python -m benchmarks.fit_cost_model --use grid.json         # fit to that grid too
    python -m benchmarks.fit_cost_model --tiny                  # few problems, one round; for tests

It prints the rates to put into `insum_nn/compiler/schedule/cost_model.py: Rates`, the error of predicted times, and,
with each shipped entry taken out of the store, how what would be selected compares with the best time that is known of
it. What is not among the few stored times of a search counts as 1.05 times the slowest of these: it took at least that.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.measured_schedules import SPMM, Measured, form_of, of_sgap, of_shipped, sized
from benchmarks.schedules import generated_of
from insum_nn import Options, compile
from insum_nn.compiler.forms.defaults import default_schedule
from insum_nn.compiler.schedule import timing
from insum_nn.compiler.schedule.cost_model import H200, Rates, fits, microseconds, ranked
from insum_nn.compiler.schedule.kernel_work import Work, count
from insum_nn.compiler.schedule.space import Schedule
from insum_nn.facts import IndexFacts

__all__ = ["Found", "Problem", "alike", "draw", "fit", "judge", "loss", "main", "measure", "of_grid"]

RESULTS = Path(__file__).with_name("results")
# What a rate may be: physics, or a paper's number, says more than a fit to a few kinds of kernels.
BOUNDS = {
    "launch": (2.0, 8.0),
    "memory": (3.6e6, 4.8e6),
    "cache": (7e6, 1.3e7),
    "row": (8.0, 64.0),
    "latency": (0.15, 1.2),
    "half": (1.5e6, 5e6),
    "power": (1.2, 6.0),
}
# Rates of which too little was measured; DESIGN's ceilings of the matrix unit stand for them.
FIXED = ("single", "thrice", "held")
STEPS = (0.6, 0.8, 0.92, 1.09, 1.25, 1.6)
# A call's microseconds on the host, and a further launch's, as searches count them.
CALL, LAUNCH = 20.0, 12.0


@dataclass(frozen=True)
class Problem:
    """A measured form: the work and time of each schedule, and the work of candidates without a time."""

    measured: Measured
    works: dict[Schedule, Work]

    @staticmethod
    def of(measured: Measured) -> Problem:
        order = list(dict.fromkeys([*measured.times, *ranked(measured.form, measured.precision, H200)]))
        if measured.exact:
            order = list(measured.times)
        return Problem(measured, {each: count(measured.form, each, measured.precision) for each in order})

    def predicted(self, rates: Rates) -> dict[Schedule, float]:
        return {each: self._counted(work, microseconds(work, H200, rates)) for each, work in self.works.items()}

    def _counted(self, work: Work, time: float) -> float:
        """A time as it was measured: a search counts what a call waits for its further launches."""
        host = CALL + LAUNCH * work.collected
        return time if self.measured.exact else time + max(time, host) - max(time, CALL)

    def ratio(self, schedule: Schedule) -> float:
        """How many times as long as the best a schedule took; at least so many, where it has no time."""
        times: dict[Schedule, float] = {}
        for each, us in self.measured.times.items():
            times[alike(each)] = min(us, times.get(alike(each), math.inf))
        best, last = min(times.values()), max(times.values())
        return times.get(alike(schedule), 1.05 * last) / best


def alike(schedule: Schedule) -> Schedule:
    """A schedule of rows without the length at which they are divided: it follows from sizes that are not stored."""
    return replace(schedule, chunk=0)


def loss(problems: Sequence[Problem], rates: Rates) -> float:
    """Errors of ratios within a problem, of times as far as sizes are known, and of what would be selected."""
    total = 0.0
    for problem in problems:
        predicted, times = problem.predicted(rates), problem.measured.times
        errors = [math.log(predicted[each] / us) for each, us in times.items()]
        mean = sum(errors) / len(errors)
        total += sum(abs(error - mean) ** 1.5 for error in errors)
        total += (0.5 if problem.measured.exact else 0.2) * sum(abs(error) ** 1.5 for error in errors)
        total += 2.0 * math.log(problem.ratio(min(predicted, key=predicted.__getitem__)))
        best = predicted[next(iter(times))]
        others = [us for each, us in predicted.items() if each not in times]
        total += 0.1 * sum(max(0.0, math.log(1.05 * best / us)) for us in others)
    return total


def fit(problems: Sequence[Problem], rates: Rates, rounds: int) -> Rates:
    """Change one rate at a time as long as that lowers the loss."""
    best = loss(problems, rates)
    for _ in range(rounds):
        begun = best
        for name in asdict(rates):
            low, high = BOUNDS.get(name, (0.0, math.inf))
            for factor in () if name in FIXED else STEPS:
                other = replace(rates, **{name: getattr(rates, name) * factor})
                if low <= getattr(other, name) <= high and (found := loss(problems, other)) < best:
                    best, rates = found, other
        if best > 0.999 * begun:
            break
    return rates


@dataclass(frozen=True)
class Found:
    """How well rates do: geometric means and the worst of ratios to the best time known.

    Attributes:
        error: mean of |log(predicted / measured)| where sizes are known.
        first: the fastest predicted.
        default: the default schedule.
        rank: mean place of the best in the predicted order, from 0.
        candidates: their mean number.
    """

    error: float
    first: tuple[float, float]
    default: tuple[float, float]
    rank: float
    candidates: float


def judge(problems: Sequence[Problem], rates: Rates) -> Found:
    """Compare the default of a problem, and the fastest predicted, with the best that is known of it."""
    errors, ranks, sizes = [0.0], [0.0], [0.0]
    ratios: dict[str, list[float]] = {"first": [1.0], "default": [1.0]}
    for problem in problems:
        predicted, times = problem.predicted(rates), problem.measured.times
        if problem.measured.exact:
            errors += [abs(math.log(predicted[each] / us)) for each, us in times.items()]
            continue
        default = default_schedule(problem.measured.form)
        first = min(predicted, key=predicted.__getitem__)
        for name, schedule in (("first", first), ("default", default)):
            ratios[name].append(problem.ratio(schedule))
        best = predicted[next(iter(times))]
        ranks.append(sum(us < best for us in predicted.values()))
        sizes.append(len(predicted))

    def mean(numbers: Sequence[float]) -> float:
        return sum(numbers[1:]) / max(1, len(numbers) - 1)

    def shown(name: str) -> tuple[float, float]:
        return math.exp(mean([math.log(each) for each in ratios[name]])), max(ratios[name])

    return Found(mean(errors), shown("first"), shown("default"), mean(ranks), mean(sizes))


# Measuring a grid.


def _grid(tiny: bool) -> Iterator[tuple[int, int, int, int]]:
    """Rows, mean and longest row, and columns of sparse products."""
    if tiny:
        yield 60, 4, 20, 8
        return
    # What differs most comes first, as the time may end before the grid.
    for skew in (1, 1_000, 30):
        for mean in (4, 64, 16):
            for rows in (400_000, 20_000, 100_000):
                for columns in (16, 64, 128):
                    if rows * mean * columns <= 1 << 30:
                        yield rows, mean, min(rows, mean * skew), columns


def measure(path: Path, *, seconds: float, tiny: bool, device: torch.device) -> int:
    """Measure all candidates of a grid of sparse products, and write them to a file as it goes; return how many."""
    end, records, total = time.monotonic() + seconds, [], 0
    generator = torch.Generator(device=device).manual_seed(0)
    facts = {"x0": IndexFacts(sorted=True, masked=False, proven=True), "x1": IndexFacts(masked=False, proven=True)}
    for rows, mean, longest, columns in _grid(tiny):
        if time.monotonic() > end:
            break
        lengths = torch.full((rows,), mean, device=device)
        lengths[0] = longest
        row = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
        col = torch.randint(rows, row.shape, generator=generator, device=device)
        values = torch.randn(row.numel(), generator=generator, device=device)
        dense = torch.randn(rows, columns, generator=generator, device=device)
        program = compile(SPMM["statement"], facts=facts, options=Options(backend="triton"))
        tensors = {"x0": row, "x1": col, "t0": values, "t1": dense}
        _, scheduled = generated_of(program, tensors, (rows, None))
        form = sized(form_of({**SPMM, "static": {"b": columns}}, {}), rows, row.numel(), longest)
        times: list[tuple[dict[str, object], float]] = []
        for schedule in ranked(form, "tf32x3", H200):
            if fits(count(form, schedule, "tf32x3"), H200) and time.monotonic() <= end:
                run = scheduled(schedule)
                try:
                    run()
                except Exception as error:
                    # The device has no room for it.
                    if not type(error).__module__.startswith("triton"):
                        raise
                    continue
                times.append((schedule.to_json(), timing.device_time(run, 5)))
        records.append({"rows": rows, "terms": row.numel(), "longest": longest, "columns": columns, "times": times})
        total += len(times)
        path.write_text(json.dumps(records), encoding="utf-8")
    return total


def of_grid(path: Path) -> Iterator[Measured]:
    """What `measure` wrote."""
    for at, record in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        form = form_of({**SPMM, "static": {"b": record["columns"]}}, {})
        form = sized(form, record["rows"], record["terms"], record["longest"])
        times = {Schedule(**schedule): us for schedule, us in sorted(record["times"], key=lambda pair: pair[1])}
        if times:
            yield Measured(f"grid {at}", form, "tf32x3", times, True)


# Plot.


def draw(problems: Sequence[Problem], rates: Rates, path: Path) -> None:
    """Draw predicted over measured times."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.0, 5.0))
    for exact, label in ((True, "sizes known"), (False, "sizes known within a factor of two")):
        chosen = [problem for problem in problems if problem.measured.exact == exact]
        pairs = [
            (us, problem.predicted(rates)[each]) for problem in chosen for each, us in problem.measured.times.items()
        ]
        axes.loglog([us for us, _ in pairs], [guess for _, guess in pairs], ".", markersize=3, label=label)
    axes.axline((10.0, 10.0), (1000.0, 1000.0), color="gray", linewidth=0.8)
    axes.set_xlabel("measured, us")
    axes.set_ylabel("predicted, us")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> Found:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="measure a grid on this machine's GPU and write it here")
    parser.add_argument("--seconds", type=float, default=540.0, help="longest time for that")
    parser.add_argument("--use", type=Path, action="append", default=[], help="a file that --measure wrote")
    parser.add_argument("--root", type=Path, help="folder of the data sets that the benchmarks read")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the fit; 0: judge the rates in use")
    parser.add_argument("--plot", type=Path, help="where to draw predicted over measured times")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if given.measure is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        total = measure(given.measure, seconds=given.seconds, tiny=given.tiny, device=device)
        say(f"{total} times in {given.measure}")
        given.use.append(given.measure)
    found = list(of_shipped({}, given.root))
    if given.tiny:
        found = found[:4]
    else:
        found += of_sgap(sorted(RESULTS.rglob("*sgap*.json")), given.root)
    for path in given.use:
        found += of_grid(path)
    problems = [Problem.of(each) for each in found]
    rates = fit(problems, Rates(), 1 if given.tiny else given.rounds)
    say(str(rates))
    judged = judge(problems, rates)
    for name, value in asdict(judged).items():
        shown = f"{value[0]:.3f}, at worst {value[1]:.2f}" if isinstance(value, tuple) else f"{value:.3f}"
        say(f"{name:>10}: {shown}")
    if given.plot is not None:
        draw(problems, rates, given.plot)
    return judged


if __name__ == "__main__":
    main()
