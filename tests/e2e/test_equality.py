"""The exported file, run by onnxruntime without optimisation, equals the fake-quantized forward: two ways, one result.

`QuantModel`'s forward rounds in numpy between float sessions and never sees the Q/DQ writer; the file is run by
onnxruntime alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from sbonnx.assets import digits
from sbonnx.calib.quantized.forward import Forward
from sbonnx.graph import Graph
from sbonnx.quant_model import QuantModel
from sbonnx.spec import Array
from tests.support.models import model, residual

RARE = 0.01
"""Share of values that may differ at all: float sums in another order can tip a value to the next code."""

BITS = (8, 6, 4, 3, 2)
SCHEMES = ("per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine")


def recipe(bits: int, weights: str, activations: str, **more: Any) -> dict[str, Any]:
    return {
        "BACKEND": "virtual",
        "SCHEDULE": {"FUSE_BN": True},
        "W": {"QSCHEME": weights, "QUANTIZER": {"BIT": bits}},
        "A": {"QSCHEME": activations, "QUANTIZER": {"BIT": bits}, "QADD": {"ENABLE_QUANT": True}},
        **more,
    }


def run_with_inner(path: Path, feeds: dict[str, Array], names: list[str]) -> dict[str, Array]:
    """All outputs and some inner tensors of a file, optimisation off."""
    proto = onnx.load(str(path))
    have = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = [value.name for value in session.get_outputs()]
    return dict(zip(wanted, session.run(wanted, feeds), strict=True))


def padded_codes(graph: Graph, path: Path) -> set[str]:
    """Outputs of Pad that are no float tensors in the file, because it pads codes."""
    there = {name for node in onnx.load(str(path)).graph.node for name in node.output}
    return {node.outputs[0].name for node in graph.nodes if node.op == "Pad"} - there


def assert_equal_within_a_quantum(
    proto: onnx.ModelProto | Path, config: dict[str, Any], feeds: list[dict[str, Array]], folder: Path
) -> None:
    """Every quantized tensor and every output: at most one quantum apart, and exactly equal almost everywhere."""
    with QuantModel(proto, config) as quant:
        quant.prepare_calibration()
        for feed in feeds:
            quant(feed)
        solution = quant.calc_qparams()
        path = folder / "quantized.onnx"
        quant.export_onnx(path)
        plan, graph = quant.prepared.plan, quant.prepared.graph
        sites = [site for site in plan.of_role("activation") if site.key in solution.qparams]
        assert sites, "the plan quantizes nothing"
        main = {site.tensor for site in sites if not site.scope}  # those of branches stay inside
        inner = sorted(main - {tensor.name for tensor in graph.inputs} - padded_codes(graph, path))
        with Forward(graph, plan, solution, tensors=inner) as forward:
            for feed in feeds:
                expected = forward(feed)
                found = run_with_inner(path, feed, inner)
                quantum = {site.tensor: float(solution.qparams[site.key].scale.max()) for site in sites}
                last = max(quantum.values())
                for name, value in expected.items():
                    room = quantum.get(name, last)
                    apart = np.abs(found[name] - value)
                    assert apart.max() <= room * 1.001, name
                    assert (apart > room * 1e-3).mean() <= RARE, name


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("weights", SCHEMES)
@pytest.mark.parametrize("activations", SCHEMES)
def test_residual_block(bits: int, weights: str, activations: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(bits)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(2)]
    assert_equal_within_a_quantum(residual(), recipe(bits, weights, activations), feeds, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [*BITS, 5, 7, 12, 16])
def test_digits(bits: int, tmp_path: Path) -> None:
    images = np.load(digits().calib)["image"]
    feeds = [{"image": images[i : i + 4]} for i in (0, 4)]
    schemes = recipe(bits, "per-channel-symmetric", "per-tensor-affine")
    assert_equal_within_a_quantum(Path(digits().model), schemes, feeds, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("weights", ["codes", "qdq"])
def test_digits_for_runtimes(backend: str, weights: str, tmp_path: Path) -> None:
    images = np.load(digits().calib)["image"]
    feeds = [{"image": images[i : i + 4]} for i in (0, 4)]
    assert_equal_within_a_quantum(
        Path(digits().model),
        {"BACKEND": backend, "SCHEDULE": {"FUSE_BN": True}, "WEIGHTS": weights},
        feeds,
        tmp_path,
    )


@pytest.mark.parametrize("bits", BITS)
def test_every_weighted_op(bits: int, tmp_path: Path) -> None:
    """Grouped ConvTranspose, Gemm both ways, MatMul, embedding, 1-D conv."""
    proto = model(
        """agraph (float[2,4,6,6] x, int64[2,5] ids) => (float[2,5] y, float[2,6,13,13] t, float[2,3,5] e) {
            t = ConvTranspose <strides = [2,2], group = 2> (x, wt, bt)
            p = GlobalAveragePool (x)
            f = Flatten (p)
            m = MatMul (f, wm)
            g = Gemm (m, wg, bg)
            y = Gemm <transB = 1> (g, wh, bh)
            rows = Gather (table, ids)
            turned = Transpose <perm = [0,2,1]> (rows)
            e = Conv (turned, w1)
        }""",
        wt=(4, 3, 3, 3),
        bt=6,
        wm=(4, 7),
        wg=(7, 5),
        bg=5,
        wh=(5, 5),
        bh=5,
        table=(20, 8),
        w1=(3, 8, 1),
    )
    rng = np.random.default_rng(0)
    feeds: list[dict[str, Array]] = [
        {"x": rng.standard_normal((2, 4, 6, 6)).astype(np.float32), "ids": rng.integers(0, 20, (2, 5))}
        for _ in range(2)
    ]
    for scheme in ("symmetric", "affine"):
        folder = tmp_path / scheme
        folder.mkdir()
        config = recipe(bits, f"per-channel-{scheme}", f"per-tensor-{scheme}")
        assert_equal_within_a_quantum(proto, config, feeds, folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "backend", "bits"),
    [
        ("cifar_resnet20", "virtual", 4),
        ("cifar_resnet20", "onnxruntime", 8),
        ("minilm_l6", "tensorrt", 8),
        ("silero_vad", "onnxruntime", 8),
        ("ultraface_rfb320", "tensorrt", 8),
        ("ultraface_rfb320", "virtual", 4),
    ],
)
def test_real_models(name: str, backend: str, bits: int, pack: Path, tmp_path: Path) -> None:
    """Outputs of trained models on their own data, without integer LSTM, whose kernel quantizes its inputs itself."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    feeds = data.load_calib(name, limit=2)
    config = {"BACKEND": backend, "SCHEDULE": {"FUSE_BN": True}, "EXCLUDE": ["op:LSTM"] if name == "silero_vad" else []}
    rounding = "gptq" if bits < 8 and name == "cifar_resnet20" else "nearest"
    config |= {"W": {"QUANTIZER": {"BIT": bits}, "ROUNDING": rounding}, "A": {"QUANTIZER": {"BIT": bits}}}
    assert_equal_within_a_quantum(pack / "models" / f"{name}.onnx", config, feeds, tmp_path)
