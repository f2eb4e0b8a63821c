"""Whose fault an exception is: a lost peer shows as an error in the training function, and is none of its own."""

from __future__ import annotations

import re
import traceback

import torch.distributed as dist

from everstep.vocabulary import GenerationReason

# How the errors of gloo and NCCL begin that are plain RuntimeErrors (torch 2.13: gloo's name their source file). What
# only speaks of a connection may come from a user's own: data from the network, say.
_COMMUNICATION = re.compile(
    r"\[(enforce fail at )?[^\]\s]*gloo/[^\]\s]*:\d+\]|Gloo connectFullMesh failed|\[Rank \d+\]: .*monitoredBarrier"
    r"|NCCL [Ee]rror( in:| \d)"
)
_TRACEBACK = "raceback (most recent call last):"
_TYPES = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)


def is_communication_error(error: BaseException) -> bool:
    """Whether the error, or one it was raised from, is that of a collective or the rendezvous store."""
    return any(_is_one(e) for e in _chain(error))


def _is_one(error: BaseException) -> bool:
    if isinstance(error, _TYPES):
        return True
    return isinstance(error, RuntimeError) and _COMMUNICATION.match(_words(error)) is not None


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


class Unexplained:
    """Communication errors of this rank in groups that had come about, generation after generation, at the same step,
    with nobody lost: whatever raises them does so at each try.

    Args:
        limit: with so many in a row they are the training function's own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._step = -1
        self._count = 0

    def give_up(self, step: int, reason: GenerationReason) -> bool:
        """Counts one after step ``step`` of a generation begun for ``reason``; whether the limit is reached."""
        again = step == self._step and reason is GenerationReason.COLLECTIVE_FAILED
        self._step, self._count = step, self._count + 1 if again else 1
        return self._count >= self._limit


def describe(error: BaseException, limit: int = 4096) -> str:
    """One line: the class and what it says; of a traceback in there (a worker process's), the end."""
    lines = [line.strip() for line in _words(error).splitlines() if line.strip()]
    if len(lines) > 2 and any(line.endswith(_TRACEBACK) for line in lines):
        lines = [lines[0], lines[-1]]
    kind = type(error).__name__
    return (f"{kind}: {' '.join(lines)}" if lines else kind)[:limit]


def full_traceback(error: BaseException, limit: int = 65_000) -> str:
    """The traceback with causes; cut in front where it is longer than ``limit`` characters, since the end says most."""
    return _sendable("".join(traceback.format_exception(error)))[-limit:]


def _words(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception:  # noqa: BLE001 - as the interpreter does: an error that cannot be told is one all the same
        return "<exception str() failed>"


def _sendable(text: str) -> str:
    """Without surrogates, which names of files have where they are not text, and which no message can hold."""
    return text.encode(errors="backslashreplace").decode()


def release_frames(error: BaseException | None) -> None:
    """Lets go of every local variable the error's frames hold: the model, and with it the old process group."""
    if error is None:
        return
    for one in _chain(error):
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
