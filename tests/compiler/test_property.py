"""Random programs against the reference interpreter, in value and in first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import insum_nn
from insum_nn import Options
from insum_nn.testing.random_programs import RandomProgram, random_program
from tests.compiler.test_misses import Oracle
from tests.test_random_programs import Loops

BATCH = 100
EAGER_BATCHES = 6
GRADIENT_BATCH = 24
# Every fourth batch keeps the written order of the products.
VARIANTS = (Options(), Options(order="left"), Options(deterministic=True), Options(validate=True))
# Factors by which a sum of rounded terms may exceed the rounding of its largest partial sum: a product of up to
# seven factors rounds six times, and each of the sums in between once more.
ROUNDINGS = 16


def value_names(program: RandomProgram) -> list[str]:
    return [name for name, tensor in program.tensors.items() if tensor.is_floating_point()]


def arguments(program: RandomProgram, **changed: Tensor) -> dict[str, Any]:
    known: dict[str, Any] = program.arguments()
    known["tensors"] = {**known["tensors"], **changed}
    return known


def run(program: RandomProgram, options: Options = Options(), **changed: Tensor) -> Tensor:  # noqa: B008 - frozen
    return insum_nn.insum(program.expression, **arguments(program, **changed), options=options)


def reference(program: RandomProgram, **changed: Tensor) -> Tensor:
    known = arguments(program, **changed)
    return insum_nn.compile(program.expression, sizes=known.pop("sizes")).reference(**known)


def moved(program: RandomProgram, device: torch.device, dtype: torch.dtype) -> RandomProgram:
    """The same program elsewhere, its values in another dtype; memory layouts survive."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    tensors = {name: move(tensor) for name, tensor in program.tensors.items()}
    initial = None if program.initial is None else move(program.initial)
    return RandomProgram(program.expression, tensors, program.sizes, program.out_shape, initial, program.output)


def magnitudes(program: RandomProgram) -> Tensor:
    """What the terms of each output cell would add up to without their signs: the scale of rounding errors."""
    expression = program.expression.replace("max=", "+=").replace("min=", "+=")
    positive = {name: program.tensors[name].double().abs() for name in value_names(program)}
    bare = RandomProgram(expression, program.tensors, program.sizes, None, None, program.output)
    shape = program.out_shape if program.initial is None else tuple(program.initial.shape)
    bare = RandomProgram(expression, {**program.tensors, **positive}, program.sizes, shape, None, program.output)
    total = reference(bare).abs()
    return total if program.initial is None else total + program.initial.double().abs().cpu()


def assert_close_to_reference(program: RandomProgram, got: Tensor) -> None:
    """Compare with float64 loops over the same (rounded) values, within the rounding of the program's dtype."""
    want = reference(program)
    assert got.shape == want.shape, program.expression
    assert got.is_contiguous(), program.expression
    if got.dtype == torch.float64:
        torch.testing.assert_close(got.cpu(), want, rtol=1e-10, atol=1e-11, msg=lambda m: f"{program.expression}\n{m}")
        return
    bound = ROUNDINGS * torch.finfo(got.dtype).eps * magnitudes(program) + torch.finfo(got.dtype).tiny
    excess = (got.double().cpu() - want).abs() - bound
    # A NaN compares as false, and must not pass.
    assert bool((excess <= 0).all()), f"{program.expression}\nexceeds its bound by {excess}"


def batch(number: int, size: int, **options: object) -> Iterator[RandomProgram]:
    for seed in range(number * size, (number + 1) * size):
        yield random_program(seed, **options)


@pytest.mark.parametrize(
    ("number", "size"),
    [*((n, BATCH) for n in range(EAGER_BATCHES)), pytest.param(4, 40, marks=pytest.mark.c, id="4 in C")],
)
def test_values(number: int, size: int):
    """600 programs by library calls, some in C too, of which each is compiled."""
    options = VARIANTS[number % len(VARIANTS)]
    for program in batch(number, size):
        tensors = program.arguments()["tensors"]
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        got = run(program, options)
        assert_close_to_reference(program, got)
        for name, tensor in tensors.items():
            assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), f"{name} changed: {program.expression}"
            shared = tensor.untyped_storage().data_ptr() == got.untyped_storage().data_ptr()
            assert not (shared and got.numel()), f"the output aliases {name}: {program.expression}"


