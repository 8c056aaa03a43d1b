"""Quantizers compared at 8 bits: ours and the peers' documented settings, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

OURS: Final = "sbonnx"
LEARNED_ON: Final = ("cifar_resnet20", "squeezenet11")
"""Models on which peers that learn layer by layer run: elsewhere a run takes far more than ten minutes."""


@dataclass(frozen=True)
class Way:
    """One setting of a quantizer.

    Attributes:
        quantizer: `OURS`, or a name of `benchmarks.peers.environments.PEERS`.
        method, scheme: method and range scheme, as named by the peer's script.
        flags: flags of our command.
        target: runtime that the file is for.
        only: models to run on; empty: all.
        samples: maximum number of calibration samples; None: all.
    """

    quantizer: str
    method: str = ""
    scheme: str = ""
    flags: tuple[str, ...] = ()
    target: str = "onnxruntime"
    only: tuple[str, ...] = ()
    samples: int | None = None


TOOLS: Final[Mapping[str, str]] = {
    OURS: "sbonnx",
    "nncf": "NNCF",
    "onnxruntime": "onnxruntime.quantization",
    "quark": "Quark",
    "aimet": "AIMET",
    "modelopt": "ModelOpt",
}
"""Name of each quantizer in the tables, in the order of their rows."""


def ours(rungs: tuple[str, ...]) -> dict[str, Way]:
    """Return our settings by values of EFFORT; the default needs no flag."""
    return {
        f"sbonnx {rung}": Way(OURS, flags=() if rung == "default" else ("--set", f"EFFORT={rung}")) for rung in rungs
    }


_SQNR: Final = "tf_enhanced"
_SQNR_INPUTS: Final = "activations:tf_enhanced"
_FEW: Final = 64

PEERS: Final[Mapping[str, Way]] = {
    "NNCF fast bias correction": Way("nncf", "nearest"),
    "onnxruntime MinMax u8s8 channel": Way("onnxruntime", "MinMax", "u8s8 channel"),
    "NNCF accurate bias correction": Way("nncf", "accurate"),
    "onnxruntime Percentile u8s8 channel": Way("onnxruntime", "Percentile", "u8s8 channel"),
    "AIMET SQNR activations": Way("aimet", "nearest", _SQNR_INPUTS),
    "Quark percentile": Way("quark", "nearest", "percentile"),
    "TensorRT ModelOpt max": Way("modelopt", "max", target="tensorrt"),
    "TensorRT onnxruntime MinMax": Way("onnxruntime", "MinMax", "tensorrt", target="tensorrt"),
    "Quark min-max": Way("quark", "nearest", "min_max"),
    "AIMET min-max": Way("aimet", "nearest", "min_max"),
    "AIMET AdaRound": Way("aimet", "adaround", _SQNR_INPUTS, only=LEARNED_ON[:1], samples=_FEW),
    "Quark AdaRound": Way("quark", "adaround", "percentile", only=LEARNED_ON[:1], samples=_FEW),
    "onnxruntime MinMax s8s8 channel": Way("onnxruntime", "MinMax", "s8s8 channel"),
    "onnxruntime MinMax u8u8 channel": Way("onnxruntime", "MinMax", "u8u8 channel"),
    "TensorRT ModelOpt entropy": Way("modelopt", "entropy", target="tensorrt"),
    "TensorRT onnxruntime Percentile": Way("onnxruntime", "Percentile", "tensorrt", target="tensorrt"),
    "onnxruntime Entropy u8s8 channel": Way("onnxruntime", "Entropy", "u8s8 channel", only=LEARNED_ON),
    "onnxruntime MinMax u8s8 tensor": Way("onnxruntime", "MinMax", "u8s8 tensor"),
    "AIMET SeqMSE": Way("aimet", "seqmse", _SQNR_INPUTS, only=LEARNED_ON, samples=_FEW),
    "AIMET AdaRound, large": Way("aimet", "adaround", _SQNR_INPUTS, only=LEARNED_ON[1:], samples=_FEW),
    "AIMET SQNR": Way("aimet", "nearest", _SQNR),
    "onnxruntime Percentile u8u8 channel": Way("onnxruntime", "Percentile", "u8u8 channel"),
    "onnxruntime Percentile s8s8 channel": Way("onnxruntime", "Percentile", "s8s8 channel"),
    "AIMET percentile": Way("aimet", "nearest", "percentile"),
    "Quark AdaQuant": Way("quark", "adaquant", "percentile", only=LEARNED_ON, samples=_FEW),
    "Quark AdaRound, large": Way("quark", "adaround", "percentile", only=LEARNED_ON[1:], samples=_FEW),
    "onnxruntime MinMax u8u8 tensor": Way("onnxruntime", "MinMax", "u8u8 tensor"),
    "onnxruntime MinMax s8s8 tensor": Way("onnxruntime", "MinMax", "s8s8 tensor"),
}
"""Entropy of onnxruntime has the ranges of MinMax, as it has as many bins as codes: it runs on two models."""

OURS_TENSORRT: Final[Mapping[str, Way]] = {
    "TensorRT sbonnx": Way(OURS, flags=("--backend", "tensorrt"), target="tensorrt"),
}
