"""What launcher, fork server and workers say to one another. Never leaves the machine, so it needs no version."""

from __future__ import annotations

from typing import Any

import msgspec


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the fork server: fork a child that calls ``target`` (``module:function``).

    The function is called with the tuple of descriptors that came along, and ``arguments`` by keyword. ``environment``
    is laid over the fork server's own; None removes a name. ``serial`` is the launcher's number for this child.
    """

    serial: int
    target: str
    arguments: dict[str, Any] = {}
    environment: dict[str, str | None] = {}


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the fork server: send ``number`` to a child (SIGKILL: to its whole process group). A no-op once it is dead.

    It goes through the fork server because only the parent can be sure that the pid still names its child.
    """

    serial: int
    number: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: fork a fork server. Its end of the channel to the launcher comes along."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: what was to be imported is."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: the child exists."""

    serial: int
    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: the child is dead and reaped; one of ``code`` and ``signal`` is set."""

    serial: int
    pid: int
    code: int | None
    signal: int | None


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a worker: the script has run as far as ``trainer_hooks.main``."""


class Promote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a standby: you are ``local_rank`` now."""

    local_rank: int


ToForkServer = Fork | Signal
FromForkServer = Ready | Forked | Exited
