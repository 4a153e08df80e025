"""Tensor products of representations of O(3), sample by sample or along the edges of a graph.

Four tensors go by letters, their *roles*: `x` is in1 of the layers, `y` is in2, `w` the weights, `z` the output, or its
gradient where derivatives are computed. Each can be computed from the three others. Where those are passed by position
(`first`, `second`, `third`), they are in the order of `others(role)`: x y w for `z`, y w z for `x`.

How the output is computed:

1. `tensor_product`, or a layer, checks its arguments and calls `checked_product`.
2. `_Sums.in_modes` decides by what torch is doing. Where it traces, the call becomes one of the operators registered
   at the end of this file. Else `multilinear_jointly` (`compiler/runtime/multilinear.py`) runs it, and records it for
   autograd as one node (`_Jointly`).
3. `_Sums.run` computes the wanted roles: several at once by `Together`, or each by its `Role` (both in
   `tensor_product_roles.py`).
4. A `Role` has a step for each of its statements (`tensor_product_statement.py`), one for each group of paths that have
   a mode and multiplicities in common. A step names the tensors that the statement reads and calls its `program`.

The gradients are the roles of the operands that need one: `joint_gradients` asks `_Sums.derivative` which sums these
are, and continues at 2. Derivatives of a higher order go the same way again: the gradient of an operand of several
roles that were computed at once is a sum of roles, and of a convolution on a GPU `_Sums.totals` makes all these sums by
one kernel, or by two where none may be added up in memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Explanation,
    fits_between,
    for_each_vector,
    is_plain_eager,
    is_traced,
    is_transformed,
    joint_gradients,
    multilinear_jointly,
    records_graph,
    under_autocast,
    wanted_gradients,
    without_autocast,
)
from insum_nn.ops.tensor_product_checks import check_operands
from insum_nn.ops.tensor_product_right import tensor_product_right
from insum_nn.ops.tensor_product_roles import (
    Edges,
    Role,
    Sizes,
    Together,
    of_one_kernel,
    role_of,
    together_of,
    totals_of,
)
from insum_nn.ops.tensor_product_spec import ProductLayout, TensorProductSpec, layout_of, others
from insum_nn.ops.tensor_product_statement import statements_of

__all__ = [
    "TensorProductSpec",
    "checked_product",
    "explain_tensor_product",
    "expressions",
    "tensor_product",
    "tensor_product_right",
]

Given = tuple[Tensor, Tensor, Tensor]


def tensor_product(
    spec: TensorProductSpec | str,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    receivers: Tensor | None = None,
    senders: Tensor | None = None,
    num_receivers: int | None = None,
) -> Tensor:
    """Multiply two representations and decompose the product.

        Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v,w]
        Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p]] * W[e,L[p],u]

    The first line is a mode that mixes multiplicities, the second one that does not, along edges. `p` counts the
    coefficients that are not zero; `I`, `J`, `K`, `L` and `CG` are static. Along edges `X` and `Y` are a
    representation's entries of one multiplicity, packed: next to each other, copies innermost.

    Source: Geiger and Smidt, e3nn (2022), section 4; Bharadwaj, Glover, Buluc, Demmel, An Efficient Sparse Kernel
    Generator for O(3)-Equivariant Deep Networks (2025), eq. (2.1).

    Args:
        spec: the representations and paths, or their JSON.
        x: (z, dim of in1), or (n, dim of in1) along edges; differentiable. `spec.layout` says in which order an entry's
            numbers are, here and in `y` and the result.
        y: (z, dim of in2), or (e, dim of in2); differentiable.
        weight: (numel,) if the spec shares weights, else (z, numel) or (e, numel); differentiable.
        receivers: `Dst`, (e,), along edges only. An edge with an end of -1 is no edge, unless `spec.masked` is false.
        senders: `Src`, (e,), along edges only.
        num_receivers: rows of the result along edges; default the rows of `x`.

    Returns:
        (z, dim of out), or (num_receivers, dim of out). Derivatives of all orders are tensor products themselves.

    Raises:
        InsumShapeError: an operand's shape does not fit the spec and the edges.
        InsumDtypeError: dtypes differ, or nodes are no integers.
        InsumDeviceError: devices differ.
        InsumRangeError: an edge points outside the nodes, or is none where the spec refuses that.

    >>> from insum_nn.structure.irreps import Entry, Path
    >>> dot = Path(0, 0, 0, "uuw", False, 3 ** 0.5, (1, 1))
    >>> spec = TensorProductSpec((Entry(1, 1, -1),), (Entry(1, 1, -1),), (Entry(1, 0, 1),), (dot,), shared=True)
    >>> product = tensor_product(spec, torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, 2.0]]), torch.zeros(0))
    >>> round(product.item(), 4)
    7.0
    """
    text = spec if isinstance(spec, str) else spec.to_json()
    if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        check_operands(layout_of(text), x, y, weight, receivers, senders, num_receivers)
    return checked_product(text, x, y, weight, receivers, senders, num_receivers)


def checked_product(
    text: str,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    receivers: Tensor | None = None,
    senders: Tensor | None = None,
    num_receivers: int | None = None,
) -> Tensor:
    """`tensor_product` of operands that the caller has checked; the spec as JSON."""
    if torch.jit.is_tracing():
        # A trace would fix sizes that are passed as numbers: the operator reads them from its operands.
        given = _OF_X if num_receivers is None else num_receivers
        return torch.ops.insum_nn.tensor_product(  # type: ignore[no-any-return]
            text, "z", x, y, weight, receivers, senders, _OF_X, given
        )
    num_x = x.shape[0]
    num_z = (num_x if num_receivers is None else num_receivers) if senders is not None else num_x
    return _Sums(text, receivers, senders, num_x, num_z).in_modes("z", {"x": x, "y": y, "w": weight})


def expressions(spec: TensorProductSpec, role: str = "z") -> tuple[str, ...]:
    """Return the statements of a spec; of the output, or of the gradient of `x`, `y` or `w`."""
    layout = layout_of(spec.to_json())
    return tuple(statement.expression for statement in layout.keep(("text", role), lambda: statements_of(layout, role)))


def explain_tensor_product(
    spec: TensorProductSpec,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    receivers: Tensor | None = None,
    senders: Tensor | None = None,
    *,
    statement: int = 0,
    measure: bool = False,
) -> Explanation:
    """Explain one statement of the output on these tensors, and how the gradients ran last."""
    layout = layout_of(spec.to_json())
    source = role_of(layout, "z", x.device, x.dtype)
    chosen = source.statements[statement]
    named = dict(source.arguments((x, y, weight), (receivers, senders), {})[statement])
    explained = chosen.program.explain(tensors=named, out_shape=chosen.out_shape(x.shape[0]), measure=measure)
    if (count := len(source.statements)) > 1:
        others = f"the output is computed by {count} statements; explain(..., statement=n) shows another, from 0 on"
        explained = explained.with_choice("statement", f"{statement + 1} of {count}", others)
    made = [("gradients", together_of(layout, "xyw", x.device, x.dtype))]
    for roles in of_one_kernel(layout, "xywz", x.dtype):
        made.append(("second gradients", totals_of(layout, roles, "xyw", x.device, x.dtype)))
    for what, together in made:
        if together is not None and together.programs.reason:
            # How they were computed last.
            how, why = together.programs.reason.split(": ", 1)
            explained = explained.with_choice(what, f"of {', '.join(together.roles)} {how}", why)
    return explained


# Stands for a number of rows: as many as the operator's first tensor has. Only used where the output is computed, whose
# first tensor is `x`.
_OF_X = -1


def _counted(first: Tensor, num_x: int | torch.SymInt, num_z: int | torch.SymInt) -> tuple[Any, Any]:
    """Return the rows of the first input and of the output; symbolic ones are never compared."""
    rows = first.shape[0] if isinstance(num_x, int) and num_x == _OF_X else num_x
    return rows, rows if isinstance(num_z, int) and num_z == _OF_X else num_z


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """How a kind of call runs; itself a key of that kind.

    Attributes:
        together: the roles that are computed at once.
        sizes: of their results.
        singles: what runs each role by itself, and the rows of its result.
    """

    together: Together | None
    sizes: Sizes
    singles: dict[str, tuple[Role, int]]


class _Sums(NamedTuple):
    """The sums of a tensor product over its samples or edges, one for each role.

    Attributes:
        text: the spec's JSON.
        receivers: of each edge; `None` where there are no edges.
        senders: likewise.
        num_x: rows of the first input.
        num_z: rows of the output.
    """

    text: str
    receivers: Tensor | None
    senders: Tensor | None
    num_x: int
    num_z: int

    @property
    def kind(self) -> str:
        return self.text

    @property
    def indices(self) -> tuple[Tensor | None, Tensor | None]:
        return self.receivers, self.senders

    def rows(self, role: str) -> int:
        """Return the rows of a role: of nodes for the first input and the output, else of edges or samples."""
        if role in "xz":
            return self.num_x if role == "x" else self.num_z
        return self.num_x if self.senders is None else self.senders.shape[0]

    def run(self, wanted: Sequence[str], operands: Mapping[str, Tensor], *, plain: bool = False) -> dict[str, Tensor]:
        some = next(iter(operands.values()))
        device, dtype = some.device, some.dtype
        if torch._C._is_any_autocast_enabled() and under_autocast(device):
            with without_autocast(device):
                return self.run(wanted, operands, plain=plain)
        ends = self.receivers, self.senders
        if not plain and not is_plain_eager(*operands.values(), *ends):
            layout = layout_of(self.text)
            return {x: _one(_single(layout, x, self.rows(x), device, dtype), operands, ends, None) for x in wanted}
        kinds = tuple([(role, t.shape, t.dtype) for role, t in operands.items()])
        edges = None if self.senders is None else (self.senders.shape[0], self.senders.dtype)
        fixed = torch._C._get_deterministic_algorithms()
        plan = _plan(self.text, tuple(wanted), kinds, device, dtype, edges, self.num_x, self.num_z, fixed)
        together = plan.together
        found: dict[str, Tensor] | None = None
        if together is not None:
            singles = plan.singles
            found = together(
                operands,
                ends,
                plan.sizes,
                plan,
                lambda: [_one(singles[x], operands, ends, plan) for x in together.roles],
            )
            if found is not None and len(found) == len(wanted):
                return found
        found = found or {}
        return {x: found[x] if x in found else _one(plan.singles[x], operands, ends, plan) for x in wanted}

    def totals(
        self, grads: Mapping[str, Tensor], wanted: Sequence[str], operands: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.senders is None or not is_plain_eager(*self.indices):
            return {}
        layout = layout_of(self.text)
        if "w" in grads and layout.linear_text != self.text:
            # The gradient of the weights is of fewer paths.
            return {}
        some = next(iter(operands.values()))
        if torch._C._is_any_autocast_enabled() and under_autocast(some.device):
            with without_autocast(some.device):
                return self.totals(grads, wanted, operands)
        shapes = tuple([(role, t.shape, t.dtype) for role, t in operands.items()])
        edges = self.senders.shape[0], self.senders.dtype
        fixed = torch._C._get_deterministic_algorithms()
        kind = some.device, some.dtype, edges, self.num_x, self.num_z, fixed
        every = {**operands, **{f"g{left}": grad for left, grad in grads.items()}}

        def separately(roles: str) -> list[Tensor]:
            made: dict[str, Tensor] = {}
            for left, grad in grads.items():
                own = [role for role in roles if role != left]
                for role, part in self.run(own, {**operands, left: grad}, plain=True).items():
                    made[role] = made[role].add_(part) if role in made else part
            return [made[role] for role in roles]

        found: dict[str, Tensor] = {}
        for roles in of_one_kernel(layout, wanted, some.dtype):
            plan = _plan(self.text, tuple(roles), shapes, *kind, tuple(grads))
            together = plan.together
            if together is not None:
                run = partial(separately, together.roles)
                found |= together(every, self.indices, plan.sizes, plan, run) or {}
        return found

    def in_modes(self, wanted: str, operands: Mapping[str, Tensor]) -> Tensor:
        given, ends = _given(operands, wanted), (self.receivers, self.senders)
        if is_plain_eager(*given, *ends):
            return multilinear_jointly(self, wanted, dict(zip(others(wanted), given, strict=True)), plain=True)[wanted]
        if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
            return torch.ops.insum_nn.tensor_product(  # type: ignore[no-any-return]
                self.text, wanted, *given, *ends, self.num_x, self.num_z
            )
        if not torch.compiler.is_compiling() and is_transformed():
            # Transforms go through the programs, which know them; a registered operator does not.
            return self.run(wanted, operands)[wanted]
        if is_traced(*given, *ends) and not records_graph(given):
            return torch.ops.insum_nn.tensor_product_call(  # type: ignore[no-any-return]
                self.text, wanted, *given, *ends, self.num_x, self.num_z
            )
        return multilinear_jointly(self, wanted, dict(zip(others(wanted), given, strict=True)))[wanted]

    def derivative(
        self, left: str, wanted: Sequence[str], operands: Mapping[str, Tensor]
    ) -> tuple[_Sums, dict[str, Tensor]]:
        # Where the weights' gradient is differentiated again, only paths that have weights take part.
        sums = self._replace(text=layout_of(self.text).linear_text) if left == "w" else self
        if "w" in wanted and not operands["w"].numel():
            return sums, {"w": torch.zeros_like(operands["w"])}
        return sums, {}


def _single(layout: ProductLayout, role: str, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Role, int]:
    """Return what runs the statements of a role whose result has so many rows, and these rows."""
    source = role_of(layout, role, device, dtype)
    if not fits_between(rows * source.first_width):
        source = role_of(layout, role, device, dtype, staged=False)
    return source, rows


@lru_cache(maxsize=1024)
def _plan(
    text: str,
    wanted: tuple[str, ...],
    kinds: tuple[tuple[str, torch.Size, torch.dtype], ...],
    device: torch.device,
    dtype: torch.dtype,
    edges: tuple[int, torch.dtype] | None,
    num_x: int,
    num_z: int,
    fixed: bool,
    grads: tuple[str, ...] = (),
) -> _Plan:
    """Return how a call on plain tensors runs, or the sums of the gradients of several results.

    The arguments decide the shapes, dtypes and devices of the call, so that what is returned stands for them.
    """
    layout = layout_of(text)
    rows = {role: num_x if edges is None else edges[0] for role in "yw"} | {"x": num_x, "z": num_z}
    if grads:
        together = totals_of(layout, wanted, grads, device, dtype)
    else:
        together = together_of(layout, wanted, device, dtype)
    sizes = ([], []) if together is None else together.sizes(rows)
    singles = {} if grads else {role: _single(layout, role, rows[role], device, dtype) for role in wanted}
    return _Plan(together, sizes, singles)


def _one(single: tuple[Role, int], operands: Mapping[str, Tensor], ends: Edges, key: Hashable | None) -> Tensor:
    """Return a role's tensor, by its own statements."""
    source, rows = single
    return source(_given(operands, source.role), ends, rows, key)