@pytest.mark.parametrize("number", range(2))
def test_nan_goes_where_the_definition_sends_it(number: int):
    """A twentieth of values is NaN: none may leak from a cell that no term reads which takes part, and none may vanish.

    Where a factor does not vary with what misses, it may be multiplied by zero; such cells stay as they are.
    """
    for program in batch(400 + number, BATCH):
        changed = {
            name: torch.where(may & (torch.rand(may.shape) < 0.05), float("nan"), program.tensors[name])
            for name, may in Oracle(program).varying().items()
        }
        got, want = run(program, **changed), reference(program, **changed).to(torch.float64)
        torch.testing.assert_close(
            got.double(), want, rtol=1e-6, atol=1e-8, equal_nan=True, msg=lambda m, p=program: f"{p.expression}\n{m}"
        )


@pytest.mark.parametrize("number", range(2))
def test_reference_agrees_with_an_interpreter_of_its_own(number: int):
    """The oracle is itself compared with loops over Python's syntax tree, which know nothing of the package."""
    for program in batch(1000 + number, BATCH):
        torch.testing.assert_close(reference(program).double(), Loops(program).run(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_in_other_dtypes(dtype: torch.dtype):
    for program in batch(200, 60):
        if value_names(program):
            rounded = moved(program, torch.device("cpu"), dtype)
            assert_close_to_reference(rounded, run(rounded))


def test_larger_programs():
    """Extents up to 9: more entries than any index of them has."""
    for program in batch(300, 60, max_size=9):
        assert_close_to_reference(program, run(program))


def leaves(program: RandomProgram, most: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None:
    """The program as a function of its values and initial value, with arguments that do not overlap in memory."""
    named = {name: program.tensors[name] for name in value_names(program)}
    if program.initial is not None:
        named[program.output] = program.initial
    if not named or sum(tensor.numel() for tensor in named.values()) > most:
        return None
    names = tuple(named)

    def function(*tensors: Tensor) -> Tensor:
        return run(program, **dict(zip(names, tensors, strict=True)))

    return function, tuple(tensor.detach().clone().requires_grad_() for tensor in named.values())


@pytest.mark.parametrize("number", range(5))
def test_gradients(number: int):
    """First and second derivatives of 120 programs; a program of no small tensors is no case."""
    checked = 0
    for program in batch(number, GRADIENT_BATCH, profile="smooth"):
        case = leaves(program, 100)
        if case is None:
            continue
        function, values = case
        try:
            small = sum(value.numel() for value in values) <= 40
            # The fast mode compares random combinations of the derivatives, the other one each of them.
            torch.autograd.gradcheck(function, values, fast_mode=not small)
            if small:
                torch.autograd.gradgradcheck(function, values, fast_mode=True)
        except Exception as error:
            raise AssertionError(f"{program.expression}: {error}") from error
        checked += 1
    assert checked > GRADIENT_BATCH // 2


@pytest.mark.parametrize("number", range(2))
def test_gradients_of_extrema(number: int):
    """Without ties an extremum is smooth around its arguments."""
    checked = 0
    for program in batch(500 + number, 2 * BATCH, max_size=3):
        if not any(operator in program.expression for operator in (" max= ", " min= ")):
            continue
        case = leaves(program, 24)
        if case is None:
            continue
        function, values = case
        # Drawn anew: the program's own values are coarse, so that ties occur.
        distinct = tuple(torch.randn(value.shape, dtype=value.dtype).requires_grad_() for value in values)
        try:
            torch.autograd.gradcheck(function, distinct, fast_mode=True)
        except Exception as error:
            raise AssertionError(f"{program.expression}: {error}") from error
        checked += 1
    assert checked > BATCH // 4


def gradients(program: RandomProgram, options: Options) -> list[Tensor]:
    """Gradients of a weighted sum of the output's cells with respect to every value and the initial value."""
    named = {name: program.tensors[name] for name in value_names(program)}
    if program.initial is not None:
        named[program.output] = program.initial
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}
    if not own:
        return []
    out = run(program, options, **own)
    weights = torch.linspace(-1, 2, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view(out.shape)
    return list(torch.autograd.grad((out * weights.to(out)).sum(), list(own.values())))


# Every operator, with and without initial values, index tensors within index tensors. Others take sympy more seconds.
COMPILED = (7, 31, 44, 64, 138, 189, 245)


@pytest.mark.parametrize("number", range(6))
def test_values_on_the_gpu(gpu: torch.device, number: int):
    """300 programs, eager."""
    for program in batch(number, 50):
        there = moved(program, gpu, torch.float64)
        got = run(there, Options(backend="eager", deterministic=number % 2 == 0))
        assert got.device.type == "cuda" or not there.tensors
        assert_close_to_reference(program, got)
