"""Texts, the chat template, and windows of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from sbonnx.errors import DataError, RecipeError
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.llm.token_texts import TextTokenizer, read_documents
from sbonnx.llm.windows import DecoderFeeds, read_windows
from tests.llm.tiny_decoder import CONTEXT, WIDTH, WORDS, decoder_model, token_windows, write_folder

needs_tokenizers = pytest.mark.skipif(find_spec("tokenizers") is None, reason="the package tokenizers is not installed")


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return read_decoder(write_folder(tmp_path / "m"))


def words(*numbers: int) -> str:
    """A text whose tokens are these ids."""
    return " ".join(WORDS[number] for number in numbers)


@needs_tokenizers
def test_texts_are_joined_by_eos_and_cut(decoder: Decoder) -> None:
    texts = [words(2, 3, 4, 5, 6), words(7, 8), words(9, 10, 11)]
    found = read_windows(decoder, texts, window=4)
    assert found.ids.tolist() == [[2, 3, 4, 5], [6, 1, 7, 8], [1, 9, 10, 11]]
    assert found.ids.dtype == np.int64
    assert read_windows(decoder, texts, window=4, tokens=11).ids.tolist() == [[2, 3, 4, 5], [6, 1, 7, 8]]
    assert read_windows(decoder, iter(texts), window=16).ids.tolist() == [[2, 3, 4, 5, 6, 1, 7, 8, 1, 9, 10, 11]]


@needs_tokenizers
def test_every_window_begins_with_bos_if_the_tokenizer_adds_it(decoder: Decoder) -> None:
    path = decoder.model.parent / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_bos_token": True}))
    found = read_windows(decoder, [words(2, 3, 4, 5, 6)], window=3)
    assert found.ids.tolist() == [[0, 2, 3], [0, 4, 5]]


@needs_tokenizers
def test_files_folders_and_conversations(decoder: Decoder, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text(words(2, 3) + "\n" + words(4, 5))
    turns = [{"role": "w10", "content": "w20"}, {"role": "w11", "content": "w21"}]
    rows = [{"text": words(6, 7)}, {"messages": turns}]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (folder / "c.md").write_text("not read")
    tokenizer = TextTokenizer(decoder)
    read = ["".join(pieces) for pieces in read_documents(folder, tokenizer)]
    assert read == [words(6, 7), "<s> w10 w20 <s> w11 w21 ", words(2, 3) + "\n" + words(4, 5)]
    chat = [0, 12, 22, 0, 13, 23]  # word n has the id n + 2
    assert read_windows(decoder, folder, window=14).ids.tolist() == [[6, 7, 1, *chat, 1, 2, 3, 4, 5]]


@needs_tokenizers
def test_long_files_are_read_in_pieces(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.llm.token_texts.PIECE", 10)
    path = tmp_path / "t.txt"
    path.write_text("\n".join(words(*range(2, 12)) for _ in range(20)))
    (pieces,) = [list(document) for document in read_documents(path, TextTokenizer(decoder))]
    assert len(pieces) == 20
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert read_windows(decoder, path, window=20).ids.tolist() == [[*range(2, 12), *range(2, 12)]] * 10


@needs_tokenizers
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"text": 1}', r"line 1 has neither \"text\" nor \"messages\""),
        ("[1", "line 1 is no JSON"),
        ('{"messages": [{"role": 1}]}\n', None),
        ('{"messages": [1]}', r"line 1: the chat template rejects the messages"),
    ],
)
def test_bad_lines_are_named(decoder: Decoder, tmp_path: Path, content: str, text: str | None) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    template = "{% for m in messages %}{{ m['role'] + 'x' if m is number else m['role'] }}{% endfor %}"
    (decoder.model.parent / "chat_template.jinja").write_text(template)
    if text is None:
        assert [list(pieces) for pieces in read_documents(path, TextTokenizer(decoder))] == [["1"]]
        return
    with pytest.raises(DataError, match=text):
        list(read_documents(path, TextTokenizer(decoder)))


@needs_tokenizers
def test_a_chat_template_runs_in_a_sandbox(decoder: Decoder) -> None:
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (decoder.model.parent / "chat_template.jinja").write_text(attack)
    with pytest.raises(DataError, match="the chat template rejects the messages: access to attribute '__class__'"):
        TextTokenizer(decoder).chat([], "line 1")


@needs_tokenizers
def test_errors_name_the_fix(decoder: Decoder, tmp_path: Path) -> None:
    folder = decoder.model.parent
    with pytest.raises(RecipeError, match=f"LLM.WINDOW is 65 tokens, and the context of .* has {CONTEXT}"):
        read_windows(decoder, ["a"], window=CONTEXT + 1)
    with pytest.raises(DataError, match="the texts have 1 tokens: at least 2"):
        read_windows(decoder, ["w3"])
    with pytest.raises(DataError, match=r"'.*\.pdf' is no text: known are .txt"):
        (tmp_path / "a.pdf").write_text("")
        read_windows(decoder, tmp_path / "a.pdf")
    with pytest.raises(DataError, match="there is no file or folder of texts 'nowhere'"):
        read_windows(decoder, "nowhere")
    with pytest.raises(DataError, match="token 64 of the texts is not in the vocabulary"):
        read_windows(decoder, np.array([[2, 64]]))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer.json: give it with --tokenizer"):
        read_windows(read_decoder(folder), ["a"])
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"sentencepiece tokenizer .* convert it with transformers, AutoTokenizer"):
        read_windows(read_decoder(folder), ["a"])


def test_without_tokenizers_one_line_names_the_extra(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"tokenizers, which is not installed: pip install 'sbonnx\[llm\]'"):
        read_windows(decoder, ["a b"])
    assert len(read_windows(decoder, token_windows()).ids) == 16  # tokens need no tokenizer


def test_every_eighth_window_is_held_out(decoder: Decoder) -> None:
    ids = token_windows(17)
    found = read_windows(decoder, ids)
    assert np.array_equal(found.held_out, ids[[7, 15]])
    assert np.array_equal(found.calibration, ids[[*range(7), *range(8, 15), 16]])
    few = read_windows(decoder, ids[:7])
    assert not few.divided
    assert np.array_equal(few.held_out, few.calibration)


def test_feeds_are_made_one_at_a_time(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def feed(*arguments: object) -> dict[str, object]:
        made.append(arguments)
        return {}

    monkeypatch.setattr("sbonnx.llm.windows.decoder_feed", feed)
    walk: Iterator[object] = iter(DecoderFeeds(decoder, token_windows()))
    next(walk)
    assert len(made) == 1


def test_prefill_and_decode_feeds(decoder: Decoder) -> None:
    ids = token_windows(40)
    feeds = list(DecoderFeeds(decoder, ids, decode_share=0.5, seed=3))
    again = list(DecoderFeeds(decoder, ids, decode_share=0.5, seed=3))
    assert all(np.array_equal(one[name], two[name]) for one, two in zip(feeds, again, strict=True) for name in one)
    decoded = [number for number, feed in enumerate(feeds) if feed["input_ids"].shape[1] == 1]
    assert 10 <= len(decoded) <= 30
    session = DecoderSession(decoder, threads=1)
    for number, feed in enumerate(feeds):
        past = feed["past_key_values.1.value"]
        if number not in decoded:
            assert past.shape == (1, 1, 0, WIDTH)
            assert np.array_equal(feed["input_ids"], ids[number][None])
            continue
        length = past.shape[2]
        _, cache = session(ids[number][None, :length])
        assert np.array_equal(past, cache["past_key_values.1.value"])
        assert feed["input_ids"].tolist() == [[ids[number][length]]]
    positions = {feeds[number]["past_key_values.0.key"].shape[2] for number in decoded}
    assert len(positions) > 5


def test_a_decoder_without_caches_is_fed_whole_windows(tmp_path: Path) -> None:
    model = decoder_model()
    for name in [value.name for value in model.graph.input][1:]:
        node = next(each for each in model.graph.node if name in each.input)
        node.input[:] = [each for each in node.input if each != name]
    del model.graph.input[1:]
    plain = read_decoder(write_folder(tmp_path / "p", model))
    assert plain.cache == ()
    assert [block.stream for block in plain.structure.blocks] == ["x0", "x1"]
    feeds = list(DecoderFeeds(plain, token_windows(), decode_share=1.0))
    assert all(list(feed) == ["input_ids"] and feed["input_ids"].shape == (1, 24) for feed in feeds)
