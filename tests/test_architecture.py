"""The package's layers: who may import whom, who may name which tool, how much code each folder may have.

An import counts wherever it stands: inside a function, under `if TYPE_CHECKING`, in a `try`.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.code_lines import BUDGETS, Budget, code_lines, counted, over_budget
from tests.source_tree import PACKAGE, ROOT, Source, module_of, package_modules, sources

# folder or module of insum_nn -> what of ours it may import, in addition to its own folder.
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {
        "compiler.api",
        "compiler.kernels.c_compiler",
        "compiler.options",
        "compiler.tuning.cache_folder",
        "errors",
        "version",
    },
    "errors": set(),
    "locks": set(),
    "tensor_cache": {"locks"},
    "facts": set(),
    "faults": {"errors"},
    "dtypes": set(),
    "sorted_rows": set(),
    "tiles": set(),
    "version": set(),
    "compiler": {"dtypes", "errors", "facts", "locks", "tensor_cache", "version"},
    "schedules": {"compiler.tuning.database"},
    "formats": {"dtypes", "errors", "facts", "sorted_rows", "tensor_cache", "tiles"},
    # Maps are integers, which no statement computes: their kernels are launched as generated ones are.
    "structure": {"dtypes", "errors", "facts", "faults", "sorted_rows", "tiles", "compiler.kernels.written"},
    "ops": {
        "dtypes",
        "errors",
        "facts",
        "faults",
        "locks",
        "sorted_rows",
        "tensor_cache",
        "compiler.api",
        "compiler.options",
        "formats",
        "structure",
    },
    "layers": {
        "dtypes",
        "errors",
        "facts",
        "faults",
        "locks",
        "tensor_cache",
        "tiles",
        "compiler.api",
        "compiler.options",
        "ops",
        "formats",
        "structure",
    },
    "models": {"errors", "layers"},
    # The package has one private folder on disk.
    "datasets": {"errors", "faults", "compiler.tuning.cache_folder"},
    "testing": {"dtypes", "errors", "facts", "compiler", "formats", "structure", "ops", "layers", "models"},
}

# folder or module of insum_nn.compiler -> what of the compiler it may import, in addition to its own folder.
COMPILER_MAY_IMPORT: dict[str, set[str]] = {
    "options": set(),
    "lang": set(),
    "ir": {"lang"},
    "passes": {"ir", "lang"},
    "tuning": {"lang", "ir", "options"},
    "schedule": {"lang", "options", "ir", "passes", "tuning"},
    "codegen": {"lang", "options", "ir"},
    "kernels": {"lang", "options", "ir", "passes", "schedule", "tuning", "codegen"},
    "runtime": {"lang", "options", "ir", "passes", "schedule", "tuning", "codegen", "kernels"},
    "explain": {"lang", "options", "ir", "passes", "schedule", "tuning", "codegen", "kernels", "runtime"},
    "api": {"lang", "options", "runtime", "explain", "kernels"},
}

# (file or folder, what it imports against the table) -> why; each line here is a debt.
COMPILER_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("schedule.tune", "kernels"): "a candidate is measured with the row partition that it asks for",
    ("tuning.database", "kernels.machine_code"): "an entry names the version of Triton that it was measured with",
    ("runtime.program", "explain.report"): "`Program.explain()` returns a report",
    ("runtime.program", "explain.sequence"): "`Program.explain()` returns a report",
}

# The interpreter is the oracle of the rest, so it shares nothing with what it judges but torch's functions.
INTERPRETER_MAY_IMPORT = {"lang", "lang.functions", "lang.syntax", "lang.parser", "lang.check", "lang.bind"}

# tool -> the only files of the package that name it.
ONLY_IN = {
    "torch.fx": (),
    "torch.fx.experimental": ("insum_nn/compiler/runtime/modes.py",),
    "torch._inductor": (),
    "triton": tuple(f"insum_nn/compiler/kernels/{name}.py" for name in ("machine_code", "stored_code", "c_launcher")),
}
# A graph is built in one file and handed on by its type.
HANDED_ON = {"torch.fx", "torch.fx.GraphModule"}

# Passes and printers rewrite nodes: a regular expression would read generated text.
NO_REGULAR_EXPRESSIONS = ("passes", "codegen")
# file -> why it imports `re` all the same.
REGULAR_EXPRESSIONS: dict[str, str] = {}

# An operator is its statements; what records gradients is `compiler/runtime/autograd.py` and `multilinear.py`.
STATEMENTS_ALONE = ("ops", "layers")
# file -> why it defines an autograd function all the same; each line here is a debt.
AUTOGRAD_FUNCTIONS: dict[str, str] = {}

# What is kept of tensors between calls; a layer's index tensors are its buffers, and its programs the compiler's.
# file of ops/ or layers/ -> why it keeps anything all the same; each line here is a debt.
KEPT_OF_TENSORS: dict[str, str] = {
    "insum_nn/layers/graph/messages.py": "edges, normalised and sorted: that costs more than a product with them",
    "insum_nn/ops/tensor_product_spec.py": "what a spec decides for each device: selections of columns, programs",
    "insum_nn/ops/tensor_product_roles.py": "likewise",
}

# Programs are remembered by the compiler: `compiler/api.py: built_program`.
# file of ops/ or layers/ -> why it caches results of a function all the same; each line here is a debt.
CACHED_FUNCTIONS: dict[str, str] = {
    "insum_nn/ops/tensor_product_spec.py": "the layout of a spec, which is found by the text that operators carry",
}

# What torch sees of an operator while it traces is `compiler/runtime/inline.py` and `traced.py`.
# file of ops/ or layers/ -> why it registers an operator of its own all the same; each line here is a debt.
OWN_OPERATORS: dict[str, str] = {
    "insum_nn/ops/adjacency_product.py": "takes gradients by the transposed matrix; the statement's would sort it",
    "insum_nn/ops/tensor_product.py": "Dynamo and TorchScript keep it, and see no statements",
}

# Gradients are derived: `compiler/lang/derivative.py`.
# file of ops/ or layers/ -> why it writes the gradient of an operator all the same; each line here is a debt.
OWN_GRADIENTS: dict[str, str] = {}

# A product or a scatter is a statement.
LIBRARY_CALLS = (
    "addbmm addmm addmv baddbmm bmm chain_matmul convolution conv1d conv2d conv3d dot einsum index_add index_add_ "
    "index_copy_ index_put index_put_ index_reduce index_reduce_ linear matmul mm mv put_ sampled_addmm scatter "
    "scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ segment_reduce tensordot vdot"
).split()
# file of ops/ or layers/ -> why it calls one of these or writes `a @ b` all the same.
CALLS_A_LIBRARY: dict[str, str] = {
    "insum_nn/layers/graph/weighted.py": "the first layers of networks, which are torch's linear ones",
    "insum_nn/layers/equivariant/tensor_product_conv.py": "what TorchScript compiles, for processes without Python",
    "insum_nn/layers/equivariant/radial.py": "dense products of a network, between the statements of its activations",
    "insum_nn/layers/pruned/block_sparse_linear.py": "the dense product, where it is faster",
    "insum_nn/layers/spconv/core.py": "spconv's functions on its tables of pairs",
    "insum_nn/layers/spconv/ops.py": "spconv's functions on its tables of pairs",
    "insum_nn/layers/spconv/utils.py": "numbers of voxels and points: integers",
    "insum_nn/layers/voxel/conv_base.py": "what `torch.jit.trace` can record of a kernel of one cell",
    "insum_nn/layers/voxel/sequential.py": "the first of each voxel's points: integers",
}

# Rules by device stand in `compiler/runtime/statement_choice.py`.
# file of ops/ or layers/ -> why it asks where a tensor is all the same; each line here is a debt.
DEVICE_RULES: dict[str, str] = {
    "insum_nn/layers/spconv/hash.py": "spconv's tables differ by device",
    "insum_nn/layers/spconv/utils.py": "spconv's interface compares kinds of devices",
}

# What is kept of tensors is kept by one class, `insum_nn/tensor_cache.py: TensorCache`, which `forget` reaches.
NO_CACHES_OF_TENSORS = ("weakref", "torch.utils.weak")

# Files of one folder of the compiler, `__init__.py` not counted.
MAX_FILES = 14
# folder -> why it holds more, or may for a while.
LARGE_FOLDERS: dict[str, str] = {
    "insum_nn/compiler/kernels": "launches of C stand beside those of Triton until both are nodes of one graph",
    "insum_nn/compiler/lang": "functions and programs of several statements are parts of one language",
    "insum_nn/compiler/runtime": "all that a call meets: its program, gradients, tracers, whole steps",
}
MODULES = package_modules()


def area(module: str, depth: int = 1) -> str:
    """The folder (or single module) of the package that a module belongs to: `insum_nn.ops.spmm` -> `ops`."""
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else ""


def within(module: str, places: Iterable[str]) -> bool:
    """Whether a dotted module is one of the places or lies in one of them."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


