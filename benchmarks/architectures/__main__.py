"""Architectures of mobius-onnx with small random weights: quantized by the commands, or refused in one line.

    python -m benchmarks.architectures [NAME ...] [--cache FOLDER] [--again] [--write]

Needs the environment of mobius-onnx to build (`make peers ARGS=mobius`). Decoders go through ``sbonnx llm quantize``
with windows of tokens, or in a folder with the encoder whose states they read, other models through ``sbonnx quantize``
with random feeds. Each file is a process with a time limit; its record is kept in the cache, so that an interrupted run
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from benchmarks.architectures.feeds import IDS, feed_of
from benchmarks.architectures.weights import matrix_weights, weights_left
from benchmarks.kept import Kept, Record
from benchmarks.peers import environments
from benchmarks.results import ROOT, arguments, table, write_section
from sbonnx.errors import ModelError, SbonnxError
from sbonnx.llm.decoding import DecoderSession, decoder_feed
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.verify.sessions import file_bytes, run, session

LIMIT_S: Final = 300.0
"""Maximum duration of a command."""

SAMPLES: Final = 4
WINDOWS: Final = 16
LENGTHS: Final[Sequence[dict[str, int]]] = ({}, {"sequence_len": 1, "seq_len": 1}, {"batch": 2})
"""Lengths of axes that are tried in turn until the float model runs: some scans take one token."""

SURE: Final = 0.95
"""Share of the weights in integers below which the row has the reasons of the others."""

LEVELS_DB: Final = 40.0
"""Least agreement of the outputs at the lowest and the highest optimization level. Inputs of block-wise products are
rounded to int8, which amplifies differences of float32 to what that rounding costs: 43 dB for MatMulNBits alone."""

BELOW_DB: Final = 6.0
"""Least distance of these differences below the error of the quantization, where that is more than -`LEVELS_DB`."""

LONGEST: Final = 140
"""Characters of a reason at most."""

SHOWN: Final = 6
"""Names of a row at most."""

VERSIONS: Final = environments.PEERS["mobius"].versions

HEADER: Final = ("architectures", "models", "result", "weights in integers", "reasons of the others")


@dataclass(frozen=True)
class Component:
    """A model of an architecture.

    Attributes:
        path: its file.
        decoder: whether it is in a folder that `llm quantize` takes.
    """

    path: Path
    decoder: bool


def last_line(text: str) -> str:
    """Return the last line of an output, for a row."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no message"


def float_feeds(component: Component, decoder: Decoder | None) -> list[dict[str, Any]]:
    """Return feeds on which the float model runs.

    Raises:
        ModelError: it runs on none.
    """
    if decoder is not None:
        ids = np.random.default_rng(0).integers(6, IDS, (1, 16))
        source = None if decoder.encoder is None else feed_of(onnx.load(str(decoder.encoder.model)), 0, {})
        feeds = [[decoder_feed(decoder, ids, DecoderSession(decoder, threads=1).begin(source))]]
    else:
        model = onnx.load(str(component.path), load_external_data=False)
        feeds = [[feed_of(model, seed, lengths) for seed in range(SAMPLES)] for lengths in LENGTHS]
    opened = session(component.path, threads=1)
    for number, samples in enumerate(feeds):
        try:
            run(opened, samples[0], 0)
            return samples
        except SbonnxError:
            if number + 1 == len(feeds):
                raise
    raise AssertionError


def command_of(
    component: Component, samples: Sequence[dict[str, Any]], folder: Path, decoder: Decoder | None
) -> tuple[list[str], Path]:
    """Return the command that quantizes a model, and the file that it writes."""
    program = [sys.executable, "-m", "sbonnx"]
    if decoder is not None:
        texts: dict[str, Any] = {"ids": np.random.default_rng(1).integers(6, IDS, (WINDOWS, 32))}
        if decoder.encoder is not None:
            encoder = onnx.load(str(decoder.encoder.model))
            feeds = [feed_of(encoder, seed, {}) for seed in range(WINDOWS)]
            texts = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        np.savez(folder / "texts.npz", **texts)
        target = folder / "decoder"
        options = ["--text", str(folder / "texts.npz"), "--window", "32", "--no-latency", "--output", str(target)]
        return [*program, "llm", "quantize", str(decoder.model.parent), *options], target / decoder.model.name
    data, target = folder / "data", folder / "model.onnx"
    data.mkdir(exist_ok=True)
    for number, feed in enumerate(samples):
        np.savez(data / f"{number}.npz", **feed)
    options = ["--data", str(data), "--output", str(target), "--set", "VERIFY.LATENCY=false", "--no-advice"]
    return [*program, "quantize", str(component.path), *options], target


