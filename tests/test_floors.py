"""Imports run strictly down the floors, and third parties enter where the design lets them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Highest first. A module imports lower floors, or modules of its own package.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"__init__", "__main__"}),
    frozenset({"cli"}),
    frozenset({"integrations"}),
    frozenset({"batch", "llm", "quantization", "sparse", "testing", "viewing"}),
    frozenset({"present"}),
    frozenset({"api", "quant_model", "sparse_model"}),
    frozenset({"search", "qat"}),
    frozenset({"pipeline"}),
    frozenset({"stages"}),
    frozenset({"equalize", "heads", "precision", "pruning"}),
    frozenset({"reconstruct", "calib.shared_calibration", "training"}),
    frozenset({"calib.calibrator", "correct", "profiling", "runtimes", "torchnet.onnx_to_torch", "tuning"}),
    frozenset({"calib.cache", "calib.quantized", "calib.recurrent", "calib.held_out", "calib.input_check"})
    | {"verify", "linting"},
    frozenset({"calib.engine", "calib.qparams", "qdq", "export"}),
    frozenset({"planning"}),
    frozenset({"rounding", "calib.observers", "batch.jobs.job"}),
    frozenset({"recipe", "moments", "calib.data", "detectors"}),
    frozenset(
        {"backends", "channels", "patterns", "calib.storage", "calib.sketches", "torchnet", "metrics", "mermaid"}
    ),
    frozenset({"linear", "report"}),
    frozenset({"graph", "calib", "options"}),
    frozenset({"spec", "progress", "plugins"}),
    frozenset({"system"}),
    frozenset({"errors", "version", "assets", "ops", "values", "report.codes", "schemes", "small_floats"}),
)
FLOOR_OF = {unit: len(FLOORS) - 1 - depth for depth, units in enumerate(FLOORS) for unit in units}
DOOR = "sbonnx.report.notebook"
"""Imports `sbonnx.present` when a notebook or a caller asks for a summary or page; nothing else below it does."""

FIRST_ONNX_FLOOR = FLOOR_OF["graph"]

# Where each third party may be imported: units or single modules (without "sbonnx."); None is anywhere.
THIRD_PARTIES: dict[str, frozenset[str] | None] = {
    "numpy": None,
    "ml_dtypes": None,
    "onnx": None,  # but not on the lowest floor
    "onnx_graphsurgeon": None,  # likewise
    "onnxruntime": frozenset(
        {
            "system.runtime",
            "graph.opset_lowering",  # what it reads
            "calib.engine.runner",
            "calib.engine.session",
            "cli.about.doctor",
            "verify.sessions",
            "verify.other_cpu.saturating_session",
            "profiling",
            "runtimes.engine_process",
            "runtimes.ort_variants",  # whether it has CUDA
            "backends.onnxruntime.backend",
            "patterns.simplify.fold",
            "linting.ort.kernel_choice",
            "batch.dask.cluster_tasks",
            "recipe.sections.base",  # which device "auto" is
            "llm.adapt",
            "llm.decoding",
            "llm.evaluate",
            "llm.kv_cache",
            "llm.speed",
            "tuning.kernel_timing",
        }
    ),
    "openvino": frozenset({"backends.openvino.runtime"}),
    "cv2": frozenset({"runtimes.opencv_dnn"}),
    "onnxruntime_qnn": frozenset({"runtimes.engine_process"}),
    "tensorrt_rtx_bindings": frozenset({"runtimes.engine_process"}),
    "torch": frozenset(
        {
            "qat",
            "torchnet.onnx_to_torch",
            "training",
            "torchnet",
            "calib.engine.cuda",
            "moments.products",
        }
    ),
    "xxhash": frozenset({"graph.digests"}),
    "threadpoolctl": frozenset({"calib.engine.threads"}),
    "pydantic": frozenset({"batch.jobs.jobfile", "cli"}),
    # of pydantic, which takes its typed dictionaries alone before Python 3.12; elsewhere only for types
    "typing_extensions": frozenset({"cli", "recipe"}),
    "yaml": frozenset(
        {"recipe", "cli", "batch.jobs.jobfile", "calib.data.readers.preprocess_values", "integrations.mlflow"}
    ),
    "PIL": frozenset({"calib.data.readers.images", "calib.data.readers.rows", "calib.data.readers.image_settings"}),
    "typer": frozenset({"cli"}),
    "tomli": frozenset({"cli.configuration"}),  # tomllib, before Python 3.11
    "tomllib": frozenset({"cli.configuration"}),
    "rich": frozenset({"cli", "present", "progress", "batch.step_progress"}),
    "jinja2": frozenset({"present", "system.chat_template"}),
    "tokenizers": frozenset({"calib.data.readers.normalizers", "calib.data.readers.tokenizer_file"}),
    "soundfile": frozenset({"calib.data.readers.audio"}),
    "soxr": frozenset({"calib.data.readers.audio"}),
    "psutil": frozenset({"batch", "cli", "llm", "verify"}),
    "distributed": frozenset({"batch.dask.cluster", "batch.dask.cluster_check", "batch.dask.cluster_tasks"}),
    "fsspec": frozenset({"batch.remote"}),
    "filelock": frozenset({"batch.process.locks", "batch.remote"}),
    "olive": frozenset({"integrations.olive"}),
    "mlflow": frozenset({"integrations.mlflow"}),
    # protobuf, which onnx brings: the errors that it raises on a bad or too large model
    "google": frozenset({"graph", "patterns.simplify.infer"}),
}
INSIDE_FUNCTIONS = frozenset(
    {
        "onnxruntime",
        "onnxruntime_qnn",
        "openvino",
        "cv2",
        "tensorrt_rtx_bindings",
        "torch",
        "distributed",
        "fsspec",
        "tokenizers",
        "PIL",
        "soundfile",
        "soxr",
    }
)
"""Imported when they are needed: torch and openvino are extras, and onnxruntime takes its time."""
ON_TORCH = frozenset({"qat", "torchnet.onnx_to_torch", "training"})
ON_OLIVE = "sbonnx.integrations.olive"  # a pass of Olive derives from its class
"""Made of torch's modules: nothing imports these but who wants to train."""
ONLY_FOR_TYPES = frozenset({"typing_extensions"})
"""Under `if TYPE_CHECKING:`: mypy has it, users need not."""


