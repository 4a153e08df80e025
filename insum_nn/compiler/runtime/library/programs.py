"""A statement as calls of torch's library: the graph that its passes make, printed, and run in pieces on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum_nn.compiler.codegen.aten import print_aten
from insum_nn.compiler.codegen.calls import CallGraph
from insum_nn.compiler.ir import graph as ir
from insum_nn.compiler.ir.access import indices_of, plain_labels, scattered_axes
from insum_nn.compiler.ir.build import Names, build
from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.epilogue import PLAIN
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.library.library_graph import LibraryGraph, library_graph
from insum_nn.compiler.passes.library.read_factors import gathers
from insum_nn.compiler.passes.library.steps import Target
from insum_nn.dtypes import wide_dtype

__all__ = ["Library", "extent_arguments", "library_calls_of", "piece_length", "run_pieces"]

# Bytes of gathered operands per piece of an eager program: what a core's cache holds. Four times as much where there
# are batched products, for what they read and their results together: on average 0.97 of the time with half of it.
_PIECE_BYTES = 1 << 20
# Bytes of its largest intermediate result: tensor products of 10,000 samples take 0.76 to 0.95 of the time with it.
_RESULT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Library:
    """A statement as calls of torch's library, which run as they are or are compiled by Inductor.

    Attributes:
        bound: the statement.
        names: its canonical names.
        made: its steps, and the choices behind them.
        graph: the calls that run, or that Inductor compiles.
        pieces: the same for a range of one index, added to the output; `None` where it always runs at once.
    """

    bound: Bound
    names: Names
    made: LibraryGraph
    graph: CallGraph
    pieces: CallGraph | None = None

    @property
    def cut(self) -> str | None:
        """Return the index that is cut into ranges, by the user's name."""
        return next((name for name, letter in self.names.indices.items() if letter == self.made.pieces), None)


def library_calls_of(
    bound: Bound, extents: Extents, options: Options, *, compiled: bool, bags: bool = False
) -> Library:
    """Write a statement as library calls.

    Args:
        bound: the statement; what follows its sum is left to the caller.
        extents: sizes of a call, by which the order of the products is chosen.
        options: compile options.
        compiled: for Inductor.
        bags: products with sparse matrices are sums of bags, which have first derivatives only.
    """
    names = Names(bound.statement)
    sizes = {names.indices[name]: size for name, size in zip(bound.layout.indices, extents.indices, strict=True)}
    target = Target(
        bound.device_type,
        compiled,
        csr=bags or (torch.backends.mkl.is_available() and not compiled),
        search=options.order == "cost",
        deterministic=options.deterministic,
    )
    made = library_graph(build(replace(bound, epilogue=PLAIN)), sizes, target)
    graph = print_aten(made.graph, bound.device_type, options, compiled=compiled)
    pieces = None
    if made.pieces is not None:
        pieces = print_aten(made.graph, bound.device_type, options, accumulate=True)
    return Library(bound, names, made, graph, pieces)


def extent_arguments(bound: Bound) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the extents that a graph takes as integers: of indices and output axes that no tensor shows."""
    layout = bound.layout
    static = {name for name, _ in bound.static}
    indices = tuple(
        name for name, plain in zip(layout.indices, layout.plain, strict=True) if not plain and name not in static
    )
    axes = tuple(axis for axis, name in enumerate(layout.output_plain) if name is None)
    return indices, axes


def piece_length(library: Library, extents: Extents) -> int | None:
    """Return how many values of the cut index fit one piece; `None` when everything fits."""
    cut = library.made.pieces
    if library.pieces is None or cut is None:
        return None
    sizes = dict(zip(library.names.indices.values(), extents.indices, strict=True))
    products = [n for n in library.made.graph.nodes if isinstance(n, ir.Library) and n.function == "matmul"]
    moved = [*gathers(library.made.graph), *products]
    results = [plain_labels(ir.store_of(step.kernel).subscripts) for step in moved]
    cells = sum(math.prod(sizes[x] for x in labels if x != cut) for labels in results if cut in labels)
    # A piece with a batched product makes more calls, whose fixed time needs more to work on.
    room = 4 * _PIECE_BYTES if products else _PIECE_BYTES
    limits = (room, cells), (_RESULT_BYTES, _widest(library, sizes, cut))
    step = max(1, min(most // max(1, numbers * library.bound.dtype.itemsize) for most, numbers in limits))
    return step if 2 * step <= sizes[cut] else None


def _widest(library: Library, sizes: Mapping[str, int], cut: str) -> int:
    """Return how many numbers the largest intermediate result has for one value of the cut index."""
    *between, _ = [node.kernel for node in library.made.graph.nodes if isinstance(node, ir.Step | ir.Library)]
    made = [indices_of(*ir.store_of(kernel).subscripts) for kernel in between]
    return max((math.prod(sizes[x] for x in labels if x != cut) for labels in made if cut in labels), default=0)


def run_pieces(
    library: Library,
    options: Options,
    tensors: Sequence[Tensor],
    arguments: Sequence[int],
    extents: Extents,
    initial: Tensor | None,
    step: int,
) -> Tensor:
    """Add the statement's contributions range by range into one output."""
    bound, layout = library.bound, library.bound.layout
    assert library.cut is not None
    assert library.pieces is not None
    position = layout.indices.index(library.cut)
    scattered = scattered_axes(ir.store_of(library.made.kernel).subscripts)
    wide = options.accumulate == "float32" or not scattered
    dtype = wide_dtype(bound.dtype) if wide else bound.dtype
    device = tensors[0].device if tensors else initial.device if initial is not None else None
    # Library calls add a row at a time, fastest where rows are what lies outermost.
    outer = scattered[0] if len(scattered) == 1 else 0
    shape = list(extents.output)
    if outer:
        shape.insert(0, shape.pop(outer))
    output = (torch.zeros if initial is None else torch.empty)(shape, dtype=dtype, device=device)
    if outer:
        output = output.movedim(0, outer)
    if initial is not None:
        output.copy_(initial.detach())
    axes = [[axis for where, axis in layout.plain[position] if where == i] for i in range(len(tensors))]
    written = [axis for axis, name in enumerate(layout.output_plain) if name == library.cut]
    total = extents.indices[position]
    for begin in range(0, total, step):
        length = min(step, total - begin)
        cut = [_narrow(t, own, begin, length) for t, own in zip(tensors, axes, strict=True)]
        library.pieces(*cut, *arguments, _narrow(output, written, begin, length))
    return output.to(bound.dtype).contiguous()


def _narrow(tensor: Tensor, axes: Sequence[int], begin: int, length: int) -> Tensor:
    for axis in axes:
        tensor = tensor.narrow(axis, begin, length)
    return tensor
