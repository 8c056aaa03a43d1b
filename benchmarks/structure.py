"""Structure of the source tree in figures: modules, folders, names, parameters, imports, docstrings.

python -m benchmarks.structure [--list NAME]
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from benchmarks.results import ROOT, table

FOLDERS: Final = ("sbonnx", "calib", "patterns")
VERBS = ("sbonnx.api", "sbonnx.viewing")
"""Modules of the functions that are verbs of the command line."""

OPENINGS: Final = ("What ", "See ", "Where ", "The same", "How ")
EVERYWHERE: Final = frozenset({"base", "types", "__init__", "__main__"})
"""Module names that have the same meaning in every package."""

DOOR: Final = "sbonnx.report.notebook"
"""The module through which results show themselves in notebooks: it imports `sbonnx.present` when it is called."""

VAGUE: Final = frozenset({"found", "one", "made", "known", "each"})
"""Names of local variables that say nothing of what they hold."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted import name.
        path: source file.
        lines: number of lines.
        tree: syntax tree.
    """

    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def folder(self) -> str:
        return str(self.path.parent.relative_to(ROOT))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree: a walk of all trees takes a second."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods."""
        return [node for node in self.nodes if isinstance(node, Function)]


def modules() -> list[Module]:
    """Return all modules of the product, each once, although two of the folders are also symbolic links."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).parts
            if folder == "sbonnx" and inner[0] in FOLDERS:
                continue
            parts = [*(("sbonnx", folder) if folder != "sbonnx" else ("sbonnx",)), *inner]
            name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            found.append(Module(name, path, text.count("\n"), ast.parse(text)))
    return found


def only_for_types(tree: ast.Module) -> set[int]:
    """Return the identities of nodes under ``if TYPE_CHECKING:``."""
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {id(inner) for node in guarded for statement in node.body for inner in ast.walk(statement)}


def importers(every: list[Module], *, types: bool = True) -> dict[str, set[str]]:
    """Return the importing modules of each module. `types`: imports that only type checkers see count too."""
    names = {module.name for module in every}
    found: dict[str, set[str]] = defaultdict(set)
    for module in every:
        package = module.name if module.is_package else module.name.rpartition(".")[0]
        skipped = set() if types else only_for_types(module.tree)
        for node in module.nodes:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = package.rsplit(".", node.level - 1)[0] if node.level else ""
                base = ".".join(part for part in (start, node.module) if part)
                targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base for alias in node.names]
            else:
                continue
            for target in targets:
                if target in names and target != module.name:
                    found[target].add(module.name)
    return found


def circles(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the strongly connected components with more than one member, by Tarjan's algorithm (1972).

    Args:
        arrows: what each name points to.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(", ".join(sorted(members)))

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return found


def package_of(name: str) -> str:
    """Return the package of a module: a folder of ``sbonnx``, or of ``sbonnx.calib``, whose folders differ in level."""
    parts = name.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["calib"] else 2])


def by_package(arrows: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the arrows between packages."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, others in arrows.items():
        found[package_of(name)].update(map(package_of, others))
    return {name: others - {name, "sbonnx"} for name, others in found.items() if name != "sbonnx"}


def code_lines(module: Module) -> int:
    """Return the number of lines that hold more than blanks, comments and docstrings."""
    held: set[int] = set()
    for node in module.nodes:
        is_text = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        if isinstance(node, ast.stmt) and not is_text:
            inner = getattr(node, "body", None)
            end = node.end_lineno or node.lineno
            last = inner[0].lineno - 1 if isinstance(inner, list) and inner else end
            held.update(range(node.lineno, max(node.lineno, last) + 1))
            if not isinstance(inner, list):
                held.update(range(node.lineno, end + 1))
    lines = module.path.read_text(encoding="utf-8").splitlines()
    return sum(bool(text) and not text.startswith("#") for line in held if (text := lines[line - 1].strip()))


def vague_locals(every: list[Module]) -> list[str]:
    """Return the functions that assign a name of `VAGUE`, once for each name."""
    return [
        f"{module.name}.{function.name}: {name}"
        for module in every
        for function in module.functions
        for name in sorted(
            VAGUE
            & {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        )
    ]


def calls(every: list[Module], package: str, method: str) -> list[str]:
    """Return the calls of a method in a package."""
    return [
        f"{module.name} line {node.lineno}"
        for module in every
        if module.name.startswith(package)
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
    ]


def twice(names: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the places of names that are defined more than once."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def classes(every: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield (class, module) of all classes, including nested ones."""
    for module in every:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                yield node.name, module.name


def parameters(function: Function) -> int:
    """Return the number of parameters, without `self` and `cls`."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in names)


def docstrings(every: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of all docstrings, including those of constants."""
    for module in every:
        for node in module.nodes:
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if isinstance(text, str):
                        yield f"{module.name} line {statement.lineno}", text


