"""``lint``: a Q/DQ model of any tool against the rules of a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sbonnx import graph as graphs
from sbonnx.api.arguments import File, cpu_of_file, known_keywords, model_files, reading
from sbonnx.errors import OutputError, RecipeError
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.linting import TARGETS, rules_for
from sbonnx.linting.findings import sarif as to_sarif
from sbonnx.linting.fix import fixes_for
from sbonnx.linting.report import LintReport, lint_file
from sbonnx.recipe.names import full_backend
from sbonnx.system.terminal import to_json
from sbonnx.verify.runtimes import recorded_backend


@known_keywords
def lint(
    model: ModelSource,
    target: str | None = None,
    *,
    cpu: str | None = None,
    sarif: File | None = None,
    fix: bool = False,
    output: File | None = None,
    engine_layers: File | None = None,
    engine_profile: File | None = None,
    force: bool = False,
    ort_libraries: Sequence[File] = (),
) -> LintReport:
    """Check a Q/DQ model against the rules of a runtime.

    Args:
        model: path of an ONNX file, made by any tool, or a model in memory.
        target: the runtime: "tensorrt@11", "tensorrt@10", "tensorrt@8.6", "onnxruntime", "openvino", "qnn" or
            "web"; None: that of the file's metadata. Without a version: the newest.
        cpu: onnxruntime: CPU that will run the file, such as "vnni" or "this"; None: as its metadata says, else this.
        sarif: path for the findings as SARIF 2.1.0.
        fix: fix what needs no data, write the model to `output`, and check that file instead.
        output, force: path of the fixed model, and whether to overwrite files.
        engine_layers: layers of the TensorRT engine (trtexec --exportLayerInfo), to show which quantized operators it
            runs in integers.
        engine_profile: times of its layers (trtexec --exportProfile).
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.

    Returns:
        The findings. ``counts.error`` is 0 if the runtime accepts the model.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    if output is not None and not fix:
        raise OutputError("-o names the model that --fix writes: add --fix")
    if fix and output is None:
        raise OutputError("-o is missing: name the file to write, such as -o model.int8.onnx")
    fixed = None if output is None else Path(output)
    reads = reading(model, engine_layers, engine_profile, ort_libraries=ort_libraries)
    with reads, model_files(model) as ((file,), (name,)):
        target = _target(target, file)
        kind = cpu_of_file(cpu, target)
        if fix and target in TARGETS and not fixes_for(target):
            raise RecipeError(
                f"--fix: nothing is fixed for {target}: quantize the model again, with --requantize and data"
            )
        _check_engine(target, engine_layers, engine_profile)
        rules = rules_for(target)
        if sarif is not None:
            graphs.check_target(Path(sarif), inputs=[] if fixed is None else [fixed], force=force)
        profile = None if engine_profile is None else Path(engine_profile)
        engine = None if engine_layers is None else (Path(engine_layers), profile)
        report = lint_file(file, target, cpu=kind, fixed=fixed, force=force, engine=engine)
        report = replace(report, model=name)
        if sarif is not None:
            graphs.write_text(Path(sarif), to_json(to_sarif(report.findings, rules, report.checked)) + "\n")
    return report


def _target(wanted: str | None, model: Path) -> str:
    """Return the target: without one that of the file's metadata, without a version the newest.

    Raises:
        RecipeError: none is given, and the file names none that has rules.
    """
    name = full_backend(wanted or recorded_backend(model))
    target = next((target for target in TARGETS if name in (target, target.partition("@")[0])), name)
    if wanted is None and target not in TARGETS:
        why = f"'{name}' of the file's metadata has no rules" if name else "the file names none"
        raise RecipeError(f"--target is missing, and {why}: give one of {', '.join(TARGETS)}")
    return target


def _check_engine(target: str, layers: File | None, profile: File | None) -> None:
    """Check the files of an engine.

    Raises:
        RecipeError: there are no layers for the times, or the target builds no engine.
    """
    if profile is not None and layers is None:
        raise RecipeError("--engine-profile has the times of layers: add --engine-layers")
    if layers is not None and not target.startswith("tensorrt"):
        raise RecipeError(f"--engine-layers is about a TensorRT engine, and --target is {target}")
