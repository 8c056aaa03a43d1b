"""Integrity checks of step outputs: the files and the inputs of metrics are unchanged."""

from __future__ import annotations

from typing import Final

from sbonnx.batch.accept import unchanged
from sbonnx.batch.digests import Digests
from sbonnx.batch.jobs.job import Outcome, Places, Step
from sbonnx.batch.outcomes import read_made

FILES: Final = "files"
"""Subfolder of a step's output with the model and its data files."""


class Intact:
    """Checks the outputs of steps. Files with unchanged stamps are not read again.

    intact = Intact(places)
    outcomes = [intact.outcome(step) for step in steps]
    intact.save()
    """

    def __init__(self, places: Places) -> None:
        self.digests = Digests(places.state)
        self._places = places
        self._reads: dict[str, bool] = {}

    def outcome(self, step: Step) -> Outcome | None:
        """Return the outcome of a step; None if it has no output, its files are damaged, or the files that its metric
        read have changed."""
        found = self.files(step.key, step.work)
        return found if found is not None and all(self._unchanged(reads) for reads in found.reads) else None

    def files(self, key: str, work: str) -> Outcome | None:
        """Return the outcome under `key`, with files under `work`; None if one of them is missing or damaged."""
        found = read_made(self._places, key)
        if found is None:
            return None
        folder = self._places.made(work) / FILES
        intact = all(self.digests.of(folder / name) == digest for name, digest in found.files.items())
        return found if intact else None

    def save(self) -> None:
        """Write the digest cache."""
        self.digests.save()

    def _unchanged(self, reads: str) -> bool:
        if reads not in self._reads:
            self._reads[reads] = unchanged(reads, self._places, self.digests)
        return self._reads[reads]


def made_before(step: Step, places: Places) -> Outcome | None:
    """Return the outcome of one step, as `Intact.outcome`."""
    intact = Intact(places)
    found = intact.outcome(step)
    intact.save()
    return found


__all__ = ["FILES", "Intact", "made_before"]
