"""The texts of kernels that build maps on a device, one for all sizes.

Callers ensure that numbers of cells and entries fit into 32 bits.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["COLUMNS", "CONSTANTS", "cell", "exchange", "look_up"]
__all__ += ["mark", "masks", "number", "pairs", "permute", "search", "write"]

# Columns of a table that one program takes; offsets that it takes at a time, and lines of offsets.
COLUMNS = 512
_OFFSETS = 8
_LINES = 4
CONSTANTS = {"columns": COLUMNS, "offsets": _OFFSETS, "lines": _LINES}

_HEAD = """import triton
import triton.language as tl


@triton.jit
def kernel({parameters}):
    block = tl.program_id(0)
    column = block * {columns} + tl.arange(0, {columns})
    here = column < columns
"""

_BY_OFFSETS = """    for first in range(0, volume, {offsets}):
        k = first + tl.arange(0, {offsets})
        inside = (k < volume)[:, None] & here[None, :]
"""

# Key: the offsets at which a column has an entry, as sums of `powers`.
_MASKS = """        present = (got >= 0).to(tl.int32)
        power = tl.load(powers + k, mask=k < volume, other=0)
        key += tl.sum(present * power[:, None], 0)
"""
_KEYS = "    tl.store(keys + column, key, mask=here)\n"
# Two marks and the counts.
_ZEROS = """    some = tl.arange(0, {columns})
    for first in range(-2, volume, {columns}):
        tl.store(memory + (counts + first + some), some * 0, mask=(first + some < volume) & (block == 0))
"""


def _text(parameters: str, *lines: str) -> str:
    return "".join([_HEAD, *lines]).format(parameters=parameters, **CONSTANTS)


def _names(letter: str, first: int, dims: int) -> list[str]:
    return [f"{letter}{axis}" for axis in range(first, dims + 1)]


def _list(*names: str | list[str]) -> str:
    return ", ".join([each for name in names for each in ([name] if isinstance(name, str) else name)])


def _cells(dims: int) -> str:
    """The cell of each site, in a grid with a margin after every axis but the first, and which are `there`."""
    lines = ["    there = here\n", "    cell = tl.zeros(({columns},), tl.int64)\n"]
    for axis in range(dims + 1):
        lines += [
            f"    x{axis} = tl.load(indices + (column * {dims + 1} + {axis}), mask=here, other=0)\n",
            f"    there = there & (x{axis} >= 0) & (x{axis} < e{axis})\n",
            f"    cell = cell * (e{axis} + margin) + x{axis}\n",
        ]
    return "".join(lines)


def _kernel_cells(dims: int) -> str:
    """The kernel cell of each offset: its coordinates `c1`, `c2`, .."""
    lines = ["        rest = k\n"]
    for axis in range(dims, 0, -1):
        lines += [f"        c{axis} = rest % k{axis}\n", f"        rest = rest // k{axis}\n"]
    return "".join(lines)


def _steps(dims: int, offsets: str) -> str:
    """By how much the number of a site's cell differs from that of its neighbour at each offset."""
    lines = [f"        step = {offsets} * 0\n"]
    for axis in range(1, dims + 1):
        lines.append(f"        step = step * (e{axis} + margin) + (c{axis} * s{axis} - p{axis})\n")
    return "".join(lines)


def number(dims: int) -> str:
    """Write the row of each site at its cell, and zeros to the marks and counts that `look_up` adds to."""
    return _text(
        _list("indices", "table", "memory", "counts", "lead", "columns", "margin", "volume", _names("e", 0, dims)),
        _cells(dims),
        "    tl.store(table + (lead + cell), column, mask=there)\n",
        _ZEROS,
    )


