"""Draws docs/figures: the pictures of the language page as SVG, and the README's badges and room.

    python docs/tools/pictures.py               write the SVG files
    python docs/tools/pictures.py --room        also train on 120 generated rooms, ten minutes, and write room.png

The numbers in the pictures are computed by the statements below them, so that a picture cannot say something else. The
SVG text is the same on every machine; a test compares it with the files.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from insum_nn import insum
from insum_nn.formats import ELL, BlockGroupCOO, GroupCOO

__all__ = ["PICTURES", "Drawing"]

FIGURES = Path(__file__).resolve().parents[1] / "figures"
CELL = 30
INK, FAINT, PAPER = "#263238", "#b0bec5", "#ffffff"
# One for each entry of a picture: fills of cells, and the darker ones of arrows.
FILLS = ("#bbdefb", "#ffe0b2", "#c8e6c9", "#f8bbd0", "#e1bee7", "#fff59d")
LINES = ("#1565c0", "#e65100", "#2e7d32", "#ad1457", "#6a1b9a", "#9e7d00")

Spot = tuple[float, float]


class Drawing:
    """An SVG file that grows by cells, arrows and words."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def words(self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", ink: str = INK) -> None:
        """A line of text; `y` is its baseline."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{ink}">{escape(text)}</text>'
        )

    def cell(self, x: float, y: float, text: str, fill: str = PAPER, *, dashed: bool = False) -> None:
        """One cell, its upper left corner at (x, y)."""
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" fill="{fill}" stroke="{INK}"'
            f' stroke-width="1"{dash}/>'
        )
        self.words(x + CELL / 2, y + CELL / 2 + 5, text, anchor="middle", ink=FAINT if dashed else INK)

    def tensor(
        self,
        x: float,
        y: float,
        name: str,
        values: Tensor | Sequence[Any],
        fill: Callable[[tuple[int, ...]], str] = lambda _: PAPER,
        *,
        dashed: Callable[[tuple[int, ...]], bool] = lambda _: False,
    ) -> Callable[..., Spot]:
        """A vector as a column, or a matrix, below its name.

        Returns:
            A function from a cell to its middle.
        """
        rows = torch.as_tensor(values)
        self.words(x, y - 8, name)
        vector = rows.dim() == 1
        for i, row in enumerate(rows.reshape(len(rows), -1).tolist()):
            for j, value in enumerate(row):
                place = (i,) if vector else (i, j)
                self.cell(x + j * CELL, y + i * CELL, f"{value:g}", fill(place), dashed=dashed(place))
        return lambda i, j=0: (x + (j + 0.5) * CELL, y + (i + 0.5) * CELL)

    def arrow(self, start: Spot, end: Spot, ink: str) -> None:
        """A curve with a head."""
        (x, y), (u, v) = start, end
        bend = (u - x) / 2
        self.parts.append(
            f'<path d="M{x:g},{y:g} C{x + bend:g},{y:g} {u - bend:g},{v:g} {u - 7:g},{v:g}" fill="none"'
            f' stroke="{ink}" stroke-width="1.8"/>'
            f'<path d="M{u:g},{v:g} l-9,-4 l0,8 z" fill="{ink}"/>'
        )

    def bar(self, x: float, y: float, width: float, fill: str, text: str = "") -> None:
        """A box of a row's height."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL - 6}" fill="{fill}" stroke="{INK}"/>'
        )
        self.words(x + width / 2, y + 17, text, anchor="middle")

    def text(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}"'
            f' viewBox="0 0 {self.width} {self.height}" font-family="ui-monospace, Menlo, Consolas, monospace">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>'
        return "\n".join([head, paper, *self.parts, "</svg>", ""])


def edges(cells: Callable[..., Spot], i: int, j: int, side: int) -> Spot:
    """The middle of the left (-1) or right (1) edge of a cell."""
    x, y = cells(i, j)
    return x + side * CELL / 2, y


