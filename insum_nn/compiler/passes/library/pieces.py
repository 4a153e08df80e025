"""Choose the index along which a graph of library calls runs in pieces, so that gathered tensors stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from insum_nn.compiler.ir.access import affine_terms, indices_of, loads_in_order, scattered_axes
from insum_nn.compiler.ir.graph import Graph, Step, store_of
from insum_nn.compiler.ir.nodes import Buffer, Expr, Index, Store
from insum_nn.compiler.passes.library.read_factors import gathers
from insum_nn.compiler.passes.library.steps import Cut

__all__ = ["choose_pieces"]

# Share of what is gathered and written that each piece may repeat.
_LITTLE = 0.1


def choose_pieces(cut: Cut, graph: Graph) -> str | None:
    """The index that eager execution on a CPU cuts into ranges; `None`: it runs as a whole."""
    if cut.target.compiled or cut.target.device != "cpu":
        return None
    store = store_of(cut.kernel)
    gathered = [*gathers(graph)]
    labels = [label for step in gathered for label in _labels(step) if _sliceable(store, label)]
    if not labels:
        return None
    steps = [*map(_labels, gathered), indices_of(*store.subscripts)]
    every = sum(map(cut.cells, steps))
    # Each piece gathers again what does not vary with the index, and writes all of the output if that does not.
    again = {label: sum(cut.cells(own) for own in steps if label not in own) for label in labels}
    # Rather not a feature axis, whose slices are strided; of those that repeat little, the longest, whose pieces are
    # the smallest.
    best = min(labels, key=lambda x: (_is_feature(store, x), max(again[x], _LITTLE * every), -cut.sizes[x]))
    cut.decide(
        "pieces",
        ("along ", Index(best)),
        "gathered tensors stay in the cache instead of passing through memory",
    )
    return best


def _labels(step: Step) -> tuple[str, ...]:
    return indices_of(*store_of(step.kernel).subscripts)


def _accesses(store: Store) -> list[tuple[Buffer, tuple[Expr, ...]]]:
    """Every access of a statement, the output's first."""
    reads = loads_in_order(*store.subscripts, store.value)
    return [(store.buffer, store.subscripts), *((read.buffer, read.subscripts) for read in reads)]


def _sliceable(store: Store, label: str) -> bool:
    """Whether cutting every axis that an index addresses restricts the statement to a range of it."""
    index, found = Index(label), False
    cut: dict[Buffer, tuple[int, ...]] = {}
    for buffer, subscripts in _accesses(store):
        axes = tuple(axis for axis, subscript in enumerate(subscripts) if subscript is index)
        # A tensor that stands at two places must be cut alike at both.
        if cut.setdefault(buffer, axes) != axes or set(axes) & set(scattered_axes(subscripts)):
            return False
        if any(atom is index for s in subscripts if s is not index for _, atom in affine_terms(s)[0]):
            return False
        found |= bool(axes) and buffer is not store.buffer
    return found


def _is_feature(store: Store, label: str) -> bool:
    """Whether no index tensor has the index, and some tensor carries it behind its first axis: a dense feature axis."""
    accesses = _accesses(store)[1:]
    pointers = _index_tensors([subscripts for _, subscripts in _accesses(store)])
    places = [(b, axis) for b, subscripts in accesses for axis, s in enumerate(subscripts) if s is Index(label)]
    return all(b not in pointers for b, _ in places) and any(axis > 0 for _, axis in places)


def _index_tensors(accesses: Sequence[Sequence[Expr]]) -> set[Buffer]:
    """What stands inside of a subscript."""
    return {read.buffer for subscripts in accesses for read in loads_in_order(*subscripts)}