def look_up(dims: int) -> str:
    """Look up the neighbours of all sites in the table that `number` wrote, with their keys and counts.

        near[k, i] = table[lead + cell[i] + step(k)]

    Before the counts two marks are set to 1: where a coordinate lies outside, and where the row of another site stands
    at a site's cell.
    """
    moves = [_names(letter, 1, dims) for letter in "ksp"]
    return _text(
        _list(
            *("indices", "table", "near", "keys", "memory", "powers", "counts"),
            *("lead", "columns", "margin", _names("e", 0, dims), *moves, "volume"),
        ),
        _cells(dims),
        "    base = table + (lead + cell)\n",
        "    other = tl.load(base, mask=there, other=0) != column\n",
        "    tl.store(memory + (counts - 2 + column * 0), column * 0 + 1, mask=here & ~there)\n",
        "    tl.store(memory + (counts - 1 + column * 0), column * 0 + 1, mask=there & other)\n",
        "    key = tl.zeros(({columns},), tl.int32)\n",
        _BY_OFFSETS,
        _kernel_cells(dims),
        _steps(dims, "k"),
        "        got = tl.load(base[None, :] + step[:, None], mask=inside & there[None, :], other=-1)\n",
        "        tl.store(near + (k[:, None] * columns + column[None, :]), got, mask=inside)\n",
        _MASKS,
        "        entries = tl.sum(present, 1)\n",
        '        tl.atomic_add(memory + (counts + k), entries, mask=k < volume, sem="relaxed")\n',
        _KEYS,
    )


def cell(dims: int) -> str:
    """Write the number of each site's cell, or -1 where it lies outside, and zeros to what `search` adds to."""
    return _text(
        _list("indices", "cells", "memory", "counts", "columns", "margin", "volume", _names("e", 0, dims)),
        _cells(dims),
        "    tl.store(cells + column, tl.where(there, cell, -1), mask=here)\n",
        _ZEROS,
    )


def search(dims: int) -> str:
    """Look up the neighbours of all sites among the sorted numbers of their cells, as `look_up` does in a table.

        near[k, i] = rows[the place of known[i] + step(k)], or -1

    Offsets that differ in the last axis alone are a line: a search finds where it begins, and the others from there.
    """
    moves = [_names(letter, 1, dims) for letter in "ksp"]
    return _text(
        _list(
            *("known", "rows", "near", "keys", "memory", "powers", "counts"),
            *("half", "columns", "margin", _names("e", 1, dims), *moves, "volume"),
        ),
        "    own = tl.load(known + column, mask=here, other=0).to(tl.int64)\n",
        "    after = tl.load(known + (column + 1), mask=column + 1 < columns, other=-1)\n",
        "    tl.store(memory + (counts - 2 + column * 0), column * 0 + 1, mask=here & (own < 0))\n",
        "    tl.store(memory + (counts - 1 + column * 0), column * 0 + 1, mask=here & (own == after))\n",
        "    key = tl.zeros(({columns},), tl.int32)\n",
        f"    for first in range(0, volume, {{lines}} * k{dims}):\n",
        f"        k = first + tl.arange(0, {{lines}}) * k{dims}\n",
        "        inside = (k < volume)[:, None] & here[None, :]\n",
        _kernel_cells(dims),
        _steps(dims, "k.to(tl.int64)"),
        "        wanted = own[None, :] + step[:, None]\n",
        "        place = column[None, :] * 0 + k[:, None] * 0\n",
        "        width = half\n",
        "        while width > 0:\n",
        "            last = place + (width - 1)\n",
        "            valid = inside & (last < columns)\n",
        "            less = valid & (tl.load(known + last, mask=valid, other=0) < wanted)\n",
        "            place += less.to(tl.int32) * width\n",
        "            width = width // 2\n",
        f"        for cell in range(0, k{dims}):\n",
        "            valid = inside & (place < columns)\n",
        "            found = valid & (tl.load(known + place, mask=valid, other=0) == wanted)\n",
        "            got = tl.load(rows + place, mask=found, other=-1)\n",
        "            tl.store(near + ((k + cell)[:, None] * columns + column[None, :]), got, mask=inside)\n",
        "            present = found.to(tl.int32)\n",
        "            power = tl.load(powers + (k + cell), mask=k < volume, other=0)\n",
        "            key += tl.sum(present * power[:, None], 0)\n",
        "            entries = tl.sum(present, 1)\n",
        '            tl.atomic_add(memory + (counts + k + cell), entries, mask=k < volume, sem="relaxed")\n',
        f"            wanted += s{dims}\n",
        f"            for _ in range(0, s{dims}):\n",
        "                valid = inside & (place < columns)\n",
        "                less = valid & (tl.load(known + place, mask=valid, other=0) < wanted)\n",
        "                place += less.to(tl.int32)\n",
        _KEYS,
    )


