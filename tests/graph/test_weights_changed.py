"""A model file that another process writes to while it is mapped: one line, no signal, nothing of it in an output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, digest, load, save
from sbonnx.graph.query import constant
from sbonnx.graph.storage import weights
from tests.support.models import model

SIZE = 1 << 20
compiled = pytest.mark.skipif(weights.pages is None, reason="built without a C compiler")


def opened(folder: Path) -> tuple[Path, Graph]:
    """A model with a weight of 4 MiB."""
    path = folder / "m.onnx"
    made = model("g (float[N,1024] x) => (float[N,1024] y) { y = MatMul(x, w) }", w=(1024, 1024))
    path.write_bytes(made.SerializeToString())
    return path, load(path)


def cut(path: Path) -> None:
    os.truncate(path, SIZE)


def written(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:SIZE] + bytes(len(content) - SIZE))
    os.utime(path, ns=(0, 0))  # as fast as a clock's tick


def save_copy(graph: Graph, folder: Path) -> None:
    save(graph, folder / "out.onnx")


READS: dict[str, Callable[[Graph, Path], object]] = {
    "save": save_copy,
    "digest": lambda graph, folder: digest(graph),
    "values": lambda graph, folder: constant(graph.nodes[0].inputs[1]),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", [cut, written])
def test_a_file_that_changes_after_it_was_opened(change: Callable[[Path], None], read: str, tmp_path: Path) -> None:
    path, graph = opened(tmp_path)
    change(path)
    with pytest.raises(
        ModelError, match=r"m\.onnx' was written to while it was read \(it had 41\d+ bytes, and has \d+\)"
    ):
        READS[read](graph, tmp_path)
    assert os.listdir(tmp_path) == ["m.onnx"]


@compiled
def test_values_that_are_gone_read_as_zeros_and_are_not_saved(tmp_path: Path) -> None:
    path, graph = opened(tmp_path)
    values = constant(graph.nodes[0].inputs[1])
    assert values is not None
    before = values[0].copy()
    cut(path)
    np.testing.assert_array_equal(values[0], before)
    assert not values[-512:].any()
    with pytest.raises(ModelError, match="was written to while it was read"):
        save(graph, tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["m.onnx"]


@compiled
def test_a_map_that_is_closed_is_not_watched_any_more(tmp_path: Path) -> None:
    assert weights.pages is not None
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 16))
    for _ in range(4200):  # more than are watched at a time
        weights.WeightBytes.map(path)
    source = weights.WeightBytes.map(path)
    os.truncate(path, 0)
    assert bytes(source.buffer[1 << 15 : (1 << 15) + 4]) == bytes(4)


def test_a_file_that_is_replaced_or_deleted_stays_readable(tmp_path: Path) -> None:
    path, graph = opened(tmp_path)
    want = digest(graph)
    (tmp_path / "new").write_bytes(b"another model")
    os.replace(tmp_path / "new", path)
    assert digest(graph) == want
    path.unlink()
    assert digest(graph) == want
