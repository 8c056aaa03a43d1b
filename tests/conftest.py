"""What the tests share: the folder of real models, and the one meaning of the markers."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# Workers share the processors: threads of BLAS and OpenMP, one for each processor and worker, would wait busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sbonnx.present.text import printer
from sbonnx.search import advice
from sbonnx.system.machine_costs import CACHE
from sbonnx.system.terminal import to_json, versioned
from sbonnx.verify import sessions
from tests.support.lanes import divide
from tests.support.toy_slack import toy_slack

ROOT = Path(__file__).resolve().parents[1]
PACK = Path(os.environ.get("SBONNX_PACK") or ROOT.parent / "shared" / "data")
"""Trained models and real inputs, beside the repository where they are at hand."""

# Started in the background of a shell, everything begun from here would ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pack() -> Path:
    """The folder of real models (`manifest.json`, `eval.py`, models/, data/), or a skip where there is none."""
    if not (PACK / "manifest.json").is_file():
        pytest.skip("the real models are neither in ../shared/data nor where SBONNX_PACK points")
    return PACK


@pytest.fixture(scope="session", autouse=True)
def brief_latency() -> Iterator[None]:
    """Measure latency for a tenth of the time, still at least `sessions.RUNS[0]` rounds: few tests are about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "SECONDS", sessions.SECONDS / 10)
        yield


@pytest.fixture(scope="session", autouse=True)
def brief_trials() -> Iterator[None]:
    """Start trials of changes for advice for a tenth of the time, at least one: few tests are about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "SECONDS", advice.SECONDS / 10)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the files of `sbonnx tune` of whoever runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def toy_graphs() -> Iterator[None]:
    """As in `toy_slack`."""
    with toy_slack():
        yield


@pytest.fixture(autouse=True)
def checked_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate every JSON output of the command line against its schema."""

    def checked(schema: str, values: Mapping[str, Any]) -> dict[str, Any]:
        from tests.support.json_schemas import check

        output = versioned(schema, values)
        check(json.loads(to_json(output)))
        return output

    monkeypatch.setattr(printer, "versioned", checked)


def has_gpu() -> bool:
    """Whether the installed onnxruntime can run on an NVIDIA GPU."""
    if importlib.util.find_spec("onnxruntime") is None:
        return False
    from sbonnx.system.runtime import best_device

    return best_device() == "cuda"


BEFORE_1_24 = {
    "affine weights": "its QLinearConv takes one zero point for all channels of a weight",
    "test_any_channels": "its QLinearConv takes one zero point for all channels of a weight",
    "w6a8 16 per-channel-affine": "its QLinearConv takes one zero point for all channels of a weight",
    "test_packed_weights_in_blocks_are_unpacked": "its blockwise quantizer has another interface",
    "test_no_worse_than_onnxruntimes_own_quantizer": "its blockwise quantizer has another interface",
    "test_blocks_of_four_bits_are_no_worse": "its blockwise quantizer has another interface",
    "test_a_model_newer_than_the_parser_is_refused[11]": "it does not read the IR version of the newest opset",
    "test_branches_read_what_is_outside_in_their_type": "it wants initializers of two branches to have two names",
    "test_every_model[cifar_resnet20]": "its rewrite of float16 biases cannot be left out",
}
"""Tests of what onnxruntime before 1.24 does not do, by a part of their names."""


def runtime_version() -> tuple[int, ...]:
    """Major and minor version of the installed onnxruntime; (0,) where there is none."""
    if importlib.util.find_spec("onnxruntime") is None:
        return (0,)
    import onnxruntime

    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the lanes; skip tests marked `gpu` where nothing can run them, and others on an old onnxruntime."""
    divide(items)
    if runtime_version() < (1, 24):
        for item in items:
            for part, why in BEFORE_1_24.items():
                if part in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=f"onnxruntime before 1.24: {why}"))
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU, or onnxruntime-gpu is not installed"))


def pytest_collection_finish() -> None:
    """Exempt what collection created, over a million objects, from garbage collection: a full one takes a second."""
    gc.collect()
    gc.freeze()
