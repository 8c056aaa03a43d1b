"""Runs quantizers of decoders, each as a whole process, and evaluates their files with one code."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.kept import Kept, Record
from benchmarks.llm.ways import AUTO, ORT, OURS, TORCH, DecoderWay
from benchmarks.peers import environments
from benchmarks.peers.measured import NUMBER
from benchmarks.scores import Estimate, estimate
from benchmarks.w8a8.runs import process
from sbonnx.errors import SbonnxError
from sbonnx.llm.decoding import DecoderSession, decoder_feed
from sbonnx.llm.folder import copy_rest, model_place
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.llm.scores import TokenSums, score_windows
from sbonnx.llm.speed import peak_memory, time_tokens
from sbonnx.llm.windows import read_windows
from sbonnx.spec import Array

FLOAT: Final = "float"
DECODED: Final = 48
"""Tokens that are decoded one by one in a round."""
PROMPT: Final = 128


@dataclass
class DecoderBench:
    """A float decoder with windows of tokens, working folder and records of a run.

    Attributes:
        source: folder of the float decoder.
        calibration: .npz with ids, windows for calibration.
        ids: windows for evaluation, int64, (windows, length).
        folder: folder of the quantized decoders.
        kept: records of earlier runs.
        minutes: time limit of one run.
    """

    source: Path
    calibration: Path
    ids: Array
    folder: Path
    kept: Kept = field(default_factory=Kept)
    minutes: float = 10.0

    @cached_property
    def decoder(self) -> Decoder:
        """The float decoder."""
        return read_decoder(self.source)

    def measure(self, form: str, row: str, way: DecoderWay) -> Record:
        """Return the record of a setting: its cost and scores, or a note with the reason of a failure."""
        return self.kept.record((form, row), lambda: self._measure(way))

    def measure_float(self) -> Record:
        """Return the record of the float decoder."""
        return self.kept.record((FLOAT, FLOAT), lambda: {"note": "", **self.evaluate(self.decoder)})

    def _measure(self, way: DecoderWay) -> Record:
        try:
            decoder, cpu = self.run(way)
            return {"note": "", "cpu": cpu, **self.evaluate(decoder)}
        except (ChildProcessError, SbonnxError) as error:
            return {"note": f"fails: {error}"}

    def run(self, way: DecoderWay, name: str = "quantized") -> tuple[Decoder, float]:
        """Write the quantized decoder of a setting. Return it, and the CPU seconds of the whole process.

        Raises:
            ChildProcessError: the quantizer failed; with its last line of output.
        """
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        command = self.command(way, target)
        cpu = process(command, model_place(self.decoder, target), 60 * self.minutes)
        return read_decoder(target), cpu

    def command(self, way: DecoderWay, target: Path) -> list[str]:
        """Return the command line that writes a setting's decoder into the folder `target`.

        Raises:
            ChildProcessError: the peer has no environment; with the reason.
        """
        if way.quantizer == OURS:
            flags = ["--bits", f"w{way.bits}", "--block-size", str(way.block), "--no-latency", "--quiet"]
            sets = [word for setting in way.settings for word in ("--set", setting)]
            files = [str(self.source), "--text", str(self.calibration), "-o", str(target)]
            return [sys.executable, "-m", "sbonnx", "llm", "quantize", *files, *flags, *sets]
        python, script = peer_command(way.quantizer)
        target.mkdir()
        copy_rest(self.decoder, target)
        job = {
            "model": str(self.decoder.model),
            "data": str(self.feeds),
            "output": str(model_place(self.decoder, target)),
            "method": way.method,
            "bits": way.bits,
            "block": way.block,
            "level": way.level,
            "batch": 1,
        }
        return [python, "-m", script, json.dumps(job)]

    @cached_property
    def windows(self) -> Array:
        """Windows that our command calibrates on, int64, (windows, length)."""
        return read_windows(self.decoder, str(self.calibration)).calibration

    @cached_property
    def feeds(self) -> Path:
        """File with the feeds of `windows`, for onnxruntime's GPTQ."""
        path = self.folder / "feeds.npz"
        rows = [decoder_feed(self.decoder, row[None]) for row in self.windows]
        arrays: dict[str, Any] = {key + NUMBER: np.stack([row[key] for row in rows]) for key in rows[0]}
        np.savez(path, **arrays)
        return path

    def evaluate(self, decoder: Decoder) -> Record:
        """Return size, perplexity, mean divergence from float and agreement, with intervals over windows."""
        sums = list(score_windows(self.ids, decoder, self.decoder, threads=1))
        return {"mb": decoder.bytes / 1e6, **{name: asdict(figure) for name, figure in figures(sums).items()}}

    def speed(self, ways: Mapping[str, DecoderWay], rounds: int) -> Record:
        """Return CPU milliseconds by round and peak memory of the float decoder and of settings; rounds alternate.

        Returns:
            {"first": {name: [ms]}, "token": {name: [ms]}, "memory": {name: MB}}.
        """

        def measure() -> Record:
            decoders = {FLOAT: self.decoder, **{name: self.run(way, f"timed_{name}")[0] for name, way in ways.items()}}
            sessions = {name: DecoderSession(each, threads=1) for name, each in decoders.items()}
            prompt = self.ids[0][:PROMPT]
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
            for number in range(rounds + 1):
                for name, session in sessions.items():
                    pair = time_tokens(session, prompt, DECODED, time.process_time)
                    if number:  # the first round warms up
                        times[name].append(pair)
            del sessions
            return {
                "first": {name: [1000 * first for first, _ in pairs] for name, pairs in times.items()},
                "token": {name: [1000 * token for _, token in pairs] for name, pairs in times.items()},
                "memory": {
                    name: median(peak_memory(each, prompt) for _ in range(3)) / 1e6 for name, each in decoders.items()
                },
            }

        return self.kept.record(("speed",), measure)


def peer_command(name: str) -> tuple[str, str]:
    """Return the interpreter and the script of a peer; onnxruntime's runs with this interpreter.

    Raises:
        ChildProcessError: the peer has no environment; with the reason.
    """
    if name == ORT:
        return sys.executable, "benchmarks.peers.onnxruntime_nbits"
    place = AUTO if name == TORCH else name
    why = environments.absent(environments.FOLDER, place)
    if why is not None:
        raise ChildProcessError(why)
    script = "benchmarks.peers.torch_gptq_llama" if name == TORCH else environments.PEERS[name].script
    return str(environments.python_of(environments.FOLDER, place)), script


def figures(sums: list[TokenSums]) -> dict[str, Estimate]:
    """Return perplexity, mean divergence and agreement of windows, each with its interval by bootstrap over windows."""
    loss, predicted, kl, agreed, positions = (
        np.array([getattr(each, name) for each in sums], np.float64)
        for name in ("loss", "predicted", "kl", "agreed", "positions")
    )
    return {
        "perplexity": estimate(lambda rows: float(np.exp(loss[rows].sum() / predicted[rows].sum())), len(sums)),
        "kl": estimate(lambda rows: float(kl[rows].sum() / positions[rows].sum()), len(sums)),
        "agreement": estimate(lambda rows: float(agreed[rows].sum() / positions[rows].sum()), len(sums)),
    }