def own_imports(source: Source) -> list[tuple[int, str]]:
    """The modules of the package that a file imports, with their lines."""
    found = [(item.line, module_of(item.target, MODULES)) for item in source.imports]
    return [(line, target) for line, target in found if target]


def forbidden_imports(source: Source) -> list[str]:
    """The imports of one file that the table does not allow, as `line: target`."""
    own = area(source.module)
    permitted = {f"{PACKAGE}.{place}" for place in {own, *MAY_IMPORT[own]}}
    return [f"line {line}: {target}" for line, target in own_imports(source) if not within(target, permitted)]


COMPILER = f"{PACKAGE}.compiler"


def against_the_stages(source: Source) -> list[tuple[int, str, str]]:
    """The imports of a compiler's file that the table of stages does not allow: line, importer, target."""
    importer = source.module.removeprefix(f"{COMPILER}.")
    own = area(source.module, 2)
    permitted = {own, *COMPILER_MAY_IMPORT[own]}
    targets = [(line, t.removeprefix(f"{COMPILER}.")) for line, t in own_imports(source) if within(t, [COMPILER])]
    return [(line, importer, target) for line, target in targets if not within(target, permitted)]


def is_excepted(importer: str, target: str) -> bool:
    return any(within(importer, [own]) and within(target, [other]) for own, other in COMPILER_EXCEPTIONS)


