"""Simplify and fuse on real models: the same outputs in onnxruntime, no BatchNormalization left, blocks counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.graph import load
from sbonnx.patterns import FUSE, SIMPLIFY, apply, find_blocks
from tests.support.models import run
from tests.support.pattern_checks import Feeds, assert_sound

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "silero_vad": {"input": (1, 512), "state": (2, 1, 128), "sr": ()},
    "minilm_l6": {"input_ids": (2, 16), "attention_mask": (2, 16), "token_type_ids": (2, 16)},
}
NORMS_FUSED = {"cifar_resnet20": 19, "mobilenetv2_tin200": 53, "ultraface_rfb320": 35}
BLOCKS: dict[str, dict[str, int]] = {"minilm_l6": {"gelu": 6, "layernorm": 13, "attention_softmax": 6}}
MODELS = (
    "cifar_resnet20",
    "fastestdet",
    "minilm_l6",
    "mobilenetv2_tin200",
    "silero_vad",
    "squeezenet11",
    "ultraface_rfb320",
)


def feeds_of(name: str, model: onnx.ModelProto) -> Feeds:
    """Random images, sound or tokens in the shapes that the model takes."""
    rng = np.random.default_rng(0)
    held = {tensor.name for tensor in model.graph.initializer}
    feeds: Feeds = {}
    for value in model.graph.input:
        if value.name in held:
            continue
        dims = [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
        shape = SIZES.get(name, {}).get(value.name, tuple(dims))
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feeds[value.name] = rng.normal(size=shape).astype(np.float32)
        elif value.name == "sr":
            feeds[value.name] = np.array(16000, np.int64)
        else:
            high = {"attention_mask": 2, "token_type_ids": 2}.get(value.name, 1000)
            feeds[value.name] = rng.integers(0, high, shape)
    for mask in feeds.keys() & {"attention_mask"}:
        feeds[mask][:, 0] = 1
    return feeds


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_real_model(name: str, pack: Path) -> None:
    path = pack / "models" / f"{name}.onnx"
    graph = load(path)
    apply(graph, SIMPLIFY)
    fused = apply(graph, FUSE)
    assert not apply(graph, (*SIMPLIFY, *FUSE)).fired
    after = assert_sound(graph)
    assert "BatchNormalization" not in {node.op_type for node in after.graph.node}
    assert Counter(fired.pattern for fired in fused.fired)["fuse_bn"] == NORMS_FUSED.get(name, 0)
    assert Counter(block.kind for block in find_blocks(graph)) == BLOCKS.get(name, {})
    feeds = feeds_of(name, onnx.load(path))
    wanted, found = run(str(path), feeds), run(after, feeds)
    assert list(wanted) == list(found)
    for output, want in wanted.items():
        assert want.shape == found[output].shape
        assert np.abs(want - found[output]).max() <= 1e-4 * np.abs(want).max()
