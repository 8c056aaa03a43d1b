"""Cases whose output files are compared with recorded digests: a model, samples, and a call that writes files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import yaml

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx.assets import digits
from sbonnx.cli import main
from tests.conftest import PACK
from tests.fuzz import seeds
from tests.support.normed import images, zoo

QUANTIZED: Final = "quantized.onnx"


@dataclass(frozen=True)
class Subject:
    """A float model and its samples.

    Attributes:
        model: path or model.
        feeds: batches of samples, by input name.
    """

    model: Path | onnx.ModelProto
    feeds: list[dict[str, Any]]

    def written(self, folder: Path) -> tuple[Path, Path]:
        """Model and samples as files in `folder`."""
        path, data = folder / "float.onnx", folder / "data"
        onnx.save(onnx.load(self.model) if isinstance(self.model, Path) else self.model, path)
        data.mkdir()
        for number, feed in enumerate(self.feeds):
            np.savez(data / f"{number:04}.npz", **feed)
        return path, data


def _batches(data: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    count = len(next(iter(data.values())))
    return [{name: x[start : start + size] for name, x in data.items()} for start in range(0, count, size)]


def _digits() -> Subject:
    return Subject(Path(digits().model), _batches({"image": np.load(digits().calib)["image"][:32]}, 8))


def _zoo() -> Subject:
    """Depthwise, grouped and transposed convolutions, products, batch norms."""
    samples = images(24)
    return Subject(zoo(samples), _batches({"x": samples}, 8))


def _attention() -> Subject:
    proto = onnx.load_from_string(seeds.seed("attention"))
    return Subject(proto, [seeds.arrays(proto, 4) for _ in range(4)])


def _of_pack(name: str, count: int) -> Subject:
    return Subject(PACK / "models" / f"{name}.onnx", load_pack(PACK).load_calib(name, limit=count))


SUBJECTS: Final[Mapping[str, Callable[[], Subject]]] = {
    "digits": _digits,
    "zoo": _zoo,
    "attention": _attention,
    "cifar_resnet20": partial(_of_pack, "cifar_resnet20", 16),
    "squeezenet11": partial(_of_pack, "squeezenet11", 4),
    "mobilenetv2_tin200": partial(_of_pack, "mobilenetv2_tin200", 4),
    "minilm_l6": partial(_of_pack, "minilm_l6", 4),
    "fastestdet": partial(_of_pack, "fastestdet", 2),
    "silero_vad": partial(_of_pack, "silero_vad", 24),
}
PACKED: Final = tuple(SUBJECTS)[3:]
"""Subjects that are read from the folder of real models."""

Write = Callable[[Subject, Path], object]
"""Writes files of a subject into an empty folder."""


def quantized(subject: Subject, folder: Path, **wishes: Any) -> None:
    """`sbonnx.quantize`."""
    sbonnx.quantize(subject.model, subject.feeds, output=folder / QUANTIZED, verify=False, **wishes)


def by_command(*flags: str) -> Write:
    """A run of the command line: `{model}`, `{data}` and `{out}` stand for the files."""

    def write(subject: Subject, folder: Path) -> None:
        inputs = folder.parent / "inputs"
        inputs.mkdir()
        model, data = subject.written(inputs)
        assert main([flag.format(model=model, data=data, out=folder / QUANTIZED) for flag in flags]) in (0, 1)

    return write


def requantized(subject: Subject, folder: Path) -> None:
    """8 bits in blocks of QOperator form, made float again, then 4 bits."""
    first = folder.parent / "first.onnx"
    sbonnx.quantize(subject.model, subject.feeds, output=first, verify=False, format="qoperator")
    sbonnx.quantize(first, subject.feeds, output=folder / QUANTIZED, verify=False, requantize=True, bits="w4a8")


def fixed(subject: Subject, folder: Path) -> None:
    """A file for onnxruntime, changed by ``lint --fix`` into one for TensorRT."""
    first = folder.parent / "first.onnx"
    sbonnx.quantize(subject.model, subject.feeds, output=first, verify=False, a_qscheme="per-tensor-symmetric")
    assert main(["lint", str(first), "--target", "tensorrt@10", "--fix", "-o", str(folder / QUANTIZED)]) in (0, 1)


def with_cache(subject: Subject, folder: Path) -> None:
    """From cached statistics, with TensorRT's calibration cache and the recipe that was run."""
    cache, first = folder.parent / "cache", folder.parent / "first.onnx"
    for target in (first, folder / QUANTIZED):
        sbonnx.quantize(
            subject.model,
            subject.feeds,
            backend="tensorrt",
            output=target,
            verify=False,
            cache=str(cache),
            trt_cache=folder / "calibration.cache" if target != first else None,
            save_recipe=folder / "recipe.yaml" if target != first else None,
        )
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace(str(cache), "CACHE"))


