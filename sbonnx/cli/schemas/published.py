"""JSON schemas of the outputs of ``--json``, of ``--report FILE.json`` and of the report of a batch.

Each is derived from the class of the result (`sbonnx.cli.schemas.derived`). Numbers that are not finite are strings in
JSON: "inf", "-inf", "nan".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sbonnx.batch.jobs.job import BatchReport
from sbonnx.batch.preview import BatchPreview
from sbonnx.cli.about import completion, doctor, explain, version
from sbonnx.cli.create import demo, init, recipe
from sbonnx.cli.schemas.derived import Derivation
from sbonnx.linting.report import LintReport
from sbonnx.llm.adapt import AdaptedDecoder
from sbonnx.llm.description import DecoderFacts
from sbonnx.metrics.output_statistics import RunOutput
from sbonnx.planning.types import Plan
from sbonnx.profiling.metric_losses import EvaluatedProfile
from sbonnx.pruning.groups.dimensions import PrunableDimensions
from sbonnx.pruning.sparsity.choice import SparseLayers
from sbonnx.qdq.difference import FileDifference
from sbonnx.report.comparison import FileComparison
from sbonnx.report.contents import ModelContents
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.report.outcome import QuantizedFolder, Report
from sbonnx.report.pruned import PruningReport
from sbonnx.report.simplified import SimplifyReport
from sbonnx.system.terminal import versioned
from sbonnx.tuning.tuned_costs import KernelTuning
from sbonnx.verify.benchmark import Benchmark
from sbonnx.verify.labelled import MetricTable
from sbonnx.viewing import WrittenPage

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class SchemaOutput:
    """Output of schema without a name.

    Attributes:
        versions: version by name of the schema.
    """

    versions: dict[str, int]


SCHEMAS: Final[dict[str, Any]] = {
    "quantize": Report,
    "quantize-folder": QuantizedFolder,
    "batch": BatchReport,
    "batch-dry-run": BatchPreview,
    "prune": PruningReport,
    "prune-dimensions": PrunableDimensions,
    "prune-sparse": SparseLayers,
    "simplify": SimplifyReport,
    "init": init.InitOutput,
    "recipe": recipe.RecipeOutput,
    "demo": demo.DemoOutput,
    "inspect": ModelContents,
    "plan": Plan,
    "lint": LintReport,
    "run": RunOutput,
    "bench": Benchmark,
    "compare": FileComparison,
    "diff": FileDifference,
    "eval": MetricTable,
    "profile": EvaluatedProfile,
    "view": WrittenPage,
    "tune": KernelTuning,
    "explain": explain.ExplainOutput,
    "doctor": doctor.DoctorOutput,
    "schema": SchemaOutput,
    "version": version.VersionOutput,
    "completion": completion.CompletionOutput,
    "llm-inspect": DecoderFacts,
    "llm-evaluate": DecoderEvaluation,
    "llm-adapt": AdaptedDecoder,
}
"""Form of each JSON output, by the value of its key `schema`."""

OF_COMMANDS: Final = {"qat": "quantize", "llm-quantize": "quantize"}
"""Schemas of commands whose output has another name."""


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of an output.

    Args:
        name: a key of `SCHEMAS`.
    """
    derivation = Derivation()
    schema = derivation.object(SCHEMAS[name])
    keys = {key: {"const": value} for key, value in versioned(name, {}).items()}
    return {
        "$schema": DIALECT,
        "$id": f"sbonnx-{name}-{keys['schema_version']['const']}.schema.json",
        "$defs": derivation.definitions,
        **schema,
        "properties": {**keys, **schema["properties"]},
        "required": [*keys, *schema["required"]],
    }


__all__ = ["OF_COMMANDS", "SCHEMAS", "json_schema"]
