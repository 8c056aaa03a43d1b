"""Does `--tune latency` pay? Eight real models: the default file, the tuned one and those of the peers, over float.

    python -m benchmarks.runtimes.tuned_latency [MODEL ...] [--seconds 300] [--kept FILE] [--peers FOLDER] [--write]

Files of one model are measured in one process, in turn with the float model, and the tuned file also in turn with the
default. Records are kept, so that an interrupted run continues. Peers run in their own environments (`make peers`).
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, Final

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers.environments import FOLDER, PEERS
from benchmarks.results import arguments, not_measured, table, write_section
from benchmarks.runtimes.default_latency import PACKED, paired, runner
from benchmarks.scores import Estimate
from benchmarks.w8a8.runs import Bench
from benchmarks.w8a8.table import shown
from benchmarks.w8a8.ways import Way
from sbonnx.system.cpu import target_cpu
from sbonnx.tuning.kernel_timing import session

SAMPLES: Final = 32
"""Calibration samples of all quantizers."""

WAYS: Final[Mapping[str, Way]] = {
    "onnxruntime U8S8 channel": Way("onnxruntime", "MinMax", "u8s8 channel"),
    "onnxruntime U8S8 tensor": Way("onnxruntime", "MinMax", "u8s8 tensor"),
    "NNCF": Way("nncf", "nearest"),
}
"""Peers, at 8 bits."""

TUNED: Final = "sbonnx"
HEADER: Final = ("model", "default ÷ float", "tuned ÷ float", "tuned ÷ default", "what pays", *WAYS)


def over(reference: Path, path: Path, feed: Mapping[str, Any], rounds: int) -> list[float]:
    """Return the time of a file over that of another, with its interval."""
    before, after = (runner(session(file, optimise=True), feed) for file in (reference, path))
    return list(astuple(paired(before, after, rounds)[1]))


def tuned(name: str, bench: Bench, seconds: float, rounds: int) -> Record:
    """Quantize one model with the defaults, and tuned, and measure both files."""
    model, feeds = Path(bench.pack.model_path(name)), bench.pack.load_calib(name, limit=SAMPLES, batch=1)
    default, best = bench.folder / f"{name}.default.onnx", bench.folder / f"{name}.tuned.onnx"
    sbonnx.quantize(model, feeds, default, verify=False)
    recipe = {"TUNE": {"GOAL": "latency", "SECONDS": seconds}}
    tuning = sbonnx.quantize(model, feeds, best, recipe=recipe, verify=False).tuning
    assert tuning is not None
    pairs = {"default": (model, default), "tuned": (model, best), "gain": (default, best)}
    record: Record = {key: over(*files, feeds[0], rounds) for key, files in pairs.items()}
    if default.read_bytes() == best.read_bytes():
        record["gain"] = [1.0, 1.0, 1.0]
    return record | {
        "trials": len(tuning.trials),
        "ended": tuning.ended,
        "text": tuning.text,
        "changes": tuning.changes,
    }


def of_peer(name: str, row: str, bench: Bench, rounds: int) -> Record:
    """Quantize one model with a peer and measure its file."""
    path = bench.folder / f"{name}.peer.onnx"
    path.unlink(missing_ok=True)
    try:
        bench.run(name, WAYS[row], path)
        feed = bench.pack.load_calib(name, limit=1, batch=1)[0]
        return {"note": "", "over": over(Path(bench.pack.model_path(name)), path, feed, rounds)}
    except Exception as error:  # a peer fails in any way, or onnxruntime does not run its file
        return {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}


def cells(name: str, kept: Kept) -> list[str]:
    """Return the cells of a row."""
    record = kept.get(name, TUNED) or {}
    values = [shown(Estimate(*record[key]), 2) for key in ("default", "tuned", "gain")]
    if values[2] == shown(Estimate(1.0, 1.0, 1.0), 2):
        values[2] = "the same file"
    what = "; ".join(record["changes"]) or "the default is the fastest"
    peers = [kept.get(name, row) or {} for row in WAYS]
    return [
        name,
        *values,
        f"{what} ({record['trials']} trials{', time used up' if record['ended'] else ''})",
        *(shown(Estimate(*peer["over"]), 2) if peer.get("note") == "" else "–" for peer in peers),
    ]


def text(kept: Kept, models: Sequence[str], seconds: float, rounds: int) -> str:
    """Return the section of docs/results/."""
    keys = [(name, row) for name in models for row in (TUNED, *WAYS)]
    measured = [name for name in models if kept.get(name, TUNED)]
    gains = [Estimate(*record["gain"]) for name in measured if (record := kept.get(name, TUNED))]
    verdict = (
        f"**`--tune latency` is faster than the default on {sum(gain.high < 1 for gain in gains)} of {len(gains)} "
        f"models, and slower on {sum(gain.low > 1 for gain in gains)}.**"
    )
    return (
        "## `--tune latency`\n\n"
        f"`python -m benchmarks.runtimes.tuned_latency --seconds {seconds:g} --write`; {target_cpu().title}, one "
        f"thread, CPU time, {rounds} rounds in turn: the median of the ratios with its 95 % confidence interval. "
        f"All quantizers get {SAMPLES} samples; {', '.join(PEERS[peer].versions for peer in ('onnxruntime', 'nncf'))}. "
        "Files of all run in onnxruntime, in which 39 of the 53 convolutions of NNCF's mobilenetv2_tin200 stay float."
        + not_measured(key for key in keys if (kept.get(*key) or {"note": "absent"}).get("note"))
        + f"\n\n{verdict}\n\n"
        + table(HEADER, [cells(name, kept) for name in measured])
    )


def main() -> None:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", default=PACKED, metavar="MODEL", help=f"of {', '.join(PACKED)}")
    parser.add_argument("--seconds", type=float, default=300, help="TUNE.SECONDS")
    parser.add_argument("--rounds", type=int, default=40, help="measurements of each file")
    parser.add_argument("--kept", type=Path, help="file of records of an interrupted run")
    parser.add_argument("--again", nargs="*", default=(), help=f"rows to measure again, {TUNED} or names of peers")
    parser.add_argument("--only-kept", action="store_true", help="table of the records, without measuring")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="folder of the peers' environments")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pack: Any = load_pack(options.pack)
    kept = Kept(options.kept, options.again)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pack, Path(folder), options.peers.absolute(), count=SAMPLES)
        for name in () if options.only_kept else options.models:
            kept.record((name, TUNED), partial(tuned, name, bench, options.seconds, options.rounds))
            for row in WAYS:
                kept.record((name, row), partial(of_peer, name, row, bench, options.rounds))
            print(" | ".join(cells(name, kept)), flush=True)
    if options.write:
        write_section("tuned latency", text(kept, options.models, options.seconds, options.rounds))


if __name__ == "__main__":
    main()
