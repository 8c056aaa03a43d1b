"""URLs of models, data and outputs: over memory, files, and a web server on this machine."""

from __future__ import annotations

import functools
import http.server
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx.batch import remote
from sbonnx.batch.jobs.job import Job
from sbonnx.errors import DeviceError, ModelError, OutputError

fsspec = pytest.importorskip("fsspec", reason="URLs are read through fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty before and after."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


class Server:
    """A web server over a folder, that remembers what it was asked."""

    def __init__(self, folder: Path, *, dated: bool = True) -> None:
        self.asked: list[tuple[str, str]] = []
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                outer.asked.append((self.command, self.path))

            def send_header(self, keyword: str, value: str) -> None:
                if dated or keyword != "Last-Modified":
                    super().send_header(keyword, value)

        handler = functools.partial(Handler, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def downloads(self) -> list[str]:
        return [path for command, path in self.asked if command == "GET"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    """(folder, the server over it)."""
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder)
    yield folder, server
    server.close()


def with_data_file(folder: Path, value: float) -> Path:
    """A model whose weight lies in a file beside it; the model's own bytes do not depend on `value`."""
    weight = numpy_helper.from_array(np.full((64, 64), value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "m.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="m.weights", size_threshold=0)
    return path


@pytest.mark.parametrize(
    ("name", "url", "printed"),
    [
        ("models/a.onnx", False, "models/a.onnx"),
        ("C:/models/a.onnx", False, "C:/models/a.onnx"),
        ("/srv/x@y/a.onnx", False, "/srv/x@y/a.onnx"),
        ("s3://bucket/a.onnx", True, "s3://bucket/a.onnx"),
        ("file:///srv/a.onnx", True, "file:///srv/a.onnx"),
        ("simplecache::s3://bucket/a.onnx", True, "simplecache::s3://bucket/a.onnx"),
        ("sftp://me:word@host/a.onnx", True, "sftp://host/a.onnx"),
        ("https://host/a.onnx?token=abcdef#x", True, "https://host/a.onnx"),
    ],
)
def test_what_is_a_url_and_how_it_is_printed(name: str, url: bool, printed: str) -> None:
    assert (remote.is_url(name), remote.shown(name)) == (url, printed)


def test_paths_and_file_urls_pass_through(tmp_path: Path) -> None:
    path = tmp_path / "a b.onnx"
    path.write_bytes(b"model")
    for name in (str(path), path.as_uri()):
        got = remote.fetch(name, tmp_path / "state")
        assert (got.path, got.fresh) == (path, False)
    assert not (tmp_path / "state").exists()


def test_downloaded_once_until_it_changes(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/lake/a.npz", b"first")
    one = remote.fetch("memory://lake/a.npz", tmp_path, what="data")
    two = remote.fetch("memory://lake/a.npz", tmp_path, what="data")
    assert one.fresh and not two.fresh and one.path == two.path and one.path.name == "a.npz"
    memory.pipe("/lake/a.npz", b"other")
    three = remote.fetch("memory://lake/a.npz", tmp_path, what="data")
    assert three.fresh and three.path.read_bytes() == b"other" and one.path.read_bytes() == b"first"
    assert sorted(path.name for path in three.path.parents[2].glob(".*")) == []


def test_a_folder_comes_with_all_that_is_in_it(memory: Any, tmp_path: Path) -> None:
    files = {"x/0.npy": b"0", "x/1.npy": b"1", "y/0.npy": b"2"}
    for name, content in files.items():
        memory.pipe(f"/lake/calib/{name}", content)
    got = remote.fetch("memory://lake/calib", tmp_path, what="data")
    found = {path.relative_to(got.path).as_posix(): path.read_bytes() for path in got.path.rglob("*.npy")}
    assert got.path.name == "calib" and found == files
    assert not remote.fetch("memory://lake/calib", tmp_path, what="data").fresh
    memory.rm_file("/lake/calib/y/0.npy")
    again = remote.fetch("memory://lake/calib", tmp_path, what="data")
    assert again.fresh and not (again.path / "y").exists()


def test_a_model_comes_with_its_data_file(memory: Any, tmp_path: Path) -> None:
    """New weights behind the same graph are another version, though the model's own file did not change."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = with_data_file(tmp_path / "a", 1.0), with_data_file(tmp_path / "b", 2.0)
    assert first.read_bytes() == second.read_bytes()
    for part in ("m.onnx", "m.weights"):
        memory.pipe(f"/lake/{part}", (first.parent / part).read_bytes())
    one = remote.fetch("memory://lake/m.onnx", tmp_path / "state")
    assert numpy_helper.to_array(onnx.load(str(one.path)).graph.initializer[0])[0, 0] == 1.0
    assert not remote.fetch("memory://lake/m.onnx", tmp_path / "state").fresh
    memory.pipe("/lake/m.weights", (second.parent / "m.weights").read_bytes())
    two = remote.fetch("memory://lake/m.onnx", tmp_path / "state")
    assert two.version != one.version
    assert numpy_helper.to_array(onnx.load(str(two.path)).graph.initializer[0])[0, 0] == 2.0


def test_a_data_file_elsewhere_is_refused(memory: Any, tmp_path: Path) -> None:
    model = onnx.load(str(with_data_file(tmp_path, 1.0)), load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../../secret"
    memory.pipe("/lake/m.onnx", model.SerializeToString())
    with pytest.raises(ModelError, match="leads out of its folder"):
        remote.fetch("memory://lake/m.onnx", tmp_path / "state")
    assert [path.name for path in (tmp_path / "state").rglob("*") if path.is_file()] == ["lock"]


def test_over_http_once(served: tuple[Path, Server], tmp_path: Path) -> None:
    folder, server = served
    (folder / "a.npz").write_bytes(b"first")
    for _ in range(3):
        got = remote.fetch(f"{server.url}/a.npz", tmp_path / "state", what="data")
        assert got.path.read_bytes() == b"first"
    assert server.downloads() == ["/a.npz"]
    (folder / "a.npz").write_bytes(b"longer than before")
    assert (
        remote.fetch(f"{server.url}/a.npz", tmp_path / "state", what="data").path.read_bytes() == b"longer than before"
    )
    assert server.downloads() == ["/a.npz"] * 2


def test_over_http_a_model_with_a_data_file(served: tuple[Path, Server], tmp_path: Path) -> None:
    folder, server = served
    with_data_file(folder, 3.0)
    got = remote.fetch(f"{server.url}/m.onnx", tmp_path / "state")
    assert numpy_helper.to_array(onnx.load(str(got.path)).graph.initializer[0])[0, 0] == 3.0
    assert sorted(server.downloads()) == ["/m.onnx", "/m.weights"]


def test_a_server_that_says_nothing_of_the_content(tmp_path: Path) -> None:
    """Known by its bytes then: the same content has the same version and place."""
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder, dated=False)
    try:
        (folder / "a.npz").write_bytes(b"first")
        one, two = (remote.fetch(f"{server.url}/a.npz", tmp_path / "state", what="data") for _ in range(2))
        assert one.fresh and two.fresh and one.path == two.path
        (folder / "a.npz").write_bytes(b"other")
        three = remote.fetch(f"{server.url}/a.npz", tmp_path / "state", what="data")
        assert three.version != one.version and three.path.read_bytes() == b"other"
    finally:
        server.close()


def _fetched_beside(url: str, folder: str, gate: Any, found: Any) -> None:
    gate.wait()
    got = remote.fetch(url, Path(folder), what="data")
    found.put((str(got.path), got.path.read_bytes(), got.fresh))


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there: both download, one is kept")
def test_two_processes_at_once_download_once(served: tuple[Path, Server], tmp_path: Path) -> None:
    folder, server = served
    (folder / "a.npz").write_bytes(bytes(4 << 20))
    context = multiprocessing.get_context("spawn")
    gate, found = context.Barrier(2), context.Queue()
    arguments = (f"{server.url}/a.npz", str(tmp_path / "state"), gate, found)
    processes = [context.Process(target=_fetched_beside, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    rows = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert rows[0][:2] == rows[1][:2] and sorted(row[2] for row in rows) == [False, True]
    assert server.downloads() == ["/a.npz"]


def test_a_job_with_local_names(memory: Any, tmp_path: Path) -> None:
    with_data_file(tmp_path, 1.0)
    for part in ("m.onnx", "m.weights"):
        memory.pipe(f"/lake/{part}", (tmp_path / part).read_bytes())
    job = Job("j", "memory://lake/m.onnx", str(tmp_path / "calib.npz"), "onnxruntime", "memory://out/q.onnx")
    near = remote.localized(job, tmp_path / "state")
    assert Path(near.model).read_bytes() == (tmp_path / "m.onnx").read_bytes()
    assert (near.data, near.output, near.name) == (job.data, job.output, job.name)
    plain = Job("j", "m.onnx", None, "onnxruntime", "q.onnx")
    assert remote.localized(plain, tmp_path / "state") is plain


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_uploaded_whole_and_over_an_older_file(scheme: str, memory: Any, tmp_path: Path) -> None:
    root = "memory://out/night" if scheme == "memory" else (tmp_path / "out" / "night").as_uri()
    weights, model = tmp_path / "q.onnx.weights", tmp_path / "q.onnx"
    for round_ in (b"1", b"2"):
        weights.write_bytes(b"weights" + round_)
        model.write_bytes(b"model" + round_)
        remote.upload([weights, model], f"{root}/q.onnx")
        fs, where = fsspec.core.url_to_fs(root)
        found = {Path(name).name: fs.cat_file(name) for name in fs.find(where)}
        assert found == {"q.onnx": b"model" + round_, "q.onnx.weights": b"weights" + round_}


def test_an_upload_that_fails_leaves_what_was_there(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/out/q.onnx", b"older")
    (tmp_path / "q.onnx").write_bytes(b"newer")
    monkeypatch.setattr(type(memory), "mv", _full)
    with pytest.raises(OutputError, match=r"the output 'memory://out/q.onnx' cannot be written \(OSError: .*no space"):
        remote.upload([tmp_path / "q.onnx"], "memory://out/q.onnx")
    assert memory.find("/out") == ["/out/q.onnx"] and memory.cat_file("/out/q.onnx") == b"older"


def _full(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_nothing_is_written_over_http(served: tuple[Path, Server], tmp_path: Path) -> None:
    (tmp_path / "q.onnx").write_bytes(b"model")
    with pytest.raises(OutputError, match="web servers are read-only"):
        remote.upload([tmp_path / "q.onnx"], f"{served[1].url}/q.onnx")
    assert served[1].asked == []


def test_what_is_missing_is_said(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the model 'memory://lake/a.onnx' cannot be read \(there is no such file\)"):
        remote.fetch("memory://lake/a.onnx", tmp_path)
    with pytest.raises(DeviceError, match="has a protocol that fsspec does not know"):
        remote.fetch("tape://lake/a.onnx", tmp_path)


def test_secrets_are_in_no_message(served: tuple[Path, Server], tmp_path: Path) -> None:
    url = f"{served[1].url}/gone.onnx?signature=s3cr3tvalue"
    with pytest.raises(ModelError) as caught:
        remote.fetch(url, tmp_path / "state")
    chain: list[BaseException] = [caught.value]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    assert "s3cr3tvalue" not in " ".join(str(error) for error in chain) and "/gone.onnx" in str(caught.value)


def test_missing_packages_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(url: str, **_: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacking)
    with pytest.raises(DeviceError, match=r"'s3://bucket/a.onnx' cannot be opened \(Install s3fs to access S3\)"):
        remote.fetch("s3://bucket/a.onnx", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"fsspec is not installed: pip install 'sbonnx\[cluster\]'"):
        remote.fetch("s3://bucket/a.onnx", tmp_path)
