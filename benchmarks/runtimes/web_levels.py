"""Accuracy levels of MatMulNBits in WebAssembly (onnxruntime-web in Node), beside onnxruntime on this CPU.

    python -m benchmarks.runtimes.web_levels [--write]

Files of classics_llama by ``--backend web --mode weight_only``, which differ in width and in ``ACCURACY_LEVEL``.
Outputs are compared on prompts, with an empty cache. Times are CPU times of the child process, one thread, as ratios to
the float file's in the same run; each round runs all files in turn.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

import sbonnx
from benchmarks.results import arguments, table, write_section
from benchmarks.runtimes.openvino_weights import prompt
from benchmarks.scores import divergences
from sbonnx.metrics import ratio_db
from sbonnx.runtimes.wasm import VERSION, WASM, WasmSession
from sbonnx.spec import Array
from sbonnx.verify import session

SAMPLES: Final = 8
TOKENS: Final = 64
ROUNDS: Final = 7
RUNS: Final = {1: 20, TOKENS: 4}
"""Runs in a round by number of tokens: CPU times of processes have steps of 10 ms."""
WIDTHS: Final = ("w2a0", "w4a0", "w8a0")
LEVELS: Final = (1, 4)
LOGITS: Final = ("logits",)
HEADER: Final = (
    "weights",
    "level",
    "WASM: SQNR dB",
    "KL",
    "CPU: SQNR dB",
    "KL",
    "WASM: 1 token ÷ float",
    f"{TOKENS} tokens ÷ float",
)


def accuracy(wanted: Sequence[Array], outputs: Sequence[Array]) -> tuple[str, str]:
    """Return SQNR and mean KL divergence of logits."""
    noise = sum(float(np.square(a - b).sum()) for a, b in zip(wanted, outputs, strict=True))
    ratio = ratio_db(sum(float(np.square(a).sum()) for a in wanted), noise)
    loss = np.mean([divergences(a[0], b[0]).mean() for a, b in zip(wanted, outputs, strict=True)])
    return f"{ratio:.1f}", f"{loss:.4f}"


class TimedSession:
    """Session of WASM and the CPU time of its process."""

    def __init__(self, path: Path) -> None:
        others = set(psutil.Process().children())
        self._session = WasmSession(path)
        (self._process,) = set(psutil.Process().children()) - others

    def seconds(self, feed: dict[str, Array], runs: int) -> float:
        """Return the CPU seconds of some runs."""
        before = self._process.cpu_times()
        for _ in range(runs):
            self._session.run(LOGITS, feed)
        after = self._process.cpu_times()
        return float(after.user + after.system - before.user - before.system)


def ratios(files: Sequence[Path], feed: dict[str, Array], runs: int) -> list[str]:
    """Return the time of each file over that of the first: median and quartiles of the rounds."""
    opened = [TimedSession(path) for path in files]
    for timed in opened:  # the optimizing compiler of WebAssembly works in the background at first
        timed.seconds(feed, runs)
    rounds = np.array([[timed.seconds(feed, runs) for timed in opened] for _ in range(ROUNDS)])
    low, middle, high = np.quantile(rounds / rounds[:, :1], (0.25, 0.5, 0.75), axis=0)
    return [f"{b:.2f} ({a:.2f} to {c:.2f})" for a, b, c in zip(low, middle, high, strict=True)]


def main() -> int:
    """Measure, print and write the table."""
    options = arguments(__doc__).parse_args()
    reason = WASM.absent()
    if reason is not None:
        sys.exit(reason)
    llama = options.pack / "classics_llama"
    model = llama / "optimum" / "model.onnx"
    tokens = np.load(llama / "eval.npz")["ids"][:SAMPLES, :TOKENS].astype(np.int64)
    feeds = [prompt(model, row) for row in tokens]
    wanted = [session(model).run(LOGITS, feed)[0] for feed in feeds]
    rows, files = [], [model]
    with tempfile.TemporaryDirectory() as folder:
        for bits in WIDTHS:
            for level in LEVELS:
                path = Path(folder, f"{bits}.{level}.onnx")
                keys: dict[str, Any] = {"mode": "weight_only", "bits": bits, "accuracy_level": level}
                sbonnx.quantize(model, None, backend="web", output=path, verify=False, **keys)
                files.append(path)
                here, web = session(path), WasmSession(path)
                figures = [accuracy(wanted, [it.run(LOGITS, feed)[0] for feed in feeds]) for it in (web, here)]
                rows.append([bits, str(level), *figures[0], *figures[1]])
                print(*rows[-1], flush=True)
        times = [ratios(files, prompt(model, tokens[0, :count]), runs)[1:] for count, runs in RUNS.items()]
    rows = [[*row, *figures] for row, figures in zip(rows, zip(*times, strict=True), strict=True)]
    text = (
        "## Accuracy levels of MatMulNBits in browsers\n\n"
        f"`python -m benchmarks.runtimes.web_levels --write`; onnxruntime-web {VERSION}, WASM in Node, one thread. "
        f"Files of classics_llama by `--backend web --mode weight_only` with each `ACCURACY_LEVEL`, on {SAMPLES} "
        f"prompts of {TOKENS} tokens, against float. Ratios are of CPU time: median and quartiles of "
        f"{ROUNDS} rounds.\n\n{table(HEADER, rows)}"
    )
    print(text)
    if options.write:
        write_section("web levels", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
