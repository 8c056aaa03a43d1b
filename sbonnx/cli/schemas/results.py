"""JSON outputs of the commands that create files: quantization, pruning, batches."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from sbonnx.batch.jobs.job import JobResult, Outcome
from sbonnx.cli.schemas.llm import LlmEvaluateOutput
from sbonnx.pruning.fine_tuning import FineTuneRow
from sbonnx.pruning.prune import PrunedDimension
from sbonnx.pruning.sparsity.stage import SparseLayer
from sbonnx.pruning.two_streams import LayerRefit
from sbonnx.report import Fired, LayerError, QuantizedTensor, Refusal
from sbonnx.report.figures import Evaluation, FloatOp, LevelDifference, OutputDifference, OutputQuality
from sbonnx.report.verdict import Accuracy


class Nothing(TypedDict):
    """An object without keys, where there is no result."""


class VerdictText(TypedDict):
    """The verdict.

    Attributes:
        accuracy: whether the accuracy of the float model is kept.
        text: one sentence.
    """

    accuracy: Accuracy
    text: str


class KernelCounts(TypedDict):
    """Integer kernels on onnxruntime's CPU provider.

    Attributes:
        in_integers: number of planned ops that run in integers.
        share: the same as a share of the planned ops with a kernel; null if nothing was planned or counted.
        integer, floating: number of kernels by operator.
        quantize, dequantize: number of remaining QuantizeLinear and DequantizeLinear kernels.
        planned: number of planned ops.
        folded: planned ops without their own kernel: fused into another, or removed.
        float_weighted: planned ops with a weight that run in float.
        float_planned: other planned ops that run in float.
        stranded: unplanned ops that run in float between a DQ and a Q.
        weights_in_integers: share of all weight values that integer kernels read.
        float_weights: number of the other weight values, by the op that reads them.
        skipped: reason why nothing was counted, or "".
    """

    in_integers: int
    share: float | None
    integer: dict[str, int]
    floating: dict[str, int]
    quantize: int
    dequantize: int
    planned: int
    folded: int
    float_weighted: list[FloatOp]
    float_planned: list[FloatOp]
    stranded: list[FloatOp]
    weights_in_integers: float
    float_weights: dict[str, int]
    skipped: str


class ComparisonFigures(TypedDict):
    """Comparison of a file with its float model, on the same feeds.

    Attributes:
        outputs: errors by output, in graph order.
        feeds: number of feeds that `outputs` were measured on.
        bytes_float, bytes_quantized: sizes of the files with their external data; 0 if there is no file.
        ms_float, ms_quantized: best latency of one run of the first feed, in milliseconds; 0 if not measured.
        median_ms_float, median_ms_quantized: median latency of the same runs.
        latency_runs: number of runs of each model.
        latency_interval: 95 % interval of the ratio quantized / float; null if not measured.
        busy: whether other processes used the processors while latencies were measured.
        levels: errors by output and optimization level of onnxruntime.
        levels_left_out: optimization levels that were not opened, because the graph is large.
        kernels: integer kernels; null if not counted.
        dot_product: whether 8-bit products were added without saturation, as with VNNI or AMX.
        saturating: operators whose sums can saturate on the CPU that the file is for, computed as it does.
        unknown_sums: such operators that were computed as on this CPU.
        cpu: kind of CPU that the file is for; "" if unknown, or the same on all.
        held_out: number of hold-out samples that the feeds consist of; 0: none were held out.
        calibrated: whether the feeds are those of the calibration.
        doubts: sentences about data that does not look like that of the model.
        calibration: errors by output on calibration samples, if `outputs` are from a hold-out set.
        quality: figures of each output, and what they prove.
        evaluation: a metric of both models on labelled data; null if none was asked for.
        latency_ratio: median latency of the file divided by that of float; null if not measured.
        size_ratio: size of the file divided by that of float; null if there is no file.
        larger: whether the file is larger than that of float.
        runtime: backend whose runtime gave the outputs, latencies and kernels.
        llm: evaluation of a decoder (llm quantize).
    """

    outputs: list[OutputDifference]
    feeds: int
    bytes_float: int
    bytes_quantized: int
    ms_float: float
    ms_quantized: float
    median_ms_float: float
    median_ms_quantized: float
    latency_runs: int
    latency_interval: tuple[float, float] | None
    busy: bool
    levels: list[LevelDifference]
    levels_left_out: list[str]
    kernels: KernelCounts | None
    dot_product: bool
    saturating: list[str]
    unknown_sums: list[str]
    cpu: str
    held_out: int
    calibrated: bool
    doubts: list[str]
    calibration: list[OutputDifference]
    quality: list[OutputQuality]
    evaluation: Evaluation | None
    latency_ratio: float | None
    size_ratio: float | None
    larger: bool
    runtime: str
    llm: NotRequired[LlmEvaluateOutput]


class LlmFigures(TypedDict):
    """Figures of a decoder without a comparison of outputs.

    Attributes:
        llm: its evaluation.
    """

    llm: LlmEvaluateOutput


class NodeCounts(TypedDict):
    """Counts.

    Attributes:
        nodes_before: nodes in the file.
        nodes_float: nodes after simplification and fusion.
        nodes_quantized: nodes with Q/DQ.
        activations, weights, biases: quantized tensors.
        samples: samples of calibration.
    """

    nodes_before: int
    nodes_float: int
    nodes_quantized: int
    activations: int
    weights: int
    biases: int
    samples: int


class ScoreFigures(TypedDict):
    """Score of a trial on the hold-out set.

    Attributes:
        error: energy of the error of the outputs divided by that of the outputs, mean over outputs.
        loss: the loss that a limit refers to.
        sqnr_db: signal-to-noise ratio of the worst output in dB.
        changed: share of samples whose top-1 class differs from float; null without classes.
    """

    error: float
    loss: float
    sqnr_db: float
    changed: float | None


class SearchStep(TypedDict):
    """A trial of the recipe search.

    Attributes:
        what: name of the step.
        keys: values by key of the recipe.
        kept: whether the step was kept.
        gain_db: reduction of the error energy in dB; null if the step was not measured.
        why: if the step could not be tried, the reason.
        error, loss, sqnr_db, changed: its score.
    """

    what: str
    keys: dict[str, Any]
    kept: bool
    gain_db: float | None
    why: str
    error: NotRequired[float]
    loss: NotRequired[float]
    sqnr_db: NotRequired[float]
    changed: NotRequired[float | None]


class WidthChoice(ScoreFigures):
    """A measured choice of widths.

    Attributes:
        what: its name.
        cost: its cost, in the unit of the budget.
        predicted: the predicted loss.
        widths: number of layers by weight width and of tensors by activation width, such as {"w4": 12}.
        kept: whether it was chosen.
        error, loss, sqnr_db, changed: its score.
    """

    what: str
    cost: float
    predicted: float | None
    widths: dict[str, int]
    kept: bool


class WidthSearch(TypedDict):
    """Search for widths by layer.

    Attributes:
        unit: unit of costs: "bits", "size", "bit_operations" or "latency".
        target: the budget in that unit, or the text of the requested loss.
        met: whether the target was reached.
        tried: the measured choices.
        weights, activations: chosen bit width of weights by layer, and of activations by tensor.
        front: cost and predicted loss of the Pareto-optimal choices.
    """

    unit: str
    target: float | str
    met: bool
    tried: list[WidthChoice]
    weights: dict[str, int]
    activations: dict[str, int]
    front: list[tuple[float, float]]


class SearchFigures(TypedDict):
    """Search for a recipe.

    Attributes:
        trials: number of networks that were calibrated and evaluated.
        judged_on: number of feeds of the evaluation.
        held_out: whether these are disjoint from the calibration feeds.
        loss: kind of the loss.
        plain: score of the recipe as given; null if it was not measured.
        best: score of the chosen recipe.
        steps: the trials, in order.
        mixed: search for widths; null without.
    """

    trials: int
    judged_on: int
    held_out: bool
    loss: str
    plain: ScoreFigures | None
    best: ScoreFigures
    steps: list[SearchStep]
    mixed: WidthSearch | None


class AdviceFields(TypedDict):
    """The next change to try.

    Attributes:
        what: the change in words.
        overrides: the change as KEY=VALUE.
        tested: whether it was measured.
        repaired: whether the measured result has no output below its line.
        figure: name of the figure of the worst output.
        before, after: its value with the interval, and the measured one; "" if it was not tried.
        tried: all measured changes, with the values of that figure.
        search: after a search, what was tried.
        text: one clause.
        command: the command line to run (command line only).
    """

    what: str
    overrides: list[str]
    tested: bool
    repaired: bool
    figure: str
    before: str
    after: str
    tried: list[tuple[str, str]]
    search: str
    text: str
    command: NotRequired[str]


class RemovedSide(TypedDict):
    """Removed channels of a layer.

    Attributes:
        layer: name of the node.
        side: input or output channels.
        channels: their indices.
    """

    layer: str
    side: Literal["in", "out"]
    channels: list[int]


class RemovedChannels(TypedDict):
    """The pruning plan.

    Attributes:
        version: version of its form.
        removed: removed channels by layer.
    """

    version: int
    removed: list[RemovedSide]


class PruneOutput(TypedDict):
    """Report of prune.

    Attributes:
        ok: whether there are no problems.
        problems: reasons why the result is unusable or below a limit.
        verdict: accuracy, speed and size in one sentence.
        model, output: the float model and the path of the result; null: in memory.
        macs, size: remaining share of the multiplications, and of the bytes of all constants.
        latency: remaining share of the estimated time of a sample; null without a table of kernel costs.
        asked, reached: the budget or maximum loss, by name, and what was reached.
        dimensions: groups of channels: layers, number before and after, error if pruned alone.
        sparse: layers whose weight became sparse.
        layers: refitted layers.
        refusals: what was not done, with reasons.
        tuned: outcome of fine-tuning; null without.
        metrics: comparison with the original; empty without data.
        plan: the removed channels.
        notes: findings, one sentence each.
    """

    ok: bool
    problems: list[str]
    verdict: VerdictText
    model: str
    output: str | None
    macs: float
    size: float
    latency: float | None
    asked: dict[str, float]
    reached: dict[str, float]
    dimensions: list[PrunedDimension]
    sparse: list[SparseLayer]
    layers: list[LayerRefit]
    refusals: list[Refusal]
    tuned: FineTuneRow | None
    metrics: ComparisonFigures | Nothing
    plan: RemovedChannels
    notes: list[str]


class QuantizeOutput(TypedDict):
    """Report of a quantization: quantize, qat, llm quantize, and each job of a batch.

    Attributes:
        ok: whether there are no problems.
        problems: reasons why the result is unusable or misses a limit.
        verdict: accuracy, speed and size in one sentence.
        model, output, backend: the float model, the path of the result (null: in memory), the runtime.
        counts: nodes and quantized tensors.
        metrics: comparison with float; empty if the file was not verified.
        layers: error of each quantized activation, worst first.
        sites: all quantized tensors in network order.
        applied: applied patterns.
        refusals: what was not done, with reasons.
        settings: the resolved recipe, by its own keys.
        notes, note_codes: findings, one sentence each, and their codes (sbonnx explain CODE).
        search: what a search tried; empty without one.
        advice: the next change to try; empty without one.
        pruning: report of pruning; empty without.
        engine_command: command line of trtexec; "" for other runtimes.
        cpu: kind of CPU that the file is for; "" if it is the same for all.
        details: graph, losses by cause and histograms, for pages; empty if not asked for. Its form may change.
    """

    ok: bool
    problems: list[str]
    verdict: VerdictText
    model: str
    output: str | None
    backend: str
    counts: NodeCounts
    metrics: ComparisonFigures | LlmFigures | Nothing
    layers: list[LayerError]
    sites: list[QuantizedTensor]
    applied: list[Fired]
    refusals: list[Refusal]
    settings: dict[str, Any]
    notes: list[str]
    note_codes: list[str]
    search: SearchFigures | Nothing
    advice: AdviceFields | Nothing
    pruning: PruneOutput | Nothing
    engine_command: str
    cpu: str
    details: dict[str, Any]


class QuantizeFolderOutput(TypedDict):
    """Reports of a folder with several models.

    Attributes:
        ok: whether no report has problems.
        files: reports by file name without suffix.
    """

    ok: bool
    files: dict[str, QuantizeOutput]


class HistoryRow(TypedDict):
    """Figures of a run of a job.

    Attributes:
        finished: UTC, ISO 8601.
        status: status of the job.
        sqnr_db: lowest signal-to-noise ratio of the outputs in dB.
        size_ratio, latency_ratio: relative to float.
    """

    finished: str
    status: str
    sqnr_db: float | None
    size_ratio: float | None
    latency_ratio: float | None


class BatchOutput(TypedDict):
    """Report of a batch.

    Attributes:
        ok: whether all jobs are done.
        exit_code: exit code of the command.
        title: title of the job file.
        version: version of sbonnx.
        started, finished: UTC, ISO 8601.
        rows: one per job, in the order of the job file. The report of its outcome has the schema "quantize".
        steps: outcomes of all steps, by key.
        titles: titles of all steps, by key.
        history: figures of the last runs by name of the job, oldest first.
    """

    ok: bool
    exit_code: int
    title: str
    version: str
    started: str
    finished: str
    rows: list[JobResult]
    steps: dict[str, Outcome]
    titles: dict[str, str]
    history: dict[str, list[HistoryRow]]
