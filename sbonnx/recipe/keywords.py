"""Types of the keywords of `sbonnx.quantize`, `sbonnx.prune` and `QuantModel`: recipe keys, for editors.

Written by ``python -m tests.recipe.keyword_source`` from `sbonnx.recipe.sections`. Names are those that come with
sbonnx, in lower case; those of plug-ins go into a recipe: ``recipe={"A": {"OBSERVER": {"TYPE": "mine"}}}``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from sbonnx.recipe.loading import Source

BackendName = Literal[
    "onnxruntime", "openvino", "qnn", "tensorrt", "virtual", "web", "tensorrt@11", "tensorrt@10", "tensorrt@8.6"
]
"""Runtimes, with a version where it matters."""

BackendForm = Literal[BackendName, "ort", "onnx", "cpu", "trt", "ov", "trt@11", "trt@10", "trt@8.6"]
"""Runtimes and their short forms."""


class CommonKeywords(TypedDict, total=False):
    """Keys that pruning reads as well."""

    memory: str | int
    """Memory for activations while calibrating; past it they go to disk.

    Key: CALIBRATION.MEMORY. Values: a size: 2 GiB, 500 MB. Default: 2 GiB.
    """
    granularity: Literal["auto", "whole", "budget", "layer"]
    """Part of the model that runs at a time: all of it, pieces whose outputs fit MEMORY, or single layers over all

    the data.
    Key: CALIBRATION.GRANULARITY. Values: auto (whole where it fits, else budget; layer for ASYM), whole,
    budget, layer. Default: auto.
    """
    threads: int | None
    """Samples that run at a time, on one thread each.

    Key: CALIBRATION.THREADS. Values: 1 or more. Default: one a core.
    """
    cache: str | os.PathLike[str] | None
    """Folder that keeps what was measured, for other settings on the same model and data, and to go on after a stop.

    Key: CALIBRATION.CACHE. Values: a folder, none. Default: none.
    """
    asym: Mapping[str, object] | bool | None
    """CALIBRATION.ASYM: measure on quantized inputs; ``true`` and ``false`` stand for ``{ENABLE: ...}``.

    Keys: ENABLE, RANGES, ROUNDING.
    """
    feedback: Mapping[str, str]
    """Recurrent models: the input that takes each output at the next step; a feed that brings it begins a sequence.

    Key: CALIBRATION.FEEDBACK. Values: {output: input}. Default: none.
    """
    pick: Literal["first", "random"]
    """Feeds that SAMPLES keeps: the first, or some by chance (by SEED and position, the same ones everywhere).

    Key: CALIBRATION.PICK. Values: first, random. Default: first.
    """
    seed: int
    """Seed of random choices.

    Key: CALIBRATION.SEED. Values: 0 or more. Default: 0.
    """
    min_sqnr: float | Mapping[str, float] | None
    """Signal to noise that outputs must reach against float, in decibel; below 3 they always count as lost.

    Key: VERIFY.MIN_SQNR_DB. Values: a number, {output: number}. Default: none.
    """
    defaults: Literal["sbonnx", "sparsebit"]
    """Defaults of keys that are not set; `sparsebit`: the ancestor's, to reproduce its numbers.

    Key: DEFAULTS. Values: sbonnx, sparsebit. Default: sbonnx.
    """
    version: Literal["11", "10", "8.6"] | float | None
    """Version of the runtime; also written BACKEND: tensorrt@10.

    Key: VERSION. Values: tensorrt: 11, 10, 8.6. Default: tensorrt: 11.
    """
    device: str
    """Device that runs the model.

    Key: DEVICE. Values: auto (cuda if there is one), cpu, cuda, cuda:N. Default: auto.
    """
    kernel_costs: str | os.PathLike[str]
    """onnxruntime: what its kernels cost, by which an op that would be slower in integers stays float.

    Key: KERNEL_COSTS. Values: bundled, none (rules alone), a file that `sbonnx tune --output` wrote. Default:
    bundled.
    """
    cpu: str | os.PathLike[str]
    """onnxruntime, openvino: CPU that will run the file; without VNNI or AMX (avx2, avx512), x86 kernels add two

    8-bit products in 16 bits, and weights are kept small enough for that.
    Key: CPU. Values: this (the CPU of this machine, with the kernel costs of `sbonnx tune`, if it was run),
    avx2, avx512, vnni, amx, arm64, arm64-dot, a .json file that `sbonnx tune --output` wrote on another machine.
    Default: this.
    """
    requantize: bool
    """A model that is quantized already is made float again first, instead of refused.

    Key: REQUANTIZE. Values: true, false. Default: false.
    """
    samples: int | None
    """Number of feeds (batches, after splitting) of the data that are used at most.

    Key: SAMPLES. Values: 1 or more. Default: all.
    """
    calibration: Mapping[str, object]
    """CALIBRATION: how ranges and input activations are measured.

    Keys: MEMORY, GRANULARITY, THREADS, CACHE, ASYM, MOMENTS, FEEDBACK, PICK, SEED.
    """
    sparse: Mapping[str, object]
    """SPARSE: removal of channels before quantization; off unless a goal is set.

    Keys: TYPE, STRATEGY, RATIO, SPARSITY, BUDGET, MAX_LOSS, LOSS, MULTIPLE, ROUNDS, LEAST, REFIT, FUSE_BN,
    FINETUNE, SPECIFIC.
    """


class RecipeKeywords(CommonKeywords, total=False):
    """Short forms of keys, and top-level keys."""

    bits: str | int
    """Bit widths of weights and activations, or a type of small floats.