@dataclass(frozen=True)
class Import:
    """One import statement: of `target` (dotted, absolute) by module `module`, at `line`."""

    module: str
    target: str
    line: int
    in_function: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.module} line {self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    """Every module by its import name. The two top-level folders are read in place, not through the links."""
    found: dict[str, Path] = {}
    for folder, prefix in (("sbonnx", "sbonnx"), ("patterns", "sbonnx.patterns"), ("calib", "sbonnx.calib")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "sbonnx" and parts[0] in ("patterns", "calib"):
                continue
            found[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def unit_of(module: str) -> str | None:
    """The longest entry of the floors that `module` belongs to, or None."""
    parts = module.split(".")[1:] or ["__init__"]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOOR_OF), None)


def package_of(module: str, path: Path) -> str:
    """The package that relative imports of `module` start from."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def targets(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """Absolute names that one import statement reads; submodules by their own name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    start = package.rsplit(".", node.level - 1)[0] if node.level else ""
    base = ".".join(part for part in (start, node.module) if part)
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Every import in the file, wherever it stands."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    guarded = {id(child) for guard in guards for child in ast.walk(guard)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node, package_of(module, path)):
                yield Import(module, target, node.lineno, id(node) in inside, id(node) in guarded)


def levels_table() -> str:
    """The levels as docs/architecture.md has them."""
    rows = [f"| {FLOOR_OF[min(units)]} | {', '.join(f'`{unit}`' for unit in sorted(units))} |" for units in FLOORS]
    return "\n".join(["| level | modules |", "|---|---|", *rows])


@cache
def imports() -> tuple[Import, ...]:
    """All imports of the product. Read once, by the first test, and not when tests are collected."""
    return tuple(found for module, path in MODULES.items() for found in imports_of(module, path))


def is_third_party(found: Import) -> bool:
    top = found.target.split(".")[0]
    return top != "sbonnx" and top not in sys.stdlib_module_names


def test_every_module_has_a_floor() -> None:
    homeless = [module for module in MODULES if unit_of(module) is None]
    assert not homeless, f"give it a floor in FLOORS, after reading what it imports: {homeless}"


def test_sources_are_found() -> None:
    assert {"sbonnx", "sbonnx.spec", "sbonnx.patterns", "sbonnx.calib.observers"} <= MODULES.keys()
    assert len(imports()) > 50


def test_imports_run_strictly_down() -> None:
    wrong = []
    for found in imports():
        if found.target.split(".")[0] != "sbonnx":
            continue
        here, there = unit_of(found.module), unit_of(found.target)
        if here is None or there is None:
            continue  # the test above names it
        if found.module == DOOR and there == "present" and found.in_function:
            continue
        if here != there and FLOOR_OF[there] >= FLOOR_OF[here]:
            wrong.append(f"{found} ({there} is on floor {FLOOR_OF[there]}, {here} on {FLOOR_OF[here]})")
    assert not wrong, "\n".join(wrong)


def test_imports_name_real_modules() -> None:
    """`from sbonnx.x import y` where neither sbonnx.x nor sbonnx.x.y is a file."""
    wrong = [str(found) for found in imports() if found.target.startswith("sbonnx.") and found.target not in MODULES]
    assert not wrong, "\n".join(wrong)


def test_the_top_level_folders_have_one_name() -> None:
    """`import patterns` works in a clone, and loads a second copy of every module."""
    wrong = [str(found) for found in imports() if found.target.split(".")[0] in ("patterns", "calib")]
    assert not wrong, "\n".join(wrong)


def test_third_parties_stay_in_their_places() -> None:
    wrong = []
    for found in filter(is_third_party, imports()):
        top = found.target.split(".")[0]
        if top in ONLY_FOR_TYPES and found.for_types:
            continue
        if top not in THIRD_PARTIES:
            wrong.append(f"{found}: not a dependency of sbonnx")
            continue
        places, unit = THIRD_PARTIES[top], unit_of(found.module)
        if places is not None and not {unit, found.module.removeprefix("sbonnx.")} & places:
            wrong.append(f"{found}: only {sorted(places)} may")
        if top in ("onnx", "onnx_graphsurgeon") and unit is not None and FLOOR_OF[unit] < FIRST_ONNX_FLOOR:
            wrong.append(f"{found}: the lowest floor does not know ONNX files")
        if top == "torch" and unit in ON_TORCH:
            continue
        if top in INSIDE_FUNCTIONS and not (found.in_function or found.for_types):
            wrong.append(f"{found}: inside the function that needs it, please")
    assert not wrong, "\n".join(wrong)


def test_onnxruntime_comes_through_one_door() -> None:
    """`sbonnx.system.runtime` says what to install where it is missing: only the modules that may use it ask."""
    places = THIRD_PARTIES["onnxruntime"]
    assert places is not None
    wrong = [
        str(found)
        for found in imports()
        if found.target == "sbonnx.system.runtime" and found.module.removeprefix("sbonnx.") not in places
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_import_each_other_without_a_ring() -> None:
    """Module-level imports have no cycle, inside packages either."""
    reads: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in imports():
        if not (found.in_function or found.for_types) and found.target in MODULES and found.target != found.module:
            reads[found.module].add(found.target)
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, "imports in a ring: " + " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for target in sorted(reads[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


IMPORT_EACH = """
import os, sys
import numpy, ml_dtypes, onnx, onnx_graphsurgeon, pydantic, typer, rich, yaml
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        __import__(module)
        heavy = {"onnxruntime", "torch", "patterns", "calib"} & sys.modules.keys()
        if heavy:
            print(f"{module} loads {sorted(heavy)}", flush=True)
        os._exit(bool(heavy))
    if os.waitpid(child, 0)[1]:
        sys.exit(f"cannot import {module} alone")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks, to load the third parties once")
def test_modules_import_alone_and_light() -> None:
    """In a fresh interpreter; neither onnxruntime nor torch is loaded.

    Modules that others import are loaded with those, and nothing depends on the order: imports have no cycle.
    """
    imported = {found.target for found in imports() if not (found.in_function or found.for_types)}
    names = [
        name
        for name in MODULES
        if not name.endswith("__main__") and unit_of(name) not in ON_TORCH and name not in imported and name != ON_OLIVE
    ]
    assert len(names) > 20
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_EACH, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_has_these_levels() -> None:
    assert levels_table() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), levels_table()
