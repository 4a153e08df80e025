"""Tensor products of representations of O(3), sample by sample or along the edges of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import (
    Explanation,
    cold,
    for_each_vector,
    is_plain_eager,
    is_traced,
    is_transformed,
    rehearse_gradients,
    writes_graph,
)
from insum_nn.ops.modes import wanted_gradients, without_autocast
from insum_nn.ops.tensor_product_checks import check_operands
from insum_nn.ops.tensor_product_direct import Direct, direct_of
from insum_nn.ops.tensor_product_form import Form, form_of
from insum_nn.ops.tensor_product_joint import joint_roles, roles_by_path
from insum_nn.ops.tensor_product_plan import Plan, plan_of
from insum_nn.ops.tensor_product_right import tensor_product_right
from insum_nn.ops.tensor_product_spec import ROLES, TensorProductSpec, others

__all__ = [
    "TensorProductSpec",
    "checked_product",
    "explain_tensor_product",
    "expressions",
    "tensor_product",
    "tensor_product_right",
]


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

        Z[z,k,w] += CG[k,r,q] * X[z,I[k,r,q],u] * Y[z,J[k,r,q],v] * W[L[k,r],u,v,w]
        Z[Dst[e],k,u] += CG[k,r,q] * X[Src[e],I[k,r,q],u] * Y[e,J[k,r,q]] * W[e,L[k,r],u]

    The first line is a mode that mixes multiplicities, the second one that does not, along edges. `k` counts the
    components of the output, `r` the paths that end there, `q` the non-zero coefficients of one path; `I`, `J`, `L`
    and `CG` are static. `X`, `Y` and `Z` stand for a representation's entries of one multiplicity side by side.

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
        InsumShapeError: an operand has another shape than the spec and the edges ask for.
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
        check_operands(form_of(text), x, y, weight, receivers, senders, num_receivers)
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
        # A trace keeps sizes that are passed on as numbers: the operator finds them in its operands.
        given = _OF_X if num_receivers is None else num_receivers
        return torch.ops.insum_nn.tensor_product(  # type: ignore[no-any-return]
            text, "z", x, y, weight, receivers, senders, _OF_X, given
        )
    num_x = x.shape[0]
    num_z = (num_x if num_receivers is None else num_receivers) if senders is not None else num_x
    return _product(text, "z", (x, y, weight), receivers, senders, num_x, num_z)


def expressions(spec: TensorProductSpec, role: str = "z") -> tuple[str, ...]:
    """The statements of a spec; of the output, or of the gradient of `x`, `y` or `w`."""
    form, cpu = form_of(spec.to_json()), torch.device("cpu")
    return tuple(statement.expression for statement in _source(form, role, cpu, torch.float32).statements)


def _source(form: Form, role: str, device: torch.device, dtype: torch.dtype) -> Direct | Plan:
    """The statements of a role, those that run where no mode follows the call."""
    if _splits(device):
        return roles_by_path(form, role, device, dtype).sources[0]
    direct = direct_of(form, role, device, dtype)
    return direct or plan_of(form, role, device, dtype, split=False, staged=False, in_place=role == "z")


def explain_tensor_product(
    spec: TensorProductSpec,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    receivers: Tensor | None = None,
    senders: Tensor | None = None,
    *,
    statement: int = 0,
) -> Explanation:
    """What becomes of one statement of the output on these tensors, and what became of the gradients last."""
    form = form_of(spec.to_json())
    source, edges = _source(form, "z", x.device, x.dtype), (receivers, senders)
    given = (x, y, weight)
    nodes = receivers, senders, x.shape[0], x.shape[0]
    if _splits(x.device) and _by_paths(form, "z", dict(zip("xyw", given, strict=True)), nodes, _key(given)) is None:
        source = plan_of(form, "z", x.device, x.dtype, split=True, staged=False)
    chosen = source.statements[statement]
    named = source.all_arguments(given, edges, {})[statement]
    explained = chosen.program.explain(tensors=named, out_shape=chosen.out_shape(x.shape[0]))
    joint = None if _splits(x.device) else joint_roles(form, "xyw", x.device, x.dtype)
    if joint is None or not joint.joint.reason:
        return explained
    # What became of the gradients where they were made last.
    how, why = joint.joint.reason.split(": ", 1)
    return explained.with_choice("gradients", f"of {', '.join(joint.roles)} {how}", why)


# In place of how many rows the first input or the output has: as many as the first input, which is the first operand.
_OF_X = -1


def _counted(first: Tensor, num_x: int | torch.SymInt, num_z: int | torch.SymInt) -> tuple[Any, Any]:
    """The rows of the first input and of the output; symbolic ones are never compared."""
    rows = first.shape[0] if isinstance(num_x, int) and num_x == _OF_X else num_x
    return rows, rows if isinstance(num_z, int) and num_z == _OF_X else num_z


# Bytes between two products of library calls.
AT_ONCE = 1 << 24
# Numbers between the two steps of a gradient at most: what they cost in memory.
_MOST_BETWEEN = 2**28


def _splits(device: torch.device) -> bool:
    """Whether the statements are to be those for library calls; see `Form.statements`."""
    return device.type == "cpu"


def _run(
    form: Form,
    role: str,
    given: tuple[Tensor, Tensor, Tensor],
    receivers: Tensor | None,
    senders: Tensor | None,
    num_x: int,
    num_z: int,
    *,
    key: Hashable | None = None,
) -> Tensor:
    """A role's tensor, without a record for gradients.

    `key` is given where no mode is active and all tensors are plain ones: it decides their shapes, dtypes and devices.
    """
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(given[0].device.type):
        with torch.autocast(given[0].device.type, enabled=False):
            return _run(form, role, given, receivers, senders, num_x, num_z, key=key)
    device, dtype = given[0].device, given[0].dtype
    rows = _rows(role, senders, num_x, num_z)
    split = _splits(device)
    if split:
        operands = dict(zip(others(role), given, strict=True))
        by_paths = _by_paths(form, role, operands, (receivers, senders, num_x, num_z), key)
        if by_paths is not None:
            return by_paths[role]
    staged = role == "y" and not split
    if not split:
        direct = direct_of(form, role, device, dtype)
        if direct is not None and rows * direct.part_width <= _MOST_BETWEEN:
            return direct(given, rows, key)
    plan = plan_of(form, role, device, dtype, split=split, staged=staged, in_place=role == "z" and not split)
    if staged and rows * plan.feed_width > _MOST_BETWEEN:
        plan = plan_of(form, role, device, dtype, split=split, staged=False)
    if writes_graph(given):
        return plan.in_graph()(given, (receivers, senders), rows)
    if split and senders is None:
        return _in_parts(plan, given, rows)
    return plan(given, (receivers, senders), rows)


def _by_paths(
    form: Form, roles: Sequence[str], operands: Mapping[str, Tensor], edges: Edges, key: Hashable | None
) -> dict[str, Tensor] | None:
    """Roles that the compiler computes together, path by path; `None` where it does not, or a mode follows the call."""
    receivers, senders, *nodes = edges
    some = next(iter(operands.values()))
    if key is None or not is_plain_eager(*operands.values(), receivers, senders):
        return None
    rows = [_rows(role, senders, *nodes) for role in roles]
    return roles_by_path(form, roles, some.device, some.dtype)(operands, (receivers, senders), rows, (key, *nodes))


def _in_parts(plan: Plan, given: tuple[Tensor, Tensor, Tensor], rows: int) -> Tensor:
    """A role's tensor, a few of the samples at a time where all of them need much memory in between."""
    count = -(-rows * plan.row_bytes // AT_ONCE)
    if count <= 1:
        return plan(given, (None, None), rows)
    shared = plan.form.spec.shared
    size = -(-rows // min(count, rows))
    names = others(plan.role)
    parts: list[Tensor] = []
    for start in range(0, rows, size):
        own = min(size, rows - start)
        some = tuple(t if x == "w" and shared else t.narrow(0, start, own) for x, t in zip(names, given, strict=True))
        parts.append(plan(some, (None, None), own))
    return sum(parts[1:], parts[0]) if plan.role == "w" and shared else torch.cat(parts)


def _rows(role: str, senders: Tensor | None, num_x: int, num_z: int) -> int:
    """Rows of a role: nodes for the first input and the output, edges for the rest; without edges all have as many."""
    if role == "x":
        return num_x
    if role == "z":
        return num_z
    return num_x if senders is None else senders.shape[0]


def _product(
    text: str,
    role: str,
    given: tuple[Tensor, Tensor, Tensor],
    receivers: Tensor | None,
    senders: Tensor | None,
    num_x: int,
    num_z: int,
) -> Tensor:
    """A role's tensor, differentiable."""
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
        return torch.ops.insum_nn.tensor_product(text, role, *given, receivers, senders, num_x, num_z)
    if not torch.compiler.is_compiling() and is_transformed():
        # Transforms go through the programs, which know them; a registered operator does not.
        return _run(form_of(text), role, given, receivers, senders, num_x, num_z)
    if is_traced(*given, receivers, senders) and not writes_graph(given):
        return torch.ops.insum_nn.tensor_product_call(text, role, *given, receivers, senders, num_x, num_z)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _Product.apply(text, role, *given, receivers, senders, num_x, num_z)  # type: ignore[no-any-return]
    return _run(form_of(text), role, given, receivers, senders, num_x, num_z, key=_key(given))


def _key(given: tuple[Tensor, Tensor, Tensor]) -> Hashable:
    """What decides the shapes of a product of plain tensors and of its gradients, besides its form."""
    first, second, third = given
    return first.shape, second.shape, third.shape, first.dtype, second.dtype, third.dtype, first.device


class _Product(torch.autograd.Function):
    """The recorded product of plain tensors: a registered operator costs the host more than a small product."""

    @staticmethod
    def forward(
        ctx: Any,
        text: str,
        role: str,
        first: Tensor,
        second: Tensor,
        third: Tensor,
        receivers: Tensor | None,
        senders: Tensor | None,
        num_x: int,
        num_z: int,
    ) -> Tensor:
        given = first, second, third
        ctx.constants = text, role, num_x, num_z, _key(given)
        ctx.save_for_backward(*given, receivers, senders)
        result = _run(form_of(text), role, given, receivers, senders, num_x, num_z, key=ctx.constants[-1])
        if cold.due:
            rehearse_gradients(_Product, ctx, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grads[0])


# The registered operators: how tracing, TorchScript and exported graphs see a tensor product. Dynamo and TorchScript
# keep the first; AOTAutograd, export and make_fx decompose it into torch's operations, or, on a GPU, into the second.

_SCHEMA = (
    "(str spec, str role, Tensor first, Tensor second, Tensor third, Tensor? receivers, Tensor? senders, "
    "SymInt num_x, SymInt num_z) -> Tensor"
)
torch.library.define("insum_nn::tensor_product", _SCHEMA)


@torch.library.impl("insum_nn::tensor_product", "CompositeImplicitAutograd")
def _composite(spec: str, role: str, *operands: Any) -> Tensor:
    first, second, third, receivers, senders, num_x, num_z = operands
    return _product(spec, role, (first, second, third), receivers, senders, *_counted(first, num_x, num_z))


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
    given = first, second, third
    num_x, num_z = _counted(first, num_x, num_z)
    return _run(form_of(spec), role, given, receivers, senders, num_x, num_z, key=_key(given))


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
    form = form_of(spec)
    rows = _rows(role, senders, *_counted(first, num_x, num_z))
    if role == "w":
        batch = () if form.spec.shared else (rows,)
        return first.new_empty(*batch, form.spec.weight_numel)
    return first.new_empty(rows, form.dims[role])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    spec, role, first, second, third, receivers, senders, num_x, num_z = inputs
    ctx.constants = (spec, role, *_counted(first, num_x, num_z), None)
    ctx.save_for_backward(first, second, third, receivers, senders)


@for_each_vector
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    spec, role, num_x, num_z, key = ctx.constants
    *given, receivers, senders = ctx.saved_tensors
    operands = dict(zip(others(role), given, strict=True)) | {role: grad}
    wanted = list(compress(others(role), wanted_gradients(ctx, 3, (spec, role))))
    made = _gradients(spec, role, wanted, operands, (receivers, senders, num_x, num_z), key)
    return None, None, *(made.get(x) for x in others(role)), None, None, None, None


# Receivers, senders, and how many nodes there are of either.
Edges = tuple[Tensor | None, Tensor | None, int, int]


def _gradients(
    text: str, role: str, wanted: Sequence[str], operands: Mapping[str, Tensor], edges: Edges, key: Hashable | None
) -> dict[str, Tensor]:
    """The gradients of a role's operands, with the gradient of the role itself among the operands.

    Args:
        text: the spec's JSON.
        role: what was computed.
        wanted: the roles whose gradients are to be made.
        operands: of all four roles.
        edges: see `Edges`.
        key: what decides the shapes of all operands, where they are plain tensors.
    """
    if role == "w":
        # What a gradient of the weights depends on are the paths that have weights.
        text = form_of(text).linear_text
    found = {"w": torch.zeros_like(operands["w"])} if "w" in wanted and not operands["w"].numel() else {}
    wanted = [x for x in wanted if x not in found]
    if key is None or not is_plain_eager(*operands.values()):
        rest = {x: _product(text, x, _given(operands, x), *edges) for x in wanted}
    elif torch.is_grad_enabled() and len(wanted) > 1 and any(t.requires_grad for t in operands.values()):
        roles = "".join(wanted)
        rest = dict(zip(roles, _Products.apply(text, roles, *(operands[x] for x in ROLES), *edges), strict=True))  # type: ignore[arg-type]
    elif torch.is_grad_enabled():
        rest = {x: _product(text, x, _given(operands, x), *edges) for x in wanted}
    else:
        # Most backward passes are not recorded in turn, nor followed by a mode.
        rest = _run_all(text, wanted, operands, edges, (role, key))
    return found | rest


def _given(operands: Mapping[str, Tensor], role: str) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = others(role)
    return operands[first], operands[second], operands[third]


def _run_all(
    text: str, roles: Sequence[str], operands: Mapping[str, Tensor], edges: Edges, key: Hashable
) -> dict[str, Tensor]:
    """The tensors of several roles, without a record for gradients."""
    form = form_of(text)
    receivers, senders, num_x, num_z = edges
    found: dict[str, Tensor] = {}
    some = operands["x"]
    if len(roles) > 1 and _splits(some.device):
        with without_autocast(some.device):
            by_paths = _by_paths(form, roles, operands, edges, key)
        if by_paths is not None:
            return by_paths
    elif len(roles) > 1 and senders is not None:
        joint = joint_roles(form, roles, some.device, some.dtype)
        if joint is not None:
            rows = [_rows(x, senders, num_x, num_z) for x in joint.roles]

            def apart() -> list[Tensor]:
                return [_run(form, x, _given(operands, x), *edges, key=(x, key)) for x in joint.roles]

            with without_autocast(some.device):
                made = joint(operands, (receivers, senders), rows, key, apart)
            found |= dict(zip(joint.roles, made, strict=True))
    for x in roles:
        if x not in found:
            found[x] = _run(form, x, _given(operands, x), *edges, key=(x, key))
    return found


class _Products(torch.autograd.Function):
    """Several roles of plain tensors, recorded: the gradients of a product that are differentiated in turn."""

    @staticmethod
    def forward(
        ctx: Any, text: str, roles: str, x: Tensor, y: Tensor, w: Tensor, z: Tensor, *edges: Any
    ) -> tuple[Tensor, ...]:
        operands = dict(zip(ROLES, (x, y, w, z), strict=True))
        receivers, senders, *counts = edges
        key = (roles, *((t.shape, t.dtype) for t in operands.values()), x.device)
        ctx.constants = text, roles, counts, key
        ctx.save_for_backward(*operands.values(), receivers, senders)
        ctx.set_materialize_grads(False)
        made = _run_all(text, roles, operands, edges, key)  # type: ignore[arg-type]
        results = tuple(made[role] for role in roles)
        if cold.due:
            rehearse_gradients(_Products, ctx, *results)
        return results

    @staticmethod
    @for_each_vector
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        text, roles, counts, key = ctx.constants
        *given, receivers, senders = ctx.saved_tensors
        operands = dict(zip(ROLES, given, strict=True))
        total: dict[str, Tensor] = {}
        asked = list(compress(ROLES, wanted_gradients(ctx, 4, (text, roles))))
        for role, grad in zip(roles, grads, strict=True):
            if grad is None:
                continue
            wanted = [x for x in asked if x != role]
            if not wanted:
                continue
            edges = (receivers, senders, *counts)
            for x, part in _gradients(text, role, wanted, {**operands, role: grad}, edges, key).items():
                total[x] = total[x] + part if x in total else part
        return None, None, *(total.get(x) for x in ROLES), None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
