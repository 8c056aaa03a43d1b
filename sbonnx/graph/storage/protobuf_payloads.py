"""Removal and insertion of large tensors in serialized protobuf messages, without parsing them whole.

`detach` turns a model of any size into a skeleton of kilobytes, in which every large `raw_data` is a numbered
reference to its place in the file; `attach` is its inverse. The skeleton is an ordinary model whose large tensors
are external: onnx parses, checks and converts it without ever reading the weights.

Protobuf's encoding: a field is a varint key (number << 3 | kind), then a varint (kind 0), 8 bytes (1), a length and
that many bytes (2) or 4 bytes (5). Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final, NamedTuple

Buffer = mmap.mmap | bytes | memoryview

REFERENCE: Final = "sbonnx.payload"
"""Key of the external_data entry that holds the number of a payload."""

MODEL, GRAPH, NODE, ATTRIBUTE, TENSOR, FUNCTION = range(6)

CHILDREN: Final[dict[int, dict[int, int]]] = {
    MODEL: {7: GRAPH, 25: FUNCTION},
    GRAPH: {1: NODE, 5: TENSOR},
    NODE: {5: ATTRIBUTE},
    ATTRIBUTE: {5: TENSOR, 6: GRAPH},
    FUNCTION: {7: NODE},
}
"""Fields of a message that can contain tensors, with their message type (field numbers of onnx.proto)."""

VALUE, TYPE, TENSOR_TYPE, SHAPE, DIMENSION = range(6, 11)

NESTED: Final[dict[int, dict[int, int]]] = {
    **CHILDREN,
    GRAPH: {**CHILDREN[GRAPH], 11: VALUE, 12: VALUE, 13: VALUE},
    VALUE: {2: TYPE},
    TYPE: {1: TENSOR_TYPE},
    TENSOR_TYPE: {2: SHAPE},
    SHAPE: {1: DIMENSION},
}
"""`CHILDREN` and the fields that contain the shape of a value, which are nested deepest in a graph."""

RAW_DATA, EXTERNAL_DATA, DATA_LOCATION, DATA_TYPE, FLOAT_DATA, DOUBLE_DATA = 9, 13, 14, 2, 4, 10
FLOAT, DOUBLE = 1, 11  # element types whose packed repeated field has the bytes of raw_data


MAX_MESSAGES: Final = 100
"""Maximum nesting of messages that protobuf reads."""


class TooDeepError(ValueError):
    """Messages are nested deeper than protobuf reads."""


class Field(NamedTuple):
    """Protobuf field: number, kind, start of its key, start and end of its value."""

    number: int
    kind: int
    start: int
    value: int
    end: int


class Span(NamedTuple):
    """Position of a payload in the file."""

    offset: int
    length: int


def _varint(buffer: Buffer, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = buffer[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 10 bytes")


def encode_varint(value: int) -> bytes:
    """Encode a number as a protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int, kind: int) -> bytes:
    return encode_varint(number << 3 | kind)


def _delimited(number: int, content: bytes) -> bytes:
    return _key(number, 2) + encode_varint(len(content)) + content


