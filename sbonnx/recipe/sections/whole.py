"""Keys of a whole recipe. `Recipe` adds what needs the backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final, Literal

from sbonnx.recipe import names
from sbonnx.recipe.sections import flags
from sbonnx.recipe.sections.base import RecipeKey, Section, key, new_key, rows_of
from sbonnx.recipe.sections.flags import Flag
from sbonnx.recipe.sections.quantizers import Activations, QuantizeInputsOf, ScheduleKeys, SideBits, Weights
from sbonnx.recipe.sections.sparsity import Sparse
from sbonnx.recipe.sections.stages import AutoKeys, Calibration, Equalize, Llm, Mixed, Tune, Verification

if TYPE_CHECKING:
    from sbonnx.recipe import value_types


_NODES = "list of patterns"


class RecipeKeys(Section):
    """Keys of a recipe, with their defaults for onnxruntime."""

    defaults: Annotated[Literal["sbonnx", "sparsebit"], value_types.ANY_CASE] = new_key(
        "sbonnx",
        "defaults of keys that are not set; `sparsebit`: the ancestor's, to reproduce its numbers",
        "sbonnx, sparsebit",
    )
    backend: str = key("onnxruntime", "the runtime that the model is made for", "")
    version: value_types.VersionName | None = new_key(
        None,
        "version of the runtime; also written BACKEND: tensorrt@10",
        "tensorrt: 11, 10, 8.6",
        shown="tensorrt: 11",
        example='"10"',
    )
    device: value_types.Device = key(
        "auto",
        "device that runs the model",
        "auto (cuda if there is one), cpu, cuda, cuda:N",
        flag=Flag("--device cpu|cuda|auto", "Device that runs the model."),
    )
    schedule: ScheduleKeys = ScheduleKeys()
    mode: value_types.ModeName = new_key(
        "static",
        "static: weights and activations, scales from data; dynamic: scales of activations computed as the model runs; "
        "weight_only: weights of MatMul and Gemm, activations stay float",
        "static, dynamic (onnxruntime), weight_only",
        flag=Flag(
            "--mode static|dynamic|weight_only",
            "Scales of activations: from data, computed at run time (onnxruntime), or none; only static needs --data.",
            flags.QUANTIZATION,
            shown="static",
        ),
    )
    format: Annotated[Literal["qdq", "qoperator"], value_types.ANY_CASE] = new_key(
        "qdq",
        "form of the file: float ops between Q/DQ pairs, or integer ops (QLinearConv and its kin)",
        "qdq, qoperator (onnxruntime, static)",
        flag=Flag(
            "--format qdq|qoperator",
            "Float ops between Q/DQ pairs, or integer ops (onnxruntime).",
            flags.QUANTIZATION,
            shown="qdq",
        ),
    )
    accuracy_level: value_types.AccuracyLevel = new_key(
        4,
        "onnxruntime with weight_only: what MatMulNBits computes on; 4: activations rounded to int8 by block, fastest; "
        "auto: 4, but 1 for 4-bit layers in which that rounding costs more than their weights, by the data",
        "0 (its default), 1 (float32), 2 (float16), 3 (bfloat16), 4 (int8), auto",
    )
    min_weight_size: value_types.CountOrNone | None = new_key(
        None,
        "MODE dynamic and weight_only: number of values from which the weight of a MatMul or Gemm is quantized",
        "0 or more",
        shown="weight_only 1024 (virtual: 0), dynamic 16384",
        example="0",
    )
    skip_trace_modules: value_types.Patterns = key(
        (), "nodes that stay float, weights and inputs", _NODES, example='["/head/*"]'
    )
    effort: Annotated[Literal["fast", "default", "best"], value_types.ANY_CASE] = new_key(
        "default",
        "time for accuracy: how weights are rounded by default, with which search, and how many samples it sees",
        "fast (8 bits: nearest), default, best (the whole search, all samples)",
        flag=Flag(
            "--effort fast|default|best",
            "Time for accuracy: fast rounds 8-bit weights to nearest, best searches longest and uses all samples.",
            flags.QUALITY,
            shown="default",
        ),
    )
    w: Weights = Weights()
    a: Activations = Activations()
    include: value_types.Patterns = new_key(
        (),
        "if not empty: only these nodes or tensors are quantized",
        _NODES,
        example='["op:Conv", "op:Gemm"]',
        flag=Flag(
            "--include PATTERN",
            "Quantize only these nodes or tensors (/layer1/*, op:Conv, head, between:A..B); replaces INCLUDE of the "
            "recipe",
            flags.QUANTIZATION,
        ),
    )
    exclude: value_types.Patterns = new_key(
        (),
        "nodes or tensors that stay float, even if included",
        _NODES,
        example='["head", "re:.*/norm[0-9]+/.*", "tensor:logits"]',
        flag=Flag(
            "--exclude PATTERN",
            "Leave these nodes or tensors float (head, after:NODE, tensor:x); replaces EXCLUDE of the recipe",
            flags.QUANTIZATION,
        ),
    )
    first_bits: SideBits = SideBits()
    last_bits: SideBits = SideBits()
    embedding_bits: value_types.Bits | None = new_key(
        None,
        "width of embedding tables, and of the head of a language model: the last linear layer, if it has one output "
        "for each row of a table",
        "0 (float), 2 to 16",
        shown="that of W",
    )
    ranges: Annotated[dict[value_types.TensorPattern, value_types.Interval], value_types.MAPPING] = new_key(
        {}, "ranges fixed by hand, instead of observed ones", "{tensor pattern: [lo, hi]}", example='{"input": [-1, 1]}'
    )
    shared_scales: Annotated[tuple[value_types.TensorGroup, ...], value_types.LIST] = new_key(
        (),
        "groups of tensors that get one common scale and zero point",
        "list of lists of tensor patterns",
        example='[["/a/Conv_output_0", "/b/Conv_output_0"]]',
    )
    own_scales: Annotated[tuple[value_types.TensorPattern, ...], value_types.LIST] = new_key(
        (),
        "tensors that get a scale and zero point of their own where the backend would share one, as around a Concat",
        "list of tensor patterns",
        example='["/a/Conv_output_0"]',
    )
    quantize_inputs_of: QuantizeInputsOf = QuantizeInputsOf()
    quantize_io: Annotated[names.GraphEnds, value_types.ANY_CASE] | None = new_key(
        None,
        "inputs and outputs of the graph that have pairs; an op that reads or writes one without stays float",
        "inputs, none; qnn: both, outputs",
        shown="inputs; qnn: both",
        example="inputs",
    )
    scale_rule: Annotated[Literal["exact", "sparsebit"], value_types.ANY_CASE] = new_key(
        "exact", "conversion of ranges to scales; `sparsebit` gives the ancestor's numbers", "exact, sparsebit"
    )
    weights: Annotated[Literal["codes", "qdq"], value_types.ANY_CASE] = new_key(
        "codes", "weights in the file: integer codes + DQ, or float + Q + DQ", "codes, qdq"
    )
    high_precision: Annotated[Literal["fp32", "fp16", "bf16"], value_types.ANY_CASE] = new_key(
        "fp32",
        "type of what stays float: fp16 and bf16 give a strongly typed graph, in which what would overflow or vanish "
        "on the calibration data stays float32",
        "fp32; tensorrt and virtual: fp16, bf16",
        flag=Flag(
            "--high-precision fp32|fp16|bf16",
            "Type of tensors that are not quantized, strongly typed; not for onnxruntime.",
            flags.QUANTIZATION,
            shown="fp32",
        ),
    )
    keep_io: value_types.Flag = new_key(
        True,
        "inputs and outputs of the model keep their types with HIGH_PRECISION fp16 and bf16",
        "true, false",
        flag=Flag(
            "--no-keep-io",
            "With --high-precision: convert the inputs and outputs of the model too.",
            flags.QUANTIZATION,
        ),
    )
    kernel_costs: value_types.KernelCosts = new_key(
        "bundled",
        "onnxruntime: what its kernels cost, by which an op that would be slower in integers stays float",
        "bundled, none (rules alone), a file that `sbonnx tune --output` wrote",
    )
    float_nodes: value_types.NodeNames | None = new_key(
        None,
        "names of the nodes that compute in float, in place of those that KERNEL_COSTS and HEADS choose; TUNE "
        "writes the list",
        "list of names; []: integers wherever the runtime has kernels; static",
        shown="by KERNEL_COSTS and HEADS",
        example='["/stem/Conv", "/head/Conv"]',
    )
    tensor_overrides: value_types.OptionalFile = new_key(
        None,
        "qnn: types, scales and ranges of single tensors, in the form of onnxruntime's TensorQuantOverrides",
        "a JSON file, none",
        shown="none",
        example="none",
        flag=Flag(
            "--overrides FILE",
            "Types, scales and ranges of single tensors: JSON of onnxruntime's TensorQuantOverrides (qnn).",
            flags.QUANTIZATION,
        ),
    )
    wide_activations: value_types.Share = new_key(
        0.15,
        "qnn: largest share of the 8-bit activations that get 16 bits, and matrix products a scale for each column, "
        "where the outputs would be lost without; 0: none",
        "0 to 1",
    )
    cpu: value_types.Cpu = new_key(
        "this",
        "onnxruntime, openvino: CPU that will run the file; without VNNI or AMX (avx2, avx512), x86 kernels add "
        "two 8-bit products in 16 bits, and weights are kept small enough for that",
        "this (the CPU of this machine, with the kernel costs of `sbonnx tune`, if it was run), avx2, avx512, vnni, "
        "amx, arm64, arm64-dot, a .json file that `sbonnx tune --output` wrote on another machine",
        flag=Flag(
            "--cpu this|avx2|avx512|vnni|amx|arm64|arm64-dot|FILE",
            "CPU that will run the file, or the table of sbonnx tune for it; decides how large 8-bit weights may be.",
            flags.QUANTIZATION,
            shown="this",
        ),
    )
    reduce_range: value_types.Flag | None = new_key(
        None,
        "onnxruntime, openvino: weights of 7 bits for any CPU; false: 8 bits, also where products of CPU saturate",
        "true, false",
        shown="false, with pair-safe weights where 8-bit products of CPU saturate",
    )
    simplify: value_types.Flag = new_key(True, "simplify the graph first", "true, false")
    requantize: value_types.Flag = new_key(
        False,
        "a model that is quantized already is made float again first, instead of refused",
        "true, false",
        flag=Flag("--requantize", "Remove the Q/DQ pairs of an already quantized model first.", flags.QUANTIZATION),
    )
    samples: value_types.Count | None = new_key(
        None,
        "number of feeds (batches, after splitting) of the data that are used at most",
        "1 or more",
        shown="all",
        example="256",
        flag=Flag("--samples N", "Use at most N feeds (batches).", flags.SAMPLING, shown="all"),
    )
    calibration: Calibration = Calibration()
    sparse: Sparse = Sparse()
    equalize: Equalize = Equalize()
    bias_correction: Annotated[Literal["auto", "none", "empirical", "analytic"], value_types.ANY_CASE] = new_key(
        "auto",
        "mean shift of an output by the rounding of weights and inputs, taken off its bias",
        "auto (empirical where a rounding sees inputs, and in static networks with depthwise convolutions, else none), "
        "none, empirical (measured), analytic (from batch norms)",
    )
    heads: Annotated[Literal["auto", "none"], value_types.ANY_CASE] = new_key(
        "auto",
        "all but virtual: regions of detectors (head, its branches, neck, stem), and in other networks the layers "
        "that lose the outputs, stay float where quantizing them costs more at the outputs, measured, than it saves "
        "in time",
        "auto, none",
    )
    llm: Llm = Llm()
    auto: AutoKeys = AutoKeys()
    mixed: Mixed = Mixed()
    tune: Tune = Tune()
    verify: Verification = Verification()


def keys_below(section: type[Section], prefix: str = "") -> Iterator[tuple[str, RecipeKey]]:
    """Yield every key with its path, sections included."""
    for name, row in rows_of(section).items():
        yield prefix + name, row
        if isinstance(row.default, Section):
            yield from keys_below(type(row.default), f"{prefix}{name}.")


KEYS: Final = dict(keys_below(RecipeKeys))
"""Keys by path, sections included."""

SHORT_FORMS: Final = {form: path for path, row in KEYS.items() for form in row.forms.split()}
"""Short forms of key paths, for keywords and flags. ``bits`` is one more: it sets two keys."""

PRUNING_FORMS: Final = {form: path for path, row in KEYS.items() for form in row.prune_forms.split()}
"""Short forms of key paths, for keywords of `sbonnx.prune`; those of `SHORT_FORMS` are accepted too."""

READ_BY_PRUNE: Final = (
    *("SPARSE", "DEFAULTS", "VERSION", "DEVICE", "SAMPLES", "CALIBRATION", "KERNEL_COSTS", "CPU", "REQUANTIZE"),
    "VERIFY.MIN_SQNR_DB",
)
"""Keys, and sections, that `sbonnx.prune` reads."""
