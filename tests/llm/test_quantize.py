"""`sbonnx.llm.quantize` and the commands: whole folders, the bytes of `sbonnx quantize`, one line for errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx import llm
from sbonnx.backends.onnxruntime.backend import has_two_bits
from sbonnx.cli import main
from sbonnx.errors import OutputError, RecipeError
from sbonnx.graph.storage.temporary import sweep
from sbonnx.linting import lint
from sbonnx.llm.api import recipe_for
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.folder import staged_folder
from sbonnx.llm.layout import read_decoder
from sbonnx.llm.windows import DecoderFeeds, read_windows
from tests.conftest import PACK
from tests.llm.grouped_decoder import grouped_model, write_grouped_folder
from tests.llm.tiny_decoder import token_windows, write_folder
from tests.support.values import some

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["MIN_WEIGHT_SIZE=0", "CALIBRATION.THREADS=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def slow_kernels(folder: Path) -> list[str]:
    """Slow products that lint names in the written file."""
    (file,) = folder.glob("*.onnx")
    return [one.why for one in lint(file, "onnxruntime") if one.rule == "O34"]


def test_a_folder_for_the_same_program(folder: Path, tmp_path: Path) -> None:
    before, output = contents(folder), tmp_path / "q"
    report = llm.quantize(folder, token_windows(), output=output, overrides=SMALL, latency=False)
    assert report.ok, report.problems
    assert report.output == str(output)
    assert report.counts.weights == 10
    assert contents(folder) == before
    after = contents(output)
    assert after.keys() == {*before, "sbonnx_llm.json"}
    assert all(after[name] == before[name] for name in before if name != "model.onnx")
    assert (output / "notes.bin").stat().st_nlink == 2
    assert (output / "config.json").stat().st_nlink == 1
    assert not slow_kernels(output)
    figures = some(some(report.metrics).llm)
    assert figures.windows == 2
    assert 0 < some(figures.kl) < 0.2
    assert figures.cached_perplexity == pytest.approx(figures.uncached_perplexity, rel=1e-2)
    about = json.loads(after["sbonnx_llm.json"])
    assert about["recipe"]["MODE"] == "weight_only"
    assert about["texts"]["windows"] == [16, 24]
    assert about["evaluation"]["perplexity"] == figures.perplexity
    structure = read_decoder(output).structure
    assert [{weight.label() for weight in block.weights} for block in structure.blocks] == [{"4 bits g32"}] * 2
    assert [len(block.weights) for block in structure.blocks] == [4, 4]
    assert structure.embedding is not None
    assert structure.head is not None
    assert structure.embedding.label() == structure.head.label() == "8 bits g32"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_the_bytes_are_those_of_the_verb_quantize(folder: Path, tmp_path: Path) -> None:
    ids = token_windows()
    llm.quantize(folder, ids, output=tmp_path / "q", bits="w4", block_size=16, overrides=SMALL, latency=False)
    data = tmp_path / "feeds"
    data.mkdir()
    decoder = read_decoder(folder)
    for number, feed in enumerate(DecoderFeeds(decoder, read_windows(decoder, ids).calibration)):
        np.savez(data / f"{number:03}.npz", **feed)  # type: ignore[arg-type]
    arguments = ["quantize", str(folder / "model.onnx"), "--data", str(data), "-o", str(tmp_path / "model.onnx")]
    settings = ["W.QUANTIZER.BIT=4", "W.BLOCK_SIZE=16", "VERIFY.HELD_OUT=0", "ACCURACY_LEVEL=auto", *SMALL]
    flags = [word for text in settings for word in ("--set", text)]
    assert main([*arguments, "--mode", "weight_only", "--no-verify", "--quiet", *flags]) == 0
    assert (tmp_path / "q" / "model.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.slow
def test_texts_round_better_than_none(folder: Path, tmp_path: Path) -> None:
    """Rounded to nearest, the same weights have a larger error."""
    ids = token_windows(64)
    report = llm.quantize(folder, ids, output=tmp_path / "q", overrides=SMALL, latency=False)
    nearest = llm.quantize(folder, output=tmp_path / "n", overrides=SMALL, latency=False)
    assert any("no texts were given" in note for note in nearest.notes)
    assert some(nearest.metrics).llm is None
    held = read_windows(read_decoder(folder), ids).held_out
    plain = llm.evaluate(tmp_path / "n", held, against=folder, latency=False)
    assert plain.kl is not None
    assert some(some(some(report.metrics).llm).kl) < plain.kl


@pytest.mark.slow
@pytest.mark.skipif(not has_two_bits(), reason="onnxruntime has no kernel for 2 bits")
def test_average_bits_give_each_layer_its_width(folder: Path, tmp_path: Path) -> None:
    """Widths that the file holds, within the budget; embedding and head, 8 bits, count."""
    overrides = [*SMALL, "W.ROUNDING.TYPE=nearest", "MIXED.FEEDS=4"]
    output = tmp_path / "q"
    report = llm.quantize(
        folder, token_windows(), output=output, block_size=16, average_bits=4.8, overrides=overrides, latency=False
    )
    assert report.ok, report.problems
    assert report.search is not None
    structure = read_decoder(output).structure
    weights = [weight for block in structure.blocks for weight in block.weights]
    assert {weight.bits for weight in weights} <= {2, 4, 8}
    assert len({weight.bits for weight in weights}) > 1
    every = [*weights, *(each for each in (structure.embedding, structure.head) if each is not None)]
    sizes = [weight.rows * weight.columns for weight in every]
    average = sum(weight.bits * size for weight, size in zip(every, sizes, strict=True)) / sum(sizes)
    assert 4.0 < average <= 4.8
    assert all("blocks of 16" in why for why in slow_kernels(output))
    assert some(some(report.search).mixed).unit == "bits"


def test_a_single_file_becomes_a_folder(folder: Path, tmp_path: Path) -> None:
    single = tmp_path / "alone" / "d.onnx"
    single.parent.mkdir()
    (folder / "model.onnx").rename(single)
    report = llm.quantize(
        single,
        token_windows(),
        output=tmp_path / "q",
        tokenizer=folder / "tokenizer.json",
        overrides=SMALL,
        latency=False,
    )
    assert report.ok
    assert contents(tmp_path / "q").keys() == {"d.onnx", *contents(folder)} - {"model.onnx", "notes.bin"} | {
        "sbonnx_llm.json"
    }


def test_nothing_is_left_of_a_run_that_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sbonnx.llm.decoder_stages.copy_rest", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        llm.quantize(folder, output=tmp_path / "q", overrides=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.folder import staged_folder
from sbonnx.llm.layout import read_decoder
with staged_folder(Path(sys.argv[2]), read_decoder(sys.argv[1]), force=False) as stage:
    (stage / "model.onnx").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    """Its hidden folder is removed by the next run."""
    target = tmp_path / "q"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(target)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 2
    sweep(tmp_path)
    with staged_folder(target, read_decoder(folder), force=False) as stage:
        (stage / "a").write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"]


def test_which_folders_are_replaced(folder: Path, tmp_path: Path) -> None:
    decoder, target = read_decoder(folder), tmp_path / "q"

    def write(text: str, *, force: bool) -> None:
        with staged_folder(target, decoder, force=force) as stage:
            (stage / "sbonnx_llm.json").write_text(text)

    write("one", force=False)
    with pytest.raises(OutputError, match="exists: give --force"):
        write("two", force=False)
    write("two", force=True)
    assert (target / "sbonnx_llm.json").read_text() == "two"
    (target / "sbonnx_llm.json").unlink()
    (target / "mine").write_text("")
    with pytest.raises(OutputError, match="no earlier run wrote it"):
        write("three", force=True)
    for place in (folder, tmp_path):
        with pytest.raises(OutputError, match="is or contains the input"), staged_folder(place, decoder, force=True):
            pass
    assert (target / "mine").exists()


def test_recipes_of_decoders() -> None:
    assert recipe_for({}).w.quantizer.bit == 4
    assert recipe_for({"bits": "w8", "block_size": 64}, {"W": {"QUANTIZER": {"BIT": 2}}}).w.quantizer.bit == 8
    assert recipe_for({}, {"W.QUANTIZER.BIT": 2}).w.quantizer.bit == 2
    assert recipe_for({}, None, {"W.BLOCK_SIZE": 128}).w.block_size == 128
    kinds: tuple[dict[str, Any], ...] = ({"texts": True}, {}, {"texts": True, "overrides": ["W.ROUNDING.TYPE=gptq"]})
    narrow = [recipe_for({"bits": "w2"}, **kind).w for kind in kinds]
    assert [keys.block_size for keys in narrow] == [64, 64, 64]
    assert [keys.rounding.type for keys in narrow] == ["adaquant", "auto", "gptq"]
    assert recipe_for({"backend": "tensorrt@10"}).w.block_size == "none"  # chosen by TensorRT's rules
    with pytest.raises(RecipeError, match="a number such as 4 or w4, got 'w4a8'"):
        recipe_for({"bits": "w4a8"})
    with pytest.raises(RecipeError, match="MODE weight_only, and the recipe has MODE: static"):
        recipe_for({}, {"MODE": "static"})


@pytest.mark.slow
def test_the_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llm", "inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sizes"]["layers"] == 2
    assert facts["cache"]["names"] == "past_key_values.0.key -> present.0.key"
    assert [part["weights"] for part in facts["parts"]] == [2048, 4096, 4096, 2048]
    np.savez(tmp_path / "t.npz", ids=token_windows())
    text = ["--text", str(tmp_path / "t.npz"), "--no-latency"]
    arguments = ["llm", "quantize", str(folder), *text, "-o", str(tmp_path / "q"), "--set", "MIN_WEIGHT_SIZE=0"]
    assert main([*arguments, "--bits", "w4", "--report", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "isolated SQNR, worst layers first" in page and "its weights" in page, "the worst layers with their cause"
    assert "perplexity" in out
    assert f" -> {tmp_path / 'q'} (" in out and len(out.splitlines()) <= 12
    assert "accuracy " in out and f'ORTModelForCausalLM.from_pretrained("{tmp_path / "q"}")' in out
    assert main(["llm", "inspect", str(tmp_path / "q")]) == 0
    assert "4 bits g32" in capsys.readouterr().out
    evaluated = ["llm", "evaluate", str(tmp_path / "q"), "--against", str(folder), *text, "--json"]
    assert main(evaluated) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["windows"] == 16
    assert main([*evaluated, "--min-agreement", "1"]) == 1
    captured = capsys.readouterr()
    assert "VERIFY.MIN_AGREEMENT is 100.00%" in captured.err
    assert json.loads(captured.out)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", "nowhere"], "ModelError: 'nowhere' does not exist"),
        (["quantize", "{m}"], "OutputError: -o is missing"),
        (["evaluate", "{m}"], "DataError: --text is missing"),
        (["evaluate", "{m}", "--text", "nowhere.txt"], "DataError: 'nowhere.txt' cannot be read"),
        (["quantize", "{m}", "-o", "{m}"], "OutputError: '{m}' is or contains the input"),
    ],
)
def test_one_line_and_exit_code_2(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "nowhere.txt" in arguments:
        pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    assert main(["llm", *(word.format(m=folder) for word in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(text.format(m=folder))


def test_help_of_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llm", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in ("inspect", "quantize", "evaluate"))
    assert main(["llm", "quantize", "--help"]) == 0
    assert "--text" in capsys.readouterr().out


def test_blocks_of_int4_for_tensorrt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DequantizeLinear of int4 in blocks of 128, symmetric; evaluated in its form, and without findings of lint."""
    source, output = write_grouped_folder(tmp_path / "m", grouped_model(1)), tmp_path / "q"
    np.savez(tmp_path / "t.npz", ids=token_windows())
    command = ["llm", "quantize", str(source), "--text", str(tmp_path / "t.npz"), "-o", str(output), "--no-latency"]
    sets = [word for text in (*SMALL, "EFFORT=fast") for word in ("--set", text)]
    assert main([*command, "--backend", "tensorrt@10", "--json", *sets]) == 0
    engine = json.loads(capsys.readouterr().out)["engine_command"]
    assert f"--onnx={output / 'model.onnx'} --saveEngine={output / 'model'}." in engine
    model = onnx.load(output / "model.onnx")
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert {kinds[node.input[0]] for node in nodes} == {onnx.TensorProto.INT4}
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert not any(stored[node.input[2]].astype(np.int8).any() for node in nodes)
    (version,) = [each.version for each in model.opset_import if each.domain == ""]
    assert version >= 21
    weights = [weight.label() for weight in read_decoder(output).structure.weights]
    assert weights == ["float32", "4 bits g128", "4 bits g128", "4 bits g128"]
    assert [found for found in lint(output / "model.onnx", "tensorrt@10") if found.severity != "info"] == []


