"""Programs that run path by path: one statement, and several on the same tensors together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from insum_nn.compiler.lang.bind import Bound, Extents
from insum_nn.compiler.lang.syntax import Statement
from insum_nn.compiler.options import Options
from insum_nn.compiler.passes.path_products import PathSplit, row_of, samples_of, split_into_paths
from insum_nn.compiler.runtime.composite.path_families import families_of
from insum_nn.compiler.runtime.composite.path_products import PathProducts
from insum_nn.dtypes import wide_dtype
from insum_nn.facts import StaticTable

__all__ = ["PathProgram", "Static", "StaticSum", "find_paths", "run_together", "same_memory", "static_sum"]

Static = tuple[tuple[str, StaticTable], ...]
# What makes outputs from the tensors of several statements, by name.
Run = Callable[[Sequence[Mapping[str, Tensor]]], list[Tensor]]

# Half types are multiplied in float32: a library adds them up in themselves.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StaticSum:
    """What a rewriting of a statement over static tables depends on.

    Attributes:
        samples: the index of its samples.
        sizes: of its indices.
        shapes: of its tensors and its output. Whatever there are of samples and of rows, products are the same: 0.
    """

    samples: str
    sizes: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def static_sum(
    bound: Bound, tensors: Sequence[Tensor], extents: Extents, options: Options, static: Static
) -> StaticSum | None:
    """Return what decides the products of a statement; `None`: it has none, or a kernel is generated for it."""
    if not static or bound.device_type != "cpu" or options.backend not in ("auto", "eager") or options.order != "cost":
        return None
    if bound.dtype not in _DTYPES or bound.epilogue:
        return None
    rows = _rows_of(bound.statement, frozenset(name for name, _ in static))
    if rows is None:
        return None
    samples, rowed = rows
    shapes = {name: tuple(t.shape) for name, t in zip(bound.layout.tensors, tensors, strict=True)}
    shapes[bound.statement.output.name] = tuple(extents.output)
    fixed = tuple((name, (0, *shape[1:]) if name in rowed else shape) for name, shape in shapes.items())
    sizes = tuple(
        (name, 0 if name == samples else size) for name, size in zip(bound.layout.indices, extents.indices, strict=True)
    )
    return StaticSum(samples, sizes, fixed)


@lru_cache(maxsize=512)
def _rows_of(statement: Statement, tables: frozenset[str]) -> tuple[str, frozenset[str]] | None:
    """The index of a statement's samples, and which tensors have rows of them; `None`: there are no samples."""
    samples = samples_of(statement, tables)
    if samples is None:
        return None
    rows = (a.name for a in statement.accesses() if row_of(a, samples, statement, tables) is not None)
    return samples, frozenset(rows)


def find_paths(
    bound: Bound, tensors: Sequence[Tensor], extents: Extents, options: Options, static: Static
) -> PathProgram | None:
    """Return a statement over static tables as dense products; `None`: it is none, or a kernel is generated for it."""
    found = static_sum(bound, tensors, extents, options, static)
    if found is None or 0 in extents.indices or 0 in extents.output:
        return None
    split = _split(bound.statement, static, found.sizes, found.shapes)
    return None if split is None else PathProgram(bound, extents, split, found.samples)


