from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import insum_nn
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumFormatError, InsumRangeError, InsumShapeError
from insum_nn.formats import COO, ELL, GroupCOO, SparseFormat
from insum_nn.ops import activation_conv, activation_conv_expression, masked_conv
from tests.ops.oracle import assert_gradients, assert_same, strided

AXES = pytest.mark.parametrize("axes", [1, 2, 3])
STEPS = pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 0, 1), (1, 2, 1), (2, 1, 1), (3, 2, 2), (2, 0, 3), (1, 1, 2)]
)
GROUPS = pytest.mark.parametrize("groups", [1, 2])
SIZE, KERNEL = (9, 8, 7), (3, 2, 3)


def conv(axes: int) -> Callable[..., Tensor]:
    return (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]


def sparse(*shape: int, density: float = 0.3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype) * (torch.rand(shape) < density)


def operands(axes: int, groups: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(6, 4 // groups, *KERNEL[:axes], dtype=dtype)
    return sparse(2, 4, *SIZE[:axes], dtype=dtype), weight, torch.randn(6, dtype=dtype)


def assert_activation(x: Tensor, weight: Tensor, bias: Tensor, *steps: int) -> None:
    stored = COO.from_dense(x)
    assert_same(
        lambda values, *rest: activation_conv(stored.with_values(values), *rest, *steps),
        lambda values, *rest: conv(x.ndim - 2)(stored.to("cpu").with_values(values).to_dense(), *rest, *steps),
        [stored.values, weight, bias],
    )


def assert_dual(x: Tensor, weight: Tensor, bias: Tensor, *steps: int, **layout: int) -> None:
    stored, filters = COO.from_dense(x), ELL.from_dense(weight, **layout)
    wide = filters.to(torch.float64)
    assert_same(
        lambda values, w, b: activation_conv(stored.with_values(values), filters.with_values(w), b, *steps),
        lambda values, w, b: conv(x.ndim - 2)(
            stored.with_values(values).to_dense(), wide.with_values(w).to_dense(), b, *steps
        ),
        [stored.values, filters.values, bias],
    )


def assert_masked(x: Tensor, weight: Tensor, bias: Tensor, *steps: int) -> None:
    wanted = conv(x.ndim - 2)(x, weight, bias, *steps)
    mask = torch.rand(wanted.shape[0], *wanted.shape[2:]) < 0.3
    assert_same(
        lambda x, weight, bias: masked_conv(x, weight, mask, bias, *steps),
        lambda *leaves: conv(x.ndim - 2)(*leaves, *steps) * mask[:, None],
        [x, weight, bias],
    )


@AXES
@STEPS
@GROUPS
def test_values_and_gradients(axes: int, stride: int, padding: int, dilation: int, groups: int):
    x, weight, bias = operands(axes, groups)
    steps = stride, padding, dilation, groups
    assert_activation(x, weight, bias, *steps)
    assert_masked(x, weight, bias, *steps)
    pruned = weight * (torch.rand(weight.shape) < 0.4)
    assert_dual(x, pruned, bias, *steps, group_dim=1)
    assert_dual(x, pruned, bias, *steps, group_dim=0)


@pytest.mark.c
@AXES
@GROUPS
def test_generated_c(axes: int, groups: int):
    for dtype in (torch.float64, torch.float32):
        x, weight, bias = operands(axes, groups, dtype)
        assert_activation(x, weight, bias, 2, 1, 1, groups)
        assert_masked(x, weight, bias, 2, 1, 1, groups)
        assert_dual(x, weight * (torch.rand(weight.shape) < 0.4), bias, 2, 1, 1, groups, group_dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype):
    x, weight, bias = operands(2, dtype=dtype)
    assert_activation(x, weight, bias, 1, 1)
    assert_masked(x, weight, bias, 1, 1)


def test_second_derivatives():
    x, weight, bias = sparse(1, 2, 4, 3), torch.randn(3, 2, 2, 2), torch.randn(3)
    stored, filters = COO.from_dense(x), ELL.from_dense(sparse(3, 2, 2, 2), group_dim=1)
    mask = torch.rand(1, 3, 2) < 0.6
    assert_gradients(lambda v, *rest: activation_conv(stored.with_values(v), *rest), [stored.values, weight, bias])
    assert_gradients(
        lambda v, w: activation_conv(stored.with_values(v), filters.with_values(w)), [stored.values, filters.values]
    )
    assert_gradients(lambda x, w, b: masked_conv(x, w, mask, b), [x, weight, bias])


@pytest.mark.parametrize("numbers", list(itertools.product([(1, 2), (3, 1)], [(0, 2)], [(2, 1)])), ids=str)
def test_each_axis_has_its_own_numbers(numbers: tuple[tuple[int, int], ...]):
    x, weight, bias = operands(2)
    wanted = functional.conv2d(x, weight, bias, *numbers)
    torch.testing.assert_close(activation_conv(COO.from_dense(x), weight, bias, *numbers), wanted)
    mask = torch.ones(wanted.shape[0], *wanted.shape[2:], dtype=torch.bool)
    torch.testing.assert_close(masked_conv(x, weight, mask, bias, *numbers), wanted)


def test_nothing_is_stored():
    weight, bias = torch.randn(5, 3, 3, 3), torch.randn(5)
    for samples in (0, 2):
        x = torch.zeros(samples, 3, 6, 5)
        wanted = functional.conv2d(x, weight, bias)
        empty = ELL.from_dense(torch.zeros(5, 3, 3, 3), group_dim=1)
        assert torch.equal(activation_conv(COO.from_dense(x), weight, bias), wanted)
        assert torch.equal(activation_conv(COO.from_dense(x), empty, bias), wanted)
        mask = torch.zeros(samples, 4, 3, dtype=torch.bool)
        assert torch.equal(masked_conv(x, weight, mask, bias), torch.zeros(samples, 5, 4, 3))


def test_duplicates_add_up():
    x, weight, _ = operands(2)
    once = COO.from_dense(x, index_dtype=torch.int64)
    twice = COO.from_coo([index.repeat(2) for index in once.indices], once.values.repeat(2), x.shape, coalesce=False)
    torch.testing.assert_close(activation_conv(twice, weight), functional.conv2d(2 * x, weight))


def test_other_formats():
    x, weight, bias = operands(2)
    wanted = functional.conv2d(x, weight, bias, padding=1)
    for stored in (ELL.from_dense(x), GroupCOO.from_dense(x, group_dim=1, group_size=3)):
        torch.testing.assert_close(activation_conv(stored, weight, bias, padding=1), wanted)
        torch.testing.assert_close(activation_conv(stored, COO.from_dense(weight), bias, padding=1), wanted)


def test_strides_of_dense_operands():
    x, weight, bias = operands(2)
    wanted = functional.conv2d(x, weight, bias)
    mask = torch.ones(2, 7, 7, dtype=torch.bool)
    for view in (strided, lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)):
        torch.testing.assert_close(activation_conv(COO.from_dense(view(x)), view(weight), bias), wanted)
        torch.testing.assert_close(masked_conv(view(x), view(weight), mask, bias), wanted)


def test_filters_last_in_memory():
    x, weight, _ = operands(2)
    result = activation_conv(COO.from_dense(x), weight)
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_an_edited_index_tensor_is_read_again():
    x, weight, _ = operands(2)
    stored = COO.from_dense(x)
    activation_conv(stored, weight)
    stored.indices[2][-1] = 9
    with pytest.raises(InsumRangeError):
        activation_conv(stored, weight)


def test_deterministic():
    stored, weight = COO.from_dense(sparse(1, 8, 9, 9, dtype=torch.float32)), torch.randn(5, 8, 3, 3)
    options = insum_nn.Options(deterministic=True)
    first, second = (activation_conv(stored, weight, padding=1, options=options) for _ in range(2))
    assert torch.equal(first, second)


def test_statements_are_what_runs():
    x, weight, _ = operands(2)
    stored = COO.from_dense(x)
    reached = torch.arange(9)[:, None] - torch.arange(3)
    tables = {"U": reached.where(reached < 7, -1).clamp(min=-1), "V": torch.arange(8)[:, None] - torch.arange(2)}
    tables["V"] = tables["V"].where(tables["V"] < 7, -1).clamp(min=-1)
    named = {**stored.tensors, **tables, "G": torch.zeros(4, dtype=torch.int64), "F": weight.permute(1, 2, 3, 0)}
    found = insum_nn.insum(activation_conv_expression(2), tensors=named, out_shape=(2, 7, 7, 1, None))
    torch.testing.assert_close(found[..., 0, :].movedim(-1, 1), functional.conv2d(x, weight))


def test_errors():
    x, weight, bias = operands(2)
    stored, mask = COO.from_dense(x), torch.ones(2, 7, 7, dtype=torch.bool)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (InsumFormatError, r"COO.from_dense\(input\)", lambda: activation_conv(_as_format(x), weight)),
        (InsumShapeError, "channels / groups", lambda: activation_conv(stored, weight[0])),
        (InsumShapeError, "groups=3", lambda: activation_conv(stored, weight, groups=3)),
        (InsumShapeError, "groups=0", lambda: masked_conv(x, weight, mask, groups=0)),
        (InsumShapeError, "channels / groups", lambda: activation_conv(stored, weight[:, :3])),
        (InsumShapeError, "'bias' has extent 5", lambda: activation_conv(stored, weight, bias[:5])),
        (InsumShapeError, "channels / groups", lambda: activation_conv(stored, COO.from_dense(weight[:, :2]))),
        (InsumShapeError, "'stride' is 0", lambda: activation_conv(stored, weight, stride=0)),
        (InsumShapeError, "'padding' is -1", lambda: masked_conv(x, weight, mask, padding=-1)),
        (InsumShapeError, r"'dilation' is \(1, 1, 1\)", lambda: activation_conv(stored, weight, dilation=(1, 1, 1))),
        (InsumShapeError, "activation_conv2d: a kernel", lambda: activation_conv(stored, weight, dilation=9)),
        (InsumShapeError, "mask does not fit", lambda: masked_conv(x, weight, mask[:, :6])),
        (InsumDtypeError, "mask must be bool", lambda: masked_conv(x, weight, mask.long())),
        (InsumDtypeError, "'weight' is torch.float32", lambda: activation_conv(stored, weight.float())),
        (InsumDtypeError, "'weight' is torch.float32", lambda: masked_conv(x, weight.float(), mask)),
        (InsumDeviceError, "'bias' is on meta", lambda: activation_conv(stored, weight, bias.to("meta"))),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()


def _as_format(dense: Tensor) -> SparseFormat:
    """What a caller without a type checker passes."""
    return dense  # type: ignore[return-value]
