"""The ranks tell one another their layouts through their generation's store: in rounds, all ranks in each.

Round 0 is there from the beginning. A rank whose layout becomes another one opens the next, whatever its step is, and
all tell their layouts once more, those with nothing new as well. Whoever waits in a round hears of the next one there.
Whoever has planned asks the store now and then, but not while versions are committed: a rank that waits in a newer
round stores none, so nothing is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from everstep.clock import Clock
from everstep.errors import DECODE_ERRORS, MalformedMessage, Unavailable
from everstep_trainer.state.blob import Blob
from everstep_trainer.state.layout import Layout, content_digest, decode_layout, encode
from everstep_trainer.state.python_state import FIELDS

# ---- store messages
# Messages of ranks to one another through their generation's store.

STORE_WAIT_SLICE_S = 0.25
"""A wait in the store cannot be interrupted; one of this length can, between two of them."""

T = TypeVar("T", bound=msgspec.Struct)


def put_value(store: Store, key: str, value: msgspec.Struct) -> None:
    """The store's values are bytes for C++, and text for its Python signature."""
    store.set(key, msgspec.msgpack.encode(value))  # type: ignore[arg-type]


def wait_for_values(store: Store, keys: Sequence[str], clock: Clock, timeout_s: float) -> list[bytes]:
    """The values, once all are there; for the training thread. Raises DistStoreError after ``timeout_s``."""
    deadline = clock.monotonic() + timeout_s
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=STORE_WAIT_SLICE_S))
            break
        except DistStoreError:
            if clock.monotonic() > deadline:
                raise
    return store.multi_get(list(keys))


def decode_value(body: bytes, kind: type[T]) -> T:
    """Raises MalformedMessage."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"another rank's {kind.__name__} cannot be read: {error}") from error


FIRST_POLL_S = 0.001
LAST_POLL_S = 0.02
ROUND_CHECK_S = 3.0
"""A rank that has planned asks for a newer round so often at most. A longer time spares the store of a job of many
ranks some requests while the controller is away; after a shorter one snapshots go on sooner where ranks change apart.
"""
FIRST_ROUND_CHECK_S = 0.1
"""The same after ranks have planned anew, and from there on twice as long each time: where one has changed others do,
and one that was late may have told what it had before."""


class RoundSuperseded(Unavailable):
    """What is waited for is of a round that ranks have left for a newer one."""


def poll_values(
    store: Store,
    keys: list[str],
    *,
    stop: threading.Event,
    clock: Clock,
    timeout_s: float,
    is_superseded: Callable[[], bool] = lambda: False,
) -> list[bytes]:
    """The values of ``keys``, once all are there; for threads beside the training thread.

    The store is asked and not waited on: a connection that waits would stand in the way of the training thread's own
    use of it. Raises Unavailable when they are not there in time or ``stop`` was set, Superseded when that is true.
    """
    deadline = clock.monotonic() + timeout_s
    pause_s = FIRST_POLL_S
    while keys and not store.check(keys):
        if stop.wait(pause_s) or clock.monotonic() > deadline:
            raise Unavailable(f"not all ranks have told what the others wait for: {keys[0]} or one like it")
        if is_superseded():
            raise RoundSuperseded("ranks plan anew")
        pause_s = min(LAST_POLL_S, pause_s * 1.5)
    return store.multi_get(keys) if keys else []


class LayoutRound(NamedTuple):
    """What all ranks told: their layouts, of which equal ones are one object. All go by them from step ``since_step``
    on, so that of no version some slots are of this round and others of the one before."""

    number: int
    layouts: list[Layout]
    since_step: int


class LayoutExchange:
    """All ranks' layouts, for the copier thread.

    Bodies are stored by their digest, so that equal layouts (DDP: all of them) cross the store once.

    Args:
        store: the generation's store, with its prefix.
        stop: when set, ``layouts`` gives up.
    """

    def __init__(self, store: Store, rank: int, world: int, clock: Clock, stop: threading.Event) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._clock = clock
        self._stop = stop
        self._round = -1
        self._mine: Layout | None = None
        self._check_s = ROUND_CHECK_S
        self._check_at = float("-inf")

    def layouts(self, mine: Layout, since: int, timeout_s: float) -> LayoutRound:
        """The newest round; one that this rank opens where ``mine`` is another object than the last time.

        ``since``: this rank has stored no step from there on yet. Raises Unavailable when a rank's layout is not there
        in time or ``stop`` was set, Superseded where it is to be called again.
        """
        if self._world == 1:
            self._round, self._mine = self._round + (mine is not self._mine), mine
            return LayoutRound(self._round, [mine], since)
        body = encode(mine)
        digest = content_digest(body)
        known = {digest: mine}
        number = self._join(mine)
        if number != self._round:  # what was told once stands, for others may have read it
            self._round, self._mine = number, mine
            self._put_body(number, digest, body)
            self._store.set(_rank_key(number, self._rank), f"{digest} {since}")
            self._check_s = FIRST_ROUND_CHECK_S if number else ROUND_CHECK_S
        self._check_at = self._clock.monotonic() + self._check_s
        get = partial(self.get, timeout_s=timeout_s)
        told = [said.decode().split() for said in get([_rank_key(number, rank) for rank in range(self._world)])]
        missing = sorted({each for each, _ in told} - known.keys())
        bodies = get([_body_key(number, each) for each in missing])
        known.update({d: decode_layout(b) for d, b in zip(missing, bodies, strict=True)})
        return LayoutRound(number, [known[each] for each, _ in told], max(int(step) for _, step in told))

    def is_superseded(self) -> bool:
        """Whether ranks have left the round that this rank has planned by; mostly without asking."""
        now = self._clock.monotonic()
        if self._world == 1 or self._round < 0 or now < self._check_at:
            return False
        self._check_s = min(ROUND_CHECK_S, 2 * self._check_s)
        self._check_at = now + self._check_s
        return self._is_over(self._round)

    def handle_commit(self) -> None:
        """A version was, which all ranks stored. From any thread."""
        self._check_at = self._clock.monotonic() + ROUND_CHECK_S

    def missing_ranks(self) -> list[int]:
        """Ranks that have not told their layout in this rank's round; asks for each."""
        return [rank for rank in range(self._world) if not self._store.check([_rank_key(self._round, rank)])]

    def _join(self, mine: Layout) -> int:
        number = max(self._round, 0)
        if self._mine is not None and mine is not self._mine:
            number += 1
            self._store.set(_open_key(number), "")
        while self._is_over(number):
            number += 1
        return number

    def _is_over(self, number: int) -> bool:
        return self._store.check([_open_key(number + 1)])

    def put(self, key: str, body: bytes) -> None:
        """Publishes something else that ranks plan by."""
        self._store.set(key, body)  # type: ignore[arg-type]  # takes bytes

    def get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        """The values of ``keys`` of this rank's round, once all are there. Raises as ``layouts`` does."""
        superseded = partial(self._is_over, self._round)
        return poll_values(
            self._store, keys, stop=self._stop, clock=self._clock, timeout_s=timeout_s, is_superseded=superseded
        )

    def _put_body(self, number: int, digest: str, body: bytes) -> None:
        key = _body_key(number, digest)
        if not self._store.check([key]):
            self._store.set(key, body)  # type: ignore[arg-type]  # takes bytes


