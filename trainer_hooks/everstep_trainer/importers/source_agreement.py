"""Agree on a checkpoint on storage: rank 0 proposes one, and all ranks read it and report the outcome.

Others may write to the storage or remove files meanwhile, so ranks on their own could find different checkpoints. If
one rank finds the proposed one damaged or gone, rank 0 looks again and proposes the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import EverstepError, NotRestorable
from everstep_trainer.importers.storage_reads import DamagedCheckpoint, retry_read, sleep_in_slices
from everstep_trainer.slots.layout_exchange import decode_value, put_value, wait_for_values

if TYPE_CHECKING:
    from everstep_trainer.importers.importer import CheckpointImport

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
RANK_TIMEOUT_S = 3600.0  # for a rank to finish reading, since storage may be slow for one rank only


class SourceProposal(msgspec.Struct, frozen=True):
    """Rank 0's proposal: a checkpoint to try, or why there is none."""

    url: str = ""
    error: str = ""


class ImportOutcome(msgspec.Struct, frozen=True):
    """One rank's outcome: ``unusable`` if another checkpoint may serve, ``error`` if none would."""

    unusable: str = ""
    error: str = ""


@dataclass(eq=False)
class SourceAgreement:
    """One rank's part in the agreement. All ranks run the same code."""

    store: Store
    rank: int
    world_size: int
    clock: Clock
    on_unusable: Callable[[str, str], None]  # receives each damaged or missing checkpoint, and why
    wait: Callable[[float], None] = sleep_in_slices  # before failing storage is retried

    def load(self, locations: Sequence[str], read: Callable[[str], CheckpointImport]) -> int:
        """Try rank 0's ``locations`` in order until all ranks could read one; return its step, or 0 without locations.
        Raises NotRestorable on all ranks, or DistStoreError if a rank reported nothing for RANK_TIMEOUT_S."""
        failed: dict[str, str] = {}
        while True:
            number = len(failed)
            named = self._from_rank_0(
                f"stored/named/{number}", SourceProposal, partial(self._propose, locations, failed)
            )
            if named.error:
                raise NotRestorable(named.error)
            if not (url := named.url):
                return 0
            attempt, outcome, raised = self._try(url, read)
            put_value(self.store, f"stored/read/{number}/{self.rank}", outcome)
            combined = self._from_rank_0(
                f"stored/combined/{number}", ImportOutcome, partial(self._combine_outcomes, number)
            )
            if raised is not None and outcome.error:
                raise raised
            if combined.error:
                raise NotRestorable(combined.error)
            if not combined.unusable:
                assert attempt is not None
                return attempt.finish()
            if attempt is not None:
                attempt.undo()
            failed[url] = combined.unusable
            log.warning("%s is not used: %s", url, combined.unusable)

    def _from_rank_0(self, key: str, kind: type[T], make: Callable[[], T]) -> T:
        """Return on all ranks what rank 0 makes."""
        if self.rank == 0:
            made = make()
            put_value(self.store, key, made)
            return made
        (body,) = self._get([key])
        return decode_value(body, kind)

    def _propose(self, locations: Sequence[str], failed: dict[str, str]) -> SourceProposal:
        reasons = [f"{url}: {reason}" for url, reason in failed.items()]
        try:
            url = retry_read(lambda: next((url for url in _find_all(locations) if url not in failed), ""), self.wait)
        except (EverstepError, OSError) as error:
            return SourceProposal(error="; ".join([*reasons, str(error)]))
        if url or not locations:
            return SourceProposal(url)
        return SourceProposal(error=f"no checkpoint on storage can be used: {'; '.join(reasons)}")

    def _try(
        self, url: str, read: Callable[[str], CheckpointImport]
    ) -> tuple[CheckpointImport | None, ImportOutcome, Exception | None]:
        try:
            return retry_read(lambda: read(url), self.wait), ImportOutcome(), None
        except (DamagedCheckpoint, OSError) as error:
            self.on_unusable(url, str(error))
            return None, ImportOutcome(unusable=f"rank {self.rank}: {error}"), error
        except (EverstepError, RuntimeError, ValueError, TypeError, LookupError) as error:
            return None, ImportOutcome(error=f"rank {self.rank}: {error}"), error

    def _combine_outcomes(self, number: int) -> ImportOutcome:
        """Return the combined outcome of all ranks."""
        bodies = self._get([f"stored/read/{number}/{rank}" for rank in range(self.world_size)])
        outcomes = [decode_value(body, ImportOutcome) for body in bodies]
        return ImportOutcome(
            next((outcome.unusable for outcome in outcomes if outcome.unusable), ""),
            next((outcome.error for outcome in outcomes if outcome.error), ""),
        )

    def _get(self, keys: list[str]) -> list[bytes]:
        return wait_for_values(self.store, keys, self.clock, RANK_TIMEOUT_S)


def _find_all(locations: Sequence[str]) -> Iterator[str]:
    """Yield all checkpoints that exist now. Raises NotRestorable at the end if a location has none."""
    # imported here: this takes longer than a regrouping
    from everstep_trainer.importers.checkpoint_files import find_checkpoints

    empty: NotRestorable | None = None
    for place in locations:
        try:
            yield from find_checkpoints(place)
        except NotRestorable as error:
            empty = empty or error
    if empty is not None:
        raise empty
