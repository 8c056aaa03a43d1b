"""Any valid recipe survives a trip through text; junk raises `RecipeError` and nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbonnx.backends import BACKENDS
from sbonnx.backends.mode_limits import SCHEMES
from sbonnx.errors import RecipeError
from sbonnx.recipe import Recipe, as_yaml, load
from sbonnx.recipe.names import OBSERVERS, ONLY_ACTIVATIONS, ONLY_WEIGHTS, QUANTIZERS
from sbonnx.recipe.sections.whole import KEYS
from sbonnx.recipe.yaml_text import parse

BITS = st.sampled_from([0, *range(2, 17)])
FLAGS = st.booleans()
NAMES = st.text(min_size=1, max_size=12).filter(lambda name: ":" not in name)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SETTINGS = settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def some(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A dict with some of these keys."""
    return st.fixed_dictionaries({}, optional=parts)


def side(refused: frozenset[str], quantizer: dict[str, Any], observer: dict[str, Any]) -> dict[str, Any]:
    types = [name for name in QUANTIZERS if name not in refused]
    observers = [name for name in OBSERVERS if name not in refused]
    percentile = some(ALPHA=st.floats(0, 0.49))
    return {
        "QSCHEME": st.sampled_from(SCHEMES),
        "QUANTIZER": some(TYPE=st.sampled_from(types), DISABLE=FLAGS, BIT=BITS, **quantizer),
        "OBSERVER": some(TYPE=st.sampled_from(observers), PERCENTILE=percentile, **observer),
    }


W = side(ONLY_ACTIVATIONS, {}, {"ACIQ": some(DISTRIBUTION=st.sampled_from(["gaus", "LAPLACE"]))})
A = side(
    ONLY_WEIGHTS,
    {"PACT": some(ALPHA_VALUE=st.floats(0.1, 100))},
    {"MOVING_AVERAGE": some(EMA_RATIO=st.floats(0, 0.99)), "LAYOUT": st.sampled_from(["NCHW", "nlc"])},
)
RECIPES = some(
    W=some(**W, SPECIFIC=st.lists(st.dictionaries(NAMES, some(**W), max_size=2), max_size=2)),
    A=some(**A, SPECIFIC=st.lists(st.dictionaries(NAMES, some(**A), max_size=2), max_size=2)),
    SKIP_TRACE_MODULES=st.lists(NAMES, max_size=2),
    EXCLUDE=st.lists(st.one_of(NAMES, NAMES.map("op:{}".format), NAMES.map("tensor:{}".format)), max_size=3),
    INCLUDE=NAMES,
    FIRST_BITS=st.one_of(some(W=BITS, A=BITS), BITS, st.just("w8a8")),
    RANGES=st.dictionaries(
        NAMES, st.tuples(FLOATS, FLOATS).filter(lambda ends: ends[0] < ends[1]).map(list), max_size=3
    ),
    SHARED_SCALES=st.lists(st.lists(NAMES, min_size=1, max_size=2), max_size=2),
    QUANTIZE_INPUTS_OF=some(ADD=FLAGS, SOFTMAX=FLAGS, MATMUL=FLAGS),
    SCHEDULE=some(FUSE_BN=FLAGS, DISABLE_UNNECESSARY_QUANT=FLAGS),
    SAMPLES=st.integers(1, 10**6),
    SIMPLIFY=FLAGS,
    CALIBRATION=some(
        MEMORY=st.sampled_from(["2 GiB", "100000"]),
        GRANULARITY=st.sampled_from(["auto", "LAYER"]),
        THREADS=st.integers(1, 64),
        CACHE=NAMES.filter(lambda name: name.strip() and "\0" not in name),
        ASYM=st.one_of(FLAGS, some(ENABLE=FLAGS, RANGES=FLAGS, ROUNDING=FLAGS)),
        FEEDBACK=st.dictionaries(NAMES, NAMES, max_size=1),
        PICK=st.sampled_from(["first", "Random"]),
        SEED=st.integers(0, 10**18 - 1),
    ),
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(sorted(KEYS)), st.text(max_size=4), st.integers()), inner, max_size=4
        ),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@SETTINGS
@given(RECIPES)
def test_a_recipe_survives_a_trip_through_yaml(source: dict[str, Any]) -> None:
    recipe = load(source, backend="virtual")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.yaml"
        file.write_text(as_yaml(recipe), encoding="utf-8")
        again = load(file)
    assert again == recipe and again.to_dict() == recipe.to_dict()


@SETTINGS
@given(RECIPES, st.sampled_from(list(BACKENDS)))
def test_every_backend_takes_it_or_says_why(source: dict[str, Any], backend: str) -> None:
    recipe = outcome(source, backend=backend)
    assert recipe is None or recipe.backend == backend


@SETTINGS
@given(JUNK, st.one_of(st.none(), st.dictionaries(st.sampled_from(sorted(KEYS)), JUNK, max_size=2)))
def test_junk_is_refused_in_one_line(source: Any, overrides: Any) -> None:
    recipe = outcome(source, overrides=overrides or {})
    assert recipe is None or load(recipe.to_dict()) == recipe


@SETTINGS
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), JUNK, min_size=1, max_size=3))
def test_junk_at_real_keys_is_refused_in_one_line(source: dict[str, Any]) -> None:
    recipe = outcome(source)
    assert recipe is None or load(recipe.to_dict()) == recipe


@SETTINGS
@given(st.one_of(st.text(), st.text(alphabet="WA:{}[]-,&*!|>'\"%@`\\ \n\t#?<U0x.e1")))
def test_junk_text_is_refused_in_one_line(text: str) -> None:
    try:
        parse(text, "junk")
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1


def outcome(source: Any, **arguments: Any) -> Recipe | None:
    """The recipe, or None after a `RecipeError` of one line."""
    if isinstance(source, str):
        source = {"EXCLUDE": source}  # as a path it would look for files
    try:
        return load(source, **arguments)
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1
        return None
