from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

from insum_nn.compiler.api import statement_calls
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumRangeError, InsumShapeError
from insum_nn.ops.tensor_product import (
    TensorProductSpec,
    expressions,
    tensor_product,
    tensor_product_right,
)
from insum_nn.ops.tensor_product_spec import layout_of
from insum_nn.ops.tensor_product_statement import UnsupportedModeError, statements_of
from insum_nn.structure.irreps import MODES, Entry, dimension, entries_of, make_paths
from insum_nn.testing.tolerances import assert_matches
from tests.layers.equivariant.tensor_product_cases import (
    MODE_NAMES,
    Case,
    assert_same_derivatives,
    dense_oracle,
    one_mode,
    random_case,
)

WEIGHTED = [
    (mode, weighted) for mode in MODE_NAMES for weighted in (True, False) if weighted or mode not in ("uvw", "u<vw")
]
MULS = [(4, 3, 5), (3, 1, 2), (1, 1, 1), (1, 3, 1), (2, 2, 1)]


def entries_from(text: str) -> tuple[Entry, ...]:
    from e3nn.o3 import Irreps

    return entries_of(Irreps(text))


def spec_of(case: Case, *, shared: bool, deterministic: bool = False, **flags: bool) -> TensorProductSpec:
    entries = tuple(entries_from(text) for text in case.args[:3])
    paths, factors = make_paths(*entries, case.instructions)
    paths = tuple(
        p._replace(coefficient=0.25 + f) if f else p._replace(coefficient=0.0)
        for p, f in zip(paths, factors, strict=True)
    )
    return TensorProductSpec(*entries, paths, shared, **flags, options=Options(deterministic=deterministic))


