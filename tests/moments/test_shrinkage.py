"""How far correlations of few samples are to be trusted, against samples without end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.moments import Moments, shrinkage_of
from sbonnx.spec import Array
from tests.moments.test_second import moments_of

RANDOM = np.random.default_rng


def of(rows: Array) -> Moments:
    """One stream of rows (n, K), centred."""
    wide = rows[None].astype(np.float64)
    return moments_of(wide, wide, 1).centred()


def mixed(inputs: int, seed: int) -> Array:
    """A mixing matrix: inputs that go together by pairs far and near, of very different sizes."""
    random = RANDOM(seed)
    together = random.normal(size=(inputs // 2, inputs)) * np.exp(random.normal(size=inputs))
    return np.asarray(together + 0.2 * np.eye(inputs)[: inputs // 2])


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(1, 5)] * 4), st.booleans(), st.floats(0, 1), st.integers(0, 2**16))
def test_the_error_is_between_that_of_all_and_that_of_each_alone(
    sizes: tuple[int, int, int, int], two: bool, by: float, seed: int
) -> None:
    groups, rows, inputs, outputs = sizes
    random = RANDOM(seed)
    x = random.normal(1.0, 1.0, (groups, rows, inputs))
    quantized = x + random.normal(0.5, 0.3, x.shape) if two else x
    weight, other = random.normal(size=(2, groups, outputs, inputs))
    found = moments_of(x, quantized, outputs)
    gaps = x[:, None] * weight[:, :, None] - quantized[:, None] * other[:, :, None]
    together, alone = (gaps.sum(axis=3) ** 2).mean(axis=2), (gaps**2).sum(axis=3).mean(axis=2)
    shrunk = found.shrunk(by)
    assert shrunk.is_one_stream is not two
    wanted = (1 - by) * together + by * alone
    np.testing.assert_allclose(shrunk.error(weight, other), wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.error(weight, other), together, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 60, 200, 1000])
def test_it_is_the_best_multiple_of_the_correlations(count: int) -> None:
    """Tried: all shrinkages, against correlations of 10,000 rows. The mean over ten draws."""
    found, best = [], []
    for seed in range(10):
        random, mix = RANDOM(seed), mixed(40, seed)
        rows = random.normal(size=(count + 10_000, len(mix))) @ mix + 0.5 * random.normal(size=(count + 10_000, 40))
        few, true = of(rows[:count]), of(rows[count:])
        found.append(shrinkage_of(few, of(rows[count : count + count // 2])))
        c, h = (m.a[0] / np.sqrt(np.outer(np.diag(m.a[0]), np.diag(m.a[0]))) - np.eye(40) for m in (few, true))
        tries = np.linspace(0, 1, 201)
        best.append(tries[np.argmin([((h - (1 - by) * c) ** 2).sum() for by in tries])])
    assert np.mean(found) == pytest.approx(np.mean(best), abs=0.02 + 0.5 / np.sqrt(count) * np.mean(best))
    assert np.mean(found) == pytest.approx(np.mean(best), rel=0.35, abs=0.01)


def test_noise_is_not_trusted_and_what_holds_is() -> None:
    random = RANDOM(0)
    noise = random.normal(size=(60, 100))
    assert shrinkage_of(of(noise[:40]), of(noise[40:])) > 0.9
    both = np.repeat(random.normal(size=(4000, 10)), 10, axis=1) + 0.1 * random.normal(size=(4000, 100))
    assert shrinkage_of(of(both[:3000]), of(both[3000:])) < 0.02


def test_rows_that_are_alike_say_no_more() -> None:
    """Positions of one image: fifty of them count as one."""
    rows = RANDOM(1).normal(size=(60, 30))
    once = shrinkage_of(of(rows[:40]), of(rows[40:]))
    often = shrinkage_of(of(np.repeat(rows[:40], 50, axis=0)), of(np.repeat(rows[40:], 50, axis=0)))
    assert often == pytest.approx(once, rel=1e-9) and once > 0.5


def test_sizes_of_inputs_and_dead_ones_do_not_matter() -> None:
    random = RANDOM(2)
    rows = random.normal(size=(50, 8)) @ random.normal(size=(8, 20)) + random.normal(size=(50, 20))
    wanted = shrinkage_of(of(rows[:30]), of(rows[30:]))
    scaled = rows * np.exp(3 * random.normal(size=20))
    assert shrinkage_of(of(scaled[:30]), of(scaled[30:])) == pytest.approx(wanted, rel=1e-9)
    dead = np.concatenate([rows, np.zeros((50, 5))], axis=1)
    assert shrinkage_of(of(dead[:30]), of(dead[30:])) == pytest.approx(wanted, rel=1e-9)
    assert 0 < wanted < 1


def test_where_nothing_can_be_said_nothing_shrinks() -> None:
    rows = RANDOM(3).normal(size=(9, 4))
    none, single = replace(of(rows), rows=0), of(rows[:, :1])
    assert shrinkage_of(of(rows), none) == shrinkage_of(none, of(rows)) == shrinkage_of(single, single) == 0.0
    broken = of(rows)
    broken.a[0, 0, 1] = np.nan
    assert shrinkage_of(broken, of(rows)) == shrinkage_of(of(rows), broken) == 0.0