def one_caller(every: list[Module]) -> tuple[list[str], int]:
    """Return the private functions and methods with a single use in their module, and the number of all functions."""
    used: Counter[str] = Counter()
    for module in every:
        for node in module.nodes:
            if isinstance(node, ast.Name):
                used[f"{module.name}.{node.id}"] += 1
            elif isinstance(node, ast.Attribute):
                used[f"{module.name}.{node.attr}"] += 1
    private = [
        f"{module.name}.{function.name}"
        for module in every
        for function in module.functions
        if function.name.startswith("_") and not function.name.startswith("__")
    ]
    return [name for name in private if used[name] == 1], sum(len(module.functions) for module in every)


def figures(every: list[Module]) -> dict[str, tuple[str, str, list[str]]]:
    """Compute the figures: (value, goal, counted items) by name."""
    own = [module for module in every if not module.is_package]
    folders = Counter(module.folder for module in own)
    importing = importers(every)
    single = [
        f"{module.name} (from {min(importing[module.name])})"
        for module in own
        if len(importing[module.name]) == 1
        and module.lines < 80
        and min(importing[module.name]).rpartition(".")[0] == module.name.rpartition(".")[0]
    ]
    class_names = twice(classes(every))
    module_names = twice(
        (name, module.name) for module in own if (name := module.name.rpartition(".")[2]) not in EVERYWHERE
    )
    wide = {
        least: [
            f"{module.name}.{function.name} ({parameters(function)})"
            for module in every
            if not module.name.startswith(VERBS)  # a parameter for each option of the command line
            for function in module.functions
            if parameters(function) >= least
        ]
        for least in (8, 10)
    }
    openings = [f"{place}: {text[:60]}" for place, text in docstrings(every) if text.startswith(OPENINGS)]
    alone, count = one_caller(every)
    sessions = [
        f"{module.name} line {node.lineno}"
        for module in every
        for node in module.nodes
        if isinstance(node, ast.Call)
        and "InferenceSession" in (getattr(node.func, "attr", None), getattr(node.func, "id", None))
    ]
    arrows: dict[str, set[str]] = defaultdict(set)
    for target, sources in importers(every, types=False).items():
        for source in sources - {DOOR}:
            arrows[source].add(target)
    files, packages = circles(arrows), circles(by_package(arrows))
    dicts = [
        f"{module.name}.{node.name}"
        for module in every
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TypedDict") for base in node.bases)
    ]
    gets, vague = calls(every, "sbonnx.present", "get"), vague_locals(every)
    c_files = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.c")}
    compiled = sum(path.read_text(encoding="utf-8").count("\n") for path in c_files)
    large = [f"{folder}: {count}" for folder, count in folders.most_common() if count > 15]
    return {
        "modules": (str(len(every)), "≤ 500", []),
        "lines of Python": (f"{sum(module.lines for module in every):,}", "≤ 92,000", []),
        "of them code": (f"{sum(map(code_lines, every)):,}", "≤ 57,000", []),
        "lines of C": (f"{compiled:,}", "≤ 1,060", []),
        "most modules in a folder": (str(max(folders.values())), "15 (two exceptions)", large),
        "modules below 80 lines with one importer, beside it": (str(len(single)), "< 30", single),
        "private functions with one caller": (f"{len(alone) / count:.0%}", "≤ 18 %", alone),
        "class names that occur twice": (
            str(len(class_names)),
            "≤ 6",
            [f"{name}: {', '.join(places)}" for name, places in class_names.items()],
        ),
        "module names that occur twice": (
            str(len(module_names)),
            "≤ 12",
            [f"{name}: {', '.join(places)}" for name, places in module_names.items()],
        ),
        "functions with 8 parameters or more": (str(len(wide[8])), "≤ 12", wide[8]),
        "functions with 10 parameters or more": (str(len(wide[10])), "≤ 3", wide[10]),
        "circles of files, imports inside functions included": (str(len(files)), "0", files),
        "circles of packages": (str(len(packages)), "0", packages),
        "`.get(` in pages": (str(len(gets)), "< 20", gets),
        "TypedDicts": (str(len(dicts)), "< 10", dicts),
        "locals named found, one, made, known or each": (str(len(vague)), "< 150", vague),
        "docstrings that begin with What, See, Where, How or The same": (str(len(openings)), "0", openings),
        "places that open an onnxruntime session": (str(len(sessions)), "1", sessions),
    }


def main() -> int:
    """Print the figures, or the items that one of them counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", metavar="NAME", help="list what the figure that begins with NAME counts")
    options = parser.parse_args()
    found = figures(modules())
    if options.list:
        for name, (_, _, counted) in found.items():
            if name.startswith(options.list):
                print("\n".join(counted))
        return 0
    print(table(("figure", "value", "goal"), [(name, value, goal) for name, (value, goal, _) in found.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