def _given(operands: Mapping[str, Tensor], role: str) -> Given:
    first, second, third = others(role)
    return operands[first], operands[second], operands[third]


# The registered operators: how tracing, TorchScript and exported graphs see a tensor product. Dynamo and TorchScript
# keep the first; AOTAutograd, export and make_fx decompose it into torch's operations, or, on a GPU, into the second.

_SCHEMA = (
    "(str spec, str role, Tensor first, Tensor second, Tensor third, Tensor? receivers, Tensor? senders, "
    "SymInt num_x, SymInt num_z) -> Tensor"
)
torch.library.define("insum_nn::tensor_product", _SCHEMA)


@torch.library.impl("insum_nn::tensor_product", "CompositeImplicitAutograd")
def _composite(spec: str, role: str, *operands: Any) -> Tensor:
    *given, receivers, senders, num_x, num_z = operands
    sums = _Sums(spec, receivers, senders, *_counted(given[0], num_x, num_z))
    return sums.in_modes(role, dict(zip(others(role), given, strict=True)))


@torch.library.custom_op("insum_nn::tensor_product_call", mutates_args=())
def _operator(
    spec: str,
    role: str,
    first: Tensor,
    second: Tensor,
    third: Tensor,
    receivers: Tensor | None,
    senders: Tensor | None,
    num_x: int,
    num_z: int,
) -> Tensor:
    operands = dict(zip(others(role), (first, second, third), strict=True))
    return _Sums(spec, receivers, senders, *_counted(first, num_x, num_z)).run(role, operands)[role]


