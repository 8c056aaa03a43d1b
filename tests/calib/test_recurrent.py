"""Recurrent exports: the states that `unroll` feeds are those of a plain loop in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.recurrent import unroll
from sbonnx.errors import DataError, NumericError, RecipeError
from sbonnx.spec import Array
from tests.calib.recurrent import BACK, step
from tests.support.models import model, run


def steps(count: int, batch: int = 1, seed: int = 0) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((batch, 4)).astype(np.float32)} for _ in range(count)]


def plain_loop(
    proto: onnx.ModelProto, feeds: list[dict[str, Array]], back: dict[str, str], zeros: dict[str, Array]
) -> list[dict[str, Array]]:
    """The same by hand: what each step is fed."""
    states, full = dict(zeros), []
    for feed in feeds:
        if any(name in feed for name in zeros):
            states = dict(zeros)
        full.append({**states, **feed})
        found = run(proto, full[-1], level="all")
        states = {name: found[output] for output, name in back.items()}
    return full


def assert_same(found: list[dict[str, Array]], expected: list[dict[str, Array]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_states_are_those_of_a_plain_loop(batch: int) -> None:
    feeds = steps(6, batch)
    data = unroll(feeds, graphs.load(step()), BACK)
    expected = plain_loop(step(), feeds, BACK, {"h": np.zeros((batch, 8), np.float32)})
    assert_same(list(data), expected)
    assert_same(list(data), expected)
    assert np.abs(expected[-1]["h"]).max() > 0.1, "a state that says something"
    assert data.count == len(data) == 6
    assert [where for where, _ in data.items()] == [f"feed {i}" for i in range(6)]


def test_a_feed_with_a_state_begins_a_sequence() -> None:
    feeds = steps(6)
    feeds[3] = {**feeds[3], "h": np.full((1, 8), 0.5, np.float32)}
    feeds[5] = {**feeds[5], "h": np.zeros((1, 8), np.float32)}
    data = list(unroll(feeds, graphs.load(step()), BACK))
    assert_same(data, plain_loop(step(), feeds, BACK, {"h": np.zeros((1, 8), np.float32)}))
    np.testing.assert_array_equal(data[3]["h"], feeds[3]["h"])


def test_sequences_may_differ_in_their_batch() -> None:
    feeds = [*steps(2, 1), *steps(2, 3)]
    with pytest.raises(DataError, match=r"feed 2 needs a state 'h' of \(3, 8\), and feed 1.*leaves one of \(1, 8\)"):
        list(unroll(feeds, graphs.load(step()), BACK))
    feeds[2] = {**feeds[2], "h": np.ones((3, 8), np.float32)}
    assert [feed["h"].shape[0] for feed in unroll(feeds, graphs.load(step()), BACK)] == [1, 1, 3, 3]


LSTM = """
agraph (float[1,B,4] x, float[1,B,5] h, float[1,B,5] c) => (float[1,1,B,5] y, float[1,B,5] hn, float[1,B,5] cn) {
    y, hn, cn = LSTM <hidden_size = 5> (x, w, r, , , h, c)
}"""


def test_two_states_with_the_batch_in_the_middle() -> None:
    proto = model(LSTM, w=(1, 20, 4), r=(1, 20, 5))
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((1, 2, 4)).astype(np.float32)} for _ in range(5)]
    feeds[3]["c"] = np.full((1, 2, 5), 0.25, np.float32)  # a new sequence: h, which it lacks, begins with zeros
    back = {"hn": "h", "cn": "c"}
    zero = np.zeros((1, 2, 5), np.float32)
    data = list(unroll(feeds, graphs.load(proto), back))
    assert_same(data, plain_loop(proto, feeds, back, {"h": zero, "c": zero}))
    assert not data[3]["h"].any() and data[4]["h"].any()


def test_steps_by_position_and_split() -> None:
    """Items without names are for what must be fed; a split makes steps of a long array."""
    x = np.concatenate([feed["x"] for feed in steps(6)])
    expected = plain_loop(step(), steps(6), BACK, {"h": np.zeros((1, 8), np.float32)})
    graph = graphs.load(step())
    assert_same(list(unroll(x, graph, BACK, split=1)), expected)
    assert_same(list(unroll([(row[None],) for row in x], graph, BACK)), expected)
    assert unroll(x, graph, BACK, split=1).count == 6


def test_picking_comes_after_the_states() -> None:
    graph = graphs.load(step())
    every = list(unroll(steps(20), graph, BACK))
    data = unroll(steps(20), graph, BACK, limit=4, pick="random", seed=5)
    found = list(data)
    places = data.sampling.chosen(20)
    assert_same(found, [every[place] for place in places])
    assert places != (0, 1, 2, 3)
    assert_same(list(unroll(iter(steps(20)), graph, BACK, limit=3)), every[:3])


def test_only_as_far_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is not run, nor one before a new sequence."""
    from sbonnx.calib.engine.runner import LayerRunner

    ran: list[str] = []
    original = LayerRunner.run

    def counted(self: LayerRunner, *arguments: Any, **more: Any) -> Any:
        ran.append(more["where"])
        return original(self, *arguments, **more)

    monkeypatch.setattr(LayerRunner, "run", counted)
    feeds = steps(5)
    feeds[3] = {**feeds[3], "h": np.zeros((1, 8), np.float32)}
    data = unroll(feeds, graphs.load(step()), BACK)
    ran.clear()
    walk = iter(data)
    next(walk)
    assert ran == []
    list(walk)
    assert ran == ["feed 0", "feed 1", "feed 3"]


