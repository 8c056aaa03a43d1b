"""Adapters on a real network and real texts."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

import sbonnx  # noqa: E402
from sbonnx import qat  # noqa: E402
from sbonnx.qat.lora import low_ranks  # noqa: E402
from tests.support.models import run  # noqa: E402

RANK = 4
LAYERS = 6
"""Of MiniLM, each with matrices q, k, v, o, f1 and f2."""


def texts(pack: Path, count: int) -> list[dict[str, Any]]:
    """Real calibration texts, 8 a feed."""
    spec = importlib.util.spec_from_file_location("sbonnx_tests_pack", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(islice(module.load_calib("minilm_l6", batch=8), count))


@pytest.mark.slow
def test_minilm_learns_and_its_file_gives_what_it_gives(pack: Path, tmp_path: Path) -> None:
    """Nearer to the float network on texts that were not trained on, in onnxruntime, by the factors alone."""
    path, feeds = pack / "models" / "minilm_l6.onnx", texts(pack, 5)
    *seen, unseen = feeds
    wishes: dict[str, Any] = {"backend": "virtual", "bits": "w4a8", "rounding": "nearest"}
    sbonnx.quantize(path, seen, output=tmp_path / "start.onnx", verify=False, **wishes)
    module = qat.prepare(path, seen, adapters=qat.Adapters(RANK, scales=False, norms=False), **wishes)
    assert len(low_ranks(module)) == 6 * LAYERS
    count = sum(one.numel() for one in module.parameters() if one.requires_grad)
    assert count == LAYERS * RANK * (4 * (384 + 384) + 2 * (384 + 1536))
    frozen = {name: value.detach().clone() for name, value in module.named_parameters() if not value.requires_grad}
    qat.train(module, seen, epochs=4, batch=8, lr=1e-2)
    assert all(torch.equal(module.get_parameter(name), value) for name, value in frozen.items())
    report = qat.export(module, tmp_path / "end.onnx", seen[:1])
    assert not [one for one in report.problems if "differs from that of the module" in one]
    wanted = run(onnx.load(str(path)), unseen)["sentence_embedding"]
    start, end = (
        1.0 - float((run(str(tmp_path / name), unseen)["sentence_embedding"] * wanted).sum(axis=1).mean())
        for name in ("start.onnx", "end.onnx")
    )
    assert end < 0.93 * start  # 0.90 on a CPU with AMX
    assert np.isfinite(end)
