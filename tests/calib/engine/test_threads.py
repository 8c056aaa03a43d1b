"""Work on several samples at a time."""

from __future__ import annotations

import threading
import time

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from sbonnx.calib.engine.threads import TRIED, in_order, one_blas_thread, pool_of


@pytest.mark.parametrize("count", [0, 3, TRIED, 40])
@pytest.mark.parametrize(("least", "seconds"), [(0.0, 0.0), (0.001, 0.002), (0.1, 0.0)])
def test_results_come_in_the_order_of_the_items(count: int, least: float, seconds: float) -> None:
    """Whoever does them: all are done here where they take less than they must; else other threads take part."""
    doers = set()

    def work(item: int) -> int:
        doers.add(threading.get_ident())
        time.sleep(seconds)
        return item * item

    found = list(in_order(work, iter(range(count)), 3, least=least))
    assert found == [(item, item * item) for item in range(count)]
    others = doers - {threading.get_ident()}
    assert bool(others) is (seconds >= least and count > (TRIED if least else 0))


def blas_threads() -> list[int]:
    """Threads of each BLAS library."""
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


def test_products_stay_on_one_thread() -> None:
    """In `one_blas_thread` and in the threads of a pool; as before after them."""
    import numpy as np

    np.ones((2, 2)) @ np.ones((2, 2))
    with threadpool_limits(3, user_api="blas"):
        before = blas_threads()
        with one_blas_thread():
            assert set(blas_threads()) <= {1}
        with pool_of(2) as pool:
            assert set(pool.submit(blas_threads).result()) <= {1}
        for _, found in in_order(lambda _: blas_threads(), iter(range(3)), 2):
            assert set(found) <= {1}
        assert blas_threads() == before
