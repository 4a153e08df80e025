"""Every performance target of the registry with its state: met, not met, or not measured; none is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import archive, report, targets
from benchmarks.archive import DEVICE, Candidate
from benchmarks.plot import MODE_NAMES
from benchmarks.registry import load
from benchmarks.targets import TARGETS, Faster, Group, Target, Verdict

__all__ = ["State", "states", "target_table"]


class State(NamedTuple):
    """One target of one case in one mode.

    Attributes:
        case: of the registry.
        mode: of it.
        target: which of `TARGETS`.
        verdict: of the newest run that can be judged; `None` where none can.
        commit: of that run; "several" where no run has all that is compared, and the newest record of each is taken.
        date: of that run.
    """

    case: str
    mode: str
    target: Target
    verdict: Verdict | None
    commit: str
    date: str


def _runs() -> list[tuple[Candidate, dict[tuple[str, str], Group]]]:
    """The candidates of the device, the newest first, with their records by case and mode."""
    found = [c for c in archive.candidates(sorted(archive.HISTORY.glob("*.json"))) if c.device == DEVICE]
    found.sort(key=lambda c: c.utc, reverse=True)
    return [(c, {(row.case, row.mode): row.group for row in report.rows(c.records)}) for c in found]


def states() -> list[State]:
    """Judge each target on the newest run, of one commit, that has what the target compares.

    A run without any of the strongest baselines is passed over.
    """
    runs = _runs()
    everything = report.rows([record for candidate, _ in runs for record in candidate.records])
    latest = {(row.case, row.mode): row.group for row in everything}
    found: list[State] = []
    # Sorted, since cases are registered in the order in which their modules are imported.
    for case in sorted(load(), key=lambda case: case.family):
        for target in TARGETS:
            for mode in target.modes:
                if not target.covers(case.name, mode) or "cuda" not in case.devices:
                    continue
                state = State(case.name, mode, target, None, "", "")
                own = [(c, groups[case.name, mode]) for c, groups in runs if (case.name, mode) in groups]
                strong = _strong(target, [group for _, group in own])
                for candidate, group in own:
                    verdict = target.judge(group) if not strong or strong & group.keys() else None
                    if verdict is not None:
                        commit = f"`{(candidate.commit or 'unknown')[:7]}`"
                        state = state._replace(verdict=verdict, commit=commit, date=candidate.utc[:10])
                        break
                else:
                    group = latest.get((case.name, mode), {})
                    if verdict := target.judge(group):
                        dates = {record["utc"][:10] for record in group.values()}
                        state = state._replace(verdict=verdict, commit="several", date=max(dates))
                found.append(state)
    return found


def _strong(target: Target, groups: Sequence[Group]) -> set[str]:
    """The baselines of a target that were nearly the fastest in some run; empty: it compares with none."""
    if not isinstance(target.judge, Faster):
        return set()
    least: dict[str, float] = {}
    for name, record in (pair for group in groups for pair in group.items()):
        if record["ms"] is not None and target.judge.compares(name):
            least[name] = min(record["ms"]["p50"], least.get(name, math.inf))
    return {name for name, ms in least.items() if ms <= archive.STRONG * min(least.values())}


def _means() -> list[str]:
    """Targets over many cases, each on the newest run that has at least half of the cases of the fullest one."""
    lines: list[str] = []
    for mean in targets.MEANS:
        judged = [
            (c, v, int(v.measured.partition(" over ")[2].partition(" ")[0]))
            for c, groups in _runs()
            for v in targets.judge_means(groups, [mean])
        ]
        if not judged:
            lines.append(f"| `{mean.cases}` | {MODE_NAMES[mean.mode]} | >= {mean.times:g}x | | not measured | | |")
            continue
        most = max(count for _, _, count in judged)
        candidate, verdict, _ = next(entry for entry in judged if 2 * entry[2] >= most)
        word = "met" if verdict.met else "**not met**"
        lines.append(
            f"| `{mean.cases.replace('|', ', ')}` | {MODE_NAMES[mean.mode]} "
            f"| geometric mean >= {mean.times:g}x {mean.baselines} | {verdict.measured} "
            f"| {word} | {candidate.utc[:10]} | `{(candidate.commit or '')[:7]}` |"
        )
    return lines


def target_table() -> str:
    """Write the counts, then a table of each family: what is not met first, what is not measured last."""
    found = states()
    met = sum(s.verdict is not None and s.verdict.met for s in found)
    unmet = sum(s.verdict is not None and not s.verdict.met for s in found)
    head = "| case | mode | target | measured | state | date | commit |\n|---|---|---|---|---|---|---|"
    lines = [
        f"{len(found)} targets: {met} met, {unmet} not met, {len(found) - met - unmet} not measured.",
        *("", "## Over many cases", "", head, *_means()),
    ]
    for family in dict.fromkeys(s.case.partition("/")[0] for s in found):
        mine = [s for s in found if s.case.partition("/")[0] == family]
        judged = sorted((s for s in mine if s.verdict), key=lambda s: s.verdict is not None and s.verdict.met)
        count = sum(s.verdict is not None and s.verdict.met for s in mine)
        lines += ["", f"## `{family}`", "", f"{len(mine)} targets, {len(judged)} measured, {count} met.", ""]
        lines += [head, *map(_line, judged)] if judged else []
        lines += _unmeasured([s for s in mine if s.verdict is None])
    return "\n".join(lines)


def _line(state: State) -> str:
    target, measured, met = vars(state.verdict).values() if state.verdict else ("", "", False)
    word, mode = "met" if met else "**not met**", MODE_NAMES[state.mode]
    return f"| `{state.case}` | {mode} | {target} | {measured} | {word} | {state.date} | {state.commit} |"


def _unmeasured(found: Sequence[State]) -> list[str]:
    """The cases of each target that no run has, by target, folded."""
    if not found:
        return []
    groups: dict[tuple[str, str], list[str]] = {}
    for state in found:
        groups.setdefault((str(state.target.judge), state.mode), []).append(state.case.partition("/")[2])
    lines = ["", f'<details markdown="1"><summary>Not measured: {len(found)}</summary>', ""]
    for (target, mode), cases in groups.items():
        # A target begins with ">=", which at the beginning of an item would make a quotation of it.
        lines.append(f"- {MODE_NAMES[mode]}, {target} ({len(cases)}): {', '.join(f'`{case}`' for case in cases)}")
    return [*lines, "", "</details>"]
