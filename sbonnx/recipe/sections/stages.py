"""EQUALIZE, CALIBRATION, VERIFY, AUTO, MIXED and TUNE: settings of the stages of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, final

from sbonnx.recipe import names
from sbonnx.recipe.problem import Wrong
from sbonnx.recipe.sections import flags
from sbonnx.recipe.sections.base import Section, key, new_key
from sbonnx.recipe.sections.flags import Flag

if TYPE_CHECKING:
    from sbonnx.recipe import value_types


BY_OUTPUT: Final = ("VERIFY.TASK", "VERIFY.MIN_SQNR_DB", "VERIFY.MIN_COSINE")
"""Keys that accept a mapping from outputs to values."""


class Equalize(Section):
    """EQUALIZE: cross-layer equalization, SmoothQuant, AWQ."""

    cross_layer: value_types.Flag = new_key(
        False,
        "equal ranges of channels in neighbouring layers, by scales that cancel (Nagel 2019); for per-tensor weights",
        "true, false",
        forms="cross_layer",
        flag=Flag(
            "--cross-layer",
            "Cross-layer equalization: equal channel ranges in consecutive layers, for per-tensor weights.",
            flags.QUANTIZATION,
        ),
    )
    absorb_bias: value_types.Flag = new_key(
        False,
        "parts of the inputs of a Relu that are always above 0, and centers of the channels of a LayerNormalization or "
        "a sum with a constant that only layers read, moved into the biases of those layers (Nagel 2019, Li 2023)",
        "true, false; wants data",
        forms="absorb_bias",
    )
    smooth_quant: value_types.Strength = new_key(
        "auto",
        "ranges of channels moved from inputs of layers into their weights (Xiao 2023); the number is the strength",
        "auto (0.5 for matrix products of static networks in which one reads a normalization, as in transformers), "
        "false, true (0.5 for matrix products, 0.3 for convolutions), 0 to 1; wants data",
        forms="smooth_quant",
        flag=Flag(
            "--smooth-quant auto|true|false|0-1",
            "SmoothQuant: move channel ranges from layer inputs into weights, with this strength.",
            flags.QUANTIZATION,
            shown="auto",
        ),
    )
    awq: value_types.Flag = new_key(
        False,
        "inputs of matrix products scaled so that the weights of large inputs are rounded less (Lin 2023); "
        "with weight_only by a Mul where nothing before takes the scale up",
        "true, false; wants data",
        forms="awq",
    )
    clip: Annotated[Literal["keep", "channels", "relu"], value_types.ANY_CASE] = new_key(
        "channels",
        "a Clip at a number between two layers, such as ReLU6: it keeps their scales as they are, is given a bound a "
        "channel (Relu and Min), or becomes a Relu, which changes what the model computes",
        "keep, channels, relu",
    )


@final
class Asym(Section):
    """CALIBRATION.ASYM: measure on quantized inputs; ``true`` and ``false`` stand for ``{ENABLE: ...}``."""

    short_form: ClassVar[str] = "ENABLE"

    enable: value_types.Flag | None = new_key(
        None,
        "measure with everything upstream quantized already, layer by layer",
        "true, false",
        shown="true where weights are rounded behind quantized layers anyway",
    )
    ranges: value_types.Flag = new_key(
        True, "with ENABLE: ranges of activations are those after upstream", "true, false"
    )
    rounding: value_types.Flag = new_key(
        True, "with ENABLE: rounding of weights sees inputs after upstream", "true, false"
    )


class MomentsOf(Section):
    """CALIBRATION.MOMENTS: second moments of the input activations, for input-aware weight rounding."""

    short_form: ClassVar[str] = "INPUTS"

    inputs: Annotated[Literal["quantized", "float"], value_types.ANY_CASE] = new_key(
        "quantized",
        "inputs of a layer as they come through the quantized layers before it, or as in the float network (one pass)",
        "quantized, float",
    )
    share: value_types.Share | None = new_key(
        None,
        "with INPUTS: quantized: share of the error of its inputs that the weight of a layer compensates",
        "0 to 1",
        shown="by samples held out, layer by layer",
        example="0.5",
    )
    rows: value_types.CountOrNone = new_key(
        32, "rows of its inputs that a layer sees, for each weight of an output; 0: all there are", "0 or more"
    )
    samples: value_types.CountOrNone | None = new_key(
        None,
        "number of samples that are used at most, chosen by their contents; 0: all",
        "0 or more",
        shown="all below 8 bits, else 32 (by EFFORT)",
        example="128",
    )


@final
class Calibration(Section):
    """CALIBRATION: how ranges and input activations are measured."""

    memory: value_types.Memory = new_key(
        "2 GiB",
        "memory for activations while calibrating; past it they go to disk",
        "a size: 2 GiB, 500 MB",
        forms="memory",
        flag=Flag(
            "--memory SIZE",
            "Memory limit of activations; the rest is written to disk.",
            flags.CALIBRATION,
            shown="2 GiB",
        ),
    )
    granularity: Annotated[Literal["auto", "whole", "budget", "layer"], value_types.ANY_CASE] = new_key(
        "auto",
        "part of the model that runs at a time: all of it, pieces whose outputs fit MEMORY, or single layers over all "
        "the data",
        "auto (whole where it fits, else budget; layer for ASYM), whole, budget, layer",
        forms="granularity",
        flag=Flag(
            "--granularity auto|whole|budget|layer",
            "How much of the model runs at a time.",
            flags.CALIBRATION,
            shown="auto",
        ),
    )
    threads: value_types.Count | None = new_key(
        None,
        "samples that run at a time, on one thread each",
        "1 or more",
        shown="one a core",
        forms="threads",
        example="4",
    )
    cache: value_types.Folder = new_key(
        None,
        "folder that keeps what was measured, for other settings on the same model and data, and to go on after a stop",
        "a folder, none",
        shown="none",
        forms="cache",
        example="calibration-cache",
        flag=Flag(
            "--cache FOLDER",
            "Cache of calibration statistics: for runs with other settings, and to resume interrupted runs.",
            flags.CALIBRATION,
            shown="none",
        ),
    )
    asym: Asym = key(
        Asym(),
        "",
        "",
        forms="asym",
        flag=Flag(
            "--asym", "Measure each layer with quantized inputs: everything before it is quantized.", flags.CALIBRATION
        ),
    )
    moments: MomentsOf = MomentsOf()
    feedback: value_types.Feedback = new_key(
        {},
        "recurrent models: the input that takes each output at the next step; a feed that brings it begins a sequence",
        "{output: input}",
        forms="feedback",
        example="{state_out: state_in}",
        flag=Flag(
            "--feedback OUT=IN",
            "Recurrent models: input IN takes the value of output OUT of the previous step",
            flags.SAMPLING,
        ),
    )
    pick: Annotated[Literal["first", "random"], value_types.ANY_CASE] = new_key(
        "first",
        "feeds that SAMPLES keeps: the first, or some by chance (by SEED and position, the same ones everywhere)",
        "first, random",
        forms="pick",
    )
    seed: value_types.Seed = new_key(0, "seed of random choices", "0 or more", forms="seed")


@final
class Verification(Section):
    """VERIFY: comparison with the float model, and limits that the result must meet."""

    feeds: value_types.Count = new_key(
        64, "number of feeds of the data on which the result is compared with float", "1 or more"
    )
    held_out: value_types.Ratio = new_key(
        0.0625,
        "share of the samples that is not calibrated on, to verify on; 6 to 64, none of fewer than 32; 0: none, "
        "and the samples calibrated on are verified on",
        "0 to below 1",
        forms="held_out",
    )
    latency: value_types.Flag = new_key(True, "time both models side by side", "true, false")
    task: value_types.TaskByOutput | None = new_key(
        None,
        "meaning of outputs, where it cannot be proved from the graph: selects the figures that the verdict without "
        "labels is based on",
        f"{', '.join(names.OUTPUT_TASKS)}; {{output: task}}",
        shown="by the graph",
        forms="task",
        example="segmentation",
        flag=Flag(
            "--task TASK|OUTPUT=TASK",
            "What outputs mean, if the graph does not prove it: classification, segmentation, tokens, detection "
            "(after NMS), embedding or regression; selects the figures that decide without labels",
            flags.QUALITY,
            shown="none",
        ),
    )
    head: value_types.Text | None = new_key(
        None,
        "head of a detector without NMS, for the task detection and metrics of boxes; docs/metrics.md lists the heads",
        "NAME, NAME:KEY=VALUE,...",
        shown="by the structure of the model",
        forms="head",
        example="yolov8",
        flag=Flag(
            "--head NAME[:KEY=VALUE,...]",
            "Head of a detector, for map and --task detection: yolov5, yolov7, yolov8, yolox, end2end, end2end7, "
            "paddle, nms, indices, ssd, detr, rtdetr, fastestdet, picodet, nanodet, fcos, fcosrows, "
            "retinanet, rtmdet, scrfd, yunet, centerface",
            flags.EVALUATION,
            shown="by the structure of the model",
        ),
    )
    min_sqnr_db: value_types.DecibelByOutput | None = new_key(
        None,
        "signal to noise that outputs must reach against float, in decibel; below 3 they always count as lost",
        "a number, {output: number}",
        shown="none",
        forms="min_sqnr",
        example="20",
        flag=Flag(
            "--min-sqnr DB",
            "Exit 1 if the SQNR of an output is lower; with --recipe auto, layers get more bits first.",
            flags.QUALITY,
        ),
    )
    min_cosine: value_types.CosineByOutput | None = new_key(
        None,
        "cosine to the float outputs that outputs must reach",
        "-1 to 1, {output: number}",
        shown="none",
        forms="min_cosine",
        example="0.99",
        flag=Flag("--min-cosine C", "Exit 1 if the cosine similarity of an output is lower.", flags.QUALITY),
    )
    levels_db: value_types.Decibel | None = new_key(
        None,
        "signal to noise of the outputs at each optimisation level of onnxruntime against those without any",
        "a number",
        shown="20, where it also changes the distance from float by more than 3",
        example="20",
    )
    max_size_ratio: value_types.AboveZero | None = new_key(
        None,
        "size of the file over that of the float one, at most",
        "above 0",
        shown="none",
        forms="max_size",
        example="0.3",
        flag=Flag("--max-size RATIO", "Exit 1 if the file is larger, relative to float.", flags.QUALITY),
    )
    max_latency_ratio: value_types.AboveZero | None = new_key(
        None,
        "time of one run over that of the float model, at most",
        "above 0",
        shown="none",
        forms="max_latency",
        example="1.0",
        flag=Flag("--max-latency RATIO", "Exit 1 if the latency is higher, relative to float.", flags.QUALITY),
    )
    min_integer: value_types.Share | None = new_key(
        None,
        "share of the planned ops that run in integer kernels on onnxruntime's CPU, at least",
        "0 to 1",
        shown="none",
        forms="min_integer",
        example="1.0",
        flag=Flag("--min-integer SHARE", "Exit 1 if fewer of the planned ops run in integer kernels.", flags.QUALITY),
    )

    runtimes: value_types.Names = new_key(
        (),
        "runtimes in which the file must give the same answer as in onnxruntime at level off, and none may refuse it",
        "names of sbonnx compare --runtimes, or all",
        shown="none",
        forms="runtimes",
        example="[onnxruntime, wasm]",
    )
    max_perplexity: value_types.Percentage | None = new_key(
        None,
        "sbonnx llm: increase of the perplexity against float on held-out text, at most",
        "0 to 1, or in percent: 1%",
        shown="none",
        forms="max_perplexity",
        example="1%",
        flag=Flag(
            "--max-perplexity SHARE",
            "Exit 1 if the perplexity is higher than float by more, such as 1%.",
            flags.QUALITY,
        ),
    )
    min_agreement: value_types.Share | None = new_key(
        None,
        "sbonnx llm: share of positions whose most likely token is that of float, at least",
        "0 to 1",
        shown="none",
        forms="min_agreement",
        example="0.95",
        flag=Flag(
            "--min-agreement SHARE", "Exit 1 if fewer of the most likely tokens are those of float.", flags.QUALITY
        ),
    )

    def problems(self) -> Iterator[Wrong]:
        """Yield the limits that cannot be checked."""
        if self.max_latency_ratio is not None and not self.latency:
            text = "cannot be judged when VERIFY.LATENCY is false: drop one of them"
            yield Wrong(text, path=("VERIFY", "MAX_LATENCY_RATIO"), value=self.max_latency_ratio)


@final
class Llm(Section):
    """LLM: calibration text and caches of `sbonnx llm`."""

    window: value_types.Count | None = new_key(
        None,
        "tokens of a window that texts are cut into",
        "2 up to the context of the model",
        shown="the smaller of 512 and the context of the model",
        forms="window",
        example="512",
        flag=Flag("--window N", "Tokens of a window; default: at most 512.", flags.TEXTS),
    )
    tokens: value_types.Count = new_key(
        65536,
        "tokens of the texts that are used at most; every eighth window is held out",
        "1 or more",
        forms="tokens",
        flag=Flag("--tokens N", "Tokens of the texts that are used; default 65536.", flags.TEXTS),
    )
    decode_share: value_types.Share = new_key(
        0.0,
        "share of the windows that is fed as one token with the caches of the tokens before it, as in generation; "
        "weights alone do not need it",
        "0 to 1",
    )
    kv_bits: value_types.CacheBits | None = new_key(
        None,
        "bits of key/value caches, which onnxruntime's GroupQueryAttention stores with a scale a channel, measured on "
        "the texts",
        "8, 4",
        shown="none: as they are",
        example="8",
    )


@final
class AutoKeys(Section):
    """AUTO: recipe search; ``true`` and ``false`` stand for ``{ENABLE: ...}``."""

    short_form: ClassVar[str] = "ENABLE"

    enable: value_types.Flag = new_key(
        False,
        "try what may help at these widths, one thing after another, and keep what does on samples held out",
        "true, false",
        shown="false; true with --recipe auto",
    )
    held_out: value_types.Ratio = new_key(
        0.25,
        "share of the feeds that is held out to judge trials by; the last run calibrates on it too",
        "0 to below 1",
    )
    samples: value_types.Count = new_key(128, "feeds that trials calibrate on at most", "1 or more")


@final
class Tune(Section):
    """TUNE: placement of integers by measured times; ``latency`` stands for ``{GOAL: latency}``."""

    short_form: ClassVar[str] = "GOAL"

    goal: Annotated[Literal["none", "latency"], value_types.ANY_CASE] = new_key(
        "none",
        "try other placements of integers in the runtime, and keep those that are measured to be faster",
        "none, latency (onnxruntime, openvino)",
        flag=Flag(
            "--tune latency",
            "Measure other placements of integers on this machine, and keep those that are faster.",
            flags.QUANTIZATION,
            shown="none",
        ),
    )
    seconds: value_types.AboveZero = new_key(
        60.0,
        "time in seconds after which no further trial begins",
        "above 0",
        flag=Flag("--tune-time SECONDS", "Time for trials of --tune; default 60.", flags.QUANTIZATION),
    )

    @property
    def wanted(self) -> bool:
        """Whether placements are to be measured."""
        return self.goal != "none"


@final
class Budget(Section):
    """MIXED.BUDGET: limit of size or cost for mixed precision."""

    bits: value_types.AboveZero | None = new_key(
        None,
        "bits of a weight, on average",
        "above 0",
        shown="none",
        forms="average_bits",
        example="4",
        flag=Flag("--average-bits N", "Choose the weight width of each layer, N bits on average.", flags.QUANTIZATION),
    )
    size: value_types.AboveZero | None = new_key(
        None, "bytes of all constants over those of the float model", "above 0", shown="none", example="0.2"
    )
    bit_operations: value_types.AboveZero | None = new_key(
        None,
        "multiplications times the bits of both factors, over those of w8a8",
        "above 0",
        shown="none",
        example="0.5",
    )
    latency: value_types.AboveZero | None = new_key(
        None,
        "time of the ops with weights over that in float, by KERNEL_COSTS; onnxruntime",
        "above 0",
        shown="none",
        example="0.6",
    )


@final
class Mixed(Section):
    """MIXED: mixed precision, a bit width for each layer."""

    budget: Budget = Budget()
    max_loss: value_types.Percentage | None = new_key(
        None,
        "loss that is allowed on samples held out: layers get more bits than W and A have until it is met",
        "0 to 1, or in percent: 0.5%",
        shown="none",
        forms="max_loss",
        example="0.5%",
        flag=Flag(
            "--max-loss SHARE",
            "Maximum loss on held-out samples, such as 0.5%; layers get more bits than --bits until it is met.",
            flags.QUALITY,
        ),
    )
    minimize: Annotated[Literal["none", "bits"], value_types.ANY_CASE] = new_key(
        "none",
        "within MAX_LOSS, choose the widths with the fewest bit operations, also below those of W and A",
        "none, bits",
        forms="minimize",
        flag=Flag(
            "--minimize bits",
            "Within --max-loss, choose the fewest bits for each layer, also below --bits.",
            flags.QUANTIZATION,
        ),
    )
    loss: Annotated[Literal["auto", "top1", "relative"], value_types.ANY_CASE] = new_key(
        "auto",
        "measure of MAX_LOSS: samples whose largest class is another than in float, or the norm of the error of the "
        "outputs over that of the outputs",
        "auto (top1 for one output of classes), top1, relative",
    )
    weights: value_types.Widths = new_key(
        (),
        "widths of weights to choose from",
        "list of 2 to 16 and float",
        shown="2, 3, 4, 8 and that of W; onnxruntime with weight_only: without 3",
        example="[2, 4, 8]",
    )
    activations: value_types.Widths = new_key(
        (),
        "widths of activations to choose from",
        "list of 2 to 16 and float",
        shown="that of A",
        example="[8, 16, float]",
    )
    solver: Annotated[Literal["exact", "greedy"], value_types.ANY_CASE] = new_key(
        "exact",
        "choice of the widths: the best of all choices by the losses measured, or step by step",
        "exact, greedy",
    )
    feeds: value_types.Count = new_key(
        32, "feeds that the loss of each layer at each width is measured on", "1 or more"
    )

    @property
    def wanted(self) -> bool:
        """Whether bit widths are to be chosen for each layer."""
        return self.max_loss is not None or self.minimize != "none" or self.budget != Budget()

    @property
    def contradiction(self) -> str | None:
        """Error text if more than one goal is set, or MINIMIZE without its limit, else None."""
        given = [f"BUDGET.{name}" for name in self.budget.to_keys(empty=False)]
        given += [] if self.max_loss is None else ["MAX_LOSS"]
        if self.minimize != "none" and self.max_loss is None:
            return (
                f"MIXED.MINIMIZE: {self.minimize} chooses the fewest bits within a loss: set MIXED.MAX_LOSS "
                "(--max-loss 0.5%) as well"
            )
        if len(given) < 2:
            return None
        return f"MIXED has {len(given)} goals, {', '.join(given)}: widths are chosen for one of them. Drop the others"