def forbidden_between_stages(source: Source) -> list[str]:
    """The imports of a compiler's file that neither the table of stages nor an exception allows."""
    found = against_the_stages(source)
    return [f"line {line}: {target}" for line, own, target in found if not is_excepted(own, target)]


def test_the_package_has_files():
    assert MODULES


def faults(check: Callable[[Source], Any], checked: Iterable[Source] = MODULES.values()) -> dict[str, Any]:
    """What a check finds, by file; files without a fault are left out."""
    return {source.name: found for source in checked if (found := check(source))}


def test_imports_follow_the_layers():
    # The package's face may import all of it; test_public_names.py checks that it does nothing else.
    inner = [source for name, source in MODULES.items() if name != PACKAGE]
    assert {s.name for s in inner if area(s.module) not in MAY_IMPORT} == set(), "a folder needs a line in MAY_IMPORT"
    assert faults(forbidden_imports, inner) == {}


@pytest.mark.parametrize(
    ("name", "text", "bad"),
    [
        ("formats/x.py", "def f():\n    from insum_nn.compiler.api import insum", "insum_nn.compiler"),
        ("formats/x.py", "from insum_nn.errors import InsumError", None),
        ("layers/x.py", "import insum_nn.compiler.runtime.program", "insum_nn.compiler"),
        ("ops/x.py", "from insum_nn import insum", "insum_nn"),
        ("errors.py", "from .compiler import ast", "insum_nn.compiler"),
    ],
)
def test_the_layer_check_sees_violations(name: str, text: str, bad: str | None):
    source = Source(ROOT / PACKAGE / name)
    vars(source)["text"] = text  # fills the cached property
    found = forbidden_imports(source)
    assert [bool(bad) and line.split(": ")[1].startswith(bad) for line in found] == ([True] if bad else [])


