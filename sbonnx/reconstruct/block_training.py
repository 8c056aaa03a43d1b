"""Block reconstruction: optimizes the weight rounding of one block on batches of its input activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.sample_runner import last_reads
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import ModelError
from sbonnx.reconstruct.soft_block import BESIDE, SoftBlock
from sbonnx.rounding.adaround import SETTLINGS, Choice, SoftBlocks, pull
from sbonnx.spec import Array, Bounds, QParams
from sbonnx.torchnet import Unfit, as_tensor

FLOAT, QUANTIZED = False, True
"""Keys of the two streams."""


class ActivationPairs:
    """Activations by stream, sample and name, until the last piece that reads them has run.

    Tensors that were put into the float stream alone (inputs of the model) are returned for both.

    Args:
        pieces: in the order to run them.
        store: holds the arrays, within its budget.
    """

    def __init__(self, pieces: Sequence[Segment], store: TensorStore) -> None:
        self._store = store
        self._last = last_reads(pieces)
        self._pieces = tuple(pieces)
        self._names: dict[int, list[str]] = {}  # tensors that are dropped after each piece
        for number, piece in enumerate(pieces):
            for name in dict.fromkeys([*piece.reads, *piece.outputs]):
                self._names.setdefault(max(self._last.get(name, -1), number), []).append(name)

    def put(self, stream: bool, unit: Sample, values: Mapping[str, Any], names: Iterable[str]) -> None:
        """Store copies of these tensors."""
        for name in names:
            self._store.put((stream, unit.index, name), np.asarray(values[name]), copy=True)

    def get(self, stream: bool, index: int, name: str) -> Array:
        """Return a tensor of a sample in a stream."""
        key = (stream, index, name)
        return self._store.get(key if key in self._store else (FLOAT, index, name))

    def has_two(self, index: int, name: str) -> bool:
        """Return whether a tensor differs between the streams."""
        return (QUANTIZED, index, name) in self._store

    def reads(self, stream: bool, number: int, unit: Sample) -> dict[str, Array]:
        """Return all tensors that a piece reads of a sample."""
        return {name: self.get(stream, unit.index, name) for name in self._pieces[number].reads}

    def done(self, number: int, units: Iterable[Sample]) -> None:
        """Drop the tensors that no piece after this one reads."""
        names = set(self._names.get(number, ()))
        for unit in units:
            for name in names:
                for stream in (FLOAT, QUANTIZED):
                    self._store.drop((stream, unit.index, name))


SAME: Final = 1e-3
"""Largest tolerated difference between samples run together and one by one, relative to the largest output."""

FEW: Final = 16
"""Integer tensors with at most this many elements are shapes and axes: equal in all samples of a batch, not stacked."""

PULL: Final = 48.0
"""Factor of the regularizer's weight, relative to the mean part of one weight in the error of the nearest codes.

