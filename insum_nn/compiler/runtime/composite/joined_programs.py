"""How several programs on the same tensors run: as products that they share, as one kernel, or one by one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from insum_nn.compiler.runtime.composite.fused_programs import FusedPrograms
from insum_nn.compiler.runtime.composite.statement_choice import paths_are_products
from insum_nn.compiler.runtime.program import Program
from insum_nn.dtypes import is_widened

__all__ = ["Joined", "joined_programs"]

# Registers of a thread, half of all, that the sums of a row may take in one kernel for both ends of an edge. For the
# double backward of MACE's product in float64, which takes 142, an H200 took 52.1 ms by one kernel, and 10.6 by one for
# each end. For NequIP's, which takes 70, one was faster than three.
_MOST_REGISTERS = 128

Results = Sequence[tuple[str, Program, Hashable]]


class Joined(NamedTuple):
    """Programs that compute several results together.

    Attributes:
        programs: they, in the order of their results among those given.
        results: names of the results.
    """

    programs: FusedPrograms
    results: tuple[str, ...]


def joined_programs(results: Results, device: torch.device, dtype: torch.dtype, *, sums: bool = False) -> list[Joined]:
    """Return what computes several results together; those that are left out are computed one by one.

    Args:
        results: the name of a result, a program of it, and what this adds to.
        device: where they run.
        dtype: of the results.
        sums: several programs may add to one result, and by one kernel, or by one for each end of an edge.
    """
    if paths_are_products(device):
        names = tuple(dict.fromkeys(name for name, _, _ in results))
        return (
            []
            if sums or len(results) < 2
            else [Joined(FusedPrograms([p for _, p, _ in results], [w for _, _, w in results]), names)]
        )
    fixed = torch.are_deterministic_algorithms_enabled() or any(p.options.deterministic for _, p, _ in results)
    apart = fixed or (sums and (is_widened(dtype) or _registers(results, dtype) > _MOST_REGISTERS))
    kernels = _kernels(results, apart=apart)
    found: list[Joined] = []
    for names in kernels if sums else kernels[:1]:
        chosen = [each for each in results if each[0] in names]
        if len(chosen) > 1 and (sums or len(chosen) == len(names)):
            fused = FusedPrograms([p for _, p, _ in chosen], [w for _, _, w in chosen], deterministic=fixed)
            found.append(Joined(fused, tuple(dict.fromkeys(name for name, _, _ in chosen))))
    return found


def _kernels(results: Results, *, apart: bool) -> list[list[str]]:
    """Return the results whose rows are the entries of an index tensor, or are named by one: what one kernel walks.

    `apart`: their sums are not to be added up in memory, so one kernel forms those of one index tensor alone.
    """
    rows: dict[str, set[str]] = {}
    for name, program, _ in results:
        rows.setdefault(name, set()).add(_rows(program))
    found = [name for name, kinds in rows.items() if "" not in kinds]
    # By name, so that the choice does not depend on the order in which results are requested.
    others = sorted(name for name in found if "named" in rows[name])[1:] if apart else []
    return [each for each in ([name for name in found if name not in others], others) if each]


def _rows(program: Program) -> str:
    """Return "named" where an index tensor names the rows of the output, "entries" where they are its entries."""
    static, statement = dict(program.spec.static), program.statement
    first = [access.subscripts[0] for access in (statement.output, *statement.reads) if access.subscripts]
    named = [access for row in first for access in row.index_accesses() if access.name not in static]
    if not statement.output.subscripts:
        return ""
    row = statement.output.subscripts[0]
    if any(access.name not in static for access in row.index_accesses()):
        return "named"
    return "entries" if row.plain and any(s.plain == row.plain for a in named for s in a.subscripts) else ""


def _registers(results: Results, dtype: torch.dtype) -> int:
    """Return how many registers a thread needs for the longest sums of a row, of one column each."""
    cells = [_cells(program) for _, program, _ in results if _rows(program) == "named"]
    return max(cells, default=0) * dtype.itemsize // 4


def _cells(program: Program) -> int:
    """Return the cells of a row that static tables name, of one column."""
    static, count = dict(program.spec.static), 1
    for subscript in program.statement.output.subscripts[1:]:
        for access in subscript.index_accesses():
            if access.name in static:
                table = static[access.name]
                count *= len({*table.values[:: max(1, len(table.values) // max(1, table.shape[0]))]})
    return count
