"""`Decoder`: inputs, caches, sizes and files of an exported decoder, in one form for every export format."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import onnx

from sbonnx.errors import MissingModelError, ModelError
from sbonnx.graph.protos import sort_protos
from sbonnx.graph.storage.model_file import open_model
from sbonnx.llm.encoders.encoder import Encoder
from sbonnx.llm.structure import DecoderStructure, read_structure
from sbonnx.spec import Array
from sbonnx.system.input_files import read_json

Format = Literal["genai", "optimum", "merged", "file"]

GENAI_CONFIG: Final = "genai_config.json"
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SENTENCEPIECE: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")

WITH_PAST: Final = "decoder_with_past_model.onnx"
MODEL_NAMES: Final = (
    "model.onnx",
    "decoder_model_merged.onnx",
    "model_merged.onnx",
    WITH_PAST,
    "decoder_model.onnx",
)
"""File names of decoders in folders without genai_config.json, in order of preference."""

ENCODER_NAME: Final = "encoder_model.onnx"
"""File name of the encoder beside a decoder that reads its states."""

SUBFOLDERS: Final = ("", "onnx")
"""Places of the model in an optimum folder: newer repositories keep the weights in a subfolder."""

TOKENS: Final = ("input_ids", "decoder_input_ids", "tokens", "input_tokens")
EMBEDDED: Final = ("inputs_embeds", "input_embeds")
MASK: Final = ("attention_mask", "decoder_attention_mask", "mask")
ENCODED: Final = ("encoder_hidden_states",)
ENCODED_MASK: Final = ("encoder_attention_mask",)
STATES: Final = ("last_hidden_state", "encoder_hidden_states", "hidden_states")
"""Outputs of an encoder that `ENCODED` takes."""
POSITIONS: Final = ("position_ids", "positions")
BRANCH: Final = ("use_cache_branch",)
LOGITS: Final = ("logits", "lm_logits", "output_logits")
LOGITS_RANK: Final = 3
KEEP_ALL: Final = ("num_logits_to_keep", "logits_to_keep")
"""Usual names by role. An input of `KEEP_ALL` gets 0: logits of all positions."""

PAST: Final = ("past*", "cache*", "*_past_*")
PRESENT: Final = ("present*", "new_cache*", "updated_*", "*_present_*")
"""Usual names of caches."""

KIND: Final = re.compile(r"(?:^|[._/])(keys?|k|values?|v)(?=[._/]|$|\d)")
CACHE_KINDS: Final = {"k": "key", "v": "value"}
"""Kinds by their first letter. The last one in a name counts: past_key_values.0.value is a value."""
STATE: Final = re.compile(r"(?:^|[._/])((?:conv|ssm|recurrent)(?:_state)?)s?(?=[._/]|$)")
"""Kinds of states of fixed size: inputs of a causal convolution, sums of a linear attention or scan."""
CROSS: Final = re.compile(r"(?:^|[._/])(?:encoder|cross)(?=[._/])")
"""Caches of the keys and values of the encoder's states, which do not change from token to token."""
LAYER: Final = re.compile(r"\d+")

OTHERS: Final = "for models that are no decoders there are sbonnx inspect and sbonnx quantize"

CACHE_RANK: Final = 4
CACHE_HEADS, CACHE_LENGTH, CACHE_WIDTH = 1, 2, 3
"""Axes of a cache: (batch, heads, length, width)."""

SIZE_KEYS: Final = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim", "head_size"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "context": (
        "max_target_positions",
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "seq_length",
        "context_length",
    ),
    "vocabulary": ("vocab_size",),
}
"""Keys of config.json, by the field of `Decoder`."""

GENAI_SIZES: Final = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_size",
    "layers": "num_hidden_layers",
}
GENAI_MODEL_SIZES: Final = {"context": "context_length", "vocabulary": "vocab_size"}
"""Keys of genai_config.json, in model.decoder and in model, by the field of `Decoder`."""

CACHE_TYPES: Final = {np.dtype(kind) for kind in (np.float32, np.float16, np.int8, np.uint8)} | {
    np.dtype(ml_dtypes.bfloat16)
}


