"""Leftovers of a killed process are removed by the next run, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

if sys.platform != "win32":
    import fcntl

from sbonnx.graph.storage import output_files, temporary
from sbonnx.graph.storage.output_files import staged
from sbonnx.graph.storage.temporary import MAGIC, MARKER, sweep, temporary_folder

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")

WRITING = """
import os, sys, time
from pathlib import Path
from sbonnx.graph.storage import output_files
from sbonnx.graph.storage.output_files import staged
from sbonnx.graph.storage.temporary import temporary_folder

target = Path(sys.argv[1])
replacing = output_files.replacing(target.with_name("report.json"))
with staged(target) as path, temporary_folder() as scratch, replacing as report:
    for one in (path, path.with_name("q.onnx.data"), scratch / "weights", report):
        one.write_bytes(b"half")
    (scratch / "more").mkdir()
    (scratch / "more" / "file").write_bytes(b"half")
    (scratch / "link").symlink_to(target.parent)
    if len(sys.argv) > 2 and os.fork():  # a child that outlives it has the locks as well
        os._exit(0)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `out`, and `tmp` for temporary files, which this process has not looked at."""
    for name in ("out", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(temporary, "_swept", set())
    return tmp_path


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def writing(place: Path) -> Iterator[Start]:
    """Starts a process that is writing, and waits until it is."""
    started: list[subprocess.Popen[str]] = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITING, str(place / "out" / "q.onnx"), *more]
        environment = {**os.environ, "TMPDIR": str(place / "tmp"), "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, text=True, start_new_session=True))
        stdout = started[-1].stdout
        assert stdout is not None and stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its child, too
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
def test_leftovers_of_a_killed_process_are_swept_by_the_next(place: Path, writing: Start) -> None:
    """Not while it lives. Model and data, a report, scratch files; nothing that lies beside or that a link leads to."""
    process = writing()
    before = names(place)
    assert len([name for name in before if name.endswith(MARKER)]) == 3
    sweep(place / "out")
    sweep(place / "tmp")
    assert names(place) == before
    process.kill()
    process.wait()
    assert names(place) == before
    with staged(place / "out" / "other.onnx") as path, temporary_folder():
        path.write_bytes(b"model")
    assert names(place) == ["out", "out/other.onnx", "out/precious", "tmp"]


@pytest.mark.slow
def test_what_a_child_still_uses_stays(place: Path, writing: Start) -> None:
    process = writing("fork")
    process.wait()
    before = names(place)
    sweep(place / "out")
    assert names(place) == before


FORK_SERVER = """
import multiprocessing, time
from sbonnx.batch.process.starting import claim_socket_folder
claim_socket_folder()
claim_socket_folder()
context = multiprocessing.get_context("forkserver")
process = context.Process(target=time.sleep, args=(0,))
process.start()
process.join()
print("ready", flush=True)
{end}
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["", "time.sleep(600)"], ids=["a proper end", "killed"])
def test_the_socket_of_a_fork_server(end: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")  # names of sockets are short
    command = [sys.executable, "-c", FORK_SERVER.format(end=end)]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if end:
            assert [name for name in names(folder) if "listener-" in name]
            process.kill()
        process.wait(timeout=60)
    sweep(folder)
    assert not names(folder)


def folder(place: Path, name: str = "sbonnx-abcdefgh.sbonnx", content: bytes = MAGIC) -> Path:
    """Create a folder as an ended process leaves it."""
    made = place / name
    made.mkdir()
    (made / MARKER).write_bytes(content)
    (made / "file").write_text("file")
    return made


def marked_by_a_link(place: Path) -> None:
    made = folder(place)
    (made / MARKER).rename(place / "marker")
    (made / MARKER).symlink_to(place / "marker")


def marked_by_a_fifo(place: Path) -> None:
    made = folder(place)
    (made / MARKER).unlink()
    os.mkfifo(made / MARKER)


def of_another_user(place: Path, *, empty: bool = False) -> None:
    if os.geteuid():
        pytest.skip("only root may give files away")
    made = folder(place)
    for path in made.iterdir() if empty else ():
        path.unlink()
    os.chown(made, 12345, -1)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "another name": lambda place: folder(place, "other-abcdefgh.sbonnx"),
    "another suffix": lambda place: folder(place, "sbonnx-abcdefgh"),
    "empty, another name": lambda place: (place / "sbonnx-demo").mkdir(),
    "half a marker, another file": lambda place: folder(place, content=MAGIC[:9]),
    "not hidden": lambda place: folder(place, "q.onnx.abcdefgh.sbonnx"),
    "another marker": lambda place: folder(place, content=MAGIC + b"2"),
    "no marker": lambda place: (folder(place) / MARKER).unlink(),
    "a link as marker": marked_by_a_link,
    "a fifo as marker": marked_by_a_fifo,
    "a link": lambda place: (place / "sbonnx-link.sbonnx").symlink_to(folder(place, "elsewhere")),
    "a file": lambda place: (place / "sbonnx-file.sbonnx").write_text("file"),
    "another user's": of_another_user,
    "another user's, empty": lambda place: of_another_user(place, empty=True),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_provably_ours_stays(kind: str, tmp_path: Path) -> None:
    FOREIGN[kind](tmp_path)
    before = names(tmp_path)
    sweep(tmp_path)
    assert names(tmp_path) == before


def test_an_abandoned_folder_as_these_tests_make_them(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    folder(tmp_path)
    folder(tmp_path, ".q.onnx.abcdefgh.sbonnx")
    sweep(tmp_path)
    assert not names(tmp_path)


KILLED = """
import os, sys, tempfile
from pathlib import Path
from sbonnx.graph.storage import temporary

place = Path(sys.argv[1])
tempfile.tempdir = str(place)
places = temporary.__file__, temporary.shutil.__file__


def kill_at(line):
    \"\"\"Kill this process at the given line, counted from here, of the code that makes and removes folders.\"\"\"
    def count(frame, event, value):
        nonlocal line
        if frame.f_code.co_filename not in places:
            return None
        line -= event == "line"
        if line < 0:
            os.kill(os.getpid(), 9)
        return count
    sys.settrace(count)


line, status = 0, 9
while status == 9:
    child = os.fork()
    if not child:
        kill_at(line)
        with temporary.temporary_folder() as folder:
            (folder / "file").write_bytes(b"half")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    left = [path.name for path in place.iterdir()]
    temporary.sweep(place)
    print(line, status, left, [path.name for path in place.iterdir()], sep="|", flush=True)
    line += 1
"""


def test_a_kill_at_any_line_leaves_what_the_next_run_removes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.split("|") for line in said.splitlines()]
    assert lines[-1][1:] == ["0", "[]", "[]"]
    assert sum(left != "[]" for _, _, left, _ in lines) > 20
    assert [line for line in lines if line[3] != "[]"] == []


def test_a_folder_that_another_process_sweeps_at_once_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of the two moments in which a folder cannot prove yet that it is used."""
    calls: list[str] = []
    opened, locked = os.open, fcntl.flock

    def opening(path: str | Path, *args: int, **options: int) -> int:
        if Path(path).name == MARKER and "dir_fd" not in options and not calls:
            calls.append("before its marker")
            sweep(place / "tmp")
        return opened(path, *args, **options)

    def locking(lock: int, how: int) -> None:
        if len(calls) == 1:
            calls.append("before its lock")
            sweep(place / "tmp")
        locked(lock, how)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(fcntl, "flock", locking)
    with temporary_folder() as made:
        assert calls == ["before its marker", "before its lock"]
        assert (made / MARKER).read_bytes() == MAGIC
        sweep(place / "tmp")
        assert [path.name for path in (place / "tmp").iterdir()] == [made.name]
    assert not names(place / "tmp")


def test_temporary_names_are_random_and_private(place: Path) -> None:
    with temporary_folder() as one, temporary_folder() as other:
        assert one.name != other.name
        assert one.stat().st_mode & 0o777 == 0o700
    output_files.write_text(place / "out" / "r.json", "text")
    assert (place / "out" / "r.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