@lru_cache(maxsize=512)
def _split(
    statement: Statement,
    static: Static,
    sizes: tuple[tuple[str, int], ...],
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> PathSplit | None:
    return split_into_paths(statement, dict(static), dict(sizes), dict(shapes))


@dataclass(frozen=True, slots=True)
class PathProgram:
    """A statement as dense products, one for each path.

    Attributes:
        bound: the statement.
        extents: the sizes of the call that it was made for.
        split: its products.
        samples: the index of its samples.
    """

    bound: Bound
    extents: Extents
    split: PathSplit
    samples: str

    @property
    def reason(self) -> str:
        """Why it runs so."""
        return "on a CPU, dense products of a library for each path are faster than gathers and scatters"

    @property
    def count(self) -> int:
        """How many samples there are."""
        return self.extents.indices[self.bound.layout.indices.index(self.samples)]

    def __call__(self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None) -> Tensor:
        """Run on tensors in the layout's order."""
        return self.prepare(tensors, extents, initial)(tensors, initial)

    def prepare(
        self, tensors: Sequence[Tensor], extents: Extents, initial: Tensor | None
    ) -> Callable[[Sequence[Tensor], Tensor | None], Tensor]:
        """Return what runs the statement on tensors of these shapes."""
        names, dtype = self.bound.layout.tensors, self.bound.dtype
        together = run_together([self], [dict(zip(names, tensors, strict=True))], [0])
        assert together is not None

        def run(tensors: Sequence[Tensor], initial: Tensor | None) -> Tensor:
            (made,) = together([dict(zip(names, tensors, strict=True))])
            return (made if initial is None else made.add_(initial)).to(dtype)

        return run


def run_together(
    programs: Sequence[PathProgram], named: Sequence[Mapping[str, Tensor]], outputs: Sequence[Hashable]
) -> Run | None:
    """Return what computes several statements, so that they share products; `None`: their samples are not the same.

    Half types are computed, and returned, in float32.

    Args:
        programs: the statements.
        named: tensors of each, by name; what is returned takes tensors of the same shapes, the same ones in the same
            places.
        outputs: for each, which of the results it adds to.
    """
    results = list(dict.fromkeys(outputs))
    tensors: dict[Hashable, int] = {}
    sources: list[tuple[int, str]] = []
    splits: list[tuple[PathSplit, tuple[tuple[str, int], ...], int]] = []
    for at, (program, own) in enumerate(zip(programs, named, strict=True)):
        numbers: dict[str, int] = {}
        for side, operand in program.split.operands.items():
            if side == program.split.written:
                continue
            # Which tensors are the same one is not part of the key of a single statement's calls.
            key = (same_memory(own[operand.name]), operand.rows) if len(programs) > 1 else operand.name
            if key not in tensors:
                tensors[key] = len(tensors)
                sources.append((at, operand.name))
            numbers[operand.name] = tensors[key]
        splits.append((program.split, tuple(numbers.items()), results.index(outputs[at])))
    indices = _indices(programs, named)
    if indices is None or len({program.count for program in programs}) > 1:
        return None
    firsts = [programs[list(outputs).index(result)] for result in results]
    shapes = [program.extents.output for program in firsts]
    selects = [program.split.operands[program.split.written].rows for program in firsts]
    flat = [
        (_count(shape),) if own is None else (shape[0], _count(shape[1:]))
        for shape, own in zip(shapes, selects, strict=True)
    ]
    widths = tuple([_count(named[at][name].shape[1:]) for at, name in sources])
    dtype = wide_dtype(programs[0].bound.dtype)
    products = _products(tuple(splits), tuple([shape[-1] for shape in flat]), widths, dtype)
    masked = any(program.bound.facts_of(name).masked is not False for program in programs for name in indices)
    count = programs[0].count

    def run(named: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        # Loops, and one comprehension: each is a call of Python.
        own: dict[str, Tensor] = {}
        for name, at in indices.items():
            own[name] = named[at][name]
        kept: Tensor | None = None
        if masked:
            present = torch.stack([index >= 0 for index in own.values()]).all(0)
            kept = None if bool(present.all()) else present.nonzero().squeeze(1)
        made = products([named[at][name] for at, name in sources], flat, own, count, kept)
        for at, shape in enumerate(shapes):
            made[at] = made[at].view(shape)
        return made

    return run


@lru_cache(maxsize=512)
def _products(
    splits: tuple[tuple[PathSplit, tuple[tuple[str, int], ...], int], ...],
    written: tuple[int, ...],
    widths: tuple[int, ...],
    dtype: torch.dtype,
) -> PathProducts:
    """The products of several splits, for any samples and rows: they are printed once, and serve new edges."""
    families = families_of([(split, dict(numbers), number) for split, numbers, number in splits])
    return PathProducts(families, written, widths, dtype)


def same_memory(tensor: Tensor) -> Hashable:
    """What two tensors have in common that are the same numbers at the same places."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _indices(programs: Sequence[PathProgram], named: Sequence[Mapping[str, Tensor]]) -> dict[str, int] | None:
    """The index tensors that select rows, and which statement has each; `None`: a name means several of them."""
    found: dict[str, int] = {}
    for at, program in enumerate(programs):
        for operand in program.split.operands.values():
            name = operand.rows
            if name and same_memory(named[found.setdefault(name, at)][name]) != same_memory(named[at][name]):
                return None
    return found
