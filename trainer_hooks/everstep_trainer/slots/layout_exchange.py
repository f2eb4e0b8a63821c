"""Exchange all ranks' layouts through their generation's store, in rounds that all ranks join.

Round 0 exists from the beginning. A rank whose layout changes opens the next round, at any step, and all ranks publish
their layouts again, including unchanged ones. Ranks that wait in a round notice the next one there. Ranks that have
planned check the store from time to time, but not while versions are committed: a rank waiting in a newer round stores
no version, so none could be committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from everstep.clock import Clock
from everstep.errors import DECODE_ERRORS, MalformedMessage, Unavailable
from everstep_trainer.state.layout import Layout, content_digest, decode_layout, encode
from everstep_trainer.state.python_state import FIELDS
from everstep_trainer.state.python_value_codec import Blob
from everstep_trainer.state.tensors import list_names

# ---- messages between ranks through their generation's store

T = TypeVar("T", bound=msgspec.Struct)


def put_value(store: Store, key: str, value: msgspec.Struct) -> None:
    """Publish a value; the store's values are bytes in C++ and text in its Python signature."""
    store.set(key, msgspec.msgpack.encode(value))  # type: ignore[arg-type]


class Pauses(NamedTuple):
    """Seconds between two looks into the store: each pause is ``growth`` times as long as the one before."""

    first_s: float
    last_s: float
    growth: float


SHORT_PAUSES = Pauses(0.001, 0.02, 1.5)
"""For values that come soon."""
LONG_PAUSES = Pauses(0.0005, 0.25, 1.25)
"""For values that a rank may keep others waiting for, such as one that loads its data: many ranks ask one store."""


def _look_until_published(store: Store, keys: list[str], pauses: Pauses, pause: Callable[[float], None]) -> list[bytes]:
    """Return the values of ``keys`` once all are there. ``pause`` waits for some seconds, or raises to give up.

    It looks again and again: a wait of the store's own cannot be interrupted, blocks other threads that use the same
    connection, and prints two warnings of torch where it times out.
    """
    pause_s = pauses.first_s
    while keys and not store.check(keys):
        pause(pause_s)
        pause_s = min(pauses.last_s, pause_s * pauses.growth)
    return store.multi_get(keys) if keys else []


def wait_for_values(store: Store, keys: Sequence[str], clock: Clock, timeout_s: float) -> list[bytes]:
    """Return the values once all are there; for the training thread. Raises DistStoreError after ``timeout_s``."""
    deadline = clock.monotonic() + timeout_s

    def pause(seconds: float) -> None:
        if clock.monotonic() > deadline:
            raise DistStoreError(f"not all ranks have published {keys[0]} and the like in {timeout_s:.0f} s")
        time.sleep(seconds)

    return _look_until_published(store, list(keys), LONG_PAUSES, pause)


def decode_value(body: bytes, kind: type[T]) -> T:
    """Decode a value. Raises MalformedMessage."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"another rank's {kind.__name__} cannot be read: {error}") from error


ROUND_CHECK_S = 3.0
"""Shortest time between a planned rank's checks for a newer round, which cost a large job's store many requests."""
FIRST_ROUND_CHECK_S = 0.1
"""The same after a new round, doubling each time: if one rank has changed others probably will."""


class RoundSuperseded(Unavailable):
    """The ranks have left the awaited round for a newer one."""


def poll_values(
    store: Store,
    keys: list[str],
    *,
    stop: threading.Event,
    clock: Clock,
    timeout_s: float,
    is_superseded: Callable[[], bool] = lambda: False,
    pauses: Pauses = SHORT_PAUSES,
) -> list[bytes]:
    """Return the values once all are there; for other threads. Raises Unavailable after ``timeout_s`` or once ``stop``
    is set, RoundSuperseded if ``is_superseded``."""
    deadline = clock.monotonic() + timeout_s

    def pause(seconds: float) -> None:
        if stop.wait(seconds) or clock.monotonic() > deadline:
            raise Unavailable(f"not all ranks have published {keys[0]} and the like")
        if is_superseded():
            raise RoundSuperseded("ranks make a new plan")

    return _look_until_published(store, keys, pauses, pause)


class LayoutRound(NamedTuple):
    """All ranks' layouts, with equal ones as one object, used by all ranks from step ``since_step`` on."""

    number: int
    layouts: list[Layout]
    since_step: int


