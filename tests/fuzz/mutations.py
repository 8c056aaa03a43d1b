"""Field-aware mutations of ONNX models, as hypothesis strategies.

An edit picks a message anywhere in the model, one of its fields, and what becomes of it. Numbers select modulo what is
there, so that any edit applies to any model and a failing list of edits shrinks well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

INTEGERS: Final = (0, 1, -1, 2, 3, 7, 11, 16, 64, 255, 10**6, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
REALS: Final = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS: Final = (
    "",
    "x",
    "y",
    "w",
    "Conv",
    "Relu",
    "Div",
    "Squeeze",
    "Reshape",
    "If",
    "Loop",
    "com.acme",
    "ai.onnx",
    "ai.onnx.ml",
    "..",
    "a/b",
    "\x00",
    "\x1b[2J\x1b[31m",
    "\u202egnp.exe",
    "'\"<script>alert(1)</script>",
    "${HOME}",
    "{0}%s%n",
    "n" * 5000,
)
BYTES: Final = (b"", b"\x00", b"\xff" * 4, b"\x00" * 16, b"\x80\xff\x00", b"\xff" * 400, b"\x00\x00\xc0\x7f" * 27)
ACTIONS: Final = ("set", "set", "set", "clear", "remove", "repeat", "swap", "transplant", "append")
MANY: Final = 70
"""Copies that `repeat` adds: more than any rank or list of a sound model."""


@dataclass(frozen=True)
class Edit:
    """One change: `action` on field `field` of message `at`; `value` and `other` select from the tables above."""

    at: int
    field: int
    action: str
    value: int
    other: int


EDITS: Final = st.lists(
    st.builds(
        Edit,
        at=st.integers(0, 2000),
        field=st.integers(0, 30),
        action=st.sampled_from(ACTIONS),
        value=st.integers(0, 200),
        other=st.integers(0, 200),
    ),
    min_size=1,
    max_size=4,
)


def messages(message: Message) -> list[Message]:
    """`message` and every message below it, in order."""
    found = [message]
    for descriptor, value in message.ListFields():
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if descriptor.is_repeated else [value]:
                found += messages(part)
    return found


def scalar(descriptor: FieldDescriptor, value: int) -> Any:
    """A value of the type of a field: from the tables, or any number of an enumeration."""
    kind = descriptor.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        table: Sequence[Any] = BYTES if descriptor.type == FieldDescriptor.TYPE_BYTES else TEXTS
        return table[value % len(table)]
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return REALS[value % len(REALS)]
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        numbers = [one.number for one in descriptor.enum_type.values]
        return numbers[value % len(numbers)]
    number = INTEGERS[value % len(INTEGERS)]
    if kind in (FieldDescriptor.CPPTYPE_INT32,):
        return max(-(2**31), min(number, 2**31 - 1)) if value % 3 else value % 27
    if kind in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_UINT32):
        return abs(number) % 2**32
    return max(-(2**63), min(number, 2**63 - 1))


def snapshot(message: Message) -> Message:
    """A copy. Copying a message straight into one of its own parts would read what it overwrites."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def twin(root: Message, name: str, value: int) -> Message | None:
    """A copy of a message of the type called `name` in the model."""
    same = [one for one in messages(root) if one.DESCRIPTOR.full_name == name]
    return snapshot(same[value % len(same)]) if same else None


def edit_list(root: Message, message: Message, descriptor: FieldDescriptor, edit: Edit) -> None:
    """Change a repeated field."""
    values = getattr(message, descriptor.name)
    composite = descriptor.type == FieldDescriptor.TYPE_MESSAGE
    if edit.action == "clear":
        del values[:]
    elif edit.action == "append" or not len(values):
        if composite:
            model = twin(root, descriptor.message_type.full_name, edit.value)
            values.add().CopyFrom(model) if model is not None else values.add()
        else:
            values.append(scalar(descriptor, edit.value))
    elif edit.action == "remove":
        del values[edit.value % len(values)]
    elif edit.action == "repeat":
        chosen = values[edit.value % len(values)]
        chosen = snapshot(chosen) if composite else chosen
        for _ in range(1 if edit.other % 4 else MANY):
            values.add().CopyFrom(chosen) if composite else values.append(chosen)
    elif composite:
        at, other = edit.value % len(values), edit.other % len(values)
        first, second = snapshot(values[at]), snapshot(values[other])
        values[at].CopyFrom(second)
        if edit.action == "swap":
            values[other].CopyFrom(first)
    else:
        values[edit.other % len(values)] = scalar(descriptor, edit.value)


def edit_one(root: Message, message: Message, descriptor: FieldDescriptor, edit: Edit) -> None:
    """Change a field that holds one value."""
    if edit.action in ("clear", "remove"):
        message.ClearField(descriptor.name)
    elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        model = twin(root, descriptor.message_type.full_name, edit.value)
        if model is not None:
            getattr(message, descriptor.name).CopyFrom(model)
    elif descriptor.type == FieldDescriptor.TYPE_BYTES and edit.action in ("swap", "repeat", "append"):
        content = getattr(message, descriptor.name)
        cut = edit.other % (len(content) + 1)
        setattr(message, descriptor.name, content[:cut] if edit.action == "swap" else content + content[:cut] + b"!")
    else:
        setattr(message, descriptor.name, scalar(descriptor, edit.value))


def mutated(content: bytes, edits: Sequence[Edit]) -> bytes:
    """The serialized model after `edits`."""
    model = onnx.ModelProto.FromString(content)
    for edit in edits:
        everything = messages(model)
        message = everything[edit.at % len(everything)]
        # Fields that are set, and some that are not: an edit at random would mostly fill unused ones.
        present = [descriptor for descriptor, _ in message.ListFields()]
        fields = present * 3 + list(message.DESCRIPTOR.fields)
        descriptor = fields[edit.field % len(fields)]
        change = edit_list if descriptor.is_repeated else edit_one
        change(model, message, descriptor, edit)
    return bytes(model.SerializeToString())


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with bytes changed, cut off, inserted or taken out."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(("flip", "flip", "flip", "cut", "insert", "drop", "fill")))
        length = draw(st.sampled_from((1, 2, 4, 16, 200)))
        if kind == "flip":
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=length))
        elif kind == "drop":
            del data[at : at + length]
        else:
            data[at : at + length] = bytes([draw(st.sampled_from((0, 0x7F, 0x80, 0xFF)))]) * length
    return bytes(data)
