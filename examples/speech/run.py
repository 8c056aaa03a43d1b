"""Quantize a voice activity detector with one branch for each sample rate and a recurrent state.

    python -m examples.speech.run out/

Needs torch: ``pip install 'sbonnx[cpu,qat]'``.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from examples.commands import Figures, command, main, size
from examples.speech.recordings import HIDDEN, RATES, recordings
from examples.training import export, fit


class Branch(nn.Module):
    """Filter bank and convolutions for one sample rate, then an LSTM; a window to a probability."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.bank = nn.Conv1d(1, 32, 2 * stride, stride)
        self.layers = nn.Sequential(
            nn.Conv1d(32, 32, 3, 2, 1), nn.ReLU(), nn.Conv1d(32, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1)
        )
        self.recurrent, self.score = nn.LSTM(32, HIDDEN), nn.Linear(HIDDEN, 1)

    def features(self, window: Tensor) -> Tensor:
        """Return features (N, 32) of windows (N, samples)."""
        return self.layers(torch.log1p(self.bank(window[:, None]).square())).squeeze(-1)

    def forward(self, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability (N, 1) of a window, and the next state."""
        output, (hidden, cell) = self.recurrent(self.features(window)[None], (state[:1], state[1:]))
        return torch.sigmoid(self.score(output[0])), torch.cat([hidden, cell])


class Detector(nn.Module):
    """Voice activity in the form of silero_vad: `input` (N, samples), `state` (2, N, 24) and `sr`, the sample rate."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = Branch(16), Branch(8)

    def forward(self, input: Tensor, state: Tensor, sr: Tensor) -> tuple[Tensor, Tensor]:
        if bool(sr == 16000):
            result: tuple[Tensor, Tensor] = self.wide(input, state)
        else:
            result = self.narrow(input, state)
        return result


def loss(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Binary cross entropy of all windows of recordings (N, windows, samples)."""
    assert isinstance(network, Detector)
    total = torch.zeros(())
    for branch, audio, voiced in zip((network.wide, network.narrow), batch[:2], batch[2:], strict=True):
        features = branch.features(audio.flatten(0, 1)).unflatten(0, audio.shape[:2])
        scores = branch.score(branch.recurrent(features.transpose(0, 1))[0]).squeeze(-1)
        total = total + nn.functional.binary_cross_entropy_with_logits(scores.T, voiced)
    return total


def prepare() -> None:
    """Train detector.onnx, whose If has one branch for each sample rate; copy recordings.py, which has the feeds."""
    torch.manual_seed(0)
    parts = [recordings(160, rate, seed=1) for rate in RATES]
    data = [torch.from_numpy(array) for arrays in zip(*parts, strict=True) for array in arrays]
    network = fit(Detector(), data, loss, epochs=10, batch=16, lr=1e-2)
    inputs = {"input": data[0][:1, 0], "state": torch.zeros(2, 1, HIDDEN), "sr": torch.tensor(RATES[0])}
    axes = {"input": {0: "N", 1: "samples"}, "state": {1: "N"}, "output": {0: "N"}, "stateN": {1: "N"}}
    export(torch.jit.script(network), inputs, ["output", "stateN"], "detector.onnx", axes)
    shutil.copy(Path(__file__).with_name("recordings.py"), ".")


def f1(model: str, rate: int) -> float:
    """Return the F1 score of the decisions on 40 new recordings, the state passed on from window to window."""
    audio, voiced = recordings(40, rate, seed=2)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    state, scores = np.zeros((2, len(audio), HIDDEN), np.float32), []
    for window in audio.transpose(1, 0, 2):
        score, state = session.run(None, {"input": window, "state": state, "sr": np.array(rate)})
        scores.append(score[:, 0])
    found = np.stack(scores, 1) > 0.5
    return float(2 * (found * voiced).sum() / (found.sum() + voiced.sum()))


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    quantize = "sbonnx quantize detector.onnx --feedback stateN=state"
    command(f"{quantize} --data recordings.py:both_rates -o int8.onnx")
    command(f"{quantize} --data recordings.py:wide_only -o wide.onnx")
    figures = {
        f"F1 {model} {rate} Hz": f1(model, rate)
        for model in ("detector.onnx", "int8.onnx", "wide.onnx")
        for rate in RATES
    }
    return figures | {f"kB {model}": size(model) for model in ("detector.onnx", "int8.onnx", "wide.onnx")}


if __name__ == "__main__":
    main(run, __doc__)
