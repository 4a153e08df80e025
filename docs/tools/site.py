"""What mkdocs does in addition: executes the tutorials, takes parts of other files into pages, cuts links to the tree.

`INSUM_TUTORIALS` is `full`, `tiny`, or `none`, the default: then a page shows its code without what it prints.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tutorials import FENCE, Record, python_blocks
from tutorials import TINY as TINY_SIZES

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r"^<!-- include: (\S+?)(?: (\S+))? -->$", re.MULTILINE)
# A link that leaves docs/: [text](../CONTRIBUTING.md#part), from any depth.
OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]+)(?:#[^)]*)?\)")
# In a page's HTML: code and tags, which stay as they are; a number with its unit; a date.
PIECES = re.compile(
    r"<(pre|code|svg|script|style)\b.*?</\1>|<[^>]*>|(\d) (ms|us|s|MiB|GiB|%)(?![\w])|(\d{4})-(\d\d)-(\d\d)", re.DOTALL
)
VERBATIM = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)
# A script, a style or an image that a reader's browser would fetch from elsewhere.
FETCHED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?https?:[^>]*>|<link\b[^>]*rel=["']?stylesheet[^>]*https?:[^>]*>"""
)
NOTE = "\n\n*The output above is that of this page's code, run when the site was built: {seconds:.0f} s ({where}).*\n"
TINY = (
    '\n\n!!! warning "A quick build"\n\n    This page\'s code ran at a tiny size: {sizes}. '
    "Its numbers say nothing about the real ones.\n"
)

_records: dict[str, Record] = {}


def on_files(files: Any, config: Any) -> Any:
    """Execute the tutorials, and add their figures and scripts to the site."""
    size = os.environ.get("INSUM_TUTORIALS", "none")
    _records.clear()
    for page in sorted(Path(config.docs_dir, "tutorials").glob("*.md")):
        blocks = python_blocks(page.read_text(encoding="utf-8"))
        if not blocks:
            continue
        script = "\n\n".join(block.code.strip() for block in blocks) + "\n"
        files.append(File.generated(config, f"tutorials/{page.stem}.py", content=script))
        if size == "none":
            continue
        with tempfile.TemporaryDirectory() as folder:
            tool = Path(__file__).with_name("tutorials.py")
            done = subprocess.run([sys.executable, str(tool), str(page), "--size", size, "--record", folder])
            if done.returncode:
                raise PluginError(f"{page.name} failed")
            record = Record(**json.loads(Path(folder, "record.json").read_text(encoding="utf-8")))
            for name in (name for names in record.figures for name in names):
                content = Path(folder, name).read_bytes()
                files.append(File.generated(config, f"tutorials/{name}", content=content))
        _records[f"tutorials/{page.name}"] = record
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in what is taken from elsewhere, and take out links that lead outside of the site."""
    uri = page.file.src_uri
    if uri in _records:
        markdown = with_outputs(markdown, _records[uri])
        if os.environ["INSUM_TUTORIALS"] == "tiny":
            title, _separator, rest = markdown.partition("\n")
            markdown = title + TINY.format(sizes=TINY_SIZES.findall(markdown)[0]) + rest
    depth = uri.count("/")
    # Links of a file beside docs/ lead into it.
    markdown = INCLUDE.sub(lambda found: included(*found.groups()).replace("](docs/", f"]({'../' * depth}"), markdown)
    return OUTSIDE.sub(lambda found: within(found, depth), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep numbers with their units, and dates, on one line; let a line end between the parts of a case's name."""
    return PIECES.sub(unbroken, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that makes a browser fetch something from another host, or shows a formula as its source."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {found[0]}")
    if "$$" in VERBATIM.sub("", output):
        raise PluginError(f"{page.file.src_uri} has a formula between $$, which needs a script: use a text block")
    return output


def unbroken(found: re.Match[str]) -> str:
    """A number with its unit and a date without breaks, `name/size=1` with one behind its slash, all else as it is."""
    tag, number, unit, *date = found.groups()
    if tag == "code" and re.search(r"/\w+=", found.group(0)):
        return re.sub(r"/(\w+=)", r"/<wbr>\1", found.group(0))
    if unit is not None:
        return f"{number}\N{NO-BREAK SPACE}{unit}"
    return "\N{NON-BREAKING HYPHEN}".join(date) if date[0] is not None else found.group(0)


def with_outputs(markdown: str, record: Record) -> str:
    """The page with what each block printed and drew after it."""
    number = iter(range(len(record.outputs)))

    def after(found: re.Match[str]) -> str:
        i = next(number)
        parts = [found.group(0)]
        if record.outputs[i]:
            parts.append("```{ .text .output }\n" + record.outputs[i] + "\n```")
        parts += [f"![Figure made by the code above]({name})" for name in record.figures[i]]
        return "\n\n".join(parts)

    return FENCE.sub(after, markdown) + NOTE.format(seconds=record.seconds, where=record.where)


def included(path: str, part: str | None) -> str:
    """A file of the repository without its title, or what stands between its comments `part: begin` and `part: end`."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if part is None:
        return re.sub(r"\A# .*\n", "", text)
    found = re.search(rf"<!-- {part}: begin -->\n(.*?)<!-- {part}: end -->", text, re.DOTALL)
    if found is None:
        raise PluginError(f"{path} has no comments <!-- {part}: begin --> and <!-- {part}: end -->")
    return found.group(1)


def within(found: re.Match[str], depth: int) -> str:
    """A link as it is, or its text and the file's path where the file is no part of the site."""
    text, up, path = found.groups()
    if up.count("../") <= depth:
        return found.group(0)
    return f"{text} (`{path}`)" if path not in text else text
