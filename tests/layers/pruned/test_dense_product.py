"""Pruned layers where the dense product is faster: values, gradients on stored weights, what is printed, the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from insum_nn.compiler.options import Options
from insum_nn.compiler.schedule.product_cost import dense_from
from insum_nn.layers import BlockSparseLinear, PrunedConv1d, PrunedConv2d, PrunedConv3d, SparseLinear
from insum_nn.layers.pruned import pruned_weight
from insum_nn.structure.pruning import filter_mask, random_mask
from insum_nn.testing.tolerances import assert_matches
from tests.ops.oracle import strided

GPU = "cuda"


def conv(kind: Any, pattern: str | None = None, **arguments: Any) -> Any:
    layer = kind(6, 8, 3, **arguments)
    return kind(6, 8, 3, **arguments, mask=filter_mask(torch.rand(layer.grid_shape), 0.4, pattern))


def rows_and_columns() -> Tensor:
    """A mask that leaves out two rows and three columns of 7 x 13."""
    mask = random_mask((7, 13), 0.6)
    mask[[1, 6]] = False
    mask[:, [0, 4, 12]] = False
    return mask


CASES = {
    "blocks": lambda: (BlockSparseLinear(12, 8, block_shape=4, density=0.7), (5, 12)),
    "blocks at edges": lambda: (BlockSparseLinear(13, 7, block_shape=(2, 4), density=0.7), (2, 3, 13)),
    "groups of blocks": lambda: (BlockSparseLinear(13, 7, block_shape=(2, 4), density=0.7, group_size=2), (5, 13)),
    "blocks, not all rows": lambda: (BlockSparseLinear(13, 7, block_shape=(2, 4), mask=rows_and_columns()), (13,)),
    "weights": lambda: (SparseLinear(13, 7, density=0.5), (4, 13)),
    "weights without bias": lambda: (SparseLinear(13, 7, False, density=0.5), (4, 13)),
    "weights, not all rows": lambda: (SparseLinear(13, 7, mask=rows_and_columns()), (4, 13)),
    "not all rows, no bias": lambda: (SparseLinear(13, 7, False, mask=rows_and_columns()), (2, 3, 13)),
    "1d": lambda: (conv(PrunedConv1d, stride=2, padding=1), (2, 6, 9)),
    "2d": lambda: (conv(PrunedConv2d, stride=(2, 1), padding=(0, 2), dilation=(1, 2)), (2, 6, 7, 5)),
    "2d, one sample": lambda: (conv(PrunedConv2d), (6, 7, 5)),
    "2d, filters": lambda: (conv(PrunedConv2d, "M"), (2, 6, 7, 5)),
    "2d, channels without bias": lambda: (conv(PrunedConv2d, "C", bias=False), (6, 7, 5)),
    "2d, groups": lambda: (conv(PrunedConv2d, groups=2, padding="same"), (2, 6, 7, 5)),
    "2d, circular": lambda: (conv(PrunedConv2d, padding=1, padding_mode="circular"), (2, 6, 7, 5)),
    "3d": lambda: (conv(PrunedConv3d, "RST", padding=1), (2, 6, 3, 4, 5)),
}


def dense_of(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(layer, BlockSparseLinear):
        return functional.linear(x, weight, bias)
    dense = layer.to_conv().double()
    parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return torch.func.functional_call(dense, parameters, (x,))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dense product pays at any size; the library's calls are noted."""
    monkeypatch.setattr(pruned_weight, "dense_uses", lambda *call: 0.0)
    calls: list[str] = []
    for kind in pruned_weight.PrunedWeight.__subclasses__():
        own = kind._by_library

        def noted(self: Any, *call: Any, own: Any = own) -> Tensor:
            calls.append(type(self).__name__)
            return own(self, *call)

        monkeypatch.setattr(kind, "_by_library", noted)
    return calls


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_dense(name: str, dtype: torch.dtype, device: torch.device, always: list[str], monkeypatch: Any):
    # Else a GPU's convolutions round float32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer, shape = CASES[name]()
    layer = layer.to(device, dtype)
    x = torch.randn(shape, dtype=dtype, device=device)
    x = strided(x) if len(shape) == 2 else x
    bias = [] if layer.bias is None else [layer.bias]
    own, theirs = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    weight = layer.to_dense().detach().double().requires_grad_()
    constant = [b.detach().double().requires_grad_() for b in bias]
    y, z = layer(own), dense_of(layer, theirs, weight, *(constant or [None]))
    assert always
    assert_matches(y, z, dtype=dtype, kind="sum")
    back = torch.randn(z.shape, dtype=torch.float64, device=device).to(dtype)
    found = torch.autograd.grad(y, [own, layer.weight, *bias], back)
    wanted = torch.autograd.grad(z, [theirs, weight, *constant], back.double())
    stored = layer._stored_of(wanted[1])
    assert found[1].shape == layer.weight.shape
    for got, expected in zip(found, (wanted[0], stored, *wanted[2:]), strict=True):
        assert_matches(got, expected, dtype=dtype, kind="gradient")


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str, always: list[str]):
    layer, shape = CASES[name]()
    layer = layer.double()
    named = dict(layer.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(named, values, strict=True)), (x,))

    inputs = (torch.randn(shape, dtype=torch.float64, requires_grad=True), *named.values())
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)
    assert always


