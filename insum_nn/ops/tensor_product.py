"""Tensor products of representations of O(3), sample by sample or along the edges of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.api import Explanation
from insum_nn.ops.tensor_product_form import Form, form_of
from insum_nn.ops.tensor_product_right import tensor_product_right
from insum_nn.ops.tensor_product_spec import TensorProductSpec, others
from insum_nn.ops.tensor_product_statement import Statement

__all__ = ["TensorProductSpec", "explain_tensor_product", "expressions", "tensor_product", "tensor_product_right"]


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

        Z[z,k,w] += CG[k,r,q] * X[z,I[k,r,q],u] * Y[z,J[k,r,q],v] * W[r,u,v,w]
        Z[Dst[e],k,u] += CG[k,r,q] * X[Src[e],I[k,r,q],u] * Y[e,J[k,r,q]] * W[e,L[k,r],u]

    The first line is a mode that mixes multiplicities, the second one that does not, along edges. `k` counts the
    components of the output, `r` the paths that end there, `q` the non-zero coefficients of one path; `I`, `J`, `L`
    and `CG` are static. `X`, `Y` and `Z` stand for a representation's entries of one multiplicity side by side.

    Source: Geiger and Smidt, e3nn (2022), section 4; Bharadwaj, Glover, Buluc, Demmel, An Efficient Sparse Kernel
    Generator for O(3)-Equivariant Deep Networks (2025), eq. (2.1).

    Args:
        spec: the representations and paths, or their JSON.
        x: (z, dim of in1), or (n, dim of in1) along edges; differentiable.
        y: (z, dim of in2), or (e, dim of in2); differentiable.
        weight: (numel,) if the spec shares weights, else (z, numel) or (e, numel); differentiable.
        receivers: `Dst`, (e,), along edges only.
        senders: `Src`, (e,), along edges only.
        num_receivers: rows of the result along edges; default the rows of `x`.

    Returns:
        (z, dim of out), or (num_receivers, dim of out). Derivatives of all orders are tensor products themselves.

    Raises:
        InsumRangeError: an edge points outside the nodes.

    >>> from insum_nn.structure.irreps import Entry, Path
    >>> dot = Path(0, 0, 0, "uuw", False, 3 ** 0.5, (1, 1))
    >>> spec = TensorProductSpec((Entry(1, 1, -1),), (Entry(1, 1, -1),), (Entry(1, 0, 1),), (dot,), shared=True)
    >>> product = tensor_product(spec, torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, 2.0]]), torch.zeros(0))
    >>> round(product.item(), 4)
    7.0
    """
    text = spec if isinstance(spec, str) else spec.to_json()
    num_x = x.shape[0]
    num_z = (num_x if num_receivers is None else num_receivers) if senders is not None else num_x
    return torch.ops.insum_nn.tensor_product(text, "z", x, y, weight, receivers, senders, num_x, num_z)


def expressions(spec: TensorProductSpec, role: str = "z") -> tuple[str, ...]:
    """The statements of a spec; of the output, or of the gradient of `x`, `y` or `w`."""
    return tuple(statement.expression for statement in form_of(spec.to_json()).statements(role))


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
    """What becomes of one statement of the output on these tensors."""
    form = form_of(spec.to_json())
    chosen = form.statements("z")[statement]
    call = _Call(form, "z", (x, y, weight), receivers, senders)
    return chosen.program.explain(tensors=call.arguments(chosen), out_shape=chosen.out_shape(x.shape[0]))


