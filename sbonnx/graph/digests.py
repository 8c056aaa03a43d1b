"""Digests of computations: equal if and only if the same inputs give the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from onnx import AttributeProto

from sbonnx.errors import ModelError
from sbonnx.graph.model import Body, Constant, Graph, Node, Tensor
from sbonnx.graph.query import all_tensors, bodies, dtype, ordered, shape, stored_values
from sbonnx.graph.storage.weights import MappedWeights, chunks
from sbonnx.ops import RANDOM
from sbonnx.spec import Array

READ_BYTES: Final = 1 << 22
"""Bytes read from a file at a time."""

HEX_DIGITS: Final = 32
"""Digests are written as the first half of a sha256: 128 bits."""


def combined(tag: str, *parts: bytes) -> bytes:
    """Compute the sha256 of `tag` and `parts`, prefixed by their lengths: different lists give different bytes."""
    lengths = ",".join([str(len(part)) for part in parts])
    return hashlib.sha256(b"".join((f"{len(tag)} {tag} {lengths};".encode(), *parts))).digest()


def text(digest: bytes) -> str:
    """Format a digest as 32 hexadecimal digits."""
    return digest.hex()[:HEX_DIGITS]


def file_digest(path: Path) -> bytes:
    """Compute the 128-bit XXH3 of a file, to recognize it. Not secure against forgery.

    Raises:
        OSError: it cannot be read.
    """
    total = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            total.update(piece)
    return bytes(total.digest())


def array_digests(arrays: Iterable[Array | MappedWeights]) -> Iterator[bytes]:
    """Yield the digest of each array, in order, over type, shape and bytes (characters for texts).

    Mapped weights are read in pieces and not held in memory. The bytes are hashed by 128-bit XXH3, ten times as fast as
    sha256: digests distinguish data, they are not secure against forgery.
    """
    for given in arrays:
        values = given.astype(given.dtype.newbyteorder("=")) if given.dtype.byteorder == ">" else given
        kind = np.dtype(values.dtype)
        name = "text" if kind.kind in "OUS" else kind.name
        head = f"{name} {tuple(int(size) for size in values.shape)}".encode()
        yield combined("array", head, _content(values))


def _content(values: Array | MappedWeights) -> bytes:
    if not isinstance(values, MappedWeights) and values.dtype.kind in "OUS":
        parts = [
            item if isinstance(item, bytes) else str(item).encode("utf-8", "surrogatepass") for item in values.flat
        ]
        return combined("texts", *parts)
    total = xxhash.xxh3_128()
    for chunk in chunks(values):
        total.update(chunk)
    return total.digest()


def tensor_digests(graph: Graph) -> dict[str, str]:
    """Compute, for every tensor of every scope by name, a digest of its computation (a Merkle tree, sha256).

    - A constant: type, shape, bytes.
    - A graph input: name, type, and shape (dynamic dimensions count as dynamic, without their names).
    - An output of a node: operator, domain, opset, attributes, digests of its inputs and bodies, index of the output.
      Node names do not count, except for operators that draw random numbers, which are all different.
    - In a branch of If, the condition counts too: it decides for which samples the branch runs. In a body of Loop, Scan
      etc. the whole node counts: it decides how often the body runs.

    Two graphs (before and after an edit, in other processes, under other versions of Python) agree on a digest if the
    tensor has the same values for the same feeds, given the same runtime.

    Raises:
        ModelError: nodes form a cycle, or an attribute has no form in ONNX.
    """
    digests = _TensorDigests(graph)
    digests.add_scope(graph, 0)
    digests.add_context(graph, b"")
    return {tensor.name: text(digests.final[id(tensor)]) for tensor in all_tensors(graph)}


def outputs_digest(graph: Graph, digests: Mapping[str, str] | None = None) -> str:
    """Compute the digest of a whole model from its outputs' names and digests. `digests`: of `tensor_digests`."""
    by_name = tensor_digests(graph) if digests is None else digests
    return text(combined("outputs", *(f"{by_name[output.name]} {output.name}".encode() for output in graph.outputs)))


