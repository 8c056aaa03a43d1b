"""Cases that once ended badly, one for each defect, with the exit code that is right."""

from __future__ import annotations

import base64
import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import onnx

from sbonnx.system.runtime import version
from tests.fuzz import seeds
from tests.fuzz.broken_models import (
    as_text,
    branches,
    by_zero,
    changed,
    clip_to_nan,
    constant_without_output,
    empty_size,
    escape,
    functions,
    future_domain,
    least_by_minus_one,
    listed_twice,
    located,
    long_name,
    many_dimensions,
    minus_one,
    mode_of_bytes,
    nameless,
    nested,
    pad,
    parameter_twice,
    pattern,
    ranges,
    seven,
    seven_unlisted,
    unknown_output,
    wrong_attribute,
)
from tests.fuzz.datafiles import good_npz
from tests.fuzz.harness import Case
from tests.fuzz.parts import MODEL, model_case


@dataclass(frozen=True)
class Known:
    """Factory of a case, its exit code, and words that the line of a refusal must have."""

    name: str
    case: Callable[[], Case]
    code: int
    words: tuple[str, ...] = ()


def quantize(files: Mapping[str, bytes], data: str = "d.npz", *more: str, **keywords: Any) -> Case:
    """A quantize of the good model over these files."""
    argv = ("quantize", MODEL, "--data", data, "-o", "out/q.onnx", *more)
    return Case({MODEL: seeds.seed("plain"), **files}, argv, **keywords)


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def flagged(method: int | None = None, flag: int | None = None) -> bytes:
    """The good data with another compression method or flag written into its zip headers."""
    data = bytearray(good_npz())
    for signature, flags, methods in ((b"PK\x03\x04", 6, 8), (b"PK\x01\x02", 8, 10)):
        at = data.index(signature)
        if flag is not None:
            struct.pack_into("<H", data, at + flags, flag)
        if method is not None:
            struct.pack_into("<H", data, at + methods, method)
    return bytes(data)


def zip_bomb() -> bytes:
    """1.6 GB of zeros in few bytes, as an array of a wrong shape."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (400000000,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    file = io.BytesIO()
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("x.npy", "w") as member:
        member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        for _ in range(160):
            member.write(bytes(10_000_000))
    return file.getvalue()


def inner(content: bytes) -> bytes:
    """Polygraphy's JSON around an `.npz`."""
    text = base64.b64encode(content).decode()
    return f'{{"lst": [{{"x": {{"array": "{text}", "polygraphy_class": "Array"}}}}]}}'.encode()


def recipe(text: str) -> Case:
    return Case({MODEL: seeds.seed("plain"), "r.yaml": text.encode()}, ("recipe", "r.yaml"))


REFUSED: Final[dict[str, tuple[Callable[[], onnx.ModelProto], str]]] = {
    "attribute of a wrong type": (wrong_attribute, "axes"),
    "functions that grow without bound": (lambda: functions(25), "F"),
    "branches without outputs": (lambda: branches(outputs=0), "if0"),
    "branch that is not a graph": (lambda: branches(graph=False), "then_branch"),
    "mode that is not text": (mode_of_bytes, "mode"),
    "parameter of a function twice": (parameter_twice, "has 1 input"),
    "pads as text": (lambda: pad(pads="text"), "pad"),
    "numbers declared as text": (lambda: changed(as_text), "'w'"),
    "69 dimensions": (lambda: changed(many_dimensions), "'w'"),
    "location with NUL": (lambda: located("a\0b"), "'w'"),
    "location of 5,000 characters": (lambda: located("n" * 5000), "'w'"),
    "location of a link to itself": (lambda: located("loop.bin"), "'w'"),
    "constant without an output": (constant_without_output, "'c'"),
    "operator of a million characters": (lambda: changed(long_name), "XXX"),
    "control characters": (lambda: changed(escape), "Relux"),
    "least integer by -1": (lambda: least_by_minus_one("Div"), "div"),
    "least integer modulo -1": (lambda: least_by_minus_one("Mod"), "mod"),
    "division by zero": (by_zero, "div"),
    "Ifs within Ifs": (lambda: nested(40), "nested"),
}
"""Models that no verb can use, and a word that the line must have."""

ACCEPTED: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "output listed twice": listed_twice,
    "size of -1": lambda: changed(minus_one),
    "graph without a name": lambda: changed(nameless),
    "opset 7": seven,
    "opset 7, initializers unlisted": seven_unlisted,
    "size of 0": empty_size,
}
"""Models that onnxruntime runs, or that only fail as they run: simplify must give the same function."""


def torn() -> bytes:
    """The good data with three bytes of an array changed."""
    npz = good_npz()
    return npz[:400] + bytes(byte ^ 0x55 for byte in npz[400:403]) + npz[403:]


