"""A vault that does not hash existing slots while a file exists, as if it had to hash much memory."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.layout.slot_header import SlotHeader
from everstep_agent.vault import process as vault
from everstep_agent.vault.memory import adoption
from everstep_agent.vault.memory.segments import SegmentFile
from tests.support.processes.waiting import until

HASHING_BLOCKED_BY = "EVERSTEP_TEST_HASHING_BLOCKED_BY"
"""The environment variable that names the file."""


class SlowAdoption(adoption.SegmentAdoption):
    def _hash(self, segment: SegmentFile, slot: int, header: SlotHeader) -> bool:
        file = Path(os.environ[HASHING_BLOCKED_BY])
        until(lambda: self._stopping or not file.exists(), f"{file} is removed")
        return super()._hash(segment, slot, header)


def main() -> None:
    vault.SegmentAdoption = SlowAdoption  # type: ignore[attr-defined]
    vault.main()


if __name__ == "__main__":
    main()