@pytest.mark.parametrize("name", ["weights, not all rows", "groups of blocks", "2d, filters", "2d, groups"])
def test_autocast(name: str, device: torch.device, always: list[str]):
    layer, shape = CASES[name]()
    layer, x = layer.to(device), torch.randn(shape, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found = layer(x), layer(x.bfloat16())
    assert always
    narrow = [None if p is None else p.detach().bfloat16().double() for p in (layer.to_dense(), layer.bias)]
    for y in found:
        assert y.dtype == torch.bfloat16
        assert_matches(y, dense_of(layer, x.bfloat16().double(), *narrow), dtype=torch.bfloat16, kind="sum")
    (gradient,) = torch.autograd.grad(found[0].sum(), layer.weight)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("name", ["weights, not all rows", "2d, filters", "2d, channels without bias"])
def test_what_no_weight_reads_or_writes_takes_no_part(name: str, always: list[str]):
    layer, shape = CASES[name]()
    axis, read, written = 1 - len(layer.dense_extents), layer._read, layer._written
    x, changed = torch.randn(shape), torch.full(shape, torch.nan)
    if read is not None:
        changed = changed.index_copy(axis, read, x.index_select(axis, read))
        assert torch.equal(layer(changed), layer(x))
    if written is not None:
        y = layer(torch.full(shape, torch.nan)).transpose(0, axis)
        left = [at for at in range(y.shape[0]) if at not in written.tolist()]
        for at in left:
            assert bool((y[at] == (0 if layer.bias is None else layer.bias[at])).all())
    assert always


def test_channels_left_out_in_groups_run_the_statement(always: list[str]):
    mask = torch.ones(8, 3, 3, 3, dtype=torch.bool)
    mask[:4, 1] = False
    layer = PrunedConv2d(6, 8, 3, groups=2, mask=mask)
    x = torch.randn(2, 6, 5, 5)
    assert_matches(layer(x), layer.to_conv()(x), dtype=torch.float32, kind="sum")
    assert not always


@pytest.mark.parametrize(
    ("layer", "few", "many"),
    [
        (lambda: SparseLinear(128, 128, density=0.5), (2, 128), (4096, 128)),
        (lambda: conv(PrunedConv2d, "M", padding=1), (2, 6, 5, 5), (8, 6, 64, 64)),
    ],
)
def test_a_compiled_graph_decides_by_sizes_that_are_fixed(layer: Any, few: tuple[int, ...], many: tuple[int, ...]):
    own = layer()
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        library = {"linear", "conv2d"}
        traced.append("dense" if library & {getattr(n.target, "__name__", "") for n in graph.graph.nodes} else "stored")
        return graph

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(own, backend=backend, fullgraph=True, dynamic=dynamic)
        for shape in (few, many):
            x = torch.randn(shape)
            assert_matches(compiled(x), own(x), dtype=torch.float32, kind="sum")
    # One graph serves all sizes.
    assert traced == ["stored", "dense", "stored"]
    exported = torch.export.export(own, (torch.randn(many),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    x = torch.randn(3, *many[1:])
    assert_matches(exported.module()(x), own(x), dtype=torch.float32, kind="sum")


def test_places_may_change(always: list[str]):
    layer, x = SparseLinear(13, 7, mask=rows_and_columns()), torch.randn(4, 13)
    layer.update_mask(torch.ones(7, 13, dtype=torch.bool))
    assert layer._read is None
    assert_matches(layer(x), functional.linear(x, layer.to_dense(), layer.bias), dtype=torch.float32, kind="sum")
    layer.to("meta").to_empty(device="cpu").reset_parameters()
    assert_matches(layer(x), functional.linear(x, layer.to_dense(), layer.bias), dtype=torch.float32, kind="sum")
    with torch.no_grad():
        layer.weight.data.mul_(2)
    assert_matches(layer(x), functional.linear(x, layer.to_dense(), layer.bias), dtype=torch.float32, kind="sum")


@pytest.mark.parametrize(
    ("make", "shape", "dense"),
    [
        (lambda **o: SparseLinear(1024, 1024, density=0.05, **o), (256, 1024), False),
        (lambda **o: SparseLinear(1024, 1024, density=0.5, **o), (256, 1024), True),
        (lambda **o: BlockSparseLinear(1024, 1024, density=0.3, **o), (256, 1024), False),
        (lambda **o: BlockSparseLinear(1024, 1024, density=0.8, **o), (256, 1024), True),
        (lambda **o: BlockSparseLinear(1024, 1024, density=0.8, **o), (4, 1024), False),
        (lambda **o: PrunedConv2d(256, 256, 3, padding=1, density=0.04, **o), (2, 256, 14, 14), False),
        (lambda **o: PrunedConv2d(256, 256, 3, padding=1, density=0.2, **o), (2, 256, 14, 14), True),
    ],
)
def test_the_rule_of_a_cpu(make: Any, shape: tuple[int, ...], dense: bool):
    layer = make()
    uses = shape[0] * int(torch.Size(shape[2:]).numel())
    assert (uses >= layer._uses(4, shape[-1] if len(shape) > 2 else None)) == dense
    assert layer._fewest <= layer._uses(4, layer._SHORT)
    for options in (Options(backend="c"), Options(deterministic=True)):
        assert make(options=options)._fewest == torch.inf


@pytest.mark.parametrize(
    ("width", "stored", "cells", "uses", "moved", "dense"),
    [
        # 64 channels of 32 images of 56 x 56, 20 % and 2 % of the weights; 4 images.
        (4, (7373,), 36864, 100352, 128, True),
        (4, (3686,), 36864, 12544, 128, False),
        # 4096 x 4096, 64 and 4096 samples, 1 % of the weights.
        (2, (167772,), 1 << 24, 64, 32768, False),
        (2, (167772,), 1 << 24, 4096, 32768, True),
        # Blocks, 50 % and 20 %.
        (2, (8192, 32, 32), 1 << 24, 4096, 0, True),
        (2, (3277, 32, 32), 1 << 24, 4096, 0, False),
        (4, (8192, 32, 32), 1 << 24, 4096, 0, False),
        (8, (8192, 32, 32), 1 << 24, 4096, 0, False),
    ],
)
def test_the_rule_of_a_gpu(width: int, stored: tuple[int, ...], cells: int, uses: int, moved: int, dense: bool):
    assert (uses >= dense_from(GPU, width, stored, cells, moved)) == dense


def test_repr_says_from_where_on():
    layer = BlockSparseLinear(1024, 1024, density=0.8)
    assert repr(layer).splitlines()[1:] == [
        "  Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]",
        "  from 27 samples on, by the dense weight:",
        "    H[Row[p],a,Col[p],b] += W[p,a,b]",
    ]
    assert len(repr(BlockSparseLinear(1024, 1024, density=0.1)).splitlines()) == 2
    assert "dense" in repr(PrunedConv2d(64, 64, 3, density=0.5))
    assert "dense" not in repr(PrunedConv2d(64, 64, 3, density=0.5, options=Options(backend="c")))


def test_a_call_is_explained():
    layer = SparseLinear(512, 512, density=0.5)
    assert "H[Row[p],Col[p]] += W[p]" in str(layer.explain(torch.randn(1024, 512)))
    assert isinstance(layer.to_linear(), nn.Linear)
