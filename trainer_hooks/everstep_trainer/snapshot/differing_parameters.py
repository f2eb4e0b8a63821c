"""Name the parameters that differ between ranks whose digests do, so that a person can find the cause in the script.

A digest covers all parameters of a rank. Once the controller has stopped comparing digests, it asks a few ranks for one
digest for each parameter. They meet at a version that may be committed, and the lowest of them reads what the others
have published.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep_trainer.slots.copy import ParameterKey
from everstep_trainer.slots.layout_exchange import decode_value, poll_values, put_value
from everstep_trainer.state.tensors import list_names

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""Longest wait for the other ranks, which copy the same step."""
MAX_ATTEMPTS = 3
"""Versions at which a rank takes part: others may have heard of the first ones too late."""
MAX_SHOWN = 8


class _ParameterDigests(msgspec.Struct, frozen=True):
    """One rank's digests, and what it computes with: ranks of different kinds may differ without a fault."""

    kind: str
    digests: list[tuple[ParameterKey, str]]


@dataclass(eq=False)
class ParameterComparison:
    """One rank's part in one generation; for the copier thread, except ``request``."""

    _store: Store
    _rank: int
    _clock: Clock
    _stop: threading.Event
    _is_over: Callable[[], bool]
    _kind: str
    _log_fields: Mapping[str, object]

    def __post_init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._attempts = 0

    def request(self, ranks: Iterable[int]) -> None:
        """Let these ranks compare their parameters at the next candidate; from any thread."""
        self._ranks = tuple(sorted(ranks))

    @property
    def is_due(self) -> bool:
        """Whether this rank is to take part at the next candidate."""
        return self._rank in self._ranks and self._attempts < MAX_ATTEMPTS

    def differing(self, step: int, digests: Mapping[ParameterKey, str]) -> str:
        """Publish this rank's digests after ``step``.

        Returns:
            On the lowest of the ranks, the names of some parameters that differ, and how many more do; else "".
        """
        self._attempts += 1
        ranks, prefix = self._ranks, f"parameters/{step}"
        mine = _ParameterDigests(self._kind, list(digests.items()))
        try:
            put_value(self._store, f"{prefix}/{self._rank}", mine)
            if self._rank != min(ranks, default=self._rank):
                return ""
            keys = [f"{prefix}/{rank}" for rank in ranks if rank != self._rank]
            others = [decode_value(body, _ParameterDigests) for body in self._poll(keys)]
        except (EverstepError, RuntimeError) as error:  # torch's errors of the store are RuntimeErrors
            log.info("parameters were not compared after step %d: %s", step, error, extra=dict(self._log_fields))
            return ""
        names = _differing_names([mine, *others])
        if not names:
            return ""
        words = list_names(names, MAX_SHOWN)
        log.warning("parameters differ between ranks after step %d: %s", step, words, extra=dict(self._log_fields))
        return words

    def _poll(self, keys: list[str]) -> list[bytes]:
        return poll_values(
            self._store, keys, stop=self._stop, clock=self._clock, timeout_s=WAIT_S, is_superseded=self._is_over
        )


def _differing_names(ranks: Iterable[_ParameterDigests]) -> list[str]:
    """Return the names of parameters whose digests differ among ranks of one kind and replica group."""
    found: dict[tuple[str, ParameterKey], set[str]] = defaultdict(set)
    for rank in ranks:
        for key, digest in rank.digests:
            found[rank.kind, key].add(digest)
    return list(dict.fromkeys(key.name for (_, key), values in found.items() if len(values) > 1))
