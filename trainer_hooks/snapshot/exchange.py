"""The ranks tell one another their layouts, once in a generation, through its store."""

from __future__ import annotations

import threading

from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import Unavailable
from trainer_hooks.snapshot.layout import Layout, content_digest, decode_layout, encode

FIRST_POLL_S = 0.001
LAST_POLL_S = 0.02


class Exchange:
    """All ranks' layouts, from any thread.

    The store is asked and not waited on: a connection that waits would stand in the way of the training thread's own
    use of it. Bodies are stored by their digest, so that equal layouts (DDP: all of them) cross the store once.

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
        digests = [d.decode() for d in self._get([f"snapshot/{tag}/rank/{r}" for r in range(self._world)], timeout_s)]
        missing = sorted(set(digests) - known.keys())
        bodies = self._get([f"snapshot/{tag}/body/{d}" for d in missing], timeout_s)
        known.update({d: decode_layout(b) for d, b in zip(missing, bodies, strict=True)})
        return [known[d] for d in digests]

    def _put_body(self, tag: str, digest: str, body: bytes) -> None:
        key = f"snapshot/{tag}/body/{digest}"
        if not self._store.check([key]):
            self._store.set(key, body)  # type: ignore[arg-type]  # takes bytes

    def _get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        deadline = self._clock.monotonic() + timeout_s
        poll_s = FIRST_POLL_S
        while keys and not self._store.check(keys):
            if self._stop.wait(poll_s) or self._clock.monotonic() > deadline:
                raise Unavailable("not all ranks have told their layout: no snapshot until they have")
            poll_s = min(LAST_POLL_S, poll_s * 1.5)
        return self._store.multi_get(keys) if keys else []