@dataclass(frozen=True)
class CacheTensor:
    """Cache of the keys or values of one layer: input `past`, output `present`.

    Attributes:
        layer: number of the layer, from 0.
        kind: "key" or "value".
        past, present: names of the input and of the output.
        heads: key/value heads.
        width: elements of a head in the file: half the head size for uint8, which holds two 4-bit values.
        dtype: element type.
    """

    layer: int
    kind: Literal["key", "value"]
    past: str
    present: str
    heads: int
    width: int
    dtype: np.dtype[Any]

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.dtype == np.uint8 else 8 * self.dtype.itemsize

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.width * 8 * self.dtype.itemsize // self.bits

    def empty(self, batch: int) -> Array:
        """Return a cache of no tokens, (batch, heads, 0, width)."""
        return np.zeros((batch, self.heads, 0, self.width), self.dtype)


@dataclass(frozen=True)
class StateTensor:
    """State of one layer, whose size does not depend on the number of tokens: input `past`, output `present`.

    Attributes:
        layer: number of the layer, from 0.
        kind: "conv_state", "recurrent_state" or another name of `STATE`.
        past, present: names of the input and of the output.
        shape: of one sequence.
        dtype: element type.
    """

    layer: int
    kind: str
    past: str
    present: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def empty(self, batch: int) -> Array:
        """Return the state before the first token, (batch, *shape)."""
        return np.zeros((batch, *self.shape), self.dtype)


@dataclass(frozen=True)
class Decoder:
    """A decoder as it was exported.

    Attributes:
        format: "genai", "optimum", "merged" (one If with and without a past) or "file".
        folder: folder that belongs to the decoder; None for a single file.
        model: path of the ONNX file.
        data: external data files of the model.
        tokens, mask, positions, branch, logits: names of inputs and of the output by role; None: the model has none.
        constants: values of further inputs.
        types: element types of the inputs.
        cache: caches, sorted by layer and kind; empty for a decoder without a cache.
        states: states of fixed size, sorted in the same way.
        embedder: model that computes the input `tokens` from token ids; None: `tokens` are token ids.
        cross: caches of the keys and values of the encoder's states, which the first run computes.
        encoder: model that computes further inputs of the decoder from a text, sound or image; None: there is none.
        position_axes: leading axes of the positions: (3,) for positions in time, height and width, which are equal for
            text; () for (batch, length).
        layers, hidden, heads, kv_heads, head_size, vocabulary, context: sizes; None if neither the file nor the
            configuration has them. `context` is in tokens.
        bos, eos: token ids; `eos` may have several, the first ends a text.
        tokenizer: tokenizer.json; None if there is none.
        adapter: file with values of the inputs of adapters (.onnx_adapter); None: their products are 0.
        ties: "shared": embedding and head read one table; "stored twice": the configuration ties them and the file has
            two tables; "no".
        structure: blocks, linear operators, embedding and head.
    """

    format: Format
    folder: Path | None
    model: Path
    data: tuple[Path, ...]
    tokens: str
    logits: str
    mask: str | None
    positions: str | None
    branch: str | None
    types: Mapping[str, np.dtype[Any]]
    cache: tuple[CacheTensor, ...]
    structure: DecoderStructure
    constants: Mapping[str, Array] = field(default_factory=dict)
    states: tuple[StateTensor, ...] = ()
    cross: tuple[CacheTensor, ...] = ()
    encoder: Encoder | None = None
    position_axes: tuple[int, ...] = ()
    embedder: Path | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    tokenizer: Path | None = None
    adapter: Path | None = None
    ties: Literal["shared", "stored twice", "no"] = "no"

    @property
    def carried(self) -> tuple[CacheTensor | StateTensor, ...]:
        """Caches and states: what a run passes to the next one."""
        return (*self.cache, *self.states, *self.cross)

    @property
    def token_bytes(self) -> int:
        """Bytes of all caches for one token of one sequence."""
        return sum(tensor.heads * tensor.width * tensor.dtype.itemsize for tensor in self.cache)

    @property
    def files(self) -> tuple[Path, ...]:
        """The model file, that of the encoder, and their external data."""
        encoder = () if self.encoder is None else (self.encoder.model, *self.encoder.data)
        return (self.model, *self.data, *encoder)

    @property
    def bytes(self) -> int:
        """Size of `files` and `adapter`."""
        files = self.files if self.adapter is None else (*self.files, self.adapter)
        return sum(path.stat().st_size for path in files)

    def beside(self, name: str) -> Path | None:
        """Return the file of this name next to the tokenizer, the model or in the folder, if there is one."""
        near = (path.parent for path in (self.tokenizer, self.model) if path is not None)
        places = (*near, *([] if self.folder is None else [self.folder]))
        return next((path for place in places if (path := place / name).is_file()), None)


