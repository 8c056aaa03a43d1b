"""`train`: a small loop that trains a quantized network by distillation from its float network. No labels are needed.

The module is an ordinary `torch.nn.Module`, so that you can also use your own training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from sbonnx.errors import DataError, NumericError
from sbonnx.graph import check_target
from sbonnx.progress import Progress, Silent
from sbonnx.qat.onnx_to_torch.norms import BatchNorm
from sbonnx.qat.training.augment import Augment
from sbonnx.qat.training.batches import Batches
from sbonnx.qat.training.checkpoint import read_checkpoint, write_checkpoint
from sbonnx.qat.training.ema import Average
from sbonnx.qat.training.losses import Loss, distillation
from sbonnx.qat.training.settings import MOMENTUM, Settings
from sbonnx.spec import Array


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


def train(
    module: nn.Module,
    data: Iterable[Mapping[str, Array]],
    teacher: Callable[..., Mapping[str, Tensor]],
    settings: Settings | None = None,
    *,
    quant: Iterable[Tensor] = (),
    loss: Loss = distillation,
    forward: Callable[..., Mapping[str, Tensor]] | None = None,
    augment: Augment | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    agree: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train `module` in place, on its device, and set it to eval mode afterwards.

    On a CPU, the same seed gives the same parameters, also if the run was interrupted and resumed from its checkpoint.

    Args:
        module: takes the inputs of the model by name, returns its outputs by name.
        data: feeds of float or integer arrays, held in memory.
        teacher: the float network, called like `module`, without gradients.
        settings: see `Settings`.
        quant: parameters of `module` that are scales, zero points or clipping levels.
        loss: loss of the outputs against those of the teacher.
        forward: called instead of `module`, for a loss that needs more than its outputs; see `feature_taps.Taps`.
        augment: augmentation of each batch, applied before both networks.
        checkpoint: file that is written during training; if it exists, the run resumes from it.
        agree: further values that must be equal in a checkpoint, besides settings, data and network; plain values by
            their description.
        progress: progress display, advanced at each step.

    Raises:
        DataError: no data, or the checkpoint is of another network, other data or other settings.
        NumericError: the loss is NaN or infinite; the message names the step.
        OutputError: the checkpoint cannot be written.
    """
    settings, progress = settings or Settings(), progress or Silent()
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        check_target(path, (), force=True)
    device = next(iter(module.parameters())).device
    ways = _Ways(forward or module, teacher, loss, augment, dict(agree or {}))
    run = _Run(module, Batches(data, settings.batch, settings.seed), settings, tuple(quant), ways, device)
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
        run.finish()
    finally:
        progress.close()
    return run.done


LEAST_SIZE: Final = 1e-3
"""Lower bound of the mean magnitude by which the learning rate is scaled, because all biases may be 0 initially."""


OF_BIASES: Final = 0.1
"""Factor of the learning rate of biases and norms with "adam". A step of a bias or norm changes its output in full,
while the steps of an output's weights partly cancel each other."""


@dataclass(frozen=True)
class _Ways:
    """Networks, loss and augmentation of a training step; see `train` for the attributes."""

    forward: Callable[..., Mapping[str, Tensor]]
    teacher: Callable[..., Mapping[str, Tensor]]
    loss: Loss
    augment: Augment | None
    agree: Mapping[str, Any]


class _Run:
    """State of a training run, which a checkpoint saves and restores."""

    def __init__(
        self,
        module: nn.Module,
        batches: Batches,
        settings: Settings,
        quant: tuple[Tensor, ...],
        ways: _Ways,
        device: torch.device,
    ) -> None:
        self.module, self.batches, self.settings = module, batches, settings
        self.ways, self.device = ways, device
        self.steps = settings.epochs * len(batches)
        self.done = Trained()
        self._optimizer = _optimizer(module, settings, {id(one) for one in quant})
        self._average = Average(module, settings.ema) if settings.ema else None
        self._sum = 0.0  # sum of the losses in the current epoch

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be equal in a checkpoint."""
        shapes = {name: tuple(value.shape) for name, value in self.module.state_dict().items() if _is_tensor(value)}
        known = {"settings": asdict(self.settings), "samples": self.batches.samples, "shapes": shapes}
        return {**known, **self.ways.agree}

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
        """Train on one batch."""
        number = self.done.steps
        pace = self.settings.pace(number, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * pace
        self.module.train()
        freeze_norms(self.module, frozen=number >= self.settings.freeze_norms * self.steps)
        if self.ways.augment is not None:
            chance = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
            batch = self.ways.augment(batch, chance)
        with torch.no_grad():
            targets = self.ways.teacher(**batch)
        self._optimizer.zero_grad(set_to_none=True)
        value = self.ways.loss(self.ways.forward(**batch), targets)
        value.backward()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self._optimizer.step()
        if self._average is not None:
            self._average.add(self.module)
        self._told(float(value.detach()))

    def _told(self, value: float) -> None:
        """Record the loss of a step.

        Raises:
            NumericError: the loss is NaN or infinite.
        """
        self.done.steps += 1
        if value != value or value in (float("inf"), float("-inf")):
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
        """Return the state for a checkpoint."""
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
        """Restore the state of a checkpoint."""
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._average is not None and state["average"] is not None:
            self._average.restore(state["average"])
        self.done = Trained(state["steps"], list(state["losses"]), state["steps"])
        self._sum = state["sum"]
        torch.set_rng_state(state["chance"])


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


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
    """Create the optimizer, with one group and learning rate for each parameter; the schedule scales "highest".

    Raises:
        DataError: no parameter is trainable.
    """
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
        raise DataError("the module has no parameter that is to be learned")
    if adam:
        return torch.optim.AdamW(groups, lr=settings.lr)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=MOMENTUM, nesterov=True)
