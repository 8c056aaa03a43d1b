"""Checks of opsets and operators against the installed onnx."""

from __future__ import annotations

import onnx
from onnx import ModelProto, NodeProto

from sbonnx.errors import ModelError
from sbonnx.graph.protos import describe, node_protos
from sbonnx.ops import STANDARD_DOMAINS


def newest() -> int:
    """Return the newest opset of the default domain that the installed onnx supports."""
    return int(onnx.defs.onnx_opset_version())


def default_opset(model: ModelProto, label: str) -> int:
    """In place. Normalize "ai.onnx" to "" and return the version of the default domain.

    Raises:
        ModelError: there is none, two disagree, or the opset or IR version is not supported.
    """
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{label} has IR version {model.ir_version}; onnx {onnx.__version__} reads 1 to {onnx.IR_VERSION}"
        )
    versions: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain in STANDARD_DOMAINS else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"{label} imports two versions of the domain '{domain or 'ai.onnx'}'")
    if "" not in versions:
        raise ModelError(f"{label} imports no version of ONNX's own operators: opset_import lacks the default domain")
    if not 1 <= versions[""] <= newest():
        raise ModelError(f"{label} has opset {versions['']}; sbonnx with onnx {onnx.__version__} reads 1 to {newest()}")
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in versions.items())
    return versions[""]


def require_known_ops(model: ModelProto, opset: int, label: str) -> None:
    """In place. Normalize the default domain of nodes to "".

    Raises:
        ModelError: the opset lacks an operator of the default domain, or a domain is not imported.
    """
    domains = {entry.domain for entry in model.opset_import}
    bad: dict[str, NodeProto] = {}
    for node in node_protos(model.graph):
        if node.domain in STANDARD_DOMAINS:
            node.ClearField("domain")
            if complaint(node.op_type, opset):
                bad.setdefault(node.op_type, node)
        elif node.domain not in domains:
            raise ModelError(f"{describe(node)}: the model does not import the domain '{node.domain}'")
    if bad:
        first = next(iter(bad.values()))
        others = f" (also {', '.join(sorted(set(bad) - {first.op_type}))})" if len(bad) > 1 else ""
        raise ModelError(f"{label}: {describe(first)}: {complaint(first.op_type, opset)}{others}")


def complaint(op: str, opset: int) -> str | None:
    """Return why an operator of the default domain cannot be used in this opset, or None."""
    try:
        known = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return f"opset {opset} of ONNX has no operator '{op}'"
    return (
        f"the operator '{op}' is deprecated in opset {opset}: export it with another opset"
        if known.deprecated
        else None
    )
