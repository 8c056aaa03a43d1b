"""Real models and the models that onnx itself carries: the same answers, or one line that says why not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph import digest, load, save, to_proto
from sbonnx.spec import Array
from tests.support.models import run

NAMES = (
    "cifar_resnet20",
    "fastestdet",
    "minilm_l6",
    "mobilenetv2_tin200",
    "silero_vad",
    "squeezenet11",
    "ultraface_rfb320",
)
SIZES = {"silero_vad": {"input": (1, 576), "state": (2, 1, 128), "sr": ()}, "minilm_l6": {}}


def feeds_of(name: str, manifest: dict[str, Any]) -> dict[str, Array]:
    """Seeded inputs; dynamic axes are 2 (the batch) and 16."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for entry in next(one for one in manifest["models"] if one["name"] == name)["inputs"]:
        sizes = [size if isinstance(size, int) else (2, 16, 16, 16)[axis] for axis, size in enumerate(entry["shape"])]
        shape = SIZES.get(name, {}).get(entry["name"], tuple(sizes))
        if entry["dtype"] == "int64":
            feeds[entry["name"]] = np.full(shape, 16000 if entry["name"] == "sr" else 1, np.int64)
        else:
            feeds[entry["name"]] = rng.standard_normal(shape).astype(entry["dtype"])
    return feeds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", NAMES)
def test_real_models_answer_as_before(name: str, opset: int, pack: Path, tmp_path: Path) -> None:
    path = pack / "models" / f"{name}.onnx"
    feeds = feeds_of(name, json.loads((pack / "manifest.json").read_text()))
    graph = load(path, opset=opset)
    save(graph, tmp_path / "m.onnx")
    save(graph, tmp_path / "beside.onnx", external_over=0)
    again = load(tmp_path / "beside.onnx", opset=opset)
    assert digest(again) == digest(load(tmp_path / "m.onnx", opset=opset)) == digest(graph)
    written = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(written, full_check=True)
    source = onnx.load(path)
    held = {tensor.name for tensor in source.graph.initializer}
    assert [value for value in source.graph.input if value.name not in held] == list(written.graph.input)
    assert list(source.graph.output) == list(written.graph.output)
    want = run(str(path), feeds)
    for target in ("m.onnx", "beside.onnx"):
        got = run(str(tmp_path / target), feeds)
        for output in want:
            np.testing.assert_allclose(got[output], want[output], rtol=1e-5, atol=1e-5)


Sample = tuple[ModelProto, dict[str, Any] | None, list[Any] | None]


