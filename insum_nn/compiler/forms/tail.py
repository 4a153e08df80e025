"""A matrix product at the end of a kernel: sums in registers times a weight, before they are stored.

    C[i,n] += T[i,k] * W[k,n]        with T[i,:] the sum that a program has just formed for the rows that it owns

The rows of `T` never reach memory. Parts of divided rows go through the product too, which is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from insum_nn.compiler.forms.form import Form, FormError
from insum_nn.compiler.forms.loops import KernelLoops
from insum_nn.compiler.forms.points import OWNER, Read, Sub, Tail
from insum_nn.compiler.forms.schedule import Axis
from insum_nn.compiler.forms.text import Scope
from insum_nn.compiler.lang.bind import Bound

__all__ = ["KernelTail", "with_tail"]

# A tile holds whole rows of T; the weight's columns pass by in tiles.
_LIMIT = 256


def with_tail(sums: Form, bound: Bound, tail: Tail) -> Form:
    """The form of a whole statement, from that of its sum and the product after it.

    Raises:
        FormError: the product does not fit behind the sum.
    """
    if bound.dtype == torch.float64:
        raise FormError("the matrix unit takes no float64")
    static = dict(bound.static)
    for index in (tail.inner, tail.outer):
        if index not in static:
            raise FormError(f"the extent of '{index}' is not compiled in, so the tile of sums has no size")
        if static[index] > _LIMIT:
            raise FormError(f"'{index}' runs to {static[index]}, and a tile has at most {_LIMIT} numbers a row")
    if sums.combine != "own":
        raise FormError("no program has all terms of an output row")
    if len(sums.points) != 1:
        raise FormError("terms are written out")
    return replace(sums, bound=bound, tail=tail)


class KernelTail(KernelLoops):
    """Multiplies accumulators by a weight, tile by tile of its columns.

    The rows of a tile are summed side by side, for as many steps as the longest takes, or one after the other, with the
    terms of each side by side.
    """

    # The depth of the loop over a tile's rows, and its variable; 0: they are side by side.
    row_depth = 0
    row = ""

    def open_terms(self, block: int) -> None:
        """The loop over the terms of owned rows; where rows come one by one, inside a loop over the rows."""
        if not self.schedule.serial:
            super().open_terms(block)
            return
        self.row, self.row_depth = self.fresh("r"), len(self.scopes)
        lanes, depth = self.axes["m"].lanes, self.row_depth
        self.scopes.append(Scope(f"for {self.row} in range({lanes}):"))
        place = self.define("o", f"({self.tile_of['m']} * {lanes} + {self.row}).to({self.int})", "", depth).text
        inside = f", mask={place} < {self.parameters('rows')}, other=0"
        begin, owner = self.parameters("begin"), place
        end = f"{begin} + 1"
        if self.strides.split:
            end = self.parameters("end")
            owner = f"tl.load({self.parameters('owner')} + {place}{inside}).to({self.int})"
        low = self.define("low", f"tl.load({begin} + {place}{inside})", "", depth)
        high = self.define("high", f"tl.load({end} + {place}{inside})", "", depth)
        self.indices["@begin"], self.indices["@end"] = low, high
        self.indices[OWNER] = self.define("own", f"{owner} + 0", "", depth)
        super().open_terms(block)

    def put_row(self, total: str, part: str) -> str:
        """The line, in the loop over rows, that adds a row's sum to the tile."""
        chosen = f"({self.lane('m')} == {self.row})[:, None]"
        line = f"{total} = tl.where({chosen}, {total} + {part}[None, :], {total})"
        return "    " * self.row_depth + line

    def multiplied(self, total: str, target: Read, store: Callable[[str, str, Read], list[str]]) -> list[str]:
        """The lines that multiply an accumulator by the weight and store the product.

        Args:
            total: the accumulator, rows by the index that is summed.
            target: the cell that it would be stored in.
            store: writes the lines that store a tile.
        """
        tail = self.form.tail
        assert tail is not None
        kind = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}.get(self.form.bound.dtype, "tl.float32")
        how = f", input_precision='{self.precision}'" if kind == "tl.float32" else ""
        inner, mask, rows = self.indices[tail.inner].text, self.masks.pop("n", None), self.axes["n"].lanes
        # What lies beyond the last number of a row must not meet the weight, not even as NaN.
        clean = total if mask is None else f"tl.where({mask.text}[None, :], {total}, 0.0)"
        left = self.fresh("left")
        lines = [f"{left} = {clean}.to({kind})"]
        extent = self.form.static[tail.outer]
        lanes = max(16, min(self.schedule.tail, 1 << max(0, extent - 1).bit_length()))
        place = self.form.bound.layout.tensors.index(tail.weight)
        read = Read(tail.weight, tuple(map(_plain, tail.subscripts)))
        steps = {i: self.stride(place, axis, read) for axis, i in enumerate(tail.subscripts)}
        cell = Read(target.name, tuple(_plain(tail.outer) if s.plain == tail.inner else s for s in target.subs))
        self.axes["n"] = Axis((tail.outer,), lanes, lanes, ())
        before = len(self.scopes[0].lines)
        base = self.fresh("l") if lanes < extent else "0"
        column = self.define("c", f"({base} + tl.arange(0, {lanes})).to({self.int})", "n", 0)
        inside = [f"{mask.text}[:, None]"] if mask else []
        if extent % lanes:
            self.masks["n"] = self.define("ok", f"{column.text} < {extent}", "n", 0)
            inside.append(f"{self.masks['n'].text}[None, :]")
        where = f"({inner} * {steps[tail.inner]})[:, None] + ({column.text} * {steps[tail.outer]})[None, :]"
        whole = f"(tl.zeros(({rows}, {lanes}), tl.int32) == 0)"
        other = f", mask={' & '.join([whole, *inside])}, other=0.0" if inside else ""
        weight, tile = self.fresh("w"), self.fresh("tile")
        body = [
            f"{weight} = tl.load({self.parameters('tensor', tail.weight)} + {where}{other})",
            f"{tile} = tl.dot({left}, {weight}{how})",
        ]
        self.indices[tail.outer] = column
        body += store(tile, "mn", cell)
        # What was defined for the product alone belongs to it, and varies with its columns.
        body = self.scopes[0].lines[before:] + body
        del self.scopes[0].lines[before:]
        if lanes >= extent:
            return lines + body
        return [*lines, f"for {base} in range(0, {extent}, {lanes}):", *(f"    {line}" for line in body)]


def _plain(index: str) -> Sub:
    return Sub(((1, index),), 0, True)