It is 12 for the error of one whole code (the error of a uniform distribution is 1/12) times 4 because gradients of
batches are noisy (measured: 2 to 8 give the same quality).
"""

Weights = Mapping[str, tuple[Array, Array, QParams]]
"""By site key: float values, initial codes, scale and zero point."""


@dataclass(frozen=True)
class BlockResult:
    """Result of the optimization of one block.

    Attributes:
        codes: of weights by site key.
        bounds: of activations whose scale was learned, by site key.
        biases: by name of the constant, float32.
        error, start, nearest: error of the block outputs with this result, with the initial codes, and with the nearest
            codes; relative to the nearest codes, which have 1.
    """

    codes: Mapping[str, Array]
    bounds: Mapping[str, Bounds]
    biases: Mapping[str, Array]
    error: float
    start: float
    nearest: float = 1.0


@dataclass
class BlockBatches:
    """Batches of a block's input activations, built from the stored activations of single samples.

    Args:
        streams: stored activations of both streams.
        segment: the block.
        samples: indices of the samples.
        device: torch device name.
    """

    torch: Any
    streams: ActivationPairs
    segment: Segment
    samples: Sequence[int]
    device: str
    together: bool = field(default=True)

    def batch(self, picks: Sequence[int]) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield as few batches as possible: (number of samples, block inputs, block outputs in the float network).

        Samples of different shapes form separate batches. If samples cannot be stacked, each one is a batch.
        """
        groups: dict[object, list[int]] = {}
        for number, pick in enumerate(picks):
            groups.setdefault(self._alike(pick) if self.together else number, []).append(pick)
        for group in groups.values():
            feeds: dict[str, Any] = {}
            for name in self.segment.inputs:
                feeds[name] = self._stacked(QUANTIZED, name, group)
                if feeds[name].dtype.is_floating_point:
                    two = any(self.streams.has_two(pick, name) for pick in group)
                    feeds[name + BESIDE] = self._stacked(FLOAT, name, group) if two else feeds[name]
            yield len(group), feeds, {name: self._stacked(FLOAT, name, group) for name in self.segment.observed}

    def all(self, size: int) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield batches of all samples once."""
        for begin in range(0, len(self.samples), size):
            yield from self.batch(self.samples[begin : begin + size])

    def _alike(self, pick: int) -> object:
        """Return a key that is equal for samples that can be stacked."""
        values = [(name, self.streams.get(QUANTIZED, pick, name)) for name in self.segment.inputs]
        return tuple((name, x.shape, x.tobytes() if _is_shape(x) else b"") for name, x in values)

    def _stacked(self, stream: bool, name: str, group: Sequence[int]) -> Any:
        arrays = [self.streams.get(stream, pick, name) for pick in group]
        whole = arrays[0] if len(arrays) == 1 or _is_shape(arrays[0]) else np.concatenate(arrays)
        return as_tensor(self.torch, whole, self.device)


def _is_shape(x: Array) -> bool:
    return x.dtype.kind in "iub" and (x.ndim == 0 or (x.ndim == 1 and x.size <= FEW))


class BlockTrainer:
    """Trainer of one block: optimizes codes, activation scales and biases.

    Args:
        block: see `SoftBlock`.
        batches: input activations of the block.
        weights: the weights to round.
        biases: float32 values of the trainable biases, by name of the constant.
        scales: keys of activations in the block whose scale is used only by this block.
        settings: see `SoftBlocks`.
        seed: seed of random draws.
    """

    def __init__(
        self,
        block: SoftBlock,
        batches: BlockBatches,
        weights: Weights,
        biases: Mapping[str, Array],
        scales: Sequence[str],
        settings: SoftBlocks,
        seed: int,
    ) -> None:
        self.torch, self.block, self.batches, self.settings = block.torch, block, batches, settings
        self._weights = weights
        self._random = np.random.default_rng(seed)
        block.generator.manual_seed(seed)
        self._biases = {name: as_tensor(self.torch, values, block.device) for name, values in biases.items()}
        self._scales = list(scales) if settings.scale_lr > 0 else []
        self._totals: dict[str, float] = {}

    def learn(self) -> BlockResult:
        """Run the optimization and return the best of the nearest, the initial and the learned codes.

        Raises:
            ModelError: torch fails at a node.
        """
        self.batches.together = self._may_stack()
        first = {key: codes for key, (_, codes, _) in self._weights.items()}
        plain = {key: qparams.quantize(weight) for key, (weight, _, qparams) in self._weights.items()}
        nearest = self._errors(self._meanings(plain))
        self._totals = {name: error for name, error in nearest.items() if error > 0 and np.isfinite(error)}
        start = self._error(self._errors(self._meanings(first)))
        best = BlockResult(first, {}, {}, start, start) if start <= 1.0 else BlockResult(plain, {}, {}, 1.0, start)
        if not self._totals:
            return best
        choices = {
            key: Choice(self.torch, weight, codes, qparams, self.block.device)
            for key, (weight, codes, qparams) in self._weights.items()
        }
        shifts = self._descend(choices)
        codes = {key: choice.chosen() for key, choice in choices.items()}
        biases = {name: self._biases[name] + shifts[name].detach() for name in shifts}
        error = self._error(self._errors({**self._meanings(codes), **biases}))
        ranges = {key: self.block.reads[key].bounds() for key in self._scales}
        if not np.isfinite(error) or error >= best.error:
            return best
        return BlockResult(
            codes,
            {key: bounds for key, bounds in ranges.items() if bounds is not None},
            {name: np.asarray(values.cpu().numpy()) for name, values in biases.items()},
            error,
            start,
        )

    def _descend(self, choices: Mapping[str, Choice]) -> dict[str, Any]:
        torch, settings = self.torch, self.settings
        parts = [{"params": [choice.u for choice in choices.values()], "lr": settings.lr}]
        for key in self._scales:
            self.block.reads[key].part = torch.zeros((), device=self.block.device, requires_grad=True)
        parts.append({"params": [self.block.reads[key].part for key in self._scales], "lr": settings.scale_lr})
        shifts = {}
        if settings.bias_lr > 0:
            for name, values in self._biases.items():
                shifts[name] = torch.zeros_like(values).requires_grad_(True)
                size = float(values.std(correction=0)) or 1.0
                parts.append({"params": [shifts[name]], "lr": settings.bias_lr * size})
        parts = [part for part in parts if part["params"]]
        optimizer = torch.optim.Adam(parts)
        rates = [part["lr"] for part in optimizer.param_groups]
        self.block.drop = settings.drop
        every = max(settings.iterations // SETTLINGS, 1)
        for step in range(settings.iterations):
            for part, rate in zip(optimizer.param_groups[1:], rates[1:], strict=True):
                part["lr"] = rate * settings.pace(step)
            if step % every == 0:
                for choice in choices.values():
                    choice.settle(settings.settled(step))
            optimizer.zero_grad(set_to_none=True)
            self._step(choices, shifts, settings.beta(step))
            optimizer.step()
        self.block.drop = 0.0
        return shifts

    def _step(self, choices: Mapping[str, Choice], shifts: Mapping[str, Any], beta: float | None) -> None:
        samples = self.batches.samples
        size = min(self.settings.batch, len(samples))
        picks = [samples[int(at)] for at in self._random.choice(len(samples), size, replace=False)]
        count = sum(choice.u.numel() for choice in choices.values())
        for _, feeds, targets in self.batches.batch(picks):
            values = {key: choice.values(choice.h()) for key, choice in choices.items()}
            values.update({name: self._biases[name] + shift for name, shift in shifts.items()})
            loss = self._loss(self.block(feeds, {**self._biases, **values}), targets) * (1.0 / size)
            loss.backward()
        if beta is not None:
            pulls = sum(pull(choice.h(), beta) for choice in choices.values())
            (pulls * (self.settings.weight * PULL / count)).backward()

    def _loss(self, outputs: Mapping[str, Any], targets: Mapping[str, Any]) -> Any:
        """Return the squared error relative to the nearest codes, summed over samples, averaged over outputs."""
        parts = [
            ((outputs[name] - targets[name]) ** 2).sum() * (len(self.batches.samples) / total)
            for name, total in self._totals.items()
        ]
        return sum(parts[1:], parts[0]) / len(parts)

    def _errors(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the squared error of each output, summed over all samples, without random dropping."""
        totals = dict.fromkeys(self.batches.segment.observed, 0.0)
        with self.torch.no_grad():
            for _, feeds, targets in self.batches.all(self.settings.batch):
                made = self.block(feeds, {**self._biases, **values})
                for name in totals:
                    totals[name] += float(((made[name] - targets[name]) ** 2).sum(dtype=self.torch.float64))
        return totals

    def _error(self, errors: Mapping[str, float]) -> float:
        """Return the error as in `_loss`: 1 for the nearest codes."""
        parts = [errors[name] / total for name, total in self._totals.items()]
        return float(np.mean(parts)) if parts else 1.0

    def _meanings(self, codes: Mapping[str, Array]) -> dict[str, Any]:
        return {
            key: as_tensor(self.torch, self._weights[key][2].dequantize(each), self.block.device)
            for key, each in codes.items()
        }

    def _may_stack(self) -> bool:
        """Return whether two samples give the same outputs in one batch as separately."""
        if len(self.batches.samples) < 2:
            return False
        initial = {key: codes for key, (_, codes, _) in self._weights.items()}
        values = {**self._biases, **self._meanings(initial)}
        pair = self.batches.samples[:2]
        with self.torch.no_grad():
            together = list(self.batches.batch(pair))
            if len(together) != 1:
                return True  # samples of different shapes are never stacked
            try:
                both = self.block(together[0][1], values)
            except (ModelError, Unfit):
                return False
            each = [self.block(feeds, values) for pick in pair for _, feeds, _ in self.batches.batch([pick])]
        for name in self.batches.segment.observed:
            apart = [one[name] for one in each]
            if any(x.dim() == 0 for x in apart) or both[name].shape[0] != sum(x.shape[0] for x in apart):
                return False
            joined = self.torch.cat(apart)
            room = SAME * max(float(joined.abs().max()), 1e-30)
            if joined.shape != both[name].shape or float((joined - both[name]).abs().max()) > room:
                return False
        return True
