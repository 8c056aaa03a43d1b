"""No input, however wrong, ends in a crash, a hang, an internal error or a mess; every case runs as a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("hypothesis", reason="the fuzz suite draws its cases with hypothesis")

from tests.fuzz.collecting import collect
from tests.fuzz.harness import OWN_SCRIPTS, Zygote, describe, left_behind, unreadable
from tests.fuzz.known import Known, known
from tests.fuzz.parts import PARTS

SHARD = 250
"""Cases of one test: a part is cut into as many tests as it takes, which run side by side."""

SHARDS = [
    pytest.param(part, min(SHARD, count - start), start // SHARD, id=f"{part}-{start // SHARD}".replace(" ", "-"))
    for part, (_, count) in PARTS.items()
    for start in range(0, count, SHARD)
]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as server:
        yield server


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", known(), ids=lambda row: row.name)
def test_what_once_ended_badly(zygote: Zygote, row: Known) -> None:
    case = row.case()
    verdict = zygote.run(case)
    assert not verdict.faults, describe(case, verdict)
    assert verdict.code == row.code, describe(case, verdict)
    assert not [word for word in row.words if word not in verdict.err], verdict.err


@pytest.mark.slow
@pytest.mark.parametrize(("part", "count", "number"), SHARDS)
def test_no_case_ends_badly(part: str, count: int, number: int, zygote: Zygote) -> None:
    """``python -m tests.fuzz --part PART --seed NUMBER`` runs more of them and keeps what fails."""
    tally = collect(part, count, number, zygote=zygote)
    assert not tally.faults, "\n\n".join(tally.faults.values())
    assert tally.classes.total() >= count * 0.9
    if part == "names":  # any name is legal
        assert set(tally.classes) == {"done"}
    else:
        assert len(tally.classes) > 1, f"all cases end alike: {tally.classes}"


@pytest.mark.parametrize("smuggled", ["<script>alert(1)</script>", "<img onerror=x>", "<iframe></iframe>"])
def test_markup_in_pages_is_a_fault(smuggled: str) -> None:
    own = "".join(f"<script>{text}</script>" for text in sorted(OWN_SCRIPTS))
    page = f'<body>{own}<script type="application/json">{{}}</script></body>'
    assert not unreadable({"r.html": page}, None)
    assert unreadable({"r.html": page.replace("</body>", smuggled)}, None)


def test_files_that_a_case_must_not_leave() -> None:
    """A dry run writes digests of inputs that are not new, as on a busy machine."""
    allowed = {"out/q.onnx", "out/.sbonnx", "out/.sbonnx/digests.json"}
    wrong = {"q.onnx", "out/.q.onnx.1", "out/.sbonnx/.digests.json.1"}
    assert left_behind(allowed | wrong, refused=False) == sorted(wrong)
    assert left_behind(allowed, refused=True) == sorted(allowed)