class _Call:
    """Runs the statements of one role on tensors as they come, and puts the result together as it is expected."""

    def __init__(
        self, form: Form, role: str, given: tuple[Tensor, ...], receivers: Tensor | None, senders: Tensor | None
    ) -> None:
        self.form = form
        self.role = role
        self.operands = dict(zip(others(role), given, strict=True))
        self.edges = {} if receivers is None or senders is None else {"Dst": receivers, "Src": senders}
        anchor = given[0]
        self.device, self.dtype = anchor.device, anchor.dtype
        self._packed: dict[tuple[str, int], Tensor] = {}

    def packed(self, operand: str, mul: int) -> Tensor:
        """The operand's entries of one multiplicity: (z, component, mul)."""
        key = (operand, mul)
        if key not in self._packed:
            tensor = self.operands[operand]
            start, order = self.form.packing(operand, mul, self.device)
            if start is not None:
                # Single copies side by side already lie as they are wanted.
                flat = tensor.narrow(1, start, order.numel())
            else:
                flat = tensor.index_select(1, order)
            self._packed[key] = flat.reshape(tensor.shape[0], order.numel() // mul, mul)
        return self._packed[key]

    def arguments(self, statement: Statement) -> dict[str, Tensor]:
        """Everything that a statement reads, by name."""
        group = statement.group
        named = dict(statement.tables_on(self.device, self.dtype))
        for operand, mul in zip("xyz", group.muls, strict=True):
            if operand not in self.operands:
                continue
            packed = self.packed(operand, mul)
            if statement.whole and operand == "z":
                (number,) = group.entries
                packed = packed.narrow(1, self.form.components["z"][number], self.form.entries["z"][number].size)
            name = operand.upper() if operand != "z" else "dZ"
            named[name] = packed.reshape(*packed.shape[:2], *group.shape(operand))
        if "w" in self.operands and statement.weight is not None:
            named["W"] = statement.weight.operand(self.operands["w"])
        return named | self.edges

    def result(self, statement: Statement, size: int) -> Tensor:
        return statement.program(tensors=self.arguments(statement), out_shape=statement.out_shape(size))

    def run(self, size: int, *, split: bool) -> Tensor:
        """The role's tensor, of `size` rows; `split` as for `Form.statements`."""
        statements = self.form.statements(self.role, split=split)
        if self.role == "w":
            return self._weights(statements, size)
        if not statements:
            return torch.zeros(size, self.form.dims[self.role], dtype=self.dtype, device=self.device)
        columns = [self.result(statement, size).reshape(size, statement.width) for statement in statements]
        orders, needs_zero = self.form.unpacking(self.role, self.device, split=split)
        if needs_zero:
            columns.append(torch.zeros(size, 1, dtype=self.dtype, device=self.device))
        side_by_side = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        total: Tensor | None = None
        for order in orders:
            part = side_by_side if order is None else side_by_side.index_select(1, order)
            total = part if total is None else total.add_(part)
        # The widest representation may still have no components at all.
        return side_by_side if total is None else total

    def _weights(self, statements: tuple[Statement, ...], size: int) -> Tensor:
        batch = () if self.form.spec.shared else (size,)
        parts: dict[int, Tensor] = {}
        for statement in statements:
            paths = len(statement.group.paths)
            blocks = self.result(statement, size).reshape(*batch, paths, statement.width // paths)
            parts |= dict(zip(statement.group.paths, blocks.unbind(-2), strict=True))
        zeros = torch.zeros((), dtype=self.dtype, device=self.device)
        columns = [
            parts[number] if number in parts else zeros.expand(*batch, path.numel)
            for number, path in enumerate(self.form.spec.paths)
            if path.weighted and path.numel
        ]
        return torch.cat(columns, -1) if columns else zeros.new_zeros(*batch, 0)


# The registered operator: how tracing, TorchScript and exported graphs see a tensor product.


@torch.library.custom_op("insum_nn::tensor_product", mutates_args=())
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
    form = form_of(spec)
    call = _Call(form, role, (first, second, third), receivers, senders)
    rows = _rows(role, call.operands, senders, num_x, num_z)
    with torch.autocast(first.device.type, enabled=False):
        return call.run(rows, split=first.device.type == "cpu")


def _rows(role: str, operands: Mapping[str, Tensor], senders: Tensor | None, num_x: int, num_z: int) -> int:
    """Rows of a role: nodes for the first input and the output, edges for the rest."""
    if role == "x":
        return num_x
    if role == "z":
        return num_z
    return senders.shape[0] if senders is not None else operands["x"].shape[0]


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
    operands = dict(zip(others(role), (first, second, third), strict=True))
    rows = _rows(role, operands, senders, num_x, num_z)
    if role == "w":
        batch = () if form.spec.shared else (rows,)
        return first.new_empty(*batch, form.spec.weight_numel)
    return first.new_empty(rows, form.dims[role])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    spec, role, first, second, third, receivers, senders, num_x, num_z = inputs
    ctx.constants = (spec, role, num_x, num_z)
    ctx.save_for_backward(first, second, third, receivers, senders)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    spec, role, num_x, num_z = ctx.constants
    *given, receivers, senders = ctx.saved_tensors
    operands = dict(zip(others(role), given, strict=True)) | {role: grad}
    if role == "w":
        # What a gradient of the weights depends on are the paths that have weights.
        spec = form_of(spec).linear_text
    gradients: list[Tensor | None] = []
    for position, wanted in enumerate(others(role)):
        if not ctx.needs_input_grad[2 + position]:
            gradients.append(None)
        elif wanted == "w" and given[position].numel() == 0:
            gradients.append(torch.zeros_like(given[position]))
        else:
            arguments = [operands[name] for name in others(wanted)]
            gradients.append(
                torch.ops.insum_nn.tensor_product(spec, wanted, *arguments, receivers, senders, num_x, num_z)
            )
    return None, None, *gradients, None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
