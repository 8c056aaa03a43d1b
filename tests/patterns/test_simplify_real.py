"""Simplification of models that others made: the trained ones, and those of ONNX's own backend tests."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, load, to_proto
from sbonnx.graph.query import all_nodes
from sbonnx.patterns import FUSE, SIMPLIFY, apply
from tests.support.models import run
from tests.support.pattern_checks import Feeds, assert_same, assert_sound, interface, random_feeds

TRAINED = (
    "cifar_resnet20",
    "fastestdet",
    "minilm_l6",
    "mobilenetv2_tin200",
    "silero_vad",
    "squeezenet11",
    "ultraface_rfb320",
)
GONE: dict[str, set[str]] = {
    "cifar_resnet20": {"Cast", "Concat", "ConstantOfShape", "Gather", "Shape", "Transpose", "Unsqueeze"},
    "silero_vad": {"Cast", "ConstantOfShape", "Reshape", "Transpose"},
    "ultraface_rfb320": {"Gather", "Shape", "Unsqueeze"},
}
"""Exporters' detours that must not be left."""

ROUNDING = {"silero_vad": 1e-6}
"""onnxruntime's LSTM packs weights that are initializers, and adds in another order than with computed ones."""

BACKEND = Path(onnx.__file__).parent / "backend" / "test" / "data"
DIVERSE = ("light", "simple", "pytorch-converted", "pytorch-operator")
HALF = 2e-3
"""onnxruntime's CPU runs float16 in float32 and rounds between nodes: a node less is a rounding less."""


def counted(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in all_nodes(graph))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_compute_the_same(pack: Path, name: str) -> None:
    path = pack / "models" / f"{name}.onnx"
    before = onnx.load(path)
    graph = load(path)
    lifted = to_proto(graph)
    count = sum(counted(graph).values())
    applied = apply(graph, SIMPLIFY)
    after = assert_sound(graph)
    assert interface(after) == interface(before)
    assert GONE.get(name, set()) & set(counted(graph)) == set()
    assert sum(counted(graph).values()) <= count
    assert all(one.where and one.why for one in applied.refusals)
    for feeds in islice(calibration(pack, name), 3):
        wanted, found = run(lifted, feeds), run(after, feeds)
        for output, want in wanted.items():
            assert_same(want, found[output], output, ROUNDING.get(name, 0.0))


def calibration(pack: Path, name: str) -> Iterable[Feeds]:
    """Real inputs of a trained model, by the reader that lies beside it."""
    spec = importlib.util.spec_from_file_location("sbonnx_tests_pack", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    feeds: Iterable[Feeds] = reader.load_calib(name)
    return feeds


def backend_models(folder: str) -> list[Path]:
    return sorted(path for path in (BACKEND / folder).rglob("*.onnx"))


def stored(path: Path, kind: onnx.TypeProto) -> Any:
    """One value of a test data set."""
    raw = path.read_bytes()
    if kind.HasField("tensor_type"):
        return numpy_helper.to_array(onnx.TensorProto.FromString(raw))
    return numpy_helper.to_list(onnx.SequenceProto.FromString(raw))


def backend_feeds(model: onnx.ModelProto, folder: Path) -> Feeds | None:
    data = folder / "test_data_set_0"
    if not data.is_dir():
        return random_feeds(model, dynamic=1) if folder.name == "light" else None
    held = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: stored(data / f"input_{number}.pb", value.type)
        for number, value in enumerate(model.graph.input)
        if value.name not in held
    }


def check(path_or_model: Path | onnx.ModelProto, feeds: Feeds | None, patterns: Any, tolerance: float) -> str:
    """Simplify one model; says how it went. A crash or another result fails the test."""
    try:
        graph = load(path_or_model)
    except ModelError:
        return "refused by load"
    before = to_proto(graph)
    apply(graph, patterns)
    try:
        onnx.checker.check_model(before, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return "not valid before"
    after = assert_sound(graph)
    assert interface(after) == interface(before)
    if feeds is None:
        return "no data"
    try:
        wanted = run(before, feeds)
    except Exception:  # onnxruntime's exceptions share no base; what it cannot run cannot be compared
        return "not run by onnxruntime"
    found = run(after, feeds)
    for name, want in wanted.items():
        assert_same(want, found[name], name, tolerance)
    return "equal"


@pytest.mark.slow
@pytest.mark.parametrize("folder", DIVERSE)
def test_models_of_the_backend_tests(folder: str) -> None:
    outcomes: Counter[str] = Counter()
    for path in backend_models(folder):
        try:
            outcomes[check(path, backend_feeds(onnx.load(path), path.parent), SIMPLIFY, 0.0)] += 1
        except AssertionError as error:
            raise AssertionError(f"{path.relative_to(BACKEND)}: {error}") from error
    assert outcomes["equal"] >= 0.6 * sum(outcomes.values()), outcomes  # what an older onnxruntime runs too


def node_cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with np.errstate(all="ignore"):
        return [case for case in collect_testcases(None) if case.data_sets]


def with_constants(model: onnx.ModelProto, feeds: Feeds) -> onnx.ModelProto:
    """The same model with every tensor input as an initializer: everything can be folded."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.input[:]
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in feeds.items())
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_node_cases_as_they_are_and_with_constant_inputs() -> None:
    """Each case in one of both ways in turn: an op has several cases."""
    random = ("bernoulli", "random", "multinomial", "dropout")
    outcomes: Counter[str] = Counter()
    for number, case in enumerate(node_cases()):
        if any(word in case.name for word in random):
            continue
        given = dict(zip([value.name for value in case.model.graph.input], case.data_sets[0][0], strict=False))
        tolerance = HALF if "16" in case.name else 0.0
        model, feeds = case.model, given
        if number % 2 and all(isinstance(value, np.ndarray) for value in given.values()):
            model, feeds = with_constants(case.model, given), {}
        try:
            outcomes[check(model, feeds, SIMPLIFY, tolerance)] += 1
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error
    assert outcomes["equal"] > 1000, outcomes  # an older onnxruntime runs fewer


CONTROL_FLOW_AND_LAYERS = ("test_if", "test_loop", "test_scan", "test_batchnorm", "test_gemm", "test_center")


def test_everything_on_a_few_node_cases() -> None:
    """Fusion after simplification, on the cases with bodies and function bodies written out."""
    outcomes: Counter[str] = Counter()
    for case in node_cases():
        if not case.name.startswith(CONTROL_FLOW_AND_LAYERS):
            continue
        given = dict(zip([value.name for value in case.model.graph.input], case.data_sets[0][0], strict=False))
        outcomes[check(case.model, given, (*SIMPLIFY, *FUSE), 2e-6)] += 1
    assert outcomes["equal"] > 10, outcomes
