"""What operators say of arguments that do not fit: whole texts, and the facts that errors carry as values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insum_nn.errors import InsumError
from insum_nn.formats import COO, BlockCOO, GroupCOO
from insum_nn.ops import add, block_linear, mttkrp, multiply, scale, sddmm, spmm, tensor_product, ttm
from insum_nn.ops.pruned_conv import pruned_conv
from insum_nn.ops.sparse_conv import check_features, sparse_conv
from insum_nn.ops.tensor_product_spec import TensorProductSpec
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.irreps import Entry, Path
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.kernel_map.kernel_map import Geometry
from tests.golden_fixture import Golden

MATRIX = GroupCOO.from_dense(torch.eye(3, 4))
COO3 = COO.from_dense(torch.ones(2, 3, 4))
BLOCKS = BlockCOO.from_dense(torch.ones(4, 6), block_shape=(2, 3))
MAP = build_kernel_map(
    Coordinates(torch.tensor([[0, 0], [0, 1]]), (4,), 1), Geometry("subm", (3,), (1,), (1,), (1,), (0,))
)
SPEC = TensorProductSpec(
    (Entry(2, 1, -1),),
    (Entry(1, 1, -1),),
    (Entry(2, 0, 1),),
    (Path(0, 0, 0, "uvu", True, 1.0, (2, 1)),),
    shared=True,
)
EDGES = TensorProductSpec(SPEC.in1, SPEC.in2, SPEC.out, SPEC.paths, shared=False, convolution=True)


NODES, EDGE_WEIGHTS = torch.zeros(4, dtype=torch.int64), torch.ones(4, 2)
FEATURES, WEIGHT = torch.ones(2, 4), torch.ones(6, 3, 4)
IMAGES = torch.ones(1, 1, 3, 2)


def on_meta(*shape: int) -> Tensor:
    return torch.ones(*shape, device="meta")


def product(x: Tensor, y: object, weight: Tensor | None = None, *rest: object) -> Tensor:
    return tensor_product(SPEC, x, y, torch.ones(2) if weight is None else weight, *rest)


def along_edges(
    weight: Tensor = EDGE_WEIGHTS,
    receivers: object = NODES,
    senders: object = NODES,
    num_receivers: int | None = None,
) -> Tensor:
    return tensor_product(EDGES, torch.ones(5, 6), torch.ones(4, 3), weight, receivers, senders, num_receivers)


def conv(
    features: Tensor = FEATURES,
    weight: Tensor = WEIGHT,
    bias: Tensor | None = None,
    groups: int = 1,
    pointwise: bool = False,
) -> Tensor:
    return sparse_conv(features, weight, None if pointwise else MAP, bias, groups=groups)


def pruned(input: Tensor = IMAGES, bias: Tensor | None = None) -> Tensor:
    one = torch.zeros(1, 1, dtype=torch.int32)
    index = {"M": one[0], "Slot": one, "C": one, "R": one, "S": one}
    return pruned_conv(input, torch.ones(1), index, (1, 1), (3, 2), bias)


CASES: dict[str, Callable[[], object]] = {
    "spmm: rows": lambda: spmm(MATRIX, torch.ones(3, 2)),
    "spmm: rank": lambda: spmm(MATRIX, torch.ones(4, 2, 1)),
    "spmm: dtype": lambda: spmm(MATRIX, torch.ones(4, 2).double()),
    "spmm: device": lambda: spmm(MATRIX, on_meta(4, 2)),
    "spmm: sparse": lambda: spmm(MATRIX, torch.ones(4, 2).to_sparse()),
    "spmm: list": lambda: spmm(MATRIX, [1.0]),
    "spmm: dense": lambda: spmm(torch.ones(3, 4), torch.ones(4, 2)),
    "spmm: tensor": lambda: spmm(COO3, torch.ones(4, 2)),
    "spmm: several": lambda: spmm(MATRIX, on_meta(3, 2).double()),
    "sddmm: two_extents": lambda: sddmm(MATRIX, torch.ones(3, 5), torch.ones(6, 4)),
    "sddmm: rank": lambda: sddmm(MATRIX, torch.ones(3), torch.ones(2, 4)),
    "ttm: mode": lambda: ttm(COO3, torch.ones(4, 2), 3),
    "ttm: extent": lambda: ttm(COO3, torch.ones(3, 2), 2),
    "mttkrp: factors": lambda: mttkrp(COO3, [torch.ones(2, 1)], 0),
    "mttkrp: extents": lambda: mttkrp(COO3, [None, torch.ones(3, 1), torch.ones(4, 2)], 0),
    "multiply: shape": lambda: multiply(MATRIX, torch.ones(3, 3)),
    "multiply: dtype": lambda: multiply(MATRIX, MATRIX.to(dtype=torch.float64)),
    "multiply: structure": lambda: multiply(MATRIX, GroupCOO.from_dense(torch.ones(3, 4))),
    "add: device": lambda: add(MATRIX, MATRIX.to("meta")),
    "scale: extent": lambda: scale(MATRIX, torch.ones(3), 1),
    "block_linear: features": lambda: block_linear(torch.ones(2, 5), BLOCKS),
    "block_linear: scalar": lambda: block_linear(torch.ones(()), BLOCKS),
    "block_linear: bias": lambda: block_linear(torch.ones(2, 6), BLOCKS, torch.ones(3)),
    "block_linear: integers": lambda: block_linear(torch.ones(2, 6, dtype=torch.int64), BLOCKS),
    "block_linear: dtype": lambda: block_linear(torch.ones(2, 6).double(), BLOCKS),
    "block_linear: device": lambda: block_linear(on_meta(2, 6), BLOCKS, torch.ones(4)),
    "block_linear: several": lambda: block_linear(on_meta(2, 5).double(), BLOCKS, torch.ones(3)),
    "sparse_conv: rows": lambda: conv(torch.ones(3, 4)),
    "sparse_conv: integers": lambda: conv(torch.ones(2, 4, dtype=torch.int64)),
    "sparse_conv: voxels_device": lambda: conv(on_meta(2, 4)),
    "sparse_conv: kernel": lambda: conv(weight=torch.ones(6, 2, 4)),
    "sparse_conv: groups": lambda: conv(groups=4),
    "sparse_conv: channels": lambda: conv(torch.ones(2, 5)),
    "sparse_conv: bias": lambda: conv(bias=torch.ones(5)),
    "sparse_conv: dtype": lambda: conv(weight=torch.ones(6, 3, 4).double()),
    "sparse_conv: device": lambda: conv(weight=on_meta(6, 3, 4), bias=on_meta(6)),
    "sparse_conv: pointwise": lambda: conv(torch.ones(2, 3), torch.ones(6, 1, 4), groups=2, pointwise=True),
    "sparse_conv: rank_of_features": lambda: check_features("sparse_sum", torch.ones(3)),
    "pruned: channels": lambda: pruned(torch.ones(1, 2, 3, 2)),
    "pruned: dtype": lambda: pruned(torch.ones(1, 1, 3, 2).double()),
    "pruned: device": lambda: pruned(on_meta(1, 1, 3, 2), bias=torch.ones(1)),
    "product: no_tensor": lambda: product(torch.ones(5, 6), [1.0]),
    "product: ends_no_tensor": lambda: along_edges(receivers=[0]),
    "product: shapes": lambda: product(torch.ones(5, 7), torch.ones(4, 3), torch.ones(3)),
    "product: integers": lambda: product(torch.ones(5, 6, dtype=torch.int64), torch.ones(5, 3)),
    "product: dtypes": lambda: product(torch.ones(5, 6), torch.ones(5, 3).double(), torch.ones(2).half()),
    "product: device": lambda: product(torch.ones(5, 6), on_meta(5, 3)),
    "product: no_convolution": lambda: product(
        torch.ones(5, 6), torch.ones(5, 3), torch.ones(2), torch.zeros(5, dtype=torch.int64), None, 3
    ),
    "product: ends_missing": lambda: along_edges(receivers=None, senders=None),
    "product: ends_dtype": lambda: along_edges(senders=torch.zeros(4)),
    "product: edges": lambda: along_edges(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)),
    "product: receivers": lambda: along_edges(num_receivers=-1),
}


def text_of(error: InsumError) -> str:
    """The text, and the facts as values, of each fault."""
    facts = [
        f"{type(e).__name__} {name}={value!r}"
        for e in (error, *error.others)
        for name, value in sorted(e.fields.items())
    ]
    return "\n".join([f"{type(error).__name__}: {error}", *facts])


@pytest.mark.parametrize("operator", dict.fromkeys(name.partition(":")[0] for name in CASES))
def test_arguments_that_do_not_fit(operator: str, golden: Golden):
    texts: list[str] = []
    for name, call in CASES.items():
        if name.startswith(f"{operator}: "):
            with pytest.raises(InsumError) as caught:
                call()
            texts.append(f"[{name}]\n{text_of(caught.value)}\n")
    golden(f"errors_of_operators/{operator}", "\n".join(texts))
