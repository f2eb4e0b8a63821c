"""Tell errors that a lost peer causes from errors of the training function, and describe them for reports."""

from __future__ import annotations

import re
import traceback

import torch.distributed as dist

from everstep.vocabulary import GenerationReason

# Beginnings of those errors of gloo and NCCL that are plain RuntimeErrors (torch 2.13, 2.14; gloo's name their source
# file). The last three lines are of nccl2, torch's newer NCCL backend, whose errors of NCCL end with its last error.
# An error that only mentions a connection may come from user code, such as data from the network.
_COMMUNICATION = re.compile(
    r"\[(enforce fail at )?[^\]\s]*gloo/[^\]\s]*:\d+\]|Gloo connectFullMesh failed|\[Rank \d+\]: .*monitoredBarrier"
    r"|NCCL [Ee]rror( in:| \d)"
    r"|[^\n]+: [^\n]*\nNCCL Last Error: "
    r"|NCCL operation (timed out|failed|was cancelled)|NCCL communicator was aborted|Work timed out during finalize"
    r"|Failed to (initialize NCCL communicator|get NCCL unique ID: )"
)
_TRACEBACK = "raceback (most recent call last):"
_TYPES = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)


def is_communication_error(error: BaseException) -> bool:
    """Return whether the error, or one it was raised from, comes from a collective or the rendezvous store."""
    return any(
        isinstance(cause, _TYPES) or (isinstance(cause, RuntimeError) and _COMMUNICATION.match(_error_text(cause)))
        for cause in _chain(error)
    )


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


class UnattributedFailures:
    """Counts communication errors at one step without a lost rank; ``limit`` in a row are the training function's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._step = -1
        self._count = 0

    def count_failure(self, step: int, reason: GenerationReason) -> bool:
        """Count a failure after ``step`` of a generation begun for ``reason``; return whether the limit is reached."""
        again = step == self._step and reason is GenerationReason.COLLECTIVE_FAILED
        self._step, self._count = step, self._count + 1 if again else 1
        return self._count >= self._limit


def describe_error(error: BaseException, limit: int = 4096) -> str:
    """Return the error's class and message in one line; of a worker process's traceback, only the end."""
    lines = [line.strip() for line in _error_text(error).splitlines() if line.strip()]
    if len(lines) > 2 and any(line.endswith(_TRACEBACK) for line in lines):
        lines = [lines[0], lines[-1]]
    kind = type(error).__name__
    return (f"{kind}: {' '.join(lines)}" if lines else kind)[:limit]


def explain_missing_step(error: BaseException) -> str:
    """Return a sentence to add to an error of a training function that had no step left; "" if it explains nothing."""
    if not isinstance(error, NameError):  # UnboundLocalError is one
        return ""
    return (
        " (No step was left when this generation began, so run.steps yielded none, and a variable that only the loop "
        "sets has no value. The training function was called again for the work after its loop. Set the variable "
        "before the loop, or compute it from tracked state)"
    )


def full_traceback(error: BaseException, limit: int = 65_000) -> str:
    """Return the traceback with causes; only the end if it is longer than ``limit`` characters."""
    return _sendable("".join(traceback.format_exception(error)))[-limit:]


def _error_text(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception:  # noqa: BLE001 - as the interpreter does for errors whose text cannot be made
        return "<exception str() failed>"


def _sendable(text: str) -> str:
    """Escape surrogates, which occur in file names that are not text and which no message can hold."""
    return text.encode(errors="backslashreplace").decode()


def clear_frames(error: BaseException | None) -> None:
    """Release every local variable in the error's frames: the model, and with it the old process group."""
    if error is None:
        return
    for cause in _chain(error):
        if cause.__traceback__ is not None:
            traceback.clear_frames(cause.__traceback__)
            cause.__traceback__ = None