@dataclass(eq=False)
class LayoutExchange:
    """The exchange of layouts, for the copier thread; equal ones are stored once. ``stop`` ends the waits."""

    _store: Store
    _rank: int
    _world: int
    _clock: Clock
    _stop: threading.Event

    def __post_init__(self) -> None:
        self._round = -1
        self._mine: Layout | None = None
        self._check_s = ROUND_CHECK_S
        self._check_at = float("-inf")

    def layouts(self, mine: Layout, since: int, timeout_s: float) -> LayoutRound:
        """Return the newest round; open a new one if ``mine`` is another object. ``since``: the first step not stored
        yet. Raises Unavailable, or RoundSuperseded if it must be called again."""
        if self._world == 1:
            self._round, self._mine = self._round + (mine is not self._mine), mine
            return LayoutRound(self._round, [mine], since)
        body = encode(mine)
        digest = content_digest(body)
        known = {digest: mine}
        number = self._join(mine)
        if number != self._round:  # a published layout stays, since others may have read it
            self._round, self._mine = number, mine
            if not self._store.check([_key(number, "body", digest)]):
                self.put(_key(number, "body", digest), body)
            self._store.set(_key(number, "rank", self._rank), f"{digest} {since}")
            self._check_s = FIRST_ROUND_CHECK_S if number else ROUND_CHECK_S
        self._check_at = self._clock.monotonic() + self._check_s
        get = partial(self.get, timeout_s=timeout_s)
        published = [each.decode().split() for each in get([_key(number, "rank", rank) for rank in range(self._world)])]
        missing = sorted({each for each, _ in published} - known.keys())
        bodies = get([_key(number, "body", each) for each in missing])
        known.update({d: decode_layout(b) for d, b in zip(missing, bodies, strict=True)})
        return LayoutRound(number, [known[each] for each, _ in published], max(int(step) for _, step in published))

    def is_superseded(self) -> bool:
        """Return whether ranks have left the round of this rank's plan; mostly without asking the store."""
        now = self._clock.monotonic()
        if self._world == 1 or self._round < 0 or now < self._check_at:
            return False
        self._check_s = min(ROUND_CHECK_S, 2 * self._check_s)
        self._check_at = now + self._check_s
        return self._is_over(self._round)

    def handle_commit(self) -> None:
        """Record that a version, which all ranks stored, was committed; postpones the next check. From any thread."""
        self._check_at = self._clock.monotonic() + ROUND_CHECK_S

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not published their layout in this rank's round; asks for each."""
        return [rank for rank in range(self._world) if not self._store.check([_key(self._round, "rank", rank)])]

    def _join(self, mine: Layout) -> int:
        number = max(self._round, 0)
        if self._mine is not None and mine is not self._mine:
            number += 1
            self._store.set(_key(number, "open"), "")
        while self._is_over(number):
            number += 1
        return number

    def _is_over(self, number: int) -> bool:
        return self._store.check([_key(number + 1, "open")])

    def put(self, key: str, body: bytes) -> None:
        """Publish another value that ranks plan by."""
        self._store.set(key, body)  # type: ignore[arg-type]  # takes bytes

    def get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        """Return the values of ``keys`` in this rank's round, once all are there. Raises as ``layouts`` does."""
        superseded = partial(self._is_over, self._round)
        return poll_values(
            self._store, keys, stop=self._stop, clock=self._clock, timeout_s=timeout_s, is_superseded=superseded
        )


def _key(number: int, *parts: object) -> str:
    return "/".join(map(str, ("snapshot", number, *parts)))


# ---- comparison of Python state that is taken to be the same on all ranks
#
# Each rank stores its own state of objects that are neither modules nor optimizers; if that is lost, it takes another
# rank's. This is right for a schedule, and wrong for a rank's position in its own file. So once in COMPARE_WINDOW
# steps, the first rank publishes digests through the generation's store, and the others with the same tensors compare
# when they have stored the next version. No rank waits.

log = logging.getLogger(__name__)

COMPARE_WINDOW = 64
MAX_FIELDS = 100  # most fields of one object; state with more is compared as a whole


class _Stored(msgspec.Struct):
    """The part of a rank's Python state (python_state.encode) that is read here."""

    objects: dict[str, msgspec.Raw]


_stored = msgspec.msgpack.Decoder(_Stored)
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_digests = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(eq=False)
class PythonStateComparison:
    """One rank's part of the comparison in one generation; for one thread other than the training thread."""

    _store: Store
    _rank: int
    _world_size: int
    _log_fields: Mapping[str, object]

    def __post_init__(self) -> None:
        self._over = self._world_size == 1
        self._window = -1
        self._open: tuple[str, int, dict[str, str]] | None = None
        self._stage: tuple[Layout, str] | None = None

    def compare(self, step: int, layout: Layout, blob: Blob) -> None:
        """Compare the Python state of a version just stored. Raises what the store raises."""
        if self._over:
            return
        self._check_answers()
        if step // COMPARE_WINDOW == self._window:
            return
        self._window = step // COMPARE_WINDOW
        if mine := field_digests(blob.data()):
            key = f"alike/{step}/{self._stage_of(layout)}"
            if self._store.add(f"{key}/first", 1) == 1:
                self._store.set(key, msgspec.msgpack.encode(mine))  # type: ignore[arg-type]  # takes bytes
            else:
                self._open = key, step, mine

    def _check_answers(self) -> None:
        if self._open is None or not self._store.check([self._open[0]]):
            return
        key, step, mine = self._open
        self._open = None
        theirs = _digests.decode(self._store.get(key))
        different = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
        if different:
            self._over = True
            if self._store.add("alike/reported", 1) == 1:
                self._warn_different(step, different)

    def _warn_different(self, step: int, different: list[str]) -> None:
        objects = sorted({name.partition(".")[0] for name in different})
        log.warning(
            "tracked state differs between ranks: %s of rank %d at step %d differs from a rank with the same tensors; "
            "after a node loss one may be restored in place of the other. Derive it from the step, or name it in "
            "run.track(..., per_rank=%s). If any rank's state will do, ignore this warning",
            list_names(different, 5),
            self._rank,
            step,
            objects,
            extra=dict(self._log_fields),
        )

    def _stage_of(self, layout: Layout) -> str:
        """Return a key that is equal on ranks with the same tensors, or parts of them."""
        if self._stage is None or self._stage[0] is not layout:
            self._stage = layout, content_digest("\0".join(part.name for part in layout.parts).encode())
        return self._stage[1]


def field_digests(data: bytes) -> dict[str, str]:
    """Return digests of a rank's Python state by object and field, without per-rank objects."""
    found: dict[str, str] = {}
    for key, raw in _stored.decode(data).objects.items():
        try:
            fields = _fields.decode(raw)
        except msgspec.ValidationError:  # no mapping with string keys
            fields = {}
        if fields.keys() == FIELDS:
            continue
        if 0 < len(fields) <= MAX_FIELDS:
            found |= {f"{key}.{field}": content_digest(bytes(value)) for field, value in fields.items()}
        else:
            found[key] = content_digest(bytes(raw))
    return found
