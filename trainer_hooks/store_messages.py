"""Messages of ranks to one another through their generation's store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from everstep.clock import Clock
from everstep.errors import UNREADABLE, MalformedMessage

SLICE_S = 0.25
"""A wait in the store cannot be interrupted; one of this length can, between two of them."""

T = TypeVar("T", bound=msgspec.Struct)


def put(store: Store, key: str, value: msgspec.Struct) -> None:
    """The store's values are bytes for C++, and text for its Python signature."""
    store.set(key, msgspec.msgpack.encode(value))  # type: ignore[arg-type]


def wait_for(store: Store, keys: Sequence[str], clock: Clock, patience_s: float) -> list[bytes]:
    """The values, once all are there; for the training thread. Raises DistStoreError after ``patience_s``."""
    deadline = clock.monotonic() + patience_s
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=SLICE_S))
            break
        except DistStoreError:
            if clock.monotonic() > deadline:
                raise
    return store.multi_get(list(keys))


def decode(body: bytes, kind: type[T]) -> T:
    """Raises MalformedMessage."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise MalformedMessage(f"another rank's {kind.__name__} cannot be read: {error}") from error
