"""Files of quantized models: the profile of the file agrees with onnxruntime on both files, and with the run's own."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx import graph as graphs
from sbonnx.cli import main
from sbonnx.errors import ModelError
from sbonnx.metrics import sqnr_db
from sbonnx.pipeline import solve
from sbonnx.profiling import Profile, file_losses, losses, subject_of
from sbonnx.recipe.keywords import BackendForm
from sbonnx.stages.state import Request, read_recipe
from sbonnx.verify.file_check import Depth, compare
from tests.support.models import model, run

RNG = np.random.default_rng(5)

CONVS = """agraph (float[N,3,8,8] x) => (float[N,6] y) {
    a = Conv <pads = [1,1,1,1]> (x, w1, b1)
    p = Relu (a)
    b = Conv <pads = [1,1,1,1], group = 16> (p, w2, b2)
    q = Relu (b)
    c = Conv (q, w3, b3)
    r = Relu (c)
    g = GlobalAveragePool (r)
    f = Flatten (g)
    y = Gemm <transB = 1> (f, w4, b4)
}"""

ROWS = """agraph (float[N,12,32] x) => (float[N,12,8] y) {
    n = LayerNormalization <axis = -1> (x, gain, shift)
    h = MatMul (n, w1)
    i = Add (h, b1)
    e = Relu (i)
    o = MatMul (e, w2)
    s = Add (o, x)
    m = LayerNormalization <axis = -1> (s, gain2, shift2)
    y = MatMul (m, w3)
}"""


def uneven(shape: tuple[int, ...], axis: int, octaves: float = 3.0) -> Any:
    """Normal numbers whose channels along `axis` differ by up to so many octaves either way."""
    rng = np.random.default_rng(len(shape) + shape[0] + axis)
    size = [shape[axis] if place == axis else 1 for place in range(len(shape))]
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-octaves, octaves, size)).astype(np.float32)


def convs(group: int = 16) -> onnx.ModelProto:
    """Three convolutions; the second is depthwise, with biases far above 0, or has one input channel of outliers."""
    constants: dict[str, Any] = {
        "w1": uneven((16, 3, 3, 3), 0),
        "w2": uneven((16, 16 // group, 3, 3), 0),
        "b2": np.where(np.arange(16) % 3, 0, 200).astype(np.float32),
        "w3": uneven((24, 16, 1, 1), 1),
        "w4": uneven((6, 24), 1),
    }
    if group == 1:
        constants["w2"][:, 5] *= 40
    return model(CONVS.replace("group = 16", f"group = {group}"), **constants, b1=16, b3=24, b4=6)


def plain() -> onnx.ModelProto:
    return convs(group=1)


def rows() -> onnx.ModelProto:
    return model(
        ROWS,
        gain=uneven((32,), 0),
        shift=32,
        w1=uneven((32, 48), 0, 1.0),
        b1=48,
        w2=uneven((48, 32), 0),
        gain2=uneven((32,), 0),
        shift2=32,
        w3=(32, 8),
    )


def feeds_of(proto: onnx.ModelProto, count: int = 6) -> list[dict[str, Any]]:
    rng = np.random.default_rng(9)
    shape = [size.dim_value or 2 for size in proto.graph.input[0].type.tensor_type.shape.dim]
    return [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(count)]


CASES: dict[str, tuple[Any, BackendForm, dict[str, Any], str]] = {
    "equalize": (convs, "virtual", {"cross_layer": True, "w_qscheme": "per-tensor-symmetric"}, "equalize_cross_layer"),
    "equalize w4": (convs, "virtual", {"cross_layer": True, "bits": "w4a8"}, "equalize_cross_layer"),
    "absorb": (convs, "virtual", {"cross_layer": True, "absorb_bias": True}, "absorb_bias"),
    "smooth": (rows, "virtual", {"smooth_quant": 0.5}, "smooth_quant"),
    "smooth, int8 kernels": (rows, "onnxruntime", {"smooth_quant": 0.5}, "smooth_quant"),
    "smooth and equalize": (rows, "virtual", {"smooth_quant": 0.7, "cross_layer": True}, "smooth_quant"),
    "awq": (rows, "virtual", {"awq": True, "bits": "w4a8", "mode": "weight_only", "block_size": 16}, "awq"),
}


def profiled(float_model: Any, quantized: Any, feeds: list[dict[str, Any]]) -> Profile:
    subject = subject_of(float_model, quantized)
    assert not subject.notes
    return file_losses(float_model, quantized, subject.graph, subject.plan, subject.solution, feeds)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_equalized_files(case: str, tmp_path: Path) -> None:
    """The outputs are those of onnxruntime, and the layers have the figures of the run that wrote the file."""
    made, backend, wishes, fired = CASES[case]
    proto, path = made(), tmp_path / "q.onnx"
    feeds = feeds_of(proto)
    report = sbonnx.quantize(proto, feeds, output=path, backend=backend, verify=False, **wishes)
    assert any(row.pattern.startswith(fired) for row in report.applied)
    found = profiled(proto, path, feeds)
    expected = [run(proto, feed)["y"] for feed in feeds]
    values = [run(str(path), feed, level="all")["y"] for feed in feeds]
    assert found.outputs["y"] == pytest.approx(sqnr_db(np.array(expected), np.array(values)), abs=0.1)
    assert not found.notes, "the layers explain that loss"
    recipe, rules = read_recipe(None, backend, wishes)
    state = solve(Request(proto, recipe, rules, data=feeds))
    assert state.data is not None
    own = losses(state.prepared.graph, state.prepared.plan, state.solution, feeds)
    known = {row.node: row for row in own.layers}
    assert {row.node for row in found.layers} == known.keys()
    for row in found.layers:
        for column in ("alone", "weights", "gathered"):
            ours, theirs = row.value(column), known[row.node].value(column)
            assert ours == (theirs if theirs is None else pytest.approx(theirs, abs=0.3)), (row.node, column)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds of onnxruntime's quantizer."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def smoothed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """SmoothQuant by hand, as another tool does it: gains of norms over s, weights times s."""
    made: onnx.ModelProto = onnx.ModelProto.FromString(proto.SerializeToString())
    values = {one.name: onnx.numpy_helper.to_array(one) for one in made.graph.initializer}
    s = np.abs(values["gain"]).astype(np.float64) ** 0.5
    new = {
        "gain": values["gain"] / s,
        "shift": values["shift"] / s,
        "w1": values["w1"] * s[:, None],
    }
    for one in made.graph.initializer:
        if one.name in new:
            one.CopyFrom(onnx.numpy_helper.from_array(new[one.name].astype(np.float32), one.name))
    return made


def test_an_equalized_file_of_another_tool(tmp_path: Path) -> None:
    """It records no scales: they are fitted to its weights. Layers lose what they lose against the smoothed model."""
    proto = rows()
    feeds, source, path = feeds_of(proto), tmp_path / "smoothed.onnx", tmp_path / "q.onnx"
    onnx.save(smoothed(proto), source)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(
        str(source), str(path), Reader(feeds), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"],
        per_channel=True, reduce_range=True, **types,
    )  # fmt: skip
    found, own = profiled(proto, path, feeds), profiled(source, path, feeds)
    assert not found.notes
    assert found.outputs["y"] == pytest.approx(own.outputs["y"], abs=0.1)
    for one, other in zip(found.layers, own.layers, strict=True):
        assert one.node == other.node
        assert one.alone == pytest.approx(other.alone, abs=0.5)


def test_weights_that_are_not_those_of_the_model(tmp_path: Path) -> None:
    """The layers cannot explain the loss of the file, which is that of onnxruntime in any case."""
    proto, path = convs(), tmp_path / "q.onnx"
    feeds = feeds_of(proto)
    sbonnx.quantize(proto, feeds, output=path, backend="virtual", verify=False)
    other = convs()
    for one in other.graph.initializer:
        if one.name == "w3":
            one.CopyFrom(onnx.numpy_helper.from_array(RNG.standard_normal((24, 16, 1, 1)).astype(np.float32), "w3"))
    subject = subject_of(other, path)
    found = file_losses(other, path, subject.graph, subject.plan, subject.solution, feeds)
    expected = [run(other, feed)["y"] for feed in feeds]
    values = [run(str(path), feed, level="all")["y"] for feed in feeds]
    assert found.outputs["y"] == pytest.approx(sqnr_db(np.array(expected), np.array(values)), abs=0.1)
    assert "'y': the file has" in found.notes[0]
    assert "without its pairs the file is" in found.notes[0]


def test_a_damaged_record(tmp_path: Path) -> None:
    proto, path = rows(), tmp_path / "q.onnx"
    sbonnx.quantize(proto, feeds_of(proto), output=path, backend="virtual", verify=False, smooth_quant=0.5)
    file = onnx.load(str(path))
    (entry,) = (one for one in file.metadata_props if one.key == "sbonnx.equalized")
    record = json.loads(entry.value)
    record["w1"][0]["inputs"]["data"] = base64.b64encode(b"123").decode()
    entry.value = json.dumps(record)
    with pytest.raises(ModelError, match=r"the metadata 'sbonnx\.equalized' cannot be read"):
        graphs.load(file)


def test_profile_and_compare_print_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` and `profile`, on the default file of a network with norms, where SmoothQuant is auto."""
    proto = rows()
    onnx.save(proto, tmp_path / "f.onnx")
    feeds = feeds_of(proto, 8)
    np.savez(tmp_path / "d.npz", x=np.concatenate([feed["x"] for feed in feeds]))
    files = [str(tmp_path / name) for name in ("f.onnx", "q.onnx")]
    data = ["--data", str(tmp_path / "d.npz")]
    main(["quantize", files[0], *data, "-o", files[1], "--backend", "virtual", "-q"])
    capsys.readouterr()
    main(["compare", *files, *data, "--json"])
    compared = json.loads(capsys.readouterr().out)
    main(["profile", *files, *data, "--json"])
    profile = json.loads(capsys.readouterr().out)
    total = compared["outputs"][0]["sqnr_db"]
    assert profile["outputs"]["y"] == pytest.approx(total, abs=0.2)
    assert not [note for note in profile["notes"] if "explain" in note]