def test_no_import_cycles():
    """Imports delayed into functions count: they are how a cycle is hidden. Those for annotations alone do not."""
    graph: dict[str, set[str]] = {}
    for name, source in MODULES.items():
        targets = {module_of(item.target, MODULES) for item in source.imports if not item.typing_only}
        graph[name] = {t for t in targets if t is not None and t != name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


# In backticks: a file, with what is in it, or a module of one of the folders of the compiler, as `folder.module`.
_NAMED = re.compile(r"`(?:((?:\w+/)*\w+\.py)(?:: (\w+)[^`]*)?|((?:\w+\.)+\w+))`")


def dead_references(name: str, text: str) -> list[str]:
    """Files, names in files and modules of folders that stand in backticks in a text, and that are nowhere."""
    found: list[str] = []
    for match in _NAMED.finditer(text):
        path, symbol, dotted = match.groups()
        if path is not None:
            own = [source for source in PROJECT if f"/{source.name}".endswith(f"/{path}")]
            alive = any(symbol is None or re.search(rf"\b{symbol}\b", source.text) for source in own)
        else:
            folder, module, *_ = dotted.split(".")
            near = [f"/{folder}/{module}.py", f"/{folder}/{module}/"]
            alive = folder not in _FOLDERS or any(each in f"/{source.name}" for source in PROJECT for each in near)
        if not alive:
            found.append(f"{name}: {match[0]}")
    return found


_FOLDERS = {*COMPILER_MAY_IMPORT} - {"api", "options"}
PROJECT = [*sources(PACKAGE), *sources("tests"), *sources("benchmarks"), *sources("examples"), *sources("docs")]


def test_files_that_texts_name_exist():
    texts = {source.name: source.text for source in MODULES.values()}
    texts["CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [each for name, text in texts.items() for each in dead_references(name, text)] == []


def test_the_check_of_references_sees_dead_ones():
    text = "`passes.place_lanes` `forms/tile.py` `passes/pipeline.py: no_such_pass` `pipeline.py: lower` `x.shape`"
    assert [each.split("`")[1] for each in dead_references("x", text)] == [
        "passes.place_lanes",
        "forms/tile.py",
        "passes/pipeline.py: no_such_pass",
    ]


def compiler_files() -> list[Source]:
    return [source for name, source in MODULES.items() if within(name, [COMPILER]) and name != COMPILER]


def test_compiler_imports_follow_the_stages():
    missing = {s.name for s in compiler_files() if area(s.module, 2) not in COMPILER_MAY_IMPORT}
    assert missing == set(), "a folder needs a line in COMPILER_MAY_IMPORT"
    assert faults(forbidden_between_stages, compiler_files()) == {}


def test_exceptions_to_the_stages_are_needed():
    found = {(own, target) for source in compiler_files() for _, own, target in against_the_stages(source)}
    unneeded = {
        exception
        for exception in COMPILER_EXCEPTIONS
        if not any(within(own, [exception[0]]) and within(target, [exception[1]]) for own, target in found)
    }
    assert unneeded == set(), "nothing imports so any more: take these off COMPILER_EXCEPTIONS"


@pytest.mark.parametrize(
    ("name", "text", "bad"),
    [
        ("passes/x.py", "from insum_nn.compiler.codegen.triton import emit", "codegen.triton"),
        ("passes/x.py", "from insum_nn.compiler.ir.nodes import Kernel", None),
        ("ir/x.py", "def f():\n    from insum_nn.compiler.runtime import program", "runtime.program"),
        ("lang/x.py", "from insum_nn.compiler.options import Options", "options"),
        ("lang/x.py", "from insum_nn.errors import InsumError", None),
        ("tuning/x.py", "import insum_nn.compiler.schedule.form", "schedule.form"),
        ("schedule/x.py", "import insum_nn.compiler.tuning.database", None),
        ("codegen/x.py", "from insum_nn.compiler.passes.own_rows import own_rows", "passes.own_rows"),
    ],
)
def test_the_stage_check_sees_violations(name: str, text: str, bad: str | None):
    source = Source(ROOT / PACKAGE / "compiler" / name)
    vars(source)["text"] = text
    assert [found.split(": ")[1] for found in forbidden_between_stages(source)] == ([bad] if bad else [])


def test_the_interpreter_shares_nothing_with_what_it_judges():
    source = MODULES[f"{COMPILER}.lang.interpreter"]
    inner = {t.removeprefix(f"{COMPILER}.") for _, t in own_imports(source) if within(t, [COMPILER])}
    assert inner - INTERPRETER_MAY_IMPORT == set()


def test_passes_and_printers_use_no_regular_expressions():
    def imports_re(source: Source) -> bool:
        return any(within(item.target, ["re", "regex"]) for item in source.imports)

    folders = {f"{COMPILER}.{folder}" for folder in NO_REGULAR_EXPRESSIONS}
    found = {*faults(imports_re, (s for s in compiler_files() if within(s.module, folders)))}
    assert found - {*REGULAR_EXPRESSIONS} == set(), "rewrite nodes instead of generated text"
    assert {*REGULAR_EXPRESSIONS} - found == set(), "these no longer import re: take them off REGULAR_EXPRESSIONS"


def autograd_functions(source: Source) -> list[int]:
    """The lines of a file that name torch's autograd function."""
    return [line for name, line in source.dotted_names() if name == "torch.autograd.Function"]


def test_operators_and_layers_define_no_autograd_functions():
    folders = {f"{PACKAGE}.{folder}" for folder in STATEMENTS_ALONE}
    found = {*faults(autograd_functions, (s for s in MODULES.values() if within(s.module, folders)))}
    assert found - {*AUTOGRAD_FUNCTIONS} == set(), "write a statement; the compiler has its gradients"
    assert {*AUTOGRAD_FUNCTIONS} - found == set(), "these are statements now: take them off AUTOGRAD_FUNCTIONS"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nclass F(torch.autograd.Function): ...",
        "from torch.autograd import Function\nclass F(Function): ...",
        "from torch import autograd as a\nclass F(a.Function): ...",
    ],
)
def test_the_check_of_autograd_functions_sees_them(text: str):
    source = Source(ROOT / PACKAGE / "ops" / "x.py")
    vars(source)["text"] = text
    assert autograd_functions(source)


