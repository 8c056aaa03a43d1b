"""Buffers that are used again, and tensors in onnxruntime's own layout, against a plain run of onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError
from sbonnx.graph import Graph, load
from sbonnx.graph.extract import extract
from sbonnx.spec import Array
from tests.support.models import model, run

NET = """
net (float[N, 3, H, W] x) => (float[N, 16, H, W] a, float[N, 24, H, W] b, float[N, 32, H, W] c, float[N, 32, H, W] d) {
    ca = Conv<pads=[1,1,1,1]>(x, wa)
    a = Relu(ca)
    cb = Conv<pads=[1,1,1,1]>(a, wb)
    b = Relu(cb)
    c = Conv(b, wc)
    d = Relu(c)
}
"""
OUTPUTS = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    return model(NET, wa=(16, 3, 3, 3), wb=(24, 16, 3, 3), wc=(32, 24, 1, 1))


def images(count: int, size: int, seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((count, 3, size, size)).astype(np.float32)}


def test_the_same_values_in_the_same_buffers(net: onnx.ModelProto) -> None:
    with LayerRunner(load(net), threads=1) as runner:
        bound = runner.bind(OUTPUTS)
        first = bound.run(images(2, 9))
        kept = list(first)
        for seed in (1, 2):
            feeds = images(2, 9, seed)
            again = bound.run(feeds)
            assert again is first, "the same list says that nothing but values changed"
            assert all(x is y for x, y in zip(again, kept, strict=True))
            plain = runner.run(feeds, OUTPUTS)
            assert all(np.array_equal(x, plain[name]) for x, name in zip(again, OUTPUTS, strict=True))
        other = bound.run(images(1, 7))
        assert other is not first
        assert other[0].shape == (1, 16, 7, 7)


def test_shapes_that_depend_on_values() -> None:
    proto = model("g (float[N] x) => (int64[A, B] where, float[N] y) { where = NonZero(x) y = Neg(x) }")
    with LayerRunner(load(proto), threads=1) as runner:
        bound = runner.bind(["where", "y"])
        for x in ([0, 1, 2], [3, 4, 5], [0, 0, 0], [1, 0, 0]):
            feed = {"x": np.array(x, np.float32)}
            where, y = bound.run(feed)
            assert np.array_equal(where[0], np.flatnonzero(x))
            assert np.array_equal(y, -feed["x"])


def test_text_has_no_buffer() -> None:
    proto = model("g (string[N] x, float[N] y) => (string[N] s, float[N] t) { s = Identity(x) t = Neg(y) }")
    with LayerRunner(load(proto), threads=1) as runner:
        text, number = runner.bind(["s", "t"]).run({"x": np.array(["a", "b"], object), "y": np.ones(2, np.float32)})
    assert list(text) == ["a", "b"]
    assert number.tolist() == [-1, -1]


def test_a_feed_that_does_not_fit_is_named(net: onnx.ModelProto) -> None:
    with LayerRunner(load(net), threads=1, name="the net") as runner:
        bound = runner.bind(["a"])
        bound.run(images(1, 5))
        with pytest.raises(DataError, match="the net cannot run on sample 7"):
            bound.run({"x": np.zeros((1, 4, 5, 5), np.float32)}, where="sample 7")
        assert bound.run(images(1, 5))[0].shape == (1, 16, 5, 5)


@pytest.fixture
def layouts(net: onnx.ModelProto) -> Iterator[tuple[LayerRunner, LayerRunner]]:
    """The net as it is, and with some outputs in any layout."""
    with (
        LayerRunner(load(net), threads=1) as plain,
        LayerRunner(load(net), threads=1, any_layout=("a", "b", "d")) as own,
    ):
        yield plain, own


def test_the_same_elements_in_any_order(layouts: tuple[LayerRunner, LayerRunner]) -> None:
    plain, own = layouts
    assert own.output_names == plain.output_names
    feeds = images(2, 9)
    found, again = own.run(feeds), dict(zip(OUTPUTS, own.bind(OUTPUTS).run(feeds), strict=True))
    for name, value in plain.run(feeds).items():
        assert np.array_equal(np.sort(found[name], axis=None), np.sort(value, axis=None))
        assert np.array_equal(found[name], again[name])
    moved = {name for name, value in plain.run(feeds).items() if not np.array_equal(found[name], value)}
    assert moved <= {"a", "d"}, "24 channels do not fill their blocks, and 'c' was asked for as it is"
    if _has_blocks():
        assert moved == {"a", "d"}


def _has_blocks() -> bool:
    """Whether onnxruntime has a blocked layout on this processor."""
    try:
        with open("/proc/cpuinfo") as lines:
            return " avx2 " in lines.read()
    except OSError:
        return False


def test_branching_and_shared_outputs_keep_their_values() -> None:
    """An output that other nodes read too, and two outputs of the same tensor."""
    text = """
    g (float[N, 3, 8, 8] x) => (float[N, 16, 8, 8] a, float[N, 16, 8, 8] twin, float[N, 16, 8, 8] s) {
        ca = Conv<pads=[1,1,1,1]>(x, wa)
        a = Relu(ca)
        twin = Identity(a)
        s = Sigmoid(a)
    }
    """
    proto = model(text, wa=(16, 3, 3, 3))
    feeds = images(1, 8)
    want = run(proto, feeds)
    with LayerRunner(load(proto), threads=1, any_layout=("a", "twin")) as own:
        found = own.run(feeds)
    np.testing.assert_allclose(found["s"], want["s"], rtol=1e-5)
    for name in ("a", "twin"):
        np.testing.assert_allclose(
            np.sort(found[name], axis=None), np.sort(want[name], axis=None), rtol=1e-4, atol=1e-5
        )


def test_without_room_for_the_optimised_model_it_runs_all_the_same(
    net: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sbonnx.calib.engine.runner.weights_beside", full)
    feeds = images(1, 9)
    with LayerRunner(load(net), threads=1, any_layout=("a", "d")) as own, LayerRunner(load(net), threads=1) as plain:
        found, want = own.run(feeds), plain.run(feeds)
    assert all(np.array_equal(found[name], want[name]) for name in OUTPUTS)


def test_large_weights_are_shared_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit a session reads weights where they lie; the numbers stay within rounding."""
    from sbonnx.calib.engine import session

    rng = np.random.default_rng(0)
    proto = model("g (float[N, 512] x) => (float[N, 512] y) { y = MatMul(x, w) }", w=(512, 512))
    feeds = {"x": rng.standard_normal((3, 512)).astype(np.float32)}
    graph: Graph = extract(load(proto), ["x"], ["y"])
    monkeypatch.setattr(session, "LARGE", 0)
    with LayerRunner(graph, threads=1) as runner:
        np.testing.assert_allclose(runner.run(feeds)["y"], run(proto, feeds)["y"], rtol=1e-4, atol=1e-3)
