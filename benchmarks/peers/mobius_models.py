"""Tiny models of the architectures of mobius-onnx with random weights: `PYTHON mobius_models.py FOLDER [NAME ...]`.

Runs by the Python of an environment that has mobius-onnx (`make peers ARGS=mobius`), and needs nothing of sbonnx. A
name without a folder yet is built: a file for each component of the package, its configuration if it is a decoder, and
`built.json` with the components, or with the reason why there are none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from mobius import build_from_module, registry
from mobius._config_resolver import _default_task_for_model
from mobius._configs import (
    ArchitectureConfig,
    AudioConfig,
    BaseModelConfig,
    CodecDecoderConfig,
    CodecEncoderConfig,
    CodePredictorConfig,
    Gemma4AudioConfig,
    SpeakerEncoderConfig,
    TTSConfig,
    VisionConfig,
)

RECORD: Final = "built.json"
PROVIDER: Final = "cpu"
"""Decoders get GroupQueryAttention, as files for onnxruntime-genai do."""

LARGEST: Final = 200 << 20
"""Bytes of a model above which it is not written."""

HIDDEN, INNER, HEADS, HEAD, LAYERS, VOCABULARY = 64, 128, 4, 16, 2, 256

BASE: Final[Mapping[str, Any]] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "num_hidden_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rope_type": "default",
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "num_mel_bins": 16,
    "max_source_positions": 100,
    "max_target_positions": 50,
    "mamba_n_heads": HEADS,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "num_heads": HEADS,
    "state_size": 8,
    "n_groups": 2,
    "time_step_rank": 4,
    "shared_intermediate_size": 32,
    "altup_num_inputs": 2,
    "laurel_rank": 16,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": HEAD,
    "query_pre_attn_scalar": HEAD,
    "num_detection_tokens": 10,
    "image_height": 32,
    "image_width": 32,
    "segformer_hidden_sizes": [16, 32],
    "segformer_num_attention_heads": [1, 2],
    "segformer_depths": [1, 1],
    "segformer_sr_ratios": [2, 1],
    "segformer_mlp_ratios": [4, 4],
    "segformer_patch_sizes": [3, 3],
    "segformer_strides": [2, 2],
    "decoder_hidden_size": 16,
    "backbone_out_indices": [1, 2],
    "neck_hidden_sizes": [16, 32],
    "reassemble_factors": [2.0, 1.0],
    "fusion_hidden_size": 16,
    "head_hidden_size": 8,
    "sam2_embed_dims": [16, 32, 64, 128],
    "sam2_blocks_per_stage": [1, 1, 2, 1],
    "sam2_num_heads_per_stage": [1, 2, 4, 8],
    "sam2_fpn_hidden_size": 32,
    "attention_hidden_size": 2 * HIDDEN,
    "adapter_rank": 8,
    "target_layer_ids": [0, 1],
    "num_target_layers": LAYERS,
    "block_size": 4,
    "mask_token_id": 1,
    "draft_vocab_size": VOCABULARY,
    "target_hidden_size": HIDDEN,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
    "backbone_hidden_size": HIDDEN,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 2,
    "zero_expert_num": 2,
    "output_hidden_size": HIDDEN,
    "rnnt_pred_hidden": 32,
    "rnnt_joint_hidden": 32,
    "rnnt_num_classes": VOCABULARY,
    "fastconformer_subsampling_conv_channels": 16,
    "fastconformer_pos_emb_max_len": 128,
    "fastconformer_feat_in": 16,
}
"""Sizes, by the name of the field; a class of configuration takes those that it has."""

EXPERTS: Final = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
}
LATENT: Final = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_interleave": True,
}
DEEPSEEK: Final = {**LATENT, **EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "scoring_func": "sigmoid"}
WIDE: Final = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2 * HEAD}
"""Half of a head is rotated: the kernel takes multiples of 16 channels."""
LINEAR: Final = {
    **WIDE,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
SLIDING: Final = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 8,
}
GEMMA4: Final = {**SLIDING, "attn_qk_norm": True, "final_logit_softcapping": 30.0}
LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_scaling": {"short_factor": [1.0] * (HEAD // 2), "long_factor": [1.0] * (HEAD // 2)},
    "original_max_position_embeddings": 128,
}
PLAIN: Final = {"num_key_value_heads": HEADS, "attn_qkv_bias": True, "attn_o_bias": True, "hidden_act": "gelu_new"}
FULL: Final = {**PLAIN, "mlp_bias": True, "partial_rotary_factor": 0.5, **WIDE, "intermediate_size": 4 * HIDDEN}
FOUR_HEADS: Final = {"num_key_value_heads": HEADS}
QWEN_VL: Final = {"mrope_section": [2, 3, 3], "temporal_patch_size": 2}
QWEN3_VL: Final = {**QWEN_VL, "attn_qk_norm": True, "deepstack_visual_indexes": [0], "mrope_interleaved": True}

OF: Final[Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("gpt2", "imagegpt", "opt", "biogpt", "gpt-sw3", "gpt_bigcode", "gpt_neo", "xglm", "ctrl"), PLAIN),
    **dict.fromkeys(("bloom", "persimmon", "codegen", "gpt_neox", "gptj", "phi", "mpt"), FULL),
    **{key: {**PLAIN, "intermediate_size": 4 * HIDDEN} for key in ("openai-gpt", "xlm", "gpt_neox_japanese")},
    **dict.fromkeys(("deepseek_v2", "deepseek_v2_moe", "deepseek_v3", "dots1"), DEEPSEEK),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_vl_text"), LINEAR),
    **{key: {**LINEAR, **EXPERTS, "attn_qk_norm": True} for key in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")},
    **{key: {**SLIDING, "attn_qk_norm": True} for key in ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text")},
    **dict.fromkeys(("gemma4_text", "gemma4"), GEMMA4),
    **{
        key: {
            **GEMMA4,
            "num_kv_shared_layers": LAYERS,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
        for key in (
            "gemma4_assistant",
            "gemma4_unified_assistant",
            "Gemma4AssistantForCausalLM",
            "Gemma4UnifiedAssistantForCausalLM",
        )
    },
    **{key: {**GEMMA4, "hidden_size_per_layer_input": 0} for key in ("gemma4_unified", "gemma4_unified_text")},
    **dict.fromkeys(("phi3", "phimoe", "phi3_v", "phi4mm", "phi4_multimodal"), LONGROPE),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"), QWEN_VL),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_single", "qwen3_vl_text", "qwen3_vl_moe"), QWEN3_VL),
    **{key: {**LINEAR, **QWEN3_VL} for key in ("qwen3_5", "qwen3_5_vl", "qwen3_5_moe_vl")},
    **{key: {"attn_qk_norm": True, "attn_qk_norm_full": True} for key in ("olmo2", "olmo3", "flex_olmo", "olmoe")},
    **{key: {"attn_qk_norm": True} for key in ("qwen3", "qwen3_moe", "qwen3_omni_moe")},
    "deepseek_v4": {
        **DEEPSEEK,
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_hash_layers": 1,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "swiglu_limit": 10.0,
    },
    "longcat_flash": {**LATENT, **EXPERTS, "num_hidden_layers": 2 * LAYERS},
    "youtu": LATENT,
    "falcon": {"parallel_attn": True, "dual_ln": True, "hidden_act": "gelu"},
    "falcon_h1": {**FOUR_HEADS, "alibi": True, "attn_qkv_bias": True, "dual_ln": True},
    "nanochat": {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    "nemotron": {"hidden_act": "relu2"},
    "smollm3": {"no_rope_layers": [1, 0]},
    "modernbert-decoder": FOUR_HEADS,
    "gpt_oss": {**SLIDING, **EXPERTS},
    "minimax": {"layer_types": ["full_attention", "lightning_attention"], **EXPERTS},
    "jamba": {"layer_types": ["mamba", "full_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    "bamba": {"layer_types": ["mamba2", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba2", "full_attention"], **EXPERTS},
    "nemotron_h": {
        "layer_types": ["mamba2", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "hidden_act": "relu2",
        **EXPERTS,
        "mamba_n_heads": 2,
        "mamba_d_head": HEAD,
    },
    "zamba2": {
        "layer_types": ["mamba2", "full_attention", "mamba2"],
        "num_hidden_layers": 3,
        "hybrid_layer_indices": [1],
        **FOUR_HEADS,
        "head_dim": 2 * HEAD,
    },
    "mamba2": {"intermediate_size": HEADS * HEAD},
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "jetmoe": EXPERTS,
    "deepseek_vl_v2": {**EXPERTS, "n_shared_experts": 1},
    "blip-2": {
        "num_query_tokens": 4,
        "qformer_hidden_size": 32,
        "qformer_num_hidden_layers": 1,
        "qformer_num_attention_heads": 2,
        "qformer_intermediate_size": 64,
    },
    "qwen3_asr": {"attn_qk_norm": True, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    "qwen3_forced_aligner": {"attn_qk_norm": True, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    "whisper": FOUR_HEADS,
    "umt5": {"is_gated_act": True},
}
"""Fields of architectures that differ from `BASE`."""

VISION: Final = VisionConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    out_hidden_size=HIDDEN,
    fullatt_block_indexes=[0],
    window_size=4,
    pooling_kernel_size=1,
    position_embedding_size=64,
    mm_tokens_per_image=4,
    num_position_embeddings=16,
)
AUDIO: Final = {
    "attention_dim": HIDDEN,
    "attention_heads": HEADS,
    "num_blocks": 3,
    "linear_units": INNER,
    "kernel_size": 5,
    "input_size": 32,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "num_mel_bins": 128,
    "max_source_positions": 256,
    "downsample_hidden_size": 32,
    "output_dim": HIDDEN,
    "audio_token_id": 100,
    "tp_num_blocks": 2,
    "adaptor_proj_dim": INNER,
    "adaptor_num_blocks": 2,
    "adaptor_ffn_dim": 32,
    "adaptor_num_heads": HEADS,
    "classify_num": 10,
    "conv_channels": 16,
    "t5_bias_max_distance": 50,
    "projection_hidden_size": HIDDEN,
}
SMALL: Final = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
CODEC: Final = {
    "codec_decoder": CodecDecoderConfig(
        **SMALL,
        codebook_dim=32,
        codebook_size=64,
        latent_dim=64,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=128,
        decoder_dim=96,
        num_quantizers=4,
        upsample_rates=[2, 2, 2, 2],
    ),
    "codec_encoder": CodecEncoderConfig(
        **SMALL,
        codebook_dim=16,
        codebook_size=64,
        hidden_size=32,
        intermediate_size=128,
        max_position_embeddings=128,
        num_quantizers=8,
    ),
}
TTS: Final = TTSConfig(
    text_hidden_size=HIDDEN,
    text_vocab_size=VOCABULARY,
    num_code_groups=4,
    code_predictor=CodePredictorConfig(
        **{**SMALL, "head_dim": HEAD}, hidden_size=32, intermediate_size=64, vocab_size=64, num_code_groups=4
    ),
    speaker_encoder=SpeakerEncoderConfig(
        mel_dim=16, enc_dim=32, enc_channels=[16, 16, 16, 16, 48], enc_attention_channels=8, enc_se_channels=8
    ),
)


def config_of(name: str, task: str, module: Any) -> BaseModelConfig:
    """Return a small configuration of an architecture."""
    kind = registry.get_config_class(name) or getattr(module, "config_class", None) or ArchitectureConfig
    values: dict[str, Any] = {**BASE, **(EXPERTS if "moe" in module.__name__.lower() else {}), **OF.get(name, {})}
    if "vision-language" in task or "vl" in task or "multimodal" in task or task.startswith(("gemma4", "hunyuan-vl")):
        values |= {"vision": VISION, "image_token_id": 5, "spatial_merge_size": 2, "mm_tokens_per_image": 4}
    if any(word in task for word in ("speech", "asr", "audio-ctc", "multimodal")):
        values["audio"] = AudioConfig(**AUDIO)
    if task == "gemma4-unified":
        values["audio"] = Gemma4AudioConfig(**AUDIO, num_layers=1, hidden_size=HIDDEN, output_proj_dims=32)
    if task == "codec":
        values |= CODEC
    if task == "tts":
        values["tts"] = TTS
    fields = {field.name for field in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in fields})


def fill(model: ir.Model, seed: int) -> None:
    """Give values to all weights without: matrices with unit gain, scales near 1, offsets near 0."""
    random = np.random.default_rng(seed)
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        shape = [] if value.shape is None else list(value.shape.numpy())
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        if np.dtype(dtype).kind in "iub":
            array = np.zeros(shape, dtype)
        elif len(shape) > 1:
            fan = max(1, int(np.prod(shape[1:])) if len(shape) != 3 else shape[-1])
            array = random.standard_normal(shape, np.float32) * fan**-0.5
        else:
            array = 0.1 * random.standard_normal(shape, np.float32)
            array += float(not name.endswith("bias") and "bias" not in name.rsplit(".", 1)[-1])
        value.const_value = ir.Tensor(array.astype(dtype), name=name)


def decoder_config(names: set[str], config: Any) -> dict[str, Any] | None:
    """Return the configuration of a folder of onnxruntime-genai; None for a model that is no decoder."""
    if not {"input_ids", "logits"} <= names or not any(name.startswith("past_key_values.") for name in names):
        return None
    decoder = {
        "filename": "model.onnx",
        "head_size": getattr(config, "head_dim", HEAD),
        "hidden_size": config.hidden_size,
        "num_attention_heads": getattr(config, "num_attention_heads", HEADS),
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": getattr(config, "num_key_value_heads", HEADS),
        "inputs": {
            "input_ids": "input_ids",
            **({"attention_mask": "attention_mask"} if "attention_mask" in names else {}),
            **({"position_ids": "position_ids"} if "position_ids" in names else {}),
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    sizes = {"vocab_size": VOCABULARY, "context_length": 128, "bos_token_id": 1, "eos_token_id": 2}
    return {"model": {**sizes, "type": "decoder", "decoder": decoder}}


def bytes_of(model: ir.Model) -> int:
    """Return the bytes of the weights by their shapes."""
    values = model.graph.initializers.values()
    return sum(int(np.prod(value.shape.numpy())) * 4 for value in values if value.shape is not None)


def build(name: str, folder: Path) -> dict[str, Any]:
    """Write the models of an architecture; return the record.

    Raises:
        ValueError: a model is larger than `LARGEST`.
    """
    module, task = registry.get(name), _default_task_for_model(name)
    config = config_of(name, task, module)
    package = build_from_module(module(config), config, task, execution_provider=PROVIDER)
    components = {}
    for part, model in package.items():
        if bytes_of(model) > LARGEST:
            raise ValueError(f"'{part}' has {bytes_of(model) >> 20} MiB: its sizes are not those of the configuration")
        place = folder / part
        place.mkdir(parents=True)
        fill(model, 0)
        ir.save(model, place / "model.onnx")
        names = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
        sizes = decoder_config(names, config)
        if sizes is not None:
            (place / "genai_config.json").write_text(json.dumps(sizes))
        digest = hashlib.sha256((place / "model.onnx").read_bytes()).hexdigest()
        components[part] = {"digest": digest, "decoder": sizes is not None}
    return {"module": module.__name__, "task": task, "components": components}


def main() -> int:
    """Build the architectures of the command line, or all."""
    root = Path(sys.argv[1])
    for name in sys.argv[2:] or registry.architectures():
        folder = root / name
        if (folder / RECORD).exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        try:
            record = build(name, folder)
        except Exception as error:  # the package is another's: any of its errors is the row's reason
            trace = traceback.extract_tb(error.__traceback__)[-1]
            record = {"error": f"{type(error).__name__}: {error} ({Path(trace.filename).name}:{trace.lineno})"}
            print(name, record["error"], file=sys.stderr, flush=True)
        (folder / RECORD).write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