@_operator.register_fake
def _fake(
    spec: str,
    role: str,
    first: Tensor,
    second: Tensor,
    third: Tensor,
    receivers: Tensor | None,
    senders: Tensor | None,
    num_x: int,
    num_z: int,
) -> Tensor:
    layout = layout_of(spec)
    rows = _Sums(spec, receivers, senders, *_counted(first, num_x, num_z)).rows(role)
    if role == "w":
        batch = () if layout.spec.shared else (rows,)
        return first.new_empty(*batch, layout.spec.weight_numel)
    return first.new_empty(rows, layout.dims[role])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    spec, role, first, second, third, receivers, senders, num_x, num_z = inputs
    ctx.constants = (spec, role, *_counted(first, num_x, num_z))
    ctx.save_for_backward(first, second, third, receivers, senders)


@for_each_vector
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    spec, role, num_x, num_z = ctx.constants
    *given, receivers, senders = ctx.saved_tensors
    operands = dict(zip(others(role), given, strict=True)) | {role: grad}
    wanted = list(compress(others(role), wanted_gradients(ctx, 3, (spec, role))))
    made = joint_gradients(_Sums(spec, receivers, senders, num_x, num_z), role, wanted, operands, plain=False)
    return None, None, *(made.get(x) for x in others(role)), None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
