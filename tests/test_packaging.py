"""What is installed is what lies in the tree."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from sbonnx import version

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = ("patterns", "calib")
DATA = (
    "py.typed",
    "assets/digits.onnx",
    "assets/digits_calib.npz",
    "assets/digits_eval.npz",
    "assets/skills/sbonnx/SKILL.md",
    "assets/skills/sbonnx/scripts/summary.py",
    "assets/skills/sbonnx/scripts/worst_layers.py",
    "backends/onnxruntime/kernel_costs.json",
    "backends/onnxruntime/kernel_costs_avx2.json",
    "backends/onnxruntime/kernel_costs_avx512.json",
    "backends/openvino/kernel_costs.json",
    "cli/about/rule_examples.json",
    "present/html/base.html.j2",
    "present/html/batch.html.j2",
    "present/html/card.html.j2",
    "present/html/chart.html.j2",
    "present/html/dagre.min.js",
    "present/html/graph.js",
    "present/html/graph_page.html.j2",
    "present/html/network.html.j2",
    "present/html/page.css",
    "present/html/page.js",
    "present/html/single.html.j2",
    "runtimes/wasm_session.mjs",
)
SOURCES = {
    "sbonnx.calib.sketches._kernels": ["sbonnx/calib/sketches/_kernels.c"],
    "sbonnx.graph._pages": ["sbonnx/graph/_pages.c"],
    "sbonnx.moments._lags": ["sbonnx/moments/_lags.c"],
    "sbonnx.rounding._search": ["sbonnx/rounding/_search.c"],
}
"""What is compiled, where there is a compiler, and from which files, which are not handed out."""
JUNK = {"__pycache__", ".mypy_cache", ".ruff_cache"}
BUILT = {".pyc", ".so", ".pyd"}


def package_files() -> set[str]:
    """What the wheel must hold, as paths inside it: every module, and the package data."""
    found = {f"sbonnx/{name}" for name in DATA}
    for folder, prefix in (("sbonnx", "sbonnx"), ("patterns", "sbonnx/patterns"), ("calib", "sbonnx/calib")):
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            through_a_link = folder == "sbonnx" and inside.parts[0] in LINKS
            if path.is_file() and not through_a_link and not JUNK & set(inside.parts) and path.suffix not in BUILT:
                found.add(f"{prefix}/{inside.as_posix()}")
    return found - {source for sources in SOURCES.values() for source in sources}


def module_files() -> set[str]:
    """Modules of the packages; scripts for users are data."""
    return {name for name in package_files() if name.endswith(".py")} - {f"sbonnx/{name}" for name in DATA}


def packed_files(wheel: Path) -> set[str]:
    """What a wheel holds beside its metadata and what was compiled."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    compiled = {name for name in names if Path(name).suffix in BUILT}
    has_compiler = shutil.which("cc") is not None
    assert len(compiled) == (len(SOURCES) if has_compiler else 0)
    stems = "|".join(re.escape(module.replace(".", "/")) for module in SOURCES)
    assert all(re.fullmatch(rf"({stems})\.abi3\.(so|pyd)", name) for name in compiled)
    return set(names) - compiled


def test_what_is_compiled_is_listed() -> None:
    modules = PROJECT["tool"]["setuptools"]["ext-modules"]
    listed = {
        one["name"]: [source.replace("calib/sk", "sbonnx/calib/sk") for source in one["sources"]] for one in modules
    }
    assert listed == SOURCES
    assert all(one["optional"] for one in modules)


def test_every_package_is_listed() -> None:
    """One that is missing in the list is missing in the wheel, and in the wheel only."""
    listed = PROJECT["tool"]["setuptools"]["packages"]
    found = {Path(name).parent.as_posix().replace("/", ".") for name in module_files()}
    assert set(listed) == found
    assert listed == sorted(listed)


def test_every_folder_with_modules_is_a_package() -> None:
    modules = module_files()
    folders = {name.rpartition("/")[0] for name in modules}
    assert not [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in modules]


def test_packages_contain_only_code_and_listed_data() -> None:
    others = package_files() - module_files()
    assert others == {f"sbonnx/{name}" for name in DATA}


@pytest.mark.parametrize("name", LINKS)
def test_the_links_are_relative(name: str) -> None:
    link = ROOT / "sbonnx" / name
    if not link.is_symlink():
        pytest.skip("a checkout without symbolic links")
    assert os.readlink(link) == f"../{name}"
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"sbonnx.{name}"] == name


def test_one_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "sbonnx.version.__version__"
    elsewhere = [
        path.relative_to(ROOT).as_posix()
        for folder in ("sbonnx", "patterns", "calib")
        for path in (ROOT / folder).rglob("*.py")
        if f'"{version.__version__}"' in path.read_text() and path.name != "version.py"
    ]
    assert not elsewhere
    assert f"## [{version.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_console_script_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["sbonnx"].partition(":")
    assert callable(getattr(import_module(module), function))


