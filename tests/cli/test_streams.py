"""Standard streams of a process: closed streams and pipes, native messages, crashes, little memory."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sbonnx.assets import digits
from sbonnx.cli.output import error_lines
from sbonnx.cli.output.error_lines import line_of
from sbonnx.errors import DataError, DeviceError, Interrupted, ModelError
from tests.support.bad_place import good_place
from tests.support.coverage import unmeasured
from tests.support.limits import limited

ROOT = Path(__file__).resolve().parents[2]

NAME = "\x1b[2J\x9b31m\u202etxt\u2066\x7f"
"""Control characters that clear a screen, change colours and reverse text."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return good_place(tmp_path, monkeypatch)


def sbonnx(*arguments: str, redirections: str = "", **limits: int) -> subprocess.CompletedProcess[str]:
    """Run a process in the working directory."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "sbonnx", *arguments]
    environment = {**(unmeasured() if limits else os.environ), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        limited(command, **limits), env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("redirections", [">&-", ">&- 2>&- <&-"])
def test_closed_streams(redirections: str, place: Path) -> None:
    """The command succeeds; the written file does not become a stream."""
    done = sbonnx("simplify", "m.onnx", "-o", "out/q.onnx", redirections=redirections)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    onnx.checker.check_model("out/q.onnx")


CHILD = """
import subprocess, sys
from sbonnx.cli.output.streams import standard_streams
with standard_streams(capture=False):
    subprocess.run([sys.executable, "-c", "import os; [os.fstat(number) for number in range(3)]"], check=True)
"""


def test_children_inherit_the_streams() -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", sys.executable, "-c", CHILD]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 0


def test_an_error_with_stdout_closed(place: Path) -> None:
    done = sbonnx("inspect", "none.onnx", redirections=">&-")
    assert done.returncode == 2 and done.stderr.startswith("ModelError: 'none.onnx' does not exist")


@pytest.mark.slow
def test_reader_closes_both_streams(place: Path) -> None:
    """``2>&1 | head -1`` during the work, which is finished anyway."""
    source, sink = os.pipe()
    command = [sys.executable, "-m", "sbonnx", "quantize", "m.onnx", "--data", "d.npz", "-o", "out/q.onnx"]
    command += ["--json-progress", "--set", "kernel_costs=none"]  # nothing of so small a network pays
    process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ})
    os.close(sink)
    assert os.read(source, 1)
    os.close(source)
    assert process.wait(timeout=120) == 0
    onnx.checker.check_model("out/q.onnx")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", [("plan", "m.onnx"), ("--help",)], ids=["a verb", "help"])
def test_unwritable_stdout(arguments: tuple[str, ...], place: Path) -> None:
    """Reported once, and not again at exit."""
    done = sbonnx(*arguments, redirections="> full", RLIMIT_FSIZE=0)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("OSError: a file would be larger than allowed (ulimit -f)")


@pytest.mark.slow
def test_messages_of_native_code_need_debug(place: Path) -> None:
    """RE2 in onnxruntime prints two lines before the exception is raised."""
    node = helper.make_node("RegexFullMatch", ["s"], ["y"], pattern="(unclosed")
    inputs = [helper.make_tensor_value_info("s", TensorProto.STRING, [2])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.BOOL, [2])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), "r.onnx")
    line = ("simplify", "r.onnx", "-o", "out/q.onnx")
    done = sbonnx(*line)
    assert done.returncode == 0 and not done.stderr  # simplified, and not proved by a run
    assert "(unclosed" in done.stdout
    assert "re2.cc" in sbonnx(*line, "--force", "--debug").stderr


STREAMS = """
import os, signal, sys
from sbonnx.cli.output.streams import last_native_message, standard_streams
before = os.fstat(2).st_ino
with standard_streams(capture=True):
    os.write(2, b"native\\n")
    print("ours", file=sys.stderr)
    assert last_native_message() == "native"
    if not os.fork():
        sys.exit(0)
    os.wait()
    {end}
