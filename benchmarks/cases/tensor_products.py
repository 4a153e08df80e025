"""Tensor products of equivariant networks against e3nn, OpenEquivariance and cuEquivariance.

`tp_conv` and `tp_conv_double`: messages along edges, of two published potentials' shapes. `fctp`: the fully connected
product of Insum's table 3. Weights are drawn in e3nn's order; a baseline's own order is made before the clock starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import irreps, peers
from benchmarks.registry import Floor, Problem, Setting, Work, case

__all__ = ["fctp", "tp_conv", "tp_conv_double"]

CONV_TESTS = ("tests/layers/equivariant/test_tensor_product_conv.py",)
TESTS = ("tests/layers/equivariant/test_tensor_product.py",)

# name -> nodes' irreps, edges' irreps, kept irreps, nodes, edges; and the channels of a test.
SHAPES = {
    "mace-large": ("128x0e+128x1o+128x2e", "1x0e+1x1o+1x2e+1x3o", "0e+1o+2e+3o", 1_000, 158_000),
    "small": ("32x0e+32x1o+32x2e", "1x0e+1x1o+1x2e", "0e+1o+2e", 500, 10_000),
    "nequip": ("64x0e+64x1o+64x2e", "1x0e+1x1o+1x2e", "0e+1o+2e", 5_184, 160_000),
}
OF_GPUS = ("mace-large", "nequip")
PIECES = 16
# Relative to the largest element; gradients of edge features sum a thousand terms.
TOLERANCE = {"float32": 2e-5, "float64": 1e-11, "tf32": 3e-3}
# Of the baselines, which sum in any order; their records state their errors.
LOOSE = {"float32": 1e-4, "float64": 1e-9}
CONV_PEERS = ("oeq", "oeq/deterministic", "e3nn", "cue")
# Upper bound for the weights of all samples; the batch is halved until they fit.
_WEIGHT_BYTES = 4 << 30


class _Graph(NamedTuple):
    """Edges of a symmetric graph, ascending by receiver, then sender; `transposed` sorts them by sender."""

    receivers: Tensor
    senders: Tensor
    transposed: Tensor


def _symmetric_graph(setting: Setting, nodes: int, edges: int) -> _Graph:
    generator = setting.generator()
    ends = torch.randint(nodes, (2, edges), generator=generator, device=setting.device)
    low, high = ends.amin(0), ends.amax(0)
    key = (low * nodes + high)[low < high].unique()
    key = key[torch.randperm(key.numel(), generator=generator, device=setting.device)[: edges // 2]]
    both = torch.cat([key, key % nodes * nodes + key // nodes]).sort().values
    receivers, senders = both // nodes, both % nodes
    return _Graph(receivers, senders, (senders * nodes + receivers).argsort())


class _Conv(NamedTuple):
    """A convolution's problem: graph, operands, e3nn's tensor product; `fresh`: each call has edges of its own."""

    graph: _Graph
    nodes: int
    operands: tuple[Tensor, Tensor, Tensor]
    product: Callable[[], Any]
    shape: irreps.Channelwise
    fresh: bool = False

    def ends(self) -> tuple[Tensor, Tensor]:
        """Receivers and senders of a call."""
        found = self.graph.receivers, self.graph.senders
        return (found[0].clone(), found[1].clone()) if self.fresh else found

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(t.to(dtype, copy=True).requires_grad_() for t in self.operands)

    def floor(self) -> Floor:
        """Each operand and the result once; and the senders' features as often as an edge leaves them."""
        x, y, _ = self.operands
        width = x.shape[1] * x.element_size()
        out = irreps.o3().Irreps(self.shape.out).dim * self.nodes * x.element_size()
        edges = y.shape[0]
        read = sum(t.numel() * t.element_size() for t in self.operands)
        return Floor(
            bytes=read + out + 8 * edges, gathered=edges * width, row=width, table=x.numel() * x.element_size()
        )


