from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

from insum_nn.datasets import karate_club, planetoid
from insum_nn.datasets.graphs import _planetoid_folder
from insum_nn.errors import InsumFormatError, InsumNameError

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


def write_raw(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    for part in PARTS:
        (folder / f"ind.{name}.{part}").write_text(part)


def test_karate_club_s_splits():
    graph = karate_club()
    assert not (graph.train_mask & graph.test_mask).any()
    assert (graph.train_mask | graph.test_mask).all()
    assert graph.y[graph.train_mask].sort().values.tolist() == [0, 1, 2, 3]


def test_torch_geometric_s_layout_is_read_in_place(tmp_path: Path):
    write_raw(tmp_path / "Cora" / "raw", "cora")
    assert _planetoid_folder("Cora", tmp_path) == tmp_path


def test_bare_files_are_linked_into_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = tmp_path / "files"
    write_raw(files, "citeseer")
    folder = _planetoid_folder("CiteSeer", files)
    assert folder.is_relative_to(tmp_path / "cache")
    for part in PARTS:
        link = folder / "CiteSeer" / "raw" / f"ind.citeseer.{part}"
        assert link.is_symlink()
        assert link.read_text() == part
    assert _planetoid_folder("CiteSeer", files) == folder
    assert sorted(path.name for path in files.iterdir()) == sorted(f"ind.citeseer.{part}" for part in PARTS)


def test_links_are_in_the_package_s_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_raw(tmp_path / "files", "cora")
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "ours"))
    before = os.umask(0o002)
    try:
        folder = _planetoid_folder("Cora", tmp_path / "files")
    finally:
        os.umask(before)
    assert folder.parent == tmp_path / "ours"
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", f"{__file__}/cache")
    with pytest.raises(InsumFormatError, match="there is no folder for that"):
        planetoid("Cora", tmp_path / "files")


def test_missing_files_are_named(tmp_path: Path):
    write_raw(tmp_path / "files", "cora")
    (tmp_path / "files" / "ind.cora.graph").unlink()
    with pytest.raises(InsumNameError, match=r"there is no Cora under (?s:.*)missing: ind\.cora\.graph"):
        planetoid("Cora", tmp_path / "files")
