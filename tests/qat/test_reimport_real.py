"""Models that others made, reimported, against onnxruntime."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.patterns import FUSE, SIMPLIFY, apply  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import reimport  # noqa: E402
from tests.support.models import run  # noqa: E402

TOLERANCE = 1e-4
"""Largest error over largest value."""

TRAINED = ("cifar_resnet20", "fastestdet", "minilm_l6", "mobilenetv2_tin200", "squeezenet11", "ultraface_rfb320")
SETTLED: dict[str, Any] = {"fixed": {"sr": 16000}, "shapes": {"input": (None, 576)}}
DYNAMIC = {"cifar_resnet20", "minilm_l6", "mobilenetv2_tin200", "squeezenet11"}


def errors(module: Any, model: Any, feeds: dict[str, Any]) -> dict[str, float]:
    """By output, the largest error over the largest value."""
    names = module.meta["sbonnx"]["inputs"].values()
    with torch.no_grad():
        found = module(*[torch.from_numpy(np.array(feeds[name])) for name in names])
    wanted = run(model, feeds)
    assert list(found) == list(wanted)
    off = {}
    for name, want in wanted.items():
        have = found[name].numpy()
        assert (have.shape, have.dtype) == (want.shape, want.dtype), name
        off[name] = float(np.abs(have - want).max() / np.abs(want).max())
    return off


def real_feeds(pack: Path, name: str) -> Any:
    """Real inputs of a trained model, by the reader that lies beside it."""
    spec = importlib.util.spec_from_file_location("sbonnx_tests_pack", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    return (dict(feeds) for feeds in reader.load_calib(name))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["as it is", pytest.param("simplified", marks=pytest.mark.slow), "fused"])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(pack: Path, name: str, form: str) -> None:
    graph = graphs.load(pack / "models" / f"{name}.onnx")
    model = graphs.to_proto(graph)
    if form != "as it is":
        apply(graph, SIMPLIFY if form == "simplified" else (*SIMPLIFY, *FUSE))
    module = reimport(graph).eval()
    for feeds in islice(real_feeds(pack, name), 2):
        if name in DYNAMIC:
            feeds = {key: np.concatenate([value, np.roll(value, 1, axis=-1)]) for key, value in feeds.items()}
        assert max(errors(module, model, feeds).values()) < TOLERANCE


@pytest.mark.parametrize("rate", [16000, 8000])
def test_a_model_with_branches(pack: Path, rate: int) -> None:
    graph = graphs.load(pack / "models" / "silero_vad.onnx")
    window = {16000: 576, 8000: 288}[rate]
    module = reimport(graph, fixed={"sr": rate}, shapes={"input": (None, window)}).eval()
    model = graphs.to_proto(graph)
    for count in (1, 3):
        rng = np.random.default_rng(count)
        feeds = {
            "input": rng.standard_normal((count, window)).astype(np.float32) / 8,
            "state": rng.standard_normal((2, count, 128)).astype(np.float32) / 8,
            "sr": np.array(rate),
        }
        assert max(errors(module, model, feeds).values()) < TOLERANCE


def test_a_step_of_training_lowers_the_loss(pack: Path) -> None:
    """Every parameter gets a gradient, and following it helps."""
    module = reimport(graphs.load(pack / "models" / "cifar_resnet20.onnx")).train()
    x = torch.from_numpy(np.concatenate([feeds["input"] for feeds in islice(real_feeds(pack, "cifar_resnet20"), 8)]))
    labels = torch.arange(len(x)) % 10
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x)["logits"], labels)
        loss.backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRAINED)
def test_everything_follows_the_module_to_its_device(pack: Path, name: str) -> None:
    """On torch's device without data, where a tensor that stayed behind cannot meet the others."""
    graph = graphs.load(pack / "models" / f"{name}.onnx")
    module = reimport(graph, device="meta").eval()
    feeds = next(real_feeds(pack, name))
    made = module(*[torch.from_numpy(np.array(feeds[tensor.name])).to("meta") for tensor in graph.inputs])
    assert {value.device.type for value in made.values()} == {"meta"}
