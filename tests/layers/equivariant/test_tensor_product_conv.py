from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("e3nn")

from e3nn import o3
from e3nn.util.test import assert_equivariant

from insum_nn.compiler.kernels import c_structures
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumDeviceError, InsumDtypeError, InsumError, InsumFormatError, InsumRangeError
from insum_nn.layers.equivariant.checks import InputError
from insum_nn.layers.equivariant.tensor_product import TensorProduct
from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv
from insum_nn.layers.equivariant.tensor_product_scatter import TensorProductScatter
from insum_nn.layers.swap import swap
from insum_nn.ops.tensor_product_roles import joints_of
from insum_nn.ops.tensor_product_spec import layout_of
from insum_nn.testing.tolerances import assert_matches
from tests.double import double
from tests.layers.equivariant.tensor_product_cases import Case, assert_same_derivatives, one_mode, random_case

__all__ = ["double"]

CASES = {
    "nequip": Case(
        "4x0e+4x1o",
        "1x0e+1x1o+1x2e",
        "4x0e+4x1o+4x2e+4x1o+4x0e+4x1e",
        (
            (0, 0, 0, "uvu", True),
            (0, 1, 1, "uvu", True),
            (0, 2, 2, "uvu", True),
            (1, 0, 3, "uvu", True),
            (1, 1, 4, "uvu", True),
            (1, 1, 5, "uvu", True),
        ),
    ),
    "mixed multiplicities": Case(
        "6x0e+3x1o",
        "1x0e+1x1o",
        "6x0e+6x1o+3x1o+3x0e",
        ((0, 0, 0, "uvu", True), (1, 0, 2, "uvu", True), (0, 1, 1, "uvu", True), (1, 1, 3, "uvu", True)),
    ),
    "mixing": Case(
        "4x0e+3x1o",
        "1x0e+1x1o",
        "3x0e+2x1o",
        ((0, 0, 0, "uvw", True), (0, 1, 1, "uvw", True), (1, 0, 1, "uvw", True), (1, 1, 0, "uvw", True)),
    ),
    "random": random_case(3),
    "pairs": one_mode("u<vw", True, lmax=1),
}
EDGES = {
    "sorted": (torch.tensor([0, 0, 1, 2, 2, 2, 4]), torch.tensor([1, 2, 0, 4, 4, 0, 3])),
    "unsorted": (torch.tensor([4, 0, 2, 2, 0, 1, 2]), torch.tensor([3, 2, 4, 0, 1, 0, 4])),
    "int32": (torch.tensor([4, 0, 2, 2, 0, 1, 2]).int(), torch.tensor([3, 2, 4, 0, 1, 0, 4]).int()),
    "none": (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
}


def inputs_of(conv: TensorProductConv, nodes: int, edges: int) -> list[Tensor]:
    product = conv.tensor_product
    shape = (product.weight_numel,) if product.shared_weights else (edges, product.weight_numel)
    return [torch.randn(nodes, product.irreps_in1.dim), torch.randn(edges, product.irreps_in2.dim), torch.randn(shape)]


def unfused(product: torch.nn.Module, x: Tensor, y: Tensor, w: Tensor | None, rows: Tensor, cols: Tensor) -> Tensor:
    messages = product(x[cols.long()], y, w)
    return messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, rows.long(), messages)