MODELS = (
    "cifar_resnet20",
    "fastestdet",
    "minilm_l6",
    "mobilenetv1_tin200",
    "mobilenetv2_tin200",
    "silero_vad",
    "squeezenet11",
    "ultraface_rfb320",
)
EQUALIZED = ("minilm_l6", "mobilenetv1_tin200", "silero_vad", "ultraface_rfb320")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str, pack: Path, tmp_path: Path) -> None:
    """The outputs are those of `compare`, and the layers are compared with the float model, also after equalization."""
    wishes: dict[str, Any] = {"cross_layer": True, "smooth_quant": 0.5} if name in EQUALIZED else {}
    source, path = pack / "models" / f"{name}.onnx", tmp_path / "q.onnx"
    feeds = list(load_pack(pack).load_calib(name, limit=8))[:4]
    sbonnx.quantize(source, feeds, output=path, backend="virtual", verify=False, effort="fast", **wishes)
    found = profiled(source, path, feeds)
    compared = compare(source, path, feeds, depth=Depth(latency=False))
    for row in compared.outputs:
        if row.compared:
            assert found.outputs[row.name] == pytest.approx(row.sqnr_db, abs=0.1)
    assert not [note for note in found.notes if "without its pairs" in note], "few feeds: kernels may differ by chance"