@dataclass(frozen=True)
class _Place:
    """Path of the model in a folder, its configuration, and the names that it gives.

    Attributes:
        sizes: fields of `Decoder`.
        past, present: patterns of names of caches, by the output or input.
        roles: names of inputs and outputs by role.
        embedder: file of the model that embeds token ids, if the decoder reads embeddings; None: there is none.
        encoder: file of the encoder, if the decoder reads its states; None: there is none.
    """

    format: Format
    folder: Path | None
    model: Path
    sizes: Mapping[str, Any]
    tied: bool = False
    past: tuple[str, ...] = PAST
    present: tuple[str, ...] = PRESENT
    roles: Mapping[str, str] = field(default_factory=dict)
    embedder: Path | None = None
    encoder: Path | None = None


def read_decoder(
    source: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    past: str | None = None,
    present: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Decoder:
    """Read the layout of an exported decoder.

    Args:
        source: a folder of onnxruntime-genai or optimum, or an ONNX file.
        tokenizer: tokenizer.json; None: that of the folder.
        past, present: patterns of the names of caches, such as "past.*"; None: the usual ones.
        adapter: file of `sbonnx.llm.adapt` with form "inputs" (.onnx_adapter), which is active in every run.

    Raises:
        ModelError: the model or a configuration cannot be read, its external data is cut off, or an input or cache has
            no known role.
    """
    path = Path(source)
    place = _place(path)
    if past is not None or present is not None:
        place = replace(
            place,
            past=(past,) if past is not None else place.past,
            present=(present,) if present is not None else place.present,
        )
    opened = open_model(place.model)
    graph = opened.model.graph
    sort_protos(graph)
    decoder = _read_graph(place, graph, tuple(file for file in opened.files if file != place.model))
    if adapter is not None and not Path(adapter).is_file():
        raise ModelError(f"there is no adapter '{adapter}': give an .onnx_adapter file")
    return replace(decoder, tokenizer=_tokenizer(place, tokenizer), adapter=None if adapter is None else Path(adapter))


def _place(path: Path) -> _Place:
    if path.is_file() or path.suffix == ".onnx":
        near = path.parent
        if (near / GENAI_CONFIG).is_file():
            genai = _genai(near)
            if genai.model.resolve() == path.resolve():
                return genai
        config = next((file for file in (near / CONFIG, near.parent / CONFIG) if file.is_file()), None)
        sizes, tied = ({}, False) if config is None else _sizes(_json(config))
        encoder = path.parent / ENCODER_NAME
        return _Place("file", None, path, sizes, tied, encoder=encoder if encoder.is_file() else None)
    if not path.is_dir():
        raise MissingModelError(f"'{path}' does not exist: give the folder of an exported decoder, or its .onnx file")
    if (path / GENAI_CONFIG).is_file():
        return _genai(path)
    return _optimum(path)


def _genai(folder: Path) -> _Place:
    """Read genai_config.json.

    Raises:
        ModelError: a key is missing or has a wrong value, or the decoder is a pipeline of several models.
    """
    config = _json(folder / GENAI_CONFIG)
    model = config.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise ModelError(f"'{folder / GENAI_CONFIG}' has no model.decoder: it does not describe a decoder")
    if decoder.get("pipeline"):
        raise ModelError(
            f"the decoder of '{folder / GENAI_CONFIG}' is a pipeline of several models: give the .onnx file of one, "
            "with --tokenizer"
        )
    name = decoder.get("filename")
    if not isinstance(name, str):
        raise ModelError(f"'{folder / GENAI_CONFIG}' does not name the model (model.decoder.filename)")
    if not _is_inside(folder, name):
        raise ModelError(
            f"'{folder / GENAI_CONFIG}' names a model outside of its folder (model.decoder.filename is '{name}'): move "
            "it into the folder"
        )
    inputs, outputs = (_section(folder, decoder, key) for key in ("inputs", "outputs"))
    sizes = {
        **{field: _count(folder, decoder, key) for field, key in GENAI_SIZES.items()},
        **{field: _count(folder, model, key) for field, key in GENAI_MODEL_SIZES.items()},
        "bos": next(iter(_token_ids(folder, model, "bos_token_id")), None),
        "eos": _token_ids(folder, model, "eos_token_id"),
    }
    named = {
        "tokens": inputs.get("input_ids"),
        "embedded": inputs.get("inputs_embeds"),
        "mask": inputs.get("attention_mask"),
        "positions": inputs.get("position_ids"),
        "logits": outputs.get("logits"),
    }
    embedder, encoder = (_component(folder, model, part) for part in ("embedding", "encoder"))
    return _Place(
        "genai",
        folder,
        folder / name,
        {key: value for key, value in sizes.items() if value not in (None, ())},
        past=_patterns(inputs, "past_key_names", "past_value_names") or PAST,
        present=_patterns(outputs, "present_key_names", "present_value_names") or PRESENT,
        roles={role: given for role, given in named.items() if isinstance(given, str)},
        embedder=embedder,
        encoder=encoder,
    )


def _component(folder: Path, model: Mapping[str, Any], part: str) -> Path | None:
    """Return the file of another model that genai_config.json names; None if there is none in the folder."""
    name = _section(folder, model, part).get("filename")
    path = folder / name if isinstance(name, str) and _is_inside(folder, name) else None
    return path if path is not None and path.is_file() else None


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a name is one of a file in a folder, links resolved."""
    try:
        real = Path(os.path.realpath(folder / name))
    except ValueError:  # a NUL, half of a surrogate pair
        return False
    return bool(name) and real.is_relative_to(os.path.realpath(folder))


def _section(folder: Path, decoder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the names of inputs or outputs in genai_config.json; {} if there are none."""
    value = decoder.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"model.decoder.{key} of '{folder / GENAI_CONFIG}' is no object of names")
    return value or {}