@pytest.mark.peer
@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gather_product_and_scatter_in_one(name: str, shared: bool, edges: str):
    rows, cols = EDGES[edges]
    options = {"shared_weights": shared, "internal_weights": False}
    conv = TensorProductConv(*CASES[name].args, **options)
    peer = o3.TensorProduct(*CASES[name].args, **options)
    assert_same_derivatives(
        lambda x, y, w: conv(x, y, w, rows, cols),
        lambda x, y, w: unfused(peer, x, y, w, rows, cols),
        inputs_of(conv, 5, len(rows)),
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["nequip", "mixing", "mixed multiplicities"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_on_each_device(deterministic: bool, name: str, shared: bool, device: torch.device):
    rows, cols = EDGES["unsorted"]
    options = {"shared_weights": shared, "internal_weights": False}
    conv = TensorProductConv(*CASES[name].args, **options, deterministic=deterministic)
    inputs = [t.to(device) for t in inputs_of(conv, 5, 7)]
    product = conv.tensor_product
    placed = rows.to(device), cols.to(device)
    oracle = copy.deepcopy(product)
    assert_same_derivatives(
        lambda x, y, w: conv(x, y, w, *placed), lambda x, y, w: unfused(oracle, x, y, w, rows, cols), inputs
    )
    assert_same_derivatives(
        lambda x, y, w: conv(x, y, w, *placed),
        lambda x, y, w: unfused(oracle, x, y, w, rows, cols),
        [t.float() for t in inputs],
        dtype=torch.float32,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("learned", ["xyw", "xy", "xw", "yw", "x"])
def test_gradients_that_are_made_together(learned: str):
    # A layout remembers what became of its gradients, also of those of another test.
    layout_of.cache_clear()
    rows, cols = (t.cuda() for t in EDGES["unsorted"])
    conv = TensorProductConv(*CASES["nequip"].args)
    inputs = [t.cuda().requires_grad_(x in learned) for x, t in zip("xyw", inputs_of(conv, 5, 7), strict=True)]
    wanted = [t for t in inputs if t.requires_grad]
    first = torch.autograd.grad(conv(*inputs, rows, cols).square().sum(), wanted)
    peer = unfused(copy.deepcopy(conv.tensor_product).cpu(), *(t.cpu() for t in inputs), rows.cpu(), cols.cpu())
    for got, want in zip(first, torch.autograd.grad(peer.square().sum(), wanted), strict=True):
        assert_matches(got, want, dtype=torch.float64, kind="sum", scale=float(want.abs().max()))
    (joint,) = joints_of(layout_of(conv._text), learned, inputs[0].device, torch.float64)
    assert "".join(joint.roles) == learned
    reasons = [artifact.reason for artifact in joint.graph.artifacts.values()]
    assert [reason.partition(":")[0] for reason in reasons] == ["together"] * (len(learned) > 1)


def test_equivariance():
    conv = TensorProductConv(*CASES["nequip"].args)
    rows, cols = EDGES["unsorted"]
    _, _, w = inputs_of(conv, 5, 7)
    x, y = conv.tensor_product.irreps_in1.randn(5, -1), conv.tensor_product.irreps_in2.randn(7, -1)
    assert_equivariant(
        lambda x, y: conv(x, y, w, rows, cols),
        args_in=[x, y],
        irreps_in=[conv.tensor_product.irreps_in1, conv.tensor_product.irreps_in2],
        irreps_out=[conv.irreps_out],
        tolerance=1e-9,
    )


def test_order_of_the_edges_and_sender_perm_do_not_matter():
    conv = TensorProductConv(*CASES["nequip"].args)
    rows, cols = EDGES["unsorted"]
    x, y, w = inputs_of(conv, 5, 7)
    order = rows.argsort(stable=True)
    given = conv(x, y, w, rows, cols)
    perm = cols[order].argsort(stable=True)
    ordered = conv(x, y[order], w[order], rows[order], cols[order], perm)
    assert_matches(ordered, given, dtype=torch.float64, kind="sum")


def test_other_receivers_than_senders():
    conv = TensorProductConv(*CASES["nequip"].args)
    rows, cols = torch.tensor([7, 0, 7]), torch.tensor([0, 4, 1])
    x, y, w = inputs_of(conv, 5, 3)
    z = conv(x, y, w, rows, cols, num_nodes=8)
    assert z.shape == (8, conv.irreps_out.dim)
    padded = torch.cat([x, x.new_zeros(3, x.shape[1])])
    assert_matches(z, unfused(conv.tensor_product, padded, y, w, rows, cols), dtype=torch.float64, kind="sum")


def test_weights_inside():
    conv = TensorProductConv(*CASES["nequip"].args, internal_weights=True)
    assert [name for name, _ in conv.named_parameters()] == ["tensor_product.weight"]
    rows, cols = EDGES["unsorted"]
    x, y, _ = inputs_of(conv, 5, 7)
    z = conv(x, y, None, rows, cols)
    assert_matches(z, unfused(conv.tensor_product, x, y, None, rows, cols), dtype=torch.float64, kind="sum")
    z.sum().backward()
    assert conv.tensor_product.weight.grad is not None


def test_one_weight_for_all_edges():
    conv = TensorProductConv(*CASES["nequip"].args)
    rows, cols = EDGES["unsorted"]
    x, y, w = inputs_of(conv, 5, 7)
    assert torch.equal(conv(x, y, w[:1], rows, cols), conv(x, y, w[:1].expand(7, -1), rows, cols))


@pytest.mark.peer
def test_problems():
    """OpenEquivariance's way to construct it: a whole problem, whose instructions are normalised already."""
    case = CASES["nequip"]
    peer = o3.TensorProduct(*case.args, shared_weights=False, internal_weights=False, path_normalization="path")
    problem = SimpleNamespace(
        irreps_in1=peer.irreps_in1,
        irreps_in2=peer.irreps_in2,
        irreps_out=peer.irreps_out,
        instructions=peer.instructions,
        shared_weights=False,
        internal_weights=False,
    )
    ours = TensorProduct(*case.args, shared_weights=False, path_normalization="path")
    rows, cols = EDGES["unsorted"]
    expected = None
    for given in (problem, peer, ours):
        conv = TensorProductConv(given, deterministic=True)
        torch.manual_seed(0)
        x, y, w = inputs_of(conv, 5, 7)
        expected = unfused(peer, x, y, w, rows, cols)
        assert_matches(conv(x, y, w, rows, cols), expected, dtype=torch.float64, kind="sum")
    assert conv.reorder_weights_from_e3nn(w) is conv.reorder_weights_to_e3nn(w) is w
    with pytest.raises(InputError, match="Kahan"):
        TensorProductConv(problem, deterministic=True, kahan=True)
    with pytest.raises(InputError, match="no attribute irreps_in1"):
        TensorProductConv(3)


def other_order(x: Tensor, irreps: o3.Irreps, *, components_first: bool) -> Tensor:
    """Exchange copies and components within each entry of a representation."""
    parts = []
    for own, (mul, ir) in zip(irreps.slices(), irreps, strict=True):
        shape = (ir.dim, mul) if components_first else (mul, ir.dim)
        parts.append(x[..., own].unflatten(-1, shape).transpose(-1, -2).flatten(-2))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["nequip", "mixed multiplicities", "mixing", "pairs"])
def test_components_before_copies(name: str, shared: bool):
    """`layout="ir_mul"` of OpenEquivariance's problems: inputs and outputs, in all gradients; weights are as ever."""
    options = {"shared_weights": shared, "internal_weights": False}
    peer = o3.TensorProduct(*CASES[name].args, **options)
    problem = SimpleNamespace(
        irreps_in1=peer.irreps_in1,
        irreps_in2=peer.irreps_in2,
        irreps_out=peer.irreps_out,
        instructions=peer.instructions,
        shared_weights=shared,
        internal_weights=False,
        layout="ir_mul",
    )
    conv = TensorProductConv(problem)
    rows, cols = EDGES["unsorted"]

    def oracle(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        x = other_order(x, peer.irreps_in1, components_first=True)
        y = other_order(y, peer.irreps_in2, components_first=True)
        return other_order(unfused(peer, x, y, w, rows, cols), peer.irreps_out, components_first=False)

    assert_same_derivatives(lambda x, y, w: conv(x, y, w, rows, cols), oracle, inputs_of(conv, 5, 7))
    by_argument = TensorProductConv(*CASES[name].args, **options, layout="ir_mul")
    assert by_argument._text == conv._text
    assert "ir_mul" in repr(conv).splitlines()[0]


def test_an_unknown_layout_is_refused():
    with pytest.raises(InsumFormatError, match="layout is 'irmul'"):
        TensorProductConv(*CASES["nequip"].args, layout="irmul")


def test_explain():
    conv = TensorProductConv(*CASES["mixing"].args)
    assert "Z[Dst[e],K[p],w] += " in repr(conv)
    rows, cols = EDGES["sorted"]
    inputs = inputs_of(conv, 5, 7)
    assert conv.weight_numel == conv.tensor_product.weight_numel
    explained = str(conv.explain(*inputs, rows, cols))
    assert conv.expression.splitlines()[0] in explained
    assert "missing entry" not in explained


@pytest.mark.c
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["nequip", "mixed multiplicities", "mixing"])
def test_nothing_as_large_as_the_messages(name: str, shared: bool):
    """No direction, first or second, allocates the gathered features or the messages of all edges.

    The gradient of weights that belong to the edges may be larger than the features; it is what was asked for.
    """
    case = CASES[name]
    wide = [text.replace("4x", "32x").replace("6x", "48x").replace("3x", "24x") for text in case.args[:3]]
    instructions = case.args[3]
    if name == "mixing":
        wide, instructions = ["48x0e+48x1o", "1x0e+1x1o", "48x1o"], [(0, 1, 0, "uvw", True), (1, 0, 0, "uvw", True)]
        if not shared:
            pytest.skip("48 * 48 weights an edge are larger than everything else")
    options = {"shared_weights": shared, "internal_weights": False}
    conv = TensorProductConv(wide[0], case.irreps_in2, wide[2], instructions, **options)
    nodes, edges = 50, 4000
    x, y, w = inputs_of(conv, nodes, edges)
    rows = torch.randint(0, nodes, (edges,)).sort().values
    cols = torch.randint(0, nodes, (edges,))
    inputs = [t.requires_grad_() for t in (x, y, w)]

    def run() -> None:
        z = conv(*inputs, rows, cols)
        first = torch.autograd.grad(z.square().sum(), inputs, create_graph=True)
        total = sum((g.square().sum() for g in first), torch.zeros(()))
        torch.autograd.grad(total, inputs)

    run()
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    sizes = [event.self_cpu_memory_usage for event in profile.events() or []]
    features = min(conv.tensor_product.irreps_in1.dim, conv.irreps_out.dim)
    messages = edges * conv.irreps_out.dim * 8
    bound = edges * features * 8 - 1 if shared else w.numel() * 8
    assert 0 < max(sizes) <= bound < messages


BASE = {"X": (5, 16), "Y": (7, 9), "W": (7, 24), "rows": (7,), "cols": (7,), "sender_perm": (7,)}


def arguments() -> dict[str, Tensor]:
    rows, cols = EDGES["sorted"]
    conv = TensorProductConv(*CASES["nequip"].args)
    x, y, w = inputs_of(conv, 5, 7)
    return {"X": x, "Y": y, "W": w, "rows": rows, "cols": cols, "sender_perm": cols.argsort()}


@pytest.mark.parametrize(("name", "axis"), [(n, a) for n, shape in BASE.items() for a in range(len(shape))])
def test_every_size_is_checked(name: str, axis: int):
    """Each argument longer and shorter by one along each axis; the rows of X say how many nodes there are."""
    if (name, axis) == ("X", 0):
        pytest.skip("says how many nodes there are")
    conv = TensorProductConv(*CASES["nequip"].args)
    for change in (-1, 1):
        given = arguments()
        assert given[name].shape == BASE[name]
        shape = list(given[name].shape)
        shape[axis] += change
        given[name] = given[name].new_zeros(shape)
        with pytest.raises(InputError, match=r"Shape mismatch|the weight has a wrong shape") as info:
            conv(**given)
        assert "fix: " in str(info.value)


@pytest.mark.parametrize("name", BASE)
def test_every_rank_dtype_and_device_is_checked(name: str):
    conv = TensorProductConv(*CASES["nequip"].args)
    for change, kind in (
        (lambda t: t.unsqueeze(0), InputError),
        (lambda t: t.bfloat16(), InsumDtypeError),
        (lambda t: t.to("meta"), InsumDeviceError),
    ):
        given = arguments()
        given[name] = change(given[name])
        with pytest.raises(kind):
            conv(**given)


@pytest.mark.parametrize("name", ["rows", "cols"])
@pytest.mark.parametrize("entry", [5, -1, -2])
def test_edges_outside_are_refused(name: str, entry: int):
    """The operator takes an end of -1 for an edge that is none; the layer, whose edges all are, does not."""
    given = arguments()
    given[name] = given[name].clone()
    given[name][3] = entry
    conv = TensorProductConv(*CASES["nequip"].args)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    batched = torch.vmap(lambda rows, cols: conv(given["X"], given["Y"], given["W"], rows, cols))
    both = [torch.stack([given[x], given[x].clamp(0, 4)]) for x in ("rows", "cols")]
    del given["sender_perm"]
    wanted = "'Dst'" if name == "rows" else "'Src'"
    with pytest.raises(InsumRangeError, match=wanted):
        conv(**given)
    # An assertion of torch's in the graph.
    with pytest.raises(RuntimeError, match=wanted):
        compiled(**given)
    with pytest.raises(InsumRangeError, match=wanted):
        torch.func.grad(lambda x: conv(**{**given, "X": x}).sum())(given["X"])
    with pytest.raises(InsumRangeError, match=wanted):
        batched(*both)
    given[name][3] = 4
    conv(**given)


@pytest.mark.parametrize("shared", [True, False])
def test_plain_inputs_take_a_short_way(shared: bool, monkeypatch: pytest.MonkeyPatch):
    conv = TensorProductConv("2x0e+2x1o", "1x1o", "2x1o", [(0, 0, 0, "uvu", True)], shared_weights=shared)
    edges = torch.tensor([0, 2, 2, 1]), torch.tensor([1, 0, 1, 2], dtype=torch.int32)
    weight = torch.randn(*(() if shared else (4,)), conv.weight_numel)
    x, y = torch.randn(3, 8), torch.randn(4, 3)
    expected = conv(x, y, weight, *edges, torch.arange(4))
    monkeypatch.setattr(TensorProductConv, "_check", lambda *_: pytest.fail("long"))
    assert torch.equal(conv(x, y, weight, *edges), expected)
    monkeypatch.undo()
    for bad in (edges[0][:3], edges[0].float(), edges[0][:, None]):
        with pytest.raises((InputError, InsumDtypeError)):
            conv(x, y, weight, bad, edges[1])
    with pytest.raises(InputError):
        conv(x, y, torch.zeros(()), *edges)


def test_what_is_missing_is_named():
    with pytest.raises(InputError, match="instructions is missing"):
        TensorProductConv("8x0e", "1o", "8x1o")
    with pytest.raises(InputError, match="irreps_out and instructions is missing"):
        TensorProductConv("8x0e", "1o")
    with pytest.raises(InputError, match=r"takes an e3nn\.o3\.TensorProduct, got e3nn\.o3\._linear\.Linear"):
        TensorProduct.from_e3nn(o3.Linear("2x0e", "2x0e"))


def test_statements_follow_the_options():
    conv = TensorProductConv("2x0e", "0e", "2x0e", [(0, 0, 0, "uvu", True)])
    for layer in (conv, conv.tensor_product):
        assert "triton" not in layer._text
        layer.options = Options(backend="triton")
        assert layer.spec.options == Options(backend="triton")
        assert '"backend":"triton"' in layer._text
        with pytest.raises(InsumError, match="options= must be"):
            layer.options = {}


def test_layers_after_each_other_read_their_edges_once(monkeypatch: pytest.MonkeyPatch):
    """Each layer gets views of its own of the same `edge_index`; each reading waits for a GPU, and ends a capture."""
    conv = TensorProductConv(*CASES["nequip"].args)
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 0]])
    x, y = torch.randn(3, conv.tensor_product.irreps_in1.dim), torch.randn(4, conv.tensor_product.irreps_in2.dim)
    weight = torch.randn(4, conv.weight_numel)
    read: list[Tensor] = []
    aminmax = torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda tensor: read.append(tensor) or aminmax(tensor))
    # Not by the C function, which an earlier test may have had compiled.
    monkeypatch.setattr(c_structures, "sorting", functools.cache(lambda _: (None, SimpleNamespace(run=None))))
    for _ in range(3):
        leaves = [value.clone().requires_grad_() for value in (x, y, weight)]
        out = conv(leaves[0], leaves[1], leaves[2], edge_index[0], edge_index[1])
        (force,) = torch.autograd.grad(out.square().sum(), leaves[1], create_graph=True)
        torch.autograd.grad(force.square().sum(), leaves)
    assert len(read) == 2
    edge_index[0, 0] = 2
    conv(x, y, weight, *edge_index)
    assert len(read) == 4, "a write counts for both"


