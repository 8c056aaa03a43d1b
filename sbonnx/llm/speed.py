"""Time to first token, tokens per second and memory of decoders."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.errors import DeviceError
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.report.decoder import DecodingSpeed
from sbonnx.spec import Array
from sbonnx.system.cpu import cores
from sbonnx.system.isolation import python_command
from sbonnx.verify.intervals import UNKNOWN
from sbonnx.verify.load import OtherLoad
from sbonnx.verify.sessions import in_turn, latency_of

ROUNDS: Final = 3
"""Number of times that the prompt is read and tokens are decoded; medians are reported."""

PROMPT: Final = 128
"""Tokens of the prompt, at most."""

TOGETHER: Final = 1 << 30
"""Bytes of two models above which they are timed one after the other, as both would not fit into memory.

The load of a machine then affects one of them alone: on a busy machine, the ratio has no interval.
"""

DECODED: Final = 16
"""Tokens that are decoded one by one in a round."""


def compare_speed(
    decoder: Decoder, against: Decoder | None, ids: Array, source: Feed | None = None
) -> tuple[DecodingSpeed, ...]:
    """Measure speed with one thread and with all, in turn with the float decoder, token by token.

    Models of more than `TOGETHER` bytes are measured one after the other, so that one is open at a time.

    Args:
        ids: tokens of the prompt, (length,); at most the first 128 are used.
        source: inputs of the encoder, if there is one; its time is part of that of the first token.
    """
    decoded = DECODED if decoder.context is None else min(DECODED, decoder.context - 1)
    limit = PROMPT if decoder.context is None else min(PROMPT, decoder.context - decoded)
    prompt = ids[: max(1, limit)]
    return tuple(
        _speed(decoder, against, (prompt, source), decoded, threads) for threads in dict.fromkeys((1, cores()))
    )


def _speed(
    decoder: Decoder, against: Decoder | None, start: tuple[Array, Feed | None], decoded: int, threads: int
) -> DecodingSpeed:
    decoders = [model for model in (against, decoder) if model is not None]
    together = sum(model.bytes for model in decoders) <= TOGETHER
    load = OtherLoad()
    first: list[list[float]] = []
    tokens: list[list[float]] = []
    for some in [decoders] if together else [[model] for model in decoders]:
        sessions = [DecoderSession(model, threads=threads) for model in some]
        timed = [_timed(sessions, start, decoded) for _ in range(ROUNDS)]
        del sessions  # before the next are opened
        for which in range(len(some)):
            first.append([model[which][0] for model in timed])
            tokens.append([ms for model in timed for ms in model[which][1:]])
    busy, own = load.busy, (median(first[-1]), 1000 / median(tokens[-1]))
    if against is None:
        return DecodingSpeed(threads, len(start[0]), *own, busy=busy)
    latency = latency_of(tokens[0], tokens[1], busy=busy)
    is_known = latency.interval != UNKNOWN and (together or not busy)
    interval = latency.interval if is_known else None
    before = median(first[0]), 1000 / median(tokens[0])
    return DecodingSpeed(threads, len(start[0]), *own, *before, latency.ratio, interval, busy)


def _timed(sessions: Sequence[DecoderSession], start: tuple[Array, Feed | None], decoded: int) -> list[list[float]]:
    """Return the milliseconds until the first token, and of each further one, by session."""
    runs = [partial(next, session.decode(*start)) for session in sessions]
    return in_turn(runs, seconds=math.inf, most=1 + decoded)


def time_tokens(
    session: DecoderSession, prompt: Array, decoded: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return seconds until the first token, and per further token.

    Args:
        prompt: token ids, (length,).
        decoded: number of further tokens.
        clock: returns seconds; `time.process_time` for sessions of one thread on a busy machine.
    """
    first = _seconds(lambda: session.greedy(prompt, 1), clock)
    total = _seconds(lambda: session.greedy(prompt, 1 + decoded), clock)
    return first, max(total - first, 1e-9) / decoded


def _seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    return clock() - begin


def peak_memory(decoder: Decoder, ids: Array) -> int:
    """Return the bytes that opening a decoder, a prompt and decoding add to the peak resident memory of a process.

    Raises:
        DeviceError: the process fails.
    """
    tokens = [int(token) for token in ids[:PROMPT]]
    adapter = None if decoder.adapter is None else str(decoder.adapter)
    command = python_command("sbonnx.llm.speed", "print_memory", str(decoder.folder or decoder.model), tokens, adapter)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if done.returncode or not words or not words[-1].isdigit():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DeviceError(f"'{decoder.model}' could not be run in a separate process: {last}")
    return int(words[-1])


def print_memory(source: str, tokens: list[int], adapter: str | None = None) -> None:
    """Print the increase of the peak resident memory, in bytes; see `peak_memory`."""
    from sbonnx.system.runtime import onnxruntime

    decoder = read_decoder(source, adapter=adapter)
    onnxruntime()
    before = _resident("VmRSS")
    session = DecoderSession(decoder, threads=1)
    session.greedy(np.asarray(tokens[: max(1, len(tokens) - 2)], np.int64), 2)
    print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Return the resident memory of this process now (VmRSS) or at its peak (VmHWM), in bytes.

    Linux has a peak of each process; that of getrusage is inherited from the parent process.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
