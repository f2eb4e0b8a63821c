"""How the ranks of a generation agree on a checkpoint on storage: rank 0 names one, all read it and say how that went.

Somebody may write to the place, or remove from it, while they look: each for itself they would find different things.
Only when all have what they need do they go on; where one finds it damaged or gone, rank 0 looks again and names the
next one. Storage that fails for a moment is asked again first (``storage_patience``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import EverstepError, NotRestorable
from everstep_trainer.importers.storage_reads import Damaged, patiently, pause
from everstep_trainer.snapshot.exchange import decode, put, wait_for

log = logging.getLogger(__name__)

PATIENCE_S = 3600.0
"""For a rank that reads: storage may be slow for one and quick for another. A rank that is lost ends the generation."""


class Named(msgspec.Struct, frozen=True):
    """What rank 0 says: a checkpoint to try, or why there is none."""

    url: str = ""
    error: str = ""


class Read(msgspec.Struct, frozen=True):
    """How it went for one rank: ``unusable`` where another checkpoint may serve, ``error`` where none would."""

    unusable: str = ""
    error: str = ""


class Attempt(Protocol):
    """A checkpoint that was read into a rank's tensors."""

    def finish(self) -> int:
        """Puts everything else into the objects; returns the step."""

    def undo(self) -> None:
        """Takes away what was not there before, for another checkpoint that may not have it."""


class StoredChoice:
    """One rank's voice. The same code on all ranks.

    Args:
        store: the generation's.
        unusable: hears of each checkpoint that this rank found damaged or gone, with the reason.
        wait: before storage that failed is asked again, so many seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        clock: Clock,
        unusable: Callable[[str, str], None],
        wait: Callable[[float], None] = pause,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._unusable = unusable
        self._wait = wait

    def load(self, places: Sequence[str], read: Callable[[str], Attempt]) -> int:
        """Tries the checkpoints at ``places`` in this order, and in a folder of several the newest first, until all
        ranks could read one; returns its step, or 0 where there are no places. What rank 0 was told counts for all.

        Raises NotRestorable, on all ranks alike, where none can be used or the objects are others than were stored;
        DistStoreError where a rank says nothing for PATIENCE_S.
        """
        failed: dict[str, str] = {}
        while True:
            number = len(failed)
            url = self._named(number, places, failed)
            if not url:
                return 0
            attempt, said, raised = self._try(url, read)
            verdict = self._settle(number, said)
            if raised is not None and said.error:
                raise raised
            if verdict.error:
                raise NotRestorable(verdict.error)
            if not verdict.unusable:
                assert attempt is not None
                return attempt.finish()
            if attempt is not None:
                attempt.undo()
            failed[url] = verdict.unusable
            log.warning("%s is not used: %s", url, verdict.unusable)

    def _named(self, number: int, places: Sequence[str], failed: dict[str, str]) -> str:
        """What rank 0 names; empty where it was told of no place."""
        key = f"stored/named/{number}"
        if self._rank == 0:
            named = self._look(places, failed)
            put(self._store, key, named)
        else:
            (body,) = self._get([key])
            named = decode(body, Named)
        if named.error:
            raise NotRestorable(named.error)
        return named.url

    def _look(self, places: Sequence[str], failed: dict[str, str]) -> Named:
        why = [f"{url}: {reason}" for url, reason in failed.items()]
        try:
            url = patiently(lambda: next((url for url in _found(places) if url not in failed), ""), self._wait)
        except (EverstepError, OSError) as error:
            if not failed:
                return Named(error=str(error))
            return Named(error="; ".join([*why, str(error)]))
        if url or not places:
            return Named(url)
        return Named(error=f"no checkpoint on storage can be used: {'; '.join(why)}")

    def _try(self, url: str, read: Callable[[str], Attempt]) -> tuple[Attempt | None, Read, Exception | None]:
        try:
            return patiently(lambda: read(url), self._wait), Read(), None
        except (Damaged, OSError) as error:
            self._unusable(url, str(error))
            return None, Read(unusable=f"rank {self._rank}: {error}"), error
        except (EverstepError, RuntimeError, ValueError, TypeError, LookupError) as error:
            return None, Read(error=f"rank {self._rank}: {error}"), error

    def _settle(self, number: int, said: Read) -> Read:
        """What all ranks' words come to."""
        put(self._store, f"stored/read/{number}/{self._rank}", said)
        key = f"stored/verdict/{number}"
        if self._rank == 0:
            told = [decode(b, Read) for b in self._get([f"stored/read/{number}/{r}" for r in range(self._world_size)])]
            verdict = Read(
                next((one.unusable for one in told if one.unusable), ""),
                next((one.error for one in told if one.error), ""),
            )
            put(self._store, key, verdict)
            return verdict
        (body,) = self._get([key])
        return decode(body, Read)

    def _get(self, keys: list[str]) -> list[bytes]:
        return wait_for(self._store, keys, self._clock, PATIENCE_S)


def _found(places: Sequence[str]) -> Iterator[str]:
    """Everything that is there now. Raises NotRestorable at the end, where one of the places has nothing."""
    from everstep_trainer.importers.checkpoint_files import checkpoints_at  # its imports take longer than a regrouping

    empty: NotRestorable | None = None
    for place in places:
        try:
            yield from checkpoints_at(place)
        except NotRestorable as error:
            empty = empty or error
    if empty is not None:
        raise empty
