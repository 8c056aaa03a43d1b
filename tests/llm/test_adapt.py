"""Adapters on quantized decoders: branches in the file, training, errors."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch")

import sbonnx  # noqa: E402
from sbonnx import graph as graphs  # noqa: E402
from sbonnx import llm, qat  # noqa: E402
from sbonnx.cli import main  # noqa: E402
from sbonnx.cli.create.llm import BATCH, EPOCHS, RATE  # noqa: E402
from sbonnx.errors import ModelError, RecipeError  # noqa: E402
from sbonnx.graph.query import all_nodes  # noqa: E402
from sbonnx.llm.adapt import Form, list_inputs, write_adapter  # noqa: E402
from sbonnx.llm.decoding import decoder_feed  # noqa: E402
from sbonnx.present.text.summary import facts_of  # noqa: E402
from sbonnx.qat.decoder_adapters import DEFAULTS, adapted, changed_scales, write_adapters  # noqa: E402
from sbonnx.qat.lora import low_ranks  # noqa: E402
from sbonnx.qat.requantized import requantized_nodes, write_values  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import META  # noqa: E402
from sbonnx.torchnet.ops.decoders import nbits_parts  # noqa: E402
from tests.llm.grouped_decoder import grouped_model  # noqa: E402
from tests.llm.tiny_decoder import decoder_model, merged_model, token_windows, write_folder  # noqa: E402

SMALL = ["MIN_WEIGHT_SIZE=0", "CALIBRATION.THREADS=1", "ACCURACY_LEVEL=0"]

BASES = ("packed", "half", "merged", "qdq")
"""2 bits packed in float32, in float16 and with two branches, and 4 bits as Q/DQ of MatMul and Gemm."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Float folder and quantized folder by base."""
    place = tmp_path_factory.mktemp("decoders")
    floats = {
        "packed": write_folder(place / "float"),
        "half": write_folder(place / "float16", _half(decoder_model())),
        "merged": write_folder(place / "branches", merged_model(decoder_model())),
        "qdq": write_folder(place / "grouped", _with_gemm(grouped_model())),
    }
    (floats["merged"] / "model.onnx").rename(floats["merged"] / "decoder_model_merged.onnx")
    for name, source in floats.items():
        bits, block, more = (4, 64, ["BACKEND=tensorrt"]) if name == "qdq" else (2, 32, [])
        llm.quantize(
            source,
            token_windows() if name == "packed" else None,
            output=place / name,
            bits=bits,
            block_size=block,
            overrides=[*SMALL, *more],
            latency=False,
        )
    return {name: (source, place / name) for name, source in floats.items()}


def _half(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).clip(-6e4, 6e4).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


def _with_gemm(model: onnx.ModelProto) -> onnx.ModelProto:
    """Compute the head by a Gemm on rows of tokens, with alpha and a transposed weight, as in GPT-2."""
    (head,) = [node for node in model.graph.node if list(node.output) == ["logits"]]
    (weight,) = [tensor for tensor in model.graph.initializer if tensor.name == "head"]
    stream = head.input[0]
    turned = np.ascontiguousarray(2 * numpy_helper.to_array(weight).T)
    weight.CopyFrom(numpy_helper.from_array(turned, "head"))
    bias = np.linspace(-0.1, 0.1, len(turned), dtype=np.float32)
    stored = {"rows": np.array([-1, turned.shape[1]]), "columns": np.array([len(turned)]), "head_bias": bias}
    stored["ends"] = np.array([2])
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    model.graph.node.remove(head)
    model.graph.node.extend(
        [
            helper.make_node("Reshape", [stream, "rows"], ["flat"], name="flatten"),
            helper.make_node("Gemm", ["flat", "head", "head_bias"], ["scores"], name="head_Gemm", alpha=0.5, transB=1),
            helper.make_node("Shape", ["input_ids"], ["places"], name="places_Shape"),
            helper.make_node("Concat", ["places", "columns"], ["whole"], name="whole_Concat", axis=0),
            helper.make_node("Reshape", ["scores", "whole"], ["logits"], name="unflatten"),
        ]
    )
    return model


def packed_values(path: Path) -> dict[str, Any]:
    model = onnx.load(path)
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type in (onnx.TensorProto.UINT8, onnx.TensorProto.INT4)
    }


