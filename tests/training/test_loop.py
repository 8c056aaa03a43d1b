"""Training: the same seed gives the same parameters, an interruption changes nothing, and losses fall."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from sbonnx.errors import DataError, NumericError, OutputError
from sbonnx.training.batches import ShuffledBatches
from sbonnx.training.checkpoint import Average
from sbonnx.training.distillation import distillation, divergence, relative_error, with_divergence
from sbonnx.training.loop import Objective, Settings, freeze_norms, train

SHORT = Settings(epochs=4, batch=8, lr=0.1, check_every=3)


class Net(nn.Module):  # type: ignore[misc]
    """A few layers with a norm and a number that stands for a scale."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.tensor(0.01))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.last(torch.relu(self.norm(self.first(x)))) * (self.scale * 100)}


DATA = [{"x": np.random.default_rng(seed).standard_normal((5, 6)).astype(np.float32)} for seed in range(6)]


def teacher() -> nn.Module:
    return Net(1).eval()


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_losses_fall_and_the_seed_decides() -> None:
    start = Net(0)
    found = []
    for seed in (0, 0, 1):
        module = copy.deepcopy(start)
        done = train(module, DATA, Objective(teacher()), replace(SHORT, epochs=12, seed=seed), quant=[module.scale])
        assert done.steps == 12 * 4 and len(done.losses) == 12
        assert done.losses[-1] < 0.5 * done.losses[0]
        assert not module.training
        found.append(parameters(module))
    assert same(found[0], found[1]) and not same(found[0], found[2])


@pytest.mark.parametrize("settings", [SHORT, replace(SHORT, ema=0.9), replace(SHORT, optimizer="sgd", clip=1.0)])
@pytest.mark.parametrize("stop", [1, 4, 7, 15])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(settings: Settings, stop: int, tmp_path: Path) -> None:
    """Killed at any step: what lies in the file goes on to the very same parameters."""
    whole, cut = Net(0), Net(0)
    train(whole, DATA, Objective(teacher()), settings, quant=[whole.scale])

    class Killed(Exception):
        pass

    seen = 0

    def dies(batch: dict[str, torch.Tensor], chance: torch.Generator) -> dict[str, torch.Tensor]:
        nonlocal seen
        seen += 1
        if seen > stop:
            raise Killed
        return batch

    path = tmp_path / "run.pt"
    with pytest.raises(Killed):
        train(cut, DATA, Objective(teacher(), augment=dies), settings, quant=[cut.scale], checkpoint=path)
    again = Net(0)
    done = train(again, DATA, Objective(teacher()), settings, quant=[again.scale], checkpoint=path)
    written = [step for step in range(1, stop + 1) if step % settings.check_every == 0 or step % 4 == 0]
    assert done.resumed == max(written, default=0)
    assert same(parameters(whole), parameters(again))
    assert sorted(path.parent.iterdir()) == [path]


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    module = Net(0)
    train(module, DATA, Objective(teacher()), SHORT, checkpoint=path)
    with pytest.raises(DataError, match=r"checkpoint of other settings \(lr: 0.1, not 0.2\)"):
        train(Net(0), DATA, Objective(teacher()), replace(SHORT, lr=0.2), checkpoint=path)
    with pytest.raises(DataError, match=r"checkpoint of other samples \(30, not 25\)"):
        train(Net(0), DATA[:5], Objective(teacher()), SHORT, checkpoint=path)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3),
        [1, 2],
        {"a": 1},
        {"identity": 3},
        {"identity": {}},
        (),
        None,
        b"text",
        Settings(),
        nn.Linear(2, 2),
    ],
)
def test_a_file_that_is_no_checkpoint(other: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    if isinstance(other, bytes):
        path.write_bytes(other)
    else:
        torch.save(other, path)
    with pytest.raises(DataError, match="is not a training checkpoint"):
        train(Net(0), DATA, Objective(teacher()), SHORT, checkpoint=path)


def test_a_fifo_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.pt")
    with pytest.raises(OutputError, match="is a FIFO"):
        train(Net(0), DATA, Objective(teacher()), SHORT, checkpoint=tmp_path / "run.pt")
    with pytest.raises(OutputError, match="there is no folder"):
        train(Net(0), DATA, Objective(teacher()), SHORT, checkpoint=tmp_path / "none" / "run.pt")


def test_the_learning_rate_of_a_scale_is_relative() -> None:
    """A scale of 0.01 moves by parts of itself, however large the learning rate of weights is."""
    module = Net(0)
    before = float(module.scale.detach())
    train(
        module,
        DATA,
        Objective(teacher()),
        replace(SHORT, epochs=1, lr=0.0, quant_lr=1e-2, warmup=0.0),
        quant=[module.scale],
    )
    assert 0 < abs(float(module.scale.detach()) / before - 1) <= 4 * 1e-2 * 1.01
    assert torch.equal(module.first.weight, Net(0).first.weight)


def test_norms_are_frozen_after_their_share_of_steps() -> None:
    module, other = Net(0), Net(0)
    train(module, DATA, Objective(teacher()), replace(SHORT, freeze_norms=0.0))
    assert torch.equal(module.norm.running_mean, Net(0).norm.running_mean)
    assert module.norm.num_batches_tracked == 0
    train(other, DATA, Objective(teacher()), replace(SHORT, freeze_norms=0.5))
    assert other.norm.num_batches_tracked == 8
    other.train()
    freeze_norms(other)
    assert other.training and not other.norm.training


def test_the_average_is_that_of_the_steps() -> None:
    module = nn.Linear(2, 1, bias=False)
    average, decay, values = Average(module, 0.75), 0.75, [1.0, -2.0, 4.0]
    for value in values:
        nn.init.constant_(module.weight, value)
        average.add(module)
    weights = [(1 - decay) * decay ** (len(values) - 1 - at) for at in range(len(values))]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    average.load_into(module)
    assert module.weight.detach().numpy() == pytest.approx(expected, rel=1e-6)


def test_pace() -> None:
    settings = Settings(warmup=0.1, last_lr=0.2)
    paces = [settings.pace(step, 100) for step in range(100)]
    assert paces[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert paces[10] == 1.0 and paces[55] == pytest.approx(0.6)
    assert all(one >= other for one, other in itertools.pairwise(paces[10:])) and paces[-1] > 0.2


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"epochs": 0}, "epochs must be 1 or more, got 0"),
        ({"lr": float("nan")}, "lr must be 0 or more"),
        ({"warmup": 1.5}, "warmup must be within 0 and 1"),
        ({"ema": 1.0}, "ema must be"),
        ({"optimizer": "lion"}, "optimizer must be adam or sgd, got lion"),
    ],
)
def test_settings_that_make_no_sense(wishes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**wishes)  # type: ignore[arg-type]


