"""Tensor products of representations of O(3), sample by sample or along the edges of a graph.

Four tensors go by letters, their *roles*: `x` is in1 of the layers, `y` is in2, `w` the weights, `z` the output, or its
gradient where derivatives are computed. Each can be computed from the three others. Where those are passed by position
(`first`, `second`, `third`), they are in the order of `others(role)`: x y w for `z`, y w z for `x`.

How the output is computed:

1. `tensor_product`, or a layer, checks its arguments and calls `checked_product`.
2. `_Sums.in_modes` decides by what torch is doing. Under Dynamo and TorchScript the call becomes an operator that is
   registered at the end of this file. Else `multilinear` (`compiler/runtime/multilinear.py`) runs it, and records it
   for autograd as one node.
3. `_Sums.run` computes the requested roles by a `Joint` or several (`tensor_product_roles.py`), each of which runs the
   statements of one role or several: at once, or in order.
4. A role has a statement (`tensor_product_statement.py`) for each group of paths that have a mode and multiplicities in
   common. It names the tensors that it reads, and has a `program`.

The gradients are the roles of the operands that need one: `multilinear` asks `_Sums.derivative` which sums
these are, and continues at 2. Derivatives of a higher order go the same way again: the gradient of an operand of
several roles that were computed at once is a sum of roles, and of a convolution on a GPU `_Sums.totals` makes all these
sums by one kernel, or by two where none may be added up in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum_nn.compiler.api import is_plain_eager, is_transformed, multilinear, without_autocast
from insum_nn.ops.tensor_product_checks import check_operands
from insum_nn.ops.tensor_product_roles import expressions, joint_of, joints_of
from insum_nn.ops.tensor_product_spec import TensorProductSpec, layout_of, others
from insum_nn.ops.tensor_product_statement import Operands
from insum_nn.tensor_cache import same_view

__all__ = [
    "TensorProductSpec",
    "checked_product",
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
    # Where there are no weights, their device does not matter.
    weight = weight.to(x.device)
    num_x = x.shape[0]
    ends = () if receivers is None or senders is None else (receivers, senders)
    num_z = num_receivers if ends and num_receivers is not None else num_x
    return _Sums(text, ends, num_x, num_z).in_modes("z", {"x": x, "y": y, "w": weight})


def tensor_product_right(spec: TensorProductSpec | str, y: Tensor, weight: Tensor) -> Tensor:
    """Evaluate all of a tensor product but its first input.

        B[z,I[p,u],K[p,w]] += CG[p] * Y[z,J[p,v]] * W[L[p],u,v,w]

    Source: `e3nn.o3.TensorProduct.right`.

    Args:
        spec: the representations and paths, or their JSON.
        y: (z, dim of in2); differentiable.
        weight: (numel,) if the spec shares weights, else (z, numel); differentiable.

    Returns:
        (z, dim of in1, dim of out); multiplied by `x` it gives the tensor product of `x` and `y`.

    Raises:
        UnsupportedModeError: a path is of a mode with pairs, which couple the copies of both inputs.

    >>> from insum_nn.structure.irreps import Entry, Path
    >>> double = Path(0, 0, 0, "uuu", False, 2.0, (1,))
    >>> scalar = (Entry(1, 0, 1),)
    >>> spec = TensorProductSpec(scalar, scalar, scalar, (double,), shared=True)
    >>> tensor_product_right(spec, torch.ones(1, 1), torch.zeros(0))
    tensor([[[2.]]])
    """
    text = spec if isinstance(spec, str) else spec.to_json()
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
        return torch.ops.insum_nn.tensor_product_right(text, y, weight)  # type: ignore[no-any-return]
    return _right(text, y, weight)


Factors = Mapping[str, Tensor]
# Stands for a number of rows: as many as the operator's first tensor has. Only used where the output is computed, whose
# first tensor is `x`.
_OF_X = -1


class _Sums(NamedTuple):
    """The sums of a tensor product over its samples or edges, one for each role.

    Attributes:
        kind: the spec's JSON.
        indices: the receivers and the senders of edges; none where there are no edges.
        num_x: rows of the first input.
        num_z: rows of the output.
    """

    kind: str
    indices: tuple[Tensor, ...]
    num_x: int
    num_z: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each role: of nodes for the first input and the output, else of edges or samples."""
        count = self.indices[1].shape[0] if self.indices else self.num_x
        return {"x": self.num_x, "y": count, "w": count, "z": self.num_z}

    def run(
        self,
        requested: Sequence[str],
        operands: Factors,
        initial: Tensor | None = None,
        *,
        plain: bool = False,
        grads: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        some = next(iter(operands.values()))
        read: Operands = {**operands, **dict(zip(("Dst", "Src"), self.indices, strict=False))}
        plain, rows, found = plain or is_plain_eager(*read.values()), self.rows, dict[str, Tensor]()
        with without_autocast(some.device):
            for joint in joints_of(layout_of(self.kind), requested, some.device, some.dtype, grads):
                found |= joint(read, rows, plain=plain, in_order=not grads)
        return found

    def totals(self, grads: Factors, requested: Sequence[str], operands: Factors) -> dict[str, Tensor]:
        # The gradient of the weights may be of fewer paths.
        fewer = "w" in grads and self.derivative("w").kind != self.kind
        if fewer or not self.indices or not is_plain_eager(*self.indices):
            return {}
        every = {**operands, **{f"g{left}": grad for left, grad in grads.items()}}
        return self.run(requested, every, plain=True, grads=tuple(grads))

    def in_modes(self, requested: str, operands: Factors, initial: Tensor | None = None) -> Tensor:
        factors = {role: operands[role] for role in others(requested)}
        if is_plain_eager(*factors.values(), *self.indices):
            sums = self
            if self.indices:
                # Layers after each other get other views of the same edges, as a row of `edge_index` is.
                sums = self._replace(indices=(same_view(self.indices[0]), same_view(self.indices[1])))
            return multilinear(sums, requested, factors, plain=True)[requested]
        if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
            return torch.ops.insum_nn.tensor_product(  # type: ignore[no-any-return]
                self.kind, requested, *factors.values(), *(self.indices or (None, None)), self.num_x, self.num_z
            )
        if not torch.compiler.is_compiling() and is_transformed():
            # Transforms go through the programs, which know them; a registered operator does not.
            return self.run(requested, operands)[requested]
        return multilinear(self, requested, factors)[requested]

    def derivative(self, left: str) -> _Sums:
        # Where the weights' gradient is differentiated again, only paths that have weights take part.
        return self._replace(kind=layout_of(self.kind).linear_text) if left == "w" else self


# The registered operators: how Dynamo and TorchScript see tensor products. AOTAutograd, export and make_fx decompose
# them into what their statements become.

torch.library.define(
    "insum_nn::tensor_product",
    "(str spec, str role, Tensor first, Tensor second, Tensor third, Tensor? receivers, Tensor? senders, "
    "SymInt num_x, SymInt num_z) -> Tensor",
)
torch.library.define("insum_nn::tensor_product_right", "(str spec, Tensor y, Tensor weight) -> Tensor")


@torch.library.impl("insum_nn::tensor_product", "CompositeImplicitAutograd")
def _composite(spec: str, role: str, *operands: Any) -> Tensor:
    *given, receivers, senders, num_x, num_z = operands
    # Symbolic numbers are never compared.
    rows = [given[0].shape[0] if isinstance(n, int) and n == _OF_X else n for n in (num_x, num_z)]
    ends = () if receivers is None else (receivers, senders)
    return _Sums(spec, ends, *rows).in_modes(role, dict(zip(others(role), given, strict=True)))


def _right(spec: str, y: Tensor, weight: Tensor) -> Tensor:
    with without_autocast(y.device):
        return joint_of(layout_of(spec), "b", y.device, y.dtype)({"y": y, "w": weight}, {"b": y.shape[0]})["b"]


torch.library.impl("insum_nn::tensor_product_right", "CompositeImplicitAutograd", _right)
