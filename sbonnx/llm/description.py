"""Description of an exported decoder: sizes, caches, blocks, and weights by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

from sbonnx.llm.layout import Decoder
from sbonnx.llm.structure import DecoderBlock, DecoderWeight


@dataclass(frozen=True)
class DecoderCache:
    """Key/value caches of a decoder.

    Attributes:
        count: number of caches.
        type, bits: data type and bit width.
        token_bytes: bytes of all caches for one token.
        names: patterns of the names.
        heads, width: number of key/value heads and size of a head.
    """

    count: int
    type: str
    bits: int
    token_bytes: int
    names: str
    heads: int | None
    width: int | None


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder; null if unknown."""

    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    vocabulary: int | None
    context: int | None


@dataclass(frozen=True)
class DecoderPart:
    """Weights of a part.

    Attributes:
        part: embedding, block or head.
        operators: operators with a weight.
        weights: number of values.
        stored: how they are stored.
    """

    part: str
    operators: str
    weights: int
    stored: str


@dataclass(frozen=True)
class DecoderFacts:
    """Contents of an exported decoder.

    Attributes:
        format: form of the folder.
        model, data: the file, and its external data.
        bytes: their size.
        inputs: names by role: tokens, mask, positions, cache_branch.
        logits: name of the output.
        sizes: sizes of the decoder.
        bos, eos: token ids.
        cache: caches; null without.
        quantized: whether weights are quantized.
        ties: how embedding and head share a weight.
        tokenizer: the tokenizer; null: none.
        encoder: the file of the encoder; null: none.
        blocks: the blocks.
        parts: weights by part.
    """

    format: str
    model: str
    data: tuple[str, ...]
    bytes: int
    inputs: dict[str, str]
    logits: str
    sizes: DecoderSizes
    bos: int | None
    eos: tuple[int, ...]
    cache: DecoderCache | None
    quantized: bool
    ties: str
    tokenizer: str | None
    encoder: str | None
    blocks: tuple[DecoderBlock, ...]
    parts: tuple[DecoderPart, ...]


def describe(decoder: Decoder) -> DecoderFacts:
    """Return the contents of a decoder."""
    structure = decoder.structure
    roles = {
        "tokens": decoder.tokens,
        "mask": decoder.mask,
        "positions": decoder.positions,
        "cache_branch": decoder.branch,
    }
    parts: list[tuple[str, Iterable[DecoderWeight]]] = [
        ("embedding", () if structure.embedding is None else (structure.embedding,)),
        *((f"block {block.layer}", block.weights) for block in structure.blocks),
        ("head", () if structure.head is None else (structure.head,)),
    ]
    return DecoderFacts(
        format=decoder.format,
        model=str(decoder.model),
        data=tuple(map(str, decoder.data)),
        bytes=decoder.bytes,
        inputs={role: name for role, name in roles.items() if name is not None},
        logits=decoder.logits,
        sizes=DecoderSizes(**{row.name: getattr(decoder, row.name) for row in fields(DecoderSizes)}),
        bos=decoder.bos,
        eos=decoder.eos,
        cache=_cache(decoder),
        quantized=structure.quantized,
        ties=decoder.ties,
        tokenizer=None if decoder.tokenizer is None else str(decoder.tokenizer),
        encoder=None if decoder.encoder is None else str(decoder.encoder.model),
        blocks=structure.blocks,
        parts=tuple(_part(name, list(weights)) for name, weights in parts),
    )


def _cache(decoder: Decoder) -> DecoderCache | None:
    if not decoder.cache:
        return None
    first = decoder.cache[0]
    return DecoderCache(
        count=len(decoder.cache),
        type=str(first.dtype),
        bits=first.bits,
        token_bytes=decoder.token_bytes,
        names=f"{first.past} -> {first.present}",
        heads=first.heads,
        width=first.width,
    )


def _part(name: str, weights: list[DecoderWeight]) -> DecoderPart:
    stored = Counter(weight.label() for weight in weights)
    return DecoderPart(
        part=name,
        operators=", ".join(f"{count} {op}" for op, count in Counter(weight.op for weight in weights).items()),
        weights=sum(weight.rows * weight.columns for weight in weights),
        stored=", ".join(label if len(stored) == 1 else f"{count} x {label}" for label, count in stored.items()),
    )