# nequip's convolution.


class PeerScatter(torch.nn.Module):
    """The module of nequip, whose keys ours keeps."""

    def __init__(self, *problem: object) -> None:
        super().__init__()
        self.tp = o3.TensorProduct(*problem, shared_weights=False, internal_weights=False)
        self.model_dtype = torch.get_default_dtype()

    def forward(self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        messages = self.tp(x[edge_src], edge_attr, edge_weight)
        return messages.new_zeros(len(x), messages.shape[1]).index_add(0, edge_dst, messages)


@pytest.mark.parametrize("edges", [0, 1, 37])
def test_it_takes_the_place_of_the_convolution_of_nequip(edges: int):
    torch.manual_seed(0)
    case = CASES["nequip"]
    problem = case.irreps_in1, case.irreps_in2, case.irreps_out, list(case.instructions)
    peer = PeerScatter(*problem).double()
    ours = TensorProductScatter.from_nequip(peer)
    assert list(ours.state_dict()) == list(peer.state_dict())
    assert ours.tp.weight_numel == peer.tp.weight_numel
    assert list(ours.state_dict()) == list(TensorProductScatter(*problem).state_dict())
    ours.load_state_dict(peer.state_dict())
    x, y = torch.randn(9, peer.tp.irreps_in1.dim).double(), torch.randn(edges, peer.tp.irreps_in2.dim).double()
    values = [x, y, torch.randn(edges, ours.weight_numel).double()]
    receivers, senders = torch.randint(9, (2, edges))
    found = []
    for layer in (peer, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        leaves = [value.clone().requires_grad_() for value in values]
        out = layer(leaves[0], leaves[1], leaves[2], edge_dst=receivers, edge_src=senders)
        (force,) = torch.autograd.grad(out.sin().sum(), leaves[1], create_graph=True)
        total = force.square().sum() + out.square().sum()
        found.append([out, force, *torch.autograd.grad(total, leaves)])
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-9, atol=1e-9)


# mace's convolution.


class PeerBlock(torch.nn.Module):
    """An interaction block of mace: it gathers and scatters itself, unless its product does that."""

    def __init__(self, *problem: object) -> None:
        super().__init__()
        self.conv_tp = o3.TensorProduct(*problem, shared_weights=False, internal_weights=False)

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:
        if hasattr(self, "conv_fusion"):
            return self.conv_tp(node_feats, edge_attrs, tp_weights, edge_index)
        messages = self.conv_tp(node_feats[edge_index[0]], edge_attrs, tp_weights)
        return messages.new_zeros(len(node_feats), messages.shape[1]).index_add(0, edge_index[1], messages)


PeerBlock.__module__, PeerBlock.__qualname__ = "mace.modules.blocks", "RealAgnosticResidualInteractionBlock"


@pytest.mark.parametrize("edges", [0, 1, 37])
def test_it_takes_the_place_of_the_convolution_of_mace(edges: int):
    torch.manual_seed(0)
    case = CASES["nequip"]
    peer = PeerBlock(case.irreps_in1, case.irreps_in2, case.irreps_out, list(case.instructions)).double()
    ours = copy.deepcopy(peer)
    assert len(swap(ours, dry_run=True).swapped) == 1
    assert not hasattr(ours, "conv_fusion")
    assert [row.detail for row in swap(ours).swapped] == ["EdgeTensorProduct"]
    assert swap(ours).rows == ()
    assert list(ours.state_dict()) == list(peer.state_dict())
    ours.load_state_dict(peer.state_dict())
    product = peer.conv_tp
    x, y = torch.randn(9, product.irreps_in1.dim).double(), torch.randn(edges, product.irreps_in2.dim).double()
    values = [x, y, torch.randn(edges, ours.conv_tp.weight_numel).double()]
    edge_index = torch.randint(9, (2, edges))
    scripted = torch.jit.script(ours)
    found = []
    for block in (peer, ours, scripted, *([copy.deepcopy(ours)] if edges > 1 else [])):
        leaves = [value.clone().requires_grad_() for value in values]
        out = block(*leaves, edge_index)
        (force,) = torch.autograd.grad(out.sin().sum(), leaves[1], create_graph=True)
        total = force.square().sum() + out.square().sum()
        found.append([out, force, *torch.autograd.grad(total, leaves)])
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-9, atol=1e-9)
    # Without edges it is the product, which releases of mace ask for that know no fused convolutions.
    gathered = [x[edge_index[0]], *values[1:]]
    torch.testing.assert_close(ours.conv_tp(*gathered), product(*gathered))


def test_a_convolution_of_mace_comes_back():
    peer = PeerBlock("2x0e", "0e", "2x0e", [(0, 0, 0, "uvu", True)])
    values = torch.randn(3, 2), torch.randn(4, 1), torch.randn(4, 2), torch.randint(3, (2, 4))
    wanted, original = peer(*values), peer.conv_tp
    report = swap(peer)
    assert peer.conv_tp is not original
    assert report.undo() is peer
    assert peer.conv_tp is original
    torch.testing.assert_close(peer(*values), wanted)


def test_another_product_of_mace_stays():
    block = PeerBlock("2x0e", "0e", "2x0e", [(0, 0, 0, "uvu", True)])
    block.conv_tp = torch.nn.Identity()
    assert swap(block).rows == ()
    block.conv_tp = o3.FullyConnectedTensorProduct("2x0e", "0e", "2x0e")
    assert "do not belong to edges" in swap(block).left[0].detail
    assert not hasattr(block, "conv_fusion")
