"""Whose fault an exception is: a lost peer shows as an error in the training function, and is none of its own."""

from __future__ import annotations

import re
import traceback

import torch.distributed as dist

# gloo raises RuntimeError with its source path in the text; NCCL's errors come through DistBackendError or as text.
_COMMUNICATION = re.compile(
    r"gloo[/\\]|Gloo |\[(gloo|nccl)|NCCL|ncclRemoteError|ncclSystemError|ncclInternalError"
    r"|Connection (reset|closed|refused)|Broken pipe|Socket (closed|Timeout)"
)
_TYPES = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)


def is_communication_error(error: BaseException) -> bool:
    """Whether the error, or one it was raised from, is that of a collective or the rendezvous store."""
    return any(_is_one(e) for e in _chain(error))


def _is_one(error: BaseException) -> bool:
    if isinstance(error, _TYPES):
        return True
    return isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


def describe(error: BaseException, limit: int = 4096) -> str:
    """One line: the class and what it says."""
    return f"{type(error).__name__}: {error}".strip()[:limit]


def full_traceback(error: BaseException, limit: int = 65_000) -> str:
    """The traceback with causes; cut in front where it is longer than ``limit`` characters, since the end says most."""
    return "".join(traceback.format_exception(error))[-limit:]


def release_frames(error: BaseException | None) -> None:
    """Lets go of every local variable the error's frames hold: the model, and with it the old process group."""
    if error is None:
        return
    for one in _chain(error):
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