def _conv(setting: Setting, name: str, dtype: str) -> _Conv:
    in1, in2, kept, nodes, edges = SHAPES[name]
    if setting.tiny:
        in1, nodes, edges = in1.replace("128x", "4x").replace("64x", "4x").replace("32x", "4x"), 7, 30
    shape = irreps.channelwise(in1, in2, kept)
    graph = _symmetric_graph(setting, nodes, edges)
    edges = graph.receivers.numel()
    kind, generator = getattr(torch, dtype), setting.generator()
    o3 = irreps.o3()

    def product() -> Any:
        return o3.TensorProduct(*shape[:4], shared_weights=False, internal_weights=False)

    sizes = ((nodes, o3.Irreps(in1).dim), (edges, o3.Irreps(in2).dim), (edges, product().weight_numel))
    x, y, w = (torch.randn(size, generator=generator, device=setting.device, dtype=kind) for size in sizes)
    return _Conv(graph, nodes, (x, y, w), product, shape)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Finish(Protocol):
    """Make work of a call and its leaves; `out` holds e3nn's column for each column of the output, if they differ."""

    def __call__(self, call: Call, leaves: tuple[Tensor, ...], out: Tensor | None = None) -> Work: ...


def _conv_providers(setting: Setting, problem: _Conv, dtype: str, finish: Finish) -> dict[str, Callable[[], Work]]:
    """Ours and the peers', each made into work by `finish`."""
    kind, graph = getattr(torch, dtype), problem.graph

    def ours(deterministic: bool) -> Work:
        layer = importlib.import_module("insum_nn.layers.equivariant.tensor_product_conv").TensorProductConv(
            *problem.shape[:4], deterministic=deterministic
        )
        layer = layer.to(setting.device, kind)
        return finish(lambda x, y, w: layer(x, y, w, *problem.ends()), problem.leaves(kind))

    def openequivariance(deterministic: bool) -> Work:
        module = peers.oeq(setting.device)
        tpp = peers.oeq_problem(module, problem.product(), kind)
        layer = module.TensorProductConv(tpp, deterministic=deterministic)
        x, y, w = problem.leaves(kind)
        w = layer.reorder_weights_from_e3nn(w.detach(), True).requires_grad_()
        order = graph.transposed if deterministic else None
        work = finish(lambda a, b, c: layer(a, b, c, graph.receivers, graph.senders, order), (x, y, w))

        def third(reorder: Callable[..., Tensor]) -> Callable[[Any], Any]:
            # Of gradients, first or second, and of what is sent back through them, that of the weights comes third.
            return lambda found: (
                found
                if isinstance(found, Tensor)
                else tuple(reorder(g, True) if n == 2 else g for n, g in enumerate(found))
            )

        to_e3nn, from_e3nn = third(layer.reorder_weights_to_e3nn), third(layer.reorder_weights_from_e3nn)
        return Work(work.forward, work.leaves, to_e3nn, to_e3nn, from_e3nn)

    def e3nn() -> Work:
        product = peers.e3nn_product(problem.product, setting.device, kind)

        def call(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            messages = product(x.index_select(0, graph.senders), y, w)
            return messages.new_zeros(problem.nodes, messages.shape[1]).index_add(0, graph.receivers, messages)

        return finish(call, problem.leaves(kind))

    return {
        "insum_nn": lambda: ours(False),
        "insum_nn/deterministic": lambda: ours(True),
        "oeq": lambda: openequivariance(False),
        "oeq/deterministic": lambda: openequivariance(True),
        "e3nn": e3nn,
        "cue": lambda: _cue(setting, problem, dtype, finish),
    }


def _cue(setting: Setting, problem: _Conv, dtype: str, finish: Finish) -> Work:
    """cuEquivariance in its own layout of features and weights, made before the clock starts."""
    kind, graph = getattr(torch, dtype), problem.graph
    layer = peers.cue_convolution(problem.shape, setting.device, kind)
    x, y, w = problem.leaves(kind)
    own = (x.detach()[:, layer.x].requires_grad_(), y, w.detach()[:, layer.w].requires_grad_())
    work = finish(
        lambda x, y, w: layer.call(x, y, w, graph.receivers, graph.senders, problem.nodes), own, out=layer.out
    )
    # Of x, y, w and the upstream gradient, which first and second gradients follow.
    columns = (layer.x, None, layer.w, layer.out)

    def to_e3nn(found: Any) -> Any:
        if isinstance(found, Tensor):
            return _scattered(found, layer.out)
        return tuple(_scattered(each, to) for each, to in zip(found, columns, strict=False))

    def upstream(back: Sequence[Tensor]) -> Sequence[Tensor]:
        wanted = (layer.out,) if len(back) == 1 else columns
        return [each if of is None else each[:, of] for each, of in zip(back, wanted, strict=False)]

    return Work(work.forward, work.leaves, to_e3nn, to_e3nn, upstream)


def _scattered(found: Tensor, columns: Tensor | None) -> Tensor:
    return found if columns is None else torch.empty_like(found).index_copy_(1, columns, found)


def _conv_oracle(setting: Setting, problem: _Conv) -> Call:
    tables = irreps.path_tables(problem.product(), setting.device)
    graph = problem.graph

    def call(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        parts = irreps.in_pieces(tables, x.index_select(0, graph.senders), y, w, PIECES)
        receivers = graph.receivers.split(parts[0].shape[0])
        out = x.new_zeros(problem.nodes, parts[0].shape[1])
        for part, to in zip(parts, receivers, strict=True):
            out = out.index_add(0, to, part)
        return out

    return call


def _double_oracle(setting: Setting, problem: _Conv, upstream: Tensor) -> Work:
    """The first gradients written out, in pieces: at full size their graph would fill the device."""
    tables = irreps.path_tables(problem.product(), setting.device)
    x, y, w = problem.leaves(torch.float64)
    sent = upstream.clone().requires_grad_()
    count = -(-y.shape[0] // PIECES)

    def piece(senders: Tensor, receivers: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        nodes, y_part, w_part, back = parts
        dx, dy, dw = irreps.dense_gradients(tables, nodes[senders], y_part, w_part, back[receivers])
        return torch.zeros_like(nodes).index_add(0, senders, dx), dy, dw

    def first() -> tuple[Tensor, ...]:
        ends = zip(problem.graph.senders.split(count), problem.graph.receivers.split(count), strict=True)
        pieces = [
            checkpoint(piece, *both, x, y_part, w_part, sent, use_reentrant=False)
            for both, y_part, w_part in zip(ends, y.split(count), w.split(count), strict=True)
        ]
        dx, dy, dw = zip(*pieces, strict=True)  # type: ignore[misc]
        return torch.stack(dx).sum(0), torch.cat(dy), torch.cat(dw)

    return Work(first, (x, y, w, sent))


def _once(call: Call, leaves: tuple[Tensor, ...], out: Tensor | None = None) -> Work:
    x, y, w = leaves
    return Work(lambda: call(x, y, w), leaves)


@case("tp_conv", tests=CONV_TESTS, shape=OF_GPUS, dtype=("float32", "float64"))
def tp_conv(setting: Setting, *, shape: str, dtype: str, edges: str = "kept") -> Problem:
    """A uvu convolution, weights on the edges: forward, and forward with the gradients of all three operands."""
    problem = _conv(setting, shape, dtype)._replace(fresh=edges == "new")

    return Problem(
        providers=_conv_providers(setting, problem, dtype, _once),
        oracle=lambda: _once(_conv_oracle(setting, problem), problem.leaves(torch.float64)),
        tolerance=TOLERANCE[dtype],
        tolerances=dict.fromkeys(CONV_PEERS, LOOSE[dtype]),
        floors={"fwd": problem.floor()},
        modes=("fwd", "fwdbwd"),
    )


def _twice(upstream: Tensor) -> Finish:
    """Work whose output are the first gradients of a call, sent `upstream`."""

    def finish(call: Call, leaves: tuple[Tensor, ...], out: Tensor | None = None) -> Work:
        x, y, w = leaves
        sent = (upstream if out is None else upstream[:, out]).to(x.dtype, copy=True).requires_grad_()

        def first() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(x, y, w), (x, y, w), sent, create_graph=True)

        return Work(first, (x, y, w, sent))

    return finish


@case("tp_conv_double", tests=CONV_TESTS, shape=OF_GPUS, dtype=("float32", "float64"))
def tp_conv_double(setting: Setting, *, shape: str, dtype: str) -> Problem:
    """The same, differentiated twice, as training on forces does.

    `bwd` is the double backward alone: from gradients of the three first gradients to those of the three operands and
    of the upstream gradient. `fwdbwd` is forward, backward and double backward.
    """
    problem = _conv(setting, shape, dtype)
    width = irreps.o3().Irreps(problem.shape.out).dim
    upstream = torch.randn(
        problem.nodes, width, generator=setting.generator(), device=setting.device, dtype=torch.float64
    )
    return Problem(
        providers=_conv_providers(setting, problem, dtype, _twice(upstream)),
        oracle=lambda: _double_oracle(setting, problem, upstream),
        tolerance=TOLERANCE[dtype],
        tolerances=dict.fromkeys(CONV_PEERS, LOOSE[dtype]),
        modes=("bwd", "fwdbwd"),
    )


@case(
    "fctp",
    tests=TESTS,
    degree=(1, 2, 3),
    channels=(16, 32, 64, 128),
    weights=("shared", "sample"),
    dtype=("float32", "tf32"),
    quick={"degree": (1, 2), "channels": (32, 64)},
)
def fctp(setting: Setting, *, degree: int, channels: int, weights: str, dtype: str, samples: int = 10_000) -> Problem:
    """A fully connected product with spherical harmonics (fewer samples where their weights exceed 4 GiB).

    `tf32` lets float32 products round their factors; peers that have no such switch run as they are.
    """
    shared, precision = weights == "shared", "high" if dtype == "tf32" else "highest"
    in1, in2 = irreps.fully_connected(degree, 3 if setting.tiny else channels)
    o3, generator, device = irreps.o3(), setting.generator(), setting.device
    batch = 9 if setting.tiny else samples

    def product() -> Any:
        return o3.FullyConnectedTensorProduct(in1, in2, in1, shared_weights=shared, internal_weights=False)

    count = int(product().weight_numel)
    while not shared and 4 * batch * count > _WEIGHT_BYTES:
        batch //= 2
    x = torch.randn(batch, o3.Irreps(in1).dim, generator=generator, device=device)
    y = torch.randn(batch, o3.Irreps(in2).dim, generator=generator, device=device)
    w = torch.randn((count,) if shared else (batch, count), generator=generator, device=device)

    def leaves(kind: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        return tuple(t.to(kind, copy=True).requires_grad_() for t in (x, y, w))

    def of(build: Callable[[], Any]) -> Work:
        call, own = build(), leaves()
        return Work(lambda: call(*own), own)

    def ours() -> Any:
        layer = importlib.import_module("insum_nn.layers.equivariant.tensor_product").FullyConnectedTensorProduct
        return layer(in1, in2, in1, shared_weights=shared, internal_weights=False).to(device)

    def openequivariance() -> Work:
        module = peers.oeq(device)
        layer = module.TensorProduct(peers.oeq_problem(module, product(), torch.float32))
        own = leaves()
        own = (own[0], own[1], layer.reorder_weights_from_e3nn(own[2].detach(), not shared).requires_grad_())
        return Work(
            lambda: layer(*own),
            own,
            lambda found: [*found[:2], layer.reorder_weights_to_e3nn(found[2], not shared)],
        )

    def cuequivariance() -> Work:
        layer, own = peers.cue_fully_connected(in1, in2, in1, shared=shared, device=device), leaves()
        columns = (layer.x, layer.y, None)
        own = (own[0].detach()[:, layer.x].requires_grad_(), own[1].detach()[:, layer.y].requires_grad_(), own[2])
        return Work(
            lambda: layer.call(*own),
            own,
            lambda found: [_scattered(each, to) for each, to in zip(found, columns, strict=True)],
            lambda found: _scattered(found, layer.out),
            lambda back: [each[:, layer.out] for each in back],
        )

    def oracle() -> Work:
        own, tables = leaves(torch.float64), irreps.path_tables(product(), device)
        x, y, w = own
        return Work(lambda: torch.cat(irreps.in_pieces(tables, x, y, w, PIECES)), own)

    theirs: dict[str, Callable[[], Work]] = {
        "e3nn": lambda: of(lambda: peers.e3nn_product(product, device, torch.float32)),
        "e3nn/compiled": lambda: of(lambda: peers.e3nn_compiled(product, device, torch.float32)),
        "oeq": openequivariance,
        "cue": cuequivariance,
    }
    if device.type == "cpu":
        # Its C++ takes minutes to compile.
        del theirs["e3nn/compiled"]
    # The paths' dense products; Clebsch-Gordan sums come on top, and are few beside them.
    flops = sum(2 * batch * (2 * product().irreps_out[p.i_out].ir.l + 1) * channels**2 for p in product().instructions)
    return Problem(
        providers={"insum_nn": lambda: of(ours), **theirs},
        oracle=oracle,
        tolerance=TOLERANCE[dtype],
        # Gradients of shared weights sum ten thousand samples, in whichever order.
        tolerances=dict.fromkeys(theirs, 3e-3),
        floors={"fwd": Floor(bytes=4 * (2 * x.numel() + y.numel() + w.numel()), flops=flops)},
        modes=("fwd", "fwdbwd"),
        precision=precision,
    )