def requirement_name(line: str) -> str:
    """The normalised name at the start of a requirement."""
    match = re.match(r"[A-Za-z0-9._-]+", line)
    assert match, line
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def pins() -> dict[str, list[str]]:
    """Lines of constraints.txt by normalised name."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            found.setdefault(requirement_name(line), []).append(line)
    return found


def test_every_dependency_is_pinned() -> None:
    """Whatever the project names has one version that CI was proved with, per Python version."""
    extras = PROJECT["project"]["optional-dependencies"]
    named = [*PROJECT["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]
    not_pinned = {requirement_name(line) for line in named} - pins().keys()
    assert not_pinned == {"onnxruntime-gpu"}, "the one that CI has no device for"
    assert pins()["torch"] == ["torch==2.13.0"]


def test_what_make_installs_runs_every_test() -> None:
    """Without torch, the tests of training and of rounding by gradients would be skipped, and nobody would see."""
    (line,) = re.findall(
        r"^\$\(VENV\)/\.dev:.*\n\t\$\(PIP\) -e '\.\[([a-z,]+)\]'$", (ROOT / "Makefile").read_text(), re.M
    )
    assert set(line.split(",")) == {"cpu", "qat", "cluster", "dev"}
    assert f"-c constraints.txt -e '.[{line}]'" in (ROOT / "constraints.txt").read_text()


def test_pins_are_exact_and_name_no_machine() -> None:
    for lines in pins().values():
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*( ; python_version (<|>=) '3\.\d+')?", line), line
        assert len(lines) == 1 or all("python_version" in line for line in lines), lines


def test_one_onnxruntime_an_extra() -> None:
    """Both distributions install the package `onnxruntime`: together they overwrite each other."""
    extras = PROJECT["project"]["optional-dependencies"]
    both = {name: [line for line in lines if line.startswith("onnxruntime")] for name, lines in extras.items()}
    assert {name: len(lines) for name, lines in both.items() if lines} == {"cpu": 1, "gpu": 1}
    assert not [line for line in PROJECT["project"]["dependencies"] if line.startswith(("onnxruntime", "torch"))]


USE = """
import sbonnx.patterns, sbonnx.calib.observers, sbonnx.assets
print(sbonnx.assets.digits().model.is_file(), sbonnx.assets.__file__)
"""


def build(what: str, into: Path) -> Path:
    """The wheel or source distribution, built from a copy of the tree without isolation."""
    pytest.importorskip("build", reason="the dev extra is not installed")
    command = [sys.executable, "-m", "build", f"--{what}", "--no-isolation", "--outdir", str(into), str(copied(into))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (path for path in into.iterdir() if path.suffix in (".whl", ".gz"))
    return made


def copied(into: Path) -> Path:
    """What git would hand out, without the files that a build leaves behind."""
    target = into / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                (target / name).symlink_to(os.readlink(source))
            else:
                (target / name).write_bytes(source.read_bytes())
    return target


@pytest.mark.slow
def test_the_wheel_holds_the_tree_and_works_elsewhere(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
        archive.extractall(tmp_path / "site")
    assert packed_files(wheel) == package_files()
    command = [sys.executable, "-W", "ignore", "-c", USE]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", str(tmp_path / "site" / "sbonnx" / "assets" / "__init__.py")]


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(tmp_path: Path) -> None:
    """Without the links: an archive unpacked where there are none must build too."""
    archive = build("sdist", tmp_path)
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert not [member.name for member in members if member.issym() or member.islnk()]
    (tree,) = (tmp_path / "unpacked").iterdir()
    inside = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert {"LICENSE", "README.md", "pyproject.toml", "patterns/__init__.py", "calib/__init__.py"} <= inside
    assert "calib/sketches/_kernels.c" in inside
    assert not [name for name in inside if name.startswith(("sbonnx/patterns/", "sbonnx/calib/"))]
    for link in LINKS:  # as git writes links where the file system has none
        (tree / "sbonnx" / link).write_text(f"../{link}")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "again"),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "again").iterdir()
    assert packed_files(wheel) == package_files()


@pytest.mark.slow
def test_the_source_distribution_has_the_same_bytes_on_every_day(tmp_path: Path) -> None:
    """Trees with other times and modes, as other clones have them."""
    pytest.importorskip("build", reason="the dev extra is not installed")
    made = []
    for name, time, mode in (("one", 1_000_000_000, 0o664), ("two", 1_700_000_000, 0o600)):
        tree = copied(tmp_path / name)
        for path in tree.rglob("*"):
            if path.is_file() and not path.is_symlink():
                os.utime(path, (time, time))
                path.chmod(mode)
        done = subprocess.run(
            [sys.executable, str(ROOT / ".ci" / "sdist.py"), "--tree", str(tree), "--outdir", str(tmp_path / name)],
            env={**os.environ, "SOURCE_DATE_EPOCH": "1750000000"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        made.append(Path(done.stdout.strip()).read_bytes())
    assert made[0] == made[1]
    (archive,) = (tmp_path / "one").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert {(entry.mtime, entry.uname, entry.uid) for entry in tar.getmembers()} == {(1_750_000_000, "", 0)}


def test_one_wheel_a_system() -> None:
    """Wheels are built for the oldest Python, whose stable interface all later ones have."""
    settings = PROJECT["tool"]["cibuildwheel"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=3.")
    assert settings["build"] == f"cp3{oldest}-*"
    assert PROJECT["tool"]["distutils"]["bdist_wheel"]["py_limited_api"] == f"cp3{oldest}"
    tools = runpy.run_path(str(ROOT / ".ci" / "smoke.py"))["TOOLS"]
    assert settings["test-requires"] == list(tools) and settings["test-command"].endswith("/.ci/smoke.py")
    assert f'[cpu]" {" ".join(tools)}\n' in (ROOT / "Makefile").read_text()
    assert set(settings["test-extras"]) <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_workflows_run_commands_that_exist() -> None:
    """Every `make` target of a workflow is one of the Makefile."""
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(" ".join(rules).split())
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {path.name for path in workflows} == {"ci.yml", "release.yml"}
    for path in workflows:
        assert set(re.findall(r"run: make ([a-z-]+)", path.read_text())) <= targets
