"""What a peer's script reads and says. Run by the peer's Python, so it imports nothing of ours."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

Job = dict[str, Any]
Feeds = list[dict[str, Any]]

NUMBER: Final = "|number"


def job() -> Job:
    """Parse the only argument: JSON with model, data, output, method and the method's options."""
    found = json.loads(sys.argv[1])
    assert isinstance(found, dict)
    return found


def feeds(wanted: Job) -> Feeds:
    """Load the samples in batches of ``wanted["batch"]`` from .npz: one array per input, samples along its first axis.

    A scalar input has the suffix `NUMBER` and is not batched: each batch has the value of its first sample.
    """
    with np.load(wanted["data"]) as held:
        arrays = {name: held[name] for name in held.files}
    count, batch = len(next(iter(arrays.values()))), int(wanted["batch"])
    return [
        {
            name.removesuffix(NUMBER): np.asarray(x[at]) if name.endswith(NUMBER) else x[at : at + batch]
            for name, x in arrays.items()
        }
        for at in range(0, count - batch + 1, batch)
    ]


class Reader:
    """Calibration data reader in the form of onnxruntime.quantization, which other peers take too."""

    def __init__(self, samples: Feeds) -> None:
        self._samples = samples
        self._left: Iterator[dict[str, Any]] = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch, or None at the end."""
        return next(self._left, None)

    def get_first(self) -> dict[str, Any]:
        """Return the first batch."""
        return self._samples[0]

    def rewind(self) -> None:
        """Restart from the first batch."""
        self._left = iter(self._samples)

    reset_iter = rewind

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._samples[place]


def cpu_seconds() -> float:
    """Return the CPU seconds of all threads of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_mb() -> float:
    """Return the peak memory of this process, in units of 10**6 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("/proc/self/status has no VmHWM: memory can be measured on Linux only")


def main(quantize: Callable[[Job, Feeds], object], *modules: str, batch: int | None = None) -> int:
    """Run the job of the command line.

    The last line of stdout is the cost without imports and loading of samples; output of the peer goes to stderr.

    Args:
        quantize: function that writes the file of a job.
        modules: modules to import before the measurement; some peers compile operators on import.
        batch: batch size of samples, which overrides that of the job.
    """
    wanted = job()
    samples = feeds(wanted if batch is None else wanted | {"batch": batch})
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some peers write files to the current folder
        for module in modules:
            importlib.import_module(module)
        return tell(lambda: quantize(wanted, samples))


def tell(work: Callable[[], object]) -> int:
    """Run the work and print its cost as the last line of stdout."""
    start, begin = cpu_seconds(), time.perf_counter()
    work()
    cost = {"cpu": cpu_seconds() - start, "wall": time.perf_counter() - begin, "peak_mb": peak_mb()}
    print(f"\n{json.dumps(cost)}", file=sys.__stdout__, flush=True)
    return 0
