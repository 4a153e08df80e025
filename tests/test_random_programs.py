"""The random programs are valid, cover the language, and are the same each time.

The checks below parse and run each statement with Python's own `ast`, so they depend
on nothing of the package but the generator.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from functools import cache

import pytest
import torch

from insum_nn.testing.random_programs import RandomProgram, random_program

SEEDS = range(500)
OPERATOR = re.compile(r"^(.*?)\s(\+=|max=|min=|=)\s(.*)$")


@cache
def programs(profile: str) -> tuple[RandomProgram, ...]:
    return tuple(random_program(seed, profile=profile) for seed in SEEDS)


def split(program: RandomProgram) -> tuple[ast.expr, str, ast.expr]:
    left, operator, right = OPERATOR.match(program.expression).groups()
    return ast.parse(left, mode="eval").body, operator, ast.parse(right, mode="eval").body


def factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return factors(node.left) + factors(node.right)
    return [node]


def subscripts(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Subscript):
        return []
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def accesses(node: ast.AST) -> list[ast.Subscript]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Subscript)]


def variables(node: ast.AST) -> set[str]:
    """The index variables below a node: names that stand inside a subscript and are not subscripted."""
    tensors = {id(access.value) for access in accesses(node)}
    found: set[str] = set()
    for access in accesses(node):
        for part in subscripts(access):
            found |= {inner.id for inner in ast.walk(part) if isinstance(inner, ast.Name) and id(inner) not in tensors}
    return found


def nesting(node: ast.AST) -> int:
    if isinstance(node, ast.Subscript):
        return 1 + max((nesting(part) for part in subscripts(node)), default=0)
    return max((nesting(child) for child in ast.iter_child_nodes(node)), default=0)


def bind(program: RandomProgram) -> dict[str, int]:
    """Every index's extent by the rules of the language; conflicts and gaps fail here."""
    left, _, right = split(program)
    extents = dict(program.sizes)

    def fix(name: str, extent: int) -> None:
        assert extents.setdefault(name, extent) == extent, (name, program.expression)

    for access in accesses(left) + accesses(right):
        shape: tuple[int | None, ...] | None
        if access is left:
            shape = program.out_shape if program.initial is None else tuple(program.initial.shape)
        else:
            shape = tuple(program.tensors[access.value.id].shape)
        if shape is None:
            continue
        assert len(shape) == len(subscripts(access)), program.expression
        for part, extent in zip(subscripts(access), shape, strict=True):
            if isinstance(part, ast.Name) and extent is not None:
                fix(part.id, extent)
    assert set(extents) == variables(left) | variables(right), program.expression
    nested = set[str]().union(*(variables(inner) for inner in accesses(left) if inner is not left))
    written = variables(left) - variables(right) - nested
    assert written <= set(program.sizes), "an index that is only written needs a size"
    return extents


def output_shape(program: RandomProgram, extents: dict[str, int]) -> tuple[int, ...]:
    """The output's shape; each extent that cannot be inferred must have been given."""
    left, _, _ = split(program)
    given: tuple[int | None, ...] = (None,) * len(subscripts(left))
    if program.initial is not None:
        given = tuple(program.initial.shape)
        assert program.out_shape is None or len(program.out_shape) == len(given)
        assert all(a is None or a == b for a, b in zip(program.out_shape or given, given, strict=True))
    elif program.out_shape is not None:
        given = program.out_shape
    shape = []
    for part, extent in zip(subscripts(left), given, strict=True):
        if isinstance(part, ast.Name):
            assert extent in (None, extents[part.id])
            shape.append(extents[part.id])
        else:
            assert extent is not None, "only a plain index gives the output an extent"
            shape.append(extent)
    return tuple(shape)


class Miss(Exception):
    """A read or a write points nowhere, so its term takes no part."""


