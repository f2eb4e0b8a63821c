"""Which stored checkpoints may go. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from everstep.ids import Version

_FOLDER = re.compile(r"step-(\d{8,19})-g(\d{1,10})")


class Stored(msgspec.Struct, frozen=True):
    """A checkpoint on storage; ``whole``: its ``.metadata`` is there."""

    version: Version
    whole: bool


def folder_of(version: Version) -> str:
    """The name of a version's folder: names sort by step."""
    return f"step-{version.step:08d}-g{version.generation}"


def version_of(folder: str) -> Version | None:
    """The version of a folder that ``folder_of`` named; None for any other, which is somebody else's."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    version = Version(int(match[2]), int(match[1]))
    return version if folder_of(version) == folder else None


def superfluous(stored: Iterable[Stored], keep: int, named: Collection[Version] = ()) -> list[Version]:
    """The versions that may go, oldest first: all whole ones but the newest ``keep`` and those ``named``.

    One that is not whole goes when a newer one is whole: nobody will complete it. The newest whole one always stays.
    """
    ordered = sorted(stored, key=lambda s: s.version)
    whole = [s.version for s in ordered if s.whole]
    if not whole:
        return []
    kept = set(whole[-max(keep, 1) :]) | set(named)
    return [s.version for s in ordered if s.version not in kept and (s.whole or s.version < whole[-1])]