def test_a_loss_that_is_no_number() -> None:
    module = Net(0)
    with pytest.raises(NumericError, match="the loss is nan at step 1: train with a smaller lr"):
        train(module, DATA, Objective(teacher(), lambda outputs, targets: outputs["y"].sum() * float("nan")), SHORT)


def test_batches_hold_every_sample_once_an_epoch() -> None:
    """Samples of two lengths never meet; feeds that cannot be cut stay whole."""
    short = [{"ids": np.arange(3 * at, 3 * at + 3).reshape(1, 3)} for at in range(5)]
    long = [{"ids": np.arange(100, 108).reshape(2, 4)}]
    batches = ShuffledBatches([*short, *long], 2, seed=0)
    assert (batches.samples, len(batches)) == (7, 4)
    epochs = [[batch["ids"] for batch in batches.epoch(number)] for number in (0, 0, 1)]
    for epoch in epochs:
        assert len(epoch) == 4
        rows = sorted(tuple(row.tolist()) for batch in epoch for row in batch)
        assert rows == sorted(tuple(row.tolist()) for feed in [*short, *long] for row in feed["ids"])
    assert all(torch.equal(one, other) for one, other in zip(epochs[0], epochs[1], strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(epochs[0], epochs[2], strict=True))
    state = [{"x": np.zeros((4, 2), np.float32), "state": np.zeros((1, 2), np.float32)}]
    (whole,) = list(ShuffledBatches(state, 2, 0).epoch(0))
    assert whole["x"].shape == (4, 2) and ShuffledBatches(state, 2, 0).samples == 1
    with pytest.raises(DataError, match="no samples to train on"):
        ShuffledBatches([], 2, 0)


def test_distillation() -> None:
    """Nothing is lost where outputs are the targets; classes by torch's own divergence."""
    targets = {"logits": torch.randn(6, 5), "map": torch.randn(2, 3, 4), "ids": torch.arange(3)}
    for loss in (distillation, with_divergence):
        assert float(loss(targets, targets)) == pytest.approx(0, abs=1e-6)
    outputs = {**targets, "logits": targets["logits"] + 0.3 * torch.randn(6, 5), "map": torch.zeros(2, 3, 4)}
    p, q = (torch.softmax(each["logits"].double(), 1) for each in (targets, outputs))
    expected = (p * (p.log() - q.log())).sum(1).mean()
    assert float(divergence(outputs["logits"], targets["logits"])) == pytest.approx(float(expected), rel=1e-4)
    error = relative_error(outputs["map"], targets["map"])
    assert float(error) == pytest.approx(
        float((targets["map"] ** 2).sum() / ((targets["map"] - targets["map"].mean()) ** 2).sum()), rel=1e-5
    )
    logits = relative_error(outputs["logits"], targets["logits"])
    assert float(distillation(outputs, targets)) == pytest.approx((float(logits) + float(error)) / 2, rel=1e-4)
    whole = (float(expected) + 0.5 * float(logits) + float(error)) / 2
    assert float(with_divergence(outputs, targets)) == pytest.approx(whole, rel=1e-4)
    with pytest.raises(DataError, match="no float output"):
        distillation(targets, {"ids": torch.arange(3)})