Keys: W.QUANTIZER.BIT, A.QUANTIZER.BIT. Values: w8a8, w4 (weights alone), int8 or 8 (both), fp8 (both), nvfp4,
    mxfp4 or mxfp8 (weights). Default: w8a8.
    """
    fuse_bn: bool
    """Fold batch normalization into the linear layers before quantizing.

    Key: SCHEDULE.FUSE_BN. Values: true, false. Default: true.
    """
    bn_tuning: bool
    """Tune batch normalization with quantization on, then fold it.

    Key: SCHEDULE.BN_TUNING. Values: true, false; true wants W per channel. Default: false.
    """
    w_qscheme: Literal[
        "per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine", "auto"
    ]
    """One scale a channel or a tensor; zero point fixed at 0 or free.

    Key: W.QSCHEME. Values: auto (per-channel-affine below 8 bits, but for quantizers that learn;
    per-tensor-affine where a backend has one scale; else per-channel-symmetric), per-channel-symmetric,
    per-channel-affine, per-tensor-symmetric, per-tensor-affine; virtual: all but auto; tensorrt and openvino:
    per-channel-symmetric, per-tensor-symmetric; qnn: all but per-channel-affine, one scale for Gemm and
    LayerNormalization and MatMul and RMSNormalization. Default: per-channel-symmetric; onnxruntime, qnn and web:
    auto.
    """
    block_size: int | Literal["none"]
    """Number of values along the summed axis of a MatMul or Gemm that share a scale.

    Key: W.BLOCK_SIZE. Values: none, 16, 32, 64, 128, 256; tensorrt: 64, 128 with 4 bits; onnxruntime and
    openvino: with MODE weight_only. Default: none; tensorrt with 4 bits: 128, or 64 where that divides the axis.
    """
    w_quantizer: Literal["uniform", "dorefa", "lsq", "lsq+", "adaround"]
    """Rounding or training of weights.

    Key: W.QUANTIZER.TYPE. Values: uniform, dorefa, lsq, lsq+ (lsq_plus), adaround. Default: uniform.
    """
    w_bit: int
    """Width of a code; 0 leaves the side float.

    Key: W.QUANTIZER.BIT. Values: 0, 2 to 16; onnxruntime, openvino and web: 0, 2 to 8; tensorrt: 0, 4 with
    float inputs, 8; qnn: 0, 8. Default: 8.
    """
    w_observer: Literal["minmax", "mse", "percentile", "kl_histogram", "aciq", "auto"]
    """Choice of the range of a weight.

    Key: W.OBSERVER.TYPE. Values: minmax, mse, percentile, kl_histogram, aciq, auto. Default: minmax.
    """
    rounding: Literal["auto", "nearest", "gptq", "adaround", "adaquant"]
    """Rounding of weights to codes.

    Key: W.ROUNDING.TYPE. Values: auto (gptq where there are data: for convolutions, and for all layers where
    the weight, W or A has fewer than 8 bits; else nearest), nearest, gptq, adaround, adaquant. Default: auto.
    """
    weight_scale: Literal["auto", "observer", "search", "hqq"]
    """Source of the scales of weights: W.OBSERVER, least error of the layer's output, or W.OBSERVER with

    half-quadratic zero points (affine weights only).
    Key: W.ROUNDING.SCALE. Values: auto (search below 8 bits where the rounding looks at inputs, but for
    blocks, else observer), observer, search, hqq. Default: auto.
    """
    a_qscheme: Literal["per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine"]
    """One scale a channel or a tensor; zero point fixed at 0 or free.

    Key: A.QSCHEME. Values: per-tensor-affine, per-tensor-symmetric, per-channel-affine,
    per-channel-symmetric; onnxruntime, openvino, qnn and web: per-tensor-affine, per-tensor-symmetric; tensorrt:
    per-tensor-symmetric. Default: per-tensor-affine; tensorrt: per-tensor-symmetric.
    """
    a_quantizer: Literal["uniform", "dorefa", "lsq", "lsq+", "pact"]
    """Quantization or training of activations.

    Key: A.QUANTIZER.TYPE. Values: uniform, dorefa, lsq, lsq+ (lsq_plus), pact. Default: uniform.
    """
    a_bit: int
    """Width of a code; 0 leaves the side float.

    Key: A.QUANTIZER.BIT. Values: 0, 2 to 16; onnxruntime and web: 0, 2 to 8, 16; tensorrt and openvino: 0, 8;
    qnn: 0, 8, 16. Default: 8.
    """
    a_observer: Literal["minmax", "moving_average", "mse", "percentile", "kl_histogram", "aciq", "auto"]
    """Choice of the range of an activation.

    Key: A.OBSERVER.TYPE. Values: minmax, moving_average, mse, percentile, kl_histogram, aciq, auto. Default:
    mse; virtual: minmax.
    """
    observer: Literal["minmax", "moving_average", "mse", "percentile", "kl_histogram", "aciq", "auto"]
    """Choice of the range of an activation.

    Key: A.OBSERVER.TYPE. Values: minmax, moving_average, mse, percentile, kl_histogram, aciq, auto. Default:
    mse; virtual: minmax.
    """
    cross_layer: bool
    """Equal ranges of channels in neighbouring layers, by scales that cancel (Nagel 2019); for per-tensor weights.

    Key: EQUALIZE.CROSS_LAYER. Values: true, false. Default: false.
    """
    absorb_bias: bool
    """Parts of the inputs of a Relu that are always above 0, and centers of the channels of a LayerNormalization or

    a sum with a constant that only layers read, moved into the biases of those layers (Nagel 2019, Li 2023).
    Key: EQUALIZE.ABSORB_BIAS. Values: true, false; wants data. Default: false.
    """
    smooth_quant: bool | Literal["auto"] | float
    """Ranges of channels moved from inputs of layers into their weights (Xiao 2023); the number is the strength.

    Key: EQUALIZE.SMOOTH_QUANT. Values: auto (0.5 for matrix products of static networks in which one reads a
    normalization, as in transformers), false, true (0.5 for matrix products, 0.3 for convolutions), 0 to 1; wants
    data. Default: auto.
    """
    awq: bool
    """Inputs of matrix products scaled so that the weights of large inputs are rounded less (Lin 2023); with

    weight_only by a Mul where nothing before takes the scale up.
    Key: EQUALIZE.AWQ. Values: true, false; wants data. Default: false.
    """
    window: int | None
    """Tokens of a window that texts are cut into.

    Key: LLM.WINDOW. Values: 2 up to the context of the model. Default: the smaller of 512 and the context of
    the model.
    """
    tokens: int
    """Tokens of the texts that are used at most; every eighth window is held out.

    Key: LLM.TOKENS. Values: 1 or more. Default: 65536.
    """
    average_bits: float | None
    """Bits of a weight, on average.

    Key: MIXED.BUDGET.BITS. Values: above 0. Default: none.
    """
    max_loss: float | str | None
    """Loss that is allowed on samples held out: layers get more bits than W and A have until it is met.

    Key: MIXED.MAX_LOSS. Values: 0 to 1, or in percent: 0.5%. Default: none.
    """
    minimize: Literal["none", "bits"]
    """Within MAX_LOSS, choose the widths with the fewest bit operations, also below those of W and A.

    Key: MIXED.MINIMIZE. Values: none, bits. Default: none.
    """
    held_out: float
    """Share of the samples that is not calibrated on, to verify on; 6 to 64, none of fewer than 32; 0: none, and the

    samples calibrated on are verified on.
    Key: VERIFY.HELD_OUT. Values: 0 to below 1. Default: 0.0625.
    """
    task: (
        Literal["classification", "segmentation", "tokens", "detection", "embedding", "regression"]
        | Mapping[str, Literal["classification", "segmentation", "tokens", "detection", "embedding", "regression"]]
        | None
    )
    """Meaning of outputs, where it cannot be proved from the graph: selects the figures that the verdict without

    labels is based on.
    Key: VERIFY.TASK. Values: classification, segmentation, tokens, detection, embedding, regression; {output:
    task}. Default: by the graph.
    """
    head: str | None
    """Head of a detector without NMS, for the task detection and metrics of boxes; docs/metrics.md lists the heads.

    Key: VERIFY.HEAD. Values: NAME, NAME:KEY=VALUE,.... Default: by the structure of the model.
    """
    min_cosine: float | Mapping[str, float] | None
    """Cosine to the float outputs that outputs must reach.

    Key: VERIFY.MIN_COSINE. Values: -1 to 1, {output: number}. Default: none.
    """
    max_size: float | None
    """Size of the file over that of the float one, at most.

    Key: VERIFY.MAX_SIZE_RATIO. Values: above 0. Default: none.
    """
    max_latency: float | None
    """Time of one run over that of the float model, at most.

    Key: VERIFY.MAX_LATENCY_RATIO. Values: above 0. Default: none.
    """
    min_integer: float | None
    """Share of the planned ops that run in integer kernels on onnxruntime's CPU, at least.

    Key: VERIFY.MIN_INTEGER. Values: 0 to 1. Default: none.
    """
    runtimes: str | Sequence[str]
    """Runtimes in which the file must give the same answer as in onnxruntime at level off, and none may refuse it.

    Key: VERIFY.RUNTIMES. Values: names of sbonnx compare --runtimes, or all. Default: none.
    """
    max_perplexity: float | str | None
    """sbonnx llm: increase of the perplexity against float on held-out text, at most.

    Key: VERIFY.MAX_PERPLEXITY. Values: 0 to 1, or in percent: 1%. Default: none.
    """
    min_agreement: float | None
    """sbonnx llm: share of positions whose most likely token is that of float, at least.

    Key: VERIFY.MIN_AGREEMENT. Values: 0 to 1. Default: none.
    """
    schedule: Mapping[str, object]
    """SCHEDULE: batch-norm folding and tuning, placement of Q/DQ.

    Keys: FUSE_BN, BN_TUNING, DISABLE_UNNECESSARY_QUANT.
    """
    mode: Literal["static", "dynamic", "weight_only"]
    """Static: weights and activations, scales from data; dynamic: scales of activations computed as the model runs;

    weight_only: weights of MatMul and Gemm, activations stay float.
    Key: MODE. Values: static, dynamic (onnxruntime), weight_only. Default: static.
    """
    format: Literal["qdq", "qoperator"]
    """Form of the file: float ops between Q/DQ pairs, or integer ops (QLinearConv and its kin).

    Key: FORMAT. Values: qdq, qoperator (onnxruntime, static). Default: qdq.
    """
    accuracy_level: int | Literal["auto"]
    """onnxruntime with weight_only: what MatMulNBits computes on; 4: activations rounded to int8 by block, fastest;

    auto: 4, but 1 for 4-bit layers in which that rounding costs more than their weights, by the data.
    Key: ACCURACY_LEVEL. Values: 0 (its default), 1 (float32), 2 (float16), 3 (bfloat16), 4 (int8), auto.
    Default: 4; web with weight_only: 1.
    """
    min_weight_size: int | None
    """MODE dynamic and weight_only: number of values from which the weight of a MatMul or Gemm is quantized.

    Key: MIN_WEIGHT_SIZE. Values: 0 or more. Default: weight_only 1024 (virtual: 0), dynamic 16384.
    """
    skip_trace_modules: str | Sequence[str]
    """Nodes that stay float, weights and inputs.

    Key: SKIP_TRACE_MODULES. Values: list of patterns. Default: none.
    """
    effort: Literal["fast", "default", "best"]
    """Time for accuracy: how weights are rounded by default, with which search, and how many samples it sees.

    Key: EFFORT. Values: fast (8 bits: nearest), default, best (the whole search, all samples). Default:
    default.
    """
    w: Mapping[str, object]
    """W: quantization of weights.

    Keys: QSCHEME, BLOCK_SIZE, QUANTIZER, OBSERVER, ROUNDING, SPECIFIC.
    """
    a: Mapping[str, object]
    """A: quantization of activations.

    Keys: QSCHEME, QUANTIZER, OBSERVER, QADD, SPECIFIC.
    """
    include: str | Sequence[str]
    """If not empty: only these nodes or tensors are quantized.

    Key: INCLUDE. Values: list of patterns. Default: none.
    """
    exclude: str | Sequence[str]
    """Nodes or tensors that stay float, even if included.

    Key: EXCLUDE. Values: list of patterns. Default: none.
    """
    first_bits: Mapping[str, object] | int | str
    """FIRST_BITS and LAST_BITS: a bit width for each side, written ``{W: 8, A: 8}``, ``w8a8``, ``w8`` or ``8``.

    Keys: W, A.
    """
    last_bits: Mapping[str, object] | int | str
    """FIRST_BITS and LAST_BITS: a bit width for each side, written ``{W: 8, A: 8}``, ``w8a8``, ``w8`` or ``8``.

    Keys: W, A.
    """
    embedding_bits: int | None
    """Width of embedding tables, and of the head of a language model: the last linear layer, if it has one output

    for each row of a table.
    Key: EMBEDDING_BITS. Values: 0 (float), 2 to 16. Default: that of W; onnxruntime with weight_only and web
    with weight_only: 8.
    """
    ranges: Mapping[str, Sequence[float]]
    """Ranges fixed by hand, instead of observed ones.

    Key: RANGES. Values: {tensor pattern: [lo, hi]}. Default: none.
    """
    shared_scales: Sequence[str | Sequence[str]]
    """Groups of tensors that get one common scale and zero point.

    Key: SHARED_SCALES. Values: list of lists of tensor patterns. Default: none.
    """
    own_scales: Sequence[str]
    """Tensors that get a scale and zero point of their own where the backend would share one, as around a Concat.

    Key: OWN_SCALES. Values: list of tensor patterns. Default: none.
    """
    quantize_inputs_of: Mapping[str, object]
    """QUANTIZE_INPUTS_OF: operators whose inputs are quantized.

    Keys: ADD, CONCAT, POOL, SOFTMAX, NORM, ELEMENTWISE, RESIZE, EMBEDDING, MATMUL.
    """
    quantize_io: Literal["both", "inputs", "outputs", "none"] | None
    """Inputs and outputs of the graph that have pairs; an op that reads or writes one without stays float.

    Key: QUANTIZE_IO. Values: inputs, none; qnn: both, outputs. Default: inputs; qnn: both.
    """
    scale_rule: Literal["exact", "sparsebit"]
    """Conversion of ranges to scales; `sparsebit` gives the ancestor's numbers.

    Key: SCALE_RULE. Values: exact, sparsebit. Default: exact.
    """
    weights: Literal["codes", "qdq"]
    """Weights in the file: integer codes + DQ, or float + Q + DQ.

    Key: WEIGHTS. Values: codes, qdq. Default: codes.
    """
    high_precision: Literal["fp32", "fp16", "bf16"]
    """Type of what stays float: fp16 and bf16 give a strongly typed graph, in which what would overflow or vanish on

    the calibration data stays float32.
    Key: HIGH_PRECISION. Values: fp32; tensorrt and virtual: fp16, bf16. Default: fp32.
    """
    keep_io: bool
    """Inputs and outputs of the model keep their types with HIGH_PRECISION fp16 and bf16.

    Key: KEEP_IO. Values: true, false. Default: true.
    """
    float_nodes: str | Sequence[str] | None
    """Names of the nodes that compute in float, in place of those that KERNEL_COSTS and HEADS choose; TUNE writes

    the list.
    Key: FLOAT_NODES. Values: list of names; []: integers wherever the runtime has kernels; static. Default:
    by KERNEL_COSTS and HEADS.
    """
    tensor_overrides: str | os.PathLike[str] | None
    """qnn: types, scales and ranges of single tensors, in the form of onnxruntime's TensorQuantOverrides.

    Key: TENSOR_OVERRIDES. Values: a JSON file, none. Default: none.
    """
    wide_activations: float
    """qnn: largest share of the 8-bit activations that get 16 bits, and matrix products a scale for each column,

    where the outputs would be lost without; 0: none.
    Key: WIDE_ACTIVATIONS. Values: 0 to 1. Default: 0.15.
    """
    reduce_range: bool | None
    """onnxruntime, openvino: weights of 7 bits for any CPU; false: 8 bits, also where products of CPU saturate.

    Key: REDUCE_RANGE. Values: true, false. Default: false, with pair-safe weights where 8-bit products of CPU
    saturate.
    """
    simplify: bool
    """Simplify the graph first.

    Key: SIMPLIFY. Values: true, false. Default: true.
    """
    equalize: Mapping[str, object]
    """EQUALIZE: cross-layer equalization, SmoothQuant, AWQ.

    Keys: CROSS_LAYER, ABSORB_BIAS, SMOOTH_QUANT, AWQ, CLIP.
    """
    bias_correction: Literal["auto", "none", "empirical", "analytic"]
    """Mean shift of an output by the rounding of weights and inputs, taken off its bias.

    Key: BIAS_CORRECTION. Values: auto (empirical where a rounding sees inputs, and in static networks with
    depthwise convolutions, else none), none, empirical (measured), analytic (from batch norms). Default: auto.
    """
    heads: Literal["auto", "none"]
    """All but virtual: regions of detectors (head, its branches, neck, stem), and in other networks the layers that

    lose the outputs, stay float where quantizing them costs more at the outputs, measured, than it saves in time.
    Key: HEADS. Values: auto, none. Default: auto; qnn: none.
    """
    llm: Mapping[str, object]
    """LLM: calibration text and caches of `sbonnx llm`.

    Keys: WINDOW, TOKENS, DECODE_SHARE, KV_BITS.
    """
    auto: Mapping[str, object] | bool
    """AUTO: recipe search; ``true`` and ``false`` stand for ``{ENABLE: ...}``.

    Keys: ENABLE, HELD_OUT, SAMPLES.
    """
    mixed: Mapping[str, object]
    """MIXED: mixed precision, a bit width for each layer.

    Keys: BUDGET, MAX_LOSS, MINIMIZE, LOSS, WEIGHTS, ACTIVATIONS, SOLVER, FEEDS.
    """
    tune: Mapping[str, object] | Literal["none", "latency"]
    """TUNE: placement of integers by measured times; ``latency`` stands for ``{GOAL: latency}``.

    Keys: GOAL, SECONDS.
    """


class QuantizeKeywords(RecipeKeywords, total=False):
    """Keywords of `sbonnx.quantize` for the recipe."""

    backend: BackendForm | None
    """The runtime that the model is made for."""
    recipe: Source
    """A path, a nested dict, or auto; None: the backend's defaults."""


