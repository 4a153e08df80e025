"""Drop-in replacements for the tensor products of `e3nn.o3`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum_nn.compiler.options import DEFAULT, Options
from insum_nn.faults import check_choice
from insum_nn.layers.equivariant.adoption import WeightedLayer, adopt, o3
from insum_nn.layers.equivariant.checks import InputError, batch_of, check_inputs, check_weights, fits_plainly
from insum_nn.layers.equivariant.constants import add_constants, did_compile_right, drop_constants, generate_code
from insum_nn.layers.extents import arguments_of
from insum_nn.ops.statements import to_autocast
from insum_nn.ops.tensor_product import TensorProductSpec, checked_product, tensor_product_right
from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.irreps import Entry, Path, entries_of, make_paths

__all__ = [
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "TensorProduct",
    "TensorSquare",
]

Irreps = Any


class _WithoutCode(o3.TensorProduct):
    """What e3nn's constructor makes of its arguments, but for the code: statements take its place."""

    def _codegen_register(self, funcs: object) -> None: ...


class TensorProduct(WeightedLayer, o3.TensorProduct):
    """Tensor product of two representations along chosen paths: `e3nn.o3.TensorProduct`.

        Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v,w]
        Z[z,K[p,u]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v]

    The first line is a mode that mixes multiplicities (uvw), the second one that keeps them (uvu); see `expression`
    for those of a module. `p` counts the Clebsch-Gordan coefficients that are not zero; they are static, as are the
    tables of cells and of weights. On a CPU the compiler rewrites such a statement as dense products, path by path
    where one input has single copies, of pairs of rows where both have the same; `explain` shows them.
    TorchScript compiles e3nn's own layer, with the same parameters.

    Source: Geiger and Smidt, e3nn (2022), section 4.

    Args:
        irreps_in1: representation of the first input.
        irreps_in2: representation of the second input.
        irreps_out: representation of the output.
        instructions: paths `(i_in1, i_in2, i_out, mode, has_weight[, path_weight])`.
        in1_var: variance of each entry of the first input; default 1.
        in2_var: variance of each entry of the second input; default 1.
        out_var: variance of each entry of the output; default 1.
        irrep_normalization: `"component"` (default), `"norm"` or `"none"`.
        path_normalization: `"element"` (default), `"path"` or `"none"`.
        internal_weights: hold the weights as a parameter; default whenever they are shared.
        shared_weights: one weight for all samples (default), rather than one each.
        compile_left_right: accepted; `forward` is always there.
        compile_right: accepted; `right` is always there.
        normalization: old name of `irrep_normalization`.
        _specialized_code: accepted; names the constants in the state dict as e3nn does.
        _optimize_einsums: accepted; the compiler chooses the order of products.
        options: compile options.

    Raises:
        InstructionError: a path connects what cannot be connected.
        ValueError: an unknown normalisation.

    >>> from insum_nn.layers.equivariant.tensor_product import TensorProduct
    >>> cross = TensorProduct("16x1o", "16x1o", "16x1e", [(0, 0, 0, "uuu", False)])
    >>> cross
    TensorProduct(16x1o x 16x1o -> 16x1e | 16 paths | 0 weights)
      Z[z,K[p,u]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,u]]
    >>> cross(torch.randn(8, 48), torch.randn(8, 48)).shape
    torch.Size([8, 48])
    """

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps,
        instructions: Sequence[tuple[Any, ...]],
        in1_var: Sequence[float] | Tensor | None = None,
        in2_var: Sequence[float] | Tensor | None = None,
        out_var: Sequence[float] | Tensor | None = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        compile_left_right: bool = True,
        compile_right: bool = False,
        normalization: str | None = None,
        _specialized_code: bool | None = None,
        _optimize_einsums: bool | None = None,
        *,
        options: Options = DEFAULT,
    ) -> None:
        given = arguments_of(locals())
        del given["options"]
        names = ("irreps_in1", "irreps_in2", "irreps_out")
        given |= {name: o3.Irreps(given[name]) for name in names}
        # Checked before e3nn's constructor, whose assertions have no text.
        for_irreps, for_paths = normalization or irrep_normalization or "component", path_normalization or "element"
        check_choice("irrep_normalization", for_irreps, ("component", "norm", "none"), InputError)
        check_choice("path_normalization", for_paths, ("element", "path", "none"), InputError)
        if internal_weights and shared_weights is False:
            raise InputError(
                "internal_weights=True needs shared_weights=True",
                details=["a parameter cannot depend on the sample"],
                fix="pass the weights to forward, or share them.",
            )
        in1, in2, out = (entries_of(given[name]) for name in names)
        paths, weights = make_paths(in1, in2, out, instructions)
        given["instructions"] = [(*path[:5], weight) for path, weight in zip(paths, weights, strict=True)]
        torch.nn.Module.__init__(self)
        self.__dict__.update(vars(_WithoutCode(**given | {"compile_left_right": False, "compile_right": False})))
        if not isinstance(self.weight, torch.nn.Parameter):
            # On the default device, which e3nn's own is not.
            self.weight = torch.tensor([])
        self._did_compile_left_right, self._did_compile_right = compile_left_right, compile_right
        self.options = options

    def _entries(self) -> tuple[tuple[Entry, ...], tuple[Entry, ...], tuple[Entry, ...]]:
        return entries_of(self.irreps_in1), entries_of(self.irreps_in2), entries_of(self.irreps_out)

    def _paths(self) -> tuple[Path, ...]:
        # e3nn's instructions have the same fields.
        return tuple(Path(*instruction) for instruction in self.instructions)

    def _write_statements(self) -> None:
        self._in1_dim: int = self.irreps_in1.dim
        self._in2_dim: int = self.irreps_in2.dim
        self._out_dim: int = self.irreps_out.dim
        # The operator takes the whole product as text: traced, scripted and exported graphs carry it along.
        self._text: str = self.spec.to_json()
        self._text_shared: str = self.spec.with_shared(True).to_json()
        for path in self._paths():
            # Computed now and kept: the first call may be inside of a trace or transform.
            nonzeros(
                self.irreps_in1[path.i_in1].ir.l, self.irreps_in2[path.i_in2].ir.l, self.irreps_out[path.i_out].ir.l
            )
        self._profiling_str: str = o3.TensorProduct.__repr__(self)

    @property
    def spec(self) -> TensorProductSpec:
        """Representations and normalised paths, without numbers."""
        return TensorProductSpec(*self._entries(), self._paths(), self.shared_weights, options=self.options)

    @classmethod
    def from_e3nn(cls, module: Any, *, options: Options = DEFAULT) -> TensorProduct:
        """Return the same product as a module of e3nn, sharing its weights; of the class that replaces the module's.

        >>> original = o3.FullyConnectedTensorProduct("2x0e + 1o", "1o", "0e + 2x1o")
        >>> ours = TensorProduct.from_e3nn(original)
        >>> type(ours).__name__, ours.weight is original.weight
        ('FullyConnectedTensorProduct', True)

        Raises:
            InputError: the module is no tensor product of e3nn.
        """
        kinds: tuple[type[TensorProduct], ...] = (
            FullyConnectedTensorProduct,
            ElementwiseTensorProduct,
            FullTensorProduct,
            TensorSquare,
        )
        kind = next((k for k in kinds if isinstance(module, k.__mro__[1])), TensorProduct)
        new = kind.__new__(kind)
        adopt(new, module, o3.TensorProduct)
        # e3nn's generated code, and its list for pickling.
        new._modules.clear()
        new.__dict__.pop("__codegen__", None)
        new._did_compile_left_right, new._did_compile_right = True, did_compile_right(module)
        new.options = options
        return new

    def _specs(self) -> tuple[TensorProductSpec]:
        return (self.spec,)

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        one_row = () if self.shared_weights else self._texts_of([self.spec.with_shared(True)])
        return super()._elsewhere() | (
            {"for one row of weights": one_row} if set(one_row) - {*self._statements()} else {}
        )

    # State: e3nn's checkpoints hold dense coefficient blocks, constants that the static tables replace.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        add_constants(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_constants(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Weights.

    def _prep_weights_python(self, weight: Tensor | list[Tensor] | None) -> Tensor | None:
        # Called by e3nn's `_get_weights`; its own joins lists.
        return check_weights(self, super()._prep_weights_python(weight))

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """Return the weights of one instruction, as a view of `weight` or of the module's own.

        Args:
            instruction: number of an instruction that has weights.
            weight: as for `forward`.
        """
        # e3nn's own counts the weights of paths that have none.
        wanted = range(len(self.instructions))[instruction]
        for number, _, view in self.weight_views(weight, yield_instruction=True):
            if number == wanted:
                return view  # type: ignore[no-any-return]
        raise ValueError(f"Instruction {instruction} has no weights.")

    # Evaluation.

    def __prepare_scriptable__(self) -> Any:
        """Return e3nn's own layer, with the code that it generates."""
        plain = super().__prepare_scriptable__()
        generate_code(plain)
        return plain

    def _prepared(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.jit.is_tracing():
            check_inputs(self, x, y, weight)
        return to_autocast(x), to_autocast(y), to_autocast(weight)

    def _flat(self, tensor: Tensor, batch: list[int]) -> Tensor:
        """Return a tensor as a matrix, a row for each sample of the batch."""
        return tensor.expand(1, *batch, tensor.shape[-1]).flatten(0, -2)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Multiply `x` by `y`.

        Args:
            x: (..., irreps_in1.dim); differentiable.
            y: (..., irreps_in2.dim); differentiable; batch dimensions broadcast.
            weight: (weight_numel,) if weights are shared, else (..., weight_numel), or a list of one tensor for each
                instruction with weights; needed unless the module holds them; differentiable.

        Returns:
            (..., irreps_out.dim).
        """
        # Without weights of its own it has an empty tensor, which fits no call that needs some.
        w: Tensor = self.weight if weight is None else weight
        # One weight for a whole batch is a shared one.
        if fits_plainly(self, x, y, w) and (self.shared_weights or w.shape[0] != 1):
            return checked_product(self._text, x, y, w)
        x, y, w = self._prepared(x, y, self._get_weights(weight))
        batch = batch_of(self, x, y, w)
        x, y, text = self._flat(x, batch), self._flat(y, batch), self._text
        if not self.shared_weights:
            if w.numel() == self.weight_numel:
                # One weight for the whole batch is a shared one: nothing to repeat.
                w = w.reshape(self.weight_numel)
                text = self._text_shared
            else:
                w = self._flat(w, batch)
        return checked_product(text, x, y, w).reshape(*batch, self._out_dim)

    def right(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Multiply by `y` what is still to come: a matrix that takes any `x` to the tensor product with `y`.

        Args:
            y: (..., irreps_in2.dim); differentiable.
            weight: as for `forward`.

        Returns:
            (..., irreps_in1.dim, irreps_out.dim), for `torch.einsum("...i,...ik->...k", x, right)`.
        """
        _, y, w = self._prepared(y.new_zeros(self._in1_dim), y, self._get_weights(weight))
        batch = batch_of(self, y, y, w)
        y = self._flat(y, batch)
        if not self.shared_weights:
            w = self._flat(w, batch)
        return tensor_product_right(self._text, y, w).reshape(*batch, self._in1_dim, self._out_dim)


# e3nn's own constructors write the instructions; the next class in line is ours.


class FullyConnectedTensorProduct(o3.FullyConnectedTensorProduct, TensorProduct):
    """Every path that the degrees and parities allow, with weights that mix all multiplicities.

        Z[z,K[p,w]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]] * W[L[p],u,v,w]

    Takes the place of `e3nn.o3.FullyConnectedTensorProduct`; arguments as there, and of `TensorProduct`.
    """

    if TYPE_CHECKING:

        def __init__(self, irreps_in1: Irreps, irreps_in2: Irreps, irreps_out: Irreps, **kwargs: Any) -> None: ...


class ElementwiseTensorProduct(o3.ElementwiseTensorProduct, TensorProduct):
    """The product of each copy of one input with the copy of the other that stands at its place.

        Z[z,K[p,u]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,u]]

    Takes the place of `e3nn.o3.ElementwiseTensorProduct`; arguments as there, and of `TensorProduct`.
    """

    if TYPE_CHECKING:

        def __init__(self, irreps_in1: Irreps, irreps_in2: Irreps, *rest: Any, **kwargs: Any) -> None: ...


class FullTensorProduct(o3.FullTensorProduct, TensorProduct):
    """The product of each copy of one input with each of the other, without weights.

        Z[z,K[p,u,v]] += CG[p] * X[z,I[p,u]] * Y[z,J[p,v]]

    Takes the place of `e3nn.o3.FullTensorProduct`; arguments as there, and of `TensorProduct`.
    """

    if TYPE_CHECKING:

        def __init__(self, irreps_in1: Irreps, irreps_in2: Irreps, *rest: Any, **kwargs: Any) -> None: ...


class _Square(o3.TensorProduct):
    """What TorchScript takes, and not e3nn's, which calls the `forward` of its base."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return self._compiled_main_left_right(x, x, self._get_weights(weight))  # type: ignore[no-any-return]


class TensorSquare(o3.TensorSquare, TensorProduct):
    """The product of a representation with itself, each pair of copies once.

        Z[z,K[p],n] += CG[p] * X[z,I[p],U[n]] * Y[z,J[p],V[n]]

    Takes the place of `e3nn.o3.TensorSquare`; arguments as there, and of `TensorProduct`.
    """

    if TYPE_CHECKING:

        def __init__(self, irreps_in: Irreps, *rest: Any, **kwargs: Any) -> None: ...

    def _peer(self) -> Any:
        return _Square

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Multiply `x` by itself; see `TensorProduct.forward`."""
        return TensorProduct.forward(self, x, x, weight)

    def __repr__(self) -> str:
        return self._shown(o3.TensorSquare.__repr__(self))
