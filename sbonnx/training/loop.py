"""`train`: a small loop that trains a quantized network by distillation from its float network. No labels are needed.

The module is an ordinary `torch.nn.Module`, so that you can also use your own training loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from sbonnx.errors import DataError, NumericError
from sbonnx.graph import check_target
from sbonnx.progress import Progress, Silent
from sbonnx.report.codes import Note
from sbonnx.spec import Array
from sbonnx.torchnet.onnx_to_torch.operators import BatchNorm
from sbonnx.training.batches import Augment, ShuffledBatches
from sbonnx.training.checkpoint import Average, read_checkpoint, write_checkpoint
from sbonnx.training.distillation import Loss, distillation

Optimizer = Literal["adam", "sgd"]

MOMENTUM: Final = 0.9
"""Nesterov momentum of "sgd"."""

LEAST_SIZE: Final = 1e-3
"""Lower bound of the mean magnitude by which the learning rate is scaled, because all biases may be 0 initially."""

OF_BIASES: Final = 0.1
"""Factor of the learning rate of biases and norms with "adam". A step of a bias or norm changes its output in full,
while the steps of an output's weights partly cancel each other."""


@dataclass(frozen=True)
class Settings:
    """Settings of `train`.

    Attributes:
        epochs: number of passes over all samples.
        batch: samples per step.
        optimizer: "adam" (Adam, or AdamW with weight decay) or "sgd" (momentum 0.9, Nesterov).
        lr: peak learning rate of weights, biases and norms. With "adam" it is roughly the largest relative change of a
            layer's output in one step: a weight moves by ``lr * mean|w| / sqrt(inputs of an output)``, because the
            steps of all inputs of an output may have the same direction, and Adam's step size does not depend on the
            magnitude of the weights. Biases and norms move by ``0.1 * lr * mean|b|``.
        quant_lr: learning rate of scales, zero points and clipping levels, relative to their mean magnitude.
        warmup: fraction of the steps with linear warmup to the peak learning rate; cosine decay follows.
        last_lr: final learning rate, as a fraction of the peak.
        weight_decay: weight decay of weights with two or more axes; biases, norms, scales and zero points have none.
        inner_weight: weight of the mean relative squared error of inner tensors, if there are any, in the loss; 0: only
            the loss of the outputs.
        freeze_norms: fraction of the steps after which the statistics of batch norms are frozen.
        ema: decay of the exponential moving average (EMA) of all parameters, which replaces them at the end; 0: no EMA.
        clip: maximum norm for gradient clipping; 0: no clipping.
        seed: seed of the order of samples and of augmentations.
        check_every: steps between two checkpoints, if a file is given; there is also one at the end of each epoch.

    Raises:
        ValueError: an invalid value; the message names the setting.
    """

    epochs: int = 40
    batch: int = 32
    optimizer: Optimizer = "adam"
    lr: float = 0.15
    quant_lr: float = 5e-3
    warmup: float = 0.1
    last_lr: float = 0.0
    weight_decay: float = 0.0
    inner_weight: float = 0.3
    freeze_norms: float = 0.5
    ema: float = 0.0
    clip: float = 0.0
    seed: int = 0
    check_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "check_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("lr", "quant_lr", "weight_decay", "inner_weight", "clip"):
            if not getattr(self, name) >= 0 or math.isinf(getattr(self, name)):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("warmup", "last_lr", "freeze_norms"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0 and 1, got {getattr(self, name)}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, got {self.ema}")
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f"optimizer must be adam or sgd, got {self.optimizer}")

    def pace(self, step: int, steps: int) -> float:
        """Compute the factor of the learning rates at `step` (from 0) of `steps`."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        way = (step - rising) / max(steps - rising, 1)
        return self.last_lr + (1.0 - self.last_lr) * (1.0 + math.cos(math.pi * way)) / 2.0


@dataclass
class Trained:
    """Result of a training run.

    Attributes:
        steps: number of steps, including those before an interruption.
        losses: mean loss of each epoch.
        resumed: step at which the run was resumed; 0 for a new run.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    resumed: int = 0

    @property
    def note(self) -> Note:
        """A note for the report: epochs, and how the loss fell."""
        if not self.losses:
            return Note("trained", "nothing was trained: there was no epoch")
        epochs = f"trained for {len(self.losses)} epoch{'s' * (len(self.losses) != 1)}, {self.steps} steps"
        first = f", in the first epoch {self.losses[0]:.3g}" if len(self.losses) > 1 else ""
        return Note("trained", f"{epochs}: mean loss in the last epoch {self.losses[-1]:.3g}{first}")


@dataclass(frozen=True)
class Objective:
    """Objective of a training step: loss, teacher and augmentation.

    Attributes:
        teacher: the float network: takes the inputs of the model by name, returns its outputs by name.
        loss: loss of the outputs against those of the teacher.
        forward: called instead of the trained module, for a loss that needs more than its outputs; see
            `distillation.Taps`.
        augment: augmentation of each batch, applied before both networks.
        agree: further values that must be equal in a checkpoint, besides settings, data and network; plain values by
            their description.
    """

    teacher: Callable[..., Mapping[str, Tensor]]
    loss: Loss = distillation
    forward: Callable[..., Mapping[str, Tensor]] | None = None
    augment: Augment | None = None
    agree: Mapping[str, Any] = field(default_factory=dict)