def _open_key(number: int) -> str:
    return f"snapshot/{number}/open"


def _rank_key(number: int, rank: int) -> str:
    return f"snapshot/{number}/rank/{rank}"


def _body_key(number: int, digest: str) -> str:
    return f"snapshot/{number}/body/{digest}"


# ---- alikeness
# Whether the state that is taken to be alike on all ranks is so: found out before a loss makes it matter.
#
# Of what is neither a module nor an optimizer each rank stores its own, and where that is gone takes another rank's:
# right for a schedule, wrong for how far a rank has read its own file. So once in WINDOW steps ranks that hold the same
# tensors compare digests, through the generation's store: who comes first publishes, the others look when they have
# stored the next version. Nobody waits, and training goes on whatever is found.

log = logging.getLogger(__name__)

COMPARE_WINDOW = 64
MAX_FIELDS = 100
"""Of one object's state: what has more is compared as a whole."""


class _Stored(msgspec.Struct):
    """What is read of a rank's Python state (python_state.encode)."""

    objects: dict[str, msgspec.Raw]


_stored = msgspec.msgpack.Decoder(_Stored)
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_digests = msgspec.msgpack.Decoder(dict[str, str])


class PythonStateComparison:
    """One rank's part, in one generation; for one thread beside the training thread.

    Args:
        store: the generation's, with its prefix.
        log_fields: the fields of the log.
    """

    def __init__(self, store: Store, rank: int, world_size: int, log_fields: Mapping[str, object]) -> None:
        self._store = store
        self._rank = rank
        self._over = world_size == 1
        self._log_fields = log_fields
        self._window = -1
        self._open: tuple[str, int, dict[str, str]] | None = None
        self._stage: tuple[Layout, str] | None = None

    def compare(self, step: int, layout: Layout, blob: Blob) -> None:
        """A version was stored, with this Python state. Raises what the store raises."""
        if self._over:
            return
        self._look()
        if step // COMPARE_WINDOW == self._window:
            return
        self._window = step // COMPARE_WINDOW
        if mine := field_digests(blob.data()):
            key = f"alike/{step}/{self._stage_of(layout)}"
            if self._store.add(f"{key}/first", 1) == 1:
                self._store.set(key, msgspec.msgpack.encode(mine))  # type: ignore[arg-type]  # takes bytes
            else:
                self._open = key, step, mine

    def _look(self) -> None:
        if self._open is None or not self._store.check([self._open[0]]):
            return
        key, step, mine = self._open
        self._open = None
        theirs = _digests.decode(self._store.get(key))
        different = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
        if different:
            self._over = True
            if self._store.add("alike/told", 1) == 1:
                self._tell(step, different)

    def _tell(self, step: int, different: list[str]) -> None:
        named = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if len(different) > 5 else "")
        objects = sorted({name.partition(".")[0] for name in different})
        log.warning(
            "tracked state is not alike on all ranks: %s of rank %d at step %d is another than a rank has that holds "
            "the same tensors. When a rank is lost with its node, another's comes back in its place. Derive it from "
            "the step, or name it, so that it goes to its own rank or is refused: run.track(..., per_rank=%s). Where "
            "any rank's will do, nothing need be done",
            named,
            self._rank,
            step,
            objects,
            extra=dict(self._log_fields),
        )

    def _stage_of(self, layout: Layout) -> str:
        """The same on ranks that hold the same tensors, or parts of them: only from these is anything taken."""
        if self._stage is None or self._stage[0] is not layout:
            self._stage = layout, content_digest("\0".join(part.name for part in layout.parts).encode())
        return self._stage[1]


def field_digests(data: bytes) -> dict[str, str]:
    """Of a rank's Python state: by object and field, but for what is said to be one rank's."""
    found: dict[str, str] = {}
    for key, raw in _stored.decode(data).objects.items():
        try:
            fields = _fields.decode(raw)
        except msgspec.ValidationError:  # no mapping with names for keys
            fields = {}
        if fields.keys() == FIELDS:
            continue
        if 0 < len(fields) <= MAX_FIELDS:
            found |= {f"{key}.{field}": content_digest(bytes(value)) for field, value in fields.items()}
        else:
            found[key] = content_digest(bytes(raw))
    return found
