"""Reimported decoders compute what onnxruntime does, float and with packed weights, and have gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx import llm  # noqa: E402
from sbonnx.llm import read_decoder  # noqa: E402
from sbonnx.llm.decoding import decoder_feed  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import META, reimport  # noqa: E402

STRUCTURES = ("genai_llama_fp32", "genai_llama_int4_kmixed", "genai_qwen3_int4_shared", "genai_qwen3_tied_fp32")


def logits_of(folder: Path, ids: Any, copy: Path) -> tuple[Any, Any, Any]:
    """Module, its logits and those of onnxruntime, for tokens at once, then for one more through the caches."""
    decoder = read_decoder(folder)
    model = onnx.load(decoder.model)
    for node in model.graph.node:  # level 4 rounds activations to 8 bits
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    onnx.save(model, copy)
    module = reimport(graphs.load(copy)).eval()
    names = {source: name for name, source in module.meta[META]["inputs"].items()}
    session = onnxruntime.InferenceSession(str(copy), providers=["CPUExecutionProvider"])
    outputs = [each.name for each in session.get_outputs()]
    cache, found, wanted = None, [], []
    for part in (ids[:, :-1], ids[:, -1:]):
        feed = decoder_feed(decoder, part, cache)
        want = dict(zip(outputs, session.run(outputs, feed), strict=True))
        with torch.no_grad():
            have = module(**{names[name]: torch.from_numpy(value) for name, value in feed.items()})
        assert have.keys() == want.keys()
        found.append(have[decoder.logits].numpy())
        wanted.append(want[decoder.logits])
        cache = {each.past: want[each.present] for each in decoder.cache}
        for each in decoder.cache:
            assert have[each.present].shape == want[each.present].shape
    return module, found, wanted


@pytest.mark.parametrize("name", STRUCTURES)
def test_exported_structures(pack: Path, tmp_path: Path, name: str) -> None:
    ids = np.random.default_rng(3).integers(2, 300, (2, 9))
    module, found, wanted = logits_of(pack / "llm_structures" / name, ids, tmp_path / "copy.onnx")
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4 * np.abs(want).max(), rtol=0)
    packed = [value for value in module.buffers() if value.dtype == torch.uint8]
    assert bool(packed) == ("int4" in name)
    assert all(not name.endswith(("cos_cache", "sin_cache")) for name, _ in module.named_parameters())


def test_a_trained_decoder_and_its_4_bit_file(pack: Path, tmp_path: Path) -> None:
    source = pack / "classics_llama" / "genai"
    ids = np.load(pack / "classics_llama" / "eval.npz")["ids"][:2, :64]
    _, found, wanted = logits_of(source, ids, tmp_path / "float.onnx")
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4 * np.abs(want).max(), rtol=0)
    llm.quantize(source, output=tmp_path / "w4")
    module, found, wanted = logits_of(tmp_path / "w4", ids, tmp_path / "packed.onnx")
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4 * np.abs(want).max(), rtol=0)
    decoder = read_decoder(tmp_path / "w4")
    names = {old: new for new, old in module.meta[META]["inputs"].items()}
    module.requires_grad_(False)
    trained = [value for name, value in module.named_parameters() if "layernorm" in name]
    for value in trained:
        value.requires_grad_(True)
    feed = {names[name]: torch.from_numpy(value) for name, value in decoder_feed(decoder, ids).items()}
    scores = module(**feed)[decoder.logits][:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(scores, torch.from_numpy(ids)[:, 1:].flatten().long()).backward()
    assert len(trained) > 4
    assert all(value.grad is not None and float(value.grad.abs().sum()) > 0 for value in trained)
