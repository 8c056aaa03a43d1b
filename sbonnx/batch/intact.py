"""Whether what steps have made is still as it was made: files, and what metrics read."""

from __future__ import annotations

from typing import Final

from sbonnx.batch.accept import unchanged
from sbonnx.batch.digests import Digests
from sbonnx.batch.jobs.job import Outcome, Places, Step
from sbonnx.batch.outcomes import read_made

FILES: Final = "files"
"""Folder, in that of a step, with the model and its data files."""


class Intact:
    """Looks at what steps have made. Files whose stamps are known are not read again.

    intact = Intact(places)
    outcomes = [intact.outcome(step) for step in steps]
    intact.save()
    """

    def __init__(self, places: Places) -> None:
        self.digests = Digests(places.state)
        self._places = places
        self._reads: dict[str, bool] = {}

    def outcome(self, step: Step) -> Outcome | None:
        """Outcome of a step; None if it has no output, its files are damaged, or its metric would read other
        files now."""
        found = self.files(step.key, step.work)
        return found if found is not None and all(self._unchanged(reads) for reads in found.reads) else None

    def files(self, key: str, work: str) -> Outcome | None:
        """The outcome under a key, whose files lie under `work`; None where one of them is missing or damaged."""
        found = read_made(self._places, key)
        if found is None:
            return None
        folder = self._places.made(work) / FILES
        intact = all(self.digests.of(folder / name) == digest for name, digest in found.files.items())
        return found if intact else None

    def save(self) -> None:
        """Remember the digests."""
        self.digests.save()

    def _unchanged(self, reads: str) -> bool:
        if reads not in self._reads:
            self._reads[reads] = unchanged(reads, self._places, self.digests)
        return self._reads[reads]


def made_before(step: Step, places: Places) -> Outcome | None:
    """Outcome of one step, as `Intact.outcome` returns it."""
    intact = Intact(places)
    found = intact.outcome(step)
    intact.save()
    return found


__all__ = ["FILES", "Intact", "made_before"]
