"""Which stored checkpoints may go. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from everstep.ids import Version

_FOLDER = re.compile(r"step-(\d{8,19})-g(\d{1,10})")


FEWEST_LEFT = 2
"""Checkpoints that stay however few are asked for: the newest, and the one before it. The controller may never hear
that the newest is whole, if the vault that made it so is lost with its answer: it goes back to what it has counted."""


class Stored(msgspec.Struct, frozen=True):
    """A checkpoint on storage. ``whole_at``: when its ``.metadata`` was written, unix seconds; None where it was not
    written."""

    version: Version
    whole_at: float | None


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
    """The versions that may go: all whole ones but the ``keep`` that were written last and those ``named``.

    What was written last is newest, whatever its number: a job that starts again from storage counts its generations
    from 1 again. One that is not whole goes when the newest whole one is not before its step: nobody will complete it.
    The newest whole one always stays.
    """
    found = list(stored)
    whole = sorted((s.whole_at, s.version) for s in found if s.whole_at is not None)
    if not whole:
        return []
    kept = {version for _, version in whole[-max(keep, 1) :]} | set(named)
    newest = whole[-1][1]
    return sorted(
        s.version for s in found if s.version not in kept and (s.whole_at is not None or s.version.step <= newest.step)
    )
