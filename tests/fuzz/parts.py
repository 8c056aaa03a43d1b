"""The parts of the fuzz suite: each a strategy of cases."""

from __future__ import annotations

import io
from functools import cache
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from tests.fuzz import seeds
from tests.fuzz.datafiles import data_files, good_npz
from tests.fuzz.documents import documents
from tests.fuzz.harness import Case
from tests.fuzz.mutations import EDITS, TEXTS, damaged, mutated

MODEL: Final = "m.onnx"
VERBS: Final[dict[str, tuple[str, ...]]] = {
    "inspect": ("inspect", MODEL),
    "plan": ("plan", MODEL, "--backend", "tensorrt"),
    "simplify": ("simplify", MODEL, "-o", "out/s.onnx"),
    "lint": ("lint", MODEL, "--target", "onnxruntime", "--fix", "-o", "out/l.onnx", "--sarif", "out/l.sarif"),
    "quantize": ("quantize", MODEL, "--data", "d.npz", "-o", "out/q.onnx", "--report", "out/q.json"),
    "weight_only": ("quantize", MODEL, "--mode", "weight_only", "--requantize", "-o", "out/q.onnx"),
}


def fed(content: bytes) -> bytes:
    """An `.npz` that fits the inputs of a serialized model as far as they can be fed."""
    file = io.BytesIO()
    try:
        found = seeds.arrays(onnx.ModelProto.FromString(content))
    except (DecodeError, ValueError):
        found = {}
    np.savez(file, **(found or seeds.arrays(onnx.load_from_string(seeds.seed("plain")))))
    return file.getvalue()


def model_case(content: bytes, verb: str) -> Case:
    """One verb over one model file."""
    same = (MODEL, "out/s.onnx") if verb == "simplify" else None
    return Case({**seeds.files(content), "d.npz": fed(content)}, VERBS[verb], same)


@st.composite
def models(draw: st.DrawFn) -> Case:
    """A model with fields changed."""
    content = mutated(seeds.seed(draw(st.sampled_from(tuple(seeds.SEEDS)))), draw(EDITS))
    return model_case(content, draw(st.sampled_from(tuple(VERBS))))


@st.composite
def bytes_of_models(draw: st.DrawFn) -> Case:
    """A model file with bytes changed."""
    content = draw(damaged(seeds.seed(draw(st.sampled_from(tuple(seeds.SEEDS))))))
    return model_case(content, draw(st.sampled_from(tuple(VERBS))))


@st.composite
def data(draw: st.DrawFn) -> Case:
    """Calibration data that is wrong."""
    name, files, fifos, links = draw(data_files())
    split = ("--split", "2") if draw(st.booleans()) else ()
    argv = ("quantize", MODEL, "--data", name, "-o", "out/q.onnx", *split)
    return Case({MODEL: seeds.seed("plain"), **files}, argv, fifos=fifos, links=links)


@cache
def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe."""
    from sbonnx.recipe import json_schema

    return json_schema()


@cache
def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    from sbonnx.batch.jobs.jobfile import schema

    return schema()


@st.composite
def recipes(draw: st.DrawFn) -> Case:
    """A recipe, checked alone, planned with, or quantized with."""
    content = draw(documents(recipe_schema(), {}))
    argv = draw(
        st.sampled_from(
            (
                ("recipe", "r.yaml"),
                ("recipe", "r.yaml", "--backend", "onnxruntime"),
                ("plan", MODEL, "--recipe", "r.yaml"),
                ("quantize", MODEL, "--data", "d.npz", "--recipe", "r.yaml", "-o", "out/q.onnx"),
            )
        )
    )
    return Case({MODEL: seeds.seed("plain"), "d.npz": good_npz(), "r.yaml": content}, argv)


FLAGS: Final = (
    *("--bits", "--split", "--samples", "--backend", "--set", "--memory", "--block-size", "--mode", "--format"),
    *("--granularity", "--feedback", "--smooth-quant", "--max-loss", "--min-sqnr", "--high-precision"),
)


VALUES: Final = (
    *("-1", "0", "1e999", "nan", "w3a3", "[a", "a=b", "2", "8", "0.5", "true", "none", "w4a8", "fp8", "64 MiB", "x=y"),
    *("onnxruntime", "virtual", "tensorrt@10", "dynamic", "weight_only", "qoperator", "layer", "A.OBSERVER.TYPE=mse"),
)


@st.composite
def flags(draw: st.DrawFn) -> Case:
    """Odd values on the command line."""
    text = draw(st.sampled_from((*(one for one in TEXTS if "\0" not in one), *VALUES, *VALUES)))
    flag = draw(st.sampled_from(FLAGS))
    argv = ("quantize", MODEL, "--data", "d.npz", "-o", "out/q.onnx", f"{flag}={text}")
    return Case({MODEL: seeds.seed("plain"), "d.npz": good_npz()}, argv)


@st.composite
def jobs(draw: st.DrawFn) -> Case:
    """A job file, previewed."""
    base = {"output": "out", "jobs": [{"model": MODEL, "data": "d.npz"}]}
    content = draw(documents(job_schema(), base))
    files = {
        MODEL: seeds.seed("plain"),
        "d.npz": good_npz(),
        "j.yaml": content,
        "metric.py": b"def score(path):\n  1\n",
    }
    return Case(files, ("batch", "j.yaml", "--dry-run"))


def renamed(content: bytes, texts: list[str]) -> bytes:
    """The model with every name of a node or tensor extended by one of `texts`, sound as before."""
    model = onnx.ModelProto.FromString(content)

    def name(old: str) -> str:
        return f"{old}{texts[sum(old.encode()) % len(texts)]}" if old else old

    for index, node in enumerate(model.graph.node):
        node.name = name(f"{node.op_type}{index}")
        node.input[:] = [name(one) for one in node.input]
        node.output[:] = [name(one) for one in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = name(value.name)
    return bytes(model.SerializeToString())


EVIL: Final = (
    *(text for text in TEXTS[12:-1] if "\0" not in text),
    "]]>",
    "--><!--",
    "\u2028",
    "\\",
    "\n",
)
NAMED: Final[dict[str, tuple[str, ...]]] = {
    "report.json": ("quantize", MODEL, "--data", "d.npz", "-o", "out/q.onnx", "--report", "out/r.json"),
    "report.html": ("quantize", MODEL, "--data", "d.npz", "-o", "out/q.onnx", "--report", "out/r.html"),
    "sarif": ("lint", MODEL, "--target", "tensorrt@10", "--sarif", "out/l.sarif"),
    "inspect": ("inspect", MODEL, "--json"),
    "plan": ("plan", MODEL, "--json"),
    "mermaid": ("profile", MODEL, "--data", "d.npz", "--mermaid", "out/p.mmd"),
}


@st.composite
def names(draw: st.DrawFn) -> Case:
    """Names that try to break out of terminals, pages and documents."""
    texts = draw(st.lists(st.sampled_from(EVIL), min_size=1, max_size=3))
    content = renamed(seeds.seed(draw(st.sampled_from(("plain", "residual", "attention")))), texts)
    return Case({MODEL: content, "d.npz": fed(content)}, NAMED[draw(st.sampled_from(tuple(NAMED)))])


PARTS: Final[dict[str, tuple[st.SearchStrategy[Case], int]]] = {
    "models": (models(), 60),
    "bytes of models": (bytes_of_models(), 30),
    "data": (data(), 30),
    "recipes": (recipes(), 30),
    "flags": (flags(), 30),
    "jobs": (jobs(), 30),
    "names": (names(), 12),
}
"""Strategy of every part, and how many cases of it the short mode runs."""
