"""Quantize a BERT-style encoder for a sentiment task in the form of SST-2; the data is text and a tokenizer.

    python -m examples.encoder.run out/

Needs torch and tokenizers: ``pip install 'sbonnx[cpu,qat,llm]'``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from examples.commands import Figures, command, evaluated, main, size
from examples.training import classification, export, fit

WIDTH, HEADS, DEPTH, LENGTH = 48, 4, 2, 32
GOOD = ["great", "fine", "lovely", "clever", "moving", "funny", "bright", "superb", "warm", "fresh"]
BAD = ["awful", "dull", "weak", "boring", "clumsy", "sad", "flat", "noisy", "cheap", "slow"]
NOUNS = ["film", "plot", "cast", "music", "ending", "story", "script", "camera", "sound", "pace"]
ADVERBS = ["very", "quite", "rather", "truly", "simply", "almost", "really"]
WORDS = [*GOOD, *BAD, *NOUNS, *ADVERBS, *["the", "was", "is", "not", "never", "but", "and", "although", "a", "while"]]


def clause(random: np.random.Generator) -> tuple[str, int]:
    """Return a clause about one noun, and its sentiment: 1 good, 0 bad."""
    good = int(random.integers(2))
    adjective = random.choice(GOOD if good else BAD)
    negated = random.random() < 0.35
    words = ["the", random.choice(NOUNS), random.choice(["was", "is"])]
    words += [random.choice(["not", "never"])] if negated else []
    words += [random.choice(ADVERBS)] if random.random() < 0.5 else []
    return " ".join([*words, adjective]), good ^ negated


def reviews(count: int, seed: int) -> list[dict[str, object]]:
    """Return sentences of one or two clauses with labels: after `but` the second decides, before `although` the first.

    Args:
        count: number of sentences.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        text, label = clause(random)
        if random.random() < 0.6:
            other, sentiment = clause(random)
            word = random.choice(["but", "although"])
            text, label = f"{text} {word} {other}", sentiment if word == "but" else label
        rows.append({"text": text, "label": label})
    return rows


def tokenizer() -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer with BERT's special tokens."""
    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


class Layer(nn.Module):
    """Post-norm encoder layer of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5 + mask).softmax(-1)
        x = self.norm1(x + self.dense((weights @ value).transpose(1, 2).flatten(2)))
        result: Tensor = self.norm2(x + self.mlp(x))
        return result


class Encoder(nn.Module):
    """BERT of two layers with a classifier on the first token; token ids (N, T) to scores (N, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(4 + len(WORDS), WIDTH), nn.Embedding(2, WIDTH)
        self.positions, self.norm = nn.Embedding(LENGTH, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.pooler, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        x = self.norm(self.words(input_ids) + self.types(token_type_ids) + self.positions(places))
        mask = (1.0 - attention_mask[:, None, None].float()) * -1e9
        for layer in self.layers:
            x = layer(x, mask)
        scores: Tensor = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return scores


def tokens(rows: list[dict[str, object]]) -> list[Tensor]:
    """Return ids, mask, types and labels of texts, padded to the longest."""
    made = tokenizer()
    made.enable_padding()
    found = made.encode_batch([str(row["text"]) for row in rows])
    columns = ([each.ids for each in found], [each.attention_mask for each in found], [each.type_ids for each in found])
    return [*(torch.tensor(column) for column in columns), torch.tensor([row["label"] for row in rows])]


def prepare() -> None:
    """Train encoder.onnx; write tokenizer.json, texts.txt (no labels) and dev.jsonl (text and label)."""
    torch.manual_seed(0)
    training = reviews(3000, seed=1)
    data = tokens(training)
    network = fit(Encoder(), data, classification, epochs=6, batch=64, lr=2e-3)
    names = ("input_ids", "attention_mask", "token_type_ids")
    axes = {key: {0: "N", 1: "T"} for key in names} | {"logits": {0: "N"}}
    export(
        network, {name: tensor[:2] for name, tensor in zip(names, data, strict=False)}, ["logits"], "encoder.onnx", axes
    )
    tokenizer().save("tokenizer.json")
    Path("texts.txt").write_text("\n".join(str(row["text"]) for row in training[:128]))
    Path("dev.jsonl").write_text("\n".join(json.dumps(row) for row in reviews(400, seed=2)))


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    command("sbonnx quantize encoder.onnx --data texts.txt --preprocess tokenizer.json -o int8.onnx")
    command("sbonnx quantize encoder.onnx --data texts.txt --preprocess tokenizer.json -o dynamic.onnx --mode dynamic")
    data = "--data dev.jsonl --preprocess tokenizer.json"
    figures = evaluated(f"sbonnx eval encoder.onnx int8.onnx dynamic.onnx {data} --metric top1")
    figures |= evaluated(f"sbonnx eval encoder.onnx int8.onnx {data} --metric f1")
    return figures | {"size of int8 / float": size("int8.onnx") / size("encoder.onnx")}


if __name__ == "__main__":
    main(run, __doc__)