def inputs_of(spec: TensorProductSpec, z: int, n: int | None = None, dtype=torch.float64, device="cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(z)
    shapes = [(z if n is None else n, dimension(spec.in1)), (z, dimension(spec.in2))]
    shapes.append((spec.weight_numel,) if spec.shared else (z, spec.weight_numel))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def edges_of(n: int, e: int, *, sort: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(e)
    receivers = torch.randint(0, max(n - 1, 1), (e,), generator=generator)
    senders = torch.randint(0, n, (e,), generator=generator)
    return (receivers.sort().values if sort else receivers), senders


def oracle_of(spec: TensorProductSpec) -> Callable[..., Tensor]:
    entries = (spec.in1, spec.in2, spec.out)
    return lambda x, y, w: dense_oracle(entries, spec.paths, spec.shared, x, y, w)


def conv_oracle_of(spec: TensorProductSpec, receivers: Tensor, senders: Tensor) -> Callable[..., Tensor]:
    product = oracle_of(spec)

    def convolve(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        messages = product(x[senders], y, w)
        return messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, receivers, messages)

    return convolve


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("muls", MULS, ids=str)
@pytest.mark.parametrize(("mode", "weighted"), WEIGHTED)
def test_every_mode(mode: str, weighted: bool, muls: tuple[int, int, int], shared: bool):
    if MODES[mode].pairs and muls[0] == 1:
        muls = (2, 2, muls[2])
    spec = spec_of(one_mode(mode, weighted, *muls), shared=shared)
    assert_same_derivatives(lambda *t: tensor_product(spec, *t), oracle_of(spec), inputs_of(spec, 5))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_random_paths(seed: int, shared: bool):
    spec = spec_of(random_case(seed), shared=shared)
    assert_same_derivatives(lambda *t: tensor_product(spec, *t), oracle_of(spec), inputs_of(spec, 3))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_convolutions(seed: int, shared: bool, deterministic: bool):
    spec = spec_of(random_case(seed), shared=shared, convolution=True, deterministic=deterministic)
    receivers, senders = edges_of(6, 17, sort=bool(seed % 2))
    assert_same_derivatives(
        lambda x, y, w: tensor_product(spec, x, y, w, receivers, senders),
        conv_oracle_of(spec, receivers, senders),
        inputs_of(spec, 17, 6),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_on_each_device(seed: int, dtype: torch.dtype, device: torch.device):
    spec = spec_of(random_case(seed), shared=bool(seed % 2))
    inputs = inputs_of(spec, 33, dtype=dtype, device=device)
    assert_same_derivatives(lambda *t: tensor_product(spec, *t), oracle_of(spec), inputs, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["uvu", "uvw"])
def test_convolution_on_each_device(mode: str, dtype: torch.dtype, device: torch.device):
    spec = spec_of(one_mode(mode, True, 8, 1, 4), shared=False, convolution=True)
    receivers, senders = edges_of(40, 333, sort=True)
    placed = receivers.to(device), senders.to(device)
    assert_same_derivatives(
        lambda x, y, w: tensor_product(spec, x, y, w, *placed),
        conv_oracle_of(spec, receivers, senders),
        inputs_of(spec, 333, 40, dtype=dtype, device=device),
        dtype=dtype,
    )


@pytest.mark.gpu
def test_deterministic_convolution_repeats_its_bits(gpu: torch.device):
    spec = spec_of(one_mode("uvu", True, 8, 1, 4), shared=True, convolution=True, deterministic=True)
    receivers, senders = (t.to(gpu) for t in edges_of(50, 5000, sort=False))
    results = []
    for _ in range(5):
        inputs = [t.requires_grad_() for t in inputs_of(spec, 5000, 50, torch.float32, gpu)]
        z = tensor_product(spec, *inputs, receivers, senders)
        results.append([z, *torch.autograd.grad(z.square().sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["uvu", "uvw", "uuw"])
def test_half_types(mode: str, dtype: torch.dtype, device: torch.device):
    spec = spec_of(one_mode(mode, True, lmax=1), shared=True)
    inputs = inputs_of(spec, 9, dtype=dtype, device=device)
    got = tensor_product(spec, *inputs)
    expected = oracle_of(spec)(*(t.double().cpu() for t in inputs))
    # The products before the last one are rounded to the half type where the device's matrix product wants it so.
    scale = 3 * float(expected.abs().max())
    assert_matches(got, expected, dtype=dtype, kind="sum", scale=scale)


def test_gradcheck():
    spec = spec_of(random_case(3), shared=False)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 2)]
    assert torch.autograd.gradcheck(lambda *t: tensor_product(spec, *t), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: tensor_product(spec, *t), inputs, fast_mode=True)


def test_third_derivatives():
    spec = spec_of(
        Case("2x0e+2x1o", "1x0e+1x1o", "2x1o", ((0, 1, 0, "uvu", True), (1, 0, 0, "uvu", True))), shared=False
    )
    oracle = oracle_of(spec)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 3)]

    def third(function: Callable[..., Tensor]) -> list[Tensor]:
        total = function(*inputs).square().sum()
        for _ in range(2):
            total = sum(g.square().sum() for g in torch.autograd.grad(total, inputs, create_graph=True))
        return list(torch.autograd.grad(total, inputs))

    for got, expected in zip(third(lambda *t: tensor_product(spec, *t)), third(oracle), strict=True):
        assert_matches(got, expected, dtype=torch.float64, kind="second")


@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("role", list("xyzw"))
def test_each_role_of_the_operator_has_its_gradients(role: str, convolution: bool):
    spec = spec_of(one_mode("uvu", True, 2, 1, 2, lmax=1), shared=False, convolution=convolution)
    x, y, w = inputs_of(spec, 5, 5)
    z = torch.randn(5, dimension(spec.out), dtype=torch.float64)
    given = [{"x": x, "y": y, "w": w, "z": z}[o].requires_grad_() for o in "xywz" if o != role]
    edges = edges_of(5, 5, sort=False) if convolution else (None, None)

    def run(*operands: Tensor) -> Tensor:
        return torch.ops.insum_nn.tensor_product(spec.to_json(), role, *operands, *edges, 5, 5)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("role", list("xyzw"))
def test_fake_results_have_the_true_shape(role: str):
    for shared in (True, False):
        spec = spec_of(random_case(5), shared=shared, convolution=True)
        receivers, senders = edges_of(4, 7, sort=False)
        x, y, w = inputs_of(spec, 7, 4)
        z = torch.randn(9, dimension(spec.out), dtype=torch.float64)
        given = [{"x": x, "y": y, "w": w, "z": z}[o] for o in "xywz" if o != role]
        arguments = (spec.to_json(), role, *given, receivers, senders, 4, 9)
        real = torch.ops.insum_nn.tensor_product(*arguments)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.ops.insum_nn.tensor_product(*arguments)
        assert fake.shape == real.shape
        assert real.is_contiguous()


@pytest.mark.parametrize("shared", [True, False])
def test_no_samples_no_edges_no_nodes(shared: bool):
    case = one_mode("uvw", True)
    spec = spec_of(case, shared=shared)
    inputs = [t.requires_grad_() for t in inputs_of(spec, 0)]
    z = tensor_product(spec, *inputs)
    assert z.shape == (0, dimension(spec.out))
    grads = torch.autograd.grad(z.sum(), inputs)
    assert [g.shape for g in grads] == [t.shape for t in inputs]
    spec = spec_of(case, shared=shared, convolution=True)
    none = torch.zeros(0, dtype=torch.int64)
    for nodes in (0, 3):
        inputs = [t.requires_grad_() for t in inputs_of(spec, 0, nodes)]
        z = tensor_product(spec, *inputs, none, none)
        assert torch.equal(z, torch.zeros(nodes, dimension(spec.out), dtype=torch.float64))
        assert all(not g.any() for g in torch.autograd.grad(z.sum(), inputs))


def test_no_paths_and_no_components():
    scalar = (Entry(2, 0, 1),)
    spec = TensorProductSpec(scalar, scalar, (Entry(3, 1, 1),), (), True)
    x = torch.randn(4, 2, requires_grad=True)
    z = tensor_product(spec, x, x, torch.zeros(0))
    assert torch.equal(z, torch.zeros(4, 9))
    assert not torch.autograd.grad(z.sum(), x)[0].any()
    spec = TensorProductSpec((), (), (), (), True)
    assert tensor_product(spec, torch.zeros(4, 0), torch.zeros(4, 0), torch.zeros(0)).shape == (4, 0)


def test_inputs_need_not_be_contiguous():
    spec = spec_of(random_case(8), shared=False)
    inputs = inputs_of(spec, 6)
    strided = [torch.stack([t, -t], -1)[..., 0] for t in inputs]
    assert not any(t.is_contiguous() for t in strided if t.shape[1] > 1)
    assert torch.equal(tensor_product(spec, *strided), tensor_product(spec, *inputs))


def test_nan_stays_where_it_is():
    """A NaN in one component reaches what depends on it, and nothing else."""
    case = Case("2x0e+2x1o", "1x0e", "2x0e+2x1o", ((0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True)))
    spec = spec_of(case, shared=True)
    x, y, w = inputs_of(spec, 3)
    x[1, 3] = float("nan")
    z = tensor_product(spec, x, y, w)
    bad = z.isnan()
    assert bad.sum() == 1
    assert bool(bad[1, 3])


@pytest.mark.parametrize(("which", "entry"), [(0, 4), (1, 4), (0, -2), (1, 99)])
def test_edges_outside_the_nodes(which: int, entry: int):
    spec = spec_of(one_mode("uvu", True, lmax=1), shared=False, convolution=True)
    edges = list(edges_of(4, 5, sort=False))
    edges[which][2] = entry
    with pytest.raises(InsumRangeError, match=("Dst", "Src")[which]):
        tensor_product(spec, *inputs_of(spec, 5, 4), *edges)


Misfit = tuple[type[Exception], str, Callable[..., dict[str, object]]]
MISFITS: dict[str, Misfit] = {
    "one component too few": (InsumShapeError, "'x' has shape", lambda x, **_: {"x": x[:, :-1]}),
    "one too many": (InsumShapeError, "'y' has shape", lambda y, **_: {"y": torch.cat([y, y[:, :1]], 1)}),
    "no samples": (InsumShapeError, "'x' has shape", lambda x, **_: {"x": x[0]}),
    "other samples": (InsumShapeError, "'y' has shape", lambda y, **_: {"y": y[1:]}),
    "other weights": (InsumShapeError, "'weight' has shape", lambda weight, **_: {"weight": weight[1:]}),
    "another dtype": (InsumDtypeError, "'y' is torch.float32", lambda y, **_: {"y": y.float()}),
    "whole numbers": (InsumDtypeError, "'x' must be floating-point", lambda x, **_: {"x": x.long()}),
    "a list": (InsumDtypeError, "'y' must be a tensor, got list", lambda y, **_: {"y": y.tolist()}),
    "another device": (InsumDeviceError, "'weight' is on meta", lambda weight, **_: {"weight": weight.to("meta")}),
    "a negative number": (InsumShapeError, "'num_receivers' is", lambda **_: {"num_receivers": -1}),
    "edges": (InsumShapeError, "'senders' is given", lambda **_: {"senders": torch.zeros(5, dtype=torch.int64)}),
}
MISFITS_OF_EDGES: dict[str, Misfit] = {
    "one end": (InsumShapeError, "'senders' is missing", lambda **_: {"senders": None}),
    "other edges": (InsumShapeError, "'receivers' has", lambda receivers, **_: {"receivers": receivers[1:]}),
    "no numbers": (InsumDtypeError, "'receivers' must", lambda receivers, **_: {"receivers": receivers * 1.0}),
}


@pytest.mark.parametrize("name", [*MISFITS, *MISFITS_OF_EDGES])
def test_operands_that_do_not_fit(name: str):
    error, message, change = (MISFITS | MISFITS_OF_EDGES)[name]
    spec = spec_of(random_case(3), shared=True, convolution=name in MISFITS_OF_EDGES)
    given: dict[str, object] = dict(zip(("x", "y", "weight"), inputs_of(spec, 5), strict=True))
    if spec.convolution:
        given |= zip(("receivers", "senders"), edges_of(5, 5, sort=False), strict=True)
    tensor_product(spec, **given)
    with pytest.raises(error, match=message) as info:
        tensor_product(spec, **given | change(**given))
    assert info.value.fix


def test_missing_edges_are_left_out():
    """-1 is "no entry", as in every statement."""
    spec = spec_of(one_mode("uvu", True, lmax=1), shared=False, convolution=True)
    x, y, w = inputs_of(spec, 5, 4)
    receivers, senders = edges_of(4, 5, sort=False)
    receivers[1] = -1
    keep = torch.tensor([0, 2, 3, 4])
    got = tensor_product(spec, x, y, w, receivers, senders)
    expected = conv_oracle_of(spec, receivers[keep], senders[keep])(x, y[keep], w[keep])
    assert_matches(got, expected, dtype=torch.float64, kind="sum")


def test_other_receivers_than_senders():
    spec = spec_of(one_mode("uvu", True, lmax=1), shared=True, convolution=True)
    x, y, w = inputs_of(spec, 5, 4)
    receivers, senders = torch.tensor([8, 0, 3, 8, 9]), torch.tensor([0, 1, 2, 3, 3])
    z = tensor_product(spec, x, y, w, receivers, senders, 11)
    padded = torch.cat([x, x.new_zeros(7, x.shape[1])])
    assert_matches(z, conv_oracle_of(spec, receivers, senders)(padded, y, w), dtype=torch.float64, kind="sum")


def test_statements():
    mixing = spec_of(
        Case("4x0e+4x1o", "1x0e+1x1o", "6x1o", ((0, 1, 0, "uvw", True), (1, 0, 0, "uvw", True))), shared=True
    )
    assert expressions(mixing) == ("Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p]] * W[L[p],u,w]",)
    keeping = spec_of(one_mode("uvu", True), shared=False, convolution=True)
    assert expressions(keeping) == ("Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p],v] * W[e,L[p],u,v]",)
    assert expressions(keeping, "x") == (
        "dX[Src[e],I[p],u] += CG[p] * Y[e,J[p],v] * W[e,L[p],u,v] * dZ[Dst[e],K[p],u]",
    )


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_paths_of_one_kind_are_one_statement(mode: str):
    spec = spec_of(one_mode(mode, True), shared=True)
    assert len(expressions(spec)) == 1
    assert len(spec.paths) > len(expressions(spec))


@pytest.mark.parametrize("mode", ["uvu", "uvw"])
def test_coefficients_are_never_a_dense_block(mode: str):
    spec = spec_of(one_mode(mode, True), shared=True)
    layout = layout_of(spec.to_json())
    dense = sum(math.prod(layout.entry(role, p).size for role in "xyz") for p in spec.paths)
    stored = sum(s.tables["CG"].numel() for s in statements_of(layout, "z"))
    assert stored < 0.6 * dense


def test_spec_as_text_and_pickle():
    spec = spec_of(random_case(2), shared=False, convolution=True, deterministic=True)
    assert TensorProductSpec.from_json(spec.to_json()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert layout_of(spec.to_json()) is layout_of(spec.to_json())


@pytest.mark.parametrize("copies", [1, 3])
def test_who_asks_is_shown_each_statement(copies: int):
    spec = spec_of(one_mode("uvu", True, 4, copies, 5), shared=True)
    calls = statement_calls(lambda: tensor_product(spec, *inputs_of(spec, 3)))
    assert tuple(call.program.expression for call in calls) == expressions(spec)
    assert expressions(spec)[0] in str(calls[0].explain())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("mode", "weighted"), [w for w in WEIGHTED if not MODES[w[0]].pairs])
def test_right_is_the_matrix_of_the_product(mode: str, weighted: bool, shared: bool):
    spec = spec_of(one_mode(mode, weighted), shared=shared)
    x, y, w = inputs_of(spec, 3)
    oracle = oracle_of(spec)

    def matrix(y: Tensor, w: Tensor) -> Tensor:
        dim = dimension(spec.in1)
        basis = torch.eye(dim, dtype=torch.float64).repeat(3, 1)
        spread = w if shared else w.repeat_interleave(dim, 0)
        return oracle(basis, y.repeat_interleave(dim, 0), spread).reshape(3, dim, -1)

    assert_same_derivatives(lambda y, w: tensor_product_right(spec, y, w), matrix, (y, w))
    product = torch.einsum("zi,zik->zk", x, tensor_product_right(spec, y, w))
    assert_matches(product, tensor_product(spec, x, y, w), dtype=torch.float64, kind="sum")


@pytest.mark.parametrize("seed", range(8))
def test_right_of_random_paths(seed: int):
    modes = [m for m in MODE_NAMES if not MODES[m].pairs]
    spec = spec_of(random_case(seed, modes), shared=False)
    x, y, w = inputs_of(spec, 4)
    product = torch.einsum("zi,zik->zk", x, tensor_product_right(spec, y, w))
    assert_matches(product, oracle_of(spec)(x, y, w), dtype=torch.float64, kind="sum")
    assert all(text.startswith("B[z,") for text in expressions(spec, "b"))


def test_right_of_pairs_is_refused():
    spec = spec_of(one_mode("uvu<v", False), shared=True)
    with pytest.raises(UnsupportedModeError, match="not defined for mode 'uvu<v'") as info:
        expressions(spec, "b")
    assert isinstance(info.value, NotImplementedError)