def gather() -> Drawing:
    """An index tensor on the right."""
    statement = "Y[e,n] = X[Col[e],n]"
    col, x = torch.tensor([2, 0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    y = insum(statement, X=x, Col=col)
    draw = Drawing(460, 222)
    draw.words(20, 26, statement, size=16)
    source = draw.tensor(40, 66, "X", x, lambda c: FILLS[int(c[0] != 2)] if c[0] in (0, 2) else PAPER)
    draw.tensor(220, 66, "Col", col, lambda c: FILLS[int(col[c[0]] != 2)])
    target = draw.tensor(330, 66, "Y", y, lambda c: FILLS[int(col[c[0]] != 2)])
    for e, row in enumerate(col.tolist()):
        draw.arrow(edges(source, row, 1, 1), edges(target, e, 0, -1), LINES[int(row != 2)])
    draw.words(40, 212, "The entry Col[e] says which row is read.", size=12)
    return draw


def scatter() -> Drawing:
    """An index tensor on the left."""
    statement = "y[Row[e]] += v[e]"
    row, v = torch.tensor([1, 0, 1, 3]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    y = insum(statement, v=v, Row=row, out_shape=(4,))
    draw = Drawing(460, 222)
    draw.words(20, 26, statement, size=16)
    source = draw.tensor(40, 66, "v", v, lambda c: FILLS[c[0]])
    draw.tensor(120, 66, "Row", row, lambda c: FILLS[c[0]])
    target = draw.tensor(330, 66, "y", y)
    for e, place in enumerate(row.tolist()):
        draw.arrow((source(e)[0] + 80 + CELL / 2, source(e)[1]), edges(target, place, 0, -1), LINES[e])
    draw.words(370, 66 + 50, "10 + 30", size=12)
    draw.words(370, 66 + 80, "nothing", size=12)
    draw.words(40, 212, "Several writes to one cell all count.", size=12)
    return draw


def product() -> Drawing:
    """Gather, multiply and scatter in one statement."""
    statement = "C[Row[e],n] += Val[e] * B[Col[e],n]"
    a = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0], [4.0, 0.0, 5.0]])
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    row, col = a.nonzero(as_tuple=True)
    c = insum(statement, Row=row, Col=col, Val=a[row, col], B=b, out_shape=(4, None))
    chosen = 1
    draw = Drawing(600, 260)
    draw.words(20, 26, statement, size=16)
    draw.tensor(20, 70, "the matrix", a, lambda p: FILLS[chosen] if p == (0, 2) else PAPER, dashed=lambda p: not a[p])

    def shade(p: tuple[int, ...]) -> str:
        return FILLS[chosen] if p[0] == chosen else PAPER

    draw.tensor(150, 70, "Row", row, shade)
    draw.tensor(195, 70, "Col", col, shade)
    entry = draw.tensor(240, 70, "Val", a[row, col], shade)
    source = draw.tensor(340, 70, "B", b, lambda p: FILLS[chosen] if p[0] == 2 else PAPER)
    target = draw.tensor(490, 70, "C", c, lambda p: FILLS[chosen] if p[0] == 0 else PAPER)
    draw.arrow(edges(entry, chosen, 0, 1), edges(source, 2, 0, -1), LINES[chosen])
    draw.arrow(edges(source, 2, 1, 1), edges(target, 0, 0, -1), LINES[chosen])
    draw.words(150, 240, "Entry 1: row 2 of B, times 2, is added to row 0 of C.", size=12)
    return draw


