"""Output folders: what is copied from a folder that may be downloaded, and a kill while the old folder is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sbonnx.errors import OutputError
from sbonnx.graph.storage import temporary
from sbonnx.graph.storage.output_folder import OutputFolder
from sbonnx.report.codes import Note

ROOT = Path(__file__).resolve().parents[2]
posix = pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs and no SIGKILL")


def copied(source: Path, target: Path) -> tuple[dict[str, bytes], list[Note]]:
    """Return the contents of the copy, by name, and the notes."""
    output = OutputFolder(target, source, (), "provenance.json", force=False)
    with output.staged() as stage:
        notes = output.copy_source(stage, copied=("config.json",))
    files = {str(path.relative_to(target)): path for path in sorted(target.rglob("*")) if not path.is_dir()}
    assert not any(path.is_symlink() for path in files.values())
    return {name: path.read_bytes() for name, path in files.items()}, notes


@posix
def test_only_files_of_the_folder_are_copied(tmp_path: Path) -> None:
    """Links out of the folder, to devices and in a circle, and FIFOs are named and not followed."""
    secret, source = tmp_path / "secret", tmp_path / "m"
    secret.mkdir()
    (secret / "id_rsa").write_text("private")
    (source / "sub").mkdir(parents=True)
    for name in ("config.json", "LICENSE", "sub/vocab.txt"):
        (source / name).write_text(name)
    (source / "same").symlink_to("sub/vocab.txt")
    foreign: dict[str, str | Path] = {
        "key": secret / "id_rsa",
        "up": "../secret/id_rsa",
        "zero": "/dev/zero",
        "loop": "loop",
        "dir": secret,
    }
    for name, to in foreign.items():
        (source / name).symlink_to(to)
    (source / "sub" / "generation_config.json").symlink_to(secret / "id_rsa")
    os.mkfifo(source / "pipe")
    found, (note,) = copied(source, tmp_path / "q")
    assert found == {
        "config.json": b"config.json",
        "LICENSE": b"LICENSE",
        "same": b"sub/vocab.txt",
        "sub/vocab.txt": b"sub/vocab.txt",
    }
    assert note.startswith(f"not copied from '{source}': 'dir', 'key', 'loop', 'pipe', 'up' and 2 more: ")
    assert os.stat(secret / "id_rsa").st_nlink == 1


@posix
def test_a_folder_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    """Its files are links to blobs of the same model; a folder that is named so and leads elsewhere is not believed."""
    for name, real in (("models--a", True), ("models--b", False)):
        blobs, source = tmp_path / name / "blobs", tmp_path / name / "snapshots" / "1f"
        source.mkdir(parents=True)
        if real:
            blobs.mkdir()
        else:
            (tmp_path / "secret").mkdir()
            blobs.symlink_to(tmp_path / "secret")
        (blobs / "c0").write_text("{}")
        (source / "config.json").symlink_to("../../blobs/c0")
        found, notes = copied(source, tmp_path / f"q-{name}")
        assert found == ({"config.json": b"{}"} if real else {})
        assert bool(notes) is not real


def test_nothing_is_written_into_an_input_folder(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    output = OutputFolder(tmp_path / "m" / "q", tmp_path / "m", (), "p", force=False)
    with pytest.raises(OutputError, match="is in an input folder"):
        output.check()


KILLED = """
import os, signal, sys
from pathlib import Path
from sbonnx.graph.storage.output_folder import OutputFolder
replace, count = os.replace, 0

def killing(*paths):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = killing
with OutputFolder(Path(sys.argv[1]), None, (), "p", force=True).staged() as stage:
    (stage / "p").write_text("new")
"""


@posix
@pytest.mark.parametrize("rename", [1, 2, 3])
def test_a_kill_between_the_renames_loses_nothing(rename: int, tmp_path: Path) -> None:
    """The next run in this place finds the old folder or the new one, whole, and needs --force as before."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "p").write_text("old")
    words = [sys.executable, "-c", KILLED, str(target), str(rename)]
    done = subprocess.run(words, cwd=ROOT, check=False)
    assert done.returncode == (0 if rename == 3 else -signal.SIGKILL)
    temporary._swept.discard(os.path.realpath(tmp_path))
    with pytest.raises(OutputError, match="exists: give --force"):
        OutputFolder(target, None, (), "p", force=False).check()
    assert (target / "p").read_text() == ("new" if rename == 3 else "old")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
