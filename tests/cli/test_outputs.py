"""Output files of all verbs: they replace regular files only, which is checked before the work begins."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sbonnx.cli import main
from sbonnx.errors import OutputError
from sbonnx.graph.storage import output_files
from tests.support.bad_place import check_line, good_place, line, state

Make = Callable[[Path], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return good_place(tmp_path, monkeypatch)


def make_socket(path: Path) -> None:
    """Bind a socket. Its path must be short, so it is bound from within the folder."""
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            one.bind(path.name)
        finally:
            os.chdir(before)


def make_device(path: Path) -> None:
    """Create a device node like /dev/null."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this user may not make device nodes")


def linked(make: Make) -> Make:
    """A symlink to the other file."""

    def both(path: Path) -> None:
        make(path.with_name("far"))
        path.symlink_to("far")

    return both


KINDS: dict[str, tuple[Make, str]] = {
    "device": (make_device, "a character device"),
    "fifo": (os.mkfifo, "a FIFO"),
    "socket": (make_socket, "a socket"),
    "folder": (Path.mkdir, "is a folder"),
    "link to a device": (linked(make_device), "a character device"),
    "link to a fifo": (linked(os.mkfifo), "a FIFO"),
    "link to itself": (lambda path: path.symlink_to(path.name), "cannot be written"),
}

LINES: dict[str, tuple[str, ...]] = {
    "quantize -o": line("--force", out="out/t.onnx"),
    "quantize --report": line("--force", "--report", "out/t.json"),
    "quantize --save-recipe": line("--force", "--save-recipe", "out/t.yaml"),
    "quantize --trt-cache": line("--force", "--backend", "tensorrt", "--trt-cache", "out/t.cache"),
    "simplify -o": ("simplify", "m.onnx", "-o", "out/t.onnx", "--force"),
    "prune -o": ("prune", "m.onnx", "--ratio", "0.5", "-o", "out/t.onnx", "--force"),
    "plan -o": ("plan", "m.onnx", "-o", "out/t.json", "--force"),
    "lint --sarif": ("lint", "m.onnx", "--target", "tensorrt@10", "--sarif", "out/t.sarif", "--force"),
    "lint --fix": ("lint", "m.onnx", "--target", "tensorrt@10", "--fix", "-o", "out/t.onnx", "--force"),
    "profile --mermaid": ("profile", "m.onnx", "--data", "d.npz", "--mermaid", "out/t.mmd", "--force"),
    "qat -o": line("--force", out="out/t.onnx", verb="qat"),
    "qat --checkpoint": line("--checkpoint", "out/t.pt", verb="qat"),
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((command, "fifo") for command in LINES), *(("quantize -o", kind) for kind in KINDS if kind != "fifo")],
)
def test_other_files_are_not_replaced(
    command: str, kind: str, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error line, before anything is loaded."""
    arguments = LINES[command]
    target = next(Path(word) for word in arguments if word.startswith("out/t."))
    make, words = KINDS[kind]
    make(target)
    before = os.lstat(target)
    monkeypatch.setattr("sbonnx.graph.io.open_model", lambda *_: pytest.fail("the work has begun"))
    code = main(arguments)
    check_line(code, *capfd.readouterr(), ("OutputError", str(target), words))
    after = os.lstat(target)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_files_created_during_the_work_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked again at the rename."""
    target = tmp_path / "t"
    monkeypatch.setattr(output_files, "check_target", lambda *_, **__: os.mkfifo(target))
    with pytest.raises(OutputError, match="FIFO"):
        output_files.write_text(target, "text")
    assert stat.S_ISFIFO(os.lstat(target).st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_symlink_is_replaced_and_its_file_stays(tmp_path: Path) -> None:
    """A dangling symlink counts as existing: it is replaced with force only."""
    (tmp_path / "file").write_text("mine")
    for name, leads in (("link", "file"), ("nowhere", "gone")):
        link = tmp_path / name
        link.symlink_to(leads)
        with pytest.raises(OutputError, match="exists: give --force"):
            output_files.check_target(link, (), force=False)
        output_files.write_text(link, "text")
        assert not link.is_symlink() and link.read_text() == "text"
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("out/" + "n" * 300 + ".onnx", ("OutputError", "File name too long")),
        ("m.onnx/q.onnx", ("OutputError", "there is no folder 'm.onnx'")),
    ],
)
def test_invalid_file_names(out: str, words: tuple[str, ...], place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = state(place)
    check_line(main(line(out=out)), *capfd.readouterr(), words)
    assert state(place) == before


def test_the_longest_name(place: Path) -> None:
    """Temporary names repeat only the beginning of it."""
    name = "é" * 125 + ".onnx"
    assert len(name.encode()) == 255
    assert main(line("--no-verify", "--quiet", out=f"out/{name}")) == 0
    assert [path.name for path in (place / "out").iterdir()] == [name]


def test_folder_removed_during_the_run(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file is written, or while it is verified."""
    import shutil

    for module, name in (("sbonnx.graph.storage.output_files", "_write"), ("sbonnx.verify.file_check", "compare")):
        (place / "out").mkdir(exist_ok=True)
        before = state(place)
        whole = getattr(__import__(module, fromlist=[name]), name)

        def removing(*arguments: object, **keywords: object) -> object:
            shutil.rmtree(place / "out")
            return whole(*arguments, **keywords)  # noqa: B023 - called in this turn of the loop

        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.{name}", removing)
            code = main(line())
        check_line(code, *capfd.readouterr(), ("OutputError", "q.onnx", "was removed during the run"))
        assert state(place) == {path: text for path, text in before.items() if path != "out"}


@pytest.mark.parametrize(
    "more",
    [
        ("--report", "out/q.json"),
        ("--save-recipe", "out/q.onnx"),
        ("--trt-cache", "out/q.onnx", "--backend", "tensorrt"),
    ],
    ids=lambda more: more[0],
)
def test_two_outputs_of_one_name(more: tuple[str, ...], place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = state(place)
    check_line(main(line(*more, out=more[1])), *capfd.readouterr(), ("OutputError", "another output of this run"))
    assert state(place) == before
