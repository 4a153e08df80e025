"""The indices of a kernel: what a program's number says, lanes of its tile, and the loops over what is summed."""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.forms.early import Terms
from insum_nn.compiler.forms.points import ENTRY, OWNER, Read
from insum_nn.compiler.forms.text import KernelText, Scope, Value, spread

__all__ = ["STEPS", "WORD_BITS", "KernelLoops"]

# Rows of an index tensor to a word of 32 bits whose sign is not used.
WORD_BITS = 31
# What is said of words: the bits that are in one of two, and how many there are.
STEPS = """@triton.jit
def either(one, other):
    return one | other


@triton.jit
def bits_of(word):
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
"""


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
            if index == "@split":
                self.indices["@split"] = Value(position, "", 0)
                continue
            axis = next((a for a, each in self.axes.items() if each.first == index), None)
            if axis is not None:
                self.tile_of[axis] = position
                self.lane_indices(axis, f"{position} * {block}", 0)
            elif index == OWNER:
                self.own(self.define("o", f"({position}).to({self.int})", "", 0))
            else:
                self.indices[index] = self.define("i", f"({position}).to({self.int})", "", 0)

    def steps(self, index: str, block: int) -> str:
        if index == "@split":
            return str(self.schedule.splits)
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
        if self.segment:
            self.share(row)
            return
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

    def share(self, number: Value) -> None:
        """Define the range of terms of an equal share; of one past the last it is empty."""
        begin, size = self.parameters("begin"), self.schedule.share
        low = self.define("low", f"tl.load({begin}) + {number.text} * {size}", number.axes, 0)
        high = self.define("high", f"tl.minimum({low.text} + {size}, tl.load({begin} + 1))", number.axes, 0)
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
        """Open every loop over what is summed, outermost first, and the lanes along it last."""
        split = self.schedule.splits > 1
        each = self.axes.get("k")
        # Sums of runs are written at each step of a share, so that its loop is the outermost.
        early = self.segment and each is not None and each.first == ENTRY
        if early and each is not None:
            self.open_terms(each.block)
        for index in self.layout.loops:
            depth = len(self.scopes)
            if index == ENTRY:
                self.open_terms(1)
                continue
            gaps = None if split else self.gaps(index)
            if gaps is not None:
                pieces = self.pieces(index)
                self.open_steps(index, gaps, depth, pieces)
                if pieces > 1:
                    return
                continue
            name = self.fresh("l")
            if split:
                head = self.split_range(name, index, 1)
                split = False
            else:
                head = f"for {name} in range({self.extent(index)}):"
            self.scopes.append(Scope(head))
            self.indices[index] = self.define("i", self.cast(name), "", depth)
        if each is None or early:
            return
        if each.first == ENTRY:
            self.open_terms(each.block)
            return
        known = self.literal(each.first)
        if known is not None and known <= each.block and not split:
            self.lane_indices("k", "0", 0)
            return
        name = self.fresh("l")
        depth = len(self.scopes)
        if split:
            head = self.split_range(name, each.first, each.block)
        else:
            head = f"for {name} in range(0, {self.extent(each.first)}, {each.block}):"
        self.scopes.append(Scope(head))
        self.lane_indices("k", name, depth)

    def cast(self, name: str) -> str:
        # A loop's variable is a 32-bit integer; literals have no type to cast.
        return f"{name} + tl.zeros((), tl.int64)" if self.strides.wide else f"{name} + 0"

    def split_range(self, name: str, index: str, block: int) -> str:
        """A loop over this program's share of a long sum."""
        extent = self.extent(index)
        steps = f"tl.cdiv({extent}, {block})"
        share = self.define("share", f"tl.cdiv({steps}, {self.schedule.splits}) * {block}", "", 0).text
        low = self.define("low", f"{self.indices['@split'].text} * {share}", "", 0).text
        high = self.define("high", f"tl.minimum({low} + {share}, {extent})", "", 0).text
        return f"for {name} in range({low}, {high}, {block}):"

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
        if self.product is not None or self.schedule.stages < 3:
            return f"range({low}, {high}, {block})"
        return f"tl.range({low}, {high}, {block}, num_stages={self.schedule.stages})"

    def gaps(self, index: str) -> Read | None:
        """The index tensor `T[index, row]` over a tile's rows that may lack entries: its steps can be listed."""
        m = self.axes.get("m")
        if self.product is None or m is None or len(m.indices) > 1 or self.form.owner is not None:
            return None
        for read in self.form.points[0].reads:
            for sub in read.subs:
                for _, atom in sub.terms:
                    if not isinstance(atom, str) and [s.plain for s in atom.subs] == [index, m.first]:
                        facts = self.form.bound.facts_of(atom.name)
                        return atom if facts.masked is not False and m.block == m.lanes else None
        return None

    def pieces(self, index: str) -> int:
        """How many values of the lanes of k each step of a loop takes, where that is known and the loop the last.

        One loop over all of them then does for two, whose inner one may be too short for a pipeline.
        """
        each = self.axes.get("k")
        if each is None or each.first == ENTRY or index != self.layout.loops[-1]:
            return 1
        known = self.literal(each.first)
        return known // each.block if known is not None and known % each.block == 0 else 1

    def open_steps(self, index: str, gaps: Read, depth: int, pieces: int) -> None:
        """A loop over the steps for which some row of the tile has an entry; the others add nothing.

        A word for each row has a bit for each of its entries; a step takes the lowest bit that is left of all words.
        """
        words, row, known = self.parameters("words", gaps.name), self.indices[self.axes["m"].first], self.literal(index)
        place, before = f"{words} + {row.text}", ""
        if known is None or known > WORD_BITS:
            word = self.fresh("l")
            self.scopes.append(Scope(f"for {word} in range(tl.cdiv({self.extent(index)}, {WORD_BITS})):"))
            depth += 1
            place += f" + {word} * {self.parameters('dim', gaps.name, 1)}"
            before = f" + {word} * {WORD_BITS}"
        mask = f", mask={self.masks['m'].text}, other=0" if "m" in self.masks else ""
        left = self.define("left", f"tl.reduce(tl.load({place}{mask}), 0, either)", "", depth - 1).text
        name = self.fresh("l")
        count = f"bits_of({left})" if pieces == 1 else f"bits_of({left}) * {pieces}"
        self.scopes.append(Scope(f"for {name} in range({count}):"))
        lowest = self.define("low", f"{left} & -{left}", "", depth).text
        # A power of two is, as a number of 32 bits, its exponent and zeros.
        number = f"({lowest}.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127{before}"
        self.indices[index] = self.define("i", f"({number}).to({self.int})", "", depth)
        rest = f"{left} - {lowest}"
        if pieces > 1:
            self.lane_indices("k", f"{name} % {pieces} * {self.axes['k'].block}", depth)
            rest = f"tl.where({name} % {pieces} == {pieces - 1}, {rest}, {left})"
        self.scopes[-1].tail.append(f"{left} = {rest}")