def logits_of_file(path: Path, base: Path, adapter: Path | None = None) -> Any:
    """Logits by onnxruntime alone, without fusions, which compute Q/DQ of weights with 8-bit activations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    run = onnxruntime.RunOptions()
    if adapter is not None:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(str(adapter))
        run.add_active_adapter(loaded)
    decoder = llm.read_decoder(base)
    found = session.run([decoder.logits], decoder_feed(decoder, token_windows(1)), run)[0]
    return np.asarray(found, np.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", BASES)
def test_the_file_computes_what_the_module_does(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, base: str
) -> None:
    """Before and after a change of the adapters, as branches, and as inputs of one model for adapters of any rank."""
    folder = folders[base][1]
    decoder = llm.read_decoder(folder)
    fixed = {} if decoder.branch is None else {decoder.branch: np.array([False])}
    feed = {name: x.astype(np.float32) if x.dtype == np.float16 else x for name, x in decoder_feed(
        decoder, token_windows(1)).items() if name not in fixed}  # fmt: skip
    tolerance = 2e-2 if base == "half" else 1e-4
    models = []
    for rank in (4, 2):
        graph = graphs.load(decoder.model)
        module = adapted(graph, qat.Adapters(rank, mode="outside", alpha=8.0), fixed=fixed)
        names = {source: name for name, source in module.meta[META]["inputs"].items()}

        def logits(module: Any = module, names: Any = names) -> Any:
            with torch.no_grad():
                return module(**{names[name]: torch.from_numpy(x) for name, x in feed.items()})[decoder.logits].numpy()

        start = logits()
        largest = np.abs(start).max()
        np.testing.assert_allclose(start, logits_of_file(decoder.model, folder), atol=tolerance * largest)
        with torch.no_grad():
            for adapter in low_ranks(module).values():
                adapter.B.normal_(std=3e-4)
        changed = logits()
        assert np.abs(changed - start).max() > 0.05 * largest
        copy, path, values = graphs.load(decoder.model), tmp_path / f"{rank}.onnx", tmp_path / f"{rank}.onnx_adapter"
        write_adapters(graph, module)
        graphs.save(graph, path)
        np.testing.assert_allclose(logits_of_file(path, folder), changed, atol=tolerance * largest)
        model = tmp_path / f"{rank}_inputs.onnx"
        factors = write_adapters(copy, module, inputs=True)
        graphs.save(copy, model)
        list_inputs(model, factors)
        write_adapter(values, factors)
        onnx.checker.check_model(str(model))
        alone = logits_of_file(model, folder)  # casts around float16 nodes differ
        slack = tolerance * largest if base == "half" else 0
        np.testing.assert_allclose(alone, logits_of_file(decoder.model, folder), rtol=0, atol=slack)
        np.testing.assert_allclose(logits_of_file(model, folder, values), changed, atol=tolerance * largest)
        models.append(model.read_bytes())
    assert models[0] == models[1]


@pytest.mark.parametrize("base", BASES)
def test_merged_adapters_change_values_and_scales_alone(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, base: str
) -> None:
    folder = folders[base][1]
    decoder = llm.read_decoder(folder)
    fixed = {} if decoder.branch is None else {decoder.branch: np.array([False])}
    graph = graphs.load(decoder.model)
    rank = None if base == "packed" else 4  # the whole weight
    module = adapted(graph, qat.Adapters(rank, mode="inside"), fixed=fixed)
    names = {source: name for name, source in module.meta[META]["inputs"].items()}
    feed = {
        names[name]: torch.from_numpy(x.astype(np.float32) if x.dtype == np.float16 else x)
        for name, x in decoder_feed(decoder, token_windows(1)).items()
        if name not in fixed
    }
    nodes = sum(1 for _ in all_nodes(graph))
    with torch.no_grad():
        start = module(**feed)[decoder.logits].numpy()
        largest = np.abs(start).max()
        tolerance = (2e-2 if base == "half" else 1e-4) * largest
        np.testing.assert_allclose(start, logits_of_file(decoder.model, folder), atol=tolerance)
        for adapter in low_ranks(module).values():
            adapter.B.normal_(std=1e-3)
        for scales in changed_scales(module):
            scales.mul_(1.0625)
        changed = module(**feed)[decoder.logits].numpy()
    assert np.abs(changed - start).max() > 0.05 * largest
    write_adapters(graph, module)
    graphs.save(graph, tmp_path / "model.onnx")
    written = graphs.load(tmp_path / "model.onnx")
    assert sum(1 for _ in all_nodes(written)) == nodes
    before, after = packed_values(decoder.model), packed_values(tmp_path / "model.onnx")
    assert before.keys() == after.keys()
    changes = [name for name in before if not np.array_equal(before[name], after[name])]
    assert len(changes) == len(low_ranks(module))
    np.testing.assert_allclose(logits_of_file(tmp_path / "model.onnx", folder), changed, atol=tolerance)


@pytest.mark.slow
def test_weights_of_2_bits_are_trained_with_effort_best(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearer to float in onnxruntime, with other values in the same nodes; the same run writes the same bytes."""
    source = folders["packed"][0]
    overrides = [*SMALL, "EFFORT=best", "W.ROUNDING.TYPE=nearest"]

    def quantized(name: str) -> Any:
        texts, output = token_windows(16, 12), tmp_path / name
        return llm.quantize(source, texts, output=output, bits=2, block_size=32, overrides=overrides, latency=False)

    reports = [quantized("first"), quantized("second")]
    with monkeypatch.context() as patch:
        patch.setattr(import_module("sbonnx.llm.adapt"), "find_spec", lambda name: None)
        plain = quantized("plain")
    first, second, untrained = ((tmp_path / name / "model.onnx").read_bytes() for name in ("first", "second", "plain"))
    assert first == second
    assert len(first) == len(untrained)
    assert [[note.code for note in report.notes if "trained" in note.code] for report in (*reports, plain)] == [
        ["trained"],
        ["trained"],
        ["not-trained"],
    ]
    assert reports[0].metrics.llm.kl < 0.9 * plain.metrics.llm.kl
    assert [name for name, _ in facts_of(plain)].count("training") == 1, "what was asked for and not done is printed"


