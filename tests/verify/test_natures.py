"""Nature of outputs: of small graphs, by structure and values, and of the real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.accuracy import load_pack
from sbonnx.report.figures import OutputQuality
from sbonnx.spec import Array
from sbonnx.verify import session
from sbonnx.verify.output_forms import output_forms
from sbonnx.verify.quality import QualitySamples
from tests.support.models import model, run

RNG = np.random.default_rng(3)


def judged(proto: onnx.ModelProto, feeds: list[dict[str, Any]], noise: float = 0.01) -> dict[str, OutputQuality]:
    """Quality of a model against itself with noise of a share of the outputs' spread."""
    names = [output.name for output in proto.graph.output]
    samples = QualitySamples(names, proto)
    for feed in feeds:
        found = run(proto, feed, level="all")
        plain = [found[name] for name in names]
        samples.add(plain, [_noisy(one, noise) for one in plain], feed)
    return {output.name: output for output in samples.result()}


def _noisy(array: Array, noise: float) -> Array:
    if array.dtype.kind != "f":
        return array
    away = (noise * array.std() * RNG.standard_normal(array.shape)).astype(array.dtype)
    changed: Array = array + away
    return changed


def images(count: int = 6) -> list[dict[str, Any]]:
    return [{"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


POOL = "a = GlobalAveragePool (x) f = Flatten (a) g = Mul (f, scale)"

GRAPHS = {
    "a softmax": (f"{POOL} y = Softmax <axis=1> (g)", "float[N,3] y", "classes"),
    "a log-softmax, squeezed": (f"{POOL} l = LogSoftmax <axis=1> (g) y = Reshape (l, s)", "float[N,3] y", "classes"),
    "a softmax, decomposed": (
        f"{POOL} e = Exp (g) r = ReduceSum <keepdims=1> (e, one) y = Div (e, r)",
        "float[N,3] y",
        "classes",
    ),
    "a softmax of an axis without a length": (f"{POOL} y = Softmax <axis=1> (g)", "float[N,K] y", "values"),
    "logits by name": (f"{POOL} t = MatMul (g, square) y = Add (t, class_bias)", "float[N,3] y", "classes"),
    "a few values of a linear layer": (f"{POOL} y = MatMul (g, square)", "float[N,3] y", "values"),
    "logits of many classes": (f"{POOL} y = MatMul (g, wide)", "float[N,12] y", "classes"),
    "even values of a linear layer": (f"{POOL} t = MatMul (g, wide) y = Mul (t, tiny)", "float[N,12] y", "values"),
    "one class whatever the sample": (f"{POOL} t = MatMul (g, wide) y = Add (t, shift)", "float[N,12] y", "values"),
    "a sigmoid": (f"{POOL} r = ReduceSum <keepdims=1> (g, one) y = Sigmoid (r)", "float[N,1] y", "values"),
    "scores of positions": ("r = Reshape (x, long) y = Sigmoid (r)", "float[N,192,1] y", "values"),
    "scores of many boxes": ("r = Reshape (x, two) y = Softmax <axis=2> (r)", "float[N,96,2] y", "values"),
    "a normalized vector": (f"{POOL} y = LpNormalization <axis=1, p=2> (g)", "float[N,3] y", "values"),
    "a softmax a pixel": ("y = Softmax <axis=1> (x)", "float[N,3,8,8] y", "values"),
    "a map": ("y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)", "float[N,3,4,4] y", "values"),
    "pixels in bytes": ("r = Mul (x, scale) y = Cast <to=2> (r)", "uint8[N,3,8,8] y", "values"),
    "indices": (f"{POOL} y = ArgMax <axis=1> (g)", "int64[N,1] y", "labels"),
    "as many rows as there are": ("n = NonZero (r1) y = Cast <to=1> (n)", "float[4,R] y", "detections"),
}


@pytest.mark.parametrize("count", [1, 3, 8])
def test_logits_of_few_samples_of_one_class(count: int) -> None:
    """The first samples of a sorted folder: agreement on one class says little, so their error decides."""
    proto = model(
        "agraph (float[N,4] x) => (float[N,3] logits) { logits = MatMul (x, w) }",
        w=np.array([[3, 0, 1], [0, 1, 0], [1, 0, 2], [0, 0, 0]], np.float32),
    )
    feeds = [{"x": np.array([[1 + index % 3, 0.3 * index % 1, 0.2, 1]], np.float32)} for index in range(count)]
    (found,) = judged(proto, feeds).values()
    assert found.nature == "classes", found.why
    assert (found.figure("agreement") is not None) is (count == 1)
    error = found.figure("relative error")
    assert error is not None and (error.line is None) is (count == 1)


@pytest.mark.parametrize("name", GRAPHS)
def test_of_a_graph(name: str) -> None:
    body, output, nature = GRAPHS[name]
    if "r1" in body:
        body = f"r1 = Relu (x) {body}"
    numbers = {
        "scale": np.float32(30),
        "tiny": np.float32(1e-3),
        "shift": np.array([5000, *[0] * 11], np.float32),
        "square": np.eye(3, dtype=np.float32),
        "wide": np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32),
        "class_bias": np.zeros(3, np.float32),
        "long": np.array([0, 192, 1]),
        "one": np.array([1], np.int64),
        "s": np.array([-1, 3]),
        "two": np.array([0, 96, 2]),
    }
    used = {key: value for key, value in numbers.items() if f" {key})" in body}
    proto = model(f"agraph (float[N,3,8,8] x) => ({output}) {{ {body} }}", opset=17, **used)
    (found,) = judged(proto, images()).values()
    assert found.nature == nature, found.why
    has_agreement = found.figure("agreement") is not None
    assert has_agreement is (nature == "classes"), "agreement is of classes alone"


def test_branches_that_end_alike() -> None:
    """An If whose branches both end in a softmax; else nothing is known."""

    def proto(other: str) -> onnx.ModelProto:
        return model(
            f"""agraph (float[N,4] x, bool c) => (float[N,4] y) {{
            s = Identity (x)
            y = If (c) <then_branch = a () => (float[N,4] p) {{ p = Softmax (s) }},
                        else_branch = b () => (float[N,4] q) {{ q = {other} (s) }}> }}""",
            opset=17,
        )

    assert output_forms(proto("Softmax"))["y"].end == "softmax"
    assert output_forms(proto("Relu"))["y"].end == "other"


def test_features_with_the_name_of_a_state() -> None:
    """A map called c0 beside others, without an input that it could come from."""
    proto = model("agraph (float[N,3,8,8] x) => (float[N,3,8,8] e0, float[N,3,8,8] c0) { e0 = Neg (x) c0 = Relu (x) }")
    assert {output.nature for output in judged(proto, images()).values()} == {"values"}


def test_states() -> None:
    """The state of an LSTM, and an output with the shape of a further input."""
    proto = model("""agraph (float[N,6] x, float[2,N,5] h) => (float[N,6] y, float[2,N,5] hn) {
        y = Relu (x) hn = Tanh (h) }""")
    feeds = [{"x": RNG.standard_normal((1, 6)), "h": RNG.standard_normal((2, 1, 5))} for _ in range(5)]
    found = judged(proto, [{name: x.astype(np.float32) for name, x in feed.items()} for feed in feeds])
    assert found["hn"].nature == "state" and found["hn"].samples == 5, "the first axis is not that of samples"
    lstm = model(
        "agraph (float[4,N,3] x) => (float[1,N,2] h) { y, h = LSTM <hidden_size=2> (x, w, r) }",
        w=(1, 8, 3),
        r=(1, 8, 2),
    )
    assert output_forms(lstm)["h"].end == "recurrent"


def test_caches() -> None:
    """Keys and values grow by a step; their names say so, with and without an input of theirs."""
    proto = model(
        """agraph (int64[N,S] ids, float[N,2,P,3] past_key_0) => (
        float[N,S,5] y, float[N,2,T,3] present_key_0, float[N,2,S,3] out) {
        e = Gather (table, ids) y = MatMul (e, w) h = Reshape (e, heads) out = Transpose <perm=[0,2,1,3]> (h)
        present_key_0 = Concat <axis=2> (past_key_0, out) }""",
        table=(9, 6),
        w=(6, 5),
        heads=np.array([0, 0, 2, 3]),
    )
    past = RNG.standard_normal((1, 2, 2, 3)).astype(np.float32)
    feeds = [{"ids": RNG.integers(0, 9, (1, 4)), "past_key_0": past} for _ in range(6)]
    found = judged(proto, feeds)
    assert {name: one.nature for name, one in found.items()} == {
        "y": "values",
        "present_key_0": "state",
        "out": "values",
    }
    assert found["present_key_0"].state == "unjudged"


PACKED = {
    "cifar_resnet20": {"logits": "classes"},
    "mobilenetv1_tin200": {"logits": "classes"},
    "squeezenet11": {"logits": "classes"},
    "minilm_l6": {"last_hidden_state": "values", "sentence_embedding": "values"},
    "fastestdet": {"758": "values"},
    "ultraface_rfb320": {"scores": "values", "boxes": "values"},
    "silero_vad": {"output": "values", "stateN": "state"},
}


@pytest.mark.parametrize("name", PACKED)
def test_of_a_real_model(name: str, pack: Path) -> None:
    path = pack / "models" / f"{name}.onnx"
    feeds = load_pack(pack).load_calib(name, limit=12)[:12]
    proto = onnx.load(path)
    float_model = session(path)
    names = [output.name for output in proto.graph.output]
    samples = QualitySamples(names, proto)
    for feed in feeds:
        plain = float_model.run(None, feed)
        samples.add(plain, [_noisy(one, 1e-4) for one in plain], feed)
    found = {output.name: output for output in samples.result()}
    assert {key: output.nature for key, output in found.items()} == PACKED[name]
    assert not any(output.problem for output in found.values()), "such noise is no loss"
