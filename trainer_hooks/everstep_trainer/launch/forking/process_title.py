"""Name a forked process in ps and top by its rank, instead of by the fork server's command line, which forks share.

A title is such as ``everstep: rank 1 of vit (train.py)``. It has the script's name, because people find training
processes by that. Names of processes (``comm``) stay. Without the package setproctitle nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from everstep.printable_text import valid_unicode
from everstep_trainer.launch.forking.process_setup import process_name, set_process_name

PREFIX = "everstep: "
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Environment variable that setproctitle reads when it sets the first title of a process."""

_subject = ""
"""The job and the script, which titles of this process end with; empty before the first title."""


def set_first_title(role: str, job: str, script: str) -> None:
    """Set the title of a process that was just forked.

    Args:
        role: What it is, such as ``rank 1`` or ``standby``.
        job: Name of the job.
        script: Path of the script, or the module's name.
    """
    global _subject  # one per process, like its title
    _subject = f" of {job} ({os.path.basename(script)})"
    _set(f"{PREFIX}{role}{_subject}")


def change_title(role: str) -> None:
    """Name another role of this process, unless there is no title yet, or the script has set one of its own."""
    if not _subject or "setproctitle" not in sys.modules:
        return
    import setproctitle

    if setproctitle.getproctitle().startswith(PREFIX):
        _set(f"{PREFIX}{role}{_subject}")


def _set(title: str) -> None:
    try:
        import setproctitle
    except ImportError:
        return
    name = process_name()
    with _environment_kept():
        setproctitle.setproctitle(valid_unicode(title))
    set_process_name(name)  # setproctitle changes it, too


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Let titles use the room of the command line only: tools read the environment, which is behind it."""
    before = os.environ.get(_KEEP_ENVIRONMENT)
    os.environ[_KEEP_ENVIRONMENT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_KEEP_ENVIRONMENT]
