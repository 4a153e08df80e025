"""Index tensors of every format, written to in place: operators follow, or refuse, and never read what is not there."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import insum_nn.ops as ops
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumError, InsumFormatError, InsumRangeError
from insum_nn.facts import IndexFacts
from insum_nn.formats import COO, ELL, BlockFormat, GroupCOO, SparseFormat
from insum_nn.layers import BlockSparseLinear
from tests.formats.registry import REGISTRY, Entry, sparse_dense

each_format = pytest.mark.parametrize("entry", REGISTRY, ids=lambda e: e.name)

WILD = 10**9


def meaning(matrix: SparseFormat) -> Tensor | None:
    """The dense tensor that index tensors and values stand for, entry by entry; `None`: they break a law."""
    blocks = isinstance(matrix, BlockFormat)
    a, b = matrix.block_shape if blocks else (1, 1)
    grid = matrix.grid_shape
    dense = torch.zeros(*((grid[0] * a, grid[1] * b) if blocks else grid), dtype=torch.float64)
    axes = matrix.value_axes.removesuffix("ab")
    sizes = matrix.values.shape[: len(axes)]
    for place in itertools.product(*map(range, sizes)):
        at = dict(zip(axes, place, strict=True))
        index = [at.get("m", 0)] * matrix.ndim
        unused = set()
        for part in matrix.index_parts:
            entry = int(part.tensor[tuple(at[axis] for axis in part.axes)])
            if not (-1 if part.padded else 0) <= entry < grid[part.dim]:
                return None
            index[part.dim] = entry
            if part.padded:
                unused.add(entry == -1)
        if len(unused) == 2:
            return None
        if True in unused:
            continue
        value = matrix.values.detach()[place]
        if blocks:
            i, j = index
            dense[i * a : (i + 1) * a, j * b : (j + 1) * b] += value
        else:
            dense[tuple(index)] += value
    return dense[tuple(slice(extent) for extent in matrix.shape)]


Operation = Callable[[SparseFormat], Tensor]
Oracle = Callable[[Tensor], Tensor]


def fixed(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def operations(matrix: SparseFormat) -> Iterator[tuple[str, Operation, Oracle]]:
    """What can be done with a format, and the same of its dense tensor."""
    shape = matrix.shape
    yield "to_dense", lambda f: f.to_dense(), lambda d: d
    yield "to_coo", lambda f: f.to_coo().to_dense(), lambda d: d
    yield "transpose", lambda f: f.transpose().to_dense(), lambda d: d.permute(*reversed(range(d.ndim)))
    yield "GroupCOO", lambda f: GroupCOO.from_coo(f, group_size=2).to_dense(), lambda d: d
    yield "ELL", lambda f: ELL.from_coo(f).to_dense(), lambda d: d
    yield "to", lambda f: f.to(torch.float32).to(torch.float64).to_dense(), lambda d: d.float().double()
    yield "pickle", lambda f: pickle.loads(pickle.dumps(f)).to_dense(), lambda d: d
    yield "deepcopy", lambda f: copy.deepcopy(f).to_dense(), lambda d: d
    yield "multiply", lambda f: ops.multiply(f, fixed(*shape)).to_dense(), lambda d: d * fixed(*shape)
    yield (
        "scale",
        lambda f: ops.scale(f, fixed(shape[1]), 1).to_dense(),
        lambda d: d * fixed(shape[1]).reshape(1, -1, *[1] * (d.ndim - 2)),
    )
    yield "add", lambda f: ops.add(f, f.with_values(f.values * 2)).to_dense(), lambda d: 3 * d
    if len(shape) == 2:
        dense, left, right = fixed(shape[1], 3), fixed(shape[0], 4), fixed(4, shape[1])
        yield "spmm", lambda f: ops.spmm(f, dense), lambda d: d @ dense
        yield "spmm vector", lambda f: ops.spmm(f, dense[:, 0]), lambda d: d @ dense[:, 0]
        yield "spmm eager", lambda f: ops.spmm(f, dense, options=Options(tune=False)), lambda d: d @ dense
        yield "sddmm", lambda f: ops.sddmm(f, left, right).to_dense(), lambda d: d * (left @ right)
    if isinstance(matrix, BlockFormat):
        samples = fixed(5, shape[1])
        yield "block_linear", lambda f: ops.block_linear(samples, f), lambda d: samples @ d.T
        return
    factor = fixed(shape[0], 2)
    others = [None if dim == 1 else fixed(extent, 2) for dim, extent in enumerate(shape)]
    yield "ttm", lambda f: ops.ttm(f, factor, 0), lambda d: torch.einsum("i...,ir->r...", d, factor)
    khatri_rao = "ir,ij->jr" if len(shape) == 2 else "ir,kr,ijk->jr"
    known = [t for t in others if t is not None]
    yield "mttkrp", lambda f: ops.mttkrp(f, others, 1), lambda d: torch.einsum(khatri_rao, *known, d)


def edits(tensor: Tensor, extent: int) -> Iterator[tuple[str, Callable[[Tensor], object]]]:
    """Writes to an index tensor of at least two used entries."""
    used = tensor.flatten() >= 0
    first, last = (int(i) for i in used.nonzero().flatten()[[0, -1]])

    def put(place: int, value: int) -> Callable[[Tensor], object]:
        return lambda t: t.view(-1)[place].fill_(value)

    def swap(t: Tensor) -> None:
        flat = t.view(-1)
        flat[torch.tensor([first, last])] = flat[torch.tensor([last, first])]

    yield "far", put(first, WILD)
    yield "next", put(last, extent)
    yield "missing", put(first, -1)
    yield "negative", put(last, -7)
    yield "duplicate", lambda t: t.view(-1)[last].copy_(t.view(-1)[first])
    yield "swapped", swap
    yield "all equal", lambda t: t.masked_fill_(t >= 0, int(t.max()))
    yield "reversed", lambda t: t.copy_(t.flip(0))


def settled(matrix: SparseFormat, *, warm: bool) -> SparseFormat:
    if warm:
        for name, operation, _ in operations(matrix):
            for _ in range(2 if name == "spmm" else 1):
                operation(matrix)
    return matrix


def check(matrix: SparseFormat, context: str) -> None:
    expected = meaning(matrix)
    for name, operation, oracle in operations(matrix):
        if expected is None:
            with pytest.raises((InsumRangeError, InsumFormatError)):
                operation(matrix)
            continue
        # Later calls find what the first one left.
        for _ in range(3 if name == "spmm" else 1):
            found, wanted = operation(matrix), oracle(expected)
            assert torch.allclose(found, wanted), f"{context}, {name}: {found} instead of {wanted}"


def cases(entry: Entry) -> Iterator[tuple[str, Callable[[], SparseFormat], int, Callable[[Tensor], object]]]:
    shapes = [(5, 7), (4, 3, 5)] if entry.any_rank else [(5, 7)]
    for shape in shapes:
        torch.manual_seed(3)
        dense = sparse_dense(shape, 0.6)

        def build(dense: Tensor = dense) -> SparseFormat:
            return entry.from_dense(dense)

        made = build()
        for place, part in enumerate(made.index_parts):
            for name, edit in edits(part.tensor, made.grid_shape[part.dim]):
                yield f"{part.name} of {shape} {name}", build, place, edit


@each_format
def test_an_edit_is_followed_or_refused(entry: Entry):
    for number, (context, build, place, edit) in enumerate(cases(entry)):
        matrix = settled(build(), warm=number % 2 == 0)
        edit(matrix.index_parts[place].tensor)
        check(matrix, context)


@each_format
def test_an_edit_in_inference_mode(entry: Entry):
    for number, (context, build, place, edit) in enumerate(cases(entry)):
        with torch.inference_mode():
            matrix = settled(build(), warm=number % 2 == 1)
            edit(matrix.index_parts[place].tensor)
            check(matrix, context)
        if number % 8 == 0:
            check(matrix, context)


@each_format
def test_what_was_refused_can_be_mended(entry: Entry):
    matrix = entry.from_dense(sparse_dense((5, 7), 0.6))
    part, expected = matrix.index_parts[-1], matrix.to_dense()
    before = part.tensor.clone()
    part.tensor.view(-1)[0] = WILD
    with pytest.raises(InsumRangeError):
        ops.spmm(matrix, torch.ones(7, 2, dtype=torch.float64))
    part.tensor.copy_(before)
    assert torch.equal(matrix.to_dense(), expected)
    assert torch.equal(matrix.validate().to_dense(), expected)


@each_format
def test_gradients_after_an_edit(entry: Entry):
    torch.manual_seed(5)
    matrix = entry.from_dense(sparse_dense((5, 7), 0.6))
    matrix.index_parts[-1].tensor.masked_fill_(matrix.index_parts[-1].tensor >= 0, 0)
    values, dense = matrix.values.detach().requires_grad_(), fixed(7, 3).requires_grad_()
    found = torch.autograd.grad(ops.spmm(matrix.with_values(values), dense).square().sum(), (values, dense))
    expected = torch.autograd.grad((matrix.with_values(values).to_dense() @ dense).square().sum(), (values, dense))
    torch.testing.assert_close(found, expected)


@each_format
def test_claims_of_a_caller_are_read_once(entry: Entry):
    built = entry.from_dense(sparse_dense((6, 8), 0.6))
    tensors = [part.tensor.clone() for part in built.index_parts]
    tensors[-1].view(-1)[0] = WILD
    with torch.inference_mode():
        false = [built._with_tensors(tensors, built.values)]
    false.append(built._with_tensors(tensors, built.values))
    assert all(facts.proven for matrix in false for facts in matrix.index_facts)
    for matrix, (_, operation, _) in itertools.product(false, operations(built)):
        with pytest.raises(InsumError):
            operation(matrix)


@pytest.mark.parametrize(
    ("claim", "coalesced"),
    [
        (IndexFacts(sorted=True, masked=False, proven=True), False),
        (IndexFacts(unique=True, masked=False, proven=True), False),
        (IndexFacts(masked=False, proven=True, unique_with=("Col",)), False),
        (IndexFacts(masked=False, proven=True), True),
    ],
)
def test_a_false_claim_of_order_is_refused(claim: IndexFacts, coalesced: bool):
    row, col = torch.tensor([2, 0, 0, 2]), torch.tensor([1, 1, 0, 1])
    matrix = COO((3, 2), (row, col), torch.ones(4), (claim, IndexFacts(proven=True)), coalesced)
    for operation in (lambda: ops.spmm(matrix, torch.eye(2)), matrix.to_dense, matrix.transpose, lambda: matrix.facts):
        with pytest.raises(InsumFormatError, match="breaks its laws"):
            operation()


def test_a_builders_facts_are_not_read(monkeypatch: pytest.MonkeyPatch):
    matrix, dense = GroupCOO.from_dense(torch.eye(4)), torch.ones(4, 2)
    ops.spmm(matrix, dense)

    def refuse(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("insum_nn.formats.verification._measure", refuse)
    for made in (matrix, matrix.with_values(torch.ones(4, 1)), matrix.to(torch.float64), matrix.transpose()):
        assert all(facts.proven for facts in made.facts.values())
        ops.spmm(made, dense.to(made.dtype))
    matrix.row[0] = 1
    with pytest.raises(AssertionError, match="read"):
        ops.spmm(matrix, dense)


def test_one_reading_after_a_write_serves_all_that_share_the_structure(monkeypatch: pytest.MonkeyPatch):
    from insum_nn.formats import verification

    readings: list[object] = []
    real = verification._measure
    monkeypatch.setattr(verification, "_measure", lambda parts: readings.append(parts) or real(parts))
    matrix, dense = COO.from_dense(torch.eye(4)), torch.ones(4, 2)
    matrix.row[0] = 1
    for scale in range(3):
        ops.spmm(matrix.with_values(matrix.values * scale), dense)
        ops.spmm(matrix, dense)
    assert len(readings) == 1


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("group_size", [1, 2])
def test_buffers_of_a_layer_are_read_after_a_write(group_size: int, used: bool):
    torch.manual_seed(0)
    layer = BlockSparseLinear.from_linear(torch.nn.Linear(8, 6), density=0.6, block_shape=2, group_size=group_size)
    x = torch.randn(3, 8)
    if used:
        layer(x)
    index = layer.index.values()
    assert len(index) == 1 + group_size
    for buffer in index:
        before = buffer.clone()
        for _ in range(2):
            buffer.view(-1)[0] = WILD
            for _ in range(2):
                with pytest.raises(InsumRangeError):
                    layer(x)
        buffer.copy_(before)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.to_dense(), layer.bias))


def test_a_format_in_a_compiled_program():
    @torch.compile(backend="eager", fullgraph=True)
    def product(matrix: COO, dense: Tensor) -> Tensor:
        return ops.spmm(matrix, dense)

    matrix, dense = COO.from_dense(torch.eye(3)), fixed(3, 2).float()
    assert torch.equal(product(matrix, dense), dense)
    matrix.col.copy_(torch.tensor([2, 1, 0]))
    matrix.row.copy_(torch.tensor([2, 0, 0]))
    assert torch.equal(product(matrix, dense), matrix.to_dense() @ dense)
    matrix.col[0] = WILD
    with pytest.raises(InsumRangeError):
        product(matrix, dense)
    false = COO((3, 3), tuple(matrix.indices), matrix.values, (IndexFacts(masked=False, proven=True),) * 2)
    with pytest.raises(InsumRangeError):
        product(false, dense)