def missing() -> Drawing:
    """Slots that hold -1."""
    statement = "C[i,n] += Val[i,q] * B[Col[i,q],n]"
    a = torch.tensor([[0.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    form = ELL.from_dense(a)
    b = torch.tensor([[1.0], [10.0], [100.0]])
    c = insum(statement, Val=form.values, Col=form.col, B=b)
    draw = Drawing(560, 190)
    draw.words(20, 26, statement, size=16)

    def empty(p: tuple[int, ...]) -> bool:
        return bool(form.col[p] < 0)

    draw.tensor(20, 70, "the matrix", a, dashed=lambda p: not a[p])
    draw.tensor(160, 70, "Col", form.col, lambda p: PAPER if empty(p) else FILLS[0], dashed=empty)
    draw.tensor(260, 70, "Val", form.values, lambda p: PAPER if empty(p) else FILLS[0], dashed=empty)
    draw.tensor(360, 70, "B", b)
    draw.tensor(430, 70, "C", c)
    draw.words(20, 182, "Terms whose index is -1 take no part: Val and B are not even read there.", size=12)
    return draw


def affine() -> Drawing:
    """Sums in subscripts, and what they read outside."""
    statement = "y[p] += x[p+r-1] * w[r]"
    x, w = torch.arange(1.0, 6.0), torch.tensor([1.0, 2.0, 4.0])
    y = insum(statement, x=x, w=w, sizes={"p": 5})
    draw = Drawing(460, 230)
    draw.words(20, 26, statement, size=16)
    draw.words(40, 60, "x")
    for place in range(-1, 6):
        inside = 0 <= place < 5
        fill = FILLS[0] if place in (0, 1) else PAPER
        draw.cell(70 + (place + 1) * CELL, 42, f"{x[place]:g}" if inside else "", fill, dashed=not inside)
    draw.words(40, 120, "w")
    for r in range(3):
        draw.cell(70 + r * CELL, 102, f"{w[r]:g}", FILLS[1] if r else PAPER, dashed=r == 0)
        ink = LINES[1] if r else FAINT
        draw.parts.append(f'<path d="M{85 + r * CELL},74 l0,26" fill="none" stroke="{ink}" stroke-width="1.8"/>')
    draw.words(40, 180, "y")
    for p in range(5):
        draw.cell(100 + p * CELL, 162, f"{y[p]:g}", FILLS[2] if p == 0 else PAPER)
    draw.parts.append(f'<path d="M115,134 l0,26" fill="none" stroke="{LINES[2]}" stroke-width="1.8"/>')
    draw.words(200, 122, "p = 0: 1*2 + 2*4; x[-1] is outside", size=12)
    draw.words(40, 218, "A read outside misses, so a convolution needs no padding.", size=12)
    return draw


def maximum() -> Drawing:
    """Another operator, and where its gradient goes."""
    statement = "m[Row[e]] max= v[e]"
    row, v = torch.tensor([0, 0, 2, 2]), torch.tensor([1.0, 5.0, 7.0, 7.0], requires_grad=True)
    m = insum(statement, v=v, Row=row, out_shape=(3,))
    (slope,) = torch.autograd.grad(m.sum(), v)
    draw = Drawing(560, 222)
    draw.words(20, 26, statement, size=16)
    source = draw.tensor(40, 66, "v", v.detach(), lambda c: FILLS[int(row[c[0]])])
    draw.tensor(110, 66, "Row", row, lambda c: FILLS[int(row[c[0]])])
    target = draw.tensor(240, 66, "m", m.detach())
    draw.tensor(360, 66, "gradient of v", slope, lambda c: FILLS[int(row[c[0]])])
    for e, place in enumerate(row.tolist()):
        draw.arrow((source(e)[0] + 70 + CELL / 2, source(e)[1]), edges(target, place, 0, -1), LINES[place])
    draw.words(40, 212, "A cell without terms is 0. Equal maxima share the gradient.", size=12)
    return draw


def gradient() -> Drawing:
    """The derivative reads where the statement wrote."""
    draw = Drawing(680, 156)
    draw.words(20, 34, "C[Row[e],n] += Val[e] * B[Col[e],n]", size=16)
    draw.words(20, 74, "dB[Col[e],n] += dC[Row[e],n] * Val[e]", size=16, ink=LINES[0])
    draw.words(20, 108, "dVal[e] += dC[Row[e],n] * B[Col[e],n]", size=16, ink=LINES[1])
    draw.words(400, 74, "gather and scatter change places", size=12, ink=LINES[0])
    draw.words(400, 108, "a product at the stored entries", size=12, ink=LINES[1])
    draw.words(20, 140, "Both are statements, compiled as any other, and differentiable again.", size=12)
    return draw


def formats() -> Drawing:
    """One matrix in three formats."""
    a = torch.zeros(4, 4)
    a[0, 0], a[0, 1], a[0, 3], a[1, 1], a[3, 2], a[3, 3] = 1, 2, 3, 4, 5, 6
    row, col = a.nonzero(as_tuple=True)
    draw = Drawing(900, 320)

    def shade(r: int) -> str:
        return FILLS[(0, 1, 2, 2)[r]]

    draw.tensor(20, 66, "the matrix", a, lambda p: shade(p[0]) if a[p] else PAPER, dashed=lambda p: not a[p])
    draw.words(190, 30, "COO: an entry a line", size=12)
    for k, (name, values) in enumerate({"Row": row, "Col": col, "Val": a[row, col]}.items()):
        draw.tensor(190 + 42 * k, 66, name, values, lambda p: shade(int(row[p[0]])))
    group = GroupCOO.from_dense(a, group_size=2)
    draw.words(370, 30, "GroupCOO: groups of one row", size=12)

    def tint(p: tuple[int, ...]) -> str:
        return shade(int(group.row[p[0]]))

    def unused(p: tuple[int, ...]) -> bool:
        return bool(group.col[p] < 0)

    draw.tensor(370, 66, "Row", group.row, tint)
    for k, (name, values) in enumerate({"Col": group.col, "Val": group.values}.items()):
        draw.tensor(412 + 74 * k, 66, name, values, lambda p: PAPER if unused(p) else tint(p), dashed=unused)
    block = BlockGroupCOO.from_dense(a, block_shape=(2, 2), group_size=2)
    draw.words(620, 30, "BlockGroupCOO: blocks of 2 x 2", size=12)
    rows = block.row
    draw.tensor(620, 66, "Row", rows, lambda p: FILLS[int(rows[p[0]]) * 2])

    def spare(p: tuple[int, ...]) -> bool:
        return bool(block.col[p] < 0)

    def fill(p: tuple[int, ...]) -> str:
        return PAPER if spare(p) else FILLS[int(rows[p[0]]) * 2]

    draw.tensor(662, 66, "Col", block.col, fill, dashed=spare)
    draw.words(736, 58, "Val")
    for g, group_blocks in enumerate(block.values.tolist()):
        for q, one in enumerate(group_blocks):
            for i, line in enumerate(one):
                for j, value in enumerate(line):
                    x, y = 736 + (q * 2 + j) * CELL + 6 * q, 66 + (g * 2 + i) * CELL + 10 * g
                    draw.cell(x, y, f"{value:g}", fill((g, q)), dashed=spare((g, q)))
    draw.words(20, 300, "Dashed cells are not stored, or are unused slots, which hold -1 in Col.", size=12)
    return draw


def combining() -> Drawing:
    """Three ways of sharing out the terms of the rows."""
    lengths = (6, 1, 2, 7)
    draw = Drawing(720, 262)
    draw.words(20, 26, "The terms of four rows, and which program (colour) sums them", size=14)
    step = 26.0
    for line, (name, note) in enumerate(
        (
            ("by row", "a program owns its rows"),
            ("divided", "long rows have several programs, whose sums are added up"),
            ("atomic", "any program, any row: sums meet in memory"),
        )
    ):
        y = 56 + line * 62
        draw.words(20, y + 17, name)
        draw.words(110, y + 42, note, size=12)
        at = first = 0
        for row, length in enumerate(lengths):
            for term in range(length):
                fill = (FILLS[row], FILLS[first + term // 4], FILLS[at * 5 % 4])[line]
                draw.bar(110 + at * step + row * 14, y, step, fill, str(row))
                at += 1
            first += -(-length // 4)
    draw.words(20, 252, "The first two give the same bits at every run.", size=12)
    return draw


def badges() -> Drawing:
    """What the package runs on and its licence, as pyproject.toml has them."""
    text = (FIGURES.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    (oldest,) = re.findall(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    versions = {"Python": f"{pythons[0]} to {pythons[-1]}", "PyTorch": f"{oldest} or later"}
    shown = {**versions, "licence": project["license"]}
    widths = [(8 * len(name) + 12, 8 * len(value) + 12) for name, value in shown.items()]
    drawing, x = Drawing(sum(map(sum, widths)) + 8 * (len(shown) - 1), 20), 0
    for (name, value), (left, right) in zip(shown.items(), widths, strict=True):
        for start, width, fill, words in ((x, left, "#546e7a", name), (x + left, right, LINES[0], value)):
            drawing.parts.append(f'<rect x="{start}" width="{width}" height="20" fill="{fill}"/>')
            drawing.words(start + width / 2, 14, words, size=12, anchor="middle", ink=PAPER)
        x += left + right + 8
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    f"{make.__name__}.svg": make
    for make in (badges, gather, scatter, product, missing, affine, maximum, gradient, formats, combining)
}


def write_room(path: Path) -> None:
    """Run the example that trains on generated rooms, and keep its figure: two rooms that the model has not seen."""
    from PIL import Image

    script = FIGURES.parents[1] / "examples" / "train_s3dis.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), "--size", "small", "--device", "cpu", "--out", folder]
        subprocess.run(command, check=True)
        drawn = Image.open(Path(folder, "train_s3dis.png")).convert("RGB")
    # A quarter of the size; every colour stays within 6 %, those of classes too.
    drawn.quantize(256, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


def main(arguments: Iterable[str] | None = None) -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="store_true", help="also train, and write room.png")
    options = parser.parse_args(None if arguments is None else list(arguments))
    for name, make in PICTURES.items():
        (FIGURES / name).write_text(make().text(), encoding="utf-8")
    if options.room:
        write_room(FIGURES / "room.png")


if __name__ == "__main__":
    main()
