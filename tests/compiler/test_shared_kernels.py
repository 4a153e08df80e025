"""Widths that are multiples of a tile share one kernel, which is right for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.compiler.kernels import sized
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.kernels.row_partition import partition_of
from insum_nn.layers import spconv
from insum_nn.models import MinkUNet18
from insum_nn.testing.tolerances import assert_matches
from tests.compiler.generated_cases import take
from tests.compiler.interpreted import interpreter
from tests.pretended_gpu import H200, pretended_gpu

__all__ = ["interpreter"]

GENERATED = Options(backend="triton", tune=False)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were written."""
    written: list[str] = []
    plain = sized.write_kernel

    def write(*given: object) -> object:
        made = plain(*given)  # type: ignore[arg-type]
        written.append(made.text)
        return made

    monkeypatch.setattr(sized, "write_kernel", write)
    return written


CONVOLUTION = "C[i,d] += X[Near[o,i],c] * W[d,o,c]"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("c", "d"), [(16, 16), (32, 64), (96, 32), (64, 48), (128, 16), (12, 16)])
@pytest.mark.parametrize("offsets", [8, 27, 40])
def test_convolutions_of_all_widths(texts: list[str], offsets: int, c: int, d: int):
    near = torch.where(torch.rand(offsets, 19) < 0.8, -1, torch.randint(23, (offsets, 19)))
    x, weight = torch.randn(23, c).double(), torch.randn(d, offsets, c).double()
    got = insum_nn.insum(CONVOLUTION, Near=near, X=x.float(), W=weight.float(), options=GENERATED)
    want = torch.einsum("oic,doc->id", take(x, near), weight)
    scale = torch.einsum("oic,doc->id", take(x, near).abs(), weight.abs()).max()
    assert_matches(got, want, dtype=torch.float32, kind="sum", scale=float(scale))
    if c % 16 == 0:
        # The loop over channels is a part of the one over offsets.
        assert all("bits_of(" in text and "_at = tl.where(" in text for text in texts)


@pytest.mark.usefixtures("interpreter")
def test_widths_share_the_text(texts: list[str]):
    def distinct(call: Callable[[int], object], widths: tuple[int, ...]) -> int:
        texts.clear()
        for width in widths:
            call(width)
        return len(set(texts))

    def product(width: int) -> None:
        row, col = torch.tensor([0, 0, 2]), torch.tensor([1, 3, 0])
        val, dense = torch.randn(3), torch.randn(4, width)
        got = insum_nn.insum(
            "C[Row[p],n] += Val[p] * B[Col[p],n]",
            Row=row,
            Col=col,
            Val=val,
            B=dense,
            out_shape=(3, None),
            options=GENERATED,
        )
        torch.testing.assert_close(got, torch.zeros(3, width).index_add(0, row, val[:, None] * dense[col]))

    # The tile of the widest serves its multiples; the fifth width and more do too.
    assert distinct(product, (128, 256, 384, 512, 640, 768)) == 1
    # Narrow ones have each their own, others one of any width.
    assert distinct(product, (3, 5, 40, 50)) == 4
    assert distinct(product, (130, 150, 170, 190, 210, 230)) == 1


def test_a_network_has_few_kernels():
    """All widths of a U-shaped network, forward and backward, under stored schedules, which differ by size."""
    with pretended_gpu():
        sites = torch.unique(torch.randint(0, 32, (3000, 3)), dim=0)
        indices = torch.cat([torch.zeros(len(sites), 1), sites], 1).int()
        x = spconv.SparseConvTensor(torch.randn(len(sites), 4), indices, [32, 32, 32], 1)
        with collect(H200) as collection:
            out = MinkUNet18(4, 13)(x)
            out = out if isinstance(out, Tensor) else out.features
            torch.autograd.backward(out, torch.ones_like(out))
    assert collection.launches > 100
    # Among them one that divides the rows of weight gradients, one that makes bitmasks, and one of narrow keys.
    assert len(collection.codes) <= 30


def test_ranges_of_divided_rows_are_aligned():
    """Machine code is for pointers that are aligned or not, and must not depend on how many ranges there are."""
    for terms in range(9, 30):
        partition = partition_of(torch.zeros(terms, dtype=torch.int64), 1, False, 2)
        arrays = (partition.begin, partition.end, partition.target, partition.row_of)
        assert all(array is not None and array.data_ptr() % 16 == 0 and array.is_contiguous() for array in arrays)
