"""JSON outputs of the commands that examine models, and of those about sbonnx itself."""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict

from sbonnx.cli.schemas.results import ComparisonFigures, Nothing, VerdictText
from sbonnx.lint.engine_layers import PlannedOp
from sbonnx.lint.findings import Finding
from sbonnx.lint.fix import Fixed
from sbonnx.plan.types import Site
from sbonnx.profile import LayerLoss, MetricLosses
from sbonnx.qdq.difference import ConstantDifference, PairDifference
from sbonnx.report import Refusal
from sbonnx.report.figures import MetricRow
from sbonnx.spec import ScaleLimits
from sbonnx.verify.benchmark import Speed


class Interface(TypedDict):
    """Input or output of a model.

    Attributes:
        name: its name.
        type: data type.
        shape: sizes, names of dynamic axes, or "?"; null if unknown.
    """

    name: str
    type: str
    shape: list[int | str] | None


class PairCount(TypedDict):
    """Q/DQ pairs of one type.

    Attributes:
        type: quantized type.
        of: activations or constants.
        pairs: number of pairs.
    """

    type: str
    of: Literal["activations", "constants"]
    pairs: int


class BlockCount(TypedDict):
    """Recognized blocks of one kind.

    Attributes:
        kind: such as "gelu".
        count: number of blocks.
        first: first node of the first block.
    """

    kind: str
    count: int
    first: str


class InspectOutput(TypedDict):
    """Output of inspect.

    Attributes:
        file: the model.
        bytes: its size with external data.
        opset: opset of the standard operators.
        domains: versions of other domains.
        ir_version: version of the file format.
        producer: program that wrote it, or "".
        inputs, outputs: interface.
        nodes: number of nodes, in branches too.
        ops: number of nodes by operator.
        parameters, parameter_bytes: number of values of all constants, and their bytes.
        qdq: Q/DQ pairs by type.
        blocks: recognized blocks.
        branches: number of nodes by path of the branch.
        notes: what loading changed.
    """

    file: str
    bytes: int
    opset: int
    domains: dict[str, int]
    ir_version: int
    producer: str
    inputs: list[Interface]
    outputs: list[Interface]
    nodes: int
    ops: dict[str, int]
    parameters: int
    parameter_bytes: int
    qdq: list[PairCount]
    blocks: list[BlockCount]
    branches: dict[str, int]
    notes: list[str]


class PlanOutput(TypedDict):
    """Output of plan.

    Attributes:
        format: version of the plan's form.
        sites: Q/DQ pairs to insert, in topological order of the tensors.
        refusals: what is not quantized, with reasons.
        backend: the runtime.
        scale_rule, weights, weights_alone, float_type, scales: rules of the runtime.
        cpu: kind of CPU that the file is for; "" if the kernels of the backend compute the same on all.
    """

    format: int
    sites: list[Site]
    refusals: list[Refusal]
    backend: str
    scale_rule: str
    weights: str
    weights_alone: bool
    float_type: str
    scales: ScaleLimits
    cpu: str


class SeverityCounts(TypedDict):
    """Number of findings by severity."""

    error: int
    warning: int
    info: int


class ReformatRow(TypedDict):
    """A layer of the engine that only converts formats.

    Attributes:
        layer: its name.
        ms: mean time in milliseconds; null without a profile.
    """

    layer: str
    ms: float | None


class EngineRows(TypedDict):
    """Layers of a TensorRT engine joined with the file.

    Attributes:
        planned: operators with quantized inputs.
        reformats: layers that only convert formats.
        ms: mean time of all layers in milliseconds; null without a profile.
        reformat_ms: mean time of all reformats.
    """

    planned: list[PlannedOp]
    reformats: list[ReformatRow]
    ms: float | None
    reformat_ms: float | None


class LintOutput(TypedDict):
    """Output of lint.

    Attributes:
        model, target: the model and the runtime.
        rules: number of rules.
        counts: findings by severity.
        findings: the findings, most severe first.
        notes: one sentence each.
        engine: layers of the engine (--engine-layers).
        output: the fixed model (--fix).
        fixed: what was fixed (--fix).
    """

    model: str
    target: str
    rules: int
    counts: SeverityCounts
    findings: list[Finding]
    notes: list[str]
    engine: NotRequired[EngineRows]
    output: NotRequired[str]
    fixed: NotRequired[list[Fixed]]


