"""The Plan: what a program does, step by step, before any back end writes it down.

Values are tensors whose axes are labelled with index variables. A plan loads factors (a view or a gather),
contracts them pairwise, and combines the result into the output. It prints, and `verify()` proves it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.misses import Miss
from insum_nn.compiler.lang.syntax import Access, Subscript

__all__ = [
    "Combine",
    "Decision",
    "Dot",
    "Load",
    "Multiply",
    "Plan",
    "Role",
    "SampledProduct",
    "Scale",
    "SparseProduct",
    "Step",
    "Sum",
]

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """`result[labels] = access`: a view when every subscript is a different plain index, else a gather.

    It is 0 where it misses, and where the reads of other factors do: `guards`.
    """

    result: str
    access: Access
    labels: Labels
    gather: bool
    guards: tuple[Miss, ...] = ()

    def __str__(self) -> str:
        text = f"{self.result}[{','.join(self.labels)}] = {'gather' if self.gather else 'view'} {self.access}"
        return text + (f", 0 where {' or '.join(map(str, self.guards))}" if self.guards else "")


@dataclass(frozen=True, slots=True)
class Sum:
    """`result[labels]`: `source` summed over the labels that it has beyond these."""

    result: str
    source: str
    labels: Labels

    def __str__(self) -> str:
        return f"{self.result}[{','.join(self.labels)}] = sum {self.source}"


@dataclass(frozen=True, slots=True)
class Scale:
    """`result = number * source`."""

    result: str
    source: str
    labels: Labels
    number: int | float

    def __str__(self) -> str:
        return f"{self.result}[{','.join(self.labels)}] = {self.number!r} * {self.source}"


@dataclass(frozen=True, slots=True)
class Multiply:
    """`result[labels] = left * right`, summed over the labels that both lose; `unrolled` ones by straight-line code."""

    result: str
    left: str
    right: str
    labels: Labels
    over: Labels = ()
    unrolled: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        text = f"{self.result}[{','.join(self.labels)}] = {self.left} * {self.right}"
        if self.over:
            text += f"  summed over {','.join(self.over)}"
        if self.unrolled:
            text += f"  (unrolled {', '.join(f'{label} = {extent}' for label, extent in self.unrolled)})"
        return text


@dataclass(frozen=True, slots=True)
class Dot:
    """A batched matrix product: `result[batch,m,n] = left[batch,m,k] @ right[batch,k,n]`."""

    result: str
    left: str
    right: str
    batch: Labels
    m: Labels
    k: Labels
    n: Labels

    @property
    def labels(self) -> Labels:
        return self.batch + self.m + self.n

    def __str__(self) -> str:
        parts = [f"{role} = {','.join(getattr(self, role)) or '1'}" for role in ("batch", "m", "k", "n")]
        return f"{self.result}[{','.join(self.labels)}] = dot {self.left} {self.right}  ({'; '.join(parts)})"


@dataclass(frozen=True, slots=True)
class SparseProduct:
    """`result[row, n] = sum over entries of value * dense[col, n]`: a product with a sparse matrix.

    Attributes:
        value: the entries' value (labels among `entries`), or `None` for ones.
        row: subscript of the output that names an entry's row.
        col: subscript of `dense` that names its column.
        entries: labels of the entries, the row's first.
        dense: the access whose axis `dense_axis` is selected by `col`; its other axes are plain.
    """

    result: str
    value: str | None
    row: Subscript
    col: Subscript
    entries: Labels
    dense: Access
    dense_axis: int
    labels: Labels

    def __str__(self) -> str:
        value = self.value or "1"
        return (
            f"{self.result}[{self.row},{','.join(self.labels)}] = "
            f"sparse product of {value} at ({self.row}, {self.col}) over {','.join(self.entries)} with {self.dense}"
        )


@dataclass(frozen=True, slots=True)
class SampledProduct:
    """`result[entries] = sum over inner of near[row, inner] * far[col, inner]`: a dense product at some entries only.

    Attributes:
        near: the access whose axis `near_axis` is selected by `row`; its other axes are `inner`.
        far: likewise with `col`.
        labels: the entries' labels.
    """

    result: str
    near: Access
    near_axis: int
    far: Access
    far_axis: int
    inner: Labels
    labels: Labels

    @property
    def row(self) -> Subscript:
        return self.near.subscripts[self.near_axis]

    @property
    def col(self) -> Subscript:
        return self.far.subscripts[self.far_axis]

    def __str__(self) -> str:
        return (
            f"{self.result}[{','.join(self.labels)}] = sampled product of {self.near} and {self.far} "
            f"over {','.join(self.inner)}"
        )


Step = Load | Sum | Scale | Multiply | Dot | SparseProduct | SampledProduct


@dataclass(frozen=True, slots=True)
class Combine:
    """How the last value reaches the output.

    `direct`: every output axis is a plain index of its own. `scatter`: axes in `scattered` are addressed by
    values, and several terms may meet in a cell. `rows`: the value already is the output (a sparse product).
    `guards`: terms that miss so are left out of an extremum; of a sum, a cell is 0 where all of its terms miss so.
    """

    value: str | None
    mode: Literal["direct", "scatter", "rows"]
    scattered: tuple[int, ...]
    guards: tuple[Miss, ...] = ()

    def __str__(self) -> str:
        text = f"combine {self.value or 1} by {self.mode}"
        if self.scattered:
            text += f" along axis {', '.join(map(str, self.scattered))}"
        if self.guards:
            text += f", without terms where {' or '.join(map(str, self.guards))}"
        return text


@dataclass(frozen=True, slots=True)
class Role:
    """What an index does in the plan."""

    index: str
    role: Literal["parallel", "sequential", "tiled", "unrolled"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice of the planner and its reason."""

    topic: str
    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.choice}; {self.reason}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order, then the combination; `chunk` is the index that eager execution cuts into pieces."""

    bound: Bound
    steps: tuple[Step, ...]
    combine: Combine
    roles: tuple[Role, ...]
    decisions: tuple[Decision, ...]
    chunk: str | None = None

    def labels_of(self, name: str) -> Labels:
        for step in self.steps:
            if step.result == name:
                return step.labels
        raise KeyError(name)

    def loads(self) -> Iterator[Load]:
        for step in self.steps:
            if isinstance(step, Load):
                yield step

    def __str__(self) -> str:
        lines = [f"{role.index}: {role.role}{f' ({role.detail})' if role.detail else ''}" for role in self.roles]
        lines += [*map(str, self.steps), str(self.combine)]
        if self.chunk is not None:
            lines.append(f"in pieces along {self.chunk}")
        return "\n".join(lines)

    def verify(self) -> Plan:
        """Prove that every value is defined once before its use and that labels add up.

        Raises:
            AssertionError: the planner built a broken plan.
        """
        known: dict[str, Labels] = {}
        for step in self.steps:
            sources = [getattr(step, name, None) for name in ("source", "left", "right", "value")]
            for source in sources:
                assert source is None or source in known, f"{source} is used before it is defined in: {step}"
            assert step.result not in known, f"{step.result} is defined twice"
            assert len(set(step.labels)) == len(step.labels), f"a label stands twice in: {step}"
            if isinstance(step, Sum | Scale):
                assert set(step.labels) <= set(known[step.source]), f"labels appear from nowhere in: {step}"
            if isinstance(step, Multiply):
                union = set(known[step.left]) | set(known[step.right])
                assert set(step.labels) | set(step.over) == union, f"labels do not add up in: {step}"
                assert not set(step.labels) & set(step.over), f"a label is both kept and summed in: {step}"
            if isinstance(step, Dot):
                assert set(known[step.left]) == {*step.batch, *step.m, *step.k}, f"left labels differ in: {step}"
                assert set(known[step.right]) == {*step.batch, *step.k, *step.n}, f"right labels differ in: {step}"
            known[step.result] = step.labels
        if self.combine.value is not None:
            final = set(known[self.combine.value])
            output = {index.name for index in self.bound.statement.output.indices()}
            extremum = self.bound.statement.operator in ("max=", "min=")
            assert extremum or final <= output, f"unsummed labels reach the output: {final - output}"
        return self