def keeps_tensors(source: Source) -> list[int]:
    """The lines of a file that keep something of tensors: a `TensorCache`, `.keep(..)`, or what a format shares."""
    return [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.expr) and _is_cache(node)]


def _is_cache(node: ast.AST) -> bool:
    """`TensorCache(..)` or `TensorCache[..](..)`; `x.keep(..)`; or `matrix.shared[..]`, which a format keeps."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "keep":
        return True
    if isinstance(node, ast.Call):
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        return getattr(function, "id", None) == "TensorCache"
    return isinstance(node, ast.Subscript) and getattr(node.value, "attr", None) == "shared"


def own_operators(source: Source) -> list[int]:
    """The lines of a file that register an operator with torch."""
    return [line for name, line in source.dotted_names() if name in ("torch.library.custom_op", "torch.library.define")]


def own_gradients(source: Source) -> list[int]:
    """The lines of a file that register a gradient with torch."""
    attributes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute | ast.alias)]
    named = [(getattr(node, "attr", None) or getattr(node, "name", None), node.lineno) for node in attributes]
    return [line for name, line in named if name == "register_autograd"]


def library_calls(source: Source) -> list[int]:
    """The lines of a file that call one of torch's products or scatters."""
    lines: list[int] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            lines.append(node.lineno)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            lines += [node.lineno] if name in LIBRARY_CALLS else []
    return lines


