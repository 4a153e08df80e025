"""Select the greatest or least term of each cell: what `sum_terms` is for sums.

serial d_step in r0[m] .. r0[m + 1] step 8:
  tile d in d_step .. d_step + 8 of r0[m + 1]:
    acc max= t0[d]
    acc_live max= 1

Every condition of a term keeps it out by itself, as no factor that is 0 does. A cell that no term reached is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.ir.nodes import Buffer, Combine, Const, Expr, Load, Op, Stmt, Store, conjunction
from insum_nn.compiler.passes.sum_terms import Cell, Space, Sums
from insum_nn.compiler.passes.terms import select, widened

__all__ = ["selected"]


def selected(cells: Sequence[Cell], space: Space, mode: Combine) -> Sums:
    """The extrema of cells, and for each a flag that says whether it has a term."""
    found = Sums()
    body: list[Stmt] = []
    for cell in cells:
        live = Buffer(f"{cell.total.name}_live", "int32", (), local=True)
        found.buffers += [cell.total, live]
        for term in cell.terms:
            value: Expr = Const(term.number, "float64")
            for factor in map(widened, term.factors):
                value = factor if value is Const(1.0, "float64") else Op("mul", (value, factor))
            where = conjunction([*term.conditions, *space.past_ends])
            body += [Store(cell.total, (), value, mode, where), Store(live, (), Const(1), "max", where)]
        total, seen = Load(cell.total, ()), Load(live, ())
        # The flag of several parts is the mode's own extremum of theirs.
        flag = seen if mode == "max" else Op("sub", (Const(0), seen))
        found.totals.append((select([Op("less", (Const(0), seen))], total), total, flag))
    found.body = tuple(body)
    return found
