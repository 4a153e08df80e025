"""The commands `write`, `compare` and `show`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tests.compiler.corpus import __doc__ as about
from tests.compiler.corpus.digests import code_of, digest
from tests.compiler.corpus.statements import Entry, entries

Digests = dict[str, dict[str, str]]


def digests(only: str, *, intermediate: bool, kernels: bool = True) -> Digests:
    """By statement and kind of code."""
    return {e.name: _digests_of(e, intermediate, kernels) for e in entries() if fnmatch(e.name, only)}


def _digests_of(entry: Entry, intermediate: bool, kernels: bool) -> dict[str, str]:
    try:
        return {kind: digest(text) for kind, text in code_of(entry, intermediate=intermediate, kernels=kernels)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def differences(before: Digests, after: Digests) -> list[str]:
    """A line for each statement whose code differs, or that only one side has."""
    lines: list[str] = []
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            lines.append(f"{'new' if name in after else 'gone'}: {name}")
            continue
        old, new = before[name], after[name]
        changed = [kind for kind in {**old, **new} if old.get(kind) != new.get(kind)]
        lines += [f"differs: {name}: {kind}" for kind in changed]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.compiler.corpus", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "compare", "show"))
    parser.add_argument("target", help="the file of digests, or the name of a statement")
    parser.add_argument("--only", default="*", help="statements whose names match this pattern")
    parser.add_argument("--text-only", action="store_true", help="leave out Triton's IR")
    parser.add_argument("--graphs-only", action="store_true", help="leave out generated kernels")
    options = parser.parse_args(arguments)
    if options.command == "show":
        shown = [entry for entry in entries() if options.target in entry.name]
        for entry in shown:
            for kind, text in code_of(entry, kernels=not options.graphs_only):
                print(f"==== {entry.name}: {kind}\n{text}")
        return 0 if shown else 1
    found = digests(options.only, intermediate=not options.text_only, kernels=not options.graphs_only)
    path = Path(options.target)
    if options.command == "write":
        path.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
        print(f"{len(found)} statements, {sum(map(len, found.values()))} digests in {path}")
        return 0
    known: Digests = {n: d for n, d in json.loads(path.read_text()).items() if fnmatch(n, options.only)}
    if options.graphs_only:
        known = {n: {k: v for k, v in d.items() if k.startswith("graph")} for n, d in known.items()}
    lines = differences(known, found)
    print("\n".join(lines))
    print(f"{len(found)} statements compared, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
