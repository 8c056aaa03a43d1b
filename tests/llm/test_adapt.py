"""Adapters on quantized decoders: branches in the file, training, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx import llm, qat  # noqa: E402
from sbonnx.cli import main  # noqa: E402
from sbonnx.cli.create.llm import BATCH, EPOCHS, RATE  # noqa: E402
from sbonnx.errors import ModelError, RecipeError  # noqa: E402
from sbonnx.llm.decoding import DecoderSession, decoder_feed  # noqa: E402
from sbonnx.qat.decoder_adapters import DEFAULTS, branched, write_branches  # noqa: E402
from sbonnx.qat.lora import low_ranks  # noqa: E402
from sbonnx.qat.onnx_to_torch.reimport import META  # noqa: E402
from tests.llm.tiny_decoder import token_windows, write_folder  # noqa: E402

torch.set_num_threads(1)

SMALL = ["MIN_WEIGHT_SIZE=0", "CALIBRATION.THREADS=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small float decoder and its 2-bit folder."""
    place = tmp_path_factory.mktemp("decoders")
    source = write_folder(place / "float")
    llm.quantize(source, token_windows(), output=place / "w2", bits=2, overrides=SMALL, latency=False)
    return source, place / "w2"


def packed_values(path: Path) -> dict[str, Any]:
    model = onnx.load(path)
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.UINT8
    }


def test_the_file_computes_what_the_module_does(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, base = folders
    decoder = llm.read_decoder(base)
    graph = graphs.load(decoder.model)
    module = branched(graph, qat.Adapters(4, mode="outside", alpha=8.0))
    feed = decoder_feed(decoder, token_windows(1))
    names = {source: name for name, source in module.meta[META]["inputs"].items()}

    def logits() -> Any:
        with torch.no_grad():
            return module(**{names[name]: torch.from_numpy(x) for name, x in feed.items()})[decoder.logits].numpy()

    start = logits()
    np.testing.assert_allclose(start, DecoderSession(decoder)(token_windows(1))[0], atol=0.05 * np.abs(start).max())
    with torch.no_grad():
        for adapter in low_ranks(module).values():
            adapter.B.normal_(std=3e-4)
    assert np.abs(logits() - start).max() > 0.1 * np.abs(start).max()
    write_branches(graph, module)
    copy = tmp_path / "model.onnx"
    graphs.save(graph, copy)
    model = onnx.load(copy)
    for node in model.graph.node:  # exact products: level 4 rounds activations to 8 bits
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    onnx.save(model, copy)
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    found = DecoderSession(llm.read_decoder(tmp_path))(token_windows(1))[0]
    np.testing.assert_allclose(found, logits(), atol=1e-4 * np.abs(found).max())


@pytest.mark.parametrize("with_float", [True, False])
def test_training_gains_and_leaves_packed_weights_alone(
    folders: tuple[Path, Path], tmp_path: Path, with_float: bool
) -> None:
    source, base = folders
    settings = qat.Settings(epochs=6, batch=8, lr=0.05)
    ids = np.tile(token_windows(16, 12)[:, :6], (1, 2))  # halves repeat, so that there is something to predict
    found = llm.adapt(
        base, ids, output=tmp_path / "out", against=source if with_float else None, adapters=4, settings=settings,
        latency=False,
    )  # fmt: skip
    assert found.losses[-1] < 0.9 * found.losses[0]
    if with_float:
        assert found.before.kl is not None
        assert found.after.kl is not None
        assert found.after.kl < 0.9 * found.before.kl
    before, after = (packed_values(path / "model.onnx") for path in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    about = json.loads((tmp_path / "out" / "sbonnx_llm.json").read_text())
    assert about["evaluation"]["after"]["perplexity"] == found.after.perplexity
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_command(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, base = folders
    np.savez(tmp_path / "ids.npz", ids=token_windows(16, 12))
    words = [str(base), "--against", str(source), "--text", str(tmp_path / "ids.npz"), "-o", str(tmp_path / "out")]
    more = ["--adapters", "2", "--epochs", "1", "--no-latency", "--json"]
    assert main(["llm", "adapt", *words, *more]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["weights"] == 9
    assert len(values["losses"]) == 1
    assert (EPOCHS.default, BATCH.default, RATE.default) == (DEFAULTS.epochs, DEFAULTS.batch, DEFAULTS.lr)


def test_errors_in_one_line(folders: tuple[Path, Path]) -> None:
    source, base = folders
    graph = graphs.load(base / "model.onnx")
    with pytest.raises(RecipeError, match="use mode 'outside'"):
        branched(graph, qat.Adapters(4))
    with pytest.raises(RecipeError, match=r"rank 40: '.*' has 32 x 32 elements, no more than the two factors"):
        branched(graph, 40)
    with pytest.raises(RecipeError, match="no MatMulNBits with such a name: quantize it with sbonnx llm quantize"):
        branched(graphs.load(source / "model.onnx"), 4)
    with pytest.raises(ModelError, match=r"scales of node .* are float16"):
        branched(_half(base), 4)


def _half(base: Path) -> graphs.Graph:
    model = onnx.load(base / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).clip(-6e4, 6e4).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    del model.graph.value_info[:]
    return graphs.load(model)


@pytest.mark.slow
def test_a_trained_decoder_at_2_bits(pack: Path, tmp_path: Path) -> None:
    """Nearer to float on books that were not trained on, in onnxruntime; onnxruntime-genai opens the folder."""
    source = pack / "classics_llama" / "genai"
    calibration, held_out = (np.load(pack / "classics_llama" / name)["ids"] for name in ("calib.npz", "eval.npz"))
    base = tmp_path / "w2"
    llm.quantize(source, calibration, output=base, bits=2, latency=False)
    llm.adapt(base, calibration, output=tmp_path / "out", against=source, latency=False)
    before, after = (
        llm.evaluate(folder, held_out[:32], against=source, latency=False) for folder in (base, tmp_path / "out")
    )
    assert before.kl is not None
    assert after.kl is not None
    assert after.kl < 0.8 * before.kl
    assert after.perplexity < before.perplexity
    assert after.genai is not None
    assert not after.genai.installed or not after.genai.error