def agreement_db(path: Path, feed: dict[str, Any]) -> float:
    """Return the lowest agreement in dB of float outputs between onnxruntime's lowest and highest level."""
    outputs = [run(session(path, level=level, threads=1), feed, 0) for level in ("off", "all")]
    lowest = np.inf
    for low, high in zip(*outputs, strict=True):
        if low.dtype.kind == "f" and low.size:
            noise, power = (float(np.square(values, dtype=np.float64).sum()) for values in (low - high, low))
            lowest = min(lowest, 10 * np.log10(power / noise) if noise and power else np.inf)
    return lowest


def paired(path: Path, folder: Path) -> Path | None:
    """Return a folder as optimum writes it, of a decoder and the encoder of its package; None for other models."""
    encoder = path.parent.parent / "encoder" / path.name
    inputs = {value.name for value in onnx.load(str(path), load_external_data=False).graph.input}
    if not encoder.is_file() or "encoder_hidden_states" not in inputs:
        return None
    pair = folder / "pair"
    pair.mkdir(exist_ok=True)
    shutil.copyfile(encoder, pair / "encoder_model.onnx")
    shutil.copyfile(path, pair / "decoder_model.onnx")
    ids = {"decoder_start_token_id": 3, "eos_token_id": 2, "max_position_embeddings": 50}
    (pair / "config.json").write_text(json.dumps(ids), encoding="utf-8")
    return pair


def measure(component: Component, folder: Path, *, alone: bool = False) -> Record:
    """Quantize a model, `alone` through ``sbonnx quantize``; return the record."""
    decoder, why, source = None, "", None if alone else paired(component.path, folder)
    if component.decoder or source is not None:
        try:
            decoder = read_decoder(source or component.path.parent)
        except ModelError as error:
            why = f"llm quantize: {last_line(str(error))}"
    try:
        samples = float_feeds(component, decoder)
    except SbonnxError as error:
        if decoder is None:
            return {"result": "float does not run", "why": last_line(str(error))}
        why = f"llm quantize: {last_line(str(error))}"
        record = measure(replace(component, decoder=False), folder, alone=True)
        return record | {"why": f"{why}; {record['why']}" if record["why"] else why}
    command, target = command_of(component, samples, folder, decoder)
    report = folder / "report.json"
    try:
        options = ["--report", str(report), "--force", "--quiet", "--no-config"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"result": "crashed", "why": f"not done in {LIMIT_S:.0f} s"}
    message = done.stderr.strip()
    if done.returncode not in (0, 1) or not target.exists():
        one_line = len(message.splitlines()) == 1 and "Traceback" not in message
        return {"result": "refused" if one_line else "crashed", "why": last_line(message), "said": message[-3000:]}
    written = json.loads(report.read_text(encoding="utf-8"))
    before, after = (onnx.load(str(path)) for path in (component.path, target))
    weights = matrix_weights(before)
    left = weights_left(after, weights)
    try:
        db = agreement_db(target, samples[0])
    except SbonnxError as error:
        return {"result": "crashed", "why": f"the result does not run: {last_line(str(error))}"}
    total = sum(weights.values())
    outputs = (written["metrics"] or {}).get("outputs") or ()
    least = min([LEVELS_DB, *(float(output["sqnr_db"]) + BELOW_DB for output in outputs)])
    return {
        "result": "quantized" if db >= least else f"levels differ: {db:.0f} dB",
        "exit": done.returncode,
        "why": "; ".join([*([why] if why else []), *written["problem_codes"]]),
        "size": file_bytes(target) / file_bytes(component.path),
        "total": total,
        "left": {name: weights[name] for name in left},
        "refusals": [[refusal["where"], refusal["why"]] for refusal in written["refusals"]],
    }


def components(cache: Path, names: Iterable[str]) -> dict[str, dict[str, tuple[str, Component]]]:
    """Return the models of each architecture that was built: digest and model, by component."""
    packages: dict[str, dict[str, tuple[str, Component]]] = {}
    for name in names:
        record = json.loads((cache / name / "built.json").read_text(encoding="utf-8"))
        packages[name] = {
            part: (values["digest"], Component(cache / name / part / "model.onnx", values["decoder"]))
            for part, values in record.get("components", {}).items()
        }
    return packages