def cached_functions(source: Source) -> list[int]:
    """The lines of a file that cache what a function returns."""
    return [line for name, line in source.dotted_names() if name in ("functools.lru_cache", "functools.cache")]


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (cached_functions, "from functools import lru_cache\n@lru_cache(maxsize=8)\ndef f(): ..."),
        (cached_functions, "import functools\n@functools.cache\ndef f(): ..."),
        (keeps_tensors, "known: TensorCache[int] = TensorCache(limit=2)"),
        (keeps_tensors, "known = TensorCache[int](limit=2)"),
        (keeps_tensors, 'matrix.shared["spmm"] = 1'),
        (keeps_tensors, "layout.keep(key, build)"),
        (own_gradients, "_operator.register_autograd(_backward)"),
        (own_gradients, "from torch.library import register_autograd"),
        (library_calls, "a @ b"),
        (library_calls, "torch.nn.functional.linear(a, b)"),
        (library_calls, "from torch import bmm\nbmm(a, b)"),
        (library_calls, "out.index_add_(0, row, x)"),
        (own_operators, 'import torch\n@torch.library.custom_op("a::b", mutates_args=())\ndef f(): ...'),
        (own_operators, 'from torch.library import define\ndefine("a::b", "() -> ()")'),
    ],
)
def test_the_checks_of_what_is_kept_and_registered_see_it(check: Callable[[Source], list[int]], text: str):
    source = Source(ROOT / PACKAGE / "ops" / "x.py")
    vars(source)["text"] = text
    assert check(source)


def device_rules(source: Source) -> list[int]:
    """The lines of a file that read the kind of a device: `x.device.type`, `x.is_cuda`, `x.is_cpu`."""
    asked: list[int] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            of_device = "device" in (getattr(owner, "attr", None), getattr(owner, "id", None))
            if node.attr in ("is_cuda", "is_cpu") or (node.attr == "type" and of_device):
                asked.append(node.lineno)
    return asked


@pytest.mark.parametrize("text", ["x.device.type", "device.type", "x.is_cuda", "a.b.is_cpu"])
def test_the_check_of_device_rules_sees_them(text: str):
    source = Source(ROOT / PACKAGE / "ops" / "x.py")
    vars(source)["text"] = text
    assert device_rules(source) == [1]


@pytest.mark.parametrize(
    ("check", "known", "instead"),
    [
        (keeps_tensors, KEPT_OF_TENSORS, "make a call cheap instead of keeping its result"),
        (cached_functions, CACHED_FUNCTIONS, "the compiler remembers programs: compiler/api.py: built_program"),
        (own_operators, OWN_OPERATORS, "a statement is registered by the compiler"),
        (own_gradients, OWN_GRADIENTS, "a statement's gradients are derived by the compiler"),
        (library_calls, CALLS_A_LIBRARY, "write a statement"),
        (device_rules, DEVICE_RULES, "the compiler chooses by device: runtime/statement_choice.py"),
    ],
)
def test_operators_and_layers_keep_register_and_choose_nothing_else(
    check: Callable[[Source], list[int] | list[str]], known: dict[str, str], instead: str
):
    folders = {f"{PACKAGE}.{folder}" for folder in STATEMENTS_ALONE}
    found = {*faults(check, (s for s in MODULES.values() if within(s.module, folders)))}
    assert found - {*known} == set(), instead
    assert {*known} - found == set(), "these no longer do: take them off"