DATA: Final[dict[str, Callable[[], Case]]] = {
    "fifo": lambda: quantize({}, fifos=("d.npz",)),
    "link to itself": lambda: quantize({}, "d.json", links={"d.json": "d.json"}),
    "encrypted member": lambda: quantize({"d.npz": flagged(flag=1)}),
    "unknown compression": lambda: quantize({"d.npz": flagged(method=93)}),
    "deep json": lambda: quantize({"d.json": b"[" * 100_000}, "d.json"),
    "json around an empty npz": lambda: quantize({"d.json": inner(zipped())}, "d.json"),
    "json around half an npz": lambda: quantize({"d.json": inner(good_npz()[:500])}, "d.json"),
    "json around a bad checksum": lambda: quantize({"d.json": inner(torn())}, "d.json"),
    "header that is no literal": lambda: quantize({"d.npz": zipped(x=b"\x93NUMPY\x01\x00\x04\x00{{{\n")}),
    "zip bomb": lambda: quantize({"d.npz": zip_bomb()}),
    "digits that are none": lambda: quantize({"d/x.npy": b"", "d/²1.npy": b""}, "d"),
}
"""Data that is refused."""


def preview(
    text: str,
    files: Mapping[str, bytes] | None = None,
    *,
    links: Mapping[str, str] | None = None,
    fifos: tuple[str, ...] = (),
) -> Case:
    """A preview of a job file beside a good model, good data and a metric."""
    metric = b"def score(path):\n    return {'s': 1.0}\n"
    beside = {MODEL: seeds.seed("plain"), "d.npz": good_npz(), "metric.py": metric, **(files or {})}
    return Case({**beside, "j.yaml": text.encode()}, ("batch", "j.yaml", "--dry-run"), links=links or {}, fifos=fifos)


def job(*, model: str = MODEL, more: str = "") -> str:
    """A job file of one job."""
    return f"output: out\njobs:\n  - {{model: {model}, data: d.npz, accept: {{metric: 'metric.py:score'}}{more}}}\n"


def simplify(target: str, **keywords: Any) -> Case:
    """A simplify of the good model to `target`."""
    return Case({MODEL: seeds.seed("plain")}, ("simplify", MODEL, "-o", target, "--force"), **keywords)


def kernel_costs() -> Case:
    files = {
        MODEL: seeds.seed("plain"),
        "k.json": b"[" * 100_000,
        "r.yaml": b"BACKEND: onnxruntime\nKERNEL_COSTS: k.json\n",
    }
    return Case(files, ("plan", MODEL, "--recipe", "r.yaml"))


def circle() -> Case:
    """Links in a tree of models that lead back to it."""
    links = {f"models/{name}": "." for name in ("one", "two", "three")}
    return preview(job(model="models/**/x*.onnx"), {"models/a/x1.onnx": seeds.seed("plain")}, links=links)


ENDLESS: Final = int(version() >= (1, 30))
"""Exit code for a Range without an end, which onnxruntime refuses since 1.30; before, it gives an empty tensor."""

OTHERS: Final[tuple[Known, ...]] = (
    Known("number of 90,000 digits", lambda: recipe("SAMPLES: " + "9" * 90_000), 2, ("r.yaml",)),
    Known("deep kernel costs", kernel_costs, 2, ("k.json",)),
    Known("output of 300 characters", lambda: simplify(f"out/{'n' * 300}.onnx"), 2),
    Known("output is a fifo", lambda: simplify("pipe", fifos=("pipe",)), 2, ("pipe",)),
    Known("output is a link to a fifo", lambda: simplify("p", fifos=("pipe",), links={"p": "pipe"}), 2, ("p",)),
    Known("links in a circle", circle, 0),
    Known("model is a fifo", lambda: preview(job(model="pipe.onnx"), fifos=("pipe.onnx",)), 1, ("pipe",)),
    Known("output over the job file", lambda: preview(job(more=", output: ../j.yaml")), 2, ("j.yaml",)),
    Known("output over the metric", lambda: preview(job(more=", output: ../metric.py")), 2, ("metric.py",)),
    Known("output elsewhere", lambda: preview(job(more=", output: ../elsewhere/q.onnx")), 2, ("elsewhere",)),
    Known("pattern that the runtime dislikes", lambda: over(pattern(), "quantize"), 2),
    Known("range to infinity", lambda: over(ranges(float("inf")), "simplify"), ENDLESS),
    Known("range to NaN", lambda: over(ranges(float("nan")), "simplify"), ENDLESS),
    Known("clip to NaN", lambda: quantize({MODEL: clip_to_nan().SerializeToString(), "d.npz": good_npz()}), 0),
    Known("functions of opset 2147483648", lambda: over(future_domain(), "simplify"), 2, ("2147483648",)),
    Known("output of unknown shape", lambda: over(unknown_output(), "simplify"), 1),
)
"""Recipes, job files and outputs."""


def over(proto: onnx.ModelProto, verb: str, **links: str) -> Case:
    """A verb over a model; `links` beside it."""
    case = model_case(proto.SerializeToString(), verb)
    return Case(case.files, case.argv, case.same, links=links)


def known() -> list[Known]:
    """All of them."""
    rows = [
        Known(
            f"{name}: {verb}",
            partial(lambda make, verb: over(make(), verb, **{"loop.bin": "loop.bin"}), make, verb),
            2,
            (word,),
        )
        for name, (make, word) in REFUSED.items()
        for verb in ("inspect", "simplify", "quantize")
    ]
    rows += [
        Known(f"{name}: simplify", partial(lambda make: over(make(), "simplify"), make), 0)
        for name, make in ACCEPTED.items()
    ]
    rows += [Known(name, make, 2, ("DataError",)) for name, make in DATA.items()]
    return [*rows, *OTHERS]
