"""Graphs of torch_geometric for node classification: Zachary's karate club, and the raw files of Planetoid."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from insum_nn.compiler.schedule.cache_folder import own_folder
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
    """Cora, CiteSeer or PubMed with the published split, from files that are there: nothing is downloaded.

    Source: Yang, Cohen, Salakhutdinov, Revisiting Semi-Supervised Learning with Graph Embeddings (ICML 2016). The
    features of a node are scaled to sum to 1, as in Kipf and Welling (ICLR 2017).

    Args:
        name: `"Cora"`, `"CiteSeer"` or `"PubMed"`.
        root: holds `<name>/raw/ind.<name>.*`, as torch_geometric lays it out, or the files `ind.<name>.*` themselves.
            What torch_geometric derives from them is written to `root` in the first case, and to the cache folder
            (`INSUM_NN_CACHE_DIR`) where that is not possible.

    Returns:
        A `torch_geometric.data.Data` with `train_mask`, `val_mask` and `test_mask`.

    Raises:
        InsumNameError: a file is missing.
        InsumFormatError: there is no folder that torch_geometric could write to.
        MissingExtraError: torch_geometric is not installed.
    """
    datasets, transforms = (import_extra(f"torch_geometric.{part}", name) for part in ("datasets", "transforms"))
    folder = _planetoid_folder(name, Path(root))
    return datasets.Planetoid(str(folder), name, transform=transforms.NormalizeFeatures())[0]


def _planetoid_folder(name: str, root: Path) -> Path:
    """A folder in torch_geometric's layout that may be written to: `root` itself, or a cache of links to its files."""
    files = [f"ind.{name.lower()}.{part}" for part in _PARTS]
    nested = root / name / "raw"
    source = nested if (nested / files[0]).exists() else root
    missing = [file for file in files if not (source / file).exists()]
    if missing:
        raise InsumNameError(
            f"there is no {name} under {root}",
            details=[f"expected {nested}/{files[0]} or {root}/{files[0]}, and so on", f"missing: {', '.join(missing)}"],
            fix="pass the folder that holds the raw files of Planetoid.",
            path=str(root),
        )
    if source is nested and os.access(root / name, os.W_OK):
        return root
    folder = own_folder(f"planetoid-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]}")
    if folder is None:
        raise InsumFormatError(
            f"torch_geometric writes beside the files of {name}, and there is no folder for that",
            fix=f"move the files to {nested} of a folder that can be written, or name one in INSUM_NN_CACHE_DIR.",
            path=str(root),
        )
    raw = folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = raw / file
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to((source / file).resolve())
    return folder
