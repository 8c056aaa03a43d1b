"""``sbonnx qat``: quantization-aware training by distillation from the float model, without labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.create.quantize import check_report, show_report
from sbonnx.cli.evaluation_options import calibration_data, evaluation_of
from sbonnx.cli.options import Arguments, CommandOption, required_output
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from sbonnx.calib.data import DataPath
    from sbonnx.report import Report

HELP: Final = (
    "Quantize a float model and train it without labels. It is distilled from the float model on the same data. "
    "Needs torch: pip install 'sbonnx[qat]'."
)

TRAINING: Final = "Training"
"""Help group."""

TRAIN_DATA: Final = options.option("--train-data DATA", Path, "Samples to train on; default: --data.", TRAINING)
TEACHER: Final = options.option(
    "--teacher FILE.onnx",
    Path,
    "Float model to learn from and to compare with, the original of a pruned one.",
    TRAINING,
)
METHOD: Final = options.option(
    "--method lsq|lsq+|pact|dorefa|uniform",
    str,
    "How scales are learned; pact applies to activations, with lsq for weights. Default: the recipe's, or lsq.",
    TRAINING,
)
EPOCHS: Final = options.setting("--epochs N", 40, "Number of passes over the samples.", TRAINING)
BATCH: Final = options.setting("--batch N", 32, "Samples per step.", TRAINING)
RATE: Final = options.setting(
    "--lr X", 0.15, "Learning rate: approximate relative change of a layer per step.", TRAINING
)
SCALE_RATE: Final = options.setting("--quant-lr X", 0.005, "Learning rate of scales, relative to their size.", TRAINING)
AVERAGE: Final = options.setting("--ema X", 0.0, "Decay of the moving average of weights; 0: none.", TRAINING)
AUGMENT: Final = options.option(
    "--augment flip,shift,cutmix,mixup", str, "Augmentations of images, applied in this order; default: none.", TRAINING
)
INNER_WEIGHT: Final = options.setting(
    "--inner-weight X", 0.3, "Weight of the loss of inner tensors against that of outputs; 0: outputs only.", TRAINING
)
ADAPTERS: Final = options.option(
    "--adapters RANK", int, "Train low-rank adapters (LoRA) of this rank instead of the weights.", TRAINING
)
SEED: Final = options.setting("--seed N", 0, "Random seed of the order of samples.", TRAINING)
CHECKPOINT: Final = options.output_option(
    "--checkpoint FILE", "Checkpoint: written during training, resumed from if it exists.", TRAINING
)

SETTINGS: Final[tuple[CommandOption[Any], ...]] = (EPOCHS, BATCH, RATE, SCALE_RATE, AVERAGE, INNER_WEIGHT, SEED)
"""Fields of `sbonnx.qat.Settings`, with its defaults: the help does not import torch."""

OPTIONS: Final = (
    options.MODEL,
    options.DATA,
    TRAIN_DATA,
    options.OUTPUT,
    *options.BASIC,
    TEACHER,
    METHOD,
    EPOCHS,
    BATCH,
    RATE,
    SCALE_RATE,
    AVERAGE,
    AUGMENT,
    INNER_WEIGHT,
    ADAPTERS,
    SEED,
    CHECKPOINT,
    options.SET,
    *options.NODES,
    *options.FEEDS,
    options.TASK,
    *options.EVALUATING,
    options.NO_VERIFY,
    options.REPORT,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs

    output, data = required_output(given[options.OUTPUT]), calibration_data(given, "qat")
    inputs = [given[options.MODEL], Path(data)]
    checkpoint, force = given[CHECKPOINT], given[options.FORCE]
    check_report(given[options.REPORT], [*inputs, output], force=force)
    graphs.check_target(output, inputs=inputs, force=force, model=True)
    if checkpoint is not None:
        graphs.check_target(checkpoint, inputs=[*inputs, output], force=True)
    return show_report(given, _trained(given, data, output))


def _trained(given: Arguments, data: Path | DataPath, output: Path) -> Report:
    from sbonnx import qat
    from sbonnx.stages.state import read_recipe
    from sbonnx.training.batches import make_augment
    from sbonnx.verify import check_labels

    model, split, method, names = given[options.MODEL], given[options.SPLIT], given[METHOD], given[AUGMENT]
    try:
        settings = qat.Settings(**{row.name: given[row] for row in SETTINGS})
    except ValueError as error:
        raise RecipeError(f"--{str(error).replace('_', '-')}") from error
    augment = None if names is None else make_augment(names)
    overrides = given.overrides(without=[options.DEVICE])
    recipe, _ = read_recipe(given[options.RECIPE], given[options.BACKEND], overrides)
    evaluation = evaluation_of(given)
    if evaluation is not None:
        check_labels(model, evaluation, device=given[options.DEVICE] or "cpu")
    progress = given.progress()
    try:
        module = qat.prepare(
            model,
            data,
            recipe,
            weights="lsq" if method == "pact" else method,
            activations=method,
            adapters=given[ADAPTERS],
            teacher=given[TEACHER],
            device=given[options.DEVICE] or "cpu",
            split=split,
            progress=progress,
        )
        train_data, checkpoint = given.data(TRAIN_DATA) or data, given[CHECKPOINT]
        trained = qat.train(
            module, train_data, settings, augment=augment, checkpoint=checkpoint, split=split, progress=progress
        )
    finally:
        progress.close()
    verify = not given[options.NO_VERIFY]
    force = given[options.FORCE]
    details = given[options.REPORT] is not None
    report = qat.export(
        module, output, data, split=split, force=force, verify=verify, evaluation=evaluation, details=details
    )
    return replace(report, notes=(trained.note, *report.notes))