def test_updates_without_rank_start_near_float(folders: dict[str, tuple[Path, Path]]) -> None:
    """The quantized values stay; a weight and its update are the float weight, or 0.45 steps on the way to it."""
    source, folder = folders["packed"]
    graph, teacher = (graphs.load(path / "model.onnx") for path in (folder, source))
    module = adapted(graph, qat.Adapters(None, mode="inside"), teacher=teacher)
    assert not any(write_values(graph, module).values())
    initializers = onnx.load(source / "model.onnx").graph.initializer
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in initializers}
    for adapter, _, inputs in requantized_nodes(module):
        weight = torch.from_numpy(stored[adapter.initializer.removesuffix("_quantized_blocks")].T.copy())
        codes, shift, scales = (
            part[:, : weight.shape[1]]
            for part in nbits_parts(adapter.call, *(getattr(module, str(each.target)).detach() for each in inputs))
        )
        steps = (weight / scales - (codes - shift)).clamp(-0.45, 0.45)
        torch.testing.assert_close(adapter.product(weight) / scales, steps, atol=1e-5, rtol=0)


def test_the_table_of_a_tied_decoder_is_not_changed(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "tied", decoder_model(tied=True))
    llm.quantize(source, output=tmp_path / "w4", overrides=SMALL)
    graph = graphs.load(tmp_path / "w4" / "model.onnx")
    assert len(low_ranks(adapted(graph, 2))) == 9
    assert len(low_ranks(adapted(graph, 2, mode="inside"))) == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("base", "with_float", "form"),
    [
        ("packed", False, "inputs"),
        ("packed", True, "merged"),
        ("half", True, "inputs"),
        ("merged", True, "branches"),
        ("qdq", True, "inputs"),
    ],
)
def test_training_gains_and_leaves_quantized_values_alone(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, base: str, with_float: bool, form: Form
) -> None:
    source, quantized = folders[base]
    settings = qat.Settings(epochs=12, batch=7, lr=0.05)
    ids = np.tile(token_windows(7, 12)[:, :6], (1, 2))  # halves repeat, so that there is something to predict
    found = llm.adapt(
        quantized, ids, output=tmp_path / "out", against=source if with_float else None, adapters=4, form=form,
        settings=settings, latency=False,
    )  # fmt: skip
    assert found.losses[-1] < 0.9 * found.losses[0]
    if with_float:
        assert found.before.kl is not None
        assert found.after.kl is not None
        assert found.after.kl < 0.9 * found.before.kl
    name = llm.read_decoder(quantized).model.name
    before, after = (packed_values(path / name) for path in (quantized, tmp_path / "out"))
    assert before
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before) == (form != "merged")
    about = json.loads((tmp_path / "out" / "sbonnx_llm.json").read_text())
    assert about["evaluation"]["after"]["perplexity"] == found.after.perplexity
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    if form == "merged":
        assert found.after.bytes[1] == pytest.approx(found.before.bytes[1], rel=0.01)
    if form != "inputs":
        assert found.adapter is None
        return
    base_figures, again = (
        llm.evaluate(tmp_path / "out", ids, adapter=adapter, latency=False) for adapter in (None, found.adapter)
    )
    assert base_figures.perplexity == pytest.approx(found.before.perplexity, rel=1e-2 if base == "half" else 1e-12)
    assert again.perplexity == found.after.perplexity


