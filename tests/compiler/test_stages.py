"""CONTRIBUTING.md shows what the compiler prints at each stage."""

from __future__ import annotations

import pytest

from insum_nn.compiler.lang.parser import parse
from tests.compiler.stages import BEGIN, COMMAND, DOCUMENT, END, pretty, stages, with_stages


def test_the_stages_of_the_document_are_those_of_the_compiler():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_stages(text), f"the stages in {DOCUMENT.name} are out of date: run {COMMAND}"


def test_what_stands_between_the_markers_is_replaced():
    assert with_stages(f"a {BEGIN} b {END} c") == with_stages(f"a {BEGIN}{END} c")
    with pytest.raises(ValueError, match="has no lines <!-- stages: begin -->"):
        with_stages(f"a {BEGIN} b")


def test_every_stage_has_a_text():
    titles, texts = zip(*stages(), strict=True)
    assert len(set(titles)) == len(titles)
    assert all(text.strip() == text != "" for text in texts)


def test_nodes_are_shown_as_they_are_built():
    short = "Statement(Access('y', (Subscript((Term(2, Index('i')),), 1),)), '+=', (Number(3), Access('x', ())))"
    assert pretty(parse("y[2*i+1] += 3 * x")) == short
    long = pretty(parse("y[2*i+1] += 3 * x * a_name_that_is_long[i]"))
    assert long.split("\n") == [
        "Statement(",
        "    Access('y', (Subscript((Term(2, Index('i')),), 1),)),",
        "    '+=',",
        "    (Number(3), Access('x', ()), Access('a_name_that_is_long', (Subscript((Term(1, Index('i')),), 0),))),",
        ")",
    ]
