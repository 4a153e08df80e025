"""MACE's symmetric contraction: products of up to any number of features of a node, as one statement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from insum_nn.compiler.api import Program, compile_built
from insum_nn.compiler.options import DEFAULT, Options, require_options
from insum_nn.errors import InsumError, import_extra
from insum_nn.facts import IndexFacts, NamedFacts, StaticTable
from insum_nn.layers.equivariant.adoption import ProductLayer
from insum_nn.layers.equivariant.checks import InputError
from insum_nn.ops.statements import run

__all__ = ["SymmetricContraction"]

_WEIGHTS = "W[z,p,c] += R[p,q] * U[z,q,c]"
# The largest entry of a row lies in it.
_FACTS = NamedFacts(Z=IndexFacts(masked=False, proven=True))
# Coefficients below are rounding, and so are parts of a path that the paths before do not span.
_ROUNDING = 1e-6
# Names of the tables of factors.
_FACTORS = "IJKLBCDEFG"


class _Contractions(nn.ModuleList):
    """The modules that MACE indexes to rebuild a model from its configuration, which would lose the swap: an error."""

    def __getitem__(self, index: Any) -> Any:
        raise InsumError(
            "mace cannot rebuild a model that was swapped: the swap would be lost",
            details=["extract_model, MACECalculator(compile_mode=..) and conversions to other kernels read a model so"],
            fix="swap what they return: with disable_e3nn_codegen(), extract_model, swap, simplify, torch.compile.",
        )


class SymmetricContraction(ProductLayer, nn.Module):
    """Products of the features of a node with themselves, coupled to representations: MACE's `SymmetricContraction`.

        W[z,p,c] += R[p,q] * U[z,q,c]
        Y[n,M[t],c] += V[t] * A[n,I[t],c] * A[n,J[t],c] * A[n,K[t],c] * W[Z[n],P[t],c]

    (here of correlation 3). `A` is `x` with a component more, which is 1, so that products of fewer features are terms
    of the same statement, and `Z` the element of each node. `t` counts what is left of MACE's coupling matrices:
    products that differ in the order of their factors are one term, and paths `q` that are sums of others have no terms
    but add to these others' weights (`R`). So 726,592 entries are 486 terms for "0e + 1o" of features up to degree 3.

    Constructor, parameters, buffers and `state_dict` are those of mace's class, and its package has to be installed to
    construct one; `from_mace` makes one of a module that exists, and so does `insum_nn.swap`. TorchScript compiles
    MACE's own code. Coefficients that differ by less than 1e-6 count as equal: results in float64 are those of a module
    that was made in float64, to rounding, and differ by 1e-7 from those of one that was converted to it.

    Source: Batatia, Kovacs, Simm, Ortner, Csanyi, MACE: Higher Order Equivariant Message Passing Neural Networks for
    Fast and Accurate Force Fields (NeurIPS 2022), (10) and (11).

    Args:
        *args: those of MACE's class: representations of the features and of the result, whose multiplicities are the
            channels, and the correlation, which is how many features are multiplied at most.
        options: compile options.
        **kwargs: those of MACE's class, `num_elements` among them.

    Raises:
        MissingExtraError: mace is not installed.
        InsumError: mace rebuilds a swapped model from its configuration; rebuild it before the swap.

    >>> from insum_nn.layers import SymmetricContraction  # doctest: +SKIP
    >>> layer = SymmetricContraction("8x0e + 8x1o", "8x0e", 3, num_elements=2)  # doctest: +SKIP
    >>> layer(torch.randn(5, 8, 4), torch.eye(2)[[0, 1, 1, 0, 1]]).shape  # doctest: +SKIP
    torch.Size([5, 8])
    """

    # TorchScript compiles properties unless told otherwise.
    __jit_unused_properties__ = ["options"]  # noqa: RUF012
    # The contraction; the first is the sum of its weights.
    _EXPLAINED = 1

    def __init__(self, *args: Any, options: Options = DEFAULT, **kwargs: Any) -> None:
        super().__init__()
        peer = import_extra("mace.modules.symmetric_contraction", "SymmetricContraction", "mace-torch")
        self._take(peer.SymmetricContraction(*args, **kwargs), options)

    @classmethod
    def from_mace(cls, module: Any, *, options: Options = DEFAULT) -> SymmetricContraction:
        """Return the same contraction as a module of MACE, sharing its parameters and buffers."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._take(module, options)
        return new

    def _take(self, module: Any, options: Options) -> None:
        self.irreps_in, self.irreps_out = module.irreps_in, module.irreps_out
        self.contractions: Any = _Contractions(module.contractions)
        self._options, self._names = require_options(options), [*_FACTORS[:1]]
        self._tabulate()
        # A state may bring other matrices.
        self.register_load_state_dict_post_hook(SymmetricContraction._tabulate)

    # Tables.

    @torch.no_grad()
    def _tabulate(self, _: object = None) -> None:
        """Make the tables of the coupling matrices."""
        parts = [[c.get_buffer(f"U_matrix_{n}") for n in range(c.correlation, 0, -1)] for c in self.contractions]
        if any(matrix.is_meta for part in parts for matrix in part):
            return
        most, self._components = max(map(len, parts)), parts[0][0].shape[-2]
        last = self._components
        places: list[Tensor] = []
        values: list[Tensor] = []
        paths, self._dims = 0, list[int]()
        for part in parts:
            for order, matrix in zip(range(len(part), 0, -1), part, strict=True):
                matrix = matrix.double().cpu().reshape(-1, *[last] * order, matrix.shape[-1])
                at = matrix.nonzero()
                factors = at[:, 1:-1].sort(1).values
                ones = factors.new_full((len(at), most - order), last)
                places.append(torch.cat([factors, ones, at[:, :1] + sum(self._dims), at[:, -1:] + paths], 1))
                values.append(matrix[tuple(at.T)])
                paths += matrix.shape[-1]
            self._dims.append(part[0].numel() // last ** len(part) // part[0].shape[-1])
        where = torch.cat(places)
        cells, cell = where[:, :-1].unique(dim=0, return_inverse=True)
        # Sums of what is at one place; torch's sparse tensors would warn of their checks.
        whole = torch.bincount(cell * paths + where[:, -1], torch.cat(values), len(cells) * paths).view(-1, paths)
        whole[whole.abs() < _ROUNDING] = 0
        kept = _spanning(whole)
        row, path = whole[:, kept].nonzero(as_tuple=True)
        named = dict(zip([*_FACTORS[:most], "M"], cells[row].T.contiguous(), strict=True))
        named |= {"P": path, "V": whole[:, kept][row, path], "R": torch.linalg.lstsq(whole[:, kept], whole).solution}
        like = parts[0][0]
        for name, table in named.items():
            table = table.to(like.device, like.dtype if table.is_floating_point() else None)
            self.register_buffer(f"_{name}", table, persistent=False)
        self._names = [name for name in named if name != "R"]
        self.options = self._options

    def _write_statements(self) -> None:
        # Torch's own switch asks for the second.
        kinds = self._options, replace(self._options, deterministic=True)
        text = self._statements()[1]
        static = {name: StaticTable.of(table) for name, table in self._tables().items()}
        self._programs: list[Program] = [
            compile_built(text, facts=_FACTS, static=static, options=kind) for kind in kinds
        ]

    def _tables(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"_{name}") for name in self._names}

    def _elsewhere(self) -> dict[str, tuple[str, ...]]:
        return {}

    def _statements(self) -> tuple[str, str]:
        features = " * ".join(f"A[n,{name}[t],c]" for name in self._names if name in _FACTORS)
        return _WEIGHTS, f"Y[n,M[t],c] += V[t] * {features} * W[Z[n],P[t],c]"

    def __repr__(self) -> str:
        terms = len(self.get_buffer("_V"))
        return self._shown(f"SymmetricContraction({self.irreps_in} -> {self.irreps_out} | {terms} terms)")

    # Evaluation.

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Contract.

        Args:
            x: (n, channels, components) features, components of all degrees together; float32 or float64;
                differentiable, to any order, as the weights are.
            y: (n, num_elements) one-hot, of the dtype of `x`: the largest entry of a row names the node's element.

        Returns:
            (n, irreps_out.dim), each entry of `irreps_out` as (channels, components).

        Raises:
            InputError: a shape does not fit, or derivatives by `y` are asked for.
        """
        if torch.jit.is_scripting():
            return torch.cat([contraction(x, y) for contraction in self.contractions], dim=-1)
        return self._contracted(x, y)

    @torch.jit.unused
    def _contracted(self, x: Tensor, y: Tensor) -> Tensor:
        weights = [w for c in self.contractions for w in (c.weights_max, *c.weights)]
        elements, _, channels = weights[0].shape
        nodes, last = x.shape[0], self._components
        if x.shape[1:] != (channels, last) or y.shape != (nodes, elements) or y.requires_grad:
            raise InputError(
                "features or elements do not fit",
                details=[
                    f"expected x (n, {channels}, {last}), and y (n, {elements}), one-hot, without gradients; "
                    f"got {tuple(x.shape)} and {tuple(y.shape)}{', with gradients' * y.requires_grad}"
                ],
                fix="pass features of all components, and a row of 0 and a single 1 for each node.",
            )
        w = run(_WEIGHTS, {}, {"R": self.get_buffer("_R"), "U": torch.cat(weights, 1)}, self._options, None)
        a = torch.cat([x.transpose(1, 2), x.new_ones(nodes, 1, channels)], 1)
        program: Program = self._programs[torch.are_deterministic_algorithms_enabled()]
        named = {"A": a, "W": w, "Z": y.argmax(1), **self._tables()}
        made = program(tensors=named, out_shape=(nodes, sum(self._dims), channels)).split(self._dims, 1)
        return torch.cat([part.transpose(1, 2).flatten(1) for part in made], 1)


def _spanning(whole: Tensor) -> list[int]:
    """Return columns that span all of a matrix, those of the fewest entries first."""
    kept: list[int] = []
    basis = whole[:, :0]
    for column in (whole != 0).sum(0).argsort(stable=True).tolist():
        rest = whole[:, column]
        for _ in range(2):  # for rounding
            rest = rest - (basis * (basis * rest[:, None]).sum(0)).sum(1)
        if rest.norm() > _ROUNDING * whole[:, column].norm():
            kept.append(column)
            basis = torch.cat([basis, rest[:, None] / rest.norm()], 1)
    return kept
