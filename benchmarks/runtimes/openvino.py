"""Files for OpenVINO, executed in OpenVINO, beside NNCF's: error and time.

    python -m benchmarks.runtimes.openvino [--models NAME ...] [--limit 64] [--rounds 15] [--records FILE] [--write]

`make peers` builds NNCF's environment first. Each model is quantized at W8A8 by `sbonnx quantize --backend openvino`,
by `sbonnx quantize` (for onnxruntime) and by NNCF with its defaults, on the same samples. Records are kept in a file,
so an interrupted run continues.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import scores
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers import environments
from benchmarks.results import arguments, table, write_section
from benchmarks.runtimes.default_latency import PACKED
from benchmarks.w8a8.runs import Bench
from benchmarks.w8a8.ways import OURS, Way
from sbonnx.backends.openvino.runtime import OpenVinoSession, version
from sbonnx.errors import ModelError
from sbonnx.metrics import ratio_db
from sbonnx.verify.intervals import of_median

WAYS: Final = {
    "openvino": Way(OURS, flags=("--backend", "openvino", "--no-verify")),
    "onnxruntime": Way(OURS, flags=("--no-verify",)),
    "nncf": Way("nncf", "nearest"),
}
LEAST_SECONDS: Final = 0.006

HEADER: Final = (
    *("model", "SQNR dB", "of the file for onnxruntime, in onnxruntime", "NNCF", "float in OpenVINO"),
    *("time ÷ float", "NNCF ÷ float", "ours ÷ NNCF"),
)


def measure(bench: Bench, name: str, rounds: int) -> Record:
    """Quantize one model and measure its files; a note says why not."""
    files: dict[str, Path] = {"float": Path(bench.pack.model_path(name))}
    try:
        sessions = {"float": OpenVinoSession(files["float"], 1)}
    except ModelError as error:
        return {"note": str(error).replace(str(files["float"]), "the float model")}
    for row, way in WAYS.items():
        files[row] = bench.folder / f"{name}.{row}.onnx"
        if not files[row].exists():
            try:
                bench.run(name, way, files[row])
            except ChildProcessError as error:
                return {"note": f"{row} fails: {error}"}
        sessions[row] = OpenVinoSession(files[row], 1)
    reference = scores.outputs(bench.pack, name, limit=bench.limit)
    streams = bench.pack.entry(name)["kind"] == "vad"
    found: Record = {"note": ""}
    for row, opened in sessions.items():
        found[f"{row} db"] = _db(reference, scores.outputs(bench.pack, name, None, bench.limit, opened), streams)
    own = scores.outputs(bench.pack, name, files["onnxruntime"], bench.limit)
    found["own db"] = _db(reference, own, streams)
    times = _times(sessions, bench.pack.load_calib(name, limit=1, batch=1)[0], rounds)
    for row, other in (("openvino", "float"), ("nncf", "float"), ("openvino", "nncf")):
        ratios = times[row] / times[other]
        found[f"{row} / {other}"] = [float(np.median(ratios)), *of_median(ratios)]
    return found


def _db(reference: scores.Outputs, found: scores.Outputs, streams: bool) -> float:
    signal, noise = scores.energies(reference, found, streams=streams)
    return float(ratio_db(float(signal.sum()), float(noise.sum())))


def _times(sessions: dict[str, OpenVinoSession], feed: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measure CPU seconds of a run, by file and round; the files alternate, each first in turn."""
    taken: dict[str, list[float]] = {row: [] for row in sessions}
    for turn in range(rounds + 1):
        for row in sessions if turn % 2 else reversed(sessions):
            count, start = 0, time.process_time()
            while (spent := time.process_time() - start) < LEAST_SECONDS or not count:
                sessions[row].run(None, feed)
                count += 1
            if turn:
                taken[row].append(spent / count)
    return {row: np.array(values) for row, values in taken.items()}


def cells(name: str, record: Record) -> list[str]:
    """Return the cells of a row."""
    if record["note"]:
        return [name, f"{record['note']}", *[""] * (len(HEADER) - 2)]
    errors = [f"{record[f'{row} db']:.1f}" for row in ("openvino", "own", "nncf", "float")]
    ratios = [record[key] for key in ("openvino / float", "nncf / float", "openvino / nncf")]
    return [name, *errors, *(f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in ratios)]


def summary(records: dict[str, Record]) -> str:
    """Return one sentence about all models."""
    rows = [record for record in records.values() if not record["note"]]
    if not rows:
        return ""
    gains = [row["openvino db"] - row["nncf db"] for row in rows]
    ratios = [row["openvino / nncf"][0] for row in rows]
    mean = float(np.exp(np.mean(np.log(ratios))))
    return (
        f"SQNR above NNCF's: {np.mean(gains):+.1f} dB (mean; {min(gains):+.1f} to {max(gains):+.1f}). Time relative to "
        f"NNCF's file: {mean:.2f} (geometric mean; {min(ratios):.2f} to {max(ratios):.2f})."
    )


def main() -> int:
    """Measure, print and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=list(PACKED))
    parser.add_argument("--limit", type=int, default=64, help="evaluation samples")
    parser.add_argument("--rounds", type=int, default=15, help="alternating measurements of time")
    parser.add_argument("--records", type=Path, help="file of records")
    parser.add_argument("--peers", type=Path, default=environments.FOLDER, help="folder of the peers' environments")
    parser.add_argument("--files", type=Path, help="folder that keeps the quantized files")
    options = parser.parse_args()
    kept, records = Kept(options.records), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.files or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(load_pack(options.pack), folder, options.peers, limit=options.limit)
        for name in options.models:
            records[name] = kept.record((name, "openvino"), partial(measure, bench, name, options.rounds))
            print(cells(name, records[name]), file=sys.stderr, flush=True)
    text = (
        "## OpenVINO beside NNCF\n\n"
        f"`python -m benchmarks.runtimes.openvino --write`; OpenVINO {version()}, "
        f"{environments.PEERS['nncf'].versions}. W8A8, defaults of both tools, the same calibration samples; "
        "SQNR of the outputs against the float model in "
        f"onnxruntime, on {options.limit} evaluation samples, executed in OpenVINO with its defaults. Float kernels "
        "compute in bfloat16 there, so the float model itself has an error. Times: CPU time of one thread, batch 1, "
        "the files alternating in one process, with 95 % intervals.\n\n"
        f"{table(HEADER, [cells(name, record) for name, record in records.items()])}\n\n{summary(records)}"
    )
    print(text)
    if options.write:
        write_section("openvino", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