def _count(folder: Path, section: Mapping[str, Any], key: str) -> int | None:
    """Return a size in genai_config.json; None if it is absent."""
    value = section.get(key)
    if value is not None and not _is_whole(value, lowest=1):
        raise ModelError(
            f"'{key}' in '{folder / GENAI_CONFIG}' is {json.dumps(value)[:80]}: a whole number above 0 is needed"
        )
    return value


def _is_whole(value: Any, lowest: int = 0) -> bool:
    """Whether a value of JSON is an integer of 32 bits, as sizes and token ids are."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value < 1 << 31


def _token_ids(folder: Path, section: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return one or several token ids in genai_config.json; () if they are absent."""
    value = section.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_whole, listed)):
        raise ModelError(f"'{key}' in '{folder / GENAI_CONFIG}' is {json.dumps(value)[:80]}: token ids are needed")
    return tuple(listed)


def _patterns(section: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(section[key].replace("%d", "*") for key in keys if isinstance(section.get(key), str))


def _optimum(folder: Path) -> _Place:
    """Find the decoder of a folder with config.json.

    Raises:
        ModelError: there is no ONNX file, or several without a known name.
    """
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"'{folder}' has neither {GENAI_CONFIG} nor {CONFIG}: give the folder of an exported decoder, or an .onnx "
            "file and --tokenizer"
        )
    sizes, tied = _sizes(_json(folder / CONFIG))
    for name in MODEL_NAMES:
        for sub in SUBFOLDERS:
            if (folder / sub / name).is_file():
                encoder = folder / sub / ENCODER_NAME
                if not encoder.is_file():
                    return _Place("optimum", folder, folder / sub / name, sizes, tied)
                if name != WITH_PAST:  # its caches of the encoder's states are computed by another file
                    return _Place("optimum", folder, folder / sub / name, sizes, tied, encoder=encoder)
    models = sorted(path for sub in SUBFOLDERS for path in (folder / sub).glob("*.onnx"))
    if len(models) != 1:
        names = ", ".join(path.name for path in models[:5]) or "none"
        raise ModelError(f"'{folder}' needs one decoder; its .onnx files: {names}. Give the file and --tokenizer")
    return _Place("optimum", folder, models[0], sizes, tied)


