"""auto-round on one Llama decoder, weights only: `python -m benchmarks.peers.auto_round_llama JOB`.

JOB is JSON with model, data, output, bits (4), block and method: "asymmetric" or "symmetric", with the number of
iterations of a block if it is not auto-round's default, such as "asymmetric 50". The float file of onnxruntime-genai
becomes a LlamaForCausalLM of transformers, auto-round fits scales and codes on its tokens, and these are written as
MatMulNBits of the same graph. auto-round leaves embedding and head float, so the file does too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.peers import measured

SEED: Final = 0

PARTS: Final = {
    "attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj",),
    "mlp.up_proj": ("mlp.up_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""Modules of transformers whose weights a product of the graph has side by side."""


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Fit the weights of all blocks, and save the graph with their codes and external data."""
    convert(job, samples, fit)


def convert(
    job: measured.Job, samples: measured.Feeds, fit: Callable[[Any, str, list[Any], measured.Job], None]
) -> None:
    """Save the graph with the codes that `fit` finds.

    Args:
        fit: takes the module of transformers, the file of its tokenizer, token ids and the job; gives each layer a
            `scale` and a `zp`, (N, K / block), and rounded weights.
    """
    import onnx

    model = onnx.load(job["model"])
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    folder = Path(job["model"]).parent
    decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    module = llama(weights, decoder)
    fit(module, str(folder / "tokenizer.json"), [sample["input_ids"] for sample in samples], job)
    pack(model, module, job)
    output = Path(job["output"])
    onnx.save(model, output, save_as_external_data=True, location=f"{output.name}.data")


def llama(weights: dict[str, Any], decoder: dict[str, Any]) -> Any:
    """Return the module of transformers with the weights of a file."""
    import torch
    import transformers

    layers, head_size = decoder["num_hidden_layers"], decoder["head_size"]
    table = weights["lm_head.MatMul.weight"]
    cosine, sine = (weights[name][1].astype(np.float64) for name in ("cos_cache", "sin_cache"))
    configuration = transformers.LlamaConfig(
        hidden_size=decoder["hidden_size"],
        intermediate_size=weights["model.layers.0.mlp.gate_proj.MatMul.weight"].shape[1],
        num_hidden_layers=layers,
        num_attention_heads=decoder["num_attention_heads"],
        num_key_value_heads=decoder["num_key_value_heads"],
        head_dim=head_size,
        vocab_size=table.shape[1],
        max_position_embeddings=len(weights["cos_cache"]),
        rms_norm_eps=1e-6,
        rope_theta=float(np.arctan2(sine, cosine)[1] ** (-head_size / 2)),  # the angle of channel 1 at position 1
        tie_word_embeddings=True,
    )
    module = transformers.LlamaForCausalLM(configuration).eval()
    state = {
        "model.embed_tokens.weight": table.T,
        "lm_head.weight": table.T,
        "model.norm.weight": weights[f"model.layers.{layers}.final_norm_layernorm.weight"],
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}.{norm}.weight"] = weights[f"{at}.{norm}.weight"]
        for product, names in PARTS.items():
            rows = weights[f"{at}.{product}.MatMul.weight"].T
            sizes = [module.get_submodule(f"{at}.{name}").out_features for name in names]
            for name, part in zip(names, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
                state[f"{at}.{name}.weight"] = part
    module.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    return module


def fit(module: Any, tokenizer: str, ids: list[Any], job: measured.Job) -> None:
    """Run auto-round on the tokens, in place: layers get `scale` and `zp`, and dequantized weights."""
    import auto_round
    import torch
    import transformers

    method, *iterations = job["method"].split()
    windows = [{"input_ids": torch.from_numpy(np.asarray(each, np.int64))} for each in ids]
    rounder = auto_round.AutoRound(
        module,
        tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer),
        scheme="W4A16",
        bits=job["bits"],
        group_size=job["block"],
        sym=method == "symmetric",
        dataset=windows,
        seqlen=ids[0].shape[-1],
        nsamples=len(windows),
        batch_size=8,
        device_map="cpu",
        enable_torch_compile=False,
        amp=False,  # else it computes in bfloat16
        seed=SEED,
        **({"iters": int(iterations[0])} if iterations else {}),
    )
    rounder.quantize()


def pack(model: Any, module: Any, job: measured.Job) -> None:
    """Replace the products of the fitted layers by MatMulNBits with 4-bit codes. In place."""
    from onnx import helper, numpy_helper

    block = job["block"]
    for node in model.graph.node:
        stem = node.input[1].removesuffix(".MatMul.weight") if node.op_type == "MatMul" else ""
        at, _, product = stem.partition(".attn.") if ".attn." in stem else stem.partition(".mlp.")
        names = PARTS.get(stem.removeprefix(f"{at}."), ()) if product else ()
        if not names:
            continue
        layers = [module.get_submodule(f"{at}.{name}") for name in names]
        weight, scale, zero = (
            np.concatenate([part(layer) for layer in layers]) for part in (_weight, _scale, _zero_point)
        )
        rows, inputs = weight.shape
        grouped = weight.reshape(rows, -1, block)
        codes = np.rint(grouped / scale[..., None] + zero[..., None])
        assert codes.min() >= 0 and codes.max() <= 15, "codes beyond 4 bits"
        far = np.abs((codes - zero[..., None]) * scale[..., None] - grouped) > np.abs(scale[..., None]) / 8
        assert not far.any(), "weights that are no codes"
        packed = codes.astype(np.uint8)
        zeros = np.pad(zero.astype(np.uint8), ((0, 0), (0, zero.shape[1] % 2)))
        arrays = {
            "blocks": packed[..., 0::2] | packed[..., 1::2] << 4,
            "scales": scale.astype(np.float32),
            "zero_points": zeros[:, 0::2] | zeros[:, 1::2] << 4,
        }
        model.graph.initializer.extend(numpy_helper.from_array(each, f"{stem}_{name}") for name, each in arrays.items())
        data, output, name = node.input[0], node.output[0], node.name
        node.CopyFrom(
            helper.make_node(
                "MatMulNBits",
                [data, *(f"{stem}_{each}" for each in arrays)],
                [output],
                name,
                domain="com.microsoft",
                K=inputs,
                N=rows,
                bits=4,
                block_size=block,
            )
        )
    used = {name for node in model.graph.node for name in node.input}
    unused = [one for one in model.graph.initializer if one.name not in used]
    for one in unused:
        model.graph.initializer.remove(one)


def _weight(layer: Any) -> Any:
    return layer.weight.detach().float().numpy()


def _scale(layer: Any) -> Any:
    return np.asarray(layer.scale.float()).reshape(layer.weight.shape[0], -1)


def _zero_point(layer: Any) -> Any:
    """Return one zero point for each scale; symmetric codes have a single integer for all of them."""
    zero = np.asarray(getattr(layer.zp, "float", lambda: layer.zp)(), np.float32)
    shape = _scale(layer).shape
    return zero.reshape(shape) if zero.size > 1 else np.full(shape, zero.item(), np.float32)


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "auto_round", "transformers"))
