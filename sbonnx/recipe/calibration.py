"""CALIBRATION: what is measured, on what, with how much memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from sbonnx.recipe import values
from sbonnx.recipe.sections import Section, key


@final
class Asym(Section):
    """CALIBRATION.ASYM: ``true`` and ``false`` stand for ``{ENABLE: ...}``."""

    enable: values.Flag = key(
        False, "measure with everything upstream quantized already, layer by layer", "true, false", "new"
    )
    ranges: values.Flag = key(True, "with ENABLE: ranges of activations are those after upstream", "true, false", "new")
    rounding: values.Flag = key(
        True, "with ENABLE: rounding of weights sees inputs after upstream", "true, false", "new"
    )

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return data if data is None or isinstance(data, Mapping) else {"ENABLE": data}


@final
class Calibration(Section):
    """CALIBRATION"""

    memory: values.Memory = key(
        "2 GiB",
        "memory for activations while calibrating; past it they go to disk",
        "a size: 2 GiB, 500 MB",
        "new",
    )
    granularity: values.GranularityName = key(
        "auto",
        "what runs at a time: the whole graph, pieces whose outputs fit MEMORY, or single layers over all the data",
        "auto (whole where it fits, else budget; layer for ASYM), whole, budget, layer",
        "new",
    )
    workers: values.Count = key(1, "processes that share the data; the result is the same", "1 or more", "new")
    threads: values.Count | None = key(
        None, "samples that run at a time in each process, on one thread each", "1 or more", "new", shown="one a core"
    )
    cache: values.Folder = key(
        None,
        "folder that keeps what was measured, for other settings on the same model and data, and to go on after a stop",
        "a folder, none",
        "new",
        shown="none",
    )
    asym: Asym = Asym()
    feedback: values.Feedback = key(
        {},
        "recurrent models: the input that takes each output at the next step; a feed that brings it begins a sequence",
        "{output: input}",
        "new",
    )
    pick: values.PickName = key(
        "first",
        "which feeds SAMPLES keeps: the first, or some by chance (by SEED and position, the same ones everywhere)",
        "first, random",
        "new",
    )
    seed: values.Seed = key(0, "of what is picked by chance", "0 or more", "new")

    @property
    def memory_bytes(self) -> int:
        """The budget as a number of bytes."""
        return values.memory_bytes(self.memory)
