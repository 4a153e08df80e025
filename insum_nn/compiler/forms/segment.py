"""Equal shares of terms: runs of terms of one row are summed inside a program, which may begin and end amid a row.

A program walks consecutive terms in the order of their rows. What it holds of a row, a *run*, ends where the row does
or where the share does; `Owners.target` says for each term where its run's sum belongs and whether it is the run's
first or last. With terms on lanes a scan adds up every run of a step at once, and the last lane hands on what is not
finished; without, the sum starts anew at a run's first term.
"""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.forms.loops import KernelLoops
from insum_nn.compiler.forms.points import ENTRY, OWNER, Read, Sub
from insum_nn.compiler.forms.text import Value, join_axes, spread

__all__ = ["SCAN", "KernelSegments", "write_collection"]

# Sums within runs: a flag says that a run begins at or before a lane.
SCAN = """@triton.jit
def scan(begun, value, next_begun, next_value):
    return begun | next_begun, tl.where(next_begun != 0, next_value, value + next_value)
"""


class KernelSegments(KernelLoops):
    """Sums the runs of a share, and writes each where it ends."""

    def open_runs(self) -> None:
        """Define where the runs of the terms at hand begin and end, and where their sums belong."""
        form = self.form
        at = self.indices[ENTRY]
        mask = self.masks.get("e") or (self.masks.get("k") if self.terms_on_lanes else None)
        where = f", mask={mask.text}, other=0" if mask is not None and at.axes else ""
        code = self.define("code", f"tl.load({self.parameters('target')} + {at.text}{where})", at.axes, at.depth)
        first, last = self.edge_lanes("0"), self.edge_lanes("-1")
        self.starts = self.define("starts", f"({code.text} & 1){first}", at.axes, at.depth)
        self.ends = self.define("ends", f"(({code.text} & 2) != 0){last}", at.axes, at.depth)
        self.indices["@target"] = self.define("row", f"({code.text} >> 2).to({self.int})", at.axes, at.depth)
        if any(OWNER in depends for depends in form.depends):
            assert form.owner is not None
            subs = tuple(Sub(((1, index),), 0, True) for index in form.entries)
            self.indices[OWNER] = self.load(Read(form.owner.name, subs), integer=True)

    def edge_lanes(self, edge: str) -> str:
        """A condition that picks one lane of each term, where a term has several."""
        each = self.axes.get("k")
        if each is None or not self.terms_on_lanes or not each.inner:
            return ""
        inner = 1
        for extent in each.inner:
            inner *= extent
        wanted = 0 if edge == "0" else inner - 1
        lane = f"({self.lane('k')} % {inner} == {wanted})"
        at = self.indices[ENTRY]
        return f" & {spread(Value(lane, 'k', 0), at.axes)}"

    @property
    def terms_on_lanes(self) -> bool:
        return "k" in self.axes and self.axes["k"].first == ENTRY

    def runs(self, products: Value, axes: str, target: Read) -> None:
        """Sum a cell's products by run, and write each sum at its run's end.

        Args:
            products: one value a lane, known inside all loops.
            axes: of the tile, without the lanes of what is summed.
            target: the cell.
        """
        lanes = self.terms_on_lanes
        if "k" in products.axes and not lanes:
            place = products.axes.index("k")
            products = Value(f"tl.sum({products.text}, {place})", products.axes.replace("k", ""), products.depth)
        whole = join_axes(axes, "k") if lanes else axes
        outer = self.scopes[self.indices["@target"].depth]
        if products.axes and products.axes != whole:
            products = self.define("x", products.text, products.axes, len(self.scopes) - 1)
        text = spread(products, whole)
        if whole and products.axes != whole:
            text = f"tl.broadcast_to({text}, {self.shape(whole)})"
        if outer is self.scopes[-1]:
            term = self.define("x", text, whole, len(self.scopes) - 1).text
        else:
            term = self.fresh("part")
            outer.lines.append(f"{term} = tl.zeros({self.shape(whole)}, {self.type})")
            self.scopes[-1].lines.append(f"{term} += {text}")
        total = self.fresh("acc")
        self.scopes[0].lines.append(f"{total} = tl.zeros({self.shape(axes)}, {self.type})")
        value = self.scanned(outer.tail, total, term, axes, whole) if lanes else total
        if not lanes:
            starts = spread(self.starts, axes)
            outer.tail.append(f"{total} = tl.where({starts} != 0, 0.0, {total}) + {term}")
        lines = self.store_runs(value, whole, target)
        if not self.ends.axes:
            lines = [f"if {self.ends.text}:", *(f"    {line}" for line in lines)]
        outer.tail += lines

    def scanned(self, lines: list[str], carry: str, term: str, axes: str, whole: str) -> str:
        """Add up the runs along the lanes, with what the step before left unfinished."""
        place = whole.index("k")
        begun, value, last = self.fresh("begun"), self.fresh("run"), self.fresh("last")
        starts = f"tl.broadcast_to({spread(self.starts, whole)}, {self.shape(whole)})"
        lines.append(f"{begun}, {value} = tl.associative_scan(({starts}, {term}), {place}, scan)")
        if self.single_step:
            return value
        before = spread(Value(carry, axes, 0), whole)
        lines.append(f"{value} += tl.where({begun} != 0, 0.0, {before})")
        lane = spread(Value(f"({self.lane('k')} == {self.axes['k'].lanes - 1})", "k", 0), whole)
        lines.append(f"{last} = tl.where({lane}, {value}, 0.0)")
        lines.append(f"{carry} = tl.sum({last}, {place})")
        return value

    @property
    def single_step(self) -> bool:
        """Whether a share is one step: nothing is handed on."""
        return self.terms_on_lanes and self.schedule.share <= self.axes["k"].block

    def store_runs(self, value: str, axes: str, target: Read) -> Sequence[str]:
        """The lines that write the sums of the runs that end here."""
        raise NotImplementedError


_COLLECTION = """import triton
import triton.language as tl


@triton.jit
def kernel(scratch, out, rows, first, cells, inner, step):
    pid = tl.program_id(0)
    tiles = tl.cdiv(cells, {n})
    row = pid // tiles
    cell = pid % tiles * {n} + tl.arange(0, {n})
    inside = cell < cells
    high = tl.load(first + row + 1)
    total = tl.zeros(({n},), {type})
    for low in range(tl.load(first + row), high, {k}):
        slot = low + tl.arange(0, {k})
        mask = (slot < high)[:, None] & inside[None, :]
        total += tl.sum(tl.load(scratch + (slot[:, None] * cells + cell[None, :]), mask=mask, other=0.0), 0)
    place = cell // inner * step + tl.load(rows + row) * inner + cell % inner
    tl.store(out + place, total, mask=inside)
"""


def write_collection(cells: int, double: bool) -> tuple[str, int]:
    """A kernel that adds up the parts of divided rows, in a fixed order: a program takes some cells of a row.

    Args:
        cells: values of one row.
        double: they are float64.

    Returns:
        Its text, and the cells of a program.
    """
    n = min(128, 1 << max(0, cells - 1).bit_length())
    k = min(64, 2048 // n)
    return _COLLECTION.format(n=n, k=k, type="tl.float64" if double else "tl.float32"), n