assert os.fstat(2).st_ino == before
"""


@pytest.mark.parametrize(
    ("end", "shown", "code"),
    [("pass", "ours\n", 0), ("os.kill(os.getpid(), signal.SIGABRT)", "ours\nnative\n", -signal.SIGABRT)],
    ids=["a proper end", "a crash"],
)
def test_native_messages_are_shown_after_a_crash(end: str, shown: str, code: int) -> None:
    """A forked child that exits normally has no effect."""
    command = [sys.executable, "-c", STREAMS.format(end=end)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", shown)


def test_internal_error_quotes_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_lines, "last_native_message", lambda: "double free")
    assert "(native message: double free)" in error_lines.line_of(RuntimeError("x"))


def test_native_code_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_lines, "last_native_message", lambda: "Schema error: std::bad_alloc")
    lost = SystemError("returned NULL without setting an exception")
    assert error_lines.line_of(lost).startswith(f"{SHORT} (Schema error: std::bad_alloc): use")
    assert error_lines.line_of(RuntimeError("x")).startswith("internal error: ")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_a_codec_that_is_interrupted() -> None:
    wrapped = KeyboardInterrupt("decoding with 'cp437' codec failed (KeyboardInterrupt: )")
    wrapped.__cause__ = KeyboardInterrupt()
    assert line_of(wrapped) == line_of(KeyboardInterrupt()) == "interrupted; nothing was written"
    assert line_of(Interrupted("2 of 3 jobs are done")) == "interrupted; 2 of 3 jobs are done"


SHORT = "MemoryError: there is not enough memory"
REASONS: list[tuple[Exception, str]] = [
    (MemoryError(), f"{SHORT}: use"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), f"{SHORT} ([Errno 12] Cannot allocate memory): use"),
    (caused(DataError("feed 3 fails"), RuntimeError("std::bad_alloc")), f"{SHORT} (feed 3 fails): use"),
    (caused(DeviceError("does not load"), ImportError("a.so: failed to map segment")), f"{SHORT} (does not load): use"),
    (RuntimeError("can't start new thread"), f"{SHORT} (can't start new thread): use"),
    (caused(DataError("d.npz has a false shape"), MemoryError()), "DataError: d.npz has a false shape"),
    (ModelError("node 'bad_alloc' is odd"), "ModelError: node 'bad_alloc' is odd"),
]


@pytest.mark.parametrize(("error", "line"), REASONS)
def test_messages_of_memory_errors(error: Exception, line: str) -> None:
    assert line_of(error).startswith(line)


OLD_NUMPY = pytest.mark.skipif(
    tuple(map(int, np.__version__.split(".")[:2])) < (2, 1),
    reason="the OpenBLAS of numpy 2.0 waits at the exit for a thread that has no memory",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("megabytes", [pytest.param(120, marks=OLD_NUMPY), 200])
def test_little_memory(megabytes: int, place: Path) -> None:
    """One line, whatever fails first: threads, libraries or arrays. Native code may end the process."""
    done = sbonnx("quantize", "m.onnx", "--data", "d.npz", "-o", "out/q.onnx", RLIMIT_AS=megabytes << 20)
    assert done.returncode
    assert done.stderr.startswith("MemoryError: there is not enough memory") and "--memory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list((place / "out").iterdir())


CRASH = """
import os, signal
from sbonnx.cli.output.streams import standard_streams
with standard_streams(capture=True):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize("limits", [{}, {"RLIMIT_AS": 1 << 30}])
def test_a_silent_crash(limits: dict[str, int]) -> None:
    """With little memory, the dynamic linker crashes so at times."""
    command = limited([sys.executable, "-c", CRASH], **limits)
    done = subprocess.run(command, cwd=ROOT, env=unmeasured(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith(f"{SHORT} (native code crashed without a message): ") if limits else not done.stderr


def named(name: str) -> onnx.ModelProto:
    """The bundled model with such a name for all its parts."""
    model = onnx.load(digits().model)
    model.graph.name = model.producer_name = name
    for node in model.graph.node:
        node.name += name
        node.doc_string = name
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = [one + name if one == output else one for one in node.output]
    model.graph.output[0].name += name
    return model


LINES = {
    "inspect": ("inspect", NAME),
    "plan": ("plan", NAME),
    "plan in JSON": ("plan", NAME, "--json"),
    "simplify": ("simplify", NAME, "-o", f"out/{NAME}"),
    "an error": ("inspect", f"none{NAME}"),
    "a wrong option": ("inspect", f"--none{NAME}"),
    "debug": ("inspect", f"none{NAME}", "--debug"),
}


@pytest.mark.parametrize("what", LINES)
def test_names_with_control_characters(
    what: str, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sbonnx.cli import main

    onnx.save(named(NAME), NAME)
    main(LINES[what])
    out, err = capfd.readouterr()
    assert "txt" in out + err
    assert not set("\x1b\x9b\u202e\u2066\x7f") & set(out + err)
    if "--json" in LINES[what]:
        assert json.dumps(NAME)[1:-1] in json.dumps(json.loads(out))


def test_file_name_that_is_not_utf8(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In tables, JSON and a report."""
    from sbonnx.cli import main

    name = os.fsdecode(b"\xff.onnx")
    Path("m.onnx").rename(name)
    line = ("quantize", name, "--data", "d.npz", "-o", os.fsdecode(b"out/q\xff.onnx"), "--force")
    assert main((*line, "--json", "--report", "out/r.json")) == 0
    out, _ = capfd.readouterr()
    assert json.loads(out)["model"] == json.loads(Path("out/r.json").read_text())["model"] == name
    assert main((*line, "--report", "out/r.html")) == 0
    assert "\\udcff.onnx" in capfd.readouterr().out
