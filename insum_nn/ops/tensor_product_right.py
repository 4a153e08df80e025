"""The partial evaluation of a tensor product: a matrix that maps its first input to the output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from insum_nn.compiler.api import Program, built_program, without_autocast
from insum_nn.errors import InsumError
from insum_nn.facts import IndexFacts, NamedFacts
from insum_nn.ops.tensor_product_spec import ProductLayout, TensorProductSpec, layout_of
from insum_nn.structure.clebsch_gordan import nonzeros
from insum_nn.structure.irreps import MODES, Path

__all__ = ["UnsupportedModeError", "right_expressions", "tensor_product_right"]

_FACTS = NamedFacts(dict.fromkeys("IJK", IndexFacts(masked=False, proven=True)))

T = TypeVar("T")


class UnsupportedModeError(InsumError, NotImplementedError):
    """A connection mode has no `right`; also a `NotImplementedError`, which e3nn raises here."""


def tensor_product_right(spec: TensorProductSpec | str, y: Tensor, weight: Tensor) -> Tensor:
    """Evaluate all of a tensor product but its first input.

        B[z,u,I[p],w,K[p]] += CG[p] * Y[z,J[p],v] * W[u,v,w]        for each path, here of mode uvw

    Source: `e3nn.o3.TensorProduct.right`.

    Args:
        spec: the representations and paths, or their JSON.
        y: (z, dim of in2); differentiable. `spec.layout` holds for both inputs and the output.
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
        return torch.ops.insum_nn.tensor_product_right(text, y, weight)
    return _operator(text, y, weight)


def right_expressions(spec: TensorProductSpec) -> tuple[str, ...]:
    """Return the statement of each path that contributes."""
    layout = layout_of(spec.to_json())
    return tuple(_path_program(layout, layout.spec.paths[n]).expression for n in layout.live)


def _path_program(layout: ProductLayout, path: Path) -> Program:
    mode, out, extents = MODES[path.mode], _out_letters(path), _extents(layout, path)
    read = set(mode.in2 + (mode.weight if path.weighted else ""))
    # The result repeats along multiplicities that no factor has.
    sizes = tuple((x, extents[x]) for x in dict.fromkeys(mode.in1 + out) if x not in read)
    return built_program(_text(layout, path), _FACTS, layout.spec.options, sizes)


def _out_letters(path: Path) -> str:
    letters = MODES[path.mode].out
    return letters if path.weighted else letters.replace("w", "")


def _extents(layout: ProductLayout, path: Path) -> dict[str, int]:
    return dict(zip("uvw", (layout.entry(role, path).mul for role in "xyz"), strict=True))


def _text(layout: ProductLayout, path: Path) -> str:
    mode = MODES[path.mode]
    if mode.pairs:
        raise UnsupportedModeError(
            f"right() is not defined for mode {path.mode!r}",
            details=["its pairs couple the copies of both inputs"],
            fix="call forward.",
            mode=path.mode,
        )
    factors = ["CG[p]", f"Y[{','.join(['z', 'J[p]', *mode.in2])}]"]
    if path.weighted:
        factors.append(f"W[{','.join([*([] if layout.spec.shared else ['z']), *mode.weight])}]")
    subscripts = ["z", *_side(layout, mode.in1, "I[p]"), *_side(layout, _out_letters(path), "K[p]")]
    return f"B[{','.join(subscripts)}] += {' * '.join(factors)}"


def _side(layout: ProductLayout, copies: Iterable[T], component: T) -> list[T]:
    """Return an entry's axes or subscripts, outermost first."""
    return [*copies, component] if layout.spec.layout == "mul_ir" else [component, *copies]


def _block(layout: ProductLayout, number: int, y: Tensor, weight: Tensor) -> Tensor:
    """Return the block of one path: (z, dim of its entry of in1, dim of its entry of out)."""
    path = layout.spec.paths[number]
    mode = MODES[path.mode]
    a, b, c = layout.entry("x", path), layout.entry("y", path), layout.entry("z", path)
    index, value = nonzeros(a.l, b.l, c.l)
    tables = {name: torch.from_numpy(axis).to(y.device) for name, axis in zip("IJK", index, strict=True)}
    tables["CG"] = torch.from_numpy(value * path.coefficient).to(y.device, y.dtype)
    start = layout.starts["y"][path.i_in2]
    mine = y.narrow(1, start, b.dim).unflatten(1, _side(layout, [b.mul], b.size))
    tables["Y"] = mine.mT if layout.spec.layout == "mul_ir" else mine
    if path.weighted:
        own = weight.narrow(-1, layout.weight_starts[number], path.numel)
        tables["W"] = own.reshape(*weight.shape[:-1], *path.shape)
    extents = _extents(layout, path)
    in1 = _side(layout, (extents[x] for x in mode.in1), a.size)
    out = _side(layout, (extents[x] for x in _out_letters(path)), c.size)
    block = _path_program(layout, path)(tensors=tables, out_shape=(y.shape[0], *in1, *out))
    return block.reshape(y.shape[0], a.dim, c.dim)


def _evaluate(layout: ProductLayout, y: Tensor, weight: Tensor) -> Tensor:
    """Return all blocks in their places; differentiable like any program."""
    blocks: dict[tuple[int, int], Tensor] = {}
    for number in layout.live:
        path = layout.spec.paths[number]
        key = (path.i_in1, path.i_out)
        block = _block(layout, number, y, weight)
        blocks[key] = blocks[key] + block if key in blocks else block
    rows: list[Tensor] = []
    for i, a in enumerate(layout.spec.in1):
        columns = [
            blocks[i, k] if (i, k) in blocks else y.new_zeros(()).expand(y.shape[0], a.dim, c.dim)
            for k, c in enumerate(layout.spec.out)
        ]
        rows.append(torch.cat(columns, 2) if columns else y.new_zeros(y.shape[0], a.dim, 0))
    return torch.cat(rows, 1) if rows else y.new_zeros(y.shape[0], 0, layout.dims["z"])


# Dynamo and TorchScript keep one operator; AOTAutograd, export and make_fx decompose it into its paths' statements.
torch.library.define("insum_nn::tensor_product_right", "(str spec, Tensor y, Tensor weight) -> Tensor")


def _operator(spec: str, y: Tensor, weight: Tensor) -> Tensor:
    with without_autocast(y.device):
        return _evaluate(layout_of(spec), y, weight).contiguous()


torch.library.impl("insum_nn::tensor_product_right", "CompositeImplicitAutograd", _operator)