def masks() -> str:
    """Keys of a table (volume, columns)."""
    return _text(
        "near, keys, powers, columns, volume",
        "    key = tl.zeros(({columns},), tl.int32)\n",
        _BY_OFFSETS,
        "        got = tl.load(near + (k[:, None] * columns + column[None, :]), mask=inside, other=-1)\n",
        _MASKS,
        _KEYS,
    )


def permute() -> str:
    """Put the columns of a table in an order.

    memory[k, i] = near[k, order[i]];  rows[i] = names[order[i]]

    `rows`, `words` and `parts` begin at cells of `memory` behind the table. Where `named` is 0, `rows` is the order
    itself. The words are the offsets of each column as bits, of no more than 31 offsets; the parts are the entries of
    each offset in each block of columns.
    """
    return _text(
        "near, order, names, memory, rows, words, parts, columns, volume, named, blocks",
        "    at = tl.load(order + column, mask=here, other=0).to(tl.int32)\n",
        "    name = tl.load(names + at, mask=here & (named > 0), other=0)\n",
        "    tl.store(memory + (rows + column), tl.where(named > 0, name, at), mask=here)\n",
        "    word = tl.zeros(({columns},), tl.int32)\n",
        _BY_OFFSETS,
        "        got = tl.load(near + (k[:, None] * columns + at[None, :]), mask=inside, other=-1)\n",
        "        tl.store(memory + (k[:, None] * columns + column[None, :]), got, mask=inside)\n",
        "        present = (got >= 0).to(tl.int32)\n",
        "        word += tl.sum(present << (k & 31)[:, None], 0)\n",
        "        tl.store(memory + (parts + k * blocks + block), tl.sum(present, 1), mask=k < volume)\n",
        "    tl.store(memory + (words + column), word, mask=here)\n",
    )


def exchange() -> str:
    """Write the output of each entry at its input: out[k, near[k, i]] = order[i]."""
    return _text(
        "near, order, out, columns, volume, inputs",
        "    row = tl.load(order + column, mask=here, other=0)\n",
        _BY_OFFSETS,
        "        got = tl.load(near + (k[:, None] * columns + column[None, :]), mask=inside, other=-1)\n",
        "        rows = row[None, :] + k[:, None] * 0\n",
        "        tl.store(out + (k[:, None] * inputs + got), rows, mask=inside & (got >= 0))\n",
    )


def pairs() -> str:
    """List the entries of a table by offset, then by column: a program takes a block of columns at one offset.

    Before its entries stand those of earlier offsets (`counts`), and of earlier blocks (`parts`). `rows`, `parts` and
    `counts` begin at cells of `memory`, whose first are the table.
    """
    return """import triton
import triton.language as tl


@triton.jit
def kernel(memory, offset, output, input, rows, parts, counts, columns, blocks):
    k = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    column = block * {columns} + tl.arange(0, {columns})
    got = tl.load(memory + (k * columns + column), mask=column < columns, other=-1)
    row = tl.load(memory + (rows + column), mask=column < columns, other=0)
    present = (got >= 0).to(tl.int32)
    before = tl.cumsum(present, 0) - 1
    some = tl.arange(0, {columns})
    for first in range(0, k, {columns}):
        before += tl.sum(tl.load(memory + (counts + first + some), mask=first + some < k, other=0), 0)
    for first in range(0, block, {columns}):
        before += tl.sum(tl.load(memory + (parts + k * blocks + first + some), mask=first + some < block, other=0), 0)
    tl.store(offset + before, row * 0 + k, mask=got >= 0)
    tl.store(output + before, row, mask=got >= 0)
    tl.store(input + before, got, mask=got >= 0)
""".format(**CONSTANTS)