def test_operators_and_layers_keep_nothing_of_tensors_in_ways_of_their_own():
    folders = {f"{PACKAGE}.{folder}" for folder in STATEMENTS_ALONE}

    def weak(source: Source) -> list[str]:
        return [item.target for item in source.imports if within(item.target, NO_CACHES_OF_TENSORS)]

    assert faults(weak, (s for s in MODULES.values() if within(s.module, folders))) == {}


def test_folders_of_the_compiler_stay_small():
    counts: dict[str, int] = {}
    for source in compiler_files():
        if source.path.name != "__init__.py":
            folder = source.path.parent.relative_to(ROOT).as_posix()
            counts[folder] = counts.get(folder, 0) + 1
    large = {folder: count for folder, count in counts.items() if count > MAX_FILES}
    assert {*large} - {*LARGE_FOLDERS} == set(), f"split by stage, or give a reason: {large}"
    small = {folder for folder in LARGE_FOLDERS if counts.get(folder, 0) < MAX_FILES}
    assert small == set(), "these are small again, or gone: take them off LARGE_FOLDERS"


def tools_named(source: Source) -> set[str]:
    """The tools that a file names and should not, as `tool: line`."""
    found: set[str] = set()
    for name, line in source.dotted_names():
        tools = [tool for tool in ONLY_IN if name == tool or name.startswith(f"{tool}.")]
        # The longest that fits: `torch.fx.experimental` is a tool of its own.
        if tools and name not in HANDED_ON and source.name not in ONLY_IN[max(tools, key=len)]:
            found.add(f"{name}: line {line}")
    return found


def test_one_file_names_each_tool():
    assert faults(tools_named) == {}


def test_the_files_that_may_name_a_tool_do():
    named = {s.name: {name for name, _ in s.dotted_names()} for s in MODULES.values()}
    unneeded = [(t, f) for t, files in ONLY_IN.items() for f in files if not any(within(n, [t]) for n in named[f])]
    assert unneeded == [], "take these off ONLY_IN"


@pytest.mark.parametrize(
    ("name", "text", "bad"),
    [
        ("api.py", "import triton", {"triton: line 1"}),
        ("api.py", "from torch import fx\ndef f(g: fx.GraphModule): ...", set()),
        ("api.py", "from torch import fx as g\ng.Graph()", {"torch.fx.Graph: line 2"}),
        ("api.py", "import torch\ntorch._inductor.config.triton", {"torch._inductor.config.triton: line 2"}),
        (
            "codegen/aten.py",
            "from torch.fx.experimental import _config",
            {"torch.fx.experimental._config: line 1"},
        ),
    ],
)
def test_the_tool_check_sees_violations(name: str, text: str, bad: set[str]):
    source = Source(ROOT / PACKAGE / "compiler" / name)
    vars(source)["text"] = text
    assert tools_named(source) == bad


def test_extras_are_imported_where_they_can_be_missed():
    """Only declared dependencies are imported unconditionally; an extra stands in a function or a `try`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=!~;\[ ]", d)[0].replace("-", "_") for d in project["dependencies"]}
    free = {PACKAGE, *declared, *sys.stdlib_module_names}
    assert faults(lambda s: [i.target for i in s.imports if i.top_level and i.target.split(".")[0] not in free]) == {}


def test_nothing_in_the_package_knows_its_surroundings():
    outside = {"tests", "examples", "benchmarks"}
    assert faults(lambda s: [i.target for i in s.imports if i.target.split(".")[0] in outside]) == {}


def test_the_package_moves_nothing_to_a_device_of_its_own_choice():
    def moves(source: Source) -> list[int]:
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
        return [n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "cuda"]

    assert faults(moves) == {}


def test_every_folder_is_a_package():
    folders = {source.path.parent for source in MODULES.values()}
    missing = [folder.relative_to(ROOT).as_posix() for folder in folders if not (folder / "__init__.py").exists()]
    assert missing == [], "without __init__.py a folder is left out of the built package"


def test_folders_hold_their_budgets_of_code():
    counts = counted(MODULES)
    assert {*counts} == {*BUDGETS}, "a folder needs a line in tests/code_lines.py: BUDGETS"
    assert over_budget(counts, BUDGETS) == []


def test_lines_of_code_are_those_that_hold_code():
    text = '''"""The module.

    More of it.
    """

import os  # 1


# A comment.
class A:  # 2
    """A class."""

    text: str = """3