class _TensorDigests:
    """Digests by id of tensor or node.

    Attributes:
        inner: of a tensor as seen within its scope, whose parameters are numbered.
        whole: of a node and everything it reads.
        final: `inner` combined with the conditions under which the scope runs, and how often.
    """

    def __init__(self, graph: Graph) -> None:
        self.opsets = {entry.domain: entry.version for entry in graph.import_domains or ()}
        self.opsets[""] = graph.opset
        self.whole: dict[int, bytes] = {}
        constants = {id(tensor): tensor for tensor in all_tensors(graph) if isinstance(tensor, Constant)}
        digests = array_digests(stored_values(tensor) for tensor in constants.values())
        self.inner: dict[int, bytes] = dict(zip(constants, digests, strict=True))
        for tensor in all_tensors(graph):
            if not isinstance(tensor, Constant) and not tensor.inputs:  # nothing in the graph computes it
                self.inner[id(tensor)] = _given(tensor)
        self.final = dict(self.inner)

    def add_scope(self, scope: Body, depth: int) -> None:
        """Compute `inner` and `whole` of one scope and of its bodies."""
        if depth:
            for number, tensor in enumerate(scope.inputs):
                self.inner[id(tensor)] = combined("parameter", b"%d" % depth, b"%d" % number)
        for node in ordered(scope.nodes):
            for _, body in bodies(node):
                self.add_scope(body, depth + 1)
            whole = self.whole[id(node)] = self.of_node(node)
            for number, tensor in enumerate(node.outputs):
                if tensor.name:
                    self.inner[id(tensor)] = combined("output", whole, b"%d" % number)

    def add_context(self, scope: Body, context: bytes) -> None:
        """Compute `final` of one scope and of its bodies. `context` is b"" if the scope always runs, once."""
        own = [
            *(scope.inputs if context else ()),
            *(output for node in scope.nodes for output in node.outputs if output.name),
        ]
        for tensor in own:
            inner = self.inner[id(tensor)]
            self.final[id(tensor)] = combined("within", context, inner) if context else inner
        for node in scope.nodes:
            for name, body in bodies(node):
                branch = node.op == "If" and not node.domain
                runs = combined("if", self.inner[id(node.inputs[0])]) if branch else self.whole[id(node)]
                self.add_context(body, combined("body", context, runs, name.encode()))

    def of_node(self, node: Node) -> bytes:
        """Compute the digest of a node without its name; bodies count by their outputs."""
        domain = "" if node.domain in (None, "ai.onnx") else str(node.domain)
        inputs = [self.inner[id(tensor)] if tensor.name else b"" for tensor in node.inputs]
        attributes = [combined(name, self.attribute(node, name, node.attrs[name])) for name in sorted(node.attrs)]
        return combined(
            node.op,
            domain.encode(),
            b"%d" % self.opsets.get(domain, 1),
            node.name.encode() if node.op in RANDOM else b"",
            combined("inputs", *inputs),
            combined("attributes", *attributes),
            bytes(bool(tensor.name) for tensor in node.outputs),  # Split and others depend on their number of outputs
        )

    def attribute(self, node: Node, name: str, value: Any) -> bytes:
        """Compute the digest of an attribute value; floats count as ONNX stores them, in 32 bits."""
        if isinstance(value, Body):
            return combined("body", b"%d" % len(value.inputs), *(self.inner[id(item)] for item in value.outputs))
        if isinstance(value, AttributeProto):
            return combined("proto", value.SerializeToString(deterministic=True))
        if isinstance(value, Constant):
            return next(array_digests([stored_values(value)]))
        if isinstance(value, np.ndarray) and value.ndim:
            return next(array_digests([value]))
        plain = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        if isinstance(plain, (list, tuple)):
            if all(type(item) is int for item in plain):
                return combined("ints", repr(list(plain)).encode())
            return combined("list", *(self.attribute(node, name, item) for item in plain))
        if isinstance(plain, int):
            return combined("int", b"%d" % plain)
        if isinstance(plain, float):
            with np.errstate(over="ignore"):
                return combined("float", np.float32(plain).tobytes())
        if isinstance(plain, (str, bytes)):
            return combined("string", plain.encode() if isinstance(plain, str) else plain)
        raise ModelError(
            f"attribute '{name}' of node '{node.name}' is a {type(plain).__name__}: ONNX has no attribute of this type"
        )


def _given(tensor: Tensor) -> bytes:
    """Compute the digest of a graph input. Names of dynamic dimensions do not count: they do not affect the values."""
    dims = shape(tensor)
    sizes = None if dims is None else [size if isinstance(size, int) else None for size in dims]
    kind = dtype(tensor)
    return combined("given", tensor.name.encode(), f"{kind} {sizes} {getattr(tensor, 'type', '')}".encode())
