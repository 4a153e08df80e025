"""The project's own Python files, as syntax trees: what the tests of its structure look at."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "insum_nn"


@dataclass(frozen=True)
class Import:
    """One imported module or name, as an absolute dotted path."""

    target: str
    line: int
    top_level: bool  # runs whenever the module is imported: stands in no function, `try` or `if`
    typing_only: bool  # stands under `if TYPE_CHECKING`


@dataclass(frozen=True)
class Source:
    """One file of the project."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports())

    def _imports(self) -> Iterator[Import]:
        top = set(self.tree.body)
        conditions = [n for n in self.tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        typing = {inner for node in conditions for statement in node.body for inner in ast.walk(statement)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = f"{self._base(node)}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    yield Import(prefix + alias.name, node.lineno, node in top, node in typing)

    def _base(self, node: ast.ImportFrom) -> str:
        """The absolute module that a `from` import names; a relative one starts at this file's package."""
        if node.level == 0:
            return node.module or ""
        package = self.module.split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What a name stands for here: `from torch import fx` makes `fx` be `torch.fx`."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name: f"{self._base(node)}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        return found

    def dotted_names(self) -> Iterator[tuple[str, int]]:
        """Every import and every use of an imported name (`fx.Graph` as `torch.fx.Graph`), with its line."""
        for item in self.imports:
            yield item.target, item.line
        inner_parts = {n.value for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self.tree):
            chain: list[str] = []
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if node not in inner_parts and isinstance(inner, ast.Name):
                yield ".".join([self.aliases.get(inner.id, inner.id), *reversed(chain)]), inner.lineno


def sources(folder: str) -> list[Source]:
    """All Python files under a folder of the project, in a fixed order."""
    return [Source(path) for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]


def package_modules() -> dict[str, Source]:
    """The package's files by dotted module name."""
    return {source.module: source for source in sources(PACKAGE)}


def module_of(target: str, modules: Iterable[str]) -> str | None:
    """The module of ours that an imported path lies in; `a.b.name` lies in `a.b` when `name` is no module."""
    if target != PACKAGE and not target.startswith(f"{PACKAGE}."):
        return None
    known = {PACKAGE, *modules, *(module.rpartition(".")[0] for module in modules)}
    while target not in known:
        target = target.rpartition(".")[0]
    return target
