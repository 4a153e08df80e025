"""The indices of a kernel with several outputs: of its program, of the lanes of its tile, of its loop over terms."""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.forms.early import Terms
from insum_nn.compiler.forms.points import ENTRY, OWNER
from insum_nn.compiler.forms.text import KernelText, Scope, Value, spread

__all__ = ["KernelLoops"]


class KernelLoops(KernelText):
    """Opens the loops of a kernel and defines every index inside them."""

    terms: Terms | None = None

    def programs(self, tiles: Sequence[tuple[str, int]], pid: str) -> None:
        """Define what a program's number says: tile positions, single indices, the split."""
        rest = pid
        for place, (index, block) in enumerate(tiles):
            if not index:
                continue
            last = place == len(tiles) - 1
            if last:
                position = rest
            else:
                count = self.steps(index, block)
                position = self.define("p", f"{rest} % {count}", "", 0).text
                rest = self.define("r", f"{rest} // {count}", "", 0).text
            axis = next((a for a, each in self.axes.items() if each.first == index), None)
            if axis is not None:
                self.tile_of[axis] = position
                self.lane_indices(axis, f"{position} * {block}", 0)
            elif index == OWNER:
                self.own(self.define("o", f"({position}).to({self.int})", "", 0))
            else:
                self.indices[index] = self.define("i", f"({position}).to({self.int})", "", 0)

    def steps(self, index: str, block: int) -> str:
        if index == OWNER:
            count = self.parameters("rows")
        else:
            known = self.literal(index)
            if known is not None:
                return str(-(-known // block))
            count = self.parameters("extent", index)
        return count if block == 1 else f"tl.cdiv({count}, {block})"

    def lane_indices(self, axis: str, base: str, depth: int) -> None:
        """Define the indices on a tile's axis, and where they are inside their extents."""
        each = self.axes[axis]
        lanes = self.lane(axis)
        inner = 1
        for extent in each.inner:
            inner *= extent
        position = lanes if inner == 1 else f"{lanes} // {inner}"
        masks: list[str] = []
        if each.lanes != each.block * inner:
            masks.append(f"({lanes} < {each.block * inner})")
        if each.first == ENTRY:
            value = self.define("e", f"{base} + {position}", axis, depth)
            masks.append(f"({value.text} < {self.indices['@end'].text})")
            self.entry(value)
        elif each.first == OWNER:
            value = self.define("o", f"({base} + {position}).to({self.int})", axis, depth)
            masks.append(f"({value.text} < {self.parameters('rows')})")
        else:
            value = self.define("i", f"({base} + {position}).to({self.int})", axis, depth)
            self.indices[each.first] = value
            known = self.literal(each.first)
            if known is None or known % each.block:
                masks.append(f"({value.text} < {self.extent(each.first)})")
        if masks:
            self.masks[axis] = self.define("ok", " & ".join(masks), axis, depth)
        remaining = inner
        for index, extent in zip(each.indices[1:], each.inner, strict=True):
            remaining //= extent
            text = f"{lanes} // {remaining}" if remaining > 1 else lanes
            first = index == each.indices[1]
            # Lanes past the last value of the first index would run past the second one's extent.
            whole = first and each.block == 1 and each.lanes == inner
            text = text if whole else f"({text}) % {extent}"
            self.indices[index] = self.define("i", f"({text}).to({self.int})", axis, 0)
        if each.first == OWNER:
            self.own(value)

    def lane(self, axis: str) -> str:
        if axis not in self.lanes:
            self.lanes[axis] = self.define("lane", f"tl.arange(0, {self.axes[axis].lanes})", axis, 0).text
        return self.lanes[axis]

    def own(self, row: Value) -> None:
        """Define the rows that a program owns, and the range of their terms."""
        mask = self.masks.get("m") if "m" in row.axes else None
        safe = f", mask={mask.text}, other=0" if mask else ""
        begin = self.parameters("begin")
        if self.strides.split:
            end = self.parameters("end")
            low = self.define("low", f"tl.load({begin} + {row.text}{safe})", row.axes, 0)
            high = self.define("high", f"tl.load({end} + {row.text}{safe})", row.axes, 0)
            target = self.define(
                "row", f"tl.load({self.parameters('target')} + {row.text}{safe}).to({self.int})", row.axes, 0
            )
            self.indices["@target"] = target
            # Rows that are divided are read, if at all, under their own number.
            self.indices[OWNER] = self.define(
                "own", f"tl.load({self.parameters('owner')} + {row.text}{safe}).to({self.int})", row.axes, 0
            )
        else:
            low = self.define("low", f"tl.load({begin} + {row.text}{safe})", row.axes, 0)
            high = self.define("high", f"tl.load({begin} + 1 + {row.text}{safe})", row.axes, 0)
            self.indices[OWNER] = row
        self.indices["@begin"], self.indices["@end"] = low, high

    def entry(self, value: Value) -> None:
        """Define the indices of a term from its number."""
        form = self.form
        self.indices[ENTRY] = value
        if form.permuted:
            inside = f"{value.text} < {spread(self.indices['@end'], value.axes)}"
            mask = f", mask={inside}, other=0" if value.axes else ""
            value = self.order = self.define(
                "t", f"tl.load({self.parameters('order')} + {value.text}{mask})", value.axes, value.depth
            )
        rest = value
        names = form.entries
        for place in range(len(names) - 1, -1, -1):
            if place == 0:
                text = rest.text
            else:
                text = f"{rest.text} % {self.extent(names[place])}"
            self.indices[names[place]] = self.define("i", f"({text}).to({self.int})", value.axes, value.depth)
            if place:
                rest = self.define("q", f"{rest.text} // {self.extent(names[place])}", value.axes, value.depth)

    def open_loops(self) -> None:
        """Open the loop over the terms of a row, and the lanes along it."""
        each = self.axes.get("k")
        self.open_terms(1 if each is None else each.block)

    def open_terms(self, block: int) -> None:
        """The loop over the terms of owned rows."""
        low, high = self.indices["@begin"], self.indices["@end"]
        name = self.fresh("l")
        depth = len(self.scopes)
        lanes = "k" in self.axes and self.axes["k"].first == ENTRY
        if not low.axes:
            self.terms = Terms(depth, name, low.text, high.text, block)
            self.scopes.append(Scope(f"for {name} in {self.steps_of_terms(low.text, high.text, block)}:"))
            if lanes:
                self.lane_indices("k", name, depth)
            else:
                self.entry(self.define("e", f"{name} + 0", "", depth))
            return
        # Several rows at a time: as many steps as the longest of them takes.
        longest = self.define("most", f"tl.max({high.text} - {low.text}, 0)", "", 0)
        self.terms = Terms(depth, name, "0", longest.text, block)
        self.scopes.append(Scope(f"for {name} in {self.steps_of_terms('0', longest.text, block)}:"))
        if lanes:
            each = self.axes["k"]
            inner = 1
            for extent in each.inner:
                inner *= extent
            lane = self.lane("k") if inner == 1 else f"({self.lane('k')} // {inner})"
            text = f"({low.text} + {name})[:, None] + {lane}[None, :]"
            value = self.define("e", text, "mk", depth)
            conditions = [f"({value.text} < {high.text}[:, None])"]
            if each.lanes != each.block * inner:
                conditions.append(f"({self.lane('k')} < {each.block * inner})[None, :]")
            remaining = inner
            for index, extent in zip(each.indices[1:], each.inner, strict=True):
                remaining //= extent
                position = f"({self.lane('k')} // {remaining}) % {extent}"
                self.indices[index] = self.define("i", f"({position}).to({self.int})", "k", 0)
        else:
            value = self.define("e", f"{low.text} + {name}", "m", depth)
            conditions = [f"({value.text} < {high.text})"]
        self.masks["e"] = self.define("ok", " & ".join(conditions), value.axes, depth)
        self.entry(value)

    def steps_of_terms(self, low: str, high: str, block: int) -> str:
        """The steps of the loop over terms; Triton pipelines loads that feed no dot only where it is told to."""
        if self.schedule.stages < 3:
            return f"range({low}, {high}, {block})"
        return f"tl.range({low}, {high}, {block}, num_stages={self.schedule.stages})"
