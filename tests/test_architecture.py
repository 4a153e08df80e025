"""The package's layers: who may import whom, who may name which tool, how long a file may be.

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

from tests.source_tree import PACKAGE, ROOT, Source, module_of, package_modules, sources

# folder or module of insum_nn -> what of ours it may import, beside its own folder.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "kept": set(),
    "facts": set(),
    "compiler": {"errors", "facts", "kept"},
    "schedules": {"compiler.schedule.database"},
    "formats": {"errors", "facts", "kept"},
    "structure": {"errors", "facts"},
    "ops": {"errors", "facts", "kept", "compiler.api", "compiler.options", "formats", "structure"},
    "layers": {"errors", "facts", "kept", "compiler.options", "ops", "formats", "structure"},
    "models": {"errors", "layers"},
    "datasets": {"errors"},
    "testing": {"errors", "facts", "compiler", "formats", "structure", "ops", "layers"},
}

# Inside the compiler a file imports only files above it. A new file needs a line here, in its place.
COMPILER_ORDER = [
    "lang",
    "lang.syntax",
    "lang.parser",
    "lang.check",
    "options",
    "lang.epilogue",
    "runtime",
    "runtime.autocast",
    "lang.derivative",
    "lang.bind",
    "lang.misses",
    "lang.shapes",
    "lang.claimed_facts",
    "lang.index_checks",
    "lang.interpreter",
    "ir",
    "ir.nodes",
    "ir.graph",
    "ir.printer",
    "ir.verify",
    "ir.build",
    "ir.interpret",
    "passes",
    "passes.combine",
    "passes.place",
    "codegen",
    "codegen.triton",
    "codegen.python",
    "runtime.artifact",
    "plans",
    "plans.contraction",
    "plans.chain",
    "plans.plan",
    "plans.planner",
    "runtime.library_calls",
    "schedule",
    "schedule.budget",
    "plans.fx_access",
    "plans.fx_extremum",
    "plans.fx_lowering",
    "schedule.cache_folder",
    "codegen.inductor_guards",
    "codegen.inductor",
    "forms",
    "forms.tables",
    "forms.points",
    "forms.form",
    "forms.axes",
    "forms.schedule",
    "forms.candidates",
    "forms.text",
    "forms.kernel_misses",
    "forms.kernel_epilogue",
    "forms.early",
    "forms.loops",
    "forms.tail",
    "forms.segment",
    "forms.beside",
    "forms.alike",
    "forms.source",
    "runtime.row_partition",
    "forms.numbers",
    "forms.launch",
    "schedule.database",
    "schedule.progress",
    "schedule.tune",
    "forms.generated",
    "forms.keyed",
    "plans.chained",
    "runtime.execution",
    "plans.choice",
    "plans.paths",
    "runtime.dispatch",
    "runtime.traced",
    "runtime.extremum_gradient",
    "runtime.backward",
    "runtime.batched_gradients",
    "runtime.autograd",
    "explain",
    "explain.svg",
    "explain.html",
    "explain.loop_nest",
    "explain.dataflow",
    "explain.report",
    "runtime.bound_program",
    "runtime.out_argument",
    "runtime.program",
    "forms.joint",
    "api",
    "__init__",
]

# The reference is the oracle of the rest, so it shares nothing with what it judges.
REFERENCE_MAY_IMPORT = {"lang", "lang.syntax", "lang.parser", "lang.check", "lang.bind"}

# tool -> the only files of the package that name it.
ONLY_IN = {
    "torch.fx": tuple(f"insum_nn/compiler/plans/{name}.py" for name in ("fx_access", "fx_extremum", "fx_lowering")),
    # `onlookers` asks for what is known of symbolic sizes.
    "torch.fx.experimental": ("insum_nn/compiler/codegen/inductor.py", "insum_nn/ops/onlookers.py"),
    "torch._inductor": ("insum_nn/compiler/codegen/inductor.py",),
    "triton": ("insum_nn/compiler/forms/launch.py",),
}
# A graph is built in one file and handed on by its type.
HANDED_ON = {"torch.fx", "torch.fx.GraphModule"}

MAX_LINES = 500
# file -> why it is longer; each line here is a debt.
LONG_FILES: dict[str, str] = {}

MODULES = package_modules()


def area(module: str) -> str:
    """The folder (or single module) of the package that a module belongs to: `insum_nn.ops.spmm` -> `ops`."""
    return module.split(".")[1] if "." in module else ""


def allowed(target: str, own: str, permitted: set[str]) -> bool:
    inner = target.partition(".")[2]
    return area(target) == own or any(inner == p or inner.startswith(f"{p}.") for p in permitted)


def forbidden_imports(source: Source) -> list[str]:
    """The imports of one file that the table does not allow, as `line: target`."""
    own = area(source.module)
    permitted = MAY_IMPORT[own]
    found = [(item.line, module_of(item.target, MODULES)) for item in source.imports]
    return [f"line {line}: {target}" for line, target in found if target and not allowed(target, own, permitted)]


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
        ("layers/x.py", "import insum_nn.compiler.plans.plan", "insum_nn.compiler"),
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


def test_compiler_files_import_only_files_above_them():
    def below(source: Source) -> list[str]:
        """What a file imports that stands below it in the table."""
        own = source.module.removeprefix("insum_nn.compiler").removeprefix(".") or "__init__"
        assert own in COMPILER_ORDER, f"{source.name}: give it its place in COMPILER_ORDER"
        above = REFERENCE_MAY_IMPORT if own == "lang.interpreter" else {*COMPILER_ORDER[: COMPILER_ORDER.index(own)]}
        targets = {module_of(item.target, MODULES) for item in source.imports}
        inner = {t.removeprefix("insum_nn.compiler.") for t in targets if t and t.startswith("insum_nn.compiler.")}
        return sorted(inner - above)

    assert REFERENCE_MAY_IMPORT < {*COMPILER_ORDER[: COMPILER_ORDER.index("lang.interpreter")]}
    assert faults(below, sources("insum_nn/compiler")) == {}


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


@pytest.mark.parametrize(
    ("name", "text", "bad"),
    [
        ("api.py", "import triton", {"triton: line 1"}),
        ("api.py", "from torch import fx\ndef f(g: fx.GraphModule): ...", set()),
        ("api.py", "from torch import fx as g\ng.Graph()", {"torch.fx.Graph: line 2"}),
        ("api.py", "import torch\ntorch._inductor.config.triton", {"torch._inductor.config.triton: line 2"}),
        (
            "plans/fx_lowering.py",
            "from torch.fx.experimental import _config",
            {"torch.fx.experimental._config: line 1"},
        ),
        ("codegen/inductor.py", "from torch._inductor import config\nconfig.triton.native_matmul", set()),
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


def test_files_stay_short():
    lengths = {source.name: source.text.count("\n") for source in [*MODULES.values(), *sources("benchmarks")]}
    long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert {*long} - {*LONG_FILES} == set(), f"find the missing stage, or give a reason: {long}"
    assert {*LONG_FILES} - {*long} == set(), "these are short again, or gone: take them off LONG_FILES"


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