def main() -> int:
    """Build and quantize the architectures; with --write, update docs/results/. Exit code 1 if one crashed."""
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; none: all")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "architectures", help="folder of the models")
    parser.add_argument("--again", action="store_true", help="measure again what is in the cache")
    parser.add_argument("--one", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cache: Path = options.cache.absolute()
    python = environments.python_of(environments.FOLDER, "mobius")
    if python.exists():
        script = ROOT / "benchmarks" / "peers" / "mobius_models.py"
        subprocess.run([python, script, cache, *options.names], check=True)
    names = options.names or sorted(path.parent.name for path in cache.glob("*/built.json"))
    packages = components(cache, names)
    every = {digest: model for models in packages.values() for digest, model in models.values()}
    kept = Kept(cache / "records.jsonl", tuple(every) if options.again else ())
    for name, models in packages.items():
        for part, (digest, model) in models.items():
            earlier = kept.get(digest)
            folder = cache / "work" / digest[:16]
            folder.mkdir(parents=True, exist_ok=True)
            record = kept.record((digest,), partial(measure, model, folder))
            if earlier is None or options.again:
                print(name, part, said(record), flush=True)
    text = section(packages, kept)
    print(text)
    if options.write:
        write_section("architectures", text)
    return int(any((kept.get(digest) or {}).get("result") == "crashed" for digest in every))


def cell(reason: str) -> str:
    """Return a reason as a cell: without the path of the model, and at most `LONGEST` characters."""
    text = re.sub(r"( of)? '?[^ ']*/model\.onnx'?", "", reason).replace("|", "/")
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."


def row(names: Sequence[str], records: Sequence[Record | None]) -> list[str]:
    """Return the cells of architectures with the same models."""
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    measured = [record for record in records if record is not None]
    results = Counter(record["result"] for record in measured)
    results["not measured"] = len(records) - len(measured)
    result = ", ".join(f"{name} {count}" if len(records) > 1 else name for name, count in results.items() if count)
    total = sum(record.get("total", 0) for record in measured)
    left = sum(sum(record.get("left", {}).values()) for record in measured)
    share = 1 - left / total if total else 0.0
    reasons = [record["why"] for record in measured if "total" not in record]
    reasons += [record["why"] for record in measured if record.get("total") and record["why"]]
    if total and share < SURE:
        reasons += [f"float: {name}" for record in measured for name in record.get("left", {})]
    return [
        listed,
        str(len(records)),
        result,
        f"{share:.1%}" if total else "–",
        "; ".join(dict.fromkeys(cell(reason) for reason in reasons)) or "–",
    ]


def section(packages: dict[str, dict[str, tuple[str, Component]]], kept: Kept) -> str:
    """Return the section of docs/results/."""
    same: dict[tuple[str, ...], list[str]] = {}
    for name, models in packages.items():
        if models:
            same.setdefault(tuple(digest for digest, _ in models.values()), []).append(name)
    records = {digests: [kept.get(digest) for digest in digests] for digests in same}
    done = [record for some in records.values() for record in some if record is not None]
    results = Counter(record["result"].split(":")[0] for record in done)
    passed = sum(
        len(names)
        for digests, names in same.items()
        if all(record is not None and record["result"] == "quantized" for record in records[digests])
    )
    total = sum(record.get("total", 0) for record in done)
    left = sum(sum(record.get("left", {}).values()) for record in done)
    rows = [row(names, records[digests]) for digests, names in same.items() if any(records[digests])]
    about = (
        f"{passed} names with all models quantized, {results['crashed']} crashed; "
        f"{1 - left / max(1, total):.1%} of the matrix weights in integers. "
        f"`python -m benchmarks.architectures --write`: {len(packages)} names of {VERSIONS}, {len(same)} different "
        f"packages with small random weights, {len(rows)} measured ({len(done)} models). Decoders go through llm "
        "quantize with windows of random tokens, or with the encoder of their package and random feeds of it, the "
        "other models through quantize with random feeds. "
        "Quantized: the file runs in onnxruntime at its lowest and highest level, with the same outputs to "
        f"{LEVELS_DB:.0f} dB, or {BELOW_DB:.0f} dB below the error of the quantization. Weights are named if less than "
        f"{SURE:.0%} are integers. Where the float model does not run in onnxruntime, nothing was tried."
    )
    return f"## Architectures of decoders and their families\n\n{about}\n\n" + table(HEADER, rows)


def said(record: Record) -> str:
    """Format a record as a line of progress."""
    if "total" not in record:
        return f"{record['result']}: {record['why']}"
    share = 1 - sum(record["left"].values()) / max(1, record["total"])
    return f"{record['result']} {share:.1%} exit {record['exit']} {record['why']} {list(record['left'])[:3]}"


if __name__ == "__main__":
    raise SystemExit(main())