class OutputStatistics(TypedDict):
    """Statistics of an output.

    Attributes:
        name, type: name and data type.
        shape: its shape; null if it varies.
        min, mean, max: of finite values; null without any.
        not_finite: number of other values.
    """

    name: str
    type: str | None
    shape: list[int] | None
    min: float | None
    mean: float | None
    max: float | None
    not_finite: int


class RunOutput(TypedDict):
    """Output of run.

    Attributes:
        model: the model.
        feeds: number of feeds.
        output: the file or folder; null: none.
        outputs: statistics by output.
    """

    model: str
    feeds: int
    output: str | None
    outputs: list[OutputStatistics]


class BenchOutput(TypedDict):
    """Output of bench.

    Attributes:
        models: the files.
        runtime: the runtime that executed them.
        rows: one for each model, number of threads and batch size.
    """

    models: list[str]
    runtime: str
    rows: list[Speed]


class CommandAdvice(TypedDict):
    """A command to run next.

    Attributes:
        text: what it does.
        command: the command line.
    """

    text: str
    command: str


FloatFile = TypedDict("FloatFile", {"float": str})  # noqa: UP013 - in a class, `float` would hide the type


class CompareOutput(ComparisonFigures, FloatFile):
    """Output of compare.

    Attributes:
        ok: whether there are no problems.
        problems: reasons why the result is unusable or misses a limit.
        verdict: accuracy, speed and size in one sentence.
        float, quantized: the files.
        advice: a command to run next; empty without one.
    """

    ok: bool
    problems: list[str]
    verdict: VerdictText
    quantized: str
    advice: CommandAdvice | Nothing


class DiffOutput(TypedDict):
    """Output of diff.

    Attributes:
        first, second: the files.
        equal: whether they have equal pairs, constants and numbers of operators.
        first_pairs, second_pairs: tensors that only one file quantizes, with their types.
        pairs: tensors that both quantize differently.
        equal_pairs: number of tensors that both quantize equally.
        constants: constants with other values.
        equal_constants: number of equal ones.
        first_constants, second_constants: names of constants that only one file has.
        operators: number of nodes in each file, of operators whose numbers differ.
    """

    first: str
    second: str
    equal: bool
    first_pairs: dict[str, str]
    second_pairs: dict[str, str]
    pairs: list[PairDifference]
    equal_pairs: int
    constants: list[ConstantDifference]
    equal_constants: int
    first_constants: list[str]
    second_constants: list[str]
    operators: dict[str, tuple[int, int]]


class EvalOutput(TypedDict):
    """Output of eval.

    Attributes:
        ok: always true.
        runtimes: the runtime that executed each model.
        metric: name of the metric.
        unit: "dB" or "".
        higher_is_better: direction.
        share: whether differences are absolute; else losses are relative.
        samples: number of samples.
        interval: how the intervals were computed.
        rows: one for each model, in order.
        chance: value of the metric if classes are guessed; null if unknown.
    """

    ok: bool
    runtimes: list[str]
    metric: str
    unit: str
    higher_is_better: bool
    share: bool
    samples: int
    interval: str
    rows: list[MetricRow]
    chance: float | None


class ProfileOutput(TypedDict):
    """Output of profile.

    Attributes:
        measure: the error measure.
        unit: its unit, or "".
        higher_is_better: direction.
        feeds: number of feeds.
        outputs: the measure at each output of the quantized network.
        layers: figures by layer, in the order of --sort.
        notes: messages about the figures.
        evaluation: loss of layers in a task metric (--eval); null without.
    """

    measure: str
    unit: str
    higher_is_better: bool
    feeds: int
    outputs: dict[str, float]
    layers: list[LayerLoss]
    notes: list[str]
    evaluation: MetricLosses | None


class ViewOutput(TypedDict):
    """Output of view.

    Attributes:
        page: the HTML file.
        opened: whether a browser was opened.
    """

    page: str
    opened: bool
