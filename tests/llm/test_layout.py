"""`read_decoder`: one `Decoder` for every export form, and one line for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.errors import ModelError
from sbonnx.llm.layout import read_decoder
from tests.conftest import PACK
from tests.llm.tiny_decoder import CONTEXT, LAYERS, VOCABULARY, WIDTH, decoder_model, write_folder

STRUCTURES = {
    # folder: format, cache, ties, stored block weights, embedding
    "genai_llama_fp16_cuda": ("genai", "float16", "no", "float16", "float16"),
    "genai_llama_fp32": ("genai", "float32", "no", "float32", "float32"),
    "genai_llama_int4_kmixed": ("genai", "float32", "no", "4 bits g32", "float32"),
    "genai_llama_int4_kv8": ("genai", "int8", "no", "4 bits g32", "float32"),
    "genai_llama_int4_qdq": ("genai", "float16", "no", "4 bits g32", "float16"),
    "genai_qwen3_int4_shared": ("genai", "float32", "shared", "4 bits g32", "4 bits g32"),
    "genai_qwen3_tied_fp32": ("genai", "float32", "shared", "float32", "float32"),
    "merged_gpt2": ("merged", "float32", "stored twice", "float32", "float32"),
    "merged_llama": ("merged", "float32", "no", "float32", "float32"),
    "optimum_gpt2": ("optimum", "float32", "stored twice", "float32", "float32"),
    "optimum_llama": ("optimum", "float32", "no", "float32", "float32"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_export_form(name: str) -> None:
    folder = PACK / "llm_structures" / name
    if not folder.is_dir():
        pytest.skip(f"no model '{name}' on this machine")
    decoder = read_decoder(folder)
    structure = decoder.structure
    assert structure.embedding is not None
    assert structure.head is not None
    stored = {weight.label() for block in structure.blocks for weight in block.weights}
    form = (decoder.format, str(decoder.cache[0].dtype), decoder.ties, *stored, structure.embedding.label())
    assert form == STRUCTURES[name]
    assert (decoder.layers, decoder.hidden, decoder.heads, decoder.head_size) == (2, 64, 4, 16)
    assert (decoder.vocabulary, decoder.context, decoder.eos) == (319, 128, (1,))
    assert [(each.layer, each.kind) for each in decoder.cache] == [
        (0, "key"),
        (0, "value"),
        (1, "key"),
        (1, "value"),
    ]
    assert decoder.kv_heads == (4 if "gpt2" in name else 2)
    assert {each.empty(3).shape for each in decoder.cache} == {(3, decoder.kv_heads, 0, 16)}
    assert [block.layer for block in structure.blocks] == [0, 1]
    hidden, inner = 64, 4 * 64 * 64 if "gpt2" in name else 128 * 64
    attention = 4 * hidden * hidden if "gpt2" in name else 64 * 128 + 64 * 64
    products = 2 if "gpt2" in name else 3
    for block in structure.blocks:
        assert sum(weight.rows * weight.columns for weight in block.weights) == attention + products * inner
    assert (structure.head.rows, structure.head.columns) == (64, 319)
    assert (structure.embedding.rows, structure.embedding.columns) == (319, 64)
    assert structure.one_row == ("genai" in name)
    assert structure.quantized == ("int4" in name)


def test_a_folder_of_optimum(tmp_path: Path) -> None:
    decoder = read_decoder(write_folder(tmp_path / "m"))
    assert (decoder.format, decoder.tokens, decoder.mask, decoder.branch) == ("optimum", "input_ids", None, None)
    assert (decoder.hidden, decoder.head_size, decoder.kv_heads) == (WIDTH, WIDTH, 1)
    assert (decoder.vocabulary, decoder.context) == (VOCABULARY, CONTEXT)
    blocks = decoder.structure.blocks
    assert [block.stream for block in blocks] == ["x0", "x1"]
    assert [weight.node for weight in blocks[1].weights] == ["n_l1_q0", "n_l1_k0", "n_l1_v0", "n_l1_y"]
    assert decoder.structure.head is not None
    assert decoder.structure.head.table == "head"
    assert decoder.ties == "no"


def test_a_shared_table_is_found_through_a_transpose(tmp_path: Path) -> None:
    decoder = read_decoder(write_folder(tmp_path / "m", decoder_model(tied=True)))
    assert decoder.ties == "shared"
    assert decoder.structure.head is not None
    assert (decoder.structure.head.rows, decoder.structure.head.columns) == (WIDTH, VOCABULARY)


def test_a_single_file_with_named_caches(tmp_path: Path) -> None:
    path = tmp_path / "d.onnx"
    onnx.save(decoder_model(names="state_{}_{}"), path)
    with pytest.raises(ModelError, match=r"input 'state_0_key' of .* is neither .* --past 'PATTERN' --present"):
        read_decoder(path)
    decoder = read_decoder(path, past="state_*")
    assert (decoder.format, decoder.folder, decoder.tokenizer) == ("file", None, None)
    assert [each.past for each in decoder.cache] == ["state_0_key", "state_0_value", "state_1_key", "state_1_value"]
    assert [each.present for each in decoder.cache][:2] == ["present.0.key", "present.0.value"]


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    """Rename a tensor everywhere."""
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]


def edited(folder: Path, edit: str) -> Path:
    """Write a folder with one fault."""
    model = decoder_model()
    inputs = model.graph.input
    if edit == "types":
        inputs[3].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    elif edit == "output":
        rename(model, "present.0.key", "elsewhere")
    elif edit == "pair":
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, 0, WIDTH), np.float32), inputs[4].name))
    elif edit == "rank":
        del inputs[1].type.tensor_type.shape.dim[0]
    elif edit == "tokens":
        rename(model, "input_ids", "pixels")
    write_folder(folder, model)
    if edit == "data":
        onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        (folder / "m.data").write_bytes((folder / "m.data").read_bytes()[:5000])
    elif edit == "config":
        (folder / "config.json").unlink()
    elif edit == "json":
        (folder / "config.json").write_text("{")
    elif edit == "pipeline":
        config = {"model": {"decoder": {"filename": "model.onnx", "pipeline": [{}]}}}
        (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            "types",
            r"caches of .* differ: 'past_key_values.0.key' is 1 heads of float32, 'past_key_values.1.key' 1 heads",
        ),
        ("output", r"cache 'past_key_values.0.key' of .* has no output for keys of layer 0"),
        ("pair", r"layer 1 of .* has no value cache"),
        ("rank", r"cache 'past_key_values.0.key' of .* has the shape \[1, None, 32\]; known is"),
        ("tokens", r"has no input of token ids; its inputs: pixels"),
        ("data", r"which has only 5000: the file is cut off"),
        ("config", r"has neither genai_config.json nor config.json"),
        ("json", r"config.json' cannot be read as JSON"),
        ("pipeline", r"is a pipeline of several models"),
    ],
)
def test_faults_are_named_in_one_line(tmp_path: Path, edit: str, text: str) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        read_decoder(edited(tmp_path / "m", edit))
    assert "\n" not in str(caught.value)


def test_a_genai_config_gives_names_and_sizes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", decoder_model(names="cached.{}.{}"))
    inputs = {"input_ids": "input_ids", "past_key_names": "cached.%d.key", "past_value_names": "cached.%d.value"}
    decoder = {"filename": "model.onnx", "inputs": inputs, "num_hidden_layers": LAYERS, "head_size": WIDTH}
    config = {"model": {"decoder": decoder, "eos_token_id": [3, 1], "context_length": 40}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    found = read_decoder(folder)
    assert (found.format, found.context, found.eos, found.cache[0].past) == ("genai", 40, (3, 1), "cached.0.key")
    assert found.cache[0].dtype == np.float32
