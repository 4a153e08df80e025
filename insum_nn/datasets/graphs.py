"""Graphs of torch_geometric for node classification: Zachary's karate club, and the raw files of Planetoid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from insum_nn.errors import InsumFormatError, InsumNameError, import_extra

__all__ = ["karate_club", "planetoid"]

_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


def karate_club() -> Any:
    """Zachary's karate club, which comes with torch_geometric.

    Returns:
        A `torch_geometric.data.Data`: 34 nodes, one-hot features, 4 classes, one labelled node of each class to train
        on (`train_mask`), and the others in `test_mask`. `val_mask` is `train_mask`: there is nothing to validate on.

    Raises:
        MissingExtraError: torch_geometric is not installed.

    >>> graph = karate_club()
    >>> graph.x.shape, int(graph.train_mask.sum()), int(graph.test_mask.sum())
    (torch.Size([34, 34]), 4, 30)
    """
    data = import_extra("torch_geometric.datasets", "the karate club").KarateClub()[0]
    data.val_mask, data.test_mask = data.train_mask, ~data.train_mask
    return data


def planetoid(name: str, root: str | Path) -> Any:
    """Cora, CiteSeer or PubMed with the published split, from files that are there: nothing is downloaded or written.

    Source: Yang, Cohen, Salakhutdinov, Revisiting Semi-Supervised Learning with Graph Embeddings (ICML 2016). The
    features of a node are scaled to sum to 1, as in Kipf and Welling (ICLR 2017).

    Args:
        name: `"Cora"`, `"CiteSeer"` or `"PubMed"`.
        root: holds `<name>/raw/ind.<name>.*`, as torch_geometric lays it out, or the files `ind.<name>.*` themselves.

    Returns:
        A `torch_geometric.data.Data` with `train_mask`, `val_mask` and `test_mask`.

    Raises:
        InsumNameError: a file is missing.
        InsumFormatError: a file is damaged.
        MissingExtraError: torch_geometric is not installed.
    """
    reader, transforms = (import_extra(f"torch_geometric.{part}", name) for part in ("io", "transforms"))
    nested = Path(root) / name / "raw"
    folder = nested if nested.is_dir() else Path(root)
    files = [f"ind.{name.lower()}.{part}" for part in _PARTS]
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise InsumNameError(
            f"there is no {name} under {root}",
            details=[f"expected {nested}/{files[0]} or {root}/{files[0]}, and so on", f"missing: {', '.join(missing)}"],
            fix="pass the folder that holds the raw files of Planetoid.",
            path=str(root),
        )
    try:
        return transforms.NormalizeFeatures()(reader.read_planetoid_data(str(folder), name.lower()))
    except Exception as error:
        what, fix = f"the files of {name} in {folder} cannot be read: {error}", "fetch the files again."
        raise InsumFormatError(what, fix=fix, path=str(folder)) from error