class PruneKeywords(CommonKeywords, total=False):
    """Keywords of `sbonnx.prune`."""

    backend: BackendForm | None
    """The runtime that the model is made for."""
    type: str
    """Parts that are removed: whole channels, or single weights, which become zero; N:M: at most N of M input

    channels at one kernel tap are not zero, and no other goal is needed.
    Key: SPARSE.TYPE. Values: structured (structed in Sparsebit), unstructured, N:M (TensorRT: 2:4). Default:
    structured.
    """
    pattern: str
    """Parts that are removed: whole channels, or single weights, which become zero; N:M: at most N of M input

    channels at one kernel tap are not zero, and no other goal is needed.
    Key: SPARSE.TYPE. Values: structured (structed in Sparsebit), unstructured, N:M (TensorRT: 2:4). Default:
    structured.
    """
    strategy: Literal["auto", "obs", "output", "l1norm", "l2norm", "random"]
    """Order of removal.

    Key: SPARSE.STRATEGY. Values: auto (obs with data, l1norm without), obs, output, l1norm, l2norm, random.
    Default: auto.
    """
    ratio: float | None
    """Share of the channels to remove from each dimension; unstructured: of the weights of each layer.

    Key: SPARSE.RATIO. Values: 0 to 1. Default: none.
    """
    sparsity: float | None
    """Share of the weights of each layer that become zero; TYPE is unstructured then.

    Key: SPARSE.SPARSITY. Values: between 0 and 1. Default: none.
    """
    macs: float | None
    """Share of the multiplications that may remain.

    Key: SPARSE.BUDGET.MACS. Values: between 0 and 1. Default: none.
    """
    size: float | None
    """Share of the bytes of all constants that may remain.

    Key: SPARSE.BUDGET.SIZE. Values: between 0 and 1. Default: none.
    """
    latency: float | None
    """Share of the time of a sample in float that may remain, by KERNEL_COSTS; onnxruntime.

    Key: SPARSE.BUDGET.LATENCY. Values: between 0 and 1. Default: none.
    """
    max_loss: float | str | None
    """Loss that is allowed on samples held out: as many multiplications are removed as it allows.

    Key: SPARSE.MAX_LOSS. Values: 0 to 1, or in percent: 1%. Default: none.
    """
    loss: Literal["auto", "top1", "relative"]
    """Measure of MAX_LOSS, as MIXED.LOSS.

    Key: SPARSE.LOSS. Values: auto (top1 for one output of classes), top1, relative. Default: auto.
    """
    multiple: int | Literal["auto"] | None
    """Remaining channels of a dimension are a multiple of this, or all of them.

    Key: SPARSE.MULTIPLE. Values: 1 or more, auto (the blocks of the backend's kernels). Default: auto with
    BUDGET.LATENCY, else 1.
    """
    rounds: int
    """With BUDGET: number of measurements, each on the network that the round before left.

    Key: SPARSE.ROUNDS. Values: 1 or more. Default: 1.
    """
    least: float
    """With a budget: share of each dimension that always remains.

    Key: SPARSE.LEAST. Values: 0 to below 1. Default: 0.1.
    """
    refit: Literal["pruned", "none"] | bool
    """Fit the remaining weights on inputs from the pruned network.

    Key: SPARSE.REFIT. Values: pruned (true), none (false). Default: pruned.
    """
    finetune: int
    """Passes over the samples that train the remaining weights (needs torch).

    Key: SPARSE.FINETUNE.EPOCHS. Values: 0 (off) or more. Default: 0.
    """
    lr: float
    """Peak learning rate, relative to the weights of a layer.

    Key: SPARSE.FINETUNE.LR. Values: above 0. Default: 0.5.
    """
    augment: str | Sequence[str]
    """Augmentations of images in training.

    Key: SPARSE.FINETUNE.AUGMENT. Values: auto (flip, shift, mixup if the only input is images), none, or some
    of flip, shift, cutmix, mixup. Default: auto.
    """
    specific: (
        Sequence[Mapping[str, Mapping[str, object] | Sequence[object]]]
        | Mapping[str, Mapping[str, object] | Sequence[object]]
    )
    """Other values for some layers; the first match wins.

    Key: SPARSE.SPECIFIC. Values: list of {node pattern: {RATIO, STRATEGY, SKIP}}. Default: none.
    """