def train(
    module: nn.Module,
    data: Iterable[Mapping[str, Array]],
    objective: Objective,
    settings: Settings | None = None,
    *,
    quant: Iterable[Tensor] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> Trained:
    """Train `module` in place, on its device, and set it to eval mode afterwards.

    On a CPU, the same seed gives the same parameters, also if the run was interrupted and resumed from its checkpoint.

    Args:
        module: takes the inputs of the model by name, returns its outputs by name.
        data: feeds of float or integer arrays, held in memory.
        objective: float network, loss and augmentation.
        settings: see `Settings`.
        quant: parameters of `module` that are scales, zero points or clipping levels.
        checkpoint: file that is written during training; if it exists, the run resumes from it.
        progress: progress display, advanced at each step.
        after_epoch: called with the number of completed epochs after each of them. It may evaluate the module, which
            has the parameters of the last step and not yet their EMA.

    Raises:
        DataError: no data, or the checkpoint is of another network, other data or other settings.
        NumericError: the loss is NaN or infinite; the message names the step.
        OutputError: the checkpoint cannot be written.
    """
    settings, progress = settings or Settings(), progress or Silent()
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        check_target(path, (), force=True)
    batches = ShuffledBatches(data, settings.batch, settings.seed)
    run = _TrainingRun(module, batches, settings, tuple(quant), objective)
    if path is not None and path.exists():
        run.restore(read_checkpoint(path, run.identity))
    progress.start("training", run.steps)
    progress.advance(run.done.steps)
    try:
        while run.done.steps < run.steps:
            for batch in run.rest_of_epoch():
                run.step(batch)
                progress.advance()
                if path is not None and run.is_due:
                    write_checkpoint(path, run.state())
            if after_epoch is not None:
                after_epoch(len(run.done.losses))
        run.finish()
    finally:
        progress.close()
    return run.done


class _TrainingRun:
    """State of a training run, which a checkpoint saves and restores."""

    def __init__(
        self,
        module: nn.Module,
        batches: ShuffledBatches,
        settings: Settings,
        quant: tuple[Tensor, ...],
        objective: Objective,
    ) -> None:
        self.module, self.batches, self.settings, self.objective = module, batches, settings, objective
        self.device = next(iter(module.parameters())).device
        self.steps = settings.epochs * len(batches)
        self.done = Trained()
        self._optimizer = _optimizer(module, settings, {id(parameter) for parameter in quant})
        self._average = Average(module, settings.ema) if settings.ema else None
        self._sum = 0.0  # sum of the losses in the current epoch

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be equal in a checkpoint."""
        state = self.module.state_dict()
        shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        own = {"settings": asdict(self.settings), "samples": self.batches.samples, "shapes": shapes}
        return {**own, **self.objective.agree}

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due after this step."""
        steps = self.done.steps
        return steps % self.settings.check_every == 0 or steps % len(self.batches) == 0

    def rest_of_epoch(self) -> Iterable[dict[str, Tensor]]:
        """Yield the remaining batches of the current epoch."""
        epoch, seen = divmod(self.done.steps, len(self.batches))
        for number, batch in enumerate(self.batches.epoch(epoch, self.device)):
            if number >= seen:
                yield batch

    def step(self, batch: dict[str, Tensor]) -> None:
        number = self.done.steps
        pace = self.settings.pace(number, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * pace
        self.module.train()
        freeze_norms(self.module, frozen=number >= self.settings.freeze_norms * self.steps)
        goal = self.objective
        if goal.augment is not None:
            chance = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
            batch = goal.augment(batch, chance)
        with torch.no_grad():
            targets = goal.teacher(**batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss = goal.loss((goal.forward or self.module)(**batch), targets)
        loss.backward()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self._optimizer.step()
        if self._average is not None:
            self._average.add(self.module)
        self.done.steps += 1
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NumericError(
                f"the loss is {value} at step {self.done.steps}: train with a smaller lr, or with clip=1"
            )
        self._sum += value
        if self.done.steps % len(self.batches) == 0:
            self.done.losses.append(self._sum / len(self.batches))
            self._sum = 0.0

    def finish(self) -> None:
        """Load the EMA into the module, if there is one, and set eval mode."""
        if self._average is not None:
            self._average.load_into(self.module)
        self.module.eval()

    def state(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": None if self._average is None else self._average.state(),
            "steps": self.done.steps,
            "losses": list(self.done.losses),
            "sum": self._sum,
            "chance": torch.get_rng_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._average is not None and state["average"] is not None:
            self._average.restore(state["average"])
        self.done = Trained(state["steps"], list(state["losses"]), state["steps"])
        self._sum = state["sum"]
        torch.set_rng_state(state["chance"])


def freeze_norms(module: nn.Module, *, frozen: bool = True) -> None:
    """Freeze the running statistics of batch norms, which then normalize with them in train mode too; or unfreeze them.

    torch's own batch norms are set to eval mode, so that `module.train()` unfreezes them.
    """
    for part in module.modules():
        if isinstance(part, BatchNorm):
            part.frozen = frozen
        elif frozen and isinstance(getattr(part, "running_mean", None), Tensor):
            part.eval()


def _optimizer(module: nn.Module, settings: Settings, quant: set[int]) -> torch.optim.Optimizer:
    """Create the optimizer, with one group and learning rate for each parameter; the schedule scales "highest"."""
    adam = settings.optimizer == "adam"
    groups = []
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        learns_codes = id(parameter) in quant
        rate = settings.quant_lr if learns_codes else settings.lr
        if adam or learns_codes:
            rate *= max(float(parameter.detach().abs().mean()), LEAST_SIZE)
        if adam and not learns_codes:
            wide = parameter.dim() > 1
            rate *= (parameter.numel() / max(parameter.shape[0], 1)) ** -0.5 if wide else OF_BIASES
        decay = settings.weight_decay if parameter.dim() > 1 and not learns_codes else 0.0
        groups.append({"params": [parameter], "highest": rate, "weight_decay": decay})
    if not groups:
        raise DataError("the module has no trainable parameter")
    if adam:
        return torch.optim.AdamW(groups, lr=settings.lr)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=MOMENTUM, nesterov=True)