MERGED = PACK / "llm_structures" / "merged_llama"


@pytest.mark.slow
@pytest.mark.skipif(not MERGED.is_dir(), reason=f"no model in {MERGED}")
def test_calibration_of_both_branches(tmp_path: Path) -> None:
    """Windows that decode after a cache select the branch with it; the weights of both are rounded once, with texts."""
    ids = np.random.default_rng(0).integers(2, 300, (16, 24))
    decoder = read_decoder(MERGED)
    selected = [bool(feed["use_cache_branch"][0]) for feed in DecoderFeeds(decoder, ids, decode_share=0.5)]
    assert 2 < sum(selected) < 14
    overrides = [*SMALL, "EFFORT=fast", "LLM.DECODE_SHARE=0.5"]
    report = llm.quantize(MERGED, ids, output=tmp_path / "q", overrides=overrides, latency=False)
    assert report.ok
    assert not [refusal for refusal in report.refusals if refusal.what == "round by inputs"]
    figures = some(some(report.metrics).llm)
    assert figures.cached_perplexity == pytest.approx(figures.uncached_perplexity, rel=1e-3)
    assert some(figures.kl) < 0.01


GPT = PACK / "llm_structures" / "merged_gpt2"


@pytest.mark.slow
@pytest.mark.skipif(not GPT.is_dir(), reason=f"no model in {GPT}")
def test_both_branches_of_a_decoder_with_biases(tmp_path: Path) -> None:
    """Biases that compensate errors of weights are those of prefill and of decoding."""
    ids = np.random.default_rng(0).integers(2, 319, (16, 48))
    report = llm.quantize(GPT, ids, output=tmp_path / "q", overrides=[*SMALL, "EFFORT=fast"], latency=False)
    figures = some(some(report.metrics).llm)
    assert figures.cached_perplexity == pytest.approx(figures.uncached_perplexity, rel=1e-3)


