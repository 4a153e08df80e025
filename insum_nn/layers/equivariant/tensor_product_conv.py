"""A graph convolution by tensor products, gather and scatter included: OpenEquivariance's layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.errors import raise_collected
from insum_nn.faults import Faults
from insum_nn.layers.equivariant.adoption import ProductLayer
from insum_nn.layers.equivariant.checks import InputError, fits_plainly
from insum_nn.layers.equivariant.linear import axes_of, turned
from insum_nn.layers.equivariant.tensor_product import TensorProduct
from insum_nn.layers.statement_layer import renamed, with_attributes
from insum_nn.ops.statements import to_autocast, under_autocast
from insum_nn.ops.tensor_product import TensorProductSpec, checked_product
from insum_nn.ops.tensor_product_checks import check_ends, check_kinds, check_shapes

__all__ = ["TensorProductConv"]


class TensorProductConv(ProductLayer, torch.nn.Module):
    """Messages along edges, each the tensor product of a sender's features and an edge's, summed at the receivers.

        Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p]] * W[e,L[p],u]

    (here with mode uvu and edge features of multiplicity 1; any instructions will do). Neither the gathered features
    nor the messages are ever stored for all edges.

    Source: Bharadwaj, Glover, Buluc, Demmel, An Efficient Sparse Kernel Generator for O(3)-Equivariant Deep Networks
    (2025), section 3.5.

    Args:
        irreps_in1: representation of the nodes; or a whole problem: any object with the attributes `irreps_in1`,
            `irreps_in2`, `irreps_out`, `instructions` (normalised) and `shared_weights`, such as OpenEquivariance's
            `TPProblem` or a tensor product of e3nn. Its weights and its `layout`, if it has any, become this layer's.
        irreps_in2: representation of the edges.
        irreps_out: representation of the result.
        instructions: as for `TensorProduct`.
        deterministic: the same bits at every run, on a GPU too, as with `options=Options(deterministic=True)`.
        layout: order of an entry's numbers in `X`, `Y` and the result, as of a `TPProblem`: `"mul_ir"` (copies,
            components), which is e3nn's and the default, or `"ir_mul"` (components, copies). Weights have one order,
            which is e3nn's. The module `tensor_product` takes e3nn's layout in any case.
        torch_op: accepted, as OpenEquivariance takes it; the layer always is a registered operator.
        use_opaque: accepted, as OpenEquivariance takes it.
        kahan: compensated summation, which is not offered.
        options: compile options.
        **kwargs: of `TensorProduct`; weights belong to the edges (`shared_weights=False`) unless told otherwise.

    >>> from insum_nn.layers.equivariant.tensor_product_conv import TensorProductConv
    >>> conv = TensorProductConv("8x0e", "0e + 1o", "8x0e + 8x1o", [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)])
    >>> conv
    TensorProductConv(8x0e x 1x0e+1x1o -> 8x0e+8x1o | 16 paths | 16 weights)
      Z[Dst[e],K[p,u]] += CG[p] * X[Src[e],I[p],u] * Y[e,J[p]] * W[e,L[p],u]
    >>> receivers, senders = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
    >>> conv(torch.randn(3, 8), torch.randn(3, 4), torch.randn(3, 16), receivers, senders).shape
    torch.Size([3, 32])
    """

    # TorchScript compiles properties unless told otherwise.
    __jit_unused_properties__ = ["spec", "deterministic", "weight_numel", "irreps_out", "options"]  # noqa: RUF012

    def __init__(
        self,
        irreps_in1: Any,
        irreps_in2: Any = None,
        irreps_out: Any = None,
        instructions: Sequence[tuple[Any, ...]] | None = None,
        *,
        deterministic: bool = False,
        layout: str | None = None,
        torch_op: bool = True,
        use_opaque: bool = False,
        kahan: bool = False,
        options: Options = DEFAULT,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if kahan:
            raise InputError(
                "compensated (Kahan) summation is not offered",
                details=["fp16 and bf16 are summed in float32; other types in their own"],
                fix="leave kahan out, or convolve in float64.",
            )
        rest = {"irreps_in2": irreps_in2, "irreps_out": irreps_out, "instructions": instructions}
        missing = [name for name, value in rest.items() if value is None]
        if len(missing) == len(rest):
            self.tensor_product = _from_problem(irreps_in1)
            layout = layout or getattr(irreps_in1, "layout", None)
        elif missing:
            raise InputError(
                f"TensorProductConv: {' and '.join(missing)} is missing",
                details=["expected irreps_in1, irreps_in2, irreps_out and instructions, or one problem alone"],
                fix='pass the rest, such as instructions=[(0, 0, 0, "uvu", True)], or one problem alone.',
            )
        else:
            kwargs.setdefault("shared_weights", bool(kwargs.get("internal_weights")))
            self.tensor_product = TensorProduct(irreps_in1, **rest, **kwargs)
        self.layout: str = layout or "mul_ir"
        self.options = replace(require_options(options), deterministic=True) if deterministic else options

    def _write_statements(self) -> None:
        self._text: str = self.spec.to_json()
        product = self.tensor_product
        parts = [axes_of(part, self.layout) for part in (product.irreps_in1, product.irreps_in2, product.irreps_out)]
        self._turned = [*parts[:2], [(mul, size) for size, mul in parts[2]]]

    @property
    def spec(self) -> TensorProductSpec:
        """Representations and normalised paths, without numbers."""
        own = self.tensor_product.spec
        return replace(own, convolution=True, layout=self.layout, masked=False, options=self.options)

    @property
    def deterministic(self) -> bool:
        """Whether every run gives the same bits."""
        return self.options.deterministic

    @property
    def weight_numel(self) -> int:
        """Weights of one edge."""
        return self.tensor_product.weight_numel

    @property
    def irreps_out(self) -> Any:
        """Representation of the result."""
        return self.tensor_product.irreps_out

    def _specs(self) -> tuple[TensorProductSpec]:
        return (self.spec,)

    def __repr__(self) -> str:
        product = self.tensor_product._profiling_str.partition("(")[2]
        if self.layout != "mul_ir":
            product = f"{product.removesuffix(')')} | {self.layout})"
        return self._shown(f"{type(self).__name__}({product}")

    def reorder_weights_from_e3nn(self, weights: Tensor, has_batch_dim: bool = True) -> Tensor:
        """Return the weights unchanged: the layer's order is e3nn's. OpenEquivariance's order may differ."""
        return weights

    def reorder_weights_to_e3nn(self, weights: Tensor, has_batch_dim: bool = True) -> Tensor:
        """Return the weights unchanged."""
        return weights

    def forward(
        self,
        X: Tensor,
        Y: Tensor,
        W: Tensor | None,
        rows: Tensor,
        cols: Tensor,
        sender_perm: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        """Convolve.

        Args:
            X: (n, irreps_in1.dim) features of the senders; differentiable.
            Y: (e, irreps_in2.dim) features of the edges; differentiable.
            W: (e, weight_numel), or (weight_numel,) if weights are shared, or `None` if the layer holds them;
                differentiable.
            rows: `Dst`, (e,) receiver of each edge, int32 or int64, in any order; sorted ones are summed faster.
            cols: `Src`, (e,) sender of each edge.
            sender_perm: (e,) permutation that sorts the edges by sender. OpenEquivariance needs it to be
                deterministic; here the result does not depend on it, and only its shape is checked.
            num_nodes: receivers; default as many as senders.

        Returns:
            (num_nodes, irreps_out.dim); 0 where no edge arrives.

        Raises:
            InputError: a shape does not fit.
            InsumRangeError: an edge points outside the nodes; an end of -1 does, too.
        """
        if not torch.jit.is_scripting():
            return self._convolve(X, Y, W, rows, cols, sender_perm, num_nodes)
        # What TorchScript compiles, with e3nn's own product.
        torch._assert(rows.shape[0] == Y.shape[0] and cols.shape[0] == Y.shape[0], "rows and cols must fit Y")
        x, y = turned(X, self._turned[0]).index_select(0, cols), turned(Y, self._turned[1])
        messages = turned(self.tensor_product(x, y, W), self._turned[2])
        nodes = X.shape[0] if num_nodes is None else num_nodes
        return messages.new_zeros([nodes, messages.shape[1]]).index_add(0, rows, messages)

    def __prepare_scriptable__(self) -> Any:
        """Return a copy, for TorchScript replaces the modules in what it compiles."""
        return with_attributes(object.__new__(type(self)), self)

    # For a subclass whose `forward` takes other arguments.
    _called = renamed(forward, "_called")

    @torch.jit.unused
    def _convolve(
        self,
        X: Tensor,
        Y: Tensor,
        W: Tensor | None,
        rows: Tensor,
        cols: Tensor,
        sender_perm: Tensor | None,
        num_nodes: int | None,
    ) -> Tensor:
        product = self.tensor_product
        weight = product.weight if W is None and product.internal_weights else product._get_weights(W)
        if sender_perm is None and fits_plainly(product, X, Y, weight, (rows, cols)):
            return checked_product(self._text, X, Y, weight, rows, cols, num_nodes)
        self._check(X, Y, weight, rows, cols, sender_perm)
        x, y, weight = to_autocast(X), to_autocast(Y), to_autocast(weight)
        if not product.shared_weights and weight.shape[0] == 1 != y.shape[0]:
            weight = weight.expand(y.shape[0], -1)
        return checked_product(self._text, x, y, weight, rows, cols, num_nodes)

    def _check(
        self, X: Tensor, Y: Tensor, weight: Tensor, rows: Tensor, cols: Tensor, sender_perm: Tensor | None
    ) -> None:
        product = self.tensor_product
        edges = Y.shape[0] if Y.dim() else 0
        indices = {"rows": rows, "cols": cols} | ({} if sender_perm is None else {"sender_perm": sender_perm})
        expected: dict[str, tuple[Tensor, tuple[int | None, ...]]] = {
            "X": (X, (None, product._in1_dim)),
            "Y": (Y, (None, product._in2_dim)),
            **{name: (index, (edges,)) for name, index in indices.items()},
        }
        if not product.shared_weights and product.weight_numel:
            expected["W"] = (weight, ((1 if weight.shape[0] == 1 else edges), product.weight_numel))
        shapes, faults = Faults("Shape mismatch"), Faults()
        check_shapes(shapes, expected, edges, "edges, the rows of Y", InputError)
        factors = {"X": X, "Y": Y} | ({"W": weight} if weight.numel() else {})
        check_kinds(faults, factors, cast=under_autocast(X.device))
        check_ends(faults, indices, "X", X)
        raise_collected(shapes.found + faults.found)


def _from_problem(problem: Any) -> TensorProduct:
    """Return the tensor product of a problem whose instructions are already normalised."""
    missing = [n for n in ("irreps_in1", "irreps_in2", "irreps_out", "instructions") if not hasattr(problem, n)]
    if missing:
        raise InputError(
            f"a {type(problem).__name__} is no problem: it has no attribute {', '.join(missing)}",
            fix="pass irreps_in1, irreps_in2, irreps_out and instructions.",
            got=type(problem),
        )
    if isinstance(problem, TensorProduct):
        return problem
    if isinstance(problem, torch.nn.Module):
        return TensorProduct.from_e3nn(problem)
    rows = [tuple(i)[:5] for i in problem.instructions]
    in1, in2, out = (
        [(int(mul), (int(ir.l), int(ir.p))) for mul, ir in irreps]
        for irreps in (problem.irreps_in1, problem.irreps_in2, problem.irreps_out)
    )
    product = TensorProduct(in1, in2, out, rows, shared_weights=bool(problem.shared_weights), internal_weights=False)
    product.instructions = [
        own._replace(path_weight=float(tuple(given)[5]))
        for own, given in zip(product.instructions, problem.instructions, strict=True)
    ]
    # Setting the options writes the statements again, with the coefficients of the new instructions.
    product.options = product.options
    return product
