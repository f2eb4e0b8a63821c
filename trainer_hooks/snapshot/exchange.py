"""The ranks tell one another their layouts, once in a generation, through its store."""

from __future__ import annotations

import threading
from functools import partial

from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import Unavailable
from trainer_hooks.snapshot.layout import Layout, content_digest, decode_layout, encode

FIRST_POLL_S = 0.001
LAST_POLL_S = 0.02


def poll(store: Store, keys: list[str], *, stop: threading.Event, clock: Clock, timeout_s: float) -> list[bytes]:
    """The values of ``keys``, once all are there; for threads beside the training thread.

    The store is asked and not waited on: a connection that waits would stand in the way of the training thread's own
    use of it. Raises Unavailable when they are not there in time or ``stop`` was set.
    """
    deadline = clock.monotonic() + timeout_s
    pause_s = FIRST_POLL_S
    while keys and not store.check(keys):
        if stop.wait(pause_s) or clock.monotonic() > deadline:
            raise Unavailable(f"not all ranks have told what the others wait for: {keys[0]} or one like it")
        pause_s = min(LAST_POLL_S, pause_s * 1.5)
    return store.multi_get(keys) if keys else []


class Exchange:
    """All ranks' layouts, from any thread.

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

    def layouts(self, tag: str, mine: Layout, timeout_s: float) -> list[Layout]:
        """Every rank's layout under ``tag``; equal ones are one object.

        Raises Unavailable when a rank's is not there in time or ``stop`` was set.
        """
        body = encode(mine)
        digest = content_digest(body)
        known = {digest: mine}
        if self._world == 1:
            return [mine]
        self._put_body(tag, digest, body)
        self._store.set(f"snapshot/{tag}/rank/{self._rank}", digest)
        get = partial(self.get, timeout_s=timeout_s)
        digests = [digest.decode() for digest in get([f"snapshot/{tag}/rank/{r}" for r in range(self._world)])]
        missing = sorted(set(digests) - known.keys())
        bodies = get([f"snapshot/{tag}/body/{d}" for d in missing])
        known.update({d: decode_layout(b) for d, b in zip(missing, bodies, strict=True)})
        return [known[d] for d in digests]

    def put(self, key: str, body: bytes) -> None:
        """Publishes something else that ranks plan by."""
        self._store.set(key, body)  # type: ignore[arg-type]  # takes bytes

    def get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        """The values of ``keys``, once all are there. Raises as ``layouts`` does."""
        return poll(self._store, keys, stop=self._stop, clock=self._clock, timeout_s=timeout_s)

    def _put_body(self, tag: str, digest: str, body: bytes) -> None:
        key = f"snapshot/{tag}/body/{digest}"
        if not self._store.check([key]):
            self._store.set(key, body)  # type: ignore[arg-type]  # takes bytes