CLASSICS = PACK / "classics_llama"


@pytest.mark.slow
@pytest.mark.skipif(not CLASSICS.is_dir(), reason=f"no model in {CLASSICS}")
def test_gptq_of_a_trained_decoder(tmp_path: Path) -> None:
    """Half the divergence of rounding to nearest (0.0088 on the same tokens), in onnxruntime-genai's form."""
    ids = np.load(CLASSICS / "calib.npz")["ids"][:73].astype(np.int64)
    report = llm.quantize(CLASSICS / "genai", ids, output=tmp_path / "q", overrides=["ACCURACY_LEVEL=0"], latency=False)
    assert report.ok, report.problems
    found = np.load(CLASSICS / "eval.npz")["ids"][:40].astype(np.int64)
    figures = llm.evaluate(tmp_path / "q", found, against=CLASSICS / "genai", latency=False)
    assert figures.kl is not None
    assert some(figures.kl) < 0.006
    config = (tmp_path / "q" / "genai_config.json").read_bytes()
    assert config == (CLASSICS / "genai" / "genai_config.json").read_bytes()
    model = onnx.load(tmp_path / "q" / "model.onnx")
    assert sum(tensor.data_type == onnx.TensorProto.UINT8 for tensor in model.graph.initializer) >= 21


STRUCTURES = PACK / "llm_structures"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ties", "largest"),
    [
        ("genai_llama_fp32", "no", 0.3),
        ("genai_qwen3_tied_fp32", "shared", 0.3),
        ("genai_llama_int4_kmixed", "no", 1.0),
        ("merged_llama", "no", 0.4),
        ("optimum_gpt2", "shared", 0.4),
    ],
)
def test_export_forms(tmp_path: Path, name: str, ties: str, largest: float) -> None:
    """Quantized, evaluated and opened in its form with onnxruntime-genai; a shared table is stored once or twice."""
    if not STRUCTURES.is_dir():
        pytest.skip(f"no models in {STRUCTURES}")
    ids = np.random.default_rng(0).integers(2, 319, (16, 48))
    overrides = [*SMALL, "EFFORT=fast", "REQUANTIZE=true"]
    report = llm.quantize(STRUCTURES / name, ids, output=tmp_path / "q", overrides=overrides, latency=False)
    assert report.ok, report.problems
    figures = some(some(report.metrics).llm)
    assert 0 < some(figures.kl) < 0.01
    before, after = figures.bytes
    assert after < largest * some(before)
    decoder = read_decoder(tmp_path / "q")
    assert decoder.ties == ties
    assert not slow_kernels(tmp_path / "q")
    assert {weight.bits for block in decoder.structure.blocks for weight in block.weights} == {4}
    if figures.genai is not None and figures.genai.installed:
        row = read_windows(decoder, ids).held_out[0]
        assert list(figures.genai.tokens) == DecoderSession(decoder, threads=1).greedy(row[:16], 16)


@pytest.mark.slow
@pytest.mark.skipif(not STRUCTURES.is_dir(), reason=f"no models in {STRUCTURES}")
def test_a_tied_decoder_beside_the_shared_embeddings_of_the_builder(tmp_path: Path) -> None:
    """The builder of onnxruntime-genai has 4 bits in blocks of 32, symmetric. Ours is smaller and nearer to float."""
    source, random = STRUCTURES / "genai_qwen3_tied_fp32", np.random.default_rng(0)
    ids, held_out = random.integers(3, 319, (24, 64)), random.integers(3, 319, (12, 64))
    overrides = ["MIN_WEIGHT_SIZE=0", "EMBEDDING_BITS=4"]
    llm.quantize(source, ids, output=tmp_path / "q", block_size=64, overrides=overrides, latency=False)
    folders = (tmp_path / "q", STRUCTURES / "genai_qwen3_int4_shared")
    ours, theirs = (read_decoder(folder) for folder in folders)
    assert ours.ties == theirs.ties == "shared"
    assert ours.bytes < theirs.bytes
    found = [llm.evaluate(folder, held_out, against=source, latency=False).kl for folder in folders]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] < 0.85 * found[1]
