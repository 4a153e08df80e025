from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

from insum_nn.datasets import karate_club, planetoid
from insum_nn.errors import InsumFormatError, InsumNameError

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


def test_karate_club_s_splits():
    graph = karate_club()
    assert not (graph.train_mask & graph.test_mask).any()
    assert (graph.train_mask | graph.test_mask).all()
    assert graph.y[graph.train_mask].sort().values.tolist() == [0, 1, 2, 3]


NODES = 505
X = np.arange(2.0 * NODES).reshape(NODES, 2)


def write_raw(folder: Path, name: str) -> None:
    """Nodes in a ring: two to train on, 500 to validate on, three to test on, as Planetoid's files say it."""
    folder.mkdir(parents=True)
    y = np.eye(2)[np.arange(NODES) % 2]
    graph = {n: [(n - 1) % NODES, (n + 1) % NODES, (n + 1) % NODES] for n in range(NODES)}
    parts = {"x": X[:2], "allx": X[:-3], "tx": X[-3:], "y": y[:2], "ally": y[:-3], "ty": y[-3:], "graph": graph}
    for part, values in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(values))
    # The rows of `tx` belong to these nodes, in this order.
    (folder / f"ind.{name}.test.index").write_text("504\n502\n503\n")


@pytest.mark.parametrize("nested", [False, True])
def test_the_raw_files_are_read_where_they_are(tmp_path: Path, nested: bool):
    write_raw(tmp_path / "Cora" / "raw" if nested else tmp_path / "files", "cora")
    root = tmp_path if nested else tmp_path / "files"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    graph = planetoid("Cora", root)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "nothing is written"
    order = [*range(502), 503, 504, 502]
    np.testing.assert_allclose(graph.x, (X / X.sum(1, keepdims=True))[order], rtol=1e-6)
    assert graph.y.tolist() == [n % 2 for n in order]
    for mask, nodes in ((graph.train_mask, range(2)), (graph.val_mask, range(2, 502)), (graph.test_mask, order[-3:])):
        assert mask.nonzero().flatten().tolist() == sorted(nodes)
    edges = {(n, (n + step) % NODES) for n in range(NODES) for step in (1, -1)}
    assert sorted(map(tuple, graph.edge_index.T.tolist())) == sorted(edges)


@pytest.mark.parametrize("part", PARTS)
def test_damaged_files_are_an_error(tmp_path: Path, part: str):
    write_raw(tmp_path / "files", "cora")
    (tmp_path / "files" / f"ind.cora.{part}").write_text("what\n")
    with pytest.raises(InsumFormatError, match=r"the files of Cora in .*files cannot be read"):
        planetoid("Cora", tmp_path / "files")


def test_missing_files_are_named(tmp_path: Path):
    write_raw(tmp_path / "files", "cora")
    (tmp_path / "files" / "ind.cora.graph").unlink()
    with pytest.raises(InsumNameError, match=r"there is no Cora under (?s:.*)missing: ind\.cora\.graph"):
        planetoid("Cora", tmp_path / "files")