def test_the_command(folders: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, base = folders["packed"]
    np.savez(tmp_path / "ids.npz", ids=token_windows(16, 12))
    words = [str(base), "--against", str(source), "--text", str(tmp_path / "ids.npz"), "-o", str(tmp_path / "out")]
    more = ["--adapters", "2", "--epochs", "1", "--no-latency", "--json"]
    assert main(["llm", "adapt", *words, *more]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["weights"] == 9
    assert len(values["losses"]) == 1
    assert (EPOCHS.default, BATCH.default, RATE.default) == (DEFAULTS.epochs, DEFAULTS.batch, DEFAULTS.lr)
    out = tmp_path / "inputs"
    words[-1] = str(out)
    assert main(["llm", "adapt", *words, "--form", "inputs", *more]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["adapter"] == str(out / "adapter.onnx_adapter")
    assert main(["llm", "evaluate", str(out), "--adapter", str(out / "none"), "--text", str(tmp_path / "ids.npz")]) == 2
    assert "there is no adapter" in capsys.readouterr().err
    assert main(["llm", "adapt", *words, "--form", "file", "--force", *more]) == 2
    assert "the form of adapters must be branches, merged or inputs, got 'file'" in capsys.readouterr().err


def test_errors_in_one_line(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source, base = folders["packed"]
    graph = graphs.load(base / "model.onnx")
    with pytest.raises(RecipeError, match=r"form 'branches' need Adapters\(mode='outside'\), got 'inside'"):
        llm.adapt(base, token_windows(), output=tmp_path / "o", adapters=qat.Adapters(4))
    with pytest.raises(RecipeError, match=r"rank 40: '.*' has 32 x 32 elements, no more than the two factors"):
        adapted(graph, 40)
    with pytest.raises(
        RecipeError, match="the decoder has none with such a name: quantize it with sbonnx llm quantize"
    ):
        adapted(graphs.load(source / "model.onnx"), 4)
    with pytest.raises(RecipeError, match=r"whose norms stay as they are: use Adapters\(norms=False\)"):
        llm.adapt(base, token_windows(), output=tmp_path / "o", adapters=qat.Adapters(4, mode="outside"), form="inputs")
    (tmp_path / "wrong.onnx_adapter").write_bytes(b"no adapter")
    with pytest.raises(ModelError, match=r"wrong.onnx_adapter' cannot be read as an adapter of onnxruntime"):
        llm.evaluate(base, token_windows(), adapter=tmp_path / "wrong.onnx_adapter", latency=False)
    sbonnx.quantize(
        source / "model.onnx", {"input_ids": token_windows(2), **_empty_caches(source)}, output=tmp_path / "w8a8.onnx"
    )
    with pytest.raises(ModelError, match=r"node '.*' quantizes activations"):
        adapted(graphs.load(tmp_path / "w8a8.onnx"), 4)


def _empty_caches(folder: Path) -> dict[str, Any]:
    return {each.past: each.empty(2) for each in llm.read_decoder(folder).cache}


@pytest.mark.slow
def test_a_trained_decoder_at_2_bits(pack: Path, tmp_path: Path) -> None:
    """Nearer to float on books that were not trained on, in onnxruntime; onnxruntime-genai opens the folder."""
    source = pack / "classics_llama" / "genai"
    calibration, held_out = (np.load(pack / "classics_llama" / name)["ids"][:24] for name in ("calib.npz", "eval.npz"))
    base = tmp_path / "w2"
    llm.quantize(source, output=base, bits=2, latency=False)
    adapted_folder = llm.adapt(base, calibration, output=tmp_path / "out", against=source, form="inputs", latency=False)
    before, after = (
        llm.evaluate(tmp_path / "out", held_out[:8], against=source, adapter=adapter, latency=False)
        for adapter in (None, adapted_folder.adapter)
    )
    assert before.kl is not None
    assert after.kl is not None
    assert after.kl < 0.9 * before.kl
    assert after.perplexity < before.perplexity
    assert after.genai is not None
    assert not after.genai.installed or not after.genai.error