@pytest.mark.parametrize(
    ("feedback", "says"),
    [
        ({"nxt": "h"}, "the model has no output 'nxt': did you mean 'next'"),
        ({"next": "hidden"}, "the model has no input 'hidden': there are 'x', 'h'"),
        ({"y": "h"}, r"input 'h' wants float32 \(N, 8\) and output 'y' is float32 \(N, 2\): they do not fit"),
        ({"next": "h", "y": "h"}, "do not fit|fed by two outputs"),
        ({"x": "h"}, "the model has no output 'x'"),
    ],
)
def test_pairs_that_cannot_be(feedback: dict[str, str], says: str) -> None:
    with pytest.raises(RecipeError, match=f"CALIBRATION.FEEDBACK: .*({says})") as caught:
        unroll(steps(2), graphs.load(step()), feedback)
    assert "\n" not in str(caught.value)


TWICE = """
agraph (float[N,4] x, float[N,4] h) => (float[N,4] a, float[N,4] b, double[N,4] d) {
    a = Add (x, h)
    b = Sub (x, h)
    d = Cast <to = 11> (a)
}"""


def test_an_input_fed_twice_and_a_type_that_differs() -> None:
    graph = graphs.load(model(TWICE))
    with pytest.raises(RecipeError, match="input 'h' is fed by two outputs: name each input once"):
        unroll(steps(2), graph, {"a": "h", "b": "h"})
    with pytest.raises(RecipeError, match=r"input 'h' wants float32 \(N, 4\) and output 'd' is float64"):
        unroll(steps(2), graph, {"d": "h"})


UNKNOWN = """
agraph (float[N,4] x, float[N,8] h, int64[2] s) => (float[P,Q] next) {
    a = MatMul (x, w)
    b = MatMul (h, u)
    c = Add (a, b)
    next = Reshape (c, s)
}"""


def test_a_shape_that_turns_out_wrong() -> None:
    feeds = [{**feed, "s": np.array([2, 4])} for feed in steps(2)]
    with pytest.raises(
        DataError, match=r"output 'next' is float32 \(2, 4\) after feed 0, and input 'h'.*wants float32"
    ):
        list(unroll(feeds, graphs.load(model(UNKNOWN, w=(4, 8), u=(8, 8))), BACK))


def test_a_state_that_overflows_is_named() -> None:
    proto = model(TWICE)
    feeds = [{"x": np.full((1, 4), 3e38, np.float32)} for _ in range(3)]
    with pytest.raises(NumericError, match="output 'a' holds NaN or Inf after feed 1, and feed 2 would go on from it"):
        list(unroll(feeds, graphs.load(proto), {"a": "h"}))


def test_a_feed_that_lacks_another_input_is_still_an_error() -> None:
    with pytest.raises(DataError, match="feed 0 holds no array for input 'x': add it"):
        unroll([{"h": np.zeros((1, 8), np.float32)}], graphs.load(step()), BACK)


def test_the_voice_detector_of_the_pack(pack: Path) -> None:
    """Windows of real audio one after the other, against a plain loop over the file itself."""
    path = pack / "models" / "silero_vad.onnx"
    audio = np.load(pack / "data" / "audio_calib.npz")["X"].astype(np.float32) / 32768
    feeds = [{"input": row[None], "sr": np.array(16000)} for row in audio[0, : 576 * 12].reshape(-1, 576)]
    data = list(unroll(feeds, graphs.load(path), {"stateN": "state"}))
    state = np.zeros((2, 1, 128), np.float32)
    for feed, found in zip(feeds, data, strict=True):
        np.testing.assert_allclose(found["state"], state, rtol=0, atol=1e-4)
        state = run(str(path), {**feed, "state": state}, level="all")["stateN"]
    assert np.abs(data[-1]["state"]).max() > 0.5
