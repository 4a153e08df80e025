"""`COO.from_smtx`: patterns of files, and files that are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from insum_nn.errors import InsumFormatError
from insum_nn.formats import COO, GroupCOO


def written(folder: Path, text: str) -> Path:
    path = folder / "pattern.smtx"
    path.write_text(text)
    return path


def text_of(mask: torch.Tensor, separator: str = ", ") -> str:
    csr = mask.float().to_sparse_csr()
    lines = [(*mask.shape, int(mask.sum())), csr.crow_indices().tolist(), csr.col_indices().tolist()]
    return "\n".join((separator if at == 0 else " ").join(map(str, line)) for at, line in enumerate(lines)) + "\n"


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (4, 0), (3, 9)], ids=str)
@pytest.mark.parametrize("separator", [", ", " ", ","])
def test_round_trip(tmp_path: Path, shape: tuple[int, int], separator: str):
    for density in (0.0, 0.4, 1.0):
        mask = torch.rand(shape) < density
        coo = COO.from_smtx(written(tmp_path, text_of(mask, separator)))
        assert coo.shape == shape
        assert coo.row.dtype == torch.int32
        assert torch.equal(coo.to_dense(), mask.float())
        assert coo.validate() is not None
        grouped = GroupCOO.from_coo(coo, group_size=2)
        assert torch.equal(grouped.to_dense(), mask.float())


def test_columns_in_any_order(tmp_path: Path):
    coo = COO.from_smtx(str(written(tmp_path, "2, 4, 3\n0 2 3\n3 1 0")), index_dtype=torch.int64)
    assert [coo.row.tolist(), coo.col.tolist()] == [[0, 0, 1], [1, 3, 0]]
    assert coo.row.dtype == torch.int64
    assert COO.from_smtx(written(tmp_path, "0, 4, 0\n0")).shape == (0, 4)


INTEGERS = "its lines are not three numbers, offsets and columns, all of them integers"
DAMAGED = {
    "": INTEGERS,
    "2, 4": INTEGERS,
    "2, 4, x\n0 1 2\n0 1": INTEGERS,
    "2, 4, 2\n0 1 2.0\n0 1": INTEGERS,
    "2, 4, 2, 1\n0 1 2\n0 1": INTEGERS,
    "2, 4, 99999999999999999999\n0 1 2\n0 1": INTEGERS,
    "2, -4, 2\n0 1 2\n0 1": "it has more than three lines, or negative sizes",
    "2, 4, 2\n0 1 2\n0 1\n1 1": "it has more than three lines, or negative sizes",
    "2, 4, 2\n0 2\n0 1": "its second line is not 3 ascending offsets from 0 to 2",
    "2, 4, 2\n\n0 1": "its second line is not 3 ascending offsets from 0 to 2",
    "2, 4, 2\n1 1 2\n0 1": "its second line is not 3 ascending offsets from 0 to 2",
    "2, 4, 2\n0 1 3\n0 1 2": "its second line is not 3 ascending offsets from 0 to 2",
    "3, 4, 2\n0 2 1 2\n0 1": "its second line is not 4 ascending offsets from 0 to 2",
    "9999999999999, 4, 2\n0 1 2\n0 1": "its second line is not 10000000000000 ascending offsets from 0 to 2",
    "2, 4, 2\n0 1 2\n0": "its third line is not 2 columns from 0 to 3",
    "2, 4, 2\n0 1 2": "its third line is not 2 columns from 0 to 3",
    "2, 4, 2\n0 1 2\n0 4": "its third line is not 2 columns from 0 to 3",
    "2, 4, 2\n0 1 2\n-1 0": "its third line is not 2 columns from 0 to 3",
}


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: repr(text)[:24])
def test_damaged_files(tmp_path: Path, text: str):
    path = written(tmp_path, text)
    with pytest.raises(InsumFormatError) as caught:
        COO.from_smtx(path)
    assert str(caught.value) == f"'{path}' is no .smtx file: {DAMAGED[text]}\n  fix: fetch or write the file again."


def test_no_text(tmp_path: Path):
    path = tmp_path / "m.smtx"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(InsumFormatError, match="is no .smtx file"):
        COO.from_smtx(path)
    with pytest.raises(FileNotFoundError):
        COO.from_smtx(tmp_path / "other.smtx")
