"""``python -m controller.trial_process PARENT``: decides a journal again under another policy, as standard input asks,
and says on standard output what came of it. It ends with its parent, of that process id.

No pool of ``multiprocessing``: where the controller is killed, the worker of one waits on for ever, and so do its
semaphores in ``/dev/shm``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec

from controller.core.policy import CorePolicy
from controller.what_if import WhatIf, what_if
from everstep.errors import BY_CODE, EverstepError, Unavailable
from everstep.lineage import die_with_parent


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """``since``: unix seconds. ``journal``: a directory."""

    journal: str
    policy: CorePolicy
    since: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, or the code and words of the error for which nothing was."""

    found: WhatIf | None = None
    code: str = ""
    message: str = ""


async def tried(trial: Trial) -> WhatIf:
    """What that policy would have done; who is cancelled meanwhile ends the process.

    Raises NotFound where nothing is recorded, MalformedMessage, and Unavailable where the process ended without a word.
    """
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        said, _ = await process.communicate(msgspec.msgpack.encode(trial))
    except BaseException:
        process.kill()
        await process.wait()
        raise
    try:
        outcome = msgspec.msgpack.decode(said, type=Outcome)
    except msgspec.DecodeError as error:
        raise Unavailable(f"the trial's process ended with status {process.returncode}: try again") from error
    if outcome.found is None:
        raise BY_CODE.get(outcome.code, EverstepError)(outcome.message)
    return outcome.found


def _outcome(asked: bytes) -> Outcome:
    trial = msgspec.msgpack.decode(asked, type=Trial)
    try:
        return Outcome(found=what_if(Path(trial.journal), trial.policy, trial.since))
    except EverstepError as error:
        return Outcome(code=error.code, message=str(error))


def main() -> None:
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    sys.stdout.buffer.write(msgspec.msgpack.encode(_outcome(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
