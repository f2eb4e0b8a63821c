"""Whether the state that is taken to be alike on all ranks is so: found out before a loss makes it matter.

Of what is neither a module nor an optimizer each rank stores its own, and where that is gone takes another rank's:
right for a schedule, wrong for how far a rank has read its own file. So once in WINDOW steps ranks that hold the same
tensors compare digests, through the generation's store: who comes first publishes, the others look when they have
stored the next version. Nobody waits, and training goes on whatever is found.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from torch._C._distributed_c10d import Store

from trainer_hooks.one_rank import FIELDS
from trainer_hooks.snapshot.blob import Blob
from trainer_hooks.snapshot.layout import Layout, content_digest

log = logging.getLogger(__name__)

WINDOW = 64
MOST_FIELDS = 100
"""Of one object's state: what has more is compared as a whole."""


class _Stored(msgspec.Struct):
    """What is read of a rank's Python state (python_state.encode)."""

    objects: dict[str, msgspec.Raw]


_stored = msgspec.msgpack.Decoder(_Stored)
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_digests = msgspec.msgpack.Decoder(dict[str, str])


class Alikeness:
    """One rank's part, in one generation; for one thread beside the training thread.

    Args:
        store: the generation's, with its prefix.
        where: the fields of the log.
    """

    def __init__(self, store: Store, rank: int, world_size: int, where: Mapping[str, object]) -> None:
        self._store = store
        self._rank = rank
        self._over = world_size == 1
        self._where = where
        self._window = -1
        self._open: tuple[str, int, dict[str, str]] | None = None
        self._stage: tuple[Layout, str] | None = None

    def stored(self, step: int, layout: Layout, blob: Blob) -> None:
        """A version was stored, with this Python state. Raises what the store raises."""
        if self._over:
            return
        self._look()
        if step // WINDOW == self._window:
            return
        self._window = step // WINDOW
        if mine := digests(blob.data()):
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
            extra=dict(self._where),
        )

    def _stage_of(self, layout: Layout) -> str:
        """The same on ranks that hold the same tensors, or parts of them: only from these is anything taken."""
        if self._stage is None or self._stage[0] is not layout:
            self._stage = layout, content_digest("\0".join(part.name for part in layout.parts).encode())
        return self._stage[1]


def digests(data: bytes) -> dict[str, str]:
    """Of a rank's Python state: by object and field, but for what is said to be one rank's."""
    found: dict[str, str] = {}
    for key, raw in _stored.decode(data).objects.items():
        try:
            fields = _fields.decode(raw)
        except msgspec.ValidationError:  # no mapping with names for keys
            fields = {}
        if fields.keys() == FIELDS:
            continue
        if 0 < len(fields) <= MOST_FIELDS:
            found |= {f"{key}.{field}": content_digest(bytes(value)) for field, value in fields.items()}
        else:
            found[key] = content_digest(bytes(raw))
    return found