def by_batch(subject: Subject, folder: Path) -> None:
    """Two jobs of one model that share a calibration."""
    inputs = folder.parent / "inputs"
    inputs.mkdir()
    model, data = subject.written(inputs)
    jobs = {
        "output": str(folder.parent / "out"),
        "jobs": [
            {"model": str(model), "data": str(data), "name": "a", "bits": "w8a8"},
            {"model": str(model), "data": str(data), "name": "b", "bits": "w4a8"},
        ],
    }
    (inputs / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    assert main(["batch", str(inputs / "jobs.yaml"), "--workers", "1"]) == 0
    for path in (folder.parent / "out").glob("*.onnx"):
        path.rename(folder / path.name)


def by_life_cycle(subject: Subject, folder: Path) -> None:
    """The ancestor's calls, one after the other."""
    with sbonnx.QuantModel(subject.model, {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 4}}}) as model:
        model.prepare_calibration()
        for feed in subject.feeds:
            model.forward(feed)
        model.calc_qparams()
        model.export_onnx(folder / QUANTIZED)


def by_training(subject: Subject, folder: Path) -> None:
    """Re-imported to torch, and exported without training."""
    import sbonnx.qat

    module = sbonnx.qat.prepare(subject.model, subject.feeds, bits="w4a4", backend="virtual")
    sbonnx.qat.export(module, folder / QUANTIZED, subject.feeds)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        subject: name of `SUBJECTS`.
        write: the call.
        torch: it needs torch.
    """

    subject: str
    write: Write
    torch: bool = False

    @property
    def packed(self) -> bool:
        """Whether the model is one of the folder of real models."""
        return self.subject in PACKED


def _quantize(subject: str, *, torch: bool = False, **wishes: Any) -> Case:
    return Case(subject, partial(quantized, **wishes), torch)


_VIRTUAL: Final[dict[str, Any]] = {"backend": "virtual"}
_NEAREST: Final[dict[str, Any]] = {"rounding": "nearest"}
_BLOCKS: Final[dict[str, Any]] = {"MODE": "weight_only", "w_bit": 4, "block_size": 32}
_QUICK: Final[dict[str, Any]] = {"W.ROUNDING.GPTQ.BEAMS": 1, "W.ROUNDING.GPTQ.STEPS": 0}
_FLOAT_INPUTS: Final[dict[str, Any]] = {"CALIBRATION.MOMENTS.INPUTS": "float"}
_FEW: Final[dict[str, Any]] = {"W.ROUNDING.ADAROUND.ITERATIONS": 100, "W.ROUNDING.ADAQUANT.ITERATIONS": 50}

CASES: Final[Mapping[str, Case]] = {
    # widths and backends
    "digits, onnxruntime w8a8": _quantize("digits"),
    "digits, tensorrt w8a8": _quantize("digits", backend="tensorrt"),
    "digits, virtual w8a8": _quantize("digits", **_VIRTUAL),
    "digits, onnxruntime w4a8": _quantize("digits", bits="w4a8"),
    "digits, onnxruntime w8a16": _quantize("digits", bits="w8a16"),
    "digits, virtual w2a4": _quantize("digits", bits="w2a4", **_VIRTUAL),
    "digits, virtual w16a16": _quantize("digits", bits="w16a16", **_VIRTUAL),
    "digits, tensorrt fp8": _quantize("digits", backend="tensorrt@10", bits="fp8"),
    "digits, tensorrt fp16 remainder": _quantize("digits", backend="tensorrt", HIGH_PRECISION="fp16"),
    "digits, weights with Q": _quantize("digits", WEIGHTS="qdq"),
    "zoo, onnxruntime w8a8": _quantize("zoo"),
    "zoo, tensorrt w8a8": _quantize("zoo", backend="tensorrt"),
    "zoo, virtual w4a4": _quantize("zoo", bits="w4a4", **_VIRTUAL),
    "zoo, virtual w5a6 per channel": _quantize("zoo", bits="w5a6", a_qscheme="per-channel-affine", **_VIRTUAL),
    "zoo, first and last 8 bits": _quantize("zoo", bits="w4a4", FIRST_BITS="w8a8", LAST_BITS="w8a8", **_VIRTUAL),
    "attention, onnxruntime w8a8": _quantize("attention"),
    "attention, virtual w4a8": _quantize("attention", bits="w4a8", **_VIRTUAL),
    # forms and modes
    "zoo, qoperator": _quantize("zoo", format="qoperator"),
    "zoo, dynamic": _quantize("zoo", MODE="dynamic"),
    "attention, dynamic": _quantize("attention", MODE="dynamic"),
    "attention, blocks": _quantize("attention", MODE="weight_only", block_size=16, MIN_WEIGHT_SIZE=1),
    "zoo, float16 alone": _quantize("zoo", bits=32, HIGH_PRECISION="fp16", **_VIRTUAL),
    # observers
    **{
        f"zoo, {observer}": _quantize("zoo", observer=observer, **_NEAREST)
        for observer in ("minmax", "moving_average", "mse", "percentile", "kl_histogram", "aciq", "auto")
    },
    # rounding
    "zoo, gptq": _quantize("zoo", bits="w3a8", rounding="gptq", **_VIRTUAL),
    "zoo, gptq, quick": _quantize("zoo", bits="w4a8", **_QUICK),
    "zoo, adaround": _quantize("zoo", bits="w4a8", rounding="adaround", **_VIRTUAL, **_FEW),
    "zoo, adaquant": _quantize("zoo", bits="w3a8", rounding="adaquant", **_VIRTUAL, **_FEW),
    "zoo, hqq": _quantize(
        "zoo", bits="w4a8", w_qscheme="per-channel-affine", weight_scale="hqq", **_NEAREST, **_VIRTUAL
    ),
    "zoo, float inputs": _quantize("zoo", bits="w4a8", **_FLOAT_INPUTS),
    # equalization and correction
    "zoo, cross layer": _quantize("zoo", cross_layer=True, absorb_bias=True, **_NEAREST),
    "zoo, smooth quant": _quantize("zoo", smooth_quant=True, **_NEAREST),
    "attention, awq": _quantize("attention", awq=True, MIN_WEIGHT_SIZE=1, **{**_BLOCKS, "block_size": 16}),
    "zoo, batch norms tuned": _quantize("zoo", bits="w4a8", bn_tuning=True, **_VIRTUAL),
    "zoo, analytic biases": _quantize("zoo", BIAS_CORRECTION="analytic", **_NEAREST),
    "zoo, quantized inputs": _quantize("zoo", asym=True, **_NEAREST),
    # searches
    "digits, auto": _quantize("digits", recipe="auto", bits="w4a8"),
    "digits, mixed": _quantize("digits", average_bits=5, **{"MIXED.WEIGHTS": [4, 6, 8], **_VIRTUAL}),
    # other doors
    "digits, simplified": Case("digits", by_command("simplify", "{model}", "-o", "{out}")),
    "zoo, by the command line": Case(
        "zoo", by_command("quantize", "{model}", "--data", "{data}", "-o", "{out}", "--bits", "w4a8", "--no-verify")
    ),
    "zoo, requantized": Case("zoo", requantized),
    "zoo, lint --fix": Case("zoo", fixed),
    "zoo, from a cache": Case("zoo", with_cache),
    "digits, batch": Case("digits", by_batch),
    "zoo, QuantModel": Case("zoo", by_life_cycle),
    "digits, trained by nobody": Case("digits", by_training, torch=True),
    # real models
    "cifar_resnet20, w8a8": _quantize("cifar_resnet20"),
    "cifar_resnet20, w4a4": _quantize("cifar_resnet20", bits="w4a4", **_VIRTUAL),
    "squeezenet11, w4a8": _quantize("squeezenet11", bits="w4a8", **_NEAREST),
    "mobilenetv2_tin200, w8a8": _quantize("mobilenetv2_tin200"),
    "mobilenetv2_tin200, tensorrt": _quantize("mobilenetv2_tin200", backend="tensorrt", **_NEAREST),
    "minilm_l6, w8a8": _quantize("minilm_l6"),
    "minilm_l6, blocks": _quantize("minilm_l6", rounding="nearest", **_BLOCKS),
    "fastestdet, w8a8": _quantize("fastestdet"),
    "silero_vad, w8a8": _quantize("silero_vad"),
}
