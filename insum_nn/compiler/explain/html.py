"""Format the sections of an explanation as text, and as HTML without scripts, fonts or other files."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Section", "Table", "escape", "page", "panel"]


def escape(text: str) -> str:
    """Escape text for HTML; characters that XML forbids become U+FFFD."""
    return html.escape("".join(c if _is_legal(c) else "\ufffd" for c in text), quote=True)


def _is_legal(character: str) -> bool:
    code = ord(character)
    if code < 32:
        return character in "\t\n\r"
    return not 0xD800 <= code < 0xE000 and code & 0xFFFE != 0xFFFE


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head; without a head, pairs of a term and its value."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self) -> str:
        rows = [self.head, *self.rows] if self.head else list(self.rows)
        columns = max(map(len, rows), default=0)
        widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
        padded = ((f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) for row in rows)
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    def html(self) -> str:
        if not self.head:
            terms = "".join(f"<dt>{escape(row[0])}</dt><dd>{escape(row[1])}</dd>" for row in self.rows)
            return f"<dl>{terms}</dl>"
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part: code, a table or a sentence.

    `plain` replaces a table whose cells are too long for columns of text; `folded` hides long code on the page until it
    is opened.
    """

    title: str
    code: str = ""
    table: Table | None = None
    note: str = ""
    plain: str = ""
    folded: bool = False

    def text(self) -> str:
        body = self.plain or (self.table.text() if self.table is not None else self.code or self.note)
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in body.split("\n"))])

    def html(self) -> str:
        if self.table is not None:
            body = self.table.html()
        elif self.code:
            body = f"<pre><code>{escape(self.code)}</code></pre>"
        else:
            body = f"<p>{escape(self.note)}</p>"
        if self.folded:
            lines = self.code.count("\n") + 1
            return (
                f'<details><summary><h2>{escape(self.title)}</h2> <span class="count">{lines} lines</span></summary>'
                f"{body}</details>"
            )
        return f"<section><h2>{escape(self.title)}</h2>{body}</section>"


_STYLE = """
.insum{--ink:#1a2230;--faint:#566373;--paper:#fff;--tint:#f4f6fa;--line:#dde2ea;--accent:#27855a;
color:var(--ink);background:var(--paper);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
max-width:1080px;margin:0 auto;padding:24px;box-sizing:border-box;border-radius:10px}
.insum h1{font:600 19px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
margin:0 0 18px;padding:10px 14px;background:var(--tint);border:0;border-left:4px solid var(--accent);
border-radius:4px;color:var(--ink);overflow-wrap:break-word}
.insum h2{font-size:16px;font-weight:650;margin:26px 0 8px;color:var(--ink);display:block}
.insum pre,.insum td{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
.insum pre{background:var(--tint);border:1px solid var(--line);border-radius:6px;padding:12px 14px;margin:0;
overflow-x:auto;line-height:1.45;color:var(--ink)}
.insum pre code{background:none;color:inherit;padding:0;font:inherit;white-space:pre}
.insum .wide{overflow-x:auto}
.insum table{border-collapse:collapse;margin:0;color:var(--ink);background:none}
.insum th,.insum td{text-align:left;vertical-align:top;padding:5px 18px 5px 0;border:0;
border-bottom:1px solid var(--line);background:none;max-width:46em;overflow-wrap:break-word}
.insum th{color:var(--faint);font-weight:500;font-size:13px}
.insum dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0}
.insum dt{color:var(--faint)}.insum dd{margin:0}
.insum summary{cursor:pointer}.insum summary h2{display:inline-block;margin:20px 0 8px}
.insum .count{color:var(--faint);font-size:13px}
@media (prefers-color-scheme:dark){.insum{--ink:#edf1f7;--faint:#a9b5c4;--paper:#181c23;--tint:#20262f;--line:#343c48;
--accent:#5cc492}}
"""
_PAGE_STYLE = "body{margin:0;background:#fff}@media (prefers-color-scheme:dark){body{background:#181c23}}"


def panel(title: str, sections: Sequence[Section | Table]) -> str:
    """Return the content for embedding, as in a notebook; its style affects nothing else."""
    body = "\n".join(section.html() for section in sections)
    return f'<article class="insum"><style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}\n</article>'


def page(title: str, sections: Sequence[Section]) -> str:
    """Return a whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head>\n<body>\n"
        f"{panel(title, sections)}\n</body></html>\n"
    )
