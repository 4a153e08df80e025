"""Calls at sizes that were not met before: what they compute, and how many calls of our own Python they make."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import IndexFacts, Options
from insum_nn.compiler.api import compile_built
from insum_nn.compiler.kernels import launch, sized
from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.kernels.launch import OnDevice
from insum_nn.compiler.kernels.written import WrittenKernels
from insum_nn.compiler.runtime import dispatch
from insum_nn.errors import InsumDtypeError, InsumFormatError, InsumRangeError, InsumShapeError
from insum_nn.layers import BlockSparseLinear, FullyConnectedTensorProduct, PrunedConv2d
from insum_nn.ops.sparse_conv import sparse_conv
from insum_nn.structure.coordinates import Coordinates
from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.kernel_map.kernel_map import Geometry
from tests.compiler.interpreted import interpreter
from tests.pretended_gpu import H200, pretended_gpu

__all__ = ["interpreter"]

OURS = str(Path(insum_nn.__file__).parent)
GENERATED = Options(backend="triton")
SPMM = "C[Row[p],n] += Val[p] * B[Col[p],n]"
BUILT = {"Row": IndexFacts(sorted=True, masked=False, proven=True), "Col": IndexFacts(masked=False, proven=True)}


@pytest.fixture
def idle_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose kernels take no time: what is loaded on it does nothing."""
    code = OnDevice(lambda *_: None, 0, None, (), None)
    monkeypatch.setattr(launch._Launch, "_load", lambda *_: code)
    monkeypatch.setattr(launch, "collecting", lambda: None)
    # Kernels that compute nothing count no pairs: maps are built by torch's operators.
    monkeypatch.setattr(WrittenKernels, "launchers", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    with pretended_gpu(), collect(H200):
        yield


class _Keys(dict[Any, Any]):
    """A dictionary that notes what is looked up."""

    def __init__(self, of: dict[Any, Any]) -> None:
        super().__init__(of)
        self.asked: list[Any] = []

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.append(key)
        return super().get(key, default)


def test_kinds_of_calls_are_written_out_alike():
    program = insum_nn.compile(SPMM, out_shape=(3, None))
    named = {"Row": torch.tensor([0, 2]), "Val": torch.ones(2), "Col": torch.tensor([1, 0]), "B": torch.ones(2, 4)}
    program(tensors=named)
    spec, ordered = program.spec, [named[name] for name in program.names]
    keys = _Keys(spec.calls)
    object.__setattr__(spec, "calls", keys)
    extents = spec.agree(ordered, {}, (3, None))
    assert extents is not None
    for call in (
        lambda: program(tensors=named),
        lambda: program.run_plain(ordered, (3, None)),
        lambda: dispatch.run_plain(spec, ordered, None, extents),
    ):
        keys.asked.clear()
        call()
        assert keys.asked[:1] == [(ordered[0].is_cuda, *[tensor.dtype for tensor in ordered])]
        assert keys.asked[0] in keys


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the calls of Python functions of ours, without those of what earlier tests left to be collected."""
    gc.collect()
    gc.disable()
    found = [0]

    def look(frame: Any, event: str, _: object) -> None:
        found[0] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()


def convolution() -> tuple[Callable[[int], tuple[Any, ...]], Callable[..., Tensor]]:
    weight = torch.randn(32, 3, 3, 3, 16, requires_grad=True)

    def make(size: int) -> tuple[Any, ...]:
        flat = torch.randperm(24**3)[: 2100 + size].sort().values
        sites = Coordinates(torch.stack([flat * 0, flat // 576, flat // 24 % 24, flat % 24], 1).int(), (24, 24, 24), 1)
        found = build_kernel_map(sites, Geometry("subm", (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (0,) * 3))
        assert found.table is not None
        assert found.inverse.table is not None
        assert found.pair_list is not None
        return torch.randn(len(flat), 16, requires_grad=True), found

    return make, lambda features, found: sparse_conv(features, weight, found)


def product() -> tuple[Callable[[int], tuple[Any, ...]], Callable[..., Tensor]]:
    program = compile_built(SPMM, facts=BUILT)

    def make(size: int) -> tuple[Any, ...]:
        rows, entries = 1030 + size, 8300 + 8 * size
        row, col = torch.randint(rows, (entries,)).sort().values, torch.randint(rows, (entries,))
        values = torch.randn(entries, requires_grad=True), torch.randn(rows, 64, requires_grad=True)
        return (dict(zip(("Row", "Col", "Val", "B"), (row, col, *values), strict=True)),)

    return make, lambda named: program(tensors=named, out_shape=(named["B"].shape[0], None))


def blocks() -> tuple[Callable[[int], tuple[Any, ...]], Callable[..., Tensor]]:
    layer = BlockSparseLinear(256, 512, 32, density=0.1)
    return lambda size: (torch.randn(521 + size, 256, requires_grad=True),), layer


@pytest.mark.usefixtures("idle_gpu")
@pytest.mark.parametrize(
    ("case", "forward", "both"),
    # Each statement of a call at new sizes; the operators' own calls are counted too.
    [(convolution, 30, 100), (product, 27, 57), (blocks, 91, 207)],
)
def test_how_much_python_a_call_at_new_sizes_runs(
    case: Callable[[], tuple[Callable[[int], tuple[Any, ...]], Callable[..., Tensor]]],
    forward: int,
    both: int,
):
    make, call = case()
    for size in range(24):
        out = call(*make(size))
        out.backward(torch.ones_like(out))
    assert_counts(call, make(25), forward, both)


def pruned() -> tuple[Callable[[int], tuple[Any, ...]], Callable[..., Tensor]]:
    layer = PrunedConv2d(32, 64, 3, padding=1, density=0.1)
    return lambda size: (torch.randn(2, 32, 14 + size, 14, requires_grad=True),), layer


@pytest.mark.usefixtures("idle_gpu")
@pytest.mark.parametrize(
    ("case", "forward", "both"), [(convolution, 16, 39), (product, 11, 25), (blocks, 33, 66), (pruned, 48, 66)]
)
def test_how_much_python_a_repeated_call_runs(
    case: Callable[[], tuple[Callable[[int], tuple[Any, ...]], Callable[..., Tensor]]],
    forward: int,
    both: int,
):
    make, call = case()
    made = make(3)
    for _ in range(3):
        out = call(*made)
        out.backward(torch.ones_like(out))
    assert_counts(call, made, forward, both)


@pytest.mark.c
def test_python_of_a_tensor_product_does_not_grow_with_its_paths():
    """On a CPU all paths are one printed function, forward and backward."""
    found: list[int] = []
    for irreps in ("4x0e + 4x1o", "4x0e + 4x1o + 4x2e"):
        layer = FullyConnectedTensorProduct(irreps, "0e + 1o + 2e", irreps)
        x, y = (torch.randn(5, each.dim, requires_grad=True) for each in (layer.irreps_in1, layer.irreps_in2))
        for _ in range(3):
            layer(x, y).sum().backward()
        with counted() as calls:
            layer(x, y).sum().backward()
        found.append(calls[0])
    assert found[0] == found[1] <= 96


def assert_counts(call: Callable[..., Tensor], made: tuple[Any, ...], forward: int, both: int) -> None:
    """A call, and with it its backward pass, makes at most so many calls of our Python."""
    with counted() as first:
        out = call(*made)
    ones = torch.ones_like(out)
    with counted() as second:
        out.backward(ones)
    assert first[0] <= forward
    assert first[0] + second[0] <= both


# Values.


def operands(rows: int, entries: int, columns: int, *, skewed: bool, transposed: bool) -> dict[str, Tensor]:
    row = torch.randint(rows, (entries,)).sort().values
    if skewed:
        row[: entries * 3 // 4] = 0
    dense = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    return {"Row": row, "Col": torch.randint(rows, (entries,)), "Val": torch.randn(entries), "B": dense}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("skewed", [False, True])
def test_one_program_at_many_sizes_and_layouts(built: bool, skewed: bool, monkeypatch: pytest.MonkeyPatch):
    """Its kernels are shared within a factor of two; what belongs to one call must not stay with them."""
    written: list[object] = []
    plain = sized.write_kernel

    def write(*given: Any) -> Any:
        written.append(given)
        return plain(*given)

    monkeypatch.setattr(sized, "write_kernel", write)
    make = compile_built if built else insum_nn.compile
    program = make(SPMM, facts=BUILT if built else None, options=GENERATED)
    sizes = [(5, 33), (8, 64), (7, 40), (6, 0), (5, 47), (8, 50), (7, 33), (6, 64)]
    for number, (rows, entries) in enumerate(sizes):
        named = operands(rows, entries, 5, skewed=skewed, transposed=number % 3 == 2)
        initial = torch.randn(rows, 5) if number % 2 else None
        given = named if initial is None else {**named, "C": initial}
        got = program(tensors=given, out_shape=(rows, None))
        want = torch.zeros(rows, 5) if initial is None else initial.clone()
        want.index_add_(0, named["Row"], named["Val"][:, None] * named["B"][named["Col"]])
        torch.testing.assert_close(got, want)
        assert torch.equal(program(tensors=given, out_shape=(rows, None)), got)
    assert len(written) <= 8


@pytest.mark.usefixtures("interpreter")
def test_given_tensors_with_others_of_new_sizes():
    program = insum_nn.compile(SPMM, options=GENERATED)
    named = operands(7, 30, 1, skewed=False, transposed=False)
    for columns in (3, 5, 4, 5, 3):
        dense = torch.randn(7, columns)
        want = torch.zeros(7, columns).index_add_(0, named["Row"], named["Val"][:, None] * dense[named["Col"]])
        own = [dense if name == "B" else named[name] for name in program.names]
        torch.testing.assert_close(program.run_plain(own, (7, None)), want)
        torch.testing.assert_close(program.run_plain(own, (7, None), dense), want + dense)


def test_what_is_wrong_with_new_sizes_is_said():
    """After calls of other sizes too."""
    program = insum_nn.compile(SPMM)
    for rows in (4, 5, 6):
        program(tensors=operands(rows, 9, 2, skewed=False, transposed=False), out_shape=(rows, None))
        named = operands(rows, 9, 2, skewed=False, transposed=False)
        with pytest.raises(InsumRangeError, match="index tensor 'Col' points outside axis 0 of 'B'"):
            program(tensors={**named, "Col": named["Col"] + rows}, out_shape=(rows, None))
        with pytest.raises(InsumRangeError, match="index tensor 'Row' writes outside axis 0 of 'C'"):
            program(tensors={**named, "Row": torch.full((9,), rows)}, out_shape=(rows, None))
        with pytest.raises(InsumRangeError, match="index tensor 'Row' holds -2"):
            program(tensors={**named, "Row": torch.full((9,), -2)}, out_shape=(rows, None))
        with pytest.raises(InsumShapeError, match="index 'p' has two extents, 9 and 8"):
            program(tensors={**named, "Val": torch.ones(8)}, out_shape=(rows, None))
        with pytest.raises(InsumShapeError, match=r"out_shape\[0\] must be an int, got float"):
            program(tensors=named, out_shape=(float(rows), None))  # type: ignore[arg-type]


def test_affine_writes_and_constants_at_new_sizes():
    """What is precomputed of a statement's limits: the largest size that fits, and the first that does not."""
    program = insum_nn.compile("y[2*p+1] += x[p] * z[2]")
    for size in (1, 2, 5):
        x = torch.arange(1.0, size + 1)
        got = program(x=x, z=torch.ones(3), out_shape=(2 * size,))
        assert torch.equal(got[1::2], x)
        with pytest.raises(InsumRangeError, match=r"'2\*p\+1' writes outside axis 0 of 'y'"):
            program(x=x, z=torch.ones(3), out_shape=(2 * size - 1,))
        with pytest.raises(InsumRangeError, match="'2' reads outside axis 0 of 'z'"):
            program(x=x, z=torch.ones(2), out_shape=(2 * size,))
    assert program(x=torch.ones(0), z=torch.ones(3), out_shape=(0,)).shape == (0,)


def test_a_sum_that_addresses_the_output_is_checked_for_each_index_tensor():
    """Its range depends on the values: a builder's word for one tensor is none for another, or for a later version."""
    program = compile_built("y[Row[p]+q] += x[p,q]", facts={"Row": IndexFacts(masked=False, proven=True)})
    row, x = torch.tensor([0, 2, 1]), torch.ones(3, 2)
    for _ in range(3):
        assert program(Row=row, x=x, out_shape=(4,)).tolist() == [1.0, 2.0, 2.0, 1.0]
    assert program(Row=row + 0, x=x, out_shape=(4,)).tolist() == [1.0, 2.0, 2.0, 1.0]
    with pytest.raises(InsumRangeError):
        program(Row=row + 1, x=x, out_shape=(4,))
    row += 1
    with pytest.raises(InsumRangeError):
        program(Row=row, x=x, out_shape=(4,))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("ordered", [False, True])
def test_a_printed_call_notices_what_it_was_not_printed_for(ordered: bool):
    """Writes to a builder's tensors, other dtypes, ranks and layouts, sizes that disagree, and a cleared cache."""
    program = compile_built(SPMM, facts=BUILT, options=GENERATED)

    def call(named: dict[str, Tensor], shape: tuple[int | None, ...] = (7, None)) -> Tensor:
        if not ordered:
            return program(tensors=named, out_shape=shape)
        return program.run_plain([named[name] for name in program.names], shape, named.get("C"))

    def check(named: dict[str, Tensor], initial: Tensor | None = None) -> None:
        want = torch.zeros(7, 3, dtype=named["B"].dtype) if initial is None else initial.expand(7, 3).clone()
        want.index_add_(0, named["Row"], named["Val"][:, None] * named["B"][named["Col"]])
        given = named if initial is None else {**named, "C": initial}
        torch.testing.assert_close(call(given), want)

    named = operands(7, 30, 3, skewed=False, transposed=False)
    check(named)
    assert program.spec.calls
    for initial in (None, torch.randn(3), torch.randn(7, 1), torch.randn(7, 3), torch.randn(3, 7).t()):
        check(named, initial)
    check({**named, "B": torch.randn(3, 7).t()})
    check({**named, "Row": named["Row"].int(), "Col": named["Col"].int()})
    check({**named, "Val": named["Val"].double(), "B": named["B"].double()})
    insum_nn.clear_cache()
    check(named)
    with pytest.raises(InsumDtypeError):
        check({**named, "B": named["B"].double()})
    with pytest.raises(InsumShapeError):
        call({**named, "B": named["B"][0]})
    with pytest.raises(InsumShapeError):
        call({**named, "Val": named["Val"][1:]})
    with pytest.raises(InsumShapeError):
        call({**named, "C": torch.zeros(7, 4)})
    for shape in ((7, 4), (-7, None), (None, None), (7,)):
        with pytest.raises((InsumShapeError, InsumFormatError, TypeError)):
            call(named, shape)  # type: ignore[arg-type]
    # What a builder writes to its tensors later is read.
    named["Row"][:] = named["Row"].flip(0)
    check(named)
    named["Col"][3] = 7
    with pytest.raises(InsumRangeError, match="index tensor 'Col' points outside axis 0 of 'B'"):
        call(named)


@pytest.mark.usefixtures("interpreter")
def test_initial_values_of_the_last_axes():
    """A bias of blocks, (rows, a), for every sample: as it is, expanded before, of repeated numbers, and learned."""
    facts = {"Row": BUILT["Row"], "Col": BUILT["Col"]}
    program = compile_built("Y[n,Row[p],a] += W[p,a,b] * X[n,Col[p],b]", facts=facts, options=GENERATED)
    row, col = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 0, 1, 0])
    for samples in (5, 6, 1):
        w, x = torch.randn(4, 4, 4), torch.randn(samples, 2, 4)
        blocks = torch.einsum("pab,npb->npa", w, x[:, col])
        product = torch.zeros(samples, 3, 4).index_add_(1, row, blocks)
        grid = torch.randn(3, 4)
        kinds = [
            torch.randn(4),
            grid,
            grid.expand(samples, 3, 4),
            torch.randn(samples, 3, 4),
            torch.ones(()).expand(3, 4),
        ]
        kinds += [torch.randn(4).expand(3, 4), torch.randn(3, 1).expand(3, 4), torch.randn(4, 3).t(), torch.randn(3, 1)]
        for initial in kinds:
            named = {"Row": row, "Col": col, "W": w, "X": x, "Y": initial}
            for _ in range(2):
                torch.testing.assert_close(program(tensors=named, out_shape=(None, 3, None)), product + initial)
        learned = grid.requires_grad_()
        out = program(Row=row, Col=col, W=w, X=x, Y=learned, out_shape=(None, 3, None))
        torch.testing.assert_close(out, product + grid)
        (got,) = torch.autograd.grad(out.square().sum(), learned)
        torch.testing.assert_close(got, 2 * (product + grid.detach()).sum(0))
