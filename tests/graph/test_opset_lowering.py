"""Models newer than onnxruntime reads: what is loaded computes what the standard's evaluator says of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from sbonnx.errors import MissingPackageError, ModelError
from sbonnx.graph import load, opset_lowering, to_proto
from sbonnx.graph.opset_lowering import runtime_limits
from sbonnx.system.runtime import loads, onnxruntime, open_session, session_options

NEWEST = onnx.defs.onnx_opset_version()
SEQUENCE = "float[2,6,16] x"

MODELS = {
    "an old opset in a new IR version": (17, f"g ({SEQUENCE}) => (float[2,6,16] y) {{ y = Relu(x) }}"),
    "a new opset": (NEWEST, f"g ({SEQUENCE}) => (float[2,6,16] y) {{ y = Relu(x) }}"),
    "Swish": (25, f"g ({SEQUENCE}) => (float[2,6,16] y) {{ y = Swish<alpha = 1.5>(x) }}"),
    "Swish with its default": (25, f"g ({SEQUENCE}) => (float[2,6,16] y) {{ y = Swish(x) }}"),
    "SwiGLU, defined by Swish": (28, f"g ({SEQUENCE}) => (float[2,6,16] y) {{ a = Neg(x) y = SwiGLU(a, x) }}"),
    "LinearAttention": (
        27,
        f"g ({SEQUENCE}) => (float[2,6,16] y, float[2,4,4,4] state) {{ a = Neg(x) b = Abs(x)\n"
        'y, state = LinearAttention<q_num_heads = 4, kv_num_heads = 4, update_rule = "linear">(x, a, b) }',
    ),
    "CausalConvWithState": (
        27,
        f"g ({SEQUENCE}) => (float[2,6,16] y, float[2,6,3] state) <float[6,1,4] w = "
        f"{{{', '.join(str(k / 9 - 1) for k in range(24))}}}> {{\n"
        'y, state = CausalConvWithState<activation = "silu">(x, w) }',
    ),
    "in a body": (
        28,
        f"g ({SEQUENCE}, bool c) => (float[2,6,16] y) {{ y = If (c) <\n"
        "then_branch = t () => (float[2,6,16] a) { a = SwiGLU(x, x) },\n"
        "else_branch = e () => (float[2,6,16] b) { b = Neg(x) }> }",
    ),
}


def parsed(opset: int, text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {onnx.IR_VERSION}, opset_import: ["" : {opset}]>\n{text}')


@pytest.mark.parametrize("name", MODELS)
def test_loaded(name: str) -> None:
    model = parsed(*MODELS[name])
    graph = load(model)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32), "c": np.array(True)}
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    written = to_proto(graph).SerializeToString()
    assert loads(written)
    if not loads(model.SerializeToString()):
        assert "opset-lowered" in {note.code for note in graph.info.notes}
    wanted = list(ReferenceEvaluator(model).run(None, feeds))
    assert abs(wanted[0]).max() > 0.5
    for given in (written, model.SerializeToString()):  # ours, and the user's as a session reads it
        results = open_session(given, session_options("off")).run(None, feeds)
        for ours, theirs in zip(results, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_form_that_the_older_opset_lacks() -> None:
    text = 'g (float[1,4,4,4] x) => (float[1,16,2,2] y) { y = SpaceToDepth<blocksize = 2, mode = "CRD">(x) }'
    model = parsed(28, text)
    if loads(model.SerializeToString()):
        pytest.skip("this onnxruntime reads opset 28")
    graph = load(model)  # as it is: a conversion to torch needs no session
    assert graph.opset == 28
    with pytest.raises(ModelError, match=r"cannot be converted from opset 28 to \d+: .*an older opset"):
        open_session(to_proto(graph).SerializeToString(), session_options("off"))


def test_limits() -> None:
    limits = runtime_limits()
    assert limits is not None
    assert limits.opset >= 23
    assert limits.ir_version >= 11
    if limits.opset < NEWEST:
        with pytest.raises(Exception, match=r"opset|IR version"):
            onnxruntime().InferenceSession(parsed(*MODELS["a new opset"]).SerializeToString())


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(model: bytes) -> bool:
        raise MissingPackageError("no onnxruntime")

    monkeypatch.setattr(opset_lowering, "loads", missing)
    runtime_limits.cache_clear()
    try:
        graph = load(parsed(*MODELS["SwiGLU, defined by Swish"]))
        assert [node.op for node in graph.nodes] == ["Neg", "SwiGLU"]
    finally:
        runtime_limits.cache_clear()


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "new.onnx"
    onnx.save(parsed(*MODELS["SwiGLU, defined by Swish"]), path)
    feeds = {"x": np.ones((2, 6, 16), np.float32)}
    (result,) = open_session(str(path), session_options("off")).run(None, feeds)
    np.testing.assert_allclose(result, next(iter(ReferenceEvaluator(str(path)).run(None, feeds))), rtol=1e-5)
