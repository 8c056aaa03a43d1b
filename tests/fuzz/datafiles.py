"""Data files that are wrong in some way, as hypothesis strategies."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from typing import Any, Final

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import numpy_helper

from tests.fuzz.mutations import EDITS, TEXTS, damaged, messages, mutated
from tests.fuzz.seeds import arrays, seed
from tests.support.models import model as from_text

__all__ = ["data_files", "good_npz", "messages"]

SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    (),
    (0,),
    (4,),
    (0, 3, 8, 8),
    (4, 3, 8, 8),
    (1, 3, 8, 8),
    (3, 8, 8),
    (4, 8, 8, 3),
    (4, 3, 8, 9),
    (4, 3, 0, 8),
    (1,) * 30,
    (100, 3, 8, 8),
)
DTYPES: Final = ("f4", ">f4", "f2", "f8", "i8", "u1", "?", "c8", "U5", "S3", "M8[s]", "V7", "g")
VALUES: Final = (0.0, 1.0, 1e30, 3e38, np.nan, np.inf, -np.inf, 1e-40)
HEADERS: Final = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3, 8, 8), }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (4, 3, 8, 8), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 3, 8, 8), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 3, 8, 8), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3, 8, True), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
    "{'descr': [('a', '<f4'), ('b', '<i8')], 'fortran_order': False, 'shape': (4,), }",
    "{'descr': '<f400000000', 'fortran_order': False, 'shape': (), }",
    "{'descr': '<f4'}",
    "{" * 500,
    "__import__('os').mkdir('executed')",
    "",
)


def good_npz(batch: int = 4) -> bytes:
    """Data that fits the seed called 'plain'."""
    file = io.BytesIO()
    np.savez(file, **arrays(onnx.load_from_string(seed("plain")), batch))
    return file.getvalue()


def npy(array: Any) -> bytes:
    """`array` as a `.npy` file; pickled where its type needs that."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def with_header(header: str, content: bytes) -> bytes:
    """A `.npy` file with any text as its header."""
    text = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + min(len(text), 65535).to_bytes(2, "little") + text + content


@st.composite
def member(draw: st.DrawFn) -> bytes:
    """The bytes of one array."""
    kind = draw(st.sampled_from(("array", "array", "header", "object", "bytes")))
    if kind == "header":
        return with_header(draw(st.sampled_from(HEADERS)), draw(st.sampled_from((b"", b"\0" * 3072, b"\xff" * 100))))
    if kind == "object":
        return npy(np.array([{"a": 1}, None], dtype=object))
    if kind == "bytes":
        return draw(st.binary(max_size=300))
    shape = draw(st.sampled_from(SHAPES))
    with np.errstate(all="ignore"):
        return npy(np.full(shape, draw(st.sampled_from(VALUES)), "f8").astype(draw(st.sampled_from(DTYPES))))


@st.composite
def archive(draw: st.DrawFn) -> bytes:
    """A zip file of arrays."""
    file = io.BytesIO()
    method = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)))
    with zipfile.ZipFile(file, "w", method) as zipped:
        for _ in range(draw(st.integers(0, 3))):
            name = draw(st.sampled_from(("x.npy", "x.npy", "y.npy", "x", "../x.npy", "x.npy/", "a\x1b[31mb.npy")))
            zipped.writestr(zipfile.ZipInfo(name), draw(member()), compress_type=method)
    return file.getvalue()


@st.composite
def polygraphy(draw: st.DrawFn) -> bytes:
    """Polygraphy's JSON, or something like it."""
    inner = draw(st.one_of(st.just(good_npz()), archive(), st.binary(max_size=50)))
    text = base64.b64encode(inner).decode()
    leaf: st.SearchStrategy[Any] = st.one_of(
        st.just({"array": text, "polygraphy_class": "numpy_ndarray"}),
        st.sampled_from((None, True, 3, -1, 1e300, "", "x", text[:-3], {}, [])),
        st.sampled_from(TEXTS),
    )
    value = st.one_of(
        st.lists(st.dictionaries(st.sampled_from(("x", "y", "polygraphy_class")), leaf, max_size=3), max_size=3),
        st.dictionaries(st.sampled_from(("lst", "x", "polygraphy_class")), st.one_of(leaf, st.lists(leaf)), max_size=3),
        leaf,
    )
    kind = draw(st.sampled_from(("json", "json", "deep", "cut", "number")))
    if kind == "deep":
        depth = draw(st.sampled_from((100, 1000, 100_000)))
        return (b"[" * depth) + (b"]" * depth)
    if kind == "number":
        return b'[{"x": ' + b"9" * draw(st.sampled_from((10, 5000, 100_000))) + b"}]"
    encoded = json.dumps(draw(value)).encode()
    return encoded[: draw(st.integers(0, len(encoded)))] if kind == "cut" else encoded


@st.composite
def protobuf(draw: st.DrawFn) -> bytes:
    """An `input_0.pb` with one tensor, mutated."""
    holder = from_text("agraph (float[4] x) => (float[4] y) { y = Identity (x) }")
    holder.graph.initializer.append(numpy_helper.from_array(arrays(onnx.load_from_string(seed("plain")))["x"], "x"))
    changed = onnx.ModelProto.FromString(mutated(holder.SerializeToString(), draw(EDITS)))
    tensors = changed.graph.initializer
    return bytes(tensors[0].SerializeToString()) if len(tensors) else b""


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, dict[str, bytes], tuple[str, ...], dict[str, str]]:
    """Value of ``--data``, its files, FIFOs, and symlinks."""
    kind = draw(st.sampled_from(("npz", "npz", "damaged", "damaged", "npy", "json", "folder", "tests", "fifo", "link")))
    if kind == "npz":
        return "d.npz", {"d.npz": draw(archive())}, (), {}
    if kind == "damaged":
        return "d.npz", {"d.npz": draw(damaged(good_npz()))}, (), {}
    if kind == "npy":
        return "d.npy", {"d.npy": draw(member())}, (), {}
    if kind == "json":
        return "d.json", {"d.json": draw(polygraphy())}, (), {}
    if kind == "folder":
        names = draw(st.lists(st.sampled_from(("0.npz", "1.npz", "²1.npz", "x.npy", ".hidden", "a.json")), max_size=3))
        return "d", {f"d/{name}": draw(st.one_of(archive(), member())) for name in names} or {"d/.keep": b""}, (), {}
    if kind == "tests":
        name = draw(st.sampled_from(("input_0.pb", "input_1.pb", "input_x.pb", "output_0.pb")))
        return "d", {f"d/test_data_set_0/{name}": draw(protobuf())}, (), {}
    name = draw(st.sampled_from(("d.npz", "d.npy", "d.json")))
    if kind == "fifo":
        return name, {}, (name,), {}
    return name, {}, (), {name: draw(st.sampled_from((name, "missing", ".", "out")))}
