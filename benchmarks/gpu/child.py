"""One job of `benchmarks.gpu`, in the environment with the GPU's wheels; writes its figures as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.calibration import ways
from benchmarks.gpu import ENGINES
from benchmarks.peers import environments
from benchmarks.results import ROOT
from benchmarks.targets.models import RANDOM, Subject, subject
from sbonnx import graph as graphs
from sbonnx.errors import DataError
from sbonnx.linting.engine_layers import engine_report
from sbonnx.runtimes import engine_process

PROVIDERS: Final = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
OURS: Final[dict[str, dict[str, Any]]] = {
    "fp16": {"bits": "w0a0"},
    "int8": {},
    "fp8": {"bits": "fp8"},
    "int4-weights": {"bits": "w4a0", "block_size": 64},
}
"""Recipe keys of our files; the rest of each is in half precision."""

OLDEST: Final = 8
"""Oldest major version of TensorRT."""

PASSES, ROUNDS, RUNS, SLOWEST = 16, 5, 50, 5


def session(path: Path, device: str) -> Any:
    """Open a session whose first provider is that of the device.

    Raises:
        RuntimeError: onnxruntime fell back to another provider.
    """
    import onnxruntime

    opened = onnxruntime.InferenceSession(str(path), providers=[PROVIDERS[device]])
    if opened.get_providers()[0] != PROVIDERS[device]:
        raise RuntimeError(f"onnxruntime did not load {PROVIDERS[device]}: it runs on {opened.get_providers()[0]}")
    return opened


def calibration(network: Subject, device: str) -> dict[str, float]:
    """Measure seconds of float passes and of min-max calibrations, session included, in turn over the same samples."""
    samples: Any = network.singles * PASSES
    prepared, opened = ways.prepared(network.model, "minmax"), session(network.model, device)
    taken = defaultdict(list)
    for _ in range(ROUNDS):
        taken["float s"].append(ways.float_pass(opened, samples))
        data = ways.dataset(prepared.graph, samples)
        taken["calibration s"].append(ways.ranges(prepared.graph, prepared.plan, data, device=device)[0])
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    return medians | {"ratio": medians["calibration s"] / medians["float s"], "samples": len(samples)}


def write(kind: str, network: Subject, backend: Any, path: Path) -> None:
    """Write the file of a kind.

    Raises:
        RuntimeError: the quantizer is not installed, or the file has a problem.
    """
    if kind == "float32":
        shutil.copyfile(network.model, path)
    elif kind in OURS:
        settings = {"high_precision": "fp16", "effort": "fast", **OURS[kind]}
        report = sbonnx.quantize(
            network.model, network.feeds, backend=backend, output=path, force=True, verify=False, **settings
        )
        if report.problems:
            raise RuntimeError(report.problems[0])
    else:
        if reason := environments.absent(environments.FOLDER, "modelopt"):
            raise RuntimeError(f"ModelOpt: {reason}")
        data = path.with_suffix(".npz")
        arrays: dict[str, Any] = {
            name: np.concatenate([feed[name] for feed in network.feeds]) for name in network.feeds[0]
        }
        np.savez(data, **arrays)
        job = {"model": str(network.model), "data": str(data), "output": str(path), "batch": 1, "method": "max"}
        script = environments.PEERS["modelopt"].script
        python = str(environments.python_of(environments.FOLDER, "modelopt"))
        subprocess.run([python, "-m", script, json.dumps(job | {"high_precision": "fp16"})], check=True, cwd=ROOT)


def engine_module(name: str) -> Any:
    """Import TensorRT ("tensorrt"), or TensorRT-RTX ("tensorrt-rtx") with the libraries of its wheel."""
    if name == "tensorrt":
        return importlib.import_module(name)
    engine_process.load_rtx_libraries()
    return importlib.import_module("tensorrt_rtx_bindings")


def built(trt: Any, path: Path, feed: dict[str, Any]) -> bytes:
    """Build the engine of a file for the shapes of `feed`, strongly typed.

    Raises:
        RuntimeError: TensorRT refuses the file; its log has more.
    """
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    strong = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # all networks are from version 11 on
    network = builder.create_network(0 if strong is None else 1 << int(strong))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise RuntimeError(f"TensorRT does not parse the file: {parser.get_error(0)}")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for at in range(network.num_inputs):
        name = network.get_input(at).name
        profile.set_shape(name, *[tuple(feed[name].shape)] * 3)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("TensorRT builds no engine of the file")
    return bytes(plan)


def engine(kind: str, network: Subject, folder: Path, trt: Any, device: str) -> dict[str, Any]:
    """Write a file, build its engine, measure it and join its layers with the operators of the file."""
    import onnxruntime

    path, layers, times = (folder / f"{kind}{end}" for end in (".onnx", ".layers.json", ".profile.json"))
    major = trt.__version__.partition(".")[0]  # TensorRT-RTX counts from 1
    write(kind, network, f"tensorrt@{major}" if int(major) >= OLDEST else "tensorrt", path)
    feed = network.singles[0]
    start = time.perf_counter()
    loaded = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(built(trt, path, feed))
    build_s = time.perf_counter() - start
    if loaded is None:
        raise RuntimeError("an engine is built, and this GPU does not load it")
    layers.write_text(loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))
    context = loaded.create_execution_context()
    names = [loaded.get_tensor_name(at) for at in range(loaded.num_io_tensors)]
    outputs = [name for name in names if loaded.get_tensor_mode(name) != trt.TensorIOMode.INPUT]
    values = {}
    for name in sorted(names, key=outputs.__contains__):  # shapes of outputs are known after those of inputs
        if name in outputs:
            array = np.zeros(tuple(context.get_tensor_shape(name)), trt.nptype(loaded.get_tensor_dtype(name)))
        else:
            array = np.ascontiguousarray(feed[name])
            context.set_input_shape(name, tuple(array.shape))
        values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)
        context.set_tensor_address(name, values[name].data_ptr())

    def runs(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            context.execute_async_v3(0)
        values[outputs[0]].numpy()  # waits for the default stream
        return (time.perf_counter() - begin) * 1e3 / count

    runs(RUNS)
    ms = statistics.median(runs(RUNS) for _ in range(ROUNDS))
    (expected,) = session(network.model, "cpu").run([outputs[0]], feed)
    noise = expected.astype(np.float64) - values[outputs[0]].numpy()
    times.write_text(json.dumps(profiled(trt, context, lambda: runs(RUNS))))
    sqnr = 10 * np.log10(np.square(expected.astype(np.float64)).sum() / max(float(np.square(noise).sum()), 1e-30))
    return {"ms": ms, "SQNR dB": float(sqnr), "build s": build_s, **joined(path, layers, times)}


def profiled(trt: Any, context: Any, work: Any) -> list[dict[str, Any]]:
    """Return mean milliseconds by layer over `RUNS` runs, in the form of ``trtexec --exportProfile``."""
    sums: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            sums[layer_name] += ms

    context.profiler = Profiler()
    work()
    return [{"count": RUNS}, *({"name": name, "averageMs": ms / RUNS} for name, ms in sums.items())]


def joined(path: Path, layers: Path, times: Path) -> dict[str, Any]:
    """Return what `lint --engine-layers` shows; where nothing can be joined, the reason in its place."""
    try:
        report = engine_report(graphs.load(path), layers, times)
    except DataError as error:
        return {"layers": str(error)}
    slowest = sorted(report.planned, key=lambda row: -(row.ms or 0.0))[:SLOWEST]
    return {
        "planned": len(report.planned),
        "integers": sum(row.runs_in == "integers" for row in report.planned),
        "layers ms": report.ms,
        "reformats ms": report.reformat_ms,
        "slowest": [{"node": row.node, "runs_in": row.runs_in, "ms": row.ms} for row in slowest],
        "engine": report.to_dict(),
    }


def main() -> int:
    """Run one job and write its figures to OUTPUT/JOB.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", choices=("calibration", "float32", *OURS, "modelopt-int8"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engines", choices=ENGINES, default=ENGINES[0])
    options = parser.parse_args()
    pack = None if options.model in RANDOM else load_pack(options.pack)
    network = subject(options.model, pack, options.output)
    if options.job == "calibration":
        facts: dict[str, Any] = calibration(network, "cuda")
    else:
        facts = engine(options.job, network, options.output, engine_module(options.engines), "cuda")
    (options.output / f"{options.job}.json").write_text(json.dumps(facts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
