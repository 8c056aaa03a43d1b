"""CALIBRATION: settings of measurements, data and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, final

from pydantic import BeforeValidator

from sbonnx.recipe import names, values
from sbonnx.recipe.sections.keys import Section, key

Inputs = Annotated[names.StreamName, BeforeValidator(values.choice(names.STREAMS)), values.schema(names.STREAMS)]


@final
class Asym(Section):
    """CALIBRATION.ASYM: measure on quantized inputs; ``true`` and ``false`` stand for ``{ENABLE: ...}``."""

    enable: values.Flag | None = key(
        None,
        "measure with everything upstream quantized already, layer by layer",
        "true, false",
        "new",
        shown="true where weights are rounded behind quantized layers anyway",
    )
    ranges: values.Flag = key(True, "with ENABLE: ranges of activations are those after upstream", "true, false", "new")
    rounding: values.Flag = key(
        True, "with ENABLE: rounding of weights sees inputs after upstream", "true, false", "new"
    )

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return data if data is None or isinstance(data, Mapping) else {"ENABLE": data}


@final
class MomentsOf(Section):
    """CALIBRATION.MOMENTS: second moments of the input activations, for input-aware weight rounding."""

    inputs: Inputs = key(
        "quantized",
        "inputs of a layer as they come through the quantized layers before it, or as in the float network (one pass)",
        "quantized, float",
        "new",
    )
    share: values.Share | None = key(
        None,
        "with INPUTS: quantized: how much of the error that its inputs bring a layer's weight is to make up for",
        "0 to 1",
        "new",
        shown="by samples held out, layer by layer",
    )
    rows: values.CountOrNone = key(
        32, "rows of its inputs that a layer sees, for each weight of an output; 0: all there are", "0 or more", "new"
    )

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return data if data is None or isinstance(data, Mapping) else {"INPUTS": data}


@final
class Calibration(Section):
    """CALIBRATION: how ranges and input activations are measured."""

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
    workers: values.Count = key(
        1, "kept for recipes that name it: samples run on threads of one process", "1 or more", "new"
    )
    threads: values.Count | None = key(
        None, "samples that run at a time, on one thread each", "1 or more", "new", shown="one a core"
    )
    cache: values.Folder = key(
        None,
        "folder that keeps what was measured, for other settings on the same model and data, and to go on after a stop",
        "a folder, none",
        "new",
        shown="none",
    )
    asym: Asym = Asym()
    moments: MomentsOf = MomentsOf()
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
        """Memory budget in bytes."""
        return values.memory_bytes(self.memory)