def fields(buffer: Buffer, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message at [start, end).

    Raises:
        ValueError: the bytes are not a protobuf message, or the message is cut off.
    """
    at = start
    while at < end:
        begin = at
        try:
            key, at = _varint(buffer, at)
            number, kind = key >> 3, key & 7
            if kind == 0:
                value = at
                _, at = _varint(buffer, at)
            elif kind == 2:
                length, value = _varint(buffer, at)
                at = value + length
            elif kind in (1, 5):
                value, at = at, at + (8 if kind == 1 else 4)
            else:
                raise ValueError(f"field kind {kind} does not exist")
        except IndexError:
            raise ValueError("the message is cut off") from None
        if at > end or number == 0:
            raise ValueError("the message is cut off")
        yield Field(number, kind, begin, value, at)


def detach(buffer: Buffer, *, largest: int) -> tuple[bytes, list[Span]]:
    """Return the skeleton of a serialized ModelProto and the positions of its payloads.

    Args:
        largest: tensors of up to this many bytes stay in the skeleton.

    Raises:
        ValueError: as in `fields`.
    """
    spans: list[Span] = []
    return b"".join(_detach(buffer, (0, len(buffer)), MODEL, largest, spans, 0)), spans


def require_shallow(buffer: Buffer) -> None:
    """Check that the graphs of a serialized ModelProto are nested no deeper than protobuf reads.

    Raises:
        TooDeepError: they are nested deeper.
        ValueError: as in `fields`.
    """
    stack = [(0, len(buffer), MODEL, 0)]
    while stack:
        start, end, message, depth = stack.pop()
        if depth > MAX_MESSAGES:
            raise TooDeepError(f"messages are nested more than {MAX_MESSAGES} deep")
        children = NESTED.get(message, {})
        for field in fields(buffer, start, end) if children else ():
            if field.kind == 2 and field.number in children:
                stack.append((field.value, field.end, children[field.number], depth + 1))


def _detach(
    buffer: Buffer, place: tuple[int, int], message: int, largest: int, spans: list[Span], depth: int
) -> list[bytes]:
    if depth > MAX_MESSAGES:
        raise TooDeepError(f"messages are nested more than {MAX_MESSAGES} deep")
    start, end = place
    children, out = CHILDREN[message], []
    for field in fields(buffer, start, end):
        child = children.get(field.number) if field.kind == 2 and field.end - field.value > largest else None
        if child is None:
            out.append(bytes(buffer[field.start : field.end]))
        elif child == TENSOR:
            out.append(_delimited(field.number, _detach_tensor(buffer, field.value, field.end, largest, spans)))
        else:
            inner = b"".join(_detach(buffer, (field.value, field.end), child, largest, spans, depth + 1))
            out.append(_delimited(field.number, inner))
    return out


def _detach_tensor(buffer: Buffer, start: int, end: int, largest: int, spans: list[Span]) -> bytes:
    parts = list(fields(buffer, start, end))
    kinds = [_varint(buffer, part.value)[0] for part in parts if part.number == DATA_TYPE and part.kind == 0]
    holder = {FLOAT: FLOAT_DATA, DOUBLE: DOUBLE_DATA}.get(kinds[-1]) if kinds else None
    held = [part for part in parts if part.number in (RAW_DATA, holder) and part.kind == 2]
    large = len(held) == 1 and held[0].end - held[0].value > largest
    out = []
    for part in parts:
        if large and part is held[0]:
            entry = _delimited(1, REFERENCE.encode()) + _delimited(2, str(len(spans)).encode())
            out.append(_delimited(EXTERNAL_DATA, entry) + _key(DATA_LOCATION, 0) + b"\x01")
            spans.append(Span(part.value, part.end - part.value))
        elif not (large and part.number == DATA_LOCATION):  # an explicit DEFAULT would hide the payload
            out.append(bytes(buffer[part.start : part.end]))
    return b"".join(out)


class ModelPiece(NamedTuple):
    """Output of `attach`: literal bytes, or the payload with this number."""

    content: bytes
    payload: int | None = None


def attach(skeleton: bytes, sizes: list[int]) -> list[ModelPiece]:
    """Return the pieces of the model with the payloads inserted as raw_data, in writing order.

    Args:
        sizes: bytes of each payload.
    """
    return _attach(skeleton, 0, len(skeleton), MODEL, sizes)[0]


def _attach(data: bytes, start: int, end: int, message: int, sizes: list[int]) -> tuple[list[ModelPiece], int]:
    children = CHILDREN[message]
    pieces: list[ModelPiece] = []
    total, plain = 0, start  # [plain, field.start) is copied unchanged
    marker = REFERENCE.encode()
    for field in fields(data, start, end):
        child = children.get(field.number) if field.kind == 2 else None
        if child is None or data.find(marker, field.value, field.end) < 0:
            continue
        inside = _attach_tensor if child == TENSOR else _attach
        inner, length = inside(data, field.value, field.end, child, sizes)
        head = data[plain : field.start] + _key(field.number, 2) + encode_varint(length)
        pieces.append(ModelPiece(head))
        pieces.extend(inner)
        total += len(head) + length
        plain = field.end
    pieces.append(ModelPiece(data[plain:end]))
    return pieces, total + end - plain


def _attach_tensor(data: bytes, start: int, end: int, _message: int, sizes: list[int]) -> tuple[list[ModelPiece], int]:
    """Insert raw_data in the order of field numbers, as onnx's own serialization does."""
    before, after, number = b"", b"", None
    for field in fields(data, start, end):
        if field.number == EXTERNAL_DATA:
            entry = {part.number: data[part.value : part.end] for part in fields(data, field.value, field.end)}
            number = int(entry[2]) if entry.get(1) == REFERENCE.encode() else number
        elif field.number == DATA_LOCATION:
            continue
        elif field.number < RAW_DATA:
            before += data[field.start : field.end]
        else:
            after += data[field.start : field.end]
    if number is None:  # the marker is part of a name or doc string
        return [ModelPiece(data[start:end])], end - start
    head = before + _key(RAW_DATA, 2) + encode_varint(sizes[number])
    return [ModelPiece(head), ModelPiece(b"", number), ModelPiece(after)], len(head) + sizes[number] + len(after)
