"""Draw boxes and edges as an SVG picture: a layered graph from top to bottom.

Each edge leads to a lower layer, and has a place of its own in every layer that it crosses, so that it never runs under
a box. Colours follow the viewer's light or dark scheme; the picture has its own background.
"""

from __future__ import annotations

import graphlib
import html
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

__all__ = ["Box", "Drawing", "Edge", "Kind", "Placed", "draw", "elide", "escape", "lay_out", "text_width"]

Kind = Literal["tensor", "index", "gather", "product", "combine", "output"]

_WIDEST_LINE = 36  # characters
_CHARACTER = 7.3  # pixels of a monospaced character at _FONT pixels, rounded up
_FONT = 12
_LINE = 17
_PAD_X = 13
_PAD_Y = 9
_BETWEEN_BOXES = 26
_BETWEEN_LAYERS = 46
_MARGIN = 24
_LEGEND = 40


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: the first line is its title, the others are details; browsers show `hover` in full."""

    key: str
    kind: Kind
    lines: tuple[str, ...]
    hover: str = ""

    @property
    def width(self) -> float:
        return max((text_width(elide(line)) for line in self.lines), default=0) + 2 * _PAD_X

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 2 * _PAD_Y


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge from one box to another; `index` edges carry positions instead of values."""

    source: str
    target: str
    index: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A box and its upper left corner."""

    box: Box
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """A layout; `routes[i]` are the points of edge `i`: curves between layers, straight lines inside."""

    width: float
    height: float
    placed: tuple[Placed, ...]
    routes: tuple[tuple[tuple[float, float], ...], ...]


def elide(text: str, limit: int = _WIDEST_LINE) -> str:
    """Cut the middle out of a long text.

    >>> elide("a_tensor_with_a_long_name[i,j]", 16)
    'a_tensor…me[i,j]'
    """
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - head - 1) :]}"


def text_width(text: str) -> float:
    """Return the width of a line of code in pixels; wide East Asian letters take two cells, combining marks none."""
    cells = sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return cells * _CHARACTER


def escape(text: str) -> str:
    """Escape text for HTML and XML; characters that XML forbids become U+FFFD."""
    return html.escape("".join(c if _is_legal(c) else "\ufffd" for c in text), quote=True)


def _is_legal(character: str) -> bool:
    code = ord(character)
    if code < 32:
        return character in "\t\n\r"
    return not 0xD800 <= code < 0xE000 and code & 0xFFFE != 0xFFFE


# Layout. A cell is a box, or the place where edge `edge` passes a layer.


@dataclass(slots=True)
class _Cell:
    width: float
    box: Box | None = None
    x: float = 0.0  # centre


class _Layout:
    def __init__(self, boxes: Sequence[Box], edges: Sequence[Edge]) -> None:
        self.boxes = {box.key: box for box in boxes}
        self.edges = edges
        self.layer = self.layers_of()
        self.cells: list[_Cell] = []
        self.rows: list[list[int]] = [[] for _ in range(max(self.layer.values(), default=-1) + 1)]
        self.above: dict[int, list[int]] = {}
        self.below: dict[int, list[int]] = {}
        self.chains: list[list[int]] = []
        self.fill()

    def layers_of(self) -> dict[str, int]:
        """Return the layer of each box: as low as its consumers allow, so that operands are close to their use."""
        targets: dict[str, list[str]] = {key: [] for key in self.boxes}
        for edge in self.edges:
            targets[edge.source].append(edge.target)
        height: dict[str, int] = {}
        for key in graphlib.TopologicalSorter(targets).static_order():
            height[key] = 1 + max((height[target] for target in targets[key]), default=-1)
        top = max(height.values(), default=0)
        return {key: top - value for key, value in height.items()}

    def fill(self) -> None:
        number: dict[str, int] = {}
        for key, box in self.boxes.items():
            number[key] = self.add(_Cell(box.width, box), self.layer[key])
        passing: dict[tuple[str, int], int] = {}
        for edge in self.edges:
            chain = [number[edge.source]]
            for layer in range(self.layer[edge.source] + 1, self.layer[edge.target]):
                # Edges out of one box share their places.
                if (edge.source, layer) not in passing:
                    passing[edge.source, layer] = self.add(_Cell(0.0), layer)
                chain.append(passing[edge.source, layer])
            chain.append(number[edge.target])
            for upper, lower in pairwise(chain):
                if lower not in self.below[upper]:
                    self.below[upper].append(lower)
                    self.above[lower].append(upper)
            self.chains.append(chain)

    def add(self, cell: _Cell, layer: int) -> int:
        self.cells.append(cell)
        place = len(self.cells) - 1
        self.rows[layer].append(place)
        self.above[place], self.below[place] = [], []
        return place

    # Order inside the layers: sort by the mean place of the neighbours, keep the order with the fewest crossings.

    def order(self) -> None:
        self.rows = self.reading_order()
        best, fewest = [list(row) for row in self.rows], self.crossings()
        for sweep in range(16):
            downward = sweep % 2 == 0
            rows = range(1, len(self.rows)) if downward else range(len(self.rows) - 2, -1, -1)
            for layer in rows:
                near = self.above if downward else self.below
                fixed = {cell: i for i, cell in enumerate(self.rows[layer - 1 if downward else layer + 1])}
                own = {cell: i for i, cell in enumerate(self.rows[layer])}
                self.rows[layer].sort(
                    key=lambda c, near=near, fixed=fixed, own=own: (
                        sum(fixed[x] for x in near[c]) / len(near[c]) if near[c] else own[c]
                    )
                )
            if (count := self.crossings()) < fewest:
                best, fewest = [list(row) for row in self.rows], count
        self.rows = best

    def reading_order(self) -> list[list[int]]:
        """Order the cells of each layer from left to right as the boxes were given."""
        rows: list[list[int]] = [[] for _ in self.rows]
        where = {cell: layer for layer, row in enumerate(self.rows) for cell in row}
        seen: set[int] = set()
        stack = [cell for row in self.rows for cell in reversed(row)]
        while stack:
            cell = stack.pop()
            if cell not in seen:
                seen.add(cell)
                rows[where[cell]].append(cell)
                stack.extend(reversed(self.above[cell]))
        return rows

    def crossings(self) -> int:
        total = 0
        for upper, lower in pairwise(self.rows):
            place = {cell: i for i, cell in enumerate(lower)}
            ends = [(i, place[target]) for i, cell in enumerate(upper) for target in self.below[cell]]
            total += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for i, a in enumerate(ends) for b in ends[i + 1 :])
        return total

    # Coordinates: pull each cell under its neighbours, then move neighbours in a layer apart as little as possible.

    def place(self) -> None:
        for row in self.rows:
            self.settle(row, [0.0] * len(row))
        for sweep in range(24):
            downward = sweep % 2 == 0
            for row in self.rows if downward else reversed(self.rows):
                # The last sweeps look both ways, which centres a box between its operands and its use.
                wanted = [self.pull(cell, both=sweep >= 16, downward=downward) for cell in row]
                self.settle(row, wanted)

    def pull(self, cell: int, *, both: bool, downward: bool) -> float:
        near = self.above[cell] + self.below[cell] if both else self.above[cell] if downward else self.below[cell]
        if not near:
            return self.cells[cell].x
        # Chains of products are vertical with their operands at the side; long edges are straight.
        own = self.weight(cell)
        near = [x for x in near if own > 1 and self.weight(x) == own] or near
        return sum(self.cells[x].x for x in near) / len(near)

    def weight(self, cell: int) -> float:
        box = self.cells[cell].box
        return 4.0 if box is None else 1000.0 if box.kind in ("product", "combine", "output") else 1.0

    def settle(self, row: Sequence[int], wanted: Sequence[float]) -> None:
        """Move a layer to the nearest places (least squares) that keep order and distance, by isotonic regression."""
        offsets = [0.0]
        for left, right in pairwise(row):
            offsets.append(offsets[-1] + (self.cells[left].width + self.cells[right].width) / 2 + _BETWEEN_BOXES)
        pools: list[tuple[float, float, int]] = []
        for cell, target, offset in zip(row, wanted, offsets, strict=False):
            mean, weight, count = target - offset, self.weight(cell), 1
            while pools and pools[-1][0] > mean:
                other, heavy, size = pools.pop()
                mean = (mean * weight + other * heavy) / (weight + heavy)
                weight, count = weight + heavy, count + size
            pools.append((mean, weight, count))
        means = [mean for mean, _, count in pools for _ in range(count)]
        for cell, mean, offset in zip(row, means, offsets, strict=False):
            self.cells[cell].x = mean + offset

    # Result.

    def drawing(self, least_width: float) -> Drawing:
        left = min((cell.x - cell.width / 2 for cell in self.cells), default=0.0)
        right = max((cell.x + cell.width / 2 for cell in self.cells), default=0.0)
        width = max(right - left, least_width)
        shift = _MARGIN - left + (width - (right - left)) / 2
        heights = [max((c.box.height for i in row if (c := self.cells[i]).box), default=0.0) for row in self.rows]
        tops = [_MARGIN + sum(heights[:i]) + i * _BETWEEN_LAYERS for i in range(len(heights))]
        placed: dict[int, Placed] = {}
        for row, top, height in zip(self.rows, tops, heights, strict=True):
            for i in row:
                self.cells[i].x += shift
                if (box := self.cells[i].box) is not None:
                    y = top + (height - box.height) / 2
                    placed[i] = Placed(box, self.cells[i].x - box.width / 2, y)
        bands = {i: (top, top + h) for row, top, h in zip(self.rows, tops, heights, strict=True) for i in row}
        routes = tuple(self.route(n, chain, placed, bands) for n, chain in enumerate(self.chains))
        bottom = tops[-1] + heights[-1] if tops else 0.0
        size = math.ceil(width + 2 * _MARGIN), math.ceil(bottom + _MARGIN + _LEGEND)
        return Drawing(*size, tuple(placed.values()), routes)

    def route(
        self, number: int, chain: Sequence[int], placed: Mapping[int, Placed], bands: Mapping[int, tuple[float, float]]
    ) -> tuple[tuple[float, float], ...]:
        """Return the points of an edge from the bottom of its source to the top of its target."""
        source, target = placed[chain[0]], placed[chain[-1]]
        x = self.cells[chain[0]].x
        points = [(x, source.y + source.box.height), (x, bands[chain[0]][1])]
        for cell in chain[1:-1]:
            points += [(self.cells[cell].x, bands[cell][0]), (self.cells[cell].x, bands[cell][1])]
        port = self.port(number, chain, target)
        return (*points, (port, bands[chain[-1]][0]), (port, target.y))

    def port(self, number: int, chain: Sequence[int], target: Placed) -> float:
        """Return where an edge enters its target: edges into one box end side by side, in order."""
        into = [i for i, other in enumerate(self.chains) if other[-1] == chain[-1]]
        into.sort(key=lambda i: (self.cells[self.chains[i][-2]].x, i))
        step = min(30.0, (target.box.width - 16) / max(1, len(into)))
        return self.cells[chain[-1]].x + (into.index(number) - (len(into) - 1) / 2) * step


def lay_out(boxes: Sequence[Box], edges: Sequence[Edge], *, least_width: float = 0.0) -> Drawing:
    """Place boxes in layers, without overlap, and route the edges between them.

    Args:
        boxes: in reading order, with different keys.
        edges: between keys of boxes; they form no cycle.
        least_width: the width of the legend.
    """
    layout = _Layout(boxes, edges)
    layout.order()
    layout.place()
    return layout.drawing(least_width)


# Drawing.

# kind -> light fill, light border, dark fill, dark border
_COLOURS: dict[Kind, tuple[str, str, str, str]] = {
    "tensor": ("#e6f0ff", "#3a6fc6", "#1a2c4b", "#76a7f5"),
    "index": ("#fff3d6", "#b17400", "#3b2e10", "#e3ad45"),
    "gather": ("#eff2f5", "#66727f", "#272e38", "#95a2b3"),
    "product": ("#eee7fd", "#7350c5", "#2d2349", "#ab8ff0"),
    "combine": ("#e2f6ea", "#27855a", "#163526", "#5cc492"),
    "output": ("#c9ecd8", "#176b44", "#1d4a34", "#74dba8"),
}
_LEGEND_TEXT: dict[Kind, str] = {
    "tensor": "tensor",
    "index": "index tensor",
    "gather": "gather",
    "product": "product, sum",
    "combine": "combine",
    "output": "output",
}
_INK, _FAINT, _PAPER, _FRAME, _WIRE = "#1a2230", "#4d5a6b", "#fcfcfe", "#d9dee7", "#75808f"
_DARK = {"ink": "#edf1f7", "faint": "#b3bfce", "paper": "#12161d", "frame": "#2e3643", "wire": "#8e9aab"}
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def draw(boxes: Sequence[Box], edges: Sequence[Edge], *, title: str) -> str:
    """Draw the picture as one `<svg>` element that loads nothing."""
    legend_width = sum(text_width(text) + 42 for text in _LEGEND_TEXT.values())
    drawing = lay_out(boxes, edges, least_width=legend_width)
    width, height = _number(drawing.width), _number(drawing.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="insum-flow" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_MONO}" font-size="{_FONT}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_style()}</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{_number(drawing.width - 1)}" '
        f'height="{_number(drawing.height - 1)}" rx="10" fill="{_PAPER}" stroke="{_FRAME}"/>',
        *(_edge(edge, route) for edge, route in zip(edges, drawing.routes, strict=True)),
        *(_box(placed) for placed in drawing.placed),
        _legend(drawing, legend_width),
        "</svg>",
    ]
    return "\n".join(parts)


def _style() -> str:
    """Return the style of the dark scheme; light colours are attributes, for viewers without style sheets."""
    dark = [
        f".insum-flow .{kind} rect{{fill:{fill};stroke:{border}}}" for kind, (_, _, fill, border) in _COLOURS.items()
    ]
    dark += [
        f".insum-flow text{{fill:{_DARK['ink']}}}",
        f".insum-flow .faint{{fill:{_DARK['faint']}}}",
        f".insum-flow .paper{{fill:{_DARK['paper']};stroke:{_DARK['frame']}}}",
        f".insum-flow .wire path{{stroke:{_DARK['wire']}}}",
        f".insum-flow .wire polygon{{fill:{_DARK['wire']}}}",
        f".insum-flow .wire.pointing path{{stroke:{_COLOURS['index'][3]}}}",
        f".insum-flow .wire.pointing polygon{{fill:{_COLOURS['index'][3]}}}",
    ]
    return "@media (prefers-color-scheme:dark){" + "".join(dark) + "}"


def _box(placed: Placed) -> str:
    box = placed.box
    fill, border, _, _ = _COLOURS[box.kind]
    dashes = ' stroke-dasharray="5 3"' if box.kind == "index" else ""
    middle = _number(placed.x + box.width / 2)
    parts = [
        f'<g class="{box.kind}">',
        f"<title>{escape(box.hover or ' '.join(box.lines))}</title>",
        f'<rect x="{_number(placed.x)}" y="{_number(placed.y)}" width="{_number(box.width)}" '
        f'height="{_number(box.height)}" rx="{_radius(box)}" fill="{fill}" stroke="{border}" '
        f'stroke-width="{2.4 if box.kind == "output" else 1.4}"{dashes}/>',
    ]
    for number, line in enumerate(box.lines):
        y = _number(placed.y + _PAD_Y + number * _LINE + 12.5)
        look = f'fill="{_INK}" font-weight="600"' if number == 0 else f'class="faint" fill="{_FAINT}"'
        parts.append(
            f'<text x="{middle}" y="{y}" text-anchor="middle" xml:space="preserve" {look}>{escape(elide(line))}</text>'
        )
    return "".join([*parts, "</g>"])


def _radius(box: Box) -> str:
    return _number(min(13.0, box.height / 2)) if box.kind in ("index", "tensor", "output") else "4"


def _edge(edge: Edge, route: Sequence[tuple[float, float]]) -> str:
    colour = _COLOURS["index"][1] if edge.index else _WIRE
    x, y = route[-1]
    points = [*route[:-1], (x, y - 6)]
    path = f"M{_point(points[0])}"
    for number, (a, b) in enumerate(pairwise(points)):
        if number % 2 == 0:
            path += f"L{_point(b)}"
        else:
            middle = (a[1] + b[1]) / 2
            path += f"C{_point((a[0], middle))} {_point((b[0], middle))} {_point(b)}"
    head = f"{_point((x - 4, y - 8))} {_point((x + 4, y - 8))} {_point((x, y - 0.7))}"
    dashes = ' stroke-dasharray="5 3"' if edge.index else ""
    return (
        f'<g class="wire{" pointing" if edge.index else ""}"><path d="{path}" fill="none" stroke="{colour}" '
        f'stroke-width="1.5"{dashes}/><polygon points="{head}" fill="{colour}"/></g>'
    )


def _legend(drawing: Drawing, width: float) -> str:
    x = (drawing.width - width) / 2 + 8
    y = drawing.height - _LEGEND + 8
    parts = ['<g class="legend">']
    for kind, text in _LEGEND_TEXT.items():
        fill, border, _, _ = _COLOURS[kind]
        dashes = ' stroke-dasharray="3 2"' if kind == "index" else ""
        parts.append(
            f'<g class="{kind}"><rect x="{_number(x)}" y="{_number(y)}" width="18" height="12" rx="4" '
            f'fill="{fill}" stroke="{border}"{dashes}/>'
            f'<text class="faint" x="{_number(x + 24)}" y="{_number(y + 10)}" fill="{_FAINT}">{text}</text></g>'
        )
        x += text_width(text) + 42
    return "".join([*parts, "</g>"])


def _point(point: tuple[float, float]) -> str:
    return f"{_number(point[0])} {_number(point[1])}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