def stored(kind: str) -> list[tuple[str, Path]]:
    """The files of one folder of onnx's test data, by name."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / kind
    found = [*folder.glob("*/model.onnx"), *folder.glob("*.onnx")]
    return sorted((path.parent.name if path.name == "model.onnx" else path.stem, path) for path in found)


def read_value(path: Path, value: onnx.ValueInfoProto) -> Any:
    content = path.read_bytes()
    if value.type.WhichOneof("value") == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if value.type.WhichOneof("value") == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(onnx.TensorProto.FromString(content))


def sample(path: Path) -> Sample:
    """A stored model with its first inputs and outputs."""
    model = onnx.load(path)
    held = {tensor.name for tensor in model.graph.initializer}
    free = [value for value in model.graph.input if value.name not in held]
    data = path.parent / "test_data_set_0"
    if not data.is_dir():
        return model, None, None
    feeds = {value.name: read_value(data / f"input_{n}.pb", value) for n, value in enumerate(free)}
    return model, feeds, [read_value(data / f"output_{n}.pb", v) for n, v in enumerate(model.graph.output)]


def alike(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(alike(a, b) for a, b in zip(left, right, strict=True))
    if left is None or isinstance(left, dict):
        return bool(left == right)
    a, b = np.asarray(left), np.asarray(right)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(
        np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) if a.dtype.kind in "fc" else np.array_equal(a, b)
    )


def answers(model: ModelProto, feeds: dict[str, Any]) -> list[Any] | Exception:
    try:
        return list(run(model, feeds).values())
    except Exception as error:  # onnxruntime has a class for every status
        return error


def passes(model: ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def verdict(model: ModelProto, feeds: dict[str, Any] | None, wanted: list[Any] | None, opset: int) -> str:
    """What became of a model: "same", "unproved" (onnxruntime cannot run it), "refused", or what is wrong."""
    try:
        graph = load(model, opset=opset)
        written = to_proto(graph)
    except ModelError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    if passes(model) and not passes(written):
        return "checker refuses it now"
    held = {tensor.name for tensor in model.graph.initializer}
    required, kept = ([value for value in each.graph.input if value.name not in held] for each in (model, written))
    if required != kept or not {value.name for value in written.graph.input} <= {one.name for one in model.graph.input}:
        return "inputs changed"
    if list(model.graph.output) != list(written.graph.output):
        return "outputs changed"
    if feeds is None:
        return "unproved"
    before, after = answers(model, feeds), answers(written, feeds)
    if isinstance(before, Exception):
        before = wanted if wanted is not None and not isinstance(after, Exception) else before
    if isinstance(before, Exception):
        return "unproved"
    if isinstance(after, Exception):
        return f"fails now: {after}"
    return "same" if alike(before, after) else "differs"


UNPROVED: dict[str, tuple[str, ...]] = {
    "simple": ("test_gradient", "test_strnorm"),  # training operators, and languages that the machine does not have
    "pytorch-operator": (),
    "pytorch-converted": ("test_PReLU",),  # refused: see lift.py
}
FINE = {"same", "unproved", "refused"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("kind", ["simple", "pytorch-operator", "pytorch-converted"])
def test_the_models_of_onnx(kind: str, opset: int) -> None:
    verdicts = {name: verdict(*sample(path), opset) for name, path in stored(kind)}
    wrong = {name: what for name, what in verdicts.items() if what not in FINE}
    assert not wrong
    unproved = [name for name, what in verdicts.items() if what != "same"]
    assert len(verdicts) > 15 and [name for name in unproved if not name.startswith(UNPROVED[kind])] == []


@pytest.mark.slow
def test_the_large_networks_of_onnx() -> None:
    """Weights made up by the file itself; the answers are compared on seeded inputs."""
    for name, path in stored("light"):
        model = onnx.load(path)
        held = {tensor.name for tensor in model.graph.initializer}
        free = [value for value in model.graph.input if value.name not in held]
        rng = np.random.default_rng(0)
        feeds = {
            value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(
                np.float32
            )
            for value in free
        }
        assert verdict(model, feeds, None, 13) == "same", name


NOT_REPEATABLE = ("random", "bernoulli", "training_dropout", "dropout_default_mask", "dropout_train")


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "first"), [(13, 0), (21, 1)])
def test_the_node_cases_of_onnx(opset: int, first: int) -> None:
    """More than 1,800 models of one operator each, with inputs: every other one, most operators in both opsets."""
    from onnx.backend.test.case.node import collect_testcases

    counts: dict[str, int] = {}
    wrong: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases[first::2]:
        assert case.model is not None and case.data_sets is not None
        values = case.data_sets[0][0]
        arrays = [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]
        feeds = {
            info.name: np.asarray(value) if isinstance(value, np.generic) else value
            for info, value in zip(case.model.graph.input, arrays, strict=False)
        }
        repeatable = not any(word in case.name for word in NOT_REPEATABLE)
        # onnxruntime cannot run some; what onnx expects has tolerances of its own
        what = verdict(case.model, feeds if repeatable else None, None, opset)
        counts[what] = counts.get(what, 0) + 1
        if what not in FINE:
            wrong[case.name] = what
    assert not wrong
    assert counts["same"] > 550 and counts["refused"] < 20, counts
