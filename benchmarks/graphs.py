"""Graphs as sparsity patterns: synthetic ones with chosen degrees, and files in published formats."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.registry import Setting, Unavailable

__all__ = ["FILES", "GRAPHS", "SYNTHETIC", "Pattern", "load_pattern", "pattern"]

Pattern = tuple[int, Tensor, Tensor]
"""Nodes, and row and column of each entry, int64, ascending by row, then column, none twice."""

# name -> nodes, mean degree, exponent of the power law of degrees, degree of node 0 (0: as the others').
SYNTHETIC = {
    "ppi": (56_944, 14.4, 0.4, 0),
    "amazon": (334_863, 5.5, 0.3, 0),
    "artist": (50_515, 32.4, 0.6, 0),
    "hub": (200_000, 3.0, 0.0, 100_000),
}
FILES = {
    "proteins": "PROTEINS_full.npz",
    "pubmed": "pubmed.npz",
    "dd": "DD.npz",
    "enron": "email-Enron.txt.gz",
    "facebook": "facebook_edges.csv",
    "condmat": "ca-CondMat.mtx",
}
GRAPHS = (*SYNTHETIC, *FILES)


def pattern(setting: Setting, name: str) -> Pattern:
    """A graph by name; a small one of the same kind where the setting is tiny.

    Raises:
        Unavailable: the graph is a file, and the setting's root does not hold it.
    """
    if setting.tiny:
        mean, exponent, hub = SYNTHETIC[name][1:] if name in SYNTHETIC else (5.0, 0.4, 0)
        return _power_law(setting, 61, min(mean, 9.0), exponent, min(hub, 40))
    if name in SYNTHETIC:
        return _power_law(setting, *SYNTHETIC[name])
    path = None if setting.root is None else setting.root / "graphs" / FILES[name]
    if path is None or not path.exists():
        raise Unavailable(f"graphs/{FILES[name]} is not under --root or INSUM_DATA")
    return load_pattern(path, setting.device)


def _power_law(setting: Setting, nodes: int, mean: float, exponent: float, hub: int) -> Pattern:
    """Degrees that fall off as a power law, at most 5000; neighbours at uniform places."""
    generator = setting.generator()
    uniform = torch.rand(nodes, generator=generator, device=setting.device).clamp_min(1e-4)
    weight = uniform**-exponent
    degree = (weight / weight.mean() * mean).round().clamp(1, 5_000).long()
    if hub:
        degree[0] = hub
    row = torch.repeat_interleave(torch.arange(nodes, device=setting.device), degree)
    col = torch.randint(nodes, row.shape, generator=generator, device=setting.device)
    if hub:
        # As many neighbours as entries: none is drawn twice.
        col[:hub] = torch.randperm(nodes, generator=generator, device=setting.device)[:hub]
    return _sorted(nodes, row, col)


def _sorted(nodes: int, row: Tensor, col: Tensor) -> Pattern:
    key = (row * nodes + col).unique()
    return nodes, key // nodes, key % nodes


def load_pattern(path: Path, device: torch.device) -> Pattern:
    """Read a graph: TC-GNN's `.npz`, a Matrix Market file, a SNAP edge list (`.txt.gz`), or a CSV with a header.

    Symmetric files, and CSV files, which name each undirected edge once, are made symmetric.
    """
    if path.suffix == ".npz":
        with np.load(path) as data:
            ends, nodes = np.stack([data["src_li"], data["dst_li"]]), int(data["num_nodes"])
        row, col = torch.from_numpy(ends.astype(np.int64)).to(device)
        return _sorted(nodes, row, col)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    mirrored = path.suffix == ".csv" or (lines[0].startswith("%%MatrixMarket") and "symmetric" in lines[0])
    body = [line for line in lines if line and line[0] not in "#%"]
    market = path.suffix == ".mtx"
    if market or path.suffix == ".csv":
        head, body = body[0], body[1:]
    else:
        head = ""
    text = " ".join(body).replace(",", " ")
    numbers = np.fromstring(text, dtype=np.float64, sep=" ").reshape(len(body), -1)
    ends = torch.from_numpy(numbers[:, :2].astype(np.int64)).to(device)
    row, col = (ends - 1 if market else ends).unbind(1)
    nodes = int(head.split()[0]) if market else int(ends.max()) + 1
    if mirrored:
        row, col = torch.cat([row, col]), torch.cat([col, row])
    return _sorted(nodes, row, col)