def _landing(dims: int, kind: Literal["conv", "transpose"]) -> str:
    """Where the kernel's cells take sites: `place1`, .., and the number `key` of that cell, where `reached`.

    m are the output's extents, s strides, p paddings, g dilations. A site and a cell of the kernel lead to an output
    along an axis where both leave the same remainder of the stride: one division for each, and none for the two.
    """
    axes, transposed = range(1, dims + 1), kind == "transpose"
    lines: list[str] = []
    for axis in range(dims + 1):
        lines += [
            f"    x{axis} = tl.load(indices + (column * {dims + 1} + {axis}), mask=here, other=0)\n",
            f"    here = here & (x{axis} >= 0) & (x{axis} < e{axis})\n",
            f"    x{axis} = tl.where(here, x{axis}, 0).to(tl.int32)\n",
        ]
    for axis in axes:
        own = f"x{axis} * s{axis} - p{axis}" if transposed else f"(x{axis} + p{axis}) // s{axis}"
        lines.append(f"    q{axis} = {own}\n")
        if not transposed:
            lines.append(f"    r{axis} = (x{axis} + p{axis}) % s{axis}\n")
    lines += [_BY_OFFSETS, _kernel_cells(dims), "        reached = inside\n"]
    lines += ["        place0 = x0[None, :] + k[:, None] * 0\n", "        key = place0\n"]
    for axis in axes:
        if transposed:
            lines.append(f"        place{axis} = q{axis}[None, :] + (c{axis} * g{axis})[:, None]\n")
        else:
            lines += [
                f"        step = c{axis} * g{axis}\n",
                f"        reached = reached & (r{axis}[None, :] == (step % s{axis})[:, None])\n",
                f"        place{axis} = q{axis}[None, :] - (step // s{axis})[:, None]\n",
            ]
        lines += [
            f"        reached = reached & (place{axis} >= 0) & (place{axis} < m{axis})\n",
            f"        key = key * (m{axis} + margin) + place{axis}\n",
        ]
    return "".join(lines)


def _movement(dims: int) -> list[str]:
    names = [_names("e", 0, dims), *(_names(letter, 1, dims) for letter in "mkspg")]
    return ["cells", "columns", "margin", *(each for some in names for each in some), "volume"]


def mark(dims: int, kind: Literal["conv", "transpose"]) -> str:
    """Write 1 at each of the `cells` that a kernel reaches; behind them, count for each offset how often it does."""
    return _text(
        _list("indices", "marks", _movement(dims)),
        _landing(dims, kind),
        "        tl.store(marks + key, key * 0 + 1, mask=reached)\n",
        '        tl.atomic_add(marks + (cells + k), tl.sum(reached.to(tl.int32), 1), mask=k < volume, sem="relaxed")\n',
    )


def write(dims: int, kind: Literal["conv", "transpose"]) -> str:
    """Write the table of a kernel, and the cells and coordinates of its `count` outputs, whose numbers cells hold.

    table[k, number] = row;  keys[number] = key;  outputs[number, j] = place j

    The counts behind the cells are copied to `counts`, a cell of `memory`.
    """
    stores = [
        f"        tl.store(outputs + (number * {dims + 1} + {axis}), place{axis}, mask=reached)\n"
        for axis in range(dims + 1)
    ]
    return _text(
        _list("indices", "numbers", "table", "keys", "outputs", "memory", "counts", "count", _movement(dims)),
        _landing(dims, kind),
        "        number = tl.load(numbers + key, mask=reached, other=1) - 1\n",
        "        rows = column[None, :] + k[:, None] * 0\n",
        "        tl.store(table + (k[:, None] * count + number), rows, mask=reached)\n",
        "        tl.store(keys + number, key, mask=reached)\n",
        *stores,
        "        reaching = tl.load(numbers + (cells + k), mask=k < volume, other=0)\n",
        "        tl.store(memory + (counts + k), reaching, mask=(k < volume) & (block == 0))\n",
    )
