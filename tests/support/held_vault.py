"""A vault that hashes nothing of what it found while there is a certain file: one with very much memory, made small."""

from __future__ import annotations

import os
from pathlib import Path

from everstep_agent.vault import process as vault
from everstep_agent.vault.memory import adoption

from everstep.layout.slots import SlotHeader
from tests.support.waiting import until

HELD = "EVERSTEP_TEST_HELD"
"""The environment variable that names the file."""


class Held(adoption.SegmentAdoption):
    def _hash(self, segment: adoption.Segment, slot: int, header: SlotHeader) -> bool:
        held = Path(os.environ[HELD])
        until(lambda: self._stopping or not held.exists(), f"{held} is gone")
        return super()._hash(segment, slot, header)


def main() -> None:
    vault.SegmentAdoption = Held  # type: ignore[misc]
    vault.main()


if __name__ == "__main__":
    main()
