"""Quantize a GPT-2-style or a Llama-style decoder to 4 bits, with its tokenizer, and measure the perplexity.

    python -m examples.decoders.run out/

Needs torch and tokenizers: ``pip install 'sbonnx[cpu,qat,llm]'``.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers, trainers
from torch import Tensor, nn

from examples.commands import Figures, command, main, measured, size
from examples.training import export, fit

VOCABULARY, WIDTH, HEADS, DEPTH, CONTEXT, WINDOW = 384, 64, 4, 2, 128, 64
END = "<|endoftext|>"
HEAD = WIDTH // HEADS
Caches = Sequence[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """Root mean square normalization of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Rotate pairs of channels of (N, heads, T, HEAD) by their positions (N, T)."""
    angles = places[:, None, :, None] * 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD)
    cosine, sine = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    half = torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
    return x * cosine + half * sine


class Block(nn.Module):
    """Pre-norm block: of GPT-2, or of Llama with rotary positions, grouped keys and values, and a gated MLP."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.llama, self.groups = llama, 2 if llama else HEADS
        self.norm1, self.norm2 = (RMSNorm() if llama else nn.LayerNorm(WIDTH) for _ in range(2))
        self.attn = nn.Linear(WIDTH, WIDTH + 2 * self.groups * HEAD, bias=not llama)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=not llama)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False) if llama else None
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, not llama), nn.Linear(3 * WIDTH, WIDTH, not llama)

    def forward(self, x: Tensor, places: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.attn(self.norm1(x)).split([WIDTH, self.groups * HEAD, self.groups * HEAD], -1)
        query, key, value = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        if self.llama:
            query, key = rotated(query, places), rotated(key, places)
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        keys, values = (part.repeat_interleave(HEADS // self.groups, 1) for part in (key, value))
        later = torch.arange(key.shape[2])[None, None, None] > places[:, None, :, None]
        scores = query @ keys.transpose(-2, -1) * HEAD**-0.5 + later * -1e9
        x = x + self.proj((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))
        inner = self.norm2(x)
        act = (
            nn.functional.gelu(self.up(inner))
            if self.gate is None
            else (nn.functional.silu(self.gate(inner)) * self.up(inner))
        )
        return x + self.down(act), key, value


class Decoder(nn.Module):
    """A decoder of two layers with key/value caches, in the form in which optimum exports them."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = None if llama else nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(llama) for _ in range(DEPTH))
        self.norm = RMSNorm() if llama else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.groups = 2 if llama else HEADS

    def forward(self, input_ids: Tensor, position_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        x = self.words(input_ids)
        x = x if self.positions is None else x + self.positions(position_ids)
        present: list[Tensor] = []
        for at, block in enumerate(self.blocks):
            x, key, value = block(x, position_ids, (past[2 * at], past[2 * at + 1]))
            present += [key, value]
        return self.head(self.norm(x)), *present

    def caches(self, count: int, length: int) -> list[Tensor]:
        """Return zero caches (N, heads, length, HEAD), key and value of each layer."""
        return [torch.zeros(count, self.groups, length, HEAD) for _ in range(2 * DEPTH)]


def loss(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Negative log likelihood of the next token."""
    assert isinstance(network, Decoder)
    (ids,) = batch
    places = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    logits = network(ids[:, :-1], places, *network.caches(len(ids), 0))[0]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer, as GPT-2 has it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    )
    return made


def write_folder(folder: Path, network: Decoder, words: tokenizers.Tokenizer) -> None:
    """Write model, configuration and tokenizer, as `optimum-cli export onnx` does."""
    folder.mkdir()
    names = [f"{layer}.{kind}" for layer in range(DEPTH) for kind in ("key", "value")]
    past, present = ([f"{prefix}.{name}" for name in names] for prefix in ("past_key_values", "present"))
    ids = torch.ones(2, 3, dtype=torch.int64)
    places = torch.arange(4, 7).expand(2, -1)
    inputs = {"input_ids": ids, "position_ids": places} | dict(zip(past, network.caches(2, 4), strict=True))
    axes = {key: {0: "batch", 1: "tokens"} for key in ("input_ids", "position_ids", "logits")}
    axes |= {key: {0: "batch", 2: "past"} for key in past} | {key: {0: "batch", 2: "total"} for key in present}
    export(network, inputs, ["logits", *present], folder / "model.onnx", axes)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
    sizes |= {"num_key_value_heads": network.groups, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps({"model_type": folder.name, "eos_token_id": 0, **sizes}))
    words.save(str(folder / "tokenizer.json"))


def prepare() -> None:
    """Train gpt2/ and llama/ on the texts of Python's `help()`; write notes.txt and held_out.txt, not trained on."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    words = tokenizer(texts)
    ids = np.concatenate([np.array([*words.encode(text).ids, 0]) for text in texts])
    windows = ids[: 1500 * WINDOW].reshape(-1, WINDOW)
    for name in ("gpt2", "llama"):
        torch.manual_seed(0)
        network = fit(Decoder(name == "llama"), [torch.from_numpy(windows[:1200])], loss, epochs=3, batch=16, lr=6e-3)
        assert isinstance(network, Decoder)
        write_folder(Path(name), network, words)
    for file, part in (("notes.txt", windows[1200:1360]), ("held_out.txt", windows[1360:1440])):
        Path(file).write_text(words.decode(part.flatten().tolist()))


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    figures: Figures = {}
    for name, bits in (("gpt2", 4), ("llama", 4), ("llama", 2)):
        out = f"{name}-w{bits}"
        if bits == 4:
            command(f"sbonnx llm inspect {name}/")
        command(f"sbonnx llm quantize {name}/ -o {out}/ --text notes.txt --bits w{bits} --window 64 --no-latency")
        found = measured(f"sbonnx llm evaluate {out}/ --against {name}/ --text held_out.txt --window 64 --no-latency")
        figures |= {f"perplexity {name}": found["float_perplexity"], f"perplexity {out}": found["perplexity"]}
        figures[f"size of {out} / float"] = size(f"{out}/model.onnx") / size(f"{name}/model.onnx")
    return figures


if __name__ == "__main__":
    main(run, __doc__)
