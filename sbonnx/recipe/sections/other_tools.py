"""Names of settings in other tools, and the keyword of `sbonnx.quantize` for each.

Tools: onnxruntime.quantization, optimum, NNCF, Quark, ModelOpt, AIMET and neural-compressor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple


class Counterpart(NamedTuple):
    """Setting of sbonnx for one of another tool.

    Attributes:
        keyword: of `sbonnx.quantize`, or the key of a recipe; "": there is none.
        note: difference in the values, or why there is no setting.
    """

    keyword: str
    note: str = ""


_NODES: Final = "patterns such as 'op:Conv', '/head/*' or a name"
_TYPES: Final = "widths such as w8a8; signs follow from the backend"
_OBSERVERS: Final = "minmax, percentile, kl_histogram (entropy) or mse"
_SCHEMES: Final = "per-channel-symmetric or per-tensor-symmetric"
_FILE: Final = "a path or readers of feeds"
_AUTOMATIC: Final = "part of each run"

COUNTERPARTS: Final = {
    "bits": Counterpart("W.QUANTIZER.BIT", "and A.QUANTIZER.BIT; bits is a keyword and an option"),
    "model_input": Counterpart("model"),
    "onnx_path": Counterpart("model"),
    "float_model": Counterpart("model"),
    "model_output": Counterpart("output"),
    "output_path": Counterpart("output"),
    "save_dir": Counterpart("output"),
    "calibration_data_reader": Counterpart("data", _FILE),
    "calibration_data": Counterpart("data", _FILE),
    "calibration_data_path": Counterpart("data", _FILE),
    "calibration_dataset": Counterpart("data", _FILE),
    "calib_dataloader": Counterpart("data", _FILE),
    "dataset": Counterpart("data", _FILE),
    "nodes_to_exclude": Counterpart("exclude", _NODES),
    "op_types_to_exclude": Counterpart("exclude", "'op:Softmax'"),
    "subgraphs_to_exclude": Counterpart("exclude", "'between:FIRST..LAST'"),
    "ignored_scope": Counterpart("exclude", _NODES),
    "nodes_to_quantize": Counterpart("include", _NODES),
    "nodes_to_include": Counterpart("include", _NODES),
    "op_types_to_quantize": Counterpart("include", "'op:Conv'"),
    "operators_to_quantize": Counterpart("include", "'op:Conv'"),
    "calibrate_method": Counterpart("observer", _OBSERVERS),
    "calibration_method": Counterpart("observer", _OBSERVERS),
    "weight_type": Counterpart("bits", _TYPES),
    "activation_type": Counterpart("bits", _TYPES),
    "weights_dtype": Counterpart("bits", _TYPES),
    "activations_dtype": Counterpart("bits", _TYPES),
    "param_type": Counterpart("bits", _TYPES),
    "quantize_mode": Counterpart("bits", "w8a8, fp8, or w4a0 for weights alone"),
    "default_param_bw": Counterpart("w_bit"),
    "default_activation_bw": Counterpart("a_bit"),
    "per_channel": Counterpart("w_qscheme", _SCHEMES),
    "channel_wised_quantize": Counterpart("w_qscheme", _SCHEMES),
    "is_symmetric": Counterpart("w_qscheme", "per-channel-symmetric or per-channel-affine"),
    "weights_symmetric": Counterpart("w_qscheme", "per-channel-symmetric or per-channel-affine"),
    "use_symmetric_encodings": Counterpart("w_qscheme", "per-channel-symmetric or per-channel-affine"),
    "activations_symmetric": Counterpart("a_qscheme", "per-tensor-symmetric or per-tensor-affine"),
    "use_zero_point": Counterpart("w_qscheme", "per-channel-affine"),
    "quant_scheme": Counterpart("observer", _OBSERVERS),
    "rounding_mode": Counterpart("rounding", "nearest, gptq, adaround or adaquant"),
    "preset": Counterpart("a_qscheme", "per-tensor-symmetric (performance) or per-tensor-affine (mixed)"),
    "quant_format": Counterpart("format", "qdq or qoperator"),
    "is_static": Counterpart("mode", "static or dynamic"),
    "approach": Counterpart("mode", "static or dynamic"),
    "target_device": Counterpart("backend", "and cpu for the CPU that runs the file"),
    "subset_size": Counterpart("samples"),
    "calibration_sampling_size": Counterpart("samples"),
    "group_size": Counterpart("block_size"),
    "calibration_providers": Counterpart("device", "cpu or cuda"),
    "execution_providers": Counterpart("device", "cpu or cuda"),
    "calibration_eps": Counterpart("device", "cpu or cuda"),
    "use_cuda": Counterpart("device", "cuda"),
    "fast_bias_correction": Counterpart("bias_correction", "auto, none, empirical or analytic"),
    "include_cle": Counterpart("cross_layer"),
    "include_sq": Counterpart("smooth_quant"),
    "smooth_quant_alpha": Counterpart("smooth_quant", "a strength from 0 to 1"),
    "include_auto_mp": Counterpart("max_loss", "such as '0.5%'"),
    "include_fast_ft": Counterpart("rounding", "adaround or adaquant"),
    "max_drop": Counterpart("max_loss", "such as '0.5%'"),
    "accuracy_criterion": Counterpart("max_loss", "such as '0.5%'"),
    "validation_dataset": Counterpart("evaluation", "sbonnx.EvaluationData"),
    "validation_fn": Counterpart("evaluation", "sbonnx.EvaluationData"),
    "eval_func": Counterpart("evaluation", "sbonnx.EvaluationData"),
    "eval": Counterpart("evaluation", "sbonnx.EvaluationData(DATA, METRIC)"),
    "eval_data": Counterpart("evaluation", "sbonnx.EvaluationData(DATA, METRIC)"),
    "high_precision_dtype": Counterpart("high_precision", "fp32, fp16 or bf16"),
    "calibration_cache_path": Counterpart("cache"),
    "op_type_dict": Counterpart("recipe", "W.SPECIFIC and A.SPECIFIC with patterns 'op:Conv'"),
    "op_name_dict": Counterpart("recipe", "W.SPECIFIC and A.SPECIFIC"),
    "extra_options": Counterpart("recipe", "docs/migration/onnxruntime.md has each option"),
    "quantization_config": Counterpart("recipe"),
    "config_file": Counterpart("recipe"),
    "user_onnx_libs": Counterpart("ort_libraries"),
    "trt_plugins": Counterpart("ort_libraries"),
    "optimize_model": Counterpart("simplify"),
    "advanced_parameters": Counterpart("recipe"),
    "use_external_data_format": Counterpart("", "large weights are stored beside the model by themselves"),
    "model_type": Counterpart("", "transformers are recognized in the graph"),
    "passes": Counterpart("", _AUTOMATIC),
}
"""Settings of sbonnx by names of other tools."""


VERBS: Final = {
    **dict.fromkeys(("optimize", "optimise", "fuse", "sim", "slim"), "simplify"),
    **dict.fromkeys(("convert", "export", "calibrate", "ptq", "static", "compress"), "quantize"),
    **dict.fromkeys(("check", "validate", "verify"), "compare"),
    **dict.fromkeys(("accuracy", "test", "metric"), "eval"),
    **dict.fromkeys(("debug", "sensitivity", "analyze", "analyse"), "profile"),
    **dict.fromkeys(("perf", "latency", "speed"), "bench"),
    **dict.fromkeys(("show", "visualize", "draw", "netron", "report"), "view"),
    **dict.fromkeys(("info", "summary", "print"), "inspect"),
    **dict.fromkeys(("train", "finetune"), "qat"),
}
"""Commands of sbonnx by words of other tools."""


def counterpart(name: str, setting: Callable[[str], str] = "`{}`".format) -> str:
    """Return a sentence with the setting of sbonnx for one of another tool; "" if there is none.

    Args:
        name: in any case, with "-" or "_".
        setting: text of a keyword; "" if there is none in this place.
    """
    plain = name.strip("-").replace("-", "_").lower()
    if plain not in COUNTERPARTS:
        return ""
    keyword, note = COUNTERPARTS[plain]
    if not keyword:
        return f"{name} is not needed: {note}"
    text = setting(keyword)
    return f"{name} is {text} here{f': {note}' if note else ''}" if text else ""
