"""The documentation does what it says: code blocks run, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sbonnx import cli
from sbonnx.assets import digits
from sbonnx.cli.app import rows_of_commands

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_FOLDERS = {"build", "dist", "node_modules"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of the README: its language, its text and the line it starts at."""

    language: str
    text: str
    line: int


def _is_skipped(folder: str) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith(".")


def documents() -> list[Path]:
    """Every Markdown file of the repository, but those of hidden folders, which are not entered."""
    found = []
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if not _is_skipped(name)]
        found += [Path(folder, name) for name in files if name.endswith(".md")]
    return sorted(found)


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in FENCE.finditer(text):
        yield Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)


README = list(blocks(ROOT / "README.md"))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the bundled files in it, under the names that the README uses."""
    for path in (digits().model, digits().calib, digits().eval):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run_in_order(workplace: Path) -> None:
    """As one program, the way a reader pastes them."""
    code = [block for block in README if block.language == "python"]
    assert code, "the README shows no Python"
    names: dict[str, object] = {"__name__": "readme"}
    for block in code:
        exec(compile("\n" * block.line + block.text, str(ROOT / "README.md"), "exec"), names)


def commands() -> list[str]:
    """The command lines of the shell blocks, continuation lines joined, comments dropped."""
    text = "\n".join(block.text for block in README if block.language == "sh").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
def test_sbonnx_commands_run_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [shlex.split(line, comments=True) for line in commands() if line.startswith("sbonnx ")]
    assert lines, "the README shows no command"
    for _, *arguments in lines:
        assert cli.main(arguments) == 0, f"sbonnx {shlex.join(arguments)}\n{capfd.readouterr()}"


def test_other_commands_exist() -> None:
    """make targets, extras named to pip; nothing else stands in a shell block."""
    rules = re.findall(r"^(\w[\w -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for line in commands():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert set(words[1:]) <= targets, line
        elif words[:2] == ["pip", "install"]:
            named = {extra for text in re.findall(r"\[([\w,]+)\]", line) for extra in text.split(",")}
            assert named <= extras, line
        else:
            assert words[0] in ("sbonnx", "git", "cd"), f"not checked by anything: {line}"


def unknown_options(line: str) -> list[str]:
    """Return the options of a command line of sbonnx that the command does not have."""
    words = shlex.split(line, comments=True)[1:]
    tables = rows_of_commands()
    verb = next((name for name in (" ".join(words[:2]), words[0]) if name in tables), None) if words else None
    if verb is None:  # `sbonnx --version`, `sbonnx VERB -h`, a plug-in's
        return []
    flags = {flag for row in tables[verb] for flag in row.flags} | {"--help", "-h"}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [option for option in options if option not in flags]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_have_the_options_that_are_shown(path: Path) -> None:
    """In every block of a shell, also in those that are not run."""
    text = "\n".join(block.text for block in blocks(path) if block.language in ("sh", "bash", "console"))
    lines = (line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines())
    wrong = {line: unknown_options(line) for line in lines if line.startswith("sbonnx ")}
    assert not {line: options for line, options in wrong.items() if options}


def test_an_option_that_is_not_there() -> None:
    assert unknown_options("sbonnx batch nightly.yaml --html report.html --workers 2") == ["--html"]
    assert unknown_options("sbonnx llm quantize folder -o out --bits w4  # --nothing") == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_fences_are_closed_and_named(path: Path) -> None:
    assert path.read_text().count("\n```") % 2 == 0
    assert not [block.line for block in blocks(path) if not block.language], "name the language: python, sh, text, ..."


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if link.startswith("https://"):
            continue  # the network is no part of the tests
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        leads = target.exists() and target.resolve().is_relative_to(ROOT)
        if not leads or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong, f"{path.relative_to(ROOT)}: {wrong}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_no_machine(path: Path) -> None:
    """No absolute path of somebody's machine in the documentation."""
    found = re.findall(r"(?:/home/|/root/|/Users/|/tmp/|[A-Z]:\\)\S*", path.read_text())
    assert not found
