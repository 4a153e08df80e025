"""CONTRIBUTING.md shows what the compiler prints at each stage."""

from __future__ import annotations

import pytest

from tests.compiler.stages import BEGIN, COMMAND, DOCUMENT, END, stages, with_stages


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