# 4
    5"""
    """What an attribute says is no docstring: 6."""

    def f(self, x: int) -> int:  # 7
        """A
        function."""
        return (  # 8

            x  # 9
        )  # 10


def g(): """One line."""
'''
    assert code_lines(text) == 10
    assert code_lines("") == 0


def test_a_folder_over_its_budget_is_named_with_its_numbers():
    source = Source(ROOT / PACKAGE / "ops" / "x.py")
    vars(source)["text"] = "a = 1\n" * 4
    counts = counted({source.module: source})
    assert counts == {"ops": 4, PACKAGE: 4}
    (message,) = over_budget(counts, {"ops": Budget(3, 2), PACKAGE: Budget(4, 2)})
    assert "ops has 4 lines" in message
    assert "budget is 3" in message
    assert "Budgets only fall" in message


# Examples and devices -------------------------------------------------------------------------------------------------


def test_every_example_has_main():
    for source in sources("examples"):
        if source.path.name.startswith("_"):
            continue  # a part shared by examples
        mains = [n for n in source.tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
        assert len(mains) == 1, f"{source.name}: an example has one function main(size=...)"
        arguments = mains[0].args
        with_default = [*arguments.args[len(arguments.args) - len(arguments.defaults) :]]
        with_default += [a for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
        assert "size" in {a.arg for a in with_default}, f"{source.name}: main takes `size`, with a default"
        tests = [ast.unparse(n.test) for n in source.tree.body if isinstance(n, ast.If)]
        assert "__name__ == '__main__'" in tests, source.name
        assert "--size" in source.text, f"{source.name}: an example is run with --size tiny"


def literal_devices(source: Source) -> list[int]:
    """Lines that put a tensor on "cuda" by a literal, outside functions that only run where there is a GPU."""
    lines: list[int] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and _is_gpu_test(node):
            return
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                lines.append(node.lineno)
            values = [*node.args, *(k.value for k in node.keywords)]
            lines.extend(v.lineno for v in values if isinstance(v, ast.Constant) and _is_cuda(v.value))
        for child in ast.iter_child_nodes(node):
            visit(child)

    if not any(_names_gpu_mark(n) for n in source.tree.body if isinstance(n, ast.Assign)):
        visit(source.tree)
    return lines


def _is_cuda(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) is not None


def _is_gpu_test(node: ast.FunctionDef) -> bool:
    marked = any("mark.gpu" in ast.unparse(decorator) for decorator in node.decorator_list)
    return marked or "gpu" in {a.arg for a in node.args.args}


def _names_gpu_mark(node: ast.Assign) -> bool:
    """`pytestmark = pytest.mark.gpu`, alone or in a list: the whole file needs a GPU."""
    return ast.unparse(node.targets[0]) == "pytestmark" and "mark.gpu" in ast.unparse(node.value)


def test_no_literal_cuda():
    # The conftest defines the fixtures `gpu` and `device`, which the others take.
    checked = [s for s in (*sources("examples"), *sources("tests")) if s.name != "tests/conftest.py"]
    assert faults(literal_devices, checked) == {}, "take the fixture `gpu` or `device`; or choose by availability"


def test_the_device_check_sees_literals():
    source = Source(ROOT / "tests" / "imagined.py")
    text = 'import torch\ndef test_a():\n    torch.ones(2, device="cuda:0")\n    torch.ones(2).cuda()\n'
    vars(source)["text"] = text + 'def test_b(gpu):\n    torch.autocast("cuda")\n'
    assert literal_devices(source) == [3, 4]