def _sizes(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the sizes in config.json, and whether it ties embedding and head (the default of its library)."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    sizes: dict[str, Any] = {}
    for name, keys in SIZE_KEYS.items():
        value = next((config[key] for key in keys if _is_whole(config.get(key), lowest=1)), None)
        if value is not None:
            sizes[name] = value
    if _is_whole(config.get("bos_token_id")):
        sizes["bos"] = config["bos_token_id"]
    if eos := _ids(config.get("eos_token_id")):
        sizes["eos"] = eos
    return sizes, bool(config.get("tie_word_embeddings", config.get("model_type") == "gpt2"))


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(number for number in listed if _is_whole(number))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"'{path}' cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"'{path}' must have a JSON object, and has {type(value).__name__}")
    return value


def _tokenizer(place: _Place, given: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of tokenizer.json; its contents are not read.

    Raises:
        ModelError: the given file does not exist.
    """
    if given is not None:
        path = Path(given)
        path = path / TOKENIZER if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"there is no tokenizer '{path}': give a tokenizer.json")
        return path
    places = [place.model.parent, place.model.parent.parent] if place.folder is None else [place.folder]
    return next((path for folder in places if (path := folder / TOKENIZER).is_file()), None)


def _read_graph(place: _Place, graph: onnx.GraphProto, data: tuple[Path, ...]) -> Decoder:
    stored = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in stored}
    outputs = {value.name: value for value in graph.output}
    tokens = _role(place, "tokens", TOKENS, inputs)
    logits = _role(place, "logits", LOGITS, outputs)
    embedder = None
    if tokens is None and (embedded := _role(place, "embedded", EMBEDDED, inputs)) is not None:
        if place.embedder is None:
            raise ModelError(
                f"input '{embedded}' of '{place.model}' takes embeddings, and no {GENAI_CONFIG} beside it names the "
                "model that computes them (model.embedding.filename)"
            )
        tokens, embedder = embedded, place.embedder
    if tokens is None:
        raise ModelError(f"'{place.model}' has no input of token ids; its inputs: {_few(inputs)}; {OTHERS}")
    if logits is None:
        raise ModelError(f"'{place.model}' has no output of logits; its outputs: {_few(outputs)}; {OTHERS}")
    if len(_dims(outputs[logits])) not in (0, LOGITS_RANK):
        raise ModelError(
            f"output '{logits}' of '{place.model}' has the shape {_dims(outputs[logits])}; known is (batch, length, "
            f"vocabulary); {OTHERS}"
        )
    mask, positions = _role(place, "mask", MASK, inputs), _role(place, "positions", POSITIONS, inputs)
    branch = _role(place, "branch", BRANCH, inputs)
    position_axes = tuple(dim or 0 for dim in _dims(inputs[positions])[:-2]) if positions is not None else ()
    for name in (tokens, mask, positions):
        shape = [] if name is None else _dims(inputs[name])
        if embedder is not None and name == tokens:
            continue
        if name is not None and len(shape) != 2 and not (name == positions and len(shape) == 3 and shape[0]):
            raise ModelError(f"input '{name}' of '{place.model}' has the shape {shape}; known is (batch, length)")
    keep = {name: np.zeros([dim or 1 for dim in _dims(inputs[name])], np.int64) for name in KEEP_ALL if name in inputs}
    encoder = _encoder(place, inputs, outputs)
    roles = {tokens, mask, positions, branch, *keep, *(() if encoder is None else encoder.inputs)}
    rest = [name for name in inputs if name not in roles]
    states = _states(place, [inputs[name] for name in rest if STATE.search(name)], outputs)
    caches = [inputs[name] for name in rest if not STATE.search(name)]
    cache, cross = (
        _caches(place, [value for value in caches if bool(CROSS.search(value.name)) is wanted], outputs)
        for wanted in (False, True)
    )
    carried: tuple[CacheTensor | StateTensor, ...] = (*cache, *states, *cross)
    structure = read_structure(graph, tokens, logits, {tensor.past: tensor.layer for tensor in carried})
    merged = branch is not None and any(node.op_type == "If" for node in graph.node)
    kv_heads = cache[0].heads if cache else None
    sizes = dict(place.sizes)
    if cache:
        sizes["head_size"] = cache[0].head_size
    return Decoder(
        format="merged" if merged else place.format,
        folder=place.folder,
        model=place.model,
        data=data,
        tokens=tokens,
        logits=logits,
        mask=mask,
        positions=positions,
        branch=branch,
        types={name: _dtype(value) for name, value in inputs.items()},
        cache=cache,
        structure=structure,
        constants=keep,
        states=states,
        cross=cross,
        encoder=encoder,
        position_axes=position_axes,
        embedder=embedder,
        layers=len({tensor.layer for tensor in carried}) or sizes.get("layers"),
        hidden=structure.hidden or sizes.get("hidden"),
        heads=sizes.get("heads"),
        kv_heads=kv_heads or sizes.get("kv_heads") or sizes.get("heads"),
        head_size=sizes.get("head_size"),
        vocabulary=next((dim for dim in _dims(outputs[logits])[-1:] if dim), None) or sizes.get("vocabulary"),
        context=sizes.get("context"),
        bos=sizes.get("bos"),
        eos=sizes.get("eos", ()),
        ties="shared" if structure.tied else "stored twice" if place.tied else "no",
    )


def _encoder(
    place: _Place, inputs: Mapping[str, onnx.ValueInfoProto], outputs: Mapping[str, onnx.ValueInfoProto]
) -> Encoder | None:
    """Return the encoder of a decoder that reads its states, or caches that no run of the decoder computes.

    Raises:
        ModelError: the encoder is missing, cannot be read, or has no such output.
    """
    encoded, mask = _role(place, "encoded", ENCODED, inputs), _role(place, "encoded mask", ENCODED_MASK, inputs)
    computed = dict(_by_layer(filter(CROSS.search, outputs), PRESENT))
    crossing = [(slot, name) for slot, name in _by_layer(filter(CROSS.search, inputs), PAST) if slot not in computed]
    if encoded is None and not crossing:
        return None
    if place.encoder is None:
        raise ModelError(
            f"input '{encoded or crossing[0][1]}' of '{place.model}' takes what an encoder computes, and there is no "
            f"{ENCODER_NAME} beside it: give the folder of the export"
        )
    opened = open_model(place.encoder)
    names = [value.name for value in opened.model.graph.output]
    presents = dict(_by_layer(names, PRESENT))
    taken = {name: presents.get(slot) for slot, name in crossing}
    if encoded is not None:
        taken = {encoded: next((name for name in STATES if name in names), names[0]), **taken}
    given = {name: output for name, output in taken.items() if output is not None}
    if len(given) < len(taken):
        missing = next(name for name in taken if name not in given)
        raise ModelError(
            f"'{place.encoder}' has no output for input '{missing}' of '{place.model}'; has: {_few(names)}"
        )
    types = {name: _dtype(inputs[name]) for name in (*given, *([] if mask is None else [mask]))}
    data = tuple(file for file in opened.files if file != place.encoder)
    return Encoder(place.encoder, data, given, mask, types, place.folder or place.model.parent)


def _role(place: _Place, role: str, usual: Sequence[str], names: Iterable[str]) -> str | None:
    """Return the name that the configuration gives, if the model has it, else the first usual one."""
    return next((name for name in (place.roles.get(role), *usual) if name in set(names)), None)


def _states(
    place: _Place, inputs: Sequence[onnx.ValueInfoProto], outputs: Mapping[str, onnx.ValueInfoProto]
) -> tuple[StateTensor, ...]:
    """Pair the inputs and outputs of states by layer and kind.

    Raises:
        ModelError: a state has no output, or its size is not fixed.
    """
    presents = {_state(name): name for name in outputs if STATE.search(name)}
    states = []
    for value in inputs:
        layer, kind = _state(value.name)
        present, dims = presents.get((layer, kind)), _dims(value)[1:]
        if present is None:
            raise ModelError(
                f"state '{value.name}' of '{place.model}' has no output for the {kind} of layer {layer}; its outputs: "
                f"{_few(outputs)}"
            )
        shape = tuple(dim for dim in dims if dim is not None)
        if not shape or len(shape) < len(dims):
            raise ModelError(
                f"state '{value.name}' of '{place.model}' has the shape {_dims(value)}; known is (batch, fixed sizes)"
            )
        states.append(StateTensor(layer, kind, value.name, present, shape, _dtype(value)))
    return tuple(sorted(states, key=lambda state: (state.layer, state.kind)))


def _state(name: str) -> tuple[int, str]:
    """Return layer and kind of a state by its name."""
    kind, layer = STATE.findall(name)[-1], LAYER.search(name)
    return (0 if layer is None else int(layer[0])), kind


def _caches(
    place: _Place, inputs: Sequence[onnx.ValueInfoProto], outputs: Mapping[str, onnx.ValueInfoProto]
) -> tuple[CacheTensor, ...]:
    """Pair the inputs and outputs of caches by layer and kind.

    Raises:
        ModelError: an input is no cache by its name, has no output, or caches differ in shape or type.
    """
    crossing = any(CROSS.search(value.name) for value in inputs)
    past, present = (PAST, PRESENT) if crossing else (place.past, place.present)
    presents = dict(_by_layer((name for name in outputs if bool(CROSS.search(name)) is crossing), present))
    caches = []
    for value in inputs:
        slot = next((slot for slot, name in _by_layer([value.name], past) if name == value.name), None)
        if slot is None:
            raise ModelError(
                f"input '{value.name}' of '{place.model}' is neither tokens, mask, positions nor a cache by its name: "
                f"give the naming of the caches with --past 'PATTERN' --present 'PATTERN'; {OTHERS}"
            )
        if slot not in presents:
            raise ModelError(
                f"cache '{value.name}' of '{place.model}' has no output for {slot[1]}s of layer {slot[0]}; its "
                f"outputs: {_few(outputs)}. Give their naming with --present 'PATTERN'"
            )
        caches.append(_cache(place, value, slot, presents[slot]))
    caches.sort(key=lambda tensor: (tensor.layer, tensor.kind))
    first = caches[0] if caches else None
    for tensor in caches:
        if first is not None and (tensor.dtype, tensor.heads) != (first.dtype, first.heads):
            raise ModelError(
                f"caches of '{place.model}' differ: '{first.past}' is {first.heads} heads of {first.dtype}, "
                f"'{tensor.past}' {tensor.heads} heads of {tensor.dtype}. Export all layers with one type"
            )
    slots = {(tensor.layer, tensor.kind) for tensor in caches}
    missing = {(tensor.layer, kind) for tensor in caches for kind in CACHE_KINDS.values()} - slots
    if missing:
        layer, kind = min(missing)
        raise ModelError(f"layer {layer} of '{place.model}' has no {kind} cache: caches come in pairs")
    return tuple(caches)


def _cache(place: _Place, value: onnx.ValueInfoProto, slot: tuple[int, str], present: str) -> CacheTensor:
    dims, dtype = _dims(value), _dtype(value)
    if len(dims) != CACHE_RANK or not dims[CACHE_HEADS]:
        raise ModelError(
            f"cache '{value.name}' of '{place.model}' has the shape {dims}; known is (batch, heads, length, head size)"
        )
    if dtype not in CACHE_TYPES:
        raise ModelError(f"cache '{value.name}' of '{place.model}' has the type {dtype}, which is no cache type")
    width = dims[CACHE_WIDTH]
    if not width:  # a symbol in files of onnxruntime-genai
        size = place.sizes.get("head_size") or _quotient(place.sizes.get("hidden"), place.sizes.get("heads"))
        if not size:
            raise ModelError(f"the head size of cache '{value.name}' is neither in '{place.model}' nor in a config")
        width = size // 2 if dtype == np.uint8 else size
    layer, kind = slot
    return CacheTensor(layer, kind, value.name, present, int(dims[CACHE_HEADS] or 0), int(width), dtype)  # type: ignore[arg-type]


def _quotient(total: Any, parts: Any) -> int | None:
    return total // parts if isinstance(total, int) and isinstance(parts, int) and parts else None


def _by_layer(names: Iterable[str], patterns: Sequence[str]) -> Iterator[tuple[tuple[int, str], str]]:
    """Yield ((layer, kind), name) of names that match a pattern and have a number and a kind."""
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            kinds, layer = KIND.findall(name), LAYER.search(name)
            if kinds and layer is not None:
                yield (int(layer[0]), CACHE_KINDS[kinds[-1][0]]), name


def _dims(value: onnx.ValueInfoProto) -> list[int | None]:
    """Return the sizes of a value; None for symbols."""
    return [dim.dim_value or None for dim in value.type.tensor_type.shape.dim]


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))


def _few(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:6]) + (f" and {len(every) - 6} more" if len(every) > 6 else "")
