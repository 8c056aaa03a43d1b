"""``sbonnx qat``: quantization-aware training by distillation from the float model, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.output.show import Show
from sbonnx.cli.quantize import check_report, said
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from sbonnx.progress import Progress
    from sbonnx.report import Report

HELP: Final = (
    "Quantize a float model, and train it without labels. It learns to give what the float model gives on the same "
    "data. Needs torch: pip install 'sbonnx[qat]'."
)

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="lsq|lsq+|pact|dorefa|uniform",
        help="What learns scales; pact clips activations, and weights get lsq beside it. The recipe's, or lsq.",
        show_default=False,
    ),
]
Epochs = Annotated[int, typer.Option("--epochs", metavar="N", help="Times that all samples are seen.")]
Batch = Annotated[int, typer.Option("--batch", metavar="N", help="Samples a step.")]
Rate = Annotated[float, typer.Option("--lr", metavar="X", help="By how much a step changes a layer, about.")]
ScaleRate = Annotated[float, typer.Option("--quant-lr", metavar="X", help="That of scales, in parts of their size.")]
Average = Annotated[float, typer.Option("--ema", metavar="X", help="Decay of the moving average of weights; 0: none.")]
Augment = Annotated[
    str | None,
    typer.Option(
        "--augment",
        metavar="flip,shift,cutmix,mixup",
        help="How images are changed before both networks see them, in this order; none without it.",
        show_default=False,
    ),
]
Inner = Annotated[
    float,
    typer.Option("--inner-weight", metavar="X", help="Weight of tensors inside, beside the outputs; 0: outputs alone."),
]
Rank = Annotated[
    int | None,
    typer.Option(
        "--adapters",
        metavar="RANK",
        help="Train low-rank adapters in place of the weights; without it the weights themselves.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the order of samples.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FILE", help="Written as it goes; goes on from it.", show_default=False),
]
TrainData = Annotated[
    Path | None,
    typer.Option("--train-data", metavar="DATA", help="To train on; without it: --data.", show_default=False),
]


def run(
    model: options.Model,
    data: options.Data = None,
    train_data: TrainData = None,
    output: options.Output = None,
    backend: options.Backend = None,
    recipe: options.RecipePath = None,
    bits: options.Bits = None,
    method: Method = None,
    epochs: Epochs = 40,
    batch: Batch = 32,
    lr: Rate = 0.15,
    quant_lr: ScaleRate = 5e-3,
    ema: Average = 0.0,
    augment: Augment = None,
    inner_weight: Inner = 0.3,
    adapters: Rank = None,
    seed: Seed = 0,
    checkpoint: Checkpoint = None,
    sets: options.Sets = None,
    split: options.Split = None,
    samples: options.Samples = None,
    device: options.Device = None,
    no_verify: options.NoVerify = False,
    report_file: options.ReportFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
    json_progress: options.JsonProgress = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx qat`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx.progress import make_progress

    target, source = options.output_of(output), options.required(data)
    check_report(report_file, [model, target, source], force=force)
    graphs.check_target(target, inputs=[model, source], force=force)
    if checkpoint is not None:
        graphs.check_target(checkpoint, inputs=[model, source, target], force=True)
    flags = options.overrides(sets, bits=bits, samples=samples)
    settings = {"epochs": epochs, "batch": batch, "lr": lr, "quant_lr": quant_lr, "ema": ema, "seed": seed}
    settings["inner_weight"] = inner_weight
    report = _made(
        model,
        source,
        train_data or source,
        target,
        device=device or "cpu",
        adapters=adapters,
        how={"recipe": recipe, "backend": backend, "flags": flags, "split": split, "method": method},
        settings=settings,
        augment=augment,
        checkpoint=checkpoint,
        told=make_progress(quiet=quiet, as_json=json_progress),
        write={"force": force, "verify": not no_verify},
    )
    return said(Show(as_json=as_json, quiet=quiet), report, report_file)


def _made(
    model: Path,
    source: Path,
    train_data: Path,
    target: Path,
    *,
    how: dict[str, Any],
    settings: dict[str, Any],
    device: str,
    adapters: int | None,
    augment: str | None,
    checkpoint: Path | None,
    told: Progress,
    write: dict[str, bool],
) -> Report:
    """Calibrate, train and export."""
    from sbonnx import qat
    from sbonnx.qat.training.augment import make_augment
    from sbonnx.stages.state import read_recipe

    try:
        chosen = qat.Settings(**settings)
    except ValueError as error:
        raise RecipeError(f"--{str(error).replace('_', '-')}") from error
    changed = None if augment is None else make_augment(augment)
    wishes, _ = read_recipe(how["recipe"], how["backend"], how["flags"])
    method, split = how["method"], how["split"]
    try:
        module = qat.prepare(
            model,
            source,
            wishes,
            weights="lsq" if method == "pact" else method,
            activations=method,
            adapters=adapters,
            device=device,
            split=split,
            progress=told,
        )
        qat.train(module, train_data, chosen, augment=changed, checkpoint=checkpoint, split=split, progress=told)
    finally:
        told.close()
    return qat.export(module, target, source, split=split, **write)