class Loops:
    """Runs a statement point by point, and counts what its accesses meet."""

    def __init__(self, program: RandomProgram) -> None:
        self.program = program
        self.met: Counter[str] = Counter()
        self.lists = {name: tensor.tolist() for name, tensor in program.tensors.items()}

    def position(self, node: ast.expr, point: dict[str, int]) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name):
                return point[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.position(operand, point)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.position(left, point), self.position(right, point)
                return a * b if isinstance(op, ast.Mult) else a + b if isinstance(op, ast.Add) else a - b
            case ast.Subscript():
                entry = self.cell(node, point, role="index")
                if entry == -1:
                    self.met["-1"] += 1
                    raise Miss
                assert entry >= 0
                return entry
            case _:
                raise AssertionError(ast.dump(node))

    def cell(self, node: ast.Subscript, point: dict[str, int], *, role: str) -> float | int:
        name = node.value.id
        shape = self.program.tensors[name].shape
        value = self.lists[name]
        outside = False
        for part, extent in zip(subscripts(node), shape, strict=True):
            position = self.position(part, point)
            if not 0 <= position < extent:
                assert not isinstance(part, ast.Subscript), "a bare index tensor left its axis"
                assert not isinstance(part, ast.Name | ast.Constant)
                outside = True
            elif not outside:
                value = value[position]
        if outside:
            self.met[f"outside {role}"] += 1
            raise Miss
        return value

    def factor(self, node: ast.expr, point: dict[str, int]) -> float:
        match node:
            case ast.Constant(value=value):
                return float(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.factor(operand, point)
            case ast.Name(id=name):
                return self.lists[name]
            case _:
                return self.cell(node, point, role="value")

    def run(self, *, values: bool = True) -> torch.Tensor:
        program = self.program
        left, operator, right = split(program)
        extents = bind(program)
        shape = output_shape(program, extents)
        combine = {"max=": max, "min=": min}.get(operator, lambda a, b: a + b)
        cells: dict[tuple[int, ...], float] = {}
        if program.initial is not None:
            for at in itertools.product(*map(range, shape)):
                cells[at] = program.initial[at].item()
        for at in itertools.product(*map(range, extents.values())):
            point = dict(zip(extents, at, strict=True))
            term = 1.0
            missed = False
            for node in factors(right):
                try:
                    term *= self.factor(node, point)
                except Miss:
                    missed = True
            try:
                target = tuple(self.position(part, point) for part in subscripts(left))
            except Miss:
                self.met["dropped write"] += 1
                continue
            assert all(0 <= p < extent for p, extent in zip(target, shape, strict=True)), "a write left the output"
            if missed:
                continue
            if target in cells:
                self.met["written again"] += 1
            cells[target] = combine(cells[target], term) if target in cells else term
        result = torch.zeros(shape, dtype=torch.float64)
        for target, value in cells.items():
            result[target] = value
        return result


def features(program: RandomProgram) -> Counter[str]:
    """What a program has, read off its text and tensors."""
    left, operator, right = split(program)
    found: Counter[str] = Counter()
    loops = Loops(program)
    loops.run()
    for name in loops.met:
        found[f"met: {name}"] = 1
    extents = bind(program)
    kinds = factors(right)
    found[f"operator {operator}"] = 1
    found[f"{len(kinds)} factors"] = 1
    found["literal"] = any(isinstance(node, ast.Constant | ast.UnaryOp) for node in kinds)
    found["scalar"] = any(isinstance(node, ast.Name) for node in kinds)
    found["initial"] = program.initial is not None
    found["initial with out_shape"] = program.initial is not None and program.out_shape is not None
    found["sizes"] = bool(program.sizes)
    found["out_shape with None"] = program.out_shape is not None and None in program.out_shape
    found["no out_shape"] = program.out_shape is None and program.initial is None
    found["broadcast"] = bool(variables(left) - variables(right))
    found["extent from the output alone"] = any(
        not any(isinstance(p, ast.Name) and p.id == name for a in accesses(right) for p in subscripts(a))
        and name not in program.sizes
        for name in variables(right)
    )
    for extent in (0, 1):
        found[f"extent {extent}"] = extent in extents.values()
    found["empty tensor"] = any(tensor.numel() == 0 for tensor in program.tensors.values())
    found["many points"] = 500 < torch.Size(extents.values()).numel() <= 2000
    found[f"output of {len(subscripts(left))} dims"] = 1
    for tensor in program.tensors.values():
        found[f"{'value' if tensor.is_floating_point() else 'index'} of {tensor.dim()} dims"] = 1
        found[f"{tensor.dtype}"] = 1
        kind = "value" if tensor.is_floating_point() else "index"
        found[f"non-contiguous {kind}"] |= not tensor.is_contiguous()
        found[f"expanded {kind}"] |= any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
        found[f"offset {kind}"] |= tensor.storage_offset() > 0
        if not tensor.is_floating_point():
            entries = [entry for entry in tensor.flatten().tolist() if entry >= 0]
            found["entry -1"] |= bool((tensor == -1).any())
            found["duplicate entries"] |= len(set(entries)) < len(entries)
            found["distinct entries"] |= len(entries) > 1 and len(set(entries)) == len(entries)
    for side, node in (("write", left), ("read", right)):
        found[f"{side} nesting {nesting(node)}"] = 1
        for access in accesses(node):
            parts = subscripts(access)
            names = [part.id for part in parts if isinstance(part, ast.Name)]
            where = side if access is left or not isinstance(node, ast.Subscript) else "index"
            found[f"{where} diagonal"] |= len(set(names)) < len(names)
            found[f"{where} several indirections"] |= sum(bool(accesses(part)) for part in parts) > 1
            for part in parts:
                found[f"{where} constant"] |= isinstance(part, ast.Constant)
                found[f"{where} bare indirection"] |= isinstance(part, ast.Subscript)
                if isinstance(part, ast.BinOp):
                    found[f"{where} {'mixed' if accesses(part) else 'affine'}"] = 1
                    found[f"{where} minus"] |= any(isinstance(inner, ast.Sub) for inner in ast.walk(part))
                    found[f"{where} coefficient"] |= any(isinstance(inner, ast.Mult) for inner in ast.walk(part))
    texts = [ast.unparse(access) for access in accesses(left) + accesses(right)]
    bases = Counter(text.split("[")[0] for text in set(texts))
    for name, count in bases.items():
        if name in program.tensors and count > 1:
            found["value tensor twice" if program.tensors[name].is_floating_point() else "index tensor twice"] = 1
    names = set(re.findall(r"\w+", program.expression))
    found["long name"] = any(len(name) > 12 for name in names)
    found["unicode name"] = any(not name.isascii() for name in names)
    return +Counter({name: int(count) for name, count in found.items()})


EXPECTED = {
    **dict.fromkeys(("operator +=", "operator =", "operator max=", "operator min="), 60),
    **{f"{count} factors": 30 for count in (1, 2, 3, 4)},
    **dict.fromkeys(("literal", "scalar", "initial", "sizes", "no out_shape", "long name", "unicode name"), 40),
    **dict.fromkeys(("initial with out_shape", "out_shape with None", "broadcast", "many points"), 10),
    "extent from the output alone": 5,
    **dict.fromkeys(("extent 0", "extent 1", "empty tensor"), 15),
    **{f"value of {dims} dims": 15 for dims in range(7)},
    **{f"output of {dims} dims": 10 for dims in range(7)},
    **{f"index of {dims} dims": 15 for dims in (1, 2, 3)},
    **dict.fromkeys(("torch.float64", "torch.int32", "torch.int64"), 60),
    **{f"{how} {kind}": 40 for how in ("non-contiguous", "expanded", "offset") for kind in ("value", "index")},
    **dict.fromkeys(("entry -1", "duplicate entries", "distinct entries"), 60),
    **dict.fromkeys(("read nesting 1", "read nesting 2", "read nesting 3", "read nesting 4"), 10),
    **dict.fromkeys(("write nesting 1", "write nesting 2", "write nesting 3"), 10),
    **{
        f"{where} {what}": 10
        for where in ("read", "write")
        for what in ("diagonal", "several indirections", "constant", "bare indirection", "affine", "mixed")
    },
    **{f"{where} {what}": 10 for where in ("read", "write") for what in ("minus", "coefficient")},
    **dict.fromkeys(("value tensor twice", "index tensor twice"), 15),
    **dict.fromkeys(
        ("met: -1", "met: outside index", "met: outside value", "met: dropped write", "met: written again"), 25
    ),
}


def test_every_feature_occurs() -> None:
    total: Counter[str] = Counter()
    for program in programs("full"):
        total.update(features(program))
    missing = {name: (total[name], least) for name, least in EXPECTED.items() if total[name] < least}
    assert not missing, f"features seen too rarely (seen, wanted): {missing}"


def test_most_programs_compute_something() -> None:
    nonzero = sum(bool((Loops(program).run() != 0).any()) for program in programs("full"))
    assert nonzero > 0.6 * len(SEEDS), nonzero


@pytest.mark.parametrize("profile", ["full", "smooth"])
def test_programs_are_valid(profile: str) -> None:
    for program in programs(profile):
        _, operator, _ = split(program)
        assert program.initial is None or operator != "="
        assert program.output not in program.tensors
        assert set(re.findall(r"(\w+)\[", program.expression)) <= set(program.tensors) | {program.output}
        assert set(program.tensors) <= set(re.findall(r"\w+", program.expression)), "a tensor is not used"
        points = torch.Size(bind(program).values()).numel()
        assert points <= (2000 if profile == "full" else 300)
        result = Loops(program).run()
        assert result.isfinite().all(), "a gap between a view's elements was read"


def test_smooth_programs_suit_gradcheck() -> None:
    for program in programs("smooth"):
        _, operator, _ = split(program)
        assert operator in ("+=", "=")
        for tensor in [*program.tensors.values(), *([] if program.initial is None else [program.initial])]:
            if tensor.is_floating_point():
                assert tensor.dtype == torch.float64
                assert tensor.numel() <= 60
                assert all(s > 0 or n <= 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def test_one_seed_is_one_program() -> None:
    for seed in (0, 1, 7, 123, 10**9, -3):
        for profile in ("full", "smooth"):
            first, second = (random_program(seed, max_size=4, profile=profile) for _ in range(2))
            assert first.expression == second.expression
            assert (first.sizes, first.out_shape, first.output) == (second.sizes, second.out_shape, second.output)
            assert list(first.tensors) == list(second.tensors)
            pairs = [(tensor, second.tensors[name]) for name, tensor in first.tensors.items()]
            pairs += [] if first.initial is None else [(first.initial, second.initial)]
            for a, b in pairs:
                assert a.dtype == b.dtype
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    random_program(11)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_differ() -> None:
    assert len({program.expression for program in programs("full")}) > 0.95 * len(SEEDS)


@pytest.mark.parametrize(("options", "word"), [({"profile": "rough"}, "profile"), ({"max_size": 0}, "max_size")])
def test_bad_arguments_are_named(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        random_program(0, **options)


def test_largest_extent_is_honoured() -> None:
    for seed in range(100):
        assert max(bind(random_program(seed, max_size=2)).values(), default=0) <= 2


@pytest.mark.parametrize("block", range(5))
def test_insum_agrees_with_the_loops(block: int) -> None:
    """Half of the seeds: tests/compiler/test_property.py compares others with an interpreter, and that with these."""
    from insum_nn import insum

    for seed in SEEDS[block::10]:
        program = random_program(seed)
        expected = Loops(program).run()
        result = insum(program.expression, **program.arguments())
        # A statement of numbers alone has torch's default dtype.
        floats = program.initial is not None or any(t.is_floating_point() for t in program.tensors.values())
        assert result.dtype == (torch.float64 if floats else torch.get_default_dtype()), (seed, program)
        tolerance = 1e-12 if floats else 1e-6
        torch.testing.assert_close(
            result.double(),
            expected,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"seed {seed}: {text}",  # noqa: B023
        )
